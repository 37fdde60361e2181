"""The provenance of results: what every committed JSON file has beside its figures."""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import json
import math
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("kvjax", "jax", "jaxlib", "numpy", "transformers")


def devices_of(row: dict[str, Any]) -> int:
    """Devices of the mesh that a row was measured on; 1 in older rows."""
    return row.get("tensor", 1) * row.get("context", 1)


def mesh_text(row: dict[str, Any]) -> str:
    """What a row says of its mesh; "" on one device."""
    return "" if devices_of(row) == 1 else f", tensor {row['tensor']} context {row['context']}"


def launch_text(row: Mapping[str, Any]) -> str:
    """What a step's row says of several steps in one launch; "" for one, and in older rows."""
    return "" if row.get("steps_per_launch", 1) == 1 else f", {row['steps_per_launch']} steps per launch"


def packed_text(row: Mapping[str, Any]) -> str:
    """What a step's row says of packed weights and pages; "" if neither is packed."""
    return "".join(f", {what} {row[key]}" for what, key in (("weights", "weights"), ("pages", "cache_format")) if row.get(key))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect figures."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def device_here() -> dict[str, Any]:
    """Platform, kind and number of this process's devices. Initialises them."""
    import jax

    device = jax.local_devices()[0]
    platform_version = " ".join(device.client.platform_version.split())
    return {"platform": platform_version, "device": device.device_kind, "device_count": jax.local_device_count()}


def provenance(device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Command line, date (UTC) and versions of this process, and the device.

    device: `device_here` of the process that measured, if that was another one; None: this one's, which initialises it, and on a GPU takes
    most of the memory that is left.
    """
    told = {"command": _command(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": versions()}
    return told | dict(device_here() if device is None else device)


def _command() -> str:
    """The command line, about as typed: absolute paths are replaced by their last part."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:  # python -m
        words[:1] = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join(words)


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures as JSON can hold them. NaN and infinity, which JSON does not have, become null, and `error` names their places."""
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


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """A new file beside `path`, of a hidden name that no other file has, to write to in the block.

    At the end of the block it is renamed to `path`. If the block fails, for example on a full disk, it is removed. A link is followed.
    overwrite: whether to replace a file that is there at the end of the block; False: FileExistsError, and that file stays.

    Raises ValueError if `path` exists and is not a file, for example a device or a folder: it would be replaced by one.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} exists and is not a file; name another file to write to")
    partial = None
    try:
        partial = _new_file(path.parent)
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
    """An empty file that did not exist, with the permissions that `open` gives. `tempfile` would let only its owner read it."""
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


def check_writable(path: Path) -> None:
    """Raise what `write_result` would, as far as it can be known before: ValueError for a path that is no file or lies in no folder, and
    OSError for a folder that may not be written to."""
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


def write_result(path: Path, figures: dict) -> None:
    """Write figures and provenance as JSON, to a file beside `path` that is then renamed. figures: with "provenance", if it is not that of
    this process. See `finite` for figures that are not finite."""
    told = figures if "provenance" in figures else {"provenance": provenance(), **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(finite(told), indent=1, allow_nan=False) + "\n", encoding="utf-8")
