"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.model.layers import AttentionLayer
from kvjax.model.protocols import Heads, Params
from kvjax.models.mixers.tokens import MixHere, Tokens
from kvjax.models.products import biases_of, norm_before, project
from pallas_kernels.core.rope_norm import rms_norm, rotate


def attend_heads(
    config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens, mix: MixHere, state: Any
) -> tuple[Float[Array, "B T H*D"], Any]:
    """See `kvjax.models.decoder.MIXERS`."""
    q, k, v, gate = _heads(config, params, x, tokens)
    out, state = mix(Heads(q, k, v, config.scale, config.window, config.share_with, config.rope), state)
    out = out.astype(x.dtype) if gate is None else out.astype(x.dtype) * jax.nn.sigmoid(gate)
    return tokens.shards.own_heads(out, config.copies).reshape(*x.shape[:2], -1), state


def _heads(config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens):
    """Queries and keys, rotated and in some models normalised, values, and gates or None: [B, T, heads, D]. Keys and
    values are None in a layer that reads another's."""
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
        if config.joint_norm:
            y = _joint_norm(config, y, params[norm], tokens)
        elif config.qk_norm:
            y = tokens.norm(y, params[norm])
        return rotate(y, *rotation) if config.rope.dim else y

    return turned(q, "q_norm"), turned(k, "k_norm"), v, gate


def _joint_norm(
    config: AttentionLayer, heads: Float[Array, "B T N D"], weight: Float[Array, "N*D"], tokens: Tokens
) -> Float[Array, "B T N D"]:
    """An RMSNorm over all heads together. On a mesh each device has some of them, and the mean is over those of all."""
    rows = heads.reshape(*heads.shape[:2], -1)
    if tokens.shards.tensor == 1:
        return rms_norm(rows, weight, tokens.norm_eps, tokens.norm_offset).reshape(heads.shape)
    wide = rows.astype(jnp.float32)
    (total,) = tokens.shards.over_heads(config.copies, jnp.sum(wide * wide, axis=-1, keepdims=True))
    mean = total / (rows.shape[-1] * tokens.shards.tensor // config.copies)
    y = wide * jax.lax.rsqrt(mean + tokens.norm_eps) * (weight.astype(jnp.float32) + tokens.norm_offset)
    return y.astype(heads.dtype).reshape(heads.shape)
