"""What an engine compiles before calls need it: a whole warm-up, or what follows a prompt that is still being
prefilled."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np

from kvjax.cache import pages_of_step
from kvjax.cache.page_manager import PageManager
from kvjax.cache.page_tables import staged_widths, table_width, table_widths
from kvjax.cache.pool import Pool, first_array, place_beside
from kvjax.compilation import compile_together, shape_of
from kvjax.engine.decode_batch import in_bucket
from kvjax.engine.multi_step import decode_steps
from kvjax.engine.policy_set import PolicySet
from kvjax.engine.prefill_runner import ChunkRun, Prefiller
from kvjax.engine.sampling import Sampled, SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_plan import Launch
from kvjax.engine.steps import StepInputs, StepStatic, decode_and_sample, sample_first
from kvjax.model.protocols import Model
from kvjax.policies.choice import possible_prefills
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.prefill import PrefillPolicy


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """What warming up does with an engine's sequences.

    begin: begin a chunk of the one token 0, by a prefill policy, wherever it lies. write: run such a chunk. step: write
    the token 0 of every slot by a decode step. between: called between two programs; it may raise.
    """

    prefill: Callable[..., list[CachedSequence]]
    reserve: Callable[[Sequence[CachedSequence], int], None]
    free: Callable[[CachedSequence], None]
    begin: Callable[[CachedSequence, PrefillPolicy], ChunkRun]
    write: Callable[[CachedSequence, PrefillPolicy], None]
    step: Callable[[Sequence[CachedSequence | None], SamplingRows, DecodePolicy], Sampled]
    between: Callable[[], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Warmup:
    """The programs of one engine, before they are called."""

    model: Model
    pool: Pool
    groups: PageManager
    declared: PolicySet
    prefiller: Prefiller

    def run(self, calls: Calls, buckets: Sequence[int], batch: int, tokens: int, policy: str | DecodePolicy | None) -> None:
        """`kvjax.Engine.warmup`."""
        page_size, most = self.declared.page_size, max(tokens, self.model.config.max_positions)
        longest = -(-tokens // page_size)
        widths = staged_widths(longest) if self.prefiller.brings else table_widths(longest)
        lengths = [min(width * page_size, longest * page_size, most) for width in widths]
        steps = self.declared.possible(policy, longest * page_size, batch)
        sequences = calls.prefill([[0]] * batch, cache_salt=os.urandom(16).hex())  # nobody finds what warming up leaves
        try:
            slots, rows = in_bucket(sequences, buckets), SamplingRows.of([None])
            sample_first(sequences[0].logits, rows, np.ones(1, np.int32))
            rows = SamplingRows.of([None] * len(slots))
            compile_together(self._calls(calls, slots, rows, lengths, steps), calls.between)
            for tokens in lengths:
                calls.reserve(sequences[:1], tokens - sequences[0].length)
                for each in self._prefills(tokens):
                    calls.write(sequences[0], each)
                keeping = sequences[0].keeping
                written, sequences[0].length = sequences[0].length, tokens - 1
                for each in steps:
                    calls.between()
                    self.groups.skip(sequences[0])
                    jax.block_until_ready(calls.step(slots, rows, each))
                    sequences[0].length = tokens - 1
                sequences[0].length, sequences[0].keeping = written, keeping
            if self.pool.frames:
                self.pool.compile_moves()
                for each in self._prefills(lengths[-1]):
                    for _ in self.prefiller.compile_copies(sequences[0], each, lengths[-1]):
                        calls.between()
        finally:
            for sequence in sequences:
                calls.free(sequence)

    def _prefills(self, tokens: int) -> tuple[PrefillPolicy, ...]:
        return possible_prefills(self.declared.prefill, tokens, self.prefiller.chunk)

    def _calls(
        self,
        calls: Calls,
        slots: Sequence[CachedSequence | None],
        rows: SamplingRows,
        lengths: Sequence[int],
        steps: Sequence[DecodePolicy],
    ) -> Generator[functools.partial]:
        """What warming up runs at each length: slices of prefill, and decode steps. The first slot's sequence stays as
        it is."""
        before, opened = slots[0].page_counts(), slots[0].open_chunk
        try:
            for tokens in lengths:
                calls.reserve(slots[:1], tokens - slots[0].length)
                prefills = self._prefills(tokens)
                for each in prefills:
                    yield from self.prefiller.calls(calls.begin(slots[0], each))
                widths = {group.name: table_width(-(-tokens // group.page_size)) for group in self.groups.spec.groups}
                for each in steps:
                    yield self.step_call(each, slots, widths, rows)
                # As after a step: the next chunk goes on from what the last one learned, and tables of windows are as
                # wide as it was long.
                length, slots[0].length, slots[0].open_chunk = slots[0].length, tokens - 1, None
                self.groups.skip(slots[0])
                slots[0].length = length
            for each in prefills if self.pool.frames else ():
                yield from self.prefiller.calls_with_copies(slots[0], each, tokens)
        finally:
            self.groups.keep(slots[0], before)
            slots[0].open_chunk = opened

    @property
    def _committed(self) -> jax.sharding.Sharding | None:
        """Where results of programs are; None: not committed to any device."""
        return place_beside(self.pool.layers) if first_array(self.pool.layers).committed else None

    def first_token(self, rows: SamplingRows) -> list[functools.partial]:
        """A call of `sample_first`, with shapes for arguments. rows: of one row."""
        vocab_size = self.model.config.vocab_size
        counts = shape_of((vocab_size,), np.int32) if rows.penalises else None
        logits = shape_of((vocab_size,), np.float32, self._committed)
        return [functools.partial(sample_first, logits, rows, shape_of((1,), np.int32), counts)]

    def steps_call(
        self,
        policy: DecodePolicy,
        sequences: Sequence[CachedSequence | None],
        widths: dict[str, int],
        rows: SamplingRows,
        launch: Launch | None,
    ) -> list[functools.partial]:
        """A call of `decode_and_sample`, or of what runs a launch, with shapes for arguments. widths: of the page
        tables, by layer group."""
        call = self.step_call(policy, sequences, widths, rows, shape_of((len(sequences),), np.int32, self._committed))
        if launch is None:
            return [call]
        static, inputs = call.args
        step = decode_steps
        if launch.draft is not None:
            from kvjax.engine.drafts import draft_rounds as step
        static = static._replace(steps=launch.steps, draft=launch.draft)
        inputs = inputs._replace(ends=launch.ends, history=launch.history, draft_params=launch.draft_params(self.model))
        return [functools.partial(step, static, inputs)]

    def step_call(
        self,
        policy: DecodePolicy,
        sequences: Sequence[CachedSequence | None],
        widths: dict[str, int],
        rows: SamplingRows,
        tokens: jax.ShapeDtypeStruct | None = None,
    ) -> functools.partial:
        """A call of `decode_and_sample`, with shapes for arguments. widths: of the page tables, by layer group. tokens:
        None: from the host."""
        size, placed = len(sequences), self.pool.beside
        tables = {name: shape_of((size, width), np.int32, placed) for name, width in widths.items()}
        cache = self.pool.as_it_is(tables, shape_of((size,), np.int32, placed))
        states = self.declared.states.of_batch(policy, sequences)
        counts = shape_of((size, self.model.config.vocab_size), np.int32) if rows.penalises else None
        tokens = shape_of((size,), np.int32, placed) if tokens is None else tokens
        rows = jax.tree.map(lambda each: shape_of(each.shape, each.dtype, placed), rows)
        counts_of = {group.name: pages_of_step(group.page_size) for group in self.groups.spec.groups}
        following = {name: shape_of((size, 1 + count), np.int32, placed) for name, count in counts_of.items()}
        active = shape_of((size,), bool, placed)
        inputs = StepInputs(self.model.params, cache, tokens, active, states, rows, counts, following=following)
        static = StepStatic(self.model.decoder, policy, self.declared.indexes, self.pool.shards)
        return functools.partial(decode_and_sample, static, inputs)
