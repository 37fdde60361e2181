"""Synthetic rows have the distributions, and hints the overlap, that they are named for."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.top_k import score_rows
from benchmarks.top_k.score_rows import Yarn
from kvjax.model import rope
from kvjax.models import config_json

N = 20_000
LAWS = {
    "normal": stats.norm(),
    "beta": stats.beta(2, 5),
    "weibull": stats.weibull_min(1.5),
    "logistic": stats.logistic(),
    "lognormal": stats.lognorm(1),
}


def fits(scores, name):
    """Whether a Kolmogorov-Smirnov test lets the scores pass for the distribution of that name."""
    return stats.kstest(scores.astype(np.float64), LAWS[name].cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", score_rows.DISTRIBUTIONS)
def test_rows_have_the_distribution_of_their_name(name):
    rows = score_rows.drawn_rows(name, 2, N, seed=0)
    assert rows.scores.shape == (2, N)
    assert rows.scores.dtype == np.float32
    assert [other for other in LAWS if fits(rows.scores[0], other)] == [name]
    assert fits(rows.scores[1], name)
    assert abs(np.corrcoef(rows.scores)[0, 1]) < 0.05
    assert (np.diff(rows.scores[0][np.argsort(rows.latent[0])]) >= 0).all()


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="'cauchy' is unknown; there are normal, beta"):
        score_rows.drawn_rows("cauchy", 1, 8, seed=0)


def test_top_indices_are_a_stable_sorts():
    rng = np.random.default_rng(0)
    for scores in (rng.standard_normal(500), rng.integers(0, 5, 500).astype(float), np.zeros(50), np.full(50, -np.inf)):
        for k in (1, 7, 50):
            np.testing.assert_array_equal(score_rows.top_indices(scores, k), np.sort(np.argsort(-scores, kind="stable")[:k]))


def test_overlap_counts_shared_entries_moved_by_the_shift():
    assert score_rows.overlap(np.array([1, 2, 3, 9]), np.array([2, 3, 4, 5])) == 0.5
    assert score_rows.overlap(np.array([3, 4, 5, 6]), np.array([2, 3, 4, 5]), shift=1) == 1.0
    assert score_rows.overlap(np.array([1, -1]), np.array([-1, -1])) == 0.0
    assert score_rows.overlap(np.array([0, 1]), np.array([-1, 0]), shift=1) == 0.5
    assert score_rows.overlap(np.array([-1]), np.array([3])) == 0.0


def check_stale(rows, hints, k, share, seed):
    """The hint has the overlap, is nearly the answer of the step before, and forgets scores near the threshold."""
    before = score_rows.step_before(rows, k, share, seed=seed)
    spread = np.sqrt(share * (1 - share) / k)
    assert hints.shape == (len(rows.scores), k)
    assert hints.dtype == np.int32
    by_chance, missed = [], []
    for scores, hint, earlier in zip(rows.scores, hints, before, strict=True):
        assert (np.diff(hint) > 0).all()
        mine, theirs = score_rows.top_indices(scores, k), score_rows.top_indices(earlier, k)
        assert score_rows.overlap(mine, hint) == pytest.approx(share, abs=0.5 / k)
        assert score_rows.overlap(theirs, hint) > 1 - 4 * spread - 0.01
        by_chance.append(score_rows.overlap(mine, theirs))
        ranks = np.argsort(np.argsort(scores[mine]))
        missed += list(ranks[~np.isin(mine, hint)] / k)
    assert np.mean(by_chance) == pytest.approx(share, abs=2 * spread + 0.01)
    assert np.mean(missed) < 0.5  # a random choice among the true k would forget from everywhere


@pytest.mark.parametrize(("k", "share"), [(32, 0.4), (512, 0.2), (512, 0.8), (2048, 0.4), (2048, 0.8), (512, 0.99)])
def test_a_stale_hint_shares_what_is_asked_for(k, share):
    rows = score_rows.drawn_rows("lognormal", 3, N, seed=4)
    check_stale(rows, score_rows.stale_hint(rows, k, share, seed=5), k, share, 5)


@pytest.mark.parametrize("wrong", ["fewer", "random", "another step"])
def test_a_wrong_hint_is_noticed(wrong):
    rows = score_rows.drawn_rows("normal", 3, N, seed=4)
    if wrong == "random":
        rng = np.random.default_rng(0)
        top = [score_rows.top_indices(scores, 512) for scores in rows.scores]
        others = [np.setdiff1d(np.arange(N), mine) for mine in top]
        pairs = [
            (rng.choice(mine, 205, replace=False), rng.choice(rest, 307, replace=False)) for mine, rest in zip(top, others, strict=True)
        ]
        hints = np.sort(np.stack([np.concatenate(pair) for pair in pairs])).astype(np.int32)
    else:
        hints = score_rows.stale_hint(rows, 512, 0.3 if wrong == "fewer" else 0.4, seed=5 if wrong == "fewer" else 6)
    with pytest.raises(AssertionError):
        check_stale(rows, hints, 512, 0.4, 5)


def test_a_share_below_chance_is_refused():
    with pytest.raises(ValueError, match=r"from k / n = 0\.25 .* got 0\.2"):
        score_rows.drift(8192, 2048, 0.2)
    with pytest.raises(ValueError, match="got 1"):
        score_rows.drift(8192, 2048, 1.0)


def test_a_random_hint_is_as_good_as_chance():
    rows = score_rows.drawn_rows("normal", 2, N, seed=6)
    hints = score_rows.random_hint(2, N, 2000, seed=6)
    for scores, hint in zip(rows.scores, hints, strict=True):
        assert np.unique(hint).size == 2000
        assert score_rows.overlap(score_rows.top_indices(scores, 2000), hint) == pytest.approx(0.1, abs=0.03)


def test_rows_without_content_are_the_prior():
    """A Toeplitz matrix: equation 2 at the distance of query and key, nothing behind the query."""
    rows = score_rows.yarn_rows(3000, 3, seed=0, content=0.0)
    prior = Yarn().prior(3000)
    for step, row in enumerate(rows):
        position = 2997 + step
        np.testing.assert_allclose(row[: position + 1], prior[position::-1], atol=2e-4)
        assert np.isneginf(row[position + 1 :]).all()
        hint = score_rows.static_hint(3000, 256, position=position)
        assert score_rows.overlap(score_rows.top_indices(row, 256), hint[hint >= 0]) > 0.98


def test_yarn_rows_drift_and_the_prior_knows_some_of_them():
    """Sections 3.1 and 6.5: a step before and the static prior share much more than a random hint, k / n."""
    n, k = 16_384, 512
    rows = score_rows.yarn_rows(n, 2, seed=1)
    before, now = (score_rows.top_indices(row, k) for row in rows)
    static = score_rows.overlap(now, score_rows.static_hint(n, k, position=n - 1))
    assert 0.25 < static < 0.8
    assert 0.4 < score_rows.overlap(now, before) < 0.9
    fresh = score_rows.yarn_rows(n, 2, seed=1, memory=0.0)
    assert score_rows.overlap(*(score_rows.top_indices(row, k) for row in fresh)) < score_rows.overlap(now, before)


def test_places_before_the_first_are_none():
    hint = score_rows.static_hint(4096, 512, position=100)
    assert (hint == -1).sum() == 512 - ((hint >= 0) & (hint <= 100)).sum() > 300


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: score_rows.drawn_rows("logistic", 2, 100, seed=seed).scores,
        lambda seed: score_rows.stale_hint(score_rows.drawn_rows("normal", 2, 500, seed=1), 50, 0.5, seed=seed),
        lambda seed: score_rows.random_hint(2, 100, 20, seed=seed),
        lambda seed: score_rows.yarn_rows(70_000, 2, seed=seed),
    ],
)
def test_a_seed_gives_the_same_again_and_another_something_else(make):
    assert make(3).tobytes() == make(3).tobytes()
    assert make(3).tobytes() != make(4).tobytes()


def test_a_row_does_not_depend_on_the_batch():
    few, many = (score_rows.drawn_rows("beta", batch, 200, seed=9).scores for batch in (2, 5))
    np.testing.assert_array_equal(few, many[:2])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("base", "factor"), [(1e4, 40.0), (1e6, 4.0)])
def test_the_rows_of_the_benchmarks_rotate_by_the_same_frequencies(head_dim, base, factor):
    scaling = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": 4096}
    stated = {"model_type": "llama", "rope_parameters": scaling, "hidden_size": 64, "num_attention_heads": 2, "head_dim": head_dim}
    stated["max_position_embeddings"] = 131_072
    theirs = rope.frequencies(config_json.parse(stated, None, None).layers[0].mixer.rope)
    np.testing.assert_allclose(Yarn(head_dim, base, factor, 4096).frequencies(), theirs, rtol=2e-6)
