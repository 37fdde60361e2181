"""top_k for Hopper without one: the kernel on emulated threads, its counts against the replay, planted bugs; lowered;
compiled.

What only a GPU can tell is in `test_top_k_on_hopper.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import rest_long

from benchmarks.top_k.replay import replay_row
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.indexer_scores import indexer_scores
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.top_k import guesses, mosaic_gpu, plan, search, top_k
from pallas_kernels.selection.top_k.plan import Config

SMALL = {"capacity": 512}

# Case of the suite; Config; every how many-th row.
CALLS = (
    {
        "searched": ({"n": 5001, "k": 32}, {"ctas": 2, **SMALL}, 2),
        "a hint": ({"n": 5001, "k": 32, "hint": "stale"}, {"ctas": 2, "start": "hint", **SMALL}, 3),
        "all are candidates": ({"n": 127, "k": 32}, {}, 5),
        "the best first": ({"n": 127, "k": 32, "sort": True, "ragged": False}, {}, 1),
        "1 of 1": ({"n": 1, "k": 1}, {}, 4),
        "2 of 5": ({"n": 5, "k": 2}, {}, 4),
        "more than there are": ({"n": 1000, "k": 2048}, {}, 3),
        "one CTA": ({"n": 6000, "k": 32, "ragged": False}, {"ctas": 1, **SMALL}, 2),
        "half of the capacity": ({"n": 4100, "k": 300, "sort": True}, {"ctas": 3, **SMALL}, 5),
        "as many as there is room for": ({"n": 700, "k": 512}, {"ctas": 2, **SMALL}, 5),
        "16 CTAs": ({"n": 8193, "k": 100}, {"ctas": 16, **SMALL}, 9),
        "more CTAs than groups": ({"n": 600, "k": 5}, {"ctas": 8, **SMALL}, 4),
        "2048 of 8193": ({"n": 8193, "k": 2048}, {"ctas": 4}, 7),
        "2048 of 128K": ({"n": 131072, "k": 2048}, {}, 24),
    }
    | {
        f"hint: {hint}": ({"n": 1001, "k": 32, "hint": hint}, {"ctas": 2, "start": "hint", **SMALL}, 7)
        for hint in ("the answer", "random", "repeated", "nothing", "out of range", "anything")
    }
    | {"hint: nothing, of more": ({"n": 5001, "k": 32, "hint": "nothing"}, {"ctas": 2, "start": "hint", **SMALL}, 5)}
)
PASSING = "passing through"
CALLS[PASSING] = ({"n": 15999, "k": 32}, {"ctas": 1, **SMALL}, 9)
FOR_BUGS = [(name, part) for part in range(5) for name in ("searched", "a hint", "all are candidates", "the best first", PASSING)]
"""Calls, by fifths of their rows."""


@pytest.fixture(scope="session")
def check(suite, emulated_kernels):
    """Runs the kernel on emulated threads on rows: values, indices, and what it counts against the replay."""

    def run(rows, config: dict, every: int = 1, first: int = 0) -> None:
        some = slice(first, None, every)
        lengths, hint = (None if x is None else x[some] for x in (rows.lengths, rows.hint))
        rows = type(rows)(rows.scores[some], rows.k, rows.sort, lengths, hint, rows.labels[some])
        counts = []

        kernel = paging.implementation("top_k", "mosaic_gpu")

        def op(scores, k, *, hint, lengths, sort):
            with emulated_kernels.kernels():
                out = kernel(scores, k, hint=hint, lengths=lengths, sort=sort, return_counts=True, config=Config(**config))
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
        expected = replay_row(s, rows.scores[i, :length], rows.hint[i] if start["start"] == "hint" else None)
        assert (expected.passes, expected.candidates, expected.rounds) == tuple(counts[i, :3]), rows.labels[i]


def call(suite, name: str) -> tuple:
    case, config, every = CALLS[name]
    return suite.rows_of(suite.Case(**case)), config, every


@pytest.mark.quick("hint: anything", "the best first")
@pytest.mark.parametrize("name", CALLS)
def test_emulated(suite, check, name):
    check(*call(suite, name))


def test_no_hint_changes_the_list_of_a_decode_step(suite, check):
    """Scores of a lightning indexer whose queries drift from step to step, with a page that is missing: the kernel
    starts from the list of the step before, and from noise."""
    rng, batch, pages, size, k = np.random.default_rng(7), 2, 20, 64, 48
    keys = jnp.asarray(rng.standard_normal((batch * pages, size, 16)), jnp.float32)
    table = rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    table[1, 3] = -1
    q, weights = rng.standard_normal((batch, 1, 8, 16)), jnp.asarray(rng.standard_normal((batch, 1, 8)), jnp.float32)
    before, shared = None, []
    for step in range(3):
        q, lengths = q + 0.2 * rng.standard_normal(q.shape), np.array([1270 + step, 700 + step], np.int32)
        scores = np.asarray(indexer_scores(jnp.asarray(q, jnp.float32), weights, keys, jnp.asarray(table), jnp.asarray(lengths)))[:, 0]
        answer = suite.oracle(scores, k, lengths, False)[1]
        noise = rng.integers(-9, 9999, answer.shape).astype(np.int32)
        for hint in (noise,) if before is None else (before, noise):
            rows = suite.Rows(scores, k, False, lengths, hint, [f"step {step}, row {row}" for row in range(batch)])
            check(rows, {"ctas": 2, "start": "hint", **SMALL})
        if before is not None:
            shared += [np.intersect1d(now, then).size / k for now, then in zip(answer, before, strict=True)]
        before = answer
    assert 0.3 < np.mean(shared) < 0.97, "neighbouring steps share some, not all"


@pytest.mark.quick_but("1")
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_shares_that_pass_through_shared_memory(suite, check, monkeypatch, slots):
    """They do not fit beside the candidates. slots: chunks of a warp that there is room for."""
    config = {"ctas": 1, **SMALL}
    s = plan.shape_of(1, 32000, 32, Config(**config), has_lengths=True, counted=True)
    room = choose.BINS * s.ctas + slots * s.turn_words
    monkeypatch.setattr(lanes, "shared_words", lambda: sum(s.small_words.values()) + room)
    assert (s.stays, s.slots) == (False, slots)
    assert s.chunks > slots
    check(suite.rows_of(suite.Case(31999, 32)), config, 9)


@pytest.mark.long
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_adversarial_rows_emulated(suite, check, data):
    rows = data.draw(suite.adversarial(((300, 2), (1001, 32), (1400, 300)), 3))
    start = data.draw(st.sampled_from(plan.STARTS if rows.hint is not None else ("sample",)))
    config = {"ctas": data.draw(st.sampled_from([1, 2, 5])), "start": start, **SMALL}
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
    "half of k will do": _rewritten(search, ("(total < s.k)", "(total < s.k // 2)")),
    "every CTA keeps its own share of the equal": _rewritten(search, ("s.k - above - start)", "s.k - above)")),
    "of the equal the last": _rewritten(
        search, ("def of_lane(lane, quota, *kept):\n", "def of_lane(lane, quota, *kept):\n                lane = 31 - lane\n")
    ),
    "what lies past the end counts": _rewritten(
        search, ("lanes.minimum(share.length - share.first * GROUP, share", "lanes.minimum(s.row - share.first * GROUP, share")
    ),
    "places across a group": _rewritten(search, ("group * GROUP + lane * 4 + j", "group * GROUP + lane + j * 32")),
    "candidates in reverse": _rewritten(search, ("(start + i) * 2", "(start + mine - 1 - i) * 2")),
    "every CTA's candidates at the same place": _rewritten(search, ("(start + i) * 2", "i * 2")),
    "NaN above all numbers": _rewritten(search, ("score != score, NAN_KEY", "score != score, 2**31 - 1")),
    "-0 below +0": _rewritten(search, ("lanes.bits(score + 0.0)", "lanes.bits(score)")),
    "totals of two passes at one place": _rewritten(search, ("(turn & 1) * 16", "(turn & 0) * 16")),
    "hinted places need not exist": _rewritten(guesses, ("(at >= 0) & (at < share.length)", "(at >= -1)")),
    "one more secant": _rewritten(search, ("passes >= MAX_SECANTS - 1", "passes >= MAX_SECANTS")),
    "one arrival is awaited for all": _rewritten(search, ("_arrival(share, n), n // s.slots)", "_arrival(share, n), n * 0)")),
    "fetched once": _rewritten(search, ("lanes.when(again == 1):", "lanes.when(again == 2):")),
    "no chunk follows": _rewritten(search, ("_fetch_chunk(share, n + s.slots)", "_fetch_chunk(share, n + 1000)")),
    "words past the share stay": _rewritten(search, ("            _clear_words(share, slot, left)\n", "            pass\n")),
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


FOUND_BY = {
    "one arrival is awaited for all": PASSING,
    "fetched once": PASSING,
    "no chunk follows": PASSING,
    "hinted places need not exist": "a hint",
    "the worst first": "the best first",
    "a NaN has no bits": "all are candidates",
    "a zero has no sign": "all are candidates",
    "ties to the later": "all are candidates",
    "one of the equal too many": "all are candidates",
    "-0 below +0": "all are candidates",
    "one is not missing": "all are candidates",
    "the length is not looked at": "all are candidates",
}
"""The call that finds a bug soonest; "searched" finds the others."""


@pytest.mark.quick(
    "every CTA's candidates at the same place",
    "totals of two passes at one place",
    "one arrival is awaited for all",
    "fetched once",
    "no chunk follows",
    "words past the share stay",
    "ties to the later",
    "a warp forgets those before it",
    "one is not missing",
    "the worst first",
)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(suite, tools, check, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    first = FOUND_BY.get(bug, "searched")
    tools.must_fail(functools.partial(_part, suite, check), None, sorted(FOR_BUGS, key=lambda call: call[0] != first))


def _part(suite, check, _, call: tuple[str, int]) -> None:
    name, part = call
    case, config, _ = CALLS[name]
    room = _small_room() if name == PASSING else lanes.shared_words()
    with mock.patch.object(lanes, "shared_words", return_value=room):
        check(suite.rows_of(suite.Case(**case)), config, 5, part)


def _small_room() -> int:
    """Words of shared memory in which a share of 16,000 scores has room for a chunk of each warp."""
    s = plan.shape_of(1, 16000, 32, Config(**CALLS[PASSING][1]), has_lengths=True, counted=True)
    return sum(s.small_words.values()) + choose.BINS + s.turn_words


def _site() -> str:
    """Where the function that calls our caller stands: the function, and the line in it."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "meet":
        frame = frame.f_back
    return f"{frame.f_code.co_name}+{frame.f_lineno - frame.f_code.co_firstlineno}"


@pytest.mark.long
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
    for call in parts[:8]:
        _part(suite, check, None, call)
    needless = []
    for left_out in sorted(sites):
        try:
            tools.must_fail(functools.partial(_part, suite, check), None, parts)
        except pytest.fail.Exception:
            needless.append(left_out)
    assert len(sites) > 10
    assert not needless


# For a GPU, without one.


def production(n: int, k: int, batch: int = 1, *, hint: bool = False, lengths: bool = False, **static) -> tuple:
    """(op, arrays, keywords) of a call of the implementation."""
    arrays = {"scores": ((batch, n), "float32")}
    arrays |= {"hint": ((batch, k), "int32")} if hint else {}
    arrays |= {"lengths": ((batch,), "int32")} if lengths else {}
    absent = {name: None for name in ("hint", "lengths") if name not in arrays}
    config = Config(start="hint") if hint else None
    return "top_k", arrays, {"k": k, "sort": False, "return_counts": False, "config": config, **absent, **static}


SIZES = {"8K": 8 << 10, "128K": 128 << 10, "1M": 1 << 20}
PRODUCTION = {f"{k} of {n}, batch {b}": production(SIZES[n], k, b) for n in SIZES for k in (32, 512, 2048) for b in (1, 8, 64)} | {
    "a hint": production(128 << 10, 2048, hint=True),
    "a hint, batch 64, lengths": production(128 << 10, 2048, 64, hint=True, lengths=True),
    "lengths": production(128 << 10, 2048, lengths=True),
    "counts": production(128 << 10, 2048, return_counts=True),
    "the best first": production(128 << 10, 512, sort=True),
    "no multiple of four": production(100_001, 512, 3),
    "a short row": production(5000, 32),
    "two CTAs": production(8196, 512),
    "four CTAs": production(20_000, 2048),
    "eight CTAs": production(32 << 10, 2048),
    "2048 of 1000": production(1000, 2048),
    "1 of 1": production(1, 1),
}


@pytest.mark.parametrize(
    ("batch", "row", "k", "expected"),
    [
        (1, 1000, 32, (4096, 1, 2048)),
        (1, 4096, 32, (4096, 1, 2048)),
        (1, 4100, 32, (8192, 1, 2048)),
        (64, 8192, 32, (8192, 1, 2048)),
        (1, 8192, 2048, (8192, 1, 2048)),
        (1, 8196, 512, (4096, 2, 2048)),
        (1, 16384, 512, (4096, 4, 2048)),
        (1, 20000, 2048, (8192, 4, 2048)),
        (1, 32768, 2048, (8192, 8, 2048)),
        (1, 32772, 2048, (8192, 8, 4096)),
        (1, 65536, 2048, (8192, 16, 4096)),
        (8, 65536, 2048, (8192, 8, 4096)),
        (64, 32768, 2048, (8192, 2, 2048)),
        (1, 1 << 20, 4096, (12288, 16, 8192)),
    ],
)
def test_how_a_row_is_shared_out(batch, row, k, expected):
    """Capacity, CTAs and samples: of at most 4,096 scores and of at most 8,192 all are candidates; a CTA has 4,096 at
    least."""
    s = plan.shape_of(batch, row, k, Config(), has_lengths=False, counted=False)
    assert (s.capacity, s.ctas, s.sample) == expected
    assert s.whole == (row <= 8192)
    assert s.fits


@pytest.mark.parametrize("name", rest_long(PRODUCTION, "512 of 128K, batch 8", "a hint", "the best first", "a short row"))
def test_lowers(cuda, name):
    assert "mosaic_gpu" in cuda.lower(*PRODUCTION[name])


def test_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


# Valid input that is none for this kernel: refused when named, passed by when picked.


def _trace(n: int, k: int, batch: int = 1, dtype: str = "float32", **keywords) -> str:
    """Trace a call of the public op; the name of the implementation that dispatch chose."""
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(top_k, k=k, **keywords), jax.ShapeDtypeStruct((batch, n), jnp.dtype(dtype)))
    return heard["top_k"]


NOT_HERE = {
    "bfloat16": ((4096, 32, 1, "bfloat16"), "it ranks float32 scores, got bfloat16"),
    "float16": ((4096, 32, 1, "float16"), "it ranks float32 scores, got float16"),
    "a large k": ((65536, 5000), "it keeps at most 4,096, got k 5,000"),
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, name):
    call, reason = NOT_HERE[name]
    with pytest.raises(NotImplementedError, match=f"top_k 'mosaic_gpu': {reason}"):
        _trace(*call, implementation="mosaic_gpu")
    assert _trace(*call) == "xla"


@pytest.mark.parametrize("call", [(8192, 32), (131072, 2048, 64), (7, 9), (1 << 20, 512, 8)])
def test_what_it_can_do_is_picked(on_hopper, call):
    assert _trace(*call) == _trace(*call, config=Config()) == _trace(*call, return_counts=True) == "mosaic_gpu"


def test_elsewhere_it_is_refused():
    if "mosaic_gpu" in dispatch.available("top_k"):
        pytest.skip("it runs here")
    with pytest.raises(NotImplementedError, match="no implementation 'mosaic_gpu' on backend"):
        _trace(8192, 32, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"start": "guess"}, "start must be one of sample, hint, got 'guess'"),
        ({"capacity": 500}, "capacity must be a multiple of 512 up to 12288, got 500"),
        ({"sample": 100000}, "sample must be a multiple of .* got 100000"),
        ({"ctas": 17}, "ctas must be 1 to 16, got 17"),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        Config(**config)


@pytest.mark.parametrize(("config", "message"), [("fast", "takes a .*Config, got 'fast'"), (Config(capacity=512), "capacity 512 .* k 600")])
def test_a_config_that_does_not_fit_is_refused(on_hopper, config, message):
    with pytest.raises(ValueError, match=message):
        _trace(8192, 600, config=config)
