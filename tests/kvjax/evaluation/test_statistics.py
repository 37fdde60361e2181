"""Every statistic against published or hand-made values, and against what it promises: coverage."""

import math

import numpy as np
import pytest

from kvjax.evaluation.statistics import (
    Interval,
    block_means,
    clustered,
    lower_bound,
    mean_over_blocks,
    over_windows,
    paired,
    proportion,
    ratio_of_perplexities,
)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        # "Attention Pays Its Bill", sections 8.3 and 8.4.
        (1823, 1851, "0.978", "0.990"),
        (4060, 4070, "0.995", "0.999"),
        (58, 100, "0.48", "0.67"),
        (96, 100, "0.90", "0.98"),
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
        (81, 263, "0.2553", "0.3662"),
        (15, 148, "0.0624", "0.1605"),
        (0, 20, "0.0000", "0.1611"),
        (1, 29, "0.0061", "0.1718"),
    ],
)
def test_wilson_intervals(hits, trials, low, high):
    found, digits = proportion(hits, trials), len(low) - 2
    assert (found.value, f"{found.low:.{digits}f}", f"{found.high:.{digits}f}") == (hits / trials, low, high)
    assert hits / trials in found


@pytest.mark.parametrize(("hits", "trials", "bound"), [(497, 500, 0.982), (499, 500, 0.988), (200, 200, 0.981)])
def test_one_sided_lower_bounds(hits, trials, bound):
    """The paper's certified recalls, section 8.4: one-sided 97.5%, cut after three digits."""
    assert math.floor(lower_bound(hits, trials) * 1000) / 1000 == bound
    # Of 97.5% confidence one-sided is the low end of a two-sided 95%.
    assert lower_bound(hits, trials) == pytest.approx(proportion(hits, trials).low)
    assert lower_bound(hits, trials, 0.95) > lower_bound(hits, trials)


def pairs(both, lost, gained, neither):
    reference = [True] * (both + lost) + [False] * (gained + neither)
    policy = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return paired(reference, policy)


def test_discordant_pairs_of_the_paper():
    """24 dense-only against 0 sparse-only: one-sided exact binomial p = 2**-24."""
    found = pairs(176, 24, 0, 0)
    assert (found.both, found.lost, found.gained, found.neither) == (176, 24, 0, 0)
    assert found.p_loss == pytest.approx(2.0**-24)
    assert found.p_value == pytest.approx(2.0**-23)


def test_mcnemar_by_hand():
    found = pairs(10, 5, 1, 4)
    assert found.p_value == pytest.approx(2 * (1 + 6) / 2**6)
    assert found.p_loss == pytest.approx((6 + 1) / 2**6)
    assert pairs(10, 1, 5, 4).p_loss == pytest.approx(1 - 1 / 2**6)
    alike = pairs(7, 0, 0, 3)
    assert (alike.p_value, alike.p_loss) == (1.0, 1.0)


def test_difference_of_paired_shares():
    """Newcombe 1998, Statistics in Medicine 17:2635: 36, 12, 2, 0 of 50 by method 10."""
    published = pairs(36, 2, 12, 0).difference
    assert (round(published.value, 4), round(published.low, 4), round(published.high, 4)) == (0.2, 0.0569, 0.3404)
    mirrored = pairs(36, 12, 2, 0).difference
    assert (mirrored.low, mirrored.high) == pytest.approx((-published.high, -published.low))
    # Where both tend to succeed together, a continuity correction of half the trials lessens phi: (40 * 46 - 10 * 4 -
    # 50) here.
    reference, policy, phi = proportion(50, 100), proportion(44, 100), 1750 / math.sqrt(50 * 50 * 44 * 56)
    below, above = policy.value - policy.low, reference.high - reference.value
    found = pairs(40, 10, 4, 46).difference
    assert found.low == pytest.approx(-0.06 - math.sqrt(below**2 - 2 * phi * below * above + above**2))
    # No discordant pair is no proof of equality: the interval keeps a width, and a smaller one with more trials.
    few, many = pairs(20, 0, 0, 0).difference, pairs(200, 0, 0, 0).difference
    assert few.low < many.low < 0 < many.high < few.high


def test_intervals_cover():
    """Of draws from known distributions, about 95% of the intervals hold the truth."""
    rng = np.random.default_rng(0)
    held = {"paired": 0, "mean": 0, "ratio": 0}
    cases = 150
    for _ in range(cases):
        reference = rng.random(200) < 0.95
        policy = np.where(rng.random(200) < 0.1, False, reference)
        held["paired"] += -0.095 in paired(reference, policy).difference
        steps = rng.gamma(0.5, 2.0, 60)
        held["mean"] += 1.0 in mean_over_blocks(steps)
        first = rng.normal(3, 1, 60)
        held["ratio"] += math.exp(0.1) in ratio_of_perplexities(first, first + rng.normal(0.1, 0.2, 60))
    assert all(0.88 * cases <= count <= cases for count in held.values()), held


def test_pairing_cancels_what_both_share():
    rng = np.random.default_rng(1)
    first = rng.normal(3, 1, 64)
    found = ratio_of_perplexities(first, first + rng.normal(0.01, 0.002, 64))
    assert found.value == pytest.approx(math.exp(0.01), rel=1e-3)
    assert 1.0 not in found
    assert found.high - found.low < 0.002


def test_policies_that_say_the_same_have_no_spread():
    same = np.linspace(1, 2, 8)
    assert ratio_of_perplexities(same, same) == Interval(1.0, 1.0, 1.0)
    assert mean_over_blocks(np.zeros(5)) == Interval(0.0, 0.0, 0.0)
    assert mean_over_blocks(np.array([2.5])) == Interval(2.5, 2.5, 2.5)
    assert mean_over_blocks(np.array([0.1, 0.3 - 0.2, 0.1])).low == pytest.approx(0.1)
    # A noise floor is small, and still has a spread.
    floor = mean_over_blocks(np.array([1e-12, 3e-12, 2e-12, 5e-12, 2e-12, 1e-12]))
    assert 1e-12 <= floor.low < floor.value < floor.high <= 5e-12


def test_blocks_are_runs_of_one_window():
    steps = np.array([[1.0, 3, 5, 7, 100], [0, 0, 2, 2, 2]])
    assert block_means(steps, 2).tolist() == pytest.approx([2, 112 / 3, 0, 2])
    assert block_means(steps, 8).tolist() == pytest.approx([116 / 5, 6 / 5])
    assert block_means(np.arange(12.0).reshape(2, 6), 3).tolist() == pytest.approx([1, 4, 7, 10])


def test_blocks_widen_the_interval_of_steps_that_are_alike():
    rng = np.random.default_rng(2)
    steps = np.repeat(rng.gamma(1.0, 1.0, 32), 32).reshape(2, 512)
    by_block, by_step = mean_over_blocks(block_means(steps, 32)), mean_over_blocks(steps.ravel())
    assert by_block.value == pytest.approx(by_step.value)
    assert by_block.high - by_block.low > 3 * (by_step.high - by_step.low)


@pytest.mark.parametrize("call", [lambda: proportion(0, 0), lambda: proportion(3, 2), lambda: lower_bound(-1, 4)])
def test_impossible_counts_are_refused(call):
    with pytest.raises(ValueError, match="at least one trial"):
        call()


def test_rows_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="of one length"):
        paired([True, False], [True])
    with pytest.raises(ValueError, match="of one length"):
        paired([], [])
    with pytest.raises(ValueError, match="at least one block"):
        mean_over_blocks(np.array([]))
    with pytest.raises(ValueError, match="of one length"):
        ratio_of_perplexities(np.ones(3), np.ones(4))


def test_an_interval_over_windows():
    found = over_windows(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.7764451 * math.sqrt(2.5 / 5)  # Student's t, 4 degrees of freedom
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-6)
    ratio = over_windows(np.array([0.1, 0.3]), math.exp)
    assert ratio.value == pytest.approx(math.exp(0.2))
    assert ratio.low < ratio.value < ratio.high
    assert over_windows(np.array([0.5, 0.5, 0.5])) == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least two windows"):
        over_windows(np.array([0.5]))


def test_windows_that_differ_are_covered_and_blocks_of_them_are_not():
    """Five windows, each with a level of its own: what holds for other windows is what the interval over windows
    says."""
    rng, held = np.random.default_rng(0), {"windows": 0, "blocks": 0}
    for _ in range(100):
        steps = 1.0 + rng.normal(0, 0.3, (5, 1)) + rng.normal(0, 0.3, (5, 32))
        held["windows"] += 1.0 in over_windows(steps.mean(axis=1))
        held["blocks"] += 1.0 in mean_over_blocks(steps.ravel())
    assert held["windows"] >= 88
    assert held["blocks"] < 70


def test_clusters_that_are_like_independent_trials_give_the_paired_interval():
    """Each prompt loses one of its four facts: means do not scatter, so the design effect is 1."""
    reference, policy = np.ones((5, 4), bool), np.tile([True, True, True, False], (5, 1))
    found, plain = clustered(reference, policy), paired(reference.ravel(), policy.ravel())
    assert (found.both, found.lost, found.gained, found.neither) == (15, 5, 0, 0)
    assert found.design_effect == 1.0
    assert found.difference == plain.difference
    assert found.share == proportion(15, 20)


def test_clusters_that_fall_together_count_as_one_trial_each():
    """Whole prompts are lost: twenty facts of five prompts say no more than five facts."""
    reference, policy = np.ones((5, 4), bool), np.repeat([[True], [True], [True], [True], [False]], 4, axis=1)
    found = clustered(reference, policy)
    assert found.design_effect == pytest.approx(4 * 5 / 4)  # the sample variance divides by one cluster less
    plain = paired(reference.ravel(), policy.ravel()).difference
    assert found.difference.value == pytest.approx(plain.value) == pytest.approx(-0.2)
    assert found.difference.low < plain.low < plain.high < found.difference.high
    assert found.share.high - found.share.low > proportion(16, 20).high - proportion(16, 20).low


def test_clusters_without_a_difference_keep_a_width():
    found = clustered(np.ones((3, 4), bool), np.ones((3, 4), bool))
    assert found.difference.low < 0 == found.difference.value < found.difference.high


@pytest.mark.parametrize(("first", "second"), [((1, 4), (1, 4)), ((2, 4), (2, 3)), ((4,), (4,)), ((2, 0), (2, 0))])
def test_clusters_of_other_shapes_are_refused(first, second):
    with pytest.raises(ValueError, match="at least two clusters"):
        clustered(np.ones(first, bool), np.ones(second, bool))
