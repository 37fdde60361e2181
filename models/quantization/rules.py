"""Which matrices of a checkpoint are packed, and how: the rules that `schemes` reads from config.json, and what its
parsers share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.model.weight_formats import TABLES, UNPACKED
from kvjax.models.fields import BELOW
from kvjax.models.patterns import compiled
from pallas_kernels.core.matrices import MatrixFormat

Fields = Mapping[str, Any]

MATCHING_SECONDS = 60.0
"""How long the entries of one checkpoint's rules may be compared with names of modules, all together. Each match ends
after a second, but rules may have thousands of entries."""
REMEDY = "load the checkpoint that it was quantized from, with weights='int8', 'fp8' or 'int4' if it should be small"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Matrices that are stored in one way.

    layout: of the tensors of a matrix (`kvjax.models.quantization.layouts`). format: in memory; None: none of our
    formats holds them, so they are widened while they are loaded. targets: which modules: class names, module names, or
    "re:" and a regular expression. zero_shift: GPTQ stores zeros less this. bits: of a code. columns: inputs of a
    group; None: whole rows. widened: whether config.json says that `format` will not do, as for zeros of 8 bits; the
    tensors decide. zeros: whether AWQ stores zeros.
    """

    layout: str
    format: MatrixFormat | None
    targets: tuple[str, ...] = ("Linear",)
    zero_shift: int = 0
    bits: int = 8
    columns: int | None = None
    widened: bool = False
    zeros: bool = True


class Matching:
    """Compares entries of rules with names of modules, and counts the seconds."""

    def __init__(self):
        self._seconds = 0.0

    def __call__(self, matches: Callable[[str, str], bool], entry: str, name: str) -> bool:
        """Whether an entry matches. ValueError when all of them together have taken too long."""
        began = time.monotonic()
        found = matches(entry, name)
        self._seconds += time.monotonic() - began
        if self._seconds > MATCHING_SECONDS:
            said = f"its regular expressions take too long, {entry!r:.200} among them: correct them, or download the model again"
            raise ValueError(f"config.json: quantization_config: {said}")
        return found


@dataclasses.dataclass(frozen=True)
class Published:
    """Which matrices of a checkpoint are packed. ignore: modules that are not, as `Rule.targets`, or as prefixes and
    ends of names where `loose`. method: its name in config.json. tables: which of the embedding and the head may be
    packed. prefixes: `Within.prefixes` of a family: ignore and targets may name modules as the larger model does."""

    method: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    loose: bool = False
    tables: frozenset[str] = frozenset()
    prefixes: tuple[tuple[str, str], ...] = ()
    matching: Matching = dataclasses.field(default_factory=Matching, compare=False, repr=False)

    def rule_of(self, module: str) -> Rule | None:
        """How a module's matrix is packed, if it is; None: no rule names it. module: its name in the family's own
        checkpoints."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        # A rule that names the module goes before one that names its class.
        named = [rule for rule in self.rules if self._named(rule.targets, module, _names)]
        return next(iter(named + [rule for rule in self.rules if kind in rule.targets]), None)

    def _named(self, entries: tuple[str, ...], module: str, matches: Callable[[str, str], bool]) -> bool:
        """Whether an entry matches one of the names that a module has in checkpoints of this family."""
        tensor = f"{module}."
        others = [outer + tensor.removeprefix(own) for outer, own in self.prefixes if tensor.startswith(own)]
        return any(self.matching(matches, entry, name.removesuffix(".")) for name in (tensor, *others) for entry in entries)

    def format_of(self, name: str, key: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        """The format of a parameter in memory, by config.json alone; None: an array. name: the tensor's. key: the
        parameter's."""
        module = name.removesuffix(".weight")
        if len(shape) != 2 or key in UNPACKED or (key in TABLES and key not in self.tables):
            return None
        rule = None if self._named(self.ignore, module, _loosely if self.loose else _names) else self.rule_of(module)
        return None if rule is None or rule.widened else rule.format

    @property
    def keeps_none(self) -> bool:
        """Whether config.json says that every packed matrix is widened while it is loaded."""
        return all(rule.widened or rule.format is None for rule in self.rules)


def _names(target: str, module: str) -> bool:
    return _matches(target.removeprefix("re:"), module) if target.startswith("re:") else target == module


def _matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of a checkpoint matches the beginning of a module's name. ValueError if it does not
    end in a second."""
    remedy = "correct it, or download the model again"
    try:
        return compiled(pattern).match(module, timeout=1) is not None
    except ValueError as error:
        raise ValueError(f"config.json: quantization_config: {error}: {remedy}") from None
    except TimeoutError:
        said = f"{pattern!r:.200} in quantization_config takes too long to match {module}"
        raise ValueError(f"config.json: {said}: {remedy}") from None


def _loosely(entry: str, module: str) -> bool:
    """As transformers reads `modules_to_not_convert`: a name, the beginning or the end of one, or a regular expression
    of its beginning."""
    return module.endswith(entry) or _matches(entry, module)


def unsupported(what: str, value: Any, supported: str) -> ValueError:
    """The error for a value of a field, `what`, of quantization_config."""
    return ValueError(f"config.json: {what} of quantization_config is {value!r:.200}; supported: {supported}. For others: {REMEDY}")


def skipped(config: Fields, *names: str) -> tuple[str, ...]:
    """The modules that are not packed, under any of these names."""
    found: list[str] = []
    for name in names:
        entries = config.get(name) or []
        if not are_names(entries):
            raise unsupported(name, entries, "a list of names")
        found += entries
    return tuple(found)


def are_names(entries: Any) -> bool:
    """Whether it is a list of strings."""
    return isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)


def is_block(block: Any) -> bool:
    """Whether it is a number of rows and one of columns."""
    return isinstance(block, list | tuple) and len(block) == 2 and all(map(is_size, block))


def is_size(value: Any) -> bool:
    """Whether it is a number of rows or columns."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < BELOW


def group_columns(name: str, size: Any) -> int | None:
    """Columns of a group; None: whole rows."""
    if size == -1:
        return None
    if not is_size(size) or size % 2:
        raise unsupported(name, size, "an even number of columns, or -1 for whole rows")
    return size
