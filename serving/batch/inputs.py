"""The input of a job, read once: its records, and a digest of what was read, by which a later run knows it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.serving.batch.files import is_parquet, numbered
from kvjax.serving.batch.records import Defaults, Record, read

DIGEST, BYTES = "input with SHA-256", "input bytes"
"""What a job's header says of the lines that it read."""


class Reading:
    """One pass over an input.

    source: the file. earlier: how many bytes of it an earlier run read, uncompressed; None: no run did, or it does not say. offset: where
    the latest line began, in bytes. repeated: lines that are equal to an earlier one with the same id. taken: as in `records.read`.
    `described` and `earlier_digest` are right when all records were read.
    """

    def __init__(self, source: Path, earlier: int | None = None):
        self.source, self.offset = source, 0
        self.repeated: list[int] = []
        self.taken: list[int] = []
        self.earlier_digest: str | None = None
        """The digest of the earlier run's bytes; None if they are not there, or the last of their lines has become longer."""
        self._earlier, self._read, self._digest = earlier, 0, hashlib.sha256()

    def records(self, defaults: Defaults) -> Iterator[Record]:
        """The records, in order; see `records.read`."""
        return read(self._lines(), defaults, self.repeated, self.taken)

    def described(self) -> dict[str, Any]:
        """What a job's header says of the input. A Parquet file is one whole, so its rows have no bytes of their own."""
        if is_parquet(self.source):
            with open(self.source, "rb") as file:
                return {DIGEST: hashlib.file_digest(file, "sha256").hexdigest(), BYTES: None}
        return {DIGEST: self._digest.hexdigest(), BYTES: self._read}

    def _lines(self) -> Iterator[bytes | dict[str, Any]]:
        for _, offset, line in numbered(self.source):
            self.offset = offset
            if isinstance(line, bytes):
                self._add(line)
            yield line

    def _add(self, line: bytes) -> None:
        end = self._read + len(line)
        if self._earlier is not None and self._read < self._earlier <= end:
            cut = len(line) - (end - self._earlier)
            self._digest.update(line[:cut])
            # A last line without an end may have got one since; anything else would be another record.
            self.earlier_digest = None if line[cut:].strip() else self._digest.hexdigest()
            self._digest.update(line[cut:])
        else:
            self._digest.update(line)
        self._read = end
