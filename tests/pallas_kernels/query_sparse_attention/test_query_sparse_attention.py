"""The suite of query_sparse_attention: every implementation against the reference, the reference against JAX and numpy, and mutants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from paging import query_sparse_attention

from pallas_kernels import dispatch
from pallas_kernels.query_sparse_attention import xla

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
SELECTION = {"gamma": 3, "block_size": 4, "k_blocks": 5, "window": None, "tournament": False, "estimate": "quantile"}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = {"num_queries": 24, "starts": AT_END} | CASES[case]
        keywords = {name: spec.pop(name, value) for name, value in SELECTION.items()}
        keywords["k_exact"] = spec.pop("k_exact", keywords["k_blocks"])
        starts, keys = jnp.asarray(spec.pop("starts"), jnp.int32), spec.get("keys")
        if keys in ("ties", "infinite"):
            spec.pop("keys")
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        q, k, v, table, lengths = paged.arrays
        if keys in ("equal", "ties"):  # small integers: dot products are exact, and often the same
            q = jnp.round(q / 4)
        if keys == "ties":
            k = jnp.clip(jnp.round(k), -1, 1).at[..., 6:].multiply(0)
        elif keys == "infinite":
            q, k = jnp.abs(q) + 1, k.at[table[-2:, 1:3]].set(-3e38)
        return (q, k, v, table, starts, lengths), keywords | {"sm_scale": paged.sm_scale}

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both implementations and mutants face: lists have to be the same slot by slot."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return query_sparse_attention(*arrays, **keywords, implementation="reference")

    def run(op, case: str) -> None:
        arrays, keywords = arguments(case)
        out, lse, ids, scores = op(*arrays, **keywords)
        ref_out, ref_lse, ref_ids, ref_scores = expected(case)
        tools.assert_rows_close(out, ref_out, tools.row_error[arrays[0].dtype.name])
        tools.assert_lse_close(lse, ref_lse)
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(ids), np.asarray(ref_ids))
        tools.assert_lse_close(scores, ref_scores)

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(check, name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("case", ["hybrid", "bfloat16"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(check, config, case):
    check(functools.partial(query_sparse_attention, implementation="xla", config=OTHER_CONFIGS[config]), case)


@pytest.mark.parametrize(("gamma", "block_size"), [(1, 8), (5, 4), (16, 16)])
def test_reference_is_causal_attention_and_top_k(tools, gamma, block_size):
    """Against jax.nn.dot_product_attention on contiguous keys; scores and LSE against scipy's, lists against a sort by numpy."""
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


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _zeros(*arrays, **keywords):
    return tuple(jnp.zeros_like(x) for x in SMALL_TILES(*arrays, **keywords))


def _results(change):
    """change: (out, lse, ids, scores) -> the same, wrong."""
    return lambda *arrays, **keywords: change(*SMALL_TILES(*arrays, **keywords))


def _by_id(out, lse, ids, scores):
    order = jnp.argsort(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=-1)
    return out, lse, *(jnp.take_along_axis(x, order, axis=-1) for x in (ids, scores))


def _keywords(**change):
    """change: name -> function of the keyword."""

    def op(*arrays, **keywords):
        return SMALL_TILES(*arrays, **keywords | {name: wrong(keywords[name]) for name, wrong in change.items()})

    return op


def _arrays(change):
    """change: (q, k, v, table, starts, lengths) -> the same, wrong."""
    return lambda *arrays, **keywords: SMALL_TILES(*change(*arrays), **keywords)


def _on_table(change):
    return _arrays(lambda q, k, v, table, *positions: (q, k, v, change(table, k.shape[0]), *positions))


def _moved(starts_by, lengths_by):
    return _arrays(lambda q, k, v, table, starts, lengths: (q, k, v, table, starts + starts_by, jnp.maximum(lengths + lengths_by, 0)))


def _last_query_of_each(q, *arrays, gamma, **keywords):
    return SMALL_TILES(jnp.roll(q, 1 - gamma, axis=1), *arrays, gamma=gamma, **keywords)


def _positions_not_stretched(q, *arrays, gamma, **keywords):
    return SMALL_TILES(q[:, ::gamma], *arrays, gamma=1, **keywords)


def _padding_selects(q, k, v, table, starts, lengths, **keywords):
    longer = jnp.where(lengths > 0, jnp.maximum(lengths, starts + q.shape[1]), 0)
    wrong = SMALL_TILES(q, k, v, table, starts, longer, **keywords)
    return *SMALL_TILES(q, k, v, table, starts, lengths, **keywords)[:2], *wrong[2:]


def _heads_interleaved(q, k, *arrays, **keywords):
    split = q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape)
    return SMALL_TILES(split, k, *arrays, **keywords)


def _selects_only_whole_blocks(q, k, v, table, starts, lengths, *, window, block_size, gamma, **keywords):
    """The paper's Algorithm 1 stops before the diagonal."""
    keywords |= {"block_size": block_size, "gamma": gamma}
    out, lse, *_ = SMALL_TILES(q, k, v, table, starts, lengths, window=window, **keywords)
    return out, lse, *SMALL_TILES(q, k, v, table, starts, lengths, window=window or (0, block_size - 1 or 1), **keywords)[2:]


def _multiplied_in_bfloat16(q, k, v, *arrays, **keywords):
    out, *rest = SMALL_TILES(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *arrays, **keywords)
    return out.astype(q.dtype), *rest


MUTANTS = {
    "zeros": _zeros,
    "V read from K": _arrays(lambda q, k, v, *others: (q, k, k, *others)),
    "K read from V": _arrays(lambda q, k, v, *others: (q, v, v, *others)),
    "one page dropped": _on_table(lambda table, pages: table.at[:, -1].set(-1)),
    "one page read for another": _on_table(lambda table, pages: table.at[:, 1].set(table[:, 0])),
    "one page doubled": _on_table(lambda table, pages: jnp.roll(table, 1, axis=1).at[:, 0].set(table[:, 0])),
    "the neighbour's table": _on_table(lambda table, pages: jnp.roll(table, 1, axis=0)),
    "-1 in the table wraps": _on_table(lambda table, pages: jnp.where(table < 0, pages - 1, table)),
    "scale times sqrt(D)": _keywords(sm_scale=lambda scale: 1.0),
    "length one short": _moved(0, -1),
    "length and chunk one late": _moved(1, 1),
    "causal mask one late": _moved(1, 0),
    "causal mask one early": _moved(-1, 0),
    "another query of the gamma": _last_query_of_each,
    "positions not stretched": _positions_not_stretched,
    "padding selects": _padding_selects,
    "heads interleaved": _heads_interleaved,
    "LSE in base 2": _results(lambda out, lse, ids, scores: (out, lse / np.log(2), ids, scores)),
    "scores relative to the LSE": _results(lambda out, lse, ids, scores: (out, lse, ids, scores - lse[..., None])),
    "scores of the unscaled products": _results(lambda out, lse, ids, scores: (out, lse, ids, scores * np.sqrt(32))),
    "ascending, not by slot": _results(_by_id),
    "list of the first head": _results(lambda out, lse, ids, scores: (out, lse, jnp.broadcast_to(ids[:, :, :1], ids.shape), scores)),
    "blocks one late": _results(lambda out, lse, ids, scores: (out, lse, jnp.where(ids < 0, ids, ids + 1), scores)),
    "an empty slot is block 0": _results(lambda out, lse, ids, scores: (out, lse, jnp.maximum(ids, 0), scores)),
    "whole blocks only": _selects_only_whole_blocks,
    "window ignored": _keywords(window=lambda window: None),
    "window one token wider": _keywords(window=lambda window: window and (window[0], window[1] + 1)),
    "a sink block that is cut counts": _keywords(window=lambda window: window and (window[0] + 3, window[1])),
    "all exact": lambda *arrays, **keywords: SMALL_TILES(*arrays, **keywords | {"k_exact": keywords["k_blocks"]}),
    "the other estimate": _keywords(estimate=lambda estimate: "quantile" if estimate == "buckets" else "buckets"),
    "all estimated": _keywords(k_exact=lambda k: 0),
    "one exact slot less": _keywords(k_exact=lambda k: max(k - 1, 0)),
    "multiplied in bfloat16": _multiplied_in_bfloat16,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)
