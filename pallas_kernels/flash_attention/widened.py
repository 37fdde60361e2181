"""flash_attention of many queries over packed pages (Hopper): a span of pages becomes bfloat16 once, and every tile of queries reads that.

The kernel for packed pages unpacks a tile of keys again for each 128 query rows of a KV head, which its products do not hide. Here
`hopper.wide_pages` unpacks a span of positions into a buffer, and the kernel that folds copies tiles from it by TMA, as from pages of
bfloat16. The next span takes the buffer's place, and what is folded so far waits in memory in float32 (`hopper.query_relay`). Open pages
are read where they lie. So a row meets the same numbers in the same order as in one launch over packed pages, and has the same bits: these
depend neither on the spans nor on which of the two ways a chunk takes.

The number of spans follows the longest row of the batch, when the program runs.

Memory: `SPAN_BYTES` for a span, and H * T * (D + 2) float32 where the page table is wider than one. Memory traffic: codes and scales once
per call, their numbers once written, then what bfloat16 pages cost; and the state of all rows twice per span but the last.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention import walks
from pallas_kernels.hopper import packed_tiles, query_relay, query_tiles, wide_pages
from pallas_kernels.pages import Pages

SPAN_BYTES = 2**27
"""Most bytes of the numbers of a span: 64K tokens of 4 KV heads of head dim 128."""

FEWEST_ROWS = 2048
"""Query rows of a KV head, all of its query heads together, from which a span is widened. Unpacking in the kernel costs about 0.3 of the
products' time. For about 1,000 rows, that is the time in which codes are read and numbers are written."""

SPAN = 5
"""Which operand of a launch, after table, starts, lengths, ends and `fresh`, is the first position of the span."""


def pays(q, pages: Pages, window) -> bool:
    """Whether a chunk is to be attended in this way. A window has few tiles, and they are unpacked in the kernel."""
    return pages.packed and window is None and q.shape[1] * q.shape[2] // pages.kv_heads >= FEWEST_ROWS


def span_of(s: query_tiles.Shape, width: int) -> int:
    """Tokens of a span: as many whole pages and tiles as `SPAN_BYTES` hold, at least one, but not more than a table of `width` pages."""
    unit = wide_pages.unit(s)
    of_token = 2 * s.batch * s.num_kv_heads * s.head_dim * s.dtype.itemsize
    return unit * max(1, min(SPAN_BYTES // (of_token * unit), -(-width * s.page_size // unit)))


def attend(s: query_tiles.Shape, q, pages: Pages, table, starts, lengths, fresh):
    """Out `[B, T, H, D]` and lse `[B, T, H]` of causal attention without a window."""
    opened = pages.open is not None
    span = span_of(s, table.shape[1])
    stops = jnp.minimum(lengths, starts + s.num_rows)
    read = packed_tiles.own_start(s, stops - 1) if opened else stops  # own pages are read open
    walk = functools.partial(walks.over_keys, s, None, opened, span)
    fetcher = query_tiles.Fetcher(query_tiles.PLAIN.registers, functools.partial(_fetch, span))
    operands = table, starts, lengths, query_tiles.plain_ends(table, lengths, s.page_size), fresh
    padded, own = query_tiles.padded(q), (pages.open.k, pages.open.v, pages.open.row_of) if opened else None

    def fold(number, relay, *state):
        first = jnp.reshape(number * span, (1,)).astype(jnp.int32)
        pools = wide_pages.widen(s, pages, table, first, read, span), own, first
        return query_tiles.launch(s, "flash_attention_kernel", walk, fetcher=fetcher, relay=relay)(padded, pools, *operands, first, *state)

    if table.shape[1] * s.page_size <= span:
        return query_tiles.cut(s, *fold(jnp.int32(0), None))
    state, last = query_relay.nothing(s), lax.div(jnp.maximum(stops.max() - 1, 0), jnp.int32(span))
    relays = [query_relay.relay(s, SPAN, last=which) for which in (False, True)]
    lax.fori_loop(0, last, lambda number, _: fold(number, relays[0], *state), [])
    return query_tiles.cut(s, *fold(last, relays[1], *state))


def _fetch(span: int, s: query_tiles.Shape, walk: query_tiles.Walk, pools, head, scratch) -> None:
    """By the third warpgroup: bring the tiles of a span from its numbers, then those of the queries' own pages."""
    wide, own, first_ref = pools
    steps, end = walk.packed
    before = lax.axis_index("row") * (span // s.page_size) - lax.div(first_ref[0], jnp.int32(s.page_size))

    def page_of(position):
        return jnp.where(walk.page_of(position) < 0, -1, lax.div(position, jnp.int32(s.page_size)) + before)

    query_tiles.fetch(s, dataclasses.replace(walk, steps=steps, length=end, page_of=page_of), wide, head, scratch)
    if own is not None:
        packed_tiles.fetch_open(s, walk, own, head, scratch)
