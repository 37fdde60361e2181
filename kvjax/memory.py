"""The memory plan: what weights and cache take, and how many pages fit, worked out from the configuration before anything is loaded."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from kvjax.cache import CacheSpec, IndexSpec, OutOfPages
from kvjax.model import ModelConfig

DEVICE_SHARE, HOST_SHARE = 0.85, 0.5
"""Share of the free memory that a plan gives to pages: an accelerator is used by us alone, a host's memory by other programs too."""


DEFAULT_POOL = (8, 32_768)
"""A default pool holds at most this many sequences of this many tokens."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `page_bytes` is one page in all layers, indexes included; `available_bytes` is what weights, pages and states may take.

    state_bytes: what recurrent layers keep of `sequences` sequences, however long they are; 0 where there are none.
    """

    weights_bytes: int
    page_bytes: int
    page_size: int
    available_bytes: int
    state_bytes: int = 0
    sequences: int = 0

    @property
    def pages_that_fit(self) -> int:
        """Pages that fit beside weights and states."""
        return max(0, (self.available_bytes - self.weights_bytes - self.state_bytes) // self.page_bytes)

    @property
    def bytes_per_1k_tokens(self) -> int:
        """Cache bytes of 1,024 tokens of one sequence."""
        return -(-1024 * self.page_bytes // self.page_size)

    def advice(self, error: OutOfPages, spec: CacheSpec) -> str:
        """For the message of an engine that is out of pages, and whose states have their memory already."""
        if error.group in spec.row_groups:
            return f"A page of this group is the state of one sequence: there are {error.total}, for the largest of batch_buckets"
        takes = f"A page holds {self.page_size} tokens and takes {self.page_bytes:,} bytes"
        return f"{takes}; memory has room for {dataclasses.replace(self, state_bytes=0).pages_that_fit:,} more"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        tokens = self.pages_that_fit * self.page_size
        states = [f"states               {_size(self.state_bytes):>12}  ({self.sequences} sequences)"] if self.state_bytes else []
        return "\n".join(
            (
                f"weights              {_size(self.weights_bytes):>12}",
                *states,
                f"cache per 1K tokens  {_size(self.bytes_per_1k_tokens):>12}",
                f"page of {self.page_size} tokens   {_size(self.page_bytes):>12}",
                f"memory to use        {_size(self.available_bytes):>12}",
                f"pages that fit       {self.pages_that_fit:>12,}  ({tokens:,} tokens)",
            )
        )


def memory_plan(
    config: ModelConfig,
    *,
    page_size: int = 128,
    indexes: tuple[IndexSpec, ...] = (),
    weights_bytes: int | None = None,
    available_bytes: int | None = None,
    sequences: int = 8,
) -> MemoryPlan:
    """The plan for a model, weights and cache in its compute_dtype.

    sequences: that are live at a time; those of a model with recurrent layers have states.

    weights_bytes: counted from the configuration when None; pass 0 when they are loaded already. available_bytes: a share of what the first
    device has free when None (0.85 of an accelerator's, 0.5 of the host's). Asking the device initialises it.
    """
    if weights_bytes is None:
        weights_bytes = config.num_params * jnp.dtype(config.compute_dtype).itemsize
    spec = config.cache_spec(page_size)
    of_groups = {group.name: spec.bytes_per_page(group.name, indexes) for group in spec.groups}
    state_bytes = sequences * sum(of_groups.pop(name) for name in spec.row_groups)
    if not of_groups:
        raise ValueError("a model without a layer of attention has no pages: an engine needs one")
    available = free_bytes() if available_bytes is None else available_bytes
    sizes = {"state_bytes": state_bytes, "sequences": sequences if state_bytes else 0}
    return MemoryPlan(weights_bytes, sum(of_groups.values()), page_size, available, **sizes)


def default_pages(plan: MemoryPlan, config: ModelConfig) -> int:
    """Pages of a pool whose size nobody names: those of `DEFAULT_POOL`, or as many as fit."""
    sequences, tokens = DEFAULT_POOL
    wanted = sequences * -(-min(tokens, config.max_positions) // plan.page_size)
    return max(1, min(wanted, plan.pages_that_fit))


def free_bytes() -> int:
    """Bytes of the first device that a plan may use now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS does not say what is free
    return int(HOST_SHARE * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))


def check_pool(plan: MemoryPlan, pages: int) -> int:
    """The number of pages; ValueError for a pool that is larger than all memory of the first device. Without this check the host would run
    out of memory first."""
    stats = jax.local_devices()[0].memory_stats() or {}
    total = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * plan.page_bytes > total:
        raise ValueError(
            f"a pool of {pages:,} pages takes {_size(pages * plan.page_bytes)}, and all memory of the device is {_size(total)}: "
            f"give at most {total // plan.page_bytes:,} pages"
        )
    return pages


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    raise AssertionError
