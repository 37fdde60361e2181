"""Copies pages and states of a sequence to host memory and back, a few at a time, so one program serves sequences of every length.

`read_pages` and `write_pages` move whole sequences, layer by layer. `read_blocks` and `write_blocks` move pages on their own: a block is
all of one page, over all layers of its group, in one array of bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from kvjax.cache.pool import Pool, first_array
from kvjax.cache.spec import CacheSpec
from kvjax.cache.types import IndexSpec, LatentPages, LayerCache, PagedKV, SlotLayer
from kvjax.cache.writes import seal

PIECE = 16
"""Pages copied in one call: 117 MB for a 7B model."""

Stored = list[Mapping[str, np.ndarray]]
"""For each layer, `stored_arrays` of a sequence's pages in logical order, or of its row of state."""


def stored_arrays(layer: LayerCache | None) -> dict[str, Array]:
    """The arrays of a layer that belong to sequences, by name; none for a layer that reads another's pages. The first axis is pages, or
    rows of state. Indexes over keys are left out, because they are a function of the keys. A lightning indexer's keys are included: they do
    not follow from the latents."""
    if layer is None:
        return {}
    if isinstance(layer, SlotLayer):
        return {name: getattr(layer, name) for name in ("start", "inputs", "g", "beta", "corrections", "first")}
    if isinstance(layer, LatentPages):
        return {"k": layer.pages.k, **layer.index}
    return {"k": layer.pages.k, "v": layer.pages.v}


def stored_shapes(spec: CacheSpec, number: int, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `stored_arrays` of so many pages of a layer."""
    sizes = pages, spec.group_of(number).page_size
    return jax.eval_shape(lambda: stored_arrays(spec.layers[number].empty(*sizes)))


def read_pages(pool: Pool, spec: CacheSpec, ids: Mapping[str, Int[np.ndarray, " n"]]) -> Stored:
    """The pages `ids` of each layer group, in host memory. Waits for the device."""
    pool.check()
    paged, rows = _by_kind(spec)
    stored: list[dict[str, np.ndarray]] = [{} for _ in spec.layers]
    for numbers, pieces in ((paged, _pieces(ids, 0, paged, spec)), (rows, _row_pieces(ids, rows, spec))):
        layers = tuple(pool.layers[number] for number in numbers)
        found = [jax.device_get(_gather(layers, tuple(piece[spec.layers[number].group] for number in numbers))) for piece in pieces]
        for place, number in enumerate(numbers):
            count = len(ids[spec.layers[number].group])
            if not count:
                stored[number] = {name: np.zeros(x.shape, x.dtype) for name, x in stored_shapes(spec, number, 0).items()}
                continue
            names = found[0][place]
            stored[number] = {name: np.concatenate([piece[place][name] for piece in found])[:count] for name in names}
    return stored


def write_pages(
    pool: Pool, spec: CacheSpec, ids: Mapping[str, Int[np.ndarray, " n"]], stored: Stored, *, opened: bool, indexes: tuple[IndexSpec, ...]
) -> None:
    """Write the stored arrays of each layer to the pages `ids` of its layer group, and build the indexes of the sealed ones.

    opened: whether the last page is open.
    """
    paged, rows = _by_kind(spec)
    nowhere = max((pool.layers[number].pages.num_pages for number in paged), default=0)
    sealed = {name: np.where(np.arange(len(group)) < len(group) - opened, group, nowhere) for name, group in ids.items()}
    for number, (piece, closed) in enumerate(zip(_pieces(ids, nowhere, paged, spec), _pieces(sealed, nowhere, paged, spec), strict=True)):
        part = slice(number * PIECE, (number + 1) * PIECE)
        values = [{name: _padded(x[part]) for name, x in stored[layer].items()} for layer in paged]
        places = [tuple(of[spec.layers[layer].group] for layer in paged) for of in (piece, closed)]
        pool.run(_scatter, pool.layers, *places, values, numbers=paged, indexes=indexes)
    for piece in _row_pieces(ids, rows, spec):
        place = tuple(piece[spec.layers[layer].group] for layer in rows)
        pool.run(_scatter, pool.layers, place, place, [stored[layer] for layer in rows], numbers=rows, indexes=())


Block = UInt8[Array, " bytes"]
"""One page of a layer group, or one sequence's row of state: the bytes of `stored_arrays` of every layer that holds it, one after the
other. Wider words, which need no conversion, were slower (docs/tiers.md)."""


def block_bytes(spec: CacheSpec, group: str) -> int:
    """Bytes of a block."""
    return sum(map(_size, _arrays_of(spec, _holding(spec, group))))


def read_blocks(pool: Pool, spec: CacheSpec, group: str, ids: Sequence[int]) -> list[Block]:
    """The pages `ids` of a layer group, each as a block on the device. Does not wait for the device."""
    pool.check()
    layers = tuple(pool.layers[number] for number in _holding(spec, group))
    found: list[Block] = []
    for piece in _blocks_of(ids, 0):
        found += _pack(layers, piece)
    return found[: len(ids)]


def write_blocks(
    pool: Pool, spec: CacheSpec, group: str, ids: Sequence[int], blocks: Sequence[Block], *, indexes: tuple[IndexSpec, ...]
) -> None:
    """Write blocks of sealed pages, or of rows of state, to the pages `ids` of their layer group, and build the pages' indexes. Blocks may
    be in any memory."""
    (device,) = first_array(pool.layers).devices()
    numbers = _holding(spec, group)
    nowhere = len(next(iter(stored_arrays(pool.layers[numbers[0]]).values())))
    for place, piece in enumerate(_blocks_of(ids, nowhere)):
        given = tuple(blocks[place * PIECE : (place + 1) * PIECE])
        given = tuple(jax.device_put(given, jax.sharding.SingleDeviceSharding(device)))
        given += given[-1:] * (len(piece) - len(given))  # of pages that are nowhere
        kinds = {"numbers": numbers, "indexes": indexes, "shapes": _arrays_of(spec, numbers)}
        pool.run(_unpack, pool.layers, piece, given, **kinds)


def _blocks_of(ids: Sequence[int], fill: int) -> Iterator[Int[np.ndarray, " n"]]:
    """Ids in rows of PIECE, the last one padded; a row of one where there is one."""
    for start in range(0, len(ids), PIECE):
        row = np.full(1 if len(ids) == 1 else PIECE, fill, np.int32)
        piece = ids[start : start + PIECE]
        row[: len(piece)] = piece
        yield row


def _holding(spec: CacheSpec, group: str) -> tuple[int, ...]:
    """Numbers of the group's layers that have pages, or rows, of their own."""
    return tuple(number for number in spec.layers_of(group) if spec.layers[number].share_with is None)


Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Of the arrays of a block, in order: name, shape and dtype."""


def _arrays_of(spec: CacheSpec, numbers: tuple[int, ...]) -> Shapes:
    kinds = [stored_shapes(spec, number, 1) for number in numbers]
    return tuple((name, each.shape[1:], each.dtype.name) for layer in kinds for name, each in sorted(layer.items()))


def _size(array: tuple[str, tuple[int, ...], str]) -> int:
    _, shape, dtype = array
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _by_kind(spec: CacheSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the layers with pages of their own, and of those with rows of state."""
    return spec.holding, tuple(number for number in range(len(spec.layers)) if number not in spec.paged)


def _row_pieces(ids: Mapping[str, Int[np.ndarray, " n"]], rows: tuple[int, ...], spec: CacheSpec) -> list[dict[str, Int[np.ndarray, " 1"]]]:
    """The row of state of each group that has one: one piece, or none for a sequence without a row."""
    named = {spec.layers[number].group for number in rows}
    return [{name: ids[name] for name in named}] if named and all(len(ids[name]) for name in named) else []


def _pieces(
    ids: Mapping[str, Int[np.ndarray, " n"]], fill: int, layers: tuple[int, ...], spec: CacheSpec
) -> list[dict[str, Int[np.ndarray, " PIECE"]]]:
    """The ids of the layers' groups in rows of PIECE, padded."""
    own = {name: ids[name] for name in dict.fromkeys(spec.layers[number].group for number in layers)}
    count = -(-max((len(group) for group in own.values()), default=0) // PIECE)
    pieces: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name, group in own.items():
        rows = np.full(count * PIECE, fill, np.int32)
        rows[: len(group)] = group
        for piece, row in zip(pieces, rows.reshape(count, PIECE), strict=True):
            piece[name] = row
    return pieces


def _padded(pages: Float[np.ndarray, "n K P D"]) -> Float[np.ndarray, "PIECE K P D"]:
    filled = np.zeros((PIECE, *pages.shape[1:]), pages.dtype)
    filled[: len(pages)] = pages
    return filled


@jax.jit
def _gather(layers: tuple[LayerCache, ...], ids: tuple[Int[Array, " n"], ...]) -> list[dict[str, Array]]:
    return [{name: x[own] for name, x in stored_arrays(layer).items()} for layer, own in zip(layers, ids, strict=True)]


@jax.jit
def _pack(layers: tuple[LayerCache, ...], ids: Int[Array, " n"]) -> tuple[Block, ...]:
    parts = [x[ids] for layer in layers for _, x in sorted(stored_arrays(layer).items())]
    rows = jnp.concatenate([lax.bitcast_convert_type(part, jnp.uint8).reshape(len(ids), -1) for part in parts], axis=1)
    return tuple(rows[place] for place in range(len(ids)))


@functools.partial(jax.jit, static_argnames=("numbers", "indexes", "shapes"), donate_argnames="layers")
def _unpack(
    layers: tuple[LayerCache, ...],
    ids: Int[Array, " n"],
    blocks: tuple[Block, ...],
    *,
    numbers: tuple[int, ...],
    indexes: tuple[IndexSpec, ...],
    shapes: Shapes,
) -> tuple[LayerCache, ...]:
    """`layers` with the blocks written to the pages `ids` of the layers `numbers`, and their indexes built. DONATES layers."""
    rows, parts, start = jnp.stack(blocks), [], 0
    for array in shapes:
        name, shape, dtype = array
        width = jnp.dtype(dtype).itemsize
        part = rows[:, start : start + _size(array)].reshape(len(blocks), *shape, *([width] if width > 1 else []))
        parts.append((name, lax.bitcast_convert_type(part, jnp.dtype(dtype))))
        start += _size(array)
    values, place = [], 0
    for number in numbers:
        count = len(stored_arrays(layers[number]))
        values.append(dict(parts[place : place + count]))
        place += count
    places = (ids,) * len(numbers)
    return _placed(layers, places, places, values, numbers=numbers, indexes=indexes)


def _placed(
    layers: tuple[LayerCache, ...],
    ids: tuple[Int[Array, " n"], ...],
    sealed: tuple[Int[Array, " n"], ...],
    stored: list[dict[str, Array]],
    *,
    numbers: tuple[int, ...],
    indexes: tuple[IndexSpec, ...],
) -> tuple[LayerCache, ...]:
    """`layers`, with the stored arrays of `numbers` written to `ids` and the indexes of `sealed` pages built. Ids past the pool are
    skipped. A layer builds those of `indexes` that it has."""
    restored = list(layers)
    for number, own, closed, values in zip(numbers, ids, sealed, stored, strict=True):
        layer = layers[number]
        put = {name: x.at[own].set(values[name], mode="drop") for name, x in stored_arrays(layer).items()}
        if isinstance(layer, SlotLayer):
            restored[number] = layer.replace(**put)
            continue
        if isinstance(layer, LatentPages):
            restored[number] = LatentPages(layer.pages.replace(k=put.pop("k")), put)
            continue
        kinds = tuple(spec for spec in indexes if spec.name in layer.index)
        restored[number] = PagedKV(layer.pages.replace(**put), seal(layer.index, put["k"], closed, kinds))
    return tuple(restored)


_scatter = jax.jit(_placed, static_argnames=("numbers", "indexes"), donate_argnames="layers")
"""`_placed`, jitted. DONATES layers."""
