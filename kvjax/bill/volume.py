"""The bytes that a decode step has to read, computed from the configuration alone.

Source: the memory-traffic model of "Attention Pays Its Bill" (BRL-2026-07, section 2). Counted are the weights, the keys and values that
attention reads, the index rows that the selector scans, and the states of recurrent layers. Activations, logits, the new token's keys and
values, and page tables are left out, because they are less than a thousandth of the total.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.dtypes
import jax.numpy as jnp

from kvjax.cache.spec import LatentSpec
from kvjax.model import ModelConfig
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.top_tokens import TopTokens

TIERS = ("device", "host", "disk")
"""Where keys and values may be stored. Weights and indexes are always on the device (BRL-2026-07, section 10)."""


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads: `weights`, `index` and `states` (of recurrent layers) from device memory, `kv` from `tier`."""

    weights: int
    kv: int
    index: int
    tier: str = "device"
    states: int = 0

    def __post_init__(self):
        if self.tier not in TIERS:
            raise ValueError(f"tier {self.tier!r} is unknown; there are {', '.join(TIERS)}")

    @property
    def total(self) -> int:
        """All bytes of the step."""
        return self.weights + self.kv + self.index + self.states

    @property
    def from_device(self) -> int:
        """Bytes that come from device memory."""
        return self.total if self.tier == "device" else self.total - self.kv


def step_bytes(
    config: ModelConfig,
    policy: DecodePolicy,
    length: int,
    batch: int = 1,
    *,
    dtype: Any = None,
    cache_dtype: Any = None,
    page_size: int = 128,
    tier: str = "device",
) -> StepBytes:
    """Bytes of one step of `batch` sequences of `length` tokens each, the current token included.

    dtype: of weights and index (None: the model's compute_dtype). cache_dtype: of keys and values (None: dtype); packed types count their
    bits, without scales. page_size: tokens. tier: where keys and values are stored ("device", "host", "disk"). Every weight is read once,
    whatever the batch; but if the embedding is not also the head, only one row of it per sequence. Index rows are counted for whole pages,
    in layers where the policy selects. In layers of latents, the indexer's key of every token is counted, if the policy ranks by it.

    Raises ValueError for sizes below 1 and unknown dtypes, and NotImplementedError for a policy that does not say what it reads.
    """
    for name, value in (("length", length), ("batch", batch), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not hasattr(policy, "keys_read"):
        raise NotImplementedError(f"policy {policy} does not say what it reads: give it keys_read(length, layer, page_size)")
    dtype = config.compute_dtype if dtype is None else dtype
    weights = config.num_params
    if not config.tie_embeddings:
        weights += (batch - config.vocab_size) * config.hidden_size
    kv_elements = index_elements = 0
    spec = config.cache_spec(page_size)
    for place, number in enumerate(spec.paged):
        layer, window = spec.layers[number], spec.group_of(number).window
        if window is not None:
            kv_elements += min(length, window) * layer.width
            continue
        keys = policy.keys_read(length, place, page_size)
        kv_elements += (length if keys is None else keys) * layer.width
        if isinstance(layer, LatentSpec):
            index_elements += length * layer.index_dim if isinstance(policy, TopTokens) else 0
        elif keys is not None:
            sizes = (-(-length // page_size), layer.kv_heads, page_size, layer.head_dim)
            index_elements += sum(math.prod(index.shape(*sizes)) for index in policy.indexes())
    return StepBytes(
        weights=_bytes(weights, dtype),
        kv=_bytes(batch * kv_elements, dtype if cache_dtype is None else cache_dtype),
        index=_bytes(batch * index_elements, dtype),
        tier=tier,
        states=batch * sum(spec.bytes_per_page(group) for group in spec.row_groups),
    )


def _bytes(elements: int, dtype: Any) -> int:
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype {dtype!r} is not known; write it as bfloat16, float32, int8, int4 or float8_e4m3fn") from None
    return -(-elements * jax.dtypes.itemsize_bits(known) // 8)
