"""The rows of a chunk of prefill, sharded over the context axis of a mesh: a device computes norms and products with
weights for its own tokens alone.

Device d of n has two parts of the chunk of 2n equal ones: part d from the front and part d from the back, because later
queries see more keys. A token's part depends only on its place in the chunk, so its bits do not depend on how a prompt
was cut into calls. Functions here are for programs inside `jax.shard_map`, and return what they are given where rows
are not sharded (`Shards.row_parts` is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.axes import CONTEXT, Shards
from kvjax.model.protocols import Latents, LayerInput, Recurrence
from kvjax.policies.prefill import PrefillContext, PrefillPolicy, query_tile_of


def own_rows(shards: Shards, x: Array) -> Array:
    """This device's rows `[B, T/n, ...]` of a chunk's `[B, T, ...]`: those from the front, then those from the back."""
    if shards.row_parts == 1:
        return x
    size = x.shape[1] // (2 * shards.context)
    mine = shards.number(CONTEXT)
    places = mine * size, (2 * shards.context - 1 - mine) * size
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, place, size, axis=1) for place in places], axis=1)


def whole_rows(shards: Shards, x: Array) -> Array:
    """The reverse of `own_rows`, on every device."""
    if shards.row_parts == 1:
        return x
    every = jax.lax.all_gather(x, CONTEXT)
    every = every.reshape(shards.context, x.shape[0], 2, x.shape[1] // 2, *x.shape[2:])
    parts = jnp.concatenate([every[:, :, 0], every[::-1, :, 1]])
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], shards.context * x.shape[1], *x.shape[2:])


def with_whole_keys(shards: Shards, given: LayerInput) -> LayerInput:
    """What a layer mixes, with all of the chunk that queries of other devices read: keys and values, or latents.
    Queries stay those of this device's rows. Of a recurrence everything, because each token needs the one before it."""
    if shards.row_parts == 1:
        return given
    if isinstance(given, Recurrence):
        return given.replace(**{name: whole_rows(shards, getattr(given, name)) for name in ("x", "g", "beta")})
    if isinstance(given, Latents):
        indexer = given.indexer.replace(k=whole_rows(shards, given.indexer.k))
        return given.replace(row=whole_rows(shards, given.row), indexer=indexer)
    return given if given.share_with is not None else given.replace(k=whole_rows(shards, given.k), v=whole_rows(shards, given.v))


def by_queries(
    shards: Shards, attend: Callable[[Array, PrefillContext], Array], query: Float[Array, "B T/n H D"], ctx: PrefillContext
) -> Float[Array, "B T/n H D"]:
    """`attend(query, ctx)` of this device's rows, as two rows of a batch: the part from the front, and that from the
    back. ctx: of the whole chunk, with this device's rows of the indexer's queries."""
    batch, size = query.shape[0], query.shape[1] // 2
    mine = shards.number(CONTEXT)

    def apart(x: Array) -> Array:
        return jnp.concatenate([x[:, :size], x[:, size:]])

    twice: dict[str, Any] = {name: jnp.concatenate([getattr(ctx, name)] * 2) for name in ("page_table", "lengths")}
    twice |= {name: None if (x := getattr(ctx, name)) is None else jnp.concatenate([x] * 2) for name in ("frame_table", "fresh")}
    starts = jnp.concatenate([ctx.starts + place for place in (mine * size, (2 * shards.context - 1 - mine) * size)])
    out = attend(apart(query), ctx.replace(**twice, starts=starts, indexer=jax.tree.map(apart, ctx.indexer)))
    return jnp.concatenate([out[:batch], out[batch:]], axis=1)


def by_tiles(
    shards: Shards, attend: Callable[[Array, PrefillContext], Array], query: Float[Array, "B T H D"], ctx: PrefillContext, tile: int
) -> Float[Array, "B T/n H D"]:
    """This device's rows of `attend(query, ctx)`, for a policy whose tiles of `tile` queries do not divide the parts of
    `by_queries`: each device attends for `tiles_each` neighbouring tiles, the last ones for fewer, and every device
    gets the output of all.

    query, ctx: of the whole chunk, on every device.
    """
    count = query.shape[1]
    size = tiles_each(count, tile, shards.context) * tile
    first = shards.number(CONTEXT) * size

    def part(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, shards.context * size - count), *[(0, 0)] * (x.ndim - 2)))
        return jax.lax.dynamic_slice_in_dim(padded, first, size, axis=1)

    out = attend(part(query), ctx.replace(starts=ctx.starts + first, indexer=jax.tree.map(part, ctx.indexer)))
    return own_rows(shards, jax.lax.all_gather(out, CONTEXT, axis=1, tiled=True)[:, :count])


def in_parts(rows: int, tile: int | None) -> bool:
    """Whether `by_queries` can attend for a device's rows of a chunk: both of its parts are whole tiles."""
    return tile is not None and rows % (2 * tile) == 0


def tiles_each(tokens: int, tile: int, devices: int) -> int:
    """For how many tiles of a chunk each device attends in `by_tiles`."""
    return -(-tokens // (tile * devices))


def uneven_work(policy: PrefillPolicy, chunk: int, context: int, *, learns: bool) -> str:
    """What several devices along context compute of a chunk of prefill without need, or unevenly, and the remedy; ""
    where each of them computes an equal part.

    learns: whether a decode policy learns from prefill, which looks at all queries of a chunk together.
    """
    tile, all_of_it = None if learns else query_tile_of(policy), f"each of the {context} devices along context attends for all of them"
    if context == 1 or (chunk % (2 * context) == 0 and in_parts(chunk // context, tile)):
        return ""
    if chunk % (2 * context):
        return (
            f"chunks of {chunk:,} tokens are no multiple of {2 * context}, twice context: each of its devices computes all of them; "
            "choose a prefill_chunk that is one"
        )
    if tile is None:
        who = "a decode policy that learns from prefill" if learns else f"prefill {policy}"
        return f"{who} looks at all queries of a chunk together: {all_of_it}"
    better = f"choose a prefill_chunk that is a multiple of {2 * tile * context:,}, for equal parts and fewer exchanges"
    if chunk <= tile:
        return f"prefill {policy} looks at the {chunk:,} queries of a chunk together: {all_of_it}; {better}"
    most = tiles_each(chunk, tile, context) * tile
    return f"prefill {policy} looks at {tile:,} queries together: of {chunk:,} a device attends for up to {most:,}, in one piece; {better}"
