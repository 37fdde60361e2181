"""Retrieval through the engine: haystacks are prefilled once, and every policy answers questions about them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.engine import PREFILL_CHUNK
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import NotFinite, all_finite
from kvjax.engine.sequence import CachedSequence
from kvjax.evaluation.needle import NeedleTask, Trial, encode_text, exact_match_by_depth, vocabulary_words
from kvjax.evaluation.passages import PassageTrial
from kvjax.model.protocols import Model
from kvjax.policies.decode import DecodePolicy, name_of, parse

ANSWER_ROOM = 32
"""Tokens reserved at the end of a context for each answer, and for the different lengths of a batch's questions."""

Turn = tuple[Sequence[int], int]
"""Tokens to feed, and how many tokens the model then generates."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer to one trial. hit: whether all that is expected is in its text. depth: the trial's. share: of
    what is expected, the part that was found."""

    text: str
    hit: bool
    depth: float
    share: float = 0.0


@dataclasses.dataclass(frozen=True)
class NeedleResult:
    """All answers of one policy. seconds: of questions and answers, without prefill. blocks_per_step, keys_per_step:
    what one KV head of one layer read per decode step, on average."""

    policy: str
    answers: list[Answer]
    seconds: float
    blocks_per_step: float
    keys_per_step: float

    @property
    def exact_match(self) -> float:
        """Share of trials whose answer has every digit right."""
        return sum(a.hit for a in self.answers) / len(self.answers)

    def by_depth(self, bins: int = 3) -> list[float]:
        """Exact match in each of `bins` equal ranges of depth; NaN for a range without a trial."""
        return exact_match_by_depth([a.hit for a in self.answers], [a.depth for a in self.answers], bins)

    def figures(self) -> dict:
        """The figures for a results file; None for a range of depth without a trial."""
        return {
            "policy": self.policy,
            "describe": parse(self.policy).describe(),
            "exact_match": self.exact_match,
            "hits": sum(a.hit for a in self.answers),
            "by_depth": [None if math.isnan(share) else share for share in self.by_depth()],
            "blocks_per_step": self.blocks_per_step,
            "keys_per_step": self.keys_per_step,
            "seconds": self.seconds,
        }


def find_needles(
    model: Model,
    text: str,
    policies: Sequence[str | DecodePolicy],
    *,
    length: int,
    trials: int,
    distractors: int = 16,
    batch: int = 8,
    seed: int = 0,
    page_size: int = 128,
    prefill_chunk: int = PREFILL_CHUNK,
    prefill: str = "dense",
    cache_format: str | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[NeedleResult]:
    """Needles found by a model in pieces of `text` under each policy (names of `kvjax.policies.decode.parse`).

    prefill: the policy by which haystacks are prefilled (`kvjax.policies.prefill.parse_prefill`). The trials do not
    depend on it. length: tokens of a whole context, of which ANSWER_ROOM are reserved for the answer. trials: number of
    needles; their depths are evenly spread. batch: contexts that are held and decoded together. cache_format: how full
    pages are packed (`kvjax.Engine`). on_tokens: called with the number of haystack tokens just prefilled. Raises
    ValueError if a context does not fit the model or the text is too short, OutOfPages if memory does not hold `batch`
    contexts.
    """
    if length <= ANSWER_ROOM:
        raise ValueError(f"length {length} must be more than the {ANSWER_ROOM} tokens that are kept for the answer")
    tokenizer = model.tokenizer
    batch = min(batch, trials)
    words = vocabulary_words(tokenizer)
    task = NeedleTask(tokenizer, encode_text(tokenizer, text), words, distractors=distractors, prefix_ids=prompt_start(tokenizer))
    drawn = task.trials(length - ANSWER_ROOM, trials, seed=seed)
    # The pages of each context, and three more: forks need a copy of the open page, and pages for question and answer.
    pages = batch * (-(-length // page_size) + 3)
    # Of packed pages, each context and its fork have a row of open ones, of which there are as many as the largest
    # bucket.
    buckets = (batch,) if cache_format is None else (batch, 2 * batch)
    sizes = {"pages": pages, "page_size": page_size, "prefill_chunk": prefill_chunk, "batch_buckets": buckets}
    engine = Engine(model, policies=policies, prefill=prefill, cache_format=cache_format, **sizes)
    return needle_exact_match(engine, drawn, policies, tokenizer, batch=batch, on_tokens=on_tokens)


def prompt_start(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that every prompt of the model starts with (a BOS token, or none)."""
    return tuple(tokenizer.encode(""))


def check_positions(model: Model, longest: int) -> None:
    """ValueError if a context of `longest` tokens is longer than the model's positions."""
    if longest > model.config.max_positions:
        known = f"the model's {model.config.max_positions:,} positions{model.config.for_longer(longest)}"
        raise ValueError(f"a length of {longest:,} tokens is more than {known}")


def needle_exact_match(
    engine: Engine,
    trials: Sequence[Trial],
    policies: Sequence[str | DecodePolicy],
    tokenizer: Any,
    *,
    batch: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> list[NeedleResult]:
    """Every trial under every policy. Haystacks are prefilled once, `batch` at a time, and forked for each policy.

    on_tokens: called with the number of haystack tokens just prefilled.
    """
    policies = [policy if isinstance(policy, str) else name_of(policy) for policy in policies]
    answers: dict[str, list[Answer]] = {policy: [] for policy in policies}
    seconds = dict.fromkeys(policies, 0.0)
    reads: dict[str, list[np.ndarray]] = {policy: [] for policy in policies}
    for some in itertools.batched(trials, batch):
        with prefilled(engine, [t.haystack_ids for t in some], on_tokens) as haystacks:
            for policy in policies:
                with forked(engine, haystacks) as throwaway:
                    # Compiles the step for this batch, so that the timed steps compile nothing.
                    engine.decode(throwaway, [0] * len(throwaway), policy)
                with forked(engine, haystacks) as forks:
                    start = time.perf_counter()
                    said, *read = ask(engine, forks, some, tokenizer, policy=policy)
                    seconds[policy] += time.perf_counter() - start
                answers[policy] += said
                reads[policy].append(np.array(read))
    means = {policy: np.concatenate(reads[policy], axis=1).mean(axis=1) for policy in policies}
    return [NeedleResult(policy, answers[policy], seconds[policy], *means[policy].tolist()) for policy in policies]


def ask(
    engine: Engine, sequences: Sequence[CachedSequence], trials: Sequence[Any], tokenizer: Any, *, policy: str | DecodePolicy
) -> tuple[list[Answer], np.ndarray, np.ndarray]:
    """Feed each trial's questions token by token, and decode each trial's number of answer tokens greedily, all under
    `policy`.

    sequences: one per trial, holding its haystack. They grow by questions and answers; where these differ in length,
    shorter rows grow by a few tokens more, so that the batch keeps its shape. Returns the answers, and for every step
    the blocks and the keys that one KV head of one layer read on average.
    """
    fed = [trial.fed for trial in trials]
    said, blocks, keys = speak(engine, sequences, [trial.turns for trial in trials], policy=policy, fed=fed)
    answers = []
    for trial, turns in zip(trials, said, strict=True):
        texts = [tokenizer.decode(ids) for ids in turns]
        share = trial.judge_ids(turns) if isinstance(trial, PassageTrial) else trial.judge(texts)
        answers.append(Answer("\n".join(texts), share == 1.0, trial.depth, share))
    return answers, blocks, keys


def speak(
    engine: Engine,
    sequences: Sequence[CachedSequence],
    scripts: Sequence[Sequence[Turn]],
    *,
    policy: str | DecodePolicy,
    fed: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[list[int]]], np.ndarray, np.ndarray]:
    """Feed every sequence the given tokens of its script, and generate the others greedily. Returns the generated ids
    of each turn of each sequence, and for every step the blocks and the keys that one KV head of one layer read on
    average.

    fed: for each sequence, the tokens that are fed in place of the ones that it generates, in order; those beyond are
    its own. The ids returned are those that it generates. A row that finishes before the others goes on with its own
    tokens. The host waits for the device only at steps where a row's next token is one that it generated. NotFinite if
    the model gives NaN.
    """
    # Two entries per token of a row's script: whether it is generated, and the token that is fed, None for the
    # generated one.
    asked = [[each for ids, count in turns for each in (*[False] * len(ids), *[True] * count)] for turns in scripts]
    plans = []
    for turns, instead in zip(scripts, map(iter, fed or [()] * len(scripts)), strict=True):
        plans.append([token for ids, count in turns for token in (*ids, *(next(instead, None) for _ in range(count)))])
    reads, finite, greedy = [], [], []
    tokens = [plan[0] for plan in plans]
    for step in range(1, max(map(len, plans))):
        likely, usable = _greedy(engine.decode(sequences, tokens, policy=policy))
        reads.append((engine.last_reads.blocks, engine.last_reads.keys))
        finite.append(usable)
        greedy.append(likely)
        given = [plan[step] if step < len(plan) else None for plan in plans]
        own = np.asarray(likely).tolist() if None in given else given
        tokens = [mine if token is None else token for token, mine in zip(given, own, strict=True)]
    written = np.array(jax.device_get(greedy)).T
    said = [ids[: len(row) - 1][row[1:]] for ids, row in zip(written, map(np.array, asked), strict=True)]
    bad_steps, bad_rows = np.nonzero(~np.array(jax.device_get(finite)))
    if bad_steps.size:
        raise NotFinite(sequences[bad_rows[0]].length - len(finite) + int(bad_steps[0]) + 1)
    heads = engine.spec.kv_heads * len(plans)
    blocks, keys = np.array([[np.sum(count) / heads for count in read] for read in jax.device_get(reads)]).T
    cut = [np.split(ids, np.cumsum([count for _, count in turns])[:-1]) for ids, turns in zip(said, scripts, strict=True)]
    return [[turn.tolist() for turn in row] for row in cut], blocks, keys


@dataclasses.dataclass(frozen=True)
class Arm:
    """A policy over an engine's sequences. Engines of several arms may store pages in different formats."""

    engine: Engine
    sequences: Sequence[CachedSequence]
    policy: str | DecodePolicy


def step_seconds(arms: Mapping[str, Arm], *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per decode step of each arm, one figure per round. Arms take turns, and the host waits only at the end of
    a round.

    arms: by their names in the result. Steps are timed as forcing runs them, with returned logits and the host's work.
    One more round before these compiles.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            with forked(arm.engine, arm.sequences) as forks:
                jax.block_until_ready(arm.engine.decode(forks, [0] * len(forks), arm.policy))
                start = time.perf_counter()
                for _ in range(steps):
                    logits = arm.engine.decode(forks, [0] * len(forks), arm.policy)
                jax.block_until_ready(logits)
                if number:
                    found[name].append((time.perf_counter() - start) / steps)
    return found


@contextlib.contextmanager
def prefilled(
    engine: Engine, prompts: Sequence[Sequence[int]], on_tokens: Callable[[int], None] | None = None
) -> Iterator[list[CachedSequence]]:
    """New sequences of these prompts, freed at the end of the `with` block."""
    sequences = engine.prefill(prompts, on_tokens=on_tokens)
    try:
        yield sequences
    finally:
        for sequence in sequences:
            engine.free(sequence)


@contextlib.contextmanager
def forked(engine: Engine, sequences: Sequence[CachedSequence]) -> Iterator[list[CachedSequence]]:
    """A fork of each sequence, freed at the end of the `with` block."""
    forks: list[CachedSequence] = []
    try:
        for sequence in sequences:
            forks.append(engine.fork(sequence))
        yield forks
    finally:
        for fork in forks:
            engine.free(fork)


@jax.jit
def _greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token of every row, and whether the row's logits are finite."""
    return jnp.argmax(logits, axis=-1), all_finite(logits)
