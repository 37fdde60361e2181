"""Random histories of an engine, and what their sequences must hold: the harness of `test_histories.py` and of others.

A history is a run of random calls on one engine: prefill, extend, decode in batches, steps with drafts, fork, truncate,
free, save and restore, suspend and resume, and calls that must fail. Beside it stands a plain record of what each
sequence holds: which tokens prefill wrote, and which tokens steps wrote, through which policy. Three things are
checked: page counts after every call; the bits of every sequence's next step against a second engine in which nothing
but that record was ever run; and, for what was written and read by the model's own policies, which are dense but for an
indexer's, the logits against one full forward.
"""

import collections
import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

from kvjax import Engine, OutOfPages
from kvjax.engine.policy_set import own_policies
from kvjax.engine.sampling import SamplingRows
from kvjax.policies.prefill import PrefillPolicy

BUCKET, ROWS = 4, 12
FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of engines: tokens of a page, of a chunk and of the longest sequence; pages, the prefill policy, and their own
    policy. Of steps: their policies, and tokens of those with drafts."""

    page: int = 16
    chunk: int = 32
    longest: int = 120
    policies: tuple[str, ...] = ("dense", "quest:1", "window:8+24")
    drafts: tuple[int, ...] = (4, 8, 16)
    pages: int = 40
    prefill: str | PrefillPolicy | None = None
    own: str | None = None


SMALL = Sizes()
FEW = Sizes(policies=("dense", "quest:1"), drafts=(4,))
"""Few programs, which take longer to compile than to run."""
GIVES = "window:8+24+release"
LATE = Sizes(policies=(GIVES,), drafts=(4,), prefill="window:8+24")
"""Sequences give pages back from their first step on."""
EARLY = dataclasses.replace(LATE, own=GIVES)
"""And before, while they are prefilled."""
LARGE = Sizes(128, 256, 960, ("dense", "top:1", "window:64+192"))
"""Whose pages the kernels for GPUs read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Drafted:
    """A step of `count` tokens, of which some stayed."""

    policy: str
    count: int


@dataclasses.dataclass
class Held:
    """What a live sequence must hold: its tokens, and how each was written: None by prefill, else the policy of its
    step, or the step."""

    sequence: object
    tokens: list[int]
    written: list[str | Drafted | None]


class History:
    """One engine under random calls, and the record beside it."""

    shared: ClassVar[dict[str, Any]] = {}
    """Options of the engine under test that the second one has, too."""
    against_forward: ClassVar[bool] = True
    """Whether what the model's own policies read gives the logits of a full forward."""

    def __init__(self, model, sizes: Sizes, seed: int, folder):
        if model.config.latent:  # pages without an index of blocks
            sizes = dataclasses.replace(sizes, policies=(str(own_policies(model.config)[0]), *sizes.policies[::2]))
        self.model, self.sizes, self.folder = model, sizes, folder
        self.random = np.random.default_rng(seed)
        self.engine = self.make_engine()
        self.held: list[Held] = []
        self.calls: list[str] = []

    def make_engine(self) -> Engine:
        """The engine under test."""
        return engine_for(self.model, self.sizes, **self.shared)

    def run(self, length: int) -> None:
        for _ in range(length):
            name = str(self.random.choice(self.possible_calls()))
            self.calls.append(name)
            try:
                getattr(self, name)()
            except OutOfPages:
                self.calls[-1] += " (out of pages)"
            self.check_pages()

    def possible_calls(self) -> list[str]:
        """Names of what may come next. One of them is drawn; those that stand here twice are twice as likely."""
        names = ["prefill", "fail"] if not self.held else ["prefill", "extend", "extend", "decode", "decode", "decode"]
        return names + (
            ["drafts", "drafts", "fork", "truncate", "free", "save_and_restore", "suspend_and_resume", "fail"] if self.held else []
        )

    def draw_token(self) -> int:
        return int(self.random.integers(self.model.config.vocab_size))

    def draw_tokens(self, most: int) -> list[int]:
        return self.random.integers(0, self.model.config.vocab_size, self.random.integers(1, most + 1)).tolist()

    def draw_prompt(self) -> list[int]:
        return self.draw_tokens(self.sizes.longest // 2)

    def prefill_options(self) -> dict:
        """More arguments of `Engine.prefill`."""
        return {}

    def draw_policy(self) -> str:
        return str(self.random.choice(self.sizes.policies))

    def pick(self) -> Held:
        return self.held[self.random.integers(len(self.held))]

    def pick_batch(self, tokens: int) -> list[Held]:
        """Some sequences that may get so many more tokens."""
        mixed = self.random.permutation(np.array(self.held, object))
        fitting = [each for each in mixed if len(each.tokens) + tokens <= self.sizes.longest][:BUCKET]
        return fitting[: self.random.integers(1, len(fitting) + 1)] if fitting else []

    def prefill(self):
        prompts = [self.draw_prompt() for _ in range(self.random.integers(1, 3))]
        sequences = self.engine.prefill(prompts, reserve=int(self.random.integers(0, self.sizes.page + 4)), **self.prefill_options())
        self.held += [Held(each, list(prompt), [None] * len(prompt)) for each, prompt in zip(sequences, prompts, strict=True)]

    def extend(self):
        held, tokens = self.pick(), self.draw_tokens(self.sizes.longest // 3)
        if len(held.tokens) + len(tokens) <= self.sizes.longest:
            self.engine.extend(held.sequence, tokens, all_logits=bool(self.random.integers(2)))
            held.tokens += tokens
            held.written += [None] * len(tokens)

    def decode(self):
        if chosen := self.pick_batch(1):
            tokens, policy = [self.draw_token() for _ in chosen], self.draw_policy()
            self.engine.decode([each.sequence for each in chosen], tokens, policy)
            for each, token in zip(chosen, tokens, strict=True):
                each.tokens.append(token)
                each.written.append(policy)

    def drafts(self):
        """A step whose drafts are right up to a random place."""
        count, policy = int(self.random.choice(self.sizes.drafts)), self.draw_policy()
        chosen = self.pick_batch(count)
        if not chosen:
            return
        rows = []
        for each in chosen:
            first, right = self.draw_token(), int(self.random.integers(0, count))
            wrong = [-1 if self.random.integers(2) else self.draw_token() for _ in range(count - 1 - right)]
            rows.append([first, *self.greedy_after(each, policy, first, right), *wrong])
        accepted = draft_step(self.engine, [each.sequence for each in chosen], rows, policy)
        for each, row, stay in zip(chosen, rows, accepted, strict=False):
            each.tokens += row[:stay]
            each.sequence.tokens += row[:stay]
            each.written += [Drafted(policy, count)] * stay

    def greedy_after(self, held: Held, policy: str, token: int, count: int) -> list[int]:
        """The most likely tokens after a sequence and one more token."""
        probe, found = self.engine.fork(held.sequence), [token]
        try:
            for _ in range(count):
                (logits,) = self.engine.decode([probe], found[-1:], policy)
                found.append(int(np.argmax(logits)))
        finally:
            self.engine.free(probe)
        return found[1:]

    def fork(self):
        held = self.pick()
        self.held.append(Held(self.engine.fork(held.sequence), list(held.tokens), list(held.written)))

    def truncate(self):
        held = self.pick()
        lowest = len(held.tokens) // self.sizes.page * self.sizes.page
        length = int(self.random.integers(max(lowest, 1), len(held.tokens) + 1)) if len(held.tokens) > lowest else len(held.tokens)
        self.engine.truncate(held.sequence, length)
        del held.tokens[length:], held.written[length:]

    def free(self):
        held = self.pick()
        self.engine.free(held.sequence)
        self.held = [each for each in self.held if each is not held]

    def save_and_restore(self):
        held = self.pick()
        path = self.folder / "sequence"
        self.engine.save(held.sequence, path)
        restored = self.engine.restore(path)
        self.held.append(Held(restored, list(held.tokens), list(held.written)))

    def suspend_and_resume(self):
        """One or two, which come back in other pages than they had."""
        chosen = list({id(each): each for each in (self.pick(), self.pick())}.values())
        for each in chosen:
            self.engine.suspend(each.sequence)
        for each in reversed(chosen):
            try:
                self.engine.resume(each.sequence)
            except OutOfPages:  # pages that it shared may be copies now
                self.engine.free(each.sequence)
                self.held = [other for other in self.held if other is not each]

    def fail(self):
        """A call that must be refused, and must change nothing."""
        vocabulary, longest = self.model.config.vocab_size, self.engine._page_manager.longest
        calls = [lambda: self.engine.prefill([[1, vocabulary]]), lambda: self.engine.prefill([[]]), lambda: self.engine.prefill([[1.5]])]
        if self.engine._page_eviction.reach is None:  # else a prompt of any length fits
            calls += [lambda: self.engine.prefill([[1] * (int(longest) + 1)])]
        if self.held:
            sequence = self.pick().sequence
            calls += [lambda: self.engine.extend(sequence, [-1]), lambda: self.engine.decode([sequence, sequence], [1, 2])]
            calls += [lambda: self.engine.decode([sequence], [1], "mean:3"), lambda: self.engine.truncate(sequence, sequence.length + 1)]
            calls += [lambda: self.engine.decode([sequence], [[1, 2, 3]]), lambda: self.engine.resume(sequence)]
        with pytest.raises((ValueError, OutOfPages)):
            calls[self.random.integers(len(calls))]()

    def check_pages(self):
        for name, allocator in self.engine.allocators.items():
            owners = np.zeros(allocator.total, int)
            for each in self.held:
                np.add.at(owners, [page for page in each.sequence.pages[name] if page >= 0], 1)
            assert owners.tolist() == [allocator.owners(page) for page in range(owners.size)], (name, self.calls)
            assert allocator.free == (owners == 0).sum(), (name, self.calls)
        for each in self.held:
            assert each.sequence.tokens == each.tokens, self.calls
            assert each.sequence.length == len(each.tokens), self.calls
        assert self.engine.sequences == {each.sequence for each in self.held}, self.calls

    def differences(self) -> int:
        """Sequences whose next step has other bits than alone, or is not near the full forward though all of it was the
        model's own."""
        wrong, own = 0, str(own_policies(self.model.config)[0])
        for each in self.held:
            token, policy = self.draw_token(), self.draw_policy()
            try:
                (logits,) = self.engine.decode([each.sequence], [token], policy)
            except OutOfPages:
                continue
            (alone,) = replayed(self.model, self.sizes, each, token, policy, **self.shared)
            wrong += not np.array_equal(np.asarray(logits), np.asarray(alone))
            steps = {how.policy if isinstance(how, Drafted) else how for how in each.written}
            near = self.against_forward and self.engine.dtype == "float32" and self.sizes.prefill is None
            if near and {policy, *steps} <= {own, None}:  # 16-bit sums are far from the full forward
                text = np.zeros(self.sizes.longest + self.sizes.page, int)
                text[: len(each.tokens) + 1] = [*each.tokens, token]
                expected = self.model.full_forward(text)[len(each.tokens)]
                wrong += not np.allclose(logits, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
        return wrong


def engine_for(model, sizes, **options):
    fields = {"pages": sizes.pages, "page_size": sizes.page, "prefill_chunk": sizes.chunk, "batch_buckets": (BUCKET, ROWS)}
    return Engine(model, sizes.own, policies=sizes.policies, prefill=sizes.prefill, **fields, **options)


def draft_step(engine, sequences, rows, policy) -> list[int]:
    """Write the rows' first tokens, and the drafts behind them that are what is sampled: how many stay of each."""
    slots = [*sequences, *[None] * (BUCKET - len(sequences))]
    tokens = np.zeros((BUCKET, len(rows[0])), np.int32)
    tokens[: len(rows)] = rows
    return np.asarray(engine.decode_and_sample(slots, tokens, SamplingRows.of([None] * BUCKET), policy).accepted).tolist()


def replayed(model, sizes, held: Held, token: int, policy: str, **options):
    """Logits of the next step in an engine that ran nothing but this sequence's own record."""
    engine = engine_for(model, sizes, **options)
    sequence, at = None, 0
    while at < len(held.tokens):
        how, end = held.written[at], at + 1
        while end < len(held.tokens) and held.written[end] is how and not isinstance(how, str):
            end += 1
        tokens = held.tokens[at:end]
        if isinstance(how, Drafted):
            accepted = draft_step(engine, [sequence], [tokens + [-1] * (how.count - len(tokens))], how.policy)
            assert accepted[0] == len(tokens), "sequences differ: alone, a step accepts other drafts"
            sequence.tokens += tokens
        elif how is not None:
            engine.decode([sequence], tokens, how)
        elif sequence is None:
            (sequence,) = engine.prefill([tokens])
        else:
            engine.extend(sequence, tokens)
        at = end
    return engine.decode([sequence], [token], policy)


def run_histories(model, seeds, folder, sizes=SMALL, kind=History) -> collections.Counter[str]:
    """kind: the class of histories."""
    counts = collections.Counter()
    for seed in seeds:
        history = kind(model, sizes, seed, folder)
        history.run(int(history.random.integers(5, 25)))
        counts.update({"histories": 1, "calls": len(history.calls), "sequences compared": len(history.held)})
        found = history.differences()
        assert found == 0, f"history {seed}: {found} sequences differ after {history.calls}"
    return counts
