"""Multi-head latent attention with a lightning indexer, as a decode step: DeepSeek-V3.2's attention layer over latent pages.

What is cached per token is one latent of C elements, of which every head's key and value are linear images, a rotated key of R elements
that all heads share, and the indexer's key. Attention runs on the latents themselves: a head's query is mapped by the transpose of its key
map into the latents' space ("absorbed"), so that all heads read one row of C + R elements, and what they bring back, a weighted sum of
latents, is mapped to values afterwards. Which tokens they read is the policy's business: `TopTokens`, or any other.

    params: q_a [Q, E], q_norm [Q], q_b [H*(nope+R), Q], kv_a [C+R, E], kv_norm [C], up_k [H, nope, C], up_v [H, value, C],
            o [E, H*value], index_q [HI*DI, Q], index_k [DI, E], index_norm [DI], index_norm_bias [DI], index_weights [HI, E] float32

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix B) for latents and absorption; DeepSeek-V3.2-Exp technical report
(DeepSeek-AI, 2025), section 1, for the indexer; details as in transformers' `DeepseekV32Attention`, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LatentPages, append_latents
from kvjax.layers import Rope, RopeScaling
from kvjax.model import Params
from kvjax.models import rope
from kvjax.models.products import project
from kvjax.policies.decode import Blocks, DecodePolicy, IndexerQuery, SelectContext
from pallas_kernels.elementwise import rms_norm, rotate

NORM_EPS = 1e-6
"""Of the three norms inside the layer; config.json's rms_norm_eps is for those between layers."""


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Sizes of a layer. Static and hashable.

    query_rank Q: what queries are made of. latent_dim C, rope_dim R: the cached row. nope_dim: elements of a head's key that are not
    rotated. value_dim: of a head's value. index_heads HI, index_dim DI: the indexer; the first R elements of its heads are rotated.
    index_topk: tokens that the model was trained to read.
    """

    hidden_size: int
    num_heads: int
    query_rank: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    sm_scale: float

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "rope_scaling" and not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
        if self.rope_dim % 2 or self.rope_dim > self.index_dim:
            raise ValueError(f"rope_dim {self.rope_dim} must be even and at most index_dim {self.index_dim}")

    @property
    def rope(self) -> Rope:
        """How the shared key, queries and the indexer are rotated."""
        return Rope(self.rope_theta, self.rope_dim, self.rope_scaling)


def param_shapes(config: LatentConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a layer."""
    c, e, h = config, config.hidden_size, config.num_heads
    return {
        "q_a": (c.query_rank, e),
        "q_norm": (c.query_rank,),
        "q_b": (h * (c.nope_dim + c.rope_dim), c.query_rank),
        "kv_a": (c.latent_dim + c.rope_dim, e),
        "kv_norm": (c.latent_dim,),
        "up_k": (h, c.nope_dim, c.latent_dim),
        "up_v": (h, c.value_dim, c.latent_dim),
        "o": (e, h * c.value_dim),
        "index_q": (c.index_heads * c.index_dim, c.query_rank),
        "index_k": (c.index_dim, e),
        "index_norm": (c.index_dim,),
        "index_norm_bias": (c.index_dim,),
        "index_weights": (c.index_heads, e),
    }


def decode_latent(
    config: LatentConfig,
    policy: DecodePolicy,
    params: Params,
    x: Float[Array, "B T E"],
    layer: LatentPages,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    active: Bool[Array, "B"],
    state: Any,
    *,
    number: int = 0,
    num_layers: int = 1,
) -> tuple[Float[Array, "B T E"], LatentPages, Blocks | None, Any]:
    """One layer of a decode step: write T tokens of every active row, attend to what the policy lists.

    x: the tokens' normalised hidden states, in the weights' dtype; T is 1, or a few drafted tokens, causal among themselves (a prompt
    works too, at the price of a list for each of its tokens). lengths: tokens written before these. page_table: pages of the new tokens
    included: a token whose place is past the table, or whose page is -1, is the caller's error, which a compiled step cannot raise; it is
    not written, and what its row gets means nothing. active: rows that take part; the others write nothing, their output means nothing and
    their state stays. state: from `policy.init`. number, num_layers: which layer this is, for policies that care.

    Returns the attention's output `[B, T, E]`, before any residual, the layer with the tokens written, the policy's list and its state.
    The indexer's keys are stored in the pages' dtype, 8 bits with a scale per token included; its queries stay in the weights' dtype, and
    neither is multiplied by a Hadamard matrix first, as DeepSeek's own inference does to both (dot products are the same).
    """
    num_tokens = x.shape[1]
    positions = lengths[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    rotation = rope.rotation(config.rope, positions)
    query_latent, compressed, index_k = project(x, params["q_a"], params["kv_a"], params["index_k"])
    q, index_q = project(query_latent, params["q_b"], params["index_q"], norm=params["q_norm"], norm_eps=NORM_EPS)

    latents = _latents(config, params, compressed, rotation)
    index_q = index_q.reshape(*x.shape[:2], config.index_heads, config.index_dim)
    index_k = _layer_norm(index_k, params["index_norm"], params["index_norm_bias"])
    index_q = rotate(index_q, *rotation)  # the first elements, in "rotate half" layout, as the indexer of DeepSeek's checkpoints is
    index_k = rotate(index_k[:, :, None], *rotation)[:, :, 0]
    valid = jnp.broadcast_to(active[:, None], positions.shape)
    layer = append_latents(layer, latents, index_k, positions, valid, page_table)

    (index_weights,) = project(x.astype(jnp.float32), params["index_weights"])
    asked = IndexerQuery(index_q, index_weights * (config.index_dim * config.index_heads) ** -0.5)
    ctx = SelectContext(
        page_table,
        jnp.where(active, lengths + num_tokens, 0),
        layer=number,
        num_layers=num_layers,
        page_size=layer.pages.page_size,
        sm_scale=config.sm_scale,
        indexer=asked,
    )
    out, blocks, state = policy.attend(_absorbed(config, params, q, rotation), layer, ctx, state)
    values = _product("bthc,hvc->bthv", out, params["up_v"])
    (out,) = project(values.reshape(*x.shape[:2], -1), params["o"])
    return out, layer, blocks, state


decode_latent_step = jax.jit(decode_latent, static_argnames=("config", "policy", "number", "num_layers"), donate_argnames="layer")
"""`decode_latent`, jitted. DONATES layer."""


def _latents(config: LatentConfig, params: Params, compressed: Float[Array, "B T C+R"], rotation) -> Float[Array, "B T C+R"]:
    """What is cached: the normalised latent and the rotated shared key."""
    latent = rms_norm(compressed[..., : config.latent_dim], params["kv_norm"], NORM_EPS)
    shared = _rotate_pairs(compressed[..., None, config.latent_dim :], rotation)[:, :, 0]
    return jnp.concatenate([latent, shared], axis=-1)


def _absorbed(config: LatentConfig, params: Params, q: Float[Array, "B T Q"], rotation) -> Float[Array, "B T H C+R"]:
    """Queries in the space of the cached rows."""
    q = q.reshape(*q.shape[:2], config.num_heads, -1)
    plain = _product("bthn,hnc->bthc", q[..., : config.nope_dim], params["up_k"])
    return jnp.concatenate([plain, _rotate_pairs(q[..., config.nope_dim :], rotation)], axis=-1)


def _rotate_pairs(x: Float[Array, "B T N R"], rotation) -> Float[Array, "B T N R"]:
    """RoPE on neighbouring pairs (2i, 2i + 1), as the attention of DeepSeek's checkpoints is laid out; the result has evens, then odds."""
    return rotate(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), *rotation)


def _layer_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], bias: Float[Array, "D"]) -> Float[Array, "... D"]:
    """In float32, rounded once."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _product(subscripts: str, x: Array, weights: Array) -> Array:
    # Accelerators multiply float32 with fewer bits unless told; shorter types lose nothing by the default.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(subscripts, x, weights, precision=precision, preferred_element_type=x.dtype)
