"""Whether sequences fit: into the model's positions, into the whole pool, into what is free of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvjax.cache import OutOfPages
from kvjax.cache.groups import GroupPages
from kvjax.memory import MemoryPlan
from kvjax.model import ModelConfig
from kvjax.sequences import CachedSequence


class Capacity:
    """Checks lengths of sequences before they take pages. plan: the engine's memory plan beside the weights, for advice in errors.

    pinned: tells how many pages of each layer group are pinned, for the same advice; None: none ever are.
    """

    def __init__(self, config: ModelConfig, groups: GroupPages, plan: Callable[[], MemoryPlan]):
        self.config, self._groups, self._plan = config, groups, plan
        self.pinned: Callable[[], dict[str, int]] | None = None
        self._longest = min(config.max_positions, groups.longest)

    def check_length(self, tokens: int) -> None:
        """ValueError if a sequence of `tokens` tokens is longer than the model's positions, OutOfPages if the whole pool is too small."""
        if tokens <= self._longest:
            return
        if tokens > self.config.max_positions:
            known = f"the model's {self.config.max_positions:,} positions{self.config.for_longer(tokens)}"
            raise ValueError(f"a sequence of {tokens:,} tokens is longer than {known}")
        for name, count in self._groups.needed(tokens).items():
            if count > (total := self._groups.allocators[name].total):
                raise self._advised(OutOfPages(count, self._groups.allocators[name].free, total, group=name))

    def check_room(self, tokens: int, spare: int, held: CachedSequence | None) -> None:
        """`Engine.check_room`."""
        counts = {} if held is None else {name: sum(page >= 0 for page in pages) for name, pages in held.pages.items()}
        with self.advice():
            self._groups.check_free({name: count + spare - counts.get(name, 0) for name, count in self._groups.needed(tokens).items()})

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
        return OutOfPages(error.needed, error.free, error.total, said + self._plan().advice(error), group=error.group)
