"""The prefill kernels for Hopper, interpreted on the CPU with race detection; `test_query_tiles.py` runs this in a
process of its own.

Three warpgroups wait for each other, each in a thread of XLA's; the two that a machine with two cores has would not do.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.flash_attention import mosaic_gpu
from pallas_kernels.core import merge
from pallas_kernels.hopper.decode import clusters, split_merge
from pallas_kernels.hopper.prefill import prefill_fold

pytestmark = pytest.mark.usefixtures("fresh_caches")

SMALL = {"dtype": "bfloat16", "head_dim": 64, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 72}

# Inputs of `make_paged` over these, then: starts, window, lists = (width, block size), splits, fresh.
CASES = {
    "chunks": {"lengths": (200, 300), "starts": (128, 150)},
    "a page is missing": {"lengths": (0, 384), "starts": (0, 300), "hole": True},
    "a window": {"lengths": (384,), "starts": (300,), "window": (5, 70)},
    "two tiles of queries, two heads": {"lengths": (170,), "starts": (10,), "num_queries": 160, "group": 2, "dtype": "float16"},
    "head dim 128": {"lengths": (200,), "starts": (128,), "head_dim": 128},
    "lists, sinks and window": {"lengths": (300,), "starts": (228,), "window": (5, 40), "lists": (5, 64)},
    "lists of pages of 128": {"lengths": (600,), "starts": (528,), "page_size": 128, "lists": (5, 128)},
    "two splits, a page is missing": {"lengths": (40, 384), "starts": (0, 300), "hole": True, "splits": 2},
    "an old tile": {"lengths": (300,), "starts": (128,), "num_queries": 160, "fresh": 256},
    "an old tile, two splits": {"lengths": (300,), "starts": (128,), "num_queries": 160, "fresh": 257, "splits": 2},
    "64 old queries, two splits": {"lengths": (512,), "starts": (440,), "fresh": 504, "head_dim": 128, "width": 9, "splits": 2},
    "64 queries of padding, two splits": {"lengths": (490,), "starts": (440,), "fresh": 440, "head_dim": 128, "width": 9, "splits": 2},
    "three splits, head dim 128": {"lengths": (500,), "starts": (440,), "head_dim": 128, "width": 9, "splits": 3},
}


@pytest.fixture
def check(tools, interpreter, monkeypatch):
    """Runs a kernel in the interpreter on a case."""

    def run(case: str) -> None:
        spec = SMALL | CASES[case]
        starts, window, lists, splits, fresh = (spec.pop(name, None) for name in ("starts", "window", "lists", "splits", "fresh"))
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        arrays, keywords = (
            (*paged.arrays[:4], jnp.asarray(starts, jnp.int32), paged.lengths),
            {"sm_scale": paged.sm_scale, "window": window},
        )
        op = "flash_attention"
        if lists is not None:
            op, (width, size) = "block_sparse_attention", lists
            rng, num_blocks = np.random.default_rng(3), spec["width"] * spec["page_size"] // size
            ids = np.append(rng.permutation(num_blocks), [-1, num_blocks])[:width]
            keywords |= {"blocks": jnp.asarray(ids, jnp.int32)[None, None, None], "block_size": size, "query_tile": 128}
        if fresh is not None:
            keywords |= {"fresh": jnp.asarray([fresh], jnp.int32)}
        expected = paging.implementation(op, "reference")(*arrays, **keywords)
        monkeypatch.setattr(clusters, "splits_of", lambda *_: splits or 1)
        monkeypatch.setattr(split_merge, "merge", merged_by_arrays)
        monkeypatch.setattr(prefill_fold, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
        found = interpreter.finished(paging.implementation(op, "mosaic_gpu"), *arrays, **keywords)
        # The op promises nothing of padding, nor of rows before `fresh`. This kernel leaves whole tiles of them out.
        size, rows = prefill_fold.ROWS if splits else prefill_fold.TILE_ROWS, np.arange(spec["num_queries"])
        starts, lengths = np.asarray(starts)[:, None], np.asarray(spec["lengths"])[:, None]
        position, first, after = starts + rows, starts + rows // size * size, starts if fresh is None else fresh
        left_out, rest = (first + size <= after) | (first >= lengths), (position < after) | (position >= lengths)
        assert not np.asarray(found[0], np.float32)[left_out].any(), "rows were attended that nobody needs"
        assert np.isfinite(np.asarray(found[0], np.float32)).all()
        found, expected = ([x.at[rest].set(0) for x in each] for each in (found, expected))
        tools.assert_rows_close(found[0], expected[0], 2 * tools.row_error[paged.q.dtype.name])
        tools.assert_lse_close(found[1], expected[1])
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH = prefill_fold.launch


def merged_by_arrays(s, out, lse):
    """`split_merge.merge`, which has stages for single threads: the interpreter has none. The emulator has them
    (`test_query_tiles.py`)."""
    out, lse = merge.merge_attention([out[:, :, n] for n in range(s.splits)], [lse[:, :, n] for n in range(s.splits)])
    return out.swapaxes(1, 2).astype(s.dtype), lse.swapaxes(1, 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _nothing(*_, **__):
    pass


def _unpublished(monkeypatch):
    forget = prefill_fold.forget_unwritten

    def without_commit(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plgpu, "commit_smem", _nothing)
            forget(*args)

    monkeypatch.setattr(prefill_fold, "forget_unwritten", without_commit)


def _mask_off_by_one(monkeypatch):
    masked = prefill_fold._masked
    monkeypatch.setattr(prefill_fold, "_masked", lambda s, walk, step, starts, first, x: masked(s, walk, step, starts, first + 1, x))


def _half_a_tile_unmasked(monkeypatch):
    plain = prefill_fold._plain
    monkeypatch.setattr(prefill_fold, "_plain", lambda s, walk, step, starts, first: plain(s, walk, step, starts, first + s.tile // 2))


def _missing_pages_read(monkeypatch):
    ends = prefill_fold.plain_ends
    monkeypatch.setattr(prefill_fold, "plain_ends", lambda table, lengths, size: ends(jnp.maximum(table, 0), lengths, size))


def _other_tile_first(monkeypatch):
    part = prefill_fold.Walk.part
    monkeypatch.setattr(prefill_fold.Walk, "part", lambda walk, number, parts: part(walk, number + 1, parts))


def _part_unnormalised(monkeypatch):
    monkeypatch.setattr(prefill_fold, "natural_lse", lambda m, total: m)


def _columns_overwritten(monkeypatch):
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: None if wait_read_only else wait(n))


def _old_tiles_attended(monkeypatch):
    attend = mosaic_gpu._attend
    monkeypatch.setattr(mosaic_gpu, "_attend", lambda *args: attend(*args[:-1], jnp.zeros_like(args[-1])))


def _last_old_tile_left_out(monkeypatch):
    """The tile that holds the first query that is needed counts as old."""
    attend = mosaic_gpu._attend
    monkeypatch.setattr(mosaic_gpu, "_attend", lambda *args: attend(*args[:-1], args[-1] + prefill_fold.TILE_ROWS))


BUGS = {
    "old tiles are attended": _old_tiles_attended,
    "the tile of the first new query is left out": _last_old_tile_left_out,
    "a split begins one tile late": _other_tile_first,
    "parts are merged by their maxima": _part_unnormalised,
    "columns of a part are overwritten before they are read": _columns_overwritten,
    "results are not published before they are stored": lambda patch: patch.setattr(plgpu, "commit_smem", _nothing),
    "values that were never written are multiplied": lambda patch: patch.setattr(prefill_fold, "forget_unwritten", _nothing),
    "zeroed values are not published": _unpublished,
    "the causal mask is off by one": _mask_off_by_one,
    "a tile that needs a mask gets none": _half_a_tile_unmasked,
    "missing pages are read": _missing_pages_read,
}
FOR_BUGS = ("chunks", "a page is missing", "three splits, head dim 128", "an old tile")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, FOR_BUGS)
