"""When a test of retrieval ends early: what is decided, how often a policy passes that should not, and how soon."""

import itertools

import numpy as np
import pytest

from kvjax.cost_model.evidence import LEVELS, loss_bound
from kvjax.evaluation import sequential
from kvjax.evaluation.sequential import is_decided, verdict

NAMES = ("top:8", "window:640")
BATCHES = (29, 57, 86, 114, 143, 171, 200)
ALLOWED = (0.05, 0.2)
RUNS = 20_000
NOISE = 3 * (0.025 * 0.975 / RUNS) ** 0.5


def false_passes(rule, allowed, dense=1.0, seed=0):
    """Share of runs that pass a policy which loses exactly the share that is not allowed any more. The policy is alone,
    so that nothing else makes the run go on."""
    rng = np.random.default_rng(seed)
    valid = rng.random((RUNS, BATCHES[-1])) < dense
    lost = valid & (rng.random(valid.shape) < allowed)
    passed, going_on = np.zeros(RUNS, bool), np.ones(RUNS, bool)
    for look in BATCHES[1::2] + BATCHES[-1:]:
        for run in np.flatnonzero(going_on):
            found = rule(int(lost[run, :look].sum()), int(valid[run, :look].sum()), BATCHES[-1] - look, allowed)
            going_on[run], passed[run] = found is None, found is True
    assert not going_on.any()
    return passed.mean()


def uncorrected(lost, valid, left, allowed):
    """A mutant: at every look the plain rule."""
    if loss_bound(lost, valid + left) > allowed:
        return False
    return True if loss_bound(lost, valid) <= allowed else None


def wrong_side(lost, valid, left, allowed):
    """A mutant: what is lost and what is not change places."""
    return verdict(valid - lost, valid, left, allowed)


@pytest.mark.parametrize("dense", [1.0, 0.8])
@pytest.mark.parametrize("allowed", ALLOWED)
def test_a_policy_at_the_boundary_passes_in_one_run_of_forty_at_most(allowed, dense):
    assert false_passes(verdict, allowed, dense) <= 0.025 + NOISE
    assert false_passes(uncorrected, 0.2, dense) > 0.025 + 2 * NOISE


@pytest.mark.parametrize("allowed", ALLOWED)
def test_a_policy_passes_soon_if_it_loses_nothing_and_fails_soon_if_it_loses_much(allowed):
    rules = {rule: [rule(0, look, 200 - look, allowed) for look in BATCHES] for rule in (verdict, wrong_side)}
    assert rules[verdict].index(True) == (3 if allowed == 0.05 else 0)
    assert rules[wrong_side][-1] is False
    lossy = [verdict(round(0.5 * look), look, 200 - look, allowed) for look in BATCHES]
    assert False in lossy[:3]
    assert True not in lossy


def test_what_is_decided_agrees_with_the_plain_rule():
    """A pass is one by the plain rule, too; what fails cannot pass it any more, here or at the end."""
    for allowed in ALLOWED:
        for valid in (*range(1, 200, 13), 107, 114, 200):
            for lost in range(min(valid, 45) + 1):
                plain = loss_bound(lost, valid) <= allowed
                found = verdict(lost, valid, 200 - valid, allowed)
                assert plain or found is not True
                assert found is not False or (not plain and loss_bound(lost, 200) > allowed)
                assert verdict(lost, valid, 0, allowed) is plain


def cell(done, *, dense=(), top=(), window=()):
    """Records of the first trials of a cell; by policy, the trials that it does not answer."""
    missed = {"dense": dense, "top:8": (*dense, *top), "window:640": (*dense, *window)}
    ends = (0, *(end for end in BATCHES if end <= done))
    return [
        {"rows": [start, end], "shares": {name: [float(row not in rows) for row in range(start, end)] for name, rows in missed.items()}}
        for start, end in itertools.pairwise(ends)
    ]


def forced(**kl):
    """Forced text with the same KL in both windows."""
    of = {"top:8": kl.get("top", 0.0), "window:640": kl.get("window", 0.0)}
    return [{"beside": {name: {"kl": [[each] * 4] * 2} for name, each in of.items()}}]


ALL = tuple(range(200))


@pytest.mark.parametrize(
    ("missed", "kl", "ends"),
    [
        ({}, {}, 114),
        ({"top": ALL, "window": ALL}, {}, 57),
        ({"top": ALL}, {}, 114),
        ({"top": (1,)}, {}, 171),
        ({"top": (1,)}, {"top": 0.03}, 114),
        ({"top": (1, 2, 100)}, {}, 200),
        ({"top": (1, 2, 3, 4)}, {}, 114),
        ({"top": range(0, 200, 8), "window": range(0, 200, 8)}, {"top": 0.2, "window": 0.2}, 57),
        ({"dense": ALL}, {}, 57),
        ({"dense": ALL[:120]}, {}, 57),
        ({"dense": range(0, 200, 2)}, {}, 200),
        ({"dense": range(0, 110)}, {"top": 0.2, "window": 0.2}, 57),
        ({"dense": (0, *range(1, 57, 2))}, {"top": 0.2, "window": 0.2}, 114),
    ],
)
def test_a_cell_ends_where_each_policy_is_decided_or_dense_cannot(missed, kl, ends):
    decided = [done for done in BATCHES if is_decided(200, NAMES, cell(done, **missed), forced(**kl))]
    assert decided[0] == ends
    assert not is_decided(200, NAMES, [], forced(**kl))


def test_each_level_counts(monkeypatch):
    """One that loses 10% fails "assured" soon, and passes "fast" later."""
    tenth = {"top": range(0, 200, 10), "window": ALL}
    looks = [done for done in BATCHES if is_decided(200, NAMES, cell(done, **tenth), forced())]
    assert looks[0] == 171
    monkeypatch.setattr(sequential, "LEVELS", {"assured": LEVELS["assured"]})
    assert is_decided(200, NAMES, cell(57, **tenth), forced())
