"""Compiling the steps of an engine before the first real call."""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax.ahead import compile_together
from kvjax.cache.tables import staged_widths, table_width, table_widths
from kvjax.checks import whole_number
from kvjax.policies.choice import possible_prefills
from kvjax.policies.decode import DecodePolicy
from kvjax.sampling import SamplingRows
from kvjax.sequences import CachedSequence
from kvjax.slots import in_bucket
from kvjax.steps import sample_first

if TYPE_CHECKING:
    from kvjax.engine import Engine


def warm_up(engine: Engine, *, batch: int, tokens: int | None, policy: str | DecodePolicy | None) -> None:
    """`Engine.warmup`."""
    positions = engine.config.max_positions
    tokens = min(engine.page_size, positions) if tokens is None else whole_number("tokens", tokens, 1)
    engine.check_length(tokens, engine.declared(policy))
    longest, most = engine.pages_for(tokens), max(tokens, positions)
    widths = staged_widths(longest) if engine._prefiller.brings else table_widths(longest)
    lengths = [min(width * engine.page_size, longest * engine.page_size, most) for width in widths]
    steps = engine._declared.possible(policy, longest * engine.page_size, batch)
    sequences = engine.prefill([[0]] * batch, cache_salt=os.urandom(16).hex())  # nobody finds what warming up leaves
    try:
        slots, rows = in_bucket(sequences, engine.batch_buckets), SamplingRows.of([None])
        sample_first(sequences[0].logits, rows, np.ones(1, np.int32))
        rows = SamplingRows.of([None] * len(slots))
        compile_together(_calls(engine, slots, rows, lengths, steps), engine.guard.interrupt_point)
        for tokens in lengths:
            engine.reserve(sequences[:1], tokens - sequences[0].length)
            for each in possible_prefills(engine.prefill_policy, tokens, engine.prefill_chunk):
                with engine._reserved(sequences[:1], 1):
                    engine._write(sequences[0], [0], all_logits=False, only=each)
            keeping = sequences[0].keeping
            written, sequences[0].length = sequences[0].length, tokens - 1
            for each in steps:
                engine.guard.interrupt_point()
                engine._groups.skip(sequences[0])
                jax.block_until_ready(engine.decode_and_sample(slots, np.zeros(len(slots), np.int32), rows, each))
                sequences[0].length = tokens - 1
            sequences[0].length, sequences[0].keeping = written, keeping
        if engine._pool.frames:
            engine._pool.compile_moves()
            for each in possible_prefills(engine.prefill_policy, lengths[-1], engine.prefill_chunk):
                for _ in engine._prefiller.compile_copies(sequences[0], each, lengths[-1]):
                    engine.guard.interrupt_point()
    finally:
        for sequence in sequences:
            engine.free(sequence)


def _calls(
    engine: Engine,
    slots: Sequence[CachedSequence | None],
    rows: SamplingRows,
    lengths: Sequence[int],
    steps: Sequence[DecodePolicy],
) -> Generator[functools.partial]:
    """What warming up runs at each length: slices of prefill, and decode steps. The first slot's sequence stays as it is."""
    before, opened = slots[0].page_counts(), slots[0].open_chunk
    try:
        for tokens in lengths:
            engine.reserve(slots[:1], tokens - slots[0].length)
            prefills = possible_prefills(engine.prefill_policy, tokens, engine.prefill_chunk)
            for each in prefills:
                yield from engine._prefiller.calls(engine._begin(slots[0], [0], only=each))
            widths = {group.name: table_width(-(-tokens // group.page_size)) for group in engine.spec.groups}
            for each in steps:
                yield engine._runner.step_call(each, slots, widths, rows)
            # As after a step: the next chunk goes on from what the last one learned, and tables of windows are as wide as it was long.
            length, slots[0].length, slots[0].open_chunk = slots[0].length, tokens - 1, None
            engine._groups.skip(slots[0])
            slots[0].length = length
        for each in prefills if engine._pool.frames else ():
            yield from engine._prefiller.calls_with_copies(slots[0], each, tokens)
    finally:
        engine._groups.keep(slots[0], before)
        slots[0].open_chunk = opened
