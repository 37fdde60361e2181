"""Generation: requests, or prompts, through a scheduler."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from kvjax.cache.page_tables import table_width
from kvjax.checks import TokenIds, check_flag, check_iterable, check_model, whole_number
from kvjax.engine.call_lock import interrupts
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import OneSample, Sampling, SamplingOptions, derived_seed
from kvjax.model.protocols import Model
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.decode.naming import policies_of_draft
from kvjax.policies.prefill import PrefillPolicy
from kvjax.scheduler.launch_size import StepsPerLaunch
from kvjax.scheduler.request import Completion, OnToken, Request
from kvjax.scheduler.scheduler import DEFAULT_SLOTS, Scheduler
from kvjax.text.tokenization import Prompt, encode, one_by_one
from pallas_kernels.core.messages import shown


def run(
    engine: Engine | Sequence[Engine],
    requests: Iterable[Request | None],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    on_token: OnToken | None = None,
    on_prefill: Callable[[int], None] | None = None,
    steps_per_launch: StepsPerLaunch = "auto",
    draft: str | DecodePolicy | None = None,
) -> Iterator[tuple[Request, Completion]]:
    """Run requests over `slots` slots (None: 8, or the engine's largest batch bucket) and yield each with its
    completion as it finishes.

    It drives a `Scheduler`: a slot that becomes free takes the next request from the iterable. None in the iterable
    means that there is no request yet: it is asked again after the next step, so there must be a request that runs. The
    batch keeps its size, so a request's bits do not depend on which others run. If a request cannot run (too long, a
    bad token, more pages than the pool has), or the model gives NaN (`NotFinite`), its completion has an `error`, and
    the others continue. Each sample of a request with n above 1 takes a slot; the prompt is prefilled once and forked.
    on_prefill: called with the number of prompt tokens done. While a request with a penalty runs, the tokens of every
    slot are counted on the device, in `[bucket, V]` int32 (4.9 MB for 8 slots and 152K tokens). steps_per_launch,
    draft: as in `Scheduler`.

    engine: one, or several replicas (`kvjax.replicas`), each with `slots` slots and a thread of its own. A request goes
    to the replica that has a free slot and fewest requests; its bits do not depend on which. The iterable and the
    functions run in the caller's thread. If an engine fails, or the caller ends the generator, all replicas end, and
    free what they held. TypeError for requests that are no iterable of `Request`.
    """
    check_iterable(requests, "run", "a list or another iterable of kvjax.Request, as in [kvjax.Request(prompt)]")
    engines, options = _engines_of(engine, "run"), {"policy": policy, "slots": slots, "steps_per_launch": steps_per_launch}
    options["draft"] = draft
    if len(engines) > 1:
        from kvjax.scheduler.data_parallel import run_replicas

        yield from run_replicas(engines, requests, on_token=on_token, on_prefill=on_prefill, **options)
        return
    (engine,) = engines
    scheduler, source = Scheduler(engine, on_token=on_token, on_prefill=on_prefill, **options), iter(requests)
    try:
        while True:
            while scheduler.has_room and (request := next(source, None)) is not None:
                scheduler.submit(request)
            if scheduler.idle:
                return
            for handle in scheduler.step():
                yield handle.request, handle.completion
    finally:
        scheduler.close()


@overload
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: str,
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[False] = False,
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> str: ...
@overload
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: str,
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[True],
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> Completion: ...
@overload
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: Sequence[str],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[False] = False,
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> list[str]: ...
@overload
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: Sequence[str],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: Literal[True],
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise"] = "raise",
    **sampling: Unpack[OneSample],
) -> list[Completion]: ...
@overload
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: Prompt | Sequence[Prompt],
    *,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: bool = False,
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise", "return"] = "raise",
    **sampling: Unpack[SamplingOptions],
) -> Any: ...
@interrupts
def generate(
    model: Model | Engine | Sequence[Engine],
    prompts: Prompt | Sequence[Prompt],
    *misplaced: Any,
    policy: str | DecodePolicy | None = None,
    prefill: str | PrefillPolicy | None = None,
    stream: Callable[[int, str], None] | None = None,
    details: bool = False,
    slots: int | None = None,
    draft: str | DecodePolicy | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special: bool = False,
    on_error: Literal["raise", "return"] = "raise",
    **sampling: Any,
) -> Any:
    """Continue one prompt (text gives text) or several (a list gives a list).

    A prompt is text, a list of token ids, a list of chat messages (`{"role": ..., "content": ...}`), or what a Hugging
    Face tokenizer returns, for one text or several. Chat messages go through the model's chat template, with
    `chat_template_kwargs` as its variables. Special tokens inside them are plain text unless `parse_special` is True.

    model: an engine, or several replicas (`kvjax.replicas`); or a model, which gets an engine whose pool fits these
    prompts. policy: the decode policy; None is the engine's own, or the default of `Engine`. prefill: the prefill
    policy, None as for policy; ValueError with an engine, which has its own. sampling: fields of `kvjax.Sampling`;
    equal prompts draw independently. stream: called with the prompt's number and each new piece of text. details:
    return `Completion` objects instead of text. With n above 1, each prompt gives a list of n texts. on_error: "raise"
    raises what `Completion.error` would hold; with "return" the other prompts continue, and the error is returned in
    place of the text. draft: a policy that drafts tokens for `policy` to verify, or "lookup", where that is faster
    (docs/drafts.md).
    """
    if misplaced:
        hint = "give its fields by name, as in temperature=0.7" if isinstance(misplaced[0], Sampling) else "name every other argument"
        raise TypeError(f"generate takes a model and prompts; {shown(misplaced[0])} came third: {hint}")
    if on_error not in ("raise", "return"):
        raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
    check_flag("details", details)
    check_flag("parse_special", parse_special)
    if stream is not None and not callable(stream):
        raise ValueError(f"stream must be a function, as in stream=lambda number, text: print(text, end=''), got {shown(stream)}")
    engines = _engines_of(model, "generate") if isinstance(model, Engine | list | tuple) else ()
    if not engines:
        check_model(model, "generate")
    listed, single = one_by_one(prompts)
    settings = Sampling(**sampling)
    if engines and prefill is not None:
        raise ValueError(f"prefill {prefill} was given with an engine, which prefills by its own policy: name it in Engine(prefill=...)")
    if stream is not None and settings.n > 1:
        raise ValueError(f"stream shows one sample of a prompt, and n is {settings.n}: leave one of them out")
    wanted = max(1, min(len(listed) * settings.n, DEFAULT_SLOTS)) if slots is None else whole_number("slots", slots, 1)
    tokenizer = engines[0].model.tokenizer if engines else model.tokenizer
    results: list[Completion | None] = [None] * len(listed)
    encoded: dict[int, TokenIds] = {}
    for number, prompt in enumerate(listed):
        interrupts.check()
        try:
            encoded[number] = encode(tokenizer, prompt, chat_template_kwargs, parse_special=parse_special)
        except ValueError as error:
            if on_error == "raise":
                raise _of_prompt(error, number, listed) from error.__cause__
            results[number] = Completion(finish_reason="error", error=error)
    several = (list(encoded.values()), settings.max_new_tokens, policy, wanted, prefill, settings.n)
    engines = engines or (engine_for(model, *several, draft=draft),)
    if slots is None:
        wanted = min(wanted, engines[0].batch_buckets[-1])
    requests = []
    seen: collections.Counter = collections.Counter()
    for number, prompt in encoded.items():
        # Equal prompts in one list are different samples; the first of them is what it would be alone.
        own = dataclasses.replace(settings, seed=derived_seed(settings.seed, "prompt", seen[prompt]))
        seen[prompt] += 1
        requests.append(Request(prompt, own, number))
    on_token = None if stream is None else (lambda request, _, piece: stream(request.id, piece))
    for request, completion in run(engines, requests, policy=policy, slots=wanted, on_token=on_token, draft=draft):
        if completion.error is not None and on_error == "raise":
            raise _of_prompt(completion.error, request.id, listed)
        results[request.id] = completion
    answers = results if details else [_text(completion) for completion in results]
    return answers[0] if single else answers


def _engines_of(given: Engine | Sequence[Engine], caller: str) -> tuple[Engine, ...]:
    """`kvjax.scheduler.data_parallel.engines_of`, which one engine needs not load."""
    if isinstance(given, Engine):
        return (given,)
    if isinstance(given, tuple) and len(given) == 1 and isinstance(given[0], Engine):
        return given
    from kvjax.scheduler.data_parallel import engines_of

    return engines_of(given, caller)


def _shown_signature() -> inspect.Signature:
    """The signature of `generate` with every field of Sampling, for notebooks to show and complete."""
    own = [each for each in inspect.signature(generate).parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    fields = [each.replace(kind=each.KEYWORD_ONLY) for each in inspect.signature(Sampling).parameters.values()]
    return inspect.Signature([*own, *fields])


generate.__signature__ = _shown_signature()


def _of_prompt(error: Exception, number: int, prompts: Sequence[Prompt]) -> Exception:
    """The error, with a note that says which prompt it is about if there are several."""
    if len(prompts) > 1:
        error.add_note(f'prompt {number} of {len(prompts)}, counted from 0; on_error="return" keeps the answers to the others')
    return error


def _text(completion: Completion) -> str | list[str] | Exception:
    if completion.error is not None:
        return completion.error
    return [choice.text for choice in completion.choices] if completion.choices else completion.text


def engine_for(
    model: Model,
    prompts: Sequence[TokenIds],
    new_tokens: int,
    policy: str | DecodePolicy | None,
    slots: int,
    prefill: str | PrefillPolicy | None = None,
    samples: int = 1,
    draft: str | DecodePolicy | None = None,
) -> Engine:
    """An engine whose pool holds the `slots` longest of these prompts at once, rounded up so that later calls find the
    steps compiled."""
    longest = model.config.max_positions  # a longer one is refused when its turn comes
    lengths = [(min(len(prompt) + new_tokens, longest), samples) for prompt in prompts]
    pages = table_width(pages_needed(lengths, slots, 128))
    return Engine(model, policy, policies=policies_of_draft(draft), pages=pages, prefill=prefill)


def pages_needed(requests: Iterable[tuple[int, int]], slots: int, page_size: int) -> int:
    """Pages that the `slots` longest of these requests take at once. requests: for each, its tokens (prompt and answer)
    and its number of samples."""
    pages = [(-(-tokens // page_size), samples) for tokens, samples in requests]
    # A prompt keeps an open page of its own until its last sample has a slot.
    longest = heapq.nlargest(slots, (count for count, samples in pages for _ in range(min(samples, slots))))
    return sum(longest) + any(samples > 1 for _, samples in pages)
