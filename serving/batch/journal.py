"""A file of JSON lines that survives the job that writes it.

Its first line names the job that it belongs to. Every other line is one entry, appended when it is made. Each line ends
with a checksum of the first line and of its own other fields. A killed job leaves the file behind. At most its last
line is incomplete, and that line is dropped when the job is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pallas_kernels.core.files import finite

CONTINUED = "continued"
"""The key of an entry that says what a later run changed of the header."""
CHECKSUM = b', "crc": "'
LOCK_PAUSES = (0.05, 0.2)
RUNNING = "{} is being written by another job that is still running"
SYNC_SECONDS = 1.0
"""Seconds of entries that a power cut may lose at most. A killed process loses nothing that was written."""


class Journal:
    """The entries of one job so far. job: what must be equal for a later run to continue; any JSON values, no name of
    which is `crc`.

    A subclass defines its FORMAT, a description WHAT, the KEYS of every entry, and `_keep`, which remembers an entry.
    Raises ValueError if the file is another job's or not a journal, and BlockingIOError if a running job holds it.
    """

    FORMAT: str
    WHAT: str
    KEYS: frozenset[str]

    def __init__(self, path: Path, job: Mapping[str, Any]):
        self.path = path
        self._synced = 0.0
        header = checked({"format": self.FORMAT, **job})  # raises before the file is made if it is not JSON
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            self._lock()
            if not self._is_there():
                raise BlockingIOError(f"{path} was removed by another job, which has just ended: look at its output before you run this")
            self._load(header)
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Flush and close the file."""
        if not self._file.closed:
            try:
                self._sync()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Close the file. A full disk has raised its error already, and closing would raise it again."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the file's name to an OSError of the block: errors of open files do not name it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _keep(self, entry: dict[str, Any], offset: int, *, earlier: bool) -> None:
        """Remember what is needed of the entry at `offset`. earlier: whether another run wrote it."""
        raise NotImplementedError

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry to disk. Figures that are not finite become null, and `error` names them."""
        entry = finite(dict(entry))
        offset = self._write(checked(entry, self._first))
        self._keep(entry, offset, earlier=False)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def _again(self, offset: int, **known: Any) -> dict[str, Any]:
        """The entry at an offset, read again. ValueError if it is not what was written or read there. known: fields of
        it."""
        with self._named():
            self._file.seek(offset)
            entry = _entry(self._file.readline(), self.KEYS, self._first)
        if entry is None or not known.items() <= entry.items():
            raise ValueError(f"{self.path} changed while the job ran: at byte {offset:,} there is another line; delete it to start over")
        return entry

    def _lock(self) -> None:
        for pause in (*LOCK_PAUSES, None):  # a command that looks at the file before it loads a model holds the lock for a moment
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if pause is None:
                    raise BlockingIOError(RUNNING.format(self.path)) from None
                time.sleep(pause)

    def _is_there(self) -> bool:
        """Whether the locked file is still the one of this name: a job that ends removes its file while others may wait
        for it."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _load(self, header: bytes) -> None:
        """Read the file, cut off an incomplete last line, and refuse another job's entries."""
        self._file.seek(0)
        self._first = self._file.readline()
        self._file.seek(0)
        found, changed, whole = None, {}, 0
        for entry, begin, whole in self.entries(self._file, self.path):  # noqa: B007 (read below)
            if found is None:
                found = entry
            elif CONTINUED in entry:
                found = found | entry[CONTINUED]
            else:
                self._keep(entry, begin, earlier=True)
        if found is not None:
            changed = self._check(found, {name: value for name, value in json.loads(header).items() if name not in ("format", "crc")})
        self._file.truncate(whole)
        if found is None:
            self._first = header
            try:
                self._write(header)
                self._sync()
            except OSError:
                self.path.unlink()
                raise
            sync_folder(self.path.parent)
        elif changed:
            self._write(checked({CONTINUED: changed}, self._first))
            self._sync()

    @classmethod
    def entries(cls, file: IO[bytes], path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
        """(entry, where it begins, where it ends) of each complete line, the header first.

        An entry with the key `CONTINUED` holds what a later run changed of the header. ValueError for another file, and
        for a line that is damaged and not the last. path: for messages.
        """
        end, first = 0, b""
        for number, text in enumerate(iter(file.readline, b""), 1):
            entry = _entry(text, {"format"} if number == 1 else cls.KEYS, first)
            if number == 1:
                if entry is None and cls._torn_header(text):
                    return
                if (entry or {}).get("format") != cls.FORMAT:
                    raise ValueError(
                        f"{path} is not {cls.WHAT}, or an earlier version of kvjax wrote it; move it away, or choose another --out"
                    )
                first = text
            elif entry is None:
                entry = _entry(text, {CONTINUED}, first)
                if entry is None or not isinstance(entry[CONTINUED], dict):
                    if file.read(1):
                        raise ValueError(f"{path}, line {number}, is damaged; delete the file to start over")
                    return
            yield entry, end, end + len(text)
            end += len(text)

    def _check(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
        """ValueError if the job of the header `found` may not go on as `header`. Returns what the file must be told of
        the header."""
        from kvjax.model.identity import check_fingerprint  # it imports JAX, and `kvjax --help` must be fast

        check_fingerprint(found.get("model"), str(self.path), "delete the file to start over")
        for name, value in header.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.path} was begun with {name} {found.get(name)}, and this run has {value}: "
                    "run it as it was begun, or delete the file to start over"
                )
        return {}

    @classmethod
    def _torn_header(cls, text: bytes) -> bool:
        """Whether a file that begins like this was left by a job that died at its start, and is no other file."""
        begun = dump({"format": cls.FORMAT})[:-2]
        return not text.endswith(b"\n") and begun.startswith(text[: len(begun)])

    def _write(self, line: bytes) -> int:
        with self._named():
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        return offset

    def _sync(self) -> None:
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def dump(value: Any) -> bytes:
    """A value as a line of JSON. ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def checked(value: Mapping[str, Any], header: bytes = b"") -> bytes:
    """An object as a line of JSON, with the checksum of it and of the file's first line. ValueError as for `dump`."""
    fields = dump(value)[:-2]
    return fields + _end(fields, header)


def _end(fields: bytes, header: bytes) -> bytes:
    """The end of a line, behind these of its fields: the CRC-32 of the first line and of them. A line of another file
    has another one."""
    return CHECKSUM + b'%08x"}\n' % zlib.crc32(fields, zlib.crc32(header))


def _is_whole(text: bytes, header: bytes = b"") -> bool:
    """Whether a line is as it was written, in the file of this first line."""
    fields, found, _ = text.rpartition(CHECKSUM)
    return bool(found) and text == fields + _end(fields, header)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed file survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entry(text: bytes, keys: set[str] | frozenset[str], first: bytes) -> dict[str, Any] | None:
    """The entry of a whole line, which has at least `keys`; None for another. first: the file's first line."""
    if not _is_whole(text, first):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not keys <= entry.keys():
        return None
    entry.pop("crc", None)
    return entry
