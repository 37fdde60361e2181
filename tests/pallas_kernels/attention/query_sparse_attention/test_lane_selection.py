"""The selectors of the GPU kernel, thread by thread, on a warpgroup emulated by numpy, against the plain-Python ones;
and mutants."""

from __future__ import annotations

import functools
import statistics
import sys

import numpy as np
import pytest
from quick_cases import in_turn

from pallas_kernels.attention.query_sparse_attention import lane_selection, reference
from pallas_kernels.hopper.threads import lanes

THREADS, ROWS, LISTED, BLOCKS = 128, 64, 59, 48
"""Rows from `LISTED` on are padding, and have no list."""


def rows() -> tuple[np.ndarray, np.ndarray]:
    """scores [ROWS, BLOCKS] with ties, trends, -inf and NaN; end of each row's candidates."""
    rng = np.random.default_rng(3)
    part = (ROWS // 4, BLOCKS)
    slope = np.arange(BLOCKS) / 8 + rng.standard_normal(part)
    scores = np.concatenate([rng.integers(0, 3, part), rng.standard_normal(part), slope, -slope]).astype(np.float32)
    scores[::2] = np.where(rng.random(scores[::2].shape) < 0.2, rng.choice([np.nan, -np.inf], scores[::2].shape), scores[::2])
    return scores, rng.integers(0, BLOCKS + 1, ROWS).astype(np.int32)


def run(emulated, k_blocks: int, k_exact: int, estimate: str, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lists of the rows that have one, by the emulated threads, ids and scores `[LISTED, k_blocks]`."""
    selector = lane_selection.Selector(1, k_blocks, k_exact, estimate, 1, LISTED, 1, (first, 1))
    ids, kept = np.full((LISTED, k_blocks), -7, np.int32), np.full((LISTED, k_blocks), 7, np.float32)

    def select(arrays, scratch):
        scores_ref, ends_ref, *refs = arrays
        row = lane_selection._row_of_pair()
        at, end = (lanes.where(row < LISTED, x, none) for x, none in ((row, -1), (lanes.load_global(ends_ref, row), 0)))
        integers, floats = selector.slots.empty(refs, at) if selector.slots else ([], [])
        state = [end, at, lanes.i32(0), *integers], [*selector.nothing_known(), *floats]
        for block in range(BLOCKS):
            score = lanes.load_global(scores_ref, row * BLOCKS + block, "f32")
            state = selector._offer_one(refs, lanes.i32(block), score, *state)
        selector._finish(refs, *state)

    emulated.run_cluster(select, ctas=1, threads=THREADS, arrays=(*rows(), ids, kept), scratch_words={})
    return ids, kept


def values_of(emulated, function, *inputs: np.ndarray) -> np.ndarray:
    """What `function` of a number of each input gives every thread, float32 or int32 as the first input."""
    out = np.zeros_like(inputs[0])

    def apply(arrays, scratch):
        *of_threads, out_ref = arrays
        name = "f32" if out.dtype == np.float32 else "i32"
        lanes.store_global(out_ref, lanes.thread(), function(*(lanes.load_global(ref, lanes.thread(), name) for ref in of_threads)))

    emulated.run_cluster(apply, ctas=1, threads=THREADS, arrays=(*inputs, out), scratch_words={})
    return out


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
    "two buckets": (4, 2, "buckets"),
    "one bucket": (1, 0, "buckets"),
    "exact and buckets": (11, 4, "buckets"),
    "more buckets than blocks": (70, 5, "buckets"),
    "in memory, and buckets": (27, 18, "buckets"),
}


@functools.cache
def expected(k_blocks: int, k_exact: int, estimate: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    found = [
        reference.select(scores, first, int(end), k_blocks=k_blocks, k_exact=k_exact, tournament=False, estimate=estimate)
        for scores, end in zip(*(x[:LISTED] for x in rows()), strict=True)
    ]
    slots = np.array(found)
    return slots[..., 1].astype(np.int32), slots[..., 0].astype(np.float32)


@pytest.mark.parametrize(("case", "first"), in_turn(SIZES, [0, 3]))
def test_threads_select_what_the_plain_selectors_do(emulated, case, first):
    ids, scores = run(emulated, *SIZES[case], first)
    expected_ids, expected_scores = expected(*SIZES[case], first)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)


def test_every_row_has_its_pair_of_threads(emulated):
    found = values_of(emulated, lambda _: lane_selection._row_of_pair(), np.zeros(THREADS, np.int32))
    pairs = found.reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert sorted(pairs[:, 0]) == list(range(ROWS))


def test_the_quantile_is_that_of_the_normal_distribution(emulated):
    shares = np.geomspace(1e-6, 0.5, THREADS).astype(np.float32)
    for share in (shares, 1 - shares):
        found = values_of(emulated, lane_selection.upper_quantile, share)
        exact = [-statistics.NormalDist().inv_cdf(float(x)) for x in share]
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6)


def test_positions_before_the_window_have_no_candidates(emulated):
    for size in (64, 128):
        for positions in np.arange(-5120, 5120, dtype=np.int32).reshape(-1, THREADS):
            found = values_of(emulated, lambda x, size=size: lane_selection._floor_divide(x, size), positions)
            np.testing.assert_array_equal(found, positions // size)


@pytest.mark.parametrize("case", ["buckets", "two buckets", "in memory, hybrid"])
def test_no_barrier_can_be_left_out(emulated, monkeypatch, case):
    """Each of them, by the line where it stands."""
    barrier, met = lanes.warp_barrier, set()

    def leave_out(line):
        def watched():
            here = sys._getframe(1).f_lineno
            met.add(here)
            if here != line:
                barrier()

        monkeypatch.setattr(lanes, "warp_barrier", watched)
        run(emulated, *SIZES[case])

    leave_out(None)
    assert met
    for line in sorted(met):
        with pytest.raises(emulated.FAULTS):
            leave_out(line)


MUTANTS = {
    "a newcomer of equal score gets in": ("_worse", lambda a, b: (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))),
    "rank is not looked at": ("_worse", lambda a, b: a[0] < b[0]),
    "the threshold is the mean": ("upper_quantile", lambda share: share * 0),
    "threads of a pair do not agree": ("_worst_of_pair", lambda slots: slots[0]),
    "nothing is counted": ("_count", lambda offered, score, *statistics: list(statistics)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_changes_a_list(emulated, monkeypatch, mutant):
    monkeypatch.setattr(lane_selection, *MUTANTS[mutant])
    assert any((run(emulated, *sizes)[0] != expected(*sizes, 0)[0]).any() for sizes in SIZES.values()), "the rows accept this mutant"
