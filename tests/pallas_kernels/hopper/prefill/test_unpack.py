"""Half tiles of codes, by emulated threads: the numbers of `page_format.unpack`, where `wgmma` reads them; banks; and
mutants."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import packed_suite
import pytest
from quick_cases import rest_long

from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import PageFormat, unpack
from pallas_kernels.hopper.decode import packed_operands
from pallas_kernels.hopper.prefill.unpack import HalfTile
from pallas_kernels.hopper.threads import lane_pairs, lanes

PAGES, HEADS, PAGE_SIZE, STAGES = 3, 2, 128, 2
TILES = {64: 128, 128: 128, 256: 64}
"""Keys of a tile by head dim."""

FORMATS = {f"{x.codes} {x.scale}{'' if x.group is None else x.group}": x for pair in packed_suite.FORMATS.values() for x in pair if x}
CASES = {f"{name}, head dim {dim}": (format, dim) for name, format in FORMATS.items() for dim in TILES}


def unpacked(emulated, format: PageFormat, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile of a page and head as the threads leave it, rows in order, and as `unpack` has it."""
    tile, rng = TILES[head_dim], np.random.default_rng(head_dim)
    numbers = rng.standard_normal((PAGES, HEADS, PAGE_SIZE, head_dim)) * 10.0 ** rng.integers(-3, 3, (PAGES, HEADS, PAGE_SIZE, 1))
    packed = [None if x is None else np.array(x) for x in pack_pages(numbers.astype(np.float32), format=format)]
    arrays = tuple(x for x in packed if x is not None)
    sizes = HalfTile(format, head_dim, tile, PAGE_SIZE, HEADS)
    page, head, token, slot = 2, 1, PAGE_SIZE - tile, 1

    def stage(arrays, scratch):
        refs = [lanes.i32(x) for x in (page, head)]
        halves = [sizes.load(arrays, *refs, lanes.i32(token + half * sizes.rows)) for half in range(2)]
        assert all(len(words) == sizes.registers for words in halves)
        for half, words in enumerate(halves):
            sizes.store(scratch["ring"], lanes.i32(slot), half, words)

    words = tile * head_dim // 2
    found = emulated.run_cluster(stage, ctas=1, threads=128, arrays=arrays, scratch_words={"ring": STAGES * words})["ring"]
    lines = found[0, slot * words :].view(np.uint16).reshape(tile // 8, head_dim // 64, 8, 8, 8)  # [tokens, channels, 8 tokens, places, 8]
    order = np.arange(8)[:, None] ^ np.arange(8)
    straight = np.take_along_axis(lines, order[None, None, :, :, None], axis=3)
    expected = np.asarray(unpack(format, *packed))[page, head, token : token + tile]
    return straight.transpose(0, 2, 1, 3, 4).reshape(tile, head_dim).view(ml_dtypes.bfloat16), expected


QUICK = ("int8 token, head dim 128", "fp8_e4m3 None, head dim 128", "int4 token32, head dim 64", "q8_0 None, head dim 256")
QUICK += ("q4_0 None, head dim 128", "int4 channel, head dim 128", "int8 channel, head dim 256")


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_a_tile_is_what_unpack_gives(emulated, case):
    """Bit for bit, but for the sign of 0."""
    found, expected = unpacked(emulated, *CASES[case])
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("case", rest_long(CASES, "q8_0 None, head dim 64", "int4 token, head dim 64", "q4_0 None, head dim 256"))
def test_8_threads_store_to_all_banks_and_a_warp_loads_whole_rows(case):
    format, dim = CASES[case]
    sizes = HalfTile(format, dim, TILES[dim], PAGE_SIZE, HEADS)
    assert sorted(sizes.order) == sorted({*(("piece", n) for n in range(7)), *(("row", n) for n in range(7))} & set(sizes.order))
    thread = np.arange(128)
    row, piece = (sum((thread >> n & 1) << bit for n, (name, bit) in enumerate(sizes.order) if name == of) for of in ("row", "piece"))
    assert len({*zip(row, piece, strict=True)}) == 128
    assert (row < sizes.pass_rows).all()
    assert (piece < sizes.pieces).all()
    pieces_of_places = 4 if format.codes == "q4_0" else 2
    places = (piece * pieces_of_places % 8) ^ (row % 8)
    assert (np.sort(places.reshape(16, 8), axis=1) == np.arange(8)).all()
    for warp in range(4):
        of_warp = row[32 * warp :][:32]
        assert all((of_warp == r).sum() == sizes.pieces for r in set(of_warp))


NUMBERS, SCALED = packed_operands.numbers, HalfTile._scaled


def _order_of_bytes(patch):
    patch.setattr(lane_pairs, "permuted", lambda a, b, order: a if order == 0x3120 else lane_pairs.multiply_pairs(a, b, "bfloat16"))


def _scales_of_the_next_turn(patch):
    patch.setattr(
        HalfTile, "_scaled", lambda self, pairs, block, scales, number: SCALED(self, pairs, block, scales, (number + 1) % self.passes)
    )


def _rounded_twice(patch):
    """The smaller part of a float16 scale is left out."""
    patch.setattr(lane_pairs, "multiply_add_pairs", lambda a, b, c, dtype: lane_pairs.multiply_pairs(a, b, dtype))


# A bug, and the case that catches it.
BUGS = {
    "bytes stay in their order": ("int8 token, head dim 128", _order_of_bytes),
    "scales are left out": ("int8 token, head dim 128", lambda patch: patch.setattr(HalfTile, "_scaled", lambda self, pairs, *_: pairs)),
    "scales of other tokens": ("fp8_e4m3 token, head dim 128", _scales_of_the_next_turn),
    "scales of the first block of channels": (
        "int4 token32, head dim 128",
        lambda patch: patch.setattr(HalfTile, "_scaled", lambda self, pairs, block, *args: SCALED(self, pairs, 0, *args)),
    ),
    "channels of the first block": (
        "int4 channel, head dim 128",
        lambda patch: patch.setattr(HalfTile, "_scaled", lambda self, pairs, block, *args: SCALED(self, pairs, 0, *args)),
    ),
    "low and high bits for each other": (
        "q4_0 None, head dim 128",
        lambda patch: patch.setattr(packed_operands, "numbers", lambda *args: NUMBERS(*args)[::-1]),
    ),
    "a float16 scale rounded to bfloat16": ("q4_0 None, head dim 128", _rounded_twice),
    "pieces of q4_0 as close as others": ("q4_0 None, head dim 256", lambda patch: patch.setattr(HalfTile, "blocks_apart", 1)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(emulated, monkeypatch, bug):
    case, plant = BUGS[bug]
    plant(monkeypatch)
    try:
        found, expected = unpacked(emulated, *CASES[case])
    except AssertionError:  # a fault
        return
    assert (found.astype(np.float32) != expected.astype(np.float32)).mean() > 0.01
