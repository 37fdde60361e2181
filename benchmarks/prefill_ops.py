"""Times attention of one layer over a whole prompt, dense and sparse, and the steps of the sparse policies.

The name of a row is `op/shape/tokens/b1/policy`:

baseline      dense attention over contiguous keys by another library's kernel; the policy is the kernel's name
dense         flash_attention, over pages in random order ("paged") or in order ("contiguous")
query-sparse  query_sparse_attention, selection included (momo)
union         its scores made into the numbers by which lists are ranked, and union_blocks (momo)
select        select_tiles (bounds)
block-sparse  block_sparse_attention over the lists of the steps above
delta         the correction, damping included (momo)
sparse        all steps of a policy in one program, as an engine runs a layer; policies other than momo and bounds have
              only this row

Errors are against float32 attention of a few queries, computed separately. The error of `select` is the largest share
of attention, by the bound, that a tile's best list has and its own list lacks. Times are device times on a GPU (see
`pallas_kernels.bench.timing`).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Bool, Float

from benchmarks import prefill_tables as prefill_report
from benchmarks.run import Row, main, run, sparse_of
from kvjax.cache import PagedKV
from kvjax.policies.prefill import BoundsBlocks, MeasureOnceMaskOnce, PrefillContext, PrefillPolicy, indexes_of
from kvjax.policies.prefill.lists import TileLists
from kvjax.serving.cli.bench import BenchDtypeOption, check_dtype, exit_unless_timed
from kvjax.serving.cli.options import ImplementationOption, JsonOption, forced_to, parse_lengths
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.bench import torch_sdpa
from pallas_kernels.bench.cases import PAGE_SIZE, SHAPES, Shape
from pallas_kernels.bench.checks import row_error
from pallas_kernels.bench.inputs import QUERY_SCALE, pool_pages, random_pages
from pallas_kernels.bench.timing import Kernel, Timing, device_time, kernel_timing, record
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.tables import stages
from pallas_kernels.selection.page_index import page_index

SAMPLES = 8
"""Number of queries whose attention is computed in float32."""
SHORT_SECONDS, TIMED_SECONDS, MAX_CALLS = 1.0, 0.5, 20
"""A call shorter than SHORT_SECONDS is timed again, for about TIMED_SECONDS and at most MAX_CALLS calls."""
PEAK_SIZES = {"gpu": 8192, "cpu": 512}
BASELINES = {"gpu": ("cudnn",), "cpu": ("xla",)}
"""Implementations of `jax.nn.dot_product_attention`."""
TORCH = {"gpu": ("flash", "cudnn")}
"""Backends of PyTorch's attention."""
TORCH_TOKENS = 2**17
"""The longest prompt for PyTorch. It runs an op five times before timing it, which takes minutes for longer prompts."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Inputs of one layer: q `[1, T, H, D]`, pools with pages in random order, and pools with the same pages in
    order."""

    shape: str
    q: Float[Array, "1 T H D"]
    layer: PagedKV
    ctx: PrefillContext
    in_order: PagedKV

    @property
    def sizes(self) -> Shape:
        """Heads and head dim."""
        return SHAPES[self.shape]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.q.shape[1]

    def indexed(self, policy: PrefillPolicy) -> PagedKV:
        """The pools together with the indexes that a policy scans."""
        kinds = {spec.name: (spec.kind, spec.block_size) for spec in indexes_of(policy)}
        index = {name: page_index(self.layer.pages.k, kind=kind, block_size=size) for name, (kind, size) in kinds.items()}
        return jax.block_until_ready(self.layer.replace(index=index))


def make_prompt(shape: str, tokens: int, dtype: str = "bfloat16") -> Prompt:
    """Random queries, keys and values of `tokens` tokens, a multiple of the page size."""
    if tokens < 1 or tokens % PAGE_SIZE:
        raise ValueError(f"a prompt must be a positive multiple of {PAGE_SIZE} tokens here, got {tokens:,}")
    sizes, pages = SHAPES[shape], tokens // PAGE_SIZE
    key_q, key_k, key_v = jax.random.split(jax.random.key(tokens), 3)
    pool = (pool_pages(pages), sizes.num_kv_heads, PAGE_SIZE, sizes.head_dim)
    table = jnp.asarray(np.random.default_rng(tokens).permutation(np.arange(1, pages + 1, dtype=np.int32)))
    k, v = (random_pages(key, pool, jnp.dtype(dtype)) for key in (key_k, key_v))
    per_page = random_pages(key_q, (pool_pages(pages), PAGE_SIZE, sizes.num_heads, sizes.head_dim), jnp.dtype(dtype))
    q = (per_page[1 : pages + 1] * QUERY_SCALE).reshape(1, tokens, sizes.num_heads, sizes.head_dim)
    ctx = PrefillContext(table[None], jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32), layer=0, sm_scale=sizes.head_dim**-0.5)
    return jax.block_until_ready(Prompt(shape, q, PagedKV(Pages(k, v), {}), ctx, PagedKV(Pages(k[table], v[table]), {})))


def peak_flops(dtype: str = "bfloat16") -> dict[str, Any]:
    """Floating-point operations per second that a large matrix product reaches on this device."""
    size = PEAK_SIZES.get(jax.default_backend(), 4096)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.dtype(dtype)) for i in (0, 1))
    timing = device_time(jax.jit(jnp.matmul), [(a, b)], calls=10)
    return {"size": size, "flops_per_s": 2 * size**3 / timing.median_s, "timing": timing.figures()}


def op_rows(
    shape: str,
    tokens: int,
    policies: Sequence[PrefillPolicy],
    peak: float,
    *,
    dtype: str = "bfloat16",
    baselines: bool = True,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Rows of one prompt: baselines, dense, then the steps and the whole of each policy, with speed-ups over the
    fastest dense row so far.

    baselines: if False, the only dense row is attention over pages in random order. A policy that fails has a row with
    `failed`."""
    prompt = make_prompt(shape, tokens, dtype)
    rows: list[dict[str, Any]] = []
    dense_ones = (_baselines, _torch_baselines, _dense) if baselines else (functools.partial(_dense, layouts=("paged",)),)
    for measured in (*dense_ones, *(functools.partial(_unless_it_breaks, policy) for policy in policies)):
        for row in measured(prompt, on_progress):
            row |= _rates(row, peak)
            rows.append(row)
            dense = [r for r in rows if r["op"] in ("baseline", "dense") and "median_s" in r]
            if row["op"] in ("dense", "sparse") and "median_s" in row and dense:
                best = min(dense, key=lambda r: r["median_s"])
                row["speedup"] = {"over": best["case"], "times": best["median_s"] / row["median_s"]}
            yield row
        gc.collect()


# What is measured


def _baselines(prompt: Prompt, on_progress: Callable) -> Iterator[dict[str, Any]]:
    k, v = (x.swapaxes(1, 2).reshape(1, prompt.tokens, prompt.sizes.num_kv_heads, -1) for x in jax.tree.leaves(prompt.in_order.pages))
    for name in BASELINES.get(jax.default_backend(), ("xla",)):
        on_progress(f"{prompt.tokens:,} tokens: {name}")
        op = functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=prompt.ctx.sm_scale, implementation=name)
        try:
            row, out = _timed(prompt, "baseline", name, op, prompt.q, k, v)
        except Exception as error:
            yield _fields(prompt, "baseline", name) | {"skipped": " ".join(str(error).split())[:300]}
            continue
        yield row | {"path": {"jax": name}, "error": _dense_error(prompt, out, _samples(prompt, 1)), "flops": _dense_flops(prompt)}


def _torch_baselines(prompt: Prompt, on_progress: Callable) -> Iterator[dict[str, Any]]:
    backends = TORCH.get(jax.default_backend(), ()) if prompt.tokens <= TORCH_TOKENS else ()
    sizes = {"heads": prompt.sizes.num_heads, "kv_heads": prompt.sizes.num_kv_heads, "head_dim": prompt.sizes.head_dim}
    counts = {"batch": 1, "queries": prompt.tokens, "tokens": prompt.tokens, "copies": 1, "chain": 1, "calls": 5}
    rows = [_fields(prompt, "baseline", f"torch-{backend}") for backend in backends]
    if backends and not torch_sdpa.installed():
        rows, backends = [row | {"skipped": "PyTorch is not installed"} for row in rows], ()
    if not backends:
        yield from rows
        return
    on_progress(f"{prompt.tokens:,} tokens: PyTorch")
    requests = [{"name": row["case"], "backend": backend, **counts, **sizes} for row, backend in zip(rows, backends, strict=True)]
    try:
        answers = torch_sdpa.ask(requests)
    except RuntimeError as error:
        yield from (row | {"failed": str(error)} for row in rows)
        return
    for row, backend in zip(rows, backends, strict=True):
        answer = answers[row["case"]]
        if "skipped" in answer:
            yield row | {"skipped": answer["skipped"]}
            continue
        timing = kernel_timing([Kernel(*kernel) for kernel in answer["kernels"]], counts["calls"], counts["chain"])
        yield row | {"path": {f"torch {answer['torch']}": backend}, "flops": _dense_flops(prompt)} | timing.figures()


def _dense(prompt: Prompt, on_progress: Callable, layouts: Sequence[str] = ("paged", "contiguous")) -> Iterator[dict[str, Any]]:
    in_order = prompt.ctx.replace(page_table=jnp.arange(prompt.ctx.page_table.shape[1], dtype=jnp.int32)[None])
    places = {"paged": (prompt.layer, prompt.ctx), "contiguous": (prompt.in_order, in_order)}
    for name in layouts:
        layer, ctx = places[name]
        on_progress(f"{prompt.tokens:,} tokens: dense, {name}")
        op = functools.partial(flash_attention, sm_scale=ctx.sm_scale)
        row, (out, _) = _timed(prompt, "dense", name, op, prompt.q, layer.pages, ctx.page_table, ctx.starts, ctx.lengths)
        yield row | {"error": _dense_error(prompt, out, _samples(prompt, 1)), "flops": _dense_flops(prompt)}


def _unless_it_breaks(policy: PrefillPolicy, prompt: Prompt, on_progress: Callable) -> Iterator[dict[str, Any]]:
    try:
        yield from _sparse(policy, prompt, on_progress)
    except Exception as error:  # the other policies are still measured
        failed = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        yield _fields(prompt, "sparse", str(policy)) | {"failed": failed}


def _sparse(p: PrefillPolicy, prompt: Prompt, on_progress: Callable) -> Iterator[dict[str, Any]]:
    """Rows of one policy: its steps if it is in `LISTINGS`, then the whole policy."""
    name, layer, listing = str(p), prompt.indexed(p), LISTINGS.get(type(p))
    attend = p.attend if listing is None else p.attend_sparse
    if listing is not None:
        on_progress(f"{prompt.tokens:,} tokens: the steps of {name}")
        blocks, checked, correct = yield from listing(p, prompt, layer)
        row, sparse = _timed(prompt, "block-sparse", name, p.attend_listed, blocks, prompt.q, layer, prompt.ctx)
        yield row | _read(prompt, p, blocks) | {"error": _sparse_error(prompt, p, sparse, blocks)}
        yield from correct(sparse)
        del sparse, blocks, correct

    on_progress(f"{prompt.tokens:,} tokens: {name}")
    row, out = _timed(prompt, "sparse", name, lambda q, layer, ctx: attend(q, layer, ctx), prompt.q, layer, prompt.ctx)
    yield row | {"flops": None} | ({} if listing is None else checked(out))


Listing = Generator[dict[str, Any], None, tuple[Array, Callable[[Array], dict[str, float]], Callable[[Array], Iterator[dict[str, Any]]]]]
"""Yields the rows of the steps that make lists. Returns the lists, a function that checks the output of the whole
policy, and a function that yields rows of the steps after attention over the lists."""


def _measured_lists(p: MeasureOnceMaskOnce, prompt: Prompt, layer: PagedKV) -> Listing:
    """Times how momo makes lists: those of every gamma-th query, united for each tile."""
    name, ctx, samples = str(p), prompt.ctx, _samples(prompt, p.gamma)
    pages = (layer.pages, ctx.page_table, ctx.starts, ctx.lengths)
    measure = functools.partial(query_sparse_attention, **p.listing, sm_scale=ctx.sm_scale)
    row, (exact, lse, ids, scores) = _timed(prompt, "query-sparse", name, measure, prompt.q, *pages)
    ends = np.arange(0, prompt.tokens, p.gamma) + 1
    found = {"error": _dense_error(prompt, exact, samples, p.gamma), **_list_errors(prompt, p, ids, scores, samples)}
    yield row | found | {"flops": _flops_per_key(prompt) * float(ends.sum()), "lists_full": float((ids[:, -1] >= 0).mean())}

    unite = functools.partial(p.unite, num_blocks=prompt.tokens // p.key_block)
    row, blocks = _timed(prompt, "union", name, unite, lse, ids, scores)
    moved = lse.nbytes + ids.nbytes + scores.nbytes + blocks.nbytes
    yield row | {"bytes": moved, "same_as_reference": _union_is_right(p, unite, (lse, ids, scores), blocks)}

    def correct(sparse: Array) -> Iterator[dict[str, Any]]:
        if p.delta != "off":
            row, _ = _timed(prompt, "delta", name, p.corrected, sparse, exact)
            yield row | {"bytes": 2 * sparse.nbytes + exact.nbytes}

    def checked(out: Array) -> dict[str, float]:
        """The error of the queries that the correction makes exact, against dense attention."""
        right = {} if p.delta == "off" else {"error": _dense_error(prompt, out, samples)}
        return right | {"sparsity": p.sparsity(prompt.tokens)}

    return blocks, checked, correct


def _selected_lists(p: BoundsBlocks, prompt: Prompt, layer: PagedKV) -> Listing:
    """Times how the bounds policy makes lists. It scans the blocks that begin at or before a query twice, with two
    products each time."""
    row, blocks = _timed(prompt, "select", str(p), p.lists, prompt.q, layer, prompt.ctx)
    seen = float((np.arange(prompt.tokens) // p.key_block + 1).sum())
    found = {"flops": 2 * _flops_per_key(prompt) * seen, "lists_full": float((blocks[:, -1] >= 0).mean())}
    yield row | found | _selection_errors(prompt, p, blocks, layer)
    return blocks, lambda out: {"error": _sparse_error(prompt, p, out, blocks)}, lambda sparse: iter(())


LISTINGS: dict[type, Callable[[Any, Prompt, PagedKV], Listing]] = {MeasureOnceMaskOnce: _measured_lists, BoundsBlocks: _selected_lists}
"""The policies whose steps are timed: how each makes its lists."""


def _read(prompt: Prompt, p: TileLists, blocks: Array) -> dict[str, float]:
    """Operations and keys of attention over the lists, and the share of the last tile's list entries that are
    filled."""
    listed = float((blocks >= 0).sum(dtype=jnp.float32)) * p.key_block * p.chi / prompt.sizes.num_heads
    near = float(np.minimum(np.arange(prompt.tokens) + 1, p.sink_tokens + p.window_tokens).sum())
    full = float((blocks[:, -1] >= 0).mean())
    return {"flops": _flops_per_key(prompt) * (listed + near), "lists_full": full, "keys_read": (listed + near) / prompt.tokens}


def _timed(prompt: Prompt, op: str, policy: str, function: Callable, *arrays: Any, **named: Any) -> tuple[dict[str, Any], Any]:
    """The row of a call, and its result. The call runs once; if it is short, it runs again to compare bits and to time
    several calls."""
    with dispatch.listening() as path:
        call = jax.jit(function).lower(*arrays, **named).compile()
    kept: list[Any] = []

    def run(*_: Any) -> Any:
        kept.append(jax.block_until_ready(call(*arrays, **named)))
        del kept[:-2]
        return kept[-1]

    timing = _first_timing(run)
    fields = {}
    if timing.median_s < SHORT_SECONDS:
        run()
        fields["same_bits"] = bool(jax.jit(_same_bits)(*kept))
        calls = max(2, min(MAX_CALLS, math.ceil(TIMED_SECONDS / max(timing.median_s, 1e-4))))
        timing = device_time(run, [()], calls=calls, warmup=0)
    temp = call.memory_analysis().temp_size_in_bytes
    return _fields(prompt, op, policy) | {"path": path, "temp_bytes": temp} | fields | timing.figures(), kept[-1]


def _first_timing(run: Callable) -> Timing:
    if jax.default_backend() == "gpu":
        return kernel_timing(record(run), calls=1, chain=1)
    return device_time(run, [()], calls=1, warmup=1)


def _same_bits(a: Any, b: Any) -> Array:
    def equal(x, y):
        word = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return (jax.lax.bitcast_convert_type(x, word) == jax.lax.bitcast_convert_type(y, word)).all()

    return jnp.stack([equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]).all()


def _rates(row: dict[str, Any], peak: float) -> dict[str, float]:
    found = {}
    if row.get("flops"):
        found = {"flops_per_s": row["flops"] / row["median_s"], "fraction_of_peak": row["flops"] / row["median_s"] / peak}
    if row.get("bytes"):
        found |= {"bytes_per_s": row["bytes"] / row["median_s"]}
    return found


def _fields(prompt: Prompt, op: str, policy: str) -> dict[str, Any]:
    sizes = prompt.sizes
    case = f"{op}/{prompt.shape}/{prompt.tokens // 1024}k/b1/{policy}"
    fields = {"case": case, "op": op, "shape": prompt.shape, "tokens": prompt.tokens, "batch": 1, "policy": policy}
    heads = {"heads": sizes.num_heads, "kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    return fields | heads | {"dtype": prompt.q.dtype.name, "page_size": PAGE_SIZE}


def _flops_per_key(prompt: Prompt) -> int:
    """Floating-point operations of one query and one key: two products in every head."""
    return 4 * prompt.sizes.num_heads * prompt.sizes.head_dim


def _dense_flops(prompt: Prompt) -> float:
    return _flops_per_key(prompt) * prompt.tokens * (prompt.tokens + 1) / 2


# Checks, in float32


def _samples(prompt: Prompt, step: int) -> np.ndarray:
    """Positions of a few queries, evenly spaced from the first to the last, all multiples of `step`."""
    return np.unique(np.linspace(0, (prompt.tokens - 1) // step, SAMPLES).astype(np.int64)) * step


@functools.partial(jax.jit, static_argnames="head")
def _sampled(q: Array, positions: Array, layer: PagedKV, head: int, seen: Bool[Array, "n G S"] | None, sm_scale: Array):
    """Attention output `[n, G, D]` and logits `[n, G, S]` of a KV head's queries at `positions`, over its keys in
    order. seen: which keys each query reads; None: all up to its own position."""
    group = q.shape[1] // layer.pages.kv_heads
    keys, values = (x[:, head].reshape(-1, x.shape[3]).astype(jnp.float32) for x in (layer.pages.k, layer.pages.v))
    q = q[:, head * group : (head + 1) * group].astype(jnp.float32)
    logits = jnp.einsum("ngd,sd->ngs", q, keys, precision="highest") * sm_scale
    causal = jnp.arange(keys.shape[0]) <= positions[:, None, None]
    logits = jnp.where(causal if seen is None else causal & seen, logits, -jnp.inf)
    return jnp.einsum("ngs,sd->ngd", jax.nn.softmax(logits, axis=-1), values, precision="highest"), logits


def _heads(prompt: Prompt, samples: np.ndarray, seen: Callable[[int], Array | None] = lambda head: None):
    """`_sampled` of these queries for each KV head. seen: the mask of a KV head."""
    q = prompt.q[0, samples]
    for head in range(prompt.sizes.num_kv_heads):
        yield _sampled(q, jnp.asarray(samples, jnp.int32), prompt.in_order, head, seen(head), prompt.ctx.sm_scale)


def _dense_error(prompt: Prompt, out: Array, samples: np.ndarray, gamma: int = 1) -> float:
    expected = jnp.concatenate([found for found, _ in _heads(prompt, samples)], axis=1)
    return row_error(out[0, samples // gamma], expected)


def _list_errors(prompt: Prompt, p: MeasureOnceMaskOnce, ids: Array, scores: Array, samples: np.ndarray) -> dict[str, float]:
    """score_error: the largest error of a listed score. exact_slots_right: share of the k_exact best blocks in the
    first k_exact slots."""
    of_heads = [logits.reshape(*logits.shape[:2], -1, p.key_block) for _, logits in _heads(prompt, samples)]
    expected = np.concatenate([np.asarray(jax.nn.logsumexp(x, axis=-1)) for x in of_heads], axis=1)
    ids, scores = (np.asarray(x[0, samples // p.gamma]) for x in (ids, scores))
    worst, right, slots = 0.0, 0, 0
    for n, h in np.ndindex(*ids.shape[:2]):
        there = ids[n, h] >= 0
        if there.any():
            worst = max(worst, float(np.abs(expected[n, h][ids[n, h][there]] - scores[n, h][there]).max()))
        blocks = np.arange(expected.shape[2])
        able = (blocks * p.key_block + p.key_block > p.sink_tokens) & (blocks * p.key_block <= samples[n] - p.row_window)
        best = sorted(blocks[able], key=lambda j: -expected[n, h, j])[: p.k_exact]
        right, slots = right + len(set(best) & set(ids[n, h, : p.k_exact].tolist())), slots + len(best)
    return {"score_error": worst, "exact_slots_right": right / max(slots, 1)}


def _union_is_right(p: MeasureOnceMaskOnce, unite: Callable, measured: tuple[Array, ...], blocks: Array) -> bool:
    """Whether the lists of the last two whole tiles equal those of the reference implementation."""
    rows = p.chi // p.gamma
    last = measured[0].shape[1] // rows * rows
    some = slice(max(0, last - 2 * rows), last)
    expected = unite(*(x[:, some] for x in measured), implementation="reference")
    return bool((expected == blocks[:, some.start // rows : last // rows]).all())


@functools.partial(jax.jit, static_argnames=("p", "sm_scale"))
def _may_pay(p: BoundsBlocks, q: Array, position: Array, rows: Array, sm_scale: float):
    """The attention `[G, S]` that the queries of a tile may pay to each block, by the bounds policy's definition. q:
    `[chi, G, D]`, its first query at `position`. rows: bounds `[S, 2, D]`."""
    q, rows = q.astype(jnp.float32), rows.astype(jnp.float32)
    sides = jnp.stack([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=2)
    logits = jnp.einsum("tgxd,sxd->tgs", sides, rows, precision="highest") * sm_scale
    seen = jnp.arange(rows.shape[0]) * p.key_block <= position + jnp.arange(q.shape[0])[:, None, None]
    paid = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return paid.sum(0) if p.pooling == "sum" else paid.max(0)


def _selection_errors(prompt: Prompt, p: BoundsBlocks, blocks: Array, layer: PagedKV) -> dict[str, float]:
    """For a few tiles. error: the largest share of a best list's attention, by the bound, that the list lacks.
    slots_right: the share of the best blocks that the lists hold."""
    rows = layer.index[p.indexes()[0].name][prompt.ctx.page_table[0]].swapaxes(0, 1)
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])  # K S 2 D
    group, worst, right, slots = prompt.sizes.num_heads // prompt.sizes.num_kv_heads, 0.0, 0, 0
    for first in _samples(prompt, p.chi):
        tile = prompt.q[0, first : first + p.chi]
        last = first + tile.shape[0] - 1
        heads = jnp.split(tile, prompt.sizes.num_kv_heads, axis=1)
        paid = [np.asarray(_may_pay(p, q, first, rows[head], prompt.ctx.sm_scale)) for head, q in enumerate(heads)]
        begins = np.arange(rows.shape[1]) * p.key_block
        able = np.flatnonzero((begins + p.key_block > p.sink_tokens) & (begins <= last - p.window_tokens))
        for head, ids in enumerate(np.asarray(blocks[0, first // p.chi])):
            worth, listed = paid[head // group][head % group], ids[ids >= 0]
            best = able[np.argsort(-worth[able], kind="stable")][: p.k]
            if len(best):
                worst = max(worst, 1 - float(worth[listed].sum() / worth[best].sum()))
            right, slots = right + len(set(best) & set(listed.tolist())), slots + len(best)
    return {"error": worst, "slots_right": right / max(slots, 1)}


def _sparse_error(prompt: Prompt, p: TileLists, out: Array, blocks: Array) -> float:
    """The error against float32 attention of a few queries over the same lists."""
    samples = _samples(prompt, 1)
    group, count = prompt.sizes.num_heads // prompt.sizes.num_kv_heads, prompt.tokens // p.key_block
    of_tiles = np.asarray(blocks[0, samples // p.chi])  # n H W

    def seen(head: int) -> Array:
        lists = of_tiles[:, head * group : (head + 1) * group]
        listed = np.zeros((*lists.shape[:2], count + 1), bool)
        np.put_along_axis(listed, lists, True, axis=-1)  # -1 is written to the last column
        keys, here = np.arange(prompt.tokens), samples[:, None]
        near = (keys < p.sink_tokens) | (keys > here - p.window_tokens)
        return jnp.asarray(np.repeat(listed[..., :-1], p.key_block, axis=-1) | near[:, None])

    expected = jnp.concatenate([found for found, _ in _heads(prompt, samples, seen)], axis=1)
    return row_error(out[0, samples], expected)


def all_rows(shape: str, tokens: Sequence[int], policies: str, peak: float, dtype: str, baselines: bool, say: Callable) -> Iterator[Row]:
    """Rows of every length. One that fails is a row that says why, and the other lengths continue."""
    sparse = sparse_of(policies)
    for length in tokens:
        try:
            yield from op_rows(shape, length, sparse, peak, dtype=dtype, baselines=baselines, on_progress=say)
        except Exception as error:
            named = {"case": f"prompt/{shape}/{length}", "op": "prompt", "shape": shape, "tokens": length, "batch": 1, "policy": policies}
            yield named | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def ops_table(rows: Sequence[Row]) -> str:
    """Both tables of a run, in Markdown."""
    return f"{prefill_report.op_table(rows)}\n\n{prefill_report.steps_table(rows)}"


def ops_command(
    shape: Annotated[str, typer.Option(help="qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b or tiny.")] = "qwen2.5-7b",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "32k,128k,512k,1m",
    policies: Annotated[str, typer.Option(help="Sparse prefill policies, separated by commas.")] = "momo:128/8",
    dtype: BenchDtypeOption = "bfloat16",
    baselines: Annotated[
        bool, typer.Option(help="Also time other projects' dense kernels, and ours over contiguous keys. Slow for long prompts.")
    ] = True,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
) -> None:
    """Time the attention of one layer over a whole prompt and its steps, beside other projects' dense kernels."""
    check_dtype(dtype)
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(SHAPES)}; models: benchmarks.prefill_layers", param_hint="--shape")
    sparse_of(policies)
    tokens = parse_lengths(lengths)
    with forced_to(implementation):
        with stages("peak of a matrix product"):
            peak = peak_flops(dtype)
        rows = run(
            json_out,
            "prefill-ops",
            lambda say: all_rows(shape, tokens, policies, peak["flops_per_s"], dtype, baselines, say),
            fields={"peak": peak},
            table_of=ops_table,
            implementation=implementation,
        )
    exit_unless_timed(rows)


if __name__ == "__main__":
    main(ops_command)
