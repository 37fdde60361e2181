"""Tables of requests through the scheduler, the host's time, compilation, sessions, stores and sequences larger than
the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels.core.results import launch_text
from pallas_kernels.core.tables import markdown, tokens_text

Row = dict[str, Any]


def shape_text(row: Row) -> str:
    """A row's shape, with its number of layers if one was given."""
    layers = row["layers"]
    return row["shape"] if layers is None else f"{row['shape']}, {layers} layer{'' if layers == 1 else 's'}"


def gigabytes(count: int) -> str:
    """Bytes in GB with one decimal, or with two digits where that would read 0.0."""
    return f"{count / 1e9:.1f}" if not 0 < count < 5e7 else f"{count / 1e9:.2g}"


def host_cells(row: Row) -> tuple[str, ...]:
    """Cells with microseconds of a step."""
    micro = (f"{row[key] * 1e6:,.0f}" for key in ("own_s", "own_p95_s", "dispatch_s", "release_s", "median_s", "copy_s"))
    what = {
        "engine": "`Engine.decode_and_sample`",
        "scheduler": "`Scheduler.step`",
        "listening": "`Scheduler.step`, `on_token`",
        "logprobs": "`Scheduler.step`, `logprobs`",
    }[row["what"]]
    return what, f"{row['rows']}", f"{row['pages']:,}", *micro


def sessions_cells(row: Row) -> tuple[str, ...]:
    """Cells with tokens per second, milliseconds, and the gates that hold, fail, or were not decided. "not ours": it
    holds by the paper's number, but not by our own."""
    milli = (f"{row[name][each] * 1e3:,.1f}" if row[name] else "" for name in ("first_s", "gap_s") for each in ("p50", "p95", "p99"))
    held = {True: "", False: " fails", None: " not run"}
    ours = {name: " (not ours)" for name, gate in row["gates"].items() if gate["holds"] and not gate.get("ours", True)}
    told = ", ".join(f"{name}{held[gate['holds']]}{ours.get(name, '')}" for name, gate in sorted(row["gates"].items()))
    rates = f"{row['generated_per_s']:,.1f}", f"{row['prefilled_per_s']:,.1f}"
    return row["model"], f"`{row['policy']}`", f"{row['agents']}", f"{row['minutes']:g}", f"{row['turns']:,}", *rates, *milli, told


def session_tokens_cells(row: Row) -> tuple[str, ...]:
    """Cells with tokens per second, milliseconds of a gap, and microseconds of CPU time for a token."""
    shape, job = f"{shape_text(row)}, {row.get('weights') or row['dtype']}", f"{row['sessions']} of {row['prompt']:,} + {row['answer']}"
    rates = f"{row['engine_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / row['engine_tokens_per_s']:.2f}"
    told, generated = row["through_grpc"], row["sessions"] * row["answer"]
    gaps = (f"{told[name] * 1e3:,.1f}" for name in ("gap_p50_s", "gap_p95_s"))
    together = f"{generated / (told['messages'] - row['sessions']):.2f}"  # one message ends each generation
    micro = row["engine"]["cpu_s"] / generated, told["server_cpu_s"] / generated, told["client_cpu_s"] / generated, row["overhead_s"]
    return shape, job, f"`{row['policy']}`", *rates, *gaps, together, *(f"{each * 1e6:,.0f}" for each in micro)


def session_idle_cells(row: Row) -> tuple[str, ...]:
    """Cells with milliseconds of a gap, and microseconds of the server's CPU time for a token."""
    shape, job = f"{shape_text(row)}, {row['dtype']}", f"{row['sessions']} of {row['prompt']:,} + {row['answer']}"
    told, idle = row["through_grpc"], (f"{row['open']:,}", f"{row['held']['pages']:,}")
    gaps = (f"{told[name] * 1e3:,.2f}" for name in ("gap_p50_s", "gap_p95_s"))
    cpu = f"{told['server_cpu_s'] / (row['sessions'] * row['answer']) * 1e6:,.0f}"
    return shape, job, f"`{row['policy']}`", *idle, *gaps, cpu


def session_turn_cells(row: Row) -> tuple[str, ...]:
    """Cells with milliseconds to the first token, median and range of turns, and the chunks of prefill that they
    computed."""
    what = {"resident": "pages on the device", "demoted": "pages in host memory", "again": "a new session of the whole history"}
    shape, job = f"{shape_text(row)}, {row['dtype']}", f"{row['history']:,} + {row['appended']}"
    turns = [turn["first_s"] * 1e3 for turn in row["turns"]]
    times = f"{row['first_s'] * 1e3:,.1f}", f"{min(turns):,.1f} to {max(turns):,.1f}"
    chunks = sorted({turn["chunks"] for turn in row["turns"] if "chunks" in turn})
    counts = ", ".join(f"{count:,}" for count in chunks) or "-"
    return shape, f"`{row['policy']}`", job, f"{row['chunk']:,}", what[row["kind"]], f"{len(turns)}", counts, *times


def throughput_cells(row: Row) -> tuple[str, ...]:
    """Cells with seconds and tokens per second."""
    shape = shape_text(row)
    job = f"{row['requests']} of {row['prompt']:,} + {row['answer']}"
    rates = (f"{row[key]:,.0f}" for key in ("prefill_tokens_per_s", "decode_tokens_per_s"))
    return shape, job, f"{row['chunk']:,}", f"`{row['policy']}`", f"{row['seconds']:.2f}", *rates


def replicas_cells(row: Row) -> tuple[str, ...]:
    """Cells with seconds and tokens per second of all replicas together."""
    shape, mesh = shape_text(row), f"{row['tensor']} x {row['context']}"
    job = f"{row['requests']} of {row['prompt']:,} + {row['answer']}"
    rates = (f"{row[key]:,.0f}" for key in ("prompt_tokens_per_s", "answer_tokens_per_s"))
    return shape, job, f"`{row['policy']}`", mesh, f"{row['data']}", f"{row['seconds']:.2f}", *rates, f"{row['of_first']:.2f}"


def gaps_cells(row: Row) -> tuple[str, ...]:
    """Cells with milliseconds between tokens and tokens per second of the prompt."""
    prompt = f"last {tokens_text(row['computed'])} of {tokens_text(row['prompt'])}"
    milli = (f"{row[key] * 1e3:,.1f}" for key in ("quiet_s", "p50_s", "p95_s", "p99_s", "largest_s"))
    rates = (f"{row[key]:,.0f}" for key in ("prefill_tokens_per_s", "alone_tokens_per_s"))
    shape = shape_text(row)
    return shape, f"`{row['prefill']}`", prompt, f"{row['max_gap_ms']:g}", f"{row['gaps']}", *milli, *rates


def token_cells(row: Row) -> tuple[str, ...]:
    """Cells with milliseconds of a token."""
    steps = "default" if row["steps_per_launch"] == "auto" else str(row["steps_per_launch"])
    times = f"{row['median_s'] * 1e3:.2f}", f"{row['least_s'] * 1e3:.2f} to {row['most_s'] * 1e3:.2f}"
    devices = f", {row['tensor']} devices" if row.get("tensor", 1) > 1 else ""
    return shape_text(row) + devices, tokens_text(row["tokens"]), *_packing(row), f"`{row['policy']}`", steps, *times


def job_cells(row: Row) -> tuple[str, ...]:
    """Cells with seconds of a job, cold and again."""
    job = f"{row['requests']} of {row['prompt']:,} + {row['answer']}"
    return shape_text(row), job, *_packing(row), f"`{row['policy']}`", f"{row['cold_s']:.1f}", f"{row['warm_s']:.1f}"


def draft_round_cells(row: Row) -> tuple[str, ...]:
    """Cells with milliseconds of a token, without drafts and with them."""
    policies = f"`{row['policy']}`", _draft_text(row)
    times = f"{row['plain_s'] * 1e3:.2f}", f"{row['drafted_s'] * 1e3:.2f}", f"{row['times']:.2f}"
    right = "copies" if row["acceptance"] is None else f"{row['acceptance']:g}"
    counts = right, f"{row['tokens_per_round']:.1f} of {row['round']}"
    return shape_text(row), tokens_text(row["tokens"]), str(row["slots"]), *_packing(row), *policies, *counts, *times


def acceptance_cells(row: Row) -> tuple[str, ...]:
    """Cells with counts of drafts that are right."""
    rounds = f"{row['tokens_per_round']:.1f} of {row['round']}", f"{row['acceptance']:.3f}"
    job, same = f"{row['prompts']} of {row['answer']}", f"{row['equal']:,} of {row['of']:,}"
    return row["model"], tokens_text(row["tokens"]), _draft_text(row), job, *rounds, same


def _draft_text(row: Row) -> str:
    weights = row.get("draft_weights")
    return f"`{row['draft']}`" + (f", `{weights}` weights" if weights else "")


def _packing(row: Row) -> tuple[str, str]:
    return f"`{row.get('weights') or 'bfloat16'}`", f"`{row.get('cache_format') or 'bfloat16'}`"


def cold_cells(row: Row) -> tuple[str, ...]:
    """Cells with programs and seconds."""
    spent = (f"{row['seconds'][part]:.2f}" for part in ("trace", "lower", "compile"))
    waited = f"{row['wall_s'] - row['warm_s']:.2f}"
    first = f"{row['first_s'] - row['warm_first_s']:.2f}" if "first_s" in row else "-"
    shape, tokens = shape_text(row), tokens_text(row["prompt"])
    start = "on" if row.get("cached") else "off"
    return shape, *_packing(row), f"`{row['prefill']}`", tokens, start, f"{row['programs']}", *spent, first, waited


def programs_cells(row: Row) -> tuple[str, ...]:
    """Cells with programs and the functions that have most of them."""
    names = ", ".join(f"{name} {count}" for name, count in list(row["by_name"].items())[:4])
    job = f"{row['requests']} requests of {', '.join(map(tokens_text, row['lengths']))}"
    return shape_text(row), job, f"{row['programs']}", names


def transformers_cells(row: Row) -> tuple[str, ...]:
    """Milliseconds of a prompt or a step."""
    side = f"`{row['policy']}`" if row["implementation"] == "kvjax" else f"transformers {row['transformers']}, {row['attention']}"
    what = f"prompt of {row['tokens']:,}" if row["op"] == "prompt" else f"step after {row['tokens']:,}"
    same = f"{row['same_tokens']} of {row['tokens_after']}"
    return row["model"], row["dtype"], what, side, f"{row['median_s'] * 1e3:,.1f}", f"{row['error']:.1e}", same


def cpu_cells(row: Row) -> tuple[str, ...]:
    """Tokens per second of a prompt and of the steps after it."""
    by = {"transformers": "transformers {transformers}", "llama.cpp": "llama.cpp (llama-cpp-python {llama_cpp_python})"}
    side = by.get(row["implementation"], row["implementation"]).format(**row)
    what = f"prompt of {row['tokens']:,}" if row["op"] == "prompt" else f"steps after {row['tokens']:,}"
    same = f"{row['same_tokens']} of {row['tokens_after']}"
    return what, side, row["weights"], f"{row['tokens_per_s']:,.1f}", f"{row['error']:.1e}", same


def reuse_cells(row: Row) -> tuple[str, ...]:
    """Seconds to the first token, and how far they are from the bytes at the store's plain rate."""
    what = f"{tokens_text(row['tokens'])} + {row['own']:,}"
    shape = shape_text(row)
    if row["op"] == "computed":
        how = "computed" if row["store"] == "none" else f"computed, pages kept: {row['store']}"
        return shape, what, f"{row['chunk']:,}", how, f"{row['median_s']:.3f}", "-", "-", "-"
    shown = ("-", "-", "-")
    if row["rate"]:
        shown = f"{row['bytes'] / 1e9:.2f}", f"{row['rate'] / 1e9:.1f}", f"{row['bytes'] / row['rate']:.3f}"
    return shape, what, f"{row['chunk']:,}", f"found: {row['store']}", f"{row['median_s']:.3f}", *shown


def tiers_cells(row: Row) -> tuple[str, ...]:
    """Milliseconds of a step, and what of its bytes came over the bus."""
    shape, device = _packed_shape(row), row["device_bytes"]
    there = "everything" if device is None else f"{gigabytes(device)} GB"
    sizes = tokens_text(row["tokens"]), f"`{row['policy']}`{launch_text(row)}", gigabytes(row["cache_bytes"]), there
    if "skipped" in row:
        return shape, *sizes, "does not fit", *["-"] * 6
    step = row["median_s"]
    moved = ("-", "-", "-")
    if row["host_bytes"]:
        moved = (
            f"{row['host_bytes'] / 1e6:,.0f}",
            f"{1 - row['host_bytes'] / row['read_bytes']:.0%}",
            f"{row['host_bytes'] / row['rate'] * 1e3:.2f}",
        )
    return shape, *sizes, f"{step * 1e3:.2f}", f"{1 / step:.1f}", f"{row['read_bytes'] / 1e6:,.0f}", *moved, f"{row['rate'] / 1e9:.1f}"


def _packed_shape(row: Row) -> str:
    """The model's shape, and the format of packed pages."""
    return shape_text(row) + (f", `{row['cache_format']}` pages" if "cache_format" in row else "")


def tiered_prefill_cells(row: Row) -> tuple[str, ...]:
    """Seconds of a prompt, and what of its bytes crossed the bus."""
    shape, device = _packed_shape(row), row["device_bytes"]
    there = "everything" if device is None else f"{gigabytes(device)} GB"
    sizes = tokens_text(row["tokens"]), f"`{row['policy']}`", f"{row['chunk']:,}", there
    if "skipped" in row:
        return shape, *sizes, "does not fit", *["-"] * 6
    speed = f"{row['seconds']:.1f}", f"{row['tokens'] / row['seconds']:,.0f}"
    peak = "-" if row["peak_bytes"] is None else gigabytes(row["peak_bytes"])
    if not row["staged_bytes"]:
        return shape, *sizes, *speed, peak, "-", "-", "-", "-"
    moved = f"{row['staged_bytes'] / 1e9:,.0f}", f"{row['staged_bytes'] / row['rate']:.1f}", f"{row['moved_bytes'] / 1e9:,.1f}"
    rates = row.get("copy_rates")
    copies = " / ".join(f"{rates[way] / 1e9:.1f}" if way in rates else "-" for way in ("in", "out", "both")) if rates else "-"
    return shape, *sizes, *speed, peak, *moved, copies


def lists_cells(row: Row) -> tuple[str, ...]:
    """What lists of consecutive steps share."""
    return row["model"], f"{row['tokens']:,}", f"`{row['policy']}`", f"{row['steps']}", f"{row['shared_with_step_before']:.0%}"


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = {
    "host": (
        ("what", "rows", "pages", "own us", "own us, p95", "JAX's call us", "JAX's release us", "all us", "JAX's copy us"),
        host_cells,
    ),
    "sessions": (
        (
            "model",
            "policy",
            "agents",
            "minutes",
            "turns",
            "tokens/s",
            "prefilled/s",
            "first token ms, p50",
            "p95",
            "p99",
            "gap ms, p50",
            "p95",
            "p99",
            "gates",
        ),
        sessions_cells,
    ),
    "session-tokens": (
        (
            "shape",
            "sessions",
            "policy",
            "engine tokens/s",
            "through gRPC",
            "times",
            "gap ms, p50",
            "p95",
            "tokens of a message",
            "CPU us of a token, engine",
            "server",
            "clients",
            "beyond the engine",
        ),
        session_tokens_cells,
    ),
    "session-idle": (
        ("shape", "generating", "policy", "idle sessions", "pages in use", "gap ms, p50", "p95", "CPU us of a token, server"),
        session_idle_cells,
    ),
    "session-turn": (
        ("shape", "policy", "tokens", "chunk", "session", "turns", "chunks of a turn", "first token ms", "range ms"),
        session_turn_cells,
    ),
    "throughput": (("shape", "requests", "chunk", "policy", "seconds", "prefill tokens/s", "decode tokens/s"), throughput_cells),
    "replicas": (
        ("shape", "requests of each", "policy", "tensor x context", "replicas", "seconds", "prompt tokens/s", "answer tokens/s", "times"),
        replicas_cells,
    ),
    "gaps": (
        ("shape", "prefill", "prompt", "bound ms", "gaps", "quiet ms", "p50", "p95", "p99", "most", "tokens/s", "alone tokens/s"),
        gaps_cells,
    ),
    "default-tokens": (("shape", "tokens", "weights", "pages", "policy", "steps per launch", "ms per token", "range ms"), token_cells),
    "draft-rounds": (
        (
            "shape",
            "tokens",
            "batch",
            "weights",
            "pages",
            "policy",
            "draft",
            "drafts right",
            "tokens of a round",
            "ms per token",
            "with drafts",
            "times",
        ),
        draft_round_cells,
    ),
    "draft-acceptance": (
        ("model", "tokens", "draft", "continuations", "tokens of a round", "drafts right", "tokens as dense"),
        acceptance_cells,
    ),
    "default-job": (("shape", "job", "weights", "pages", "policy", "first time s", "again s"), job_cells),
    "cold": (
        (
            "shape",
            "weights",
            "pages",
            "prefill",
            "prompt",
            "cache",
            "programs",
            "tracing s",
            "lowering s",
            "compiling s",
            "first waits s",
            "all wait s",
        ),
        cold_cells,
    ),
    "transformers": (("model", "dtype", "what", "by", "ms", "error of logits", "equal tokens"), transformers_cells),
    "cpu": (("what", "by", "weights", "tokens/s", "error of logits", "equal tokens"), cpu_cells),
    "reuse": (("shape", "tokens", "chunk", "prompt", "first token s", "GB", "plain GB/s", "floor s"), reuse_cells),
    "tiers": (
        (
            "shape",
            "tokens",
            "policy",
            "cache GB",
            "on the device",
            "step ms",
            "tokens/s",
            "read MB",
            "from host MB",
            "hits",
            "bus ms",
            "plain GB/s",
        ),
        tiers_cells,
    ),
    "tiered-prefill": (
        (
            "shape",
            "tokens",
            "policy",
            "chunk",
            "on the device",
            "seconds",
            "tokens/s",
            "peak GB",
            "from host GB",
            "bus s",
            "to host GB",
            "in / out / both GB/s",
        ),
        tiered_prefill_cells,
    ),
    "lists": (("model", "tokens", "policy", "steps", "in the step before, too"), lists_cells),
    "programs": (("shape", "job", "programs", "most of them"), programs_cells),
}
"""`bench` of a result -> columns, and the function that makes the cells of a row."""


BUCKETS = ("minutes", "turns", "generated of a turn", "prefilled", "turn ms, p50", "p95", "gap ms, p50", "server's CPU ms of a token")
BUCKETS += ("most pages, MB", "process, MB")


def session_buckets(rows: list[Row]) -> str:
    """The buckets of the last run of agents, for a document: what gates G1 and G2 are computed from."""
    lines = []
    for bucket in rows[-1]["buckets"]:
        turns, tokens = max(1, bucket["turns"]), max(1, bucket["generated"] + bucket["prefilled"])
        work = f"{bucket['turns']:,}", f"{bucket['generated'] / turns:.1f}", f"{bucket['prefilled'] / turns:.1f}"
        times = [f"{1e3 * bucket[name][each]:,.1f}" for name, each in (("turn_s", "p50"), ("turn_s", "p95"), ("gap_s", "p50"))]
        sizes = (f"{bucket[name] / 1e6:,.1f}" for name in ("kv_peak_bytes", "process_peak_bytes"))
        cpu = f"{1e3 * bucket['server_cpu_s'] / tokens:.2f}"
        lines.append((f"{bucket['from_s'] / 60:g} to {bucket['to_s'] / 60:g}", *work, *times, cpu, *sizes))
    return markdown(BUCKETS, lines)


def made(kind: str, rows: list[Row]) -> str:
    """The table of a kind, for a document. Of rows for the same case the last is kept."""
    columns, cells = TABLES[kind]
    told = ("what", "rows", "pages", "shape", "layers", "policy", "prefill", "prompt", "requests", "chunk", "max_gap_ms")
    told += (
        "op",
        "model",
        "dtype",
        "tokens",
        "implementation",
        "weights",
        "store",
        "device_bytes",
        "data",
        "tensor",
        "context",
        "agents",
        "minutes",
    )
    told += ("kind", "phase", "open", "history", "cache_format", "cached", "draft", "acceptance", "slots", "draft_weights")
    latest = {(*(row.get(name) for name in told), row.get("steps_per_launch", 1)): row for row in rows}  # 1 in older rows
    return markdown(columns, map(cells, latest.values()))
