"""Combines partial attentions over disjoint sets of keys. Nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_attention(outs: Sequence[Float[Array, "... D"]], lses: Sequence[Float[Array, "..."]]) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    outs: softmax-weighted values of each set, `[..., D]`, one dtype. lses: log-sum-exp of the scaled logits of each set
    (natural log, float32), `[...]`; -inf where a set has no key, and then that set's out is not looked at.

    Returns out `[..., D]` in the dtype of `outs` and lse `[...]` float32; 0 and -inf where no set has a key. Sums run
    in float32, in the order given, so the same list gives the same bits. Memory: that of the inputs.

    Raises ValueError when the lists are empty, differ in length, or hold arrays whose shapes or dtypes differ.

    Source: the split-k combination of FlashDecoding; "Attention Pays Its Bill", BRL-2026-07.
    """
    _check(outs, lses)
    lses = [lse.astype(jnp.float32) for lse in lses]
    top = lses[0]
    for lse in lses[1:]:
        top = jnp.maximum(top, lse)
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf minus -inf would be NaN
    out, total = jnp.zeros(outs[0].shape, jnp.float32), jnp.zeros(top.shape, jnp.float32)
    for part, lse in zip(outs, lses, strict=True):
        weight = jnp.exp(lse - shift)
        out = out + jnp.where(lse[..., None] == -jnp.inf, 0.0, part.astype(jnp.float32) * weight[..., None])
        total = total + weight
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.astype(outs[0].dtype), shift + jnp.log(total)


def _check(outs: Sequence[Array], lses: Sequence[Array]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_attention needs as many lses as outs, at least one; got {len(outs)} outs and {len(lses)} lses")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1] or out.dtype != outs[0].dtype:
            raise ValueError(
                f"every out must be {outs[0].dtype}{list(outs[0].shape)} and every lse {list(outs[0].shape[:-1])}; "
                f"got out {out.dtype}{list(out.shape)} with lse {list(lse.shape)}"
            )
