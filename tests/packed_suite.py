"""gather_attention over packed pages as its suites call it: cases of formats and forms, what is expected, and how close
that must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import paging

from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import PageFormat
from pallas_kernels.core.pages import OpenPages, Pages


def _format(codes: str, scale: str | None = None, group: int | None = None) -> PageFormat:
    return PageFormat(codes, scale, group, read_as="bfloat16")


INT8, FP8, INT4, Q8, Q4 = _format("int8", "token"), _format("fp8_e4m3", "token"), _format("int4", "token"), _format("q8_0"), _format("q4_0")
FORMATS = {
    "int8": (INT8, INT8),
    "int8 keys per channel": (_format("int8", "channel"), INT8),
    "int8 per channel": (_format("int8", "channel"), _format("int8", "channel")),
    "fp8": (FP8, FP8),
    "fp8 without scales": (_format("fp8_e4m3"), _format("fp8_e4m3")),
    "int4": (INT4, INT4),
    "int4 keys per channel, values per 32": (_format("int4", "channel"), _format("int4", "token", 32)),
    "int4 per 32": (_format("int4", "token", 32), _format("int4", "token", 32)),
    "q8_0": (Q8, Q8),
    "q4_0": (Q4, Q4),
    "q8_0 keys, q4_0 values": (Q8, Q4),
    "int8 keys, values as they are": (INT8, None),
    "keys as they are, int4 values": (None, INT4),
}
"""Formats of keys and of values; None: as they are."""


OF_QUERIES = 2**-9
"""Of a large logit: what rounding a query to bfloat16 once more may change."""
OF_CHANNELS = 2e-2
"""How far an LSE, or a row of the output, may be off where scales of channels multiply the queries, which rounds them
once more. Elsewhere keys are exact."""


@dataclasses.dataclass
class Packed:
    """A call. exact: the same pages, whose numbers are not rounded when they are read. apart: those pages with the
    tiles of the list in other frames for each KV head, and these frames; None: the table says where they are."""

    operands: tuple
    keywords: dict[str, Any]
    exact: Pages
    apart: tuple[Pages, Any] | None = None

    def run(self, implementation: str, **more) -> tuple:
        """The results of an implementation, on whatever backend this is."""
        operands, keywords = list(self.operands), self.keywords | more
        if self.apart is not None:
            operands[1], keywords["block_frames"] = self.apart
            operands[2] = jnp.full_like(operands[2], -1)  # it is not read
        return paging.implementation("gather_attention", implementation)(*operands, **keywords)

    def expected(self) -> tuple:
        """What the definition gives."""
        q, _, *rest = self.operands
        keywords = {name: x for name, x in self.keywords.items() if name != "config"}
        return paging.implementation("gather_attention", "reference")(q, self.exact, *rest, **keywords)


def picked(case: Packed) -> tuple:
    """The results of what dispatch picks here."""
    return paging.public("gather_attention")(*case.operands, **case.keywords)


def build(tools, *, format: str, window=None, blocks=None, lse=False, config=None, opened=False, apart=False, seed=0, **spec) -> Packed:
    """A case: ragged rows over permuted pages. NaN are the scales of tokens that nobody wrote, and everything that no
    query reads: other open rows, and where queries read their own pages open, the packed last page of each row."""
    paged = tools.make_paged(seed=seed, dtype="bfloat16", **spec)
    table, lengths = np.asarray(paged.page_table), np.asarray(paged.lengths)
    page_size, num_queries = paged.k.shape[2], paged.q.shape[1]
    arrays: dict[str, Any] = {}
    for name, numbers, packed in zip("kv", (paged.k, paged.v), FORMATS[format], strict=True):
        if packed is None:
            arrays[name] = numbers
            continue
        if packed.scale in ("channel", None) and packed.codes in ("fp8_e4m3", "int8", "int4"):
            numbers = jnp.nan_to_num(numbers, nan=3.0)  # NaN would spread to all tokens of a page
        codes, scales = pack_pages(numbers, format=packed)
        arrays |= {name: codes, f"{name}_packed": packed} | ({} if scales is None else {f"{name}_scales": scales})
    if opened:
        arrays |= _opened(paged, table, lengths, page_size, num_queries, arrays)
    pages = Pages(**arrays)
    wide = {f"{n}_packed": dataclasses.replace(x, read_as="float32") for n, x in zip("kv", FORMATS[format], strict=True) if x is not None}
    keywords = {"sm_scale": paged.sm_scale, "window": window, "return_block_lse": lse, "block_size": page_size, "config": config}
    if blocks is not None:
        listed = tools.lists_for(paged, *blocks)
        listed = listed.at[-1, ..., :1, :].set(listed[-1, ..., -1:, :])  # no list is empty
        keywords |= {"blocks": listed, "block_size": blocks[1]}
    there = tiles_apart(pages, paged, keywords["blocks"], keywords["block_size"]) if apart else None
    return Packed((paged.q, pages, paged.page_table, paged.lengths), keywords, pages.replace(**wide), there)


def _opened(paged, table, lengths, page_size: int, num_queries: int, arrays: dict) -> dict[str, Any]:
    """The open pages of all queries; and the scales, with NaN where queries read open."""
    rows = [(b, p) for b, n in enumerate(lengths) if n for p in range(max(n - num_queries, 0) // page_size, (n - 1) // page_size + 1)]
    row_of = np.full(len(paged.k), -1, np.int32)
    order = np.random.default_rng(3).permutation(len(rows) + 2)
    for (b, p), row in zip(rows, order, strict=False):
        row_of[table[b, p]] = row
    pools = []
    for numbers in (paged.k, paged.v):
        pool = jnp.full((len(rows) + 2, *numbers.shape[1:]), jnp.nan, numbers.dtype)
        pools.append(pool.at[row_of[row_of >= 0]].set(numbers[np.flatnonzero(row_of >= 0)]))
    earlier = {table[b, p] for b, n in enumerate(lengths) for p in range((n - 1) // page_size)}
    last = [table[b, (n - 1) // page_size] for b, n in enumerate(lengths) if n]
    unread = np.array([frame for frame in last if frame not in earlier], np.int32)
    scales = {name: arrays[name].at[unread].set(jnp.nan) for name in ("k_scales", "v_scales") if name in arrays}
    return scales | {"open": OpenPages(*pools, jnp.asarray(row_of))}


def compare(tools, case: Packed, found: tuple) -> None:
    """Assert that results are those of the definition."""
    compare_results(tools, case.operands[1], found, case.expected())


def compare_results(tools, pages: Pages, found: tuple, expected: tuple) -> None:
    """Assert that an output and LSEs of attention over packed pages are the expected ones."""
    of_channels = pages.k_packed is not None and pages.k_packed.scale == "channel"
    assert len(found) == len(expected)
    assert jnp.isfinite(expected[0]).all()
    tools.assert_rows_close(found[0], expected[0], OF_CHANNELS if of_channels else 2 * tools.row_error["bfloat16"])
    for lse, ref in zip(found[1:], expected[1:], strict=True):
        if of_channels:
            assert lse.shape == ref.shape
            np.testing.assert_allclose(np.asarray(lse), np.asarray(ref), rtol=OF_QUERIES, atol=OF_CHANNELS)
        else:
            tools.assert_lse_close(lse, ref)


POOL_PAGES = 1100
"""Pages of a pool in `production`: more than a row has, so that an array of all of them is seen."""


def production(
    form, batch=1, heads=(28, 4), head_dim=128, page_size=128, num_queries=1, width=None, dtype="bfloat16", opened=True, **static
) -> tuple:
    """(op, arrays, keywords) of a call over 128K tokens a row, as `cuda.lower` takes them. form: of `FORMATS`, or the
    two formats."""
    (num_heads, kv_heads), pages = heads, POOL_PAGES
    parts: dict[str, Any] = {}
    for name, packed in zip("kv", FORMATS[form] if isinstance(form, str) else form, strict=True):
        if packed is None:
            parts[name] = (pages, kv_heads, page_size, head_dim), "bfloat16"
            continue
        parts |= {name: ((pages, kv_heads, page_size, packed.width(head_dim)), packed.code_dtype.name), f"{name}_packed": packed}
        if packed.scale_dtype is not None:
            parts[f"{name}_scales"] = (pages, kv_heads, *packed.scale_shape(page_size, head_dim)), packed.scale_dtype.name
    if opened:
        pool = (2 * batch, kv_heads, page_size, head_dim), "bfloat16"
        parts["open"] = OpenPages(pool, pool, ((pages,), "int32"))
    arrays = {"q": ((batch, num_queries, num_heads, head_dim), dtype), "k": Pages(**parts)}
    arrays |= {"table": ((batch, (128 << 10) // page_size), "int32"), "lengths": ((batch,), "int32")}
    keywords = {"block_size": page_size, "window": None, "sm_scale": head_dim**-0.5, "return_block_lse": False, "config": None} | static
    if width is None:
        return "gather_attention", arrays, keywords | {"blocks": None}
    return "gather_attention", arrays | {"blocks": ((batch, kv_heads, width), "int32")}, keywords


CHANGES = {
    "scales of keys are left out": {"k_scales": jnp.ones_like},
    "scales of values are left out": {"v_scales": jnp.ones_like},
    "scales of the next token": {"k_scales": lambda x: jnp.roll(x, 1, axis=2)},
    "scales of the next page": {"v_scales": lambda x: jnp.roll(x, 1, axis=0)},
    "scales of the next channel": {"v_scales": lambda x: jnp.roll(x, 1, axis=3)},
    "scales of the next group": {"k_scales": lambda x: jnp.roll(x, 1, axis=3)},
    "low and high bits for each other": {"v": lambda codes: (codes << 4) | (codes >> 4)},
    "other open rows": {"open": lambda rows: rows.replace(k=jnp.roll(rows.k, 1, axis=0), v=jnp.roll(rows.v, 1, axis=0))},
    "own pages as packed": {"open": lambda rows: None},
}
"""Changes of packed pages that a comparison has to see: of each part, what takes its place."""


def changed(case: Any, change: str) -> Any:
    """A case (a dataclass with `operands`: queries, pages, ...) with one of `CHANGES`."""
    q, pages, *rest = case.operands
    found = {name: make(getattr(pages, name)) for name, make in CHANGES[change].items()}
    return dataclasses.replace(case, operands=(q, pages.replace(**found), *rest))


def tiles_apart(pages: Pages, paged, blocks, block_size: int) -> tuple[Pages, Any]:
    """The pages, and behind them their tiles in another order for each KV head, as a hot buffer has them; and the
    frames of the listed blocks `[B, K, W]`: there, where no query writes to the page, else its own. Of pages that are
    read there alone, the first copy is wrong."""
    count, heads, page_size = pages.num_pages, pages.kv_heads, pages.page_size
    order = np.stack([np.random.default_rng(h).permutation(count) for h in range(heads)], 1)  # [place, head] -> page
    place_of = jnp.asarray(np.argsort(order, axis=0), jnp.int32)
    logical = jnp.maximum(blocks, 0) * block_size // page_size
    ids = jnp.take_along_axis(paged.page_table, logical.reshape(len(logical), -1), axis=1, mode="fill", fill_value=-1).reshape(blocks.shape)
    first = (paged.lengths - paged.q.shape[1])[:, None, None]
    frames = jnp.where((logical + 1) * page_size <= first, count + place_of[ids, jnp.arange(heads)[:, None]], ids)
    table = np.asarray(paged.page_table)
    written = np.asarray([(np.arange(table.shape[1]) + 1) * page_size > n - paged.q.shape[1] for n in np.asarray(paged.lengths)])
    own = np.unique(table[written & (table >= 0)])

    def doubled(pool):
        fill = 99 if jnp.issubdtype(pool.dtype, jnp.integer) else jnp.nan
        return jnp.concatenate([jnp.full_like(pool, fill).at[own].set(pool[own]), pool[order, np.arange(heads)]])

    arrays = {name: doubled(array) for name, array in _parts(pages).items()}
    opened = pages.open and pages.open.replace(row_of=jnp.pad(pages.open.row_of, (0, count), constant_values=-1))
    return pages.replace(**arrays, open=opened), jnp.where((blocks >= 0) & (ids >= 0), frames, -1)


def _parts(pages: Pages) -> dict[str, Any]:
    """Codes, scales, and numbers that are not packed."""
    return {name: array for name in ("k", "v", "k_scales", "v_scales") if (array := getattr(pages, name)) is not None}


def apart(pages: Pages, ids, more: int = 3) -> tuple[Pages, Any]:
    """The same pages in other frames, of which there are some more, and the table of frames in place of that of ids."""
    rng, count = np.random.default_rng(2), pages.num_pages
    order = rng.permutation(count + more)[:count].astype(np.int32)

    def moved(pool, fill):
        return jnp.full((count + more, *pool.shape[1:]), fill, pool.dtype).at[order].set(pool)

    arrays = {name: moved(x, 99 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.nan) for name, x in _parts(pages).items()}
    opened = None if pages.open is None else pages.open.replace(row_of=moved(pages.open.row_of, -1))
    return pages.replace(**arrays, open=opened), jnp.where(ids >= 0, order[ids], -1)
