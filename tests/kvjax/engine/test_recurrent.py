"""Rows of state: however tokens are cut, dropped and written again, a row holds and gives the bits of those tokens
alone."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_rows
from quick_cases import rest_long
from recurrent_rows import CHUNK, PAGE, SPEC, Sequences, close, expected, given_of, prefill, step, tokens_of

from kvjax.cache import WHOLE, CacheSpec, GroupSpec, IndexSpec, PagedSpec, RecurrentSpec
from kvjax.engine import recurrent

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def tokens():
    return tokens_of(0)


def test_prefill_and_decode_are_the_recurrence(tokens):
    sequences = Sequences(tokens)
    sequences.prefill(0, 70)
    sequences.prefill(1, 31)
    for _ in range(40):
        sequences.decode((True, True), 1)
    for which in (0, 1):
        sequences.prefill(which, len(sequences.outs[which]) + 9)
        close(sequences.outs[which], expected(tokens, which, len(sequences.outs[which])))


@pytest.mark.parametrize(("length", "count", "kept"), [(5, 4, 0), (14, 4, 1), (14, 4, 3), (31, 16, 2), (32, 16, 16), (47, 16, 1)])
def test_dropped_drafts_leave_no_trace(tokens, length, count, kept):
    """Also where they cross the border of a page; the tokens that follow are others."""
    drafted, plain = Sequences(tokens), Sequences(tokens)
    for each in (drafted, plain):
        each.prefill(0, length)
    drafted.decode((True, True), count, kept)
    masked = [np.array(x) for x in tokens]
    for x in masked:
        x[0, length + kept : length + count] = np.nan
    plain.tokens = masked
    plain.decode((True, True), count, kept)
    plain.tokens = tokens
    np.testing.assert_array_equal(drafted.outs[0], plain.outs[0])
    np.testing.assert_array_equal(drafted.continued(0), plain.continued(0))
    close(drafted.outs[0], expected(tokens, 0, len(drafted.outs[0])))


def test_truncation_within_the_open_page_leaves_no_trace(tokens):
    """After prefill, decode and both; to every length that is possible."""
    for length in (33, 40, 47, 48):
        cut, plain = Sequences(tokens), Sequences(tokens)
        for each in (cut, plain):
            each.prefill(0, min(length, 36))
            while len(each.outs[0]) < length:
                each.decode((True, False), 1)
        cut.tokens = tokens_of(7)
        cut.prefill(0, min(length + 1, 48))
        while len(cut.outs[0]) < 48:
            cut.decode((True, True), 1)
        cut.tokens = tokens
        cut.truncate(0, length)
        np.testing.assert_array_equal(cut.continued(0), plain.continued(0))


@pytest.mark.long
def test_a_convolution_of_one_tap_sees_the_token_alone(tokens):
    """As one of two taps does whose first is 0."""
    last, found = recurrent_rows.WEIGHT[:, -1:], []
    for weight in (last, np.pad(last, ((0, 0), (1, 0)))):
        sequences = Sequences(tokens, weight=weight)
        sequences.prefill(0, 37)
        sequences.decode((True, False), 4)
        sequences.prefill(0, 70)
        found.append(sequences.outs[0])
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


@pytest.mark.parametrize("cuts", [(1, 2, 3, 17), (15, 16, 33, 47), (48, 49, 96), (8, 40), tuple(range(1, 100))])
def test_any_cut_gives_the_same_bits(tokens, cuts):
    whole, cut = Sequences(tokens), Sequences(tokens)
    whole.prefill(0, 100)
    for last in (*cuts, 100):
        cut.prefill(0, last)
    np.testing.assert_array_equal(whole.outs[0], cut.outs[0])
    for each in (whole, cut):
        each.decode((True, False), 1)
        each.prefill(0, 140)
    np.testing.assert_array_equal(whole.outs[0], cut.outs[0])


def test_random_histories(tokens):
    """Cuts, steps, drafts and truncations: at every end the bits of a layer in which nothing else was ever run."""
    for seed in range(6):
        random, sequences, record = np.random.default_rng(seed), Sequences(tokens), [[], []]
        for number in range(14):
            which, kind = int(random.integers(2)), random.choice(["prefill", "decode", "draft", "truncate"])
            length = len(sequences.outs[which])
            if length > 120:
                break
            if kind == "prefill":
                more = int(random.integers(1, 30))
                sequences.prefill(which, length + more)
                record[which] += [None] * more
            elif kind == "truncate":
                keep = int(random.integers(length // PAGE * PAGE, length + 1))
                sequences.truncate(which, keep)
                del record[which][keep:]
            else:
                count = 1 if kind == "decode" else 4
                kept = int(random.integers(count + 1))
                sequences.decode([each == which for each in (0, 1)], count, kept)
                record[which] += [(number, count)] * kept
        for which in (0, 1):
            alone = Sequences(tokens)
            for call, group in itertools.groupby(record[which]):
                kept = len(list(group))
                if call is None:
                    alone.prefill(which, len(alone.outs[which]) + kept)
                else:
                    alone.decode([each == which for each in (0, 1)], call[1], kept)
            np.testing.assert_array_equal(sequences.outs[which][: len(record[which])], alone.outs[which])
            np.testing.assert_array_equal(sequences.continued(which), alone.continued(which))


# Mutants.


def _other(name, make):
    """The functions with another one in the place of `recurrent.name`."""

    def run(function):
        jitted = jax.jit(lambda *args: getattr(recurrent, function)(*args))  # traced inside the patch

        def mutant(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(recurrent, name, make(getattr(recurrent, name)))
                return jitted(*args)

        return mutant

    return {"prefill": run("prefill"), "step": run("step")}


MUTANTS = {
    "pages are never folded": _other("catch_up", lambda _: lambda layer, *rest: layer),
    "folds one row too few": _other("delta_fold", lambda fold: lambda k, g, u, start, counts: fold(k, g, u, start, counts - 1)),
    "convolution shifted": _other(
        "causal_convolution", lambda right: lambda x, weight, tail, lengths: right(x, jnp.roll(weight, 1, axis=1), tail, lengths)
    ),
    "convolution forgets what was before": _other(
        "causal_convolution", lambda right: lambda x, weight, tail, lengths: right(x, weight, 0 * jnp.nan_to_num(tail), lengths)
    ),
    "decode sees no row of the page": _other(
        "delta_step", lambda right: lambda *args, **keywords: right(*args[:9], 0 * args[9], args[10], **keywords)
    ),
}


@pytest.mark.parametrize("mutant", rest_long(MUTANTS, "pages are never folded"))
def test_mutant_fails(tokens, mutant):
    sequences = Sequences(tokens, **MUTANTS[mutant])
    sequences.prefill(0, 36)
    for _ in range(14):
        sequences.decode((True, False), 1)
    sequences.prefill(0, 52)
    with pytest.raises(AssertionError):
        close(np.nan_to_num(sequences.outs[0]), expected(tokens, 0, 52))


# Sizes.


def test_a_row_has_the_bytes_that_the_docstring_names():
    spec = RecurrentSpec("recurrent", 16, 32, 128, 128, 4, 128, "bfloat16")
    cache = CacheSpec((GroupSpec("recurrent", WHOLE),), (spec,) * 24)
    found = cache.bytes_per_page("recurrent") / 24
    state = 4 * 32 * 128 * 128
    rows = 143 * (2 * (2 * 16 * 128 + 32 * 128) + 4 * 32 * 128 + 8 * 32)
    assert found == state + rows + 2 * 3 * 8192 + 4
    assert round(state / 1e6, 1) == 2.1
    assert round((found - state) / 1e6, 1) == 4.8
    assert round(24 * found / 1e6) == 165


def test_layers_of_state_are_a_group_that_policies_do_not_see():
    keys = PagedSpec("full", 2, 8, "float32")
    cache = CacheSpec((GroupSpec("recurrent", WHOLE), GroupSpec("full", PAGE)), (SPEC, keys, SPEC))
    assert (cache.paged, cache.row_groups, cache.kv_heads) == ((1,), ("recurrent",), 2)
    layers = cache.empty({"full": 7, "recurrent": 3}, (IndexSpec("bounds", 16),))
    assert [layers[0].start.shape, layers[2].inputs.shape] == [(3, 2, 8, 6), (3, 3 + 31, 28)]
    assert layers[1].pages.num_pages == 7
    assert layers[0].chunk == 8


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: CacheSpec((GroupSpec("recurrent", 16),), (SPEC,)),
            "in no other; layer group 'recurrent'",
        ),
        (lambda: CacheSpec((GroupSpec("full", WHOLE),), (PagedSpec("full", 1, 8, "float32"),)), "in no other; layer group 'full'"),
        (lambda: RecurrentSpec("recurrent", 2, 3, 8, 8, 4, 16, "float32"), "value_heads must be a multiple of key_heads, got 3 and 2"),
        (lambda: RecurrentSpec("recurrent", 1, 1, 8, 8, 0, 16, "float32"), "conv_width of a recurrent layer must be at least 1, got 0"),
        (lambda: RecurrentSpec("recurrent", 1, 1, 8, 0, 4, 16, "float32"), "value_dim of a recurrent layer must be at least 1, got 0"),
    ],
)
def test_specs_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_step_of_too_many_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match="a step writes at most 16 tokens to a recurrent layer with pages of 16, got 17"):
        Sequences(tokens).decode((True, True), 17)


def test_a_step_holds_no_second_copy_of_the_rows():
    """Of a pool far larger than what it works on."""
    layer = jax.eval_shape(lambda: SPEC.empty(4096, WHOLE))
    given = given_of(*(x[:, :1] for x in tokens_of(0, 1)))
    rows, written, active = (jax.ShapeDtypeStruct((2,), dtype) for dtype in (jnp.int32, jnp.int32, bool))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
    assert step.lower(layer, rows, given, written, active).compile().memory_analysis().temp_size_in_bytes < size / 20
    more = given_of(*(np.zeros((2, CHUNK, *x.shape[2:]), np.float32) for x in tokens_of(0, 1)))
    places = [jax.ShapeDtypeStruct((2,), jnp.int32)] * 3
    assert prefill.lower(layer, rows, more, *places).compile().memory_analysis().temp_size_in_bytes < size / 20
