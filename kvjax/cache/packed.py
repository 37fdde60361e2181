"""Writing to layers whose sealed pages are packed: tokens go to the open rows; a page that fills is packed, and then
indexed as it reads.

All functions are pure; under jit with a donated cache the updates are in place. What a query reads depends on its
position alone: its own page in compute dtype, from the rows (`Pages.open`), and every earlier page as packed. Codes and
scales are made by the op `pack_pages`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.arrays import OpenRows, PagedKV
from kvjax.cache.index_spec import IndexSpec, kept_in
from kvjax.cache.writes import seal
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.cache.pack_pages.pool import put_pages
from pallas_kernels.core.pages import OpenPages, physical

NOWHERE = jnp.iinfo(jnp.int32).max
"""A page id or row beyond every pool: writes to it are dropped."""


def append_packed(
    layer: PagedKV,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_table: Int[Array, "B M"],
    rows: Int[Array, "B"],
    indexes: tuple[IndexSpec, ...],
    frames: Int[Array, "B M"] | None = None,
    *,
    sharded: bool = False,
) -> tuple[PagedKV, OpenPages]:
    """Write the valid tokens of a step to the open rows, then seal each page whose last token is among them. Returns
    the layer, and the pages that hold the step's tokens, as its queries read them.

    positions, valid, page_table, frames: as in `append`, at most `MAX_STEP_TOKENS` tokens. rows: of `layer.open`, one
    of each sequence. A page that drafted tokens fill is packed too; if they are dropped, it is packed again when it
    fills again: the row still has its tokens. sharded: whether other devices have some of the pages. Every device keeps
    the open rows of all of them, and seals its own pages.
    """
    (_, count, _, page_size, _), logical = layer.open.k.shape, positions // layer.pages.page_size
    written = valid & (rows >= 0)[:, None]
    if sharded:
        at = jnp.where(written, rows[:, None], NOWHERE), logical % count, slice(None), positions % page_size
        layer = layer.replace(open=OpenRows(_put(layer.open.k, at, k), _put(layer.open.v, at, v)))
    page = physical(page_table if frames is None else frames, logical, written, NOWHERE)
    opened = _open_pages(layer.open.k, layer.open.v, page, rows[:, None] * count + logical % count, layer.pages.num_pages)
    kinds = tuple((spec.name, spec.kind, spec.block_size) for spec in kept_in(layer.index, indexes))
    place = positions, valid, page_table
    pages, index = append_tokens(layer.pages.replace(open=opened), layer.index, k, v, *place, kinds=kinds, frames=frames)
    kept = OpenRows(*(new.reshape(old.shape) for new, old in ((pages.open.k, layer.open.k), (pages.open.v, layer.open.v))))
    return PagedKV(pages.replace(open=None), index, kept), pages.open


def append_chunk(
    layer: PagedKV,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    starts: Int[Array, "B"],
    fresh: Int[Array, "B"],
    first: Int[Array, "B"],
    lengths: Int[Array, "B"],
    page_table: Int[Array, "B M"],
    rows: Int[Array, "B"],
    indexes: tuple[IndexSpec, ...],
    frames: Int[Array, "B M"] | None = None,
) -> tuple[PagedKV, OpenPages]:
    """Write a chunk of prefill: seal the pages that it fills, and keep its last page in the open rows. Returns the
    layer, and the chunk's pages from that of `first` on, as its queries read them.

    The chunk covers positions [starts, starts + T), whole pages; of these, [fresh, lengths) are written. Tokens before
    `fresh` in its page are those in the row. first: the first query whose output counts, at most `fresh`: it, or the
    first token of an earlier page, from which on k and v hold what earlier calls wrote. frames: as in `append`.
    ValueError for a chunk that is not whole pages. Memory: the chunk's keys and values, and their codes.
    """
    (batch, num_tokens, kv_heads, head_dim), page_size, count = k.shape, layer.pages.page_size, layer.open.k.shape[1]
    if num_tokens % page_size:
        raise ValueError(f"a chunk of {num_tokens} tokens is not whole pages of {page_size}, as packed pages need it")
    pages = num_tokens // page_size
    logical = starts[:, None] // page_size + jnp.arange(pages, dtype=jnp.int32)
    began, last = fresh // page_size, (lengths - 1) // page_size
    written = (fresh < lengths) & (rows >= 0)
    positions = starts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    earlier = (positions < fresh[:, None]).reshape(batch, pages, 1, page_size, 1) & (logical == began[:, None])[:, :, None, None, None]

    def whole_pages(pool: Float[Array, "R n K P D"], new: Float[Array, "B T K D"]) -> Float[Array, "B c K P D"]:
        before = pool.at[jnp.maximum(rows, 0), began % count].get(mode="clip")[:, None]
        after = new.astype(pool.dtype).reshape(batch, pages, page_size, kv_heads, head_dim).swapaxes(2, 3)
        return jnp.where(earlier, before, after)

    # The rows are read before they are written, so that the write needs no copy of them.
    k, v, pool = jax.lax.optimization_barrier((whole_pages(layer.open.k, k), whole_pages(layer.open.v, v), layer.open))
    inside = jnp.clip(last - logical[:, 0], 0, pages - 1)
    at = jnp.where(written, rows, NOWHERE), last % count
    newest = (jnp.take_along_axis(x, inside[:, None, None, None, None], axis=1)[:, 0] for x in (k, v))
    opened = OpenRows(*(_put(array, at, page) for array, page in zip((pool.k, pool.v), newest, strict=True)))

    there = written[:, None] & (logical >= (first // page_size)[:, None]) & (logical <= last[:, None])
    page, frame = (physical(table, logical, there, NOWHERE) for table in (page_table, page_table if frames is None else frames))
    full = (logical >= began[:, None]) & ((logical + 1) * page_size <= lengths[:, None])
    k, v = (x.reshape(batch * pages, *x.shape[2:]) for x in (k, v))
    sealed, places = (jnp.where(full, each, NOWHERE).reshape(-1) for each in (page, frame))
    layer = seal_packed(layer.replace(open=opened), k, v, sealed, places, indexes)
    numbers = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    return layer, _open_pages(k[:, None], v[:, None], frame, numbers, layer.pages.num_pages)


def seal_packed(
    layer: PagedKV,
    k: Float[Array, "n K P D"],
    v: Float[Array, "n K P D"],
    pages: Int[Array, " n"],
    frames: Int[Array, " n"],
    indexes: tuple[IndexSpec, ...],
) -> PagedKV:
    """Pack the numbers of whole pages to their `frames`, and index keys as they are read from then on. pages: their
    ids. Numbers outside the pool are skipped."""
    packed, keys = put_pages(layer.pages, k, v, frames)
    return layer.replace(pages=packed, index=seal(layer.index, keys, pages, kept_in(layer.index, indexes)))


def opened(layer: PagedKV, pages: OpenPages | None) -> PagedKV:
    """The layer as the queries of a chunk or step read it, with the open pages that hold their tokens; None: it does
    not pack."""
    return layer if pages is None else layer.replace(pages=layer.pages.replace(open=pages), open=None)


def _put(pool: Array, places, new: Array) -> Array:
    return pool.at[places].set(new.astype(pool.dtype), mode="drop")


def _open_pages(k: Float[Array, "R n K P D"], v: Float[Array, "R n K P D"], page, number, num_pages: int) -> OpenPages:
    """The pages of rows, flat. page: their frames; number: their places in the flat rows."""
    row_of = jnp.full(num_pages, -1, jnp.int32).at[page].set(number, mode="drop")
    return OpenPages(*(x.reshape(-1, *x.shape[2:]) for x in (k, v)), row_of)
