"""Policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.auto import Auto
from kvjax.policies.base import DecodePolicy
from kvjax.policies.dense import Dense
from kvjax.policies.top_blocks import TopBlocks
from kvjax.policies.window import Window

WINDOW_SINK = 128
"""Sink tokens of `window:KEYS`: one block, so that KEYS compares with the keys of top:K, which keeps the same."""

FORMS = (
    "dense, window:SINK+WINDOW (tokens, as window:64+4544), window:KEYS (tokens, 128 of them sinks), "
    "top:K, mean:K (blocks of 128), quest:K (blocks of 16), auto or auto:LEVEL"
)


def parse(name: str | DecodePolicy) -> DecodePolicy:
    """The policy a short name stands for; a policy is returned as it is. Raises ValueError that lists the known forms."""
    if not isinstance(name, str):
        if isinstance(name, DecodePolicy):
            return name
        raise ValueError(f"{name!r} is neither a policy nor a policy's name; names are {FORMS}")
    text = name.strip()
    if text == "dense":
        return Dense()
    if text == "auto":
        return Auto()
    if text.startswith("auto:"):
        return Auto(text.removeprefix("auto:"))
    if match := re.fullmatch(r"window:(\d+)\+(\d+)", text):
        return Window(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"window:(\d+)", text):
        keys = int(match[1])
        if keys <= WINDOW_SINK:
            raise ValueError(
                f"policy {name!r}: the {keys} keys of window:KEYS count {WINDOW_SINK} sink tokens, which leaves no window: "
                f"use more than {WINDOW_SINK}, or window:SINK+WINDOW"
            )
        return Window(WINDOW_SINK, keys - WINDOW_SINK)
    if match := re.fullmatch(r"(top|mean|quest):(\d+)", text):
        k = int(match[2])
        if match[1] == "quest":
            return TopBlocks(k, sink=1, local=32, block_size=16)
        return TopBlocks(k, index="bounds" if match[1] == "top" else "mean")
    raise ValueError(f"policy {name!r} is not understood; there are {FORMS}")
