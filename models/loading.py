"""Loads models in Hugging Face format from a folder or the Hub to the device.

Weights go from file to device in pieces of at most READ_BYTES (or one row, or row of blocks, if that is longer).
Besides the growing model, the host holds a few pieces and the device one. Matrices are packed piece by piece, on the
device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from kvjax.axes import Shards, several_processes
from kvjax.compilation import use_compilation_cache
from kvjax.model.config import ModelConfig
from kvjax.model.placement import place_tree
from kvjax.model.weight_formats import FormatOf, place_of, scheme_of
from kvjax.models import checkpoint, config_json, fused
from kvjax.models.causal_lm import CausalLM
from kvjax.models.checkpoint import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, Checkpoint, Folder, Wanted, open_checkpoint
from kvjax.models.decoder import TransformerDecoder, is_shape, param_shapes
from kvjax.models.families import FAMILIES, family_of
from kvjax.models.family import TENSORS
from kvjax.models.interleaving import in_order, rearranged
from kvjax.models.load_options import DtypeName, named_dtype, refuse
from kvjax.models.tensors import DTYPES, RowsPacked, Tensor
from pallas_kernels.core.dispatch import compute_capability
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, pack

if TYPE_CHECKING:
    from kvjax.models.quantization.rules import Published

logger = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Bytes of a tensor that are read at a time."""

NARROW = 64
"""Columns of a block, below which `project_tokens` has no kernel."""


def read_config(path_or_id: str | Path, *, dtype: DTypeLike | DtypeName | None = None, max_positions: int | None = None) -> ModelConfig:
    """The configuration of a model, from its folder or Hub id. Reads config.json and generation_config.json, if there
    is one.

    dtype, max_positions: as in `load`. If dtype is None or "auto", `load` takes the type of the stored tensors; here
    config.json names it (default bfloat16). The ValueError names what is unknown or unsupported.
    """
    chosen = _chosen(dtype)
    return _config(open_checkpoint(path_or_id, CONFIG_FILES), max_positions, None if chosen is None else chosen.name)[0]


def read_packing(path_or_id: str | Path, config: ModelConfig) -> FormatOf | None:
    """How the matrices of a checkpoint are packed in memory, as config.json says, or a GGUF file
    (`kvjax.model.weight_formats.FormatOf`); None: they are not.

    config: what `read_config` gives. Raises ValueError for a scheme that cannot be read, with its name.
    """
    opened, family = open_checkpoint(path_or_id, CONFIG_FILES), FAMILIES[config.family]
    names = family.tensor_names(config)
    if not isinstance(opened, Folder):
        tensors = _own_tensors(config, opened.tensors())
        formats = {name: tensor.counted for name, tensor in tensors.items() if isinstance(tensor, RowsPacked)}
        if not any(formats.values()):
            return None

        def kept_of(layer: int | None, name: str, shape: tuple[int, ...]) -> MatrixFormat | None:
            own = _stored_name(names, layer, name)
            return formats.get(own, formats.get(family.stored_name(own)))

        return kept_of
    _, published = _fields(opened)
    if published is None or published.keeps_none:
        return None

    def format_of(layer: int | None, name: str, shape: tuple[int, ...]) -> MatrixFormat | None:
        return published.format_of(family.stored_name(_stored_name(names, layer, name)), name, shape)

    return format_of


def packs_anew(path_or_id: str | Path) -> bool:
    """Whether `load` packs matrices as `weights` says although some are stored packed: those of a GGUF file are widened
    first."""
    return not isinstance(open_checkpoint(path_or_id, CONFIG_FILES), Folder)


def _stored_name(names: Any, layer: int | None, name: str) -> str:
    """A parameter's name in Hugging Face's checkpoints. names: `Family.tensor_names`."""
    return names[name] if layer is None else names["layers"][layer][name]


def load(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | DtypeName | None = None,
    max_positions: int | None = None,
    tokenizer: bool = True,
    mesh: Mesh | None = None,
    weights: str | None = None,
    lora: str | Path | Sequence[str | Path] | None = None,
    draft_weights: str | None = None,
    **unknown: Never,
) -> CausalLM:
    """Read a model from its folder or Hub id onto the default device, or the devices of a mesh (`kvjax.mesh`), each
    with its part.

    dtype: of parameters that are not packed, of activations and of the cache: float32, bfloat16 or float16 ("fp32",
    "bf16", "fp16" and "half" for short). "auto": the stored type. None: float32 on the CPU, which has no fast bfloat16,
    and the stored type elsewhere. max_positions: the longest sequence, in tokens; None: what config.json says, or for a
    model with `longrope` its original length, up to which the short factors are used, as in transformers. With more
    positions the long factors rotate every sequence, because keys stay in the cache as they were rotated. Then
    sequences longer than the original length give the same results as in transformers, and shorter ones do not.
    tokenizer: whether to read the tokenizer too, through transformers. If config.json says `tie_word_embeddings` but a
    different `lm_head.weight` is stored, the model is loaded untied, with a warning, as in transformers.

    weights: pack the matrices of layers, the embedding and the head while loading
    (`kvjax.model.weight_formats.SCHEMES`): "int8" or "fp8", with one scale for each output channel ("int8:128x128",
    "fp8:128x128": for each block; "fp8:tokens": prefill rounds tokens to fp8, too), or "int4", with one for each 128
    inputs, and the embedding and the head as int8. None: as they are stored.

    lora: LoRA adapters that are merged while loading, in order, in float32: a folder or Hub id of peft, with a scale
    after it if that is not 1 ("DIR:0.5"), or several in a list (`kvjax.models.adapter_files`). Matrices that stay
    packed as they are stored take none.

    draft_weights: pack a second copy of the matrices, as for weights, by which policies draft (docs/drafts.md). It is
    for weights that are not packed, on one device.

    Raises ValueError, with the file and the field, for whatever is damaged or unsupported: for a configuration, for
    tensors that are missing, extra or misshapen, for numbers that are not finite in a matrix to be packed, for a
    tokenizer that is missing, damaged or made by code of the checkpoint, which is never run, and for a file that
    another program changes or replaces meanwhile; TypeError, with a hint, for any other option. A tokenizer may have
    more ids than the model: then a warning names the first, and prompts that hold one are refused.
    """
    if unknown:
        refuse(unknown)
    use_compilation_cache()
    if draft_weights is not None:
        scheme_of(draft_weights, "draft_weights")
        if weights is not None or mesh is not None:
            other = f"weights={weights!r}" if mesh is None else "mesh"
            raise ValueError(f"draft_weights={draft_weights!r} is for weights that are not packed, on one device: leave {other} out")
    chosen = _chosen(dtype)
    opened = open_checkpoint(path_or_id, CONFIG_FILES + WEIGHT_FILES + (TOKENIZER_FILES if tokenizer else ()))
    adapters = ()
    if lora is not None:
        from kvjax.models.adapter_files import open_adapters

        adapters = open_adapters(lora)
    config, published = _config(opened, max_positions, "float32")
    config, tensors = _tied_as_stored(config, _own_tensors(config, opened.tensors()))
    stored = fused.stored_wanted(config)
    if published is None:
        packed, tensors = _as_stored(config, tensors, weights)
    else:
        from kvjax.models.quantization.reading import sources
        from kvjax.models.quantization.rules import REMEDY

        packed, tensors = sources(published, stored, tensors)
        if packed and weights is not None:
            raise ValueError(f"{path_or_id} holds packed weights ({published.method}) already: leave weights={weights!r} out, or {REMEDY}")
    if adapters:
        from kvjax.models.adapters import merge

        tensors, tied = merge(adapters, tensors, packed, FAMILIES[config.family], config.tie_embeddings)
        config = dataclasses.replace(config, tie_embeddings=tied)
    where = "config.json" if isinstance(opened, Folder) else opened.config_name
    tensors, packed = fused.cut_apart(config, tensors, packed, where)
    wanted, structure = checkpoint.wanted_tensors(config)
    checkpoint.check_tensors(config, tensors, packed, where)
    own_tokenizer = _tokenizer(opened, str(path_or_id), config) if tokenizer else None
    if chosen is None:
        kind = opened.number_type()
        chosen = _stored_dtype([tensors[w.name] for w in wanted if w.name not in packed]) if kind is None else jnp.dtype(DTYPES[kind])
    tensors |= {w.name: in_order(tensors[w.name], w.order) for w in wanted if w.name not in packed}
    config = dataclasses.replace(config, compute_dtype=chosen.name)
    if several_processes(mesh):
        from kvjax.scheduler.processes import check_alike

        given = {"dtype": chosen.name, "weights": str(weights), "max_positions": str(max_positions), "mesh": str(dict(mesh.shape))}
        check_alike(mesh, given | {"checkpoint": opened.digest(), "lora": " ".join(each.digest() for each in adapters)})
    _say_narrow(path_or_id, packed)
    decoder = TransformerDecoder(config)
    formats = _formats(config, None if weights is None else scheme_of(weights).format_of)
    ways = [packed.get(w.name, own) for w, own in zip(wanted, formats, strict=True)]
    if mesh is None:
        params = jax.tree.unflatten(structure, list(_place_all(wanted, ways, tensors, chosen)))
    else:
        params = jax.tree.unflatten(structure, list(_place_parts(wanted, ways, structure, tensors, decoder, mesh)))
    for each in (opened, *adapters):
        each.check_same()
    model = CausalLM(decoder, params, own_tokenizer, "+".join([str(path_or_id), *(each.said for each in adapters)]))
    return model if draft_weights is None else model.with_draft_weights(draft_weights)


def _config(opened: Checkpoint, max_positions: int | None, dtype: str | None) -> tuple[ModelConfig, Published | None]:
    """The configuration, and which matrices are stored packed."""
    fields, published = _fields(opened)
    given = opened.generation()
    try:
        return config_json.parse(fields, given, max_positions, dtype), published
    except ValueError as error:
        if isinstance(opened, Folder) and "config.json" in str(error):
            raise
        said = (
            str(error)
            .removeprefix("config.json: ")
            .replace("unsupported config.json of", "unsupported for")
            .replace("config.json", opened.config_name)
        )
        raise ValueError(f"{opened.config_name}: {said}") from error


def _fields(opened: Checkpoint) -> tuple[config_json.Fields, Published | None]:
    """The configuration's fields without what they say of packed matrices, and that."""
    fields = opened.fields()
    inner = fields.get("text_config")
    parts = [fields, inner] if isinstance(inner, Mapping) else [fields]
    if all(part.get(name) is None for part in parts for name in ("quantization_config", "compression_config")):
        return fields, None
    from kvjax.models.quantization.schemes import split

    fields, published = split(fields)
    prefixes = family_of(fields).prefixes
    if published is None or not prefixes:
        return fields, published
    return fields, dataclasses.replace(published, prefixes=prefixes)


def _chosen(dtype: DTypeLike | DtypeName | None) -> np.dtype | None:
    """The dtype that `load` got, or its default on a CPU; None for the stored type."""
    if dtype is None:
        return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else None
    named = named_dtype(dtype)
    return named if isinstance(named, np.dtype) else None


def _stored_dtype(tensors: list[Tensor]) -> np.dtype:
    """The common type of all tensors that are stored as they are."""
    stored = {DTYPES[base.dtype] for base in map(_base_of, tensors) if not getattr(base, "widened", False)}
    if len(stored) > 1:
        raise ValueError(f"the weights are stored in several types ({', '.join(sorted(stored))}); choose one with dtype=")
    return jnp.dtype(stored.pop())


def _base_of(tensor: Tensor) -> Tensor:
    """A model's tensor, below whatever shows rows of it or changes them."""
    while (inner := getattr(tensor, "tensor", None)) is not None:
        tensor = inner
    return tensor


def _formats(config: ModelConfig, format_of: FormatOf | None) -> list[MatrixFormat | None]:
    """How each parameter is packed, in the order of `checkpoint.wanted_tensors`."""
    shapes, _ = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=is_shape)
    return [None if format_of is None else format_of(*place_of(path), shape) for path, shape in shapes]


def _as_stored(config: ModelConfig, tensors: dict[str, Tensor], weights: str | None) -> tuple[dict[str, RowsPacked], dict[str, Tensor]]:
    """The matrices that stay packed as a GGUF file holds them, in the order of the parameters, and the other tensors.
    None stays so where `weights` packs them anew."""
    wanted = {w.name: w for w in (*fused.stored_wanted(config), *checkpoint.wanted_tensors(config)[0])} if weights is None else {}
    packed = {}
    for name, tensor in tensors.items():
        if name in wanted and isinstance(tensor, RowsPacked) and tensor.shape == wanted[name].shape:
            ordered = in_order(tensor, wanted[name].order)
            packed |= {name: ordered} if isinstance(ordered, RowsPacked) and ordered.format is not None else {}
    return packed, {name: tensor for name, tensor in tensors.items() if name not in packed}


def _say_narrow(path_or_id: str | Path, packed: Mapping[str, Any]) -> None:
    """A warning where matrices stay packed in blocks for which this device's kernel is not made."""
    narrow = {str(own.format) for own in packed.values() if isinstance(own, RowsPacked) and (own.format.columns or NARROW) < NARROW}
    if narrow and compute_capability() >= (9, 0):
        logger.warning(
            "%s: matrices stay packed as %s, in blocks that no kernel of this GPU takes: they run in plain XLA, which is slower. "
            "weights='int8' (--weights int8) packs them anew, for the kernel",
            *(path_or_id, " and ".join(sorted(narrow))),
        )


Way = MatrixFormat | fused.Stays | None
"""How a parameter is packed: while it is loaded, or as it is stored; None: it is an array."""


def _place_all(wanted: list[Wanted], ways: list[Way], tensors: dict[str, Tensor], dtype: np.dtype) -> Iterator[Array | PackedMatrix]:
    """Every parameter in turn, on the device. Waits for each piece, so that its host copy is gone before the next is
    read."""
    for w, own in zip(wanted, ways, strict=True):
        if isinstance(own, fused.Source):
            yield jax.block_until_ready(jax.tree.map(jnp.asarray, rearranged(own.read(), w.order, w.name)))
            continue
        placed = None
        if isinstance(own, RowsPacked):
            for start, stop in _spans(w.shape[0], w.shape[1]):
                placed = jax.block_until_ready(_with_piece(placed, w, start, own.read_packed(start, stop)))
            yield placed
            continue
        for start, rows in _pieces(tensors[w.name], 1 if own is None else own.rows):
            rows = _in_range(rows, dtype, w.name) if own is None else rows
            if own is not None:
                placed = _with_piece(placed, w, start, pack(rows, own, w.name))
            elif len(rows) == w.shape[0]:
                # jnp.asarray would compile a program for every shape. A copy, in memory of JAX's own.
                placed = jax.device_put(rows, may_alias=False).astype(dtype)
            else:
                placed = _write_rows(jnp.zeros(w.shape, dtype) if placed is None else placed, rows, np.int32(start))
            jax.block_until_ready(placed)
        yield placed


def _with_piece(placed: PackedMatrix | None, w: Wanted, start: int, piece: PackedMatrix) -> PackedMatrix:
    """A packed matrix with the rows from `start` on. DONATES placed, which is None before the first piece."""
    own = piece.format
    if piece.shape == w.shape:
        return jax.tree.map(jnp.asarray, piece)
    if placed is None:
        shapes = own.codes_shape(w.shape), own.scales_shape(w.shape)
        codes, scales = (jnp.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, (piece.codes, piece.scales), strict=True))
        placed = PackedMatrix(codes, scales, format=own)
    codes = _write_rows(placed.codes, piece.codes, np.int32(start))
    return placed.replace(codes=codes, scales=_write_rows(placed.scales, piece.scales, np.int32(start // own.rows)))


def _place_parts(
    wanted: list[Wanted],
    ways: list[Way],
    structure: Any,
    tensors: dict[str, Tensor],
    decoder: TransformerDecoder,
    mesh: Mesh,
) -> Iterator[Array | PackedMatrix]:
    """Every parameter in turn, each device of the mesh with its part. The host holds one tensor at a time."""
    shards, dtype = Shards(mesh), jnp.dtype(decoder.config.compute_dtype)
    shapes = [_shape_of(w, own, dtype) for w, own in zip(wanted, ways, strict=True)]
    cuts = structure.flatten_up_to(decoder.cuts(jax.tree.unflatten(structure, shapes), shards.tensor))
    for w, own, how in zip(wanted, ways, cuts, strict=True):
        if isinstance(own, fused.Source):
            whole = rearranged(own.read(), w.order, w.name)
        elif isinstance(own, RowsPacked):
            whole = own.read_packed(0, w.shape[0])
        elif own is None:
            whole = np.concatenate([_in_range(rows, dtype, w.name) for _, rows in _pieces(tensors[w.name])]).astype(dtype)
        else:
            packed = [jax.device_get(pack(rows, own, w.name)) for _, rows in _pieces(tensors[w.name], own.rows)]
            whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *packed)
        yield jax.block_until_ready(place_tree(how, whole, shards))


def _shape_of(w: Wanted, own: Way, dtype: np.dtype) -> jax.ShapeDtypeStruct | PackedMatrix:
    """A parameter without its numbers."""
    if isinstance(own, fused.Source):
        return own.empty()
    if isinstance(own, RowsPacked):
        return own.format.empty(w.shape)
    return jax.ShapeDtypeStruct(w.shape, dtype) if own is None else own.empty(w.shape)


def _in_range(rows: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The rows. ValueError if a finite number of them is an infinite one in `dtype`."""
    if rows.dtype == dtype or not rows.size:
        return rows
    # Without its sign, the bits of a number are in the order of its size. NaN and infinity come last.
    bits = rows.view(f"u{rows.itemsize}")
    largest = (bits & bits.dtype.type((1 << (8 * rows.itemsize - 1)) - 1)).max().view(rows.dtype)
    with np.errstate(all="ignore"):
        if np.isfinite(largest.astype(dtype)) or not (np.isfinite(rows) & np.isinf(rows.astype(dtype))).any():
            return rows
    most = float(jnp.finfo(dtype).max)
    raise ValueError(f"{name} holds numbers beyond {most:g}, the largest of {dtype.name}: load it with another dtype, such as float32")


@functools.partial(jax.jit, donate_argnames="placed")
def _write_rows(placed: Array, rows: Array, start: Array) -> Array:
    """`placed`, with `rows` written from row `start` on. DONATES placed."""
    return jax.lax.dynamic_update_slice_in_dim(placed, rows.astype(placed.dtype), start, axis=0)


def _pieces(tensor: Tensor, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a tensor, in order, in the stored type. Pieces but the last have a multiple of `multiple`
    rows."""
    row_bytes = math.prod(tensor.shape[1:]) * jnp.dtype(DTYPES[tensor.dtype]).itemsize
    for start, stop in _spans(tensor.shape[0], row_bytes, multiple):
        yield start, tensor.read(start, stop)


def _spans(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of the pieces in which a tensor is read."""
    count = max(1, READ_BYTES // row_bytes // multiple) * multiple
    for start in range(0, rows, count):
        yield start, min(start + count, rows)


def _own_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the family reads, by their names in its own checkpoints."""
    family = FAMILIES[config.family]
    return {own: stored for name, stored in tensors.items() if (own := family.own_name(name)) is not None}


def _tied_as_stored(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and tensors of a model that config.json calls tied, depending on what is stored, as in
    transformers.

    If only the head is stored, it is the embedding too. If both are stored and equal, the model is tied. If they
    differ, it is not.
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


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, type and values. A type that cannot be read is never equal."""
    if first.shape != second.shape or first.dtype != second.dtype or first.dtype not in DTYPES:
        return False
    return all(np.array_equal(a, b) for (_, a), (_, b) in zip(_pieces(first), _pieces(second), strict=True))


def _tokenizer(opened: Checkpoint, name: str, config: ModelConfig) -> Any:
    try:
        tokenizer = opened.tokenizer()
    except ValueError as error:
        raise ValueError(f"{error} (in Python, tokenizer=False loads the model alone)") from error
    ids = tokenizer.get_vocab()
    beyond = sorted((number, token) for token, number in ids.items() if number >= config.vocab_size)
    if beyond:
        # As Gemma 3's text models have it: an image's placeholder comes after the embedding's last row.
        logger.warning(
            "the tokenizer in %s has %d ids and the model %d: prompts with an id from %d (%r) on are refused",
            *(name, len(ids), config.vocab_size, *beyond[0]),
        )
    # It warns of "indexing errors" past the trained length. The engine refuses such prompts itself, and says how long
    # they are.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer
