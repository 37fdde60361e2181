"""The prefill kernels for Hopper without one: interpreted, compiled to machine code; who is passed by.

What only a GPU can tell is in `test_flash_attention_on_hopper.py` and `test_block_sparse_attention_on_hopper.py`.
"""

from __future__ import annotations

import as_on_accelerators
import jax
import pytest
from quick_cases import rest_long

from pallas_kernels.hopper import query_tiles


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("chosen", ["matches", "planted"])
def test_interpreted(with_threads, chosen):
    """Values and races, and planted bugs: `query_tiles_interpreted.py`, with threads enough for its warpgroups."""
    with_threads("query_tiles_interpreted.py", chosen)


def production(heads=(28, 4), head_dim: int = 128, page_size: int = 128, batch: int = 1, tokens: int = 8192, dtype="bfloat16", **static):
    """(op, arrays, keywords) of a prefill of a chunk over 128K tokens; over lists where a block size is given."""
    num_heads, kv_heads = heads
    pool, width = ((1024, kv_heads, page_size, head_dim), dtype), (128 << 10) // page_size
    arrays = {"q": ((batch, tokens, num_heads, head_dim), dtype), "k": pool, "v": pool, "table": ((batch, width), "int32")}
    arrays |= dict.fromkeys(("starts", "lengths"), ((batch,), "int32"))
    static = {"window": None, "sm_scale": head_dim**-0.5, "config": None} | static
    if "block_size" not in static:
        return "flash_attention", arrays, static
    static = {"query_tile": 128} | static
    blocks = (batch, -(-tokens // static["query_tile"]), num_heads, 128)
    return "block_sparse_attention", arrays | {"blocks": (blocks, "int32")}, static


SPILL_FREE = {
    "dense": production(),
    "dense 32/8": production(heads=(32, 8)),
    "dense float16, batch of 8, odd chunk": production(dtype="float16", batch=8, tokens=1001),
    "dense head dim 64": production(head_dim=64),
    "dense head dim 256": production(head_dim=256, heads=(16, 2)),
    "dense window": production(window=(64, 1024)),
    "dense pages of 64": production(page_size=64),
    "lists": production(block_size=64, window=(64, 1024)),
    "lists 32/8": production(heads=(32, 8), block_size=64, window=(64, 1024)),
    "lists head dim 64": production(head_dim=64, block_size=64, window=(64, 1024)),
    "lists of 128": production(block_size=128),
}
WIDE = {
    "lists head dim 256": production(head_dim=256, heads=(16, 2), block_size=64, window=(64, 1024)),
    "lists of 16": production(block_size=16, window=(64, 1024)),
}
"""Too many values at once; a few of them wait in memory."""


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE)


@pytest.mark.quick("lists")
@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "dense window", "dense head dim 256", "lists", "lists of 128"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(SPILL_FREE | WIDE)[case])


# Valid input that is none for these kernels: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": (production(page_size=16), "page size must be a multiple of 64, got 16"),
    "negative scale": (production(sm_scale=-0.1), r"sm_scale must be positive, got -0\.1"),
    "lists, float32": (production(dtype="float32", block_size=64), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "lists for 64 queries": (production(block_size=64, query_tile=64), "query_tile must be a multiple of 128, got 64"),
    "lists of 8": (production(block_size=8), "block_size must be a multiple of 16, got 8"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_goes_to_another(on_hopper, picked, monkeypatch, case):
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_on_accelerators.dot_product_attention)  # there is no cuDNN here
    call, reason = NOT_HERE[case]
    cudnn_can = call[0] == "flash_attention" and case != "float32"
    assert picked(call) == {call[0]: "cudnn" if cudnn_can else "xla"}
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")


@pytest.mark.parametrize("case", ["dense", "lists"])
def test_it_is_preferred_on_hopper(on_hopper, picked, case):
    assert picked(SPILL_FREE[case]) == {SPILL_FREE[case][0]: "mosaic_gpu"}


@pytest.mark.parametrize("case", ["dense", "lists"])
def test_it_takes_no_config(on_hopper, picked, case):
    op, arrays, static = SPILL_FREE[case]
    with pytest.raises(ValueError, match=f"'mosaic_gpu' of {op} takes no config, got 3"):
        picked((op, arrays, static | {"config": 3}), implementation="mosaic_gpu")


@pytest.mark.parametrize("registers", [(208, 96), (232, 48)])
def test_warpgroups_cannot_ask_for_more_registers_than_a_cta_has(registers):
    """They would wait for ever, which only a GPU shows."""
    with pytest.raises(ValueError, match=r"2 x the first \+ the second must be at most 504"):
        query_tiles.Fetcher(registers, query_tiles.fetch)
    assert query_tiles.Fetcher((208, 88), query_tiles.fetch).registers == (208, 88)
