"""A prefilled sequence as a file: one safetensors file with its pages, its tokens and what it was made with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

FORMAT = "kvjax sequence 1"


def write_sequence(path: str | Path, header: dict, tokens: list[int], layers: list[tuple[jax.Array, jax.Array]]) -> None:
    """Write keys and values (`[pages, K, P, D]` per layer, in logical order) beside `path` and rename. ValueError if the folder is missing.

    header: what must agree on loading (model, page size, dtype). Indexes are not stored: they are a function of the keys.
    """
    path = Path(path)
    tensors = {"tokens": jax.numpy.asarray(np.asarray(tokens, np.int32))}
    for number, (k, v) in enumerate(layers):
        tensors |= {f"layers.{number}.k": k, f"layers.{number}.v": v}
    partial = path.with_name(path.name + ".partial")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
    save_file(tensors, str(partial), metadata={"format": FORMAT, "header": json.dumps(header)})
    os.replace(partial, path)


def read_sequence(path: str | Path, header: dict) -> tuple[list[int], list[tuple[jax.Array, jax.Array]]]:
    """Tokens and per-layer keys and values of a file whose header equals `header`; ValueError naming the field that differs otherwise."""
    try:
        with safe_open(str(path), framework="flax") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is not a kvjax sequence file (format {metadata.get('format')!r}, expected {FORMAT!r})")
            stored = json.loads(metadata["header"])
            for name, value in header.items():
                if stored.get(name) != value:
                    raise ValueError(f"{path} was made with {name} {stored.get(name)!r}, this engine has {value!r}; prefill again")
            count = sum(1 for name in file.keys() if name.endswith(".k"))  # noqa: SIM118 (safe_open is no mapping)
            layers = [(file.get_tensor(f"layers.{i}.k"), file.get_tensor(f"layers.{i}.v")) for i in range(count)]
            return np.asarray(file.get_tensor("tokens")).tolist(), layers
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable kvjax sequence file: {error}") from error
