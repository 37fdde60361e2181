"""Steps as one program over a mesh: each device sees only its part of weights and cache (`jax.shard_map`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from kvjax.axes import ONE_DEVICE, WHOLE_COPY, Shards, spec_of
from kvjax.cache.arrays import layer_specs
from kvjax.cache.cache import Cache
from kvjax.model.placement import is_cut

if TYPE_CHECKING:
    from kvjax.cache.spec import CacheSpec
    from kvjax.model.protocols import Decoder


def on_mesh(static: Any, step: Callable, inputs: Any, *, specs: Mapping[str, Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """The results of `step(static, inputs)`, run on all devices of a mesh.

    Args:
        static: `kvjax.engine.steps.StepStatic`. Each device gets its own decoder.
        inputs: a named tuple with params and cache. Each device gets its part of both, and `cache.shards`.
        specs: of the fields that are not the same on every device, besides params and cache.
        results: the specs of the results, and `Cache` for the cache.
    """
    shards, whole = static.shards, inputs.cache.spec

    def on_device(*given: Any) -> tuple[Any, ...]:
        own = type(inputs)(*given)
        own = own._replace(cache=own.cache.replace(spec=whole.on_device(shards.tensor), shards=shards))
        found = step(static._replace(decoder=static.decoder.on_shards(shards)), own)
        return tuple(each.replace(spec=whole, shards=ONE_DEVICE) if isinstance(each, Cache) else each for each in found)

    places = cache_specs(inputs.cache)
    of_params = param_specs(static.decoder, inputs.params, shards.tensor)
    of_inputs = dict.fromkeys(inputs._fields, WHOLE_COPY) | {"params": of_params, "cache": places} | dict(specs)
    return shards.run(on_device, tuple(inputs), tuple(of_inputs.values()), tuple(places if each is Cache else each for each in results))


def spec_on_mesh(spec: CacheSpec, mesh: Mesh | None) -> CacheSpec:
    """The cache over all devices of an engine's mesh."""
    return spec if mesh is None else spec.on_mesh(Shards(mesh).tensor)


def on_mesh_alone(
    shards: Shards,
    step: Callable,
    decoder: Decoder,
    params: Any,
    *arrays: Any,
    specs: Sequence[PartitionSpec] | None = None,
    result: PartitionSpec = WHOLE_COPY,
) -> Any:
    """`step(decoder, params, *arrays)`, which reads no cache. specs: of the arrays; None: the same on all devices.
    result: the spec of its result."""
    if shards.mesh is None:
        return step(decoder, params, *arrays)
    own, given = decoder.on_shards(shards), [WHOLE_COPY] * len(arrays) if specs is None else specs
    of_params = param_specs(decoder, params, shards.tensor)
    return shards.run(lambda params, *arrays: step(own, params, *arrays), (params, *arrays), (of_params, *given), result)


def param_specs(decoder: Decoder, params: Any, tensor: int) -> Any:
    """The `PartitionSpec` of each parameter."""
    return jax.tree.map(lambda each: WHOLE_COPY if each is None else spec_of(each.axes), decoder.cuts(params, tensor), is_leaf=is_cut)


def specs_of_states(policy: Any, states: Any) -> Any:
    """The `PartitionSpec` of each array of a policy's states. Its `state_axes` names the axes of all of them, if it has
    any."""
    spec = spec_of(policy.state_axes()) if hasattr(policy, "state_axes") else WHOLE_COPY
    return jax.tree.map(lambda _: spec, states)


def cache_specs(cache: Cache) -> Cache:
    """The `PartitionSpec` of each array of a cache, in the place of the array."""
    return jax.tree.map(lambda _: WHOLE_COPY, cache).replace(layers=layer_specs(cache.layers))
