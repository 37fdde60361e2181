"""A prefilled sequence as a file: one safetensors file with its pages, tokens, settings, and a digest of everything."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.cache.page_manager import Reach, stored_pages
from kvjax.cache.spec import CacheSpec
from kvjax.cache.stores.blocks import Stored, arrays_of_rows, block_bytes
from kvjax.checks import file_path
from kvjax.known_files import KnownFile, header_of
from pallas_kernels.core.files import replacing

FORMAT, FORMER = "kvjax sequence 3", ("kvjax sequence 1", "kvjax sequence 2")
UNSIGNED = "0" * 64
"""Takes the place of the SHA-256 in the header while the file is hashed: the digest covers every byte except its
own."""
PIECE = 1 << 24
"""Bytes hashed between two interrupt points."""


def write_sequence(
    path: str | Path,
    header: dict,
    tokens: list[int],
    stored: Stored,
    interrupt_point: Callable[[], None] = lambda: None,
) -> None:
    """Write what `kvjax.cache.stores.blocks` stores of each layer group (blocks in logical order, without pages before
    a window; a row of state). It writes to a new file beside `path`, then renames it. If anything fails, none is left.

    header: what must match on loading (model, page size, dtype). Indexes are not stored, because they are a function of
    the keys. interrupt_point: called now and then, and may raise. ValueError if the folder is missing or `path` is a
    folder, OSError if the file cannot be written.
    """
    path = file_path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device or a pipe, which a saved file would replace; name a file to write")
    tensors = {"tokens": np.asarray(tokens, np.int32)} | {f"pages.{name}": blocks for name, blocks in stored.items()}
    try:
        with replacing(path) as partial:
            save_file(tensors, str(partial), metadata={"format": FORMAT, "header": json.dumps(header), "sha256": UNSIGNED})
            with open(partial, "r+b") as file:
                place = _place_in_header(file, UNSIGNED)
                digest = _digest(file, place, interrupt_point)
                file.seek(place)
                file.write(digest.encode())
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def read_sequence(
    path: str | Path, header: dict, *, spec: CacheSpec, vocab_size: int, interrupt_point: Callable[[], None]
) -> tuple[list[int], Stored, tuple[str, Reach] | None]:
    """Tokens and blocks of each layer group of `spec`, from a file that `write_sequence` wrote; and, if its pages
    outside sinks and window were given back, by which policy, and what these are.

    ValueError if the file is damaged, if its header is not `header` (the message names the field), or if tensors are
    missing, surplus, or of another shape, dtype or range than tokens and spec require.
    """
    path = file_path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    known = KnownFile.of(path)
    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") in FORMER:
                raise ValueError(f"{path} was saved by an earlier version ({metadata['format']}): prefill again and save it again")
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is not a kvjax sequence file (format {metadata.get('format')!r:.60}, expected {FORMAT!r})")
            _check_digest(known, metadata.get("sha256", ""), interrupt_point)
            made_with = _header(path, metadata)
            for name, value in header.items():
                if made_with.get(name) != value:
                    raise ValueError(f"{path} was made with {name} {made_with.get(name)!r:.60}, this engine has {value!r}; prefill again")
            names = {"tokens", *(f"pages.{group.name}" for group in spec.groups)}
            if set(file.keys()) != names:
                odd = sorted(set(file.keys()) ^ names)[0]
                groups = ", ".join(group.name for group in spec.groups)
                raise ValueError(f"{path} {'lacks' if odd in names else 'has a surplus'} tensor {odd!r}; the layer groups are {groups}")
            tokens, keeps, stored = _tokens(known, file, vocab_size), _keeps(path, made_with), {}
            for group in spec.groups:
                interrupt_point()
                count = len(stored_pages(group, len(tokens), None if keeps is None else keeps[1]))
                stored[group.name] = _tensor(known, file, f"pages.{group.name}", [count, block_bytes(spec, group.name)], "U8")
            for name in spec.state_groups:
                for number, arrays in arrays_of_rows(spec, name, stored[name]).items():
                    _check_first(path, int(arrays["first"][0]), len(tokens), spec.layers[number].page_size)
            known.check()  # the digest may be of other bytes than those that were read after it
            return tokens, stored, keeps
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable kvjax sequence file: {error}") from error


def _check_first(path: Path, first: int, length: int, page_size: int) -> None:
    """ValueError unless a state of `first` tokens ends where the open page of `length` tokens begins, or one page
    earlier."""
    opened = length // page_size * page_size
    if first not in (opened, opened - page_size) or first < 0:
        raise ValueError(f"{path} has a state of {first} tokens for {length} tokens in pages of {page_size}; prefill again")


def _header(path: Path, metadata: dict[str, str]) -> dict:
    try:
        stored = json.loads(metadata.get("header", ""))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} does not name the model that made it in its header; prefill again and save it again")
    return stored


def _keeps(path: Path, header: dict) -> tuple[str, Reach] | None:
    """The policy that gave pages back, and the sinks and window that it kept; None if the file has all pages."""
    if (keeps := header.get("keeps")) is None:
        return None
    reach = keeps.get("reach") if isinstance(keeps, dict) else None
    pair = isinstance(reach, list) and len(reach) == 2 and all(isinstance(count, int) and count >= 0 for count in reach)
    if not pair or not isinstance(keeps.get("policy"), str):
        raise ValueError(f"{path} has {keeps!r:.60} in its header, which is no policy with sinks and a window; prefill again")
    return keeps["policy"], (reach[0], reach[1])


def _tokens(known: KnownFile, file: Any, vocab_size: int) -> list[int]:
    path, shape = known.path, file.get_slice("tokens").get_shape()
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"{path} has tokens of shape {shape}, but needs a row of at least one")
    tokens = _tensor(known, file, "tokens", shape, "I32")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{path} holds token {low if low < 0 else high}, which is outside the vocabulary of {vocab_size}")
    return tokens.tolist()


def _tensor(known: KnownFile, file: Any, name: str, shape: list[int], dtype: str) -> np.ndarray:
    """A tensor of the file; ValueError if it is not of this shape and dtype (safetensors' name). Both are compared
    first."""
    path, held = known.path, file.get_slice(name)
    if held.get_shape() != shape:
        raise ValueError(f"{path} has {name} of shape {held.get_shape()}, but this engine's tokens and pages need {shape}")
    if held.get_dtype() != dtype:
        raise ValueError(f"{path} has {name} in {held.get_dtype()}, but it must be {dtype}")
    size, fields = header_of(known)
    begin, end = fields[name]["data_offsets"]
    return known.read(8 + size + begin, end - begin).view({"I32": np.int32, "U8": np.uint8}[dtype]).reshape(shape)


def _check_digest(known: KnownFile, digest: str, interrupt_point: Callable[[], None]) -> None:
    """ValueError unless the file hashes to the digest that its header gives."""
    with known.opened() as file:
        place = _place_in_header(file, digest) if len(digest) == len(UNSIGNED) else -1
        if place < 0 or _digest(file, place, interrupt_point) != digest:
            raise ValueError(f"{known.path} is damaged: its bytes are not those that were saved (SHA-256); prefill again and save it again")


def _place_in_header(file: BinaryIO, text: str) -> int:
    """The place of a text in the header of a safetensors file, or -1. The header follows 8 bytes that hold its
    length."""
    file.seek(0)
    place = file.read(int.from_bytes(file.read(8), "little")).find(text.encode())
    return -1 if place < 0 else 8 + place


def _digest(file: BinaryIO, place: int, interrupt_point: Callable[[], None]) -> str:
    """SHA-256 of a file, in hexadecimal digits, with UNSIGNED for what is at `place`."""
    file.seek(0)
    digest = hashlib.sha256(file.read(place) + UNSIGNED.encode())
    file.seek(len(UNSIGNED), os.SEEK_CUR)
    while piece := file.read(PIECE):
        interrupt_point()
        digest.update(piece)
    return digest.hexdigest()
