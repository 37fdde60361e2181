"""What gated_delta promises beside its values: bits, dropped tokens, memory, bytes, other backends."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent.gated_delta import delta_fold, delta_page, delta_step

pytestmark = pytest.mark.bits

SMALL = {"heads": (1, 2), "dims": (16, 7)}
# Keywords of `tokens`; rows of a page, tokens of an inner chunk.
SEQUENCES = {
    "small": (SMALL | {"decay": "weak after strong"}, 24, 8),
    "nothing is written": (SMALL | {"beta": "zero"}, 24, 8),
    "as in a model": ({"heads": (1, 2), "dims": (128, 128), "dtype": "bfloat16"}, 128, 64),
}


def fold(page, given, corrections, count):
    """The state after `count` tokens."""
    counts = jnp.full(len(corrections), count, jnp.int32)
    return delta_fold(jnp.asarray(given["k"]), jnp.asarray(given["g"]), corrections, jnp.asarray(given["start"]), counts)


def cut_at(layer, sequence, cuts, page=delta_page):
    """A page of two rows in pieces: outputs and corrections of every token. What a call may not read is NaN."""
    keywords, rows, chunk = SEQUENCES[sequence]
    given = layer.tokens(3, 2, rows, **keywords)
    start, corrections = jnp.asarray(given["start"]), jnp.full((2, rows, *given["v"].shape[2:]), jnp.nan, jnp.float32)
    out, scale = 0, given["k"].shape[3] ** -0.5
    for first, last in zip((0, *cuts), (*cuts, rows), strict=True):
        bounds = {"q": first, "k": 0, "v": first // chunk * chunk, "g": 0, "beta": first // chunk * chunk}
        there = {name: (np.arange(rows) >= bound) & (np.arange(rows) < last) for name, bound in bounds.items()}
        arrays = [np.where(there[name].reshape(1, -1, *[1] * (given[name].ndim - 2)), given[name], np.nan) for name in there]
        arrays = [jnp.asarray(x.astype(given[name].dtype)) for x, name in zip(arrays, there, strict=True)]
        counts, lengths = jnp.full(2, first, jnp.int32), jnp.full(2, last - first, jnp.int32)
        found, corrections = page(*arrays, corrections, start, counts, lengths, scale=scale, chunk=chunk)
        out += found
    return out, corrections


@pytest.mark.quick_but("as in a model-2")
@pytest.mark.parametrize(("sequence", "seeds"), [("small", 10), ("nothing is written", 4), ("as in a model", 2)])
def test_any_cut_gives_the_same_bits(layer, sequence, seeds):
    """Of outputs and corrections; the first cut is token by token."""
    rows = SEQUENCES[sequence][1]
    whole = cut_at(layer, sequence, ())
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        cuts = np.sort(random.choice(np.arange(1, rows), rows - 1 if seed == 0 else random.integers(1, 6), replace=False))
        assert layer.same_bits(whole, cut_at(layer, sequence, tuple(cuts.tolist())))


def _known_ones_stay(q, k, v, g, beta, corrections, start, counts, lengths, *, scale, chunk):
    """A page whose old tokens are not computed again: the new ones are solved for with the corrections that are
    known."""
    at = counts[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)
    new = [jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(x, at) for x in (q, k, v, g, beta)]
    out, found = delta_step(*new, k, g, corrections, start, counts, lengths, scale=scale)
    back = jnp.arange(k.shape[1], dtype=jnp.int32) - counts[:, None]
    out, found = (jax.vmap(lambda x, at: jnp.where((at >= 0)[:, None, None], x.at[at].get(mode="clip"), 0))(x, back) for x in (out, found))
    return out, jnp.where((back >= 0)[..., None, None], found, corrections)


def _minus_zero(*arrays, **keywords):
    out, corrections = delta_page(*arrays, **keywords)
    return out, jnp.where((corrections == 0) & (arrays[-1] < 24)[:, None, None, None], -0.0, corrections)


@pytest.mark.parametrize(("sequence", "wrong"), [("small", _known_ones_stay), ("nothing is written", _minus_zero)])
def test_a_cut_that_shows_is_found(layer, sequence, wrong):
    assert not layer.same_bits(cut_at(layer, sequence, ()), cut_at(layer, sequence, (3, 13), wrong))


@pytest.mark.parametrize("form", ["page", "step", "fold"])
def test_bits_depend_on_the_row_alone(layer, form):
    """Run twice; beside other rows, longer, shorter and of NaN; whatever stands where nothing is read."""
    given = layer.make(form, **SMALL, counts=(3, 7), lengths=(5, 4))
    op = functools.partial({"page": delta_page, "step": delta_step, "fold": delta_fold}[form], **given.keywords)
    once = op(*given.arrays)
    assert layer.same_bits(once, op(*given.arrays))
    first = jnp.arange(2) == 0

    def changed(x, value):
        return jnp.where(first.reshape(-1, *[1] * (x.ndim - 1)), value, x)

    for value, count in ((np.nan, 15), (0.0, 0), (-1.0, 1)):
        rows = [changed(x, count if x.dtype == jnp.int32 else value) for x in given.arrays]
        assert layer.same_bits(*(jax.tree.map(lambda x: np.asarray(x)[1], each) for each in (once, op(*rows))))
    filled = op(*(jnp.where(jnp.isnan(x), 7, x) for x in given.arrays))
    for found, again in zip(jax.tree.leaves(once), jax.tree.leaves(filled), strict=True):
        assert layer.same_bits(jnp.where(jnp.isnan(found), 0, found), jnp.where(jnp.isnan(found), 0, again))


def test_drafts_do_not_show_in_the_tokens_before_them(layer):
    """Of a step: each token has the bits that it has where NaN follows, or where the others are not there."""
    given = layer.make("step", **SMALL, counts=(3, 7), lengths=(8, 8))
    *arrays, lengths = given.arrays
    op = functools.partial(delta_step, **given.keywords)
    whole = op(*arrays, lengths)
    for kept in (0, 1, 5):
        there = jnp.arange(8) < kept
        dropped = [jnp.where(there.reshape(1, 8, *[1] * (x.ndim - 2)), x, np.nan) for x in arrays[:5]]
        short = op(*dropped, *arrays[5:], jnp.full(2, kept, jnp.int32))
        nan = op(*dropped, *arrays[5:], lengths)
        for found in (short, nan):
            assert layer.same_bits([x[:, :kept] for x in whole], [x[:, :kept] for x in found])
        assert all((np.asarray(x)[:, kept:] == 0).all() for x in short)


def test_decode_one_by_one_or_as_drafts(layer):
    """Equal but for rounding: bits are promised for equal T's."""
    given = layer.make("step", **SMALL, counts=(3, 7), lengths=(8, 8))
    q, k, v, g, beta, page_k, page_g, corrections, start, counts, _ = given.arrays
    whole = delta_step(*given.arrays, **given.keywords)
    rows = jnp.arange(2)
    for at in range(8):
        token = [x[:, at : at + 1] for x in (q, k, v, g, beta)]
        out, new = delta_step(*token, page_k, page_g, corrections, start, counts, jnp.ones(2, jnp.int32), **given.keywords)
        np.testing.assert_allclose(out[:, 0], whole[0][:, at], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new[:, 0], whole[1][:, at], rtol=1e-5, atol=1e-6)
        page_k, page_g, corrections = (
            x.at[rows, counts].set(y[:, 0]) for x, y in ((page_k, k[:, at:]), (page_g, g[:, at:]), (corrections, new))
        )
        counts = counts + 1


def test_prefill_decode_and_prefill_again(layer):
    """Values against float64, through pages, steps and folds."""
    given = layer.tokens(5, 2, 24, **SMALL)
    arrays = [jnp.asarray(given[name]) for name in ("q", "k", "v", "g", "beta")]
    start, scale = jnp.asarray(given["start"]), given["k"].shape[3] ** -0.5
    both = functools.partial(np.full, 2, dtype=np.int32)
    out, corrections = delta_page(*arrays, jnp.zeros_like(arrays[2]), start, both(0), both(11), scale=scale, chunk=8)
    step = [x[:, 11:14] for x in arrays]
    out_step, new = delta_step(*step, arrays[1], arrays[3], corrections, start, both(11), both(3), scale=scale)
    corrections = corrections.at[:, 11:14].set(new)
    last, corrections = delta_page(*arrays, corrections, start, both(14), both(10), scale=scale, chunk=8)
    found = np.concatenate([out[:, :11], out_step, last[:, 14:]], axis=1)
    state = np.asarray(delta_fold(arrays[1], arrays[3], corrections, start, both(24)))
    for row in range(2):
        wanted, _, states, size = layer.recurrence(*(given[name][row] for name in ("q", "k", "v", "g", "beta", "start")), scale=scale)
        assert (np.linalg.norm(found[row] - wanted, axis=-1) <= 1e-6 * size[..., 0]).all()
        assert np.linalg.norm(state[row] - states[-1]) <= 1e-6 * np.linalg.norm(states[-1])


def _abstract(rows, batch=1):
    """Of a Qwen3.5 layer: q, k, v, g, beta, corrections, start, counts, lengths."""
    q, v, gate = ((batch, rows, heads, *dims) for heads, *dims in ((16, 128), (32, 128), (32,)))
    shapes = [(q, "bfloat16"), (q, "bfloat16"), (v, "bfloat16"), (gate, "float32"), (gate, "float32"), (v, "float32")]
    shapes += [((batch, 32, 128, 128), "float32"), ((batch,), "int32"), ((batch,), "int32")]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


def test_memory_is_a_chunk_and_the_page():
    op = jax.jit(functools.partial(delta_page, scale=0.1, chunk=64), donate_argnums=5)
    memory = op.lower(*_abstract(128)).compile().memory_analysis()
    of_a_chunk = 4 * 32 * (4 * 64 * 64 + 8 * 64 * 128) + 4 * 32 * 128 * 128
    of_the_page = 4 * 32 * 128 * (3 * 128 + 3 * 128)  # tokens, keys times decays, corrections, decays between rows
    assert memory.temp_size_in_bytes <= of_a_chunk + of_the_page
