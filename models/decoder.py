"""The one decoder that every family shares: pre-norm transformer, grouped-query attention, RoPE, RMSNorm, gated SiLU MLP.

Families differ in which optional tensors a layer has (q, k, v biases; q, k norms); llama.py, qwen2.py and qwen3.py name them. The
parameters are a plain pytree, matrices stored [in, out]:

    {"embed": [V, E], "final_norm": [E], "layers": (layer, ...), optional "lm_head": [E, V]}
    layer: attn_norm [E], q [E, H*D], k [E, K*D], v [E, K*D], o [H*D, E], mlp_norm [E], gate [E, F], up [E, F], down [F, E],
           optional q_bias [H*D], k_bias [K*D], v_bias [K*D], q_norm [D], k_norm [D]

Weights and activations have the dtype of `embed`; norms and RoPE are computed in float32 and rounded once; logits are float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.model import Attend, ModelConfig, Params
from kvjax.models import rope


@dataclasses.dataclass(frozen=True)
class TransformerDecoder:
    """Pure functions over `init_params`' pytree (see `kvjax.model.Decoder`). Static and hashable: pass it to jit as a static argument."""

    config: ModelConfig

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states, after the last norm, and the state that `attend` threaded through the layers.

        tokens: ids in [0, V); any other id, -1 included, gives NaN, so pad with a real id. positions: absolute, in tokens.
        A row's result depends on that row alone, unless `attend` mixes rows. Raises ValueError when shapes do not match the
        configuration.
        """
        if tokens.ndim != 2 or tokens.shape != positions.shape:
            raise ValueError(f"tokens and positions must have one shape [B, T], got {tokens.shape} and {positions.shape}")
        if len(params["layers"]) != self.config.num_layers:
            raise ValueError(f"params have {len(params['layers'])} layers, the configuration has {self.config.num_layers}")
        x = params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        rotation = rope.rotation(self.config, positions)
        for number, layer in enumerate(params["layers"]):
            q, k, v = self._qkv(layer, rms_norm(x, layer["attn_norm"], self.config.norm_eps), rotation)
            out, state = attend(number, q, k, v, state)
            x = x + project(out.reshape(*out.shape[:2], -1).astype(x.dtype), layer["o"])
            x = x + _mlp(layer, rms_norm(x, layer["mlp_norm"], self.config.norm_eps))
        return rms_norm(x, params["final_norm"], self.config.norm_eps), state

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float32[Array, "... V"]:
        """Next-token logits, float32 whatever the weights' dtype. Tied models read the embedding."""
        weight, form = (params["embed"], "...e,ve->...v") if self.config.tie_embeddings else (params["lm_head"], "...e,ev->...v")
        return jnp.einsum(form, hidden, weight, precision=_precision(hidden), preferred_element_type=jnp.float32)

    def _qkv(self, layer: Params, x: Float[Array, "B T E"], rotation: tuple[Array, Array]):
        """Queries and keys, normalised where the family does so and rotated, and values: [B, T, heads, D]."""
        q, k, v = (self._heads(layer, name, x) for name in ("q", "k", "v"))
        if self.config.qk_norm:
            q = rms_norm(q, layer["q_norm"], self.config.norm_eps)
            k = rms_norm(k, layer["k_norm"], self.config.norm_eps)
        return rope.rotate(q, *rotation), rope.rotate(k, *rotation), v

    def _heads(self, layer: Params, name: str, x: Float[Array, "B T E"]) -> Float[Array, "B T heads D"]:
        y = project(_two_rows(x), layer[name])[: x.shape[0]]
        if self.config.qkv_bias:
            y = y + layer[f"{name}_bias"]
        return y.reshape(*y.shape[:2], -1, self.config.head_dim)


def rms_norm(x: Float[Array, "... E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; computed in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def project(x: Float[Array, "... E"], weight: Float[Array, "E F"]) -> Float[Array, "... F"]:
    """x @ weight; float32 is multiplied as float32 on every device."""
    return jnp.matmul(x, weight, precision=_precision(x))


def _two_rows(x: Float[Array, "B T E"]) -> Float[Array, "B* T E"]:
    """A single row gets one of zeros beside it. XLA for GPUs turns the product of one row and a narrow matrix into an elementwise product
    and a sum, which writes what it should only add up; with two rows it joins the queries', keys' and values' products to one."""
    return x if x.shape[0] * x.shape[1] > 1 else jnp.concatenate([x, jnp.zeros_like(x)])


def _precision(x: Array) -> jax.lax.Precision:
    """Accelerators multiply float32 with fewer bits unless told; shorter types lose nothing by the default."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _mlp(layer: Params, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    return project(jax.nn.silu(project(x, layer["gate"])) * project(x, layer["up"]), layer["down"])


def param_shapes(config: ModelConfig) -> Params:
    """The parameter pytree with each array's shape, a tuple of ints, in its place."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    layer = {"attn_norm": (e,), "q": (e, q), "k": (e, kv), "v": (e, kv), "o": (q, e)}
    layer |= {"mlp_norm": (e,), "gate": (e, f), "up": (e, f), "down": (f, e)}
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (d,), "k_norm": (d,)}
    shapes = {"embed": (config.vocab_size, e), "final_norm": (e,), "layers": tuple(dict(layer) for _ in range(config.num_layers))}
    return shapes if config.tie_embeddings else shapes | {"lm_head": (e, config.vocab_size)}


def init_params(config: ModelConfig, key: Array, dtype: Any = jnp.float32, *, std: float = 0.02) -> Params:
    """Fresh weights: matrices normal with standard deviation `std`, biases zero, norms one, as transformers initialises these families.

    key: a jax.random key. dtype: of every array. Needs no memory beyond the weights; may be jitted.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=_is_shape)
    keys = jax.random.split(key, len(named))
    leaves = [_init_leaf(path[-1].key, shape, k, dtype, std) for (path, shape), k in zip(named, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(n, int) for n in node)


def _init_leaf(name: str, shape: tuple[int, ...], key: Array, dtype: Any, std: float) -> Array:
    if name.endswith("_norm"):
        return jnp.ones(shape, dtype)
    if name.endswith("_bias"):
        return jnp.zeros(shape, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


def causal_attend(sm_scale: float, implementation: Literal["xla", "cudnn"] | None = None) -> Attend:
    """Attention over the batch itself, causal, every row its own sequence: what training and the oracles of tests use.

    Positions must increase along T: token t attends to tokens 0..t of its row. `state` passes through untouched. implementation is
    `jax.nn.dot_product_attention`'s: None lets JAX choose, "cudnn" needs an NVIDIA GPU and float16 or bfloat16, and float16
    needs a GPU in any case; memory is T x T per head except with "cudnn".
    """

    def attend(layer: int, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], state: Any):
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=sm_scale, implementation=implementation), state

    return attend
