"""The bill: bytes per step, what they cost on a device, and what is worth choosing."""

from kvjax.traffic.bill import Bill, Prediction, known_bill, known_bills, load_bills
from kvjax.traffic.evidence import LEVELS, Evidence, Fidelity, parse_level, recorded_evidence
from kvjax.traffic.volume import TIERS, StepBytes, step_bytes

__all__ = [
    "LEVELS",
    "TIERS",
    "Bill",
    "Evidence",
    "Fidelity",
    "Prediction",
    "StepBytes",
    "known_bill",
    "known_bills",
    "load_bills",
    "parse_level",
    "recorded_evidence",
    "step_bytes",
]
