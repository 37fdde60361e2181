"""Small files of a checkpoint's folder: whether they are there, and the JSON in them. Whatever a folder holds, errors
are ValueErrors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pallas_kernels.core.files import read_object

AGAIN = "download the model again (`hf download OWNER/NAME --local-dir FOLDER` brings every file)"

MAX_JSON_BYTES = 1 << 28
"""The largest JSON file that is read. The largest index and the largest tokenizer.json that we know have some 30 MB."""


def is_file(path: Path) -> bool:
    """Whether there is such a file. ValueError where there is something else: a folder, a pipe, a link to nothing, or
    to itself."""
    if os.path.isfile(path):
        return True
    if not os.path.lexists(path):
        return False
    what = "a folder" if path.is_dir() else "a link that leads to no file" if path.is_symlink() else "no ordinary file"
    raise ValueError(f"{path} is {what}, and must be a file; {AGAIN}")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of reading a file become ValueErrors that name it: not every OSError does, as when a disk gives nothing
    back."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or first_line(error)}); make it readable, or {AGAIN}") from error


def check_utf8(folder: Path) -> None:
    """ValueError for the path of a tokenizer's folder that is not UTF-8."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        said = f"the name of the folder {str(folder)!a} is not UTF-8, and the library for tokenizers takes no other"
        raise ValueError(f"{said}; give it another name") from None


def check_pointer(path: Path) -> None:
    """ValueError if a file is a Git LFS pointer: what `git clone` leaves where Git LFS is not installed."""
    with named(path), open(path, "rb") as file:
        beginning = file.read(64)
    if beginning.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or {AGAIN}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError, with the file's name, if it is missing, too large, damaged, or holds
    anything else."""
    if not is_file(path):
        raise ValueError(f"{path.parent} holds no {path.name}; {AGAIN}")
    try:
        with named(path):
            size = path.stat().st_size
            if size > MAX_JSON_BYTES:
                raise ValueError(f"{path} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read; {AGAIN}")
            return read_object(path, AGAIN)
    except ValueError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            check_pointer(path)
        raise


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
