"""Pages of demoted sessions on disk: files that are mapped into memory, so that reading them back needs nothing of its own.

A file has no name any more once it is mapped: nobody else can change it, and its room is free as soon as the session ends or the process
does, even if that is killed. Each has a checksum (CRC-32) in memory: a disk that gives back other bytes is noticed. Histories that outlive
the process are the business of `kvjax.serving.sessions.journal`.
"""

from __future__ import annotations

import mmap
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvjax.cache.stores.blocks import Stored


class OnDisk(Stored):
    """What `DiskTier.put` returns. Blocks are compared with their checksums when they are first read: ValueError for those that are
    damaged."""

    def __init__(self, blocks: Iterable[tuple[str, np.ndarray, int]]):
        super().__init__()
        self._unread: dict[str, int] = {}
        for name, mapped, checksum in blocks:
            self[name], self._unread[name] = mapped, checksum

    def __getitem__(self, name: str) -> np.ndarray:
        blocks = super().__getitem__(name)
        if name in self._unread:
            if _checksum(blocks) != self._unread[name]:
                raise ValueError(f"the disk gives back other pages of layer group {name} than were written: they are damaged")
            del self._unread[name]
        return blocks

    @property
    def whole(self) -> bool:
        """Whether all blocks are those that were written. It reads them."""
        try:
            return all(self[name] is not None for name in self)
        except ValueError:
            return False


class DiskTier:
    """Room for pages in a folder. most: bytes of all pages together. ValueError if the folder cannot be written to."""

    def __init__(self, folder: Path, most: int):
        self.folder, self.most = folder, most
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"{folder} cannot hold pages of sessions: {error.strerror}; name another folder") from None

    def put(self, stored: Stored) -> OnDisk:
        """The same pages, on disk. OSError if the disk is full; then nothing is left there."""
        return OnDisk((name, self._mapped(blocks), _checksum(blocks)) for name, blocks in stored.items())

    def _mapped(self, blocks: np.ndarray) -> np.ndarray:
        if not blocks.size:
            return blocks
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.write(np.ascontiguousarray(blocks).data)  # a full disk is an error here; a write through the map would end the process
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), blocks.dtype).reshape(blocks.shape)


def _checksum(blocks: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(blocks).data)
