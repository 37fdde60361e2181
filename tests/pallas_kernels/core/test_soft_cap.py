"""A soft-cap of logits: every op of attention in plain XLA against NumPy, or against its reference, and no kernel takes
it."""

import importlib
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.block_sparse_attention import block_sparse_attention
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.soft_cap import SoftCap, divided, factor_of, scaled
from pallas_kernels.selection.block_mass import block_mass
from pallas_kernels.selection.select_tiles import select_tiles

CAP = SoftCap(0.9, 2.0)
PAGE, COUNT, HEADS, KV_HEADS, DIM = 8, 40, 4, 2, 16
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, COUNT, HEADS, DIM)).astype(np.float32)
K, V = RNG.standard_normal((2, COUNT, KV_HEADS, DIM)).astype(np.float32)
TABLE = np.asarray([[3, 0, 4, 1, 2]], np.int32)
STARTS, LENGTHS = np.zeros(1, np.int32), np.full(1, COUNT, np.int32)


def pool(x):
    """Tokens [S, K, D] in pages, which lie as TABLE says."""
    found = np.full((6, KV_HEADS, PAGE, DIM), np.nan, np.float32)
    found[TABLE[0]] = x.reshape(-1, PAGE, KV_HEADS, DIM).swapaxes(1, 2)
    return jnp.asarray(found)


PAGES = Pages(pool(K), pool(V))


def by_definition(scale):
    """Output and log-sum-exp of causal attention, in NumPy's float64. scale: a number, or (factor, cap)."""
    keys, values = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, axis=1) for x in (K, V))
    products = np.einsum("thd,shd->hts", Q[0].astype(np.float64), keys)
    factor, cap = scale if isinstance(scale, tuple) else (scale, math.inf)
    logits = products * factor if cap == math.inf else cap * np.tanh(products * factor / cap)
    weights = np.where(np.tril(np.ones((COUNT, COUNT), bool)), np.exp(logits), 0)
    total = weights.sum(-1)
    return np.einsum("hts,shd->thd", weights / total[..., None], values), np.log(total).T


OUT, LSE = by_definition((0.9, 2.0))
CHUNK = (PAGES, TABLE, STARTS, LENGTHS)
EVERY = np.broadcast_to(np.arange(5, dtype=np.int32), (1, 5, HEADS, 5))
RUNS = {
    "flash_attention": lambda **how: flash_attention(Q, *CHUNK, **how),
    "gather_attention": lambda **how: gather_attention(Q[:, -4:], PAGES, TABLE, LENGTHS, **how),
    "block_sparse_attention": lambda **how: block_sparse_attention(Q, *CHUNK, blocks=EVERY, block_size=PAGE, query_tile=PAGE, **how),
}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("op", RUNS)
def test_attention_is_that_of_the_definition(op, implementation):
    out, lse = RUNS[op](sm_scale=CAP, implementation=implementation)
    count = out.shape[1]
    np.testing.assert_allclose(out[0], OUT[-count:], atol=2e-6)
    np.testing.assert_allclose(lse[0], LSE[-count:], atol=2e-6)
    plain, _ = RUNS[op](sm_scale=CAP.factor, implementation=implementation)
    assert np.abs(np.asarray(plain[0]) - OUT[-count:]).max() > 0.05, "without the cap it is another result"
    np.testing.assert_allclose(plain[0], by_definition(CAP.factor)[0][-count:], atol=2e-6)


@pytest.mark.parametrize("op", ["block_mass", "query_sparse_attention", "select_tiles"])
def test_what_policies_measure_is_that_of_the_reference(op):
    def run(implementation, scale=CAP):
        how = {"sm_scale": scale, "implementation": implementation}
        if op == "block_mass":
            return (block_mass(Q, *CHUNK, jnp.asarray(LSE[None], jnp.float32), STARTS, block_size=PAGE, **how),)
        if op == "query_sparse_attention":
            return query_sparse_attention(Q, *CHUNK, gamma=4, block_size=PAGE, k_blocks=3, k_exact=2, **how)
        bounds = jnp.stack([PAGES.k.max(2), PAGES.k.min(2)], axis=2)[:, :, None]
        how |= {"k": 2, "block_size": PAGE, "query_tile": PAGE, "window": (0, 8), "pooling": "sum"}
        how["sm_scale"] = divided(scale, 10)  # bounds near the cap would tie
        return (select_tiles(Q, bounds, TABLE, STARTS, LENGTHS, **how),)

    for found, want in zip(run("xla"), run("reference"), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)
    if op != "select_tiles":  # ranks alone
        assert any(
            np.abs(np.asarray(a) - np.asarray(b)).max() > 0.01 for a, b in zip(run("xla")[:2], run("xla", CAP.factor)[:2], strict=True)
        )


def test_the_mass_of_a_query_adds_up_to_one():
    mass = block_mass(Q, *CHUNK, jnp.asarray(LSE[None], jnp.float32), STARTS, block_size=PAGE, sm_scale=CAP)
    np.testing.assert_allclose(mass.sum(-1), COUNT, rtol=1e-5)


@pytest.mark.parametrize("op", ["flash_attention", "gather_attention", "block_sparse_attention", "block_mass", "query_sparse_attention"])
def test_no_kernel_is_picked(op, monkeypatch):
    """Where kernels could run: they are passed by, with a reason, and refused by name."""
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: dispatch.IMPLEMENTATIONS[op])
    monkeypatch.setattr(importlib.import_module(f"{dispatch.MODULES[op]}.mosaic_gpu"), "unsupported", lambda *_: None, raising=False)
    api = importlib.import_module(f"{dispatch.MODULES[op]}.api")
    fields = dict.fromkeys(api.Call.__dataclass_fields__) | {"sm_scale": CAP}
    fields |= {"query_tile": 8} if "query_tile" in fields else {}
    operands = (api.Call(**fields), Q, PAGES, TABLE, STARTS, LENGTHS)
    assert dispatch.choose(op, None, "capped", operands) == "xla"
    assert dispatch.choose(op, None, "plain", (api.Call(**fields | {"sm_scale": 1.0}), *operands[1:])) == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match=rf"{op}: 'mosaic_gpu' does not apply a soft-cap of logits"):
        dispatch.choose(op, "mosaic_gpu", "capped", operands)


def test_capped_logits_keep_their_order_and_their_distance():
    products = np.linspace(-20, 20, 401, dtype=np.float32)
    logits = np.asarray(scaled(products, CAP))
    assert (np.diff(logits) >= -1e-6).all(), "but for rounding"
    assert np.abs(logits).max() <= CAP.cap
    assert (np.diff(logits) <= np.diff(products) * factor_of(CAP) + 1e-6).all()
    assert divided(CAP, 3) == SoftCap(0.9 / 3, 2.0)
    assert divided(6.0, 3) == factor_of(2.0) == 2.0


@pytest.mark.parametrize("wrong", [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf), (math.nan, 1.0), (1.0, -2.0)])
def test_what_is_no_soft_cap_is_refused(wrong):
    with pytest.raises(ValueError, match="of a soft-cap must be above 0 and finite"):
        SoftCap(*wrong)


def test_a_soft_cap_is_no_number():
    """Code that would leave the cap out fails."""
    with pytest.raises(TypeError):
        Q * CAP
