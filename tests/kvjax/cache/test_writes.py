"""Writing to pages, against a loop over tokens in numpy: where keys go, which pages are sealed, what nobody may
touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import Cache, IndexSpec, append, copy_page, empty_layer
from kvjax.engine.steps import StepInputs, StepStatic, decode_step
from kvjax.policies.decode import Dense
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

N, K, P, D = 12, 2, 4, 2
SPECS = (IndexSpec("bounds", 2), IndexSpec("mean", 4))


def filled_layer(seed=0):
    random = np.random.default_rng(seed)
    layer = empty_layer(N, K, P, D, jnp.float32, SPECS)
    index = {name: jnp.asarray(random.normal(size=array.shape), jnp.float32) for name, array in layer.index.items()}
    pages = random.normal(size=(2, N, K, P, D)).astype(np.float32)
    return layer.replace(pages=Pages(*map(jnp.asarray, pages)), index=index)


def append_one_by_one(layer, k, v, positions, valid, table):
    """The definition: each valid token with a page goes there, and a page whose last slot was written has its index
    built."""
    pages = {"k": np.array(layer.pages.k), "v": np.array(layer.pages.v)}
    index = {name: np.array(array) for name, array in layer.index.items()}
    sealed = []
    for row, t in np.ndindex(positions.shape):
        logical, offset = divmod(int(positions[row, t]), P)
        page = table[row, logical] if logical < table.shape[1] else -1
        if valid[row, t] and page >= 0:
            pages["k"][page, :, offset], pages["v"][page, :, offset] = k[row, t], v[row, t]
            sealed += [page] if offset == P - 1 else []
    for spec in SPECS:
        for page in sealed:
            index[spec.name][page] = page_index(jnp.asarray(pages["k"][page]), kind=spec.kind, block_size=spec.block_size)
    return pages["k"], pages["v"], index


@settings(max_examples=20, deadline=None)
@given(
    starts=st.tuples(st.integers(0, 24), st.integers(0, 24)),
    tokens=st.integers(1, 14),
    first=st.integers(0, 13),
    last=st.integers(0, 14),
    known=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 5),
)
def test_append_is_a_loop_over_tokens(starts, tokens, first, last, known, seed):
    """Any start within a page, any number of pages filled at once, padding at both ends, tables that are too short or
    have holes."""
    random = np.random.default_rng(seed)
    layer = filled_layer(seed)
    table = np.full((2, 5), -1, np.int32)
    pages = random.permutation(N)
    table[0, : known[0]], table[1, 5 - known[1] :] = pages[: known[0]], pages[5 : 5 + known[1]]
    positions = (np.array(starts)[:, None] + np.arange(tokens)).astype(np.int32)
    valid = np.broadcast_to((np.arange(tokens) >= first) & (np.arange(tokens) < last), positions.shape)
    k, v = random.normal(size=(2, 2, tokens, K, D)).astype(np.float32)
    got = append(layer, jnp.asarray(k), jnp.asarray(v), jnp.asarray(positions), jnp.asarray(valid), jnp.asarray(table), SPECS)
    expected_k, expected_v, index = append_one_by_one(layer, k, v, positions, valid, table)
    np.testing.assert_array_equal(np.asarray(got.pages.k), expected_k)
    np.testing.assert_array_equal(np.asarray(got.pages.v), expected_v)
    for name, array in index.items():
        # Where appending is a kernel of its own, it may sum a mean in another order.
        tolerance = 1e-6 if name.startswith("mean") and dispatch.available("append_tokens")[0] == "mosaic_gpu" else 0
        np.testing.assert_allclose(np.asarray(got.index[name]), array, rtol=tolerance, atol=tolerance)


def test_copy_page_copies_keys_values_and_indexes_and_nothing_else():
    before = filled_layer()
    (after,) = copy_page((jax.tree.map(jnp.copy, before),), (jnp.int32(3),), (jnp.int32(7),))
    for old, new in (
        (before.pages.k, after.pages.k),
        (before.pages.v, after.pages.v),
        *((before.index[name], after.index[name]) for name in before.index),
    ):
        expected = np.array(old)
        expected[7] = expected[3]
        np.testing.assert_array_equal(np.asarray(new), expected)


@pytest.mark.quick_but("1")
@pytest.mark.parametrize("tokens", [1, 3])
def test_an_inactive_row_writes_nothing_reads_nothing_and_keeps_its_length(model, tokens):
    """The pure step: also where the row has a page table of its own."""
    config = model.config
    spec = config.cache_spec(16)
    tables = jnp.array([[0, 1], [2, 3]], jnp.int32)
    cache = Cache(spec.empty({"full": 8}), {"full": tables}, jnp.array([15, 15], jnp.int32), spec)
    ids, active, states = jnp.ones((2, tokens), jnp.int32), jnp.array([True, False]), ((),) * config.num_layers
    inputs = StepInputs(model.params, cache, ids, active, states)
    _, after, _, reads = decode_step(StepStatic(model.decoder, Dense(), ()), inputs)
    assert np.asarray(after.lengths).tolist() == [15 + tokens, 15]
    heads = config.cache_spec(16).kv_heads
    assert np.asarray(reads.keys).tolist() == [(15 + tokens) * heads, 0]
    assert np.asarray(reads.blocks).tolist() == [(1 if tokens == 1 else 2) * heads, 0]
    for layer in after.layers:
        assert np.any(np.asarray(layer.pages.k)[0, :, 15])
        assert not np.any(np.asarray(layer.pages.k)[2:])
        assert not np.any(np.asarray(layer.pages.v)[2:])
