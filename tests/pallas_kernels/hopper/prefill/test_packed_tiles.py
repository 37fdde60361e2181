"""The prefill kernels for Hopper over packed pages, without one: interpreted, lowered, compiled to machine code; who is
passed by.

What only a GPU can tell is in `test_packed_tiles_on_hopper.py`.
"""

from __future__ import annotations

import packed_suite
import pytest
from packed_prefill_suite import production
from quick_cases import rest_long

from pallas_kernels.core.page_format import PageFormat


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("chosen", ["matches", "planted"])
def test_interpreted(with_threads, chosen):
    """Values and races, and planted bugs: `packed_tiles_interpreted.py`, with threads enough for its warpgroups."""
    with_threads("packed_tiles_interpreted.py", chosen)


LISTS = {"op": "block_sparse_attention", "block_size": 64, "window": (64, 1024)}
SELECTED = {"gamma": 16, "block_size": 64, "k_blocks": 128, "k_exact": 8, "window": (64, 1009), "tournament": False, "estimate": "quantile"}
SELECTED |= {"op": "query_sparse_attention"}
FORMS = {
    "dense": {},  # unpacked a span at a time, see `test_wide_pages.py`
    "dense, 256 queries": {"tokens": 256},
    "dense, 256 queries, every page packed": {"tokens": 256, "opened": False},
    "dense window, pages of 64": {"window": (64, 1024), "page_size": 64},
    "dense head dim 64": {"heads": (32, 8), "head_dim": 64, "tokens": 256},
    "dense head dim 256": {"heads": (16, 2), "head_dim": 256, "tokens": 128},
    "lists": LISTS,  # unpacked before, see `test_wide_pages.py`
    "lists, 512 queries": LISTS | {"tokens": 512},
    "lists of 128, 512 queries": LISTS | {"block_size": 128, "tokens": 512},
    "selected": SELECTED,
}
LOWERED = {f"{format}, {form}": production(format, **sizes) for format in packed_suite.FORMATS for form, sizes in FORMS.items()}


@pytest.mark.parametrize("case", rest_long(LOWERED, "int8, dense"))
def test_lowers_without_an_unpacked_copy_of_the_pool(cuda, case):
    """Of arrays of the pool's shape, the program has only codes."""
    op, arrays, static = LOWERED[case]
    text, pages = cuda.lower(op, arrays, static), arrays["k"]
    assert "mosaic_gpu" in text
    shape = "x".join(map(str, (*pages.k[0][:3], arrays["q"][0][3])))
    assert (f"{shape}xbf16" in text) == (pages.k_packed is None or pages.v_packed is None)
    assert f"{shape}xf32" not in text


COMPILED = [f"{format}, {form}" for format in ("int8", "fp8", "int4", "q4_0", "int8 keys per channel") for form in FORMS]


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_compiles_with_little_spilled(spill_free):
    """No loop of the folding warpgroups spills. What is left are places of barriers that are read at the end, and two
    words of a tile."""
    found = spill_free({}, {case: LOWERED[case] for case in COMPILED})
    many = {case: kernels for case, kernels in found.items() if any(kernel["spill_stores"] > MAX_SPILLED for kernel in kernels)}
    assert not many


MAX_SPILLED = 64
"""Bytes per thread."""


@pytest.mark.parametrize("case", ["int8, dense", "q4_0, lists", "keys as they are, int4 values, selected"])
def test_it_is_picked_on_hopper(on_hopper, picked, case):
    op, *_ = LOWERED[case]
    assert picked(LOWERED[case]) == {op: "mosaic_gpu"}


BFLOAT16 = {"read_as": "bfloat16"}
REFUSED = {
    "lattices": (
        {"form": PageFormat("d4", levels=38, **BFLOAT16)},
        "does not unpack keys of d4; it unpacks fp8_e4m3, int8, int4, q8_0, q4_0",
    ),
    "rotation": ({"form": PageFormat("int8", "token", rotate=True, **BFLOAT16)}, "does not unpack rotated keys"),
    "scales of pages": ({"form": PageFormat("int4", "page", **BFLOAT16)}, "keys with scales per token or channel, not per page"),
    "groups of 8": ({"form": PageFormat("int8", "token", 8, **BFLOAT16)}, "must be multiples of 16, got 8 for keys"),
    "float16": ({"form": PageFormat("int8", "token", read_as="float16")}, "to bfloat16 alone, got read_as float16"),
    "queries of float16": ({"form": "int8", "dtype": "float16"}, "over packed pages it multiplies bfloat16, got q float16"),
    "head dim 32": ({"form": "int8", "head_dim": 32}, "head dim must be 64, 128 or 256, got 32"),
    "pages of 16": ({"form": "int8", "page_size": 16}, "page size must be a multiple of 64, got 16"),
    "lists of 32": ({"form": "int8", **LISTS, "block_size": 32}, "of head dim 128, block_size must be a multiple of 64, got 32"),
    "lists, a short window": (
        {"form": "int8", **LISTS, "window": (4, 64)},
        "its window must reach over a page of 128 tokens, got window (4, 64)",
    ),
    "lists alone": ({"form": "int8", **LISTS, "window": None}, "its window must reach over a page of 128 tokens, got window None"),
    "selected, a short window": ({"form": "int8", **SELECTED, "window": (4, 64)}, "window must reach over a page of 128 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_calls_are_refused_by_name_and_passed_by(on_hopper, picked, case):
    sizes, reason = dict(REFUSED[case][0]), REFUSED[case][1]
    form = sizes.pop("form")
    call = production(form if isinstance(form, str) else (form, form), **sizes)
    with pytest.raises(NotImplementedError) as refused:
        picked(call, implementation="mosaic_gpu")
    assert reason in str(refused.value)
    assert picked(call)[call[0]] == "xla"


def test_lists_alone_are_taken_where_every_page_is_packed(on_hopper, picked):
    call = production("int8", **LISTS | {"window": None}, opened=False)
    assert picked(call) == {"block_sparse_attention": "mosaic_gpu"}
