"""Loads models in Hugging Face format from a folder or the Hub to the device.

Weights go from file to device in pieces of at most READ_BYTES (or one row, if that is longer). Besides the growing model, the host holds a
few pieces and the device one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from kvjax.model import ModelConfig
from kvjax.models import checkpoint, config_json
from kvjax.models.causal_lm import CausalLM
from kvjax.models.checkpoint import CONFIG_FILES, DTYPES, TOKENIZER_FILES, WEIGHT_FILES, Stored, Wanted
from kvjax.models.decoder import TransformerDecoder
from kvjax.models.families import FAMILIES
from kvjax.models.family import TENSORS
from kvjax.models.load_options import DtypeName, named_dtype, refuse
from kvjax.models.transformers_import import import_transformers
from kvjax.sharding import Shards, leaves_of_cuts, place_param

logger = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Bytes of a tensor that are read at a time."""


def read_config(path_or_id: str | Path, *, dtype: DTypeLike | DtypeName | None = None, max_positions: int | None = None) -> ModelConfig:
    """The configuration of a model, from its folder or Hub id. Reads config.json and generation_config.json, if there is one.

    dtype, max_positions: as in `load`. If dtype is None or "auto", `load` takes the type of the stored tensors; here config.json names it
    (default bfloat16). The ValueError names what is unknown or unsupported.
    """
    chosen = _chosen(dtype)
    return _config(checkpoint.find_folder(path_or_id, CONFIG_FILES), max_positions, None if chosen is None else chosen.name)


def load(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | DtypeName | None = None,
    max_positions: int | None = None,
    tokenizer: bool = True,
    mesh: Mesh | None = None,
    **unknown: Never,
) -> CausalLM:
    """Read a model from its folder or Hub id onto the default device, or the devices of a mesh (`kvjax.mesh`), each with its part.

    dtype: of all parameters: float32, bfloat16 or float16 ("fp32", "bf16", "fp16" and "half" for short). "auto": the stored type. None:
    float32 on the CPU, which has no fast bfloat16, and the stored type elsewhere. max_positions: the longest sequence, in tokens; None:
    what config.json says, or for a model with `longrope` its original length, up to which the short factors are used, as in transformers.
    With more positions the long factors rotate every sequence, because keys stay in the cache as they were rotated. Then sequences longer
    than the original length give the same results as in transformers, and shorter ones do not. tokenizer: whether to read the tokenizer
    too, through transformers. If config.json says `tie_word_embeddings` but a different `lm_head.weight` is stored, the model is loaded
    untied, with a warning, as in transformers.

    Raises ValueError for an unsupported configuration, for tensors that are missing, extra or
    misshapen, and for a tokenizer that is missing or has more ids than the model; TypeError, with a hint, for any other option.
    """
    if unknown:
        refuse(unknown)
    chosen = _chosen(dtype)
    folder = checkpoint.find_folder(path_or_id, CONFIG_FILES + WEIGHT_FILES + (TOKENIZER_FILES if tokenizer else ()))
    config = _config(folder, max_positions, "float32")
    config, tensors = _tied_as_stored(config, _own_tensors(config, checkpoint.stored_tensors(folder)))
    checkpoint.check_tensors(config, tensors)
    read_tokenizer = _tokenizer(folder, config) if tokenizer else None
    wanted, structure = checkpoint.wanted_tensors(config)
    chosen = _stored_dtype(wanted, tensors) if chosen is None else chosen
    config = dataclasses.replace(config, compute_dtype=chosen.name)
    decoder = TransformerDecoder(config)
    if mesh is None:
        params = jax.tree.unflatten(structure, list(_place_all(wanted, tensors, chosen)))
    else:
        params = jax.tree.unflatten(structure, list(_place_parts(wanted, structure, tensors, decoder, mesh)))
    return CausalLM(decoder, params, read_tokenizer, str(path_or_id))


def _config(folder: Path, max_positions: int | None, dtype: str | None) -> ModelConfig:
    generation = folder / "generation_config.json"
    fields = checkpoint.read_json(folder / "config.json")
    return config_json.parse(fields, checkpoint.read_json(generation) if generation.is_file() else None, max_positions, dtype)


def _chosen(dtype: DTypeLike | DtypeName | None) -> np.dtype | None:
    """The dtype that `load` got, or its default on a CPU; None for the stored type."""
    if dtype is None:
        return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else None
    named = named_dtype(dtype)
    return named if isinstance(named, np.dtype) else None


def _stored_dtype(wanted: list[Wanted], tensors: dict[str, Stored]) -> np.dtype:
    """The common type of all stored tensors."""
    stored = {DTYPES[tensors[w.name].dtype] for w in wanted}
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


def _place_parts(
    wanted: list[Wanted], structure: Any, tensors: dict[str, Stored], decoder: TransformerDecoder, mesh: Mesh
) -> Iterator[Array]:
    """Every parameter in turn, each device of the mesh with its part. The host holds one tensor at a time."""
    shards, dtype = Shards(mesh), jnp.dtype(decoder.config.compute_dtype)
    cuts = decoder.cuts(jax.tree.unflatten(structure, wanted), shards.tensor)
    for each, how in zip(wanted, leaves_of_cuts(cuts), strict=True):
        whole = np.concatenate([rows for _, rows in _pieces(tensors[each.name])]).astype(dtype)
        yield place_param(how, whole, shards).block_until_ready()


@functools.partial(jax.jit, donate_argnames="placed")
def _write_rows(placed: Array, rows: Array, start: Array) -> Array:
    """`placed`, with `rows` written from row `start` on. DONATES placed."""
    return jax.lax.dynamic_update_slice_in_dim(placed, rows.astype(placed.dtype), start, axis=0)


def _pieces(stored: Stored) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a tensor, in order, in the stored type."""
    from safetensors import safe_open

    row_bytes = math.prod(stored.shape[1:]) * jnp.dtype(DTYPES[stored.dtype]).itemsize
    count = max(1, READ_BYTES // row_bytes)
    for start in range(0, stored.shape[0], count):
        with safe_open(stored.file, framework="np") as opened:  # once per piece: what was read stays mapped until it is closed
            rows = opened.get_slice(stored.name)[start : min(start + count, stored.shape[0])]
        yield start, rows


def _own_tensors(config: ModelConfig, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors that the family reads, by their names in its own checkpoints."""
    family = FAMILIES[config.family]
    return {own: stored for name, stored in tensors.items() if (own := family.own_name(name)) is not None}


def _tied_as_stored(config: ModelConfig, tensors: dict[str, Stored]) -> tuple[ModelConfig, dict[str, Stored]]:
    """Configuration and tensors of a model that config.json calls tied, depending on what is stored, as in transformers.

    If only the head is stored, it is the embedding too. If both are stored and equal, the model is tied. If they differ, it is not.
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
    """Whether two tensors have the same shape, type and values. A type that cannot be read is never equal."""
    if first.shape != second.shape or first.dtype != second.dtype or first.dtype not in DTYPES:
        return False
    return all(np.array_equal(a, b) for (_, a), (_, b) in zip(_pieces(first), _pieces(second), strict=True))


def _tokenizer(folder: Path, config: ModelConfig) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(
            f"{folder} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there from the model that it was made from "
            "(in Python, tokenizer=False loads the model alone)"
        )
    # tokenizer.json is complete. AutoTokenizer would rebuild it as the family's own tokenizer, which may split text differently.
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
    # It warns of "indexing errors" past the trained length. The engine refuses such prompts itself, and says how long they are.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
