"""Packed pages: every op that reads pages gives attention over the unpacked ones, in bounded memory; a query's own page
is read as it was before it was packed, where it is open."""

from __future__ import annotations

import importlib

import as_on_accelerators
import jax
import jax.numpy as jnp
import numpy as np
import packed_suite
import paging
import pytest
from quick_cases import rest_long

from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.cache.copy_tiles import copy_tiles
from pallas_kernels.cache.fetch_tiles import fetch_tiles
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.cache.place_tiles import WAYS
from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import PageFormat
from pallas_kernels.core.pages import OpenPages, Pages, check_pages, read

P = 16


def _format(codes, scale=None, group=None, **more):
    return PageFormat(codes, scale, group, read_as="float32", **more)


FORMATS = {
    "int8": (_format("int8", "token"), _format("int8", "token")),
    "keys per channel, values of 4 bits": (_format("int8", "channel"), _format("int4", "token", 16)),
    "keys of 4 bits per page, values as they are": (_format("int4", "page"), None),
    "keys as they are, fp8 values": (None, _format("fp8_e4m3")),
    "q8_0 and q4_0": (_format("q8_0"), _format("q4_0")),
    "d4 and e8": (_format("d4", levels=38, rotate=True), _format("e8", levels=38)),
    "fp8 per token": (_format("fp8_e4m3", "token"), _format("fp8_e4m3", "token")),
}
QUICK = "keys per channel, values of 4 bits", "d4 and e8"


def packed(k, v, k_format, v_format, open=None, **more) -> Pages:
    """Pages of these numbers; NaN is packed, too. A format of None: as they are."""
    k, k_scales = (k, None) if k_format is None else pack_pages(k, format=k_format)
    v, v_scales = (v, None) if v_format is None else pack_pages(v, format=v_format)
    return Pages(k, v, k_scales=k_scales, v_scales=v_scales, open=open, k_packed=k_format, v_packed=v_format, **more)


def plain(pages: Pages) -> Pages:
    return Pages(pages.keys, pages.values)


SELECTION = {"gamma": 3, "block_size": 4, "k_blocks": 5, "k_exact": 2, "estimate": "buckets"}
OPS = {
    "gather_attention": ("xla", {}),
    "selected_attention": ("composed", {"kind": "bounds", "block_size": 16, "budget": 1, "sink": 1, "local": 1}),
    "flash_attention": ("xla", {"window": (3, 40)}),
    "block_sparse_attention": ("xla", {"block_size": 8, "query_tile": 3, "window": (3, 9)}),
    "query_sparse_attention": ("xla", SELECTION),
    "block_mass": ("xla", {"block_size": 8}),
}


def _call(tools, op: str, form: str, **more):
    """Operands (pages second) and keywords of a call over packed pages: permuted pages, NaN behind each length, ragged
    rows."""
    decodes = op in ("gather_attention", "selected_attention")
    paged = tools.make_paged(seed=5, lengths=(96, 0, 17, 40), num_queries=2 if decodes else 7, **more)
    # A page is packed once it is full; what lies behind a length then is what earlier tokens left there.
    k, v = (jnp.where(jnp.isnan(x), 1e3, x) if form != "fp8 per token" else x for x in (paged.k, paged.v))
    pages, keywords = packed(k, v, *FORMATS[form]), {"sm_scale": paged.sm_scale, **OPS[op][1]}
    starts = jnp.maximum(paged.lengths - 7, 0)
    operands = [paged.q, pages, paged.page_table, *([] if decodes else [starts]), paged.lengths]
    if op == "selected_attention":
        operands.insert(2, paging.public("page_index")(jnp.nan_to_num(pages.keys), kind="bounds", block_size=16))
    if op == "block_sparse_attention":
        keywords["blocks"] = tools.ragged_lists(1, (4, 3, 8), 12, 6)
    if op == "block_mass":
        lse = flash_attention(paged.q, plain(pages), *operands[2:], sm_scale=paged.sm_scale)[1]
        operands += [lse, starts]
    return operands, keywords


def _run(op: str, operands, keywords, implementation):
    found = getattr(importlib.import_module(dispatch.MODULES[op]), op)(*operands, **keywords, implementation=implementation)
    return found if isinstance(found, tuple) else (found,)


def check(tools, op: str, form: str, change=lambda pages: pages) -> None:
    """Over packed pages, against the reference over the same pages unpacked: it knows nothing of formats then."""
    operands, keywords = _call(tools, op, form)
    expected = _run(op, [plain(x) if isinstance(x, Pages) else x for x in operands], keywords, "reference")
    found = _run(op, [change(x) if isinstance(x, Pages) else x for x in operands], keywords, OPS[op][0])
    tools.assert_rows_close(found[0], expected[0], 1e-5)
    if op != "block_mass":
        tools.assert_lse_close(found[1], expected[1])


@pytest.mark.quick_but(
    "gather_attention-d4 and e8",
    "selected_attention-keys per channel, values of 4 bits",
    "block_sparse_attention-keys per channel, values of 4 bits",
    "query_sparse_attention-keys per channel, values of 4 bits",
    "block_mass-d4 and e8",
    "flash_attention-d4 and e8",
    "query_sparse_attention-d4 and e8",
)
@pytest.mark.parametrize("form", rest_long(FORMATS, *QUICK))
@pytest.mark.parametrize("op", OPS)
def test_packed_pages_are_attended_as_their_numbers(tools, op, form):
    check(tools, op, form)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_reads_packed_pages(tools, op):
    operands, keywords = _call(tools, op, "d4 and e8")
    over_codes = _run(op, operands, keywords, "reference")
    over_numbers = _run(op, [plain(x) if isinstance(x, Pages) else x for x in operands], keywords, "reference")
    tools.assert_same_bits(over_codes[0], over_numbers[0])


MUTANTS = {
    "scales of another head": lambda p: p.replace(k_scales=p.k_scales[:, ::-1]),
    "scales of another page": lambda p: p.replace(v_scales=jnp.roll(p.v_scales, 1, axis=0)),
    "values read from keys": lambda p: p.replace(v=p.k, v_scales=p.k_scales),
    "no scales": lambda p: p.replace(k_scales=jnp.ones_like(p.k_scales)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("op", ["gather_attention", "flash_attention"])
def test_mutants_fail(tools, op, mutant):
    with pytest.raises(AssertionError):
        check(tools, op, "int8", MUTANTS[mutant])


def test_a_view_of_packed_keys(tools):
    """Latent pages: V is the first columns of the unpacked keys."""
    paged = tools.make_paged(lengths=(96, 40))
    k, scales = pack_pages(jnp.nan_to_num(paged.k), format=FORMATS["int8"][0])
    pages = Pages(k, value_dim=20, k_scales=scales, k_packed=FORMATS["int8"][0])
    numbers = Pages(pages.keys, value_dim=20)
    for found, expected in zip(
        *(gather_attention(paged.q, x, paged.page_table, paged.lengths, sm_scale=0.2, implementation="xla") for x in (pages, numbers)),
        strict=True,
    ):
        tools.assert_same_bits(found, expected)


# Open pages.


class Sequences:
    """Rows over a pool whose pages are all packed and all open; `mixed(row, page)` is the pool as a query in `page`
    sees it."""

    def __init__(self, tools, lengths, form="keys per channel, values of 4 bits", **more):
        paged = tools.make_paged(seed=8, lengths=lengths, **more)
        self.tools, self.q, self.table, self.lengths, self.sm_scale = tools, paged.q, paged.page_table, paged.lengths, paged.sm_scale
        self.k, self.v = (jnp.nan_to_num(x, nan=2.5) for x in (paged.k, paged.v))
        self.formats, num = FORMATS[form], len(paged.k)
        rows = np.random.default_rng(0).permutation(num).astype(np.int32)
        self.open = OpenPages(jnp.zeros_like(self.k).at[rows].set(self.k), jnp.zeros_like(self.v).at[rows].set(self.v), jnp.asarray(rows))
        self.pages = packed(self.k, self.v, *self.formats, open=self.open)

    def mixed(self, row: int, page: int) -> Pages:
        frame = self.table[row, page]
        numbers = plain(self.pages)
        return Pages(numbers.k.at[frame].set(self.k[frame]), numbers.v.at[frame].set(self.v[frame]))

    def expected(self, op, starts, t: int, b: int, **keywords):
        """What query t of row b must give: the plain op over what it sees."""
        position = int(starts[b]) + t
        mixed, one = self.mixed(b, position // P), self.q[b : b + 1, t : t + 1]
        where = self.table[b : b + 1], *([jnp.array([position], jnp.int32)] if op is flash_attention else []), jnp.array([position + 1])
        return op(one, mixed, *where, sm_scale=self.sm_scale, implementation="reference", **keywords)


@pytest.mark.quick("1-keywords0-xla", "3-keywords1-reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("num_queries", "keywords"),
    [
        (1, {}),
        (3, {"window": (3, 20)}),
        pytest.param(16, {}, marks=pytest.mark.long),
        (3, {"blocks": (9, 4)}),
        (1, {"blocks": (17, 4)}),
    ],
)
def test_a_decoded_query_reads_its_own_page_open(tools, implementation, num_queries, keywords):
    """Drafts that cross a page's end: a query behind it reads the page as packed, one before it does not. Listed blocks
    of the own page are read open, others of it are not read."""
    s = Sequences(tools, (96, 33, 17, 50, 65), num_queries=num_queries)
    listed, keywords = keywords.get("blocks"), {name: x for name, x in keywords.items() if name != "blocks"}
    if listed:
        keywords |= {"blocks": tools.random_blocks(3, 5, 2, 24, listed[0]), "block_size": listed[1]}
    out, lse = gather_attention(s.q, s.pages, s.table, s.lengths, sm_scale=s.sm_scale, implementation=implementation, **keywords)
    for b, t in np.ndindex(*out.shape[:2]):
        own = {**keywords, **({"blocks": keywords["blocks"][b : b + 1]} if listed else {})}
        expected = s.expected(gather_attention, s.lengths - num_queries, t, b, **own)
        tools.assert_rows_close(out[b : b + 1, t : t + 1], expected[0], 1e-5)
        tools.assert_lse_close(lse[b : b + 1, t : t + 1], expected[1])


@pytest.mark.quick("window1-xla")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("window", [None, (3, 20)])
def test_a_prefilled_query_reads_its_own_page_open(tools, implementation, window):
    """A chunk of 40 tokens over several pages, which begins in the middle of one."""
    s = Sequences(tools, (96, 43), num_queries=40)
    starts = s.lengths - 40
    call = {"sm_scale": s.sm_scale, "window": window}
    out, lse = flash_attention(s.q, s.pages, s.table, starts, s.lengths, **call, implementation=implementation)
    for b, t in [(0, 0), (0, 7), (0, 8), (0, 23), (0, 24), (0, 39), (1, 0), (1, 12), (1, 13), (1, 39)]:
        expected = s.expected(flash_attention, starts, t, b, window=window)
        tools.assert_rows_close(out[b : b + 1, t : t + 1], expected[0], 1e-5)
        tools.assert_lse_close(lse[b : b + 1, t : t + 1], expected[1])


def _decoded(s, pages):
    return gather_attention(s.q[:, :3], pages, s.table, s.lengths, sm_scale=s.sm_scale, implementation="xla")


def _chunk(op: str):
    """The op over a chunk that ends each row: (s, pages) -> its results."""

    def run(s, pages, implementation="xla"):
        starts = jnp.maximum(s.lengths - s.q.shape[1], 0)
        operands, keywords = [s.q, pages, s.table, starts, s.lengths], OPS[op][1] | {"sm_scale": s.sm_scale}
        if op == "block_sparse_attention":
            keywords["blocks"] = s.tools.ragged_lists(1, (len(s.q), -(-s.q.shape[1] // 3), 8), 12, 6)
        if op == "block_mass":
            operands += [jnp.zeros(s.q.shape[:3], jnp.float32) + 8, starts]
        return _run(op, operands, keywords, implementation)

    return run


CHUNKS = {op: _chunk(op) for op in ("flash_attention", "block_sparse_attention", "query_sparse_attention", "block_mass")}
READERS = {"gather_attention": _decoded} | CHUNKS


@pytest.mark.quick("block_mass")
@pytest.mark.parametrize("op", CHUNKS)
def test_chunks_over_open_pages_match_the_reference(tools, op):
    s = Sequences(tools, (96, 43, 0, 35), num_queries=20)
    found, expected = CHUNKS[op](s, s.pages), CHUNKS[op](s, s.pages, "reference")
    if op == "block_mass":
        np.testing.assert_allclose(np.asarray(found[0]), np.asarray(expected[0]), rtol=1e-4, atol=1e-7)
        return
    rows = jnp.array([0, 1, 3])  # the other has padding alone
    tools.assert_rows_close(found[0][rows], expected[0][rows], 1e-5)
    tools.assert_lse_close(found[1][rows], expected[1][rows])


@pytest.mark.quick_but("block_sparse_attention", "query_sparse_attention")
@pytest.mark.parametrize("op", ["block_sparse_attention", "query_sparse_attention", "block_mass"])
def test_the_references_read_a_query_s_own_page_open(tools, op):
    """Queries of one page at a time, by the plain op over the pool as they see it."""
    s = Sequences(tools, (96, 43), num_queries=24)
    whole, starts = CHUNKS[op](s, s.pages, "reference"), s.lengths - 24
    if op == "block_mass":
        parts = []
        for page in (4, 5):
            counts = ((72 + jnp.arange(24)) // P == page)[None, :, None]
            lse = jnp.where(counts, 8.0, -jnp.inf) + jnp.zeros((1, 24, 8))
            where = s.table[:1], starts[:1], s.lengths[:1], lse, starts[:1]
            parts.append(_run(op, [s.q[:1], s.mixed(0, page), *where], OPS[op][1] | {"sm_scale": s.sm_scale}, "reference")[0][0])
        np.testing.assert_allclose(np.asarray(whole[0][0]), np.asarray(sum(parts)), rtol=1e-4, atol=1e-7)
        return
    for page in (4, 5):
        seen = CHUNKS[op](s, s.mixed(0, page), "reference")
        step = SELECTION["gamma"] if op == "query_sparse_attention" else 1
        own = np.flatnonzero((72 + step * np.arange(whole[0].shape[1])) // P == page)
        tools.assert_rows_close(whole[0][:1, own], seen[0][:1, own], 1e-5)
        tools.assert_lse_close(whole[1][:1, own], seen[1][:1, own])


@pytest.mark.quick_but("query_sparse_attention", "block_sparse_attention", "flash_attention", "gather_attention")
@pytest.mark.parametrize("op", READERS)
def test_frames_apart_from_ids_give_the_same_bits(tools, op):
    """Codes, scales and the numbers of open rows lie by frame."""
    s = Sequences(tools, (96, 43, 35), num_queries=18)
    expected, ids = READERS[op](s, s.pages), s.table
    moved, s.table = packed_suite.apart(s.pages, ids)
    for x, y in zip(READERS[op](s, moved), expected, strict=True):
        tools.assert_same_bits(x, y)
    rows_by_id = moved.replace(open=s.open.replace(row_of=jnp.pad(s.open.row_of, (0, moved.num_pages - len(s.k)), constant_values=-1)))
    with pytest.raises(AssertionError):
        tools.assert_same_bits(READERS[op](s, rows_by_id)[0], expected[0])


@pytest.mark.quick_but("query_sparse_attention", "block_sparse_attention", "flash_attention", "gather_attention")
@pytest.mark.parametrize("op", READERS)
def test_what_no_query_reads_has_no_influence(tools, op):
    """NaN in the codes of the last page, which no query reads as packed, and in open rows of pages before the first
    query's, which are not open then."""
    s = Sequences(tools, (96, 43, 35), num_queries=18)
    attend, first = READERS[op], s.lengths - (3 if op == "gather_attention" else 18)
    expected = attend(s, s.pages)
    k, v, open_k, open_v, row_of = s.pages.k_scales, s.pages.v_scales, s.open.k, s.open.v, s.open.row_of
    for b in range(3):
        last = s.table[b, (int(s.lengths[b]) - 1) // P]
        k, v = k.at[last].set(jnp.nan), v.at[last].set(jnp.nan)
        for page in range(int(first[b]) // P):
            row, frame = s.open.row_of[s.table[b, page]], s.table[b, page]
            open_k, open_v, row_of = open_k.at[row].set(jnp.nan), open_v.at[row].set(jnp.nan), row_of.at[frame].set(-1)
    found = attend(s, s.pages.replace(k_scales=k, v_scales=v, open=OpenPages(open_k, open_v, row_of)))
    for x, y in zip(found, expected, strict=True):
        tools.assert_same_bits(x, y)


@pytest.mark.quick_but("query_sparse_attention-own page as packed", "query_sparse_attention-earlier pages open")
@pytest.mark.parametrize("mutant", ["own page as packed", "earlier pages open", "rows of other pages"])
@pytest.mark.parametrize("op", READERS)
def test_open_mutants_differ(tools, op, mutant):
    """Each of these changes the result, by more than rounding: so the tests above can fail."""
    s = Sequences(tools, (96, 43, 33), num_queries=18)
    pages = {
        "own page as packed": s.pages.replace(open=None),
        "earlier pages open": packed(s.k, s.v, None, None),
        "rows of other pages": s.pages.replace(open=s.open.replace(row_of=jnp.roll(s.open.row_of, 1))),
    }[mutant]
    found, expected = (np.asarray(READERS[op](s, x)[0]) for x in (pages, s.pages))
    assert (np.abs(found - expected) / (np.abs(expected) + 1e-3)).max() > 1e-2


def test_tiles_of_accelerators(tools):
    """Tiles that grow, as accelerators have them: packed and open pages, dense and listed."""
    s = Sequences(tools, (96, 33, 17, 50, 65), "d4 and e8", num_queries=3)
    for more in ({}, {"blocks": tools.random_blocks(3, 5, 2, 24, 17), "block_size": 4}):
        call = {"sm_scale": s.sm_scale} | more
        expected = gather_attention(s.q, s.pages, s.table, s.lengths, **call, implementation="reference")
        with as_on_accelerators.small_tiles():
            found = gather_attention(s.q, s.pages, s.table, s.lengths, **call, implementation="xla")
        tools.assert_rows_close(found[0], expected[0], 1e-5)
        tools.assert_lse_close(found[1], expected[1])


def test_the_lse_of_blocks_of_the_own_page(tools):
    s = Sequences(tools, (96, 33, 17), num_queries=3)
    call = {"blocks": tools.random_blocks(3, 3, 2, 24, 20), "block_size": 4, "return_block_lse": True, "sm_scale": s.sm_scale}
    found, expected = (gather_attention(s.q, s.pages, s.table, s.lengths, **call, implementation=name) for name in ("xla", "reference"))
    tools.assert_rows_close(found[0], expected[0], 1e-5)
    for x, y in zip(found[1:], expected[1:], strict=True):
        tools.assert_lse_close(x, y)


# Memory, refusals.


@pytest.mark.quick_but("block_sparse_attention", "query_sparse_attention")
@pytest.mark.parametrize("op", ["gather_attention", "flash_attention", "query_sparse_attention", "block_sparse_attention"])
def test_no_unpacked_copy_of_the_pool_is_made(op):
    """A pool of 64 MB unpacked, at 4 bits: the compiled op needs a small part of that."""
    format = PageFormat("int4", "token", read_as="float32")
    shape, tokens = (1024, 2, 128, 64), 1 if op == "gather_attention" else 128
    codes, scales = jax.eval_shape(lambda: pack_pages(jnp.zeros(shape), format=format))
    pages = Pages(codes, codes, k_scales=scales, v_scales=scales, k_packed=format, v_packed=format)
    q = jax.ShapeDtypeStruct((1, tokens, 4, 64), jnp.float32)
    rows = jax.ShapeDtypeStruct((1,), jnp.int32)
    arrays = q, pages, jax.ShapeDtypeStruct((1, 512), jnp.int32), *([rows] if op != "gather_attention" else []), rows
    keywords = {"sm_scale": 0.1}
    if op == "query_sparse_attention":
        keywords |= SELECTION
    if op == "block_sparse_attention":
        keywords |= {"block_size": 16, "query_tile": 64}
        arrays = (*arrays, jax.ShapeDtypeStruct((1, 2, 4, 32), jnp.int32))

    def run(*arrays):
        arrays, lists = (arrays[:5], {"blocks": arrays[5]}) if op == "block_sparse_attention" else (arrays, {})
        return _run(op, arrays, keywords | lists, "xla")

    unpacked = 4 * int(np.prod(shape))
    assert jax.jit(run).lower(*arrays).compile().memory_analysis().temp_size_in_bytes < unpacked / 8


UNPACKS = {"gather_attention", "selected_attention", "flash_attention", "block_sparse_attention", "query_sparse_attention"}
"""Ops whose `mosaic_gpu` takes packed pages."""


@pytest.mark.parametrize("op", OPS)
def test_kernels_refuse_packed_pages_by_name(tools, op):
    """Each other kernel says why it cannot take them, and so dispatch takes `xla` or `composed`, with the reason in its
    log."""
    operands, _ = _call(tools, op, "int8", head_dim=128)
    kernels = [name for name in dispatch.IMPLEMENTATIONS[op] if name in ("mosaic_gpu", "mosaic_tpu", "cudnn")]
    kernels = [name for name in kernels if not (op in UNPACKS and name == "mosaic_gpu")]
    assert kernels
    operands = [x.astype(jnp.bfloat16) if getattr(x, "dtype", None) == jnp.float32 and x.ndim > 3 else x for x in operands]
    for name in kernels:
        module, api = (importlib.import_module(f"{dispatch.MODULES[op]}.{each}") for each in (name, "api"))
        call = _calls(api, op)
        lists = [jnp.zeros((4, 3, 8, 6), jnp.int32)] if op == "block_sparse_attention" else []
        lists += [None] * {"flash_attention": 1, "gather_attention": 1, "selected_attention": 2}.get(op, 0)
        reason = module.unsupported(call, *operands, *lists)
        assert "does not unpack pages; keys are int8" in reason, (name, reason)


def _calls(api, op: str):
    """A static call of the op that kernels take, apart from the pages."""
    sizes = {
        "gather_attention": {"block_size": 16, "window": None, "return_block_lse": False},
        "selected_attention": {"kind": "bounds", "block_size": 16, "budget": 1, "sink": 1, "local": 1},
        "flash_attention": {"window": None},
        "block_sparse_attention": {"block_size": 64, "query_tile": 128, "window": None},
        "query_sparse_attention": SELECTION | {"window": None, "tournament": False},
        "block_mass": {"block_size": 16},
    }[op]
    return api.Call(**sizes, sm_scale=0.2, config=None)


def test_ops_that_write_refuse_pages_that_they_cannot(tools):
    s = Sequences(tools, (96, 43), num_queries=3)
    token = jnp.zeros((2, 1, 2, 32))
    where = s.lengths[:, None], jnp.ones((2, 1), bool), s.table
    with pytest.raises(ValueError, match="append_tokens writes to the open rows of packed pages"):
        append_tokens(s.pages.replace(open=None), {}, token, token, *where, kinds=())
    tiles = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(NotImplementedError, match="copy_tiles reads no open pages"):
        copy_tiles(s.pages, tiles, tiles)
    buffer = (jnp.zeros((2, 1, WAYS), jnp.int32),) * 2
    with pytest.raises(NotImplementedError, match="fetch_tiles reads no open pages"):
        fetch_tiles(s.pages, tiles[:, :, None], s.table, s.table, s.lengths, *buffer, jnp.int32(1), num_queries=1, first=0, border=99)


def test_packed_tiles_are_copied_with_their_scales(tools):
    s = Sequences(tools, (96, 43), num_queries=1)
    pages = s.pages.replace(open=None)
    copied = copy_tiles(pages, jnp.array([[3, 3]], jnp.int32), jnp.array([[0, 0]], jnp.int32), implementation="xla")
    tools.assert_same_bits(copied.keys[0], pages.keys[3])
    tools.assert_same_bits(copied.values[0], pages.values[3])


BAD = {
    "codes of another dtype": (lambda p: p.replace(k=p.k.astype(jnp.int16)), "needs codes of dtype int8"),
    "no scales": (lambda p: p.replace(k_scales=None), "k_scales of .* must be bfloat16"),
    "scales of another shape": (lambda p: p.replace(v_scales=p.v_scales[:, :, :1]), "v_scales of .* must be bfloat16"),
    "scales without a format": (lambda p: p.replace(k=p.keys, k_packed=None), "k_scales go with k_packed"),
    "a format that packs nothing": (lambda p: p.replace(k_packed=PageFormat("float32")), "needs codes"),
    "rows of another page size": (lambda p: p.replace(open=p.open.replace(k=p.open.k[:, :, :8])), "open_k must be"),
    "rows of codes": (lambda p: p.replace(open=p.open.replace(v=p.open.v.astype(jnp.int8))), "open_v must be"),
    "rows of another pool": (lambda p: p.replace(open=p.open.replace(row_of=p.open.row_of[1:])), "row_of int32"),
    "open beside pages that are not packed": (lambda p: packed(p.keys, p.values, None, None, open=p.open), "go with packed pages"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_fit_are_refused(tools, case):
    change, said = BAD[case]
    pages = Sequences(tools, (96, 43), num_queries=1).pages
    check_pages(pages)
    with pytest.raises(ValueError, match=said):
        check_pages(change(pages))


def test_a_lattice_width_that_no_head_dim_has_is_refused():
    format = PageFormat("d4", levels=38, read_as="float32")
    with pytest.raises(ValueError, match="no head dim has codes of 26 elements"):
        check_pages(
            Pages(jnp.zeros((2, 1, 4, 26), jnp.uint8), value_dim=4, k_scales=jnp.zeros((2, 1, 4, 1), jnp.bfloat16), k_packed=format)
        )


def test_unpacking_is_the_same_in_every_tile(tools):
    """A tile of 4 tokens of each format against the whole page."""
    s = Sequences(tools, (96, 43), num_queries=1)
    for form in FORMATS:
        pages = packed(s.k, s.v, *FORMATS[form])
        frames = jnp.array([[3, 5], [2, 3]], jnp.int32)
        keys, values = jax.jit(read, static_argnums=3)(pages, frames, jnp.array([[4, 8], [0, 12]], jnp.int32), 4)
        for found, pool in ((keys, pages.keys), (values, pages.values)):
            wanted = [[pool[3, 0, 4:8], pool[5, 0, 8:12]], [pool[2, 1, 0:4], pool[3, 1, 12:16]]]
            tools.assert_same_bits(found, jnp.asarray(wanted).reshape(2, 8, -1))
