"""Drafts: how many are right (`acceptance`), and what they gain by the clock (`rounds`).

Random weights say nothing of how many drafts are right. So `rounds` replays a share that was measured elsewhere: each
draft is right by a throw of dice, and everything else runs as it does for a user. Tokens that are looked up need text
that repeats: there the model's tokens are replaced by those of a text, and a draft is right if it is the text's.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from scipy import optimize

from benchmarks.hollow import FakeEngine, random_model
from benchmarks.run import BenchFormatOption, LayersOption, PackedOption, ShapeOption, config_of_shape, main, run
from kvjax.engine import drafts, multi_step, sampling, steps
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling, accept, sample
from kvjax.evaluation.needle import encode_text
from kvjax.evaluation.retrieval import prompt_start
from kvjax.evaluation.teacher_forcing import text_windows
from kvjax.generation import run as run_requests
from kvjax.model.config import ModelConfig
from kvjax.models import CausalLM
from kvjax.policies.decode.naming import LOOKUP, policies_of_draft
from kvjax.scheduler.drafting import BY_POLICY, Drafting, draft_of
from kvjax.scheduler.request import Completion, Request
from kvjax.scheduler.rounds import NO_ROUNDS
from kvjax.serving.bench.decode import pages_of
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, ModelOption, TextOption, load_model, read_texts, whole

DraftWeightsOption = Annotated[str, typer.Option(help="How the weights that draft are packed, as kvjax.load takes it, or none.")]
TOKENS, _ = BY_POLICY
SKIPPED = 128
"""Tokens of an answer that are not timed: programs are compiled, and the scheduler settles."""


@contextlib.contextmanager
def saying(text: Sequence[int]) -> Iterator[None]:
    """Whatever is sampled inside, each token is that of this text at its place."""
    known = jnp.asarray(text, jnp.int32)

    def said(logits, rows, positions, counts=None):
        return sample(logits, rows, positions, counts).replace(tokens=known[positions])

    modules = drafts, multi_step, sampling, steps
    for module in modules:
        module.sample = said
    jax.clear_caches()  # programs that were traced know the function
    try:
        yield
    finally:
        for module in modules:
            module.sample = sample
        jax.clear_caches()


def repeating_text(vocab_size: int, prompt: int, answer: int, copied: int, fresh: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens, and an answer that copies `copied` tokens from anywhere in the prompt, says `fresh`
    random ones, and so on."""
    draw = np.random.default_rng(seed)
    text = draw.integers(0, vocab_size, prompt).tolist()
    while len(text) < prompt + answer:
        start = int(draw.integers(prompt - copied))
        text += text[start : start + copied] + draw.integers(0, vocab_size, fresh).tolist()
    return text[: prompt + answer]


@contextlib.contextmanager
def replayed(acceptance: float) -> Iterator[None]:
    """Rounds that are compiled inside keep each draft with this probability."""

    def thrown(logits, rows, lengths, drafted, active, counts):
        found = accept(logits, rows, lengths, drafted, active, counts)
        keys = jax.vmap(lambda row, length: jax.random.fold_in(jax.random.key(row), length))(jnp.arange(lengths.shape[0]), lengths)
        right = jax.vmap(lambda key: jax.random.uniform(key, drafted.shape[1:]))(keys)[:, 1:] < acceptance
        return found.replace(accepted=jnp.where(active, 1 + jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1), 0))

    drafts.accept = thrown
    try:
        yield
    finally:
        drafts.accept = accept


def draft_rows(
    shape: str,
    config: ModelConfig,
    *,
    lengths: tuple[int, ...],
    policy: str,
    draft: str,
    acceptance: float | None,
    repeats: tuple[int, int] | None,
    weights: str | None,
    draft_weights: str | None,
    cache_format: str | None,
    slots: int,
    answer: int,
    rounds: int,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """For each length a row with seconds of a token without drafts and with them, medians of `rounds` answers, which
    take turns; and the tokens of a round, as they came out. Prompts are not computed. acceptance: of `replayed`; None:
    the tokens are those of `repeating_text`, with `repeats`, the tokens that it copies and those between."""
    say("weights")
    model = _with_draft_weights(random_model(config, weights), draft_weights)
    for length in lengths:
        pages = slots * (pages_of(length) + 2) + 2
        engine = FakeEngine(
            model, policy, policies=policies_of_draft(draft), pages=pages, batch_buckets=(slots,), cache_format=cache_format
        )
        engine.fill_pages()
        seconds: dict[str | None, list[float]] = {None: [], draft: []}
        counted = NO_ROUNDS
        text = [1] * length if repeats is None else repeating_text(config.vocab_size, length - answer, answer, *repeats)
        with saying(text) if acceptance is None else replayed(acceptance):
            for number in range(-1, rounds + 1):
                for each in seconds:
                    say(f"{length:,} tokens, {f'round {number} of {rounds}' if number > 0 else 'warm-up'}: {each or 'no drafts'}")
                    one, completions = _seconds_per_token(engine, text[: length - answer], answer, slots, each)
                    if number < 0:  # what runs rounds is compiled beside the answer, and called first in the next one
                        concurrent.futures.wait(engine.compiling)
                    if number > 0:
                        seconds[each].append(one)
                        counted += sum((done.rounds for done in completions), NO_ROUNDS)
        plain, drafted = (statistics.median(found) for found in seconds.values())
        yield {
            "op": "draft-rounds",
            "shape": shape,
            "layers": config.num_layers,
            "weights": weights,
            "draft_weights": draft_weights,
            "cache_format": cache_format,
            "policy": policy,
            "draft": draft,
            "tokens": length,
            "slots": slots,
            "answer": answer,
            "acceptance": acceptance,
            "repeats": repeats,
            "round": draft_of(engine, draft, slots).tokens,
            "tokens_per_round": counted.tokens / max(1, counted.count),
            "plain_s": plain,
            "drafted_s": drafted,
            "times": plain / drafted,
            "range_plain_s": [min(seconds[None]), max(seconds[None])],
            "range_drafted_s": [min(seconds[draft]), max(seconds[draft])],
        }
        del engine


def _with_draft_weights(model: CausalLM, weights: str | None) -> CausalLM:
    return model if weights is None else model.with_draft_weights(weights)


def _seconds_per_token(engine: FakeEngine, prompt: list[int], answer: int, slots: int, draft: str | None) -> tuple[float, list[Any]]:
    """Seconds of a token of each request, behind the first `SKIPPED` and while none has ended, and the completions. The
    clock begins and ends when a launch is read: the tokens of one come together, so those before its last one took no
    time."""
    times: list[tuple[int, float]] = []  # of each token: how many launches there were when it was read, and the clock
    lengths: collections.Counter[int] = collections.Counter()
    whole: list[int] = []  # tokens when a request ended

    def note(request: Request, *_: Any) -> None:
        times.append((len(engine.dispatch_s), time.perf_counter()))
        lengths[id(request)] += 1
        if lengths[id(request)] == answer:
            whole.append(len(times))

    requests = [Request(prompt, Sampling(max_new_tokens=answer, ignore_eos=True)) for _ in range(slots)]
    done = []
    for _, completion in run_requests(engine, requests, slots=slots, draft=draft, on_token=note):
        if completion.error is not None:
            raise completion.error
        done.append(completion)
    launch, _ = times[SKIPPED * slots]
    last, _ = times[whole[0] - 1]
    if launch >= last:
        raise ValueError(f"an answer of {answer} tokens ends with the launch in which the clock begins: use a longer one")
    begun = max(number for number, (count, _) in enumerate(times) if count == launch)
    end = max(number for number, (count, _) in enumerate(times) if count < last)
    if begun == end:
        raise ValueError(f"an answer of {answer} tokens ends with the launch after that in which the clock begins: use a longer one")
    return (times[end][1] - times[begun][1]) * slots / (end - begun), done


def rounds_command(
    shape: ShapeOption = "qwen2.5-7b",
    lengths: Annotated[str, typer.Option(help="Tokens of sequences at their end, separated by commas.")] = "131072",
    policy: Annotated[str, typer.Option(help="Policy of the answer.")] = "dense",
    draft: Annotated[str, typer.Option(help="Policy that drafts, or lookup.")] = "top:32",
    acceptance: Annotated[float, typer.Option(help="Share of a policy's drafts that are right.", min=0.0, max=1.0)] = 0.97,
    repeats: Annotated[
        tuple[int, int], typer.Option(help="For lookup: tokens that an answer copies from its prompt, and new ones behind them, in turn.")
    ] = (64, 16),
    weights: PackedOption = "none",
    draft_weights: DraftWeightsOption = "none",
    cache_format: BenchFormatOption = None,
    slots: Annotated[int, typer.Option(help="Sequences that are decoded together.", **whole())] = 1,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", **whole(2 * SKIPPED))] = 1024,
    rounds: Annotated[int, typer.Option(help="Timed answers of each kind.", **whole())] = 3,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the tokens of requests through kvjax.run, with rounds that draft and without."""
    sizes = {"lengths": tuple(int(each) for each in lengths.split(",")), "policy": policy, "draft": draft}
    sizes |= {"acceptance": None, "repeats": repeats} if draft == LOOKUP else {"acceptance": acceptance, "repeats": None}
    sizes |= {"weights": None if weights == "none" else weights, "cache_format": cache_format}
    sizes |= {"draft_weights": None if draft_weights == "none" else draft_weights}
    sizes |= {"slots": slots, "answer": answer, "rounds": rounds}
    config = config_of_shape(shape, layers, dtype)
    run(json_out, "draft-rounds", lambda say: draft_rows(shape, config, **sizes, say=say))


def acceptance_rows(
    model: CausalLM,
    text: str,
    *,
    lengths: Sequence[int],
    policies: Sequence[str],
    draft_weights: str | None,
    prompts: int,
    answer: int,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """For each length and drafting policy: how many drafts of greedy continuations of a text are right, and how many
    tokens are dense's. Every launch is one of rounds."""
    model, ids = _with_draft_weights(model, draft_weights), encode_text(model.tokenizer, text)
    sampling = Sampling(max_new_tokens=answer, ignore_eos=True)
    for length in lengths:
        requests = [Request(each, sampling) for each in text_windows(ids, length - answer, prompts, prompt_start(model.tokenizer))]
        engine = Engine(model, "dense", policies=tuple(policies), pages=pages_of(length) + 2, batch_buckets=(1,))
        say(f"{length:,} tokens: dense")
        dense = [done.token_ids for done in _completions(engine, requests)]
        for policy in policies:
            say(f"{length:,} tokens: {policy}")
            with always_drafting():
                found = _completions(engine, requests, draft=policy)
            rounds = sum((done.rounds for done in found), NO_ROUNDS)
            per_round = rounds.tokens / rounds.count
            same = sum(one == other for done, ids in zip(found, dense, strict=True) for one, other in zip(done.token_ids, ids, strict=True))
            yield {
                "op": "draft-acceptance",
                "model": model.name,
                "tokens": length,
                "draft": policy,
                "draft_weights": draft_weights,
                "prompts": prompts,
                "answer": answer,
                "round": TOKENS,
                "tokens_per_round": per_round,
                "acceptance": acceptance_of(per_round),
                "equal": same,
                "of": sum(map(len, dense)),
            }


def _completions(engine: Engine, requests: Sequence[Request], **options: Any) -> list[Completion]:
    done = [completion for _, completion in run_requests(engine, requests, slots=1, **options)]
    if failed := next((each.error for each in done if each.error is not None), None):
        raise failed
    return done


def acceptance_of(tokens: float) -> float:
    """The share of right drafts for which rounds have so many tokens on average, if each is right independently."""
    if tokens >= TOKENS:
        return 1.0
    return float(optimize.brentq(lambda share: sum(share**place for place in range(TOKENS)) - tokens, 0.0, 1.0))


@contextlib.contextmanager
def always_drafting() -> Iterator[None]:
    """Every launch that may be one of rounds is, whatever the clock says."""
    by_clock, has_program = Drafting.next, Engine.has_program
    Drafting.next, Engine.has_program = lambda self, ready: self._launches[1], lambda self, group: True
    try:
        yield
    finally:
        Drafting.next, Engine.has_program = by_clock, has_program


def acceptance_command(
    model: ModelOption = "needle",
    lengths: Annotated[str, typer.Option(help="Tokens of sequences at their end, separated by commas.")] = "2048,8192",
    drafts: Annotated[str, typer.Option(help="Policies that draft, separated by commas.")] = "top:8,top:32,cascade:8",
    text: TextOption = None,
    draft_weights: DraftWeightsOption = "none",
    prompts: Annotated[int, typer.Option(help="Disjoint pieces of the text.", **whole())] = 4,
    answer: Annotated[int, typer.Option(help="Tokens of each continuation.", **whole(2))] = 129,
    json_out: JsonOption = None,
) -> None:
    """Count the drafts that are right, and the tokens that are those of dense."""
    source, _ = read_texts(text)
    sizes = {"lengths": [int(each) for each in lengths.split(",")], "policies": drafts.split(","), "prompts": prompts, "answer": answer}
    sizes["draft_weights"] = None if draft_weights == "none" else draft_weights
    loaded = load_model(model, None, None)
    run(json_out, "draft-acceptance", lambda say: acceptance_rows(loaded, source, **sizes, say=say))


if __name__ == "__main__":
    main(rounds=rounds_command, acceptance=acceptance_command)
