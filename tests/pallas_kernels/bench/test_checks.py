"""What a benchmark says about errors: its own reference agrees with the definition, and wrong results show."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import gather_attention

from pallas_kernels.bench import checks
from pallas_kernels.core.pages import Pages


@pytest.fixture(scope="module")
def paged(tools):
    """float32 pages of 32 tokens; every row has something to read."""
    return tools.make_paged(3, lengths=(1, 31, 32, 200), group=3, head_dim=16, page_size=32, width=7)


def streamed(paged, blocks, block_size):
    return checks.streamed_attention(
        paged.q, Pages(paged.k, paged.v), paged.page_table, paged.lengths, blocks, block_size=block_size, sm_scale=paged.sm_scale
    )


def defined(paged, blocks, block_size):
    static = {"block_size": block_size, "sm_scale": paged.sm_scale, "implementation": "reference"}
    return gather_attention(*paged.arrays, blocks=blocks, **static)


@pytest.mark.quick("4096-8")
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("span", [16, 4096])
def test_the_streamed_reference_is_the_definition(paged, block_size, span, monkeypatch):
    monkeypatch.setattr(checks, "SPAN", span)
    jax.clear_caches()
    count = paged.page_table.shape[1] * 32 // block_size
    blocks = np.array(checks.every_block(4, 2, count))
    blocks[:, 1, 2::3] = -1
    out, lse = streamed(paged, jnp.asarray(blocks), block_size)
    ref_out, ref_lse = defined(paged, jnp.asarray(blocks), block_size)
    assert checks.row_error(out, ref_out) < 1e-5
    assert checks.largest_difference(lse, ref_lse) < 2e-5


def test_what_is_wrong_shows(paged):
    blocks = np.array(checks.every_block(4, 2, 7))
    ref_out, ref_lse = defined(paged, None, 32)
    assert checks.row_error(streamed(paged, jnp.asarray(blocks), 32)[0], ref_out) < 1e-5
    blocks[3, 1, 2] = -1
    out, lse = streamed(paged, jnp.asarray(blocks), 32)
    assert checks.row_error(out, ref_out) > 1e-3
    assert checks.largest_difference(lse, ref_lse) > 1e-3
    assert checks.row_error(jnp.zeros_like(ref_out), ref_out) == 1
    assert checks.row_error(ref_out.at[0, 0, 0, 0].set(jnp.nan), ref_out) == float("inf")
    assert checks.row_error(ref_out[:2], ref_out) == float("inf")


def test_the_error_is_that_of_the_worst_row():
    ref = jnp.ones((10, 4)).at[0].mul(1e-3)
    assert checks.row_error(ref.at[0].mul(1.5), ref) == pytest.approx(0.5)


def test_same_bits():
    a = {"out": jnp.array([0.0, jnp.nan]), "ids": jnp.array([1])}
    assert checks.same_bits(a, dict(a))
    assert not checks.same_bits(a, a | {"out": jnp.array([-0.0, jnp.nan])})


def test_shared_entries():
    blocks = jnp.array([[[0, 3, 5, -1], [0, 1, 2, 3]]])
    assert checks.shared_entries(blocks, blocks) == 1
    assert checks.shared_entries(blocks, blocks[..., ::-1]) == 1
    assert checks.shared_entries(blocks, jnp.array([[[0, 3, 6, -1], [0, 1, 2, 3]]])) == pytest.approx((2 / 3 + 1) / 2)
    assert checks.shared_entries(blocks, jnp.full((1, 2, 4), -1)) == 0
