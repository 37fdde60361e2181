"""pack_pages against its reference in NumPy, the error that its docstring promises, sizes, and mutants that must
fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache.pack_pages import pack_pages, xla
from pallas_kernels.core import lattices
from pallas_kernels.core.page_format import LATTICES, PageFormat, hadamard, unpack

FORMATS = {
    "int8 token": PageFormat("int8", "token", read_as="float32"),
    "int8 groups": PageFormat("int8", "token", 16, read_as="float32"),
    "int8 channel": PageFormat("int8", "channel", read_as="float32"),
    "int8 page": PageFormat("int8", "page", read_as="float32"),
    "int4 groups": PageFormat("int4", "token", 32, read_as="float32"),
    "int4 channel": PageFormat("int4", "channel", read_as="float32"),
    "fp8": PageFormat("fp8_e4m3", read_as="float32"),
    "fp8 token": PageFormat("fp8_e4m3", "token", read_as="float32"),
    "q8_0": PageFormat("q8_0", read_as="float32"),
    "q4_0": PageFormat("q4_0", read_as="float32"),
    "d4": PageFormat("d4", levels=38, read_as="float32"),
    "d4, 76 levels": PageFormat("d4", levels=76, read_as="float32"),
    "e8": PageFormat("e8", levels=38, read_as="float32"),
    "e8, 5 levels": PageFormat("e8", levels=5, read_as="float32"),
    "int4 rotated": PageFormat("int4", "token", rotate=True, read_as="float32"),
    "int8 page rotated": PageFormat("int8", "page", rotate=True, read_as="float32"),
    "d4 rotated": PageFormat("d4", levels=38, rotate=True, read_as="float32"),
    "e8 rotated": PageFormat("e8", levels=38, rotate=True, read_as="float32"),
}


def numbers(shape=(2, 16, 64), seed=0) -> np.ndarray:
    """Tokens of very different sizes with outliers, a row of zeros, one of equal numbers, ties, and the smallest and
    largest numbers. Integers times powers of 2, so that sums of 64 of them are exact."""
    rng = np.random.default_rng(seed)
    x = np.rint(rng.standard_t(3, shape).clip(-60, 60) * 64).astype(np.float32) / 64
    x *= 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))
    x[0, 0] = 0
    x[0, 1] = -3
    x[0, 2] = np.where(np.arange(shape[-1]) == 5, -100, 0)
    x[0, 3] = np.arange(shape[-1]) - 8.5
    return x.astype(np.float32)


def promised(format: PageFormat, x: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """The largest error of each number, or of each token's vector (last axis 1), that the docstring of pack_pages
    allows."""
    unit = np.ones((1, 1), np.float32) if scales is None else np.abs(scales.astype(np.float32))
    if 1 < np.shape(unit)[-1] < x.shape[-1]:
        unit = np.repeat(unit, x.shape[-1] // unit.shape[-1], axis=-1)
    slack = 1e-5 * np.abs(x).max(-1, keepdims=True)
    if format.codes == "fp8_e4m3":
        return np.maximum(np.abs(x) * 2.0**-4, unit * 2.0**-10) + slack
    each = {"int8": 0.5, "int4": 0.5, "q8_0": 0.5, "q4_0": 1.0}.get(format.codes, 1.0)
    if format.codes in ("q8_0", "q4_0"):
        slack = slack + np.abs(x).max(-1, keepdims=True) * 2.0**-10  # the scale is rounded to float16 after codes were found
    if format.rotate:  # a token's error is a rotation of its codes' errors; codes are of sqrt(D) times the unit
        return each * unit * x.shape[-1] + slack * 8
    return each * unit + slack


def check(pack, name: str) -> None:
    """Assert that `pack` gives what the reference gives, and errs as little as promised."""
    format, x = FORMATS[name], numbers()
    if format.codes in ("q8_0", "q4_0"):
        x = x.clip(-6e4, 6e4)
    x = x.clip(-448, 448) if name == "fp8" else x  # without a scale larger numbers become 448
    codes, scales = pack(jnp.asarray(x), format)
    expected, expected_scales = pack_pages(jnp.asarray(x), format=format, implementation="reference")
    assert (codes.shape, codes.dtype) == (expected.shape, expected.dtype) == ((*x.shape[:-1], format.width(64)), format.code_dtype)
    assert (scales is None) == (expected_scales is None)
    if scales is not None:
        assert scales.dtype == expected_scales.dtype == format.scale_dtype
        assert scales.shape[1:] == format.scale_shape(16, 64)
        np.testing.assert_array_equal(np.asarray(scales, np.float32), np.asarray(expected_scales, np.float32))
    got, wanted = (np.asarray(unpack(format, each, scales)) for each in (codes, expected))
    if format.codes in LATTICES:  # of two points at the same distance either may be taken
        far = ((got - x) ** 2).sum(-1), ((wanted - x) ** 2).sum(-1)
        np.testing.assert_allclose(*far, rtol=1e-5)
    else:
        np.testing.assert_array_equal(np.asarray(codes), np.asarray(expected))
    allowed = promised(format, x, None if scales is None else np.asarray(scales))
    if format.rotate:
        assert (np.linalg.norm(got - x, axis=-1, keepdims=True) <= allowed).all()
    else:
        assert (np.abs(got - x) <= allowed).all()
    assert not got[0, 0].any()


@pytest.mark.quick_but("d4", "e8, 5 levels")
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_reference_and_errors_as_small_as_promised(name):
    check(lambda x, format: pack_pages(x, format=format), name)


def _moved(pack, codes=lambda x: x, scales=lambda x: x):
    def mutant(x, format):
        found, units = pack(x, format)
        return codes(found), scales(units)

    return mutant


def _plain(x, format):
    return pack_pages(x, format=format)


MUTANTS = {
    "zeros": ("int8 token", _moved(_plain, jnp.zeros_like)),
    "scales of other tokens": ("int8 token", _moved(_plain, scales=lambda x: jnp.roll(x, 1, axis=-2))),
    "halves of bytes swapped": ("int4 groups", _moved(_plain, lambda x: (x << 4) | (x >> 4))),
    "neighbours in a byte": ("q4_0", _moved(_plain, lambda x: jnp.roll(x, 1, axis=-1))),
    "codes of another page": ("e8", _moved(_plain, lambda x: x[::-1])),
    "not rotated": ("d4 rotated", lambda x, format: pack_pages(x, format=FORMATS["d4"])),
    "ties to even": ("q8_0", _moved(_plain, lambda x: (x // 2 * 2).astype(x.dtype))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(mutant):
    name, pack = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        check(pack, name)


@pytest.mark.quick_but("odd sums")
@pytest.mark.parametrize(("parity", "coset"), [(False, True), (True, False)], ids=["odd sums", "one coset"])
def test_lattice_mutants_fail(monkeypatch, parity, coset):
    """A nearest point that ignores the parity of the sum, or E8's second half."""
    even = lattices._even_sum
    if not parity:
        monkeypatch.setattr(lattices, "_even_sum", jnp.round)
    if not coset:
        monkeypatch.setattr(lattices, "nearest", lambda lattice, x: even(x.reshape(*x.shape[:-1], -1, 8)).reshape(x.shape))
    jax.clear_caches()
    try:
        with pytest.raises(AssertionError):
            check(_plain, "e8")
    finally:
        monkeypatch.undo()
        jax.clear_caches()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_shows(name):
    """NaN and infinity make everything that shares their scale NaN, and nothing else."""
    format = FORMATS[name]
    x = numbers()
    x[1, 4, 7], x[1, 9, 40] = np.nan, -np.inf
    codes, scales = pack_pages(jnp.asarray(x), format=format)
    found = np.isnan(np.asarray(unpack(format, codes, scales)))
    wanted = ~np.isfinite(x)
    if scales is not None:
        shape = format.scale_shape(16, 64)
        grouped = wanted.reshape(2, shape[0], 16 // shape[0], shape[1], 64 // shape[1]).any((2, 4), keepdims=True)
        wanted = np.broadcast_to(grouped, (2, shape[0], 16 // shape[0], shape[1], 64 // shape[1])).reshape(x.shape)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.quick_but("d4")
@pytest.mark.parametrize("name", ["int8 token", "int4 groups", "fp8 token", "q8_0", "q4_0", "d4", "e8 rotated"])
def test_the_smallest_and_largest_numbers(name):
    """Rows of 1e-40 read as 0; rows near the largest bfloat16 (of ggml's formats: near what a float16 scale allows)
    read as themselves."""
    format = FORMATS[name]
    largest = 4e5 if format.codes in ("q8_0", "q4_0") else 3e36
    x = np.stack([np.full(64, 1e-40), np.full(64, largest), np.full(64, 1e-30)]).astype(np.float32)
    codes, scales = pack_pages(jnp.asarray(x), format=format)
    found = np.asarray(unpack(format, codes, scales))
    assert not found[0].any()
    np.testing.assert_allclose(found[1], x[1], rtol=0.13)
    if format.codes not in ("q8_0", "q4_0"):
        np.testing.assert_allclose(found[2], x[2], rtol=0.13)


@pytest.mark.quick_but("e8", "d4", "q4_0", "int8 page", "int4 groups")
@pytest.mark.parametrize("name", ["int4 groups", "int8 page", "q8_0", "q4_0", "d4", "e8", "e8 rotated"])
def test_bits_do_not_depend_on_the_program(name):
    """A page packed alone, among others, or right behind the product that made it has the same bits; and so has a
    token, unpacked alone."""
    format = FORMATS[name]
    x = jax.random.normal(jax.random.key(1), (6, 16, 64)).astype(jnp.bfloat16)
    factor = jnp.float32(1.37)

    def fused(x):
        made = (x.astype(jnp.float32) * factor).astype(jnp.bfloat16)
        return made, pack_pages(made, format=format)

    made, together = jax.jit(fused)(x)
    alone = [pack_pages(made[i], format=format) for i in range(6)]
    for i, (codes, scales) in enumerate(alone):
        np.testing.assert_array_equal(np.asarray(together[0][i]), np.asarray(codes))
        np.testing.assert_array_equal(np.asarray(together[1][i]), np.asarray(scales))
    wide = np.asarray(unpack(format, *together))
    one = jax.jit(lambda codes, scales: unpack(format, codes, scales))
    codes, scales = together
    token = one(codes[3, 5:6], scales[3] if scales.shape[1] == 1 else scales[3, 5:6])
    np.testing.assert_array_equal(np.asarray(token)[0], wide[3, 5])


def test_rotation_is_what_it_says():
    """Codes of the rotated token; a single outlier is spread evenly over all channels, and read back without error."""
    x = np.zeros((1, 64), np.float32)
    x[0, 9] = -7 * 64
    codes, scales = pack_pages(jnp.asarray(x), format=FORMATS["int4 rotated"])
    assert scales.tolist() == [[1.0]]
    both = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(int) - 8
    np.testing.assert_array_equal(both[0] * 64, (x @ hadamard(64))[0])
    np.testing.assert_array_equal(np.asarray(unpack(FORMATS["int4 rotated"], codes, scales)), x)
    np.testing.assert_array_equal(hadamard(64) @ hadamard(64), 64 * np.eye(64))


SIZES = {  # bytes of a token of 128 numbers, over a page of 128 tokens; bfloat16 takes 256
    "int8 token": 130,
    "int8 channel": 130,
    "int8 page": 128 + 2 / 128,
    "int4 groups": 72,
    "fp8": 128,
    "q8_0": 136,
    "q4_0": 72,
    "d4": 102,
    "d4, 76 levels": 118,
    "e8": 106,
}


@pytest.mark.parametrize("name", SIZES)
def test_bytes_of_a_token(name):
    format = FORMATS[name]
    assert format.bytes_per_page(128, 128) / 128 == SIZES[name]
    codes, scales = jax.eval_shape(lambda: pack_pages(jnp.zeros((128, 128)), format=format))
    held = sum(x.size * x.dtype.itemsize for x in (codes, scales) if x is not None)
    assert held == format.bytes_per_page(128, 128)
    assert format.head_dim(codes.shape[-1]) == 128


@pytest.mark.long
def test_lattices_have_the_sizes_of_their_source_and_the_error_of_their_rate():
    """Source 002: 2.4 to 2.8 times smaller than 16 bits. Gaussian tokens: squared error within 2 times the least that
    any code of so many bits can have (rate-distortion: 4^-bits), and less in E8 than in D4 by its share."""
    x = jax.random.normal(jax.random.key(0), (64, 128, 128)).astype(jnp.bfloat16)
    errors = {}
    for name in ("d4", "d4, 76 levels", "e8"):
        format = FORMATS[name]
        found = unpack(format, *pack_pages(x, format=format))
        exact = x.astype(jnp.float32)
        errors[name] = float(((found - exact) ** 2).sum() / (exact**2).sum())
    assert 2.4 <= 256 / SIZES["e8"] < 256 / SIZES["d4"] <= 2.8
    assert 5.3e-4 < errors["d4"] < 7e-4
    assert pytest.approx(errors["d4"] / errors["d4, 76 levels"], rel=0.02) == 4.0
    assert 3.5e-4 < errors["e8"] < 4.5e-4
    assert errors["d4"] > 4.0**-6.25  # which is 1.7e-4: no code of this rate reaches 3e-5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"codes": "int5"}, "not 'int5'"),
        ({"codes": "bfloat16", "scale": "token"}, "takes no other argument"),
        ({"codes": "int8", "read_as": "bfloat16"}, "scale of int8 must be one of token, channel, page, got None"),
        ({"codes": "int8", "scale": "token"}, "read_as of packed pages must be one of"),
        ({"codes": "q8_0", "scale": "token", "read_as": "bfloat16"}, "q8_0 defines its scales itself"),
        ({"codes": "int8", "scale": "page", "group": 32, "read_as": "bfloat16"}, "goes with scale 'token' only"),
        ({"codes": "int8", "scale": "token", "group": 0, "read_as": "bfloat16"}, "group must be a positive int"),
        ({"codes": "d4", "read_as": "bfloat16"}, "need levels from 1 to 126"),
        ({"codes": "e8", "levels": 127, "read_as": "bfloat16"}, "need levels from 1 to 126; got 127"),
        ({"codes": "int8", "scale": "token", "levels": 3, "read_as": "bfloat16"}, "lattices, and only they"),
        ({"codes": "fp8_e4m3", "scale": "token", "rotate": True, "read_as": "bfloat16"}, "rotation needs integer codes"),
        ({"codes": "int8", "scale": "channel", "rotate": True, "read_as": "bfloat16"}, "one scale per token or page"),
    ],
)
def test_formats_that_do_not_fit_together_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        PageFormat(**given)


@pytest.mark.parametrize(
    ("name", "dim", "said"),
    [
        ("q8_0", 48, "multiple of 32, got 48"),
        ("d4", 48, "multiple of 32"),
        ("int4 groups", 48, "multiple of 32"),
        ("int4 rotated", 48, "power of two"),
        ("int4 channel", 3, "multiple of 2"),
    ],
)
def test_head_dims_that_a_format_cannot_hold_are_refused(name, dim, said):
    with pytest.raises(ValueError, match=said):
        pack_pages(jnp.zeros((16, dim)), format=FORMATS[name])


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="must be a PageFormat that packs"):
        pack_pages(jnp.zeros((16, 64)), format=PageFormat("bfloat16"))
    with pytest.raises(ValueError, match=r"x must be \[..., P, D\]"):
        pack_pages(jnp.zeros((16, 64), jnp.int32), format=FORMATS["int8 token"])


def test_divisors_are_not_replaced_by_reciprocals():
    """What XLA does with a division by one number: the quotients of ggml's definition must come out, not products."""
    x = jnp.arange(1, 20001, dtype=jnp.float32) / 1000
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: xla._quotient(x, 127.0))(x)), np.asarray(x) / np.float32(127))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_back_in_the_same_program_stays_rounded(name):
    """XLA for GPUs drops the conversion of a number to a narrower type and back, unless a barrier stands between. So
    each array that pack_pages returns must come from one."""
    jaxpr = jax.make_jaxpr(lambda x: pack_pages(x, format=FORMATS[name]))(jnp.zeros((16, 64))).jaxpr
    while jaxpr.eqns[-1].primitive.name in ("jit", "pjit"):
        (call,) = jaxpr.eqns
        jaxpr = call.params["jaxpr"].jaxpr
    barrier = jaxpr.eqns[-1]
    assert barrier.primitive.name == "optimization_barrier"
    assert set(jaxpr.outvars) <= set(barrier.outvars)
