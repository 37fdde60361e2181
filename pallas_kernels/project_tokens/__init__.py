"""Project a few tokens: norm, matrices, biases, gate, residual sum, in one go."""

from pallas_kernels.project_tokens.api import project_tokens

__all__ = ["project_tokens"]
