"""How an engine mixes tokens: it writes a layer's keys and values, or latents, to pages, and attends to what the
layer's group and the policy read.

A layer group with a window reads only its window. Policies list blocks in layers that keep every token. A recurrent
layer has one row of state per sequence: the only entry of its page table.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import OPEN, Cache, CacheSpec, IndexSpec, LatentPages, LayerCache, PagedKV, append, append_latents
from kvjax.cache.host_pool.hot_buffer import Fetched, HotTiles, fetch
from kvjax.cache.index_spec import kept_in
from kvjax.cache.packed import append_chunk, append_packed
from kvjax.engine import recurrent
from kvjax.engine.policy_state import Learning, attend_and_learn
from kvjax.engine.sequence_parallel import by_queries, by_tiles, in_parts, own_rows, whole_rows
from kvjax.model.protocols import Heads, Latents, Recurrence
from kvjax.policies.decode.base import Blocks, DecodePolicy, IndexerQuery, SelectContext, attend_and_observe, attends_by_list
from kvjax.policies.prefill import PrefillContext, PrefillPolicy, query_tile_of
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.core.pages import OpenPages, Pages


def write(
    cache: Cache,
    layers: tuple[LayerCache | None, ...],
    number: int,
    given: Heads | Latents,
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    indexes: tuple[IndexSpec, ...],
    frames: Int[Array, "B M"] | None,
    chunk: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None,
) -> tuple[LayerCache | None, OpenPages | None]:
    """Layer `number` of `layers` with the valid tokens written; unchanged if it reads another layer's pages. And, if it
    packs sealed pages, the open pages that these tokens' queries read.

    frames: those of its page table; None: frames are page ids. chunk: of prefill: its first token to write, and the
    first whose row is computed. ValueError if model and cache name different windows, or different layers to share
    with.
    """
    window, owner = cache.spec.group_of(number).window, cache.spec.layers[number].share_with
    if given.window != window:
        raise ValueError(f"layer {number} of the model has the window {given.window}, the cache keeps {window}")
    if given.share_with != owner:
        raise ValueError(f"layer {number} of the model shares with layer {given.share_with}, that of the cache with {owner}")
    if owner is not None:
        return layers[number], None
    place = positions, valid, cache.table_of(number)
    if isinstance(given, Latents):
        return append_latents(layers[number], given.row, given.indexer.k, *place, frames), None
    kinds = kept_in(layers[number].index, indexes)
    if layers[number].open is None:
        return append(layers[number], given.k, given.v, *place, kinds, frames), None
    rows = cache.page_tables[OPEN][:, 0]
    if chunk is None:
        sharded = cache.shards.context > 1
        return append_packed(layers[number], given.k, given.v, *place, rows, kinds, frames, sharded=sharded)
    return append_chunk(layers[number], given.k, given.v, positions[:, 0], *chunk, cache.lengths, place[2], rows, kinds, frames)


def pages_of(spec: CacheSpec, layers: tuple[LayerCache | None, ...], number: int, owners: tuple[LayerCache, ...] = ()) -> LayerCache:
    """The pages that layer `number` attends to: its own, or those of the layer that it shares with. owners: the layers
    of `spec.owners`."""
    owner = spec.layers[number].share_with
    if owner is None:
        return layers[number]
    return layers[owner] if owner >= 0 else owners[owner]


def indexer_query(given: Heads | Latents) -> IndexerQuery | None:
    """The indexer's query, by which policies rank tokens; None in layers without an indexer."""
    return IndexerQuery(given.indexer.q, given.indexer.weights) if isinstance(given, Latents) else None


def attend_chunk(
    policy: PrefillPolicy, given: Heads | Latents, layer: LayerCache, ctx: PrefillContext, learning: Learning | None, known: tuple[Any, ...]
) -> tuple[Float[Array, "B T H D"], tuple[Any, ...]]:
    """Attention of a chunk, and the states of learning policies after it. known: their states of this layer before it.
    In a layer with a window they learn nothing. On a mesh, queries and output are those of this device's rows
    (`kvjax.engine.sequence_parallel`); where a policy looks at all queries of the chunk together, every device attends
    for all of them."""

    def attend(query: Array, ctx: PrefillContext) -> tuple[Array, tuple[Any, ...]]:
        if given.window is None:
            out, after = attend_and_learn(policy, query, layer, ctx, learning, known)
            return out, known if learning is None else after
        pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
        return flash_attention(query, *pages, fresh=ctx.fresh, window=(0, given.window), sm_scale=ctx.sm_scale)[0], known

    shards = ctx.shards
    if shards.row_parts == 1:
        return attend(given.q, ctx)
    tile = 1 if given.window is not None else None if learning is not None else query_tile_of(policy)
    if in_parts(given.q.shape[1], tile):
        return by_queries(shards, lambda query, ctx: attend(query, ctx)[0], given.q, ctx), known
    query, indexer = jax.tree.map(lambda x: whole_rows(shards, x), (given.q, ctx.indexer))
    ctx = ctx.replace(indexer=indexer)
    if tile is not None and query.shape[1] > tile:
        return by_tiles(shards, lambda query, ctx: attend(query, ctx)[0], query, ctx, tile), known
    out, states = attend(query, ctx)
    return own_rows(shards, out), states


def attend_hot(
    policy: DecodePolicy,
    query: Float[Array, "B T H D"],
    layer: PagedKV,
    ctx: SelectContext,
    state: Any,
    hot: HotTiles,
    now: Int[Array, ""],
    owner: int,
) -> tuple[Float[Array, "B T H D"], Blocks, Any, Pages, HotTiles, Fetched] | None:
    """`policy.attend` through the hot buffer of layer `owner`: output, list and state, the layer's pages (without open
    ones) and the buffer afterwards, and what was listed. now: the step's number. None where the policy does not list
    whole pages for all queries together, or attends by an op of its own: then pages are read where they lie."""
    if not lists_pages(policy, ctx.page_size) or (query.shape[1] > 1 and jax.tree.leaves(state)):
        return None  # another op than attention over the list, or one for each drafted token
    blocks, state = policy.select(query, layer, ctx, state)
    if blocks is None or blocks.ids.ndim != 3 or blocks.block_size != ctx.page_size:
        return None
    where = (blocks.ids, ctx.page_table, ctx.frames, ctx.lengths, now)
    pages = layer.pages.replace(open=None)  # sealed pages alone are in the buffer
    hot, pages, fetched = fetch(hot, pages, *where, num_queries=query.shape[1], border=ctx.first_host_frame, owner=owner)
    layer = with_pages(layer, pages)
    return *attend_and_observe(policy, query, layer, ctx, blocks, state, fetched.frames), pages, hot, fetched


def lists_pages(policy: DecodePolicy, page_size: int) -> bool:
    """Whether a step of one token goes through the hot buffer, in layers where `policy` has a list and the engine has a
    buffer: what `attend_hot` finds when it runs, said before."""
    return attends_by_list(policy) and getattr(policy, "block_size", None) in (None, page_size)


def attend_tokens(
    policy: DecodePolicy, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: Any
) -> tuple[Float[Array, "B T H D"], Blocks | None, Any]:
    """`policy.attend`. Where pages are sharded over the devices of a mesh, each reads those of the policy's list that
    it has."""
    if not ctx.sharded:
        return policy.attend(query, layer, ctx, state)
    blocks, state = policy.select(query, layer, ctx, state)
    listed = blocks
    if blocks is not None and blocks.ids.ndim == 3 and blocks.ids.shape[1] == query.shape[1] > 1 and layer.pages.kv_heads == 1:
        listed = blocks.replace(ids=blocks.ids[:, :, None])  # a list for each query
    out, _, state = attend_and_observe(policy, query, layer, ctx, listed, state)
    return out, blocks, state


def all_gather_pages(
    layer: PagedKV | LatentPages, ctx: PrefillContext, table: Int[Array, "B M"], indexes: tuple[IndexSpec, ...]
) -> tuple[PagedKV | LatentPages, PrefillContext]:
    """The layer with the pages of all devices of the context axis in place of its pool, and the context with their
    places.

    table: page ids of the whole mesh. indexes: those that are gathered, too. Memory: the pages of one layer, `B * M` of
    them, on every device.
    """
    shards = ctx.shards
    rows, places = shards.places(table, ctx.page_table)
    names = layer.index if isinstance(layer, LatentPages) else [spec.name for spec in indexes if spec.name in layer.index]
    index = {name: shards.gathered(layer.index[name], rows) for name in names}
    opened = layer.pages.open  # the chunk's pages, the same on all devices; only where they lie differs
    pages = jax.tree.map(lambda pool: shards.gathered(pool, rows), layer.pages.replace(open=None))
    if opened is not None:
        pages = pages.replace(open=opened.replace(row_of=shards.gathered(opened.row_of, rows)))
    return type(layer)(*jax.lax.optimization_barrier((pages, index))), ctx.replace(page_table=places)


def recurrent_prefill(
    cache: Cache, layers: tuple[LayerCache | None, ...], number: int, given: Recurrence, starts: Int[Array, "B"], fresh: Int[Array, "B"]
) -> tuple[Float[Array, "B T H Dv"], LayerCache]:
    """The recurrence of a chunk of prefill in layer `number` of `layers`, and the layer after it."""
    return recurrent.prefill(layers[number], cache.table_of(number)[:, 0], given, starts, fresh, cache.lengths)


def recurrent_decode(
    cache: Cache, layers: tuple[LayerCache | None, ...], number: int, given: Recurrence, active: Bool[Array, "B"]
) -> tuple[Float[Array, "B T H Dv"], LayerCache]:
    """The recurrence of a decode step in layer `number` of `layers`, and the layer after it. cache.lengths: without
    these tokens."""
    return recurrent.step(layers[number], cache.table_of(number)[:, 0], given, cache.lengths, active)


def with_pages(layer: PagedKV, pages: Pages) -> PagedKV:
    """A layer with other pages, as copies of tiles return them, and the open ones that it has."""
    return layer.replace(pages=pages.replace(open=layer.pages.open))


def reader_of(policy: DecodePolicy, given: Heads | Latents) -> DecodePolicy:
    """The policy that lists the blocks of a decode step in this layer: `policy`, or the layer's own window."""
    if given.window is None:
        return policy
    from kvjax.policies.decode.window import Window

    return Window(0, given.window)
