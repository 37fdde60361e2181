"""The scheduler: the one loop that turns requests into decode steps and chunks of prefill, and their results into
completions.

* Order: first come, first served, within a priority. A request keeps one decode policy and one batch bucket from its
  admission on, so its bits do not depend on other requests. `auto` chooses at admission, by the request's own length.
* Pages: a prompt takes its pages when it is admitted, its answer as it grows. When none are left, the youngest request
  of the lowest priority is suspended: its pages go to host memory, and come back, with the same bits, when others have
  finished.
* Gaps: with `max_gap_ms=None` free slots are filled first, and a whole prompt is prefilled between two decode steps,
  which gives the most tokens per second. With a value, chunks run in slices of layers between decode steps, as many as
  fit into the gap. Either way `step` returns after each chunk of a prompt that has more of them, so that its request
  can be cancelled.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Int

from kvjax.axes import several_processes
from kvjax.cache import OutOfPages
from kvjax.checks import optional_function, whole_number
from kvjax.engine.call_lock import interrupts
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import SamplingRows, derived_seed, seen_tokens
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_plan import Chunk, DecodeGroup, Launch, Prefilled, StepPlan, StepResult
from kvjax.engine.steps import sample_first
from kvjax.policies.decode import DecodePolicy
from kvjax.scheduler.batch import Batch, Handle, PendingStep, RequestState, Sample, order, read
from kvjax.scheduler.launch_size import LaunchSize, StepsPerLaunch
from kvjax.scheduler.prefill_budget import PrefillBudget
from kvjax.scheduler.request import Completion, OnToken, Request
from kvjax.text.detokenizer import CONTEXT, TextStream
from kvjax.text.tokenization import encode

if TYPE_CHECKING:
    from kvjax.engine.steps import Draft
    from kvjax.scheduler.drafting import Drafting

DEFAULT_SLOTS = 8
AHEAD, LONG_REST = 4, 32_768
"""Chunks of a prompt after which what follows the prompt is traced, and tokens that are left of it then at least. The
device is one chunk behind the host, and waits while the host traces; the compiler works while the rest is
prefilled."""
ALONE = contextlib.nullcontext()


class Scheduler:
    """Runs requests on an engine.

        scheduler = Scheduler(engine)
        handle = scheduler.submit(Request("Once upon a time"))
        while handle.completion is None:
            scheduler.step()

    max_gap_ms: the longest time between two tokens of a sequence while others are prefilled, in milliseconds (one slice
    of layers and one decode step always run); None: no bound. slots: samples that run at once; None: 8, or fewer if the
    engine's largest batch bucket is smaller. policy: that of requests that name none; None is the engine's. on_token:
    called after each step, for every new token, with the request, the token's id and the text that became certain with
    it. on_prefill: called after each chunk with the number of its tokens. on_short: called when pages are missing, with
    the sequence that needs them, or None for a step; it says whether it gave pages back. texts: False leaves texts
    empty, for callers that read token ids only; requests with stop strings have theirs all the same. steps_per_launch:
    how many decode steps the device runs without the host, 1 to 16, while no prompt is prefilled and none could start
    now. Tokens then come so many at a time, with the same bits; a cancelled or new request waits for up to two launches
    (docs/scheduling.md). "auto": four where the device waits for the host, by their measured times, else one. draft: a
    policy that drafts tokens for the requests' own policies to verify, or "lookup", in rounds of one launch, where that
    is faster by the clock; the answer has the same bits (docs/drafts.md). Of several names, as "lookup,cascade:8", the
    fastest is found; "auto" is "lookup,top:32".

    While a request with a penalty runs, the tokens of every slot are counted on the device, in `[bucket, V]` int32.

    preemptions: how often a sequence was suspended, or a prompt freed to be prefilled again. The queue of requests has
    no limit; `waiting` says how many wait, for callers that limit it. Use it from one thread at a time, as the engine,
    and do not use the scheduler's sequences yourself.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_gap_ms: float | None = None,
        slots: int | None = None,
        policy: str | DecodePolicy | None = None,
        on_token: OnToken | None = None,
        on_prefill: Callable[[int], None] | None = None,
        on_short: Callable[[CachedSequence | None], bool] | None = None,
        texts: bool = True,
        steps_per_launch: StepsPerLaunch = "auto",
        draft: str | DecodePolicy | None = None,
    ):
        if not isinstance(engine, Engine):
            raise TypeError(f"a scheduler runs on an engine, got {type(engine).__name__}: Scheduler(Engine(model))")
        slots = min(DEFAULT_SLOTS, engine.batch_buckets[-1]) if slots is None else whole_number("slots", slots, 1)
        bucket = next((size for size in engine.batch_buckets if size >= slots), None)
        if bucket is None:
            largest = engine.batch_buckets[-1]
            raise ValueError(f"{slots} slots are more than the largest batch bucket, {largest}: name one in Engine(batch_buckets=...)")
        self._gap = None if max_gap_ms is None else PrefillBudget(max_gap_ms)
        if max_gap_ms is not None and engine.guard.together is None and several_processes(engine.mesh):
            raise ValueError("max_gap_ms is kept by the clock, which differs between processes: let the first one lead (Processes.lead)")
        for name, given in (("on_token", on_token), ("on_prefill", on_prefill), ("on_short", on_short)):
            optional_function(name, given)
        self.engine, self.slots, self.on_token, self.on_prefill, self.on_short = engine, slots, on_token, on_prefill, on_short
        self.policy, self._bucket = engine.declared(policy), bucket
        # Several processes must launch the same programs, and their clocks and compilers differ. A leader's clock
        # decides how many steps a launch has.
        led, several = engine.guard.together is not None, several_processes(engine.mesh)
        self._by_clock = not (led or several)
        self._launches = LaunchSize(steps_per_launch, single=engine.on_cpu or (several and not led))
        self._drafts = () if draft is None else _drafts_of(engine, draft, bucket)
        self._drafting: dict[DecodePolicy, Drafting] = {}
        self._single_step = False  # there were too few pages for several steps, so the next launch has one
        self.preemptions, self._tokenizer = 0, engine.model.tokenizer if texts else None
        self._numbers = itertools.count()
        self._waiting: list[RequestState | Sample] = []  # in order; the samples are suspended
        self._prefilling: RequestState | None = None
        self._batches: dict[DecodePolicy, Batch] = {}
        self._ending: list[Sample] = []  # samples whose only token is in flight: they count among `slots`, but have no slot of a batch
        self._pending: list[PendingStep] = []  # in order
        self._ended = False  # whether a sample has ended and was not collected yet
        self._finished: list[Handle] = []  # that no step has returned yet
        self._slices = 0  # that were launched after the latest steps
        self._slices_before = 0  # the steps in flight
        self._short = False  # there were too few pages for the first that waits, and none came back since
        self._events: collections.deque[tuple[Request, int, str]] = collections.deque()
        self._together = engine.guard.together
        if self._together is not None:
            if on_short is not None:
                raise ValueError("on_short decides in one process alone: leave it out where the first of several processes leads")
            options = {"max_gap_ms": max_gap_ms, "slots": slots, "policy": self.policy, "steps_per_launch": steps_per_launch}
            self._together.add(self, options, listening=on_token is not None)

    def __repr__(self) -> str:
        return f"Scheduler({self.engine!r}, slots={self.slots}, running={self.running}, waiting={self.waiting})"

    @property
    def waiting(self) -> int:
        """Requests, and suspended samples, that wait for a slot or for pages."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Slots in use."""
        return sum(map(len, self._batches.values())) + len(self._ending) + (self._prefilling is not None)

    @property
    def has_room(self) -> bool:
        """Whether a request that is submitted now would get a slot in the next step, if its pages are free."""
        return self.running + self.waiting < self.slots and not self._short

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self.running)

    def submit(self, request: Request, sequence: CachedSequence | None = None) -> Handle:
        """Queue a request. If something is wrong with it, the `error` of its completion says so.

        sequence: holds the first tokens of the prompt, which must be a list or array of checked token ids. The rest is
        prefilled to it, and the answer is generated on a fork, so all of the sequence is written by prefill. Leave it
        alone until the request has ended; then it is yours again, possibly suspended. ValueError with n above 1, and in
        a job of several processes.
        """
        if not isinstance(request, Request):
            raise TypeError(f"submit takes a kvjax.Request, got {type(request).__name__}: Request(prompt, Sampling(...))")
        if sequence is not None and (request.sampling.n > 1 or self._together is not None):
            raise ValueError("a request that continues a sequence has one sample, and runs in one process: leave out n, or the sequence")
        state = RequestState(Handle(request, (-request.priority, next(self._numbers))), sequence)
        if self._together is None:
            self._wait(state)
        else:
            with self.engine.guard, self._call("submit", dataclasses.replace(request, id=None)):
                self._wait(state)
        return state.handle

    def cancel(self, handle: Handle) -> None:
        """End a request at once, and free its pages. Its completion has the text so far and the reason "cancelled";
        with n above 1, `choices` has the samples that had started. Does nothing if it has finished."""
        if not isinstance(handle, Handle):
            raise TypeError(f"cancel takes what submit returned, got {type(handle).__name__}")
        with self.engine.guard:
            if handle.completion is not None:
                return
            state = next((each for each in self._requests() if each.handle is handle), None)
            if state is None:
                raise ValueError(f"{handle} was submitted to another scheduler: cancel it there")
            with self._call("cancel", handle.order[1]):
                self._end(state, None)

    def step(self) -> list[Handle]:
        """Admit requests that have room, launch a decode step and, with a bounded gap, slices of a prefill; read the
        step before.

        Without a bounded gap, a step ends after a chunk of a prompt that has more of them, and launches no decode step.
        Returns the requests that have finished or failed, but not cancelled ones. Does nothing if there is nothing to
        do. If `on_token` or `on_prefill` raises, or after Ctrl-C, the scheduler is as after a step: call `step` again,
        or `close`.
        """
        with interrupts:
            with self.engine.guard, self._call("step"):
                try:
                    self._admit()
                    if self._prefilling is not None:
                        self._interrupted()
                        self._read_rounds()
                    if self._gap is not None or self._prefilling is None:
                        self._slices = self._launch()
                finally:  # a later step would give tokens to samples that ended in this one
                    self._collect()
            while self._events:
                self.on_token(*self._events.popleft())
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Cancel all requests. Waits for another thread that uses the engine."""
        with self.engine.guard.when_free(), self._call("close"):
            for state in self._requests():
                self._end(state, None)
            self._events.clear()

    def _call(self, name: str, *given: Any) -> contextlib.AbstractContextManager[None]:
        """The block runs in all processes of the job, if there are several."""
        return ALONE if self._together is None else self._together.call(self, name, *given)

    def _requests(self) -> list[RequestState]:
        """The requests that have not ended."""
        entries = [*self._started(), *self._waiting, *filter(None, [self._prefilling])]
        return list(dict.fromkeys(each if isinstance(each, RequestState) else each.state for each in entries))

    # Admission

    def _wait(self, entry: RequestState | Sample) -> None:
        bisect.insort(self._waiting, entry, key=order)

    def _admit(self) -> None:
        """Fill free slots with waiting requests, in order, while there are pages for them, up to a chunk that does not
        end a prompt."""
        while True:
            if self._prefilling is not None:
                if self._gap is not None and self._batches:
                    return  # slices run with the decode steps
                self._prefill()
                if self._gap is not None or self._prefilling is not None:
                    return
                continue
            if not self._waiting or self.running >= self.slots or (self._short and self.running):
                return
            entry = self._waiting[0]
            state, error = (entry, self._look_at(entry)) if isinstance(entry, RequestState) else (entry.state, None)
            try:
                if error is None:
                    self._begin(entry)
            except OutOfPages as short:
                if self.on_short is not None and self.on_short(entry.given if isinstance(entry, RequestState) else entry.sequence):
                    continue
                if self.running:
                    self._short = True
                    return
                if others := [each for each in self._prompts() if each is not state]:
                    self._forget_prompt(others[-1])
                    continue
                error = short
            except Exception as failed:
                self._end(state, failed)
                raise
            if error is not None:
                self._end(state, error)
            self.engine.guard.interrupt_point()

    def _begin(self, entry: RequestState | Sample) -> None:
        """Resume or start the first that waits, or begin its prefill. OutOfPages changes nothing."""
        # Samples that will need another page find one, so that a request is not suspended right after its admission.
        growing = [one.sequence for one in self._running() if self.engine.grows(one.sequence, one.sampling.max_new_tokens - one.issued)]
        if isinstance(entry, Sample):
            self.engine.check_room(entry.sequence.length + 1, entry.sequence, growing)
            self.engine.resume(entry.sequence)
            self._waiting.remove(entry)
            self._run(entry, np.array(entry.ids[-1:], np.int32))
        elif entry.sequence is not None:
            self._start_sample(entry)
        else:
            sequence = entry.given or self.engine.new_sequence(entry.ids, cache_salt=entry.request.cache_salt)
            try:
                self.engine.check_room(len(entry.ids) + (entry.sampling.max_new_tokens > 1), sequence, growing)
                if sequence.suspended is not None:
                    self.engine.resume(sequence)
                self.engine.reserve([sequence], len(entry.ids) - sequence.length)
            except BaseException:
                if entry.given is None:
                    self.engine.free(sequence)
                raise
            entry.sequence = sequence
            if sequence.length == len(entry.ids):  # a given one, to which nothing was appended since its logits were computed
                return
            self._waiting.remove(entry)
            self._prefilling, entry.handle.found_tokens, entry.untold = entry, sequence.length, sequence.length

    def _look_at(self, state: RequestState) -> Exception | None:
        """Find tokens and policy of a request. Returns the error if it can never run, or None."""
        engine, sampling = self.engine, state.sampling
        if state.policy is not None:
            return None
        try:
            given = state.given is not None  # its tokens were checked when they were appended
            state.ids = state.request.prompt if given else encode(engine.model.tokenizer, state.request.prompt)
            state.handle.prompt_tokens, state.handle.prompt_end = len(state.ids), tuple(state.ids[-CONTEXT:])
            if sampling.stop and engine.model.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and the model has none")
            if not given:
                engine.check_tokens(state.ids)
            policy = self.policy if state.request.policy is None else engine.declared(state.request.policy)
            state.handle.sampling = sampling = engine.fitted(sampling, state.prompt_tokens, policy)
            longest = state.prompt_tokens + sampling.max_new_tokens - 1
            engine.check_length(longest, policy)
            engine.check_length(state.prompt_tokens)  # prefill needs all of it, whatever steps give back
            state.policy = engine.chosen(policy, [longest] * self.slots)
        except Exception as error:  # the caller's tokenizer, chat template or policy may raise anything
            return error
        return None

    def _prefill(self) -> None:
        """Run the next chunk of the prompt that is being prefilled."""
        self.engine.guard.interrupt_point()
        chunks = self._chunks(None)
        self._compile_with(chunks)
        if (result := self._run_plan(StepPlan(chunks=chunks))) is not None:
            self._prefilled(result.chunks)

    def _chunks(self, slices: int | None) -> tuple[Chunk, ...]:
        state = self._prefilling
        if state is None:
            return ()
        done = state.sequence.length
        # One token more than the chunk has room for, where there is one: then it computes no logits, which nobody
        # needs.
        return (Chunk(state.sequence, state.ids[done : done + self.engine.prefill_chunk + 1], slices),)

    def _prefilled(self, chunks: tuple[Prefilled | None, ...]) -> None:
        """Slices of a chunk ran. After the last chunk of a prompt the first sample starts."""
        if not chunks or chunks[0] is None:
            return
        state = self._prefilling
        if state.sequence.length == state.prompt_tokens:
            self._prefilling = None
            if state.sampling.n == 1 and state.given is None:
                try:
                    self._start_sample(state)
                except Exception as error:
                    self._end(state, error)
                    raise
            else:  # each sample takes pages, and waits for them like a request
                self._wait(state)
        elif self._has_time_to_trace(state):
            self._compile_ahead(state)
        if self.on_prefill is not None:  # last, since it may raise, or cancel the request
            chunks[0].wait()
            found, state.untold = state.untold, 0
            self.on_prefill(found + chunks[0].written)

    def _compile_with(self, chunks: tuple[Chunk, ...]) -> None:
        """If the program of a prompt's first chunk is new, compile what comes after the prompt beside it. What fails
        here fails again when the chunk runs."""
        if not self._by_clock or self._prefilling.begun:
            return
        self._prefilling.begun = True
        with contextlib.suppress(Exception):
            if self.engine.compile_chunk_ahead(chunks[0]):
                self._compile_ahead(self._prefilling)

    def _has_time_to_trace(self, state: RequestState) -> bool:
        """Whether what follows a prompt should be traced now, between two of its chunks. Where others decode, it is,
        because they would wait for the compiler, too."""
        done, chunk = state.sequence.length, self.engine.prefill_chunk
        if self._batches:
            return done >= min(AHEAD * chunk, state.prompt_tokens - chunk)
        return done >= AHEAD * chunk and state.prompt_tokens - done >= LONG_REST

    def _compile_ahead(self, state: RequestState) -> None:
        """Compile what comes after a prompt."""
        batch, sampling = self._batches.get(state.policy), state.sampling
        if sampling.max_new_tokens == 1:
            return
        others = [] if batch is None else [each for each in batch.samples if each is not None]
        samplings = [sampling, *(each.sampling for each in others)]
        reach = max(each.handle.prompt_tokens + each.sampling.max_new_tokens for each in (state, *others))
        samplings += [None] * (self._bucket - len(samplings))
        launches = self._launches.sizes(state.sequence.length, sampling.max_new_tokens)
        self.engine.compile_ahead(state.policy, state.sequence, reach, samplings, launches)

    # Samples

    def _start_sample(self, state: RequestState) -> None:
        """Give the next sample of a prefilled request its sequence, a fork of the prompt or for the last sample the
        prompt itself, and choose its first token, which is read later, so that the device can start the next prompt.
        OutOfPages changes nothing."""
        engine, index, last = self.engine, len(state.samples), len(state.samples) == state.sampling.n - 1
        sampling, logits = state.sampling, state.sequence.logits
        if index:
            sampling = dataclasses.replace(sampling, seed=derived_seed(sampling.seed, "sample", index))
        tokenizer = engine.model.tokenizer
        streamed = sampling.stop or (self._tokenizer is not None and self.on_token is not None)
        stop_ids = sampling.ends(engine.config.eos_token_ids)
        stream = TextStream(tokenizer, sampling.stop, state.handle.prompt_end) if streamed else None
        sample = Sample(state, index, sampling, state.sequence, stop_ids, stream)
        position = np.array([state.sequence.length], np.int32)
        token, packed = sample_first(logits, SamplingRows.of([sampling]), position, self._counts(sample))
        if not last or state.given is not None:  # after the choice of the token, because a fork copies a page, for which it need not wait
            sample.sequence = engine.fork(state.sequence)
        state.samples.append(sample)
        state.handle.started = True
        if last:
            state.sequence = None
            if state in self._waiting:
                self._waiting.remove(state)
        self._pending.append(PendingStep((sample,), packed))
        if sampling.max_new_tokens == 1:
            self._ending.append(sample)
        else:
            self._run(sample, token)

    def _run(self, sample: Sample, token: Int[Array, "1"]) -> None:
        """Give a sample a slot of its policy's batch. It continues with its latest token."""
        policy = sample.state.policy
        if policy not in self._batches:
            self._batches[policy] = Batch(policy, self._bucket, self.engine.config.vocab_size)
        self._batches[policy].put(sample, token, self._counts(sample))

    def _counts(self, sample: Sample) -> Int[np.ndarray, " V"] | None:
        """`seen_tokens` of the prompt and the answer, without its latest token, which the next step counts; None
        without a penalty."""
        if not sample.sampling.penalises:
            return None
        counts = seen_tokens(sample.state.ids, self.engine.config.vocab_size)
        np.add.at(counts, sample.ids[:-1], 2)
        return counts

    def _running(self) -> list[Sample]:
        return [sample for batch in self._batches.values() for sample in batch.samples if sample is not None]

    def _started(self) -> list[Sample]:
        """The samples that take a slot."""
        return [*self._running(), *self._ending]

    # Steps

    def _launch(self) -> int:
        """Launch the next step of every batch, and slices of a prefill with it; read the steps before. Returns how many
        slices were launched."""
        starting = self._prefilling is not None or (self._waiting and self.running < self.slots)
        steps = self._launches.steps if self._together is None else self._together.first(self._launches.steps)
        alone = self._single_step or bool(starting)
        groups = self._groups(1 if alone else steps, drafts=not alone)
        first = self._by_clock and any(each.active is None for each in self._pending)
        if first and any(self.engine.holds_up(group) for _, group in groups):
            self._read()  # a first token does not wait for the compiler
            return 0
        if not groups:
            self._read()
            return 0
        slices = 0
        if self._gap is not None and self._prefilling is not None:
            slices = self._gap.slices() if self._together is None else self._together.first(self._gap.slices())
            slices = min(slices, self.engine.slices_left(self._prefilling.sequence))
        chunks = self._chunks(slices) if slices else ()
        result = self._run_plan(StepPlan(tuple(group for _, group in groups), chunks))
        if result is None:
            return 0
        self._single_step = False
        pending = [batch.launched(group, decoded) for (batch, group), decoded in zip(groups, result.decodes, strict=True)]
        self._read()
        self._pending, self._slices_before = pending, self._slices
        self._prefilled(result.chunks)
        if any(step.rounds is not None and step.packed.is_ready() for step in pending):
            self._read()  # the engine had to wait for them
        return slices

    def _groups(self, steps: int, *, drafts: bool = False) -> list[tuple[Batch, DecodeGroup]]:
        """The batches with samples that want more tokens, and so many steps of each, or a round of drafting. By "auto"
        it is one step until the program of several is compiled, because one step needs no other program."""
        groups = []
        if not drafts:
            self._read_rounds()
        for batch in self._batches.values():
            group = self._rounds(batch) if drafts and self._drafts else None
            if (group := group or batch.group(steps)) is not None:
                groups.append((batch, group))
        if steps > 1 and self._launches.auto:
            of_steps = [group for _, group in groups if group.launch is not None and group.launch.draft is None]
            compiled = [self.engine.has_program(group) for group in of_steps]
            compiled = all(compiled) if self._together is None else self._together.first(all(compiled))
            return groups if compiled else self._groups(1, drafts=drafts)
        return groups

    def _rounds(self, batch: Batch) -> DecodeGroup | None:
        """The next rounds of a batch; None: it steps, which is faster, or their program is not compiled yet. What is
        in flight is read first, except rounds that are to go on."""
        longest = self.engine.config.max_positions
        goes_on = batch.goes_on and len(self._batches) == 1
        if batch.in_flight and not goes_on:
            self._read()

        def ready(rounds: Launch) -> bool:
            group = batch.group(1, rounds, longest)
            return group is not None and group.launch is not None and self.engine.has_program(group)

        rounds = self._drafting_of(batch.policy).next(ready)
        ahead = goes_on and rounds is not None and batch.continues(rounds)
        if self._pending and not ahead and (goes_on or rounds is not None):
            self._read()  # the time of steps is not that of the rounds after them
        group = None if rounds is None else batch.group(1, rounds, longest)
        return group and batch.with_history(group)

    def _read_rounds(self) -> None:
        """Read rounds in flight, if there are some: other things than rounds come now."""
        if any(step.rounds is not None for step in self._pending):
            self._read()

    def _drafting_of(self, policy: DecodePolicy) -> Drafting:
        if policy not in self._drafting:
            from kvjax.scheduler.drafting import Drafting

            self._drafting[policy] = Drafting(self._drafts, self.engine.page_size)
        return self._drafting[policy]

    def _interrupted(self) -> None:
        """Something else than decode steps runs before the next one is read."""
        self._launches.interrupted()
        for drafting in self._drafting.values():
            drafting.interrupted()

    def _run_plan(self, plan: StepPlan) -> StepResult | None:
        """Run a plan on the engine. Returns None if pages were missing: then nothing ran, and some pages were given
        back.

        Any other error ends every request that ran or was being prefilled, because part of the plan may have run.
        """
        try:
            if self._together is not None:
                self._together.compare(plan)
            return self.engine.step(plan)
        except OutOfPages as error:
            self._single_step = any(group.launch is not None for group in plan.decodes)
            self._make_room(error)
        except Exception as error:
            self._pending = []
            with contextlib.suppress(Exception):
                self.engine.settle()
            for state in dict.fromkeys([*(sample.state for sample in self._started()), *filter(None, [self._prefilling])]):
                self._end(state, error)
            raise
        return None

    def _read(self) -> None:
        """Wait for the tokens in flight, and give them to their samples."""
        pending, self._pending = self._pending, []
        steps, began = [step for step in pending if step.active is not None], time.perf_counter()
        for step in pending:
            if step.rounds is not None:
                self.engine.settle(step.packed)
            step.wait()
        if not pending:  # nothing ran
            self._launches.interrupted()
        elif not steps:
            self._interrupted()
        elif steps[-1].rounds is None:
            self._launches.read(steps[-1].steps, time.perf_counter() - began)
        else:
            self._launches.interrupted()
        for step in steps if self._drafts else ():
            self._drafting_of(step.policy).ended(step.tokens, drafted=step.rounds is not None)
        for step in pending:
            taken, ended = read(step, listening=self.on_token is not None)
            self._ended = self._ended or ended
            if self.on_token is not None:
                self._events += [(sample.state.request, token, piece) for sample, token, piece in taken]
            if self._gap is not None and steps and step is steps[-1]:
                self._gap.steps_read(self._slices_before, step.steps)
        if self._gap is not None and not steps:
            self._gap.idle()

    def _make_room(self, error: OutOfPages) -> None:
        """A plan lacked pages. Free those of samples that have just ended. If none has, and the plan had several steps
        in one launch, free nothing: the next plan has one step, and may need fewer. Else free those of the youngest
        request of the lowest priority."""
        self._read()
        if self._collect() or self._single_step or (self.on_short is not None and self.on_short(None)):
            return
        *others, last = sorted([*self._running(), *self._prompts()], key=order)
        self._short = True
        if not others:  # sequences outside this scheduler hold the pages
            self._end(last if isinstance(last, RequestState) else last.state, error)
        elif isinstance(last, RequestState):
            self._forget_prompt(last)
        else:
            for sequence in filter(None, (last.sequence, last.state.given)):  # they share pages
                if sequence.suspended is None:
                    self.engine.suspend(sequence, briefly=sequence is last.sequence)
            self._leave(last)
            self._wait(last)
            self.preemptions += 1

    def _prompts(self) -> list[RequestState]:
        """Requests whose prompts hold pages, in order: those with samples that have not started, and the one that is
        being prefilled."""
        held = [each for each in self._waiting if isinstance(each, RequestState) and each.sequence is not None]
        return held if self._prefilling is None else sorted([*held, self._prefilling], key=order)

    def _forget_prompt(self, state: RequestState) -> None:
        """Free a prompt. It is prefilled again, with the same bits, when its turn comes. A given sequence is
        suspended."""
        if state.given is None:
            self.engine.free(state.sequence)
        else:
            self._finish_chunk(state)
            self.engine.suspend(state.sequence)
        state.sequence = None
        if self._prefilling is state:
            self._prefilling = None
            self._wait(state)
        self.preemptions += 1

    def _finish_chunk(self, state: RequestState) -> None:
        """Run the rest of a chunk that has begun, whose pages are there, so that the given sequence can be used
        again."""
        if self._prefilling is state and self.engine.slices_left(state.sequence) < self.engine.slices_left(None):
            self.engine.step(StepPlan(chunks=self._chunks(None)))

    def _collect(self) -> bool:
        """Free ended samples, and complete the requests whose samples have all ended. Returns whether pages came
        back."""
        if not self._ended:
            return False
        self._ended = False
        ended = [sample for sample in self._started() if sample.finish_reason is not None]
        for sample in ended:
            if sample.finish_reason != "error":  # what a page holds must be known where it is kept for later prompts
                sequence, known = sample.sequence, sample.state.prompt_tokens + len(sample.ids) - 1
                if (self._launches.most > 1 or self._drafts) and known < sequence.length:
                    sequence.length = known  # it has ended in the middle of a launch
                sequence.tokens += sample.ids[: sequence.length - len(sequence.tokens)]
            self._drop(sample)
        for state in dict.fromkeys(sample.state for sample in ended):
            self._settle(state)
        return bool(ended)

    def _settle(self, state: RequestState) -> None:
        """Complete a request if all its samples have ended."""
        samples = state.samples
        if len(samples) == state.sampling.n and all(each.finish_reason is not None for each in samples):
            self._complete(state)
            self._finished.append(state.handle)

    def _drop(self, sample: Sample) -> None:
        """Take a sample out of its slot, and free its sequence."""
        self._leave(sample)
        self._free(sample.sequence)
        self._short = False

    def _free(self, sequence: CachedSequence) -> None:
        """Free a sequence, unless the caller has done so, against the rules: then its request still ends."""
        if sequence in self.engine.sequences:
            self.engine.free(sequence)

    def _leave(self, sample: Sample) -> None:
        """Take a sample out of its slot."""
        if sample in self._ending:
            self._ending.remove(sample)
            return
        batch = self._batches[sample.state.policy]
        batch.remove(sample)
        if not len(batch):
            del self._batches[sample.state.policy]

    def _complete(self, state: RequestState) -> None:
        """Make the completion of a request whose samples have ended."""
        choices = tuple(each.completion(self._tokenizer, self.engine.spec.kv_heads) for each in state.samples)
        failed = next((choice for choice in choices if choice.error is not None), None)
        several = state.sampling.n > 1
        state.handle.completion = failed or (dataclasses.replace(choices[0], choices=choices) if several else choices[0])
        state.ids = ()

    def _end(self, state: RequestState, error: Exception | None) -> None:
        """End a request early: it was cancelled (error: None), or it cannot run. Everything it holds is freed."""
        running = set(self._started())
        for sample in state.samples:
            if sample in running:
                self._drop(sample)
            else:
                self._free(sample.sequence)
            if sample.finish_reason is None:
                sample.cancel()
        if state.sequence is not None:
            if state.given is None:
                self._free(state.sequence)
            elif error is None:
                self._finish_chunk(state)
            state.sequence = None
        self._waiting = [each for each in self._waiting if each is not state and getattr(each, "state", None) is not state]
        if self._prefilling is state:
            self._prefilling = None
        self._short = False
        if error is None and state.samples:
            self._complete(state)
            if state.handle.completion.error is None:
                state.handle.completion = dataclasses.replace(state.handle.completion, finish_reason="cancelled")
            return
        state.ids = ()
        reason = "cancelled" if error is None else "error"
        state.handle.completion = Completion(finish_reason=reason, prompt_tokens=state.prompt_tokens, error=error)
        if error is not None:
            self._finished.append(state.handle)


def _drafts_of(engine: Engine, draft: str | DecodePolicy, rows: int) -> tuple[Draft, ...]:
    """See `kvjax.scheduler.drafting.drafts_of`."""
    from kvjax.scheduler.drafting import drafts_of

    return drafts_of(engine, draft, rows)
