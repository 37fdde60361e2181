"""Query-aware block selection: sink, local, and the distant blocks that score best.

Sources: bounds scoring from Quest (Tang et al., ICML 2024); sink + local + top-k per KV head, and mean scoring, from
"Attention Pays Its Bill" (BRL-2026-07, sections 3.2 and 8.1).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.arrays import LatentPages, LayerCache
from kvjax.cache.index_spec import IndexSpec
from kvjax.checks import whole_number
from kvjax.policies.decode.base import Blocks, SelectContext, Stateless, select_and_attend
from kvjax.policies.decode.candidates import always_read, ascending, best_candidates, rows_of_blocks
from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.selection.select_blocks import score_blocks, score_listed, select_blocks


@dataclasses.dataclass(frozen=True)
class TopBlocks(Stateless):
    """Per KV head: the first `sink` blocks, the last `local` ones (always including the open page), and the `k` best
    distant blocks.

    index "bounds" scores a block by an upper bound of its largest dot product with each query head, and takes the best
    head of the group; "mean" by the dot product of the group's mean query with the block's mean key. The first
    `dense_layers` layers read everything. A sequence whose blocks all fit in the list reads everything.
    """

    k: int = 8
    sink: int = 1
    local: int = 4
    block_size: int = 128
    index: Literal["bounds", "mean"] = "bounds"
    dense_layers: int = 0

    chooses_over_devices = True

    def __post_init__(self):
        for name, least in (("k", 0), ("sink", 0), ("local", 1), ("block_size", 1), ("dense_layers", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        IndexSpec(self.index, self.block_size)

    @property
    def keys(self) -> int:
        """The most keys that a KV head reads per step, if the open page lies within the local blocks."""
        return (self.sink + self.local + self.k) * self.block_size

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Blocks of each part of the list."""
        return {name: (getattr(self, name), self.block_size) for name in ("k", "sink", "local")}

    def indexes(self) -> tuple[IndexSpec, ...]:
        """The one index this policy scans."""
        return (IndexSpec(self.index, self.block_size),)

    def select(self, query, layer, ctx, state):
        """Sink + best distant + local blocks, ascending."""
        if ctx.layer < self.dense_layers:
            return None, state
        ids = select_blocks(
            query,
            self._index(layer),
            ctx.page_table,
            ctx.lengths,
            kind=self.index,
            page_size=ctx.page_size,
            block_size=self.block_size,
            k=self.k,
            sink=self.sink,
            local=self.local,
        )
        return self._blocks(self._best_of_all(ids, query, layer, ctx) if ctx.sharded else ids), state

    def attend(self, query, layer, ctx, state):
        """Select and attend in one op, which a kernel can do in one launch."""
        if ctx.layer < self.dense_layers or ctx.sharded:
            return select_and_attend(self, query, layer, ctx, state)
        out, _, ids = selected_attention(
            *(query, layer.pages, self._index(layer), ctx.page_table, ctx.lengths),
            kind=self.index,
            block_size=self.block_size,
            budget=self.k,
            sink=self.sink,
            local=self.local,
            sm_scale=ctx.sm_scale,
            frames=ctx.frame_table,
        )
        return out, self._blocks(ids), state

    one_op = select, attend

    def _best_of_all(self, ids: Int[Array, "B T K W"], query, layer: LayerCache, ctx: SelectContext) -> Int[Array, "B T K W"]:
        """The list over the pages of all devices, from that over each one's own: the k best of what each found, with
        its scores."""
        per_page = ctx.page_size // self.block_size
        sizes = {"block_size": self.block_size, "sink": self.sink, "local": self.local}
        always, first_local = always_read(ctx, query.shape[1], **sizes)
        distant = jnp.where((ids >= self.sink) & (ids < first_local), ids, -1)
        places = rows_of_blocks(ctx.page_table, distant, per_page)
        found = ctx.shards.candidates(score_listed(query, self._index(layer), places, kind=self.index), distant)
        best = best_candidates(*found, self.k)
        always = jnp.broadcast_to(always, (*ids.shape[:3], always.shape[3]))
        return ascending(jnp.concatenate([always, best], axis=3))

    def scores(self, query, layer, ctx, state):
        """Scores of sealed pages by bounds or means, the best of several queries. Open pages are always read; their
        scores are -inf."""
        if ctx.layer < self.dense_layers:
            return None
        found = score_blocks(query, self._index(layer), ctx.page_table, kind=self.index).max(axis=1)
        first_open = (ctx.lengths - query.shape[1]) // ctx.page_size * (ctx.page_size // self.block_size)
        return jnp.where((jnp.arange(found.shape[2]) < first_open[:, None])[:, None], found, -jnp.inf)

    def _blocks(self, ids: Int[Array, "B T K W"]) -> Blocks:
        return Blocks(ids[:, 0] if ids.shape[1] == 1 else ids, self.block_size)

    def _index(self, layer: LayerCache) -> Float[Array, "N K nb R D"]:
        name = self.indexes()[0].name
        if isinstance(layer, LatentPages):
            raise ValueError(f"policy {self} scans the index {name}, which latent pages do not have: use dense, window or tokens:K")
        if name not in layer.index:
            raise ValueError(f"policy {self} scans the index {name}; this layer has {sorted(layer.index)}: name it in empty_layer")
        return layer.index[name]

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens, the current one included; None if
        there is no list."""
        if layer < self.dense_layers:
            return None
        sinks, distant, first_local = self.parts(length, page_size)
        return (sinks + distant - first_local) * self.block_size + length

    def keys_among(self, first: int, length: int, layer: int, page_size: int) -> float | None:
        """How many of `keys_read` are among the first `first` tokens, if distant blocks lie evenly between sinks and
        local ones."""
        if layer < self.dense_layers:
            return None
        sinks, distant, first_local = (count * self.block_size for count in self.parts(length, page_size))
        share = min(max(first - sinks, 0) / (first_local - sinks), 1.0) if distant else 0.0
        return min(first, sinks) + distant * share + max(0, first - first_local)

    def parts(self, length: int, page_size: int) -> tuple[int, int, int]:
        """How many sink blocks and distant blocks are listed of a sequence of `length` tokens, and the first local
        block."""
        newest = (length - 1) // self.block_size
        first_local = max(0, min(newest - self.local + 1, (length - 1) // page_size * page_size // self.block_size))
        sinks = min(self.sink, first_local)
        return sinks, min(self.k, first_local - sinks), first_local

    def __str__(self) -> str:
        """The short name that `parse` knows, if there is one; else every field that differs from the default."""
        short = {("bounds", 128, 1, 4): "top", ("mean", 128, 1, 4): "mean", ("bounds", 16, 1, 32): "quest"}
        name = short.get((self.index, self.block_size, self.sink, self.local))
        if name and not self.dense_layers:
            return f"{name}:{self.k}"
        fields = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return "TopBlocks(" + ", ".join(f"{name}={value!r}" for name, value, default in fields if name == "k" or value != default) + ")"

    def describe(self) -> str:
        """For reports."""
        dense = f", first {self.dense_layers} layers dense" if self.dense_layers else ""
        return f"{self} ({self.keys:,} keys: {self.sink} sink + {self.local} local + {self.k} distant blocks of {self.block_size}{dense})"


def named(text: str) -> TopBlocks | None:
    """The policy of a name, None for other names."""
    if (match := re.fullmatch(r"(top|mean|quest):(\d+)", text)) is None:
        return None
    k = int(match[2])
    if match[1] == "quest":
        return TopBlocks(k, sink=1, local=32, block_size=16)
    return TopBlocks(k, index="bounds" if match[1] == "top" else "mean")
