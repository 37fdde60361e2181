"""Decode steps over an engine's pages: prepare what a step reads, run it, and keep its result or drop it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Int32

from kvjax.cache import MOST_TOKENS, Cache, pages_of_step
from kvjax.cache.page_manager import GroupPages
from kvjax.cache.page_tables import table_width
from kvjax.cache.pool import Layers, Pool, first_array, place_beside
from kvjax.checks import token_ids, whole_number
from kvjax.compilation import CompileAhead, shape_of
from kvjax.engine.decode_batch import Slots, Written, in_bucket
from kvjax.engine.multi_step import STOP_IDS, Ends, decode_steps
from kvjax.engine.page_eviction import PageRelease, check_several
from kvjax.engine.policy_set import DeclaredPolicies
from kvjax.engine.policy_state import rows_of
from kvjax.engine.sampling import Sampling, SamplingRows, check_rows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_output import Reads
from kvjax.engine.step_plan import Decoded, DecodeGroup
from kvjax.engine.steps import StepInputs, StepProgram, StepStatic, decode_and_sample, sample_first
from kvjax.engine.watching import after_prompts, alarms_of, program_of, programs_of
from kvjax.model.protocols import Model
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import DecodePolicy, Watched
from pallas_kernels.core.messages import shown

DRAFTS = (1, 4, 8, 16)
"""How many tokens of a sequence a step may write. There are few sizes, so that few programs are compiled."""


def padded_rows(
    sequences: Sequence[CachedSequence], tokens: Sequence[Any], buckets: Sequence[int], vocab_size: int
) -> tuple[list[CachedSequence | None], Int[np.ndarray, "B T"]]:
    """Slots and tokens of a step, padded to a batch bucket. tokens: one of every sequence, or a row of them."""
    if not hasattr(tokens, "__len__"):
        raise ValueError(f"tokens must be a list with one token of every sequence, or a row of them, got {shown(tokens)}")
    if len(tokens) != len(sequences):
        raise ValueError(f"{len(tokens)} tokens for {len(sequences)} sequences; a step writes one token of each, or a row of them")
    slots = in_bucket(sequences, buckets)
    rows = [token_ids(each if np.ndim(each) else [each], vocab_size) for each in tokens]
    if len(rows[0]) not in DRAFTS or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"a step writes {', '.join(map(str, DRAFTS))} tokens of every sequence, got rows of {list(map(len, rows))}")
    padded = np.zeros((len(slots), len(rows[0])), np.int32)
    padded[: len(rows)] = rows
    return slots, padded


def _host_tokens(tokens: Any, sequences: Sequence[CachedSequence | None], vocab_size: int) -> Int32[np.ndarray, "B *T"]:
    """The tokens of a step that are not on the device yet, checked. Rows of empty slots may hold anything where a step has drafts."""
    if np.ndim(tokens) != 2:
        return np.array(token_ids(tokens, vocab_size), np.int32)
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers, got {ids.dtype}")
    wrong = (ids < -1) | (ids >= vocab_size)
    wrong[:, :1] |= ids[:, :1] < 0
    for row, column in np.argwhere(wrong):
        if row < len(sequences) and sequences[row] is not None:
            raise ValueError(
                f"token {ids[row, column]} at place {column} of row {row} is outside the vocabulary of {vocab_size}; "
                "only a drafted token may be -1, where there is none"
            )
    return ids.astype(np.int32)


def _check_launch(group: DecodeGroup, policy: DecodePolicy) -> None:
    """ValueError unless a group's launch fits it."""
    launch, slots = group.launch, len(group.sequences)
    whole_number("steps of a launch", launch.steps, 1, MOST_TOKENS + 1)
    if group.tokens.ndim == 2:
        raise ValueError(f"a launch of {launch.steps} steps has no drafts, and got tokens of shape {group.tokens.shape}: give one per slot")
    if launch.steps > 1:
        check_several(policy, launch.steps)
    shapes = {"left": np.shape(launch.ends.left), "stop_ids": np.shape(launch.ends.stop_ids)[:1]}
    if not isinstance(launch.written, int):
        shapes["written"] = launch.written.shape
    for name, shape in shapes.items():
        if shape != (slots,):
            raise ValueError(f"{name} of a launch must have a row for each of {slots} slots, got {shape}")


@dataclasses.dataclass(eq=False, slots=True)
class Launched:
    """A decode step that was launched: its policy, its results other than the cache, the policy's states, and the cache."""

    policy: DecodePolicy
    slots: Slots
    results: list[Any]
    states: tuple[Any, ...]
    cache: Cache


class DecodeRunner:
    """Runs decode steps. The slots of every policy and batch size stay on the device. last_reads: what the latest step reads."""

    def __init__(self, model: Model, pool: Pool, groups: GroupPages, declared: DeclaredPolicies, release: PageRelease):
        self.model, self._release = model, release
        self._pool, self._groups, self._declared = pool, groups, declared
        self._slots: dict[tuple[int, DecodePolicy], Slots] = {}
        self._rows: tuple[SamplingRows | None, int] = None, 0  # the latest, and the slots that they are known to fit
        self._placed: tuple[SamplingRows | None, SamplingRows | None] = None, None  # rows as given, and on the device
        self._chosen: Array | None = None  # the tokens that the latest step sampled for these rows, one for each slot
        self._ahead = CompileAhead()
        self.last_reads: Reads | None = None

    def checked(self, group: DecodeGroup, buckets: Sequence[int]) -> DecodeGroup:
        """The group, with its tokens in an array. ValueError unless tokens, sampling and counts fit its slots, which are a batch bucket."""
        if not isinstance(group.sequences, tuple | list):
            raise ValueError(f"a step takes a tuple of sequences, None for an empty slot, got {shown(group.sequences)}")
        slots, tokens, vocab_size = len(group.sequences), group.tokens, self.model.config.vocab_size
        if group.launch is not None:
            _check_launch(group, self._declared.find(group.policy))
        if tokens is self._chosen and group.sampling is self._rows[0] and slots == self._rows[1] and group.counts is None:
            return group  # as the step before
        if slots not in buckets:
            raise ValueError(f"{slots} slots are no batch bucket of this engine: {buckets}")
        if not isinstance(tokens, jax.Array):
            tokens = _host_tokens(tokens, group.sequences, vocab_size)
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids must be whole numbers, got {tokens.dtype}")
        drafted = tokens.ndim == 2
        if drafted and tokens.shape[1] not in DRAFTS[1:]:
            raise ValueError(f"a drafted step writes {', '.join(map(str, DRAFTS[1:]))} tokens of every sequence, got {tokens.shape[1]}")
        first, rows = tokens[:, 0] if drafted else tokens, group.sampling
        known = rows is self._rows[0] and slots == self._rows[1] and not rows.penalises
        if first.shape != (slots,) or not known or group.counts is not None:
            check_rows(rows, first, group.counts, slots, vocab_size)
            self._rows, self._chosen = (rows, slots), None
        return group if tokens is group.tokens else dataclasses.replace(group, tokens=tokens)

    def compile_ahead(
        self,
        policy: DecodePolicy,
        sequence: CachedSequence,
        tokens: int,
        samplings: Sequence[Sampling | None],
        launches: Sequence[int] = (),
    ) -> None:
        """Compile, in another thread, what follows the prefill of a sequence: the choice of its first token, and the decode step of slots
        with these samplings, the sequence's first. A chunk of it must have been prefilled. tokens: of the longest sequence in the slots.
        launches: the numbers of steps of `decode_steps`, in place of the decode step. Done once for each policy, number of slots and width
        of page tables."""
        widths = {group.name: table_width(-(-tokens // group.page_size)) for group in self._groups.spec.groups}
        for each in programs_of(policy):
            if (key := (each, len(samplings), *widths.values())) not in self._ahead:
                self._ahead.begin(key, functools.partial(self._after_prefill, each, sequence, widths, samplings, launches))

    def _after_prefill(
        self,
        policy: DecodePolicy,
        sequence: CachedSequence,
        widths: dict[str, int],
        samplings: Sequence[Sampling | None],
        launches: Sequence[int],
    ) -> Iterator[functools.partial]:
        """Calls of `sample_first`, and of `decode_and_sample` or `decode_steps`, with shapes for arguments. widths: of the page tables, by
        layer group."""
        size, vocab_size = len(samplings), self.model.config.vocab_size
        beside = place_beside(self._pool.layers) if first_array(self._pool.layers).committed else None
        one, rows = SamplingRows.of(samplings[:1]), SamplingRows.of(samplings)
        counts = shape_of((vocab_size,), np.int32) if one.penalises else None
        logits = shape_of((vocab_size,), np.float32, beside)
        yield functools.partial(sample_first, logits, one, shape_of((1,), np.int32), counts)
        step = self.step_call(policy, [sequence] + [None] * (size - 1), widths, rows, shape_of((size,), np.int32, beside))
        ends = Ends(shape_of((size,), np.int32), shape_of((size, STOP_IDS), np.int32))
        static, inputs = step.args
        for steps in launches:
            yield functools.partial(decode_steps, static._replace(steps=steps), inputs._replace(ends=ends))
        if not launches:
            yield step

    def step_call(
        self,
        policy: DecodePolicy,
        sequences: Sequence[CachedSequence | None],
        widths: dict[str, int],
        rows: SamplingRows,
        tokens: jax.ShapeDtypeStruct | None = None,
    ) -> functools.partial:
        """A call of `decode_and_sample`, with shapes for arguments. widths: of the page tables, by layer group. tokens: None: from the
        host."""
        size, placed = len(sequences), self._pool.beside
        tables = {name: shape_of((size, width), np.int32, placed) for name, width in widths.items()}
        cache = self._pool.as_it_is(tables, shape_of((size,), np.int32, placed))
        states = self._declared.states.of_batch(policy, sequences)
        counts = shape_of((size, self.model.config.vocab_size), np.int32) if rows.penalises else None
        tokens = shape_of((size,), np.int32, placed) if tokens is None else tokens
        rows = jax.tree.map(lambda each: shape_of(each.shape, each.dtype, placed), rows)
        counts_of = {group.name: pages_of_step(group.page_size) for group in self._groups.spec.groups}
        following = {name: shape_of((size, count), np.int32, placed) for name, count in counts_of.items()}
        active = shape_of((size,), bool, placed)
        inputs = StepInputs(self.model.params, cache, tokens, active, states, rows, counts, following=following)
        return functools.partial(decode_and_sample, self._static(policy), inputs)

    def _static(self, policy: DecodePolicy, steps: int = 1) -> StepStatic:
        return StepStatic(self.model.decoder, policy, self._declared.indexes, self._pool.shards, steps)

    def placed(self, rows: SamplingRows) -> SamplingRows:
        """The rows on the device. The same rows are put there once, unless they have NumPy arrays that their owner may still change."""
        if rows is not self._placed[0]:
            if any(isinstance(each, np.ndarray) and each.flags.writeable for each in jax.tree.leaves(rows)):
                return self._pool.put(jax.tree.map(np.array, rows))  # copies, because a CPU array may share the memory of what was put
            self._placed = rows, self._pool.put(rows)
        return self._placed[1]

    def slots(self, policy: DecodePolicy, size: int) -> Slots:
        """The slots of a policy's batches of this size."""
        slots = self._slots.get((size, policy))
        if slots is None:
            slots = self._slots[size, policy] = Slots(self._groups.spec, size, self._pool.put)
        return slots

    def launch(
        self,
        step: StepProgram,
        slots: Slots,
        tokens: Array,
        policy: DecodePolicy,
        sampling: tuple[Any, ...] = (),
        *,
        written: Written = 1,
        steps: int = 1,
    ) -> Launched:
        """Run a step that writes so many tokens of every sequence in the slots, or slot by slot. Their pages must have been taken. The
        sequences do not change. sampling: the fields of `StepInputs` after the states. steps: of `decode_steps`."""
        if isinstance(policy, ChoosesDecode):
            counts = [written] * len(slots.rows) if isinstance(written, int) else written[slots.rows].tolist()
            policy = self._declared.choose(policy, [length + count for length, count in zip(slots.lengths, counts, strict=True)])
        if isinstance(policy, Watched) and not self._watches_each(tokens):
            policy = program_of(policy, slots, written, several=not isinstance(written, int) or written > 1)
        if self._pool.frames:
            self._pool.advance_copies()
            self._pool.bring_back(slots.sealed)
        cache, following = slots.cache(self._pool, written)
        if self._ahead.running:
            self._ahead.wait((policy, slots.size, *(cache.page_tables[group.name].shape[1] for group in cache.spec.groups)))
        if self._pool.beside is not None and not isinstance(tokens, jax.Array):
            tokens = self._pool.put(tokens)
        states = self._declared.states.of_batch(policy, slots.sequences)
        if isinstance(policy, Watched):
            states = after_prompts(policy, slots, states)
        inputs = StepInputs(self.model.params, cache, tokens, slots.active, states, *sampling)._replace(following=following)
        try:
            results = self._pool.run(step, self._static(policy, steps), inputs, kept=self._kept)
        except BaseException:
            slots.forget()
            raise
        *results, cache, states, self.last_reads = results
        return Launched(policy, slots, results, states, cache)

    def _watches_each(self, tokens: Array) -> bool:
        """Whether a watched policy runs one program for all steps, because those of the policy alone round otherwise: drafted tokens attend
        together there, and pages in host memory are read through the hot buffer."""
        return (tokens.ndim == 2 and tokens.shape[1] > 1) or bool(self._pool.frames)

    def _kept(self, result: tuple) -> tuple[Layers, Array]:
        """The pages in a decode step's result, and one of its outputs."""
        *_, cache, _, reads = result
        return self._pool.keep(cache, reads.keys)

    def program_of(self, group: DecodeGroup) -> tuple[StepProgram, tuple[Any, ...], int]:
        """The program that runs a group that was checked, its inputs after the states, and its steps."""
        rows, launch = self.placed(group.sampling), group.launch
        if launch is None:
            return decode_and_sample, (rows, group.counts), 1
        return decode_steps, (rows, group.counts, launch.ends), launch.steps

    def decoded(self, launched: Launched, group: DecodeGroup) -> Decoded:
        """Keep the result of a group's program, and return it. Waits for the device if it had drafts."""
        sampled, packed, *ends = launched.results
        drafted = sampled.accepted is not None
        self.keep(launched, np.asarray(sampled.accepted) if drafted else group.written)
        self._chosen = None if drafted or sampled.counts is not None else sampled.tokens
        return Decoded(sampled, self.last_reads, packed, *ends)

    def keep(self, launched: Launched, written: Written = 1) -> None:
        """Keep a step's result. written: how many of the tokens written stay, per slot."""
        slots, states = launched.slots, launched.states
        learned, alarms = [], {}
        if not self._declared.states.stateless(launched.policy) and jax.tree.leaves(states):
            try:
                rows = rows_of(states)
                learned = [rows[row] for row in slots.rows]
                alarms = alarms_of(launched.policy, slots, written, states)
            except BaseException:  # no memory on the device, say
                slots.forget()
                raise
        # Nothing can fail from here on.
        slots.advance(launched.cache, written)
        if self._groups.has_windows:
            for sequence in slots.live:
                self._groups.give_back(sequence)
        for sequence, state in zip(slots.live, learned, strict=False):
            sequence.states[launched.policy] = state
        for sequence, alarm in alarms.items():
            sequence.alarms[launched.policy] = alarm
        if self._release.gives_back(launched.policy):
            counts = [written] * len(slots.live) if isinstance(written, int) else written[slots.rows].tolist()
            self._release.after_step(launched.policy, slots.live, counts)
