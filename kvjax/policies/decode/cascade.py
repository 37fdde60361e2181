"""Selection in two stages: bounds make a shortlist, and the keys of its blocks, read in few bits, choose from it.

Sources: shortlist, then 4-bit keys: Twilight (arXiv 2502.02770), HISA (arXiv 2603.28458); a share of attention in place
of a fixed budget: Twilight; every key in 1 bit: FIER (arXiv 2508.08256). Here levels are per channel and block, and
blocks are chosen, not tokens.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from kvjax.cache.arrays import LayerCache, PagedKV
from kvjax.cache.index_spec import IndexSpec
from kvjax.checks import whole_number
from kvjax.policies.decode.base import Blocks, SelectContext, Stateless, select_and_attend
from kvjax.policies.decode.candidates import always_read, ascending, best_candidates, ranked, rows_of_blocks
from kvjax.policies.decode.top_blocks import TopBlocks
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.selection.page_index import CODED, index_shape
from pallas_kernels.selection.select_blocks import block_lse, block_shares, score_listed, select_blocks

BITS = {bits: kind for kind, bits in CODED.items()}
"""Kind of index by bits of a number."""

SHORTLIST = 256
"""Blocks of the default shortlist: every distant one of contexts up to 32K tokens. Bounds alone miss too much on
released models (docs/measured/selectors.md), so they choose only where there are more blocks."""

KEPT = 8
"""Blocks that are kept by default; with a share, at most `KEPT_FOR_SHARE`."""

KEPT_FOR_SHARE = 32


@dataclasses.dataclass(frozen=True)
class Cascade(Stateless):
    """Per KV head: sink and local blocks as `TopBlocks` reads them, and the `k` distant ones that get the most
    attention, by an estimate.

    Of the `shortlist` distant blocks with the best bounds, each query head estimates its attention to each block: the
    softmax over the logits of sink and local keys, as the cache has them, and of all shortlisted keys in few bits. The
    k largest sums over the heads of a KV head are kept; of equal sums the lower block.

    Args:
        k: distant blocks to keep.
        shortlist: blocks, at least k; None: `SHORTLIST`, or k if that is more. "all": every distant block, without
            bounds.
        bits: 1, 2, 4 or 8: of an index of keys. "cache": the cache's own keys, packed or not; with shortlist "all" the
            choice is then exact. None: the cache's own keys in layers that pack them, else 4.
        sink, local, block_size: as `TopBlocks` has them.
        every: 1: each layer chooses. n: every n-th layer chooses, and the n - 1 layers after it read its list. Layers
            with a window of their own do not count.
        share: of the estimated attention, above 0 and below 1; None: every list has k blocks, where there are as many.
    """

    k: int | None = None
    shortlist: int | Literal["all"] | None = None
    bits: int | Literal["cache"] | None = None
    sink: int = 1
    local: int = 4
    block_size: int = 128
    share: float | None = None
    every: int = 1

    chooses_over_devices = True
    needs_kv_heads = True

    def __post_init__(self):
        if self.share is not None:
            if not (isinstance(self.share, numbers.Real) and 0 < self.share < 1):
                raise ValueError(f"share must be above 0 and below 1, got {self.share!r}: leave it out to keep k blocks")
            object.__setattr__(self, "share", float(self.share))
        if self.k is None and self.share is not None and self.shortlist == "all":
            raise ValueError("with share, shortlist 'all' needs k, the most blocks of a list: name it, as in cascade:16p0.95/all")
        if self.k is None:
            most = KEPT_FOR_SHARE if self.shortlist is None else self.shortlist
            object.__setattr__(self, "k", KEPT if self.share is None else most)
        for name, least in (("k", 1), ("sink", 0), ("local", 1), ("block_size", 1), ("every", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.shortlist is None:
            object.__setattr__(self, "shortlist", max(SHORTLIST, self.k))
        elif self.shortlist != "all":
            object.__setattr__(self, "shortlist", whole_number("shortlist", self.shortlist, self.k))
        if self.bits is not None and self.bits != "cache" and self.bits not in BITS:
            raise ValueError(f"bits must be {', '.join(map(str, sorted(BITS)))}, 'cache' or None, got {self.bits!r}")

    @property
    def _listed(self) -> TopBlocks:
        """The policy that reads as many blocks, in the same places but for the choice."""
        return TopBlocks(self.k, self.sink, self.local, self.block_size)

    @property
    def keys(self) -> int | None:
        """The most keys that a KV head attends to per step, if the open page lies within the local blocks; None where
        it varies."""
        return self._listed.keys if self.share is None else None

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Blocks of each part of the list, and of the shortlist."""
        return self._listed.budgets() | ({} if self.shortlist == "all" else {"shortlist": (self.shortlist, self.block_size)})

    def indexes(self) -> tuple[IndexSpec, ...]:
        """Bounds, if there is a shortlist, and the codes of keys; both in the layers that choose."""
        bounds = () if self.shortlist == "all" else (IndexSpec("bounds", self.block_size, every=self.every),)
        return bounds if self.bits == "cache" else (*bounds, self._codes)

    @property
    def _codes(self) -> IndexSpec:
        return IndexSpec(BITS[self.bits or 4], self.block_size, unless_packed=self.bits is None, every=self.every)

    def select(self, query, layer, ctx, state):
        """Sink + best distant + local blocks, ascending; or what an earlier layer listed."""
        self._check(layer, ctx)
        if after := len(ctx.earlier) % self.every:
            return self._of_anchor(ctx.earlier[-after], layer), state
        sizes = {"block_size": self.block_size, "sink": self.sink, "local": self.local}
        always, first_local = always_read(ctx, query.shape[1], **sizes)
        always = jnp.broadcast_to(always, (*query.shape[:2], layer.pages.kv_heads, always.shape[3]))
        candidates = self._candidates(query, layer, ctx, first_local, always.shape[:3])
        shares, near = self._shares(query, layer, ctx, candidates, always)
        scores, best = ranked(*self._best(shares, candidates, ctx), self.k)
        if self.share is not None:
            best = jnp.where(self._lacks(scores, near, query.shape[2] // near.shape[2]), best, -1)
        ids = ascending(jnp.concatenate([always, best], axis=3))
        return Blocks(ids[:, 0] if ids.shape[1] == 1 else ids, self.block_size), state

    def attend(self, query, layer, ctx, state):
        """Select and attend. From a shortlist: in one op, which a kernel can do in one launch."""
        self._check(layer, ctx)
        listed_before = bool(len(ctx.earlier) % self.every)
        if ctx.sharded or listed_before or not self._is_one_op:
            return select_and_attend(self, query, layer, ctx, state)
        (bounds, *_), packed = self.indexes(), layer.pages.k_packed is not None
        codes = {} if self._reads_cache(packed) else {"codes": layer.index[self._codes.name], "codes_kind": self._codes.kind}
        out, _, ids = selected_attention(
            *(query, layer.pages, layer.index[bounds.name], ctx.page_table, ctx.lengths),
            kind=bounds.kind,
            block_size=self.block_size,
            budget=self.k,
            sink=self.sink,
            local=self.local,
            sm_scale=ctx.sm_scale,
            frames=ctx.frame_table,
            shortlist=self.shortlist,
            **codes,
        )
        return out, Blocks(ids[:, 0] if ids.shape[1] == 1 else ids, self.block_size), state

    one_op = select, attend

    def _of_anchor(self, listed: Blocks, layer: PagedKV) -> Blocks:
        """The list of an earlier layer, which has to have as many KV heads."""
        if (heads := listed.ids.shape[-2]) != layer.pages.kv_heads:
            raise ValueError(
                f"policy {self}: a layer of {layer.pages.kv_heads} KV heads cannot read the lists of one of {heads}: leave out every"
            )
        return listed

    def _candidates(self, query, layer: PagedKV, ctx: SelectContext, first_local, lists: tuple[int, int, int]) -> Int[Array, "B T K C"]:
        """The distant blocks to choose from, -1 where there is none. Where pages are sharded, those of them that this
        device has."""
        if self.shortlist == "all":
            per_page = ctx.page_size // self.block_size
            ids = jnp.arange(ctx.page_table.shape[1] * per_page, dtype=jnp.int32)
            ids = jnp.where(jnp.repeat(ctx.page_table >= 0, per_page, axis=1), ids, -1)
            ids = jnp.broadcast_to(ids[:, None, None], (*lists, ids.shape[1]))
        else:
            (bounds, *_), static = self.indexes(), {"page_size": ctx.page_size, "block_size": self.block_size}
            given = query, layer.index[bounds.name], ctx.page_table, ctx.lengths
            ids = select_blocks(*given, kind="bounds", k=self.shortlist, sink=self.sink, local=self.local, **static)
        ids = jnp.where((ids >= self.sink) & (ids < first_local), ids, -1)
        if self.shortlist == "all" or not ctx.sharded:
            return ids
        per_page = ctx.page_size // self.block_size
        scores = score_listed(query, layer.index[bounds.name], rows_of_blocks(ctx.page_table, ids, per_page), kind="bounds")
        best = best_candidates(*ctx.shards.candidates(scores, ids), self.shortlist)
        return jnp.where(rows_of_blocks(ctx.page_table, best, per_page) >= 0, best, -1)

    def _best(self, shares: Float32[Array, "B T K C"], candidates: Int[Array, "B T K C"], ctx: SelectContext) -> tuple[Array, Array]:
        """Shares and candidates among which the best k are; where pages are sharded, the k best that each device
        found."""
        return ctx.shards.candidates(*ranked(shares, candidates, self.k)) if ctx.sharded else (shares, candidates)

    def _lacks(self, scores: Float32[Array, "B T K k"], near: Float32[Array, "B T K"], group: int) -> Bool[Array, "B T K k"]:
        """Which of the best blocks, best first, are kept: those without which the ones before them lack `share` of the
        attention."""
        found = jnp.exp(scores)
        before = jnp.exp(near)[..., None] + jnp.cumsum(found, axis=3) - found
        return ~(before >= self.share * group)  # so that NaN keeps them

    def _shares(
        self, query, layer: PagedKV, ctx: SelectContext, candidates: Int[Array, "B T K C"], always: Int[Array, "B T K A"]
    ) -> tuple[Float32[Array, "B T K C"], Float32[Array, "B T K"]]:
        """Log of the attention that each candidate gets, summed over the query heads of a KV head, and that of sink and
        local blocks. -inf where a candidate is -1, or NaN."""

        def by_cache(ids: Int[Array, "B T K n"]) -> tuple[Array, Array]:
            given = query, layer.pages.without_values, ctx.frames, ctx.lengths
            _, lse, of_blocks = gather_attention(
                *given, blocks=ids, block_size=self.block_size, sm_scale=ctx.sm_scale, return_block_lse=True
            )
            return lse, of_blocks

        per_page = ctx.page_size // self.block_size
        if self._reads_cache(layer.pages.k_packed is not None):
            _, found = by_cache(candidates)
        else:
            places = rows_of_blocks(ctx.page_table, candidates, per_page)
            found = block_lse(query, layer.index[self._codes.name], places, kind=self._codes.kind, sm_scale=ctx.sm_scale)
        near, total = by_cache(always)[0], None
        if ctx.sharded:
            parts = jnp.stack([near, jax.nn.logsumexp(found, axis=3)], axis=3)
            parts = ctx.shards.candidates(parts)[0].reshape(*parts.shape[:3], -1, 2)
            near, total = jax.nn.logsumexp(parts[..., 0], axis=3), jax.nn.logsumexp(parts, axis=(3, 4))
        return block_shares(near, found, candidates.shape[2], total=total)

    def _reads_cache(self, packed: bool) -> bool:
        """Whether the shortlist's keys are the cache's own. packed: whether those are packed."""
        return self.bits == "cache" or (self.bits is None and packed)

    @property
    def _is_one_op(self) -> bool:
        """Whether `selected_attention` makes the list that `select` makes."""
        return self.share is None and self.shortlist != "all"

    def _check(self, layer: LayerCache, ctx: SelectContext) -> None:
        if not isinstance(layer, PagedKV):
            raise ValueError(f"policy {self} reads keys of each KV head, which {type(layer).__name__} does not have: use dense or tokens:K")
        if len(ctx.earlier) % self.every:
            return  # the layer scans no index
        packed = layer.pages.k_packed is not None
        missing = [spec.name for spec in self.indexes() if spec.name not in layer.index and not (packed and spec.unless_packed)]
        if missing:
            raise ValueError(f"policy {self} scans the index {missing[0]}; this layer has {sorted(layer.index)}: name it in empty_layer")

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Keys a KV head attends to in one step of a sequence of `length` tokens, the current one included; with
        `share`, the most."""
        return self._listed.keys_read(length, layer, page_size)

    def keys_among(self, first: int, length: int, layer: int, page_size: int) -> float | None:
        """How many of `keys_read` are among the first `first` tokens, if distant blocks lie evenly between sinks and
        local ones."""
        return self._listed.keys_among(first, length, layer, page_size)

    def reads_to_choose(self, length: int, page_size: int, head_dim: int, *, packed: bool, sharded: bool) -> tuple[int, int, int]:
        """What the choice reads per KV head and layer, in a sequence of `length` tokens: elements of bounds, bytes of
        codes, and numbers of the cache's own keys that attention reads again.

        Sink and local keys are among these where the choice is always a step of its own. Where `selected_attention`
        makes it, one launch can read them once for both, and they are not; its plain form reads them twice. packed:
        whether the cache's keys are packed. sharded: whether several devices have the pages.
        """
        wide = dataclasses.replace(self._listed, k=-(-length // self.block_size) if self.shortlist == "all" else self.shortlist)
        sinks, listed, first_local = wide.parts(length, page_size)
        bounds = 0 if self.shortlist == "all" else -(-length // page_size) * page_size // self.block_size * 2 * head_dim
        near = 0 if self._is_one_op and not sharded else sinks * self.block_size + length - first_local * self.block_size
        if self._reads_cache(packed):
            return bounds, 0, (near + listed * self.block_size) * head_dim
        rows, width = index_shape(self._codes.kind, self.block_size, head_dim)
        return bounds, listed * rows * width, near * head_dim

    def __str__(self) -> str:
        """The name that `parse` knows, if there is one; else every field."""
        if (self.sink, self.local, self.block_size) != (1, 4, 128):
            return "Cascade(" + ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)) + ")"
        usual = self.shortlist == max(SHORTLIST, self.k)
        kept = "" if self.share is not None and self.k == (KEPT_FOR_SHARE if usual else self.shortlist) else f"{self.k}"
        kept += "" if self.share is None else f"p{np.format_float_positional(self.share)}"
        some = "" if usual else f"/{self.shortlist}"
        how = {None: "", "cache": "+cache"}.get(self.bits, f"+{self.bits}bit")
        return f"cascade:{kept}{some}{how}" + ("" if self.every == 1 else f"+every{self.every}")

    def describe(self) -> str:
        """For reports."""
        how = {None: "4 bits, or the packed cache", "cache": "the cache's keys"}.get(self.bits, f"{self.bits} bit" + "s" * (self.bits != 1))
        kept = f"{self.k}" if self.share is None else f"up to {self.k}, for {self.share:g} of attention,"
        listed = f"{self.sink} sink + {self.local} local + {kept} of {self.shortlist} distant blocks of {self.block_size}, by {how}"
        listed += "" if self.every == 1 else f", chosen in every {self.every} layers"
        most = "" if self.share is None else "up to "
        return f"{self} ({most}{self._listed.keys:,} keys: {listed})"


def named(text: str) -> Cascade | None:
    """The policy of a name, None for other names; ValueError for numbers that it cannot have."""
    match = re.fullmatch(r"cascade:(?=\d|p)(\d+)?(?:p(\d*\.?\d+))?(?:/(\d+|all))?(?:\+(?:(\d+)bit|(cache)))?(?:\+every(\d+))?", text)
    if match is None:
        return None
    kept, share = (None if each is None else of(each) for each, of in zip(match.groups()[:2], (int, float), strict=True))
    shortlist = match[3] if match[3] in (None, "all") else int(match[3])
    return Cascade(kept, shortlist, int(match[4]) if match[4] else match[5], share=share, every=int(match[6] or 1))
