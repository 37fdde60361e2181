"""The pages of evaluation in docs/measured/ are what the committed runs make."""

import json
import re
from pathlib import Path

import pytest
from real_checkpoint import CHECKPOINTS

from benchmarks.evidence import load, rendered
from kvjax.evaluation.statistics import proportion
from kvjax.model.rope import mscale

ROOT = Path(__file__).parent.parent
RUNS = load(list((ROOT / "benchmarks/results/h200").glob("fidelity-*.json")))


RELEASED = load([ROOT / "benchmarks/results/cpu/fidelity-released.json"])


BASELINES = load([ROOT / "benchmarks/results/cpu/fidelity-baselines.json"])


def test_the_part_on_ways_to_choose_blocks_was_measured():
    lists = {row["policy"]: row["lists"] for row in BASELINES[0]["forced"] if "lists" in row}
    assert {counts["lists"] for counts in lists.values()} == {768}
    equal = {name: counts["equal"] for name, counts in lists.items()}
    kept = {"cascade:4/all+8bit": 763, "cascade:4/all+4bit": 656, "cascade:4/32": 600, "cascade:4/all+1bit": 20}
    assert {name: equal[name] for name in kept} == kept
    assert lists["cascade:4/all+8bit"]["certified"] == {"levels": 72, "norms": 336}
    assert all(counts["certified"][bound] <= counts["equal"] for counts in lists.values() for bound in ("levels", "norms"))


NEAR = load([ROOT / "benchmarks/results/cpu/fidelity-near-miss.json"])


def test_the_part_on_64_other_facts_was_measured():
    (run,) = NEAR
    assert (run["settings"]["distractors"], run["settings"]["haystacks"]) == (64, ["codes", "near-miss"])
    hits = {row["policy"]: row["hits"] for row in run["retrieval"] if row["haystack"] == "codes"}
    fewer = {"window:640": 3, "top:4": 16, "cascade:4/all+1bit": 21, "mean:4": 4, "cascade:4/32+every2": 4}
    assert hits == dict.fromkeys(hits, 30) | fewer
    assert len(hits) == len(fewer) + 7
    (dense,) = (row for row in run["retrieval"] if (row["haystack"], row["policy"]) == ("near-miss", "dense"))
    assert (sum(cell["hits"] for cell in dense["by_depth"]), dense["invalid_trials"]) == (19, 30)


LONG = load(list((ROOT / "benchmarks/results/h200").glob("long-*.json")))


def test_the_page_of_the_long_model_is_what_its_files_make():
    text = (ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8")
    assert all(run.get("settings", run)["model"] == "needle-128k" for run in LONG)
    assert "is the folder of the training run:\n\n    ln -s RUN/model needle-128k\n" in text


def test_files_of_several_commands_stand_in_one_part_and_say_whose_they_are(tmp_path):
    """Runs first, then prompt recall, then needles after each prefill; the embedded model is not named."""
    names = ("fidelity-long", "prefill-echo-32768", "sparse-prefill-needles-32768")
    for number, name in enumerate(reversed(names)):
        figures = json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())
        (tmp_path / f"{number}.json").write_text(json.dumps(figures))
        figures.get("settings", figures)["model"] = "other"
        (tmp_path / f"other-{number}.json").write_text(json.dumps(figures))
    own, other = (load(list(tmp_path.glob(pattern))) for pattern in ("[0-9].json", "other-*.json"))
    mark = "<!-- evaluation:here -->\n<!-- /evaluation -->"
    text = rendered(mark, own, "here")
    titles = [line for line in text.splitlines() if line.startswith("**")]
    assert [title.split()[0] for title in titles] == ["**needle", "**facts", "**needles"]
    assert re.search(r"\| 32,768 +\| +momo:64/8 +\| +387/400 +\| +384/400 +\|", text)
    named = [line for line in rendered(mark, other, "here").splitlines() if line.startswith("**")]
    assert named == [f"{title[:-2]}; model `other`**" for title in titles]


def test_an_overview_has_a_row_for_each_cell_and_brackets_where_dense_cannot():
    runs = load([ROOT / f"benchmarks/results/h200/{name}.json" for name in ("fidelity-panel", "fidelity-haystacks")])
    text = rendered("<!-- evaluation:overview -->\n<!-- /evaluation -->", runs, "overview")
    _, head, _, *rows, _ = text.splitlines()
    names, *split = ([cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows))
    cells = {tuple(row[1:3]): row for row in split}
    assert len(rows) == len(cells) == 3 + 3
    top = names.index("top:8 (1,664)")
    assert cells["8,192", "needle in codes"][3] == "200/200"
    assert cells["8,192", "needle in codes"][top].startswith("-6.0 [-")
    assert [cells["8,192", "needle in near-miss"][i][0] for i in (3, top)] == ["(", "("]


def test_giving_pages_back_changes_no_figure():
    """A window that forgot its sinks, or gave a page back too early, would differ."""
    rows = {row["policy"]: row for row in RELEASED[0]["forced"]}
    for name in ("kl", "agreement", "perplexity"):
        assert rows["window:640"][name] == rows["window:640+release"][name] != rows["window:1664+release"][name]


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="there is no part between"):
        rendered("nothing", RUNS)


def test_the_evidence_has_200_paired_trials_a_cell_and_five_windows_at_three_lengths():
    assert len(RUNS) == 6
    folder = ROOT / "benchmarks/results/h200"
    run, budgets, cascade = (json.loads((folder / f"fidelity-{name}.json").read_text()) for name in ("panel", "budgets", "cascade"))
    for evidence in (run, budgets, cascade):
        assert {row["length"] for row in evidence["retrieval"]} == {8192, 16384, 32768}
        assert evidence["settings"]["windows"] >= 5
        assert all(row["trials"] >= 200 and not row["invalid_trials"] for row in evidence["retrieval"])
    assert {row["policy"] for row in run["retrieval"]} >= {"dense", "window:4736", "top:8", "top:32", "mean:8", "quest:64"}
    assert run["took"]["8192"] < 180


@pytest.mark.parametrize("length", [8192, 16384, 32768])
def test_32_blocks_keep_what_dense_says(length):
    (kept,) = (row for row in RUNS[0]["retrieval"] if (row["policy"], row["length"]) == ("top:32", length))
    assert kept["against_dense"]["difference"]["low"] <= 0 <= kept["against_dense"]["difference"]["high"]
    (forced,) = (row for row in RUNS[0]["forced"] if (row["policy"], row["length"]) == ("top:32", length))
    assert forced["kl"]["high"] <= 0.02


def test_the_table_of_positions_is_what_the_results_say():
    rows = json.loads((ROOT / "benchmarks/results/cpu/designs-needle-positions.json").read_text())["rows"]
    text = (ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8")
    for skipped in sorted({row["skipped"] for row in rows}):
        found = [row["found"] for row in rows if row["skipped"] == skipped]
        assert f"| {skipped:,} | {' | '.join(map(str, found))} |" in text


def test_what_a_run_without_stretched_positions_found_is_what_its_file_says():
    found = json.loads((ROOT / "benchmarks/results/h200/designs-needle-128k-plain.json").read_text())
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    shares = [f"{100 * found[str(length)]['exact_match']:.3g}%" for length in (2**13, 2**14, 2**15, 2**16, 2**17)]
    assert f"found {', '.join(shares[:-1])} and {shares[-1]} of 200 needles" in text


def test_what_the_recipe_and_its_model_find_is_what_the_files_say():
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    found = json.loads((ROOT / "tools/train_needle/long_evaluation.json").read_text())
    shares = [f"{100 * found[str(length)]['exact_match']:.3g}%" for length in (2**13, 2**14, 2**15, 2**16, 2**17)]
    assert f"YaRN finds {', '.join(shares[:-1])} and {shares[-1]}** of 200 needles" in text
    last = json.loads((ROOT / "tools/train_needle/long_curve.jsonl").read_text().splitlines()[-1])
    assert f"after {last['seconds']:.0f} seconds of training" in text
    half, whole = (json.loads((ROOT / f"benchmarks/results/h200/long-fidelity-{length}.json").read_text()) for length in ("64k", "128k"))
    lost = [{row["policy"]: row["against_dense"]["lost"] for row in run["retrieval"]} for run in (half, whole)]
    assert all(each[policy] == 0 for each in lost for policy in ("top:32", "cascade:4/32"))
    dense = [next(row["hits"] for row in run["retrieval"] if row["policy"] == "dense") for run in (half, whole)]
    assert f"`top:8` loses {lost[0]['top:8']} of {dense[0]} at 64K and {lost[1]['top:8']} of {dense[1]} at 128K" in text
    kl = {row["policy"]: row["kl"]["value"] for row in whole["forced"] if "kl" in row}
    assert f"({kl['cascade:4/32']:.3f} against {kl['top:32']:.3f} at 128K)" in text


def test_what_sparse_prefill_recalls_of_long_prompts_is_what_the_files_say():
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    whole, half = (
        {
            row["policy"]: (row["hits"], row["facts"])
            for row in json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())["rows"]
        }
        for name in ("long-echo-128k", "long-echo-peers-64k")
    )
    assert {whole[policy] for policy in ("dense", "bounds:32", "bounds:0.01")} == {(48, 48)}
    assert {whole[policy][0] for policy in ("mean:32", "delta:64+1024/16", "window:64+1024")} == {2, 3}
    assert f"recall 48, `momo:128/8` recalls {whole['momo:128/8'][0]}, and" in text
    assert half["bounds:32"] == half["dense"] == (32, 32)
    said = "of 32 facts, `bounds:32` recalls all, and FlexPrefill, XAttention and BFLA at 0.9 recall {}, {} and {}."
    assert said.format(*(half[f"{name}:0.9"][0] for name in ("flex", "xattention", "bfla"))) in text


def long_file(name):
    return json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text(encoding="utf-8"))


def test_needles_after_each_prefill_of_the_long_model_say_what_they_cannot_show():
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    half, whole = (long_file(f"long-needles-{length}") for length in ("64k", "128k"))
    found = [f"{run['results'][0]['hits']} of {run['trials']}" for run in (half, whole)]
    assert "Dense decoding finds {} needles at 64K, and {} at 128K, after dense prefill".format(*found) in text
    for run in (half, whole):
        assert [pair["prefill"] for pair in run["pairs"]] == ["bounds:32", "bounds:0.01", "momo:128/8", "window:64+1024"]
        assert {(pair["lost"], pair["gained"]) for pair in run["pairs"]} == {(0, 0)}
    (control,) = (row["hits"] for row in long_file("long-echo-128k")["rows"] if row["policy"] == "window:64+1024")
    assert f"control `window:64+1024`, which recalls {control} of the 48 facts" in text


def test_what_packed_pages_keep_of_the_long_model_is_what_the_run_says():
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    run = long_file("long-fidelity-128k-packed")
    needles = {row["policy"]: row for row in run["retrieval"]}
    assert f"Of {needles['dense']['hits']} needles that dense finds of {needles['dense']['trials']}," in text
    four = "k=int4:channel,v=int4"
    pairs = {name: (row["against_dense"]["lost"], row["against_dense"]["gained"]) for name, row in needles.items() if name != "dense"}
    assert (pairs["dense @ int8"], pairs["top:32 @ int8"]) == ((0, 0), (0, 2))
    assert (pairs[f"dense @ {four}"], pairs[f"top:32 @ {four}"]) == ((2, 0), (1, 2))
    kl = {row["policy"]: row["kl"]["value"] for row in run["forced"] if "kl" in row}
    assert f"{kl['dense @ int8']:.4f}" == f"{kl['dense again']:.4f}"
    assert (
        f"over `int8` is {kl['dense @ int8']:.4f}, as that of dense run again; over these 4 bits it is {kl[f'dense @ {four}']:.3f}." in text
    )
    spread = needles["dense @ int8"]["against_dense"]["difference"]
    assert "goes from {:.1f} points fewer to {:.1f} more".format(-100 * spread["low"], 100 * spread["high"]) in text


def test_what_is_found_at_256k_is_what_the_file_says():
    text = " ".join((ROOT / "docs/measured/long-model.md").read_text(encoding="utf-8").split())
    found = long_file("designs-needle-256k")
    assert (found["model"], found["length"], found["trials"]) == ("needle-256k", 2**18, 20)
    assert {row["policy"]: row["hits"] for row in found["results"]} == {"dense": 20, "top:32": 20, "top:8": 19, "cascade:4/32": 20}
    assert "Dense, `top:32` and `cascade:4/32` find 20 of 20 needles at 262,144 tokens, `top:8` 19 (" in text
    assert f"up to {1 - proportion(20, 20).low:.0%} may be lost (95%)" in text
    assert f"`attention_factor` is {mscale(8.0, 1.0)}, YaRN's own for 8." in text
    command = found["provenance"]["command"].removeprefix("python -m kvjax --traceback needle ")
    options, given = (
        sorted(re.findall(r"-+[a-z-]+ \S+", each))
        for each in (command, text[text.index("kvjax needle --model needle-256k") :].partition(" Runs")[0])
    )
    assert [option for option in given if not option.startswith("-rL")] == options


REAL = load(list((ROOT / "benchmarks/results/h200").glob("real-*.json")))


def test_files_of_real_checkpoints_name_the_model_by_packages_and_sha256():
    known = [checkpoint.source for checkpoint in CHECKPOINTS.values()]
    assert all(run["settings"]["model from"] in known for run in REAL)
    assert not any("/" in run["settings"]["model"] for run in REAL)


SMOLLM2 = load(list((ROOT / "benchmarks/results/h200").glob("smollm2-*.json")))


def test_the_page_of_a_model_that_others_made_is_what_its_files_make():
    """And each file names the model by package, version and SHA-256, or is of the embedded one, for comparison."""
    text = (ROOT / "docs/measured/real-checkpoints.md").read_text(encoding="utf-8")
    assert [run["settings"].get("model from", "needle") for run in SMOLLM2] == ["needle"] + [CHECKPOINTS["smollm2"].source] * 6
    counted = 0
    for run in SMOLLM2[1:]:
        (length,) = run["settings"]["lengths"]
        for haystack in run["settings"]["haystacks"]:
            rows = {row["policy"]: row for row in run["retrieval"] if row["haystack"] == haystack}
            found = {name: sum(cell["hits"] for cell in row["by_depth"]) for name, row in rows.items()}
            cells = [found[name] for name in ("dense", "dense again", "top:32", "quest:64", "top:8", "mean:8", "window:640")]
            assert f"| {haystack} | {length:,} | {' | '.join(map(str, cells))} |" in text
            counted += 1
    assert counted == 9
