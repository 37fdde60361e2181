"""pack_pages by definition, in NumPy: one group at a time, and of lattice points the nearest of all that surround a
block.

Slow: only for tests and debugging.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache.pack_pages.api import Call
from pallas_kernels.core.page_format import PageFormat, hadamard

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def pack_pages(call: Call, x):
    """See `pallas_kernels.pack_pages`."""
    format, (page_size, head_dim) = call.format, x.shape[-2:]
    codes = jax.ShapeDtypeStruct((*x.shape[:-1], format.width(head_dim)), format.code_dtype)
    shape = format.scale_shape(page_size, head_dim)
    scales = jax.ShapeDtypeStruct((*x.shape[:-2], *(shape or (1, 1))), format.scale_dtype or np.float32)
    found = jax.pure_callback(functools.partial(_pack, format, codes, scales), (codes, scales), x)
    return found[0], None if shape is None else found[1]


def _pack(format: PageFormat, codes, scales, x) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x).astype(np.float32)
    found, units = np.empty(codes.shape, codes.dtype), np.zeros(scales.shape, scales.dtype)
    with np.errstate(all="ignore"):
        for at in np.ndindex(*x.shape[:-2]):
            found[at], unit = _tile(format, x[at])
            if unit is not None:
                units[at] = unit
    return found, units


def _tile(format: PageFormat, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes and scales of a tile [P, D]."""
    if format.codes in ("q8_0", "q4_0"):
        return _ggml(format.codes, x)
    (page_size, head_dim), turned = x.shape, hadamard(x.shape[1]).astype(np.float64)
    if format.rotate:
        x = x.astype(np.float64) @ turned
    most = format.levels or {"int8": 127, "int4": 7, "fp8_e4m3": 448}[format.codes]
    shape = format.scale_shape(page_size, head_dim)
    unit = np.ones((1, 1))
    if shape is not None:
        unit = np.empty(shape)
        for row, column in np.ndindex(*shape):
            rows = slice(row, row + 1) if shape[0] == page_size else slice(None)
            wide = head_dim // shape[1]
            unit[row, column] = _scale(x[rows, column * wide : (column + 1) * wide], most)
        unit[unit < np.finfo(np.float32).tiny * (head_dim if format.rotate else 1)] = 0
    wide = np.repeat(unit, head_dim // unit.shape[1], axis=1)
    values = np.where((wide == 0) | np.isnan(wide), 0, x / wide)
    if format.codes == "fp8_e4m3":
        packed = np.where(np.isfinite(values), values.clip(-most, most), np.nan).astype(np.float32).astype(jnp.float8_e4m3fn)
    elif format.codes == "int8":
        packed = np.rint(values).clip(-most, most).astype(np.int8)
    elif format.codes == "int4":
        packed = (np.rint(values).clip(-most, most) + 8).astype(np.uint8)
        packed = packed[:, : head_dim // 2] + 16 * packed[:, head_dim // 2 :]
    else:
        packed = np.stack([_lattice_bytes(format, row) for row in values.clip(-most, most)])
    return packed, None if shape is None else unit / (head_dim if format.rotate else 1)


def _scale(x: np.ndarray, most: int) -> float:
    """The smallest bfloat16 that is at least the largest magnitude over `most`; NaN if a number is not finite."""
    wanted = np.float32(np.abs(x).max()) / np.float32(most)
    if not np.isfinite(wanted):
        return np.nan
    near = np.float32(wanted).astype(BFLOAT16)
    return float(near if np.float32(near) >= wanted else np.nextafter(near, BFLOAT16.type(np.inf)))


def nearest(lattice: str, block: np.ndarray) -> np.ndarray:
    """The nearest of all lattice points whose coordinates lie within 1 of the block's."""
    best, distance = None, np.inf
    for shift in (0.0,) if lattice == "d4" else (0.0, 0.5):
        low = np.floor(block - shift)
        steps = np.array(list(itertools.product((0, 1), repeat=len(block))))
        points = low + steps
        points = points[points.sum(1) % 2 == 0] + shift
        far = ((points - block) ** 2).sum(1)
        if far.min() < distance:
            best, distance = points[far.argmin()], far.min()
    return best


def _lattice_bytes(format: PageFormat, row: np.ndarray) -> np.ndarray:
    """Bytes of a token: bit i of every word lies in plane i // 8 if the plane is whole, else the bits of a plane lie
    together."""
    q, words = format.levels, []
    for block in row.reshape(-1, 4 if format.codes == "d4" else 8):
        point = nearest(format.codes, block)
        if format.codes == "d4":
            c = (point + q).astype(int)
            words.append(int(np.ravel_multi_index((c[0], c[1], c[2], c[3] // 2), (2 * q + 1, 2 * q + 1, 2 * q + 1, q + 1))))
        else:
            c = (np.floor(point) + q + 1).astype(int)
            wide, half = 2 * q + 2, int(point[0] % 1 != 0)
            words.append(int(np.ravel_multi_index(c[:4], (wide,) * 4)))
            words.append(int(np.ravel_multi_index((*c[4:7], c[7] // 2, half), (wide, wide, wide, q + 1, 2))))
    bits = np.array([[word >> i & 1 for i in range(format.word_bits)] for word in words], np.uint8)  # [word, bit]
    whole = format.word_bits // 8 * 8
    planes = [np.packbits(bits[:, i : i + 8], axis=1, bitorder="little")[:, 0] for i in range(0, whole, 8)]
    planes += [np.packbits(bits[:, i], bitorder="little") for i in range(whole, format.word_bits)]
    return np.concatenate(planes)


def _ggml(codes: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ggml-quants.c, a block of 32 numbers after the other."""
    blocks, packed, scales = x.reshape(-1, 32), [], []
    for block in blocks:
        if not np.isfinite(block).all():
            packed.append(np.full(32, 0, np.int8) if codes == "q8_0" else np.full(16, 0x88, np.uint8))
            scales.append(np.float16(np.nan))
            continue
        if codes == "q8_0":
            d = np.float32(np.abs(block).max()) / np.float32(127)
        else:
            d = block[np.abs(block).argmax()] / np.float32(-8)
        d = np.float32(0) if abs(d) < np.finfo(np.float32).tiny else d
        inverse = np.float32(1) / d if d else np.float32(0)
        scaled = block * inverse
        if codes == "q8_0":
            packed.append((np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5)).astype(np.int8))
        else:
            number = np.minimum(15, (scaled + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
            packed.append(number[:16] | (number[16:] << 4))
        scales.append(d.astype(np.float16))
    return np.concatenate(packed).reshape(len(x), -1), np.array(scales).reshape(len(x), -1)
