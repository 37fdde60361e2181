"""Histories on disk, so that sessions outlive their server's process.

A folder has one file for each session: a line of JSON, and then its tokens as 32-bit integers. Tokens are written before the call that
brought them is answered. So a killed process loses no token that it has acknowledged. A machine that loses power may, because the file is
not synced. Keys and values are not stored: the first generation after a restart prefills the history again, with the same bits.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvjax.client.errors import ResourceExhausted

SUFFIX = ".session"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Stored:
    """One session of a folder. idle_s: seconds since it was written to."""

    id: str
    policy: str
    history: array.array
    idle_s: float


class Journal:
    """The sessions of a folder, which one process has at a time.

    model: what identifies the model (`kvjax.model.fingerprint`). ValueError if another process has the folder.
    """

    def __init__(self, folder: Path, model: str):
        self._folder, self._model = folder, model
        self._starts: dict[str, int] = {}  # where the tokens begin
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"another process has the sessions in {folder}: give each server a folder of its own") from None

    def load(self) -> Iterator[Stored]:
        """The sessions that are there. A token that a kill left half-written is dropped. ValueError for a file that is no session, or one
        of another model or version."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            content = path.read_bytes()
            line, _, tokens = content.partition(b"\n")
            try:
                header = json.loads(line)
                made_with, policy = (header["version"], header["model"]), header["policy"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} is damaged: its first line is no header of a session; delete it, or restore it") from None
            if made_with != (VERSION, self._model):
                raise ValueError(f"{path} is a session of another model, or of another version of kvjax: give another folder, or delete it")
            history = array.array("i", tokens[: len(tokens) // 4 * 4])
            if sys.byteorder == "big":
                history.byteswap()
            self._starts[path.stem] = len(line) + 1
            yield Stored(path.stem, policy, history, max(0.0, time.time() - path.stat().st_mtime))

    def create(self, session_id: str, policy: str, history: array.array) -> None:
        """Write a new session. ResourceExhausted if the disk is full."""
        line = json.dumps({"version": VERSION, "model": self._model, "policy": policy}).encode() + b"\n"
        partial = self._path(session_id).with_suffix(".partial")
        with _disk_errors():
            partial.write_bytes(line + _bytes(history))
            partial.replace(self._path(session_id))
        self._starts[session_id] = len(line)

    def extend(self, session_id: str, length: int, tokens: list[int]) -> None:
        """Write tokens after the first `length` of a session. ResourceExhausted if the disk is full; then they count as not there."""
        if not tokens:
            return
        start = self._starts[session_id] + 4 * length
        with _disk_errors():
            handle = os.open(self._path(session_id), os.O_WRONLY)
            try:
                content = _bytes(array.array("i", tokens))
                if os.pwrite(handle, content, start) < len(content):
                    os.ftruncate(handle, start)
                    raise ResourceExhausted("the disk that holds sessions is full")
            finally:
                os.close(handle)

    def end(self, session_id: str) -> None:
        """Delete a session."""
        self._starts.pop(session_id, None)
        self._path(session_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder back. Its sessions stay there."""
        os.close(self._lock)

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}{SUFFIX}"


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceExhausted(f"a session could not be written to disk: {error.strerror}") from error


def _bytes(tokens: array.array) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()
