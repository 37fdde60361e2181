"""Pages that no sequence holds, in a pool that spans device and host memory: they make room first, and change places
with pages in use."""

import numpy as np
import pytest
from quick_cases import rest_long
from tiny_models import TINY, TinyModel, altered, random_weights

from kvjax import Engine
from kvjax.cache import PageAllocator
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.host_pool.frame_table import Frames
from kvjax.cache.pool import Pool
from kvjax.engine.memory import memory_plan
from kvjax.models.decoder import TransformerDecoder

PAGE, DEVICE = 4, 16


class Record:
    """An allocator, its frames, and what the frames would hold. Sequences are lists of pages. Copies ahead are made as
    late as they may."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        counts = FrameCounts(int(self.random.integers(3, 7)), 2, int(self.random.integers(2, 9)))
        self.frames, self.pages = Frames(counts, spare=int(self.random.integers(3))), PageAllocator(counts.device + counts.host)
        frames, pages = self.frames, self.pages
        pages.on_free, pages.on_idle, pages.on_used, frames.evict = frames.release, frames.idle, frames.used, pages.evict
        pages.on_evict = lambda page: self.kept.remove(page)
        frames.arrive, frames.arrived, frames.give_up = self.arrive, lambda: not self.coming, self.give_up
        self.memory = np.full(counts.total, -1)
        self.content: dict[int, int] = {}
        self.sequences: list[list[int]] = []
        self.kept: set[int] = set()
        self.coming: list[tuple[int, int]] = []
        self.exchanged = 0

    def arrive(self):
        self.copy(self.coming)
        self.coming = []

    def give_up(self, target):
        self.coming = [each for each in self.coming if each[1] != target]

    def copy(self, moves):
        moves = np.array(moves, int).reshape(-1, 2)
        assert not set(moves[:, 0]) & set(moves[:, 1]), "a frame is read and written in one call"
        assert len(set(moves[:, 1])) == len(moves)
        self.memory[moves[:, 1]] = self.memory[moves[:, 0]]

    def drain(self):
        self.copy(self.frames.take_moves())

    def begin(self):
        if (count := int(self.random.integers(1, 5))) <= self.pages.free:
            pages = self.pages.take(count)
            self.frames.bind(pages, wait=bool(self.random.integers(2)))
            self.drain()
            for page in pages:
                self.content[page] = self.memory[self.frames.frame_of[page]] = int(self.random.integers(1 << 30))
            self.sequences.append(pages)

    def adopt(self):
        if known := sorted(self.kept):
            pages = known[: self.random.integers(1, 4)]
            self.pages.own(pages)
            self.sequences.append(pages)

    def end(self):
        if self.sequences:
            pages = self.sequences.pop(self.random.integers(len(self.sequences)))
            for page in pages[: self.random.integers(len(pages) + 1)]:
                self.pages.keep(page)
                self.kept.add(page)
            self.pages.release(pages)

    def copy_ahead(self):
        sealed = {page for pages in self.sequences for page in pages} | self.kept
        self.coming += self.frames.copy_ahead(sealed, int(self.random.integers(1, 4))).tolist()

    def step(self):
        """As `Pool.bring_back` and `Pool.advance_copies` do."""
        if self.frames.coming and self.random.integers(2):
            self.arrive()
            self.frames.have_come_back()
        wanted = [page for pages in self.sequences for page in reversed(pages)]
        if self.frames.room:
            self.coming += self.frames.bring_back(wanted, 2).tolist()
        elif self.frames.exchangeable:
            for moves in self.frames.exchange(wanted, int(self.random.integers(1, 6))):
                self.copy(moves)
                self.exchanged += len(moves)

    def check(self):
        frames, counts = self.frames, self.frames.counts
        known = {page for pages in self.sequences for page in pages} | self.kept
        for page in known:
            assert self.memory[frames.frame_of[page]] == self.content[page]
        used = frames.frame_of[frames.frame_of >= 0].tolist() + list(frames._ahead.values()) + list(frames._back.values())
        assert sorted(used + frames._free_device + frames._free_host) == [*range(counts.device), *range(counts.border, counts.total)]
        assert set(frames._idle) == {page for page in known if not self.pages.owners(page) and frames.frame_of[page] < counts.border}


def test_random_calls_keep_every_page_and_frame():
    """Of allocator and frames together, in pools of 5 to 14 pages that are full most of the time."""
    exchanged = 0
    for seed in range(300):
        record = Record(seed)
        for _ in range(60):
            getattr(record, ("begin", "begin", "adopt", "end", "copy_ahead", "step", "step")[record.random.integers(7)])()
            record.check()
        exchanged += record.exchanged
    assert exchanged > 300


def test_pages_that_no_sequence_holds_make_room_first():
    frames = Frames(FrameCounts(3, 0, 4))
    frames.bind([0, 1, 2])
    frames.idle([2])
    assert frames.copy_ahead({0, 1, 2}, 1).tolist() == [[2, 3]]
    frames.give_up(3)
    frames._forget_copy(2)
    frames.bind([3])
    assert frames.take_moves().tolist() == [[2, 3]]
    frames.bind([4])
    assert frames.take_moves().tolist() == [[0, 4]], "then the one that has been there longest"


@pytest.fixture(scope="module")
def model():
    config = altered(TINY, num_layers=2)
    return TinyModel(TransformerDecoder(config), random_weights(config))


def engine_of(model, **places) -> Engine:
    return Engine(model, page_size=PAGE, prefill_chunk=4 * PAGE, batch_buckets=(1,), **places)


def steps(engine, prompt, count):
    """Logits of a prompt and of steps after it, and the sequence."""
    (sequence,) = engine.prefill([prompt])
    rows = [np.asarray(sequence.logits)]
    rows += [np.asarray(engine.decode([sequence], [token])[0]) for token in prompt[:count]]
    return np.stack(rows), sequence


@pytest.mark.parametrize("host", rest_long({"full": 12, "half": 40}, "full"))
def test_a_found_prompt_comes_back_to_the_device_in_place_of_idle_pages(model, host):
    """host: pages there: so few that no frame is free when it comes back, or enough."""
    first, second = np.random.default_rng(3).integers(0, TINY.vocab_size, (2, 13 * PAGE)).tolist()
    engine = engine_of(
        model, pages=DEVICE, host_bytes={"full": 12, "half": 40}[host] * memory_plan(model.config, page_size=PAGE).frame_bytes
    )
    for prompt in (first, second):
        (sequence,) = engine.prefill([prompt])
        engine.free(sequence)
    expected, _ = steps(engine_of(model, pages=60), first, 6)
    found, before = engine.stats().found_tokens, engine.pool_stats().returned_bytes
    logits, sequence = steps(engine, first, 6)
    assert engine.stats().found_tokens - found == 12 * PAGE
    assert engine.stats().host.hits > 0
    assert not engine._pool.any_on_host(sequence.pages)
    assert engine.pool_stats().returned_bytes > before
    np.testing.assert_array_equal(logits, expected)


def test_an_exchange_without_the_bytes_that_come_back_is_seen(model, monkeypatch):
    honest = Pool._move
    monkeypatch.setattr(Pool, "_move", lambda pool, group, moves: honest(pool, group, moves[moves[:, 0] < DEVICE]))
    with pytest.raises(AssertionError, match="not equal"):
        test_a_found_prompt_comes_back_to_the_device_in_place_of_idle_pages(model, "full")


def test_copies_both_ways_in_one_call_are_seen(monkeypatch):
    """Kernels copy tiles at the same time, so no frame may be read and written in a call."""
    honest = Frames.exchange
    monkeypatch.setattr(Frames, "exchange", lambda *args: [np.concatenate(moves)] if (moves := honest(*args)) else [])
    with pytest.raises(AssertionError, match="read and written in one call"):
        test_random_calls_keep_every_page_and_frame()
