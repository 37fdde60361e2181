"""The suite of indexer_scores: xla against the reference, the reference against numpy in float64, mutants against the
suite, promises."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selection.indexer_scores import indexer_scores, quantize_keys, xla

SMALL_TILES = functools.partial(indexer_scores, implementation="xla", config=xla.Config(tile_tokens=32))
"""The base of the mutants: with tiles this small the inputs below take several."""

# inputs of `make_paged`, whose one KV head gives the keys; quantized: keys in float8.
CASES = {
    "one query": {},
    "drafts": {"num_queries": 3},
    "one head": {"group": 1, "head_dim": 20},
    "16-bit drafts": {"num_queries": 3, "dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "a page is missing": {"hole": True},
    "denormal keys": {"keys": "denormal"},
    "one row, page of 8": {"lengths": (29,), "page_size": 8, "width": 5},
    "float8": {"quantized": True, "num_queries": 3},
    "float8, bfloat16 queries": {"quantized": True, "dtype": "bfloat16"},
    "DeepSeek-V3.2's shape": {"lengths": (300, 129), "page_size": 128, "width": 3, "group": 64, "head_dim": 128, "dtype": "bfloat16"},
}
ERROR = 2e-6
"""Of a row's norm: products are exact in float32 or nearly so, sums are float32."""


@dataclasses.dataclass
class Inputs:
    arrays: tuple
    keywords: dict


def make(tools, seed: int, *, quantized: bool = False, **spec) -> Inputs:
    paged = tools.make_paged(seed, **({"kv_heads": 1, "group": 6} | spec))
    keys, keywords = paged.k[:, 0], {}
    weights = np.random.default_rng(seed).standard_normal(paged.q.shape[:3]).astype(np.float32)
    if quantized:
        spread = np.exp(np.random.default_rng(1).standard_normal(keys.shape[:2]))[..., None]
        written = ~np.isnan(np.asarray(keys, np.float32)).all(-1)
        codes, scales = quantize_keys(jnp.nan_to_num(keys) * spread)
        keys = jnp.where(written[..., None], codes, jnp.array(np.nan, codes.dtype))
        keywords["scales"] = jnp.where(written, scales, jnp.nan)
    return Inputs((paged.q, jnp.asarray(weights), keys, paged.page_table, paged.lengths), keywords)


@pytest.fixture(scope="module")
def inputs(tools):
    return functools.cache(lambda case: make(tools, sum(map(ord, case)), **CASES[case]))


@pytest.fixture(scope="module")
def check(inputs):
    """The checker that both the implementation and mutants face."""

    @functools.cache
    def expected(case: str):
        given = inputs(case)
        return np.asarray(indexer_scores(*given.arrays, **given.keywords, implementation="reference"))

    def run(op, case: str) -> None:
        given = inputs(case)
        found, wanted = op(*given.arrays, **given.keywords), expected(case)
        assert found.dtype == jnp.float32
        assert found.shape == wanted.shape
        found = np.asarray(found)
        np.testing.assert_array_equal(found == -np.inf, wanted == -np.inf)
        for row, of_row in zip(found.reshape(-1, found.shape[-1]), wanted.reshape(-1, found.shape[-1]), strict=True):
            there = of_row > -np.inf
            error = np.linalg.norm(row[there].astype(np.float64) - of_row[there])
            assert error <= ERROR * np.linalg.norm(of_row[there])

    return run


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, case):
    check(SMALL_TILES, case)


def test_default_config_matches_reference(check):
    check(functools.partial(indexer_scores, implementation="xla"), "drafts")


@pytest.mark.parametrize("case", ["drafts", "a page is missing", "float8"])
def test_reference_is_the_sum_over_heads(inputs, case):
    """Token by token, in float64."""
    given = inputs(case)
    q, weights, keys, table, lengths = (np.asarray(x, np.float64 if x.dtype != jnp.int32 else None) for x in given.arrays)
    if "scales" in given.keywords:
        keys = keys * np.asarray(given.keywords["scales"], np.float64)[..., None]
    found = np.asarray(indexer_scores(*given.arrays, **given.keywords, implementation="reference"))
    (batch, num_queries), size = q.shape[:2], keys.shape[1]
    finite = 0
    for row, t, s in np.ndindex(batch, num_queries, table.shape[1] * size):
        page = table[row, s // size]
        if page < 0 or s > lengths[row] - num_queries + t:
            assert found[row, t, s] == -np.inf
            continue
        dots = q[row, t] @ keys[page, s % size]
        np.testing.assert_allclose(found[row, t, s], weights[row, t] @ np.maximum(dots, 0), rtol=1e-4, atol=1e-3)
        finite += 1
    assert finite > 200


def _whole(change):
    """A mutant that changes the arguments."""

    def op(*arrays, **keywords):
        return SMALL_TILES(*change(*arrays), **keywords)

    return op


def _no_relu(q, weights, keys, table, lengths, **keywords):
    both = [SMALL_TILES(sign * q, sign * weights, keys, table, lengths, **keywords) for sign in (1, -1)]
    return jnp.where(both[0] == -jnp.inf, -jnp.inf, both[0] + both[1])


def _relu_after_the_sum(*arrays, **keywords):
    scores = SMALL_TILES(*arrays, **keywords)
    return jnp.where(scores == -jnp.inf, scores, jnp.maximum(scores, 0))


def _zero_for_what_is_not_there(*arrays, **keywords):
    scores = SMALL_TILES(*arrays, **keywords)
    return jnp.where(scores == -jnp.inf, 0, scores)


def _drafts_see_each_other(q, weights, *arrays, **keywords):
    each = [SMALL_TILES(q[:, t : t + 1], weights[:, t : t + 1], *arrays, **keywords) for t in range(q.shape[1])]
    return jnp.concatenate(each, axis=1)


def _scale_of_the_neighbour(*arrays, scales=None, **keywords):
    return SMALL_TILES(*arrays, scales=None if scales is None else jnp.roll(jnp.nan_to_num(scales, nan=1), 1, axis=1), **keywords)


def _scale_squared(*arrays, scales=None, **keywords):
    return SMALL_TILES(*arrays, scales=None if scales is None else scales**2, **keywords)


def _tokens_one_late(*arrays, **keywords):
    return jnp.roll(SMALL_TILES(*arrays, **keywords), 1, axis=-1)


MUTANTS = {
    "zeros": lambda *arrays, **keywords: 0 * jnp.nan_to_num(SMALL_TILES(*arrays, **keywords)),
    "no relu": _no_relu,
    "relu after the sum": _relu_after_the_sum,
    "weights of another head": _whole(lambda q, w, *rest: (q, jnp.roll(w, 1, axis=2), *rest)),
    "weights never negative": _whole(lambda q, w, *rest: (q, jnp.abs(w), *rest)),
    "a head dropped": _whole(lambda q, w, *rest: (q, w.at[..., -1].set(0), *rest)),
    "scaled by sqrt(D)": _whole(lambda q, w, *rest: (q, w * q.shape[-1] ** -0.5, *rest)),
    "multiplied in bfloat16": _whole(
        lambda q, w, k, *rest: (q.astype(jnp.bfloat16), w, k if k.itemsize == 1 else k.astype(jnp.bfloat16), *rest)
    ),
    "one page for another": _whole(lambda q, w, k, table, lengths: (q, w, k, table.at[:, 1].set(table[:, 0]), lengths)),
    "-1 in the table wraps": _whole(lambda q, w, k, table, lengths: (q, w, k, jnp.where(table < 0, k.shape[0] - 1, table), lengths)),
    "length one short": _whole(lambda q, w, k, table, lengths: (q, w, k, table, jnp.maximum(lengths - 1, 0))),
    "length one long": _whole(lambda q, w, k, table, lengths: (q, w, k, table, lengths + 1)),
    "0 for what is not there": _zero_for_what_is_not_there,
    "drafts see each other": _drafts_see_each_other,
    "the neighbour's scale": _scale_of_the_neighbour,
    "scale squared": _scale_squared,
    "tokens one late": _tokens_one_late,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


# Quantized keys.


def random_keys(seed=0, tokens=4096, dim=128):
    """Keys after a LayerNorm, of sizes from 1e-3 to 1e3, some with one large element."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((tokens, dim)) * np.exp(3 * rng.standard_normal((tokens, 1)))
    keys[::7, 3] *= 30
    return jnp.asarray(keys, jnp.float32)


def test_quantized_keys_are_near_every_key():
    """Per key; and per element within half a step of e4m3."""
    keys = random_keys()
    codes, scales = quantize_keys(keys)
    assert codes.dtype == jnp.float8_e4m3fn
    assert (np.frexp(np.asarray(scales))[0] == 0.5).all(), "scales are powers of two"
    back = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[:, None]
    keys = np.asarray(keys, np.float64)
    error = np.abs(back - keys)
    assert (error <= np.maximum(np.abs(keys) / 16, np.asarray(scales)[:, None] * 2.0**-10)).all()
    of_key = np.linalg.norm(error, axis=1) / np.linalg.norm(keys, axis=1)
    assert of_key.max() <= 1 / 16
    assert np.delete(of_key, np.s_[::7]).max() < 0.035, "where no element towers, rounding errors average out"
    largest = np.abs(np.asarray(codes, np.float64)).max(1)
    assert ((largest > 215) & (largest <= 448)).all(), "a key uses the upper half of what e4m3 holds"


@pytest.mark.parametrize(
    ("key", "codes", "scale"),
    [
        ([448.0, -1.0], [448.0, -1.0], 1.0),
        ([449.0, -2.0], [224.0, -1.0], 2.0),
        ([0.0, 0.0], [0.0, 0.0], 2.0**-22),
        ([1e-4, 0.0], [416.0, 0.0], 2.0**-22),
        ([1e30, -1e30], [1e30 / 2.0**91, -1e30 / 2.0**91], 2.0**91),
    ],
)
def test_quantized_keys_by_hand(key, codes, scale):
    found_codes, found_scale = quantize_keys(jnp.asarray(key, jnp.float32))
    assert float(found_scale) == scale
    np.testing.assert_allclose(np.asarray(found_codes, np.float32), codes, rtol=1 / 16)


def test_scores_of_quantized_keys_are_near_those_of_the_keys():
    """Per query: the error's norm, and how many of the 2,048 best of 128K tokens are the same. docs/token-sparse.md
    quotes both."""
    rng, tokens = np.random.default_rng(3), 131072
    keys = jnp.asarray(rng.standard_normal((tokens // 128, 128, 128)), jnp.float32)
    q, weights = jnp.asarray(rng.standard_normal((1, 3, 64, 128)), jnp.float32), jnp.asarray(rng.standard_normal((1, 3, 64)), jnp.float32)
    rows = jnp.asarray(rng.permutation(tokens // 128)[None], jnp.int32), jnp.array([tokens - 100], jnp.int32)
    codes, scales = quantize_keys(keys)
    exact = np.asarray(indexer_scores(q, weights, keys, *rows))[0]
    rounded = np.asarray(indexer_scores(q, weights, codes, *rows, scales=scales))[0]
    for row, of_row in zip(rounded, exact, strict=True):
        there = of_row > -np.inf
        assert np.linalg.norm(row[there] - of_row[there]) / np.linalg.norm(of_row[there]) < 0.035
        best = [set(np.argpartition(-x, 2048)[:2048].tolist()) for x in (row, of_row)]
        assert len(best[0] & best[1]) > 0.96 * 2048


# Promises.


@pytest.mark.parametrize("case", ["16-bit drafts", "float8"])
def test_bits_depend_on_the_row_alone(tools, inputs, case):
    """Run twice; with a wider table; beside other queries and other lengths; with its pages elsewhere in the pool."""
    (q, weights, keys, table, lengths), keywords = inputs(case).arrays, inputs(case).keywords
    found = SMALL_TILES(q, weights, keys, table, lengths, **keywords)
    tools.assert_same_bits(found, SMALL_TILES(q, weights, keys, table, lengths, **keywords))
    wide = jnp.pad(table, ((0, 0), (0, 7)), constant_values=-1)
    tools.assert_same_bits(found, SMALL_TILES(q, weights, keys, wide, lengths, **keywords)[..., : found.shape[-1]])
    kept = 5
    others = jnp.arange(8) != kept
    for length in (0, 96):
        changed = SMALL_TILES(
            jnp.where(others[:, None, None, None], -q, q), weights, keys, table, jnp.where(others, length, lengths), **keywords
        )
        tools.assert_same_bits(found[kept], changed[kept])
    order = np.random.default_rng(9).permutation(keys.shape[0])
    moved = jnp.where(table >= 0, jnp.asarray(np.argsort(order), jnp.int32)[table], -1)
    keywords = {name: array[order] for name, array in keywords.items()}
    tools.assert_same_bits(found, SMALL_TILES(q, weights, keys[order], moved, lengths, **keywords))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_memory_is_bounded_by_the_tile(dtype):
    """256K tokens, of which 64 heads would make 67 MB of dot products: temporaries are a tile's, and the scores once
    more."""
    shape, tokens = jax.ShapeDtypeStruct, 262144
    keys, pages = shape((tokens // 128, 128, 128), jnp.dtype(dtype)), tokens // 128
    q, weights = shape((1, 1, 64, 128), jnp.bfloat16), shape((1, 1, 64), jnp.float32)
    arrays = [q, weights, keys, shape((1, pages), jnp.int32), shape((1,), jnp.int32)]
    scaled = dtype.startswith("float8")

    def op(q, weights, keys, table, lengths, scales=None):
        return indexer_scores(q, weights, keys, table, lengths, scales=scales, implementation="xla")

    memory = jax.jit(op).lower(*arrays, *[shape(keys.shape[:2], jnp.float32)] * scaled).compile().memory_analysis()
    assert memory.output_size_in_bytes == 4 * tokens
    assert memory.temp_size_in_bytes < 4 * tokens + 2 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    num_pages, page = 2**17 + 2, (128, 128)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q, weights = jnp.asarray(rng.standard_normal((1, 1, 4, 128)), jnp.float16), jnp.ones((1, 1, 4), jnp.float32)
    op = functools.partial(indexer_scores, q, weights, lengths=jnp.array([380], jnp.int32), implementation="xla")
    far, near = op(big, jnp.array([[*named]], jnp.int32)), op(small, jnp.array([[0, 1, 2]], jnp.int32))
    np.testing.assert_allclose(far, near, rtol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_other_backends(inputs, platform):
    for case in ("16-bit drafts", "float8"):
        names = ("q", "weights", "keys", "table", "lengths")
        arrays = dict(zip(names, inputs(case).arrays, strict=True)) | inputs(case).keywords
        assert jax.jit(SMALL_TILES).trace(**arrays).lower(lowering_platforms=(platform,)).as_text()


BAD = {
    "q without heads": ({"q": (2, 1, 32)}, {}, r"needs q \[B,T,H,D\]"),
    "keys with heads": ({"keys": (9, 1, 16, 32)}, {}, r"keys \[N,P,D\]"),
    "dims differ": ({"q": (2, 1, 8, 64)}, {}, "dims of q and keys equal"),
    "weights of other heads": ({"weights": (2, 1, 4)}, {}, r"weights must be \[B,T,H\]"),
    "batches differ": ({"lengths": (3,)}, {}, "same batch"),
    "no pages": ({"table": (2, 0)}, {}, "empty"),
    "scales of float32 keys": ({"scales": (9, 16)}, {}, "others take none"),
    "another config": (
        {},
        {"config": {"tile_tokens": 8}, "implementation": "xla"},
        "takes a pallas_kernels.selection.indexer_scores.xla.Config",
    ),
    "reference with config": ({}, {"config": xla.Config(), "implementation": "reference"}, "takes no config"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    shapes = {"q": (2, 1, 8, 32), "weights": (2, 1, 8), "keys": (9, 16, 32), "table": (2, 4), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in ("table", "lengths") else jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        indexer_scores(**arrays, **keywords)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": jnp.zeros(2, jnp.uint8)}, "must be int32"),
        ({"weights": jnp.zeros((2, 1, 8), jnp.bfloat16)}, "weights float32"),
        ({"q": jnp.zeros((2, 1, 8, 32), jnp.int8)}, "q must be one of float32"),
        ({"keys": jnp.zeros((9, 16, 32), jnp.float8_e4m3fn)}, "need scales"),
        ({"keys": jnp.zeros((9, 16, 32), jnp.float8_e4m3fn), "scales": jnp.zeros((9, 8), jnp.float32)}, r"float32 \[N,P\]"),
        ({"keys": jnp.zeros((9, 16, 32), jnp.float8_e5m2)}, "keys one of those or float8_e4m3fn"),
    ],
)
def test_wrong_dtypes_and_scales_are_refused(changed, message):
    arrays = {"q": jnp.zeros((2, 1, 8, 32)), "weights": jnp.zeros((2, 1, 8)), "keys": jnp.zeros((9, 16, 32))}
    arrays |= {"table": jnp.zeros((2, 4), jnp.int32), "lengths": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        indexer_scores(**(arrays | changed))


def test_config_validates_itself():
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(tile_tokens=0)
