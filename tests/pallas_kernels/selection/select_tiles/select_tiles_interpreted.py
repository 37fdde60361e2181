"""The kernel of select_tiles for Hopper, interpreted on the CPU with race detection; `test_select_tiles_mosaic_gpu.py`
runs this in a process of its own.

Three warpgroups wait for each other, each in a thread of XLA's; the two that a machine with two cores has would not do.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import paging
import pytest

from pallas_kernels.selection.select_tiles import mosaic_gpu

pytestmark = pytest.mark.usefixtures("fresh_caches")

BASE = {
    "num_queries": 150,
    "query_tile": 128,
    "k": 3,
    "block_size": 16,
    "page_size": 32,
    "window": (16, 64),
    "kv_heads": 1,
    "group": 1,
    "head_dim": 64,
    "dtype": "bfloat16",
}
CASES = {
    "chunks": {"lengths": (600, 700), "starts": (464, 544), "k": 14},
    "two tiles of blocks, padding": {"lengths": (2500,), "starts": (2400,), "group": 2, "dtype": "float16", "k": 60},
    "a page is missing": {"lengths": (0, 800), "starts": (0, 640), "hole": True, "pooling": "max"},
    "every candidate": {"lengths": (600,), "starts": (464,), "k": 40},
    "head dim 128": {"lengths": (500,), "starts": (384,), "head_dim": 128},
}
LAUNCH = mosaic_gpu.launch


@pytest.fixture
def check(suite_of, case_type, interpreter, monkeypatch):
    """Runs the kernel in the interpreter on a case."""
    suite, _ = suite_of({name: case_type(**(BASE | fields)) for name, fields in CASES.items()}, 1e-4)
    kernel = paging.implementation("select_tiles", "mosaic_gpu")

    def run(case: str) -> None:
        monkeypatch.setattr(mosaic_gpu, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
        suite(functools.partial(interpreter.finished, kernel), case)
        assert not interpreter.races_found(), "a race was found"

    return run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _replaced(name: str, make):
    """The function of that name in the kernel's module becomes what `make` makes of it."""
    return lambda patch: patch.setattr(mosaic_gpu, name, make(getattr(mosaic_gpu, name)))


# Each with the case that has to fail.
BUGS = {
    "a warpgroup does not wait for the other": (_replaced("_meet", lambda f: lambda scratch: None), "chunks"),
    "blocks after a query are seen": (_replaced("_seen", lambda f: lambda s, x, block, query, axis, sealed: x), "chunks"),
    "the second tile of blocks is lost": (
        _replaced("_steps", lambda f: lambda *args: (f(*args)[0], jnp.minimum(f(*args)[1], 1))),
        "two tiles of blocks, padding",
    ),
    "missing pages count": (
        _replaced("table_bounds", lambda f: lambda b, t, there, more: f(b, t, there | True, more)),
        "a page is missing",
    ),
    "sinks and missing pages are admitted": (
        _replaced("admitted_blocks", lambda f: lambda there, first, columns: jnp.zeros((there.shape[0], columns))),
        "every candidate",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug):
    plant, case = BUGS[bug]
    plant(monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, (case,))
