"""What query_sparse_attention promises besides its values: bits, memory, index arithmetic, clear refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import query_sparse_attention

from pallas_kernels.attention.query_sparse_attention import xla

pytestmark = pytest.mark.bits

SMALL_TILES = xla.Config(query_tile=3, key_tile=32, rows=2)
STARTS = jnp.array([0, 0, 3, 5, 9, 29, 71, 50], jnp.int32)
SIZES = {"gamma": 3, "block_size": 4, "k_blocks": 5, "k_exact": 3}


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def bits(request, tools):
    """(arrays, op): chunks of 24 tokens at any start, in several tiles of queries and keys."""
    paged = tools.make_paged(seed=6, num_queries=24, dtype=request.param)
    op = functools.partial(query_sparse_attention, **SIZES, sm_scale=paged.sm_scale, config=SMALL_TILES, implementation="xla")
    return (*paged.arrays[:4], STARTS, paged.lengths), op


@pytest.mark.quick_but("float32-a wider table")
@pytest.mark.parametrize("against", ["again", "a wider table", "company", "other pages", "later tokens"])
def test_bits_stand(tools, bits, against):
    arrays, op = bits
    tools.assert_chunk_bits_stand(against, op, arrays)


def test_bits_do_not_depend_on_the_other_queries(tools, bits):
    """A measured row is the same whatever stands in the rest of its chunk: the queries that are not measured may be
    NaN."""
    (q, *arrays), op = bits
    for kept in (0, 5, 7):
        others = (jnp.arange(24) != 3 * kept)[:, None, None]
        changed = jnp.where((jnp.arange(24) % 3 == 0)[:, None, None], 7 * q[:, ::-1], jnp.nan)
        tools.assert_all_same_bits(op(q, *arrays), op(jnp.where(others, changed, q), *arrays), np.s_[:, kept])


def test_the_tree_gives_the_same_bits_as_replacement(tools, bits):
    arrays, op = bits
    tools.assert_all_same_bits(op(*arrays), op(*arrays, tournament=True))


def test_a_row_in_the_padding_selects_nothing(bits):
    """Even where its query is NaN."""
    (q, *arrays), op = bits
    padding = (STARTS[:, None] + jnp.arange(24) >= arrays[-1][:, None])[..., None, None]
    out, lse, ids, scores = op(jnp.where(padding, jnp.nan, q), *arrays)
    rows = np.asarray(padding[:, ::3, 0, 0])
    assert rows.sum() > 8
    assert (np.asarray(out, np.float32)[rows] == 0).all()
    assert (np.asarray(lse)[rows] == -np.inf).all()
    assert (np.asarray(ids)[rows] == -1).all()
    assert (np.asarray(scores)[rows] == -np.inf).all()


def test_a_chunk_over_128k_tokens_writes_no_scores():
    """8192 queries of 8 heads, 512 measured: logits of them would be 2 GiB, their keys 64 MiB, their block scores 32
    MiB; a tile of logits is 1 MiB."""
    shape = jax.ShapeDtypeStruct
    pool, position = shape((1024, 2, 128, 64), jnp.float32), shape((1,), jnp.int32)
    sizes = {"gamma": 16, "block_size": 64, "k_blocks": 64, "k_exact": 8, "window": (64, 1024)}
    op = functools.partial(query_sparse_attention, **sizes, sm_scale=0.1, config=xla.Config(), implementation="xla")
    lowered = jax.jit(op).lower(shape((1, 8192, 8, 64), jnp.float32), pool, pool, shape((1, 1024), jnp.int32), position, position)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 24 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages."""
    num_pages, page = 2**16 + 2, (2, 128, 128)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2, 2**15)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q = jnp.asarray(4 * rng.standard_normal((1, 40, 4, 128)), jnp.float16)
    sizes = {"gamma": 8, "block_size": 64, "k_blocks": 3, "k_exact": 2, "sm_scale": 128**-0.5}
    op = functools.partial(query_sparse_attention, **sizes, starts=jnp.array([460], jnp.int32), lengths=jnp.array([500], jnp.int32))
    far, near = op(q, big, big, jnp.array([[*named]], jnp.int32)), op(q, small, small, jnp.array([[0, 1, 2, 3]], jnp.int32))
    tools.assert_rows_close(far[0], near[0], 1e-3)
    np.testing.assert_array_equal(far[2], near[2])


BAD = {
    "q without heads": ({"q": (2, 5, 32)}, {}, r"needs q \[B,T,H,D\]"),
    "k and v differ": ({"v": (8, 2, 16, 32)}, {}, "same pages, KV heads and page size"),
    "starts of another batch": ({"starts": (3,)}, {}, "same batch"),
    "window of none": ({}, {"window": (4, 0)}, r"window must be .* got \(4, 0\)"),
    "gamma of none": ({}, {"gamma": 0}, "gamma must be an int, at least 1; got 0"),
    "half a gamma": ({}, {"gamma": 1.5}, "gamma must be an int, at least 1; got 1.5"),
    "no slot": ({}, {"k_blocks": 0}, "k_blocks must be an int, at least 1; got 0"),
    "negative k_exact": ({}, {"k_exact": -1}, "k_exact must be an int, at least 0; got -1"),
    "more exact slots than slots": ({}, {"k_exact": 6}, "k_exact 6 is more than k_blocks 5"),
    "blocks do not divide pages": ({}, {"block_size": 5}, "block_size 5 does not divide page_size 16"),
    "unknown estimate": ({}, {"estimate": "mean"}, "estimate must be one of quantile, buckets; got 'mean'"),
    "tournament by name": ({}, {"tournament": "yes"}, "tournament must be True or False, got 'yes'"),
    "another config": (
        {},
        {"config": 512, "implementation": "xla"},
        r"takes a pallas_kernels\.attention\.query_sparse_attention\.xla\.Config, got 512",
    ),
    "config of the reference": ({}, {"config": SMALL_TILES, "implementation": "reference"}, "takes no config"),
    "unknown implementation": (
        {},
        {"implementation": "triton"},
        "'triton' of query_sparse_attention is unknown; there are mosaic_gpu, mosaic_tpu, xla, reference",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    integers = ("table", "starts", "lengths")
    shapes = {"q": (2, 5, 8, 32), "k": (9, 2, 16, 32), "v": (9, 2, 16, 32), "table": (2, 4), "starts": (2,), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in integers else jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        query_sparse_attention(**arrays, **(SIZES | {"sm_scale": 0.1} | keywords))


@pytest.mark.parametrize("sizes", [{"query_tile": 0}, {"key_tile": -1}, {"rows": "1"}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(**sizes)
