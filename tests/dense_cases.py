"""Unusual configurations of dense families, with weights and prompts from seeds: NumPy alone, for make_family_golden.py
too."""

import zlib

import numpy as np

VOCAB, PROMPT, GREEDY = 64, 48, 8
KEPT = 6
"""Last tokens of a prompt whose logits are golden; of a family's first case all are."""

FAMILIES = ("mistral", "ministral", "smollm3", "granite", "seed_oss", "internlm3", "olmo2", "olmo3", "phi3")
NUMBERS = range(8)
CASES = [(family, number) for family in FAMILIES for number in NUMBERS]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}
SCALINGS = (None, {"rope_type": "linear", "factor": 2.5}, LLAMA3, YARN, {"rope_type": "dynamic", "factor": 4.0})
HEADS = ((2, 2), (6, 2), (7, 1), (4, 4), (3, 3), (8, 1), (6, 3), (5, 1))
"""Query and KV heads, by number."""
HEAD_DIMS = (8, 12, 32, 16, 20, 4, 24, 10)
WINDOWS = (12, 5, 20, None, 7, 1, 3, 30)
FULL, SLIDING = "full_attention", "sliding_attention"


def fields_of(family, number):
    """config.json's fields of a case, with RoPE as transformers 4 wrote it."""
    rng = np.random.default_rng(zlib.crc32(f"{family} {number}".encode()))
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    (heads, kv_heads), head_dim, layers = HEADS[number], HEAD_DIMS[number], 2 + number % 2
    fields = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": heads * int(pick(4, 6, 10)),
        "intermediate_size": int(rng.integers(17, 60)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": pick(1e-6, 0.03),
        "tie_word_embeddings": number % 2 == 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_theta": pick(1e4, 500.0),
        "rope_scaling": SCALINGS[number % len(SCALINGS)],
    }
    return fields | OWN[family](number, fields, pick)


def _kinds(number, count):
    return [SLIDING if (place + number) % 3 else FULL for place in range(count)]


def _mistral(number, fields, pick):
    return {"sliding_window": WINDOWS[number]}


def _ministral(number, fields, pick):
    """transformers makes the mask of a window in every model, so each has a length."""
    count = fields["num_hidden_layers"]
    types = {} if number == 0 else {"layer_types": [FULL] * count if number == 3 else _kinds(number, count)}
    return {"sliding_window": WINDOWS[number] or 9} | types


def _smollm3(number, fields, pick):
    count = fields["num_hidden_layers"]
    found = {"attention_bias": number % 3 == 0, "mlp_bias": number % 4 == 1}
    found |= ({"no_rope_layers": [(number + place) % 2 for place in range(count)]}, {"no_rope_layer_interval": 2}, {})[number % 3]
    if number in (2, 5, 6, 7):
        found |= {"use_sliding_window": True, "sliding_window": WINDOWS[number]}
    if number in (6, 7):
        found["layer_types"] = _kinds(number, count)
    return found


def _granite(number, fields, pick):
    found = {"attention_bias": number % 3 == 0, "mlp_bias": number % 2 == 1}
    found |= {
        "embedding_multiplier": (12.0, 1.0, 0.37, 3, 6.5, 1.7, 2, 0.9)[number],
        "residual_multiplier": (0.22, 0.5, 1.0, 1.3)[number % 4],
    }
    found |= {"logits_scaling": (8.0, 0.7, 3, 1.0, 1.3)[number % 5]}
    return found | {"attention_multiplier": (0.0078125, 0.3, 0.11, 1.0, 0.25)[number % 5]}


def _seed_oss(number, fields, pick):
    return {"attention_bias": number % 2 == 0, "attention_out_bias": number % 4 in (1, 2), "mlp_bias": number in (3, 4)}


def _internlm3(number, fields, pick):
    biased = number % 2 == 1
    names = ("qkv_bias", "bias") if number % 3 else ("attention_bias", "mlp_bias")
    return dict.fromkeys(names, biased)


def _olmo2(number, fields, pick):
    return {"attention_bias": number % 3 == 0}


def _olmo3(number, fields, pick):
    count = fields["num_hidden_layers"] = 4 if number < 2 else 2 + number % 2
    found = {"attention_bias": number % 3 == 1, "sliding_window": WINDOWS[number] or 9, "num_hidden_layers": count}
    if number >= 2:
        found["layer_types"] = [[FULL] * count, _kinds(number, count), [SLIDING] * count][number % 3]
    if SCALINGS[number % 5] == SCALINGS[4]:
        found["rope_scaling"] = YARN
    if number in (4, 7):
        full = (found.get("rope_scaling", fields["rope_scaling"]) or {"rope_type": "default"}) | {"rope_theta": 700.0}
        found |= {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 300.0}}}
        del fields["rope_theta"], fields["rope_scaling"]
        found.pop("rope_scaling", None)
    return found


def _longrope(pairs, **more):
    """Other factors for every pair."""
    short = [round(1 + 0.9 * ((7 * pair) % 5) / 5, 3) for pair in range(pairs)]
    long = [round(1.3 + 6 * pair / pairs + 0.5 * (pair % 3), 3) for pair in range(pairs)]
    return {"type": "longrope", "short_factor": short, "long_factor": long} | more


def _phi3(number, fields, pick):
    heads = fields["num_attention_heads"]
    head_dim = (8, 12, 32, 16, 20, 4, 24, 10)[number]
    factor = (1.0, 0.5, 0.75, 1.0, 0.6, 0.5, 0.25, 0.4)[number]
    found = {"head_dim": head_dim, "hidden_size": heads * head_dim, "sliding_window": (None, 5, 20, 12, None, 7, None, 3)[number]}
    if number % 3 == 0:
        del fields["head_dim"], found["head_dim"]
    if factor != 1.0 or number == 3:
        found["partial_rotary_factor"] = factor
    pairs = int(head_dim * factor) // 2
    # From number 4 on the prompt ends before the trained length, so that the short factors hold.
    found["rope_scaling"] = None if number in (0, 5) else _longrope(pairs)
    if found["rope_scaling"]:
        found["original_max_position_embeddings"] = 16 if number < 4 else 64
    return found


OWN = {
    "mistral": _mistral,
    "ministral": _ministral,
    "smollm3": _smollm3,
    "granite": _granite,
    "seed_oss": _seed_oss,
    "internlm3": _internlm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi3": _phi3,
}


def weight_of(family, number, name, shape):
    """A tensor of a case's checkpoint, float32. So large that attention is far from flat and every norm, bias and scale
    shows."""
    noise = np.random.default_rng(zlib.crc32(f"{family} {number} {name}".encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return np.float32(1.0) + np.float32(0.4) * noise
    if name.endswith(".bias"):
        return np.float32(0.7) * noise
    return noise * np.float32(1.6 / shape[1] ** 0.5)


def prompt_of(family, number):
    """Token ids."""
    return np.random.default_rng(zlib.crc32(f"prompt {family} {number}".encode())).integers(0, VOCAB, PROMPT).astype(np.int32)
