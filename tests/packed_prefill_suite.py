"""Prefill attention over packed pages as its suites call it: cases of formats and walks, what is expected, and how
close that must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packed_suite
import paging
from jax.experimental import pallas as pl

from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import OpenPages, Pages
from pallas_kernels.hopper.prefill.unpack import HalfTile

BASE = {
    "lengths": (0, 1, 127, 128, 129, 500, 700, 768),
    "starts": (0, 0, 3, 50, 9, 200, 468, 468),
    "num_queries": 300,
    "kv_heads": 2,
    "group": 4,
    "head_dim": 128,
    "page_size": 128,
    "width": 6,
}
"""Ragged rows, as GPUs run them; `LONG`: over a long history."""
LONG = {"lengths": (9000, 3), "width": 71, "kv_heads": 1, "num_queries": 200, "starts": (8800, 0)}


@dataclasses.dataclass
class Prefill:
    """A call of an op over a chunk of queries."""

    op: str
    operands: tuple
    keywords: dict[str, Any]

    def run(self, implementation: str) -> tuple:
        """The results of an implementation, on whatever backend this is."""
        return paging.implementation(self.op, implementation)(*self.operands, **self.keywords)

    def picked(self) -> tuple:
        """The results of what dispatch picks here."""
        return paging.public(self.op)(*self.operands, **self.keywords)


def build(tools, *, format: str, starts, window=None, lists=None, query_sparse=None, opened=True, seed=0, **spec) -> Prefill:
    """A chunk of ragged rows over permuted pages. NaN is everything that no query reads: tokens that nobody wrote,
    pages that no row names, packed pages from that of the last query on where own pages are read open, and other open
    rows. lists: (width, block size) of block_sparse_attention. query_sparse: keywords of query_sparse_attention."""
    paged = tools.make_paged(seed=seed, dtype="bfloat16", **spec)
    table, lengths, starts = np.asarray(paged.page_table), np.asarray(paged.lengths), np.asarray(starts, np.int32)
    page_size, num_queries = paged.k.shape[2], paged.q.shape[1]
    stops = np.minimum(starts + num_queries, lengths)
    own = {(b, p) for b, stop in enumerate(stops) if stop > starts[b] for p in range(starts[b] // page_size, (stop - 1) // page_size + 1)}
    own = sorted((b, p) for b, p in own if table[b, p] >= 0)
    read = {table[b, p] for b, stop in enumerate(stops) for p in range(max(stop - 1, 0) // page_size + (not opened)) if table[b, p] >= 0}
    unread = np.array([frame for frame in range(len(paged.k)) if frame not in read], np.int32)
    arrays: dict[str, Any] = {}
    for name, numbers, packed in zip("kv", (paged.k, paged.v), packed_suite.FORMATS[format], strict=True):
        if packed is None:
            arrays[name] = numbers.at[unread].set(jnp.nan) if opened else numbers
            continue
        if packed.scale in ("channel", None) and packed.codes in ("fp8_e4m3", "int8", "int4"):
            numbers = jnp.nan_to_num(numbers, nan=3.0)  # NaN would spread to all tokens of a page
        codes, scales = pack_pages(numbers, format=packed)
        if scales is not None:
            arrays[f"{name}_scales"] = scales.at[unread].set(jnp.nan)
        elif codes.dtype == jnp.float8_e4m3fn:
            codes = codes.at[unread].set(jnp.nan)
        arrays |= {name: codes, f"{name}_packed": packed}
    if opened:
        arrays["open"] = _opened([paged.k, paged.v], [table[place] for place in own])
    keywords: dict[str, Any] = {"sm_scale": paged.sm_scale, "window": window}
    op = "flash_attention"
    if lists is not None:
        op, (width, size) = "block_sparse_attention", lists
        shape = len(table), -(-num_queries // 128), paged.q.shape[2]
        blocks = tools.ragged_lists(1, shape, table.shape[1] * page_size // size + 2, width)
        keywords |= {"blocks": blocks, "block_size": size, "query_tile": 128}
    if query_sparse is not None:
        op = "query_sparse_attention"
        keywords |= query_sparse
    operands = paged.q, Pages(**arrays), paged.page_table, jnp.asarray(starts), paged.lengths
    return Prefill(op, operands, keywords)


def _opened(pools, frames) -> OpenPages:
    """These pages open, in no order, among rows of NaN."""
    rows = np.random.default_rng(3).permutation(len(frames) + 2)[: len(frames)]
    row_of = np.full(len(pools[0]), -1, np.int32)
    row_of[frames] = rows
    opened = [jnp.full((len(frames) + 2, *x.shape[1:]), jnp.nan, x.dtype) for x in pools]
    return OpenPages(
        *(y.at[row_of[frames]].set(x[np.array(frames, np.int32)]) for x, y in zip(pools, opened, strict=True)), jnp.asarray(row_of)
    )


def bring_half(self: HalfTile, refs, page, head, token):
    """`HalfTile.bring` for the interpreter of kernels, which does not run lanes."""
    rows = pl.ds(token, self.rows)
    scales = None
    if len(refs) > 1:
        scales = refs[1][page, head] if self.of_codes.per_channel else refs[1][page, head, rows]
    return unpack(self.format, refs[0][page, head, rows], scales)


def put_half(self: HalfTile, ring_s, slot, half, held):
    """`HalfTile.put` for the same."""
    ring_s[slot, pl.ds(half * self.rows, self.rows)] = held


def compare(tools, case: Prefill, found: tuple) -> None:
    """Assert that out and LSE are those of the definition, without NaN. It rounds numbers to bfloat16, too; weights it
    does not."""
    q, pages, *rest = case.operands
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x, nan=1.0) if jnp.issubdtype(x.dtype, jnp.floating) else x, pages)
    expected = dataclasses.replace(case, operands=(q, clean, *rest)).run("reference")
    starts, lengths = case.operands[-2:]
    tools.assert_chunk_close(found[:2], expected[:2], starts, lengths, 2 * tools.row_error["bfloat16"])


def production(form, op="flash_attention", tokens=8192, **sizes) -> tuple:
    """(op, arrays, keywords) of a chunk over 128K tokens, as `cuda.lower` takes them. Arguments as of
    `packed_suite.production`, and those of the op."""
    of_pages = ("batch", "heads", "head_dim", "page_size", "dtype", "opened")
    static = {name: x for name, x in sizes.items() if name not in of_pages}
    sizes = {name: x for name, x in sizes.items() if name in of_pages}
    _, arrays, _ = packed_suite.production(form, num_queries=tokens, **sizes)
    arrays["starts"] = arrays["lengths"]
    batch, _, num_heads, head_dim = arrays["q"][0]
    keywords = {"sm_scale": head_dim**-0.5, "window": None, "config": None} | static
    if op == "block_sparse_attention":
        keywords = {"query_tile": 128} | keywords
        arrays["blocks"] = (batch, -(-tokens // keywords["query_tile"]), num_heads, 128), "int32"
    return op, arrays, keywords
