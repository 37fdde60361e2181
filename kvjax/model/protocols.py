"""What engines and models agree on: the pure decoder functions, and a model with its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import Shards
from kvjax.model.config import ModelConfig
from kvjax.model.layers import Rope
from pallas_kernels.core.matrices import PackedMatrix
from pallas_kernels.core.soft_cap import Scale

Params = Any
"""A pytree of weights; the decoder that made it knows its structure. Its matrices may be packed."""


Matrix = Float[Array, "F E"] | PackedMatrix
"""A matrix of a layer, the embedding or the head, stored [features, inputs]: in the model's compute_dtype, or in codes
with scales."""


@flax.struct.dataclass
class Heads:
    """Input of an attention layer: queries, keys and values, normalised and rotated.

    sm_scale: scale of logits. window: how many latest tokens a query sees, its own included; None: all before it.
    share_with: the number of the layer that keys and values belong to; None: the layer itself. If the decoder does not
    have that layer, as in a slice of a model's layers, k and v are None. rope: how q and k were rotated; None: a policy
    cannot turn q to other positions.
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
    """Input of a Gated DeltaNet layer (`pallas_kernels.gated_delta`): queries, keys and values before their convolution
    over time.

    x: for each token K queries and K keys of key_dim elements, then H values of value_dim. weight: W taps of the
    convolution. g: log of the decay. beta: how much of the correction is written. scale: factor of the queries.
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
    """Output of a lightning indexer: queries, the weights of its heads, and the key that the cache keeps for each
    token.

    `pallas_kernels.indexer_scores` scores every token by them. topk: how many tokens a query of the model reads: those
    that score best.
    """

    q: Float[Array, "B T HI DI"]
    weights: Float32[Array, "B T HI"]
    k: Float[Array, "B T DI"]
    topk: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Latents:
    """Input of a latent-attention layer: queries in the space of the cached rows, and the row of each token.

    row: a latent of C = value_dim elements, then a rotated key; all heads read it. The output is weighted sums of
    latents, `[B, T, H, C]`. sm_scale: factor of logits.
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

The decoder calls it once per layer, in order. Whoever runs the decoder decides what mixing tokens means: the engine
writes keys and values into pages and attends to pages; training attends causally within the batch. `state` is any
pytree and is threaded through the layers.
"""


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
        """How each of these parameters is cut over `tensor` devices, None for one that is whole on every device. Needed
        only on a mesh."""
        ...

    def run_layers(
        self, params: Params, x: Float[Array, "B T E"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """The output of the last layer for the input `x` of the first, and the state that `mix` threaded through the
        layers."""
        ...

    def final_norm(self, params: Params, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Final hidden states, from the output of the last layer."""
        ...

    def hidden(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mix: Mix, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Final hidden states and the state that `mix` threaded through the layers: `embed`, `run_layers`,
        `final_norm`."""
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
