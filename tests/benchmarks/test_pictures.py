"""Every committed picture can be read at page width: its text is large enough, its axes have ticks, a policy has one
colour everywhere."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import evidence as documents
from benchmarks import recall_pictures, report
from benchmarks.top_k import report as top_k_report
from kvjax.cost_model import known_cost_model
from kvjax.cost_model.regimes import regime_map, save
from kvjax.evaluation import plots
from kvjax.models.loading import read_config
from kvjax.serving.bench.decode import SHAPES
from pallas_kernels.core import pictures
from train_needle import curve
from train_needle.recipe import PRESETS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were written, in order."""
    figures = []

    def kept(figure, file, **_):
        figure.draw_without_rendering()
        figures.append(figure)
        Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def check(figure):
    """Page width, text of at least 8 points, three ticks on every logarithmic axis, and the colours of the table."""
    assert figure.get_figwidth() == pictures.PAGE_INCHES
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    small = {text.get_text(): text.get_fontsize() for text in texts if text.get_visible() and text.get_fontsize() < pictures.MIN_POINTS}
    assert small == {}
    for axes in figure.axes:
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if getattr(axes, f"get_{name}scale")() == "log" and axes.axison:
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
                assert len(ticks) >= 3, (axes.get_title(), name, ticks)
                assert len(set(axis.get_major_formatter().format_ticks(ticks))) == len(ticks)
        for line in axes.lines:
            if line.get_label() in pictures.COLORS:
                assert to_hex(line.get_color()) == pictures.COLORS[line.get_label()]


def legends(figure):
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def rows_of(*patterns):
    return report.merged(report.load(file for pattern in patterns for file in (RESULTS / "h200").glob(pattern)))


@pytest.mark.parametrize(("pattern", "unit"), [("ops*.json", "us"), ("decode*.json", "ms")])
def test_times_stand_in_two_rows(drawn, tmp_path, pattern, unit):
    report.plot(rows_of(pattern), tmp_path / "time.png", scale=1e6, unit=unit)
    (figure,) = drawn
    check(figure)
    assert len({round(axes.get_position().y0, 2) for axes in figure.axes}) == 2
    assert {"dense", "top:8", "top:32"} <= legends(figure)


def test_bars_of_a_timeline_carry_names(drawn, tmp_path):
    report.plot_timeline(rows_of("decode*.json"), tmp_path / "timeline.png")
    (figure,) = drawn
    check(figure)
    rows = figure.axes[0].get_yticks()
    said = [text.get_text() for text in figure.axes[0].texts]
    assert {"project", "span", "selected", "refined"} == set(said)
    assert len(said) > 5 * len(rows)
    assert legends(figure) >= {"project", "span", "selected", "append", "merge"}


def test_a_timeline_of_a_mesh_shows_exchanges(drawn, tmp_path):
    report.plot_timeline(rows_of("mesh-steps-4.json"), tmp_path / "timeline.png")
    (figure,) = drawn
    check(figure)
    assert legends(figure) >= {"project", "exchange", "selected"}
    with pytest.raises(ValueError, match="no step of 131,072 tokens and batch 1 has a timeline"):
        report.plot_timeline(rows_of("mesh-steps-context.json"), tmp_path / "none.png")


def test_a_panel_has_a_colour_per_policy(drawn, tmp_path):
    panel = documents.load(list((RESULTS / "h200").glob("fidelity-*.json")))[0]
    plots.draw(panel, tmp_path)
    names = [entry["policy"] for entry in panel["policies"]]
    assert len({pictures.color_of(name) for name in names}) == len(names)
    for figure in drawn:
        check(figure)
    recall, kl, disagreements = drawn
    assert legends(recall) == set(names)
    assert legends(kl) == {*names, "dense again (noise floor)"} - {"dense"}
    assert legends(disagreements) == {*names, "dense again"} - {"dense"}
    for axes in recall.axes:
        colors = {bars.get_label(): to_hex(bars.lines[0].get_color()) for bars in axes.containers}
        assert colors == {name: pictures.COLORS[name] for name in names if name != "dense"}


def test_a_regime_map_has_no_hatching_and_a_scale_of_its_data(drawn, tmp_path):
    config = SHAPES["qwen2.5-7b"]
    lengths, batches = [int(n) for n in np.geomspace(512, 2**20, 17)], [1, 2, 4, 8, 16, 32, 64]
    cost = known_cost_model("NVIDIA H200", config, "bfloat16")
    maps = [regime_map(cost, config, name, lengths, batches, memory_bytes=131 * 2**30) for name in ("top:8", "top:32")]
    save(maps, tmp_path / "map.png")
    (figure,) = drawn
    check(figure)
    assert not any(getattr(each, "get_hatch", lambda: None)() or getattr(each, "hatches", [None])[0] for each in figure.findobj())
    bars = [axes for axes in figure.axes if axes.get_xlabel() == "speed-up over dense"]
    for bar, found in zip(bars, maps, strict=True):
        shown = found.speedup[found.fits]
        assert bar.get_xlim() == pytest.approx((shown.min(), shown.max()))


def test_a_regime_map_is_titled_by_the_model_it_is_of(drawn, tmp_path):
    cost = known_cost_model("NVIDIA H200", SHAPES["qwen2.5-7b"], "bfloat16")
    other = regime_map(cost, SHAPES["llama-3.1-8b"], "top:8", [8192, 16_384], [1, 2], model="my-model")
    assert other.figures()["model"] == "my-model"
    save([other], tmp_path / "map.png")
    assert drawn[0].axes[0].get_title().endswith("NVIDIA H200, my-model")


@pytest.mark.long
def test_no_line_of_a_regime_map_is_cut_by_its_label(drawn, tmp_path):
    cost = known_cost_model("NVIDIA H200", SHAPES["qwen2.5-7b"], "bfloat16")
    lengths = [int(n) for n in np.geomspace(4096, 2**20, 65)]
    found = regime_map(cost, read_config("needle"), "top:8", lengths, list(range(1, 65)), model="needle")
    save([found], tmp_path / "map.png")
    (lines,) = (each for each in drawn[0].axes[0].collections if isinstance(each, ContourSet))
    assert 1 in lines.levels
    assert [(path.codes == path.MOVETO).sum() for path in lines.get_paths()] == [1] * len(lines.levels), "each is one line, not cut in two"


def test_lines_of_the_training_curve_are_named(drawn, tmp_path):
    curve.plot(curve.read_records(ROOT / "tools/train_needle/training_curve.jsonl"), PRESETS["needle"], tmp_path / "curve.png")
    (figure,) = drawn
    check(figure)
    assert legends(figure) == {"training loss (weighted)", "held-out text", "needles found (right axis)"}
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["256", "512", "2K", "8K", "16K", "32K"]


def test_pictures_of_top_k(drawn, tmp_path):
    top_k_report.plot(top_k_report.merged(report.load((RESULTS / "h200").glob("top-k.json"))), tmp_path / "top-k.png")
    rows = json.loads((RESULTS / "cpu" / "top-k-overlap.json").read_text())["rows"]
    top_k_report.plot_overlap(rows, tmp_path / "overlap.png")
    times, overlap = drawn
    check(times)
    assert legends(times) == {"no hint", "hint 40%", *top_k_report.OTHERS.values()}
    assert legends(overlap) == {"raw", "shifted", "chance", *(f"layer {layer}" for layer in range(6))}
    assert overlap.get_figwidth() == pictures.PAGE_INCHES


def test_a_picture_of_echoes(drawn, tmp_path):
    rows = [
        {"length": length, "policy": name, "share": {"value": 0.9, "low": 0.8, "high": 0.95}, "kl_text": {"value": kl}}
        for length in (8192, 16_384)
        for name, kl in (("dense", 0.0), ("momo:64/8", 0.003), ("window:64+1024", 0.2))
    ]
    recall_pictures.plot([{"rows": rows}], tmp_path / "recall.png")
    (figure,) = drawn
    check(figure)
    assert legends(figure) == {"8K tokens", "16K tokens"}


def test_a_picture_of_echoes_against_time(drawn, tmp_path):
    """A panel where something was timed at prompt recall's own length; who was timed nowhere is named, who was measured
    nowhere is not."""
    shares = {"dense": 1.0, "bounds:32": 0.9, "momo:64/8": 0.4, "oracle:32": 0.95, "dense again": 1.0}
    rows = [
        {"length": length, "policy": name, "share": {"value": value, "low": value - 0.05, "high": min(1.0, value + 0.05)}}
        for length in (8192, 16_384, 32_768)
        for name, value in shares.items()
    ]
    timed = {"op": "layers", "shape": "needle", "tokens": 16_384, "layers": 4}
    times = {"dense": 0.012, "bounds:32": 0.008, "momo:128/8": 0.02}
    ops = [timed | {"policy": name, "median_s": seconds} for name, seconds in times.items()]
    ops += [
        timed | {"policy": "momo:64/8", "tokens": 32_768, "median_s": 0.032},
        timed | {"policy": "momo:64/8", "failed": "out of memory"},
    ]
    assert recall_pictures.layer_times(ops, 16_384) == {"dense": 0.003, "bounds:32": 0.002, "momo:128/8": 0.005}
    recall_pictures.plot_against_time([{"rows": rows}], ops, tmp_path / "time.png")
    (figure,) = drawn
    check(figure)
    assert legends(figure) == {"dense", "bounds:32", "momo:64/8", "oracle:32: not timed"}
    assert [axes.get_title() for axes in figure.axes] == ["16K tokens", "32K tokens"]
    for axes, expected in zip(figure.axes, ({"dense": (3, 1.0), "bounds:32": (2, 0.9)}, {"momo:64/8": (8, 0.4)}), strict=True):
        found = {bars.get_label(): bars.lines[0] for bars in axes.containers if len(bars.lines[0].get_xdata())}
        assert {name: tuple(line.get_xydata()[0]) for name, line in found.items()} == expected
        assert {name: to_hex(line.get_color()) for name, line in found.items()} == {name: pictures.color_of(name) for name in expected}
    with pytest.raises(ValueError, match="no sparse policy has both a time and facts"):
        recall_pictures.plot_against_time([{"rows": rows}], ops[:1], tmp_path / "time.png")


def test_a_name_without_an_entry_has_one_colour_too():
    assert pictures.color_of("mine") == pictures.color_of("mine") in pictures.OTHER_COLORS
    assert pictures.color_of("top:8") == pictures.COLORS["top:8"]
    assert pictures.color_of("bounds:32+sparse") == pictures.COLORS["bounds:32"]
    named = {name: color for name, color in pictures.COLORS.items() if not name.startswith("window")}
    assert len(set(named.values())) == len(named)


@pytest.mark.parametrize("values", [(3.8, 4.2), (8, 17), (0.9, 1100), (1e-4, 0.3), (14, 120)])
def test_logarithmic_axes_have_three_ticks_in_plain_numbers(values):
    axes = Figure().subplots()
    axes.plot(values, values)
    for axis in (axes.xaxis, axes.yaxis):
        pictures.log_ticks(axis)
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        assert len(ticks) >= 3
        names = axis.get_major_formatter().format_ticks(ticks)
        assert [float(name.replace(",", "")) for name in names] == pytest.approx(ticks)


def test_a_picture_of_before_is_refused():
    figure = Figure(figsize=(23, 4))
    axes = figure.subplots()
    axes.plot([1, 2], [40, 50], label="top:8", color="red")
    with pytest.raises(AssertionError):
        check(figure)
    figure.set_figwidth(pictures.PAGE_INCHES)
    with pytest.raises(AssertionError):
        check(figure)
    axes.lines[0].set_color(pictures.color_of("top:8"))
    check(figure)
    axes.set_yscale("log")
    with pytest.raises(AssertionError):
        check(figure)
    axes.set_yscale("linear")
    axes.set_xlabel("small", fontsize=6)
    with pytest.raises(AssertionError):
        check(figure)


def test_every_committed_picture_was_drawn_so():
    files = [*(ROOT / "docs").rglob("*.png"), ROOT / "models/needle/curve.png"]
    assert len(files) >= 10
    for file in files:
        width, _ = struct.unpack(">II", file.read_bytes()[16:24])
        assert width == pictures.PAGE_INCHES * pictures.DPI, file
    sources = [file for folder in ("kvjax", "models", "serving", "pallas_kernels") for file in (ROOT / folder).rglob("*.py")]
    assert [file.name for file in sources if "savefig" in file.read_text()] == ["pictures.py"]
