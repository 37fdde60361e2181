"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from kvjax.layers import AttentionLayer
from kvjax.model import Heads, Params
from kvjax.models.mixers.tokens import MixHere, Tokens
from kvjax.models.products import biases_of, norm_before, project
from pallas_kernels.elementwise import rotate


def attend_heads(
    config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens, mix: MixHere, state: Any
) -> tuple[Float[Array, "B T H*D"], Any]:
    """See `kvjax.models.decoder.MIXERS`."""
    q, k, v, gate = _heads(config, params, x, tokens)
    out, state = mix(Heads(q, k, v, config.scale, config.window, config.share_with, config.rope), state)
    out = out.astype(x.dtype) if gate is None else out.astype(x.dtype) * jax.nn.sigmoid(gate)
    out = out if tokens.shards is None else tokens.shards.own_heads(out, config.copies)
    return out.reshape(*x.shape[:2], -1), state


def _heads(config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens):
    """Queries and keys, rotated and in some models normalised, values, and gates or None: [B, T, heads, D]. Keys and values are None in a
    layer that reads another's."""
    rotation = tokens.rotation(config.rope)
    names = ("q", "k", "v") if config.share_with is None else ("q",)
    x, options = norm_before(x, params.get("attn_norm"), tokens)
    options |= biases_of(params, config.qkv_bias, *names)
    fused = not config.qk_norm and not config.gate and config.rope.dim == config.head_dim
    if fused:
        rows = x.shape[0] * x.shape[1]
        options |= {"rotation": tuple(y.reshape(rows, -1) for y in rotation), "rotated": min(2, len(names))}
    projected = project(x, *(params[name] for name in names), **options)
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)[: len(names)]
    heads = [y.reshape(*y.shape[:2], count, -1) for y, count in zip(projected, counts, strict=True)]
    q, k, v = heads if len(heads) == 3 else (*heads, None, None)
    q, gate = (q[..., : config.head_dim], q[..., config.head_dim :]) if config.gate else (q, None)

    def turned(y: Array | None, norm: str) -> Array | None:
        if y is None or fused:
            return y
        y = tokens.norm(y, params[norm]) if config.qk_norm else y
        return rotate(y, *rotation) if config.rope.dim else y

    return turned(q, "q_norm"), turned(k, "k_norm"), v, gate
