"""Parameters on the devices of a mesh, each with its part, and whole again. Which matrix is cut along which axis:
`cuts` of each kind of layer in `kvjax.model.layers`."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from kvjax.axes import CONTEXT, TENSOR, Cut, Shards, mesh_of, on_host

if TYPE_CHECKING:
    from kvjax.model.protocols import Decoder, Model

logger = logging.getLogger(__name__)


def place_model(model: Model, mesh: Mesh) -> Model:
    """The model with its parameters on the devices of a mesh (`place_params`). Logs how many devices hold a KV head, if
    more than one."""
    shards = Shards(mesh)
    for count in sorted({mixer.num_kv_heads for mixer in model.config.attention if mixer.num_kv_heads < shards.tensor}):
        logger.info("%d KV heads on tensor=%d devices: each on %d of them", count, shards.tensor, shards.tensor // count)
    placed = copy.copy(model)
    object.__setattr__(placed, "params", place_params(model.decoder, model.params, shards))  # a frozen dataclass, as a rule
    return placed


def place_params(decoder: Decoder, params: Any, shards: Shards) -> Any:
    """The parameters, each device of the mesh with its part. Copies one tensor at a time through host memory; those
    that are placed already stay. Between meshes of the same sizes, and to a mesh of one device, tensors go from device
    to device. ValueError for a decoder that cannot be split, whose heads do not divide, or that is on a mesh of other
    sizes."""
    if not hasattr(decoder, "cuts"):
        raise ValueError(
            f"{type(decoder).__name__} cannot be split over a mesh: it needs cuts and on_shards of kvjax.model.protocols.Decoder"
        )
    return place_tree(decoder.cuts(params, shards.tensor), params, shards)


def place_tree(how: Any, params: Any, shards: Shards) -> Any:
    """`place_param` of every array of a tree, with its cut in its place in `how`. A packed matrix may have None for its
    zeros."""
    return jax.tree.map(lambda each, leaf: leaf if leaf is None else place_param(each, leaf, shards), how, params, is_leaf=is_cut)


def place_param(how: Cut | None, leaf: Array | np.ndarray, shards: Shards) -> Array:
    """One parameter, each device of the mesh with its part."""
    sharding = shards.placed() if how is None else shards.placed(*how.axes)
    if isinstance(leaf, jax.Array):
        if (before := mesh_of(leaf)) is not None and dict(before.shape) != dict(shards.mesh.shape):
            raise ValueError(
                f"the model is on a mesh of {_sizes(before)}, and this one is of {_sizes(shards.mesh)}: load it with mesh=None, or with "
                "a mesh of these sizes"
            )
        if before is not None or shards.mesh.size == 1:  # every device has what its counterpart has
            return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
    whole = np.asarray(leaf)
    if how is None:
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    each = len(how.rows[0])
    shape = tuple(each * shards.tensor if number == how.axis else size for number, size in enumerate(whole.shape))

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rows = np.array(how.rows[(index[how.axis].start or 0) // each])
        there = rows[rows < whole.shape[how.axis]]  # the vocabulary is padded
        missing = [(0, each - len(there) if number == how.axis else 0) for number in range(whole.ndim)]
        return np.pad(np.take(whole, there, axis=how.axis), missing)

    return jax.make_array_from_callback(shape, sharding, part)


def _sizes(mesh: Mesh) -> str:
    return f"tensor={mesh.shape[TENSOR]} and context={mesh.shape[CONTEXT]}"


def whole_params(model: Model) -> Any:
    """The reverse of `place_params`: for each parameter, a function that returns it as it is on one device."""
    mesh = mesh_of(jax.tree.leaves(model.params)[0])
    if mesh is None:
        return jax.tree.map(lambda leaf: lambda: leaf, model.params)
    cuts, sizes = model.decoder.cuts(model.params, Shards(mesh).tensor), {"vocab": model.config.vocab_size}

    def found(how: Cut | None, leaf: Array | None) -> Callable[[], np.ndarray] | None:
        return None if leaf is None else functools.partial(_whole, how, leaf, sizes)

    return jax.tree.map(found, cuts, model.params, is_leaf=is_cut)


def _whole(how: Cut | None, leaf: Array, sizes: Mapping[str, int]) -> np.ndarray:
    placed = np.asarray(on_host(leaf))
    if how is None:
        return placed
    rows = np.concatenate([np.array(part) for part in how.rows])
    _, first = np.unique(rows, return_index=True)  # where each row is first, in order
    return np.take(placed, first[: sizes.get(how.axes[how.axis])], axis=how.axis)


def is_cut(node: Any) -> bool:
    return node is None or isinstance(node, Cut)
