"""Compiling the steps of an engine before the first real call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax.cache.tables import staged_widths, table_widths
from kvjax.checks import whole_number
from kvjax.policies.choice import possible_prefills
from kvjax.policies.decode import DecodePolicy
from kvjax.sampling import SamplingRows
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
    sequences = engine.prefill([[0]] * batch, cache_salt=os.urandom(16).hex())  # nobody finds what warming up leaves
    try:
        slots, rows = in_bucket(sequences, engine.batch_buckets), SamplingRows.of([None])
        sample_first(sequences[0].logits, rows, np.ones(1, np.int32))
        rows = SamplingRows.of([None] * len(slots))
        for width in staged_widths(longest) if engine._prefiller.brings else table_widths(longest):
            tokens = min(width * engine.page_size, longest * engine.page_size, most)
            engine.reserve(sequences[:1], tokens - sequences[0].length)
            for each in possible_prefills(engine.prefill_policy, tokens, engine.prefill_chunk):
                with engine._reserved(sequences[:1], 1):
                    engine._write(sequences[0], [0], all_logits=False, only=each)
            keeping = sequences[0].keeping
            written, sequences[0].length = sequences[0].length, tokens - 1
            for each in engine._declared.possible(policy, longest * engine.page_size, batch):
                engine.guard.interrupt_point()
                engine._groups.skip(sequences[0])
                jax.block_until_ready(engine.decode_and_sample(slots, np.zeros(len(slots), np.int32), rows, each))
                sequences[0].length = tokens - 1
            sequences[0].length, sequences[0].keeping = written, keeping
        if engine._pool.frames:
            engine._pool.compile_moves()
            tokens = min(longest * engine.page_size, most)
            for each in possible_prefills(engine.prefill_policy, tokens, engine.prefill_chunk):
                for _ in engine._prefiller.compile_copies(sequences[0], each, tokens):
                    engine.guard.interrupt_point()
    finally:
        for sequence in sequences:
            engine.free(sequence)
