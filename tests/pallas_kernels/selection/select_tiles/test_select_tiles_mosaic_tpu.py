"""select_tiles for TPU: interpreted on the CPU with race detection, lowered, and compiled ahead of time where libtpu is
installed.

That the race detector prints what is looked for here is tested beside gather_attention for TPU.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import paging
import pytest
import tpu_kernels
from quick_cases import one_in, rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.selection.select_tiles import mosaic_tpu, select_tiles

STATIC = ("k", "block_size", "query_tile", "window", "pooling", "ranked", "sm_scale")
pytestmark = pytest.mark.usefixtures("no_races")
KERNEL = jax.jit(
    paging.implementation("select_tiles", "mosaic_tpu", interpret=tpu_kernels.INTERPRET),
    static_argnames=STATIC,
    compiler_options=tpu_kernels.QUICK,
)
"""The interpreter compiles for longer than it runs."""
REFERENCE = functools.partial(select_tiles, implementation="reference")
"""The base of the mutants: what the suite makes of a mutant of it on these cases does not depend on who computes it,
and this is fast."""

BASE = {"head_dim": 128, "lengths": (200, 333), "starts": (104, 237), "num_queries": 96, "query_tile": 64, "kv_heads": 2, "group": 2}
"""Tiles of four blocks: lists change where a query is scored against blocks after it."""

CASES: dict[str, dict] = {
    "chunks": {},
    "equal keys": {"keys": "equal"},
    "two tiles of bounds": {"lengths": (2300,), "starts": (2204,), "block_size": 8, "kv_heads": 1, "group": 1, "k": 60},
    "maximum, the best first, a page is missing, several blocks a page, padding, a group of 3, bfloat16": {
        **{"pooling": "max", "ranked": True, "hole": True, "page_size": 32, "block_size": 8, "k": 5, "dtype": "bfloat16"},
        **{"lengths": (0, 290), "starts": (0, 202), "group": 3, "kv_heads": 1},
    },
}
MIXED = [*CASES][-1]


@pytest.fixture(scope="module")
def suite(suite_of, case_type):
    """(check, arguments) of `CASES`."""
    return suite_of({name: case_type(**(BASE | fields)) for name, fields in CASES.items()})


@pytest.mark.quick_but("chunks")
@pytest.mark.parametrize(
    "case", rest_long(CASES, "chunks", "maximum, the best first, a page is missing, several blocks a page, padding, a group of 3, bfloat16")
)
def test_matches_reference(suite, case):
    suite[0](KERNEL, case)


@pytest.mark.long
def test_bits_twice_and_in_any_company(tools, suite):
    (q, bounds, table, starts, lengths), static = suite[1]("chunks")
    once = KERNEL(q, bounds, table, starts, lengths, **static)
    tools.assert_same_bits(once, KERNEL(q, bounds, table, starts, lengths, **static))
    changed = q.at[0].multiply(-1), bounds, table.at[0].set(table[1]), starts.at[0].set(0), lengths.at[0].set(7)
    tools.assert_same_bits(once[1], KERNEL(*changed, **static)[1])


@pytest.mark.quick("maxima for minima", "one slot fewer", "a length off by a page")
def test_the_suite_rejects(tools, suite, mutants, mutant):
    tools.must_fail(suite[0], functools.partial(mutants[mutant], REFERENCE), ("chunks", MIXED))


INSIDE = {
    "the second tile of bounds is lost": (
        *("two tiles of bounds", "_reach"),
        lambda reach: lambda *args: (*reach(*args)[:2], jnp.minimum(reach(*args)[2], 1)),
    ),
    "missing pages count": (MIXED, "table_bounds", lambda gather: lambda b, t, there, more: gather(b, t, there | True, more)),
}


@pytest.mark.quick_but("missing pages count")
@pytest.mark.parametrize("bug", INSIDE)
def test_mutant_inside_fails(suite, tools, monkeypatch, bug):
    case, name, change = INSIDE[bug]
    forget = (KERNEL.clear_cache, mosaic_tpu._select.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(mosaic_tpu, name, change(getattr(mosaic_tpu, name)))
    tools.must_fail(suite[0], KERNEL, (case,))
    for clear in forget:
        clear()


def _shapes(batch=1, heads=28, kv_heads=4, head_dim=128, tokens=131072, chunk=8192, page=128, block=128, dtype=jnp.bfloat16):
    """Shapes of the op's arrays: a chunk of sequences of `tokens`."""
    shape, width = jax.ShapeDtypeStruct, tokens // page
    bounds = shape((batch * width + 1, kv_heads, page // block, 2, head_dim), dtype)
    row = shape((batch,), jnp.int32)
    return shape((batch, chunk, heads, head_dim), dtype), bounds, shape((batch, width), jnp.int32), row, row


def _static(**changes) -> dict:
    common = {"k": 32, "block_size": 128, "query_tile": 128, "window": (128, 1024), "pooling": "sum", "ranked": False, "sm_scale": 0.1}
    return common | changes


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M, maximum": ({"heads": 32, "kv_heads": 8, "tokens": 2**20}, {"pooling": "max"}),
    "blocks of 64, batch of 8, odd chunk": ({"batch": 8, "chunk": 1001, "block": 64}, {"block_size": 64}),
    "float32, head dim 256, tiles of 16": ({"dtype": jnp.float32, "head_dim": 256, "tokens": 8192, "chunk": 64}, {"query_tile": 16}),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, changes = PRODUCTION[case]
    op = functools.partial(paging.implementation("select_tiles", "mosaic_tpu"), **_static(**changes))
    assert "tpu_custom_call" in jax.jit(op).trace(*_shapes(**shapes)).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; what is kept on the way is queries, bounds and the tiles' scores, never a query's."""
    shapes, changes = PRODUCTION[case]
    static = _static(**changes)
    q, bounds, table, *rest = _shapes(**shapes)
    op = functools.partial(paging.implementation("select_tiles", "mosaic_tpu"), **static)
    compiled = tpu_kernels.compile_ahead(op, (q, bounds, table, *rest), chip)
    queries, scored = math.prod(q.shape), bounds.shape[2] * table.shape[1]
    kept = queries * q.dtype.itemsize + table.shape[0] * math.prod(bounds.shape[1:]) * table.shape[1] * q.dtype.itemsize
    kept += queries // q.shape[3] // static["query_tile"] * scored * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * kept


UNSUPPORTED = {
    "float16": ({"dtype": jnp.float16}, {}, "TPUs compute in bfloat16 and float32 only; got q float16"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "tiles of 24": ({}, {"query_tile": 24}, "query_tile 24 is not a multiple of 16"),
    "long tiles": ({}, {"query_tile": 2048}, "bytes of vector memory, at most 12582912 are available; query_tile 2048"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_goes_to_another(on_tpu, case):
    shapes, changes, reason = UNSUPPORTED[case]
    op, arrays = functools.partial(select_tiles, **_static(**changes)), _shapes(**shapes)
    with dispatch.listening() as heard:
        jax.eval_shape(op, *arrays)
    assert heard["select_tiles"] == "xla"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(op, implementation="mosaic_tpu"), *arrays)


def test_it_is_preferred_on_a_tpu(on_tpu):
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(select_tiles, **_static()), *_shapes())
    assert heard["select_tiles"] == "mosaic_tpu"
