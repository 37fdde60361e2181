"""The kernel of block_mass for Hopper, interpreted on the CPU with race detection; `test_block_mass_mosaic_gpu.py` runs
this in a process of its own.

Up to four warpgroups wait for each other, each in a thread of XLA's; the two that a machine with two cores has would
not do.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import paging
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.selection.block_mass import mosaic_gpu

pytestmark = pytest.mark.usefixtures("fresh_caches")

COMMON = {"head_dim": 128, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 130, "dtype": "bfloat16"}

CASES = {
    # More tiles of queries than the ring has places; the last CTA has no keys at all.
    "head dim 256": {"lengths": (384,), "starts": (0,), "num_queries": 384, "head_dim": 256, "width": 7},
    "a page is missing": {"lengths": (0, 384), "starts": (0, 254), "hole": True, "block_size": 16},
    "the last queries": {
        "lengths": (330, 200),
        "starts": (200, 70),
        "first_query": "late",
        "group": 2,
        "block_size": 32,
        "dtype": "float16",
    },
    "head dim 64, keys after the chunk": {"lengths": (380,), "starts": (100,), "head_dim": 64, "lse_of": "few", "group": 2},
}


@pytest.fixture
def check(suite_of, interpreter, monkeypatch):
    """Runs the kernel in the interpreter on a case."""
    suite = suite_of(CASES, rows=1e-5, each=3e-5, huge=5e-3, **COMMON)
    kernel = paging.implementation("block_mass", "mosaic_gpu")

    def run(case: str) -> None:
        monkeypatch.setattr(mosaic_gpu, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
        suite.check(functools.partial(interpreter.finished, kernel), case)
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH = mosaic_gpu.launch


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _replaced(name: str, make):
    """The function of that name in the kernel's module becomes what `make` makes of it."""
    return lambda patch: patch.setattr(mosaic_gpu, name, make(getattr(mosaic_gpu, name)))


def _pages_not_looked_at(walk_of):
    def wrong(s, refs, row, tile):
        walk = walk_of(s, refs, row, tile)
        return mosaic_gpu.dataclasses.replace(walk, pages=tuple(jnp.maximum(page, 0) for page in walk.pages))

    return wrong


def _begins_late(walk_of):
    def wrong(s, refs, row, tile):
        walk = walk_of(s, refs, row, tile)
        return mosaic_gpu.dataclasses.replace(walk, begin=walk.begin + 1, steps=jnp.maximum(walk.steps - 1, 0))

    return wrong


# Each with the cases of which one has to fail.
BUGS = {
    "TMA may write what is still read": (lambda patch: patch.setattr(plgpu, "commit_smem", lambda: None), ("head dim 256",)),
    "the causal mask is off by one": (
        _replaced("_masked", lambda f: lambda walk, key, first, x: f(walk, key, first + 1, x)),
        ("the last queries",),
    ),
    "a tile that needs a mask gets none": (_replaced("_plain", lambda f: lambda walk, key, first: True), ("the last queries",)),
    "missing pages are read": (_replaced("_walk", _pages_not_looked_at), ("a page is missing",)),
    "the first tile of queries is lost": (_replaced("_walk", _begins_late), ("the last queries",)),
    "no lse is an lse": (
        _replaced("_lse_that_counts", lambda f: lambda starts, ends, lse, first: f(starts, ends, jnp.maximum(lse, -9), first)),
        ("head dim 64, keys after the chunk",),
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug):
    plant, cases = BUGS[bug]
    plant(monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, cases)
