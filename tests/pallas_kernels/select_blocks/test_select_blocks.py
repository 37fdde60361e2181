"""The suite of select_blocks: every implementation against the reference, the reference against its rules and lax.top_k, mutants."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.page_index import INDEX_ROWS, page_index
from pallas_kernels.select_blocks import score_blocks, select_blocks, selection_width

XLA = functools.partial(select_blocks, implementation="xla")
IMPLEMENTATIONS = {"xla": XLA, "composed": functools.partial(select_blocks, implementation="composed")}
"""What does every input of this suite; the kernels for one chip have suites of their own beside it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """index: integers (scores are exact, with many ties), floats, equal, infinite (scores overflow to -inf), nan, denormal."""

    kind: str = "bounds"
    index: str = "integers"
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 40, 95, 96)
    num_queries: int = 1
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    page_size: int = 16
    width: int = 6
    block_size: int = 4
    k: int = 5
    sink: int = 1
    local: int = 2
    dtype: str = "float32"
    hole: bool = False

    @property
    def sizes(self) -> dict:
        return {name: getattr(self, name) for name in ("kind", "page_size", "block_size", "k", "sink", "local")}


CASES = {
    "bounds": Case(),
    "mean": Case("mean"),
    "blocks are pages": Case(block_size=16, k=2, local=1),
    "tokens": Case(block_size=1, k=9, local=5),
    "floats": Case(index="floats"),
    "floats, mean": Case("mean", "floats"),
    "drafts": Case(num_queries=3, index="floats"),
    "drafts, mean": Case("mean", num_queries=3),
    "many drafts": Case(num_queries=21),
    "bfloat16": Case(dtype="bfloat16", num_queries=3),
    "float16, mean": Case("mean", dtype="float16"),
    "one head": Case(kv_heads=1, group=1),
    "one KV head of 8": Case("mean", kv_heads=1, group=8),
    "groups of 7": Case(group=7, head_dim=128),
    "8 KV heads": Case(kv_heads=8, group=1),
    "equal scores": Case(index="equal"),
    "scores of -inf": Case(index="infinite"),
    "NaN in the index": Case(index="nan", k=12),
    "denormals": Case(index="denormal"),
    "k covers everything": Case(k=40),
    "k of none": Case(k=0),
    "no sink": Case(sink=0),
    "wide sink and local": Case(sink=6, local=9),
    "a page is missing": Case(hole=True, k=12),
}


@functools.cache
def arguments(name: str) -> tuple:
    """q, index, page_table, lengths. Index rows of pages that are not sealed, or not named, hold NaN or scores that beat all others;
    page 0 and the last one are never named."""
    case = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    used = [-(-n // case.page_size) for n in case.lengths]
    num_pages = sum(used) + 2
    table = np.full((len(used), case.width), -1, np.int32)
    free = list(rng.permutation(np.arange(1, num_pages - 1)))
    shape = (case.kv_heads, case.page_size // case.block_size, INDEX_ROWS[case.kind], case.head_dim)
    index = np.where(rng.random((num_pages, *shape[:2], 1, 1)) < 0.5, np.nan, 100.0) * np.ones((num_pages, *shape))
    for row, length in enumerate(case.lengths):
        table[row, : used[row]] = [free.pop() for _ in range(used[row])]
        if row == len(used) - 1 and len(used) > 1:
            table[row, 0] = table[row - 1, 0]
        sealed = max(length - case.num_queries, 0) // case.page_size
        content = rng.standard_normal((sealed, *shape)) if case.index == "floats" else rng.integers(-2, 3, (sealed, *shape)).astype(float)
        index[table[row, :sealed]] = -np.sort(-content, axis=-2)
    if case.index == "equal":
        index[:] = 1
    elif case.index == "infinite":
        index[table[-2, :4], :, 1:] = -3e38
    elif case.index == "nan":
        index[table[-1, 2:4], :, :2] = np.nan
    elif case.index == "denormal":
        index = index * 1e-40
    if case.hole:
        table[-1, 1] = -1
    num_heads = case.kv_heads * case.group
    q = rng.integers(-3, 4, (len(used), case.num_queries, num_heads, case.head_dim)).astype(float) * case.group
    if case.index == "floats":
        q = rng.standard_normal(q.shape)
    elif case.index == "infinite":
        q = np.abs(q) + 1
    q[case.lengths.index(0), :] = np.nan if 0 in case.lengths else q[0]
    index, q = (jnp.asarray(x, case.dtype) for x in (index, q))
    return q, index, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32)


@functools.cache
def expected(name: str) -> np.ndarray:
    return np.asarray(select_blocks(*arguments(name), **CASES[name].sizes, implementation="reference"))


def check(op, name: str) -> None:
    ids = op(*arguments(name), **CASES[name].sizes)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(ids), expected(name))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", CASES)
def test_reference_keeps_the_rules(name):
    """Each list, taken apart in plain Python: sink, local, open page, candidates, count, order."""
    case = CASES[name]
    table = np.asarray(arguments(name)[2])
    ids = expected(name)
    assert ids.shape[2] == selection_width(
        case.num_queries, **{x: case.sizes[x] for x in ("page_size", "block_size", "k", "sink", "local")}
    )
    per_page = case.page_size // case.block_size
    for row, length in enumerate(case.lengths):
        current = (length - 1) // case.block_size
        unsealed = max(length - case.num_queries, 0) // case.page_size * per_page
        first_local = max(min(current - case.local + 1, unsealed), 0)
        local = list(range(first_local, current + 1))
        sink = list(range(min(case.sink, first_local)))
        candidates = [b for b in range(case.sink, first_local) if table[row, b // per_page] >= 0]
        for head in range(case.kv_heads):
            listed = [int(b) for b in ids[row, head] if b >= 0]
            assert [int(b) for b in ids[row, head]] == listed + [-1] * (ids.shape[2] - len(listed)), "-1 stand at the end"
            assert listed == sorted(set(listed)), "ascending, each once"
            distant = [b for b in listed if b not in sink and b not in local]
            assert set(sink) | set(local) <= set(listed) or length == 0
            assert set(distant) <= set(candidates)
            assert len(distant) == min(case.k, len(candidates))


@pytest.mark.parametrize("name", ["bounds", "mean", "floats", "drafts", "equal scores", "bfloat16"])
def test_reference_keeps_the_top_k(name):
    """The distant blocks are those that jax.lax.top_k takes among the candidates of the last row, from scores computed by numpy."""
    case = CASES[name]
    q, index, table, lengths = (np.asarray(x, np.float32) if x.dtype != np.int32 else np.asarray(x) for x in arguments(name))
    first_local = (lengths[-1] - case.num_queries) // case.page_size * (case.page_size // case.block_size)
    per_head = index[table[-1]].swapaxes(0, 1).reshape(case.kv_heads, -1, INDEX_ROWS[case.kind], case.head_dim)
    for head in range(case.kv_heads):
        group = q[-1, :, head * case.group : (head + 1) * case.group]
        rows = per_head[head, case.sink : first_local]
        if case.kind == "bounds":
            score = np.einsum("tgd,sd->tgs", np.maximum(group, 0), rows[:, 0]) + np.einsum("tgd,sd->tgs", np.minimum(group, 0), rows[:, 1])
        else:
            score = np.einsum("td,sd->ts", group.mean(1), rows[:, 0])[:, None]
        top = np.asarray(jax.lax.top_k(jnp.asarray(score.max((0, 1))), case.k)[1]) + case.sink
        listed = expected(name)[-1, head]
        np.testing.assert_array_equal(listed[(listed >= case.sink) & (listed < first_local)], np.sort(top))


def test_ties_go_to_the_lower_block():
    """With every score equal, the distant blocks are the first ones after the sink."""
    ids = np.asarray(select_blocks(*arguments("equal scores"), **CASES["equal scores"].sizes))
    assert ids[-1, 0].tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_bounds_bound_every_dot_product(tools):
    """The score of a block is at least q . key for every key in it and every head of the group: Quest's upper bound."""
    paged = tools.make_paged(lengths=(96, 96), seed=3)
    index = page_index(paged.k, kind="bounds", block_size=4)
    scores = score_blocks(paged.q, index, paged.page_table, kind="bounds")
    k = paged.k[paged.page_table].swapaxes(2, 3).reshape(2, 24, 4, 2, 32)
    products = jnp.einsum("bkgd,bncKd->bkgnKc", paged.q[:, 0].reshape(2, 2, 4, 32), k, precision="highest")
    best = jnp.stack([products[:, head, :, :, head].max((1, 3)) for head in range(2)], axis=1)
    assert scores.shape == best.shape == (2, 2, 24)
    assert (scores >= best - 1e-3).all()
    assert (scores - best).min() < 0.8 * (scores - best).max(), "a bound that never comes near the products would select nothing"


def test_mean_scores_are_the_published_ones(tools):
    """The group's mean query against the block's mean key."""
    paged = tools.make_paged(lengths=(96, 96), seed=3)
    scores = score_blocks(paged.q, page_index(paged.k, kind="mean", block_size=4), paged.page_table, kind="mean")
    k = np.asarray(paged.k[paged.page_table].swapaxes(2, 3).reshape(2, 24, 4, 2, 32)).mean(2)
    q = np.asarray(paged.q[:, 0]).reshape(2, 2, 4, 32).mean(2)
    np.testing.assert_allclose(scores, np.einsum("bkd,bnkd->bkn", q, k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_queries", [1, 2, 5, 16, 17, 33])
@pytest.mark.parametrize(("block_size", "local"), [(16, 1), (4, 2), (1, 40), (8, 3)])
def test_width_is_the_most_that_can_be_local(num_queries, block_size, local):
    """Over all lengths, the local blocks reach the width and never pass it."""
    most = 0
    for length in range(num_queries, 200):
        current = (length - 1) // block_size
        first_local = max(min(current - local + 1, (length - num_queries) // 16 * (16 // block_size)), 0)
        most = max(most, current - first_local + 1)
    assert selection_width(num_queries, page_size=16, block_size=block_size, k=7, sink=3, local=local) == 10 + most


@pytest.mark.parametrize("case", ["floats", "bfloat16"])
def test_bits_twice_and_in_any_company_and_table(tools, case):
    q, index, table, lengths = arguments(case)
    once = np.asarray(XLA(q, index, table, lengths, **CASES[case].sizes))
    tools.assert_same_bits(once, XLA(q, index, table, lengths, **CASES[case].sizes))
    wide = jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1)
    tools.assert_same_bits(once, XLA(q, index, wide, lengths, **CASES[case].sizes))
    others = jnp.arange(8) != 5
    changed = XLA(
        jnp.where(others[:, None, None, None], -q, q),
        index,
        jnp.where(others[:, None], table[-1], table),
        jnp.where(others, 96, lengths),
        **CASES[case].sizes,
    )
    tools.assert_same_bits(once[5], changed[5])


# Mutants: what a selector gets wrong, expressed on its arguments or its results.


def _ids(change):
    return lambda *arrays, **sizes: change(XLA(*arrays, **sizes))


def _length_off(by):
    return lambda q, index, table, lengths, **sizes: XLA(q, index, table, jnp.maximum(lengths + by, 0), **sizes)


def _index(change):
    return lambda q, index, table, lengths, **sizes: XLA(q, change(index), table, lengths, **sizes)


def _sized(**by):
    """With sizes off by some, the list cut or filled to the right width."""

    def op(q, *arrays, **sizes):
        width = selection_width(q.shape[1], **{name: sizes[name] for name in ("page_size", "block_size", "k", "sink", "local")})
        ids = XLA(q, *arrays, **(sizes | {name: max(sizes[name] + n, name == "local") for name, n in by.items()}))
        return jnp.pad(ids, ((0, 0), (0, 0), (0, width)), constant_values=-1)[..., :width]

    return op


def _one_query_for_the_group(q, index, *arrays, **sizes):
    grouped = q.reshape(*q.shape[:2], index.shape[1], -1, q.shape[3])
    return XLA(jnp.broadcast_to(grouped.mean(3, keepdims=True), grouped.shape).reshape(q.shape), index, *arrays, **sizes)


def _first_head_of_the_group(q, index, *arrays, **sizes):
    grouped = q.reshape(*q.shape[:2], index.shape[1], -1, q.shape[3])
    return XLA(jnp.broadcast_to(grouped[:, :, :, :1], grouped.shape).reshape(q.shape), index, *arrays, **sizes)


def _heads_interleaved(q, index, *arrays, **sizes):
    return XLA(q.reshape(*q.shape[:2], -1, index.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape), index, *arrays, **sizes)


def _last_query_only(q, *arrays, **sizes):
    return XLA(jnp.broadcast_to(q[:, -1:], q.shape), *arrays, **sizes)


def _open_page_forgotten(q, *arrays, **sizes):
    """The selection as if every token but the last had been sealed with its page."""
    ids = XLA(q[:, -1:], *arrays, **sizes)
    width = selection_width(q.shape[1], **{name: sizes[name] for name in ("page_size", "block_size", "k", "sink", "local")})
    return jnp.pad(ids, ((0, 0), (0, 0), (0, width - ids.shape[2])), constant_values=-1)


def _ties_to_the_higher_block(q, index, table, lengths, **sizes):
    """One dimension more, in which later blocks are a thousandth better: integers still decide first."""
    place = jnp.zeros(index.shape[0]).at[table].set(jnp.arange(table.shape[1]) * index.shape[2], mode="drop")
    better = (place[:, None] + jnp.arange(index.shape[2])) / 1000
    better = jnp.broadcast_to(better[:, None, :, None, None], (*index.shape[:-1], 1))
    ones = jnp.ones((*q.shape[:-1], 1))
    return XLA(jnp.concatenate([q, ones], -1), jnp.concatenate([index, better], -1), table, lengths, **sizes)


def _a_block_twice(*arrays, **sizes):
    ids = XLA(*arrays, **sizes)
    return ids.at[..., 1:2].set(jnp.where(ids[..., 1:2] >= 0, ids[..., :1], -1))


MUTANTS = {
    "zeros": _ids(jnp.zeros_like),
    "sink dropped": _ids(lambda ids: jnp.concatenate([ids[..., 1:], jnp.full_like(ids[..., :1], -1)], -1)),
    "descending": _ids(lambda ids: ids[..., ::-1]),
    "a block twice": _a_block_twice,
    "every block one off": _ids(lambda ids: jnp.where(ids >= 0, ids + 1, -1)),
    "the first head's list": _ids(lambda ids: jnp.broadcast_to(ids[:, :1], ids.shape)),
    "0 for none": _ids(lambda ids: jnp.maximum(ids, 0)),
    "length one short": _length_off(-1),
    "length one long": _length_off(1),
    "one distant block less": _sized(k=-1),
    "one sink block less": _sized(sink=-1),
    "one sink block more": _sized(sink=1),
    "one local block less": _sized(local=-1),
    "one local block more": _sized(local=1),
    "mean instead of maximum over the group": _one_query_for_the_group,
    "first head instead of the group": _first_head_of_the_group,
    "heads interleaved": _heads_interleaved,
    "only the last draft is scored": _last_query_only,
    "open page forgotten": _open_page_forgotten,
    "lower bounds": _index(lambda index: index[..., ::-1, :]),
    "maximum taken for minimum": _index(lambda index: jnp.broadcast_to(index[..., :1, :], index.shape)),
    "blocks reversed in their page": _index(lambda index: index[:, :, ::-1]),
    "NaN ranks first": _index(lambda index: jnp.nan_to_num(index, nan=1000)),
    "ties to the higher block": _ties_to_the_higher_block,
    "-1 in the table wraps": lambda q, index, table, lengths, **sizes: XLA(q, index, jnp.where(table < 0, 0, table), lengths, **sizes),
    "the neighbour's table": lambda q, index, table, *rest, **sizes: XLA(q, index, jnp.roll(table, 1, 0), *rest, **sizes),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


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


def test_what_the_kernel_refuses_is_composed_where_top_k_has_one(monkeypatch):
    arrays, static = arguments("bounds"), SIZES
    names = {"select_blocks": ("mosaic_gpu", "composed", "xla", "reference"), "top_k": ("mosaic_gpu", "xla", "reference")}
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: names[op])
    assert dispatch.choose("select_blocks", None, "", arrays, static) == "composed"
    names["top_k"] = ("xla", "reference")
    assert dispatch.choose("select_blocks", None, "", arrays, static) == "xla"


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, sizes, message = BAD[case]
    shapes = {"q": (2, 1, 8, 32), "index": (9, 2, 4, 2, 32), "page_table": (2, 4), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.float32 if name in ("q", "index") else jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        select_blocks(**arrays, **(SIZES | sizes))


@pytest.mark.parametrize(("name", "dtype"), [("q", jnp.int8), ("index", jnp.int8), ("page_table", jnp.uint8), ("lengths", jnp.float32)])
def test_wrong_dtype_is_refused(name, dtype):
    arrays = dict(zip(("q", "index", "page_table", "lengths"), arguments("bounds"), strict=True))
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(ValueError, match=jnp.dtype(dtype).name):
        select_blocks(**arrays, **SIZES)
