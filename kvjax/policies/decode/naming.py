"""Policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.heavy import HeavyPages, HeavyTokens
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.top_tokens import TopTokens
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
register, name_of, identity, is_built_in = _NAMES.register, _NAMES.name_of, _NAMES.identity, _NAMES.is_built_in
built_in, parse_recorded = _NAMES.built_in, _NAMES.parse_recorded
WORDS = _NAMES.reserved
"""First words of built-in names."""


def parse(name: str | DecodePolicy) -> DecodePolicy:
    """The policy of a name: built in, registered (`register`), or a class in a file, as my_file.py:Mine or my_file.py:Mine:8/r=4.

    The arguments of a file's class follow the second colon: Python literals with '/' between them, here Mine(8, r=4). A policy is returned
    as it is. The ValueError lists the known forms, or says in one sentence what is wrong with the user's own policy.

    A file is run as code, so only names that the user typed may come here. Names that stand in data go to `parse_recorded`.
    """
    return _NAMES.parse(name)
