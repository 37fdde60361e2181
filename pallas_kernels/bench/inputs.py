"""Inputs made on the device: pools of random pages, page tables in random order, and enough different sets to exceed
the cache."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, UInt8

from pallas_kernels.bench.cases import CHUNK_LISTED, CHUNK_WINDOW, PAGE_SIZE, Case
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.pages import OpenPages, PageFormat, Pages
from pallas_kernels.selection.page_index import INDEX_ROWS, index_shape, page_index

L2_BYTES = {"NVIDIA H200": 60 * 2**20, "NVIDIA H100 80GB HBM3": 50 * 2**20}
"""Size of the last-level cache by `device_kind`."""

UNKNOWN_L2_BYTES = 128 * 2**20
"""Assumed for every other device."""

MIN_OPS, MAX_OPS = 8, 48
"""Ops in one timed program: enough for XLA to capture them as a CUDA graph, but few enough to compile in reasonable
time."""

QUERY_SCALE = 4.0
"""Standard deviation of the queries' elements, and of the logits: softmax is far from flat."""

DTYPE = jnp.bfloat16
ITEM = 2
CHUNK_PAGES = 256


INT8, FP8, INT4 = (PageFormat(codes, "token", read_as=DTYPE.__name__) for codes in ("int8", "fp8_e4m3", "int4"))
Q8_0, Q4_0 = (PageFormat(codes, read_as=DTYPE.__name__) for codes in ("q8_0", "q4_0"))
CHANNEL = PageFormat("int8", "channel", read_as=DTYPE.__name__)
FORMATS = {
    "int8": (INT8, INT8),
    "int8-channel": (CHANNEL, INT8),
    "fp8": (FP8, FP8),
    "int4": (INT4, INT4),
    "q8_0": (Q8_0, Q8_0),
    "q4_0": (Q4_0, Q4_0),
}
"""Formats of keys and values by the names of `cases.FORMATS`."""


class Pool(NamedTuple):
    """Pages on the device. index: bounds `[N, K, P/bs, 2, D]` for cases that select or append, else None. codes: the
    keys in few bits, for cases that choose from a shortlist."""

    pages: Pages
    index: Float[Array, "N K nb R D"] | None
    codes: UInt8[Array, "N K nb R W"] | None = None


def cache_bytes() -> int:
    """Bytes of the device's last-level cache; for unknown devices, a larger number."""
    return L2_BYTES.get(jax.local_devices()[0].device_kind, UNKNOWN_L2_BYTES) if jax.default_backend() != "cpu" else 0


def memory_bytes() -> int:
    """Bytes available for arrays: the limit of the device's allocator, or half of a host's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def bytes_read(case: Case, keys: int) -> dict[str, int]:
    """Bytes that one op has to move: K and V of `keys` tokens (summed over rows and KV heads), the index that it scans
    or builds, and the codes or keys of a shortlist. `append` reads and writes new tokens, and reads the keys of pages
    that fill.

    Queries, outputs, lists and page tables are left out, because they are less than a thousandth.
    """
    kv_heads, head_dim = case.sizes.num_kv_heads, case.sizes.head_dim
    index = case.batch * kv_heads * (case.tokens // case.block_size) * INDEX_ROWS["bounds"] * head_dim * ITEM
    if case.op == "append":
        tokens = 2 * 2 * case.batch * kv_heads * head_dim * ITEM
        return {"tokens": tokens, "keys": keys * head_dim * ITEM, "index": index // case.pages if case.builds else 0}
    if case.op == "index":
        return {"keys": keys * head_dim * ITEM, "index": index}
    of_key = 2 * head_dim * ITEM
    if case.format is not None:
        of_key = sum(format.bytes_per_page(PAGE_SIZE, head_dim) for format in FORMATS[case.format]) / PAGE_SIZE
    moved = {"kv": 0 if case.op == "select" else round(keys * of_key), "index": index if case.scans else 0}
    if case.budget is None or case.budget.shortlist is None:
        return moved
    blocks = case.batch * kv_heads * min(case.budget.shortlist, case.tokens // case.block_size)
    if case.budget.codes is not None:
        return moved | {"codes": blocks * _coded_bytes(case)}
    of_page = PAGE_SIZE * head_dim * ITEM if case.format is None else FORMATS[case.format][0].bytes_per_page(PAGE_SIZE, head_dim)
    return moved | {"codes": round(blocks * case.block_size * of_page / PAGE_SIZE)}


def _coded_bytes(case: Case) -> int:
    """Bytes of a block's keys in few bits."""
    return int(np.prod(index_shape(case.budget.codes, case.block_size, case.sizes.head_dim)))


def bytes_held(case: Case, copies: int) -> int:
    """Bytes of the arrays of a case: keys and values of `copies` batches and the indexes that are read."""
    tokens = copies * case.batch * case.tokens * case.sizes.num_kv_heads
    scanned = tokens // case.block_size * INDEX_ROWS["bounds"] * (case.op != "baseline" and case.indexed)
    coded = tokens // case.block_size * _coded_bytes(case) if case.budget and case.budget.codes else 0
    return (2 * tokens + scanned) * case.sizes.head_dim * ITEM + coded


def copies_needed(moved: int) -> int:
    """Different inputs to cycle through, so that reads between two uses of one exceed twice the cache. moved: bytes one
    op moves."""
    return min(MAX_OPS, max(1, -(-2 * cache_bytes() // moved)))


def make_pool(case: Case, copies: int, seed: int) -> tuple[Pool, Int[np.ndarray, "copies B M"]]:
    """Random keys and values for `copies` batches of the case, the index that it scans or builds, and each batch's page
    table, on the host.

    Pages lie in random order. Page 0 is NaN, and no table names it.
    """
    kv_heads, head_dim = case.sizes.num_kv_heads, case.sizes.head_dim
    used = copies * case.batch * case.pages
    shape = (pool_pages(used), kv_heads, PAGE_SIZE, head_dim)
    key_k, key_v = jax.random.split(jax.random.key(seed))
    k, v = random_pages(key_k, shape), random_pages(key_v, shape)
    index = jax.block_until_ready(page_index(k, kind="bounds", block_size=case.block_size)) if case.indexed else None
    codes = _coded(k, case) if case.budget and case.budget.codes else None
    order = np.random.default_rng(seed).permutation(np.arange(1, used + 1, dtype=np.int32)).reshape(copies, case.batch, case.pages)
    opened = order[..., (case.tokens - case.queries) // PAGE_SIZE :].reshape(-1)
    pages = Pages(k, v) if case.format is None else _packed(k, v, FORMATS[case.format], opened)
    return Pool(pages, index, codes), order


def _coded(k: Array, case: Case) -> Array:
    """The keys in few bits, made from a chunk of pages at a time."""
    build = functools.partial(page_index, kind=case.budget.codes, block_size=case.block_size)
    return jax.block_until_ready(jax.jit(lambda k: jax.lax.map(build, k, batch_size=min(len(k), CHUNK_PAGES)))(k))


def _packed(k: Array, v: Array, formats: tuple[PageFormat, PageFormat], opened: Int[np.ndarray, "R"]) -> Pages:
    """The pages packed, some of them open as well."""
    codes: list[Array] = []
    for pool, format in zip((k, v), formats, strict=True):
        pack = functools.partial(pack_pages, format=format)
        codes += jax.jit(lambda x, pack=pack: jax.lax.map(pack, x, batch_size=min(len(x), CHUNK_PAGES)))(pool)
    row_of = jnp.full(len(k), -1, jnp.int32).at[opened].set(jnp.arange(len(opened), dtype=jnp.int32))
    parts = {"k_scales": codes[1], "v_scales": codes[3], "k_packed": formats[0], "v_packed": formats[1]}
    return jax.block_until_ready(Pages(codes[0], codes[2], open=OpenPages(k[opened], v[opened], row_of), **parts))


def pool_pages(used: int) -> int:
    """Pages of a pool with room for `used` pages beside page 0."""
    return used + 1 if used < CHUNK_PAGES else -(-(used + 1) // CHUNK_PAGES) * CHUNK_PAGES


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_pages(key: Array, shape: tuple[int, ...], dtype: DTypeLike = DTYPE) -> Float[Array, "N K P D"]:
    """Normally distributed pages; page 0 is NaN. They are made a chunk at a time, so that little memory is needed
    besides the result.

    The number of pages, N, is below `CHUNK_PAGES` or a multiple of it; see `pool_pages`.
    """
    rows = min(shape[0], CHUNK_PAGES)

    def fill(i, pages):
        chunk = jax.random.normal(jax.random.fold_in(key, i), (rows, *shape[1:]), jnp.float32).astype(dtype)
        return jax.lax.dynamic_update_slice_in_dim(pages, chunk, i * rows, axis=0)

    pages = jax.lax.fori_loop(0, shape[0] // rows, fill, jnp.zeros(shape, dtype))
    return pages.at[0].set(jnp.nan)


def queries(case: Case, count: int, seed: int) -> list[Float[Array, "B T H D"]]:
    """`count` different query tensors."""
    shape = (case.batch, case.queries, case.sizes.num_heads, case.sizes.head_dim)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), count)
    return [(QUERY_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(DTYPE) for key in keys]


def chunk_lists(case: Case, seed: int) -> Int[np.ndarray, "B C H W"]:
    """Random lists of a chunk's tiles of 128 queries, alike for the heads of a KV head: blocks between the first one
    and the window."""
    rng, kv_heads = np.random.default_rng(seed), case.sizes.num_kv_heads
    tiles = range((case.tokens - case.queries) // PAGE_SIZE, case.tokens // PAGE_SIZE)
    lists = [
        [[rng.choice(tile - CHUNK_WINDOW // PAGE_SIZE, CHUNK_LISTED, replace=False) + 1 for _ in range(kv_heads)] for tile in tiles]
        for _ in range(case.batch)
    ]
    return np.repeat(np.array(lists, np.int32), case.sizes.num_heads // kv_heads, axis=2)


def new_tokens(case: Case, count: int, seed: int) -> list[tuple[Array, ...]]:
    """k, v `[B, 1, K, D]` and positions `[B, 1]` of `count` appends. Each goes to another page while there are any, at
    the page's last position unless the page is to stay open."""
    shape = (case.batch, 1, case.sizes.num_kv_heads, case.sizes.head_dim)
    last = PAGE_SIZE - 1 if case.builds else PAGE_SIZE // 2
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 2), 2 * count)
    random = [jax.random.normal(key, shape, jnp.float32).astype(DTYPE) for key in keys]
    positions = [jnp.full(shape[:2], i % case.pages * PAGE_SIZE + last, jnp.int32) for i in range(count)]
    return list(zip(random[::2], random[1::2], positions, strict=True))
