"""Makes golden/latent-*.safetensors with transformers and PyTorch: `python make_latent_golden.py`. Imports nothing of
kvjax.

Each file is one attention layer of a tiny random DeepSeek-V3.2 (transformers' `DeepseekV32Attention`, float32, eager,
CPU), under the names of its tensors, and what it did: a prompt in one call, then one token at a time with its cache.
The metadata hold config.json.

    hidden   float32[B, S, E]     what goes into the layer, before its norm, "input_layernorm.weight"
    out      float32[B, S, E]     what comes out of its attention
    tokens   int32[B, S, index_topk]  the tokens that each query attended to, ascending, -1 at the end

Weights are drawn so large that attention is far from flat. In "latent-yarn" what the three norms see is so small that
their epsilon shows. No query's choice hangs on rounding: at every step the last token taken leads the first one left by
a clear margin.
"""

import contextlib
import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")
BATCH, PROMPT, STEPS = 2, 37, 11
CLEAR = 1e-3
"""Smallest margin between the last score taken and the first one left, as a share of the standard deviation of the
row's scores."""

DRIFT = 0.8
"""Correlation of a token's hidden state with the one before."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
# name: (rope_parameters, factor of what the norms see).
CASES = {
    "latent-default": ({"rope_type": "default", "rope_theta": 1e4}, 1.0),
    "latent-yarn": (YARN | {"rope_theta": 1e3, "mscale": 1.0, "mscale_all_dim": 0.7}, 1e-3),
}
SIZES = {
    "hidden_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 28,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "index_n_heads": 5,
    "index_head_dim": 16,
    "index_topk": 9,
    "rms_norm_eps": 0.03,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "intermediate_size": 8,
    "vocab_size": 8,
}


def build(rope, small, seed):
    """(config, norm, attention layer, rotary embedding) with random weights."""
    import torch
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RMSNorm, DeepseekV32RotaryEmbedding

    config = DeepseekV32Config(**SIZES, rope_parameters=dict(rope))
    config._attn_implementation = "eager"
    norm, layer = DeepseekV32RMSNorm(config.hidden_size, config.rms_norm_eps), DeepseekV32Attention(config, 0).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(layer.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.4 * noise)
            elif name.endswith("norm.bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * (1.6 / weight.shape[1] ** 0.5))
        norm.weight.copy_(1.0 + 0.4 * torch.randn(norm.weight.shape, generator=generator))
        layer.q_a_proj.weight *= small
        layer.kv_a_proj_with_mqa.weight[: config.kv_lora_rank] *= small
        layer.indexer.wk.weight *= small
    return config, norm, layer, DeepseekV32RotaryEmbedding(config)


@contextlib.contextmanager
def margins():
    """The list of every row's margin in the calls of topk inside the block."""
    import torch

    found, topk = [], torch.Tensor.topk

    def watched(scores, k, dim=-1):
        for row in scores.flatten(0, -2) if scores.ndim > 1 else ():  # logits of one token are not scores of tokens
            row = row[row > -1e30]
            if k < len(row):
                best = row.sort(descending=True).values
                found.append(float((best[k - 1] - best[k]) / row.std()))
        return topk(scores, k, dim=dim)

    torch.Tensor.topk = watched
    try:
        yield found
    finally:
        torch.Tensor.topk = topk


def run(config, norm, layer, rotary, hidden):
    """(out, tokens): the prompt in one call, then token by token."""
    import torch
    from transformers import DynamicCache

    cache, outs, tokens, chosen = DynamicCache(config=config), [], [], []
    layer.indexer.register_forward_hook(lambda module, arguments, indices: chosen.append(indices))
    for start, stop in [(0, PROMPT)] + [(n, n + 1) for n in range(PROMPT, PROMPT + STEPS)]:
        x = hidden[:, start:stop]
        at = torch.arange(start, stop)
        future = torch.arange(stop) > at[:, None]
        mask = torch.zeros(future.shape).masked_fill(future, torch.finfo(torch.float32).min).expand(BATCH, 1, -1, -1)
        angles = rotary(x, at.expand(BATCH, -1))
        with torch.no_grad():
            out, _ = layer(norm(x), angles, mask, past_key_values=cache)
        outs.append(out)
        ids = chosen.pop()  # of early queries also tokens that they may not see
        ids = ids.masked_fill(ids > at[:, None], 2**30).sort(dim=-1).values
        tokens.append(ids.masked_fill(ids == 2**30, -1))
    return torch.cat(outs, dim=1), torch.cat(tokens, dim=1).to(torch.int32)


def drifting(shape, seed):
    """Hidden states that change little from token to token, so that neighbouring steps choose many of the same
    tokens."""
    import torch

    states = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))
    for n in range(1, shape[1]):
        states[:, n] = DRIFT * states[:, n - 1] + (1 - DRIFT**2) ** 0.5 * states[:, n]
    return states


def sample(rope, small):
    """The first seed at which nothing is nearly tied."""
    for seed in range(200):
        config, norm, layer, rotary = build(rope, small, seed)
        hidden = drifting((BATCH, PROMPT + STEPS, config.hidden_size), seed)
        with margins() as found:
            out, tokens = run(config, norm, layer, rotary, hidden)
        if min(found) > CLEAR:
            did = {"input_layernorm.weight": norm.weight.data, "hidden": hidden, "out": out, "tokens": tokens}
            return config, layer, did, min(found)
    raise RuntimeError("every seed has a near tie")


def main():
    """Write every golden file."""
    import transformers
    from safetensors.torch import save_file

    for name, (rope, small) in CASES.items():
        config, layer, did, margin = sample(rope, small)
        tensors = {key: value.contiguous() for key, value in (dict(layer.state_dict()) | did).items()}
        save_file(tensors, GOLDEN / f"{name}.safetensors", metadata={"config": json.dumps(config.to_dict(), sort_keys=True)})
        print(name, "transformers", transformers.__version__, "smallest margin", margin, "outputs' deviation", float(did["out"].std()))


if __name__ == "__main__":
    main()
