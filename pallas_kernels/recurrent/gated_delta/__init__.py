"""Gated delta rule: linear attention whose state every token decays and corrects; and the short convolution before
it."""

from pallas_kernels.recurrent.gated_delta.api import Call, delta_fold, delta_page, delta_step
from pallas_kernels.recurrent.gated_delta.convolution import causal_convolution

__all__ = ["Call", "causal_convolution", "delta_fold", "delta_page", "delta_step"]
