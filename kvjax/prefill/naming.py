"""Prefill policies by name, for command lines and reports."""

from __future__ import annotations

import re

from kvjax.prefill.base import PrefillPolicy
from kvjax.prefill.dense import DensePrefill
from kvjax.prefill.mean_pooled import MeanPooled
from kvjax.prefill.measure_once import CHANGES, MeasureOnceMaskOnce
from kvjax.prefill.oracle_blocks import OracleBlocks
from kvjax.prefill.sink_window import SinkWindow
from kvjax.prefill.vertical_slash import VerticalSlash

FORMS = (
    "dense, momo:K/EXACT (as momo:128/8: K blocks of 64, EXACT of them exactly; with +quantile behind it the others "
    "by a quantile, with +score or +untrimmed lists are trimmed otherwise, with +plain or +uncorrected outputs are corrected otherwise), "
    "window:SINK+WINDOW (tokens, as window:64+1024), "
    "delta:SINK+WINDOW/GAMMA (the same, corrected by every GAMMAth query), mean:K, oracle:K, vertical-slash:BLOCKS+BANDS"
)


def parse_prefill(name: str | PrefillPolicy) -> PrefillPolicy:
    """The prefill policy a short name stands for; a policy is returned as it is. Raises ValueError that lists the known forms."""
    if not isinstance(name, str):
        if isinstance(name, PrefillPolicy):
            return name
        raise ValueError(f"{name!r} is neither a prefill policy nor a prefill policy's name; names are {FORMS}")
    text = name.strip()
    if text == "dense":
        return DensePrefill()
    if match := re.fullmatch(rf"momo:(\d+)/(\d+)((?:\+(?:{'|'.join(CHANGES)}))*)", text):
        k, k_exact, changes = int(match[1]), int(match[2]), match[3].split("+")[1:]
        fields = [field for change in changes for field in CHANGES[change]]
        if len(set(fields)) < len(fields):
            raise ValueError(f"prefill policy {name!r} says twice how one thing is done; say it once")
        return MeasureOnceMaskOnce(
            k=k, k_exact=k_exact, **({"k_trim": k} | {f: v for change in changes for f, v in CHANGES[change].items()})
        )
    if match := re.fullmatch(r"window:(\d+)\+(\d+)", text):
        return SinkWindow(*map(int, match.groups()))
    if match := re.fullmatch(r"delta:(\d+)\+(\d+)/(\d+)", text):
        return SinkWindow(*map(int, match.groups()))
    if match := re.fullmatch(r"vertical-slash:(\d+)\+(\d+)", text):
        return VerticalSlash(*map(int, match.groups()))
    if match := re.fullmatch(r"(mean|oracle):(\d+)", text):
        return (MeanPooled if match[1] == "mean" else OracleBlocks)(int(match[2]))
    raise ValueError(f"prefill policy {name!r} is not understood; there are {FORMS}")
