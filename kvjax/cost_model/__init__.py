"""The cost model: bytes per step, their time on a device, and the choice of a policy."""

from kvjax.cost_model.auto import Auto, AutoPrefill, Bound, PrefillBound, calibrate
from kvjax.cost_model.bytes import TIERS, StepBytes, step_bytes
from kvjax.cost_model.evidence import LEVELS, Evidence, Fidelity, PrefillEvidence, parse_level, recorded_evidence, recorded_prefill_evidence
from kvjax.cost_model.exchanges import Exchange, ExchangeTerm, step_exchanges
from kvjax.cost_model.predict import (
    BusTerm,
    CostModel,
    MeshChoice,
    Prediction,
    Price,
    known_cost_model,
    known_cost_models,
    load_cost_models,
    rank_meshes,
)
from kvjax.cost_model.prefill_times import LayerSizes, PrefillTimes, known_prefill_times

__all__ = [
    "LEVELS",
    "TIERS",
    "Auto",
    "AutoPrefill",
    "Bound",
    "BusTerm",
    "CostModel",
    "Evidence",
    "Exchange",
    "ExchangeTerm",
    "Fidelity",
    "LayerSizes",
    "MeshChoice",
    "Prediction",
    "PrefillBound",
    "PrefillEvidence",
    "PrefillTimes",
    "Price",
    "StepBytes",
    "calibrate",
    "known_cost_model",
    "known_cost_models",
    "known_prefill_times",
    "load_cost_models",
    "parse_level",
    "rank_meshes",
    "recorded_evidence",
    "recorded_prefill_evidence",
    "step_bytes",
    "step_exchanges",
]
