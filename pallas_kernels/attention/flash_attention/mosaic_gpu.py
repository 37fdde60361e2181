"""flash_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.prefill.prefill_fold` over every tile of keys,
or those of sinks and window.

Key tiles are fixed spans of absolute positions, walked in ascending order. So a row's bits depend neither on where its
chunk starts, nor on the width of the page table, nor on the other rows.

A chunk whose heads and tiles of queries are too few CTAs for the multiprocessors of a device has its keys split
(`clusters.splits_of`): tile j of the keys goes to part j modulo the number of parts, and the parts are merged in order.
That number depends only on the heads, so each part of a row has the same keys, in the same order, whatever the length,
the table's width and the chunk. Chunks that are split and chunks that are not differ in their bits. Attention in a
window and over packed pages is not split: it has few tiles, or two kinds of them.

Chunks of many queries over packed pages have them unpacked once, a span at a time (`flash_attention.widened`), with the
same bits.

Tiles of 128 queries of which none is needed (before `fresh`, or past the end) read no keys. With splits, a warpgroup of
64 such queries does not multiply (`hopper.prefill.prefill_fold.pass_by`). Others have the bits that they have beside
queries that are needed.

Memory traffic: q and out once; keys and values of a sequence once per 128 queries and head, from L2 where neighbours
share them. With splits, also splits * H * T * (D + 1) float32, written and read; independent of the number of keys.
Source: FlashAttention-3 (arXiv 2407.08608); Flash-Decoding for splits; StreamingLLM (arXiv 2309.17453) for sinks and
window.
"""

from __future__ import annotations

import dataclasses
import functools

import jax

from pallas_kernels.attention.flash_attention import walks, widened
from pallas_kernels.attention.flash_attention.api import Call
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold


def unsupported(call: Call, q, pages, table, starts, lengths, fresh) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    return packed_tiles.unsupported(q, pages, call.sm_scale)


def flash_attention(call: Call, q, pages, table, starts, lengths, fresh):
    """See `pallas_kernels.flash_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths, fresh)
    if reason:
        raise NotImplementedError(f"flash_attention 'mosaic_gpu': {reason}")
    return _attend(call, q, pages, table, starts, lengths, fresh)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, fresh):
    s = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale)
    if widened.pays(q, pages, call.window):
        return widened.attend(s, q, pages, table, starts, lengths, fresh)
    if call.window is None and not pages.packed:
        s = dataclasses.replace(s, splits=clusters.splits_of(s.num_heads, s.query_tiles))
    plain_end = prefill_fold.plain_ends(table, lengths, s.page_size)
    walk = functools.partial(walks.over_keys, s, call.window, pages.open is not None, None)
    launch = prefill_fold.launch(s, "flash_attention_kernel", walk, fetcher=packed_tiles.fetcher_of(s, pages))
    out, lse = launch(prefill_fold.padded(q), packed_tiles.pools_of(pages), table, starts, lengths, plain_end, fresh)
    if s.splits == 1:
        return prefill_fold.cut(s, out, lse)
    return tuple(x[:, : s.num_rows] for x in prefill_fold.merge_parts(s, out, lse))
