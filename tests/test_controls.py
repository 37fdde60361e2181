"""Every table of evidence has a row that must fail, and it does, or the page says what the table cannot show
(docs/measured/index.md)."""

import dataclasses
import json
import re
import statistics
from pathlib import Path

import pytest

from kvjax.cost_model import Price, known_cost_models
from kvjax.cost_model.evidence import parse_level, qualified, recorded_evidence
from kvjax.cost_model.fitting import DEVICE, HOST, MESH, Key, read_cells, regret
from kvjax.evaluation.report import CONTROL_LOSS, KEPT_KL, controls
from kvjax.serving.bench.decode import config_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = ROOT / "docs" / "measured"
REGISTER = (MEASURED / "index.md").read_text(encoding="utf-8").partition("## What must fail, and does")[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARKED = sorted({name for file in DOCUMENTS for name in re.findall(r"<!-- (\w+:[\w-]+) -->", file.read_text(encoding="utf-8"))})


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def words_of(page):
    """The text of a page of docs/measured/ on one line."""
    return " ".join((MEASURED / f"{page}.md").read_text(encoding="utf-8").split())


def test_every_marked_table_names_what_must_fail():
    assert len(MARKED) > 20
    assert sorted(set(re.findall(r"`(\w+:[a-z][\w-]+)`", REGISTER)) & set(MARKED)) == MARKED
    assert [name for name in re.findall(r"`((?:bench|cost|evaluation):[\w-]+)`", REGISTER) if name not in MARKED] == []


@pytest.mark.parametrize("name", ["fidelity-panel", "fidelity-haystacks"])
def test_a_window_fails_wherever_dense_answers(name):
    figures = result(f"h200/{name}")
    rows = [row for row in figures["retrieval"] if row["policy"] == "window:640" and row["trials"]]
    assert {row["length"] for row in rows} == set(figures["settings"]["lengths"])
    for row in rows:
        pairs = row["against_dense"]
        assert pairs["lost"] >= CONTROL_LOSS * (pairs["both"] + pairs["lost"])
    assert all(row["kl"]["value"] > KEPT_KL for row in figures["forced"] if row["policy"] == "window:640")
    (line,) = controls(figures)
    assert "does not fail" not in line


@pytest.mark.parametrize("name", ["fidelity-budgets", "fidelity-tasks", "fidelity-long"])
def test_a_run_without_a_window_that_fails_says_so(name):
    (line,) = controls(result(f"h200/{name}"))
    assert line in (MEASURED / "evaluation.md").read_text(encoding="utf-8")
    assert line.startswith("no control: ") or "too few" in line


def test_budgets_were_asked_what_the_window_of_the_run_failed():
    run, budgets = (result(f"h200/fidelity-{name}")["settings"] for name in ("panel", "budgets"))
    same = ("text", "text with SHA-256", "seed", "trials", "distractors", "lengths", "tasks", "haystacks", "page_size")
    assert {name: run[name] for name in same} == {name: budgets[name] for name in same}


def test_the_window_fails_echo_in_every_cell_that_is_not_marked_invalid():
    """And in none is it marked for facts: dense does well at each length."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("h200/prefill-echo*.json")]
    cells = [(run, cell) for run in runs for cell in run["cells"]]
    assert {cell["length"] for _, cell in cells} == {8192, 16384, 32768}
    for run, cell in cells:
        assert (cell["facts_invalid"], cell["prompts"], run["failed"]) == ([], cell["of"], {})
        rows = {row["policy"]: row for row in run["rows"] if row["length"] == cell["length"]}
        assert {row["facts"] for row in rows.values()} == {400}
        assert rows["dense"]["share"]["value"] >= 0.9
        assert rows["window:64+1024"]["hits"] <= 0.5 * rows["dense"]["hits"]
        assert set(rows["window:64+1024"]["hits_of_prompts"]) <= {0, 1}  # the fact that its sinks hold
        # The noise floor is no copy of dense, and loses nothing.
        assert 0 < rows["dense again"]["kl"]["value"] < 0.01
        assert abs(rows["dense again"]["against_dense"]["difference"]["value"]) <= 0.01
        assert rows["bounds:32+sparse"]["kl_text"]["value"] < rows["window:64+1024"]["kl_text"]["value"]
        for which in ("facts", "passages"):
            for why in cell[f"{which}_invalid"]:
                assert why in words_of("prefill")


def test_what_prefill_policies_recall_is_as_the_page_says():
    """Lists of every 16th query lose a third to two thirds; those of every query, and the oracle's, next to nothing."""
    rows = {(row["policy"], row["length"]): row["hits"] for row in result("h200/prefill-echo")["rows"]}

    def both(name):
        return rows[name, 8192], rows[name, 16384]

    text = words_of("prefill")
    assert "`momo:32/8` predicts {} of 400 facts at 8K and {} at 16K".format(*both("momo:32/8")) in text
    assert "`momo:64/8` {} and {}, where dense predicts {} and {}".format(*both("momo:64/8"), *both("dense")) in text
    lost = [1 - hits / dense for name in ("momo:32/8", "momo:64/8") for hits, dense in zip(both(name), both("dense"), strict=True)]
    assert 0.3 < min(lost) < 0.34 < 0.65 < max(lost) < 0.67
    assert both("oracle:32") == both("bounds:32+sparse") == both("momo:32/8+gamma1") == both("dense")
    long = {row["policy"]: row["hits"] for row in result("h200/prefill-echo-32768")["rows"]}
    assert long["dense"] - long["bounds:32+sparse"] == 4
    for length in ("8k", "16k", "32k"):
        table = {row["policy"]: row for row in result(f"h200/prefill-echo-peers-{length}")["rows"]}
        dense = table["dense"]["hits"]
        assert all(table[name]["against_dense"]["lost"] > 0.3 * dense for name in ("flex:0.99", "flex:0.9", "xattention:0.9"))
        assert all(table[name]["against_dense"]["lost"] == 0 for name in ("bounds:0.01", "bounds:0.003"))


def test_needles_after_a_sparse_prefill_say_what_they_cannot_show():
    assert "**This table cannot show what a sparse prefill loses.**" in words_of("prefill")
    for length in (16384, 32768):
        found = result(f"h200/sparse-prefill-needles-{length}")
        assert [pair["prefill"] for pair in found["pairs"]] == [other["prefill"] for other in found["other_prefills"]]
        hits = {other["prefill"]: other["results"][0]["hits"] for other in found["other_prefills"]}
        dense = found["results"][0]["hits"]
        assert hits["window:64+1024"] > 0.9 * dense, "needles would show something after all"


def test_a_random_hint_does_not_help_the_op_that_starts_from_it():
    rows = {row["case"]: row for row in result("h200/top-k")["rows"] if "median_s" in row}
    for scores, length in (("normal", "128k"), ("normal", "1024k"), ("yarn", "128k")):
        place = f"{scores}/{length}/b1/k2048"
        assert rows[f"{place}/random/top_k:start=hint"]["median_s"] > rows[f"{place}/none/top_k"]["median_s"]


def test_chance_shares_less_than_any_layer():
    for row in result("cpu/top-k-overlap")["rows"]:
        assert row["chance"] < 0.5 * row["raw"]


def test_a_fit_without_a_term_is_worse_and_so_is_always_dense():
    made = known_cost_models()[0]
    runs = [json.loads((ROOT / name).read_text(encoding="utf-8")) for name in made.source.split()]
    cells = read_cells(runs, config_of)[Key(made.device, made.model, config_of(made.model).num_layers, made.dtype)]
    worse = []
    free = tuple((name, Price(0.0)) for name, _ in made.c1)
    for kind, lack in ((DEVICE, {"c1": free}), (HOST, {"bus": None}), (MESH, {"exchanges": None})):
        some = [cell for cell in cells if cell.kind == kind and (kind != DEVICE or cell.policy != "dense")]
        fits = made, dataclasses.replace(made, **lack)
        whole, less = (statistics.mean(abs(cell.predicted(each) / cell.seconds - 1) for cell in some) for each in fits)
        assert less > 2 * whole
        worse.append(f"{less / whole:.1f}")
    best = {}
    for cell in cells:
        best.setdefault(cell.place, {})[cell.policy] = cell.seconds
    places = [seconds for place, seconds in best.items() if place[:3] == (1, 1, 0) and len(seconds) > 1]
    dense = statistics.mean(seconds["dense"] / min(seconds.values()) - 1 for seconds in places)
    chosen = regret(cells)
    said = "yes, {}, {} and {} times; so must always dense, which loses {:.1%} of the time and not {:.2%}"
    assert said.format(*worse, dense, chosen) in REGISTER
    assert chosen < 0.01 < 0.5 < dense


def test_mutants_that_the_pages_name_are_there():
    """Of the ops whose errors stand in tables, and of the token-sparse step."""
    for op in ("flash_attention", "query_sparse_attention", "block_sparse_attention", "union_blocks", "gather_attention", "select_blocks"):
        (path,) = (ROOT / "tests" / "pallas_kernels").rglob(f"test_{op}.py")
        suite = path.read_text(encoding="utf-8")
        assert re.search(r"def test_.*mutant", suite), op
    assert "def test_mutant_fails(" in (ROOT / "tests" / "models" / "test_latent_attention.py").read_text(encoding="utf-8")


def test_policies_that_fail_are_not_on_record_as_assured():
    rows, level = recorded_evidence(), parse_level("assured")
    embedded = [row for row in rows if row.model == "needle"]
    assert {row.policy for row in embedded} >= {"mean:8", "mean:16", "mean:32", "top:8", "top:32", "cascade:8", "cascade:32"}
    for length in (8192, 16384, 32768):
        kept = qualified(embedded, level, length)
        assert {"top:32", "cascade:8", "cascade:32"} <= set(kept)
        assert not {"mean:8", "mean:16", "mean:32", "top:8"} & set(kept)
    released = {name: [row for row in rows if row.model == name] for name in {row.model for row in rows} - {"needle"}}
    assert len(released) == 2
    for name, of_model in released.items():
        kept = qualified(of_model, level, 8192)
        assert "cascade:32" in kept, name
        assert not {"top:8", "top:32", "quest:64", "window:64+1536"} & set(kept), name
