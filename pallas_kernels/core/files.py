"""Files that are written whole or not at all, figures as JSON can hold them, and JSON files that may be damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pallas_kernels.core.messages import shown

MAX_DEPTH = 50
"""How deep lists and objects of a JSON file may lie inside one another: what reads them recurses."""

CHECKSUM = ',\n "crc": "'

_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a folder in which no file can be made."""


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures as JSON can hold them. NaN and infinity, which JSON does not have, become null, and `error` names
    their places."""
    places: list[str] = []

    def clean(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: clean(item, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{place}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            places.append(place)
            return None
        return value

    cleaned = clean(figures, "")
    if not places:
        return figures
    named = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return cleaned | {"error": f"not finite, so written as null: {named}"}


class LongNumber(ValueError):
    """A JSON text holds a whole number of more digits than Python reads."""


def parse_json(text: str | bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text. pairs_hook: as `object_pairs_hook` of `json.loads`. LongNumber, or another ValueError
    for what is no JSON, or RecursionError for what is nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python's message tells the author of a text how the program that reads it should be changed
        raise LongNumber(f"a number has more than {sys.get_int_max_str_digits():,} digits") from None


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. ValueError, with the file's name and the remedy, if it is damaged or holds anything
    else."""
    deep = ValueError(f"{file} holds lists or objects more than {MAX_DEPTH} deep inside one another; {remedy}")
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise deep from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}; {remedy}")
    if _is_deep(content):
        raise deep
    return content


def read_list[T](file: Path, field: str, make: Callable[[Any], T], remedy: str) -> tuple[T, ...]:
    """What `make` makes of each item of a list, which is a field of the object in a JSON file. ValueError as
    `read_object`, for another field, and for an item of which `make` raises it."""
    items, made = read_object(file, remedy).get(field), []
    if not isinstance(items, list):
        raise ValueError(f"{file} must hold a list {field!r}, got {shown(items)}; {remedy}")
    for number, item in enumerate(items):
        try:
            made.append(make(item))
        except ValueError as error:
            said = str(error).encode(errors="backslashreplace").decode()  # what was read may hold half of a surrogate pair
            raise ValueError(f"{file}: {field}[{number}]: {said}; {remedy}") from None
    return tuple(made)


def sealed(content: dict[str, Any]) -> str:
    """An object that has fields as JSON text, for `check_sealed`: its last field is a CRC-32 of all that stands before.
    It finds damage, and no forger."""
    return _sealed(json.dumps(content, indent=1)[:-2])


def _sealed(fields: str) -> str:
    return f'{fields}{CHECKSUM}{zlib.crc32(fields.encode()):08x}"\n}}\n'


def check_sealed(file: Path, remedy: str) -> None:
    """ValueError, with the file's name and the remedy, unless it holds what `sealed` made, unchanged."""
    content = file.read_bytes()  # reading text would take other ends of lines for the same
    fields, found, _ = content.rpartition(CHECKSUM.encode())
    if not found:
        raise ValueError(f"{file} has no checksum, so it is damaged or of an earlier version of kvjax; {remedy}")
    if content != _sealed(fields.decode(errors="replace")).encode():
        raise ValueError(f"{file} is damaged or was edited: its checksum is of other content; {remedy}")


def _is_deep(content: Any) -> bool:
    """Whether lists and objects lie more than `MAX_DEPTH` deep inside one another. It does not recurse."""
    layer = [content]
    for _ in range(MAX_DEPTH):
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, dict) else each) if isinstance(inner, dict | list)]
        if not layer:
            return False
    return True


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """A new file beside `path`, of a hidden name that no other file has, to write to in the block.

    At the end of the block it is renamed to `path`. If the block fails, for example on a full disk, it is removed. A
    link is followed. overwrite: whether to replace a file that is there at the end of the block; False:
    FileExistsError, and that file stays.

    Raises ValueError if `path` exists and is not a file, for example a device or a folder: it would be replaced by one;
    and if its folder takes no new file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} exists and is not a file; name another file to write to")
    partial = None
    try:
        try:
            partial = _new_file(path.parent)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise OSError(error.errno, error.strerror, str(path)) from error
            said = f"{path} cannot be written: no file can be made in {path.parent} ({error.strerror})"
            raise ValueError(f"{said}; name a file in another folder") from error
        yield partial
        if overwrite:
            os.replace(partial, path)
        else:
            _rename_to_new(partial, path)
    except BaseException as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        # Errors of open files do not name the file, and nobody knows the hidden name.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _new_file(folder: Path) -> Path:
    """An empty file that did not exist, with the permissions that `open` gives. `tempfile` would let only its owner
    read it."""
    while True:
        path = folder / f".kvjax-{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return path


def _rename_to_new(partial: Path, path: Path) -> None:
    """Rename a file. FileExistsError, and nothing changes, if there is a `path`."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # some file systems have no links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(partial, path)
    else:
        partial.unlink()


def own_folder(folder: Path) -> Path:
    """The folder, which is made if it is missing. ValueError unless it belongs to this user, who alone may read and
    write it. Missing parents are made for this user alone, too: one may be an own folder itself."""
    for each in reversed([folder, *(parent for parent in folder.parents if not parent.exists())]):
        each.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(f"{folder} must be a folder of this user alone (chmod 700)")
    return folder


def check_writable(path: Path) -> None:
    """Raise what `write_result` would, as far as it can be known before: ValueError for a path that is no file or lies
    in no folder, and OSError for a folder that may not be written to."""
    if not path.name:
        raise ValueError(f"{str(path)!r} is not the name of a file")
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"{path} exists and is not a file; name another file to write to")
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file, so {path} cannot be written; name a file in a folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"the folder {folder} cannot be written to; name a file in another one")
