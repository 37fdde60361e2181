"""`kvjax serve`: sessions over gRPC."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.serving.cli.options import (
    ALONE,
    MEMORY,
    OUTPUT,
    POLICY,
    DraftOption,
    DraftWeightsOption,
    EngineOptions,
    byte_count,
    named_as_options,
    number,
    option,
    several_policies,
    takes_engine,
    token_count,
    whole,
)
from kvjax.serving.sessions.limits import MAX_HISTORY, MAX_POLICIES
from kvjax.serving.sessions.throttle import MESSAGES_PER_SECOND
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.serving.server.grpc_server import Server

IdleOption = Annotated[
    int | None, option("Host memory for pages of idle sessions, as 64GB. [default: no limit]", panel=MEMORY, **byte_count())
]
FolderOption = Annotated[
    Path | None, option("Folder for these pages when --host-memory is full; needs --disk-size, too.", panel=MEMORY, file_okay=False)
]


@takes_engine(
    first=("model", "policy", "http_port", "max_batch", "state"),
    without=("reuse", "reuse_any", *ALONE),
    policy=several_policies(more=" Sessions may name any of them."),
    host_memory=IdleOption,
    disk=FolderOption,
)
def serve_command(
    engine: EngineOptions,
    allow_policy: Annotated[
        list[str] | None,
        option(
            "A built-in policy that sessions may name, too, as top:32, or a form with '*', as 'window:*'. It must need no other index than "
            "those of --policy. Give it again for more.",
            panel=POLICY,
        ),
    ] = None,
    max_policies: Annotated[
        int, option("Distinct policies that sessions bring in by forms with '*'. Each compiles at its first use.", panel=POLICY, **whole())
    ] = MAX_POLICIES,
    warmup_tokens: Annotated[
        int | None,
        option(
            "Before listening, compile every policy's steps for histories of up to so many tokens, as 32k. Others wait while steps of "
            "longer ones are compiled. [default: one page]",
            **token_count(),
        ),
    ] = None,
    host: Annotated[str, option("Address to listen on. One that other machines reach needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, option("Port of gRPC; 0 chooses a free one.", **whole(0, 65_535))] = 50051,
    http_port: Annotated[int | None, option("Port of HTTP: /v1, /metrics, /healthz. [default: no HTTP]", **whole(0, 65_535))] = None,
    token_file: Annotated[Path | None, option("A file with bearer tokens, one a line: calls must carry one.", dir_okay=False)] = None,
    tls_certificate: Annotated[Path | None, option("PEM file of a certificate chain.", dir_okay=False)] = None,
    tls_key: Annotated[Path | None, option("PEM file of its key.", dir_okay=False)] = None,
    capacity: Annotated[int, option("Sessions at once. At capacity, a new one ends the idle one used longest ago.", **whole())] = 64,
    max_gap_ms: Annotated[
        float | None, option("Longest time between two tokens while others are prefilled. [default: no bound]", **number(above=0))
    ] = None,
    draft: DraftOption = None,
    draft_weights: DraftWeightsOption = None,
    idle_minutes: Annotated[float, option("An idle session ends after so long.", **number(above=0))] = 30.0,
    demote_seconds: Annotated[
        float | None,
        option(
            "Move pages of a session that has been idle for so long to host memory. [default: only when others need the room]",
            panel=MEMORY,
            **number(above=0),
        ),
    ] = None,
    window: Annotated[
        int | None,
        option("Tokens of a history that stay in the cache, as 32k; older ones are dropped. [default: all]", panel=MEMORY, **token_count()),
    ] = None,
    max_history: Annotated[int, option("The most tokens of one session's history, as 4M.", **token_count())] = MAX_HISTORY,
    max_tokens: Annotated[int, option("The most token ids in one call.", **token_count())] = 2**20,
    max_new_tokens: Annotated[int, option("The most tokens that one call generates.", **token_count())] = 32_768,
    clip_max_tokens: Annotated[
        bool, option("Lower max_tokens of requests to /v1 to the room there is, in place of refusing them.", "--clip-max-tokens")
    ] = False,
    max_calls: Annotated[int, option("Calls at once.", **whole(most=2**14))] = 256,
    rate: Annotated[float | None, option("Calls per second of each bearer token. [default: no limit]", **number(above=0))] = None,
    messages_per_second: Annotated[
        float,
        option(
            "Messages with tokens, in all streams together. Beyond that, a message has several tokens.", panel=OUTPUT, **number(above=0)
        ),
    ] = MESSAGES_PER_SECOND,
    stall_seconds: Annotated[
        float,
        option(
            "A client that takes nothing of what is sent to it, or does not send its request, for so long is cut off.", **number(above=0)
        ),
    ] = 60.0,
    state: Annotated[Path | None, option("Keep histories in this folder, so that a restart brings sessions back.", file_okay=False)] = None,
    drain_seconds: Annotated[float, option("How long calls may still run after SIGTERM.", **number(least=0))] = 10.0,
) -> None:
    """Serve sessions over gRPC, until SIGTERM or Ctrl-C.

    With --http-port, clients of OpenAI's API get single answers, too: that part is deprecated, and keeps no cache.

    Clients send token ids: `python -m kvjax.client.chat` is one, and `kvjax.client` is for others. Each call is logged
    to stderr as one line of JSON, without tokens or text.
    """
    needs_extras("kvjax serve", "server")
    kept = {"host_bytes": engine.host_memory, "disk": engine.disk, "disk_bytes": engine.disk_size}
    if len({engine.disk is None, engine.disk_size is None, engine.disk is None or engine.host_memory is None}) > 1:
        raise typer.BadParameter("--disk goes together with --disk-size and --host-memory: give all three", param_hint="--disk")
    with named_as_options():
        setup = dataclasses.replace(engine, host_memory=None, disk=None, disk_size=None).setup(draft=draft, draft_weights=draft_weights)
    from kvjax.serving.server.grpc_server import Server
    from kvjax.serving.server.metrics import Metrics
    from kvjax.serving.server.options import ServerOptions
    from kvjax.serving.sessions.runtime import SessionRuntime

    name = "+".join([engine.model, *(engine.lora or [])])
    options = ServerOptions(
        host=host, port=port, http_port=http_port, tokens=_tokens(token_file), certificate=_certificate(tls_certificate, tls_key),
        max_tokens=max_tokens, max_new_tokens=max_new_tokens, max_calls=max_calls, calls_per_second=rate,
        messages_per_second=messages_per_second, stall_s=stall_seconds, model_name=name, clip_max_tokens=clip_max_tokens,
    )  # fmt: skip
    loaded = setup.load()
    longest = -(-loaded.config.max_positions // engine.page_size)
    with named_as_options():
        (runs,) = setup.fitted(loaded, lambda: engine.max_batch * longest).engines(loaded)
    metrics = Metrics()
    limits = {"allow_policies": allow_policy or (), "max_policies": max_policies, "max_history": max_history}
    limits |= {"capacity": capacity, "idle_ttl_s": 60 * idle_minutes, "demote_after_s": demote_seconds, "window": window}
    limits |= {"slots": engine.max_batch, "max_gap_ms": max_gap_ms, "draft": draft}
    runtime = SessionRuntime(runs, observe=metrics.observe, state=state, **kept, **limits)
    server = Server(runtime, metrics, options)
    for each in runtime.policies:  # so that no client waits for a compiler
        typer.echo(f"compiling {each}", err=True)
        runtime.warmup(each, warmup_tokens)
    typer.echo(f"{name}: {runs.policy.describe()}, {runs.allocators['full'].total:,} pages of {engine.page_size} tokens", err=True)
    if state is not None:
        typer.echo(f"sessions from {state}: {runtime.gauges()['sessions']:,}", err=True)
    _until_told(server, drain_seconds)


def _until_told(server: Server, drain_seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C, and then end well; at once after a second one."""
    from kvjax.serving.server.grpc_server import allow_open_files, freeze_live_objects

    log = logging.getLogger("kvjax.server")
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.setLevel(logging.INFO)
    ended, hurry = threading.Event(), threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: (hurry if ended.is_set() else ended).set())
    allow_open_files()
    freeze_live_objects()
    server.start()
    host = server.options.host
    http = "" if server.http_port is None else f", http{'s' if server.options.certificate else ''}://{host}:{server.http_port}"
    typer.echo(f"listening on {host}:{server.port}{http}", err=True)
    ended.wait()
    typer.echo(f"ending: calls may run for {drain_seconds:g} s more; a second Ctrl-C ends them now", err=True)
    server.stop(drain_seconds, hurry)


def _tokens(path: Path | None) -> tuple[str, ...]:
    """The bearer tokens of a file, one a line."""
    if path is None:
        return ()
    tokens = tuple(line.strip() for line in _content(path, "--token-file").decode(errors="replace").splitlines() if line.strip())
    if not tokens:
        raise typer.BadParameter(f"{path} holds no token", param_hint="--token-file")
    return tokens


def _certificate(chain: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    if (chain is None) != (key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key go together: give both, or neither", param_hint="--tls-key")
    return None if chain is None else (_content(chain, "--tls-certificate"), _content(key, "--tls-key"))


MAX_FILE_BYTES = 1 << 20
"""Of a file of tokens, certificates or a key."""


def _content(path: Path, option: str) -> bytes:
    """What a small file holds."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint=option) from None
    if len(content) > MAX_FILE_BYTES:
        said = f"{path} holds more than {MAX_FILE_BYTES:,} bytes: it is no file of tokens, certificates or a key"
        raise typer.BadParameter(said, param_hint=option)
    return content
