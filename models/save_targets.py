"""Where a model may be saved: checked before anything is loaded or written, and nothing is left behind.

Only a folder that holds a model and nothing else is ever replaced.
"""

from __future__ import annotations

import os
import stat
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from kvjax.checks import file_path
from kvjax.models.checkpoint import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES
from kvjax.text.checkpoint_files import read_json

WEIGHTS = "model*.safetensors"

MODEL_FILES = (
    *CONFIG_FILES,
    *WEIGHT_FILES,
    *TOKENIZER_FILES,
    "*.index.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
    "LICENSE*",
    ".gitattributes",
)
"""Names of the files of a model's folder. A folder with any other file is not replaced."""

TEMPLATES = "additional_chat_templates"
"""The one subfolder that a tokenizer writes, for a model with several chat templates (*.jinja)."""

NAME_BEGINS = 50
"""Characters of the folder's name in the name of the hidden one beside it, so that any name that a folder can have
leaves room."""

LONGER = 100
"""Bytes that the paths of the files are longer than that of the folder, at most."""

_ELSEWHERE = "choose another folder"


def check_target(folder: object, overwrite: object) -> Path:
    """The absolute path of the folder that `save(folder)` writes, with links followed.

    ValueError, with the path as it was given, if `save` cannot write there or may not replace what is there. Missing
    parents are no error: `save` makes them. It is quick, so call it before a model is loaded. It leaves nothing behind.
    """
    if not isinstance(overwrite, bool):
        raise ValueError(f"overwrite must be True or False, got {overwrite!r:.60}")
    given = file_path(folder, "folder")
    shown = str(given) if len(str(given)) <= 200 else f"{str(given)[:200]}..."
    try:
        path = _followed(given, shown)
        if path == path.parent:
            raise ValueError(f"{shown} is the root of the file system; {_ELSEWHERE}")
        _check_names(path, shown)
        _check_place(path, shown)
        if path.exists():
            _check_replaceable(path, shown, overwrite)
        _check_writable(path, shown)
    except OSError as error:
        raise ValueError(f"{shown} cannot be used ({error.strerror}); {_ELSEWHERE}") from None
    return path


def hidden_beside(folder: Path, kind: str = "") -> Path:
    """A new hidden folder beside `folder`."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name[:NAME_BEGINS]}.{kind}", dir=folder.parent))


def _followed(given: Path, shown: str) -> Path:
    """The path with links followed. ValueError for a link, on the way or at the end, that leads nowhere."""
    try:
        absolute = given.absolute()
    except FileNotFoundError:
        raise ValueError(f"{shown} is in the current folder, which is deleted; change to another folder") from None
    for each in (absolute, *absolute.parents):
        if os.path.islink(each) and not os.path.exists(each):
            raise ValueError(f"{shown} cannot be used: {each} is a link that leads to nothing; remove the link, or {_ELSEWHERE}")
    return Path(os.path.realpath(absolute))


def _existing_parent(path: Path) -> Path:
    return next(each for each in path.parents if os.path.lexists(each))


def _check_names(path: Path, shown: str) -> None:
    """ValueError for names that no folder can have. The system itself says nothing of names below a folder that is
    missing."""
    longest, whole = (os.pathconf(_existing_parent(path), name) for name in ("PC_NAME_MAX", "PC_PATH_MAX"))
    if len(os.fsencode(path)) + LONGER > whole:
        raise ValueError(f"the path {shown} is too long: with the names of the files it may have {whole} bytes; choose a shorter one")
    for part in path.parts:
        if len(os.fsencode(part)) > longest:
            raise ValueError(f"{shown} holds a name of {len(os.fsencode(part))} bytes, and {longest} is the most; choose a shorter one")


def _check_place(path: Path, shown: str) -> None:
    """ValueError for what is no folder, and for folders that cannot be moved away."""
    if path.exists() and not path.is_dir():
        what = "a file" if path.is_file() else "a pipe, a socket or a device"
        raise ValueError(f"{shown} is {what}, and a model is written to a folder; {_ELSEWHERE}")
    if path == _current():
        raise ValueError(f"{shown} is the current folder, which a save would replace; {_ELSEWHERE}, or save from another one")
    if os.path.ismount(path):
        raise ValueError(f"{shown} is a mount point, which cannot be replaced; choose a folder inside it")
    parent = _existing_parent(path)
    if not parent.is_dir():
        raise ValueError(f"{shown} cannot be made: {parent} is not a folder; {_ELSEWHERE}")


def _current() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it is deleted
        return None


def _check_replaceable(path: Path, shown: str, overwrite: bool) -> None:
    """ValueError unless the folder is empty, or holds a model and nothing else and may be replaced."""
    entries = sorted(path.iterdir())
    if not entries:
        return
    if not any(each.name == "config.json" and each.is_file() for each in entries):
        raise ValueError(f"{shown} is not empty and holds no config.json, so it is not a model to replace; {_ELSEWHERE}")
    try:
        kind = read_json(path / "config.json").get("model_type")
    except ValueError:
        raise ValueError(f"{shown} is not empty, and its config.json cannot be read as a JSON object; {_ELSEWHERE}") from None
    if not isinstance(kind, str) or not kind:
        said = f"model_type is {kind!r:.60}, and must be text"
        raise ValueError(f"{shown} is not empty, and its config.json is not that of a model ({said}); {_ELSEWHERE}")
    if not any(fnmatchcase(each.name, WEIGHTS) and each.is_file() for each in entries):
        raise ValueError(f"{shown} is not empty and holds no {WEIGHTS}, so it is not a model to replace; {_ELSEWHERE}")
    for each in entries:
        if not _is_of_a_model(each):
            what = f"the folder {each.name}" if each.is_dir() else each.name
            raise ValueError(f"{shown} holds {what}, which no save writes, and which would be deleted; {_ELSEWHERE}, or move them away")
    if not overwrite:
        raise ValueError(f"{shown} exists already; {_ELSEWHERE}, or replace the model there (overwrite=True, or --overwrite)")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"the files in {shown} cannot be replaced (permission denied); make the folder writable, or {_ELSEWHERE}")


def _is_of_a_model(entry: Path) -> bool:
    if entry.name == TEMPLATES and entry.is_dir() and not entry.is_symlink():
        return all(each.suffix == ".jinja" and each.is_file() for each in entry.iterdir())
    return entry.is_file() and any(fnmatchcase(entry.name, pattern) for pattern in MODEL_FILES)


def _check_writable(path: Path, shown: str) -> None:
    """ValueError unless a folder can be made beside `path`, or in the nearest parent that exists: tried, because modes
    do not tell all."""
    parent = _existing_parent(path)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".kvjax.", dir=parent))
    except OSError as error:
        raise ValueError(f"{shown} cannot be made: the folder {parent} cannot be written to ({error.strerror}); {_ELSEWHERE}") from None
    if path.is_dir() and stat.S_ISVTX & os.stat(parent).st_mode and os.geteuid() not in (0, path.stat().st_uid, os.stat(parent).st_uid):
        raise ValueError(f"{shown} belongs to another user, and cannot be replaced in {parent}; {_ELSEWHERE}")
