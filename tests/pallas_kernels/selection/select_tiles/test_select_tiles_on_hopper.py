"""select_tiles in Mosaic GPU on a Hopper GPU: against the reference, mutants against the suite, bits, company, long
sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_tiles import select_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(select_tiles, implementation="mosaic_gpu")

BASE = {
    "lengths": (0, 1, 127, 2176, 2300, 3000, 3071, 3072),
    "starts": (0, 0, 0, 2048, 2048, 2688, 2944, 2700),
    "num_queries": 300,
    "query_tile": 128,
    "k": 5,
    "block_size": 128,
    "page_size": 128,
    "window": (128, 512),
    "kv_heads": 2,
    "group": 3,
    "head_dim": 128,
    "dtype": "bfloat16",
}
CASES = {
    "chunks": {},
    "maximum": {"pooling": "max"},
    "padding": {"lengths": (2100, 3001), "starts": (2048, 2688)},
    "head dim 64": {"head_dim": 64},
    "head dim 64, float16, maximum": {"head_dim": 64, "dtype": "float16", "pooling": "max"},
    "a group of 7": {"kv_heads": 1, "group": 7},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "blocks of 64": {"block_size": 64, "k": 12},
    "blocks of 16, two tiles of blocks": {"block_size": 16, "k": 40, "window": (0, 128)},
    "pages of 64": {"page_size": 64, "block_size": 64, "window": (64, 100)},
    "pages of 256": {"page_size": 256, "block_size": 128, "window": (100, 300)},
    "more slots than blocks": {"k": 64},
    "one query": {"num_queries": 1, "starts": (0, 0, 126, 2175, 2299, 2999, 3070, 3071)},
    "no sinks": {"window": (0, 128)},
    "the best first": {"ranked": True},
    "a page is missing": {"hole": True},
    "equal keys": {"keys": "equal"},
    "large logits": {"keys": "huge"},
    "long": {"lengths": (40_000,), "starts": (39_000,), "num_queries": 1000, "kv_heads": 1, "k": 32, "window": (128, 1024)},
}


@pytest.fixture(scope="module")
def suite(suite_of, case_type):
    """(check, arguments) of `CASES`; worths within what sums in another order, and exponentials of the hardware, may
    change."""
    return suite_of({name: case_type(**(BASE | fields)) for name, fields in CASES.items()}, 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(suite, case):
    suite[0](KERNEL, case)


def test_the_suite_rejects(tools, suite, mutants, mutant):
    tools.must_fail(suite[0], functools.partial(mutants[mutant], KERNEL), ("chunks", "maximum", "padding"))


def test_bits_twice_and_in_any_company(tools, suite):
    (q, bounds, table, starts, lengths), static = suite[1]("chunks")
    once = KERNEL(q, bounds, table, starts, lengths, **static)
    tools.assert_same_bits(once, KERNEL(q, bounds, table, starts, lengths, **static))
    tools.assert_same_bits(once, KERNEL(q, bounds, jnp.pad(table, ((0, 0), (0, 200)), constant_values=-1), starts, lengths, **static))
    alone = KERNEL(q[5:6], bounds, table[5:6], starts[5:6], lengths[5:6], **static)
    tools.assert_same_bits(once[5:6], alone)


def test_it_runs_where_nothing_is_named():
    """The production shape: 8K queries of 28 heads against 1M tokens, picked for bfloat16 on this device."""
    key = jax.random.key(0)
    q = jax.random.normal(key, (1, 8192, 28, 128), jnp.bfloat16)
    keys = jax.random.normal(key, (8192, 4, 128, 128), jnp.bfloat16)
    bounds, table = page_index(keys, kind="bounds", block_size=128), jnp.arange(8192, dtype=jnp.int32)[None]
    place = jnp.array([2**20 - 8192], jnp.int32), jnp.array([2**20], jnp.int32)
    static = {"k": 32, "block_size": 128, "query_tile": 128, "window": (128, 1024), "sm_scale": 128**-0.5}
    found = np.asarray(select_tiles(q, bounds, table, *place, **static))
    assert (found[..., :-1] < found[..., 1:]).all()
    assert found.min() >= 1
    np.testing.assert_array_equal(found, np.asarray(KERNEL(q, bounds, table, *place, **static)))
