"""selected_attention for TPU: one kernel scans the index, lists the best blocks, and attends to them, a query at a
time.

Algorithm. A grid cell has one query with all its heads. The kernel of `select_blocks` writes the lists of all KV heads
to vector memory. A copy inside the core brings them to scalar memory, which holds the addresses of copies. Then each KV
head walks over its list as in `gather_attention`. The T queries of a sequence are rows with a list each, so a drafted
step gives by construction what steps of one token would.

Memory traffic, per query: the index of the pages before the first local block, `K * P/bs * R * D * itemsize` bytes
each; each listed block once per KV head, `2 * block_size * D * itemsize` bytes; q twice, the output and the list.
Compared with the two ops one after the other it saves a launch, and a write and a read of the list.

Source: "Attention Pays Its Bill" (BRL-2026-07) for gather-decode and its keep-set; bounds scoring, Quest (ICML 2024).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem  # `//` and `%` of traced values also handle signs, and lowering that needs the chip's generation

from pallas_kernels.attention.gather_attention import mosaic_tpu as gather
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.core import dispatch
from pallas_kernels.selection.select_blocks import mosaic_tpu as select
from pallas_kernels.tpu.memory import LANES, SMEM_BYTES, VMEM_BYTES, padded


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_rows: rows of the index, as `select_blocks` takes it. tile_tokens: keys, as `gather_attention` takes it."""

    tile_rows: int = 512
    tile_tokens: int = 512

    def __post_init__(self):
        select.Config(self.tile_rows)
        gather.Config(self.tile_tokens)


def _calls(call: Call, page_size: int) -> tuple:
    """The calls of the two ops, and the config of the selection."""
    config = call.config or Config()
    attended = gather.Call(call.block_size, None, call.sm_scale, False, gather.Config(config.tile_tokens))
    return call.selection(page_size), attended, select.Config(config.tile_rows)


def _sizes(call: Call, q, pages, index, table) -> tuple:
    """Compile-time values of the two parts, with every query as a row of its own."""
    chosen_by, attended, config = _calls(call, pages.page_size)
    row = jax.ShapeDtypeStruct((q.shape[0] * q.shape[1], 1, *q.shape[2:]), q.dtype)
    blocks = jax.ShapeDtypeStruct((row.shape[0], pages.kv_heads, chosen_by.width), jnp.int32)
    return select.sizes_of(chosen_by, q, index, table, config), gather.sizes_of(attended, row, pages, table, blocks)


def unsupported(call: Call, q, pages, index, table, lengths, frames, codes) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    if call.refines:
        return f"it chooses in one stage, not from a shortlist of {call.shortlist} by {call.codes_kind or 'the keys of pages'}"
    chosen_by, attended, config = _calls(call, pages.page_size)
    row = jax.ShapeDtypeStruct((1, 1, *q.shape[2:]), q.dtype)
    listed = jax.ShapeDtypeStruct((1, pages.kv_heads, chosen_by.width), jnp.int32)
    reason = select.unsupported(chosen_by, q, index, table, lengths, config=config)
    reason = reason or gather.unsupported(attended, row, pages, table, lengths, listed)
    if reason:
        return reason
    chosen, walked = _sizes(call, q, pages, index, table)
    arrays = dispatch.signature(q=q, **pages.arrays, index=index, table=table)
    scalars = 4 * (q.shape[0] * (2 * table.shape[1] + 1) + pages.kv_heads * padded(chosen.listed, LANES))
    if scalars > SMEM_BYTES:
        return f"page tables and lists take {scalars} bytes of scalar memory, at most {SMEM_BYTES} are available; {arrays}"
    all_heads = pages.kv_heads * gather.vmem_bytes_of_rows(walked, q, return_block_lse=False)
    vectors = select.vmem_bytes(chosen, q, index) + gather.vmem_bytes_of_tiles(walked, q, pages.k) + all_heads
    if vectors > VMEM_BYTES:
        return f"scores and buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; {arrays}"
    return None


def selected_attention(call: Call, q, pages, index, table, lengths, frames, codes, *, interpret=False):
    """See `pallas_kernels.selected_attention`. config: a `Config`, or None for `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, pages, index, table, lengths, frames, codes)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of selected_attention: {reason}")
    chosen, walked = _sizes(call, q, pages, index, table)
    tables = (table,) if frames is None else (table, frames)
    return _attend(q, pages, index, tables, lengths, chosen=chosen, walked=walked, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("chosen", "walked", "interpret"))
def _attend(q, pages, index, tables, lengths, *, chosen, walked, interpret):
    batch, num_queries, num_heads, head_dim = q.shape
    kv_heads, group, queries = walked.kv_heads, walked.group, batch * num_queries
    asking, index = select.prepared(chosen, q, index)
    rows = jnp.pad(q.reshape(queries, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, walked.rows - group), (0, 0)))
    width = padded(chosen.listed, LANES)

    def of_query(*shape):
        return pl.BlockSpec((1, *shape), lambda query, *_: (query, *(0,) * len(shape)))

    results = [((kv_heads, walked.rows, head_dim), q.dtype), ((kv_heads, walked.rows, 1), jnp.float32), ((kv_heads, width), jnp.int32)]
    slots = pltpu.VMEM((2, walked.per_tile, walked.block_size, head_dim), pages.k.dtype)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, lse, ids = pl.pallas_call(
        functools.partial(_kernel, chosen, walked, len(tables)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=(queries,),
            in_specs=[of_query(*asking.shape[1:]), of_query(*rows.shape[1:]), in_hbm, in_hbm, in_hbm],
            out_specs=[of_query(*shape) for shape, _ in results],
            scratch_shapes=[
                *select.scratch(chosen, index),
                *(slots, slots, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)),
                *(pltpu.SMEM((kv_heads, width), jnp.int32), pltpu.SemaphoreType.DMA),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((queries, *shape), dtype) for shape, dtype in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="selected_attention",
    )(lengths, *(x.reshape(-1) for x in tables), asking, rows, index, pages.k, pages.v)
    out, lse = out[:, :, :group], lse[:, :, :group, 0]
    lists = ids[..., : chosen.listed].reshape(batch, num_queries, kv_heads, -1)
    return out.reshape(q.shape), lse.reshape(batch, num_queries, num_heads), lists


def _kernel(chosen, walked, num_tables: int, lengths, *refs):
    """One query. Scratch: the scratch of both parts, the lists in scalar memory, and a semaphore."""
    tables, (asking, rows, index, k, v, out, lse, ids, *scratch) = refs[:num_tables], refs[num_tables:]
    found, told = scratch[-2:]
    *of_selection, k_slots, v_slots, arrived, first_slot = scratch[:-2]
    select.list_blocks(chosen, tables[0], lengths, asking, index, ids, *of_selection)
    copy = pltpu.make_async_copy(ids.at[0], found, told)
    copy.start()
    copy.wait()

    sequence, query = div(pl.program_id(0), chosen.num_queries), rem(pl.program_id(0), chosen.num_queries)
    length = jnp.maximum(lengths[sequence] - (chosen.num_queries - 1) + query, 0)  # tokens up to the query's own

    def listed(head, place):
        return jnp.where(place < walked.entries, found[head, jnp.minimum(place, walked.entries - 1)], -1)  # the last tile may be longer

    pools = {"k": (k, k_slots), "v": (v, v_slots)}
    copies = functools.partial(gather.copies_of, walked, tables[-1], length, listed, sequence, **pools, arrived=arrived)

    def of_head(head, _):
        out[0, head], lse[0, head] = gather.attend_head(walked, copies, head, rows[0, head], length, first_slot)

    jax.lax.fori_loop(0, walked.kv_heads, of_head, None)
