"""project_tokens: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32

from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import PackedMatrix, check_packed, is_packed

ACTIVATIONS = ("silu", "gelu_tanh")

FEW = 16
"""The most tokens that are never rounded to fp8."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `project_tokens` explains them."""

    norm_eps: float
    norm_offset: float
    rotated: int
    gated: str | None
    out_dtype: jnp.dtype
    config: Any


def project_tokens(
    x: Float[Array, "R E"],
    weights: tuple[Float[Array, "F E"] | PackedMatrix, ...],
    *,
    biases: tuple[Float[Array, "F"], ...] | None = None,
    norm: Float[Array, "E"] | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    rotation: tuple[Float32[Array, "R D2"], Float32[Array, "R D2"]] | None = None,
    rotated: int = 0,
    gated: Literal["silu", "gelu_tanh"] | None = None,
    residual: Float[Array, "R F"] | None = None,
    out_dtype: DTypeLike | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "R F"], ...]:
    """Multiply tokens by matrices, `norm(x) @ w.T + bias` for each w, with the norm, rotation, gate and residual around
    the products.

    Args:
        x: R tokens of width E.
        weights: matrices stored [features, inputs], of x's dtype or packed (`pallas_kernels.core.matrices`); each may
            have its own F.
        biases: one per matrix.
        norm: weight of an RMSNorm before the products, `x / sqrt(mean(x^2) + norm_eps) * (norm_offset + norm)`.
        norm_eps, norm_offset: of that norm.
        rotation: cosine and sine, float32, of RoPE's angles for each token.
        rotated: the results of the first `rotated` matrices are heads of D = 2 * D2 features; pair (i, i + D2) of each
            head is rotated.
        gated: two matrices of one shape give one result, `activation(first) * second`; gelu_tanh is the tanh
            approximation of GELU.
        residual: added to the only result, of x's dtype.
        out_dtype: x's dtype (default) or float32.
        config: settings of the implementation; no implementation takes any so far.
        implementation: see `pallas_kernels.core.dispatch`.

    Only `xla` can be differentiated; name it where a gradient of a few tokens is wanted on a GPU.

    On a Hopper GPU, "mosaic_gpu" runs calls of up to 64 tokens, of packed matrices 16, which are bound by the bytes of
    the weights. "xla" runs calls of more tokens, drafted ones (T * B) included.

    Packed matrices: "mosaic_gpu" takes matrices of one format, whose blocks are whole rows or have a multiple of 64
    columns (int4: 128). It reads codes and scales once, and multiplies float32 sums by the scales. It multiplies codes
    in x's dtype, which holds them exactly; NaN in fp8 counts as 480. But int8 and int4 without zeros, for up to 8
    tokens, it multiplies as integers, by tokens that are integers, too (`pallas_kernels.matmul.project_tokens.digits`
    says how exact these are): a token with an input that is not finite gives NaN. "xla" multiplies codes in x's dtype
    where blocks are whole rows; else it unpacks numbers in float32 and rounds them to x's dtype. A CPU holds one tile
    of a widened matrix at a time; other devices at most one widened matrix. On a CPU "xla" widens no integer codes for
    up to `FEW` tokens, if blocks are whole rows, or for one token, if they are of one row
    (`pallas_kernels.matmul.project_tokens.cpu_codes`): tokens become integers of 22 bits there, too, and one that is
    not finite gives NaN.

    Matrices with `fp8_tokens`: in calls of more than `FEW` tokens "xla" rounds each token to fp8, with a scale of its
    own, and multiplies fp8 by fp8. Calls of fewer tokens read these matrices as any of fp8.

    Returns a tuple with one array per result. Sums are float32. The implementation decides what is rounded in between
    (normalised tokens, a product before its bias). A token's result does not depend on the other tokens of the call.
    On a GPU it depends on how many there are only where these go to another implementation, or are more than 8 by
    matrices of int8 and int4, which "mosaic_gpu" then multiplies as numbers: up to 64 tokens of arrays have the bits
    that they have alone.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Sources: RMSNorm (arXiv 1910.07467); RoPE (arXiv 2104.09864), in the "rotate half" layout; the gated unit, SwiGLU
    (arXiv 2002.05202).
    """
    call = Call(norm_eps, norm_offset, rotated, gated, jnp.dtype(out_dtype or x.dtype), config)
    _check(call, x, weights, biases, norm, rotation, residual)
    shapes = ", ".join(str(w) if is_packed(w) else str(list(w.shape)) for w in weights)
    options = {"biases": biases, "norm": norm, "rotation": rotation, "gated": gated, "residual": residual}
    given = " ".join(name for name, option in options.items() if option is not None)
    signature = f"{dispatch.signature(x=x)} weights {shapes} {given} -> {call.out_dtype}"
    return dispatch.run("project_tokens", implementation, signature, call, x, weights, biases, norm, rotation, residual)


def _check(call: Call, x, weights, biases, norm, rotation, residual) -> None:
    rotated, gated = call.rotated, call.gated
    arrays = dispatch.signature(x=x, norm=norm, residual=residual)
    matrices = ", ".join(str(w) if is_packed(w) else f"{w.dtype}{list(w.shape)}" for w in weights)
    if x.ndim != 2 or 0 in x.shape or not weights:
        raise ValueError(f"project_tokens takes x [R,E], no axis empty, and at least one matrix [F,E]; got {arrays}, weights {matrices}")
    if any(w.ndim != 2 or w.shape[1] != x.shape[1] or w.shape[0] == 0 for w in weights):
        raise ValueError(f"weights must be [F,E], stored [features, inputs], with x's E; got {arrays}, weights {matrices}")
    for number, w in enumerate(weights):
        if is_packed(w):
            check_packed(w, f"weights[{number}]")
    others = [*(w for w in weights if not is_packed(w)), *(biases or ()), *(y for y in (norm, residual) if y is not None)]
    if not jnp.issubdtype(x.dtype, jnp.floating) or any(y.dtype != x.dtype for y in others):
        raise ValueError(f"all arrays must have x's floating dtype; got {arrays}, weights {matrices}")
    if biases is not None and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        raise ValueError(f"biases must be one [F] per matrix; got {[list(b.shape) for b in biases]} for weights {matrices}")
    if norm is not None and norm.shape != x.shape[1:]:
        raise ValueError(f"norm must be [E]; got {arrays}")
    if gated not in (None, *ACTIVATIONS):
        raise ValueError(f"gated must be one of {', '.join(ACTIVATIONS)}, or None, got {gated!r}")
    if gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError(f"gated takes two matrices of one shape; got weights {matrices}")
    if rotation is None and rotated:
        raise ValueError(f"{rotated} results are to be rotated, and there is no rotation")
    if rotation is not None:
        _check_rotation(x, weights, rotation, rotated, gated)
    results = 1 if gated else len(weights)
    if residual is not None and (results != 1 or residual.shape != (x.shape[0], weights[0].shape[0])):
        raise ValueError(f"residual must have the shape of the only result; got {arrays}, {results} results of weights {matrices}")
    if call.out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"out_dtype must be x's {x.dtype} or float32, got {call.out_dtype}")


def _check_rotation(x, weights, rotation, rotated: int, gated: str | None) -> None:
    cos, sin = rotation
    arrays = dispatch.signature(cos=cos, sin=sin)
    if (
        cos.ndim != 2
        or 0 in cos.shape
        or cos.shape != sin.shape
        or cos.shape[0] != x.shape[0]
        or cos.dtype != jnp.float32
        or sin.dtype != jnp.float32
    ):
        raise ValueError(f"rotation must be cosine and sine, float32 [R,D/2] with x's R {x.shape[0]}; got {arrays}")
    if gated or not 0 < rotated <= len(weights):
        raise ValueError(f"rotation is for the first {rotated} of {len(weights)} results; it needs 1 to {len(weights)}, and no gate")
    if any(w.shape[0] % (2 * cos.shape[1]) for w in weights[:rotated]):
        raise ValueError(f"rotated features must be heads of {2 * cos.shape[1]}; got {[w.shape[0] for w in weights[:rotated]]}")
