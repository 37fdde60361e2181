"""Requests that run: their samples, the tokens of each, and the batch of samples that are decoded together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from kvjax.compilation import program, shape_of
from kvjax.engine.multi_step import STOP_IDS, Ends
from kvjax.engine.sampling import NotFinite, Sampling, SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_output import BLOCKS, FINITE, KEYS, TOKENS, count_tokens_that_stay, listed, unpack
from kvjax.engine.step_plan import Decoded, DecodeGroup, Launch
from kvjax.policies.decode.base import is_watched
from kvjax.scheduler.request import Completion, Request
from kvjax.scheduler.rounds import NO_ROUNDS, Rounds
from kvjax.text.detokenizer import TextStream

if TYPE_CHECKING:
    from kvjax.policies.decode import DecodePolicy

Ranked = tuple[tuple[int, float], ...]
"""Pairs of token id and log-probability, best first."""


@dataclasses.dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request: its tokens, except those that its `ActiveBatch` put aside, and what they cost.

    issued: tokens so far, including those in flight. stream: turns tokens into text as they come, if somebody listens
    or a stop string may end the sample; else None. blocks, keys: read by its steps, summed over layers and KV heads.
    rounds: of drafting.
    """

    state: RequestState
    index: int
    sampling: Sampling
    sequence: CachedSequence
    stop_ids: frozenset[int]
    stream: TextStream | None
    issued: int = 1
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[Ranked] = dataclasses.field(default_factory=list)
    blocks: int = 0
    keys: int = 0
    rounds: Rounds = NO_ROUNDS
    finish_reason: str | None = None
    error: Exception | None = None
    only_ids: bool = dataclasses.field(init=False)
    """Whether only the ids of tokens are kept."""

    def __post_init__(self):
        self.only_ids = self.stream is None and not self.sampling.logprobs

    @property
    def handle(self) -> Handle:
        """That of its request."""
        return self.state.handle

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: higher priority first, then the earlier request, then the earlier of its samples."""
        return (*self.handle.order[:2], self.index)

    @property
    def wants_more(self) -> bool:
        """Whether it needs another step, as far as is known."""
        return self.finish_reason is None and self.issued < self.sampling.max_new_tokens

    def take(self, token: int, logprob: float) -> str:
        """Add a token. Returns the text that became certain with it, if there is a `stream`. Sets `finish_reason` if it
        is the last."""
        self.ids.append(token)
        if self.sampling.logprobs:
            self.logprobs.append(logprob)
        ends, piece = token in self.stop_ids, ""
        if self.stream is not None and not ends:
            try:
                piece = self.stream.push(token)
            except ValueError as error:
                return self._unwritten(error)
        if ends or (self.stream is not None and self.stream.stopped):
            self.finish_reason = "stop"
        elif len(self.ids) == self.sampling.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason and self.stream is not None:
            try:
                piece += self.stream.close()
            except ValueError as error:
                return self._unwritten(error)
            if self.stream.stopped:  # by a stop string before a character that did not become whole
                self.finish_reason = "stop"
        return piece

    def _unwritten(self, error: ValueError) -> str:
        """The tokenizer cannot write the text: the sample ends, and others go on."""
        self.error, self.finish_reason = error, "error"
        return ""

    def rank(self, tokens: list[int], logprobs: list[float]) -> None:
        """Keep the most likely tokens at the latest token's place, except tokens that can never be chosen."""
        best = zip(tokens, logprobs, strict=True)
        self.top_logprobs.append(tuple((token, value) for token, value in best if value > -np.inf))

    def fail(self) -> None:
        """The logits for the next token were not finite."""
        self.error, self.finish_reason = NotFinite(self.handle.prompt_tokens + len(self.ids)), "error"

    def cancel(self) -> None:
        """End it with the tokens it has. Tokens in flight are dropped."""
        self.finish_reason = "cancelled"
        if self.stream is not None:
            try:
                self.stream.close()
            except ValueError as error:
                self._unwritten(error)

    def text(self, tokenizer) -> str:
        """The text of all tokens, without a stop token at the end."""
        if self.stream is None:
            if tokenizer is None:
                return ""
            self.stream = TextStream(tokenizer, context=self.handle.prompt_end)
            for token in self.ids:
                if token not in self.stop_ids:
                    self.stream.push(token)
            self.stream.close()
        return self.stream.text

    def completion(self, tokenizer, kv_heads: int) -> Completion:
        """Its completion. kv_heads: the KV heads of all layers, over which reads are summed."""
        try:
            text = "" if self.error is not None else self.text(tokenizer)
        except ValueError as error:
            text = self._unwritten(error)
        if self.error is not None:
            return Completion(finish_reason="error", prompt_tokens=self.handle.prompt_tokens, error=self.error)
        policy = self.state.policy
        heads = kv_heads * max(len(self.ids) - 1, 1)  # the first token comes from prefill
        return Completion(
            text=text,
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs) if self.sampling.logprobs else None,
            top_logprobs=tuple(self.top_logprobs) if self.sampling.top_logprobs else None,
            finish_reason=self.finish_reason,
            prompt_tokens=self.handle.prompt_tokens,
            blocks_per_step=self.blocks / heads,
            keys_per_step=self.keys / heads,
            found_tokens=self.handle.found_tokens,
            prompt_end=self.handle.prompt_end,
            rounds=self.rounds,
            missed=policy.missed(self.sequence.states.get(policy)) if is_watched(policy) else None,
        )


@dataclasses.dataclass(eq=False)
class Handle:
    """A submitted request, for who submitted it; the scheduler has a `RequestState` of its own. completion: None until
    it has finished, failed or was cancelled. prompt_tokens: known once it is admitted; found_tokens: of these, those
    that were found when it was; prompt_end: their last ids, which the text of the answer continues. sampling: the
    request's, clipped if it allows that. prompting: whether it uses the sequence of its prompt now. started: whether a
    sample of it has started."""

    request: Request
    order: tuple[int, int]
    completion: Completion | None = None
    prompt_tokens: int = 0
    found_tokens: int = 0
    prompt_end: tuple[int, ...] = ()
    sampling: Sampling = dataclasses.field(init=False)
    prompting: bool = False
    started: bool = False

    def __post_init__(self):
        self.sampling = self.request.sampling

    def __repr__(self) -> str:
        state = "waiting" if self.completion is None else self.completion.finish_reason
        return f"Handle({self.request!r}, {'running' if state == 'waiting' and self.started else state})"


class RequestState:
    """A request that has not ended, for the scheduler.

    handle: what its submitter sees. given: the caller's own sequence, of which the sample is a fork. ids: of its
    prompt. policy: decodes it; None before it was looked at. samples: those that have started. untold: found tokens,
    until the next chunk tells of them. begun: whether a chunk of it has begun. sequence: the prompt's, until its last
    sample takes it over.
    """

    def __init__(self, handle: Handle, given: CachedSequence | None = None):
        self.handle, self.given = handle, given
        self.ids: Sequence[int] = ()
        self.policy: DecodePolicy | None = None
        self.samples: list[Sample] = []
        self.untold, self.begun = 0, False
        self._sequence: CachedSequence | None = None

    @property
    def sequence(self) -> CachedSequence | None:
        return self._sequence

    @sequence.setter
    def sequence(self, sequence: CachedSequence | None) -> None:
        self._sequence, self.handle.prompting = sequence, sequence is not None

    @property
    def request(self) -> Request:
        return self.handle.request

    @property
    def order(self) -> tuple[int, int]:
        return self.handle.order

    @property
    def sampling(self) -> Sampling:
        return self.handle.sampling

    @property
    def prompt_tokens(self) -> int:
        return self.handle.prompt_tokens


def order(entry: RequestState | Sample) -> tuple[int, ...]:
    """Sort key. A suspended sample comes before the samples of its request that have not started."""
    return entry.order if isinstance(entry, Sample) else (*entry.order, len(entry.samples))


class ActiveBatch:
    """The samples of a batch that step together, by slot, until one comes, goes, or has issued its last token.

    steps: how many are left until then; 0 after `close`. reach: tokens that the longest may come to. While only ids are
    kept of their tokens and none ends, the results of a step are put aside for all samples together. `settle` gives
    them to the samples.
    """

    def __init__(self, samples: Sequence[Sample | None]):
        self.samples = tuple(samples)
        self.sequences = tuple(None if sample is None else sample.sequence for sample in self.samples)
        self._slots = [slot for slot, sample in enumerate(self.samples) if sample is not None]
        self._stepping = [self.samples[slot] for slot in self._slots]
        self.left = np.array([0 if sample is None else sample.sampling.max_new_tokens - sample.issued for sample in self.samples])
        self.steps = min(self.left[self._slots].tolist(), default=0)
        self.reach = max((sample.state.prompt_tokens + sample.sampling.max_new_tokens for sample in self._stepping), default=0)
        self._alike = all(sample.only_ids for sample in self._stepping)
        self._stop_ids = frozenset().union(*(sample.stop_ids for sample in self._stepping))
        self._aside: list[Int32[np.ndarray, "B C"]] = []

    def launched(self, steps: int = 1) -> None:
        """So many steps of all samples were launched. A sample takes no more than it has left."""
        self.steps = max(0, self.steps - steps)
        self.left = np.maximum(self.left - steps, 0)
        for sample in self._stepping:
            sample.issued = min(sample.issued + steps, sample.sampling.max_new_tokens)

    def drafted(self, kept: Int32[np.ndarray, "N B"], most: int) -> None:
        """N rounds of up to `most` tokens have run, in which so many of each slot stay; 0: it took no part."""
        accepted = kept.sum(axis=0)
        self.left = np.maximum(self.left - accepted, 0)
        self.steps = min(self.left[self._slots].tolist()) if self.steps else 0
        for slot, sample in zip(self._slots, self._stepping, strict=True):
            sample.issued = min(sample.issued + int(accepted[slot]), sample.sampling.max_new_tokens)
            sample.rounds += Rounds(tuple(np.bincount(kept[:, slot], minlength=most + 1)[1:].tolist()))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with those of steps in flight."""
        return max((sample.state.prompt_tokens + sample.issued for sample in self._stepping), default=0)

    def buffer(self, packed: Int32[np.ndarray, "B C"]) -> bool:
        """Keep a step's results for `settle`. Returns False, and keeps nothing, if its rows must be read one by one."""
        if not self._alike:
            return False
        rows = packed if len(packed) == len(self._slots) else packed[self._slots]
        # In every step, so with lists: the first reduction of numpy after a step's call takes longer. Negative blocks:
        # pages were missing.
        if 0 in rows[:, FINITE].tolist() or min(rows[:, BLOCKS].tolist()) < 0:
            return False
        if self._stop_ids and not self._stop_ids.isdisjoint(rows[:, TOKENS].tolist()):
            return False
        self._aside.append(rows)
        return True

    def latest(self) -> list[tuple[Sample, int, str]]:
        """Each sample, and its token of the step that was put aside last, which is no text yet."""
        return [(sample, token, "") for sample, token in zip(self._stepping, self._aside[-1][:, TOKENS].tolist(), strict=True)]

    def settle(self) -> None:
        """Give the samples their tokens that were put aside."""
        if not self._aside:
            return
        rows = np.stack(self._aside, axis=1)
        reads = rows[:, :, [BLOCKS, KEYS]].sum(axis=1, dtype=np.int64).tolist()
        for sample, tokens, (blocks, keys) in zip(self._stepping, rows[:, :, TOKENS].tolist(), reads, strict=True):
            sample.ids += tokens
            sample.blocks += blocks
            sample.keys += keys
        self._aside.clear()

    def close(self) -> None:
        """A sample comes or goes. Tokens still in flight are read one by one."""
        self.settle()
        self._alike, self.steps = False, 0


@dataclasses.dataclass(eq=False, slots=True)
class PendingStep:
    """Tokens in flight to the host: the sample of each row, and the array that `kvjax.engine.step_output.pack` made.

    Of several steps in one launch, packed has an axis N first. active: that of their decode step; None: a first token,
    from prefill. left: the number of the step that may bring a sample's last token, counted from 1. rounds: the launch,
    if it is of rounds of drafting; then packed has an axis of its tokens first, and -1 for a token that does not stay.
    accepted: how many tokens of each slot stay in them; None before `wait`.
    """

    samples: Sequence[Sample | None]
    packed: Int32[Array, "*N B C"]
    active: ActiveBatch | None = None
    left: int = 1
    rounds: Launch | None = None
    accepted: Int32[np.ndarray, "B"] | None = None

    @property
    def steps(self) -> int:
        """How many steps it is."""
        return 1 if self.packed.ndim == 2 else self.packed.shape[0]

    @property
    def policy(self) -> DecodePolicy:
        """That of its samples."""
        return next(sample.state.policy for sample in self.samples if sample is not None)

    @property
    def tokens(self) -> float:
        """New tokens of a sample, the mean. After `wait`."""
        return self.steps if self.accepted is None else max(1.0, float(self.accepted.sum() / max(1, (self.accepted > 0).sum())))

    def wait(self) -> Int32[np.ndarray, "*N B C"]:
        """Wait for the tokens."""
        self.packed = np.asarray(self.packed)
        if self.rounds is not None and self.accepted is None:
            tokens = self.rounds.draft.tokens
            kept = np.stack([count_tokens_that_stay(each) for each in self.packed.reshape(-1, tokens, *self.packed.shape[1:])])
            self.accepted = kept.sum(axis=0)
            self.active.drafted(kept, tokens)
        return self.packed


class Batch:
    """The samples of one policy, in the slots of one batch bucket. A sample keeps its slot while it runs."""

    def __init__(self, policy: DecodePolicy, size: int, vocab_size: int):
        self.policy, self.size, self._vocab_size = policy, size, vocab_size
        self._ends: Ends | None = None  # where samples end on the device, after a launch of several steps
        self._history: Int[Array, "B M"] | None = None  # the samples' tokens on the device, after rounds that looked drafts up
        self.samples: list[Sample | None] = [None] * size
        self._tokens = jax.device_put(np.zeros(size, np.int32))
        self._rows: SamplingRows | None = None
        self._active = ActiveBatch(self.samples)
        self._rounds: PendingStep | None = None  # of drafting, if the latest launch was of rounds
        self._counts: Int[Array, "B V"] | None = None  # tokens of every slot, while a sample has a penalty

    def __len__(self) -> int:
        return sum(sample is not None for sample in self.samples)

    def put(self, sample: Sample, token: Int[Array, "1"], counts: Int[np.ndarray, " V"] | None) -> None:
        """Give a sample a free slot. It continues with its latest token. counts: those of its other tokens."""
        slot = self.samples.index(None)
        self._active.close()
        self.samples[slot], self._rows = sample, None
        self._tokens = _set_token(self._tokens, slot, token)
        self._ends = self._history = None
        if counts is not None:
            if self._counts is None:
                self._counts = jnp.zeros((self.size, self._vocab_size), jnp.int32)
            self._counts = _set_counts(self._counts, slot, counts)

    def remove(self, sample: Sample) -> None:
        """Take a sample out of its slot."""
        self._active.close()
        self.samples[self.samples.index(sample)] = self._rows = self._ends = self._history = None

    def group(self, steps: int = 1, rounds: Launch | None = None, longest: int = 0) -> DecodeGroup | None:
        """The next step of the samples that want more tokens; None if none does. steps: so many in one launch, if some
        sample has as many tokens left. A stop string ends a sample when the host has read the launch; what the device
        has made behind it is dropped. rounds: of drafting, in place of steps, if no sequence then has more
        tokens than `longest`; its `ends` are found here, and the shape of its history (`with_history`)."""
        if not self._active.steps:
            self._active.close()
            self._active = ActiveBatch([sample if sample is not None and sample.wants_more else None for sample in self.samples])
        if not self._active.steps:
            return None
        if self._rows is None:
            rows = SamplingRows.of([None if sample is None else sample.sampling for sample in self.samples])
            self._rows = jax.device_put(rows)
            self._counts = self._counts if rows.penalises else None
        given = self._active.sequences, self._tokens, self._rows, self.policy, self._counts
        launch = self._launch(steps)
        if rounds is not None and (most := self._active.longest + self._ahead(rounds)) <= longest:
            history = None if rounds.draft.policy is not None else self._history_shape(most)
            launch = dataclasses.replace(rounds, ends=self._device_ends(), history=history)
        return DecodeGroup(*given, launch=launch, reach=self._active.reach)

    @property
    def in_flight(self) -> int:
        """The most tokens of a sample that rounds in flight make; 0: none are."""
        return 0 if self._rounds is None or self._rounds.accepted is not None else self._rounds.rounds.most

    @property
    def goes_on(self) -> bool:
        """Whether rounds are in flight, and all samples need more tokens than they make."""
        return 0 < self.in_flight < self._active.steps

    def continues(self, rounds: Launch) -> bool:
        """Whether these rounds are as those in flight, and so do not have to wait until these are read."""
        latest = self._rounds.rounds
        same = latest.history is None or latest.history.shape == self._history_shape(self._active.longest + self._ahead(rounds)).shape
        return latest.draft == rounds.draft and same

    def _ahead(self, rounds: Launch) -> int:
        """How many more tokens than the host has read of a sample rounds come to, at most."""
        return self.in_flight + rounds.most

    def _launch(self, steps: int) -> Launch | None:
        active = self._active
        if steps == 1 or active.left.max() < steps:
            return None
        return Launch(steps, self._device_ends(), steps if active.steps >= steps else np.minimum(active.left, steps))

    def _history_shape(self, most: int) -> jax.ShapeDtypeStruct:
        """Of up to so many tokens of each slot: a power of two, so that few programs are compiled."""
        return shape_of((self.size, 1 << (most - 1).bit_length()), np.int32)

    def with_history(self, group: DecodeGroup) -> DecodeGroup:
        """The group with the tokens of each slot, if its drafts are looked up. All tokens must have been read."""
        if group.launch is None or group.launch.history is None:
            return group
        if self._history is not None and self._history.shape == group.launch.history.shape:
            return dataclasses.replace(group, launch=dataclasses.replace(group.launch, history=self._history))
        self._active.settle()
        rows = np.zeros(group.launch.history.shape, np.int32)
        for row, sample in zip(rows, self._active.samples, strict=True):
            if sample is not None:
                ids = sample.state.ids
                row[: len(ids)], row[len(ids) : len(ids) + len(sample.ids)] = ids, sample.ids
        return dataclasses.replace(group, launch=dataclasses.replace(group.launch, history=jax.device_put(rows)))

    def _device_ends(self) -> Ends:
        """Where samples end, for the device."""
        if self._ends is None:
            stop_ids = _padded([() if sample is None else sample.stop_ids for sample in self.samples])
            self._ends = jax.device_put(Ends(self._active.left.astype(np.int32), stop_ids))
        return self._ends

    def launched(self, group: DecodeGroup, decoded: Decoded) -> PendingStep:
        """The step of a `group` was launched, or its steps or rounds."""
        self._tokens, self._counts = decoded.sampled.tokens, decoded.sampled.counts
        self._ends, self._history, self._rounds = decoded.ends, decoded.history, None
        if decoded.sampled.accepted is not None:
            self._rounds = PendingStep(self._active.samples, decoded.packed, self._active, 0, group.launch)
            return self._rounds
        left = self._active.steps
        step = PendingStep(self._active.samples, decoded.packed, self._active, left)
        self._active.launched(step.steps)
        return step


def _padded(stop_ids: Sequence[Collection[int]]) -> Int32[np.ndarray, "B S"]:
    """Rows of token ids, -1 after them. S is a power of two, so that few programs are compiled."""
    width = max(STOP_IDS, 1 << (max(map(len, stop_ids)) - 1).bit_length())
    rows = np.full((len(stop_ids), width), -1, np.int32)
    for row, ids in zip(rows, stop_ids, strict=True):
        row[: len(ids)] = sorted(ids)
    return rows


@program
def _set_token(tokens: Int[Array, "B"], slot: Int[Array, ""], token: Int[Array, "1"]) -> Int[Array, "B"]:
    """`tokens`, with one slot's token replaced."""
    return tokens.at[slot].set(token[0])


@functools.partial(program, donate_argnames="counts")
def _set_counts(counts: Int[Array, "B V"], slot: Int[Array, ""], row: Int[Array, " V"]) -> Int[Array, "B V"]:
    """`counts`, with one slot's row replaced. DONATES counts."""
    return counts.at[slot].set(row)


def read(pending: PendingStep, *, listening: bool) -> tuple[list[tuple[Sample, int, str]], bool]:
    """Wait for tokens and give them to the samples that have not ended.

    listening: whether a caller wants every token. Returns the sample, token and newly certain text of every token that
    was read one by one (of all if a caller listens), and whether any sample has ended. MissingPages if the step listed
    a page that no frame holds.
    """
    packed, taken, ended = pending.wait(), [], False
    if pending.accepted is not None:  # most tokens of a round may be dropped
        packed = packed[(packed[:, :, TOKENS] >= 0).any(axis=1)]
    for number, step in enumerate(packed if packed.ndim == 3 else packed[None], start=1):
        found, has_ended = _read_step(pending, step, ends=number >= pending.left, listening=listening)
        taken += found
        if has_ended:
            ended = True
            if pending.active is not None:
                pending.active.close()  # rows of samples that have ended mean nothing in later steps
    return taken, ended


def _read_step(
    pending: PendingStep, packed: Int32[np.ndarray, "B C"], *, ends: bool, listening: bool
) -> tuple[list[tuple[Sample, int, str]], bool]:
    """`read` of one step. ends: whether a token of it may be the last of its sample."""
    outcome, taken, ended = None, [], False
    if pending.active is not None:
        if not ends and pending.active.buffer(packed):
            return pending.active.latest() if listening else taken, ended
        pending.active.settle()
    for slot, (sample, token, is_finite, blocks, keys) in enumerate(zip(pending.samples, *listed(packed), strict=True)):
        if sample is None or sample.finish_reason is not None or token < 0:
            continue
        if not is_finite:
            sample.fail()
            ended = True
            continue
        sample.blocks += blocks
        sample.keys += keys
        if sample.sampling.logprobs:
            outcome = outcome or unpack(packed)
        taken.append((sample, token, sample.take(token, float(outcome.logprobs[slot]) if outcome else 0.0)))
        ended = ended or sample.finish_reason is not None
        if count := sample.sampling.top_logprobs:
            sample.rank(outcome.top_tokens[slot, :count].tolist(), outcome.top_logprobs[slot, :count].tolist())
    return taken, ended
