"""Limits on what clients can make a server hold or do, where the server is not told otherwise. A module of its own,
which `--help` can read without JAX; and those of one runtime."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.policies.decode import Window

MAX_POLICIES = 8
"""Distinct policies of forms with '*' that sessions may bring in while a runtime lives."""
MAX_HISTORY = 2**22
"""Tokens of one session's history."""
MAX_STOP_TOKENS = 1024
"""Stop tokens of one call."""
MAX_WAITING = 1024
"""Calls that may wait for one session's generation."""
MAX_NAME = 200
"""Characters of a policy's name that are looked at."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Arguments of `SessionRuntime`, as it explains them."""

    capacity: int
    idle_ttl_s: float
    demote_after_s: float | None
    window: Window | None
    history: int
