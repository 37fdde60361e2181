"""The rows of `project_tokens`: the projections of tokens in a decode step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import inputs
from pallas_kernels.bench.cases import Case
from pallas_kernels.project_tokens import project_tokens

NORM_EPS = 1e-6


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
    }[case.policy]


def weight_bytes(case: Case) -> int:
    """Bytes of the matrices, which one op reads. Everything else is less than a hundredth."""
    width, counts = features(case)
    return width * sum(counts) * inputs.ITEM


def make_arrays(case: Case, seed: int) -> dict[str, Any]:
    """Random arguments of one op, by name."""
    width, counts = features(case)
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def numbers(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape, inputs.DTYPE) * scale).astype(inputs.DTYPE)

    arrays = {"x": numbers(case.batch, width), "weights": tuple(numbers(count, width, scale=width**-0.5) for count in counts)}
    if case.policy in ("qkv", "gate-up"):
        arrays["norm"] = numbers(width)
    if case.policy == "qkv":
        angles = jax.random.uniform(next(keys), (case.batch, case.sizes.head_dim // 2), maxval=6)
        arrays |= {"biases": tuple(numbers(count) for count in counts), "rotation": (jnp.cos(angles), jnp.sin(angles))}
    if case.policy in ("o", "down"):
        arrays["residual"] = numbers(case.batch, *counts)
    return arrays


def op_of(case: Case, implementation: str | None):
    """The op as a function of None and its own arguments, x first."""
    options = {
        "qkv": {"norm_eps": NORM_EPS, "rotated": 2},
        "gate-up": {"norm_eps": NORM_EPS, "gated": "silu"},
        "logits": {"out_dtype": jnp.float32},
    }.get(case.policy, {})

    def project(pool: None, x, arrays):
        return project_tokens(x, **arrays, **options, implementation=implementation)

    return project


def own_arguments(case: Case, seed: int) -> tuple:
    """The arguments of `op_of`'s function after the first."""
    arrays = make_arrays(case, seed)
    return arrays.pop("x"), arrays
