"""What one decode step reads: the lists of every layer and KV head, with scores. `Engine.inspect` runs it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from kvjax.axes import WHOLE_COPY, spec_of
from kvjax.cache import Cache, CacheSpec, LatentSpec, PagedSpec
from kvjax.cache.arrays import LayerCache
from kvjax.engine.step_output import AttentionStats
from kvjax.engine.steps import StepInputs, StepStatic, decode, decode_program
from kvjax.policies.decode import Blocks, DecodePolicy, ScoresBlocks, SelectContext
from kvjax.policies.decode.base import attend_listed


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRead:
    """What one layer reads in one step of n sequences; numpy arrays.

    ids: listed blocks of `block_size` tokens, -1 where there is none; every written page where the policy makes no
    list. lse: for each query head and listed block, log-sum-exp of the scaled logits, natural log, -inf where there is
    no block. scores: for every block of the sequence, the score that the policy chose by, -inf where it had no choice
    (open pages); None for policies without scores (`kvjax.policies.decode.ScoresBlocks`). window: see
    `kvjax.policies.decode.Blocks`.
    """

    ids: Int32[np.ndarray, "n K W"]
    lse: Float32[np.ndarray, "n H W"]
    scores: Float32[np.ndarray, "n K S"] | None
    block_size: int
    window: tuple[int, int] | None

    def __repr__(self) -> str:
        rows, kv_heads, width = self.ids.shape
        return f"LayerRead({rows} sequences, {kv_heads} KV heads, up to {width} blocks of {self.block_size}: ids, lse, mass, scores)"

    @functools.cached_property
    def mass(self) -> Float32[np.ndarray, "n H W"]:
        """The share of each query head's attention that falls on each listed block. Shares add up to 1."""
        most = self.lse.max(axis=2, keepdims=True)
        paid = np.exp(self.lse - most)
        return paid / paid.sum(axis=2, keepdims=True)

    def listed(self, row: int, kv_head: int) -> list[int]:
        """The blocks that one KV head reads of one sequence, ascending."""
        return [block for block in self.ids[row, kv_head].tolist() if block >= 0]


@dataclasses.dataclass(frozen=True, eq=False)
class StepRead:
    """One inspected step: the policy that ran, next-token logits float32, and what each layer read."""

    policy: DecodePolicy
    logits: Float32[np.ndarray, "n V"]
    layers: tuple[LayerRead, ...]

    def __repr__(self) -> str:
        return f"StepRead({self.policy}, {len(self.logits)} sequences, {len(self.layers)} layers: policy, logits, layers)"


def watch(
    policy: DecodePolicy, query: Float[Array, "B T H D"], layer: LayerCache, ctx: SelectContext, blocks: Blocks | None, state: Any
) -> tuple[Blocks, Float32[Array, "B T H W"], Float32[Array, "B K S"] | None]:
    """What a layer read: the list (every page where the policy makes none), the LSE of each listed block, and the
    policy's scores.

    state: the one that the policy selected with. Attends to the listed blocks once more, for the LSE.
    """
    scores = policy.scores(query, layer, ctx, state) if blocks is not None and isinstance(policy, ScoresBlocks) else None
    if scores is not None and ctx.sharded:
        own = jnp.repeat(ctx.page_table >= 0, scores.shape[2] // ctx.page_table.shape[1], axis=1)[:, None]
        scores = ctx.shards.best_of(jnp.where(own, scores, -jnp.inf))
    if blocks is None:
        pages = jnp.arange(ctx.page_table.shape[1], dtype=jnp.int32)
        ids = jnp.where(pages * ctx.page_size < ctx.lengths[:, None], pages, -1)[:, None]
        blocks = Blocks(jnp.repeat(ids, layer.pages.kv_heads, axis=1), ctx.page_size)
    _, lse = attend_listed(query, layer, ctx, blocks, return_block_lse=True)
    return blocks, lse, scores


def _cut(static: StepStatic, inputs: StepInputs) -> tuple[Any, ...]:
    """How what `watch` saw is cut over a mesh."""
    of_kv_heads, of_heads, spec = spec_of((None, "kv_heads")), spec_of((None, None, "heads")), inputs.cache.spec
    lists = [WHOLE_COPY if isinstance(spec.layers[number], LatentSpec) else of_kv_heads for number in spec.paged]
    return tuple((heads, of_heads, heads) for heads in lists)


@decode_program(WHOLE_COPY, _cut)
def inspect_step(static: StepStatic, inputs: StepInputs) -> tuple[Array, tuple[Any, ...], Cache, tuple[Any, ...], AttentionStats]:
    """`kvjax.engine.steps.decode`, which also returns, before the cache, what `watch` saw of every layer. DONATES
    cache."""
    watched: list[Any] = []
    logits, *after = decode(static, inputs, lambda *seen: watched.append(watch(*seen)))
    return logits, tuple(watched), *after


def _each_once(spec: CacheSpec, watched: tuple[Any, ...]) -> tuple[Any, ...]:
    """What was seen of each KV head, where several devices have the same."""
    found = []
    for number, (blocks, lse, scores) in zip(spec.paged, watched, strict=True):
        layer = spec.layers[number]
        if isinstance(layer, PagedSpec) and layer.copies > 1:
            blocks, scores = jax.tree.map(lambda x, copies=layer.copies: x[:, ::copies], (blocks, scores))
            of_heads = lse.reshape(*lse.shape[:2], layer.kv_heads, -1, lse.shape[3])[:, :, :: layer.copies]
            lse = of_heads.reshape(*lse.shape[:2], -1, lse.shape[3])
        found.append((blocks, lse, scores))
    return tuple(found)


def read_of(policy: DecodePolicy, rows: int, spec: CacheSpec, logits: Float32[Array, "B 1 V"], watched: tuple[Any, ...]) -> StepRead:
    """The first `rows` rows of the result of `inspect_step` for one token each, without columns that no row lists.
    spec: of the engine's cache."""
    layers = []
    for number, (blocks, lse, scores) in enumerate(jax.device_get(_each_once(spec, watched))):
        if not (blocks.ids[:rows] >= 0).any():
            raise ValueError(
                f"policy {policy} lists no block in layer {number}: a list holds at least the block that the token is written to"
            )
        width = int((blocks.ids[:rows] >= 0).any(axis=(0, 1)).nonzero()[0][-1]) + 1
        last = int(blocks.ids[:rows].max())  # the block that the token is written to, which is always read
        scores = None if scores is None else scores[:rows, :, : last + 1]
        layers.append(LayerRead(blocks.ids[:rows, :, :width], lse[:rows, 0, :, :width], scores, blocks.block_size, blocks.window))
    return StepRead(policy, np.asarray(logits)[:rows, 0], tuple(layers))
