"""The decode-policy protocol: a policy is a function that returns a list of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
from jaxtyping import Array, Float, Float32, Int

from kvjax.cache.types import IndexSpec, LayerCache
from pallas_kernels.gather_attention import gather_attention

State = Any
"""Per-layer state of a policy: a pytree whose leaves have the batch as first axis; `()` for policies without state."""


@flax.struct.dataclass
class Blocks:
    """The blocks each KV head reads this step: `[B, K, W]` for all its T queries together, `[B, T, K, W]` for each of them, or, where a
    layer has one KV head, `[B, T, W]`.

    ids: logical block numbers, ascending, -1 where there is none (at the end, or in place of a token without a page). block_size: tokens.
    window: None, or (sink_tokens, window_tokens): within the listed blocks, attention reads only the first `sink_tokens` of the sequence
    and the last `window_tokens` up to each query.
    """

    ids: Int[Array, "B *T K W"]
    block_size: int = flax.struct.field(pytree_node=False)
    window: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class IndexerQuery:
    """A lightning indexer's queries and head weights, as `pallas_kernels.indexer_scores` takes them."""

    q: Float[Array, "B T HI DI"]
    weights: Float32[Array, "B T HI"]


@flax.struct.dataclass
class SelectContext:
    """What a policy may use besides the query: static sizes, and the arrays that say where the sequences are.

    lengths include the current tokens. sm_scale: factor of logits. indexer: None in models without a lightning indexer. page_table: page
    ids; use them for rows of an index. frames: where the bytes of these pages are; use them for ops that read keys.
    """

    page_table: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    layer: int = flax.struct.field(pytree_node=False)
    num_layers: int = flax.struct.field(pytree_node=False)
    page_size: int = flax.struct.field(pytree_node=False)
    sm_scale: float = flax.struct.field(pytree_node=False)
    indexer: IndexerQuery | None = None
    moved: Int[Array, "B M"] | None = None
    """Frames, where they are not the page ids."""
    border: int | None = flax.struct.field(pytree_node=False, default=None)
    """The first frame in host memory; None where all lie on the device."""

    @property
    def frames(self) -> Int[Array, "B M"]:
        """Logical page -> frame, -1 where there is none."""
        return self.page_table if self.moved is None else self.moved


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """Sizes from which a policy makes its state: query heads, KV heads, head dim, tokens per page, largest number of pages per sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int


@runtime_checkable
class DecodePolicy(Protocol):
    """A frozen dataclass: static, hashable, holds no arrays."""

    @property
    def learns(self) -> bool:
        """Whether `observe` wants the attention mass of each block."""
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

    def observe(self, blocks: Blocks | None, block_lse: Float[Array, "B T H W"], ctx: SelectContext, state: State) -> State:
        """Update the state with attention's result: log-sum-exp of the scaled logits of each listed block (every block of the table for
        None)."""
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
        """Scores of every block of the table, per KV head; larger is better, -inf where there is no choice. None: this layer has no
        scores."""
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
    listed = {} if blocks is None else {"blocks": blocks.ids, "block_size": blocks.block_size, "window": blocks.window}
    static = {"sm_scale": ctx.sm_scale, "return_block_lse": policy.learns}
    out, _, *block_lse = gather_attention(query, layer.pages, ctx.frames, ctx.lengths, **static, **listed)
    return out, blocks, policy.observe(blocks, block_lse[0], ctx, state) if policy.learns else state


class Stateless:
    """Base class of policies that learn nothing: no state, no attention mass, and no index unless a subclass names one."""

    learns = False

    def indexes(self) -> tuple[IndexSpec, ...]:
        """No index."""
        return ()

    def init(self, spec: StateSpec, batch: int) -> State:
        """No state."""
        return ()

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Budgets by field: the value, and how many tokens one unit is. An engine refuses more than its page tables can hold."""
        return {}

    def observe(self, blocks, block_lse, ctx, state) -> State:
        """No state to update."""
        return state

    def attend(self, query, layer, ctx, state):
        """The list, then attention over it."""
        return select_and_attend(self, query, layer, ctx, state)

    def describe(self) -> str:
        """For reports: the name alone, unless a policy says more."""
        return str(self)


LEAST_ROOM = 2**20
"""A policy may always keep so many tokens. On a model with fewer positions it then reads everything."""


def check_budgets(policy: DecodePolicy, room: int) -> None:
    """ValueError if a policy keeps more than `room` tokens, the most that an engine's page table can name. Up to
    `LEAST_ROOM` any number is allowed."""
    room = max(room, LEAST_ROOM)
    for name, (value, tokens) in policy.budgets().items() if isinstance(policy, Stateless) else ():
        if value * tokens > room:
            raise ValueError(
                f"policy {policy}: {name} {value} is more than any page table of this model needs, {room // tokens}: "
                f"use a smaller {name}, or the policy dense, which reads everything"
            )
