"""The selectors by themselves: JAX against plain Python slot by slot, plain Python against sorting and against
equations 6 and 7."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from pallas_kernels.attention.query_sparse_attention import online_selection, reference

BLOCKS, ROWS = 64, 240
SIZES = {
    "exact": (6, 6, False, "quantile"),
    "exact, one slot": (1, 1, False, "quantile"),
    "tournament of 8": (8, 8, True, "quantile"),
    "tournament of 11": (11, 11, True, "quantile"),
    "tournament of one": (1, 1, True, "quantile"),
    "estimated": (7, 0, False, "quantile"),
    "estimated, one slot": (1, 0, False, "quantile"),
    "hybrid": (11, 3, False, "quantile"),
    "hybrid, tournament": (11, 5, True, "quantile"),
    "more slots than blocks": (70, 4, False, "quantile"),
    "buckets": (7, 0, False, "buckets"),
    "one bucket": (1, 0, False, "buckets"),
    "exact and buckets": (11, 3, False, "buckets"),
    "tournament and buckets": (20, 5, True, "buckets"),
    "more buckets than blocks": (70, 4, False, "buckets"),
}


BY_QUANTILE = {"tournament": False, "estimate": "quantile"}
IN_BUCKETS = {"tournament": False, "estimate": "buckets"}


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """scores [ROWS, BLOCKS], first, end: few values, floats, equal, rising, falling; every other row with -inf and NaN
    strewn in."""
    rng = np.random.default_rng(5)
    part = (ROWS // 6, BLOCKS)
    kinds = [rng.integers(0, 3, part), rng.integers(-9, 9, part), rng.standard_normal(part), np.full(part, 0.1)]
    slope = np.arange(BLOCKS) / 8 + rng.standard_normal(part)
    scores = np.concatenate([*kinds, slope, -slope]).astype(np.float32)
    nowhere = np.where(rng.random(scores[::2].shape) < 0.5, np.nan, -np.inf)
    scores[::2] = np.where(rng.random(scores[::2].shape) < 0.3, nowhere, scores[::2])
    first, end = rng.integers(0, 3, ROWS), rng.integers(0, BLOCKS + 1, ROWS)
    end[:9] = range(9)
    return scores, first.astype(np.int32), end.astype(np.int32)


def by_definition(k_blocks: int, k_exact: int, tournament: bool, estimate: str = "quantile") -> tuple[np.ndarray, np.ndarray]:
    """ids and scores of every row, [ROWS, k_blocks], by the plain-Python selectors."""
    sizes = {"k_blocks": k_blocks, "k_exact": k_exact, "tournament": tournament, "estimate": estimate}
    slots = np.array([reference.select(s, int(a), int(b), **sizes) for s, a, b in zip(*rows(), strict=True)])
    return slots[..., 1].astype(np.int32), slots[..., 0].astype(np.float32)


expected = functools.cache(by_definition)


@pytest.mark.parametrize("case", SIZES)
def test_jax_selectors_are_the_plain_ones(tools, case):
    k_blocks, k_exact, tournament, estimate = SIZES[case]

    @jax.jit
    def select(scores, first, end):
        state = online_selection.empty((ROWS,), k_blocks=k_blocks, k_exact=k_exact, tournament=tournament)
        one = functools.partial(online_selection.offer, k_exact=k_exact, estimate=estimate)
        return jax.lax.fori_loop(0, BLOCKS, lambda j, state: one(state, scores[:, j], j, first, end), state)

    selection = select(*map(jnp.asarray, rows()))
    ids, scores = expected(*SIZES[case])
    np.testing.assert_array_equal(np.asarray(selection.ids), ids)
    tools.assert_same_bits(selection.scores, scores)


@pytest.mark.parametrize("k", [1, 5, 8, 13])
def test_exact_is_a_sort_and_the_tournament_is_exact(k):
    ids, scores = expected(k, k, False)
    for tree in expected(k, k, True), (ids, scores):
        np.testing.assert_array_equal(tree[0], ids)
    for values, first, end, kept in zip(*rows(), ids, strict=True):
        able = [j for j in range(first, end) if values[j] > -np.inf]
        best = sorted(able, key=lambda j: (-values[j], j))[:k]  # of equal scores the lower block
        assert sorted(j for j in kept if j >= 0) == sorted(best)


def test_which_slot_is_replaced():
    """By hand. Of equal scores the higher block goes; an empty slot goes first; a newcomer of equal score does not get
    in."""
    values = np.array([2, 1, 1, 1, 3, 1.5, 1.5], np.float32)
    ids = [[j for _, j in reference.select(values, 0, end, k_blocks=3, k_exact=3, **BY_QUANTILE)] for end in range(1, 8)]
    assert ids == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2], [0, 1, 4], [0, 5, 4], [0, 5, 4]]


def test_estimated_is_equations_6_and_7():
    """Every decision against scipy's erfinv and numpy's mean and deviation of all that was seen so far."""
    rng = np.random.default_rng(2)
    taken = passed = 0
    for _ in range(40):
        values = rng.normal(rng.normal(), rng.uniform(0.5, 3), 64).astype(np.float32)
        ids = [j for _, j in reference.select(values, 0, 64, k_blocks=9, k_exact=0, **BY_QUANTILE)]
        for j in range(64):
            left = 9 - sum(i < j for i in ids)
            p = 1 - left / (64 - j)
            seen = values[: j + 1].astype(np.float64)
            threshold = math.sqrt(2) * seen.std() * scipy.special.erfinv(2 * p - 1) + seen.mean() if p > 0 else -math.inf
            if j == 0 or abs(values[j] - threshold) < 1e-5:
                continue
            assert (j in ids) == (left > 0 and values[j] > threshold)
            taken, passed = taken + (j in ids), passed + (j not in ids)
    assert taken > 200
    assert passed > 1000


@pytest.mark.parametrize("how", [BY_QUANTILE, IN_BUCKETS])
def test_what_stage_1_loses_stage_2_is_offered(how):
    """Rising scores: each block displaces the one before, and the list ends up full all the same."""
    ids = [j for _, j in reference.select(np.arange(20, dtype=np.float32), 0, 20, k_blocks=5, k_exact=2, **how)]
    assert sorted(ids[:2]) == [18, 19]
    assert all(0 <= j < 18 for j in ids[2:])


def test_a_bucket_has_the_best_of_every_mth_block():
    """By numpy: of the blocks that can be listed at all, in their order; the first of equal ones."""
    ids, scores = expected(7, 0, False, "buckets")
    for values, first, end, kept, best in zip(*rows(), ids, scores, strict=True):
        able = [j for j in range(first, end) if values[j] > -np.inf]
        for turn in range(7):
            mine = np.array(able[turn::7], int)
            assert kept[turn] == (mine[np.argmax(values[mine])] if mine.size else -1)
            assert best[turn] == (values[mine].max() if mine.size else -np.inf)


def test_blocks_that_buckets_are_offered_are_those_that_lost_a_slot():
    """By hand: two exact slots, then two buckets, offered 1, 0, 3 and 5 in turn: the first keeps the best of 1 and 3,
    the second that of 0 and 5."""
    values = np.array([4, 3, 6, 5, 7, 2], np.float32)
    slots = reference.select(values, 0, 6, k_blocks=4, k_exact=2, **IN_BUCKETS)
    assert sorted(j for _, j in slots[:2]) == [2, 4]
    offered = [1, 0, 3, 5]  # 2 displaces 1, 3 displaces 0, 4 displaces 3, and 5 gets no slot
    assert [j for _, j in slots[2:]] == [max(offered[turn::2], key=lambda j: values[j]) for turn in (0, 1)] == [3, 0]


@pytest.mark.parametrize("slope", [-0.05, 0.0, 0.05])
def test_buckets_lists_are_better_than_the_quantiles(slope):
    """Summed over 40 rows of 512 scores, level or drifting, whose neighbours are alike."""
    rng = np.random.default_rng(6)
    kept = {"quantile": 0.0, "buckets": 0.0}
    for _ in range(40):
        noise = np.convolve(rng.standard_normal(520), np.ones(9) / 3, "valid")
        values = (slope * np.arange(512) + noise).astype(np.float32)
        for how in kept:
            kept[how] += sum(s for s, _ in reference.select(values, 0, 512, k_blocks=64, k_exact=4, tournament=False, estimate=how))
    assert kept["buckets"] > kept["quantile"]


@pytest.mark.parametrize("case", SIZES)
def test_lists_are_as_full_as_can_be(case):
    """Without holes in the candidates every list has min(k, candidates) blocks, each once."""
    k_blocks = SIZES[case][0]
    ids, _ = expected(*SIZES[case])
    for kept, first, end in list(zip(ids, *rows()[1:], strict=True))[1::2]:
        kept = kept[kept >= 0]
        assert len(kept) == len(set(kept)) == min(k_blocks, max(end - first, 0))


# Mutants of the selectors: each must change a list of the rows above.


class _NewcomerWins(reference.Replacement):
    def offer(self, score, block):
        return (
            super().offer(np.nextafter(np.float32(score), np.float32(np.inf)).item(), block)
            if score in dict(self.slots)
            else super().offer(score, block)
        )


class _ForgetsTheLoser(reference.Replacement):
    def offer(self, score, block):
        lost = super().offer(score, block)
        return lost if lost == (score, block) else reference.EMPTY


class _TreeNotReplayed(reference.Tournament):
    def _play(self, node):
        if node != 2 or reference.EMPTY in self.slots:
            super()._play(node)


class _PresentNotCounted(reference.Estimated):
    later = None

    def count(self, score):
        if self.seen == 0:  # without any there is no threshold
            return super().count(score)
        if self.later is not None:
            super().count(self.later)
        self.later = score


class _OnlyWhatIsPassedOn(reference.Estimated):
    def count(self, score):
        pass

    def offer(self, score, block, candidates_left):
        super().count(score)
        super().offer(score, block, candidates_left)


class _SampleVariance(reference.Estimated):
    def offer(self, score, block, candidates_left):
        kept = self.squares
        self.squares *= self.seen / max(self.seen - 1, 1)
        super().offer(score, block, candidates_left)
        self.squares = kept


class _CandidatesOneShort(reference.Estimated):
    def offer(self, score, block, candidates_left):
        super().offer(score, block, candidates_left - 1)


class _FirstSlots(reference.Estimated):
    def offer(self, score, block, candidates_left):
        super().offer(score, block, 0)


class _StrictlyMore(reference.Estimated):
    def offer(self, score, block, candidates_left):
        if np.float32(score) > self.mean or self.k - len(self.slots) >= candidates_left:
            super().offer(score, block, candidates_left)


class _AlwaysTaken(reference.Buckets):
    def offer(self, score, block, candidates_left):
        super().offer(math.inf, block, candidates_left)
        self.slots = [(score, block) if slot == (math.inf, block) else slot for slot in self.slots]


class _EqualTaken(reference.Buckets):
    def offer(self, score, block, candidates_left):
        if self.slots and score == self.slots[self.offered % len(self.slots)][0]:
            self.slots[self.offered % len(self.slots)] = reference.EMPTY
        super().offer(score, block, candidates_left)


class _SlotOfTheBlock(reference.Buckets):
    def offer(self, score, block, candidates_left):
        self.offered = block
        super().offer(score, block, candidates_left)


class _SameBucket(reference.Buckets):
    def offer(self, score, block, candidates_left):
        self.offered = min(self.offered, max(len(self.slots) - 1, 0))
        super().offer(score, block, candidates_left)


MUTANTS = {
    "buckets take whatever comes": ("Buckets", _AlwaysTaken),
    "buckets take what is equal": ("Buckets", _EqualTaken),
    "the block's number says which bucket": ("Buckets", _SlotOfTheBlock),
    "once full, always the same bucket": ("Buckets", _SameBucket),
    "the newcomer wins a tie": ("Replacement", _NewcomerWins),
    "what is displaced is forgotten": ("Replacement", _ForgetsTheLoser),
    "the tree is not replayed": ("Tournament", _TreeNotReplayed),
    "the present block is not counted": ("Estimated", _PresentNotCounted),
    "only what is passed on is counted": ("Estimated", _OnlyWhatIsPassedOn),
    "variance over n - 1": ("Estimated", _SampleVariance),
    "candidates left one short": ("Estimated", _CandidatesOneShort),
    "the first blocks": ("Estimated", _FirstSlots),
    "a tie with the mean is passed by": ("Estimated", _StrictlyMore),
    "the lower block is replaced": ("worse", lambda a, b: a < b),
    "the last empty slot is filled first": ("worse", lambda a, b: a[0] < b[0] or (a[0] == b[0] and (a == b or a[1] > b[1]))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_changes_a_list(monkeypatch, mutant):
    for sizes in SIZES.values():
        expected(*sizes)
    monkeypatch.setattr(reference, *MUTANTS[mutant])
    assert any((by_definition(*sizes)[0] != expected(*sizes)[0]).any() for sizes in SIZES.values()), "the rows accept this mutant"
