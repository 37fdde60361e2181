"""flash_attention over packed pages that are unpacked a span at a time, and block_sparse_attention over those that are
unpacked before, on a Hopper GPU: the bits of the launch that unpacks in the kernel, the reference, mutants.

pytest -m gpu tests/pallas_kernels/hopper/prefill/test_wide_pages_on_hopper.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import packed_prefill_suite
import packed_suite
import pytest
from packed_prefill_suite import BASE, LONG

from pallas_kernels.attention.block_sparse_attention import mosaic_gpu as block_sparse
from pallas_kernels.attention.flash_attention import widened
from pallas_kernels.hopper.prefill import wide_pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SIZES = {
    "": {},
    "every page packed": {"opened": False},
    "a page is missing": {"hole": True},
    "long": LONG,
    "pages of 64": {"page_size": 64, "width": 12, "group": 7},
    "pages of 192": {"page_size": 192, "width": 4, "head_dim": 64},
    "head dim 256": {"head_dim": 256, "kv_heads": 1, "group": 8},
}
WINDOW = {"window": (5, 150), "lists": (5, 128)}
LISTS = {
    "lists": WINDOW,
    "lists of 64, a page is missing": WINDOW | {"lists": (7, 64), "hole": True},
    "lists alone, every page packed": {"lists": (5, 128), "opened": False},
    "lists, long": LONG | WINDOW | {"lists": (20, 128)},
    "lists, head dim 256": WINDOW | {"head_dim": 256, "kv_heads": 1, "group": 8},
}
CASES = {f"{format}, {name}": {"format": format} | sizes for format in ("int8", "q4_0") for name, sizes in SIZES.items()}
CASES |= {f"{format}, ": {"format": format} for format in packed_suite.FORMATS}
OF_LISTS = {f"{format}, {name}": {"format": format} | sizes for format in ("int8", "q4_0") for name, sizes in LISTS.items()}
OF_LISTS |= {f"{format}, lists": {"format": format} | WINDOW for format in packed_suite.FORMATS}


@pytest.fixture
def in_both_ways(monkeypatch):
    """What a case gives widened, in spans of so many units, and unpacked in the kernel."""

    def run(case, units: int) -> list[tuple]:
        found = []
        for fewest in (1, 2**31):
            with monkeypatch.context() as patch:
                patch.setattr(widened, "MIN_ROWS", fewest)
                patch.setattr(block_sparse, "widens", lambda *_, fewest=fewest: fewest == 1)
                patch.setattr(widened, "span_of", lambda s, width: units * wide_pages.unit(s))
                jax.clear_caches()
                found.append(jax.block_until_ready(case.run("mosaic_gpu")))
        jax.clear_caches()
        return found

    return run


@pytest.mark.parametrize(("name", "units"), [(name, units) for name in CASES for units in (1, 3, 100)] + [(name, 0) for name in OF_LISTS])
def test_bits_are_those_of_unpacking_in_the_kernel(tools, in_both_ways, name, units):
    """So they do not depend on spans, cuts, tables and company, as `test_packed_tiles_on_hopper.py` shows of these.
    Lists have no spans."""
    case = packed_prefill_suite.build(tools, seed=sum(map(ord, name)), **(BASE | (CASES | OF_LISTS)[name]))
    new, old = in_both_ways(case, units)
    packed_prefill_suite.compare(tools, case, new)
    starts, lengths = case.operands[-2:]
    meant = starts[:, None] + jnp.arange(case.operands[0].shape[1]) < lengths[:, None]
    tools.assert_all_same_bits(*([jnp.where(meant.reshape(*meant.shape, *(1,) * (x.ndim - 2)), x, 0) for x in both] for both in (new, old)))


@pytest.mark.parametrize("mutant", ["scales of keys are left out", "other open rows", "own pages as packed"])
def test_mutant_fails(tools, in_both_ways, mutant):
    case = packed_prefill_suite.build(tools, **(BASE | {"format": "int8"}))
    with pytest.raises(AssertionError):
        packed_prefill_suite.compare(tools, case, in_both_ways(packed_suite.changed(case, mutant), 2)[0])


def test_a_chunk_of_a_7b_model_over_two_spans(tools, in_both_ways, monkeypatch):
    """70,000 tokens, spans of 64K: the way that dispatch picks has the bits of the other one, again and again."""
    spec = {"lengths": (70_000,), "starts": (61_808,), "num_queries": 8192, "kv_heads": 4, "group": 7, "head_dim": 128}
    case = packed_prefill_suite.build(tools, format="int8", page_size=128, width=1024, **spec)
    once = case.picked()
    for _ in range(5):
        tools.assert_all_same_bits(once, case.picked())
    monkeypatch.setattr(widened, "MIN_ROWS", 2**31)
    jax.clear_caches()
    tools.assert_all_same_bits(once, case.picked())
    jax.clear_caches()
