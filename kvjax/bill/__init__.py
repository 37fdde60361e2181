"""The bill: bytes per step, their time on a device, and the choice of a policy."""

from kvjax.bill.auto_decode import Auto, Bound
from kvjax.bill.auto_prefill import AutoPrefill, PrefillBound
from kvjax.bill.bus import Bus
from kvjax.bill.evidence import LEVELS, Evidence, Fidelity, PrefillEvidence, parse_level, recorded_evidence, recorded_prefill_evidence
from kvjax.bill.exchanges import Exchange, step_exchanges
from kvjax.bill.mesh_terms import MeshTerms
from kvjax.bill.meshes import MeshChoice, Part, rank_meshes, step_parts
from kvjax.bill.prefill_bill import LayerSizes, PrefillBill, known_prefill_bills
from kvjax.bill.step_bill import Bill, Prediction, known_bill, known_bills, load_bills
from kvjax.bill.volume import TIERS, StepBytes, step_bytes

__all__ = [
    "LEVELS",
    "TIERS",
    "Auto",
    "AutoPrefill",
    "Bill",
    "Bound",
    "Bus",
    "Evidence",
    "Exchange",
    "Fidelity",
    "LayerSizes",
    "MeshChoice",
    "MeshTerms",
    "Part",
    "Prediction",
    "PrefillBill",
    "PrefillBound",
    "PrefillEvidence",
    "StepBytes",
    "known_bill",
    "known_bills",
    "known_prefill_bills",
    "load_bills",
    "parse_level",
    "rank_meshes",
    "recorded_evidence",
    "recorded_prefill_evidence",
    "step_bytes",
    "step_exchanges",
    "step_parts",
]
