"""Learning from prefill: the attention mass of a chunk, for policies that ask for it, and their states while a chunk is
not full."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvjax.cache import PagedKV
from kvjax.compilation import program
from kvjax.engine.sequence import OpenChunk, States
from kvjax.model.config import ModelConfig
from kvjax.model.layers import DeltaLayer, LatentLayer
from kvjax.policies.decode import AttentionMass, DecodePolicy, MassContext, StateSpec
from kvjax.policies.decode.base import fitted
from kvjax.policies.prefill import DensePrefill, PrefillContext, PrefillPolicy
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.selection.block_mass import block_mass

if TYPE_CHECKING:
    from kvjax.engine.sequence import CachedSequence


@flax.struct.dataclass
class Learning:
    """What one prefill step learns from: policies, their states before the chunk, and the position from which queries
    count.

    states: for every policy, one for each layer that attends to pages. max_pages: the width of states: the pages of the
    longest sequence that the model allows.
    """

    states: tuple[States, ...]
    first: Int[Array, "B"]
    policies: tuple[DecodePolicy, ...] = flax.struct.field(pytree_node=False)
    max_pages: int = flax.struct.field(pytree_node=False)

    def of_layers(self, first: int, last: int) -> Learning:
        """The same with only the states of layers [first, last), counted among layers that attend to pages."""
        return self.replace(states=tuple(states[first:last] for states in self.states))


def learns_from_prefill(policy: DecodePolicy) -> bool:
    """Whether a policy asks for attention mass of prefill. ValueError if nobody can tell."""
    if not isinstance(policy.learns, AttentionMass | None):
        raise ValueError(f"policy {policy}: learns must be a kvjax.policies.decode.AttentionMass or None, got {policy.learns!r}")
    return policy.learns is not None and policy.learns.queries != 0


def state_specs(config: ModelConfig, page_size: int, max_pages: int, tensor: int = 1) -> tuple[StateSpec, ...]:
    """For each layer that attends to pages, the sizes from which a policy makes its state. tensor: over how many
    devices heads are split; the sizes are those over all of them."""
    mixers = [layer.mixer for layer in config.layers if not isinstance(layer.mixer, DeltaLayer)]
    rows = [
        (1, each.latent_dim + each.rope.dim) if isinstance(each, LatentLayer) else (each.num_kv_heads, each.head_dim) for each in mixers
    ]
    copies = [max(1, tensor // kv_heads) for kv_heads, _ in rows]
    sizes = zip(mixers, rows, copies, strict=True)
    return tuple(StateSpec(each.num_heads * many, row[0] * many, row[1], page_size, max_pages) for each, row, many in sizes)


class PolicyStates:
    """The states of an engine's policies. `policies`: those that learn from prefill. tensor: as in `state_specs`.
    packed: whether pages are.

    ValueError for a policy that the engine's sizes do not allow.
    """

    def __init__(
        self,
        policies: Sequence[DecodePolicy],
        config: ModelConfig,
        *,
        page_size: int,
        prefill_chunk: int,
        tensor: int = 1,
        packed: bool = False,
    ):
        self._unit = page_size if packed else 1
        self.policies = tuple(policy for policy in policies if learns_from_prefill(policy))
        for policy in self.policies:
            _check(policy, page_size, prefill_chunk)
            if config.latent:
                raise ValueError(f"policy {policy} learns from prefill, but layers of latent attention give no attention mass")
            if any(isinstance(layer.mixer, DeltaLayer) for layer in config.layers):
                raise ValueError(
                    f"policy {policy} learns from prefill, which computes the queries of a chunk again; recurrent layers, as this "
                    "model has, do not compute them twice: name a policy that does not learn from prefill"
                )
        self.max_pages = -(-config.max_positions // page_size)
        self.specs = state_specs(config, page_size, self.max_pages, tensor)
        self._none: dict[DecodePolicy, States] = {}  # of policies without any state
        self._fresh: dict[DecodePolicy, States] = {}

    def check_declared(self, policy: DecodePolicy) -> None:
        """ValueError for a policy that learns from prefill and was not declared to the engine."""
        if learns_from_prefill(policy) and policy not in self.policies:
            raise ValueError(f"policy {policy} learns from prefill, and must be known before it: name it in Engine(policies=...)")

    def check_learned(self, policy: DecodePolicy, slots: Sequence[CachedSequence | None]) -> None:
        """ValueError if a policy that learns from prefill has not seen that of a sequence."""
        if policy in self.policies and any(slot and policy not in slot.states for slot in slots):
            raise ValueError(
                f"policy {policy} learns from prefill, and a sequence restored from a file does not hold what it learned: prefill it again"
            )

    def stateless(self, policy: DecodePolicy) -> bool:
        """Whether a policy is known to keep no state."""
        return policy in self._none

    def fresh(self, policy: DecodePolicy) -> States:
        """A policy's states of one sequence before its first token."""
        if policy not in self._fresh:
            self._fresh[policy] = tuple(policy.init(spec, 1) for spec in self.specs)
        return self._fresh[policy]

    def of_batch(self, policy: DecodePolicy, slots: Sequence[CachedSequence | None]) -> States:
        """Per layer, the policy's state of all slots. A sequence that it has not seen gets a fresh state; ValueError if
        the policy should have seen its prefill."""
        if policy in self._none:
            return self._none[policy]
        self.check_learned(policy, slots)
        fresh = self.fresh(policy)
        if not jax.tree.leaves(fresh):
            if policy not in self.policies:
                self._none[policy] = fresh
            return fresh
        rows = [slot.states.get(policy, fresh) if slot else fresh for slot in slots]
        return rows[0] if len(rows) == 1 else _join(tuple(rows))

    def before_chunk(self, sequence: CachedSequence, start: int, first: int, *, whole: bool) -> tuple[Learning | None, OpenChunk | None]:
        """What a prefill step over the chunk from `start` on learns, if `first` is the first token that it writes.

        whole: whether the chunk's queries give the same as in the call that wrote them. (None, None) where there is
        nothing to learn.
        """
        if not sequence.length:
            sequence.states = {policy: self.fresh(policy) for policy in self.policies}
        told = tuple(policy for policy in self.policies if policy in sequence.states)
        if not told:
            return None, None
        opened = sequence.open_chunk
        if not whole or opened is None or opened.position < start:
            opened = OpenChunk(-(-first // self._unit) * self._unit, (), dict(sequence.states))
        states = tuple(opened.states[policy] for policy in told)
        return Learning(states, np.array([opened.position], np.int32), told, self.max_pages), opened


def rows_of(states: States) -> tuple[States, ...]:
    """The states of each row of a batch, in one call."""
    size = jax.tree.leaves(states)[0].shape[0]
    return (states,) if size == 1 else _split(states, size)


@program
def _join(rows: tuple[States, ...]) -> States:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


@functools.partial(program, static_argnames="size")
def _split(states: States, size: int) -> tuple[States, ...]:
    return tuple(jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], states) for row in range(size))


def after_chunk(
    sequence: CachedSequence, learning: Learning | None, opened: OpenChunk | None, learned: tuple[States, ...], written: Sequence[int]
) -> None:
    """Keep what a prefill step learned, and what the next call needs to continue. written: its tokens, which
    sequence.length counts."""
    if learning is not None:
        sequence.states = sequence.states | dict(zip(learning.policies, learned, strict=True))
        early = max(0, opened.position - (sequence.length - len(written)))
        sequence.open_chunk = dataclasses.replace(opened, tokens=(*opened.tokens, *written[early:]))


def _check(policy: DecodePolicy, page_size: int, prefill_chunk: int) -> None:
    asked = policy.learns
    if page_size % asked.tokens(page_size):
        raise ValueError(f"policy {policy} asks for blocks of {asked.block_size} tokens, which do not divide the page size {page_size}")
    if asked.queries is not None and asked.queries > prefill_chunk:
        raise ValueError(
            f"policy {policy} asks for the last {asked.queries} queries, but a chunk has {prefill_chunk} tokens: "
            f"use Engine(prefill_chunk=...) of at least {asked.queries}, or ask for every query (None)"
        )


def attend_and_learn(
    policy: PrefillPolicy,
    query: Float[Array, "B T H D"],
    layer: PagedKV,
    ctx: PrefillContext,
    learning: Learning | None,
    known: tuple[Any, ...],
) -> tuple[Float[Array, "B T H D"], tuple[Any, ...]]:
    """A chunk's attention in one layer, and every learning policy's state after it. known: this layer's states before
    it."""
    if learning is None:
        return policy.attend(query, layer, ctx), ()
    out, lse = policy.attend_with_lse(query, layer, ctx) if isinstance(policy, DensePrefill) else (policy.attend(query, layer, ctx), None)
    masses = {asked: _mass(asked, query, lse, layer, ctx, learning) for asked in dict.fromkeys(each.learns for each in learning.policies)}
    states = []
    for each, before in zip(learning.policies, known, strict=True):
        mass, first = masses[each.learns]
        states.append(each.observe(mass, MassContext(first, ctx.lengths, ctx.layer, ctx.shards, ctx.kv_replicas), before))
    return out, tuple(states)


def _mass(
    asked: AttentionMass,
    query: Float[Array, "B T H D"],
    lse: Float32[Array, "B T H"] | None,
    layer: PagedKV,
    ctx: PrefillContext,
    learning: Learning,
) -> tuple[Float32[Array, "B H S"], Int[Array, "B"]]:
    """Mass of every block, and the first observed position. Reads only observed rows. lse: None: the rows first attend
    densely to get it."""
    rows, starts, first = query.shape[1], ctx.starts, learning.first
    if asked.queries is not None:
        first = jnp.maximum(first, ctx.lengths - asked.queries)
        count = min(asked.queries, rows)
        offset = jnp.clip(ctx.lengths - starts - count, 0, rows - count)
        query, starts = _rows(query, offset, count), starts + offset
        lse = None if lse is None else _rows(lse, offset, count)
    if lse is None:
        _, lse = flash_attention(query, layer.pages, ctx.frames, starts, ctx.lengths, sm_scale=ctx.sm_scale)
    size = asked.tokens(layer.pages.page_size)
    sizes = {"block_size": size, "sm_scale": ctx.sm_scale}
    mass = block_mass(query, layer.pages, ctx.frames, starts, ctx.lengths, lse, first, **sizes)
    return fitted(mass, learning.max_pages * layer.pages.page_size // size), first


def _rows(array: Array, offset: Int[Array, "B"], count: int) -> Array:
    """`count` rows of the second axis from each offset on."""
    return jax.vmap(lambda each, at: jax.lax.dynamic_slice_in_dim(each, at, count))(array, offset)
