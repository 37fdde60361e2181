"""Prompt recall: prompts that repeat themselves, what counts as predicted, and when a cell says nothing."""

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.evaluation import needle, prompt_recall
from kvjax.evaluation.prompt_recall import RecallPlan, RecallRun, RecallTask
from kvjax.evaluation.recall_report import recall_rows, remarks, summarize
from kvjax.evaluation.teacher_forcing import ALONE
from kvjax.models import load
from kvjax.models.needle import path

PLAN = RecallPlan(
    prefills=("oracle:1",),
    lengths=(512, 640),
    facts=8,
    facts_per_prompt=4,
    passages=3,
    passage_tokens=12,
    run_in=4,
    control="window:16+64",
    page_size=64,
    prefill_chunk=128,
)


@pytest.fixture(scope="module")
def embedded():
    return load(path(), dtype=jnp.float32)


@pytest.fixture(scope="module")
def text():
    return needle.documentation_text()[:30_000]


@pytest.fixture(scope="module")
def task(embedded, text):
    tokenizer = embedded.tokenizer
    return RecallTask(tokenizer, needle.encode_text(tokenizer, text), needle.vocabulary_words(tokenizer), 4, 3, 12, 4, prefix_ids=(7,))


@pytest.mark.parametrize("length", [512, 1000])
def test_a_prompt_repeats_late_what_stands_early(task, embedded, length):
    prompts = task.prompts(length, 3)
    for prompt in prompts:
        assert len(prompt.ids) == length
        assert prompt.ids[0] == 7
        assert [len(prompt.facts), len(prompt.passages)] == [4, 3]
        for each in (*prompt.facts, *prompt.passages):
            first, again = (prompt.ids[at : at + each.count] for at in (each.source, each.start))
            assert first == again
            assert each.source + each.count <= round(0.3 * length) < prompt.late < each.start
            assert each.start + each.count <= length
        for fact in prompt.facts:
            value = embedded.tokenizer.decode(prompt.ids[fact.start : fact.start + fact.count]).strip()
            assert len(value) == 5
            assert value.isdigit()
            # A value stands twice, and nowhere between: nothing nearer can be copied.
            written = [at for at in range(length) if prompt.ids[at : at + fact.count] == prompt.ids[fact.start : fact.start + fact.count]]
            assert written == [fact.source, fact.start]
        spans = sorted((each.start, each.start + each.count) for each in (*prompt.facts, *prompt.passages))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert prompts[0].ids != prompts[1].ids
    assert task.prompts(length, 3) == prompts
    assert task.prompts(length, 3, seed=1) != prompts


def test_prompts_that_cannot_be_are_refused(task):
    with pytest.raises(ValueError, match="use longer prompts, or fewer facts"):
        task.prompts(200, 1)
    with pytest.raises(ValueError, match="pass a longer text"):
        task.prompts(100_000, 1)
    with pytest.raises(ValueError, match="passage_tokens must be at least 5"):
        dataclasses.replace(task, passage_tokens=4)


class ScriptedEngine:
    """Predicts every next token of the prompt it was given, except where its policy misses: one digit of some facts."""

    missing: ClassVar[dict] = {}
    script: ClassVar[dict] = {}
    live = 0

    def __init__(self, model, *, prefill, pages, page_size, prefill_chunk):
        self.vocabulary, self.policy, self.room = model.config.vocab_size, str(prefill), pages * page_size

    def prefill(self, prompts, *, reserve):
        (prompt,) = prompts
        assert len(prompt) % 128 == 0
        assert len(prompt) + reserve == self.room == 640  # one width of page table for all lengths
        if self.policy == "broken:1":
            raise RuntimeError("no such\nkernel")
        ScriptedEngine.live += 1
        return [SimpleNamespace(done=len(prompt), whole=self.script[tuple(prompt)])]

    def extend(self, sequence, tokens, *, all_logits):
        assert all_logits
        assert sequence.whole[sequence.done : sequence.done + len(tokens)] == tokens
        logits = np.zeros((len(tokens), self.vocabulary), np.float32)
        for row in range(len(tokens)):
            position = sequence.done + row + 1
            true = sequence.whole[position] if position < len(sequence.whole) else 0
            logits[row, (true + ((tuple(sequence.whole), position) in self.missing.get(self.policy, ()))) % self.vocabulary] = 9
        sequence.done += len(tokens)
        return jnp.asarray(logits)

    def free(self, sequence):
        ScriptedEngine.live -= 1


@pytest.fixture
def scripted(embedded, text, monkeypatch):
    """A run whose engines are made up: (plan) -> RecallRun."""
    monkeypatch.setattr(prompt_recall, "Engine", ScriptedEngine)

    def make(plan=PLAN):
        run = RecallRun(embedded, text, plan)
        prompts = [prompt for some in run._prompts.values() for prompt in some]
        ScriptedEngine.script = {tuple(p.ids[: p.late // 128 * 128]): p.ids for p in prompts}
        # The control misses the last token of every value, and every second token of passages; the oracle the first
        # token of one value.
        window = {(tuple(p.ids), f.start + f.count - 1) for p in prompts for f in p.facts}
        window |= {(tuple(p.ids), at) for p in prompts for e in p.passages for at in range(e.start + 4, e.start + e.count, 2)}
        first = run._prompts[512][0]
        ScriptedEngine.missing = {"window:16+64": window, "oracle:1": {(tuple(first.ids), first.facts[2].start)}}
        ScriptedEngine.live = 0
        return run

    return make


def test_a_fact_counts_if_all_of_its_tokens_are_predicted(scripted):
    run, done = scripted(), []
    records = list(run.records(done.append))
    assert [(record["length"], record["prompt"]) for record in records] == [(512, 0), (512, 1), (640, 0), (640, 1)]
    assert sum(done) == run.work == 4 * 2 * (512 + 640)
    assert ScriptedEngine.live == 0
    first, *others = records
    assert first["facts"] == {"dense": [1] * 4, ALONE: [1] * 4, "window:16+64": [0] * 4, "oracle:1": [1, 1, 0, 1]}
    assert all(record["facts"]["oracle:1"] == [1] * 4 for record in others)
    for record in records:
        assert record["passages"]["dense"] == [1.0] * 3
        assert record["passages"]["window:16+64"] == [0.5] * 3
        assert record["kl"]["dense"] == record["kl"][ALONE] == 0
        # What is repeated is no running text.
        assert record["kl"]["window:16+64"] > 0 == record["kl_text"]["window:16+64"]


def test_figures_are_paired_and_valid_where_the_control_fails(scripted):
    run = scripted()
    figures = summarize(run.plan, run.records(), run.failed)
    assert json.loads(json.dumps(figures)) == figures
    assert [cell["facts_invalid"] + cell["passages_invalid"] for cell in figures["cells"]] == [[], []]
    assert remarks(figures) == []
    rows = {(row["length"], row["policy"]): row for row in figures["rows"]}
    pairs = rows[512, "oracle:1"]["against_dense"]
    assert (pairs["both"], pairs["lost"], pairs["gained"], pairs["neither"]) == (7, 1, 0, 0)
    assert pairs["difference"]["value"] == -1 / 8
    assert rows[640, "window:16+64"]["hits"] == 0
    assert sum(each["facts"] for each in rows[512, "dense"]["by_distance"]) == 8
    assert len(recall_rows(figures)) == 2 * 4


def test_a_cell_whose_control_does_not_fail_says_so(scripted):
    run = scripted()
    ScriptedEngine.missing = {}
    figures = summarize(run.plan, run.records(), run.failed)
    assert figures["cells"][0]["facts_invalid"] == ["the control window:16+64 loses only 0 of 8 facts"]
    assert figures["cells"][0]["passages_invalid"] == ["the control window:16+64 still predicts 100.0% of 100.0%"]
    assert all(row[2] == "invalid" and "8/8" not in row for row in recall_rows(figures))
    assert len(remarks(figures)) == 4


def test_a_cell_in_which_dense_fails_says_so(scripted):
    run = scripted()
    ScriptedEngine.missing |= {"dense": ScriptedEngine.missing["window:16+64"]}
    figures = summarize(run.plan, run.records(), run.failed)
    assert figures["cells"][1]["facts_invalid"] == ["dense predicts 0 of 8 facts, fewer than 90%"]
    assert figures["cells"][1]["passages_invalid"][0] == "dense predicts 50.0% of passages, less than 90%"


@pytest.mark.long
def test_one_policy_that_fails_does_not_lose_the_others(scripted, monkeypatch):
    run = scripted()
    run._engines["oracle:1"].policy = "broken:1"
    figures = summarize(run.plan, run.records(), run.failed)
    assert figures["failed"] == {"oracle:1": "RuntimeError: no such kernel"}
    assert {row["policy"] for row in figures["rows"]} == {"dense", "window:16+64", ALONE}
    assert remarks(figures) == ["oracle:1 failed and was left out: RuntimeError: no such kernel"]
    assert ScriptedEngine.live == 0
    run = scripted()
    run._engines["window:16+64"].policy = "broken:1"
    figures = summarize(run.plan, run.records(), run.failed)
    assert figures["cells"][0]["facts_invalid"] == ["the control window:16+64 could not be run"]
    run = scripted()
    run._engines["dense"].policy = "broken:1"
    with pytest.raises(RuntimeError, match="no such"):
        list(run.records())


@pytest.mark.long
def test_a_length_under_way_is_marked(scripted):
    run = scripted()
    records = run.records()
    figures = summarize(run.plan, [next(records)], run.failed)
    assert figures["rows"] == []
    records = list(scripted(dataclasses.replace(PLAN, facts=12)).records())[:2]
    assert remarks(summarize(dataclasses.replace(PLAN, facts=12), records, {})) == ["512 tokens: 2 of 3 prompts done"]


@pytest.mark.long
def test_the_embedded_model_recalls_facts_inside_a_prompt_unless_a_window_hides_them(embedded, text):
    """Six compilations of the embedded model, the only way to see that dense does well and the control fails."""
    sizes = {"facts": 8, "facts_per_prompt": 4, "passages": 2, "passage_tokens": 12, "run_in": 4, "prefill_chunk": 384}
    plan = RecallPlan(("dense",), (768,), control="window:16+16", **sizes)
    run = RecallRun(embedded, text, plan)
    figures = summarize(plan, run.records(), run.failed)
    dense, window, again = figures["rows"]
    assert [dense["policy"], window["policy"], again["policy"]] == ["dense", "window:16+16", ALONE]
    assert dense["hits"] == again["hits"] >= 7
    assert window["hits"] <= 2
    assert figures["cells"][0]["facts_invalid"] == []
    assert again["kl"]["value"] < 1e-6 < window["kl_text"]["value"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "at least one"),
        ({"lengths": (512, 512)}, "each once"),
        ({"facts": 10}, "use a multiple of 4"),
        ({"facts": 4}, "at least two prompts"),
        ({"prefill_chunk": 512}, "use a smaller chunk"),
        ({"control": "dense"}, "a policy that fails"),
        ({"prefills": ("nothing:4",)}, "not understood"),
    ],
)
def test_plans_that_measure_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


def test_lengths_beyond_the_model_are_refused(embedded, text):
    with pytest.raises(ValueError, match="more than the model's 32,768 positions"):
        RecallRun(embedded, text, dataclasses.replace(PLAN, lengths=(65_536,)))


def test_tables_are_made_from_the_json(scripted):
    run = scripted()
    figures = summarize(run.plan, run.records(), run.failed)
    ScriptedEngine.missing = {}
    invalid = summarize(run.plan, run.records(), run.failed)
    rows = recall_rows(figures)
    assert [row[:3] for row in rows[:4]] == [
        ("512", "dense", "8/8"),
        ("512", "window:16+64", "0/8"),
        ("512", "oracle:1", "7/8"),
        ("512", "dense again (noise)", "8/8"),
    ]
    assert (rows[2][4], rows[2][5][:8]) == ("-1/+0", "-0.125 [")
    assert sum(row.count("invalid") for row in recall_rows(invalid)) == 2 * 8
    assert "invalid, facts at 640 tokens: the control window:16+64 loses only 0 of 8 facts" in remarks(invalid)
