"""How fast a trace's copies between host and device memory ran: in one direction alone, and in both at once."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.bench.timing import Kernel

IN, OUT = "MemcpyH2D", "MemcpyD2H"


BESIDE = 0.9
"""The least share of its time that a copy counts as beside others. Between two copies of one way there is a short pause."""

Spans = list[tuple[float, float]]
"""Times, from and to, in order and apart."""


def traced_copy_rates(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Bytes per second of the copies "in" (host to device) and "out" alone, and of "both" at once, the sum of both ways.

    A trace tells a copy's bytes and times, but not when it was slower. So a copy counts as alone only if none ran the other way from its
    beginning to its end, and as one of both only if some did for at least `BESIDE` of its time. What did not happen is left out, and so is
    everything if the trace does not tell a copy's bytes.
    """
    copies = {
        way: [kernel for kernel in kernels if kernel.name.startswith(name) and kernel.end > kernel.start]
        for way, name in (("in", IN), ("out", OUT))
    }
    if any(copy.size is None for each in copies.values() for copy in each):
        return {}
    found, at_once = {}, []
    for way, other in (("in", "out"), ("out", "in")):
        spans = _spans(copies[other])
        shares = [(copy, _covered(copy, spans) / (copy.end - copy.start)) for copy in copies[way]]
        if alone := [copy for copy, share in shares if not share]:
            found[way] = _rate(alone)
        if beside := [copy for copy, share in shares if share >= BESIDE]:
            at_once.append(_rate(beside))
    return found | ({"both": sum(at_once)} if len(at_once) == 2 else {})


def _rate(copies: Sequence[Kernel]) -> float:
    return sum(copy.size for copy in copies) / (sum(end - start for start, end in _spans(copies)) * 1e-9)


def _spans(copies: Sequence[Kernel]) -> Spans:
    """The times in which at least one of the copies ran."""
    found: Spans = []
    for copy in sorted(copies, key=lambda copy: copy.start):
        if found and copy.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], copy.end)
        else:
            found.append((copy.start, copy.end))
    return found


def _covered(copy: Kernel, spans: Spans) -> float:
    """How much of a copy's time lies in the spans."""
    return sum(max(0.0, min(copy.end, end) - max(copy.start, start)) for start, end in spans)
