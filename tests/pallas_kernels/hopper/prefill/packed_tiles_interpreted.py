"""The prefill kernels for Hopper over packed pages, interpreted on the CPU with race detection; `test_packed_tiles.py`
runs this in a process of its own, as `query_tiles_interpreted.py` says.

The interpreter does not run lanes. So what they do with half a tile is done by plain JAX here; `test_lane_halves.py`
has the lanes.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import packed_prefill_suite
import pytest

from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold
from pallas_kernels.hopper.prefill.unpack import HalfTile

pytestmark = pytest.mark.usefixtures("fresh_caches")

SMALL = {"head_dim": 64, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 72}
SELECTED = {"gamma": 4, "block_size": 64, "k_blocks": 2, "k_exact": 2, "window": (5, 64), "tournament": False, "estimate": "quantile"}
CASES = {
    "int8": {"lengths": (200, 300), "starts": (128, 150), "kv_heads": 2},
    "int8, the last tile is past the end": {
        "format": "int8",
        "lengths": (127,),
        "starts": (3,),
        "num_queries": 140,
        "head_dim": 128,
        "width": 12,
    },
    "int4 keys per channel, values per 32": {"lengths": (384,), "starts": (300,), "window": (5, 70)},
    "q8_0 keys, q4_0 values": {"lengths": (0, 384), "starts": (0, 300), "hole": True},
    "fp8 without scales": {"lengths": (300,), "starts": (128,), "opened": False},
    "int8 keys per channel": {"lengths": (500,), "starts": (440,), "num_queries": 60, "head_dim": 128, "width": 8},
    "int8 keys, values as they are": {"lengths": (200,), "starts": (64,), "page_size": 128, "width": 3},
    "int4": {"lengths": (300,), "starts": (228,), "window": (5, 70), "lists": (5, 64)},
    "q4_0": {"lengths": (600, 70), "starts": (528, 0), "window": (5, 128), "lists": (5, 128), "page_size": 128},
    "fp8": {"lengths": (300,), "starts": (228,), "lists": (5, 64), "opened": False},
    "int8 per channel": {"lengths": (300, 330), "starts": (70, 130), "num_queries": 200, "query_sparse": SELECTED},
    "keys as they are, int4 values": {"lengths": (170,), "starts": (10,), "num_queries": 160, "group": 2},
}


def _launched(params, s, name, walk, aside=None, more=(), fetcher=prefill_fold.PLAIN):
    """`prefill_fold.launch` without what is done beside the tiles, whose results are zeros."""
    kernel = LAUNCH(s, name, walk, fetcher=fetcher, interpret=params)
    return lambda *arrays: (*kernel(*arrays), *(jnp.zeros(x.shape, x.dtype) for x in more))


@pytest.fixture
def check(tools, interpreter, monkeypatch):
    """Runs a kernel in the interpreter on a case."""

    def run(name: str) -> None:
        case = packed_prefill_suite.build(tools, **(SMALL | {"format": name} | CASES[name]))
        with monkeypatch.context() as patch:
            patch.setattr(prefill_fold, "launch", functools.partial(_launched, interpreter.params))
            patch.setattr(HalfTile, "bring", BRING)
            patch.setattr(HalfTile, "put", packed_prefill_suite.put_half)
            found = interpreter.finished(case.run, "mosaic_gpu")
        packed_prefill_suite.compare(tools, case, found)
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH, BRING = prefill_fold.launch, packed_prefill_suite.bring_half


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_has_no_race(check, case):
    check(case)


def _nothing(*_, **__):
    pass


def _of_own_tiles(change):
    tiles = packed_tiles.own_tiles
    return lambda patch: patch.setattr(packed_tiles, "own_tiles", lambda s, *args: change(s, *tiles(s, *args)))


def _unpublished(patch):
    patch.setattr(packed_tiles, "plgpu", SimpleNamespace(commit_smem=_nothing))


def _halves_for_each_other(patch):
    patch.setattr(
        packed_tiles._Source,
        "put",
        lambda self, slot, half, held: self.halves and packed_prefill_suite.put_half(self.halves, self.ring, slot, 1 - half, held),
    )


def _of_this_tile_again(patch):
    places = prefill_fold.places
    patch.setattr(prefill_fold, "places", lambda s, walk, step: places(s, walk, jnp.maximum(step - 1, 0)))


def _heads(patch):
    ahead = packed_tiles._Source.ahead
    patch.setattr(packed_tiles._Source, "ahead", lambda self, s, head, *args: ahead(self, s, jnp.int32(0), *args))


def _own_pages_as_packed(patch):
    start = packed_tiles.own_start
    patch.setattr(packed_tiles, "own_start", lambda s, x: start(s, x) + (s.page_size if x.ndim else 0))


BUGS = {
    "unpacked tiles are not published": _unpublished,
    "slots are filled before they are free": lambda patch: patch.setattr(prefill_fold, "when_free", _nothing),
    "values that were never written are multiplied": lambda patch: patch.setattr(prefill_fold, "forget_unwritten", _nothing),
    "halves for each other": _halves_for_each_other,
    "each tile comes a step too late": _of_this_tile_again,
    "the first head for every head": _heads,
    "no page is read open": _of_own_tiles(lambda s, end, own, tiles: (end, own, tiles * 0)),
    "own pages are read as packed, too": _of_own_tiles(lambda s, end, own, tiles: (end + s.page_size, own, tiles)),
    "open pages from the last one on": _of_own_tiles(lambda s, end, own, tiles: (end, end, tiles)),
    "own pages are seen as packed": _own_pages_as_packed,
}
FOR_BUGS = ("int8", "q8_0 keys, q4_0 values", "int8 keys per channel")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, FOR_BUGS)
