"""Random weights and random pages of a decode benchmark, made on their devices, packed where the plan says so."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from kvjax.axes import ONE_DEVICE, Cut, Shards, spec_of
from kvjax.cache import IndexSpec, PagedKV
from kvjax.cache.arrays import OpenRows
from kvjax.cache.index_spec import over_packed
from kvjax.cache.spec import PagedSpec
from kvjax.engine.sharding import param_specs
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Params
from kvjax.model.weight_formats import pack_params
from kvjax.models.decoder import TransformerDecoder, init_params
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index


def random_params(config: ModelConfig, shards: Shards = ONE_DEVICE, weights: str | None = None) -> Params:
    """Random weights, as at the start of training, made on the device, or each part on its device. Biases are zero.

    weights: how they are packed, as in `kvjax.load`. One device then holds them unpacked for a while, too; devices of a
    mesh one layer.
    """
    if shards.mesh is None:
        made = init_params(config, jax.random.key(0))
        return jax.block_until_ready(made if weights is None else pack_params(made, weights))
    own = dataclasses.replace(config.on_shards(shards.tensor), vocab_size=-(-config.vocab_size // shards.tensor))
    decoder, whole = TransformerDecoder(config), jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    cuts, specs = decoder.cuts(whole, shards.tensor), param_specs(decoder, whole, shards.tensor)

    def fitted(how: Cut | None, leaf: Array) -> Array:  # `o` has fewer heads than q where devices share KV heads
        return leaf if how is None else jax.lax.slice_in_dim(leaf, 0, len(how.rows[0]), axis=how.axis)

    def made(number: int | None, key: Array) -> Params:
        """One device's part of a layer, or of what is in no layer. All devices make the same numbers: products take no
        longer."""
        params = init_params(own.of_layers(number or 0, (number or 0) + 1), key)
        part = _without_layers(params) if number is None else params["layers"][0]
        how = _without_layers(cuts) if number is None else cuts["layers"][number]
        return jax.tree.map(fitted, how, part, is_leaf=lambda node: node is None or isinstance(node, Cut))

    programs: dict[Any, Callable[[Array], Params]] = {}  # one for all layers that are alike: one of the whole model is large

    def on_devices(number: int | None) -> Params:
        kind = None if number is None else own.layers[number]
        if kind not in programs:
            split = _without_layers(specs) if number is None else specs["layers"][number]
            programs[kind] = jax.jit(lambda key: shards.run(functools.partial(made, number), (key,), (spec_of(()),), split))
        part = programs[kind](jax.random.key(0 if number is None else number + 1))
        if weights is not None:
            part = pack_params(part, weights) if number is None else pack_params({"layers": (part,)}, weights)["layers"][0]
        return jax.block_until_ready(part)

    params = on_devices(None) | {"layers": tuple(map(on_devices, range(config.num_layers)))}
    if weights is None:
        return params
    # A spec may stand for an array that a packed matrix does not have.
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(shards.mesh, spec)), param_specs(decoder, params, shards.tensor), params
    )


def _without_layers(params: Params) -> Params:
    return {name: each for name, each in params.items() if name != "layers"}


def packed_layer(kept: PagedSpec, k: Array, v: Array, indexes: tuple[IndexSpec, ...], rows: OpenRows) -> PagedKV:
    """A layer whose pages hold these numbers `[N, K, P, D]`, packed as `kept` says, with indexes of the keys as they
    are read."""
    arrays: dict[str, Any] = {}
    keys = k
    for name, numbers, packed in (("k", k, kept.k_packed), ("v", v, kept.v_packed)):
        codes, scales = (numbers, None) if packed is None else pack_pages(numbers, format=packed)
        arrays |= {name: codes, f"{name}_scales": scales, f"{name}_packed": packed}
        if name == "k" and packed is not None:
            keys = jax.jit(unpack, static_argnums=0)(packed, codes, scales)
    kinds = over_packed(indexes, kept.k_packed)
    index = {spec.name: page_index(keys, kind=spec.kind, block_size=spec.block_size) for spec in kinds}
    return PagedKV(Pages(**arrays), index, rows)


def sharded(batch: int, context: int, pages: int, each: int, draw: np.random.Generator) -> Int[np.ndarray, "B pages"]:
    """Page ids of `batch` sequences of `pages` pages, in an order that says nothing; the first page of every device is
    left out. context: devices over which they are sharded in turn, with `each` pages."""
    count = batch * pages
    ids = np.empty(count, np.int32)
    for device in range(context):
        mine = len(range(device, count, context))
        ids[device::context] = device * each + draw.permutation(np.arange(1, mine + 1, dtype=np.int32))
    return ids.reshape(batch, pages)


def placed(shards: Shards, tree: Any) -> Any:
    """Arrays on every device of the mesh."""
    return tree if shards.mesh is None else jax.device_put(tree, shards.placed())
