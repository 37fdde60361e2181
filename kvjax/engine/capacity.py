"""What fits: lengths of sequences against the model's positions and the whole pool, before they take pages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvjax.cache import OutOfPages
from kvjax.cache.page_manager import PageManager
from kvjax.engine.page_eviction import kept_by
from kvjax.engine.sampling import Sampling
from kvjax.engine.sequence import CachedSequence
from kvjax.model.config import ModelConfig
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.prefill import PrefillPolicy

if TYPE_CHECKING:
    from kvjax.engine.memory import MemoryPlan

MAX_POSITIONS = 2**24
"""Positions that float32, in which angles of RoPE are computed, holds exactly."""


class Capacity:
    """Checks lengths of sequences before they take pages. plan: the engine's memory plan beside the weights, for advice
    in errors.

    pinned: tells how many pages of each layer group are pinned, for the same advice; None: none ever are.
    """

    def __init__(self, config: ModelConfig, groups: PageManager, plan: Callable[[], MemoryPlan]):
        self.config, self._page_manager, self._plan = config, groups, plan
        self.pinned: Callable[[], dict[str, int]] | None = None
        self._page_size = min(group.page_size for group in groups.spec.groups)
        self._longest = min(config.max_positions, groups.longest)

    def check_length(self, tokens: int, policy: DecodePolicy | PrefillPolicy | None = None) -> None:
        """ValueError if a sequence of `tokens` tokens is longer than the model's positions, OutOfPages if the whole
        pool is too small.

        policy: the one that reads them, which may count positions in the cache, or give pages back; None: neither.
        """
        if tokens <= self._longest:
            return
        if tokens > (most := self._positions(policy)):
            known = f"the model's {most:,} positions{self.config.for_longer(tokens)}"
            known = f"the {most:,} positions that float32 counts exactly, by which keys are rotated" if most == MAX_POSITIONS else known
            raise ValueError(f"a sequence of {tokens:,} tokens is longer than {known}")
        if policy is not None and kept_by(policy, self._page_size) is not None:
            return  # it gives pages back: those that it needs are checked when they are taken
        for name, count in self._page_manager.needed(tokens).items():
            if count > (total := self._page_manager.allocators[name].total):
                raise self._advised(OutOfPages(count, self._page_manager.allocators[name].free, total, group=name))

    def fitted(self, sampling: Sampling, prompt_tokens: int, policy: DecodePolicy) -> Sampling:
        """The sampling of a request, whose answer fits into the positions behind a prompt of so many tokens.

        One that does not fit is cut if the sampling says `clip`, else it is a ValueError, which names prompt, limit and
        room. The latest token of an answer is not written, so it needs no position.
        """
        asked, room = sampling.max_new_tokens, self._positions(policy) - prompt_tokens + 1
        if asked <= room:
            return sampling
        if room < 1:
            self.check_length(prompt_tokens, policy)
        if sampling.clip:
            return dataclasses.replace(sampling, max_new_tokens=room)
        try:
            self.check_length(prompt_tokens + asked - 1, policy)
        except ValueError as error:
            said = f"the prompt has {prompt_tokens:,} tokens and {asked:,} new ones are asked for, the last of which needs no position"
            remedy = "ask for fewer, or for clip, which cuts the answer there"
            raise ValueError(f"{error}: {said}. There is room for {room:,}: {remedy}") from None
        return sampling

    def _positions(self, policy: DecodePolicy | PrefillPolicy | None) -> int:
        return MAX_POSITIONS if getattr(policy, "counts_in_cache", False) else self.config.max_positions

    def check_room(self, tokens: int, sequence: CachedSequence | None, growing: Sequence[CachedSequence]) -> None:
        """`Engine.check_room`."""
        held = None if sequence is None else sequence.suspended
        with self.advice():
            self._page_manager.check_room(tokens, sequence, held, growing)

    @contextlib.contextmanager
    def advice(self) -> Iterator[None]:
        """Add to OutOfPages how much a page takes and how many fit."""
        try:
            yield
        except OutOfPages as error:
            raise self._advised(error) from None

    def _advised(self, error: OutOfPages) -> OutOfPages:
        pinned = 0 if self.pinned is None else self.pinned()[error.group]
        said = f"{pinned:,} are pinned (Engine.unpin); " if pinned else ""
        counts, where = (error.needed, error.free, error.total), {"group": error.group, "devices": error.devices}
        return OutOfPages(*counts, said + self._plan().advice(error), **where)
