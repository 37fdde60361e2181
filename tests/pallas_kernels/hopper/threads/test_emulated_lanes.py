"""The emulator of GPU threads: its memory and control against plain expectations, and a stage of the project with
bugs planted. (Its faults: `test_emulated_faults.py`. Its arithmetic: `test_lanes.py`, by the same table as on a
GPU.)"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.union_blocks import union_blocks

THREADS = 64
I = np.arange(THREADS, dtype=np.int32)  # noqa: E741


def run(emulated, function, *, ctas: int = 1, threads: int = THREADS, out: int = 1, words: int = 256, **arrays) -> np.ndarray:
    """`function(arrays, shared)`, called with the emulator's references, returns values per thread; `[out, ctas,
    threads]` of them."""
    given = {"out": np.full((out, ctas * threads), -7, np.int32), **arrays}

    def stage(arrays, scratch, cta):
        values = function(arrays, scratch["shared"], cta)
        for n, value in enumerate(values or []):
            value = lanes.bits(value) if value.is_float else value
            lanes.store_global(arrays["out"], lanes.thread() + cta * threads + n * (ctas * threads), value)

    sizes = {"ctas": ctas, "threads": threads, "scratch_words": {"shared": words}}
    emulated.run_cluster(stage, arrays=given, scalars_of_cta=lambda cta: {"cta": cta}, **sizes)
    return given["out"].reshape(out, ctas, threads)


def test_global_memory(emulated):
    """Loads and stores of every width, by offset, by block, chosen among two arrays, and if a condition holds."""
    x, y = (np.random.default_rng(n).integers(-1000, 1000, (8, 64)).astype(np.int32) for n in range(2))
    sums, wide = np.zeros((8, 64), np.int32), np.full((4, 64), 5, np.int32)

    def stage(a, _, cta):
        i = lanes.thread()
        first, last = lanes.load_global(a["x"], i), lanes.load_global_now(a["x"], i + 448)
        quad = lanes.load_global_16_bytes(a["x"], (i & 15) * 16, block=i >> 4, block_bytes=512)
        lanes.store_global(a["sums"], i * 4, *[q + first for q in quad])
        lanes.store_global_if(i % 3 == 0, a["wide"], i * 4 - 1000 * (i % 3), last, block=i & 3, block_bytes=256)
        lanes.warp_barrier()
        again = lanes.load_written_16_bytes(a["sums"], lanes.i32(0), block=i, block_bytes=16)[1]
        some = lanes.load_written(lanes.either(i < 10, a["x"], a["y"]), i * 4, "f32", block=lanes.i32(2), block_bytes=256)
        few = lanes.load_written(a["x"], i * 4 - 100, "i32", block=lanes.i32(0), block_bytes=256, only=i >= 25)
        return [again, some, lanes.where(i >= 25, few, -3)]

    out = run(emulated, stage, out=3, x=x, y=y, sums=sums, wide=wide)[:, 0]
    quads = x.reshape(4, 2, 16, 4)[:, 0].reshape(64, 4)
    np.testing.assert_array_equal(sums.reshape(-1)[:256].reshape(64, 4), quads + x[0][:, None])
    np.testing.assert_array_equal(out[0], quads[:, 1] + x[0])
    np.testing.assert_array_equal(out[1], np.where(I < 10, x[2], y[2]))
    np.testing.assert_array_equal(out[2], np.where(I < 25, -3, x[0, I - 25]))
    expected = np.full((4, 64), 5, np.int32)
    third = I[I % 3 == 0]
    expected[third & 3, third] = x[7, third]
    np.testing.assert_array_equal(wide, expected)


def test_arrays_of_two_bytes_are_words(emulated):
    """Little endian; the last half word of an odd array cannot be reached by a word."""
    x = np.arange(129, dtype=np.int16)
    out = run(emulated, lambda a, s, c: [lanes.load_global(a["x"], lanes.thread())], x=x)[0, 0]
    np.testing.assert_array_equal(out, (2 * I) | (2 * I + 1) << 16)
    with pytest.raises(emulated.OutOfBounds, match="thread 63 of CTA 0 goes to 1 words at byte 256"):
        run(emulated, lambda a, s, c: [lanes.load_global(a["x"], lanes.thread() + 1)], x=x)


def test_parts_of_arrays_and_loads_ahead(emulated):
    x = np.random.default_rng(2).integers(-(2**31), 2**31, (8, 64)).astype(np.int32)

    def stage(a, _, cta):
        part = lanes.part(a["x"], (lanes.thread() & 15) * 16, lanes.i32(3), 256)
        return [*lanes.load_ahead(part, 256, 16), *lanes.load_ahead(part, 6, 2)]

    out = run(emulated, stage, out=5, x=x)[:, 0]
    np.testing.assert_array_equal(out[:4].T, x[4].reshape(16, 4)[I & 15])
    np.testing.assert_array_equal(out[4], x[3].view(np.uint16).reshape(16, 8)[I & 15, 3])


def test_shared_memory_and_the_cluster(emulated):
    """Each CTA has its own; `store_cluster` reaches another's; what is returned is what stood there at the end."""

    def stage(a, shared, cta):
        i = lanes.thread()
        lanes.store_shared(shared, i * 2, i, i * i)
        with lanes.when(i < 16):
            lanes.store_cluster((cta + 1) % 3, shared, i * 4 + 128, *[cta * 100 + i + n for n in range(4)])
        lanes.cluster_barrier()
        squares = lanes.load_shared(shared, ((i + 5) & 63) * 2, count=2)[1]
        floats = lanes.load_shared(shared, (i & 15) * 4 + 128, "f32", count=4)
        return [squares, floats[2]]

    out = run(emulated, stage, ctas=3, out=2)
    for cta in range(3):
        np.testing.assert_array_equal(out[0, cta], ((I + 5) % 64) ** 2)
        np.testing.assert_array_equal(out[1, cta], (cta - 1) % 3 * 100 + I % 16 + 2)
    found = emulated.run_cluster(
        lambda arrays, scratch: lanes.store_shared(scratch["a"], lanes.thread(), lanes.thread() * 3),
        **{"ctas": 2, "threads": 32, "arrays": (), "scratch_words": {"a": 32, "b": 4}},
    )
    np.testing.assert_array_equal(found["a"], np.tile(np.arange(32) * 3, (2, 1)))


def test_counting(emulated):
    def stage(a, shared, cta):
        i = lanes.thread()
        lanes.store_shared(shared, i, lanes.i32(10))
        lanes.cta_barrier(THREADS)
        lanes.count_shared(shared, (i & 7) - 99 * (i % 3), i % 3 == 0)
        lanes.count_shared(shared, lanes.i32(20), i < 50)
        lanes.cta_barrier(THREADS)
        return [lanes.load_shared(shared, i)[0]]

    expected = 10 + np.bincount(I[I % 3 == 0] & 7, minlength=64)
    expected[20] += 50
    np.testing.assert_array_equal(run(emulated, stage)[0, 0], expected)


def test_fetch_and_add_gives_every_number_once_but_not_in_order(emulated):
    def stage(a, shared, cta):
        with lanes.when(lanes.thread() == 0):
            lanes.store_shared(shared, 0, lanes.i32(5))
        lanes.cta_barrier(THREADS)
        return [
            lanes.Scalar(lanes.mgpu_utils.inline_ptx(*args, result_types=[lanes._i32()], has_side_effects=True)[0])
            for args in [("atom.shared.add.u32 $0, [$1], $2;", lanes._pointer(shared), lanes.i32(2).value)]
        ]

    found = run(emulated, stage)[0, 0]
    np.testing.assert_array_equal(np.sort(found), 5 + 2 * I)
    assert (found != np.sort(found)).any()


def test_control(emulated):
    """Every thread has bounds of its own, and what it did not run leaves no trace."""

    def stage(a, shared, cta):
        i = lanes.thread()
        lanes.store_shared(shared, i, lanes.i32(0))

        def inner(n, total, seen):
            with lanes.when((n & 1) == 0):
                lanes.store_shared(shared, i, lanes.load_shared(shared, i)[0] + n)
            turns = lanes.while_loop(lambda m, _: m < n, lambda m, t: [m + 2, t + 1], [lanes.i32(0), lanes.i32(0)])[1]
            return [total + turns, seen + 1]

        total, seen = lanes.loop(i % 10, [lanes.i32(0), lanes.i32(0)], inner, start=i % 3, step=2)
        fixed = lanes.loop(4, [lanes.f32(0.0)], lambda n, x: [x + lanes.number(n)])[0]
        return [total, seen, lanes.load_shared(shared, i)[0], fixed]

    out = run(emulated, stage, out=4)[:, 0]
    turns = [list(range(i % 3, i % 10, 2)) for i in range(THREADS)]
    np.testing.assert_array_equal(out[0], [sum(-(-n // 2) for n in ns) for ns in turns])
    np.testing.assert_array_equal(out[1], [len(ns) for ns in turns])
    np.testing.assert_array_equal(out[2], [sum(n for n in ns if n % 2 == 0) for ns in turns])
    np.testing.assert_array_equal(out[3].view(np.float32), 6)


def test_copies_arrive_when_they_are_waited_for(emulated):
    """By groups; zeros where there is nothing; by the pipeline of `lane_copies` too."""
    x = np.random.default_rng(0).integers(0, 1000, (2, 64, 4)).astype(np.int32)

    def stage(a, shared, cta):
        i = lanes.thread()
        for n in range(2):
            lane_copies.copy_async_16_bytes(shared, i * 4 + 256 * n, a["x"], i * 16, block=lanes.i32(n), block_bytes=1024, there=i != 7)
            lane_copies.commit_copies()
        lane_copies.wait_for_copies(1)
        first = lanes.load_shared(shared, (i ^ 1) * 4, count=4)[3]
        lane_copies.wait_for_copies(0)
        return [first, lanes.load_shared(shared, (i ^ 1) * 4 + 256)[0]]

    out = run(emulated, stage, out=2, words=512, x=x)[:, 0]
    there = (I ^ 1) != 7
    np.testing.assert_array_equal(out[0], np.where(there, x[0, I ^ 1, 3], 0))
    np.testing.assert_array_equal(out[1], np.where(there, x[1, I ^ 1, 0], 0))


def test_constants(emulated):
    """As the bindings take them: integers wrap, a zero keeps its sign."""

    def stage(a, shared, cta):
        return [lanes.thread() * 0 + n for n in (2**31, -(2**31) - 1, 2**32 - 1)] + [
            lanes.where(lanes.thread() >= 0, lanes.f32(x), 1.0) for x in (0.0, -0.0)
        ]

    out = run(emulated, stage, out=5)[:, 0, 0]
    assert out.tolist() == [-(2**31), 2**31 - 1, -1, 0, -(2**31)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_pipeline_sums_rows(emulated, depth):
    x = np.random.default_rng(0).integers(0, 1000, (5, 2, 128)).astype(np.int32)

    def stage(a, shared, cta):
        i, warp = lanes.lane(), lanes.warp()

        def slot(n):
            return (warp * depth + n % depth) * 128

        def fetch(n, place):
            block = n * 2 + warp
            lane_copies.copy_async_16_bytes(shared, slot(n) + i * 4, a["x"], i * 16, block=block, block_bytes=512, there=place[0] >= 0)

        def consume(n, place, total):
            words = lanes.load_shared(shared, slot(n) + (i ^ 31) * 4, count=4)
            total = functools.reduce(lambda a, b: a + b, words, total)
            lanes.warp_barrier()
            return [total]

        return lane_copies.pipeline(lanes.i32(5), depth, lambda n: [n], fetch, consume, [lanes.i32(0)])

    out = run(emulated, stage, words=2 * 3 * 128, x=x)[0, 0].reshape(2, 32)
    np.testing.assert_array_equal(out, x.reshape(5, 2, 32, 4).sum((0, 3))[:, ::-1])


def test_clusters_share_global_memory_alone(emulated):
    x, sums = np.arange(6, dtype=np.int32), np.zeros(6, np.int32)

    def stage(arrays, scratch, cluster, cta, scale):
        x, sums = arrays
        with lanes.when(lanes.thread() == 0):
            n = cluster * 2 + cta
            value = lanes.number(lanes.load_global(x, n)) * scale
            lanes.store_global(sums, n, lanes.ptx("cvt.rzi.s32.f32 $0, $1;", value, result="i32"))

    scalars = lambda cluster, cta: {"cluster": cluster, "cta": cta, "scale": 10.0}  # noqa: E731
    found = emulated.run_clusters(stage, clusters=3, ctas=2, threads=32, arrays=(x, sums), scratch_words={"a": 4}, scalars=scalars)
    np.testing.assert_array_equal(sums, 10 * x)
    assert [each["a"].shape for each in found] == [(2, 4)] * 3


# A stage of the project.


def choose_best(emulated, keys: np.ndarray, k: int, threads: int) -> list[int]:
    """The places that `choose.best` keeps, in the order of their slots."""
    out = np.full(k + 1, -7, np.int32)
    most = len(keys) + 5

    def stage(arrays, scratch):
        keys, out = arrays
        for start in range(0, len_keys, threads):
            i = lanes.thread() + start
            with lanes.when(i < len_keys):
                lanes.store_shared(scratch["keys"], i, lanes.load_global(keys, i))
        lanes.cta_barrier(threads)
        sizes = {"count": lanes.i32(len_keys), "most": most, "stride": 1}
        total, _ = choose.best(k, threads, scratch["keys"], scratch["counts"], keep=keep(out), **sizes)
        with lanes.when(lanes.thread() == 0):
            lanes.store_global(out, k, total)

    def keep(out):
        return lambda place, key, slot: lanes.store_global(out, slot, place)

    len_keys = len(keys)
    scratch = {"keys": most, "counts": choose.SCRATCH_WORDS}
    emulated.run_cluster(stage, ctas=1, threads=threads, arrays=(keys, out), scratch_words=scratch)
    return out[: out[k]].tolist()


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "spread": rng.integers(-(2**31) + 1, 2**31, 1500),
        "ties": rng.integers(-3, 4, 1500),
        "equal": np.full(700, 11),
        "few": rng.integers(-9, 9, 40),
        "some are no candidates": np.where(rng.random(900) < 0.9, choose.NO_KEY, rng.integers(-50, 50, 900)),
    }


ROWS = {name: row.astype(np.int32) for name, row in rows().items()}


def check(emulated, row: str, k: int, threads: int = 128) -> None:
    candidates = np.flatnonzero(ROWS[row] != choose.NO_KEY)
    best = candidates[np.argsort(-ROWS[row][candidates].astype(np.int64), kind="stable")[:k]]
    assert choose_best(emulated, ROWS[row], k, threads) == sorted(best.tolist())


@pytest.mark.parametrize("k", [1, 32, 300])
@pytest.mark.parametrize("row", ROWS)
def test_choosing_by_counting(emulated, row, k):
    check(emulated, row, k)
    check(emulated, row, k, threads=256)


def _without_barrier(n: int):
    def plant(monkeypatch):
        calls, barrier = [], lanes.cta_barrier

        def leave_out(threads):
            calls.append(0)
            if len(calls) != n + 2:  # the first is the test's own
                barrier(threads)

        monkeypatch.setattr(lanes, "cta_barrier", leave_out)

    return plant


def _replaced(name: str, function):
    return lambda monkeypatch: monkeypatch.setattr(choose, name, function)


def _first_counters(threads, counts_s, turn, clear=choose._clear):
    clear(threads, counts_s, turn * 0)


def _turned(threads, counts_s, n, words=choose._words_of_warps):
    return words(threads, counts_s, n)[::-1]


PLANTED = {f"barrier {n} is left out": _without_barrier(n) for n in range(4)} | {
    "counters are not cleared": _replaced("_clear", lambda *args: None),
    "counters of another turn": _replaced("_clear", _first_counters),
    "counts of the warps in reverse": _replaced("_words_of_warps", _turned),
    "fewer counters": _replaced("SCRATCH_WORDS", choose.SCRATCH_WORDS - 60),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(emulated, tools, monkeypatch, name):
    PLANTED[name](monkeypatch)
    tools.must_fail(lambda _, row: check(emulated, row, 32), None, ROWS)


@pytest.mark.parametrize("rank", ["sum", "mean"])
def test_a_whole_kernel(emulated_kernels, rank):
    """The launch of union_blocks: its grid, its shared memory, its results."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(40)[:6] for _ in range(2 * 7 * 2)]).reshape(2, 7, 2, 6).astype(np.int32)
    arguments = jnp.asarray(np.where(ids < 35, ids, -1)), jnp.asarray(rng.integers(-3, 4, ids.shape), jnp.float32)
    sizes = {"rows": 4, "k_trim": 5, "rank": rank, "num_blocks": 40}
    with emulated_kernels.kernels():
        found = paging.implementation("union_blocks", "mosaic_gpu")(*arguments, **sizes)
    np.testing.assert_array_equal(found, union_blocks(*arguments, **sizes, implementation="reference"))


def _write_one_word(emulated, contested=(), barrier=True):
    """128 threads write their numbers to one word, each warp in its own instruction; then all read it."""
    out, seen = np.full(1, -1, np.int32), np.full(128, -1, np.int32)

    def stage(arrays, scratch):
        for warp in range(4):
            with lanes.when(lanes.warp() == warp):
                lanes.store_global(arrays[0], 0, lanes.thread())
        if barrier:
            lanes.cta_barrier(128)
        lanes.store_global(arrays[1], lanes.thread(), lanes.load_written(arrays[0], 0, "i32", block=lanes.i32(0), block_bytes=4))

    sizes = {"clusters": 1, "ctas": 1, "threads": 128, "scratch_words": {}, "scalars": lambda *_: {}}
    emulated.run_clusters(stage, arrays=(out, seen), contested=contested, **sizes)
    return out, seen


def test_one_of_several_writers_wins_where_that_is_allowed(emulated):
    out, seen = _write_one_word(emulated, contested=["arrays[0]"])
    assert 96 <= out[0] < 128
    assert (seen == out[0]).all()
    assert out[0] != 127, "the last thread wins: a kernel could rely on that"
    with pytest.raises(emulated.Race, match=r"writes word 0 of arrays\[0\], which|different words to one place of arrays\[0\]"):
        _write_one_word(emulated)
    with pytest.raises(emulated.Race, match=r"reads word 0 of arrays\[0\], which .* wrote; no barrier between"):
        _write_one_word(emulated, contested=["arrays[0]"], barrier=False)
    with pytest.raises(ValueError, match=r"no arrays \['arrays\[7\]'\]; there are \['arrays\[0\]', 'arrays\[1\]'\]"):
        _write_one_word(emulated, contested=["arrays[7]"])


def test_a_cluster_over_a_long_row_takes_seconds(emulated):
    """8 CTAs of 512 threads find the maximum of 32,768 scores through each other's shared memory."""
    x = np.random.default_rng(0).integers(-(2**30), 2**30, 32768).astype(np.int32)
    out = np.zeros(1, np.int32)

    def stage(arrays, scratch, cta):
        x, out = arrays
        s = scratch["s"]

        def scan(n, best):
            for word in lanes.load_global_16_bytes(x, (n * 4096 + cta * 512 + lanes.thread()) * 16):
                best = lanes.maximum(best, word)
            return [best]

        best = lanes.warp_reduce(lanes.loop(2, [lanes.i32(-(2**31))], scan)[0], "max")
        with lanes.when(lanes.lane() < 8):
            lanes.store_cluster(lanes.lane(), s, cta * 16 + lanes.warp(), best)
        lanes.cluster_barrier()
        best = lanes.warp_reduce(lanes.maximum(*(lanes.load_shared(s, lanes.lane() * 4 + n)[0] for n in range(2))), "max")
        words = [w for n in range(0, 128, 4) for w in lanes.load_shared(s, n, count=4)]
        best = functools.reduce(lanes.maximum, words, best)
        with lanes.when((lanes.thread() == 0) & (cta == 0)):
            lanes.store_global(out, 0, best)

    emulated.run_cluster(stage, ctas=8, threads=512, arrays=(x, out), scratch_words={"s": 128}, scalars_of_cta=lambda cta: {"cta": cta})
    assert out[0] == x.max()


def test_pytrees_of_arrays(emulated):
    arrays = {"in": (np.arange(32, dtype=np.float32), [np.ones(32, np.float32)]), "out": np.zeros(32, np.float32)}

    def stage(arrays, scratch):
        (a, [b]), out = arrays["in"], arrays["out"]
        i = lanes.thread()
        lanes.store_global(out, i, lanes.load_global(a, i, "f32") + lanes.load_global(b, i, "f32"))

    emulated.run_cluster(stage, ctas=1, threads=32, arrays=arrays, scratch_words={})
    np.testing.assert_array_equal(arrays["out"], np.arange(32) + 1)
    assert jax.tree.structure(arrays).num_leaves == 3
