"""Bills, evidence and docs/the-bill.md are what the committed measurements make."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from kvjax.bill import known_bills, recorded_evidence, recorded_prefill_evidence, step_bytes
from kvjax.bill.bus_fitting import fit_bus, read_runs
from kvjax.bill.evidence import with_panel
from kvjax.bill.fitting import Key, fit, read_cells
from kvjax.bill.mesh_fitting import fit_mesh, mesh_forecasts, read_mesh_runs
from kvjax.bill.prefill_bill import fit_prefill, known_prefill_bills
from kvjax.bill.prefill_evidence import with_results
from kvjax.bill.prefill_exchanges import prompt_exchanges
from kvjax.bill.report import TABLES, rendered
from kvjax.bill.step_bill import from_json, to_json
from kvjax.model import fingerprint
from kvjax.models.loading import load
from kvjax.policies.decode import parse
from kvjax.policies.prefill import parse_prefill
from kvjax.serving.bench.decode import config_of

ROOT = Path(__file__).parent.parent


def committed(made):
    """The cells that a built-in bill says it was fitted to: with everything on the device, and with pages in host memory."""
    read = read_runs([json.loads((ROOT / name).read_text()) for name in made.source.split()], config_of)
    (found,) = [cells for key, cells in read.items() if (key[0], key[1], key[3]) == (made.device, made.model, made.dtype)]
    return found


def committed_meshes(made):
    """The cells of several devices in the same files."""
    read = read_mesh_runs([json.loads((ROOT / name).read_text()) for name in made.source.split()], config_of)
    return read.get(Key(made.device, made.model, config_of(made.model).num_layers, made.dtype, made.weights, made.cache_format), [])


@pytest.mark.parametrize("made", known_bills(), ids=lambda made: f"{made.device}, {made.model}")
def test_built_in_bills_are_the_fit_of_committed_rows(made):
    """After new measurements: the command at the top of docs/the-bill.md."""
    form = "scan" if any(price.per_byte for _, price in made.c1) else "fixed"
    (cells, tiered), named = committed(made), {"model": made.model, "source": made.source, "form": form}
    again = fit(cells, config_of(made.model), device=made.device, dtype=made.dtype, **named)
    again = dataclasses.replace(again, bus=fit_bus(cells, tiered, **named) if tiered else None)
    if on_mesh := committed_meshes(made):
        again = dataclasses.replace(again, mesh=fit_mesh(cells, on_mesh, law=made.mesh.law, **named))
    for one, other in zip(jax.tree.leaves(to_json(again)), jax.tree.leaves(to_json(made)), strict=True):
        assert one == (pytest.approx(other, rel=1e-6, abs=1e-15) if isinstance(other, float) else other)
    assert made.error <= 0.03
    assert made.bus is None or made.bus.error < 0.05
    assert made.mesh is None or made.mesh.error < 0.05


def test_the_page_is_what_the_bills_make():
    """After new measurements: the command at the top of docs/the-bill.md."""
    text = (ROOT / "docs/the-bill.md").read_text(encoding="utf-8")
    file = json.loads((ROOT / "kvjax/bill/bills/nvidia-h200.json").read_text())
    assert all(f"<!-- bill:{name} -->" in text for name in TABLES)
    assert rendered(text, file) == text
    assert rendered(text.replace("qwen2.5-7b | dense", "qwen2.5-7b | sparse"), file) == text
    assert f"    {file['provenance']['command']}\n" in text


def test_sentences_on_the_terms_of_a_mesh_are_what_the_fit_says():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
    ((made, checked),) = (
        (made, each["errors"])
        for made, each in zip(
            known_bills(), json.loads((ROOT / "kvjax/bill/bills/nvidia-h200.json").read_text())["held_out_meshes"], strict=True
        )
    )
    errors = {group: {name: each * 100 for name, each in found["log2, all"]["seconds"].items()} for group, found in checked.items()}
    mean, worst = ({group: each[name] for group, each in errors.items()} for name in ("mean", "worst"))
    assert f"are fitted to {checked['cell']['log2, all']['count']} cells of Qwen2.5-7B" in text
    assert f"mean errors are {mean['cell']:.1f}% and {mean['length']:.1f}%, the worst one is {worst['cell']:.1f}%" in text
    assert max(mean["cell"], mean["length"]) < 5 < min(mean["batch"], mean["mesh"], mean["number of devices"])
    assert "mean errors of {batch:.1f}%, {mesh:.1f}% and {number of devices:.1f}%".format(**mean) in text
    assert f"the bill is up to {worst['batch']:.1f}% off for 8 sequences" in text
    (cells, _), on_mesh = committed(made), committed_meshes(made)
    off = {each.cell: (each.seconds / each.cell.seconds - 1) * 100 for each in mesh_forecasts(cells, on_mesh, "cell")}
    both = {
        batch: [error for cell, error in off.items() if (cell.tensor, cell.context, cell.policy, cell.batch) == (2, 2, "top:32", batch)]
        for batch in (1, 8)
    }
    assert max(map(abs, off.values())) == -min(both[8])
    assert f"up to {-min(both[8]):.1f}% too short for 8 sequences, and up to {max(both[1]):.1f}% too long for one" in text


def test_projections_without_overhead_are_the_bills():
    file = json.loads((ROOT / "kvjax/bill/bills/nvidia-h200.json").read_text())
    for made, checked in zip(map(from_json, file["bills"]), file["held_out"], strict=True):
        config = config_of(made.model)
        for row in checked["projections"]:
            for policy, (fitted, free) in row["seconds"].items():
                moved = step_bytes(config, parse(policy), row["tokens"], row["batch"], dtype="bfloat16").total
                assert fitted == pytest.approx(made.predict(config, policy, row["tokens"], row["batch"]).seconds)
                assert fitted - free == pytest.approx(made.c0)
                assert free >= moved / made.bytes_per_s


def test_recorded_evidence_is_what_the_committed_panels_make():
    """After new measurements: the command under "Evidence" in docs/the-bill.md."""
    rows = ()
    for source in sorted({row.source for row in recorded_evidence()}):
        rows = with_panel(rows, json.loads((ROOT / source).read_text()), source)
    assert rows
    assert set(rows) == set(recorded_evidence())


def results_of(rows):
    """The committed results that rows or bills name as their sources."""
    names = sorted({name for row in rows for name in row.source.split()})
    return [(name, json.loads((ROOT / name).read_text())) for name in names]


def test_prefill_bills_are_what_committed_rows_make():
    """After new measurements: the first command under "Choosing by evidence and bill" in docs/prefill.md."""
    found = results_of(known_prefill_bills())
    assert found
    assert set(fit_prefill(found)) == set(known_prefill_bills())
    faster = [(name, run | {"rows": [row | {"median_s": row.get("median_s", 0) / 2} for row in run["rows"]]}) for name, run in found]
    assert not set(fit_prefill(faster)) & set(known_prefill_bills()), "and of no others"


def test_recorded_prefill_evidence_is_what_committed_results_make():
    """After new measurements: the second command under "Choosing by evidence and bill" in docs/prefill.md."""
    model = fingerprint(load("needle", dtype="bfloat16", tokenizer=False)), "bfloat16"
    found = results_of(recorded_prefill_evidence())
    assert found
    assert set(with_results((), found, model)) == set(recorded_prefill_evidence())
    page = (ROOT / "docs/prefill.md").read_text(encoding="utf-8")
    for table, tables in (("prefill_bill", known_prefill_bills()), ("prefill_evidence", recorded_prefill_evidence())):
        (command,) = [line for line in page.splitlines() if line.startswith("    kvjax bill") and f"kvjax/bill/{table}.json" in line]
        assert set(command.split()) >= {name for name, _ in results_of(tables)}


def test_rows_that_count_other_bytes_are_refused():
    run = json.loads((ROOT / "benchmarks/results/h200/decode.json").read_text())
    run["rows"][0]["bytes"]["kv"] += 1
    with pytest.raises(ValueError, match=r"8,192 tokens, batch 1, dense: the row counts .* bytes, kvjax.bill"):
        read_cells(run, config_of)


def test_the_bytes_of_prompts_on_a_mesh_are_computed():
    config, text = config_of("qwen2.5-7b"), " ".join((ROOT / "docs" / "the-bill.md").read_text(encoding="utf-8").split())

    def terabytes(chunk, **mesh):
        found = prompt_exchanges(config, parse_prefill("dense"), 1 << 20, chunk, **mesh)
        return sum(each.received for each in found) / 1e12

    large, small, tensor = terabytes(32_768, context=4), terabytes(512, context=4), terabytes(32_768, tensor=4)
    said = f"receives {large:.2f} TB in chunks of 32,768 tokens, and {small:.0f} TB in chunks of 512. So use large chunks on a mesh with "
    assert f"{said}`context`. On `tensor=4` it receives {tensor:.2f} TB with either" in text
