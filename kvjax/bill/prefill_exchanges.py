"""What the devices of a mesh exchange while they read a prompt, counted from the configuration alone (docs/devices.md says why they do),
and how long it takes by a bill's terms.

A test lowers the programs of a chunk and counts what they exchange, so this module cannot count something else. No prefill was timed on
several devices: terms of decode steps are used, and figures are marked so.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.axes import CONTEXT, TENSOR
from kvjax.bill.exchanges import ALL_GATHER, ALL_REDUCE, Exchange
from kvjax.bill.mesh_terms import MeshTerms
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.spec import LatentSpec, LayerSpec, RecurrentSpec
from kvjax.cache.tables import staged_width
from kvjax.chunk_rows import in_parts, tiles_each
from kvjax.layers import LatentLayer
from kvjax.model import ModelConfig
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, MeasureOnceMaskOnce, PrefillPolicy, SinkWindow, indexes_of, query_tile_of

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

UNFITTED, ASSUMED, EXTRAPOLATED = "unfitted", "assumed", "extrapolated"
PREFILL_MARKS = {
    UNFITTED: "counted; this bill has no terms for exchanges",
    ASSUMED: "with values set by hand",
    EXTRAPOLATED: "by terms of decode steps, whose exchanges are smaller, and may be much too long: no prompt is fitted",
}
"""How the seconds of an exchange are known. None is measured."""


class PrefillPart(NamedTuple):
    """Exchanges of one kind in all chunks of a prompt. received: bytes that each device gets. seconds: None where nothing is known of them.
    mark: in `PREFILL_MARKS`."""

    name: str
    axis: str
    count: int
    received: float
    seconds: float | None
    mark: str


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


def prefill_parts(
    terms: MeshTerms | None, config: ModelConfig, policy: PrefillPolicy, length: int, chunk: int, *, tensor: int = 1, **options: Any
) -> tuple[PrefillPart, ...]:
    """The exchanges of a prompt, by what they are for. terms: a bill's; None: it has none. Other arguments as of `prompt_exchanges`."""
    exchanges, parts = prompt_exchanges(config, policy, length, chunk, tensor=tensor, **options), []
    for part, axis in dict.fromkeys((each.part, each.axis) for each in exchanges):
        own = [each for each in exchanges if (each.part, each.axis) == (part, axis)]
        count, received = sum(each.count for each in own), sum(each.received for each in own)
        if terms is None:
            seconds, mark = None, UNFITTED
        else:
            seconds = sum(terms.seconds_of(each, tensor) for each in own)
            mark = ASSUMED if any(terms.assumes(each, tensor) for each in own) else EXTRAPOLATED
        parts.append(PrefillPart(PREFILL_PARTS[part], axis, count, received, seconds, mark))
    return tuple(parts)
