"""The suite of top_k: implementations against a stable sort by numpy, the definition against lax.top_k too, mutants,
refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.core import dispatch
from pallas_kernels.selection.top_k import keys, top_k
from pallas_kernels.selection.top_k.plan import Config

XLA = functools.partial(top_k, implementation="xla")
IMPLEMENTATIONS = {"xla": XLA, "reference": functools.partial(top_k, implementation="reference")}
"""What does every input of this suite; the kernel for Hopper has suites of its own beside it."""


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_is_a_stable_sort(suite, name, case):
    suite.check(IMPLEMENTATIONS[name], case)


ADVERSARIAL = ((97, 2), (97, 32), (1000, 512))


@settings(max_examples=160, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_ten_thousand_adversarial_rows(suite, data):
    suite.check_rows(suite.on_device(XLA), data.draw(suite.adversarial(ADVERSARIAL)))


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_adversarial_rows_by_definition(suite, data):
    suite.check_rows(suite.on_device(IMPLEMENTATIONS["reference"]), data.draw(suite.adversarial(ADVERSARIAL[:2])))


@pytest.mark.parametrize("kind", ["normal", "three values", "a tie across the last place", "descending", "Weibull", "infinities"])
def test_the_definition_is_lax_top_k(suite, kind):
    """Where that is defined alike: no NaN, no -0, and no denormals, which it takes for 0 here."""
    scores = jnp.asarray(suite.KINDS[kind](np.random.default_rng(3), 500, 40), jnp.float32)[None]
    values, indices = IMPLEMENTATIONS["reference"](scores, 40, sort=True)
    expected_values, expected = jax.lax.top_k(scores, 40)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, expected_values)


def test_by_hand():
    scores = jnp.asarray([[np.nan, -np.inf, 0.0, 2.0, -0.0, 2.0, np.inf, 9.0]])
    lengths = jnp.asarray([7], jnp.int32)
    assert XLA(scores, 4, lengths=lengths)[1].tolist() == [[2, 3, 5, 6]]
    assert XLA(scores, 4, lengths=lengths, sort=True)[1].tolist() == [[6, 3, 5, 2]]
    values, indices = XLA(scores, 9, lengths=lengths, sort=True)
    assert indices.tolist() == [[6, 3, 5, 2, 4, 1, 0, -1, -1]]
    np.testing.assert_array_equal(values, [[np.inf, 2, 2, 0, 0, -np.inf, np.nan, -np.inf, -np.inf]])
    assert np.signbit(values[0, 4])
    assert XLA(scores, 9, lengths=lengths)[1].tolist() == [[0, 1, 2, 3, 4, 5, 6, -1, -1]]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_company(suite, tools, name):
    rows, op = suite.rows_of(suite.CASES["32 of 127"]), suite.on_device(IMPLEMENTATIONS[name])
    once = op(rows.scores, 32, hint=None, lengths=rows.lengths, sort=False)
    jax.tree.map(tools.assert_same_bits, once, op(rows.scores, 32, hint=None, lengths=rows.lengths, sort=False))
    some = np.r_[5:9, 100:104]
    alone = op(rows.scores[some], 32, hint=None, lengths=rows.lengths[some], sort=False)
    jax.tree.map(lambda a, b: tools.assert_same_bits(np.asarray(a)[some], b), once, alone)


def test_inside_a_compiled_program(suite, tools):
    rows = suite.rows_of(suite.CASES["hint: stale"])
    arrays = [jnp.asarray(x) for x in (rows.scores, rows.hint, rows.lengths)]
    op = jax.jit(lambda scores, hint, lengths: XLA(scores, 32, hint=hint, lengths=lengths))
    jax.tree.map(tools.assert_same_bits, op(*arrays), XLA(arrays[0], 32, hint=arrays[1], lengths=arrays[2]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_order_as_scores_do(suite, dtype):
    """All pairs of some special values, their neighbours, and random bits; above the key of nothing."""
    words, width = ("int32", 32) if dtype == "float32" else ("int16", 16)
    with np.errstate(over="ignore"):
        special = np.asarray(jnp.asarray(suite.SPECIAL, dtype)).view(words)
    random = np.random.default_rng(0).integers(-(2 ** (width - 1)), 2 ** (width - 1), 300)
    bits = np.concatenate([special, special + 1, special - 1, random])
    scores = jax.lax.bitcast_convert_type(jnp.asarray(bits.astype(words)), dtype)
    key = np.asarray(keys.key_of(scores), np.int64)
    with np.errstate(invalid="ignore"):
        x = np.asarray(scores).astype(np.float64)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(key[number][:, None] < key[number], x[number][:, None] < x[number])
    assert set(key[~number]) == {keys.NAN_KEY}
    assert keys.NO_KEY < keys.NAN_KEY < key[number].min()
    np.testing.assert_array_equal(key, keys.key_of(scores.astype(jnp.float32)) if dtype == "float16" else key)


# Mutants: what an implementation gets wrong, expressed on its keys, its arguments or its results.


def _by_keys(change):
    """Ranking by changed keys. change: (keys, scores, hint) -> keys."""

    def op(scores, k, *, hint=None, lengths=None, sort=False):
        key = change(keys.key_of(scores), scores, hint)
        lengths = jnp.full(len(scores), scores.shape[1]) if lengths is None else lengths
        key = jnp.where(jnp.arange(scores.shape[1]) < lengths[:, None], key, keys.NO_KEY)
        key = jnp.pad(key, ((0, 0), (0, max(k - scores.shape[1], 0))), constant_values=keys.NO_KEY)
        best, indices = jax.lax.top_k(key, k)
        indices = jnp.where(best == keys.NO_KEY, 2**31 - 1, indices)
        indices = indices if sort else jnp.sort(indices)
        indices = jnp.where(indices == 2**31 - 1, -1, indices)
        return keys.values_at(scores, indices), indices

    return op


def _ties_to_the_higher(scores, k, *, hint=None, lengths=None, sort=False):
    """Places count down from the top: of equal keys the later one comes first."""
    lengths = jnp.full(len(scores), scores.shape[1], jnp.int32) if lengths is None else lengths
    turned = jnp.take_along_axis(scores, jnp.maximum(lengths[:, None] - 1 - jnp.arange(scores.shape[1]), 0), 1)
    indices = XLA(turned, k, lengths=lengths, sort=True)[1]
    indices = jnp.where(indices < 0, 2**31 - 1, lengths[:, None] - 1 - indices)
    indices = indices if sort else jnp.sort(indices)
    indices = jnp.where(indices == 2**31 - 1, -1, indices)
    return keys.values_at(scores, indices), indices


def _results(change):
    """change: (values, indices, scores) -> values, indices."""
    return lambda scores, k, **keywords: change(*XLA(scores, k, **keywords), scores)


def _lengths(change):
    """change: (lengths, scores of a row) -> lengths."""

    def op(scores, k, *, lengths=None, **keywords):
        lengths = None if lengths is None else jnp.clip(change(lengths, scores.shape[1]), 0, scores.shape[1])
        return XLA(scores, k, lengths=lengths, **keywords)

    return op


def _fewer(scores, k, **keywords):
    """One result too few."""
    keywords["hint"] = None
    values, indices = XLA(scores, max(k - 1, 1), **keywords)
    pad = ((0, 0), (0, k - values.shape[1]))
    return jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(indices, pad, constant_values=-1)


def _more(scores, k, **keywords):
    """The first k, in order of place, of one too many."""
    values, indices = XLA(scores, k + 1, **(keywords | {"hint": None}))
    return values[:, :k], indices[:, :k]


def _one_pass_of_bits(scores, k, *, hint=None, lengths=None, sort=False):
    return XLA(scores.astype(jnp.bfloat16), k, lengths=lengths, sort=sort)


def _hinted_first(key, scores, hint):
    if hint is None:
        return key
    places = jnp.where((hint < 0) | (hint >= scores.shape[1]), scores.shape[1], hint)
    hinted = jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(jnp.zeros(scores.shape, bool), places)
    return jnp.where(hinted & (key < 2**31 - 2), key + 1, key)


def _only_the_hinted(key, scores, hint):
    """A threshold from the hint that is never verified."""
    if hint is None:
        return key
    valid = (hint >= 0) & (hint < scores.shape[1])
    of_hint = jnp.where(valid, jnp.take_along_axis(key, jnp.clip(hint, 0, scores.shape[1] - 1), 1), 2**31 - 1).min(1, keepdims=True)
    return jnp.where(key >= of_hint, key, keys.NO_KEY)


def _as_nan(value):
    return lambda key, scores, _: jnp.where(key == keys.NAN_KEY, value, key)


def _bits(scores):
    return jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)


MUTANTS = {
    "ties to the higher index": _ties_to_the_higher,
    "NaN above all numbers": _by_keys(_as_nan(2**31 - 1)),
    "NaN equals -inf": _by_keys(_as_nan(-(2**31) + 0x7FFFFF)),
    "NaN is nothing": _by_keys(_as_nan(keys.NO_KEY)),
    "NaN is 0": _by_keys(_as_nan(0)),
    "NaNs by their bits": _by_keys(lambda key, scores, _: _bits(scores) ^ ((_bits(scores) >> 31) & 0x7FFFFFFF)),
    "-0 below +0": _by_keys(lambda key, scores, _: jnp.where(_bits(scores) == -(2**31), -1, key)),
    "denormals are 0": _by_keys(lambda key, scores, _: jnp.where(jnp.abs(key) < 0x00800000, 0, key)),
    "-inf is nothing": _by_keys(lambda key, scores, _: jnp.where(key == -(2**31) + 0x7FFFFF, keys.NO_KEY, key)),
    "the last bit is not looked at": _by_keys(lambda key, scores, _: key & -2),
    "the smallest": _by_keys(lambda key, scores, _: -1 - jnp.maximum(key, keys.NAN_KEY)),
    "negative floats the wrong way round": _by_keys(lambda key, scores, _: jnp.maximum(_bits(scores), keys.NAN_KEY)),
    "the hinted first among equals": _by_keys(_hinted_first),
    "nothing below the worst that is hinted": _by_keys(_only_the_hinted),
    "one too few": _fewer,
    "one too many": _more,
    "length ignored": _lengths(lambda lengths, n: jnp.full_like(lengths, n)),
    "length one short": _lengths(lambda lengths, n: lengths - 1),
    "length one long": _lengths(lambda lengths, n: lengths + 1),
    "the neighbour's length": _lengths(lambda lengths, n: jnp.roll(lengths, 1)),
    "index one off": _results(lambda values, indices, _: (values, jnp.where(indices >= 0, indices + 1, -1))),
    "values by rank, indices by place": lambda scores, k, **rest: (XLA(scores, k, **(rest | {"sort": True}))[0], XLA(scores, k, **rest)[1]),
    "never in order of rank": lambda scores, k, **rest: XLA(scores, k, **(rest | {"sort": False})),
    "always in order of rank": lambda scores, k, **rest: XLA(scores, k, **(rest | {"sort": True})),
    "the missing first": _results(lambda values, indices, _: (values[:, ::-1], indices[:, ::-1])),
    "0 instead of -1": _results(lambda values, indices, _: (values, jnp.maximum(indices, 0))),
    "0 where there is nothing": _results(lambda values, indices, _: (jnp.where(indices < 0, 0, values), indices)),
    "NaN where there is nothing": _results(lambda values, indices, _: (jnp.where(indices < 0, jnp.nan, values), indices)),
    "another NaN": _results(lambda values, indices, _: (jnp.where(jnp.isnan(values), jnp.nan, values), indices)),
    "+0 for -0": _results(lambda values, indices, _: (jnp.where(values == 0, jnp.abs(values), values), indices)),
    "a result twice": _results(lambda values, indices, _: (values.at[:, -1].set(values[:, 0]), indices.at[:, -1].set(indices[:, 0]))),
    "the neighbour's row": _results(lambda values, indices, _: (jnp.roll(values, 1, 0), jnp.roll(indices, 1, 0))),
    "zeros": _results(lambda values, indices, _: (values * 0, indices * 0)),
}


@pytest.mark.quick_but("the hinted first among equals")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(suite, tools, mutant):
    tools.must_fail(suite.check, MUTANTS[mutant], suite.CASES)


def test_ranking_by_unchanged_keys_passes(suite):
    """Else the mutants by keys would fail whatever they change."""
    for case in ("32 of 127", "2048 of 1000", "hint: anything", "float16"):
        suite.check(_by_keys(lambda key, scores, hint: key), case)


# What is refused.

BAD = {
    "no rows": ({"scores": (8,)}, {}, r"takes scores \[B, N\], no axis empty; got scores float32\[8\]"),
    "empty rows": ({"scores": (2, 0)}, {}, "no axis empty"),
    "no batch": ({"scores": (0, 8), "lengths": (0,)}, {}, "no axis empty"),
    "k of none": ({}, {"k": 0}, "k must be a positive int, got 0"),
    "k no int": ({}, {"k": 2.0}, r"k must be a positive int, got 2\.0"),
    "hint too narrow": ({"hint": (2, 2)}, {}, r"hint must be int32 \[2, 3\], a place for each of the k results; got .* hint int32\[2, 2\]"),
    "hint of another batch": ({"hint": (3, 3)}, {}, r"hint must be int32 \[2, 3\]"),
    "lengths of another batch": ({"lengths": (3,)}, {}, r"lengths must be int32 \[2\], one per row of scores"),
    "unknown implementation": ({}, {"implementation": "cub"}, "'cub' of top_k is unknown; there are mosaic_gpu, xla, reference"),
}


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_a_config_is_for_the_kernel(name):
    with pytest.raises(ValueError, match=f"implementation '{name}' of top_k takes no config, got 'fast'"):
        top_k(jnp.zeros((2, 8)), 3, config="fast", implementation=name)


def test_what_the_kernel_refuses_is_told_beside_a_config(monkeypatch):
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: ("mosaic_gpu", "xla", "reference"))
    with pytest.raises(NotImplementedError, match=r"it ranks float32 scores, got bfloat16.*it takes no config"):
        top_k(jnp.zeros((2, 8), jnp.bfloat16), 3, config=Config())


def test_k_may_be_an_integer_of_numpy():
    with pytest.raises(ValueError, match="k must be a positive int, got True"):
        top_k(jnp.zeros((2, 8)), True)
    assert top_k(jnp.zeros((2, 8)), np.int64(3))[1].shape == (2, 3)


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_refused(name):
    shapes, keywords, message = BAD[name]
    shapes = {"scores": (2, 8), "lengths": (2,), "hint": (2, 3)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.float32 if name == "scores" else jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        top_k(**arrays, **({"k": 3} | keywords))


@pytest.mark.parametrize(("name", "dtype"), [("scores", "int32"), ("scores", "float8_e4m3fn"), ("hint", "int16"), ("lengths", "uint32")])
def test_wrong_dtype_is_refused(name, dtype):
    arrays = {"scores": jnp.zeros((2, 8)), "hint": jnp.zeros((2, 3), jnp.int32), "lengths": jnp.zeros(2, jnp.int32)}
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(ValueError, match=f"{name} must be .*{name} {dtype}"):
        top_k(**arrays, k=3)


@pytest.mark.parametrize("lengths", [[3, 9], [-1, 3]])
def test_lengths_that_can_be_seen_are_checked(lengths):
    with pytest.raises(ValueError, match=f"between 0 and 8, the scores of a row; got {min(lengths)} to {max(lengths)}"):
        top_k(jnp.zeros((2, 8)), 3, lengths=np.array(lengths, np.int32))


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_counts_are_not_theirs(name):
    with pytest.raises(NotImplementedError, match=f"top_k '{name}': it has no counts to return"):
        top_k(jnp.zeros((2, 8)), 3, return_counts=True, implementation=name)


def test_counts_that_nothing_here_has(monkeypatch):
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: ("xla", "reference"))
    with pytest.raises(NotImplementedError, match=r"top_k has no implementation here for scores float32\[2, 8\] .*: not xla: it has no"):
        top_k(jnp.zeros((2, 8)), 3, return_counts=True)
