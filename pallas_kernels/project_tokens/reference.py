"""project_tokens by definition, on the host in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def project_tokens(x, weights, *, biases, norm, norm_eps, rotation, rotated, gated, residual, out_dtype, config):
    """See `pallas_kernels.project_tokens.project_tokens`; takes no config. Rounds once, at the end; not to be traced."""
    if config is not None:
        raise ValueError(f"implementation 'reference' of project_tokens takes no config, got {config!r}")
    x, *weights = (np.asarray(y, np.float64) for y in (x, *weights))
    if norm is not None:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + norm_eps) * np.asarray(norm, np.float64)
    results = [x @ w.T for w in weights]
    if biases is not None:
        results = [y + np.asarray(b, np.float64) for y, b in zip(results, biases, strict=True)]
    if rotation is not None:
        turns = np.asarray(rotation[0], np.float64) + 1j * np.asarray(rotation[1], np.float64)
        results = [_rotate(y, turns) for y in results[:rotated]] + results[rotated:]
    if gated:
        gate, up = results
        results = [gate / (1 + np.exp(-gate)) * up]
    if residual is not None:
        results = [results[0] + np.asarray(residual, np.float64)]
    return tuple(jnp.asarray(y, out_dtype) for y in results)


def _rotate(y, turns):
    """Each pair (i, i + D/2) of a head is a complex number, turned."""
    rows, half = turns.shape
    pairs = y.reshape(rows, -1, 2, half)
    turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * turns[:, None]
    return np.stack([turned.real, turned.imag], axis=2).reshape(y.shape)
