"""select_blocks in Mosaic GPU on a Hopper GPU: the very lists of the reference, mutants against the suite, long
contexts, large pools.

Where scores are integers they are exact and full of ties, so that lists must agree entry by entry.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools

from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import select_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(select_blocks, implementation="mosaic_gpu")


COMMON = {
    "lengths": (0, 1, 127, 128, 129, 300, 767, 768),
    "kv_heads": 4,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "block_size": 16,
    "dtype": "bfloat16",
}
LONG = (5, 40000, 65536)
"""512 pages of 128."""

CASES: dict[str, dict] = {
    "bounds": {},
    "mean": {"kind": "mean"},
    "blocks are pages": {"block_size": 128, "k": 2, "local": 1},
    "blocks of 32, 32/8": {"block_size": 32, "kv_heads": 8, "group": 4},
    "mean, blocks of 64, 32/8 of 64": {"kind": "mean", "block_size": 64, "kv_heads": 8, "group": 4, "head_dim": 64},
    "blocks of 4": {"block_size": 4, "k": 19, "local": 5},
    "pages of 64": {"page_size": 64, "block_size": 64, "k": 2, "lengths": (0, 1, 63, 64, 65, 150, 383, 384)},
    "pages of 256": {"page_size": 256, "block_size": 128, "k": 3, "lengths": (0, 1, 255, 256, 257, 600, 1535, 1536)},
    "floats": {"index": "floats"},
    "floats, mean": {"kind": "mean", "index": "floats"},
    "drafts": {"num_queries": 3, "index": "floats"},
    "4 drafts, mean": {"kind": "mean", "num_queries": 4, "group": 4},
    "8 drafts, local of one": {"num_queries": 8, "group": 8, "kv_heads": 2, "local": 1, "lengths": (3, 128, 130, 135, 300, 767)},
    "16 drafts": {"num_queries": 16, "lengths": (10, 128, 140, 384, 767)},
    "16 drafts, mean": {"kind": "mean", "num_queries": 16, "group": 1, "lengths": (10, 128, 140, 384, 767)},
    "groups of 33": {"group": 33, "kv_heads": 1, "index": "floats"},
    "float16": {"dtype": "float16", "num_queries": 2},
    "float16, mean": {"kind": "mean", "dtype": "float16", "index": "floats"},
    "one head": {"kv_heads": 1, "group": 1},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "head dim 64": {"head_dim": 64, "group": 8},
    "head dim 256": {"head_dim": 256, "kv_heads": 2, "group": 8},
    "head dim 256, mean": {"kind": "mean", "head_dim": 256, "kv_heads": 2, "group": 8, "dtype": "float16"},
    "equal scores": {"index": "equal"},
    "scores of -inf": {"index": "infinite"},
    "NaN in the index": {"index": "nan", "k": 30},
    "denormals": {"index": "denormal"},
    "k covers everything": {"k": 60},
    "k is far more than there is": {"k": 300, "lengths": (768, 40)},
    "k of none": {"k": 0},
    "no sink": {"sink": 0},
    "wide sink and local": {"sink": 9, "local": 20},
    "sink beyond the end": {"sink": 60, "k": 2},
    "a page is missing": {"hole": True, "k": 30},
    "batch of 1": {"lengths": (768,), "k": 9},
    "batch of 1, equal scores": {"lengths": (768,), "k": 9, "index": "equal"},
    "batch of 40": {"lengths": tuple(range(0, 760, 19)), "k": 9},
    "long": {"lengths": LONG, "width": 512, "k": 32, "block_size": 64},
    "long, floats": {"kind": "mean", "index": "floats", "lengths": LONG, "width": 512, "k": 32, "block_size": 64},
    "long, equal scores": {"index": "equal", "lengths": LONG, "width": 512, "k": 32, "block_size": 64},
    "long, NaN": {"index": "nan", "lengths": LONG, "width": 512, "k": 1000, "block_size": 128, "hole": True},
}
FOR_MUTANTS = ("bounds", "drafts", "equal scores", "NaN in the index", "a page is missing", "scores of -inf")
NO_MUTANTS = ("ties to the higher block",)
"""It needs a head dim that the kernel does not take."""


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(CASES, **COMMON)


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(suite, case):
    suite.check(KERNEL, case)


# Contexts of a million tokens, with shared pages; what to expect from `xla`, which sorts.

MILLION = {
    "blocks are pages": {"block_size": 128, "k": 32, "local": 1},
    "batch of 8": {"block_size": 128, "k": 32, "local": 1, "batch": 8},
    "blocks of 16": {"block_size": 16, "k": 256, "local": 32},
    "k in the thousands": {"block_size": 64, "k": 1024, "local": 8},
    "means": {"block_size": 32, "k": 64, "local": 8, "kind": "mean"},
    "few values": {"block_size": 16, "k": 64, "local": 8, "values": 1},
    "one value": {"block_size": 16, "k": 64, "local": 8, "values": 0},
}


@pytest.mark.parametrize("case", MILLION)
def test_a_million_tokens(case):
    spec = dict(MILLION[case])
    batch, values, kind = spec.pop("batch", 1), spec.pop("values", 3), spec.pop("kind", "bounds")
    keys = jax.random.split(jax.random.key(sum(map(ord, case))), 3)
    width = (1 << 20) // 128
    shape = (width + 3, 4, 128 // spec["block_size"], INDEX_ROWS[kind], 128)
    index = jax.random.randint(keys[0], shape, -values, values + 1).sort(axis=-2, descending=True).astype(jnp.bfloat16)
    q = (7 * jax.random.randint(keys[1], (batch, 1, 28, 128), -3, 4)).astype(jnp.bfloat16)
    table = jax.vmap(lambda key: jax.random.permutation(key, width + 3)[:width])(jax.random.split(keys[2], batch)).astype(jnp.int32)
    lengths = (1 << 20) - 1000 * jnp.arange(batch, dtype=jnp.int32)
    op = functools.partial(select_blocks, q, index, table, lengths, kind=kind, page_size=128, sink=1, **spec)
    np.testing.assert_array_equal(np.asarray(op(implementation="mosaic_gpu")), np.asarray(op(implementation="xla")))


def test_mutant_fails(suite, tools, mutant):
    tools.must_fail(suite.check, mutant(KERNEL), FOR_MUTANTS)


# Bits.


@pytest.mark.parametrize("case", ["floats", "floats, mean", "drafts"])
def test_the_same_list_every_time_and_in_any_company_and_table(suite, tools, case):
    q, index, table, lengths = suite.arguments(case)
    op = functools.partial(KERNEL, **suite.sizes(case))
    once = np.asarray(op(q, index, table, lengths))
    for _ in range(20):
        tools.assert_same_bits(once, op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1), lengths))
    for kept in (5, 6):
        others = jnp.arange(8) != kept
        for other_table, length in ((table[-1], 768), (-1, 0)):
            changed = op(
                jnp.where(others[:, None, None, None], -q, q),
                *(index, jnp.where(others[:, None], other_table, table), jnp.where(others, length, lengths)),
            )
            tools.assert_same_bits(once[kept], changed[kept])
    turned = op(jnp.roll(q, 3, 0), index, jnp.roll(table, 3, 0), jnp.roll(lengths, 3, 0))
    tools.assert_same_bits(np.roll(once, 3, 0), turned)


@pytest.mark.parametrize("kind", ["bounds", "mean"])
def test_pool_past_2_to_the_31_elements(tools, kind):
    """The last pages of an index of more than 2^31 elements are scored as in one of eight pages."""
    keys = jax.random.split(jax.random.key(1), 2)
    near = jax.random.randint(keys[0], (8, 4, 16, INDEX_ROWS[kind], 128), -2, 3).sort(axis=-2, descending=True).astype(jnp.bfloat16)
    num_pages = 2**31 // near[0].size + 2
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, num_pages // 2, 2, num_pages - 3, num_pages // 4, num_pages - 4], jnp.int32)
    (far,) = far_pools(numbers, near, num_pages=num_pages)
    assert far.size > 2**31
    for i, number in enumerate(numbers):
        tools.assert_same_bits(jax.lax.dynamic_index_in_dim(far, number, keepdims=False), near[i])
    q = (7 * jax.random.randint(keys[1], (1, 1, 28, 128), -3, 4)).astype(jnp.bfloat16)
    lengths, sizes = jnp.array([2000], jnp.int32), {"kind": kind, "page_size": 256, "block_size": 16, "k": 11, "sink": 1, "local": 2}
    found = KERNEL(q, far, numbers[None], lengths, **sizes)
    own = jnp.arange(8, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(KERNEL(q, near, own, lengths, **sizes)))
    ref = select_blocks(q, near, own, lengths, **sizes, implementation="reference")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(ref))


def test_it_is_what_runs_here(suite, tools):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    arrays, sizes = suite.arguments("bounds"), suite.sizes("bounds")
    tools.assert_same_bits(select_blocks(*arrays, **sizes), KERNEL(*arrays, **sizes))
    wide = tuple(x.astype(jnp.float32) for x in arrays[:2]) + arrays[2:]
    with pytest.raises(NotImplementedError, match="got q float32, index float32"):
        KERNEL(*wide, **sizes)
    np.testing.assert_array_equal(np.asarray(select_blocks(*wide, **sizes)), suite.expected("bounds"))


def test_under_jit(suite, tools):
    arrays, sizes = suite.arguments("floats"), suite.sizes("floats")
    tools.assert_same_bits(jax.jit(functools.partial(KERNEL, **sizes))(*arrays), KERNEL(*arrays, **sizes))
