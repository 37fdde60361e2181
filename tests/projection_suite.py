"""Cases of project_tokens, their inputs and the comparison of results: for the suites of plain and of packed
matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-2
"""Large, so that leaving it out shows."""


@dataclasses.dataclass(frozen=True)
class Case:
    """half: of the head dim, where the first `rotated` results are turned. offset: added to all inputs. kind: how the
    matrices are packed, by name; None: they are not."""

    tokens: int = 1
    width: int = 256
    features: tuple[int, ...] = (96,)
    norm: bool = False
    biased: bool = False
    half: int = 0
    rotated: int = 0
    gated: str | None = None
    residual: bool = False
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    offset: float = 0.0
    norm_offset: float = 0.0
    kind: str | None = None


def packed_case(kind: str, tokens: int = 3, width: int = 384, features: tuple[int, ...] = (46,), **fields: Any) -> Case:
    """A case of packed matrices."""
    return Case(tokens, width, features, kind=kind, **fields)


def arguments(case: Case, name: str, matrix: Callable[[np.random.Generator, int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional arguments, keywords) of the op. name: seeds the numbers. matrix: makes one of so many features.
    Tokens differ in size, so that a wrong row shows."""
    rng = np.random.default_rng(sum(map(ord, name)))

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    sizes = jnp.asarray(rng.uniform(0.1, 2, (case.tokens, 1)), case.dtype)
    x = numbers(case.tokens, case.width) * sizes + jnp.asarray(case.offset, case.dtype)
    angles = rng.uniform(0, 6, (case.tokens, case.half))
    keywords = {
        "biases": tuple(numbers(f) for f in case.features) if case.biased else None,
        "norm": numbers(case.width) if case.norm else None,
        "norm_eps": EPS,
        "norm_offset": case.norm_offset,
        "rotation": (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)) if case.half else None,
        "rotated": case.rotated,
        "gated": case.gated,
        "residual": numbers(case.tokens, case.features[0]) if case.residual else None,
        "out_dtype": case.out_dtype,
    }
    return (x, tuple(matrix(rng, f) for f in case.features)), keywords


def of_token(positional: tuple, keywords: dict[str, Any], token: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one of the tokens."""
    (x, weights), one = positional, slice(token, token + 1)
    own = {"rotation": keywords["rotation"] and tuple(y[one] for y in keywords["rotation"])}
    own["residual"] = None if keywords["residual"] is None else keywords["residual"][one]
    return (x[one], weights), keywords | own


def compare(found: Sequence[jax.Array], expected: Sequence[jax.Array], tolerance: float) -> None:
    """Every row of every result is within the tolerance of its norm."""
    assert len(found) == len(expected)
    for ours, ref in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (ref.shape, ref.dtype)
        ours, ref = np.asarray(ours, np.float64), np.asarray(ref, np.float64)
        error = np.linalg.norm(ours - ref, axis=-1) / np.linalg.norm(ref, axis=-1)
        assert (error <= tolerance).all(), f"rows are off by {error}"  # also where it is NaN
