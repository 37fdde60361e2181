"""Inputs of a gated delta layer, and the recurrence in numpy's float64; shared by the suite and the promises."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import GatedDeltaState

DECAYS = {
    "usual": lambda random, shape: -np.exp(2 * random.standard_normal(shape) - 2),
    "none": lambda random, shape: -1e-4 * random.random(shape),
    "strong": lambda random, shape: np.full(shape, -20.0),
    "weak after strong": lambda random, shape: -np.where(random.random(shape) < 0.3, 20.0, 1e-2),
}
RATES = {
    "usual": lambda random, shape: random.random(shape),
    "zero": lambda random, shape: np.zeros(shape),
    "one": lambda random, shape: np.ones(shape),
}


@dataclasses.dataclass
class Inputs:
    """arrays: q, k, v, g, beta, state, lengths. keywords: form, scale, normalize and fold."""

    arrays: tuple
    keywords: dict


def make(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (0, 0, 1, 7, 8, 9, 26, 26, 13),
    counts: tuple[int, ...] = (0, 5, 0, 1, 0, 7, 0, 3, 2),
    fold: tuple[int, ...] | None = None,
    form: str = "chunked",
    chunk: int = 8,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (12, 8),
    dtype: str = "float32",
    decay: str = "usual",
    beta: str = "usual",
    keys: str = "random",
    normalize: bool = True,
) -> Inputs:
    """Rows in the middle of their sequences, T the longest. Beyond a row's length all is NaN.

    counts: tokens in the tails. fold: numbers of the rows that are folded. keys: "random" (one is 0) or "equal".
    """
    random = np.random.default_rng(seed)
    (key_heads, value_heads), (key_dim, value_dim), batch = heads, dims, len(lengths)

    def tokens(num, used):
        q, k = random.standard_normal((2, batch, num, key_heads, key_dim))
        if keys == "equal":
            k[:] = np.arange(1, key_dim + 1)
        elif num > 1:
            k[-1, 1] = 0
        k = k if normalize else k / key_dim**0.5
        v = random.standard_normal((batch, num, value_heads, value_dim))
        gates = [of(random, (batch, num, value_heads)) for of in (DECAYS[decay], RATES[beta])]
        there = np.arange(num) < np.array(used)[:, None]
        return [(x, there.reshape(*there.shape, *[1] * (x.ndim - 2))) for x in (q, k, v, *gates)]

    dtypes = [*[jnp.dtype(dtype)] * 3, np.float32, np.float32]
    new = [np.where(there, x, np.nan).astype(of) for (x, there), of in zip(tokens(max(lengths), lengths), dtypes, strict=True)]
    tail = [np.where(there, x, 0).astype(of) for (x, there), of in zip(tokens(chunk - 1, counts), dtypes, strict=True)]
    border = random.standard_normal((batch, value_heads, key_dim, value_dim)).astype(np.float32)
    state = GatedDeltaState(border, *tail[1:], np.array(counts, np.int32))
    keywords = {"form": form, "scale": key_dim**-0.5, "normalize": normalize}
    if fold is not None:
        keywords["fold"] = jnp.asarray([row in fold for row in range(batch)])
    return Inputs(jax.tree.map(jnp.asarray, (*new, state, np.array(lengths, np.int32))), keywords)


def recurrence(q, k, v, g, beta, start, *, scale, normalize=True):
    """One row by the formula: (out, every state [T+1, H, Dk, Dv], size of each out).

    The size is that of what a row of `out` is added up from, |q| times |S|: rounding errors are proportional to it, also where the sum
    cancels.
    """
    q, k, v, g, beta, start = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, start))
    if normalize:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    states, outs = [start], []
    for t in range(len(v)):
        before = states[-1] * np.exp(g[t])[:, None, None]
        correction = beta[t][:, None] * (v[t] - np.einsum("hd,hde->he", k[t], before))
        states.append(before + k[t][:, :, None] * correction[:, None])
        outs.append(scale * np.einsum("hd,hde->he", q[t], states[-1]))
    size = [scale * np.linalg.norm(q[t], axis=-1) * np.linalg.norm(states[t + 1], axis=(1, 2)) for t in range(len(v))]
    return np.array(outs).reshape(v.shape), np.array(states), np.array(size).reshape(v.shape[:2])


def whole_rows(given: Inputs):
    """Per row: its tail and its new tokens through `recurrence`, and how many of these are of the tail."""
    *new, state, lengths = jax.tree.map(np.asarray, given.arrays)
    scale, normalize = given.keywords["scale"], given.keywords["normalize"]
    old = [np.zeros_like(state.k), state.k, state.v, state.g, state.beta]
    for row, (count, length) in enumerate(zip(state.count.tolist(), lengths.tolist(), strict=True)):
        joined = [np.concatenate([a[row, :count], b[row, :length]]) for a, b in zip(old, new, strict=True)]
        yield count, *recurrence(*joined, state.border[row], scale=scale, normalize=normalize)


def run_in_pieces(op, arrays, state, pieces, sizes):
    """Calls of `op`, piece after piece: outs per row, last state. pieces: tokens of each row; sizes: the T's that calls may have. Each call
    takes the least that holds its pieces, and NaN where a row has no token."""
    done, outs = np.zeros(len(pieces[0]), int), [[] for _ in pieces[0]]
    for lengths in pieces:
        wide = min(size for size in sizes if size >= max(lengths))
        given = [np.full((len(lengths), wide, *x.shape[2:]), np.nan, x.dtype) for x in arrays]
        for row, (start, length) in enumerate(zip(done, lengths, strict=True)):
            for array, of in zip(given, arrays, strict=True):
                array[row, :length] = of[row, start : start + length]
        out, state = op(*map(jnp.asarray, given), state, jnp.asarray(np.array(lengths, np.int32)))
        for row, length in enumerate(lengths):
            outs[row].append(np.asarray(out)[row, :length])
        done += lengths
    return [np.concatenate(of) for of in outs], state


def random_pieces(seed: int, total: int, rows: int, sizes) -> list[list[int]]:
    """Ragged pieces, some of them empty, that add up to `total` in each row."""
    random, left, pieces = np.random.default_rng(seed), np.full(rows, total), []
    while left.any():
        piece = np.minimum(left, random.integers(0, random.choice(sizes) + 1, rows))
        if piece.any():
            pieces.append(piece.tolist())
            left -= piece
    return pieces


def same_bits(some, others) -> bool:
    """Whether two pytrees are equal bit for bit."""
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="session")
def layer():
    """The functions of this file, for test modules to use."""
    return SimpleNamespace(
        make=functools.cache(make),
        recurrence=recurrence,
        whole_rows=whole_rows,
        run_in_pieces=run_in_pieces,
        random_pieces=random_pieces,
        same_bits=same_bits,
    )
