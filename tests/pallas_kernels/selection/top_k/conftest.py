"""Rows that catch real bugs in a top-k, a stable sort by numpy as the oracle, and the check; for the suites of all
implementations.

A test that takes `case` runs over all of `CASES`. Everything else comes by the fixture `suite`.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

TINY = np.float32(1e-45)
SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, TINY, -TINY, 1.1754942e-38, 1.1754944e-38, 3.4e38, -3.4e38, 1, -1, 1.0000001], np.float32
)


def _with(part: float, value):
    """Normal scores, some of which are replaced: by a value, or by one of several."""

    def make(rng, n, k):
        return np.where(rng.random(n) < part, rng.choice(np.atleast_1d(value), n), rng.standard_normal(n))

    return make


def _best_together(where):
    def make(rng, n, k):
        return rng.standard_normal(n) + 9 * (np.abs(np.arange(n) - where(n)) <= k)

    return make


def _payloads(rng, n, k):
    """NaNs of both signs whose bits differ, among a few numbers."""
    nan = (rng.integers(1, 2**22, n) | 0x7FC00000 | rng.integers(0, 2, n) << 31).astype(np.uint32).view(np.float32)
    return np.where(rng.random(n) < 0.1, rng.standard_normal(n).astype(np.float32), nan)


KINDS = {
    "normal": lambda rng, n, k: rng.standard_normal(n),
    "lognormal": lambda rng, n, k: rng.lognormal(0, 3, n),
    "Weibull": lambda rng, n, k: rng.weibull(0.5, n),
    "beta": lambda rng, n, k: rng.beta(0.3, 5, n),
    "logistic": lambda rng, n, k: rng.logistic(-20, 4, n),
    "all equal": lambda rng, n, k: np.full(n, -3.25),
    "three values": lambda rng, n, k: rng.integers(-1, 2, n),
    "a tie across the last place": lambda rng, n, k: rng.permutation((np.arange(n) < k - 1) * 1.0),
    "a few above a tie": lambda rng, n, k: rng.permutation((np.arange(n) < k // 3) * 1.0) - 7,
    "ascending": lambda rng, n, k: np.arange(n) - n // 2,
    "descending": lambda rng, n, k: n // 2 - np.arange(n),
    "ascending by the least bit": lambda rng, n, k: (np.arange(n, dtype=np.int32) + 0x3F800000).view(np.float32),
    "all NaN": lambda rng, n, k: np.full(n, np.nan),
    "some NaN": _with(0.2, np.nan),
    "few numbers among NaN": _with(0.97, np.nan),
    "NaNs that differ": _payloads,
    "infinities": _with(0.5, [np.inf, -np.inf]),
    "-inf and NaN": _with(1.0, [np.nan, -np.inf]),
    "denormals": lambda rng, n, k: rng.integers(-9, 10, n) * np.float64(TINY),
    "denormals of every size": lambda rng, n, k: rng.standard_normal(n) * 1e-39,
    "zeros of both signs": _with(0.9, [0.0, -0.0]),
    "zeros and denormals": _with(1.0, [0.0, -0.0, TINY, -TINY]),
    "huge range": lambda rng, n, k: rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-45, 38, n),
    "the best together": _best_together(lambda n: n // 3),
    "the best at the start": _best_together(lambda n: 0),
    "the best at the end": _best_together(lambda n: n),
}

HINTS = ("none", "the answer", "stale", "random", "repeated", "nothing", "out of range", "anything")


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of every kind. ragged: with lengths; all of those that matter where rows are short."""

    n: int
    k: int
    dtype: str = "float32"
    sort: bool = False
    hint: str = "none"
    ragged: bool = True


CASES = {
    "32 of 127": Case(127, 32),
    "32 of 127, the best first": Case(127, 32, sort=True, ragged=False),
    **{f"hint: {hint}": Case(1001, 32, hint=hint) for hint in HINTS if hint != "none"},
    "1 of 1": Case(1, 1),
    "2 of 5": Case(5, 2),
    "2 of 1": Case(1, 2, sort=True),
    "1 of 1000": Case(1000, 1, ragged=False),
    "512 of 1000, the best first": Case(1000, 512, sort=True),
    "2048 of 1000": Case(1000, 2048),
    "2048 of 1000, the best first": Case(1000, 2048, sort=True, ragged=False),
    "2048 of 8193": Case(8193, 2048),
    "2 of 8193, the best first": Case(8193, 2, sort=True),
    "bfloat16": Case(1000, 32, "bfloat16"),
    "bfloat16, the best first": Case(127, 130, "bfloat16", sort=True),
    "float16": Case(1000, 32, "float16", sort=True),
    "float16, more than there are": Case(127, 130, "float16"),
}


@dataclasses.dataclass
class Rows:
    """Arguments of a call, and what a row is, for messages."""

    scores: np.ndarray
    k: int
    sort: bool
    lengths: np.ndarray | None
    hint: np.ndarray | None
    labels: list[str]


def oracle(scores: np.ndarray, k: int, lengths: np.ndarray | None, sort: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices by a stable sort."""
    batch, n = scores.shape
    lengths = np.full(batch, n) if lengths is None else lengths
    with np.errstate(invalid="ignore"):  # NaNs that signal
        x = scores.astype(np.float64)
    beyond = np.arange(n) >= lengths[:, None]
    order = np.lexsort((np.where(np.isnan(x), 0, -x), np.isnan(x), beyond))[:, :k]
    order = np.where(order < lengths[:, None], order, n)
    order = np.pad(order if sort else np.sort(order), ((0, 0), (0, max(k - n, 0))), constant_values=n)
    bits = np.pad(scores.view(f"u{scores.itemsize}"), ((0, 0), (0, 1)))
    bits[:, n] = np.array(-np.inf, scores.dtype).view(bits.dtype)
    values = np.take_along_axis(bits, order, 1).view(scores.dtype)
    return values, np.where(order < n, order, -1).astype(np.int32)


def make_hint(rng, kind: str, answer: np.ndarray, n: int) -> np.ndarray | None:
    """int32 in the shape of the answer."""
    shape = answer.shape
    extremes = np.array([-(2**31), -n, -2, n, n + 3, 2 * n, 2**24, 2**31 - 1])
    random = rng.integers(0, n, shape)
    made = {
        "none": lambda: None,
        "the answer": lambda: answer,
        "stale": lambda: np.where(rng.random(shape) < 0.5, answer, random),
        "random": lambda: random,
        "repeated": lambda: np.repeat(random[:, :1], shape[1], 1),
        "nothing": lambda: np.full(shape, -1),
        "out of range": lambda: rng.choice(extremes, shape),
        "anything": lambda: np.where(rng.random(shape) < 0.5, answer[::-1], rng.choice([*extremes, -1, 0, n - 1], shape)),
    }[kind]()
    return None if made is None else made.astype(np.int32)


def spoil(scores: np.ndarray, lengths: np.ndarray) -> None:
    """What stands past a row's end would be best, or is NaN."""
    past = np.arange(scores.shape[1]) >= lengths[:, None]
    scores[past] = np.inf
    scores[1::2][past[1::2]] = np.nan


@functools.cache
def rows_of(case: Case) -> Rows:
    """All rows of a case: every kind at full length, and at every length that matters, or at one of them where rows are
    long."""
    n, k = case.n, case.k
    rng = np.random.default_rng(n + 7 * k + len(case.hint))
    lengths = sorted({min(max(length, 0), n) for length in (0, 1, k - 1, k, k + 1, n - 1)})
    wanted = []
    for i, kind in enumerate(KINDS):
        wanted.append((kind, n))
        if case.ragged:
            wanted += [(kind, length) for length in (lengths if n <= 127 else lengths[i % len(lengths) :][:1])]
    with np.errstate(all="ignore"):
        scores = np.stack([np.asarray(KINDS[kind](rng, n, k)).astype(np.float32) for kind, _ in wanted])
        scores = np.asarray(scores).astype(jnp.dtype(case.dtype)) if case.dtype != "float32" else scores
    ends = np.array([length for _, length in wanted], np.int32)
    scores = scores.copy()
    spoil(scores, ends)
    ends = ends if case.ragged else None
    answer = oracle(scores, k, ends, case.sort)[1]
    hint = make_hint(rng, case.hint, answer, n)
    return Rows(scores, k, case.sort, ends, hint, [f"{kind}, {length} of {n}" for kind, length in wanted])


def check_rows(op, rows: Rows) -> None:
    """Values bit by bit, and indices."""
    values, indices = (np.asarray(x) for x in op(rows.scores, rows.k, hint=rows.hint, lengths=rows.lengths, sort=rows.sort)[:2])
    expected_values, expected = oracle(rows.scores, rows.k, rows.lengths, rows.sort)
    assert (values.dtype, indices.dtype) == (rows.scores.dtype, np.int32)
    assert values.shape == indices.shape == expected.shape
    wrong = np.flatnonzero((indices != expected).any(1))
    assert not len(wrong), f"{len(wrong)} rows, as {rows.labels[wrong[0]]!r}: {indices[wrong[0]]} instead of {expected[wrong[0]]}"
    words = f"u{values.itemsize}"
    wrong = np.flatnonzero((values.view(words) != expected_values.view(words)).any(1))
    assert not len(wrong), f"{len(wrong)} rows, as {rows.labels[wrong[0]]!r}: {values[wrong[0]]} instead of {expected_values[wrong[0]]}"


def on_device(op):
    """An op of JAX arrays as one of numpy arrays."""

    def call(scores, k, *, hint, lengths, sort, **keywords):
        hint, lengths = (None if x is None else jnp.asarray(x) for x in (hint, lengths))
        return op(jnp.asarray(scores), k, hint=hint, lengths=lengths, sort=sort, **keywords)

    return call


def check(op, name: str) -> None:
    """A case, by name."""
    check_rows(on_device(op), rows_of(CASES[name]))


@st.composite
def adversarial(draw, sizes: tuple[tuple[int, int], ...], batch: int = 64) -> Rows:
    """Rows built from few values. sizes: (scores of a row, k) to take one of."""
    n, k = draw(st.sampled_from(sizes))
    values = draw(st.lists(st.one_of(st.sampled_from(SPECIAL.tolist()), st.floats(width=32)), min_size=1, max_size=6))
    values = np.array(values, np.float64).astype(np.float32)
    form = draw(st.sampled_from(["strewn", "runs", "sorted", "spikes", "neighbours"]))
    sort, ragged = draw(st.booleans()), draw(st.booleans())
    hint = draw(st.sampled_from(HINTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.choice(values, (batch, n), p=rng.dirichlet(np.full(len(values), 0.7)))
    if form == "runs":
        scores = np.take_along_axis(scores, np.cumsum(rng.random((batch, n)) < 8 / n, 1) % n, 1)
    elif form == "sorted":
        scores = np.sort(scores, axis=1)[:, :: rng.choice([-1, 1])]
    elif form == "spikes":  # about as many as are asked for
        scores = np.where(rng.random((batch, n)) < rng.choice([0.5, 1, 2, 4]) * k / n, scores, values[0])
    elif form == "neighbours":  # in the order of floats
        with np.errstate(over="ignore"):
            scores = (scores.view(np.int32) + rng.integers(-2, 3, (batch, n), np.int32)).view(np.float32)
    lengths = rng.choice([0, 1, k - 1, k, k + 1, n // 2, n], batch).clip(0, n).astype(np.int32) if ragged else np.full(batch, n, np.int32)
    scores = np.ascontiguousarray(scores)
    spoil(scores, lengths)
    answer = oracle(scores, k, lengths, sort)[1]
    labels = [f"{form} {values.tolist()}, {length} of {n}" for length in lengths]
    return Rows(scores, k, sort, lengths, make_hint(rng, hint, answer, n), labels)


def pytest_generate_tests(metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES)


@pytest.fixture(scope="session")
def suite():
    """The functions of this file, for test modules to use."""
    names = "CASES KINDS HINTS SPECIAL Case Rows oracle make_hint rows_of check_rows on_device check adversarial"
    return SimpleNamespace(**{name: globals()[name] for name in names.split()})
