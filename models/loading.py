"""Models in Hugging Face format, from a folder or the Hub to the device and back.

Weights go from file to device in pieces of at most READ_BYTES (a row, where that is longer): beside the growing model the host holds a
few of them, and the device one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Never

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from kvjax.model import Model, ModelConfig, Params
from kvjax.models import checkpoint, config_json
from kvjax.models.causal_lm import CausalLM
from kvjax.models.checkpoint import CONFIG_FILES, DTYPES, MAX_SHARD_BYTES, TOKENIZER_FILES, WEIGHT_FILES, Stored, Wanted
from kvjax.models.decoder import TransformerDecoder
from kvjax.models.family import TENSORS
from kvjax.models.load_options import DtypeName, named_dtype, refuse
from kvjax.models.transformers_import import import_transformers

logger = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Of a tensor, read at a time."""


def read_config(path_or_id: str | Path, *, max_positions: int | None = None) -> ModelConfig:
    """The configuration of a model, from its folder or Hub id; reads config.json and, where there is one, generation_config.json.

    max_positions: as in `load`. Raises ValueError that names what is unknown or unsupported.
    """
    return _config(checkpoint.find_folder(path_or_id, CONFIG_FILES), max_positions)


def expected_dtype(path_or_id: str | Path) -> np.dtype:
    """The dtype that `load` will choose, from config.json alone: float32 on the CPU, elsewhere the one it names (bfloat16 if none).

    For plans made before the weights are there; `load` itself goes by the stored tensors.
    """
    if jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    fields = checkpoint.read_json(checkpoint.find_folder(path_or_id, CONFIG_FILES) / "config.json")
    return jnp.dtype(fields.get("dtype") or fields.get("torch_dtype") or jnp.bfloat16)


def load(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | DtypeName | None = None,
    max_positions: int | None = None,
    tokenizer: bool = True,
    **unknown: Never,
) -> CausalLM:
    """Read a model from its folder or Hub id onto the default device.

    dtype: of all parameters, float32, bfloat16 or float16 ("fp32", "bf16", "fp16" and "half" for short); "auto" is the stored type; None
    is float32 on the CPU, which has no fast bfloat16, and the stored type elsewhere. max_positions: the longest sequence, in tokens; None
    is what config.json says, and for a model with `longrope` its original length, up to which the short factors rotate, as in
    transformers. If it is more than that, the long factors rotate every sequence, because keys stay in the cache as they were rotated:
    sequences longer than the original length give what transformers gives, and shorter ones do not. tokenizer: whether to read the
    tokenizer too, through transformers. Where config.json says `tie_word_embeddings` and another `lm_head.weight` is stored, the model is
    loaded untied, with a warning, as transformers does.

    Raises ValueError for an unsupported configuration, for tensors that are missing, extra or
    misshapen, and for a tokenizer that is missing or has more ids than the model; TypeError, with a hint, for any other option.
    """
    if unknown:
        refuse(unknown)
    dtype = None if dtype is None else named_dtype(dtype)
    folder = checkpoint.find_folder(path_or_id, CONFIG_FILES + WEIGHT_FILES + (TOKENIZER_FILES if tokenizer else ()))
    config, tensors = _tied_as_stored(_config(folder, max_positions), checkpoint.stored_tensors(folder))
    checkpoint.check_tensors(config, tensors)
    read_tokenizer = _tokenizer(folder, config) if tokenizer else None
    wanted, structure = checkpoint.wanted_tensors(config)
    params = jax.tree.unflatten(structure, list(_place_all(wanted, tensors, _dtype(config, tensors, dtype))))
    return CausalLM(TransformerDecoder(config), params, read_tokenizer, str(path_or_id))


def save(model: Model, folder: str | Path, *, overwrite: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a model in Hugging Face format: config, weights in the parameters' dtype, tokenizer. `transformers` and `load` read it.

    The files are written to a folder beside `folder`, which is then renamed, so a folder of that name is always whole. overwrite:
    replace `folder`, with everything in it, if it holds a model already. max_shard_bytes: largest weights file; the host holds one
    such file's tensors at a time. Raises ValueError when `folder` is there already and may not be replaced.
    """
    folder = Path(folder).expanduser().absolute()
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    _check_target(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        dtype = _write_weights(model, beside, max_shard_bytes)
        _write_json(beside / "config.json", config_json.to_fields(model.config, dtype))
        _write_json(beside / "generation_config.json", config_json.to_generation_fields(model.config))
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(beside)
        _rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _config(folder: Path, max_positions: int | None) -> ModelConfig:
    generation = folder / "generation_config.json"
    fields = checkpoint.read_json(folder / "config.json")
    return config_json.parse(fields, checkpoint.read_json(generation) if generation.is_file() else None, max_positions)


def _dtype(config: ModelConfig, tensors: dict[str, Stored], dtype: np.dtype | Literal["auto"] | None) -> np.dtype:
    """The parameters' dtype, worked out as `load` documents."""
    if isinstance(dtype, np.dtype):
        return dtype
    if dtype is None and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    stored = {DTYPES[tensors[w.name].dtype] for w in checkpoint.wanted_tensors(config)[0]}
    if len(stored) > 1:
        raise ValueError(f"the weights are stored in several types ({', '.join(sorted(stored))}); choose one with dtype=")
    return jnp.dtype(stored.pop())


def _place_all(wanted: list[Wanted], tensors: dict[str, Stored], dtype: np.dtype) -> Iterator[Array]:
    """Every parameter in turn, on the device. Waits for each piece, so that its host copy is gone before the next is read."""
    for w in wanted:
        placed = None
        for start, rows in _pieces(tensors[w.name]):
            if len(rows) == w.shape[0]:
                placed = jnp.asarray(rows).astype(dtype)
            else:
                placed = _write_rows(jnp.zeros(w.shape, dtype) if placed is None else placed, rows, np.int32(start))
            placed.block_until_ready()
        yield placed


@functools.partial(jax.jit, donate_argnames="placed")
def _write_rows(placed: Array, rows: Array, start: Array) -> Array:
    """`placed` with `rows` from row `start` on. DONATES placed."""
    return jax.lax.dynamic_update_slice_in_dim(placed, rows.astype(placed.dtype), start, axis=0)


def _pieces(stored: Stored) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a tensor, in order, in the stored type."""
    from safetensors import safe_open

    row_bytes = math.prod(stored.shape[1:]) * jnp.dtype(DTYPES[stored.dtype]).itemsize
    count = max(1, READ_BYTES // row_bytes)
    for start in range(0, stored.shape[0], count):
        with safe_open(stored.file, framework="np") as opened:  # anew for each piece: what was read stays mapped until it is closed
            rows = opened.get_slice(stored.name)[start : min(start + count, stored.shape[0])]
        yield start, rows


def _tied_as_stored(config: ModelConfig, tensors: dict[str, Stored]) -> tuple[ModelConfig, dict[str, Stored]]:
    """Configuration and tensors of a model that config.json calls tied, by what is stored, as transformers does.

    Only the head is stored: it is the embedding too. Both are, and are equal: tied. Both, and they differ: not tied.
    """
    embed, head = TENSORS["embed"], TENSORS["lm_head"]
    if not config.tie_embeddings or head not in tensors:
        return config, tensors
    others = {name: stored for name, stored in tensors.items() if name != head}
    if embed not in tensors:
        return config, others | {embed: tensors[head]}
    if _equal(tensors[embed], tensors[head]):
        return config, others
    logger.warning("config.json says tie_word_embeddings, but %s is stored and differs from %s: not tied, as in transformers", head, embed)
    return dataclasses.replace(config, tie_embeddings=False), tensors


def _equal(first: Stored, second: Stored) -> bool:
    """Whether two tensors have the same shape, type and values. A type that cannot be read equals nothing."""
    if first.shape != second.shape or first.dtype != second.dtype or first.dtype not in DTYPES:
        return False
    return all(np.array_equal(a, b) for (_, a), (_, b) in zip(_pieces(first), _pieces(second), strict=True))


def _tokenizer(folder: Path, config: ModelConfig) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(
            f"{folder} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there from the model that it was made from "
            "(in Python, tokenizer=False loads the model alone)"
        )
    # tokenizer.json says everything. AutoTokenizer would rebuild it as the family's own tokenizer and split another text differently.
    transformers = import_transformers()
    kind = transformers.PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else transformers.AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries below raise bare Exception for a damaged file
        for file in folder.glob("tokenizer*"):
            checkpoint.check_pointer(file)
        raise ValueError(
            f"transformers cannot read the tokenizer in {folder} ({_first_line(error)}); {checkpoint.AGAIN} "
            "(in Python, tokenizer=False loads the model alone)"
        ) from error
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"the tokenizer in {folder} has {len(tokenizer)} ids, the model's vocabulary only {config.vocab_size}")
    # It warns of "indexing errors" past the trained length; the engine refuses such prompts itself, and says how long they are.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{folder} is there already; choose another folder, or pass overwrite=True to replace a model")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so it is not a model to replace; choose another folder")


def _rename(beside: Path, folder: Path) -> None:
    """Put `beside` in the place of `folder`; what stood there is removed last."""
    _open_up(beside)
    if not folder.exists():
        os.replace(beside, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old)


def _open_up(folder: Path) -> None:
    """Give a folder and its files the modes that new ones get: tempfile and safetensors make theirs for the owner alone."""
    masked = os.umask(0)
    os.umask(masked)
    folder.chmod(0o777 & ~masked)
    for file in folder.iterdir():
        file.chmod(0o666 & ~masked)


def _write_weights(model: Model, folder: Path, max_shard_bytes: int) -> str:
    """model.safetensors, or shards and their index. Returns the dtype's name."""
    from safetensors.numpy import save_file

    wanted, structure = checkpoint.wanted_tensors(model.config)
    leaves = _leaves(model.params, wanted, structure)
    dtypes = {leaf.dtype.name for leaf in leaves}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
        raise ValueError(f"parameters have dtypes {sorted(dtypes)}; all must have one of {', '.join(DTYPES.values())}")
    shards = _shards(wanted, [leaf.nbytes for leaf in leaves], max_shard_bytes)
    files = (
        [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    )
    for file, members in zip(files, shards, strict=True):
        host = {wanted[n].name: np.asarray(leaves[n]) for n in members}
        save_file(host, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {wanted[n].name: file for file, members in zip(files, shards, strict=True) for n in members}
        total = {"total_parameters": model.config.num_params, "total_size": sum(leaf.nbytes for leaf in leaves)}
        _write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
    return dtypes.pop()


def _leaves(params: Params, wanted: list[Wanted], structure: Any) -> list[Array]:
    leaves, given = jax.tree.flatten(params)
    if given != structure:
        raise ValueError("the parameters do not have the structure that kvjax.models.init_params gives for this configuration")
    for leaf, w in zip(leaves, wanted, strict=True):
        if leaf.shape != w.shape:
            raise ValueError(f"{w.name} has shape {leaf.shape}, the configuration needs {w.shape}")
    return leaves


def _shards(wanted: list[Wanted], sizes: list[int], most: int) -> list[list[int]]:
    """Tensor numbers by file: each file takes what fits, in order; a tensor larger than `most` stands alone."""
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
