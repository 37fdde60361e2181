"""Heavy hitters (H2O, arXiv 2306.14048) by page: keep the pages that received most attention so far, and give others
back.

A page holds all layers and KV heads of its layer group, so one choice serves them all: attention mass is summed over
layers and heads.
"""

from __future__ import annotations

import dataclasses
import re

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvjax.cache.spec import MAX_STEP_TOKENS
from kvjax.policies.decode.base import AttentionMass, Blocks
from kvjax.policies.decode.candidates import ascending, largest, with_ends
from kvjax.policies.decode.mass import SinksAndHeaviest

DEFAULT_PAGE = 128
"""Tokens of a page, if an engine names no other size."""


@flax.struct.dataclass
class HeavyState:
    """What `HeavyPages` knows in one layer. mass: attention mass of each logical page, summed over heads and queries.
    kept: the distant pages that were chosen, ascending, then -1. first_local: the first page that was local at that
    choice. Both are the same in all layers."""

    mass: Float32[Array, "B M"]
    kept: Int32[Array, "B k"]
    first_local: Int32[Array, "B"]


@dataclasses.dataclass(frozen=True)
class HeavyPages(SinksAndHeaviest):
    """The first `sink` pages, the last `local` ones (with the open page), and the `k` distant pages of most attention
    mass.

    Mass is what all queries paid: those of the prompt, and of every step of this policy. When a page stops being local,
    it is weighed against the `k` kept ones, and the one of least mass is given back. Of equal mass the later page goes.
    """

    k: int
    sink: int = 1
    local: int = 4

    name, unit, learns, chooses_over_devices = "heavy", DEFAULT_PAGE, AttentionMass(), True

    def keeps(self, page_size: int) -> tuple[int, int]:
        """Sink and local pages, in tokens; distant pages are kept by mass."""
        return self.sink * page_size, (self.local - 1) * page_size + 1

    def init(self, spec, batch):
        """No mass, and no choice yet."""
        kept = jnp.full((batch, min(self.k, spec.max_pages)), -1, jnp.int32)
        return HeavyState(jnp.zeros((batch, spec.max_pages), jnp.float32), kept, jnp.zeros(batch, jnp.int32))

    def settle(self, states, lengths, page_size):
        """Choose again in rows whose next token opens a page. See `kvjax.policies.decode.mass.KeepsByMass`."""
        first = states[0]
        first_local = jnp.maximum(lengths // page_size - self.local + 1, 0)
        due = first_local > first.first_local

        def choose():
            mass, pages = sum(state.mass for state in states), jnp.arange(first.mass.shape[1], dtype=jnp.int32)
            held = (pages[:, None] == first.kept[:, None, :]).any(axis=2) | (pages >= first.first_local[:, None])
            kept = ascending(largest(mass, held & (pages >= self.sink) & (pages < first_local[:, None]), self.k))
            return jnp.where(due[:, None], kept, first.kept), jnp.where(due, first_local, first.first_local)

        kept, begins = jax.lax.cond(due.any(), choose, lambda: (first.kept, first.first_local))
        return tuple(state.replace(kept=kept, first_local=begins) for state in states)

    def chosen(self, states):
        """The distant pages that it keeps, logical, -1 where there is none."""
        return states[0].kept

    def select(self, query, layer, ctx, state):
        """Sinks, the kept pages, and all from the first local page on."""
        newest = ((ctx.lengths - 1) // ctx.page_size)[:, None]
        # A drafted step may go on into pages that open within it.
        room = self.local + -(-(MAX_STEP_TOKENS - 1) // ctx.page_size)
        ids = with_ends(state.kept, state.first_local[:, None], newest, sink=self.sink, room=room)
        return Blocks(jnp.repeat(ids[:, None], layer.pages.kv_heads, axis=1), ctx.page_size), state

    def observe(self, mass, ctx, state):
        """Add the mass, summed over heads."""
        return state.replace(mass=state.mass + ctx.over_heads(mass.sum(axis=1)))

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens, the current one included."""
        newest = (length - 1) // page_size
        first_local = max(0, newest - self.local + 1)
        sinks = min(self.sink, first_local)
        pages = sinks + min(self.k, first_local - sinks) + newest - first_local + 1
        return pages * page_size - ((newest + 1) * page_size - length)

    def describe(self) -> str:
        """For reports."""
        keys = f"{self.keys:,} keys in pages of {DEFAULT_PAGE}"
        return f"{self} ({keys}: {self.sink} sink + {self.local} local + {self.k} pages of most attention, others given back)"


def named(text: str) -> HeavyPages | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"heavy:(\d+)", text)
    return None if match is None else HeavyPages(int(match[1]))
