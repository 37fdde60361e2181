"""all_reduce in Pallas Mosaic GPU: one launch per device, which writes to the memory of the others
(`pallas_kernels.collectives.peer_buffers`).

A CTA adds its piece of the arrays of all devices in device order. Memory traffic of each device: that of the exchange;
x, the residual and the sum in its own memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_reduce.api import Call
from pallas_kernels.collectives.preparation import prepared
from pallas_kernels.hopper.threads import lanes


def unsupported(call: Call, x, residual) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    piece = peer_buffers.piece_of(x.size, x.dtype.itemsize)
    if not 2 <= call.num_devices <= peer_buffers.MAX_DEVICES:
        return f"adds over 2 to {peer_buffers.MAX_DEVICES} devices, got {call.num_devices}"
    if piece < peer_buffers.THREADS:
        return f"the numbers of x must be a multiple of {peer_buffers.THREADS}, got {x.size}"
    if x.size > peer_buffers.MAX_CTAS * piece:
        return f"takes up to {peer_buffers.MAX_CTAS} pieces of {piece} numbers ({piece * x.dtype.itemsize} bytes), got {x.size} numbers"
    return peer_buffers.unsuitable(call.mesh)


def all_reduce(call: Call, x, residual):
    """See `pallas_kernels.all_reduce`; takes no config."""
    if reason := unsupported(call, x, residual):
        raise NotImplementedError(f"all_reduce 'mosaic_gpu': {reason}")
    s = peer_buffers.Shape(call.axis_name, call.num_devices, x.size, peer_buffers.piece_of(x.size, x.dtype.itemsize))
    residual = jnp.full_like(x, -0.0) if residual is None else residual  # so that a program has one kernel; -0.0 changes no bit
    buffer, table = prepared(("all_reduce", s, x.dtype.name), functools.partial(_open, s, x.dtype))
    return _add(s, buffer, table, x.reshape(-1), residual.reshape(-1)).reshape(x.shape)


# A step calls both for every layer: they are traced and lowered once, and all calls' kernels are the same to XLA.


@functools.partial(jax.jit, static_argnames=("s", "dtype"))
def _open(s: peer_buffers.Shape, dtype):
    lanes.check_version()
    nothing = jnp.zeros(s.size, dtype)
    return peer_buffers.connect(s.axis_name, s.num_devices, _add(s, *peer_buffers.closed(s.num_devices), nothing, nothing))


@functools.partial(jax.jit, static_argnames="s")
def _add(s: peer_buffers.Shape, buffer, table, x, residual):
    return plgpu.kernel(
        functools.partial(add_piece, s),
        out_type=[jax.ShapeDtypeStruct((s.size,), x.dtype)],
        grid=(s.ctas,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((s.num_devices, s.piece), x.dtype)],
    )(buffer, table, x, residual)[0]


def add_piece(s: peer_buffers.Shape, buffer_ref, table_ref, x_ref, residual_ref, out_ref, received_ref) -> None:
    """By one CTA: exchange its piece, and add those of all devices in their order. Of a closed table: nothing."""

    @pl.when(peer_buffers.is_open(s, table_ref))
    def _():
        piece = pl.ds(lax.axis_index("cta") * s.piece, s.piece)
        call = peer_buffers.send_piece(s, buffer_ref, table_ref, x_ref)
        residual = residual_ref[piece].astype(jnp.float32)
        peer_buffers.receive_pieces(s, buffer_ref, call, received_ref)
        total = received_ref[0].astype(jnp.float32)
        for device in range(1, s.num_devices):
            total = total + received_ref[device].astype(jnp.float32)
        out_ref[piece] = (total + residual).astype(out_ref.dtype)
