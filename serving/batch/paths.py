"""Where a batch job reads and writes: checked before a model is loaded, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from kvjax.serving.batch.files import check_extras, check_form
from kvjax.serving.batch.partial import Partial

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
