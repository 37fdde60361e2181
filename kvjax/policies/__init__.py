"""Decode policies: which blocks a step reads. `parse("top:8")` names them; a new one is a frozen dataclass with `select`."""

from kvjax.policies.auto import Auto, Bound, Choice
from kvjax.policies.base import (
    Blocks,
    DecodePolicy,
    IndexerQuery,
    ScoresBlocks,
    SelectContext,
    Stateless,
    StateSpec,
    check_budgets,
    select_and_attend,
)
from kvjax.policies.dense import Dense
from kvjax.policies.mass import LearnsFromPrefill, MassContext, PrefillMass, largest_blocks, mass_of_step
from kvjax.policies.naming import FORMS, identity, name_of, parse, register
from kvjax.policies.top_blocks import TopBlocks
from kvjax.policies.top_tokens import TopTokens
from kvjax.policies.window import Window

__all__ = [
    "FORMS",
    "Auto",
    "Blocks",
    "Bound",
    "Choice",
    "DecodePolicy",
    "Dense",
    "IndexerQuery",
    "LearnsFromPrefill",
    "MassContext",
    "PrefillMass",
    "ScoresBlocks",
    "SelectContext",
    "StateSpec",
    "Stateless",
    "TopBlocks",
    "TopTokens",
    "Window",
    "check_budgets",
    "identity",
    "largest_blocks",
    "mass_of_step",
    "name_of",
    "parse",
    "register",
    "select_and_attend",
]
