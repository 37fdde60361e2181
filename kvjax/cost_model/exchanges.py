"""What the devices of a mesh exchange in a decode step and in prefill, counted from the configuration alone, and how long it takes.

docs/devices.md says why they exchange. Tests lower steps and chunks and count what their programs exchange, so this module cannot count
something else. The time is one term: bytes over a rate, and a latency for each exchange.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.dtypes
import jax.numpy as jnp
import numpy as np

from kvjax.axes import CONTEXT, TENSOR
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_tables import staged_width
from kvjax.cache.spec import LatentSpec, LayerSpec, RecurrentSpec
from kvjax.checks import check_amount, check_rows, check_text
from kvjax.engine.sequence_parallel import in_parts, tiles_each
from kvjax.model.config import ModelConfig
from kvjax.model.layers import DeltaLayer, LatentLayer
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.top_tokens import TopTokens
from kvjax.policies.decode.window import Window
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, MeasureOnceMaskOnce, PrefillPolicy, SinkWindow, indexes_of, query_tile_of
from pallas_kernels.collectives.all_gather.api import KERNEL_BYTES
from pallas_kernels.collectives.all_reduce.xla import GATHERED_BYTES
from pallas_kernels.selection.select_blocks import selection_width

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
KINDS = (ALL_REDUCE, ALL_GATHER)

PARTS = {
    "products": "sums of the embedding and of every o and down projection",
    "logits": "logits, side by side",
    "merge": "outputs of attention and their log-sum-exp",
    "candidates": "the best blocks or tokens that each device found, with their scores, and sums of attention that scores need",
    "counts": "how many blocks and keys were read",
}
"""What a step exchanges."""


class Exchange(NamedTuple):
    """`count` exchanges of a step that are alike.

    part: in `PARTS`. kind: in `KINDS`. axis, size: of the mesh. bytes: of the array that each device gives to each of them.
    """

    part: str
    kind: str
    axis: str
    size: int
    count: int
    bytes: int

    @property
    def received(self) -> float:
        """Bytes that each device receives in all of them: the arrays of all others, but for large sums, which go round in a ring: twice its
        array, but for its own share."""
        ring = self.kind == ALL_REDUCE and not self.sent_whole
        return self.count * (2 * self.bytes * (self.size - 1) / self.size if ring else self.bytes * (self.size - 1))

    @property
    def sent_whole(self) -> bool:
        """Whether it is a sum by `pallas_kernels.all_reduce` in which every device gets the arrays of all others."""
        return self.kind == ALL_REDUCE and (self.size == 2 or self.size * self.bytes <= GATHERED_BYTES)


MEASURE_EXCHANGES = (
    "measure them: kvjax bench decode --tensor 1,2,4 --context 1,2,4 --steps-per-launch 1,8 --json FILE, then kvjax cost fit FILE; "
    "or assume them: --exchange-latency-us and --link-bandwidth"
)


@dataclasses.dataclass(frozen=True)
class ExchangeTerm:
    """What the exchanges of a step cost: count * latency_s + bytes received / link_per_s + layers that choose * choose_s.

    model: the name of the measured model. latency_s: seconds of one exchange, whatever its kind and its devices. link_per_s: bytes per
    second that a device receives; inf where bytes took no time that could be told. choose_s: seconds of a layer that chooses the best of
    several devices; None: not measured. policies: those that were timed. measured: (tensor, context, batch, shortest, longest), lengths in
    tokens. error: mean relative error of held-out steps. assumed: what was set by hand.
    """

    model: str
    latency_s: float
    link_per_s: float
    choose_s: float | None
    policies: tuple[str, ...] = ()
    measured: tuple[tuple[int, int, int, int, int], ...] = ()
    error: float = 0.0
    assumed: tuple[str, ...] = ()

    def __post_init__(self):
        for text in (self.model, *self.policies, *self.assumed):
            check_text("each of model, policies and assumed of the exchanges", text)
        if self.link_per_s != math.inf:
            check_amount("link_per_s of the exchanges", self.link_per_s, above_zero=True)
        for name in ("latency_s", "error") if self.choose_s is None else ("latency_s", "choose_s", "error"):
            check_amount(f"{name} of the exchanges", getattr(self, name))
        check_rows("measured of the exchanges", self.measured, 5)

    def seconds(self, exchanges: Iterable[Exchange], choosing: int = 0) -> float:
        """Seconds of exchanges, and of `choosing` layers that choose over devices. ValueError if that choice was not measured."""
        if choosing and self.choose_s is None:
            raise ValueError(f"the choice over the devices of context was not measured on {self.model}; {MEASURE_EXCHANGES}")
        exchanges = tuple(exchanges)
        counted, received = sum(each.count for each in exchanges), sum(each.received for each in exchanges)
        return counted * self.latency_s + received / self.link_per_s + choosing * (self.choose_s or 0.0)

    def __str__(self) -> str:
        link = "bytes not told from nothing" if math.isinf(self.link_per_s) else f"{self.link_per_s / 1e9:.1f} GB/s"
        choice = "choice not measured" if self.choose_s is None else f"{self.choose_s * 1e6:.1f} us a layer that chooses"
        how = f"ASSUMED: {'; '.join(self.assumed)}" if self.assumed else f"error {self.error:.1%}"
        return f"exchanges: {self.latency_s * 1e6:.1f} us each, {link}, {choice}, {how}"


def assumed_exchanges(latency_us: float, link_gigabytes: float) -> ExchangeTerm:
    """A term set by hand: microseconds of an exchange, and GB/s that a device receives."""
    said = f"{latency_us:g} us an exchange, {link_gigabytes:g} GB/s, nothing for the choice over devices"
    return ExchangeTerm("no model", latency_us * 1e-6, link_gigabytes * 1e9, 0.0, assumed=(said,))


@functools.lru_cache(maxsize=1024)
def step_exchanges(
    config: ModelConfig,
    policy: DecodePolicy,
    batch: int = 1,
    *,
    tensor: int = 1,
    context: int = 1,
    dtype: Any = None,
    page_size: int = 128,
) -> tuple[Exchange, ...]:
    """What a step of one token of `batch` sequences exchanges on a mesh; () on one device. How long the sequences are does not matter.

    dtype: of activations; None: the model's compute_dtype. Raises ValueError for heads or MLP columns that do not divide, and
    NotImplementedError for policies other than dense, windows, the best blocks, cascades and the best tokens.
    """
    if type(policy) not in (Dense, Window, TopBlocks, Cascade, TopTokens):
        raise NotImplementedError(
            f"what policy {policy} exchanges on a mesh is not counted: name dense, window, top, mean, quest, cascade or tokens"
        )
    item = jax.dtypes.itemsize_bits(jnp.dtype(config.compute_dtype if dtype is None else dtype)) // 8
    own, spec = config.on_shards(tensor), config.cache_spec(page_size).on_mesh(tensor).on_device(tensor)
    found: collections.Counter[tuple[str, str, str, int]] = collections.Counter()
    found["products", ALL_REDUCE, TENSOR, batch * config.hidden_size * item] = 1 + 2 * config.num_layers
    found["logits", ALL_GATHER, TENSOR, batch * -(-config.vocab_size // tensor) * 4] = 1
    lists, full = set(), 0
    for number, layer in enumerate(own.layers):
        if isinstance(layer.mixer, DeltaLayer):
            continue
        kept, place = spec.layers[number], spec.paged.index(number)
        reader = policy if layer.mixer.window is None else Window(0, layer.mixer.window)
        width = kept.latent_dim if isinstance(kept, LatentSpec) else kept.head_dim
        found["merge", ALL_GATHER, CONTEXT, batch * layer.mixer.num_heads * width * item] += 1
        found["merge", ALL_GATHER, CONTEXT, batch * layer.mixer.num_heads * 4] += 1
        listed = selects(reader, place)
        if listed and not isinstance(reader, Window) and not (isinstance(reader, Cascade) and full % reader.every):
            for width in _widths(reader, page_size):
                found["candidates", ALL_GATHER, CONTEXT, batch * kept.kv_heads * width * 4] += 2
            if isinstance(reader, Cascade):  # sums of attention: of sink and local keys, and of candidates
                found["candidates", ALL_GATHER, CONTEXT, batch * layer.mixer.num_heads * 2 * 4] += 1
        full += layer.mixer.window is None
        if listed:
            lists.add(kept.copies)
    found["counts", ALL_GATHER, TENSOR, batch * 4] = 2 * len(lists)
    sizes = {TENSOR: tensor, CONTEXT: context}
    return tuple(
        Exchange(part, kind, axis, sizes[axis], count, each)
        for (part, kind, axis, each), count in found.items()
        if count and sizes[axis] > 1
    )


def selects(policy: DecodePolicy, place: int) -> bool:
    """Whether a policy lists blocks or tokens in the layer that is number `place` of those that attend to pages."""
    return not isinstance(policy, Dense) and not (isinstance(policy, TopBlocks) and place < policy.dense_layers)


def layers_that_choose(config: ModelConfig, policy: DecodePolicy) -> int:
    """Layers in which the best of several devices are chosen, where pages are sharded."""
    spec = config.cache_spec(page_size=1)
    full = [place for place, number in enumerate(spec.paged) if spec.group_of(number).window is None]
    chosen = full[:: policy.every] if isinstance(policy, Cascade) else full
    return 0 if isinstance(policy, Window) else sum(selects(policy, place) for place in chosen)


def _widths(policy: TopBlocks | Cascade | TopTokens, page_size: int) -> tuple[int, ...]:
    """Entries of the lists for one KV head whose best are found over devices."""
    if isinstance(policy, TopTokens):
        return (policy.k,)
    sizes = {"page_size": page_size, "block_size": policy.block_size, "sink": policy.sink, "local": policy.local}
    if not isinstance(policy, Cascade):
        return (selection_width(k=policy.k, **sizes),)
    shortlist = () if policy.shortlist == "all" else (selection_width(k=policy.shortlist, **sizes),)
    return (*shortlist, policy.k)


PREFILL_PARTS = {
    "products": "sums of the embedding and of every o and down projection",
    "keys": "keys and values of the chunk, latents, or inputs of recurrences",
    "queries": "queries of the chunk, where a policy looks at more of them than a device has",
    "outputs": "outputs of attention, where a device's part of the chunk is not whole tiles of the policy",
    "places": "which device has which page",
    "pages": "keys and values of all pages up to the chunk's end, and their indexes",
    "hidden": "the last layer's output, after the last chunk",
    "logits": "logits after the last chunk, side by side",
}
"""What prefill exchanges."""

COUNTED = (DensePrefill, SinkWindow, BoundsBlocks, MeasureOnceMaskOnce)
"""Policies that exchange nothing themselves."""


@functools.lru_cache(maxsize=1024)
def chunk_exchanges(
    config: ModelConfig,
    policy: PrefillPolicy,
    pages: int,
    chunk: int,
    *,
    tensor: int = 1,
    context: int = 1,
    dtype: Any = None,
    page_size: int = 128,
    last: bool = False,
) -> tuple[Exchange, ...]:
    """What one chunk of prefill exchanges on a mesh; () on one device.

    Args:
        pages: columns of its page table: `staged_width` of the pages up to its end.
        chunk: its tokens.
        dtype: of activations; None: the model's compute_dtype.
        last: whether the prompt's logits follow.

    Raises ValueError for heads or MLP columns that do not divide, and NotImplementedError for policies not in `COUNTED`.
    """
    if type(policy) not in COUNTED:
        raise NotImplementedError(f"what prefill {policy} exchanges on a mesh is not counted: name dense, window, bounds or momo")
    config = config if dtype is None else dataclasses.replace(config, compute_dtype=dtype)
    item, dealt = jnp.dtype(config.compute_dtype).itemsize, context > 1 and chunk % (2 * context) == 0
    rows = chunk // context if dealt else chunk
    own, spec = config.on_shards(tensor), config.cache_spec(page_size).on_mesh(tensor).on_device(tensor)
    found: collections.Counter[tuple[str, str, str, int]] = collections.Counter()

    def gathered(part: str, axis: str, size: int) -> None:
        found[part, ALL_GATHER, axis, size] += 1

    found["products", ALL_REDUCE, TENSOR, rows * config.hidden_size * item] = 1 + 2 * config.num_layers
    for number, layer in enumerate(own.layers):
        kept = spec.layers[number]
        for size in _keys(kept, rows, item) if dealt else ():
            gathered("keys", CONTEXT, size)
        if context == 1 or isinstance(kept, RecurrentSpec):
            continue
        window = layer.mixer.window if not isinstance(layer.mixer, LatentLayer) else None
        gathered("places", CONTEXT, pages * 4)
        for size in _brought(kept, pages // context, page_size, indexes_of(policy) if window is None else ()):
            gathered("pages", CONTEXT, size)
        tile = query_tile_of(policy) if window is None else 1
        if dealt and not in_parts(rows, tile):
            gathered("queries", CONTEXT, rows * layer.mixer.num_heads * _query_width(kept) * item)
            for width, each in _asked(layer.mixer, item):
                gathered("queries", CONTEXT, rows * width * each)
            if tile is not None and chunk > tile:
                width = kept.latent_dim if isinstance(kept, LatentSpec) else kept.head_dim
                gathered("outputs", CONTEXT, tiles_each(chunk, tile, context) * tile * layer.mixer.num_heads * width * item)
    if last:
        gathered("logits", TENSOR, -(-config.vocab_size // tensor) * 4)
    if last and dealt:
        gathered("hidden", CONTEXT, rows * config.hidden_size * item)
    sizes = {TENSOR: tensor, CONTEXT: context}
    return tuple(
        Exchange(part, kind, axis, sizes[axis], count, each) for (part, kind, axis, each), count in found.items() if sizes[axis] > 1
    )


def _keys(kept: LayerSpec, rows: int, item: int) -> list[int]:
    """Bytes of each array of a layer's keys and values, or of what takes their place, of so many tokens."""
    if isinstance(kept, RecurrentSpec):
        return [rows * kept.channels * item, rows * kept.value_heads * 4, rows * kept.value_heads * 4]
    if isinstance(kept, LatentSpec):
        return [rows * (kept.latent_dim + kept.rope_dim) * item, rows * kept.index_dim * item]
    return [] if kept.share_with is not None else [rows * kept.kv_heads * kept.head_dim * item] * 2


def _brought(kept: LayerSpec, rows: int, page_size: int, indexes: tuple[IndexSpec, ...]) -> list[int]:
    """Bytes of each array of so many pages that a device gives to a layer that reads them."""
    latent = isinstance(kept, LatentSpec)
    read = kept if latent else dataclasses.replace(kept, share_with=None)
    layer = jax.eval_shape(lambda: read.empty(rows, page_size, () if latent else indexes))
    return [each.size * each.dtype.itemsize for each in jax.tree.leaves((layer.pages, layer.index))]


def _query_width(kept: LayerSpec) -> int:
    return kept.latent_dim + kept.rope_dim if isinstance(kept, LatentSpec) else kept.head_dim


def _asked(mixer: Any, item: int) -> list[tuple[int, int]]:
    """Elements of a token's indexer queries and of their weights, and the bytes of each."""
    return [(mixer.index_heads * mixer.index_dim, item), (mixer.index_heads, 4)] if isinstance(mixer, LatentLayer) else []


def prompt_exchanges(
    config: ModelConfig, policy: PrefillPolicy, length: int, chunk: int, *, page_size: int = 128, **mesh: Any
) -> tuple[Exchange, ...]:
    """What all chunks of a prompt of `length` tokens exchange. Other arguments and errors as of `chunk_exchanges`."""
    found: collections.Counter[Exchange] = collections.Counter()
    for end in [*range(chunk, length, chunk), length]:
        pages = staged_width(-(-end // page_size))
        for each in chunk_exchanges(config, policy, pages, chunk, page_size=page_size, last=end == length, **mesh):
            found[each._replace(count=0)] += each.count
    return tuple(each._replace(count=count) for each, count in found.items())


Counts = dict[tuple[str, str, int, int], int]
"""How many exchanges, by kind, axis, size of the axis, and bytes of each device's array."""


def counts_of(exchanges: Iterable[Exchange], sums: str = "xla", gathers: str = "xla") -> Counts:
    """Counts of exchanges as a program asks XLA for them, whatever they are for.

    sums, gathers: the implementations of `pallas_kernels.all_reduce`, which adds products, and of `all_gather`, which exchanges everything
    else. "xla" asks XLA for a gather. A kernel does not ask XLA, and that of `all_gather` leaves large arrays to it.
    NotImplementedError for sums so large that "xla" sends them in parts.
    """
    found: Counts = collections.Counter()
    for each in exchanges:
        kind = each.kind
        if each.part != "products":
            if each.part in PARTS and gathers != "xla" and each.bytes <= KERNEL_BYTES:
                continue
        else:
            if sums != "xla":
                continue
            if not each.sent_whole:
                raise NotImplementedError(f"a sum of {each.bytes:,} bytes over {each.size} devices goes in parts, which are not counted")
            kind = ALL_GATHER
        found[kind, each.axis, each.size, each.bytes] += each.count
    return dict(found)


_OPERATION = re.compile(r"= (\([^=]*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d+)[a-z0-9]*\[([\d,]*)\]")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def counts_in(program: str, tensor: int) -> Counts:
    """Counts of the exchanges in the text of a program in HLO, lowered or compiled, that was made for a mesh of `kvjax.mesh`.

    An exchange of several arrays at once counts as one, with the bytes of all. tensor: of the mesh. ValueError for an exchange of another
    kind, or one that does not run along one axis: nothing is left out.
    """
    found: Counts = collections.Counter()
    for line in program.splitlines():
        operation = _OPERATION.search(line)
        if operation is None:
            continue
        results, name, begins = operation.groups()
        kind, along = name.replace("-", "_"), _along(line, tensor)
        if kind not in KINDS or along is None:
            raise ValueError(f"the program has an exchange that is none of {', '.join(KINDS)} along one axis: {line.strip():.300}")
        arrays = [_bytes(*each) for each in _ARRAY.findall(results)]
        if begins and kind == ALL_GATHER:  # its result names what it takes, too
            arrays = arrays[len(arrays) // 2 :]
        found[kind, *along, sum(arrays) // (along[1] if kind == ALL_GATHER else 1)] += 1
    return dict(found)


def _along(line: str, tensor: int) -> tuple[str, int] | None:
    """The axis of an exchange, and its size; None if it is not one axis of the mesh."""
    if named := _NAMED.search(line):
        names = re.findall(r"'(\w+)'", named[2])
        return (names[0], int(re.search(rf"'{names[0]}'=(\d+)", named[1])[1])) if len(names) == 1 else None
    if groups := _GROUPS.search(line):
        first = [int(each) for each in groups[1].split(",")]
    elif iota := _IOTA.search(line):
        shape, sizes, order = ([int(each) for each in part.split(",")] if part else None for part in iota.groups())
        first = np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(shape)[0].tolist()
    else:
        return None
    step = first[1] - first[0] if len(first) > 1 else 0
    if len(first) == tensor and step == 1:
        return TENSOR, tensor
    return (CONTEXT, len(first)) if step == tensor else None


def _bytes(kind: str, bits: str, shape: str) -> int:
    count = int(bits) // 8
    for size in filter(None, shape.split(",")):
        count *= int(size)
    return count
