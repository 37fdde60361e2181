"""selected_attention for Hopper without one: lowered, compiled to machine code; who is passed by."""

from __future__ import annotations

import paging
import pytest
from quick_cases import rest_long

from pallas_kernels.selection.page_index import INDEX_ROWS


def production(
    batch: int = 1,
    heads: tuple[int, int] = (28, 4),
    head_dim: int = 128,
    page_size: int = 128,
    tokens: int = 128 << 10,
    num_queries: int = 1,
    dtype: str = "bfloat16",
    frames: bool = False,
    **static,
) -> tuple:
    """(op, arrays, keywords) of a call over `tokens` tokens a row. frames: with a table of them."""
    keywords = {
        "kind": "bounds",
        "block_size": 128,
        "budget": 32,
        "sink": 1,
        "local": 4,
        "sm_scale": head_dim**-0.5,
        "config": None,
    } | static
    num_heads, kv_heads = heads
    pool = (1024, kv_heads, page_size, head_dim)
    index = (*pool[:2], page_size // keywords["block_size"], INDEX_ROWS[keywords["kind"]], head_dim)
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "k": (pool, dtype), "v": (pool, dtype), "index": (index, dtype)}
    arrays |= {"table": ((batch, tokens // page_size), "int32"), "lengths": ((batch,), "int32")}
    return "selected_attention", arrays | ({"frames": arrays["table"]} if frames else {}), keywords


FORMS = {
    "budget 8": {"budget": 8},
    "batch 8": {"batch": 8},
    "batch 40": {"batch": 40},
    "means": {"kind": "mean"},
    "blocks of 16": {"block_size": 16, "budget": 256, "local": 32},
    "a million tokens": {"tokens": 1 << 20},
}
SPILL_FREE = paging.for_each_model(production, FORMS) | {
    "float16": production(dtype="float16", batch=8),
    "a million tokens in blocks of 16": production(tokens=1 << 20, block_size=16, budget=64, local=32),
    "batch 8, a million tokens": production(batch=8, tokens=1 << 20),
    "4 drafts": production(num_queries=4),
    "frames": production(frames=True),
    "4 drafts, batch 8, frames": production(num_queries=4, batch=8, frames=True),
    "8 drafts, batch 8": production(num_queries=8, batch=8),
    "16 drafts of groups of 8": production(heads=(32, 4), num_queries=16),
    "16 drafts of groups of 8, means, a million tokens": production(heads=(32, 4), num_queries=16, kind="mean", tokens=1 << 20),
    "groups of 16": production(heads=(16, 1)),
    "blocks of 32": production(block_size=32),
    "pages of 64": production(page_size=64, block_size=64),
    "pages of 256": production(page_size=256, block_size=128, batch=8),
    "budget of none": production(budget=0),
}
WIDE = {
    "head dim 256": production(heads=(16, 2), head_dim=256),
    "head dim 256, means, float16": production(heads=(16, 2), head_dim=256, kind="mean", dtype="float16", batch=8),
}
"""Accumulators of 16 x 256 beside the queries take most registers of a warp, so that spilling some is no news."""


@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "4 drafts, batch 8, frames", "budget of none"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(SPILL_FREE | WIDE)[case])


TIGHT = {
    "head dim 256": production(heads=(16, 1), head_dim=256),
    "head dim 256, means, 512K": production(heads=(28, 4), head_dim=256, kind="mean", tokens=512 << 10, budget=256),
    "3M, means, blocks of 64": production(heads=(16, 2), kind="mean", block_size=64, tokens=3072 << 10, budget=512, batch=8),
}
"""Calls that take nearly all shared memory."""


@pytest.mark.parametrize("case", rest_long(TIGHT, "3M, means, blocks of 64"))
def test_lowers_where_shared_memory_is_tight(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*TIGHT[case])


def test_what_shared_memory_cannot_hold_is_refused(cuda):
    """And not launched: with a tile of keys it would ask for 1 KB too much."""
    call = production(heads=(16, 1), head_dim=256, block_size=16, tokens=32 << 10, budget=8, batch=8)
    with pytest.raises(NotImplementedError, match="leave no shared memory for a tile of keys"):
        cuda.lower(*call)


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE, launches=1)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(SPILL_FREE, WIDE, launches=1)


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and index alike; got q float32, index float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "17 query rows": (production(heads=(17, 1)), r"T \* G must be at most 16 in one launch, got 17"),
    "blocks of 8": (production(block_size=8), "block_size must be .*16.* got 8"),
    "too many candidates": (
        production(batch=40, tokens=1 << 20, block_size=16),
        r"chooses among at most \d+ blocks; 1048576 tokens in blocks of 16 over 1 CTAs give 65536",
    ),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_is_refused_by_name_and_passed_by(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call)["selected_attention"] == "composed"


def test_the_two_ops_are_kernels_where_they_can_be(on_hopper, picked):
    """17 query rows are too many for one launch, and not too many for two."""
    kernel = "mosaic_gpu"
    assert picked(NOT_HERE["17 query rows"][0]) == {"selected_attention": "composed", "select_blocks": kernel, "gather_attention": kernel}


@pytest.mark.parametrize("case", ["28/4, batch 40", "28/4, means", "16 drafts of groups of 8", "groups of 16", "budget of none"])
def test_what_it_can_do_is_picked(on_hopper, picked, case):
    assert picked(SPILL_FREE[case]) == {"selected_attention": "mosaic_gpu"}


def test_it_takes_no_config(on_hopper, picked):
    with pytest.raises(ValueError, match="'mosaic_gpu' of selected_attention takes no config, got 3"):
        picked(production(config=3), implementation="mosaic_gpu")
