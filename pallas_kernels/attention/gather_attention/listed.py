"""Attention over a list by one cluster of CTAs per (row, KV head), in one launch: `tiles`, then `cluster_merge`."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gather_attention import cluster_merge
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.decode import wgmma_fold as tiles
from pallas_kernels.hopper.decode.wgmma_fold import Shape
from pallas_kernels.hopper.threads import lanes

WARPGROUPS = 2
TILE = 64
MAX_STAGES = 2
APPROXIMATE = {"compiler_params": plgpu.CompilerParams(approx_math=True)}
"""Options of a kernel that calls `attend`."""

ALIGNED = 256
"""Words: arrays in shared memory begin at multiples of it."""
LEFT = 4 << 8
"""Words of a CTA's shared memory that `lanes.shared_words` does not count, on each GPU, but for 1 KB: a launch whose
arrays take all that there is fails."""
MOSAIC_WORDS = 512
"""What Mosaic takes for its own sums in a kernel that multiplies by `wgmma`. It may take the 1 KB, too."""

MAX_ROWS = 16
"""Largest T*G; above it spans are used. With more rows, the parts that warpgroups exchange leave too little memory for
tiles."""


def unsupported(q, pages, *, width: int, block_size: int, words: dict[str, int]) -> str | None:
    """Why this form cannot do a call that `gather_attention.mosaic_gpu` supports, or None if it can. Arguments are as
    in `shape_of`."""
    if reason := unsupported_rows(q, pages, block_size):
        return reason
    if shape_of(q, pages, width=width, block_size=block_size, window=None, sm_scale=1.0, words=words).stages == 0:
        return f"a list of {width} blocks and {sum(words.values())} words of other stages leave no shared memory for a tile of keys"
    return None


def unsupported_rows(q, pages, block_size: int) -> str | None:
    """What of it holds for every length of a list."""
    if block_size not in (16, 32, 64, 128):
        return f"block_size must be 16, 32, 64 or 128, got {block_size}"
    rows = q.shape[1] * q.shape[2] // pages.kv_heads
    return f"T * G must be at most {MAX_ROWS} in one launch, got {rows}" if rows > MAX_ROWS else None


def shape_of(q, pages, *, width: int, block_size: int, window, sm_scale: float, words: dict[str, int]) -> Shape:
    """The sizes of a call. `stages` is 0 if shared memory cannot hold one. words: of shared memory that other stages of
    the kernel take."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.kv_heads, pages.page_size
    ctas = clusters.ctas_per_unit(batch * num_kv_heads)
    sizes = (batch, num_queries, num_heads, num_kv_heads, head_dim, page_size, block_size, width, window, sm_scale, q.dtype, TILE)
    s = Shape(*sizes, 1, WARPGROUPS, ctas)
    others = words | list_words(s) | cluster_merge.words(s)
    room = 4 * (lanes.shared_words() - sum(others.values())) - 2 * tiles.ROWS * head_dim
    stages = max(0, min(MAX_STAGES, room // (4 * TILE * head_dim * WARPGROUPS)))
    while stages and _launch_words(dataclasses.replace(s, stages=stages), others) > lanes.shared_words() + LEFT + ALIGNED:
        stages -= 1
    return dataclasses.replace(s, stages=stages)


def _launch_words(s: Shape, others: dict[str, int]) -> int:
    """Words of shared memory that a launch asks for: arrays, a barrier of two words for each K and V tile, Mosaic's
    own."""
    of_tiles = {"q_s": tiles.ROWS * s.head_dim // 2, "kv_s": s.tile * s.head_dim * s.warpgroups * s.stages}
    return aligned(of_tiles | others) + 4 * s.warpgroups * s.stages + MOSAIC_WORDS


def aligned(arrays: dict[str, int]) -> int:
    """Words of shared memory that arrays take. Mosaic begins each at a multiple of `ALIGNED`. `lanes.shared_words`
    leaves room for it, but not always enough for as many arrays as a selection has."""
    return sum(-(-words // ALIGNED) * ALIGNED for words in arrays.values())


def list_words(s: Shape) -> dict[str, int]:
    """Words of shared memory: for the list and its length, and for the pages of its blocks and the length of the
    row."""
    return {"ids_s": s.width + 1, "pages_s": s.width + 1}


def scratch(s: Shape, words: dict[str, int]) -> dict:
    """Shared memory: what `tiles` and `cluster_merge` need, the list, and other words."""
    words = words | list_words(s)
    floats = {name: plgpu.SMEM((n,), jnp.float32) for name, n in cluster_merge.words(s).items()}
    return s.scratch() | floats | {name: plgpu.SMEM((n,), jnp.int32) for name, n in words.items()}


def copy_list(s: Shape, unit, blocks_ref, table_ref, lengths_ref, table_width: int | None, scratch) -> None:
    """By single threads: the list of `blocks` `[B, K, W]` to shared memory, and what `locate` finds. table_width: None
    where the table is `block_frames` `[B, K, W]`, the frames of the listed blocks."""
    threads, row = s.warpgroups * 128, unit // s.num_kv_heads
    for start in range(0, s.width, threads):
        i = lanes.thread() + start
        with lanes.when(i < s.width):
            lanes.store_shared(scratch["ids_s"], i, lanes.load_global(blocks_ref, unit * s.width + i))
    lanes.cta_barrier(threads)
    length = lanes.load_global(lengths_ref, row)
    if table_width is None:
        locate(s, length, table_ref, unit, None, scratch)
    else:
        locate(s, length, table_ref, row, table_width, scratch)


def locate(s: Shape, length, table_ref, row, table_width: int | None, scratch) -> None:
    """By single threads: write to `scratch["pages_s"]` the page of each listed block, -1 where there is none; behind
    them the row's length.

    row: of the page table, or of the frames of listed blocks where table_width is None. Every tile needs the pages, and
    reads them faster from shared than from global memory. Nothing past the row is read, whatever the length.
    """
    threads = s.warpgroups * 128
    in_table = length if table_width is None else lanes.minimum(length, table_width * s.page_size)
    with lanes.when(lanes.thread() == 0):
        lanes.store_shared(scratch["pages_s"], s.width, length)
    for start in range(0, s.width, threads):
        i = lanes.thread() + start
        with lanes.when(i < s.width):
            token = lanes.load_shared(scratch["ids_s"], i)[0] * s.block_size
            there = (token >= 0) & (token < in_table)
            if table_width is None:
                page = lanes.load_global(table_ref, row * s.width + i)
            else:
                page = lanes.load_global(table_ref, row * table_width + lanes.where(there, token, 0) // s.page_size)
            lanes.store_shared(scratch["pages_s"], i, lanes.where(there, page, -1))
    lanes.cta_barrier(threads)


def attend(s: Shape, unit, cta, number, inputs, outputs, scratch) -> None:
    """By all threads of all CTAs of a cluster: attention over the first `number` entries of the list that `locate`
    found.

    inputs: q, k, v. outputs: out `[B, T, H, D]`, lse `[B, T, H]`. Tiles are dealt out in turn: a CTA gets a second one
    when each has one.
    """
    q_ref, k_ref, v_ref = inputs
    row, head = lax.div(unit, jnp.int32(s.num_kv_heads)), lax.rem(unit, jnp.int32(s.num_kv_heads))
    warpgroup = lax.axis_index("warpgroup")
    ids_s, pages_s = scratch["ids_s"], scratch["pages_s"]
    length = pages_s[s.width]
    full = lax.div(number * s.block_size + (s.tile - 1), jnp.int32(s.tile))
    workers, first = s.splits * s.warpgroups, warpgroup * s.splits + cta
    count = lax.div(jnp.maximum(full - first, 0) + (workers - 1), jnp.int32(workers))

    def place(n):
        return tiles.places(s, lambda entry: ids_s[entry], lambda entry, _: pages_s[entry], length, first + n * workers)

    queries = functools.partial(tiles.load_queries, s, row, head, q_ref, scratch["q_s"])
    folded = tiles.fold(s, warpgroup, (k_ref, v_ref), scratch, head, length, 0, count, place, queries)
    where = (row, head, cta, warpgroup)
    cluster_merge.merge_and_store(s, folded, where, scratch["parts_s"], scratch["stats_s"], *outputs)


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """out and lse."""
    rows = (s.batch, s.num_queries, s.num_heads)
    return [jax.ShapeDtypeStruct((*rows, s.head_dim), s.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)]


def launch(s: Shape, kernel, out_type: list, scratch_types, **options):
    """A kernel with a cluster per (row, KV head): grid axes "unit" and "cta", threads "warpgroup". options: of
    `plgpu.kernel`."""
    lanes.check_version()
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(s.batch * s.num_kv_heads,),
        grid_names=("unit",),
        cluster=(s.splits,),
        cluster_names=("cta",),
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        **options,
    )


@functools.partial(jax.jit, static_argnames="s")
def attend_listed(s: Shape, q, pages, table, lengths, blocks, block_frames=None):
    """`attend` as a kernel of its own, over the lists `blocks` `[B, K, W]`; returns out and lse."""
    table, table_width = (table, table.shape[1]) if block_frames is None else (block_frames, None)

    def listed_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, blocks_ref, out_ref, lse_ref, **scratch):
        unit, cta = lax.axis_index("unit"), lax.axis_index("cta")

        @lanes.stage(unit=unit)
        def copy(inputs, scratch, unit):
            copy_list(s, unit, *inputs, table_width, scratch)

        copy((blocks_ref, table_ref, lengths_ref), {name: scratch[name] for name in list_words(s)})
        attend(s, unit, cta, jnp.int32(s.width), (q_ref, k_ref, v_ref), (out_ref, lse_ref), scratch)

    return launch(s, listed_kernel, outputs(s), scratch(s, {}), **APPROXIMATE)(q, pages.k, pages.v, table, lengths, blocks)


def ring_words(s: Shape) -> int:
    """Words of `scratch["kv_s"]`, which other stages may use before `attend`."""
    return math.prod(s.scratch()["kv_s"].shape) // 2
