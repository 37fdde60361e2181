"""all_reduce for any backend, by exchanges of XLA. Not by `psum`: that adds in an order of its own, which may differ
from place to place.

Two ways, with equal bits. Small arrays are sent whole to every device, which adds all of them: one exchange. Of large
ones, each device adds one part for all devices and sends the sum to them: two exchanges, and as many bytes as a ring of
additions, 2 * (n - 1) / n of x.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.collectives.all_reduce.api import Call, add_in_order

GATHERED_BYTES = 2**22
"""Most bytes of the arrays of all devices together that each device receives whole. An estimate: an exchange more costs
about as much time as receiving these bytes."""


def all_reduce(call: Call, x, residual):
    """See `pallas_kernels.all_reduce`; takes no config."""
    if call.num_devices <= 2 or call.num_devices * x.size * x.dtype.itemsize <= GATHERED_BYTES:
        return add_in_order(jax.lax.all_gather(x, call.axis_name), residual)
    return _in_parts(call, x, residual)


def _in_parts(call: Call, x, residual):
    """Each device adds one part, for all."""
    count, each = call.num_devices, math.ceil(x.size / call.num_devices)

    def parts(array):
        return jnp.pad(array.reshape(-1), (0, count * each - x.size)).reshape(count, each)

    received = jax.lax.all_to_all(parts(x), call.axis_name, split_axis=0, concat_axis=0)  # row k: my part of device k's array
    own = None if residual is None else parts(residual)[jax.lax.axis_index(call.axis_name)]
    return jax.lax.all_gather(add_in_order(received, own), call.axis_name).reshape(-1)[: x.size].reshape(x.shape)
