"""`kvjax plan`: what memory a model takes, and how many pages fit. JAX is imported inside the command."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.serving.cli.options import (
    LARGEST_BATCH,
    CacheFormatOption,
    ChunkOption,
    ContextOption,
    DeviceMemoryOption,
    DtypeOption,
    MaxPositionsOption,
    ModelOption,
    PageSizeOption,
    PolicyOption,
    PoolHostMemoryOption,
    PrefillOption,
    ReuseOption,
    TensorOption,
    WeightsOption,
    byte_count,
    check_context,
    named_as_options,
    number,
    whole,
)

if TYPE_CHECKING:
    from kvjax.cache import CacheSpec
    from kvjax.declared import DeclaredPolicies
    from kvjax.memory import MemoryPlan
    from kvjax.model import ModelConfig


def plan_command(
    model: ModelOption,
    policy: PolicyOption = None,
    prefill: PrefillOption = None,
    max_batch: Annotated[int, typer.Option(help="Sequences decoded together.", **whole(most=LARGEST_BATCH))] = 8,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    cache_format: CacheFormatOption = None,
    dtype: DtypeOption = None,
    max_positions: MaxPositionsOption = None,
    weights: WeightsOption = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GiB to plan for. [default: what the first device has free]", show_default=False, **number(above=0, most=2**30)),
    ] = None,
    device_memory: DeviceMemoryOption = None,
    pool_host_memory: PoolHostMemoryOption = None,
    reuse: ReuseOption = False,
    host_memory: Annotated[
        int | None, typer.Option(help="Host memory for kept pages, as 64GB.", show_default=False, **byte_count())
    ] = None,
    disk_size: Annotated[int | None, typer.Option(help="Disk for kept pages, as 200GB.", show_default=False, **byte_count())] = None,
    tensor: TensorOption = 1,
    context: ContextOption = 1,
) -> None:
    """Print the memory of weights and cache, and how many pages fit. Reads only the model's configuration.

    With kvjax batch --data, each replica takes this on its own devices.
    """
    from kvjax.cache.formats import check_cache_format
    from kvjax.models.loading import read_config, read_packing
    from kvjax.serving.batch.setup import planned

    check_context(context)
    config = read_config(model, dtype=None if dtype is None else dtype.value, max_positions=max_positions)
    with named_as_options():
        check_cache_format(cache_format, config.compute_dtype, tensor * context, pool_host_memory)
        declared = _declared(config, policy, prefill, page_size, prefill_chunk, cache_format)
    keeps = reuse or host_memory is not None or disk_size is not None
    if tensor * context > 1 and pool_host_memory is not None:
        raise typer.BadParameter(
            f"running sequences of a mesh of {tensor * context} devices are on its devices alone: leave out --pool-host-memory, or "
            "--tensor and --context"
        )
    if keeps and declared.states.policies:
        raise typer.BadParameter(
            f"{declared.policy} learns from prefill, and a prompt whose pages are reused is not prefilled: leave one of them out",
            param_hint="--policy",
        )
    stored = read_packing(model)
    if stored is not None and weights is not None:
        raise typer.BadParameter(f"{model} holds packed weights already: leave it out", param_hint="--weights")
    devices = {"tensor": tensor, "context": context, "weights": stored if weights is None else weights.value}
    plan = planned(declared, max_batch, available_bytes=None if memory is None else int(memory * 2**30), **devices)
    room = plan.available_bytes
    if device_memory is not None:
        plan = dataclasses.replace(plan, available_bytes=plan.weights_bytes + device_memory)
    sizes = device_memory, pool_host_memory
    lines = [*_pool_lines(plan, config, room, *sizes, here=memory is None), *_release_lines(declared)]
    spec = config.cache_spec(page_size, declared.cache_format).on_mesh(tensor)
    lines += _kept_lines(plan, spec, host_memory, disk_size) if keeps else ()
    if tensor * context > 1:
        lines.append(f"on each of {tensor * context} devices: bytes are those of one device, pages those of all")
    lines += filter(None, [declared.uneven_work(context)])
    packed = f", weights {weights.value}" if weights is not None else "" if stored is None else ", weights packed as stored"
    packed += f", pages packed as {declared.cache_format}" if declared.cache_format else ""
    policies = f"{declared.policy.describe()}, {declared.prefill.describe()}"
    typer.echo("\n".join((f"{model} in {config.compute_dtype}{packed}, {policies}", str(plan), *lines)))


def _declared(
    config: ModelConfig, policy: str | None, prefill: str | None, page_size: int, prefill_chunk: int, cache_format: str | None
) -> DeclaredPolicies:
    """The policies of an engine of this model, checked as the engine checks them."""
    from kvjax.checks import engine_sizes
    from kvjax.declared import DeclaredPolicies
    from kvjax.policies.choice import ChoosesDecode, ChoosesPrefill
    from kvjax.policies.decode import parse
    from kvjax.policies.prefill import parse_prefill

    for name, parsed, option in ((policy, parse, "--policy"), (prefill, parse_prefill, "--prefill")):
        if name is not None and isinstance(parsed(name), ChoosesDecode | ChoosesPrefill):
            raise typer.BadParameter(
                f"{name!r} builds the indexes of policies that it may choose, which depend on the weights; name one of those",
                param_hint=option,
            )
    engine_sizes(page_size, prefill_chunk, (1,))
    without_weights = types.SimpleNamespace(config=config)  # only policies that choose others look at weights
    sizes = {"page_size": page_size, "prefill_chunk": prefill_chunk, "cache_format": cache_format}
    return DeclaredPolicies(without_weights, policy, (), prefill, **sizes)


def _pool_lines(
    plan: MemoryPlan, config: ModelConfig, room: int, device_memory: int | None, pool_host_memory: int | None, *, here: bool
) -> Iterator[str]:
    """What the sizes of the pool come to. room: bytes that weights and cache may take. here: on this machine, whose memory then counts."""
    from kvjax.memory import pool_size

    if device_memory is None and pool_host_memory is None:
        return
    if plan.available_bytes > room:
        yield f"does not fit         weights and --device-memory take {plan.available_bytes:,} bytes; there is room for {room:,}"
    with named_as_options():
        device, host = pool_size(plan, config, None, max(1, plan.available_bytes - plan.weights_bytes), pool_host_memory, here=here)
    if host:
        more = f"with {device:,} on the device, beside the indexes of all: {(device + host) * plan.page_size:,} tokens"
        yield f"pool in host memory  {host:>12,}  ({more})"


def _release_lines(declared: DeclaredPolicies) -> Iterator[str]:
    """What a sequence keeps from its first step on, if the policy gives pages back, but the prompt needs all of them before."""
    from kvjax.policies.decode import KeepsByMass
    from kvjax.release import kept_by
    from kvjax.serving.batch.setup import planned

    kept = kept_by(declared.policy, declared.page_size)
    if kept is None or declared.reach is not None or isinstance(declared.policy, KeepsByMass):
        return
    nothing = {"weights_bytes": 0, "available_bytes": 0}
    before, after = planned(declared, 1, **nothing), planned(declared, 1, **nothing, reach=kept)
    for unbounded, group in zip(before.groups, after.groups, strict=True):
        if unbounded.most is None:
            yield (
                f"kept of a sequence   {group.most:>12,}  (pages of layer group {group.name}, from the first step on; with --prefill "
                f"window:{kept[0]}+{kept[1]} from the start)"
            )


def _kept_lines(plan: MemoryPlan, spec: CacheSpec, host_memory: int | None, disk_size: int | None) -> Iterator[str]:
    """Where pages are kept for later prompts, and how many."""
    from kvjax.cache import OPEN, WHOLE
    from kvjax.cache.transfer import block_bytes

    counts = plan.pool_pages(plan.pages_that_fit)
    pages = max(counts[group.name] for group in plan.groups if group.page_size != WHOLE)
    yield f"kept on the device   {pages:>12,}  (less those that running sequences need)"
    if host_memory is None and disk_size is None and spec.state_groups:
        yield "nothing is found     without --host-memory or --disk, which keep the states of this model's recurrent layers"
    for name, size in (("kept in host memory", host_memory), ("kept on disk", disk_size)):
        if size is not None:
            count = size // sum(block_bytes(spec, group.name) for group in spec.groups if group.name != OPEN)
            yield f"{name:<20} {count:>12,}  ({count * plan.page_size:,} tokens)"
