"""Policies by name, for command lines and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.heavy import HeavyPages, HeavyTokens
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.top_tokens import TopTokens
from kvjax.policies.decode.watched import EVERY, Watched, suffix_of
from kvjax.policies.decode.window import Window
from kvjax.registry import DECODE_FORMS as FORMS
from kvjax.registry import Registry

WINDOW_SINK = 128
"""Sink tokens of `window:KEYS`: one block, as in top:K, so that the two can be compared at equal keys."""


def _read(text: str) -> DecodePolicy | None:
    """The policy of a built-in name; ValueError for numbers that it cannot have."""
    if text == "dense":
        return Dense()
    if match := re.fullmatch(r"window:(\d+)(?:\+(\d+))?(\+release)?(\+remap)?", text):
        changes = {"release": match[3] is not None, "remap": match[4] is not None}
        if match[2]:
            return Window(int(match[1]), int(match[2]), **changes)
        keys = int(match[1])
        if keys <= WINDOW_SINK:
            raise ValueError(
                f"policy {text!r}: the {keys} keys of window:KEYS count {WINDOW_SINK} sink tokens, which leaves no window: "
                f"use more than {WINDOW_SINK}, or window:SINK+WINDOW"
            )
        return Window(WINDOW_SINK, keys - WINDOW_SINK, **changes)
    if match := re.fullmatch(r"tokens:(\d+)", text):
        return TopTokens(int(match[1]))
    if match := re.fullmatch(r"(heavy|heavy-tokens):(\d+)", text):
        return {"heavy": HeavyPages, "heavy-tokens": HeavyTokens}[match[1]](int(match[2]))
    if match := re.fullmatch(r"cascade:(?=\d|p)(\d+)?(?:p(\d*\.?\d+))?(?:/(\d+|all))?(?:\+(?:(\d+)bit|(cache)))?(?:\+every(\d+))?", text):
        kept, share = (None if each is None else of(each) for each, of in zip(match.groups()[:2], (int, float), strict=True))
        shortlist = match[3] if match[3] in (None, "all") else int(match[3])
        return Cascade(kept, shortlist, int(match[4]) if match[4] else match[5], share=share, every=int(match[6] or 1))
    if match := re.fullmatch(r"(top|mean|quest):(\d+)", text):
        k = int(match[2])
        if match[1] == "quest":
            return TopBlocks(k, sink=1, local=32, block_size=16)
        return TopBlocks(k, index="bounds" if match[1] == "top" else "mean")
    return None


_NAMES = Registry(
    "policy",
    forms=FORMS,
    remedy="inherit from kvjax.policies.decode.Stateless",
    parts=("select", "learns", "indexes", "init", "observe", "attend", "describe"),
    reserved=("dense", "window", "top", "mean", "quest", "cascade", "tokens", "heavy", "heavy-tokens", "auto"),
    read=_read,
)
register = _NAMES.register
WORDS = _NAMES.reserved
"""First words of built-in names."""

_WATCHED = re.compile(r"(?P<policy>.+)\+missed(?P<share>[^/:+]+)(?:/(?P<every>\d+))?", re.DOTALL)


def parse(name: str | DecodePolicy) -> DecodePolicy:
    """The policy of a name: built in, registered (`register`), or a class in a file, as my_file.py:Mine or my_file.py:Mine:8/r=4.

    The arguments of a file's class follow the second colon: Python literals with '/' between them, here Mine(8, r=4). Any of these names
    with +missed0.02 after it is that policy, watched (`Watched`). A policy is returned as it is. The ValueError lists the known forms, or
    says in one sentence what is wrong with the user's own policy.

    A file is run as code, so only names that the user typed may come here. Names that stand in data go to `parse_recorded`.
    """
    return _watched(name, parse) or _NAMES.parse(name)


def parse_recorded(name: str) -> DecodePolicy:
    """The policy of a name that stands in data (`Registry.parse_recorded`)."""
    return _watched(name, parse_recorded) or _NAMES.parse_recorded(name)


def built_in(name: str) -> DecodePolicy | None:
    """The built-in policy of a name, None for other names. ValueError for numbers that it cannot have."""
    return _watched(name, built_in) or _NAMES.built_in(name)


def is_built_in(name: str) -> bool:
    """Whether a built-in policy has this name."""
    try:
        return built_in(name) is not None
    except ValueError:
        return False


def name_of(policy: DecodePolicy) -> str:
    """The name under which reports list a policy, and from which `parse` gives it back (`Registry.name_of`)."""
    return f"{name_of(policy.policy)}{suffix_of(policy)}" if isinstance(policy, Watched) else _NAMES.name_of(policy)


def identity(policy: DecodePolicy) -> str:
    """Everything that decides what a policy does, for journals of jobs (`Registry.identity`)."""
    return f"{identity(policy.policy)}, {suffix_of(policy)}" if isinstance(policy, Watched) else _NAMES.identity(policy)


def _watched(name: str | DecodePolicy, find: Callable[[str], DecodePolicy | None]) -> Watched | None:
    """The watched policy of a name, None for other names. find: the policy of the rest of the name."""
    match = _WATCHED.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        return None
    try:
        share = float(match["share"])
    except ValueError:
        share = math.nan
    if not 0 < share <= 1 or match["every"] == "0":
        raise ValueError(
            f"policy {name!r:.80}: what follows +missed is a share above 0 and at most 1, then, if you like, how often steps are measured: "
            "write +missed0.02, or +missed0.02/8 for every 8th step"
        )
    policy = find(match["policy"])
    return None if policy is None else Watched(policy, share, int(match["every"] or EVERY))
