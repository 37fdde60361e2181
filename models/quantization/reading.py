"""Finds packed matrices in a checkpoint and reads them: kept packed (`PackedSource`), or widened while they are loaded
(`Widened`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.checkpoint import Wanted
from kvjax.models.family import TENSORS
from kvjax.models.quantization.layouts import AGAIN, Layout, StoredMatrix
from kvjax.models.quantization.layouts import LAYOUTS as _LAYOUTS
from kvjax.models.quantization.nested import Bnb4
from kvjax.models.quantization.rules import Published
from kvjax.models.quantization.torchao import TorchAo
from kvjax.models.tensors import Tensor
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, check_packed

LAYOUTS: Mapping[str, Layout] = {**_LAYOUTS, "bnb4": Bnb4(), "torchao": TorchAo()}
"""Every layout, by name."""


_LARGEST_CODE = np.float32(448)
"""Of all formats."""


@dataclasses.dataclass(frozen=True)
class PackedSource:
    """A packed matrix of a checkpoint that stays packed. format: in memory. has_zeros: whether its blocks have zeros of
    their own."""

    matrix: StoredMatrix
    format: MatrixFormat

    def read(self) -> PackedMatrix:
        """The matrix, in arrays of the host. The ValueError names the matrix."""
        with np.errstate(all="ignore"):  # what is not finite is refused
            return self._read(self.matrix.module)

    def _read(self, module: str) -> PackedMatrix:
        found = LAYOUTS[self.matrix.rule.layout].whole(self.matrix, self.format)
        check_packed(found, module)
        scales = found.scales.astype(np.float32)
        # Times the largest code, so that no number is infinite.
        # Those of 4 bits may be below 0: llama.cpp's are where the largest number of a block is positive.
        if not (np.isfinite(scales * _LARGEST_CODE).all() and (self.format.codes == "int4" or (scales >= 0).all())):
            raise ValueError(f"{module} has scales that are not finite, or below 0: {AGAIN}")
        if self.format.codes == "fp8_e4m3" and ((found.codes.view(np.uint8) & 127) == 127).any():
            raise ValueError(f"{module} holds NaN: {AGAIN}")
        return found

    def empty(self) -> PackedMatrix:
        """The matrix with shapes and dtypes in the place of its arrays; the dtype of scales may be another."""
        shape = self.matrix.shape
        scales = jax.ShapeDtypeStruct(self.format.scales_shape(shape), jnp.float32)
        zeros = jax.ShapeDtypeStruct(scales.shape, jnp.uint8) if self.has_zeros else None
        return self.format.empty(shape).replace(scales=scales, zeros=zeros)

    @property
    def has_zeros(self) -> bool:
        """Whether its blocks have zeros of their own."""
        return self.format.codes == "int4" and bool(self.matrix.parts.keys() & {"qzeros", "weight_zero_point"})


@dataclasses.dataclass(frozen=True)
class Widened:
    """A packed matrix that none of our formats holds: a tensor (`kvjax.models.tensors.Tensor`) of its numbers in
    float32."""

    widened = True
    """What is stored has no type in common with other tensors."""

    matrix: StoredMatrix

    @property
    def name(self) -> str:
        """That of the parameter."""
        return f"{self.matrix.module}.weight"

    @property
    def shape(self) -> tuple[int, ...]:
        """(F, E)."""
        return self.matrix.shape

    @property
    def dtype(self) -> str:
        """Of what is read."""
        return "F32"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), in float32 as the format defines them. ValueError if a number is not finite."""
        if start >= stop:
            return np.zeros((0, self.shape[1]), np.float32)
        with np.errstate(all="ignore"):
            found = LAYOUTS[self.matrix.rule.layout].numbers(self.matrix, start, stop)
        if not np.isfinite(found).all():
            raise ValueError(f"{self.matrix.module} holds numbers that are not finite, from its scales or zeros: {AGAIN}")
        return found


_MARKS = ("weight_packed", "qweight", "weight_blocks", "_weight_qdata", "weight.absmax", "SCB")
"""Tensors that only packed matrices have."""


def sources(published: Published, wanted: list[Wanted], tensors: dict[str, Tensor]) -> tuple[dict[str, PackedSource], dict[str, Tensor]]:
    """The matrices that stay packed, by the name of the parameter, and the other tensors, those that are widened among
    them. A matrix that is stored in 16 or 32 bits is not packed.

    The ValueError names a matrix that no rule describes, that lacks a tensor, or whose tensors do not fit.
    """
    found, widened, rest = {}, {}, dict(tensors)
    names = {each.name for each in wanted}
    for each in wanted:
        module = each.name.removesuffix(".weight")
        marked = [name for name in _MARKS if f"{module}.{name}" in tensors]
        plain = tensors.get(each.name)
        if not marked and (plain is None or plain.dtype not in ("I8", "U8", "F8_E4M3")):
            continue
        matrix = _matrix(published, module, each, marked, rest)
        layout = LAYOUTS[matrix.rule.layout]
        layout.check(matrix)
        own = layout.format_of(matrix)
        if own is None:
            widened[each.name] = Widened(matrix)
        else:
            found[each.name] = PackedSource(matrix, own)
        if matrix.rule.layout == "gptq":
            _drop_empty_bias(module, names, rest)
    _drop_tied_head(names, found | widened, rest)
    return found, rest | widened


def _matrix(published: Published, module: str, each: Wanted, marked: list[str], rest: dict[str, Tensor]) -> StoredMatrix:
    """A packed matrix. Its tensors are taken out of `rest`."""
    rule, plain = published.rule_of(module), rest.get(each.name)
    if rule is None or LAYOUTS[rule.layout].mark not in (marked or ["weight"]):
        said = f"{module} is stored packed ({', '.join(marked) or plain.dtype}), and quantization_config does not say how"
        raise ValueError(f"{said}: correct config.json, or {AGAIN}")
    layout = LAYOUTS[rule.layout]
    if len(each.shape) != 2:
        raise ValueError(f"{module} is stored packed, and has {len(each.shape)} axes: {AGAIN}")
    known = (*layout.parts, *layout.more, *layout.unused)
    parts = {name: rest.pop(f"{module}.{name}") for name in known if f"{module}.{name}" in rest}
    missing = [name for name in layout.parts if name not in parts]
    if rule.layout == "plain" and not parts.keys() & {"weight_scale", "weight_scale_inv"}:
        missing.append("weight_scale")
    if missing:
        raise ValueError(f"{module} is stored packed without {', '.join(missing)}: {AGAIN}")
    return StoredMatrix(module, rule, each.shape, {name: part for name, part in parts.items() if name not in layout.unused})


def _drop_tied_head(wanted: set[str], found: Mapping[str, PackedSource | Widened], rest: dict[str, Tensor]) -> None:
    """transformers stores what belongs to a packed embedding for the head too, if that is the same matrix. ValueError
    if it differs."""
    embed, head = TENSORS["embed"], TENSORS["lm_head"].removesuffix(".weight")
    if TENSORS["lm_head"] in wanted or embed not in found:
        return
    for part, stored in found[embed].matrix.parts.items():
        if (again := rest.pop(f"{head}.{part}", None)) is None:
            continue
        if again.shape != stored.shape or again.dtype != stored.dtype or again.read_whole().tobytes() != stored.read_whole().tobytes():
            raise ValueError(f"{again.name} differs from {stored.name}, and config.json says tie_word_embeddings: download the model again")


def _drop_empty_bias(module: str, wanted: set[str], rest: dict[str, Tensor]) -> None:
    """AutoGPTQ stores a bias of zeros for layers that have none."""
    name = f"{module}.bias"
    if name in rest and name not in wanted and not rest[name].read_whole().any():
        del rest[name]
