"""Gated delta rule: linear attention whose state decays and is corrected by every token, and the short convolution before it."""

from pallas_kernels.gated_delta.api import Call, gated_delta
from pallas_kernels.gated_delta.convolution import causal_convolution
from pallas_kernels.gated_delta.state import GatedDeltaState, empty_state

__all__ = ["Call", "GatedDeltaState", "causal_convolution", "empty_state", "gated_delta"]
