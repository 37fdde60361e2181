"""Unusual configurations of families, with weights and prompts from seeds. NumPy alone, for the script with
transformers and the tests."""

import zlib

import numpy as np

VOCAB, PROMPT, GREEDY = 64, 48, 8
KEPT = 6
"""Last tokens of a prompt whose logits are golden; of a family's first case all are."""

FAMILIES = ("helium", "ernie4_5", "gemma", "gemma2", "cohere", "cohere2", "glm", "glm4")
NUMBERS = range(8)
CASES = [(family, number) for family in FAMILIES for number in NUMBERS]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}
SCALINGS = (None, {"rope_type": "linear", "factor": 2.5}, LLAMA3, YARN, {"rope_type": "dynamic", "factor": 4.0})
HEADS = ((2, 2), (6, 2), (7, 1), (4, 4), (3, 3), (8, 1), (6, 3), (5, 1))
"""Query and KV heads, by number."""
HEAD_DIMS = (8, 12, 32, 16, 20, 4, 24, 10)
FULL, SLIDING = "full_attention", "sliding_attention"


def fields_of(family, number):
    """config.json's fields of a case, with RoPE as transformers 4 wrote it."""
    rng = np.random.default_rng(zlib.crc32(f"{family} {number}".encode()))
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    (heads, kv_heads), head_dim, layers = HEADS[number], HEAD_DIMS[number], 2 + number % 2
    fields = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": heads * pick(4, 6, 10),
        "intermediate_size": 2 * int(rng.integers(9, 30)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": pick(1e-6, 0.03),
        "tie_word_embeddings": number % 2 == 0,
        "attention_bias": number % 3 == 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_theta": pick(1e4, 500.0),
        "rope_scaling": SCALINGS[number % len(SCALINGS)],
    }
    return fields | OWN[family](number, fields, pick)


def _helium(number, fields, pick):
    return {"hidden_size": fields["num_attention_heads"] * fields["head_dim"], "mlp_bias": number % 2 == 1}


def _ernie(number, fields, pick):
    return {"use_bias": fields.pop("attention_bias"), "head_dim": None if number == 4 else fields["head_dim"]}


def _gemma(number, fields, pick):
    return {"hidden_act": "gelu" if number % 2 else "gelu_pytorch_tanh"}


def _kinds(number, fields, every):
    """The kinds of layers, or None for the default, with a window shorter than the prompt."""
    count = fields["num_hidden_layers"] = every + number % 2
    types = [SLIDING if (place + number) % 3 else FULL for place in range(count)]
    types = ([FULL] * count, [SLIDING] * count, types)[number % 3] if number >= 2 else None
    return {"layer_types": types, "sliding_window": (12, 5, 20, 1, 7, 16, 3, 30)[number]}


def _gemma2(number, fields, pick):
    caps = {"attn_logit_softcapping": (2.0, 5.0, None, 1.0, 50.0, 3.0, 0.7, 8.0)[number]}
    caps |= {"final_logit_softcapping": (3.0, None, 30.0, 1.5, 10.0, 5.0, 2.0, None)[number]}
    return _kinds(number, fields, 2) | caps | {"query_pre_attn_scalar": (3, 24, 8, 64, 5, 4, 144, 2)[number]}


def _cohere(number, fields, pick):
    own = {"layer_norm_eps": fields.pop("rms_norm_eps"), "logit_scale": pick(0.4, 0.9, 1.7), "use_qk_norm": number % 2 == 1}
    if number == 4:
        del fields["head_dim"]
        own["hidden_size"] = 12 * fields["num_attention_heads"]
    return own


def _cohere2(number, fields, pick):
    own = {"layer_norm_eps": fields.pop("rms_norm_eps"), "logit_scale": pick(0.4, 0.9, 1.7)}
    kinds = _kinds(number, fields, 3)
    return own | kinds | ({"sliding_window_pattern": 2 + number} if kinds["layer_types"] is None else {})


def _glm(number, fields, pick):
    fraction = (0.5, 0.5, 0.25, 0.75, 0.4, 1.0, 0.5, 0.6)[number]  # rotates 4, 6, 8, 12, 8, 4, 12 and 6 elements
    scaling = fields.pop("rope_scaling") or {"rope_type": "default"}
    ropes = {"rope_parameters": scaling | {"rope_theta": fields.pop("rope_theta"), "partial_rotary_factor": fraction}}
    return ropes if number % 2 else {"rope_theta": 1e3, "rope_scaling": scaling, "partial_rotary_factor": fraction}


OWN = {
    "glm": _glm,
    "glm4": _glm,
    "helium": _helium,
    "ernie4_5": _ernie,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "cohere": _cohere,
    "cohere2": _cohere2,
}

OFFSET = ("gemma", "gemma2")
"""Families whose norms multiply by 1 + w."""


def weight_of(family, number, name, shape):
    """A tensor of a case's checkpoint, float32. So large that attention is far from flat and every norm, bias and scale
    shows."""
    noise = np.random.default_rng(zlib.crc32(f"{family} {number} {name}".encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return (0.0 if family in OFFSET else 1.0) + np.float32(0.4) * noise
    if name.endswith(".bias"):
        return np.float32(0.7) * noise
    size = 0.8 if family in OFFSET and "embed" in name else 1.6
    return noise * np.float32(size / shape[1] ** 0.5)


def prompt_of(family, number):
    """Token ids."""
    return np.random.default_rng(zlib.crc32(f"prompt {family} {number}".encode())).integers(0, VOCAB, PROMPT).astype(np.int32)
