"""`kvjax bench prefill`, in its three forms. A run yields rows; `show` writes them and prints a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import typer
from rich.console import Console

from kvjax.cache.formats import parse_cache_format
from kvjax.serving.bench.decode import PAGE_SIZE, config_of
from kvjax.serving.bench.prefill import PrefillPlan, dense_at, policies_of, run_prefill_plan
from kvjax.serving.cli.options import named_run, parse_lengths, read_text
from pallas_kernels.bench.formats import show_markdown, stages
from pallas_kernels.bench.prefill import report as prefill_report
from pallas_kernels.bench.results import write_result

if TYPE_CHECKING:
    from kvjax.model import Model
    from kvjax.policies.prefill import PrefillPolicy

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Run:
    """One form of the command.

    kind: the `bench` field of the JSON. begin: (say) -> more fields of the JSON; `say` shows progress. rows: (say, those fields) -> rows.
    table: rows -> Markdown.
    """

    kind: str
    begin: Callable[[Callable], dict[str, Any]]
    rows: Callable[[Callable, dict[str, Any]], Iterator[dict[str, Any]]]
    table: Callable[[Sequence[dict[str, Any]]], str]


def time_run(
    shape: str,
    lengths: str,
    policies: str,
    dtype: str,
    *,
    chunk: int = 8192,
    rounds: int = 1,
    layers: int | None = None,
    packed: Sequence[tuple[str | None, str | None]] = ((None, None),),
    meshes: Sequence[tuple[int, int]] = ((1, 1),),
) -> Run:
    """Time to first token. packed: pairs of how weights and pages are packed. meshes: pairs of tensor and context. ValueError for arguments
    that make no plan."""
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    config = config_of(shape, layers, _dtype(dtype))
    sizes = parse_lengths(lengths), policies_of(policies), chunk, rounds
    kinds = itertools.product(meshes, packed)
    plans = [PrefillPlan(shape, config, *sizes, weights, parse_cache_format(pages, dtype), *each) for each, (weights, pages) in kinds]

    def table(rows: Sequence[dict[str, Any]]) -> str:
        return f"{prefill_report.time_table(rows)}\n\n{prefill_report.split_table(rows)}"

    return Run(
        "prefill", lambda say: {}, lambda say, _: itertools.chain.from_iterable(run_prefill_plan(each, say) for each in plans), table
    )


def layers_run(model: str, lengths: str, policies: str, dtype: str, files: Sequence[Path] = ()) -> Run:
    """The attention of a model's layers over a text. ValueError as in `ops_run`, and for texts that are too short."""
    from kvjax.serving.bench.prefill_layers import layer_rows

    chosen, tokens = _sparse_of(policies), parse_lengths(lengths)
    if odd := [length for length in tokens if length < 1 or length % PAGE_SIZE]:
        raise ValueError(f"--ops of a model takes positive multiples of {PAGE_SIZE} tokens, got {', '.join(map(str, odd))}")
    loaded, ids = _read(model, _dtype(dtype), files, max(tokens))
    for line in dense_at(chosen, tokens):
        Console(stderr=True).print(line)

    def rows(say: Callable, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for length in tokens:
            say(f"{length:,} tokens")
            for row in layer_rows(model, loaded, ids[:length], chosen):
                say(f"{length:,} tokens: {row['policy']} is done")
                yield row

    return Run("prefill-layers", lambda say: {}, rows, prefill_report.layers_table)


def _sparse_of(policies: str) -> list[PrefillPolicy]:
    """The policies except dense; ValueError if there is no other."""
    from kvjax.policies.prefill import DensePrefill

    sparse = [policy for policy in policies_of(policies) if policy != DensePrefill()]
    if not sparse:
        raise ValueError(f"--ops compares sparse policies with dense attention, which it always times; got {policies!r}: name a sparse one")
    return sparse


def _read(model: str, dtype: str | None, files: Sequence[Path], longest: int) -> tuple[Model, list[int]]:
    """A model, and the token ids of texts; ValueError if there are fewer than `longest`."""
    import kvjax
    from kvjax.fidelity.needle import documentation_text, encode_text

    loaded = kvjax.load(model, dtype=dtype)
    prose = "\n\n".join(read_text(file, "--text") for file in files) or documentation_text()
    ids = encode_text(loaded.tokenizer, prose).tolist()
    if len(ids) < longest:
        raise ValueError(f"the text has {len(ids):,} tokens, but the longest prompt has {longest:,}: give more with --text")
    return loaded, ids


def ops_run(shape: str, lengths: str, policies: str, dtype: str, *, baselines: bool = True) -> Run:
    """The attention of one layer of a shape. ValueError if only dense is named."""
    from kvjax.serving.bench.prefill_ops import op_rows, peak_flops

    sparse, tokens = _sparse_of(policies), parse_lengths(lengths)
    _dtype(dtype)

    def begin(say: Callable) -> dict[str, Any]:
        say("peak of a matrix product")
        return {"peak": peak_flops(dtype)}

    def rows(say: Callable, begun: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for length in tokens:
            try:
                options = {"dtype": dtype, "baselines": baselines, "on_progress": say}
                yield from op_rows(shape, length, sparse, begun["peak"]["flops_per_s"], **options)
            except Exception as error:  # the other lengths continue
                named = {
                    "case": f"prompt/{shape}/{length}",
                    "op": "prompt",
                    "shape": shape,
                    "tokens": length,
                    "batch": 1,
                    "policy": policies,
                }
                yield named | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}

    def table(rows: Sequence[dict[str, Any]]) -> str:
        return f"{prefill_report.op_table(rows)}\n\n{prefill_report.steps_table(rows)}"

    return Run("prefill-ops", begin, rows, table)


def measures_run(
    model: str,
    lengths: str,
    policies: str,
    dtype: str | None = None,
    *,
    chunk: int = 2048,
    ablate: bool = False,
    files: Sequence[Path] = (),
) -> Run:
    """What lists capture. ValueError for policies without lists or a window, chunks that are not whole pages, or texts that are too
    short."""
    from kvjax.fidelity.measures import ablation, check_measurable, measure_recorded, record_prefill
    from kvjax.policies.prefill import DensePrefill, MeasureOnceMaskOnce

    chosen = [policy for policy in policies_of(policies) if policy != DensePrefill()]
    if ablate:
        chosen = [v for policy in chosen for v in (ablation(policy) if isinstance(policy, MeasureOnceMaskOnce) else (policy,))]
    check_measurable(chosen)
    if not chosen:
        raise ValueError(f"--measures takes policies that list blocks, or keep sinks and a window, got {policies!r}")
    if chunk < 1 or chunk % PAGE_SIZE:
        raise ValueError(f"chunk {chunk} must be a positive multiple of the page size {PAGE_SIZE}")
    tokens = parse_lengths(lengths)
    loaded, ids = _read(model, None if dtype is None else _dtype(dtype), files, max(tokens))
    stored = loaded.config.compute_dtype
    fields = {"op": "prefill-measures", "shape": model, "batch": 1, "dtype": stored, "chunk": chunk}

    def rows(say: Callable, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for length in tokens:
            say(f"{length:,} tokens: dense")
            recorded = record_prefill(loaded, ids[:length], chunk=chunk, page_size=PAGE_SIZE)
            for policy in chosen:
                say(f"{length:,} tokens: {policy}")
                for row in measure_recorded(recorded, policy):
                    yield fields | row

    return Run("prefill-measures", lambda say: {}, rows, prefill_report.measures_table)


def show(run: Run, json_out: Path | None, implementation: str | None = None) -> list[dict[str, Any]]:
    """Run, show progress, write rows as they arrive, print the table. Returns the rows. implementation: the forced implementation of ops,
    for the file."""
    rows = []
    with stages() as say:
        begun = run.begin(say)
        for row in run.rows(say, begun):
            rows.append(row)
            if json_out is not None:
                write_result(json_out, named_run(run.kind, implementation) | begun | {"rows": rows})
    show_markdown(run.table(rows))
    for row in rows:
        if "failed" in row:
            typer.echo(f"{row['op']} {row['tokens']:,} {row['policy']} failed: {row['failed']}", err=True)
    jax.clear_caches()
    return rows


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name
