"""Checkpoints: where they are, what they hold, and whether their tensors are the ones that a model needs.

A checkpoint is a folder of Hugging Face's files (`Folder`), or a GGUF file (`kvjax.models.gguf`). `open_checkpoint`
finds it, here or on the Hub.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from kvjax.checks import file_path
from kvjax.known_files import KnownFile, header_of
from kvjax.model.config import ModelConfig
from kvjax.model.weight_formats import place_of
from kvjax.models import needle
from kvjax.models.decoder import param_shapes
from kvjax.models.families import FAMILIES
from kvjax.models.interleaving import Order, order_of
from kvjax.models.tensors import DTYPES, Stored, Tensor
from kvjax.text.checkpoint_files import AGAIN, check_pointer, first_line, is_file, named, read_json
from kvjax.text.tokenizer_loading import read_tokenizer

logger = logging.getLogger(__name__)

CONFIG_FILES = ("config.json", "generation_config.json")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)

MAX_SHARD_BYTES = 5 * 10**9
"""Largest weights file that `save` writes unless told otherwise."""

OTHER_FORMATS = ("pytorch_model*.bin", "consolidated*.pth", "*.pt", "*.safetensors", "tf_model.h5", "flax_model.msgpack")
"""Formats of weights that cannot be read."""

_COMPUTED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that old checkpoints store; they are computed instead."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One parameter: its Hugging Face name and its shape, the same in the file and on the device. order:
    `kvjax.models.interleaving`."""

    name: str
    shape: tuple[int, ...]
    order: Order | None = None


class Checkpoint(Protocol):
    """What `load` needs of a checkpoint, whatever its format. Its functions raise ValueError for what is missing or
    damaged."""

    @property
    def config_name(self) -> str:
        """What holds the configuration, for errors."""

    def fields(self) -> dict[str, Any]:
        """The configuration, as config.json has it."""

    def generation(self) -> dict[str, Any] | None:
        """Defaults of generation, as generation_config.json has them; None: there are none."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by its name in Hugging Face's checkpoints. Reads no numbers."""

    def tokenizer(self) -> Any:
        """The tokenizer, as transformers has it."""

    def number_type(self) -> str | None:
        """safetensors' name of the type of parameters with dtype="auto"; None: that in which all of them are stored."""

    def digest(self) -> str:
        """What tells this checkpoint from another."""

    def check_same(self) -> None:
        """ValueError if a file that was read is another one now: what was read may be of two checkpoints."""


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with config.json, safetensors files and tokenizer (see `Checkpoint`)."""

    path: Path
    _known: dict[Path, KnownFile] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def config_name(self) -> str:
        """config.json, with its folder."""
        return str(self.path / "config.json")

    def fields(self) -> dict[str, Any]:
        """config.json."""
        self._know(CONFIG_FILES[0])
        return read_json(self.path / "config.json")

    def generation(self) -> dict[str, Any] | None:
        """generation_config.json."""
        self._know(CONFIG_FILES[1])
        path = self.path / "generation_config.json"
        return read_json(path) if is_file(path) else None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of its safetensors files."""
        return dict(self._stored)

    @functools.cached_property
    def _stored(self) -> dict[str, Stored]:
        self._know(WEIGHT_FILES[1])
        found = stored_tensors(self.path)
        self._known.update({each.file: each.known for each in found.values()})
        return found

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        self._know(*TOKENIZER_FILES)
        return read_tokenizer(self.path)

    def check_same(self) -> None:
        """`Checkpoint.check_same`."""
        for each in self._known.values():
            each.check()

    def _know(self, *patterns: str) -> None:
        """Remember files as they are, before they are read for the first time."""
        for path in filter(Path.is_file, itertools.chain.from_iterable(map(self.path.glob, patterns))):
            self._known.setdefault(path, KnownFile.of(path))

    def number_type(self) -> str | None:
        """None."""
        return None

    def digest(self) -> str:
        """Of config.json, and of each weight file its size, its header, and some bytes of the beginning, the middle and
        the end of each tensor. It reads little, so a copy in which other bytes are damaged has the same one."""
        self._know(CONFIG_FILES[0])
        files = {each.known for each in self._stored.values()}
        return sampled_digest(self._known[self.path / CONFIG_FILES[0]], files)


def open_checkpoint(path_or_id: str | Path, patterns: tuple[str, ...]) -> Checkpoint:
    """The checkpoint that a path or a Hub id names: a folder, a GGUF file, or a folder that holds one and no
    config.json. patterns, errors: as `find_folder`; and ValueError for an adapter's folder."""
    if path_or_id != EMBEDDED and str(path_or_id).lower().endswith(".gguf"):
        file = file_path(path_or_id)
        if not os.path.isdir(file):
            if not is_file(file):
                raise ValueError(f"there is no file {path_or_id!s:.300}")
            return _gguf(file)
    folder = find_folder(path_or_id, (*patterns, ADAPTER_CONFIG))
    file = None if os.path.lexists(folder / "config.json") or not any(folder.glob("*.gguf")) else _gguf_in(folder)
    if file is None and not is_file(folder / "config.json"):
        _refuse_adapter(folder)
    return Folder(folder) if file is None else _gguf(file)


def _gguf(file: Path) -> Checkpoint:
    from kvjax.models.gguf.files import GgufFile  # here, because the gguf package takes time to import

    return GgufFile(file)


def _gguf_in(folder: Path) -> Path | None:
    from kvjax.models.gguf.files import model_in

    return model_in(folder)


def _refuse_adapter(folder: Path) -> None:
    """ValueError if a folder holds an adapter."""
    if not is_file(folder / ADAPTER_CONFIG):
        return
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    base = f"{named:.200}" if isinstance(named, str) and named else "BASE"
    raise ValueError(
        f"{folder} is an adapter for {base if base != 'BASE' else 'a model that it does not name'}, not a model: "
        f"kvjax.load({base!r}, lora={str(folder)!r}), or --model {base} --lora {folder} on the command line"
    )


EMBEDDED = "needle"
"""The name of the model inside this package; a folder of that name is `./needle`."""


def find_folder(path_or_id: str | Path, patterns: tuple[str, ...]) -> Path:
    """The local folder of a model: the embedded one for "needle", else `path_or_id` if it is a folder, else that Hub
    repository's copy.

    patterns: the file names to download. Files that are in the Hub's local cache are not downloaded again. Raises
    ValueError, with the remedy, when there is no such folder and the repository does not exist, is closed to this user,
    or cannot be reached.
    """
    if path_or_id == EMBEDDED:
        return needle.path()
    if not str(path_or_id).strip():
        raise ValueError("the model's name is empty: give a folder, a Hub id (owner/name) or 'needle'")
    folder = file_path(path_or_id)
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder):
        raise ValueError(
            f"{path_or_id!s:.300} is a file; give the folder that holds config.json and the .safetensors files, or a file whose name ends "
            "in .gguf"
        )
    if not re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", str(path_or_id)):
        raise ValueError(f"there is no folder {path_or_id!s:.300}, and it is not a Hub id (owner/name) either")
    return _download(str(path_or_id), patterns)


def _download(repo_id: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise ValueError(f"{repo_id} is gated: accept its terms on huggingface.co, then run `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo_id} is neither a folder here nor a repository on the Hub{_embedded(repo_id)}; check the name, or run `hf auth login` "
            "if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{repo_id} is not a folder here{_embedded(repo_id)}, and the Hub cannot be reached: download it on a connected machine "
            f"(`hf download {repo_id}`) and give its folder"
        ) from error


def _embedded(repo_id: str) -> str:
    """For an error, where the name of the model inside this package may have been meant."""
    return "" if "/" in repo_id else ", nor is it 'needle', the model inside this package"


SAMPLE = 1024
"""Bytes that `Folder.digest` reads at a place of a tensor."""


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names; reads the headers
    only.

    What the shards hold counts. Where the index says otherwise a warning names the tensors, and which of two shards a
    tensor is read from follows the index. Raises ValueError for a missing or damaged file, and for a tensor that
    several shards hold and the index is no help.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if is_file(single):
        return file_tensors(single)
    if not is_file(index):
        if shards := sorted(path.name for path in folder.glob("model-*.safetensors")):
            raise ValueError(f"{folder} holds {shards[0]}, but no {index.name}, which says what the shards hold; {AGAIN}")
        _refuse_adapter(folder)
        if others := sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern)):
            raise ValueError(
                f"{folder} holds {others[0]}, but no model.safetensors: save it as safetensors with the program that reads it "
                "(transformers: model.save_pretrained(FOLDER)), or download a copy that has them"
            )
        raise ValueError(f"{folder} holds neither model.safetensors nor {index.name}; {AGAIN}")
    return _of_shards(folder, index, _weight_map(index))


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says. ValueError for anything but names of files in the same folder."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} has no weight_map; {AGAIN}")
    for name, file in found.items():
        if not isinstance(file, str):
            raise ValueError(f"{index}: weight_map of {name:.200} is {file!r:.200}; it must be the name of a file; {AGAIN}")
    for file in sorted(set(found.values())):
        # A name alone: a path could lead out of the folder.
        if Path(file).name != file or file in ("", "..") or not is_file(index.parent / file):
            raise ValueError(f"{index} names the shard {file!r:.200}, which is not in {index.parent}; {AGAIN}")
    return found


def _of_shards(folder: Path, index: Path, weight_map: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of all shards."""
    tensors: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        for name, stored in file_tensors(folder / file).items():
            if name in tensors and weight_map.get(name) not in (file, tensors[name].file.name):
                raise ValueError(
                    f"{tensors[name].file.name} and {file} both hold {name:.200}, and {index} does not say which counts; {AGAIN}"
                )
            if name not in tensors or weight_map.get(name) == file:
                tensors[name] = stored
    stray = sorted(
        name for name in weight_map.keys() | tensors.keys() if name not in tensors or weight_map.get(name) != tensors[name].file.name
    )
    if stray:
        logger.warning("%s and the shards disagree about %s: what the shards hold is read", index, listed(stray))
    return tensors


def sampled_digest(config: KnownFile, files: Collection[KnownFile]) -> str:
    """A digest of a configuration, and of safetensors files: of each its size, its header, and some bytes of each
    tensor."""
    found = hashlib.sha256(config.read(0, config.size))
    for file in sorted(files, key=lambda each: each.path):
        count = header_of(file)[0]
        header = file.read(8, count).tobytes()
        found.update(f"{file.path.name} {file.size}".encode() + header)
        for name, entry in sorted(json.loads(header).items()):
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                for at in (begin, (begin + end) // 2, max(begin, end - SAMPLE)):
                    found.update(file.read(8 + count + at, min(SAMPLE, end - at)))
    return found.hexdigest()


def file_tensors(file: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file; reads its header. ValueError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    known = KnownFile.of(file)
    try:
        with named(file), safe_open(file, framework="np") as opened:
            names = opened.keys()
    except SafetensorError as error:
        known.check()
        check_pointer(file)
        raise ValueError(f"{file} is not a whole safetensors file ({first_line(error)}); {AGAIN}") from error
    size, header = header_of(known)

    def stored(name: str, entry: Mapping[str, Any]) -> Stored:
        return Stored(known, 8 + size + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"], name)

    return {name: stored(name, header[name]) for name in names}


def wanted_tensors(config: ModelConfig) -> tuple[list[Wanted], Any]:
    """What the parameter pytree of `config` is filled from: its leaves in order, and its structure."""
    family = FAMILIES[config.family]
    names, structure = jax.tree_util.tree_flatten_with_path(family.tensor_names(config))
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int))

    def order(path: Any) -> Order | None:
        layer, name = place_of(path)
        return order_of(config.layers[layer].mixer, name) if family.interleaved and layer is not None else None

    return [Wanted(name, shape, order(path)) for (path, name), shape in zip(names, shapes, strict=True)], structure


def check_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], packed: Collection[str] = (), where: str = "config.json") -> None:
    """Raises ValueError that lists every tensor that is missing, extra, misshapen or of a type that cannot be read.
    packed: names of parameters that are stored in other tensors. where: what holds the configuration."""
    wanted = {w.name: w.shape for w in wanted_tensors(config)[0] if w.name not in packed}
    extra = {name for name in tensors.keys() - wanted.keys() if not _COMPUTED.fullmatch(name)}
    problems = [
        ("missing", [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in tensors]),
        ("extra", [f"{name} {list(tensors[name].shape)}" for name in sorted(extra)]),
        (
            "misshapen",
            [
                f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
                for name, shape in wanted.items()
                if name in tensors and tensors[name].shape != shape
            ],
        ),
        (f"stored in another type than {', '.join(DTYPES)}", [f"{n} {t.dtype}" for n, t in tensors.items() if t.dtype not in DTYPES]),
    ]
    found = [f"{len(names)} {what}: {listed(names)}" for what, names in problems if names]
    if found:
        raise ValueError(f"the weights do not fit {where}; " + "; ".join(found))


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first names, and how many more there are, for an error. What a terminal would not print is escaped."""
    shown = [name[:200] if name.isprintable() else repr(name[:200]) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
