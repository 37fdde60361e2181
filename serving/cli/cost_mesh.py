"""`kvjax cost predict` on a mesh of devices: its options, and what it prints. JAX is imported inside the functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import gibibytes, number, parse_lengths

if TYPE_CHECKING:
    from kvjax.cost_model import CostModel
    from kvjax.model.config import ModelConfig
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
        help="Microseconds of an exchange between devices. Assumed, not measured; with --link-bandwidth.",
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
PrefillsOption = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        help="With --tensor and --context: what prompts of these lengths exchange by these prefill policies, separated by commas, in place "
        "of a step.",
        show_default=False,
    ),
]


def with_exchanges(cost: CostModel, latency: float | None, link: float | None) -> CostModel:
    """The cost model with a term of exchanges set by hand, where its options were given."""
    from kvjax.cost_model.exchanges import assumed_exchanges

    if latency is not None and link is None:
        raise typer.BadParameter("needs --link-bandwidth", param_hint="--exchange-latency-us")
    if latency is not None:
        return dataclasses.replace(cost, exchanges=assumed_exchanges(latency, link))
    if link is None:
        return cost
    if (term := cost.exchanges) is None:
        said = "needs --exchange-latency-us: this cost model has no latency of an exchange"
        raise typer.BadParameter(said, param_hint="--link-bandwidth")
    assumed = (*term.assumed, f"links of {link:g} GB/s")
    return dataclasses.replace(cost, exchanges=dataclasses.replace(term, link_per_s=link * 1e9, assumed=assumed))


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


PREFILL_COLUMNS = ("tokens", "prefill", "exchange", "axis", "count", "GB received", "s")


def show_prefill(
    cost: CostModel, config: ModelConfig, policies: str, lengths: Sequence[int], chunk: int, *, tensor: int, context: int, page_size: int
) -> None:
    """Print what a prompt of each length exchanges on a mesh, and for how long by the term of steps. policies: names, separated by
    commas."""
    from kvjax.cost_model.exchanges import PREFILL_PARTS, prompt_exchanges
    from kvjax.serving.bench.prefill import policies_of
    from pallas_kernels.core.tables import show, table

    if tensor * context == 1:
        raise typer.BadParameter("needs --tensor or --context: one device exchanges nothing", param_hint="--prefill")
    if chunk % page_size:
        said = f"is {chunk}, and must be a multiple of the page size {page_size} (--page-size)"
        raise typer.BadParameter(said, param_hint="--prefill-chunk")
    rows = []
    for length, policy in itertools.product(lengths, policies_of(policies)):
        found = prompt_exchanges(config, policy, length, chunk, tensor=tensor, context=context, page_size=page_size)
        groups = {(PREFILL_PARTS[each.part], each.axis): [] for each in found} | {("all", ""): list(found)}
        for each in found:
            groups[PREFILL_PARTS[each.part], each.axis].append(each)
        for (name, axis), some in groups.items():
            seconds = "" if cost.exchanges is None else f"{cost.exchanges.seconds(some):.3f}"
            figures = f"{sum(each.count for each in some):,}", f"{sum(each.received for each in some) / 1e9:,.3f}", seconds
            rows.append((f"{length:,}", str(policy), name, axis, *figures))
    typer.echo(str(cost))
    show(table(PREFILL_COLUMNS, rows, left=4, title=f"exchanges of one device in chunks of {chunk:,} tokens"))
    typer.echo("not counted: what a device computes; exchanges beside which it goes on computing")
    typer.echo("projection: seconds are by the term of decode steps, whose exchanges are smaller, and may be much too long")


MESH_COLUMNS = (
    "devices", "tensor", "context", "tokens", "batch", "policy", "ms", "tokens/s", "of each", "ms exchanging", "GiB each", "from"
)  # fmt: skip
SHOWN = 4
"""Reasons that an error gives, where no mesh can be."""


def show_meshes(
    cost: CostModel,
    config: ModelConfig,
    named: Sequence[DecodePolicy],
    cells: Sequence[tuple[int, int]],
    counts: Sequence[int],
    memory: float | None,
    **options: Any,
) -> None:
    """Print all meshes of each number of devices, the fastest first, why others are refused, and why figures are projections. cells:
    (length, batch). memory: GiB. options: as for `rank_meshes`."""
    from kvjax.cost_model import rank_meshes
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    limit = None if memory is None else int(memory * 2**30)
    rows, reasons, refused = [], {}, {}
    for count, (length, batch), policy in itertools.product(counts, cells, named):
        for each in rank_meshes(cost, config, policy, length, batch, count, memory_bytes=limit, **options):
            if each.found is None:
                refused[f"tensor {each.tensor} x context {each.context}: {each.refused}"] = None
                continue
            seconds, exchanging = each.found.seconds, dict(each.found.parts).get("exchanges", 0.0)
            reasons |= dict.fromkeys(each.found.projection)
            place = str(count), str(each.tensor), str(each.context), f"{length:,}", str(batch), name_of(policy)
            rates = f"{seconds * 1e3:.3f}", f"{batch / seconds:,.0f}", f"{batch / seconds / count:,.1f}", f"{exchanging * 1e3:.3f}"
            known = "projection" if each.found.projection else "measurements"
            rows.append((*place, *rates, f"{each.device_bytes / 2**30:.1f}", known))
    if not rows:
        why = "; ".join(list(refused)[:SHOWN]) + (f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else "")
        below = max(1, max(counts)).bit_length() - 1
        more = "" if memory is None else ", more of them, or a greater --memory"
        said = f"no mesh of {' or '.join(map(str, counts))} devices can run this ({why}): give powers of two, as {1 << below},{2 << below}"
        raise typer.BadParameter(said + more, param_hint="--devices")
    typer.echo(str(cost))
    show(table(MESH_COLUMNS, rows, left=6))
    if limit is None:
        typer.echo("memory of the devices was not looked at: --memory")
    for mesh in refused:
        typer.echo(f"refused: {mesh}")
    for reason in reasons:
        typer.echo(f"projection: {reason}")
