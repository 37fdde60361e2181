"""When retrieval may end before its last trial: a group-sequential test, for `kvjax evaluate --record`.

After each quarter of a cell's trials (a cell: length, task, haystack) every policy is looked at, for each level of
`kvjax.cost_model.evidence.LEVELS`. The cell ends if all of this is decided:

    passes   at a look before the end: by the rule of `Evidence.meets`, and by an exact binomial test at `EARLY_ERROR`.
             At the end: by the rule of `Evidence.meets` alone.
    fails    if not even trials that lose nothing more could make the last look pass (curtailment), or if the KL on
             forced text, which is measured before, is above the level's.

So early looks add at most 1.25% of false passes to those of the plain rule (Bonferroni), and failing early adds none. A
strict rule at early looks and the plain one at the end is the design of Haybittle (1971, British Journal of Radiology
44:793). Decisions are made anew at each look: a policy counts by what it has lost when the cell ends, not by an earlier
look. A cell also ends if dense clearly finds fewer than `DENSE_SHARE`. All depends on the records alone, so a killed
run ends where a whole one does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from kvjax.cost_model.evidence import LEVELS, loss_bound
from kvjax.evaluation.statistics import over_windows

LOOKS = 4
"""Looks at a cell, evenly spread over its trials. The last is its end."""

EARLY_ERROR = 0.0125 / (LOOKS - 1)
"""Error of a pass at one of the early looks, one-sided: together half of the 2.5% of `Evidence.meets`. A policy that
loses nothing passes `assured` after 107 trials that dense answers."""

DENSE_SHARE = 0.5
"""Share of a cell's trials that dense must answer for the cell to count."""

Record = Mapping[str, Any]


def is_decided(trials: int, policies: Sequence[str], cell: Sequence[Record], forced: Iterable[Record]) -> bool:
    """Whether a cell needs no more trials.

    trials: how many it may have. policies: names of those that are compared with dense. cell: records of its first
    trials, in order. forced: those of the forced text of its length.
    """
    if not cell:
        return False
    start, done = cell[-1]["rows"]
    if done == trials:
        return True
    if start * LOOKS // trials == done * LOOKS // trials:
        return False  # no quarter ends in this batch
    hits = {name: np.concatenate([record["shares"][name] for record in cell]) == 1.0 for name in ("dense", *policies)}
    dense = hits.pop("dense")
    valid = int(dense.sum())
    if valid < DENSE_SHARE * done:
        return _is_below(valid, done, DENSE_SHARE)
    kl = {name: over_windows(np.concatenate([each["beside"][name]["kl"] for each in forced]).mean(axis=1)).high for name in hits}
    return all(
        kl[name] > level.kl or verdict(int((dense & ~found).sum()), valid, trials - done, level.loss) is not None
        for name, found in hits.items()
        for level in LEVELS.values()
    )


@functools.lru_cache(maxsize=4096)
def verdict(lost: int, valid: int, left: int, allowed: float) -> bool | None:
    """Whether a policy loses at most the share `allowed` of what dense finds: True and False are decided, None is open.

    lost: of `valid` trials that dense answers, those that the policy does not. left: trials to come.
    """
    if loss_bound(lost, valid + left) > allowed:
        return False
    if not left:
        return True
    return True if valid and loss_bound(lost, valid) <= allowed and _is_below(lost, valid, allowed) else None


def _is_below(count: int, trials: int, share: float) -> bool:
    """Whether a count shows, at `EARLY_ERROR`, that it comes from less than this share."""
    return float(stats.binomtest(count, trials, share, alternative="less").pvalue) <= EARLY_ERROR
