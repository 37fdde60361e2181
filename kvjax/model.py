"""What engines and models agree on: the configuration, the pure decoder functions, and a model with its weights.

Dimension letters follow the design: B batch, T query tokens, H query heads, K KV heads, D head dim, E model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import Shards
from kvjax.cache.formats import CacheFormat
from kvjax.cache.spec import WHOLE, CacheSpec, GroupSpec
from kvjax.layers import AttentionLayer, DeltaLayer, LatentLayer, LayerConfig, LongRope, Mixer, Mlp, Rope, RopeScaling
from pallas_kernels.matrices import PackedMatrix
from pallas_kernels.soft_cap import Scale

Params = Any
"""A pytree of weights; the decoder that made it knows its structure. Its matrices may be packed."""

Matrix = Float[Array, "F E"] | PackedMatrix
"""A matrix of a layer, the embedding or the head, stored [features, inputs]: in the model's compute_dtype, or in codes with scales."""


@flax.struct.dataclass
class Heads:
    """Input of an attention layer: queries, keys and values, normalised and rotated.

    sm_scale: scale of logits. window: how many latest tokens a query sees, its own included; None: all before it. share_with: the number
    of the layer that keys and values belong to; None: the layer itself. If the decoder does not have that layer, as in a slice of a model's
    layers, k and v are None. rope: how q and k were rotated; None: a policy cannot turn q to other positions.
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"] | None
    v: Float[Array, "B T K D"] | None
    sm_scale: Scale = flax.struct.field(pytree_node=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    share_with: int | None = flax.struct.field(pytree_node=False, default=None)
    rope: Rope | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class Recurrence:
    """Input of a Gated DeltaNet layer (`pallas_kernels.gated_delta`): queries, keys and values before their convolution over time.

    x: for each token K queries and K keys of key_dim elements, then H values of value_dim. weight: W taps of the convolution. g: log of the
    decay. beta: how much of the correction is written. scale: factor of the queries.
    """

    x: Float[Array, "B T E"]
    weight: Float[Array, "E W"]
    g: Float32[Array, "B T H"]
    beta: Float32[Array, "B T H"]
    key_heads: int = flax.struct.field(pytree_node=False)
    key_dim: int = flax.struct.field(pytree_node=False)
    value_dim: int = flax.struct.field(pytree_node=False)
    scale: float = flax.struct.field(pytree_node=False)

    @property
    def value_heads(self) -> int:
        """H."""
        return self.g.shape[2]

    @property
    def width(self) -> int:
        """W, taps of the convolution."""
        return self.weight.shape[1]

    def split(
        self, convolved: Float[Array, "B n E"]
    ) -> tuple[Float[Array, "B n K Dk"], Float[Array, "B n K Dk"], Float[Array, "B n H Dv"]]:
        """Queries, keys and values from the output of the convolution."""
        dim = self.key_heads * self.key_dim
        parts = convolved[..., :dim], convolved[..., dim : 2 * dim], convolved[..., 2 * dim :]
        sizes = (self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return tuple(part.reshape(*convolved.shape[:2], *size) for part, size in zip(parts, sizes, strict=True))


@flax.struct.dataclass
class Indexer:
    """Output of a lightning indexer: queries, the weights of its heads, and the key that the cache keeps for each token.

    `pallas_kernels.indexer_scores` scores every token by them. topk: how many tokens a query of the model reads: those that score best.
    """

    q: Float[Array, "B T HI DI"]
    weights: Float32[Array, "B T HI"]
    k: Float[Array, "B T DI"]
    topk: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Latents:
    """Input of a latent-attention layer: queries in the space of the cached rows, and the row of each token.

    row: a latent of C = value_dim elements, then a rotated key; all heads read it. The output is weighted sums of latents, `[B, T, H, C]`.
    sm_scale: factor of logits.
    """

    q: Float[Array, "B T H D"]
    row: Float[Array, "B T D"]
    indexer: Indexer
    value_dim: int = flax.struct.field(pytree_node=False)
    sm_scale: float = flax.struct.field(pytree_node=False)

    @property
    def window(self) -> None:
        """None: a query may read every token before it."""
        return None

    @property
    def share_with(self) -> None:
        """None: a layer reads its own rows."""
        return None

    @property
    def rope(self) -> None:
        """None: queries lie in the space of latents, and are not turned to other positions."""
        return None


LayerInput = Heads | Latents | Recurrence
"""Input of `Mix`, by the kind of layer."""

Mix = Callable[[int, LayerInput, Any], tuple[Float[Array, "B T H D"], Any]]
"""`mix(layer, input, state) -> (out, state)`.

The decoder calls it once per layer, in order. Whoever runs the decoder decides what mixing tokens means: the engine writes keys and
values into pages and attends to pages; training attends causally within the batch. `state` is any pytree and is threaded through the
layers.
"""


DTYPES = ("float32", "bfloat16", "float16")
"""What models compute in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: what its layers are, and what surrounds them. Static and hashable.

    Args:
        family: its name in `kvjax.models.families`.
        vocab_size, hidden_size: V and E.
        layers: from the first on. They alone say how many layers there are, and of which kinds. A layer may read the keys and values of an
            earlier one (`AttentionLayer.share_with`) that has its own, with the same window, KV heads and head dim.
        norm_eps: epsilon of every norm.
        norm_offset: added to the weight of every RMSNorm outside Gated DeltaNet layers; 1 where checkpoints store the weight minus one.
        centered_norms: whether norms subtract the mean first: LayerNorm without a bias in place of RMSNorm, outside Gated DeltaNet and
            latent-attention layers.
        logits_softcap: cap of the model's logits, which become cap * tanh(logit / cap); None: there is none.
        embed_scale: factor of embeddings, rounded to compute_dtype first; None: no factor.
        residual_scale: factor of what each half of a layer adds; None: no factor.
        logit_scale: factor of logits; None: no factor.
        tie_embeddings: whether the head uses the embedding's weights.
        max_positions: the longest sequence, in tokens.
        compute_dtype: of activations, weights and cache, by name.
        eos_token_ids, bos_token_id: ids that end and start a text.
        owners: of a slice of a model's layers (`of_layers`), the mixers of the layers before it that it shares with; they are its layers
            -len(owners) to -1.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    compute_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm_offset: float = 0.0
    embed_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    centered_norms: bool = False
    logits_softcap: float | None = None
    owners: tuple[AttentionLayer, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Computed once, because every call of a jitted step needs it."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "max_positions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("layers", "owners", "eos_token_ids"):
            if not isinstance(getattr(self, name), tuple):  # it must be hashable
                raise ValueError(f"{name} must be a tuple, got {getattr(self, name)!r:.60}: tuple(...) makes one of a list")
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if self.logits_softcap is not None and not 0 < self.logits_softcap < math.inf:
            raise ValueError(f"logits_softcap must be above 0 and finite, or None, got {self.logits_softcap}")
        if self.centered_norms and self.norm_offset:
            raise ValueError(f"norms that subtract the mean have no offset, got norm_offset {self.norm_offset}")
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype must be one of {', '.join(DTYPES)}, got {self.compute_dtype!r}")
        self.cache_spec(page_size=1)  # refuses layers that cannot read those that they name
        for scaling in self._scalings():
            if scaling.most_positions is not None and self.max_positions > scaling.most_positions:
                known = f"rope_scaling of kind {scaling.kind} serves {scaling.most_positions:,}"
                raise ValueError(f"max_positions is {self.max_positions:,}, and {known}{self.for_longer(self.max_positions)}")

    def _scalings(self) -> tuple[RopeScaling, ...]:
        ropes = dict.fromkeys(mixer.rope for mixer in (*self.attention, *self.latent))
        return tuple(rope.scaling for rope in ropes if rope.scaling is not None)

    def for_longer(self, tokens: int) -> str:
        """The end of an error message that says how to run a sequence of `tokens` tokens, above `max_positions`; "" if nothing helps."""
        return next((scaling.for_longer(tokens) for scaling in self._scalings() if isinstance(scaling, LongRope)), "")

    @property
    def attention(self) -> tuple[AttentionLayer, ...]:
        """The mixers of the layers with keys and values per head."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionLayer))

    @property
    def latent(self) -> tuple[LatentLayer, ...]:
        """The mixers of the latent-attention layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, LatentLayer))

    @property
    def num_layers(self) -> int:
        """Layers, of all kinds."""
        return len(self.layers)

    def cache_spec(self, page_size: int, cache_format: CacheFormat | None = None) -> CacheSpec:
        """This model's cache, in pages of `page_size` tokens. Layers with the same window are one layer group, and so are recurrent
        layers. cache_format: how sealed pages are packed; raises as `CacheFormat.packed` does."""
        windows = {_group_name(layer.mixer): layer.mixer.window for layer in self.layers}
        groups = tuple(GroupSpec(name, WHOLE if name == RECURRENT else page_size, window) for name, window in windows.items())
        layers, owners = (
            tuple(mixer.cache_spec(_group_name(mixer), page_size, self.compute_dtype) for mixer in mixers)
            for mixers in ([layer.mixer for layer in self.layers], self.owners)
        )
        spec = CacheSpec(groups, layers, owners)
        return spec if cache_format is None else cache_format.packed(spec)

    def owners_before(self, first: int, last: int) -> tuple[int, ...]:
        """Numbers of the layers before `first` whose keys and values layers [first, last) read, ascending."""
        named = {layer.mixer.share_with for layer in self.layers[first:last]} - {None}
        return tuple(sorted(owner for owner in named if owner < first))

    def of_layers(self, first: int, last: int) -> ModelConfig:
        """Layers [first, last) alone, which are layers 0, 1, ..., and the `owners` that they share with: equal for equal layers."""
        before = self.owners_before(first, last)
        numbers = {owner: number for number, owner in enumerate(before, -len(before))}
        numbers |= {number: number - first for number in range(first, last)}
        layers = []
        for layer in self.layers[first:last]:
            owner = layer.mixer.share_with
            mixer = layer.mixer if owner is None else dataclasses.replace(layer.mixer, share_with=numbers[owner])
            layers.append(dataclasses.replace(layer, mixer=mixer))
        owners = tuple(self.owners[owner] if owner < 0 else self.layers[owner].mixer for owner in before)
        return dataclasses.replace(self, layers=tuple(layers), owners=owners)

    def on_shards(self, tensor: int) -> ModelConfig:
        """The model as each of `tensor` devices has it, but for the vocabulary. ValueError if heads or MLP columns do not divide."""
        owners = tuple(mixer.on_shards(tensor) for mixer in self.owners)
        return dataclasses.replace(self, layers=tuple(layer.on_shards(tensor) for layer in self.layers), owners=owners)

    @property
    def num_params(self) -> int:
        """Weights, counted from the shapes alone."""
        layers = sum(math.prod(shape) for layer in self.layers for shape in layer.shapes(self.hidden_size).values())
        return layers + self.hidden_size + self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)


RECURRENT = "recurrent"
"""Name of the layer group of recurrent layers."""


def _group_name(mixer: Mixer) -> str:
    if isinstance(mixer, DeltaLayer):
        return RECURRENT
    return "full" if mixer.window is None else f"window:{mixer.window}"


def uniform_config(
    *,
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float,
    norm_eps: float,
    tie_embeddings: bool,
    max_positions: int,
    compute_dtype: str = "float32",
    rope_scaling: RopeScaling | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (),
    eos_token_ids: tuple[int, ...] = (),
    bos_token_id: int | None = None,
) -> ModelConfig:
    """A model whose layers differ only in their windows: grouped-query attention, RoPE on whole heads, a gated SiLU MLP.

    The arguments are those of `ModelConfig`, `AttentionLayer`, `Mlp` and `Rope`, and they raise the same errors. Logits are scaled by
    head_dim ** -0.5. windows: one per layer, or () if no layer has a window.
    """
    if num_layers <= 0:
        raise ValueError(f"num_layers must be positive, got {num_layers}")
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim {head_dim} must be positive and even: RoPE rotates pairs")
    if windows and (len(windows) != num_layers or any(window is not None and window < 1 for window in windows)):
        raise ValueError(f"windows must be a positive number of tokens or None for each of {num_layers} layers, got {windows}")
    attention = AttentionLayer(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=Rope(rope_theta, head_dim, rope_scaling),
        sm_scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )
    mlp = Mlp(intermediate_size, bias=mlp_bias)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(LayerConfig(dataclasses.replace(attention, window=each), mlp) for each in windows or (None,) * num_layers),
        norm_eps=norm_eps,
        tie_embeddings=tie_embeddings,
        max_positions=max_positions,
        compute_dtype=compute_dtype,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
    )


def uniform_fields(config: ModelConfig) -> dict[str, Any] | None:
    """The arguments with which `uniform_config` makes this model, by name; None for a model that it cannot make."""
    first, shared = config.layers[0], ("family", "vocab_size", "hidden_size", "norm_eps", "tie_embeddings", "max_positions")
    mixer, windows = first.mixer, tuple(layer.mixer.window for layer in config.layers)
    if not isinstance(mixer, AttentionLayer):
        return None
    fields = {name: getattr(config, name) for name in (*shared, "compute_dtype", "eos_token_ids", "bos_token_id", "num_layers")}
    fields |= {name: getattr(mixer, name) for name in ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm")}
    fields |= {"intermediate_size": first.mlp.size, "mlp_bias": first.mlp.bias}
    fields |= {"rope_theta": mixer.rope.theta, "rope_scaling": mixer.rope.scaling, "windows": windows if any(windows) else ()}
    return fields if mixer.rope.dim == mixer.head_dim and uniform_config(**fields) == config else None


class Decoder(Protocol):
    """Pure functions over a parameter pytree. Static and hashable, so that jit can take it as a static argument."""

    @property
    def config(self) -> ModelConfig: ...

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """The input of the first layer."""
        ...

    def of_layers(self, first: int, last: int) -> Decoder:
        """A decoder of layers [first, last) alone, numbered from 0. Decoders of equal layers are equal."""
        ...

    def params_of(self, params: Params, first: int, last: int) -> Params:
        """The parameters of layers [first, last) alone."""
        ...

    def on_shards(self, shards: Shards) -> Decoder:
        """The functions of one device of a mesh, over its part of the parameters (`cuts`). Needed only on a mesh."""
        ...

    def cuts(self, params: Params, tensor: int) -> Params:
        """How each of these parameters is cut over `tensor` devices, None for one that is whole on every device. Needed only on a mesh."""
        ...

    def run_layers(
        self, params: Params, x: Float[Array, "B T E"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """The output of the last layer for the input `x` of the first, and the state that `mix` threaded through the layers."""
        ...

    def final_norm(self, params: Params, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Final hidden states, from the output of the last layer."""
        ...

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states and the state that `mix` threaded through the layers: `embed`, `run_layers`, `final_norm`."""
        ...

    def logits(self, params: Params, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Next-token logits, float32."""
        ...


class Model(Protocol):
    """A decoder with its weights and, if it has one, its tokenizer."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def params(self) -> Params: ...

    @property
    def tokenizer(self) -> Any: ...
