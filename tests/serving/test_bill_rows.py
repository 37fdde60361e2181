"""Rows that `kvjax bill fit` and `kvjax regime-map` do not take are named, and so is input that is no bill."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from planted_runs import in_launches

from kvjax.bill import load_bills
from kvjax.bill.step_bill import sizes_of, to_json
from kvjax.serving.bench.decode import SHAPES

NO_STEPS = ([8], {}, "8", None, float("nan"), -8, 0, True)


pytestmark = pytest.mark.usefixtures("empty_folder")


def changed(file, device="Planted 9000", **fields):
    """A copy of a result with these fields in its timed rows."""
    run = json.loads(file.read_text())
    run["provenance"]["device"] = device
    rows = [row | fields for row in run["rows"] if "median_s" in row]
    Path("changed.json").write_text(json.dumps(run | {"rows": rows}))
    return "changed.json"


def test_rows_of_other_launches_are_counted(kvjax, bill_runs):
    eight = in_launches(bill_runs[0], 8)
    status, out, err = kvjax("bill", "fit", bill_runs[1], eight, "--steps-per-launch", 8)
    assert (status, "grid-b4.json: 9 rows of 1 step per launch are left out: --steps-per-launch 1 takes these\n" in out) == (0, True), err
    status, out, err = kvjax("bill", "fit", bill_runs[1], eight)
    assert (status, "launches-8.json: 9 rows of 8 steps per launch are left out: --steps-per-launch 8 takes these\n" in out) == (0, True)
    assert out.count("left out") == 1
    assert "left out" not in kvjax("bill", "fit", *bill_runs)[1]


@pytest.mark.parametrize("value", NO_STEPS, ids=repr)
def test_launches_of_no_number_of_steps_are_refused(kvjax, bill_runs, value):
    wrong = changed(bill_runs[0], steps_per_launch=value)
    said = f"changed.json, row 1: qwen2.5-7b, 8192, 1, dense: steps_per_launch is {value!r}, and must be a whole number of at least 1"
    said = said.replace("qwen2.5-7b, 8192, 1, dense", "shape qwen2.5-7b, tokens 8192, batch 1, policy dense")
    for arguments in (("bill", "fit", wrong), ("bill", "fit", wrong, "--steps-per-launch", 8), ("regime-map", "--measured", wrong)):
        status, _, err = kvjax(*arguments)
        assert (status, said in " ".join(err.split())) == (2, True), err
        assert "give --steps-per-launch" not in err


def test_a_map_takes_steps_of_its_own_model_and_device(kvjax, bill_runs, monkeypatch):
    from kvjax.bill import regimes

    assert kvjax("bill", "fit", *bill_runs, "--json", "bill.json")[0] == 0
    monkeypatch.setattr(regimes, "regime_map", lambda *_, **__: pytest.fail("the map was computed"))
    own = "no row is of the map's steps (qwen2.5-7b, 28 layers, Planted 9000, bfloat16, 1 step per launch, one device); they have "
    drawn = ("regime-map", "--fit", "bill.json", "--measured")
    status, _, err = kvjax(*drawn, changed(bill_runs[0], "Another"))
    assert (status, f"{own}qwen2.5-7b, 28 layers, Another, bfloat16, 1 step per launch" in " ".join(err.split())) == (2, True), err
    status, _, err = kvjax(*drawn, bill_runs[0], "--shape", "llama-3.1-8b")
    assert (status, "they have qwen2.5-7b, 28 layers, Planted 9000" in " ".join(err.split())) == (2, True), err
    run = json.loads(bill_runs[0].read_text())
    run["rows"] = [{"skipped": "too large"}]
    Path("none.json").write_text(json.dumps(run))
    status, _, err = kvjax(*drawn, "none.json")
    assert (status, f"{own}no timed row" in " ".join(err.split())) == (2, True), err


def test_bills_with_numbers_that_cannot_be_are_refused(kvjax, bill_runs):
    assert kvjax("bill", "fit", *bill_runs, "--json", "bill.json")[0] == 0
    good = json.loads(Path("bill.json").read_text())
    for name, values in (("steps_per_launch", (*NO_STEPS, float("inf"), 8.5)), ("c0", (float("inf"), float("nan"), -1.0))):
        for value in values:
            Path("wrong.json").write_text(json.dumps({"bills": [good["bills"][0] | {name: value}]}))
            status, _, err = kvjax("bill", "predict", "--fit", "wrong.json")
            assert (status, "a bill needs" in err, name in err) == (2, True, True), (name, value, err)


def test_without_a_shape_the_model_is_that_of_the_file(kvjax, bill_runs):
    assert kvjax("bill", "fit", *bill_runs, "--json", "bill.json")[0] == 0
    (made,) = load_bills(Path("bill.json"))
    other = dataclasses.replace(made, model="llama-3.1-8b", sizes=sizes_of(SHAPES["llama-3.1-8b"]))
    asked = ("bill", "predict", "--fit", "bills.json", "--lengths", "32k", "--batches", "1", "--policies", "dense")
    for bills, scaled in (((other,), False), ((made,), False), ((dataclasses.replace(other, model="mine"),), True)):
        Path("bills.json").write_text(json.dumps({"bills": list(map(to_json, bills))}))
        status, out, err = kvjax(*asked)
        assert (status, "scaled by layers" in out) == (0, scaled), err
        assert ("scaled by layers" in kvjax(*asked, "--shape", "qwen2.5-7b")[1]) == (bills[0] is not made)
    Path("bills.json").write_text(json.dumps({"bills": [to_json(other), to_json(made)]}))
    assert "Planted 9000, qwen2.5-7b, " in kvjax(*asked)[1]


def test_advice_names_formats_and_launches(kvjax, bill_runs):
    asked = ("bill", "predict", "--lengths", "128k", "--batches", "1", "--policies", "quest:64")
    status, _, err = kvjax(*asked)
    said = " ".join(err.split())
    assert (status, "bench decode --policies dense,quest:64 --json FILE, then kvjax bill fit FILE" in said) == (2, True), err
    assert "per-launch" not in said
    status, _, err = kvjax(*asked, "--weights", "int8", "--cache-format", "int8")
    measured = "--policies dense,quest:64 --weights int8 --cache-format int8 --steps-per-launch 8 --json FILE"
    assert (status, f"{measured}, then kvjax bill fit FILE --steps-per-launch 8" in " ".join(err.split())) == (2, True), err
