"""flash_attention for TPU: interpreted on the CPU with race detection, its copies counted, lowered, and compiled ahead
of time where libtpu is installed."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from flash_mutants import MUTANTS
from quick_cases import one_in, rest_long

from pallas_kernels.attention.flash_attention import mosaic_tpu
from pallas_kernels.core import dispatch

pytestmark = pytest.mark.usefixtures("no_races")
REFERENCE = functools.partial(paging.flash_attention, implementation="reference")
INTERPRETED = paging.implementation("flash_attention", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
KERNEL = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(rows=32, key_tile=32)),
    static_argnames=("sm_scale", "window"),
    compiler_options=tpu_kernels.QUICK,
)
"""With tiles this small the inputs below take several."""

BASE = {"num_queries": 24, "kv_heads": 2, "group": 2, "head_dim": 128, "lengths": (15, 96), "starts": (0, 72)}
CASES = {
    "chunks at the end": {},
    "any start, a page is missing, window": {"starts": (3, 50), "lengths": (40, 96), "hole": True, "window": (5, 20)},
    "huge logits, window that skips tiles": {"keys": "huge", "starts": (0, 70), "window": (3, 9), "kv_heads": 1},
    "bfloat16, a group of 7": {"dtype": "bfloat16", "kv_heads": 1, "group": 7, "starts": (0, 61)},
}
END, WINDOW, SKIP, SHORT = CASES
LONG = {
    "equal scores": {"keys": "equal"},
    "denormal keys": {"keys": "denormal"},
    "one token": {"num_queries": 1, "starts": (14, 95)},
    "window of one token, nothing written": {"window": (0, 1), "lengths": (0, 96)},
    "production heads": {
        **{"dtype": "bfloat16", "kv_heads": 4, "group": 7, "page_size": 128, "width": 3, "lengths": (129, 300), "num_queries": 40},
        **{"starts": (100, 260)},
    },
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = BASE | (CASES | LONG)[case]
        window, starts = spec.pop("window", None), jnp.asarray(spec.pop("starts"), jnp.int32)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        return (*paged.arrays[:4], starts, paged.lengths), {"sm_scale": paged.sm_scale, "window": window}

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    return tools.chunk_checker(arguments, REFERENCE)


@pytest.mark.quick_but("any start, a page is missing, window")
@pytest.mark.parametrize(
    "case",
    rest_long([*CASES, *LONG], "any start, a page is missing, window", "huge logits, window that skips tiles", "bfloat16, a group of 7"),
)
def test_matches_reference(check, case):
    check(KERNEL, case)


@pytest.mark.long
def test_bits_twice_and_in_other_frames_and_company_and_from_another_start(tools, arguments):
    (q, k, v, table, starts, lengths), keywords = arguments(WINDOW)
    op = functools.partial(KERNEL, **keywords)
    once = op(q, k, v, table, starts, lengths)
    tools.assert_all_same_bits(once, op(q, k, v, table, starts, lengths))
    frames = tools.moved_pages(k, v, table)
    tools.assert_all_same_bits(once, op(q, *frames, starts, lengths))
    alone = op(q.at[0].multiply(-1), k, v, table.at[0].set(-1), starts.at[0].set(0), lengths.at[0].set(0))
    tools.assert_all_same_bits(once, alone, 1)
    later = op(jnp.roll(q, -5, axis=1), k, v, table, starts + 5, lengths)
    tools.assert_all_same_bits([x[:, 5:] for x in once], [x[:, :-5] for x in later])


def _pages_named(page_size, starts, lengths, table, window, num_queries, tokens, key_tile) -> int:
    """Pages that tiles of queries read by definition: of the tiles of keys that some query of the tile sees, those that
    there are."""
    count = 0
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for first in range(start, min(start + num_queries, length), tokens):
            last = min(first + tokens, length) - 1
            for page in range(last // page_size + 1):
                tile = page * page_size // key_tile * key_tile
                near = window is None or tile < window[0] or tile + key_tile > first - window[1] + 1
                count += near and table[row, page] >= 0
    return count


@pytest.mark.parametrize("case", [END, WINDOW, SKIP])
def test_copies_move_what_the_table_names(arguments, case):
    (q, k, v, table, starts, lengths), keywords = arguments(case)
    with tpu_kernels.counted_copies() as copied:
        jax.block_until_ready(KERNEL(q, k, v, table, starts, lengths, **keywords))
    numbers = (np.asarray(x) for x in (starts, lengths, table))
    tokens = max(16, 32 // (q.shape[2] // k.shape[1]) // 16 * 16)
    pages = _pages_named(k.shape[2], *numbers, keywords["window"], q.shape[1], tokens, 32)
    assert copied == {"in": pages * 2 * k[0].nbytes, "copies in": pages * 2 * k.shape[1]}


@pytest.mark.quick("one page read for another", "-1 in the table wraps", "length one short")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    """What the suite makes of a mutant on these cases does not depend on who computes it: another does it faster."""
    tools.must_fail(check, functools.partial(MUTANTS[mutant], REFERENCE), CASES)


@pytest.mark.parametrize("mutant", rest_long(tpu_kernels.IN_TILES, next(iter(tpu_kernels.IN_TILES))))
def test_mutant_inside_fails(tools, check, monkeypatch, mutant):
    where, name, change = tpu_kernels.IN_TILES[mutant]
    forget = (KERNEL.clear_cache, mosaic_tpu._attend.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    tools.must_fail(check, KERNEL, (END,))
    for clear in forget:
        clear()


def _shapes(batch=1, num_queries=2048, heads=28, kv_heads=4, head_dim=128, tokens=131072, page=128, dtype="bfloat16"):
    """Shapes of the op's arrays: a chunk of sequences of `tokens`."""
    shape, width = jax.ShapeDtypeStruct, tokens // page
    pool, row = shape((batch * width + 1, kv_heads, page, head_dim), dtype), shape((batch,), jnp.int32)
    return shape((batch, num_queries, heads, head_dim), dtype), pool, pool, shape((batch, width), jnp.int32), row, row


def _op(*arrays, **keywords):
    return paging.implementation("flash_attention", "mosaic_tpu")(*arrays, **({"sm_scale": 0.1} | keywords))


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M, window": ({"heads": 32, "kv_heads": 8, "tokens": 2**20}, {"window": (128, 4096)}),
    "float32, head dim 256, odd chunk": ({"batch": 2, "heads": 8, "head_dim": 256, "num_queries": 1001, "dtype": "float32"}, {}),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, keywords = PRODUCTION[case]
    tpu_kernels.assert_lowers(functools.partial(_op, **keywords), _shapes(**shapes))


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; what is kept on the way is at most q and out with heads in another order, never T x S and no copy
    of the pool."""
    shapes, keywords = PRODUCTION[case]
    q, *arrays = _shapes(**shapes)
    compiled = tpu_kernels.compile_ahead(functools.partial(_op, **keywords), (q, *arrays), chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * q.size * q.dtype.itemsize
    tpu_kernels.assert_not_copied(compiled, arrays[0])


UNSUPPORTED = {
    "float16": ({"dtype": "float16"}, {}, "TPUs do not compute in float16"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "page size": ({"page": 4, "tokens": 64}, {}, "blocks of 4 tokens are not a multiple of 8"),
    "table": ({"tokens": 2**20, "batch": 32}, {}, "1048832 bytes of scalar memory, at most 786432"),
    "rows": ({}, {"config": mosaic_tpu.Config(rows=4096)}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_is_refused_with_the_values(case):
    shapes, keywords, reason = UNSUPPORTED[case]
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(_op, **keywords), *_shapes(**shapes))


def test_it_is_preferred_on_a_tpu_and_passed_by_where_it_cannot(on_tpu):
    for dtype, name in (("bfloat16", "mosaic_tpu"), ("float16", "xla")):
        with dispatch.listening() as heard:
            jax.eval_shape(functools.partial(paging.flash_attention, sm_scale=0.1), *_shapes(dtype=dtype))
        assert heard["flash_attention"] == name


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"rows": 24}, {"key_tile": -8}, {"key_tile": 12}, {"rows": 16.0}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive multiple of"):
        mosaic_tpu.Config(**sizes)
