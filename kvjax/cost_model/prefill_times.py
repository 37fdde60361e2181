"""Times of a prompt's attention by prefill policy and length. The prefill policy `auto` compares them.

A `PrefillTimes` holds measured seconds of one layer's attention over whole prompts, as `benchmarks.prefill_ops` writes
them, for one device and one size of layer. Those inside the package are in `prefill_times.json` in this folder, which
`kvjax cost fit` wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.cost_model.records import Count, Rate, check_record, from_json
from kvjax.model.config import ModelConfig
from kvjax.policies.prefill.naming import built_in_name, parse_recorded_prefill
from pallas_kernels.core.files import read_list


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes on which one layer's attention time depends, besides device, policy and length. page_size: tokens."""

    heads: Count
    kv_heads: Count
    head_dim: Count
    dtype: str
    page_size: Count

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim} in {self.dtype}, pages of {self.page_size}"


def layer_sizes(config: ModelConfig, dtype: str, page_size: int) -> LayerSizes:
    """The sizes of the first layer that attends to all tokens, because prefill policies choose blocks in such layers
    only."""
    mixer = next((mixer for mixer in config.attention if mixer.window is None), config.attention[0])
    return LayerSizes(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, dtype, page_size)


class Quote(NamedTuple):
    """Seconds of attention per layer and token of a chunk, for a policy and for dense of the same table.

    error: the table's. projection: the reasons why the time is not interpolated between measurements; empty if it is.
    """

    seconds: float
    dense_seconds: float
    error: float
    projection: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PrefillTimes:
    """Measured times. Static and hashable.

    device: JAX's name for it. shape, sizes: the name and the sizes of what was measured. seconds: for each policy name,
    (tokens, seconds) of whole prompts, ascending in both; "dense" is among them. error: half of the widest spread (10th
    to 90th percentile) of any time here, as a share of its median. source: the files of the measurements.
    """

    device: str
    shape: str
    sizes: LayerSizes
    seconds: tuple[tuple[str, tuple[tuple[Count, Rate], ...]], ...]
    error: float
    source: str

    def __post_init__(self):
        check_record(self, "prefill times")
        if "dense" not in dict(self.seconds):
            raise ValueError(f"times of prefill are compared with dense, and those of {self.device}, {self.shape}, have none of it")
        for policy, points in self.seconds:
            if not points or any(not (a[0] < b[0] and a[1] < b[1]) for a, b in itertools.pairwise(((0, 0.0), *points))):
                raise ValueError(f"times of longer prompts must be longer; those of {policy} on {self.device}, {self.shape}, are {points}")

    def quote(self, policy: str, start: int, end: int) -> Quote | None:
        """The time of the tokens at positions [start, end). None if the policy has no time, or only one, of a prompt of
        fewer than `end` tokens.

        If `end` is within the policy's `dense_tokens`, the time is that of dense.
        """
        points = dict(self.seconds)
        timed = timed_as(policy)
        if timed not in points or (len(points[timed]) == 1 and end > points[timed][0][0]):
            return None
        covered = end <= getattr(parse_recorded_prefill(policy), "dense_tokens", 0)
        longest = points["dense"][-1][0] if covered else min(points[name][-1][0] for name in ("dense", timed))
        shortest = points["dense"][0][0] if covered else max(points[name][0][0] for name in ("dense", timed))
        reasons = []
        if end < shortest:
            reasons.append(f"position {end:,} lies before the {shortest:,} tokens measured, so their mean is taken")
        if end > longest:
            reasons.append(f"position {end:,} lies beyond the {longest:,} tokens measured, so the last slope is taken")
        dense = per_token(points["dense"], (start + end) / 2)
        seconds = dense if covered else per_token(points[timed], (start + end) / 2)
        return Quote(seconds, dense, self.error, tuple(reasons))


def timed_as(policy: str) -> str:
    """The name under which a built-in policy is timed: the policy's own name, without `dense_below`. That option does
    not change how long the lists take."""
    found = parse_recorded_prefill(policy)
    if not hasattr(found, "dense_below"):
        return policy
    return built_in_name(str(dataclasses.replace(found, dense_below=0))) or policy


def per_token(points: Sequence[tuple[int, float]], position: float) -> float:
    """Seconds that a token at a position adds, from (tokens, seconds) of whole prompts.

    The mean slope between two measured prompts is taken as the slope at the position half-way between them; it is exact
    if time is a quadratic function of length. Slopes at other positions are interpolated. Before the first of these
    positions and after the last, the slope is constant.
    """
    tokens, seconds = (np.array([0, *column], float) for column in zip(*points, strict=True))
    return float(np.interp(position, (tokens[1:] + tokens[:-1]) / 2, np.diff(seconds) / np.diff(tokens)))


def nearest_quote(tables: Iterable[PrefillTimes], sizes: LayerSizes, policy: str, start: int, end: int) -> Quote | None:
    """The quote for these sizes if they were measured, else a projection from the measured sizes that differ in the
    fewest fields. None if no table can quote the policy."""
    for times in sorted(tables, key=lambda times: _differences(times.sizes, sizes)):
        found = times.quote(policy, start, end)
        if found is not None:
            other = () if times.sizes == sizes else (f"measured with {times.sizes}, not with {sizes}",)
            return found._replace(projection=(*other, *found.projection))
    return None


def _differences(one: LayerSizes, other: LayerSizes) -> int:
    return sum(a != b for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True))


def fit_prefill(results: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[PrefillTimes, ...]:
    """Times from results of `benchmarks.prefill_ops`. results: (source, JSON object) of each. If a time was measured
    twice, the later one is used.

    If a model's layers were timed together, each layer gets an equal part. Dense is what the engine runs: attention
    over pages. Policies that are not built in are left out. ValueError for a file of another command, and for rows
    without dense.
    """
    points: dict[tuple[str, str, LayerSizes], dict[tuple[str, int], tuple[float, float, str]]] = {}
    source = ""
    try:
        for source, run in sorted(results, key=lambda pair: str(pair[1]["provenance"]["date"])):
            if run["bench"] not in ("prefill-ops", "prefill-layers"):
                raise KeyError("prefill-ops")
            for row in run["rows"]:
                name = _name(row)
                if name is not None and "median_s" in row:
                    sizes = LayerSizes(**{field.name: row[field.name] for field in dataclasses.fields(LayerSizes)})
                    spread = (row["p90_s"] - row["p10_s"]) / (2 * row["median_s"])
                    measured = points.setdefault((run["provenance"]["device"], row["shape"], sizes), {})
                    measured[name, operator.index(row["tokens"])] = (row["median_s"] / row.get("layers", 1), spread, source)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{source or 'a file'} is no result of benchmarks.prefill_ops: {error} is missing or wrong") from None
    if not points:
        raise ValueError("no row has a time of dense or of a built-in prefill policy: give results of benchmarks.prefill_ops")
    tables = []
    for (device, shape, sizes), found in points.items():
        names = ("dense", *sorted({name for name, _ in found} - {"dense"}))
        seconds = {name: tuple(sorted((tokens, row[0]) for (each, tokens), row in found.items() if each == name)) for name in names}
        sources = " ".join(sorted({source for *_, source in found.values()}))
        some_times = tuple((name, some) for name, some in seconds.items() if some)
        tables.append(PrefillTimes(device, shape, sizes, some_times, max(spread for _, spread, _ in found.values()), sources))
    return tuple(tables)


def _name(row: Mapping[str, Any]) -> str | None:
    """The policy that a row times. None for a single step of a policy, for an op that the engine does not run, and for
    a policy that is not built in."""
    if row["op"] == "dense":
        return "dense" if row["policy"] == "paged" else None
    name = built_in_name(row["policy"]) if row["op"] in ("sparse", "layers") else None
    if name is None or name == "dense":
        return name
    # Rows of a model's layers run the policy as it is. If it attends to a prompt of this length densely, the row has no
    # time of its lists.
    was_dense = row["op"] == "layers" and row["tokens"] <= getattr(parse_recorded_prefill(name), "dense_tokens", 0)
    return None if was_dense else timed_as(name)


def read_prefill_times(file: Path) -> tuple[PrefillTimes, ...]:
    """The times of a file that `kvjax cost fit --json` wrote. ValueError, with the file's name, for another file."""
    return read_list(
        file, "prefill_times", lambda given: from_json(PrefillTimes, given, "prefill times"), "give a file that kvjax cost fit --json wrote"
    )


@functools.cache
def known_prefill_times() -> tuple[PrefillTimes, ...]:
    """The times inside the package, made from committed measurements, which each `source` names."""
    return read_prefill_times(importlib.resources.files(__package__) / "prefill_times.json")
