"""The rows of `project_tokens`: the projections of tokens in a decode step, by arrays and by packed matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import inputs
from pallas_kernels.bench.cases import Case
from pallas_kernels.core.matrices import MatrixFormat, is_packed, pack, unpack
from pallas_kernels.matmul.project_tokens import project_tokens

NORM_EPS = 1e-6

FORMATS = {
    "int8": MatrixFormat("int8"),
    "fp8": MatrixFormat("fp8_e4m3"),
    "int8:128x128": MatrixFormat("int8", 128, 128),
    "fp8:128x128": MatrixFormat("fp8_e4m3", 128, 128),
    "int4": MatrixFormat("int4", 1, 128),
}
"""`cases.PACKED`."""


def _projection(case: Case) -> str:
    return case.policy.partition(":")[0]


def features(case: Case) -> tuple[int, tuple[int, ...]]:
    """Width of the tokens, and features of each matrix."""
    s = case.sizes
    heads, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    return {
        "qkv": (s.width, (heads, kv, kv)),
        "o": (heads, (s.width,)),
        "gate-up": (s.width, (s.mlp_width, s.mlp_width)),
        "down": (s.mlp_width, (s.width,)),
        "logits": (s.width, (s.vocabulary,)),
    }[_projection(case)]


def weight_bytes(case: Case) -> int:
    """Bytes of the matrices, with their scales, which one op reads. Everything else is less than a hundredth, of packed
    weights less than a tenth."""
    width, counts = features(case)
    if case.packed:
        return sum(FORMATS[case.packed].bytes_of((count, width)) for count in counts)
    return width * sum(counts) * inputs.ITEM


def make_arrays(case: Case, seed: int) -> dict[str, Any]:
    """Random arguments of one op, by name."""
    width, counts = features(case)
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def numbers(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape, inputs.DTYPE) * scale).astype(inputs.DTYPE)

    def matrix(count: int):
        array = numbers(count, width, scale=width**-0.5)
        return pack(array, FORMATS[case.packed]) if case.packed else array

    arrays = {"x": numbers(case.batch, width), "weights": tuple(matrix(count) for count in counts)}
    if _projection(case) in ("qkv", "gate-up"):
        arrays["norm"] = numbers(width)
    if _projection(case) == "qkv":
        angles = jax.random.uniform(next(keys), (case.batch, case.sizes.head_dim // 2), maxval=6)
        arrays |= {"biases": tuple(numbers(count) for count in counts), "rotation": (jnp.cos(angles), jnp.sin(angles))}
    if _projection(case) in ("o", "down"):
        arrays["residual"] = numbers(case.batch, *counts)
    return arrays


def op_of(case: Case, implementation: str | None):
    """The op as a function of None and its own arguments, x first."""
    options = {
        "qkv": {"norm_eps": NORM_EPS, "rotated": 2},
        "gate-up": {"norm_eps": NORM_EPS, "gated": "silu"},
        "logits": {"out_dtype": jnp.float32},
    }.get(_projection(case), {})

    def project(pool: None, x, arrays):
        return project_tokens(x, **arrays, **options, implementation=implementation)

    return project


def exact(case: Case, own: tuple) -> tuple[jax.Array, ...]:
    """The results of an op's own arguments: of arrays by the reference on the host; of packed matrices in float32 on
    the device, from the unpacked numbers, since the reference takes minutes to unpack large ones."""
    if not case.packed:
        return op_of(case, "reference")(None, *own)
    wide = jax.tree.map(lambda y: unpack(y) if is_packed(y) else y.astype(jnp.float32), own, is_leaf=is_packed)
    return op_of(case, "xla")(None, *wide)


def own_arguments(case: Case, seed: int) -> tuple:
    """The arguments of `op_of`'s function after the first."""
    arrays = make_arrays(case, seed)
    return arrays.pop("x"), arrays
