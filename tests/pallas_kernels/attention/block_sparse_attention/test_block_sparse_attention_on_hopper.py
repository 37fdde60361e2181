"""block_sparse_attention in Mosaic GPU on a Hopper GPU: against the reference, mutants against the suite, bits."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from paging import block_sparse_attention, flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(block_sparse_attention, implementation="mosaic_gpu")
REFERENCE = functools.partial(block_sparse_attention, implementation="reference")

# Inputs of `make_paged` over these, then: starts, window, block_size, query_tile, lists (their width).
BASE = {
    "lengths": (0, 1, 127, 128, 129, 500, 700, 768),
    "num_queries": 300,
    "kv_heads": 2,
    "group": 3,
    "head_dim": 128,
    "page_size": 128,
    "width": 6,
    "dtype": "bfloat16",
}
SPARSE = {"starts": (0, 0, 3, 50, 9, 200, 468, 400), "window": (64, 150), "block_size": 64, "query_tile": 128, "lists": 6}
CASES = {
    "lists": {},
    "float16, groups of 8": {"dtype": "float16", "kv_heads": 1, "group": 8},
    "lists only": {"window": None},
    "lists only of one block": {"window": None, "lists": 1},
    "long lists": {"lists": 13},
    "head dim 64": {"head_dim": 64, "window": (3, 90)},
    "head dim 256": {"head_dim": 256, "kv_heads": 1},
    "window of one token": {"window": (0, 1)},
    "sinks of several tiles": {"window": (200, 20)},
    "blocks of 16": {"block_size": 16, "lists": 41, "window": (7, 33)},
    "blocks of 32, pages of 64": {"block_size": 32, "lists": 19, "page_size": 64, "width": 12},
    "blocks of 128": {"block_size": 128},
    "blocks of 256": {"block_size": 256, "page_size": 256, "width": 3, "lists": 3},
    "tiles of 256 queries": {"query_tile": 256},
    "tiles wider than the chunk": {"query_tile": 384, "num_queries": 129},
    "one token": {"num_queries": 1, "starts": (0, 0, 14, 127, 128, 39, 94, 767)},
    "huge logits": {"keys": "huge"},
    "equal scores": {"keys": "equal"},
    "a page is missing": {"hole": True},
    "a page is missing, lists only": {"hole": True, "window": None},
}
FOR_MUTANTS = ("lists", "lists only", "a page is missing, lists only")


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = BASE | SPARSE | CASES[case]
        given = {name: spec.pop(name) for name in SPARSE}
        return tools.tiles_with_lists(tools.make_paged(seed=sum(map(ord, case)), **spec), **given)

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that the kernel and the mutants face."""

    return tools.chunk_checker(arguments, REFERENCE, slack=2)  # weights are rounded, too


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, case):
    check(KERNEL, case)


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _with(change=None, result=None, **keyword_changes):
    """A mutant: arguments by name changed by `change`, keywords by functions of the same name, results by `result`."""

    def op(*arrays, **keywords):
        given = dict(zip(("q", "k", "v", "table", "starts", "lengths"), arrays, strict=True)) | keywords
        given |= change(given) if change else {}
        given |= {name: of(given[name]) for name, of in keyword_changes.items()}
        found = KERNEL(**given)
        return result(*found) if result else found

    return op


def _of_kv_head(given):
    group = given["q"].shape[2] // given["k"].shape[1]
    return {"blocks": jnp.repeat(given["blocks"][:, :, ::group], group, axis=2)}


MUTANTS = {
    "zeros": _with(result=lambda out, lse: (jnp.zeros_like(out), jnp.zeros_like(lse))),
    "V read from K": _with(lambda given: {"v": given["k"]}),
    "K read from V": _with(lambda given: {"k": given["v"]}),
    "one page dropped": _with(table=lambda table: table.at[:, -1].set(-1)),
    "one page read for another": _with(table=lambda table: table.at[:, 1].set(table[:, 0])),
    "-1 in the table wraps": _with(lambda given: {"table": given["table"] % given["k"].shape[0]}),
    "scale a hundredth larger": _with(sm_scale=lambda scale: scale * 1.01),
    "length one short": _with(lengths=lambda lengths: jnp.maximum(lengths - 1, 0)),
    "causal mask one late": _with(starts=lambda starts: starts + 1),
    "causal mask one early": _with(starts=lambda starts: starts - 1),
    "the neighbour tile's list": _with(blocks=lambda blocks: jnp.roll(blocks, 1, axis=1)),
    "the neighbour head's list": _with(blocks=lambda blocks: jnp.roll(blocks, 1, axis=2)),
    "one list per KV head": _with(_of_kv_head),
    "first block of a list lost": _with(blocks=lambda blocks: blocks.at[..., 0].set(-1)),
    "last block of a list lost": _with(blocks=lambda blocks: blocks.at[..., -1].set(-1)),
    "a list ends at its first -1": _with(blocks=lambda blocks: jnp.where(jnp.cumsum(blocks < 0, axis=-1) > 0, -1, blocks)),
    "-1 is block 0": _with(blocks=lambda blocks: jnp.where((blocks < 0) & ~(blocks == 0).any(-1, keepdims=True), 0, blocks)),
    "a block counted twice": _with(blocks=lambda blocks: jnp.concatenate([blocks, blocks[..., :1]], axis=-1)),
    "window lost": _with(window=lambda window: None),
    "window one token wider": _with(window=lambda window: window and (window[0], window[1] + 1)),
    "one sink token more": _with(window=lambda window: window and (window[0] + 1, window[1])),
    "LSE in base 2": _with(result=lambda out, lse: (out, lse / np.log(2))),
    "last tile of queries lost": _with(result=lambda out, lse: (out.at[:, -44:].set(0), lse)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


# What it promises besides its values.


def test_bits_do_not_depend_on_widths_or_company(tools, arguments):
    arrays, keywords = arguments("lists")
    (q, k, v, table, starts, lengths), blocks = arrays, keywords["blocks"]
    op = functools.partial(KERNEL, **{name: x for name, x in keywords.items() if name != "blocks"})
    once = op(*arrays, blocks=blocks)
    for _ in range(20):
        tools.assert_all_same_bits(once, op(*arrays, blocks=blocks))
    wide_table, wide = (jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, 9)), constant_values=-1) for x in (table, blocks))
    tools.assert_all_same_bits(once, op(q, k, v, wide_table, starts, lengths, blocks=wide))
    tools.assert_all_same_bits(once, op(q, *tools.moved_pages(k, v, table), starts, lengths, blocks=blocks))
    others = (jnp.arange(8) != 7)[:, None, None, None]
    changed = op(
        jnp.where(others, -q, q), k, v, table, starts, jnp.where(others[:, 0, 0, 0], 0, lengths), blocks=jnp.where(others, -1, blocks)
    )
    tools.assert_all_same_bits(once, changed, 7)


@pytest.mark.parametrize("window", [None, (64, 150)])
def test_every_block_listed_is_causal_attention(tools, arguments, window):
    arrays, keywords = arguments("lists")
    every = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (*keywords["blocks"].shape[:3], 12))
    out, lse = KERNEL(*arrays, **(keywords | {"blocks": every, "window": window}))
    dense_out, dense_lse = flash_attention(*arrays, sm_scale=keywords["sm_scale"], implementation="reference")
    *_, starts, lengths = arrays
    meant = starts[:, None] + jnp.arange(out.shape[1]) < lengths[:, None]
    tools.assert_rows_close(*(jnp.where(meant[..., None, None], x, 0) for x in (out, dense_out)), 8e-3)
    tools.assert_lse_close(*(jnp.where(meant[..., None], x, 0) for x in (lse, dense_lse)))


def test_it_is_what_runs_here(tools, arguments):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    arrays, keywords = arguments("lists")
    tools.assert_all_same_bits(block_sparse_attention(*arrays, **keywords), KERNEL(*arrays, **keywords))
    keywords = keywords | {"query_tile": 100}
    with pytest.raises(NotImplementedError, match="query_tile must be a multiple of 128, got 100"):
        KERNEL(*arrays, **keywords)
    tools.assert_rows_close(block_sparse_attention(*arrays, **keywords)[0][7], REFERENCE(*arrays, **keywords)[0][7], 4e-3)
