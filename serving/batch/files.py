"""Files of a batch job: JSON lines, which gzip may have compressed, or Parquet by the suffix `.parquet`.

A row of a Parquet input is a record whose fields are the columns; null means that a field is left out. A Parquet output
has the columns of `COLUMNS`. It needs the extra `ray`, which brings pyarrow.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvjax.serving.batch.journal import dump
from kvjax.serving.batch.records import DamagedRow, Defaults, Record, read
from kvjax.serving.batch.results import error_of
from pallas_kernels.core.optional import needs_extras

COLUMNS = {
    **dict.fromkeys(("id", "text", "finish_reason"), "string"),
    **dict.fromkeys(("prompt_tokens", "generated_tokens"), "int64"),
    **dict.fromkeys(("blocks_per_step", "keys_per_step"), "float64"),
    **dict.fromkeys(("error", "answer"), "string"),
}
"""The columns of a Parquet output, and their types. `answer` is the line that a JSONL output would have. `id` is text,
of numbers, too. The others are fields of that line, null where it does not have them; `error` is the message."""

ROWS = 1024
"""Rows that are read or written at a time."""

MAX_LINE_BYTES = 1 << 27
"""The longest line of an input that is read as a record, uncompressed. 16 million token ids of seven
digits have room."""
PIECE = 1 << 20
"""Bytes of a longer line that are in memory at a time."""


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return path.suffix.lower() == ".parquet"


GZIP = b"\x1f\x8b"
OTHERS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet, whose name must end in .parquet",
    b"\xff\xfe\0\0": "UTF-32 text",
    b"\0\0\xfe\xff": "UTF-32 text",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""The beginnings of files that hold no lines of UTF-8, and what they are."""
BEGINNING = 512
TAR = 257, b"ustar"
"""Where the mark of a tar file is, and the mark."""


def is_gzip(path: Path) -> bool:
    """Whether an input is compressed by gzip, by its beginning, whatever its name is."""
    with open(path, "rb") as file:
        return file.read(len(GZIP)) == GZIP


def check_form(path: Path) -> None:
    """ValueError if an input is neither lines, nor compressed by gzip, nor Parquet, as far as its beginning and its
    name tell."""
    if is_parquet(path):
        return
    packed = is_gzip(path)
    with gzip.open(path) if packed else open(path, "rb") as file, _whole_gzip(path):
        form = _form(file.read(BEGINNING))
    if form is not None:
        form = f"{form.partition(',')[0]} inside gzip" if packed else form
        raise ValueError(f"{path} is {form}; give its lines as UTF-8 text, or compressed by gzip")
    if path.suffix.lower() == ".gz" and not packed:
        raise ValueError(f"{path} is not compressed by gzip, though its name ends in .gz")


def _form(begin: bytes) -> str | None:
    """What a file or the content of a gzip file is, by its beginning; None if it may be lines of UTF-8."""
    form = next((name for mark, name in {**OTHERS, GZIP: "gzip"}.items() if begin.startswith(mark)), None)
    if form is not None:
        return form
    if begin.startswith(TAR[1], TAR[0]):
        return "tar"
    first = begin[:64]
    if first.count(0) * 3 < len(first) or not first:  # a line that is damaged is an error of its own
        return None
    # JSON begins with a character of ASCII, and mostly goes on with others.
    zeros = tuple(not byte for byte in first[:4])
    wide = {(False, True, True, True): 32, (True, True, True, False): 32, (False, True, False, True): 16, (True, False, True, False): 16}
    return f"UTF-{wide[zeros]} text" if zeros in wide else "binary data, with NUL bytes"


@contextlib.contextmanager
def _whole_gzip(path: Path) -> Iterator[None]:
    """An error of gzip names the file and what is wrong with it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: gzip cannot read it to its end ({error})") from None


@contextlib.contextmanager
def _whole_parquet(path: Path) -> Iterator[None]:
    """An error of pyarrow names the file. Of damaged ones most are an OSError without one."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:  # the second of names of columns
        if getattr(error, "errno", None) is not None:  # the system's
            raise
        raise ValueError(f"{path} is damaged, or of a kind that pyarrow cannot read: {' '.join(str(error).split())}") from None


def check_extras(*paths: Path) -> None:
    """MissingExtra if one of these files is Parquet, and pyarrow is not installed."""
    if any(map(is_parquet, paths)):
        needs_extras("a Parquet file", "ray")


def numbered(
    path: Path, first: int = 1, offset: int = 0, seen: Callable[[bytes], object] = bool
) -> Iterator[tuple[int, int, bytes | dict[str, Any]]]:
    """(number, offset, line) of every line from the one numbered `first`, which begins at byte `offset` of the
    uncompressed text.

    Rows of a Parquet file are objects, without their nulls, and have offset 0. Few lines are in memory at a time. Of
    one longer than `MAX_LINE_BYTES` only a part is: it is a `DamagedRow`. seen: gets all bytes of lines, in order,
    those of a line before the line. ValueError for a file that is damaged.
    """
    if is_parquet(path):
        yield from ((number, 0, row) for number, row in _rows(path, first))
        return
    with gzip.open(path) if is_gzip(path) else open(path, "rb") as file, _whole_gzip(path):
        file.seek(offset)
        for number, (length, line) in enumerate(_bounded(file, seen), first):
            yield number, offset, line
            offset += length


def _bounded(file: IO[bytes], seen: Callable[[bytes], object]) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(length, line) of every line, as `numbered` gives them."""
    while line := file.readline(MAX_LINE_BYTES):
        seen(line)
        length, piece = len(line), line
        while length >= MAX_LINE_BYTES and not piece.endswith(b"\n") and (piece := file.readline(PIECE)):
            seen(piece)
            length += len(piece)
            line = DamagedRow({}, "")
        if isinstance(line, DamagedRow):
            line.problem = f"the line has {length:,} bytes, and at most {MAX_LINE_BYTES:,} are read"
        yield length, line


def _rows(path: Path, first: int, seen: Callable[[str], object] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows. Row groups before the row `first` are not read.

    seen: gets the SHA-256 of the whole file, in hexadecimal, before the first row is read and after the last.
    """
    import pyarrow
    from pyarrow import parquet

    with _whole_parquet(path), pyarrow.OSFile(str(path)) as opened:  # it stays the same file, whatever gets its name
        if seen is not None:
            seen(_sha256(opened))
        try:
            file = parquet.ParquetFile(opened, page_checksum_verification=True)  # of files that have checksums
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file ({error})") from None
        name, count = next(iter(Counter(file.schema_arrow.names).most_common(1)), ("", 0))
        if count > 1:  # nobody knows which was meant
            raise ValueError(f"{path} has {count} columns named {name!r:.80}: leave one of them")
        number, groups = 1, list(range(file.num_row_groups))
        while groups and number + (rows := file.metadata.row_group(groups[0]).num_rows) <= first:
            number += rows
            del groups[0]
        for batch in file.iter_batches(ROWS, row_groups=groups):
            later = batch.slice(max(0, first - number))
            number += batch.num_rows
            yield from zip(range(number - later.num_rows, number), _objects(later), strict=True)
        if seen is not None:
            seen(_sha256(opened))


def _sha256(file: Any) -> str:
    """The digest of an open file from its beginning."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _objects(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch of pyarrow, without their nulls. A value that Python cannot hold damages its row alone."""
    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except Exception:  # text that is not UTF-8, a time beyond Python's years: found row by row
        return [_object(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _object(row: Any) -> dict[str, Any]:
    found, problem = {}, None
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            found[name] = column[0].as_py()
        except Exception as error:
            problem = f"column {name!r:.80} cannot be read: {error!s:.200}"
    fields = _without_nulls(found)
    return fields if problem is None else DamagedRow(fields, problem)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def write_outputs(file: IO[bytes], outputs: Iterable[dict[str, Any]], out: Path) -> None:
    """Write output lines to an empty file, in the form that the name `out` asks for. Few are in memory at a time."""
    if out.suffix.lower() == ".gz":
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # equal outputs are equal files
            packed.writelines(map(dump, outputs))
        return
    if not is_parquet(out):
        file.writelines(map(dump, outputs))
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema(list(COLUMNS.items()))
    with ParquetWriter(file, schema) as writer:
        for some in itertools.batched(outputs, ROWS):
            writer.write_table(pyarrow.Table.from_pylist([_row(output) for output in some], schema))


def _row(output: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(output, ensure_ascii=False, allow_nan=False)
    name = output.get("custom_id", output["id"])
    return {**output, "id": None if name is None else str(name), "error": error_of(output), "answer": text}


DIGEST, BYTES = "input with SHA-256", "input bytes"
"""What a job's header says of the lines that it read."""


class Reading:
    """One pass over an input.

    source: the file. earlier: how many bytes of it an earlier run read, uncompressed; None: no run did, or it does not
    say. offset, line: where the latest line began, in bytes, and what it is. repeated: lines that are equal to an
    earlier one with the same id. taken: as in `records.read`. `described` and `earlier_digest` are right when all
    records were read: they are of what was read then, whatever the file is now.
    """

    def __init__(self, source: Path, earlier: int | None = None):
        self.source, self.offset = source, 0
        self.line: bytes | dict[str, Any] = b""
        self.repeated: list[int] = []
        self.taken: list[int] = []
        self.earlier_digest: str | None = None
        """The digest of the earlier run's bytes; None if they are not there, or the last of their lines has become
        longer."""
        self._earlier, self._read, self._digest = earlier, 0, hashlib.sha256()
        self._whole: str | None = None

    def records(self, defaults: Defaults) -> Iterator[Record]:
        """The records, in order; see `records.read`."""
        return read(self._lines(), defaults, self.repeated, self.taken)

    def described(self) -> dict[str, Any]:
        """What a job's header says of the input. A Parquet file is one whole, so its rows have no bytes of their
        own."""
        if is_parquet(self.source):
            return {DIGEST: self._whole, BYTES: None}
        return {DIGEST: self._digest.hexdigest(), BYTES: self._read}

    def _lines(self) -> Iterator[bytes | dict[str, Any]]:
        if is_parquet(self.source):
            found = ((0, row) for _, row in _rows(self.source, 1, self._is))
        else:
            found = ((offset, line) for _, offset, line in numbered(self.source, seen=self._add))
        for self.offset, self.line in found:
            yield self.line

    def _is(self, digest: str) -> None:
        """Take note of what a Parquet file is. ValueError if it has become another one while it was read."""
        if self._whole not in (None, digest):
            raise ValueError(f"{self.source} has changed while it was read: run again when it is complete. Nothing was run")
        self._whole = digest

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
