"""Prefill, chunk by chunk: a chunk goes through the layers in slices, between which an engine may do something else.

Chunks begin at multiples of the chunk size and slices are cut in one way for a model, whoever shares the device, so that a prompt's bits
depend on the prompt alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import Cache, IndexSpec
from kvjax.cache.groups import GroupPages
from kvjax.cache.pool import Pool
from kvjax.learning import Learning, OpenChunk, PolicyStates, after_chunk
from kvjax.model import Model
from kvjax.policies.prefill import DensePrefill, PrefillPolicy
from kvjax.sequences import CachedSequence
from kvjax.steps import prefill_step

logger = logging.getLogger(__name__)

SLICE = 4
"""Layers in a slice, at most. Fixed: programs cut elsewhere may round differently."""


@dataclasses.dataclass(eq=False)
class ChunkRun:
    """A chunk on its way through the layers: the tokens `written` of `sequence`, after which it has `last` tokens.

    done: slices it has gone through. x: token ids `[1, T]` before the first slice, hidden states between slices, logits after the last.
    """

    sequence: CachedSequence
    written: list[int]
    first: int
    last: int
    start: int
    policy: PrefillPolicy
    all_logits: bool
    learning: Learning | None
    opened: OpenChunk | None
    tables: dict[str, Int[np.ndarray, "1 M"]]
    x: Array | np.ndarray
    done: int = 0
    learned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def check_same(self, tokens: Sequence[int]) -> None:
        """ValueError unless these tokens begin with those of the chunk."""
        if list(tokens[: len(self.written)]) != self.written:
            raise ValueError("the sequence is in the middle of a chunk of other tokens: go on with those, or free the sequence")


class Prefiller:
    """Runs chunks over an engine's pages. chunk: tokens. indexes: what sealing builds."""

    def __init__(self, model: Model, pool: Pool, groups: GroupPages, states: PolicyStates, indexes: tuple[IndexSpec, ...], chunk: int):
        self.model, self.indexes, self.chunk = model, indexes, chunk
        self._pool, self._groups, self._states = pool, groups, states
        count = len(groups.spec.layers)
        cuts = [round(count * part / -(-count // SLICE)) for part in range(-(-count // SLICE) + 1)]
        self.slices = tuple(itertools.pairwise(cuts))
        """First layer, and the one after the last, of every slice."""

    def begin(
        self, sequence: CachedSequence, tokens: Sequence[int], policy: PrefillPolicy, *, all_logits: bool = False, always: bool = False
    ) -> ChunkRun:
        """Begin to write as many of `tokens` as the chunk of the sequence's next token has room for. The pages must be there.

        always: run the policy wherever the tokens begin, for its program and not for its result.
        """
        first = sequence.length
        start = first // self.chunk * self.chunk
        written = list(tokens[: start + self.chunk - first])
        last = first + len(written)
        whole = first == start or policy.queries_stand_alone or always
        if not whole:
            logger.info("positions %d to %d go into a chunk begun earlier: dense, not %s", first, last - 1, policy)
            policy = DensePrefill()
        ids = np.zeros((1, self.chunk), np.int32)
        ids[0, first - start : last - start] = written
        learning, opened = self._states.before_chunk(sequence, start, first, whole=whole)
        if opened is not None:
            ids[0, opened.position - start : first - start] = opened.tokens
        tables = self._groups.tables([sequence])
        return ChunkRun(sequence, written, first, last, start, policy, all_logits, learning, opened, tables, ids)

    def advance(self, run: ChunkRun, slices: int | None = None) -> bool:
        """Take a chunk through its next slices, None: all that are left. True after the last: its tokens are written, and `run.x` are
        logits."""
        left = len(self.slices) - run.done
        for _ in range(left if slices is None else min(slices, left)):
            self._next_slice(run)
        if run.done < len(self.slices):
            return False
        sequence = run.sequence
        sequence.tokens += run.written
        sequence.length, sequence.logits = run.last, None
        learned = tuple(tuple(state for states in parts for state in states) for parts in zip(*run.learned, strict=True))
        after_chunk(sequence, run.learning, run.opened, learned, run.written)
        return True

    def _next_slice(self, run: ChunkRun) -> None:
        first, last = self.slices[run.done]
        layers = self._pool.layers
        # Layers of other slices are left out, so that only this slice's pages are donated.
        own = tuple(layer if first <= number < last else None for number, layer in enumerate(layers))
        cache = Cache(own, run.tables, np.array([run.last], np.int32), self._groups.spec)
        run.x, _, learned = self._pool.run(
            prefill_step,
            self.model.decoder,
            run.policy,
            self.indexes,
            self.model.params,
            cache,
            run.x,
            np.array([run.start], np.int32),
            np.array([run.first], np.int32),
            first=first,
            last=last,
            all_logits=run.all_logits,
            learning=run.learning,
            layers=lambda result: (*layers[:first], *result[1].layers[first:last], *layers[last:]),
        )
        run.learned.append(learned)
        run.done += 1
