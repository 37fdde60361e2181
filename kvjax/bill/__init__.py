"""The bill: bytes per step, what they cost on a device, and what is worth choosing."""

from kvjax.bill.evidence import LEVELS, Evidence, Fidelity, PrefillEvidence, parse_level, recorded_evidence, recorded_prefill_evidence
from kvjax.bill.prefill_bill import LayerSizes, PrefillBill, known_prefill_bills
from kvjax.bill.step_bill import Bill, Prediction, known_bill, known_bills, load_bills
from kvjax.bill.volume import TIERS, StepBytes, step_bytes

__all__ = [
    "LEVELS",
    "TIERS",
    "Bill",
    "Evidence",
    "Fidelity",
    "LayerSizes",
    "Prediction",
    "PrefillBill",
    "PrefillEvidence",
    "StepBytes",
    "known_bill",
    "known_bills",
    "known_prefill_bills",
    "load_bills",
    "parse_level",
    "recorded_evidence",
    "recorded_prefill_evidence",
    "step_bytes",
]
