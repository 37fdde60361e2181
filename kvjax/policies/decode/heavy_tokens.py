"""Heavy hitters by token, as in H2O (arXiv 2306.14048): for each KV head of each layer, the tokens that received most
attention so far.

It only reads less, because a page with one chosen token would have to stay.
"""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp

from kvjax.policies.decode.base import AttentionMass, Blocks
from kvjax.policies.decode.candidates import largest, with_ends
from kvjax.policies.decode.mass import SinksAndHeaviest


@dataclasses.dataclass(frozen=True)
class HeavyTokens(SinksAndHeaviest):
    """Per KV head of each layer: the first `sink` tokens, the last `local` ones, and the `k` tokens between of most
    attention mass.

    Mass is what all queries of the KV head's group paid: those of the prompt, and of every step of this policy. No
    memory is given back. The state holds a float32 for each token and KV head of the longest sequence. A token that was
    left out is never read again.
    """

    k: int
    sink: int = 128
    local: int = 512

    name, learns, block_size, chooses_over_devices = "heavy-tokens", AttentionMass(1), 1, True

    def state_axes(self):
        """KV heads are split over devices."""
        return (None, "kv_heads", None)

    def init(self, spec, batch):
        """No mass: `[B, K, S]` for tokens; -inf for one that was left out, for good."""
        return jnp.zeros((batch, spec.num_kv_heads, spec.max_pages * spec.page_size), jnp.float32)

    def select(self, query, layer, ctx, state):
        """Sinks, the distant tokens of most mass, and the latest. Other distant tokens are left out from here on."""
        batch, heads, count = state.shape
        newest, tokens = ctx.lengths[:, None, None] - 1, jnp.arange(count, dtype=jnp.int32)
        first_local = jnp.maximum(newest + 1 - self.local, 0)
        distant = (tokens >= self.sink) & (tokens < first_local)
        chosen = largest(state, distant & (state > -jnp.inf), self.k)
        rows, heads = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        kept = jnp.zeros(state.shape, bool).at[rows, heads, jnp.where(chosen < 0, count, chosen)].set(True, mode="drop")
        ids = with_ends(chosen, first_local, newest, sink=min(self.sink, count), room=self.local)
        return Blocks(ids, 1), jnp.where(distant & ~kept, -jnp.inf, state)

    def observe(self, mass, ctx, state):
        """Add the mass, summed over the query heads of each KV head."""
        return state + mass.reshape(*state.shape[:2], -1, state.shape[2]).sum(axis=2)

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens."""
        return min(length, self.keys)

    def describe(self) -> str:
        """For reports."""
        return f"{self} ({self.keys:,} keys: {self.sink} sink + {self.local} latest + {self.k} tokens of most attention, per KV head)"


def named(text: str) -> HeavyTokens | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"heavy-tokens:(\d+)", text)
    return None if match is None else HeavyTokens(int(match[1]))
