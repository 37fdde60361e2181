"""Inputs of a gated delta layer, and the recurrence in numpy's float64; shared by the suite and the promises."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def tokens(
    seed: int,
    batch: int,
    count: int,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (12, 8),
    dtype: str = "float32",
    decay: str = "usual",
    beta: str = "usual",
    keys: str = "random",
    normalize: bool = True,
) -> dict[str, np.ndarray]:
    """q, k, v, g and beta of `count` tokens of each row, and the state before them. keys: "random" (one is 0) or
    "equal"."""
    random, (key_heads, value_heads), (key_dim, value_dim) = np.random.default_rng(seed), heads, dims
    q, k = random.standard_normal((2, batch, count, key_heads, key_dim))
    if keys == "equal":
        k[:] = np.arange(1, key_dim + 1)
    else:
        k[-1, 1] = 0
    k = k if normalize else k / key_dim**0.5
    v = random.standard_normal((batch, count, value_heads, value_dim))
    g, rate = (of(random, (batch, count, value_heads)) for of in (DECAYS[decay], RATES[beta]))
    start = random.standard_normal((batch, value_heads, key_dim, value_dim))
    found = {name: x.astype(jnp.dtype(dtype)) for name, x in {"q": q, "k": k, "v": v}.items()}
    return found | {name: x.astype(np.float32) for name, x in {"g": g, "beta": rate, "start": start}.items()}


def make(
    form: str = "page",
    seed: int = 0,
    *,
    rows: int = 24,
    counts: tuple[int, ...] = (0, 5, 0, 1, 0, 7, 16, 23, 9, 24),
    lengths: tuple[int, ...] = (0, 0, 1, 7, 24, 9, 8, 1, 13, 0),
    chunk: int = 8,
    normalize: bool = True,
    **of_tokens,
) -> SimpleNamespace:
    """A page of each row of a batch, in the middle of a sequence. arrays, keywords: of the form's function. out,
    corrections, size, state: what is expected, in float64, of all tokens; counts, lengths. What nobody may read is
    NaN."""
    counts, lengths = np.array(counts, np.int32), np.array(lengths, np.int32)
    given = tokens(seed, len(counts), int((counts + lengths).max()), normalize=normalize, **of_tokens)
    scale = given["k"].shape[3] ** -0.5
    found = [
        recurrence(*(given[name][row] for name in ("q", "k", "v", "g", "beta", "start")), scale=scale, normalize=normalize)
        for row in range(len(counts))
    ]
    out, corrections, states, size = (np.stack(each) for each in zip(*found, strict=True))

    def page(x, begin=0, end=counts):
        """Rows [begin, end) of a page."""
        wide = np.full((len(x), rows, *x.shape[2:]), np.nan, x.dtype)
        for row, (first, last) in enumerate(zip(*np.broadcast_arrays(begin, end), strict=True)):
            wide[row, first:last] = x[row, first:last]
        return wide

    known = page(corrections.astype(np.float32))
    ends, needed = counts + lengths, counts // chunk * chunk
    keywords = {"scale": scale, "normalize": normalize}
    q, k, v, g, beta, start = (given[name] for name in ("q", "k", "v", "g", "beta", "start"))
    if form == "page":
        arrays = (page(q, counts, ends), page(k, 0, ends), page(v, needed, ends), page(g, 0, ends), page(beta, needed, ends), known)
        arrays, keywords = (*arrays, start, counts, lengths), keywords | {"chunk": chunk}
    elif form == "step":
        new = [np.full((len(x), max(lengths), *x.shape[2:]), np.nan, x.dtype) for x in (q, k, v, g, beta)]
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            for wide, x in zip(new, (q, k, v, g, beta), strict=True):
                wide[row, : end - count] = x[row, count:end]
        arrays = (*new, page(k), page(g), known, start, counts, lengths)
    else:
        arrays, keywords = (page(k), page(g), known, start, counts), {"normalize": normalize}
    state = states[np.arange(len(counts)), counts]
    arrays = jax.tree.map(jnp.asarray, arrays)
    expected = {"out": out, "corrections": corrections, "size": size, "state": state}
    return SimpleNamespace(form=form, arrays=arrays, keywords=keywords, counts=counts, lengths=lengths, **expected)


def recurrence(q, k, v, g, beta, start, *, scale, normalize=True):
    """One row by the formula: (out, corrections, every state [T+1, H, Dk, Dv], sizes [T, H, 2]).

    The sizes are those of what a row of `out`, and of the corrections, is added up from, |q| times |S| say: rounding
    errors are proportional to them, also where the sum cancels.
    """
    q, k, v, g, beta, start = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, start))
    if normalize:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    states, outs, corrections, sizes = [start], [], [], []
    for t in range(len(v)):
        before = states[-1] * np.exp(g[t])[:, None, None]
        corrections.append(beta[t][:, None] * (v[t] - np.einsum("hd,hde->he", k[t], before)))
        states.append(before + k[t][:, :, None] * corrections[-1][:, None])
        outs.append(scale * np.einsum("hd,hde->he", q[t], states[-1]))
        norm = [np.linalg.norm(x, axis=tuple(range(1, x.ndim))) for x in (q[t], states[-1], v[t], k[t], before)]
        sizes.append(np.stack([scale * norm[0] * norm[1], beta[t] * (norm[2] + norm[3] * norm[4])], axis=-1))
    return tuple(np.array(x) for x in (outs, corrections, states, sizes))


def same_bits(some, others) -> bool:
    """Whether two pytrees are equal bit for bit."""
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="session")
def layer():
    """The functions of this file, for test modules to use."""
    return SimpleNamespace(make=functools.cache(make), tokens=tokens, recurrence=recurrence, same_bits=same_bits)
