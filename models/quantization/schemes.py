"""`quantization_config` of config.json: which matrices a checkpoint holds packed, and how they are stored.

Known are fp8 with blocks or whole tensors (`quant_method` "fp8": Qwen, DeepSeek), compressed-tensors (`float-quantized`, `int-quantized`,
`naive-quantized` and `pack-quantized`, weights alone), AWQ (`gemm`) and GPTQ, both of 4 bits. Everything else is refused by name. What is
said about activations is not used: they keep the model's compute_dtype.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.models.fields import BELOW
from kvjax.packing import TABLES, UNPACKED
from pallas_kernels.matrices import MatrixFormat

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]

REMEDY = "load the checkpoint that it was quantized from, with weights='int8', 'fp8' or 'int4' if it should be small"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Matrices that are stored in one way.

    layout: of the tensors of a matrix (`kvjax.models.quantization.reading`). format: in memory. targets: which modules: class names, module
    names, or "re:" and a regular expression. zero_shift: GPTQ stores zeros less this. bits: of a code.
    """

    layout: str
    format: MatrixFormat
    targets: tuple[str, ...] = ("Linear",)
    zero_shift: int = 0
    bits: int = 8


@dataclasses.dataclass(frozen=True)
class Published:
    """Which matrices of a checkpoint are packed. ignore: modules that are not, as `Rule.targets`, or as prefixes and ends of names where
    `loose`. method: its name in config.json. prefixes: `Within.prefixes` of a family: ignore and targets may name modules as the larger
    model does."""

    method: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    loose: bool = False
    prefixes: tuple[tuple[str, str], ...] = ()

    def rule_of(self, module: str) -> Rule | None:
        """How a module's matrix is packed, if it is; None: no rule names it. module: its name in the family's own checkpoints."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        # A rule that names the module goes before one that names its class.
        named = [rule for rule in self.rules if self._named(rule.targets, module, _names)]
        return next(iter(named + [rule for rule in self.rules if kind in rule.targets]), None)

    def _named(self, entries: tuple[str, ...], module: str, matches: Callable[[str, str], bool]) -> bool:
        """Whether an entry matches one of the names that a module has in checkpoints of this family."""
        tensor = f"{module}."
        others = [outer + tensor.removeprefix(own) for outer, own in self.prefixes if tensor.startswith(own)]
        return any(matches(entry, name.removesuffix(".")) for name in (tensor, *others) for entry in entries)

    def format_of(self, name: str, key: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        """The format of a parameter, by config.json alone. name: the tensor's. key: the parameter's, in the layer or the model."""
        module = name.removesuffix(".weight")
        if len(shape) != 2 or key in UNPACKED or (key in TABLES and not self._names_tables(module)):
            return None
        rule = None if self._named(self.ignore, module, _loosely if self.loose else _names) else self.rule_of(module)
        return None if rule is None else rule.format

    def _names_tables(self, module: str) -> bool:
        """Whether tables are packed: only compressed-tensors says so."""
        return self.method == "compressed-tensors" or (module == "lm_head" and self.method == "gptq:lm_head")


def _names(target: str, module: str) -> bool:
    return _matches(target.removeprefix("re:"), module) if target.startswith("re:") else target == module


def _matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of a checkpoint matches the beginning of a module's name. ValueError if it does not end in a second."""
    import regex  # here, because few checkpoints need it

    remedy = "correct it, or download the model again"
    try:
        return regex.match(pattern, module, timeout=1) is not None
    except (regex.error, RecursionError, OverflowError) as error:
        said = f"{pattern!r:.200} in quantization_config is no regular expression ({error})"
        raise ValueError(f"config.json: {said}: {remedy}") from error
    except TimeoutError:
        said = f"{pattern!r:.200} in quantization_config takes too long to match {module}"
        raise ValueError(f"config.json: {said}: {remedy}") from None


def _loosely(entry: str, module: str) -> bool:
    """As transformers reads `modules_to_not_convert`: a name, the beginning or the end of one, or a regular expression of its beginning."""
    return module.endswith(entry) or _matches(entry, module)


def split(fields: Fields) -> tuple[Fields, Published | None]:
    """config.json's fields without `quantization_config`, and what that says. The ValueError names a scheme that cannot be read."""
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


def parse(config: Any) -> Published:
    """What a `quantization_config` says. The ValueError names what cannot be read."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json: quantization_config is {config!r:.200}; it must be an object")
    method = config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else None)
    if not isinstance(method, str) or method not in _PARSERS:
        known = ", ".join(sorted(_PARSERS))
        raise ValueError(f"config.json: quantization_config has quant_method {method!r:.200}; supported: {known}. For others: {REMEDY}")
    published = _PARSERS[method]({name: value for name, value in config.items() if value is not None})  # null is the default
    logger.info("config.json: weights are packed (%s); activations keep the compute dtype", method)
    return published


def _unsupported(what: str, value: Any, supported: str) -> ValueError:
    return ValueError(f"config.json: {what} of quantization_config is {value!r:.200}; supported: {supported}. For others: {REMEDY}")


def _skipped(config: Fields, *names: str) -> tuple[str, ...]:
    """The modules that are not packed, under any of these names."""
    found: list[str] = []
    for name in names:
        entries = config.get(name) or []
        if not _are_names(entries):
            raise _unsupported(name, entries, "a list of names")
        found += entries
    return tuple(found)


def _are_names(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)


def _fp8(config: Fields) -> Published:
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", config["fmt"], "'e4m3'")
    if config.get("scale_fmt", "float") not in ("float", "ue8m0"):
        raise _unsupported("scale_fmt", config["scale_fmt"], "'float' and 'ue8m0'")
    if block is not None and not _is_block(block):
        raise _unsupported("weight_block_size", block, "two whole numbers, or null for one scale a matrix")
    own = MatrixFormat("fp8_e4m3", *(block or (1, None)))
    skipped = _skipped(config, "modules_to_not_convert", "ignored_layers")
    return Published("fp8", (Rule("plain", own),), skipped, loose=True)


def _is_block(block: Any) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(map(_is_size, block))


def _is_size(value: Any) -> bool:
    """Whether it is a number of rows or columns."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < BELOW


def _awq(config: Fields) -> Published:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise _unsupported("bits", bits, "4")
    if version != "gemm":
        raise _unsupported("version", config["version"], "'gemm'")
    if config.get("zero_point", True) is not True:
        raise _unsupported("zero_point", config["zero_point"], "true")
    own = MatrixFormat("int4", 1, _group("group_size", group))
    return Published("awq", (Rule("awq", own, bits=4),), _skipped(config, "modules_to_not_convert"), loose=True)


def _gptq(config: Fields) -> Published:
    version = config.get("checkpoint_format", "gptq")
    if config.get("bits") != 4:
        raise _unsupported("bits", config.get("bits"), "4")
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", version, "'gptq' and 'gptq_v2'")
    if config.get("dynamic"):
        raise _unsupported("dynamic", config["dynamic"], "null: one format for all layers")
    own = MatrixFormat("int4", 1, _group("group_size", config.get("group_size")))
    rule = Rule("gptq", own, zero_shift=int(version == "gptq"), bits=4)
    skipped = _skipped(config, "modules_to_not_convert")
    return Published("gptq:lm_head" if config.get("lm_head") is True else "gptq", (rule,), skipped, loose=True)


def _group(name: str, size: Any) -> int | None:
    """Columns of a group; None: whole rows."""
    if size == -1:
        return None
    if not _is_size(size) or size % 2:
        raise _unsupported(name, size, "an even number of columns, or -1 for whole rows")
    return size


_FORMATS = {"float-quantized": "float", "int-quantized": "int", "naive-quantized": None, "pack-quantized": "pack"}
"""Formats of compressed-tensors."""


def _compressed(config: Fields) -> Published:
    groups = config.get("config_groups")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise _unsupported(name, config[name], "null")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config", config["sparsity_config"], "null or format 'dense'")
    if config.get("quantization_status", "compressed") != "compressed":
        raise _unsupported("quantization_status", config["quantization_status"], "'compressed'")
    if config.get("format") not in (None, "mixed-precision", *_FORMATS):
        raise _unsupported("format", config["format"], f"{', '.join(_FORMATS)}, or mixed-precision")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported("config_groups", groups, "an object for each group of layers")
    rules = tuple(_compressed_rule(name, group, config.get("format")) for name, group in groups.items())
    return Published("compressed-tensors", rules, _skipped(config, "ignore"))


def _compressed_rule(name: str, group: Any, outer: Any) -> Rule:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _unsupported(f"weights of {name}", weights, "an object")
    weights = {field: value for field, value in weights.items() if value is not None}
    stored, kind, bits = group.get("format") or outer, weights.get("type", "int"), weights.get("num_bits")
    if not isinstance(stored, str) or not isinstance(kind, str) or not isinstance(bits, int):
        raise _unsupported(
            f"weights of {name}", f"{kind} of {bits} bits in {stored}", "names of a type and of a format, and a number of bits"
        )
    if stored not in _FORMATS or (_FORMATS[stored] not in (None, kind, "pack")):
        raise _unsupported(f"format of {name}", stored, f"{', '.join(_FORMATS)}, which must agree with the type {kind!r:.200}")
    packed = stored == "pack-quantized"
    if (kind, bits, packed) not in {("float", 8, False), ("int", 8, False), ("int", 8, True), ("int", 4, True)}:
        known = "float or int of 8 bits, int of 4 bits in pack-quantized"
        raise _unsupported(f"weights of {name}", f"{kind} of {bits} bits in {stored}", known)
    if weights.get("symmetric", True) is not True and bits != 4:
        raise _unsupported(f"symmetric of {name}", False, "true for 8 bits")
    if weights.get("dynamic"):
        raise _unsupported(f"dynamic of {name}", weights["dynamic"], "false")
    codes = {("float", 8): "fp8_e4m3", ("int", 8): "int8", ("int", 4): "int4"}[kind, bits]
    targets = group.get("targets") or ["Linear"]
    if not _are_names(targets):
        raise _unsupported(f"targets of {name}", targets, "a list of names")
    return Rule("words" if packed else "plain", _compressed_format(name, codes, weights), tuple(targets), bits=bits)


def _compressed_format(name: str, codes: str, weights: Fields) -> MatrixFormat:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy in ("tensor", "channel"):
        return MatrixFormat(codes)
    if strategy == "group":
        return MatrixFormat(codes, 1, _group(f"group_size of {name}", weights.get("group_size")))
    if strategy == "block" and _is_block(weights.get("block_structure")):
        return MatrixFormat(codes, *weights["block_structure"])
    raise _unsupported(f"strategy of {name}", strategy, "'tensor', 'channel', 'group' and 'block' with a block_structure")


_PARSERS = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}
