"""project_tokens in plain JAX: any number of tokens, any backend, differentiable. Each step rounds to the tokens'
dtype."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.core import rope_norm
from pallas_kernels.core.matrices import LARGEST, PackedMatrix, code_numbers, is_packed, row_scales, rows_from, unpack
from pallas_kernels.matmul.project_tokens import cpu_codes
from pallas_kernels.matmul.project_tokens.api import FEW, Call

TILE_BYTES = 4 << 20
"""Bytes of a widened tile of a packed matrix on a CPU."""

CODES_TILE = 1 << 19
"""Numbers of a tile of packed codes, which XLA may copy as int8. It fits in the cache of one processor, and XLA shares
it among them."""


@functools.partial(jax.jit, static_argnames="call")
def project_tokens(call: Call, x, weights, biases, norm, rotation, residual):
    """See `pallas_kernels.project_tokens`; takes no config."""
    if norm is not None:
        x = rope_norm.rms_norm(x, norm, call.norm_eps, call.norm_offset)
    several = len(weights) > 1 and not call.gated and jax.default_backend() != "cpu"
    results = [_product(_two_rows(x) if several else x, w, call.out_dtype)[: x.shape[0]] for w in weights]
    if biases is not None:
        results = [y + b.astype(y.dtype) for y, b in zip(results, biases, strict=True)]
    if rotation is not None:
        results = [_rotate(y, rotation) for y in results[: call.rotated]] + results[call.rotated :]
    if call.gated:
        gate, up = results
        gate = jax.nn.silu(gate) if call.gated == "silu" else jax.nn.gelu(gate, approximate=True)
        results = [gate * up]
    if residual is not None:
        results = [results[0] + residual.astype(results[0].dtype)]
    return tuple(results)


def _two_rows(x):
    """Add a row of zeros to a single token. XLA for GPUs turns the product of one row and a narrow matrix into an
    elementwise product, which it writes to memory, and a sum. With two rows it joins the products of several matrices
    into one."""
    return x if x.shape[0] > 1 else jnp.concatenate([x, jnp.zeros_like(x)])


def _rotate(y, rotation):
    cos, sin = rotation
    heads = y.reshape(y.shape[0], -1, 2 * cos.shape[1])
    return rope_norm.rotate(heads, cos[:, None], sin[:, None]).reshape(y.shape)


def _product(x, weight, out_dtype):
    if is_packed(weight):
        return (_cpu_product if jax.default_backend() == "cpu" else _packed_product)(x, weight, out_dtype)
    # Accelerators multiply float32 with fewer bits by default; shorter types lose nothing by that.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    options = {"precision": precision, "preferred_element_type": out_dtype}
    if jax.default_backend() == "cpu" and x.shape[0] == 1:
        if x.dtype == weight.dtype == jnp.bfloat16:  # XLA for CPUs writes a float32 copy of the matrix for one row, not for two
            return jnp.einsum("re,fe->rf", _two_rows(x), weight, **options)[:1]
        return jnp.einsum("fe,re->fr", weight, x, **options).T  # only with the matrix first it is a matrix-vector product
    return jnp.einsum("re,fe->rf", x, weight, **options)


def _packed_product(x, weight: PackedMatrix, out_dtype):
    """XLA for GPUs fuses the widening into the product of a few tokens. For many it writes the widened matrix first."""
    if weight.format.fp8_tokens and x.shape[0] > FEW:
        return _fp8_product(x, weight, out_dtype)
    if weight.format.columns is not None:
        return _product(x, unpack(weight, x.dtype), out_dtype)
    # Sums of codes may be more than float16 holds.
    return (_product(x, code_numbers(weight, x.dtype), jnp.float32) * row_scales(weight)).astype(out_dtype)


def _fp8_product(x, weight: PackedMatrix, out_dtype):
    """Tokens in fp8, the largest number of each being the largest code, times codes of fp8."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest / LARGEST["fp8_e4m3"])
    sums = jnp.einsum("re,fe->rf", (x / scales).astype(weight.codes.dtype), weight.codes, preferred_element_type=jnp.float32)
    return (sums * scales * row_scales(weight)).astype(out_dtype)


def _cpu_product(x, weight: PackedMatrix, out_dtype):
    """Few tokens by integer codes: without a widened matrix."""
    if x.shape[0] > FEW or not cpu_codes.takes(weight, x.shape[0]):
        return _tiled_product(_packed_product, x, weight, TILE_BYTES // x.dtype.itemsize, out_dtype)
    if weight.format.codes == "int8" and weight.format.columns is None:
        return _codes_product(x, weight, out_dtype)
    return _tiled_product(_codes_product, x, weight, CODES_TILE, out_dtype)


def _codes_product(x, weight: PackedMatrix, out_dtype):
    return cpu_codes.codes_product(x, weight).astype(out_dtype)


def _tiled_product(product, x, weight: PackedMatrix, numbers: int, out_dtype):
    """XLA for CPUs always writes the widened matrix, so a few of its rows are widened at a time: those of so many
    numbers."""
    features, inputs = weight.shape
    block = weight.format.rows
    rows = max(1, numbers // inputs // block) * block
    if features <= rows:
        return product(x, weight, out_dtype)

    def with_rows(results, start, count):
        part = product(x, rows_from(weight, start, count), out_dtype)
        return jax.lax.dynamic_update_slice(results, part, (0, start))

    # Every number is overwritten. XLA would make zeros, which depend on nothing, for the products of all layers at
    # once; so, too, a tile outside of the loop. So the last tile begins earlier where rows do not divide, unless it
    # would begin within a block.
    results = jnp.broadcast_to(x[:, :1].astype(out_dtype), (x.shape[0], features))
    overlap = features % block == 0
    tiles = -(-features // rows) if overlap else features // rows
    last = features - rows if overlap else (tiles - 1) * rows
    results = jax.lax.fori_loop(0, tiles, lambda n, results: with_rows(results, jnp.minimum(n * rows, last), rows), results)
    return results if overlap else with_rows(results, tiles * rows, features - tiles * rows)
