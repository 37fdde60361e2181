"""How fast a trace's copies between host and device memory ran: in one direction alone, and in both at once."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.bench.timing import Kernel

IN, OUT = "MemcpyH2D", "MemcpyD2H"


BESIDE = 0.5
"""The least share of its time that a copy has another beside it where it tells of both ways at once."""

ALL = 0.9
"""As much of its time counts as all. Between two copies of one way there is a short pause."""

Spans = list[tuple[float, float]]
"""Times, from and to, in order and apart."""


def traced_copy_rates(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Bytes per second of the copies "in" (host to device) and "out" alone, and of "both" at once, the sum of both
    ways.

    A trace tells a copy's bytes and times, but not when it was slower. So a copy counts as alone only if none ran the
    other way from its beginning to its end. "both" is of the times in which both ways ran, of copies that were beside
    such copies for at least `BESIDE` of their time: a small copy beside a large one says nothing about the large one,
    and its own rate is mostly latency. In the rest of its time, such a copy is taken to have the rate of those alone.
    What did not happen is left out, and so is everything if the trace does not tell a copy's bytes.
    """
    copies = {
        way: [kernel for kernel in kernels if kernel.name.startswith(name) and kernel.end > kernel.start]
        for way, name in (("in", IN), ("out", OUT))
    }
    if any(copy.size is None for each in copies.values() for copy in each):
        return {}
    found = {}
    for way, other in (("in", "out"), ("out", "in")):
        spans = _spans(copies[other])
        if alone := [copy for copy in copies[way] if not _covered(copy.start, copy.end, spans)]:
            found[way] = _rate(alone)
    both = _both({way: found.get(way) for way in copies}, copies)
    return found if both is None else found | {"both": both}


def copy_sizes(kernels: Sequence[Kernel]) -> list[dict[str, float | str]]:
    """A trace's copies by way and size: how many, their bytes, their seconds, and those in which a copy ran the other
    way. at_least: bytes, a power of two; copies of up to twice as many are counted together. Empty if the trace does
    not tell a copy's bytes."""
    copies = {way: [each for each in kernels if each.name.startswith(name)] for way, name in (("in", IN), ("out", OUT))}
    if any(copy.size is None for each in copies.values() for copy in each):
        return []
    found = []
    for way, other in (("in", "out"), ("out", "in")):
        spans, classes = _spans(copies[other]), {}
        for copy in copies[way]:
            classes.setdefault(1 << max(0, copy.size.bit_length() - 1), []).append(copy)
        for size, some in sorted(classes.items()):
            seconds = sum(copy.end - copy.start for copy in some) * 1e-9
            beside = sum(_covered(copy.start, copy.end, spans) for copy in some) * 1e-9
            sums = {"count": len(some), "bytes": sum(copy.size for copy in some), "seconds": seconds, "beside_s": beside}
            found.append({"way": way, "at_least": size} | sums)
    return found


def _both(alone: dict[str, float | None], copies: dict[str, list[Kernel]]) -> float | None:
    """Bytes per second while both ways ran; None where that did not happen, or cannot be told. alone: the rate of each
    way alone."""
    kept: dict[str, list[Kernel]] = {}
    while kept != copies:  # leaving a copy out may leave another one without a copy beside it
        kept, copies = copies, {way: _beside(copies[way], copies[other]) for way, other in (("in", "out"), ("out", "in"))}
    bytes_at_once, seconds = 0.0, 0.0
    for way, other in (("in", "out"), ("out", "in")):
        spans, others = _spans(kept[way]), _spans(kept[other])
        total = sum(end - start for start, end in spans) * 1e-9
        seconds = sum(_covered(start, end, others) for start, end in spans) * 1e-9  # the same for both ways
        moved, rate = sum(copy.size for copy in kept[way]), alone[way]
        if rate is None:
            if seconds < ALL * total or not total:
                return None
            rate = moved / total
        bytes_at_once += max(0.0, moved - rate * (total - seconds))
    return bytes_at_once / seconds if seconds else None


def _beside(copies: Sequence[Kernel], others: Sequence[Kernel]) -> list[Kernel]:
    """The copies that have others beside them for at least `BESIDE` of their time."""
    spans = _spans(others)
    return [copy for copy in copies if _covered(copy.start, copy.end, spans) >= BESIDE * (copy.end - copy.start)]


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


def _covered(start: float, end: float, spans: Spans) -> float:
    """How much of the time from start to end lies in the spans."""
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in spans)
