"""Prefill policies: how the queries of a prompt attend to it. `parse_prefill("momo:128/8")` finds one by name."""

from kvjax.policies.prefill.base import PrefillContext, PrefillPolicy, indexes_of, query_tile_of
from kvjax.policies.prefill.bounds import BoundsBlocks
from kvjax.policies.prefill.delta import delta_correction
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.measure_once import MeasureOnceMaskOnce
from kvjax.policies.prefill.naming import FORMS, identity, name_of, parse_prefill, register
from kvjax.policies.prefill.sink_window import SinkWindow
from kvjax.policies.prefill.top_tokens import TopTokensPrefill

__all__ = [
    "FORMS",
    "BoundsBlocks",
    "DensePrefill",
    "MeasureOnceMaskOnce",
    "PrefillContext",
    "PrefillPolicy",
    "SinkWindow",
    "TopTokensPrefill",
    "delta_correction",
    "identity",
    "indexes_of",
    "name_of",
    "parse_prefill",
    "query_tile_of",
    "register",
]
