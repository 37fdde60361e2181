"""`quantization_config` of compressed-tensors: groups of layers, each with a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.weight_formats import TABLES
from kvjax.models.quantization.rules import Fields, Published, Rule, are_names, group_columns, is_block, skipped, unsupported
from pallas_kernels.core.matrices import MatrixFormat

_FORMATS = {
    "float-quantized": {("float", 8)},
    "int-quantized": {("int", 8)},
    "naive-quantized": {("float", 8), ("int", 8)},
    "mxfp8-quantized": {("float", 8)},
    "pack-quantized": {("int", bits) for bits in range(2, 9)},
    "nvfp4-pack-quantized": {("float", 4)},
    "mxfp4-pack-quantized": {("float", 4)},
}
"""By format, types and bits of the codes that it may hold."""

_SMALL_FLOATS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
"""Formats whose groups have one size."""


def published_of(config: Fields) -> Published:
    """The rules of compressed-tensors. The ValueError names what cannot be read."""
    groups = config.get("config_groups")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise unsupported(name, config[name], "null")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise unsupported("sparsity_config", config["sparsity_config"], "null or format 'dense'")
    if config.get("quantization_status", "compressed") != "compressed":
        raise unsupported("quantization_status", config["quantization_status"], "'compressed'")
    if config.get("format") not in (None, "mixed-precision", *_FORMATS):
        raise unsupported("format", config["format"], f"{', '.join(_FORMATS)}, or mixed-precision")
    if not isinstance(groups, Mapping) or not groups:
        raise unsupported("config_groups", groups, "an object for each group of layers")
    rules = tuple(_rule(name, group, config.get("format")) for name, group in groups.items())
    return Published("compressed-tensors", rules, skipped(config, "ignore"), tables=TABLES)


def _rule(name: str, group: Any, outer: Any) -> Rule:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise unsupported(f"weights of {name}", weights, "an object")
    weights = {field: value for field, value in weights.items() if value is not None}
    stored, kind, bits = group.get("format") or outer, weights.get("type", "int"), weights.get("num_bits")
    if not isinstance(stored, str) or not isinstance(kind, str) or not isinstance(bits, int):
        raise unsupported(
            f"weights of {name}", f"{kind} of {bits} bits in {stored}", "names of a type and of a format, and a number of bits"
        )
    if stored not in _FORMATS:
        raise unsupported(f"format of {name}", stored, ", ".join(_FORMATS))
    if (kind, bits) not in _FORMATS[stored]:
        known = ", ".join(sorted(f"{kind} of {bits} bits" for kind, bits in _FORMATS[stored]))
        raise unsupported(f"weights of {name}", f"{kind} of {bits} bits in {stored}", known)
    symmetric = weights.get("symmetric", True) is True
    if not symmetric and kind != "int":
        raise unsupported(f"symmetric of {name}", False, "true for floats")
    if weights.get("dynamic"):
        raise unsupported(f"dynamic of {name}", weights["dynamic"], "false")
    if stored in _SMALL_FLOATS and weights.get("group_size") != _SMALL_FLOATS[stored]:
        raise unsupported(f"group_size of {name}", weights.get("group_size"), f"{_SMALL_FLOATS[stored]} for {stored}")
    targets = group.get("targets") or ["Linear"]
    if not are_names(targets):
        raise unsupported(f"targets of {name}", targets, "a list of names")
    # Four bits of float are whole numbers of halves, which int8 holds.
    codes = "fp8_e4m3" if (kind, bits) == ("float", 8) else "int4" if kind == "int" and bits <= 4 else "int8"
    layout = "words" if stored == "pack-quantized" else "fp4" if bits == 4 and kind == "float" else "plain"
    own = _format(name, codes, weights)
    # Zeros of up to 4 bits have a place of their own; a code of up to 7 bits less its zero has 8 bits.
    return Rule(layout, own, tuple(targets), bits=bits, columns=own.columns, widened=not symmetric and bits == 8)


def _format(name: str, codes: str, weights: Fields) -> MatrixFormat:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy in ("tensor", "channel"):
        return MatrixFormat(codes)
    if strategy in ("group", "tensor_group"):
        return MatrixFormat(codes, 1, group_columns(f"group_size of {name}", weights.get("group_size")))
    if strategy == "block" and is_block(weights.get("block_structure")):
        return MatrixFormat(codes, *weights["block_structure"])
    raise unsupported(f"strategy of {name}", strategy, "'tensor', 'channel', 'group' and 'block' with a block_structure")
