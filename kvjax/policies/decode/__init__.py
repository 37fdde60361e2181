"""Decode policies: which blocks a step reads. `parse("top:8")` finds one by name. A new one is a frozen dataclass with `select`.

The classes of policies are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.policies.decode.base import (
    Blocks,
    DecodePolicy,
    GivesPagesBack,
    IndexerQuery,
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
    from kvjax.policies.decode.cascade import Cascade
    from kvjax.policies.decode.dense import Dense
    from kvjax.policies.decode.heavy import HeavyPages, HeavyTokens
    from kvjax.policies.decode.mass import KeepsByMass, LearnsFromPrefill, MassContext, PrefillMass, largest_blocks, mass_of_step
    from kvjax.policies.decode.top_blocks import TopBlocks
    from kvjax.policies.decode.top_tokens import TopTokens
    from kvjax.policies.decode.watched import Watched
    from kvjax.policies.decode.window import Window

__all__ = [
    "FORMS",
    "Blocks",
    "Cascade",
    "DecodePolicy",
    "Dense",
    "GivesPagesBack",
    "HeavyPages",
    "HeavyTokens",
    "IndexerQuery",
    "KeepsByMass",
    "LearnsFromPrefill",
    "MassContext",
    "PrefillMass",
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
    "mass_of_step",
    "name_of",
    "parse",
    "parse_recorded",
    "register",
    "select_and_attend",
]

_HOMES = {
    "Cascade": ".cascade",
    "Dense": ".dense",
    "HeavyPages": ".heavy",
    "HeavyTokens": ".heavy",
    "KeepsByMass": ".mass",
    "LearnsFromPrefill": ".mass",
    "MassContext": ".mass",
    "PrefillMass": ".mass",
    "TopBlocks": ".top_blocks",
    "TopTokens": ".top_tokens",
    "Watched": ".watched",
    "Window": ".window",
    "largest_blocks": ".mass",
    "mass_of_step": ".mass",
}

__getattr__ = names_in(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
