"""From records to figures: what counts, what is pooled, what is compared; with records made by hand."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax.evaluation import report
from kvjax.evaluation.plots import draw
from kvjax.evaluation.report import controls, frame, policy_and_keys, remarks, summarize, tables, verdicts
from kvjax.evaluation.run import EvaluationRun, Plan, Unit
from kvjax.evaluation.teacher_forcing import ALONE

PLAN = Plan(policies=("dense", "top:8", "mean:8", "window:640"), lengths=(2048,), trials=20, windows=2, steps=64, free_steps=8, batch=10)
NAMES = ("dense", *PLAN.others, ALONE)


def retrieval(first, *, wrong, haystack="codes"):
    """Ten trials from `first` on; wrong: by policy, the trials (of all twenty) that it does not answer."""
    rows = range(first, first + 10)
    shares = {name: [0.0 if row in wrong.get(name, ()) else 1.0 for row in rows] for name in NAMES}
    seconds = {name: [0.002, 0.001, 0.004] if name in ("dense", ALONE) else [0.001] * 3 for name in NAMES} if not first else None
    keys = {"dense": 2000.0, "top:8": 1600.0, "mean:8": 1600.0, "window:640": 640.0}
    return {"kind": "retrieval", "length": 2048, "task": "needle", "haystack": haystack, "rows": [first, first + 10]} | {
        "depths": [(row + 0.5) / 20 for row in rows],
        "shares": shares,
        "keys": keys,
        "seconds": seconds,
        "took": 2.5,
    }


def forced():
    """Two windows of 64 steps: even steps are confident; top:8 fails at one confident step of window 1, mean:8 at all
    others."""
    margin = np.tile([2.0, 0.3], (2, 32))
    flat = np.ones_like(margin)

    def beside(agrees, kl, nll):
        return {"agrees": agrees.tolist(), "kl": (kl * flat).tolist(), "tv": (0.1 * flat).tolist(), "nll": (nll * flat).tolist()}

    one, many = flat.copy(), flat.copy()
    one[1, 10] = 0
    many[:, 1::2] = 0
    figures = {
        "top:8": beside(one, 0.02, 2.1) | {"prefix": [8, 4]},
        "mean:8": beside(many, 0.05, 2.2) | {"prefix": [0, 1]},
        "window:640": beside(flat, 0.01, 2.0) | {"prefix": [8, 8]},
        ALONE: beside(flat, 1e-9, 2.0) | {"prefix": [8, 8]},
    }
    keys = {"dense": 2000.0, "top:8": 1600.0, "mean:8": 1600.0, "window:640": 640.0}
    return {"kind": "forced", "length": 2048, "rows": [0, 2], "margin": margin.tolist(), "nll": (2 * flat).tolist(), "keys": keys} | {
        "beside": figures,
        "took": 4.0,
    }


WRONG = {"dense": {4, 5}, "top:8": {4, 5, 9}, "mean:8": {0, 9, 12, 13, 16}, "window:640": set(range(20)), ALONE: {4, 5}}


@pytest.fixture(scope="module")
def figures():
    # Out of order, as a resumed run may have them.
    return summarize(PLAN, [retrieval(10, wrong=WRONG), forced(), retrieval(0, wrong=WRONG)])


def row_of(figures, kind, policy):
    (row,) = (row for row in figures[kind] if row["policy"] == policy)
    return row


def test_every_trial_of_a_cell_that_dense_passes_counts(figures):
    """Dense finds 18 of 20, two of four in the second fifth of depth; the trials that it does not find count as
    well."""
    dense = row_of(figures, "retrieval", "dense")
    assert [(cell["hits"], cell["trials"]) for cell in dense["by_depth"]] == [(4, 4), (2, 4), (4, 4), (4, 4), (4, 4)]
    assert (dense["hits"], dense["trials"], dense["invalid_trials"]) == (18, 20, 0)
    top = row_of(figures, "retrieval", "top:8")
    assert (top["hits"], top["trials"]) == (17, 20)
    assert [top["against_dense"][name] for name in ("both", "lost", "gained", "neither")] == [17, 1, 0, 2]
    assert top["exact_match"]["low"] < 17 / 20 < top["exact_match"]["high"]
    mean = row_of(figures, "retrieval", "mean:8")
    assert [mean["against_dense"][name] for name in ("lost", "gained")] == [5, 2]
    assert mean["against_dense"]["p_value"] == pytest.approx(2 * (1 + 7 + 21) / 2**7)
    assert not any("dense cannot" in line for line in remarks(figures))


@pytest.mark.parametrize(("missed", "counted"), [(10, 20), (11, 0)])
def test_a_cell_counts_from_half_of_the_trials_on(missed, counted):
    wrong = WRONG | {"dense": set(range(missed))}
    found = summarize(PLAN, [retrieval(0, wrong=wrong), retrieval(10, wrong=wrong), forced()])
    dense = row_of(found, "retrieval", "dense")
    assert (dense["trials"], dense["invalid_trials"], dense["hits"]) == (counted, 20 - counted, counted // 2)


def test_a_task_that_dense_cannot_do_has_counts_in_brackets_and_no_other_figures():
    wrong = WRONG | {"dense": set(range(19))}
    found = summarize(PLAN, [retrieval(0, wrong=wrong), retrieval(10, wrong=wrong), forced()])
    top = row_of(found, "retrieval", "top:8")
    assert (top["trials"], top["exact_match"], top["against_dense"]) == (0, None, None)
    assert all(not contrast["retrieval"] for contrast in found["equal_budget"])
    columns = {column.header: list(column.cells) for column in tables(found)[0].columns}
    assert columns["found"] == ["(1/20)", "(17/20)", "(15/20)", "(0/20)", "(18/20)"]
    assert set(columns["points, 95%"]) == {""}
    assert frame(found)["exact_match"].isna().all()
    assert "dense cannot, not counted: needle in codes at 2,048 tokens (1 of 20 found)" in remarks(found)


def test_files_of_the_earlier_rule_say_which_depths_do_not_count(figures):
    earlier = json.loads(json.dumps(figures))
    dense = row_of(earlier, "retrieval", "dense")
    dense |= {"invalid_trials": 4, "hits": 16, "trials": 16}
    for cell in dense["by_depth"]:
        cell["valid"] = cell["hits"] == 4
    assert "dense cannot, not counted: needle in codes at 2,048 tokens, depth 0.2 to 0.4 (2 of 4)" in remarks(earlier)


HALF = {name: {1, 2, 3, 4, 5} for name in PLAN.others}


def test_a_sequential_run_counts_the_trials_that_ran_and_says_so():
    """All policies lose half: decided after 10 of 20 trials, where the KL decides about the rest."""
    plan = dataclasses.replace(PLAN, sequential=True)
    found = summarize(plan, [retrieval(0, wrong=HALF), forced()])
    top = row_of(found, "retrieval", "top:8")
    assert (top["hits"], top["trials"], top["planned_trials"], top["against_dense"]["lost"]) == (5, 10, 20, 5)
    assert sum(cell["trials"] for cell in top["by_depth"]) == 10
    assert top["exact_match"]["low"] < 0.5 < top["exact_match"]["high"]
    assert "ended early: needle in codes at 2,048 tokens, after 10 of 20 trials: every policy is decided" in remarks(found)
    columns = {column.header: list(column.cells) for column in tables(found)[0].columns}
    assert columns["found"] == ["10/10", "5/10", "5/10", "5/10", "10/10"]
    whole = summarize(plan, [retrieval(0, wrong=WRONG), retrieval(10, wrong=WRONG), forced()])
    assert not any("ended early" in line for line in remarks(whole))


def test_a_sequential_run_that_has_not_decided_is_no_result():
    plan = dataclasses.replace(PLAN, trials=200, batch=10, sequential=True)
    with pytest.raises(ValueError, match="records hold 10 of 200 trials: let the run end first"):
        summarize(plan, [retrieval(0, wrong=WRONG), forced()])
    with pytest.raises(ValueError, match="records hold 10 of 20 trials"):
        summarize(PLAN, [retrieval(0, wrong=HALF), forced()])


def test_differences_are_in_points_with_their_intervals(figures):
    (table,) = tables(figures)
    cells = dict(zip(table.columns[0].cells, next(c for c in table.columns if c.header == "points, 95%").cells, strict=True))
    assert (cells["dense (all)"], cells["window:640 (640)"][:7]) == ("", "-90.0 [")
    assert cells["top:8 (1,664)"].startswith("-5.0 [-")
    assert cells["dense again (noise)"].startswith("+0.0 [-")


def test_agreement_on_confident_steps_is_pooled_with_its_members(figures):
    pools = {pool["policy"]: pool for pool in figures["pooled"]}
    assert (pools["top:8"]["hits"], pools["top:8"]["steps"]) == (63, 64)
    assert pools["top:8"]["members"] == [
        {"length": 2048, "window": 0, "hits": 32, "steps": 32},
        {"length": 2048, "window": 1, "hits": 31, "steps": 32},
    ]
    assert pools["top:8"]["rates"] == {"least": 31 / 32, "median": pytest.approx(63 / 64), "most": 1.0}
    # All that mean:8 gets wrong are near-ties.
    assert (pools["mean:8"]["hits"], pools["mean:8"]["steps"]) == (64, 64)
    assert row_of(figures, "forced", "mean:8")["agreement"]["value"] == 0.5
    assert row_of(figures, "forced", "mean:8")["largest_margin_of_a_disagreement"] == 0.3
    assert row_of(figures, "forced", "top:8")["largest_margin_of_a_disagreement"] == 2.0
    margins = [(cell["steps"], cell["disagreements"]) for cell in row_of(figures, "forced", "mean:8")["by_margin"] if cell["steps"]]
    assert margins == [(64, 64), (64, 0)]


def test_kl_perplexity_prefix_and_speed(figures):
    top = row_of(figures, "forced", "top:8")
    assert top["kl"]["value"] == pytest.approx(0.02)
    assert top["blocks"] == 4
    assert any("4 blocks of forced steps are too few; `kl_within` and" in line for line in remarks(figures))
    assert top["kl_of_windows"] == pytest.approx([0.02, 0.02])
    assert top["kl_of_parts"] == pytest.approx([0.02] * 4)
    assert row_of(figures, "forced", "dense")["perplexity"] == pytest.approx(np.exp(2.0))
    assert top["perplexity_ratio"]["value"] == pytest.approx(np.exp(0.1))
    assert top["exact_prefix"] == {"of": 8, "tokens": [8, 4], "median": 6.0}
    assert row_of(figures, "speed", "top:8") | {"ms_of_rounds": None} == {
        "length": 2048,
        "policy": "top:8",
        "batch": 10,
        "ms_per_step": 1.0,
        "ms_of_rounds": None,
        "speed": 2.0,
    }


def test_dense_is_timed_twice_and_the_wall_clock_is_added_up(figures):
    assert row_of(figures, "speed", ALONE)["speed"] == 1.0
    assert figures["took"] == {"2048": 9.0}
    assert "9 s at 2,048 tokens" in remarks(figures)[-1]


@pytest.fixture
def few_trials(monkeypatch):
    monkeypatch.setattr(report, "FEW_TRIALS", 16)


def test_nothing_is_said_of_few_trials(figures):
    assert verdicts(figures) == []


def test_a_policy_holds_where_neither_facts_nor_kl_are_lost(figures, few_trials):
    """top:8 loses 1 of 18, which is no evidence; mean:8 finds no fewer by the interval, and its KL is 0.05; the window
    loses all."""
    (line,) = verdicts(figures)
    held, failed = line.split("; fail: ")
    assert held == "needle in codes at 2,048 tokens: hold: top:8 (1,664)"
    assert failed == "window:640 (640): 18 of 18 lost; mean:8 (1,664): KL 0.05"


def test_a_small_loss_and_a_large_kl_are_told_apart(few_trials):
    far = forced()
    far["beside"]["top:8"]["kl"] = np.full((2, 64), 0.03).tolist()
    (line,) = verdicts(summarize(PLAN, [retrieval(0, wrong=WRONG), retrieval(10, wrong=WRONG), far]))
    assert "hold: none; fail: " in line
    assert "top:8 (1,664): KL 0.03" in line


def test_policies_of_equal_budget_are_compared_in_pairs(figures):
    (contrast,) = figures["equal_budget"]  # the window keeps far fewer keys
    assert (contrast["first"], contrast["second"], contrast["keys"]) == ("top:8", "mean:8", [1664, 1664])
    assert contrast["kl_difference"]["value"] == pytest.approx(0.03)
    assert contrast["perplexity_ratio"]["value"] == pytest.approx(np.exp(0.1))
    (cell,) = contrast["retrieval"]
    assert (cell["both"], cell["lost"], cell["gained"], cell["neither"]) == (13, 4, 2, 1)
    assert any(line.startswith("mean:8 (1,664) against top:8 (1,664)") and "noise: KL 1e-09" in line for line in remarks(figures))


def test_tables_show_keys_and_the_noise_floor_beside_every_policy(figures):
    (table,) = tables(figures)
    names = list(table.columns[0].cells)
    assert names == ["dense (all)", "top:8 (1,664)", "mean:8 (1,664)", "window:640 (640)", "dense again (noise)"]
    kl = dict(zip(names, next(c for c in table.columns if c.header == "KL").cells, strict=True))
    assert (kl["top:8 (1,664)"], kl["dense again (noise)"]) == ("0.02", "1e-09")
    assert policy_and_keys("quest:64") == "quest:64 (1,552)"
    two = dataclasses.replace(PLAN, haystacks=("codes", "loop"))
    records = [retrieval(first, wrong=WRONG, haystack=haystack) for first in (0, 10) for haystack in two.haystacks]
    assert len(tables(summarize(two, [*records, forced()]))) == 2


def test_figures_are_json_and_flat_rows_and_pictures(figures, tmp_path):
    assert json.loads(json.dumps(figures, allow_nan=False))["rules"]
    rows = frame(figures)
    assert rows["policy"].tolist() == list(NAMES)
    assert rows["describe"][1].startswith("top:8 (1,664 keys")
    top, pairs = row_of(figures, "forced", "top:8"), row_of(figures, "retrieval", "top:8")["against_dense"]
    wanted = [pairs["p_value"], pairs["difference"]["value"], pairs["difference"]["low"], top["kl"]["high"], top["perplexity"], 6.0, 10]
    names = ["p_value", "difference", "difference_low", "kl_high", "perplexity", "exact_prefix", "batch"]
    assert rows.loc[1, names].tolist() == pytest.approx(wanted)
    paths = draw(figures, tmp_path)
    assert [path.name for path in paths] == ["recall.png", "kl.png", "disagreements.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


def test_records_that_lack_something_are_refused():
    with pytest.raises(ValueError, match="10 of 20 trials"):
        summarize(PLAN, [retrieval(0, wrong=WRONG), forced()])
    with pytest.raises(ValueError, match="0 of 2 windows"):
        summarize(PLAN, [retrieval(0, wrong=WRONG), retrieval(10, wrong=WRONG)])


# The plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "policies must be at least one"),
        ({"policies": ("top:8", "top:8")}, "each once, got top:8, top:8"),
        ({"policies": ("best",)}, "'best' is not understood"),
        ({"tasks": ("haiku",)}, "'haiku' is not known; there are needle"),
        ({"haystacks": ("hay",)}, "'hay' is not known; there are loop"),
        ({"trials": 1}, "trials must be at least 2, got 1"),
        ({"windows": 1}, "windows must be at least 2, got 1"),
        ({"batch": 1}, "batch must be at least 2, got 1"),
        ({"free_steps": 65}, "free_steps 65 are more than the 64 forced"),
        ({"steps": 2048}, "2,048 tokens leaves no history before 2,048 forced steps"),
    ],
)
def test_plans_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize(("trials", "batch"), [(200, 32), (33, 32), (5, 3), (2, 2), (7, 32)])
def test_units_cover_everything_in_batches_of_like_size(speaker, monkeypatch, trials, batch):
    """None has a single row: that would be another batch bucket, and one more compilation of every policy."""
    monkeypatch.setattr("kvjax.evaluation.run.encode_text", lambda *_: np.zeros(10_000, np.int32))
    plan = dataclasses.replace(PLAN, trials=trials, batch=batch, windows=3, haystacks=("codes", "loop"))
    units = EvaluationRun(speaker, "", plan).units()
    for haystack in plan.haystacks:
        rows = [range(*unit.rows) for unit in units if unit.haystack == haystack]
        assert [row for each in rows for row in each] == list(range(trials))
        assert all(2 <= len(each) <= batch for each in rows)
    assert len({unit.key for unit in units}) == len(units)
    assert all(unit.work > 0 for unit in units)
    assert units[0] == Unit("forced", 2048, (0, min(3, batch)) if batch > 2 else units[0].rows, work=units[0].work)


def test_a_length_beyond_the_model_or_the_text_is_refused(speaker):
    with pytest.raises(ValueError, match="8,192 tokens is more than the model's 4,096 positions"):
        EvaluationRun(speaker, "x" * 50_000, dataclasses.replace(PLAN, lengths=(2048, 8192)))
    with pytest.raises(ValueError, match=r"2 disjoint windows of 2,048 tokens need 4,096 tokens of text, and there are 3,000"):
        EvaluationRun(speaker, "x" * 3_000, PLAN)


def test_a_window_that_fails_is_named_as_the_control(figures, few_trials):
    """It loses all 18 trials that dense finds, and its KL of 0.01 is no failure."""
    (line,) = controls(figures)
    assert line == (
        "control window:640 (640) fails as it must in needle in codes at 2,048 tokens (18 of 18 lost); "
        "does not fail in KL at 2,048 tokens (0.01), so that these do not tell policies apart"
    )
    assert line in remarks(figures)


def test_a_window_that_finds_what_dense_finds_is_no_control(few_trials):
    wrong = WRONG | {"window:640": {0, 1, 2, 3, 4, 5}}
    (line,) = controls(summarize(PLAN, [retrieval(0, wrong=wrong), retrieval(10, wrong=wrong), forced()]))
    assert line.startswith("control window:640 (640) does not fail in needle in codes at 2,048 tokens (4 of 18 lost), KL at")


def test_few_trials_are_no_control(figures):
    (line,) = controls(figures)
    assert "does not fail in needle in codes at 2,048 tokens (20 trials are too few)" in line


def test_a_run_without_a_window_says_that_it_has_no_control():
    plan = dataclasses.replace(PLAN, policies=("top:8", "mean:8"))
    (line,) = controls(summarize(plan, [retrieval(0, wrong=WRONG), retrieval(10, wrong=WRONG), forced()]))
    assert line.startswith("no control: no window was run")


def test_bytes_have_a_column_where_records_have_them():
    """Records of earlier versions, which counted the lists of cascades, too, are still read."""
    plan = dataclasses.replace(PLAN, policies=("dense", "top:8", "mean:8", "window:640", "cascade:1"))
    one, other = forced(), forced()
    for record, rows in ((one, [0, 1]), (other, [1, 2])):
        record |= {"rows": rows, "bytes": {"dense": 8_000_000, "cascade:1": 2_000_000}}
        for field in ("margin", "nll"):
            record[field] = record[field][rows[0] : rows[1]]
        record["beside"]["cascade:1"] = record["beside"]["window:640"]
        record["keys"] |= {"cascade:1": 700.0}
        record["beside"] = {
            name: {field: each[rows[0] : rows[1]] for field, each in beside.items()} for name, beside in record["beside"].items()
        }
        record["lists"] = {"cascade:1": {"lists": 20, "equal": 10}}
    found = [retrieval(first, wrong=WRONG) for first in (0, 10)]
    for record in found:
        record["shares"]["cascade:1"], record["keys"]["cascade:1"] = record["shares"]["top:8"], 700.0
        record["seconds"] = None
    figures = summarize(plan, [*found, one, other])
    columns, rows = report.table_rows(figures)
    assert columns[-1] == "MB read"
    assert {cells[0]: cells[-1] for _, cells in rows} == {
        "dense (all)": "8.00",
        "cascade:1 (768)": "2.00",
        "top:8 (1,664)": "",
        "mean:8 (1,664)": "",
        "window:640 (640)": "",
        f"{ALONE} (noise)": "",
    }
    assert len(tables(figures)) == 1
