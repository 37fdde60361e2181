"""Random requests on an engine whose stores are all full and give pages up, for as long as you like: answers, memory
and files.

`make test` runs twelve rounds. `pytest -m long tests/kvjax/cache/test_soak.py` runs it for `--soak-minutes`, 30 by
default.
"""

import dataclasses
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import make_family

from kvjax import Engine, Request, Sampling, Scheduler
from kvjax.cache import OutOfPages
from kvjax.cache.stores.blocks import block_bytes

pytestmark = pytest.mark.bits

PAGES, LONGEST = 22, 10
"""Of the pool, and of the longest text, in pages."""
ROUND = 6
"""Requests that run together."""
GROWTH = 0.02
"""The most by which resident memory may grow."""
LATE = 12
"""Most rounds after the first quarter in which a program is compiled. Memory that programs take again and again is a
leak, too."""
COMPILED = "/jax/core/compile/backend_compile_duration"


def resident_bytes() -> int:
    """Memory of this process, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass
class Seen:
    """What a soak did. wrong: what differs, for each answer that does. memory: resident bytes after each round, without
    what rounds took in which a program was compiled; compiled: what these took; with_programs: their numbers. files:
    bytes on disk, and the most that they may have.

    A rare mixture of requests needs a program of its own, and may come late. Its code stays, as that of all programs,
    and is tens of MB.
    """

    requests: int = 0
    tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    pins: int = 0
    cancelled: int = 0
    memory: list[int] = dataclasses.field(default_factory=list)
    compiled: int = 0
    with_programs: list[int] = dataclasses.field(default_factory=list)
    files: int = 0
    limit: int = 0

    @property
    def growth(self) -> float:
        """From the second quarter of the time to the last one, by medians. In the first quarter stores fill."""
        quarter = max(len(self.memory) // 4, 1)
        before, after = (np.median(part) for part in (self.memory[quarter : 2 * quarter], self.memory[-quarter:]))
        return after / before - 1


class Soak:
    """An engine with stores, and one without, which answers each request alone."""

    def __init__(self, model, folder, seed: int, page_size: int):
        spec = model.config.cache_spec(page_size)
        sizes = {"pages": PAGES, "page_size": page_size, "prefill_chunk": page_size, "batch_buckets": (2,), "policies": ("quest:1",)}
        page = sum(block_bytes(spec, group.name) for group in spec.groups)
        self.folder, self.random, self.seen = folder, np.random.default_rng(seed), Seen(limit=9 * page)
        self.engine = Engine(model, host_bytes=16 * page, disk=folder, disk_bytes=9 * page, **sizes)
        self.alone = Engine(model, **sizes)
        self.page_size, self.longest = page_size, LONGEST * page_size
        self.texts = self.random.integers(0, model.config.vocab_size, (4, self.longest)).tolist()
        self.vocabulary, self.pinned = model.config.vocab_size, []
        self.resident, self.programs, self.known_programs = resident_bytes(), 0, 0
        jax.monitoring.register_event_duration_secs_listener(self.count_program)

    def count_program(self, event: str, *_, **__) -> None:
        self.programs += event == COMPILED

    def draw(self) -> Request:
        """A prompt that begins like one of a few texts."""
        random = self.random
        prompt = self.texts[random.integers(len(self.texts))][: random.integers(self.page_size + 4, self.longest - self.page_size - 4)]
        if random.integers(2):
            prompt = prompt + random.integers(0, self.vocabulary, 5).tolist()
        sampling = Sampling(int(random.integers(1, 9)), float(random.integers(2)), seed=int(random.integers(100)), logprobs=True)
        policy, salt = (None, "quest:1")[random.integers(2)], (None, None, None, "a")[random.integers(4)]
        return Request(tuple(prompt), sampling, policy=policy, cache_salt=salt, priority=int(random.integers(2)))

    def round(self) -> None:
        scheduler = Scheduler(self.engine, slots=2)
        handles = [scheduler.submit(self.draw()) for _ in range(ROUND)]
        dropped = handles[self.random.integers(ROUND)] if self.random.integers(3) == 0 else None
        while any(handle.completion is None for handle in handles):
            scheduler.step()
            if dropped is not None and dropped.completion is None and self.random.integers(4) == 0:
                scheduler.cancel(dropped)
                self.seen.cancelled += 1
        for handle in handles:
            if handle is not dropped:
                self.compare(handle)
        self.turn_pins(handles[0].request)
        self.note_memory()
        self.seen.files = sum(file.stat().st_size for file in self.folder.glob("*.bin"))

    def note_memory(self) -> None:
        before, self.resident = self.resident, resident_bytes()
        if self.programs > self.known_programs:
            self.seen.compiled += self.resident - before
            self.seen.with_programs.append(len(self.seen.memory))
            self.known_programs = self.programs
        self.seen.memory.append(self.resident - self.seen.compiled)

    def compare(self, handle) -> None:
        scheduler = Scheduler(self.alone, slots=1)
        expected = scheduler.submit(handle.request)
        while expected.completion is None:
            scheduler.step()
        found, right = handle.completion, expected.completion
        assert right.error is None
        self.seen.requests += 1
        self.seen.tokens += found.prompt_tokens + len(found.token_ids)
        if (found.token_ids, found.logprobs, found.error) != (right.token_ids, right.logprobs, None):
            both = zip(found.logprobs or (), right.logprobs, strict=False)
            first = next((place for place, (one, other) in enumerate(both) if one != other), None)
            alike = found.token_ids == right.token_ids
            self.seen.wrong.append(
                f"request {self.seen.requests}: {found.found_tokens} of {found.prompt_tokens} tokens found, error {found.error!r:.200}, "
                f"{'equal' if alike else 'other'} tokens; from token {first} on: {found.logprobs} for {right.logprobs}"
            )

    def turn_pins(self, request: Request) -> None:
        """Pin the beginning of a prompt, for some rounds."""
        while self.pinned and self.random.integers(2):
            self.engine.unpin(*self.pinned.pop(0))
        size = 4 * self.page_size
        asked = list(request.prompt[:size]), request.cache_salt
        if not self.pinned and len(asked[0]) == size:
            try:
                self.engine.pin(*asked)
            except (ValueError, OutOfPages):  # it was given up meanwhile
                return
            self.pinned.append(asked)
            self.seen.pins += 1


def soak(model, folder, seconds: float, seed: int = 0, page_size: int = 16) -> tuple[Seen, object]:
    """Rounds until the time is over."""
    running, ends = Soak(model, folder, seed, page_size), time.monotonic() + seconds
    while time.monotonic() < ends or len(running.seen.memory) < 12:
        running.round()
    while running.pinned:
        running.engine.unpin(*running.pinned.pop())
    assert running.engine.allocators["full"].free == running.engine.allocators["full"].total
    stats = running.engine.stats()
    running.engine.close()
    jax.monitoring.clear_event_listeners()
    return running.seen, stats


def check(seen: Seen, stats) -> None:
    assert not seen.wrong, "\n".join(seen.wrong[:5])
    assert seen.requests > 20
    assert seen.pins > 0
    assert 0 < seen.files <= seen.limit
    assert stats.damaged == 0
    assert stats.found_tokens > 0
    for store in (stats.device, stats.host, stats.disk):
        assert store.evictions > 0
        assert store.hits > 0


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the memory of the process from Linux")


@needs_proc
def test_a_short_soak(tmp_path):
    check(*soak(make_family("llama"), tmp_path / "pages", 0))


@needs_proc
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
def test_a_long_soak(name, tmp_path, request, capsys):
    minutes = request.config.getoption("--soak-minutes") / 3
    soak_and_print(name, minutes, capsys, make_family(name), tmp_path / "pages")


@needs_proc
@pytest.mark.gpu
@pytest.mark.timeout(0)
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_a_long_soak_on_a_gpu(name, tmp_path, request, capsys):
    minutes = request.config.getoption("--soak-minutes")
    model = make_family(name, head_dim=128, dtype="bfloat16")
    soak_and_print(name, minutes, capsys, model, tmp_path / "pages", page_size=128)


def soak_and_print(name, minutes, capsys, model, folder, **sizes):
    """A soak that must end well."""
    seen, stats = soak(model, folder, 60 * minutes, seed=os.getpid(), **sizes)
    with capsys.disabled():
        print(f"\n{name}, {minutes:.1f} min, seed {os.getpid()}: {len(seen.wrong)} of {seen.requests:,} requests differ")
        print(f"{seen.tokens:,} tokens, {seen.pins:,} pins, {seen.cancelled:,} cancelled")
        print(f"memory {seen.memory[-1] / 1e6:,.0f} MB, {seen.growth:+.2%}; rounds with programs: {seen.compiled / 1e6:,.0f} MB")
        print(f"files {seen.files:,} of {seen.limit:,} bytes\n{stats}")
    check(seen, stats)
    assert abs(seen.growth) < GROWTH
    assert sum(number > len(seen.memory) // 4 for number in seen.with_programs) <= LATE
