"""Pages that are copied to host memory while a chunk computes, and change their frame when the next one needs room."""

import itertools

import jax
import numpy as np
import pytest
from quick_cases import rest_long
from tiny_models import TINY, TinyModel, altered, init_params

from kvjax import Engine
from kvjax.cache.frames import Frames
from kvjax.cache.outgoing import Outgoing
from kvjax.cache.pool import Pool
from kvjax.cache.spanning import FrameCounts
from kvjax.chunks import Prefiller
from kvjax.memory import memory_plan
from kvjax.models.decoder import TransformerDecoder

PAGE, CHUNK, DEVICE, HOST = 4, 16, 12, 60


@pytest.fixture(scope="module")
def model():
    config = altered(TINY, num_layers=2)
    return TinyModel(TransformerDecoder(config), init_params(config, jax.random.key(7), std=0.15))


def engine_of(model, **places) -> Engine:
    return Engine(model, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,), **places)


def tiered(model, **more) -> Engine:
    return engine_of(model, pages=DEVICE, pool_host_bytes=HOST * memory_plan(model.config, page_size=PAGE).frame_bytes, **more)


def run(engine: Engine, seed: int, count: int = 14) -> list[np.ndarray]:
    """Random calls, the same for every engine, and the logits that they return. Sequences are freed while pages of theirs are copied."""
    random, held, found = np.random.default_rng(seed), [], []
    for _ in range(count):
        kind, tokens = random.integers(4), random.integers(0, 97, random.integers(40, 120)).tolist()
        if kind == 0 and held:
            engine.free(held.pop(random.integers(len(held))))
        elif kind == 1 and held:
            sequence = held[random.integers(len(held))]
            for token in tokens[:6]:
                found.append(engine.decode([sequence], [token]))
        elif len(held) < 2:
            sequence = engine.new_sequence()
            prefiller = engine._prefiller
            for start in range(0, len(tokens), CHUNK):
                stop = len(tokens) if random.integers(4) else start + CHUNK  # the engine may be told what follows, or not
                engine.reserve([sequence], len(tokens[start : start + CHUNK]))
                chunk = prefiller.begin(sequence, tokens[start:stop], engine.prefill_policy)
                prefiller.advance(chunk)
                chunk.finish()
                if held and not random.integers(3):
                    found.append(engine.decode(held[:1], [int(random.integers(97))]))
                if not random.integers(8):
                    engine.free(sequence)
                    break
            else:
                held.append(sequence)
                found.append(engine.extend(sequence, [1]))
    return [np.asarray(each) for each in found]


def differ(model, seeds) -> bool:
    for seed in seeds:
        expected = run(engine_of(model, pages=DEVICE + HOST), seed)
        if any(not np.array_equal(*pair) for pair in zip(run(tiered(model), seed), expected, strict=True)):
            return True
    return False


def late(monkeypatch) -> None:
    """Copies begin as late as they may, those first that were asked for last."""
    monkeypatch.setattr(Outgoing, "start", lambda outgoing: None)
    honest = Outgoing._begin
    monkeypatch.setattr(Outgoing, "_begin", lambda outgoing: (outgoing._waiting.reverse(), honest(outgoing)))


def soon(monkeypatch) -> None:
    """They begin with the next program."""


@pytest.mark.bits
@pytest.mark.parametrize("begin", rest_long((late, soon), late))
def test_pages_that_are_copied_while_a_chunk_computes_change_no_bits(model, begin, monkeypatch):
    begin(monkeypatch)
    assert not differ(model, range(3))


def test_a_long_prompt_moves_no_page_before_a_chunk(model, monkeypatch):
    """All of them are copied while the chunk before computes, as many as are needed."""
    honest, moved = Frames.take_moves, []
    monkeypatch.setattr(Frames, "take_moves", lambda frames: moved.append(honest(frames)) or moved[-1])
    engine = tiered(model)
    engine.prefill([list(range(90)) + [5] * 90])
    assert sum(map(len, moved)) == 0
    assert engine.pool_stats().host_pages == engine._pool.moved == 45 - DEVICE


# What must fail: each order taken away, where copies begin as late as they may.


def _no_arrival(monkeypatch):
    """A page changes its frame before its copy is there. The copies begin some programs later, when the old frame may hold another page."""
    calls = itertools.count(1)
    monkeypatch.setattr(Outgoing, "start", lambda outgoing: None if next(calls) % 5 else outgoing.arrive())
    monkeypatch.setattr(Pool, "_arrive", lambda pool: None)


def _unwanted_copies_are_made(monkeypatch):
    """A copy that is not wanted any more is made all the same, to a frame that holds another page by then."""
    late(monkeypatch)
    monkeypatch.setattr(Outgoing, "give_up", lambda outgoing, group, target: None)


def _pages_that_are_written_are_copied(monkeypatch):
    """Pages of the chunk itself are copied, too, before it has written them."""
    monkeypatch.setattr(Outgoing, "start", Outgoing.arrive)
    honest = Prefiller._make_room
    monkeypatch.setattr(Prefiller, "_make_room", lambda prefiller, sequence, start: honest(prefiller, sequence, start + CHUNK))


MUTANTS = (_no_arrival, _unwanted_copies_are_made, _pages_that_are_written_are_copied)


@pytest.mark.parametrize("mutant", rest_long(MUTANTS, _no_arrival))
def test_an_order_taken_away_corrupts(model, mutant, monkeypatch):
    mutant(monkeypatch)
    assert differ(model, range(40))


class TestFrames:
    """The host's record of frames."""

    def test_pages_that_were_copied_ahead_make_room(self):
        frames, calls = Frames(FrameCounts(3, 0, 3)), []
        frames.arrive = lambda: calls.append(frames.frame_of.tolist())
        frames.bind([0, 1, 2])
        assert frames.lacking(2) == 2
        assert frames.copy_ahead({1, 2}, 1).tolist() == [[1, 3]]
        assert (frames.on_device, frames.on_host, frames.lacking(2)) == (3, 0, 1)
        frames.bind([3])
        assert calls == [[0, 1, 2, -1, -1, -1]], "it waits before the page moves"
        assert frames.frame_of.tolist() == [0, 3, 2, 1, -1, -1]
        assert (frames.take_moves().size, frames.moved) == (0, 1)

    @pytest.mark.parametrize("unwanted", [Frames.release, Frames.bind])
    def test_the_frame_of_an_unwanted_copy_is_free_after_it(self, unwanted):
        frames, given_up = Frames(FrameCounts(1, 0, 2)), []
        frames.give_up = given_up.append
        frames.bind([0])
        frames.copy_ahead({0}, 1)
        unwanted(frames, [0])
        assert (given_up, frames.on_host) == ([1], 0)
        frames.bind([1])
        frames.bind([2])
        assert sorted(frames.frame_of.tolist()) in ([-1, 0, 1], [0, 1, 2])

    def test_every_page_has_room(self):
        """Though frames are held by copies."""
        frames = Frames(FrameCounts(2, 0, 2))
        frames.bind([0, 1])
        assert frames.lacking(4) == 2
        assert len(frames.copy_ahead({0, 1}, 2)) == 2
        assert frames.lacking(4) == 0
        for page in (2, 3):
            frames.bind([page])
        assert sorted(frames.frame_of.tolist()) == [0, 1, 2, 3]


def test_a_failed_program_before_the_copies_is_told(model, monkeypatch):
    """And the sequence can still be freed."""
    engine = tiered(model)
    late(monkeypatch)
    (sequence,) = engine.prefill([[1] * 100])

    class Failed:
        def is_deleted(self):
            return False

        def block_until_ready(self):
            raise RuntimeError("out of memory")

    outgoing = engine._pool._outgoing
    engine._pool.copy_ahead("full", set(sequence.pages["full"]), 4)
    outgoing._after = Failed()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.prefill([[2] * 60])
    assert engine.sequences == {sequence}
    engine.free(sequence)
    assert not outgoing._waiting[0][1].size
