"""Sliding window and sinks (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp

from kvjax.checks import check_flag, whole_number
from kvjax.policies.decode.base import Blocks, Stateless

SINK = 128
"""Sink tokens of `window:KEYS`: one block, as in top:K, so that the two can be compared at equal keys."""


@dataclasses.dataclass(frozen=True)
class Window(Stateless):
    """The first `sink_tokens` and the last `window_tokens`, the current one included; exact to the token.

    The list names the pages that hold them; the kernel masks the rest of the first and of the oldest page.

    release: give back the pages outside sinks and window, so that a sequence of any length takes the same memory.
    remap: read sinks as if they stood right before the window, which is StreamingLLM's rule: positions are those in the
    cache and never exceed sinks and window, so a sequence may be longer than the model's positions. Then sinks are
    whole pages. False: positions are those in the text.

    Keys stay as they were rotated. With remap the query is turned for the sinks, because only its distance to a key
    matters.
    """

    sink_tokens: int
    window_tokens: int
    release: bool = dataclasses.field(default=False, kw_only=True)
    remap: bool = dataclasses.field(default=False, kw_only=True)

    chooses_over_devices = True

    def __post_init__(self):
        for name, least in (("sink_tokens", 0), ("window_tokens", 1)):  # a window holds the current token
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("release", "remap"):
            check_flag(name, getattr(self, name))

    @property
    def keys(self) -> int:
        """The most keys that a step reads."""
        return self.sink_tokens + self.window_tokens

    @property
    def counts_in_cache(self) -> bool:
        """Whether positions are those in the cache, which never exceed sinks and window."""
        return self.remap

    def budgets(self) -> dict[str, tuple[int, int]]:
        """The tokens of both parts."""
        return {"sink_tokens": (self.sink_tokens, 1), "window_tokens": (self.window_tokens, 1)}

    def reach(self, page_size: int) -> tuple[int, int] | None:
        """Sinks and window; None in a subclass that lists other blocks, which has to say so itself."""
        return (self.sink_tokens, self.window_tokens) if type(self).select is Window.select else None

    def keeps(self, page_size: int) -> tuple[int, int] | None:
        """Sinks and window with `release`; else every page."""
        return (self.sink_tokens, self.window_tokens) if self.release else None

    def select(self, query, layer, ctx, state):
        """Sink pages, and the pages from the oldest token that any current query may see to the newest."""
        batch, num_tokens = query.shape[:2]
        size = ctx.page_size
        if self.remap:
            self.check_pages(size)
            if ctx.rope is None:
                raise ValueError(f"policy {self} turns rotated queries, which layers of latent attention do not have: leave out +remap")
        sinks = -(-self.sink_tokens // size)
        # A window of n tokens touches at most this many pages. Each further query token moves it by one token.
        local = (self.window_tokens + num_tokens - 2) // size + 2
        newest = ctx.lengths - 1
        oldest = jnp.maximum(newest - (num_tokens - 1) - (self.window_tokens - 1), 0)
        first = jnp.maximum(oldest // size, sinks)
        sink_ids = jnp.arange(sinks)[None] * jnp.ones((batch, 1), jnp.int32)
        ids = jnp.concatenate([sink_ids, first[:, None] + jnp.arange(local)[None]], axis=1)
        ids = jnp.where(ids <= newest[:, None] // size, ids, -1).astype(jnp.int32)
        num_kv_heads = layer.pages.kv_heads
        blocks = jnp.broadcast_to(ids[:, None], (batch, num_kv_heads, ids.shape[1]))
        return Blocks(blocks, size, (self.sink_tokens, self.window_tokens), self.remap), state

    def check_pages(self, page_size: int) -> None:
        """ValueError for sinks that are not whole pages, where they are remapped."""
        if self.remap:
            check_sinks(f"policy {self}", self.sink_tokens, page_size)

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens."""
        return min(length, self.sink_tokens + self.window_tokens)

    def keys_among(self, first: int, length: int, layer: int, page_size: int) -> float:
        """How many of them are among the first `first` tokens."""
        oldest = max(0, length - self.window_tokens)
        return min(first, self.sink_tokens, oldest) + max(0, first - oldest)

    def __str__(self) -> str:
        return f"window:{self.sink_tokens}+{self.window_tokens}" + "+release" * self.release + "+remap" * self.remap

    def describe(self) -> str:
        """For reports."""
        more = ", other pages given back" * self.release + ", positions in the cache" * self.remap
        return f"{self} ({self.keys:,} keys: {self.sink_tokens} sink + {self.window_tokens} latest{more})"


def check_sinks(said: str, sink_tokens: int, page_size: int) -> None:
    """ValueError for remapped sinks that are not whole pages. said: the policy, as the message names it."""
    if sink_tokens % page_size:
        raise ValueError(
            f"{said} reads sinks apart from the window, so they must be whole pages of {page_size} tokens: use "
            f"{-(-sink_tokens // page_size) * page_size} sink tokens, or leave out +remap"
        )


def named(text: str) -> Window | None:
    """The policy of a name, None for other names; ValueError for numbers that it cannot have."""
    if (match := re.fullmatch(r"window:(\d+)(?:\+(\d+))?(\+release)?(\+remap)?", text)) is None:
        return None
    changes = {"release": match[3] is not None, "remap": match[4] is not None}
    if match[2]:
        return Window(int(match[1]), int(match[2]), **changes)
    keys = int(match[1])
    if keys <= SINK:
        raise ValueError(
            f"policy {text!r}: the {keys} keys of window:KEYS count {SINK} sink tokens, which leaves no window: "
            f"use more than {SINK}, or window:SINK+WINDOW"
        )
    return Window(SINK, keys - SINK, **changes)
