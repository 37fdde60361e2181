"""Pools of more than 2^31 elements in device memory, for tests on a GPU, which are skipped where the device has too
little of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest


def needs_memory(count: int, stats: Mapping[str, int] | None = None) -> None:
    """Skip unless the first device lets arrays have so many bytes. stats: what it says of its memory; None: ask it."""
    stats = jax.devices()[0].memory_stats() if stats is None else stats
    limit = (stats or {}).get("bytes_limit")
    if limit is not None and limit < count:  # a CPU has none
        pytest.skip(f"needs {count / 1e9:.1f} GB of device memory, and arrays may have {limit / 1e9:.1f}")


def far_pools(numbers: jax.Array, *contents: jax.Array, num_pages: int) -> list[jax.Array]:
    """For each of the contents, whose pages lie along the first axis, a pool that has them at these numbers, and NaN
    everywhere else."""
    sizes = [num_pages * content[0].nbytes for content in contents]
    needs_memory(sum(sizes) + max(sizes))  # a program that fills one may need room for it twice
    return [_pool(numbers, content, num_pages=num_pages) for content in contents]


@functools.partial(jax.jit, static_argnames="num_pages")
def _pool(numbers, contents, *, num_pages: int):
    pool = jnp.full((num_pages, *contents.shape[1:]), jnp.nan, contents.dtype)
    for i in range(contents.shape[0]):
        pool = jax.lax.dynamic_update_index_in_dim(pool, contents[i], numbers[i], axis=0)
    return pool
