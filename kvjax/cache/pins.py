"""Prefixes that stay: their pages are held in the pool, and states of recurrent layers in the stores that have them."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvjax.cache.groups import PageIds

if TYPE_CHECKING:
    from kvjax.cache.prefixes import Prefixes

SHARE = 2
"""At most one page in so many of a store can be pinned. The others are left for everything else, so an engine can always run."""


@dataclasses.dataclass(eq=False)
class Pin:
    """One pinned prefix. It holds pages as a sequence does. states: keys of its states of recurrent layers, by layer group."""

    length: int
    pages: PageIds
    states: dict[str, bytes]


class Pins:
    """The pinned prefixes of a cache of prefixes, by the digest of their last grain."""

    def __init__(self, prefixes: Prefixes):
        # Weakly, so that an engine that nobody holds any more gives its stores back at once.
        self._prefixes: Prefixes = weakref.proxy(prefixes)
        self._pins: dict[bytes, Pin] = {}

    @property
    def pages(self) -> dict[str, set[int]]:
        """Pages of the device that are pinned, by layer group."""
        held: dict[str, set[int]] = {group.name: set() for group in self._prefixes.spec.groups}
        for pin in self._pins.values():
            for name, pages in pin.pages.items():
                held[name].update(page for page in pages if page >= 0)
        return held

    @property
    def states(self) -> list[tuple[str, bytes]]:
        """Layer group and key of every pinned state."""
        return [each for pin in self._pins.values() for each in pin.states.items()]

    def add(self, digests: Sequence[bytes], firsts: Mapping[str, int]) -> int:
        """Pin the prefix of these grains, all of which are known. Returns its tokens. Pinning it again changes nothing. firsts: on which
        device of a mesh its first page lies (`kvjax.cache.prefixes.Chain`).

        ValueError if more than one page in SHARE of a store would be pinned, or if a page turns out to be damaged; OutOfPages.
        """
        prefixes, last = self._prefixes, digests[-1]
        if last in self._pins:
            return self._pins[last].length
        pin = Pin(len(digests) * prefixes.grain, {}, prefixes.state_keys(digests))
        self._check_device(digests, firsts)
        self._check_stores(pin.states)
        if not prefixes.take(pin, digests, firsts, to_pin=True):
            raise ValueError("a page of this prefix was damaged or lost, so it cannot be pinned: prefill the prompt again first")
        self._pins[last] = pin
        for key in pin.states.values():
            for store in prefixes.stores:
                store.hold(key)
        return pin.length

    def remove(self, digests: Sequence[bytes]) -> int:
        """Unpin the longest pinned prefix of these grains. Returns its tokens. ValueError if none is pinned."""
        for digest in reversed(digests):
            if (pin := self._pins.pop(digest, None)) is not None:
                self._prefixes.release(pin.pages)
                for key in pin.states.values():
                    for store in self._prefixes.stores:
                        store.let_go(key)
                return pin.length
        lengths = ", ".join(f"{length:,}" for length in sorted(pin.length for pin in self._pins.values()))
        pinned = (
            f"the pinned prefixes have {lengths} tokens: give all tokens of one, with its cache_salt" if lengths else "nothing is pinned"
        )
        raise ValueError(f"no prefix of this prompt is pinned; {pinned}")

    def _check_device(self, digests: Sequence[bytes], firsts: Mapping[str, int]) -> None:
        held = self.pages
        for name, (resident, absent) in self._prefixes.places(digests, firsts).items():
            allocator = self._prefixes.allocator(name)
            counts = Counter([*map(allocator.part_of, held[name] | set(resident)), *absent])
            if (count := max(counts.values(), default=0)) > (most := allocator.each // SHARE):
                where = "in the pool" if allocator.parts == 1 else "on one device"
                raise ValueError(
                    f"{count:,} pages of layer group {name!r} would be pinned {where}, and at most {most:,} of its {allocator.each:,} "
                    "can be, so that sequences have room: unpin another prefix, pin a shorter one, or make the engine with more pages"
                )

    def _check_stores(self, states: dict[str, bytes]) -> None:
        held = self.states
        for store in self._prefixes.stores:
            for name, key in states.items():
                count, most = 1 + sum(group == name and other in store for group, other in held), store.capacity(name) // SHARE
                if key in store and count > most:
                    raise ValueError(
                        f"{count:,} states of layer group {name!r} would be pinned in {store.NAME}, and at most {most:,} can be, so that "
                        f"others have room: unpin another prefix, or make the engine with more {store.SIZE_ARGUMENT}"
                    )
