"""The suite of select_tiles: every implementation against the reference, the reference against keys, and mutants against the suite."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.page_index import page_index
from pallas_kernels.select_tiles import select_tiles

REFERENCE = functools.partial(select_tiles, implementation="reference")
XLA = functools.partial(select_tiles, implementation="xla")
IMPLEMENTATIONS = {
    name: functools.partial(select_tiles, implementation=name) for name in dispatch.available("select_tiles") if name != "reference"
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences whose chunk of `num_queries` ends at `lengths` or, where `starts` say so, before; see `make_paged` of the tools."""

    lengths: tuple[int, ...] = (200, 333, 160)
    starts: tuple[int, ...] = (136, 272, 100)
    num_queries: int = 64
    query_tile: int = 32
    k: int = 3
    block_size: int = 16
    page_size: int = 16
    window: tuple[int, int] = (16, 32)
    pooling: str = "sum"
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    dtype: str = "float32"
    hole: bool = False
    keys: str = "random"


CASES = {
    "chunks": Case(),
    "maximum": Case(pooling="max"),
    "one KV head, a group of 7": Case(kv_heads=1, group=7),
    "many KV heads, no group": Case(kv_heads=4, group=1),
    "a group of 8": Case(group=8, kv_heads=1),
    "several blocks a page": Case(page_size=32, block_size=8, window=(0, 32), k=5),
    "more slots than blocks": Case(k=50),
    "one slot": Case(k=1, pooling="max"),
    "nothing is distant": Case(lengths=(31, 32, 17), starts=(0, 0, 0)),
    "the last tile is short": Case(num_queries=50, lengths=(186, 322, 150)),
    "padding": Case(lengths=(140, 290, 133), starts=(136, 272, 100)),
    "lengths about a page": Case(lengths=(95, 96, 97, 0, 1), starts=(64, 64, 64, 0, 0), num_queries=33),
    "a page is missing": Case(hole=True),
    "no sinks": Case(window=(0, 16)),
    "sinks that end inside a block": Case(window=(20, 40)),
    "bfloat16": Case(dtype="bfloat16"),
    "float16": Case(dtype="float16"),
    "equal keys": Case(keys="equal"),
    "large logits": Case(keys="huge"),
}


@functools.cache
def arguments(make, name: str):
    """q, bounds, page_table, starts, lengths, keywords. Bounds of pages that are not sealed are NaN."""
    case = CASES[name]
    sizes = {key: getattr(case, key) for key in ("lengths", "num_queries", "kv_heads", "group", "head_dim", "page_size", "dtype", "keys")}
    width = -(-max(case.lengths) // case.page_size) + 1
    inputs = make(seed=sum(map(ord, name)), width=width, hole=case.hole, **sizes)
    bounds = page_index(inputs.k, kind="bounds", block_size=case.block_size)
    static = {key: getattr(case, key) for key in ("k", "block_size", "query_tile", "window", "pooling")}
    return (inputs.q, bounds, inputs.page_table, jnp.asarray(case.starts, jnp.int32), inputs.lengths), static | {
        "sm_scale": inputs.sm_scale
    }


def worths(arrays, static) -> np.ndarray:
    """What each tile may pay each block, `[B, C, H, S]`, in float64, from the definition."""
    q, bounds, table, starts, lengths = (np.asarray(x, np.float64) if i < 2 else np.asarray(x) for i, x in enumerate(arrays))
    per_page, size = bounds.shape[2], static["block_size"]
    found = np.zeros((q.shape[0], -(-q.shape[1] // static["query_tile"]), q.shape[2], table.shape[1] * per_page))
    for b, t, h in np.ndindex(q.shape[:3]):
        position = starts[b] + t
        if position >= lengths[b]:
            continue
        rows = bounds[np.maximum(table[b], 0), h * bounds.shape[1] // q.shape[2]].reshape(-1, 2, q.shape[3])
        sealed = np.repeat((table[b] >= 0) & ((np.arange(table.shape[1]) + 1) * per_page * size <= lengths[b]), per_page)
        seen = sealed & (np.arange(len(rows)) * size <= position)
        if not seen.any():
            continue
        logits = static["sm_scale"] * (q[b, t, h] * np.where(q[b, t, h] > 0, rows[:, 0], rows[:, 1])).sum(-1)
        paid = np.where(seen, np.exp(np.where(seen, logits, -np.inf) - logits[seen].max()), 0)
        tile = (b, t // static["query_tile"], h)
        found[tile] = found[tile] + paid / paid.sum() if static["pooling"] == "sum" else np.maximum(found[tile], paid / paid.sum())
    return found


def check(op, make, name: str) -> None:
    """Lists are the reference's, but that a block may be taken for another whose worth is the same up to rounding."""
    arrays, static = arguments(make, name)
    blocks, expected = np.asarray(op(*arrays, **static)), np.asarray(REFERENCE(*arrays, **static))
    assert blocks.dtype == np.int32
    assert blocks.shape == expected.shape
    worth = worths(arrays, static)
    for place in np.ndindex(blocks.shape[:3]):
        found, wanted = (x[place][x[place] >= 0].tolist() for x in (blocks, expected))
        assert blocks[place].tolist() == [*found, *[-1] * (blocks.shape[3] - len(found))], "-1 stands at the end"
        assert found == sorted(set(found)), "ascending, each once"
        assert len(found) == len(wanted), place
        gained, lost = (sorted(set(a) - set(b)) for a, b in ((found, wanted), (wanted, found)))
        if gained:
            np.testing.assert_allclose(np.sort(worth[place][gained]), np.sort(worth[place][lost]), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(tools, name, case):
    check(IMPLEMENTATIONS[name], tools.make_paged, case)


@pytest.mark.parametrize("pooling", ["sum", "max"])
def test_reference_lists_what_the_definition_ranks(tools, pooling):
    """Worked out in float64 from bounds that come straight from the keys; every case has lists that are not full as well."""
    case = "maximum" if pooling == "max" else "chunks"
    arrays, static = arguments(tools.make_paged, case)
    worth, blocks = worths(arrays, static), np.asarray(REFERENCE(*arrays, **static))
    starts, lengths = np.asarray(arrays[3]), np.asarray(arrays[4])
    for b, tile, h in np.ndindex(blocks.shape[:3]):
        last = min(starts[b] + (tile + 1) * static["query_tile"], lengths[b]) - 1
        begins = np.arange(worth.shape[3]) * static["block_size"]
        candidate = (begins + static["block_size"] > static["window"][0]) & (begins <= last - static["window"][1])
        candidate &= begins + static["block_size"] <= lengths[b] // static["block_size"] * static["block_size"]
        order = [j for j in np.argsort(-worth[b, tile, h], kind="stable") if candidate[j]]
        assert blocks[b, tile, h][blocks[b, tile, h] >= 0].tolist() == sorted(order[: static["k"]])


def test_the_bound_is_one(tools):
    """No key of a block has a larger logit than the block's bound says, for any query: jax.nn's own products are the oracle."""
    inputs = tools.make_paged(lengths=(96,), num_queries=16, width=6)
    bounds = page_index(inputs.k, kind="bounds", block_size=16)[inputs.page_table[0]]
    keys = inputs.k[inputs.page_table[0]]
    grouped = inputs.q[0].reshape(16, 2, 4, 32)
    logits = jnp.einsum("tkgd,mksd->tkgms", grouped, keys).max(-1)
    split = jnp.einsum("tkgd,mkd->tkgm", jnp.maximum(grouped, 0), bounds[:, :, 0, 0])
    split += jnp.einsum("tkgd,mkd->tkgm", jnp.minimum(grouped, 0), bounds[:, :, 0, 1])
    assert (split >= logits - 1e-4).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_company(tools, name):
    op = IMPLEMENTATIONS[name]
    (q, bounds, table, starts, lengths), static = arguments(tools.make_paged, "chunks")
    once = op(q, bounds, table, starts, lengths, **static)
    tools.assert_same_bits(once, op(q, bounds, table, starts, lengths, **static))
    wide = jnp.pad(table, ((0, 0), (0, 9)), constant_values=-1)
    tools.assert_same_bits(once, op(q, bounds, wide, starts, lengths, **static))
    other = op(q.at[1].set(q[0]), bounds, table.at[1].set(table[2]), starts.at[1].set(0), lengths.at[1].set(7), **static)
    tools.assert_same_bits(once[::2], other[::2])


def _swapped(bounds):
    return bounds[:, :, :, ::-1]


MUTANTS = {
    "nothing is listed": lambda q, b, t, s, n, **kw: jnp.full_like(XLA(q, b, t, s, n, **kw), -1),
    "the first blocks": lambda q, b, t, s, n, **kw: XLA(jnp.zeros_like(q), b, t, s, n, **kw),
    "maxima for minima": lambda q, b, t, s, n, **kw: XLA(q, _swapped(b), t, s, n, **kw),
    "maxima alone": lambda q, b, t, s, n, **kw: XLA(q, jnp.concatenate([b[:, :, :, :1]] * 2, 3), t, s, n, **kw),
    "scale off by sqrt(D)": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n, **(kw | {"sm_scale": kw["sm_scale"] * q.shape[3] ** 0.5})),
    "one slot fewer": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n, **(kw | {"k": kw["k"] - 1})),
    "a block further into the window": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n, **(kw | {"window": (kw["window"][0], 16)})),
    "sinks are candidates": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n, **(kw | {"window": (0, kw["window"][1])})),
    "the other pooling": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n, **(kw | {"pooling": "max" if kw["pooling"] == "sum" else "sum"})),
    "the tile's first query alone": lambda q, b, t, s, n, **kw: XLA(
        jnp.repeat(q[:, :: kw["query_tile"]], kw["query_tile"], 1)[:, : q.shape[1]], b, t, s, n, **kw
    ),
    "KV heads mixed up": lambda q, b, t, s, n, **kw: XLA(q, b[:, ::-1], t, s, n, **kw),
    "a length off by a page": lambda q, b, t, s, n, **kw: XLA(q, b, t, s, n - 16, **kw),
    "starts off by a page": lambda q, b, t, s, n, **kw: XLA(q, b, t, s - 16, n, **kw),
    "the table off by one": lambda q, b, t, s, n, **kw: XLA(q, b, jnp.roll(t, 1, 1), s, n, **kw),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_rejects(tools, name):
    def all_cases():
        for case in ("chunks", "maximum", "padding"):
            check(MUTANTS[name], tools.make_paged, case)

    with pytest.raises(AssertionError):
        all_cases()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": 0}, "k must be a positive int, got 0"),
        ({"k": True}, "k must be a positive int, got True"),
        ({"block_size": 0}, "block_size must be a positive int"),
        ({"query_tile": 1.5}, "query_tile must be a positive int, got 1.5"),
        ({"window": (16, 8)}, "the window of 8 tokens is shorter than a page of 16"),
        ({"window": (-1, 32)}, "window must be a tuple"),
        ({"pooling": "mean"}, "pooling must be one of sum, max, got 'mean'"),
        ({"sm_scale": None}, "sm_scale must be a number"),
    ],
)
def test_refuses(tools, change, said):
    arrays, static = arguments(tools.make_paged, "chunks")
    with pytest.raises(ValueError, match=said):
        select_tiles(*arrays, **(static | change))


def test_refuses_arrays_that_do_not_fit(tools):
    (q, bounds, table, starts, lengths), static = arguments(tools.make_paged, "chunks")
    for arrays in (
        (q[0], bounds, table, starts, lengths),
        (q, bounds[..., :1, :], table, starts, lengths),
        (q[:, :, :3], bounds, table, starts, lengths),
        (q, bounds, table[:2], starts, lengths),
        (q, bounds, table, starts.astype(jnp.float32), lengths),
        (q.astype(jnp.int32), bounds, table, starts, lengths),
        (q[:, :0], bounds, table, starts, lengths),
    ):
        with pytest.raises(ValueError, match=r"got q "):
            select_tiles(*arrays, **static)


def test_memory_is_that_of_tiles_not_of_queries():
    """64K tokens of queries against 512 blocks: nothing of the size of a query's scores for all of them is kept."""
    q = jax.ShapeDtypeStruct((1, 65_536, 4, 64), jnp.bfloat16)
    bounds = jax.ShapeDtypeStruct((520, 2, 1, 2, 64), jnp.bfloat16)
    table, one = jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    static = {"k": 32, "block_size": 128, "query_tile": 128, "window": (128, 1024), "sm_scale": 0.125}
    compiled = jax.jit(functools.partial(XLA, **static)).lower(q, bounds, table, one, one).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 65_536 * 4 * 512 * 4 / 4
