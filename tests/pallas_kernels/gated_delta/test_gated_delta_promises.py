"""What gated_delta promises beside its values: bits, folding, memory, bytes, other backends."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import empty_state, gated_delta

pytestmark = pytest.mark.optimized

XLA = functools.partial(gated_delta, implementation="xla")
SMALL = {"heads": (1, 2), "dims": (16, 7)}
SIZES = (1, 11, 45)
"""The T's of calls of small layers: few, since each is a program."""

# Keywords of `make`, T's of the calls.
SEQUENCES = {
    "small": (SMALL | {"lengths": (45, 45), "counts": (0, 0), "decay": "weak after strong"}, SIZES),
    "nothing is written": (SMALL | {"lengths": (45, 45), "counts": (0, 0), "beta": "zero"}, SIZES),
    "as in a model": (
        {"lengths": (150,), "counts": (0,), "heads": (1, 2), "dims": (128, 128), "chunk": 64, "dtype": "bfloat16"},
        (64, 150),
    ),
}


def start(given):
    """The empty state of the same rows."""
    q, _, v, *_, state, _ = given.arrays
    sizes = {"key_heads": q.shape[2], "value_heads": v.shape[2], "key_dim": q.shape[3], "value_dim": v.shape[3]}
    return empty_state(len(q), **sizes, dtype=v.dtype, chunk=state.chunk)


def cuts(layer, sequence, op, seeds):
    """Whether each random cut gives the bits of one call; the first is token by token."""
    spec, sizes = SEQUENCES[sequence]
    given = layer.make(**spec)
    rows, total = given.arrays[2].shape[:2]
    arrays = [np.asarray(x) for x in given.arrays[:5]]
    whole = layer.run_in_pieces(op, arrays, start(given), [[total] * rows], sizes)
    pieces = [[[1] * rows] * total, *(layer.random_pieces(seed, total, rows, sizes) for seed in range(seeds))]
    return [layer.same_bits(whole, layer.run_in_pieces(op, arrays, start(given), each, sizes)) for each in pieces]


@pytest.mark.parametrize(("sequence", "seeds"), [("small", 10), ("nothing is written", 4), ("as in a model", 2)])
def test_any_cut_gives_the_same_bits(layer, sequence, seeds):
    """Of outputs and of states, ragged pieces and empty ones included."""
    scale = layer.make(**SEQUENCES[sequence][0]).keywords["scale"]
    assert all(cuts(layer, sequence, functools.partial(XLA, form="chunked", scale=scale), seeds))


def _chunks_from_the_call(*arrays, **keywords):
    return XLA(*arrays, **keywords, fold=arrays[-1] > 0)


def _minus_zero(*arrays, **keywords):
    out, state = XLA(*arrays, **keywords)
    return jnp.where((out == 0) & (arrays[-1] < 45)[:, None, None, None], -0.0, out), state


@pytest.mark.parametrize(("sequence", "wrong"), [("small", _chunks_from_the_call), ("nothing is written", _minus_zero)])
def test_a_cut_that_shows_is_found(layer, sequence, wrong):
    scale = layer.make(**SEQUENCES[sequence][0]).keywords["scale"]
    assert not all(cuts(layer, sequence, functools.partial(wrong, form="chunked", scale=scale), 1))


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_bits_depend_on_the_row_alone(layer, form):
    """Run twice; beside other rows, longer, shorter and of NaN; whatever stands beyond a row's length."""
    given = layer.make(**SMALL, lengths=(11, 9), counts=(3, 7) if form == "chunked" else (0, 0), form=form)
    *new, state, lengths = given.arrays
    op = functools.partial(XLA, **given.keywords)
    once = op(*new, state, lengths)
    assert layer.same_bits(once, op(*new, state, lengths))
    other = jnp.arange(2) != 1

    def changed(x, value):
        return jnp.where(other.reshape(-1, *[1] * (x.ndim - 1)), value, x)

    for value, length in ((np.nan, 11), (0.0, 0), (-1.0, 1)):
        rows = [changed(x, value) for x in new]
        found = op(*rows, jax.tree.map(lambda x: changed(x, 0), state), jnp.where(other, length, lengths))
        assert layer.same_bits(*(jax.tree.map(lambda x: np.asarray(x)[1], each) for each in (once, found)))
    assert layer.same_bits(once, op(*(jnp.where(jnp.isnan(x), 7, x) for x in new), state, lengths))


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_dropped_drafts_were_never_there(layer, form):
    """A call that is repeated for fewer tokens: the bits of a call that has NaN in place of the others."""
    given = layer.make(**SMALL, lengths=(11, 11), counts=(6, 0) if form == "chunked" else (0, 0), form=form)
    *new, state, _ = given.arrays
    op = functools.partial(XLA, **given.keywords)
    for kept in (0, 1, 9):
        lengths = jnp.full(2, kept, jnp.int32)
        dropped = [jnp.where((jnp.arange(11) < kept).reshape(1, 11, *[1] * (x.ndim - 2)), x, np.nan) for x in new]
        found = op(*new, state, lengths)
        assert layer.same_bits(found, op(*dropped, state, lengths))
        if kept == 0:
            assert layer.same_bits(found[1], state)


def test_decode_in_any_cut(layer):
    """The recurrent form, too, gives the same bits here for every T; the engine is promised equal T's alone."""
    given = layer.make(**SMALL, lengths=(11, 11), counts=(0, 0), form="recurrent")
    arrays = [np.asarray(x) for x in given.arrays[:5]]
    op, state = functools.partial(XLA, **given.keywords), start(given)
    whole = layer.run_in_pieces(op, arrays, state, [[11, 11]], (11,))
    assert layer.same_bits(whole, layer.run_in_pieces(op, arrays, state, [[1, 1]] * 11, (1, 11)))


def test_prefill_fold_decode_and_prefill_again(layer):
    """Values against float64; folding with the last tokens or by a call without tokens gives the same bits."""
    given = layer.make(**SMALL, lengths=(30, 30), counts=(0, 0))
    arrays, scale = [np.asarray(x) for x in given.arrays[:5]], given.keywords["scale"]
    chunked = functools.partial(XLA, form="chunked", scale=scale)
    lengths = jnp.array([11, 8], jnp.int32)

    def take(first, stops):
        """Tokens [first, stop) of each row, 11 wide."""
        wide = [np.zeros((2, 11, *x.shape[2:]), x.dtype) for x in arrays]
        for row, (begin, stop) in enumerate(zip(first, stops, strict=True)):
            for x, of in zip(wide, arrays, strict=True):
                x[row, : stop - begin] = of[row, begin:stop]
        return [jnp.asarray(x) for x in wide]

    first = take((0, 0), (11, 8))
    out, state = chunked(*first, start(given), lengths, fold=jnp.ones(2, bool))
    plain = chunked(*first, start(given), lengths)[1]
    assert plain.count.tolist() == [3, 0]
    assert layer.same_bits(state, chunked(*first, plain, jnp.zeros(2, jnp.int32), fold=jnp.ones(2, bool))[1])
    assert layer.same_bits(plain, chunked(*first, plain, jnp.zeros(2, jnp.int32))[1])
    outs = [[np.asarray(out)[row, :length]] for row, length in enumerate((11, 8))]
    done = [11, 8]
    for form, count in (("recurrent", 3), ("chunked", 11)):
        piece = take(done, [n + count for n in done])
        out, state = XLA(*piece, state, jnp.full(2, count, jnp.int32), form=form, scale=scale)
        done = [n + count for n in done]
        for row in range(2):
            outs[row].append(np.asarray(out)[row, :count])
    state = jax.tree.map(np.asarray, state)
    for row in range(2):
        of_row = [x[row, : done[row]] for x in arrays]
        wanted, states, size = layer.recurrence(*of_row, np.zeros(state.border.shape[1:]), scale=scale)
        assert (np.linalg.norm(np.concatenate(outs[row]) - wanted, axis=-1) <= 1e-6 * size).all()
        last = states[done[row] - int(state.count[row])]
        assert np.linalg.norm(state.border[row] - last) <= 1e-6 * np.linalg.norm(last)


def test_a_tail_that_was_not_folded_is_nan_in_decode(layer):
    given = layer.make(**SMALL, lengths=(1, 1), counts=(0, 2), form="recurrent")
    out, state = XLA(*given.arrays, **given.keywords)
    for found in (np.asarray(out), np.asarray(state.border)):
        assert np.isfinite(found[0]).all()
        assert np.isnan(found[1]).all()


def test_a_state_has_the_bytes_that_the_docstring_names():
    state = jax.eval_shape(lambda: empty_state(1, key_heads=16, value_heads=32, key_dim=128, value_dim=128, dtype="bfloat16"))
    sizes = {name: x.size * x.dtype.itemsize for name, x in vars(state).items()}
    assert state.chunk == 64
    assert sizes["border"] == 4 * 32 * 128 * 128 == 2_097_152
    assert sizes["k"] + sizes["v"] == 2 * 63 * (16 * 128 + 32 * 128)
    assert sizes["g"] + sizes["beta"] == 8 * 63 * 32
    assert round((sum(sizes.values()) - sizes["border"]) / 1e6, 2) == 0.79


def _abstract(tokens, batch=1):
    shape = jax.ShapeDtypeStruct
    q, v, gate = ((batch, tokens, heads, *dims) for heads, *dims in ((16, 128), (32, 128), (32,)))
    arrays = [shape(q, "bfloat16"), shape(q, "bfloat16"), shape(v, "bfloat16"), shape(gate, "float32"), shape(gate, "float32")]
    state = jax.eval_shape(lambda: empty_state(batch, key_heads=16, value_heads=32, key_dim=128, value_dim=128, dtype="bfloat16"))
    return [*arrays, state, shape((batch,), "int32")]


def test_memory_is_a_chunk_and_the_outputs():
    """And the state is updated in place."""
    tokens = 2048
    op = jax.jit(functools.partial(XLA, form="chunked", scale=0.1), donate_argnums=5)
    memory = op.lower(*_abstract(tokens)).compile().memory_analysis()
    outputs = (tokens + 127) * 32 * 128 * 2
    of_a_chunk = 4 * 32 * (4 * 64 * 64 + 8 * 64 * 128) + 4 * 32 * 128 * 128
    assert memory.temp_size_in_bytes <= outputs + of_a_chunk
    assert memory.alias_size_in_bytes >= 2_097_152 + 790_000


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_lowers_for_other_backends(platform, form):
    op = jax.jit(functools.partial(XLA, form=form, scale=0.1))
    assert op.trace(*_abstract(16)).lower(lowering_platforms=(platform,)).as_text()
