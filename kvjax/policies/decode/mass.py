"""Policies that choose by attention mass, and those that keep pages by it.

Sources: H2O (arXiv 2306.14048) accumulates the mass of all queries; SnapKV (arXiv 2404.14469) uses the last queries of
the prompt.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Int

from kvjax.cache.page_manager import Reach
from kvjax.checks import whole_number
from kvjax.policies.decode.base import State, Stateless


@runtime_checkable
class KeepsByMass(Protocol):
    """The part of a decode policy that chooses by attention mass which distant pages a sequence keeps. Optional.

    A page holds all layers of its layer group, so the choice needs the states of all layers. A step makes it on the
    device before its first layer, and reads by it at once. The engine gives the other pages back two steps later, so
    that it never waits for the device.
    """

    def keeps(self, page_size: int) -> Reach:
        """Sinks and window that it keeps beside the pages that it chooses
        (`kvjax.policies.decode.base.GivesPagesBack`)."""
        ...

    def settle(self, states: tuple[State, ...], lengths: Int[Array, "B"], page_size: int) -> tuple[State, ...]:
        """The states of all layers with the choice for the next token. lengths: tokens written. The choice may change
        only where the next token opens a page, or other policies decoded since. A page that was left out once must not
        come back."""
        ...

    def chosen(self, states: tuple[State, ...]) -> Int[Array, "B k"]:
        """The logical pages between sinks and window that it keeps, -1 where there is none."""
        ...


class SinksAndHeaviest(Stateless):
    """A policy of three sizes, in pages or in tokens: so many first ones, latest ones, and others of most mass. name:
    of its form. unit: tokens of each."""

    unit = 1

    def __post_init__(self):
        if self.k == 0:
            raise ValueError("k must be at least 1, got 0: to keep nothing between sinks and latest tokens, use window:SINK+WINDOW+release")
        for name, least in (("k", 1), ("sink", 0), ("local", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))

    @property
    def keys(self) -> int:
        """The most keys that a KV head reads per step."""
        return (self.sink + self.local + self.k) * self.unit

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Each part, in tokens; a page counts as one, the smallest there is."""
        return {name: (getattr(self, name), 1) for name in ("k", "sink", "local")}

    def __str__(self) -> str:
        usual = (self.sink, self.local) == (type(self).sink, type(self).local)
        return f"{self.name}:{self.k}" if usual else repr(self)
