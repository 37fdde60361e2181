"""Bills, evidence and docs/the-bill.md are what the committed measurements make."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from kvjax.bill import known_bill, known_bills, recorded_evidence, recorded_prefill_evidence, step_bytes
from kvjax.bill.bus_fitting import fit_bus, read_runs
from kvjax.bill.evidence import with_panel
from kvjax.bill.fitting import Key, fit, forecasts, read_cells
from kvjax.bill.mesh_fitting import fit_mesh, mesh_forecasts, read_mesh_runs
from kvjax.bill.prefill_bill import fit_prefill, known_prefill_bills
from kvjax.bill.prefill_evidence import with_results
from kvjax.bill.prefill_exchanges import prompt_exchanges
from kvjax.bill.regimes import crossover
from kvjax.bill.report import TABLES, rendered
from kvjax.bill.step_bill import from_json, to_json
from kvjax.identity import fingerprint
from kvjax.models.loading import load
from kvjax.policies.decode import parse
from kvjax.policies.prefill import parse_prefill
from kvjax.serving.bench.decode import config_of

ROOT = Path(__file__).parent.parent


def committed(made):
    """The cells that a built-in bill says it was fitted to: with everything on the device, and with pages in host memory."""
    read = read_runs([json.loads((ROOT / name).read_text()) for name in made.source.split()], config_of, made.steps_per_launch)
    return read[key_of(made)]


def key_of(made):
    """What a built-in bill is fitted to."""
    return Key(made.device, made.model, config_of(made.model).num_layers, made.dtype, made.weights, made.cache_format)


def packed_of(made):
    """The formats of a bill, as `Bill.predict` takes them."""
    return {"weights": made.weights, "cache_format": made.cache_format}


def committed_meshes(made):
    """The cells of several devices in the same files."""
    read = read_mesh_runs([json.loads((ROOT / name).read_text()) for name in made.source.split()], config_of)
    return read.get(key_of(made), [])


def bills_of(name):
    """A file of built-in bills, and its bills."""
    file = json.loads((ROOT / "kvjax/bill/bills" / name).read_text())
    return file, list(map(from_json, file["bills"]))


@pytest.mark.parametrize("made", known_bills(), ids=lambda made: f"{made.device}, {made.model}, {made.formats}")
def test_built_in_bills_are_the_fit_of_committed_rows(made):
    """After new measurements: the commands of docs/the-bill.md."""
    form = "scan" if any(price.per_byte for _, price in made.c1) else "fixed"
    (cells, tiered), named = committed(made), {"model": made.model, "source": made.source, "form": form}
    kind = packed_of(made) | {"steps_per_launch": made.steps_per_launch}
    again = fit(cells, config_of(made.model), device=made.device, dtype=made.dtype, **named, **kind)
    again = dataclasses.replace(again, bus=fit_bus(cells, tiered, **named) if tiered else None)
    if on_mesh := committed_meshes(made):
        again = dataclasses.replace(again, mesh=fit_mesh(cells, on_mesh, law=made.mesh.law, **named))
    for one, other in zip(jax.tree.leaves(to_json(again)), jax.tree.leaves(to_json(made)), strict=True):
        assert one == (pytest.approx(other, rel=1e-6, abs=1e-15) if isinstance(other, float) else other)
    assert made.error < (0.03 if made.steps_per_launch == 1 else 0.05)
    assert made.bus is None or made.bus.error < 0.05
    assert made.mesh is None or made.mesh.error < 0.05


def test_the_page_is_what_the_bills_make():
    """After new measurements: the commands of docs/the-bill.md."""
    text = (ROOT / "docs/the-bill.md").read_text(encoding="utf-8")
    assert all(f"<!-- bill:{name} -->" in text for name in (*TABLES, "packed-parameters", "packed-errors"))
    labels = {"": "qwen2.5-7b | dense", "packed": "qwen2.5-7b, weights int8, 8 steps per launch | a batch"}
    for name, prefix in (("nvidia-h200", ""), ("nvidia-h200-packed", "packed")):
        file, _ = bills_of(f"{name}.json")
        assert rendered(text, file, prefix) == text
        assert labels[prefix] in text
        assert rendered(text.replace(labels[prefix], "another"), file, prefix) == text
        assert f"    {file['provenance']['command']}\n" in text


def test_sentences_on_the_terms_of_a_mesh_are_what_the_fit_says():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
    file, (made,) = bills_of("nvidia-h200.json")
    checked = file["held_out_meshes"][0]["errors"]
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


@pytest.mark.parametrize("name", ["nvidia-h200.json", "nvidia-h200-packed.json"])
def test_projections_without_overhead_are_the_bills(name):
    file, bills = bills_of(name)
    for made, checked in zip(bills, file["held_out"], strict=True):
        config, packed = config_of(made.model), packed_of(made)
        for row in checked["projections"]:
            for policy, (fitted, free) in row["seconds"].items():
                moved = step_bytes(config, parse(policy), row["tokens"], row["batch"], dtype="bfloat16", **packed).total
                assert fitted == pytest.approx(made.predict(config, policy, row["tokens"], row["batch"], **packed).seconds)
                assert fitted - free == pytest.approx(made.c0)
                assert free >= moved / made.bytes_per_s


LISTS = ("dense",), ("top:32", "top:8")
FORMATS = {("int8", None): "`int8` | 16 bits", ("int8", "int8"): "`int8` | `int8`"}
FORMATS |= {("int4", None): "`int4` | 16 bits", ("int4", "int8"): "`int4` | `int8`", (None, None): "16 bits | 16 bits"}


def packed_steps(**place):
    """The rows of `packed-steps.json` with these fields."""
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-steps.json").read_text())["rows"]
    return [row for row in rows if all(row[name] == value for name, value in place.items())]


def test_sentences_on_errors_of_packed_steps_are_what_the_fit_says():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
    file, bills = bills_of("nvidia-h200-packed.json")
    checked = {(made.weights, made.cache_format): each["errors"] for made, each in zip(bills, file["held_out"], strict=True)}
    assert set(checked) == set(FORMATS) - {(None, None)}
    by_cell = {key: found["cell"] for key, found in checked.items()}
    means = [found["scan"]["mean"] * 100 for found in by_cell.values()]
    assert max(means) < 5
    assert f"the mean error of speed-ups is {min(means):.1f}% to {max(means):.1f}% by format (target: below 5%)" in text
    worst = max(by_cell, key=lambda key: by_cell[key]["scan"]["worst"])
    assert worst == ("int8", "int8")
    assert f"The worst one is {by_cell[worst]['scan']['worst'] * 100:.1f}%, for `int8` weights and pages at 128K tokens and batch 8" in text
    (made,) = [each for each in bills if (each.weights, each.cache_format) == worst]
    off = max(forecasts(committed(made)[0], "cell", "scan"), key=lambda each: abs(each.error)).cell
    assert (off.length, off.batch) == (131_072, 8)
    assert [made.measured[-1][0] for made in bills if made.weights == "int4"] == [1, 1]
    for made in bills:  # "All formats were timed at five lengths, from 8K to 1M tokens."
        assert sorted({cell.length for cell in committed(made)[0] if cell.batch == 1}) == [8192, 32_768, 131_072, 524_288, 2**20]
    (alone,) = [each for each in bills if (each.weights, each.cache_format) == ("int8", None)]
    off = max(forecasts(committed(alone)[0], "cell", "scan"), key=lambda each: abs(each.error))
    assert (off.cell.length, off.cell.batch) == (2**20, 1)
    rows = {row["steps_per_launch"]: row for row in packed_steps(tokens=2**20, weights="int8", cache_format=None, policy="dense")}
    times = [f"{each * 1e3:.2f} ms" for each in (rows[8]["median_s"], rows[8]["profile"]["median_s"], rows[1]["median_s"])]
    said = "For `int8` weights alone it is {:.1f}%, at 1M tokens: the dense step there took {} by the clock, but {} on the device, and {}"
    assert said.format(abs(off.error) * 100, *times) in text
    few = [by_cell["int4", pages]["scan"]["mean"] * 100 for pages in (None, "int8")]
    assert "their errors of {:.1f}% and {:.1f}% say nothing of batches".format(*few) in text
    for group, said in (("length", "Of whole lengths held out the mean errors are"), ("batch", "of whole batches")):
        held = {key: found[group]["scan"] for key, found in checked.items() if found.get(group)}
        assert set(held) == (set(checked) if group == "length" else {("int8", None), ("int8", "int8")})
        mean, worst = ([each[name] * 100 for each in held.values()] for name in ("mean", "worst"))
        between = " and the worst one " if group == "length" else " and "
        assert f"{said} {min(mean):.1f}% to {max(mean):.1f}%{between}{max(worst):.1f}%" in text
    better = {key for key, found in by_cell.items() if found["fixed"]["mean"] < found["scan"]["mean"]}
    assert better == {("int8", None)}
    forms = [by_cell["int8", None][form][name] * 100 for name in ("mean", "worst") for form in ("fixed", "scan")]
    said = "a constant c1 does slightly better on cells than the bill's form: {:.2f}% against {:.2f}%, and at worst {:.2f}% against {:.2f}%"
    assert said.format(*forms) in text
    c1 = {key: [f"{found[form]['mean'] * 100:.1f}%" for form in ("none", "scan")] for key, found in by_cell.items()}
    assert "For `int4` weights that is from {} to {}".format(*c1["int4", None]) in text
    assert "and with `int8` pages from {} to {}. For".format(*c1["int4", "int8"]) in text
    assert "For `int8` weights it is from {} to {}".format(*c1["int8", None]) in text
    assert "and with `int8` pages hardly, from {} to {}".format(*c1["int8", "int8"]) in text
    worse = {key: found["none"]["mean"] / found["scan"]["mean"] for key, found in by_cell.items()}
    assert min(worse.values()) > 1
    assert min(worse, key=worse.__getitem__) == ("int8", "int8")
    register = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    said = f"yes, {min(worse.values()):.1f} to {max(worse.values()):.1f} times; least for `int8` weights with `int8` pages, where it is "
    assert said + "{} against {}".format(*c1["int8", "int8"]) in register


def test_sentences_on_the_terms_of_packed_steps_are_what_the_fit_says():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
    _, (plain,) = bills_of("nvidia-h200.json")
    _, bills = bills_of("nvidia-h200-packed.json")
    c0 = sorted(made.c0 * 1e3 for made in bills)
    assert f"**c0** is {c0[0]:.2f} to {c0[-1]:.2f} ms, and {plain.c0 * 1e3:.2f} ms with nothing packed" in text
    rates = {
        pages: [f"{rate / 1e12:.2f}" for rate in sorted(made.bytes_per_s for made in bills if made.cache_format == pages)]
        for pages in (None, "int8")
    }
    assert "{} to {} TB/s as they are, {} to {} TB/s packed as `int8`".format(*rates[None], *rates["int8"]) in text
    config, off = config_of("qwen2.5-7b"), {}
    for made in bills:
        for cell in committed(made)[0]:
            seconds = made.predict(config, cell.policy, cell.length, cell.batch, **packed_of(made)).seconds
            off[made.weights, made.cache_format, cell.batch, cell.length, cell.policy] = (cell.seconds / seconds - 1) * 100
    slower, faster = (max(sign * error for (_, _, n, *_), error in off.items() if n == batch) for sign, batch in ((1, 8), (-1, 1)))
    assert (
        f"eight sequences take up to {slower:.1f}% longer than the bill says, and steps of one up to {faster:.1f}% less than it says"
        in text
    )
    short, long = (
        {policies: sorted(off["int8", pages, 8, length, policy] for policy in policies for pages in (None, "int8")) for policies in LISTS}
        for length in (8192, 131_072)
    )
    said = "With eight sequences at 8K tokens dense steps take {:.1f}% and {:.1f}% longer, by format, and lists {:.1f}% to {:.1f}%"
    assert said.format(*short[LISTS[0]], short[LISTS[1]][0], short[LISTS[1]][-1]) in text
    assert long[LISTS[0]][-1] < 0
    said = f"it takes up to {-long[LISTS[0]][0]:.1f}% less, but lists take {long[LISTS[1]][0]:.1f}% to {long[LISTS[1]][-1]:.1f}% longer"
    assert said in text
    spent = {}
    for name in ("packed-grid", "packed-steps-b8"):
        for row in json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())["rows"]:
            if (row["weights"], row["cache_format"], row["tokens"], row["policy"]) == ("int8", None, 8192, "dense"):
                kernels = {kernel["name"]: kernel["total_s"] for kernel in row["profile"]["kernels"]}
                spent[row["batch"]] = kernels["project_kernel_mosaic_gpu_kernel"] * 1e3
    assert f"{spent[8]:.2f} and {spent[1]:.2f} ms of a dense step with `int8` weights at 8K tokens" in text
    four = [made.measured for made in bills if made.weights == "int8"]
    assert four == [((1, 8192, 2**20), (4, 131_072, 131_072), (8, 8192, 131_072))] * 2


def test_where_lists_are_faster_with_packed_formats_is_what_the_bills_say():
    lines = (ROOT / "docs/the-bill.md").read_text(encoding="utf-8").splitlines()
    for made in known_bills():
        config, packed = config_of(made.model), packed_of(made)

        def shown(text, length, batch, made=made, config=config, packed=packed):
            return text + " (projection)" * bool(made.predict(config, "top:32", length, batch, **packed).projection)

        starts = {batch: crossover(made, config, "top:32", batch, **packed) for batch in (1, 8)}
        gains = {batch: made.speedup(config, "top:32", 131_072, batch, **packed) for batch in (1, 8)}
        cells = [shown(f"{start:,}", start, batch) for batch, start in starts.items()]
        cells += [shown(f"{gain:.2f}", 131_072, batch) for batch, gain in gains.items()]
        assert f"| {FORMATS[made.weights, made.cache_format]} | {' | '.join(cells)} |" in lines
        # "Near these lengths the gain is smaller than the bill's error."
        assert all(made.speedup(config, "top:32", start, batch, **packed) - 1 < made.error for batch, start in starts.items())
        # "With packed weights `top:8` is faster from shorter lengths, all of them projections."
        for batch, start in starts.items():
            shorter = crossover(made, config, "top:8", batch, **packed)
            assert shorter < start
            assert made.weights is None or made.predict(config, "top:8", shorter, batch, **packed).projection


def test_steps_near_those_lengths_are_quoted_as_measured():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
    place = {"weights": "int4", "cache_format": "int8", "tokens": 8192, "batch": 1, "steps_per_launch": 8}
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-steps-int4.json").read_text())["rows"]
    steps = {row["policy"]: row["median_s"] * 1e3 for row in rows if all(row[name] == value for name, value in place.items())}
    assert f"{steps['dense']:.3f} ms (dense) and {steps['top:32']:.3f} ms (`top:32`) at 8K tokens, batch 1" in text
    assert abs(steps["top:32"] / steps["dense"] - 1) < 0.005


def test_formats_without_a_bill_mislead_as_quoted():
    text, config = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split()), config_of("qwen2.5-7b")
    bills = {weights: known_bill("NVIDIA H200", config, "bfloat16", weights) for weights in ("fp8", "int8")}
    steps = [made.predict(config, "top:32", 8192, weights=weights).seconds * 1e3 for weights, made in bills.items()]
    assert bills["fp8"].weights is None
    assert steps[0] < steps[1]
    assert "look faster than `int8`: {:.2f} and {:.2f} ms for `top:32` at 8K tokens".format(*steps) in text
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-matrices.json").read_text())["rows"]
    times = {row["case"].rpartition("/")[2]: row["median_s"] * 1e6 for row in rows}
    assert all(times[f"{name}:fp8"] > times[f"{name}:int8"] for name in ("gate-up", "down"))
    said = f"one of gate and up takes {times['gate-up:fp8']:.1f} us with `fp8` and {times['gate-up:int8']:.1f} us with `int8`"
    assert said in text


def test_packed_steps_in_short_and_long_launches_are_quoted_as_measured():
    text = " ".join((ROOT / "docs/the-bill.md").read_text(encoding="utf-8").split())
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
    _, (plain,) = bills_of("nvidia-h200.json")
    own = known_bill("NVIDIA H200", config, "bfloat16", "int8")
    other, own = (each.predict(config, "top:32", 131_072, weights="int8").seconds * 1e3 for each in (plain, own))
    assert f"the bill of 16 bits would say {other:.2f} ms for `top:32` at 128K tokens, where {eight} ms were measured" in text
    assert f"the bill of this format says {own:.2f} ms" in text


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
