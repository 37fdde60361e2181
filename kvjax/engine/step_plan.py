"""The plan of one engine step, and its result.

Decode steps and chunks of prefill are separate calls, never fused, so what a chunk writes depends only on the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Int32

from kvjax.cache import MAX_STEP_TOKENS
from kvjax.checks import token_ids, whole_number
from kvjax.compilation import shape_of
from kvjax.engine.decode_batch import Written, in_bucket
from kvjax.engine.multi_step import Ends
from kvjax.engine.sampling import Sampled, SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_output import AttentionStats, StepOutput, unpack
from kvjax.engine.steps import Draft
from kvjax.model.protocols import Model, Params
from kvjax.policies.decode import DecodePolicy
from pallas_kernels.core.messages import shown

DRAFTS = (1, 4, 8, 16)
"""How many tokens of a sequence a step may write. There are few sizes, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """Several decode steps in one call (`kvjax.engine.multi_step.decode_steps`). steps: 1 to MAX_STEP_TOKENS. ends:
    where rows end; the result has those of the next launch. written: the most tokens that these steps write, in every
    row or row by row; a row that ends early writes fewer, and must not be used afterwards without correcting its
    sequence's length. draft: so many rounds in place of steps (`kvjax.engine.drafts`); then `Sampled.accepted`
    says how many tokens each row has more. history: for drafts that are looked up, the tokens of each row, its latest
    one the last, with room for those that the launch makes; or its shape, before the launch is certain."""

    steps: int
    ends: Ends
    written: Written
    draft: Draft | None = None
    history: Int[Array, "B M"] | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The fields of `StepInputs` after those of sampling."""
        return self.ends, self.history

    @property
    def most(self) -> int:
        """The most tokens that it writes in a row."""
        return int(np.max(self.written))

    @property
    def program_key(self) -> tuple[Any, ...]:
        """What its program is compiled for, besides what every step's is."""
        return self.steps, self.draft, *self.ends.stop_ids.shape, *(() if self.history is None else self.history.shape)

    def draft_params(self, model: Model) -> Params | None:
        """The weights by which a policy drafts; None: the model's. A model may have others
        (`kvjax.models.CausalLM.with_draft_weights`)."""
        return None if self.draft is None or self.draft.policy is None else getattr(model, "draft_params", None)

    def shapes(self) -> Launch:
        """The same with shapes in place of arrays."""
        history = None if self.history is None else shape_of(self.history.shape, np.int32)
        return dataclasses.replace(self, ends=Ends.shape_of(*self.ends.stop_ids.shape), history=history)


def step_key(policy: DecodePolicy, widths: Iterable[int], rows: SamplingRows, launch: Launch | None) -> tuple[Hashable, ...]:
    """What a program of sampled decode steps is compiled for, beside the engine itself. widths: of the page tables."""
    which = (1,) if launch is None else launch.program_key
    return policy, len(rows.temperature), *widths, rows.draws, rows.penalises, rows.ranks, *which


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences that are decoded together through one policy: write `tokens` of each, and sample the next token.

    sequences: one per slot, None where a slot is empty; their number is a batch bucket of the engine. tokens: `[B]`, or
    `[B, T]`: each row's certain token, and T - 1 drafted ones after it. policy: None is the engine's. counts: as
    `Engine.decode_and_sample` takes them. launch: several steps at once, without drafts; None: one. reach: tokens that
    the longest sequence may come to; page tables have room for them, so that later steps run the same program.
    """

    sequences: tuple[CachedSequence | None, ...]
    tokens: Int[Array, "B *T"]
    sampling: SamplingRows
    policy: str | DecodePolicy | None = None
    counts: Int[Array, "B V"] | None = None
    launch: Launch | None = None
    reach: int = 0

    @property
    def written(self) -> Written:
        """The most tokens that it writes."""
        if self.launch is not None:
            return self.launch.written
        return self.tokens.shape[1] if self.tokens.ndim == 2 else 1


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of prefill. tokens: the next tokens of `sequence`. The chunk takes as many as it has room for, and leaves
    the rest. Only a chunk that leaves none has logits.

    slices: how many slices of layers to run now; None: all that are left. To continue a chunk that has not run all
    layers, name the same sequence and tokens in a later plan. Until it is done, the sequence can only be freed.
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    slices: int | None = None

    def __post_init__(self):
        if self.slices is not None:
            whole_number("slices", self.slices, 1)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Decode steps, and then chunks of prefill. Each sequence appears at most once."""

    decodes: tuple[DecodeGroup, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def sequences(self) -> list[CachedSequence]:
        """All sequences that it writes to."""
        decoded = (each for group in self.decodes for each in group.sequences if each is not None)
        return [*decoded, *(chunk.sequence for chunk in self.chunks)]


def check_plan(plan: StepPlan) -> StepPlan:
    """The plan; ValueError unless it is one, of decode groups and chunks."""
    if not isinstance(plan, StepPlan):
        raise ValueError(f"a step runs a kvjax.engine.step_plan.StepPlan, got {shown(plan)}: StepPlan(decodes=(...), chunks=(...))")
    for entries, kind in ((plan.decodes, DecodeGroup), (plan.chunks, Chunk)):
        if not isinstance(entries, tuple | list) or not all([isinstance(each, kind) for each in entries]):  # noqa: C419 - a list is faster
            raise ValueError(f"a plan holds a tuple of {kind.__name__}, got {shown(entries)}")
    return plan


def padded_rows(
    sequences: Sequence[CachedSequence], tokens: Sequence[Any], buckets: Sequence[int], vocab_size: int
) -> tuple[list[CachedSequence | None], Int[np.ndarray, "B T"]]:
    """Slots and tokens of a step, padded to a batch bucket. tokens: one of every sequence, or a row of them."""
    if not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0:
        raise ValueError(f"tokens must be a list with one token of every sequence, or a row of them, got {shown(tokens)}")
    if len(tokens) != len(sequences):
        raise ValueError(f"{len(tokens)} tokens for {len(sequences)} sequences; a step writes one token of each, or a row of them")
    slots = in_bucket(sequences, buckets)
    rows = [token_ids(each if np.ndim(each) else [each], vocab_size) for each in tokens]
    if len(rows[0]) not in DRAFTS or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"a step writes {', '.join(map(str, DRAFTS))} tokens of every sequence, got rows of {list(map(len, rows))}")
    padded = np.zeros((len(slots), len(rows[0])), np.int32)
    padded[: len(rows)] = rows
    return slots, padded


def host_tokens(tokens: Any, sequences: Sequence[CachedSequence | None], vocab_size: int) -> Int32[np.ndarray, "B *T"]:
    """The tokens of a step that are not on the device yet, checked. Rows of empty slots may hold anything where a step
    has drafts."""
    if np.ndim(tokens) != 2:
        return np.array(token_ids(tokens, vocab_size), np.int32)
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers, got {ids.dtype}")
    wrong = (ids < -1) | (ids >= vocab_size)
    wrong[:, :1] |= ids[:, :1] < 0
    for row, column in np.argwhere(wrong):
        if row < len(sequences) and sequences[row] is not None:
            raise ValueError(
                f"token {ids[row, column]} at place {column} of row {row} is outside the vocabulary of {vocab_size}; "
                "only a drafted token may be -1, where there is none"
            )
    return ids.astype(np.int32)


def check_launch(group: DecodeGroup) -> None:
    """ValueError unless a group's launch fits it."""
    launch, slots = group.launch, len(group.sequences)
    whole_number("steps of a launch", launch.steps, 1, MAX_STEP_TOKENS + 1)
    if launch.draft is not None:
        whole_number("tokens of a round", launch.draft.tokens, 2, MAX_STEP_TOKENS + 1)
    if group.tokens.ndim == 2:
        raise ValueError(f"a launch of {launch.steps} steps has no drafts, and got tokens of shape {group.tokens.shape}: give one per slot")
    shapes = {"left": np.shape(launch.ends.left), "stop_ids": np.shape(launch.ends.stop_ids)[:1]}
    if not isinstance(launch.written, int):
        shapes["written"] = launch.written.shape
    for name, shape in shapes.items():
        if shape != (slots,):
            raise ValueError(f"{name} of a launch must have a row for each of {slots} slots, got {shape}")


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """The result of one `DecodeGroup`, on the device: what was sampled, and what was read. packed: both, as
    `kvjax.engine.step_output.pack` packs them; `Engine.step` has begun to copy it to the host. Of a launch of N steps:
    sampled and reads are of the last one, packed has an axis N first, and ends says where rows end in the next launch.
    history: after rounds whose drafts were looked up, that of the next launch."""

    sampled: Sampled
    reads: AttentionStats
    packed: Int[Array, "*N B C"]
    ends: Ends | None = None
    history: Int[Array, "B M"] | None = None

    def read(self) -> StepOutput:
        """Wait for the step, and copy its results to the host, except the counts. Not for a launch of several."""
        tokens = self.sampled.tokens
        return unpack(np.asarray(self.packed), tokens.shape[1] if tokens.ndim == 2 else None)


@dataclasses.dataclass(frozen=True, eq=False)
class Prefilled:
    """The result of one `Chunk` that has run all layers. written: its tokens. logits: `[V]` float32 after the last of
    them; None where the chunk left tokens. output: an array that is there when the device is done with the chunk."""

    written: int
    logits: Float[Array, " V"] | None
    output: Array

    def wait(self) -> None:
        """Wait until the device is done with the chunk."""
        self.output.block_until_ready()


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one plan. chunks: None for a chunk that has not run all layers."""

    decodes: tuple[Decoded, ...]
    chunks: tuple[Prefilled | None, ...]
