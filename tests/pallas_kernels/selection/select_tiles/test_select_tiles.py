"""The suite of select_tiles: every implementation against the reference, the reference against keys, and mutants
against the suite."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_tiles import select_tiles

REFERENCE = functools.partial(select_tiles, implementation="reference")
XLA = functools.partial(select_tiles, implementation="xla")
"""The base of the mutants."""

IMPLEMENTATIONS = {
    name: functools.partial(select_tiles, implementation=name)
    for name in dispatch.available("select_tiles")
    if name not in ("reference", "mosaic_gpu")
}

CASES = {
    "chunks": {},
    "maximum": {"pooling": "max"},
    "one KV head, a group of 7": {"kv_heads": 1, "group": 7},
    "many KV heads, no group": {"kv_heads": 4, "group": 1},
    "a group of 8": {"group": 8, "kv_heads": 1},
    "several blocks a page": {"page_size": 32, "block_size": 8, "window": (0, 32), "k": 5},
    "more slots than blocks": {"k": 50},
    "one slot": {"k": 1, "pooling": "max"},
    "the best first": {"k": 7, "ranked": True},
    "the best first, all": {"k": 50, "ranked": True, "keys": "equal"},
    "nothing is distant": {"lengths": (31, 32, 17), "starts": (0, 0, 0)},
    "the last tile is short": {"num_queries": 50, "lengths": (186, 322, 150)},
    "padding": {"lengths": (140, 290, 133), "starts": (136, 272, 100)},
    "lengths about a page": {"lengths": (95, 96, 97, 0, 1), "starts": (64, 64, 64, 0, 0), "num_queries": 33},
    "a page is missing": {"hole": True},
    "no sinks": {"window": (0, 16)},
    "sinks that end inside a block": {"window": (20, 40)},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "equal keys": {"keys": "equal"},
    "large logits": {"keys": "huge"},
}


@pytest.fixture(scope="module")
def suite(suite_of, case_type):
    """(check, arguments) of `CASES`."""
    return suite_of({name: case_type(**fields) for name, fields in CASES.items()})


@pytest.mark.quick_but(
    "xla-one KV head, a group of 7",
    "xla-lengths about a page",
    "xla-several blocks a page",
    "xla-bfloat16",
    "xla-sinks that end inside a block",
    "xla-the last tile is short",
)
@pytest.mark.parametrize(
    "case",
    rest_long(
        CASES,
        "lengths about a page",
        "chunks",
        "bfloat16",
        "one KV head, a group of 7",
        "padding",
        "the last tile is short",
        "the best first, all",
        "nothing is distant",
        "sinks that end inside a block",
        "maximum",
        "several blocks a page",
        "large logits",
        "equal keys",
        "a page is missing",
    ),
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(suite, name, case):
    suite[0](IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("pooling", ["sum", "max"])
def test_reference_lists_what_the_definition_ranks(suite, worths_of, pooling):
    """Worked out in float64 from bounds that come straight from the keys; every case has lists that are not full as
    well."""
    case = "maximum" if pooling == "max" else "chunks"
    arrays, static = suite[1](case)
    worth, blocks = worths_of(arrays, static), np.asarray(REFERENCE(*arrays, **static))
    starts, lengths = np.asarray(arrays[3]), np.asarray(arrays[4])
    for b, tile, h in np.ndindex(blocks.shape[:3]):
        last = min(starts[b] + (tile + 1) * static["query_tile"], lengths[b]) - 1
        begins = np.arange(worth.shape[3]) * static["block_size"]
        candidate = (begins + static["block_size"] > static["window"][0]) & (begins <= last - static["window"][1])
        candidate &= begins + static["block_size"] <= lengths[b] // static["block_size"] * static["block_size"]
        order = [j for j in np.argsort(-worth[b, tile, h], kind="stable") if candidate[j]]
        assert blocks[b, tile, h][blocks[b, tile, h] >= 0].tolist() == sorted(order[: static["k"]])


def test_the_bound_is_one(tools):
    """No key of a block has a larger logit than the block's bound says, for any query: jax.nn's own products are the
    oracle."""
    inputs = tools.make_paged(lengths=(96,), num_queries=16, width=6)
    bounds = page_index(inputs.k, kind="bounds", block_size=16)[inputs.page_table[0]]
    keys = inputs.k[inputs.page_table[0]]
    grouped = inputs.q[0].reshape(16, 2, 4, 32)
    logits = jnp.einsum("tkgd,mksd->tkgms", grouped, keys).max(-1)
    split = jnp.einsum("tkgd,mkd->tkgm", jnp.maximum(grouped, 0), bounds[:, :, 0, 0])
    split += jnp.einsum("tkgd,mkd->tkgm", jnp.minimum(grouped, 0), bounds[:, :, 0, 1])
    assert (split >= logits - 1e-4).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_company(tools, suite, name):
    op = IMPLEMENTATIONS[name]
    (q, bounds, table, starts, lengths), static = suite[1]("chunks")
    once = op(q, bounds, table, starts, lengths, **static)
    tools.assert_same_bits(once, op(q, bounds, table, starts, lengths, **static))
    wide = jnp.pad(table, ((0, 0), (0, 9)), constant_values=-1)
    tools.assert_same_bits(once, op(q, bounds, wide, starts, lengths, **static))
    other = op(q.at[1].set(q[0]), bounds, table.at[1].set(table[2]), starts.at[1].set(0), lengths.at[1].set(7), **static)
    tools.assert_same_bits(once[::2], other[::2])


def test_the_suite_rejects(tools, suite, mutants, mutant):
    tools.must_fail(suite[0], functools.partial(mutants[mutant], XLA), ("chunks", "maximum", "padding"))


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
        ({"ranked": 1}, "ranked must be True or False, got 1"),
        ({"sm_scale": None}, "sm_scale must be a positive number"),
        ({"sm_scale": -0.1}, "sm_scale must be a positive number .* got -0.1"),
    ],
)
def test_refuses(suite, change, said):
    arrays, static = suite[1]("chunks")
    with pytest.raises(ValueError, match=said):
        select_tiles(*arrays, **(static | change))


def test_refuses_arrays_that_do_not_fit(suite):
    (q, bounds, table, starts, lengths), static = suite[1]("chunks")
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
