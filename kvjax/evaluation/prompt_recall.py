"""Prompt recall: measures what the later tokens of a prompt recall of its earlier ones while it is prefilled.

Facts are stated in the first 30% of a prompt, and asked for and answered in its last 35%. Passages of the early text
are repeated there, word for word. The figure is how often the logits of prefill predict what is repeated,
teacher-forced: a value counts if all of its tokens are the most likely ones, a passage by the share of its tokens,
after a short run-in. A needle asked for at the end of a prompt does not show this, because decode answers it and reads
the whole cache, whatever prefill did. Every prefill policy runs beside dense on the same prompts, chunk by chunk, so
that only the logits of one chunk, `[chunk, V]`, are held for each policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.engine import PREFILL_CHUNK
from kvjax.engine.engine import Engine
from kvjax.engine.sequence import CachedSequence
from kvjax.evaluation.needle import NeedleTask, encode, encode_text, vocabulary_words
from kvjax.evaluation.retrieval import check_positions, prompt_start
from kvjax.evaluation.teacher_forcing import ALONE, divergence
from kvjax.model.protocols import Model
from kvjax.policies.prefill import DensePrefill, PrefillPolicy, parse_prefill
from kvjax.policies.prefill.lists import TileLists, sorted_lists

EARLY, LATE = 0.3, 0.65
"""Positions as shares of a prompt: originals are before EARLY, their repetitions after LATE."""

CONTROL = "window:64+1024"
"""The control: a prefill policy that cannot see the originals, so it must fail. A cell in which it does not is
invalid."""


@dataclasses.dataclass(frozen=True)
class ListedDense(TileLists):
    """Dense attention through the op of sparse policies, over lists that hold every block: the same keys, summed in
    another order.

    It measures the noise floor, and shows that the op itself loses nothing, so that losses come only from the choice of
    blocks.
    """

    chi: int = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024

    dense_tokens = 0

    def lists(self, query, layer, ctx):
        """Every distant block, for every tile and query head, `[B, C, H, S]`."""
        there = self.distant(query, layer, ctx)
        ids = sorted_lists(jnp.where(there, jnp.arange(there.shape[2], dtype=jnp.int32), -1))
        return jnp.broadcast_to(ids[:, :, None], (*ids.shape[:2], query.shape[2], ids.shape[2]))

    def describe(self) -> str:
        """The policy in words, for reports."""
        return "dense prefill over lists that hold every block"


@dataclasses.dataclass(frozen=True)
class Repetition:
    """A repetition: tokens [start, start + count) of a prompt are the same as the `count` tokens from `source` on."""

    source: int
    start: int
    count: int

    @property
    def distance(self) -> int:
        """Tokens from the original to its repetition."""
        return self.start - self.source


@dataclasses.dataclass(frozen=True)
class RecallPrompt:
    """One prompt: its token ids, and the repeated values and passages in it, each in the order of the repetitions."""

    ids: list[int]
    facts: tuple[Repetition, ...]
    passages: tuple[Repetition, ...]

    @property
    def late(self) -> int:
        """The position from which repetitions begin and KL is counted."""
        return round(LATE * len(self.ids))


@dataclasses.dataclass(frozen=True)
class RecallTask:
    """Makes prompts from one tokenizer and one text.

    tokenizer, text_ids, words, prefix_ids: as in `kvjax.evaluation.needle.NeedleTask`. facts, passages: how many in
    each prompt. passage_tokens: tokens of each passage. run_in: tokens at its beginning that do not count.
    """

    tokenizer: Any
    text_ids: np.ndarray
    words: tuple[str, ...]
    facts: int = 16
    passages: int = 8
    passage_tokens: int = 64
    run_in: int = 16
    prefix_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name, least in (("facts", 1), ("passages", 1), ("run_in", 1), ("passage_tokens", self.run_in + 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def prompts(self, length: int, count: int, *, seed: int = 0) -> list[RecallPrompt]:
        """`count` prompts of `length` tokens, their texts evenly spread over the whole text. ValueError if `length` or
        the text is too short."""
        starts = np.linspace(0, max(0, len(self.text_ids) - length), count).astype(int).tolist()
        return [self.prompt(length, start, np.random.default_rng((seed, length, number))) for number, start in enumerate(starts)]

    def prompt(self, length: int, text_start: int, rng: np.random.Generator) -> RecallPrompt:
        """One prompt of exactly `length` tokens, with the text from `text_start` on. `rng` draws keys, values and
        orders."""
        needles = NeedleTask(self.tokenizer, self.text_ids, self.words, distractors=self.facts - 1)
        forms = [needles.templates[i % len(needles.templates)] for i in range(self.facts)]
        keys, values = needles.keys(rng), needles.values(rng)
        answers = [self._ids(f" {value}") for value in values]
        statements = [self._ids(form.needle.format(key=k, value=v)) for form, k, v in zip(forms, keys, values, strict=True)]
        questions = [self._ids(form.question.format(key=key)) for form, key in zip(forms, keys, strict=True)]
        fill = round(EARLY * length) - len(self.prefix_ids) - sum(map(len, statements))
        gap = fill // self.facts
        if gap < self.passage_tokens or self.passages > self.facts:
            raise ValueError(
                f"a length of {length:,} tokens leaves {max(0, gap)} tokens of text after each of {self.facts} facts, too few for "
                f"{self.passages} passages of {self.passage_tokens}: use longer prompts, or fewer facts in each"
            )
        text = iter(self.text_ids[text_start : text_start + length].tolist())
        ids, sources = list(self.prefix_ids), []
        holders = set(np.linspace(0, self.facts - 1, self.passages).round().astype(int).tolist())
        passages: list[tuple[int, list[int]]] = []
        for number, (statement, answer) in enumerate(zip(statements, answers, strict=True)):
            sources.append(len(ids) + _place(statement, answer))
            ids += statement
            if number in holders:
                passages.append((len(ids), _take(text, self.passage_tokens)))
                ids += passages[-1][1]
            ids += _take(text, gap - self.passage_tokens * (number in holders))
        ids += _take(text, round(LATE * length) - len(ids))
        newline = self._ids("\n")
        late = [(source, question, answer, newline) for source, question, answer in zip(sources, questions, answers, strict=True)]
        late += [(source, [], passage, []) for source, passage in passages]
        gap = (length - len(ids) - sum(len(before) + len(again) + len(after) for _, before, again, after in late)) // len(late)
        if gap < 1:
            raise ValueError(f"a length of {length:,} tokens has no room for all repetitions: use longer prompts, or fewer facts in each")
        found: dict[bool, list[Repetition]] = {True: [], False: []}
        for number in rng.permutation(len(late)).tolist():
            source, before, again, after = late[number]
            ids += _take(text, gap) + before
            found[number < self.facts].append(Repetition(source, len(ids), len(again)))
            ids += again + after
        ids += _take(text, length - len(ids))
        return RecallPrompt(ids, tuple(found[True]), tuple(found[False]))

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)


def _take(text: Iterator[int], count: int) -> list[int]:
    """The next `count` tokens of the text. ValueError if it ends before."""
    taken = [token for token, _ in zip(text, range(count), strict=False)]
    if len(taken) < count:
        raise ValueError("the text is shorter than one prompt: pass a longer text")
    return taken


def _place(statement: Sequence[int], answer: Sequence[int]) -> int:
    """The place of a value's tokens in its statement; ValueError if the tokenizer splits the value differently
    there."""
    for place in range(len(statement) - len(answer), -1, -1):
        if list(statement[place : place + len(answer)]) == list(answer):
            return place
    raise ValueError("the tokenizer joins a value with the text beside it, so its tokens are not those of the answer")


@dataclasses.dataclass(frozen=True)
class RecallPlan:
    """What to measure.

    prefills: prefill policies, by name; dense, dense again and the control always run. lengths: tokens of whole
    prompts. facts: in all prompts of a length, a multiple of `facts_per_prompt`. control: the policy that must fail.
    seed: for keys, values and orders.
    """

    prefills: tuple[str, ...]
    lengths: tuple[int, ...]
    facts: int = 400
    facts_per_prompt: int = 16
    passages: int = 8
    passage_tokens: int = 64
    run_in: int = 16
    control: str = CONTROL
    seed: int = 0
    page_size: int = 128
    prefill_chunk: int = PREFILL_CHUNK

    def __post_init__(self):
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths must be at least one, each once, got {', '.join(map(str, self.lengths)) or 'none'}")
        if self.facts_per_prompt < 1 or self.facts % self.facts_per_prompt or self.facts < 2 * self.facts_per_prompt:
            raise ValueError(
                f"facts {self.facts} must be {self.facts_per_prompt} in each of at least two prompts: use a multiple of "
                f"{self.facts_per_prompt} from {2 * self.facts_per_prompt} on"
            )
        if self.prefill_chunk > LATE * min(self.lengths):
            raise ValueError(
                f"prefill_chunk {self.prefill_chunk} is more than {LATE:.0%} of {min(self.lengths):,} tokens: use a smaller chunk, "
                "or longer prompts"
            )
        for name in self.prefills:
            parse_prefill(name)
        if isinstance(parse_prefill(self.control), DensePrefill):
            raise ValueError("the control must be a policy that fails; dense is the reference")

    @property
    def prompts(self) -> int:
        """Number of prompts of each length."""
        return self.facts // self.facts_per_prompt

    @property
    def policies(self) -> dict[str, PrefillPolicy]:
        """The policies that run beside dense and dense again: the control first, each once."""
        named = {str(policy): policy for policy in map(parse_prefill, (self.control, *self.prefills))}
        return {name: policy for name, policy in named.items() if not isinstance(policy, DensePrefill)}


class RecallRun:
    """Runs a plan, prompt by prompt. Each policy has an engine with room for one sequence of the longest length.

    `records` yields plain JSON. failed: the error of each policy that failed. Such a policy is not run again; the
    others go on.
    """

    def __init__(self, model: Model, text: str, plan: RecallPlan):
        self.plan, self.failed = plan, {}
        longest = max(plan.lengths)
        check_positions(model, longest)
        tokenizer, sizes = model.tokenizer, {"passages": plan.passages, "passage_tokens": plan.passage_tokens, "run_in": plan.run_in}
        ids, words, prefix = encode_text(tokenizer, text), vocabulary_words(tokenizer), prompt_start(tokenizer)
        self.task = RecallTask(tokenizer, ids, words, plan.facts_per_prompt, **sizes, prefix_ids=prefix)
        self._prompts = {length: self.task.prompts(length, plan.prompts, seed=plan.seed) for length in plan.lengths}
        again = ListedDense(key_block=min(ListedDense.key_block, plan.page_size))
        named = {"dense": DensePrefill(), ALONE: again, **plan.policies}
        self._engines = {
            name: Engine(
                model,
                prefill=policy,
                pages=-(-longest // plan.page_size),
                page_size=plan.page_size,
                prefill_chunk=plan.prefill_chunk,
            )
            for name, policy in named.items()
        }

    @property
    def work(self) -> int:
        """Tokens that all policies together prefill."""
        return len(self._engines) * self.plan.prompts * sum(self.plan.lengths)

    def records(self, advance: Callable[[int], None] = lambda tokens: None) -> Iterator[dict[str, Any]]:
        """One record per prompt, length by length. advance: called with the number of tokens prefilled."""
        for length in self.plan.lengths:
            for number, prompt in enumerate(self._prompts[length]):
                yield {"length": length, "prompt": number} | self._measure(prompt, advance)

    def _measure(self, prompt: RecallPrompt, advance: Callable[[int], None]) -> dict[str, Any]:
        """Runs every policy on one prompt: values predicted, shares of passages predicted, and mean KL to dense over
        the last part."""
        chunk, running, found = self.plan.prefill_chunk, {}, {}
        head = prompt.late // chunk * chunk
        try:
            for name in [name for name in self._engines if name not in self.failed]:
                with self._noting(name):
                    running[name], found[name] = self._begin(name, prompt.ids[:head]), []
                advance(head)
            for start in range(head, len(prompt.ids), chunk):
                given = prompt.ids[start : start + chunk]
                true = np.array([*prompt.ids[start + 1 : start + chunk + 1], 0][: len(given)], np.int32)  # 0: no token follows
                dense = None
                for name in [name for name in running if name not in self.failed]:
                    with self._noting(name):
                        logits = self._engines[name].extend(running[name], given, all_logits=True)
                        dense = logits if name == "dense" else dense
                        found[name].append(_beside(dense, logits, true))
                        logits.block_until_ready()
                    advance(len(given))
        finally:
            for name, sequence in running.items():
                self._engines[name].free(sequence)
        rows = {name: np.concatenate(jax.device_get(some), axis=1) for name, some in found.items() if name not in self.failed}
        return self._figures(prompt, head, rows)

    def _begin(self, name: str, ids: list[int]) -> CachedSequence:
        """A new sequence with the head of a prompt. Its page table is wide enough for the longest length, so one
        program serves all."""
        (sequence,) = self._engines[name].prefill([ids], reserve=max(self.plan.lengths) - len(ids))
        return sequence

    def _figures(self, prompt: RecallPrompt, head: int, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        """The record of a prompt. rows: `[2, n]` for each policy: whether the token after position head + i was the
        most likely one (1.0 or 0.0), and the KL to dense there."""
        late = slice(prompt.late - head, len(prompt.ids) - 1 - head)
        repeated = np.zeros(len(prompt.ids) - head, bool)
        for again in (*prompt.facts, *prompt.passages):
            repeated[again.start - 1 - head : again.start - 1 - head + again.count] = True
        running_text = ~repeated[late]

        def predicted(name: str, again: Repetition, skip: int = 0) -> np.ndarray:
            first = again.start - 1 - head
            return rows[name][0, first + skip : first + again.count]

        return {
            "fact_distances": [again.distance for again in prompt.facts],
            "passage_distances": [again.distance for again in prompt.passages],
            "facts": {name: [int(predicted(name, again).all()) for again in prompt.facts] for name in rows},
            "passages": {name: [float(predicted(name, e, self.plan.run_in).mean()) for e in prompt.passages] for name in rows},
            "kl": {name: float(found[1, late].mean()) for name, found in rows.items()},
            "kl_text": {name: float(found[1, late][running_text].mean()) for name, found in rows.items()},
        }

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Record an error of a tested policy, so that the others go on. An error of dense, or of dense again, is
        raised."""
        try:
            yield
        except Exception as error:
            if name in ("dense", ALONE):
                raise
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


@jax.jit
def _beside(dense: Float[Array, "n V"], logits: Float[Array, "n V"], true: Int[Array, " n"]) -> Float[Array, "2 n"]:
    """Whether the true next token is the most likely one (1.0 or 0.0), and KL(dense || logits) in nats."""
    hit = jnp.argmax(logits, axis=-1) == true
    return jnp.stack([hit.astype(jnp.float32), divergence(jax.nn.log_softmax(dense), jax.nn.log_softmax(logits))])
