"""append_tokens in Pallas Mosaic GPU (Hopper), for decode: one launch, a CTA per sequence and KV head, pool and indexes
in place.

A CTA writes the head's new rows. If one of them is the last of its page, it reads the page's keys back and reduces
them, 16 bytes at a time, to the head's part of every index. Indexes that hold codes of keys need a second pass
(`coded_rows`). Packed pages are written to their open rows; one that fills is packed from there (`packing`), and its
indexes are built from shared memory. It touches nothing else of the pool.

Memory traffic: the new rows, read and written once; for a page that fills, its keys once per index, twice for one of
codes (all but the first time from the cache). Of packed pages, for one that fills: its keys and values read once, and
their codes written once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.append_tokens import coded_rows, packing
from pallas_kernels.cache.append_tokens.api import Call, Kinds
from pallas_kernels.cache.append_tokens.packing import Packing
from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import PageFormat
from pallas_kernels.core.pages import unlike
from pallas_kernels.hopper.threads import lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.page_index import CODED

THREADS = 128
MAX_TOKENS = 64
UNROLLED = 8
"""Loads of a page's keys that a thread has in flight."""

PARTIAL_WORDS = THREADS * 16
"""Words of shared memory: per thread, eight columns of two rows; or, per warp, what a channel of a token needs."""

IDENTITY = {"bounds": (float("-inf"), float("inf")), "mean": (0.0,)}
"""Start value of the reduction for each row of an index."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on."""

    num_kv_heads: int
    page_size: int
    head_dim: int
    num_tokens: int
    table_width: int
    dtype: str
    kinds: Kinds
    formats: tuple[PageFormat | None, PageFormat | None] = (None, None)
    """Of keys and of values; both None: pages are not packed."""

    @property
    def packed(self) -> bool:
        """Whether pages that fill are packed."""
        return self.formats != (None, None)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys."""
        return self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes of a token's keys."""
        return self.row_bytes // 16

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's keys, of one head."""
        return self.page_size * self.row_bytes

    @property
    def columns(self) -> int:
        """Numbers in a piece."""
        return self.head_dim // self.pieces

    def strands(self, block_size: int) -> int:
        """Threads that share a piece of a block's columns, each with equally many tokens: a power of two."""
        strands, items = 1, self.page_size // block_size * self.pieces
        while block_size % (2 * strands) == 0 and 2 * strands * items <= THREADS:
            strands *= 2
        return strands


def unsupported(call: Call, pages, indexes, k, v, positions, valid, table, frames) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if reason := _unpacked(pages) if pages.packed else unlike(pages):
        return reason
    if k.shape[1] > MAX_TOKENS:
        return f"it is for decode steps, T must be at most {MAX_TOKENS}, got {k.shape[1]}"
    dtype = pages.k_format.dtype
    if pages.head_dim * dtype.itemsize % 16:
        return f"a token's keys must be a multiple of 16 bytes, got head dim {pages.head_dim} of {dtype}"
    for name, kind, _ in call.kinds:
        if kind in CODED and (reason := coded_rows.unsupported(kind, pages.head_dim, dtype.name)):
            return f"index {name!r}: {reason}"
    return None


def _unpacked(pages) -> str | None:
    """Why this kernel cannot pack these pages, or None if it can."""
    opened, numbers = pages.open, {pages.k_format.dtype, pages.v_format.dtype, pages.open.k.dtype}
    if opened.v is None or opened.k.shape != opened.v.shape:
        return f"it packs k and v of one shape; got {dispatch.signature(**pages.arrays)}"
    if numbers != {opened.v.dtype} or opened.v.dtype.itemsize != 2:
        return f"it packs numbers of 16 bits that are read in the same dtype; got {dispatch.signature(**pages.arrays)}"
    for format in (pages.k_packed, pages.v_packed):
        if reason := packing.unsupported(format, pages.page_size, pages.head_dim):
            return reason
    words = PARTIAL_WORDS + pages.page_size * pages.head_dim // 2
    if words > lanes.shared_words():
        return f"a page's keys take {words} words of shared memory, at most {lanes.shared_words()} are available"
    return None


def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens`; takes no config."""
    reason = unsupported(call, pages, indexes, k, v, positions, valid, table, frames)
    if reason:
        raise NotImplementedError(f"append_tokens 'mosaic_gpu': {reason}")
    sizes = (pages.kv_heads, pages.page_size, pages.head_dim, k.shape[1], table.shape[1])
    named = {name: indexes[name] for name, _, _ in call.kinds}
    s = Shape(*sizes, pages.k_format.dtype.name, call.kinds, (pages.k_packed, pages.v_packed))
    tables = (table,) if frames is None else (table, frames)
    pages, built = _append(s, pages, named, k, v, positions, valid, tables)
    return pages, dict(indexes) | built


@functools.partial(jax.jit, static_argnames="s")
def _append(s: Shape, pages, indexes, k, v, positions, valid, tables):
    lanes.check_version()
    # References are updated in place: the compiled call returns its operands as its results.
    rows, pool = pages, {}
    if s.packed:
        rows, pool = pages.open, {name: x for name, x in pages.arrays.items() if name in POOL and x is not None}
    written = {"rows": (rows.k, rows.v), "indexes": tuple(indexes[name] for name, _, _ in s.kinds), "pool": pool}
    refs, structure = jax.tree.flatten(jax.tree.map(jax.new_ref, written))
    read = {"tokens": (k.astype(s.dtype), v.astype(s.dtype)), "places": jnp.where(valid, positions, -1), "tables": tables}
    if s.packed:
        read |= {"row_of": pages.open.row_of, "divisors": jnp.array([packing.divisor(each) for each in s.formats], jnp.float32)}
    operands, order = jax.tree.flatten(read)

    def append_kernel(*given):
        of_read = jax.tree.unflatten(order, given[: len(operands)])
        of_written = jax.tree.unflatten(structure, given[len(operands) : len(operands) + len(refs)])

        @lanes.stage(unit=lax.axis_index("unit"))
        def run(arrays, scratch, unit):
            _run(s, *arrays, *scratch, unit // s.num_kv_heads, unit % s.num_kv_heads)

        run((of_read, of_written), tuple(given[len(operands) + len(refs) :]))

    scratch = [PARTIAL_WORDS, *[s.page_bytes // 4] * bool(s.packed and s.kinds)]
    plgpu.kernel(
        append_kernel,
        grid=(k.shape[0] * s.num_kv_heads,),
        grid_names=("unit",),
        scratch_types=[plgpu.SMEM((words,), jnp.int32) for words in scratch],
    )(*operands, *refs)
    found = jax.tree.unflatten(structure, [jax.freeze(ref) for ref in refs])
    rows = rows.replace(k=found["rows"][0], v=found["rows"][1])
    built = {name: index for (name, _, _), index in zip(s.kinds, found["indexes"], strict=True)}
    return pages.replace(open=rows, **found["pool"]) if s.packed else rows, built


POOL = ("k", "v", "k_scales", "v_scales")
"""The arrays of packed pages that a page that fills goes to."""


def _run(s: Shape, read, written, partial_s, *rest) -> None:
    """All that a CTA does. rest: shared memory for a page's keys, of packed pages with indexes; then row and head."""
    *keys_s, row, head = rest
    places_ref, table_refs, row_of_ref = read["places"], read["tables"], read.get("row_of")
    _write(s, row, head, places_ref, table_refs, row_of_ref, read["tokens"], written["rows"])
    if s.packed:
        keys_at = functools.partial(_pack, s, head, read["divisors"], written, partial_s, *keys_s)
    else:
        keys_at = functools.partial(_in_pool, s, written["rows"][0], head)
    if s.kinds or s.packed:
        _seal(s, row, head, places_ref, table_refs, row_of_ref, keys_at, written["indexes"], partial_s)


@dataclasses.dataclass(frozen=True)
class InPool:
    """The keys of one page and head, in global memory, as this CTA left them before its last barrier."""

    s: Shape
    ref: Any
    head: Scalar
    frame: Scalar

    def load_16_bytes(self, offset_bytes: Scalar) -> list[Scalar]:
        """Four words, at a multiple of 16 bytes."""
        at = self.frame * self.s.num_kv_heads + self.head
        return lanes.load_written_16_bytes(self.ref, offset_bytes, block=at, block_bytes=self.s.page_bytes)

    def load_word(self, number: Scalar) -> Scalar:
        """One word."""
        at = self.frame * self.s.num_kv_heads + self.head
        return lanes.load_global_now(lanes.part(self.ref, lanes.i32(0), at, self.s.page_bytes), number)


@dataclasses.dataclass(frozen=True)
class InShared:
    """The same in shared memory."""

    ref: Any

    def load_16_bytes(self, offset_bytes: Scalar) -> list[Scalar]:
        """Four words, at a multiple of 16 bytes."""
        return lanes.load_shared(self.ref, offset_bytes // 4, count=4)

    def load_word(self, number: Scalar) -> Scalar:
        """One word."""
        return lanes.load_shared(self.ref, number)[0]


def _in_pool(s: Shape, k_pages_ref, head, frame, _) -> InPool:
    """The keys of one page and head where tokens are written."""
    return InPool(s, k_pages_ref, head, frame)


def _pack(s: Shape, head, divisors_ref, written, partial_s, *places) -> InShared | None:
    """Pack one page and head; returns its keys as they are read, if there is shared memory for them. places: that
    memory, if there is; the page's frame, and its open row."""
    *keys_s, frame, row = places
    at, at_row = (number * s.num_kv_heads + head for number in (frame, row))
    lanes.cta_barrier(THREADS)  # the new rows are written; nobody reads the keys of the page before
    for n, (name, format) in enumerate(zip("kv", s.formats, strict=True)):
        codes_ref, scales_ref = (written["pool"].get(key) for key in (name, f"{name}_scales"))
        most = lanes.load_global(divisors_ref, n, "f32")
        to = keys_s[0] if keys_s and name == "k" else None
        packed = Packing(format, s.page_size, s.head_dim, s.dtype)
        packed.pack(written["rows"][n], at_row, codes_ref, scales_ref, at, most, partial_s, to, THREADS)
    lanes.cta_barrier(THREADS)  # the keys are in shared memory
    return InShared(keys_s[0]) if keys_s else None


def _page(s: Shape, row, place, table_refs, row_of_ref):
    """Id and frame of a token's page, and where it is written: its open row, or the frame where there is none; all -1
    unless it has all. place: the token's position, -1 for none. table_refs: of ids and of frames, or one table that is
    both. row_of_ref: rows of frames, or None."""
    logical = place // s.page_size
    inside = (place >= 0) & (logical < s.table_width)
    entry = row * s.table_width + lanes.where(inside, logical, 0)
    found = [lanes.load_global(ref, entry) for ref in table_refs]
    for number in found:
        inside = inside & (number >= 0)
    page, frame = found[0], found[-1]
    if row_of_ref is None:
        return [lanes.where(inside, number, -1) for number in (page, frame, frame)]
    open_row = lanes.load_global(row_of_ref, lanes.where(inside, frame, 0))
    inside = inside & (open_row >= 0)
    return [lanes.where(inside, number, -1) for number in (page, frame, open_row)]


def _write(s: Shape, row, head, places_ref, table_refs, row_of_ref, tokens, pools) -> None:
    """Write the head's new rows to their pages. A thread moves 16 bytes of keys and of values at a time."""
    count = s.num_tokens * s.pieces

    def move(i):
        t, piece = i // s.pieces, i % s.pieces
        source = ((row * s.num_tokens + t) * s.num_kv_heads + head) * s.row_bytes + piece * 16
        moved = [lanes.load_global_16_bytes(ref, source) for ref in tokens]  # in flight while the page is looked up
        place = lanes.load_global(places_ref, row * s.num_tokens + t)
        *_, to = _page(s, row, place, table_refs, row_of_ref)
        with lanes.when(to >= 0):
            target = place % s.page_size * s.row_bytes + piece * 16
            for ref, words in zip(pools, moved, strict=True):
                lanes.store_global_16_bytes(ref, target, *words, block=to * s.num_kv_heads + head, block_bytes=s.page_bytes)

    def turn(start):
        i = lanes.thread() + start
        with lanes.when(i < count):
            move(i)
        return []

    lanes.loop(count, [], turn, step=THREADS)


def _seal(s: Shape, row, head, places_ref, table_refs, row_of_ref, keys_at, index_refs, partial_s) -> None:
    """Build the head's part of the indexes of each page whose last token is new. keys_at(frame, open row): makes the
    page's keys ready, and returns them. Every condition here is the same for all threads."""
    if not s.packed:  # `_pack` waits itself
        lanes.cta_barrier(THREADS)  # the new rows are written

    def token(t):
        place = lanes.load_global(places_ref, row * s.num_tokens + t)
        with lanes.when((place >= 0) & (place % s.page_size == s.page_size - 1)):
            page, *where = _page(s, row, place, table_refs, row_of_ref)
            with lanes.when(page >= 0):
                keys = keys_at(*where)
                for (_, kind, block_size), index_ref in zip(s.kinds, index_refs, strict=True):
                    build = _build_codes if kind in CODED else _build_rows
                    build(s, kind, block_size, page * s.num_kv_heads + head, keys, index_ref, partial_s)
        return []

    lanes.loop(s.num_tokens, [], token)


def _build_rows(s: Shape, kind: str, block_size: int, at, keys, index_ref, partial_s) -> None:
    """Build one index of one page and head, number `at` among all pages' heads."""
    _reduce(s, kind, block_size, keys, partial_s, functools.partial(_store, s, kind, block_size, at, index_ref))


def _build_codes(s: Shape, kind: str, block_size: int, at, keys, index_ref, partial_s) -> None:
    """The same for an index of codes."""
    rows = coded_rows.CodedRows(kind, block_size, s.page_size, s.head_dim, s.dtype)
    _reduce(s, "bounds", block_size, keys, partial_s, functools.partial(rows.store_levels, index_ref, at))
    if s.strands(block_size) == 1:  # otherwise there was a barrier
        lanes.cta_barrier(THREADS)
    rows.store_codes(index_ref, at, keys.load_word, THREADS)


def _reduce(s: Shape, kind: str, block_size: int, keys, partial_s, store) -> None:
    """Reduce the keys of one page and head, and call store(block, piece, results) for each piece
    of a block. If several threads share a piece, it ends with a barrier."""
    strands = s.strands(block_size)
    per_strand = block_size // strands
    outputs = s.page_size // block_size * s.pieces
    size = len(IDENTITY[kind]) * s.columns

    def turn(start):
        i = lanes.thread() + start
        with lanes.when(i < outputs * strands):
            output, strand = i % outputs, i // outputs
            block, piece = output // s.pieces, output % s.pieces
            first = (block * block_size + strand * per_strand) * s.row_bytes + piece * 16
            partial = _reduce_tokens(s, kind, per_strand, first, keys)
            if strands == 1:
                store(block, piece, partial)
            else:
                for n in range(0, size, 4):
                    lanes.store_shared(partial_s, (strand * (size // 4) + n // 4) * (outputs * 4) + output * 4, *partial[n : n + 4])
        return []

    lanes.loop(outputs * strands, [], turn, step=THREADS)
    if strands > 1:
        lanes.cta_barrier(THREADS)
        output = lanes.thread()
        with lanes.when(output < outputs):

            def of_strand(strand):
                at = [(n // 4 + strand * (size // 4)) * (outputs * 4) + output * 4 for n in range(0, size, 4)]
                return [x for offset in at for x in lanes.load_shared(partial_s, offset, "f32", 4)]

            total = functools.reduce(functools.partial(_combine, kind), [of_strand(strand) for strand in range(strands)])
            store(output // s.pieces, output % s.pieces, total)
        lanes.cta_barrier(THREADS)  # the next index may overwrite the partial results


def _combine(kind: str, a, b):
    """Combine two partial results."""
    if kind == "mean":
        return [x + y for x, y in zip(a, b, strict=True)]
    half = len(a) // 2
    most = [lanes.maximum_or_nan(x, y) for x, y in zip(a[:half], b[:half], strict=True)]
    return most + [lanes.minimum_or_nan(x, y) for x, y in zip(a[half:], b[half:], strict=True)]


def _reduce_tokens(s: Shape, kind: str, count: int, first, keys):
    """Partial result of a piece of `count` consecutive tokens: float32, the piece's columns for each row of the
    index."""

    def numbers(offset):
        words = keys.load_16_bytes(offset)
        values = [lanes.bits(w) for w in words] if s.dtype == "float32" else [x for w in words for x in lane_pairs.unpack(w, s.dtype)]
        return values * len(IDENTITY[kind])

    together = next(n for n in range(min(UNROLLED, count), 0, -1) if count % n == 0)

    def turn(n, *carry):
        found = [numbers(first + (n + i) * s.row_bytes) for i in range(together)]
        return functools.reduce(functools.partial(_combine, kind), found, list(carry))

    start = [lanes.f32(x) for x in IDENTITY[kind] for _ in range(s.columns)]
    return lanes.loop(count, start, turn, step=together)


def _store(s: Shape, kind: str, block_size: int, at, index_ref, block, piece, total) -> None:
    """Store a piece of the index of one page and head, number `at` among all pages' heads."""
    rows = len(IDENTITY[kind])
    if kind == "mean":
        total = [x / block_size for x in total]
    for r in range(rows):
        values = total[r * s.columns :][: s.columns]
        if s.dtype == "float32":
            words = [lanes.bits(x) for x in values]
        else:
            words = [lane_pairs.pack(*values[i : i + 2], s.dtype) for i in range(0, s.columns, 2)]
        offset = (block * rows + r) * s.row_bytes + piece * 16
        index_bytes = s.page_size // block_size * rows * s.row_bytes
        lanes.store_global_16_bytes(index_ref, offset, *words, block=at, block_bytes=index_bytes)
