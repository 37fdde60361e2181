"""Engines whose running sequences are larger than the device: pages in host memory, read in place, change no bits."""

import dataclasses

import jax
import pytest
from histories import FAMILIES, LARGE, SMALL, History, engine_for, run_histories
from quick_cases import rest_long
from tiny_models import make_family

from kvjax.memory import memory_plan

DEVICE_PAGES = 6
"""Pages of the engines' device, of 40."""


class HostHistory(History):
    """An engine with a few pages on the device, and the others in host memory."""

    def make_engine(self):
        frame = memory_plan(self.model.config, page_size=self.sizes.page).frame_bytes
        few = dataclasses.replace(self.sizes, pages=DEVICE_PAGES)
        host = (self.sizes.pages - DEVICE_PAGES) * frame
        return engine_for(self.model, few, pool_host_bytes=host, reuse=True if self.random.integers(2) else None)


@pytest.mark.bits
@pytest.mark.parametrize("name", rest_long({name: name for name in FAMILIES}, "llama", "deepseek_v32"))
def test_pages_in_host_memory_change_no_bits(name, tmp_path):
    counts = run_histories(make_family(name), range(8), tmp_path, SMALL, HostHistory)
    assert counts["sequences compared"] > 3


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_in_host_memory_change_no_bits_on_a_gpu(name, tmp_path):
    counts = run_histories(make_family(name, head_dim=128, window=200, dtype="bfloat16"), range(50), tmp_path, LARGE, HostHistory)
    assert counts["sequences compared"] > 20
