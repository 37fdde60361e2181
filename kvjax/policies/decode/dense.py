"""Dense: read every page."""

from __future__ import annotations

import dataclasses

from kvjax.policies.decode.base import Stateless


@dataclasses.dataclass(frozen=True)
class Dense(Stateless):
    """Every key of the sequence."""

    chooses_over_devices = True

    def select(self, query, layer, ctx, state):
        """No list: every block."""
        return None, state

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Every key."""
        return None

    def __str__(self) -> str:
        return "dense"

    def describe(self) -> str:
        """For reports."""
        return "dense (every key)"


def named(text: str) -> Dense | None:
    """The policy of a name, None for other names."""
    return Dense() if text == "dense" else None
