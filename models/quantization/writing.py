"""Writes packed matrices as compressed-tensors lays them out: `int-quantized`, `float-quantized` and `pack-quantized`.

`kvjax.load` reads the same numbers back, and transformers opens them, which the tests compare. `reading` describes the
layouts. What transformers cannot open is refused before anything is written (`check_writable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from kvjax.models.family import TENSORS
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, is_packed, unpack

_FORMATS = {"int8": "int-quantized", "fp8_e4m3": "float-quantized", "int4": "pack-quantized"}
EMBED, HEAD = TENSORS["embed"].removesuffix(".weight"), TENSORS["lm_head"].removesuffix(".weight")
"""Modules of the embedding and the head."""


def check_writable(matrices: Iterable[tuple[str, MatrixFormat, tuple[int, int], bool]]) -> None:
    """NotImplementedError, with the first matrix and the remedy, if transformers could not read one of these as they
    would be written.

    matrices: (name of the tensor, format, shape, whether its blocks have zeros of their own) of each.
    """
    for name, own, shape, zeros in matrices:
        if reason := _unwritable(name.removesuffix(".weight"), own, shape, zeros):
            raise NotImplementedError(f"{name.removesuffix('.weight')} {list(shape)} cannot be saved as {own}: {reason}")


def _unwritable(module: str, own: MatrixFormat, shape: tuple[int, int], zeros: bool) -> str | None:
    """Why transformers cannot read a matrix with compressed-tensors, and the remedy; None if it can."""
    if own.fp8_tokens:
        return "it rounds tokens to fp8, and that is not stored: save the model loaded as fp8 instead"
    if own.rows > 1 and own.columns is None:
        return f"one scale for {own.rows} whole rows cannot be described in compressed-tensors: pack it in blocks, as int8:128x128"
    if zeros:
        return "transformers cannot read zeros of its blocks in compressed-tensors: copy the checkpoint that it was loaded from"
    if own.rows == 1 and own.columns is not None and shape[1] % own.columns:
        return (
            f"compressed-tensors wants a multiple of {own.columns} inputs, and it has {shape[1]}: save int8 or fp8, or save the model "
            "unpacked and pack it when it is loaded"
        )
    return None


def tensors_of(name: str, matrix: PackedMatrix, tied: bool = False) -> dict[str, np.ndarray]:
    """The tensors that hold a matrix, by name, if `check_writable` allows it. name: of the parameter. tied: whether the
    head is the embedding, whose scales are then written for the head too, because transformers gives it its own."""
    module = name.removesuffix(".weight")
    matrix = _as_written(module, matrix)
    codes, scales = np.asarray(matrix.codes), np.asarray(matrix.scales)
    if matrix.format.codes != "int4":
        found = {name: codes, f"{module}.weight_scale": scales}
        return found | {f"{HEAD}.weight_scale": scales.copy()} if tied and module == EMBED else found
    shape = np.array(matrix.shape, np.int64)
    return {f"{module}.weight_packed": _words(codes), f"{module}.weight_scale": scales, f"{module}.weight_shape": shape}


def _format_written(module: str, own: MatrixFormat) -> MatrixFormat:
    """The format in which a matrix is written: transformers cannot read an embedding of 4 bits, so its codes are
    written in 8."""
    return MatrixFormat("int8", own.rows, own.columns) if own.codes == "int4" and module == EMBED else own


def _as_written(module: str, matrix: PackedMatrix) -> PackedMatrix:
    """The matrix in that format: the same numbers."""
    own = _format_written(module, matrix.format)
    if own == matrix.format:
        return matrix
    numbers = np.asarray(unpack(matrix.replace(scales=np.sign(np.asarray(matrix.scales)).astype(np.float32))))  # scales may be below 0
    return PackedMatrix(numbers.astype(np.int8), np.abs(np.asarray(matrix.scales)), format=own)


def _words(pairs: np.ndarray) -> np.ndarray:
    """Bytes of two codes each, as words of int32."""
    return np.ascontiguousarray(np.pad(pairs, ((0, 0), (0, -pairs.shape[1] % 4)))).view(np.int32)


def fields_of(named: Mapping[str, Array | PackedMatrix]) -> dict[str, Any]:
    """`quantization_config` for these parameters, by the names of their tensors. A head that is not among them is the
    embedding, and is described too, because transformers has a module for it."""
    modules = {name.removesuffix(".weight"): leaf for name, leaf in named.items()}
    modules.setdefault(HEAD, modules[EMBED])
    kinds: dict[MatrixFormat, list[str]] = {}
    for module, leaf in modules.items():
        if is_packed(leaf):
            kinds.setdefault(_format_written(module, leaf.format), []).append(module)
    largest = max(kinds, key=lambda own: len(kinds[own]))
    groups = {}
    for number, (own, members) in enumerate(kinds.items()):
        targets = ["Linear"] if own == largest else [module for module in members if module != EMBED]
        targets += ["Embedding"] if EMBED in members else []
        weights = {"num_bits": 4 if own.codes == "int4" else 8, "type": "float" if own.codes == "fp8_e4m3" else "int"}
        weights |= {"symmetric": True, "dynamic": False, **_strategy(own.rows, own.columns)}
        activations = {"input_activations": None, "output_activations": None}
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, "format": _FORMATS[own.codes], **activations}
    formats = {group["format"] for group in groups.values()}
    ignore = [module for module, leaf in modules.items() if not is_packed(leaf) and leaf.ndim == 2]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _strategy(rows: int, columns: int | None) -> dict[str, Any]:
    if columns is None:
        return {"strategy": "channel"}
    return {"strategy": "group", "group_size": columns} if rows == 1 else {"strategy": "block", "block_structure": [rows, columns]}
