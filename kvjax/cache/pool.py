"""The pages that an engine's programs read and write. If a jitted call that consumes them fails, this is reported."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import LatentPages, LayerCache, PagedKV, SlotLayer
from kvjax.cache.cache import Cache, Residency, check_missing
from kvjax.cache.host_pool.async_copies import AsyncCopies
from kvjax.cache.host_pool.hot_buffer import HotBuffers, HotTiles, counted, empty_hot, forget, no_buffers
from kvjax.cache.spec import OPEN, CacheSpec
from kvjax.cache.writes import copy_page, move_frames

if TYPE_CHECKING:
    from kvjax.cache.host_pool.frame_table import Frames
    from kvjax.cache.host_pool.mapped_memory import CopyStream

Layers = tuple[LayerCache | None, ...]
MOVES = (1, 4, 16, 64)
"""How many pages one program moves to host memory. There are few sizes, so that few programs are compiled."""


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Where the pages of the pool lie, and what has moved since the engine was made.

    device_pages, host_pages: pages there now, of sequences and of prompts that the engine keeps. moved_bytes: keys and
    values that moved to host memory, to make room. returned_bytes: those that came back when there was room.
    copied_bytes: what chunks of prefill copied back, for as long as they ran. asked, found: tiles (one KV head of a
    page, in one layer) of pages in host memory that steps have listed through the hot buffer, and those of them that
    were in it. host_read_bytes: what the others took over the bus. Tiles that steps read in place without the buffer,
    as dense ones do, are left out.
    """

    device_pages: int
    host_pages: int
    moved_bytes: int
    returned_bytes: int
    copied_bytes: int
    asked: int
    found: int
    host_read_bytes: int

    def __str__(self) -> str:
        hits = (
            f"; steps listed {self.asked:,} tiles of pages there, found {self.found / self.asked:.0%} in the hot buffer"
            if self.asked
            else ""
        )
        read = f", and read {self.host_read_bytes / 1e6:,.0f} MB from host memory" if self.asked else ""
        moved = f"{self.moved_bytes / 1e6:,.0f} MB moved to host memory"
        moved += f", {self.returned_bytes / 1e6:,.0f} MB came back" if self.returned_bytes else ""
        copied = f", {self.copied_bytes / 1e6:,.0f} MB copied back by prefill" if self.copied_bytes else ""
        held = f"{self.device_pages:,} pages on the device, {self.host_pages:,} in host memory"
        return f"pool: {held if self.device_pages or self.host_pages else 'no pages now'}; {moved}{copied}{hits}{read}"


BACK = 16
"""How many pages come back to the device at a time: 117 MB of a 7B model."""
MANY = 16
"""From so many pages on, those that have to move before a program go by plain copies, which the host waits for. A
program that moves them writes to host memory by a kernel, and plain copies that run beside it take nine times as
long."""
EXCHANGED = 64
"""How many pages change places before a step. A step waits for them, so they are few; a dense one reads each over the
bus otherwise."""


class Pool:
    """The layers' pages. Every step consumes them (they are donated) and returns them.

    frames: those of the layer groups whose pages may lie in host memory. In other groups the frame of a page is its id.
    shards: of the mesh over which layers are split. copied_bytes: what chunks of prefill copied from
    host memory. beside: where to put what steps read beside the pages; None: wherever JAX puts it.
    """

    def __init__(self, layers: Layers, spec: CacheSpec, frames: Mapping[str, Frames] | None = None, shards: Shards = ONE_DEVICE):
        self.frames, self.spec, self.shards = dict(frames or {}), spec, shards
        # With several processes device_put would compare the arrays of all of them: they are left to each program's
        # call.
        beside = place_beside(layers)
        self.beside = beside if self.frames or (shards.mesh is not None and beside.is_fully_addressable) else None
        self._layers = self.put(layers) if self.frames else layers
        if self.frames:
            from kvjax.cache.host_pool.mapped_memory import free_with

            free_with(self, [leaf for layer in layers if isinstance(layer, PagedKV | LatentPages) for leaf in jax.tree.leaves(layer.pages)])
        self._residency: dict[str, Residency] = {}
        buffers = no_buffers(tuple(self._empty_hot(number) for number in range(len(spec.layers)))) if self.frames else None
        self._hot = self.put(buffers) if buffers else None
        self._missing: list[jax.Array] = []  # counts of chunks of prefill that were not looked at yet
        self._latest: jax.Array | None = None  # an output of the latest call, which shows whether it failed
        self.launched: jax.Array | None = None  # an output of the latest program, also of one that only reads the pages
        self._failure: Exception | None = None
        self.copied_bytes = 0
        pool = weakref.proxy(self)  # a pool that nobody holds any more should go at once, and its memory with it
        calls = lambda *copies: pool._copy(*copies), lambda: pool._finish_copies(), lambda: pool._copies_finished()
        self._moving = AsyncCopies(*calls, lambda: pool.launched)
        for name, each in self.frames.items():
            each.arrived, each.arrive = lambda: pool._moving.arrived, lambda: pool._expect(pool._moving.arrive)
            each.give_up = functools.partial(self._moving.give_up, name)

    @property
    def layers(self) -> Layers:
        """The pages of each layer. Pages that have to move are moved first."""
        for name, frames in self.frames.items():
            if frames.moving >= MANY:
                self._expect(self._moving.wait)  # first: if it is interrupted, no page has moved
                self._or_lose(self._moving.move, name, frames.take_moves())
            elif frames.moving:
                self._move(name, frames.take_moves())
        return self._layers

    @layers.setter
    def layers(self, layers: Layers) -> None:
        self._layers = layers

    def put(self, arrays: Any) -> Any:
        """What a step reads beside the pages, on their device, or on each of the mesh. Arrays that span two memories
        are committed to their device, and so is everything that a program makes of them. If what the host makes anew
        were not, each program would be compiled for both. What is not on all devices of a mesh would be copied there in
        each step."""
        return jax.device_put(arrays, self.beside)

    def cache(self, spec: CacheSpec, tables: dict[str, Any], lengths: Any, first: int = 0, last: int | None = None) -> Cache:
        """What a step over layers [first, last) reads and writes. spec: of these layers. The step DONATES it: give its
        result to `keep`."""
        layers = self.layers[first:last]
        for name, frames in self.frames.items():
            if frames.changed:
                self._residency[name] = Residency(self.put(frames.frame_of.copy()), frames.counts.border)
                frames.changed = False
        residency = {group.name: self._residency[group.name] for group in spec.groups if group.name in self.frames}
        return Cache(layers, tables, lengths, spec, residency, self._hot_buffers() if last is None else None)

    def as_it_is(self, tables: dict[str, Any], lengths: Any) -> Cache:
        """What a step over all layers takes, for its shapes alone: changes nothing, so that another thread may call
        it."""
        residency = {
            name: self._residency.get(name) or Residency(self.put(frames.frame_of.copy()), frames.counts.border)
            for name, frames in self.frames.items()
        }
        return Cache(self._layers, tables, lengths, self.spec, residency, self._hot)

    def keep(self, cache: Cache, latest: Array, first: int = 0, last: int | None = None) -> tuple[Layers, Array]:
        """For `run`: all pages, those of layers [first, last) taken from a step's result. latest: another of its
        outputs."""
        self._residency |= cache.residency
        self._hot = cache.hot or self._hot
        layers = self._layers
        return (*layers[:first], *cache.layers, *(() if last is None else layers[last:])), latest

    def stats(self) -> PoolStats | None:
        """What happened so far; None where no page may lie in host memory. Waits for the device."""
        if not self.frames:
            return None
        counts = []
        if self._hot is not None:
            asked, read = jax.device_get((self._hot.asked, self._hot.from_host))
            for number in (number for number, each in enumerate(self._hot.tiles) if each is not None):
                size = sum(x.nbytes // x.shape[0] // x.shape[1] for x in jax.tree.leaves(self._layers[number].pages))
                counts.append((counted(asked[number]), counted(read[number]), size))
        return PoolStats(
            device_pages=sum(frames.on_device for frames in self.frames.values()),
            host_pages=sum(frames.on_host for frames in self.frames.values()),
            moved_bytes=sum(frames.moved * self.spec.bytes_per_frame(name) for name, frames in self.frames.items()),
            returned_bytes=sum(frames.returned * self.spec.bytes_per_frame(name) for name, frames in self.frames.items()),
            copied_bytes=self.copied_bytes,
            asked=sum(asked for asked, _, _ in counts),
            found=sum(asked - read for asked, read, _ in counts),
            host_read_bytes=sum(read * size for _, read, size in counts),
        )

    @property
    def moved(self) -> int:
        """How many pages have moved so far. As long as it stays the same, pages that had a frame have the same one."""
        return sum(frames.moved + frames.returned for frames in self.frames.values())

    def bind(self, pages: Mapping[str, Sequence[int]], *, wait: bool = True) -> None:
        """Give these pages, which are going to be written, frames. By layer group, ids below 0 are skipped. wait: as in
        `Frames.bind`."""
        for name, frames in self.frames.items():
            frames.bind(pages.get(name, ()), wait=wait)

    def copy_ahead(self, group: str, sealed: Collection[int], count: int) -> None:
        """Begin to copy up to `count` of the sealed pages of a layer group to host memory, so that as many others find
        room on the device. No program that is launched from now on may write to them, unless they are bound again."""
        _ = self.layers  # pages that the next program waits for leave first
        self._moving.add(group, self.frames[group].copy_ahead(sealed, count))

    def bring_back(self, sealed: Callable[[str], Iterable[int]]) -> None:
        """If the device has room, begin to copy sealed pages back there. If it has none, but pages that no sequence
        holds, they change places: before the next program that is launched. sealed: those of a layer group, the first
        ones to come first. No program that is launched from now on may write to them, unless they are bound again."""
        for name, frames in self.frames.items():
            if frames.room:
                _ = self.layers  # moves that wait may read the frames that are free
                self._moving.add(name, frames.bring_back(sealed(name), BACK))
            elif frames.exchangeable:
                _ = self.layers
                for moves in frames.exchange(sealed(name), EXCHANGED):
                    self._move(name, moves)

    def advance_copies(self) -> None:
        """Begin copies that were asked for, and let pages that have come back be on the device, as far as this needs no
        waiting. For the beginning of a step, before it asks where pages are."""
        if self.frames:
            self._moving.start()
            for frames in self.frames.values():
                if frames.coming and self._moving.arrived:
                    frames.have_come_back()

    def any_on_host(self, pages: Mapping[str, Sequence[int]]) -> bool:
        """Whether any of these pages lies in host memory. By layer group; ids below 0 are skipped."""
        return any(self.count_on_host(name, [page for page in pages[name] if page >= 0]) for name in self.frames)

    def count_on_host(self, group: str, pages: Collection[int]) -> int:
        """How many of these pages of a layer group lie in host memory."""
        if group not in self.frames or not pages:
            return 0
        frames = self.frames[group]
        return int((frames.frame_of[np.fromiter(pages, np.int64, len(pages))] >= frames.counts.border).sum())

    def frames_of(self, group: str, pages: Any) -> Int[np.ndarray, "..."]:
        """The frames of pages of a layer group, which must have some. Ids outside the pool, which writes skip, stay as
        they are."""
        pages = np.asarray(pages, np.int32)
        if group not in self.frames:
            return pages
        known = self.frames[group].frame_of
        inside = (pages >= 0) & (pages < len(known))
        found = np.where(inside, known[np.where(inside, pages, 0)], pages)
        if (inside & (found < 0)).any():
            raise RuntimeError(
                f"pages {pages[inside & (found < 0)].tolist()} of layer group {group} hold nothing: no frame was given to them"
            )
        return found

    def copy(self, sources: Mapping[str, int], targets: Mapping[str, int]) -> None:
        """Copy one page of each layer group to another, which gets a frame. Nothing is copied where both are the
        same."""
        self.bind({name: [target] for name, target in targets.items() if target != sources[name]})

        def of_layers(ids: Mapping[str, int]) -> list[tuple[np.int32, ...]]:
            frames = {name: 0 if sources[name] == targets[name] else self.frames_of(name, page) for name, page in ids.items()}
            return [tuple(np.int32(each[layer.group]) for layer in self.spec.layers) for each in (ids, frames)]

        (source, source_frames), (target, target_frames) = of_layers(sources), of_layers(targets)
        rows = (np.int32(sources[OPEN]), np.int32(targets[OPEN])) if OPEN in sources else None
        self.run(copy_page, self.layers, source, target, source_frames, target_frames, self.shards, rows)

    def expect_none(self, missing: Array | None) -> None:
        """Look at a chunk's count of missing pages as soon as it is known, without waiting for it. MissingPages for an
        earlier one."""
        if missing is not None:
            self._missing.append(missing)
        while self._missing and (self._missing[0].is_ready() or len(self._missing) > 64):
            check_missing(self._missing.pop(0))

    def _empty_hot(self, number: int) -> HotTiles | None:
        """A layer's hot buffer; None where it has none."""
        layer, frames = self._layers[number], self.frames.get(self.spec.layers[number].group)
        if frames is None or not isinstance(layer, PagedKV):
            return None
        return empty_hot(layer.pages.kv_heads, frames.counts.device, frames.counts.hot)

    def _hot_buffers(self) -> HotBuffers | None:
        """Every layer's hot buffer, without pages that got a new content."""
        for name, frames in self.frames.items():
            bound, hot = frames.take_bound(), self._hot
            numbers = [] if hot is None else [number for number in self.spec.layers_of(name) if hot.tiles[number] is not None]
            if bound and numbers:
                dead = np.zeros(len(frames.frame_of), bool)
                dead[bound] = True
                without = iter(forget(tuple(hot.tiles[number] for number in numbers), dead))
                tiles = tuple(next(without) if number in numbers else each for number, each in enumerate(hot.tiles))
                self._hot = hot.replace(tiles=tiles)
        return self._hot

    @functools.cached_property
    def _stream(self) -> CopyStream:
        from kvjax.cache.host_pool.mapped_memory import CopyStream

        return CopyStream()

    def _copy(self, group: str, moves: Int[np.ndarray, "n 2"]) -> None:
        """Begin to copy frames of a layer group, beside the device's programs if it is a GPU."""
        if self.on_cpu:
            self._move(group, moves)
        else:
            pages = [self._layers[number].pages for number in self._owners(group)]
            self._or_lose(self._stream.copy, jax.tree.leaves(pages), moves)

    def _finish_copies(self) -> None:
        if not self.on_cpu:  # there the next program finds what the one before has written
            self._or_lose(self._stream.wait)

    def _copies_finished(self) -> bool:
        return self.on_cpu or self._stream.done()

    def _or_lose(self, call: Callable, *args: Any) -> None:
        """Call a function without which pages that are recorded as copied would not be."""
        try:
            call(*args)
        except BaseException as error:
            self.lose(RuntimeError(f"pages could not be copied to host memory: {error}"))
            raise

    def _owners(self, group: str) -> tuple[int, ...]:
        return tuple(number for number in self.spec.layers_of(group) if self.spec.layers[number].share_with is None)

    def _expect(self, wait: Callable[[], None]) -> None:
        """Wait for what may show that a program has failed. If it was one that only read the pages, it is told once."""
        try:
            wait()
        except Exception as error:
            self.check(error)
            self.launched = self._latest
            raise

    def _move(self, group: str, moves: Int[np.ndarray, "n 2"]) -> None:
        """Copy frames of a layer group to others, in all of its layers."""
        numbers, done = self._owners(group), 0
        while done < len(moves):
            size = max(each for each in MOVES if each == 1 or each <= len(moves) - done)
            sources, targets = moves[done : done + size].T.copy()
            try:
                self.run(move_frames, self._layers, sources, targets, numbers=numbers)
            except BaseException as error:  # frames are recorded as moved already
                self._failure = self._failure or RuntimeError(f"pages could not be moved to host memory: {error}")
                raise
            done += size

    def compile_moves(self) -> None:
        """Compile the programs that move pages to host memory."""
        for name, frames in self.frames.items():
            for size in [size for size in MOVES if size <= frames.counts.device]:
                self._move(name, np.full((size, 2), (0, -1), np.int32))

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the pages are in the memory of a CPU."""
        return any(device.platform == "cpu" for device in first_array(self._layers).devices())

    def run(self, step: Callable, *args: Any, kept: Callable[[Any], tuple[Layers, jax.Array]] | None = None, **kwargs: Any) -> Any:
        """Call a jitted function that consumes the pages, and keep the pages that it returns. An error while tracing or
        compiling is raised unchanged, and the pages stay. Raises as `check` does.

        kept: finds all pages in the result, and one of the call's outputs; None where the result is the pages of all
        layers.
        """
        self.check()
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            self.check(error)
            raise
        self.layers, self._latest = (result, first_array(result)) if kept is None else kept(result)
        self.launched = self._latest
        return result

    def lose(self, error: Exception) -> None:
        """What the pages and rows hold fits no sequence any more: later calls raise as `check` does."""
        self._failure = self._failure or error

    def check(self, error: Exception | None = None) -> None:
        """RuntimeError if a call failed after it had begun (out of device memory, say): the pages are lost, or their
        content is invalid.

        error: what the latest call raised. Without it this does not wait for the device: a call that is still running
        passes, and only the first array is checked, because a call that fails after it has begun raises, or its outputs
        do.
        """
        layers = self._layers
        lost = first_array(layers).is_deleted() if error is None else any(leaf.is_deleted() for leaf in jax.tree.leaves(layers))
        latest = self._latest
        if self._failure is None:
            if lost:
                self._failure = error or RuntimeError("the pages were deleted")
            elif latest is not None and (error is not None or latest.is_ready()):
                try:
                    latest.block_until_ready()
                except Exception as earlier:
                    self._failure = earlier
        if self._failure is not None:
            said = str(self._failure).strip().partition("\n")[0]
            raise RuntimeError(
                f"this engine lost its pages when a step failed ({type(self._failure).__name__}: {said:.200}): make a new engine, and "
                "prefill again"
            ) from self._failure


def place_beside(layers: Layers) -> jax.sharding.Sharding:
    """Where to put what a program reads beside the pages: on their device, or on each of the mesh."""
    sharding = first_array(layers).sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def first_array(layers: Layers) -> jax.Array:
    """The first array of the layers, without going through all of them. The first layer always has arrays of its
    own."""
    first = layers[0]
    return first.start if isinstance(first, SlotLayer) else first.pages.k
