"""Policies that learn from attention mass: what they need from prefill, and helpers that keep the blocks of largest mass.

Sources: H2O (arXiv 2306.14048) accumulates the mass of all queries; SnapKV (arXiv 2404.14469) uses the last queries of the prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.axes import Shards
from kvjax.cache.page_manager import Reach
from kvjax.policies.decode.base import Blocks, SelectContext, State


@dataclasses.dataclass(frozen=True)
class PrefillMass:
    """What a policy gets from prefill: the attention mass of blocks of `block_size` tokens (None: of pages), summed over queries.

    queries: how many last queries of each chunk; None: every query of the prompt. A chunk has the engine's `prefill_chunk` tokens, and
    begins at a multiple of that. In a chunk that is not full, the last queries are the last ones written.
    """

    block_size: int | None
    queries: int | None = None

    def __post_init__(self):
        for name in ("block_size", "queries"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be an int of at least 1, or None, got {value!r}")

    def tokens(self, page_size: int) -> int:
        """Tokens of a block."""
        return page_size if self.block_size is None else self.block_size


@flax.struct.dataclass
class MassContext:
    """The queries over which a mass is summed: those at positions [first, lengths) of each row. layer: an array, as in `PrefillContext`.
    shards, copies: as in `SelectContext`."""

    first: Int[Array, "B"]
    lengths: Int[Array, "B"]
    layer: int | Int[Array, ""]
    page_size: int = flax.struct.field(pytree_node=False)
    shards: Shards | None = flax.struct.field(pytree_node=False, default=None)
    copies: int = flax.struct.field(pytree_node=False, default=1)

    def over_heads(self, x: Array) -> Array:
        """The sum over the heads of all devices, from the sum over those of this one."""
        return x if self.shards is None else self.shards.over_heads(self.copies, x)[0]


@runtime_checkable
class LearnsFromPrefill(Protocol):
    """The part of a decode policy that learns from prefill. Optional; an engine uses it for the policies that it declares.

    State is kept per sequence and policy. It equals that of one call of `observe_prefill` per chunk, in order, however the prompt was cut
    into calls: while a chunk is not full, each call starts again from the state before the chunk. Tokens that decode steps wrote in between
    are not observed again; a new chunk begins after them. A fork copies the state, `truncate` does not change it.

    Cost: dense prefill has the log-sum-exp already, so queries read keys only once more (`pallas_kernels.block_mass`). Under another
    prefill policy the observed queries attend densely first; for `queries=None` this costs as much as dense attention. The mass is always
    that of dense attention.
    """

    @property
    def prefill_mass(self) -> PrefillMass | None:
        """What to observe; None: no mass."""
        ...

    def observe_prefill(self, mass: Float32[Array, "B H S"], ctx: MassContext, state: State) -> State:
        """Update the state with the mass of one chunk's observed queries; each query adds 1 in total. S = max_pages * page_size /
        block_size of `StateSpec`."""
        ...


@runtime_checkable
class KeepsByMass(Protocol):
    """The part of a decode policy that chooses by attention mass which distant pages a sequence keeps. Optional.

    A page holds all layers of its layer group, so the choice needs the states of all layers. A step makes it on the device before its first
    layer, and reads by it at once. The engine gives the other pages back two steps later, so that it never waits for the device.
    """

    def keeps(self, page_size: int) -> Reach:
        """Sinks and window that it keeps beside the pages that it chooses (`kvjax.policies.decode.base.GivesPagesBack`)."""
        ...

    def settle(self, states: tuple[State, ...], lengths: Int[Array, "B"], page_size: int) -> tuple[State, ...]:
        """The states of all layers with the choice for the next token. lengths: tokens written. The choice may change only where the next
        token opens a page, or other policies decoded since. A page that was left out once must not come back."""
        ...

    def chosen(self, states: tuple[State, ...]) -> Int[Array, "B k"]:
        """The logical pages between sinks and window that it keeps, -1 where there is none."""
        ...


def mass_of_step(
    blocks: Blocks | None, block_lse: Float32[Array, "B T H W"], ctx: SelectContext, block_size: int, num_blocks: int
) -> Float32[Array, "B H S"]:
    """The attention mass of a decode step, for `observe`: each query head's share on every block of the sequence, summed over T queries.

    block_size: that of the listed blocks (of pages if there is no list). num_blocks: S; blocks that were not listed get 0.
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


def largest_blocks(
    scores: Float[Array, "B K S"], ctx: SelectContext, *, k: int, sink: int, local: int, block_size: int, num_queries: int = 1
) -> Blocks:
    """Sink, local and the `k` distant blocks of the largest scores, per KV head, as `pallas_kernels.select_blocks` lists them.

    The last `local` blocks always include those of open pages. Of equal scores the lower block wins. num_queries: T of the step.
    """
    newest = (ctx.lengths - 1) // block_size
    first_open = (ctx.lengths - num_queries) // ctx.page_size * (ctx.page_size // block_size)
    first_local = jnp.maximum(jnp.minimum(newest - local + 1, first_open), 0)[:, None, None]
    newest = newest[:, None, None]
    block = jnp.arange(scores.shape[2], dtype=jnp.int32)
    lowest = jnp.finfo(scores.dtype).min
    candidates = jnp.where((block >= sink) & (block < first_local), jnp.maximum(jnp.nan_to_num(scores, nan=lowest), lowest), -jnp.inf)
    best, distant = jax.lax.top_k(candidates, min(k, scores.shape[2]))
    distant = jnp.where(best > -jnp.inf, distant, -1)
    room = max(local, -(-(ctx.page_size - 1 + num_queries) // block_size))
    ends = jnp.arange(room, dtype=jnp.int32) + first_local
    sinks = jnp.where(block[:sink] < first_local, block[:sink], -1)
    shape = scores.shape[:2]
    parts = (sinks, distant, jnp.where(ends <= newest, ends, -1))
    ids = jnp.concatenate([jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], axis=2)
    behind = jnp.iinfo(jnp.int32).max
    ids = jnp.sort(jnp.where(ids < 0, behind, ids), axis=2)
    return Blocks(jnp.where(ids == behind, -1, ids).astype(jnp.int32), block_size)


def fitted(mass: Float32[Array, "B H W"], num_blocks: int) -> Float32[Array, "B H S"]:
    """Mass of the blocks of a page table as mass of `num_blocks` blocks: padded with 0, or cut off after the last position."""
    return jnp.pad(mass[..., :num_blocks], ((0, 0), (0, 0), (0, max(0, num_blocks - mass.shape[2]))))
