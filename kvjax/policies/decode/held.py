"""Lists that are held: a step lists blocks, and the steps after it read these. For drafts, which need not list anew for
every token (`kvjax.engine.drafts`)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.policies.decode.base import Blocks, DecodePolicy, Stateless, attend_and_observe


@dataclasses.dataclass(frozen=True)
class Listing(Stateless):
    """`policy`, which keeps no state. The state after a step is its list, with the blocks that the next `tokens` tokens
    begin; or none, where attention within the list depends on the query's position, or there is no list."""

    policy: DecodePolicy
    tokens: int

    def attend(self, query, layer, ctx, state):
        """As the policy does."""
        out, blocks, _ = self.policy.attend(query, layer, ctx, ())
        holds = blocks is not None and blocks.window is None
        return out, blocks, _with_following(blocks, ctx.lengths, self.tokens) if holds else ()


@dataclasses.dataclass(frozen=True)
class Held(Stateless):
    """Reads what `Listing(policy)` left in the state; without a list, as the policy does."""

    policy: DecodePolicy

    def attend(self, query, layer, ctx, state):
        """Attention over the list."""
        if not isinstance(state, Blocks):
            return self.policy.attend(query, layer, ctx, state)
        return attend_and_observe(self, query, layer, ctx, state, state)


def _with_following(blocks: Blocks, lengths: Int[Array, "B"], tokens: int) -> Blocks:
    """The list, and the blocks behind the last key that so many more tokens may begin."""
    following = 1 + jnp.arange(-(-tokens // blocks.block_size), dtype=jnp.int32)
    last = (lengths - 1) // blocks.block_size
    ids = last.reshape(-1, *[1] * (blocks.ids.ndim - 1)) + following
    return blocks.replace(ids=jnp.concatenate([blocks.ids, jnp.broadcast_to(ids, (*blocks.ids.shape[:-1], len(following)))], axis=-1))
