"""Training text: finds files, and encodes them once. The tokens are kept in the run's folder as uint16 arrays."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".txt", ".py")
# pydoc_data holds the documentation in which needles are hidden by default, so it must stay unseen. The others are
# data, tests or packages.
STDLIB_SKIPPED = {"pydoc_data", "test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings"}


def text_files(paths: Iterable[str | Path]) -> list[Path]:
    """The .txt and .py files in `paths`, and in folders of `paths` (sorted), as absolute paths. ValueError for a path
    with none."""
    found: list[Path] = []
    for path in (Path(p).resolve() for p in paths):
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files or files[0].suffix not in SUFFIXES:
            raise ValueError(f"{path} is not a {' or '.join(SUFFIXES)} file, nor a folder that holds any")
        found += files
    return found


def python_sources() -> list[Path]:
    """The .py files of the standard library, sorted, without the folders in STDLIB_SKIPPED."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if not STDLIB_SKIPPED & set(p.relative_to(root).parts))
    return sorted(files)


def read_texts(files: Sequence[Path]) -> Iterator[str]:
    """The texts of the files one after the other, in pieces of about 100,000 characters that end at a line's end."""
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as text:
            while piece := text.readlines(100_000):
                yield "".join(piece)


def fingerprint(files: Sequence[Path]) -> dict[str, int]:
    """Names and sizes (bytes) of files. A resumed run compares them, to go on only with the same text."""
    return {str(f): os.path.getsize(f) for f in files}


def token_file(path: Path, files: Sequence[Path], tokenizer: Any) -> np.ndarray:
    """uint16[...] tokens of all files, with <|endoftext|> (0) after each. The first call writes them to `path`; all
    calls map that file."""
    if not path.exists():
        ids: list[np.ndarray] = []
        for file in files:
            pieces = tokenizer.encode_batch(list(read_texts([file])), add_special_tokens=False)
            ids += [np.asarray(p.ids, np.uint16) for p in pieces] + [np.zeros(1, np.uint16)]
        unfinished = path.with_suffix(".partial.npy")
        np.save(unfinished, np.concatenate(ids))
        unfinished.rename(path)
    return np.load(path, mmap_mode="r")
