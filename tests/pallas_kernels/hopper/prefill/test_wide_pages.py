"""flash_attention over packed pages that are unpacked a span at a time, and block_sparse_attention over those that are
unpacked before, without a GPU: interpreted, lowered, compiled to machine code; which chunks take that way, and its
memory.

What only a GPU can tell is in `test_wide_pages_on_hopper.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import packed_suite
import pytest
from packed_prefill_suite import production
from quick_cases import rest_long

from pallas_kernels.attention.block_sparse_attention import mosaic_gpu as block_sparse
from pallas_kernels.attention.flash_attention import widened
from pallas_kernels.hopper.prefill import packed_tiles, wide_pages


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("chosen", ["matches", "planted"])
def test_interpreted(with_threads, chosen):
    """Values, bits and races, and planted bugs: `wide_pages_interpreted.py`, with threads enough for the warpgroups."""
    with_threads("wide_pages_interpreted.py", chosen)


FORMS = {
    "dense": {},
    "every page packed": {"opened": False},
    "head dim 64": {"heads": (32, 8), "head_dim": 64},
    "head dim 256": {"heads": (16, 2), "head_dim": 256},
    "pages of 64": {"page_size": 64},
    "batch of 3, odd chunk": {"batch": 3, "tokens": 1001},
}
LOWERED = {f"{format}, {form}": production(format, **sizes) for format in packed_suite.FORMATS for form, sizes in FORMS.items()}
QUICK = ("int8, dense", "q4_0, every page packed")


@pytest.mark.parametrize("case", rest_long(LOWERED, *QUICK))
def test_a_program_has_a_span_of_numbers_and_no_unpacked_pool(cuda, case):
    op, arrays, static = LOWERED[case]
    text, pages = cuda.lower(op, arrays, static), arrays["k"]
    assert "widen_pages_kernel" in text
    (frames, kv_heads, page_size, _), (batch, _, _, head_dim) = pages.k[0], arrays["q"][0]
    of_page = 2 * 2 * kv_heads * page_size * head_dim
    assert f"tensor<{widened.SPAN_BYTES // (of_page * batch) * batch}x{kv_heads}x{page_size}x{head_dim}xbf16>" in text
    unpacked = pages.k_packed is None or pages.v_packed is None
    assert (f"{frames}x{kv_heads}x{page_size}x{head_dim}xbf16" in text) == unpacked


FORMATS = ("int8", "fp8", "int4", "q4_0", "int8 keys per channel")
TIGHT = ("pages of 64", "batch of 3, odd chunk")
MAX_SPILLED = 16
"""Bytes per thread."""


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_compiles_with_little_spilled(spill_free):
    """Two kernels for the spans before the last, and two for that. In `TIGHT` forms up to four words of the second wait
    in memory."""
    cases = [{f"{x}, {form}": LOWERED[f"{x}, {form}"] for x in FORMATS for form in forms} for forms in (FORMS.keys() - TIGHT, TIGHT)]
    found = spill_free(*cases, launches=4)
    assert all(kernel["spill_stores"] <= MAX_SPILLED for kernels in found.values() for kernel in kernels)


@pytest.mark.parametrize("case", ["few queries", "a window", "one head for each KV head", "not packed"])
def test_other_chunks_are_not_widened(cuda, case):
    format, sizes = {
        "few queries": ("int8", {"tokens": 256}),
        "a window": ("int8", {"window": (64, 1024)}),
        "one head for each KV head": ("int8", {"tokens": 2047, "heads": (8, 8)}),
        "not packed": ((None, None), {"opened": False}),
    }[case]
    assert "widen_pages_kernel" not in cuda.lower(*production(format, **sizes))


@pytest.mark.parametrize("tokens", rest_long([293, 512, 8192], 293))
def test_chunks_of_2048_rows_of_a_kv_head_are_widened(cuda, tokens):
    assert "widen_pages_kernel" in cuda.lower(*production("int8", tokens=tokens))


LISTS = {"op": "block_sparse_attention", "block_size": 128, "window": (128, 1024)}


@pytest.mark.parametrize("format", rest_long(list(packed_suite.FORMATS), "int8"))
def test_lists_of_many_queries_read_numbers_of_all_pages(cuda, format):
    """As they are read, no list is cut. The numbers take 268 MB, and there is no other array of them."""
    op, arrays, static = production(format, **LISTS)
    text = cuda.lower(op, arrays, static)
    assert "widen_pages_kernel" in text
    assert "stablehlo.while" not in text
    width = arrays["table"][0][1]
    assert 2 * 2 * width * 4 * 128 * 128 == block_sparse.WIDE_BYTES
    assert f"tensor<{width}x4x128x128xbf16>" in text


@pytest.mark.parametrize(
    ("pages", "sizes"),
    [(1025, {}), (1024, {"tokens": 1024}), (1024, {"heads": (4, 4), "tokens": 4096}), (1024, {"heads": (32, 8)})],
    ids=["more pages than fit", "few queries", "one head for each KV head", "more heads"],
)
def test_other_lists_are_unpacked_where_they_are_read(cuda, pages, sizes):
    op, arrays, static = production("int8", **LISTS | sizes)
    text = cuda.lower(op, arrays | {"table": ((1, pages), "int32")}, static)
    assert "block_sparse_attention_kernel" in text
    assert "widen_pages_kernel" not in text


@pytest.mark.parametrize(("heads", "page_size", "width"), [((16, 16), 4096, 1), ((8, 8), 192, 2), ((28, 4), 128, 1024)])
def test_numbers_of_all_pages_never_take_more_than_their_bound(heads, page_size, width):
    taken = []
    for batch in (1, 8, 256, 1024):
        s = shape(batch, heads, 256 if page_size == 4096 else 128, page_size)
        call = block_sparse.Call(page_size, 128, None, 1.0, None)
        blocks, pages = jax.ShapeDtypeStruct((batch, 64, heads[0], 4096), "int32"), SimpleNamespace(packed=True)
        widens = block_sparse.widens(s, call, pages, jax.ShapeDtypeStruct((batch, width), "int32"), blocks)
        numbers = 2 * 2 * batch * -(-width * page_size // wide_pages.unit(s)) * wide_pages.unit(s) * heads[1] * s.head_dim
        assert widens == (numbers <= block_sparse.WIDE_BYTES)
        taken.append(widens)
    assert len(set(taken)) == 2


def shape(batch=1, heads=(28, 4), head_dim=128, page_size=128):
    q = jax.ShapeDtypeStruct((batch, 8192, heads[0], head_dim), "bfloat16")
    k = jax.ShapeDtypeStruct((9, heads[1], page_size, head_dim), "bfloat16")
    return packed_tiles.prefill_fold.shape_of(q, k, sm_scale=1.0)


@pytest.mark.parametrize(
    "sizes", [{}, {"heads": (32, 8)}, {"heads": (64, 64)}, {"head_dim": 256}, {"batch": 8}, {"page_size": 192}, {"page_size": 64}], ids=str
)
def test_a_span_has_whole_pages_and_tiles_and_bounded_bytes(sizes):
    s = shape(**sizes)
    of_token = 2 * 2 * s.batch * s.num_kv_heads * s.head_dim
    for width in (1, 5, 100, 1024, 65_536):
        span = widened.span_of(s, width)
        assert span % s.page_size == span % s.tile == 0
        assert 0 < span * of_token <= widened.SPAN_BYTES
        assert span < width * s.page_size + wide_pages.unit(s)
    assert span * of_token > 0.95 * widened.SPAN_BYTES


def test_a_span_of_a_7b_model_is_64k_tokens():
    assert widened.span_of(shape(), 8192) == 65_536


@pytest.mark.parametrize(("pages", "loops"), [(512, False), (513, True)])
def test_a_table_of_one_span_needs_no_state(cuda, pages, loops):
    """Else there is a loop over the spans that a row has when the program runs."""
    op, arrays, static = production("int8")
    text = cuda.lower(op, arrays | {"table": ((1, pages), "int32")}, static)
    assert ("stablehlo.while" in text) == loops
    assert ("1x28x8192x128xf32" in text) == loops
