"""The prefill kernels for Hopper, interpreted on the CPU with race detection; `test_query_tiles.py` runs this in a process of its own.

Three warpgroups wait for each other, each in a thread of XLA's; the two that a machine with two cores has would not do.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import query_tiles

pytestmark = pytest.mark.usefixtures("fresh_caches")

SMALL = {"dtype": "bfloat16", "head_dim": 64, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 72}

# Inputs of `make_paged` over these, then: starts, window, lists = (width, block size).
CASES = {
    "chunks": {"lengths": (200, 300), "starts": (128, 150)},
    "a page is missing": {"lengths": (0, 384), "starts": (0, 300), "hole": True},
    "a window": {"lengths": (384,), "starts": (300,), "window": (5, 70)},
    "two tiles of queries, two heads": {"lengths": (170,), "starts": (10,), "num_queries": 160, "group": 2, "dtype": "float16"},
    "head dim 128": {"lengths": (200,), "starts": (128,), "head_dim": 128},
    "lists, sinks and window": {"lengths": (300,), "starts": (228,), "window": (5, 40), "lists": (5, 64)},
    "lists of pages of 128": {"lengths": (600,), "starts": (528,), "page_size": 128, "lists": (5, 128)},
}


@pytest.fixture
def check(tools, interpreter, monkeypatch):
    """Runs a kernel in the interpreter on a case."""

    def run(case: str) -> None:
        spec = SMALL | CASES[case]
        starts, window, lists = (spec.pop(name, None) for name in ("starts", "window", "lists"))
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
        expected = paging.implementation(op, "reference")(*arrays, **keywords)
        monkeypatch.setattr(query_tiles, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
        found = interpreter.finished(paging.implementation(op, "mosaic_gpu"), *arrays, **keywords)
        tools.assert_rows_close(found[0], expected[0], 2 * tools.row_error[paged.q.dtype.name])
        tools.assert_lse_close(found[1], expected[1])
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH = query_tiles.launch


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _nothing(*_, **__):
    pass


def _unpublished(monkeypatch):
    forget = query_tiles.forget_unwritten

    def without_commit(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plgpu, "commit_smem", _nothing)
            forget(*args)

    monkeypatch.setattr(query_tiles, "forget_unwritten", without_commit)


def _mask_off_by_one(monkeypatch):
    masked = query_tiles._masked
    monkeypatch.setattr(query_tiles, "_masked", lambda s, walk, step, starts, first, x: masked(s, walk, step, starts, first + 1, x))


def _half_a_tile_unmasked(monkeypatch):
    plain = query_tiles._plain
    monkeypatch.setattr(query_tiles, "_plain", lambda s, walk, step, starts, first: plain(s, walk, step, starts, first + s.tile // 2))


def _missing_pages_read(monkeypatch):
    ends = query_tiles.plain_ends
    monkeypatch.setattr(query_tiles, "plain_ends", lambda table, lengths, size: ends(jnp.maximum(table, 0), lengths, size))


BUGS = {
    "results are not published before they are stored": lambda patch: patch.setattr(plgpu, "commit_smem", _nothing),
    "values that were never written are multiplied": lambda patch: patch.setattr(query_tiles, "forget_unwritten", _nothing),
    "zeroed values are not published": _unpublished,
    "the causal mask is off by one": _mask_off_by_one,
    "a tile that needs a mask gets none": _half_a_tile_unmasked,
    "missing pages are read": _missing_pages_read,
}
FOR_BUGS = ("chunks", "a page is missing")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, FOR_BUGS)
