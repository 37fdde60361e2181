"""Makes the golden files of this folder with transformers and PyTorch: `python make_golden.py`. Imports nothing of
kvjax.

Each case is a tiny random model that transformers itself saves in golden/<case>/, and beside it golden.safetensors: a
prompt, the logits of each of its tokens (float32, eager attention, CPU) and the tokens that greedy decoding adds.
rope.json holds rotary frequencies alone. Weights are drawn so large that attention is far from flat and every norm,
bias and scaling shows in the logits.
"""

import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")
PROMPT_TOKENS = 48
GREEDY_TOKENS = 32
VOCAB = 64

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.4, "truncate": False}
PLAIN = {"rope_type": "default"}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def longrope(pairs, original, **more):
    """Scaling with other factors for every pair, for heads of 2 * pairs."""
    short = [round(1 + 0.9 * ((7 * pair) % 5) / 5, 3) for pair in range(pairs)]
    long = [round(1.3 + 6 * pair / pairs + 0.5 * (pair % 3), 3) for pair in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": original} | more


# name: (query heads, KV heads, head dim, width, tied, theta, scaling). The prompts run past
# original_max_position_embeddings, but for those called short, which end before it with all their tokens. OWN: of the
# families that are named, with more fields of config.json.
SHAPES = {
    "g1-d32-tied": (2, 2, 32, 32, True, 1e4, {"rope_type": "default"}),
    "g4-d64-llama3": (8, 2, 64, 16, False, 1e4, LLAMA3),
    "g7-d32-tied-yarn": (14, 2, 32, 14, True, 1e3, YARN),
    "g4-d128-yarn-mscale": (4, 1, 128, 8, False, 1e4, YARN | MSCALE),
    "g7-d64-yarn-factor": (7, 1, 64, 14, False, 1e3, YARN | {"attention_factor": 1.3}),
    "g1-d128-tied-llama3": (2, 2, 128, 12, True, 5e2, LLAMA3 | {"factor": 3.0}),
}
FAMILIES = ("llama", "qwen2", "qwen3")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES |= {"qwen3_5_text": "Qwen3_5ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
BIASES = {"attention_bias": True}, {"mlp_bias": True}
WINDOW, TYPES = {"use_sliding_window": True, "sliding_window": 12}, ["sliding_attention", "full_attention"]
OWN = {
    "llama-g2-d32-attention-bias": ((4, 2, 32, 16, False, 1e4, PLAIN), BIASES[0]),
    "llama-g2-d32-tied-mlp-bias": ((4, 2, 32, 16, True, 1e4, PLAIN), BIASES[1]),
    "llama-g4-d64-llama3-biases": ((4, 1, 64, 16, False, 1e4, LLAMA3), BIASES[0] | BIASES[1]),
    "qwen3-g2-d32-attention-bias": ((4, 2, 32, 16, False, 1e4, PLAIN), BIASES[0]),
    "llama-g2-d32-dynamic": ((4, 2, 32, 16, False, 1e3, DYNAMIC), {}),
    "qwen2-g7-d32-dynamic": ((7, 1, 32, 14, True, 5e2, DYNAMIC), {}),
    "qwen3-g2-d64-dynamic": ((4, 2, 64, 16, False, 1e4, DYNAMIC), {}),
    "llama-g2-d32-longrope-short": ((4, 2, 32, 16, False, 1e3, longrope(16, 96)), {}),
    "llama-g2-d32-longrope-long": ((4, 2, 32, 16, False, 1e3, longrope(16, 16)), {}),
    "llama-g4-d64-longrope-long-biases": ((4, 1, 64, 16, True, 1e4, longrope(32, 32, factor=4.0)), BIASES[0] | BIASES[1]),
    "qwen2-g1-d64-longrope-short": ((2, 2, 64, 12, True, 1e4, longrope(32, 80, attention_factor=1.4)), {}),
    "qwen2-g7-d32-longrope-long": ((7, 1, 32, 14, False, 5e2, longrope(16, 24, attention_factor=0.8)), {}),
    "qwen3-g2-d128-longrope-short": ((2, 1, 128, 12, False, 1e3, longrope(64, 100, factor=2.0)), {}),
    "qwen3-g4-d32-longrope-long": ((4, 1, 32, 16, False, 1e3, longrope(16, 16)), {}),
    "qwen2-g2-d32-window": ((4, 2, 32, 16, False, 1e4, PLAIN), WINDOW | {"max_window_layers": 1}),
    "qwen2-g7-d32-yarn-all-windows": ((7, 1, 32, 14, True, 1e3, YARN), WINDOW | {"max_window_layers": 0}),
    "qwen3-g4-d64-llama3-window": ((4, 1, 64, 16, False, 1e4, LLAMA3), WINDOW | {"layer_types": TYPES}),
    "qwen3-g2-d32-dynamic-window": ((4, 2, 32, 16, True, 1e3, DYNAMIC), WINDOW | {"layer_types": TYPES[::-1]}),
}
CASES = {f"{family}-{name}": (family, shape, {}) for family in FAMILIES for name, shape in SHAPES.items()}
CASES |= {name: (name.partition("-")[0], *case) for name, case in OWN.items()}

BIG = {"max_position_embeddings": 131072}
ROPES = [
    (32, {"rope_type": "default", "rope_theta": 1e4}),
    (128, {"rope_type": "default", "rope_theta": 1e6}),
    (80, {"rope_type": "default", "rope_theta": 123456.0}),
    (64, LLAMA3 | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}),
    (128, LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}),
    (32, LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 0.5, "high_freq_factor": 6.0}),
    (128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    (128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
    (128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": None, "original_max_position_embeddings": 4096}),
    (64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096, "truncate": False}),
    (64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}),
    (64, YARN | MSCALE | {"rope_theta": 1e4, "attention_factor": 0.8}),
    (64, YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": None, "beta_slow": 2}),
    (32, YARN | {"rope_theta": 1e4, "factor": 1.0}),
    (32, YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 1}),
    (64, DYNAMIC | {"rope_theta": 1e4}),
    (128, DYNAMIC | {"rope_theta": 5e5, "factor": 3.7}),
    *((dim, longrope(dim // 2, 4096, rope_theta=1e4, **more)) for dim in (64, 128) for more in ({}, {"factor": 4.0}, {"factor": 1.0})),
    (96, longrope(48, 131072, rope_theta=1e6)),
    (96, longrope(48, 32768, rope_theta=1e6, factor=2.5, attention_factor=1.25)),
    (64, longrope(32, 262144, rope_theta=1e6)),
]


def build(family, shape, fields, seed):
    """A transformers model of the case on the CPU, float32, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    heads, kv_heads, head_dim, width, tied, theta, scaling = shape
    fields = {"num_hidden_layers": 2, "rope_parameters": dict(scaling, rope_theta=theta)} | fields
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64 if scaling["rope_type"] == "yarn" else 128,
        rms_norm_eps=0.03,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=None,
        architectures=[ARCHITECTURES[family]],
        **fields,
    )
    config._attn_implementation = "eager"
    one = (
        0.0 if family in ("qwen3_5_text", "gemma3_text") else 1.0
    )  # what a norm that changes nothing multiplies by, less what the family adds to it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.copy_(0.5 + one + 0.5 * noise)
            elif name.endswith("linear_attn.norm.weight"):
                weight.copy_(1.0 + 0.4 * noise)
            elif name.endswith("A_log"):
                weight.copy_(0.5 * noise)
            elif name.endswith("dt_bias"):
                weight.copy_(noise - 2)
            elif family == "gemma3_text" and name.endswith(("post_attention_layernorm.weight", "feedforward_layernorm.weight")):
                weight.copy_(1.5 + 0.5 * noise)  # what layers add outweighs the embedding, which is the head too
            elif name.endswith("norm.weight"):
                weight.copy_(one + 0.4 * noise)
            elif name.endswith(".bias"):
                weight.copy_(0.7 * noise)
            else:
                size = 0.8 if family == "gemma3_text" and "embed" in name else 1.6
                weight.copy_(noise * (size / weight.shape[1] ** 0.5))
    return model


def prompt(seed):
    """Token ids [1, PROMPT_TOKENS]."""
    import torch

    return torch.randint(0, VOCAB, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1000 + seed))


def run(model, ids):
    """Logits of the prompt, greedy tokens, and the smallest gap between the best and the second logit on the way."""
    import torch

    gaps, tokens = [], ids
    with torch.no_grad():
        logits = model(ids).logits
        for _ in range(GREEDY_TOKENS):
            best = model(tokens).logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
    return logits, tokens[:, ids.shape[1] :], min(gaps)


def sample(family, shape, fields, first_seed=0):
    """(model, ids, logits, greedy) of the first seed whose greedy tokens are varied and nowhere nearly tied."""
    for seed in range(first_seed, first_seed + 200):
        model, ids = build(family, shape, fields, seed), prompt(seed)
        logits, greedy, gap = run(model, ids)
        if gap > 0.005 and len(set(greedy[0].tolist())) >= 10:
            return model, ids, logits, greedy
    raise RuntimeError(f"no seed gives clear and varied greedy tokens for {family} {shape}")


def rope_values(head_dim, parameters):
    """[inverse frequencies], attention factor and, of longrope, the frequencies of sequences past its original
    length."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters), **BIG)
    embedding = LlamaRotaryEmbedding(config)
    values = {"frequencies": embedding.inv_freq.tolist(), "attention_factor": embedding.attention_scaling}
    if parameters["rope_type"] == "longrope":
        embedding(torch.zeros(1), torch.arange(parameters["original_max_position_embeddings"] + 1)[None])
        values["long_frequencies"] = embedding.inv_freq.tolist()
    return values


def write(folder, model, ids, logits, greedy):
    """Write a case: the model as transformers saves it, and what it must give."""
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    tensors = {"ids": ids[0], "logits": logits[0], "greedy": greedy[0]}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "golden.safetensors")


def main():
    """Write every golden file."""
    for name, (family, shape, fields) in CASES.items():
        model, ids, logits, greedy = sample(family, shape, fields)
        write(GOLDEN / name, model, ids, logits, greedy)
        print(name, "logits' standard deviation", float(logits.std()))
    cases = []
    for head_dim, parameters in ROPES:
        cases.append({"head_dim": head_dim, "parameters": parameters} | rope_values(head_dim, parameters))
    (GOLDEN / "rope.json").write_text(json.dumps(cases) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
