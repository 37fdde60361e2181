"""Stores with one ordering barrier taken out, which random histories must reject. Each is applied with pytest's
`monkeypatch`."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp

from kvjax.cache import PageAllocator, prefix_cache
from kvjax.cache.prefix_cache import Prefixes
from kvjax.cache.stores import disk
from kvjax.cache.stores.disk import DiskStore
from kvjax.cache.stores.host import HostStore
from kvjax.engine.prefill_runner import Prefiller


def copied_before_written(patch):
    """The copy of a page to a store reads the pool as it was before the chunk: nothing orders it after the write."""
    begin, read, stale = Prefiller.begin, prefix_cache.read_blocks, {}

    def keep(prefiller, *args, **kwargs):
        before = stale[id(prefiller._pool)] = copy.copy(prefiller._pool)
        before.layers, before._latest = jax.tree.map(jnp.copy, before.layers), None
        return begin(prefiller, *args, **kwargs)

    patch.setattr(Prefiller, "begin", keep)
    patch.setattr(prefix_cache, "read_blocks", lambda pool, *args: read(stale.get(id(pool), pool), *args))


def refilled_while_copied(patch):
    """The copy of a page is still being made when the page is filled again: nothing orders the refill after the
    copy."""
    copy, waiting = Prefixes._copy, []

    def later(kept, group, pages):
        waiting.append((kept, group, pages))
        while len(waiting) > 16:
            other, *rest = waiting.pop(0)
            if other is kept:  # the engine of an earlier history is gone
                copy(other, *rest)

    patch.setattr(Prefixes, "_copy", later)


def read_before_arrived(patch):
    """A step reads a page before its block has come back: nothing orders the step after the copy."""
    write, waiting = prefix_cache.write_blocks, []

    def later(pool, *args, **kwargs):
        _, group, ids, _ = args
        pool.bind({group: ids})  # a page without a frame would be seen by the steps themselves
        waiting.append((pool, args, kwargs))
        while len(waiting) > 1:
            other, args, kwargs = waiting.pop(0)
            if other is pool:
                write(other, *args, **kwargs)

    patch.setattr(prefix_cache, "write_blocks", later)


def place_for_a_page(patch):
    """Blocks come back to the pages whose ids are their places in the list: a place where a page is meant."""
    write = prefix_cache.write_blocks

    def misplaced(pool, spec, group, ids, *args, **kwargs):
        pool.bind({group: ids})  # a page without a frame would be seen by the steps themselves
        write(pool, spec, group, range(len(ids)), *args, **kwargs)

    patch.setattr(prefix_cache, "write_blocks", misplaced)


def page_for_a_slot(patch):
    """A block on disk is read one slot beside its own, and its digest is not looked at: a number of one kind where
    another is meant."""
    read = disk._read_at
    patch.setattr(disk, "_digest", lambda key, data: b"")
    patch.setattr(disk, "_read_at", lambda file, data, offset: read(file, data, max(0, offset - len(data))))


def host_block_refilled(patch):
    """Host memory gives the room of a block to another, and still finds the first one there."""
    drop = HostStore._drop

    def forgetful(store, key):
        drop(store, key)
        store.given_up = key

    def get(store, key):
        return next(reversed(store._blocks.values())) if key == getattr(store, "given_up", None) and store._blocks else honest(store, key)

    honest, contains = HostStore.get, HostStore.__contains__
    patch.setattr(HostStore, "_drop", forgetful)
    patch.setattr(HostStore, "get", get)
    patch.setattr(HostStore, "__contains__", lambda store, key: key == getattr(store, "given_up", None) or contains(store, key))


def slot_still_named(patch):
    """The disk gives the slot of a block to another, and goes on naming it. Digests find that: see
    `digests_not_looked_at`."""

    def write(store, key, group, data):
        given_up = None if store._free[group] else next(iter(store._order[group]))
        place = store._places.get(given_up)
        honest(store, key, group, data)
        if place is not None:
            with store._lock:
                store._places[given_up] = place
                store._order[group].add(given_up)

    honest = DiskStore._write_whole
    patch.setattr(DiskStore, "_write_whole", write)


def digests_not_looked_at(patch):
    """What was read from disk is taken for right."""
    patch.setattr(disk, "_digest", lambda key, data: b"")


def owned_after_taken(patch):
    """Pages that a prompt finds get their owner only after others were taken for the rest, which may be the same
    pages."""
    own, take, waiting = PageAllocator.own, PageAllocator.take_from, {}

    def take_first(allocator, parts):
        pages = take(allocator, parts)
        own(allocator, waiting.pop(id(allocator), []))
        return pages

    patch.setattr(PageAllocator, "own", lambda allocator, pages: waiting.setdefault(id(allocator), []).extend(pages))
    patch.setattr(PageAllocator, "take_from", take_first)


CORRUPTING = {
    each.__name__: each
    for each in (copied_before_written, refilled_while_copied, read_before_arrived, place_for_a_page, page_for_a_slot, host_block_refilled)
}
"""Those that change bits of answers."""
