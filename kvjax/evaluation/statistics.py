"""Tests whether a difference between two policies is significant: intervals, paired tests and bootstraps, by scipy.

Rates get Wilson intervals. Two policies that answered the same trials are compared pair by pair: only trials that one
policy answered and the other did not tell them apart (McNemar). Teacher-forced steps are compared step by step. Steps
of one window of text are not independent, so an interval for other texts uses one figure per window (`over_windows`). A
bootstrap over blocks of BLOCK_STEPS steps says only how exactly the figure of these windows is known. If several trials
share a prompt, counts are divided by the design effect of the prompts before an interval is computed (Rao and Scott
1992, Biometrics 48:577).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from pallas_kernels.core.tables import estimate

CONFIDENCE = 0.95
BLOCK_STEPS = 32
RESAMPLES = 4_999


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure and the ends of its two-sided 95% interval."""

    value: float
    low: float
    high: float

    def __contains__(self, figure: float) -> bool:
        return self.low <= figure <= self.high

    def __str__(self) -> str:
        return estimate(dataclasses.asdict(self), ".3g")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Trials that were answered by two policies (both), by the reference only (lost), by the policy only (gained), by
    none (neither)."""

    both: int
    lost: int
    gained: int
    neither: int


@dataclasses.dataclass(frozen=True)
class Paired(Pairs):
    """One policy against the reference on the same trials.

    difference: the policy's share minus the reference's. p_value: exact McNemar, two-sided. p_loss: exact binomial,
    one-sided; its null hypothesis is that the policy is no worse.
    """

    difference: Interval
    p_value: float
    p_loss: float


def proportion(hits: float, trials: float) -> Interval:
    """A share of successes and its Wilson 95% interval. ValueError for no trials.

    Counts need not be whole numbers: those of clusters are not. scipy's interval takes only whole ones, so the formula
    stands here.
    """
    _check_counts(hits, trials)
    share, weight = hits / trials, stats.norm.isf((1 - CONFIDENCE) / 2) ** 2 / trials
    half = np.sqrt(weight * share * (1 - share) + weight**2 / 4)
    ends = (share + weight / 2 + np.array([-half, half])) / (1 + weight)
    return Interval(share, *np.clip(ends, 0.0, 1.0).tolist())


def lower_bound(hits: int, trials: int, confidence: float = 0.975) -> float:
    """The lower bound of the share of successes, with one-sided `confidence` (Wilson)."""
    _check_counts(hits, trials)
    return float(stats.binomtest(hits, trials, alternative="greater").proportion_ci(confidence, method="wilson").low)


def paired(reference: Sequence[bool], policy: Sequence[bool]) -> Paired:
    """Compares two policies' successes on the same trials, in the same order. ValueError for rows of different lengths
    or no trial."""
    first, second = np.asarray(reference, bool), np.asarray(policy, bool)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"paired trials are two rows of one length, at least one trial, got {first.shape} and {second.shape}")
    both, lost, gained, neither = _counted(first, second)
    # McNemar's exact test is the binomial one of the pairs that differ.
    sides = ("two-sided", "greater") if lost + gained else ()
    tests = [float(stats.binomtest(lost, lost + gained, alternative=side).pvalue) for side in sides] or [1.0, 1.0]
    return Paired(both, lost, gained, neither, _newcombe(both, lost, gained, neither), *tests)


@dataclasses.dataclass(frozen=True)
class Clustered(Pairs):
    """One policy against the reference on trials that come in clusters of one size, several to a prompt.

    share: the policy's own, with Wilson's interval. difference: of the shares, policy minus reference, with Newcombe's
    interval. Both use counts divided by a design effect: the variance of the clusters' means over that of independent
    trials, at least 1. design_effect: that of the difference.
    """

    share: Interval
    difference: Interval
    design_effect: float


def clustered(reference: Bool[np.ndarray, "clusters trials"], policy: Bool[np.ndarray, "clusters trials"]) -> Clustered:
    """Compares two policies' successes on the same trials, one row per cluster. ValueError for tables of different
    shapes, and for fewer than two clusters."""
    first, second = np.asarray(reference, bool), np.asarray(policy, bool)
    if first.shape != second.shape or first.ndim != 2 or len(first) < 2 or not first.size:
        raise ValueError(f"clustered trials are two tables of one shape, at least two clusters, got {first.shape} and {second.shape}")
    counts = _counted(first, second)
    effect = _design_effect(second.astype(float) - first)
    hits, own = counts[0] + counts[2], _design_effect(second.astype(float))
    return Clustered(*counts, proportion(hits / own, first.size / own), _newcombe(*(count / effect for count in counts)), effect)


def over_windows(figures: Float[np.ndarray, " n"], transform: Callable = float) -> Interval:
    """The mean of one figure per window and its t interval, both through `transform`. The interval holds for other
    windows of such text.

    ValueError for fewer than two windows.
    """
    figures = np.asarray(figures, np.float64)
    if figures.ndim != 1 or figures.size < 2:
        raise ValueError(f"an interval over windows needs a row of at least two windows, got shape {figures.shape}")
    mean, spread = float(figures.mean()), float(stats.sem(figures))
    low, high = stats.t.interval(CONFIDENCE, figures.size - 1, loc=mean, scale=spread) if spread else (mean, mean)
    return Interval(*map(float, map(transform, (mean, low, high))))


def mean_over_blocks(blocks: Float[np.ndarray, " n"]) -> Interval:
    """A mean over blocks of steps and its bootstrap interval, which holds only for the windows that the blocks come
    from."""
    return _bootstrapped(blocks, lambda values, axis=-1: np.mean(values, axis=axis))


def ratio_of_perplexities(reference: Float[np.ndarray, " n"], policy: Float[np.ndarray, " n"]) -> Interval:
    """exp(mean NLL of the policy - mean NLL of the reference) and its bootstrap interval. Blocks are resampled in
    pairs. 1: equal."""
    if np.shape(reference) != np.shape(policy):
        raise ValueError(f"paired blocks are two rows of one length, got {np.shape(reference)} and {np.shape(policy)}")
    # The ratio depends only on the differences of the pairs.
    return _bootstrapped(np.subtract(policy, reference), lambda values, axis=-1: np.exp(np.mean(values, axis=axis)))


def block_means(steps: Float[np.ndarray, "windows steps"], size: int = BLOCK_STEPS) -> Float[np.ndarray, " n"]:
    """Means over runs of `size` consecutive steps of each window, one window after the other. Steps left over join the
    last run."""
    windows, count = steps.shape
    runs = max(1, count // size)
    ends = [*range(size, runs * size, size), count]
    sums = np.diff(np.cumsum(steps, axis=1, dtype=np.float64)[:, [end - 1 for end in ends]], axis=1, prepend=0)
    return (sums / np.diff(ends, prepend=0)).reshape(windows * runs)


def _bootstrapped(sample: Float[np.ndarray, " n"], statistic: Callable) -> Interval:
    """BCa bootstrap interval of a statistic. For a single block, and for blocks that are equal up to rounding, its
    width is 0, because resampling changes nothing."""
    sample = np.asarray(sample, np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ValueError(f"a bootstrap needs a row of at least one block, got shape {sample.shape}")
    value = float(statistic(sample))
    if np.ptp(sample) <= 1e-9 * np.abs(sample).max():
        return Interval(value, value, value)
    done = stats.bootstrap((sample,), statistic, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=0)
    return Interval(value, float(done.confidence_interval.low), float(done.confidence_interval.high))


def _counted(first: np.ndarray, second: np.ndarray) -> list[int]:
    return [int(np.sum(which)) for which in (first & second, first & ~second, ~first & second, ~first & ~second)]


def _design_effect(values: Float[np.ndarray, "clusters trials"]) -> float:
    """Variance of the clusters' means, divided by what it would be if trials of a cluster were independent; at least
    1."""
    independent = float(values.var()) / values.shape[1]
    return max(1.0, float(values.mean(axis=1).var(ddof=1)) / independent) if independent else 1.0


def _newcombe(both: float, lost: float, gained: float, neither: float) -> Interval:
    """Difference of paired proportions by squaring and adding Wilson limits (Newcombe 1998, Statistics in Medicine
    17:2635, method 10).

    Computed here, because scipy has no interval for this difference. Without discordant pairs a bootstrap interval
    would have no width.
    """
    total = both + lost + gained + neither
    reference, policy = proportion(both + lost, total), proportion(both + gained, total)
    cross = both * neither - lost * gained
    if cross > 0:
        cross = max(cross - total / 2, 0)
    margins = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    phi = cross / np.sqrt(margins) if margins else 0.0

    def distance(first: float, second: float) -> float:
        return float(np.sqrt(max(first**2 - 2 * phi * first * second + second**2, 0.0)))

    value = policy.value - reference.value
    below = distance(policy.value - policy.low, reference.high - reference.value)
    above = distance(policy.high - policy.value, reference.value - reference.low)
    return Interval(value, value - below, value + above)


def _check_counts(hits: float, trials: float) -> None:
    if not 0 <= hits <= trials or trials <= 0:
        raise ValueError(f"a share needs at least one trial and no more hits than trials, got {hits} of {trials}")
