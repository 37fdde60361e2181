"""Decode steps over an engine's pages: what a step reads is put together, run, and kept or left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.cache.groups import GroupPages
from kvjax.cache.pool import Pool
from kvjax.declared import DeclaredPolicies
from kvjax.model import Model
from kvjax.policies.decode import DecodePolicy
from kvjax.sequences import CachedSequence
from kvjax.slots import Slots
from kvjax.steps import Reads

DRAFTS = (1, 4, 8, 16)
"""Tokens of one sequence that a step may write: few sizes, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launched:
    """A decode step that is on its way: the policy that runs, what it returns before the cache, the policy's states, and the cache."""

    policy: DecodePolicy
    slots: Slots
    results: list[Any]
    states: tuple[Any, ...]
    cache: Cache


class DecodeRunner:
    """Runs decode steps. The slots of every policy and batch size stay on the device. last_reads: what the latest step reads."""

    def __init__(self, model: Model, pool: Pool, groups: GroupPages, declared: DeclaredPolicies):
        self.model, self.last_reads = model, None
        self._pool, self._groups, self._declared = pool, groups, declared
        self._slots: dict[tuple[int, DecodePolicy], Slots] = {}
        self.last_reads: Reads | None = None

    def fill(self, policy: DecodePolicy, padded: Sequence[CachedSequence | None]) -> Slots:
        """The slots of a policy's batches of this size, with these sequences in them."""
        slots = self._slots.get((len(padded), policy))
        if slots is None:
            slots = self._slots[len(padded), policy] = Slots(self._groups.spec, len(padded))
        slots.fill(padded)
        return slots

    def launch(self, step: Callable, slots: Slots, tokens: Array, policy: DecodePolicy, *rest: Any, num_tokens: int = 1) -> Launched:
        """Run a step that writes `num_tokens` tokens of every sequence in the slots, whose pages must be there. Sequences stay as they
        are."""
        policy = self._declared.choose(policy, [each.length + num_tokens for each in slots.live])
        cache, following = slots.cache(self._pool.layers, num_tokens)
        states = self._declared.states.of_batch(policy, slots.sequences)
        args = (self.model.decoder, policy, self._declared.indexes, self.model.params, cache, tokens, slots.active, states, *rest)
        try:
            results = self._pool.run(step, *args, following=following, layers=lambda result: result[-3].layers)
        except BaseException:
            slots.forget()
            raise
        *results, cache, states, self.last_reads = results
        return Launched(policy, slots, results, states, cache)

    def keep(self, launched: Launched, written: int | Int[np.ndarray, "B"] = 1) -> None:
        """Take a step: of every slot so many tokens were written and stay."""
        slots, states = launched.slots, launched.states
        counts = [written] * slots.size if isinstance(written, int) else written.tolist()
        rows = [(row, each) for row, each in enumerate(slots.sequences) if each is not None]
        learns = bool(jax.tree.leaves(states))
        learned = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], states) for row, _ in rows] if learns else []
        # Nothing can fail from here on.
        slots.advance(launched.cache, written)
        for row, sequence in rows:
            sequence.length += counts[row]
            sequence.logits = sequence.open_chunk = None
        if self._groups.has_windows:
            for sequence in slots.live:
                self._groups.give_back(sequence)
        for (_, sequence), state in zip(rows, learned, strict=False):
            sequence.states[launched.policy] = state
