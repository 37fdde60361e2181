"""A policy that is watched: some of its steps measure the share of dense's attention that lies outside the list, and
may read more.

A measured step scores every key once, without values, in float32. By then the keys are written, so the share is that of
this very step. An engine runs the program made here only where a row is measured, or where a head reads more. For all
other steps it runs the program of the policy alone (`kvjax.engine.watching`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.cache.arrays import LayerCache, PagedKV
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_manager import Reach
from kvjax.checks import whole_number
from kvjax.engine.missed import Missed
from kvjax.policies.decode.base import Blocks, DecodePolicy, ScoresBlocks, SelectContext, Stateless, StateSpec, is_watched, keys_listed
from kvjax.policies.decode.dense import Dense
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.core.messages import shown

EVERY = 32
"""A step is measured where its position is a multiple of this."""

LARGER = 4
"""How many times the budget a head reads after its first alarm."""

OWN, WIDE, WHOLE = range(3)
"""What a head reads: the policy's list, one of `LARGER` times the budget, every key."""

DUE, LEVEL, SAMPLES, TOTAL, LARGEST, ALARMS, STEPS, MORE = range(8)
"""Columns of the state, per KV head: 1 if the next step is measured wherever it is; what the head reads; measured
steps; the sum of their shares, each the mean over the query heads; the largest share of a query head; alarms; steps
that read more than the policy's list; keys that these read more. Whole numbers are exact up to 2^24."""


@dataclasses.dataclass(frozen=True)
class Watched(Stateless):
    """`policy`, and what its lists miss. The first step after a prompt is measured, and every step whose position
    `every` divides.

    The share that a query head misses is 1 - exp(lse of the listed keys - lse of all keys). The share of a KV head is
    the mean over its query heads. If it exceeds `max_missed`, the head reads a list of four times the budget, and if
    that misses too much, every key: in this step and in all later ones of the sequence, in this layer. A head whose
    steps miss little again stays there. Which steps are measured depends on positions alone, so one sequence gives the
    same bits in any company.

    policy: one that lists blocks and keeps no state. A budget is its field `k`, with `shortlist`, or `window_tokens`; a
    policy without these goes to every key at once. max_missed: above 0; 1 measures and never alarms.
    """

    watches = True

    policy: DecodePolicy
    max_missed: float = 1.0
    every: int = EVERY

    def __post_init__(self):
        share = self.max_missed
        if isinstance(share, bool) or not isinstance(share, numbers.Real) or not 0 < share <= 1:  # NaN fails every comparison
            raise ValueError(f"max_missed must be above 0 and at most 1, got {shown(share)}: use 0.02, or 1 to measure without an alarm")
        object.__setattr__(self, "max_missed", float(share))
        object.__setattr__(self, "every", whole_number("every", self.every, 1))
        if (reason := _why_not(self.policy)) is not None:
            raise ValueError(f"policy {self.policy} cannot be watched: it {reason}")

    @functools.cached_property
    def wider(self) -> DecodePolicy | None:
        """The policy with `LARGER` times the budget; None where it has no budget to enlarge, or other layers read its
        lists."""
        names = [each.name for each in dataclasses.fields(self.policy)] if dataclasses.is_dataclass(self.policy) else []
        found = {name: getattr(self.policy, name) for name in names if name in ("k", "shortlist", "window_tokens")}
        changes = {name: LARGER * value for name, value in found.items() if isinstance(value, int)}
        if not any(changes.values()) or getattr(self.policy, "every", 1) > 1:
            return None
        try:
            return dataclasses.replace(self.policy, **changes)
        except ValueError:  # the policy's own limit
            return None

    def indexes(self) -> tuple[IndexSpec, ...]:
        """Those of the policy."""
        return self.policy.indexes()

    def init(self, spec: StateSpec, batch: int) -> Float32[Array, "B K C"]:
        """Nothing measured, every head on the policy's list, and the next step due."""
        if jax.tree.leaves(self.policy.init(spec, batch)):
            raise ValueError(f"policy {self.policy} cannot be watched: it keeps a state of its own. Leave out --max-missed")
        return jnp.zeros((batch, spec.num_kv_heads, 8), jnp.float32).at[:, :, DUE].set(1)

    def state_axes(self) -> tuple[str | None, ...]:
        """The logical axes of the state, for meshes."""
        return (None, "kv_heads")

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Those of the policy."""
        return self.policy.budgets() if isinstance(self.policy, Stateless) else {}

    def reach(self, page_size: int) -> Reach | None:
        """Any key: a measured step reads all."""
        return None

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """As the policy says."""
        return self.policy.keys_read(length, layer, page_size)

    def keys_among(self, first: int, length: int, layer: int, page_size: int) -> float | None:
        """As the policy says."""
        return self.policy.keys_among(first, length, layer, page_size)

    def select(self, query, layer, ctx, state):
        """The policy's list."""
        return self.policy.select(query, layer, ctx, ())[0], state

    def scores(self, query, layer, ctx, state):
        """Those of the policy; None if it has none."""
        return self.policy.scores(query, layer, ctx, ()) if isinstance(self.policy, ScoresBlocks) else None

    def attend(self, query, layer, ctx, state):
        """What the policy reads, unless the step is measured or a head reads more. The list that is returned is the
        policy's own."""
        out, blocks, _ = self.policy.attend(query, layer, ctx, ())
        if blocks is None:
            return out, None, state
        _check(self.policy, layer, blocks)
        position, live = ctx.lengths - 1, ctx.lengths > 0
        due = live & ((state[:, 0, DUE] > 0) | (position % self.every == 0))
        state = state.at[:, :, DUE].min(jnp.where(live, 0.0, 1.0)[:, None])
        watch = functools.partial(self._watch, query, layer, ctx, blocks, due)
        busy = due.any() | (live[:, None] & (state[:, :, LEVEL] > OWN)).any()
        out, state = jax.lax.cond(busy, watch, lambda out, state: (out, state), out, state)
        return out, blocks, state

    def _watch(
        self,
        query: Float[Array, "B 1 H D"],
        layer: PagedKV,
        ctx: SelectContext,
        blocks: Blocks,
        due: Bool[Array, "B"],
        out: Float[Array, "B 1 H D"],
        state: Float32[Array, "B K C"],
    ) -> tuple[Float[Array, "B 1 H D"], Float32[Array, "B K C"]]:
        """Output and state of a step in which a row is measured, or a head reads more than the policy's list."""
        heads = state.shape[1]
        before = level = state[:, :, LEVEL].astype(jnp.int32)
        keys_only, measured = layer.pages.without_values, jnp.broadcast_to(due[:, None], level.shape)

        def lse_of(listed: Blocks | None) -> Float32[Array, "B K G"]:
            return _attend(query, keys_only, ctx, listed, measured)[1].reshape(*level.shape, -1)

        none = jnp.zeros((*level.shape, query.shape[2] // heads), jnp.float32)
        own, whole = _when(due.any(), lambda: (lse_of(blocks), lse_of(None)), (none, none))
        share = missed_share(own, whole)
        if self.max_missed < 1:
            alarm = self._exceeded(share, measured & (before == OWN))
            level = jnp.where(alarm, WHOLE if self.wider is None else WIDE, level)
            more = jnp.zeros(level.shape, jnp.int32)
            if self.wider is not None:
                live = (level == WIDE) & (ctx.lengths > 0)[:, None]
                found, lse, keys = _when(live.any(), lambda: self._wide(query, layer, ctx, live), (out, none.reshape(out.shape[:3]), more))
                wide_share = missed_share(lse.reshape(none.shape), whole)
                share = jnp.where((before == WIDE)[..., None], wide_share, share)
                level = jnp.where(self._exceeded(wide_share, measured & (level == WIDE)), WHOLE, level)
                out, more = _of_heads(level == WIDE, found, out), jnp.where(level == WIDE, keys, more)
            live = (level == WHOLE) & (ctx.lengths > 0)[:, None]
            found = _when(live.any(), lambda: _attend(query, layer.pages, ctx, _every_page(ctx, live), live)[0], out)
            out, more = _of_heads(level == WHOLE, found, out), jnp.where(level == WHOLE, ctx.lengths[:, None], more)
            share = jnp.where((before == WHOLE)[..., None], 0.0, share)
            lengthened = (level > OWN) & (ctx.lengths > 0)[:, None]
            own_keys = keys_listed(blocks.ids, blocks.block_size, blocks.window, ctx.lengths[:, None, None]).sum(axis=2)
            state = state.at[:, :, ALARMS].add(level > before).at[:, :, STEPS].add(lengthened)
            state = state.at[:, :, MORE].add(jnp.where(lengthened, jnp.maximum(more - own_keys, 0), 0))
            state = state.at[:, :, LEVEL].set(level)
        state = state.at[:, :, SAMPLES].add(measured)
        state = state.at[:, :, TOTAL].add(jnp.where(measured, share.mean(axis=2), 0))
        return out, state.at[:, :, LARGEST].max(jnp.where(measured, share.max(axis=2), 0))

    def _exceeded(self, share: Float32[Array, "B K G"], measured: Bool[Array, "B K"]) -> Bool[Array, "B K"]:
        return measured & ~(share.mean(axis=2) <= self.max_missed)  # so that NaN alarms

    def _wide(self, query, layer: PagedKV, ctx: SelectContext, live: Bool[Array, "B K"]) -> tuple[Array, Array, Int32[Array, "B K"]]:
        """Output and LSE over the larger lists of the heads in `live`, and how many keys these list."""
        listed = self.wider.select(query, layer, ctx, ())[0]
        listed = listed.replace(ids=jnp.where(live[:, :, None], listed.ids, -1))
        keys = keys_listed(listed.ids, listed.block_size, listed.window, ctx.lengths[:, None, None]).sum(axis=2)
        return *_attend(query, layer.pages, ctx, listed, live), keys

    def missed(self, states: Sequence[Any] | None) -> Missed:
        """What a sequence's steps missed. states: of its layers; None before its first step. Waits for the device."""
        if states is None:
            return Missed()
        layers = [np.asarray(each, np.float64)[0] for each in jax.device_get(tuple(states))]
        sums = sum(layer.sum(axis=0) for layer in layers)
        if not math.isfinite(sums[TOTAL]):  # so are the logits of such a step, and the answer is an error
            return Missed()
        heads = [(row[LARGEST], number, head) for number, layer in enumerate(layers) for head, row in enumerate(layer) if row[SAMPLES]]
        largest, layer, head = max(heads, key=operator.itemgetter(0), default=(0.0, None, None))
        counts = {name: int(sums[column]) for name, column in (("samples", SAMPLES), ("alarms", ALARMS), ("steps", STEPS), ("keys", MORE))}
        for name, level in (("wide_heads", WIDE), ("dense_heads", WHOLE)):
            counts[name] = int(sum((each[:, LEVEL] == level).sum() for each in layers))
        return Missed(mean=float(sums[TOTAL] / max(sums[SAMPLES], 1)), largest=float(largest), layer=layer, head=head, **counts)

    @property
    def suffix(self) -> str:
        """What its name adds to that of the policy: "+missed0.02", or "+missed0.02/8" where every 8th step is
        measured."""
        share = f"{self.max_missed:g}"
        share = share if float(share) == self.max_missed else repr(self.max_missed)
        return f"+missed{share}" + f"/{self.every}" * (self.every != EVERY)

    def __str__(self) -> str:
        return f"{self.policy}{self.suffix}"

    def describe(self) -> str:
        """For reports."""
        said = "" if self.max_missed == 1 else f"; heads that miss more than {self.max_missed:.3g} read more"
        return f"{self} ({self.policy.describe()}; measured every {self.every} steps{said})"


def missed_share(listed: Float32[Array, "..."], whole: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The share of attention that a list misses, 0 to 1, from the log-sum-exp of its logits and that of all logits."""
    return jnp.clip(-jnp.expm1(listed - whole), 0, 1)


def _why_not(policy: Any) -> str | None:
    """Why a policy cannot be watched; None if it can."""
    if isinstance(policy, Dense):
        return "reads every key and misses nothing. Leave out --max-missed, or name a policy that reads less, as cascade:8"
    if is_watched(policy):
        return "is watched already. Give one share"
    if hasattr(policy, "possible"):  # `kvjax.policies.choice.ChoosesDecode`, which imports this package
        return "chooses another policy for each launch. Name that one, as cascade:8"
    if getattr(policy, "needs_indexer", False):
        return "lists tokens of latent pages, which have no KV heads. Leave out --max-missed"
    if not hasattr(policy, "select"):
        return "is no policy. Name one, as cascade:8"
    if getattr(policy, "learns", None) is not None:
        return "learns from attention. Leave out --max-missed, or name a policy without state, as cascade:8"
    if getattr(policy, "counts_in_cache", False):
        return "counts positions in the cache, so its attention is no part of dense's. Leave out +remap, or --max-missed"
    if hasattr(policy, "keeps") and policy.keeps(128) is not None:
        return "gives pages back, and dense's attention is not known without them. Leave out +release, or --max-missed"
    return None


def _check(policy: DecodePolicy, layer: LayerCache, blocks: Blocks) -> None:
    """ValueError for a list whose share cannot be measured."""
    if not isinstance(layer, PagedKV):
        raise ValueError(f"policy {policy} cannot be watched in layers of latent attention, as this model has: leave out --max-missed")
    if blocks.ids.ndim != 3 or blocks.remapped:
        raise ValueError(f"policy {policy} cannot be watched: its lists are not [B, K, W] for one token. Leave out --max-missed")


def _attend(query, pages, ctx: SelectContext, blocks: Blocks | None, live: Bool[Array, "B K"]) -> tuple[Array, Array]:
    """Output and LSE over lists, or over every key. live: heads that read; rows without any read nothing."""
    listed = {} if blocks is None else {"blocks": blocks.ids, "block_size": blocks.block_size, "window": blocks.window}
    lengths = jnp.where(live.any(axis=1), ctx.lengths, 0)
    return gather_attention(query, pages, ctx.frames, lengths, sm_scale=ctx.sm_scale, **listed)


def _every_page(ctx: SelectContext, live: Bool[Array, "B K"]) -> Blocks:
    """Lists of all pages for the heads in `live`."""
    pages = jnp.where(ctx.frames >= 0, jnp.arange(ctx.frames.shape[1], dtype=jnp.int32), -1)
    return Blocks(jnp.where(live[:, :, None], pages[:, None], -1), ctx.page_size)


def _when(flag: Bool[Array, ""], compute: Callable[[], Any], otherwise: Any) -> Any:
    return jax.lax.cond(flag, compute, lambda: otherwise)


def _of_heads(chosen: Bool[Array, "B K"], new: Float[Array, "B 1 H D"], old: Float[Array, "B 1 H D"]) -> Float[Array, "B 1 H D"]:
    """The output of the query heads of chosen KV heads from `new`, of others from `old`."""
    return jnp.where(jnp.repeat(chosen, old.shape[2] // chosen.shape[1], axis=1)[:, None, :, None], new, old)
