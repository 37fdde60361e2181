"""The best of candidates and lists in order: pairs compared and sorting agree, with ties, missing ids and odd
scores."""

import jax
import numpy as np
import pytest

from kvjax.policies.decode import candidates

ODD = [np.nan, -np.inf, np.inf, 0.0, -0.0, np.finfo(np.float32).min, 1.0, 1.0, 2.0]


def lists(seed: int, n: int, share: float = 0.3):
    """Scores with ties and odd ones, and ids in no order, some of them missing."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(4 * n)[:n] for _ in range(6)]).astype(np.int32)
    ids[random.random(ids.shape) < share] = -1
    ids[0] = -1
    return random.choice(ODD, (6, n)).astype(np.float32), ids


def by_definition(scores, ids, k):
    """The k best of one row, best first, by Python's sort."""
    known = [
        (0.0 if s == 0 else max(s, ODD[5]) if s == s else ODD[5], i) for s, i in zip(scores.tolist(), ids.tolist(), strict=True) if i >= 0
    ]
    best = sorted(known, key=lambda pair: (-pair[0], pair[1]))[:k]
    return [s for s, _ in best] + [-np.inf] * (k - len(best)), [i for _, i in best] + [-1] * (k - len(best))


@pytest.mark.parametrize("few", [0, candidates.FEW], ids=["sorted", "compared"])
@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (7, 3), (64, 32), (40, 40), (20, 50)])
def test_the_best_are_those_of_the_definition(n, k, few, monkeypatch):
    monkeypatch.setattr(candidates, "FEW", few)
    scores, ids = lists(n + k, n)
    best, found = jax.jit(lambda *lists: candidates.ranked(*lists, k))(scores, ids)
    best, found = np.asarray(best), np.asarray(found)
    for row in range(len(ids)):
        expected = by_definition(scores[row], ids[row], min(n, k))
        np.testing.assert_array_equal(best[row], np.float32(expected[0]))
        np.testing.assert_array_equal(found[row], expected[1])
    assert found.dtype == np.int32
    assert not np.signbit(best[best == 0]).any()


@pytest.mark.parametrize("few", [0, candidates.FEW], ids=["sorted", "compared"])
def test_lists_are_put_in_order_with_equal_ids_kept(few, monkeypatch):
    monkeypatch.setattr(candidates, "FEW", few)
    ids = np.concatenate([lists(1, 60)[1], lists(1, 60)[1]], axis=1)
    found = np.asarray(jax.jit(lambda ids: candidates.ascending(ids))(ids))
    for row, given in zip(found, ids, strict=True):
        assert row.tolist() == sorted(i for i in given.tolist() if i >= 0) + [-1] * int((given < 0).sum())
    assert found.dtype == np.int32


def test_short_lists_are_not_sorted():
    scores, ids = lists(0, candidates.FEW)
    text = jax.jit(lambda s, i: candidates.ascending(candidates.best_candidates(s, i, 32))).lower(scores, ids).as_text()
    assert "stablehlo.sort" not in text
    assert "top_k" not in text
