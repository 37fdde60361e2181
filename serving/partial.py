"""The file that holds a job's results until all are there.

Its first line says which job it belongs to; every other line is one result with the number of its input line, appended as it
completes. A job that is killed leaves it behind; at most its last line is torn, and that line is dropped when the job is run again. At the
end the results are written in input order to a third file, which is renamed to the output.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvjax.serving.results import Result

FORMAT = "kvjax batch 1"
SYNC_SECONDS = 1.0
"""A killed process loses nothing that was written; a machine that loses power loses at most the results of this many seconds."""


class Partial:
    """The results of one job so far. job: what must agree for a later run to go on with them; any JSON values.

    Raises ValueError where another job left the file, or something that is no such file, and BlockingIOError where a running job holds it.
    """

    def __init__(self, path: Path, job: Mapping[str, Any]):
        self.path = path
        self.earlier: dict[int, Result] = {}
        """Results an earlier run had finished, by input line, without their outputs."""
        self._spans: dict[int, int] = {}
        self._synced = 0.0
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            self._lock()
            self._load({"format": FORMAT, **job})
        except BaseException:
            self._file.close()
            raise

    def append(self, result: Result) -> None:
        """Write one result; it survives the process from here on."""
        counts = [result.failed, result.prompt_tokens, result.generated_tokens, result.blocks_per_step, result.keys_per_step]
        self._write({"line": result.line, "counts": counts, "output": result.output})

    def finish(self, out: Path) -> None:
        """Write the outputs in input order, rename them to `out`, and remove this file."""
        self._sync()
        ordered = out.with_name(out.name + ".tmp")
        with open(ordered, "wb") as file:
            for line in sorted(self._spans):
                self._file.seek(self._spans[line])
                file.write(_dump(json.loads(self._file.readline())["output"]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(ordered, out)
        _sync_folder(out.parent)
        self.path.unlink()

    def close(self) -> None:
        """Flush and let go of the file."""
        if not self._file.closed:
            self._sync()
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{self.path} is being written by another job that is still running") from None

    def _load(self, header: Mapping[str, Any]) -> None:
        """Read what is there, cut off a torn last line, and refuse another job's results."""
        self._file.seek(0)
        whole = 0
        for number, text in enumerate(iter(self._file.readline, b""), 1):
            entry = _entry(text, {"format"} if number == 1 else {"line", "counts", "output"})
            if number == 1 and (entry is not None or not _torn_header(text)):
                self._check(entry or {}, header)
            elif entry is None:
                if self._file.read(1):
                    raise ValueError(f"{self.path}, line {number}, is damaged; delete the file to start over")
                break
            else:
                self._spans[entry["line"]] = whole
                self.earlier[entry["line"]] = Result(entry["line"], {}, *entry["counts"])
            whole += len(text)
        self._file.truncate(whole)
        if whole == 0:
            self._write(header)
            _sync_folder(self.path.parent)

    def _check(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        if found.get("format") != FORMAT:
            raise ValueError(f"{self.path} is not a partial result of a kvjax batch job; move it away, or choose another --out")
        for name, value in header.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.path} was begun with {name} {found.get(name)}, and this run has {value}: "
                    "run it as it was begun, or delete the file to start over"
                )

    def _write(self, entry: Mapping[str, Any]) -> None:
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(_dump(entry))
        self._file.flush()
        if "line" in entry:
            self._spans[entry["line"]] = offset
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _entry(text: bytes, keys: set[str]) -> dict[str, Any] | None:
    """The entry of a whole line, which has at least `keys`; None for a torn line."""
    if not text.endswith(b"\n"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and keys <= entry.keys() else None


def _torn_header(text: bytes) -> bool:
    """Whether a file that begins like this was left by a job that died while it began, and is no file of somebody else's."""
    begun = _dump({"format": FORMAT})[:-2]
    return not text.endswith(b"\n") and begun.startswith(text[: len(begun)])


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    """Make a new or renamed name survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
