"""Policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.decode.auto import Auto
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.window import Window
from kvjax.registry import FORMS as OWN_FORMS
from kvjax.registry import Registry

WINDOW_SINK = 128
"""Sink tokens of `window:KEYS`: one block, so that KEYS compares with the keys of top:K, which keeps the same."""

FORMS = (
    "dense, window:SINK+WINDOW (tokens, as window:64+4544), window:KEYS (tokens, 128 of them sinks), "
    "top:K, mean:K (blocks of 128), quest:K (blocks of 16), auto, auto:LEVEL, " + OWN_FORMS
)


LARGEST = 2**31 - 1
"""Of the numbers in a name: counts of blocks and tokens are 32-bit integers on the device."""


def check_numbers(name: str) -> None:
    """ValueError for a policy's name with a number that no policy can use. Python's int() refuses thousands of digits in its own words."""
    form = re.fullmatch(r"[a-z-]+:(.*)", name)
    if form and any(len(number) > 10 or int(number) > LARGEST for number in re.findall(r"(?<![0-9.])[0-9]+", form[1])):
        raise ValueError(f"policy {name!r} has a number above {LARGEST}, the largest that can be used: name a smaller one")


def parse(name: str | DecodePolicy) -> DecodePolicy:
    """The policy a name stands for: built in, registered (`register`), or a class in a file, as my_file.py:Mine or my_file.py:Mine:8/r=4.

    A file's class is called with what is behind the second colon, Python literals with '/' between them: Mine(8, r=4). A policy is
    returned as it is. ValueError that lists the known forms, or says in one sentence what is wrong with one's own.
    """
    if not isinstance(name, str):
        if not hasattr(name, "select"):
            raise ValueError(f"{name!r} is neither a policy nor a policy's name; names are {FORMS}")
        _OWN.check(name)
        return name
    text = name.strip()
    policy = _built_in(text) or _OWN.find(text)
    if policy is None:
        raise ValueError(f"policy {name!r} is not understood; there are {FORMS}")
    return policy


def is_built_in(text: str) -> bool:
    """Whether a built-in policy has this name."""
    try:
        return _built_in(text) is not None
    except ValueError:
        return False


def _built_in(text: str) -> DecodePolicy | None:
    """The policy of a built-in name; ValueError for numbers that it cannot have."""
    if text == "dense":
        return Dense()
    if text == "auto":
        return Auto()
    if text.startswith("auto:"):
        return Auto(text.removeprefix("auto:"))
    check_numbers(text)
    if match := re.fullmatch(r"window:(\d+)\+(\d+)", text):
        return Window(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"window:(\d+)", text):
        keys = int(match[1])
        if keys <= WINDOW_SINK:
            raise ValueError(
                f"policy {text!r}: the {keys} keys of window:KEYS count {WINDOW_SINK} sink tokens, which leaves no window: "
                f"use more than {WINDOW_SINK}, or window:SINK+WINDOW"
            )
        return Window(WINDOW_SINK, keys - WINDOW_SINK)
    if match := re.fullmatch(r"(top|mean|quest):(\d+)", text):
        k = int(match[2])
        if match[1] == "quest":
            return TopBlocks(k, sink=1, local=32, block_size=16)
        return TopBlocks(k, index="bounds" if match[1] == "top" else "mean")
    return None


_OWN = Registry(
    "policy",
    "inherit from kvjax.policies.decode.Stateless",
    ("learns", "indexes", "init", "select", "observe", "attend", "describe"),
    ("dense", "window", "top", "mean", "quest", "auto"),
    _built_in,
)
register, name_of, identity = _OWN.register, _OWN.name_of, _OWN.identity
