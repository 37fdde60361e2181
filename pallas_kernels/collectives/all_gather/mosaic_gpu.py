"""all_gather in Pallas Mosaic GPU: launches on each device that write to the memory of the others
(`pallas_kernels.collectives.peer_buffers`).

All arrays go as one array of 32-bit words, which XLA puts together before the launch and takes apart after it. More
words than a launch takes go in several of equal size, which use one buffer, so each takes a part of the one before as
an operand: XLA might run them beside each other otherwise. Memory traffic of each device: that of the exchange, the
words, and n times the words.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_gather.api import KERNEL_BYTES, Call
from pallas_kernels.collectives.preparation import prepared
from pallas_kernels.hopper.threads import lanes

WORDS = peer_buffers.PIECE_BYTES // 4
"""Of a piece, at most."""

MAX_WORDS = peer_buffers.MAX_CTAS * WORDS
"""Of a launch."""


def words_of(shape: tuple[int, ...], itemsize: int) -> int:
    """Words that an array takes."""
    return -(-math.prod(shape) * itemsize // 4)


def launches_of(words: int) -> tuple[int, int, int]:
    """How many launches so many words take, the words of each, and those of each CTA: a power of two, no more than
    needed."""
    count = -(-words // MAX_WORDS)
    each = -(-words // count)
    piece = min(WORDS, max(peer_buffers.THREADS, 1 << (each - 1).bit_length()))
    return count, -(-each // piece) * piece, piece


def unsupported(call: Call, *arrays) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if not 2 <= call.num_devices <= peer_buffers.MAX_DEVICES:
        return f"exchanges over 2 to {peer_buffers.MAX_DEVICES} devices, got {call.num_devices}"
    size = 4 * sum(words_of(x.shape, x.dtype.itemsize) for x in arrays)
    if size > KERNEL_BYTES:
        return f"takes up to {KERNEL_BYTES} bytes of all arrays, got {size}"
    return peer_buffers.unsuitable(call.mesh)


def all_gather(call: Call, *arrays):
    """See `pallas_kernels.all_gather`; takes no config."""
    if reason := unsupported(call, *arrays):
        raise NotImplementedError(f"all_gather 'mosaic_gpu': {reason}")
    sizes = [words_of(x.shape, x.dtype.itemsize) for x in arrays]
    count, size, piece = launches_of(sum(sizes))
    words = jnp.concatenate([*map(_as_words, arrays), jnp.zeros(count * size - sum(sizes), jnp.int32)])
    s = peer_buffers.Shape(call.axis_name, call.num_devices, size, piece)
    buffer, table = prepared(("all_gather", s, count > 1), functools.partial(_open, s, count > 1))
    if count == 1:
        found = _collect(s, buffer, table, words, None)
    else:
        launches, before = [], words[:size]
        for each in jnp.split(words, count):
            launches.append(_collect(s, buffer, table, each, before))
            before = launches[-1][:size]
        found = jnp.concatenate([each.reshape(s.num_devices, size) for each in launches], axis=1)
    found = found.reshape(s.num_devices, count * size)
    parts = jnp.split(found, [sum(sizes[: n + 1]) for n in range(len(sizes))], axis=1)
    return tuple(_from_words(part, x.shape, x.dtype) for part, x in zip(parts, arrays, strict=False))


def _as_words(x):
    """An array's bits, int32 `[words]`."""
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.int32).reshape(-1)
    pairs = jnp.pad(x.reshape(-1), (0, x.size % 2)).reshape(-1, 2)
    return lax.bitcast_convert_type(pairs, jnp.int32)


def _from_words(words, shape: tuple[int, ...], dtype):
    """`[n, *shape]` from int32 `[n, words]`."""
    numbers = lax.bitcast_convert_type(words, dtype)
    return numbers.reshape(len(words), -1)[:, : math.prod(shape)].reshape(len(words), *shape)


# A step calls both for every layer: they are traced and lowered once, and all calls' kernels are the same to XLA.


@functools.partial(jax.jit, static_argnames=("s", "several"))
def _open(s: peer_buffers.Shape, several: bool):
    lanes.check_version()
    nothing = jnp.zeros(s.size, jnp.int32)
    return peer_buffers.connect(
        s.axis_name, s.num_devices, _collect(s, *peer_buffers.closed(s.num_devices), nothing, nothing if several else None)
    )


@functools.partial(jax.jit, static_argnames="s")
def _collect(s: peer_buffers.Shape, buffer, table, words, before):
    """before: what has to be there first, of the launch before, or None; not read."""

    def kernel(buffer_ref, table_ref, words_ref, *others):
        collect_pieces(s, buffer_ref, table_ref, words_ref, *others[-2:])

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((s.num_devices * s.size,), jnp.int32)],
        grid=(s.ctas,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((s.num_devices, s.piece), jnp.int32)],
    )(buffer, table, words, *([] if before is None else [before]))[0]


def collect_pieces(s: peer_buffers.Shape, buffer_ref, table_ref, words_ref, out_ref, received_ref) -> None:
    """By one CTA: exchange its piece, and write those of all devices. Of a closed table: nothing."""

    @pl.when(peer_buffers.is_open(s, table_ref))
    def _():
        call = peer_buffers.send_piece(s, buffer_ref, table_ref, words_ref)
        peer_buffers.receive_pieces(s, buffer_ref, call, received_ref)
        start = lax.axis_index("cta") * s.piece
        for device in range(s.num_devices):
            out_ref[pl.ds(device * s.size + start, s.piece)] = received_ref[device]
