"""Reads what a GGUF file says of itself: its metadata, and where its tensors are.

Layout (little endian): "GGUF", version u32, tensors u64, entries u64; the entries: key, type u32, value; the tensors:
name, axes u32, sizes u64 (the contiguous axis first), type u32, offset u64; the data, aligned. A string is its length
u64 and UTF-8. Source: ggml's docs/gguf.md.

The reader of the `gguf` package loops and allocates as the counts in the file say, and slices past its end. This one
compares every count with the bytes that are left, so a damaged file costs no more than a whole one. Types and their
sizes are the package's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvjax.known_files import KnownFile
from kvjax.text.checkpoint_files import check_pointer
from pallas_kernels.core.messages import shown

DAMAGED = "the file is damaged: download it again"

MAX_ENTRIES, MAX_TENSORS, MAX_ITEMS, MAX_AXES = 1 << 16, 1 << 20, 1 << 24, 4
"""Entries of metadata, tensors, items of one entry and axes of a tensor that are read. Large models have some 60,
2,000, 600,000 and 3."""

MAX_ALIGNMENT = 1 << 20

_TEXTS = ("general.architecture", "general.type", "tokenizer.ggml.model", "tokenizer.ggml.pre")
_COUNTS = ("split.count", "split.no", "split.tensors.count")
"""Keys of any architecture, by what their values must be."""

_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
"""numpy's name of each type of number."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file, from byte `start` on. shape: the contiguous axis last."""

    known: KnownFile
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def file(self) -> Path:
        """Where its file is, for errors."""
        return self.known.path

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor. Blocks lie along the contiguous axis."""
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Bytes of rows [start, stop), uint8 [rows, bytes of a row], in a copy."""
        size = self.nbytes // self.shape[0]
        return self.known.read(self.start + start * size, (stop - start) * size).reshape(stop - start, size)


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's metadata (numbers, strings, booleans; lists of strings; arrays of numbers) and its tensors by name."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Entry]


def read_header(known: KnownFile) -> Header:
    """The header of a GGUF file. ValueError, in a sentence with the file's name, for anything else, and for a damaged
    one."""
    check_pointer(known.path)
    if known.size < 24:
        raise ValueError(f"{known.path} has {known.size} bytes, and a GGUF file has at least 24: {DAMAGED}")
    with known.opened() as opened:
        return _Reader(known, opened).header()


class _Reader:
    """Reads one file from its beginning on."""

    def __init__(self, known: KnownFile, opened: BinaryIO):
        self.known, self.file, self.size, self.opened, self.at = known, known.path, known.size, opened, 0

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.file}: {what}; {DAMAGED}")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. ValueError if the file has fewer."""
        if count > self.size - self.at:
            raise self.error(f"{what} takes {count:,} bytes, and the file has {self.size - self.at:,} more")
        self.at += count
        found = self.opened.read(count)
        if len(found) < count:
            raise self.known.changed()
        return found

    def number(self, code: str, what: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        text = self.take(self.number("<Q", what), what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error.reason})") from None

    def header(self) -> Header:
        self.check_version()
        tensors, entries = self.number("<Q", "the number of tensors"), self.number("<Q", "the number of entries")
        # An entry has at least a key's length, a type and one byte; a tensor a length, axes, type and offset.
        for count, least, most, what in ((entries, 13, MAX_ENTRIES, "entries of metadata"), (tensors, 24, MAX_TENSORS, "tensors")):
            if count > min(most, (self.size - self.at) // least):
                raise self.error(f"it says that it has {count:,} {what}, more than its {self.size:,} bytes can hold or than are read")
        metadata: dict[str, Any] = {}
        for number in range(entries):
            key = self.string(f"the key of entry {number}")
            if key in metadata:
                raise self.error(f"its metadata has {key[:200]!r} twice")
            metadata[key] = self.value(key[:200])
        for kind, what, keys in ((str, "text", _TEXTS), (int, "a whole number", _COUNTS)):
            for key in keys:
                if not isinstance(metadata.get(key, kind()), kind):
                    raise self.error(f"{key} is {shown(metadata[key], 200)}, and must be {what}")
        found = [self.tensor(number) for number in range(tensors)]
        return Header(self.file, metadata, self.placed(found, metadata.get("general.alignment", 32)))

    def check_version(self) -> None:
        magic = self.take(4, "the name of the format")
        if magic != b"GGUF":
            old = ", an older format of llama.cpp: convert the original model again" if magic in (b"lmgg", b"fmgg", b"tjgg") else ""
            raise ValueError(f"{self.file} is not a GGUF file: it begins with {magic!r}{old or '; check the name, or download it again'}")
        version = self.number("<I", "the version")
        if version & 0xFFFF == 0 and version:
            raise ValueError(f"{self.file} is a big-endian GGUF file, which is not supported: convert it with `gguf-convert-endian`")
        if version not in (2, 3):
            said = "made before August 2023: convert the original model again" if version == 1 else "of which 2 and 3 are supported"
            raise ValueError(f"{self.file} is GGUF of version {version}, {said}")

    def value(self, key: str) -> Any:
        kind = self.kind(key)
        if kind == GGUFValueType.STRING:
            return self.string(key)
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1, key)[0].item()
        kind, count = self.kind(key), self.number("<Q", key)
        if kind == GGUFValueType.ARRAY:
            raise self.error(f"{key} holds arrays of arrays, which no model has")
        if count > MAX_ITEMS or (kind == GGUFValueType.STRING and count > (self.size - self.at) // 8):
            raise self.error(f"{key} says that it has {count:,} items, more than the file can hold or than are read")
        return [self.string(key) for _ in range(count)] if kind == GGUFValueType.STRING else self.numbers(kind, count, key)

    def kind(self, key: str) -> GGUFValueType:
        kind = self.number("<I", f"the type of {key}")
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self.error(f"{key} has the type {kind}, which GGUF does not have") from None

    def numbers(self, kind: GGUFValueType, count: int, key: str) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        found = self.take(dtype.itemsize * count, key)
        if kind == GGUFValueType.BOOL:  # any byte, of which numpy would make neither true nor false
            return np.frombuffer(found, np.uint8) != 0
        return np.frombuffer(found, dtype)

    def tensor(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(f"the name of tensor {number}")
        what = f"tensor {name[:200]!r}"
        axes = self.number("<I", what)
        if not 1 <= axes <= MAX_AXES:
            raise self.error(f"{what} has {axes} axes; from 1 to {MAX_AXES} are possible")
        shape = tuple(self.number("<Q", what) for _ in range(axes))[::-1]
        return name, shape, self.number("<I", what), self.number("<Q", what)

    def placed(self, found: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, Entry]:
        """The tensors, each of which must lie within the file."""
        good = isinstance(alignment, int) and not isinstance(alignment, bool) and 1 <= alignment <= MAX_ALIGNMENT
        if not good or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {shown(alignment, 200)}; it must be a power of two up to {MAX_ALIGNMENT:,}")
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, Entry] = {}
        for name, shape, kind, offset in found:
            what = f"tensor {name[:200]!r}"
            if name in tensors:
                raise self.error(f"it has {what} twice")
            if kind not in GGMLQuantizationType:
                raise ValueError(
                    f"{self.file}: {what} has type {kind}, which this release of the gguf package does not know; update it "
                    "(pip install -U gguf), or download a file of another type, such as Q8_0 or Q4_K_M"
                )
            entry = Entry(self.known, name, GGMLQuantizationType(kind), shape, begin + offset)
            block = GGML_QUANT_SIZES[entry.type][0]
            if 0 in shape or shape[-1] % block or (block > 1 and len(shape) < 2):
                raise self.error(f"{what} is {list(shape)}; {entry.type.name} needs rows of whole blocks of {block}, and no empty axis")
            if offset % alignment or entry.start + entry.nbytes > self.size:
                missing = entry.start + entry.nbytes - self.size
                said = f"ends {missing:,} bytes after the file's end" if missing > 0 else f"begins at byte {offset:,}, which is not aligned"
                raise self.error(f"{what} {said}")
            tensors[name] = entry
        in_order = sorted(tensors.values(), key=lambda entry: entry.start)
        for first, second in itertools.pairwise(in_order):
            if first.start + first.nbytes > second.start:
                raise self.error(f"tensors {first.name[:200]!r} and {second.name[:200]!r} lie on the same bytes")
        return tensors
