"""Copies pages and states of sequences to host memory and back, as blocks: a block is all of one page, over all layers
of its group, in one array of bytes. A few are copied in one call, so one program serves sequences of every length."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt8

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import LatentPages, LayerCache, OpenRows, SlotLayer, kept_cut
from kvjax.cache.index_spec import IndexSpec, kept_in
from kvjax.cache.pool import Pool, first_array, place_beside
from kvjax.cache.spec import OPEN, CacheSpec, PagedSpec, RecurrentSpec
from kvjax.cache.writes import seal
from kvjax.compilation import program
from pallas_kernels.core.page_format import unpack

IN_FRAMES = ("k", "v", "k_scales", "v_scales")
"""Arrays of pages that lie in frames. Everything else is found by page id."""
OPEN_ROWS = ("open_k", "open_v")
"""Arrays whose rows hold several pages each. Their heads are the axis after these."""
PIECE = 16
"""Pages copied in one call: 117 MB for a 7B model."""


def stored_arrays(layer: LayerCache | None, group: str | None = None) -> dict[str, Array]:
    """The arrays of a layer that belong to sequences, by name; none for a layer that reads another's pages. The first
    axis is pages, or rows of state. Indexes over keys are left out, because they are a function of the keys. A
    lightning indexer's keys are included: they do not follow from the latents. group: `OPEN` for the layer's open rows;
    any other, what it keeps in its own group."""
    if layer is None:
        return {}
    if group == OPEN:
        return dict(zip(OPEN_ROWS, (layer.open.k, layer.open.v), strict=True))
    if isinstance(layer, SlotLayer):
        return {name: getattr(layer, name) for name in ("start", "inputs", "g", "beta", "corrections", "first")}
    if isinstance(layer, LatentPages):
        return {"k": layer.pages.k, **layer.index}
    found = {name: getattr(layer.pages, name) for name in IN_FRAMES}
    return {name: array for name, array in found.items() if array is not None}


def stored_shapes(spec: CacheSpec, group: str, number: int, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `stored_arrays` of so many pages, or rows, that a layer has in a layer group."""
    layer, sizes = spec.layers[number], (pages, spec.group_of(number).page_size)
    more = {"rows": pages} if group == OPEN else {}
    return jax.eval_shape(lambda: stored_arrays(layer.empty(*sizes, **more), group))


Block = UInt8[Array, " bytes"]
"""One page of a layer group, or one sequence's row of state: the bytes of `stored_arrays` of every layer that holds it,
one after the other. Wider words, which need no conversion, were slower
(benchmarks/results/h100/designs-reuse-words.json)."""

Stored = dict[str, UInt8[np.ndarray, "n bytes"]]
"""A sequence in host memory: by layer group, the blocks of its pages in logical order, or of its row of state."""


def block_bytes(spec: CacheSpec, group: str) -> int:
    """Bytes of a block."""
    return sum(map(_size, _arrays_of(spec, group)))


def read_stored(pool: Pool, spec: CacheSpec, ids: Mapping[str, Int[np.ndarray, " n"]]) -> Stored:
    """The pages `ids` of each layer group, in host memory. The device holds copies of few of them at a time: it makes
    those of the next pages while these are copied. Waits for it."""
    pool.check()
    stored = {name: np.empty((len(pages), block_bytes(spec, name)), np.uint8) for name, pages in ids.items()}
    starts = [(name, start) for name, pages in ids.items() for start in range(0, len(pages), PIECE)]
    coming: deque[list[Block]] = deque()
    for number, (name, start) in enumerate(starts):
        for other, first in starts[number + len(coming) : number + 2]:
            coming.append(read_blocks(pool, spec, other, ids[other][first : first + PIECE]))
        for place, block in enumerate(jax.device_get(coming.popleft()), start):
            stored[name][place] = block
    return stored


def arrays_of_rows(spec: CacheSpec, group: str, rows: UInt8[np.ndarray, "n bytes"]) -> dict[int, dict[str, np.ndarray]]:
    """What blocks of a layer group hold: for each layer, its `stored_arrays`, of as many pages as there are blocks."""
    found: dict[int, dict[str, np.ndarray]] = {}
    start = 0
    for number in _holding(spec, group):
        found[number] = {}
        for array in _arrays_of(spec, group, (number,)):
            name, shape, dtype = array
            part = np.ascontiguousarray(rows[:, start : start + _size(array)])
            found[number][name] = part.view(jnp.dtype(dtype)).reshape(len(rows), *shape)
            start += _size(array)
    return found


def from_mesh(spec: CacheSpec, tensor: int, stored: Stored) -> Stored:
    """Blocks of a mesh as those of one device, so that a file fits every mesh: each KV head once, heads in their own
    order. spec: of one device. tensor: over how many devices heads are split."""
    return {name: _converted(spec.on_mesh(tensor), name, rows, functools.partial(_gathered, spec, tensor)) for name, rows in stored.items()}


def to_mesh(spec: CacheSpec, tensor: int, stored: Stored) -> Stored:
    """The reverse of `from_mesh`."""
    return {name: _converted(spec, name, rows, functools.partial(_dealt, spec, tensor)) for name, rows in stored.items()}


def _converted(spec: CacheSpec, group: str, rows: UInt8[np.ndarray, "n bytes"], change: Callable) -> UInt8[np.ndarray, "n bytes"]:
    """Blocks whose arrays are changed, each by its layer's number and its name."""
    arrays = arrays_of_rows(spec, group, rows)
    parts = [change(number, name, array) for number, named in arrays.items() for name, array in sorted(named.items())]
    return np.concatenate([np.ascontiguousarray(part).reshape(len(rows), -1).view(np.uint8) for part in parts], axis=1)


def _gathered(spec: CacheSpec, tensor: int, number: int, name: str, array: np.ndarray) -> np.ndarray:
    layer = spec.layers[number]
    if isinstance(layer, PagedSpec):
        copies = layer.on_mesh(tensor).copies
        return array[:, :, ::copies] if name in OPEN_ROWS else array[:, ::copies]
    if isinstance(layer, RecurrentSpec) and name == "inputs":
        return array[..., np.argsort(layer.channel_order(tensor))]
    return array


def _dealt(spec: CacheSpec, tensor: int, number: int, name: str, array: np.ndarray) -> np.ndarray:
    layer = spec.layers[number]
    if isinstance(layer, PagedSpec):
        return np.repeat(array, layer.on_mesh(tensor).copies, axis=2 if name in OPEN_ROWS else 1)
    if isinstance(layer, RecurrentSpec) and name == "inputs":
        return array[..., layer.channel_order(tensor)]
    return array


def read_blocks(pool: Pool, spec: CacheSpec, group: str, ids: Sequence[int] | Int[np.ndarray, " n"]) -> list[Block]:
    """The pages `ids` of a layer group, each as a block on the device, or on a device of a mesh. Does not wait for the
    device."""
    pool.check()
    layers = tuple(pool.layers[number] for number in _holding(spec, group))
    found: list[Block] = []
    for piece, frames in zip(_pieces(ids, 0), _pieces(pool.frames_of(group, ids), 0), strict=True):
        blocks = _pack(layers, piece, frames, group=group, shards=pool.shards)
        found += blocks if pool.shards.mesh is None else [block.addressable_data(0) for block in blocks]
        pool.launched = found[-1]  # copies beside the programs must not overwrite what this one still reads
    return found[: len(ids)]


def write_blocks(
    pool: Pool,
    spec: CacheSpec,
    group: str,
    ids: Sequence[int] | Int[np.ndarray, " n"],
    blocks: Sequence[Block] | UInt8[np.ndarray, "n bytes"],
    *,
    indexes: tuple[IndexSpec, ...],
    opened: bool = False,
) -> None:
    """Write blocks to the pages `ids` of their layer group, or to rows of state, and build the indexes of the sealed
    pages.

    blocks: in any memory. opened: whether the last page is open.
    """
    pool.bind({group: ids})
    beside, committed = place_beside(pool.layers), first_array(pool.layers).committed
    numbers = _holding(spec, group)
    nowhere = len(next(iter(stored_arrays(pool.layers[numbers[0]], group).values())))
    kinds = {"group": group, "numbers": numbers, "indexes": indexes, "shapes": _arrays_of(spec, group), "shards": pool.shards}
    sealed = np.array(ids, np.int32)
    sealed[len(ids) - opened :] = nowhere
    rows = (_pieces(each, nowhere) for each in (ids, pool.frames_of(group, ids), sealed))
    for place, pieces in enumerate(zip(*rows, strict=True)):
        piece = pieces[0]
        given = tuple(blocks[place * PIECE : (place + 1) * PIECE])
        given = _put(given, beside, committed)
        given += given[-1:] * (len(piece) - len(given))  # of pages that are nowhere
        pool.run(_unpack, pool.layers, *pieces, given, **kinds)


def _put(blocks: tuple[Block | np.ndarray, ...], beside: jax.sharding.Sharding, committed: bool) -> tuple[Block, ...]:
    """Blocks on every device of a sharding. With several processes, `device_put` would compare the blocks of all of
    them first.

    committed: whether the pool's arrays are. If they are not, blocks of the host are not either: a program's results
    are committed if one argument is, and every program that reads these pages would be compiled again.
    """
    if not beside.is_fully_addressable:
        return tuple(jax.make_array_from_callback(block.shape, beside, np.asarray(block).__getitem__) for block in blocks)
    if committed or not all(isinstance(block, np.ndarray) for block in blocks):
        return tuple(jax.device_put(blocks, beside))
    (device,) = beside.device_set
    with jax.default_device(device):
        return tuple(jax.device_put(blocks))


def _pieces(ids: Sequence[int] | Int[np.ndarray, " n"], fill: int) -> Iterator[Int[np.ndarray, " n"]]:
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


@functools.lru_cache(maxsize=256)  # to find shapes takes a millisecond for each layer
def _arrays_of(spec: CacheSpec, group: str, numbers: tuple[int, ...] | None = None) -> Shapes:
    """Of blocks of a layer group, or of what these layers of it hold there."""
    kinds = [stored_shapes(spec, group, number, 1) for number in numbers or _holding(spec, group)]
    return tuple((name, each.shape[1:], each.dtype.name) for layer in kinds for name, each in sorted(layer.items()))


def _size(array: tuple[str, tuple[int, ...], str]) -> int:
    _, shape, dtype = array
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _places(layer: LayerCache, name: str, ids: Int[Array, " n"], frames: Int[Array, " n"]) -> Int[Array, " n"]:
    """Where an array of a layer has pages."""
    return frames if name in IN_FRAMES and not isinstance(layer, SlotLayer) else ids


@functools.partial(program, static_argnames=("group", "shards"))
def _pack(
    layers: tuple[LayerCache, ...], ids: Int[Array, " n"], frames: Int[Array, " n"], *, group: str, shards: Shards
) -> tuple[Block, ...]:
    """Blocks of pages; on a mesh, the same on every device, so that every process has them."""
    parts = [x[_places(layer, name, ids, frames)] for layer in layers for name, x in sorted(stored_arrays(layer, group).items())]
    rows = jnp.concatenate([lax.bitcast_convert_type(part, jnp.uint8).reshape(len(ids), -1) for part in parts], axis=1)
    rows = shards.constrained(rows)
    return tuple(rows[place] for place in range(len(ids)))


@functools.partial(program, static_argnames=("group", "numbers", "indexes", "shapes", "shards"), donate_argnames="layers")
def _unpack(
    layers: tuple[LayerCache, ...],
    ids: Int[Array, " n"],
    frames: Int[Array, " n"],
    sealed: Int[Array, " n"],
    blocks: tuple[Block, ...],
    *,
    group: str,
    numbers: tuple[int, ...],
    indexes: tuple[IndexSpec, ...],
    shapes: Shapes,
    shards: Shards = ONE_DEVICE,
) -> tuple[LayerCache, ...]:
    """`layers` with the blocks written to the pages `ids`, which lie in `frames`, of the layers `numbers`, and the
    indexes of the `sealed` ones built. Ids past the pool are skipped. A layer builds those of `indexes` that it has.
    DONATES layers."""
    rows, parts, start = jnp.stack(blocks), [], 0
    for array in shapes:
        name, shape, dtype = array
        width = jnp.dtype(dtype).itemsize
        part = rows[:, start : start + _size(array)].reshape(len(blocks), *shape, *([width] if width > 1 else []))
        parts.append((name, lax.bitcast_convert_type(part, jnp.dtype(dtype))))
        start += _size(array)
    filled, place = list(layers), 0
    for number in numbers:
        layer, own = layers[number], stored_arrays(layers[number], group)
        values = dict(parts[place : place + len(own)])
        place += len(own)
        put = {name: x.at[_places(layer, name, ids, frames)].set(values[name], mode="drop") for name, x in own.items()}
        if group == OPEN:
            filled[number] = layer.replace(open=OpenRows(*(put[name] for name in OPEN_ROWS)))
        elif isinstance(layer, SlotLayer):
            filled[number] = layer.replace(**put)
        elif isinstance(layer, LatentPages):
            filled[number] = LatentPages(layer.pages.replace(k=put.pop("k")), put)
        else:
            kinds = kept_in(layer.index, indexes)
            packed, keys = layer.pages.k_packed, values["k"]
            keys = keys if packed is None else unpack(packed, keys, values.get("k_scales"))
            filled[number] = layer.replace(pages=layer.pages.replace(**put), index=seal(layer.index, keys, sealed, kinds))
    return kept_cut(shards, tuple(filled))
