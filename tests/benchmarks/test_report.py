"""Tables and plots are made from the rows, and documents from the tables."""

from __future__ import annotations

import json

import pytest

from benchmarks import overview, report

PROVENANCE = {"device": "some GPU", "versions": {"jax": "0.11.2"}, "date": "2026-01-02T03:04:05+00:00", "command": "python -m it"}


def op_row(op, policy, micros, *, tokens=8192, batch=1, shape="qwen2.5-7b", **more):
    row = {"case": f"{op}/{shape}/{policy}", "op": op, "shape": shape, "tokens": tokens, "batch": batch, "policy": policy}
    if micros is None:
        return row | {"skipped": "needs 9 GiB"} | more
    row |= {"path": {"gather_attention": "xla", "select_blocks": "xla"}, "clock": "trace", "blocks_read": 13.0, "keys_read": 1664.0}
    row |= {
        "median_s": micros * 1e-6,
        "p10_s": micros * 0.9e-6,
        "p90_s": micros * 1.2e-6,
        "idle_s": 1e-6,
        "bytes": {"kv": 4_000_000, "index": 500_000},
    }
    row |= {"bytes_per_s": 4.5e12 / micros, "fraction_of_copy": 1 / micros, "error": 1.23e-3, "same_bits": True}
    row |= {"kernels": [{"name": "gather", "median_s": 2e-6, "runs_per_op": 2, "total_s": 5e-6}]}
    return row | more


def step_row(policy, milli, **more):
    row = {"op": "decode", "shape": "qwen2.5-7b", "tokens": 131_072, "batch": 1, "policy": policy}
    if milli is None:
        return row | {"skipped": "too large"}
    row |= {
        "path": {"gather_attention": "xla"},
        "median_s": milli * 1e-3,
        "p10_s": 3e-3,
        "p90_s": 9e-3,
        "blocks_read": 13.0,
        "keys_read": 1664.0,
    }
    row |= {
        "reads_everything": False,
        "bytes": {"weights": 14_000_000_000, "kv": 90_000_000},
        "bytes_per_s": 3.5e12,
        "fraction_of_copy": 0.81,
    }
    return row | {"temp_bytes": 2_500_000, "profile": None} | more


OPS = {
    "bench": "ops",
    "provenance": PROVENANCE,
    "rows": [
        op_row("baseline", "cudnn", 10),
        op_row("baseline", "torch-flash", 9),
        op_row("dense", "dense", 11, speedup={"over": "x", "times": 0.82}),
        op_row("sparse", "top:8", 7.5, speedup={"over": "x", "times": 1.2}),
        op_row("dense", "dense", 900, tokens=2**20),
        op_row("sparse", "top:8", None, tokens=2**20),
        op_row("gather", "top:8", 3),
    ],
}
STEPS = {"bench": "decode", "provenance": PROVENANCE, "rows": [step_row("dense", 5.7), step_row("top:8", None)]}


def test_the_table_of_the_reach():
    assert report.decode_table(OPS["rows"], "qwen2.5-7b").splitlines() == [
        "| batch | tokens | best dense of others | dense, paged | `top:8` |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 1 | 8K | 9.0 (torch-flash) | 11.0 (0.82x) | 7.5 (1.20x) |",
        "| 1 | 1M | - | 900.0 | - |",
    ]


def test_every_column_of_a_row():
    cells = dict(zip(report.COLUMNS, report.cells(OPS["rows"][3]), strict=True))
    assert cells == {
        "case": "sparse/qwen2.5-7b/top:8",
        "path": "xla",
        "blocks": "13",
        "keys": "1,664",
        "us": "7.50",
        "p10 to p90": "6.75 to 9.00",
        "idle us": "1.00",
        "MB": "4.50",
        "TB/s": "0.600",
        "of copy": "0.13",
        "error": "1.2e-03",
        "same bits": "yes",
        "x best dense": "1.20",
    }
    assert report.cells(op_row("dense", "dense", 5, clock="wall", idle_s=None, same_bits=False))[1] == "xla (wall)"
    assert "NO" in report.cells(op_row("dense", "dense", 5, same_bits=False))
    assert report.cells(OPS["rows"][5])[1] == "needs 9 GiB"
    assert report.cells(op_row("dense", "dense", None) | {"skipped": None, "failed": "broke"})[1] == "FAILED broke"


def test_whole_steps():
    dense, skipped = (dict(zip(report.STEP_COLUMNS, report.step_cells(row), strict=True)) for row in STEPS["rows"])
    assert (dense["tokens"], dense["ms"], dense["GB"], dense["TB/s"], dense["temp MB"]) == ("128K", "5.70", "14.09", "3.50", "2.5")
    assert (dense["blocks"], dense["device ms"]) == ("13.0", "")
    assert (skipped["policy"], skipped["path"], skipped["ms"]) == ("top:8", "too large", "")
    assert report.step_cells(step_row("dense", None) | {"skipped": None, "failed": "broke"})[4] == "FAILED broke"
    profile = {"period_s": 5.5e-3, "idle_s": 0.3e-3, "in_graphs": 1.0, "kernels": []}
    found = dict(zip(report.STEP_COLUMNS, report.step_cells(step_row("dense", 5.7, profile=profile, reads_everything=True)), strict=True))
    assert (found["device ms"], found["idle ms"], found["in graphs"], found["blocks"]) == ("5.50", "0.30", "100%", "13.0 (all)")


def test_whole_steps_in_short():
    rows = [step_row("dense", 6.0), step_row("top:8", 4.0), step_row("top:32", None), step_row("top:8", 3.0, tokens=8192)]
    assert report.step_short(rows).splitlines()[2:] == [
        "| qwen2.5-7b | 1 | 8K | - | 3.00 |",
        "| qwen2.5-7b | 1 | 128K | 6.00 | 4.00 (1.50x) |",
    ]


def test_where_the_time_goes():
    profile = {"kernels": [{"name": "gemm", "median_s": 10e-6, "runs_per_op": 7, "total_s": 80e-6}]}
    lines = report.kernel_table([OPS["rows"][3], step_row("dense", 5, profile=profile), op_row("sparse", "x", None)]).splitlines()[2:]
    assert lines == [
        "| sparse/qwen2.5-7b/top:8 | `gather` | 2 | 2.00 | 5.00 |",
        "| qwen2.5-7b/128K/b1/dense | `gemm` | 7 | 10.00 | 80.00 |",
    ]


def test_documents_are_rendered_between_marks():
    text = "a\n<!-- bench:decode-op -->\nold\nolder\n<!-- /bench -->\nb\n<!-- bench:decode-step -->\n<!-- /bench -->\n"
    made = report.rendered(text, [OPS])
    assert made.startswith("a\n<!-- bench:decode-op -->\n| batch |")
    assert "old" not in made
    assert "| some GPU | 0.11.2 | 2026-01-02 | `python -m it` |" in made
    assert made.endswith("<!-- /bench -->\nb\n<!-- bench:decode-step -->\n*Not measured yet.*\n<!-- /bench -->\n")
    assert report.rendered(made, [OPS]) == made
    assert "5.70" in report.rendered(made, [OPS, STEPS])
    with pytest.raises(ValueError, match="no part is called 'decode-po'"):
        report.rendered(text.replace("decode-op", "decode-po"), [OPS])
    with pytest.raises(ValueError, match="is not followed by"):
        report.rendered(text + "<!-- bench:op-rows -->", [OPS])


def test_a_run_that_went_on_names_the_ones_before():
    before = PROVENANCE | {"command": "python -m it --first"}
    both = report.sources([{"provenance": PROVENANCE, "continues": [{"provenance": before}]}, {"provenance": PROVENANCE}])
    assert both.splitlines()[2:] == [
        "| some GPU | 0.11.2 | 2026-01-02 | `python -m it --first` |",
        "| some GPU | 0.11.2 | 2026-01-02 | `python -m it` |",
    ]


def test_a_page_names_each_command_once():
    marks = "<!-- bench:decode-op -->\n<!-- /bench -->\n<!-- bench:op-rows -->\n<!-- /bench -->\n"
    made = report.rendered(marks, [OPS])
    assert made.count("`python -m it`") == 1
    assert made.index("`python -m it`") < made.index("<!-- bench:op-rows -->")
    assert report.rendered(made, [OPS]) == made


def test_a_bar_in_a_command_ends_no_cell():
    assert "`python -m it 'a\\|b'`" in report.sources([{"provenance": PROVENANCE | {"command": "python -m it 'a|b'"}}])


def test_a_later_run_replaces_what_it_measured_again(tmp_path):
    later = OPS | {"provenance": PROVENANCE | {"date": "2026-02-01T00:00:00+00:00"}, "rows": [op_row("dense", "dense", 5)]}
    for name, run in (("a", later), ("b", OPS)):
        (tmp_path / name).write_text(json.dumps(run))
    rows = report.merged(report.load([tmp_path / "a", tmp_path / "b"]))
    assert len(rows) == len(OPS["rows"])
    assert next(row for row in rows if row["op"] == "dense" and row["tokens"] == 8192)["median_s"] == pytest.approx(5e-6)


def test_rows_of_other_formats_and_meshes_are_other_cases():
    (row, *_) = STEPS["rows"]
    kinds = ({}, {"weights": "int8"}, {"cache_format": "int8"}, {"tensor": 2, "context": 1}, {"tensor": 1, "context": 1})
    rows = report.merged([STEPS | {"rows": [row | kind for kind in kinds]}])
    assert [report.line_name(each) for each in rows] == [
        row["policy"] + more for more in ("", ", weights int8", ", pages int8", ", tensor 2 context 1")
    ], "the last one is the first one, measured again"


def test_pictures_are_drawn_of_rows_that_have_times(tmp_path):
    report.plot(OPS["rows"], tmp_path / "ops.png", scale=1e6, unit="us")
    overview.plot(OPS["rows"], STEPS["rows"], tmp_path / "step-time.png")
    timed = step_row("dense", 5.7, timeline=[["project", 0, 1000], ["span", 1000, 2000]])
    report.plot_timeline([timed], tmp_path / "timeline.png")
    for name in ("ops.png", "step-time.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no step of 131,072 tokens and batch 1 has a timeline"):
        report.plot_timeline([], tmp_path / "none.png")
    with pytest.raises(ValueError, match="no row has a time"):
        report.plot([op_row("dense", "dense", None)], tmp_path / "x.png", scale=1, unit="s")
    with pytest.raises(ValueError, match=r"no row of qwen2\.5-7b at batch 1 or 8 has a time"):
        overview.plot([op_row("dense", "dense", None)], [], tmp_path / "x.png")
