"""Why bounds rank blocks wrongly, for `block_scores.py`: how far a block's bound lies above its largest logit, and why.

The largest logit belongs to one key. The bound minus it is a sum over channels: what the box allows in a channel, minus
what that key gives. No part is below 0, so parts are shares: of the channels with the widest boxes, of RoPE's fast
pairs, of channels with a constant part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.designs.score_kinds import Layer, bounds, fast_channels, true_logits

WIDEST = 4
"""Channels of a head with the widest boxes."""


@jax.jit
def looseness(x: Layer, candidates) -> dict[str, jax.Array]:
    """Means over queries, a group's heads and candidate blocks, `[K]` each.

    candidates: bool[N]. Logits: `loose` (bound minus largest logit), `loose_sd` and `largest_sd` (over the blocks of a
    query). Shares of looseness: `widest`, `fast`, `constant`. Of channels: `fast_channels`, `constant_channels` (|mean|
    above the standard deviation). `mean_norm`: the mean key's squared norm as a share of the mean squared norm. `sink`:
    attention mass of the first block.
    """
    logits = true_logits(x)
    largest, bound = logits.max(-1), bounds(x)
    loose = bound - largest
    best = jnp.argmax(logits, axis=-1)
    heads, blocks = jnp.arange(x.k.shape[1])[:, None, None, None], jnp.arange(x.blocks.shape[0])
    key = x.blocks.transpose(2, 0, 1, 3)[heads, blocks, best]
    high, low = (of(x.blocks, axis=1).swapaxes(0, 1)[:, None, None] for of in (jnp.max, jnp.min))
    query = x.q.transpose(1, 2, 0, 3)[:, :, :, None]
    parts = (jnp.maximum(query * high, query * low) - query * key) * x.sm_scale
    parts = jnp.where(candidates[:, None], parts, 0).sum((1, 2, 3))
    total = jnp.maximum(parts.sum(-1), 1e-30)
    width = (high - low)[:, 0, 0].mean(1)
    is_wide = jax.nn.one_hot(jax.lax.top_k(width, WIDEST)[1], width.shape[-1]).sum(-2)
    center, spread = jnp.abs(x.k.mean(0)), x.k.std(0)
    fast, constant = fast_channels(x.rope, width.shape[-1]), center > spread
    mass = jax.nn.softmax(jax.nn.logsumexp(logits, axis=-1), axis=-1)
    norm = jnp.linalg.norm(x.k, axis=-1)
    return {
        "loose": jnp.mean(loose, axis=(1, 2, 3), where=candidates),
        "loose_sd": jnp.std(loose, axis=3, where=candidates).mean((1, 2)),
        "largest_sd": jnp.std(largest, axis=3, where=candidates).mean((1, 2)),
        "widest": (parts * is_wide).sum(-1) / total,
        "fast": (parts * fast).sum(-1) / total,
        "fast_channels": jnp.broadcast_to(fast.mean(), total.shape),
        "constant": (parts * constant).sum(-1) / total,
        "constant_channels": constant.mean(-1),
        "mean_norm": (center**2).sum(-1) / (norm**2).mean(0),
        "sink": mass[..., 0].mean((1, 2)),
        "key_norm": norm.mean(0),
        "key_norm_sd": norm.std(0),
        "query_norm": jnp.linalg.norm(x.q, axis=-1).mean((0, 2)),
    }
