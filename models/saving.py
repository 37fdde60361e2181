"""Saves models to a folder in Hugging Face format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from kvjax.checks import whole_number
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Model, Params
from kvjax.model.weight_formats import FormatOf, place_of
from kvjax.models import checkpoint, config_json
from kvjax.models.checkpoint import MAX_SHARD_BYTES, Wanted
from kvjax.models.decoder import is_shape, param_shapes
from kvjax.models.fused import outline, stored_parts, whole
from kvjax.models.interleaving import blocks_in_order, rearranged, unmoved
from kvjax.models.quantization.writing import check_writable, fields_of, tensors_of
from kvjax.models.save_targets import check_target, hidden_beside
from kvjax.text.checkpoint_files import check_utf8
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, is_packed


def save(model: Model, folder: str | Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a model in Hugging Face format: config, weights in the parameters' dtype, tokenizer. `transformers` and
    `load` read it.

    Packed matrices are written as compressed-tensors has them, with a `quantization_config`; `load` reads them back bit
    for bit.

    The files are written to a folder beside `folder`, which is then renamed, so a folder of that name is always
    complete. config.json is written last: what an interrupted save leaves is no checkpoint. Missing parents are made,
    and links to folders followed. overwrite: replace the model in `folder`. Only a folder that holds a model and
    nothing else is replaced (`kvjax.models.save_targets.MODEL_FILES`). max_shard_bytes: the largest weights file; the
    host holds the tensors of one file at a time.

    Raises before anything is written: ValueError if `folder` cannot be written or may not be replaced, if it is the
    current folder, and for a model that config.json of its family cannot describe or that transformers would refuse;
    NotImplementedError for packed matrices that transformers cannot read.
    """
    most = whole_number("max_shard_bytes", max_shard_bytes, 1, 2**63)
    target = check_target(folder, overwrite)
    if model.tokenizer is not None:
        check_utf8(target)
    config_json.check_described(model.config)
    fields = config_json.to_fields(model.config) | _packing_fields(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = hidden_beside(target)
    try:
        _write_weights(model, beside, most)
        _write_json(beside / "generation_config.json", config_json.to_generation_fields(model.config))
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(beside)
        _write_json(beside / "config.json", fields)
        check_target(target, overwrite)  # again: others may have written there meanwhile
        _rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_packing(config: ModelConfig, format_of: FormatOf) -> None:
    """NotImplementedError if `save` would refuse this model's matrices in these formats
    (`kvjax.model.weight_formats.FormatOf`)."""
    named = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=is_shape)[0]
    formats = [format_of(*place_of(path), shape) for path, shape in named]
    wanted = checkpoint.wanted_tensors(config)[0]
    _check_order((w, own) for w, own in zip(wanted, formats, strict=True) if own is not None)
    check_writable((w.name, own, w.shape, False) for w, own in zip(wanted, formats, strict=True) if own is not None)


def _rename(beside: Path, folder: Path) -> None:
    """Move `beside` to `folder`. The old folder is removed last, and put back if the new one cannot take its place."""
    _open_up(beside)
    if not folder.exists():
        os.replace(beside, folder)
        return
    old = hidden_beside(folder, "old.")
    try:
        os.replace(folder, old)
        os.replace(beside, folder)
    except BaseException:
        if not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old)


def _open_up(folder: Path) -> None:
    """Give a folder and what is in it the default modes. tempfile and safetensors make theirs readable only by the
    owner."""
    masked = os.umask(0)
    os.umask(masked)
    for each in (folder, *folder.rglob("*")):
        each.chmod((0o777 if each.is_dir() else 0o666) & ~masked)


def _write_weights(model: Model, folder: Path, max_shard_bytes: int) -> None:
    """model.safetensors, or shards and their index. ValueError for arrays that are not in the model's compute_dtype;
    OSError if a file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    stored = _stored(model)
    orders = {w.name: w.order.inverse for w in checkpoint.wanted_tensors(model.config)[0] if w.order is not None}
    dtypes = {leaf.dtype.name for _, parts in stored for leaf in parts if not is_packed(leaf)}
    wanted_dtype = model.config.compute_dtype
    if dtypes != {wanted_dtype}:
        raise ValueError(f"parameters have dtypes {sorted(dtypes)}; all must have the model's compute_dtype, {wanted_dtype}")
    sizes = [sum(leaf.nbytes for leaf in parts) for _, parts in stored]
    shards = _shards(sizes, max_shard_bytes)
    files = (
        [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    )
    weight_map: dict[str, str] = {}
    tied = model.config.tie_embeddings
    for file, members in zip(files, shards, strict=True):
        host: dict[str, np.ndarray] = {}
        for n in members:
            name, parts = stored[n]
            leaf = rearranged(whole(parts), orders.get(name), name)
            host |= tensors_of(name, leaf, tied) if is_packed(leaf) else {name: np.asarray(leaf)}
        try:
            save_file(host, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"the model's weights could not be written to {folder.parent}: {error}") from error
        weight_map |= dict.fromkeys(host, file)
    if len(shards) > 1:
        total = {"total_parameters": model.config.num_params, "total_size": sum(sizes)}
        _write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


def _packing_fields(model: Model) -> dict[str, Any]:
    """The `quantization_config` of a model with packed matrices. NotImplementedError if transformers could not read
    them."""
    named = {name: outline(parts) for name, parts in _stored(model)}
    wanted, leaves = checkpoint.wanted_tensors(model.config)[0], jax.tree.leaves(model.params, is_leaf=is_packed)
    _check_order((w, leaf.format) for w, leaf in zip(wanted, leaves, strict=True) if is_packed(leaf))
    check_writable((name, leaf.format, leaf.shape, leaf.zeros is not None) for name, leaf in named.items() if is_packed(leaf))
    return {"quantization_config": fields_of(named)} if any(map(is_packed, named.values())) else {}


def _check_order(packed: Iterable[tuple[Wanted, MatrixFormat]]) -> None:
    """NotImplementedError for a packed matrix whose rows cannot be put back into the checkpoint's order."""
    for each, own in packed:
        if each.order is not None and blocks_in_order(each.order, own.rows) is None:
            raise NotImplementedError(f"{each.name} cannot be saved as {own}: {unmoved(own.rows)}")


def _stored(model: Model) -> list[tuple[str, tuple[Array | PackedMatrix, ...]]]:
    """What the files hold: names, and the parameters that each stands for."""
    wanted, structure = checkpoint.wanted_tensors(model.config)
    return stored_parts(model.config, wanted, _leaves(model.params, wanted, structure))


def _leaves(params: Params, wanted: list[Wanted], structure: Any) -> list[Array | PackedMatrix]:
    leaves, given = jax.tree.flatten(params, is_leaf=is_packed)
    if given != structure:
        raise ValueError("the parameters do not have the structure that kvjax.models.init_params gives for this configuration")
    for leaf, w in zip(leaves, wanted, strict=True):
        if leaf.shape != w.shape:
            raise ValueError(f"{w.name} has shape {leaf.shape}, the configuration needs {w.shape}")
    return leaves


def _shards(sizes: list[int], most: int) -> list[list[int]]:
    """Tensor numbers by file. Each file takes what fits, in order; a tensor larger than `most` gets its own file."""
    shards: list[list[int]] = [[]]
    filled = 0
    for n, size in enumerate(sizes):
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(n)
        filled += size
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
