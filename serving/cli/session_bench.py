"""`kvjax bench sessions`. JAX is imported inside the command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.serving.cli.options import LARGEST_BATCH, JsonOption, number, parse_lengths, token_count, whole
from kvjax.serving.cli.scheduling import BenchChunkOption, LayersOption, check_dtype, plan_of, run
from pallas_kernels.extras import needs_extras


def sessions_command(
    model: Annotated[str, typer.Option("--model", "-m", help="'needle', a folder, a hub id; or a shape with random weights.")] = "needle",
    agents: Annotated[str, typer.Option(help="Numbers of agents, separated by commas; they run one after the other.")] = "4,16",
    minutes: Annotated[
        float, typer.Option(help="Minutes of each run: 30 for the gates G1 and G2, 240 as in ADR 0008.", **number(above=0))
    ] = 30,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "top:8",
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
    """Let simulated agents work on a server over gRPC, through the Python client, and compute the gates of ADR 0008.

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


COMMANDS = {"sessions": sessions_command}
"""Of `kvjax bench`."""
