"""What identifies a model: a fingerprint of its configuration and weights."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from kvjax.model.config import ModelConfig, uniform_fields
from kvjax.model.layers import RopeScaling
from kvjax.model.placement import whole_params
from kvjax.model.protocols import Model
from pallas_kernels.core.matrices import is_packed

CHUNK_BYTES = 4 << 20
"""Bytes of a tensor that are hashed at a time. Fixed, so that a fingerprint does not depend on the machine."""


_digests: dict[int, tuple[weakref.ref[Array], tuple[tuple[int, ...], bytes]]] = {}
"""Shapes and digests of whole arrays, by id. An array never changes, so its digest stays valid while it lives."""


def fingerprint(model: Model) -> str:
    """Identifies the model that made a file: "sha256-" and the first 32 hex digits of a SHA-256 over configuration and
    weights.

    Every tensor counts with its path, shape, dtype and bytes, and packed matrices with their formats, so the result is
    the same on every device. The weights are copied to the host one tensor at a time and hashed by one thread per core;
    `tools/time_fingerprint.py` measures how fast. An array's digest is kept while the array lives, so asking again for
    a loaded model is free. Where a mesh has devices of several processes, each of them must ask.
    """
    digest, wholes = hashlib.sha256(_text(model.config).encode()), jax.tree.leaves(whole_params(model))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (path, leaf), whole in zip(jax.tree_util.tree_leaves_with_path(model.params), wholes, strict=True):
            shape, content = _content(leaf, whole, pool)
            digest.update(_sha256(f"{jax.tree_util.keystr(path)} {shape} {leaf.dtype}".encode()))
            digest.update(content)
    for path, node in jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_packed):
        if is_packed(node):
            digest.update(_sha256(f"{jax.tree_util.keystr(path)} {node.format}".encode()))
    return f"sha256-{digest.hexdigest()[:32]}"


def _text(config: ModelConfig) -> str:
    """A description of the configuration that never changes, because the fingerprint hashes it.

    The first version's configuration had one set of fields for all layers, and its repr was hashed. Evidence, bills and
    saved sequences name models by that hash, so a model with such fields keeps exactly that text. Biases of o and of
    the MLP came later, and count as weights. compute_dtype is left out, because each weight counts with its dtype.
    """
    fields = uniform_fields(config)
    if fields is None:
        return _named(config, "compute_dtype")
    return f"ModelConfig({', '.join(f'{name}={_value(fields[name])}' for name in _FIRST_FIELDS)}){fields['windows'] or ''}"


_FIRST_FIELDS = (
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "max_positions"),
    *("qkv_bias", "qk_norm", "eos_token_ids", "bos_token_id"),
)
"""Fields of the first version's configuration, in its order."""


def _value(value: Any) -> str:
    if not isinstance(value, RopeScaling):
        return repr(value)
    fields = [field.name for field in dataclasses.fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in fields)})"


def _named(value: Any, *left_out: str) -> str:
    """A value's name and those fields that differ from their defaults, so that adding a field later changes no text."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_named, value))})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [field for field in dataclasses.fields(value) if field.name not in left_out and getattr(value, field.name) != field.default]
    return f"{type(value).__name__}({', '.join(f'{field.name}={_named(getattr(value, field.name))}' for field in fields)})"


def check_fingerprint(mark: object, where: str, remedy: str) -> None:
    """ValueError for a fingerprint of 16 hex digits, as earlier versions wrote it: two models could share one.

    where: the file that has the fingerprint. remedy: what its owner can do. The message has both.
    """
    if isinstance(mark, str) and re.fullmatch("[0-9a-f]{16}", mark):
        raise ValueError(f"{where} was made by an earlier version of kvjax, whose fingerprint ({mark}) other models may share; {remedy}")


def _content(leaf: Array, whole: Callable[[], Array | np.ndarray], pool: ThreadPoolExecutor) -> tuple[tuple[int, ...], bytes]:
    """The shape of a parameter, and the digest of its bytes in row-major order: the SHA-256 of the SHA-256 of each
    chunk.

    whole: finds the parameter as it is on one device.
    """
    kept = _digests.get(id(leaf))
    if kept is not None and kept[0]() is leaf:
        return kept[1]
    array = whole()
    digest = array.shape, _sha256(b"".join(pool.map(_sha256, _chunks(array))))
    if isinstance(leaf, np.ndarray):  # a numpy array may change in place, so its digest is not kept
        return digest
    # Those of dead arrays go here, not in a callback of their weak references: Python prints an interrupt that arrives
    # in one, and goes on.
    for key in [key for key, (array, _) in list(_digests.items()) if array() is None]:
        _digests.pop(key, None)
    _digests[id(leaf)] = weakref.ref(leaf), digest
    return digest


def _chunks(leaf: Array) -> list[np.ndarray]:
    """An array's bytes on the host, in pieces."""
    # An array keeps the host copy that it once made (none on a CPU). So a copy of the array is read: the host copy goes
    # away with it.
    on_host = isinstance(leaf, np.ndarray) or all(device.platform == "cpu" for device in leaf.devices())
    host = np.ascontiguousarray(leaf if on_host else leaf.copy())
    data = host.reshape(-1).view(np.uint8)
    return [data[start : start + CHUNK_BYTES] for start in range(0, data.size, CHUNK_BYTES)]


def _sha256(data: bytes | np.ndarray) -> bytes:
    return hashlib.sha256(data).digest()
