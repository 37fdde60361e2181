"""The suite of page_index: implementations against the reference, the reference against numpy, mutants, refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import in_turn

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import CODED, INDEX_KINDS, INDEX_ROWS, code_errors, coded_keys, index_shape, page_index

IMPLEMENTATIONS = {
    name: functools.partial(page_index, implementation=name) for name in dispatch.available("page_index") if name != "reference"
}
XLA = IMPLEMENTATIONS["xla"]

# shape of the keys, dtype, block size, what they hold
CASES = {
    "one page": ((16, 32), "float32", 16, "random"),
    "blocks of 4": ((3, 2, 16, 32), "float32", 4, "random"),
    "tokens": ((3, 2, 16, 32), "float32", 1, "random"),
    "bfloat16": ((3, 2, 16, 32), "bfloat16", 8, "random"),
    "float16": ((3, 2, 16, 32), "float16", 8, "random"),
    "far from zero": ((2, 128, 16), "bfloat16", 128, "offset"),
    "equal keys": ((2, 16, 32), "float32", 8, "equal"),
    "infinities": ((2, 16, 32), "float32", 8, "infinite"),
    "denormals": ((2, 16, 32), "float32", 8, "denormal"),
    "a NaN shows": ((2, 16, 32), "float32", 8, "nan"),
}


def _keys(case: str) -> jax.Array:
    shape, dtype, _, content = CASES[case]
    keys = np.random.default_rng(sum(map(ord, case))).standard_normal(shape)
    if content == "offset":
        keys += 100
    elif content == "equal":
        keys[:] = 0.3
    elif content == "infinite":
        keys[0, 0, :8], keys[0, 9, 8:] = np.inf, -np.inf
    elif content == "denormal":
        keys *= 1e-40
    elif content == "nan":
        keys[0, 3, :5] = np.nan
    return jnp.asarray(keys.astype(jnp.dtype(dtype)))


def check(op, case: str) -> None:
    """Bounds must be exact; a mean may differ by one rounding of the result."""
    shape, dtype, block_size, _ = CASES[case]
    keys = _keys(case)
    for kind, rows in INDEX_ROWS.items():
        ours = op(keys, kind=kind, block_size=block_size)
        ref = page_index(keys, kind=kind, block_size=block_size, implementation="reference")
        assert ours.shape == ref.shape == (*shape[:-2], shape[-2] // block_size, rows, shape[-1])
        assert ours.dtype == ref.dtype == dtype
        tiny = float(jnp.finfo(jnp.float32).tiny)  # where denormals are flushed, both may give zero
        rtol = 0 if kind == "bounds" else max(float(jnp.finfo(ours.dtype).eps), 2e-6)
        atol = tiny if kind == "bounds" else 1e-6 * (case != "denormals") + tiny
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(ref, np.float64), rtol=rtol, atol=atol)


def _from(change):
    return lambda keys, **keywords: change(XLA(keys, **keywords))


def check_codes(op, kind: str, case: str) -> None:
    """Codes must be those of the definition, byte for byte, and their numbers within half a level of the keys."""
    shape, _, block_size, content = CASES[case]
    keys = _keys(case)
    ours = op(keys, kind=kind, block_size=block_size)
    assert ours.shape == (*shape[:-2], shape[-2] // block_size, *index_shape(kind, block_size, shape[-1]))
    assert ours.dtype == jnp.uint8
    if content != "infinite":  # such a channel reads as NaN, whatever its codes are
        np.testing.assert_array_equal(ours, page_index(keys, kind=kind, block_size=block_size, implementation="reference"))
    blocks = np.asarray(keys, np.float64).reshape(*shape[:-2], -1, block_size, shape[-1])
    read = np.asarray(coded_keys(kind, ours), np.float64)
    finite = np.isfinite(blocks).all(-2, keepdims=True)
    assert np.all(np.isnan(read) == ~np.broadcast_to(finite, read.shape)), "a channel with a NaN or an infinity reads as NaN"
    low, high = (np.where(finite, x, 0) for x in (blocks.min(-2, keepdims=True), blocks.max(-2, keepdims=True)))
    rounding = 2.0**-8 * (np.abs(low) + high - low) + 1e-37  # of the lowest level and of the distance, to bfloat16
    within = (high - low) / (2 ** CODED[kind] - 1) / 2 + 2 * rounding
    assert np.all(~finite | (np.abs(np.where(finite, read - blocks, 0)) <= within))


@pytest.mark.quick_but("keys2-far from zero", "keys1-one page", "keys2-blocks of 4", "keys4-tokens")
@pytest.mark.parametrize(("kind", "case"), in_turn(CODED, CASES))
def test_codes_are_those_of_the_definition(kind, case):
    check_codes(XLA, kind, case)


def check_errors(kind: str, case: str, errors=code_errors) -> None:
    """No key differs from what is read by more than its channel's error says."""
    keys = _keys(case)
    rows = page_index(keys, kind=kind, block_size=CASES[case][2])
    blocks = np.asarray(keys, np.float64).reshape(*rows.shape[:-2], -1, keys.shape[-1])
    found = np.abs(np.asarray(coded_keys(kind, rows), np.float64) - blocks).max(-2)
    bound = np.asarray(errors(kind, rows, sixteen_bits=keys.dtype == jnp.bfloat16), np.float64)
    finite = np.isfinite(blocks).all(-2)
    assert np.all(found[finite] <= bound[finite])


@pytest.mark.parametrize(("kind", "case"), in_turn(CODED, CASES))
def test_keys_are_as_near_to_their_codes_as_errors_say(kind, case):
    check_errors(kind, case)


@pytest.mark.parametrize("kind", CODED)
def test_smaller_errors_would_be_wrong(kind):
    with pytest.raises(AssertionError):
        check_errors(kind, "blocks of 4", lambda *given, **keywords: 0.45 * code_errors(*given, **keywords))


CODE_MUTANTS = {
    "codes in the other order": lambda index: index.at[..., :-8, :].set(index[..., :-8, ::-1]),
    "levels of the block before": lambda index: index.at[..., -8:, :].set(jnp.roll(index[..., -8:, :], 1, axis=-3)),
    "nibbles swapped": lambda index: index.at[..., :-8, :].set(index[..., :-8, :] << 4 | index[..., :-8, :] >> 4),
}


@pytest.mark.parametrize("mutant", CODE_MUTANTS)
def test_a_mutant_of_codes_fails(mutant):
    with pytest.raises(AssertionError):
        check_codes(_from(CODE_MUTANTS[mutant]), "keys4", "blocks of 4")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    check(IMPLEMENTATIONS[name], case)


def test_reference_against_numpy():
    keys = np.asarray(_keys("blocks of 4"))
    blocks = keys.reshape(3, 2, 4, 4, 32)
    bounds = page_index(jnp.asarray(keys), kind="bounds", block_size=4, implementation="reference")
    np.testing.assert_array_equal(bounds, np.stack([blocks.max(-2), blocks.min(-2)], -2))
    mean = page_index(jnp.asarray(keys), kind="mean", block_size=4, implementation="reference")
    np.testing.assert_allclose(mean, blocks.mean(-2, keepdims=True), rtol=1e-6, atol=1e-7)


def test_mean_is_rounded_once():
    """In bfloat16 a running sum of 128 numbers near 100 would be off by whole units; the float32 mean rounds to within
    half a step."""
    keys = _keys("far from zero")
    mean = np.asarray(page_index(keys, kind="mean", block_size=128), np.float64)
    exact = np.asarray(keys, np.float64).mean(-2, keepdims=True)[:, None]
    assert np.abs(mean - exact).max() <= 0.5 * 0.5 + 1e-3  # a step of bfloat16 between 64 and 128 is 0.5


def test_twice_the_same_bits(tools):
    keys = _keys("bfloat16")
    for kind in INDEX_KINDS:
        tools.assert_same_bits(XLA(keys, kind=kind, block_size=8), XLA(keys, kind=kind, block_size=8))


def test_bits_do_not_depend_on_the_other_pages(tools):
    keys = _keys("bfloat16")
    other = keys.at[0].set(7)
    for kind in INDEX_KINDS:
        tools.assert_same_bits(XLA(keys, kind=kind, block_size=8)[1:], XLA(other, kind=kind, block_size=8)[1:])


def _one_token_dropped(keys, *, kind, block_size):
    return XLA(keys.at[..., -1, :].set(keys[..., 0, :]), kind=kind, block_size=block_size)


def _of_the_whole_page(keys, *, kind, block_size):
    whole = XLA(keys, kind=kind, block_size=keys.shape[-2])
    return jnp.repeat(whole, keys.shape[-2] // block_size, axis=-3)


def _summed_in_storage_dtype(keys, *, kind, block_size):
    if kind == "bounds":
        return XLA(keys, kind=kind, block_size=block_size)
    blocks = keys.reshape(*keys.shape[:-2], -1, block_size, keys.shape[-1])
    total = functools.reduce(jnp.add, [blocks[..., i, :] for i in range(block_size)])
    return (total / block_size).astype(keys.dtype)[..., None, :]


def _middle_of_bounds(keys, *, kind, block_size):
    bounds = XLA(keys, kind="bounds", block_size=block_size)
    return bounds if kind == "bounds" else bounds.mean(-2, keepdims=True)


MUTANTS = {
    "zeros": _from(jnp.zeros_like),
    "rows swapped": _from(lambda index: index[..., ::-1, :]),
    "only the maximum": _from(lambda index: jnp.broadcast_to(index[..., :1, :], index.shape)),
    "one block off": _from(lambda index: jnp.roll(index, 1, axis=-3)),
    "a sum, not a mean": lambda keys, **keywords: XLA(keys, **keywords) * (keywords["block_size"] if keywords["kind"] == "mean" else 1),
    "one token dropped": _one_token_dropped,
    "of the whole page": _of_the_whole_page,
    "summed in the storage dtype": _summed_in_storage_dtype,
    "middle of the bounds": _middle_of_bounds,
    "NaN ignored": lambda keys, **keywords: XLA(jnp.where(jnp.isnan(keys), 0, keys), **keywords),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


@pytest.mark.parametrize(
    ("keys", "kind", "block_size", "message"),
    [
        (jnp.zeros((16, 8)), "median", 4, "'median' is unknown; there are bounds, keys1, keys2, keys4, keys8, mean"),
        (jnp.zeros((16, 12)), "keys1", 4, "head dim that is a multiple of 8, got 12: use more bits"),
        (jnp.zeros((16, 8)), "mean", 5, "block_size 5 does not divide the page size 16"),
        (jnp.zeros((16, 8)), "mean", 0, "block_size 0"),
        (jnp.zeros((16, 8), jnp.int32), "mean", 4, "floating point"),
        (jnp.zeros(8), "mean", 4, "floating point"),
    ],
)
def test_wrong_input_is_refused(keys, kind, block_size, message):
    with pytest.raises(ValueError, match=message):
        page_index(keys, kind=kind, block_size=block_size)
