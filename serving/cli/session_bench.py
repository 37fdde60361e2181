"""`kvjax bench sessions`, `session-tokens`, `session-turn`. JAX is imported inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.serving.cli.options import LARGEST_BATCH, JsonOption, number, parse_lengths, token_count, whole
from kvjax.serving.cli.scheduling import (
    BenchChunkOption,
    BenchDtypeOption,
    LayersOption,
    ShapeOption,
    check_dtype,
    config_of_shape,
    plan_of,
    run,
)
from pallas_kernels.core.optional import needs_extras


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
    max_batch: Annotated[int, typer.Option(help="Generations at once.", **whole(most=LARGEST_BATCH))] = 8,
    pages: Annotated[int | None, typer.Option(help="Pages in the pool. [default: enough]", show_default=False, **whole())] = None,
    chunk: BenchChunkOption = 512,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache: bfloat16, float16 or float32.")] = "float32",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Let simulated agents work on a server over gRPC, through the Python client, and compute the gates of docs/sessions.md.

    How many tokens they append and generate, and how long they wait, follows a published trace of coding agents (TraceLab, arXiv
    2606.30560). A run shorter than three buckets of ten minutes does not decide G1 and G2.
    """
    needs_extras("kvjax bench sessions", "server")
    from kvjax.serving.bench.session_load import Load, load_rows

    check_dtype(dtype)
    sizes = {"history": history, "tokens": tokens, "times": times, "longest_wait_s": longest_wait, "max_batch": max_batch}
    sizes |= {"pages": pages, "chunk": chunk, "dtype": dtype, "layers": layers}
    load = plan_of(Load, model, parse_lengths(agents, "agents"), minutes, policy, **sizes)
    run(json_out, "sessions", lambda say: load_rows(load, say))


def tokens_command(
    shape: ShapeOption = "tiny",
    sessions: Annotated[int, typer.Option(help="Sessions that generate at once, with a slot for each.", **whole(most=LARGEST_BATCH))] = 64,
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
    dtype: BenchDtypeOption = "float32",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Compare sessions through gRPC and the Python client with the engine's own batch run: tokens per second, and the host's time for each
    token beyond that of the engine.

    That time is CPU time of all threads of the server's process and of the clients' process, less that of the engine alone. Weights are
    random.
    """
    needs_extras("kvjax bench session-tokens", "server")
    from kvjax.serving.bench.session_costs import Tokens, idle_rows, tokens_row

    config_of_shape(shape, layers, dtype)
    sizes = {"policy": policy, "sessions": sessions, "prompt": prompt, "answer": answer, "rounds": rounds, "chunk": chunk}
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
    """Time the first token of a turn in a session with a long history: on the device, demoted to host memory, and prefilled again.

    It is measured in the Python client, from the append to the first token. Weights are random. A turn computes whole chunks, so a smaller
    --chunk answers sooner, and a larger one reads the history faster. How many it computes depends on where in a chunk it begins, so a fair
    median takes several turns. Turns of the fewest and of the most chunks come first, untimed.

    Every turn makes the history longer, so the last kind reads more than --history. While it runs, the kinds are called resident, demoted
    and again, and figures ending in _s are seconds: first_s to the first token, append_s of these until the append was answered,
    collecting_s in which the server collected garbage.
    """
    needs_extras("kvjax bench session-turn", "server")
    from kvjax.serving.bench.session_costs import Turns, turn_rows

    config_of_shape(shape, layers, dtype)
    sizes = {"policy": policy, "history": history, "appended": append, "answer": answer, "rounds": rounds, "chunk": chunk}
    plan = plan_of(Turns, shape, layers, dtype, **sizes)
    run(json_out, "session-turn", lambda say: turn_rows(plan, say))


COMMANDS = {"sessions": sessions_command, "session-tokens": tokens_command, "session-turn": turn_command}
"""Of `kvjax bench`."""
