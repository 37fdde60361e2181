"""Tables and plots from the JSON of runs, and the marked parts of documents that are made from them.

`rendered` replaces the text between `<!-- bench:NAME -->` and `<!-- /bench -->` for every NAME that `parts` returns. A
page names each command once, below the first table that it made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import block_mass, exchange, prefill_targets, recall_tables, tables
from benchmarks import prefill_tables as prefill_report
from benchmarks.top_k import report as top_k_report
from kvjax.serving.bench.tables import DRAFT_COLUMNS, STEP_COLUMNS, draft_cells, line_name, split_table, step_cells, time_table
from pallas_kernels.bench.report import COLUMNS, cells, micro_text, speedup_text
from pallas_kernels.core import pictures
from pallas_kernels.core.results import devices_of, launch_text, packed_text
from pallas_kernels.core.tables import markdown, span, tokens_text

Row = dict[str, Any]

MARK = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
SOURCES = "| made on | jax | date | command |\n| --- | --- | --- | --- |\n"
"""What a table of sources begins with."""


def sources(runs: Iterable[dict[str, Any]]) -> str:
    """A table of where figures come from: a line for each run, and for each earlier run that it continued."""
    lines = {}
    for run in runs:
        for made in (*(before["provenance"] for before in run.get("continues", ())), run["provenance"]):
            command = made["command"].replace("|", "\\|")
            lines[f"| {made['device']} | {made['versions']['jax']} | {made['date'][:10]} | `{command}` |\n"] = None
    return f"{SOURCES}{''.join(lines)}".rstrip("\n")


def decode_table(rows: Sequence[Row], shape: str) -> str:
    """Microseconds of the whole op by batch and length: the best dense kernel of others, ours, and each policy with its
    speed-up."""
    kept = [row for row in rows if row["shape"] == shape and row["op"] in ("dense", "sparse", "baseline")]
    policies = list(dict.fromkeys(row["policy"] for row in kept if row["op"] == "sparse"))
    lines = []
    for batch, tokens in sorted({(row["batch"], row["tokens"]) for row in kept}):
        here = [row for row in kept if (row["batch"], row["tokens"]) == (batch, tokens)]
        best = min((row for row in here if row["op"] == "baseline" and "median_s" in row), key=lambda row: row["median_s"], default=None)
        ours = [next((row for row in here if row["op"] != "baseline" and row["policy"] == name), {}) for name in ("dense", *policies)]
        first = "-" if best is None else f"{micro_text(best)} ({best['policy']})"
        lines.append((str(batch), tokens_text(tokens), first, *(micro_text(row) + speedup_text(row) for row in ours)))
    columns = ("batch", "tokens", "best dense of others", "dense, paged", *(f"`{name}`" for name in policies))
    return markdown(columns, lines)


def row_table(rows: Sequence[Row]) -> str:
    """Every row with all its columns."""
    return markdown(COLUMNS, map(cells, rows))


def packed_matrix_table(rows: Sequence[Row]) -> str:
    """Products with packed weights beside those with 16 bits."""
    columns = "case", "MB", "us", "p10 to p90", "TB/s", "of the rate of reads", "error"
    rows = [row for row in rows if row["op"] == "project" and "fraction_of_read" in row]
    return markdown(columns, ((*_packed_cells(row), f"{row['fraction_of_read']:.2f}", f"{row['error']:.1e}") for row in rows))


def product_table(rows: Sequence[Row]) -> str:
    """Products with 16-bit weights, by how many tokens, beside XLA's."""
    columns = "shape", "projection", "tokens", "us", "p10 to p90", "of copy", "times XLA's speed", "error"
    rows = [row for row in rows if row["op"] == "project" and ":" not in row["policy"] and "speedup" in row]
    lines = []
    for row in sorted(rows, key=lambda row: (row["shape"], row["policy"], row["batch"])):
        low, middle, high = (f"{row[key] * 1e6:.1f}" for key in ("p10_s", "median_s", "p90_s"))
        times = f"{row['speedup']['times']:.2f}"
        cells = row["shape"], row["policy"], row["batch"], middle, f"{low} to {high}", f"{row['fraction_of_copy']:.2f}", times
        lines.append((*map(str, cells), f"{row['error']:.1e}"))
    return markdown(columns, lines)


def packed_attention_table(rows: Sequence[Row]) -> str:
    """Attention over packed pages beside that over 16 bits."""
    columns = "case", "MB", "us", "p10 to p90", "TB/s", "of copy", "error", "of 16 bits"
    rows = [row for row in rows if row["op"] not in ("project", "chunk") and "median_s" in row]
    times = [f"{row['unpacked']['times']:.2f}" if "unpacked" in row else "" for row in rows]
    cells = ((f"{row['fraction_of_copy']:.2f}", f"{row['error']:.1e}", of) for row, of in zip(rows, times, strict=True))
    return markdown(columns, ((*_packed_cells(row), *rest) for row, rest in zip(rows, cells, strict=True)))


def packed_prefill_table(rows: Sequence[Row]) -> str:
    """Chunks of prefill over packed pages beside those over 16 bits."""
    columns = "case", "path", "ms", "p10 to p90", "error", "of 16 bits"
    lines = []
    for row in rows:
        if row["op"] == "chunk" and "median_s" in row:
            low, middle, high = (row[key] * 1e3 for key in ("p10_s", "median_s", "p90_s"))
            path, times = ", ".join(sorted(set(row["path"].values()))), row.get("unpacked", {}).get("times")
            times = "" if times is None else f"{times:.3f}"
            lines.append((row["case"], path, f"{middle:.3f}", span(low, high), f"{row['error']:.1e}", times))
    return markdown(columns, lines)


def _packed_cells(row: Row) -> tuple[str, ...]:
    low, middle, high = (row[key] * 1e6 for key in ("p10_s", "median_s", "p90_s"))
    size, rate = sum(row["bytes"].values()) / 1e6, row["bytes_per_s"] / 1e12
    return row["case"], f"{size:,.1f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{rate:.2f}"


def kernel_table(rows: Sequence[Row]) -> str:
    """The time of each kernel in each row."""
    lines = []
    for row in rows:
        profile = row.get("profile") or row
        name = row.get("case") or f"{row['shape']}/{tokens_text(row['tokens'])}/b{row['batch']}/{row['policy']}"
        for kernel in profile.get("kernels", ()):
            each, together = (f"{kernel[key] * 1e6:.2f}" for key in ("median_s", "total_s"))
            lines.append((name, f"`{kernel['name'][:80]}`", f"{kernel['runs_per_op']:g}", each, together))
    return markdown(("what", "kernel", "runs", "us each", "us together"), lines)


def step_short(rows: Sequence[Row]) -> str:
    """Milliseconds of a step on one device, one step per launch, by shape, batch and length: dense, and each policy
    with its speed-up over that."""
    timed = [row for row in rows if "median_s" in row and devices_of(row) == 1 and not launch_text(row)]
    policies = [name for name in dict.fromkeys(row["policy"] for row in timed) if name != "dense"]
    lines = []

    def place_of(row: Row) -> tuple[str, int, int]:
        return row["shape"] + packed_text(row), row["batch"], row["tokens"]

    shapes, places = list(dict.fromkeys(place_of(row)[0] for row in timed)), set(map(place_of, timed))
    for place in sorted(places, key=lambda place: (shapes.index(place[0]), *place[1:])):
        here = {row["policy"]: row["median_s"] * 1e3 for row in timed if place_of(row) == place}
        dense = here.get("dense")
        others = [f"{here[name]:.2f}" + (f" ({dense / here[name]:.2f}x)" if dense else "") if name in here else "-" for name in policies]
        lines.append((place[0], str(place[1]), tokens_text(place[2]), f"{dense:.2f}" if dense else "-", *others))
    return markdown(("shape", "batch", "tokens", "dense", *(f"`{name}`" for name in policies)), lines)


def beside_table(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """Cases that two runs have, and the time of the second over that of the first: the forms of `mosaic_gpu` with
    `wgmma` and without."""
    timed = {row["case"]: row for row in rows if "median_s" in row}
    lines = []
    for other in others:
        if (row := timed.get(other["case"])) and "median_s" in other:
            micros = [f"{x['median_s'] * 1e6:,.2f}" for x in (row, other)]
            errors = [f"{x['error']:.1e}" if x.get("error") is not None else "-" for x in (row, other)]
            bits = "yes" if row["same_bits"] and other["same_bits"] else "no"
            lines.append((other["case"], *micros, f"{other['median_s'] / row['median_s']:.2f}", *errors, bits))
    columns = ("case", "with `wgmma`, us", "without, us", "times", "error with", "error without", "same bits twice")
    return markdown(columns, lines)


def parts(runs: Sequence[dict[str, Any]]) -> dict[str, Callable[[], str]]:
    """The parts of documents that marks can name. A part without a run says so."""
    kinds = ("ops", "decode", "prefill-ops", "prefill", "prefill-measures", "prefill-layers")
    ops, steps, prefill_ops, prefills, measures, layers = ([run for run in runs if run["bench"] == kind] for kind in kinds)

    def sourced(kind: Sequence[dict[str, Any]], make: Callable[[], str]) -> Callable[[], str]:
        text = "*Not measured yet.*"
        return lambda: f"{make()}\n\n{sources(kind)}" if kind else text

    def of(kind: Sequence[dict[str, Any]], make: Callable[[list[Row]], str]) -> Callable[[], str]:
        return sourced(kind, lambda: make(merged(kind)))

    forced = {kind: [run for run in runs if run["bench"] == f"{kind}-forced"] for kind in ("decode", "prefill", "prefill-ops")}

    def on_path(kind: Sequence[dict[str, Any]], *paths: str | None) -> list[dict[str, Any]]:
        return [run for run in kind if run.get("implementation") in paths]

    needles = [run for run in runs if run["bench"].startswith("sparse-prefill-needles")]
    recalls = [run for run in runs if run["bench"] == "prefill-echo"]
    masses = [run for run in runs if run["bench"] == "block-mass"]
    drafts = [run for run in runs if run["bench"] == "drafts"]
    exchanges = [run for run in runs if run["bench"] == "exchange"]
    of_top_k = {name: sourced(*made) for name, made in top_k_report.parts(runs).items()}

    def targets() -> str:
        designs = [run for run in runs if run["bench"] == "designs-prefill"]
        ops_rows = prefill_report.merged_ops(prefill_ops)
        return prefill_targets.targets_table(ops_rows, *map(merged, (prefills, measures)), needles, designs, recalls)

    def of_ops(make: Callable[[list[Row]], str]) -> Callable[[], str]:
        return sourced(prefill_ops, lambda: make(prefill_report.merged_ops(prefill_ops)))

    of_kind = {kind: [run for run in runs if run["bench"] == kind] for kind in tables.TABLES}

    def scheduled(kind: str) -> Callable[[], str]:
        return sourced(of_kind[kind], lambda: tables.made(kind, [row for run in of_kind[kind] for row in run["rows"]]))

    agents = of_kind["sessions"]
    return (of_top_k | {kind: scheduled(kind) for kind in of_kind}) | {
        "session-buckets": sourced(agents, lambda: tables.session_buckets([row for run in agents for row in run["rows"]])),
        "decode-op": of(ops, lambda rows: decode_table(rows, "qwen2.5-7b")),
        "decode-op-llama": of(ops, lambda rows: decode_table(rows, "llama-3.1-8b")),
        "op-rows": of(ops, row_table),
        "products": of(ops, product_table),
        "packed-matrices": of(ops, packed_matrix_table),
        "packed-attention": of(ops, packed_attention_table),
        "packed-prefill": of(ops, packed_prefill_table),
        "platform-ops": of(on_path(ops, "xla"), row_table),
        "platform-steps": of(on_path(forced["decode"], "xla"), lambda rows: markdown(STEP_COLUMNS, map(step_cells, rows))),
        "platform-prompts": sourced(
            prompts := on_path(forced["prefill"], "cudnn", "xla"), lambda: prefill_report.time_table_of_runs(prompts)
        ),
        "platform-prefill": sourced(forced["prefill-ops"], lambda: prefill_report.path_table(forced["prefill-ops"])),
        "blackwell-ops": sourced(
            on_path(ops, None, "blackwell"), lambda: beside_table(*(merged(on_path(ops, path)) for path in (None, "blackwell")))
        ),
        "blackwell-steps": of(on_path(forced["decode"], "blackwell"), lambda rows: markdown(STEP_COLUMNS, map(step_cells, rows))),
        "blackwell-prompts": of(on_path(forced["prefill"], "blackwell"), time_table),
        "op-kernels": of(ops, lambda rows: kernel_table([row for row in rows if row["op"] in ("dense", "sparse")])),
        "decode-step": of(steps, lambda rows: markdown(STEP_COLUMNS, map(step_cells, rows))),
        "decode-step-short": of(steps, step_short),
        "drafts": of(drafts, lambda rows: markdown(DRAFT_COLUMNS, map(draft_cells, rows))),
        "step-kernels": of(steps, kernel_table),
        "prefill-targets": targets,
        "prefill-ops": of_ops(prefill_report.op_table),
        "prefill-steps": of_ops(prefill_report.steps_table),
        "prefill-time": of(prefills, time_table),
        "prefill-split": of(prefills, split_table),
        "prefill-measures": of(measures, prefill_report.measures_table),
        "prefill-layers": of(layers, prefill_report.layers_table),
        "exchange": sourced(exchanges, lambda: exchange.table([row for run in exchanges for row in run["rows"]])),
        "block-mass": sourced(masses, lambda: block_mass.table([row for run in masses for row in run["rows"]])),
        "prefill-needles": sourced(needles, lambda: recall_tables.needles_table(needles)),
        "prefill-echo": sourced(recalls, lambda: recall_tables.recall_table(recalls)),
    }


def merged(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of several runs. Of rows for the same case the last is kept."""
    key = ("op", "shape", "tokens", "batch", "policy", "format", "layer", "weights", "cache_format", "cached")
    ones = ("drafted", "tensor", "context", "steps_per_launch")  # 1 in older rows
    rows = (row for run in runs for row in run["rows"])
    return list({(*(row.get(name) for name in key), *(row.get(name, 1) for name in ones)): row for row in rows}.values())


def rendered(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """A document with every marked part made again. ValueError for a part that does not exist, or a mark that is not
    closed."""
    known, said = parts(runs), set()
    if unknown := sorted({name for _, name, _ in MARK.findall(text)} - set(known)):
        raise ValueError(f"no part is called {unknown[0]!r}; there are {', '.join(known)}")
    if len(MARK.findall(text)) != text.count("<!-- bench:"):
        raise ValueError("a mark <!-- bench:NAME --> is not followed by <!-- /bench -->")

    def made(found: re.Match[str]) -> str:
        table, begins, lines = known[found[2]]().partition(SOURCES)
        new = [line for line in lines.splitlines() if line not in said]
        said.update(new)
        text = f"{table}{begins}{chr(10).join(new)}" if new else table.rstrip("\n")
        return f"{found[1]}{text}\n{found[3]}"

    return MARK.sub(made, text)


def load(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Runs by file, the oldest first. A run without a bench is named after its file."""
    runs = [{"bench": file.stem, **json.loads(file.read_text(encoding="utf-8"))} for file in files]
    return sorted(runs, key=lambda run: run["provenance"]["date"])


def plot(rows: Sequence[Row], file: Path, *, scale: float, unit: str) -> None:
    """Time over tokens on two logarithmic axes: a panel per shape and batch, a line per policy. scale: units in a
    second."""
    timed = [row for row in rows if "median_s" in row and row["op"] in ("dense", "sparse", "baseline", "decode")]
    panels = sorted({(row["shape"], row["batch"]) for row in timed}, key=lambda panel: (panel[0] != "qwen2.5-7b", *panel))
    if not panels:
        raise ValueError("no row has a time to draw")
    with pictures.picture(file, *pictures.grid_of(len(panels)), height=2.5) as (figure, axes):
        for axis, (shape, batch) in zip(axes.flat, panels, strict=False):
            here = [row for row in timed if (row["shape"], row["batch"]) == (shape, batch)]
            for name, style in dict.fromkeys((line_name(row), ":" if row["op"] == "baseline" else "-") for row in here):
                line = sorted((row["tokens"], row["median_s"] * scale) for row in here if line_name(row) == name)
                axis.plot(*zip(*line, strict=True), style, marker="o", label=name, color=pictures.color_of(name))
            axis.set(title=f"{shape}, batch {batch}", xlabel="tokens", ylabel=unit)
            pictures.token_ticks(axis.xaxis, [row["tokens"] for row in here])
            pictures.log_ticks(axis.yaxis)
            axis.grid()
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        pictures.legend_below(figure, axes.flat[: len(panels)])


TIMELINE_PLACE = (2**17, 1)
"""Tokens and batch of the rows whose timeline is drawn."""


TIMELINE_SECONDS = 300e-6
"""The part of a step that is drawn, from its first product on: two layers of a large model. Before that, devices of a
mesh wait for each other."""


KERNEL_COLORS = {
    "span": "#222222",
    "selected": "#0072b2",
    "merge": "#e6b400",
    "append": "#cc79a7",
    "project": "#9fc8a0",
    "exchange": "#d55e00",
    "XLA": "#bdbdbd",
}
"""Colours of a timeline's bars. Names are the part before `_kernel` of our kernels; all others are XLA's."""


NAMED_SECONDS = 9e-6
"""Bars that are at least this long show their name."""


def plot_timeline(rows: Sequence[Row], file: Path) -> None:
    """The first kernels of a step as bars with their names, one line per row of `TIMELINE_PLACE`. ValueError if none
    has a timeline."""
    rows = [row for row in rows if row.get("timeline") and (row["tokens"], row["batch"]) == TIMELINE_PLACE]
    if not rows:
        raise ValueError(f"no step of {TIMELINE_PLACE[0]:,} tokens and batch {TIMELINE_PLACE[1]} has a timeline to draw")
    with pictures.picture(file, height=1.1 + 0.62 * len(rows)) as (figure, axes):
        axis = axes[0, 0]
        for line, row in enumerate(rows):
            zero = next((start for full, start, _ in row["timeline"] if _kernel_name(full) == "project"), 0)
            for full, start, length in row["timeline"]:
                name, start = _kernel_name(full), start - zero
                if not 0 <= start * 1e-9 < TIMELINE_SECONDS:
                    continue
                first, last = start * 1e-3, min(start + length, TIMELINE_SECONDS * 1e9) * 1e-3
                style = {"color": KERNEL_COLORS.get(name, pictures.color_of(name)), "edgecolor": "white", "linewidth": 0.4}
                axis.barh(line, last - first, left=first, height=0.84, label=name, **style)
                if (last - first) * 1e-6 >= NAMED_SECONDS:
                    place = {"ha": "center", "va": "center", "rotation": 0 if (last - first) * 1e-6 >= 3 * NAMED_SECONDS else 90}
                    ink = "white" if name in ("span", "selected") else "black"
                    axis.text((first + last) / 2, line, name, color=ink, size=pictures.MIN_POINTS, **place)
        axis.set(xlim=(0, TIMELINE_SECONDS * 1e6), xlabel="us from the first product of the step")
        axis.set_yticks(range(len(rows)), [f"{row['shape']}\n{line_name(row)}" for row in rows])
        axis.invert_yaxis()
        pictures.legend_below(figure, [axis], columns=6)


def _kernel_name(full: str) -> str:
    """The name of one of our kernels, or XLA. Kernels that exchange with other devices have no name of their own."""
    if "mosaic" not in full:
        return "XLA"
    name = full.partition("_kernel")[0].partition("_mosaic")[0]
    return "exchange" if name == "anonymous" else name
