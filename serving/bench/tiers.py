"""`kvjax bench tiers`: decode steps of a sequence that is larger than the device's share of the cache, beside its floors.

The sequence's pages hold random numbers; there is no prefill. A page is on the device or in host memory, where kernels read it in place.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.model import ModelConfig
from kvjax.policies.decode import DecodePolicy, parse
from kvjax.sampling import SamplingRows
from kvjax.sequences import CachedSequence
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.bench.hollow import HollowEngine, random_model

COPY = 1 << 30
"""Bytes of a plain copy, whose rate is the floor's."""


@dataclasses.dataclass(frozen=True)
class Tiered:
    """What to time. tokens: of the sequence. device_bytes: for pages, indexes and everything else of the cache on the device; None:
    everything is there. steps: in a round."""

    shape: str
    config: ModelConfig
    tokens: int
    policies: tuple[str, ...]
    device_bytes: int | None
    steps: int
    rounds: int


def tiered_rows(plan: Tiered, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row for each policy: median seconds of a step, the bytes that it read from host memory, and these bytes at the rate of a plain copy
    from pinned host memory."""
    say("weights")
    model = random_model(plan.config)
    pages = -(-(plan.tokens + 2 * plan.steps * (plan.rounds + 2)) // PAGE_SIZE) + 1
    frame = plan.config.cache_spec(PAGE_SIZE).bytes_per_frame("full")
    sizes = {"pages": pages} if plan.device_bytes is None else {"device_bytes": plan.device_bytes, "pool_host_bytes": pages * frame}
    rate = _copy_rate()
    say("pages")
    engine = HollowEngine(model, policies=tuple(map(parse, plan.policies)), batch_buckets=(1,), **sizes)
    engine.fill_pages()
    for name in plan.policies:
        say(name)
        sequence = engine.hollow_sequence(plan.tokens)
        seconds, host_bytes = _time_steps(engine, sequence, parse(name), plan)
        moved, host_pages = statistics.median(host_bytes), engine.host_pages
        engine.free(sequence)
        yield {
            "shape": plan.shape,
            "layers": len(plan.config.layers),
            "tokens": plan.tokens,
            "policy": name,
            "device_bytes": plan.device_bytes,
            "host_pages": host_pages,
            "median_s": statistics.median(seconds),
            "samples": len(seconds),
            "host_bytes": moved,
            "rate": rate,
        }
    del engine
    gc.collect()


def _time_steps(engine: HollowEngine, sequence: CachedSequence, policy: DecodePolicy, plan: Tiered) -> tuple[list[float], list[float]]:
    """Seconds of a step, from rounds of steps of which each is fed the token of the one before, and bytes that steps read from the host."""
    rows, tokens = SamplingRows.of([None]), jnp.zeros(1, jnp.int32)
    seconds, host_bytes = [], []
    for number in range(plan.rounds + 1):
        reads = []
        started = time.perf_counter()
        for _ in range(plan.steps):
            tokens = engine.decode_and_sample([sequence], tokens, rows, policy).tokens
            reads.append(engine.last_reads)
        jax.block_until_ready(tokens)
        if number:  # the first one compiles
            seconds.append((time.perf_counter() - started) / plan.steps)
            host_bytes += [0.0 if each.host_bytes is None else float(np.asarray(each.host_bytes).sum()) for each in reads]
    return seconds, host_bytes


def _copy_rate() -> float:
    """Bytes per second of a plain copy from pinned host memory to the device."""
    device = jax.local_devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    pinned = jax.block_until_ready(jax.device_put(np.zeros(COPY, np.uint8), here.with_memory_kind("pinned_host")))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(pinned, here))
        seconds.append(time.perf_counter() - started)
    return COPY / statistics.median(seconds)
