"""The engine: the one stateful object. It owns the pool of pages and runs the pure steps over it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.axes import check_mesh, plan_sizes, several_processes
from kvjax.cache import PageAllocator
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.page_manager import PageManager, pages_for
from kvjax.cache.page_tables import table_width
from kvjax.cache.pool import Layers, Pool, PoolStats
from kvjax.checks import PROMPTS_REMEDY, TokenIds, check_model, check_salt, engine_sizes, listed, optional_function, token_ids, whole_number
from kvjax.compilation import CompileAhead, use_compilation_cache
from kvjax.engine import PREFILL_CHUNK
from kvjax.engine.call_lock import CallLock, guarded
from kvjax.engine.capacity import Capacity
from kvjax.engine.decode_batch import DecodeBatch, Launched, Written
from kvjax.engine.memory import MemoryPlan, host_memory, memory_plan, plan_with_weights, pool_pages
from kvjax.engine.multi_step import STOP_IDS, Ends, decode_steps
from kvjax.engine.page_eviction import PageEviction
from kvjax.engine.policy_set import PolicySet, programs_of
from kvjax.engine.policy_state import rows_of
from kvjax.engine.prefill_runner import ChunkRun, Prefiller
from kvjax.engine.sampling import Sampled, Sampling, SamplingRows, check_rows
from kvjax.engine.sequence import CachedSequence, check_usable
from kvjax.engine.sharding import spec_on_mesh
from kvjax.engine.step_output import AttentionStats, count_tokens_that_stay
from kvjax.engine.step_plan import (
    DRAFTS,
    Chunk,
    Decoded,
    DecodeGroup,
    Launch,
    StepPlan,
    StepResult,
    check_launch,
    check_plan,
    host_tokens,
    padded_rows,
    step_key,
)
from kvjax.engine.steps import StepInputs, StepProgram, StepStatic, decode_and_sample, decode_step
from kvjax.engine.store_options import StoreOptions, check_stores
from kvjax.model.placement import place_model
from kvjax.model.protocols import Model
from kvjax.policies.choice import Choice, ChoosesDecode
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.decode.base import is_watched
from kvjax.policies.prefill import PrefillPolicy
from pallas_kernels.core.messages import shown

if TYPE_CHECKING:
    from kvjax.cache.prefix_cache import PrefixStats
    from kvjax.cache.stores.suspended import SuspendedPages
    from kvjax.engine.inspection import StepRead
    from kvjax.engine.prefix_reuse import Reuse
    from kvjax.engine.sequence_io import SequenceCopies
    from kvjax.engine.warmup import Warmup

logger = logging.getLogger(__name__)

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """Prefill, decode, extend, fork, truncate and free sequences of one model.

    policy: the decode policy, or its name (`policies.decode.parse`); None: dense, or the model's own (tokens:K, of an
    indexer). policies: others that calls may name; sealing builds the indexes of all. pages: size of the pool; None
    fits it to free memory. page_size and prefill_chunk: in tokens; the chunk is a multiple of the page. prefill: the
    prefill policy, or its name (`parse_prefill`); None as for policy. batch_buckets: decode batches are padded to the
    next of these sizes; a sequence's bits are the same in every batch of a bucket. cache_format: how full pages are
    packed, as "int8" or "k=int8,v=int4"; None: not at all (docs/cache-formats.md). sequences: those not freed yet.
    last_reads: what the latest decode step read, summed over layers and KV heads; None before the first. device_bytes:
    size of the pool on the device in bytes, in place of pages. mesh: `kvjax.mesh(...)`, over whose devices weights and
    pages are split (docs/devices.md). stores: host_bytes, disk and disk_bytes are room for pages besides the device,
    and with reuse say which pages outlive their sequences: see `kvjax.engine.store_options.StoreOptions` and
    docs/tiers.md.

    Use it from one thread at a time. A call while another thread is in a method raises RuntimeError, and does not
    disturb the other call. Ctrl-C takes effect between chunks of prefill and after other methods, so pages and lengths
    stay consistent (`kvjax.engine.call_lock`). If a step fails half-way (device memory runs out, say), the engine loses
    its pages, and later calls raise RuntimeError: make a new one. If only a chunk's sequence is lost, because its
    recurrent state has moved on, calls that use it raise RuntimeError: free it.
    """

    def __init__(
        self,
        model: Model,
        policy: str | DecodePolicy | None = None,
        *,
        policies: str | DecodePolicy | Iterable[str | DecodePolicy] = (),
        pages: int | None = None,
        page_size: int = 128,
        prefill_chunk: int = PREFILL_CHUNK,
        prefill: str | PrefillPolicy | None = None,
        batch_buckets: tuple[int, ...] = BATCH_BUCKETS,
        cache_format: str | None = None,
        device_bytes: int | None = None,
        mesh: Mesh | None = None,
        **stores: Unpack[StoreOptions],
    ):
        use_compilation_cache()
        check_model(model, "Engine")
        check_mesh(mesh, stores)
        packed = parse_cache_format(cache_format, model.config.compute_dtype)
        self.guard, self.mesh = CallLock("this engine"), mesh
        self.model, self.config = model if mesh is None else place_model(model, mesh), model.config
        self._unplaced = model
        self.page_size, self.prefill_chunk, self.batch_buckets = engine_sizes(page_size, prefill_chunk, batch_buckets)
        self.dtype = jnp.dtype(self.config.compute_dtype)
        self.spec, self.cache_format = spec_on_mesh(self.config.cache_spec(page_size, packed), mesh), packed and str(packed)
        split = {"page_size": page_size, "prefill_chunk": prefill_chunk, "mesh": mesh, "cache_format": packed}
        self._policy_set = PolicySet(model, policy, policies, prefill, **split)
        self.policy, self.policies, self.policy_names = self._policy_set.policy, self._policy_set.policies, self._policy_set.named
        self.prefill_policy, self.indexes = self._policy_set.prefill, self._policy_set.indexes
        sizes = {"page_size": page_size, "prefill_chunk": self.prefill_chunk, "sequences": self.batch_buckets[-1]}
        sizes |= {"reach": self._policy_set.reach, "cache_format": packed} | plan_sizes(mesh)
        # No method of this engine: one that nobody holds any more should go at once, and its stores with it.
        self._plan_beside_weights = functools.partial(memory_plan, self.config, **sizes, indexes=self.indexes, weights_bytes=0)
        plan = self._plan_beside_weights()
        self._stores = kept_in = check_stores(self._policy_set.states.policies, **stores)
        host = host_memory(plan, kept_in.host_bytes, self.spec, chunk=self.prefill_chunk, keeps_none=kept_in.keeps_none)
        if host.why:
            logger.info("%s bytes of host memory are a store of pages and states for later prompts: %s", f"{host.store_bytes:,}", host.why)
        totals = pool_pages(plan, self.config, pages, device_bytes, host.pages, mesh=mesh)
        self._page_manager = PageManager(
            self.spec, *totals, self.prefill_chunk, hot=bool(self.indexes), reach=self._policy_set.reach, mesh=mesh
        )
        self._policy_set.frames = next((each.counts for each in self._page_manager.frames.values()), None)
        self._page_eviction = PageEviction(self._page_manager, self.page_size, self.policy, self._policy_set.reach)
        self._capacity = Capacity(self.config, self._page_manager, self._plan_beside_weights)
        self._pool = Pool(self._page_manager.empty(self.indexes), self.spec, self._page_manager.frames, self._page_manager.shards)
        self._prefiller = Prefiller(self.model, self._pool, self._page_manager, self._policy_set.states, self.indexes, self.prefill_chunk)
        self._reuse: Reuse | None = None
        if kept_in.reuse:
            from kvjax.engine.prefix_reuse import Reuse

            self._reuse = Reuse(model, self._pool, self._page_manager, self._policy_set, self._prefiller, kept_in, host)
        self._capacity.pinned = None if self._reuse is None else self._reuse.pinned
        self._runs: dict[CachedSequence, ChunkRun] = {}
        self._decode_batches: dict[tuple[int, DecodePolicy], DecodeBatch] = {}  # of every policy and batch size; they stay on the device
        self._rows: tuple[SamplingRows | None, int] = None, 0  # the latest, and the slots that they are known to fit
        self._placed: tuple[SamplingRows | None, SamplingRows | None] = None, None  # rows as given, and on the device
        self._sampled: Array | None = None  # the tokens that the latest step sampled for these rows, one for each slot
        self._compile_ahead, self._programs = CompileAhead(), set[Hashable]()  # of steps that have run
        self.last_reads: AttentionStats | None = None
        self.sequences: set[CachedSequence] = set()

    def __repr__(self) -> str:
        name, policies = getattr(self.model, "name", "") or self.config.family, ", ".join(map(str, self.policies))
        pool = self._page_manager.describe() + (f", packed as {self.cache_format}" if self.cache_format else "")
        return f"Engine({name!r}: {policies}; prefill {self.prefill_policy}; {pool}, sequences={len(self.sequences)})"

    # Capacity

    @property
    def on_cpu(self) -> bool:
        """Whether the host computes the steps itself."""
        return self._pool.on_cpu

    def memory_plan(self) -> MemoryPlan:
        """Weights, cache per 1K tokens and pages that fit, for this model as loaded."""
        return plan_with_weights(self._plan_beside_weights(), [self.model.params, getattr(self.model, "draft_params", None)])

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes of device memory that the pages and states of sequences take, by layer group. Shared pages count
        once."""
        return {name: count * self.spec.bytes_per_page(name, self.indexes) for name, count in self._page_manager.used.items()}

    @property
    def allocators(self) -> dict[str, PageAllocator]:
        """The page allocators, by layer group."""
        return self._page_manager.allocators

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take in a layer group that keeps all of them."""
        return -(-tokens // self.page_size)

    def check_length(self, tokens: int, policy: DecodePolicy | None = None) -> None:
        """ValueError if a sequence of `tokens` tokens is longer than the model's positions, OutOfPages if the whole
        pool is too small.

        policy: decodes the sequence to that length, and may count positions in the cache or give pages back. None: it
        is prefilled."""
        self._capacity.check_length(tokens, self.prefill_policy if policy is None else policy)

    def fitted(self, sampling: Sampling, prompt_tokens: int, policy: DecodePolicy) -> Sampling:
        """`Capacity.fitted`."""
        return self._capacity.fitted(sampling, prompt_tokens, policy)

    @property
    def last_choice(self) -> Choice | None:
        """What `auto` chose last, for a step or at a request's admission, and why; None before the first."""
        return self._policy_set.last_choice

    @property
    def last_prefill_choice(self) -> Choice | None:
        """What prefill `auto` chose for the latest chunk, and why; None before the first."""
        return self._policy_set.last_prefill_choice

    def declared(self, policy: str | DecodePolicy | None) -> DecodePolicy:
        """The policy of a call; None is the engine's own. ValueError if it scans an index that this engine's pages do
        not have."""
        return self._policy_set.find(policy)

    def chosen(self, policy: DecodePolicy, lengths: Sequence[int]) -> DecodePolicy:
        """The policy of a step over sequences of these lengths in tokens: `policy`, or what `auto` chooses. Logs a new
        choice."""
        return self._policy_set.choose(policy, lengths)

    def grows(self, sequence: CachedSequence, tokens: int) -> bool:
        """Whether `tokens` more tokens of a sequence need pages that it does not hold."""
        return any(pages_for(sequence.length + tokens, group) > len(sequence.pages[group.name]) for group in self.spec.groups)

    def slices_left(self, sequence: CachedSequence | None) -> int:
        """Slices of layers that the sequence's chunk of prefill has not run yet; all of them if no chunk has begun."""
        run = self._runs.get(sequence)
        return len(self._prefiller.slices) - (0 if run is None else run.done)

    def check_room(self, tokens: int, sequence: CachedSequence | None = None, growing: Sequence[CachedSequence] = ()) -> None:
        """OutOfPages unless a sequence of `tokens` tokens fits, and those of `growing` find one page more each.

        sequence: None: a new one. The pages that it holds are not needed, and if it is suspended, only those that it
        held are.
        """
        self._capacity.check_room(tokens, sequence, growing)

    # Sequences

    @guarded
    def new_sequence(self, prompt: Sequence[int] | None = None, *, cache_salt: str | None = None) -> CachedSequence:
        """A sequence without tokens. `extend` or chunks of `step` write to it.

        prompt: where the engine reuses pages, the sequence begins with the longest prefix of these tokens that is
        known, at most all but the last token: write the rest, `prompt[sequence.length :]`. cache_salt: only prompts of
        the same salt share pages.
        """
        sequence = self._page_eviction.new_sequence()
        self.sequences.add(sequence)
        if prompt is not None:
            with self._kept(sequence):
                self._adopt(sequence, self.check_tokens(prompt), cache_salt)
        return sequence

    @guarded
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        reserve: int = 0,
        on_tokens: Callable[[int], None] | None = None,
        cache_salt: str | None = None,
    ) -> list[CachedSequence]:
        """Write whole prompts (token ids) to new sequences; `.logits` of each predicts the next token.

        reserve: tokens beyond the prompt whose pages are taken now, so that later steps cannot run out. on_tokens:
        called with the number of tokens done, after each chunk. cache_salt: as in `new_sequence`. Prompts are written
        one at a time, so a prompt's bits do not depend on the others. Raises OutOfPages, and ValueError for an empty
        prompt, one too long for the model, or a token outside the vocabulary; then no prompt is kept.
        """
        reserve = whole_number("reserve", reserve)
        optional_function("on_tokens", on_tokens)
        prompts = [self.check_tokens(prompt) for prompt in listed(prompts, "prompts", PROMPTS_REMEDY)]
        for prompt in prompts:
            self.check_length(len(prompt))
            self.check_length(len(prompt) + reserve, self.policy)
        if self._reuse is None:  # else prompts may share pages
            with self._capacity.advice():
                self._page_manager.check_new([len(prompt) + reserve for prompt in prompts])
        sequences = [self._page_eviction.new_sequence() for _ in prompts]
        with self._kept(*sequences):
            for sequence, prompt in zip(sequences, prompts, strict=True):
                self._adopt(sequence, prompt, cache_salt)
                self.reserve([sequence], len(prompt) - sequence.length + reserve)
            for sequence, prompt in zip(sequences, prompts, strict=True):
                if on_tokens and sequence.length:
                    on_tokens(sequence.length)
                self._write(sequence, prompt[sequence.length :], all_logits=False, on_tokens=on_tokens)
            self.guard.interrupt_point()
        return sequences

    @guarded
    def extend(self, sequence: CachedSequence, tokens: Sequence[int], *, all_logits: bool = False) -> Float[Array, "*T V"]:
        """Append tokens by prefill and return the logits after the last one, `[V]`, or after each, `[T, V]`; float32.

        `.logits` and `[V]` have the bits of one prefill of the whole, unless the prefill policy looks at several
        queries of a chunk at once (`queries_stand_alone` is False): then tokens added to a chunk that an earlier call
        began are prefilled densely. Rows of `[T, V]` come from one product of a whole chunk with the head, and may
        round otherwise. Raises as `prefill` does. After an error (or Ctrl-C), chunks already written stay: `.length`
        and `.tokens` say which, and `.logits` is then None.
        """
        self._check_live([sequence])
        tokens = self.check_tokens(tokens)
        self.check_length(sequence.length + len(tokens))
        with self._reserved([sequence], len(tokens)):
            return self._write(sequence, tokens, all_logits=all_logits)

    @guarded
    def decode(
        self, sequences: Sequence[CachedSequence], tokens: Sequence[int] | Sequence[Sequence[int]], policy: str | DecodePolicy | None = None
    ) -> Float[Array, "n *T V"]:
        """Write one given token of every sequence through the decode policy, and return the next-token logits, float32.

        tokens: one of every sequence, or a row of T (4, 8 or 16): then logits are `[n, T, V]`. Each of the T tokens
        reads what it would read alone; the bits are those of a step of T. For forced text or your own sampling;
        `kvjax.generate` samples inside the step.
        """
        self._check_live(sequences)
        padded, given = padded_rows(sequences, tokens, self.batch_buckets, self.config.vocab_size)
        launched = self._launch(decode_step, padded, given, policy, written=given.shape[1])
        self._keep(launched, given.shape[1])
        self._pool.expect_none(self.last_reads.missing)
        for sequence, row in zip(sequences, given.tolist(), strict=False):
            sequence.tokens += row
        logits = launched.results[0][: len(sequences)]
        return logits if np.ndim(tokens[0]) else logits[:, 0]

    @guarded
    def inspect(self, sequences: Sequence[CachedSequence], tokens: Sequence[int], policy: str | DecodePolicy | None = None) -> StepRead:
        """What a decode step of any policy would read, by layer and KV head, with scores, and its logits.

        The step runs as in `decode`, and attends to the listed blocks once more for the scores. Sequences, states of
        learning policies, `last_reads` and `last_choice` do not change. Waits for the device. Raises as `decode` does.
        """
        from kvjax.engine.inspection import inspect_step, read_of

        self._check_live(sequences)
        ones = [[token] for token in listed(tokens, "tokens", "give one of every sequence")]
        padded, given = padded_rows(sequences, ones, self.batch_buckets, self.config.vocab_size)
        policy_set = self._policy_set
        kept, pages = (self.last_reads, policy_set.last_choice), [sequence.page_counts() for sequence in sequences]
        try:
            launched = self._launch(inspect_step, padded, given, policy)
            launched.slots.forget()  # the step's result is dropped
            named = self.declared(policy)
            return read_of(named if is_watched(named) else launched.policy, len(sequences), self.spec, *launched.results)
        finally:
            self.last_reads, policy_set.last_choice = kept
            for sequence, counts in zip(sequences, pages, strict=True):
                self._page_manager.keep(sequence, counts)

    @guarded
    def step(self, plan: StepPlan) -> StepResult:
        """Run a plan: its decode steps, then slices of its chunks of prefill, each as a separate call. Does not wait
        for the device.

        Raises what `decode_and_sample` and `extend` raise. The whole plan is checked, and its pages are taken, first:
        after ValueError or OutOfPages nothing has run, and no page was taken. The caller appends decoded tokens to
        `.tokens` when it knows them.
        """
        groups = [self._checked(each) for each in check_plan(plan).decodes]
        if len(groups) > 1 or plan.chunks:  # one step alone takes its own before it runs
            self._take_pages(groups, plan.chunks)
        decodes = tuple([self._decode(each) for each in groups])
        for each in plan.chunks if self._compile_ahead.running else ():
            self._compile_ahead.wait(self._runs[each.sequence].program)
        return StepResult(decodes, tuple([self._prefiller.advance_one_of(self._runs, each.sequence, each.slices) for each in plan.chunks]))

    @guarded
    def decode_and_sample(
        self,
        slots: Sequence[CachedSequence | None],
        tokens: Int[Array, "B *T"],
        rows: SamplingRows,
        policy: str | DecodePolicy | None = None,
        *,
        counts: Int[Array, "B V"] | None = None,
    ) -> Sampled:
        """Write one token per slot (None: empty) and sample the next one, all in one jitted call.

        tokens: `[B]`; or `[B, T]`, T being 4, 8 or 16: each row's certain token and T - 1 drafted ones, -1 where there
        is no draft. Results then have an axis T, and `accepted` says how many of the row's tokens stay: the first, and
        the drafts before the first one that differs from the token sampled in its place. The others are dropped:
        nothing ever reads what they left behind. Waits for the device, to know how many stay.

        Without drafts it does not wait, and the last step may not have computed the tokens yet. So ids in a JAX array
        are not checked: one outside the vocabulary makes its row not finite. The caller appends the written tokens to
        `.tokens` when it knows them, and drops a row whose logits were not finite. counts: needed where a row has a
        penalty: the tokens that each row holds (`kvjax.engine.sampling.seen_tokens`), int32. DONATES counts; the result
        has them, with the tokens that stay added.
        """
        group = DecodeGroup(slots, tokens, rows, policy, counts)
        return self._decode(self._checked(group)).sampled

    @guarded
    def compile_ahead(
        self,
        policy: DecodePolicy,
        sequence: CachedSequence,
        tokens: int,
        samplings: Sequence[Sampling | None],
        launches: Sequence[int] = (1,),
    ) -> None:
        """Compile, in other threads, what follows the prefill of a sequence: the choice of its first token, and the
        decode step of slots with these samplings, the sequence's first. For a policy that learns from prefill a chunk
        of it must have been prefilled. tokens: that the longest sequence in the slots may come to. launches: how many
        steps each launch may have (`decode_steps`)."""
        if policy.learns is not None and not sequence.length:
            return  # its states are not known
        rows, widths = SamplingRows.of(samplings), self._widths(tokens)
        one = SamplingRows.of(samplings[:1])
        self._compile_ahead.begin((one.draws, one.penalises, one.ranks), functools.partial(self._warmup.first_token, one))
        for each, steps in itertools.product(programs_of(policy), launches):
            launch = Launch(steps, Ends.shape_of(len(samplings), STOP_IDS), steps) if steps > 1 else None
            self._begin_compiling(each, [sequence] + [None] * (len(samplings) - 1), widths, rows, launch)

    @guarded
    def compile_chunk_ahead(self, chunk: Chunk) -> bool:
        """Begin a chunk, but run none of it, and compile its program in another thread. Returns whether that takes a
        while, in which more can be compiled. Raises as `step` does."""
        self._take_pages((), (chunk,))
        run = self._runs[chunk.sequence]
        params, pages = (jax.tree.leaves(tree)[0].committed for tree in (self.model.params, self._pool.layers))
        if run.staged is not None or run.program in self._compile_ahead or params != pages:
            return False  # the first call binds the pages to the device of the weights, and the second is another program
        self._compile_ahead.begin(run.program, functools.partial(self._prefiller.calls, run))
        return self._compile_ahead.takes_long(run.program)

    def holds_up(self, group: DecodeGroup) -> bool:
        """Whether the step or launch of a group has to wait until its program is compiled."""
        return not any(self._knows(key) for _, _, key in self._programs_of(group))

    def _programs_of(self, group: DecodeGroup) -> list[tuple[DecodePolicy, dict[str, int], Hashable]]:
        """The programs that may run a group's step or launch, each with its policy and widths of page tables; those
        with room for the whole answer first."""
        unread = max([slots.unread for slots in self._decode_batches.values()], default=0)
        longest = unread + int(np.max(group.written)) + max(each.length for each in group.sequences if each is not None)
        policies, rooms = programs_of(self._policy_set.find(group.policy)), (max(longest, group.reach), longest)
        found = itertools.product(rooms, policies)
        return [(each, widths := self._widths(room), step_key(each, widths.values(), group.sampling, group.launch)) for room, each in found]

    def _knows(self, key: Hashable) -> bool:
        return key in self._programs or self._compile_ahead.is_compiled(key)

    def _room(
        self, policy: DecodePolicy, slots: DecodeBatch, written: Written, rows: SamplingRows, launch: Launch | None, reach: int
    ) -> int:
        """For how many tokens the page tables of a sampled step have room at least: for `reach`, so that all steps of
        an answer run one program. But where the program of narrower tables is there, nobody waits for another: it is
        compiled in another thread when three quarters of the narrower tables are filled."""
        longest = slots.longest_after(written)
        if longest >= reach:
            return longest
        narrow, wide = self._widths(longest), self._widths(reach)
        if narrow == wide or several_processes(self.mesh):
            return reach  # other processes may have compiled more, or less
        known = [self._knows(step_key(policy, widths.values(), rows, launch)) for widths in (narrow, wide)]
        if known != [True, False]:
            return reach
        if 4 * longest >= 3 * min(narrow[group.name] * group.page_size for group in self.spec.groups):
            self._begin_compiling(policy, slots.sequences, wide, rows, launch)
        return longest

    def has_program(self, group: DecodeGroup) -> bool:
        """Whether the program of a group's launch is compiled, or cannot be: then the launch says why. Another thread
        compiles it; that of several steps only if it is often asked for (`kvjax.compilation.CompileAhead.wanted`)."""
        programs = self._programs_of(group)
        count = len(programs) // 2
        for each, widths, key in programs[:count]:
            if group.launch.draft is not None or self._compile_ahead.wanted(key):
                self._begin_compiling(each, group.sequences, widths, group.sampling, group.launch)
        compiled = [self._compile_ahead.is_compiled(key) for _, _, key in programs]
        if group.launch.draft is not None and any(self._compile_ahead.has_failed(key) for _, _, key in programs):
            return True
        return all(compiled[:count]) or (all(compiled[count:]) and not several_processes(self.mesh))

    def _begin_compiling(
        self,
        policy: DecodePolicy,
        sequences: Sequence[CachedSequence | None],
        widths: dict[str, int],
        rows: SamplingRows,
        launch: Launch | None,
    ) -> None:
        call = functools.partial(self._warmup.steps_call, policy, sequences, widths, rows, launch and launch.shapes())
        self._compile_ahead.begin(step_key(policy, widths.values(), rows, launch), call)

    def _widths(self, tokens: int) -> dict[str, int]:
        """The widths of page tables whose longest row has so many tokens, by layer group."""
        return {group.name: table_width(-(-tokens // group.page_size)) for group in self.spec.groups}

    @guarded
    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same history: sealed pages are shared, the open one is copied. Raises
        OutOfPages."""
        self._check_live([sequence])
        child = self._copies.fork(sequence)
        self.sequences.add(child)
        return child

    @guarded
    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Drop the tokens from `length` on. They must lie in the open page, because sealed pages may be shared and are
        never reopened.

        Reserved pages are given back too. A learning policy keeps what it learned from the dropped tokens.
        """
        self._check_live([sequence])
        length = whole_number("length", length)
        lowest = sequence.length // self.page_size * self.page_size
        if not lowest <= length <= sequence.length:
            raise ValueError(
                f"cannot truncate to {length} tokens: the sequence has {sequence.length}, of which the first {lowest} are sealed; "
                f"a length from {lowest} to {sequence.length} is possible (fork before writing to go back further)"
            )
        self._page_manager.keep_written(sequence, length)
        del sequence.tokens[length:]
        sequence.length, sequence.logits, sequence.open_chunk = length, None, None
        if sequence.prefix is not None:
            sequence.prefix.length = min(sequence.prefix.length, length)

    @guarded
    def free(self, sequence: CachedSequence) -> None:
        """Give the sequence's pages back. It cannot be used afterwards."""
        check_usable([sequence], self.sequences, None)
        if self._reuse is not None:
            self._reuse.freed(sequence)
        self._page_manager.keep_written(sequence, 0)
        self.sequences.remove(sequence)
        self._runs.pop(sequence, None)
        sequence.pages = self._page_manager.new()  # slots notice the change by this
        if sequence.suspended is not None:
            self.suspended.drop(sequence)
        sequence.logits = sequence.suspended = None

    @guarded
    def reserve(self, sequences: Sequence[CachedSequence], tokens: int) -> None:
        """Take the pages that `tokens` more tokens of every sequence need, or raise OutOfPages and take none."""
        self._check_live(sequences)
        tokens = whole_number("tokens", tokens)
        with self._capacity.advice():
            self._page_manager.reserve(sequences, tokens)

    @guarded
    def save(self, sequence: CachedSequence, path: str | Path) -> None:
        """Write a sequence's pages and tokens to a file that `restore` reads. It is written under another name, then
        renamed.

        The states of learning policies are not written, so policies that learn from prefill cannot decode a restored
        sequence. ValueError if `.tokens` does not hold the token of every position.
        """
        self._check_live([sequence])
        self._copies.save(sequence, path)

    @guarded
    def restore(self, path: str | Path) -> CachedSequence:
        """A sequence from a file of `save`, bit for bit. ValueError if another model, page size or dtype made it, and
        for a damaged file.

        `.logits` is None: extend it, or decode the next token.
        """
        sequence = self._copies.restore(path)
        self.sequences.add(sequence)
        return sequence

    @guarded
    def suspend(self, sequence: CachedSequence, *, briefly: bool = False) -> None:
        """Move the sequence's pages and states to host memory, and free them on the device. Call `resume` before you
        use it again; its bits are then the same. Waits for the device. briefly: it comes back by itself, so limits of
        `suspended` do not count it."""
        self._check_live([sequence])
        self._copies.suspend(sequence, briefly)

    @guarded
    def resume(self, sequence: CachedSequence) -> None:
        """Bring a suspended sequence back to the device. If there are too few pages, it stays suspended and OutOfPages
        is raised."""
        self._check_live([sequence], ready=False)
        self._copies.resume(sequence)

    @guarded
    def warmup(self, *, batch: int = 1, tokens: int | None = None, policy: str | DecodePolicy | None = None) -> None:
        """Compile the steps that `batch` sequences decoded together need before the first real call.

        It compiles prefill, and greedy decoding in the batch bucket of `batch`, for every page-table width up to that
        of `tokens` tokens (None: one page), and with `host_bytes` the copies of pages (docs/tiers.md). Programs are
        traced one after the other, and compiled beside each other in up to 8 threads. Steps in which a row draws at
        random are compiled when first used. Raises as `prefill` does.
        """
        from kvjax.engine.warmup import Calls

        batch = whole_number("batch", batch, 1)
        tokens = min(self.page_size, self.config.max_positions) if tokens is None else whole_number("tokens", tokens, 1)
        self.check_length(tokens, self.declared(policy))
        calls = Calls(
            self.prefill,
            self.reserve,
            self.free,
            lambda sequence, only: self._begin(sequence, [0], only=only),
            self._write_one,
            lambda slots, rows, policy: self.decode_and_sample(slots, np.zeros(len(slots), np.int32), rows, policy),
            self.guard.interrupt_point,
        )
        self._warmup.run(calls, self.batch_buckets, batch, tokens, policy)

    @guarded
    def pin(self, prefix: CachedSequence | Sequence[int], cache_salt: str | None = None) -> int:
        """Keep the pages of a prompt's beginning in the pool until `unpin`, and return how many tokens they hold.

        prefix: token ids, all of whose full pages were prefilled before and are still known, or a sequence, for its own
        prompt. Pages that are not in the pool are copied back. Pinning twice changes nothing. At most half of the pages
        can be pinned. ValueError for more than that, for a prefix that is not known, and for an engine without reuse;
        OutOfPages.
        """
        with self._capacity.advice():
            return self._reusing().pin(self._prefix(prefix), cache_salt)

    @guarded
    def unpin(self, prefix: CachedSequence | Sequence[int], cache_salt: str | None = None) -> int:
        """Let the longest pinned prefix of these tokens go again, and return how many it holds. ValueError if there is
        none."""
        return self._reusing().unpin(self._prefix(prefix), cache_salt)

    @property
    def suspended(self) -> SuspendedPages:
        """The pages of suspended sequences."""
        return self._copies.suspended

    def stats(self) -> PrefixStats | None:
        """What reused pages are where, and what was found; None where the engine reuses nothing."""
        return None if self._reuse is None else self._reuse.stats()

    def pool_stats(self) -> PoolStats | None:
        """Where pages of the pool lie, and what has moved; None where none may lie in host memory. Waits for the
        device."""
        return self._pool.stats()

    @guarded
    def close(self) -> None:
        """Wait until the disk has all pages, and give its folder back. The engine goes on without it. Needed only with
        `disk`."""
        if self._reuse is not None:
            self._reuse.close()

    # Inside

    @contextlib.contextmanager
    def _kept(self, *sequences: CachedSequence) -> Iterator[None]:
        """New sequences, live from here on. They are freed again if the block that fills them fails."""
        self.sequences.update(sequences)
        try:
            yield
        except BaseException:
            for sequence in sequences:
                self.free(sequence)
            raise

    @contextlib.contextmanager
    def _reserved(self, sequences: Sequence[CachedSequence], tokens: int | Sequence[int]) -> Iterator[None]:
        """Take pages for `tokens` more tokens of every sequence, or so many for each. If the block fails, those that
        hold nothing go back."""
        before = [sequence.page_counts() for sequence in sequences]
        with self._capacity.advice():
            self._page_manager.reserve(sequences, tokens)
        try:
            yield
        except BaseException:
            for sequence, counts in zip(sequences, before, strict=True):
                self._page_manager.keep_written(sequence, sequence.length, counts)
            raise

    def _write(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        *,
        all_logits: bool,
        on_tokens: Callable[[int], None] | None = None,
        only: PrefillPolicy | None = None,
    ):
        """Run the chunks that hold positions [length, length + len(tokens)).

        only: the policy that runs all of them, wherever they begin, to compile its program; the result does not
        matter."""
        collected, done = [], 0
        while done < len(tokens):
            self.guard.interrupt_point()
            run = self._begin(sequence, tokens[done:], all_logits=all_logits, only=only)
            self._prefiller.advance(run)
            done += len(run.written)
            if all_logits:
                collected.append(run.x[run.first - run.start : run.last - run.start])
            if on_tokens:
                jax.block_until_ready(run.x)
                on_tokens(len(run.written))
        sequence.logits = run.logits
        return jnp.concatenate(collected) if all_logits else run.logits

    def _write_one(self, sequence: CachedSequence, only: PrefillPolicy) -> None:
        """Write the token 0 by a prefill policy."""
        with self._reserved([sequence], 1):
            self._write(sequence, [0], all_logits=False, only=only)

    @functools.cached_property
    def _copies(self) -> SequenceCopies:
        from kvjax.engine.sequence_io import SequenceCopies

        given = self._pool, self._page_manager, self._capacity, self._page_eviction, self.indexes, self.prefill_chunk, self.guard
        return SequenceCopies(self._unplaced, *given, self.cache_format)

    @functools.cached_property
    def _warmup(self) -> Warmup:
        from kvjax.engine.warmup import Warmup

        return Warmup(self.model, self._pool, self._page_manager, self._policy_set, self._prefiller)

    def _begin(
        self, sequence: CachedSequence, tokens: Sequence[int], *, all_logits: bool = False, only: PrefillPolicy | None = None
    ) -> ChunkRun:
        """A chunk of the sequence's next tokens, with pages for them, before its first slice of layers."""
        chunk = self.prefill_chunk
        policy = only or self._policy_set.choose_prefill(self.prefill_policy, sequence.length // chunk * chunk)
        self._page_eviction.check(policy, [sequence], "prefill")
        self._page_manager.give_back(sequence)
        count = min(len(tokens), chunk - sequence.length % chunk)
        if self.grows(sequence, count):  # most callers have taken the pages of the whole prompt
            self.reserve([sequence], count)
        return self._prefiller.begin(sequence, tokens, policy, all_logits=all_logits, always=only is not None)

    def _take_pages(self, groups: Sequence[DecodeGroup], chunks: Sequence[Chunk]) -> None:
        """Take pages for everything that a plan writes, and begin its chunks. After an error none were taken, and no
        chunk was begun."""
        self._check_live(StepPlan(tuple(groups), tuple(chunks)).sequences(), ready=False)
        with contextlib.ExitStack() as reserved:
            for group in groups:
                slots = self._filled(self.declared(group.policy), group.sequences, group.written, group.launch)
                reserved.enter_context(self._reserved(*slots.lacking(group.written)))
            for chunk in chunks:
                reserved.enter_context(self._started(chunk))

    @contextlib.contextmanager
    def _started(self, chunk: Chunk) -> Iterator[None]:
        """Begin a chunk, unless it has begun already. If the block fails, it is as if it had not begun."""
        sequence, tokens = chunk.sequence, self.check_tokens(chunk.tokens)
        if sequence in self._runs:
            self._runs[sequence].check_same(tokens)
            yield
            return
        self._check_live([sequence])
        self.check_length(sequence.length + len(tokens))
        before = sequence.page_counts()
        self._runs[sequence] = self._begin(sequence, tokens)
        try:
            yield
        except BaseException:
            del self._runs[sequence]
            self._page_manager.keep_written(sequence, sequence.length, before)
            raise

    def _adopt(self, sequence: CachedSequence, prompt: TokenIds, cache_salt: str | None) -> None:
        check_salt(cache_salt)
        if self._reuse is not None:
            self._reuse.adopt(sequence, prompt, cache_salt)

    def _check_live(self, sequences: Sequence[CachedSequence], *, ready: bool = True) -> None:
        self.settle()
        check_usable(sequences, self.sequences, self._runs.keys() if ready else None)

    def _reusing(self) -> Reuse:
        """ValueError for an engine that reuses nothing."""
        if self._reuse is None:
            raise ValueError("this engine keeps no pages to pin: make it with reuse=True, host_bytes or disk")
        return self._reuse

    def _prefix(self, given: CachedSequence | Sequence[int]) -> CachedSequence | TokenIds:
        if not isinstance(given, CachedSequence):
            return self.check_tokens(given)
        self._check_live([given], ready=False)
        return given

    def check_tokens(self, tokens: Sequence[int]) -> TokenIds:
        """`kvjax.checks.token_ids` of this model's vocabulary. Ids that were looked at once are not looked at again."""
        return token_ids(tokens, self.config.vocab_size)

    # Decode steps

    def _on_device(self, rows: SamplingRows) -> SamplingRows:
        """The rows on the device. The same rows are put there once, unless they have NumPy arrays that their owner may
        still change."""
        if rows is not self._placed[0]:
            if any(isinstance(each, np.ndarray) and each.flags.writeable for each in jax.tree.leaves(rows)):
                return self._pool.put(jax.tree.map(np.array, rows))  # copies, because a CPU array may share the memory of what was put
            self._placed = rows, self._pool.put(rows)
        return self._placed[1]

    def _checked(self, group: DecodeGroup) -> DecodeGroup:
        """The group, with its tokens in an array. ValueError unless tokens, sampling and counts fit its slots, which
        are a batch bucket."""
        if not isinstance(group.sequences, tuple | list):
            raise ValueError(f"a step takes a tuple of sequences, None for an empty slot, got {shown(group.sequences)}")
        slots, tokens, vocab_size = len(group.sequences), group.tokens, self.config.vocab_size
        if group.launch is not None:
            check_launch(group)
        if tokens is self._sampled and group.sampling is self._rows[0] and slots == self._rows[1] and group.counts is None:
            return group  # as the step before
        if slots not in self.batch_buckets:
            raise ValueError(f"{slots} slots are no batch bucket of this engine: {self.batch_buckets}")
        if not isinstance(tokens, jax.Array):
            tokens = host_tokens(tokens, group.sequences, vocab_size)
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids must be whole numbers, got {tokens.dtype}")
        drafted = tokens.ndim == 2
        if drafted and tokens.shape[1] not in DRAFTS[1:]:
            raise ValueError(f"a drafted step writes {', '.join(map(str, DRAFTS[1:]))} tokens of every sequence, got {tokens.shape[1]}")
        first, rows = tokens[:, 0] if drafted else tokens, group.sampling
        known = rows is self._rows[0] and slots == self._rows[1] and not rows.penalises
        if first.shape != (slots,) or not known or group.counts is not None:
            check_rows(rows, first, group.counts, slots, vocab_size)
            self._rows, self._sampled = (rows, slots), None
        return group if tokens is group.tokens else dataclasses.replace(group, tokens=tokens)

    def _decode(self, group: DecodeGroup) -> Decoded:
        """Run a group that was checked, and keep its result. Waits for the device if a step had drafts."""
        launch, step, sampling = group.launch, decode_and_sample, (self._on_device(group.sampling), group.counts)
        if launch is not None:
            step, sampling = decode_steps, (*sampling, *launch.arrays)
            if launch.draft is not None:
                from kvjax.engine.drafts import draft_rounds as step
        sizes = {"written": group.written, "launch": launch, "reach": group.reach}
        launched = self._launch(step, group.sequences, group.tokens, group.policy, sampling, **sizes)
        sampled, packed, *following = launched.results
        drafted = sampled.accepted is not None
        self._send(packed)
        if drafted and launch is not None and self._needs_no_counts(launched):
            launched.slots.launched_ahead(launched.cache, packed, launch.most)
        else:
            if drafted:
                kept = np.asarray(sampled.accepted) if launch is None else count_tokens_that_stay(np.asarray(packed))
            self._keep(launched, kept if drafted else group.written)
        self._sampled = None if drafted or sampled.counts is not None else sampled.tokens
        return Decoded(sampled, self.last_reads, packed, *following)

    def _needs_no_counts(self, launched: Launched) -> bool:
        """Whether the next rounds can be launched before the host knows how many tokens of these stay."""
        policy, manager = launched.policy, self._page_manager
        plain = self._policy_set.states.stateless(policy) and not is_watched(policy) and not self._page_eviction.gives_back(policy)
        return plain and not (manager.has_windows or self._pool.frames)

    def settle(self, packed: Array | None = None) -> None:
        """Wait for rounds of drafting: a plan of rounds may return before it is known how many tokens they wrote, and
        until then the sequences have their earlier lengths. packed: of `Decoded`, up to which; None: all. Every call
        that uses a sequence, except `free`, waits by itself."""
        for slots in self._decode_batches.values():
            slots.settle(packed)

    def _send(self, packed: Array) -> None:
        """Begin to copy a step's results to the host."""
        if not self._pool.on_cpu:  # there the host reads the array in place
            packed.copy_to_host_async()

    def _launch(
        self,
        step: StepProgram,
        padded: Sequence[CachedSequence | None],
        tokens,
        policy,
        sampling=(),
        *,
        written: Written = 1,
        launch: Launch | None = None,
        reach: int = 0,
    ) -> Launched:
        """Launch a decode step over padded slots, with pages for the tokens that it writes. sampling: the fields of
        `StepInputs` after the states. launch, reach: of `DecodeGroup`."""
        policy = self.declared(policy)
        slots = self._filled(policy, padded, written, launch)
        sequences, counts = slots.lacking(written)
        with self._reserved(sequences, counts) if sequences else contextlib.nullcontext():
            return self._run(step, slots, tokens, policy, sampling, written, launch, reach)

    def _run(
        self,
        step: StepProgram,
        slots: DecodeBatch,
        tokens: Array,
        policy: DecodePolicy,
        sampling: tuple[Any, ...],
        written: Written,
        launch: Launch | None,
        reach: int,
    ) -> Launched:
        """Run a step that writes so many tokens of every sequence in the slots, or slot by slot. Their pages must have
        been taken. The sequences do not change."""
        if isinstance(policy, ChoosesDecode):
            counts = [written] * len(slots.rows) if isinstance(written, int) else written[slots.rows].tolist()
            policy = self._policy_set.choose(policy, [length + count for length, count in zip(slots.lengths, counts, strict=True)])
        if is_watched(policy) and not self._watches_each(tokens):
            from kvjax.engine.watching import program_of

            policy = program_of(policy, slots, written, several=not isinstance(written, int) or written > 1)
        if self._pool.frames:
            self._pool.advance_copies()
            self._pool.bring_back(slots.sealed)
        sampled = bool(sampling) and tokens.ndim == 1
        room = self._room(policy, slots, written, sampling[0], launch, reach) if sampled else 0
        cache, following = slots.cache(self._pool, written, room)
        widths = [cache.page_tables[group.name].shape[1] for group in cache.spec.groups]
        if sampled:
            key = step_key(policy, widths, sampling[0], launch)
            self._compile_ahead.wait(key)
        if self._pool.beside is not None and not isinstance(tokens, jax.Array):
            tokens = self._pool.put(tokens)
        states = self._policy_set.states.of_batch(policy, slots.sequences)
        if is_watched(policy):
            from kvjax.engine.watching import after_prompts

            states = after_prompts(policy, slots, states)
        inputs = StepInputs(self.model.params, cache, tokens, slots.active, states, *sampling)._replace(following=following)
        several = () if launch is None else (launch.steps, launch.draft)
        if launch is not None:
            inputs = inputs._replace(draft_params=launch.draft_params(self.model))
        static = StepStatic(self.model.decoder, policy, self.indexes, self._pool.shards, *several)
        try:
            results = self._pool.run(step, static, inputs, kept=self._pages_of)
        except BaseException:
            slots.forget()
            raise
        if sampled:
            self._programs.add(key)
        *results, cache, states, self.last_reads = results
        return Launched(policy, slots, results, states, cache, static.steps)

    def _watches_each(self, tokens: Array) -> bool:
        """Whether a watched policy runs one program for all steps, because those of the policy alone round otherwise:
        drafted tokens attend together there, and pages in host memory are read through the hot buffer."""
        return (tokens.ndim == 2 and tokens.shape[1] > 1) or bool(self._pool.frames)

    def _pages_of(self, result: tuple) -> tuple[Layers, Array]:
        """The pages in a decode step's result, and one of its outputs."""
        *_, cache, _, reads = result
        return self._pool.keep(cache, reads.keys)

    def _keep(self, launched: Launched, written: Written = 1) -> None:
        """Keep a step's result. written: how many of the tokens written stay, per slot."""
        slots, states = launched.slots, launched.states
        learned, alarms = [], {}
        if not self._policy_set.states.stateless(launched.policy) and jax.tree.leaves(states):
            try:
                rows = rows_of(states)
                learned = [rows[row] for row in slots.rows]
                if is_watched(launched.policy):
                    from kvjax.engine.watching import alarms_of

                    alarms = alarms_of(launched.policy, slots, written, states)
            except BaseException:  # no memory on the device, say
                slots.forget()
                raise
        # Nothing can fail from here on.
        slots.advance(launched.cache, written)
        if self._page_manager.has_windows:
            for sequence in slots.live:
                self._page_manager.give_back(sequence)
        for sequence, state in zip(slots.live, learned, strict=False):
            sequence.states[launched.policy] = state
        for sequence, alarm in alarms.items():
            sequence.alarms[launched.policy] = alarm
        if self._page_eviction.gives_back(launched.policy):
            counts = [written] * len(slots.live) if isinstance(written, int) else written[slots.rows].tolist()
            if launched.steps > 1:
                counts = [min(each, 1) for each in counts]
            self._page_eviction.after_step(launched.policy, slots.live, counts)

    def _filled(
        self, policy: DecodePolicy, padded: Sequence[CachedSequence | None], written: Written, launch: Launch | None
    ) -> DecodeBatch:
        """The slots of a policy's batches of this size, with these sequences in them. Waits for rounds in flight, if
        they have to be known before this launch."""
        slots = self._decode_batches.get((len(padded), policy))
        if slots is None:
            slots = self._decode_batches[len(padded), policy] = DecodeBatch(self.spec, len(padded), self._pool.put)
        if not slots.hold(padded):
            self._check_live([each for each in padded if each is not None])
            self._policy_set.states.check_learned(policy, padded)
            self._page_eviction.check(policy, padded)
            slots.fill(padded)
        elif self._runs:
            self._check_live(slots.live)
        elif launch is None or launch.draft is None or not slots.has_room_ahead(launch.most):
            slots.settle()
        self.check_length(slots.longest_after(written), policy)
        return slots
