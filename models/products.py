"""Products of tokens with a layer's matrices, for mixers and MLPs."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, DTypeLike, Float

from kvjax.model.protocols import Matrix, Params
from kvjax.models.mixers.tokens import Tokens
from pallas_kernels.core.matrices import is_packed, unpack
from pallas_kernels.matmul.project_tokens import project_tokens


def project(
    x: Float[Array, "... E"], *weights: Matrix, residual: Float[Array, "... F"] | None = None, **options: Any
) -> tuple[Float[Array, "... F"], ...]:
    """`pallas_kernels.project_tokens` on tokens in any arrangement. weights: `[F, E]`, arrays or packed."""
    rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    results = project_tokens(x.reshape(-1, x.shape[-1]), weights, residual=rows, **options)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def norm_before(x: Float[Array, "... E"], weight: Float[Array, "E"] | None, tokens: Tokens) -> tuple[Float[Array, "... E"], dict[str, Any]]:
    """Tokens, and the options of `project` for a norm before the product. weight: None where the tokens are normalised
    already, or the model has no norm there.

    RMSNorm is part of the op. Its offset is added there: the sum of offset and weight, rounded to 16 bits, would be
    another norm.
    """
    if weight is None:
        return x, {}
    if tokens.centered_norms:
        return tokens.norm(x, weight), {}
    return x, {"norm": weight, "norm_eps": tokens.norm_eps, "norm_offset": tokens.norm_offset}


def biases_of(layer: Params, there: bool, *names: str) -> dict[str, tuple[Array, ...]]:
    """The option of `project` that adds the biases of these projections; empty if the model has none."""
    return {"biases": tuple(layer[f"{name}_bias"] for name in names)} if there else {}


def widened(matrix: Matrix, dtype: DTypeLike) -> Float[Array, "F E"]:
    """A matrix that is used in another way than by `project`: unpacked to `dtype`, if it is packed; an array as it
    is."""
    return unpack(matrix, dtype) if is_packed(matrix) else matrix
