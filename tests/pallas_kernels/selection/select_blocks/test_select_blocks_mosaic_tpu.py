"""select_blocks for TPU: interpreted on the CPU with race detection, lowered, and compiled ahead of time where libtpu
is installed.

That the race detector prints what is looked for here is tested beside gather_attention for TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from quick_cases import one_in, rest_long

from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import mosaic_tpu, select_blocks, selection_width

pytestmark = pytest.mark.usefixtures("no_races")
KERNEL = paging.implementation("select_blocks", "mosaic_tpu")
SMALL_TILES = jax.jit(
    paging.implementation(*("select_blocks", "mosaic_tpu"), config=mosaic_tpu.Config(tile_rows=128), interpret=tpu_kernels.INTERPRET),
    static_argnames=("kind", "page_size", "block_size", "k", "sink", "local"),
    compiler_options=tpu_kernels.QUICK,
)
"""Tiles as small as they can be. The interpreter compiles for longer than it runs."""

XLA = functools.partial(select_blocks, implementation="xla")
"""The base of the mutants: what the suite makes of one on these cases does not depend on who computes it, and this is
fast."""


COMMON = {"lengths": (0, 1, 15, 16, 17, 96), "kv_heads": 2, "group": 4, "head_dim": 128, "page_size": 16, "block_size": 4}
CASES: dict[str, dict] = {
    "bounds": {},
    "floats": {"index": "floats"},
    "equal scores": {"index": "equal"},
    "scores of -inf": {"index": "infinite"},
    "denormals": {"index": "denormal"},
    "a page is missing": {"hole": True, "index": "floats"},
    "NaN in the index, a page is missing": {"index": "nan", "k": 12, "hole": True},
    "mean of groups of 7, drafts": {"kind": "mean", "num_queries": 2, "group": 7, "k": 17},
    "tokens, in tiles": {"block_size": 1, "k": 9, "local": 5, "index": "floats"},
    "mean of pages, 8 KV heads": {"kind": "mean", "block_size": 16, "k": 2, "local": 1, "kv_heads": 8, "group": 1, "lengths": (0, 40, 96)},
    "bfloat16, 4 drafts, a group of 8": {"dtype": "bfloat16", "num_queries": 4, "group": 8, "kv_heads": 1, "local": 1},
    "k covers everything, no sink, wide local": {"k": 40, "sink": 0, "local": 9},
    "k of none, blocks are pages, one head": {"k": 0, "sink": 2, "local": 3, "block_size": 16, "kv_heads": 1, "group": 1},
    "in tiles, pages missing": {"lengths": (1600, 3, 1300), "width": 101, "kv_heads": 1, "k": 30, "hole": True, "dtype": "bfloat16"},
}
FOR_MUTANTS = (
    *("bounds", "equal scores", "NaN in the index, a page is missing", "bfloat16, 4 drafts, a group of 8"),
    "k of none, blocks are pages, one head",
)
NO_MUTANTS = ("ties to the higher block",)
"""It needs a head dim that the kernel does not take."""


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(CASES, **COMMON)


QUICK = ("bounds", "NaN in the index, a page is missing", "in tiles, pages missing", "bfloat16, 4 drafts, a group of 8")


@pytest.mark.quick_but("bfloat16, 4 drafts, a group of 8", "bounds", "NaN in the index, a page is missing")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_matches_reference(suite, case):
    suite.check(SMALL_TILES, case)


def test_ties_go_to_the_lower_block(suite):
    ids = np.asarray(SMALL_TILES(*suite.arguments("equal scores"), **suite.sizes("equal scores")))
    assert ids[-1, 0, 0].tolist()[:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.long
def test_bits_twice_and_in_any_company_and_table(suite, tools):
    q, index, table, lengths = suite.arguments("floats")
    op = functools.partial(SMALL_TILES, **suite.sizes("floats"))
    once = np.asarray(op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, table, lengths))
    tools.assert_same_bits(once, op(q, index, jnp.pad(table, ((0, 0), (0, 99)), constant_values=-1), lengths))
    others = jnp.arange(6) != 4
    changed = op(
        jnp.where(others[:, None, None, None], -q, q),
        index,
        jnp.where(others[:, None], table[-1], table),
        jnp.where(others, 96, lengths),
    )
    tools.assert_same_bits(once[4], changed[4])


@pytest.mark.quick("a block twice", "length one short", "lower bounds")
def test_mutant_fails(suite, tools, mutant):
    tools.must_fail(suite.check, mutant(XLA), FOR_MUTANTS)


def _one_tie_less(sizes, keys, tiles):
    kth, ties, kept = THRESHOLD(sizes, keys, tiles)
    return kth, jnp.maximum(ties - 1, 0), kept


THRESHOLD = mosaic_tpu._threshold
INSIDE = {
    "one tie less": ("equal scores", mosaic_tpu, "_threshold", _one_tie_less),
    "bits of floats as they are": (
        "mean of groups of 7, drafts",
        mosaic_tpu,
        "_ordered",
        lambda score: jax.lax.bitcast_convert_type(score, jnp.int32),
    ),
    "missing pages are candidates": ("NaN in the index, a page is missing", mosaic_tpu._Pages, "strike", lambda *_: None),
}


@pytest.mark.parametrize("bug", rest_long(INSIDE, next(iter(INSIDE))))
def test_mutant_inside_fails(suite, tools, monkeypatch, bug):
    case, *change = INSIDE[bug]
    forget = (SMALL_TILES.clear_cache, mosaic_tpu._select.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(*change)
    tools.must_fail(suite.check, SMALL_TILES, (case,))
    for clear in forget:
        clear()


def test_ordered_integers_keep_the_order_of_floats():
    values = np.array([np.finfo(np.float32).min, -1e30, -1, -1e-38, 0, 1e-38, 0.5, 1, 3e38, np.inf], np.float32)
    ordered = np.asarray(mosaic_tpu._ordered(values))
    assert (np.diff(ordered.astype(np.int64)) > 0).all()
    assert ordered.min() > mosaic_tpu._NO
    assert mosaic_tpu._ordered(np.float32(-0.0)) == mosaic_tpu._ordered(np.float32(0.0))


def _shapes(batch=1, heads=28, kv_heads=4, tokens=131072, page=128, block=128, kind="bounds", dtype=jnp.bfloat16, head_dim=128, drafts=1):
    """Shapes of the op's arrays."""
    shape, width = jax.ShapeDtypeStruct, tokens // page
    index = shape((batch * width + 1, kv_heads, page // block, INDEX_ROWS[kind], head_dim), dtype)
    return shape((batch, drafts, heads, head_dim), dtype), index, shape((batch, width), jnp.int32), shape((batch,), jnp.int32)


def _sizes(block=128, kind="bounds", page=128, k=32) -> dict:
    return {"kind": kind, "page_size": page, "block_size": block, "k": k, "sink": 1, "local": 4}


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M": ({"heads": 32, "kv_heads": 8, "tokens": 2**20}, {"k": 8}),
    "28/4 heads, 1M, batch of 8": ({"batch": 8, "tokens": 2**20}, {}),
    "blocks of 16, drafts": ({"block": 16, "drafts": 4, "tokens": 2**20}, {"block": 16, "k": 256}),
    "mean": ({"kind": "mean", "tokens": 2**20}, {"kind": "mean"}),
    "mean of blocks of 16, 32/8 heads": (
        {"kind": "mean", "block": 16, "heads": 32, "kv_heads": 8, "tokens": 2**20},
        {"kind": "mean", "block": 16},
    ),
    "float32": ({"dtype": jnp.float32, "tokens": 8192}, {}),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, sizes = PRODUCTION[case]
    op = functools.partial(KERNEL, **_sizes(**sizes))
    assert "tpu_custom_call" in jax.jit(op).trace(*_shapes(**shapes)).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; and XLA makes no copy of the index to give the kernel the layout it wants."""
    shapes, sizes = PRODUCTION[case]
    arrays = _shapes(**shapes)
    compiled = tpu_kernels.compile_ahead(functools.partial(KERNEL, **_sizes(**sizes)), arrays, chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21
    tpu_kernels.assert_not_copied(compiled, arrays[1])


UNSUPPORTED = {
    "float16": ({"dtype": jnp.float16}, {}, "bfloat16 and float32 only"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "table": ({"batch": 32, "tokens": 2**20}, {}, "1048704 bytes of scalar memory, at most 786432"),
    "scores": ({"tokens": 2**22, "block": 16}, {"block": 16}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_is_refused_with_the_values(case):
    shapes, sizes, message = UNSUPPORTED[case]
    arrays, sizes = _shapes(**shapes), _sizes(**sizes)
    reason = paging.unsupported("select_blocks", "mosaic_tpu", *arrays, **sizes)
    assert message in reason
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(functools.partial(KERNEL, **sizes), *arrays)
    assert reason in str(error.value)


def test_result_has_the_promised_width():
    width = selection_width(page_size=128, block_size=16, k=256, sink=1, local=4)
    shapes, sizes = PRODUCTION["blocks of 16, drafts"]
    result = jax.eval_shape(functools.partial(KERNEL, **_sizes(**sizes)), *_shapes(**shapes))
    assert result.shape == (1, 4, 4, width)


@pytest.mark.parametrize("tile_rows", [0, -1, 1.5])
def test_config_validates_itself(tile_rows):
    with pytest.raises(ValueError, match="tile_rows must be a positive int"):
        mosaic_tpu.Config(tile_rows=tile_rows)
