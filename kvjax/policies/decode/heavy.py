"""Heavy hitters (H2O, arXiv 2306.14048): keep what has received most attention so far, and the latest tokens.

`HeavyPages` gives the other pages back. A page holds all layers and KV heads of its layer group, so one choice serves them all: attention
mass is summed over layers and heads. `HeavyTokens` chooses tokens for each KV head of each layer, as in the paper. It only reads less,
because a page with one chosen token would have to stay. Both never read again what they once left out, as an eviction does.
"""

from __future__ import annotations

import dataclasses
import re

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from kvjax.axes import LogicalAxes
from kvjax.cache.spec import MAX_STEP_TOKENS
from kvjax.checks import whole_number
from kvjax.policies.decode.base import Blocks, Stateless
from kvjax.policies.decode.candidates import ascending
from kvjax.policies.decode.mass import PrefillMass, mass_of_step

DEFAULT_PAGE = 128
"""Tokens of a page, if an engine names no other size."""


@flax.struct.dataclass
class HeavyState:
    """What `HeavyPages` knows in one layer. mass: attention mass of each logical page, summed over heads and queries. kept: the distant
    pages that were chosen, ascending, then -1. first_local: the first page that was local at that choice. Both are the same in all
    layers."""

    mass: Float32[Array, "B M"]
    kept: Int32[Array, "B k"]
    first_local: Int32[Array, "B"]


class _Heavy(Stateless):
    """What both forms share: three sizes, in pages or in tokens."""

    learns = True

    def __post_init__(self):
        if self.k == 0:
            raise ValueError("k must be at least 1, got 0: to keep nothing between sinks and latest tokens, use window:SINK+WINDOW+release")
        for name, least in (("k", 1), ("sink", 0), ("local", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Each part, in tokens; a page counts as one, the smallest there is."""
        return {name: (getattr(self, name), 1) for name in ("k", "sink", "local")}


@dataclasses.dataclass(frozen=True)
class HeavyPages(_Heavy):
    """The first `sink` pages, the last `local` ones (with the open page), and the `k` distant pages of most attention mass.

    Mass is what all queries paid: those of the prompt, and of every step of this policy. When a page stops being local, it is weighed
    against the `k` kept ones, and the one of least mass is given back. Of equal mass the later page goes.
    """

    k: int
    sink: int = 1
    local: int = 4

    chooses_over_devices = True

    @property
    def keys(self) -> int:
        """The most keys that a KV head reads per step, in pages of `DEFAULT_PAGE` tokens."""
        return (self.sink + self.local + self.k) * DEFAULT_PAGE

    @property
    def prefill_mass(self) -> PrefillMass:
        """That of all queries, by page."""
        return PrefillMass(None)

    def keeps(self, page_size: int) -> tuple[int, int]:
        """Sink and local pages, in tokens; distant pages are kept by mass."""
        return self.sink * page_size, (self.local - 1) * page_size + 1

    def init(self, spec, batch):
        """No mass, and no choice yet."""
        kept = jnp.full((batch, min(self.k, spec.max_pages)), -1, jnp.int32)
        return HeavyState(jnp.zeros((batch, spec.max_pages), jnp.float32), kept, jnp.zeros(batch, jnp.int32))

    def settle(self, states: tuple[HeavyState, ...], lengths: Int[Array, "B"], page_size: int) -> tuple[HeavyState, ...]:
        """Choose again in rows whose next token opens a page. See `kvjax.policies.decode.mass.KeepsByMass`."""
        first = states[0]
        first_local = jnp.maximum(lengths // page_size - self.local + 1, 0)
        due = first_local > first.first_local

        def choose():
            mass, pages = sum(state.mass for state in states), jnp.arange(first.mass.shape[1], dtype=jnp.int32)
            held = (pages[:, None] == first.kept[:, None, :]).any(axis=2) | (pages >= first.first_local[:, None])
            candidates = held & (pages >= self.sink) & (pages < first_local[:, None])
            lowest = jnp.finfo(mass.dtype).min
            weighed = jnp.where(candidates, jnp.maximum(jnp.nan_to_num(mass, nan=lowest), lowest), -jnp.inf)
            best, chosen = jax.lax.top_k(weighed, first.kept.shape[1])
            kept = ascending(jnp.where(best > -jnp.inf, chosen, -1))
            return jnp.where(due[:, None], kept, first.kept), jnp.where(due, first_local, first.first_local)

        kept, begins = jax.lax.cond(due.any(), choose, lambda: (first.kept, first.first_local))
        return tuple(state.replace(kept=kept, first_local=begins) for state in states)

    def chosen(self, states: tuple[HeavyState, ...]) -> Int32[Array, "B k"]:
        """The distant pages that it keeps, logical, -1 where there is none."""
        return states[0].kept

    def select(self, query, layer, ctx, state):
        """Sinks, the kept pages, and all from the first local page on."""
        newest = ((ctx.lengths - 1) // ctx.page_size)[:, None]
        # A drafted step may go on into pages that open within it.
        room = self.local + -(-(MAX_STEP_TOKENS - 1) // ctx.page_size)
        ends = state.first_local[:, None] + jnp.arange(room, dtype=jnp.int32)
        sinks = jnp.broadcast_to(jnp.arange(self.sink, dtype=jnp.int32), (ends.shape[0], self.sink))
        sinks = jnp.where(sinks < state.first_local[:, None], sinks, -1)
        ids = ascending(jnp.concatenate([sinks, state.kept, jnp.where(ends <= newest, ends, -1)], axis=1))
        return Blocks(jnp.repeat(ids[:, None], layer.pages.kv_heads, axis=1), ctx.page_size), state

    def observe(self, blocks, block_lse, ctx, state):
        """Add the step's mass, summed over heads."""
        mass = mass_of_step(blocks, block_lse, ctx, ctx.page_size, state.mass.shape[1])
        return state.replace(mass=state.mass + ctx.over_heads(mass.sum(axis=1)))

    def observe_prefill(self, mass, ctx, state):
        """Add the chunk's mass, summed over heads."""
        return state.replace(mass=state.mass + ctx.over_heads(mass.sum(axis=1)))

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens, the current one included."""
        newest = (length - 1) // page_size
        first_local = max(0, newest - self.local + 1)
        sinks = min(self.sink, first_local)
        pages = sinks + min(self.k, first_local - sinks) + newest - first_local + 1
        return pages * page_size - ((newest + 1) * page_size - length)

    def __str__(self) -> str:
        if (self.sink, self.local) == (1, 4):
            return f"heavy:{self.k}"
        return f"HeavyPages(k={self.k}, sink={self.sink}, local={self.local})"

    def describe(self) -> str:
        """For reports."""
        keys = f"{self.keys:,} keys in pages of {DEFAULT_PAGE}"
        return f"{self} ({keys}: {self.sink} sink + {self.local} local + {self.k} pages of most attention, others given back)"


@dataclasses.dataclass(frozen=True)
class HeavyTokens(_Heavy):
    """Per KV head of each layer: the first `sink` tokens, the last `local` ones, and the `k` tokens between of most attention mass.

    Mass is what all queries of the KV head's group paid: those of the prompt, and of every step of this policy. No memory is given back.
    The state holds a float32 for each token and KV head of the longest sequence.
    """

    k: int
    sink: int = 128
    local: int = 512

    chooses_over_devices = True
    block_size = 1

    @property
    def keys(self) -> int:
        """The most keys that a KV head reads per step."""
        return self.sink + self.local + self.k

    @property
    def prefill_mass(self) -> PrefillMass:
        """That of all queries, by token."""
        return PrefillMass(1)

    def state_axes(self) -> LogicalAxes:
        """KV heads are split over devices."""
        return (None, "kv_heads", None)

    def init(self, spec, batch):
        """No mass: `[B, K, S]` for tokens; -inf for one that was left out, for good."""
        return jnp.zeros((batch, spec.num_kv_heads, spec.max_pages * spec.page_size), jnp.float32)

    def select(self, query, layer, ctx, state):
        """Sinks, the distant tokens of most mass, and the latest. Other distant tokens are left out from here on."""
        tokens = jnp.arange(state.shape[2], dtype=jnp.int32)
        first_local = jnp.maximum(ctx.lengths - self.local, 0)[:, None, None]
        distant = (tokens >= self.sink) & (tokens < first_local)
        best, chosen = jax.lax.top_k(jnp.where(distant, state, -jnp.inf), min(self.k, state.shape[2]))
        places = jnp.where(best > -jnp.inf, chosen, state.shape[2])
        rows, heads = jnp.arange(state.shape[0])[:, None, None], jnp.arange(state.shape[1])[None, :, None]
        kept = jnp.zeros(state.shape, bool).at[rows, heads, places].set(True, mode="drop")
        ends = first_local + jnp.arange(self.local, dtype=jnp.int32)
        ends = jnp.where(ends < ctx.lengths[:, None, None], ends, -1)
        sinks = jnp.where(tokens[: self.sink] < first_local, tokens[: self.sink], -1)
        parts = sinks, jnp.where(best > -jnp.inf, chosen, -1), ends
        ids = jnp.concatenate([jnp.broadcast_to(part, (*state.shape[:2], part.shape[2])) for part in parts], axis=2)
        return Blocks(ascending(ids), 1), jnp.where(distant & ~kept, -jnp.inf, state)

    def observe(self, blocks, block_lse, ctx, state):
        """Add the step's mass, summed over the query heads of each KV head."""
        return state + _by_kv_head(mass_of_step(blocks, block_lse, ctx, 1, state.shape[2]), state.shape[1])

    def observe_prefill(self, mass, ctx, state):
        """Add the chunk's mass, summed over the query heads of each KV head."""
        return state + _by_kv_head(mass, state.shape[1])

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens."""
        return min(length, self.keys)

    def __str__(self) -> str:
        if (self.sink, self.local) == (128, 512):
            return f"heavy-tokens:{self.k}"
        return f"HeavyTokens(k={self.k}, sink={self.sink}, local={self.local})"

    def describe(self) -> str:
        """For reports."""
        return f"{self} ({self.keys:,} keys: {self.sink} sink + {self.local} latest + {self.k} tokens of most attention, per KV head)"


def _by_kv_head(mass: Float32[Array, "B H S"], kv_heads: int) -> Float32[Array, "B K S"]:
    return mass.reshape(mass.shape[0], kv_heads, -1, mass.shape[2]).sum(axis=2)


def named(text: str) -> HeavyPages | HeavyTokens | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"(heavy|heavy-tokens):(\d+)", text)
    return None if match is None else {"heavy": HeavyPages, "heavy-tokens": HeavyTokens}[match[1]](int(match[2]))
