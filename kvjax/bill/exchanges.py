"""What the devices of a mesh exchange in a decode step, counted from the configuration alone (docs/devices.md says why they do).

A test compiles steps and counts what their programs exchange, so this module cannot count something else.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.dtypes
import jax.numpy as jnp
import numpy as np

from kvjax.axes import CONTEXT, TENSOR
from kvjax.cache.spec import LatentSpec
from kvjax.layers import DeltaLayer
from kvjax.model import ModelConfig
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.top_blocks import TopBlocks
from kvjax.policies.decode.top_tokens import TopTokens
from kvjax.policies.decode.window import Window
from pallas_kernels.all_gather.api import KERNEL_BYTES
from pallas_kernels.all_reduce.xla import GATHERED_BYTES
from pallas_kernels.select_blocks import selection_width

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
    """Layers in which the best of several devices are chosen, where pages are dealt out."""
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
