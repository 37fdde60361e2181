"""Project a few tokens: norm, matrices, biases, gate and residual sum in one op."""

from pallas_kernels.matmul.project_tokens.api import project_tokens

__all__ = ["project_tokens"]
