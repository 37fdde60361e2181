"""What an engine is asked to do in one step, and what comes of it.

Decode steps and chunks of prefill are calls of their own, never fused: what a chunk writes depends on the chunk alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checks import whole_number
from kvjax.outcomes import Outcome, Reads, unpack
from kvjax.policies.decode import DecodePolicy
from kvjax.sampling import Sampled, SamplingRows
from kvjax.sequences import CachedSequence


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences that are decoded together, through one policy: write `tokens` of each and sample what follows.

    sequences: one per slot, None where a slot is empty; as many as a batch bucket of the engine. tokens: `[B]`, or `[B, T]`: the token
    that each row is certain of, and T - 1 drafted ones behind it. policy: None is the engine's. counts: as `Engine.decode_and_sample`
    takes them.
    """

    sequences: tuple[CachedSequence | None, ...]
    tokens: Int[Array, "B *T"]
    sampling: SamplingRows
    policy: str | DecodePolicy | None = None
    counts: Int[Array, "B V"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of prefill. tokens: those that follow in `sequence`, as many as the chunk has room for; more are left for later chunks.

    slices: of layers to run now; None runs all that are left. A chunk that is not through all layers is gone on with by later plans, which
    name the same sequence and tokens; until then nothing else may be done with the sequence but to free it.
    """

    sequence: CachedSequence
    tokens: tuple[int, ...] | list[int]
    slices: int | None = None

    def __post_init__(self):
        if self.slices is not None:
            whole_number("slices", self.slices, 1)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Decode steps, and chunks of prefill after them. No sequence stands in it twice."""

    decodes: tuple[DecodeGroup, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def sequences(self) -> list[CachedSequence]:
        """All that it writes to."""
        decoded = (each for group in self.decodes for each in group.sequences if each is not None)
        return [*decoded, *(chunk.sequence for chunk in self.chunks)]


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """Of one `DecodeGroup`, on the device: what was sampled, and what was read. packed: both, as `kvjax.outcomes.pack` packs them."""

    sampled: Sampled
    reads: Reads
    packed: Int[Array, "B C"]

    def read(self) -> Outcome:
        """Wait for the step, and bring all of it but the counts to the host."""
        tokens = self.sampled.tokens
        return unpack(np.asarray(self.packed), tokens.shape[1] if tokens.ndim == 2 else None)


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """Of one plan. chunk_logits: `[V]` float32 after each chunk's last token; None for a chunk that is not through all layers."""

    decodes: tuple[Decoded, ...]
    chunk_logits: tuple[Float[Array, " V"] | None, ...]
