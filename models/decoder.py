"""The one decoder that every family shares: pre-norm transformer, grouped-query attention, RoPE, RMSNorm, gated SiLU MLP.

Models differ in which optional tensors a layer has (biases; q, k norms); the configuration says which. The parameters are a plain
pytree, matrices stored [out, in], as checkpoints do and as a decode step reads them best:

    {"embed": [V, E], "final_norm": [E], "layers": (layer, ...), optional "lm_head": [V, E]}
    layer: attn_norm [E], q [H*D, E], k [K*D, E], v [K*D, E], o [E, H*D], mlp_norm [E], gate [F, E], up [F, E], down [E, F],
           optional q_bias [H*D], k_bias [K*D], v_bias [K*D], o_bias [E], gate_bias [F], up_bias [F], down_bias [E], q_norm [D], k_norm [D]

Weights and activations have the dtype of `embed`; norms and RoPE are computed in float32 and rounded once; logits are float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.model import Heads, LayerInput, Mix, ModelConfig, Params
from kvjax.models import rope
from pallas_kernels.elementwise import rms_norm, rotate
from pallas_kernels.project_tokens import project_tokens


@dataclasses.dataclass(frozen=True)
class TransformerDecoder:
    """Pure functions over `init_params`' pytree (see `kvjax.model.Decoder`). Static and hashable: pass it to jit as a static argument."""

    config: ModelConfig

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states, after the last norm, and the state that `mix` threaded through the layers.

        tokens: ids in [0, V); any other id, -1 included, gives NaN, so pad with a real id. positions: absolute, in tokens.
        A row's result depends on that row alone, unless `mix` mixes rows. Raises ValueError when shapes do not match the
        configuration.
        """
        if tokens.ndim != 2 or tokens.shape != positions.shape:
            raise ValueError(f"tokens and positions must have one shape [B, T], got {tokens.shape} and {positions.shape}")
        if len(params["layers"]) != self.config.num_layers:
            raise ValueError(f"params have {len(params['layers'])} layers, the configuration has {self.config.num_layers}")
        x = params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        rotation = rope.rotation(self.config, positions)
        for number, layer in enumerate(params["layers"]):
            q, k, v = self._qkv(layer, x, rotation)
            out, state = mix(number, Heads(q, k, v, self.config.sm_scale, self.config.window_of(number)), state)
            out = out.reshape(*out.shape[:2], -1).astype(x.dtype)
            (x,) = project(out, layer["o"], residual=x, **_biases(layer, self.config.o_bias, "o"))
            options = {"norm": layer["mlp_norm"], "norm_eps": self.config.norm_eps} | _biases(layer, self.config.mlp_bias, "gate", "up")
            (inner,) = project(x, layer["gate"], layer["up"], **options, gated=True)
            (x,) = project(inner, layer["down"], residual=x, **_biases(layer, self.config.mlp_bias, "down"))
        return rms_norm(x, params["final_norm"], self.config.norm_eps), state

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float32[Array, "... V"]:
        """Next-token logits, float32 whatever the weights' dtype. Tied models read the embedding."""
        return project(hidden, params["embed" if self.config.tie_embeddings else "lm_head"], out_dtype=jnp.float32)[0]

    def _qkv(self, layer: Params, x: Float[Array, "B T E"], rotation: tuple[Array, Array]):
        """Queries and keys, normalised where the family does so and rotated, and values: [B, T, heads, D]."""
        config, rows = self.config, x.shape[0] * x.shape[1]
        options = {"norm": layer["attn_norm"], "norm_eps": config.norm_eps} | _biases(layer, config.qkv_bias, "q", "k", "v")
        if not config.qk_norm:
            options |= {"rotation": tuple(y.reshape(rows, -1) for y in rotation), "rotated": 2}
        projected = project(x, *(layer[name] for name in ("q", "k", "v")), **options)
        q, k, v = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in projected)
        if config.qk_norm:
            q = rotate(rms_norm(q, layer["q_norm"], config.norm_eps), *rotation)
            k = rotate(rms_norm(k, layer["k_norm"], config.norm_eps), *rotation)
        return q, k, v


def _biases(layer: Params, there: bool, *names: str) -> dict[str, tuple[Array, ...]]:
    """The option of `project` that adds the biases of these projections; none where the model has none."""
    return {"biases": tuple(layer[f"{name}_bias"] for name in names)} if there else {}


def project(
    x: Float[Array, "... E"], *weights: Float[Array, "F E"], residual: Float[Array, "... F"] | None = None, **options: Any
) -> tuple[Float[Array, "... F"], ...]:
    """`pallas_kernels.project_tokens` on tokens in any arrangement."""
    rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    results = project_tokens(x.reshape(-1, x.shape[-1]), weights, residual=rows, **options)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def param_shapes(config: ModelConfig) -> Params:
    """The parameter pytree with each array's shape, a tuple of ints, in its place."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    layer = {"attn_norm": (e,), "q": (q, e), "k": (kv, e), "v": (kv, e), "o": (e, q)}
    layer |= {"mlp_norm": (e,), "gate": (f, e), "up": (f, e), "down": (e, f)}
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.o_bias:
        layer |= {"o_bias": (e,)}
    if config.mlp_bias:
        layer |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (e,)}
    if config.qk_norm:
        layer |= {"q_norm": (d,), "k_norm": (d,)}
    shapes = {"embed": (config.vocab_size, e), "final_norm": (e,), "layers": tuple(dict(layer) for _ in range(config.num_layers))}
    return shapes if config.tie_embeddings else shapes | {"lm_head": (config.vocab_size, e)}


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


def causal_mix(implementation: Literal["xla", "cudnn"] | None = None) -> Mix:
    """Attention over the batch itself, causal, every row its own sequence: what training and the oracles of tests use.

    Positions must increase along T: token t attends to tokens 0..t of its row, or to the latest of them where the layer has a window.
    `state` passes through untouched. implementation is `jax.nn.dot_product_attention`'s: None lets JAX choose, "cudnn" needs an NVIDIA GPU
    and float16 or bfloat16, and float16 needs a GPU in any case; memory is T x T per head except with "cudnn".
    """

    def mix(layer: int, heads: LayerInput, state: Any):
        window = None if heads.window is None else (heads.window - 1, 0)
        static = {"is_causal": True, "scale": heads.sm_scale, "local_window_size": window, "implementation": implementation}
        with jax.default_matmul_precision("highest" if heads.q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(heads.q, heads.k, heads.v, **static), state

    return mix
