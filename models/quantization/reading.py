"""Reads packed matrices of a checkpoint, one at a time: by layout, the tensors that hold a matrix, and how they become a `PackedMatrix`.

Layouts, of a matrix [F, E] with groups of g inputs (words are int32, whose lowest 4 bits are the first code):

    plain  weight [F, E] int8 or e4m3; weight_scale or weight_scale_inv, a factor: one number, [F, 1] or [blocks of F, blocks of E]
    words  weight_packed [F, E/8] words of code + 8, along E (of 8 bits: [F, E/4], code + 128); weight_scale [F, E/g]; weight_shape;
           weight_zero_point [F/8, E/g] words along F, or one I8, if there are zeros
    awq    qweight [E, F/8] words along F, in the order 0 2 4 6 1 3 5 7; qzeros [E/g, F/8] alike; scales [E/g, F]
    gptq   qweight [E/8, F] words along E; qzeros [E/g, F/8] words along F, of zero - 1 ("gptq") or zero ("gptq_v2"); scales [E/g, F];
           g_idx [E]: the group of each input

Sources: compressed-tensors' `compressors` (int_quantized, float_quantized, pack_quantized), AutoAWQ's `WQLinear_GEMM`, AutoGPTQ's
`QuantLinear`, transformers' `finegrained_fp8`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.checkpoint import Wanted
from kvjax.models.family import TENSORS
from kvjax.models.quantization.schemes import Published, Rule
from kvjax.models.tensors import Stored, read_whole
from pallas_kernels.matrices import DTYPES, MatrixFormat, PackedMatrix, check_packed

_OF_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale")
"""Scales of static activations, which are not used."""

_PARTS = {
    "plain": (("weight",), ("weight_scale", "weight_scale_inv", "weight_zero_point", *_OF_ACTIVATIONS)),
    "words": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
}
"""By layout, the tensors that a matrix has, and those that it may have."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each code, in the order of features."""


@dataclasses.dataclass(frozen=True)
class PackedSource:
    """A packed matrix as a checkpoint holds it."""

    module: str
    rule: Rule
    shape: tuple[int, int]
    parts: Mapping[str, Stored]

    @property
    def format(self) -> MatrixFormat:
        """In memory."""
        return self.rule.format

    def read(self) -> PackedMatrix:
        """The matrix, in arrays of the host. The ValueError names the matrix."""
        self._check_parts()
        tensors = {name: read_whole(stored) for name, stored in self.parts.items()}
        matrix = _LAYOUTS[self.rule.layout](self, tensors)
        check_packed(matrix, self.module)
        if matrix.shape != self.shape:
            raise ValueError(f"{self.module} is {list(matrix.shape)} unpacked, must be {list(self.shape)}")
        scales = matrix.scales.astype(np.float32)
        # Those of 4 bits may be below 0: llama.cpp's are where the largest number of a block is positive.
        if not (np.isfinite(scales).all() and (self.format.codes == "int4" or (scales >= 0).all())):
            raise ValueError(f"{self.module} has scales that are not finite, or below 0: download the model again")
        if self.format.codes == "fp8_e4m3" and ((matrix.codes.view(np.uint8) & 127) == 127).any():
            raise ValueError(f"{self.module} holds NaN: download the model again")
        return matrix

    def _check_parts(self) -> None:
        """ValueError for a tensor of another type or shape than the layout has. It is raised before any of them is read."""
        features, inputs = self.shape
        groups = self.format.scales_shape(self.shape)[1]
        if self.rule.layout in ("awq", "gptq") and (features % 8 or inputs % 8):
            raise ValueError(f"{self.module} is {[features, inputs]}; {self.rule.layout} needs multiples of 8")
        wanted = {
            "plain": {},
            "words": {"weight_packed": (features, -(-inputs * self.rule.bits // 32)), "weight_zero_point": (-(-features // 8), groups)},
            "awq": {"qweight": (inputs, features // 8), "qzeros": (groups, features // 8), "scales": (groups, features)},
            "gptq": {"qweight": (inputs // 8, features), "qzeros": (groups, features // 8), "scales": (groups, features)},
        }[self.rule.layout]
        for name, shape in wanted.items():
            stored = self.parts.get(name)
            if stored is None or (name == "weight_zero_point" and _is_one(stored)):
                continue
            if stored.shape != shape or (name != "scales" and stored.dtype != "I32"):
                said = f"{self.module} has {name} {stored.dtype}{list(stored.shape)}, must be {list(shape)}"
                raise ValueError(f"{said}{'' if name == 'scales' else ' in I32'}: download the model again")
        for name in ("weight_shape", "g_idx", "weight_g_idx"):
            stored = self.parts.get(name)
            if stored is not None and (
                stored.dtype not in ("I32", "I64") or math.prod(stored.shape) != (2 if name == "weight_shape" else inputs)
            ):
                raise ValueError(f"{self.module} has {name} {stored.dtype}{list(stored.shape)}: download the model again")

    def empty(self) -> PackedMatrix:
        """The matrix with shapes and dtypes in the place of its arrays; the dtype of scales may be another."""
        scales = jax.ShapeDtypeStruct(self.format.scales_shape(self.shape), jnp.float32)
        zeros = jax.ShapeDtypeStruct(scales.shape, jnp.uint8) if self.has_zeros else None
        return self.format.empty(self.shape).replace(scales=scales, zeros=zeros)

    @property
    def has_zeros(self) -> bool:
        """Whether its blocks have zeros of their own."""
        return "qzeros" in self.parts or "weight_zero_point" in self.parts


def sources(published: Published, wanted: list[Wanted], tensors: dict[str, Stored]) -> tuple[dict[str, PackedSource], dict[str, Stored]]:
    """The packed matrices by the name of the parameter, and the other tensors. A matrix that is stored in 16 or 32 bits is not packed.

    The ValueError names a matrix that no rule describes, or that lacks a tensor.
    """
    found, rest = {}, dict(tensors)
    for each in wanted:
        module = each.name.removesuffix(".weight")
        plain = tensors.get(each.name)
        packed = plain is not None and plain.dtype in ("I8", "F8_E4M3")
        marked = [name for name in ("weight_packed", "qweight") if f"{module}.{name}" in tensors]
        if not packed and not marked:
            continue
        rule = published.rule_of(module)
        if rule is None or _PARTS[rule.layout][0][0] not in (marked or ["weight"]):
            raise ValueError(
                f"{module} is stored packed ({', '.join(marked) or plain.dtype}), and quantization_config does not say how: "
                "correct config.json, or download the model again"
            )
        needed, more = _PARTS[rule.layout]
        parts = {name: rest.pop(f"{module}.{name}") for name in (*needed, *more) if f"{module}.{name}" in rest}
        missing = [name for name in needed if name not in parts]
        if rule.layout == "plain" and not parts.keys() & {"weight_scale", "weight_scale_inv"}:
            missing.append("weight_scale")
        if missing:
            raise ValueError(f"{module} is stored packed without {', '.join(missing)}: download the model again")
        found[each.name] = PackedSource(module, rule, each.shape, {name: parts[name] for name in parts if name not in _OF_ACTIVATIONS})
        if rule.layout == "gptq":
            _drop_empty_bias(module, {w.name for w in wanted}, rest)
    _drop_tied_head({w.name for w in wanted}, found, rest)
    return found, rest


def _drop_tied_head(wanted: set[str], found: Mapping[str, PackedSource], rest: dict[str, Stored]) -> None:
    """transformers stores what belongs to a packed embedding for the head too, if that is the same matrix. ValueError if it differs."""
    embed, head = TENSORS["embed"], TENSORS["lm_head"].removesuffix(".weight")
    if TENSORS["lm_head"] in wanted or embed not in found:
        return
    for part, stored in found[embed].parts.items():
        if (again := rest.pop(f"{head}.{part}", None)) is None:
            continue
        if again.shape != stored.shape or again.dtype != stored.dtype or read_whole(again).tobytes() != read_whole(stored).tobytes():
            raise ValueError(f"{again.name} differs from {stored.name}, and config.json says tie_word_embeddings: download the model again")


def _drop_empty_bias(module: str, wanted: set[str], rest: dict[str, Stored]) -> None:
    """AutoGPTQ stores a bias of zeros for layers that have none."""
    name = f"{module}.bias"
    if name in rest and name not in wanted and not read_whole(rest[name]).any():
        del rest[name]


def _plain(source: PackedSource, tensors: Mapping[str, np.ndarray]) -> PackedMatrix:
    codes = tensors["weight"]
    if codes.dtype != DTYPES[source.format.codes]:
        raise ValueError(f"{source.module} is stored in {codes.dtype}, and quantization_config says {source.format.codes}")
    scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    scales = scales.astype(np.float32) if scales.dtype == jnp.float8_e8m0fnu else scales
    if "weight_zero_point" in tensors and tensors["weight_zero_point"].any():  # some releases stored zeros that are all 0
        raise ValueError(f"{source.module} has a weight_zero_point other than 0, which is supported for 4 bits alone")
    return PackedMatrix(codes, _scales(source, scales), format=source.format)


def _words(source: PackedSource, tensors: Mapping[str, np.ndarray]) -> PackedMatrix:
    _check_order(source, tensors.get("weight_g_idx"))
    features, inputs = source.shape
    if tuple(tensors["weight_shape"].reshape(-1)) != source.shape:
        raise ValueError(f"{source.module} has weight_shape {tensors['weight_shape'].tolist()}, must be {list(source.shape)}")
    codes = np.ascontiguousarray(tensors["weight_packed"]).view(np.uint8)  # a byte holds two codes, as in memory
    scales = _scales(source, tensors["weight_scale"])
    if source.rule.bits == 8:
        return PackedMatrix((codes[:, :inputs] ^ 128).view(np.int8), scales, format=source.format)
    zeros = None
    if _is_one(source.parts.get("weight_zero_point")):  # of strategy tensor: a signed number, not packed
        zeros = np.full(scales.shape, tensors["weight_zero_point"].astype(np.int8).reshape(-1)[0] + 8, np.uint8)
    elif "weight_zero_point" in tensors:
        zeros = np.ascontiguousarray(_nibbles(tensors["weight_zero_point"].T)[:, :features].T)
    return PackedMatrix(np.ascontiguousarray(codes[:, : inputs // 2]), scales, zeros, format=source.format)


def _is_one(stored: Stored | None) -> bool:
    """Whether a tensor is one number of 8 bits."""
    return stored is not None and stored.dtype == "I8" and math.prod(stored.shape) == 1


def _scales(source: PackedSource, scales: np.ndarray) -> np.ndarray:
    """One scale for each block, in the matrix's shape of scales; axes of 1 may be left out, and one number counts for all. ValueError for
    another shape."""
    wanted = source.format.scales_shape(source.shape)
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), wanted).copy()
    if tuple(n for n in scales.shape if n > 1) != tuple(n for n in wanted if n > 1):
        raise ValueError(f"{source.module} has scales {list(scales.shape)}, must be {list(wanted)}: download the model again")
    return scales.reshape(wanted)


def _awq(source: PackedSource, tensors: Mapping[str, np.ndarray]) -> PackedMatrix:
    codes, zeros = (_nibbles(tensors[name], _AWQ_ORDER) for name in ("qweight", "qzeros"))
    return _from_columns(source, codes, zeros, tensors["scales"])


def _gptq(source: PackedSource, tensors: Mapping[str, np.ndarray]) -> PackedMatrix:
    _check_order(source, tensors.get("g_idx"))
    codes = _nibbles(tensors["qweight"].T).T
    zeros = _nibbles(tensors["qzeros"]) + np.uint8(source.rule.zero_shift)
    return _from_columns(source, codes, zeros, tensors["scales"])


def _from_columns(source: PackedSource, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> PackedMatrix:
    """From codes [E, F], and zeros and scales [E/g, F]."""
    pairs = np.ascontiguousarray(codes.T)
    joined = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
    return PackedMatrix(joined, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T), format=source.format)


def _nibbles(words: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """The codes in words along the last axis. order: the place in a word of each code."""
    wide = np.ascontiguousarray(words).view(np.uint32)
    return np.stack([(wide >> np.uint32(4 * place)).astype(np.uint8) & 15 for place in order], axis=-1).reshape(len(wide), -1)


def _check_order(source: PackedSource, groups: np.ndarray | None) -> None:
    """ValueError where inputs are grouped in another order than they come."""
    if groups is None:
        return
    inputs = np.arange(source.shape[1]) // (source.format.columns or source.shape[1])
    if not np.array_equal(groups.reshape(-1), inputs):
        raise ValueError(
            f"{source.module} has a g_idx that groups inputs in another order (desc_act or actorder), which is not supported: use a "
            "checkpoint that was made with desc_act=False or static groups, or the one that it was quantized from"
        )


_LAYOUTS = {"plain": _plain, "words": _words, "awq": _awq, "gptq": _gptq}
