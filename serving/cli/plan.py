"""`kvjax plan`: what memory a model takes, and how many pages fit. JAX is imported inside the command."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.serving.cli.options import (
    ALONE,
    MEMORY,
    DtypeOption,
    EngineOptions,
    LoraOption,
    ModelOption,
    Weights,
    byte_count,
    check_context,
    gibibytes,
    load_model,
    named_as_options,
    one_of,
    option,
    takes_engine,
)

if TYPE_CHECKING:
    from kvjax.cache import CacheSpec
    from kvjax.engine.memory import HostMemory, MemoryPlan
    from kvjax.engine.policy_set import PolicySet
    from kvjax.model.config import ModelConfig
    from kvjax.serving.batch.setup import Setup

CacheSizeOption = Annotated[
    int | None,
    option("What the cache takes on the device, as 8GB. [default: what --memory leaves beside the weights]", panel=MEMORY, **byte_count()),
]
DiskSizeOption = Annotated[int | None, option("Disk for kept pages, as 200GB.", panel=MEMORY, **byte_count())]


@takes_engine(
    first=("model", "policy", "max_batch", "memory", "weights"),
    without=("pages", "disk", "lora", *ALONE),
    device_memory=CacheSizeOption,
    disk_size=DiskSizeOption,
)
def plan_command(
    engine: EngineOptions,
    memory: Annotated[
        float | None,
        option(
            "Memory of the device for weights and cache, in GiB or as 24GB. [default: what the first device has free]",
            panel=MEMORY,
            **gibibytes(),
        ),
    ] = None,
) -> None:
    """Print the memory of weights and cache, and how many pages fit. Reads only the model's configuration.

    With kvjax batch --data, each replica takes this on its own devices.
    """
    from kvjax.cache.formats import parse_cache_format
    from kvjax.engine.memory import host_memory as host_parts
    from kvjax.engine.memory import pool_size
    from kvjax.engine.store_options import check_stores
    from kvjax.models.loading import packs_anew, read_config, read_packing
    from kvjax.serving.batch.setup import planned

    check_context(engine.context)
    where = None if engine.disk_size is None else Path("unnamed")  # where it is does not matter
    setup = dataclasses.replace(engine, disk=where).setup()
    model, weights, config = setup.model, setup.weights, read_config(setup.model, dtype=setup.dtype, max_positions=setup.max_positions)
    with named_as_options():
        parse_cache_format(setup.cache_format, config.compute_dtype)
        declared = _declared(config, setup)
    try:
        kept = check_stores(declared.states.policies, **setup.stores)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from None
    stored = None if weights is not None and packs_anew(model) else read_packing(model, config)
    if stored is not None and weights is not None:
        raise typer.BadParameter(f"{model} holds packed weights already: leave it out", param_hint="--weights")
    devices = {"tensor": setup.tensor, "context": setup.context, "weights": stored if weights is None else weights}
    plan = planned(declared, setup.slots, available_bytes=None if memory is None else int(memory * 2**30), **devices)
    room = plan.available_bytes
    if setup.device_bytes is not None:
        plan = dataclasses.replace(plan, available_bytes=plan.weights_bytes + setup.device_bytes)
    spec = config.cache_spec(setup.page_size, declared.cache_format).on_mesh(setup.tensor)
    with named_as_options():
        parts = {"chunk": setup.prefill_chunk, "keeps_none": kept.keeps_none, "here": memory is None}
        host = host_parts(plan, engine.host_memory, spec, **parts)
        device = plan.pages_that_fit
        if setup.device_bytes is not None or host.pages:
            device, _ = pool_size(plan, config, None, max(1, plan.available_bytes - plan.weights_bytes), host.pages)
    lines = [*_pool_lines(plan, room, device, host.pages), *_release_lines(declared)]
    lines += _kept_lines(plan, spec, host, device, engine.disk_size) if kept.reuse else ()
    if (count := setup.tensor * setup.context) > 1:
        lines.append(f"on each of {count} devices: bytes are those of one device, pages those of all")
    lines += filter(None, [declared.uneven_work(setup.context)])
    packed = f", weights {weights}" if weights is not None else "" if stored is None else ", weights packed as stored"
    packed += f", pages packed as {declared.cache_format}" if declared.cache_format else ""
    policies = f"{declared.policy.describe()}, {declared.prefill.describe()}"
    typer.echo("\n".join((f"{model} in {config.compute_dtype}{packed}, {policies}", str(plan), *lines)))


def _declared(config: ModelConfig, setup: Setup) -> PolicySet:
    """The policies of an engine of this model, checked as the engine checks them."""
    from kvjax.checks import engine_sizes
    from kvjax.engine.policy_set import PolicySet
    from kvjax.policies.choice import ChoosesDecode, ChoosesPrefill
    from kvjax.policies.decode import parse
    from kvjax.policies.prefill import parse_prefill

    for name, parsed, typed in ((setup.policy, parse, "--policy"), (setup.prefill, parse_prefill, "--prefill")):
        if name is not None and isinstance(parsed(name), ChoosesDecode | ChoosesPrefill):
            raise typer.BadParameter(
                f"{name!r} builds the indexes of policies that it may choose, which depend on the weights; name one of those",
                param_hint=typed,
            )
    engine_sizes(setup.page_size, setup.prefill_chunk, (1,))
    without_weights = types.SimpleNamespace(config=config)  # only policies that choose others look at weights
    sizes = {"page_size": setup.page_size, "prefill_chunk": setup.prefill_chunk, "cache_format": setup.cache_format}
    return PolicySet(without_weights, setup.policy, (), setup.prefill, **sizes)


def _pool_lines(plan: MemoryPlan, room: int, device: int, host: int) -> Iterator[str]:
    """What the sizes of the pool come to. room: bytes that weights and cache may take. device, host: pages of the
    pool."""
    if plan.available_bytes > room:
        yield f"does not fit         weights and --device-memory take {plan.available_bytes:,} bytes; there is room for {room:,}"
    if host:
        more = f"with {device:,} on the device, beside the indexes of all: {(device + host) * plan.page_size:,} tokens"
        yield f"pool in host memory  {host:>12,}  ({more})"


def _release_lines(declared: PolicySet) -> Iterator[str]:
    """What a sequence keeps from its first step on, if the policy gives pages back, but the prompt needs all of them
    before."""
    from kvjax.engine.page_eviction import kept_by
    from kvjax.policies.decode import KeepsByMass
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


def _kept_lines(plan: MemoryPlan, spec: CacheSpec, host: HostMemory, device: int, disk_size: int | None) -> Iterator[str]:
    """Where pages are kept for later prompts, and how many. device: pages of the pool there."""
    from kvjax.cache import OPEN, WHOLE
    from kvjax.cache.stores.blocks import block_bytes

    counts = plan.pool_pages(device)
    pages = max(counts[group.name] for group in plan.groups if group.page_size != WHOLE)
    less = "(at most: running sequences take theirs from the same pages)"
    yield f"kept on the device   {pages:>12,}  {less}"
    if not host.stored and disk_size is None and spec.state_groups:
        yield "nothing is found     without --host-memory or --disk, which keep the states of this model's recurrent layers"
    if host.pages:
        yield f"kept in host memory  {host.pages:>12,}  {less}"
    for name, size in host.stored.items() if host.pages else ():
        kind = "states" if name in spec.state_groups else "pages"
        yield f"beside the pool      {host.store_bytes // size:>12,}  (at most, {kind} of layer group {name} in {host.store_bytes:,} bytes)"
    whole = {"kept in host memory": (host.stored, 0 if host.pages else host.store_bytes)}
    whole["kept on disk"] = {group.name: block_bytes(spec, group.name) for group in spec.groups if group.name != OPEN}, disk_size or 0
    for name, (blocks, size) in whole.items():
        if size:
            count = size // sum(blocks.values())
            yield f"{name:<20} {count:>12,}  ({count * plan.page_size:,} tokens)"
    if host.why:
        yield f"not all of --host-memory is the pool's: {host.why}"


def quantize_command(
    model: ModelOption,
    out: Annotated[str, typer.Argument(help="Folder to write.", show_default=False)],
    weights: Annotated[
        Weights,
        option(
            "int8 or fp8, with one scale for each output channel or block of 128 x 128; int4, with one for 128 inputs, and the embedding "
            "and the head as int8. int4 needs matrices whose inputs are a multiple of 128. fp8:tokens is an option of loading: write fp8 "
            "for it.",
            **one_of(Weights),
        ),
    ] = Weights.int8,
    dtype: DtypeOption = None,
    lora: LoraOption = None,
    overwrite: Annotated[bool, option("Replace the model in OUT, if it holds one and nothing else.", "--overwrite")] = False,
) -> None:
    """Pack a model's weights, and write them with config and tokenizer. Every command's --model reads the folder.

    The layout is that of compressed-tensors, and transformers reads it. The device holds the packed model, the host one
    file of it.
    """
    from kvjax.model.weight_formats import scheme_of
    from kvjax.models.loading import read_config
    from kvjax.models.save_targets import check_target
    from kvjax.models.saving import check_packing

    if weights == Weights.fp8_tokens:
        raise typer.BadParameter("fp8:tokens is how products are computed, not how weights are stored: write fp8", param_hint="--weights")
    folder = check_target(out, overwrite)
    check_packing(read_config(model), scheme_of(weights.value).format_of)
    loaded = load_model(model, dtype, None, weights=weights, lora=lora)
    loaded.save(out, overwrite=overwrite)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    typer.echo(f"{out}: {loaded.config.num_params:,} weights in {size:,} bytes, {size / loaded.config.num_params:.2f} each")
