"""Measures one case: makes inputs, checks, times, and frees them. Returns its row."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import checks, inputs, projections, torch_sdpa
from pallas_kernels.bench.cases import ATTENDING, CHUNK_WINDOW, PAGE_SIZE, Case
from pallas_kernels.bench.inputs import Pool
from pallas_kernels.bench.ops import chained, contiguous_attention, in_place, op_of, poison
from pallas_kernels.bench.timing import Kernel, Timing, device_time, kernel_timing
from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import INDEX_ROWS
from pallas_kernels.selection.select_blocks import select_blocks

MEMORY_SHARE = 0.8
"""Share of the memory that the arrays of a case may use."""

COPY_BYTES = (2**33, 2**27)
"""Bytes of the array that is copied: on a device, on a CPU."""

TIMED_SECONDS, MAX_CALLS, MIN_CALLS = 0.5, 40, 5
"""Calls are repeated for about this long; their number stays within these bounds."""


class Skipped(Exception):
    """Why a case was not measured here."""


def copy_rate() -> dict[str, Any]:
    """Bytes per second, read and written, of a copy between two large arrays."""
    source = _large_array()
    timing = device_time(jax.jit(jnp.copy), [(source,)], calls=10)
    return {"bytes": 2 * source.nbytes, "bytes_per_s": 2 * source.nbytes / timing.median_s, "timing": timing.figures()}


def read_rate() -> dict[str, Any]:
    """Bytes per second, read, of the largest number in each 128 KB of a large array."""
    source = _large_array()
    timing = device_time(jax.jit(functools.partial(jnp.max, axis=(1, 2, 3))), [(source,)], calls=10)
    return {"bytes": source.nbytes, "bytes_per_s": source.nbytes / timing.median_s, "timing": timing.figures()}


def _large_array() -> jax.Array:
    page = (4, PAGE_SIZE, 128)
    size = min(COPY_BYTES[jax.default_backend() == "cpu"], inputs.memory_bytes() // 16)
    chunk = inputs.CHUNK_PAGES * math.prod(page) * inputs.ITEM
    return inputs.random_pages(jax.random.key(0), (max(1, size // chunk) * inputs.CHUNK_PAGES, *page))


def row_of(case: Case, implementation: str | None, copy_bytes_per_s: float, read_bytes_per_s: float | None = None) -> dict[str, Any]:
    """The row of a case (see `report` for the fields). Raises Skipped, NotImplementedError, or what the op raises.
    read_bytes_per_s: adds the fraction of this."""
    row = _shape_fields(case)
    figures = {"index": _index, "append": _append, "chunk": _chunk, "project": _project, "baseline": _baseline}.get(case.op, _paged)(
        case, implementation
    )
    timing: Timing = figures.pop("timing")
    moved = sum(figures["bytes"].values())
    row |= figures | timing.figures()
    if read_bytes_per_s:
        row["fraction_of_read"] = moved / timing.median_s / read_bytes_per_s
    return row | _rates(moved, timing.median_s, copy_bytes_per_s)


def torch_rows(cases: Sequence[Case], copy_bytes_per_s: float) -> list[dict[str, Any]]:
    """Rows of PyTorch's baselines, from a separate process. It needs the device's memory, so the caller must hold
    none."""
    requests = [_torch_request(case) for case in cases]
    try:
        answers = torch_sdpa.ask(requests) if requests and torch_sdpa.installed() else {}
    except RuntimeError as error:
        return [_shape_fields(case) | {"failed": str(error)} for case in cases]
    missing = {"skipped": "PyTorch is not installed"}
    pairs = zip(cases, requests, strict=True)
    return [
        _shape_fields(case) | _torch_figures(case, request, answers.get(case.name, missing), copy_bytes_per_s) for case, request in pairs
    ]


def _torch_figures(case: Case, request: dict[str, Any], answer: dict[str, Any], copy_bytes_per_s: float) -> dict[str, Any]:
    if "skipped" in answer:
        return {"skipped": answer["skipped"]}
    try:
        timing = kernel_timing([Kernel(*kernel) for kernel in answer["kernels"]], request["calls"], request["chain"])
    except RuntimeError as error:
        return {"failed": str(error)}
    moved = inputs.bytes_read(case, _all_keys(case))
    made = {
        "path": {f"torch {answer['torch']}": request["backend"]},
        "copies": request["copies"],
        "chain": request["chain"],
        "bytes": moved,
    }
    return made | _reads(case, _all_keys(case)) | timing.figures() | _rates(sum(moved.values()), timing.median_s, copy_bytes_per_s)


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Add to each row that attends the fastest baseline of the same shape, tokens and batch, and how many times as long
    it takes; to each over packed pages how many times as long it takes as the same over unpacked ones."""
    place = ("shape", "tokens", "batch")
    for row in rows:
        own = [r for r in rows if "median_s" in r and r["case"] == row["case"].partition("@")[0] != row["case"]]
        if "median_s" in row and own:
            row["unpacked"] = {"case": own[0]["case"], "times": row["median_s"] / own[0]["median_s"]}
        same = [r for r in rows if r["op"] == "baseline" and "median_s" in r and all(r[key] == row[key] for key in place)]
        if row["op"] in ATTENDING and "median_s" in row and same:
            best = min(same, key=lambda r: r["median_s"])
            row["speedup"] = {"over": best["case"], "times": best["median_s"] / row["median_s"]}


def _shape_fields(case: Case) -> dict[str, Any]:
    sizes = {"heads": case.sizes.num_heads, "kv_heads": case.sizes.num_kv_heads, "head_dim": case.sizes.head_dim}
    fields = {"case": case.name, "op": case.op, "shape": case.shape, "tokens": case.tokens, "batch": case.batch, "policy": case.policy}
    fields |= {"format": case.format} if case.format else {}
    return fields | sizes | {"dtype": inputs.DTYPE.__name__, "page_size": PAGE_SIZE, "block_size": case.block_size}


def _rates(moved: int, seconds: float, copy_bytes_per_s: float) -> dict[str, float]:
    return {"bytes_per_s": moved / seconds, "fraction_of_copy": moved / seconds / copy_bytes_per_s}


def _all_keys(case: Case) -> int:
    return case.batch * case.sizes.num_kv_heads * case.tokens


def _reads(case: Case, keys: int, blocks: int | None = None) -> dict[str, float]:
    """Keys and blocks that one KV head of one row reads, on average."""
    lists = case.batch * case.sizes.num_kv_heads
    return {"keys_read": keys / lists, "blocks_read": (keys // case.block_size if blocks is None else blocks) / lists}


def _paged(case: Case, implementation: str | None) -> dict[str, Any]:
    """dense, sparse, pair, gather, select: over one pool with `copies` batches in it."""
    expected = (case.budget.keys if case.budget else case.tokens) * case.batch * case.sizes.num_kv_heads
    copies = inputs.copies_needed(sum(inputs.bytes_read(case, min(expected, _all_keys(case))).values()))
    _check_memory(case, copies)
    chain = max(copies, inputs.MIN_OPS)
    pool, tables = inputs.make_pool(case, copies, seed=chain)
    # Every op gets its own arrays, even if they are equal, so that no op can reuse results of another.
    asked = enumerate(inputs.queries(case, chain, seed=case.batch))
    own = [(q, jnp.array(tables[i % copies]), jnp.full((case.batch,), case.tokens, jnp.int32)) for i, q in asked]
    lists = [_list(case, pool, each, implementation) for each in own] if case.op == "gather" else None
    own = [(*each, blocks) for each, blocks in zip(own, lists, strict=True)] if lists else own
    op = op_of(case, implementation)
    checked = _check(case, pool, op, own[0])
    timing = _timed(chained(op), pool, tuple(own), chain)
    return {"copies": copies, "chain": chain, **checked, "timing": timing}


def _chunk(case: Case, implementation: str | None) -> dict[str, Any]:
    """The last queries of each row; some of them are checked, each against the float32 reference over what it reads."""
    _check_memory(case, 1)
    pool, tables = inputs.make_pool(case, 1, seed=0)
    lengths, chain = jnp.full((case.batch,), case.tokens, jnp.int32), inputs.MIN_OPS
    lists = [inputs.chunk_lists(case, i) for i in range(chain)] if case.policy.startswith("lists") else [None] * chain
    asked = zip(inputs.queries(case, chain, seed=case.batch), lists, strict=True)
    own = [(q, jnp.array(tables[0]), lengths, *(() if x is None else (jnp.array(x),))) for q, x in asked]
    op = op_of(case, implementation)
    found, (out, lse) = _run_twice(op, pool, own[0])
    errors = []
    for query in (PAGE_SIZE - 1, case.queries // 2 - 1, case.queries - 1):  # the last of a tile, whose window begins with a block
        end = case.tokens - case.queries + query + 1
        blocks = checks.every_block(case.batch, case.sizes.num_kv_heads, -(-end // PAGE_SIZE))
        if lists[0] is not None:
            group = case.sizes.num_heads // case.sizes.num_kv_heads
            near = np.array([0, *range((end - CHUNK_WINDOW) // PAGE_SIZE, end // PAGE_SIZE)], np.int32)
            listed = lists[0][:, query // PAGE_SIZE, ::group]
            blocks = jnp.array(np.concatenate([np.broadcast_to(near, (*listed.shape[:2], len(near))), listed], axis=2))
        sizes = {"block_size": PAGE_SIZE, "sm_scale": case.sizes.head_dim**-0.5}
        one = own[0][0][:, query : query + 1]
        ref = checks.streamed_attention(one, pool.pages, own[0][1], jnp.full_like(lengths, end), blocks, **sizes)
        here = out[:, query : query + 1], lse[:, query : query + 1]
        errors.append((checks.row_error(here[0], ref[0]), checks.largest_difference(here[1], ref[1])))
    found |= {"error": max(error for error, _ in errors), "lse_error": max(error for _, error in errors)}
    timing = _timed(chained(op), pool, tuple(own), chain)
    keys = _all_keys(case) if lists[0] is None else blocks.size * PAGE_SIZE
    return found | {"copies": 1, "chain": chain, "bytes": inputs.bytes_read(case, keys), "timing": timing} | _reads(case, keys)


def _run_twice(op: Callable, pool: Any, own: tuple) -> tuple[dict[str, Any], Any]:
    """The implementation that dispatch chose for the op, whether a second run gave the same bits, and its result."""
    run = jax.jit(op)
    with dispatch.listening() as path:
        first = run(pool, *own)
    poison(first)
    second = run(pool, *own)
    return {"path": path, "same_bits": checks.same_bits(first, second)}, second


def _list(case: Case, pool: Pool, own: tuple, implementation: str | None) -> jax.Array:
    """What select_blocks lists for a case that has a budget: `[B, K, W]`."""
    b = case.budget
    sizes = {"page_size": PAGE_SIZE, "block_size": b.block_size, "k": b.k, "sink": b.sink, "local": b.local}
    return select_blocks(own[0], pool.index, own[1], own[2], kind="bounds", **sizes, implementation=implementation)[:, 0]


def _list_by_xla(case: Case, pool: Pool, own: tuple) -> jax.Array:
    """The same by plain XLA, from a shortlist, too."""
    if case.budget.shortlist is None:
        return _list(case, pool, own, "xla")
    with dispatch.forced("xla"):
        return jax.jit(op_of(case, None))(pool, *own)[2][:, 0]


def _check(case: Case, pool: Pool, op: Callable, own: tuple) -> dict[str, Any]:
    """Errors of one op against the float32 reference at the same selection, and what it read."""
    q, table, lengths, *listed = own
    found, second = _run_twice(op, pool, own)
    if case.op == "select":
        blocks = second[:, 0]
    elif listed:
        blocks = listed[0]
    elif case.budget:
        blocks = second[2][:, 0]
    else:
        blocks = checks.every_block(case.batch, case.sizes.num_kv_heads, case.pages)
    if case.scans:
        found["same_blocks_as_xla"] = checks.shared_entries(blocks, _list_by_xla(case, pool, own))
    if case.op != "select":
        ref = checks.streamed_attention(
            q, pool.pages, table, lengths, blocks, block_size=case.block_size, sm_scale=case.sizes.head_dim**-0.5
        )
        found |= {"error": checks.row_error(second[0], ref[0]), "lse_error": checks.largest_difference(second[1], ref[1])}
    ids = np.asarray(blocks)
    stop = np.minimum((ids + 1) * case.block_size, case.tokens)
    keys = int(np.where(ids >= 0, stop - ids * case.block_size, 0).sum())
    return found | {"bytes": inputs.bytes_read(case, keys)} | _reads(case, keys, int((ids >= 0).sum()))


def _index(case: Case, implementation: str | None) -> dict[str, Any]:
    """page_index over all pages of a sequence."""
    moved = inputs.bytes_read(case, _all_keys(case))
    copies = inputs.copies_needed(sum(moved.values()))
    _check_memory(case, copies)
    chain = max(copies, inputs.MIN_OPS)
    shape = (case.batch * case.pages, case.sizes.num_kv_heads, PAGE_SIZE, case.sizes.head_dim)
    own = [(inputs.random_pages(jax.random.key(i), shape).at[0].set(1),) for i in range(chain)]
    op = op_of(case, implementation)
    found, second = _run_twice(op, None, own[0])
    blocks = own[0][0].reshape(*shape[:2], -1, case.block_size, shape[3])
    ref = jnp.stack([blocks.max(3), blocks.min(3)], axis=3)
    assert second.shape == (*shape[:2], PAGE_SIZE // case.block_size, INDEX_ROWS["bounds"], shape[3])
    checked = found | {"error": checks.row_error(second, ref)}
    timing = _timed(chained(op), None, tuple(own), chain)
    return {"copies": copies, "chain": chain, **checked, "bytes": moved, **_reads(case, _all_keys(case)), "timing": timing}


def _append(case: Case, implementation: str | None) -> dict[str, Any]:
    """append_tokens in place. Each op writes to its own page, and so does each call until all pages are used."""
    keys = case.builds * case.batch * case.sizes.num_kv_heads * PAGE_SIZE
    moved = inputs.bytes_read(case, keys)
    _check_memory(case, copies=4)  # the pool, and the results of two runs and of the reference
    chain = inputs.MIN_OPS
    pool, (table,) = inputs.make_pool(case, 1, seed=chain)
    table = jnp.asarray(table)
    tokens = inputs.new_tokens(case, max(case.pages, chain) // chain * chain, seed=case.batch)
    own = [(*each, table) for each in tokens]
    found, second = _run_twice(op_of(case, implementation), pool, own[0])
    found["error"] = 0.0 if checks.same_bits(second, jax.jit(op_of(case, "reference"))(pool, *own[0])) else math.inf
    del second
    program, kept = in_place(op_of(case, implementation)), [pool]
    del pool
    turns = itertools.cycle(itertools.batched(own, chain))

    def call(*_):
        kept[0] = program(kept[0], next(turns))
        return kept[0]

    timing = _timed(call, None, (), chain)
    return {"copies": 1, "chain": chain, **found, "bytes": moved, **_reads(case, keys), "timing": timing}


def _project(case: Case, implementation: str | None) -> dict[str, Any]:
    """project_tokens, every op with matrices that are not in the cache; and the same by XLA, with which the speed-up is
    computed."""
    moved = projections.weight_bytes(case)
    copies = inputs.copies_needed(moved)
    _check_memory(case, copies, held=copies * moved)
    chain = max(copies, inputs.MIN_OPS)
    different = [projections.own_arguments(case, seed) for seed in range(copies)]
    own = tuple((jnp.array(x), arrays) for x, arrays in (different[i % copies] for i in range(chain)))
    found, second = _run_twice(projections.op_of(case, implementation), None, own[0])
    ref = projections.exact(case, own[0])
    found["error"] = max(checks.row_error(a, b) for a, b in zip(second, ref, strict=True))
    timing, other = (_timed(chained(projections.op_of(case, name)), None, own, chain) for name in (implementation, "xla"))
    speedup = {"over": "xla", "times": other.median_s / timing.median_s}
    return {"copies": copies, "chain": chain, **found, "bytes": {"weights": moved}, **_reads(case, 0), "speedup": speedup, "timing": timing}


def _baseline(case: Case, implementation: str | None) -> dict[str, Any]:
    """`jax.nn.dot_product_attention` over contiguous keys; the case's policy names its implementation."""
    moved = inputs.bytes_read(case, _all_keys(case))
    copies = inputs.copies_needed(sum(moved.values()))
    _check_memory(case, copies)
    chain = max(copies, inputs.MIN_OPS)
    shape = (case.batch * case.pages, PAGE_SIZE, case.sizes.num_kv_heads, case.sizes.head_dim)
    together = (case.batch, case.tokens, *shape[2:])
    keys = [inputs.random_pages(jax.random.key(i), shape).at[0].set(1).reshape(together) for i in range(2 * copies)]
    own = [(q, *keys[2 * (i % copies) :][:2]) for i, q in enumerate(inputs.queries(case, chain, seed=case.batch))]
    timing = _timed(chained(contiguous_attention(case, case.policy)), None, tuple(own), chain)
    path = {"dot_product_attention": case.policy}
    return {"path": path, "copies": copies, "chain": chain, "bytes": moved, **_reads(case, _all_keys(case)), "timing": timing}


def _torch_request(case: Case) -> dict[str, Any]:
    copies = inputs.copies_needed(sum(inputs.bytes_read(case, _all_keys(case)).values()))
    sizes = {"heads": case.sizes.num_heads, "kv_heads": case.sizes.num_kv_heads, "head_dim": case.sizes.head_dim}
    request = {"name": case.name, "backend": case.policy.removeprefix("torch-"), "batch": case.batch, "tokens": case.tokens} | sizes
    request["queries"] = 1
    return request | {"copies": copies, "chain": max(copies, inputs.MIN_OPS), "calls": 2 * MIN_CALLS}


def _timed(program: Callable, pool: Any, own: tuple, chain: int) -> Timing:
    """Time the program. A first measurement decides how often to repeat."""
    once = device_time(program, [(pool, own)], calls=2, chain=chain)
    calls = int(np.clip(math.ceil(TIMED_SECONDS / (once.period_s * chain)), MIN_CALLS, MAX_CALLS))
    return device_time(program, [(pool, own)], calls=calls, chain=chain, warmup=0)


def _check_memory(case: Case, copies: int, held: int | None = None) -> None:
    gc.collect()
    needed, there = inputs.bytes_held(case, copies) if held is None else held, inputs.memory_bytes()
    if needed > MEMORY_SHARE * there:
        raise Skipped(f"needs {needed / 2**30:.1f} GiB; arrays may take {MEMORY_SHARE * there / 2**30:.1f} of {there / 2**30:.1f} GiB")
