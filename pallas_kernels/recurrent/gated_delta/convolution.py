"""The short convolution over time before a recurrence, and the tail that it keeps of a sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.core import dispatch


def causal_convolution(
    x: Float[Array, "B T E"],
    weight: Float[Array, "E W"],
    tail: Float[Array, "B W-1 E"],
    lengths: Int32[Array, "B"],
    *,
    bias: Float[Array, "E"] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """Each channel's weighted sum over its last W inputs, then SiLU: `silu(sum_w weight[e, w] x[t - (W-1) + w, e] +
    bias[e])`.

    Args:
        x: inputs.
        weight: W at least 1. The last column belongs to the token itself (`Conv1d.weight[:, 0]`).
        tail: the last W-1 inputs before these, of x's dtype; zeros before the first token.
        lengths: tokens of each row, 0 to T. Entries of x beyond may hold anything. A row of length 0 keeps its tail.
        bias: one per channel, or None.

    Returns out `[B, T, E]` in x's dtype, 0 beyond a row's length, and the tail after the tokens. Sums and SiLU are
    float32, rounded once. A token's bits depend only on its own inputs: not on where a call starts, on T, or on other
    rows.

    Bytes: x read W times at most, float32 sums written and read once, out written once; the tail is (W-1) E elements
    per row.

    Raises ValueError for arguments that do not fit together.

    Source: `causal_conv1d_fn` and `causal_conv1d_update` of `transformers` (there the sum is rounded before SiLU).
    """
    _check(x, weight, tail, lengths, bias)
    (_, num_tokens, _), width = x.shape, weight.shape[1]
    written = (jnp.arange(num_tokens, dtype=jnp.int32) < lengths[:, None])[..., None]
    inputs = jnp.concatenate([tail, jnp.where(written, x, 0)], axis=1)
    total = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for tap in range(width):
        total += weight[:, tap].astype(jnp.float32) * inputs[:, tap : tap + num_tokens].astype(jnp.float32)
    # A compiler may contract a product and a sum to one rounding, in one fusion and not in another. Without the barrier
    # it computes the sum anew in each fusion that uses it, such as SiLU's two factors, and keys of one token differ
    # between the programs that compute them.
    total = jax.lax.optimization_barrier(total)
    out = jnp.where(written, jax.nn.silu(total), 0).astype(x.dtype)
    return out, jax.vmap(lambda rows, start: jax.lax.dynamic_slice_in_dim(rows, start, width - 1))(inputs, lengths)


def _check(x, weight, tail, lengths, bias) -> None:
    arrays = dispatch.signature(x=x, weight=weight, tail=tail, lengths=lengths, bias=bias)
    if x.ndim != 3 or 0 in x.shape or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(f"causal_convolution takes x [B,T,E], no axis empty, and weight [E,W] with W at least 1; got {arrays}")
    if tail.shape != (x.shape[0], weight.shape[1] - 1, x.shape[2]) or tail.dtype != x.dtype:
        raise ValueError(f"tail must be [B,W-1,E] of x's dtype; got {arrays}")
    if lengths.shape != x.shape[:1] or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths must be int32 [B]; got {arrays}")
    floating = [y for y in (x, weight, bias) if y is not None]
    if any(not jnp.issubdtype(y.dtype, jnp.floating) for y in floating) or (bias is not None and bias.shape != x.shape[2:]):
        raise ValueError(f"x, weight and bias must be floating point, bias [E]; got {arrays}")
