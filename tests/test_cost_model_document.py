"""The built-in cost models, evidence and docs/cost-model.md are what the committed measurements make."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from benchmarks import update_docs
from kvjax.cost_model import known_cost_model, known_cost_models, known_prefill_times, recorded_evidence, recorded_prefill_evidence
from kvjax.cost_model.evidence import with_evaluation, with_results
from kvjax.cost_model.fitting import MESH, Key, checks, errors, fit, held_out, read_cells
from kvjax.cost_model.prefill_times import fit_prefill
from kvjax.cost_model.records import to_json
from kvjax.cost_model.regimes import crossover
from kvjax.model.identity import fingerprint
from kvjax.models.loading import load
from kvjax.serving.bench.decode import config_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cost-model.md"
FILES = {name: json.loads((ROOT / f"kvjax/cost_model/fitted/{name}.json").read_text()) for name in ("nvidia-h200", "nvidia-h200-packed")}
FORMATS = {("int8", None): "`int8` | 16 bits", ("int8", "int8"): "`int8` | `int8`"}
FORMATS |= {("int4", None): "`int4` | 16 bits", ("int4", "int8"): "`int4` | `int8`", (None, None): "16 bits | 16 bits"}


def page():
    return " ".join(PAGE.read_text(encoding="utf-8").split())


def committed(made):
    """What a built-in cost model is fitted to, and the cells of the files that it names."""
    runs = [json.loads((ROOT / name).read_text()) for name in made.source.split()]
    key = Key(made.device, made.model, config_of(made.model).num_layers, made.dtype, made.weights, made.cache_format)
    return key, read_cells(runs, config_of, made.steps_per_launch)[key]


def packed_of(made):
    """The formats of a cost model, as `CostModel.predict` takes them."""
    return {"weights": made.weights, "cache_format": made.cache_format}


def alike(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left == (pytest.approx(right, rel=1e-6, abs=1e-12) if isinstance(right, float) else right)


@pytest.mark.parametrize("made", known_cost_models(), ids=lambda made: f"{made.device}, {made.model}, {made.formats}")
def test_built_in_cost_models_are_the_fit_of_committed_rows(made):
    """After new measurements: the commands of docs/cost-model.md, then `python -m benchmarks.update_docs`."""
    key, cells = committed(made)
    alike(to_json(fit(cells, config_of(made.model), key, source=made.source)), to_json(made))
    assert made.error < (0.03 if made.steps_per_launch == 1 else 0.05)
    assert made.bus is None or made.bus.error < 0.05
    assert made.exchanges is None or made.exchanges.error < 0.05


def test_errors_of_unseen_cells_are_what_the_files_say_and_below_five_percent_within_a_mesh_or_tier():
    made = known_cost_models()[0]
    (held,) = FILES["nvidia-h200"]["held_out"]
    alike(json.loads(json.dumps(checks(committed(made)[1]))), held)
    for groups in held["errors"].values():
        for by in {"cell", "length", "mesh or tier"} & set(groups):
            assert max(groups[by][figure][0] for figure in ("seconds", "speedup")) < 0.05
    for each in FILES["nvidia-h200-packed"]["held_out"]:
        assert max(each["errors"]["device"]["cell"][figure][0] for figure in ("seconds", "speedup")) < 0.05


def test_without_the_choice_over_devices_the_error_would_exceed_five_percent():
    cells = committed(known_cost_models()[0])[1]
    cells = [dataclasses.replace(cell, exchanges=cell.exchanges._replace(choosing=0)) for cell in cells]
    assert errors(held_out(cells, MESH, "cell"))["speedup"][0] > 0.05
    assert "Without this term the mean error of speed-ups would exceed 5%" in page()


def test_the_page_is_what_the_cost_models_make():
    text = PAGE.read_text(encoding="utf-8")
    wrong = text.replace(" TB/s |", " GB/s |")
    assert wrong != text
    assert update_docs.made("cost-model", wrong) == text
    for file in FILES.values():
        assert f"    {file['provenance']['command']}\n" in text


def test_sentences_on_errors_are_what_the_fit_says():
    text, (held,) = page(), FILES["nvidia-h200"]["held_out"]
    shown = {
        kind: {by: {name: [f"{each:.1%}" for each in found[name]] for name in ("seconds", "speedup")} for by, found in groups.items()}
        for kind, groups in held["errors"].items()
    }
    mesh, host, device = shown["mesh"], shown["host"], shown["device"]
    assert "**Another batch on a mesh**: {} mean, {} at worst".format(*mesh["batch"]["seconds"]) in text
    assert f"up to {host['cell']['seconds'][1]} in time, {host['cell']['speedup'][1]} in the speed-up" in text
    unseen = f"up to {mesh['cell']['seconds'][1]} in time, and {mesh['mesh or tier']['seconds'][1]} where the mesh was not seen"
    assert f"**Single steps on a mesh**: {unseen}" in text
    assert f"up to {device['length']['seconds'][1]} in time, {device['length']['speedup'][1]} in the speed-up" in text
    packed = [each["errors"]["device"]["batch"]["seconds"][0] for each in FILES["nvidia-h200-packed"]["held_out"][:2]]
    assert "**Another batch with packed weights**: {:.1%} mean, and {:.1%} with packed pages, too".format(*packed) in text
    assert f"loses {held['regret']:.2%} of the time of the fastest policy" in text


def packed_steps(**place):
    """The rows of `packed-steps.json` with these fields."""
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-steps.json").read_text())["rows"]
    return [row for row in rows if all(row[name] == value for name, value in place.items())]


def test_sentences_on_the_terms_of_packed_steps_are_what_the_fit_says():
    text = page()
    plain, *packed = known_cost_models()
    c0 = sorted(made.c0 * 1e3 for made in packed)
    assert f"**c0** is {c0[0]:.2f} to {c0[-1]:.2f} ms, and {plain.c0 * 1e3:.2f} ms with nothing packed" in text
    rates = {
        pages: [f"{rate / 1e12:.2f}" for rate in sorted(made.bytes_per_s for made in packed if made.cache_format == pages)]
        for pages in (None, "int8")
    }
    assert "{} to {} TB/s as they are, {} to {} TB/s packed as `int8`".format(*rates[None], *rates["int8"]) in text
    config, off = config_of("qwen2.5-7b"), {}
    for made in packed:
        for cell in committed(made)[1]:
            seconds = made.predict(config, cell.policy, cell.length, cell.batch, **packed_of(made)).seconds
            off[made.weights, made.cache_format, cell.batch, cell.length, cell.policy] = (cell.seconds / seconds - 1) * 100
    slower, faster = (max(sign * error for (_, _, n, *_), error in off.items() if n == batch) for sign, batch in ((1, 8), (-1, 1)))
    said = f"eight sequences take up to {slower:.1f}% longer than the cost model says, and steps of one up to {faster:.1f}% less"
    assert said in text


def test_where_lists_are_faster_with_packed_formats_is_what_the_models_say():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for made in known_cost_models():
        config, packed = config_of(made.model), packed_of(made)

        def shown(text, length, batch, made=made, config=config, packed=packed):
            return text + " (projection)" * bool(made.predict(config, "top:32", length, batch, **packed).projection)

        starts = {batch: crossover(made, config, "top:32", batch, **packed) for batch in (1, 8)}
        gains = {batch: made.speedup(config, "top:32", 131_072, batch, **packed) for batch in (1, 8)}
        cells = [shown(f"{start:,}", start, batch) for batch, start in starts.items()]
        cells += [shown(f"{gain:.2f}", 131_072, batch) for batch, gain in gains.items()]
        assert f"| {FORMATS[made.weights, made.cache_format]} | {' | '.join(cells)} |" in lines
        # "Near these lengths the gain is smaller than the cost model's error."
        assert all(made.speedup(config, "top:32", start, batch, **packed) - 1 < made.error for batch, start in starts.items())


def test_packed_steps_in_short_and_long_launches_are_quoted_as_measured():
    text = page()
    one, launched = (
        {row["cache_format"]: row for row in packed_steps(weights="int8", tokens=131_072, policy="top:32", steps_per_launch=steps)}
        for steps in (1, 8)
    )
    plain, packed = (f"{one[pages]['median_s'] * 1e3:.2f} ms" for pages in (None, "int8"))
    said = f"took {plain} in launches of one step with pages as they are, and {packed} with pages packed as `int8`"
    assert f"With `int8` weights, `top:32` at 128K tokens {said}" in text
    (device,) = {f"{row['profile']['median_s'] * 1e3:.2f} ms" for row in one.values()}
    eight, other = (f"{launched[pages]['median_s'] * 1e3:.2f}" for pages in (None, "int8"))
    assert f"In both the device computed for {device}. In launches of eight they took {eight} and {other} ms (`packed-steps.json`)" in text
    config = config_of("qwen2.5-7b")
    plain = known_cost_models()[0]
    own = known_cost_model("NVIDIA H200", config, "bfloat16", "int8")
    other, own = (each.predict(config, "top:32", 131_072, weights="int8").seconds * 1e3 for each in (plain, own))
    assert f"the cost model of 16 bits would say {other:.2f} ms for `top:32` at 128K tokens, where {eight} ms were measured" in text
    assert f"the cost model of this format says {own:.2f} ms" in text


def test_recorded_evidence_is_what_the_committed_panels_make():
    """After new measurements: the command under "Evidence" in docs/cost-model.md."""
    rows = ()
    for source in sorted({row.source for row in recorded_evidence()}):
        rows = with_evaluation(rows, json.loads((ROOT / source).read_text()), source)
    assert rows
    assert set(rows) == set(recorded_evidence())


def results_of(rows):
    """The committed results that rows or models name as their sources."""
    names = sorted({name for row in rows for name in row.source.split()})
    return [(name, json.loads((ROOT / name).read_text())) for name in names]


def test_prefill_times_are_what_committed_rows_make():
    """After new measurements: the first command under "Choosing by evidence and times" in docs/prefill.md."""
    found = results_of(known_prefill_times())
    assert found
    assert set(fit_prefill(found)) == set(known_prefill_times())
    faster = [(name, run | {"rows": [row | {"median_s": row.get("median_s", 0) / 2} for row in run["rows"]]}) for name, run in found]
    assert not set(fit_prefill(faster)) & set(known_prefill_times()), "and of no others"


def test_recorded_prefill_evidence_is_what_committed_results_make():
    """After new measurements: the second command under "Choosing by evidence and times" in docs/prefill.md."""
    model = fingerprint(load("needle", dtype="bfloat16", tokenizer=False)), "bfloat16"
    found = results_of(recorded_prefill_evidence())
    assert found
    assert set(with_results((), found, model)) == set(recorded_prefill_evidence())
    lines = (ROOT / "docs/prefill.md").read_text(encoding="utf-8")
    for table, tables in (("prefill_times", known_prefill_times()), ("prefill_evidence", recorded_prefill_evidence())):
        (command,) = [line for line in lines.splitlines() if line.startswith("    kvjax cost") and f"kvjax/cost_model/{table}.json" in line]
        assert set(command.split()) >= {name for name, _ in results_of(tables)}
