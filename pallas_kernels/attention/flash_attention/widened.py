"""flash_attention of many queries over packed pages (Hopper): a span of pages becomes bfloat16 once, and every tile of
queries reads that.

The kernel for packed pages unpacks a tile of keys again for each 128 query rows of a KV head, which its products do not
hide. Here `hopper.prefill.wide_pages` unpacks a span of positions into a buffer, and the kernel that folds copies tiles
from it by TMA, as from pages of bfloat16. The next span takes the buffer's place, and what is folded so far waits in
memory in float32 (`hopper.prefill.query_relay`). Open pages are read where they lie. So a row meets the same numbers in
the same order as in one launch over packed pages, and has the same bits: these depend neither on the spans nor on which
of the two ways a chunk takes.

The number of spans follows the longest row of the batch, when the program runs.

Memory: `SPAN_BYTES` for a span, and H * T * (D + 2) float32 where the page table is wider than one. Memory traffic:
codes and scales once per call, their numbers once written, then what bfloat16 pages cost; and the state of all rows
twice per span but the last.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.flash_attention import walks
from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.prefill import prefill_fold, query_relay, wide_pages

SPAN_BYTES = 2**27
"""Most bytes of the numbers of a span: 64K tokens of 4 KV heads of head dim 128."""

MIN_ROWS = 2048
"""Query rows of a KV head, all of its query heads together, from which a span is widened. Unpacking in the kernel costs
about 0.3 of the products' time. For about 1,000 rows, that is the time in which codes are read and numbers are
written."""

SPAN = 5
"""Which operand of a launch, after table, starts, lengths, ends and `fresh`, is the first position of the span."""


def pays(q, pages: Pages, window) -> bool:
    """Whether a chunk is to be attended in this way. A window has few tiles, and they are unpacked in the kernel."""
    return pages.packed and window is None and q.shape[1] * q.shape[2] // pages.kv_heads >= MIN_ROWS


def span_of(s: prefill_fold.Shape, width: int) -> int:
    """Tokens of a span for a table of `width` pages."""
    return wide_pages.span_of(s, width, SPAN_BYTES)


def attend(s: prefill_fold.Shape, q, pages: Pages, table, starts, lengths, fresh):
    """Out `[B, T, H, D]` and lse `[B, T, H]` of causal attention without a window."""
    span = span_of(s, table.shape[1])
    walk = functools.partial(walks.over_keys, s, None, pages.open is not None, span)
    fetcher, padded = wide_pages.fetcher(span), prefill_fold.padded(q)
    operands = table, starts, lengths, prefill_fold.plain_ends(table, lengths, s.page_size), fresh

    def fold(number, relay, *state):
        first = jnp.reshape(number * span, (1,)).astype(jnp.int32)
        pools = wide_pages.pools_of(s, pages, table, starts, lengths, first, span)
        return prefill_fold.launch(s, "flash_attention_kernel", walk, fetcher=fetcher, relay=relay)(padded, pools, *operands, first, *state)

    if table.shape[1] * s.page_size <= span:
        return prefill_fold.cut(s, *fold(jnp.int32(0), None))
    stop = jnp.minimum(lengths, starts + s.num_rows).max()
    state, last = query_relay.nothing(s), lax.div(jnp.maximum(stop - 1, 0), jnp.int32(span))
    relays = [query_relay.relay(s, SPAN, last=which) for which in (False, True)]
    lax.fori_loop(0, last, lambda number, _: fold(number, relays[0], *state), [])
    return prefill_fold.cut(s, *fold(last, relays[1], *state))
