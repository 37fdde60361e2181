"""What the lists of a prefill policy capture of attention, and the error of its outputs, with a real model and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from benchmarks import prefill_tables as prefill_report
from benchmarks.prefill_quality import ablation, check_measurable, measure_recorded, record_prefill
from benchmarks.run import main, read_prompt, run
from kvjax.policies.prefill import DensePrefill, MeasureOnceMaskOnce
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.bench.prefill import policies_of
from kvjax.serving.cli.bench import exit_unless_timed
from kvjax.serving.cli.options import DtypeOption, ImplementationOption, JsonOption, TextOption, forced_to, parse_lengths, whole


def measures_command(
    shape: Annotated[str, typer.Option(help="A model folder, hub id or 'needle'.")] = "needle",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "8k,16k",
    policies: Annotated[str, typer.Option(help="Prefill policies, separated by commas.")] = "momo:128/8",
    chunk: Annotated[int, typer.Option(help="Tokens per prefill step, a multiple of 128.", **whole())] = 2048,
    dtype: DtypeOption = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Vary gamma, chi, k, k_exact, the estimate, trimming and correction.")] = False,
    text: TextOption = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
) -> None:
    """Measure how much of attention the lists of each policy capture, and the error of outputs, layer by layer."""
    chosen = [policy for policy in policies_of(policies) if policy != DensePrefill()]
    if ablate:
        chosen = [v for policy in chosen for v in (ablation(policy) if isinstance(policy, MeasureOnceMaskOnce) else (policy,))]
    check_measurable(chosen)
    if not chosen:
        raise ValueError(f"policies that list blocks, or keep sinks and a window, can be measured, got {policies!r}")
    if chunk % PAGE_SIZE:
        raise ValueError(f"chunk {chunk} must be a positive multiple of the page size {PAGE_SIZE}")
    tokens = parse_lengths(lengths)
    loaded, ids = read_prompt(shape, dtype, text or (), max(tokens))
    fields = {"op": "prefill-measures", "shape": shape, "batch": 1, "dtype": loaded.config.compute_dtype, "chunk": chunk}

    def rows_of(say: Callable) -> Iterator[dict[str, Any]]:
        for length in tokens:
            say(f"{length:,} tokens: dense")
            recorded = record_prefill(loaded, ids[:length], chunk=chunk, page_size=PAGE_SIZE)
            for policy in chosen:
                say(f"{length:,} tokens: {policy}")
                for row in measure_recorded(recorded, policy):
                    yield fields | row

    with forced_to(implementation):
        rows = run(json_out, "prefill-measures", rows_of, table_of=prefill_report.measures_table, implementation=implementation)
    exit_unless_timed(rows)


if __name__ == "__main__":
    main(measures_command)
