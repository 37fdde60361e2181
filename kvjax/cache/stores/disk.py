"""Pages on disk, by the digest of their content. They outlive the process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jaxtyping import UInt8

from kvjax.cache.eviction_order import Recency
from kvjax.cache.stores.blocks import Block
from kvjax.checks import file_path

logger = logging.getLogger(__name__)

FORMAT = "kvjax pages 1"
READERS = 8
"""Blocks that are read at a time. As many others that were read may be checked meanwhile, so that the disk does not
wait for digests."""
PATIENCE = 2.0
"""Seconds to wait for a folder: an engine that nobody holds any more may still be writing its last pages."""
PENDING_BYTES = 1 << 28
"""Bytes that may wait to be written. Whoever puts more waits."""


class DiskStore:
    """Blocks in one file for each layer group, preallocated, of `total_bytes` together, and an SQLite database that
    says what is in them.

    folder: made if it is missing; its parent must exist. blocks: bytes of a block, by layer group. An engine keeps the
    folder for itself.

    A block counts as there only when it has been written: first its slot is taken out of the database, then it is
    written, then it is entered with a SHA-256 of its key and its bytes. So a process that is killed leaves no half
    block behind that anyone would read. A block whose digest does not fit when it is read was altered or damaged: it is
    dropped. After an error of the disk nothing more is written.

    written_bytes, read_bytes: moved so far. evictions: blocks that made room. damaged: blocks that were dropped.
    failure: the error that ended writing, or None.
    """

    NAME, SIZE_ARGUMENT = "the files on disk", "disk_bytes"

    def __init__(self, folder: str | Path, total_bytes: int, blocks: Mapping[str, int]):
        self.folder, self.total_bytes, self.blocks = file_path(folder), total_bytes, dict(blocks)
        self.written_bytes = self.read_bytes = self.evictions = self.damaged = 0
        self.failure: Exception | None = None
        self.closed = False
        each = sum(self.blocks.values())
        self.slots = total_bytes // each
        if self.slots < 1:
            raise ValueError(f"disk_bytes of {total_bytes:,} is less than one page of every layer group, {each:,} bytes: give more")
        self._lock = threading.Lock()  # of everything below and of the database
        self._room = threading.Condition(self._lock)
        try:
            self._open()
            self._load()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the second where a message of SQLite quotes damaged text
            raise ValueError(f"the index of {self.folder} cannot be used: {error}; delete the folder, or name another") from error
        except OSError as error:
            raise ValueError(f"pages cannot be kept in {self.folder}: {error}; name a folder that can be written, with room") from error
        self._pending: dict[bytes, Block] = {}
        self._pending_bytes = 0
        self._writer = ThreadPoolExecutor(1, "kvjax disk writer")
        self._readers = ThreadPoolExecutor(2 * READERS, "kvjax disk reader")
        self._reading = threading.Semaphore(READERS)

    def _open(self) -> None:
        if not self.folder.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {self.folder.parent} to make {self.folder.name} in")
        self.folder.mkdir(exist_ok=True)
        self._held = os.fdopen(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # a pipe does not wait
        ends = time.monotonic() + PATIENCE
        while not self._locked():
            if time.monotonic() > ends:
                raise ValueError(
                    f"{self.folder} is in use by another engine, here or in another process: close that one (Engine.close), or name "
                    "another folder"
                )
            time.sleep(0.05)
        for end in ("", "-journal", "-wal", "-shm"):  # SQLite waits for a pipe, where Ctrl-C does nothing, and follows links
            path = self.folder / f"index.sqlite{end}"
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError(f"{path} is no file of an index, but a link, a pipe or a folder; delete it, or name another folder")
        self._index = sqlite3.connect(self.folder / "index.sqlite", check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._index.close)  # a connection is part of a circle, and holds its lock until that is collected
        self._index.execute("PRAGMA trusted_schema=OFF")
        self._index.execute("PRAGMA locking_mode=EXCLUSIVE")  # else it maps a file, and ends the process if that is cut off
        self._index.execute("PRAGMA journal_mode=WAL")
        self._index.execute("PRAGMA synchronous=NORMAL")
        self._index.execute("CREATE TABLE IF NOT EXISTS about (format TEXT, blocks TEXT)")
        self._index.execute("CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, layers TEXT, slot INTEGER, digest BLOB)")
        about = json.dumps(self.blocks, sort_keys=True)
        found = self._index.execute("SELECT format, blocks FROM about").fetchone()
        if found is None:
            self._index.execute("INSERT INTO about VALUES (?, ?)", (FORMAT, about))
        elif found != (FORMAT, about):
            raise ValueError(
                f"{self.folder} holds pages of another kind: their bytes by layer group are {found[1]} ({found[0]}), and this engine's "
                f"{about} ({FORMAT}). Another model, page size or cache format wrote them: name another folder, or delete that one"
            )
        self._files = {}
        for place, name in enumerate(self.blocks):
            number = os.open(self.folder / f"pages-{place}.bin", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            self._files[name] = os.fdopen(number, "r+b", buffering=0)
        self._allocate()

    def _allocate(self) -> None:
        """Give the files their sizes. If the disk has no room, they are as large as before."""
        numbers = {file.fileno(): self.slots * self.blocks[name] for name, file in self._files.items()}
        before = {number: os.fstat(number).st_size for number in numbers}
        for number, wanted in numbers.items():
            if wanted < before[number]:
                os.ftruncate(number, wanted)
        room = os.fstatvfs(self._held.fileno())
        free, held = room.f_bavail * room.f_frsize, sum(512 * os.fstat(number).st_blocks for number in numbers)
        try:
            if (needed := sum(numbers.values())) > free + held:
                raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, and {free + held:,} are free; give at most so many")
            for number, wanted in numbers.items():
                os.posix_fallocate(number, 0, wanted)
        except OSError:
            for number, size in before.items():
                os.ftruncate(number, min(size, numbers[number]))
            raise

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _load(self) -> None:
        """Read the database: what is in which slot, in the order in which it was written."""
        self._index.execute("DELETE FROM pages WHERE slot >= ?", (self.slots,))
        rows = self._index.execute("SELECT key, layers, slot, digest FROM pages ORDER BY rowid").fetchall()
        used = set()
        for row in rows:
            key, name, slot, digest = row
            right = isinstance(key, bytes) and isinstance(digest, bytes) and isinstance(slot, int) and 0 <= slot < self.slots
            if not right or name not in self.blocks or (name, slot) in used:
                raise sqlite3.DatabaseError(f"it has a row that it cannot have, {row!r:.80}")
            used.add((name, slot))
        self._places: dict[bytes, tuple[str, int, bytes]] = {key: (name, slot, digest) for key, name, slot, digest in rows}
        taken = {name: {slot for each, slot, _ in self._places.values() if each == name} for name in self.blocks}
        self._free = {name: [slot for slot in range(self.slots - 1, -1, -1) if slot not in taken[name]] for name in self.blocks}
        self._order: dict[str, Recency[bytes]] = {name: Recency() for name in self.blocks}
        for key, (name, _, _) in self._places.items():
            self._order[name].add(key)

    @property
    def takes(self) -> bool:
        """Whether it takes more blocks."""
        return not self.closed and self.failure is None

    def __len__(self) -> int:
        return 0 if self.closed else len(self._places) + len(self._pending)

    def __contains__(self, key: bytes) -> bool:
        return not self.closed and (key in self._places or key in self._pending)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that it holds."""
        with self._lock:
            return 0 if self.closed else sum(self.blocks[name] for name, _, _ in self._places.values())

    def put(self, key: bytes, group: str, block: Block) -> None:
        """Have a block of a layer group written. Waits only while too much is waiting already."""
        with self._room:
            if not self.takes or key in self:
                return
            self._room.wait_for(lambda: self._pending_bytes < PENDING_BYTES)
            self._pending[key] = block
            self._pending_bytes += block.nbytes
        self._writer.submit(self._write, key, group, block)

    def read(self, key: bytes) -> Future[UInt8[np.ndarray, " bytes"] | None]:
        """Begin to read a block. The result is None if it is not here, or not whole."""
        if not self.closed:
            return self._readers.submit(self._read, key)
        nothing: Future = Future()
        nothing.set_result(None)
        return nothing

    def used(self, keys: Iterable[bytes]) -> None:
        """Those of the keys that are here were used again, in this order."""
        with self._lock:
            for key in keys:
                if key in self._places:
                    self._order[self._places[key][0]].touch(key)

    def capacity(self, group: str) -> int:
        """Blocks of a layer group that fit."""
        return self.slots

    def hold(self, key: bytes) -> None:
        """If the block is here, do not give it up for others until `let_go`. Waits until it is written."""
        if key in self:
            self.wait()
            with self._lock:
                if key in self._places:
                    self._order[self._places[key][0]].hold(key)

    def let_go(self, key: bytes) -> None:
        """A block that is held may go again."""
        with self._lock:
            if key in self._places:
                self._order[self._places[key][0]].let_go(key)

    def wait(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits to be written, and give the folder back. From then on the store is empty, and takes
        nothing."""
        if self.closed:
            return
        self.closed = True
        self._writer.shutdown()
        self._readers.shutdown()
        self._index.close()
        fcntl.flock(self._held, fcntl.LOCK_UN)  # a forked process may hold the file open
        for file in (*self._files.values(), self._held):
            file.close()

    def _write(self, key: bytes, group: str, block: Block) -> None:
        """In the writer's thread."""
        try:
            if self.failure is None:
                self._write_whole(key, group, np.asarray(block))
        except (OSError, sqlite3.Error) as error:
            self.failure = error
            logger.warning("%s is not written to any more: %s", self.folder, error)
        except jax.errors.JaxRuntimeError as error:
            logger.warning("a page did not reach host memory, and is not written to disk: %s", str(error).partition("\n")[0])
        finally:
            with self._room:
                del self._pending[key]
                self._pending_bytes -= block.nbytes
                self._room.notify_all()

    def _write_whole(self, key: bytes, group: str, data: UInt8[np.ndarray, " bytes"]) -> None:
        digest = _digest(key, data)
        with self._lock:
            if not self._free[group]:
                self._drop(next(iter(self._order[group])))
                self.evictions += 1
            slot = self._free[group].pop()
        try:
            _write_at(self._files[group].fileno(), data, slot * self.blocks[group])
        except BaseException:
            with self._lock:
                self._free[group].append(slot)
            raise
        with self._lock:
            self._index.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?)", (key, group, slot, digest))
            self._places[key] = group, slot, digest
            self._order[group].add(key)
            self.written_bytes += data.nbytes

    def _read(self, key: bytes) -> UInt8[np.ndarray, " bytes"] | None:
        with self._lock:
            pending, place = self._pending.get(key), self._places.get(key)
        if pending is not None:
            try:
                return np.asarray(pending)
            except jax.errors.JaxRuntimeError:  # the writer says so
                return None
        if place is None:
            return None
        group, slot, digest = place
        data = np.empty(self.blocks[group], np.uint8)
        try:
            with self._reading:
                whole = _read_at(self._files[group].fileno(), data, slot * self.blocks[group])
            whole = whole and _digest(key, data) == digest
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.folder, error)
            whole = False
        with self._lock:
            if self._places.get(key) != (group, slot, digest):
                return None  # it made room for another meanwhile
            if whole:
                self.read_bytes += data.nbytes
                return data
            self.damaged += 1
            try:
                self._drop(key)
            except sqlite3.Error as error:  # its slot is not used again, because the database still names it
                self.failure = self.failure or error
        logger.warning("a page in %s is damaged, and is computed again", self.folder)
        return None

    def _drop(self, key: bytes) -> None:
        """Forget a block, also in the database, so that its slot can be written to. The caller holds the lock."""
        group, slot, _ = self._places.pop(key)
        self._order[group].remove(key)
        self._index.execute("DELETE FROM pages WHERE key = ?", (key,))
        self._free[group].append(slot)


def _digest(key: bytes, data: UInt8[np.ndarray, " bytes"]) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(data)
    return digest.digest()


def _write_at(file: int, data: UInt8[np.ndarray, " bytes"], offset: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count


def _read_at(file: int, data: UInt8[np.ndarray, " bytes"], offset: int) -> bool:
    """False where the file ends before the data does."""
    left = memoryview(data)
    while left:
        count = os.preadv(file, [left], offset)
        if not count:
            return False
        left, offset = left[count:], offset + count
    return True
