"""gather_attention in Pallas Mosaic GPU (Hopper; without `wgmma` too, and so over packed pages, see `mma`).

There are two forms. For a list and few query rows (T*G at most 16): one launch with a cluster of CTAs per (row, KV
head), made for low latency (`listed`). For all other calls, the tiles of a (row, KV head) are cut into equal spans, by
the row's own length (dense) or by place in the list. One CTA folds each span (`tiles`), and a second launch merges the
spans in order (`split_merge`). In both forms bits depend only on the row and on static shapes, never on the other rows.

A tile of queries has at most 64 rows (T*G). Up to two tiles of a dense call share a CTA, and the keys that it copies.
Otherwise more rows are cut into calls of equally many queries, each a row of the launch. These run side by side. A key
that they share comes from memory once if they are close enough in time for the L2 cache, else once per call.

Memory traffic: each listed key and value once, the output; with several spans also T*G * (D + 1) float32 per span,
written and read. Source: split decoding over a page list, "Attention Pays Its Bill" (BRL-2026-07).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gather_attention import listed, mma
from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.core import dispatch, merge
from pallas_kernels.core.pages import as_rows, unlike
from pallas_kernels.hopper.decode import decode_fold, packed_operands, split_merge
from pallas_kernels.hopper.decode import wgmma_fold as tiles
from pallas_kernels.hopper.threads import lanes

MOST_ROWS_ALIKE = 2 * tiles.ROWS
"""Most query rows of a KV head (T*G) in a CTA of a dense call, and so with the bits of their own calls. More would have
too few registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut; None: chosen from the shapes.

    tile_tokens: keys folded in at once, 64 or 128; only with `wgmma`. stages: tiles in flight; in `mma`, those of a
    warp. splits: CTAs per (row, KV head); None: so many that together they give each multiprocessor one CTA. Naming any
    of them selects the form with spans. array_code: use no stages for single threads (`hopper.threads.lanes`). That is
    slower, but the interpreter of Mosaic GPU kernels can run it. multiprocessors: of the GPU, for `splits`; None: this
    process's GPU has them, or an H200 where there is none.
    """

    tile_tokens: int | None = None
    stages: int | None = None
    splits: int | None = None
    array_code: bool = False
    multiprocessors: int | None = None

    def __post_init__(self):
        if self.tile_tokens not in (None, 64, 128):
            raise ValueError(f"tile_tokens must be 64 or 128, got {self.tile_tokens!r}")
        for name in ("stages", "splits", "multiprocessors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")


def unsupported(call: Call, q, pages, table, lengths, blocks, block_frames=None) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if reason := mma.unlike(pages) if pages.packed else unlike(pages):
        return reason
    num_heads, head_dim = q.shape[2:]
    if pages.packed and q.dtype != packed_operands.NUMBERS:
        return f"over packed pages it multiplies {packed_operands.NUMBERS}, got q {q.dtype}"
    if not pages.packed and (q.dtype != pages.k.dtype or q.dtype.name not in ("bfloat16", "float16")):
        return f"it multiplies bfloat16 or float16, q and k alike; got q {q.dtype}, k {pages.k.dtype}"
    if head_dim not in (64, 128, 256):
        return f"the head dim must be 64, 128 or 256, got {head_dim}"
    if num_heads // pages.kv_heads > tiles.ROWS:
        return f"there may be at most {tiles.ROWS} query heads per KV head, got {num_heads // pages.kv_heads}"
    if pages.page_size % 64:
        return f"the page size must be a multiple of 64, got {pages.page_size}"
    if (blocks is not None or call.return_block_lse) and call.block_size not in (16, 32, 64, 128):
        return f"block_size must be 16, 32, 64 or 128, got {call.block_size}"
    if multiplies_by_wgmma(pages):
        return None
    if call.config is not None and (call.config.tile_tokens or call.config.array_code):
        return f"{mma.reads(pages)} a config has no tile_tokens and no array_code"
    return mma.unsupported(call, q, pages)


def multiplies_by_wgmma(pages) -> bool:
    """Whether calls over these pages take the form with `wgmma`: it reads its operands from shared memory, and codes
    are no operands."""
    return dispatch.has_wgmma() and not pages.packed


def gather_attention(call: Call, q, pages, table, lengths, blocks, block_frames=None, *, interpret=None):
    """See `pallas_kernels.gather_attention`. config: a `Config`, or None. interpret: for tests."""
    reason = unsupported(call, q, pages, table, lengths, blocks, block_frames)
    if reason:
        raise NotImplementedError(f"gather_attention 'mosaic_gpu': {reason}")
    most = _most_rows(call, q, pages, blocks)
    size = queries_per_tile(q.shape[1], q.shape[2] // pages.kv_heads, most)
    if size < q.shape[1]:
        rows = as_rows(q, table, lengths, size)
        lists = [None if each is None else jnp.repeat(each, q.shape[1] // size, axis=0) for each in (blocks, block_frames)]
        found = gather_attention(call, rows[0], pages, *rows[1:], *lists, interpret=interpret)
        return tuple(x.reshape(*q.shape[:2], *x.shape[2:]) for x in found)
    if call.config is None and blocks is not None and not call.return_block_lse:
        sizes = {"width": blocks.shape[2], "block_size": call.block_size, "words": {}}
        logits = {"window": call.window, "sm_scale": call.sm_scale}
        if not multiplies_by_wgmma(pages):
            if not mma.unsupported_list(q, pages, **sizes):
                s = mma.list_shape(q, pages, **sizes, **logits)
                return tuple(mma.attend_listed(s, q, pages, table, lengths, blocks, block_frames))
        elif not listed.unsupported(q, pages, **sizes):
            return tuple(listed.attend_listed(listed.shape_of(q, pages, **sizes, **logits), q, pages, table, lengths, blocks, block_frames))
    arrays = (q, pages, table, lengths, blocks, block_frames)
    config = call.config or Config()
    config = dataclasses.replace(config, multiprocessors=config.multiprocessors or dispatch.multiprocessors())
    return _attend(dataclasses.replace(call, config=config), *arrays, interpret=interpret)


def queries_alike(q, pages, lengths):
    """How many of the first queries of each row have the bits that they have in calls of their own, `[B]`; q `[B, T, H,
    D]`. It is for dense calls with `wgmma`, without a window, of at most `MOST_ROWS_ALIKE`. lengths: with all queries.

    A query's own call may cut its keys into other spans: those change from `splits` tiles to the next."""
    num_queries, group = q.shape[1], q.shape[2] // pages.kv_heads
    call = Call(pages.page_size, None, 1.0, False, Config(multiprocessors=dispatch.multiprocessors()))
    assert multiplies_by_wgmma(pages)
    assert num_queries * group <= MOST_ROWS_ALIKE
    s = _shape(call, q, pages, None)
    per = tiles.tiles_of_span(s, lengths[:, None] - jnp.arange(num_queries - 1, -1, -1))
    return jnp.sum(per == per[:, :1], axis=1, dtype=jnp.int32)


def _most_rows(call: Call, q, pages, blocks) -> int:
    """Most query rows of a KV head in a CTA."""
    if not multiplies_by_wgmma(pages):
        return decode_fold.most_rows(q.shape[3], call.window is not None)
    plain = blocks is None and call.window is None and not call.return_block_lse and not (call.config and call.config.array_code)
    return MOST_ROWS_ALIKE if plain else tiles.ROWS


def span_splits(config: Config, batch: int, num_kv_heads: int) -> int:
    """CTAs among which the keys of each (row, KV head) are split: as named, or so many that all together give each
    multiprocessor one."""
    return config.splits or max(1, config.multiprocessors // (batch * num_kv_heads))


def queries_per_tile(num_queries: int, group: int, most: int = tiles.ROWS) -> int:
    """Queries of a call: the largest divisor of their number for which they have at most `most` rows."""
    return next(n for n in range(num_queries, 0, -1) if num_queries % n == 0 and n * group <= most)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def _attend(call: Call, q, pages, table, lengths, blocks, block_frames, *, interpret):
    if not multiplies_by_wgmma(pages):
        return _attend_key_tiles(call, q, pages, table, lengths, blocks, block_frames)
    s = _shape(call, q, pages, blocks)
    width = table.shape[1] * s.page_size // s.block_size if blocks is None else blocks.shape[2]
    launch = _launch(s, width if call.return_block_lse else None, block_frames is not None, call.config.array_code, interpret)
    queries = tiles.padded_queries(s, q) if call.config.array_code else q
    lists = [each for each in (blocks, block_frames) if each is not None]
    out, lse, *block_lse = launch(queries, pages.k, pages.v, table, lengths, *lists)
    if call.config.array_code:
        out, lse = merge.merge_attention([out[:, :, i] for i in range(s.splits)], [lse[:, :, i] for i in range(s.splits)])
        out, lse = _heads_last(s, out).astype(q.dtype), _heads_last(s, lse)
    elif s.splits > 1:
        out, lse = split_merge.merge(s, out, lse)
    if not call.return_block_lse:
        return out, lse
    there = _there(s, width, table, lengths, blocks, block_frames)
    of_blocks = jnp.where(there[..., None], block_lse[0][:, :, :width], -jnp.inf)
    return out, lse, _heads_last(s, of_blocks.swapaxes(2, 3))


def _there(s: tiles.Shape, width: int, table, lengths, blocks, block_frames=None):
    """Which listed blocks have a written key and a frame, `[B, K or 1, W]`."""
    ids = jnp.arange(width, dtype=jnp.int32)[None, None] if blocks is None else blocks
    if block_frames is not None:
        return (ids >= 0) & (block_frames >= 0) & (ids * s.block_size < lengths[:, None, None])
    page_ids = jnp.take_along_axis(table[:, None], jnp.clip(ids * s.block_size // s.page_size, 0, table.shape[1] - 1), axis=2)
    there = (ids >= 0) & (ids * s.block_size < table.shape[1] * s.page_size) & (page_ids >= 0)
    return there & (ids * s.block_size < lengths[:, None, None])


def _attend_key_tiles(call: Call, q, pages, table, lengths, blocks, block_frames):
    """`_attend` by `mma`."""
    width = None if blocks is None else blocks.shape[2]
    splits = span_splits(call.config, q.shape[0], pages.kv_heads)
    s = mma.span_shape(call, q, pages, width=width, splits=splits, stages=call.config.stages)
    out, lse, *of_key_tiles = mma.attend_spans(s, q, pages, table, lengths, blocks, block_frames, block_lse=call.return_block_lse)
    if not call.return_block_lse:
        return out, lse
    width = table.shape[1] * s.page_size // s.block_size if blocks is None else width
    starts = jnp.arange(s.block_size // decode_fold.KEYS) * decode_fold.KEYS
    ids = jnp.arange(width, dtype=jnp.int32)[None, None] if blocks is None else blocks
    written = _there(s, width, table, lengths, blocks, block_frames)[..., None] & (
        ids[..., None] * s.block_size + starts < lengths[:, None, None, None]
    )
    per_key_tile = of_key_tiles[0].reshape(s.batch, s.num_kv_heads, width, -1, s.num_queries * s.group) / tiles.LOG2E
    of_blocks = jax.nn.logsumexp(jnp.where(written[..., None], per_key_tile, -jnp.inf), axis=3)
    return out, lse, _heads_last(s, of_blocks.swapaxes(2, 3))


def _shape(call: Call, q, pages, blocks) -> tiles.Shape:
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size, block_size, config = pages.kv_heads, pages.page_size, call.block_size, call.config
    if blocks is None and not call.return_block_lse:
        block_size = page_size
    tile = max(64, block_size) if call.return_block_lse else config.tile_tokens or (128 if blocks is None and head_dim <= 128 else 64)
    splits = span_splits(config, batch, num_kv_heads)
    if blocks is not None and config.splits is None:
        splits = min(splits, -(-blocks.shape[2] * block_size // tile))
    stages = config.stages or max(1, min(3, (130 << 10) // (4 * tile * head_dim)))
    return tiles.Shape(
        *(batch, num_queries, num_heads, num_kv_heads, head_dim, page_size, block_size, None if blocks is None else blocks.shape[2]),
        *(call.window, call.sm_scale, q.dtype, tile, stages, 1, splits),
    )


def _heads_last(s: tiles.Shape, x):
    """[B, K, rows, ...] -> [B, T, H, ...]."""
    x = x[:, :, : s.num_queries * s.group].reshape(s.batch, s.num_kv_heads, s.num_queries, s.group, *x.shape[3:])
    return x.swapaxes(1, 2).reshape(s.batch, s.num_queries, s.num_heads, *x.shape[4:])


def _launch(s: tiles.Shape, block_lse_width: int | None, framed: bool, array_code: bool, interpret):
    """The kernel of the spans, as a function of (queries, k, v, table, lengths, blocks?, block_frames?). framed:
    whether it takes the last."""
    scratch = s.scratch() | {"rows_s": plgpu.SMEM((tiles.ROWS,), jnp.float32)}
    if array_code:
        parts = (s.batch, s.num_kv_heads, s.splits, s.rows)
        outs = [jax.ShapeDtypeStruct((*parts, s.head_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]
        scratch |= {"out_s": plgpu.SMEM((tiles.ROWS, s.head_dim), jnp.float32), "q_bar": plgpu.Barrier()}
    else:
        lanes.check_version()
        outs = split_merge.outputs(s)
    if block_lse_width is not None:  # whole tiles, so that pieces of a tile past the list can be written
        width = -(-block_lse_width * s.block_size // s.tile) * s.tile // s.block_size
        outs.append(jax.ShapeDtypeStruct((s.batch, s.num_kv_heads, width, s.rows), jnp.float32))

    def span_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, *refs, **scratch):
        blocks_ref, refs = (None, refs) if s.width is None else (refs[0], refs[1:])
        frames_ref, refs = (refs[0], refs[1:]) if framed else (None, refs)
        out_ref, lse_ref, *block_lse_ref = refs
        split, head, row = (lax.axis_index(name) for name in ("split", "head", "row"))
        length = lengths_ref[row]

        def queries():
            if not array_code:
                tiles.load_queries(s, row, head, q_ref, scratch["q_s"])
                return
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], scratch["q_s"].at[0, pl.ds(0, s.rows)], scratch["q_bar"])
            plgpu.barrier_wait(scratch["q_bar"])

        def report(tile, lse_of_pieces):
            block = lax.div(tile * s.tile, jnp.int32(s.block_size))
            for p, lse in enumerate(lse_of_pieces):
                _store_rows(s, lse, scratch["rows_s"], block_lse_ref[0].at[row, head, block + p])

        first, count = tiles.span(s, split, length)

        def page_of(entry, start):
            if framed:
                return frames_ref[row, head, entry]
            return table_ref[row, lax.div(start, jnp.int32(s.page_size))]

        place = functools.partial(tiles.places, s, lambda entry: blocks_ref[row, head, entry], page_of, length)
        told = report if block_lse_ref else None
        query_tile = lax.axis_index("query_tile") if s.query_tiles > 1 else 0
        folded = tiles.fold(s, 0, (k_ref, v_ref), scratch, head, length, first, count, place, queries, told, query_tile)
        if array_code:
            acc, m, total = folded
            scratch["out_s"][...] = acc / lax.broadcast_in_dim(jnp.where(total == 0, 1.0, total), acc.shape, [0])
            _store_rows(s, tiles.natural_lse(m, total), scratch["rows_s"], lse_ref.at[row, head, split])
            plgpu.copy_smem_to_gmem(scratch["out_s"].at[pl.ds(0, s.rows)], out_ref.at[row, head, split])
            plgpu.wait_smem_to_gmem(0)
        else:
            split_merge.store(s, folded, row, head, split, out_ref, lse_ref)

    return plgpu.kernel(
        span_kernel,
        out_type=outs,
        grid=(s.splits, s.num_kv_heads, s.batch),
        grid_names=("split", "head", "row"),
        **({"num_threads": s.query_tiles, "thread_name": "query_tile"} if s.query_tiles > 1 else {}),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _store_rows(s: tiles.Shape, values, rows_s, target) -> None:
    rows_s[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows_s.at[pl.ds(0, s.rows)], target)
    plgpu.wait_smem_to_gmem(0)
