"""Attention over a list by one cluster of CTAs per (row, KV head), in one launch: `tiles`, then `cluster_merge`."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import clusters, lanes
from pallas_kernels.gather_attention import cluster_merge, tiles
from pallas_kernels.gather_attention.tiles import Shape

WARPGROUPS = 2
TILE = 64
MOST_STAGES = 2
MOST_ROWS = 16
"""T*G beyond which spans are used: the parts that warpgroups exchange would crowd out the tiles."""


def unsupported(q, k, *, width: int, block_size: int, words: dict[str, int]) -> str | None:
    """Why this call, of those that `gather_attention.mosaic_gpu` supports, is none for this form, or None. Arguments as in `shape_of`."""
    if block_size not in (16, 32, 64, 128):
        return f"block_size must be 16, 32, 64 or 128, got {block_size}"
    rows = q.shape[1] * q.shape[2] // k.shape[1]
    if rows > MOST_ROWS:
        return f"T * G must be at most {MOST_ROWS} in one launch, got {rows}"
    if shape_of(q, k, width=width, block_size=block_size, window=None, sm_scale=1.0, words=words).stages == 0:
        return f"a list of {width} blocks and {sum(words.values())} words of other stages leave no shared memory for a tile of keys"
    return None


def shape_of(q, k, *, width: int, block_size: int, window, sm_scale: float, words: dict[str, int]) -> Shape:
    """The sizes of a call; no stages where shared memory cannot hold one. words: of shared memory that other stages of the kernel take."""
    batch, num_queries, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k.shape
    ctas = clusters.ctas_per_unit(batch * num_kv_heads)
    sizes = (batch, num_queries, num_heads, num_kv_heads, head_dim, page_size, block_size, width, window, sm_scale, q.dtype, TILE)
    s = Shape(*sizes, 1, WARPGROUPS, ctas)
    taken = sum((words | {"ids_s": width + 1} | cluster_merge.words(s)).values())
    room = 4 * (lanes.SHARED_WORDS - taken) - 2 * tiles.ROWS * head_dim
    return dataclasses.replace(s, stages=max(0, min(MOST_STAGES, room // (4 * TILE * head_dim * WARPGROUPS))))


def scratch(s: Shape, words: dict[str, int]) -> dict:
    """Shared memory: what `tiles` and `cluster_merge` need, the list and its length, and other words."""
    words = words | {"ids_s": s.width + 1}
    floats = {name: plgpu.SMEM((n,), jnp.float32) for name, n in cluster_merge.words(s).items()}
    return s.scratch() | floats | {name: plgpu.SMEM((n,), jnp.int32) for name, n in words.items()}


def attend(s: Shape, unit, cta, number, inputs, outputs, scratch) -> None:
    """By all threads of all CTAs of a cluster: attention over the first `number` entries of the list in `scratch["ids_s"]`.

    inputs: q, k, v, page table, lengths. outputs: out `[B, T, H, D]`, lse `[B, T, H]`.
    """
    q_ref, k_ref, v_ref, table_ref, lengths_ref = inputs
    row, head = lax.div(unit, jnp.int32(s.num_kv_heads)), lax.rem(unit, jnp.int32(s.num_kv_heads))
    warpgroup = lax.axis_index("warpgroup")
    length, ids_s = lengths_ref[row], scratch["ids_s"]
    full = lax.div(number * s.block_size + (s.tile - 1), jnp.int32(s.tile))
    first, count = tiles.span(s, cta * s.warpgroups + warpgroup, full)
    place = functools.partial(tiles.places, s, lambda entry: ids_s[entry], table_ref, row, length)
    queries = functools.partial(tiles.load_queries, s, row, head, q_ref, scratch["q_s"])
    folded = tiles.fold(s, warpgroup, (k_ref, v_ref), scratch, head, length, first, count, place, queries)
    where = (row, head, cta, warpgroup)
    cluster_merge.merge_and_store(s, folded, where, scratch["parts_s"], scratch["stats_s"], *outputs)


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """out and lse."""
    rows = (s.batch, s.num_queries, s.num_heads)
    return [jax.ShapeDtypeStruct((*rows, s.head_dim), s.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)]


def launch(s: Shape, kernel, out_type: list, words: dict[str, int]):
    """A kernel with a cluster per (row, KV head): grid axes "unit" and "cta", threads "warpgroup"."""
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
        scratch_types=scratch(s, words),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


@functools.partial(jax.jit, static_argnames="s")
def attend_listed(s: Shape, q, k, v, page_table, lengths, blocks):
    """`attend` as a kernel of its own, over the lists `blocks` `[B, K, W]`; returns out and lse."""

    def listed_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, blocks_ref, out_ref, lse_ref, **scratch):
        unit, cta = lax.axis_index("unit"), lax.axis_index("cta")

        @lanes.stage(unit=unit)
        def copy_list(blocks_ref, ids_s, unit):
            threads = s.warpgroups * 128
            for start in range(0, s.width, threads):
                i = lanes.thread() + start
                with lanes.when(i < s.width):
                    lanes.store_shared(ids_s, i, lanes.load_global(blocks_ref, unit * s.width + i))
            lanes.cta_barrier(threads)

        copy_list(blocks_ref, scratch["ids_s"])
        inputs = (q_ref, k_ref, v_ref, table_ref, lengths_ref)
        attend(s, unit, cta, jnp.int32(s.width), inputs, (out_ref, lse_ref), scratch)

    return launch(s, listed_kernel, outputs(s), {})(q, k, v, page_table, lengths, blocks)


def ring_words(s: Shape) -> int:
    """Words of `scratch["kv_s"]`, which other stages may use before `attend`."""
    return math.prod(s.scratch()["kv_s"].shape) // 2
