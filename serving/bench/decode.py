"""`kvjax bench decode`: how long a whole decode step takes, embedding to sampled token, with random weights and a
random cache.

There is no prefill: keys, values and their indexes are made on the device, and pages have a random order. The steps are
the engine's own (`kvjax.engine.steps.decode_and_sample`, cache donated). Each step is fed the tokens that the one
before sampled, and the host waits only at the end of a round. Policies take turns on one cache, round by round, always
over the same positions. Steps with drafts keep to these positions too, because no draft is ever accepted: a step adds
one token, however many it writes. Several steps in one launch (`kvjax.engine.multi_step.decode_steps`) are timed
together: a row has the time of one of them.

Weights and pages may be packed. On a mesh, they are made on their devices.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.axes import CONTEXT, ONE_DEVICE, TENSOR, Shards, mesh, spec_of
from kvjax.cache import MAX_STEP_TOKENS, OPEN, Cache, CacheSpec, IndexSpec, PagedKV, pages_of_step
from kvjax.cache.arrays import OpenRows, layer_specs
from kvjax.cache.formats import CacheFormat
from kvjax.cache.page_tables import page_table, table_width
from kvjax.cache.spec import PagedSpec
from kvjax.compilation import compiled
from kvjax.cost_model.bytes import rows_bytes, step_bytes
from kvjax.engine.multi_step import STOP_IDS, Ends, decode_steps
from kvjax.engine.policy_state import state_specs
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.step_output import AttentionStats
from kvjax.engine.step_plan import DRAFTS
from kvjax.engine.steps import StepInputs, StepStatic, decode_and_sample
from kvjax.model.config import ModelConfig, uniform_config
from kvjax.model.protocols import Params
from kvjax.model.weight_formats import format_function, table_shape, weights_bytes
from kvjax.models.decoder import TransformerDecoder
from kvjax.models.loading import read_config
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import Cascade, DecodePolicy, Watched, name_of, parse
from kvjax.serving.bench.random_model import packed_layer, placed, random_params, sharded
from pallas_kernels.bench.cases import PAGE_SIZE
from pallas_kernels.bench.inputs import memory_bytes, pool_pages, random_pages
from pallas_kernels.bench.timing import Timing, kernel_timing, record, timeline
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

PROFILED_STEPS = 4
MEMORY_SHARE = 0.95

_QWEN = {"family": "qwen2", "compute_dtype": "bfloat16", "norm_eps": 1e-6, "tie_embeddings": False, "qkv_bias": True}
_LLAMA = {"family": "llama", "compute_dtype": "bfloat16", "norm_eps": 1e-5, "tie_embeddings": False}
SHAPES = {
    "qwen2.5-7b": uniform_config(
        **_QWEN,
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1e6,
        max_positions=2**21,
    ),
    "llama-3.1-8b": uniform_config(
        **_LLAMA,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5e5,
        max_positions=2**21,
    ),
    "llama-3.1-70b": uniform_config(
        **_LLAMA,
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5e5,
        max_positions=2**21,
    ),
    "qwen2.5-0.5b": uniform_config(
        **_QWEN | {"tie_embeddings": True},
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        max_positions=2**21,
    ),
    "tiny": uniform_config(
        **_QWEN,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e4,
        max_positions=2**21,
    ),
}
"""The sizes of known models. RoPE is not scaled, so that every length is valid; scaling would not change the time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run. steps: steps in a round; the last one writes token number `lengths[i]` of its sequence. rounds:
    timed rounds, after one round that warms up.

    drafts: how many tokens of a sequence a step writes: one given token, and drafts. Every policy is timed with each of
    these numbers. steps_per_launch: how many steps the device runs without the host; likewise, with steps of one token.
    tensor, context: of the mesh. weights: how they are packed, as in `kvjax.load`; cache_format: how full pages are;
    None: they are not.
    """

    shape: str
    config: ModelConfig
    lengths: tuple[int, ...]
    policies: tuple[DecodePolicy, ...]
    batch: int
    steps: int
    rounds: int
    drafts: tuple[int, ...] = (1,)
    tensor: int = 1
    context: int = 1
    weights: str | None = None
    cache_format: CacheFormat | None = None
    steps_per_launch: tuple[int, ...] = (1,)

    def __post_init__(self):
        counts = self.steps_per_launch
        if not counts or len(set(counts)) < len(counts) or any(not 1 <= each <= MAX_STEP_TOKENS or self.steps % each for each in counts):
            raise ValueError(f"steps per launch must be 1 to {MAX_STEP_TOKENS} and divide {self.steps} steps, each once, got {counts}")
        if counts != (1,) and self.drafts != (1,):
            raise ValueError(f"several steps per launch have no drafts, got {counts} with drafts {self.drafts}")
        if not self.drafts or len(set(self.drafts)) < len(self.drafts) or not set(self.drafts) <= set(DRAFTS):
            raise ValueError(f"drafts must be among {', '.join(map(str, DRAFTS))}, each once, got {self.drafts}")
        if auto := [policy for policy in self.policies if isinstance(policy, ChoosesDecode)]:
            raise ValueError(f"policy {auto[0]} chooses another policy for each step and is not timed itself: name those policies")
        if watched := [policy for policy in self.policies if isinstance(policy, Watched)]:
            raise ValueError(f"policy {watched[0]} runs two programs, which benchmarks/designs/watched_steps.py times: leave out +missed")
        for name, values in (("batch", (self.batch,)), ("steps", (self.steps,)), ("rounds", (self.rounds,)), ("lengths", self.lengths)):
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {values}")
        if min(self.lengths) <= self.steps:
            raise ValueError(f"a length of {min(self.lengths):,} tokens leaves no history before {self.steps} steps")

        if self.devices > 1 and self.drafts != (1,):
            raise ValueError(f"drafts are timed on one device, got {self.drafts} for tensor {self.tensor} x context {self.context}")
        if self.context & (self.context - 1):
            raise ValueError(f"context is {self.context}, and pages are sharded over a power of two devices: use 2, 4 or 8")
        weights_bytes(self.config, format_function(self.weights), tensor=self.tensor)  # refuses heads that do not divide
        self.spec  # noqa: B018  refuses pages that cannot be packed

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.tensor * self.context

    def shards(self, length: int) -> Shards:
        """The mesh, with the pages that each of its devices has for sequences of a length."""
        if self.devices == 1:
            return ONE_DEVICE
        groups = self.config.cache_spec(PAGE_SIZE).groups if self.context > 1 else ()
        count = self.pool(length)
        return Shards(mesh(tensor=self.tensor, context=self.context), tuple((group.name, count) for group in groups))

    @functools.cached_property
    def spec(self) -> CacheSpec:
        """What the cache holds."""
        return self.config.cache_spec(PAGE_SIZE, self.cache_format)

    def start(self, length: int) -> Int[Array, "B"]:
        """Tokens of each sequence at the start of a round."""
        return jnp.full(self.batch, length - self.steps, jnp.int32)

    def pool(self, length: int) -> int:
        """Pages of the pool of each device along the context axis."""
        return pool_pages(-(-self.batch * self.pages(length) // self.context))

    @functools.cached_property
    def indexes(self) -> tuple[IndexSpec, ...]:
        """The indexes of all policies, as an engine builds them that declares all policies."""
        return tuple(dict.fromkeys(spec for policy in self.policies for spec in policy.indexes()))

    def pages(self, length: int) -> int:
        """Pages of each sequence, with room for the drafts after its last token."""
        return pages_of(length + max(self.drafts) - 1)


def config_of(shape: str, layers: int | None = None, dtype: str | None = None) -> ModelConfig:
    """The configuration of a known shape, or of a model's folder or hub id. ValueError for anything else; it lists the
    shapes.

    layers: number of layers; the model's own layers are taken in turn. None: as the model. dtype: compute_dtype. None:
    the model's.
    """
    try:
        config = SHAPES[shape] if shape in SHAPES else read_config(shape)
    except (ValueError, OSError) as error:
        if "/" in shape or Path(shape).exists():  # the user means a folder or a hub id
            raise
        raise ValueError(f"shape {shape!r} is not known; there are {', '.join(SHAPES)}, or give a model folder or hub id") from error
    if layers is not None:
        config = dataclasses.replace(config, layers=tuple(itertools.islice(itertools.cycle(config.layers), layers)))
    return config if dtype is None else dataclasses.replace(config, compute_dtype=dtype)


def policies_of(text: str) -> tuple[DecodePolicy, ...]:
    """The policies of a text of names with commas between them, each once."""
    return tuple(dict.fromkeys(parse(name) for name in text.split(",")))


def run_plan(plan: Plan, copy_bytes_per_s: float, on_progress: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """Rows, one for each length, policy and number of drafts. `skipped` is set if the length does not fit in memory,
    `failed` if an error was raised."""
    if plan.devices > (there := len(jax.devices())):
        reason = f"the mesh needs {plan.devices} devices, and there are {there}"
        yield from (_fields(plan, length, *each) | {"skipped": reason} for length in plan.lengths for each in _each(plan))
        return
    on_progress("weights")
    params = random_params(plan.config, plan.shards(plan.lengths[0]), plan.weights)
    held = sum(map(bytes_of, jax.tree.leaves(params)))
    for length in plan.lengths:
        gc.collect()
        needed, there = held + cache_bytes(plan, length), memory_bytes()
        if needed > MEMORY_SHARE * there:
            reason = f"weights and cache need {needed / 2**30:.1f} GiB, arrays may take {MEMORY_SHARE * there / 2**30:.1f}"
            yield from (_fields(plan, length, *each) | {"skipped": reason} for each in _each(plan))
            continue
        made = 0
        try:
            for row in _run_length(plan, length, params, copy_bytes_per_s, on_progress):
                yield row
                made += 1
        except Exception as error:  # the other lengths are still measured
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            yield from (_fields(plan, length, *each) | {"failed": text} for each in _each(plan)[made:])


def cache_bytes(plan: Plan, length: int) -> int:
    """Bytes of the pool and its indexes, on one device."""
    spec = plan.spec.on_mesh(plan.tensor).on_device(plan.tensor)
    counts = {group.name: plan.batch if group.name == OPEN else plan.pool(length) for group in spec.groups}
    return sum(count * spec.bytes_per_page(name, plan.indexes) for name, count in counts.items())


def bytes_read(plan: Plan, policy: DecodePolicy, length: int, keys: int, params: Params, drafted: int = 1) -> dict[str, int]:
    """Bytes that one step has to read: all weights, but of the embedding one row per token (all of it if it is also the
    head); K and V of `keys` tokens, a sum over layers, KV heads and rows; and the policy's indexes of whole sequences.
    On a mesh, those of one device: its weights, an equal share of the keys, and the indexes of its pages. The open page
    of each row is not packed. Of `Cascade`, what `kvjax.cost_model.bytes.step_bytes` counts: it reads a part of its
    second index."""
    config, item = plan.config, jnp.dtype(plan.config.compute_dtype).itemsize
    weights = sum(map(bytes_of, jax.tree.leaves(params)))
    if not config.tie_embeddings:
        table = sum(map(bytes_of, jax.tree.leaves(params["embed"])))
        weights += rows_bytes(table, table_shape(config, plan.tensor)[0], plan.batch * drafted) - table
    cache = plan.spec.on_mesh(plan.tensor).on_device(plan.tensor)
    if isinstance(policy, Cascade):
        measured = keys / (plan.batch * len(cache.layers) * cache.layers[0].kv_heads * plan.tensor / cache.layers[0].copies)
        sizes = {"cache_format": plan.cache_format, "page_size": PAGE_SIZE, "tensor": plan.tensor, "context": plan.context}
        counted = step_bytes(config, policy, length, plan.batch, measured_keys=measured, **sizes)
        return {"weights": int(weights), "kv": counted.kv, "index": counted.index}
    own = plan.batch * ((length + drafted - 2) % PAGE_SIZE + 1)
    each = keys * cache.layers[0].copies / plan.devices / cache.kv_heads  # of a KV head of a layer: of all rows
    pages = -(-plan.batch * pages_of(length) // plan.context)
    rows = sum(
        math.prod(spec.shape(pages, layer.kv_heads, PAGE_SIZE, layer.head_dim))
        for number, layer in enumerate(cache.layers)
        for spec in cache.indexes_of(number, policy.indexes())
    )
    kv = sum(layer.token_bytes(PAGE_SIZE, each, own) for layer in cache.layers)
    return {"weights": int(weights), "kv": round(kv), "index": rows * item}


def bytes_of(leaf: Any) -> int:
    """Bytes of an array on each device that has some of it."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.nbytes if sharding is None else math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def random_cache(plan: Plan, length: int) -> Cache:
    """A cache of `batch` sequences with `length - steps` tokens written and room for the rest. The pool has no other
    pages.

    On a mesh, pages are sharded in turn, as an engine deals them out. Packed pages hold what packing random numbers
    gives, and their indexes are of the unpacked keys.
    """
    shards, pages, each = plan.shards(length), plan.pages(length), plan.pool(length)
    spec = plan.spec.on_mesh(plan.tensor)
    table = np.full((plan.batch, table_width(pages)), -1, np.int32)
    table[:, :pages] = sharded(plan.batch, plan.context, pages, each, np.random.default_rng(length))

    def make(kept: PagedSpec, indexes: tuple[IndexSpec, ...], *keys: Array) -> PagedKV:
        of_open = keys
        if shards.mesh is not None:  # copies of a head are the same, and so are open pages on all devices along context
            head = shards.number(TENSOR) // kept.copies
            of_open = [jax.random.fold_in(key, head) for key in keys]
            keys = [jax.random.fold_in(key, head * plan.context + shards.number(CONTEXT)) for key in keys]
        shape = (each, kept.kv_heads, PAGE_SIZE, kept.head_dim)
        dtype = jnp.dtype(plan.config.compute_dtype)
        k, v = (random_pages(key, shape, dtype) for key in keys)
        if kept.formats != (None, None):
            opened = (plan.batch, pages_of_step(PAGE_SIZE), *shape[1:])
            rows = OpenRows(*(jax.random.normal(jax.random.fold_in(key, each), opened).astype(dtype) for key in of_open))
            return packed_layer(kept, k, v, indexes, rows)
        return PagedKV(Pages(k, v), {spec.name: page_index(k, kind=spec.kind, block_size=spec.block_size) for spec in indexes})

    @functools.cache  # layers that are alike are one program
    def maker(kept: PagedSpec, indexes: tuple[IndexSpec, ...]) -> Callable[..., PagedKV]:
        own = functools.partial(make, kept, indexes)
        if shards.mesh is None:
            return own
        specs = layer_specs((jax.eval_shape(lambda: kept.empty(each, PAGE_SIZE, indexes, rows=plan.batch)),))
        return jax.jit(lambda *keys: shards.run(own, keys, (spec_of(()),) * 2, *specs))

    def layer(number: int) -> PagedKV | None:
        kept = spec.on_device(plan.tensor).layers[number]
        if kept.share_with is not None:
            return None
        return jax.block_until_ready(maker(kept, spec.indexes_of(number, plan.indexes))(*(jax.random.key(2 * number + i) for i in (0, 1))))

    layers = tuple(layer(number) for number in range(len(spec.layers)))
    tables = {group.name: placed(shards, jnp.asarray(table)) for group in spec.groups}
    if OPEN in tables:
        tables[OPEN] = placed(shards, jnp.asarray(page_table([[row] for row in range(plan.batch)])))
    return Cache(layers, tables, placed(shards, plan.start(length)), spec)


@dataclasses.dataclass
class _Runner:
    """A policy's compiled step that writes `drafted` tokens of each sequence, or its launch of several steps, and what
    was measured."""

    policy: DecodePolicy
    drafted: int
    step: jax.stages.Compiled
    path: dict[str, str]
    states: tuple[Any, ...]
    seconds: list[float] = dataclasses.field(default_factory=list)
    profile: Timing | None = None
    timeline: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    reads: AttentionStats | None = None
    shards: Shards = ONE_DEVICE
    steps_per_launch: int = 1
    ends: Ends | None = None

    @property
    def label(self) -> str:
        """What it times, for progress."""
        return _label(self.policy, self.drafted, self.steps_per_launch)


def _label(policy: DecodePolicy, drafted: int, steps_per_launch: int) -> str:
    drafts = f", {drafted} tokens per step" if drafted > 1 else ""
    return f"{policy}{drafts}" + (f", {steps_per_launch} steps per launch" if steps_per_launch > 1 else "")


def _run_length(plan: Plan, length: int, params: Params, rate: float, on_progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each of `_each`, in this order, as soon as it is profiled: a run that is ended keeps those that it
    has."""
    on_progress(f"{length:,} tokens: cache")
    cache = random_cache(plan, length)
    rows = placed(plan.shards(length), jax.tree.map(jnp.asarray, SamplingRows.of([None] * plan.batch)))
    runners = _compiled(plan, length, params, cache, rows, on_progress)
    for number in range(plan.rounds + 1):
        for runner in runners:
            on_progress(f"{length:,} tokens: {f'round {number} of {plan.rounds}' if number else 'warm-up'}, {runner.label}")
            seconds, cache = _round(plan, length, runner, params, cache, rows)
            if number:  # the first round warms up
                runner.seconds.append(seconds / plan.steps)
    ones = [runner for runner in runners if runner.drafted == runner.steps_per_launch == 1]
    alone = {runner.policy: float(np.median(runner.seconds)) for runner in ones}
    for runner in runners:
        if jax.default_backend() == "gpu":  # of a mesh, the kernels of its first device
            on_progress(f"{length:,} tokens: profile of {runner.label}")
            cache = _profile(plan, length, runner, params, cache, rows)
        row = _row(plan, length, runner, params, rate)
        yield row | {"of_one": row["median_s"] / alone[runner.policy] if runner.policy in alone else None}


def _compiled(
    plan: Plan, length: int, params: Params, cache: Cache, rows: SamplingRows, on_progress: Callable[[str], None]
) -> list[_Runner]:
    """The runners of `_each`. Their programs are compiled beside each other."""
    config, shards, found = plan.config, plan.shards(length), []
    specs, ends = state_specs(config, PAGE_SIZE, cache.table_of(0).shape[1]), placed(shards, never(plan.batch))

    def lowered() -> Iterator[jax.stages.Lowered]:
        for policy, drafted, launch in _each(plan):
            on_progress(f"{length:,} tokens: compiling {_label(policy, drafted, launch)}")
            states = placed(shards, tuple(policy.init(spec, plan.batch) for spec in specs))
            static = StepStatic(TransformerDecoder(config), policy, plan.indexes, shards, launch)
            given = StepInputs(params, cache, *placed(shards, _first(plan, drafted)), states, rows)
            with dispatch.listening() as heard:
                if launch == 1:
                    program = decode_and_sample.lower(static, given)
                else:
                    program = decode_steps.lower(static, given._replace(ends=ends))
            named = {"path": heard, "states": states, "shards": shards, "steps_per_launch": launch, "ends": ends}
            found.append(functools.partial(_Runner, policy, drafted, **named))
            yield program

    return [make(step=step) for make, step in zip(found, compiled(lowered()), strict=True)]


def _round(plan: Plan, length: int, runner: _Runner, params: Params, cache: Cache, rows: SamplingRows) -> tuple[float, Cache]:
    """Run a round of `steps` steps, waiting once at its end. Returns its seconds and the cache. DONATES cache."""
    cache, tokens, active = _ready(plan, length, cache, runner)
    started = time.perf_counter()
    finite, cache = _steps(runner, params, cache, tokens, active, rows, plan.steps)
    seconds = time.perf_counter() - started
    if not np.asarray(finite).all():
        raise RuntimeError(f"{runner.policy} at {length:,} tokens: logits are not finite, so a step read memory that it must not read")
    if (np.asarray(cache.lengths) != length).any():
        raise RuntimeError(f"{runner.policy} at {length:,} tokens, {runner.drafted} at a time: a draft was accepted")
    return seconds, cache


def _profile(plan: Plan, length: int, runner: _Runner, params: Params, cache: Cache, rows: SamplingRows) -> Cache:
    """Record the kernels of a few steps in `runner`: of two launches, if these have several. Returns the cache. DONATES
    cache."""
    steps = PROFILED_STEPS if runner.steps_per_launch == 1 else min(2 * runner.steps_per_launch, plan.steps)
    cache, tokens, active = _ready(plan, length, cache, runner)
    kept = [cache]
    del cache
    reads = runner.reads
    kernels = record(lambda: kept.append(_steps(runner, params, kept.pop(), tokens, active, rows, steps)[1]))
    runner.profile, runner.timeline, runner.reads = kernel_timing(kernels, calls=1, chain=steps), timeline(kernels, steps), reads
    return kept.pop()


def _ready(plan: Plan, length: int, cache: Cache, runner: _Runner) -> tuple[Cache, Array, Array]:
    """The cache at the start of a round, the first tokens and the active rows, all ready on the device. So a round
    times only steps."""
    lengths, *first = placed(runner.shards, (plan.start(length), *_first(plan, runner.drafted)))
    return jax.block_until_ready((cache.replace(lengths=lengths), *first))


def _steps(
    runner: _Runner, params: Params, cache: Cache, tokens: Array, active: Array, rows: SamplingRows, steps: int
) -> tuple[Array, Cache]:
    """Run steps, each on the tokens that the one before sampled, and wait for the last. Returns whether the last logits
    of each row were finite, and the cache. DONATES cache."""
    states = runner.states
    if runner.steps_per_launch > 1:
        ends = runner.ends
        for _ in range(steps // runner.steps_per_launch):
            given = StepInputs(params, cache, tokens, active, states, rows, ends=ends)
            sampled, _, ends, cache, states, runner.reads = runner.step(*given)
            tokens = sampled.tokens
        jax.block_until_ready((tokens, cache.lengths))
        return sampled.finite, cache
    for _ in range(steps):
        sampled, _, cache, states, runner.reads = runner.step(*StepInputs(params, cache, tokens, active, states, rows))
        tokens = sampled.tokens if runner.drafted == 1 else _without_drafts(sampled.tokens)
    jax.block_until_ready((tokens, cache.lengths))
    return sampled.finite, cache


def _row(plan: Plan, length: int, runner: _Runner, params: Params, rate: float) -> dict[str, Any]:
    """The row of one policy at one length. `keys_read` and `blocks_read` are what one KV head of one layer read at the
    last step, on average, over all of its lists if each drafted token has its own."""
    lists = plan.batch * plan.config.cache_spec(PAGE_SIZE).kv_heads
    keys, blocks = (int(np.sum(np.asarray(x), dtype=np.int64)) for x in (runner.reads.keys, runner.reads.blocks))
    middle, low, high = (float(np.quantile(runner.seconds, q)) for q in (0.5, 0.1, 0.9))
    moved = bytes_read(plan, runner.policy, length, keys, params, runner.drafted)
    per_second = sum(moved.values()) / middle
    return _fields(plan, length, runner.policy, runner.drafted, runner.steps_per_launch) | {
        "path": runner.path,
        "median_s": middle,
        "p10_s": low,
        "p90_s": high,
        "rounds_s": runner.seconds,
        "keys_read": keys / lists,
        "blocks_read": blocks / lists,
        "reads_everything": keys == lists * (length + runner.drafted - 1),
        "bytes": moved,
        "bytes_per_s": per_second,
        "fraction_of_copy": per_second / rate,
        "temp_bytes": runner.step.memory_analysis().temp_size_in_bytes,
        "profile": runner.profile and runner.profile.figures(),
        "timeline": runner.timeline,
    }


def _each(plan: Plan) -> list[tuple[DecodePolicy, int, int]]:
    """What is timed at a length: a policy, the number of tokens that a step writes, and the number of steps of a
    launch."""
    return list(itertools.product(plan.policies, plan.drafts, plan.steps_per_launch))


def _fields(plan: Plan, length: int, policy: DecodePolicy, drafted: int, steps_per_launch: int) -> dict[str, Any]:
    named = {"op": "decode", "shape": plan.shape, "tokens": length, "batch": plan.batch, "policy": name_of(policy), "drafted": drafted}
    return named | {
        "layers": plan.config.num_layers,
        "dtype": plan.config.compute_dtype,
        "steps": plan.steps,
        "steps_per_launch": steps_per_launch,
        "describe": policy.describe(),
        "tensor": plan.tensor,
        "context": plan.context,
        "weights": plan.weights,
        "cache_format": None if plan.cache_format is None else str(plan.cache_format),
    }


def _first(plan: Plan, drafted: int) -> tuple[Int[Array, "B *T"], Bool[Array, "B"]]:
    """The first tokens of a round, and which rows are active: all of them."""
    tokens = jnp.zeros(plan.batch, jnp.int32)
    return tokens if drafted == 1 else _without_drafts(jnp.zeros((plan.batch, drafted), jnp.int32)), jnp.ones(plan.batch, bool)


def never(batch: int) -> Ends:
    """No row ends."""
    return Ends(jnp.full(batch, 2**30, jnp.int32), jnp.full((batch, STOP_IDS), -1, jnp.int32))


@jax.jit
def _without_drafts(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The first token of each row, and -1 in place of its drafts. A step writes these drafts too, and never accepts
    them."""
    return tokens.at[:, 1:].set(-1)


def pages_of(length: int) -> int:
    return -(-length // PAGE_SIZE)
