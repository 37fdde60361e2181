"""block_mass in Mosaic GPU on a Hopper GPU: against the reference, mutants against the suite, bits, company, long
chunks, large pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools
from paging import block_mass, flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(block_mass, implementation="mosaic_gpu")

COMMON = {
    "lengths": (0, 1, 127, 128, 129, 500, 700, 768),
    "starts": (0, 0, 3, 50, 9, 200, 468, 468),
    "num_queries": 300,
    "kv_heads": 2,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 6,
    "dtype": "bfloat16",
}
CASES = {
    "chunks": {"block_size": 64},
    "float16, groups of 4, blocks of 16": {"dtype": "float16", "group": 4, "block_size": 16},
    "the last queries": {"first_query": "late", "block_size": 32},
    "queries from 300 on": {"first_query": 300},
    "one head": {"kv_heads": 1, "group": 1},
    "one KV head of 8": {"kv_heads": 1, "group": 8},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "head dim 64": {"head_dim": 64},
    "head dim 256": {"head_dim": 256, "kv_heads": 1, "group": 8},
    "head dim 256, float16, pages of 64": {"head_dim": 256, "dtype": "float16", "page_size": 64, "width": 13},
    "pages of 64": {"page_size": 64, "width": 12, "group": 1},
    "pages of 192, blocks of 48": {"page_size": 192, "width": 4, "head_dim": 64, "block_size": 48},
    "pages of 256, one block": {"page_size": 256, "width": 3},
    "a page is missing": {"hole": True},
    "a page of 64 is missing": {"hole": True, "page_size": 64, "width": 13, "head_dim": 64},
    "one token": {"num_queries": 1, "starts": (0, 0, 14, 127, 128, 39, 94, 767)},
    "129 tokens": {"num_queries": 129, "lengths": (700,), "starts": (571,)},
    "keys after the chunk": {"num_queries": 100},
    "lse of fewer keys, some of none": {"lse_of": "few"},
    "huge logits": {"keys": "huge"},
    "equal scores": {"keys": "equal"},
    "denormal keys": {"keys": "denormal"},
    "more tiles of queries than places": {"lengths": (2000, 3), "width": 17, "kv_heads": 1, "num_queries": 1900, "starts": (100, 0)},
    "long": {"lengths": (9000, 3), "width": 71, "kv_heads": 1, "num_queries": 200, "starts": (8800, 0)},
}
FOR_MUTANTS = ("chunks", "the last queries", "a page is missing", "lse of fewer keys, some of none", "keys after the chunk")


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(CASES, rows=1e-4, each=1e-3, huge=2e-2, **COMMON)


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(suite, case):
    suite.check(KERNEL, case)


def test_mutant_fails(tools, suite, mutant):
    tools.must_fail(suite.check, mutant(KERNEL), FOR_MUTANTS)


@pytest.mark.parametrize("case", ["chunks", "float16, groups of 4, blocks of 16", "head dim 256"])
def test_many_times_the_same_bits(tools, suite, case):
    once = suite.run(KERNEL, case)
    for _ in range(20):
        tools.assert_same_bits(once, suite.run(KERNEL, case))


@pytest.mark.parametrize("against", ["again", "a wider table", "company", "other pages", "later tokens"])
def test_bits_stand(tools, against):
    paged = tools.make_paged(seed=6, **{name: value for name, value in COMMON.items() if name != "starts"})
    arrays = (*paged.arrays[:4], jnp.asarray(COMMON["starts"], jnp.int32), paged.lengths)
    lse = flash_attention(*arrays, sm_scale=paged.sm_scale)[1]

    def op(q, k, v, table, starts, lengths):
        return (KERNEL(q, k, table, starts, lengths, lse, starts + 3, block_size=32, sm_scale=paged.sm_scale)[:, :, :24],)

    tools.assert_chunk_bits_stand(against, op, arrays)


@pytest.fixture(scope="module")
def chunk():
    """8K queries of 7 heads, the last of 32K tokens on pages in random order: (q, k, table, starts, lengths), scale."""
    keys = jax.random.split(jax.random.key(0), 2)
    q = 4 * jax.random.normal(keys[0], (1, 8192, 7, 128), jnp.bfloat16)
    k = jax.random.normal(keys[1], (257, 1, 128, 128), jnp.bfloat16).at[0].set(jnp.nan)
    table = jnp.asarray(np.random.default_rng(0).permutation(np.arange(1, 257, dtype=np.int32)))[None]
    return (q, k, table, jnp.array([24576], jnp.int32), jnp.array([32768], jnp.int32)), 128**-0.5


def test_a_long_chunk_is_the_other_implementations(tools, chunk):
    """With the lse of the dense kernel every query gives 1 in all; block by block it is what XLA says."""
    (q, k, table, starts, lengths), sm_scale = chunk
    lse = flash_attention(q, k, k, table, starts, lengths, sm_scale=sm_scale)[1]
    given = (q, k, table, starts, lengths, lse, jnp.array([24600], jnp.int32))
    mass = KERNEL(*given, block_size=64, sm_scale=sm_scale)
    np.testing.assert_allclose(mass.sum(2), 32768 - 24600, rtol=1e-4)
    expected = block_mass(*given, block_size=64, sm_scale=sm_scale, implementation="xla")
    tools.assert_rows_close(mass, expected, 1e-4)
    np.testing.assert_allclose(mass, expected, rtol=1e-3, atol=1e-6)


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages, to the bit."""
    num_pages = 2**16 + 2
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, 2**15], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    near = jax.random.normal(keys[0], (4, 2, 128, 128), jnp.bfloat16)
    (far,) = far_pools(numbers, near, num_pages=num_pages)
    assert far.size > 2**31
    q = 4 * jax.random.normal(keys[1], (1, 40, 14, 128), jnp.bfloat16)
    rest = (jnp.array([460], jnp.int32), jnp.array([500], jnp.int32), jnp.full((1, 40, 14), 20.0), jnp.zeros(1, jnp.int32))
    op = functools.partial(KERNEL, block_size=64, sm_scale=128**-0.5)
    tools.assert_same_bits(op(q, far, numbers[None], *rest), op(q, near, jnp.arange(4, dtype=jnp.int32)[None], *rest))


def test_it_is_what_runs_here(tools, suite):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    tools.assert_same_bits(suite.run(block_mass, "chunks"), suite.run(KERNEL, "chunks"))
    given, static = suite.arguments("chunks")
    static = static | {"block_size": 8}
    with pytest.raises(NotImplementedError, match="block_size must be a multiple of 16, got 8"):
        KERNEL(**given, **static)
    tools.assert_rows_close(block_mass(**given, **static), block_mass(**given, **static, implementation="reference"), 1e-4)
