"""What a difference between two policies is worth: intervals, paired tests and bootstraps, all by scipy and statsmodels.

Rates get Wilson intervals. Two policies that answered the same trials are compared pair by pair: only trials that one answered and the
other did not tell them apart (McNemar). Teacher-forced steps are compared step by step; neighbouring steps are alike, and so are all
steps of one window of text. What is said about text in general therefore rests on the windows, one figure each (`over_windows`); a
bootstrap over blocks of BLOCK_STEPS steps says how well the figure of these very windows is known, and no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

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
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclasses.dataclass(frozen=True)
class Paired:
    """One policy against the reference on the same trials.

    both, lost, gained, neither: trials that both answered, only the reference, only the policy, none. difference: of the shares, policy
    minus reference. p_value: exact McNemar, two-sided. p_loss: one-sided exact binomial, of the policy being no worse.
    """

    both: int
    lost: int
    gained: int
    neither: int
    difference: Interval
    p_value: float
    p_loss: float


def proportion(hits: int, trials: int) -> Interval:
    """A share of successes and its Wilson 95% interval. ValueError where there were no trials."""
    _check_counts(hits, trials)
    return Interval(hits / trials, *map(float, proportion_confint(hits, trials, alpha=1 - CONFIDENCE, method="wilson")))


def lower_bound(hits: int, trials: int, confidence: float = 0.975) -> float:
    """The share of successes that is exceeded with one-sided `confidence` (Wilson)."""
    _check_counts(hits, trials)
    return float(stats.binomtest(hits, trials, alternative="greater").proportion_ci(confidence, method="wilson").low)


def paired(reference: Sequence[bool], policy: Sequence[bool]) -> Paired:
    """Two policies' successes on the same trials, in the same order."""
    first, second = np.asarray(reference, bool), np.asarray(policy, bool)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"paired trials are two rows of one length, at least one trial, got {first.shape} and {second.shape}")
    both, lost, gained = (int(np.sum(which)) for which in (first & second, first & ~second, ~first & second))
    neither = first.size - both - lost - gained
    p_loss = stats.binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue if lost + gained else 1.0
    p_value = mcnemar([[both, lost], [gained, neither]], exact=True).pvalue if lost + gained else 1.0
    return Paired(both, lost, gained, neither, _newcombe(both, lost, gained, neither), float(p_value), float(p_loss))


def over_windows(figures: Float[np.ndarray, " n"], transform: Callable = float) -> Interval:
    """The mean of one figure per window and its t interval, both through `transform`: what holds for other windows of such text.

    ValueError for fewer than two windows.
    """
    figures = np.asarray(figures, np.float64)
    if figures.ndim != 1 or figures.size < 2:
        raise ValueError(f"an interval over windows needs a row of at least two windows, got shape {figures.shape}")
    mean, spread = float(figures.mean()), float(stats.sem(figures))
    low, high = stats.t.interval(CONFIDENCE, figures.size - 1, loc=mean, scale=spread) if spread else (mean, mean)
    return Interval(*map(float, map(transform, (mean, low, high))))


def mean_over_blocks(blocks: Float[np.ndarray, " n"]) -> Interval:
    """A mean over blocks of steps and its bootstrap interval, within the windows they come from."""
    return _bootstrapped(blocks, lambda values, axis=-1: np.mean(values, axis=axis))


def ratio_of_perplexities(reference: Float[np.ndarray, " n"], policy: Float[np.ndarray, " n"]) -> Interval:
    """exp(mean NLL of the policy - mean NLL of the reference) and its bootstrap interval, blocks resampled in pairs. 1 is no difference."""
    if np.shape(reference) != np.shape(policy):
        raise ValueError(f"paired blocks are two rows of one length, got {np.shape(reference)} and {np.shape(policy)}")
    # The ratio depends on a pair's difference alone.
    return _bootstrapped(np.subtract(policy, reference), lambda values, axis=-1: np.exp(np.mean(values, axis=axis)))


def block_means(steps: Float[np.ndarray, "windows steps"], size: int = BLOCK_STEPS) -> Float[np.ndarray, " n"]:
    """Means over runs of `size` steps of each window, one after the other; steps that do not fill a run join the window's last one."""
    windows, count = steps.shape
    runs = max(1, count // size)
    ends = [*range(size, runs * size, size), count]
    sums = np.diff(np.cumsum(steps, axis=1, dtype=np.float64)[:, [end - 1 for end in ends]], axis=1, prepend=0)
    return (sums / np.diff(ends, prepend=0)).reshape(windows * runs)


def _bootstrapped(sample: Float[np.ndarray, " n"], statistic: Callable) -> Interval:
    """BCa interval of a statistic; a single block, or blocks that are alike to rounding, leave nothing to resample and give no width."""
    sample = np.asarray(sample, np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ValueError(f"a bootstrap needs a row of at least one block, got shape {sample.shape}")
    value = float(statistic(sample))
    if np.ptp(sample) <= 1e-9 * np.abs(sample).max():
        return Interval(value, value, value)
    done = stats.bootstrap((sample,), statistic, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=0)
    return Interval(value, float(done.confidence_interval.low), float(done.confidence_interval.high))


def _newcombe(both: int, lost: int, gained: int, neither: int) -> Interval:
    """Difference of paired proportions by squaring and adding Wilson limits (Newcombe 1998, Statistics in Medicine 17:2635, method 10).

    Neither library has an interval for this difference that stays honest without discordant pairs, where a bootstrap's has no width.
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


def _check_counts(hits: int, trials: int) -> None:
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"a share needs at least one trial and no more hits than trials, got {hits} of {trials}")
