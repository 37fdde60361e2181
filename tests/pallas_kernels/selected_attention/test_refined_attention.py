"""selected_attention that chooses from a shortlist by keys in few bits: on any backend, and the kernel on emulated threads."""

from __future__ import annotations

import functools

import paging
import pytest
from emulator.kernels import kernels
from quick_cases import rest_long
from refined_suite import SMALL, arguments_of, checker

from pallas_kernels.page_index import INDEX_ROWS, index_shape
from pallas_kernels.selected_attention import selected_attention

CASES = {
    "4 bits": {"lengths": (0, 65, 384)},
    "1 bit": {"codes_kind": "keys1", "head_dim": 128},
    "2 bits, float16": {"codes_kind": "keys2", "dtype": "float16"},
    "equal keys": {"keys": "equal"},
    "a page is missing": {"hole": True},
    "drafts": {"num_queries": 3, "lengths": (66, 330), "local": 1},
    "blocks of 64": {"block_size": 64, "shortlist": 3, "budget": 2, "local": 1, "lengths": (384,)},
    "groups of 9, two KV heads": {"group": 9, "kv_heads": 2, "lengths": (384,)},
    "frames": {"framed": True},
}


@pytest.fixture(scope="module")
def arguments(tools):
    return arguments_of(tools, {name: SMALL | spec for name, spec in CASES.items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    return checker(tools, arguments)


@pytest.mark.parametrize("case", CASES)
def test_composed_matches_the_reference(check, case):
    check(functools.partial(selected_attention, implementation="composed"), case)


@pytest.fixture(scope="module")
def on_emulated_threads():
    kernel = paging.implementation("selected_attention", "mosaic_gpu")

    def op(*arrays, **keywords):
        with kernels():
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.parametrize("case", CASES)
def test_on_emulated_threads_it_matches_the_reference(check, on_emulated_threads, case):
    check(on_emulated_threads, case)


# Lowered and compiled, in the shapes that decoding has.


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
    """(op, arrays, keywords) of a call over `tokens` tokens a row: cascade:4, if `static` does not say otherwise. frames: with a table of
    them."""
    sizes = {"kind": "bounds", "block_size": 128, "budget": 4, "shortlist": 32, "codes_kind": "keys4", "sink": 1, "local": 4}
    keywords = sizes | {"sm_scale": head_dim**-0.5, "config": None} | static
    num_heads, kv_heads = heads
    pool, block_size = (1024, kv_heads, page_size, head_dim), keywords["block_size"]
    index = (*pool[:2], page_size // block_size)
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "k": (pool, dtype), "v": (pool, dtype)}
    arrays |= {"index": ((*index, INDEX_ROWS[keywords["kind"]], head_dim), dtype), "table": ((batch, tokens // page_size), "int32")}
    arrays |= {"lengths": ((batch,), "int32"), "codes": ((*index, *index_shape(keywords["codes_kind"], block_size, head_dim)), "uint8")}
    return "selected_attention", arrays | ({"frames": arrays["table"]} if frames else {}), keywords


FORMS = {
    "batch 8": {"batch": 8},
    "batch 40": {"batch": 40},
    "1 bit": {"codes_kind": "keys1"},
    "2 bits": {"codes_kind": "keys2"},
    "a million tokens": {"tokens": 1 << 20},
}
SPILL_FREE = {
    f"{name}, {form}": production(heads=heads, **FORMS[form])
    for name, heads in {"28/4": (28, 4), "32/8": (32, 8)}.items()
    for form in FORMS
} | {
    "cascade:4": production(),
    "head dim 64": production(heads=(32, 8), head_dim=64),
    "float16": production(dtype="float16", batch=8),
    "batch 8, a million tokens": production(batch=8, tokens=1 << 20),
    "4 drafts, batch 8, frames": production(num_queries=4, batch=8, frames=True),
    "16 drafts of groups of 8": production(heads=(32, 4), num_queries=16),
    "blocks of 16": production(block_size=16, budget=32, shortlist=256, local=32),
    "blocks of 64, means": production(block_size=64, kind="mean"),
    "pages of 256": production(page_size=256, batch=8),
    "a shortlist of 256": production(budget=64, shortlist=256, batch=8),
}
WIDE = {
    "groups of 16": production(heads=(16, 1)),
    "head dim 256": production(heads=(16, 2), head_dim=256),
}
"""Twice the accumulators, so that spilling some is no news."""


@pytest.mark.parametrize("case", rest_long(SPILL_FREE | WIDE, "cascade:4", "4 drafts, batch 8, frames", "blocks of 16"))
def test_lowers_and_is_picked_on_hopper(cuda, on_hopper, picked, case):
    call = (SPILL_FREE | WIDE)[case]
    assert "refined_kernel" in cuda.lower(*call)
    assert picked(call) == {"selected_attention": "mosaic_gpu"}


def test_compiles_without_spilling(spill_free):
    spill_free(SPILL_FREE, WIDE, launches=1)


def test_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(SPILL_FREE, WIDE, launches=1)
