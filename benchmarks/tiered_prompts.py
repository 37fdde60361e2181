"""Whole prompts of which the device has room for a part, beside the same prompts with everything on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import Annotated, Any

import jax
import typer

from benchmarks.copies import copy_sizes, traced_copy_rates
from benchmarks.hollow import FakeEngine, random_model, random_prompt
from benchmarks.run import BenchChunkOption, BenchFormatOption, LayersOption, ShapeOption, config_of_shape, main, plan_of, run
from benchmarks.tiers import copy_rate
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.host_pool.prefill_prefetch import sizes_alone
from kvjax.compilation import compile_together
from kvjax.engine.memory import memory_plan
from kvjax.engine.sequence import CachedSequence
from kvjax.model.config import ModelConfig
from kvjax.policies.prefill import PrefillPolicy, indexes_of, name_of
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.bench.prefill import longest
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, byte_counts, parse_lengths
from kvjax.serving.xla_flags import allow_host_pages
from pallas_kernels.bench.timing import record

MOST = 0.93
"""Share of the free memory that pages of a prompt may take where all of it lies on the device. The rest is for its
chunks."""

ROOM = 115
"""Percent of the longest prompt's pages for which there is host memory: windows of pages end at few places, beyond the
pages needed."""


@dataclasses.dataclass(frozen=True)
class TieredPrompts:
    """What to time: a prompt of each number of tokens by each policy, `chunk` tokens at a time. device_bytes: what the
    cache may take on the device, indexes included, in an engine whose host memory holds the longest prompt; None: all
    of it lies on the device. cache_format: how full pages are packed; None: they are not."""

    shape: str
    config: ModelConfig
    tokens: tuple[int, ...]
    policies: tuple[PrefillPolicy, ...]
    device_bytes: tuple[int | None, ...]
    chunk: int
    cache_format: str | None = None

    def __post_init__(self):
        if min(self.tokens) < 1 or max(self.tokens) > self.config.max_positions:
            raise ValueError(f"tokens must be from 1 to the model's {self.config.max_positions:,} positions, got {self.tokens}")
        if self.chunk % PAGE_SIZE:
            raise ValueError(f"chunk {self.chunk} must be a multiple of the page size {PAGE_SIZE}")


def tiered_prompt_rows(plan: TieredPrompts, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row for each size of the device, length and policy: seconds of the prompt, and of its chunks, and on a GPU of
    the kernels of the last two, with the rates of their copies (`traced_copy_rates`) and these by size (`copy_sizes`);
    bytes that its chunks copied from host memory; bytes that moved there; the rate of a plain copy from there; and the
    most bytes of device memory that the process has taken so far, and after what this rose (`Peaks`), weights left out
    and pages included. `skipped` is set if everything on the device does not fit there."""
    say("weights")
    model, peaks = random_model(plan.config), Peaks()
    peaks.look("weights")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    packed = parse_cache_format(plan.cache_format, plan.config.compute_dtype)
    frame, rate = plan.config.cache_spec(PAGE_SIZE, packed).bytes_per_frame("full"), copy_rate()
    for device_bytes in plan.device_bytes:
        for policy in plan.policies:
            pages = -(-max(plan.tokens) // PAGE_SIZE) + 1
            in_host = ROOM * pages * frame // 100
            sizes = {"pages": pages} if device_bytes is None else {"device_bytes": device_bytes, "host_bytes": in_host, "reuse": False}
            if device_bytes is None:
                free = {"available_bytes": int(MOST * (stats["bytes_limit"] - stats["bytes_in_use"]))} if (stats := memory_stats()) else {}
                spec = {"page_size": PAGE_SIZE, "indexes": indexes_of(policy), "prefill_chunk": plan.chunk, "cache_format": packed}
                fit_in = memory_plan(plan.config, weights_bytes=0, **spec, **free).pages_that_fit
                if pages > fit_in:
                    why = f"{pages:,} pages are more than the {fit_in:,} that fit on the device"
                    yield from (_named(plan, tokens, policy, None) | {"skipped": why} for tokens in plan.tokens)
                    continue
            say("pages")
            engine = FakeEngine(model, "dense", prefill=policy, prefill_chunk=plan.chunk, hollow=0, cache_format=plan.cache_format, **sizes)
            peaks.look("pages")
            # Pages of an array that spans memories are not JAX's; indexes are.
            spanned = sum(each.counts.border for each in engine.frames.values()) * frame
            for tokens in plan.tokens:
                _compile(engine, tokens, say)
                peaks.look("programs")
                say(f"{tokens:,} tokens, {policy}")
                measured = _time_prompt(engine, tokens)
                peaks.look("the prompt")
                measured |= peaks.measured((0 if device_bytes is None else spanned) - weights)
                yield _named(plan, tokens, policy, device_bytes) | measured | {"rate": rate}
            del engine
            gc.collect()


class Peaks:
    """The most bytes that JAX has taken on the device, and when they rose."""

    def __init__(self):
        self._seen: list[tuple[str, int]] = []

    def look(self, what: str) -> None:
        """Note the peak after `what`, if it rose."""
        taken = memory_stats().get("peak_bytes_in_use")
        if taken is not None and (not self._seen or taken > self._seen[-1][1]):
            self._seen.append((what, taken))

    def measured(self, more: int) -> dict[str, Any]:
        """For a row: the peak, and those before it, all with `more` bytes; None where the device does not tell."""
        peaks = [(what, taken + more) for what, taken in self._seen]
        return {"peak_bytes": peaks[-1][1] if peaks else None, "peaks": peaks}


def memory_stats() -> dict[str, int]:
    """What the device says of its memory; empty where it says nothing."""
    return jax.local_devices()[0].memory_stats() or {}


def _named(plan: TieredPrompts, tokens: int, policy: PrefillPolicy, device_bytes: int | None) -> dict[str, Any]:
    named = {"op": "tiered-prefill", "shape": plan.shape, "layers": len(plan.config.layers), "dtype": plan.config.compute_dtype}
    named |= {} if plan.cache_format is None else {"cache_format": plan.cache_format}
    return named | {"tokens": tokens, "policy": name_of(policy), "device_bytes": device_bytes, "chunk": plan.chunk}


def _compile(engine: FakeEngine, tokens: int, say: Callable[[str], None]) -> None:
    """Run one chunk of every program that the prompt needs, after a beginning that is not computed, and a prompt whose
    pages move."""
    room = sum(frames.counts.device for frames in engine.frames.values()) * PAGE_SIZE
    if room:
        engine.free(*engine.prefill([random_prompt(engine.config, min(tokens, room + 2 * engine.prefill_chunk), seed=0)]))
    found: dict[Any, tuple[int, int]] = {}
    for start in range(0, tokens, engine.prefill_chunk):
        count = min(engine.prefill_chunk, tokens - start)
        pages = engine.pages_for(start + count)
        policy = engine._policy_set.choose_prefill(engine.prefill_policy, start)
        written = engine.prefill_chunk // PAGE_SIZE
        staged = [sizes_alone(pages, frames.counts, written) for frames in engine.frames.values()]
        needs = policy, count < engine.prefill_chunk or start + count == tokens, tuple(staged)
        found.setdefault(needs, (start, count))

    @contextlib.contextmanager
    def chunk(start: int, count: int) -> Iterator[tuple[CachedSequence, list[int]]]:
        sequence = engine.hollow_sequence(start)
        engine.reserve([sequence], tokens - start)  # a prompt has all of its pages from its first chunk on, and tables are that wide
        try:
            yield sequence, random_prompt(engine.config, count, seed=0)
        finally:
            engine.free(sequence)

    def calls() -> Generator[functools.partial]:
        for start, count in found.values():
            say(f"programs of {start + count:,} tokens")
            with chunk(start, count) as given:
                yield from engine.calls_of_chunk(*given)

    compile_together(calls(), lambda: None)
    for start, count in found.values():
        say(f"a chunk of {start + count:,} tokens")
        with chunk(start, count) as given:
            jax.block_until_ready(engine.extend(*given))


def _time_prompt(engine: FakeEngine, tokens: int) -> dict[str, Any]:
    before, prompt = engine.pool_stats(), random_prompt(engine.config, tokens, seed=1)
    clock = [time.perf_counter()]

    def after_chunk(count: int) -> None:
        clock.append(time.perf_counter())

    (sequence,) = engine.prefill([prompt], on_tokens=after_chunk)
    jax.block_until_ready(sequence.logits)
    seconds = time.perf_counter() - clock[0]
    after = engine.pool_stats()
    engine.free(sequence)
    kernels, rates, sizes = None, {}, []
    if jax.default_backend() == "gpu":
        # Two chunks: while the first computes, pages leave the device for the second.
        last = engine.hollow_sequence(max(0, (tokens - 1) // engine.prefill_chunk - 1) * engine.prefill_chunk)
        ran = record(lambda: jax.block_until_ready(engine.extend(last, prompt[last.length :])))
        kernels, rates, sizes = longest([ran]), traced_copy_rates(ran), copy_sizes(ran)
        engine.free(last)
    chunks = [end - start for start, end in itertools.pairwise(clock)]
    return {
        "seconds": seconds,
        "chunks_s": chunks,
        "median_chunk_s": statistics.median(chunks),
        "staged_bytes": 0 if after is None else after.copied_bytes - before.copied_bytes,
        "moved_bytes": 0 if after is None else after.moved_bytes - before.moved_bytes,
        "last_chunks_kernels_s": kernels,
        "copy_rates": rates,
        "copy_sizes": sizes,
    }


def tiered_prefill_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "1m",
    device_memory: Annotated[
        str,
        typer.Option(help="What the cache takes on the device, as 4GB or 2GB,8GB; the rest lies in host memory. Empty: only --resident."),
    ] = "4GB",
    resident: Annotated[bool, typer.Option("--resident", help="Time prompts with everything on the device, too, where that fits.")] = False,
    policies: Annotated[str, typer.Option(help="Prefill policies, separated by commas.")] = "momo:128/8,bounds:32",
    chunk: BenchChunkOption = 32_768,
    cache_format: BenchFormatOption = None,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time whole prompts of which the device has room for a part, in the engine.

    Weights and tokens are random. Earlier pages are copied from host memory once for each layer and chunk, so large
    chunks copy less.
    """
    allow_host_pages()
    from kvjax.serving.bench.prefill import policies_of

    fields = {"tokens": parse_lengths(tokens, "tokens"), "policies": policies_of(policies), "chunk": chunk}
    sizes = byte_counts(device_memory, "--device-memory") if device_memory else ()
    fields |= {"device_bytes": (*sizes, *([None] if resident or not sizes else [])), "cache_format": cache_format}
    plan = plan_of(TieredPrompts, shape, config_of_shape(shape, layers, dtype), **fields)
    run(json_out, "tiered-prefill", lambda say: tiered_prompt_rows(plan, say))


if __name__ == "__main__":
    main(tiered_prefill_command)
