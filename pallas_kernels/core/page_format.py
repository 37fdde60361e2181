"""How the numbers of a page are stored: as they are, or as codes with scales. Sizes of both; and how codes become
numbers again."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.core import lattices

CODES = ("float32", "bfloat16", "float16")
"""Formats that store numbers as they are, by dtype. Queries have one of these dtypes, too."""

LARGEST = {"fp8_e4m3": 448, "int8": 127, "int4": 7}
"""The largest code of each format with symmetric codes: the largest number of a group that shares a scale becomes this
code."""

GGML = {"q8_0": 8, "q4_0": 4}
"""ggml's formats, and the bits of a code: groups of 32 consecutive numbers of a token, with one float16 scale each."""
GGML_GROUP = 32

LATTICES = ("d4", "e8")
PACKED = (*LARGEST, *GGML, *LATTICES)
"""Formats that store codes. 4-bit codes and lattice points are bytes (uint8), the others int8 or float8_e4m3fn."""

SCALES = ("token", "channel", "page")
"""What shares a scale: numbers of a token (all, or groups of them), of a channel over the page, or of a whole (page,
head) tile."""

MAX_LEVELS = 126


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """How the numbers of a page are stored. Static and hashable.

    Numbers are codes times a scale, rounded once to `read_as`. `pallas_kernels.pack_pages` says how codes and scales
    are found.

    Args:
        codes: one of `CODES` (numbers as they are; no other argument is given then), or of `PACKED`.
        scale: of fp8_e4m3, int8 and int4: one of `SCALES`; fp8_e4m3 also takes None, no scale. None for formats that
            define it themselves: q8_0 and q4_0 have a scale per group of 32, lattices one per token.
        group: with scale "token": how many consecutive numbers share a scale; None: all of the token.
        levels: of lattices: each coordinate of a point lies between -levels and levels (1 to 126). More levels need
            more bits.
        rotate: multiply each token by a Hadamard matrix before it is packed, and back when it is read. It spreads
            outliers over all channels. Needs integer codes (no fp8), one scale per token or page, and a head dim that
            is a power of two.
        read_as: dtype of the numbers that reading packed pages gives, one of `CODES`.

    Raises ValueError for what does not fit together.
    """

    codes: str
    scale: str | None = None
    group: int | None = None
    levels: int | None = None
    rotate: bool = False
    read_as: str | None = None

    def __post_init__(self):
        if self.codes not in (*CODES, *PACKED):
            raise ValueError(f"pages hold {', '.join((*CODES, *PACKED))}, not {self.codes!r}: use one of these")
        if not self.packed:
            if dataclasses.astuple(self)[1:] != (None, None, None, False, None):
                raise ValueError(f"{self.codes} stores numbers as they are: it takes no other argument, got {self}")
            return
        if self.read_as not in CODES:
            raise ValueError(f"read_as of packed pages must be one of {', '.join(CODES)}, got {self.read_as!r}")
        if self.codes in LARGEST:
            allowed = (*SCALES, None) if self.codes == "fp8_e4m3" else SCALES
            if self.scale not in allowed:
                raise ValueError(f"scale of {self.codes} must be one of {', '.join(map(str, allowed))}, got {self.scale!r}")
        elif self.scale is not None:
            raise ValueError(f"{self.codes} defines its scales itself: give no scale, got {self.scale!r}")
        if self.group is not None and (self.scale != "token" or not isinstance(self.group, int) or self.group < 1):
            raise ValueError(f"group must be a positive int, and goes with scale 'token' only; got {self.group!r} with {self.scale!r}")
        if (self.levels is not None) != (self.codes in LATTICES) or not 1 <= (1 if self.levels is None else self.levels) <= MAX_LEVELS:
            raise ValueError(f"lattices, and only they, need levels from 1 to {MAX_LEVELS}; got {self.levels!r} with {self.codes}")
        one_scale = self.codes in LATTICES or (self.scale in ("token", "page") and self.group is None)
        if self.rotate and (not one_scale or self.codes == "fp8_e4m3"):
            raise ValueError(f"rotation needs integer codes and one scale per token or page: not {self}")

    @property
    def packed(self) -> bool:
        """Whether pages hold codes, not the numbers themselves."""
        return self.codes in PACKED

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the numbers that reading gives."""
        return jnp.dtype(self.read_as or self.codes)

    @property
    def code_dtype(self) -> jnp.dtype:
        """The dtype of the array that holds the codes."""
        if not self.packed:
            return jnp.dtype(self.codes)
        return jnp.dtype({"fp8_e4m3": jnp.float8_e4m3fn, "int8": jnp.int8, "q8_0": jnp.int8}.get(self.codes, jnp.uint8))

    @property
    def scale_dtype(self) -> jnp.dtype | None:
        """The dtype of scales: float16 in ggml's formats, bfloat16 (which has float32's range) in the others; None:
        there are none."""
        if not self.packed or (self.codes == "fp8_e4m3" and self.scale is None):
            return None
        return jnp.dtype(jnp.float16 if self.codes in GGML else jnp.bfloat16)

    @property
    def word_bits(self) -> int:
        """Bits of a lattice point's four coordinates."""
        return lattices.word_bits(self.codes, self.levels)

    def width(self, head_dim: int) -> int:
        """Elements of `code_dtype` that hold a token of `head_dim` numbers. ValueError where the head dim does not fit
        the format."""
        multiple = {"int4": 2, "q8_0": GGML_GROUP, "q4_0": GGML_GROUP, "d4": 32, "e8": 32}.get(self.codes, 1)
        multiple = math.lcm(multiple, self.group or 1)
        if head_dim % multiple or (self.rotate and head_dim & (head_dim - 1)):
            need = f"a multiple of {multiple}" + (" and a power of two" if self.rotate else "")
            raise ValueError(f"pages of {self.codes} need a head dim that is {need}, got {head_dim}: choose another format for this model")
        if self.codes in LATTICES:
            return head_dim // 4 * self.word_bits // 8
        return head_dim // 2 if self.codes in ("int4", "q4_0") else head_dim

    def head_dim(self, width: int) -> int:
        """Numbers of a token whose codes take `width` elements."""
        if self.codes in LATTICES:
            return width * 8 // self.word_bits * 4
        return 2 * width if self.codes in ("int4", "q4_0") else width

    def scale_shape(self, page_size: int, head_dim: int) -> tuple[int, int] | None:
        """Shape of a (page, head) tile's scales: `[P or 1, groups, D or 1]` as two axes; None without scales."""
        if self.scale_dtype is None:
            return None
        if self.scale == "channel":
            return 1, head_dim
        if self.scale == "page":
            return 1, 1
        group = GGML_GROUP if self.codes in GGML else self.group
        return page_size, 1 if group is None else head_dim // group

    def bytes_per_page(self, page_size: int, head_dim: int) -> int:
        """Bytes of one (page, head) tile of keys or of values, scales included."""
        shape = self.scale_shape(page_size, head_dim)
        scales = 0 if shape is None else math.prod(shape) * self.scale_dtype.itemsize
        return page_size * self.width(head_dim) * self.code_dtype.itemsize + scales


def unpack(format: PageFormat, codes: Array, scales: Array | None) -> Float[Array, "*lead S D"]:
    """The numbers of packed tokens: codes `[*lead, S, width]`, scales `[*lead, S or 1, n]`. Returns `[*lead, S, D]` in
    `format.dtype`.

    Each number depends on its own token alone, and every sum on the way is exact. So any cut into tiles gives the same
    bits.
    """
    values = numbers_of(format, codes)
    head_dim = values.shape[-1]
    if format.rotate:
        values = jnp.matmul(values, jnp.asarray(hadamard(head_dim)), precision="highest")  # sums of integers below 2^24
    if scales is not None:
        scales = scales.astype(jnp.float32)
        if 1 < scales.shape[-1] < head_dim:
            scales = jnp.repeat(scales, head_dim // scales.shape[-1], axis=-1)
        values = values * scales
    return values.astype(format.dtype)


def numbers_of(format: PageFormat, codes: Array) -> Float[Array, "*lead S D"]:
    """Codes as float32 numbers, before scale and rotation: exact."""
    if format.codes == "int4":
        return jnp.concatenate([_nibble(codes, 0), _nibble(codes, 4)], axis=-1) - 8.0
    if format.codes == "q4_0":
        grouped = codes.reshape(*codes.shape[:-1], -1, GGML_GROUP // 2)
        both = jnp.concatenate([_nibble(grouped, 0), _nibble(grouped, 4)], axis=-1) - 8.0
        return both.reshape(*codes.shape[:-1], -1)
    if format.codes in LATTICES:
        return lattices.points(format.codes, format.levels, codes)
    return codes.astype(jnp.float32)


def _nibble(codes: Array, shift: int) -> Array:
    return ((codes >> shift) & 15).astype(jnp.float32)


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix `[size, size]` of 1 and -1, float32. It is symmetric, and its square is `size` times
    the identity."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
