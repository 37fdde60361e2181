"""The suite of select_blocks: every implementation against the reference, the reference against its rules and
lax.top_k, mutants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import in_turn

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import INDEX_ROWS, page_index
from pallas_kernels.selection.select_blocks import score_blocks, score_listed, select_blocks, selection_width
from pallas_kernels.selection.select_blocks.api import Call

XLA = functools.partial(select_blocks, implementation="xla")
IMPLEMENTATIONS = {"xla": XLA, "composed": functools.partial(select_blocks, implementation="composed")}
"""What does every input of this suite; the kernels for one chip have suites of their own beside it."""


COMMON = {"lengths": (0, 1, 15, 16, 17, 40, 95, 96), "kv_heads": 2, "group": 4, "head_dim": 32, "page_size": 16, "block_size": 4}
CASES: dict[str, dict] = {
    "bounds": {},
    "mean": {"kind": "mean"},
    "blocks are pages": {"block_size": 16, "k": 2, "local": 1},
    "tokens": {"block_size": 1, "k": 9, "local": 5},
    "floats": {"index": "floats"},
    "floats, mean": {"kind": "mean", "index": "floats"},
    "drafts": {"num_queries": 3, "index": "floats"},
    "drafts, mean": {"kind": "mean", "num_queries": 3},
    "4 drafts of groups of 7": {"num_queries": 4, "group": 7, "index": "floats", "local": 1},
    "8 drafts of one KV head": {"num_queries": 8, "group": 8, "kv_heads": 1, "block_size": 16, "k": 2, "local": 1},
    "16 drafts": {"num_queries": 16, "group": 1, "kv_heads": 8},
    "many drafts": {"num_queries": 21},
    "bfloat16": {"dtype": "bfloat16", "num_queries": 3},
    "float16, mean": {"kind": "mean", "dtype": "float16"},
    "one head": {"kv_heads": 1, "group": 1},
    "one KV head of 8": {"kind": "mean", "kv_heads": 1, "group": 8},
    "groups of 7": {"group": 7, "head_dim": 128},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "equal scores": {"index": "equal"},
    "scores of -inf": {"index": "infinite"},
    "NaN in the index": {"index": "nan", "k": 12},
    "denormals": {"index": "denormal"},
    "k covers everything": {"k": 40},
    "k of none": {"k": 0},
    "no sink": {"sink": 0},
    "wide sink and local": {"sink": 6, "local": 9},
    "a page is missing": {"hole": True, "k": 12},
}


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(CASES, **COMMON)


@pytest.mark.quick_but(
    "composed-many drafts",
    "composed-tokens",
    "composed-mean",
    "composed-float16, mean",
    "composed-8 KV heads",
    "composed-wide sink and local",
    "xla-one head",
    "xla-blocks are pages",
    "xla-no sink",
)
@pytest.mark.parametrize(("name", "case"), in_turn(IMPLEMENTATIONS, CASES))
def test_matches_reference(suite, name, case):
    suite.check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", CASES)
def test_reference_keeps_the_rules(suite, name):
    """Each list, taken apart in plain Python: sink, local, open page, candidates, count, order."""
    case = suite.cases[name]
    table = np.asarray(suite.arguments(name)[2])
    ids = suite.expected(name)
    assert ids.shape[3] == selection_width(**{x: case.sizes[x] for x in ("page_size", "block_size", "k", "sink", "local")})
    per_page = case.page_size // case.block_size
    for row, query in np.ndindex(len(case.lengths), case.num_queries):
        position = case.lengths[row] - case.num_queries + query
        if position < 0:
            assert (ids[row, query] == -1).all()
            continue
        current = position // case.block_size
        first_local = max(min(current - case.local + 1, position // case.page_size * per_page), 0)
        local = list(range(first_local, current + 1))
        sink = list(range(min(case.sink, first_local)))
        candidates = [b for b in range(case.sink, first_local) if table[row, b // per_page] >= 0]
        for head in range(case.kv_heads):
            listed = [int(b) for b in ids[row, query, head] if b >= 0]
            assert [int(b) for b in ids[row, query, head]] == listed + [-1] * (ids.shape[3] - len(listed)), "-1 stand at the end"
            assert listed == sorted(set(listed)), "ascending, each once"
            distant = [b for b in listed if b not in sink and b not in local]
            assert set(sink) | set(local) <= set(listed)
            assert set(distant) <= set(candidates)
            assert len(distant) == min(case.k, len(candidates))


@pytest.mark.parametrize("name", ["bounds", "mean", "floats", "drafts", "equal scores", "bfloat16"])
def test_reference_keeps_the_top_k(suite, name):
    """The distant blocks are those that jax.lax.top_k takes among the candidates of the last row's queries, from scores
    by numpy."""
    case = suite.cases[name]
    q, index, table, lengths = (np.asarray(x, np.float32) if x.dtype != np.int32 else np.asarray(x) for x in suite.arguments(name))
    per_head = index[table[-1]].swapaxes(0, 1).reshape(case.kv_heads, -1, INDEX_ROWS[case.kind], case.head_dim)
    for query, head in np.ndindex(case.num_queries, case.kv_heads):
        first_local = (lengths[-1] - case.num_queries + query) // case.page_size * (case.page_size // case.block_size)
        group = q[-1, query, head * case.group : (head + 1) * case.group]
        rows = per_head[head, case.sink : first_local]
        if case.kind == "bounds":
            score = np.maximum(group, 0) @ rows[:, 0].T + np.minimum(group, 0) @ rows[:, 1].T
        else:
            score = group.mean(0, keepdims=True) @ rows[:, 0].T
        top = np.asarray(jax.lax.top_k(jnp.asarray(score.max(0)), case.k)[1]) + case.sink
        listed = suite.expected(name)[-1, query, head]
        np.testing.assert_array_equal(listed[(listed >= case.sink) & (listed < first_local)], np.sort(top))


def test_ties_go_to_the_lower_block(suite):
    """With every score equal, the distant blocks are the first ones after the sink."""
    ids = np.asarray(select_blocks(*suite.arguments("equal scores"), **suite.sizes("equal scores")))
    assert ids[-1, 0, 0].tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_bounds_bound_every_dot_product(tools):
    """The score of a block is at least q . key for every key in it and every head of the group: Quest's upper bound."""
    paged = tools.make_paged(lengths=(96, 96), seed=3)
    index = page_index(paged.k, kind="bounds", block_size=4)
    scores = score_blocks(paged.q, index, paged.page_table, kind="bounds")[:, 0]
    k = paged.k[paged.page_table].swapaxes(2, 3).reshape(2, 24, 4, 2, 32)
    products = jnp.einsum("bkgd,bncKd->bkgnKc", paged.q[:, 0].reshape(2, 2, 4, 32), k, precision="highest")
    best = jnp.stack([products[:, head, :, :, head].max((1, 3)) for head in range(2)], axis=1)
    assert scores.shape == best.shape == (2, 2, 24)
    assert (scores >= best - 1e-3).all()
    assert (scores - best).min() < 0.8 * (scores - best).max(), "a bound that never comes near the products would select nothing"


@pytest.mark.parametrize("kind", ["bounds", "mean"])
def test_listed_blocks_score_as_they_do_in_the_table(kind, tools):
    paged = tools.make_paged(lengths=(96, 96), seed=3)
    index, per_page = page_index(paged.k, kind=kind, block_size=4), paged.k.shape[2] // 4
    expected = np.asarray(score_blocks(paged.q, index, paged.page_table, kind=kind))
    ids = np.random.default_rng(0).integers(0, expected.shape[3], (*expected.shape[:3], 7))
    pages = np.asarray(paged.page_table)[np.arange(2)[:, None, None, None], ids // per_page]
    found = score_listed(paged.q, index, jnp.asarray(pages * per_page + ids % per_page, jnp.int32), kind=kind)
    np.testing.assert_allclose(found, np.take_along_axis(expected, ids, axis=3), rtol=1e-5, atol=1e-5)


def test_mean_scores_are_the_published_ones(tools):
    """The group's mean query against the block's mean key."""
    paged = tools.make_paged(lengths=(96, 96), seed=3)
    scores = score_blocks(paged.q, page_index(paged.k, kind="mean", block_size=4), paged.page_table, kind="mean")[:, 0]
    k = np.asarray(paged.k[paged.page_table].swapaxes(2, 3).reshape(2, 24, 4, 2, 32)).mean(2)
    q = np.asarray(paged.q[:, 0]).reshape(2, 2, 4, 32).mean(2)
    np.testing.assert_allclose(scores, np.einsum("bkd,bnkd->bkn", q, k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("block_size", "local"), [(16, 1), (4, 2), (1, 40), (8, 3)])
def test_width_is_the_most_that_can_be_local(block_size, local):
    """Over all lengths, the local blocks reach the width and never pass it."""
    most = 0
    for position in range(200):
        current = position // block_size
        first_local = max(min(current - local + 1, position // 16 * (16 // block_size)), 0)
        most = max(most, current - first_local + 1)
    assert selection_width(page_size=16, block_size=block_size, k=7, sink=3, local=local) == 10 + most


DRAFTED = ("drafts", "4 drafts of groups of 7", "8 drafts of one KV head", "16 drafts", "drafts, mean", "many drafts")


@pytest.mark.parametrize(("name", "case"), in_turn([*IMPLEMENTATIONS, "reference"], DRAFTED))
def test_a_draft_lists_what_a_step_of_its_own_would(suite, name, case):
    """T steps of one token, each at its position, against one step of T."""
    q, index, table, lengths = suite.arguments(case)
    op = functools.partial(select_blocks, implementation=name, **suite.sizes(case))
    together, num_queries = op(q, index, table, lengths), q.shape[1]
    for t in range(num_queries):
        alone = op(q[:, t : t + 1], index, table, jnp.maximum(lengths - num_queries + 1 + t, 0))
        np.testing.assert_array_equal(np.asarray(together)[:, t], np.asarray(alone)[:, 0])


@pytest.mark.parametrize("case", ["floats", "bfloat16"])
def test_bits_twice_and_in_any_company_and_table(suite, tools, case):
    q, index, table, lengths = suite.arguments(case)
    once = np.asarray(XLA(q, index, table, lengths, **suite.sizes(case)))
    tools.assert_same_bits(once, XLA(q, index, table, lengths, **suite.sizes(case)))
    wide = jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1)
    tools.assert_same_bits(once, XLA(q, index, wide, lengths, **suite.sizes(case)))
    others = jnp.arange(8) != 5
    changed = XLA(
        jnp.where(others[:, None, None, None], -q, q),
        index,
        jnp.where(others[:, None], table[-1], table),
        jnp.where(others, 96, lengths),
        **suite.sizes(case),
    )
    tools.assert_same_bits(once[5], changed[5])


def test_mutant_fails(suite, tools, mutant):
    tools.must_fail(suite.check, mutant(XLA), CASES)


SIZES = {"kind": "bounds", "page_size": 16, "block_size": 4, "k": 5, "sink": 1, "local": 2}
BAD = {
    "unknown kind": ({}, {"kind": "median"}, "'median' is unknown; there are bounds, mean"),
    "another index": ({}, {"kind": "mean"}, r"must be \[N, K, 4, 1, 32\]"),
    "block size": ({}, {"block_size": 5}, "block_size 5 does not divide page_size 16"),
    "negative k": ({}, {"k": -1}, "k must be at least 0, got -1"),
    "no local": ({}, {"local": 0}, "local must be at least 1, got 0"),
    "negative sink": ({}, {"sink": -2}, "sink must be at least 0, got -2"),
    "heads no multiple": ({"q": (2, 1, 7, 32)}, {}, "7 query heads are not a multiple of 2 KV heads"),
    "batches differ": ({"lengths": (3,)}, {}, "same batch"),
    "q without heads": ({"q": (2, 1, 32)}, {}, r"takes q \[B,T,H,D\]"),
    "unknown implementation": (
        {},
        {"implementation": "cub"},
        "'cub' of select_blocks is unknown; there are mosaic_gpu",
    ),
}


def test_what_the_kernel_refuses_is_composed_where_top_k_has_one(suite, monkeypatch):
    operands = (Call(**SIZES), *suite.arguments("bounds"))
    names = {"select_blocks": ("mosaic_gpu", "composed", "xla", "reference"), "top_k": ("mosaic_gpu", "xla", "reference")}
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: names[op])
    assert dispatch.choose("select_blocks", None, "", operands) == "composed"
    names["top_k"] = ("xla", "reference")
    assert dispatch.choose("select_blocks", None, "", operands) == "xla"


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, sizes, message = BAD[case]
    shapes = {"q": (2, 1, 8, 32), "index": (9, 2, 4, 2, 32), "table": (2, 4), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.float32 if name in ("q", "index") else jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        select_blocks(**arrays, **(SIZES | sizes))


@pytest.mark.parametrize(("name", "dtype"), [("q", jnp.int8), ("index", jnp.int8), ("table", jnp.uint8), ("lengths", jnp.float32)])
def test_wrong_dtype_is_refused(suite, name, dtype):
    arrays = dict(zip(("q", "index", "table", "lengths"), suite.arguments("bounds"), strict=True))
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(ValueError, match=jnp.dtype(dtype).name):
        select_blocks(**arrays, **SIZES)
