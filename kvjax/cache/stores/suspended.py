"""Pages of suspended sequences: in host memory, and on disk where that is full.

They have no digest to be found by, because steps wrote some of them, so they are kept by their sequence. A file on disk
has no name any more once it is mapped: nobody else can change it, and its room is free as soon as its sequence is, or
the process ends, even if that is killed. A checksum (CRC-32) of it stays in memory: a disk that gives back other bytes
is noticed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvjax.cache.stores.blocks import Stored

RETRY_S = 60.0
"""After a failed write, the disk counts as full for so long."""
PIECE = 1 << 20
"""Bytes of a file that are read at once to see whether it can be read."""


class SuspendedPages:
    """Blocks by sequence: in host memory, the one used longest ago first, and on disk. Those of sequences that come
    back by themselves stay in host memory, and do not count. moved: how often those of a sequence went on to disk since
    `limit` was called."""

    def __init__(self):
        self.on_host: OrderedDict[Hashable, Stored] = OrderedDict()
        self.on_disk: dict[Hashable, Stored] = {}
        self._brief: dict[Hashable, Stored] = {}
        self._unread: dict[Hashable, dict[str, tuple[int, BinaryIO]]] = {}  # checksums and files of those not read yet
        self.host_used = self.disk_used = 0
        self.limit(None)

    def limit(self, host_bytes: int | None, folder: Path | None = None, disk_bytes: int = 0) -> None:
        """Set what `make_room` keeps to: so many bytes in host memory (None: any number), and so many in files of a
        folder. ValueError if the folder cannot be written to."""
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise ValueError(f"{folder} cannot hold pages of suspended sequences: {error.strerror}; name another folder") from None
        self.host_bytes, self.folder, self.disk_bytes = host_bytes, folder, disk_bytes
        self.moved, self._failed = 0, float("-inf")

    def usage(self) -> dict[str, int]:
        """Bytes and pages in host memory and on disk."""
        pages = {f"{name}_pages": sum(map(_pages, kept.values())) for name, kept in (("host", self.on_host), ("disk", self.on_disk))}
        return {"host_bytes": self.host_used, "disk_bytes": self.disk_used, **pages}

    def put(self, key: Hashable, stored: Stored, briefly: bool = False) -> None:
        """Keep the blocks of a sequence in host memory, whatever its limit. briefly: it comes back by itself."""
        (self._brief if briefly else self.on_host)[key] = stored
        self.host_used += 0 if briefly else _bytes(stored)

    def get(self, key: Hashable) -> Stored:
        """The blocks of a sequence. ValueError if the disk gives back others than were written."""
        if (stored := self._brief.get(key) or self.on_host.get(key)) is not None:
            return stored
        for name, (checksum, file) in self._unread.get(key, {}).items():
            blocks = self.on_disk[key][name]
            if not _is_whole(file, blocks.nbytes) or _checksum(blocks) != checksum:
                raise ValueError(f"the disk gives back other pages of layer group {name} than were written: they are damaged")
        self._close(key)
        return self.on_disk[key]

    def drop(self, key: Hashable) -> None:
        """Forget the blocks of a sequence, if there are any."""
        self._brief.pop(key, None)
        self.host_used -= _bytes(self.on_host.pop(key, {}))
        self.disk_used -= _bytes(self.on_disk.pop(key, {}))
        self._close(key)

    def _close(self, key: Hashable) -> None:
        for _, file in self._unread.pop(key, {}).values():
            file.close()

    def touch(self, key: Hashable) -> None:
        """A sequence was used: its blocks, if there are any, go to disk after those of others."""
        if key in self.on_host:
            self.on_host.move_to_end(key)

    @property
    def full(self) -> bool:
        """Whether not even one page has room."""
        return self.host_bytes is not None and self.host_used >= self.host_bytes and self._disk_left() <= 0

    def make_room(self, size: int) -> bool:
        """Move blocks of the sequences used longest ago to disk, so that `size` more bytes fit into host memory, or
        else on disk behind them. False if they do not; then nothing is moved. OSError if the disk cannot be written to;
        what was to go there stays where it is."""
        if self.host_bytes is None:
            return True
        surplus, room, leaving = self.host_used + size - self.host_bytes, self._disk_left(), []
        if surplus > max(room, 0):
            return False
        for key, stored in self.on_host.items():
            if surplus <= 0:
                break
            if (held := _bytes(stored)) > room:
                return False
            leaving.append(key)
            surplus, room = surplus - held, room - held
        if surplus > 0 and size > room:
            return False
        for key in leaving:
            self._to_disk(key)
        return True

    def _disk_left(self) -> int:
        return 0 if self.folder is None or time.monotonic() < self._failed + RETRY_S else self.disk_bytes - self.disk_used

    def _to_disk(self, key: Hashable) -> None:
        stored, files = self.on_host[key], {}
        mapped: Stored = {}
        try:
            for name, blocks in stored.items():
                files[name] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (closed when it was read)
                mapped[name] = _mapped(files[name], blocks)
        except BaseException as error:
            for file in files.values():
                with contextlib.suppress(OSError):  # a full disk has raised its error already
                    file.close()
            if isinstance(error, OSError):
                self._failed = time.monotonic()
            raise
        self.drop(key)
        self.on_disk[key], self._unread[key] = mapped, {name: (_checksum(blocks), files[name]) for name, blocks in stored.items()}
        self.disk_used += _bytes(mapped)
        self.moved += 1


def _mapped(file: BinaryIO, blocks: np.ndarray) -> np.ndarray:
    """Blocks that were written to a file, as its map. A full disk is an error here; a write through the map would end
    the process."""
    if not blocks.size:
        return blocks
    file.write(np.ascontiguousarray(blocks).data)
    file.flush()
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), blocks.dtype).reshape(blocks.shape)


def _is_whole(file: BinaryIO, size: int) -> bool:
    """Whether all bytes of a file can be read. Where one cannot, because the disk fails or the file was cut, a read
    through the map would end the process."""
    piece, at = bytearray(PIECE), 0
    try:
        while count := os.preadv(file.fileno(), [piece], at):
            at += count
    except OSError:
        return False
    return at == size


def _bytes(stored: Stored) -> int:
    return sum(blocks.nbytes for blocks in stored.values())


def _pages(stored: Stored) -> int:
    return sum(map(len, stored.values()))


def _checksum(blocks: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(blocks).data)
