"""The decisions of the Mosaic GPU kernel of `top_k`, repeated in plain Python: which thresholds it tries, and what it
counts.

`replay_row` takes one row and returns the first three counts of `return_counts`, and the thresholds. It shares only the
sizes (`plan`) with the kernel, so tests can compare the two. It also shows without a GPU how many passes a row takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from pallas_kernels.selection.top_k.plan import MAX_SECANTS, TOGETHER, Shape

NO_KEY, NAN_KEY = -(2**31), -(2**31) + 1
MINUS_INFINITY_KEY = -(2**31) + 0x007FFFFF
PLUS_INFINITY_KEY = 0x7F800000
BINS = 256


@dataclasses.dataclass(frozen=True)
class Replay:
    """passes: over the row. candidates: that were refined. rounds: of counting among them. thresholds: keys that were
    tried, in order."""

    passes: int
    candidates: int
    rounds: int
    thresholds: tuple[int, ...]


def replay_row(s: Shape, row: np.ndarray, hint: np.ndarray | None = None) -> Replay:
    """The kernel's decisions for a row (float32 `[length]`, without entries past its length), with the sizes `s`."""
    keys = keys_of(row)
    if s.whole:
        return Replay(1, row.size, refinement_rounds(s, keys), ())
    if row.size <= s.capacity:
        return Replay(1, row.size, refinement_rounds(s, keys), (_guess(s, keys, hint)[0],))
    t, low, high, another = _guess(s, keys, hint)
    at_low, at_high, tried = row.size, 0, []
    while True:
        tried.append(t)
        reaching = keys[keys >= max(t, MINUS_INFINITY_KEY)]
        if s.k <= reaching.size <= s.capacity:
            return Replay(len(tried), reaching.size, refinement_rounds(s, reaching), tuple(tried))
        if reaching.size < s.k:
            high, at_high = t, reaching.size
        else:
            low, at_low = t, reaching.size
        half = ((high - low) % 2**32) >> 1
        if len(tried) == MAX_SECANTS or half == 0:
            return _by_digits(s, keys, tried)
        part = _quotient(at_low - _target(s), max((at_low - at_high) >> 8, 1))
        last, t = t, _wrapped(low + ((half >> 7) * min(max(part, 8), 248) if half >= 256 else half))
        if another and len(tried) == 1:
            other = another(reaching.size)
            t = other if (other < last if reaching.size < s.k else other > last) else t


def _target(s: Shape) -> int:
    return s.k + (s.capacity - s.k) // 4


def keys_of(row: np.ndarray) -> np.ndarray:
    """Integers (int64) that order as the scores do, NaN lowest."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        bits = (row.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
    return np.where(np.isnan(row), NAN_KEY, np.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _guess(s: Shape, keys: np.ndarray, hint: np.ndarray | None) -> tuple[int, int, int, Callable | None]:
    if s.start == "hint":
        valid = keys[[place for place in hint.tolist() if 0 <= place < keys.size]]
        if not valid.size:
            return 0, MINUS_INFINITY_KEY, PLUS_INFINITY_KEY, None
        return _quotient(int((valid >> 13).sum()), valid.size) << 13, int(valid.min()), int(valid.max()), None
    places = np.array(sample_places(keys.size, s.sample), np.int64)
    sampled = np.full((-(-len(places) // s.threads) * s.threads, TOGETHER), NO_KEY)
    sampled[: len(places)] = keys[places[:, None] + np.arange(TOGETHER)]
    best = sampled.ravel() if s.crowded else sampled.reshape(-1, s.threads, TOGETHER).max((0, 2), initial=NO_KEY)
    best = best[best > NO_KEY]
    if not best.size:
        return 2**31 - 1, 2**31 - 1, NO_KEY, None
    low, high = int(best.min()), int(best.max())
    yet = min(keys.size, s.k) * len(places) * TOGETHER // keys.size
    want = yet + 4 * _square_root(yet) + 4
    need = want if s.crowded else want * 2 * s.threads // (want + 2 * s.threads)
    found = _descend(best, low, _bits(best), need, need >> 3)[0]
    count = int((sampled >= found).sum())
    higher = max(need * want // max(count, 1), 1)
    if count > want + (want >> 1) and higher < need:
        need = higher
        found = _descend(best, low, _bits(best), need, need >> 3)[0]

    def another(total: int) -> int:
        rank = max(min(need * _target(s) // max(total, 1), s.sample if s.crowded else s.threads), 1)
        return _descend(best, low, _bits(best), rank, rank >> 3)[0]

    return found, low, high, another


def sample_places(length: int, sample: int) -> list[int]:
    """Places at which `TOGETHER` neighbours are sampled: a scattered place in each cell of a row. The first cells may
    be longer."""
    units = length // TOGETHER
    size = min(units, sample // TOGETHER)
    width, rest = divmod(units, size) if size else (0, 0)
    places = []
    for i in range(size):
        scattered = (((i * 0x9E3779B9) & 0xFFFFFFFF) >> 16) * (width + (i < rest)) >> 16
        places.append((i * width + min(i, rest) + scattered) * TOGETHER)
    return places


def _square_root(n: int) -> int:
    root = 1 << ((n.bit_length() + 1) >> 1)
    for _ in range(3):
        root = max((root + n // root) >> 1, 1)
    return root


def _narrow(keys: np.ndarray, low: int, bits: int, need: int) -> tuple[int, int, int, int]:
    """One round of counting the keys in [low, low + 2^bits) by 256 intervals. For the interval that holds the `need`-th
    key from above: its start, its bits, how many keys lie in it, and how many above."""
    shift = max(bits - 8, 0)
    offset = keys[(keys >= low) & (keys - low < 1 << bits)] - low
    counts = np.bincount(offset >> shift, minlength=BINS)
    upto = np.cumsum(counts[::-1])[::-1]
    found = int(np.flatnonzero(upto >= need)[-1])
    return low + (found << shift), shift, int(counts[found]), int(upto[found] - counts[found])


def _bits(keys: np.ndarray) -> int:
    return int(keys.max() - keys.min()).bit_length()


def _descend(keys: np.ndarray, low: int, bits: int, need: int, slack: int = 0) -> tuple[int, int, int, bool]:
    """A key that `need` to `need + slack` keys reach, the rounds it took, how many lie above, and whether no more than
    that reach it."""
    above, rounds = 0, 0
    while True:
        rounds += 1
        if ((keys >= low) & (keys - low < 1 << bits)).sum() < need - above:
            return low, rounds, above, True
        low, bits, inside, beyond = _narrow(keys, low, bits, need - above)
        above += beyond
        if above + inside <= need + slack:
            return low, rounds, above, True
        if bits == 0:
            return low, rounds, above, False


def refinement_rounds(s: Shape, keys: np.ndarray) -> int:
    """Rounds of counting that find the k best of some candidates, of equal keys the first."""
    if not keys.size:
        return 1
    threshold, rounds, above, exact = _descend(keys, int(keys.min()), _bits(keys), s.k)
    if exact:
        return rounds
    most = next(most for most in s.most_candidates if keys.size <= most)
    ties = -1 - np.flatnonzero(keys == threshold)
    return rounds + _descend(ties, -most, (most - 1).bit_length(), s.k - above)[1]


def _by_digits(s: Shape, keys: np.ndarray, tried: list[int]) -> Replay:
    """The search by digits, which always ends."""
    low, bits, above, reach, passes = NO_KEY, 32, 0, math.inf, len(tried)
    while bits and reach > s.capacity:
        low, bits, inside, beyond = _narrow(keys, low, bits, s.k - above)
        above, passes = above + beyond, passes + 1
        reach = above + inside
    if reach <= s.capacity:
        candidates = keys[keys >= low]
        return Replay(passes + 1, candidates.size, refinement_rounds(s, candidates), tuple(tried))
    ties = np.flatnonzero(keys == low)[: s.k - above]
    candidates = keys[np.union1d(ties, np.flatnonzero(keys > low))]
    return Replay(passes + 2, candidates.size, refinement_rounds(s, candidates), tuple(tried))


def _quotient(a: int, b: int) -> int:
    """Integer division as processors do it: toward zero."""
    return abs(a) // b * (1 if a >= 0 else -1)


def _wrapped(n: int) -> int:
    return (n + 2**31) % 2**32 - 2**31
