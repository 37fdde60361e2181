"""Copies whole sequences: to a file or host memory and back, and to a second sequence that shares what is sealed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from kvjax.cache.files import read_sequence, write_sequence
from kvjax.cache.groups import GroupPages
from kvjax.cache.pool import Pool
from kvjax.cache.transfer import Stored, read_stored, write_blocks
from kvjax.cache.types import IndexSpec
from kvjax.capacity import Capacity
from kvjax.checks import token_ids
from kvjax.guard import CallGuard
from kvjax.model import Model, fingerprint
from kvjax.sequences import CachedSequence


class SequenceCopies:
    """`Engine.save`, `restore`, `suspend`, `resume` and `fork`. The caller checks that sequences are live.

    Everything given is the engine's. chunk: tokens of a chunk of prefill. guard: has the points at which Ctrl-C takes effect.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool,
        groups: GroupPages,
        capacity: Capacity,
        indexes: tuple[IndexSpec, ...],
        chunk: int,
        guard: CallGuard,
    ):
        self.model, self.spec = model, groups.spec
        self._pool, self._groups, self._capacity, self._indexes, self._chunk, self._guard = pool, groups, capacity, indexes, chunk, guard
        self._page_size = min(group.page_size for group in self.spec.groups)
        self._fingerprint: str | None = None

    @property
    def header(self) -> dict[str, str | int]:
        """What a file and the engine that reads it must agree on."""
        self._fingerprint = self._fingerprint or fingerprint(self.model)  # it reads all weights
        dtype = str(jnp.dtype(self.model.config.compute_dtype))
        return {"model": self._fingerprint, "page_size": self._page_size, "dtype": dtype}

    def save(self, sequence: CachedSequence, path: str | Path) -> None:
        """Write pages and tokens to a file. ValueError if `.tokens` does not hold the token of every position."""
        if len(sequence.tokens) != sequence.length:
            raise ValueError(f"{sequence.length} tokens were written, but .tokens holds {len(sequence.tokens)}: append those decoded first")
        token_ids(sequence.tokens, self.model.config.vocab_size)
        stored = read_stored(self._pool, self.spec, self._groups.stored(sequence))
        write_sequence(path, self.header, sequence.tokens, stored, self._guard.interrupt_point)

    def restore(self, path: str | Path) -> CachedSequence:
        """A sequence from a file. ValueError if it does not fit this engine, or is damaged; OutOfPages."""
        sizes = {"spec": self.spec, "vocab_size": self.model.config.vocab_size}
        tokens, stored = read_sequence(path, self.header, interrupt_point=self._guard.interrupt_point, **sizes)
        self._capacity.check_length(len(tokens))
        sequence = CachedSequence(tokens, pages=self._groups.new())
        self._take_back(sequence, len(tokens), stored)
        return sequence

    def suspend(self, sequence: CachedSequence) -> None:
        """Move pages and states to host memory, and free them on the device."""
        sequence.keep_on_host(read_stored(self._pool, self.spec, self._groups.stored(sequence, self._chunk)))
        self._groups.keep_written(sequence, 0)
        sequence.pages = self._groups.new()

    def resume(self, sequence: CachedSequence) -> None:
        """Bring a suspended sequence back. After OutOfPages it stays suspended."""
        if sequence.suspended is None:
            raise ValueError("the sequence is not suspended: only a sequence that Engine.suspend moved to host memory can be resumed")
        self._take_back(sequence, sequence.length, sequence.suspended, self._chunk)
        sequence.suspended = None

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same history. OutOfPages."""
        self._pool.check()
        child = sequence.twin(self._groups.new())
        with self._emptied_on_error(child), self._capacity.advice():
            opened = self._groups.fork(sequence, child)
            if opened is not None:
                self._pool.copy(*opened)
            self._guard.interrupt_point()
        return child

    def _take_back(self, sequence: CachedSequence, length: int, stored: Stored, grain: int | None = None) -> None:
        """Give a sequence without pages the pages of its first `length` tokens, and write `stored` to them. OutOfPages changes nothing."""
        with self._capacity.advice():
            self._groups.fill(sequence, length, grain)
        sequence.length, opened = length, length % self._page_size > 0
        with self._emptied_on_error(sequence):
            for name, pages in self._groups.stored(sequence, grain).items():
                open_page = opened and name not in self.spec.row_groups
                write_blocks(self._pool, self.spec, name, pages, stored[name], indexes=self._indexes, opened=open_page)
            self._guard.interrupt_point()

    @contextlib.contextmanager
    def _emptied_on_error(self, sequence: CachedSequence) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._groups.keep_written(sequence, 0)
            raise
