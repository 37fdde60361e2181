"""Files that are read in pieces, and must be the same file in every piece: another program may replace, change or cut
one meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvjax.text.checkpoint_files import named


@dataclasses.dataclass(frozen=True)
class KnownFile:
    """A file as it was when it was first looked at. Every later look is at the same file, or an error.

    Bytes are copied by plain reads. Through a map, a file that is cut meanwhile would end the process.

    Args:
        path: where it is.
        version: device, inode, size in bytes and time of the last change in nanoseconds.
    """

    path: Path
    version: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: Path) -> KnownFile:
        """The file that is at a path now. ValueError if it cannot be looked at."""
        with named(path):
            return cls(path, _version(path.stat()))

    @property
    def size(self) -> int:
        """Bytes."""
        return self.version[2]

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, to be read in the block. ValueError if it is another one before the block or after it."""
        with named(self.path), open(self.path, "rb") as file:
            self._compare(os.fstat(file.fileno()))
            try:
                yield file
            except Exception:  # what was read is of no file at all if it has changed meanwhile
                self._compare(os.fstat(file.fileno()))
                raise
            self._compare(os.fstat(file.fileno()))

    def read(self, start: int, count: int) -> np.ndarray:
        """Bytes [start, start + count), uint8, in a copy that the caller may keep. ValueError as in `opened`."""
        return self.read_parts(start, count, 1, count)[0]

    def read_parts(self, start: int, count: int, parts: int, apart: int) -> np.ndarray:
        """`count` bytes at each of `parts` places that lie `apart` bytes from one another, uint8 [parts, count].
        ValueError as in `opened`."""
        found = np.empty((parts, count), np.uint8)
        with self.opened() as file:
            for number, part in enumerate(found):
                file.seek(start + number * apart)
                if file.readinto(part) != count:
                    raise self.changed()
        return found

    def check(self) -> None:
        """ValueError if there is another file at the path now, or none."""
        try:
            self._compare(self.path.stat())
        except OSError:
            raise self.changed() from None

    def _compare(self, found: os.stat_result) -> None:
        if _version(found) != self.version:
            raise self.changed()

    def changed(self) -> ValueError:
        """What is raised."""
        return ValueError(f"{self.path} changed while it was loaded: load it again")


@functools.lru_cache(maxsize=16)  # each packed matrix asks for what it says of it, and a header may have a megabyte
def header_of(known: KnownFile) -> tuple[int, Mapping[str, Any]]:
    """The size in bytes of a safetensors file's header, and the header. The file must be whole."""
    size = int.from_bytes(known.read(0, 8).tobytes(), "little")
    return size, json.loads(known.read(8, size).tobytes())


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
