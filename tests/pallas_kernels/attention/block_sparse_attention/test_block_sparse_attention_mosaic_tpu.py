"""block_sparse_attention for TPU: interpreted on the CPU with race detection, its copies counted, lowered, and compiled
ahead of time where libtpu is installed. What it shares with flash_attention is tested there."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from block_sparse_mutants import MUTANTS
from quick_cases import one_in, rest_long

from pallas_kernels.attention.block_sparse_attention import mosaic_tpu
from pallas_kernels.core import dispatch

pytestmark = pytest.mark.usefixtures("no_races")
REFERENCE = functools.partial(paging.block_sparse_attention, implementation="reference")
XLA = functools.partial(paging.block_sparse_attention, implementation="xla")
INTERPRETED = paging.implementation("block_sparse_attention", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
KERNEL = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(key_tile=16)),
    static_argnames=("sm_scale", "window", "block_size", "query_tile"),
    compiler_options=tpu_kernels.QUICK,
)
"""With tiles this small the inputs below take several."""

PAGED = {"num_queries": 24, "kv_heads": 2, "group": 1, "head_dim": 128, "lengths": (15, 96)}
SPARSE = {"starts": (3, 50), "window": (3, 9), "block_size": 8, "query_tile": 16, "lists": 6}
CASES = {
    "sinks, window and lists": {},
    "lists only, a page is missing": {"window": None, "hole": True, "lists": 12, "lengths": (40, 96), "starts": (16, 72)},
    "bfloat16, a group of 3, one tile": {"dtype": "bfloat16", "kv_heads": 1, "group": 3, "query_tile": 32, "starts": (0, 61)},
}
BOTH, LISTS, _ = CASES
LONG = {
    "equal scores": {"keys": "equal"},
    "huge logits, window of one token": {"keys": "huge", "window": (0, 1)},
    "denormal keys": {"keys": "denormal"},
    "one token, nothing written": {"num_queries": 1, "starts": (0, 95), "lengths": (0, 96)},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = PAGED | SPARSE | (CASES | LONG)[case]
        given = {name: spec.pop(name) for name in SPARSE}
        return tools.tiles_with_lists(tools.make_paged(seed=sum(map(ord, case)), **spec), **given)

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    return tools.chunk_checker(arguments, REFERENCE)


@pytest.mark.quick_but("bfloat16, a group of 3, one tile")
@pytest.mark.parametrize("case", rest_long([*CASES, *LONG], "sinks, window and lists", "bfloat16, a group of 3, one tile"))
def test_matches_reference(check, case):
    check(KERNEL, case)


def _blocks_named(table, starts, lengths, num_queries, page_size, *, blocks, block_size, query_tile, window) -> int:
    """Blocks that tiles of queries read by definition: those that sinks and window touch, and those listed, that there
    are."""
    count = 0
    for row, tile, head in np.ndindex(blocks.shape[:3]):
        first = starts[row] + tile * query_tile
        end = min(first + query_tile, lengths[row])
        if first >= lengths[row]:
            continue
        near = range(-(-end // block_size)) if window else ()
        near = [b for b in near if b * block_size < window[0] or (b + 1) * block_size > first - window[1] + 1]
        listed = [b for b in blocks[row, tile, head] if 0 <= b * block_size < end]
        count += sum(table[row, b * block_size // page_size] >= 0 for b in (*near, *listed))
    return count


@pytest.mark.long
@pytest.mark.parametrize("case", rest_long([LISTS, BOTH], LISTS))
def test_bits_twice_and_copies_move_what_lists_name(tools, arguments, case):
    (q, k, v, table, starts, lengths), keywords = arguments(case)
    with tpu_kernels.counted_copies() as copied:
        once = jax.block_until_ready(KERNEL(q, k, v, table, starts, lengths, **keywords))
    numbers = {name: x for name, x in keywords.items() if name != "sm_scale"} | {"blocks": np.asarray(keywords["blocks"])}
    blocks = _blocks_named(*(np.asarray(x) for x in (table, starts, lengths)), q.shape[1], k.shape[2], **numbers)
    assert copied == {"in": blocks * 2 * keywords["block_size"] * k.shape[3] * k.dtype.itemsize, "copies in": 2 * blocks}
    wide = keywords | {"blocks": jnp.pad(keywords["blocks"], ((0, 0),) * 3 + ((0, 9),), constant_values=-1)}
    tools.assert_all_same_bits(once, KERNEL(q, k, v, table, starts, lengths, **keywords))
    if case == LISTS:
        tools.assert_all_same_bits(once, KERNEL(q, *tools.moved_pages(k, v, table), starts, lengths, **wide))


@pytest.mark.quick("V read from K", "-1 in the table wraps", "one sink token more")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    """What the suite makes of a mutant on these cases does not depend on who computes it: another does it faster."""
    tools.must_fail(check, functools.partial(MUTANTS[mutant], XLA), CASES)


def _both_counted(walk):
    def change(*arguments):
        found = walk(*arguments)
        return found._replace(seen=lambda step, pos, query_pos: (pos >= 0) & (pos <= query_pos))

    return change


@pytest.mark.long
def test_mutant_inside_fails(tools, check, monkeypatch):
    """A block that is listed and in the window counts twice."""
    forget = (KERNEL.clear_cache, mosaic_tpu._attend.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(mosaic_tpu, "_walk", _both_counted(mosaic_tpu._walk))
    tools.must_fail(check, KERNEL, (BOTH,))
    for clear in forget:
        clear()


def _shapes(num_queries=2048, heads=28, kv_heads=4, head_dim=128, tokens=131072, dtype="bfloat16", width=64, query_tile=128):
    """Shapes of the op's arrays: a chunk of a sequence of `tokens`, the lists last."""
    shape, pages = jax.ShapeDtypeStruct, tokens // 128
    pool, row = shape((pages + 1, kv_heads, 128, head_dim), dtype), shape((1,), jnp.int32)
    blocks = shape((1, -(-num_queries // query_tile), heads, width), jnp.int32)
    return shape((1, num_queries, heads, head_dim), dtype), pool, pool, shape((1, pages), jnp.int32), row, row, blocks


def _op(*arrays, **keywords):
    keywords = {"sm_scale": 0.1, "block_size": 128, "query_tile": 128, "window": (128, 1024)} | keywords
    return paging.block_sparse_attention(*arrays[:6], blocks=arrays[6], **keywords)


_named = paging.implementation("block_sparse_attention", "mosaic_tpu")


def _kernel(*arrays, **keywords):
    keywords = {"sm_scale": 0.1, "block_size": 128, "query_tile": 128, "window": (128, 1024)} | keywords
    return _named(*arrays[:6], blocks=arrays[6], **keywords)


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M, blocks of 64, lists only": (
        {"heads": 32, "kv_heads": 8, "tokens": 2**20, "width": 256},
        {"block_size": 64, "window": None},
    ),
    "float32, head dim 256, tiles of 16, odd chunk": (
        {"heads": 8, "head_dim": 256, "num_queries": 1001, "dtype": "float32", "query_tile": 16},
        {"query_tile": 16},
    ),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, keywords = PRODUCTION[case]
    tpu_kernels.assert_lowers(functools.partial(_kernel, **keywords), _shapes(**shapes))


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; what is kept on the way is at most q and out with heads in another order and the lists, never a
    copy of the pool."""
    shapes, keywords = PRODUCTION[case]
    q, *arrays = _shapes(**shapes)
    compiled = tpu_kernels.compile_ahead(functools.partial(_kernel, **keywords), (q, *arrays), chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * q.size * q.dtype.itemsize + 2**24
    tpu_kernels.assert_not_copied(compiled, arrays[0])


UNSUPPORTED = {
    "float16": ({"dtype": "float16"}, {}, "TPUs do not compute in float16"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "block size": ({}, {"block_size": 4}, "blocks of 4 tokens are not a multiple of 8"),
    "query tile": ({"query_tile": 24}, {"query_tile": 24}, "query_tile 24 is not a multiple of 16"),
    "lists": ({"width": 2**17}, {}, "bytes of scalar memory, at most 786432"),
    "rows": ({"query_tile": 4096}, {"query_tile": 4096}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_goes_to_another(on_tpu, case):
    shapes, keywords, reason = UNSUPPORTED[case]
    arrays = _shapes(**shapes)
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(_op, **keywords), *arrays)
    assert heard["block_sparse_attention"] == "xla"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(_op, **keywords, implementation="mosaic_tpu"), *arrays)
