"""`kvjax doctor`: what this machine runs, whether it computes the right numbers, and how long a step of a 7B model
takes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import typer

from kvjax.serving.cli.options import ImplementationOption, JsonOption, forced_to, named_run

if TYPE_CHECKING:
    from kvjax.serving.cli.ops_selftest import Check

SHAPE, LENGTHS, POLICIES = "qwen2.5-7b", (8192, 131_072), ("dense", "top:32")
"""Of the decode steps whose time is said: batch 1, bfloat16."""


def doctor_command(json_out: JsonOption = None, implementation: ImplementationOption = None) -> None:
    """Print the devices, which implementation every op takes here and why, and what a decode step of a 7B model takes.

    Every implementation runs a small example and is compared with the op's definition. Exits with status 1 if one of
    them is wrong. Takes about a minute, most of it compiling.
    """
    from kvjax.serving.cli.ops_selftest import check_ops, dtype_here
    from pallas_kernels.bench.measure import copy_rate
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import stages

    checks: list[Check] = []
    typer.echo("\n".join(_machine()))
    with forced_to(implementation), stages() as say:
        for check in check_ops():
            checks.append(check)
            say(f"{check.op}: {check.implementation}")
        say("copy bandwidth")
        copy = copy_rate()
    _show_ops(checks, dtype_here())
    if implementation is not None:
        typer.echo(f"Everything above ran on the path of --implementation {implementation}.")
    steps = step_rows(copy["bytes_per_s"], measured=implementation is None)
    _show_steps(steps, copy["bytes_per_s"])
    if json_out is not None:
        write_result(json_out, named_run("doctor", implementation) | {"copy": copy, "checks": list(map(vars, checks)), "rows": steps})
    if wrong := [check for check in checks if check.failed]:
        typer.echo(f"{len(wrong)} of {len(checks)} checks failed: do not trust results of this machine", err=True)
        raise typer.Exit(1)


def _machine() -> list[str]:
    import jax

    versions = ", ".join(f"{name} {version(name)}" for name in ("kvjax", "jax", "jaxlib"))
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    details = [f"{jax.local_device_count()} x {device.device_kind}", f"backend {jax.default_backend()}"]
    if capability := getattr(device, "compute_capability", None):
        details.append(f"compute capability {capability}")
    if limit := stats.get("bytes_limit"):
        details.append(f"{limit / 2**30:.1f} GiB for arrays")
    return [f"{versions}, Python {platform.python_version()}, {platform.system()} {platform.machine()}", ", ".join(details)]


def _show_ops(checks: Sequence[Check], dtype: str) -> None:
    from pallas_kernels.core import dispatch
    from pallas_kernels.core.tables import show, table

    lines = [
        (
            check.op,
            check.implementation,
            "yes" if check.chosen else "",
            check.failed or check.refused or f"right, error {check.error:.1e}",
        )
        for check in checks
    ]
    show(table(("op", "implementation", "taken", f"self-test in {dtype}"), lines, left=4))
    if any(check.implementation == "composed" for check in checks):
        typer.echo("composed: made of other ops, each by its own implementation")
    for name in dispatch.BACKENDS:
        if reason := dispatch.absent(name):
            typer.echo(f"{name} is not here: it {reason}")
    for op in dispatch.WGMMA_ONLY:
        if (reason := dispatch.absent("mosaic_gpu", op=op)) and not dispatch.absent("mosaic_gpu"):
            typer.echo(f"mosaic_gpu of {op} is not here: it {reason}")


def step_rows(bytes_per_s: float, *, measured: bool = True) -> list[dict[str, Any]]:
    """What decode steps of a 7B model take on this device, in seconds: by the built-in cost model of the device where
    there is one ("cost model"), else their bytes over the bandwidth of a copy ("bytes"), which a GPU's steps do not
    reach and a CPU, which reads faster than it copies, may.

    bytes_per_s: copy bandwidth. measured: whether steps run as they did when cost models were measured, on no other
    platform's path.
    """
    import jax

    from kvjax.cost_model.bytes import step_bytes
    from kvjax.cost_model.predict import known_cost_model
    from kvjax.policies.decode import parse
    from kvjax.serving.bench.decode import SHAPES

    config = SHAPES[SHAPE]
    cost = known_cost_model(jax.local_devices()[0].device_kind, config, "bfloat16") if measured else None
    rows = []
    for length in LENGTHS:
        for policy in POLICIES:
            moved = step_bytes(config, parse(policy), length).from_device
            seconds = cost.predict(config, policy, length).seconds if cost else moved / bytes_per_s
            fields = {"shape": SHAPE, "tokens": length, "policy": policy, "bytes": moved}
            rows.append(fields | {"seconds": seconds, "source": "cost model" if cost else "bytes"})
    return rows


def _show_steps(rows: Sequence[dict[str, Any]], bytes_per_s: float) -> None:
    from pallas_kernels.core.tables import show, table, tokens_text

    typer.echo(f"copy bandwidth, measured: {bytes_per_s / 1e9:,.1f} GB/s, read and written")
    by_model = rows[0]["source"] == "cost model"
    lines = [
        (f"`{row['policy']}`, {tokens_text(row['tokens'])} tokens", f"{row['bytes'] / 1e9:.1f}", f"{row['seconds'] * 1e3:,.2f}")
        for row in rows
    ]
    show(table((f"a decode step of {SHAPE}", "GB", "ms" if by_model else "ms at the bandwidth above"), lines))
    if not by_model:
        typer.echo(
            "No cost model is fitted to this device: the times are the bytes over the copy's bandwidth. "
            "`kvjax bench decode` measures steps."
        )
