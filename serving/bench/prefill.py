"""`kvjax bench prefill`: time to first token of a whole prompt, with random weights, in chunks as the engine prefills.

A step computes the same as the engine's, in one program (`prefill_step`, cache donated). The host does not wait between
chunks. Random keys and queries are the worst case for a sparse policy: no candidate is better than another, so every
list is full, and times do not depend on the random numbers.

On a mesh, weights and pages are split as the engine splits them. Where pages are sharded, a chunk's table is as wide as
the engine's, and each width is a program of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.axes import ONE_DEVICE, WHOLE_COPY, Shards, mesh
from kvjax.cache import OPEN, WHOLE, Cache, CacheSpec
from kvjax.cache.arrays import made_on
from kvjax.cache.formats import CacheFormat
from kvjax.cache.page_tables import page_table, staged_width, table_width
from kvjax.compilation import compiled
from kvjax.engine.sequence_parallel import own_rows, whole_rows
from kvjax.engine.steps import ChunkInputs, StepProgram, StepStatic, chunk_logits, prefill_layers
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Params
from kvjax.model.weight_formats import format_function, scheme_of, weights_bytes
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.choice import ChoosesPrefill
from kvjax.policies.prefill import BoundsBlocks, PrefillPolicy, indexes_of, name_of, parse_prefill
from kvjax.serving.bench.decode import MEMORY_SHARE, PAGE_SIZE, bytes_of, pages_of
from kvjax.serving.bench.random_model import placed, random_params, sharded
from pallas_kernels.bench.inputs import memory_bytes, pool_pages
from pallas_kernels.bench.timing import Kernel, plain_name, record
from pallas_kernels.core import dispatch

PROFILED_CHUNKS = 4
"""Number of chunks, evenly spaced, that are run once more under the profiler."""


def _whole_chunk(static: StepStatic, inputs: ChunkInputs) -> tuple[jax.Array, Cache, jax.Array | None]:
    """One chunk of each row in one program, from token ids, which are the `x` of the inputs, to logits `[B, V]`, and
    what is missing. An engine runs its parts as separate programs, with the same bits. DONATES cache."""
    x = static.decoder.embed(inputs.params, own_rows(inputs.cache.shards, inputs.x))
    x, cache, _, missing, _ = prefill_layers(static, inputs._replace(x=x))
    x = whole_rows(cache.shards, x)
    return chunk_logits(static.decoder, inputs.params, x, inputs.starts, cache.lengths, all_logits=False), cache, missing


prefill_step = StepProgram(_whole_chunk, ChunkInputs, ("cache",), lambda *_: (WHOLE_COPY, Cache, WHOLE_COPY), lambda *_: {}, "prefill_step")

PARTS = (
    ("dense attention", re.compile(r"^flash_attention_kernel|^widen_pages_kernel|^merge_kernel|cudnn|fmha", re.IGNORECASE)),
    ("query-sparse attention", re.compile(r"^query_sparse_attention_kernel")),
    ("select", re.compile(r"^select_tiles_kernel|^top_k_kernel")),
    ("union", re.compile(r"sort|union_blocks", re.IGNORECASE)),
    ("block-sparse attention", re.compile(r"^block_sparse_attention_kernel")),
    ("append", re.compile(r"append|scatter")),  # XLA's is two scatters
    ("projections", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|dot", re.IGNORECASE)),
    ("overhead", re.compile("")),
)
"""What a kernel does, by its name: the first part that matches. The last part has norms, RoPE, corrections and other
fusions of XLA."""


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What to run: prompts of `lengths` tokens, `chunk` tokens at a time, each policy `rounds` times. weights: how they
    are packed, as in `kvjax.load`; cache_format: how full pages are; None: they are not. tensor, context: of the
    mesh."""

    shape: str
    config: ModelConfig
    lengths: tuple[int, ...]
    policies: tuple[PrefillPolicy, ...]
    chunk: int
    rounds: int
    weights: str | None = None
    cache_format: CacheFormat | None = None
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        for name, values in (("chunk", (self.chunk,)), ("rounds", (self.rounds,)), ("lengths", self.lengths)):
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {values}")
        if self.chunk % PAGE_SIZE:
            raise ValueError(f"chunk {self.chunk} must be a multiple of the page size {PAGE_SIZE}")
        if self.weights is not None:
            scheme_of(self.weights)
        if self.context & (self.context - 1):
            raise ValueError(f"context is {self.context}, and pages are sharded over a power of two devices: use 2, 4 or 8")
        if self.devices > 1 and (self.weights is not None or self.cache_format is not None):
            raise ValueError(f"packed weights and pages are timed on one device, not on tensor {self.tensor} x context {self.context}")
        weights_bytes(self.config, format_function(self.weights), tensor=self.tensor)  # refuses heads that do not divide
        self.spec  # noqa: B018  refuses pages that cannot be packed

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.tensor * self.context

    def shards(self, length: int) -> Shards:
        """The mesh, with the pages that each of its devices has, and the rows of a chunk sharded, as an engine does
        it."""
        if self.devices == 1:
            return ONE_DEVICE
        dealt = [group.name for group in self.spec.groups if group.page_size != WHOLE] if self.context > 1 else []
        counts = self.pages(length)
        rows = 1 if self.chunk % (2 * self.context) else self.context
        return Shards(mesh(tensor=self.tensor, context=self.context), tuple((name, counts[name]) for name in dealt), rows)

    @functools.cached_property
    def spec(self) -> CacheSpec:
        """What the cache holds."""
        return self.config.cache_spec(PAGE_SIZE, self.cache_format)

    def pages(self, length: int) -> dict[str, int]:
        """Pages of each layer group, for one sequence, in the pool of each device along the context axis."""
        count = pool_pages(-(-pages_of(length) // self.context))
        return {group.name: 1 if group.name == OPEN else count for group in self.spec.groups}


def dense_at(policies: Iterable[str | PrefillPolicy], lengths: Iterable[int]) -> list[str]:
    """A line for each policy that attends densely to whole prompts of some of these lengths (tokens), and so has the
    times of dense."""
    lines = []
    for policy in map(parse_prefill, policies):
        most = getattr(policy, "dense_tokens", 0)
        if here := [f"{length:,}" for length in lengths if length <= most]:
            remedy = f"; {policy}+sparse is not" if policy == BoundsBlocks(getattr(policy, "k", 1)) else ""
            lines.append(f"{policy} is dense up to {most:,} tokens, so at {', '.join(here)} tokens as well{remedy}")
    return lines


def policies_of(text: str) -> tuple[PrefillPolicy, ...]:
    """The prefill policies of a text of names with commas between them, each once. ValueError for `auto`, which only
    chooses others."""
    found = tuple(dict.fromkeys(parse_prefill(name) for name in text.split(",")))
    if auto := [policy for policy in found if isinstance(policy, ChoosesPrefill)]:
        raise ValueError(f"prefill policy {auto[0]} chooses another policy for each chunk and is not timed itself: name those policies")
    return found


def empty_cache(plan: PrefillPlan, length: int, policy: PrefillPolicy) -> Cache:
    """An empty cache for one sequence of `length` tokens, with pages in random order and the policy's indexes."""
    shards, counts, pages = plan.shards(length), plan.pages(length), pages_of(length)
    spec = plan.spec if shards.mesh is None else plan.spec.on_mesh(plan.tensor)
    table = np.full((1, table_width(pages)), -1, np.int32)
    table[:, :pages] = sharded(1, plan.context, pages, max(counts.values()), np.random.default_rng(length))
    dealt = dict(shards.pages)
    totals = {name: count * (plan.context if name in dealt else 1) for name, count in counts.items()}
    make = functools.partial(spec.empty, totals, indexes_of(policy))
    layers = made_on(shards, make)
    tables = {group.name: jnp.asarray(page_table([[0]]) if group.name == OPEN else table) for group in spec.groups}
    return jax.block_until_ready(Cache(layers, *placed(shards, (tables, jnp.zeros(1, jnp.int32))), spec))


def held_bytes(plan: PrefillPlan, length: int, policy: PrefillPolicy, params: Params) -> int:
    """Bytes of weights and cache on one device, the policy's indexes included."""
    spec = plan.spec.on_mesh(plan.tensor).on_device(plan.tensor)
    pages = sum(count * spec.bytes_per_page(name, indexes_of(policy)) for name, count in plan.pages(length).items())
    return pages + sum(map(bytes_of, jax.tree.leaves(params)))


def run_prefill_plan(plan: PrefillPlan, on_progress: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """Rows, one for each length and policy. `skipped` is set if the length does not fit in memory, `failed` if an error
    was raised."""
    if plan.devices > (found := len(jax.devices())):
        reason = f"the mesh needs {plan.devices} devices, and there are {found}"
        yield from (_fields(plan, *each) | {"skipped": reason} for each in itertools.product(plan.lengths, plan.policies))
        return
    on_progress("weights")
    params = random_params(plan.config, plan.shards(plan.lengths[0]), plan.weights)
    for length in plan.lengths:
        there = memory_bytes()
        for policy in plan.policies:
            gc.collect()
            needed = held_bytes(plan, length, policy, params)
            fields = _fields(plan, length, policy)
            if needed > MEMORY_SHARE * there:
                reason = f"weights and cache need {needed / 2**30:.1f} GiB, arrays may take {MEMORY_SHARE * there / 2**30:.1f}"
                yield fields | {"skipped": reason}
                continue
            try:
                yield fields | {"held_bytes": needed} | _measure(plan, length, policy, params, on_progress)
            except Exception as error:  # the other policies and lengths are still measured
                yield fields | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _measure(plan: PrefillPlan, length: int, policy: PrefillPolicy, params: Params, on_progress: Callable[[str], None]) -> dict[str, Any]:
    said = f"{length:,} tokens, {policy}"
    on_progress(f"{said}: cache")
    kept, shards = [empty_cache(plan, length, policy)], plan.shards(length)
    chunks, tables = _chunks(plan, length), _tables(plan, kept[0], length)

    def lowered() -> Iterator[jax.stages.Lowered]:
        for number, of_width in enumerate(tables.values(), 1):
            on_progress(f"{said}: compiling program {number} of {len(tables)}")
            static, cache = StepStatic(TransformerDecoder(plan.config), policy, indexes_of(policy), shards), kept[0]
            inputs = ChunkInputs(params, with_tables(cache, of_width, shards), *placed(shards, chunks[0][1:]))
            yield prefill_step.lower(static, inputs)

    with dispatch.listening() as path:
        steps = dict(zip(tables, compiled(lowered()), strict=True))

    def run(some: Sequence[tuple]) -> jax.Array:
        for last, *operands in some:
            width = _width(plan, last, length)
            cache = with_tables(kept.pop(), tables[width], shards).replace(lengths=placed(shards, np.array([last], np.int32)))
            logits, cache, _ = steps[width](*ChunkInputs(params, cache, *placed(shards, operands)))
            kept.append(cache)
        return jax.block_until_ready(logits)

    on_progress(f"{said}: first runs")
    before = _peak_bytes()
    first_of = {_width(plan, chunk[0], length): chunk for chunk in chunks[::-1]}
    run([first_of[width] for width in steps])  # the first run loads the program
    seconds = []
    for number in range(plan.rounds):
        on_progress(f"{said}: round {number + 1} of {plan.rounds}")
        started = time.perf_counter()
        logits = run(chunks)
        seconds.append(time.perf_counter() - started)
    if not np.isfinite(logits).all():
        raise RuntimeError("logits are not finite, so a step read memory that it must not read")
    count = min(PROFILED_CHUNKS, len(chunks))
    profiled = [chunks[(2 * i + 1) * len(chunks) // (2 * count)] for i in range(count)]
    profile = None
    if jax.default_backend() == "gpu":
        of_chunks = [record(lambda chunk=chunk: run([chunk])) for chunk in profiled]
        profile = {"chunks": [chunk[0] for chunk in profiled], "parts_s": list(map(split, of_chunks)), "kernels_s": longest(of_chunks)}
    middle = float(np.median(seconds))
    peak = _peak_bytes()
    return {
        "path": path,
        "median_s": middle,
        "rounds_s": seconds,
        "tokens_per_s": length / middle,
        "flops": dense_flops(plan.config, length),
        "temp_bytes": max(step.memory_analysis().temp_size_in_bytes for step in steps.values()),
        "peak_bytes": peak if peak > before else None,  # else an earlier case, or packing, took more
        "programs": len(steps),
        "profile": profile,
    }


def _peak_bytes() -> int:
    """The most that was taken on the device since the process began; 0 where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _width(plan: PrefillPlan, last: int, length: int) -> int:
    """Columns of the page table of a chunk that ends after `last` tokens. Where pages are sharded, all that a table has
    room for are brought from other devices, so it is no wider than it must be."""
    return table_width(pages_of(length)) if plan.context == 1 else staged_width(pages_of(last))


def _tables(plan: PrefillPlan, cache: Cache, length: int) -> dict[int, dict[str, np.ndarray]]:
    """The page tables of a prompt's chunks, by `_width`."""
    widths = dict.fromkeys(_width(plan, min(start + plan.chunk, length), length) for start in range(0, length, plan.chunk))
    tables = {name: np.asarray(table) for name, table in cache.page_tables.items()}
    return {width: {name: table if name == OPEN else table[:, :width] for name, table in tables.items()} for width in widths}


def with_tables(cache: Cache, tables: dict[str, np.ndarray], shards: Shards) -> Cache:
    """The cache with other page tables, where pages are sharded; elsewhere a prompt has one, which stays on the
    device."""
    return cache if shards.context == 1 else cache.replace(page_tables=placed(shards, tables))


def split(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Seconds of each of `PARTS` in a chunk, and `idle`: the time between its first kernel's start and its last one's
    end that no kernel takes."""
    seconds = dict.fromkeys((name for name, _ in PARTS), 0.0)
    for kernel in kernels:
        part = next(name for name, pattern in PARTS if pattern.search(plain_name(kernel.name)))
        seconds[part] += (kernel.end - kernel.start) * 1e-9
    span = (max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)) * 1e-9
    return seconds | {"idle": max(0.0, span - sum(seconds.values()))}


def longest(of_chunks: Sequence[Sequence[Kernel]], most: int = 16) -> dict[str, float]:
    """Seconds per chunk of the kernels that take most time, by name. It shows which kernels `PARTS` may assign
    wrongly."""
    seconds = collections.Counter()
    for kernel in itertools.chain(*of_chunks):
        seconds[plain_name(kernel.name)] += (kernel.end - kernel.start) * 1e-9 / len(of_chunks)
    return dict(seconds.most_common(most))


def dense_flops(config: ModelConfig, length: int) -> dict[str, float]:
    """Floating-point operations of a dense prefill: of all matrices except embedding and head, and of causal
    attention."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    attention = 0.0
    for mixer in config.attention:
        most = length if mixer.window is None else min(length, mixer.window)  # keys of a query; the first `most` queries see fewer
        attention += 4 * mixer.num_heads * mixer.head_dim * (most * (most + 1) / 2 + (length - most) * most)
    return {"projections": 2.0 * (config.num_params - tables) * length, "attention": attention}


def _chunks(plan: PrefillPlan, length: int) -> list[tuple]:
    """For each chunk: the number of tokens written at its end, and the inputs of `prefill_step` after the cache."""
    tokens = np.random.default_rng(0).integers(0, plan.config.vocab_size, length, np.int32)
    chunks = []
    for start in range(0, length, plan.chunk):
        here = np.zeros((1, plan.chunk), np.int32)
        last = min(start + plan.chunk, length)
        here[0, : last - start] = tokens[start:last]
        first = np.array([start], np.int32)
        chunks.append((last, here, first, first))
    return chunks


def _fields(plan: PrefillPlan, length: int, policy: PrefillPolicy) -> dict[str, Any]:
    named = {"op": "prefill", "shape": plan.shape, "tokens": length, "batch": 1, "policy": name_of(policy)}
    return named | {
        "layers": plan.config.num_layers,
        "dtype": plan.config.compute_dtype,
        "chunk": plan.chunk,
        "describe": policy.describe(),
        "weights": plan.weights,
        "cache_format": None if plan.cache_format is None else str(plan.cache_format),
        "tensor": plan.tensor,
        "context": plan.context,
    }
