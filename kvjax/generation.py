"""The token loop: ragged batches over a fixed number of slots, sampling, stopping, streaming."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import OutOfPages
from kvjax.cache.tables import table_width
from kvjax.checks import check_model, whole_number
from kvjax.engine import Engine
from kvjax.model import Model
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.prefill import PrefillPolicy
from kvjax.prompts import Prompt, encode, one_by_one
from kvjax.sampling import NotFinite, OneSample, Sampled, Sampling, SamplingOptions, SamplingRows, sample_step, seen_tokens
from kvjax.sequences import CachedSequence
from kvjax.steps import Reads
from kvjax.text import TextStream

DEFAULT_SLOTS = 8
SHORT = reprlib.Repr(maxstring=60, maxother=200)
"""Cuts prompts, texts and token ids to what can be read at a glance."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt (text, token ids, or chat messages) and how to continue it. `id` is the caller's own."""

    prompt: Prompt
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    id: Any = None

    def __repr__(self) -> str:
        return f"Request({SHORT.repr(self.prompt)}, {self.sampling}, id={SHORT.repr(self.id)})"


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request.

    text: the continuation without stop string and special tokens. token_ids: every generated token, the one that ended it included.
    logprobs: one per token, where asked for; top_logprobs: per token the pairs (token id, log-probability) of the most likely ones, best
    first, where asked for. finish_reason: "stop" (stop token or string), "length" (max_new_tokens) or "error". choices: with n above 1,
    every sample in order, of which this is the first; else (). blocks_per_step and keys_per_step: what one KV head of one layer read on
    average per decoded token (0 if no step was taken). error: what went wrong; everything else is then empty.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "length"
    prompt_tokens: int = 0
    blocks_per_step: float = 0.0
    keys_per_step: float = 0.0
    error: Exception | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    choices: tuple[Completion, ...] = ()

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Completion(error={SHORT.repr(self.error)})"
        counts = f"tokens={len(self.token_ids)}, keys_per_step={self.keys_per_step:.0f}"
        return f"Completion({SHORT.repr(self.text)}, finish_reason={self.finish_reason!r}, {counts})"


OnToken = Callable[[Request, int, str], None]
"""Called with the request, the token id, and the text that became certain with it (possibly empty)."""


def run(
    engine: Engine,
    requests: Iterable[Request],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    on_token: OnToken | None = None,
    on_prefill: Callable[[int], None] | None = None,
) -> Iterator[tuple[Request, Completion]]:
    """Run requests over `slots` places (None: 8, or the engine's largest batch bucket) and yield each with its completion as it finishes.

    A place that becomes free takes the next request, so the batch keeps its size and a request's bits do not depend on which others run.
    A request that cannot be run (too long, a bad token, more pages than the pool has), or for which the model gives NaN (`NotFinite`),
    yields a completion with `error` and the loop goes on. Each sample of a request with n above 1 takes a place; the prompt is prefilled
    once and forked. on_prefill: called with the number of prompt tokens done. While a request with a penalty runs, the tokens of every
    place are counted on the device, in `[bucket, V]` int32 (4.9 MB for 8 places and 152K tokens).
    """
    loop = _Loop(engine, policy, slots, on_token, on_prefill)
    try:
        yield from loop.run(iter(requests))
    finally:
        loop.release()


@overload
def generate(
    model: Model | Engine,
    prompts: str,
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[False] = False,
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> str: ...
@overload
def generate(
    model: Model | Engine,
    prompts: str,
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[True],
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> Completion: ...
@overload
def generate(
    model: Model | Engine,
    prompts: Sequence[str],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[False] = False,
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> list[str]: ...
@overload
def generate(
    model: Model | Engine,
    prompts: Sequence[str],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[True],
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> list[Completion]: ...
@overload
def generate(
    model: Model | Engine,
    prompts: Prompt | Sequence[Prompt],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: bool = False,
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **sampling: Unpack[SamplingOptions],
) -> Any: ...
def generate(
    model: Model | Engine,
    prompts: Prompt | Sequence[Prompt],
    *misplaced: Any,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: bool = False,
    slots: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **sampling: Any,
) -> Any:
    """Continue one prompt (text gives text) or several (a list gives a list).

    A prompt is text, a list of token ids, a list of chat messages (`{"role": ..., "content": ...}`, through the model's chat template with
    `chat_template_kwargs` as its variables), or what a Hugging Face tokenizer returns, for one text or several.

    model: a model, for which a pool is made that fits these prompts, or an engine. policy: the decode policy; None is the engine's own,
    dense for a model. prefill: the prefill policy, for a model; None is dense. An engine has its own, so with one a prefill policy is a
    ValueError. sampling: fields of `kvjax.Sampling`; of equal prompts the second draws with seed + 1, and so on. stream: called with the
    prompt's number and each new piece of text. details: return `Completion` objects instead of text. With n above 1, a list of n texts
    stands in the place of each text. on_error: "raise" raises what `Completion.error` would hold; with "return" the other prompts go on,
    and that error stands in the place of the text.
    """
    if misplaced:
        hint = "give its fields by name, as in temperature=0.7" if isinstance(misplaced[0], Sampling) else "name every other argument"
        raise TypeError(f"generate takes a model and prompts; {misplaced[0]!r:.60} came third: {hint}")
    if on_error not in ("raise", "return"):
        raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
    if stream is not None and not callable(stream):
        raise ValueError(f"stream must be a function, as in stream=lambda number, text: print(text, end=''), got {stream!r:.60}")
    if not isinstance(model, Engine):
        check_model(model, "generate")
    listed, single = one_by_one(prompts)
    settings = Sampling(**sampling)
    if isinstance(model, Engine) and prefill is not None:
        raise ValueError(f"prefill {prefill} was given with an engine, which prefills by its own policy: name it in Engine(prefill=...)")
    if stream is not None and settings.n > 1:
        raise ValueError(f"stream shows one sample of a prompt, and n is {settings.n}: leave one of them out")
    wanted = max(1, min(len(listed) * settings.n, DEFAULT_SLOTS)) if slots is None else whole_number("slots", slots, 1)
    tokenizer = model.model.tokenizer if isinstance(model, Engine) else model.tokenizer
    results: list[Completion | None] = [None] * len(listed)
    encoded: dict[int, tuple[int, ...]] = {}
    for number, prompt in enumerate(listed):
        try:
            encoded[number] = tuple(encode(tokenizer, prompt, chat_template_kwargs))
        except ValueError as error:
            if on_error == "raise":
                raise _of_prompt(error, number, listed) from error.__cause__
            results[number] = Completion(finish_reason="error", error=error)
    several = (list(encoded.values()), settings.max_new_tokens, policy, wanted, prefill, settings.n)
    engine = model if isinstance(model, Engine) else engine_for(model, *several)
    if slots is None:
        wanted = min(wanted, engine.batch_buckets[-1])
    requests = []
    seen: collections.Counter = collections.Counter()
    for number, prompt in encoded.items():
        # Equal prompts in one list are different samples; the first of them is what it would be alone.
        own = dataclasses.replace(settings, seed=(settings.seed + seen[prompt]) % 2**32)
        seen[prompt] += settings.n
        requests.append(Request(prompt, own, number))
    on_token = None if stream is None else (lambda request, _, piece: stream(request.id, piece))
    for request, completion in run(engine, requests, policy=policy, slots=wanted, on_token=on_token):
        if completion.error is not None and on_error == "raise":
            raise _of_prompt(completion.error, request.id, listed)
        results[request.id] = completion
    answers = results if details else [_text(completion) for completion in results]
    return answers[0] if single else answers


def _shown_signature() -> inspect.Signature:
    """`generate` with the fields of Sampling one by one, as a notebook completes and shows it."""
    own = [each for each in inspect.signature(generate).parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    fields = [each.replace(kind=each.KEYWORD_ONLY) for each in inspect.signature(Sampling).parameters.values()]
    return inspect.Signature([*own, *fields])


generate.__signature__ = _shown_signature()


def _of_prompt(error: Exception, number: int, prompts: Sequence[Prompt]) -> Exception:
    """The error, with a note of which prompt it is about, where there are several."""
    if len(prompts) > 1:
        error.add_note(f'prompt {number} of {len(prompts)}, counted from 0; on_error="return" keeps the answers to the others')
    return error


def _text(completion: Completion) -> str | list[str] | Exception:
    if completion.error is not None:
        return completion.error
    return [choice.text for choice in completion.choices] if completion.choices else completion.text


def engine_for(
    model: Model,
    prompts: Sequence[Prompt],
    new_tokens: int,
    policy: str | DecodePolicy | None,
    slots: int,
    prefill: str | PrefillPolicy | None = None,
    samples: int = 1,
) -> Engine:
    """An engine whose pool holds the `slots` longest of these prompts at once, rounded up so that later calls find the steps compiled."""
    longest = model.config.max_positions  # a longer one is refused when its turn comes
    lengths = [(min(len(encode(model.tokenizer, prompt)) + new_tokens, longest), samples) for prompt in prompts]
    pages = table_width(pages_needed(lengths, slots, 128))
    return Engine(model, "dense" if policy is None else policy, pages=pages, prefill="dense" if prefill is None else prefill)


def pages_needed(requests: Iterable[tuple[int, int]], slots: int, page_size: int) -> int:
    """Pages that the `slots` longest of these requests take at once. requests: of each its tokens, prompt and answer, and its samples."""
    pages = [(-(-tokens // page_size), samples) for tokens, samples in requests]
    # A prompt waits in a page of its own until the last of its samples has a place.
    longest = heapq.nlargest(slots, (count for count, samples in pages for _ in range(min(samples, slots))))
    return sum(longest) + any(samples > 1 for _, samples in pages)


@dataclasses.dataclass(eq=False)
class _Prefilled:
    """A request whose prompt is in the cache: `started` of its samples have or had a place, `done` are finished.

    seen: `seen_tokens` of the prompt, where the request has a penalty. The last sample takes over `sequence`.
    """

    request: Request
    sequence: CachedSequence | None
    prompt_tokens: int
    seen: Int[np.ndarray, " V"] | None
    started: int = 0
    done: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Row:
    """A sample of a request in its place: what it has written and what is still on its way (`issued` counts both)."""

    prefilled: _Prefilled
    index: int
    sampling: Sampling
    sequence: CachedSequence
    stream: TextStream | None
    stop_ids: frozenset[int]
    issued: int = 1
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    steps: int = 0
    blocks: int = 0
    keys: int = 0
    finish_reason: str | None = None
    error: NotFinite | None = None


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose results the host has not read."""

    rows: list[_Row | None]
    sampled: Sampled
    reads: Reads


class _Loop:
    """Slots, the step in flight, and the books of one `run`.

    The next step is dispatched before the last one's tokens are read, so the device does not wait for the host; a row that turns out to
    have stopped has then decoded one token too many, which is dropped (its page was reserved).
    """

    def __init__(self, engine: Engine, policy, slots: int | None, on_token, on_prefill):
        slots = min(DEFAULT_SLOTS, engine.batch_buckets[-1]) if slots is None else whole_number("slots", slots, 1)
        bucket = next((size for size in engine.batch_buckets if size >= slots), None)
        if bucket is None:
            raise ValueError(f"{slots} slots are more than the largest batch bucket, {engine.batch_buckets[-1]}")
        self.engine, self.on_token, self.on_prefill = engine, on_token, on_prefill
        self.policy = engine.declared(policy)
        self.rows: list[_Row | None] = [None] * bucket
        self.usable = slots
        self.tokens = jnp.zeros(bucket, jnp.int32)
        self.flight: _Flight | None = None
        self.sampling_rows: SamplingRows | None = None
        self.counts: Int[Array, "B V"] | None = None  # tokens of every place, while a row has a penalty
        self.waiting: Request | _Prefilled | None = None
        self.short = False  # pages did not suffice for `waiting`, and none came back since

    def run(self, source: Iterator[Request]) -> Iterator[tuple[Request, Completion]]:
        while True:
            for place in range(self.usable):
                while self.rows[place] is None and not self.short:
                    self.waiting = self.waiting or next(source, None)
                    if self.waiting is None:
                        break
                    with self.engine.guard:  # no Ctrl-C between the prefill and where `release` finds the sequence
                        refused = self._admit(place)
                    if refused is not None:
                        yield refused
            if not any(self.rows):
                if self.waiting is None:
                    return
                continue
            with self.engine.guard:
                landed = self.flight
                self.flight = self._dispatch()
                if landed is not None:
                    self._read(landed)
            yield from self._finished()

    def release(self) -> None:
        """Free what still runs: the caller stopped early, or something failed. Waits for another thread that uses the engine."""
        with self.engine.guard.when_free():
            waiting = self.waiting.sequence if isinstance(self.waiting, _Prefilled) else None
            for sequence in [waiting, *(row.sequence for row in self.rows if row)]:
                if sequence is not None:
                    self.engine.free(sequence)
            self.rows, self.waiting = [None] * len(self.rows), None

    def _admit(self, place: int) -> tuple[Request, Completion] | None:
        """Prefill the request that waits, unless it is, and start a sample of it in a place.

        It goes on waiting while it has further samples, or where pages are short only because others run. Returns it with its completion if
        it failed.
        """
        request = self.waiting.request if isinstance(self.waiting, _Prefilled) else self.waiting
        ids: list[int] = []
        try:
            if not isinstance(self.waiting, _Prefilled):
                ids = encode(self.engine.model.tokenizer, request.prompt)
                self._check(request, ids)
            try:
                if not isinstance(self.waiting, _Prefilled):
                    self.waiting = self._prefill(request, ids)
                sequence = self._take_sequence(self.waiting)
            except OutOfPages:
                if any(self.rows):
                    self.short = True
                    return None
                raise
        except (ValueError, OutOfPages) as error:
            if isinstance(self.waiting, _Prefilled):
                self.engine.free(self.waiting.sequence)
            self.waiting = None
            return request, Completion(finish_reason="error", prompt_tokens=len(ids), error=error)
        prefilled = self.waiting
        self.waiting = None if prefilled.sequence is None else prefilled
        self._start(place, prefilled, sequence)
        return None

    def _check(self, request: Request, ids: list[int]) -> None:
        """Raise for what cannot run, however many pages come back."""
        if request.sampling.stop and self.engine.model.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        self.engine.check_length(len(ids) + request.sampling.max_new_tokens - 1)

    def _prefill(self, request: Request, ids: list[int]) -> _Prefilled:
        sampling = request.sampling
        reserve = sampling.max_new_tokens - 1 if sampling.n == 1 else 0  # several samples reserve pages of their own
        (sequence,) = self.engine.prefill([ids], reserve=reserve, on_tokens=self.on_prefill)
        seen = seen_tokens(ids, self.engine.config.vocab_size) if sampling.penalises else None
        return _Prefilled(request, sequence, len(ids), seen)

    def _take_sequence(self, prefilled: _Prefilled) -> CachedSequence:
        """The sequence of the next sample: a fork of the prompt, or for the last sample the prompt itself. OutOfPages changes nothing."""
        sampling, last = prefilled.request.sampling, prefilled.started == prefilled.request.sampling.n - 1
        sequence = prefilled.sequence if last else self.engine.fork(prefilled.sequence)
        try:
            self.engine.reserve([sequence], sampling.max_new_tokens - 1)
        except OutOfPages:
            if not last:
                self.engine.free(sequence)
            raise
        prefilled.started += 1
        prefilled.sequence = None if last else prefilled.sequence
        return sequence

    def _start(self, place: int, prefilled: _Prefilled, sequence: CachedSequence) -> None:
        """Put a sample into a place and choose its first token."""
        engine, index, sampling = self.engine, prefilled.started - 1, prefilled.request.sampling
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + index) % 2**32)
        stream = None if engine.model.tokenizer is None else TextStream(engine.model.tokenizer, sampling.stop)
        stop_ids = sampling.stop_token_ids
        if stop_ids is None:
            stop_ids = () if sampling.ignore_eos else engine.config.eos_token_ids
        self.rows[place] = row = _Row(prefilled, index, sampling, sequence, stream, frozenset(stop_ids))
        self.sampling_rows = None
        counts = None
        if prefilled.seen is not None:
            if self.counts is None:
                self.counts = jnp.zeros((len(self.rows), engine.config.vocab_size), jnp.int32)
            self.counts, counts = _set_counts(self.counts, place, prefilled.seen), prefilled.seen[None]
        position = np.array([sequence.length], np.int32)
        sampled = sample_step(sequence.logits[None], SamplingRows.of([sampling]), position, counts)
        self.tokens = self.tokens.at[place].set(sampled.tokens[0])
        self._take(row, jax.device_get(sampled), 0)

    def _dispatch(self) -> _Flight | None:
        """Start one step for the rows that want more tokens than they have or await."""
        rows = [row if row and row.finish_reason is None and row.issued < row.sampling.max_new_tokens else None for row in self.rows]
        if not any(rows):
            return None
        if self.sampling_rows is None:
            self.sampling_rows = SamplingRows.of([row.sampling if row else None for row in self.rows])
            self.counts = self.counts if self.sampling_rows.penalises else None
        slots = [row.sequence if row else None for row in rows]
        sampled = self.engine.decode_and_sample(slots, self.tokens, self.sampling_rows, self.policy, counts=self.counts)
        self.tokens, self.counts = sampled.tokens, sampled.counts
        for row in rows:
            if row:
                row.issued += 1
        return _Flight(rows, sampled.replace(counts=None), self.engine.last_reads)

    def _read(self, flight: _Flight) -> None:
        """Fold a step's results into its rows; rows that had ended before it are left alone."""
        sampled, reads = jax.device_get((flight.sampled, flight.reads))
        for place, row in enumerate(flight.rows):
            if row is None or row.finish_reason is not None:
                continue
            row.steps += 1
            row.blocks += int(reads.blocks[place])
            row.keys += int(reads.keys[place])
            self._take(row, sampled, place)

    def _take(self, row: _Row, sampled: Sampled, place: int) -> None:
        """One more token of a row, read from the device: its text, and whether it ends it. Logits that are not finite end it too."""
        if not sampled.finite[place]:
            row.error, row.finish_reason = NotFinite(row.prefilled.prompt_tokens + len(row.ids)), "error"
            return
        token = int(sampled.tokens[place])
        row.ids.append(token)
        row.logprobs.append(float(sampled.logprobs[place]))
        if count := row.sampling.top_logprobs:
            best = zip(sampled.top_tokens[place, :count].tolist(), sampled.top_logprobs[place, :count].tolist(), strict=True)
            row.top_logprobs.append(tuple((token, value) for token, value in best if value > -np.inf))  # no token that is never chosen
        ends = token in row.stop_ids
        piece = "" if ends or row.stream is None else row.stream.push(token)
        if ends or (row.stream is not None and row.stream.stopped):
            row.finish_reason = "stop"
        elif len(row.ids) == row.sampling.max_new_tokens:
            row.finish_reason = "length"
        if row.finish_reason and row.stream is not None:
            piece += row.stream.close()
        if self.on_token:
            self.on_token(row.prefilled.request, token, piece)

    def _finished(self) -> Iterator[tuple[Request, Completion]]:
        """Free the places of rows that ended; yield the requests whose samples have all ended, with their completions."""
        for place, row in enumerate(self.rows):
            if row is None or row.finish_reason is None:
                continue
            with self.engine.guard:
                self.engine.free(row.sequence)
                self.rows[place], self.short = None, False
            request, done = row.prefilled.request, row.prefilled.done
            done[row.index] = self._completion(row)
            if request.sampling.n == 1:
                yield request, done[0]
            elif len(done) == request.sampling.n:
                choices = tuple(done[index] for index in range(len(done)))
                failed = next((choice for choice in choices if choice.error is not None), None)
                yield request, failed or dataclasses.replace(choices[0], choices=choices)

    def _completion(self, row: _Row) -> Completion:
        if row.error is not None:
            return Completion(finish_reason="error", prompt_tokens=row.prefilled.prompt_tokens, error=row.error)
        heads = self.engine.spec.kv_heads * max(row.steps, 1)
        return Completion(
            text=row.stream.text if row.stream else "",
            token_ids=tuple(row.ids),
            logprobs=tuple(row.logprobs) if row.sampling.logprobs else None,
            top_logprobs=tuple(row.top_logprobs) if row.sampling.top_logprobs else None,
            finish_reason=row.finish_reason,
            prompt_tokens=row.prefilled.prompt_tokens,
            blocks_per_step=row.blocks / heads,
            keys_per_step=row.keys / heads,
        )


@functools.partial(jax.jit, donate_argnames="counts")
def _set_counts(counts: Int[Array, "B V"], place: Int[Array, ""], row: Int[Array, " V"]) -> Int[Array, "B V"]:
    """Counts of a place replaced. DONATES counts."""
    return counts.at[place].set(row)
