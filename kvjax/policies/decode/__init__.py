"""Decode policies: which blocks a step reads. `parse("top:8")` finds one by name. A new one is a frozen dataclass with `select`."""

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
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.heavy import HeavyPages, HeavyTokens
from kvjax.policies.decode.mass import KeepsByMass, LearnsFromPrefill, MassContext, PrefillMass, largest_blocks, mass_of_step
from kvjax.policies.decode.naming import FORMS, built_in, identity, name_of, parse, parse_recorded, register
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
