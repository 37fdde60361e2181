"""Prefill policies: how the queries of a prompt attend to it. `parse_prefill("momo:128/8")` names them."""

from kvjax.prefill.auto import AutoPrefill, PrefillBound, possible_prefills
from kvjax.prefill.base import PrefillContext, PrefillPolicy, indexes_of
from kvjax.prefill.block_filter import BlockFilter
from kvjax.prefill.bounds import BoundsBlocks
from kvjax.prefill.bounds_share import BoundsShare
from kvjax.prefill.delta import delta_correction
from kvjax.prefill.dense import DensePrefill
from kvjax.prefill.flex import FlexPrefill
from kvjax.prefill.mean_pooled import MeanPooled
from kvjax.prefill.measure_once import MeasureOnceMaskOnce
from kvjax.prefill.naming import FORMS, identity, name_of, parse_prefill, register
from kvjax.prefill.oracle_blocks import OracleBlocks, attention_mass
from kvjax.prefill.sink_window import SinkWindow
from kvjax.prefill.vertical_slash import VerticalSlash
from kvjax.prefill.xattention import XAttention

__all__ = [
    "FORMS",
    "AutoPrefill",
    "BlockFilter",
    "BoundsBlocks",
    "BoundsShare",
    "DensePrefill",
    "FlexPrefill",
    "MeanPooled",
    "MeasureOnceMaskOnce",
    "OracleBlocks",
    "PrefillBound",
    "PrefillContext",
    "PrefillPolicy",
    "SinkWindow",
    "VerticalSlash",
    "XAttention",
    "attention_mass",
    "delta_correction",
    "identity",
    "indexes_of",
    "name_of",
    "parse_prefill",
    "possible_prefills",
    "register",
]
