"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from kvjax.layers import AttentionLayer
from kvjax.model import Heads, Params
from kvjax.models.mixers.tokens import MixHere, Tokens
from kvjax.models.products import biases_of, norm_before, project
from pallas_kernels.elementwise import rms_norm, rotate


def attend_heads(
    config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens, mix: MixHere, state: Any
) -> tuple[Float[Array, "B T H*D"], Any]:
    """See `kvjax.models.decoder.MIXERS`."""
    *heads, gate = _heads(config, params, x, tokens)
    out, state = mix(Heads(*heads, config.sm_scale, config.window), state)
    out = out.astype(x.dtype) if gate is None else out.astype(x.dtype) * jax.nn.sigmoid(gate)
    return out.reshape(*x.shape[:2], -1), state


def _heads(config: AttentionLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens):
    """Queries and keys, normalised where the model does so and rotated, values, and gates or None: [B, T, heads, D]."""
    rotation = tokens.rotation(config.rope)
    options = norm_before(params["attn_norm"], tokens) | biases_of(params, config.qkv_bias, "q", "k", "v")
    fused = not config.qk_norm and not config.gate and config.rope.dim == config.head_dim
    if fused:
        rows = x.shape[0] * x.shape[1]
        options |= {"rotation": tuple(y.reshape(rows, -1) for y in rotation), "rotated": 2}
    projected = project(x, *(params[name] for name in ("q", "k", "v")), **options)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    q, k, v = (y.reshape(*y.shape[:2], count, -1) for y, count in zip(projected, heads, strict=True))
    q, gate = (q[..., : config.head_dim], q[..., config.head_dim :]) if config.gate else (q, None)
    if config.qk_norm:
        q, k = (rms_norm(y, params[name], tokens.norm_eps, tokens.norm_offset) for y, name in ((q, "q_norm"), (k, "k_norm")))
    return (q, k, v, gate) if fused else (rotate(q, *rotation), rotate(k, *rotation), v, gate)
