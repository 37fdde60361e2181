"""Pages that are copied beside the device's programs: to host memory while a chunk computes, back to the device when
there is room."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from quick_cases import rest_long
from tiny_models import TINY, TinyModel, altered, make_family, random_weights

import kvjax.cache.pool
from kvjax import Engine
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.host_pool.async_copies import AsyncCopies
from kvjax.cache.host_pool.frame_table import Frames
from kvjax.cache.pool import MANY, Pool
from kvjax.cache.stores.blocks import PIECE, read_blocks
from kvjax.engine.memory import memory_plan
from kvjax.engine.prefill_runner import Prefiller
from kvjax.models.decoder import TransformerDecoder

PAGE, CHUNK, DEVICE, HOST = 4, 16, 16, 120


@pytest.fixture(scope="module")
def model():
    config = altered(TINY, num_layers=2)
    return TinyModel(TransformerDecoder(config), random_weights(config))


def engine_of(model, scale: int = 1, **places) -> Engine:
    """scale: of pages, and of everything that is counted in tokens."""
    return Engine(model, page_size=scale * PAGE, prefill_chunk=scale * CHUNK, batch_buckets=(1,), **places)


def tiered(model, scale: int = 1) -> Engine:
    frame = memory_plan(model.config, page_size=scale * PAGE).frame_bytes
    return engine_of(model, scale, pages=DEVICE, host_bytes=HOST * frame, reuse=False)


def run(engine: Engine, seed: int, count: int = 24) -> list[np.ndarray]:
    """Random calls, the same for every engine, and the logits that they return. Sequences are freed while pages of
    theirs are copied."""
    chunk = engine.prefill_chunk
    random, held, found = np.random.default_rng(seed), [], []
    for _ in range(count):
        kind, tokens = random.integers(6), random.integers(0, 97, random.integers(5 * chunk // 2, 15 * chunk // 2)).tolist()
        if kind == 0 and held:
            engine.free(held.pop(random.integers(len(held))))
        elif kind < 4 and held:
            sequence = held[random.integers(len(held))]
            for token in tokens[:10]:
                found.append(engine.decode([sequence], [token]))
        elif len(held) < 2:
            sequence = engine.new_sequence()
            prefiller = engine._prefiller
            for start in range(0, len(tokens), chunk):
                stop = len(tokens) if random.integers(4) else start + chunk  # the engine may be told what follows, or not
                engine.reserve([sequence], len(tokens[start : start + chunk]))
                begun = prefiller.begin(sequence, tokens[start:stop], engine.prefill_policy)
                prefiller.advance(begun)
                begun.finish()
                if held and not random.integers(3):
                    found.append(engine.decode(held[:1], [int(random.integers(97))]))
                if not random.integers(8):
                    engine.free(sequence)
                    break
            else:
                held.append(sequence)
                found.append(engine.extend(sequence, [1]))
    return [np.asarray(each) for each in found]


def differ(model, seeds, totals: Counter | None = None, scale: int = 1) -> bool:
    totals = Counter() if totals is None else totals
    for seed in seeds:
        expected, engine = run(engine_of(model, scale, pages=DEVICE + HOST), seed), tiered(model, scale)
        if any(not np.array_equal(*pair) for pair in zip(run(engine, seed), expected, strict=True)):
            return True
        totals.update(moved=engine._pool.frames["full"].moved, returned=engine._pool.frames["full"].returned)
    return False


def late(monkeypatch) -> None:
    """Copies begin some programs later, or when somebody waits for them, and those first that were asked for last."""
    honest, start, calls = AsyncCopies._begin, AsyncCopies.start, itertools.count(1)
    monkeypatch.setattr(AsyncCopies, "start", lambda moving: None if next(calls) % 4 else start(moving))
    monkeypatch.setattr(AsyncCopies, "_begin", lambda moving: (moving._waiting.reverse(), honest(moving)))


def soon(monkeypatch) -> None:
    """They begin with the next program."""


@pytest.mark.bits
@pytest.mark.parametrize("begin", rest_long((late, soon), late))
def test_pages_that_are_copied_while_a_chunk_computes_change_no_bits(model, begin, monkeypatch):
    begin(monkeypatch)
    totals = Counter()
    assert not differ(model, range(3), totals)
    assert min(totals["moved"], totals["returned"]) > 10


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("many", [1, MANY])
def test_pages_that_are_copied_in_a_stream_of_their_own_change_no_bits(many, monkeypatch):
    monkeypatch.setattr(kvjax.cache.pool, "MANY", many)
    totals = Counter()
    assert not differ(make_family("llama", head_dim=128, dtype="bfloat16"), range(10), totals, scale=32)
    print(f"\n{dict(totals)}, 0 differences")
    assert min(totals["moved"], totals["returned"]) > 10


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of what is called when many pages have to move, of which one is many here."""
    monkeypatch.setattr(kvjax.cache.pool, "MANY", 1)
    called = []
    for owner, name in ((AsyncCopies, "wait"), (Frames, "take_moves"), (Pool, "_copy"), (Pool, "_finish_copies"), (Pool, "run")):
        honest = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, honest=honest, name=name, **kwargs: (called.append(name), honest(*args, **kwargs))[1]
        )
    return called


def moving_many(model):
    """An engine, and a prompt whose pages find no room on the device before others move, all of them at once."""
    engine = tiered(model)
    (held,) = engine.prefill([[1] * (DEVICE * PAGE)])
    engine._pool.bind(engine._page_manager.written(held, 0, 1))  # nothing is copied ahead
    return engine, held


def test_many_pages_move_by_plain_copies_that_are_waited_for(model, calls):
    """After all programs, and before the next one."""
    engine, held = moving_many(model)
    calls.clear()
    (sequence,) = engine.prefill([[2] * CHUNK])
    assert calls[:4] == ["wait", "take_moves", "_copy", "run"], "on a CPU a program copies"
    assert calls[4] == "_finish_copies"
    assert engine._pool.frames["full"].moved == CHUNK // PAGE
    alone = engine_of(model, pages=60)
    np.testing.assert_array_equal(sequence.logits, alone.prefill([[2] * CHUNK])[0].logits)
    (other,) = alone.prefill([[1] * (DEVICE * PAGE)])
    np.testing.assert_array_equal(engine.decode([held], [5]), alone.decode([other], [5]))


def test_an_interrupt_while_programs_are_waited_for_loses_no_page(model, calls, monkeypatch):
    engine, held = moving_many(model)

    def interrupted(moving):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AsyncCopies, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill([[2] * CHUNK])
    (other,) = (alone := engine_of(model, pages=60)).prefill([[1] * (DEVICE * PAGE)])
    np.testing.assert_array_equal(engine.decode([held], [5]), alone.decode([other], [5]))
    assert engine.sequences == {held}


def test_a_long_prompt_moves_no_page_before_a_chunk(model, monkeypatch):
    """All of them are copied while the chunk before computes, as many as are needed."""
    honest, moved = Frames.take_moves, []
    monkeypatch.setattr(Frames, "take_moves", lambda frames: moved.append(honest(frames)) or moved[-1])
    engine = tiered(model)
    engine.prefill([list(range(90)) + [5] * 90])
    assert sum(map(len, moved)) == 0
    assert engine.pool_stats().host_pages == engine._pool.moved == 45 - DEVICE


def test_pages_come_back_when_others_end(model):
    """The newest ones, until a chunk's pages have room left. Pages that come back leave again when a prompt needs the
    room."""
    engine = tiered(model)
    (one,), (other,) = engine.prefill([[1] * 100]), engine.prefill([[2] * 100])
    frames = engine._pool.frames["full"]
    engine.free(other)
    before = frames.on_device
    assert (before, frames.on_host) == (8, 17), "a prompt's own pages make room for it"
    for _ in range(3):
        engine.decode([one], [1])
        jax.block_until_ready(engine._pool.layers)
    # As many as leave a chunk's frames free, and then the page of the first step.
    assert (frames.on_device, frames.returned, frames.room) == (DEVICE - CHUNK // PAGE + 1, DEVICE - CHUNK // PAGE - before, 0)
    there = [page for page in one.pages["full"] if frames.frame_of[page] < frames.counts.border]
    assert there == one.pages["full"][-len(there) :]
    stats = engine.pool_stats()
    assert stats.returned_bytes == frames.returned * memory_plan(model.config, page_size=PAGE).frame_bytes
    assert "MB came back" in str(stats)
    engine.prefill([[2] * 100])
    assert frames.on_device == DEVICE


# What must fail: each order taken away, where copies begin as late as they may.


def _no_arrival(monkeypatch):
    """A page changes its frame before its copy is there. The copies begin some programs later, when the old frame may
    hold another page."""
    calls = itertools.count(1)
    monkeypatch.setattr(AsyncCopies, "start", lambda moving: None if next(calls) % 5 else moving.arrive())
    monkeypatch.setattr(Pool, "_expect", lambda pool, wait: None)


def _unwanted_copies_are_made(monkeypatch):
    """A copy that is not wanted any more is made all the same, to a frame that holds another page by then."""
    late(monkeypatch)
    monkeypatch.setattr(AsyncCopies, "give_up", lambda moving, group, target: None)


def _pages_that_are_written_are_copied(monkeypatch):
    """Pages of the chunk itself are copied, too, before it has written them."""
    monkeypatch.setattr(AsyncCopies, "start", AsyncCopies.arrive)
    honest = Prefiller._make_room
    monkeypatch.setattr(Prefiller, "_make_room", lambda prefiller, sequence, start: honest(prefiller, sequence, start + CHUNK))


def _pages_are_back_too_early(monkeypatch):
    """A page changes its frame on the device before its copy is there."""
    late(monkeypatch)
    monkeypatch.setattr(AsyncCopies, "arrived", True)


MUTANTS = (_no_arrival, _unwanted_copies_are_made, _pages_that_are_written_are_copied, _pages_are_back_too_early)


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

    def test_a_step_waits_for_no_copy_if_another_page_can_move(self):
        frames, calls = Frames(FrameCounts(2, 0, 4)), []
        frames.arrived, frames.arrive = lambda: False, lambda: calls.append("waited")
        frames.bind([0, 1])
        frames.copy_ahead({0}, 1)
        frames.bind([2], wait=False)
        assert (frames.take_moves().tolist(), calls) == ([[1, 3]], [])
        frames.bind([3, 4], wait=False)
        assert (frames.take_moves().tolist(), calls) == ([[1, 4]], ["waited"]), "the last one that is left"
        assert frames.frame_of.tolist() == [2, 3, 4, 1, 0, -1]

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

    def test_pages_come_back_to_what_is_not_spare(self):
        frames, given_up = Frames(FrameCounts(3, 0, 3), spare=1), []
        frames.give_up = given_up.append
        frames.bind([0, 1, 2])
        frames.bind([3, 4])
        frames.take_moves()
        frames.release([2, 3, 4])
        assert frames.room == 2
        assert frames.bring_back([5, 1, 0], 9).tolist() == [[4, 0], [3, 1]]
        assert (frames.room, frames.coming, frames.on_device) == (0, True, 0)
        frames.bind([5, 4])
        assert (given_up, frames.frame_of[[4, 5]].tolist()) == ([0], [0, 2]), "room for a page that is written comes first"
        frames.have_come_back()
        assert frames.frame_of.tolist() == [1, 4, -1, -1, 0, 2]
        assert (frames.returned, frames.on_host) == (1, 1)

    def test_it_does_not_search_again_before_something_changes(self):
        frames = Frames(FrameCounts(1, 0, 3))
        frames.bind([0])
        frames.bind([1])
        frames.take_moves()
        frames.release([1])
        assert (frames.room, len(frames.bring_back([], 1)), frames.room) == (1, 0, 0)
        frames.bind([2])
        frames.release([2])
        assert frames.room == 1


def test_a_prompt_that_ends_in_its_middle_leaves_everything_right(model):
    """Between two chunks, while pages are copied for the second."""
    engine, tokens = tiered(model), [*range(90), *range(60)]

    def interrupt(count):
        done.append(count)
        if len(done) == 6:
            raise KeyboardInterrupt

    for _ in range(2):
        done = []
        with pytest.raises(KeyboardInterrupt):
            engine.prefill([tokens], on_tokens=interrupt)
        stats = engine.pool_stats()
        assert (stats.device_pages, stats.host_pages, engine.sequences) == (0, 0, set())
    frames = engine._pool.frames["full"]
    assert (sorted(frames._free_device), sorted(frames._free_host)) == ([*range(DEVICE)], [*range(DEVICE, DEVICE + HOST)])
    (sequence,), (alone,) = engine.prefill([tokens]), engine_of(model, pages=60).prefill([tokens])
    np.testing.assert_array_equal(sequence.logits, alone.logits)


def test_copies_begin_after_programs_that_only_read_pages(model):
    """Blocks for a store are read from frames that a copy may write to as soon as their pages are gone."""
    engine = tiered(model)
    (sequence,) = engine.prefill([[1] * 100])
    pool, moving = engine._pool, engine._pool._moving
    *_, last = read_blocks(pool, engine.spec, "full", sequence.pages["full"][:PIECE])
    pool.copy_ahead("full", set(sequence.pages["full"]), 2)
    assert moving._after is last
    engine.decode([sequence], [1])
    assert pool.launched is pool._latest
    assert pool.launched is not last


class Failed:
    """What a program that failed has returned."""

    def is_deleted(self):
        return False

    def block_until_ready(self):
        raise RuntimeError("out of memory")


def test_a_failed_program_before_the_copies_is_told(model, monkeypatch):
    """Once, since it only read the pages. And the sequence can still be freed."""
    engine = tiered(model)
    late(monkeypatch)
    (sequence,) = engine.prefill([[1] * 100])
    moving = engine._pool._moving
    engine._pool.copy_ahead("full", set(sequence.pages["full"]), 4)
    moving._after = Failed()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.prefill([[2] * 60])
    assert engine.sequences == {sequence}
    (other,) = engine.prefill([[2] * 60])
    np.testing.assert_array_equal(other.logits, engine_of(model, pages=60).prefill([[2] * 60])[0].logits)
    engine._pool.copy_ahead("full", set(sequence.pages["full"]), 4)
    engine.free(sequence)
    assert not any(moves.size for _, moves in moving._waiting)


def test_a_failed_program_before_many_moves_is_told(model, calls):
    """Once, too."""
    engine, held = moving_many(model)
    engine._pool.launched = Failed()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.prefill([[2] * CHUNK])
    (sequence,) = engine.prefill([[2] * CHUNK])
    alone = engine_of(model, pages=60)
    np.testing.assert_array_equal(sequence.logits, alone.prefill([[2] * CHUNK])[0].logits)
    (other,) = alone.prefill([[1] * (DEVICE * PAGE)])
    np.testing.assert_array_equal(engine.decode([held], [5]), alone.decode([other], [5]))
