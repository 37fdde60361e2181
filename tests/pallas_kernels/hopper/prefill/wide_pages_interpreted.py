"""flash_attention over packed pages that are unpacked a span at a time, and block_sparse_attention over those that are
unpacked before, interpreted on the CPU with race detection; `test_wide_pages.py` runs this in a process of its own, as
`query_tiles_interpreted.py` says.

Lanes are done by plain JAX, as in `packed_tiles_interpreted.py`. Spans are short, so that a row has several.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import packed_prefill_suite
import pytest

from pallas_kernels.attention.block_sparse_attention import mosaic_gpu as block_sparse
from pallas_kernels.attention.flash_attention import walks, widened
from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold, query_relay, wide_pages
from pallas_kernels.hopper.prefill.unpack import HalfTile

pytestmark = pytest.mark.usefixtures("fresh_caches")

SMALL = {"head_dim": 64, "page_size": 64, "kv_heads": 1, "group": 1, "width": 6, "num_queries": 72, "units": 1}
AFTER = {"format": "fp8 without scales", "width": 10, "units": 4, "opened": False, "listed": (0, 8, 5, 6, 7)}
"""Tokens were written after the chunk, too, and lists name some of them, or none."""
CASES = {
    "int8": {"lengths": (200, 300), "starts": (128, 150), "kv_heads": 2},
    "int8, a tile of queries over a border": {"format": "int8", "lengths": (330,), "starts": (220,), "num_queries": 110},
    "int8, the last tile is past the end": {"format": "int8", "lengths": (127,), "starts": (3,), "num_queries": 140},
    "int8, old queries": {"format": "int8", "lengths": (384,), "starts": (100,), "num_queries": 284, "fresh": 300},
    "int8, the table is one span": {"format": "int8", "lengths": (300,), "starts": (228,), "units": 4},
    "int8, spans of two tiles": {"format": "int8", "lengths": (600,), "starts": (490,), "num_queries": 110, "width": 10, "units": 2},
    "q8_0 keys, q4_0 values": {"lengths": (0, 384), "starts": (0, 300), "hole": True},
    "fp8 without scales": {"lengths": (300,), "starts": (128,), "opened": False},
    "int8 keys per channel": {"lengths": (500,), "starts": (440,), "num_queries": 60, "head_dim": 128, "width": 8},
    "int8 keys, values as they are": {"lengths": (200,), "starts": (64,), "page_size": 128, "width": 3},
    "keys as they are, int4 values": {"lengths": (170,), "starts": (10,), "num_queries": 160, "group": 2},
    "int4": {"lengths": (250,), "starts": (180,), "page_size": 192, "width": 3},
    "int8, lists": {"format": "int8", "lengths": (300, 330), "starts": (228, 301), "window": (5, 70), "lists": (5, 64), "kv_heads": 2},
    "q4_0, lists": {"lengths": (600, 70), "starts": (528, 0), "window": (5, 128), "lists": (5, 128), "page_size": 128, "hole": True},
    "fp8, lists": {"lengths": (300,), "starts": (228,), "lists": (5, 64), "opened": False},
    "lists after the chunk": AFTER | {"lengths": (600,), "starts": (200,), "num_queries": 40},
    "lists of a part of a tile": AFTER | {"lengths": (129,), "starts": (127,), "num_queries": 1, "window": (0, 64)},
    "tokens after the chunk": AFTER | {"lengths": (600,), "starts": (127,), "num_queries": 1, "listed": None},
    "int8 per channel, lists": {
        "lengths": (140,),
        "starts": (3,),
        "num_queries": 140,
        "window": (5, 70),
        "lists": (2, 64),
        "head_dim": 128,
    },
}


@pytest.fixture
def check(tools, interpreter, monkeypatch):
    """Runs a case: against the definition, and for the bits of the launch that unpacks in the kernel."""

    def run(name: str) -> None:
        spec = SMALL | {"format": name.removesuffix(", lists")} | CASES[name]
        units, fresh, after = spec.pop("units"), spec.pop("fresh", None), "listed" in spec
        listed, starts = spec.pop("listed", None), spec["starts"]
        if after:  # numbers and no NaN are after the chunk
            spec |= {"starts": tuple(length - spec["num_queries"] for length in spec["lengths"])} | ({"lists": (5, 64)} if listed else {})
        case = packed_prefill_suite.build(tools, **spec)
        case.operands = (*case.operands[:3], jnp.asarray(starts, jnp.int32), *case.operands[4:])
        if listed:
            case.keywords["blocks"] = jnp.broadcast_to(jnp.asarray(listed, jnp.int32), case.keywords["blocks"].shape)
        if fresh is not None:
            case.keywords["fresh"] = jnp.asarray([fresh], jnp.int32)
        found = {}
        for fewest in (1, 2**31):
            with monkeypatch.context() as patch:
                patch.setattr(prefill_fold, "launch", functools.partial(LAUNCH, interpret=interpreter.params))
                patch.setattr(wide_pages, "widen", functools.partial(WIDEN, interpret=interpreter.params))
                patch.setattr(HalfTile, "bring", packed_prefill_suite.bring_half)
                patch.setattr(HalfTile, "put", packed_prefill_suite.put_half)
                patch.setattr(widened, "MIN_ROWS", fewest)
                patch.setattr(block_sparse, "widens", lambda *_, fewest=fewest: fewest == 1)
                patch.setattr(widened, "span_of", lambda s, width: units * wide_pages.unit(s))
                jax.clear_caches()
                found[fewest] = interpreter.finished(case.run, "mosaic_gpu")
        (starts, lengths), new, old = case.operands[-2:], found[1], found[2**31]
        position = starts[:, None] + jnp.arange(case.operands[0].shape[1])
        meant = (position < lengths[:, None]) & (position >= (0 if fresh is None else fresh))
        kept = [[jnp.where(meant.reshape(*meant.shape, *(1,) * (x.ndim - 2)), x, 0) for x in both] for both in (new, old)]
        tools.assert_all_same_bits(*kept)
        if fresh is None:
            packed_prefill_suite.compare(tools, case, new)
        assert jnp.isfinite(new[0]).all()
        assert not interpreter.races_found(), "a race was found"

    return run


LAUNCH, WIDEN = prefill_fold.launch, wide_pages.widen


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference_and_the_kernel_that_unpacks(check, case):
    check(case)


WALK, TAKE, OWN_START, OWN_TILES = walks.over_keys, query_relay._take, packed_tiles.own_start, packed_tiles.own_tiles


def _span_late(patch):
    """Tiles of a span are walked from one tile too late on."""

    def walk(s, window, opened, span, refs, *place):
        if span is not None:
            refs = (*refs[: widened.SPAN], refs[widened.SPAN][...] + s.tile, *refs[widened.SPAN + 1 :])
        return WALK(s, window, opened, span, refs, *place)

    patch.setattr(walks, "over_keys", walk)


def _span_long(patch):
    """A span's last tile is walked in the next span, too."""
    patch.setattr(walks, "over_keys", lambda s, window, opened, span, *rest: WALK(s, window, opened, span and span + s.tile, *rest))


def _next_page(patch):
    """Pages of a span are those after it."""

    pools_of = wide_pages.pools_of
    patch.setattr(wide_pages, "pools_of", lambda s, pages, table, *rest: pools_of(s, pages, jnp.roll(table, -1, axis=1), *rest))


def _own_as_packed(patch):
    patch.setattr(packed_tiles, "own_start", lambda s, x: OWN_START(s, x) + (s.page_size if x.ndim else 0))


def _forgotten(patch):
    """A launch begins with no keys."""
    patch.setattr(query_relay, "_take", lambda s, *_: prefill_fold.no_keys(s))


def _maxima_forgotten(patch):
    """Spans are added without their maxima."""

    def taken(s, *rest):
        acc, m, total = TAKE(s, *rest)
        return acc, prefill_fold.all_rows(0.0) + 0 * m, total

    patch.setattr(query_relay, "_take", taken)


def _own_in_each(patch):
    """Own pages are folded in each span."""

    def walk(s, window, opened, span, refs, row, head, tile):
        walk, first = WALK(s, window, opened, span, refs, row, head, tile)
        if span is None:
            return walk, first
        _, own, tiles = OWN_TILES(s, first, refs[1][row], refs[2][row])
        steps, _ = walk.packed
        starts = walk.starts

        def every(step):
            late = own + (step - steps) * s.tile
            return tuple(jnp.where(step < steps, x, late + p * s.piece) for p, x in enumerate(starts(step)))

        return dataclasses.replace(walk, steps=steps + tiles, starts=every), first

    patch.setattr(walks, "over_keys", walk)


BUGS = {
    "spans begin a tile late": _span_late,
    "spans overlap by a tile": _span_long,
    "a page late": _next_page,
    "own pages are seen as packed": _own_as_packed,
    "earlier spans are forgotten": _forgotten,
    "maxima of earlier spans are forgotten": _maxima_forgotten,
    "own pages are folded in each span": _own_in_each,
}
FOR_BUGS = ("int8, a tile of queries over a border", "int8", "int8, spans of two tiles")
OF_LISTS = ("a page late", "own pages are seen as packed")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("bug", "cases"), [(bug, FOR_BUGS) for bug in BUGS] + [(bug, ("int8, lists",)) for bug in OF_LISTS])
def test_a_planted_bug_is_caught(tools, check, monkeypatch, bug, cases):
    BUGS[bug](monkeypatch)
    tools.must_fail(lambda _, case: check(case), None, cases)
