"""Prefill policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.choice import ChoosesPrefill
from kvjax.policies.decode.naming import is_built_in as is_decode_policy
from kvjax.policies.prefill.base import PrefillPolicy
from kvjax.policies.prefill.bounds import BoundsBlocks
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.measure_once import MeasureOnceMaskOnce
from kvjax.policies.prefill.sink_window import SinkWindow
from kvjax.policies.prefill.top_tokens import TopTokensPrefill
from kvjax.registry import PREFILL_FORMS as FORMS
from kvjax.registry import Registry


def _read(text: str) -> PrefillPolicy | None:
    """The prefill policy of a built-in name; ValueError for numbers that it cannot have."""
    if text == "dense":
        return DensePrefill()
    if match := re.fullmatch(r"momo:(\d+)/(\d+)", text):
        k, k_exact = map(int, match.groups())
        return MeasureOnceMaskOnce(k=k, k_exact=k_exact, k_trim=k)
    if match := re.fullmatch(r"window:(\d+)\+(\d+)(\+remap)?", text):
        return SinkWindow(int(match[1]), int(match[2]), remap=match[3] is not None)
    if match := re.fullmatch(r"bounds:(\d+)(\+sparse)?", text):
        return BoundsBlocks(int(match[1]), dense_below=0 if match[2] else None)
    if match := re.fullmatch(r"tokens:(\d+)", text):
        return TopTokensPrefill(int(match[1]))
    return None


PEERS = {
    "flex": "flex.py:FlexPrefill",
    "xattention": "xattention.py:XAttention",
    "bfla": "bfla.py:BlockFilter",
    "mean": "mean.py:MeanPooled",
    "delta": "delta.py:DeltaWindow",
    "bounds-share": "bounds_share.py:BoundsShare",
    "vertical-slash": "vertical_slash.py:VerticalSlash",
}
"""Policies that others are compared with: the files and classes of benchmarks/peers, by the first words of their names in results.
"bounds-share" stands for names such as bounds:0.01."""


def _hint(text: str) -> str:
    word, colon, args = text.partition(":")
    word = "bounds-share" if re.fullmatch(r"bounds:0\.\d+", text) else word
    if word in PEERS:
        return f": it is no part of the library; in a checkout, give benchmarks/peers/{PEERS[word]}{colon}{args.replace('+', '/')}"
    return f". {text!r} is a decode policy: give it as policy (--policy)" if is_decode_policy(text) else ""


_NAMES = Registry(
    "prefill policy",
    forms=FORMS,
    remedy="kvjax.policies.prefill.PrefillPolicy says what each does",
    parts=("attend", "queries_stand_alone", "describe"),
    reserved=("dense", "bounds", "momo", "window", "oracle", "tokens", "auto"),
    read=_read,
    hint=_hint,
)
register, name_of, identity, parse_recorded_prefill = _NAMES.register, _NAMES.name_of, _NAMES.identity, _NAMES.parse_recorded


def parse_prefill(name: str | PrefillPolicy) -> PrefillPolicy:
    """The prefill policy of a name: built in, registered (`kvjax.policies.prefill.register`), or a class in a file, named as in
    `decode.parse`. A policy is returned as it is. The ValueError lists the known forms, or says what is wrong with the user's own policy.
    Names that stand in data go to `parse_recorded_prefill`, which loads no file.
    """
    return _NAMES.parse(name)


def built_in_name(name: str) -> str | None:
    """The name of a built-in policy as in reports; None for names whose meaning depends on the process, and for `auto`."""
    if not _NAMES.is_built_in(name):
        return None
    policy = _NAMES.built_in(name)
    return None if isinstance(policy, ChoosesPrefill) else str(policy)
