"""Which matrices of a model are packed, and how: the schemes of `kvjax.load(weights=...)`, and how many bytes weights
take.

Norms, biases, convolutions and the small matrices in `UNPACKED` stay arrays in the model's compute_dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig
from kvjax.model.protocols import Params
from pallas_kernels.core.matrices import MatrixFormat, is_packed, pack

UNPACKED = frozenset({"a", "b", "index_weights", "q_norm", "k_norm"})
"""Matrices that are never packed: decays and rates of Gated DeltaNet, the weights of an indexer's heads, and norms with
weights for each head. They have one row per head."""

TABLES = frozenset({"embed", "lm_head"})
"""The embedding and the head."""


@dataclasses.dataclass(frozen=True)
class WeightScheme:
    """layers: the format of the matrices of layers. tables: that of the embedding and the head."""

    layers: MatrixFormat
    tables: MatrixFormat

    def format_of(self, layer: int | None, name: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        """The format of a parameter; None: it is an array. layer: its layer; None: outside. name: its key in the layer
        or the model."""
        if len(shape) != 2 or name in UNPACKED:
            return None
        return self.tables if layer is None else self.layers


_CHANNEL = {codes: MatrixFormat(codes) for codes in ("int8", "fp8_e4m3")}
_BLOCK = {codes: MatrixFormat(codes, 128, 128) for codes in ("int8", "fp8_e4m3")}
SCHEMES: Mapping[str, WeightScheme] = {
    "int8": WeightScheme(_CHANNEL["int8"], _CHANNEL["int8"]),
    "fp8": WeightScheme(_CHANNEL["fp8_e4m3"], _CHANNEL["fp8_e4m3"]),
    "int4": WeightScheme(MatrixFormat("int4", 1, 128), _CHANNEL["int8"]),
    "fp8:tokens": WeightScheme(MatrixFormat("fp8_e4m3", fp8_tokens=True), _CHANNEL["fp8_e4m3"]),
    "int8:128x128": WeightScheme(_BLOCK["int8"], _BLOCK["int8"]),
    "fp8:128x128": WeightScheme(_BLOCK["fp8_e4m3"], _BLOCK["fp8_e4m3"]),
}
"""Schemes by name. int8, fp8: one scale for each output channel. int4: one for each 128 inputs of a channel; the
embedding and the head are int8, because what a model says depends most on them. fp8:tokens: as fp8, but products of
many tokens in layers are of fp8 and fp8."""

FormatOf = Callable[[int | None, str, tuple[int, ...]], MatrixFormat | None]
"""`WeightScheme.format_of`."""


def scheme_of(name: str, option: str = "weights") -> WeightScheme:
    """The scheme of this name. ValueError, with the names, for any other. option: that names it."""
    if name not in SCHEMES:
        raise ValueError(f"{option} is {name!r}; supported: {', '.join(SCHEMES)}, or None for weights as they are stored")
    return SCHEMES[name]


def pack_params(params: Params, weights: str) -> Params:
    """Parameters with their matrices packed by a scheme. The given arrays stay as they are. ValueError for matrices
    that are packed already, or cannot be (`pallas_kernels.core.matrices.pack`)."""
    scheme = scheme_of(weights)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_packed)
    if any(is_packed(leaf) for _, leaf in leaves):
        raise ValueError(f"these parameters are packed already: pack the model that they were made from as {weights}")
    packed = []
    for path, leaf in leaves:
        own = scheme.format_of(*place_of(path), leaf.shape)
        packed.append(leaf if own is None else pack(leaf, own, jax.tree_util.keystr(path, simple=True, separator=".")))
    return jax.tree.unflatten(structure, packed)


def format_function(weights: str | FormatOf | None) -> FormatOf | None:
    """The function that says how parameters are packed. weights: the name of a scheme, or the function itself; None:
    nothing is packed. ValueError as `scheme_of`."""
    return scheme_of(weights).format_of if isinstance(weights, str) else weights


def packing_of(params: Params) -> str | FormatOf | None:
    """How parameters are packed: the name of their scheme, None where nothing is packed, else a function that says
    it."""
    named = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_packed)[0]
    if not any(is_packed(leaf) for _, leaf in named):
        return None
    found = {place_of(path): leaf.format if is_packed(leaf) else None for path, leaf in named}
    shapes = {place_of(path): leaf.shape for path, leaf in named}
    for name, scheme in SCHEMES.items():
        if all(scheme.format_of(*place, shape) == found[place] for place, shape in shapes.items()):
            return name
    return lambda layer, name, shape: found[layer, name]


def place_of(path: tuple[Any, ...]) -> tuple[int | None, str]:
    """(layer or None, name) of a parameter, from its path in the pytree."""
    return (path[1].idx if path[0].key == "layers" else None), path[-1].key


@functools.lru_cache(maxsize=64)
def weights_bytes(config: ModelConfig, format_of: FormatOf | None = None, *, tensor: int = 1) -> int:
    """Bytes of a model's weights on each of `tensor` devices, counted from the shapes alone.

    format_of: which of them are packed; None: none is. Scales count as `pack` makes them. ValueError for heads or MLP
    columns that do not divide.
    """
    tables = ("embed",) if config.tie_embeddings else ("embed", "lm_head")
    shapes: list[tuple[int | None, str, tuple[int, ...]]] = [(None, name, table_shape(config, tensor)) for name in tables]
    shapes.append((None, "final_norm", (config.hidden_size,)))
    known = {layer: _shapes_on_device(layer, config.hidden_size, tensor) for layer in dict.fromkeys(config.layers)}
    for number, layer in enumerate(config.layers):
        shapes += [(number, name, shape) for name, shape in known[layer].items()]
    item, total = jnp.dtype(config.compute_dtype).itemsize, 0
    for layer, name, shape in shapes:
        packed = None if format_of is None else format_of(layer, name, shape)
        total += item * math.prod(shape) if packed is None else packed.bytes_of(shape)
    return total


def table_shape(config: ModelConfig, tensor: int = 1) -> tuple[int, int]:
    """The shape of the embedding on each of `tensor` devices; the head has the same."""
    return -(-config.vocab_size // tensor), config.hidden_size


def _shapes_on_device(layer: LayerConfig, hidden_size: int, tensor: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's parameters on each of `tensor` devices."""
    cuts, shapes = layer.cuts(tensor) if tensor > 1 else {}, {}
    for name, shape in layer.shapes(hidden_size).items():
        how = cuts.get(name)
        shapes[name] = shape if how is None else tuple(len(how.rows[0]) if axis == how.axis else n for axis, n in enumerate(shape))
    return shapes
