"""Warming up an engine whose pages may lie in host memory: no program is left for the first long prompt to compile."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY, TinyModel, altered, init_params

from kvjax import Engine
from kvjax.cache.host_pool import FrameCounts, prefill_prefetch
from kvjax.cache.host_pool.frame_table import Frames
from kvjax.engine.memory import memory_plan
from kvjax.engine.prefill_runner import Prefiller
from kvjax.engine.sampling import SamplingRows
from kvjax.models.decoder import TransformerDecoder

COMPILED = "/jax/core/compile/backend_compile_duration"


def test_a_prompt_compiles_nothing_after_warming_up():
    """Whatever its length up to the one named, and the steps after it; a longer one needs larger copies."""
    config = altered(TINY, num_layers=1, max_positions=2000)
    model = TinyModel(TransformerDecoder(config), init_params(config, jax.random.key(7)))
    frame = memory_plan(config, page_size=16).frame_bytes
    engine = Engine(model, "quest:2", page_size=16, prefill_chunk=64, batch_buckets=(1,), pages=24, host_bytes=100 * frame)
    assert engine._pool.frames["full"].counts.hot > 0
    engine.warmup(tokens=480)
    stats = engine.pool_stats()
    assert (stats.device_pages, stats.host_pages, stats.copied_bytes, engine.sequences) == (0, 0, 0, set())
    compiled, random = [], np.random.default_rng(0)
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **named: compiled.append(named) if event == COMPILED else None)
    try:
        for length in (3, 200, 477, 300):
            (sequence,) = engine.prefill([random.integers(0, 97, length).tolist()])
            tokens = np.zeros(1, np.int32)
            for _ in range(3):
                tokens = engine.decode_and_sample([sequence], tokens, SamplingRows.of([None])).tokens
            engine.free(sequence)
        assert not compiled
        assert engine.pool_stats().copied_bytes > 0
        engine.prefill([random.integers(0, 97, 1500).tolist()])
        assert compiled, "the listener hears compilations"
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_chunk_that_has_run_keeps_no_copies(monkeypatch):
    """They may take gigabytes, and the next chunk makes its own."""
    config = altered(TINY, num_layers=1, max_positions=2000)
    model = TinyModel(TransformerDecoder(config), init_params(config, jax.random.key(7)))
    frame = memory_plan(config, page_size=16).frame_bytes
    engine = Engine(model, "quest:2", page_size=16, prefill_chunk=64, batch_buckets=(1,), pages=24, host_bytes=100 * frame)
    kept, next_slice = [], Prefiller._next_slice

    def looked_at(self, run):
        next_slice(self, run)
        kept.append((run.staged is not None, run.ahead))

    monkeypatch.setattr(Prefiller, "_next_slice", looked_at)
    engine.prefill([np.random.default_rng(0).integers(0, 97, 600).tolist()])
    assert sum(staged for staged, _ in kept) > 1, "chunks copied pages"
    assert [ahead for _, ahead in kept] == [None] * 10


@settings(max_examples=40, deadline=None)
@given(
    counts=st.builds(FrameCounts, st.integers(1, 40), st.integers(0, 8), st.integers(100, 200)),
    written=st.integers(1, 16),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3),
)
def test_the_sizes_of_a_prompt_that_runs_alone_are_foretold(counts, written, lengths):
    """One prompt after the other, each freed before the next: the copies of each chunk have the sizes of its number of
    pages."""
    frames = Frames(counts)
    for total in lengths:
        for own in range(0, total, written):
            pages = list(range(min(own + written, total)))
            frames.bind(pages[own:])
            frames.take_moves()
            found = None
            if (frames.frame_of[pages] >= counts.border).any():
                staged, window = prefill_prefetch.stage(frames.frame_of[pages], own, counts, written)
                found = prefill_prefetch.Sizes(staged.places.shape[1], staged.sources.size, window.rows)
            assert found == prefill_prefetch.sizes_alone(len(pages), counts, written)
        frames.release(range(total))
