"""Half tiles of codes, by emulated threads: the numbers of `page_format.unpack`, where `wgmma` reads them; banks; and mutants."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import packed_suite
import pytest
from quick_cases import rest_long

from pallas_kernels.hopper import lanes
from pallas_kernels.hopper.lane_halves import HalfTile
from pallas_kernels.pack_pages import pack_pages
from pallas_kernels.page_format import PageFormat, unpack

PAGES, HEADS, PAGE_SIZE, STAGES = 3, 2, 128, 2
TILES = {64: 128, 128: 128, 256: 64}
"""Keys of a tile by head dim."""

FORMATS = {f"{x.codes} {x.scale}{'' if x.group is None else x.group}": x for pair in packed_suite.FORMATS.values() for x in pair if x}
CASES = {f"{name}, head dim {dim}": (format, dim) for name, format in FORMATS.items() for dim in TILES}


def unpacked(emulated, format: PageFormat, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile of a page and head as the threads leave it, rows in order, and as `unpack` has it."""
    tile, rng = TILES[head_dim], np.random.default_rng(head_dim)
    numbers = rng.standard_normal((PAGES, HEADS, PAGE_SIZE, head_dim)) * 10.0 ** rng.integers(-3, 3, (PAGES, HEADS, PAGE_SIZE, 1))
    packed = [None if x is None else np.array(x) for x in pack_pages(numbers.astype(ml_dtypes.bfloat16), format=format)]
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
