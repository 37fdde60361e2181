"""The engine: the one stateful object. It owns the pool of pages and runs the pure steps over it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import Cache, LayerCache, OutOfPages, PageAllocator, copy_page, restore_pages
from kvjax.cache.files import read_sequence, write_sequence
from kvjax.cache.groups import GroupPages, most_pages
from kvjax.cache.pool import Pool
from kvjax.cache.tables import MIN_TABLE_PAGES, table_width
from kvjax.checks import check_model, token_ids, whole_number
from kvjax.guard import CallGuard, guarded
from kvjax.inspection import StepRead, inspect_step, read_of
from kvjax.learning import PolicyStates, after_chunk
from kvjax.memory import MemoryPlan, check_pool, memory_plan
from kvjax.model import Model, fingerprint
from kvjax.policies.decode import Auto, Choice, DecodePolicy, TopTokens, check_budgets, parse
from kvjax.policies.prefill import AutoPrefill, DensePrefill, PrefillPolicy, indexes_of, parse_prefill, possible_prefills
from kvjax.policies.prefill.lists import TileLists
from kvjax.sampling import Sampled, SamplingRows, sample_step
from kvjax.sequences import CachedSequence
from kvjax.steps import Reads, decode_and_sample, decode_step, prefill_step

logger = logging.getLogger(__name__)

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_POOL = (8, 32_768)
"""A default pool holds at most this many sequences of this many tokens."""


class Engine:
    """Prefill, decode, extend, fork, truncate and free sequences of one model.

    policy: the decode policy, or its name (`policies.decode.parse`). policies: another that calls may name, or several; the indexes of all
    are built as pages are sealed. pages: size of the pool; None fits it to free memory. page_size and prefill_chunk are in tokens; the
    chunk is a multiple of the page. prefill: the prefill policy, or its name (`parse_prefill`). batch_buckets: decode batches
    are padded to the next of these sizes, and a sequence's bits are the same in every batch of one bucket. sequences: those not freed yet.
    last_reads: what the latest decode step read, summed over layers and KV heads (None before the first). last_choice: what `auto` chose
    for it and why (None under other policies); last_prefill_choice: what prefill `auto` chose for the latest chunk.

    One thread at a time: a method called while another thread is in one raises RuntimeError, and the other thread's call is not disturbed.
    Ctrl-C takes effect between chunks of prefill and after other methods, so that pages and lengths are right after it (`kvjax.guard`).
    RuntimeError also from an engine that lost its pages because a step failed half-way, as when device memory runs out: make a new one.
    """

    def __init__(
        self,
        model: Model,
        policy: str | DecodePolicy = "dense",
        *,
        policies: str | DecodePolicy | Iterable[str | DecodePolicy] = (),
        pages: int | None = None,
        page_size: int = 128,
        prefill_chunk: int = 512,
        prefill: str | PrefillPolicy = "dense",
        batch_buckets: tuple[int, ...] = BATCH_BUCKETS,
    ):
        check_model(model, "Engine")
        self.guard = CallGuard("this engine")
        self.model, self.config = model, model.config
        self.page_size, self.prefill_chunk = whole_number("page_size", page_size, 1), whole_number("prefill_chunk", prefill_chunk, 1)
        if prefill_chunk % page_size:
            raise ValueError(f"prefill_chunk {prefill_chunk} must be a multiple of page_size {page_size}")
        self.batch_buckets = tuple(whole_number("each size in batch_buckets", size, 1) for size in batch_buckets)
        if not self.batch_buckets or sorted(set(self.batch_buckets)) != list(self.batch_buckets):
            raise ValueError(f"batch_buckets must be sizes in ascending order, as (1, 2, 4), got {batch_buckets}")
        self.dtype = jax.tree.leaves(model.params)[0].dtype
        self.spec = self.config.cache_spec(page_size, self.dtype)
        self._autos: dict[Auto, Auto] = {}
        self.policy = self._bound(policy)
        others = (policies,) if isinstance(policies, str) or hasattr(policies, "select") else policies
        self.policies = tuple(dict.fromkeys((self.policy, *map(self._bound, others))))
        self._states = PolicyStates(self.policies, self.config, page_size=page_size, prefill_chunk=prefill_chunk)
        self.prefill_policy = parse_prefill(prefill)
        if isinstance(self.prefill_policy, AutoPrefill):
            self.prefill_policy = self.prefill_policy.bind(model, page_size=page_size, dtype=self.dtype.name)
        scanned = [each.indexes() for each in self.policies] + [indexes_of(self.prefill_policy)]
        self.indexes = tuple(dict.fromkeys(spec for indexes in scanned for spec in indexes))
        if isinstance(self.prefill_policy, TileLists):
            self.prefill_policy.check_pages(page_size)
        if pages is not None:
            check_pool(self._plan_beside_weights(), pages)
        totals = self._totals(self._default_pages() if pages is None else whole_number("pages", pages, 1))
        self._groups = GroupPages(self.spec, totals, self.prefill_chunk)
        self._pool = Pool(self.spec.empty(totals, self.indexes))
        self.sequences: set[CachedSequence] = set()
        self.last_reads: Reads | None = None
        self.last_choice: Choice | None = None
        self.last_prefill_choice: Choice | None = None
        self._told: set[tuple[PrefillPolicy, bool]] = set()

    def __repr__(self) -> str:
        allocators = self.allocators.values()
        used, total = sum(each.total - each.free for each in allocators), sum(each.total for each in allocators)
        name = getattr(self.model, "name", "") or self.config.family
        policies = ", ".join(map(str, self.policies))
        pool = f"{used:,} of {total:,} pages of {self.page_size} tokens in use"
        return f"Engine({name!r}: {policies}; prefill {self.prefill_policy}; {pool}, sequences={len(self.sequences)})"

    # What there is room for

    def memory_plan(self) -> MemoryPlan:
        """Weights, cache per 1K tokens and pages that fit, for this model as loaded."""
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.model.params))
        plan = self._plan_beside_weights()
        return dataclasses.replace(plan, weights_bytes=weights, available_bytes=plan.available_bytes + weights)

    @property
    def allocators(self) -> dict[str, PageAllocator]:
        """Who owns which page, by layer group."""
        return self._groups.allocators

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take in a layer group that keeps all of them."""
        return -(-tokens // self.page_size)

    def check_length(self, tokens: int) -> None:
        """ValueError if a sequence of `tokens` tokens is longer than the model's positions, OutOfPages if the whole pool is too small."""
        if tokens > self.config.max_positions:
            known = f"the model's {self.config.max_positions:,} positions{self.config.for_longer(tokens)}"
            raise ValueError(f"a sequence of {tokens:,} tokens is longer than {known}")
        for name, count in self._groups.needed(tokens).items():
            if count > (total := self.allocators[name].total):
                raise self._advised(OutOfPages(count, total, total, group=name))

    def declared(self, policy: str | DecodePolicy | None) -> DecodePolicy:
        """The policy of a call, None being the engine's own; ValueError if it scans an index that this engine's pages do not have."""
        chosen = self.policy if policy is None else self._bound(policy)
        missing = [spec.name for spec in chosen.indexes() if spec not in self.indexes]
        if missing:
            raise ValueError(
                f"policy {chosen} needs the index {missing[0]}, which this engine does not build: name it in Engine(policies=...)"
            )
        self._states.check_declared(chosen)
        return chosen

    # Sequences

    @guarded
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, reserve: int = 0, on_tokens: Callable[[int], None] | None = None
    ) -> list[CachedSequence]:
        """Write whole prompts (token ids) to new sequences; `.logits` of each predicts the next token.

        reserve: tokens beyond the prompt whose pages are taken now, so that later steps cannot run out. on_tokens: called with the number
        of tokens done, chunk by chunk. One sequence at a time, so a prompt's bits do not depend on the others. Raises OutOfPages, and
        ValueError for an empty prompt, a token outside the vocabulary, or one too long for the model; whatever is raised, nothing is kept.
        """
        reserve = whole_number("reserve", reserve)
        if isinstance(prompts, Mapping):
            raise ValueError("prefill takes a list of prompts, got what a tokenizer returned: give its ['input_ids'], [ids] for one text")
        prompts = [self.check_tokens(prompt) for prompt in prompts]
        for prompt in prompts:
            self.check_length(len(prompt) + reserve)
        needed = [self._groups.needed(len(prompt) + reserve) for prompt in prompts]
        with self._advice():
            self._groups.check_free({name: sum(each[name] for each in needed) for name in self.allocators})
        sequences = [CachedSequence([], pages=self._groups.new()) for _ in prompts]
        with self._kept(*sequences):
            for sequence, prompt in zip(sequences, prompts, strict=True):
                self.reserve([sequence], len(prompt) + reserve)
            for sequence, prompt in zip(sequences, prompts, strict=True):
                self._write(sequence, prompt, all_logits=False, on_tokens=on_tokens)
            self.guard.interrupt_point()
        return sequences

    @guarded
    def extend(self, sequence: CachedSequence, tokens: Sequence[int], *, all_logits: bool = False) -> Float[Array, "*T V"]:
        """Append tokens by prefill and return the logits after the last one, `[V]`, or after each, `[T, V]`; float32.

        The bits equal those of one prefill of the whole, unless the prefill policy looks at several queries of a chunk at once
        (`queries_stand_alone` is False): what then is appended to a chunk begun by an earlier call is prefilled densely. Raises as
        `prefill` does. Whatever is raised while chunks are written (Ctrl-C, say), those already written stay: `.length` and `.tokens` say
        how far, and `.logits` is None if there were any.
        """
        self._check_live([sequence])
        tokens = self.check_tokens(tokens)
        self.check_length(sequence.length + len(tokens))
        with self._reserved([sequence], len(tokens)):
            return self._write(sequence, tokens, all_logits=all_logits)

    @guarded
    def decode(
        self, sequences: Sequence[CachedSequence], tokens: Sequence[int], policy: str | DecodePolicy | None = None
    ) -> Float[Array, "n V"]:
        """Write one given token of every sequence and return its next-token logits, float32, through the decode policy.

        For forcing known text and for own sampling; `kvjax.generate` samples inside the step.
        """
        slots, tokens = self._one_token_each(sequences, tokens)
        (logits,) = self._decode(decode_step, slots, tokens, policy)
        for sequence, token in zip(sequences, tokens[:, 0].tolist(), strict=False):
            sequence.tokens.append(token)
        return logits[: len(sequences), 0]

    @guarded
    def inspect(self, sequences: Sequence[CachedSequence], tokens: Sequence[int], policy: str | DecodePolicy | None = None) -> StepRead:
        """What a decode step would read, layer by layer and KV head by KV head, with scores, and its logits; any policy.

        The step runs as `decode` runs it, and attends to what is listed once more for the scores; the sequences stay as they are, and so do
        the states of learning policies. `last_reads` and `last_choice` too. Waits for the device. Raises as `decode` does.
        """
        slots, tokens = self._one_token_each(sequences, tokens)
        self._check_live(sequences)
        kept, pages = (self.last_reads, self.last_choice), [self._counts(sequence) for sequence in sequences]
        try:
            chosen, (logits, watched), _ = self._step(inspect_step, slots, tokens, policy)
            return read_of(chosen, len(sequences), logits, watched)
        finally:
            self.last_reads, self.last_choice = kept
            for sequence, counts in zip(sequences, pages, strict=True):
                self._groups.keep(sequence, counts)

    @guarded
    def decode_and_sample(
        self,
        slots: Sequence[CachedSequence | None],
        tokens: Int[Array, "B"],
        rows: SamplingRows,
        policy: str | DecodePolicy | None = None,
        *,
        counts: Int[Array, "B V"] | None = None,
    ) -> Sampled:
        """Write one token per slot (None: empty) and sample the next one, all in one jitted call.

        tokens may still be on their way from the last step; nothing here waits for the device, so ids in a JAX array are not checked: one
        outside the vocabulary makes its row not finite. The caller appends the written tokens to `.tokens` when it learns them, and drops a
        row whose logits were not finite. counts: of the tokens each row holds (`kvjax.sampling.seen_tokens`), int32, where a row has a
        penalty. DONATES counts; the result has them with the written tokens added.
        """
        if rows.penalises and counts is None:
            raise ValueError("a row has a penalty, which needs counts of its tokens: pass counts, as kvjax.sampling.seen_tokens makes them")
        if len(slots) not in self.batch_buckets:
            raise ValueError(f"{len(slots)} slots are no batch bucket of this engine: {self.batch_buckets}")
        if not isinstance(tokens, jax.Array):
            tokens = np.array(self.check_tokens(tokens), np.int32)
        elif not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"token ids must be whole numbers, got {tokens.dtype}")
        for name, shape in {"tokens": tokens.shape, **rows.shapes()}.items():
            if shape != (len(slots),):
                raise ValueError(f"{name} must have one entry for each of {len(slots)} slots, got shape {shape}")
        if counts is not None and np.shape(counts) != (len(slots), self.config.vocab_size):
            raise ValueError(f"counts must be of {len(slots)} slots and {self.config.vocab_size} token ids, got shape {np.shape(counts)}")
        (sampled,) = self._decode(decode_and_sample, slots, tokens, policy, rows, counts)
        return sampled

    @guarded
    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same history: sealed pages are shared, the open one is copied. OutOfPages if none is free for it."""
        self._check_live([sequence])
        self._pool.check()
        child = CachedSequence(
            list(sequence.tokens), sequence.length, self._groups.new(), sequence.logits, dict(sequence.states), sequence.open_chunk
        )
        with self._kept(child), self._advice():
            opened = self._groups.fork(sequence, child)
            if opened is not None:
                sources, targets = (tuple(np.int32(ids[layer.group]) for layer in self.spec.layers) for ids in opened)
                self._pool.run(copy_page, self._layers, sources, targets)
            self.guard.interrupt_point()
        return child

    @guarded
    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Drop the tokens from `length` on, which must lie in the open page: sealed pages may be shared and are never reopened.

        Reserved pages are given back too. What a learning policy gathered from the dropped tokens stays in its state.
        """
        self._check_live([sequence])
        length = whole_number("length", length)
        lowest = sequence.length // self.page_size * self.page_size
        if not lowest <= length <= sequence.length:
            raise ValueError(
                f"cannot truncate to {length} tokens: the sequence has {sequence.length}, of which the first {lowest} are sealed; "
                f"a length from {lowest} to {sequence.length} is possible (fork before writing to go back further)"
            )
        self._groups.keep_written(sequence, length)
        del sequence.tokens[length:]
        sequence.length = length
        sequence.logits = sequence.open_chunk = None

    @guarded
    def free(self, sequence: CachedSequence) -> None:
        """Give the sequence's pages back. It cannot be used afterwards."""
        self._check_live([sequence])
        self._groups.keep_written(sequence, 0)
        self.sequences.remove(sequence)
        sequence.logits = None

    @guarded
    def reserve(self, sequences: Sequence[CachedSequence], tokens: int) -> None:
        """Take the pages that `tokens` more tokens of every sequence need, or raise OutOfPages and take none."""
        self._check_live(sequences)
        tokens = whole_number("tokens", tokens)
        with self._advice():
            self._groups.reserve(sequences, tokens)

    @guarded
    def save(self, sequence: CachedSequence, path: str | Path) -> None:
        """Write a sequence's pages and tokens to a file that `restore` reads; the file is written beside and renamed.

        The states of learning policies are not written: those that learn from prefill refuse to decode what is restored. ValueError if
        `.tokens` does not hold the token of every position.
        """
        self._check_live([sequence])
        if len(sequence.tokens) != sequence.length:
            raise ValueError(f"{sequence.length} tokens were written, but .tokens holds {len(sequence.tokens)}: append those decoded first")
        if sequence.tokens:
            self.check_tokens(sequence.tokens)
        self._pool.check()
        ids = self._groups.stored(sequence)
        pairs = [(layer.pages, ids[spec.group]) for spec, layer in zip(self.spec.layers, self._layers, strict=True)]
        stored = [(pages.k[own], pages.v[own]) for pages, own in pairs]
        write_sequence(path, self._header, sequence.tokens, stored, self.guard.interrupt_point)

    @guarded
    def restore(self, path: str | Path) -> CachedSequence:
        """A sequence from a file of `save`, bit for bit. ValueError if another model, page size or dtype made it, and for a damaged file.

        `.logits` is None: extend it, or decode the next token.
        """
        sizes = {"spec": self.spec, "vocab_size": self.config.vocab_size}
        tokens, layers = read_sequence(path, self._header, interrupt_point=self.guard.interrupt_point, **sizes)
        self.check_length(len(tokens))
        sequence = CachedSequence(tokens, pages=self._groups.new())
        with self._kept(sequence), self._advice():
            self._groups.fill(sequence, len(tokens))
            sequence.length = len(tokens)
            pages = self._groups.stored(sequence)
            pages = tuple(pages[layer.group] for layer in self.spec.layers)
            self._pool.run(restore_pages, self._layers, pages, layers, opened=sequence.length % self.page_size > 0, indexes=self.indexes)
            self.guard.interrupt_point()
        return sequence

    @guarded
    def warmup(self, *, batch: int = 1, tokens: int | None = None, policy: str | DecodePolicy | None = None) -> None:
        """Compile the steps that `batch` sequences decoded together need before the first real call.

        That is prefill and decoding in the batch bucket of `batch`, for every width of page table up to that of a sequence of `tokens`
        tokens (None: one page's worth), for greedy decoding; steps in which a row draws at random are compiled when first used. Raises as
        `prefill` does.
        """
        longest = self.pages_for(self.page_size if tokens is None else whole_number("tokens", tokens, 1))
        sequences = self.prefill([[0]] * whole_number("batch", batch, 1))
        try:
            slots, rows = self._slots(sequences), SamplingRows.of([None])
            sample_step(sequences[0].logits[None], rows, np.ones(1, np.int32))
            rows, width = SamplingRows.of([None] * len(slots)), MIN_TABLE_PAGES
            while True:
                self.reserve(sequences[:1], min(width, longest) * self.page_size - sequences[0].length)
                for each in possible_prefills(self.prefill_policy, min(width, longest) * self.page_size, self.prefill_chunk):
                    with self._reserved(sequences[:1], 1):
                        self._write(sequences[0], [0], all_logits=False, only=each)
                for each in self._steps_of(policy, longest * self.page_size, batch):
                    self.guard.interrupt_point()
                    jax.block_until_ready(self.decode_and_sample(slots, np.zeros(len(slots), np.int32), rows, each))
                if width >= longest:
                    return
                width *= 2
        finally:
            for sequence in sequences:
                self.free(sequence)

    # Inside

    @property
    def _layers(self) -> tuple[LayerCache, ...]:
        return self._pool.layers

    def _cache(self, slots: Sequence[CachedSequence | None], lengths: Int[np.ndarray, "B"]) -> Cache:
        """What a step reads and writes."""
        return Cache(self._layers, self._groups.tables(slots), lengths, self.spec)

    @contextlib.contextmanager
    def _kept(self, *sequences: CachedSequence) -> Iterator[None]:
        """New sequences, which are live from here on, but freed again if what fills them fails."""
        self.sequences.update(sequences)
        try:
            yield
        except BaseException:
            for sequence in sequences:
                self.free(sequence)
            raise

    @contextlib.contextmanager
    def _reserved(self, sequences: Sequence[CachedSequence], tokens: int) -> Iterator[None]:
        """Pages for `tokens` more tokens of every sequence. Those that hold nothing are given back if what the block does fails."""
        before = [self._counts(sequence) for sequence in sequences]
        self.reserve(sequences, tokens)
        try:
            yield
        except BaseException:
            for sequence, counts in zip(sequences, before, strict=True):
                self._groups.keep_written(sequence, sequence.length, counts)
            raise

    def _counts(self, sequence: CachedSequence) -> dict[str, int]:
        """Pages of each group that a sequence holds, reserved and given back ones included."""
        return {name: len(pages) for name, pages in sequence.pages.items()}

    def _write(
        self,
        sequence: CachedSequence,
        tokens: list[int],
        *,
        all_logits: bool,
        on_tokens: Callable[[int], None] | None = None,
        only: PrefillPolicy | None = None,
    ):
        """Run the chunks that hold positions [length, length + len(tokens)); they begin at multiples of the chunk, whatever came before.

        only: what runs all of them, wherever they begin, for its program and not for its result."""
        fresh, end = sequence.length, sequence.length + len(tokens)
        collected = []
        for start in range(fresh // self.prefill_chunk * self.prefill_chunk, end, self.prefill_chunk):
            self.guard.interrupt_point()
            first, last = max(start, fresh), min(start + self.prefill_chunk, end)
            policy = only or self._prefill_of(start)
            whole = first == start or policy.queries_stand_alone or only is not None
            if not whole:
                logger.info("positions %d to %d go into a chunk begun earlier: dense, not %s", first, last - 1, policy)
            chunk = np.zeros((1, self.prefill_chunk), np.int32)
            chunk[0, first - start : last - start] = tokens[first - fresh : last - fresh]
            learning, opened = self._states.before_chunk(sequence, start, first, whole=whole)
            if opened is not None:
                chunk[0, opened.position - start : first - start] = opened.tokens
            self._groups.give_back(sequence)
            self.reserve([sequence], last - first)
            cache = self._cache([sequence], np.array([last], np.int32))
            logits, _, learned = self._pool.run(
                prefill_step,
                self.model.decoder,
                policy if whole else DensePrefill(),
                self.indexes,
                self.model.params,
                cache,
                chunk,
                np.array([start], np.int32),
                np.array([first], np.int32),
                all_logits=all_logits,
                learning=learning,
                layers=lambda result: result[1].layers,
            )
            sequence.tokens += tokens[first - fresh : last - fresh]
            sequence.length, sequence.logits = last, None
            after_chunk(sequence, learning, opened, learned, tokens[first - fresh : last - fresh])
            if all_logits:
                collected.append(logits[0, first - start : last - start])
            if on_tokens:
                jax.block_until_ready(logits)
                on_tokens(last - first)
        result = jnp.concatenate(collected) if all_logits else logits[0]
        sequence.logits = result[-1] if all_logits else result
        return result

    def _prefill_of(self, start: int) -> PrefillPolicy:
        """What prefills the chunk from `start` on: the policy itself, or what `auto` chooses; each kind of choice is logged once."""
        if not isinstance(self.prefill_policy, AutoPrefill):
            return self.prefill_policy
        self.last_prefill_choice = choice = self.prefill_policy.choose(start, start + self.prefill_chunk)
        kind = choice.policy, choice.seconds is None
        if kind not in self._told:
            self._told.add(kind)
            logger.info("prefill %s: %s", self.prefill_policy, choice)
        return choice.policy

    def _decode(self, step: Callable, slots: Sequence[CachedSequence | None], tokens, policy: str | DecodePolicy | None, *rest):
        """Run one decode step over padded slots and keep the books. Returns what the step returned before the cache."""
        policy, results, states = self._step(step, slots, tokens, policy, *rest)
        learns, rows = bool(jax.tree.leaves(states)), [row for row, sequence in enumerate(slots) if sequence is not None]
        learned = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], states) for row in rows] if learns else []
        # Nothing can fail from here on.
        for number, row in enumerate(rows):
            slots[row].length += 1
            self._groups.give_back(slots[row])
            slots[row].logits = slots[row].open_chunk = None
            if learns:
                slots[row].states[policy] = learned[number]
        return results

    def _step(self, step: Callable, slots: Sequence[CachedSequence | None], tokens, policy: str | DecodePolicy | None, *rest):
        """Run one decode step, which leaves every sequence as long as it was. Returns the policy that ran, what the step returned before
        the cache, and the policy's states."""
        policy = self.declared(policy)
        live = [slot for slot in slots if slot is not None]
        self._check_live(live)
        for sequence in live:
            self.check_length(sequence.length + 1)
        with self._reserved(live, 1):
            policy = self._chosen(policy, live)
            active = np.array([slot is not None for slot in slots])
            lengths = np.array([slot.length if slot else 0 for slot in slots], np.int32)
            cache = self._cache(slots, lengths)
            states = self._states.of_batch(policy, slots)
            args = (self.model.decoder, policy, self.indexes, self.model.params, cache, tokens, active, states, *rest)
            *results, _, states, self.last_reads = self._pool.run(step, *args, layers=lambda result: result[-3].layers)
        return policy, results, states

    def _bound(self, policy: str | DecodePolicy) -> DecodePolicy:
        """The policy of a name; `auto` bound to this model, once."""
        policy = parse(policy)
        check_budgets(policy, table_width(self.pages_for(self.config.max_positions)) * self.page_size)
        if isinstance(policy, TopTokens):
            raise ValueError(
                f"policy {policy} needs latent pages and a lightning indexer, which no model of an engine has: use it with "
                "kvjax.models.latent_attention.decode_latent_step, or name another policy here"
            )
        if not isinstance(policy, Auto) or policy.bound is not None:
            return policy
        if policy not in self._autos:
            self._autos[policy] = policy.bind(self.model, page_size=self.page_size, dtype=self.dtype.name)
        return self._autos[policy]

    def _steps_of(self, policy: str | DecodePolicy | None, longest: int, batch: int) -> tuple[DecodePolicy, ...]:
        """What a policy may run for `batch` sequences of up to `longest` tokens."""
        policy = self.declared(policy)
        return policy.possible(longest, batch) if isinstance(policy, Auto) else (policy,)

    def _chosen(self, policy: DecodePolicy, live: Sequence[CachedSequence]) -> DecodePolicy:
        """What runs this step: the policy itself, or what `auto` chooses for these lengths; a choice that is new is logged."""
        choice = policy.choose([sequence.length + 1 for sequence in live]) if isinstance(policy, Auto) else None
        if choice is not None and (self.last_choice is None or choice.policy != self.last_choice.policy):
            logger.info("%s: %s", policy, choice)
        self.last_choice = choice
        return policy if choice is None else choice.policy

    def _one_token_each(
        self, sequences: Sequence[CachedSequence], tokens: Sequence[int]
    ) -> tuple[list[CachedSequence | None], Int[np.ndarray, "B 1"]]:
        """Slots and tokens of a step over whole sequences, padded to a batch bucket."""
        if len(tokens) != len(sequences):
            raise ValueError(f"{len(tokens)} tokens for {len(sequences)} sequences; a step writes one token of each")
        slots = self._slots(sequences)
        padded = np.zeros((len(slots), 1), np.int32)
        padded[: len(sequences), 0] = self.check_tokens(tokens)
        return slots, padded

    def _slots(self, sequences: Sequence[CachedSequence]) -> list[CachedSequence | None]:
        """The sequences padded with None to their batch bucket."""
        if not sequences:
            raise ValueError("a step needs at least one sequence")
        bucket = next((size for size in self.batch_buckets if size >= len(sequences)), None)
        if bucket is None:
            raise ValueError(f"{len(sequences)} sequences are more than the largest batch bucket, {self.batch_buckets[-1]}")
        return [*sequences, *([None] * (bucket - len(sequences)))]

    def _check_live(self, sequences: Sequence[CachedSequence]) -> None:
        if not self.sequences.issuperset(sequences):
            raise ValueError("the sequence was freed or is another engine's; prefill it here")
        if len(set(sequences)) < len(sequences):
            raise ValueError("a sequence stands twice in one batch; fork it to decode it twice")

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """`kvjax.checks.token_ids` of this model's vocabulary."""
        return token_ids(tokens, self.config.vocab_size)

    @contextlib.contextmanager
    def _advice(self) -> Iterator[None]:
        """OutOfPages leaves with what a page takes and how many there is room for."""
        try:
            yield
        except OutOfPages as error:
            raise self._advised(error) from None

    def _advised(self, error: OutOfPages) -> OutOfPages:
        plan = self._plan_beside_weights()
        advice = (
            f"A page holds {self.page_size} tokens and takes {plan.page_bytes:,} bytes; memory has room for {plan.pages_that_fit:,} more"
        )
        return OutOfPages(error.needed, error.free, error.total, advice, group=error.group)

    def _totals(self, pages: int) -> dict[str, int]:
        """Pages of each layer group, of `pages` of those that keep all tokens: a window group never needs more, and where decode batches
        are full of sequences of any length, what their windows and chunks take."""
        most = {group.name: most_pages(group, self.prefill_chunk) * self.batch_buckets[-1] for group in self.spec.groups}
        return {name: int(min(pages, count)) for name, count in most.items()}

    def _plan_beside_weights(self) -> MemoryPlan:
        return memory_plan(self.config, dtype=self.dtype, page_size=self.page_size, indexes=self.indexes, weights_bytes=0)

    def _default_pages(self) -> int:
        sequences, tokens = DEFAULT_POOL
        wanted = sequences * self.pages_for(min(tokens, self.config.max_positions))
        return max(1, min(wanted, self._plan_beside_weights().pages_that_fit))

    @functools.cached_property
    def _header(self) -> dict:
        return {"model": fingerprint(self.model), "page_size": self.page_size, "dtype": str(self.dtype)}
