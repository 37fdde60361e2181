"""Peer buffers: memory of each device of a mesh that the others write to, for kernels that exchange small arrays. No
NVSHMEM, no multicast.

XLA prepares each kernel that reaches into other devices' memory by its own means (`plgpu.remote_ref`, semaphores) anew
whenever a program starts: a meeting of the devices' host threads, a copy to the device, and before the launch a barrier
of all devices. With 56 exchanges a step this took most of the time. So a program has one such kernel for each kind of
exchange, `connect`. It makes a buffer in each device's memory, and a table of the addresses of all buffers. The kernels
that exchange get both as plain arrays, and XLA captures them in CUDA graphs as any other kernel. Each call asks for its
own buffer; XLA finds that calls of one kind ask for the same, and keeps one. Calls in a loop get buffers from before
it, where `pallas_kernels.collectives.preparation.before_loop` is around it.

A kernel's code comes to a device when it first runs there, and that may wait until the device is idle, while other
devices wait for it. So the kernel that exchanges runs once before `connect`, with a closed table, and does nothing.

The CTAs divide the array. A CTA writes its piece to its own part of every device's buffer, and waits until its part of
this device's buffer has the pieces of all devices, this one included. A piece is sent in lines of 16 bytes: two words,
each followed by the number of the call. A pair of a word and a number is written and read at once, so a reader knows by
the numbers that the words came: nothing else is signalled. (NCCL's protocol LL does the same, with the same
instructions.)

Why nothing is overwritten too early, read too early, or waited for in vain:

* A buffer. `connect` clears it, then signals to the others, and ends when all of them signalled. So nobody writes to a
  buffer before its owner is done with that memory's earlier use. XLA's barrier before `connect` makes sure that no
  signal comes before its semaphore is zeroed.
* Numbers. A CTA counts its calls in its device's buffer, from 1. All devices run the same program, so their counts
  agree. Only CTAs of one number ever touch a part of a buffer, so a line holds 0 or the number of an earlier call,
  until the right one comes. (Counts go round after 2^32 calls of one program.)
* Two halves. Calls write to the halves of a part in turn. A device that writes for call c + 2 has ended call c + 1, so
  it saw the pieces of that call of all others. They sent them after their kernel for call c had ended, and with it all
  reading of this half.
* The end. A call ends when the pieces of all devices are here. So after the last one nobody writes to a device's buffer
  any more.
* Waiting. A CTA sends without waiting for anything, so no device can wait for one that waits for it, if all CTAs of a
  launch fit on the GPU at once: at most `MAX_CTAS`, of 128 threads each.

Calls of one program must run one after the other. They do where each needs the one before, and in XLA's default order.

The tests run the kernels' bodies on emulated devices (tests/emulator/devices.py), whose steps are interleaved by
adversaries.

Memory traffic of each device: 2n times the array out, n - 1 of n over NVLink, as much in. `connect` writes the buffer,
512 KiB times n, once per program and kind of exchange.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lanes

THREADS = 128
MAX_CTAS = 64
"""All CTAs of a launch have to be on the GPU at once. Each GPU with NVLink of these compute capabilities has at least
78 cores."""

MAX_DEVICES = 8
"""The kernel's code grows with the devices; 8 is what one host has."""

PIECE_BYTES = 16 * THREADS
"""Of a CTA, at most: 16 bytes per thread."""

LINES = PIECE_BYTES // 8
"""Of a piece, at most. A line of four words holds two words of the piece."""

LINE_WORDS = 4

CLOSED = -1
"""In a table, in place of this device's number: there are no buffers."""

PAIRED = ("PCIe", "NVL")
"""Ends of names of GPUs of which at most two are linked by NVLink. Signals over PCIe were never tried, and it need not
have atomics."""

NO_NVLINK = (12, 0)
"""GPUs of this compute capability and above have none."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that a kernel's code depends on. size: numbers of the array; piece: those that a CTA exchanges."""

    axis_name: str
    num_devices: int
    size: int
    piece: int

    @property
    def ctas(self) -> int:
        """CTAs of a launch."""
        return self.size // self.piece


def piece_of(size: int, itemsize: int) -> int:
    """Numbers for each CTA: the largest power of two, up to 16 bytes per thread, that divides the array; below
    `THREADS`, none fits."""
    return min(PIECE_BYTES // itemsize, size & -size)


def unsuitable(mesh) -> str | None:
    """Why a kernel cannot reach the devices of this mesh."""
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


@functools.partial(jax.jit, static_argnames=("axis_name", "num_devices"))
def connect(axis_name: str, num_devices: int, loaded):
    """A buffer on each device of the axis, int32 `[buffer_words]`, and a table, int32 `[2n + 1]`: the addresses of the
    buffers of all devices in their order, each as its low and its high word, then this device's number. For the kernels
    of one program: see above.

    loaded: what the kernel that exchanges left of a closed table. It runs before, for its code to be on the device.
    """

    def kernel(_, buffer_ref, table_ref, ready):
        open_buffer(axis_name, num_devices, buffer_ref, table_ref, ready)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((buffer_words(num_devices),), jnp.int32), jax.ShapeDtypeStruct((2 * num_devices + 1,), jnp.int32)],
        grid=(MAX_CTAS,),
        grid_names=("cta",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],  # one for each CTA
    )(loaded)


def buffer_words(num_devices: int) -> int:
    """Words of a buffer: the count of calls of each CTA, then the parts of the CTAs."""
    return MAX_CTAS + MAX_CTAS * part_words(num_devices)


def part_words(num_devices: int) -> int:
    """Words of a CTA's part of a buffer: two halves, each with the lines of all devices."""
    return 2 * num_devices * LINES * LINE_WORDS


def lines_at(num_devices: int, cta, call, sender):
    """Where in a buffer the lines begin that a CTA of device `sender` writes in a call. In words."""
    return MAX_CTAS + ((cta * 2 + call % 2) * num_devices + sender) * (LINES * LINE_WORDS)


def open_buffer(axis_name: str, num_devices: int, buffer_ref, table_ref, ready) -> None:
    """By one CTA: clear its part of this device's buffer, and wait until all devices have cleared theirs. ready: this
    CTA's semaphore."""
    me, cta = lax.axis_index(axis_name), lax.axis_index("cta")
    clear(num_devices, buffer_ref, cta)
    note_addresses(table_ref, [plgpu.remote_ref(buffer_ref, {axis_name: device}) for device in range(num_devices)], me)
    for distance in range(1, num_devices):
        pl.semaphore_signal(ready, device_id={axis_name: lax.rem(me + distance, num_devices)})
    pl.semaphore_wait(ready, num_devices - 1)


def send_piece(s: Shape, buffer_ref, table_ref, x_ref):
    """By one CTA: send its piece to all devices. Returns the number of the call. For a table that is not closed."""
    me, cta = table_ref[2 * s.num_devices], lax.axis_index("cta")
    call = buffer_ref[cta] + 1
    send(s, x_ref.at[pl.ds(cta * s.piece, s.piece)], table_ref, lines_at(s.num_devices, cta, call, me), call)
    return call


def receive_pieces(s: Shape, buffer_ref, call, received_ref) -> None:
    """By one CTA: wait for the pieces of all devices, and count the call. received_ref: `[n, piece]`, in shared
    memory."""
    cta = lax.axis_index("cta")
    receive(s, buffer_ref, lines_at(s.num_devices, cta, call, 0), call, received_ref)
    buffer_ref[cta] = call


def closed(num_devices: int):
    """A buffer and a table with which a kernel that exchanges does nothing."""
    return jnp.zeros(buffer_words(num_devices), jnp.int32), jnp.full(2 * num_devices + 1, CLOSED, jnp.int32)


def is_open(s: Shape, table_ref):
    """Whether a table has buffers."""
    return table_ref[2 * s.num_devices] != CLOSED


# Stages by single threads


def clear(num_devices: int, buffer_ref, cta) -> None:
    """Zero a CTA's part of a buffer, and its count."""

    @lanes.stage(cta=cta)
    def run(arrays, _, cta):
        clear_part(part_words(num_devices), arrays, cta)

    run(buffer_ref, ())


def clear_part(words: int, buffer, cta) -> None:
    """See `clear`."""
    zero = lanes.i32(0)
    for start in range(0, words, LINE_WORDS * THREADS):
        lanes.store_global(buffer, cta * words + lanes.thread() * LINE_WORDS + (MAX_CTAS + start), zero, zero, zero, zero)
    with lanes.when(lanes.thread() == 0):
        lanes.store_global(buffer, cta, zero)


def note_addresses(table_ref, buffers, me) -> None:
    """Write the table."""

    @lanes.stage(me=me)
    def run(arrays, _, me):
        table, buffers = arrays
        with lanes.when(lanes.thread() == 0):
            for number, buffer in enumerate(buffers):
                for half, word in enumerate(lanes.address_words(buffer)):
                    lanes.store_global(table, 2 * number + half, word)
            lanes.store_global(table, 2 * len(buffers), me)

    run((table_ref, list(buffers)), ())


def send(s: Shape, x_ref, table_ref, place, call) -> None:
    """Write a piece to a place in the buffers of all devices. call: its number."""
    size = math.prod(x_ref.shape) * x_ref.dtype.itemsize

    @lanes.stage(place=place, call=call)
    def run(arrays, _, place, call):
        x, table = arrays
        send_lines(size, x, [lanes.at_address(table, 2 * device) for device in range(s.num_devices)], place, call)

    run((x_ref, table_ref), ())


def send_lines(size: int, x, buffers, place, call) -> None:
    """By each thread: 16 bytes, as two lines. Threads write lines side by side."""
    threads = size // 16
    with lanes.when(lanes.thread() < threads):
        words = lanes.load_global_16_bytes(x, lanes.thread() * 16)
        for buffer in buffers:
            for half in range(2):
                line = place + (lanes.thread() + half * threads) * LINE_WORDS
                lanes.store_line(buffer, line, words[2 * half], call, words[2 * half + 1], call)


def receive(s: Shape, buffer_ref, place, call, received_ref) -> None:
    """Wait for the lines of all devices, and copy their words to shared memory."""
    size = s.piece * received_ref.dtype.itemsize

    @lanes.stage(place=place, call=call)
    def run(buffer, received, place, call):
        receive_lines(size, s.num_devices, buffer, received, place, call)

    run(buffer_ref, received_ref)


def receive_lines(size: int, num_devices: int, buffer, received, place, call) -> None:
    """By each thread: 16 bytes of each device. All loads of a turn are on their way at once."""
    threads = size // 16

    def load() -> list[lanes.Scalar]:
        lines = [(device, half) for device in range(num_devices) for half in range(2)]
        return [
            word
            for device, half in lines
            for word in lanes.load_line(buffer, place + (lanes.thread() + half * threads) * LINE_WORDS + device * LINES * LINE_WORDS)
        ]

    with lanes.when(lanes.thread() < threads):
        missing = lambda *words: functools.reduce(operator.or_, [number != call for number in words[1::2]])  # noqa: E731
        words = lanes.while_loop(missing, lambda *_: load(), load())[::2]
        for device in range(num_devices):
            lanes.store_shared(received, lanes.thread() * 4 + device * (size // 4), *words[4 * device : 4 * device + 4])
    lanes.cta_barrier(THREADS)
