"""A small example of every op, run through each implementation that works here and compared with the op's definition
(`reference`).

For `kvjax doctor`: it shows that a machine computes what the tests promise. It does not replace the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.attention.block_sparse_attention import block_sparse_attention
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.cache.copy_tiles import copy_tiles
from pallas_kernels.cache.fetch_tiles import fetch_tiles
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.cache.place_tiles import WAYS, place_tiles
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.collectives.all_reduce import all_reduce
from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import MatrixFormat, pack
from pallas_kernels.core.page_format import PageFormat, unpack
from pallas_kernels.core.pages import Pages
from pallas_kernels.matmul.project_tokens import project_tokens
from pallas_kernels.recurrent.gated_delta import delta_page
from pallas_kernels.selection.block_mass import block_mass
from pallas_kernels.selection.indexer_scores import indexer_scores
from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_blocks import select_blocks
from pallas_kernels.selection.select_tiles import select_tiles
from pallas_kernels.selection.top_k import top_k
from pallas_kernels.selection.union_blocks import union_blocks

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 28, 4, 128, 128
"""Sizes of the examples: those of a layer of Qwen2.5-7B."""

LENGTHS = (2432, 1405)
"""Tokens of the two sequences of an example. The first one fills its last page."""

CHUNK = 256
"""Tokens of a chunk of prefill in an example, the last of each sequence."""

LARGEST_ERROR = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest allowed error of a row of a result, ||out - reference|| / ||reference||, by the dtype of the inputs."""

Run = Callable[[str], Any]
"""An op with its example: takes the name of an implementation and returns the op's results."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one implementation. error: the largest relative error of a row; whole numbers must be equal, and then
    it is 0.

    failed: why the result is wrong, or what was raised; None where it is right. chosen: whether dispatch picks it for
    this example. refused: why it does not take the example; None where it does.
    """

    op: str
    implementation: str
    chosen: bool
    error: float | None = None
    failed: str | None = None
    refused: str | None = None


def dtype_here() -> str:
    """The dtype of the examples: float32 on a CPU, else bfloat16."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def check_ops(dtype: str | None = None) -> Iterator[Check]:
    """Run every op's example through the implementations that this backend has. A failing implementation is reported,
    not raised.

    dtype: of the inputs, a key of `LARGEST_ERROR`; None: `dtype_here()`. Memory: about 100 MB.
    """
    dtype = dtype or dtype_here()
    if dtype not in LARGEST_ERROR:
        raise ValueError(f"dtype must be one of {', '.join(LARGEST_ERROR)}, got {dtype!r}")
    inputs = Inputs(jnp.dtype(dtype))
    for op in dispatch.IMPLEMENTATIONS:
        run = EXAMPLES[op](inputs)
        expected = jax.tree.leaves(run("reference"))
        with dispatch.listening() as heard, contextlib.suppress(NotImplementedError):
            run(None)
        for name in dispatch.available(op):
            if name != "reference":
                yield _checked(op, name, heard.get(op) == name, run, expected, LARGEST_ERROR[dtype])


def _checked(op: str, name: str, chosen: bool, run: Run, expected: list[Any], most: float) -> Check:
    try:
        found = jax.tree.leaves(run(name))
    except NotImplementedError as error:
        return Check(op, name, chosen, refused=" ".join(str(error).split()))
    except Exception as error:  # whatever a compiler or a driver raises
        return Check(op, name, chosen, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    errors = [_error(np.asarray(out), np.asarray(ref)) for out, ref in zip(found, expected, strict=True)]
    wrong = f"differs from its definition by {max(errors):.2g}, more than {most:g}" if not max(errors) <= most else None
    return Check(op, name, chosen, error=max(errors), failed=wrong)


def _error(out: np.ndarray, ref: np.ndarray) -> float:
    """The largest relative error of a row. It is infinite where whole numbers differ, or where infinities stand in
    different places."""
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return np.inf
    if not jnp.issubdtype(ref.dtype, jnp.floating):
        return 0.0 if np.array_equal(out, ref) else np.inf
    out, ref = out.astype(np.float64), ref.astype(np.float64)
    finite = np.isfinite(ref)
    if not np.array_equal(out[~finite], ref[~finite], equal_nan=True) or not np.isfinite(out[finite]).all():
        return np.inf
    out, ref = (np.where(finite, each, 0) for each in (out, ref))
    return float((np.linalg.norm(out - ref, axis=-1) / np.maximum(np.linalg.norm(ref, axis=-1), np.finfo(np.float32).tiny)).max())


class Inputs:
    """The arrays that the examples share: pages of two sequences in random order, and their tables."""

    def __init__(self, dtype: jnp.dtype):
        self.random, self.dtype = np.random.default_rng(0), dtype
        self.lengths = jnp.array(LENGTHS, jnp.int32)
        self.starts = self.lengths - CHUNK
        counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
        order, table = self.random.permutation(sum(counts)), np.full((len(counts), max(counts)), -1, np.int32)
        table[0, : counts[0]], table[1, : counts[1]] = order[: counts[0]], order[counts[0] :]
        self.table = jnp.array(table)
        shape = (sum(counts), KV_HEADS, PAGE_SIZE, HEAD_DIM)
        self.pages = Pages(self.normal(*shape), self.normal(*shape))
        self.bounds = page_index(self.pages.k, kind="bounds", block_size=PAGE_SIZE, implementation="xla")
        self.batch = len(LENGTHS)

    def normal(self, *shape: int, dtype: Any = None) -> jax.Array:
        return jnp.asarray(self.random.standard_normal(shape, np.float32), dtype or self.dtype)

    def queries(self, tokens: int) -> jax.Array:
        return self.normal(self.batch, tokens, HEADS, HEAD_DIM)


SCALE = HEAD_DIM**-0.5
WINDOW = (PAGE_SIZE, 2 * PAGE_SIZE)


def _exchange(x: Inputs) -> Run:
    """Over two devices, where there are two."""
    mesh = Mesh(np.array(jax.local_devices()[:2]), ("context",))
    parts = x.normal(mesh.size, x.batch, HEADS, HEAD_DIM), x.normal(mesh.size, x.batch, HEADS, dtype=jnp.float32)

    def run(name):
        def on_device(*parts):
            return all_gather([part[0] for part in parts], axis_name="context", mesh=mesh, implementation=name)

        specs = {"in_specs": PartitionSpec("context"), "out_specs": PartitionSpec()}
        return jax.shard_map(on_device, mesh=mesh, **specs, check_vma=False)(*parts)

    return run


def _reduce(x: Inputs) -> Run:
    """Over two devices, where there are two."""
    mesh, width = Mesh(np.array(jax.local_devices()[:2]), ("tensor",)), HEADS * HEAD_DIM
    parts, residual = x.normal(mesh.size, 2, width), x.normal(2, width)

    def run(name):
        def on_device(part, residual):
            return all_reduce(part[0], axis_name="tensor", residual=residual, mesh=mesh, implementation=name)

        specs = {"in_specs": (PartitionSpec("tensor"), PartitionSpec()), "out_specs": PartitionSpec()}
        return jax.shard_map(on_device, mesh=mesh, **specs, check_vma=False)(parts, residual)

    return run


def _append(x: Inputs) -> Run:
    new = [x.normal(x.batch, 1, KV_HEADS, HEAD_DIM) for _ in range(2)]
    place = x.lengths[:, None] - 1, jnp.ones((x.batch, 1), bool), x.table
    options = {"kinds": (("bounds", "bounds", PAGE_SIZE),)}
    return lambda name: append_tokens(x.pages, {"bounds": x.bounds}, *new, *place, **options, implementation=name)


def _mass(x: Inputs) -> Run:
    q, chunk = x.queries(CHUNK), (x.pages, x.table, x.starts, x.lengths)
    _, lse = flash_attention(q, *chunk, sm_scale=SCALE, implementation="reference")
    options = {"block_size": PAGE_SIZE, "sm_scale": SCALE}
    return lambda name: block_mass(q, *chunk, lse, jnp.zeros(x.batch, jnp.int32), **options, implementation=name)


def _block_sparse(x: Inputs) -> Run:
    q, tiles = x.queries(CHUNK), CHUNK // 128
    blocks = np.stack([x.random.permutation(8)[:4] for _ in range(x.batch * tiles * HEADS)])
    options = {"blocks": jnp.array(blocks.reshape(x.batch, tiles, HEADS, 4), jnp.int32), "block_size": PAGE_SIZE, "query_tile": 128}
    chunk = x.pages, x.table, x.starts, x.lengths
    return lambda name: block_sparse_attention(q, *chunk, **options, window=WINDOW, sm_scale=SCALE, implementation=name)


def _copy(x: Inputs) -> Run:
    frames = jnp.asarray(x.random.permutation(x.pages.num_pages), jnp.int32)
    sources, targets = (jnp.tile(each[:, None], (1, KV_HEADS)) for each in (frames[:2], frames[2:4]))
    return lambda name: copy_tiles(x.pages, sources, targets.at[1, 0].set(-1), implementation=name)


def _flash(x: Inputs) -> Run:
    q = x.queries(CHUNK)
    return lambda name: flash_attention(q, x.pages, x.table, x.starts, x.lengths, sm_scale=SCALE, implementation=name)


def _gather(x: Inputs) -> Run:
    q = x.queries(1)
    return lambda name: gather_attention(q, x.pages, x.table, x.lengths, sm_scale=SCALE, implementation=name)


def _delta(x: Inputs) -> Run:
    rows, heads, dim = 128, 4, 64
    q, k, v = (x.normal(x.batch, rows, heads, dim) for _ in range(3))
    g, beta = (jnp.asarray(x.random.uniform(*ends, (x.batch, rows, heads)), jnp.float32) for ends in ((-0.2, 0), (0, 1)))
    corrections, start = jnp.zeros((x.batch, rows, heads, dim)), x.normal(x.batch, heads, dim, dim, dtype=jnp.float32)
    counts, new = jnp.zeros(x.batch, jnp.int32), jnp.array([rows, 77], jnp.int32)
    options = {"scale": dim**-0.5, "chunk": 64}
    return lambda name: delta_page(q, k, v, g, beta, corrections, start, counts, new, **options, implementation=name)


def _indexer(x: Inputs) -> Run:
    q, weights = x.normal(x.batch, 1, 8, HEAD_DIM), x.normal(x.batch, 1, 8, dtype=jnp.float32)
    return lambda name: indexer_scores(q, weights, x.pages.k[:, 0], x.table, x.lengths, implementation=name)


def _index(x: Inputs) -> Run:
    return lambda name: page_index(x.pages.k, kind="mean", block_size=32, implementation=name)


def _pack(x: Inputs) -> Run:
    # Numbers, not codes: a quotient that a device rounds otherwise may give the next code.
    format = PageFormat("int8", "token", read_as="float32")
    return lambda name: unpack(format, *pack_pages(x.pages.k, format=format, implementation=name))


def _fetch(x: Inputs) -> Run:
    # The second half of the pool counts as host memory; the first has the buffer. One tile of each head: nothing is
    # left to choose.
    half, pages, arrays = x.pages.num_pages, jax.tree.map(lambda pool: jnp.concatenate([pool, pool]), x.pages), _lists_and_buffer(x)
    sets = half // WAYS
    arrays[2] = jnp.where(arrays[1] < 0, -1, half + arrays[1])
    arrays[4], arrays[5] = (each[:, :sets] for each in arrays[4:6])
    arrays[0] = jnp.full_like(arrays[0], -1).at[0, :, 0].set(arrays[0][0, :, 0])
    return lambda name: fetch_tiles(pages, *arrays, num_queries=1, first=0, border=half, implementation=name)


def _place(x: Inputs) -> Run:
    arrays, border = _lists_and_buffer(x), x.pages.num_pages * WAYS
    options = {"page_size": PAGE_SIZE, "num_queries": 1, "first": 0, "border": border}
    return lambda name: place_tiles(*arrays, **options, implementation=name)


def _lists_and_buffer(x: Inputs) -> list[jax.Array]:
    """Lists and a buffer as `place_tiles` takes them."""
    # A set for each page: of several missing tiles in one set, any could get the place.
    sets, wide = x.pages.num_pages, 8
    blocks = np.stack([x.random.permutation(x.table.shape[1])[:wide] for _ in range(x.batch * KV_HEADS)]).reshape(x.batch, KV_HEADS, wide)
    tags = np.arange(sets)[:, None] + sets * x.random.permuted(np.tile(np.arange(WAYS), (KV_HEADS, sets, 1)), axis=-1)
    tags[:, ::2, 0] = np.arange(sets)[::2]  # held in any case
    ages = x.random.permuted(np.tile(np.arange(WAYS), (KV_HEADS, sets, 1)), axis=-1)
    frames = jnp.where(x.table < 0, -1, sets * WAYS + x.table)
    return [jnp.asarray(each, jnp.int32) for each in (blocks, x.table, frames, x.lengths, tags, ages, WAYS)]


def _project(x: Inputs) -> Run:
    width = HEADS * HEAD_DIM
    tokens, matrices, norm = x.normal(2, width), tuple(x.normal(512, width) for _ in range(2)), x.normal(width)
    packed = pack(matrices[0], MatrixFormat("int4", columns=128))
    return lambda name: (
        *project_tokens(tokens, matrices, norm=norm, norm_eps=1e-6, implementation=name),
        *project_tokens(tokens, (packed,), norm=norm, norm_eps=1e-6, implementation=name),
    )


def _query_sparse(x: Inputs) -> Run:
    q, chunk = x.queries(CHUNK), (x.pages, x.table, x.starts, x.lengths)
    options = {"gamma": 16, "block_size": 64, "k_blocks": 8, "k_exact": 8, "sm_scale": SCALE}
    # Lists are not compared: two blocks may have scores that differ only by rounding, and so swap places.
    return lambda name: query_sparse_attention(q, *chunk, **options, implementation=name)[:2]


def _select(x: Inputs) -> Run:
    q, options = x.queries(1), {"kind": "bounds", "page_size": PAGE_SIZE, "block_size": PAGE_SIZE, "k": 4, "sink": 1, "local": 2}
    return lambda name: select_blocks(q, x.bounds, x.table, x.lengths, **options, implementation=name)


def _selected(x: Inputs) -> Run:
    q, options = x.queries(1), {"kind": "bounds", "block_size": PAGE_SIZE, "budget": 4, "sink": 1, "local": 2, "sm_scale": SCALE}
    arrays = q, x.pages, x.bounds, x.table, x.lengths
    codes = page_index(x.pages.k, kind="keys4", block_size=PAGE_SIZE, implementation="xla")
    refined = options | {"shortlist": 8, "codes": codes, "codes_kind": "keys4"}

    def run(name: str):
        by = "composed" if name == "mosaic_tpu" else name  # that kernel chooses in one stage
        return selected_attention(*arrays, **options, implementation=name), selected_attention(*arrays, **refined, implementation=by)

    return run


def _tiles(x: Inputs) -> Run:
    q, chunk = x.queries(CHUNK), (x.bounds, x.table, x.starts, x.lengths)
    options = {"k": 4, "block_size": PAGE_SIZE, "query_tile": 128, "window": WINDOW, "sm_scale": SCALE}
    return lambda name: select_tiles(q, *chunk, **options, implementation=name)


def _top(x: Inputs) -> Run:
    scores = x.normal(2, 65_536, dtype=jnp.float32)
    return lambda name: top_k(scores, 512, implementation=name)


def _union(x: Inputs) -> Run:
    ids = np.stack([x.random.permutation(64)[:8] for _ in range(2 * 16 * 4)]).reshape(2, 16, 4, 8)
    ids, scores = jnp.array(ids, jnp.int32), x.normal(2, 16, 4, 8, dtype=jnp.float32)
    return lambda name: union_blocks(ids, scores, rows=8, k_trim=16, num_blocks=64, implementation=name)


EXAMPLES: dict[str, Callable[[Inputs], Run]] = {
    "all_gather": _exchange,
    "all_reduce": _reduce,
    "append_tokens": _append,
    "block_mass": _mass,
    "block_sparse_attention": _block_sparse,
    "copy_tiles": _copy,
    "fetch_tiles": _fetch,
    "flash_attention": _flash,
    "gather_attention": _gather,
    "gated_delta": _delta,
    "indexer_scores": _indexer,
    "pack_pages": _pack,
    "page_index": _index,
    "place_tiles": _place,
    "project_tokens": _project,
    "query_sparse_attention": _query_sparse,
    "select_blocks": _select,
    "select_tiles": _tiles,
    "selected_attention": _selected,
    "top_k": _top,
    "union_blocks": _union,
}
"""op -> function that makes its example."""
