"""project_tokens of packed matrices by its Mosaic GPU kernel: on emulated threads, with bugs planted; lowered;
compiled; on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import paging
import projection_suite
import pytest
from emulator.kernels import kernels
from far_pools import needs_memory
from projection_suite import compare, of_token, packed_case
from quick_cases import one_in, rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import DTYPES, MatrixFormat, PackedMatrix
from pallas_kernels.hopper.threads import lane_codes, lane_copies, lane_pairs, lanes
from pallas_kernels.matmul.project_tokens import digits, mosaic_gpu, operands, project_tokens, tiles
from pallas_kernels.matmul.project_tokens.api import FEW


@dataclasses.dataclass(frozen=True)
class Kind:
    """How matrices are packed."""

    format: MatrixFormat
    scales: str = "float32"
    zeros: bool = False


KINDS = {
    "int8": Kind(MatrixFormat("int8")),
    "fp8": Kind(MatrixFormat("fp8_e4m3")),
    "int8 blocks": Kind(MatrixFormat("int8", 128, 128)),
    "fp8 blocks": Kind(MatrixFormat("fp8_e4m3", 128, 128), "bfloat16"),
    "int4": Kind(MatrixFormat("int4", 1, 128), "bfloat16"),
    "int4 with zeros": Kind(MatrixFormat("int4", 1, 128), "float16", zeros=True),
    "int4 rows": Kind(MatrixFormat("int4")),
    "int4 rows with zeros": Kind(MatrixFormat("int4"), "bfloat16", zeros=True),
    "int8 groups": Kind(MatrixFormat("int8", 1, 64), "float16"),
    "int4 of 64": Kind(MatrixFormat("int4", 1, 64), "bfloat16"),
    "int8 of 32": Kind(MatrixFormat("int8", 1, 32)),
    "one scale for all": Kind(MatrixFormat("fp8_e4m3", 1 << 20)),
}


QKV = {"features": (96, 32, 32), "norm": True, "biased": True, "half": 16, "rotated": 2}
REFUSED = ("int4 of 64", "int8 of 32")
CASES = {f"{kind}, a product": packed_case(kind, out_dtype="float32") for kind in KINDS if kind not in REFUSED}
CASES |= {
    "int8, a gate of several tiles": packed_case("int8", 2, 256, (330, 330), norm=True, gated="silu", residual=True),
    "int8, queries, keys and values": packed_case("int8", 8, **QKV),
    "int8, more chunks than a turn": packed_case("int8", 1, 1088, residual=True),
    "int8, 16 tokens in float16": packed_case("int8", 16, biased=True, dtype="float16"),
    "fp8, 11 tokens": packed_case("fp8", 11, norm=True, norm_offset=1.0),
    "fp8, one token in float16": packed_case("fp8", 1, 64, dtype="float16"),
    "fp8 blocks, a gate of GELU": packed_case("fp8 blocks", 5, 1216, (270, 270), gated="gelu_tanh"),
    "fp8 blocks, queries, keys and values, 16 tokens": packed_case("fp8 blocks", 16, **(QKV | {"features": (224, 160, 160)})),
    "int8 blocks, a part of a block": packed_case("int8 blocks", 2, 192, (140,), out_dtype="float32"),
    "int4, a gate": packed_case("int4", 4, 640, (120, 120), norm=True, gated="silu"),
    "int4, several results of several tiles": packed_case("int4", 8, 1280, (200, 34, 14), biased=True, norm=True, out_dtype="float32"),
    "int4, 9 tokens": packed_case("int4", 9, 640, (50,), norm=True),
    "int4, two tokens in float16": packed_case("int4", 2, 384, dtype="float16"),
    "int8 blocks, two tokens": packed_case("int8 blocks", 2, 256, (150, 34), norm=True, norm_offset=1.0),
    "int8, three tokens": packed_case("int8", 3, 192, out_dtype="float32"),
    "int4 with zeros, queries, keys and values": packed_case("int4 with zeros", 2, **QKV),
    "int8, long rows, a team": packed_case("int8", 5, 6208, (52,), norm=True, residual=True),
    "fp8 blocks, long rows, a team": packed_case("fp8 blocks", 1, 6144, (60,), biased=True),
    "int4 with zeros, long rows, a team's gate": packed_case("int4 with zeros", 9, 12416, (24, 24), gated="silu"),
    "int4, long rows, a team of 16 tokens": packed_case("int4", 16, 12288, (60,), out_dtype="float32"),
    "int4 with zeros, float16": packed_case("int4 with zeros", 16, residual=True, dtype="float16"),
}


def packed(rng, kind: Kind, features: int, width: int) -> PackedMatrix:
    """A matrix of any codes, with scales of different size."""
    format = kind.format
    codes = rng.integers(0, 256, format.codes_shape((features, width)), np.uint8)
    if format.codes == "fp8_e4m3":
        codes = np.where(codes & 127 == 127, 3, codes)  # no NaN
    largest = {"int8": 74, "fp8_e4m3": 150, "int4": 5}[format.codes]
    scales = rng.uniform(0.3, 3, format.scales_shape((features, width))) * width**-0.5 / largest
    zeros = jnp.asarray(rng.integers(0, 17, scales.shape), jnp.uint8) if kind.zeros else None
    return PackedMatrix(jnp.asarray(codes.view(DTYPES[format.codes])), jnp.asarray(scales, kind.scales), zeros, format=format)


@functools.cache
def arguments(name: str) -> tuple:
    """(positional arguments, keywords) of the op."""
    case = CASES[name]
    return projection_suite.arguments(case, name, lambda rng, features: packed(rng, KINDS[case.kind], features, case.width))


@functools.cache
def expected(name: str) -> tuple:
    positional, keywords = arguments(name)
    return project_tokens(*positional, **keywords, implementation="reference")


def check(op, name: str) -> None:
    """Every row of every result within the tolerance of its norm: tight where nothing is rounded but float32 sums."""
    case, (positional, keywords) = CASES[name], arguments(name)
    tolerance = 2e-6 if case.out_dtype and not case.norm else {"bfloat16": 8e-3, "float16": 1e-3}[case.dtype]
    compare(op(*positional, **keywords), expected(name), tolerance)


def test_many_tokens_are_rounded_to_fp8_where_the_matrix_says_so():
    rng = np.random.default_rng(0)
    plain = packed(rng, KINDS["fp8"], 46, 384)
    weights = (plain.replace(format=dataclasses.replace(plain.format, fp8_tokens=True)),)
    x = jnp.asarray(rng.standard_normal((FEW + 4, 384)) * np.exp(rng.uniform(-9, 9, (FEW + 4, 1))), jnp.float32)
    x = x.at[3].set(0).at[5, 7].set(jnp.nan)
    (ours,), (exact,), (wide,) = (
        project_tokens(x, w, implementation=how) for how, w in (("xla", weights), ("reference", weights), ("xla", (plain,)))
    )
    assert np.isnan(ours[5]).all()
    assert not np.isnan(np.delete(ours, 5, axis=0)).any()
    assert not ours[3].any()
    others = np.delete(np.arange(FEW + 4), [3, 5])
    error, moved = (np.linalg.norm(ours[others] - each[others], axis=1) / np.linalg.norm(each[others], axis=1) for each in (exact, wide))
    assert (error < 2e-6).all()
    assert ((moved > 5e-3) & (moved < 0.1)).all()
    few = [project_tokens(x[:FEW], w, implementation="xla")[0] for w in (weights, (plain,))]
    np.testing.assert_array_equal(*few)
    with pytest.raises(ValueError, match="not for int8"):
        MatrixFormat("int8", fp8_tokens=True)


# On emulated threads.


def emulated(x, weights, *, ctas: int = 2, **keywords):
    """The kernel by emulated threads, in a launch of few CTAs, so that there are several tiles."""
    with mock.patch.object(mosaic_gpu, "Shape", functools.partial(mosaic_gpu.Shape, ctas=ctas)), kernels():
        return paging.implementation("project_tokens", "mosaic_gpu")(x, weights, **keywords)


@pytest.mark.quick(
    "int8, a product",
    "fp8, a product",
    "fp8 blocks, a product",
    "int4, a product",
    "int4 with zeros, a product",
    "int8, a gate of several tiles",
    "int8, queries, keys and values",
    "fp8, one token in float16",
    "int4 with zeros, float16",
    "int4, long rows, a team of 16 tokens",
)
@pytest.mark.parametrize("case", CASES)
def test_emulated_it_matches_the_reference(case):
    check(emulated, case)


@pytest.mark.parametrize("case", rest_long(["int8, queries, keys and values", "int4 with zeros, float16"], "int4 with zeros, float16"))
def test_emulated_a_tokens_bits_do_not_depend_on_company(tools, case):
    (x, weights), keywords = arguments(case)
    together = emulated(x, weights, **keywords)
    for token in (0, x.shape[0] - 1):
        (one, _), own = of_token((x, weights), keywords, token)
        for a, b in zip(together, emulated(one, weights, **own), strict=True):
            tools.assert_same_bits(a[token : token + 1], b)


def _of(owner, name: str, make):
    """Replaces a function by one made from it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def _scales(change):
    return _of(tiles.Tiles, "_load_scale", lambda load: lambda self, ref, at: change(load, self, ref, at))


def _locating(shift):
    return _of(tiles.Tiles, "_blocks", lambda blocks: lambda self, n: blocks(self, n + shift))


PLANTED = {
    "no sign of int8": _of(lane_codes, "_from_int8", lambda f: lambda word, dtype: f(word & 0x007F007F, dtype)),
    "digits in another order": _of(digits, "_of_digit", lambda f: lambda four, digit: f(four, (digit + 1) % 3)),
    "first digits are not corrected": lambda monkeypatch: monkeypatch.setattr(digits, "_FIRST", 0),
    "digits without a sign": lambda monkeypatch: monkeypatch.setattr(digits, "_HALF", 0),
    "the column of zeros has digits": _of(digits, "_chosen", lambda f: lambda fours, column: f(fours, lanes.minimum(column, 2))),
    "the last digits are left out": _of(digits, "_chosen", lambda f: lambda fours, column: f(fours, lanes.where(column == 1, 3, column))),
    "even and odd codes exchanged": _of(digits, "_upper_codes", lambda f: lambda word: f(word << 4)),
    "scales of the first token for all": _of(
        lanes, "shuffle", lambda f: lambda x, lane: f(x, lane * 0) if isinstance(lane, lanes.Scalar) else f(x, lane)
    ),
    "lanes scale apart": _of(lane_pairs, "larger_pairs", lambda f: lambda a, b: a),
    "fewer bits of a token": lambda monkeypatch: monkeypatch.setattr(digits, "MAGIC", 1.5 * 2**24 + 0x8080),
    "the lower bytes of fp8": _of(lane_codes, "_from_fp8", lambda f: lambda word, dtype: f(word << 8, dtype)),
    "denormals of fp8 are zero": _of(
        lane_pairs, "multiply_pairs", lambda f: lambda a, b, dtype: f(lanes.where((a & 0x7F80) == 0, a & -65536, a), b, dtype)
    ),
    "tokens are not paired": _of(lane_codes, "paired", lambda f: list),
    "pairs in reverse": _of(lane_codes, "paired", lambda f: lambda words: f(words)[::-1]),
    "zeros of 8": _of(lane_codes, "zero_word", lambda f: lambda zero, dtype: f(zero * 0 + 8, dtype)),
    "rows g and g + 8 exchanged": _of(tiles.Tiles, "_of_rows", lambda f: lambda self, values, m: f(self, values, m)[::-1]),
    "scales of the next chunk": _locating(1),
    "scales of the chunk before": _locating(-1),
    "no scales": _scales(lambda load, self, ref, at: lanes.f32(0.01)),
    "the first scale for all": _scales(lambda load, self, ref, at: load(self, ref, at * 0)),
    "a chunk's sums are not added": _of(
        lanes, "fma", lambda f: lambda a, b, c: f(a, b, c * 0.0) if isinstance(c, lanes.Scalar) else f(a, b, c)
    ),
    "rows of 64 bytes permuted as those of 128": _of(
        lane_copies, "swizzled", lambda f: lambda row, piece, row_bytes: row * (row_bytes // 4) + (piece ^ (row & 7)) * 4
    ),
    "copies are not awaited": _of(lane_copies, "wait_for_copies", lambda f: lambda groups: f(groups + 1)),
    "no barrier before results": _of(lanes, "cta_barrier", lambda f: lambda threads: None),
    "no barrier of a team": _of(lanes, "cluster_barrier", lambda f: lambda: None),
    "nothing is sent in a team": _of(lanes, "store_cluster", lambda f: lambda *args: None),
    "a team's CTAs multiply the same inputs": _of(
        tiles.Tiles, "_chunk", lambda f: lambda self, n: f(dataclasses.replace(self, rank=None), n)
    ),
    "8 columns": lambda monkeypatch: monkeypatch.setattr(mosaic_gpu.Shape, "column_tiles", 1),
    "a part of the inputs": lambda monkeypatch: monkeypatch.setattr(operands.Operands, "steps", 1),
}


@pytest.mark.quick(
    "digits in another order",
    "first digits are not corrected",
    "the lower bytes of fp8",
    "zeros of 8",
    "scales of the next chunk",
    "rows g and g + 8 exchanged",
    "copies are not awaited",
    "no barrier before results",
)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(monkeypatch, name):
    for case in CASES:
        expected(case)
    PLANTED[name](monkeypatch)
    for case in CASES:
        try:
            check(emulated, case)
        except AssertionError:  # a wrong result, or what a GPU would leave undefined
            return
    pytest.fail("the suite accepts this bug")


def one_product(x, codes: str = "int8", scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of one chunk by codes of 1 and -1, on emulated threads, in float32, and exactly. scale: of blocks; None:
    of whole rows, 1."""
    signs = np.where(np.random.default_rng(0).integers(0, 2, (16, x.shape[1])), 1, -1)
    stored = signs.astype(np.int8) if codes == "int8" else ((signs + 8)[:, ::2] | (signs + 8)[:, 1::2] << 4).astype(np.uint8)
    format = MatrixFormat(codes) if scale is None else MatrixFormat(codes, 1, x.shape[1])
    weights = PackedMatrix(jnp.asarray(stored), jnp.full((16, 1), scale or 1, jnp.float32), format=format)
    options = {"out_dtype": jnp.dtype("float32"), "norm_eps": 1e-6, "norm_offset": 0.0, "rotated": 0, "gated": None, "config": None}
    options |= dict.fromkeys(("biases", "norm", "rotation", "residual"))
    (found,) = emulated(jnp.asarray(x), (weights,), ctas=2, **options)
    return np.asarray(found, np.float64), x.astype(np.float64) @ signs.T * (scale or 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_digits_keep_all_of_a_number_down_to_2_to_the_minus_13_of_the_largest(codes, dtype):
    """And of smaller ones what is above 2^-21 of the power of two below the largest."""
    rng, width = np.random.default_rng(1), 64 if codes == "int8" else 128
    for lowest, error in ((-13 + 3 * (dtype == "float16"), 0), (-40 if dtype == "bfloat16" else -14, 2.0**-21 * width)):
        powers = rng.integers(lowest, 1, (8, width))
        x = (rng.uniform(1, 2, (8, width)) * rng.choice([-1, 1], (8, width)) * 2.0**powers).astype(jnp.dtype(dtype))
        x[:, 5] = 1.75
        for tokens in (1, 2, 3, 8):
            found, expected = one_product(x[:tokens], codes)
            assert np.abs(found - expected).max() <= error + 2.0**-22 * np.abs(x[:tokens].astype(np.float64)).sum(1).max()


@pytest.mark.parametrize("size", [2.0**-126, 1e-30, 1.0, 3e38])
def test_digits_of_any_size(size):
    x = (np.random.default_rng(2).standard_normal((3, 64)) / 4 * size / 64).astype(jnp.bfloat16)
    found, expected = one_product(x)
    assert np.abs(found - expected).max() <= max(2.0**-21 * np.abs(expected).max(), 2.0**-121)
    assert not one_product(np.zeros((1, 64), jnp.bfloat16))[0].any()


@pytest.mark.parametrize(("size", "scale"), [(2.0**100, 2.0**40), (2.0**120, 2.0**30), (2.0**-100, 2.0**-16), (1.0, 2.0**-120)])
def test_scales_of_blocks_multiply_sums_that_fit(size, scale):
    """A result that is a float32 comes out, though what an integer stands for, times the scale, would be none."""
    x = np.zeros((2, 64), jnp.bfloat16)
    x[:, :2] = np.array([[1.5, -1.5], [1.4375, 0.0]]) * size
    x[1] *= 2.0**-30 if size > 1 else 1
    found, expected = one_product(x, scale=scale)
    fits = np.abs(expected) < 3e38
    assert fits[1].all()
    assert (expected[0][fits[0]] == 0).any()
    assert (np.abs(found - expected)[fits] <= 2.0**-20 * np.abs(expected[1]).max()).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_makes_its_token_nan_and_no_other(value):
    for tokens in (1, 2, 8):
        x = np.ones((tokens, 64), jnp.bfloat16)
        x[-1, 17] = value
        found, expected = one_product(x)
        assert np.isnan(found[-1]).all()
        np.testing.assert_array_equal(found[:-1], expected[:-1])


# Without a GPU: lowered and compiled.


def production(kind: str, tokens: int, width: int, features: tuple[int, ...], dtype: str = "bfloat16", **options) -> tuple:
    """(op, arrays, keywords) of a call; shapes and dtypes in the place of arrays."""

    def matrix(count):
        own = KINDS[kind].format.empty((count, width))
        zeros = (own.scales.shape, "uint8") if KINDS[kind].zeros else None
        return own.replace(codes=(own.codes.shape, own.codes.dtype.name), scales=(own.scales.shape, KINDS[kind].scales), zeros=zeros)

    arrays = {"x": ((tokens, width), dtype), "weights": [matrix(count) for count in features]}
    if options.pop("biased", False):
        arrays["biases"] = [((f,), dtype) for f in features]
    if options.pop("normed", False):
        arrays["norm"] = ((width,), dtype)
    if half := options.pop("half", 0):
        arrays["rotation"] = [((tokens, half), "float32")] * 2
    if options.pop("summed", False):
        arrays["residual"] = ((tokens, features[0]), dtype)
    keywords = {"norm_eps": 1e-6, "norm_offset": 0.0, "rotated": 0, "gated": None, "out_dtype": jnp.dtype(dtype), "config": None} | options
    return "project_tokens", arrays, keywords | {name: None for name in ("biases", "norm", "rotation", "residual") if name not in arrays}


QKV_7B, GATED = {"normed": True, "half": 64, "rotated": 2, "biased": True}, {"normed": True, "gated": "silu"}
PRODUCTION = {
    "int8 gate and up": production("int8", 1, 3584, (18944, 18944), **GATED),
    "int8 gate and up, 8 tokens": production("int8", 8, 3584, (18944, 18944), **GATED),
    "int8 gate and up, 16 tokens": production("int8", 16, 3584, (18944, 18944), **GATED),
    "int8 logits": production("int8", 1, 3584, (152064,), out_dtype=jnp.dtype("float32")),
    "fp8 q, k, v, 4 tokens": production("fp8", 4, 3584, (3584, 512, 512), **QKV_7B),
    "int8 down, 8 tokens": production("int8", 8, 18944, (3584,), summed=True),
    "int4 down, 16 tokens": production("int4", 16, 18944, (3584,), summed=True),
    "fp8 down, 8 tokens, float16": production("fp8", 8, 18944, (3584,), "float16", summed=True),
    "fp8 blocks gate and up, 8 tokens": production("fp8 blocks", 8, 3584, (18944, 18944), **GATED),
    "fp8 blocks down": production("fp8 blocks", 1, 18944, (3584,), summed=True),
    "int4 gate and up, 8 tokens": production("int4", 8, 3584, (18944, 18944), **GATED),
    "int4 down": production("int4", 1, 18944, (3584,), summed=True),
    "int4 with zeros q, k, v, 16 tokens": production("int4 with zeros", 16, 3584, (3584, 512, 512), **QKV_7B),
    "int4 with zeros gate and up, 8 tokens": production("int4 with zeros", 8, 3584, (18944, 18944), **GATED),
}


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_it_lowers_to_one_kernel(cuda, case):
    assert cuda.lower(*PRODUCTION[case]).count("custom_call @") == 1


def test_it_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_it_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


def _struct(of):
    return jax.ShapeDtypeStruct(of[0], jnp.dtype(of[1]))


def _mixed(first: str, second: str) -> tuple:
    op, arrays, keywords = production(first, 1, 256, (16,))
    return op, arrays | {"weights": arrays["weights"] + production(second, 1, 256, (16,))[1]["weights"]}, keywords


def _as_arrays(call: tuple) -> tuple:
    """The first matrix is an array."""
    op, arrays, keywords = call
    return op, arrays | {"weights": [((16, 256), "bfloat16"), *arrays["weights"][1:]]}, keywords


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        *((production(kind, 16, 384, (46,)), None) for kind in KINDS if kind not in REFUSED),
        (production("int8", 17, 256, (16,)), "at most 16 tokens, got 17"),
        (production("int8", 1, 96, (16,)), "multiple of 64, got 96"),
        (production("int4", 1, 192, (16,)), "multiple of 128, got 192"),
        (production("int8", 1, 256, (15,)), r"features must be even, got \[15\]"),
        (production("int8", 1, 256, (16,), "float32"), "bfloat16 or float16, got float32"),
        (
            _mixed("int8", "fp8"),
            r"all matrices must be arrays or packed in one format.*int8:1xall\[16, 256\] with scales in float32, fp8_e4m3",
        ),
        (_mixed("int4 rows", "int4 rows with zeros"), r"int4:1xall\+zeros\[16, 256\] with scales in bfloat16"),
        (_as_arrays(_mixed("int8", "int8")), r"got bfloat16\[16, 256\], int8:1xall"),
        (production("int4 of 64", 1, 256, (16,)), "blocks of int4 must have a multiple of 128 columns, or be whole rows, got int4:1x64"),
        (production("int8 of 32", 1, 256, (16,)), "multiple of 64 columns, or be whole rows, got int8:1x32"),
    ],
)
def test_dispatch_takes_it_or_says_why_not(on_hopper, call, reason):
    """On a Hopper GPU a call without a named implementation runs on the kernel, or on `xla` where the kernel cannot
    take it."""
    _, arrays, keywords = call
    structs = jax.tree.map(_struct, arrays, is_leaf=lambda x: isinstance(x, tuple))
    if reason is not None:
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(paging.implementation("project_tokens", "mosaic_gpu"), **keywords), **structs)
    rest = {name: keywords[name] for name in ("rotated", "gated", "norm_offset", "out_dtype")}
    with dispatch.listening() as heard, mock.patch.object(mosaic_gpu, "_project", lambda s, inputs: [inputs["x"]]):
        jax.eval_shape(functools.partial(project_tokens, **rest), structs.pop("x"), tuple(structs.pop("weights")), **structs)
    assert heard == {"project_tokens": "mosaic_gpu" if reason is None else "xla"}


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference(tools, case):
    """Chosen by dispatch; the same bits twice."""
    (x, weights), keywords = arguments(case)
    with dispatch.listening() as heard:
        once = project_tokens(x, weights, **keywords)
    assert heard == {"project_tokens": "mosaic_gpu"}
    check(project_tokens, case)
    for a, b in zip(once, project_tokens(x, weights, **keywords), strict=True):
        tools.assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "case",
    [
        "int8, queries, keys and values",
        "fp8, 11 tokens",
        "int4, several results of several tiles",
        "int4 with zeros, long rows, a team's gate",
    ],
)
def test_bits_alone(tools, case):
    """A token has the same bits alone as among others."""
    (x, weights), keywords = arguments(case)
    together = project_tokens(x, weights, **keywords)
    for token in range(x.shape[0]):
        rotation = keywords["rotation"] and tuple(y[token : token + 1] for y in keywords["rotation"])
        for a, b in zip(together, project_tokens(x[token : token + 1], weights, **keywords | {"rotation": rotation}), strict=True):
            tools.assert_same_bits(a[token : token + 1], b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_matrix_past_2_to_the_31():
    """Rows at both ends and around 2^31 codes are read where they are."""
    width, features = 4096, 2**19 + 264
    needs_memory(2 * width * features)  # twice, while it is filled
    picked = np.array([0, 1, 2**19 - 1, 2**19, features - 1])
    rows = np.random.default_rng(0).integers(-128, 128, (len(picked), width)).astype(np.int8)
    codes = jnp.zeros((features, width), jnp.int8).at[picked].set(rows)
    scales = jnp.linspace(0.5, 2, features, dtype=jnp.float32)[:, None]
    x = jax.random.normal(jax.random.key(1), (2, width), jnp.bfloat16)
    format = MatrixFormat("int8")
    (out,) = project_tokens(x, (PackedMatrix(codes, scales, format=format),), out_dtype=jnp.float32, implementation="mosaic_gpu")
    few = PackedMatrix(jnp.asarray(rows), scales[picked], format=format)
    (ref,) = project_tokens(x, (few,), out_dtype=jnp.float32, implementation="reference")
    np.testing.assert_allclose(out[:, picked], ref, rtol=1e-4, atol=1e-1)
    assert int((out != 0).sum()) == 2 * len(picked)
