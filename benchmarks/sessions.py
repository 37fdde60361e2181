"""Agents on a server of their own, over gRPC and the Python client, and the gates of ADR 0008, section 7.

The server runs in a process of its own on this machine. So rates include everything between an agent and the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.agents import TRACE, Agent, Turn, Work, run_agents
from benchmarks.run import BenchChunkOption, LayersOption, main, plan_of, run
from kvjax.client import Client
from kvjax.policies.decode import parse
from kvjax.serving.cli.bench import check_dtype
from kvjax.serving.cli.options import MAX_BATCH, JsonOption, number, parse_lengths, token_count, whole
from pallas_kernels.core.optional import needs_extras
from pallas_kernels.core.results import device_here, provenance

BUCKETS = 3
BUCKET_S = 600.0
"""The paper's buckets have ten minutes, and it wants at least three."""
PAPER_MEMORY, PAPER_LATENCY, OURS = 0.10, 0.50, 0.05
"""The most drift: of memory and of latency (p50) in the paper; ours, of memory and of latency (p50 and p95)."""
PAGE_SIZE = 128
PERCENTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class Load:
    """What to run. model: "needle", a folder, or a hub id; or a shape, with random weights. agents: how many, run by
    run. minutes: of each run. tokens, times, longest_wait_s, history: as of `Work`. max_batch: generations at once.
    pages: in the pool; None: for all histories."""

    model: str
    agents: tuple[int, ...]
    minutes: float
    policy: str
    history: int
    tokens: float
    times: float
    longest_wait_s: float
    max_batch: int
    pages: int | None
    chunk: int
    dtype: str
    layers: int | None

    def __post_init__(self):
        if self.history < 64:
            raise ValueError(f"history must be at least 64 tokens, got {self.history}")
        parse(self.policy)
        check_chunk(self.chunk)


def check_chunk(chunk: int) -> None:
    """ValueError if a server with pages of PAGE_SIZE tokens cannot prefill in chunks of so many: before its process
    starts."""
    if chunk % PAGE_SIZE:
        raise ValueError(f"chunk {chunk} must be a multiple of the page size {PAGE_SIZE}")


def load_rows(load: Load, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """One row for each number of agents."""
    for count in load.agents:
        say(f"{count} agents: the server compiles")
        with ServerProcess(serve, load, count) as server:
            say(f"{count} agents for {load.minutes:g} minutes")
            yield load_row(load, count, server) | {"provenance": provenance(server.device)}


class Polled(NamedTuple):
    """What was there at one time. at: seconds of `time.monotonic`. resident: bytes of the server's process. needed:
    bytes of the pages that histories fill. cpu_s: that the process has computed so far."""

    at: float
    metrics: dict[str, float]
    resident: int
    needed: int
    cpu_s: float


LIVE = "session_kv_live_bytes"

LATE_S = 3.0
"""How late a server's metrics may be (`SessionRuntime.published`, and a step), in seconds."""


def note(polled: list[Polled], latest: Polled) -> None:
    """Add a look. Of those between the first and the latest, only the metric that buckets need is kept: four hours have
    14,400 looks."""
    if len(polled) > 1:
        polled[-1] = polled[-1]._replace(metrics={LIVE: polled[-1].metrics[LIVE]})
    polled.append(latest)


class Watched:
    """A server that is loaded. address: of gRPC. vocab_size: of its model. page: tokens of a page, and its bytes in all
    layer groups. device: what its process computes on (`device_here`). pid: of that process."""

    def __init__(self, port: int, http_port: int, vocab_size: int, page: tuple[int, int], device: dict[str, Any], *, pid: int):
        self.address, self.vocab_size, self._page, self.device = f"127.0.0.1:{port}", vocab_size, page, device
        self._http_port, self._pid = http_port, pid

    def metrics(self) -> dict[str, float]:
        """Its metrics, by name, with the values of labels behind it."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/metrics", timeout=60) as page:
            samples = [sample for family in parse(page.read().decode()) for sample in family.samples]
        return {f"{each.name}{sorted(each.labels.values()) or ''}": each.value for each in samples}

    def needed_bytes(self, agents: list[Agent], since: float) -> int:
        """Bytes of the most pages that the agents' histories have filled since a time of `time.monotonic`."""
        size, held = self._page
        return sum(held * -(-agent.most_tokens(since) // size) for agent in agents)

    def poll(self, agents: list[Agent]) -> Polled:
        """What is there now."""
        began, metrics = time.monotonic(), self.metrics()
        return Polled(time.monotonic(), metrics, self.resident_bytes(), self.needed_bytes(agents, began - LATE_S), self.cpu_seconds())

    def resident_bytes(self) -> int:
        """Memory of the process; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """CPU time of all threads of the process so far; 0 where the system does not tell."""
        try:
            after_name = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")  # utime and stime
        except (OSError, ValueError, IndexError):
            return 0.0

    def complete(self, ids: list[int], count: int) -> tuple[str, bool]:
        """One answer of the shim to a greedy request, and whether it said that it is deprecated."""
        body = {"model": "bench", "prompt": ids, "max_tokens": count, "temperature": 0}
        request = urllib.request.Request(f"http://127.0.0.1:{self._http_port}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as page:
            return json.loads(page.read())["choices"][0]["text"], "Deprecation" in page.headers and "Sunset" in page.headers


class ServerProcess(Watched):
    """A server in a process of its own, as a context. RuntimeError if it cannot start.

    target: called in that process with its end of the pipe and `args`. It sends the arguments of `Watched` but `pid`
    once it listens, then takes words: it answers each, and returns after "end".
    """

    def __init__(self, target: Callable[..., None], *args: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=target, args=(other, *args), name="kvjax bench server")
        self._process.start()
        other.close()
        try:
            super().__init__(*self._pipe.recv(), pid=self._process.pid)
        except EOFError:
            self._process.join()
            raise RuntimeError("the server's process ended before it listened: its own error is above") from None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            self._pipe.send("end")
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def ask(self, word: str) -> Any:
        """What the process answers. RuntimeError if it has ended."""
        try:
            self._pipe.send(word)
            return self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the server's process ended before it answered {word!r}: its own error is above") from None


def page_of(engine: Any) -> tuple[int, int]:
    """Tokens of an engine's page, and its bytes in all layer groups."""
    return engine.page_size, sum(engine.spec.bytes_per_page(name, engine.indexes) for name in engine.allocators)


def serve(pipe: Any, load: Load, agents: int) -> None:
    """The server's process: serve until the pipe says so."""
    from benchmarks.hollow import random_model
    from kvjax.engine.engine import Engine
    from kvjax.models.loading import load as load_model
    from kvjax.serving.bench.decode import config_of
    from kvjax.serving.server.grpc_server import Server
    from kvjax.serving.server.metrics import Metrics
    from kvjax.serving.server.options import ServerOptions
    from kvjax.serving.sessions.runtime import SessionRuntime
    from pallas_kernels.bench.cases import SHAPES

    made = (
        random_model(config_of(load.model, load.layers, load.dtype)) if load.model in SHAPES else load_model(load.model, dtype=load.dtype)
    )
    each = -(-load.history // PAGE_SIZE) + 1
    pages = (agents + load.max_batch) * each if load.pages is None else load.pages
    engine = Engine(made, load.policy, pages=pages, page_size=PAGE_SIZE, prefill_chunk=load.chunk, batch_buckets=(load.max_batch,))
    engine.warmup(batch=load.max_batch, tokens=load.history)
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=load.max_batch, capacity=agents + 8, observe=metrics.observe)
    server = Server(runtime, metrics, ServerOptions(port=0, http_port=0, max_calls=agents + 16, model_name="bench"))
    server.start()
    pipe.send((server.port, server.http_port, made.config.vocab_size, page_of(engine), device_here()))
    pipe.recv()
    server.stop(0.0)


def load_row(load: Load, count: int, server: Watched) -> dict[str, Any]:
    """What `count` agents see of a server."""
    seconds = 60.0 * load.minutes
    work = Work(load.times, load.longest_wait_s, load.tokens, load.history, server.vocab_size, _bucket_seconds(seconds))
    polled: list[Polled] = []
    agents = run_agents(count, server.address, work, seconds, lambda agents: note(polled, server.poll(agents)))
    (began, before, *_), (ended, after, *_) = polled[0], polled[-1]
    wall = ended - began
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    turns = sorted((turn for agent in agents for turn in agent.turns), key=lambda turn: turn.at)
    if not turns:
        raise RuntimeError(f"no agent finished a turn in {load.minutes:g} minutes: give --minutes more, or --tokens less")
    errors = sum((agent.errors for agent in agents), start=type(agents[0].errors)())
    row = {"model": load.model, "policy": load.policy, "agents": count, "minutes": load.minutes, "history": load.history}
    row |= {"max_batch": load.max_batch, "dtype": load.dtype, "chunk": load.chunk, "wall_s": wall}
    row["workload"] = {
        "tokens": load.tokens,
        "times": load.times,
        "longest_wait_s": load.longest_wait_s,
        "repeat_s": work.repeat_s,
        "trace": dataclasses.asdict(TRACE),
    }
    generated = sum(turn.generated for turn in turns)
    row |= {"turns": len(turns), "sessions": sum(agent.sessions for agent in agents), "errors": dict(errors), "generated": generated}
    row |= {"appended": sum(turn.appended for turn in turns), "prefilled": sum(turn.prefilled for turn in turns)}
    row |= {"generated_per_s": generated / wall, "prefilled_per_s": row["prefilled"] / wall}
    row |= {"first_s": _spread([turn.first_s for turn in turns]), "turn_s": _spread([turn.whole_s for turn in turns])}
    row["gap_s"] = _spread([gap for turn in turns for gap in turn.gaps])
    buckets = row["buckets"] = _buckets(turns, began, polled, seconds)
    checks = _checks(server)
    row |= gates(seconds, buckets, server.metrics(), counted, agents)
    row["gates"] |= checks
    return row


def _spread(values: list[float]) -> dict[str, float] | None:
    return {f"p{each}": float(np.percentile(values, each)) for each in PERCENTILES} if values else None


def _bucket_seconds(seconds: float) -> float:
    """Ten minutes, or a third of a run that is shorter than three of these."""
    return BUCKET_S if seconds >= BUCKETS * BUCKET_S else seconds / BUCKETS


def _buckets(turns: list[Turn], began: float, polled: list[Polled], seconds: float) -> list[dict[str, Any]]:
    """The run in parts of `_bucket_seconds`. prefilled: of its turns. server_cpu_s: CPU time of the server's process
    between the first and the last look in it."""
    length, found = _bucket_seconds(seconds), []
    for place in range(max(BUCKETS, int(seconds / length))):
        first, last = place * length, (place + 1) * length
        inside = [turn for turn in turns if first <= turn.at - began < last]
        seen = [each for each in polled if first <= each.at - began < last]
        bucket: dict[str, Any] = {"from_s": first, "to_s": last, "turns": len(inside), "generated": sum(turn.generated for turn in inside)}
        bucket |= {"first_s": _spread([turn.first_s for turn in inside]), "turn_s": _spread([turn.whole_s for turn in inside])}
        bucket["gap_s"] = _spread([gap for turn in inside for gap in turn.gaps])
        bucket |= {"prefilled": sum(turn.prefilled for turn in inside), "server_cpu_s": seen[-1].cpu_s - seen[0].cpu_s if seen else 0.0}
        live = [(each.metrics[LIVE], each.needed) for each in seen]
        bucket["kv_peak_bytes"] = max((held for held, _ in live), default=0.0)
        bucket["kv_unaccounted_bytes"] = max((held - needed for held, needed in live if held > needed), default=0.0)
        bucket["process_peak_bytes"] = max((each.resident for each in seen), default=0)
        found.append(bucket)
    return found


def gates(seconds: float, buckets: list[dict[str, Any]], after: dict[str, float], counted: dict[str, float], agents: list[Agent]) -> dict:
    """The gates that a run decides: G1 (memory), G2 (latency), G4 (invariants), G5 (everything through the client).

    Memory of pages must not differ from the first bucket in either direction, and memory of the process must not grow:
    it falls when what compiling took is given back. Peaks of pages follow the lengths of the histories, which differ by
    chance, unless the pool is always full. So ours is about leaks too: at no time do sessions hold more pages than
    their histories fill, and none is in use at the end. after: metrics when all sessions are closed. beside: drift of
    what other programs on the machine do not slow down: the work of a turn, and the server's CPU time for each of its
    turns' tokens. It decides nothing.

    Only a run with three buckets of ten minutes decides G1 and G2. In a shorter one the same figures are
    called `compressed`.
    """
    peaks = {name: [bucket[f"{name}_peak_bytes"] for bucket in buckets] for name in ("kv", "process")}
    memory = {name: max(map(abs, each)) if name == "kv" else max(each) for name, each in _drifts(peaks).items()}
    latency = {}
    for name in ("p50", "p95"):
        values = [bucket["turn_s"][name] if bucket["turn_s"] else None for bucket in buckets]
        latency[name] = None if None in (values[0], values[-1]) else values[-1] / values[0] - 1
    known, unaccounted = list(memory.values()), max(bucket["kv_unaccounted_bytes"] for bucket in buckets)
    left = after["kv_pages['device']"] + after["kv_pages['host']"] + after["kv_pages['disk']"]
    clean = {"unaccounted_bytes": unaccounted, "pages_left": left}
    ours = "kv" in memory and not any(clean.values()) and max(known) < OURS
    told = {
        "memory": {"drift": memory, **clean, "holds": bool(known) and max(known) < PAPER_MEMORY, "ours": ours},
        "latency": {
            "drift": latency,
            "beside": _beside(buckets[0], buckets[-1]),
            "holds": latency["p50"] is not None and latency["p50"] < PAPER_LATENCY,
            "ours": None not in latency.values() and max(latency.values()) < OURS,
        },
    }
    real = seconds >= BUCKETS * BUCKET_S
    found = {"G1": told["memory"], "G2": told["latency"]} if real else {}
    violations = {kind: after[f"cache_invariant_violations_total{[kind]}"] for kind in ("inv1", "inv2", "inv3")}
    calls = sum(value for name, value in counted.items() if name.startswith("rpc_total") and "'Generate'" in name)
    through_client = sum(len(agent.turns) + sum(agent.errors.values()) for agent in agents)
    found["G4"] = {"violations": violations, "holds": not any(violations.values())}
    found["G5"] = {"calls": calls, "through_client": through_client, "holds": 0 < calls <= through_client}
    return {"gates": found} if real else {"gates": found, "compressed": told}


def _beside(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float | None]:
    """Drift from the first bucket to the last, as a share; None where one has no turn, or CPU time is not known."""
    figures = {
        "generated_per_turn": lambda bucket: bucket["generated"] / bucket["turns"],
        "prefilled_per_turn": lambda bucket: bucket["prefilled"] / bucket["turns"],
        "server_cpu_per_token": lambda bucket: bucket["server_cpu_s"] / (bucket["generated"] + bucket["prefilled"]),
    }
    if not (first["turns"] and last["turns"]):
        return dict.fromkeys(figures)
    return {name: figure(last) / figure(first) - 1 if figure(first) else None for name, figure in figures.items()}


def _drifts(peaks: dict[str, list[float]]) -> dict[str, list[float]]:
    """The differences from the first peak, as shares of it; those that were not measured are left out."""
    return {name: [peak / each[0] - 1 for peak in each] for name, each in peaks.items() if each[0]}


def _checks(server: Watched) -> dict[str, Any]:
    """G3 and G6, after the run: equal tokens however a history came in, for three of them, and from the shim.

    G6 is one answer here. tests/serving/server/test_http.py is its whole evidence.
    """
    random, equal = np.random.default_rng(3), []
    with Client(server.address) as client:
        for length in (5, 60, 300):
            ids = random.integers(0, server.vocab_size, length).tolist()
            with client.create_session() as whole, client.create_session() as single:
                whole.append(ids)
                for token in ids:
                    single.append([token])
                told = [list(each.generate(max_new_tokens=16, ignore_eos=True)) for each in (whole, single)]
            equal.append(told[0] == told[1])
    try:
        answer, deprecated = server.complete(ids, 16)
        shim = {"text": answer, "holds": deprecated}
    except urllib.error.HTTPError as error:
        shim = {"holds": None, "why": f"the shim answered {error.code}: a model with random weights has no tokenizer"}
    return {"G3": {"histories": len(equal), "holds": all(equal)}, "G6": shim}


def sessions_command(
    model: Annotated[str, typer.Option("--model", "-m", help="'needle', a folder, a hub id; or a shape with random weights.")] = "needle",
    agents: Annotated[str, typer.Option(help="Numbers of agents, separated by commas; they run one after the other.")] = "4,16",
    minutes: Annotated[
        float, typer.Option(help="Minutes of each run: 30 for the gates G1 and G2, 240 as in ADR 0008.", **number(above=0))
    ] = 30,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "cascade:8",
    history: Annotated[int, typer.Option(help="Tokens of the longest history; then it begins a new session.", **token_count())] = 4096,
    tokens: Annotated[float, typer.Option(help="Factor of the trace's numbers of tokens.", **number(above=0))] = 1 / 16,
    times: Annotated[float, typer.Option(help="Factor of the trace's waits for tools and people.", **number(least=0))] = 1.0,
    longest_wait: Annotated[float, typer.Option(help="The longest wait, in seconds, after that.", **number(above=0))] = 30.0,
    max_batch: Annotated[int, typer.Option(help="Generations at once.", **whole(most=MAX_BATCH))] = 8,
    pages: Annotated[int | None, typer.Option(help="Pages in the pool. [default: enough]", show_default=False, **whole())] = None,
    chunk: BenchChunkOption = 512,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache: bfloat16, float16 or float32.")] = "float32",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Let simulated agents work on a server over gRPC, through the Python client, and compute the gates of
    docs/measured/sessions.md.

    How many tokens they append and generate, and how long they wait, follows a published trace of coding agents
    (TraceLab, arXiv 2606.30560). A run shorter than three buckets of ten minutes does not decide G1 and G2.
    """
    needs_extras("sessions", "server")
    check_dtype(dtype)
    sizes = {"history": history, "tokens": tokens, "times": times, "longest_wait_s": longest_wait, "max_batch": max_batch}
    sizes |= {"pages": pages, "chunk": chunk, "dtype": dtype, "layers": layers}
    load = plan_of(Load, model, parse_lengths(agents, "agents"), minutes, policy, **sizes)
    run(json_out, "sessions", lambda say: load_rows(load, say))


if __name__ == "__main__":
    main(sessions_command)
