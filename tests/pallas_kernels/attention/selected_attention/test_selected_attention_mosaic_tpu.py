"""selected_attention for TPU: interpreted on the CPU with race detection, its copies counted, lowered, and compiled
ahead of time where libtpu is installed."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from quick_cases import one_in, rest_long
from selected_suite import MUTANTS, SIZES, arguments_of, checker

from pallas_kernels.attention.gather_attention import mosaic_tpu as gather
from pallas_kernels.attention.selected_attention import mosaic_tpu
from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import mosaic_tpu as select

pytestmark = pytest.mark.usefixtures("no_races")
COMPOSED = functools.partial(paging.selected_attention, implementation="composed")
INTERPRETED = paging.implementation("selected_attention", "mosaic_tpu", interpret=tpu_kernels.INTERPRET)
KERNEL = jax.jit(
    functools.partial(INTERPRETED, config=mosaic_tpu.Config(tile_rows=128, tile_tokens=16)),
    static_argnames=(*SIZES, "sm_scale"),
    compiler_options=tpu_kernels.QUICK,
)
"""With tiles this small the inputs below take several."""

BASE = SIZES | {"lengths": (0, 17, 96), "head_dim": 128, "group": 2, "block_size": 8, "budget": 3}
CASES = {
    "drafts": {"num_queries": 2, "lengths": (0, 40, 96), "local": 3},
    "mean, bfloat16, a page is missing, groups of 3": {"kind": "mean", "dtype": "bfloat16", "hole": True, "group": 3},
}
DRAFTS, MEAN = CASES
LONG = {
    "equal scores, one head": {"keys": "equal", "kv_heads": 1, "group": 1},
    "huge logits, blocks are pages": {"keys": "huge", "block_size": 16, "local": 1, "sink": 0},
    "budget of none": {"budget": 0},
    "budget covers everything": {"budget": 40},
    "production heads": {
        **{"dtype": "bfloat16", "kv_heads": 4, "group": 7, "page_size": 128, "width": 8, "lengths": (129, 1000)},
        **{"block_size": 128, "local": 1},
    },
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""
    return arguments_of(tools, {name: BASE | spec for name, spec in (CASES | LONG).items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    return checker(tools, arguments)


@pytest.mark.parametrize("case", rest_long([*CASES, *LONG], "drafts"))
def test_matches_reference(check, case):
    check(KERNEL, case)


@pytest.mark.long
def test_bits_twice_and_copies_move_what_lists_and_indexes_name(tools, arguments):
    """Per query: the index rows of the named pages before its first local block, the blocks that its KV heads list, and
    the list once from vector to scalar memory."""
    (q, k, v, index, table, lengths), keywords = arguments(DRAFTS)
    with tpu_kernels.counted_copies() as copied:
        once = jax.block_until_ready(KERNEL(q, k, v, index, table, lengths, **keywords))
    page, block, local = k.shape[2], keywords["block_size"], keywords["local"]
    pages, lists = 0, np.asarray(once[2])
    for row, t in np.ndindex(q.shape[:2]):
        n = max(int(lengths[row]) - q.shape[1] + t + 1, 0)
        first_local = max(min((n - 1) // block - local + 1, (n - 1) // page * (page // block)), 0) if n else 0
        pages += (np.asarray(table)[row, : -(-first_local * block // page)] >= 0).sum()
    moved = pages * index[0].nbytes + (lists >= 0).sum() * 2 * block * k.shape[3] * k.dtype.itemsize
    assert copied["in"] == moved
    assert copied["copies inside"] == q.shape[0] * q.shape[1]
    tools.assert_all_same_bits(once, KERNEL(q, k, v, index, table, lengths, **keywords))


@pytest.mark.long
def test_bytes_by_frame_and_index_by_id(tools, arguments):
    """Every page in another frame: the same bits; not so with one table for the other."""
    (q, k, v, index, table, lengths), keywords = arguments(DRAFTS)
    frame_of = jnp.asarray(np.random.default_rng(0).permutation(len(k)), jnp.int32)
    moved = [jnp.zeros_like(x).at[frame_of].set(x) for x in (k, v)]
    once, frames = KERNEL(q, k, v, index, table, lengths, **keywords), jnp.where(table >= 0, frame_of[table], -1)
    tools.assert_all_same_bits(once, KERNEL(q, *moved, index, table, lengths, frames=frames, **keywords))
    for ids, wrong in ((table, table), (frames, table)):
        with pytest.raises(AssertionError):
            tools.assert_all_same_bits(once, KERNEL(q, *moved, index, ids, lengths, frames=wrong, **keywords))


@pytest.mark.quick("V read from K", "length one short", "a page is sealed too early")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    """What the suite makes of a mutant on these cases does not depend on who computes it: another does it faster."""
    tools.must_fail(check, MUTANTS[mutant](COMPOSED), CASES)


INSIDE = {
    "the first head's list": (
        *(gather, "attend_head"),
        lambda attend: lambda sizes, copies, head, *rest: attend(sizes, lambda head, **of: copies(head=0, **of), head, *rest),
    ),
    "ties to the higher block": (select, "_ordered", lambda ordered: lambda score: -ordered(score)),
}


@pytest.mark.parametrize("mutant", rest_long(INSIDE, next(iter(INSIDE))))
def test_mutant_inside_fails(tools, check, monkeypatch, mutant):
    where, name, change = INSIDE[mutant]
    forget = (KERNEL.clear_cache, mosaic_tpu._attend.clear_cache)
    for clear in forget:
        clear()
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    tools.must_fail(check, KERNEL, (DRAFTS,))
    for clear in forget:
        clear()


def _shapes(batch=1, num_queries=1, heads=28, kv_heads=4, head_dim=128, tokens=131072, dtype="bfloat16", frames=False, **sizes):
    """Shapes of the op's arrays, and its sizes."""
    sizes = SIZES | {"block_size": 128, "budget": 32, "local": 4, "sm_scale": 0.1} | sizes
    shape, width, page = jax.ShapeDtypeStruct, tokens // 128, 128
    pool = shape((batch * width + 1, kv_heads, page, head_dim), dtype)
    index = shape((batch * width + 1, kv_heads, page // sizes["block_size"], INDEX_ROWS[sizes["kind"]], head_dim), dtype)
    q, table = shape((batch, num_queries, heads, head_dim), dtype), shape((batch, width), jnp.int32)
    return (q, pool, pool, index, table, shape((batch,), jnp.int32)), sizes | ({"frames": table} if frames else {})


def _op(*arrays, **keywords):
    return paging.implementation("selected_attention", "mosaic_tpu")(*arrays, **keywords)


PRODUCTION = {
    "28/4 heads": {},
    "32/8 heads, batch of 8, frames": {"batch": 8, "heads": 32, "kv_heads": 8, "frames": True},
    "1M, drafts, blocks of 16": {"tokens": 2**20, "num_queries": 4, "block_size": 16},
    "mean": {"kind": "mean"},
    "float32, head dim 256": {"dtype": "float32", "head_dim": 256, "heads": 8},
}


@pytest.mark.parametrize("case", one_in(3, PRODUCTION))
def test_lowers_for_tpu(case):
    arrays, keywords = _shapes(**PRODUCTION[case])
    text = jax.jit(_op, static_argnames=(*SIZES, "sm_scale")).trace(*arrays, **keywords).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


@pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
@pytest.mark.parametrize("case", PRODUCTION)
def test_compiles_ahead_of_time(case, chip):
    """Without a TPU; no copy of the pool or of the index."""
    arrays, keywords = _shapes(**PRODUCTION[case])
    frames = [keywords.pop("frames")] if "frames" in keywords else []

    def op(*arrays):
        return _op(*arrays[:6], frames=arrays[6] if frames else None, **keywords)

    compiled = tpu_kernels.compile_ahead(op, (*arrays, *frames), chip)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23
    tpu_kernels.assert_not_copied(compiled, arrays[1], arrays[3])


UNSUPPORTED = {
    "float16": ({"dtype": "float16"}, "TPUs compute in bfloat16 and float32 only"),
    "head dim": ({"head_dim": 64}, "head dim 64 is not a multiple of 128"),
    "tables": ({"tokens": 2**20, "batch": 16, "frames": True}, "bytes of scalar memory, at most 786432"),
    "scores": ({"tokens": 2**22, "block_size": 16}, "bytes of vector memory, at most 12582912"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_it_cannot_do_goes_to_the_two_ops(on_tpu, case):
    changes, reason = UNSUPPORTED[case]
    arrays, keywords = _shapes(**changes)
    op = functools.partial(paging.selected_attention, **keywords)
    with dispatch.listening() as heard:
        jax.eval_shape(op, *arrays)
    assert heard["selected_attention"] == "composed"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(functools.partial(op, implementation="mosaic_tpu"), *arrays)


@pytest.mark.parametrize("sizes", [{"tile_rows": 0}, {"tile_tokens": -1}, {"tile_tokens": 1.5}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        mosaic_tpu.Config(**sizes)
