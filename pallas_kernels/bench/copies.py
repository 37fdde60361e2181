"""How fast a trace's copies between host and device memory ran: in one direction alone, and in both at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pallas_kernels.bench.timing import Kernel

IN, OUT = "MemcpyH2D", "MemcpyD2H"


def traced_copy_rates(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Bytes per second of the copies "in" (host to device), "out", and of "both" while both ran. Each copy's bytes are spread evenly over
    its time. What did not happen is left out, and so is everything if the trace does not tell a copy's bytes."""
    copies = [
        (kernel.name.startswith(OUT), kernel) for kernel in kernels if kernel.name.startswith((IN, OUT)) and kernel.end > kernel.start
    ]
    if any(copy.size is None for _, copy in copies):
        return {}
    times = sorted({time for _, copy in copies for time in (copy.start, copy.end)})
    spent, moved = dict.fromkeys(("in", "out", "both"), 0.0), dict.fromkeys(("in", "out", "both"), 0.0)
    for start, end in itertools.pairwise(times):
        running = [(out, copy) for out, copy in copies if copy.start <= start and copy.end >= end]
        if not running:
            continue
        ways = {out for out, _ in running}
        way = "both" if len(ways) == 2 else "out" if True in ways else "in"
        spent[way] += (end - start) * 1e-9
        moved[way] += sum(copy.size * (end - start) / (copy.end - copy.start) for _, copy in running)
    return {way: moved[way] / spent[way] for way in spent if spent[way]}
