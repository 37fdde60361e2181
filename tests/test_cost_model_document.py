"""The built-in cost models, evidence and docs/cost-model.md are what the committed measurements make."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks import update_docs
from kvjax.cost_model import known_cost_model, known_cost_models, known_prefill_times, recorded_evidence, recorded_prefill_evidence
from kvjax.cost_model.evidence import with_evaluation, with_results
from kvjax.cost_model.exchanges import prompt_exchanges
from kvjax.cost_model.fitting import Key, checks, fit, read_cells
from kvjax.cost_model.predict import to_json
from kvjax.cost_model.prefill_times import fit_prefill
from kvjax.cost_model.regimes import crossover
from kvjax.model.identity import fingerprint
from kvjax.models.loading import load
from kvjax.policies.prefill import parse_prefill
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
    for kind in ("device", "host", "mesh"):
        for by in ("cell", "length"):
            assert max(held["errors"][kind][by]["all"][figure][0] for figure in ("seconds", "speedup")) < 0.05
    for each in FILES["nvidia-h200-packed"]["held_out"]:
        assert max(each["errors"]["device"]["cell"]["all"][figure][0] for figure in ("seconds", "speedup")) < 0.05


def test_the_page_is_what_the_cost_models_make():
    text = PAGE.read_text(encoding="utf-8")
    wrong = text.replace(" TB/s |", " GB/s |")
    assert wrong != text
    assert update_docs.made("cost-model", wrong) == text
    for file in FILES.values():
        assert f"    {file['provenance']['command']}\n" in text


def test_sentences_on_errors_are_what_the_fit_says():
    text, (held,) = page(), FILES["nvidia-h200"]["held_out"]
    errors = {
        kind: {by: {figure: both["all"][figure] and [f"{each:.1%}" for each in both["all"][figure]] for figure in ("seconds", "speedup")}
               for by, both in groups.items()}
        for kind, groups in held["errors"].items()
    }  # fmt: skip
    mesh, host = errors["mesh"], errors["host"]
    assert "**Another batch on a mesh**: {} mean, {} at worst".format(*mesh["batch"]["seconds"]) in text
    assert f"up to {host['cell']['seconds'][1]} too long or too short in time, {host['cell']['speedup'][1]} in the speed-up" in text
    assert f"**Single steps on a mesh**: up to {mesh['cell']['seconds'][1]} in time" in text
    packed = [each["errors"]["device"]["batch"]["all"]["seconds"][0] for each in FILES["nvidia-h200-packed"]["held_out"][:2]]
    assert "**Another batch with packed weights**: {:.1%} mean, and {:.1%} with packed pages, too".format(*packed) in text
    said = "loses {mean:.2%} of the time of the fastest policy; always dense loses {always dense:.1%}"
    assert said.format(**held["regret"]) in text
    means = [mesh[by]["seconds"][0] for by in ("cell", "length", "mesh", "number of devices", "batch")]
    assert "the mean errors of their times are {}, {}, {} and {}. A batch that it has not seen misses it, with {}".format(*means) in text
    assert f"Of a kind of list that the fit has not seen its mean error is {host['kind of list']['seconds'][0]}" in text


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
    assert (
        f"eight sequences take up to {slower:.1f}% longer than the cost model says, and steps of one up to {faster:.1f}% less than it says"
        in text
    )
    short, long = (
        {
            policies: sorted(off["int8", pages, 8, length, policy] for policy in policies for pages in (None, "int8"))
            for policies in (("dense",), ("top:32", "top:8"))
        }
        for length in (8192, 131_072)
    )
    said = "With eight sequences at 8K tokens dense steps take {:.1f}% and {:.1f}% longer, by format, and lists {:.1f}% to {:.1f}%"
    assert said.format(*short[("dense",)], short[("top:32", "top:8")][0], short[("top:32", "top:8")][-1]) in text
    assert long[("dense",)][-1] < 0
    lists = long["top:32", "top:8"]
    said = f"it takes up to {-long[('dense',)][0]:.1f}% less, but lists take {lists[0]:.1f}% to {lists[-1]:.1f}% longer"
    assert said in text
    spent = {}
    for name in ("packed-grid", "packed-steps-b8"):
        for row in json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())["rows"]:
            if (row["weights"], row["cache_format"], row["tokens"], row["policy"]) == ("int8", None, 8192, "dense"):
                kernels = {kernel["name"]: kernel["total_s"] for kernel in row["profile"]["kernels"]}
                spent[row["batch"]] = kernels["project_kernel_mosaic_gpu_kernel"] * 1e3
    assert f"{spent[8]:.2f} and {spent[1]:.2f} ms of a dense step with `int8` weights at 8K tokens" in text
    four = [made.measured for made in packed if made.weights == "int8"]
    assert four == [((1, 8192, 2**20), (4, 131_072, 131_072), (8, 8192, 131_072))] * 2


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
        # "With packed weights `top:8` is faster from shorter lengths, all of them projections."
        for batch, start in starts.items():
            shorter = crossover(made, config, "top:8", batch, **packed)
            assert shorter < start
            assert made.weights is None or made.predict(config, "top:8", shorter, batch, **packed).projection


def test_steps_near_those_lengths_are_quoted_as_measured():
    text = page()
    place = {"weights": "int4", "cache_format": "int8", "tokens": 8192, "batch": 1, "steps_per_launch": 8}
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-steps-int4.json").read_text())["rows"]
    steps = {row["policy"]: row["median_s"] * 1e3 for row in rows if all(row[name] == value for name, value in place.items())}
    assert f"{steps['dense']:.3f} ms (dense) and {steps['top:32']:.3f} ms (`top:32`) at 8K tokens, batch 1" in text
    assert abs(steps["top:32"] / steps["dense"] - 1) < 0.005


def test_formats_without_a_cost_model_mislead_as_quoted():
    text, config = page(), config_of("qwen2.5-7b")
    models = {weights: known_cost_model("NVIDIA H200", config, "bfloat16", weights) for weights in ("fp8", "int8")}
    steps = [made.predict(config, "top:32", 8192, weights=weights).seconds * 1e3 for weights, made in models.items()]
    assert models["fp8"].weights is None
    assert steps[0] < steps[1]
    assert "look faster than `int8`: {:.2f} and {:.2f} ms for `top:32` at 8K tokens".format(*steps) in text
    rows = json.loads((ROOT / "benchmarks/results/h200/packed-matrices.json").read_text())["rows"]
    times = {row["case"].rpartition("/")[2]: row["median_s"] * 1e6 for row in rows}
    assert all(times[f"{name}:fp8"] > times[f"{name}:int8"] for name in ("gate-up", "down"))
    said = f"one of gate and up takes {times['gate-up:fp8']:.1f} us with `fp8` and {times['gate-up:int8']:.1f} us with `int8`"
    assert said in text


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


def test_the_bytes_of_prompts_on_a_mesh_are_computed():
    config, text = config_of("qwen2.5-7b"), page()

    def terabytes(chunk, **mesh):
        found = prompt_exchanges(config, parse_prefill("dense"), 1 << 20, chunk, **mesh)
        return sum(each.received for each in found) / 1e12

    large, small, tensor = terabytes(32_768, context=4), terabytes(512, context=4), terabytes(32_768, tensor=4)
    said = f"receives {large:.2f} TB in chunks of 32,768 tokens, and {small:.0f} TB in chunks of 512. So use large chunks on a mesh with "
    assert f"{said}`context`. On `tensor=4` it receives {tensor:.2f} TB with either" in text
