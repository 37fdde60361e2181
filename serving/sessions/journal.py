"""Histories on disk, so that sessions outlive their server's process.

A folder has one file for each session: a line of JSON with its checksum, and then its tokens, in one record for each
call that brought some. A record is their number, a checksum of them, one of these two numbers, and the tokens, all as
32-bit integers. Checksums are CRC-32, which finds damage, and no forger: who can write to the folder can write other
histories. Each checksum goes on from the one before it, so that a record that is lost, doubled or from another file is
found, too. A record is written before its call is answered. So a killed process loses no token that it has
acknowledged, and of a call that it was writing down, the next process finds all tokens or none: the bytes of half a
record at the end are moved to a file beside it, `.torn`, and the log says so. A file that was cut looks the same. After
the last record stands an end mark, over which the next record is written, so that a file that was cut exactly at a
record's end is noticed, too. A machine that loses power may lose tokens, because the file is not synced; zeros that it
left at the end are moved away, too. Keys and values are not stored: the first generation after a restart prefills the
history again, with the same bits.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.client.errors import FailedPrecondition, ResourceExhausted

logger = logging.getLogger(__name__)

SUFFIX, TORN, PARTIAL = ".session", ".torn", ".partial"
ID = re.compile("[0-9a-f]{32}")
"""The ids that the server makes. A folder may hold other programs' files, such as the `.partial` of a batch job."""
VERSION, FORMER = 5, 3
NUMBERS = struct.Struct("<II")
"""Of a record: the number of its tokens, and their checksum."""
HEAD = struct.Struct("<III")
"""These numbers, and the checksum of them. Without that, a damaged number that is too large would look like a record
that a kill left half-written. An end mark is one of no tokens, with the checksum of all that stands before."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One session of a folder. policy: the name of its policy. written: when its file was written to last, by the file
    system's clock. It says which session is older, and no more: that clock may jump."""

    id: str
    policy: str
    history: array.array
    written: float


class Journal:
    """The sessions of a folder, which one process has at a time.

    model: what identifies the model (`kvjax.model.identity.fingerprint`). ValueError if another process has the folder.
    """

    def __init__(self, folder: Path, model: str):
        self._folder, self._model = folder, model
        self._ends: dict[str, tuple[int, int]] = {}  # where the next record goes, and the checksum so far
        self._left: set[str] = set()  # sessions that have ended, whose files could not be deleted
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)  # who can list it knows the sessions' ids, and can read what was said
        except OSError as error:
            raise ValueError(f"{folder} cannot be a folder of sessions ({error.strerror}); name another one") from None
        try:
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"{folder / 'lock'} cannot be opened: {error.strerror}; delete it, or give another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"another process has the sessions in {folder}: give each server a folder of its own") from None

    def load(self) -> Iterator[Stored]:
        """The sessions that are there. A record that a kill left half-written is moved to a file of its own; a file
        that was cut is logged. ValueError, which names the file, for one that is no session or is damaged, and for one
        of another model or version."""
        for path in self._folder.glob(f"*{PARTIAL}"):  # of a session whose caller was not told of it
            try:
                if ID.fullmatch(path.stem) and stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
            except OSError as error:
                raise ValueError(f"{path} cannot be deleted: {error.strerror}; delete it, or give another folder") from None
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would be waited for, and what a link leads to written to
                    raise ValueError(f"{path} cannot be read: it is a link, a pipe or a folder; delete it, or restore it")
                content = path.read_bytes()
            except (OSError, MemoryError) as error:
                said = "it is larger than memory" if isinstance(error, MemoryError) else error.strerror
                raise ValueError(f"{path} cannot be read: {said}; delete it, or restore it") from None
            policy, start, checksum = self._header(content, path)
            history, end, checksum = _records(content, start, checksum, path)
            self._ends[path.stem] = end, checksum
            if content[end:] != _end_mark(checksum):
                _mend(path, content, end, checksum, len(history))
            yield Stored(path.stem, policy, history, path.stat().st_mtime)

    def create(self, session_id: str, policy: str, history: array.array) -> None:
        """Write a new session. ResourceExhausted if the disk is full."""
        line = _line({"version": VERSION, "id": session_id, "model": self._model, "policy": policy})
        record, checksum = _record(history, zlib.crc32(line))
        partial = self._path(session_id).with_suffix(PARTIAL)
        with _disk_errors():
            content = line + record
            try:
                partial.write_bytes(content + _end_mark(checksum))
                partial.replace(self._path(session_id))
            except OSError:  # what was written takes room that others need
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise
        self._ends[session_id] = len(content), checksum

    def extend(self, session_id: str, tokens: Sequence[int]) -> None:
        """Write tokens after those of a session. ResourceExhausted if the disk is full, FailedPrecondition if the file
        does not end as it was left; then they count as not there."""
        if not tokens:
            return
        start, former = self._ends[session_id]
        record, checksum = _record(array.array("i", tokens), former)
        content, written = record + _end_mark(checksum), 0
        with _disk_errors():
            try:
                handle = os.open(self._path(session_id), os.O_RDWR | os.O_NOFOLLOW)
            except (FileNotFoundError, IsADirectoryError):
                raise _changed(session_id) from None
            try:
                if os.pread(handle, HEAD.size + 1, start) != _end_mark(former):
                    raise _changed(session_id)
                try:
                    while written < len(content):  # one call writes at most 2 GiB
                        written += os.pwrite(handle, content[written:], start + written)
                except OSError:
                    os.ftruncate(handle, start + HEAD.size)
                    os.pwrite(handle, _end_mark(former), start)
                    raise
            finally:
                os.close(handle)
        self._ends[session_id] = start + len(record), checksum

    def end(self, session_id: str) -> None:
        """Delete a session. Where the disk does not allow that, it is tried again when others end."""
        self._ends.pop(session_id, None)
        self._left.add(session_id)
        for each in tuple(self._left):
            try:
                self._path(each).with_suffix(TORN).unlink(missing_ok=True)
                self._path(each).unlink(missing_ok=True)
                self._left.discard(each)
            except OSError as error:
                if each == session_id:
                    said = "unless it can be deleted later, the session is back after a restart"
                    logger.error("%s could not be deleted: %s; %s", self._path(each), error.strerror, said)

    def close(self) -> None:
        """Give the folder back. Its sessions stay there. Does nothing the second time."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _header(self, content: bytes, path: Path) -> tuple[str, int, int]:
        """The policy that a file's first line names, where its records begin, and the checksum so far."""
        line, newline, _ = content.partition(b"\n")
        text, _, given = line.rpartition(b" ")
        try:
            if given != b"%08x" % zlib.crc32(text) or not newline:
                raise ValueError("another checksum")
            header = json.loads(text)
            made_with, session_id, policy = (header["version"], header["model"]), header["id"], header["policy"]
        except (ValueError, KeyError, TypeError, RecursionError):
            if line.startswith(b'{"version": %d,' % FORMER) and newline:
                said = f"is a session of an earlier version of kvjax, whose first line had no checksum ({FORMER}): delete it"
                raise ValueError(f"{path} {said}, or give another folder") from None
            raise ValueError(f"{path} is damaged: its first line is no header of a session; delete it, or restore it") from None
        if made_with != (VERSION, self._model):
            raise ValueError(f"{path} is a session of another model, or of another version of kvjax: give another folder, or delete it")
        if session_id != path.stem:
            raise ValueError(f"{path} is the file of session {session_id!s:.40}: give it that name again, or delete it")
        return policy, len(line) + 1, zlib.crc32(line + newline)

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}{SUFFIX}"


def _mend(path: Path, content: bytes, end: int, checksum: int, tokens: int) -> None:
    """Write the end mark after the last whole record of a session's file, and move what stands there to a file beside
    it. checksum: of all before. tokens: of the whole records."""
    torn, mark, rest = path.with_suffix(TORN), _end_mark(checksum), content[end:]
    rest = b"" if mark.startswith(rest) else rest.removeprefix(mark)
    try:
        if rest:
            with open(os.open(torn, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "wb") as kept:
                kept.write(rest)
        with path.open("r+b") as file:
            file.seek(end)
            file.write(mark)
            file.truncate()
    except OSError as error:
        raise ValueError(f"{path} ends in half a record, and cannot be mended with {torn.name}: {error.strerror}") from None
    if not rest:
        said = "session %s: its file has no end mark, so it was cut; its history has the %d tokens that are left"
        logger.warning(said, path.stem[:8], tokens)
        return
    what = "half a record, as after a kill" if rest.strip(b"\0") else "zeros, as after a loss of power"
    said = f"session %s: its file ends in {what}; its history has the %d tokens before, and the %d bytes are in %s"
    logger.warning(said, path.stem[:8], tokens, len(rest), torn)


def _changed(session_id: str) -> FailedPrecondition:
    said = "was changed by another program, so nothing is added to it: restore it, or close the session"
    return FailedPrecondition(f"the file of session {session_id[:8]} {said}")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceExhausted(f"a session could not be written to disk: {error.strerror}") from error


def _line(header: dict[str, object]) -> bytes:
    """The first line of a file: its header, and the header's checksum."""
    text = json.dumps(header).encode()
    return b"%b %08x\n" % (text, zlib.crc32(text))


def _record(tokens: array.array, checksum: int) -> tuple[bytes, int]:
    """What is written of the tokens of one call, nothing for none; and the checksum so far. checksum: of what stands
    before."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    content = tokens.tobytes()
    if not content:
        return b"", checksum
    checksum = zlib.crc32(content, checksum)
    numbers = NUMBERS.pack(len(tokens), checksum)
    return HEAD.pack(*NUMBERS.unpack(numbers), zlib.crc32(numbers)) + content, checksum


def _end_mark(checksum: int) -> bytes:
    """What stands after the last record. checksum: of all before."""
    numbers = NUMBERS.pack(0, checksum)
    return numbers + struct.pack("<I", zlib.crc32(numbers))


def _records(content: bytes, at: int, checksum: int, path: Path) -> tuple[array.array, int, int]:
    """The tokens of all whole records from a place of a file on, where these end, and the checksum there. checksum: of
    what stands before. ValueError for a checksum that is wrong.

    What follows the last of them is an end mark, alone or before zeros; nothing, or half a record, also where a kill
    came while the next record was written over the end mark; or zeros.
    """
    history = array.array("i")
    while len(content) - at >= HEAD.size:
        count, given, head_checksum = HEAD.unpack_from(content, at)
        start, end = at + HEAD.size, at + HEAD.size + 4 * count
        good = count > 0 and zlib.crc32(content[at : at + NUMBERS.size]) == head_checksum
        if (good and end > len(content)) or (not good and len(content) == start):
            break
        if not count and not content[at:].removeprefix(_end_mark(checksum)).strip(b"\0"):
            break
        tokens = content[start:end]
        if not good or zlib.crc32(tokens, checksum) != given:
            raise ValueError(f"{path} is damaged: tokens after the first {len(history)} are not those written; delete it, or restore it")
        history.frombytes(tokens)
        at, checksum = end, given
    if sys.byteorder == "big":
        history.byteswap()
    return history, at, checksum
