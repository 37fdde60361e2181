"""causal_convolution against numpy and transformers, mutants, and bits in any cut."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent.gated_delta import causal_convolution

pytestmark = pytest.mark.bits

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
# Lengths, width, dtype, whether there is a bias.
CASES = {
    "ragged": ((0, 1, 2, 3, 4, 9), 4, "float32", False),
    "bias, two taps": ((3, 0, 5), 2, "float32", True),
    "bfloat16": ((1, 7), 4, "bfloat16", False),
}
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}


def make(case):
    """(arrays, bias); x is NaN beyond a row's length."""
    lengths, width, dtype, with_bias = CASES[case]
    random = np.random.default_rng(0)
    x, tail = random.standard_normal((len(lengths), max(lengths), 21)), random.standard_normal((len(lengths), width - 1, 21))
    x[np.arange(max(lengths)) >= np.array(lengths)[:, None]] = np.nan
    weight, bias = random.standard_normal((21, width)), random.standard_normal(21)
    *arrays, bias = (jnp.asarray(y.astype(jnp.dtype(dtype))) for y in (x, weight, tail, bias))
    return (*arrays, jnp.asarray(np.array(lengths, np.int32))), bias if with_bias else None


def check(op, case):
    arrays, bias = make(case)
    out, after = jax.jit(op)(*arrays, bias=bias)
    out, after, x, weight, tail, lengths = map(np.asarray, (out, after, *arrays))
    assert (out.dtype, after.dtype, out.shape, after.shape) == (x.dtype, x.dtype, x.shape, tail.shape)
    of, width = np.asarray(weight, np.float64), weight.shape[1]
    for row, length in enumerate(lengths.tolist()):
        inputs = np.concatenate([np.asarray(y, np.float64) for y in (tail[row], x[row, :length])])
        np.testing.assert_array_equal(np.asarray(after[row], np.float64), inputs[length:])
        assert (out[row, length:] == 0).all()
        for t in range(length):
            terms = of * inputs[t : t + width].T
            total = terms.sum(1) + (0 if bias is None else np.asarray(bias, np.float64))
            error = np.abs(np.asarray(out[row, t], np.float64) - total / (1 + np.exp(-total)))
            assert (error <= ROUNDING[x.dtype.name] * (np.abs(total) + 0.1) + 1e-6 * np.abs(terms).sum(1)).all()


@pytest.mark.parametrize("case", CASES)
def test_is_the_weighted_sum(case):
    check(causal_convolution, case)


MUTANTS = {
    "zeros": lambda *arrays, **bias: jax.tree.map(jnp.zeros_like, causal_convolution(*arrays, **bias)),
    "taps turned round": lambda x, weight, *rest, **bias: causal_convolution(x, weight[:, ::-1], *rest, **bias),
    "tail dropped": lambda x, weight, tail, lengths, **bias: causal_convolution(x, weight, 0 * tail, lengths, **bias),
    "tail one late": lambda x, weight, tail, lengths, **bias: causal_convolution(x, weight, jnp.roll(tail, 1, axis=1), lengths, **bias),
    "old tail kept": lambda x, weight, tail, lengths, **bias: (causal_convolution(x, weight, tail, lengths, **bias)[0], tail),
    "padding in the tail": lambda x, weight, tail, lengths, **bias: (
        causal_convolution(x, weight, tail, lengths, **bias)[0],
        causal_convolution(jnp.nan_to_num(x), weight, tail, jnp.full_like(lengths, x.shape[1]))[1],
    ),
    "sees the next token": lambda x, *rest, **bias: causal_convolution(jnp.roll(x, -1, axis=1), *rest, **bias),
    "bias dropped": lambda *arrays, bias: causal_convolution(*arrays),
    "length one short": lambda x, weight, tail, lengths, **bias: causal_convolution(x, weight, tail, jnp.maximum(lengths - 1, 0), **bias),
    "no SiLU": lambda *arrays, **bias: (lambda out, tail: (jnp.where(out > 0, out, 0), tail))(*causal_convolution(*arrays, **bias)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


def test_matches_transformers():
    """A sequence at once, then one more token from the tail."""
    of = {key.partition("/")[2]: jnp.asarray(array) for key, array in GOLDEN.items() if key.startswith("convolution/")}
    batch, tokens, _ = of["x"].shape
    convolve = jax.jit(causal_convolution)
    out, tail = convolve(of["x"], of["weight"], jnp.zeros_like(of["tail"]), jnp.full(batch, tokens, jnp.int32))
    np.testing.assert_allclose(out, of["out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tail, of["tail"])
    step, _ = convolve(of["next"], of["weight"], tail, jnp.ones(batch, jnp.int32))
    np.testing.assert_allclose(step, of["step_out"], rtol=1e-5, atol=1e-6)


def run_in_pieces(op, arrays, state, pieces, sizes):
    """Calls of `op`, piece after piece: outs per row, last state. pieces: tokens of each row; sizes: the T's that calls
    may have. Each call takes the least that holds its pieces, and NaN where a row has no token."""
    done, outs = np.zeros(len(pieces[0]), int), [[] for _ in pieces[0]]
    for lengths in pieces:
        wide = min(size for size in sizes if size >= max(lengths))
        given = [np.full((len(lengths), wide, *x.shape[2:]), np.nan, x.dtype) for x in arrays]
        for row, (start, length) in enumerate(zip(done, lengths, strict=True)):
            for array, of in zip(given, arrays, strict=True):
                array[row, :length] = of[row, start : start + length]
        out, state = op(*map(jnp.asarray, given), state, jnp.asarray(np.array(lengths, np.int32)))
        for row, length in enumerate(lengths):
            outs[row].append(np.asarray(out)[row, :length])
        done += lengths
    return [np.concatenate(of) for of in outs], state


def random_pieces(seed: int, total: int, rows: int, sizes) -> list[list[int]]:
    """Ragged pieces, some of them empty, that add up to `total` in each row."""
    random, left, pieces = np.random.default_rng(seed), np.full(rows, total), []
    while left.any():
        piece = np.minimum(left, random.integers(0, random.choice(sizes) + 1, rows))
        if piece.any():
            pieces.append(piece.tolist())
            left -= piece
    return pieces


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cut_gives_the_same_bits(layer, dtype):
    """Ragged pieces, T of 1, 5 or 40, an odd number of channels; also beside other rows."""
    random, sizes = np.random.default_rng(1), (1, 5, 40)
    x, weight = np.asarray(jnp.asarray(random.standard_normal((2, 40, 37)), dtype)), jnp.asarray(random.standard_normal((37, 4)), dtype)
    convolve = jax.jit(causal_convolution)

    def op(x, tail, lengths):
        return convolve(x, weight, tail, lengths)

    empty = jnp.zeros((2, 3, 37), dtype)
    whole = run_in_pieces(op, [x], empty, [[40, 40]], sizes)
    for pieces in ([[1, 1]] * 40, *(random_pieces(seed, 40, 2, sizes) for seed in range(10))):
        assert layer.same_bits(whole, run_in_pieces(op, [x], empty, pieces, sizes))
    other = np.stack([np.full_like(x[0], np.nan), x[1]])
    beside = run_in_pieces(op, [other], empty, [[40, 40]], sizes)
    assert layer.same_bits(whole[0][1], beside[0][1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((2, 6))}, r"takes x \[B,T,E\]"),
        ({"weight": np.zeros((5, 4))}, r"weight \[E,W\] with W at least 1"),
        ({"weight": np.zeros((6, 0))}, r"W at least 1"),
        ({"tail": np.zeros((2, 4, 6))}, r"tail must be \[B,W-1,E\] of x's dtype"),
        ({"tail": np.zeros((2, 3, 6), jnp.bfloat16)}, "of x's dtype"),
        ({"lengths": np.zeros(2)}, r"lengths must be int32 \[B\]"),
        ({"bias": np.zeros(5)}, r"bias \[E\]"),
    ],
)
def test_wrong_input_is_refused(changed, message):
    arrays = {"x": np.zeros((2, 3, 6)), "weight": np.zeros((6, 4)), "tail": np.zeros((2, 3, 6)), "lengths": np.zeros(2, np.int32)}
    with pytest.raises(ValueError, match=message):
        causal_convolution(**arrays | changed)
