"""The selectors of the GPU kernel, thread by thread, on a warpgroup emulated by numpy, against the plain-Python ones; and mutants."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pallas_kernels import lanes
from pallas_kernels.query_sparse_attention import lane_selection, reference

THREADS, ROWS, BLOCKS = 128, 64, 48


class Emulated:
    """In place of `pallas_kernels.lanes`: a scalar is an array with an element per thread; threads that left a loop do nothing."""

    def __init__(self):
        self.active = [np.ones(THREADS, bool)]

    def lane(self):
        return np.arange(THREADS, dtype=np.int32) % 32

    def warp(self):
        return np.arange(THREADS, dtype=np.int32) // 32

    def i32(self, x):
        return np.full(THREADS, x, np.int32)

    def f32(self, x):
        return np.full(THREADS, x, np.float32)

    def where(self, condition, a, b):
        kind = np.asarray(a if isinstance(a, np.ndarray) else b).dtype
        return np.where(condition, np.asarray(a, kind), np.asarray(b, kind))

    def maximum(self, a, b):
        return np.maximum(a, np.asarray(b, a.dtype))

    def minimum(self, a, b):
        return np.minimum(a, np.asarray(b, a.dtype))

    def fma(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def multiply(self, a, b):
        return a * np.asarray(b, np.float32)

    def divide(self, a, b):
        return a / b

    def reciprocal(self, x):
        return np.float32(1) / x

    def sqrt(self, x):
        return np.sqrt(x)

    def log2_approx(self, x):
        return np.log2(x)

    def number(self, x):
        return x.astype(np.float32)

    def bits(self, x):
        return x.view(np.int32 if x.dtype == np.float32 else np.float32)

    def shuffle_xor(self, x, distance):
        return x[np.arange(THREADS) ^ distance]

    def ballot(self, condition):
        return np.repeat((condition & self.active[-1]).reshape(-1, 32).any(1), 32).astype(np.int32)

    def warp_barrier(self):
        pass

    def either(self, condition, a, b):
        return (condition, a, b)

    def store_global_if(self, condition, ref, offset, word, *, block, block_bytes):
        for thread in np.flatnonzero(condition & self.active[-1]):
            target = (ref[1] if ref[0][thread] else ref[2]) if isinstance(ref, tuple) else ref
            target.view(np.int32)[block[thread], offset[thread] // 4] = word.view(np.int32)[thread]
            assert 0 <= offset[thread] < block_bytes

    def load_written(self, ref, offset, name, *, block, block_bytes):
        return ref[block, offset // 4]

    def while_loop(self, condition, body, carry):
        while (running := condition(*carry) & self.active[-1]).any():
            self.active.append(running)
            carry = [np.where(running, new, old) for new, old in zip(body(*carry), carry, strict=True)]
            self.active.pop()
        return carry

    def loop(self, stop, carry, body, step):
        for i in range(0, stop, step):
            carry = body(np.int32(i), *carry)
        return carry


def rows() -> tuple[np.ndarray, np.ndarray]:
    """scores [ROWS, BLOCKS] with ties, trends, -inf and NaN; end of each row's candidates."""
    rng = np.random.default_rng(3)
    part = (ROWS // 4, BLOCKS)
    slope = np.arange(BLOCKS) / 8 + rng.standard_normal(part)
    scores = np.concatenate([rng.integers(0, 3, part), rng.standard_normal(part), slope, -slope]).astype(np.float32)
    scores[::2] = np.where(rng.random(scores[::2].shape) < 0.2, rng.choice([np.nan, -np.inf], scores[::2].shape), scores[::2])
    return scores, rng.integers(0, BLOCKS + 1, ROWS).astype(np.int32)


def run(monkeypatch, k_blocks: int, k_exact: int, estimate: str, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lists of all rows by the emulated threads, ids and scores `[ROWS, k_blocks]`."""
    emulated = Emulated()
    monkeypatch.setattr(lane_selection, "lanes", emulated)
    selector = lane_selection.Selector(1, k_blocks, k_exact, estimate, 1, ROWS, 1, (first, 1))
    scores, ends = rows()
    at = lane_selection._row_of_pair()
    ids, kept = np.full((ROWS, k_blocks), -7, np.int32), np.full((ROWS, k_blocks), 7, np.float32)
    refs = ids, kept
    integers, floats = selector.slots.empty(refs, at) if selector.slots else ([], [])
    state = [ends[at], at, emulated.i32(0), *integers], [emulated.f32(0)] * selector.statistics + floats
    with np.errstate(all="ignore"):
        for block in range(BLOCKS):
            state = selector._offer_one(refs, emulated.i32(block), scores[at, block], *state)
        selector._finish(refs, *state)
    return ids, kept


SIZES = {
    "exact": (6, 6, "quantile"),
    "exact, odd": (7, 7, "quantile"),
    "exact, one slot": (1, 1, "quantile"),
    "estimated": (7, 0, "quantile"),
    "hybrid": (11, 4, "quantile"),
    "more slots than blocks": (70, 5, "quantile"),
    "in memory": (19, 19, "quantile"),
    "in memory, hybrid": (27, 18, "quantile"),
    "in memory, more slots than blocks": (64, 64, "quantile"),
    "buckets": (7, 0, "buckets"),
    "one bucket": (1, 0, "buckets"),
    "exact and buckets": (11, 4, "buckets"),
    "more buckets than blocks": (70, 5, "buckets"),
    "in memory, and buckets": (27, 18, "buckets"),
}


@functools.cache
def expected(k_blocks: int, k_exact: int, estimate: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    found = [
        reference.select(scores, first, int(end), k_blocks=k_blocks, k_exact=k_exact, tournament=False, estimate=estimate)
        for scores, end in zip(*rows(), strict=True)
    ]
    slots = np.array(found)
    return slots[..., 1].astype(np.int32), slots[..., 0].astype(np.float32)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("case", SIZES)
def test_threads_select_what_the_plain_selectors_do(monkeypatch, case, first):
    ids, scores = run(monkeypatch, *SIZES[case], first)
    expected_ids, expected_scores = expected(*SIZES[case], first)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)


def test_every_row_has_its_pair_of_threads(monkeypatch):
    monkeypatch.setattr(lane_selection, "lanes", Emulated())
    pairs = lane_selection._row_of_pair().reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert sorted(pairs[:, 0]) == list(range(ROWS))


def test_the_quantile_is_that_of_the_normal_distribution(monkeypatch):
    import statistics

    monkeypatch.setattr(lane_selection, "lanes", Emulated())
    shares = np.geomspace(1e-6, 0.5, THREADS).astype(np.float32)
    for share in (shares, 1 - shares):
        found = lane_selection.upper_quantile(share)
        exact = [-statistics.NormalDist().inv_cdf(float(x)) for x in share]
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6)


def test_positions_before_the_window_have_no_candidates(monkeypatch):
    monkeypatch.setattr(lane_selection, "lanes", Emulated())
    positions = np.arange(-5000, 5000)
    for size in (64, 128):
        np.testing.assert_array_equal(lane_selection._floor_divide(positions, size), positions // size)


def test_the_emulation_has_what_is_there():
    assert all(hasattr(lanes, name) for name in vars(Emulated) if not name.startswith("_"))


MUTANTS = {
    "a newcomer of equal score gets in": ("_worse", lambda a, b: (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))),
    "rank is not looked at": ("_worse", lambda a, b: a[0] < b[0]),
    "the threshold is the mean": ("upper_quantile", lambda share: share * 0),
    "threads of a pair do not agree": ("_worst_of_pair", lambda slots: slots[0]),
    "nothing is counted": ("_count", lambda offered, score, *statistics: list(statistics)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_changes_a_list(monkeypatch, mutant):
    monkeypatch.setattr(lane_selection, *MUTANTS[mutant])
    assert any((run(monkeypatch, *sizes)[0] != expected(*sizes, 0)[0]).any() for sizes in SIZES.values()), "the rows accept this mutant"
