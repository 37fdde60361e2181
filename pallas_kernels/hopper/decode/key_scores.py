"""Logits of the keys that pages hold, packed or not, for a choice among blocks: key tiles of `decode_fold`, without the
values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_kernels.hopper.decode import decode_fold
from pallas_kernels.hopper.decode.packed_operands import KEYS
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.hopper.threads.lanes import Scalar


@dataclasses.dataclass(frozen=True)
class PageKeys:
    """A key tile of one warp: 16 keys of a block of a page. attend: the sizes of the attention that reads the same
    pages."""

    attend: decode_fold.Shape

    @property
    def key_tiles(self) -> int:
        """Turns of a block."""
        return self.attend.block_size // KEYS

    @property
    def words(self) -> int:
        """Words of a key tile: keys, or their codes and scales."""
        return self.attend.slot_words[0]

    def copy(self, ring_s, at: Scalar, pools: decode_fold.Pools, head: Scalar, page: Scalar, block: Scalar, key_tile: Scalar) -> None:
        """By one warp: start copying a key tile of a block to word `at`. block: its number in its page; page: its
        frame, zeros where it is -1. Every key of the block is written."""
        s = self.attend
        place = lanes.maximum(page, 0), block * s.block_size + key_tile * KEYS, lanes.where(page >= 0, lanes.i32(KEYS), 0)
        decode_fold.copy_side(s, ring_s, at, (pools.k, pools.k_scales, s.k_codes), place, head)

    def logits(self, ring_s, at: Scalar, q_s) -> Sequence[list[Scalar]]:
        """Unscaled logits of the key tile at word `at`, per column tile, as `decode_fold` has them. q_s: queries as
        `load_queries` leaves them."""
        return decode_fold.logits(self.attend, ring_s, at, q_s, self.attend.k_codes)
