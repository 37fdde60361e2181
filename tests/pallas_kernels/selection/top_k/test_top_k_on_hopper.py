"""top_k in Mosaic GPU on a Hopper GPU: the very results of a stable sort, for every kind of row and ten thousand
adversarial ones, in production sizes too; whatever the hint and the config; counts as the replay says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.top_k.replay import replay_row
from pallas_kernels.core import dispatch
from pallas_kernels.selection.top_k import plan, top_k
from pallas_kernels.selection.top_k.plan import Config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(top_k, implementation="mosaic_gpu")
SMALL = Config(capacity=512)
"""Few candidates, so that short rows are searched, too."""

HINTED = Config(start="hint")


def test_is_a_stable_sort(suite, case):
    if suite.CASES[case].dtype != "float32":
        pytest.skip("it ranks float32")
    suite.check(KERNEL, case)


# Case of the suite; Config.
CALLS = {
    "searched": ({"n": 8193, "k": 32}, SMALL),
    "searched, the best first": ({"n": 8193, "k": 512, "sort": True}, SMALL),
    "one CTA": ({"n": 20001, "k": 300}, Config(capacity=512, ctas=1)),
    "a cluster of 3": ({"n": 20001, "k": 300}, Config(capacity=512, ctas=3)),
    "a cluster of 16": ({"n": 20001, "k": 300}, Config(capacity=1024, ctas=16)),
    "the largest k": ({"n": 20001, "k": 4096}, None),
    "16K, 2048": ({"n": 16384, "k": 2048, "ragged": False}, None),
    "128K, 32": ({"n": 131072, "k": 32}, None),
    "128K, 2048": ({"n": 131072, "k": 2048}, None),
    "128K, 2048, one CTA": ({"n": 131072, "k": 2048, "ragged": False}, Config(ctas=1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kind(suite, name):
    case, config = CALLS[name]
    suite.check_rows(suite.on_device(functools.partial(KERNEL, config=config)), suite.rows_of(suite.Case(**case)))


@pytest.mark.parametrize(
    "config", [HINTED, Config(start="hint", capacity=512, ctas=4), None], ids=["hint", "hint, few candidates", "sample"]
)
@pytest.mark.parametrize("hint", ["the answer", "stale", "random", "repeated", "nothing", "out of range", "anything"])
def test_the_hint_changes_nothing(suite, hint, config):
    rows = suite.rows_of(suite.Case(9001, 256, hint=hint))
    suite.check_rows(suite.on_device(functools.partial(KERNEL, config=config)), rows)


ADVERSARIAL = ((97, 2), (5000, 32), (20001, 512))


@settings(max_examples=170, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_ten_thousand_adversarial_rows(suite, data):
    rows = data.draw(suite.adversarial(ADVERSARIAL))
    start = data.draw(st.sampled_from(plan.STARTS if rows.hint is not None else ("sample",)))
    suite.check_rows(suite.on_device(functools.partial(KERNEL, config=Config(start=start, capacity=512))), rows)


LONG = ("normal", "lognormal", "three values", "a few above a tie", "some NaN", "zeros and denormals", "the best together", "ascending")


@pytest.mark.parametrize("k", [32, 2048])
@pytest.mark.parametrize(("n", "batch"), [(1 << 20, 8), (1 << 20, 1), (131072, 64), ((1 << 20) - 3, 2), (131072, 1)])
def test_production_sizes(suite, n, batch, k):
    rng = np.random.default_rng(n + batch + k)
    scores = np.stack([np.asarray(suite.KINDS[kind](rng, n, k), np.float32) for kind in (LONG * 8)[:batch]])
    rows = suite.Rows(scores, k, False, None, None, list(LONG * 8)[:batch])
    suite.check_rows(suite.on_device(KERNEL), rows)


@pytest.mark.parametrize("config", [None, HINTED, SMALL], ids=["sample", "hint", "few candidates"])
@pytest.mark.parametrize(("n", "k"), [(8192, 512), (16384, 512), (131072, 512), (1 << 20, 32)])
def test_counts_are_those_of_the_replay(suite, n, k, config):
    rng = np.random.default_rng(n + k)
    scores = np.stack([np.asarray(suite.KINDS[kind](rng, n, k), np.float32) for kind in LONG])
    lengths = rng.integers(0, n + 1, len(LONG)).astype(np.int32)
    hint = suite.make_hint(rng, "stale", suite.oracle(scores, k, lengths, False)[1], n)
    arrays = {"hint": jnp.asarray(hint), "lengths": jnp.asarray(lengths)}
    counts = np.asarray(KERNEL(jnp.asarray(scores), k, **arrays, return_counts=True, config=config)[2])
    s = plan.shape_of(len(LONG), n, k, config or Config(), has_lengths=True, counted=True)
    for i, kind in enumerate(LONG):
        expected = replay_row(s, scores[i, : lengths[i]], hint[i])
        assert (expected.passes, expected.candidates, expected.rounds) == tuple(counts[i, :3]), kind


def test_counting_changes_nothing(suite, tools):
    rows = suite.rows_of(suite.Case(8193, 32))
    arrays = {"lengths": jnp.asarray(rows.lengths), "config": SMALL}
    plain, counted = (KERNEL(jnp.asarray(rows.scores), 32, return_counts=counts, **arrays) for counts in (False, True))
    assert (len(plain), len(counted)) == (2, 3)
    jax.tree.map(tools.assert_same_bits, plain, counted[:2])


@pytest.mark.parametrize("config", [SMALL, None], ids=["searched", "default"])
def test_bits_again_and_again(suite, tools, config):
    """Fifty launches give the same bits, and a row alone those that it gives in company."""
    rows = suite.rows_of(suite.Case(8193, 300))
    op = functools.partial(KERNEL, k=300, config=config)
    scores, lengths = jnp.asarray(rows.scores), jnp.asarray(rows.lengths)
    once = op(scores, lengths=lengths)
    for _ in range(50):
        jax.tree.map(tools.assert_same_bits, once, op(scores, lengths=lengths))
    for row in (0, 7, 20):
        alone = op(scores[row : row + 1], lengths=lengths[row : row + 1])
        jax.tree.map(lambda a, b, row=row: tools.assert_same_bits(a[row : row + 1], b), once, alone)


def test_it_is_picked_here():
    with dispatch.listening() as heard:
        top_k(jnp.zeros((2, 5000)), 32)
    assert heard["top_k"] == "mosaic_gpu"


def test_inside_a_compiled_program(suite):
    rows = suite.rows_of(suite.Case(20001, 32, hint="stale"))

    @jax.jit
    def step(scores, hint, lengths):
        values, indices = KERNEL(scores * 1.0, 32, hint=hint, lengths=lengths, config=HINTED)
        return values, indices

    op = lambda scores, k, *, hint, lengths, sort: step(scores, hint, lengths)  # noqa: E731
    normal = [i for i, label in enumerate(rows.labels) if label.startswith(("normal", "logistic", "three values"))]
    some = suite.Rows(rows.scores[normal], 32, False, rows.lengths[normal], rows.hint[normal], [rows.labels[i] for i in normal])
    suite.check_rows(suite.on_device(op), some)
