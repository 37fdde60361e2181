"""Prefill policies: how the queries of a prompt attend to it. `parse_prefill("momo:128/8")` finds one by name.

The classes of policies are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.policies.prefill.base import PrefillContext, PrefillPolicy, indexes_of, query_tile_of
from kvjax.policies.prefill.naming import FORMS, identity, name_of, parse_prefill, register
from pallas_kernels.core.lazy import names_in

if TYPE_CHECKING:
    from kvjax.policies.prefill.bounds import BoundsBlocks
    from kvjax.policies.prefill.delta import delta_correction
    from kvjax.policies.prefill.dense import DensePrefill
    from kvjax.policies.prefill.lists import TileLists
    from kvjax.policies.prefill.measure_once import MeasureOnceMaskOnce
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
    "TileLists",
    "TopTokensPrefill",
    "delta_correction",
    "identity",
    "indexes_of",
    "name_of",
    "parse_prefill",
    "query_tile_of",
    "register",
]

_HOMES = {
    "BoundsBlocks": ".bounds",
    "DensePrefill": ".dense",
    "MeasureOnceMaskOnce": ".measure_once",
    "SinkWindow": ".sink_window",
    "TileLists": ".lists",
    "TopTokensPrefill": ".top_tokens",
    "delta_correction": ".delta",
}

__getattr__ = names_in(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
