"""Every fault that the emulator of GPU threads knows, by a stage that commits it."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.hopper.threads import lane_copies, lanes

THREADS = 64


def run(emulated, function) -> None:
    """`function(arrays, shared, cta)` by two CTAs of 64 threads with 256 words each; global memory: x, 64 words, and
    out, which what the function returns is stored to."""
    arrays = {"x": np.zeros(64, np.int32), "out": np.zeros(128, np.int32)}

    def stage(arrays, scratch, cta):
        for value in function(arrays, scratch["shared"], cta) or []:
            lanes.store_global(arrays["out"], lanes.thread() + cta * THREADS, value)

    sizes = {"ctas": 2, "threads": THREADS, "scratch_words": {"shared": 256}}
    emulated.run_cluster(stage, arrays=arrays, scalars_of_cta=lambda cta: {"cta": cta}, **sizes)


def _store(shared, offset, value=None):
    lanes.store_shared(shared, offset, lanes.thread() if value is None else value)


def _all(shared):
    """Everybody writes a word and waits."""
    _store(shared, lanes.thread())
    lanes.cta_barrier(THREADS)


def _decide_by_poison(a, shared, cta):
    with lanes.when(lanes.load_shared(shared, lanes.thread())[0] > 0):
        pass


def _not_asked_for(a, shared, cta):
    return [lanes.load_written(a["x"], lanes.thread() * 4, "i32", block=lanes.i32(0), block_bytes=256, only=lanes.thread() > 3)]


def _loop_by_poison(a, shared, cta):
    lanes.loop(lanes.load_shared(shared, 0)[0], [], lambda n: [])


def _go_by_poison(a, shared, cta):
    lanes.load_global(a["x"], lanes.load_shared(shared, lanes.thread())[0])


def _poison_through(function):
    def stage(a, shared, cta):
        return [function(lanes.load_shared(shared, lanes.thread())[0])]

    return stage


def _from_a_neighbour(x):
    return lanes.shuffle_xor(lanes.where(lanes.lane() == 9, x, 0), 1)


def _poison_copied(a, shared, cta):
    """To another word, and read from there."""
    _store(shared, lanes.thread() + 64, lanes.load_shared(shared, lanes.thread())[0])
    lanes.cta_barrier(THREADS)
    return [lanes.load_shared(shared, lanes.thread() + 64)[0]]


def _read_after_write(a, shared, cta):
    _store(shared, lanes.thread())
    lanes.warp_barrier()
    lanes.ballot(lanes.thread() > 3)
    return [lanes.load_shared(shared, lanes.thread() ^ 32)[0]]


def _write_after_read(a, shared, cta):
    _all(shared)
    read = lanes.load_shared(shared, lanes.thread() ^ 32)[0]
    _store(shared, lanes.thread())
    return [read]


def _write_after_many_reads(a, shared, cta):
    """The writer itself is the last of those who read."""
    _all(shared)
    lanes.load_shared(shared, 5)
    with lanes.when(lanes.thread() == 5):
        lanes.load_shared(shared, 5)
        _store(shared, 5)


def _write_after_write(a, shared, cta):
    with lanes.when(lanes.warp() == 0):
        _store(shared, lanes.lane())
    with lanes.when(lanes.warp() == 1):
        _store(shared, lanes.lane())


def _write_at_once(a, shared, cta):
    _store(shared, lanes.thread() & 31)


def _lanes_without_a_barrier(a, shared, cta):
    _store(shared, lanes.thread())
    return [lanes.load_shared(shared, lanes.thread() ^ 1)[0]]


def _count_before_all_cleared(a, shared, cta):
    _store(shared, lanes.thread(), lanes.i32(0))
    lanes.count_shared(shared, lanes.thread() ^ 32, lanes.thread() >= 0)


def _read_before_all_counted(a, shared, cta):
    _all(shared)
    lanes.count_shared(shared, lanes.i32(0), lanes.thread() < 50)
    return [lanes.load_shared(shared, lanes.thread())[0]]


def _remote_without_a_cluster_barrier(a, shared, cta):
    lanes.store_cluster((cta + 1) % 2, shared, lanes.thread(), lanes.thread())
    lanes.cta_barrier(THREADS)
    return [lanes.load_shared(shared, lanes.thread())[0]]


def _remote_over_what_is_read(a, shared, cta):
    _all(shared)
    lanes.load_shared(shared, lanes.thread())
    lanes.cta_barrier(THREADS)
    lanes.store_cluster((cta + 1) % 2, shared, lanes.thread(), lanes.thread())
    lanes.cluster_barrier()


def _arrive() -> None:
    lanes.ptx("barrier.cluster.arrive.release.aligned;", convergent=True)


def _wait() -> None:
    lanes.ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)


def _write_after_arrival(a, shared, cta):
    _arrive()
    lanes.store_cluster((cta + 1) % 2, shared, lanes.thread(), lanes.thread())
    _wait()
    return [lanes.load_shared(shared, lanes.thread())[0]]


def _end_before_a_remote_store(a, shared, cta):
    lanes.cluster_barrier()
    lanes.store_cluster(0, shared, lanes.thread() + cta * THREADS, lanes.thread())


def _of_some(function, who):
    def stage(a, shared, cta):
        with lanes.when(who(cta)):
            function()

    return stage


def _not_all_lanes(cta):
    return lanes.lane() > 3


def _in_a_loop_of_different_length(a, shared, cta):
    lanes.loop(lanes.thread() & 3, [], lambda n: lanes.cta_barrier(THREADS) or [])


def _copy(a, shared, offset=0):
    i = lanes.thread()
    lane_copies.copy_async_16_bytes(shared, i * 4 + offset, a["x"], (i & 15) * 16, block=lanes.i32(0), block_bytes=256, there=i >= 0)


def _copy_from_outside(a, shared, cta):
    i = lanes.thread()
    lane_copies.copy_async_16_bytes(shared, i * 4, a["x"], i * 16, block=lanes.i32(0), block_bytes=256, there=i >= 0)


def _read_before_arrival(a, shared, cta):
    _copy(a, shared)
    lane_copies.commit_copies()
    return [lanes.load_shared(shared, lanes.thread() * 4)[0]]


def _wait_for_what_was_not_committed(a, shared, cta):
    _copy(a, shared)
    lane_copies.wait_for_copies(0)
    return [lanes.load_shared(shared, lanes.thread() * 4)[0]]


def _wait_for_too_few(a, shared, cta):
    _copy(a, shared)
    lane_copies.commit_copies()
    lane_copies.commit_copies()
    lane_copies.wait_for_copies(2)
    return [lanes.load_shared(shared, lanes.thread() * 4)[0]]


def _read_what_another_warp_copied(a, shared, cta):
    _copy(a, shared)
    lane_copies.commit_copies()
    lane_copies.wait_for_copies(0)
    return [lanes.load_shared(shared, (lanes.thread() ^ 32) * 4)[0]]


def _copy_over_what_is_read(a, shared, cta):
    _all(shared)
    lanes.load_shared(shared, lanes.thread() ^ 63)
    _copy(a, shared)


def _never_wait(a, shared, cta):
    _copy(a, shared)
    lane_copies.commit_copies()


def _constants_written(a, shared, cta):
    lanes.load_global(a["x"], lanes.thread())
    lanes.cta_barrier(THREADS)
    lanes.store_global(a["x"], lanes.thread(), lanes.thread())


def _global_across_ctas(a, shared, cta):
    lanes.store_global(a["x"], lanes.thread() & 31, cta)


def _moved_load(a, shared, cta):
    _all(shared)
    return [lanes.ptx("ld.shared.u32 $0, [$1];", lanes._pointer(shared), result="i32")]


def _one(function):
    return lambda a, shared, cta: [function(lanes.thread())]


def _send(a, shared, *, size=64, make=True, thread=0):
    """A thread starts a bulk copy to word 64, which the first arrival awaits; arrivals stand at the start of shared
    memory."""
    if make:
        lane_copies.make_arrivals(shared, 2, THREADS)
    zero = lanes.i32(0)
    with lanes.when(lanes.thread() == thread):
        lane_copies.copy_bulk(shared, lanes.i32(64), a["x"], zero, lanes.i32(size), shared, zero, block=zero, block_bytes=256)


def _make_twice(a, shared, cta):
    for _ in range(2):
        lane_copies.make_arrivals(shared, 2, THREADS)


def _forget_too_early(a, shared, cta):
    _send(a, shared)
    lanes.cta_barrier(THREADS)
    lane_copies.forget_arrivals(shared, 2, THREADS)


def _forget_what_another_warp_awaits(a, shared, cta):
    _send(a, shared)
    lane_copies.wait_for_arrival(shared, lanes.i32(0), lanes.i32(0))
    lane_copies.forget_arrivals(shared, 2, THREADS)


def _send_twice(a, shared, cta):
    _send(a, shared)
    _send(a, shared, make=False)


def _read_before_a_bulk_copy_came(a, shared, cta):
    _send(a, shared)
    return [lanes.load_shared(shared, lanes.lane() + 64)[0]]


def _wait_for_nothing(a, shared, cta):
    lane_copies.make_arrivals(shared, 2, THREADS)
    lane_copies.wait_for_arrival(shared, lanes.i32(0), lanes.i32(0))


def _send_over_what_is_read(a, shared, cta):
    lane_copies.make_arrivals(shared, 2, THREADS)
    _store(shared, lanes.thread() + 64)
    lanes.cta_barrier(THREADS)
    word = lanes.load_shared(shared, lanes.thread() + 64)[0]
    _send(a, shared, make=False, thread=40)
    lane_copies.wait_for_arrival(shared, lanes.i32(0), lanes.i32(0))
    return [word]


FAULTS = {
    "a word behind the end": ("OutOfBounds", lambda a, s, c: _store(s, lanes.thread() + 193), "thread 63 of CTA 0 .* byte 1024 of shared"),
    "a word before the start": ("OutOfBounds", lambda a, s, c: _store(s, lanes.thread() - 1), "thread 0 .* byte -4"),
    "four words across the end": ("OutOfBounds", lambda a, s, c: _store(s, lanes.thread() * 4 + 4), "byte 1024"),
    "outside of a global array": ("OutOfBounds", lambda a, s, c: lanes.load_global(a["x"], lanes.thread() + 1), "byte 256 of arrays.'x'."),
    "a copy from outside": ("OutOfBounds", _copy_from_outside, "4 words at byte 256 of arrays.'x'."),
    "two words at an odd place": ("Misaligned", lambda a, s, c: lanes.load_shared(s, lanes.thread() + 1, count=2), "2 words at byte 4"),
    "four words at an even place": ("Misaligned", lambda a, s, c: lanes.load_shared(s, lanes.thread() * 2, count=4), "4 words at byte 8"),
    "a word that was not asked for": ("Unwritten", _not_asked_for, "stores to"),
    "deciding by poison": ("Unwritten", _decide_by_poison, "decides"),
    "counting by poison": ("Unwritten", _loop_by_poison, "counts"),
    "going by poison": ("Unwritten", _go_by_poison, "says that nobody wrote"),
    "poison stored": ("Unwritten", _poison_through(lambda x: x + 1), "stores to"),
    "poison converted": ("Unwritten", _poison_through(lambda x: lanes.bits(lanes.bits(x))), "stores to"),
    "poison in a ballot": ("Unwritten", _poison_through(lambda x: lanes.ballot(x > 0)), "a ballot"),
    "poison in a reduction": ("Unwritten", _poison_through(lambda x: lanes.warp_reduce(x, "max")), "a reduction"),
    "poison from another lane": ("Unwritten", _poison_through(_from_a_neighbour), "thread 8 of CTA 0 stores"),
    "poison copied": ("Unwritten", _poison_copied, "stores to"),
    "counting on poison": ("Unwritten", lambda a, s, c: lanes.count_shared(s, lanes.thread(), lanes.thread() > 3), "adds to a word"),
    "read after write": ("Race", _read_after_write, "thread 0 of CTA 0 reads word 32 of shared, which thread 32 of CTA 0 wrote"),
    "write after read": ("Race", _write_after_read, "writes word 0 of shared, which thread 32 of CTA 0 read"),
    "write after many reads": ("Race", _write_after_many_reads, "thread 5 of CTA 0 writes word 5"),
    "write after write": ("Race", _write_after_write, "thread 32 of CTA 0 writes word 0 of shared, which thread 0 of CTA 0 wrote"),
    "writes at once": ("Race", _write_at_once, "at once"),
    "lanes without a barrier": ("Race", _lanes_without_a_barrier, "thread 0 of CTA 0 reads word 1 of shared, which thread 1"),
    "counting before all is cleared": ("Race", _count_before_all_cleared, "adds to word"),
    "reading before all is counted": ("Race", _read_before_all_counted, "added to"),
    "a remote store without a cluster barrier": ("Race", _remote_without_a_cluster_barrier, "which thread 0 of CTA 1 wrote"),
    "a remote store over what is read": ("Race", _remote_over_what_is_read, "which thread 0 of CTA 1 read"),
    "a store after arriving": ("Race", _write_after_arrival, "reads word 0"),
    "a CTA that may have ended": ("Race", _end_before_a_remote_store, "ending"),
    "constants that are written": ("Race", _constants_written, "loaded as constant"),
    "two CTAs at one global word": ("Race", _global_across_ctas, "arrays.'x'."),
    "some threads at a CTA's barrier": ("Divergence", _of_some(lambda: lanes.cta_barrier(THREADS), lambda cta: lanes.thread() < 32), "32"),
    "a barrier of fewer threads": ("Divergence", lambda a, s, c: lanes.cta_barrier(32), "a barrier of 32 threads in a CTA of 64"),
    "a barrier in a loop of different length": ("Divergence", _in_a_loop_of_different_length, "some threads of a CTA"),
    "some lanes at a warp's barrier": ("Divergence", _of_some(lanes.warp_barrier, lambda cta: lanes.thread() != 40), "barrier"),
    "some lanes in a ballot": ("Divergence", _of_some(lambda: lanes.ballot(lanes.thread() > 3), _not_all_lanes), "a ballot"),
    "some lanes in a shuffle": ("Divergence", _of_some(lambda: lanes.shuffle(lanes.thread(), 3), _not_all_lanes), "a shuffle"),
    "some lanes in a reduction": ("Divergence", _of_some(lambda: lanes.warp_reduce(lanes.thread(), "add"), _not_all_lanes), "a reduction"),
    "one CTA at the cluster's barrier": ("Divergence", _of_some(lanes.cluster_barrier, lambda cta: cta == 0), "of the cluster"),
    "waiting without arriving": ("Divergence", lambda a, s, c: _wait(), "not all have arrived"),
    "arriving without waiting": ("Divergence", lambda a, s, c: _arrive(), "did not wait"),
    "a barrier the compiler may move": ("Divergence", lambda a, s, c: lanes.ptx("bar.warp.sync 0xffffffff;"), "compiler is not told"),
    "a load the compiler may move": ("Fault", _moved_load, "has_side_effects"),
    "reading before arrival": ("NotArrived", _read_before_arrival, "on its way"),
    "waiting for what was not committed": ("NotArrived", _wait_for_what_was_not_committed, "on its way"),
    "waiting for too few": ("NotArrived", _wait_for_too_few, "on its way"),
    "copying over what is read": ("Race", _copy_over_what_is_read, "copies to word"),
    "what another warp copied": ("Race", _read_what_another_warp_copied, "which thread 32 of CTA 0 wrote"),
    "never waiting": ("NotArrived", _never_wait, "when the stage ends"),
    "an arrival that nobody made": ("Undefined", lambda a, s, c: _send(a, s, make=False), "nobody made"),
    "an arrival made twice": ("Undefined", _make_twice, "makes an arrival that is there"),
    "an arrival forgotten too early": ("NotArrived", _forget_too_early, "forgets an arrival that is awaited"),
    "an arrival that another warp awaits": ("Race", _forget_what_another_warp_awaits, "no barrier between"),
    "two copies for one arrival": ("Undefined", _send_twice, "arrives where a copy is awaited"),
    "24 bytes": ("Undefined", lambda a, s, c: _send(a, s, size=24), "no positive multiple of 16 bytes"),
    "reading before a bulk copy came": ("NotArrived", _read_before_a_bulk_copy_came, "on its way"),
    "a bulk copy at the end": ("NotArrived", lambda a, s, c: _send(a, s), "when the stage ends"),
    "waiting for nothing": ("NotArrived", _wait_for_nothing, "waits for ever"),
    "a bulk copy over what is read": ("Race", _send_over_what_is_read, "copies to word"),
    "dividing by 0": ("Undefined", _one(lambda i: i // (i - 3)), "thread 3 of CTA 0 divides by 0"),
    "the remainder by 0": ("Undefined", _one(lambda i: i % (i - 3)), "divides by 0"),
    "shifting too far": ("Undefined", _one(lambda i: i << i), "thread 32 of CTA 0 shifts"),
    "unknown code": ("UnknownCode", lambda a, s, c: lanes.ptx("trap;"), "'trap;'"),
    "a CTA beyond the cluster": ("Fault", lambda a, s, c: lanes.store_cluster(c + 1, s, lanes.thread(), c), "beyond the 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(emulated, name):
    fault, stage, message = FAULTS[name]
    with pytest.raises(getattr(emulated, fault), match=message):
        run(emulated, stage)


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i + lanes.number(i),
        lambda i: lanes.where(i, i, 0),
        lambda i: lanes.loop(3, [i], lambda n, x: [lanes.number(x)])[0],
        lambda i: (i > 3) + 1.5 * i,
    ],
)
def test_types_are_checked(emulated, function):
    with pytest.raises(TypeError):
        run(emulated, _one(function))


def test_clusters_are_not_ordered(emulated):
    """One after another here, but not on a GPU."""
    sums = np.zeros(32, np.int32)
    stage = lambda arrays, scratch, n: lanes.store_global(arrays, lanes.thread(), lanes.thread())  # noqa: E731
    with pytest.raises(emulated.Race, match="thread 0 of CTA 0, cluster 0 wrote"):
        emulated.run_clusters(stage, clusters=2, ctas=1, threads=32, arrays=sums, scratch_words={}, scalars=lambda cluster, cta: {"n": 0})


def test_nothing_of_it_stays(emulated):
    before = dict(vars(lanes))
    for name in ("dividing by 0", "read after write"):
        with pytest.raises(emulated.Fault):
            run(emulated, FAULTS[name][1])
    assert dict(vars(lanes)) == before
