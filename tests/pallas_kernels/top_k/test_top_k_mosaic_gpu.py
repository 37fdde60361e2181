"""top_k for Hopper without one: the kernel on emulated threads, its counts against the replay, planted bugs; lowered; compiled.

What only a GPU can tell is in `test_top_k_on_hopper.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import lanes
from pallas_kernels.select_blocks import choose
from pallas_kernels.top_k import mosaic_gpu, plan, search
from pallas_kernels.top_k.plan import Config
from pallas_kernels.top_k.replay import replay

SMALL = {"capacity": 512, "sample": 512}

# Case of the suite; Config; every how many-th row.
CALLS = {
    "searched": ({"n": 1001, "k": 32}, {"ctas": 2, **SMALL}, 1),
    "a hint": ({"n": 1001, "k": 32, "hint": "stale"}, {"ctas": 2, "start": "hint", **SMALL}, 2),
    "all are candidates": ({"n": 127, "k": 32}, {}, 3),
    "the best first": ({"n": 127, "k": 32, "sort": True, "ragged": False}, {}, 1),
    "1 of 1": ({"n": 1, "k": 1}, {}, 4),
    "2 of 5": ({"n": 5, "k": 2}, {}, 4),
    "more than there are": ({"n": 1000, "k": 2048}, {}, 3),
    "one CTA": ({"n": 2500, "k": 32, "ragged": False}, {"ctas": 1, **SMALL}, 1),
    "half of the capacity": ({"n": 1300, "k": 300, "sort": True}, {"ctas": 3, **SMALL}, 2),
    "as many as there is room for": ({"n": 700, "k": 512}, {"ctas": 2, **SMALL}, 2),
    "16 CTAs": ({"n": 8193, "k": 100}, {"ctas": 16, **SMALL}, 5),
    "more CTAs than groups": ({"n": 600, "k": 5}, {"ctas": 8, **SMALL}, 4),
    "2048 of 8193": ({"n": 8193, "k": 2048}, {"ctas": 4}, 4),
} | {
    f"hint: {hint}": ({"n": 1001, "k": 32, "hint": hint}, {"ctas": 2, "start": "hint", **SMALL}, 4)
    for hint in ("the answer", "random", "repeated", "nothing", "out of range", "anything")
}
FOR_BUGS = [(name, part) for part in range(5) for name in ("searched", "a hint", "all are candidates", "the best first")]
"""Calls, by fifths of their rows."""


@pytest.fixture(scope="session")
def check(suite, emulated_kernels):
    """Runs the kernel on emulated threads on rows: values, indices, and what it counts against the replay."""

    def run(rows, config: dict, every: int = 1, first: int = 0) -> None:
        some = slice(first, None, every)
        lengths, hint = (None if x is None else x[some] for x in (rows.lengths, rows.hint))
        rows = type(rows)(rows.scores[some], rows.k, rows.sort, lengths, hint, rows.labels[some])
        counts = []

        def op(scores, k, *, hint, lengths, sort):
            with emulated_kernels.kernels():
                out = mosaic_gpu.top_k(scores, hint, lengths, k=k, sort=sort, return_counts=True, config=Config(**config))
            counts.append(np.asarray(out[2]))
            return out

        suite.check_rows(suite.on_device(op), rows)
        check_counts(rows, config, counts[0])

    return run


def check_counts(rows, config: dict, counts: np.ndarray) -> None:
    """The kernel's first three columns are what the replay says of each row."""
    batch, n = rows.scores.shape
    lengths = np.full(batch, n) if rows.lengths is None else rows.lengths
    start = {"start": config["start"]} if rows.hint is not None and "start" in config else {"start": "sample"}
    s = plan.shape_of(batch, -(-n // 4) * 4, rows.k, Config(**(config | start)), has_lengths=True, counted=True)
    for i, length in enumerate(lengths):
        expected = replay(s, rows.scores[i, :length], rows.hint[i] if start["start"] == "hint" else None)
        assert (expected.passes, expected.candidates, expected.rounds) == tuple(counts[i, :3]), rows.labels[i]


def call(suite, name: str) -> tuple:
    case, config, every = CALLS[name]
    return suite.rows_of(suite.Case(**case)), config, every


@pytest.mark.parametrize("name", CALLS)
def test_emulated(suite, check, name):
    check(*call(suite, name))


@pytest.mark.parametrize("room", [150, 600, 1100])
def test_shares_that_shared_memory_does_not_hold(suite, check, monkeypatch, room):
    """The rest, or all, is read from global memory in every pass. room: words for the share."""
    config = {"ctas": 1, **SMALL}
    fixed = sum(plan.shape_of(1, 4000, 32, Config(**config), has_lengths=True, counted=True).scratch_words().values()) - 32 * 128
    monkeypatch.setattr(lanes, "SHARED_WORDS", fixed + room)
    s = plan.shape_of(1, 4000, 32, Config(**config), has_lengths=True, counted=True)
    assert s.staged < s.groups
    check(suite.rows_of(suite.Case(3999, 32)), config, 4)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_adversarial_rows_emulated(suite, check, data):
    rows = data.draw(suite.adversarial(((300, 2), (1001, 32), (1400, 300)), 3))
    config = {"ctas": data.draw(st.sampled_from([1, 2, 5])), "start": data.draw(st.sampled_from(plan.STARTS)), **SMALL}
    check(rows, config)


# Planted bugs.


def _rewritten(module, *changes: tuple[str, str]):
    """A module in whose source pieces are replaced."""

    def plant(monkeypatch):
        source = inspect.getsource(module)
        for old, new in changes:
            assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}: write this bug anew"
            source = source.replace(old, new)
        changed = {"__name__": module.__name__, "__file__": module.__file__}
        exec(compile(source, module.__file__, "exec"), changed)
        for name in set(changed) & set(vars(module)) - {"__name__", "__file__", "__builtins__"}:
            monkeypatch.setattr(module, name, changed[name])

    return plant


BUGS = {
    "a score at the threshold is none": _rewritten(search, (">= threshold)", "> threshold)")),
    "the capacity is not looked at": _rewritten(search, ("total > s.capacity\n", "total > 4 * s.capacity\n")),
    "one fewer than k will do": _rewritten(search, ("(total < s.k)", "(total < s.k - 1)")),
    "every CTA keeps its own share of the equal": _rewritten(search, ("s.k - above - start)", "s.k - above)")),
    "of the equal the last": _rewritten(
        search, ("def of_lane(lane, quota, *kept):\n", "def of_lane(lane, quota, *kept):\n                lane = 31 - lane\n")
    ),
    "what lies past the end counts": _rewritten(
        search, ("share.length - share.first * GROUP - i, 0)", "s.row - share.first * GROUP - i, 0)")
    ),
    "places across a group": _rewritten(search, ("group * GROUP + lane * 4 + j", "group * GROUP + lane + j * 32")),
    "candidates in reverse": _rewritten(search, ("(start + i) * 2", "(start + mine - 1 - i) * 2")),
    "every CTA's candidates at the same place": _rewritten(search, ("(start + i) * 2", "i * 2")),
    "NaN above all numbers": _rewritten(search, ("score != score, NAN_KEY", "score != score, 2**31 - 1")),
    "-0 below +0": _rewritten(search, ("lanes.bits(score + 0.0)", "lanes.bits(score)")),
    "totals of two passes at one place": _rewritten(search, ("(turn & 1) * 16", "(turn & 0) * 16")),
    "hinted places need not exist": _rewritten(search, ("(at >= 0) & (at < share.length)", "(at >= -1)")),
    "the secant in signed numbers": _rewritten(search, ("lanes.shift_right(high - low, lanes.i32(1))", "(high - low) >> 1")),
    "ties to the later": _rewritten(choose, ("-1 - i, NO_KEY", "i - most, NO_KEY")),
    "one of the equal too many": _rewritten(choose, ("tie >= last)", "tie >= last - 1)")),
    "a warp forgets those before it": _rewritten(choose, ("before + lanes.popcount(mask & below)", "lanes.popcount(mask & below)")),
    "one is not missing": _rewritten(mosaic_gpu, ("missing, start=kept,", "missing, start=kept + 1,")),
    "a zero has no sign": _rewritten(mosaic_gpu, ("(key == 0) | (key <", "(key <")),
    "a NaN has no bits": _rewritten(mosaic_gpu, ("(key == 0) | (key < search.MINUS_INFINITY_KEY)", "(key == 0)")),
    "the worst first": _rewritten(mosaic_gpu, ("(~keys, jnp", "(keys, jnp")),
    "the length is not looked at": _rewritten(
        mosaic_gpu, ("lanes.load_global(others.pop(0), row)", "lanes.load_global(others.pop(0), row) * 0 + s.row")
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(suite, tools, check, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(functools.partial(_part, suite, check), None, FOR_BUGS)


def _part(suite, check, _, call: tuple[str, int]) -> None:
    name, part = call
    case, config, _ = CALLS[name]
    check(suite.rows_of(suite.Case(**case)), config, 5, part)


def _site() -> str:
    """Where the function that calls our caller stands: the function, and the line in it."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "meet":
        frame = frame.f_back
    return f"{frame.f_code.co_name}+{frame.f_lineno - frame.f_code.co_firstlineno}"


def test_no_barrier_can_be_left_out(suite, tools, check, monkeypatch):
    """Each of them, by the place where it stands."""
    sites, left_out = set(), None

    def watched(barrier):
        def call(*args):
            sites.add(_site())
            if _site() != left_out:
                barrier(*args)

        return call

    for name in ("cta_barrier", "cluster_barrier", "warp_barrier"):
        monkeypatch.setattr(lanes, name, watched(getattr(lanes, name)))
    parts = [call for call in FOR_BUGS if call[0] != "the best first"]
    for call in parts[:6]:
        _part(suite, check, None, call)
    needless = []
    for left_out in sorted(sites):
        try:
            tools.must_fail(functools.partial(_part, suite, check), None, parts)
        except pytest.fail.Exception:
            needless.append(left_out)
    assert len(sites) > 10
    assert not needless
