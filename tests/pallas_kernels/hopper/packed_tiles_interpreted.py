"""The prefill kernels for Hopper over packed pages, interpreted on the CPU with race detection; `test_packed_tiles.py` runs this in a
process of its own, as `query_tiles_interpreted.py` says.

The interpreter does not run lanes. So what they do with half a tile is done by plain JAX here; `test_lane_halves.py` has the lanes.
"""

from __future__ import annotations

import functools

import jax
import packed_prefill_suite
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.hopper import query_tiles
from pallas_kernels.hopper.lane_halves import HalfTile
from pallas_kernels.page_format import unpack

SMALL = {"head_dim": 64, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 72}
CASES = {
    "int8": {"lengths": (200, 300), "starts": (128, 150)},
    "int4 keys per channel, values per 32": {"lengths": (384,), "starts": (300,), "window": (5, 70)},
    "q8_0 keys, q4_0 values": {"lengths": (0, 384), "starts": (0, 300), "hole": True},
    "fp8 without scales": {"lengths": (300,), "starts": (128,), "opened": False},
    "int8 keys, values as they are": {"lengths": (200,), "starts": (64,), "page_size": 128, "width": 3},
    "int4": {"lengths": (300,), "starts": (228,), "window": (5, 70), "lists": (5, 64)},
    "q4_0": {"lengths": (600, 70), "starts": (528, 0), "window": (5, 128), "lists": (5, 128), "page_size": 128},
    "fp8": {"lengths": (300,), "starts": (228,), "lists": (5, 64), "opened": False},
    "keys as they are, int4 values": {"lengths": (170,), "starts": (10,), "num_queries": 160, "group": 2},
}


def _bring(self: HalfTile, refs, page, head, token):
    rows = pl.ds(token, self.rows)
    scales = None
    if len(refs) > 1:
        scales = refs[1][page, head] if self.of_codes.per_channel else refs[1][page, head, rows]
    return unpack(self.format, refs[0][page, head, rows], scales)


def _put(self: HalfTile, ring_s, slot, half, held):
    ring_s[slot, pl.ds(half * self.rows, self.rows)] = held


@pytest.fixture
def check(tools, interpreter, monkeypatch):
    """Runs a kernel in the interpreter on a case."""

    def run(name: str) -> None:
        case = packed_prefill_suite.build(tools, **(SMALL | {"format": name} | CASES[name]))
        with monkeypatch.context() as patch:
            patch.setattr(query_tiles, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
            patch.setattr(HalfTile, "bring", BRING)
            patch.setattr(HalfTile, "put", _put)
            try:
                found = jax.block_until_ready(case.run("mosaic_gpu"))
            except jax.errors.JaxRuntimeError as error:
                raise AssertionError("the interpreter stopped") from error
        packed_prefill_suite.compare(tools, case, found)
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH, BRING = query_tiles.launch, _bring


@pytest.fixture(autouse=True)
def fresh_caches():
    """No kernel traced before or during a test is used in or after it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)
