"""project_tokens by definition, on the host in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.matrices import PackedMatrix, is_packed
from pallas_kernels.matmul.project_tokens.api import FEW, Call


def project_tokens(call: Call, x, weights, biases, norm, rotation, residual):
    """See `pallas_kernels.project_tokens`; takes no config. Rounds once, at the end; cannot be traced."""
    many, rounded = x.shape[0] > FEW, [is_packed(w) and w.format.fp8_tokens for w in weights]
    x, *weights = (_unpacked(y) if is_packed(y) else np.asarray(y, np.float64) for y in (x, *weights))
    if norm is not None:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + call.norm_eps) * (call.norm_offset + np.asarray(norm, np.float64))
    results = [(_in_fp8(x) if many and fp8 else x) @ w.T for w, fp8 in zip(weights, rounded, strict=True)]
    if biases is not None:
        results = [y + np.asarray(b, np.float64) for y, b in zip(results, biases, strict=True)]
    if rotation is not None:
        turns = np.asarray(rotation[0], np.float64) + 1j * np.asarray(rotation[1], np.float64)
        results = [_rotate(y, turns) for y in results[: call.rotated]] + results[call.rotated :]
    if call.gated:
        gate, up = results
        results = [_ACTIVATIONS[call.gated](gate) * up]
    if residual is not None:
        results = [results[0] + np.asarray(residual, np.float64)]
    return tuple(jnp.asarray(y, call.out_dtype) for y in results)


def _in_fp8(x):
    """Each token as numbers of fp8, with 3 bits behind the leading one and exponents from -6 on, times its own
    scale."""
    scales = np.abs(x).max(axis=1, keepdims=True) / 448
    codes = x / np.where(scales == 0, 1, scales)
    steps = 2.0 ** (np.maximum(np.frexp(codes)[1] - 1, -6) - 3)
    return np.round(codes / steps) * steps * scales


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def _rotate(y, turns):
    """Each pair (i, i + D/2) of a head is a complex number that is rotated."""
    rows, half = turns.shape
    pairs = y.reshape(rows, -1, 2, half)
    turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * turns[:, None]
    return np.stack([turned.real, turned.imag], axis=2).reshape(y.shape)


def _unpacked(matrix: PackedMatrix) -> np.ndarray:
    """Number by number, as the format is defined."""
    codes, (rows, columns) = np.asarray(matrix.codes), np.indices(matrix.shape)
    block = rows // matrix.format.rows, 0 * columns if matrix.format.columns is None else columns // matrix.format.columns
    scales = np.asarray(matrix.scales).astype(np.float64)[block]
    if matrix.format.codes != "int4":
        return codes.astype(np.float64) * scales
    codes = codes[rows, columns // 2] // np.where(columns % 2, 16, 1) % 16
    zeros = 8.0 if matrix.zeros is None else np.asarray(matrix.zeros).astype(np.float64)[block]
    return (codes - zeros) * scales
