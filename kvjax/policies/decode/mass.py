"""Policies that learn from attention mass: what they ask of prefill, and helpers to keep the blocks of largest mass.

Sources: H2O (arXiv 2306.14048) accumulates the mass of all queries; SnapKV (arXiv 2404.14469) looks at a window of the prompt's last ones.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.policies.decode.base import Blocks, SelectContext, State


@dataclasses.dataclass(frozen=True)
class PrefillMass:
    """What a policy gets from prefill: the attention mass of blocks of `block_size` tokens, summed over queries.

    queries: None for every query of a prompt, or the last so many of each chunk. A chunk is `prefill_chunk` tokens of the engine, from a
    multiple of that on; in the one that is still open, the last queries are those up to where the prompt is written.
    """

    block_size: int
    queries: int | None = None

    def __post_init__(self):
        for name, value in (("block_size", self.block_size), ("queries", 1 if self.queries is None else self.queries)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")


@flax.struct.dataclass
class MassContext:
    """Which queries a mass is the sum of: those at positions [first, lengths) of each row. layer: as in `PrefillContext`, an array."""

    first: Int[Array, "B"]
    lengths: Int[Array, "B"]
    layer: int | Int[Array, ""]
    page_size: int = flax.struct.field(pytree_node=False)


@runtime_checkable
class LearnsFromPrefill(Protocol):
    """The part of a decode policy that learns from prefill. Optional; an engine asks the policies that it declares.

    State is kept per sequence and policy. It is that of one call of `observe_prefill` per chunk, in order, whatever calls the prompt was
    cut into: while a chunk is open, each call starts again from the state before the chunk. What decode steps wrote in between is not
    observed again, and a chunk begins anew behind it. A fork copies the state, `truncate` leaves it as it is.

    Cost: dense prefill has the log-sum-exp already, and queries meet keys once more (`pallas_kernels.block_mass`). Under another prefill
    policy the observed queries attend densely first, which for `queries=None` costs what dense attention does; the mass is always that
    of dense attention.
    """

    @property
    def prefill_mass(self) -> PrefillMass | None:
        """What to observe; None: nothing."""
        ...

    def observe_prefill(self, mass: Float32[Array, "B H S"], ctx: MassContext, state: State) -> State:
        """Fold in the mass of one chunk's observed queries, 1 in all for each. S = max_pages * page_size / block_size of `StateSpec`."""
        ...


def mass_of_step(
    blocks: Blocks | None, block_lse: Float32[Array, "B T H W"], ctx: SelectContext, block_size: int, num_blocks: int
) -> Float32[Array, "B H S"]:
    """The attention mass of a decode step, for `observe`: each query head's share on every block of the sequence, summed over T queries.

    block_size: of the listed blocks (where nothing is listed, of pages). num_blocks: S; blocks that were not listed get 0.
    """
    listed = ctx.page_size if blocks is None else blocks.block_size
    if listed != block_size:
        raise ValueError(f"the step read blocks of {listed} tokens, and its mass is asked for in blocks of {block_size}")
    most = jnp.max(block_lse, axis=3, keepdims=True)
    paid = jnp.exp(block_lse - jnp.where(jnp.isfinite(most), most, 0))
    whole = paid.sum(axis=3, keepdims=True)
    mass = (paid / jnp.where(whole > 0, whole, 1)).sum(axis=1)
    if blocks is None:
        return fitted(mass, num_blocks)
    heads = mass.shape[1]
    ids = jnp.repeat(blocks.ids, heads // blocks.ids.shape[1], axis=1)
    ids = jnp.where(ids < 0, num_blocks, ids)  # behind the end, where nothing is added
    rows, columns = jnp.arange(mass.shape[0])[:, None, None], jnp.arange(heads)[None, :, None]
    return jnp.zeros((*mass.shape[:2], num_blocks), mass.dtype).at[rows, columns, ids].add(mass, mode="drop")


def largest_blocks(
    scores: Float[Array, "B K S"], ctx: SelectContext, *, k: int, sink: int, local: int, block_size: int, num_queries: int = 1
) -> Blocks:
    """Sink, local and the `k` distant blocks of the largest scores, per KV head, as `pallas_kernels.select_blocks` lists them.

    The last `local` blocks, those of open pages always among them; of equal scores the lower block. num_queries: T of the step.
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
