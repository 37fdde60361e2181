"""Random histories of an engine: whatever was called, in whatever order, every sequence has the bits it would have alone.

A history is a run of random calls on one engine: prefill, extend, decode in batches, fork, truncate, free, save and restore, and calls that
must fail. Beside it stands a plain record of what each sequence holds: which tokens prefill wrote, and which tokens decode wrote, through
which policy. Three things are checked: page counts after every call; the bits of every sequence's next step against a second engine in
which nothing but that record was ever run; and, for what was written and read densely, the logits against one full forward.
"""

import dataclasses

import numpy as np
import pytest

from kvjax import Engine, OutOfPages

pytestmark = pytest.mark.optimized

PAGE, CHUNK, PAGES, BUCKET, ROWS = 16, 32, 40, 4, 12
LONGEST = 120
POLICIES = ("dense", "quest:1", "window:8+24")


@dataclasses.dataclass
class Held:
    """What a live sequence must hold: its tokens, and how each was written (None: by prefill; else the policy of its step)."""

    sequence: object
    tokens: list[int]
    policies: list[str | None]


class History:
    """One engine under random calls, and the record beside it."""

    def __init__(self, model, seed: int, folder):
        self.model, self.folder = model, folder
        self.random = np.random.default_rng(seed)
        self.engine = engine_for(model)
        self.held: list[Held] = []
        self.calls: list[str] = []

    def run(self, length: int) -> None:
        for _ in range(length):
            names = ["prefill", "fail"] if not self.held else ["prefill", "extend", "extend", "decode", "decode", "decode"]
            names += ["fork", "truncate", "free", "save_and_restore", "fail"] if self.held else []
            name = str(self.random.choice(names))
            self.calls.append(name)
            try:
                getattr(self, name)()
            except OutOfPages:
                self.calls[-1] += " (out of pages)"
            self.check_pages()

    def draw_tokens(self, most: int) -> list[int]:
        return self.random.integers(0, self.model.config.vocab_size, self.random.integers(1, most + 1)).tolist()

    def pick(self) -> Held:
        return self.held[self.random.integers(len(self.held))]

    def prefill(self):
        prompts = [self.draw_tokens(60) for _ in range(self.random.integers(1, 3))]
        sequences = self.engine.prefill(prompts, reserve=int(self.random.integers(0, 20)))
        self.held += [Held(each, list(prompt), [None] * len(prompt)) for each, prompt in zip(sequences, prompts, strict=True)]

    def extend(self):
        held, tokens = self.pick(), self.draw_tokens(40)
        if len(held.tokens) + len(tokens) <= LONGEST:
            self.engine.extend(held.sequence, tokens, all_logits=bool(self.random.integers(2)))
            held.tokens += tokens
            held.policies += [None] * len(tokens)

    def decode(self):
        chosen = [each for each in self.random.permutation(np.array(self.held, object))[:BUCKET] if len(each.tokens) < LONGEST]
        if chosen:
            chosen = chosen[: self.random.integers(1, len(chosen) + 1)]
            tokens, policy = self.random.integers(0, self.model.config.vocab_size, len(chosen)).tolist(), str(self.random.choice(POLICIES))
            self.engine.decode([each.sequence for each in chosen], tokens, policy)
            for each, token in zip(chosen, tokens, strict=True):
                each.tokens.append(token)
                each.policies.append(policy)

    def fork(self):
        held = self.pick()
        self.held.append(Held(self.engine.fork(held.sequence), list(held.tokens), list(held.policies)))

    def truncate(self):
        held = self.pick()
        lowest = len(held.tokens) // PAGE * PAGE
        length = int(self.random.integers(max(lowest, 1), len(held.tokens) + 1)) if len(held.tokens) > lowest else len(held.tokens)
        self.engine.truncate(held.sequence, length)
        del held.tokens[length:], held.policies[length:]

    def free(self):
        held = self.pick()
        self.engine.free(held.sequence)
        self.held = [each for each in self.held if each is not held]

    def save_and_restore(self):
        held = self.pick()
        path = self.folder / "sequence"
        self.engine.save(held.sequence, path)
        restored = self.engine.restore(path)
        self.held.append(Held(restored, list(held.tokens), list(held.policies)))

    def fail(self):
        """A call that must be refused, and must change nothing."""
        vocabulary = self.model.config.vocab_size
        calls = [lambda: self.engine.prefill([[1, vocabulary]]), lambda: self.engine.prefill([[]]), lambda: self.engine.prefill([[1.5]])]
        calls += [lambda: self.engine.prefill([[1] * (PAGES * PAGE + 1)])]
        if self.held:
            sequence = self.pick().sequence
            calls += [lambda: self.engine.extend(sequence, [-1]), lambda: self.engine.decode([sequence, sequence], [1, 2])]
            calls += [lambda: self.engine.decode([sequence], [1], "top:3"), lambda: self.engine.truncate(sequence, sequence.length + 1)]
        with pytest.raises((ValueError, OutOfPages)):
            calls[self.random.integers(len(calls))]()

    def check_pages(self):
        rows = self.engine.allocators.get("recurrent")
        assert rows is None or rows.total - rows.free == sum(bool(each.tokens) for each in self.held), self.calls
        owners = np.zeros(self.engine.allocators["full"].total, int)
        for each in self.held:
            np.add.at(owners, each.sequence.pages["full"], 1)
            assert each.sequence.tokens == each.tokens, self.calls
            assert each.sequence.length == len(each.tokens), self.calls
        assert owners.tolist() == [self.engine.allocators["full"].owners(page) for page in range(owners.size)], self.calls
        assert self.engine.allocators["full"].free == (owners == 0).sum(), self.calls
        assert self.engine.sequences == {each.sequence for each in self.held}, self.calls

    def differences(self) -> int:
        """Sequences whose next step has other bits than alone, or is not near the full forward though all of it was dense."""
        wrong = 0
        for each in self.held:
            if len(each.tokens) + 1 > LONGEST + PAGE:
                continue
            token, policy = int(self.random.integers(self.model.config.vocab_size)), str(self.random.choice(POLICIES))
            try:
                (logits,) = self.engine.decode([each.sequence], [token], policy)
            except OutOfPages:
                continue
            (alone,) = replayed(self.model, each, token, policy)
            wrong += not np.array_equal(np.asarray(logits), np.asarray(alone))
            if {policy, *each.policies} <= {"dense", None} and self.engine.dtype == "float32":  # 16-bit sums are far from the full forward
                text = np.zeros(160, int)
                text[: len(each.tokens) + 1] = [*each.tokens, token]
                expected = self.model.full_forward(text)[len(each.tokens)]
                wrong += not np.allclose(logits, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
        return wrong


def engine_for(model):
    return Engine(model, policies=POLICIES, pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET, ROWS))


def replayed(model, held: Held, token: int, policy: str):
    """Logits of the next step in an engine that ran nothing but this sequence's own record."""
    engine = engine_for(model)
    sequence, at = None, 0
    while at < len(held.tokens):
        end = at + 1
        if held.policies[at] is None:
            while end < len(held.tokens) and held.policies[end] is None:
                end += 1
            if sequence is None:
                (sequence,) = engine.prefill([held.tokens[:end]])
            else:
                engine.extend(sequence, held.tokens[at:end])
        else:
            engine.decode([sequence], [held.tokens[at]], held.policies[at])
        at = end
    return engine.decode([sequence], [token], policy)


def run_histories(model, seeds, folder) -> dict[str, int]:
    counts = {"histories": 0, "calls": 0, "sequences compared": 0, "differences": 0}
    for seed in seeds:
        history = History(model, seed, folder)
        history.run(int(history.random.integers(5, 25)))
        counts["histories"] += 1
        counts["calls"] += len(history.calls)
        counts["sequences compared"] += len(history.held)
        found = history.differences()
        assert found == 0, f"history {seed}: {found} sequences differ after {history.calls}"
    return counts


@pytest.mark.parametrize("name", ["model", "recurrent_model"])
def test_random_histories_have_the_bits_of_each_sequence_alone(name, request, tmp_path):
    counts = run_histories(request.getfixturevalue(name), range(3), tmp_path)
    assert counts["sequences compared"] > 3


def test_the_comparison_sees_a_page_that_two_sequences_write(model, tmp_path, monkeypatch):
    """A fork that shares its open page, though both go on writing it, must be found."""

    def fork(engine, sequence):
        child = type(sequence)(list(sequence.tokens), sequence.length, {"full": list(sequence.pages["full"])}, sequence.logits, {})
        engine.allocators["full"].share(child.pages["full"])
        engine.sequences.add(child)
        return child

    monkeypatch.setattr(Engine, "fork", fork)
    with pytest.raises(AssertionError, match="differ"):
        run_histories(model, range(40), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["model", "bf16_model", "recurrent_model", "bf16_recurrent_model"])
def test_many_random_histories(name, request, tmp_path, capsys):
    counts = run_histories(request.getfixturevalue(name), range(1000, 1900), tmp_path)
    with capsys.disabled():
        print(f"\n{name}: {counts}")
