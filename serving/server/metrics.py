"""Prometheus metrics of a runtime, with the names and labels of ADR 0008, section 2.9; others beside them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvjax.cache import MAX_STEP_TOKENS
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.serving.sessions.runtime import SessionRuntime

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32_768, 131_072, 524_288, 2_097_152)
SHARES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4, 1.0, 3.0, 10.0, 30.0, 100.0)
HISTOGRAMS = {
    "session_history_tokens": ("Tokens of a session's history when a generation begins.", TOKENS),
    "generate_prefill_tokens": ("Tokens that a generation has to prefill.", TOKENS),
    "generate_prefill_duration_seconds": ("From the step that admits a generation to its first token.", SECONDS),
    "time_to_first_token_seconds": ("From a generation's call to its first token, waiting included.", SECONDS),
    "token_gap_seconds": ("Between two tokens of a generation.", SECONDS),
    "attention_missed_share": ("Mean share of attention that a generation's measured steps missed, with --max-missed.", SHARES),
}
GAUGES = {
    "session_active": ("sessions", "Sessions that exist."),
    "session_kv_live_bytes": ("kv_live_bytes", "Bytes of pages of all sessions on the device."),
    "session_kv_host_bytes": ("host_bytes", "Bytes of pages of demoted sessions in host memory."),
    "session_kv_disk_bytes": ("disk_bytes", "Bytes of pages of demoted sessions on disk."),
    "generate_active": ("generating", "Generations that have a slot."),
    "generate_waiting": ("waiting", "Generations and calls that wait."),
}
PAGES = {"device": "device_pages", "free": "free_pages", "host": "host_pages", "disk": "disk_pages"}
"""Stores -> keys of `SessionRuntime.gauges`. "free": pages of the device's pool that nobody uses."""
COUNTERS = {  # name -> label, {value of the label: key of SessionRuntime.counts}, help
    "session": ("outcome", {each: each for each in ("closed", "evicted", "failed")}, "Sessions that have ended."),
    "session_evicted": ("reason", {each: f"reason_{each}" for each in ("ttl", "lru", "close")}, "Why sessions ended."),
    "cache_invariant_violations": ("kind", {each: each for each in ("inv1", "inv2", "inv3")}, "Violated invariants: must stay 0."),
    "session_demoted": (
        "to",
        {"host": "demoted", "disk": "shelved"},
        "Times that a session's pages were moved.",
    ),
    "attention_missed": (
        "event",
        {"alarm": "missed_alarms", "longer_step": "missed_steps", "more_key": "missed_keys"},
        "Alarms of --max-missed; steps of a KV head that read more for it; keys that these read more.",
    ),
    "draft_rounds": (
        "tokens",
        {str(tokens): f"draft_kept_{tokens}" for tokens in range(1, MAX_STEP_TOKENS + 1)},
        "Rounds of drafting of generations that have ended, by how many tokens stayed in them.",
    ),
    "history_truncated": ("by", {"window": "truncated"}, "Times that the window dropped tokens of a history."),
}


class Counts:
    """How many values a histogram has in each bucket, and their sum. One thread adds.

    `prometheus_client.Histogram` takes a lock and looks at one bound after another, in Python. That is too much for
    every token.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, said: str) -> Any:
        """What Prometheus is told: in each bucket the values up to its bound."""
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        labels = [floatToGoString(each) for each in (*self._bounds, float("inf"))]
        return HistogramMetricFamily(
            name, said, buckets=list(zip(labels, itertools.accumulate(self._counts), strict=True)), sum_value=self._sum
        )


class Metrics:
    """Metrics of one server. `observe` goes into `SessionRuntime(observe=...)`. runtime: set once it is there."""

    def __init__(self):
        needs_extras("kvjax serve", "server")
        import prometheus_client

        self.registry = prometheus_client.CollectorRegistry()
        self.runtime: SessionRuntime | None = None
        self._histograms = {name: Counts(buckets) for name, (_, buckets) in HISTOGRAMS.items()}
        self.calls = prometheus_client.Counter("rpc", "Calls that have ended.", ["method", "code"], registry=self.registry)
        self.registry.register(self)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].add(value)

    def collect(self) -> Iterator[Any]:
        """What was there a moment ago, and what has been counted, for Prometheus. Waits for nothing."""
        for name, (said, _) in HISTOGRAMS.items():
            yield self._histograms[name].family(name, said)
        if self.runtime is None:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        there, counts = self.runtime.published, self.runtime.counts  # a call would wait for the engine's step, or its compiler
        for name, (key, said) in GAUGES.items():
            yield GaugeMetricFamily(name, said, value=there[key])
        stores = GaugeMetricFamily("kv_pages", "Pages in each store.", labels=["store"])
        for store, key in PAGES.items():
            stores.add_metric([store], there[key])
        yield stores
        for name, (label, keys, said) in COUNTERS.items():
            family = CounterMetricFamily(name, said, labels=[label])
            for value, key in keys.items():
                family.add_metric([value], counts.get(key, 0))
            yield family

    def text(self) -> bytes:
        """The page that Prometheus scrapes."""
        import prometheus_client

        return prometheus_client.generate_latest(self.registry)
