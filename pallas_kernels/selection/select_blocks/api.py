"""select_blocks: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import INDEX_ROWS


def selection_width(*, page_size: int, block_size: int, k: int, sink: int, local: int) -> int:
    """W of the lists that `select_blocks` returns: sink + k + the most local blocks there can be, at least those of a
    page."""
    return sink + k + max(local, page_size // block_size)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `select_blocks` explains them."""

    kind: str
    page_size: int
    block_size: int
    k: int
    sink: int
    local: int

    def __post_init__(self):
        if self.kind not in INDEX_ROWS:
            raise ValueError(f"index kind {self.kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")
        if self.block_size <= 0 or self.page_size % self.block_size:
            raise ValueError(f"block_size {self.block_size} does not divide page_size {self.page_size}")
        for name, least in (("k", 0), ("sink", 0), ("local", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def width(self) -> int:
        """W of the list: `selection_width`."""
        sizes = {"page_size": self.page_size, "block_size": self.block_size, "k": self.k, "sink": self.sink, "local": self.local}
        return selection_width(**sizes)


def select_blocks(
    q: Float[Array, "B T H D"],
    index: Float[Array, "N K P/bs R D"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    kind: str,
    page_size: int,
    block_size: int,
    k: int,
    sink: int,
    local: int,
    implementation: str | None = None,
) -> Int[Array, "B T K W"]:
    """List the blocks that each KV head reads this step, for each of its T queries.

    Args:
        q: the step's T queries; query t of row b stands at position lengths[b]-T+t.
        index: `page_index` of every page of the pool, R = `INDEX_ROWS[kind]`. The page of a query's position and later
            pages may hold anything.
        table: logical page -> page id below N, -1 where there is none.
        lengths: tokens written, the T current ones included.
        kind: of the index, "bounds" or "mean".
        page_size, block_size: tokens.
        k: distant blocks to keep.
        sink: blocks always read at the start.
        local: blocks always read at the end, at least 1.
        implementation: see `pallas_kernels.core.dispatch`.

    A query lists what it would list as the only query of a step, with the later tokens not written yet. So let n =
    lengths[b]-T+t+1 be the tokens up to its own. Its current block is c = (n-1)//block_size. Its first local block is
    the earlier of c-local+1 and the first block of the page that its token was written into, and is at least 0; so this
    page, which is open, is always read. Distant candidates are the blocks from `sink` up to the first local one whose
    page exists. Of these the k best scores are kept, exactly; of equal scores the lower block. NaN and -inf count as
    the lowest finite float32: they rank last, but before an empty entry.

    Scores, in float32: "bounds" sums max(q_d * max_d, q_d * min_d) over d per query head and takes the maximum over the
    group's heads: an upper bound of every dot product with the block (Quest, ICML 2024; bounds must be finite). "mean"
    is the dot product of the group's mean query with the block's mean key.

    Returns ids `[B, T, K, W]` int32: sink, distant, local, ascending, each block once, -1 at the end. W =
    `selection_width(...)`, whatever M is. All are -1 where n is 0 or less. Memory: the index rows that the tables name,
    B * M pages.

    Raises ValueError for shapes, dtypes or sizes that do not fit together.
    """
    call = Call(kind, page_size, block_size, k, sink, local)
    check(call, q, index, table, lengths)
    signature = f"{call} {dispatch.signature(q=q, index=index, table=table)}"
    return dispatch.run("select_blocks", implementation, signature, call, q, index, table, lengths)


def check(call: Call, q: jax.Array, index: jax.Array, table: jax.Array, lengths: jax.Array) -> None:
    """Raise ValueError, with every shape, unless the arguments of a selection fit together."""
    page_size, block_size, rows = call.page_size, call.block_size, INDEX_ROWS[call.kind]
    arrays = dispatch.signature(q=q, index=index, table=table, lengths=lengths)
    if q.ndim != 4 or index.ndim != 5 or table.ndim != 2 or lengths.ndim != 1:
        raise ValueError(f"select_blocks takes q [B,T,H,D], index [N,K,P/bs,R,D], table [B,M], lengths [B]; got {arrays}")
    if index.shape[2:] != (page_size // block_size, rows, q.shape[3]):
        raise ValueError(
            f"index of kind {call.kind!r} with page_size {page_size}, block_size {block_size} must be "
            f"[N, K, {page_size // block_size}, {rows}, {q.shape[3]}]; got {arrays}"
        )
    if q.shape[2] % index.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {index.shape[1]} KV heads; got {arrays}")
    if not q.shape[0] == table.shape[0] == lengths.shape[0]:
        raise ValueError(f"q, table and lengths must have the same batch; got {arrays}")
    if table.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        raise ValueError(f"table and lengths must be int32; got {arrays}")
    if not (jnp.issubdtype(q.dtype, jnp.floating) and jnp.issubdtype(index.dtype, jnp.floating)):
        raise ValueError(f"q and index must be floating point; got {arrays}")
