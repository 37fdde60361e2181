"""Flags of XLA that a process needs before JAX starts in it, for pages in host memory. Flags that the user has set stay
as they are."""

from __future__ import annotations

import os


def allow_host_pages() -> None:
    """XLA takes pages in host memory for device memory, and would spend seconds on making each program smaller."""
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=1000")


def allow_pinned(host_bytes: int) -> None:
    """JAX gives no more pinned host memory than it is told to; host_bytes: what the pages take that are kept there."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_bytes // 10**9 + 2))


def share_device(share: float) -> None:
    """JAX takes this share of the device's memory, and leaves the rest to other processes. share: from 0 to 1."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.4f}")
