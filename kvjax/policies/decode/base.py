"""The decode-policy protocol: a policy is a function that returns a list of blocks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import LayerCache
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_manager import Reach
from kvjax.model.layers import Rope
from kvjax.model.rope import turned
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.core.merge import merge_attention
from pallas_kernels.core.messages import shown
from pallas_kernels.core.soft_cap import Scale

State = Any
"""Per-layer state of a policy: a pytree whose leaves have the batch as first axis; `()` for policies without state."""


@flax.struct.dataclass
class Blocks:
    """The blocks each KV head reads this step: `[B, K, W]` for all its T queries together, `[B, T, K, W]` for each of
    them, or, where a layer has one KV head, `[B, T, W]`.

    ids: logical block numbers, ascending, -1 where there is none (at the end, or in place of a token without a page).
    block_size: tokens. window: None, or (sink_tokens, window_tokens): within the listed blocks, attention reads only
    the first `sink_tokens` of the sequence and the last `window_tokens` up to each query. remapped: the list begins
    with sink_tokens // block_size sink blocks, whose keys are read as if sinks and window stood side by side
    (`Window`).
    """

    ids: Int[Array, "B *T K W"]
    block_size: int = flax.struct.field(pytree_node=False)
    window: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)
    remapped: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class IndexerQuery:
    """A lightning indexer's queries and head weights, as `pallas_kernels.indexer_scores` takes them."""

    q: Float[Array, "B T HI DI"]
    weights: Float32[Array, "B T HI"]


@flax.struct.dataclass
class SelectContext:
    """What a policy may use besides the query: static sizes, and the arrays that say where the sequences are.

    lengths include the current tokens. sm_scale: scale of logits. indexer: None in models without a lightning indexer.
    page_table: page ids; use them for rows of an index. frames: where the bytes of these pages are; use them for ops
    that read keys. rope: how queries and keys were rotated; None in layers of latent attention.
    """

    page_table: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    layer: int = flax.struct.field(pytree_node=False)
    num_layers: int = flax.struct.field(pytree_node=False)
    page_size: int = flax.struct.field(pytree_node=False)
    sm_scale: Scale = flax.struct.field(pytree_node=False)
    indexer: IndexerQuery | None = None
    frame_table: Int[Array, "B M"] | None = None
    """Frames, where they are not the page ids."""
    rope: Rope | None = flax.struct.field(pytree_node=False, default=None)
    first_host_frame: int | None = flax.struct.field(pytree_node=False, default=None)
    """The first frame in host memory; None where all lie on the device."""
    shards: Shards = flax.struct.field(pytree_node=False, default=ONE_DEVICE)
    """The devices over which heads and pages are split."""
    kv_replicas: int = flax.struct.field(pytree_node=False, default=1)
    """Devices of the mesh that have the same KV heads."""
    first_device: Int[Array, "B"] | None = None
    """On which device the pages of each row begin, where they are sharded over several."""

    earlier: tuple[Blocks | None, ...] = ()
    """What the policy listed in this step in each layer before this one, except those with a window of their own."""
    max_pages: int = flax.struct.field(pytree_node=False, default=0)
    """Pages of the longest sequence (`StateSpec`), for policies that learn."""

    @property
    def sharded(self) -> bool:
        """Whether other devices have some of the pages. The page table then names those of this device alone."""
        return self.shards.context > 1

    @property
    def frames(self) -> Int[Array, "B M"]:
        """Logical page -> frame, -1 where there is none."""
        return self.page_table if self.frame_table is None else self.frame_table


@dataclasses.dataclass(frozen=True)
class AttentionMass:
    """What a policy learns from: the attention mass of blocks of `block_size` tokens (None: of pages), summed over
    queries.

    queries: which queries of prefill count: so many last ones of each chunk; None: every one; 0: none. A chunk has the
    engine's `prefill_chunk` tokens, and begins at a multiple of that. In a chunk that is not full, the last queries are
    the last ones written. steps: whether the queries of the policy's own decode steps count. Their mass is that of the
    listed blocks, which must be of this size.

    Cost of prefill: dense prefill has the log-sum-exp already, so queries read keys only once more
    (`pallas_kernels.block_mass`). Under another prefill policy the queries that count attend densely first; for
    `queries=None` this costs as much as dense attention. The mass is always that of dense attention.
    """

    block_size: int | None = None
    queries: int | None = None
    steps: bool = True

    def __post_init__(self):
        for name, least in (("block_size", 1), ("queries", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} must be an int of at least {least}, or None, got {value!r}")

    def tokens(self, page_size: int) -> int:
        """Tokens of a block."""
        return page_size if self.block_size is None else self.block_size


@flax.struct.dataclass
class MassContext:
    """The queries over which a mass is summed: those at positions [first, lengths) of each row. layer: in prefill an
    array, as in `PrefillContext`. shards, kv_replicas: as in `SelectContext`."""

    first: Int[Array, "B"]
    lengths: Int[Array, "B"]
    layer: int | Int[Array, ""]
    shards: Shards = flax.struct.field(pytree_node=False, default=ONE_DEVICE)
    kv_replicas: int = flax.struct.field(pytree_node=False, default=1)

    def over_heads(self, x: Array) -> Array:
        """The sum over the heads of all devices, from the sum over those of this one."""
        return self.shards.over_heads(self.kv_replicas, x)[0]


@runtime_checkable
class GivesPagesBack(Protocol):
    """What a decode policy says about the tokens that it reads, so that an engine can give pages back. Optional.

    An engine gives back the pages of a sequence that a policy which keeps less decodes, from its first step on. After
    that only this policy can decode the sequence, or one whose reach lies within what is kept.
    """

    def reach(self, page_size: int) -> Reach | None:
        """Sinks and window outside which no query reads a key; None: it may read any."""
        ...

    def keeps(self, page_size: int) -> Reach | None:
        """Sinks and window that stay in memory for queries to come; None: everything does. A policy that also keeps
        pages of its choice, by what it has learned, is a `kvjax.policies.decode.mass.KeepsByMass`."""
        ...


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """Sizes from which a policy makes its state: query heads, KV heads, head dim, tokens per page, largest number of
    pages per sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int


@runtime_checkable
class DecodePolicy(Protocol):
    """A frozen dataclass: static, hashable, holds no arrays."""

    @property
    def learns(self) -> AttentionMass | None:
        """Of which queries `observe` gets the attention mass; None: of none. A policy that learns from prefill must be
        declared to the engine."""
        ...

    def indexes(self) -> tuple[IndexSpec, ...]:
        """Indexes that sealing a page must build."""
        ...

    def init(self, spec: StateSpec, batch: int) -> State:
        """State of one layer for `batch` sequences."""
        ...

    def select(self, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: State) -> tuple[Blocks | None, State]:
        """The list of blocks to read; None means every block."""
        ...

    def observe(self, mass: Float32[Array, "B H S"], ctx: MassContext, state: State) -> State:
        """Update the state with the mass of a chunk of prefill, or of a step; each query adds 1 in total. S = max_pages
        * page_size / block_size of `StateSpec`.

        State is kept per sequence and policy. After prefill it equals that of one call per chunk, in order, however the
        prompt was cut into calls: while a chunk is not full, each call starts again from the state before the chunk.
        Tokens that steps wrote in between are not observed again; a new chunk begins after them. A fork copies the
        state, `truncate` does not change it.
        """
        ...

    def attend(
        self, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: State
    ) -> tuple[Float[Array, "B T H D"], Blocks | None, State]:
        """Select, attend to the selected blocks, observe: `select_and_attend`, or one op that does all."""
        ...

    def describe(self) -> str:
        """The policy and its keys, for reports: "top:8 (1,664 keys: ...)"."""
        ...


@runtime_checkable
class ScoresBlocks(Protocol):
    """A policy that can show the scores by which it chose, for `Engine.inspect`. Optional."""

    def scores(self, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: State) -> Float32[Array, "B K S"] | None:
        """Scores of every block of the table, per KV head; larger is better, -inf where there is no choice. None: this
        layer has no scores."""
        ...


def select_and_attend(
    policy: DecodePolicy, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, state: State
) -> tuple[Float[Array, "B T H D"], Blocks | None, State]:
    """The output of attention over the policy's list, the list, and the state after it."""
    selected = policy.select(query, layer, ctx, state)
    if not isinstance(selected, tuple) or len(selected) != 2 or not isinstance(selected[0], Blocks | None):
        kinds = ", ".join(type(each).__name__ for each in selected) if isinstance(selected, tuple) else type(selected).__name__
        raise ValueError(
            f"policy {policy}: select must return (Blocks, state), or (None, state) to read every block; it returned ({kinds})"
        )
    blocks, state = selected
    if blocks is not None:
        _check_list(policy, blocks, query, layer, ctx)
    return attend_and_observe(policy, query, layer, ctx, blocks, state)


def _check_list(policy: DecodePolicy, blocks: Blocks, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext) -> None:
    """ValueError, with the place of the policy's `select`, unless its list has ids that a step can read."""
    (batch, tokens), heads, ids = query.shape[:2], layer.pages.kv_heads, blocks.ids
    shapes = [(batch, heads), (batch, tokens, heads)] + ([(batch, tokens)] if heads == 1 else [])
    is_array = isinstance(ids, Array | np.ndarray)
    if not is_array or not ids.ndim or ids.shape[:-1] not in shapes or not ids.shape[-1]:
        said = f"ids must be an array [B={batch}, K={heads}, W], or [B, T={tokens}, K, W] with a list for each query"
        found = f"{ids.dtype}{list(ids.shape)}" if is_array else shown(ids)
    elif ids.dtype != jnp.int32:
        said, found = "ids must be int32", ids.dtype
    elif ctx.page_size % blocks.block_size:
        said, found = f"block_size must divide the page size {ctx.page_size}", blocks.block_size
    else:
        return
    code = getattr(inspect.unwrap(type(policy).select), "__code__", None)  # a partial has none
    place = "" if code is None else f"{code.co_filename}, line {code.co_firstlineno}: "
    raise ValueError(f"{place}what select of policy {policy} lists cannot be read: {said}; got {found}")


def attend_and_observe(
    policy: DecodePolicy,
    query: Float[Array, "B T H D"],
    layer: LayerCache,
    ctx: SelectContext,
    blocks: Blocks | None,
    state: State,
    frames: Int[Array, "B K W"] | None = None,
) -> tuple[Float[Array, "B T H D"], Blocks | None, State]:
    """The output of attention over a list, the list, and the state of a policy that has seen it. frames: as in
    `attend_listed`."""
    learns = policy.learns is not None and policy.learns.steps
    out, block_lse = attend_listed(query, layer, ctx, blocks, return_block_lse=learns, frames=frames)
    if learns:
        size = policy.learns.tokens(ctx.page_size)
        mass = mass_of_step(blocks, block_lse, ctx, size, ctx.max_pages * ctx.page_size // size)
        at = MassContext(ctx.lengths - query.shape[1], ctx.lengths, ctx.layer, ctx.shards, ctx.kv_replicas)
        state = policy.observe(mass, at, state)
    return out, blocks, state


def mass_of_step(
    blocks: Blocks | None, block_lse: Float32[Array, "B T H W"], ctx: SelectContext, block_size: int, num_blocks: int
) -> Float32[Array, "B H S"]:
    """The attention mass of a decode step: each query head's share on every block of the sequence, summed over T
    queries.

    block_size: that of the listed blocks (of pages if there is no list). num_blocks: S; blocks that were not listed get
    0.
    """
    listed = ctx.page_size if blocks is None else blocks.block_size
    if listed != block_size:
        raise ValueError(f"the step read blocks of {listed} tokens, so its mass cannot be given in blocks of {block_size}")
    most = jnp.max(block_lse, axis=3, keepdims=True)
    paid = jnp.exp(block_lse - jnp.where(jnp.isfinite(most), most, 0))
    whole = paid.sum(axis=3, keepdims=True)
    mass = (paid / jnp.where(whole > 0, whole, 1)).sum(axis=1)
    if blocks is None:
        return fitted(mass, num_blocks)
    heads = mass.shape[1]
    ids = jnp.repeat(blocks.ids, heads // blocks.ids.shape[1], axis=1)
    ids = jnp.where(ids < 0, num_blocks, ids)  # past the end, so nothing is added
    rows, columns = jnp.arange(mass.shape[0])[:, None, None], jnp.arange(heads)[None, :, None]
    return jnp.zeros((*mass.shape[:2], num_blocks), mass.dtype).at[rows, columns, ids].add(mass, mode="drop")


def fitted(mass: Float32[Array, "B H W"], num_blocks: int) -> Float32[Array, "B H S"]:
    """Mass of the blocks of a page table as mass of `num_blocks` blocks: padded with 0, or cut off after the last
    position."""
    return jnp.pad(mass[..., :num_blocks], ((0, 0), (0, 0), (0, max(0, num_blocks - mass.shape[2]))))


def attend_listed(
    query: Float[Array, "B T H D"],
    layer: LayerCache,
    ctx: SelectContext,
    blocks: Blocks | None,
    *,
    return_block_lse: bool,
    frames: Int[Array, "B K W"] | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H W"] | None]:
    """Attention over a policy's list: the output, and if asked for, the log-sum-exp of each listed block.

    frames: of the listed blocks, where KV heads find a page in different ones; None: as the context says. Where pages
    are sharded over devices, each reads those that it has, and the results are merged.
    """
    out, lse, block_lse = _attend_here(query, layer, ctx, blocks, return_block_lse, frames)
    if ctx.sharded:
        out, lse, block_lse = ctx.shards.merged(out, lse, ctx.first_device, block_lse)
    return out, block_lse


def _attend_here(
    query: Float[Array, "B T H D"],
    layer: LayerCache,
    ctx: SelectContext,
    blocks: Blocks | None,
    return_block_lse: bool,
    frames: Int[Array, "B K W"] | None,
) -> tuple[Array, Array, Array | None]:
    """Output, log-sum-exp, and that of each block, over the pages that this device has."""
    listed = {} if blocks is None else {"block_size": blocks.block_size, "window": blocks.window}
    gather = functools.partial(gather_attention, sm_scale=ctx.sm_scale, return_block_lse=return_block_lse, **listed)
    where = layer.pages, ctx.frames, ctx.lengths
    if ctx.sharded and blocks is None and query.shape[1] == 1 and not return_block_lse:
        # Other devices' pages would cost as much time as they take in the table. Drafted tokens need the places of
        # their pages.
        where = layer.pages, *ctx.shards.own_pages(ctx.frames, ctx.lengths, ctx.first_device, ctx.page_size)
    sinks = blocks.window[0] // blocks.block_size if blocks is not None and blocks.remapped else 0
    if not sinks:
        out, lse, *block_lse = gather(query, *where, blocks=None if blocks is None else blocks.ids, block_frames=frames)
        return out, lse, block_lse[0] if block_lse else None
    positions = ctx.lengths[:, None] - query.shape[1] + jnp.arange(query.shape[1], dtype=jnp.int32)
    near = turned(query, ctx.rope, cache_positions(positions, blocks.window) - positions)
    parts = []
    for asked, part in ((near, slice(None, sinks)), (query, slice(sinks, None))):
        of_part = None if frames is None else frames[..., part]
        parts.append(gather(asked, *where, blocks=blocks.ids[..., part], block_frames=of_part))
    out, lse = merge_attention(*([part[place] for part in parts] for place in range(2)))
    return out, lse, jnp.concatenate([part[2] for part in parts], axis=3) if return_block_lse else None


def keys_listed(
    ids: Int[Array, "..."], size: int, window: tuple[int, int] | None, lengths: Int[Array, "..."], num_tokens: int = 1
) -> Int[Array, "..."]:
    """How many keys of each listed block the latest `num_tokens` tokens attend, all together; 0 where an id is -1.

    size: tokens of a block. window: as in `Blocks`. lengths: tokens of the sequence, these included; it must broadcast
    to `ids`.
    """
    start, stop = ids * size, jnp.minimum((ids + 1) * size, lengths)
    keys = jnp.maximum(stop - start, 0)
    if window is not None:
        sink_tokens, window_tokens = window
        oldest = jnp.maximum(lengths - num_tokens - (window_tokens - 1), sink_tokens)
        keys = jnp.maximum(jnp.minimum(stop, sink_tokens) - start, 0) + jnp.maximum(stop - jnp.maximum(start, oldest), 0)
    return jnp.where(ids >= 0, keys, 0)


def cache_positions(positions: Int[Array, "..."], window: tuple[int, int]) -> Int[Array, "..."]:
    """Where a query stands in a cache of sinks and window alone: its position, or, once tokens have left, the last
    place of the cache.

    window: (sink_tokens, window_tokens). Source: StreamingLLM (arXiv 2309.17453, section 3.2).
    """
    return jnp.minimum(positions, sum(window) - 1)


class Stateless:
    """Base class of policies that learn nothing: no state, no attention mass, and no index unless a subclass names
    one."""

    learns = None
    one_op: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    """Of a class whose `attend` selects and attends in one op: its `select` and that `attend`, which give the same."""
    needs_indexer = False
    """Whether it ranks tokens by a lightning indexer, which every layer of attention must then have."""
    watches = False
    """Whether it is a policy that measures what another one misses."""
    needs_kv_heads = False
    """Whether it reads keys of each KV head, which layers of latent attention do not keep."""
    chooses_over_devices = False
    """Whether `select` lists the same on every device of a mesh over which pages are sharded (`SelectContext.sharded`).
    A class that defines `select` says so itself."""

    def indexes(self) -> tuple[IndexSpec, ...]:
        """No index."""
        return ()

    def init(self, spec: StateSpec, batch: int) -> State:
        """No state."""
        return ()

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Budgets by field: the value, and how many tokens one unit is. An engine refuses more than its page tables can
        hold."""
        return {}

    def reach(self, page_size: int) -> Reach | None:
        """Any key may be read."""
        return None

    def keeps(self, page_size: int) -> Reach | None:
        """No page is given back."""
        return None

    def observe(self, mass, ctx, state) -> State:
        """No state to update."""
        return state

    def attend(self, query, layer, ctx, state):
        """The list, then attention over it."""
        return select_and_attend(self, query, layer, ctx, state)

    def describe(self) -> str:
        """For reports: the name alone, unless a policy says more."""
        return str(self)


def attends_by_list(policy: DecodePolicy) -> bool:
    """Whether `policy.attend` is attention over what `policy.select` lists. A class whose `attend` is one op that also
    selects says so by `Stateless.one_op`, which does not hold for a subclass that selects or attends otherwise."""
    kind = type(policy)
    return kind.attend is Stateless.attend or (kind.select, kind.attend) == getattr(kind, "one_op", None)


def is_watched(policy: DecodePolicy) -> bool:
    """Whether it is a `Watched`, whose module this does not load."""
    return getattr(policy, "watches", False)


def chooses_over_devices(policy: DecodePolicy) -> bool:
    """Whether the class whose `select` a policy has says that it lists the same on every device, each of which has some
    of the pages."""
    owner = next((kind for kind in type(policy).__mro__ if "select" in vars(kind)), None)
    return owner is not None and vars(owner).get("chooses_over_devices", False)


MIN_ROOM = 2**20
"""A policy may always keep so many tokens. On a model with fewer positions it then reads everything."""


def check_budgets(policy: DecodePolicy, room: int, page_size: int) -> None:
    """ValueError if a policy keeps more than `room` tokens, the most that an engine's page table can name, or if its
    blocks do not divide pages of `page_size` tokens. Up to `MIN_ROOM` any number is allowed."""
    room = max(room, MIN_ROOM)
    for name, (value, tokens) in policy.budgets().items() if isinstance(policy, Stateless) else ():
        if page_size % tokens:  # an index says so too, but not every policy has one
            raise ValueError(
                f"policy {policy}: block_size {tokens} does not divide page_size {page_size}: use a page_size that is a multiple of "
                f"{tokens}, or a policy of smaller blocks"
            )
        if value * tokens > room:
            raise ValueError(
                f"policy {policy}: {name} {value} is more than any page table of this model needs, {room // tokens}: "
                f"use a smaller {name}, or the policy dense, which reads everything"
            )
