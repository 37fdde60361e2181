"""The token loop: ragged batches over a fixed number of slots, sampling, stopping, streaming."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import OutOfPages
from kvjax.engine import MIN_TABLE_PAGES, CachedSequence, Engine
from kvjax.model import Model
from kvjax.policies import DecodePolicy
from kvjax.prefill import PrefillPolicy
from kvjax.sampling import NotFinite, Sampled, Sampling, SamplingRows, sample_step
from kvjax.steps import Reads
from kvjax.text import TextStream

DEFAULT_SLOTS = 8
Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt (text, or token ids) and how to continue it. `id` is the caller's own."""

    prompt: Prompt
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    id: Any = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request.

    text: the continuation without stop string and special tokens. token_ids: every generated token, the one that ended it included.
    logprobs: one per token, where asked for. finish_reason: "stop" (stop token or string), "length" (max_new_tokens) or "error".
    blocks_per_step and keys_per_step: what one KV head of one layer read on average per decoded token (0 if no step was taken). error:
    what went wrong; everything else is then empty.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "length"
    prompt_tokens: int = 0
    blocks_per_step: float = 0.0
    keys_per_step: float = 0.0
    error: Exception | None = None


OnToken = Callable[[Request, int, str], None]
"""Called with the request, the token id, and the text that became certain with it (possibly empty)."""


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; ids stay as they are. ValueError for neither text nor ids, and for text without a tokenizer that reads it."""
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is text or a list of token ids, got {prompt!r:.60}") from error
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: pass token ids instead of text")
    try:
        return list(tokenizer(prompt)["input_ids"])
    except Exception as error:  # whatever a tokenizer raises is about this prompt, and others may go on
        raise ValueError(f"the tokenizer cannot read the prompt: {error}") from error


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
    yields a completion with `error` and the loop goes on. on_prefill: called with the number of prompt tokens done.
    """
    loop = _Loop(engine, policy, slots, on_token, on_prefill)
    try:
        yield from loop.run(iter(requests))
    finally:
        loop.release()


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt (text, or a row of token ids) rather than several."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0)


def generate(
    model: Model | Engine,
    prompts: Prompt | Sequence[Prompt],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: bool = False,
    slots: int | None = None,
    **sampling: Any,
) -> Any:
    """Continue one prompt (text gives text) or several (a list gives a list).

    model: a model, for which a pool is made that fits these prompts, or an engine. policy: the decode policy; None is the engine's own,
    dense for a model. prefill: the prefill policy, for a model; None is dense. An engine has its own, so with one a prefill policy is a
    ValueError. sampling: fields of `kvjax.Sampling`; of equal prompts the second draws with seed + 1, and so on. stream: called with the
    prompt's number and each new piece of text. details: return `Completion` objects instead of text. Prompts may be lists of
    token ids. Raises what `Completion.error` would hold.
    """
    single = is_single(prompts)
    listed = [prompts] if single else list(prompts)
    settings = Sampling(**sampling)
    if isinstance(model, Engine) and prefill is not None:
        raise ValueError(f"prefill {prefill} was given with an engine, which prefills by its own policy: name it in Engine(prefill=...)")
    wanted = max(1, min(len(listed), DEFAULT_SLOTS)) if slots is None else slots
    engine = model if isinstance(model, Engine) else engine_for(model, listed, settings.max_new_tokens, policy, wanted, prefill)
    if slots is None:
        wanted = min(wanted, engine.batch_buckets[-1])
    requests = []
    seen: collections.Counter = collections.Counter()
    for number, prompt in enumerate(listed):
        prompt = prompt if isinstance(prompt, str) else tuple(encode(None, prompt))
        # Equal prompts in one list are different samples; the first of them is what it would be alone.
        own = dataclasses.replace(settings, seed=(settings.seed + seen[prompt]) % 2**32)
        seen[prompt] += 1
        requests.append(Request(prompt, own, number))
    on_token = None if stream is None else (lambda request, _, piece: stream(request.id, piece))
    results: list[Completion | None] = [None] * len(requests)
    for request, completion in run(engine, requests, policy=policy, slots=wanted, on_token=on_token):
        if completion.error is not None:
            raise completion.error
        results[request.id] = completion
    answers = results if details else [completion.text for completion in results]
    return answers[0] if single else answers


def engine_for(
    model: Model,
    prompts: Sequence[Prompt],
    new_tokens: int,
    policy: str | DecodePolicy | None,
    slots: int,
    prefill: str | PrefillPolicy | None = None,
) -> Engine:
    """An engine whose pool holds the `slots` longest of these prompts at once, rounded up so that later calls find the steps compiled."""
    lengths = sorted((len(encode(model.tokenizer, prompt)) + new_tokens for prompt in prompts), reverse=True)
    pages = sum(-(-length // 128) for length in lengths[:slots])
    pages = max(MIN_TABLE_PAGES, 1 << (max(pages, 1) - 1).bit_length())
    return Engine(model, "dense" if policy is None else policy, pages=pages, prefill="dense" if prefill is None else prefill)


@dataclasses.dataclass(eq=False)
class _Row:
    """A request in its place: what it has written and what is still on its way (`issued` counts both)."""

    request: Request
    sequence: CachedSequence
    stream: TextStream | None
    stop_ids: frozenset[int]
    prompt_tokens: int
    issued: int = 1
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
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
        slots = min(DEFAULT_SLOTS, engine.batch_buckets[-1]) if slots is None else slots
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
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

    def run(self, source: Iterator[Request]) -> Iterator[tuple[Request, Completion]]:
        waiting: Request | None = None
        exhausted = short = False  # short: pages did not suffice for `waiting`, and none came back since
        while True:
            for place in () if short else range(self.usable):
                while self.rows[place] is None and not exhausted:
                    request = waiting if waiting is not None else next(source, None)
                    waiting = None
                    if request is None:
                        exhausted = True
                        break
                    outcome = self._admit(place, request)
                    if outcome == "wait":
                        waiting, short = request, True
                        break
                    if isinstance(outcome, Completion):
                        yield request, outcome
                if short:
                    break
            if not any(self.rows):
                if waiting is None:
                    return
                continue
            landed = self.flight
            self.flight = self._dispatch()
            if landed is not None:
                self._read(landed)
            for finished in self._finished():
                short = False
                yield finished

    def release(self) -> None:
        """Free what still runs: the caller stopped early, or something failed."""
        for row in self.rows:
            if row is not None:
                self.engine.free(row.sequence)
        self.rows = [None] * len(self.rows)

    def _admit(self, place: int, request: Request) -> Completion | str | None:
        """Prefill a request into a place and sample its first token.

        Returns its completion if it failed, "wait" if pages are short only because others run, None if it runs now.
        """
        engine, sampling = self.engine, request.sampling
        prompt_tokens = 0
        try:
            ids = encode(engine.model.tokenizer, request.prompt)
            prompt_tokens = len(ids)
            if sampling.stop and engine.model.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and the model has none")
            engine.check_length(len(ids) + sampling.max_new_tokens - 1)
            try:
                (sequence,) = engine.prefill([ids], reserve=sampling.max_new_tokens - 1, on_tokens=self.on_prefill)
            except OutOfPages:
                if any(self.rows):
                    return "wait"
                raise
        except (ValueError, OutOfPages) as error:
            return Completion(finish_reason="error", prompt_tokens=prompt_tokens, error=error)
        stream = None if engine.model.tokenizer is None else TextStream(engine.model.tokenizer, sampling.stop)
        stop_ids = engine.config.eos_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        row = _Row(request, sequence, stream, frozenset(stop_ids), len(ids))
        self.rows[place] = row
        self.sampling_rows = None
        position = np.array([sequence.length], np.int32)
        sampled = sample_step(sequence.logits[None], SamplingRows.of([sampling]), position)
        self.tokens = self.tokens.at[place].set(sampled.tokens[0])
        self._take(row, jax.device_get(sampled), 0)
        return None

    def _dispatch(self) -> _Flight | None:
        """Start one step for the rows that want more tokens than they have or await."""
        rows = [
            row if row and row.finish_reason is None and row.issued < row.request.sampling.max_new_tokens else None for row in self.rows
        ]
        if not any(rows):
            return None
        if self.sampling_rows is None:
            self.sampling_rows = SamplingRows.of([row.request.sampling if row else None for row in self.rows])
        slots = [row.sequence if row else None for row in rows]
        sampled = self.engine.decode_and_sample(slots, self.tokens, self.sampling_rows, self.policy)
        self.tokens = sampled.tokens
        for row in rows:
            if row:
                row.issued += 1
        return _Flight(rows, sampled, self.engine.last_reads)

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
            row.error, row.finish_reason = NotFinite(row.prompt_tokens + len(row.ids)), "error"
            return
        token = int(sampled.tokens[place])
        row.ids.append(token)
        row.logprobs.append(float(sampled.logprobs[place]))
        ends = token in row.stop_ids
        piece = "" if ends or row.stream is None else row.stream.push(token)
        if ends or (row.stream is not None and row.stream.stopped):
            row.finish_reason = "stop"
        elif len(row.ids) == row.request.sampling.max_new_tokens:
            row.finish_reason = "length"
        if row.finish_reason and row.stream is not None:
            piece += row.stream.close()
        if self.on_token:
            self.on_token(row.request, token, piece)

    def _finished(self) -> Iterator[tuple[Request, Completion]]:
        """Free the places of rows that ended and yield their completions."""
        for place, row in enumerate(self.rows):
            if row is None or row.finish_reason is None:
                continue
            self.engine.free(row.sequence)
            self.rows[place] = None
            if row.error is not None:
                yield row.request, Completion(finish_reason="error", prompt_tokens=row.prompt_tokens, error=row.error)
                continue
            heads = self.engine.config.num_layers * self.engine.config.num_kv_heads * max(row.steps, 1)
            yield (
                row.request,
                Completion(
                    text=row.stream.text if row.stream else "",
                    token_ids=tuple(row.ids),
                    logprobs=tuple(row.logprobs) if row.request.sampling.logprobs else None,
                    finish_reason=row.finish_reason,
                    prompt_tokens=row.prompt_tokens,
                    blocks_per_step=row.blocks / heads,
                    keys_per_step=row.keys / heads,
                ),
            )
