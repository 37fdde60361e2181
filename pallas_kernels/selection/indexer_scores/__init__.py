"""Lightning indexer: a score for every token of a sequence. Token-sparse attention uses it to choose what to read."""

from pallas_kernels.selection.indexer_scores.api import indexer_scores
from pallas_kernels.selection.indexer_scores.fp8 import quantize_keys

__all__ = ["indexer_scores", "quantize_keys"]
