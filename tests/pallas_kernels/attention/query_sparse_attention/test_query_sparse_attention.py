"""The suite of query_sparse_attention: every implementation against the reference, the reference against JAX and numpy,
and mutants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from paging import query_sparse_attention
from query_sparse_suite import MUTANTS, arguments_of, checker
from quick_cases import rest_long

from pallas_kernels.attention.query_sparse_attention import xla
from pallas_kernels.core import dispatch

SMALL_TILES = functools.partial(query_sparse_attention, implementation="xla", config=xla.Config(query_tile=3, key_tile=32))
"""The base of the mutants: with tiles this small the inputs below take several."""

IMPLEMENTATIONS = {
    name: SMALL_TILES if name == "xla" else functools.partial(query_sparse_attention, implementation=name)
    for name in dispatch.available("query_sparse_attention")
    if name == "xla"  # the kernels have suites of their own
}
OTHER_CONFIGS = {"default": None, "3 rows, odd tiles": xla.Config(query_tile=5, key_tile=1, rows=3)}

AT_END = (0, 0, 0, 0, 0, 16, 71, 72)
"""Chunks of 24 tokens that end where sequences of `make_paged` end; the short ones have padding after them."""
ANYWHERE = (0, 0, 3, 5, 9, 29, 80, 50)
"""The last one has keys after it that must not be seen."""

HYBRID = {"k_exact": 2, "k_blocks": 7}
SINGLE_KEYS = {"block_size": 1, "k_exact": 5, "k_blocks": 8}
"""Sizes that several cases share, so that they share what is compiled."""

CASES = {
    "exact": {},
    "exact, chunks anywhere": {"starts": ANYWHERE},
    "tournament": {"tournament": True, "starts": ANYWHERE},
    "tournament of 6, hybrid": {"tournament": True, "k_exact": 6, "k_blocks": 9},
    "estimated": {"k_exact": 0},
    "hybrid": {**HYBRID, "starts": ANYWHERE},
    "buckets, keys one by one": {"block_size": 1, "k_exact": 3, "k_blocks": 12, "estimate": "buckets", "starts": ANYWHERE},
    "more slots than blocks": {"k_exact": 3, "k_blocks": 30},
    "one slot": {"k_exact": 1, "k_blocks": 1},
    "window": {"window": (8, 20), "k_exact": 2},
    "window with parts of blocks, anywhere": {"window": (5, 9), "starts": ANYWHERE},
    "every query": {"gamma": 1, "num_queries": 7, "starts": (0, 0, 8, 9, 10, 33, 88, 50)},
    "gamma past the chunk": {"gamma": 64, "starts": ANYWHERE},
    "ties": {"keys": "ties", **SINGLE_KEYS},
    "ties in pairs, tournament": {"keys": "ties", "block_size": 2, "tournament": True, "k_exact": 7, "k_blocks": 7, "starts": ANYWHERE},
    "ties, estimated": {"keys": "ties", "block_size": 1, "k_exact": 0, "k_blocks": 12},
    "equal scores": {"keys": "equal", "block_size": 1, "k_exact": 0, "k_blocks": 12},
    "equal scores, hybrid": {"keys": "equal", **SINGLE_KEYS},
    "logits of -inf": {"keys": "infinite", **HYBRID},
    "huge logits": {"keys": "huge"},
    "denormal keys": {"keys": "denormal", **SINGLE_KEYS},
    "a page is missing": {"hole": True, **HYBRID},
    "one head": {"kv_heads": 1, "group": 1, "head_dim": 64},
    "groups of 7, blocks are pages": {"group": 7, "head_dim": 128, "block_size": 16, "k_blocks": 3, "k_exact": 2},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "bfloat16": {"dtype": "bfloat16", "starts": ANYWHERE},
    "float16": {"dtype": "float16", "k_exact": 2},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""
    return arguments_of(tools, {name: {"num_queries": 24, "starts": AT_END} | spec for name, spec in CASES.items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both implementations and mutants face."""
    return checker(tools, arguments)


QUICK = (
    "exact",
    "exact, chunks anywhere",
    "tournament of 6, hybrid",
    "hybrid",
    "buckets, keys one by one",
    "one slot",
    "window with parts of blocks, anywhere",
    "every query",
    "ties",
    "equal scores, hybrid",
    "denormal keys",
    "logits of -inf",
    "a page is missing",
    "bfloat16",
    "groups of 7, blocks are pages",
)


@pytest.mark.quick_but(
    "xla-groups of 7, blocks are pages",
    "xla-hybrid",
    "xla-bfloat16",
    "xla-buckets, keys one by one",
    "xla-one slot",
    "xla-tournament of 6, hybrid",
    "xla-exact",
)
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(check, name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.quick_but("default-bfloat16", "3 rows, odd tiles-hybrid")
@pytest.mark.parametrize("case", ["hybrid", "bfloat16"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(check, config, case):
    check(functools.partial(query_sparse_attention, implementation="xla", config=OTHER_CONFIGS[config]), case)


@pytest.mark.parametrize(("gamma", "block_size"), [(1, 8), (5, 4), (16, 16)])
def test_reference_is_causal_attention_and_top_k(tools, gamma, block_size):
    """Against jax.nn.dot_product_attention on contiguous keys; scores and LSE against scipy's, lists against a sort by
    numpy."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    k, v = (x[paged.page_table].swapaxes(2, 3).reshape(2, 96, 2, 32) for x in (paged.k, paged.v))
    starts, sizes = jnp.zeros(2, jnp.int32), {"gamma": gamma, "block_size": block_size, "k_blocks": 4, "k_exact": 4}
    op = functools.partial(query_sparse_attention, sm_scale=paged.sm_scale, **sizes, implementation="reference")
    out, lse, ids, scores = op(*paged.arrays[:4], starts, paged.lengths)
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(paged.q, k, v, is_causal=True, scale=paged.sm_scale)
    tools.assert_rows_close(out, theirs[:, ::gamma], 1e-5)
    logits = np.einsum("bthd,bshd->bths", *(np.asarray(x, np.float64) for x in (paged.q, np.repeat(k, 4, axis=2)))) * paged.sm_scale
    logits = np.where((np.arange(96)[:, None] >= np.arange(96))[:, None], logits, -np.inf)[:, ::gamma]
    tools.assert_lse_close(lse, scipy.special.logsumexp(logits, axis=-1))
    blocks = scipy.special.logsumexp(logits.reshape(*logits.shape[:3], -1, block_size), axis=-1)
    for where in np.ndindex(*blocks.shape[:3]):
        best = [j for j in np.argsort(-blocks[where], kind="stable")[:4] if blocks[where][j] > -np.inf]
        slots = [(j, s) for j, s in zip(ids[where].tolist(), scores[where].tolist(), strict=True) if j >= 0]
        assert sorted(j for j, _ in slots) == sorted(best)
        np.testing.assert_allclose([s for _, s in slots], [blocks[where][j] for j, _ in slots], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["reference", *IMPLEMENTATIONS])
def test_window_touches_only_the_lists(tools, arguments, name):
    arrays, keywords = arguments("exact, chunks anywhere")
    op = functools.partial(query_sparse_attention, *arrays, implementation=name)
    plain, windowed = op(**keywords), op(**keywords | {"window": (8, 20)})
    tools.assert_same_bits(plain[0], windowed[0])
    tools.assert_same_bits(plain[1], windowed[1])
    position = (arrays[4][:, None] + 3 * jnp.arange(8))[..., None, None]
    ids = windowed[2]
    assert (ids >= 0).any()
    assert ((ids < 0) | ((ids >= 2) & (ids * 4 <= position - 20))).all()


def test_chunks_are_slices_of_the_whole(tools):
    """A chunk that starts at a multiple of gamma gives what its rows give in one call from 0, lists and all."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    q, k, v, table, _ = paged.arrays
    sizes = {"gamma": 4, "block_size": 4, "k_blocks": 6, "k_exact": 2, "window": (4, 10)}
    op = functools.partial(query_sparse_attention, sm_scale=paged.sm_scale, **sizes)
    whole = op(q, k, v, table, jnp.zeros(2, jnp.int32), paged.lengths, implementation="reference")
    for start, stop in ((0, 32), (32, 64), (64, 95)):
        starts = jnp.full(2, start, jnp.int32)
        out, lse, ids, scores = op(q[:, start:stop], k, v, table, starts, starts + stop - start)
        rows = np.s_[:, start // 4 : -(-stop // 4)]
        tools.assert_rows_close(out, whole[0][rows], 1e-5)
        tools.assert_lse_close(lse, whole[1][rows])
        np.testing.assert_array_equal(ids, whole[2][rows])
        tools.assert_lse_close(scores, whole[3][rows])


@pytest.mark.quick_but("-1 in the table wraps", "the other estimate", "all exact")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, functools.partial(MUTANTS[mutant], SMALL_TILES), [*QUICK, *CASES])
