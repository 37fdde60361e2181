"""The memory plan and what a pool may ask for."""

from __future__ import annotations

import pytest

from kvjax import Engine
from kvjax.memory import check_pool, memory_plan

pytestmark = pytest.mark.optimized


def test_a_pool_larger_than_all_memory_is_refused_before_it_is_made(model):
    plan = memory_plan(model.config, weights_bytes=0)
    with pytest.raises(
        ValueError, match=r"a pool of 2,000,000,000 pages takes .* GiB, and all memory of the device is .*: give at most"
    ) as no:
        Engine(model, pages=2_000_000_000)
    most = int(str(no.value).rpartition("at most ")[2].removesuffix(" pages").replace(",", ""))
    check_pool(plan, most)
    with pytest.raises(ValueError, match="give at most"):
        check_pool(plan, most + 1)
