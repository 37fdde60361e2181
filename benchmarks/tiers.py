"""Decode steps of a sequence that is larger than the device's share of the cache, beside its floors.

The sequence's pages hold random numbers; there is no prefill. A page lies on the device or in host memory, where
kernels read it in place, or through the hot buffer. The row to compare with has everything on the device, where that
fits.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benchmarks.hollow import FakeEngine, random_model
from benchmarks.lists import Fresh, Replayed
from benchmarks.run import BenchFormatOption, LayersOption, ShapeOption, config_of_shape, main, plan_of, run
from kvjax.cache import MAX_STEP_TOKENS, CacheSpec
from kvjax.cache.formats import parse_cache_format
from kvjax.cost_model.fitting import OWN_LISTS
from kvjax.engine.memory import memory_plan
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_output import AttentionStats
from kvjax.engine.step_plan import DecodeGroup, Launch, StepPlan
from kvjax.model.config import ModelConfig
from kvjax.policies.decode import DecodePolicy, TopBlocks, name_of
from kvjax.serving.bench.decode import PAGE_SIZE, never
from kvjax.serving.bench.prefill import longest
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, byte_counts, number, parse_lengths, whole
from kvjax.serving.xla_flags import allow_host_pages
from pallas_kernels.bench.timing import record

COPY = 1 << 30
"""Bytes of a plain copy, whose rate is the floor's."""


LEAST = 4
"""Launches before the timed ones: one compiles, those right after it are slow on GPUs, the last one shows how long a
step takes."""


@dataclasses.dataclass(frozen=True)
class Tiered:
    """What to time. tokens: of the sequences, one at a time. device_bytes: what the cache may take on the device,
    indexes included, in an engine whose host memory holds the longest sequence; None: all of it lies on the device.
    steps: in a round, at most. seconds: how long the timed rounds of a row may take; slow steps, as dense ones over the
    bus, then run fewer to a round, but at least one. cache_format: how full pages are packed; None: they are not.
    steps_per_launch: steps that the device runs without the host."""

    shape: str
    config: ModelConfig
    tokens: tuple[int, ...]
    policies: tuple[DecodePolicy, ...]
    device_bytes: tuple[int | None, ...]
    steps: int
    rounds: int
    seconds: float = 60.0
    cache_format: str | None = None
    steps_per_launch: int = 1

    def __post_init__(self):
        for name, values in (("tokens", self.tokens), ("steps", (self.steps,)), ("rounds", (self.rounds,))):
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {values}")
        if not 1 <= self.steps_per_launch <= MAX_STEP_TOKENS or self.steps % self.steps_per_launch:
            raise ValueError(f"steps per launch must be 1 to {MAX_STEP_TOKENS} and divide {self.steps} steps, got {self.steps_per_launch}")
        for policy in self.policies if self.steps_per_launch > 1 else ():
            if getattr(policy, "dense_layers", 0):
                raise ValueError(
                    f"what the first {policy.dense_layers} layers of policy {policy} read in host memory is counted for single steps: "
                    f"launch one step, not {self.steps_per_launch}"
                )
        if max(self.tokens) + self.later > self.config.max_positions:
            raise ValueError(
                f"{max(self.tokens):,} tokens and {self.later:,} steps are more than the model's {self.config.max_positions:,} positions"
            )
        for policy in self.policies:
            if isinstance(policy, Replayed) and self.later > policy.recorded_steps and any(self.device_bytes):
                steps = -(-8 // self.steps_per_launch) * self.steps_per_launch
                rounds = (policy.recorded_steps - max(steps, self.first)) // steps - 1
                fewer = f"give fewer steps and rounds, as --steps {steps} --rounds {rounds}, or "
                raise ValueError(
                    f"{policy.file} has lists of {policy.recorded_steps} steps, and {self.later} steps would read some twice, which the "
                    f"hot buffer would then know: {fewer if rounds > 0 else ''}record more by benchmarks.lists --steps {self.later}"
                )

    @property
    def spec(self) -> CacheSpec:
        """The engine's cache."""
        return self.config.cache_spec(PAGE_SIZE, parse_cache_format(self.cache_format, self.config.compute_dtype))

    @property
    def later(self) -> int:
        """The most steps of a row, with a round that is traced at its end."""
        return max(self.steps, self.first) + self.steps * (self.rounds + 1)

    @property
    def first(self) -> int:
        """Steps before any others."""
        return LEAST * self.steps_per_launch

    def pages(self, tokens: int) -> int:
        """Pages of a sequence of so many tokens at its end."""
        return -(-(tokens + self.later) // PAGE_SIZE) + 1


def tiered_rows(plan: Tiered, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row for each size of the device, length and policy: median seconds of a step; the bytes of keys and values that
    it read; those of them that came from host memory; those that it listed there and looked up in the hot buffer, and
    those of these that were copied; the rate of a plain copy from pinned host memory, in bytes per second; and, on a
    GPU, of a round that is traced: the device's seconds of a step, pauses between kernels included, how many kernels a
    step launches, and the seconds of those that take longest. `skipped` is set if everything on the device does not fit
    there."""
    say("weights")
    model = random_model(plan.config)
    frame = plan.spec.bytes_per_frame("full")
    rate = copy_rate()
    for device_bytes in plan.device_bytes:
        lengths, beyond = list(plan.tokens), []
        if device_bytes is None:
            indexes = tuple(dict.fromkeys(spec for policy in plan.policies for spec in policy.indexes()))
            sizes = {"page_size": PAGE_SIZE, "indexes": indexes, "cache_format": plan.cache_format, "weights_bytes": 0}
            fit_in = memory_plan(plan.config, **sizes).pages_that_fit
            lengths, beyond = ([each for each in plan.tokens if (plan.pages(each) + 1 <= fit_in) is fits] for fits in (True, False))
        for tokens in beyond:
            why = f"{plan.pages(tokens) + 1:,} pages are more than the {fit_in:,} that fit on the device"
            yield from (_named(plan, tokens, policy, None, frame) | {"skipped": why} for policy in plan.policies)
        if not lengths:
            continue
        pages = plan.pages(max(lengths))
        sizes = (
            {"pages": pages + 1} if device_bytes is None else {"device_bytes": device_bytes, "host_bytes": pages * frame, "reuse": False}
        )
        say("pages")
        engine = FakeEngine(model, policies=plan.policies, batch_buckets=(1,), cache_format=plan.cache_format, **sizes)
        engine.fill_pages()
        for tokens, policy in itertools.product(lengths, plan.policies):
            say(f"{tokens:,} tokens, {policy}")
            sequence = engine.hollow_sequence(tokens)
            measured = _time_steps(engine, sequence, policy, plan)
            measured["host_pages"] = engine.host_pages
            engine.free(sequence)
            yield _named(plan, tokens, policy, device_bytes, frame) | measured | {"rate": rate}
        del engine
        gc.collect()


def _named(plan: Tiered, tokens: int, policy: DecodePolicy, device_bytes: int | None, frame: int) -> dict[str, Any]:
    """The fields of a row that say what it is. name: of the policy whose work the step does. lists: who chose what it
    reads."""
    replaced = isinstance(policy, Fresh | Replayed)
    packed = {} if plan.cache_format is None else {"cache_format": plan.cache_format}
    return packed | {
        "shape": plan.shape,
        "layers": len(plan.config.layers),
        "dtype": plan.config.compute_dtype,
        "tokens": tokens,
        "policy": str(policy),
        "name": name_of(TopBlocks(policy.k)) if replaced else name_of(policy),
        "lists": policy.lists if replaced else OWN_LISTS,
        "device_bytes": device_bytes,
        "cache_bytes": plan.pages(tokens) * frame,
    }


def _time_steps(engine: FakeEngine, sequence: CachedSequence, policy: DecodePolicy, plan: Tiered) -> dict[str, Any]:
    """Times rounds in which each step is fed the token of the one before, and counts the bytes that their steps read:
    of a launch of several, keys by its last step, and what the hot buffer was asked for by all of them."""
    rows, tokens, several = SamplingRows.of([None]), engine.put(np.zeros(1, np.int32)), plan.steps_per_launch
    launch = None if several == 1 else Launch(several, never(1), several)
    layer, first = plan.spec.layers[plan.spec.paged[0]], sequence.length
    width = layer.token_bytes(PAGE_SIZE, 1) / layer.kv_heads

    def run(steps: int) -> tuple[float, list[AttentionStats]]:
        nonlocal tokens
        reads, started = [], time.perf_counter()
        for _ in range(steps // several):
            group = DecodeGroup((sequence,), tokens, rows, policy, launch=launch)
            (decoded,) = engine.step(StepPlan((group,))).decodes
            tokens = decoded.sampled.tokens
            reads.append(decoded.reads)
        jax.block_until_ready(tokens)
        return time.perf_counter() - started, reads

    *_, (alone, _) = [run(several) for _ in range(LEAST)]
    fit_in = int(plan.seconds / plan.rounds / (alone / several)) // several * several
    steps = max(several, min(plan.steps, fit_in))
    run(max(0, steps - plan.first))  # fills the hot buffer
    before, warm = engine.pool_stats(), sequence.length - first
    rounds = [run(steps) for _ in range(plan.rounds)]
    after, reads = engine.pool_stats(), [each for _, round_reads in rounds for each in round_reads]
    asked = found = 0
    if after is not None:
        asked, found = after.asked - before.asked, after.found - before.found
    timed = steps * plan.rounds
    copied_bytes = (asked - found) * width * PAGE_SIZE / timed
    host_bytes = statistics.mean(0.0 if each.host_bytes is None else float(np.asarray(each.host_bytes).sum()) for each in reads)
    frames = [frames.counts for frames in engine.frames.values()]
    kernels = record(lambda: run(steps)) if jax.default_backend() == "gpu" else []
    return {
        "frames": list(dataclasses.astuple(frames[0])) if frames else None,
        "steps": steps,
        "steps_per_launch": several,
        "mean_length": first + warm + (timed + 1) // 2,
        "median_s": statistics.median(seconds / steps for seconds, _ in rounds),
        "samples": len(rounds),
        "read_bytes": statistics.mean(float(np.asarray(each.keys).sum()) * width for each in reads),
        "host_bytes": copied_bytes if asked and several > 1 else host_bytes,
        "asked_bytes": asked * width * PAGE_SIZE / timed,
        "copied_bytes": copied_bytes,
        "device_s": (max(each.end for each in kernels) - kernels[0].start) * 1e-9 / steps if kernels else None,
        "launches": round(len(kernels) / steps),
        "kernels_s": {name: seconds / steps for name, seconds in longest([kernels]).items()},
    }


def copy_rate() -> float:
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


def tiers_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[str, typer.Option(help="Tokens of the sequences, separated by commas.")] = "1m",
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What the cache takes on the device, as 8GB; the rest lies in host memory. Several sizes are separated by commas.",
            show_default=False,
        ),
    ] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="Time sequences with everything on the device, too, where that fits.")
    ] = False,
    policies: Annotated[str, typer.Option(help="Decode policies, separated by commas.")] = "top:32,dense",
    fresh: Annotated[int, typer.Option(help="Time top:K with lists that share nothing between steps, too; 0: not.", **whole(0))] = 0,
    recorded: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Time the lists of this file of benchmarks.lists, too.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in a round.", **whole())] = 16,
    rounds: Annotated[int, typer.Option(help="Timed rounds.", **whole())] = 8,
    seconds: Annotated[
        float, typer.Option(help="How long the rounds of a row may take; slow steps then run fewer to a round.", **number(above=0))
    ] = 60.0,
    cache_format: BenchFormatOption = None,
    steps_per_launch: Annotated[
        int, typer.Option(help="Decode steps that the device runs without the host; --steps must be a multiple.", **whole(most=16))
    ] = 1,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time decode steps of sequences whose pages lie in host memory where the device has no room for them.

    Weights and pages are random; there is no prefill. `kvjax cost fit` takes the result: it needs --resident, several
    --tokens, the policy dense, --fresh and --recorded (docs/cost-model.md).
    """
    allow_host_pages()
    from benchmarks.lists import Fresh, Replayed
    from kvjax.serving.bench.decode import policies_of

    named = [*policies_of(policies)] if policies else []
    named += [Fresh(fresh)] if fresh else []
    named += [Replayed.of(recorded)] if recorded else []
    if not named:
        raise typer.BadParameter("name at least one policy", param_hint="--policies")
    sizes = byte_counts(device_memory, "--device-memory") if device_memory else ()
    fields = {"tokens": parse_lengths(tokens, "tokens"), "policies": tuple(named), "steps": steps, "rounds": rounds, "seconds": seconds}
    fields |= {"device_bytes": (*sizes, *([None] if resident or not sizes else [])), "cache_format": cache_format}
    fields["steps_per_launch"] = steps_per_launch
    plan = plan_of(Tiered, shape, config_of_shape(shape, layers, dtype), **fields)
    run(json_out, "tiers", lambda say: tiered_rows(plan, say))


if __name__ == "__main__":
    main(tiers_command)
