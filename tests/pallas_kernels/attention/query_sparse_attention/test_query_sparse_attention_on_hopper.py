"""query_sparse_attention in Mosaic GPU on a Hopper GPU: against the reference, mutants against the suite, bits,
company."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import query_sparse_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(query_sparse_attention, implementation="mosaic_gpu")
REFERENCE = functools.partial(query_sparse_attention, implementation="reference")
CLOSE_CALLS = 2e-3
"""Share of lists that may differ: two blocks or a block and a threshold closer to each other than float32 sums in
another order are."""

# Inputs of `make_paged` over these, then: starts, and what selection takes over SELECTION.
BASE = {
    "lengths": (0, 1, 64, 65, 700, 1500, 2559, 2560),
    "starts": (0, 0, 3, 50, 500, 1301, 2359, 2000),
    "num_queries": 200,
    "kv_heads": 1,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 20,
    "dtype": "bfloat16",
}
SELECTION = {"gamma": 4, "block_size": 64, "k_blocks": 12, "k_exact": 4, "window": None, "tournament": False, "estimate": "quantile"}
CASES = {
    "hybrid": {},
    "window": {"window": (64, 256)},
    "window with parts of blocks": {"window": (100, 300), "k_exact": 3, "k_blocks": 9},
    "exact and buckets": {"estimate": "buckets"},
    "buckets": {"estimate": "buckets", "k_exact": 0},
    "one bucket": {"estimate": "buckets", "k_exact": 2, "k_blocks": 3},
    "exact, 17 slots in memory, and buckets": {"estimate": "buckets", "k_exact": 17, "k_blocks": 23},
    "more buckets than blocks": {"estimate": "buckets", "k_blocks": 128},
    "exact": {"k_exact": 8, "k_blocks": 8},
    "exact, 1 slot": {"k_exact": 1, "k_blocks": 1},
    "exact, 15 slots": {"k_exact": 15, "k_blocks": 15},
    "hybrid of 16 and 5": {"k_exact": 16, "k_blocks": 21},
    "estimated": {"k_exact": 0},
    "estimated, 1 slot": {"k_exact": 0, "k_blocks": 1},
    "exact, 17 slots in memory": {"k_exact": 17, "k_blocks": 17},
    "tournament of 30": {"k_exact": 30, "k_blocks": 30, "tournament": True},
    "hybrid of 19 in memory and 8": {"k_exact": 19, "k_blocks": 27, "window": (64, 128)},
    "more slots than blocks": {"k_exact": 8, "k_blocks": 128},
    "more slots in memory than blocks": {"k_exact": 128, "k_blocks": 128},
    "every query, 3 tiles": {"gamma": 1, "num_queries": 300, "lengths": (2560,), "starts": (2200,)},
    "129 rows": {"gamma": 2, "num_queries": 257, "lengths": (1500,), "starts": (1243,)},
    "gamma past the chunk": {"gamma": 256},
    "gamma 16, long": {
        "gamma": 16,
        "lengths": (9000, 3),
        "starts": (8400, 0),
        "num_queries": 600,
        "width": 71,
        "k_blocks": 32,
        "k_exact": 8,
    },
    "groups of 4, 2 KV heads, float16": {"group": 4, "kv_heads": 2, "dtype": "float16"},
    "groups of 1, pages of 64": {"group": 1, "kv_heads": 3, "page_size": 64, "width": 40},
    "head dim 64": {"head_dim": 64, "group": 8},
    "head dim 256": {"head_dim": 256, "group": 2},
    "blocks of 128, pages of 256": {"block_size": 128, "page_size": 256, "width": 10, "k_blocks": 7, "k_exact": 3},
    "a page is missing": {"hole": True},
    "huge logits": {"keys": "huge"},
    "equal scores": {"keys": "equal"},
    "equal scores, estimated": {"keys": "equal", "k_exact": 0},
    "equal scores, buckets": {"keys": "equal", "k_exact": 0, "estimate": "buckets"},
    "equal scores, in memory": {"keys": "equal", "k_exact": 18, "k_blocks": 20},
    "denormal keys": {"keys": "denormal"},
    "far below the maximum": {"spread": 40.0},
}
FOR_MUTANTS = ("hybrid", "exact and buckets", "window with parts of blocks", "equal scores", "far below the maximum")


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = BASE | CASES[case]
        keywords = {name: spec.pop(name, value) for name, value in SELECTION.items()}
        starts, spread = jnp.asarray(spec.pop("starts"), jnp.int32), spec.pop("spread", 1.0)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        return (spread * paged.q, *paged.arrays[1:4], starts, paged.lengths), keywords | {"sm_scale": paged.sm_scale}

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both the kernel and mutants face."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return REFERENCE(*arrays, **keywords)

    def run(op, case: str) -> None:
        arrays, keywords = arguments(case)
        (out, lse, ids, scores), (ref_out, ref_lse, ref_ids, ref_scores) = op(*arrays, **keywords), expected(case)
        assert (ids.shape, ids.dtype, scores.shape, scores.dtype) == (ref_ids.shape, jnp.int32, ref_ids.shape, jnp.float32)
        tools.assert_rows_close(out, ref_out, tools.row_error[arrays[0].dtype.name])
        tools.assert_lse_close(lse, ref_lse)
        same = np.asarray((ids == ref_ids).all(-1))
        assert (~same).mean() <= CLOSE_CALLS, f"{(~same).sum()} of {same.size} lists differ"
        tools.assert_lse_close(jnp.asarray(np.asarray(scores)[same]), np.asarray(ref_scores)[same])

    return run


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, case):
    check(KERNEL, case)


@pytest.mark.parametrize("case", ["hybrid", "exact and buckets", "tournament of 30"])
def test_bits_twice_in_company_and_by_chunks(tools, arguments, case):
    """The same rows twice, beside other rows, on a wider table, and as two chunks."""
    (q, k, v, table, starts, lengths), keywords = arguments(case)
    once = KERNEL(q, k, v, table, starts, lengths, **keywords)
    for a, b in zip(once, KERNEL(q, k, v, table, starts, lengths, **keywords), strict=True):
        tools.assert_same_bits(a, b)
    others = jnp.arange(8) != 6
    company = KERNEL(
        jnp.where(others[:, None, None, None], -q, q),
        *(k, v, jnp.pad(table, ((0, 0), (0, 3)), constant_values=-1), starts, jnp.where(others, 0, lengths)),
        **keywords,
    )
    first = KERNEL(q[:, :100], k, v, table, starts, jnp.minimum(lengths, starts + 100), **keywords)
    second = KERNEL(q[:, 100:], k, v, table, starts + 100, lengths, **keywords)
    for whole, beside, head, tail in zip(once, company, first, second, strict=True):
        tools.assert_same_bits(whole[6], beside[6])
        tools.assert_same_bits(whole[4:], jnp.concatenate([head, tail], axis=1)[4:])


def _with(change=None, result=None, **keyword_changes):
    """A mutant: arrays changed by `change`, keywords by functions of the same name, results by `result`."""

    def op(*arrays, **keywords):
        keywords |= {name: of(keywords[name]) for name, of in keyword_changes.items()}
        found = KERNEL(*(change(*arrays) if change else arrays), **keywords)
        return result(*found) if result else found

    return op


MUTANTS = {
    "zeros": _with(result=lambda *found: tuple(map(jnp.zeros_like, found))),
    "V read from K": _with(lambda q, k, v, *others: (q, k, k, *others)),
    "length one short": _with(lambda *arrays: (*arrays[:5], jnp.maximum(arrays[5] - 1, 0))),
    "causal mask one late": _with(lambda *arrays: (*arrays[:4], arrays[4] + 1, arrays[5])),
    "one exact slot less": _with(k_exact=lambda k: k - 1),
    "the other estimate": _with(estimate=lambda estimate: "quantile" if estimate == "buckets" else "buckets"),
    "all estimated": _with(k_exact=lambda k: 0),
    "window one block wider": _with(window=lambda window: window and (window[0], window[1] + 64)),
    "a sink block that is cut counts": _with(window=lambda window: window and (window[0] + 28, window[1])),
    "scores in base 2": _with(result=lambda out, lse, ids, scores: (out, lse, ids, scores / np.log(2))),
    "an empty slot is block 0": _with(result=lambda out, lse, ids, scores: (out, lse, jnp.maximum(ids, 0), scores)),
    "list of the first head": _with(result=lambda out, lse, ids, scores: (out, lse, jnp.broadcast_to(ids[:, :, :1], ids.shape), scores)),
    "blocks far below the maximum score nothing": _with(
        result=lambda out, lse, ids, scores: (out, lse, jnp.where(scores < lse[..., None] - 87, -1, ids), scores)
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


def test_pages_may_lie_anywhere_in_a_large_pool(tools, arguments):
    """Lists past 2^31 bytes: 24576 rows of 28 heads and 1024 slots, nearly all empty."""
    keywords = {"gamma": 1, "block_size": 64, "k_blocks": 1024, "k_exact": 2, "sm_scale": 0.1}
    q = jax.random.normal(jax.random.key(0), (1, 24576, 28, 64), jnp.bfloat16)
    pool = jax.random.normal(jax.random.key(1), (3, 4, 128, 64), jnp.bfloat16)
    table, starts, lengths = jnp.array([[2, 1, 0]], jnp.int32), jnp.array([0], jnp.int32), jnp.array([24576], jnp.int32)
    table = jnp.pad(table, ((0, 0), (0, 189)), constant_values=-1)
    _, _, ids, scores = KERNEL(q, pool, pool, table, starts, lengths, **keywords)
    assert ids.nbytes > 2**31
    last = KERNEL(q[:, -256:], pool, pool, table, lengths - 256, lengths, **keywords)
    tools.assert_same_bits(ids[:, -256:], last[2])
    tools.assert_same_bits(scores[:, -256:], last[3])
