"""Writes packed matrices as compressed-tensors lays them out: `int-quantized`, `float-quantized` and `pack-quantized`.

`kvjax.load` reads them back bit for bit. `reading` describes the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from pallas_kernels.matrices import PackedMatrix, is_packed

_FORMATS = {"int8": "int-quantized", "fp8_e4m3": "float-quantized", "int4": "pack-quantized"}


def tensors_of(name: str, matrix: PackedMatrix) -> dict[str, np.ndarray]:
    """The tensors that hold a matrix, by name. name: of the parameter. NotImplementedError for a format that has no words there."""
    own, module = matrix.format, name.removesuffix(".weight")
    codes, scales = np.asarray(matrix.codes), np.asarray(matrix.scales)
    if own.fp8_tokens:
        raise NotImplementedError(f"{module} rounds tokens to fp8, and that is not stored: save the model loaded as fp8 instead")
    if own.rows > 1 and own.columns is None:
        raise NotImplementedError(f"{module} has one scale for {own.rows} whole rows, which compressed-tensors cannot describe")
    if own.codes != "int4":
        return {name: codes, f"{module}.weight_scale": scales}
    shape = np.array(matrix.shape, np.int64)
    found = {f"{module}.weight_packed": _words(codes), f"{module}.weight_scale": scales, f"{module}.weight_shape": shape}
    if matrix.zeros is None:
        return found
    zeros = np.asarray(matrix.zeros)
    if zeros.max() > 15:
        raise NotImplementedError(f"{module} has a zero of {zeros.max()}, as GPTQ has; compressed-tensors has 4 bits for it")
    along = np.pad(zeros, ((0, -len(zeros) % 2), (0, 0)))
    return found | {f"{module}.weight_zero_point": np.ascontiguousarray(_words((along[0::2] | (along[1::2] << 4)).T).T)}


def _words(pairs: np.ndarray) -> np.ndarray:
    """Bytes of two codes each, as words of int32."""
    return np.ascontiguousarray(np.pad(pairs, ((0, 0), (0, -pairs.shape[1] % 4)))).view(np.int32)


def fields_of(named: Mapping[str, Array | PackedMatrix]) -> dict[str, Any]:
    """`quantization_config` for these parameters, by the names of their tensors."""
    kinds: dict[tuple, list[str]] = {}
    for name, leaf in named.items():
        if is_packed(leaf):
            kinds.setdefault((leaf.format, leaf.zeros is not None), []).append(name.removesuffix(".weight"))
    largest = max(kinds, key=lambda kind: len(kinds[kind]))
    groups = {}
    for number, ((own, zeros), modules) in enumerate(kinds.items()):
        targets = ["Linear"] if (own, zeros) == largest else [module for module in modules if not module.endswith("embed_tokens")]
        targets += ["Embedding"] if any(module.endswith("embed_tokens") for module in modules) else []
        weights = {"num_bits": 4 if own.codes == "int4" else 8, "type": "float" if own.codes == "fp8_e4m3" else "int"}
        weights |= {"symmetric": not zeros, "dynamic": False, **_strategy(own.rows, own.columns)}
        activations = {"input_activations": None, "output_activations": None}
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, "format": _FORMATS[own.codes], **activations}
    formats = {group["format"] for group in groups.values()}
    ignore = [name.removesuffix(".weight") for name, leaf in named.items() if not is_packed(leaf) and leaf.ndim == 2]
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
