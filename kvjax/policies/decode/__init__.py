"""Decode policies: which blocks a step reads. `parse("top:8")` finds one by name. A new one is a frozen dataclass with
`select`.

The classes of policies are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.policies.decode.base import (
    AttentionMass,
    Blocks,
    DecodePolicy,
    GivesPagesBack,
    IndexerQuery,
    MassContext,
    ScoresBlocks,
    SelectContext,
    Stateless,
    StateSpec,
    check_budgets,
    select_and_attend,
)
from kvjax.policies.decode.naming import FORMS, built_in, identity, name_of, parse, parse_recorded, register
from pallas_kernels.core.lazy import names_in

if TYPE_CHECKING:
    from kvjax.policies.decode.candidates import largest_blocks
    from kvjax.policies.decode.cascade import Cascade
    from kvjax.policies.decode.dense import Dense
    from kvjax.policies.decode.heavy_pages import HeavyPages
    from kvjax.policies.decode.heavy_tokens import HeavyTokens
    from kvjax.policies.decode.mass import KeepsByMass
    from kvjax.policies.decode.top_blocks import TopBlocks
    from kvjax.policies.decode.top_tokens import TopTokens
    from kvjax.policies.decode.watched import Watched
    from kvjax.policies.decode.window import Window

__all__ = [
    "FORMS",
    "AttentionMass",
    "Blocks",
    "Cascade",
    "DecodePolicy",
    "Dense",
    "GivesPagesBack",
    "HeavyPages",
    "HeavyTokens",
    "IndexerQuery",
    "KeepsByMass",
    "MassContext",
    "ScoresBlocks",
    "SelectContext",
    "StateSpec",
    "Stateless",
    "TopBlocks",
    "TopTokens",
    "Watched",
    "Window",
    "built_in",
    "check_budgets",
    "identity",
    "largest_blocks",
    "name_of",
    "parse",
    "parse_recorded",
    "register",
    "select_and_attend",
]

_HOMES = {
    "Cascade": ".cascade",
    "Dense": ".dense",
    "HeavyPages": ".heavy_pages",
    "HeavyTokens": ".heavy_tokens",
    "KeepsByMass": ".mass",
    "TopBlocks": ".top_blocks",
    "TopTokens": ".top_tokens",
    "Watched": ".watched",
    "Window": ".window",
    "largest_blocks": ".candidates",
}

__getattr__ = names_in(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
