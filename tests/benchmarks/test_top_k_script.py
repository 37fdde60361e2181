"""The benchmark of `top_k` from end to end on tiny cases, and what it makes of traces, wrong answers and captured
rows."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from typer.testing import CliRunner

from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import earlier as top_k_earlier
from benchmarks.top_k import programs, score_rows, torch_top_k
from benchmarks.top_k import report as top_k_report
from benchmarks.top_k import timings as top_k_bench
from benchmarks.top_k.cases import Case, Place
from pallas_kernels.bench.timing import Kernel

TINY = Place("normal", 1024, 2, 32)
YARN = Place("yarn", 2048, 1, 64)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, copy_once):
    monkeypatch.setattr(top_k_bench, "copy_rate", copy_once)


def run(cases, files=None, **options):
    options = {"json_out": None, "say": lambda what: None, "jobs": 2} | options
    return top_k_bench.run(cases, None, files or {}, **options)


def test_names_are_unique_and_cover_the_reach():
    cases = top_k_cases.all_cases()
    names = {case.name for case in cases}
    assert len(names) == len(cases)
    for n in (8, 32, 64, 128, 256, 512, 1024):
        for batch in (1, 8, 64):
            for what in ("none/top_k", "stale-40/top_k", "none/radix", "none/radix-one-cta"):
                assert f"normal/{n}k/b{batch}/k2048/{what}" in names
            for other in ("lax.top_k", "torch"):
                assert (f"normal/{n}k/b{batch}/k2048/none/{other}" in names) == (n in (8, 64, 128, 1024))
    for k in (32, 512):
        for place in ("8k/b1", "128k/b1", "1024k/b1", "128k/b8", "128k/b64"):
            assert f"normal/{place}/k{k}/stale-20/top_k" not in names
            for what in ("stale-40/top_k", "none/radix-one-cta", "none/lax.top_k", "none/torch"):
                assert f"normal/{place}/k{k}/{what}" in names
    for n in (128, 1024):
        for hint in ("random", "stale-20", "stale-40", "stale-80"):
            assert f"normal/{n}k/b1/k2048/{hint}/top_k:start=hint" in names
            assert (f"normal/{n}k/b1/k2048/{hint}/top_k" in names) == (n == 128 or hint == "stale-40")
    for name in ("beta/128k/b1/k2048/stale-40/top_k", "yarn/1024k/b1/k2048/step/top_k", "yarn/128k/b1/k2048/static/top_k:start=hint"):
        assert name in names
    assert {case.name for case in cases if case.implementation == "approx_max_k" and case.place.n > 2048} == {
        f"normal/{n}k/b1/k2048/none/approx_max_k" for n in (8, 64, 128, 1024)
    }


def test_what_matters_most_is_measured_first():
    rows = np.zeros((1, 16384), np.float32)
    cases = [*top_k_cases.all_cases(), *top_k_cases.captured_cases({"model": top_k_cases.Captured(rows, rows)})]
    ordered = top_k_cases.matching(top_k_cases.in_order(cases), [])
    kinds = ["normal" if case.place.k == 2048 and case.place.rows == "normal" else case.place.rows for case in ordered]
    assert list(dict.fromkeys(kinds)) == ["normal", "model.0", "yarn", "beta", "weibull", "logistic", "lognormal"]
    assert kinds[-1] == "normal"
    assert len(ordered) == len(set(ordered)) == len([case for case in cases if case.place.n > 2048])


def test_programs_are_shared_where_only_contents_differ():
    def key(rows, hint, name="top_k", k=2048):
        return programs.key_of(Case(Place(rows, 131072, 1, k), hint, name), "reference")

    assert key("normal", "none") == key("beta", "none") == key("normal", "stale-40") == key("normal", "random"), "no hint is read"
    assert len({key("normal", "none", name) for name in ("top_k", "radix", "radix-one-cta", "lax.top_k")}) == 4
    assert key("normal", "none", k=512) != key("normal", "none")
    assert key("normal", "none", "top_k:start=hint") != key("normal", "none")


@pytest.mark.parametrize(
    ("op", "reads"),
    [
        (lambda scores, hint: jax.lax.top_k(scores, 32), False),
        (lambda scores, hint: (scores, hint), True),
        (lambda scores, hint: jnp.take_along_axis(scores, hint, 1), True),
        (lambda scores, hint: jax.jit(lambda x, y: x + y)(scores, hint[:, :1]), True),
    ],
)
def test_a_hint_that_is_read_is_seen(op, reads):
    assert programs.reads_hint(op, TINY) is reads


def test_the_kernel_reads_a_hint_where_it_starts_from_one():
    from pallas_kernels.selection.top_k import plan

    kernel = paging.implementation("top_k", "mosaic_gpu")

    for start in plan.STARTS:
        options = {"k": 2048, "sort": False, "return_counts": False, "config": plan.Config(start=start)}
        found = programs.reads_hint(lambda scores, hint, o=options: kernel(scores, hint=hint, **o), Place("normal", 131072, 1, 2048))
        assert found is (start == "hint")


def test_places_share_a_trace_until_it_is_full():
    small, large = ((Place("normal", 131072, batch, 2048), [Case(YARN, "none", "top_k")] * 9) for batch in (1, 64))
    assert [len(group) for group in top_k_bench.together([small] * 6)] == [4, 2]
    assert [len(group) for group in top_k_bench.together([small, large, small])] == [1, 1, 1]
    assert top_k_bench.together([]) == []


@pytest.mark.long
def test_a_run_that_was_cut_goes_on(tmp_path, monkeypatch):
    names = ("none/top_k", "stale-40/top_k", "none/lax.top_k")
    cases = [case for case in top_k_cases.all_cases() if case.name in [f"normal/1k/b2/k32/{name}" for name in names]]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    run(cases[:1], json_out=files[0])
    for before, file, count in ((files[0], files[1], 2), (files[1], files[2], 3)):
        earlier = json.loads(before.read_text())
        wanted = top_k_earlier.missing(cases[:count], earlier, earlier["provenance"]["device"], None)
        assert wanted == cases[count - 1 : count]
        run(wanted, json_out=file, earlier=earlier)
    first, last = json.loads(files[0].read_text()), json.loads(files[2].read_text())
    assert [row["case"] for row in last["rows"]] == [case.name for case in cases]
    assert last["rows"][0] | {"times": None} == first["rows"][0] | {"times": None}, "measured once"
    assert last["rows"][0]["times"].keys() == {"lax.top_k"}, "ratios are of all rows"
    assert [run["cases"] for run in last["continues"]] == [[case.name] for case in cases[:2]]
    assert last["continues"][0]["provenance"] == first["provenance"]
    assert first["continues"] == []


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"bench": "ops"}, "one of 'ops'"),
        ({"implementation": "xla"}, "one device and implementation"),
        ({"provenance": {"device": "another"}}, "it has another"),
    ],
)
def test_only_a_run_of_the_same_kind_goes_on(change, wrong):
    earlier = {"bench": "top-k", "implementation": None, "provenance": {"device": "cpu"}, "rows": []}
    with pytest.raises(ValueError, match=wrong):
        top_k_earlier.missing([], earlier | change, "cpu", None)


def test_what_failed_is_measured_again():
    case = Case(TINY, "none", "top_k")
    earlier = {"bench": "top-k", "implementation": None, "provenance": {"device": "cpu"}, "rows": [{"case": case.name, "failed": "so"}]}
    assert top_k_earlier.missing([case], earlier, "cpu", None) == [case]
    assert earlier["rows"] == []


def test_globs_choose():
    cases = top_k_cases.all_cases()
    assert min(case.place.n for case in top_k_cases.matching(cases, [])) == 8192
    assert {case.place for case in top_k_cases.matching(cases, ["normal/1k/*"])} == {TINY}
    with pytest.raises(ValueError, match="no case matches 'nothing'"):
        top_k_cases.matching(cases, ["*", "nothing"])


def test_a_name_holds_fields_of_the_config():
    assert Case(TINY, "none", "top_k:start=hint,ctas=8").config == {"start": "hint", "ctas": 8}
    assert Case(TINY, "none", "top_k").config == {}
    assert [Case(TINY, "none", name).ours for name in ("top_k", "top_k:start=hint", "torch", "lax.top_k")] == [True, True, False, False]


def test_inputs_have_the_hints_that_are_asked_for():
    made = top_k_cases.make_inputs(TINY, ("none", "random", "stale-20", "stale-80"), {})
    assert len(made) == 4
    assert not np.array_equal(made[0][0], made[1][0])
    for scores, hints in made:
        assert hints.pop("none") is None
        top = [score_rows.top_indices(row, 32) for row in scores]
        shares = {name: [score_rows.overlap(*pair) for pair in zip(top, hint, strict=True)] for name, hint in hints.items()}
        assert shares["stale-20"] == pytest.approx([6 / 32] * 2)
        assert shares["stale-80"] == pytest.approx([26 / 32] * 2)
        assert max(shares["random"]) < 0.2
    (scores, hints), *_ = top_k_cases.make_inputs(YARN, ("static", "step"), {})
    for hint in hints.values():
        assert hint.shape == (1, 64)
        assert score_rows.overlap(score_rows.top_indices(scores[0], 64), hint[0]) > 0.25


def test_a_run_on_tiny_rows(tmp_path):
    cases = [Case(TINY, hint, "top_k") for hint in ("none", "stale-40")] + [Case(YARN, "static", "top_k")]
    cases += [Case(TINY, "none", name) for name in ("radix", "radix-one-cta", "lax.top_k", "approx_max_k", "torch", "torch-sorted")]
    rows = run(cases, json_out=tmp_path / "rows.json")
    said = json.loads((tmp_path / "rows.json").read_text())
    assert said["bench"] == "top-k"
    assert said["rows"] == json.loads(json.dumps(rows))
    assert said["copy"]["bytes_per_s"] > 0
    found = {row["case"]: row for row in rows}
    assert list(found) == [case.name for case in sorted(cases, key=lambda case: case.place != TINY)]
    for case in cases[:3]:
        row = found[case.name]
        assert row["exact"] is row["same_bits"] is True
        assert row["path"] == "xla"
        assert row["clock"] == "wall"
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert (row["overlap"] is None) == (case.hint == "none")
        others = () if case.place == YARN else ("lax.top_k", "approx_max_k")
        assert row["times"] == {name: found[f"normal/1k/b2/k32/none/{name}"]["median_s"] / row["median_s"] for name in others}
    assert found["normal/1k/b2/k32/stale-40/top_k"]["overlap"] == pytest.approx(13 / 32)
    assert found["normal/1k/b2/k32/stale-40/top_k"]["bytes"] == {"scores": 2 * 1024 * 4, "hint": 0, "result": 2 * 32 * 8}
    assert found["normal/1k/b2/k32/none/lax.top_k"]["exact"] is True
    for name in ("radix", "radix-one-cta", "torch", "torch-sorted"):
        assert "skipped" in found[f"normal/1k/b2/k32/none/{name}"]
    text = top_k_report.main_table(rows) + top_k_report.row_table(rows)
    assert "| 32 | 2 | 1K |" in text


@pytest.mark.parametrize("wrong", ["one index off", "one twice", "another row's"])
def test_a_wrong_answer_is_noticed(monkeypatch, wrong):
    def almost(scores, k):
        values, indices = jax.lax.top_k(scores, k)
        if wrong == "another row's":
            return values, indices[::-1]
        return values, indices.at[0, -1].set(indices[0, 0] if wrong == "one twice" else jnp.argmin(scores[0]))

    monkeypatch.setattr(programs.lax, "approx_max_k", almost)
    (row,) = run([Case(TINY, "none", "approx_max_k")])
    assert row["exact"] is False
    assert row["recall"] < 1


def test_what_breaks_leaves_the_others(monkeypatch):
    monkeypatch.setattr(programs.lax, "approx_max_k", lambda scores, k: scores.nothing)
    broken, whole = run([Case(TINY, "none", name) for name in ("approx_max_k", "lax.top_k")])
    assert "AttributeError" in broken["failed"]
    assert whole["exact"]


def test_captured_rows_are_cases(tmp_path):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 2048)).astype(np.float32)
    before = np.where(np.arange(2048) < 2047, scores + np.float32(0.1) * rng.standard_normal((2, 2048)).astype(np.float32), -np.inf)
    np.savez(tmp_path / "some-model.npz", scores=scores, before=before)
    files = {"some-model": top_k_cases.load_captured(tmp_path / "some-model.npz")}
    cases = top_k_cases.captured_cases(files)
    assert {case.place.name for case in cases} == {f"some-model.{layer}/2k/b1/k512" for layer in (0, 1)}
    rows = run([case for case in cases if case.hint == "step"], files)
    assert [row["exact"] for row in rows] == [True, True]
    assert all(row["overlap"] > 0.7 for row in rows)
    assert "some-model.1, 2K" in top_k_report.parts([{"bench": "top-k", "rows": rows}])["top-k-captured"][1]()


@pytest.mark.parametrize(
    "arrays", [{"scores": np.zeros((2, 8))}, {"scores": np.zeros((2, 6)), "before": np.zeros((2, 6))}, {"x": np.zeros(3)}]
)
def test_other_files_are_refused(tmp_path, arrays):
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(ValueError, match=r"scores|multiple of 4"):
        top_k_cases.load_captured(tmp_path / "rows.npz")


def test_an_op_is_what_runs_between_two_reads():
    def call(start):
        return [
            Kernel("iota", start, start + 5),  # needs nothing of an input: may run first, once
            Kernel("flush_kernel", start + 10, start + 50),
            Kernel("sort_1", start + 50, start + 60),
            Kernel("sort_2", start + 62, start + 70),
            Kernel("flush_kernel.1", start + 70, start + 110),
            Kernel("sort_3", start + 110, start + 124),
        ]

    figures = top_k_bench._figures([call(0), call(10**7)], 2)
    assert figures["ops"] == 4
    assert figures["median_s"] == pytest.approx(17e-9)
    assert figures["p90_s"] == pytest.approx(20e-9)
    assert [kernel["name"] for kernel in figures["kernels"]] == ["sort"]
    assert "1 reads between 2 ops" in top_k_bench._figures([call(0)[:4]], 2)["failed"]
    assert "no kernel" in top_k_bench._figures([call(0)[:5]], 2)["failed"]


def test_calls_of_all_cases_are_cut_apart_by_their_pauses(monkeypatch):
    """Cases may run different numbers of kernels."""
    pause = 3e6
    runs = {Case(TINY, "none", name): (lambda *_: jnp.zeros(1), ("own",) * 2) for name in ("lax.top_k", "radix")}
    kernels, now = [], 0.0
    for case in runs:
        for _ in range(top_k_bench.CALLS):
            for _ in range(2):
                kernels.append(Kernel("flush_kernel", now, now + 40_000))
                now += 40_000
                for name, length in {"lax.top_k": [("sort", 900), ("slice", 100)], "radix": [("radix", 500)]}[case.implementation]:
                    kernels.append(Kernel(name, now, now + length))
                    now += length
            now += pause
    monkeypatch.setattr(top_k_bench, "on_gpu", lambda: True)
    monkeypatch.setattr(top_k_bench.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(top_k_bench.timing, "record", lambda run: run() or kernels)
    found = top_k_bench._timings(runs, jnp.zeros(4, jnp.int32))
    assert [each["median_s"] for each in found.values()] == pytest.approx([1e-6, 0.5e-6])
    assert [each["ops"] for each in found.values()] == [2 * top_k_bench.CALLS] * 2
    for lost, failed in ((3, [False, True]), (300, [True, True])):
        monkeypatch.setattr(top_k_bench.timing, "record", lambda run, lost=lost: kernels[: max(len(kernels) - lost, 1)])
        assert ["failed" in each for each in top_k_bench._timings(runs, jnp.zeros(4, jnp.int32)).values()] == failed


def test_what_torch_answers_is_checked(monkeypatch):
    def ask(requests):
        for request in requests:
            rows = np.load(request["rows"])
            assert rows.shape == (4, 2, 1024)
            indices = np.argsort(-rows, axis=-1, kind="stable")[..., : request["k"]]
            np.save(request["answers"], indices if request["sorted"] else indices[::-1])  # those of another input
        ops = [[("gather", 100.0, 400.0), ("sort", 450.0, 600.0 + i)] for i in range(3)]
        return {request["name"]: {"ops": ops, "torch": "9.9"} for request in requests}

    monkeypatch.setattr(torch_top_k, "ask", ask)
    wrong, right = run([Case(TINY, "none", name) for name in ("torch", "torch-sorted")])
    assert (wrong["exact"], right["exact"]) == (False, True)
    assert right["median_s"] == pytest.approx(501e-9)
    assert right["path"] == "torch 9.9"


def test_torchs_ops_stand_behind_the_read_before_them():
    call = [Kernel(name, 10.0 * i, 10.0 * i + 5) for i, name in enumerate(("reduce", "gather", "reduce", "sort") * 2)]
    (first, _) = torch_top_k._ops([call], 2, 1)["ops"]
    assert [name for name, *_ in first] == ["gather", "reduce", "sort"]
    assert "told apart" in torch_top_k._ops([call[:-1]], 2, 1)["skipped"]


def test_columns_behind_the_counts_are_the_cycles_of_phases():
    counts = np.array([[2, 100, 3, 1000, 4000, 2000, 500], [2, 100, 3, 3000, 4000, 4000, 500]])
    assert top_k_bench.phases_of(counts[:, :3]) == {}
    phases = top_k_bench.phases_of(counts)["phases"]
    assert phases == pytest.approx({"guess": 2000, "verify": 4000, "collect": 3000, "refine": 500})
    row = {"case": "a", "median_s": 1e-5, "phases": phases}
    assert "| a | 10.0 | 2,000 (21%) | 4,000 (42%) | 3,000 (32%) | 500 (5%) |" in top_k_report.phase_table([row])


def test_programs_for_a_gpu_lower(cuda, tmp_path):
    """The read between two ops and the radix selection in one program."""
    words = jax.ShapeDtypeStruct((2**20,), jnp.int32)
    own = ((jax.ShapeDtypeStruct((1, 8192), jnp.float32), None),) * 2
    program = programs.program_of(lambda scores, hint: programs.radix_select.radix_top_k(scores, 32), flushed=True)
    text = program.trace(words, own).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("optimization_barrier") == 5
    cases = {"flush": (programs.flush, {"words": ((2**20,), "int32")}, {})}
    (kernel,) = cuda.compile("H200", cases, tmp_path)["flush"]
    assert kernel["spill_stores"] == 0


def test_on_the_command_line(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(top_k_bench.bench)
    listed = CliRunner().invoke(app, ["*/b64/k2048/none/radix", "--list"])
    assert listed.output.split() == [f"normal/{n}k/b64/k2048/none/radix" for n in (8, 32, 64, 128, 256, 512, 1024)]
    assert "no case matches" in CliRunner().invoke(app, ["nothing"]).output
    done = CliRunner().invoke(app, ["normal/1k/b2/k32/none/top_k", "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 0
    assert "| 32 | 2 | 1K |" in done.output
    more = ["normal/1k/b2/k32/none/top_k", "--only-missing"]
    (tmp_path / "other.json").write_text("so")
    for name, wrong in (("rows.json", "lacks none"), ("other.json", "is no JSON")):
        said = CliRunner().invoke(app, [*more, str(tmp_path / name)]).output
        assert wrong in " ".join(said.replace("│", "").split())


def test_without_torch_every_request_is_skipped(monkeypatch):
    monkeypatch.setattr(torch_top_k.torch_sdpa, "installed", lambda: False)
    assert torch_top_k.ask([{"name": "a"}]) == {"a": {"skipped": "PyTorch is not installed"}}


@pytest.mark.gpu
def test_on_hopper(hopper):
    """Cold reads between the ops are there and are not counted."""
    place = Place("normal", 131072, 1, 2048)
    rows = run(
        [Case(place, *pair) for pair in (("none", "top_k"), ("stale-40", "top_k"), *(("none", name) for name in top_k_cases.BASELINES))]
    )
    for row in rows:
        assert "failed" not in row, row
        if "skipped" not in row:
            assert row["exact"], row
            assert row["clock"] == "trace"
            assert row["ops"] == top_k_bench.CALLS * 4
            assert not any(kernel["name"].startswith("flush") for kernel in row["kernels"])
            assert 1e-6 < row["median_s"] < 1e-3


# Tables


def made_row(n, batch, hint, implementation, micro, *, k=2048, rows="normal", exact=True):
    place = Place(rows, n, batch, k)
    return Case(place, hint, implementation).fields() | {"median_s": micro * 1e-6, "exact": exact}


def made_rows(**changes):
    """A run in which everything that was asked for holds, but for what is changed."""
    micro = {"hint": 12.0, "none": 17.0, "lax": 50.0, "small": 11.0, "exact": True, "large": 21.0, "radix": 30.0, "alone": 60.0} | changes
    rows = [
        made_row(131072, 1, "none", "top_k", micro["none"]),
        made_row(131072, 1, "stale-40", "top_k", micro["hint"], exact=micro["exact"]),
        made_row(131072, 1, "none", "radix", micro["radix"]),
        made_row(131072, 1, "none", "radix-one-cta", micro["alone"]),
        made_row(131072, 1, "none", "lax.top_k", micro["lax"]),
        made_row(131072, 1, "none", "torch", 70.0),
        made_row(131072, 1, "none", "torch-sorted", 60.0),
        made_row(8192, 1, "none", "top_k", micro["small"]),
        made_row(1048576, 1, "stale-40", "top_k", micro["large"]),
        made_row(131072, 8, "stale-40", "top_k", 15.0),
        made_row(131072, 64, "none", "top_k", 20.0) | {"p90_s": 22.5e-6},
    ]
    return rows


def test_targets_that_hold():
    assert len(top_k_report.targets(made_rows())) == 11
    assert all(ok for *_, ok in top_k_report.targets(made_rows()))
    assert "**no**" not in top_k_report.target_table(made_rows())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hint": 12.6}, "128K scores, 1 row, hint"),
        ({"none": 18.1}, "128K scores, 1 row, no hint"),
        ({"lax": 41.0}, "against; least at lax"),
        ({"lax": 16.0}, "against lax.top_k, in every cell"),
        ({"small": 12.1}, "8K scores"),
        ({"large": 22.5}, "1M scores"),
        ({"radix": 22.0}, "over as many CTAs as ours"),
        ({"alone": 22.0}, "of one CTA a row"),
        ({"exact": False}, "stable sort"),
    ],
)
def test_targets_that_do_not_hold(change, what):
    failing = [name for name, *_, ok in top_k_report.targets(made_rows(**change)) if not ok]
    assert any(what in name for name in failing), failing
    if "radix" in change or "alone" in change:
        assert len(failing) == 1, "one of the two radix selections says nothing of the other"


def test_the_main_table_compares_with_the_faster_torch():
    text = top_k_report.main_table(made_rows())
    assert "| radix, 1 CTA a row | radix, as many CTAs | lax.top_k | torch | x radix, 1 CTA a row |" in text
    assert "| 2,048 | 1 | 128K | 17.0 | 12.0 | 60.0 | 30.0 | 50.0 | 60.0 | 5.00 | 2.50 | 4.17 | 5.00 |" in text
    assert "| 2,048 | 1 | 8K | 11.0 | - | - | - | - | - | - | - | - | - |" in text
    assert "| 2,048 | 64 | 128K | 20.0 (22.5) | - |" in text


def test_hints_stand_beside_each_other():
    rows = [made_row(131072, 1, "stale-80", "top_k", 9.0) | {"counts": {"passes": {"mean": 1.25, "most": 2}}}, *made_rows()]
    rows += [made_row(131072, 1, "stale-40", "top_k:start=hint", 10.0)]
    text = top_k_report.hint_table(rows, lambda kind: kind == "normal")
    assert "| normal, 128K | 1 | 2,048 | default | 17.0 | 12.0 | 9.0 (1.2) | 60.0 | 30.0 |" in text
    assert "| normal, 128K | 1 | 2,048 | start=hint | - | 10.0 | - | 60.0 | 30.0 |" in text
    assert {row["n"] for row in top_k_report.compared(rows)} == {131072}, "the other places tell nothing of hints"


def test_pictures_are_drawn(tmp_path):
    more = [made_row(131072, 1, hint, "top_k:start=hint", 15.0) for hint in ("random", "stale-20", "stale-80")]
    for rows in (made_rows(), [*made_rows(), *more]):
        top_k_report.plot(rows, tmp_path / "top-k.png")
        assert (tmp_path / "top-k.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no normal row"):
        top_k_report.plot([], tmp_path / "none.png")
