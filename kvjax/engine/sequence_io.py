"""Copies whole sequences: to a file or host memory and back, and to a second sequence that shares what is sealed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp

from kvjax.axes import in_first_process
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_manager import PageManager, stored_pages
from kvjax.cache.pool import Pool
from kvjax.cache.stores.blocks import Stored, from_mesh, read_stored, to_mesh, write_blocks
from kvjax.cache.stores.sequence_file import read_sequence, write_sequence
from kvjax.cache.stores.suspended import SuspendedPages
from kvjax.checks import token_ids
from kvjax.engine.call_lock import CallLock
from kvjax.engine.capacity import Capacity
from kvjax.engine.page_eviction import PageEviction, kept_by
from kvjax.engine.sequence import CachedSequence, Keeping
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Model
from kvjax.policies.decode import KeepsByMass, name_of, parse_recorded


class SequenceCopies:
    """`Engine.save`, `restore`, `suspend`, `resume` and `fork`. The caller checks that sequences are live.

    Everything given is the engine's. chunk: tokens of a chunk of prefill. guard: has the points at which Ctrl-C takes
    effect. cache_format: the text of how pages are packed; None: they are not.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool,
        groups: PageManager,
        capacity: Capacity,
        release: PageEviction,
        indexes: tuple[IndexSpec, ...],
        chunk: int,
        guard: CallLock,
        cache_format: str | None = None,
    ):
        self.model, self.spec, self._page_eviction = model, groups.spec, release
        self._pool, self._page_manager, self._capacity, self._indexes, self._chunk, self._guard = (
            pool,
            groups,
            capacity,
            indexes,
            chunk,
            guard,
        )
        self._page_size = min(group.page_size for group in self.spec.groups)
        # Of files, whatever the mesh.
        self._one_device = model.config.cache_spec(self._page_size).with_formats(self.spec.formats)
        self._fingerprint: str | None = None
        self._cache_format = cache_format
        self.suspended = SuspendedPages()

    @property
    def header(self) -> dict[str, str | int | None]:
        """What a file and the engine that reads it must agree on."""
        self._fingerprint = self._fingerprint or fingerprint(self.model)  # it reads all weights
        dtype = str(jnp.dtype(self.model.config.compute_dtype))
        return {"model": self._fingerprint, "page_size": self._page_size, "dtype": dtype, "cache_format": self._cache_format}

    def save(self, sequence: CachedSequence, path: str | Path) -> None:
        """Write pages and tokens to a file. ValueError if `.tokens` does not hold the token of every position, and
        after a policy that chose pages by mass."""
        if len(sequence.tokens) != sequence.length:
            raise ValueError(f"{sequence.length} tokens were written, but .tokens holds {len(sequence.tokens)}: append those decoded first")
        token_ids(sequence.tokens, self.model.config.vocab_size)
        header, keeping = self.header, sequence.keeping
        if keeping is not None:
            if isinstance(keeping.policy, KeepsByMass):
                raise ValueError(
                    f"policy {keeping.policy} chose which pages of the sequence to keep, by what it learned, which files do not hold: "
                    "suspend the sequence instead, or save it before the policy decodes it"
                )
            header = header | {"keeps": {"policy": name_of(keeping.policy), "reach": list(keeping.reach)}}
        shards, held = self._pool.shards, self._page_manager.held(sequence)
        stored = read_stored(self._pool, self.spec, self._page_manager.ids(sequence, held))
        if shards.mesh is not None:
            stored = from_mesh(self._one_device, shards.tensor, stored)
        write = functools.partial(write_sequence, path, header, sequence.tokens, stored, self._guard.interrupt_point)
        in_first_process(shards.mesh, write)

    def restore(self, path: str | Path) -> CachedSequence:
        """A sequence from a file. ValueError if it does not fit this engine, or is damaged; OutOfPages."""
        sizes = {"spec": self._one_device, "vocab_size": self.model.config.vocab_size}
        tokens, stored, keeps = read_sequence(path, self.header, interrupt_point=self._guard.interrupt_point, **sizes)
        if self._pool.shards.mesh is not None:
            stored = to_mesh(self._one_device, self._pool.shards.tensor, stored)
        sequence, reach = self._page_eviction.new_sequence(), None
        if keeps is not None:
            name, reach = keeps
            try:
                policy = parse_recorded(name)  # a file never says which code runs
            except ValueError as error:
                raise ValueError(f"{path} was saved after another policy's steps: {error}") from None
            if kept_by(policy, self._page_size) != reach:
                raise ValueError(f"{path} holds the pages that policy {name} keeps, which are other ones now; prefill again")
            sequence.keeping = Keeping(policy, reach)
        self._capacity.check_length(len(tokens), None if sequence.keeping is None else sequence.keeping.policy)
        sequence.tokens = tokens
        self._take_back(sequence, len(tokens), stored, {each.name: stored_pages(each, len(tokens), reach) for each in self.spec.groups})
        return sequence

    def suspend(self, sequence: CachedSequence, briefly: bool) -> None:
        """Move pages and states to host memory, and free them on the device. briefly: as in `Engine.suspend`."""
        self._page_eviction.settle()
        held = self._page_manager.held(sequence, self._chunk)
        stored = read_stored(self._pool, self.spec, self._page_manager.ids(sequence, held))
        sequence.keep_on_host(held)
        self.suspended.put(sequence, stored, briefly)
        self._page_manager.keep_written(sequence, 0)
        sequence.pages = self._page_manager.new()

    def resume(self, sequence: CachedSequence) -> None:
        """Bring a suspended sequence back. After OutOfPages it stays suspended."""
        if sequence.suspended is None:
            raise ValueError("the sequence is not suspended: only a sequence that Engine.suspend moved to host memory can be resumed")
        self._take_back(sequence, sequence.length, self.suspended.get(sequence), sequence.suspended)
        self.suspended.drop(sequence)
        sequence.suspended = None

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same history. OutOfPages."""
        self._pool.check()
        child = sequence.twin(self._page_manager.new())
        with self._emptied_on_error(child), self._capacity.advice():
            opened = self._page_manager.fork(sequence, child)
            if opened is not None:
                self._pool.copy(*opened)
            self._guard.interrupt_point()
        return child

    def _take_back(self, sequence: CachedSequence, length: int, stored: Stored, held: Mapping[str, Sequence[int]]) -> None:
        """Give a sequence of `length` tokens, which has no pages, its logical pages `held`, and write `stored` to them.
        OutOfPages changes nothing."""
        with self._capacity.advice():
            self._page_manager.fill(sequence, held)
        sequence.length, opened = length, length % self._page_size > 0
        with self._emptied_on_error(sequence):
            for name, pages in self._page_manager.ids(sequence, held).items():
                open_page = opened and name not in self.spec.row_groups
                write_blocks(self._pool, self.spec, name, pages, stored[name], indexes=self._indexes, opened=open_page)
            self._guard.interrupt_point()

    @contextlib.contextmanager
    def _emptied_on_error(self, sequence: CachedSequence) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._page_manager.keep_written(sequence, 0)
            raise
