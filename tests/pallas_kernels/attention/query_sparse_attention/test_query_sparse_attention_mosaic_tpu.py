"""query_sparse_attention for TPU: interpreted on the CPU with race detection, its copies counted, lowered, and compiled
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
from query_sparse_suite import MUTANTS, SELECTION, arguments_of, checker
from quick_cases import one_in, rest_long

from pallas_kernels.attention.query_sparse_attention import mosaic_tpu
from pallas_kernels.core import dispatch

pytestmark = pytest.mark.usefixtures("no_races")
XLA = functools.partial(paging.query_sparse_attention, implementation="xla")
INTERPRETED = paging.implementation("query_sparse_attention", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
KERNEL = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(rows=32, key_tile=32)),
    static_argnames=(*SELECTION, "k_exact", "sm_scale"),
    compiler_options=tpu_kernels.QUICK,
)
"""With tiles this small the inputs below take several."""

BASE = {"num_queries": 40, "kv_heads": 2, "group": 1, "head_dim": 128, "lengths": (16, 96), "starts": (0, 56), "estimate": "buckets"}
CASES = {
    "hybrid, window": {"k_blocks": 5, "k_exact": 2, "block_size": 4, "gamma": 2, "window": (6, 8)},
    "ties, a page is missing": {
        "keys": "ties",
        "group": 2,
        "hole": True,
        "block_size": 8,
        "gamma": 7,
        "k_blocks": 6,
        "k_exact": 4,
        "starts": (0, 30),
    },
    "exact, bfloat16, a group of 3": {"dtype": "bfloat16", "kv_heads": 1, "group": 3, "estimate": "quantile", "tournament": True},
}
HYBRID, *_ = CASES
LONG = {
    "buckets only, blocks are pages": {"block_size": 16, "k_blocks": 3, "k_exact": 0},
    "equal scores": {"keys": "equal", "k_exact": 2},
    "logits of -inf": {"keys": "infinite", "k_exact": 2},
    "more slots than lanes": {"k_blocks": 130, "k_exact": 1, "block_size": 1},
    "padding, nothing written": {"lengths": (0, 90), "starts": (0, 70)},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""
    return arguments_of(tools, {name: BASE | spec for name, spec in (CASES | LONG).items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    return checker(tools, arguments)


@pytest.mark.quick_but("exact, bfloat16, a group of 3")
@pytest.mark.parametrize("case", rest_long([*CASES, *LONG], "hybrid, window", "exact, bfloat16, a group of 3"))
def test_matches_reference(check, case):
    check(KERNEL, case)


def test_bits_twice_and_copies_move_what_the_table_names(tools, arguments):
    """Per tile of measured queries and KV head every page up to its last query."""
    (q, k, v, table, starts, lengths), keywords = arguments(HYBRID)
    with tpu_kernels.counted_copies() as copied:
        once = jax.block_until_ready(KERNEL(q, k, v, table, starts, lengths, **keywords))
    pages, gamma, tile = 0, keywords["gamma"], 32
    measured = -(-q.shape[1] // gamma)
    for start, length, row in zip(starts.tolist(), lengths.tolist(), np.asarray(table), strict=True):
        for first in range(start, min(start + measured * gamma, length), tile * gamma):
            end = min(first + (tile - 1) * gamma + 1, length)
            pages += (row[: -(-end // k.shape[2])] >= 0).sum()
    assert copied == {"in": pages * 2 * k[0].nbytes, "copies in": pages * 2 * k.shape[1]}
    tools.assert_all_same_bits(once, KERNEL(q, *tools.moved_pages(k, v, table), starts, lengths, **keywords))


@pytest.mark.quick("V read from K", "-1 in the table wraps", "all exact")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    """What the suite makes of a mutant on these cases does not depend on who computes it: another does it faster."""
    tools.must_fail(check, functools.partial(MUTANTS[mutant], XLA), CASES)


INSIDE = {
    "whose turn it is stays": lambda offer: lambda call, slots, *rest: offer(call, slots, *rest)._replace(turn=slots.turn),
    "ties replace": lambda offer: lambda call, slots, *rest: offer(call, _a_bit_less(slots), *rest),
}


def _a_bit_less(slots):
    """Slots that lose to a block of equal score."""
    return slots._replace(scores=jnp.nextafter(slots.scores, -jnp.inf))


@pytest.mark.long
@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, check, monkeypatch, mutant):
    forget = (KERNEL.clear_cache, mosaic_tpu._measure.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(mosaic_tpu, "_offer", INSIDE[mutant](mosaic_tpu._offer))
    tools.must_fail(check, KERNEL, (*CASES, "equal scores"))
    for clear in forget:
        clear()


def _shapes(batch=1, num_queries=8192, heads=28, kv_heads=4, head_dim=128, tokens=131072, dtype="bfloat16"):
    """Shapes of the op's arrays: a chunk of sequences of `tokens`."""
    shape, width = jax.ShapeDtypeStruct, tokens // 128
    pool, row = shape((batch * width + 1, kv_heads, 128, head_dim), dtype), shape((batch,), jnp.int32)
    return shape((batch, num_queries, heads, head_dim), dtype), pool, pool, shape((batch, width), jnp.int32), row, row


def _static(**changes) -> dict:
    common = {"gamma": 16, "block_size": 128, "k_blocks": 64, "k_exact": 32, "estimate": "buckets", "sm_scale": 0.1}
    return common | changes


def _op(*arrays, **keywords):
    return paging.implementation("query_sparse_attention", "mosaic_tpu")(*arrays, **_static(**keywords))


PRODUCTION = {
    "28/4 heads": ({}, {}),
    "32/8 heads, 1M, blocks of 64, window, buckets only": (
        {"heads": 32, "kv_heads": 8, "tokens": 2**20},
        {"block_size": 64, "k_blocks": 200, "k_exact": 0, "window": (128, 1024)},
    ),
    "float32, head dim 256, exact": ({"heads": 8, "head_dim": 256, "dtype": "float32"}, {"k_blocks": 16, "k_exact": 16}),
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    shapes, keywords = PRODUCTION[case]
    tpu_kernels.assert_lowers(functools.partial(_op, **keywords), _shapes(**shapes))


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; what is kept on the way is measured rows and lists, less than twice q, never R x S and no copy of
    the pool."""
    shapes, keywords = PRODUCTION[case]
    q, *arrays = _shapes(**shapes)
    compiled = tpu_kernels.compile_ahead(functools.partial(_op, **keywords), (q, *arrays), chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * q.size * q.dtype.itemsize
    tpu_kernels.assert_not_copied(compiled, arrays[0])


UNSUPPORTED = {
    "float16": ({"dtype": "float16"}, {}, "TPUs do not compute in float16"),
    "head dim": ({"head_dim": 64}, {}, "head dim 64 is not a multiple of 128"),
    "quantile": ({}, {"estimate": "quantile"}, "buckets, not by the quantile, which 32 of 64 slots ask for"),
    "slots": ({}, {"k_blocks": 2048}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_goes_to_another(on_tpu, case):
    shapes, keywords, reason = UNSUPPORTED[case]
    op, arrays = functools.partial(paging.query_sparse_attention, **_static(**keywords)), _shapes(**shapes)
    with dispatch.listening() as heard:
        jax.eval_shape(op, *arrays)
    assert heard["query_sparse_attention"] == "xla"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(op, implementation="mosaic_tpu"), *arrays)
