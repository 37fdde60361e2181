"""Pages that no sequence holds any more, found again by their content: the cache of prefixes.

A prompt is cut into hash blocks: pages, or whole chunks of prefill where a chunk's queries do not stand alone. Each
hash block has a digest of the digest before it, its tokens, and the policy that wrote it; the first one of everything
else that bits depend on. So a hash block's digest names all that its pages depend on, and a page that is found by it
holds the bits that prefill would write.

A page stays in the pool, which may span device and host memory, until others need its room. It is copied to disk as
soon as it has been written, so that giving it up costs nothing. What the pool cannot hold in host memory (pages of
windows and of meshes, and states of recurrent layers) is copied to a store there, too (`kvjax.cache.stores.host`). A
state is copied at some borders of chunks, and only to stores.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from kvjax.cache.allocator import OutOfPages, PageAllocator
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_manager import Holder, PageIds, PageManager, first_stored
from kvjax.cache.pool import Pool
from kvjax.cache.spec import OPEN
from kvjax.cache.stores.blocks import PIECE, Block, read_blocks, write_blocks
from kvjax.cache.stores.disk import DiskStore
from kvjax.cache.stores.host import HostStore
from pallas_kernels.core import dispatch

AHEAD = 3
"""Pieces that are read from disk ahead of their copies to the device, the current one included."""
STATE_CHUNKS = 4
"""States of recurrent layers are kept after every so many chunks of prefill."""


class Place(NamedTuple):
    """By what a page on the device is found: on which device of a mesh the first page of its prompt lies, and the
    page's key."""

    first: int
    key: bytes


@dataclasses.dataclass
class Chain:
    """What prefix a sequence begins with. root: the digest before the first hash block. path: that of `kvjax.dispatch`,
    which root covers. digests: of its full hash blocks. length: how many of its first tokens are such as prefill of a
    new prompt writes them. firsts: by layer group, on which device of a mesh its first page lies or is to lie
    (`Holder`)."""

    root: bytes
    path: str | None = None
    digests: list[bytes] = dataclasses.field(default_factory=list)
    length: int = 0
    firsts: dict[str, int] = dataclasses.field(default_factory=dict)

    def copy(self) -> Chain:
        return dataclasses.replace(self, digests=list(self.digests))


@dataclasses.dataclass
class StoreStats:
    """Pages of a store, how many of them are pinned, and what happened to them: found there, given up for others, bytes
    copied to it and from it. The device and host memory share a page of the pool: it counts where it lies now, or lay
    then. What the pool moves between both is in `PoolStats`."""

    pages: int = 0
    pinned: int = 0
    bytes: int = 0
    hits: int = 0
    evictions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclasses.dataclass
class PrefixStats:
    """What the cache of prefixes did. All counts are since the engine was made.

    prompts: how many were looked up; one that was begun twice counts twice. tokens: of these prompts. found_tokens:
    those of them that were not prefilled. wait_s: seconds that fetching pages took. damaged: pages on disk that were
    dropped. exact: whether only pages are found that a prompt would write itself, with the same bits.
    """

    prompts: int
    tokens: int
    found_tokens: int
    wait_s: float
    damaged: int
    device: StoreStats
    host: StoreStats | None
    disk: StoreStats | None
    exact: bool = True

    def __str__(self) -> str:
        share = self.found_tokens / max(self.tokens, 1)
        lines = [
            f"{self.found_tokens:,} of {self.tokens:,} prompt tokens were found and not computed ({share:.0%}); fetching them took "
            f"{self.wait_s:.2f} s, compilation included"
        ]
        for name in ("device", "host", "disk"):
            if (each := getattr(self, name)) is not None:
                moved = f"; {each.bytes_in / 1e6:,.0f} MB written, {each.bytes_out / 1e6:,.0f} MB read"
                moved = moved if name == "disk" or each.bytes_in else ""
                damaged = f", {self.damaged:,} dropped because they were damaged" if name == "disk" and self.damaged else ""
                pinned = f", {each.pinned:,} of them pinned" if each.pinned else ""
                held = f"{each.pages:,} pages kept ({each.bytes / 1e6:,.0f} MB){pinned}"
                lines.append(f"{name}: {held}; {each.hits:,} found for prompts, {each.evictions:,} evicted{damaged}{moved}")
        return "\n".join(lines)


class Prefixes:
    """The pages of prefixes. Pool, groups and indexes are the engine's.

    hash_block: tokens that one digest covers, a multiple of the page size. host: for the layer groups of its `blocks`;
    None: if pages are in host memory, they are the pool's.
    """

    def __init__(
        self,
        pool: Pool,
        groups: PageManager,
        indexes: tuple[IndexSpec, ...],
        *,
        hash_block: int,
        host: HostStore | None,
        disk: DiskStore | None,
    ):
        self.host, self.disk, self.hash_block = host, disk, hash_block
        self._pool, self._page_manager, self._indexes, self.spec = pool, groups, indexes, groups.spec
        self._page_size = min(group.page_size for group in self.spec.groups)
        self._device: dict[str, dict[Place, int]] = {group.name: {} for group in self.spec.groups}
        self._keys: dict[str, dict[int, Place]] = {group.name: {} for group in self.spec.groups}
        for group in self.spec.groups:
            # Weakly, so that an engine that nobody holds any more gives its stores back at once.
            groups.allocators[group.name].on_evict = functools.partial(_tell_evicted, weakref.ref(self), group.name)
        self.stores = [each for each in (host, disk) if each is not None]
        self.pins = Pins(self)
        self._seen = PrefixStats(0, 0, 0, 0.0, 0, StoreStats(), StoreStats(), StoreStats())

    def chain(self, root: bytes, salt: str | None) -> Chain:
        """That of a sequence without tokens. root: all that bits depend on besides tokens and prefill policies. salt:
        prompts of different salts share no pages."""
        key = b"" if salt is None else hashlib.sha256(salt.encode()).digest()
        return Chain(hashlib.blake2b(root, key=key).digest(), dispatch.forced_path())

    def stats(self) -> PrefixStats:
        """What happened so far."""
        device, host, disk = (dataclasses.replace(each) for each in (self._seen.device, self._seen.host, self._seen.disk))
        for name, known in self._device.items():
            there = self._pool.count_on_host(name, known.values())
            device.pages += len(known) - there
            device.bytes += (len(known) - there) * self.spec.bytes_per_page(name, self._indexes)
            host.pages += there
            host.bytes += there * self.spec.bytes_per_frame(name)
        for name, pages in self.pins.pages.items():
            there = self._pool.count_on_host(name, pages)
            device.pinned += len(pages) - there
            host.pinned += there
        for store, each in ((self.host, host), (self.disk, disk)):
            each.pinned += 0 if store is None else sum(key in store for _, key in self.pins.states)
        if self.host is not None:
            host.pages += len(self.host)
            host.bytes += self.host.used_bytes
            host.evictions += self.host.evictions
        if self.disk is not None:
            disk.pages, disk.bytes, disk.evictions = len(self.disk), self.disk.used_bytes, self.disk.evictions
            disk.bytes_in, disk.bytes_out = self.disk.written_bytes, self.disk.read_bytes
        return dataclasses.replace(
            self._seen,
            damaged=0 if self.disk is None else self.disk.damaged,
            device=device,
            host=host if self.host is not None or self._pool.frames else None,
            disk=None if self.disk is None else disk,
        )

    def adopt(self, sequence: Holder, chain: Chain, tokens: Sequence[int], how: Callable[[int], str]) -> int:
        """Give a sequence without tokens the pages of the longest known prefix of `tokens`, at most all but the last
        token. Returns its length in tokens; 0 if none is known, or if there are too few free pages.

        how: position -> what writes the hash block that begins there.
        """
        self._seen.prompts += 1
        self._seen.tokens += len(tokens)
        digests = self._digests(chain.root, tokens[: len(tokens) - 1], how)
        started = time.monotonic()
        while True:
            count, chain.firsts = self._found(digests, len(tokens))
            if not count:
                break
            try:
                taken = self.take(sequence, digests[:count], chain.firsts)
            except OutOfPages:
                chain.firsts = {}  # it may begin where there is room
                break
            if taken:
                self._seen.found_tokens += count * self.hash_block
                chain.digests, chain.length = digests[:count], count * self.hash_block
                break
        self._seen.wait_s += time.monotonic() - started
        return chain.length

    def written(self, sequence: Holder, chain: Chain, tokens: Sequence[int], how: Callable[[int], str]) -> None:
        """A sequence holds pages with these tokens from its beginning, written as `how` says. Keep those that are
        full."""
        chain.length = last = len(tokens)
        known = len(chain.digests)
        for start in range(known * self.hash_block, last - self.hash_block + 1, self.hash_block):
            before = chain.digests[-1] if chain.digests else chain.root
            chain.digests.append(_digest(before, tokens[start : start + self.hash_block], how(start)))
        held = {group.name: self._page_manager.first_of(group.name, sequence) for group in self.spec.groups}
        firsts = chain.firsts | {name: first for name, first in held.items() if first is not None}
        if any(chain.firsts.get(name, first) != first for name, first in firsts.items()):
            known = 0  # it was suspended, and came back to other devices: so did its earlier pages
        chain.firsts = firsts
        for number in range(known, len(chain.digests)):
            self._keep(sequence, number, chain)

    def written_state(self, sequence: Holder, chain: Chain) -> None:
        """Prefill has just written a sequence's last tokens: keep the state of its recurrent layers, if it ends at a
        border of chunks."""
        border = chain.length % (STATE_CHUNKS * self._page_manager.chunk) == 0
        if chain.digests and border and chain.length == len(chain.digests) * self.hash_block:
            self._keep_states(sequence, chain.digests[-1])

    def pin(self, digests: list[bytes], length: int) -> int:
        """Pin the prefix of these hash blocks: all of them, or up to the last border at which a state is kept. Returns
        its tokens.

        length: tokens of the prompt, for the message. ValueError for a prefix that is not known; others as of
        `Pins.add`.
        """
        border = STATE_CHUNKS * self._page_manager.chunk // self.hash_block if self.spec.state_groups else 1
        count = len(digests) // border * border
        if not count:
            raise ValueError(
                f"{length:,} tokens cannot be pinned: give at least {border * self.hash_block:,}, because that many are kept together"
            )
        known, firsts = self._found(digests[:count], None)
        if known < count:
            held = f"the first {known * self.hash_block:,}" if known else "none"
            raise ValueError(
                f"{count * self.hash_block:,} tokens cannot be pinned: the engine has pages of {held} of them. Prefill the prompt first, "
                "with the same cache_salt"
            )
        return self.pins.add(digests[:count], firsts)

    def digests(self, chain: Chain, tokens: Sequence[int], how: Callable[[int], str]) -> list[bytes]:
        """Of the full hash blocks of a prompt. how: as in `adopt`."""
        return self._digests(chain.root, tokens, how)

    def allocator(self, group: str) -> PageAllocator:
        """Of the pages of a layer group on the device."""
        return self._page_manager.allocators[group]

    def state_keys(self, digests: Sequence[bytes]) -> dict[str, bytes]:
        """Key of the state after these hash blocks, for each layer group that has states."""
        return {name: _named(digests[-1], name, 0) for name in self.spec.state_groups}

    def places(self, digests: Sequence[bytes], firsts: Mapping[str, int]) -> dict[str, tuple[list[int], list[int]]]:
        """Of the pages of these hash blocks, by layer group: those on the device, and of those that are elsewhere the
        devices of a mesh that they would be copied to. firsts: as in `Chain`. States are left out."""
        found = {}
        for name, start in self._first(len(digests)).items():
            if name not in self.spec.row_groups:
                keys = self._units(name, digests, start)
                here = self._resident(name, keys, firsts[name])
                found[name] = list(here.values()), self._parts_of(name, start, keys, here, firsts[name])
        return found

    def release(self, pages: PageIds) -> None:
        """A holder gives its pages up."""
        for name, held in pages.items():
            self._page_manager.allocators[name].release([page for page in held if page >= 0])

    # Inside

    def _digests(self, root: bytes, tokens: Sequence[int], how: Callable[[int], str]) -> list[bytes]:
        digests = [root]
        for start in range(0, len(tokens) - self.hash_block + 1, self.hash_block):
            digests.append(_digest(digests[-1], tokens[start : start + self.hash_block], how(start)))
        return digests[1:]

    def _units(self, group: str, digests: Sequence[bytes], first: int) -> list[bytes]:
        """Keys of a group's pages from the logical page `first` on, or of its state."""
        if group in self.spec.row_groups:
            return [_named(digests[-1], group, 0)]
        each = self.hash_block // self._page_size
        return [_named(digests[page // each], group, page % each) for page in range(first, len(digests) * each)]

    def _there(self, group: str, key: bytes, first: int) -> bool:
        return Place(first, key) in self._device[group] or any(key in store for store in self.stores)

    def _resident(self, group: str, keys: Sequence[bytes], first: int) -> dict[bytes, int]:
        """Pages on the device, by key, of a prompt whose first page lies on device `first` of a mesh."""
        here = self._device[group]
        return {key: here[place] for key in keys if (place := Place(first, key)) in here}

    def _first(self, count: int) -> dict[str, int]:
        """The first page of each group that a sequence of `count` hash blocks needs."""
        return {group.name: first_stored(group, count * self.hash_block) for group in self.spec.groups}

    def _found(self, digests: list[bytes], tokens: int | None) -> tuple[int, dict[str, int]]:
        """The most hash blocks whose pages are all there, and on which device of a mesh the first page of each group is
        to lie (`Chain.firsts`).

        tokens: of the prompt; None: one that is not continued, whose pages lie where most of them are.
        """
        whole = [group.name for group in self.spec.groups if group.window is None and group.name not in self.spec.row_groups]
        firsts = {name: first for name in whole if (first := self._best_first(name, digests, tokens)) is not None}
        known = [self._known(name, digests, first) for name, first in firsts.items()]
        longest = min(known, default=len(digests)) if len(firsts) == len(whole) else 0
        others = [group.name for group in self.spec.groups if group.name not in (*whole, OPEN)]
        for count in range(longest, 0, -1):
            start, found = self._first(count), dict(firsts)
            for name in others:
                keys = self._units(name, digests[:count], start[name])
                there = [first for first in self._devices(name) if all(self._there(name, key, first) for key in keys)]
                if not there:
                    break
                found[name] = max(there, key=lambda first, name=name, keys=keys: len(self._resident(name, keys, first)))
            else:
                return count, found
        return 0, firsts

    def _devices(self, group: str) -> range:
        """The devices over which pages of a group are sharded."""
        return range(self._page_manager.allocators[group].parts)

    def _known(self, group: str, digests: Sequence[bytes], first: int) -> int:
        """The most hash blocks whose pages of a group that keeps all tokens are there, for a prompt that begins on
        device `first`."""
        each = self.hash_block // self._page_size
        for count, digest in enumerate(digests):
            if not all(self._there(group, _named(digest, group, page), first) for page in range(each)):
                return count
        return len(digests)

    def _best_first(self, group: str, digests: Sequence[bytes], tokens: int | None) -> int | None:
        """On which device of a mesh the first page of a prompt best lies, in a group that keeps all tokens; None if no
        page is known.

        Where most of its beginning is found. But pages that it has for itself come after these, on the same devices for
        all prompts with this beginning. If fewer than half as many pages would stay free there as after pages on other
        devices, and the difference is more than the beginning takes, it begins elsewhere, once more. There is at most
        one copy of a beginning for each device.
        """
        devices, allocator = self._devices(group), self._page_manager.allocators[group]
        if len(devices) == 1:
            return 0
        each = self.hash_block // self._page_size
        known = {first: self._known(group, digests, first) for first in devices}
        if not any(known.values()):
            return None
        keys = {first: self._units(group, digests[: known[first]], 0) for first in devices}
        held = {first: len(self._resident(group, keys[first], first)) for first in devices}
        if tokens is None:
            return max(devices, key=lambda first: (known[first], held[first]))
        pages = tokens // self._page_size + 1
        own = range(max(known.values()) * each, pages)
        left = {first: allocator.left(first, own) for first in devices}
        best = max(devices, key=lambda first: (known[first], held[first], left[first]))
        other = max(devices, key=left.__getitem__)
        spent, gained = held[best] - held[other], left[other] - left[best]
        fits = allocator.left(other, range(held[other], pages)) >= 0
        return other if fits and 2 * left[best] < left[other] and spent < gained else best

    def take(self, sequence: Holder, digests: list[bytes], firsts: Mapping[str, int], *, to_pin: bool = False) -> bool:
        """Give a sequence the pages of these hash blocks. False if a page turned out to be lost or damaged: then it has
        none. OutOfPages if there are too few free pages for those that have to be copied. to_pin: for a pin, which
        takes no states of recurrent layers. No prompt has asked for its pages, so they do not count as found. firsts:
        as in `Chain`."""
        first = self._first(len(digests))
        names = [name for name in first if name != OPEN and (not to_pin or name not in self.spec.row_groups)]
        rows = {OPEN: [0]} if OPEN in first and not to_pin else {}  # for the pages to come: a prefix ends with a sealed one
        wanted = {name: self._units(name, digests, first[name]) for name in names}
        resident = {name: self._resident(name, keys, firsts.get(name, 0)) for name, keys in wanted.items()}
        absent = {name: [key for key in keys if key not in resident[name]] for name, keys in wanted.items()}
        parts = {name: self._parts_of(name, first[name], keys, resident[name], firsts.get(name, 0)) for name, keys in wanted.items()} | rows
        owned: dict[str, list[int]] = {}
        try:
            for name, pages in resident.items():  # first, so that none of these makes room for the others
                self._page_manager.allocators[name].own(list(pages.values()))
                owned[name] = list(pages.values())
            self._page_manager.check_parts(parts)
            taken = {name: self._page_manager.allocators[name].take_from(each) for name, each in parts.items()}
            for name, pages in taken.items():
                owned[name] = owned.get(name, []) + pages
            whole = all(self._bring(name, absent[name], taken[name], counted=not to_pin) for name in absent)
        except BaseException:
            self.release(owned)
            raise
        if not whole:
            self.release(owned)
            return False
        sequence.pages |= {name: taken[name] for name in rows}
        for name, keys in wanted.items():
            copied = dict(zip(absent[name], taken[name], strict=True))
            if name not in self.spec.row_groups:  # a row of state changes with the next token
                for key, page in copied.items():
                    self._enter(name, Place(firsts[name], key), page)
            at = resident[name] | copied
            sequence.pages[name] = [-1] * first[name] + [at[key] for key in keys]
            if not to_pin:
                self._seen.host.hits += (there := self._pool.count_on_host(name, resident[name].values()))
                self._seen.device.hits += len(resident[name]) - there
            for store in self.stores:
                store.used(reversed(absent[name]))  # the beginning of a prompt is of more use than its end
        return True

    def _bring(self, group: str, keys: list[bytes], pages: list[int], *, counted: bool) -> bool:
        """Copy blocks from host memory or disk to pages. False as soon as one is missing. Reads of the disk run ahead
        of the copies. counted: whether they count as found."""
        here = {} if self.host is None else {key: block for key in keys if (block := self.host.get(key)) is not None}
        reads: dict[bytes, Future] = {}
        for start in range(0, len(keys), PIECE):
            if self.disk is not None:
                near = keys[start : start + AHEAD * PIECE]
                reads |= {key: self.disk.read(key) for key in near if key not in reads and key not in here}
            piece = keys[start : start + PIECE]
            from_host = [here[key].nbytes for key in piece if key in here]
            self._seen.host.hits += counted * len(from_host)
            self._seen.host.bytes_out += sum(from_host)
            blocks = [here.pop(key) if key in here else self._from_disk(group, key, reads.pop(key, None)) for key in piece]
            self._seen.disk.hits += counted * (sum(block is not None for block in blocks) - len(from_host))
            if any(block is None for block in blocks):
                return False
            write_blocks(self._pool, self.spec, group, pages[start : start + PIECE], blocks, indexes=self._indexes)
        return True

    def _from_disk(self, group: str, key: bytes, read: Future | None) -> Block | None:
        """A block that `read` has begun to read. It goes to the store in host memory, too, if that takes its layer
        group."""
        if read is None or (data := read.result()) is None:
            return None
        return self._to_host(key, data) if self.host in self._stores(group) else data

    def _to_host(self, key: bytes, block: Block) -> Block:
        """The copy of a block in host memory, or the block where there is no room."""
        copied = self.host.put(key, block)
        if copied is None:
            return block
        self._seen.host.bytes_in += block.nbytes
        return copied

    def _stores(self, group: str) -> list[HostStore | DiskStore]:
        """The stores of a layer group, besides the pool."""
        return [each for each in self.stores if group in each.blocks]

    def _parts_of(self, group: str, start: int, keys: Sequence[bytes], but: Container[bytes], first: int) -> list[int]:
        """The devices of pages from the logical page `start` on, but for some. first: the device of the first page."""
        return self._page_manager.parts_from(group, first, [number for number, key in enumerate(keys, start) if key not in but])

    def _keep(self, sequence: Holder, number: int, chain: Chain) -> None:
        """A sequence has written hash block `number` of its prefix. On a mesh a prompt needs its pages sharded in turn,
        whoever wrote them: so they are found on the device by the device where the sequence begins, too."""
        each, digest = self.hash_block // self._page_size, chain.digests[number]
        for group in self.spec.groups:
            if group.name in self.spec.row_groups:
                continue
            new: dict[bytes, int] = {}
            for place in range(each):
                page = sequence.pages[group.name][number * each + place]
                key = _named(digest, group.name, place)
                if page < 0:
                    continue  # it left the window while the hash block was written
                at = Place(chain.firsts[group.name], key)
                if at not in self._device[group.name]:
                    self._enter(group.name, at, page)
                new[key] = page
            self._copy(group.name, new)

    def _keep_states(self, sequence: Holder, digest: bytes) -> None:
        for name in self.spec.state_groups:
            self._copy(name, {_named(digest, name, 0): sequence.pages[name][0]})

    def _copy(self, group: str, pages: dict[bytes, int]) -> None:
        """Copy pages to the stores that do not have them. Does not wait for the device."""
        stores = self._stores(group)
        absent = [key for key in pages if any(key not in store for store in stores if store.takes)]
        for key, block in zip(absent, read_blocks(self._pool, self.spec, group, [pages[key] for key in absent]), strict=True):
            there = self._to_host(key, block) if self.host in stores and key not in self.host else block
            if self.disk is not None and key not in self.disk:
                self.disk.put(key, group, there)

    def _enter(self, group: str, place: Place, page: int) -> None:
        self._device[group][place], self._keys[group][page] = page, place
        self._page_manager.allocators[group].keep(page)

    def _evicted(self, group: str, page: int) -> None:
        del self._device[group][self._keys[group].pop(page)]
        there = self._pool.count_on_host(group, [page])
        self._seen.host.evictions += there
        self._seen.device.evictions += 1 - there


def _tell_evicted(prefixes: weakref.ref[Prefixes], group: str, page: int) -> None:
    if (alive := prefixes()) is not None:
        alive._evicted(group, page)


def _digest(before: bytes, tokens: Sequence[int], how: str) -> bytes:
    digest = hashlib.blake2b(before, digest_size=32)
    digest.update(how.encode())
    digest.update(np.asarray(tokens, np.int32).tobytes())
    return digest.digest()


def _named(digest: bytes, group: str, place: int) -> bytes:
    """The key of a page of a hash block."""
    return hashlib.blake2b(f"{group}/{place}".encode(), key=digest[:64], digest_size=32).digest()


SHARE = 2
"""At most one page in so many of a store can be pinned. The others are left for everything else, so an engine can
always run."""


@dataclasses.dataclass(eq=False)
class Pin:
    """One pinned prefix. It holds pages as a sequence does. states: keys of its states of recurrent layers, by layer
    group."""

    length: int
    pages: PageIds
    states: dict[str, bytes]


class Pins:
    """The pinned prefixes of a cache of prefixes, by the digest of their last hash block."""

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
        """Pin the prefix of these hash blocks, all of which are known. Returns its tokens. Pinning it again changes
        nothing. firsts: on which device of a mesh its first page lies (`Chain`).

        ValueError if more than one page in SHARE of a store would be pinned, or if a page turns out to be damaged;
        OutOfPages.
        """
        prefixes, last = self._prefixes, digests[-1]
        if last in self._pins:
            return self._pins[last].length
        pin = Pin(len(digests) * prefixes.hash_block, {}, prefixes.state_keys(digests))
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
        """Unpin the longest pinned prefix of these hash blocks. Returns its tokens. ValueError if none is pinned."""
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
