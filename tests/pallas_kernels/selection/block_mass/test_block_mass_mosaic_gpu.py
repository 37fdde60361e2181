"""The kernel of block_mass for Hopper without one: interpreted, compiled to machine code; who is passed by.

What only a GPU can tell is in `test_block_mass_on_hopper.py`.
"""

from __future__ import annotations

import pytest
from quick_cases import rest_long


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interpreted(with_threads):
    """Values, races and planted bugs: `block_mass_interpreted.py`, with threads enough for its warpgroups."""
    with_threads("block_mass_interpreted.py")


def production(heads=(28, 4), head_dim=128, page_size=128, batch=1, tokens=8192, dtype="bfloat16", block_size=64, scale=0.1, config=None):
    """(op, arrays, keywords) of the mass of a chunk over 128K tokens."""
    num_heads, kv_heads = heads
    pages = (128 << 10) // page_size
    arrays = {"q": ((batch, tokens, num_heads, head_dim), dtype), "k": ((1024, kv_heads, page_size, head_dim), dtype)}
    arrays |= {"table": ((batch, pages), "int32"), "lse": ((batch, tokens, num_heads), "float32")}
    arrays |= dict.fromkeys(("starts", "lengths", "first_query"), ((batch,), "int32"))
    return "block_mass", arrays, {"block_size": block_size, "sm_scale": scale, "config": config}


PRODUCTION = {
    "28/4": production(),
    "32/8, blocks of 128": production(heads=(32, 8), block_size=128),
    "float16, batch of 8, odd chunk": production(dtype="float16", batch=8, tokens=1001),
    "blocks of 16": production(block_size=16),
    "pages of 64": production(page_size=64),
    "pages of 192, blocks of 48": production(page_size=192, block_size=48),
    "head dim 64": production(head_dim=64),
    "head dim 256": production(head_dim=256, heads=(16, 2)),
}


def test_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION)


@pytest.mark.parametrize("case", rest_long(PRODUCTION, "head dim 256"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*PRODUCTION[case])


# Valid input that is none for this kernel: refused when named, passed by when picked.

NOT_HERE = {
    "float32": (production(dtype="float32"), "bfloat16 or float16, q and k alike; got q float32, k float32"),
    "head dim 32": (production(head_dim=32), "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": (production(page_size=16, block_size=16), "page size must be a multiple of 64, got 16"),
    "negative scale": (production(scale=-0.1), r"sm_scale must be positive, got -0\.1"),
    "blocks of 8": (production(block_size=8), "block_size must be a multiple of 16, got 8"),
}


@pytest.mark.parametrize("case", NOT_HERE)
def test_what_it_cannot_do_goes_to_another(on_hopper, picked, case):
    call, reason = NOT_HERE[case]
    assert picked(call) == {"block_mass": "xla"}
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")


def test_it_is_preferred_on_hopper(on_hopper, picked):
    assert picked(PRODUCTION["28/4"]) == {"block_mass": "mosaic_gpu"}


def test_it_takes_no_config(on_hopper, picked):
    with pytest.raises(ValueError, match="'mosaic_gpu' of block_mass takes no config, got 3"):
        picked(production(config=3), implementation="mosaic_gpu")
