"""GPU threads emulated by numpy: stage functions of `pallas_kernels.hopper.threads.lanes` run unchanged, all threads of
a cluster in lockstep.

`run_cluster` puts stand-ins for the MLIR bindings into `lanes` while it runs: a value is an array with a number per
thread, and inline PTX is looked up in `emulated_ptx.CODES`. So the functions of `lanes` itself are under test. What a
GPU would leave undefined is a `Fault` (`emulated_memory`): strays, races, barriers that some threads miss, decisions by
words that nobody wrote.

Not emulated: compilers that round a product and a sum once (as `fma`), fences between proxies, tensor maps, `wgmma`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from emulator import ptx as emulated_ptx
from emulator.copies import Copies
from emulator.memory import Clock, Memory
from emulator.values import (
    ARITH,
    F32,
    I1,
    I8,
    I32,
    INDEX,
    IR,
    MATH,
    Divergence,
    Fault,
    Misaligned,
    NotArrived,
    OutOfBounds,
    Pointer,
    Race,
    Undefined,
    UnknownCode,
    Unwritten,
    Value,
    operation,
    quotient,
    remainder,
    select,
    spread,
)
from pallas_kernels.hopper.threads import lanes

FAULTS = (Divergence, Misaligned, NotArrived, OutOfBounds, Race, Undefined, UnknownCode, Unwritten)
"""What an emulated program can be told."""

MAX_TURNS = 1_000_000
"""A loop that runs longer is taken to be endless."""

NOWHERE = -(2**50)
"""Offset of places that nobody wrote down."""


def _dividing(function: Callable, machine: Machine) -> Callable[..., Value]:
    def apply(a, b):
        machine.refuse(b.data == 0, Undefined, "divides by 0")
        return operation(function)(a, b)

    return apply


def _shifting(function: Callable, machine: Machine) -> Callable[..., Value]:
    def apply(a, b):
        machine.refuse((b.data < 0) | (b.data > 31), Undefined, "shifts by less than 0 or more than 31 places (`shift_right` may)")
        return operation(function, (I32,))(a, Value(b.data & np.int32(31), b.type, b.unknown))

    return apply


class Mask:
    """The threads that run."""

    def __init__(self, bits: np.ndarray):
        self.bits = bits
        self.threads = np.flatnonzero(bits)
        self.full, self.empty = len(self.threads) == len(bits), not len(self.threads)

    @functools.cached_property
    def warps(self) -> tuple[np.ndarray, bool]:
        """Those with a running thread; whether only some threads of one run."""
        count = self.bits.reshape(-1, 32).sum(1)
        return np.flatnonzero(count), bool(((count > 0) & (count < 32)).any())


class Machine(Copies):
    """A cluster of CTAs, its shared memory, and global memory that it shares with the clusters before it."""

    def __init__(self, ctas: int, threads: int, cluster: int, tick: int):
        super().__init__(ctas * threads)
        self.count_ctas, self.threads = ctas, threads
        self.thread = np.tile(np.arange(threads, dtype=np.int32), ctas)
        self.cta = np.repeat(np.arange(ctas, dtype=np.int32), threads)
        self.number = np.arange(self.size, dtype=np.int32) + cluster * self.size
        self.clock = Clock(ctas, threads, cluster * self.size, tick)
        self.mask = Mask(np.ones(self.size, bool))

    def bindings(self) -> dict[str, Any]:
        """What stands in for the names of `lanes`."""
        arith = {"divsi": _dividing(quotient, self), "remsi": _dividing(remainder, self)}
        arith |= {"shli": _shifting(np.left_shift, self), "shrsi": _shifting(np.right_shift, self)}
        dimension = SimpleNamespace(x="x")
        return {
            "ir": IR,
            "arith": SimpleNamespace(**ARITH, **arith),
            "math": MATH,
            "gpu": SimpleNamespace(Dimension=dimension, thread_id=lambda _: Value(self.thread, INDEX)),
            "llvm": SimpleNamespace(getelementptr=self._element, GEPNoWrapFlags=SimpleNamespace(none=None)),
            "mgpu_utils": SimpleNamespace(
                memref_ptr=lambda ref: Pointer(ref, np.int64(0)), inline_ptx=self._inline_ptx, when=self.when, shfl_bfly=self._butterfly
            ),
            "loop": self.loop,
            "while_loop": self.while_loop,
        }

    def refuse(self, where, fault: type[Fault], what: str) -> None:
        """A fault if a running thread is among `where`."""
        if not np.any(where):
            return
        bad = np.flatnonzero(spread(where, self.size) & self.mask.bits)
        if len(bad):
            raise fault(f"{self._name(bad[0])} {what}")

    def _name(self, index: int) -> str:
        return f"thread {index % self.threads} of CTA {index // self.threads}"

    def _name_of_number(self, number: int) -> str:
        cluster, index = divmod(number, self.size)
        other = "" if cluster == self.number[0] // self.size else f", cluster {cluster}"
        return self._name(index) + other

    def known(self, value: Value, what: str) -> np.ndarray:
        """A number per thread, which must not come from a word that nobody wrote."""
        if value.unknown is not None:
            self.refuse(value.unknown, Unwritten, f"{what} by a word that nobody wrote")
        return spread(value.data, self.size)

    # Control.

    @contextlib.contextmanager
    def _only(self, where):
        outer = self.mask
        inner = outer if np.all(where) else Mask(outer.bits & where)
        self.mask = outer if len(inner.threads) == len(outer.threads) else inner
        try:
            yield
        finally:
            self.mask = outer

    def when(self, condition: Value):
        if condition.type is not I1:
            raise TypeError(f"a condition of type {condition.type}")
        return self._only(self.known(condition, "decides"))

    def loop(self, stop, carry, body, start=0, step=1):
        start, stop, step = (x if isinstance(x, lanes.Scalar) else lanes.i32(x) for x in (start, stop, step))
        self.refuse(self.known(step.value, "counts") <= 0, Undefined, "counts by steps that are not positive")
        self.known(start.value, "counts"), self.known(stop.value, "counts")
        return self._repeat(lambda i, *_: i < stop, lambda i, *carry: [i + step, *body(i, *carry)], [start, *carry])[1:]

    def while_loop(self, condition, body, carry):
        return self._repeat(condition, body, carry)

    def _repeat(self, condition, body, carry: Sequence[lanes.Scalar]) -> list[lanes.Scalar]:
        carry, outer = list(carry), self.mask
        try:
            for _ in range(MAX_TURNS):
                test = condition(*carry).value
                with self.when(test):
                    running = self.mask
                if running.empty:
                    return carry
                self.mask = running
                after = list(body(*carry))
                if [x.value.type for x in after] != [x.value.type for x in carry]:
                    raise TypeError(f"a loop that carries {[x.value.type for x in carry]} gave {[x.value.type for x in after]}")
                if running is not outer:
                    still = Value(running.bits, I1)
                    after = [lanes.Scalar(select(still, new.value, old.value)) for new, old in zip(after, carry, strict=True)]
                carry = after
        finally:
            self.mask = outer
        raise Fault(f"a loop has not ended after {MAX_TURNS} turns")

    # Memory.

    def _element(self, _, base: Pointer, dynamic, static, *, elem_type, no_wrap_flags) -> Pointer:
        if elem_type is not I8:
            raise TypeError(f"elements of {elem_type}")
        by = sum(x for x in static if x != -2147483648)
        for value in dynamic:
            by = by + (self._address(value)).astype(np.int64)
        return base.moved(by)

    def _address(self, value: Value):
        """An offset; an unknown one leads nowhere, which is a fault for who goes there."""
        return value.data if value.unknown is None else np.where(value.unknown, NOWHERE, value.data.astype(np.int64))

    def places(self, pointer: Pointer, words: int, where=None, size: int = 0):
        """Per array: it, the running threads, and `[threads, words]` where their words stand. where: who of the running
        ones. size: bytes of the access, if it is less than a word."""
        for among, part in pointer.parts():
            bits = self.mask.bits if where is None else self.mask.bits & where
            bits = bits if among is None else bits & among
            threads = self.mask.threads if bits is self.mask.bits else np.flatnonzero(bits)
            if not len(threads):
                continue
            memory = part.memory
            offset = spread(part.offset, self.size)[threads]
            self._refuse_places(memory, threads, offset, size or 4 * words)
            place = offset >> 2
            if not memory.is_global:
                cta = (self.cta if part.cta is None else spread(part.cta, self.size))[threads]
                place = place + cta * (memory.size_bytes // 4)
                if part.cta is not None and (cta != self.cta[threads]).any():
                    self.clock.last_remote = self.clock.tick
            yield memory, threads, place[:, None] if words == 1 else place[:, None] + np.arange(words)

    def _refuse_places(self, memory: Memory, threads, offset, size: int) -> None:
        if offset.min() < 0 or offset.max() + size > memory.size_bytes:
            bad = np.flatnonzero((offset < 0) | (offset + size > memory.size_bytes))[0]
            if offset[bad] < NOWHERE // 2:
                raise Unwritten(f"{self._name(threads[bad])} goes in {memory.name} where a word says that nobody wrote")
            where = f"{_amount(size)} at byte {offset[bad]} of {memory.name}, which has {memory.size_bytes} bytes"
            raise OutOfBounds(f"{self._name(threads[bad])} goes to {where}")
        crooked = offset & (size - 1)  # the instructions access 1, 2 or 4 words, or 1 or 2 bytes
        if crooked.any():
            bad = np.flatnonzero(crooked)[0]
            raise Misaligned(f"{self._name(threads[bad])} goes to {_amount(size)} at byte {offset[bad]} of {memory.name}")

    def _refuse_access(self, memory: Memory, threads, places, what: str, before: str, log, *, reads: bool = False) -> None:
        if self.clock.is_ordered(log):
            return
        words, number = places.ravel(), self._numbers(threads, places.shape[1])
        found = self.clock.unordered(log, words, number, reads=reads)
        if found:
            at, other = found
            word = words[at] % (memory.size_bytes // 4)
            me = self._name(threads[at // places.shape[1]])
            raise Race(f"{me} {what} word {word} of {memory.name}, which {self._name_of_number(other)} {before}; no barrier between")

    def _refuse_early(self, memory: Memory, threads, places) -> None:
        if memory.on_the_way is not None and memory.on_the_way[places].any():
            bad = np.flatnonzero(memory.on_the_way[places].any(1))[0]
            raise NotArrived(f"{self._name(threads[bad])} goes to {memory.name} while a copy to there is on its way")

    def _note(self, memory: Memory, log, threads, places) -> None:
        floor = 0 if memory.is_global else self.clock.cluster
        log.note(places.ravel(), self._numbers(threads, places.shape[1]), self.clock.tick, floor)

    def _numbers(self, threads, words: int) -> np.ndarray:
        """The number of the thread of each word."""
        number = self.number[threads]
        return number if words == 1 else np.repeat(number, words)

    def load(self, pointer: Pointer, words: int, *, space: str, constant: bool, where=None) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Per word: it, per thread, and who got one that nobody wrote. constant: it must be what it was before the
        launch. where: the threads that do; the others get what nobody wrote."""
        self.clock.tick += 1
        found, unknown = np.zeros((words, self.size), np.int32), None if where is None else np.repeat(~where[None], words, 0)
        for memory, threads, places in self.places(pointer, words, where):
            self._refuse_space(memory, space, pointer)
            self._refuse_early(memory, threads, places)
            if constant:
                if memory.writes.last[1][places].any():
                    raise Race(f"{self._name(threads[0])} loads {memory.name} as constant, which is written in the same launch")
                memory.read_only[places] = True
            else:
                self._refuse_access(memory, threads, places, "reads", "wrote", memory.writes)
                self._refuse_access(memory, threads, places, "reads", "added to", memory.atomics)
                self._note(memory, memory.reads, threads, places)
            found[:, threads] = memory.data[places].T
            if memory.known is not None and not memory.known[places].all():
                unknown = np.zeros((words, self.size), bool) if unknown is None else unknown
                unknown[:, threads] = ~memory.known[places].T
        return [(found[n], None if unknown is None or not unknown[n].any() else unknown[n]) for n in range(words)]

    def load_part(self, pointer: Pointer, size: int) -> np.ndarray:
        """1 or 2 bytes of global memory per thread, as integers without a sign."""
        self.clock.tick += 1
        found = np.zeros(self.size, np.int32)
        for among, part in pointer.parts():
            for memory, threads, places in self.places(part, 1, among, size):
                self._refuse_space(memory, "global", part)
                self._refuse_access(memory, threads, places, "reads", "wrote", memory.writes)
                self._note(memory, memory.reads, threads, places)
                place = spread(part.offset, self.size)[threads] // size
                found[threads] = memory.data.view({1: np.uint8, 2: np.uint16}[size])[place]
        return found

    def _refuse_space(self, memory: Memory, space: str, pointer: Pointer) -> None:
        spaces = ("global",) if memory.is_global else ("shared", "shared::cta", "shared::cluster")
        if space not in spaces:
            raise TypeError(f"{memory.name} is not in {space} memory")
        if space != "shared::cluster" and any(part.cta is not None for _, part in pointer.parts()):
            raise TypeError(f"an address in another CTA is not one of {space} memory")

    def store(self, pointer: Pointer, values: Sequence[Value], *, space: str, where=None) -> None:
        """One word per value. where: the threads that do."""
        self.clock.tick += 1
        for memory, threads, places in self.places(pointer, len(values), where):
            self._refuse_space(memory, space, pointer)
            data = np.stack([spread(np.asarray(x.data).view(np.int32), self.size)[threads] for x in values], 1)
            self.write(memory, threads, places, data)
            unknown = [spread(False if x.unknown is None else x.unknown, self.size)[threads] for x in values]
            if memory.is_global and np.any(unknown):
                bad = self._name(threads[np.flatnonzero(np.any(unknown, 0))[0]])
                raise Unwritten(f"{bad} stores to {memory.name} what comes from a word that nobody wrote")
            if not memory.is_global:
                memory.known[places] = ~np.stack(unknown, 1)

    def write(self, memory: Memory, threads, places, data: np.ndarray) -> None:
        """Words now written by threads."""
        self._refuse_early(memory, threads, places)
        self._refuse_access(memory, threads, places, "writes", "read", memory.reads, reads=True)
        if memory.contested:
            order = np.argsort(threads * 40503 % 65536)  # the winner is the last one of an order that nobody should rely on
            threads, places, data = threads[order], places[order], data[order]
        else:
            self._refuse_access(memory, threads, places, "writes", "wrote", memory.writes)
        self._refuse_access(memory, threads, places, "writes", "added to", memory.atomics)
        if memory.is_global and memory.read_only[places].any():
            raise Race(f"{self._name(threads[0])} writes {memory.name}, which is loaded as constant in the same launch")
        memory.data[places] = data
        bad = np.flatnonzero((memory.data[places] != data).any(1))
        if len(bad) and not memory.contested:
            raise Race(f"{self._name(threads[bad[0]])} and another thread write different words to one place of {memory.name} at once")
        self._note(memory, memory.writes, threads, places)

    def _atomics(self, pointer: Pointer, space: str, where):
        """Per array: it, the threads, and where they change a word, which other atomics may do at the same time."""
        self.clock.tick += 1
        for memory, threads, places in self.places(pointer, 1, where):
            self._refuse_space(memory, space, pointer)
            self._refuse_early(memory, threads, places)
            self._refuse_access(memory, threads, places, "adds to", "read", memory.reads, reads=True)
            self._refuse_access(memory, threads, places, "adds to", "wrote", memory.writes)
            if memory.known is not None and not memory.known[places].all():
                raise Unwritten(f"{self._name(threads[0])} adds to a word of {memory.name} that nobody wrote")
            memory.atomics = memory.atomics or type(memory.reads)(len(memory.data))
            yield memory, threads, places
            self._note(memory, memory.atomics, threads, places)

    def set_bits(self, pointer: Pointer, bits: Value, *, where=None) -> None:
        """Atomic, in shared memory."""
        for memory, threads, places in self._atomics(pointer, "shared", where):
            np.bitwise_or.at(memory.data, places[:, 0], self.known(bits, "sets")[threads])

    def add(self, pointer: Pointer, value: Value, *, space: str, where=None) -> np.ndarray:
        """Atomic; returns what was there, in an order of threads that nobody should rely on."""
        found = np.zeros(self.size, np.int32)
        for memory, threads, places in self._atomics(pointer, space, where):
            words, amounts = places[:, 0], spread(self.known(value, "adds"), self.size)[threads]
            order = np.lexsort(((threads * 40503) % 65536, words))  # those at one word one after another, shuffled
            words, amounts = words[order], amounts[order].astype(np.int64)
            sums = np.cumsum(amounts) - amounts
            start = np.flatnonzero(np.r_[True, words[1:] != words[:-1]])
            sums -= np.repeat(sums[start], np.diff(np.r_[start, len(words)]))
            found[threads[order]] = (memory.data[words] + sums).astype(np.int32)
            np.add.at(memory.data, words, amounts.astype(np.int32))
        return found

    # Warps, CTAs, the cluster.

    def whole_warps(self, what: str) -> None:
        """A fault unless every warp is here with all its lanes or none. They have met, then."""
        warps, partial = self.mask.warps
        if partial:
            raise Divergence(f"only some lanes of a warp come to {what}")
        self.clock.meet_warps(warps)

    def across(self, x: Value, lane) -> Value:
        """The value of another lane of the warp."""
        self.whole_warps("a shuffle")
        from_ = (np.arange(self.size) & ~31) + spread(lane, self.size)
        unknown = None if x.unknown is None else spread(x.unknown, self.size)[from_]
        return Value(spread(x.data, self.size)[from_], x.type, unknown)

    def _butterfly(self, x: Value, distance: int) -> Value:
        return self.across(x, self.thread % 32 ^ distance)

    def per_warp(self, x: Value, function: Callable, what: str) -> Value:
        """function: `[warps, 32]` -> `[warps]` int32, given to all lanes."""
        self.whole_warps(what)
        return Value(np.repeat(function(self.known(x, f"comes to {what}").reshape(-1, 32)), 32), I32)

    def warp_barrier(self) -> None:
        self.whole_warps("a warp's barrier")
        self.clock.sync_warps(self.mask.warps[0])

    def cta_barrier(self, threads: int) -> None:
        here = self.mask.bits.reshape(self.count_ctas, -1).sum(1)
        if ((here > 0) & (here < self.threads)).any():
            raise Divergence(f"only some threads of a CTA come to its barrier: {here.tolist()} of {self.threads}")
        if threads != self.threads:
            raise Divergence(f"a barrier of {threads} threads in a CTA of {self.threads}")
        self.clock.sync_ctas(np.flatnonzero(here))

    def arrive(self) -> None:
        if self.mask.empty:
            return
        if not self.mask.full or self.clock.arrived is not None:
            raise Divergence("only some threads of the cluster come to its barrier" if not self.mask.full else "a second arrival")
        self.clock.arrived = self.clock.tick

    def wait_for_cluster(self) -> None:
        if self.mask.empty:
            return
        if not self.mask.full or self.clock.arrived is None:
            raise Divergence("threads wait for a cluster's barrier at which not all have arrived")
        self.clock.sync_cluster(self.clock.arrived)
        self.clock.arrived = None

    def end(self) -> None:
        """The stage is over."""
        if self.copies or any(arrival.copies for arrival in self.arrivals.values()):
            raise NotArrived("copies are on their way when the stage ends")
        if self.clock.arrived is not None:
            raise Divergence("the cluster's threads arrived at a barrier and did not wait")
        if self.clock.last_remote > self.clock.cluster:
            raise Race("a CTA's shared memory is accessed by another one, and no barrier keeps it from ending before")

    def _inline_ptx(self, code, *values, result_types=None, has_side_effects=False, convergent=False):
        out = emulated_ptx.run(self, code, values, len(result_types or ()), has_side_effects or not result_types, convergent)
        for x, kind in zip(out, result_types or (), strict=True):
            if isinstance(x, Value) and x.type is not kind:
                raise TypeError(f"{code!r} gives {x.type}, not {kind}")
        return out


def run_cluster(
    function: Callable,
    *,
    ctas: int,
    threads: int,
    arrays: Any,
    scratch_words: dict[str, int],
    scalars_of_cta: Callable[[int], dict[str, int | float]] = lambda cta: {},
) -> dict[str, np.ndarray]:
    """Run `function(arrays, scratch, **scalars)`, a stage as `lanes.stage` takes it, by all threads of the CTAs of one
    cluster.

    arrays: pytree of numpy arrays, global memory, changed in place. scratch_words: words of shared memory per CTA by
    name; poisoned first. Returns these, int32 `[ctas, words]`. Raises a `Fault`.
    """
    scalars = lambda cluster, cta: scalars_of_cta(cta)  # noqa: E731
    return run_clusters(function, clusters=1, ctas=ctas, threads=threads, arrays=arrays, scratch_words=scratch_words, scalars=scalars)[0]


def run_clusters(
    function, *, clusters: int, ctas: int, threads: int, arrays, scratch_words, scalars, contested: Sequence[str] = ()
) -> list[dict[str, np.ndarray]]:
    """The same for several clusters, one after another, as if at once. scalars: of a (cluster, CTA). contested: names
    of global arrays of which several threads may write one word: one of them wins."""
    if threads % 32 or sum(scratch_words.values()) > lanes.shared_words():
        raise ValueError(f"{threads} threads, {sum(scratch_words.values())} words of shared memory: none of a CTA")
    named, structure = jax.tree_util.tree_flatten_with_path(arrays)
    memories = [Memory.of_array(f"arrays{jax.tree_util.keystr(path)}", array) for path, array in named]
    unknown = set(contested) - {memory.name for memory in memories}
    if unknown:
        raise ValueError(f"no arrays {sorted(unknown)}; there are {[memory.name for memory in memories]}")
    for memory in memories:
        memory.contested = memory.name in contested
    found, tick = [], 0
    for cluster in range(clusters):
        machine = Machine(ctas, threads, cluster, tick)
        scratch = {name: Memory.shared(name, words, ctas) for name, words in scratch_words.items()}
        per_cta = [scalars(cluster, cta) for cta in range(ctas)]
        with mock.patch.multiple(lanes, **machine.bindings()), np.errstate(all="ignore"):
            given = {name: lanes.Scalar(_per_thread([of[name] for of in per_cta], threads)) for name in per_cta[0]}
            function(jax.tree.unflatten(structure, memories), dict(scratch), **given)
            machine.end()
        found.append({name: memory.per_cta() for name, memory in scratch.items()})
        tick = machine.clock.tick
    for memory, (_, array) in zip(memories, named, strict=True):
        if memory.writes.last[1].any() or memory.atomics:
            memory.copy_back(array)
    return found


def _amount(size: int) -> str:
    return f"{size // 4} words" if size >= 4 else f"{size} bytes"


def _per_thread(values: list, threads: int) -> Value:
    kind = F32 if isinstance(values[0], float) else I32
    return Value(np.repeat(np.array(values, kind.dtype), threads), kind)
