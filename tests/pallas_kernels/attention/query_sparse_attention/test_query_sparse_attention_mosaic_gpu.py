"""query_sparse_attention for Hopper without one: lowered, compiled to machine code; who is passed by."""

from __future__ import annotations

import pytest
from quick_cases import rest_long

from pallas_kernels.attention.query_sparse_attention import xla


def production(heads: tuple[int, int] = (28, 4), head_dim: int = 128, page_size: int = 128, dtype: str = "bfloat16", **static) -> tuple:
    """(op, arrays, keywords) of a chunk of 8192 queries over 128K tokens."""
    num_heads, kv_heads = heads
    pool = ((1024, kv_heads, page_size, head_dim), dtype)
    arrays = {"q": ((1, 8192, num_heads, head_dim), dtype), "k": pool, "v": pool, "table": ((1, (128 << 10) // page_size), "int32")}
    arrays |= {"starts": ((1,), "int32"), "lengths": ((1,), "int32")}
    sizes = {
        "gamma": 16,
        "block_size": 64,
        "k_blocks": 128,
        "k_exact": 8,
        "window": (64, 1009),
        "tournament": False,
        "estimate": "quantile",
    }
    return "query_sparse_attention", arrays, sizes | {"sm_scale": head_dim**-0.5, "config": None} | static


SPILL_FREE = {
    "28/4, 128/8": production(),
    "28/4, 128/8, buckets": production(estimate="buckets"),
    "32/8, 128/8": production(heads=(32, 8)),
    "32/8, 32/8, buckets": production(heads=(32, 8), k_blocks=32, estimate="buckets"),
    "64 slots, float16": production(k_blocks=64, dtype="float16"),
    "estimated": production(k_exact=0),
    "buckets": production(k_exact=0, estimate="buckets"),
    "exact 16": production(k_blocks=16, k_exact=16),
    "no window": production(window=None),
    "head dim 64": production(heads=(32, 8), head_dim=64),
    "head dim 64, buckets": production(heads=(32, 8), head_dim=64, estimate="buckets"),
    "blocks of 128, pages of 256": production(block_size=128, page_size=256),
}
TIGHT = {
    "head dim 256": production(heads=(16, 2), head_dim=256),
    "head dim 256, buckets": production(heads=(16, 2), head_dim=256, estimate="buckets"),
    "exact 17, in memory": production(k_blocks=17, k_exact=17),
    "tournament of 128, in memory": production(k_exact=128, tournament=True),
}
"""Accumulators of 64 x 256, or code that is never hot, fill the registers of a warpgroup, so that spilling a few is no
news; whether slots in memory spill depends on the compiler's version."""


@pytest.mark.quick("exact 17, in memory", "head dim 64, buckets")
@pytest.mark.parametrize(
    "case", rest_long(SPILL_FREE | TIGHT, "28/4, 128/8", "head dim 64, buckets", "exact 17, in memory", "tournament of 128, in memory")
)
def test_lowers(cuda, case):
    assert "query_sparse_attention_kernel" in cuda.lower(*(SPILL_FREE | TIGHT)[case])


def test_compiles_without_spilling(spill_free):
    found = spill_free(SPILL_FREE, TIGHT)
    assert all(kernel["spill_stores"] < 64 for case in TIGHT for kernel in found[case])


NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": (production(page_size=16, block_size=16), "page size must be a multiple of 64, got 16"),
    "blocks of 32": (production(block_size=32), "block_size must be 64 or 128 at head dim 128, got 32"),
    "blocks of 128 of head dim 256": (production(head_dim=256, block_size=128), "block_size must be 64 or 64 at head dim 256, got 128"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call)["query_sparse_attention"] == "xla"


def test_what_it_can_do_is_picked(on_hopper, picked):
    assert picked(SPILL_FREE["28/4, 128/8"])["query_sparse_attention"] == "mosaic_gpu"


def test_config_of_another_is_refused(on_hopper, picked):
    with pytest.raises(ValueError, match="'mosaic_gpu' of query_sparse_attention takes no config"):
        picked(production(config=xla.Config()), implementation="mosaic_gpu")
