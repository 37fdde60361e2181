"""Prefill, chunk by chunk. A chunk runs through the layers in slices, and an engine may do something else between two
slices.

Chunks begin at multiples of the chunk size, and the slices of a model are always the same, so a prompt's bits depend
only on the prompt. Each slice is a program over its own layers. Slices of equal layers share a program, and slices are
cut so that few programs are needed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache import WHOLE, CacheSpec, IndexSpec
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.host_pool.prefill_prefetch import Copies, Sizes, Staged, Window, WindowRows, copy_window, sizes_alone, stage, stage_with
from kvjax.cache.page_manager import PageManager, pages_for
from kvjax.cache.page_tables import page_table, staged_width, table_width
from kvjax.cache.pool import Pool
from kvjax.cache.spec import GroupSpec
from kvjax.compilation import shape_of
from kvjax.engine.policy_state import Learning, PolicyStates, after_chunk
from kvjax.engine.sequence import CachedSequence, OpenChunk
from kvjax.engine.step_plan import Prefilled
from kvjax.engine.steps import ChunkInputs, StepStatic, embed_chunk, prefill_slice, row_logits
from kvjax.model.protocols import Decoder, Model
from kvjax.policies.prefill import DensePrefill, PrefillPolicy

logger = logging.getLogger(__name__)

SLICES = (4, 5, 3, 6)
"""Possible lengths of a slice, in layers. The first one that needs the fewest programs is used. These are fixed,
because other cuts may round differently."""


MUCH_COPIED = 10 * 2**30
"""Bytes: a prompt whose chunks copy more than this from host memory is warned about, once for each engine."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Layers [first, last) of a model. `decoder` and `spec` are of these layers alone, and equal for equal layers.
    place, end: `first` and `last`, counted only in layers that attend to pages. owners: earlier layers whose pages it
    reads."""

    first: int
    last: int
    decoder: Decoder
    spec: CacheSpec
    place: int
    end: int
    owners: tuple[int, ...]


def cut_layers(decoder: Decoder, spec: CacheSpec, shards: Shards = ONE_DEVICE) -> tuple[Slice, ...]:
    """The slices of a model. All have the same length, except the last, which may be shorter."""
    counts = {size: len({(each.decoder, each.spec) for each in _cut(decoder, spec, size, shards)}) for size in SLICES}
    return _cut(decoder, spec, min(SLICES, key=lambda size: counts[size]), shards)


def _cut(decoder: Decoder, spec: CacheSpec, size: int, shards: Shards) -> tuple[Slice, ...]:
    found, known, config = [], {}, decoder.config
    page_size = min(group.page_size for group in spec.groups)
    for first in range(0, len(spec.layers), size):
        last = min(first + size, len(spec.layers))
        own, formats = decoder.of_layers(first, last), spec.formats[first:last]
        layers = own.config.cache_spec(page_size).with_formats(formats)
        layers = layers if shards.mesh is None else layers.on_mesh(shards.tensor)
        own, layers = known.setdefault((own, formats), (own, layers))  # identical objects compare equal at once
        place = sum(number < first for number in spec.paged)
        found.append(Slice(first, last, own, layers, place, place + len(layers.paged), config.owners_before(first, last)))
    return tuple(found)


@dataclasses.dataclass(eq=False)
class ChunkRun:
    """A chunk that is being prefilled: the tokens `written` of `sequence`, which then has `last` tokens.

    ends: whether no token that it was given is left for a later chunk; only then it has logits. whole: whether a new
    prompt would run this policy from `first` on. always: as in `Prefiller.begin`. done: slices that have run. x: token
    ids `[1, T]` before the first slice, hidden states `[1, T, E]` after every slice, and last, logits `[V]` or `[T,
    V]`, if it has any. logits: `[V]` after its last token, if it ends: also with all_logits of that row alone, because
    the product of a whole chunk with the head rounds otherwise. moved: `Pool.moved` when tables and staged were made.
    staged: by layer group, how pages are copied to device memory before a layer reads them, and which of them together;
    None: none, because none lies on the host. ahead: those that were copied for the next layer.
    """

    sequence: CachedSequence
    written: list[int]
    first: int
    last: int
    start: int
    policy: PrefillPolicy
    ends: bool
    whole: bool
    all_logits: bool
    always: bool
    learning: Learning | None
    opened: OpenChunk | None
    x: Array | np.ndarray
    done: int = 0
    logits: Array | None = None
    moved: int = -1
    tables: dict[str, Int[np.ndarray, "1 M"]] = dataclasses.field(default_factory=dict)
    staged: dict[str, tuple[Staged, Window]] | None = None
    ahead: Any = None
    learned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    @property
    def program(self) -> tuple[Hashable, ...]:
        """What the programs of its slices are compiled for, beside the engine itself."""
        widths = (table.shape[1] for table in self.tables.values())
        return self.policy, *widths, self.learning is None, self.staged is None

    def check_same(self, tokens: Sequence[int]) -> None:
        """ValueError unless these tokens begin with those of the chunk."""
        if list(tokens[: len(self.written)]) != self.written:
            raise ValueError("the sequence is in the middle of a chunk of other tokens: continue with those, or free the sequence")

    def finish(self) -> Prefilled:
        """Give the sequence its logits, after the last slice. Returns the chunk's result."""
        self.sequence.logits = self.logits
        return Prefilled(len(self.written), self.sequence.logits, self.x)


class Prefiller:
    """Runs chunks over an engine's pages. chunk: its size in tokens. indexes: those that sealing builds. on_written: if
    set, called with each chunk that has run all layers. brings: whether the devices of a mesh bring a sequence's pages
    together for each layer (`kvjax.engine.paged_attention.bring`)."""

    def __init__(self, model: Model, pool: Pool, groups: PageManager, states: PolicyStates, indexes: tuple[IndexSpec, ...], chunk: int):
        self.model, self.indexes, self.chunk = model, indexes, chunk
        self.on_written: Callable[[ChunkRun], None] | None = None
        self._behind: Array | None = None  # hidden states of the chunk before, while a prompt has more of them
        self._warned, self.brings = False, pool.shards.context > 1
        self._pool, self._page_manager, self._states = pool, groups, states
        self.slices = cut_layers(model.decoder, groups.spec, pool.shards)

    def begin(
        self, sequence: CachedSequence, tokens: Sequence[int], policy: PrefillPolicy, *, all_logits: bool = False, always: bool = False
    ) -> ChunkRun:
        """Begin to write as many of `tokens` as fit into the chunk of the sequence's next token. Their pages must have
        been taken. Raises as `Pool.check` does.

        always: run the policy wherever the tokens begin, over all pages that the sequence holds, to compile its
        program; the result does not matter.
        """
        self._pool.check()
        first = sequence.length
        start = first // self.chunk * self.chunk
        written = list(tokens[: start + self.chunk - first])
        last = first + len(written)
        whole = first == start or policy.queries_stand_alone
        if not whole and not always:
            logger.info("positions %d to %d go into a chunk begun earlier: dense, not %s", first, last - 1, policy)
            policy = DensePrefill()
        ids = np.zeros((1, self.chunk), np.int32)
        ids[0, first - start : last - start] = written
        learning, opened = self._states.before_chunk(sequence, start, first, whole=whole or always)
        if opened is not None:
            ids[0, opened.position - start : first - start] = opened.tokens
        self._pool.bind(self._page_manager.written(sequence, first, last))
        ends = len(written) == len(tokens)
        run = ChunkRun(sequence, written, first, last, start, policy, ends, whole, all_logits, always, learning, opened, ids)
        self._find_pages(run)
        if not ends:
            self._make_room(sequence, start)
        if run.staged and not self._warned:
            self._warn_of_copies(start, first + len(tokens))
        return run

    def _make_room(self, sequence: CachedSequence, start: int) -> None:
        """Begin to copy pages to host memory, so that the chunk after the one from `start` on finds room on the device:
        pages of earlier chunks, and those that are kept for other prompts. Others may still be written."""
        for group in [group for group in self._page_manager.spec.groups if group.name in self._pool.frames]:
            if count := self._pool.frames[group.name].lacking(-(-self.chunk // group.page_size)):
                earlier = sequence.pages[group.name][: start // group.page_size]
                self._pool.copy_ahead(group.name, {*earlier, *self._page_manager.allocators[group.name].kept_pages}, count)

    def _find_pages(self, run: ChunkRun) -> None:
        """Look where the pages of a chunk lie: at its beginning, and whenever pages have moved between two of its
        slices."""
        sequence = run.sequence
        run.moved, run.ahead = self._pool.moved, None
        run.staged = self._stage(sequence, run.start, run.last) if self._pool.any_on_host(sequence.pages) else None
        if run.staged is None and self.brings:
            run.tables = self._brought_tables(run)
        elif run.staged is None:
            run.tables = self._page_manager.tables([sequence])
        else:
            widths = {name: where.places.shape[1] for name, (where, _) in run.staged.items()}
            run.tables = self._page_manager.staged_tables(sequence, run.last, widths)

    def _brought_tables(self, run: ChunkRun) -> dict[str, Int[np.ndarray, "1 M"]]:
        """Tables of the pages that the chunk reads, because all that a table has room for are brought from other
        devices."""
        groups, length = self._page_manager.spec.groups, run.last
        if run.always:
            length = max(len(run.sequence.pages[group.name]) * group.page_size for group in groups if group.page_size != WHOLE)
        return self._page_manager.staged_tables(
            run.sequence, length, {group.name: staged_width(pages_for(length, group)) for group in groups}
        )

    def _stage(self, sequence: CachedSequence, start: int, last: int) -> dict[str, tuple[Staged, Window]]:
        """How the pages of tokens [0, last) are copied, of which the chunk from `start` on writes the last ones."""
        groups = {group.name: group for group in self._page_manager.spec.groups if group.name in self._pool.frames}
        found = {}
        for name, group in groups.items():
            pages = np.array(sequence.pages[name][: -(-last // group.page_size)], np.int32)
            frames = self._pool.frames[name]
            known = np.where(pages >= 0, frames.frame_of[np.maximum(pages, 0)], -1)
            found[name] = stage(known, start // group.page_size, frames.counts, -(-self.chunk // group.page_size))
        return found

    def compile_copies(self, sequence: CachedSequence, policy: PrefillPolicy, tokens: int) -> Iterator[None]:
        """Compile the slices that copy pages from host memory, for prompts of up to so many tokens whose pages are the
        only ones there, and that are written chunk by chunk (`sizes_alone`). One step of the iterator for each
        combination of sizes.

        Among the pages of others, some lie apart, and the sizes may differ: then they are compiled when first needed.
        sequence: has a few tokens, and room for one more. It gets a token each time, and loses it again.
        """
        length, copied = sequence.length, self._pool.copied_bytes
        for run in self._with_copies(sequence, policy, tokens):
            self.advance(run)
            del sequence.tokens[length:]
            sequence.length, sequence.logits, sequence.open_chunk = length, None, None
            self._pool.copied_bytes = copied
            yield

    def calls_with_copies(self, sequence: CachedSequence, policy: PrefillPolicy, tokens: int) -> Iterator[functools.partial]:
        """`calls` of what `compile_copies` runs. The sequence stays as it is."""
        for run in self._with_copies(sequence, policy, tokens):
            yield from self.calls(run)

    def _with_copies(self, sequence: CachedSequence, policy: PrefillPolicy, tokens: int) -> Iterator[ChunkRun]:
        """A chunk of one token for each combination of sizes."""
        for group in [group for group in self._page_manager.spec.groups if group.name in self._pool.frames]:
            counts = self._pool.frames[group.name].counts
            for size, widths in self._sizes_alone(group, counts, tokens):
                run = self.begin(sequence, [0], policy, always=True)
                pages = self._page_manager.written(sequence, 0, run.last)
                run.tables = {name: page_table([each], widths[name]) for name, each in pages.items()}
                run.staged = {group.name: stage_with(size, self._pool.frames_of(group.name, pages[group.name]), counts)}
                yield run

    def _sizes_alone(self, group: GroupSpec, counts: FrameCounts, tokens: int) -> list[tuple[Sizes, dict[str, int]]]:
        """Of the chunks of such prompts: sizes of what is copied, and widths of page tables, without repetitions."""
        found = {}
        for pages in range(1, pages_for(tokens, group) + 1):
            if (size := sizes_alone(pages, counts, -(-self.chunk // group.page_size))) is not None:
                widths = {each.name: table_width(pages_for(pages * group.page_size, each)) for each in self._page_manager.spec.groups}
                widths[group.name] = size.width
                found[size, *widths.values()] = size, widths
        return list(found.values())

    def _window(self, staged: dict[str, tuple[Staged, Window]], number: int | None) -> WindowRows | None:
        """What layer `number` reads of the pages that are copied together; None where there are none."""
        if number is None or self._pool.spec.layers[number].group not in staged:
            return None
        where, window = staged[self._pool.spec.layers[number].group]
        return window.of(self._read_by(number), where.places.shape[1])

    def _read_by(self, number: int) -> Any:
        """The layer whose pages layer `number` reads: itself, or the one that it shares with."""
        owner = self._pool.spec.layers[number].share_with
        return self._pool.layers[number if owner is None else owner]

    def _copied(self, run: ChunkRun) -> tuple[list[int], list[int]]:
        """Layers whose pages are copied before they are read: all of them, and those of the next slice."""
        part, spec = self.slices[run.done], self._pool.spec
        copied = [number for number in spec.paged if spec.layers[number].group in run.staged] if run.staged else []
        return copied, [number for number in copied if part.first <= number < part.last]

    def _lacks(self, run: ChunkRun) -> WindowRows | None:
        """What has to be copied for the next slice's first layer, because the slice before has not done it."""
        _, own = self._copied(run)
        return self._window(run.staged, own[0]) if own and run.ahead is None else None

    def _copies(self, run: ChunkRun) -> Copies | None:
        """What the next slice copies."""
        if run.staged is None:
            return None
        part, (copied, own) = self.slices[run.done], self._copied(run)
        # After the last slice no layer follows. It copies for its own first layer again, so that it runs the same
        # program as the others.
        following = next((number for number in copied if number >= part.last), own[0]) if own else None
        windows = tuple(self._window(run.staged, number) if number in own[1:] else None for number in range(part.first, part.last))
        staged = {name: where for name, (where, _) in run.staged.items() if any(group.name == name for group in part.spec.groups)}
        return Copies(staged, windows, self._window(run.staged, following))

    def advance(self, run: ChunkRun, slices: int | None = None) -> bool:
        """Run the next slices of a chunk (None: all that are left). True after the last one: the tokens are written,
        and `run.x` holds the logits, if the chunk has any."""
        try:
            return self._advance(run, slices)
        except Exception as error:
            # The rows of earlier slices hold the chunk's end already, so nothing could go on from where the sequence
            # was. Rows of other sequences, and all pages, are as they were, unless the pool says that they are lost.
            if self._rows_moved(run):
                self._pool.check(error)
                run.sequence.fail(error)
            raise

    def advance_one_of(self, runs: dict[CachedSequence, ChunkRun], sequence: CachedSequence, slices: int | None) -> Prefilled | None:
        """`advance` a sequence's chunk. Returns its result after the last layer, else None. The chunk leaves `runs`
        once its tokens are written, even if their pages cannot be kept for later prompts then (`on_written`): run
        again, it would write them twice. So does that of a sequence that is lost."""
        run = runs[sequence]
        try:
            return run.finish() if self.advance(run, slices) else None
        except Exception:
            if self._rows_moved(run):
                del runs[sequence]
            raise
        finally:
            if sequence.length == run.last:
                del runs[sequence]

    def _rows_moved(self, run: ChunkRun) -> bool:
        """Whether layers have state at the chunk's end, but the sequence is still where it was before the chunk."""
        return bool(run.done and run.sequence.length < run.last and self._page_manager.spec.row_groups)

    def _advance(self, run: ChunkRun, slices: int | None) -> bool:
        left = len(self.slices) - run.done
        for _ in range(left if slices is None else min(slices, left)):
            self._next_slice(run)
        if run.done < len(self.slices):
            return False
        # The host launches one chunk ahead of the device, and no more: whoever cancels a prompt waits for a chunk, and
        # not for all of it.
        before, self._behind = self._behind, None if run.ends else run.x
        decoder, params = self.model.decoder, self.model.decoder.params_of(self.model.params, 0, 0)
        places = np.array([run.start], np.int32), np.array([run.last], np.int32)
        find = functools.partial(row_logits, decoder, params, run.x, *places, shards=self._pool.shards)
        if run.ends:
            run.x = run.logits = find(all_logits=False)
        if run.all_logits:
            run.x = find(all_logits=True)
        sequence = run.sequence
        sequence.tokens += run.written
        sequence.length, sequence.logits = run.last, None
        learned = tuple(tuple(state for states in parts for state in states) for parts in zip(*run.learned, strict=True))
        after_chunk(sequence, run.learning, run.opened, learned, run.written)
        if self.on_written is not None:
            self.on_written(run)
        if before is not None:
            before.block_until_ready()
        return True

    @functools.cached_property
    def _token_bytes(self) -> float:
        """Bytes of a token in pages that may lie in host memory."""
        spec, groups = self._page_manager.spec, [group for group in self._page_manager.spec.groups if group.name in self._pool.frames]
        return sum(spec.bytes_per_frame(group.name) / group.page_size for group in groups)

    def _warn_of_copies(self, start: int, last: int) -> None:
        """Say how much the chunks of tokens [start, last) copy, if it is much. At most all earlier pages, once for each
        chunk."""
        copied = sum(range(start, last, self.chunk)) * self._token_bytes
        if copied > MUCH_COPIED:
            self._warned = True
            logger.warning(
                "a prompt of %s tokens in chunks of %s copies up to %.0f GB from host memory, all earlier pages once for each chunk: a "
                "larger prefill_chunk copies less",
                f"{last:,}", f"{self.chunk:,}", copied / 1e9,
            )  # fmt: skip

    def _embedded(self, run: ChunkRun) -> Array:
        """The input of the first layer."""
        decoder = self.model.decoder
        x = embed_chunk(decoder, decoder.params_of(self.model.params, 0, 0), run.x, self._pool.shards)
        return self._pool.put(x) if self._pool.frames else x

    def calls(self, run: ChunkRun) -> Iterator[functools.partial]:
        """What the slices of a chunk will call, for `programs.compile_together`. Only the embedding runs; the chunk
        stays as it is."""
        run, x = dataclasses.replace(run), self._embedded(run)
        while run.done < len(self.slices):
            if (window := self._lacks(run)) is not None:
                yield functools.partial(copy_window, window)
                run.ahead = self._shapes(window)
            yield (call := self._call(run, x))
            if (window := _following(call)) is not None:
                run.ahead = self._shapes(window)
            run.done += 1

    def _shapes(self, window: WindowRows) -> Any:
        """In place of a window's copies."""
        return jax.tree.map(lambda each: shape_of(each.shape, each.dtype, self._pool.beside), jax.eval_shape(copy_window, window))

    def _call(self, run: ChunkRun, x: Any) -> functools.partial:
        """The next slice, whose input is x."""
        part, decoder, params = self.slices[run.done], self.model.decoder, self.model.params
        tables = {group.name: run.tables[group.name] for group in part.spec.groups}
        # Layers of other slices are left out, so that only this slice's pages are donated; those that it reads beside
        # them are not.
        cache = self._pool.cache(part.spec, tables, np.array([run.last], np.int32), part.first, part.last)
        layers, copies = self._pool.layers, self._copies(run)
        static = StepStatic(part.decoder, run.policy, self.indexes, self._pool.shards)
        inputs = ChunkInputs(
            decoder.params_of(params, part.first, part.last),
            cache,
            x,
            np.array([run.start], np.int32),
            np.array([run.first], np.int32),
            np.int32(part.place),
            tuple(layers[owner] for owner in part.owners),
            learning=None if run.learning is None else run.learning.of_layers(part.place, part.end),
            copies=copies,
            ahead=None if copies is None or copies.following is None else run.ahead,
        )
        return functools.partial(prefill_slice, static, inputs)

    def _next_slice(self, run: ChunkRun) -> None:
        self._pool.advance_copies()
        if self._pool.moved != run.moved:
            self._find_pages(run)
        part, spec = self.slices[run.done], self._pool.spec
        x = run.x if run.done else self._embedded(run)
        _, own = self._copied(run)
        self._pool.copied_bytes += sum(run.staged[spec.layers[number].group][1].bytes_of(self._read_by(number)) for number in own)
        if (window := self._lacks(run)) is not None:
            run.ahead = copy_window(window)
        call = self._call(run, x)
        run.x, _, learned, missing, coming = self._pool.run(
            call.func, *call.args, kept=lambda result: self._pool.keep(result[1], result[0], part.first, part.last)
        )
        run.ahead = run.ahead if _following(call) is None else coming
        run.learned.append(learned)
        run.done += 1  # before anything else can fail: the slice has run
        if run.done == len(self.slices):
            run.ahead = None  # nobody reads it, and the copies of the next chunk need its memory
        self._pool.expect_none(missing)


def _following(call: functools.partial) -> WindowRows | None:
    """What a slice copies for the slices after it."""
    copies = call.args[1].copies
    return None if copies is None else copies.following
