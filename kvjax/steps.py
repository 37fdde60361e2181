"""The two pure steps: prefill a chunk, decode a token. Everything stateful is built over them (`kvjax.engine`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend import attend_chunk, reader_of, write
from kvjax.cache import Cache, CacheSpec, IndexSpec
from kvjax.learning import Learning
from kvjax.model import Decoder, Heads, Params
from kvjax.policies.decode import Blocks, DecodePolicy, SelectContext
from kvjax.policies.prefill import PrefillContext, PrefillPolicy
from kvjax.sampling import Sampled, SamplingRows, count_tokens, sample


@flax.struct.dataclass
class Reads:
    """What a step's attention read, summed over layers and KV heads: listed blocks, and keys attended (in tokens)."""

    blocks: Int[Array, "B"]
    keys: Int[Array, "B"]


@functools.partial(jax.jit, static_argnames=("decoder", "policy", "indexes", "all_logits"), donate_argnames="cache")
def prefill_step(
    decoder: Decoder,
    policy: PrefillPolicy,
    indexes: tuple[IndexSpec, ...],
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B T"],
    starts: Int[Array, "B"],
    fresh: Int[Array, "B"],
    *,
    all_logits: bool = False,
    learning: Learning | None = None,
) -> tuple[Float[Array, "B *T V"], Cache, tuple[Any, ...]]:
    """Write one chunk of each row to the cache; return next-token logits and what was learned. DONATES cache.

    The chunk covers positions [starts, starts + T). Of these, [fresh, cache.lengths) are written (cache.lengths counts them); the other
    rows are padding. Because a token always sits in the row its absolute position gives it, its bits do not depend on how the history was
    cut into calls. all_logits: logits of every row, `[B, T, V]`, instead of those of the last written token, `[B, V]`; float32.
    learning: decode policies that learn from prefill; their states after the chunk come back, per policy and layer.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid = (positions >= fresh[:, None]) & (positions < cache.lengths[:, None])

    def mix(layer: int, heads: Heads, carry):
        layers, learned = carry
        written = write(cache, layers, layer, heads, positions, valid, indexes)
        ctx = PrefillContext(cache.table_of(layer), starts, cache.lengths, layer=layer, sm_scale=heads.sm_scale)
        out, states = attend_chunk(policy, heads, written, ctx, learning)
        return out, (_replace(layers, layer, written), (*learned, states))

    hidden, (layers, learned) = decoder.hidden(params, tokens, positions, mix, (cache.layers, ()))
    if not all_logits:
        last = jnp.clip(cache.lengths - 1 - starts, 0, tokens.shape[1] - 1)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return decoder.logits(params, hidden), cache.replace(layers=layers), tuple(zip(*learned, strict=True))


def decode(
    decoder: Decoder,
    policy: DecodePolicy,
    indexes: tuple[IndexSpec, ...],
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B T"],
    active: Bool[Array, "B"],
    states: tuple[Any, ...],
    *,
    watch: Callable[..., None] | None = None,
) -> tuple[Float[Array, "B T V"], Cache, tuple[Any, ...], Reads]:
    """One step: write T tokens of every active row, attend to the blocks the policy lists, return logits (float32) for each.

    cache.lengths comes in without the new tokens and goes out with them. T is 1, or a few drafted tokens. states: one per layer, from
    `policy.init`. Inactive rows write nothing and their logits mean nothing. watch: called while tracing, layer by layer, with query,
    pages, context, list, and the state that the list was made with (`kvjax.inspection`).
    """
    num_tokens = tokens.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    valid = jnp.broadcast_to(active[:, None], positions.shape)
    lengths = jnp.where(active, cache.lengths + num_tokens, 0)
    spec = cache.spec

    def mix(layer: int, heads: Heads, carry):
        layers, states, listed = carry
        table, page_size = cache.table_of(layer), spec.group_of(layer).page_size
        written = write(cache, layers, layer, heads, positions, valid, indexes)
        ctx = SelectContext(table, lengths, layer=layer, num_layers=len(spec.layers), page_size=page_size, sm_scale=heads.sm_scale)
        reader = reader_of(policy, heads)
        out, blocks, state = reader.attend(heads.q, written, ctx, states[layer])
        if watch is not None:
            watch(reader, heads.q, written, ctx, blocks, states[layer])
        return out, (_replace(layers, layer, written), _replace(states, layer, state), (*listed, blocks))

    hidden, (layers, states, listed) = decoder.hidden(params, tokens, positions, mix, (cache.layers, states, ()))
    reads = _count_reads(listed, lengths, spec, num_tokens)
    after = cache.replace(layers=layers, lengths=jnp.where(active, lengths, cache.lengths))
    return decoder.logits(params, hidden), after, states, reads


decode_step = jax.jit(decode, static_argnames=("decoder", "policy", "indexes"), donate_argnames="cache")
"""`decode`, jitted. DONATES cache."""


@functools.partial(jax.jit, static_argnames=("decoder", "policy", "indexes"), donate_argnames=("cache", "counts"))
def decode_and_sample(
    decoder: Decoder,
    policy: DecodePolicy,
    indexes: tuple[IndexSpec, ...],
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B"],
    active: Bool[Array, "B"],
    states: tuple[Any, ...],
    rows: SamplingRows,
    counts: Int[Array, "B V"] | None = None,
) -> tuple[Sampled, Cache, tuple[Any, ...], Reads]:
    """One step from token to next token in one call. DONATES cache and counts.

    counts: where `rows.penalises`, which tokens each row held before this step; the tokens written now are counted into it.
    """
    logits, cache, states, reads = decode(decoder, policy, indexes, params, cache, tokens[:, None], active, states)
    counts = count_tokens(counts, tokens, active) if rows.penalises else counts
    return sample(logits[:, 0], rows, cache.lengths, counts), cache, states, reads


def _count_reads(listed: tuple[Blocks | None, ...], lengths: Int[Array, "B"], spec: CacheSpec, num_tokens: int) -> Reads:
    """Blocks listed and keys attended, summed over layers and KV heads. With several query tokens: what any of them attends.

    listed: of each layer, None for every page. Layers with lists of one kind are counted together: a count of its own for each would
    be a launch for each.
    """
    reads = Reads(jnp.zeros_like(lengths), jnp.zeros_like(lengths))
    for group in spec.groups:
        dense = sum(spec.layers[layer].kv_heads for layer in spec.layers_of(group.name) if listed[layer] is None)
        reads = Reads(reads.blocks + -(-lengths // group.page_size) * dense, reads.keys + lengths * dense)
    kinds: dict[tuple, list[Array]] = {}
    for blocks in listed:
        if blocks is not None:
            kinds.setdefault((blocks.block_size, blocks.window, blocks.ids.shape), []).append(blocks.ids)
    for (size, window, _), ids in kinds.items():
        reads = jax.tree.map(jnp.add, reads, _count_listed(jnp.stack(ids, axis=1), size, window, lengths, num_tokens))
    return reads


def _count_listed(
    ids: Int[Array, "B L K W"], size: int, window: tuple[int, int] | None, lengths: Int[Array, "B"], num_tokens: int
) -> Reads:
    lengths = lengths[:, None, None, None]
    start, stop = ids * size, jnp.minimum((ids + 1) * size, lengths)
    keys = jnp.maximum(stop - start, 0)
    if window is not None:
        sink_tokens, window_tokens = window
        oldest = jnp.maximum(lengths - num_tokens - (window_tokens - 1), sink_tokens)
        keys = jnp.maximum(jnp.minimum(stop, sink_tokens) - start, 0) + jnp.maximum(stop - jnp.maximum(start, oldest), 0)
    there = ids >= 0
    return Reads(there.sum((1, 2, 3), dtype=jnp.int32), jnp.where(there, keys, 0).sum((1, 2, 3), dtype=jnp.int32))


def _replace(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
