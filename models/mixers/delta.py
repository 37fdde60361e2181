"""Gated DeltaNet: linear attention by the gated delta rule, behind a short convolution. Source: arXiv 2412.06464."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.model.layers import DeltaLayer
from kvjax.model.protocols import Params, Recurrence
from kvjax.models.mixers.tokens import MixHere, Tokens
from kvjax.models.products import norm_before, project
from pallas_kernels.core.rope_norm import rms_norm


def recall_states(
    config: DeltaLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens, mix: MixHere, state: Any
) -> tuple[Float[Array, "B T H*Dv"], Any]:
    """See `kvjax.models.decoder.MIXERS`."""
    x, options = norm_before(x, params["attn_norm"], tokens)
    qkv, z, a, b = project(x, *(params[name] for name in ("qkv", "z", "a", "b")), **options)
    # Rates are rounded as the model's other activations are; decays never are.
    rate = jax.nn.sigmoid(b.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
    decay = -jnp.exp(params["decay_log"].astype(jnp.float32)) * jax.nn.softplus(
        a.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32)
    )
    static = {"key_heads": config.key_heads, "key_dim": config.key_dim, "value_dim": config.value_dim}
    given = Recurrence(qkv, params["conv"][:, 0], decay, rate, **static, scale=config.key_dim**-0.5)
    out, state = mix(given, state)
    gate = jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)
    out = rms_norm(out.astype(x.dtype), params["delta_norm"], tokens.norm_eps).astype(jnp.float32) * gate
    return out.astype(x.dtype).reshape(*x.shape[:2], -1), state
