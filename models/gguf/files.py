"""GGUF files as checkpoints (`kvjax.models.checkpoint.Checkpoint`): which files belong together, and what `kvjax.load`
reads from them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from kvjax.known_files import KnownFile
from kvjax.models.gguf import architectures
from kvjax.models.gguf.header import Header, read_header
from kvjax.models.gguf.tensors import FLOATS, GgufTensor, check_types
from kvjax.models.gguf.vocabulary import read_vocabulary
from kvjax.text.checkpoint_files import is_file

SUFFIX = ".gguf"

MAX_SHARDS = 1000

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

SAMPLE = 1024
"""Bytes that `GgufFile.digest` reads at a place of a tensor."""


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file, or several that belong together (see `Checkpoint`). path: the one that was named."""

    path: Path

    @property
    def config_name(self) -> str:
        """The file's metadata."""
        return f"the metadata of {self.path}"

    @functools.cached_property
    def _known(self) -> list[KnownFile]:
        return [KnownFile.of(file) for file in shards_of(self.path)]

    @functools.cached_property
    def header(self) -> Header:
        """The metadata of the first file, and the tensors of all. ValueError for a file that is missing or damaged."""
        files = [known.path for known in self._known]
        headers = [read_header(known) for known in self._known]
        tensors = dict(headers[0].tensors)
        for each in headers[1:]:
            if twice := tensors.keys() & each.tensors.keys():
                raise ValueError(f"{each.file} holds {min(twice):.200}, which another of its files holds too; download them again")
            tensors |= each.tensors
        said = headers[0].metadata.get("split.tensors.count")
        if isinstance(said, int) and len(files) > 1 and said != len(tensors):
            raise ValueError(
                f"{files[0]} says that there are {said:,} tensors, and its {len(files)} files hold {len(tensors):,}; download them again"
            )
        if len(files) == 1 and headers[0].metadata.get("split.count", 1) not in (0, 1):
            count = headers[0].metadata["split.count"]
            raise ValueError(f"{files[0]} is one of {count} files, whose names end in -00001-of-{count:05d}.gguf: give it its name again")
        return Header(headers[0].file, headers[0].metadata, tensors)

    def fields(self) -> dict[str, Any]:
        """The configuration, as config.json has it."""
        return architectures.fields_of(self.header)

    def generation(self) -> dict[str, Any] | None:
        """None: the metadata has one end of sequence for all."""
        return None

    def tensors(self) -> dict[str, GgufTensor]:
        """The tensors, under Hugging Face's names."""
        check_types(list(self.header.tensors.values()))
        return architectures.tensors_of(self.header)

    def tokenizer(self) -> Any:
        """The tokenizer."""
        return read_vocabulary(self.header)

    def number_type(self) -> str:
        """The type that numbers have with dtype="auto": that of the matrices, or bfloat16 if they are packed. Norms are
        float32 in any."""
        matrices = [entry.type for entry in self.header.tensors.values() if len(entry.shape) > 1]
        kinds = {FLOATS.get(kind, "BF16") for kind in matrices}
        return kinds.pop() if len(kinds) == 1 else "BF16"

    def digest(self) -> str:
        """Of names, types and sizes, and some bytes of the beginning, the middle and the end of each tensor."""
        found = hashlib.sha256(repr(sorted((key, str(value)[:1000]) for key, value in self.header.metadata.items())).encode())
        for name, entry in sorted(self.header.tensors.items()):
            found.update(f"{name} {entry.type.name} {entry.shape}".encode())
            for at in (0, entry.nbytes // 2, max(0, entry.nbytes - SAMPLE)):
                found.update(entry.known.read(entry.start + at, min(SAMPLE, entry.nbytes - at)))
        return found.hexdigest()

    def check_same(self) -> None:
        """`Checkpoint.check_same`."""
        for each in self._known:
            each.check()


def shards_of(path: Path) -> list[Path]:
    """All files of a model, in order, from any of them. ValueError that names one that is missing."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    if not 1 <= int(found[2]) <= count <= MAX_SHARDS:
        raise ValueError(f"{path} is number {int(found[2])} of {count} files by its name; from 1 to {MAX_SHARDS} are possible")
    files = [path.with_name(f"{found[1]}-{number + 1:05d}-of-{found[3]}.gguf") for number in range(count)]
    for file in files:
        if not is_file(file):
            raise ValueError(f"{file} is missing: {path.name} is one of {count} files, which must lie in one folder; download it too")
    return files


def model_in(folder: Path) -> Path | None:
    """The GGUF model in a folder; None: there is none. Projectors and adapters beside it do not count. ValueError for
    several models."""
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.lower().startswith("mmproj") and is_file(path))
    models = {(shard[1], shard[3]) if (shard := _SHARD.fullmatch(path.name)) else path: path for path in reversed(files)}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models.values())[:10])
        raise ValueError(f"{folder} holds {len(models)} GGUF models ({names}): give one of these files")
    return next(iter(models.values()), None)
