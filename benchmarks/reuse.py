"""The first token of a prompt whose beginning is known, from each store, beside the same prompt computed.

The prompts have random tokens. Each timed prompt ends in tokens of its own. A floor is given for each store: its bytes
at the rate at which whole copies of the same size, or plain reads of the same files, ran in the same process. Before a
read of the disk the system's copy of the files in memory is dropped.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benchmarks.hollow import random_model, random_prompt
from benchmarks.run import BenchChunkOption, LayersOption, ShapeOption, config_of_shape, main, plan_of, run
from kvjax.cache.stores.blocks import block_bytes
from kvjax.cache.stores.disk import READERS
from kvjax.cache.stores.host import KIND
from kvjax.engine.engine import Engine
from kvjax.model.config import ModelConfig
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, token_count, whole

PIECE = 1 << 26
"""Bytes of a plain copy or read."""
STORES = ("none", "device", "host", "disk")
"""Where pages of earlier prompts may be kept; "none": nowhere."""


@dataclasses.dataclass(frozen=True)
class Reused:
    """What to time. tokens: of the shared beginning, a multiple of the page size. own: tokens of each prompt after it.
    folder: on the disk that is timed; None: a temporary one. stores: some of STORES."""

    shape: str
    config: ModelConfig
    tokens: int
    own: int
    chunk: int
    rounds: int
    folder: Path | None
    stores: tuple[str, ...]

    def __post_init__(self):
        if unknown := set(self.stores) - set(STORES):
            raise ValueError(f"stores are {', '.join(STORES)}, not {', '.join(sorted(unknown))}")
        if self.tokens % PAGE_SIZE:
            raise ValueError(f"the beginning must be whole pages of {PAGE_SIZE} tokens, got {self.tokens:,} tokens")
        if self.tokens + self.own > self.config.max_positions:
            raise ValueError(f"{self.tokens:,} and {self.own:,} tokens are more than the model's {self.config.max_positions:,} positions")


def reuse_rows(plan: Reused, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """For each store a row for the prompt computed, while its pages are copied there, and one for the prompt found
    there. "none": no store.

    Seconds are medians. waited_s: until the pages were on the host's side. bytes: of the pages found. floor_s: those at
    the plain rate.
    """
    say("weights")
    model = random_model(plan.config)
    pages, spec = (plan.tokens + plan.own) // PAGE_SIZE + 1, plan.config.cache_spec(PAGE_SIZE)
    size = sum(block_bytes(spec, group.name) for group in spec.groups)
    shared, other = (random_prompt(plan.config, plan.tokens, seed) for seed in (0, 1))
    named = {"shape": plan.shape, "layers": len(plan.config.layers), "tokens": plan.tokens, "own": plan.own, "chunk": plan.chunk}
    with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
        stores = {"none": {}, "device": {"reuse": True}, "host": {"host_bytes": 2 * pages * size}}
        stores["disk"] = {"disk": Path(folder) / "pages", "disk_bytes": 2 * pages * size}
        for name, options in ((name, stores[name]) for name in plan.stores):
            say(f"{name}: computed")
            engine = Engine(model, pages=pages + 1, prefill_chunk=plan.chunk, batch_buckets=(1,), **options)
            _first_token(engine, other, plan)  # compiles
            yield named | {"store": name, "op": "computed", "median_s": _first_token(engine, shared, plan), "samples": 1}
            if name != "none":
                say(f"{name}: found")
                _found(engine, name, shared, plan, Path(folder) / "pages")  # compiles
                found = [_found(engine, name, shared, plan, Path(folder) / "pages") for _ in range(plan.rounds)]
                seconds, waited = (statistics.median(each) for each in zip(*found, strict=True))
                moved = plan.tokens // PAGE_SIZE * size
                rates = {"device": lambda: 0.0, "host": lambda: _copy_rate(size), "disk": lambda: _read_rate(Path(folder) / "pages")}
                times = {"median_s": seconds, "waited_s": waited, "samples": len(found), "bytes": moved, "rate": rates[name]()}
                yield named | {"store": name, "op": "found"} | times
            engine.close()
            del engine
            gc.collect()  # an engine and its stores name each other


def _first_token(engine: Engine, shared: list[int], plan: Reused) -> float:
    """Seconds from the prompt to its first token on the host. The prompt's pages are no sequence's afterwards."""
    prompt = shared + random_prompt(plan.config, plan.own, time.monotonic_ns() % 2**32)
    started = time.perf_counter()
    (sequence,) = engine.prefill([prompt])
    int(sequence.logits.argmax())
    seconds = time.perf_counter() - started
    engine.free(sequence)
    return seconds


def _found(engine: Engine, store: str, shared: list[int], plan: Reused, folder: Path) -> tuple[float, float]:
    """Seconds of the prompt, and those of them that it waited for its pages. The device does not have them, unless it
    is the store."""
    if store != "device":
        held, frames = engine.new_sequence(), engine._pool.frames.get("full")
        there = engine.allocators["full"].total if frames is None else frames.counts.device
        engine.reserve([held], there * PAGE_SIZE)  # everything else has to go
        engine._pool.bind(held.pages)
        engine.free(held)
    if store == "disk":
        for file in folder.glob("*.bin"):
            _forget(file)
    before = engine.stats()
    seconds = _first_token(engine, shared, plan)
    after = engine.stats()
    if (found := after.found_tokens - before.found_tokens) != plan.tokens:
        raise RuntimeError(f"{found:,} tokens were found, not {plan.tokens:,}")
    return seconds, after.wait_s - before.wait_s


def _forget(file: Path) -> None:
    """Have the system drop its copy of a file in memory."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_rate(size: int) -> float:
    """Bytes per second of plain copies of blocks from pinned host memory to the device."""
    device = jax.local_devices()[0]
    pinned, here = jax.sharding.SingleDeviceSharding(device, memory_kind=KIND), jax.sharding.SingleDeviceSharding(device)
    blocks = jax.block_until_ready(jax.device_put([np.zeros(size, np.uint8)] * 64, pinned))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(blocks, here))
        seconds.append(time.perf_counter() - started)
    return 64 * size / statistics.median(seconds)


def _read_rate(folder: Path) -> float:
    """Bytes per second of plain reads of the store's files, as many at a time as the store reads."""
    (file,) = folder.glob("*.bin")
    _forget(file)
    count = min(64, file.stat().st_size // PIECE)
    with open(file, "rb") as opened, ThreadPoolExecutor(READERS) as pool:
        started = time.perf_counter()
        read = sum(map(len, pool.map(lambda place: os.pread(opened.fileno(), PIECE, place * PIECE), range(count))))
        return read / (time.perf_counter() - started)


def reuse_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[int, typer.Option(help="Tokens that prompts share, whole pages.", **token_count(128))] = 2**17 - 2**10,
    own: Annotated[int, typer.Option(help="Tokens of each prompt after it.", **token_count())] = 64,
    rounds: Annotated[int, typer.Option(help="Timed prompts for each store.", **whole())] = 3,
    folder: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder on the disk to time. [default: the temporary one]")
    ] = None,
    stores: Annotated[str, typer.Option(help="Where its pages are kept, separated by commas; none: nowhere.")] = "none,device,host,disk",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the first token of a prompt whose beginning is known: on the device, in host memory, on disk; and the same
    prompt computed.

    Weights and prompts are random.
    """
    sizes = {"tokens": tokens, "own": own, "chunk": chunk, "rounds": rounds, "folder": folder, "stores": tuple(stores.split(","))}
    plan = plan_of(Reused, shape, config_of_shape(shape, layers, dtype), **sizes)
    run(json_out, "reuse", lambda say: reuse_rows(plan, say))


if __name__ == "__main__":
    main(reuse_command)
