"""`kvjax serve`: sessions over gRPC."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    CacheFormatOption,
    ChunkOption,
    ContextOption,
    DeviceMemoryOption,
    DtypeOption,
    LoraOption,
    MaxMissedOption,
    MaxPositionsOption,
    ModelOption,
    PageSizeOption,
    TensorOption,
    WeightsOption,
    byte_count,
    load_model,
    named_as_options,
    number,
    token_count,
    watched,
    whole,
)
from kvjax.serving.sessions.limits import MAX_HISTORY, MAX_POLICIES
from kvjax.serving.sessions.throttle import MESSAGES_PER_SECOND
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.engine.engine import Engine
    from kvjax.model.protocols import Model
    from kvjax.serving.server.grpc_server import Server

PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help="What each decode step reads. Give it again for others that sessions may name.",
        show_default=False,
    ),
]
AllowedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-policy",
        help="A built-in policy that sessions may name, too, as top:32, or a form with '*', as 'window:*'. It must need no other index "
        "than those of --policy. Give it again for more.",
        show_default=False,
    ),
]
MaxPoliciesOption = Annotated[
    int, typer.Option(help="Distinct policies that sessions bring in by forms with '*'. Each compiles at its first use.", **whole())
]
WarmupOption = Annotated[
    int | None,
    typer.Option(
        help="Before listening, compile every policy's steps for histories of up to so many tokens, as 32k. Others wait while steps of "
        "longer ones are compiled. [default: one page]",
        show_default=False,
        **token_count(),
    ),
]
HistoryOption = Annotated[int, typer.Option(help="The most tokens of one session's history, as 4M.", **token_count())]
MessagesOption = Annotated[
    float,
    typer.Option(help="Messages with tokens, in all streams together. Beyond that, a message has several tokens.", **number(above=0)),
]
DemoteOption = Annotated[
    float | None,
    typer.Option(
        help="Move pages of a session that has been idle for so long to host memory. [default: only when others need the room]",
        show_default=False,
        **number(above=0),
    ),
]
HostMemoryOption = Annotated[
    int | None,
    typer.Option(
        "--host-memory", help="Host memory for pages of idle sessions, as 64GB. [default: no limit]", show_default=False, **byte_count()
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a history that stay in the cache, as 32k; older ones are dropped. [default: all]",
        show_default=False,
        **token_count(),
    ),
]

ClipOption = Annotated[
    bool, typer.Option("--clip-max-tokens", help="Lower max_tokens of requests to /v1 to the room there is, in place of refusing them.")
]
RateOption = Annotated[
    float | None, typer.Option(help="Calls per second of each bearer token. [default: no limit]", show_default=False, **number(above=0))
]
StallOption = Annotated[
    float,
    typer.Option(
        help="A client that takes nothing of what is sent to it, or does not send its request, for so long is cut off.", **number(above=0)
    ),
]


def serve_command(
    model: ModelOption,
    policy: PoliciesOption = None,
    max_missed: MaxMissedOption = None,
    allow_policy: AllowedOption = None,
    max_policies: MaxPoliciesOption = MAX_POLICIES,
    warmup_tokens: WarmupOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on. One that other machines reach needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of gRPC; 0 chooses a free one.", **whole(0, 65_535))] = 50051,
    http_port: Annotated[
        int | None,
        typer.Option(help="Port of HTTP: /v1, /metrics, /healthz. [default: no HTTP]", show_default=False, **whole(0, 65_535)),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A file with bearer tokens, one a line: calls must carry one.", show_default=False)
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PEM file of a certificate chain.", show_default=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(dir_okay=False, help="PEM file of its key.", show_default=False)] = None,
    capacity: Annotated[
        int, typer.Option(help="Sessions at once. At capacity, a new one ends the idle one used longest ago.", **whole())
    ] = 64,
    max_batch: Annotated[int, typer.Option(help="Generations at once; more wait.", **whole(most=MAX_BATCH))] = 8,
    max_gap_ms: Annotated[
        float | None,
        typer.Option(
            help="Longest time between two tokens while others are prefilled. [default: no bound]", show_default=False, **number(above=0)
        ),
    ] = None,
    idle_minutes: Annotated[float, typer.Option(help="An idle session ends after so long.", **number(above=0))] = 30.0,
    demote_seconds: DemoteOption = None,
    host_memory: HostMemoryOption = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for these pages when --host-memory is full; needs --disk-size, too.", show_default=False
        ),
    ] = None,
    disk_size: Annotated[int | None, typer.Option(help="Its largest size, as 20GB.", show_default=False, **byte_count())] = None,
    window: WindowOption = None,
    max_history: HistoryOption = MAX_HISTORY,
    max_tokens: Annotated[int, typer.Option(help="The most token ids in one call.", **token_count())] = 2**20,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens that one call generates.", **token_count())] = 32_768,
    clip_max_tokens: ClipOption = False,
    max_calls: Annotated[int, typer.Option(help="Calls at once.", **whole(most=2**14))] = 256,
    rate: RateOption = None,
    messages_per_second: MessagesOption = MESSAGES_PER_SECOND,
    stall_seconds: StallOption = 60.0,
    state: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Keep histories in this folder, so that a restart brings sessions back.", show_default=False),
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="How long calls may still run after SIGTERM.", **number(least=0))] = 10.0,
    pages: Annotated[
        int | None,
        typer.Option(
            help="Pages in the pool. [default: as many as fit, at most for --max-batch longest sequences]", show_default=False, **whole()
        ),
    ] = None,
    device_memory: DeviceMemoryOption = None,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    cache_format: CacheFormatOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    lora: LoraOption = None,
    max_positions: MaxPositionsOption = None,
    tensor: TensorOption = 1,
    context: ContextOption = 1,
) -> None:
    """Serve sessions over gRPC, until SIGTERM or Ctrl-C.

    With --http-port, clients of OpenAI's API get single answers, too: that part is deprecated, and keeps no cache.

    Clients send token ids: `python -m kvjax.client.chat` is one, and `kvjax.client` is for others. Each call is logged to stderr as one
    line of JSON, without tokens or text.
    """
    needs_extras("kvjax serve", "server")
    if len({disk is None, disk_size is None, disk is None or host_memory is None}) > 1:
        raise typer.BadParameter("--disk goes together with --disk-size and --host-memory: give all three", param_hint="--disk")
    named = policy or [None]
    policies = [each if each == "dense" and len(named) > 1 else watched(each, max_missed) for each in named]
    from kvjax.serving.batch.setup import mesh_of
    from kvjax.serving.server.grpc_server import Server
    from kvjax.serving.server.metrics import Metrics
    from kvjax.serving.server.options import ServerOptions
    from kvjax.serving.sessions.runtime import SessionRuntime

    name = "+".join([model, *(lora or [])])
    options = ServerOptions(
        host=host, port=port, http_port=http_port, tokens=_tokens(token_file), certificate=_certificate(tls_certificate, tls_key),
        max_tokens=max_tokens, max_new_tokens=max_new_tokens, max_calls=max_calls, calls_per_second=rate,
        messages_per_second=messages_per_second, stall_s=stall_seconds, model_name=name, clip_max_tokens=clip_max_tokens,
    )  # fmt: skip
    mesh = mesh_of(tensor, context)
    split = {"mesh": mesh, "cache_format": cache_format, "page_size": page_size, "prefill_chunk": prefill_chunk}
    loaded = load_model(model, dtype, max_positions, mesh, weights, lora)
    engine = _engine(loaded, policies, max_batch, pages, device_memory, split)
    metrics = Metrics()
    limits = {"allow_policies": allow_policy or (), "max_policies": max_policies, "max_history": max_history}
    limits |= {"capacity": capacity, "idle_ttl_s": 60 * idle_minutes, "demote_after_s": demote_seconds, "window": window}
    limits |= {"host_bytes": host_memory, "disk": disk, "disk_bytes": disk_size, "state": state}
    runtime = SessionRuntime(engine, slots=max_batch, max_gap_ms=max_gap_ms, observe=metrics.observe, **limits)
    server = Server(runtime, metrics, options)
    for each in runtime.policies:  # so that no client waits for a compiler
        typer.echo(f"compiling {each}", err=True)
        runtime.warmup(each, warmup_tokens)
    typer.echo(f"{name}: {engine.policy.describe()}, {engine.allocators['full'].total:,} pages of {page_size} tokens", err=True)
    if state is not None:
        typer.echo(f"sessions from {state}: {runtime.gauges()['sessions']:,}", err=True)
    _until_told(server, drain_seconds)


def _engine(
    model: Model, policies: list[str | None], max_batch: int, pages: int | None, device_bytes: int | None, split: dict[str, Any]
) -> Engine:
    """The engine of a server. split: arguments of `Engine` that say how the cache is split. Without a size, as many pages as fit."""
    from kvjax.engine.engine import Engine
    from kvjax.serving.batch.setup import plan_beside_weights

    first, *others = policies
    with named_as_options():
        if pages is None and device_bytes is None:
            of_pages = split["page_size"], split["prefill_chunk"]
            plan = plan_beside_weights(model, first, None, *of_pages, max_batch, split["mesh"], split["cache_format"])
            longest = -(-model.config.max_positions // split["page_size"])
            pages = max(1, min(plan.pages_that_fit, max_batch * longest))
        return Engine(model, first, policies=others, batch_buckets=(max_batch,), pages=pages, device_bytes=device_bytes, **split)


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


def _content(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint=option) from None
