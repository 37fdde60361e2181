"""How work is split over several devices: a mesh of two axes, and one table of logical axes that says along which each
array is cut.

`tensor` cuts heads, MLP columns and the vocabulary. `context` deals out the pages of every sequence, in turn. A step
runs as one program in which each device sees only its part of weights and cache (`kvjax.engine.sharding`). `Shards` is
what such a program knows about the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from kvjax.checks import whole_number
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.collectives.all_reduce import all_reduce
from pallas_kernels.core.matrices import PackedMatrix, is_packed, take_rows
from pallas_kernels.core.merge import merge_attention
from pallas_kernels.core.messages import shown

CONTEXT, TENSOR = "context", "tensor"
"""The axes of a mesh."""


RULES = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "out_heads": TENSOR,
    "kv_heads": TENSOR,
    "channels": TENSOR,
    "mlp": TENSOR,
    "pages": CONTEXT,
}
"""Along which axis of a mesh a logical axis is cut. Others are whole on every device.

heads: query heads. out_heads: the same heads, as the output projection takes them. channels: what goes through the
convolution of a recurrent layer. pages: of a pool.
"""


LogicalAxes = tuple[str | None, ...]


def mesh(*, tensor: int = 1, context: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `context * tensor` devices for `Engine(mesh=...)`.

    Args:
        tensor: over how many devices heads, MLPs and the vocabulary are split. Neighbours in `devices` share pages of
            the same tokens.
        context: over how many devices the pages of each sequence are sharded, a power of two.
        devices: None: the first ones that JAX has.

    Raises:
        ValueError: for sizes below 1, a context that is no power of two, or too few devices.
    """
    tensor, context = whole_number("tensor", tensor, 1), whole_number("context", context, 1)
    if context & (context - 1):
        raise ValueError(f"context is {context}, and pages are sharded over a power of two devices: use 2, 4 or 8")
    devices = list(jax.devices() if devices is None else devices)
    if tensor * context > len(devices):
        raise ValueError(
            f"tensor {tensor} x context {context} needs {tensor * context} devices, and there are {len(devices)}: use a smaller mesh"
            + (" (for trials, the environment variable JAX_NUM_CPU_DEVICES=8 gives a CPU eight)" if devices[0].platform == "cpu" else "")
        )
    return Mesh(np.array(devices[: tensor * context]).reshape(context, tensor), (CONTEXT, TENSOR))


def spec_of(axes: LogicalAxes) -> PartitionSpec:
    """How an array with these logical axes is cut."""
    return PartitionSpec(*(RULES.get(axis) for axis in axes))


@dataclasses.dataclass(frozen=True)
class Shards:
    """What a program knows about the devices that it runs on: those of a mesh, or one (`ONE_DEVICE`). Static and
    hashable.

    mesh: as `mesh` makes it; None: one device. Then all exchanges give back what they are given. pages: by layer group
    whose pages are sharded, how many each device holds; page ids [d * n, (d + 1) * n) lie on device d of the context
    axis. row_parts: over how many devices of the context axis the rows of a chunk of prefill are sharded
    (`kvjax.engine.sequence_parallel`): all of them, or 1. Methods that take arrays are for programs inside
    `jax.shard_map`.
    """

    mesh: Mesh | None = None
    pages: tuple[tuple[str, int], ...] = ()
    row_parts: int = 1

    def __post_init__(self):
        if self.mesh is not None and (not isinstance(self.mesh, Mesh) or self.mesh.axis_names != (CONTEXT, TENSOR)):
            raise ValueError(f"mesh must be one of kvjax.mesh(tensor=..., context=...), got {shown(self.mesh, 100)}")

    @property
    def tensor(self) -> int:
        """Devices along the tensor axis."""
        return 1 if self.mesh is None else self.mesh.shape[TENSOR]

    @property
    def context(self) -> int:
        """Devices along the context axis."""
        return 1 if self.mesh is None else self.mesh.shape[CONTEXT]

    def placed(self, *axes: str | None) -> NamedSharding | None:
        """The sharding of an array with these logical axes; without any, a copy on every device. None for one
        device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec_of(axes))

    def constrained(self, x: Array, *axes: str | None) -> Array:
        """An array that lies so, in a program that is not split by `run`."""
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, self.placed(*axes))

    @property
    def chunk_spec(self) -> PartitionSpec:
        """How the hidden states `[B, T, E]` of a chunk of prefill are cut between its programs: by rows, where these
        are sharded. Each device's rows are in the order of `kvjax.engine.sequence_parallel`."""
        return WHOLE_COPY if self.row_parts == 1 else PartitionSpec(None, CONTEXT)

    # Exchanges

    def sum(self, x: Float[Array, "B T E"], residual: Float[Array, "B T E"] | None = None) -> Float[Array, "B T E"]:
        """The sum over the devices of the tensor axis, on all of them, and `residual`, the same on all, once."""
        if self.tensor == 1:
            return x if residual is None else residual + x
        return all_reduce(x, axis_name=TENSOR, residual=residual, mesh=self.mesh)

    def joined(self, x: Float[Array, "... F"]) -> Float[Array, "... n*F"]:
        """The parts of all devices of the tensor axis, side by side along the last axis."""
        return x if self.tensor == 1 else jnp.concatenate(list(self._from_all(TENSOR, x)[0]), axis=-1)

    def number(self, axis: str) -> Int[Array, ""]:
        """This device's number along an axis."""
        return jax.lax.axis_index(axis)

    def rows_of(
        self, table: Float[Array, "V/n E"] | PackedMatrix, ids: Int[Array, "B T"], count: int, dtype: DTypeLike | None = None
    ) -> Float[Array, "B T E"]:
        """Rows of a table that is cut along its first axis; NaN for ids outside [0, count). dtype: of rows of a packed
        table."""
        local = ids - (self.number(TENSOR) * table.shape[0] if self.tensor > 1 else 0)
        rows = take_rows(table, local, fill=0, dtype=dtype)
        return jnp.where(((ids >= 0) & (ids < count))[..., None], self.sum(rows), jnp.nan)

    def own_heads(self, out: Float[Array, "B T H D"], copies: int) -> Float[Array, "B T H/copies D"]:
        """This device's share of heads that `copies` neighbours along the tensor axis all have."""
        if copies == 1:
            return out
        each = out.shape[2] // copies
        return jax.lax.dynamic_slice_in_dim(out, (self.number(TENSOR) % copies) * each, each, axis=2)

    def over_heads(self, copies: int, *sums: Array) -> tuple[Array, ...]:
        """Sums over the heads of all devices of the tensor axis, from those over each one's own, `copies` of which have
        the same. Added in device order."""
        if self.tensor == 1:
            return sums
        # Without a barrier XLA adds up each of these by one thread, where they are put beside each other: 0.19 ms of a
        # step.
        found = self._from_all(TENSOR, *jax.lax.optimization_barrier(sums))
        return tuple(functools.reduce(jnp.add, list(x[::copies])) for x in found)

    # Pages

    def own_table(self, group: str, table: Int[Array, "B M"]) -> Int[Array, "B M"]:
        """A table of page ids with this device's rows of the pool in their place; -1 for pages of other devices."""
        sizes = dict(self.pages)
        if self.context == 1 or group not in sizes:
            return table
        count = sizes[group]
        return jnp.where((table >= 0) & (table // count == self.number(CONTEXT)), table % count, -1)

    def own_pages(
        self, table: Int[Array, "B M"], lengths: Int[Array, "B"], first: Int[Array, "B"], page_size: int
    ) -> tuple[Int[Array, "B M/n+1"], Int[Array, "B"]]:
        """This device's pages of each row alone, up to the query's page, side by side in their order, and the tokens up
        to the query's as they stand there. A device without the query's own page has one token more, in a page that
        does not exist: so none of its pages counts as the query's.

        table: `own_table`. lengths: the query's token included. first: as `first_of` finds it.
        """
        mine, last = self._place(first), (lengths - 1) // page_size
        earlier = (last - mine + self.context - 1) // self.context  # own pages before the query's
        tokens = earlier * page_size + jnp.where(last % self.context == mine, lengths - last * page_size, 1)
        own = self._dealt(table, first)
        # A row may have pages after the query's, for drafts that were not accepted: they hold nothing that counts.
        reached = mine[:, None] + jnp.arange(own.shape[1], dtype=jnp.int32) * self.context <= last[:, None]
        return jnp.pad(jnp.where(reached, own, -1), ((0, 0), (0, 1)), constant_values=-1), tokens

    def _place(self, first: Int[Array, "B"]) -> Int[Array, "B"]:
        """Which page of a row is this device's first one; with n devices along the context axis, it has every nth from
        there on."""
        return (self.number(CONTEXT) - first) % self.context

    def _dealt(self, own: Int[Array, "B M"], first: Int[Array, "B"]) -> Int[Array, "B M/n"]:
        """The columns of this device's pages of each row in a table."""
        batch, width = own.shape
        columns = own.reshape(batch, width // self.context, self.context)
        return jnp.take_along_axis(columns, jnp.broadcast_to(self._place(first)[:, None, None], (*columns.shape[:2], 1)), axis=2)[..., 0]

    def first_of(self, group: str, table: Int[Array, "B M"]) -> Int[Array, "B"]:
        """On which device of the context axis the pages of each row of a table begin."""
        logical = jnp.arange(table.shape[1], dtype=jnp.int32)
        return jnp.max(jnp.where(table >= 0, (table // dict(self.pages)[group] - logical) % self.context, 0), axis=1)

    def merged(
        self,
        out: Float[Array, "B T H D"],
        lse: Float[Array, "B T H"],
        first: Int[Array, "B"],
        block_lse: Float[Array, "B T H W"] | None = None,
    ) -> tuple[Array, Array, Array | None]:
        """Attention over the keys of all devices of the context axis, from that over each one's own, in device order,
        beginning with the device that has a row's first page: so bits do not depend on which one that is. first: as
        `first_of` finds it. block_lse: of listed blocks, -inf on devices that do not hold them."""
        order = (first + jnp.arange(self.context, dtype=jnp.int32)[:, None]) % self.context
        found = self._from_all(CONTEXT, out, lse)
        outs, lses = (jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=0) for x in found)
        out, lse = merge_attention(list(outs), list(lses))
        return out, lse, None if block_lse is None else self.best_of(block_lse)

    def best_of(self, x: Array) -> Array:
        """The largest values that any device of the context axis has."""
        return jax.lax.pmax(x, CONTEXT)

    def candidates(self, *arrays: Array) -> tuple[Array, ...]:
        """What each device of the context axis found, side by side along the last axis."""
        return tuple(jnp.concatenate(list(x), axis=-1) for x in self._from_all(CONTEXT, *arrays))

    def _from_all(self, axis: str, *arrays: Array) -> tuple[Array, ...]:
        """Small arrays of each device of an axis, on all of them: `[n, *shape]`."""
        return all_gather(arrays, axis_name=axis, mesh=self.mesh)

    def places(self, table: Int[Array, "B M"], own: Int[Array, "B M"]) -> tuple[Int[Array, "B M/n"], Int[Array, "B M"]]:
        """How to bring the pages of a table together: the rows of the pool that this device contributes, 0 where there
        is none, and the place of each logical page among the contributions of all devices, one device after the other;
        -1 for none.

        own: `own_table`. Pages of a row are sharded in turn, beginning with any device.
        """
        (batch, width), count = table.shape, self.context
        logical = jnp.arange(width, dtype=jnp.int32)
        device = jax.lax.all_gather(own, CONTEXT)  # [n, B, M]
        holder = jnp.argmax(device >= 0, axis=0).astype(jnp.int32)
        first = jnp.max(jnp.where(table >= 0, (holder - logical) % count, 0), axis=1)
        rows = self._dealt(own, first)
        each = batch * (width // count)
        place = holder * each + jnp.arange(batch, dtype=jnp.int32)[:, None] * (width // count) + logical // count
        return jnp.maximum(rows, 0), jnp.where(table >= 0, place, -1)

    def gathered(self, pool: Array, rows: Int[Array, "B n"]) -> Array:
        """The rows of a pool that `places` names, of all devices one after the other."""
        return jax.lax.all_gather(pool[rows.reshape(-1)], CONTEXT, axis=0, tiled=True)

    # Programs

    def run(self, function: Callable, arrays: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]) -> Any:
        """`function(*arrays)` on every device of the mesh, over its part of the arrays. Specs are `PartitionSpec`s, or
        trees of them."""
        # Results without an axis of the mesh are the same on every device. JAX cannot show this where a kernel computes
        # them.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arrays)


WHOLE_COPY = PartitionSpec()
"""The same on every device."""

ONE_DEVICE = Shards()
"""Where there is no mesh."""


def check_mesh(mesh: Mesh | None, stores: Mapping[str, Any]) -> None:
    """NotImplementedError for a disk beside a mesh of several processes, and ValueError for one that leaves other
    processes out: processes agree on sizes and files together."""
    if mesh is None:
        return
    mesh = Shards(mesh).mesh
    if several_processes(mesh) and (left := set(range(jax.process_count())) - {each.process_index for each in mesh.devices.flat}):
        raise ValueError(f"the mesh has devices of several processes, but none of process {min(left)}: make it of all, or of one")
    if several_processes(mesh) and (disk := stores.get("disk")) is not None:
        raise NotImplementedError(
            f"pages of a mesh of several processes do not go to a disk, and {disk} was given: each process would find other pages there "
            "after one was killed. Leave out disk and disk_bytes, or make the mesh of the devices of one process"
        )


def plan_sizes(mesh: Mesh | None) -> dict[str, Any]:
    """What `kvjax.engine.memory.memory_plan` needs to know about an engine's mesh."""
    return {} if mesh is None else dict(mesh.shape) | {"devices": tuple(mesh.local_devices)}


def mesh_of(leaf: Array | np.ndarray) -> Mesh | None:
    """The mesh (`mesh`) over which an array is placed; None for one device."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (CONTEXT, TENSOR) else None


def on_host(arrays: Any) -> Any:
    """Arrays, or trees of them, in host memory, whole. Where a mesh has devices of several processes, each of them must
    call it."""
    if all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)):
        return jax.device_get(arrays)
    return multihost_utils.process_allgather(arrays, tiled=True)


def least_of_processes(mesh: Mesh | None, count: int) -> int:
    """The least of the counts that the processes of a mesh have found, each by itself."""
    if not several_processes(mesh):
        return count
    return int(multihost_utils.process_allgather(np.array(count, np.int32)).min())


def in_first_process(mesh: Mesh | None, task: Callable[[], None]) -> None:
    """Do a task once, if a mesh has devices of several processes; the others wait. OSError there if it fails in the
    first."""
    if not several_processes(mesh):
        return task()
    error = None
    try:
        if jax.process_index() == 0:
            task()
    except BaseException as failed:
        error = failed
    failures = multihost_utils.process_allgather(np.array(error is not None))
    if error is not None:
        raise error
    if failures.any():
        raise OSError("the first process of the mesh failed; its own message says why")


def several_processes(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter is cut along the tensor axis. axes: its logical axes, one of which is cut. rows: along that axis,
    the rows that each device has, in its order. Devices may have the same rows."""

    axes: LogicalAxes
    rows: tuple[tuple[int, ...], ...]

    @property
    def axis(self) -> int:
        """The number of the axis that is cut."""
        return next(number for number, name in enumerate(self.axes) if RULES.get(name) == TENSOR)


Units = list[list[int]]
"""Numbers of the units (heads, columns) that each device of the tensor axis has."""


def even(what: str, count: int, parts: int) -> Units:
    """Consecutive units for each of `parts` devices. ValueError if `count` units do not divide. what: their name."""
    if count % parts:
        raise ValueError(
            f"{count} {what} cannot be split over tensor={parts} devices, {count} / {parts} is no whole number: use a tensor "
            f"size that divides {count}"
        )
    each = count // parts
    return [list(range(part * each, (part + 1) * each)) for part in range(parts)]


def even_or_copied(what: str, count: int, parts: int) -> Units:
    """As `even`; where there are fewer units than devices, one for each device, so that several devices hold the
    same."""
    if count < parts and parts % count == 0:
        return [[part * count // parts] for part in range(parts)]
    if count < parts:
        raise ValueError(
            f"{count} {what} cannot be copied to tensor={parts} devices evenly, {parts} / {count} is no whole number: use a size that "
            f"divides {count}, or a multiple of it"
        )
    return even(what, count, parts)


def cut(axes: LogicalAxes, *sections: tuple[Units, int]) -> Cut:
    """A cut of an axis that consists of sections, one after the other, each of units of equal size. sections: which
    units each device has, and rows of a unit. A section holds each unit up to the largest number."""
    parts, start = [[] for _ in sections[0][0]], 0
    for units, size in sections:
        for rows, own in zip(parts, units, strict=True):
            rows += [start + unit * size + row for unit in own for row in range(size)]
        start += (1 + max(max(own) for own in units)) * size
    return Cut(axes, tuple(map(tuple, parts)))


def cut_of(how: Cut | None, matrix: Array | PackedMatrix, name: str) -> Any:
    """The cut of a parameter: `how` of an array; of a packed matrix one cut, or None, for each of its arrays, in their
    places.

    name: of the matrix, for the ValueError where a device would have a part of a block.
    """
    if not is_packed(matrix):
        return how
    own, axis = matrix.format, None if how is None else how.axis
    codes = scales = how
    if axis == 0:
        scales = _cut_blocks(how, own.rows, matrix, name)
    elif axis == 1:
        scales = None if own.columns is None else _cut_blocks(how, own.columns, matrix, name)
        codes = _cut_blocks(how, 2, matrix, name) if own.codes == "int4" else how
    return matrix.replace(codes=codes, scales=scales, zeros=None if matrix.zeros is None else scales)


def _cut_blocks(how: Cut, block: int, matrix: PackedMatrix, name: str) -> Cut:
    """The cut of blocks of `block` rows or columns each, from that of the rows or columns. Every device must have whole
    blocks."""
    if block == 1:
        return how
    size, parts = 1 + max(map(max, how.rows)), []
    for rows in how.rows:
        firsts = rows[::block]
        whole = [first + number for first in firsts for number in range(block)][: len(rows)]
        if list(rows) != whole or any(first % block for first in firsts) or (len(rows) % block and rows[-1] != size - 1):
            raise ValueError(
                f"{name} is packed as {matrix}, in blocks of {block} {('rows', 'columns')[how.axis]}, and a device of "
                f"tensor={len(how.rows)} would have parts of a block ({len(rows)} of {size}): use a smaller "
                "tensor size, or one scale for each channel (int8, fp8)"
            )
        parts.append(tuple(first // block for first in firsts))
    return Cut(how.axes, tuple(parts))
