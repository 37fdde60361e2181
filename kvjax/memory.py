"""The memory plan: what weights and cache take, and how many pages fit, worked out from the configuration before anything is loaded."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from kvjax.cache import IndexSpec
from kvjax.model import ModelConfig

DEVICE_SHARE, HOST_SHARE = 0.85, 0.5
"""Part of the free memory a plan gives to pages: an accelerator is ours; a host's memory is shared with everything else."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `page_bytes` is one page in all layers, indexes included; `available_bytes` is what weights and pages may take together."""

    weights_bytes: int
    page_bytes: int
    page_size: int
    available_bytes: int

    @property
    def pages_that_fit(self) -> int:
        """Pages left room for beside the weights."""
        return max(0, (self.available_bytes - self.weights_bytes) // self.page_bytes)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Cache bytes of 1,024 tokens of one sequence."""
        return -(-1024 * self.page_bytes // self.page_size)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        tokens = self.pages_that_fit * self.page_size
        return "\n".join(
            (
                f"weights              {_size(self.weights_bytes):>12}",
                f"cache per 1K tokens  {_size(self.bytes_per_1k_tokens):>12}",
                f"page of {self.page_size} tokens   {_size(self.page_bytes):>12}",
                f"memory to use        {_size(self.available_bytes):>12}",
                f"pages that fit       {self.pages_that_fit:>12,}  ({tokens:,} tokens)",
            )
        )


def memory_plan(
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    page_size: int = 128,
    indexes: tuple[IndexSpec, ...] = (),
    weights_bytes: int | None = None,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for a model in `dtype`, weights and cache alike.

    weights_bytes: counted from the configuration when None; pass 0 when they are loaded already. available_bytes: a share of what the first
    device has free when None (0.85 of an accelerator's, 0.5 of the host's). Asking the device initialises it.
    """
    if weights_bytes is None:
        weights_bytes = config.num_params * jnp.dtype(dtype).itemsize
    spec = config.cache_spec(page_size, dtype)
    page_bytes = sum(spec.bytes_per_page(group.name, indexes) for group in spec.groups)
    return MemoryPlan(weights_bytes, page_bytes, page_size, free_bytes() if available_bytes is None else available_bytes)


def free_bytes() -> int:
    """Bytes of the first device that a plan may use now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS does not say what is free
    return int(HOST_SHARE * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))


def check_pool(plan: MemoryPlan, pages: int) -> None:
    """ValueError for a pool that is larger than all memory of the first device; asked for by mistake, the host would run out first."""
    stats = jax.local_devices()[0].memory_stats() or {}
    total = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * plan.page_bytes > total:
        raise ValueError(
            f"a pool of {pages:,} pages takes {_size(pages * plan.page_bytes)}, and all memory of the device is {_size(total)}: "
            f"give at most {total // plan.page_bytes:,} pages"
        )


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    raise AssertionError
