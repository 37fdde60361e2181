"""bitsandbytes' 4 bits: nf4 and fp4, in blocks that follow each other across rows, with scales that may be packed
themselves.

Tensors of a matrix [F, E], read as one row of F E numbers:

    weight [F E / 2, 1] bytes of two codes, the high half first (bytes may be stored as numbers of another type); weight.absmax: a scale for
    each block, float32, or uint8 codes of weight.nested_quant_map [256] with weight.nested_absmax for each nested block and nested_offset;
    weight.quant_map [16]; weight.quant_state.bitsandbytes__nf4 or __fp4: JSON in bytes, with shape, block sizes and nested_offset

Sources: QLoRA (arXiv 2305.14314), bitsandbytes' `QuantState` and `dequantize_4bit`: products in float32.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from kvjax.models.quantization.layouts import AGAIN, Layout, StoredMatrix

_QUARTERS = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
_CODES = {
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
    "fp4": np.array([*_QUARTERS, *(-number for number in _QUARTERS)], np.float32) / np.float32(12),
}
"""The number of each code, by kind."""

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16


class Bnb4(Layout):
    """See the module."""

    parts = ("weight.absmax", "weight")
    more = ("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *(_STATE + kind for kind in _CODES))

    def check(self, matrix: StoredMatrix) -> None:
        """Shapes and types, and what the state says of them."""
        state, count = self.state(matrix), math.prod(matrix.shape)
        stored = matrix.parts["weight"]
        if stored.nbytes != -(-count // 2):
            raise ValueError(f"{matrix.module} has weight {stored.dtype}{list(stored.shape)}, must hold {count} numbers of 4 bits: {AGAIN}")
        blocks = -(-count // state["blocksize"])
        nested = "weight.nested_absmax" in matrix.parts
        matrix.check("weight.absmax", ((blocks,),), ("U8",) if nested else ("F32",))
        if nested:
            if "weight.nested_quant_map" not in matrix.parts:
                raise ValueError(f"{matrix.module} is stored packed without weight.nested_quant_map: {AGAIN}")
            matrix.check("weight.nested_absmax", ((-(-blocks // state["nested_blocksize"]),),), ("F32",))
            matrix.check("weight.nested_quant_map", ((256,),), ("F32",))
        if "weight.quant_map" in matrix.parts:
            matrix.check("weight.quant_map", ((16,),), ("F32",))
            if not np.allclose(matrix.array("weight.quant_map"), _CODES[state["quant_type"]], atol=1e-6):
                raise ValueError(f"{matrix.module} has a weight.quant_map that is not that of {state['quant_type']}: {AGAIN}")

    def state(self, matrix: StoredMatrix) -> dict[str, Any]:
        """What the JSON says, checked: quant_type, blocksize, and of nested scales nested_blocksize and
        nested_offset."""
        kinds = [kind for kind in _CODES if _STATE + kind in matrix.parts]
        if len(kinds) != 1:
            raise ValueError(f"{matrix.module} is stored packed without {_STATE}nf4 or fp4, or with both: {AGAIN}")
        stored = matrix.parts[_STATE + kinds[0]]
        try:
            if stored.dtype != "U8" or math.prod(stored.shape) > _MAX_STATE_BYTES:
                raise ValueError(f"it is {stored.dtype}{list(stored.shape)}")
            found = json.loads(matrix.array(_STATE + kinds[0]).tobytes())
            if found.get("quant_type") != kinds[0] or tuple(found.get("shape") or ()) != matrix.shape:
                raise ValueError(f"quant_type {found.get('quant_type')!r:.50}, shape {found.get('shape')!r:.50}")
            sizes = found.get("blocksize"), found.get("nested_blocksize", 256)
            if not all(isinstance(size, int) and size in _BLOCKS for size in sizes):  # 64.0 equals 64, but is no index
                raise ValueError(f"blocksize {found.get('blocksize')!r:.50}, nested_blocksize {found.get('nested_blocksize')!r:.50}")
            offset = found.setdefault("nested_offset", 0.0)
            if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
                raise ValueError(f"nested_offset {offset!r:.50}")
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            said = f"{matrix.module} has a {_STATE}{kinds[0]} that does not describe it ({error!s:.200}); it is {list(matrix.shape)}"
            raise ValueError(f"{said}: {AGAIN}") from error
        found.setdefault("nested_blocksize", 256)
        return found

    def numbers(self, matrix: StoredMatrix, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in float32."""
        state, inputs = self.state(matrix), matrix.shape[1]
        first, last, size = start * inputs, stop * inputs, state["blocksize"]
        pairs = matrix.parts["weight"].bytes(first // 2, -(-last // 2))
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        blocks = np.arange(first // size, -(-last // size))
        scales = matrix.some("weight.absmax", int(blocks[0]), int(blocks[-1]) + 1)
        if "weight.nested_absmax" in matrix.parts:
            outer = matrix.array("weight.nested_absmax")[blocks // state["nested_blocksize"]]
            scales = matrix.array("weight.nested_quant_map")[scales] * outer + np.float32(state["nested_offset"])
        each = np.repeat(scales, size)[first % size :][: last - first]
        return (_CODES[state["quant_type"]][codes] * each).reshape(stop - start, inputs)
