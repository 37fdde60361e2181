"""Packed matrices: pack and unpack against a reference number by number, error bounds, odd sizes, refusals, mutants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quick_cases import in_turn

from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, check_packed, pack, rows_from, take_rows, unpack
from pallas_kernels.matmul.project_tokens import project_tokens, xla
from pallas_kernels.matmul.project_tokens import reference as by_definition

FORMATS = {
    "int8": MatrixFormat("int8"),
    "fp8": MatrixFormat("fp8_e4m3"),
    "int8 blocks": MatrixFormat("int8", 16, 8),
    "fp8 blocks": MatrixFormat("fp8_e4m3", 16, 8),
    "int4": MatrixFormat("int4", 1, 8),
    "int4 rows": MatrixFormat("int4"),
}
SHAPES = {"whole blocks": (32, 24), "parts of blocks": (37, 26)}


@functools.cache
def matrix(shape, dtype="float32", seed=0):
    """Rows and columns of different size, one row and one block of zeros, and large and small numbers."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, (shape[0], 1))) * np.exp(rng.uniform(-1, 1, (1, shape[1])))
    found[3] = 0
    found[16:32, :8] = 0
    return jnp.asarray(found, dtype)


def blocks_of(format, shape):
    """(rows, columns) of each block, as slices."""
    width = format.columns or shape[1]
    return [
        (slice(i, min(i + format.rows, shape[0])), slice(j, min(j + width, shape[1])))
        for i in range(0, shape[0], format.rows)
        for j in range(0, shape[1], width)
    ]


def largest_code(format):
    return {"int8": 127, "int4": 7, "fp8_e4m3": 448}[format.codes]


def errors_allowed(format, numbers):
    """The most that each number may be off, from the documented bounds, block by block."""
    allowed = np.zeros(numbers.shape)
    for block in blocks_of(format, numbers.shape):
        largest = np.abs(numbers[block]).max()
        scale = largest / largest_code(format) * (1 + 2.0**-7 if format.codes == "int4" else 1 + 2.0**-20)
        if format.codes == "fp8_e4m3":
            allowed[block] = np.maximum(np.abs(numbers[block]) * (2.0**-4 + 2.0**-11), 2.0**-10 * scale)
        else:
            allowed[block] = scale / 2 + largest * 2.0**-20
    return allowed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "dtype"), in_turn(FORMATS, ["float32", "bfloat16", "float16"]))
def test_each_number_is_within_its_bound(format, shape, dtype):
    source, format = matrix(SHAPES[shape], dtype), FORMATS[format]
    packed = pack(source, format)
    check_packed(packed)
    numbers, found = np.asarray(source, np.float64), np.asarray(unpack(packed), np.float64)
    assert np.all(np.abs(found - numbers) <= errors_allowed(format, numbers))
    assert not found[3].any()
    assert packed.shape == source.shape
    assert packed.nbytes == format.bytes_of(source.shape) == sum(x.nbytes for x in jax.tree.leaves(packed))
    # The same numbers by the definition of the format, and what is packed already packs to the same codes.
    np.testing.assert_array_equal(np.float32(by_definition._unpacked(packed)), np.float32(found))
    again = pack(unpack(packed), dataclasses.replace(format))
    if format.codes == "int8":
        assert np.array_equal(again.codes, packed.codes)


def test_codes_are_the_nearest():
    """int8 and int4 as numpy rounds, fp8 as ml_dtypes does, up to XLA's rounding to float16 on the way."""
    source = matrix((64, 32), seed=3)
    numbers = np.asarray(source)
    int8, fp8, int4 = (pack(source, FORMATS[name]) for name in ("int8", "fp8", "int4"))
    scale = np.abs(numbers).max(1, keepdims=True) / np.float32(127)
    exact = np.divide(numbers, scale, where=scale > 0, out=np.zeros_like(numbers))
    off_centre = np.abs(exact - np.floor(exact) - 0.5) > 1e-4  # a tie may go either way with the last bit of the quotient
    assert np.array_equal(np.asarray(int8.codes)[off_centre], np.rint(exact).astype(np.int8)[off_centre])
    assert np.abs(np.asarray(int8.codes)).max(1)[0] == 127
    nearest = (numbers / np.asarray(fp8.scales)).astype(ml_dtypes.float8_e4m3fn)
    assert np.mean(np.asarray(fp8.codes) != nearest) < 0.02
    assert int4.scales.dtype == jnp.bfloat16
    groups = np.abs(numbers.reshape(64, 4, 8)).max(2)
    there = groups > 0
    assert np.all(np.asarray(int4.scales, np.float64)[there] >= groups[there] / 7 * (1 - 1e-6)), "scales of int4 are rounded up"
    assert np.all(np.asarray(int4.scales, np.float64)[there] <= groups[there] / 7 * (1 + 2.0**-7))


def broken(kind, packed):
    """Mutants of `unpack`."""
    if kind == "nibbles swapped":
        return unpack(packed.replace(codes=(packed.codes >> 4) | (packed.codes << 4)))
    if kind == "one scale for all":
        return unpack(packed.replace(scales=jnp.broadcast_to(packed.scales[:1, :1], packed.scales.shape)))
    if kind == "scales of the next block":
        return unpack(packed.replace(scales=jnp.roll(packed.scales, 1, axis=1)))
    if kind == "zero of 7":
        return unpack(packed.replace(zeros=jnp.full(packed.scales.shape, 7, jnp.uint8)))
    return unpack(packed) * 0


@pytest.mark.parametrize("kind", ["nibbles swapped", "one scale for all", "scales of the next block", "zero of 7", "zeros"])
def test_mutants_are_found(kind):
    source = matrix((32, 24))
    numbers = np.asarray(source, np.float64)
    found = np.asarray(broken(kind, pack(source, FORMATS["int4"])), np.float64)
    assert np.any(np.abs(found - numbers) > errors_allowed(FORMATS["int4"], numbers))


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_near_the_ends_of_float32(format):
    tiny, large = jnp.full((2, 8), 1e-37, jnp.float32), jnp.full((2, 8), 3e38, jnp.float32)
    assert not np.asarray(unpack(pack(tiny, FORMATS[format]))).any()
    np.testing.assert_allclose(unpack(pack(large, FORMATS[format])), large, rtol=1e-2)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_that_are_not_finite_are_refused_by_name(format, wrong):
    source = matrix((37, 26)).at[36, 25].set(wrong)
    with pytest.raises(ValueError, match=r"layers\.3\.up holds numbers that are not finite"):
        pack(source, FORMATS[format], "layers.3.up")


def test_refusals():
    with pytest.raises(ValueError, match=r"w is float32\[3,5\], and a byte|w is \[3, 5\], and a byte holds two codes of int4.*int8"):
        pack(jnp.ones((3, 5)), FORMATS["int4"], "w")
    for wrong in (jnp.ones((3,)), jnp.ones((0, 4)), jnp.ones((2, 2), jnp.int32)):
        with pytest.raises(ValueError, match="can be packed"):
            pack(wrong, FORMATS["int8"])
    for arguments in (("int5",), ("int8", 0), ("int8", 1, 0), ("int4", 1, 7)):
        with pytest.raises(ValueError, match=r"hold|must be"):
            MatrixFormat(*arguments)
    good = pack(matrix((32, 24)), FORMATS["int4"])
    for change in ({"scales": good.scales[:, 1:]}, {"codes": good.codes.astype(jnp.int8)}, {"zeros": good.codes}):
        with pytest.raises(ValueError, match=r"gate, packed as int4:1x8, has codes"):
            check_packed(good.replace(**change), "gate")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_rows(format, shape):
    packed = pack(matrix(SHAPES[shape]), FORMATS[format])
    whole, count = np.asarray(unpack(packed)), packed.shape[0]
    np.testing.assert_array_equal(unpack(rows_from(packed, 16, count - 16)), whole[16:])
    np.testing.assert_array_equal(unpack(rows_from(packed, jnp.int32(16), 16)), whole[16:32])
    ids = jnp.array([[0, 17, count - 1], [count, -1, 2**30]])
    for table in (packed, jnp.asarray(whole)):
        rows = np.asarray(take_rows(table, ids, fill=np.nan, dtype=jnp.float32))
        np.testing.assert_array_equal(rows[0], whole[[0, 17, count - 1]])
        assert np.isnan(rows[1]).all()
        assert not np.asarray(take_rows(table, ids, fill=0, dtype=jnp.float32))[1].any()


# Products.

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def with_zeros(packed: PackedMatrix) -> PackedMatrix:
    return packed.replace(zeros=(jnp.arange(packed.scales.size, dtype=jnp.uint8) % 17).reshape(packed.scales.shape))


@pytest.mark.parametrize("tile", [None, 1])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("format", "dtype"), in_turn([*FORMATS, "int4 zeros"], TOLERANCE))
def test_products(format, tokens, dtype, tile, monkeypatch):
    """In tiles and whole, and beside an array."""
    if tile is not None:
        monkeypatch.setattr(xla, "TILE_BYTES", tile)
        xla.project_tokens.clear_cache()
    packed = pack(matrix((37, 26)), FORMATS[format.removesuffix(" zeros")])
    packed = with_zeros(packed) if format.endswith("zeros") else packed
    x = jax.random.normal(jax.random.key(1), (tokens, 26)).astype(dtype)
    weights = packed, matrix((12, 26), dtype)
    found = project_tokens(x, weights, norm=jnp.ones(26, dtype), norm_eps=1e-6, out_dtype="float32")
    expected = project_tokens(x, weights, norm=jnp.ones(26, dtype), norm_eps=1e-6, implementation="reference", out_dtype="float32")
    for ours, ref in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        error = np.linalg.norm(ours - ref, axis=-1) / np.linalg.norm(ref, axis=-1)
        assert error.max() <= TOLERANCE[dtype]


def test_large_sums_in_float16_are_finite():
    """The codes' sum is more than float16 holds; the result is not."""
    packed = pack(jnp.full((4, 512), 1e-3), FORMATS["int8"])
    (found,) = project_tokens(jnp.ones((2, 512), jnp.float16), (packed,))
    np.testing.assert_allclose(np.asarray(found, np.float32), 0.512, rtol=2e-3)


def test_packed_matrices_are_checked():
    packed = pack(matrix((32, 64)), FORMATS["int8"])
    x = jnp.ones((2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"weights must be \[F,E\].*int8:1xall\[32, 64\]"):
        project_tokens(x[:, :32], (packed,))
    with pytest.raises(ValueError, match=r"weights\[0\], packed as int8:1xall"):
        project_tokens(x, (packed.replace(scales=packed.scales[1:]),))
