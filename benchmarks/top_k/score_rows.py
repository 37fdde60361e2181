"""Rows of scores to rank, and hints for them: synthetic, seeded, numpy.

There are two families. *Drawn* rows are independent numbers of one distribution; the row of a step earlier is
correlated with them so that the two top k have a chosen overlap. *YaRN* rows are what RoPE makes of a query and keys
("Guess-Verify-Refine", sections 3.2, 3.3 and 6.1): a sum of cosines of the distance, with content added, for a query
that advances from step to step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float, Int
from scipy import integrate, optimize, special

# Overlap


def overlap(found: Int[np.ndarray, " k"], earlier: Int[np.ndarray, " k"], *, shift: int = 0) -> float:
    """Share of the entries of `found` that are also in `earlier`, moved by `shift`. Entries below 0 are none; 0 if
    there are none."""
    found, earlier = np.asarray(found), np.asarray(earlier)
    found, earlier = found[found >= 0], earlier[earlier >= 0] + shift
    return float(np.isin(found, earlier).mean()) if found.size else 0.0


def top_indices(scores: Float[np.ndarray, " N"], k: int) -> Int[np.ndarray, " k"]:
    """The k largest of a row without NaN, ascending; of equal scores the lower indices."""
    threshold = scores[np.argpartition(-scores, k - 1)[k - 1]]
    above, equal = np.flatnonzero(scores > threshold), np.flatnonzero(scores == threshold)
    return np.sort(np.concatenate([above, equal[: k - above.size]])).astype(np.int32)


def by_row(make: Callable[[int], np.ndarray], batch: int) -> np.ndarray:
    """`make(row)` of every row, stacked. Several rows run at a time, because numpy releases the interpreter lock in
    long operations."""
    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(make, range(batch))))


# Drawn rows


DISTRIBUTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda z: z,
    "beta": lambda z: special.betaincinv(2.0, 5.0, special.ndtr(z)),
    "weibull": lambda z: (-special.log_ndtr(-z)) ** (1 / 1.5),
    "logistic": lambda z: special.log_ndtr(z) - special.log_ndtr(-z),
    "lognormal": np.exp,
}
"""Monotone functions that turn a standard normal number into one of beta(2, 5), weibull_min(1.5), logistic or
lognormal(1). These distributions fit a real indexer's scores best by layer (appendix F of the paper, which does not
give their parameters)."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Rows of one distribution. latent: the standard normal numbers that they were made of, which have the same
    order."""

    scores: Float[np.ndarray, "B N"]
    latent: Float[np.ndarray, "B N"]


def drawn_rows(distribution: str, batch: int, n: int, *, seed: int) -> Drawn:
    """`batch` rows of `n` float32 scores. Row b depends only on (seed, b). ValueError for an unknown distribution."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r} is unknown; there are {', '.join(DISTRIBUTIONS)}")
    latent = by_row(lambda row: np.random.default_rng((seed, row)).standard_normal(n, np.float32), batch)
    if distribution == "normal":
        return Drawn(latent, latent)
    made = by_row(lambda row: DISTRIBUTIONS[distribution](latent[row].astype(np.float64)).astype(np.float32), batch)
    return Drawn(made, latent)


def drift(n: int, k: int, share: float) -> float:
    """The correlation of two rows of normal scores for which their top k of n have, in expectation, a share `share` in
    common.

    The share is P(both above t) / (k / n), where t is the k/n upper quantile, for a bivariate normal distribution.
    ValueError for a share below that of unrelated rows, k / n, or of 1 and more.
    """
    if not k / n <= share < 1:
        raise ValueError(f"rows can share from k / n = {k / n:.3g} of their top k to less than 1, got {share}")
    t = -special.ndtri(k / n)

    def shared(r: float) -> float:
        inner = math.sqrt(1 - r * r)
        density = lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * special.ndtr((r * z - t) / inner)  # noqa: E731
        return integrate.quad(density, t, t + 12, limit=200)[0] / (k / n)

    if shared(0.0) >= share:
        return 0.0
    return float(optimize.brentq(lambda r: shared(r) - share, 0.0, 1 - 1e-9, xtol=1e-6))


def step_before(rows: Drawn, k: int, share: float, *, seed: int) -> Float[np.ndarray, "B N"]:
    """Latent scores of the rows one step earlier, whose top k share about `share` of theirs (`drift`)."""
    batch, n = rows.latent.shape
    r = drift(n, k, share)
    noise = by_row(lambda row: np.random.default_rng((seed, row, 1)).standard_normal(n, np.float32), batch)
    return np.float32(r) * rows.latent + np.float32(math.sqrt(1 - r * r)) * noise


def stale_hint(rows: Drawn, k: int, share: float, *, seed: int) -> Int[np.ndarray, "B k"]:
    """The top k of the step before, `round(share * k)` of which are among the rows' own top k; ascending.

    By chance the earlier rows share a few more or fewer. So the best of the step before are taken separately among
    those inside and those outside the true set. Then the share is met exactly, and the stale entries are those that a
    drift makes stale: scores near the threshold.
    """
    earlier = step_before(rows, k, share, seed=seed)
    kept = round(share * k)

    def hint(row: int) -> np.ndarray:
        mine, before = top_indices(rows.scores[row], k), earlier[row]
        inside = mine[np.argsort(-before[mine], kind="stable")[:kept]]
        before[mine] = -np.inf
        return np.sort(np.concatenate([inside, top_indices(before, k - kept)])) if kept < k else mine

    return by_row(hint, len(earlier))


def random_hint(batch: int, n: int, k: int, *, seed: int) -> Int[np.ndarray, "B k"]:
    """k different indices of each row, ascending. A share k / n of them is in any set."""

    def hint(row: int) -> np.ndarray:
        return np.sort(np.random.default_rng((seed, row, 2)).choice(n, k, replace=False, shuffle=False))

    return by_row(hint, batch).astype(np.int32)


# YaRN rows


@dataclasses.dataclass(frozen=True)
class Yarn:
    """RoPE of `head_dim` dimensions stretched by YaRN, as the indexer of DeepSeek-V3.2 has it. original: positions
    before stretching."""

    head_dim: int = 64
    base: float = 10_000.0
    factor: float = 40.0
    original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self) -> Float[np.ndarray, " D/2"]:
        """Radians per token of each pair of dimensions (YaRN, arXiv 2309.00071, section 3.2: NTK by parts), float64."""
        half = self.head_dim // 2
        plain = self.base ** (-np.arange(half) / half)

        def dimension(rotations: float) -> float:
            return self.head_dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = max(math.floor(dimension(self.beta_fast)), 0), min(math.ceil(dimension(self.beta_slow)), self.head_dim - 1)
        stretched = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        return plain * (1 - stretched) + plain / self.factor * stretched

    def prior(self, n: int) -> Float[np.ndarray, " n"]:
        """The idealized score of the distances 0 to n - 1: vectors of ones, one of them rotated; equation 2 of the
        paper. float64."""
        distance = np.arange(n, dtype=np.float64)
        return sum(2 * np.cos(distance * frequency) for frequency in self.frequencies())


def yarn_rows(
    n: int, steps: int, *, seed: int, shape: Yarn | None = None, content: float = 0.5, memory: float = 0.6
) -> Float[np.ndarray, "steps N"]:
    """Scores of `steps` consecutive queries, the last at position n - 1, over the keys up to their own position; -inf
    after it. float32.

    Queries and keys are vectors of ones plus normal content of standard deviation `content`, each rotated by its
    position. Keys stay the same. From step to step a share `memory` of the query's content (its correlation) is kept.
    """
    shape = shape or Yarn()
    keys_rng, query_rng = np.random.default_rng((seed, 3)), np.random.default_rng((seed, 4))
    frequencies, half = shape.frequencies(), shape.head_dim // 2
    drawn = content * query_rng.standard_normal((steps, shape.head_dim))
    for step in range(1, steps):
        drawn[step] = memory * drawn[step - 1] + math.sqrt(1 - memory**2) * drawn[step]
    positions = n - steps + np.arange(steps)
    queries = _rotated(1 + drawn, positions, frequencies).astype(np.float32)
    scores = np.empty((steps, n), np.float32)

    def fill(start: int, drawn: np.ndarray) -> None:
        rotated = _rotated(1 + content * drawn, start + np.arange(len(drawn)), frequencies)
        scores[:, start : start + len(drawn)] = queries @ rotated.astype(np.float32).T

    with ThreadPoolExecutor() as pool:  # in parts, so that keys of a million tokens need little memory
        for some in itertools.batched(range(0, n, 2**14), 16):
            parts = [(start, keys_rng.standard_normal((min(2**14, n - start), 2 * half))) for start in some]
            list(pool.map(fill, *zip(*parts, strict=True)))
    scores[np.arange(n) > positions[:, None]] = -np.inf
    return scores


def _rotated(vectors: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """RoPE: dimension i and i + half are a pair."""
    angles = positions[:, None].astype(np.float64) * frequencies
    a, b = np.split(vectors, 2, axis=1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def static_hint(n: int, k: int, *, position: int, shape: Yarn | None = None) -> Int[np.ndarray, " k"]:
    """The k distances below n with the highest idealized score, as places before `position`, ascending; -1 for places
    before the first."""
    distances = top_indices((shape or Yarn()).prior(n), k)
    return np.sort(np.maximum(position - distances, -1)).astype(np.int32)
