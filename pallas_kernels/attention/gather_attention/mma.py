"""gather_attention by `hopper.decode.decode_fold`: lists by clusters and spans of keys, as in `listed` and
`mosaic_gpu`.

GPUs without `wgmma` run it over all pages, Hopper GPUs over packed ones.

Each kernel is one stage of single threads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gather_attention import cluster_merge, listed
from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.decode import clusters, decode_fold, packed_operands, split_merge
from pallas_kernels.hopper.decode.decode_fold import KEYS, Shape
from pallas_kernels.hopper.decode.packed_operands import Codes
from pallas_kernels.hopper.decode.wgmma_fold import LOG2E
from pallas_kernels.hopper.threads import lane_pairs, lanes

MAX_STAGES = 3
"""Turns that a warp has in flight, if shared memory has room."""
MAX_PACKED_STAGES = 5
"""The same over packed pages, whose key tiles have fewer bytes, if registers have room for their places."""


def _sizes(q, pages, *, width: int | None, block_size: int, window, sm_scale: float, splits: int, other_words: int, most=2) -> Shape:
    """`stages` is 0 if shared memory cannot hold one key tile of four warps. More warps, up to four times `most`, are
    taken where each has two key tiles."""
    batch, num_queries, num_heads, head_dim = q.shape
    dims = (batch, num_queries, num_heads, pages.kv_heads, head_dim, pages.page_size, block_size, width, window, sm_scale, q.dtype, KEYS)
    codes = [format and Codes(format, head_dim) for format in (pages.k_packed, pages.v_packed)]
    for warpgroups, least in ((3, 2), (2, 2), (1, 1))[3 - most :]:
        s = Shape(*dims, 0, warpgroups, splits, *codes, pages.open is not None)
        room = lanes.shared_words() - other_words - sum((s.scratch_words() | {"ring_s": 0}).values())
        depth = MAX_PACKED_STAGES if pages.packed and s.column_tiles <= 2 else MAX_STAGES
        stages = min(depth, (room // s.warps - s.open_words) // sum(s.slot_words))
        s = dataclasses.replace(s, stages=stages)
        if stages >= least and s.scratch_words()["ring_s"] <= room:
            return s
    return dataclasses.replace(s, stages=0)


def unsupported(call, q, pages) -> str | None:
    """Why this form cannot do a call that `mosaic_gpu` supports, or None if it can."""
    group, most = q.shape[2] // pages.kv_heads, decode_fold.most_rows(q.shape[3], call.window is not None)
    if group > most:
        return f"{reads(pages)} there may be at most {most} query heads of dim {q.shape[3]} per KV head, got {group}"
    if pages.open is not None and call.return_block_lse and q.shape[1] > 1:
        return f"beside open pages it gives the LSE of blocks for one query per row, got {q.shape[1]}"
    one = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[2:]), q.dtype)
    if span_shape(call, one, pages, width=None, splits=1, stages=None).stages == 0:
        return f"packed pages of head dim {pages.head_dim} and open ones leave no shared memory for 16 keys of four warps on this GPU"
    return None


def reads(pages: Pages) -> str:
    """How sentences that say why a call cannot be done begin."""
    return "over packed pages" if pages.packed else "without `wgmma`"


def unlike(pages: Pages) -> str | None:
    """Why packed pages cannot be read, or None if they can."""
    if pages.v is None:
        return f"it reads V from an array of its own, not from the first {pages.value_dim} columns of packed K"
    if pages.head_dim != pages.v_head_dim:
        return f"it reads keys and values of one head dim; got {pages.head_dim} and {pages.v_head_dim}"
    for name, packed, array in (("keys", pages.k_packed, pages.k), ("values", pages.v_packed, pages.v)):
        if packed is not None:
            if reason := packed_operands.unsupported(name, packed):
                return reason
        elif array.dtype != packed_operands.NUMBERS:
            return f"beside packed pages it reads {packed_operands.NUMBERS}, got {name} {array.dtype}"
    for array in () if pages.open is None else (pages.open.k, pages.open.v):
        if array.dtype != packed_operands.NUMBERS:
            return f"beside packed pages it reads open pages of {packed_operands.NUMBERS}, got {array.dtype}"
    return None


def arrays_of(pages: Pages) -> list:
    """What a kernel reads of pages, for `decode_fold.Pools.of`."""
    return [x for x in pages.arrays.values() if x is not None]


# Lists, by a cluster for each (row, KV head).


def unsupported_list(q, pages, *, width: int, block_size: int, words: dict[str, int]) -> str | None:
    """Why a list cannot be done by one launch. Arguments are as in `list_shape`."""
    if reason := listed.unsupported_rows(q, pages, block_size):
        return reason
    if list_shape(q, pages, width=width, block_size=block_size, window=None, sm_scale=1.0, words=words).stages == 0:
        return f"a list of {width} blocks and {sum(words.values())} words of other stages leave no shared memory for keys"
    return None


def list_shape(q, pages, *, width: int, block_size: int, window, sm_scale: float, words: dict[str, int]) -> Shape:
    """The sizes of a call with a list. words: of shared memory that other stages of the kernel take."""
    splits = clusters.ctas_per_unit(q.shape[0] * pages.kv_heads)
    fields = {"width": width, "block_size": block_size, "window": window, "sm_scale": sm_scale, "splits": splits}
    s = _sizes(q, pages, **fields, other_words=0)
    others = words | listed.list_words(s) | cluster_merge.words(s)
    s = _sizes(q, pages, **fields, other_words=sum(others.values()))
    if listed.aligned(s.scratch_words() | others) <= lanes.shared_words() + listed.LEFT:
        return s
    aligning = len(s.scratch_words()) * (listed.ALIGNED - 1)
    return _sizes(q, pages, **fields, other_words=listed.aligned(others) + aligning - listed.LEFT)


def list_scratch(s: Shape, words: dict[str, int]) -> dict[str, int]:
    """Words of shared memory of a kernel that calls `attend`."""
    return s.scratch_words() | cluster_merge.words(s) | listed.list_words(s) | words


def queries_of(s: Shape, unit, q_ref, scratch) -> Callable:
    """What makes the queries of a unit available to `attend`, by all threads of a CTA."""
    return functools.partial(decode_fold.load_queries, s, unit // s.num_kv_heads, unit % s.num_kv_heads, q_ref, scratch["q_s"])


def attend(s: Shape, unit, cta, number, pools, outputs, scratch, queries: Callable | None = None) -> None:
    """By all threads of all CTAs of a cluster: attention over the first `number` entries of the list that
    `listed.locate` found.

    pools: `arrays_of` the pages. outputs: out `[B, T, H, D]`, lse `[B, T, H]`. queries: `queries_of` the unit; None:
    they are there. Turns are dealt out: first one to a warp of each CTA, then to the next.
    """
    row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
    (length,) = lanes.load_shared(scratch["pages_s"], s.width)
    total, workers = number * (s.block_size // KEYS), s.splits * s.warps
    first = lanes.warp() * s.splits + cta

    def place(n):
        key_tile = first + n * workers
        return place_listed(s, key_tile, lanes.minimum(key_tile * KEYS // s.block_size, s.width - 1), length, scratch)

    key_tiles = lanes.maximum(total - first + (workers - 1), 0) // workers
    folded = decode_fold.fold(s, decode_fold.Pools.of(s, pools), scratch, head, length, key_tiles, place, queries or (lambda: None))
    merge_and_store(s, folded, (row, head, cta), outputs, scratch)


def place_listed(s: Shape, key_tile, entry, length, scratch) -> list:
    """Where the keys of a key tile lie, see `decode_fold.fold`, of an entry of the list that `listed.locate` found."""
    (block,), (page,) = (lanes.load_shared(scratch[name], entry) for name in ("ids_s", "pages_s"))
    start = lanes.maximum(block, 0) * s.block_size + key_tile * KEYS % s.block_size
    written = lanes.where(page >= 0, lanes.minimum(length - start, KEYS), 0)
    return [lanes.maximum(page, 0), start % s.page_size, start, written]


def merge_and_store(s: Shape, folded: decode_fold.Folded, place, outputs, scratch) -> None:
    """By all threads of all CTAs of a cluster: merge what their warps have folded, and write out and lse. place: row,
    KV head, CTA."""
    row, head, cta = place
    decode_fold.share(s, folded, scratch)
    _send(s, cta, scratch)
    cluster_merge.merge_sent(s, row, head, cta, scratch["parts_s"], scratch["stats_s"], *outputs)


def _send(s: Shape, cta, scratch) -> None:
    """Send each CTA its columns of what this CTA has found, and to all its maxima and sums."""
    rows, pairs, own = s.num_queries * s.group, s.head_dim // 2, cluster_merge.columns(s)
    for start in range(0, rows * pairs, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < rows * pairs):
            r, column = i // pairs, i % pairs * 2
            _, _, values = decode_fold.merged(s, r, column, scratch)
            lanes.store_cluster(column // own, scratch["parts_s"], (cta * s.rows + r) * own + column % own, *values)
    for start in range(0, rows * s.splits, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < rows * s.splits):
            r = i // s.splits
            m, _, total = decode_fold.merged_total(s, r, scratch)
            lanes.store_cluster(i % s.splits, scratch["stats_s"], (cta * s.rows + r) * 2, m, total)


def scratch_types(words: dict[str, int]) -> list:
    """Shared memory of a kernel, in the order of `words`."""
    return [plgpu.SMEM((n,), jnp.int32) for n in words.values()]


@functools.partial(jax.jit, static_argnames="s")
def attend_listed(s: Shape, q, pages, table, lengths, blocks, block_frames=None):
    """`attend` as a kernel of its own, over the lists `blocks` `[B, K, W]`; returns out and lse."""
    words = list_scratch(s, {})
    table, table_width = (table, table.shape[1]) if block_frames is None else (block_frames, None)

    def listed_kernel(*refs):
        refs, scratch = refs[: -len(words)], refs[-len(words) :]
        arrays = refs[:-5], refs[-5:-2], refs[-2:]

        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            inputs, (table_ref, lengths_ref, blocks_ref), outputs = arrays
            listed.copy_list(s, unit, blocks_ref, table_ref, lengths_ref, table_width, scratch)
            q_ref, *pools = inputs
            attend(s, unit, cta, lanes.i32(s.width), pools, outputs, scratch, queries_of(s, unit, q_ref, scratch))

        run(arrays, dict(zip(words, scratch, strict=True)))

    return listed.launch(s, listed_kernel, listed.outputs(s), scratch_types(words))(q, *arrays_of(pages), table, lengths, blocks)


# Spans of keys, a CTA each.


def span_shape(call, q, pages, *, width: int | None, splits: int, stages: int | None) -> Shape:
    """The sizes of a call whose keys are cut into at most `splits` spans."""
    block_size = call.block_size if width is not None or call.return_block_lse else pages.page_size
    fields = {"width": width, "block_size": block_size, "window": call.window, "sm_scale": call.sm_scale}
    # Unpacking keeps warps busy, and their key tiles are small. Twelve warps have registers for 8 query rows each.
    s = _sizes(
        q, pages, **fields, splits=splits, other_words=0, most=3 if pages.packed and q.shape[1] * q.shape[2] <= 8 * pages.kv_heads else 2
    )
    if width is not None:
        splits = min(splits, -(-width * block_size // (KEYS * s.warps)))
    return dataclasses.replace(s, splits=splits, stages=min(s.stages, stages or s.stages))


def attend_spans(s: Shape, q, pages, table, lengths, blocks, block_frames=None, *, block_lse: bool):
    """out, lse, and if asked for the LSE (log2 units) of every 16 keys, `[B, K, key tiles, T*G]`; of key tiles without
    keys it is not written."""
    lanes.check_version()
    words, rows, pool = s.scratch_words(), s.num_queries * s.group, arrays_of(pages)
    most = table.shape[1] * s.page_size // KEYS if s.width is None else s.width * s.block_size // KEYS
    table, table_width = (table, table.shape[1]) if block_frames is None else (block_frames, None)
    outs = split_merge.outputs(s)
    if block_lse:
        outs.append(jax.ShapeDtypeStruct((s.batch, s.num_kv_heads, most, rows), jnp.float32))

    def span_kernel(*refs):
        refs, scratch = refs[: -len(words)], refs[-len(words) :]
        inputs, outputs = refs[: -len(outs)], refs[-len(outs) :]

        @lanes.stage(**{name: lax.axis_index(name) for name in ("split", "head", "row")})
        def run(arrays, scratch, split, head, row):
            (q_ref, *pools), (table_ref, lengths_ref, *blocks_ref) = (arrays[0][: 1 + len(pool)], arrays[0][1 + len(pool) :])
            out_ref, lse_ref, *key_tiles_ref = arrays[1]
            length = lanes.load_global(lengths_ref, row)
            unit, warp = row * s.num_kv_heads + head, lanes.warp()
            first, count = _span(s, split, length)

            def place(n):
                return _place(s, first + warp + n * s.warps, unit, length, table_ref, row, table_width, *blocks_ref)

            def report(n, lse):
                key_tile = unit * most + first + warp + n * s.warps
                for tile, pair in enumerate(lse):
                    for j, x in enumerate(pair):
                        r = (lanes.lane() & 3) * 2 + (8 * tile + j)
                        with lanes.when((lanes.lane() < 4) & (r < rows)):
                            lanes.store_global(key_tiles_ref[0], key_tile * rows + r, x)

            key_tiles = lanes.maximum(count - warp + (s.warps - 1), 0) // s.warps
            queries = functools.partial(decode_fold.load_queries, s, row, head, q_ref, scratch["q_s"])
            told = report if block_lse else None

            def first_from(position):
                return lanes.maximum(position // KEYS - first - warp + (s.warps - 1), 0) // s.warps

            pools = decode_fold.Pools.of(s, pools)
            folded = decode_fold.fold(
                s, pools, scratch, head, length, key_tiles, place, queries, told, first_from if s.width is None else None
            )
            decode_fold.share(s, folded, scratch)
            _store(s, row, head, split, out_ref, lse_ref, scratch)

        run((inputs, outputs), dict(zip(words, scratch, strict=True)))

    kernel = plgpu.kernel(
        span_kernel,
        out_type=outs,
        grid=(s.splits, s.num_kv_heads, s.batch),
        grid_names=("split", "head", "row"),
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types(words),
    )
    out, lse, *of_key_tiles = kernel(q, *pool, table, lengths, *(() if blocks is None else (blocks,)))
    if s.splits > 1:
        out, lse = split_merge.merge(s, out, lse)
    return out, lse, *of_key_tiles


def _span(s: Shape, split, length):
    """First key tile of a CTA, and how many it has."""
    total = (length + (KEYS - 1)) // KEYS if s.width is None else lanes.i32(s.width * s.block_size // KEYS)
    per = (total + (s.splits - 1)) // s.splits
    first = lanes.minimum(split * per, total)
    return first, lanes.minimum(total - first, per)


def _place(s: Shape, key_tile, unit, length, table_ref, row, table_width: int | None, blocks_ref=None) -> list:
    """Where a key tile's keys lie, see `decode_fold.fold`. Nothing past the row of the page table is read, whatever the
    length. table_width: None where the table is `block_frames` `[B, K, W]`, the frames of the listed blocks."""
    in_table = length if table_width is None else lanes.minimum(length, table_width * s.page_size)
    if blocks_ref is None:
        start = key_tile * KEYS
        there = start < in_table
    else:
        entry = lanes.minimum(key_tile * KEYS // s.block_size, s.width - 1)
        block = lanes.load_global(blocks_ref, unit * s.width + entry)
        start = lanes.maximum(block, 0) * s.block_size + key_tile * KEYS % s.block_size
        there = (block >= 0) & (start < in_table)
    if table_width is None:
        page = lanes.load_global(table_ref, unit * s.width + entry)
    else:
        page = lanes.load_global(table_ref, row * table_width + lanes.where(there, start, 0) // s.page_size)
    written = lanes.where(there & (page >= 0), lanes.minimum(length - start, KEYS), 0)
    return [lanes.maximum(page, 0), start % s.page_size, start, written]


def _store(s: Shape, row, head, split, out_ref, lse_ref, scratch) -> None:
    """Write the result of a span as `split_merge` wants it."""
    rows, pairs = s.num_queries * s.group, s.head_dim // 2
    for start in range(0, rows * pairs, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < rows * pairs):
            r, column = i // pairs, i % pairs * 2
            m, total, values = decode_fold.merged(s, r, column, scratch)
            nothing = total == 0.0
            scale = lanes.f32(1.0) / lanes.where(nothing, 1.0, total)
            pair = [x * scale for x in values]
            if s.splits == 1:
                at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
                lanes.store_global(out_ref, (at * s.head_dim + column) // 2, lane_pairs.pack(*pair, s.dtype.name))
            else:
                at = ((row * s.num_kv_heads + head) * s.splits + split) * rows + r
                lanes.store_global(out_ref, at * s.head_dim + column, *pair)
            with lanes.when(column == 0):
                lse = (m + lanes.log2(lanes.where(nothing, 1.0, total))) * (1.0 / LOG2E)
                lanes.store_global(lse_ref, at, lanes.where(nothing, float("-inf"), lse))
