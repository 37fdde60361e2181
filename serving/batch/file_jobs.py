"""The files of a job: what is checked and read before a model is loaded, and how answers become an output."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvjax.engine.call_lock import interrupts
from kvjax.engine.capacity import MAX_POSITIONS
from kvjax.engine.sampling import Sampling
from kvjax.serving.batch.files import BYTES, Reading, check_extras, check_form
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.records import Defaults, Record
from kvjax.serving.batch.results import Result, Summary
from kvjax.serving.batch.resume import check_noise, check_same, check_setup, draws
from kvjax.serving.progress import JobProgress, Work

if TYPE_CHECKING:
    from kvjax.serving.batch.setup import Setup


class FileJob:
    """A job from one file to another. Making it checks the paths, and whether an earlier run may go on as `setup` says.

    `records` reads the input. Then work has about how many tokens each record takes, by its line, and ignored how many
    records gave each field that changes nothing. ValueError and BlockingIOError if the job cannot be done; nothing was
    changed then.

    Args:
        source, out: the input, and the output.
        defaults: settings for records that do not name them.
        overwrite: whether `out` may exist.
        anyway: whether an earlier run may go on with another number of slots.
        setup: of the engine that will be made; None: there is one already.
    """

    def __init__(
        self,
        source: Path,
        out: Path,
        defaults: Defaults,
        *,
        overwrite: bool = False,
        anyway: bool = False,
        setup: Setup | None = None,
    ):
        check_paths(source, out, overwrite)
        self.source, self.out, self.defaults, self.anyway = source, out, defaults, anyway
        self.overwrite = overwrite
        self.partial = partial_path(out)
        self._earlier = Partial.earlier_run(self.partial)
        header = {} if self._earlier is None else self._earlier.header
        if self._earlier is not None and setup is not None:
            check_setup(self.partial, header, setup, defaults, anyway=anyway)
        before = header.get(BYTES)
        self.reading = Reading(source, before if isinstance(before, int) else None)
        self.work: dict[int, Work] = {}
        self.ignored: Counter[str] = Counter()

    def records(self) -> Iterator[Record]:
        """The records of the input, in order. When all were read: ValueError if there is none, if an earlier run read
        other lines, or if an earlier version of kvjax left records that draw."""
        drawn = []
        for record in self.reading.records(self.defaults):
            self.work[record.line] = work_of(record)
            self.ignored.update(record.ignored)
            if draws(record):
                drawn.append(record.line)
            yield record
        if not self.work:
            raise ValueError(f"{self.source} holds no records")
        if self._earlier is not None:
            header, digest = self._earlier.header, self.reading.earlier_digest
            check_same(self.partial, header, self.reading.described(), earlier_digest=digest)
            check_noise(self.partial, header, [line for line in drawn if line not in self._earlier.lines])


def work_of(record: Record, positions: int = MAX_POSITIONS) -> Work:
    """About how many tokens a record takes: none if it is refused. positions: the most that the model has."""
    try:
        sampling = Sampling(**record.sampling) if record.error is None else None
    except (TypeError, ValueError):  # the record's answer will say it
        sampling = None
    if sampling is None or (sampling.max_new_tokens > positions and not sampling.clip):
        return Work(0, 0)
    return Work(min(record.size / 4, positions), min(sampling.max_new_tokens, positions) * sampling.n)


def complete(
    job: FileJob,
    described: Mapping[str, Any],
    answer: Callable[[Collection[int], JobProgress], Iterable[Result]],
    console: Console | None,
    **shown: Any,
) -> Summary:
    """Do what is missing of a job whose records were read, and write its output; returns the closing figures.

    Args:
        job: its files.
        described: what its answers depend on (`job.describe_job`).
        answer: the lines that an earlier run answered -> a result for each of the others, in any order. It tells the
            progress of tokens.
        console: where to show progress; None: nowhere.
        shown: arguments of `JobProgress`.
    """
    started, reading = time.monotonic(), job.reading
    header = {**described, **reading.described()}
    if not job.overwrite and os.path.lexists(job.out.resolve()):  # since the paths were checked, the model was loaded
        raise ValueError(EXISTS.format(job.out))
    partial = Partial(job.partial, header, earlier_digest=reading.earlier_digest, anyway=job.anyway, lines=job.work)
    summary = Summary(ignored=dict(job.ignored), repeated=len(reading.repeated), slots=partial.slots)
    try:
        for result in partial.earlier.values():
            summary.add(result, earlier=True)
        with JobProgress(job.work, partial.earlier, console or Console(quiet=True), **shown) as progress:
            for result in answer(partial.earlier, progress):
                with interrupts:  # an answer is written whole, and counted once
                    partial.append(result)
                    summary.add(result)
                    progress.result(result)
        partial.finish(job.out, overwrite=job.overwrite, taken=reading.taken)
    finally:
        partial.close()
    summary.seconds = time.monotonic() - started
    return summary


EXISTS = "{} exists; pass --overwrite to replace it, or choose another output"


def partial_path(out: Path) -> Path:
    """The file in which a job keeps its answers until all are complete."""
    return out.with_name(out.name + ".partial")


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """ValueError if a job cannot read `source` or may not write `out`, and BlockingIOError if another job writes it.

    It is quick, so call it before a model is loaded. It leaves nothing behind.
    """
    check_extras(source, out)
    found = _status(source)
    if found is None:
        raise ValueError(f"there is no input file {source}")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"the input {source} is {_kind(found)}, and a job that goes on reads its input again; give a file")
    if found.st_size == 0:
        raise ValueError(f"{source} is empty; it needs a record on each line")
    if not os.access(source, os.R_OK):
        raise ValueError(f"the input {source} cannot be read (permission denied)")
    check_form(source)
    _check_output(source, out, overwrite)
    Partial.earlier_run(partial_path(out))


def _check_output(source: Path, out: Path, overwrite: bool) -> None:
    if not out.name:
        said = "the output has no name" if str(out) == "." else f"the output {out} is a folder"
        raise ValueError(f"{said}; name a file to write, for example --out answers.jsonl")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} to")
    given = _status(out)
    for path in (out, partial_path(out)):
        found = _status(path)
        if path != out and path.is_symlink():  # what it leads to would stay
            raise ValueError(f"{path} is a link, and a job keeps its answers in a file of its own there; move it away")
        if found is None:
            continue
        if stat.S_ISDIR(found.st_mode):
            raise ValueError(f"{path} is a folder; name a file to write")
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is {_kind(found)}, and answers are written to files only; choose another output")
        if path.samefile(source):
            raise ValueError(f"{path} is the input; choose another output")
    if given is not None and not overwrite:
        raise ValueError(EXISTS.format(out))
    for folder in {out.parent, out.resolve().parent}:  # of the partial file, and of the output itself where `out` is a link
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"the folder {folder} cannot be written to ({error.strerror}); choose another output") from None


def _status(path: Path) -> os.stat_result | None:
    """What a path leads to; None if there is nothing. ValueError if it leads nowhere."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        said = "is a link that leads back to itself" if error.errno == errno.ELOOP else f"cannot be used ({error.strerror})"
        raise ValueError(f"{str(path)[:200]} {said}; choose another file") from None


def _kind(found: os.stat_result) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(found.st_mode)), "a device")
