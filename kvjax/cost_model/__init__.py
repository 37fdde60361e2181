"""The cost model: bytes per step, their time on a device, and the choice of a policy."""

from kvjax.cost_model.auto import Auto, AutoPrefill, Bound, PrefillBound, calibrate
from kvjax.cost_model.bytes import StepBytes, step_bytes
from kvjax.cost_model.evidence import LEVELS, Evidence, Fidelity, PrefillEvidence, parse_level, recorded_evidence, recorded_prefill_evidence
from kvjax.cost_model.exchanges import ExchangeTerm, step_exchanges
from kvjax.cost_model.predict import BusTerm, CostModel, Prediction, Price, known_cost_model, known_cost_models, load_cost_models
from kvjax.cost_model.prefill_times import LayerSizes, PrefillTimes, known_prefill_times

__all__ = [
    "LEVELS",
    "Auto",
    "AutoPrefill",
    "Bound",
    "BusTerm",
    "CostModel",
    "Evidence",
    "ExchangeTerm",
    "Fidelity",
    "LayerSizes",
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
    "recorded_evidence",
    "recorded_prefill_evidence",
    "step_bytes",
    "step_exchanges",
]
