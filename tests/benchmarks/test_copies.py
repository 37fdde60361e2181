"""Rates of copies, from made-up traces."""

import pytest

from benchmarks.copies import copy_sizes, traced_copy_rates
from pallas_kernels.bench.timing import Kernel


def test_each_way_alone_and_both_at_once():
    """Copies in of which the second has copies out beside it, at half the rate; then one out alone. Kernels do not
    count."""
    kernels = [
        Kernel("MemcpyH2D", 0, 10_000, size=500_000),
        Kernel("select_tiles", 0, 90_000),
        Kernel("MemcpyH2D", 10_000, 30_000, size=525_000),  # 19 us at half the rate, 1 us alone
        Kernel("MemcpyD2H", 10_500, 20_000, size=190_000),
        Kernel("MemcpyD2H", 20_200, 29_700, size=190_000),
        Kernel("MemcpyD2H", 40_000, 50_000, size=400_000),
    ]
    assert traced_copy_rates(kernels) == pytest.approx({"in": 50e9, "out": 40e9, "both": 45e9})


def test_a_copy_that_is_beside_another_for_a_part_of_its_time_has_no_rate():
    """It may have been slower there. Its bytes spread evenly would make the other part slow."""
    kernels = [
        Kernel("MemcpyH2D", 0, 20_000, size=1_000_000),
        Kernel("MemcpyD2H", 15_000, 35_000, size=600_000),  # a quarter at 20 GB/s, the rest at 33
        Kernel("MemcpyD2H", 35_000, 45_000, size=333_000),
    ]
    assert traced_copy_rates(kernels) == pytest.approx({"out": 33.3e9})


def test_both_is_of_the_same_times_of_both_ways():
    """Small copies, which take as long as their latency, lie beside large ones of the other way: they are not the rate
    of both at once."""
    kernels = [
        Kernel("MemcpyH2D", 0, 1_000_000, size=40_000_000),
        Kernel("MemcpyD2H", 1_000_000, 2_000_000, size=26_000_000),
        Kernel("MemcpyH2D", 3_000_000, 4_000_000, size=24_000_000),  # 0.2 ms at 40 GB/s, 0.8 ms at 20
        Kernel("MemcpyD2H", 3_200_000, 4_200_000, size=21_200_000),  # 0.8 ms at 20 GB/s, 0.2 ms at 26
        Kernel("MemcpyH2D", 5_000_000, 6_000_000, size=40_000_000),
        Kernel("MemcpyD2H", 5_500_000, 5_502_000, size=8_192),
        Kernel("MemcpyD2H", 7_000_000, 8_000_000, size=26_000_000),
        Kernel("MemcpyH2D", 7_500_000, 7_502_000, size=8_192),
    ]
    assert traced_copy_rates(kernels) == pytest.approx({"in": 40e9, "out": 26e9, "both": 40e9})
    small = [kernel for kernel in kernels if kernel.start < 3_000_000 or kernel.start >= 5_000_000]
    assert traced_copy_rates(small) == pytest.approx({"in": 40e9, "out": 26e9})


def test_pauses_do_not_count():
    kernels = [Kernel("MemcpyH2D", 0, 10_000, size=500_000), Kernel("MemcpyH2D", 50_000, 60_000, size=300_000)]
    assert traced_copy_rates(kernels) == pytest.approx({"in": 40e9})


def test_copies_of_unknown_size_have_no_rate():
    assert traced_copy_rates([Kernel("MemcpyH2D", 0, 10_000)]) == {}
    assert traced_copy_rates([Kernel("MemcpyD2D", 0, 10_000)]) == {}


def test_copies_are_counted_by_way_and_size():
    kernels = [
        Kernel("MemcpyH2D", 0, 10_000, size=500_000),
        Kernel("MemcpyH2D", 10_000, 30_000, size=520_000),
        Kernel("select_tiles", 0, 90_000),
        Kernel("MemcpyD2H", 25_000, 27_000, size=4),
        Kernel("MemcpyD2H", 28_000, 34_000, size=2**20),
    ]
    found = {(row["way"], row["at_least"]): row for row in copy_sizes(kernels)}
    assert list(found) == [("in", 2**18), ("out", 4), ("out", 2**20)]
    assert (found["in", 2**18]["count"], found["in", 2**18]["bytes"]) == (2, 1_020_000)
    assert (found["in", 2**18]["seconds"], found["in", 2**18]["beside_s"]) == pytest.approx((30e-6, 4e-6))
    assert found["out", 2**20]["beside_s"] == pytest.approx(2e-6)
    assert copy_sizes([Kernel("MemcpyH2D", 0, 10_000)]) == []
