"""The bytes that a decode step has to read, computed from the configuration alone.

Source: the memory-traffic model of "Attention Pays Its Bill" (BRL-2026-07, section 2). Counted are the weights, the
keys and values that attention reads, the index rows that the selector scans, and the states of recurrent layers.
Activations, logits, the new token's keys and values, and page tables are left out, because they are less than a
thousandth of the total.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp

from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.spec import LatentSpec, PagedSpec
from kvjax.engine.paged_attention import lists_pages
from kvjax.model.config import ModelConfig
from kvjax.model.weight_formats import FormatOf, format_function, table_shape, weights_bytes
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.cascade import Cascade
from kvjax.policies.decode.top_tokens import TopTokens
from pallas_kernels.core.page_format import CODES


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads: `weights`, `kv`, `index`, and `states` of recurrent layers.

    Of `kv`, in an engine with pages in host memory: in_place: read there, over the bus. listed: of pages there, looked
    up in the hot buffer; those not found are copied over the bus first, and all are read on the device. hot_layers:
    layers that look up lists in a hot buffer.
    """

    weights: int
    kv: int
    index: int
    states: int = 0
    in_place: int = 0
    listed: int = 0
    hot_layers: int = 0

    @property
    def total(self) -> int:
        """All bytes of the step."""
        return self.weights + self.kv + self.index + self.states

    @property
    def from_device(self) -> int:
        """Bytes that come from device memory."""
        return self.total - self.in_place

    def over_bus(self, hits: float) -> float:
        """Bytes that come over the bus, if a share of `hits` of the listed ones is found in the hot buffer."""
        return self.in_place + self.listed * (1 - hits)


def step_bytes(
    config: ModelConfig,
    policy: DecodePolicy,
    length: int,
    batch: int = 1,
    *,
    dtype: Any = None,
    weights: str | FormatOf | None = None,
    cache_format: str | CacheFormat | None = None,
    page_size: int = 128,
    frames: FrameCounts | None = None,
    tensor: int = 1,
    context: int = 1,
    measured_keys: float | None = None,
) -> StepBytes:
    """Bytes of one step of `batch` sequences of `length` tokens each, the current token included.

    dtype: of what is not packed, and of the index (None: the model's compute_dtype). weights: how matrices are packed,
    as in `kvjax.load`, or a function that says it; None: they are not. cache_format: how full pages are packed
    (`kvjax.cache.formats`); None: they are not. Scales count, those of channels and pages in proportion to the tokens
    that are read; the open page of each sequence is not packed. page_size: tokens. Every weight is read once, whatever
    the batch; but if the embedding is not also the head, only one row of it per sequence. Index rows are counted for
    whole pages, in layers where the policy selects. Of `Cascade`, codes are counted for the shortlist, and as kv the
    cache's own keys that it reads to choose, once more than attention reads them. Sink and local keys count once where
    `selected_attention` chooses, as its launch on Hopper GPUs reads them; on other devices, and for inputs that this
    kernel refuses, plain XLA reads them twice. In layers of latents, the indexer's key of every token is counted, if
    the policy ranks by it.

    measured_keys: what a KV head of a layer with lists attended to per step (`keys_per_step` of a run), in place of
    what the policy says. `Cascade` with a share says only the most that it may read.

    frames: those of an engine with pages in host memory (`kvjax.engine.memory.pool_frames`). The pages that the device
    has no frames for are the first ones of each sequence. Of a list, as many keys lie there as the policy's
    `keys_among` says; without that method they count as spread evenly. Packed pages are there as codes and scales; open
    pages are on the device.

    tensor, context: of a mesh; the bytes are then those of one device, the one with the most pages, all open ones among
    them. Of a list, each device along `context` reads an equal share, as if listed keys were spread evenly; so it does
    of codes and keys by which `Cascade` chooses. Where devices hold the same KV heads, each reads them.

    Raises ValueError for sizes below 1, dtypes, weights and formats that are not known, frames with a mesh, and heads
    or MLP columns that do not divide; NotImplementedError for a policy that does not say what it reads, and for
    `Cascade` with frames.
    """
    _check(policy, {"length": length, "batch": batch, "page_size": page_size, "tensor": tensor, "context": context}, frames)
    stored = dataclasses.replace(config, compute_dtype=config.compute_dtype if dtype is None else _name(dtype))
    packed = parse_cache_format(cache_format, stored.compute_dtype)
    pages = -(-batch * -(-length // page_size) // context)  # of the device that has most
    tokens = batch * length if context == 1 else min(batch * length, pages * page_size)
    opened = batch * ((length - 1) % page_size + 1)
    kv = in_place = listed = 0.0
    index_elements = code_bytes = hot_layers = 0
    away = 0.0 if frames is None else pages_on_host(frames, length, batch, page_size) / batch  # pages of each sequence
    spec = stored.cache_spec(page_size, packed).on_mesh(tensor).on_device(tensor)
    full = list(itertools.accumulate((spec.group_of(number).window is None for number in spec.paged), initial=0))  # before each layer
    for place, number in enumerate(spec.paged):
        layer, window = spec.layers[number], spec.group_of(number).window
        if window is not None:
            kv += layer.token_bytes(page_size, -(-batch * min(length, window) // context), opened)
            continue
        keys = policy.keys_read(length, place, page_size)
        there = batch * _keys_on_host(policy, away * page_size, length, place, page_size)
        if keys is not None and measured_keys is not None:
            keys, there = math.ceil(measured_keys), there * measured_keys / keys
        kv += layer.token_bytes(page_size, tokens if keys is None else -(-batch * keys // context), opened)
        there = layer.token_bytes(page_size, there)
        if frames is not None and frames.hot and keys is not None and isinstance(layer, PagedSpec) and lists_pages(policy, page_size):
            hot_layers, listed = hot_layers + 1, listed + there
        else:
            in_place += there
        if isinstance(layer, LatentSpec):
            index_elements += tokens * layer.index_dim if isinstance(policy, TopTokens) else 0
        elif isinstance(policy, Cascade) and full[place] % policy.every:
            pass  # it reads the list of an earlier layer
        elif isinstance(policy, Cascade):
            how = {"packed": layer.k_packed is not None, "sharded": context > 1}
            bounds, *others = policy.reads_to_choose(length, page_size, layer.head_dim, **how)
            codes, own = (-(-batch * layer.kv_heads * each // context) for each in others)
            index_elements += pages * layer.kv_heads * bounds // -(-length // page_size)  # bounds are those of whole pages
            code_bytes, kv = code_bytes + codes, kv + own * layer.key_bytes(page_size) / layer.head_dim
        elif keys is not None:
            sizes = (pages, layer.kv_heads, page_size, layer.head_dim)
            index_elements += sum(math.prod(index.shape(*sizes)) for index in policy.indexes())
    return StepBytes(
        weights=_weights_read(stored, weights, batch, tensor),
        kv=round(kv),
        index=index_elements * jnp.dtype(stored.compute_dtype).itemsize + code_bytes,
        states=batch * sum(spec.bytes_per_page(group) for group in spec.state_groups),
        in_place=round(in_place),
        listed=round(listed),
        hot_layers=hot_layers,
    )


def rows_bytes(table: int, rows: int, count: int) -> int:
    """Bytes of some rows of an embedding that takes `table` bytes, their share of scales included."""
    return round(count * table / rows)


def _check(policy: DecodePolicy, sizes: dict[str, int], frames: FrameCounts | None) -> None:
    """Raise as `step_bytes` does."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not hasattr(policy, "keys_read"):
        raise NotImplementedError(f"policy {policy} does not say what it reads: give it keys_read(length, layer, page_size)")
    if frames is not None and sizes["tensor"] * sizes["context"] > 1:
        raise ValueError("pages of a mesh are on its devices alone: leave out frames, or the mesh")
    if frames is not None and isinstance(policy, Cascade):
        raise NotImplementedError(f"what policy {policy} reads to choose is counted in device memory alone: leave out frames")


@functools.lru_cache(maxsize=256)
def _weights_read(config: ModelConfig, weights: str | FormatOf | None, batch: int, tensor: int) -> int:
    """Bytes of weights that a step reads on one device: all, but only a row of the embedding for each sequence if it is
    not the head."""
    format_of = format_function(weights)
    total = weights_bytes(config, format_of, tensor=tensor)
    if config.tie_embeddings:
        return total
    shape = table_shape(config, tensor)
    packed = None if format_of is None else format_of(None, "embed", shape)
    table = math.prod(shape) * jnp.dtype(config.compute_dtype).itemsize if packed is None else packed.bytes_of(shape)
    return total - table + rows_bytes(table, shape[0], batch)


def pages_on_host(frames: FrameCounts, length: int, batch: int = 1, page_size: int = 128) -> int:
    """How many pages of `batch` sequences of `length` tokens lie in host memory, if these frames hold nothing else. The
    device keeps the newest pages."""
    return max(0, batch * -(-length // page_size) - frames.device)


def _keys_on_host(policy: DecodePolicy, first: float, length: int, layer: int, page_size: int) -> float:
    """Keys of a step that are among the first `first` tokens of a sequence, which lie in host memory."""
    if not first:
        return 0.0
    first, keys = min(first, length), policy.keys_read(length, layer, page_size)
    if keys is None:
        return first
    return policy.keys_among(first, length, layer, page_size) if hasattr(policy, "keys_among") else keys * first / length


def _name(dtype: Any) -> str:
    """The name of a dtype of weights and pages that are not packed."""
    try:
        known = jnp.dtype(dtype).name
    except TypeError:
        known = ""
    if known not in CODES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(CODES)}; what is packed is said by weights and cache_format")
    return known
