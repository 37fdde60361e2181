"""`kvjax bill predict` on a mesh of devices: its options, and what it prints. JAX is imported inside the functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import gibibytes, number, parse_lengths, whole

if TYPE_CHECKING:
    from kvjax.bill import Bill
    from kvjax.model import ModelConfig
    from kvjax.policies.decode import DecodePolicy

DevicesOption = Annotated[
    str | None,
    typer.Option(help="Rank all meshes of so many devices, the fastest first, as 8,16 or 8..64 (8, 16, 32 and 64).", show_default=False),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        help="With --devices: memory of each for weights and pages, in GiB or as 80GB; meshes that need more are refused.",
        show_default=False,
        **gibibytes(),
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--exchange-latency-us",
        help="Microseconds of an exchange of two devices; among n it counts log2(n) times. Assumed, not measured; with --link-bandwidth.",
        show_default=False,
        **number(least=0),
    ),
]
LinkBandwidthOption = Annotated[
    float | None,
    typer.Option(
        "--link-bandwidth", help="GB/s that a device receives from others. Assumed, not measured.", show_default=False, **number(above=0)
    ),
]
NetworkLatencyOption = Annotated[
    float | None,
    typer.Option(
        "--network-latency-us", help="Microseconds of a hop between hosts. [default: as within one]", show_default=False, **number(least=0)
    ),
]
NetworkOption = Annotated[
    float | None,
    typer.Option(
        "--network-bandwidth",
        help="GB/s that a device receives from another host. [default: as within one]",
        show_default=False,
        **number(above=0),
    ),
]
HostOption = Annotated[
    int | None,
    typer.Option("--host-devices", help="Devices of one host. [default: the bill's, which is 8]", show_default=False, **whole()),
]
PrefillsOption = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        help="With --tensor and --context: what prompts of these lengths exchange by these prefill policies, separated by commas, in place "
        "of a step.",
        show_default=False,
    ),
]


def with_links(
    bill: Bill, latency: float | None, link: float | None, network_latency: float | None, network: float | None, host_devices: int | None
) -> Bill:
    """The bill with terms of a mesh set by hand: those of the options that were given."""
    from kvjax.bill.mesh_terms import assumed_terms

    terms = bill.mesh
    if latency is not None:
        if link is None:
            raise typer.BadParameter("needs --link-bandwidth", param_hint="--exchange-latency-us")
        terms = assumed_terms(latency, link)
    elif link is not None:
        if terms is None:
            raise typer.BadParameter("needs --exchange-latency-us: this bill has no latency of an exchange", param_hint="--link-bandwidth")
        terms = dataclasses.replace(terms, link_per_s=link * 1e9, assumed=(*terms.assumed, f"links of {link:g} GB/s"))
    given = {
        "network_s": None if network_latency is None else network_latency * 1e-6,
        "network_per_s": None if network is None else network * 1e9,
        "host_devices": host_devices,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if terms is None and given:
        raise typer.BadParameter("is about exchanges, and this bill has no terms for them", param_hint="--network-..., --host-devices")
    return bill if terms is None else dataclasses.replace(bill, mesh=dataclasses.replace(terms, **given))


def device_counts(text: str) -> tuple[int, ...]:
    """Counts of `--devices`: "8,16", or "8..64", which doubles. ValueError for anything else."""
    low, dots, high = text.partition("..")
    if dots and not (low.strip() and high.strip()):
        raise ValueError(f"devices {text!r} lack an end: write both, as 8..64")
    if not dots:
        if "-" in text:
            raise ValueError(f"devices {text!r} are no counts: write 8,16, or 8..64 for 8, 16, 32 and 64")
        return parse_lengths(text, "devices")
    (first,), (last,) = parse_lengths(low, "devices"), parse_lengths(high, "devices")
    if last < first:
        raise ValueError(f"devices {text!r} begin with more than they end with: write the smaller number first, as {last}..{first}")
    return tuple(first << power for power in range((last // first).bit_length()))


PART_COLUMNS = ("tokens", "batch", "policy", "part of the step", "MB", "ms", "from")
MESH_COLUMNS = (
    "devices",
    "tensor",
    "context",
    "tokens",
    "batch",
    "policy",
    "ms",
    "tokens/s",
    "of each",
    "ms exchanging",
    "GiB each",
    "from",
)


def show_parts(bill: Bill, config: ModelConfig, named: Sequence[DecodePolicy], cells: Sequence[tuple[int, int]], **options: Any) -> None:
    """Print the parts of every step. cells: (length, batch). options: as for `step_parts`."""
    from kvjax.bill.meshes import step_parts
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    rows = []
    for (length, batch), policy in itertools.product(cells, named):
        for part in step_parts(bill, config, policy, length, batch, **options):
            size = f"{part.bytes / 1e6:,.3f}" if part.bytes else ""
            rows.append((f"{length:,}", str(batch), name_of(policy), part.name, size, f"{part.seconds * 1e3:.3f}", part.mark))
    show(table(PART_COLUMNS, rows, left=4, title="parts, on one device"))


PREFILL_COLUMNS = ("tokens", "prefill", "exchange", "axis", "count", "GB received", "s", "from")


def show_prefill(
    bill: Bill, config: ModelConfig, policies: str, lengths: Sequence[int], chunk: int, *, tensor: int, context: int, **options: Any
) -> None:
    """Print what a prompt of each length exchanges on a mesh, and for how long by the bill's terms. policies: names, separated by commas.
    options: as for `prompt_exchanges`."""
    from kvjax.bill.prefill_exchanges import PREFILL_MARKS, prefill_parts
    from kvjax.serving.bench.prefill import policies_of
    from pallas_kernels.core.tables import show, table

    if tensor * context == 1:
        raise typer.BadParameter("needs --tensor or --context: one device exchanges nothing", param_hint="--prefill")
    if chunk % options["page_size"]:
        said = f"is {chunk}, and must be a multiple of the page size {options['page_size']} (--page-size)"
        raise typer.BadParameter(said, param_hint="--prefill-chunk")
    rows, marks = [], {}
    for length, policy in itertools.product(lengths, policies_of(policies)):
        parts = prefill_parts(bill.mesh, config, policy, length, chunk, tensor=tensor, context=context, **options)
        for each in parts:
            seconds = "" if each.seconds is None else f"{each.seconds:.3f}"
            size = f"{each.received / 1e9:,.3f}"
            rows.append((f"{length:,}", str(policy), each.name, each.axis, f"{each.count:,}", size, seconds, each.mark))
            marks[each.mark] = None
        total = "" if bill.mesh is None else f"{sum(each.seconds for each in parts):.3f}"
        counts = f"{sum(each.count for each in parts):,}", f"{sum(each.received for each in parts) / 1e9:,.3f}"
        rows.append((f"{length:,}", str(policy), "all", "", *counts, total, ""))
    typer.echo(str(bill))
    show(table(PREFILL_COLUMNS, rows, left=4, title=f"exchanges of one device in chunks of {chunk:,} tokens"))
    typer.echo("not counted: what a device computes; exchanges beside which it goes on computing")
    for mark in marks:
        typer.echo(f"{mark}: {PREFILL_MARKS[mark]}")


SHOWN = 4
"""Reasons that an error gives, where no mesh can be."""


def _remedy(counts: Sequence[int], memory: float | None) -> str:
    below = max(1, max(counts)).bit_length() - 1
    more = "" if memory is None else ", more of them, or a greater --memory"
    return f"give powers of two, as {1 << below},{2 << below}{more}"


def show_meshes(
    bill: Bill,
    config: ModelConfig,
    named: Sequence[DecodePolicy],
    cells: Sequence[tuple[int, int]],
    counts: Sequence[int],
    memory: float | None,
    **options: Any,
) -> None:
    """Print all meshes of each number of devices, the fastest first, why others are refused, and why figures are projections. cells:
    (length, batch). memory: GiB. options: as for `rank_meshes`."""
    from kvjax.bill.meshes import rank_meshes, reasons_of
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    limit, rows, found, refused = None if memory is None else int(memory * 2**30), [], [], {}
    for count, (length, batch), policy in itertools.product(counts, cells, named):
        choices = rank_meshes(bill, config, policy, length, batch, count, memory_bytes=limit, **options)
        found += choices
        for each in choices:
            first = str(count), str(each.tensor), str(each.context), f"{length:,}", str(batch), name_of(policy)
            if each.found is None:
                refused[f"tensor {each.tensor} x context {each.context}: {each.refused}"] = None
                continue
            seconds, size = each.found.seconds, f"{each.device_bytes / 2**30:.1f}"
            rows.append(
                (
                    *first,
                    f"{seconds * 1e3:.3f}",
                    f"{batch / seconds:,.0f}",
                    f"{batch / seconds / count:,.1f}",
                    f"{each.found.exchange_s * 1e3:.3f}",
                    size,
                    each.mark,
                )
            )
    if not rows:
        why = "; ".join(list(refused)[:SHOWN]) + (f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else "")
        said = f"no mesh of {' or '.join(map(str, counts))} devices can run this ({why}): {_remedy(counts, memory)}"
        raise typer.BadParameter(said, param_hint="--devices")
    typer.echo(str(bill))
    show(table(MESH_COLUMNS, rows, left=6))
    if limit is None:
        typer.echo("memory of the devices was not looked at: --memory")
    for mesh in refused:
        typer.echo(f"refused: {mesh}")
    for reason in reasons_of(found):
        typer.echo(f"projection: {reason}")
