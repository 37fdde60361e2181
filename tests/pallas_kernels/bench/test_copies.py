"""Rates of copies, from made-up traces."""

import pytest

from pallas_kernels.bench.copies import traced_copy_rates
from pallas_kernels.bench.timing import Kernel


def test_each_way_alone_and_both_at_once():
    """0 to 10 us in, of which the last 4 us beside a copy out, which goes on for 4 us; kernels do not count."""
    kernels = [
        Kernel("MemcpyH2D", 0, 10_000, size=500_000),
        Kernel("select_tiles", 0, 90_000),
        Kernel("MemcpyD2H", 6_000, 14_000, size=320_000),
    ]
    assert traced_copy_rates(kernels) == pytest.approx({"in": 50e9, "out": 40e9, "both": 90e9})


def test_pauses_do_not_count():
    kernels = [Kernel("MemcpyH2D", 0, 10_000, size=500_000), Kernel("MemcpyH2D", 50_000, 60_000, size=300_000)]
    assert traced_copy_rates(kernels) == pytest.approx({"in": 40e9})


def test_copies_of_unknown_size_have_no_rate():
    assert traced_copy_rates([Kernel("MemcpyH2D", 0, 10_000)]) == {}
    assert traced_copy_rates([Kernel("MemcpyD2D", 0, 10_000)]) == {}
