"""Matrices that checkpoints store on top of each other in one tensor: cut apart when they are loaded, joined when they
are saved.

In memory every family has the same parameters (q, k, v, gate, up), each under the name that it would have by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.model.config import ModelConfig
from kvjax.models.checkpoint import Wanted, wanted_tensors
from kvjax.models.families import FAMILIES
from kvjax.models.tensors import RowsOf, RowsPacked, Tensor
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, is_packed


@runtime_checkable
class Source(Protocol):
    """A matrix that is stored packed (`kvjax.models.quantization.reading.PackedSource`)."""

    @property
    def format(self) -> MatrixFormat:
        """In memory."""

    def read(self) -> PackedMatrix:
        """The matrix, in arrays of the host."""

    def empty(self) -> PackedMatrix:
        """The matrix with shapes and dtypes in the place of its arrays."""


Stays = Source | RowsPacked
"""A matrix that stays packed as it is stored: of safetensors, or of a GGUF file."""


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Some rows of a matrix that is stored packed (see `Source`). name: of the parameter, for errors."""

    source: Source
    rows: range
    name: str

    def __post_init__(self):
        block = self.format.rows
        if self.rows.start % block or (len(self.rows) % block and self.rows.stop != self.source.empty().shape[0]):
            raise ValueError(
                f"{self.name} is rows {self.rows.start} to {self.rows.stop} of a matrix that is packed in blocks of {block} rows, which "
                "would be cut: load the checkpoint that it was quantized from"
            )

    @property
    def format(self) -> MatrixFormat:
        """In memory."""
        return self.source.format

    def read(self) -> PackedMatrix:
        """The rows, in arrays of the host."""
        return self._cut(self.source.read(), lambda leaf, first, last: leaf[first:last])

    def empty(self) -> PackedMatrix:
        """The rows with shapes and dtypes in the place of arrays."""
        return self._cut(self.source.empty(), lambda leaf, first, last: jax.ShapeDtypeStruct((last - first, *leaf.shape[1:]), leaf.dtype))

    def _cut(self, whole: PackedMatrix, rows_of) -> PackedMatrix:
        block, first, last = self.format.rows, self.rows.start, self.rows.stop
        blocks = first // block, -(-last // block)
        zeros = None if whole.zeros is None else rows_of(whole.zeros, *blocks)
        return whole.replace(codes=rows_of(whole.codes, first, last), scales=rows_of(whole.scales, *blocks), zeros=zeros)


def stored_wanted(config: ModelConfig) -> list[Wanted]:
    """What a checkpoint of this model stores: as `wanted_tensors`, with fused matrices as one."""
    return [Wanted(name, (sum(each.shape[0] for each in parts), *parts[0].shape[1:])) for name, parts in _groups(config).items()]


def _groups(config: ModelConfig) -> dict[str, list[Wanted]]:
    """The parameters that each stored tensor holds, in their order there."""
    family, found = FAMILIES[config.family], {}
    for each in wanted_tensors(config)[0]:
        found.setdefault(family.stored_name(each.name), []).append(each)
    order = {part: place for parts in family.fused.values() for place, part in enumerate(family.own_names(parts))}
    for parts in found.values():
        parts.sort(key=lambda each: next((place for name, place in order.items() if each.name.endswith(name)), 0))
    return found


def cut_apart(
    config: ModelConfig, tensors: Mapping[str, Tensor], packed: Mapping[str, Stays], where: str = "config.json"
) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the packed matrices by the names of parameters, with a view of some rows for each that is fused
    with others.

    where: what holds the configuration. ValueError for a fused tensor of another shape, and for packed ones of which a
    block would be cut.
    """
    tensors, packed = dict(tensors), dict(packed)
    for stored, parts in _groups(config).items():
        if len(parts) == 1 or (stored not in tensors and stored not in packed):
            continue
        ends = np.cumsum([each.shape[0] for each in parts]).tolist()
        rows = [range(end - each.shape[0], end) for each, end in zip(parts, ends, strict=True)]
        if stored in packed:
            whole = packed.pop(stored)
            if isinstance(whole, RowsPacked):
                packed |= {each.name: RowsOf(whole, own) for each, own in zip(parts, rows, strict=True)}
            else:
                packed |= {each.name: PackedRows(whole, own, each.name) for each, own in zip(parts, rows, strict=True)}
            continue
        whole = tensors.pop(stored)
        if whole.shape != (ends[-1], *parts[0].shape[1:]):
            raise ValueError(f"the weights do not fit {where}; {stored} is {list(whole.shape)}, must be {[ends[-1], *parts[0].shape[1:]]}")
        tensors |= {each.name: RowsOf(whole, own) for each, own in zip(parts, rows, strict=True)}
    return tensors, packed


Leaf = Array | PackedMatrix
"""A parameter."""


def stored_parts(config: ModelConfig, wanted: list[Wanted], leaves: list[Leaf]) -> list[tuple[str, tuple[Leaf, ...]]]:
    """What a checkpoint stores: the name of each tensor or packed matrix, and the parameters that it holds on top of
    each other.

    NotImplementedError for packed ones in different formats, or with blocks that would lie in two matrices.
    """
    by_name = {each.name: leaf for each, leaf in zip(wanted, leaves, strict=True)}
    found = [(name, tuple(by_name[each.name] for each in parts)) for name, parts in _groups(config).items()]
    for name, parts in found:
        _check_joined(name, parts)
    return found


def _check_joined(name: str, parts: tuple[Leaf, ...]) -> None:
    if len(parts) == 1 or not any(map(is_packed, parts)):
        return
    if not all(map(is_packed, parts)) or len({(part.format, part.zeros is None) for part in parts}) > 1:
        raise NotImplementedError(f"{name} is stored as one matrix, and its parts are packed in different formats: save it unpacked")
    block = parts[0].format.rows
    if any(part.shape[0] % block for part in parts[:-1]):
        raise NotImplementedError(f"{name} is stored as one matrix, and blocks of {block} rows do not divide its parts: save it unpacked")


def whole(parts: tuple[Leaf, ...]) -> Leaf:
    """The tensor or matrix that holds these parameters, on the host if there are several."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *parts)


def outline(parts: tuple[Leaf, ...]) -> Leaf:
    """The same without numbers: shapes and dtypes in the place of arrays."""
    return jax.eval_shape(lambda *leaves: jax.tree.map(lambda *each: jnp.concatenate(each), *leaves), *parts)
