"""The kernel of select_tiles for Hopper without one: interpreted, compiled to machine code; who is passed by.

What only a GPU can tell is in `test_select_tiles_on_hopper.py`.
"""

from __future__ import annotations

import pytest
from quick_cases import rest_long


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interpreted(with_threads):
    """Values, races and planted bugs: `select_tiles_interpreted.py`, with threads enough for its warpgroups."""
    with_threads("select_tiles_interpreted.py")


def production(heads=(28, 4), head_dim=128, batch=1, tokens=8192, dtype="bfloat16", block_size=128, page_size=128, pooling="sum", tile=128):
    """(op, arrays, keywords) of the lists of a chunk over 128K tokens."""
    num_heads, kv_heads = heads
    pages = (128 << 10) // page_size
    arrays = {"q": ((batch, tokens, num_heads, head_dim), dtype)}
    arrays |= {"bounds": ((pages + 9, kv_heads, page_size // block_size, 2, head_dim), dtype), "table": ((batch, pages), "int32")}
    arrays |= dict.fromkeys(("starts", "lengths"), ((batch,), "int32"))
    static = {
        "k": 32,
        "block_size": block_size,
        "query_tile": tile,
        "window": (128, 1024),
        "pooling": pooling,
        "ranked": False,
        "sm_scale": 0.1,
    }
    return "select_tiles", arrays, static


PRODUCTION = {
    "28/4": production(),
    "32/8, maximum": production(heads=(32, 8), pooling="max"),
    "float16, batch of 8, odd chunk": production(dtype="float16", batch=8, tokens=1001),
    "blocks of 64": production(block_size=64),
    "head dim 64": production(head_dim=64),
}


def test_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION)


@pytest.mark.parametrize("case", rest_long(PRODUCTION, "32/8, maximum"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*PRODUCTION[case])


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and bounds alike; got q float32, bounds float32"),
    "head dim 256": (production(head_dim=256), "head dim must be 64 or 128, got 256"),
    "tiles of 64": (production(tile=64), "query_tile must be 128, got 64"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_goes_to_another(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    assert picked(call)["select_tiles"] == "xla"
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")


def test_it_is_preferred_on_hopper(on_hopper, picked):
    assert picked(PRODUCTION["28/4"])["select_tiles"] == "mosaic_gpu"
