"""Needle retrieval through the engine: the same haystacks, prefilled once, under every policy."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.engine import CachedSequence, Engine
from kvjax.fidelity.needle import NeedleTask, Trial, encode_text, exact_match_by_depth, vocabulary_words
from kvjax.model import Model
from kvjax.policies import parse

ANSWER_ROOM = 32
"""Tokens at the end of a context kept for the answer, and for questions of different lengths in one batch."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said to one trial: its text, whether that is the needle's value, and the trial's depth."""

    text: str
    hit: bool
    depth: float


@dataclasses.dataclass(frozen=True)
class NeedleResult:
    """All answers under one policy; seconds that questions and answers took (prefill not counted); blocks and keys that one KV head of
    one layer read per decoded token, on average."""

    policy: str
    answers: list[Answer]
    seconds: float
    blocks_per_step: float
    keys_per_step: float

    @property
    def exact_match(self) -> float:
        """Share of trials answered with every digit right."""
        return sum(a.hit for a in self.answers) / len(self.answers)

    def by_depth(self, bins: int = 3) -> list[float]:
        """Exact match in `bins` equal ranges of depth; NaN where there was no trial."""
        return exact_match_by_depth([a.hit for a in self.answers], [a.depth for a in self.answers], bins)

    def figures(self) -> dict:
        """What a results file holds of it; a depth without a trial is None."""
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


def needle_panel(
    model: Model,
    text: str,
    policies: Sequence[str],
    *,
    length: int,
    trials: int,
    distractors: int = 16,
    batch: int = 8,
    seed: int = 0,
    page_size: int = 128,
    prefill_chunk: int = 512,
    on_tokens: Callable[[int], None] | None = None,
) -> list[NeedleResult]:
    """Needles found by a model in pieces of `text` under each policy (names of `kvjax.policies.parse`).

    length: tokens of a whole context, of which ANSWER_ROOM are kept for the answer. trials: needles, depths evenly spread. batch: contexts
    held and decoded together. on_tokens: called with the number of haystack tokens done. Raises ValueError if a context does not fit the
    model or the text is too short, OutOfPages if memory does not hold `batch` contexts.
    """
    tokenizer = model.tokenizer
    batch = min(batch, trials)
    words = vocabulary_words(tokenizer)
    prefix = tuple(tokenizer.encode(""))  # what every prompt of this model starts with
    task = NeedleTask(tokenizer, encode_text(tokenizer, text), words, distractors=distractors, prefix_ids=prefix)
    drawn = task.trials(length - ANSWER_ROOM, trials, seed=seed)
    # Every context once; for the one policy that runs, a copied open page and one more for question and answer; and `_compile`'s copy.
    pages = batch * (-(-length // page_size) + 3)
    engine = Engine(model, policies=policies, pages=pages, page_size=page_size, prefill_chunk=prefill_chunk, batch_buckets=(batch,))
    return needle_exact_match(engine, drawn, policies, tokenizer, batch=batch, on_tokens=on_tokens)


def ask(
    engine: Engine, sequences: list[CachedSequence], trials: Sequence[Trial], tokenizer: Any, *, policy: Any
) -> tuple[list[Answer], np.ndarray, np.ndarray]:
    """Feed each trial's question, token by token, and greedily decode an answer as long as the right one, all under `policy`.

    sequences: one per trial, holding its haystack; they grow by question and answer (and, where questions differ in length, by a few
    tokens more, so that the batch keeps its shape). Returns the answers, and for every step the blocks and the keys that one KV head of one
    layer read on average.
    """
    heads = engine.config.num_layers * engine.config.num_kv_heads * len(trials)
    reads = []
    steps = max(len(t.question_ids) + len(t.answer_ids) for t in trials)
    said: list[list[int]] = [[] for _ in trials]
    tokens = [t.question_ids[0] for t in trials]
    for step in range(1, steps):
        greedy = np.asarray(engine.decode(sequences, tokens, policy=policy)).argmax(-1)
        reads.append([float(np.sum(count)) / heads for count in (engine.last_reads.blocks, engine.last_reads.keys)])
        for i, trial in enumerate(trials):
            asked = step < len(trial.question_ids)
            tokens[i] = trial.question_ids[step] if asked else int(greedy[i])
            if not asked:
                said[i].append(tokens[i])
    texts = [tokenizer.decode(ids[: len(t.answer_ids)]) for ids, t in zip(said, trials, strict=True)]
    blocks, keys = np.array(reads).T
    return [Answer(text, t.is_hit(text), t.depth) for text, t in zip(texts, trials, strict=True)], blocks, keys


def needle_exact_match(
    engine: Engine,
    trials: Sequence[Trial],
    policies: Sequence[str],
    tokenizer: Any,
    *,
    batch: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> list[NeedleResult]:
    """Every trial under every policy: haystacks are prefilled once, `batch` at a time, and forked for each policy.

    on_tokens: called with the number of haystack tokens done.
    """
    answers: dict[str, list[Answer]] = {policy: [] for policy in policies}
    seconds = dict.fromkeys(policies, 0.0)
    reads: dict[str, list[np.ndarray]] = {policy: [] for policy in policies}
    for some in itertools.batched(trials, batch):
        haystacks = engine.prefill([t.haystack_ids for t in some], on_tokens=on_tokens)
        for policy in policies:
            forks = [engine.fork(s) for s in haystacks]
            _compile(engine, forks, policy)
            start = time.perf_counter()
            said, *read = ask(engine, forks, some, tokenizer, policy=policy)
            seconds[policy] += time.perf_counter() - start
            answers[policy] += said
            reads[policy].append(np.array(read))
            for sequence in forks:
                engine.free(sequence)
        for sequence in haystacks:
            engine.free(sequence)
    means = {policy: np.concatenate(reads[policy], axis=1).mean(axis=1) for policy in policies}
    return [NeedleResult(policy, answers[policy], seconds[policy], *means[policy].tolist()) for policy in policies]


def _compile(engine: Engine, sequences: list[CachedSequence], policy: str) -> None:
    """Run one step on throwaway forks (as many: a step is compiled per batch), so that what is timed afterwards holds no compilation."""
    forks = [engine.fork(sequence) for sequence in sequences]
    engine.decode(forks, [0] * len(forks), policy)
    for fork in forks:
        engine.free(fork)
