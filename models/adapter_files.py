"""Folders of LoRA adapters, as peft saves them: where they are, what adapter_config.json says, and what the tensors are
of.

adapter_config.json is checked field by field: what would change the sum and is not supported is refused by its name.
The tensors in the file decide which matrices are adapted, so `target_modules`, `exclude_modules` and
`layers_to_transform` are not read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.checks import file_path
from kvjax.known_files import KnownFile
from kvjax.models.checkpoint import ADAPTER_CONFIG, file_tensors, find_folder, sampled_digest
from kvjax.models.fields import BELOW, LARGEST
from kvjax.models.patterns import compiled
from kvjax.models.tensors import DTYPES, Stored
from kvjax.text.checkpoint_files import is_file, read_json

WEIGHTS = "adapter_model.safetensors"
AGAIN = "download the adapter again"
MERGE_ELSEWHERE = "merge it with peft (model.merge_and_unload()), save the model, and load that"

PATTERN_SECONDS = 10
"""How long the regular expressions of rank_pattern and alpha_pattern may take for one adapter."""

READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
# fmt: off
HARMLESS = frozenset({
    # What the file is, and how it was trained.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "base_model_class", "parent_library", "revision",
    "inference_mode", "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "runtime_config",
    # Which matrices are adapted: the tensors say it themselves.
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias", "lora_bias",
    "ensure_weight_tying",
    # The size of something that is refused where it is used.
    "qalora_group_size",
})
# fmt: on
"""Fields that may have any value."""

INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the model's own weights as they are. With others peft trains on changed
ones."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PREFIX = "base_model.model."
_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter and its scale.

    Args:
        said: as it was given.
        folder: where it is.
        scale: what its sums are multiplied by, besides what `fields` say.
        files: adapter_config.json and the weights, as they were when they were read.
        fields: adapter_config.json.
        modules: by a module's name in the model that it was trained on, its tensors by their names in peft
            ("lora_A.weight", ...).
        whole: tensors that replace the model's, by the name of those.
        below: copies of the model's own matrices (peft's base_layer), which take their place below what is added.
    """

    said: str
    folder: Path
    scale: float
    files: tuple[KnownFile, KnownFile]
    fields: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Stored]]
    whole: Mapping[str, Stored]
    below: Mapping[str, Stored]

    @property
    def base(self) -> str:
        """The model that it was made for, for errors."""
        named = self.fields.get("base_model_name_or_path")
        return f"{named:.200}" if isinstance(named, str) and named else "a model that it does not name"

    def is_trained(self, name: str) -> bool:
        """Whether `modules_to_save` names the module of a tensor: one like it, of a module that it was tied to, keeps
        its numbers."""
        module = name.rpartition(".")[0]
        return any(module.endswith(ending) for ending in self.fields.get("modules_to_save") or ())

    def digest(self) -> str:
        """What tells it from another, and its scale; see `kvjax.models.checkpoint.sampled_digest`."""
        return f"{sampled_digest(self.files[0], self.files[1:])}:{self.scale!r}"

    def check_same(self) -> None:
        """`kvjax.models.checkpoint.Checkpoint.check_same`."""
        for each in self.files:
            each.check()


def open_adapters(lora: str | Path | Sequence[str | Path] | None) -> tuple[Adapter, ...]:
    """The adapters that `load(lora=...)` names, each a folder or Hub id, with ":" and a scale after it if that is not
    1.

    ValueError, with the remedy, for an adapter that is missing, damaged or not supported.
    """
    named = () if lora is None else (lora,) if isinstance(lora, str | Path) else lora
    if not isinstance(named, Sequence) or not all(isinstance(each, str | Path) for each in named):
        raise ValueError(f"lora is {lora!r:.200}; it must be an adapter's folder, as 'DIR' or 'DIR:0.5', or a list of them")
    return tuple(_open(str(each)) for each in named)


def _open(said: str) -> Adapter:
    name, scale = _split(said)
    path = file_path(name)
    if os.path.isfile(path):
        raise ValueError(f"{name:.300} is a file; give the adapter's folder, which holds {ADAPTER_CONFIG} and {WEIGHTS}")
    folder = find_folder(path if os.path.isdir(path) else name, (ADAPTER_CONFIG, WEIGHTS))
    if not is_file(folder / ADAPTER_CONFIG):
        what = "a model, not an adapter: give it as the model" if os.path.isfile(folder / "config.json") else "no adapter of peft"
        raise ValueError(f"{folder} holds no {ADAPTER_CONFIG}: it is {what}")
    config = KnownFile.of(folder / ADAPTER_CONFIG)
    fields = read_json(config.path)
    try:
        _check(fields)
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {error}") from None
    if not is_file(folder / WEIGHTS):
        if os.path.lexists(folder / "adapter_model.bin"):
            raise ValueError(
                f"{folder} holds adapter_model.bin, a pickle, which can run code and is not opened: load it with peft where you trust it, "
                f"and save it again (model.save_pretrained(FOLDER) writes {WEIGHTS})"
            )
        raise ValueError(f"{folder} holds no {WEIGHTS}; {AGAIN} (one in adapter_model.bin, a pickle, is not read)")
    tensors = file_tensors(folder / WEIGHTS)
    modules, whole, below = _sorted(folder / WEIGHTS, tensors)
    files = config, next(iter(tensors.values())).known
    return Adapter(said, folder, scale, files, fields, modules, whole, below)


def _split(said: str) -> tuple[str, float]:
    """The folder or Hub id, and the scale. A folder of the whole name goes first."""
    if not said.strip():
        raise ValueError("the adapter's name is empty: give its folder, as DIR or DIR:0.5")
    name, colon, word = said.rpartition(":")
    if not colon or os.path.isdir(file_path(said)):
        return said, 1.0
    scale = float(word) if _NUMBER.fullmatch(word) else math.nan
    if not math.isfinite(scale) or abs(scale) > LARGEST or not name:
        raise ValueError(
            f"the adapter {said!r:.300} has the scale {word!r:.50}; write a number from {-LARGEST:g} to {LARGEST:g}, as DIR:0.5, and "
            "the folder before it"
        )
    return name, scale


def _check(fields: Mapping[str, Any]) -> None:
    """ValueError that names a field whose value is not supported."""
    kind, initial = fields.get("peft_type"), fields.get("init_lora_weights")
    if kind != "LORA":
        raise ValueError(f"peft_type is {kind!r:.200}; supported: 'LORA' (with use_dora and use_rslora). For others: {MERGE_ELSEWHERE}")
    if not isinstance(initial, str | bool | None) or initial not in INITIAL:
        raise ValueError(
            f"init_lora_weights is {initial!r:.200}: it was trained on weights that peft had changed, not on the model's own; convert it "
            f"with peft (save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)), or {MERGE_ELSEWHERE}"
        )
    for name in ("use_rslora", "use_dora"):
        if not isinstance(fields.get(name, False), bool | None):
            raise ValueError(f"{name} is {fields[name]!r:.200}; it must be true or false")
    if isinstance(fields.get("bias"), str) and fields["bias"] not in ("none", "all", "lora_only"):
        raise ValueError(f"bias is {fields['bias']!r:.200}; supported: 'none', 'all' and 'lora_only'")
    for name, value in fields.items():
        if name not in READ | HARMLESS and value not in (None, False, [], {}):
            raise ValueError(f"{name:.200} is {value!r:.200}, which is not supported: {MERGE_ELSEWHERE}")
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
        raise ValueError(f"modules_to_save is {saved!r:.200}; it must be a list of names")
    _rank(fields.get("r", 8), "r")
    _alpha(fields.get("lora_alpha", 8), "lora_alpha")
    for name, check in (("rank_pattern", _rank), ("alpha_pattern", _alpha)):
        found = fields.get(name) or {}
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} is {found!r:.200}; it must be an object with a number for each pattern")
        for pattern, value in found.items():
            check(value, f"{name} of {pattern:.200}")


def _rank(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < BELOW:
        raise ValueError(f"{name} is {value!r:.200}; it must be a whole number from 1 to {BELOW - 1:,}")


def _alpha(value: Any, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} is {value!r:.200}; it must be a number from {-LARGEST:g} to {LARGEST:g}")


def _sorted(file: Path, tensors: Mapping[str, Stored]) -> tuple[dict[str, dict[str, Stored]], dict[str, Stored], dict[str, Stored]]:
    """The tensors of an adapter's file, as `Adapter` has them. ValueError for a type that cannot be read, and for half
    a pair."""
    modules: dict[str, dict[str, Stored]] = {}
    whole: dict[str, Stored] = {}
    below: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if stored.dtype not in DTYPES:
            raise ValueError(f"{file}: {name:.200} is stored in {stored.dtype:.50}; supported: {', '.join(DTYPES)}")
        if 0 in stored.shape:
            raise ValueError(f"{file}: {name:.200} is {list(stored.shape)}, which is empty; {AGAIN}")
        own = name.removeprefix(_PREFIX)
        # Some versions of peft end the name of magnitudes in .weight.
        found = _PARTS.fullmatch(own.removesuffix(".weight") if own.endswith("lora_magnitude_vector.weight") else own)
        if found:
            kind, key = modules.setdefault(found["module"], {}), found["part"]
        else:  # a bias below an adapter is trained, and a matrix there is a copy
            kind, key = below if own.endswith(".base_layer.weight") else whole, own.replace(".base_layer.", ".")
        if key in kind:
            raise ValueError(f"{file}: {name:.200} and {kind[key].name:.200} are the same tensor under two names; {AGAIN}")
        kind[key] = stored
    if not modules and not whole:
        raise ValueError(f"{file} holds no tensors of an adapter; {AGAIN}")
    for module, parts in modules.items():
        pairs = [{f"{kind}_A{end}", f"{kind}_B{end}"} for kind, end in (("lora", ".weight"), ("lora_embedding", ""))]
        if not any(pair <= parts.keys() <= pair | {"lora_B.bias", "lora_magnitude_vector"} for pair in pairs):
            raise ValueError(f"{file}: {module:.200} has {', '.join(sorted(parts))}, which is no pair of A and B; {AGAIN}")
    return modules, whole, below


class Scales:
    """The rank and the scale of each module of an adapter, as adapter_config.json gives them."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._ends = adapter, time.monotonic() + PATTERN_SECONDS
        self._patterns = {name: self._compiled(name) for name in ("rank_pattern", "alpha_pattern")}

    def of(self, module: str) -> tuple[int, float]:
        """(rank, scale) of a module, by its name in the model that the adapter was trained on. ValueError for a pattern
        that takes too long or is no regular expression."""
        fields = self._adapter.fields
        rank = self._matched("rank_pattern", module, fields.get("r", 8))
        alpha = self._matched("alpha_pattern", module, fields.get("lora_alpha", 8))
        return rank, self._adapter.scale * alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)

    def _compiled(self, name: str) -> list[tuple[Any, Any]]:
        found = []
        for pattern, value in (self._adapter.fields.get(name) or {}).items():
            if time.monotonic() > self._ends:
                raise self._error(f"{name} has {len(self._adapter.fields[name]):,} patterns, which take too long to read")
            try:
                found.append((compiled(pattern, r"(.*\.)?({})$"), value))
            except ValueError as error:
                raise self._error(f"{name}: {error}") from None
        return found

    def _matched(self, name: str, module: str, default: Any) -> Any:
        for pattern, value in self._patterns[name]:
            try:
                left = self._ends - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if pattern.match(module, timeout=left):
                    return value
            except (TimeoutError, MemoryError):
                raise self._error(f"{pattern.pattern!r:.200} in {name} takes too long to match") from None
        return default

    def _error(self, said: str) -> ValueError:
        return ValueError(f"{self._adapter.folder / ADAPTER_CONFIG}: {said}: correct it, or {AGAIN}")
