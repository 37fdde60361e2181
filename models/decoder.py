"""The one decoder that every family shares: a transformer with norms before or after, a mixer and a gated MLP in each
layer, RMSNorm.

The configuration says what each layer is. `kvjax.models.mixers` has a function for each kind of mixer,
`kvjax.models.mlp` the MLP. The parameters are a plain pytree. Matrices are stored [out, in], as in checkpoints; a
decode step reads them fastest in this layout:

    {"embed": [V, E], "final_norm": [E], "layers": (layer, ...), optional "lm_head": [V, E]}
    layer: attn_norm [E], what the mixer has, with its last projection `o` [E, ...]; mlp_norm [E], gate [F, E], up [F,
           E], down [E, F]; no mlp_norm in a parallel layer; attn_post_norm [E], mlp_post_norm [E] beside or instead of
           the first two (`LayerConfig.shapes` says which a layer has)
    attention: q [H*D, E], or [2*H*D, E] with gates, k [K*D, E], v [K*D, E], o [E, H*D], optional q_bias, k_bias,
           v_bias, o_bias, q_norm [D], k_norm [D] (or for each head: [H, D], [K, D]; or of all heads: [H*D], [K*D]);
           nothing of k and v in a layer that reads another's keys and values
    Gated DeltaNet: see `kvjax.model.layers.DeltaLayer.shapes`; latent attention: see
        `kvjax.model.layers.LatentLayer.shapes`

Matrices are arrays or packed (`pallas_kernels.core.matrices`). Arrays and activations have the model's compute_dtype;
norms and RoPE are computed in float32 and rounded once; logits are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import ONE_DEVICE, Shards, cut, cut_of, even
from kvjax.engine.recurrent import whole
from kvjax.model.config import ModelConfig
from kvjax.model.layers import AttentionLayer, DeltaLayer, LatentLayer, LayerConfig
from kvjax.model.protocols import Heads, Latents, LayerInput, Matrix, Mix, Params, Recurrence
from kvjax.models.mixers.attention import attend_heads
from kvjax.models.mixers.delta import recall_states
from kvjax.models.mixers.latent import attend_latents, causal_latents
from kvjax.models.mixers.tokens import Tokens
from kvjax.models.mlp.gated import gate_tokens
from kvjax.models.products import biases_of, project
from pallas_kernels.core.matrices import take_rows
from pallas_kernels.core.rope_norm import layer_norm, rms_norm
from pallas_kernels.core.soft_cap import SoftCap, scaled

MIXERS = {AttentionLayer: attend_heads, DeltaLayer: recall_states, LatentLayer: attend_latents}
"""Functions by the kind of a layer's mixer: `mixer(config, params, x, tokens, mix, state) -> (out, state)`.

config: the layer's mixer. params: the layer's parameters. x: the layer's input, before its norm, `[B, T, E]`. tokens:
`Tokens`. mix: `kvjax.model.protocols.Mix` with the layer's number filled in. out: the input of the projection `o`, `[B,
T, inputs of o]`.
"""

MLP_TOKENS = 8192
"""Tokens of a row that go through an MLP together. The inner results of more would take gigabytes: of a 7B model, 0.6
GB for each 8192."""


@dataclasses.dataclass(frozen=True)
class TransformerDecoder:
    """Pure functions over `init_params`' pytree (see `kvjax.model.protocols.Decoder`). Static and hashable: pass it to
    jit as a static argument."""

    config: ModelConfig
    shards: Shards = ONE_DEVICE

    def on_shards(self, shards: Shards) -> TransformerDecoder:
        """The functions of one device of a mesh, for programs inside `jax.shard_map`."""
        return TransformerDecoder(self.config.on_shards(shards.tensor), shards)

    def cuts(self, params: Params, tensor: int) -> Params:
        """How each of these parameters is cut over `tensor` devices; None: whole on each. The vocabulary is padded to a
        multiple."""
        vocab = cut(("vocab", None), (even("rows", -(-self.config.vocab_size // tensor) * tensor, tensor), 1))
        layers = self.config.layers[: len(params["layers"])]
        known = {layer: layer.cuts(tensor) for layer in dict.fromkeys(layers)}
        found = {"embed": vocab, "final_norm": None, "lm_head": vocab}
        of_layers = tuple(
            {name: cut_of(known[layer].get(name), matrix, f"{name} of layer {number}") for name, matrix in own.items()}
            for number, (layer, own) in enumerate(zip(layers, params["layers"], strict=True))
        )
        return {name: cut_of(found[name], params[name], name) for name in params if name != "layers"} | {"layers": of_layers}

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """The input of the first layer. tokens: ids in [0, V); any other id, also -1, gives NaN, so pad with a real
        id."""
        if self.shards.tensor == 1:
            rows = take_rows(params["embed"], tokens, fill=jnp.nan, dtype=self.config.compute_dtype)
        else:
            rows = self.shards.rows_of(params["embed"], tokens, self.config.vocab_size, self.config.compute_dtype)
        rows, scale = rows.astype(self.config.compute_dtype), self.config.embed_scale
        return rows if scale is None else rows * jnp.asarray(scale, rows.dtype)

    def of_layers(self, first: int, last: int) -> TransformerDecoder:
        """A decoder of layers [first, last) alone, numbered from 0. Decoders of equal layers are equal, so they share
        programs.

        ValueError for layers that the model does not have.
        """
        if not 0 <= first < last <= self.config.num_layers:
            raise ValueError(f"layers [{first}, {last}) are not a slice of the model's {self.config.num_layers} layers")
        return dataclasses.replace(self, config=self.config.of_layers(first, last))

    def params_of(self, params: Params, first: int, last: int) -> Params:
        """The parameters of layers [first, last) alone, for the decoder of `of_layers`."""
        return {**params, "layers": params["layers"][first:last]}

    def run_layers(
        self, params: Params, x: Float[Array, "B T E"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """The output of the last layer for the input `x` of the first, and the state that `mix` threaded through the
        layers.

        Any cut of a model's layers into slices (`of_layers`) gives the same bits. ValueError if params have another
        number of layers.
        """
        if len(params["layers"]) != self.config.num_layers:
            raise ValueError(f"params have {len(params['layers'])} layers, but the configuration has {self.config.num_layers}")
        config = self.config
        tokens = Tokens(positions, config.norm_eps, config.norm_offset, config.centered_norms, self.shards)
        mix = _sharing(mix, self.config.layers)
        for number, (layer, weights) in enumerate(zip(self.config.layers, params["layers"], strict=True)):
            x = jax.lax.optimization_barrier(x)  # else XLA keeps float32 inside a program, and rounds only at its end
            read = x
            if layer.parallel:
                read = self._norm(x, weights["attn_norm"])
                weights = {name: each for name, each in weights.items() if name != "attn_norm"}
            out, state = MIXERS[type(layer.mixer)](layer.mixer, weights, read, tokens, functools.partial(mix, number), state)
            after = (weights["attn_post_norm"], weights["mlp_post_norm"]) if layer.post_norms else (None, None)
            x = self._add(x, out, weights["o"], biases_of(weights, layer.mixer.o_bias, "o"), after[0])
            x = self._add_mlp(layer, weights, x, tokens, after[1], read if layer.parallel else None)
        return x, state

    def final_norm(self, params: Params, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Final hidden states, from the output of the last layer."""
        return self._norm(jax.lax.optimization_barrier(x), params["final_norm"])

    def _norm(self, x: Float[Array, "B T E"], weight: Float[Array, "E"]) -> Float[Array, "B T E"]:
        if self.config.centered_norms:
            return layer_norm(x, weight, self.config.norm_eps)
        return rms_norm(x, weight, self.config.norm_eps, self.config.norm_offset)

    def _add(
        self,
        x: Float[Array, "B T E"],
        inner: Float[Array, "B T F"],
        matrix: Matrix,
        biases: dict[str, Any],
        post_norm: Float[Array, "E"] | None,
    ) -> Float[Array, "B T E"]:
        """x plus one half of a layer: `inner`, projected back and, if `post_norm` is given, normalised."""
        if self.shards.tensor > 1:
            return self._add_parts(x, inner, matrix, biases, post_norm)
        if post_norm is None and self.config.residual_scale is None:
            return project(inner, matrix, residual=x, **biases)[0]
        return x + self._scaled(project(inner, matrix, **biases)[0], post_norm)

    def _add_mlp(
        self, layer: LayerConfig, weights: Params, x: Float[Array, "B T E"], tokens: Tokens, post_norm, read: Array | None
    ) -> Float[Array, "B T E"]:
        """x plus the MLP of a layer, `MLP_TOKENS` of each row after the other. Packed matrices may be widened for each
        of these parts. read: what the MLP reads in a parallel layer, normalised; None: x."""

        def add(part: Array, first: Array | int) -> Array:
            source = part if read is None else jax.lax.dynamic_slice_in_dim(read, first, part.shape[1], axis=1)
            inner = gate_tokens(layer.mlp, weights, source, tokens)
            return self._add(part, inner, weights["down"], biases_of(weights, layer.mlp.bias, "down"), post_norm)

        def add_at(number: Array, x: Array) -> Array:
            first = number * MLP_TOKENS
            part = jax.lax.dynamic_slice_in_dim(x, first, MLP_TOKENS, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, add(part, first), first, axis=1)

        if x.shape[1] <= MLP_TOKENS:
            return add(x, 0)
        # A loop, for two reasons. Of unrolled parts, XLA would compute all inner results first, which takes memory. And
        # XLA begins a copy from host memory as few operations before its use as it thinks enough. The loop is one
        # operation, and the copy runs beside all of it.
        parts = x.shape[1] // MLP_TOKENS
        x = jax.lax.fori_loop(0, parts, add_at, x)
        rest = x[:, parts * MLP_TOKENS :]
        end = parts * MLP_TOKENS
        return jax.lax.dynamic_update_slice_in_dim(x, add(rest, end), end, axis=1) if rest.shape[1] else x

    def _add_parts(self, x: Array, inner: Array, matrix: Matrix, biases: dict[str, Any], post_norm: Array | None) -> Float[Array, "B T E"]:
        """`_add` where each device has some columns of the matrix."""
        parts = project(inner, matrix)[0]
        if post_norm is None and not biases and self.config.residual_scale is None:
            return self.shards.sum(parts, residual=x)
        y = self.shards.sum(parts)
        for bias in biases.get("biases", ()):
            y = y + bias
        return x + self._scaled(y, post_norm)

    def _scaled(self, y: Float[Array, "B T E"], post_norm: Float[Array, "E"] | None) -> Float[Array, "B T E"]:
        """What half a layer adds: normalised and multiplied, as the model has it."""
        y, scale = y if post_norm is None else self._norm(y, post_norm), self.config.residual_scale
        return y if scale is None else y * jnp.asarray(scale, y.dtype)

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states, after the last norm, and the state that `mix` threaded through the layers.

        tokens: as in `embed`. positions: absolute, in tokens. A row's result depends only on that row, unless `mix`
        mixes rows. ValueError if shapes do not match the configuration.
        """
        if tokens.ndim != 2 or tokens.shape != positions.shape:
            raise ValueError(f"tokens and positions must have one shape [B, T], got {tokens.shape} and {positions.shape}")
        x, state = self.run_layers(params, self.embed(params, tokens), positions, mix, state)
        return self.final_norm(params, x), state

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float32[Array, "... V"]:
        """Next-token logits, float32 whatever the weights' dtype. Tied models read the embedding."""
        found = project(hidden, params["embed" if self.config.tie_embeddings else "lm_head"], out_dtype=jnp.float32)[0]
        found = self.shards.joined(found)[..., : self.config.vocab_size]
        found = found if self.config.logit_scale is None else found * jnp.float32(self.config.logit_scale)
        cap = self.config.logits_softcap
        return found if cap is None else scaled(found, SoftCap(1.0, cap))


def _sharing(mix: Mix, layers: tuple[LayerConfig, ...]) -> Mix:
    """`mix`, which is given the keys and values of the layers that others share with in those layers too."""
    owners, known = {layer.mixer.share_with for layer in layers}, {}

    def shared(layer: int, given: LayerInput, state: Any):
        if layer in owners:
            known[layer] = {"k": given.k, "v": given.v}
        if isinstance(given, Heads):
            given = given.replace(**known.get(given.share_with, {}))
        return mix(layer, given, state)

    return shared


def param_shapes(config: ModelConfig) -> Params:
    """The parameter pytree with each array's shape, a tuple of ints, in its place."""
    e = config.hidden_size
    shapes = {"embed": (config.vocab_size, e), "final_norm": (e,), "layers": tuple(layer.shapes(e) for layer in config.layers)}
    return shapes if config.tie_embeddings else shapes | {"lm_head": (config.vocab_size, e)}


def init_params(config: ModelConfig, key: Array, *, std: float = 0.02) -> Params:
    """Random weights: normal matrices with standard deviation `std`, zero biases, norms that multiply by one, and
    decays of Gated DeltaNet layers spread over their range, as in transformers.

    key: a jax.random key. Every array has the model's compute_dtype. Needs no memory beyond the weights; may be jitted.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=is_shape)
    keys = jax.random.split(key, len(named))
    leaves = [_init_leaf(path[-1].key, shape, k, config, std) for (path, shape), k in zip(named, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def is_shape(node: Any) -> bool:
    """Whether this is a shape of `param_shapes`: a test for leaves, for `jax.tree` functions."""
    return isinstance(node, tuple) and all(isinstance(n, int) for n in node)


def _init_leaf(name: str, shape: tuple[int, ...], key: Array, config: ModelConfig, std: float) -> Array:
    dtype = config.compute_dtype
    if name in ("delta_norm", "dt_bias"):
        return jnp.ones(shape, dtype)
    if name == "decay_log":
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)
    if name.endswith("_norm"):
        return jnp.full(shape, 1 - config.norm_offset, dtype)
    if name.endswith("_bias"):
        return jnp.zeros(shape, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


def causal_mix(implementation: Literal["xla", "cudnn"] | None = None) -> Mix:
    """Causal attention and recurrences within the batch, where every row is a sequence. Training and the oracles of
    tests use it.

    Positions must increase along T: token t attends to tokens 0..t of its row, or to the latest of them where the layer
    has a window. `state` passes through untouched. implementation is `jax.nn.dot_product_attention`'s: None lets JAX
    choose, "cudnn" needs an NVIDIA GPU and float16 or bfloat16, and float16 needs a GPU in any case; memory is T x T
    per head except with "cudnn". Layers that share with a layer outside a slice raise ValueError: run the whole model.
    Recurrences have no gradient, and latent attention has none through the indexer's choice.
    """

    def mix(layer: int, heads: LayerInput, state: Any):
        if isinstance(heads, Recurrence):
            return whole(heads), state
        if isinstance(heads, Latents):
            return causal_latents(heads), state
        if heads.k is None:
            raise ValueError(f"layer {layer} reads keys of a layer before this slice, which are not kept here: run all layers of the model")
        window = None if heads.window is None else (heads.window - 1, 0)
        static = {"is_causal": True, "scale": heads.sm_scale, "local_window_size": window, "implementation": implementation}
        if isinstance(heads.sm_scale, SoftCap):
            return _capped_attention(heads), state
        with jax.default_matmul_precision("highest" if heads.q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(heads.q, heads.k, heads.v, **static), state

    return mix


def _capped_attention(heads: Heads) -> Float[Array, "B T H D"]:
    """Causal attention with a soft-cap, which `jax.nn.dot_product_attention` does not have. Memory: T x T per head."""
    batch, count, num_heads, head_dim = heads.q.shape
    q = heads.q.reshape(batch, count, heads.k.shape[2], -1, head_dim)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    products = jnp.einsum("btkgd,bskd->bkgts", q, heads.k, precision=precision, preferred_element_type=jnp.float32)
    distance = jnp.arange(count)[:, None] - jnp.arange(count)
    seen = (distance >= 0) & (distance < (heads.window or count))
    weights = jax.nn.softmax(jnp.where(seen, scaled(products, heads.sm_scale), -jnp.inf), axis=-1).astype(heads.v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, heads.v, precision=precision).reshape(batch, count, num_heads, -1)
