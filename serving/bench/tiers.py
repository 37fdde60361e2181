"""`kvjax bench tiers`: decode steps of a sequence that is larger than the device's share of the cache, beside its floors.

The sequence's pages hold random numbers; there is no prefill. A page lies on the device or in host memory, where kernels read it in place,
or through the hot buffer. The row to compare with has everything on the device, where that fits.
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
from kvjax.policies.decode import DecodePolicy
from kvjax.sampling import SamplingRows
from kvjax.sequences import CachedSequence
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.bench.hollow import HollowEngine, random_model

COPY = 1 << 30
"""Bytes of a plain copy, whose rate is the floor's."""


@dataclasses.dataclass(frozen=True)
class Tiered:
    """What to time. tokens: of the sequence. device_bytes: what the cache may take on the device, indexes included; None: all of it lies
    there. steps: in a round."""

    shape: str
    config: ModelConfig
    tokens: int
    policies: tuple[DecodePolicy, ...]
    device_bytes: tuple[int | None, ...]
    steps: int
    rounds: int

    def __post_init__(self):
        for name in ("tokens", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tokens + self._later > self.config.max_positions:
            raise ValueError(
                f"{self.tokens:,} tokens and {self._later:,} steps are more than the model's {self.config.max_positions:,} positions"
            )

    @property
    def _later(self) -> int:
        return self.steps * (self.rounds + 1)

    @property
    def pages(self) -> int:
        """Pages of the sequence at its end."""
        return -(-(self.tokens + self._later) // PAGE_SIZE) + 1


def tiered_rows(plan: Tiered, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row for each size of the device and policy: median seconds of a step, the bytes of keys and values that it read, those of them that
    came from host memory, and the rate of a plain copy from pinned host memory, in bytes per second."""
    say("weights")
    model = random_model(plan.config)
    frame = plan.config.cache_spec(PAGE_SIZE).bytes_per_frame("full")
    rate = _copy_rate()
    for device_bytes in plan.device_bytes:
        sizes = {"pages": plan.pages + 1}
        if device_bytes is not None:
            sizes = {"device_bytes": device_bytes, "pool_host_bytes": plan.pages * frame}
        say("pages")
        engine = HollowEngine(model, policies=plan.policies, batch_buckets=(1,), **sizes)
        engine.fill_pages()
        for policy in plan.policies:
            say(str(policy))
            sequence = engine.hollow_sequence(plan.tokens)
            seconds, read, from_host = _time_steps(engine, sequence, policy, plan)
            host_pages = engine.host_pages
            engine.free(sequence)
            yield {
                "shape": plan.shape,
                "layers": len(plan.config.layers),
                "tokens": plan.tokens,
                "policy": str(policy),
                "device_bytes": device_bytes,
                "cache_bytes": plan.pages * frame,
                "host_pages": host_pages,
                "median_s": statistics.median(seconds),
                "samples": len(seconds),
                "read_bytes": statistics.mean(read),
                "host_bytes": statistics.mean(from_host),
                "rate": rate,
            }
        del engine
        gc.collect()


def _time_steps(
    engine: HollowEngine, sequence: CachedSequence, policy: DecodePolicy, plan: Tiered
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a step, of rounds in which each step is fed the token of the one before; the bytes that steps read, and from the host."""
    rows, tokens = SamplingRows.of([None]), jnp.zeros(1, jnp.int32)
    config, size = engine.config.attention[0], jnp.dtype(engine.config.compute_dtype).itemsize
    seconds, read, from_host = [], [], []
    for number in range(plan.rounds + 1):
        reads = []
        started = time.perf_counter()
        for _ in range(plan.steps):
            tokens = engine.decode_and_sample([sequence], tokens, rows, policy).tokens
            reads.append(engine.last_reads)
        jax.block_until_ready(tokens)
        if number:  # the first one compiles, and fills the hot buffer
            seconds.append((time.perf_counter() - started) / plan.steps)
            read += [float(np.asarray(each.keys).sum()) * 2 * config.head_dim * size for each in reads]
            from_host += [0.0 if each.host_bytes is None else float(np.asarray(each.host_bytes).sum()) for each in reads]
    return seconds, read, from_host


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
