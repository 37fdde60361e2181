"""The order in which a store gives up what it holds: least recently used first, and what was used only once before the
rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

PROTECTED = 0.8
"""The largest part of the entries that are kept for having been used again."""


class Recency[Key: Hashable]:
    """Keys, in the order of their eviction. Iterating gives the next to evict first.

    A key that was used again since it was added is protected: keys that were used once go first. So one long prompt
    that nobody asks for again does not push out what many requests share. Too many protected keys lose that state, the
    least recently used first. This is the segmented LRU of Karedla, Love and Wherry (IEEE Computer, 1994). A key that
    is held is not evicted, and not iterated over.
    """

    def __init__(self):
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._held: set[Key] = set()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again or key in self._held

    def __iter__(self) -> Iterator[Key]:
        yield from self._once
        yield from self._again

    def add(self, key: Key, *, used: bool = False) -> None:
        """Add a key as the latest. used: whether it was used again already."""
        self._once[key] = None
        if used:
            self.touch(key)

    def touch(self, key: Key) -> None:
        """A key was used again. KeyError for one that was not added."""
        if key in self._held:
            return
        if key in self._again:
            self._again.move_to_end(key)
            return
        del self._once[key]
        self._again[key] = None
        while len(self._again) > max(1, PROTECTED * len(self)):
            oldest, _ = self._again.popitem(last=False)
            self._once[oldest] = None

    def hold(self, key: Key) -> None:
        """Do not evict a key until `let_go`. KeyError for one that was not added."""
        self.remove(key)
        self._held.add(key)

    def let_go(self, key: Key) -> None:
        """A key that is held counts as used again from here on. Does nothing for others."""
        if key in self._held:
            self._held.remove(key)
            self.add(key, used=True)

    def remove(self, key: Key) -> None:
        """KeyError for a key that was not added."""
        if key in self._held:
            self._held.remove(key)
        else:
            del (self._again if key in self._again else self._once)[key]

    def pop(self) -> Key:
        """Remove the next key to evict and return it. KeyError if there is none."""
        return (self._once or self._again).popitem(last=False)[0]
