"""The map of where sparse decoding is faster is what predictions say."""

import json

import numpy as np
import pytest
from tiny_models import QWEN_7B

from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model import BusTerm, CostModel, Price
from kvjax.cost_model.predict import sizes_of
from kvjax.cost_model.regimes import crossing, crossover, regime_map, save

PRICES = (("top:32", Price(0.2e-3, 3e-13)),)


def cost(c1=PRICES, **changed):
    fields = {"device": "chip", "model": "qwen2.5-7b", "sizes": sizes_of(QWEN_7B), "dtype": "bfloat16", "bytes_per_s": 4.4e12, "c0": 1e-3}
    fields |= {"measured": ((1, 8192, 2**20), (16, 8192, 2**20)), "error": 0.01, "source": "planted"}
    return CostModel(**(fields | {"c1": c1} | changed))


def test_the_map_is_the_prediction_and_the_line_is_where_it_is_one(tmp_path):
    found = regime_map(cost(), QWEN_7B, "top:32", (4096, 131_072, 2**20), (1, 8), memory_bytes=141 * 10**9)
    assert found.speedup[1, 1] == cost().speedup(QWEN_7B, "top:32", 131_072, 8)
    assert found.projected.tolist() == [[True, False, False]] * 2
    assert found.fits.tolist() == [[True, True, True], [True, True, False]], "480 GB of cache"
    for batch in (1, 8):
        start = crossover(cost(), QWEN_7B, "top:32", batch)
        assert cost().speedup(QWEN_7B, "top:32", start, batch) > 1 >= cost().speedup(QWEN_7B, "top:32", start - 1, batch)
    assert crossover(cost(c1=(("top:8", Price(100.0)),)), QWEN_7B, "top:8", 1) is None
    assert crossover(cost(c1=(("window:64+960", Price(0.0)),)), QWEN_7B, "window:64+960", 1) == 1025, "as fast as dense up to 1,024"
    save([found], tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(found.figures()))["batches"] == [1, 8]
    with pytest.raises(ValueError, match="lengths and batches"):
        regime_map(cost(), QWEN_7B, "top:8", (), (1,))


def test_a_crossing_says_whether_it_was_measured():
    assert crossing(cost(), QWEN_7B, "top:32", 1)[3] == "measurements at this batch"
    assert crossing(cost(), QWEN_7B, "top:32", 4)[3] == "between batches 1 and 16; this one not measured"
    assert crossing(cost(), QWEN_7B, "top:32", 32)[3].startswith("projection: ")
    assert crossing(cost(c1=(("top:32", Price(100.0)),)), QWEN_7B, "top:32", 1)[2:] == ("never", "-")


def test_the_map_of_a_small_device_is_bluer():
    made = cost(bus=BusTerm("qwen2.5-7b", 45e9, 12e-6, 0.7, ((1, 2**16, 2**19),)))
    frames, lengths = FrameCounts(260, 760, 7815), [2**power for power in range(14, 20)]
    large, small = (regime_map(made, QWEN_7B, "top:32", lengths, [1, 16], frames=each) for each in (None, frames))
    assert (small.speedup[0, 2:] > 2 * large.speedup[0, 2:]).all()
    np.testing.assert_array_equal(small.speedup[0, 0], made.speedup(QWEN_7B, "top:32", lengths[0], frames=frames))
    assert (small.speedup[0, :2] < large.speedup[0, :2]).all(), "the hot buffer's work costs short sequences time"
    assert small.fits.tolist() == [[True] * 6, [True, True, False, False, False, False]]
    assert small.figures()["frames"] == {"device": 260, "hot": 760, "host": 7815}
    with pytest.raises(ValueError, match="both say what fits"):
        regime_map(made, QWEN_7B, "top:32", lengths, [1], frames=frames, memory_bytes=2**37)
