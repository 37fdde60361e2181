"""What sessions cost through gRPC and the Python client, with random weights;
with `--idle`, what a step takes longer beside sessions that do nothing.

The server runs in a process of its own on this machine. The clients are threads of this process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks.run import BenchChunkOption, LayersOption, PackedOption, ShapeOption, config_of_shape, main, plan_of, run
from benchmarks.sessions import PAGE_SIZE, ServerProcess, check_chunk, page_of
from kvjax.client import Client, Session
from kvjax.policies.decode import parse
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import MAX_BATCH, JsonOption, token_count, whole
from pallas_kernels.core.optional import needs_extras
from pallas_kernels.core.results import device_here, provenance

if TYPE_CHECKING:
    from benchmarks.compiling import Compiled

Say = Callable[[str], None]
"""A function that is called with a text about what is running."""
AGAIN = 3
"""The most rounds of turns for which the whole history is prefilled again."""
SPARE = 4
"""Rounds beyond those that count: the first one, and others in which programs were compiled."""


def counted(rounds: int, run: Callable[[int], dict[str, Any]], say: Say, what: str, *, warm: bool = False) -> list[dict[str, Any]]:
    """What `rounds` calls of `run` return, by number. The first call does not count, unless all is `warm`, nor one in
    which a program was compiled ("compiled"). RuntimeError if there are still such calls after `SPARE`."""
    found: list[dict[str, Any]] = []
    for number in range(rounds + SPARE):
        told = run(number)
        counts = (number > 0 or warm) and not told["compiled"]
        figures = ", ".join(f"{name} {value:.4g}" for name, value in told.items() if isinstance(value, int | float))
        say(f"{what}, round {number}: {figures}{'' if counts else '; not counted'}")
        found += [told] if counts else []
        if len(found) == rounds:
            return found
    raise RuntimeError(f"{what}: programs were compiled in so many of {rounds + SPARE} rounds that only {len(found)} of {rounds} count")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Sessions that generate at once, each with a slot of its own. shape, layers, dtype: of the model. prompt: tokens
    of each history. answer: tokens that each generates. rounds: timed ones, of the engine alone and of the sessions.
    weights: how they are packed, as in `kvjax.load`. idle: sessions with a history of the same length that are open
    beside them in `idle_rows`."""

    shape: str
    layers: int | None
    dtype: str
    policy: str
    sessions: int
    prompt: int
    answer: int
    rounds: int
    chunk: int
    weights: str | None = None
    idle: int = 0

    def __post_init__(self):
        if min(self.sessions, self.prompt, self.rounds) < 1 or self.answer < 2:
            found = f"{self.sessions} sessions of {self.prompt} + {self.answer} tokens, {self.rounds} rounds"
            raise ValueError(f"session-tokens needs at least 1 session of 1 + 2 tokens, and 1 round, got {found}")
        parse(self.policy)
        check_chunk(self.chunk)

    @property
    def pages(self) -> int:
        """In the pool: for the sessions, and for the forks on which they generate; and for the idle ones."""
        return self.sessions * (-(-(self.prompt + self.answer) // PAGE_SIZE) + 2) + self.idle * -(-self.prompt // PAGE_SIZE) + 1

    @property
    def generated(self) -> int:
        """Tokens of one round."""
        return self.sessions * self.answer


def prompts(plan: Tokens, vocab_size: int, seed: int) -> list[list[int]]:
    """Random histories of one round."""
    return np.random.default_rng(seed).integers(0, vocab_size, (plan.sessions, plan.prompt)).tolist()


def tokens_row(plan: Tokens, say: Say = lambda what: None) -> dict[str, Any]:
    """The same requests through `kvjax.Scheduler` alone, and through gRPC and the Python client. Medians of rounds.

    A round of the engine lasts from the first submit to the last completion; one of sessions from the first Generate to
    the last token in the client, with histories that were appended before. Both prefill them. No program is compiled in
    a round that counts. cpu_s: of all threads of a process in a round, as `time.process_time` counts: of the server's
    process for the engine; of the server's and of this one, which holds the clients, for sessions. overhead_s: the
    difference of both, for each generated token. Computing on a CPU is in both, and cancels but for noise.
    """
    say("the server compiles")
    with ServerProcess(serve_tokens, plan) as server:
        say("the engine alone")
        alone = counted(plan.rounds, lambda _: server.ask("engine"), say, "the engine alone")
        say(f"{plan.sessions} sessions")
        told = counted(plan.rounds, lambda number: sessions_round(plan, server, number), say, f"{plan.sessions} sessions")
        alone += [server.ask("engine")]
    row = dataclasses.asdict(plan) | {"op": "session-tokens", "provenance": provenance(server.device)}
    engine = {name: _median(alone, name) for name in alone[0]}
    sessions = {name: _median(told, name) for name in told[0]}
    row |= {"engine": engine, "through_grpc": sessions, "rounds_of_engine": alone, "rounds_through_grpc": told}
    row["engine_tokens_per_s"], row["tokens_per_s"] = plan.generated / engine["seconds"], plan.generated / sessions["seconds"]
    row["overhead_s"] = (sessions["server_cpu_s"] + sessions["client_cpu_s"] - engine["cpu_s"]) / plan.generated
    return row


def idle_rows(plan: Tokens, say: Say = lambda what: None) -> Iterator[dict[str, Any]]:
    """What a token takes in the sessions that generate: with no others open, beside `plan.idle` idle ones, and with
    none again, all on one server. So a machine that became slower meanwhile shows. Medians of rounds, as in
    `tokens_row`.

    An idle session has generated a token, so the cache holds its history. held: sessions, and pages in use, before the
    rounds of a row.
    """
    if plan.idle < 1:
        raise ValueError(f"idle must be at least 1 session, got {plan.idle}")
    say("the server compiles")
    with ServerProcess(serve_tokens, plan) as server, Client(server.address) as client:
        sessions_round(plan, server, 0)
        waiting: list[Session] = []
        for place, (phase, count) in enumerate((("before", 0), ("beside", plan.idle), ("after", 0))):
            for number in range(len(waiting), count):
                say(f"{number:,} of {plan.idle:,} idle sessions are open")
                waiting.append(client.create_session(np.random.default_rng(number).integers(0, server.vocab_size, plan.prompt).tolist()))
                list(waiting[-1].generate(max_new_tokens=1, ignore_eos=True))
            while len(waiting) > count:
                waiting.pop().close()
            held = dict(zip(("sessions", "pages"), server.ask("held"), strict=True))
            say(f"rounds beside {count:,} idle sessions")
            told = [sessions_round(plan, server, place * plan.rounds + number + 1) for number in range(plan.rounds)]
            row = dataclasses.asdict(plan) | {
                "op": "session-idle",
                "phase": phase,
                "open": count,
                "held": held,
                "rounds_through_grpc": told,
            }
            medians = {name: _median(told, name) for name in told[0]}
            yield row | {"through_grpc": medians, "provenance": provenance(server.device)}


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return float(np.median([each[name] for each in rounds]))


class CountingClient(Client):
    """A client that notes the messages of its generations. arrivals: `time.perf_counter()` of each, by thread."""

    def __init__(self, address: str):
        super().__init__(address)
        self.arrivals: collections.defaultdict[int, list[float]] = collections.defaultdict(list)

    def stream(self, request: Any, timeout: float | None) -> Any:
        """Begin a Generate, whose messages are noted."""
        return self._noted(super().stream(request, timeout), self.arrivals[threading.get_ident()])

    def _noted(self, call: Any, arrivals: list[float]) -> Iterator[Any]:
        for message in call:
            arrivals.append(time.perf_counter())
            yield message


def sessions_round(plan: Tokens, server: ServerProcess, number: int) -> dict[str, float]:
    """One round through the client: one thread for each session. gap_p50_s, gap_p95_s: between two messages of a
    session."""
    begin = threading.Barrier(plan.sessions + 1)
    given = prompts(plan, server.vocab_size, number)
    taken = [0] * len(given)
    failed: list[BaseException] = []

    def generate(session: Session, place: int) -> None:
        try:
            begin.wait(60.0)
            for _ in session.generate(max_new_tokens=plan.answer, ignore_eos=True):
                taken[place] += 1
        except BaseException as error:
            failed.append(error)
            raise

    with CountingClient(server.address) as client:
        sessions = [client.create_session(ids) for ids in given]
        threads = [threading.Thread(target=generate, args=each, daemon=True) for each in zip(sessions, range(len(given)), strict=True)]
        for thread in threads:
            thread.start()
        gc.collect()
        programs = server.ask("programs")
        server_cpu, client_cpu, started = server.ask("cpu"), time.process_time(), time.perf_counter()
        begin.wait(60.0)
        for thread in threads:
            thread.join()
        seconds, client_cpu = time.perf_counter() - started, time.process_time() - client_cpu
        server_cpu, programs = server.ask("cpu") - server_cpu, server.ask("programs") - programs
        for session in sessions:
            session.close()
    if failed or set(taken) != {plan.answer}:
        raise RuntimeError(f"{len(failed)} of {plan.sessions} generations failed: {failed[:1]}")
    between = np.concatenate([np.diff(each) for each in client.arrivals.values()])
    spread = {f"gap_p{each}_s": float(np.percentile(between, each)) for each in (50, 95)}
    messages = sum(map(len, client.arrivals.values()))
    told = {"seconds": seconds, "server_cpu_s": server_cpu, "client_cpu_s": client_cpu, "messages": messages, **spread}
    return told | {"compiled": programs}


def serve_tokens(pipe: Any, plan: Tokens) -> None:
    """The server's process of `tokens_row` and `idle_rows`. Words: "engine", a round of the engine alone; "cpu",
    seconds so far; "held", sessions and pages in use; "programs", compiled so far; "end"."""
    from benchmarks.hollow import random_model
    from kvjax.engine.engine import Engine
    from kvjax.serving.bench.decode import config_of

    model = random_model(config_of(plan.shape, plan.layers, plan.dtype), plan.weights)
    sizes = {"pages": plan.pages, "page_size": PAGE_SIZE, "prefill_chunk": plan.chunk, "batch_buckets": (plan.sessions,)}
    engine = Engine(model, plan.policy, **sizes)
    rounds = iter(range(1000))
    heard = _listening()
    words = {"engine": lambda _: _engine_round(plan, engine, next(rounds), heard), "cpu": lambda _: time.process_time(), "held": _held}
    _serve(pipe, engine, plan.sessions, words | {"programs": lambda _: heard.count}, idle=plan.idle)


def _listening() -> Compiled:
    """Counts what this process compiles from now on."""
    import jax

    from benchmarks.compiling import Compiled

    heard = Compiled()
    jax.monitoring.register_event_duration_secs_listener(heard.hear)
    return heard


def _held(runtime: Any) -> tuple[int, int]:
    """Sessions, and pages in use."""
    gauges = runtime.gauges()
    return gauges["sessions"], gauges["device_pages"]


def _engine_round(plan: Tokens, engine: Any, number: int, heard: Compiled) -> dict[str, float]:
    """The same requests through a scheduler of their own, which the idle runtime does not disturb."""
    from kvjax.engine.sampling import Sampling
    from kvjax.scheduler.request import Request
    from kvjax.scheduler.scheduler import Scheduler

    sampling = Sampling(max_new_tokens=plan.answer, ignore_eos=True)
    requests = [Request(ids, sampling) for ids in prompts(plan, engine.config.vocab_size, number)]
    scheduler = Scheduler(engine, slots=plan.sessions, texts=False)
    gc.collect()
    cpu, started, programs = time.process_time(), time.perf_counter(), heard.count
    handles = [scheduler.submit(each) for each in requests]
    while not scheduler.idle:
        scheduler.step()
    told = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "compiled": heard.count - programs}
    if {len(each.completion.token_ids) for each in handles} != {plan.answer}:
        raise RuntimeError("the engine's own round did not generate all tokens")
    return told


def _serve(pipe: Any, engine: Any, slots: int, words: dict[str, Callable[[Any], Any]], idle: int = 0) -> None:
    """Serve sessions until "end". words: what is answered to others; the functions take the runtime. idle: sessions
    beside."""
    from kvjax.serving.server.grpc_server import Server, freeze_live_objects
    from kvjax.serving.server.metrics import Metrics
    from kvjax.serving.server.options import ServerOptions
    from kvjax.serving.sessions.runtime import SessionRuntime

    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=slots, capacity=slots + idle + 8, observe=metrics.observe)
    server = Server(runtime, metrics, ServerOptions(port=0, http_port=0, max_calls=slots + 16))
    freeze_live_objects()  # as `kvjax serve` does
    server.start()
    pipe.send((server.port, server.http_port, engine.config.vocab_size, page_of(engine), device_here()))
    while (word := pipe.recv()) != "end":
        pipe.send(words[word](runtime))
    server.stop(0.0)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Turns of one session with a long history. history: its tokens. appended: new tokens of each turn. answer: tokens
    that a turn generates. rounds: timed turns of each kind."""

    shape: str
    layers: int | None
    dtype: str
    policy: str
    history: int
    appended: int
    answer: int
    rounds: int
    chunk: int

    def __post_init__(self):
        if min(self.history, self.appended, self.answer, self.rounds) < 1:
            found = f"{self.history}, {self.appended}, {self.answer}, {self.rounds}"
            raise ValueError(f"session-turn needs a history, appended and generated tokens, and a round, got {found}")
        parse(self.policy)
        check_chunk(self.chunk)

    @property
    def longest(self) -> int:
        """Tokens of the history after the last turn that there can be."""
        turns, aligning = 2 * (self.rounds + SPARE) + 2, 2 * (self.chunk + self.answer)
        return self.history + self.answer + turns * (self.appended + self.answer) + aligning

    def chunks(self, cached: int, length: int) -> int:
        """Chunks that are computed to prefill positions [cached, length): they begin at multiples of the chunk's
        size."""
        return -(-length // self.chunk) - cached // self.chunk

    @property
    def warm_up(self) -> tuple[int, int]:
        """Places in a chunk, from which a turn computes the fewest chunks that it can, and the most."""
        return 0, self.chunk - 1


def turn_rows(plan: Turns, say: Say = lambda what: None) -> Iterator[dict[str, Any]]:
    """Seconds from the append to the first token in the client: with the session's pages on the device ("resident"), in
    host memory ("demoted"), and the same turn where nothing was kept: a new session of the whole history ("again").
    Medians of rounds; of "again", whose turns are alike, of at most `AGAIN`.

    A turn prefills what is new and the last answer, and how many chunks it computes depends on where in a chunk it
    begins (`chunks` of each turn). So four turns come before those that are timed: two that end at chosen places in a
    chunk, and after each one of the usual length, of the fewest and of the most chunks. The first demoted turn does not
    count either, nor any in which the server compiled a program.

    filled_s: until the first token after the history came in, with what had to be compiled. append_s: of first_s, until
    the append was answered. collecting_s: of first_s and the rest of the turn, in which the server's process collected
    garbage, so that nothing else ran.
    """
    say("the server starts")
    with ServerProcess(serve_turns, plan) as server, Client(server.address, timeout_s=600.0) as client:
        random = np.random.default_rng(0)

        def drawn(count: int) -> list[int]:
            return random.integers(0, server.vocab_size, count).tolist()

        def row(kind: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
            figures = {"op": "session-turn", "kind": kind, "first_s": _median(turns, "first_s"), "filled_s": filled["first_s"]}
            return dataclasses.asdict(plan) | figures | {"turns": turns, "provenance": provenance(server.device)}

        say(f"a history of {plan.history:,} tokens is prefilled")
        history = drawn(plan.history)
        with client.create_session(history) as session:
            filled, answer = _first(server, plan.answer, lambda: session)
            say(f"a history of {plan.history:,} tokens: {filled['first_s']:.1f} s, {filled['compiled']} programs compiled")
            history += answer

            def turn(kind: str, count: int = plan.appended) -> dict[str, Any]:
                if kind == "demoted":
                    server.ask("demote")
                before, new = session.info(), drawn(count)
                if before.demoted != (kind == "demoted"):
                    raise RuntimeError(
                        f"a turn of kind {kind!r} begins with pages {'in host memory' if before.demoted else 'on the device'}"
                    )

                def appended() -> Session:
                    session.append(new)
                    return session

                timed, answer = _first(server, plan.answer, appended)
                chunks = plan.chunks(before.cached_tokens, len(history) + len(new))
                history.extend([*new, *answer])
                return timed | {"chunks": chunks}

            for place in plan.warm_up:
                turn("resident", (place - len(history)) % plan.chunk or plan.chunk)
                say(f"a turn to warm up: chunks {turn('resident')['chunks']}")
            for kind in ("resident", "demoted"):
                yield row(kind, counted(plan.rounds, lambda _, kind=kind: turn(kind), say, kind, warm=kind == "resident"))

        def anew(_: int) -> dict[str, Any]:
            with contextlib.ExitStack() as open_:
                timed, _ = _first(server, plan.answer, lambda: open_.enter_context(client.create_session(history)))
                return timed | {"chunks": plan.chunks(0, len(history))}

        yield row("again", counted(min(plan.rounds, AGAIN), anew, say, "again", warm=True))


def _first(server: ServerProcess, count: int, begin: Callable[[], Session]) -> tuple[dict[str, float], list[int]]:
    """Seconds from the call of `begin`, which brings a session what is new, until the first token of its generation,
    with the numbers of tokens that were prefilled and programs that were compiled; and all tokens. Figures are those
    that `turn_rows` explains."""
    programs, collecting, started = server.ask("programs"), server.ask("collecting"), time.perf_counter()
    session = begin()
    begun = time.perf_counter() - started
    stream = session.generate(max_new_tokens=count, ignore_eos=True)
    tokens = iter(stream)
    first = next(tokens)
    told = {"first_s": time.perf_counter() - started, "append_s": begun}
    answer = [first, *tokens]
    told |= {"prefilled": stream.prefill_tokens, "collecting_s": server.ask("collecting") - collecting}
    return told | {"compiled": server.ask("programs") - programs}, answer


def serve_turns(pipe: Any, plan: Turns) -> None:
    """The server's process of `turn_rows`. Words: "demote", all sessions; "programs", compiled so far; "collecting",
    seconds so far; "end"."""
    from benchmarks.hollow import random_model
    from kvjax.engine.engine import Engine
    from kvjax.serving.bench.decode import config_of

    model = random_model(config_of(plan.shape, plan.layers, plan.dtype))
    pages = -(-plan.longest // PAGE_SIZE) + 2 * plan.answer // PAGE_SIZE + 8
    engine = Engine(model, plan.policy, pages=pages, page_size=PAGE_SIZE, prefill_chunk=plan.chunk, batch_buckets=(1,))

    def demote(runtime: Any) -> bool:
        for session_id in tuple(runtime._core.records):
            runtime.session(session_id).demote()
        return True

    heard, collecting = _listening(), collections_of_garbage()
    words = {"demote": demote, "programs": lambda _: heard.count, "collecting": lambda _: sum(collecting)}
    _serve(pipe, engine, 1, words)


def collections_of_garbage() -> list[float]:
    """Seconds of each collection of garbage in this process from now on, in which no other thread runs Python."""
    seconds: list[float] = []
    started = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - started)

    gc.callbacks.append(note)
    return seconds


def tokens_command(
    shape: ShapeOption = "tiny",
    sessions: Annotated[int, typer.Option(help="Sessions that generate at once, with a slot for each.", **whole(most=MAX_BATCH))] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of each history.", **token_count())] = 64,
    answer: Annotated[int, typer.Option(help="Tokens that each generates.", **whole(2))] = 129,
    rounds: Annotated[int, typer.Option(help="Timed rounds, of the engine alone and through gRPC.", **whole())] = 3,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "dense",
    idle: Annotated[
        int | None,
        typer.Option(
            help="In place of the engine's own run: compare with the same beside so many open sessions that hold a history and do nothing.",
            show_default=False,
            **whole(most=2**20),
        ),
    ] = None,
    chunk: BenchChunkOption = 512,
    weights: PackedOption = "none",
    dtype: BenchDtypeOption = "float32",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Compare sessions through gRPC and the Python client with the engine's own batch run: tokens per second, and the
    host's time for each token beyond that of the engine.

    That time is CPU time of all threads of the server's process and of the clients' process, less that of the engine
    alone. Weights are random.
    """
    needs_extras("session_costs tokens", "server")
    config_of_shape(shape, layers, dtype)
    sizes = {"policy": policy, "sessions": sessions, "prompt": prompt, "answer": answer, "rounds": rounds, "chunk": chunk}
    sizes["weights"] = None if weights == "none" else weights
    plan = plan_of(Tokens, shape, layers, dtype, **sizes, idle=idle or 0)
    if idle is not None:
        return run(json_out, "session-idle", lambda say: idle_rows(plan, say))
    run(json_out, "session-tokens", lambda say: [tokens_row(plan, say)])


def turn_command(
    shape: ShapeOption = "tiny",
    history: Annotated[int, typer.Option(help="Tokens of the session's history.", **token_count())] = 100_000,
    append: Annotated[int, typer.Option(help="New tokens of each turn.", **token_count())] = 200,
    answer: Annotated[int, typer.Option(help="Tokens that each turn generates.", **whole())] = 16,
    rounds: Annotated[int, typer.Option(help="Timed turns of each kind; of those prefilled again, at most three.", **whole())] = 9,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "top:32",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the first token of a turn in a session with a long history: on the device, demoted to host memory, and
    prefilled again.

    It is measured in the Python client, from the append to the first token. Weights are random. A turn computes whole
    chunks, so a smaller --chunk answers sooner, and a larger one reads the history faster. How many it computes depends
    on where in a chunk it begins, so a fair median takes several turns. Turns of the fewest and of the most chunks come
    first, untimed.

    Every turn makes the history longer, so the last kind reads more than --history. While it runs, the kinds are called
    resident, demoted and again, and figures ending in _s are seconds: first_s to the first token, append_s of these
    until the append was answered, collecting_s in which the server collected garbage.
    """
    needs_extras("session_costs turn", "server")
    config_of_shape(shape, layers, dtype)
    sizes = {"policy": policy, "history": history, "appended": append, "answer": answer, "rounds": rounds, "chunk": chunk}
    plan = plan_of(Turns, shape, layers, dtype, **sizes)
    run(json_out, "session-turn", lambda say: turn_rows(plan, say))


if __name__ == "__main__":
    main(tokens=tokens_command, turn=turn_command)
