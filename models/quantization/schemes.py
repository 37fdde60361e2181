"""`quantization_config` of config.json: which matrices a checkpoint holds packed, and how they are stored.

What is not known is refused by name. What is said about activations is not used: they keep the model's compute_dtype.
docs/formats.md lists what is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvjax.model.weight_formats import TABLES
from kvjax.models.quantization.compressed_tensors import published_of
from kvjax.models.quantization.rules import REMEDY, Fields, Published, Rule, group_columns, is_block, skipped, unsupported
from pallas_kernels.core.matrices import MatrixFormat

logger = logging.getLogger(__name__)


def split(fields: Fields) -> tuple[Fields, Published | None]:
    """config.json's fields without `quantization_config`, and what that says. The ValueError names a scheme that cannot
    be read."""
    outer, inner = dict(fields), fields.get("text_config")
    found = [outer.pop(name) for name in ("quantization_config", "compression_config") if outer.get(name) is not None]
    if isinstance(inner, Mapping) and inner.get("quantization_config") is not None:
        found.append(inner["quantization_config"])
        outer["text_config"] = {name: value for name, value in inner.items() if name != "quantization_config"}
    if not found:
        return fields, None
    if any(each != found[0] for each in found):
        raise ValueError(f"config.json has several quantization_configs that differ; {REMEDY}")
    return outer, parse(found[0])


_REFUSED = {
    "aqlm": "AQLM: codebooks of vectors",
    "auto-round": "AutoRound: if it was exported as auto_gptq or auto_awq, use that copy",
    "bitnet": "BitNet: ternary weights",
    "eetq": "EETQ: int8 in an order for its CUDA kernels",
    "exl2": "EXL2: bits that differ by row, in an order for ExLlamaV2",
    "exl3": "EXL3: trellis codes",
    "fp_quant": "FP-Quant: rotated inputs",
    "higgs": "HIGGS: rotated inputs and grids of vectors",
    "hqq": "HQQ: it is stored in pickles or with options of each layer",
    "modelopt": "ModelOpt",
    "quanto": "Quanto: it is stored in pickles",
    "quark": "Quark",
    "quip": "QuIP#: rotated inputs and codebooks of vectors",
    "spqr": "SpQR: sparse outliers",
    "vptq": "VPTQ: codebooks of vectors",
}
"""Methods that cannot be read, and what they are."""


def parse(config: Any) -> Published:
    """What a `quantization_config` says. The ValueError names what cannot be read."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json: quantization_config is {config!r:.200}; it must be an object")
    method = config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else None)
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # as transformers guesses it
    if not isinstance(method, str) or method not in _PARSERS:
        known = ", ".join(sorted(_PARSERS))
        what = f" ({_REFUSED[method]})" if isinstance(method, str) and method in _REFUSED else ""
        said = f"quant_method {method!r:.200}{what}; supported: {known}"
        raise ValueError(f"config.json: quantization_config has {said}. For others: {REMEDY}")
    published = _PARSERS[method]({name: value for name, value in config.items() if value is not None})  # null is the default
    held = "are widened while they are loaded" if published.keeps_none else "stay packed"
    logger.info("config.json: weights are stored packed (%s) and %s; activations keep the compute dtype", method, held)
    return published


def _fp8(config: Fields) -> Published:
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported("fmt", config["fmt"], "'e4m3'")
    if config.get("scale_fmt", "float") not in ("float", "ue8m0"):
        raise unsupported("scale_fmt", config["scale_fmt"], "'float' and 'ue8m0'")
    if block is not None and not is_block(block):
        raise unsupported("weight_block_size", block, "two whole numbers, or null for one scale a matrix")
    own = MatrixFormat("fp8_e4m3", *(block or (1, None)))
    return Published("fp8", (Rule("plain", own),), skipped(config, "modules_to_not_convert", "ignored_layers"), loose=True)


def _fbgemm(config: Fields) -> Published:
    rule = Rule("plain", MatrixFormat("fp8_e4m3"))
    return Published("fbgemm_fp8", (rule,), skipped(config, "modules_to_not_convert"), loose=True)


def _awq(config: Fields) -> Published:
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if bits != 4:
        raise unsupported("bits", bits, "4")
    if version not in _AWQ:
        raise unsupported("version", version, ", ".join(map(repr, _AWQ)))
    columns = group_columns("group_size", size)
    if version != "gemm" and columns not in _PADDED:  # their scales are padded, so that a wrong size would not show
        raise unsupported("group_size", size, " and ".join(map(str, _PADDED)) + f" for version {version!r}")
    own = None if version == "gemv_fast" else MatrixFormat("int4", 1, columns)
    rule = Rule(_AWQ[version], own, bits=4, columns=columns, zeros=config.get("zero_point", True) is not False)
    return Published("awq", (rule,), skipped(config, "modules_to_not_convert"), loose=True)


_PADDED = (32, 64, 128)
"""Columns of a group for which AutoAWQ's gemv kernels exist."""

_AWQ = {"gemm": "awq", "gemv": "gemv", "gemv_fast": "gemv_fast"}
"""Versions of AWQ, each with its layout."""


def _gptq(config: Fields) -> Published:
    version, bits = config.get("checkpoint_format", config.get("format", "gptq")), config.get("bits")
    if not isinstance(bits, int) or bits not in (2, 3, 4, 8):  # 4.0 equals 4, but is no number of places to shift by
        raise unsupported("bits", bits, "2, 3, 4 and 8")
    if version not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", version, "'gptq' and 'gptq_v2'")
    if config.get("dynamic"):
        raise unsupported("dynamic", config["dynamic"], "null: one format for all layers")
    columns = group_columns("group_size", config.get("group_size"))
    reordered = config.get("desc_act") is True and columns is not None and config.get("static_groups") is not True
    rule = Rule(
        "gptq",
        MatrixFormat("int4" if bits <= 4 else "int8", 1, columns),
        zero_shift=int(version == "gptq"),
        bits=bits,
        columns=columns,
        widened=reordered or (bits == 8 and config.get("sym", True) is not True),
    )
    tables = frozenset({"lm_head"}) if config.get("lm_head") is True else frozenset()
    return Published("gptq", (rule,), skipped(config, "modules_to_not_convert"), loose=True, tables=tables)


def _mxfp4(config: Fields) -> Published:
    rule = Rule("blocks", MatrixFormat("int8", 1, 32), bits=4, columns=32)
    return Published("mxfp4", (rule,), skipped(config, "modules_to_not_convert"), loose=True)


def _bitsandbytes(config: Fields) -> Published:
    four, eight = (config.get(f"load_in_{bits}bit", config.get(f"_load_in_{bits}bit")) is True for bits in (4, 8))
    if four == eight:
        raise unsupported("load_in_4bit", four, "true, or load_in_8bit true instead")
    rule = Rule("bnb4", None, bits=4) if four else Rule("bnb8", MatrixFormat("int8"))
    return Published("bitsandbytes", (rule,), skipped(config, "llm_int8_skip_modules"), loose=True)


def _torchao(config: Fields) -> Published:
    """Each matrix says in its file how it is stored; this is for plans."""
    chosen = config.get("quant_type")
    if isinstance(chosen, Mapping):
        chosen = chosen.get("default", chosen)
        chosen = chosen.get("_type") if isinstance(chosen, Mapping) else chosen
    if not isinstance(chosen, str):
        raise unsupported("quant_type", config.get("quant_type"), "the name of a configuration, or an object with its _type")
    kind = chosen.lower().replace("_", "")
    codes = "int8" if kind.startswith("int8") and "int4" not in kind else "fp8_e4m3" if kind.startswith("float8") else None
    rule = Rule("torchao", None if codes is None else MatrixFormat(codes), ("Linear", "Embedding"))
    tables = TABLES if config.get("include_input_output_embeddings") is True else frozenset()
    return Published("torchao", (rule,), skipped(config, "modules_to_not_convert"), loose=True, tables=tables)


_PARSERS = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": published_of,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
