"""all_reduce in Pallas Mosaic GPU: one launch per device, which writes straight to the memory of the others. No NVSHMEM, no multicast.

Each device owns a buffer with a row for every device. The CTAs divide the array. A CTA writes its piece to this device's row of every
buffer, signals the same CTA of every other device, waits for the signals of all of them, and adds the rows in device order.

Why nothing is overwritten too early, read too early, or waited for in vain:

* Before. XLA puts a barrier of all devices of the mesh before a kernel that reaches into other devices' memory. A device passes it after
  everything that comes before in its own stream: the zeroing of its semaphores, and whatever used the memory of its buffer until then. So
  no device writes to a buffer, or signals, before its owner is done with its earlier work, the previous call included. This is why one
  buffer is enough, and why no signal comes before its semaphore is zeroed.
* Within. A row of a buffer is written by one device, once per call. A signal comes after the writes of its CTA (release), and a wait comes
  before the reads (acquire). A signal is sent without waiting for anything, so no device can wait for one that waits for it, if all CTAs of
  a launch fit on the GPU at once: at most `MOST_CTAS`, of 128 threads each and without shared memory.
* After. A device leaves when each of its CTAs has had the signals of all others, so when nobody will write to its memory any more. Nobody
  reads memory of others.

The tests run the kernel's body on emulated devices (tests/emulator/devices.py), whose steps are interleaved by adversaries.

Memory traffic of each device: n - 1 times x out over NVLink, as much in; x, the residual, n rows and the sum in its own memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.all_reduce.api import Call
from pallas_kernels.hopper import lanes

THREADS = 128
MOST_CTAS = 64
"""All CTAs of a launch have to be on the GPU at once. Each GPU with NVLink of these compute capabilities has at least 78 cores."""

MOST_DEVICES = 8
"""The kernel's code grows with the devices; 8 is what one host has."""

PIECE_BYTES = 16 * THREADS
"""Of a CTA, at most: 16 bytes per thread."""

PAIRED = ("PCIe", "NVL")
"""Ends of names of GPUs of which at most two are linked by NVLink. Signals over PCIe were never tried, and it need not have atomics."""

NO_NVLINK = (12, 0)
"""GPUs of this compute capability and above have none."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. piece: numbers of the array that a CTA adds."""

    axis_name: str
    num_devices: int
    size: int
    piece: int
    with_residual: bool

    @property
    def ctas(self) -> int:
        """CTAs of a launch."""
        return self.size // self.piece


def piece_of(size: int, itemsize: int) -> int:
    """Numbers for each CTA: the largest power of two, up to 16 bytes per thread, that divides the array; below `THREADS`, none fits."""
    return min(PIECE_BYTES // itemsize, size & -size)


def unsupported(call: Call, x, residual) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    piece = piece_of(x.size, x.dtype.itemsize)
    if not 2 <= call.num_devices <= MOST_DEVICES:
        return f"adds over 2 to {MOST_DEVICES} devices, got {call.num_devices}"
    if piece < THREADS:
        return f"the numbers of x must be a multiple of {THREADS}, got {x.size}"
    if x.size > MOST_CTAS * piece:
        return f"takes up to {MOST_CTAS} pieces of {piece} numbers ({piece * x.dtype.itemsize} bytes), got {x.size} numbers"
    return _unsuitable(call.mesh)


def _unsuitable(mesh) -> str | None:
    """Why the kernel cannot reach the devices of this mesh."""
    if mesh is None:
        return "has to know the devices: pass mesh"
    devices = list(mesh.devices.flat)
    if any(device.process_index != jax.process_index() for device in devices) or jax.device_count() != jax.local_device_count():
        return "reaches devices of one process alone, and there are several processes"
    if [device.id for device in devices] != list(range(len(devices))):
        return f"needs a mesh of the first devices in their order, got devices {[device.id for device in devices]}"
    kinds = {device.device_kind for device in devices}
    if dispatch.compute_capability() >= NO_NVLINK or any(kind.endswith(PAIRED) for kind in kinds):
        return f"needs NVLink between all devices, which {' and '.join(sorted(kinds))} have between pairs at most"
    return None


def all_reduce(call: Call, x, residual):
    """See `pallas_kernels.all_reduce.all_reduce`; takes no config."""
    if reason := unsupported(call, x, residual):
        raise NotImplementedError(f"all_reduce 'mosaic_gpu': {reason}")
    s = Shape(call.axis_name, call.num_devices, x.size, piece_of(x.size, x.dtype.itemsize), residual is not None)
    return _exchange(s, x.reshape(-1), None if residual is None else residual.reshape(-1)).reshape(x.shape)


@functools.partial(jax.jit, static_argnames="s")  # a step calls it for every layer: it is traced and lowered once
def _exchange(s: Shape, x, residual):
    lanes.check_version()
    given = [x] if residual is None else [x, residual]

    def kernel(*refs):
        add_piece(s, *refs[:1], *(refs[1:] if s.with_residual else (None, *refs[1:])))

    received, total = jax.ShapeDtypeStruct((s.num_devices, s.size), x.dtype), jax.ShapeDtypeStruct((s.size,), x.dtype)
    call_kernel = plgpu.kernel(
        kernel,
        out_type=[received, total],
        grid=(s.ctas,),
        grid_names=("cta",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],  # one for each CTA
    )
    return call_kernel(*given)[1]


def add_piece(s: Shape, x_ref, residual_ref, received_ref, out_ref, arrived) -> None:
    """By one CTA: send its piece, wait for those of the others, add. received_ref: this device's buffer. arrived: this CTA's semaphore."""
    me, cta = lax.axis_index(s.axis_name), lax.axis_index("cta")
    piece = pl.ds(cta * s.piece, s.piece)
    others = [{s.axis_name: lax.rem(me + distance, s.num_devices)} for distance in range(1, s.num_devices)]  # neighbours first: all links
    buffers = [received_ref, *(plgpu.remote_ref(received_ref, other) for other in others)]
    send(x_ref.at[piece], [buffer.at[me, piece] for buffer in buffers])
    for other in others:  # after all writes: a release waits until what was written before has arrived, so only the first one waits
        pl.semaphore_signal(arrived, device_id=other)
    residual = residual_ref[piece].astype(jnp.float32) if s.with_residual else None
    pl.semaphore_wait(arrived, s.num_devices - 1)
    total = received_ref[0, piece].astype(jnp.float32)
    for device in range(1, s.num_devices):
        total = total + received_ref[device, piece].astype(jnp.float32)
    if residual is not None:
        total = total + residual
    out_ref[piece] = total.astype(out_ref.dtype)


def send(x_ref, row_refs) -> None:
    """Copy a piece to rows of buffers, of this device and of others. Pallas itself would write 2 bytes at a time to others: it does not
    know how pointers to their memory are aligned."""
    size = math.prod(x_ref.shape) * x_ref.dtype.itemsize

    @lanes.stage()
    def run(arrays, _):
        copy_piece(size, *arrays)

    run((x_ref, list(row_refs)), ())


def copy_piece(size: int, x_ref, row_refs) -> None:
    """By single threads: copy so many bytes, a multiple of 16, to each of the rows."""
    with lanes.when(lanes.thread() < size // 16):
        words = lanes.load_global_16_bytes(x_ref, lanes.thread() * 16)
        for ref in row_refs:
            lanes.store_global(ref, lanes.thread() * 4, *words)
