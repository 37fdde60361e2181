"""What a step costs on a mesh of devices, part by part, and which mesh is best for a number of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax.bill.exchanges import PARTS, layers_that_choose, step_exchanges
from kvjax.bill.step_bill import Bill, Prediction, sizes_of, unmeasured
from kvjax.memory import memory_plan
from kvjax.model import ModelConfig
from kvjax.packing import weights_bytes
from kvjax.policies.decode.base import DecodePolicy, chooses_over_devices
from kvjax.policies.decode.naming import name_of, parse

MEASURED, FITTED, EXTRAPOLATED, ASSUMED = "measured", "fitted", "extrapolated", "assumed"
MARKS = {
    MEASURED: "a step between those that were timed",
    FITTED: "by terms that were fitted to such devices and axes",
    EXTRAPOLATED: "by the same terms, outside what was measured",
    ASSUMED: "with values set by hand",
}
"""How a figure is known."""


class Part(NamedTuple):
    """A part of a step. bytes: that one device reads, or receives; 0 for times without any. mark: in `MARKS`, but never "measured": a clock
    shows whole steps only."""

    name: str
    seconds: float
    bytes: float
    mark: str


def mark_of(found: Prediction, parts: Sequence[Part]) -> str:
    """How the seconds of a whole step are known. parts: its `step_parts`."""
    if any(part.mark == ASSUMED for part in parts):
        return ASSUMED
    return EXTRAPOLATED if found.projection else MEASURED


def step_parts(
    bill: Bill,
    config: ModelConfig,
    policy: str | DecodePolicy,
    length: int,
    batch: int = 1,
    *,
    tensor: int = 1,
    context: int = 1,
    dtype: str | None = None,
    weights: str | None = None,
    cache_format: str | None = None,
    page_size: int = 128,
) -> tuple[Part, ...]:
    """The parts of a step whose sum `Bill.predict` gives. Arguments and errors as there."""
    policy, dtype = parse(policy), bill.dtype if dtype is None else dtype
    sizes, mesh = {"dtype": dtype, "page_size": page_size}, {"tensor": tensor, "context": context}
    packed = {"weights": weights, "cache_format": cache_format}
    found = bill.predict(config, policy, length, batch, **sizes, **packed, **mesh)
    alone = bill.predict(config, policy, length, batch, **sizes, **packed)
    base = ASSUMED if bill.assumed else EXTRAPOLATED if alone.projection else FITTED
    price, layers, moved = bill.price(policy)[0], config.num_layers / bill.sizes[0], found.bytes
    read = {"weights": moved.weights, "K and V": moved.kv, "index": moved.index, "states": moved.states}
    parts = [Part(f"read {name}", count / bill.bytes_per_s, count, base) for name, count in read.items() if count]
    parts.append(Part("launches and gaps (c0)", bill.c0 * layers, 0, base))
    chosen = price.fixed * layers + price.per_byte * moved.index
    parts += [Part("finding the blocks (c1)", chosen, 0, base)] if chosen else []
    if tensor * context == 1:
        return tuple(parts)
    terms, known = bill.mesh, sizes_of(config) == bill.sizes and bill.mesh.model == bill.model
    exchanges = step_exchanges(config, policy, batch, **mesh, **sizes)
    for name, axis in dict.fromkeys((each.part, each.axis) for each in exchanges):
        own = [each for each in exchanges if (each.part, each.axis) == (name, axis)]
        seconds, received = sum(terms.seconds_of(each, tensor) for each in own), sum(each.received for each in own)
        outside = any(terms.why(each, tensor, known) for each in own)
        mark = ASSUMED if any(terms.assumes(each, tensor) for each in own) else EXTRAPOLATED if outside else FITTED
        parts.append(Part(f"{axis} x {sum(each.count for each in own)}: {PARTS[name]}", seconds, received, mark))
    if context > 1 and (choosing := layers_that_choose(config, policy)):
        mark = ASSUMED if terms.assumed else FITTED if known and name_of(policy) in terms.policies else EXTRAPOLATED
        parts.append(Part(f"context x {choosing}: choosing among what devices found", terms.seconds_of_choice(choosing), 0, mark))
    return tuple(parts)


@dataclasses.dataclass(frozen=True)
class MeshChoice:
    """A mesh for a step. found: None if the mesh was refused. mark: in `MARKS`. device_bytes: weights and pages of one device. refused: why
    it cannot be; "" if it can."""

    tensor: int
    context: int
    found: Prediction | None
    mark: str
    device_bytes: int
    refused: str = ""


MOST_DEVICES = 4096
"""The most devices of a mesh that is predicted."""


def rank_meshes(
    bill: Bill,
    config: ModelConfig,
    policy: str | DecodePolicy,
    length: int,
    batch: int,
    devices: int,
    *,
    memory_bytes: int | None = None,
    dtype: str | None = None,
    page_size: int = 128,
) -> list[MeshChoice]:
    """All meshes of so many devices, the fastest first, and those that cannot be at the end, with the reason.

    memory_bytes: of one device, for weights and pages; None: not looked at. What a step and prefill need besides is not counted. Raises
    ValueError as `Bill.predict` does, for what has nothing to do with the mesh's form, and for more than `MOST_DEVICES`.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices must be from 1 to {MOST_DEVICES:,}, got {devices:,}")
    policy, found, refused = parse(policy), [], []
    stored = dataclasses.replace(config, compute_dtype=dtype or bill.dtype)
    for tensor in [each for each in range(1, devices + 1) if devices % each == 0]:
        context, size = devices // tensor, 0
        why = _impossible(stored, policy, tensor, context)
        if not why:
            size = device_bytes(stored, policy, length, batch, tensor=tensor, context=context, page_size=page_size)
            if memory_bytes is not None and size > memory_bytes:
                why = f"weights and pages need {size / 2**30:.1f} GiB on each device, and there are {memory_bytes / 2**30:.1f}"
        if why:
            refused.append(MeshChoice(tensor, context, None, "", size, why))
            continue
        sizes = {"dtype": dtype, "page_size": page_size, "tensor": tensor, "context": context}
        step, parts = (make(config, policy, length, batch, **sizes) for make in (bill.predict, functools.partial(step_parts, bill)))
        found.append(MeshChoice(tensor, context, step, mark_of(step, parts), size))
    return sorted(found, key=lambda each: each.found.seconds) + refused


def device_bytes(
    config: ModelConfig, policy: DecodePolicy, length: int, batch: int, *, tensor: int = 1, context: int = 1, page_size: int = 128
) -> int:
    """Bytes of weights and pages on each device of a mesh, in the model's compute_dtype (`kvjax.memory.memory_plan`)."""
    sizes: dict[str, Any] = {"page_size": page_size, "indexes": policy.indexes(), "available_bytes": 0, "sequences": batch}
    plan = memory_plan(config, **sizes, tensor=tensor, context=context)
    return plan.weights_bytes + plan.pool_bytes(-(-batch * -(-length // page_size) // context) * context)


def _impossible(config: ModelConfig, policy: DecodePolicy, tensor: int, context: int) -> str:
    """Why an engine refuses a mesh; "" if it does not."""
    if context & (context - 1):
        return f"context {context} is no power of two"
    if context > 1 and not chooses_over_devices(policy):
        return f"policy {policy} does not choose over devices"
    try:
        weights_bytes(config, tensor=tensor)
    except ValueError as error:
        return str(error)
    return ""


def reasons_of(choices: Sequence[MeshChoice]) -> tuple[str, ...]:
    """Why figures of a table are not measured, each reason once; meshes that were not measured in one line."""
    found = [each for each in choices if each.found is not None]
    forms = {unmeasured(each.tensor, each.context): f"{each.tensor} x {each.context}" for each in found}
    reasons = dict.fromkeys(why for each in found for why in each.found.projection)
    alone = [name for why, name in forms.items() if why in reasons]
    others = [why for why in reasons if why not in forms]
    return (*others, *([f"tensor x context not measured: {', '.join(alone)}"] if alone else []))
