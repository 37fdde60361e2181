"""Codes in registers, by emulated threads: every code, exactly; and the order of pairs; and the banks of short rows."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper.threads import lane_codes, lane_copies, lanes

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def unpacked(emulated, codes: str, dtype: str, zero: int | None) -> np.ndarray:
    """The numbers of every code of 8 bits, or of all pairs of codes of 4 bits, in the order of the codes. 64 words of 4
    bytes."""
    stored = np.arange(256, dtype=np.uint8).view(np.int32)
    per_word = lane_codes.PER_WORD[codes]
    out, order = np.zeros((per_word // 2, 64), np.int32), np.zeros((per_word // 2, 64), np.int32)

    def stage(arrays, _):
        at = lanes.thread()
        zeros = None if zero is None else lane_codes.zero_word(lanes.i32(zero), dtype)
        pairs = lane_codes.numbers(lanes.load_global(arrays["stored"], at), codes, dtype, zeros)
        numbered = [lanes.i32(2 * n | (2 * n + 1) << 16) for n in range(per_word // 2)]
        for n, (pair, places) in enumerate(zip(pairs, lane_codes.paired(numbered), strict=True)):
            lanes.store_global(arrays["out"], at + 64 * n, pair)
            lanes.store_global(arrays["order"], at + 64 * n, places)

    emulated.run_cluster(stage, ctas=1, threads=64, arrays={"stored": stored, "out": out, "order": order}, scratch_words={})
    pairs = out.T.copy().view(DTYPES[dtype]).astype(np.float64)  # [words, codes]
    places = order.T.copy().view(np.uint16)
    found = np.full((64, per_word), np.nan)
    np.put_along_axis(found, places.astype(np.int64), pairs, axis=1)
    return found.reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codes", "zero"), [("int8", None), ("fp8_e4m3", None), ("int4", None), ("int4", 0), ("int4", 16), ("int4", 127)])
def test_every_code_is_its_number(emulated, codes, dtype, zero):
    stored = np.arange(256, dtype=np.uint8)
    expected = {
        "int8": stored.view(np.int8),
        "fp8_e4m3": stored.view(ml_dtypes.float8_e4m3fn),
        "int4": np.stack([stored & 15, stored >> 4], axis=1).reshape(-1).astype(np.int32) - (8 if zero is None else zero),
    }[codes].astype(np.float64)
    expected = np.where(np.isnan(expected), np.where(stored < 128, 480, -480), expected) if codes == "fp8_e4m3" else expected
    np.testing.assert_array_equal(unpacked(emulated, codes, dtype, zero), expected)


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128, 256])
def test_a_piece_of_8_rows_lies_in_all_banks(row_bytes):
    """Pieces have places of their own, and those with one number in 8 consecutive rows are 8 groups of 4 banks."""
    places = np.array([[lane_copies.swizzled(row, piece, row_bytes) for piece in range(row_bytes // 16)] for row in range(16)])
    assert sorted(places.ravel()) == list(range(0, 16 * row_bytes // 4, 4))
    for first in (0, 8):
        assert (np.sort(places[first : first + 8] // 4 % 8, axis=0) == np.arange(8)[:, None]).all()
