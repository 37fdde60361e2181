"""append_tokens in Pallas Mosaic GPU (Hopper), for decode: one launch, a CTA per sequence and KV head, pool and indexes in place.

A CTA writes the head's new rows. If one of them is the last of its page, it reads the page's keys back and reduces them, 16 bytes at a
time, to the head's part of every index. Indexes that hold codes of keys need a second pass (`coded_rows`). It touches nothing else of the
pool.

Memory traffic: the new rows, read and written once; for a page that fills, its keys once per index, twice for one of codes (all but the
first time from the cache).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_tokens import coded_rows
from pallas_kernels.append_tokens.api import Call, Kinds
from pallas_kernels.hopper import lane_pairs, lanes
from pallas_kernels.page_index import CODED
from pallas_kernels.pages import unlike

THREADS = 128
MOST_TOKENS = 64
UNROLLED = 8
"""Loads of a page's keys that a thread has in flight."""

PARTIAL_WORDS = THREADS * 16
"""Words of shared memory: per thread, eight columns of two rows."""

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
    if reason := unlike(pages):
        return reason
    if k.shape[1] > MOST_TOKENS:
        return f"it is for decode steps, T must be at most {MOST_TOKENS}, got {k.shape[1]}"
    if pages.head_dim * pages.k.dtype.itemsize % 16:
        return f"a token's keys must be a multiple of 16 bytes, got head dim {pages.head_dim} of {pages.k.dtype}"
    for name, kind, _ in call.kinds:
        if kind in CODED and (reason := coded_rows.unsupported(kind, pages.head_dim, pages.k.dtype.name)):
            return f"index {name!r}: {reason}"
    return None


def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    reason = unsupported(call, pages, indexes, k, v, positions, valid, table, frames)
    if reason:
        raise NotImplementedError(f"append_tokens 'mosaic_gpu': {reason}")
    sizes = (pages.kv_heads, pages.page_size, pages.head_dim, k.shape[1], table.shape[1])
    named = {name: indexes[name] for name, _, _ in call.kinds}
    s = Shape(*sizes, pages.k_format.codes, call.kinds)
    tables = (table,) if frames is None else (table, frames)
    pages, built = _append(s, pages, named, k, v, positions, valid, tables)
    return pages, dict(indexes) | built


@functools.partial(jax.jit, static_argnames="s")
def _append(s: Shape, pages, indexes, k, v, positions, valid, tables):
    lanes.check_version()
    # References are updated in place: the compiled call returns its operands as its results.
    k_pages, v_pages, *built = refs = [jax.new_ref(x) for x in (pages.k, pages.v, *(indexes[name] for name, _, _ in s.kinds))]
    k, v = k.astype(s.dtype), v.astype(s.dtype)
    places = jnp.where(valid, positions, -1)

    def append_kernel(k_ref, v_ref, places_ref, *rest):
        table_refs, (k_pages_ref, v_pages_ref, *index_refs, partial_s) = rest[: len(tables)], rest[len(tables) :]

        @lanes.stage(unit=lax.axis_index("unit"))
        def run(arrays, partial_s, unit):
            places_ref, table_refs, tokens, pools, index_refs = arrays
            row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
            _write(s, row, head, places_ref, table_refs, tokens, pools)
            if s.kinds:
                _seal(s, row, head, places_ref, table_refs, pools[0], index_refs, partial_s)

        run((places_ref, table_refs, (k_ref, v_ref), (k_pages_ref, v_pages_ref), tuple(index_refs)), partial_s)

    plgpu.kernel(
        append_kernel,
        grid=(k.shape[0] * s.num_kv_heads,),
        grid_names=("unit",),
        scratch_types=[plgpu.SMEM((PARTIAL_WORDS,), jnp.int32)],
    )(k, v, places, *tables, *refs)
    k_pages, v_pages, *built = (jax.freeze(ref) for ref in refs)
    return pages.replace(k=k_pages, v=v_pages), {name: index for (name, _, _), index in zip(s.kinds, built, strict=True)}


def _page(s: Shape, row, place, table_refs):
    """Id and frame of a token's page, both -1 unless it has both. place: the token's position, -1 for none. table_refs: of ids and of
    frames, or one table that is both."""
    logical = place // s.page_size
    inside = (place >= 0) & (logical < s.table_width)
    entry = row * s.table_width + lanes.where(inside, logical, 0)
    found = [lanes.load_global(ref, entry) for ref in table_refs]
    for number in found:
        inside = inside & (number >= 0)
    return lanes.where(inside, found[0], -1), lanes.where(inside, found[-1], -1)


def _write(s: Shape, row, head, places_ref, table_refs, tokens, pools) -> None:
    """Write the head's new rows to their pages. A thread moves 16 bytes of keys and of values at a time."""
    count = s.num_tokens * s.pieces

    def move(i):
        t, piece = i // s.pieces, i % s.pieces
        source = ((row * s.num_tokens + t) * s.num_kv_heads + head) * s.row_bytes + piece * 16
        moved = [lanes.load_global_16_bytes(ref, source) for ref in tokens]  # in flight while the page is looked up
        place = lanes.load_global(places_ref, row * s.num_tokens + t)
        _, frame = _page(s, row, place, table_refs)
        with lanes.when(frame >= 0):
            target = place % s.page_size * s.row_bytes + piece * 16
            for ref, words in zip(pools, moved, strict=True):
                lanes.store_global_16_bytes(ref, target, *words, block=frame * s.num_kv_heads + head, block_bytes=s.page_bytes)

    def turn(start):
        i = lanes.thread() + start
        with lanes.when(i < count):
            move(i)
        return []

    lanes.loop(count, [], turn, step=THREADS)


def _seal(s: Shape, row, head, places_ref, table_refs, k_pages_ref, index_refs, partial_s) -> None:
    """Build the head's part of the indexes of each page whose last token is new. Every condition here is the same for all threads."""
    lanes.cta_barrier(THREADS)  # the new rows are written

    def token(t):
        place = lanes.load_global(places_ref, row * s.num_tokens + t)
        with lanes.when((place >= 0) & (place % s.page_size == s.page_size - 1)):
            page, frame = _page(s, row, place, table_refs)
            with lanes.when(page >= 0):
                at = [number * s.num_kv_heads + head for number in (page, frame)]
                for (_, kind, block_size), index_ref in zip(s.kinds, index_refs, strict=True):
                    build = _build_codes if kind in CODED else _build_rows
                    build(s, kind, block_size, *at, k_pages_ref, index_ref, partial_s)
        return []

    lanes.loop(s.num_tokens, [], token)


def _build_rows(s: Shape, kind: str, block_size: int, at, at_frame, k_pages_ref, index_ref, partial_s) -> None:
    """Build one index of one page and head: number `at` among all pages' heads, its keys number `at_frame` among all frames' heads."""
    _reduce(s, kind, block_size, at_frame, k_pages_ref, partial_s, functools.partial(_store, s, kind, block_size, at, index_ref))


def _build_codes(s: Shape, kind: str, block_size: int, at, at_frame, k_pages_ref, index_ref, partial_s) -> None:
    """The same for an index of codes."""
    rows = coded_rows.CodedRows(kind, block_size, s.page_size, s.head_dim, s.dtype)
    _reduce(s, "bounds", block_size, at_frame, k_pages_ref, partial_s, functools.partial(rows.store_levels, index_ref, at))
    if s.strands(block_size) == 1:  # otherwise there was a barrier
        lanes.cta_barrier(THREADS)
    rows.store_codes(index_ref, at, k_pages_ref, at_frame, THREADS)


def _reduce(s: Shape, kind: str, block_size: int, at_frame, k_pages_ref, partial_s, store) -> None:
    """Reduce the keys of one page and head, number `at_frame` among all frames' heads, and call store(block, piece, results) for each piece
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
            partial = _reduce_tokens(s, kind, per_strand, at_frame, first, k_pages_ref)
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


def _reduce_tokens(s: Shape, kind: str, count: int, at, first, k_pages_ref):
    """Partial result of a piece of `count` consecutive tokens: float32, the piece's columns for each row of the index."""

    def numbers(offset):
        words = lanes.load_written_16_bytes(k_pages_ref, offset, block=at, block_bytes=s.page_bytes)
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
