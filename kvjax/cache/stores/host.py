"""Pages in host memory, by the digest of their content."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from kvjax.cache.eviction_order import Recency
from kvjax.cache.stores.blocks import Block

logger = logging.getLogger(__name__)

KIND = "pinned_host"
"""JAX's kind of memory for it: page-locked, which copies to and from a GPU need to be fast."""
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PIECE = 1 << 28
"""Bytes that are pinned at a time."""


class HostStore:
    """Blocks in pinned host memory, at most `total_bytes` of them. used_bytes: those it holds. evictions: blocks that
    made room. takes: whether it takes more. A block that makes room lives on while it is being copied.

    Blocks are JAX arrays of the memory kind `pinned_host`. With a GPU, all of the memory is pinned at the start, about
    2 GB in a second. JAX keeps what was pinned, and puts blocks there. ValueError if it gives less. blocks: bytes of a
    block, by layer group.
    """

    NAME, SIZE_ARGUMENT = "host memory", "host_bytes"

    def __init__(self, total_bytes: int, device: jax.Device, blocks: Mapping[str, int]):
        self.blocks = dict(blocks)
        self.total_bytes, self.used_bytes, self.evictions, self.takes = total_bytes, 0, 0, True
        self._sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=KIND)
        if device.platform == "gpu":
            self._pin(device)
        self._blocks: dict[bytes, Block] = {}
        self._order: Recency[bytes] = Recency()

    def _pin(self, device: jax.Device) -> None:
        piece = jax.device_put(np.zeros(min(PIECE, self.total_bytes), np.uint8), device)
        try:
            jax.block_until_ready([jax.device_put(piece, self._sharding) for _ in range(-(-self.total_bytes // piece.nbytes))])
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"{self.total_bytes:,} bytes of host memory cannot be pinned: {str(error).partition(chr(10))[0]}. JAX pins at most 64 GB, "
                f"unless the environment variable {LIMIT} says more before JAX starts: set it, or give less host_bytes"
            ) from error

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, key: bytes, block: Block) -> Block | None:
        """Copy a block of the device here, in place of those least recently used. Does not wait for the device. Returns
        the copy; None if there is no room for it."""
        if block.nbytes > self.total_bytes or key in self._blocks:
            return self._blocks.get(key)
        while self.used_bytes + block.nbytes > self.total_bytes:
            if (least := next(iter(self._order), None)) is None:
                return None  # the rest is held
            self._drop(least)
            self.evictions += 1
        try:
            copied = jax.device_put(block, self._sharding)
        except jax.errors.JaxRuntimeError as error:
            logger.warning("host memory refused %d bytes, so a page is not kept there: %s", block.nbytes, str(error).partition("\n")[0])
            return None
        self._blocks[key] = copied
        self._order.add(key)
        self.used_bytes += block.nbytes
        return copied

    def get(self, key: bytes) -> Block | None:
        """The block, or None if it is not here, or did not arrive. Waits until it has."""
        block = self._blocks.get(key)
        if block is None:
            return None
        try:
            block.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            logger.warning("a page did not reach host memory, and is computed again: %s", str(error).partition("\n")[0])
            self._drop(key)
            return None
        return block

    def used(self, keys: Iterable[bytes]) -> None:
        """Those of the keys that are here were used again, in this order."""
        for key in keys:
            if key in self._blocks:
                self._order.touch(key)

    def capacity(self, group: str) -> int:
        """Blocks of a layer group that fit, if there were no others."""
        return self.total_bytes // self.blocks[group]

    def hold(self, key: bytes) -> None:
        """If the block is here, do not give it up for others until `let_go`."""
        if key in self._blocks:
            self._order.hold(key)

    def let_go(self, key: bytes) -> None:
        """A block that is held may go again."""
        self._order.let_go(key)

    def _drop(self, key: bytes) -> None:
        self._order.remove(key)
        self.used_bytes -= self._blocks.pop(key).nbytes
