"""Prefill policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.policies.decode.naming import check_numbers
from kvjax.policies.decode.naming import is_built_in as is_decode_policy
from kvjax.policies.prefill.auto import AutoPrefill
from kvjax.policies.prefill.base import PrefillPolicy
from kvjax.policies.prefill.block_filter import BlockFilter
from kvjax.policies.prefill.bounds import BoundsBlocks
from kvjax.policies.prefill.bounds_share import BoundsShare
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.flex import FlexPrefill
from kvjax.policies.prefill.mean_pooled import MeanPooled
from kvjax.policies.prefill.measure_once import CHANGES, MeasureOnceMaskOnce
from kvjax.policies.prefill.oracle_blocks import OracleBlocks
from kvjax.policies.prefill.sink_window import SinkWindow
from kvjax.policies.prefill.vertical_slash import VerticalSlash
from kvjax.policies.prefill.xattention import XAttention
from kvjax.registry import FORMS as OWN_FORMS
from kvjax.registry import Registry

FORMS = (
    "dense, bounds:K (blocks of 128; with +sparse behind it short prompts too), "
    "bounds:SHARE (as bounds:0.01: as many as leave less than that missed), "
    "momo:K/EXACT (as momo:128/8: K blocks of 64, EXACT of them exactly; changed by +quantile, +score, +untrimmed, +plain, +uncorrected, "
    "+gamma4 or +gamma1 behind it), "
    "window:SINK+WINDOW (tokens, as window:64+1024), "
    "delta:SINK+WINDOW/GAMMA (the same, corrected by every GAMMAth query), mean:K, oracle:K, vertical-slash:BLOCKS+BANDS, "
    "flex:GAMMA, xattention:THRESHOLD, bfla:MASS (shares of attention, as flex:0.9), "
    "auto, auto:LEVEL (chunk by chunk the fastest on record as keeping what the level asks), " + OWN_FORMS
)


def parse_prefill(name: str | PrefillPolicy) -> PrefillPolicy:
    """The prefill policy a name stands for: built in, registered (`kvjax.policies.prefill.register`), or a class in a file, named as
    `decode.parse` says; a policy is returned as it is. ValueError that lists the known forms, or says what is wrong with one's own.
    """
    if not isinstance(name, str):
        if not hasattr(name, "attend"):
            raise ValueError(f"{name!r} is neither a prefill policy nor a prefill policy's name; names are {FORMS}")
        _OWN.check(name)
        return name
    text = name.strip()
    policy = _built_in(text) or _OWN.find(text)
    if policy is None:
        hint = f". {name!r} is a decode policy: give it as policy (--policy)" if is_decode_policy(text) else ""
        raise ValueError(f"prefill policy {name!r} is not understood; there are {FORMS}{hint}")
    return policy


def _built_in(text: str) -> PrefillPolicy | None:
    """The prefill policy of a built-in name; ValueError for numbers that it cannot have."""
    if text == "auto":
        return AutoPrefill()
    if text.startswith("auto:"):
        return AutoPrefill(text.removeprefix("auto:"))
    check_numbers(text)
    if text == "dense":
        return DensePrefill()
    if match := re.fullmatch(rf"momo:(\d+)/(\d+)((?:\+(?:{'|'.join(CHANGES)}))*)", text):
        k, k_exact, changes = int(match[1]), int(match[2]), match[3].split("+")[1:]
        fields = [field for change in changes for field in CHANGES[change]]
        if len(set(fields)) < len(fields):
            raise ValueError(f"prefill policy {text!r} says twice how one thing is done; say it once")
        return MeasureOnceMaskOnce(
            k=k, k_exact=k_exact, **({"k_trim": k} | {f: v for change in changes for f, v in CHANGES[change].items()})
        )
    if match := re.fullmatch(r"window:(\d+)\+(\d+)", text):
        return SinkWindow(*map(int, match.groups()))
    if match := re.fullmatch(r"delta:(\d+)\+(\d+)/(\d+)", text):
        return SinkWindow(*map(int, match.groups()))
    if match := re.fullmatch(r"vertical-slash:(\d+)\+(\d+)", text):
        return VerticalSlash(*map(int, match.groups()))
    if match := re.fullmatch(r"bounds:(0\.\d+)", text):
        return BoundsShare(float(match[1]))
    if match := re.fullmatch(r"(flex|xattention|bfla):(0\.\d+|1\.0)", text):
        return {"flex": FlexPrefill, "xattention": XAttention, "bfla": BlockFilter}[match[1]](float(match[2]))
    if match := re.fullmatch(r"bounds:(\d+)(\+sparse)?", text):
        return BoundsBlocks(int(match[1]), dense_below=0 if match[2] else None)
    if match := re.fullmatch(r"(mean|oracle):(\d+)", text):
        return {"mean": MeanPooled, "oracle": OracleBlocks}[match[1]](int(match[2]))
    return None


def built_in_name(name: str) -> str | None:
    """The name of a built-in policy as reports have it; None for names that another process, or `auto`, would give another meaning."""
    try:
        policy = _built_in(name)
    except ValueError:
        return None
    return None if policy is None or isinstance(policy, AutoPrefill) else str(policy)


_OWN = Registry(
    "prefill policy",
    "kvjax.policies.prefill.PrefillPolicy says what each does",
    ("queries_stand_alone", "attend", "describe"),
    ("dense", "bounds", "momo", "window", "delta", "vertical-slash", "mean", "oracle", "flex", "xattention", "bfla", "auto"),
    _built_in,
)
register, name_of, identity = _OWN.register, _OWN.name_of, _OWN.identity
