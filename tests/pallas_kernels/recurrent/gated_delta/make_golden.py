"""Makes golden.npz with transformers and PyTorch: `python make_golden.py`. Imports nothing of kvjax.

What transformers' Qwen3.5 functions give (`torch_chunk_gated_delta_rule`, `torch_recurrent_gated_delta_rule`,
`causal_conv1d_fn`, `causal_conv1d_update`), in float32 on a CPU. Made with transformers 5.17.0 and torch 2.13.0. Arrays
are named "CASE/ARRAY":

    q, k        float32[B, T, K, Dk]   before they are repeated for the value heads
    v           float32[B, T, H, Dv]
    g, beta     float32[B, T, H]
    start       float32[B, H, Dk, Dv]  the state before the first token
    chunk_out   float32[B, T, H, Dv]   of the chunked function, chunk size 64; chunk_state its last state
    step_out, step_state               of the recurrent function

    convolution/x [B, T, E], weight [E, W], out [B, T, E]: the whole sequence at once
    convolution/tail [B, W-1, E], next [B, 1, E], step_out [B, 1, E]: one more token after the sequence
"""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).with_name("golden.npz")
# (B, T, K, H, Dk, Dv), kind of decay, whether there is a start state, whether q and k are normalised.
CASES = {
    "usual": ((1, 70, 2, 4, 12, 8), "usual", True, True),
    "strong": ((1, 70, 2, 4, 12, 8), "strong", False, True),
    "ratio 4, as they are": ((1, 70, 1, 4, 12, 8), "usual", True, False),
}
DECAYS = {
    "usual": lambda random, shape: -np.exp(2 * random.standard_normal(shape) - 2),
    "strong": lambda random, shape: np.full(shape, -20.0),
}


def inputs(seed, sizes, decay, with_start, normalize):
    random = np.random.default_rng(seed)
    batch, tokens, key_heads, heads, key_dim, value_dim = sizes
    q, k = random.standard_normal((2, batch, tokens, key_heads, key_dim))
    if not normalize:
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    start = random.standard_normal((batch, heads, key_dim, value_dim)) if with_start else np.zeros((batch, heads, key_dim, value_dim))
    arrays = {
        "q": q,
        "k": k,
        "v": random.standard_normal((batch, tokens, heads, value_dim)),
        "g": DECAYS[decay](random, (batch, tokens, heads)),
        "beta": random.random((batch, tokens, heads)),
        "start": start,
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def run(arrays, normalize):
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    q, k, v, g, beta, start = (torch.from_numpy(arrays[name]) for name in ("q", "k", "v", "g", "beta", "start"))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    options = {"initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": normalize}
    found = {}
    for name, function in (("chunk", module.torch_chunk_gated_delta_rule), ("step", module.torch_recurrent_gated_delta_rule)):
        out, state = function(q, k, v, g=g, beta=beta, **options)
        found |= {f"{name}_out": out.numpy(), f"{name}_state": state.numpy()}
    return found


def convolve(seed):
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    random = np.random.default_rng(seed)
    x, weight = random.standard_normal((2, 9, 21)).astype(np.float32), random.standard_normal((21, 4)).astype(np.float32)
    following = random.standard_normal((2, 1, 21)).astype(np.float32)
    first, weights = torch.from_numpy(x).transpose(1, 2), torch.from_numpy(weight)
    out = module.causal_conv1d_fn(first, weights, None, activation="silu").transpose(1, 2)
    tail = first[:, :, -3:].clone()
    arrays = {"x": x, "weight": weight, "out": out.numpy(), "next": following, "tail": tail.transpose(1, 2).numpy().copy()}
    step = module.causal_conv1d_update(torch.from_numpy(following).transpose(1, 2), tail, weights, None, "silu")
    return arrays | {"step_out": step.transpose(1, 2).numpy()}


if __name__ == "__main__":
    arrays = {f"convolution/{name}": array for name, array in convolve(0).items()}
    for seed, (case, (sizes, decay, with_start, normalize)) in enumerate(CASES.items()):
        given = inputs(seed, sizes, decay, with_start, normalize)
        arrays |= {f"{case}/{name}": array for name, array in (given | run(given, normalize)).items()}
    np.savez_compressed(GOLDEN, **arrays)
    print(f"{GOLDEN.name}: {GOLDEN.stat().st_size:,} bytes")
