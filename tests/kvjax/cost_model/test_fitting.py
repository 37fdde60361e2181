"""Fits against planted laws, held-out error without leakage, and rows that cannot be fitted."""

import dataclasses
import json
from pathlib import Path

import planted_meshes
import planted_tiers
import pytest
from planted_meshes import mesh_run, mesh_seconds
from planted_tiers import tier_run
from tiny_models import QWEN_7B

from kvjax.cost_model.fitting import (
    DEVICE,
    GROUPS,
    HOST,
    MESH,
    checks,
    error_table,
    errors,
    fit,
    held_out,
    read_cells,
    regret,
    solve,
)
from kvjax.cost_model.predict import Price
from kvjax.cost_model.records import to_json

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RUNS = {HOST: tier_run, MESH: mesh_run}


def read(*runs, steps=1):
    ((key, cells),) = read_cells(runs, lambda shape, layers: QWEN_7B, steps).items()
    return key, cells


def cells_of(kind, **planted):
    return read(RUNS.get(kind, mesh_run)(**planted))[1]


def spoiled(cells, factor, hit):
    return [dataclasses.replace(cell, seconds=cell.seconds * factor) if hit(cell) else cell for cell in cells]


def test_the_fit_recovers_the_planted_law_of_meshes():
    key, cells = read(mesh_run())
    made, law = fit(cells, QWEN_7B, key, source="planted"), planted_meshes
    assert (made.bytes_per_s, made.c0, dict(made.c1)["top:32"].fixed) == pytest.approx((law.RATE, law.C0, law.C1), rel=1e-4)
    term = made.exchanges
    assert (term.latency_s, term.link_per_s, term.choose_s) == pytest.approx((law.LATENCY, law.LINK, law.CHOOSE), rel=1e-3)
    assert term.error < 1e-6
    assert (term.policies, {each[:2] for each in term.measured}) == (("dense", "top:32"), set(law.MESHES) - {(1, 1)})
    assert made.measured == ((1, 2**14, 2**18), (8, 2**14, 2**18))
    assert (made.bus, made.error) == (None, pytest.approx(0, abs=1e-6))


def test_the_fit_recovers_the_planted_law_of_pages_in_host_memory():
    key, cells = read(tier_run())
    made, law = fit(cells, QWEN_7B, key, source="planted"), planted_tiers
    assert (made.bus.per_s, made.bus.layer_s) == pytest.approx((law.BUS, law.LAYER), rel=1e-6)
    assert made.bus.hits == pytest.approx(0.7), "of recorded lists alone"
    assert made.bus.measured == ((1, 2**16, 2**19),)
    base = [cell for cell in cells if cell.kind == DEVICE]
    assert {(cell.policy, cell.length) for cell in base} == {(name, 2**power) for name in ("dense", "top:32") for power in range(16, 20)}
    assert key.shape == "qwen2.5-7b"


KINDS_AND_GROUPS = [
    (kind, by) for kind in (DEVICE, HOST, MESH) for by in GROUPS if (kind, by) not in {(DEVICE, "mesh or tier"), (HOST, "batch")}
]


@pytest.mark.parametrize(("kind", "by"), KINDS_AND_GROUPS)
def test_held_out_error_is_small_with_half_a_percent_of_noise(kind, by):
    found = errors(held_out(cells_of(kind, noise=0.005), kind, by))
    assert max(found["seconds"][0], found["speedup"][0]) < 0.05


@pytest.mark.parametrize(
    ("kind", "changed"), [(DEVICE, {"c1": (("top:32", Price(0.0)),)}), (HOST, {"bus": None}), (MESH, {"exchanges": None})]
)
def test_without_its_term_a_fit_misses(kind, changed):
    cells = cells_of(kind)
    terms, some = solve(cells, kind), [cell for cell in cells if cell.kind == kind]
    whole, less = (
        max(abs(cell.predicted(each) / cell.seconds - 1) for cell in some) for each in (terms, dataclasses.replace(terms, **changed))
    )
    assert whole < 1e-4 < 0.01 < less


@pytest.mark.parametrize(("kind", "by"), [(kind, by) for kind in (DEVICE, HOST, MESH) for by in ("cell", "length")])
def test_a_held_out_group_does_not_touch_its_own_forecast(kind, by):
    """Were any row of the group in the fit, dense or sparse, times half as long again would show."""
    cells, group = cells_of(kind), GROUPS[by]
    key = group([cell for cell in cells if cell.kind == kind][-1])
    inside = lambda cell: group(cell) == key  # noqa: E731
    before, after = (held_out(some, kind, by) for some in (cells, spoiled(cells, 1.5, inside)))
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if inside(one.cell)]
    assert pairs
    assert all(one.seconds == other.seconds for one, other in pairs)
    assert any(one.seconds != other.seconds for one, other in zip(before, after, strict=True)), "the others do learn from it"


def test_bandwidth_and_c0_come_from_dense_rows_only():
    cells = cells_of(DEVICE)
    before, after = solve(cells), solve(spoiled(cells, 0.5, lambda cell: cell.policy != "dense"))
    assert (before.bytes_per_s, before.c0) == (after.bytes_per_s, after.c0)
    assert dict(after.c1)["top:32"] == Price(0.0), "no price is negative"


def test_regret_is_what_the_choice_loses():
    cells = cells_of(DEVICE, meshes=((1, 1),))
    assert regret(cells) == 0.0
    place = (2**18, 8)
    slow = spoiled(cells, 20, lambda cell: (cell.length, cell.batch) == place and cell.policy != "dense")
    times = {cell.policy: cell.seconds for cell in slow if (cell.length, cell.batch) == place}
    assert regret(slow) >= (times["top:32"] / times["dense"] - 1) / 6, "the others say that lists pay there"
    with pytest.raises(ValueError, match="no place has a dense row and another one"):
        regret([cell for cell in cells if cell.policy == "dense"])


def test_the_table_shows_how_wrong_a_fit_is():
    key, cells = read(mesh_run())
    file = {"cost_models": [to_json(fit(cells, QWEN_7B, key, source="x"))], "held_out": [checks(cells)]}
    rows = error_table(file)[1]
    assert [row[3:] for row in rows if row[1:3] == ("mesh", "a cell")] == [("60", "0.0%, 0.0%", "0.0%, 0.0%")]
    assert not [row for row in rows if row[1:3] == ("device", "a mesh or tier")], "there is one alone"


def test_only_rows_of_the_asked_launches_are_read_and_on_meshes_those_of_most_steps():
    run = mesh_run()
    slower = json.loads(json.dumps(run))
    for row in run["rows"]:
        row["steps_per_launch"] = 8
    for row in slower["rows"]:
        if "median_s" in row:
            row["median_s"] *= 2
    for rows in (slower["rows"] + run["rows"], run["rows"] + slower["rows"]):
        both = run | {"rows": rows}
        for steps, factor in ((1, 2), (8, 1)):
            for cell in read(both, steps=steps)[1]:
                law = mesh_seconds(cell.policy, cell.length, cell.batch, cell.tensor, cell.context)
                assert cell.seconds == pytest.approx(law * (factor if cell.kind == DEVICE else 1))
    assert fit(read(run, steps=8)[1], QWEN_7B, read(run, steps=8)[0], source="x").steps_per_launch == 8


def test_of_a_cell_that_was_measured_twice_the_later_counts():
    later = mesh_run() | {"provenance": {"device": "Planted 9000", "date": "2027"}}
    for row in later["rows"][:-1]:
        row["median_s"] *= 2
    cells = read(later, mesh_run())[1]
    assert len(cells) == 72
    assert all(
        cell.seconds == pytest.approx(2 * mesh_seconds(cell.policy, cell.length, cell.batch, cell.tensor, cell.context)) for cell in cells
    )


def test_rows_that_are_refused():
    with pytest.raises(ValueError, match=r"tokens 1000000, policy top:32: .* earlier version's; measure it again"):
        read(json.loads((RESULTS / "h100" / "designs-tiers-in-place.json").read_text()))
    with pytest.raises(ValueError, match=r"kvjax bench 'ops': give those of kvjax bench decode or tiers"):
        read({"bench": "ops", "rows": [], "provenance": {"date": "2026"}})
    far = tier_run()
    far["rows"][0]["read_bytes"] *= 2
    with pytest.raises(ValueError, match=r"tokens 65536, policy dense: the step read .* measure it again"):
        read(far)
    changed = mesh_run()
    changed["rows"][-2]["bytes"]["kv"] *= 2
    with pytest.raises(ValueError, match=r"the row counts .* bytes, kvjax.cost_model .*; measure it again"):
        read(changed)
    for wrong, said in (({"median_s": -1.0}, "median_s must be a finite number above 0"), ({"steps_per_launch": True}, "a whole number")):
        with pytest.raises(ValueError, match=rf"shape qwen2.5-7b, tokens 16384, batch 1, policy dense: .*{said}"):
            read(mesh_run() | {"rows": [mesh_run()["rows"][0] | wrong]})


def test_measurements_that_cannot_be_fitted():
    cells, tiers = cells_of(MESH), cells_of(HOST)
    for some, kind, said in (
        (
            [cell for cell in cells if cell.policy != "dense"],
            DEVICE,
            r"at least two sizes with everything on the device, got 0.*kvjax bench",
        ),
        ([dataclasses.replace(cell, seconds=1.0) for cell in cells], DEVICE, r"no longer with more bytes.*longer sequences"),
        ([cell for cell in cells if cell.kind == DEVICE], MESH, "no row of several devices"),
        ([cell for cell in cells if cell.kind == MESH or cell.policy == "dense"], MESH, r"no row of top:32 .*--tensor 1 --context 1"),
        ([cell for cell in tiers if cell.kind == HOST or cell.policy == "dense"], HOST, r"no row of top:32 .*--resident"),
        ([cell for cell in tiers if cell.kind == DEVICE], HOST, "the bus needs rows that read at least two amounts"),
        ([dataclasses.replace(cell, seconds=1e-9) if cell.kind == HOST else cell for cell in tiers], HOST, "no rate to fit"),
    ):
        with pytest.raises(ValueError, match=said):
            solve(some, kind)
    few = checks([cell for cell in tiers if cell.kind == DEVICE or cell.length == 2**17])
    assert set(few["errors"][HOST]) == {"cell", "mesh or tier"}, "a length cannot be held out, as it is all of them"
    dense = solve([cell for cell in cells if cell.kind == DEVICE or cell.policy == "dense"], MESH)
    assert dense.exchanges.choose_s is None, "no step chose over devices"
