"""select_blocks: signature, validation, dispatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.page_index import INDEX_ROWS


def selection_width(num_queries: int, *, page_size: int, block_size: int, k: int, sink: int, local: int) -> int:
    """W of the lists that `select_blocks` returns: sink + k + as many local blocks as there can be.

    The local blocks reach back to the start of the page that the first of `num_queries` tokens was written into; at worst that token
    is the last of its page.
    """
    return sink + k + max(local, -(-(page_size - 1 + num_queries) // block_size))


def select_blocks(
    q: Float[Array, "B T H D"],
    index: Float[Array, "N K P/bs R D"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    kind: str,
    page_size: int,
    block_size: int,
    k: int,
    sink: int,
    local: int,
    implementation: str | None = None,
) -> Int[Array, "B K W"]:
    """List the blocks each KV head reads this step.

    q: the step's T queries; query t of row b stands at position lengths[b]-T+t, those at negative positions are not looked at. index:
    `page_index` of every page of the pool, R = `INDEX_ROWS[kind]`; pages that are not sealed may hold anything. page_table: logical page
    -> physical page below N, -1 where there is none. lengths: tokens written, the T current ones included. page_size, block_size:
    tokens. k: distant blocks to keep. sink: blocks always read at the start. local: blocks always read at the end.

    The current block is c = (length-1)//block_size. The first local block is the earlier of c-local+1 and the first block of the
    page that the first of the T tokens was written into, so that pages open during this step are always read; it is at least 0.
    Distant candidates are the blocks from `sink` up to the first local one whose page exists. Of these the k best scores are kept, exactly;
    of equal scores the lower block. NaN and -inf count as the lowest finite float32: they rank last, but still before nothing.

    Scores, in float32: "bounds" sums max(q_d * max_d, q_d * min_d) over d per query head and takes the maximum over the group's heads and
    over T: an upper bound of every dot product with the block (Quest, ICML 2024; bounds must be finite). "mean" is the dot product of
    the group's mean query with the block's mean key, the maximum over T.

    Returns ids `[B, K, W]` int32: sink, distant, local, ascending, each block once, -1 at the end; W = `selection_width(T, ...)`
    whatever M is. All -1 where the length is 0. Memory: the index rows that the tables name, B * M pages.

    Raises ValueError for shapes, dtypes or sizes that do not fit together.
    """
    sizes = {"page_size": page_size, "block_size": block_size, "k": k, "sink": sink, "local": local}
    check(q, index, page_table, lengths, kind, **sizes)
    signature = f"{kind} {sizes} {dispatch.signature(q=q, index=index, page_table=page_table)}"
    static = {"kind": kind, **sizes}
    name = dispatch.choose("select_blocks", implementation, signature, (q, index, page_table, lengths), static)
    return dispatch.load("select_blocks", name)(q, index, page_table, lengths, **static)


def check(
    q: jax.Array,
    index: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    kind: str,
    *,
    page_size: int,
    block_size: int,
    k: int,
    sink: int,
    local: int,
) -> None:
    """Raise ValueError, with every shape, unless the arguments of a selection fit together."""
    arrays = dispatch.signature(q=q, index=index, page_table=page_table, lengths=lengths)
    if kind not in INDEX_ROWS:
        raise ValueError(f"index kind {kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")
    if q.ndim != 4 or index.ndim != 5 or page_table.ndim != 2 or lengths.ndim != 1:
        raise ValueError(f"select_blocks takes q [B,T,H,D], index [N,K,P/bs,R,D], page_table [B,M], lengths [B]; got {arrays}")
    if block_size <= 0 or page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide page_size {page_size}")
    if index.shape[2:] != (page_size // block_size, INDEX_ROWS[kind], q.shape[3]):
        raise ValueError(
            f"index of kind {kind!r} with page_size {page_size}, block_size {block_size} must be "
            f"[N, K, {page_size // block_size}, {INDEX_ROWS[kind]}, {q.shape[3]}]; got {arrays}"
        )
    if q.shape[2] % index.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {index.shape[1]} KV heads; got {arrays}")
    if not q.shape[0] == page_table.shape[0] == lengths.shape[0]:
        raise ValueError(f"q, page_table and lengths must have the same batch; got {arrays}")
    if page_table.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        raise ValueError(f"page_table and lengths must be int32; got {arrays}")
    if not (jnp.issubdtype(q.dtype, jnp.floating) and jnp.issubdtype(index.dtype, jnp.floating)):
        raise ValueError(f"q and index must be floating point; got {arrays}")
    for name, value, least in (("k", k, 0), ("sink", sink, 0), ("local", local, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
