"""Makes golden/deepseek with transformers and PyTorch: `python make_deepseek_golden.py`. Imports nothing of kvjax.

Files are as make_golden.py makes them. The models are `DeepseekV32ForCausalLM` whose MLPs are all dense. No query's
choice of tokens hangs on rounding: in the prompt and at every greedy token, the last token taken leads the first one
left by a clear margin.
"""

import make_golden
from make_latent_golden import margins

GOLDEN = make_golden.GOLDEN / "deepseek"
CLEAR = 1e-4
"""Smallest margin between the last score taken and the first one left, as a share of the standard deviation of the
row's scores."""

PLAIN, LINEAR = make_golden.PLAIN, {"rope_type": "linear", "factor": 4.0}
YARN = make_golden.YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}


def sizes(heads, latent, rope, nope, value, index, topk, layers=2, width=40, query=28):
    """Fields of the attention; index: heads and their dim. With few heads many tokens score 0, by ReLU, and are
    tied."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk")
    fields = dict(zip(names, (heads, latent, rope, nope, value, topk), strict=True))
    fields |= {"num_key_value_heads": heads, "index_n_heads": index[0], "index_head_dim": index[1], "num_hidden_layers": layers}
    return fields | {"hidden_size": width, "q_lora_rank": query, "first_k_dense_replace": layers}


# name: fields, base of RoPE and scaling, and whether the embedding is the head too.
CASES = {
    "h1-k8": (sizes(1, 16, 8, 8, 8, (8, 16), 8), 1e4, PLAIN, False),
    "h2-k5-one-layer": (sizes(2, 24, 8, 12, 16, (9, 8), 5, layers=1), 1e3, PLAIN, False),
    "h3-k9-tied": (sizes(3, 24, 8, 20, 12, (10, 16), 9), 1e4, PLAIN, True),
    "h3-k9-yarn": (sizes(3, 24, 8, 20, 12, (12, 16), 9), 1e3, YARN, False),
    "h4-k16-three-layers": (sizes(4, 32, 16, 16, 16, (16, 32), 16, layers=3), 1e4, PLAIN, False),
    "h4-k12-linear": (sizes(4, 32, 4, 16, 8, (8, 16), 12), 1e3, LINEAR, False),
    "h8-k20-llama3": (sizes(8, 48, 16, 24, 16, (12, 24), 20, width=64), 1e4, make_golden.LLAMA3, False),
    "h7-k3": (sizes(7, 20, 6, 10, 14, (14, 12), 3, width=36, query=44), 5e2, PLAIN, True),
    "h2-k100-all-tokens": (sizes(2, 24, 8, 16, 16, (2, 16), 100), 1e4, PLAIN, False),
    "h4-k9-yarn-plain": (sizes(4, 24, 8, 16, 16, (11, 16), 9), 1e3, make_golden.YARN, True),
}


def build(fields, theta, scaling, tied, seed):
    """A transformers model of the case on the CPU, float32, with random weights."""
    import torch
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    more = {"max_position_embeddings": 64 if scaling["rope_type"] == "yarn" else 128, "tie_word_embeddings": tied}
    more |= {"vocab_size": make_golden.VOCAB, "intermediate_size": 2 * fields["hidden_size"], "rms_norm_eps": 0.03}
    config = DeepseekV32Config(**fields, **more, rope_parameters=dict(scaling, rope_theta=theta), bos_token_id=1, eos_token_id=None)
    config._attn_implementation = "eager"
    model = DeepseekV32ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.4 * noise)
            elif name.endswith("norm.bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * (1.6 / weight.shape[1] ** 0.5))
    return model


def sample(case):
    """(model, ids, logits, greedy, smallest margin) of the first seed whose greedy tokens are varied, and nothing is
    nearly tied."""
    for seed in range(400):
        model, ids = build(*case, seed), make_golden.prompt(seed)
        with margins() as found:
            logits, greedy, gap = make_golden.run(model, ids)
        if gap > 0.005 and len(set(greedy[0].tolist())) >= 10 and min(found, default=1.0) > CLEAR:
            return model, ids, logits, greedy, min(found, default=1.0)
    raise RuntimeError(f"no seed gives clear and varied greedy tokens, and clear choices, for {case}")


def main():
    """Write every golden file."""
    for name, case in CASES.items():
        model, ids, logits, greedy, margin = sample(case)
        make_golden.write(GOLDEN / name, model, ids, logits, greedy)
        print(name, "logits' standard deviation", float(logits.std()), "smallest margin", margin, flush=True)


if __name__ == "__main__":
    main()
