"""Tests that need much device memory are skipped where there is too little, with both sizes; and only there."""

import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools, needs_memory


def test_too_little_memory_is_a_plain_reason():
    with pytest.raises(pytest.skip.Exception, match=r"^needs 12\.9 GB of device memory, and arrays may have 12\.0$"):
        needs_memory(3 * 2**32, {"bytes_limit": 12 * 10**9})
    needs_memory(3 * 2**32, {"bytes_limit": 3 * 2**32})
    needs_memory(3 * 2**32, {})  # a device that sets no limit


def test_a_far_pool_holds_its_pages_and_nothing_else():
    near = jnp.arange(6.0).reshape(2, 3), jnp.arange(2, dtype=jnp.bfloat16).reshape(2, 1)
    for pool, content in zip(far_pools(jnp.array([3, 1]), *near, num_pages=5), near, strict=True):
        np.testing.assert_array_equal(pool[jnp.array([3, 1])], content)
        assert jnp.isnan(pool[jnp.array([0, 2, 4])]).all()
