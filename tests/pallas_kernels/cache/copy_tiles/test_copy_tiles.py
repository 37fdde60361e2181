"""The suite of copy_tiles: every implementation against the reference, the reference against numpy, promises, mutants,
refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from far_pools import needs_memory
from paging import copy_tiles
from quick_cases import one_in

from pallas_kernels.cache.copy_tiles import mosaic_gpu
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lanes

pytestmark = pytest.mark.optimized
"""It looks at the memory of programs; and what is compiled quickly for a CPU changes the bits of some bfloat16
numbers."""

XLA = functools.partial(copy_tiles, implementation="xla")
"""The base of the mutants."""

IMPLEMENTATIONS = {
    name: functools.partial(copy_tiles, implementation=name) for name in dispatch.available("copy_tiles") if name != "reference"
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call. no_source, no_target: places (entry, head) with -1 there. value_dim: V is that much of K. twice:
    whether the last entry is the first one again."""

    entries: int = 3
    kv_heads: int = 2
    page_size: int = 16
    head_dim: int = 16
    v_head_dim: int | None = None
    value_dim: int | None = None
    dtype: str = "float32"
    no_source: tuple[tuple[int, int], ...] = ()
    no_target: tuple[tuple[int, int], ...] = ()
    twice: bool = False


CASES = {
    "two heads": Case(),
    "one head": Case(kv_heads=1),
    "eight heads, one entry": Case(entries=1, kv_heads=8),
    "skipped entries": Case(entries=4, kv_heads=3, no_source=((0, 1), (2, 0)), no_target=((0, 2), (2, 0), (3, 1))),
    "all skipped": Case(no_source=((0, 0), (1, 0), (2, 0), (0, 1)), no_target=((0, 0), (1, 1), (2, 1))),
    "bfloat16": Case(dtype="bfloat16"),
    "float16": Case(dtype="float16"),
    "V in K": Case(value_dim=12, kv_heads=1, no_source=((1, 0),)),
    "V of another width": Case(v_head_dim=24),
    "one page for two rows": Case(twice=True),
    "less than a warp": Case(page_size=4, head_dim=4),
    "a turn and part of a rest": Case(entries=2, page_size=68, head_dim=64, no_target=((0, 1),)),
    "a turn and two rests": Case(entries=2, page_size=74, head_dim=64, kv_heads=1),
    "two turns": Case(entries=2, page_size=128, head_dim=128, dtype="bfloat16"),
    "more turns than CTAs": Case(entries=1, kv_heads=1, page_size=320, head_dim=128, v_head_dim=264, dtype="bfloat16"),
    "two turns of keys, a rest of values": Case(entries=1, page_size=128, head_dim=128, v_head_dim=40, dtype="bfloat16"),
}
TURN_BYTES = mosaic_gpu.THREADS * mosaic_gpu.UNROLLED * 16


def test_cases_take_every_way_through_the_kernel():
    sizes = {case.page_size * case.head_dim * jnp.dtype(case.dtype).itemsize for case in CASES.values()}
    turns = {(size // TURN_BYTES, -(-(size % TURN_BYTES) // (mosaic_gpu.THREADS * 16))) for size in sizes}
    assert turns >= {(0, 1), (1, 1), (1, 2), (2, 0), (5, 0)}
    assert mosaic_gpu.SHARES < 5


@functools.cache
def arguments(name: str) -> tuple:
    """k, v, sources, targets. Every tile holds bits of its own, also those that are NaN; frames that nothing names are
    all NaN."""
    case, rng = CASES[name], np.random.default_rng(sum(map(ord, name)))
    num_frames = 2 * case.entries + 3
    frames = np.stack([rng.permutation(num_frames)[: 2 * case.entries] for _ in range(case.kv_heads)], 1).astype(np.int32)
    sources, targets = frames[: case.entries], frames[case.entries :]
    if case.twice:
        sources[-1], targets[-1] = sources[0], targets[0]
    for array, places in ((sources, case.no_source), (targets, case.no_target)):
        for place in places:
            array[place] = -1
    dtype = jnp.dtype(case.dtype)

    def pool(width: int):
        shape = (num_frames, case.kv_heads, case.page_size, width)
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        found = bits.reshape(-1).view(dtype).reshape(shape)
        found[sorted(set(range(num_frames)) - set(sources.flat) - set(targets.flat))] = np.nan
        return jnp.asarray(found)

    v = None if case.value_dim else pool(case.v_head_dim or case.head_dim)
    return pool(case.head_dim), v, jnp.asarray(sources), jnp.asarray(targets)


def static(name: str) -> dict:
    return {"value_dim": CASES[name].value_dim}


@functools.cache
def expected(name: str) -> tuple:
    return copy_tiles(*arguments(name), **static(name), implementation="reference")


def check(op, name: str) -> None:
    """All of both pools, bit for bit."""
    found = op(*arguments(name), **static(name))
    assert (found[1] is None) == (expected(name)[1] is None)
    for ours, ref in zip(found, expected(name), strict=True):
        if ref is not None:
            assert (ours.shape, ours.dtype) == (ref.shape, ref.dtype)
            assert np.asarray(ours).tobytes() == np.asarray(ref).tobytes(), "pools differ"


@pytest.mark.quick_but("xla-a turn and part of a rest")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("case", CASES)
def test_reference_against_numpy(tools, case):
    """The tiles of all entries at once, by the arrays' old contents."""
    *pools, sources, targets = (None if x is None else np.array(x) for x in arguments(case))
    entries, heads = np.nonzero((sources >= 0) & (targets >= 0))
    assert len(entries) or case == "all skipped"
    for old, found in zip(pools, expected(case), strict=True):
        if old is not None:
            new = old.copy()
            new[targets[entries, heads], heads] = old[sources[entries, heads], heads]
            tools.assert_same_bits(found, new)
            assert (new.tobytes() == old.tobytes()) == (case == "all skipped")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_arguments_stay_as_they_are(tools, name):
    """Without donation it is a function like any other, however the pool is updated."""
    before = [np.array(x) for x in arguments("two heads")]
    jax.block_until_ready(IMPLEMENTATIONS[name](*arguments("two heads")))
    tools.assert_all_same_bits(before, arguments("two heads"))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice(tools, name):
    tools.assert_all_same_bits(*(IMPLEMENTATIONS[name](*arguments("skipped entries")) for _ in range(2)))


@pytest.mark.parametrize("read", [False, True], ids=["alone", "read afterwards"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_donated_pool_is_not_copied(name, read):
    """A pool far larger than the tiles: the compiled program needs no memory of its size, nor does what reads the pool
    next."""
    pool, frames = jax.ShapeDtypeStruct((512, 2, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2), jnp.int32)

    def op(k, v, sources, targets):
        found = IMPLEMENTATIONS[name](k, v, sources, targets)
        return (*found, *(x[targets[0, 0]].astype(jnp.float32).sum() for x in found if read))

    memory = jax.jit(op, donate_argnums=(0, 1)).lower(pool, pool, frames, frames).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool.size * 2
    assert memory.temp_size_in_bytes < 2**20


@pytest.mark.gpu
def test_pool_past_2_to_the_31_elements(tools, hopper):
    """Between the first and the last frames of a pool of 2^31 + 2^16 elements, in place."""
    num_frames = 2**16 + 2
    needs_memory(2 * num_frames * 2 * 128 * 128 * 2)  # twice, while it is filled
    near = jax.random.normal(jax.random.key(0), (3, 2, 128, 128), jnp.bfloat16)
    named = jnp.array([0, num_frames - 2, 2**15], jnp.int32)
    fill = jax.jit(lambda pool, content: pool.at[named].set(content), donate_argnums=0)
    far = fill(jnp.full((num_frames, 2, 128, 128), jnp.nan, jnp.bfloat16), near)
    assert far.size > 2**31
    sources, targets = jnp.array([[0, num_frames - 2]], jnp.int32), jnp.array([[num_frames - 1, 1]], jnp.int32)
    for name in IMPLEMENTATIONS:
        op = jax.jit(functools.partial(copy_tiles, value_dim=128, implementation=name), donate_argnums=0)
        far, _ = op(far, None, sources, targets)
        read = functools.partial(jax.lax.dynamic_index_in_dim, far, keepdims=False)
        tools.assert_same_bits(read(num_frames - 1)[0], near[0, 0])
        tools.assert_same_bits(read(1)[1], near[1, 1])
        assert jnp.isnan(read(num_frames - 1)[1]).all()
        assert jnp.isnan(read(1)[0]).all()
        tools.assert_all_same_bits([read(n) for n in named], near)
        far = jax.jit(lambda pool: pool.at[jnp.array([num_frames - 1, 1])].set(jnp.nan), donate_argnums=0)(far)


# The GPU form, without a GPU: lowered, compiled, and whole on emulated threads.


def production(
    entries: int, kv_heads: int, head_dim: int = 128, page_size: int = 128, dtype: str = "bfloat16", own_v: bool = True
) -> tuple:
    """(op, arrays, keywords) of a call."""
    pool, frames = ((4096, kv_heads, page_size, head_dim), dtype), ((entries, kv_heads), "int32")
    arrays = {"k_pages": pool, "v_pages": pool if own_v else None, "sources": frames, "targets": frames}
    return "copy_tiles", arrays, {"value_dim": None if own_v else head_dim - 64}


PRODUCTION = {
    "28/4": production(37, 4),
    "32/8, batch 8": production(8 * 37, 8),
    "float32, head dim 64": production(37, 8, 64, dtype="float32"),
    "head dim 80": production(37, 32, 80, dtype="float16"),
    "latent pages": production(37, 1, 576, own_v=False),
    "small pages": production(300, 2, 64, 16),
}


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands every array of the pool back as its result."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == (1 if PRODUCTION[case][1]["v_pages"] is None else 2)


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


@pytest.fixture(scope="session")
def on_emulated_threads(emulated_kernels):
    kernel = paging.implementation("copy_tiles", "mosaic_gpu")

    def op(*arrays, **keywords):
        with emulated_kernels.kernels():
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case].twice])
def test_on_emulated_threads_it_matches_the_reference(on_emulated_threads, case):
    check(on_emulated_threads, case)


def test_on_emulated_threads_a_target_that_is_a_source_is_a_race(emulated, on_emulated_threads):
    """What the op forbids. CTAs run at once, so there is no order in which one tile moves out of another's way."""
    k, v, sources, targets = arguments("two heads")
    with pytest.raises(emulated.Race, match="no barrier between"):
        on_emulated_threads(k, v, sources.at[1, 0].set(targets[0, 0]), targets)


def _stored_where(wanted):
    """wanted: first byte, bytes of a tile -> whether these 16 bytes are stored."""

    def store(ref, place, *words, block, block_bytes):
        with lanes.when(wanted(place, block_bytes)):
            STORE(ref, place, *words, block=block, block_bytes=block_bytes)

    return store


def _all_but(share):
    def copy_share(s, head, source, target, number, pools):
        with lanes.when(number != share):
            SHARE(s, head, source, target, number, pools)

    return copy_share


def _the_first_array_only(s, unit, sources, targets, pools):
    COPY(dataclasses.replace(s, tile_bytes=s.tile_bytes[:1]), unit, sources, targets, pools[:1])


STORE, COPY, SHARE = lanes.store_global_16_bytes, mosaic_gpu.copy_tile, mosaic_gpu.copy_share
INSIDE = {
    "the last 16 bytes are missing": (lanes, "store_global_16_bytes", _stored_where(lambda place, size: place < size - 16)),
    "all but the first turn is missing": (lanes, "store_global_16_bytes", _stored_where(lambda place, _: place < TURN_BYTES)),
    "a step has too many pieces": (mosaic_gpu, "THREADS", 144),
    "V is not copied": (mosaic_gpu, "copy_tile", _the_first_array_only),
    **{f"share {number} is missing": (mosaic_gpu, "copy_share", _all_but(number)) for number in range(mosaic_gpu.SHARES)},
    "sources and targets exchanged": (mosaic_gpu, "copy_tile", lambda s, unit, a, b, pools: COPY(s, unit, b, a, pools)),
    "the next entry's frames": (mosaic_gpu, "copy_tile", lambda s, unit, *rest: COPY(s, unit + 1, *rest)),
    "heads and entries exchanged": (
        *(mosaic_gpu, "copy_tile"),
        lambda s, unit, *rest: COPY(dataclasses.replace(s, num_kv_heads=s.num_kv_heads + 1), unit, *rest),
    ),
}


@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, monkeypatch, emulated, on_emulated_threads, mutant):
    monkeypatch.setattr(*INSIDE[mutant])

    def op(*arrays, **keywords):
        try:
            return on_emulated_threads(*arrays, **keywords)
        except emulated.FAULTS as fault:
            raise AssertionError(str(fault)) from fault

    tools.must_fail(check, op, ("two heads", "a turn and part of a rest", "two turns", "more turns than CTAs"))


# Mutants: what an implementation gets wrong, expressed on its arguments or its results.


def _given(change):
    """change: sources, targets, frames -> sources, targets."""
    return lambda k, v, sources, targets, **static: XLA(k, v, *change(sources, targets, len(k)), **static)


def _found(change):
    """change: what was, what is now -> what is wrong, of each array of the pool."""

    def op(k, v, *frames, **static):
        found = XLA(k, v, *frames, **static)
        return tuple(None if old is None else change(old, new) for old, new in zip((k, v), found, strict=True))

    return op


def _last_16_bytes_missing(old, new):
    count = 16 // new.dtype.itemsize
    flat = [x.reshape(*x.shape[:2], -1) for x in (old, new)]
    return flat[1].at[..., -count:].set(flat[0][..., -count:]).reshape(new.shape)


def _all_heads(k, v, sources, targets, **static):
    """Whole frames move."""
    for head in range(k.shape[1]):
        k, v = XLA(k, v, *(jnp.broadcast_to(x[:, head : head + 1], x.shape) for x in (sources, targets)), **static)
    return k, v


MUTANTS = {
    "nothing": lambda k, v, *frames, **static: (k, v),
    "zeros": _found(lambda old, new: jnp.zeros_like(new)),
    "one tile dropped": _given(lambda sources, targets, _: (sources.at[-1, -1].set(-1), targets)),
    "one entry dropped": _given(lambda sources, targets, _: (sources, targets.at[-1].set(-1))),
    "K is not copied": lambda k, v, *frames, **static: (k, XLA(k, v, *frames, **static)[1]),
    "V is not copied": lambda k, v, *frames, **static: (XLA(k, v, *frames, **static)[0], v),
    "K and V exchanged": lambda k, v, *frames, **static: XLA(k, v, *frames, **static)[::-1],
    "sources and targets exchanged": _given(lambda sources, targets, _: (targets, sources)),
    "the first head's frames": _given(lambda sources, targets, _: tuple(jnp.broadcast_to(x[:, :1], x.shape) for x in (sources, targets))),
    "heads reversed": _given(lambda sources, targets, _: (sources[:, ::-1], targets)),
    "whole frames": _all_heads,
    "no source is frame 0": _given(lambda sources, targets, _: (jnp.maximum(sources, 0), targets)),
    "no source is the last frame": _given(lambda sources, targets, n: (jnp.where(sources < 0, n - 1, sources), targets)),
    "no target is frame 0": _given(lambda sources, targets, _: (sources, jnp.maximum(targets, 0))),
    "no target is the last frame": _given(lambda sources, targets, n: (sources, jnp.where(targets < 0, n - 1, targets))),
    "a skipped tile skips its entry": _given(lambda sources, targets, _: (jnp.where((sources < 0).any(1)[:, None], -1, sources), targets)),
    "the last 16 bytes are missing": _found(_last_16_bytes_missing),
    "the source is emptied": lambda k, v, sources, targets, **static: XLA(
        *(None if x is None else x.at[sources, jnp.arange(x.shape[1])].set(0) for x in XLA(k, v, sources, targets, **static)),
        *(jnp.full_like(sources, -1),) * 2,
        **static,
    ),
    "NaN becomes 0": _found(lambda old, new: jnp.nan_to_num(new)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


# Refusals.

BAD = {
    "no pages": ({"k_pages": jnp.zeros((4, 2, 16))}, r"pages need k \[N,K,P,D\]"),
    "no head axis": (
        {"sources": jnp.zeros(3, jnp.int32), "targets": jnp.zeros(3, jnp.int32)},
        r"one column for each KV head; got .*int32\[3\]",
    ),
    "other heads": (
        {"sources": jnp.zeros((3, 3), jnp.int32), "targets": jnp.zeros((3, 3), jnp.int32)},
        r"one column for each KV head; got .*int32\[3, 3\]",
    ),
    "other entries": ({"targets": jnp.zeros((4, 2), jnp.int32)}, r"sources int32\[3, 2\] targets int32\[4, 2\]"),
    "no entries": ({"sources": jnp.zeros((0, 2), jnp.int32), "targets": jnp.zeros((0, 2), jnp.int32)}, r"must be \[n, K\].*int32\[0, 2\]"),
    "sources are no int32": ({"sources": jnp.zeros((3, 2), jnp.uint8)}, r"must be int32; got .*sources uint8"),
    "targets are no int32": ({"targets": jnp.zeros((3, 2), jnp.float32)}, r"must be int32; got .*targets float32"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    changes, message = BAD[case]
    named = dict(zip(("k_pages", "v_pages", "sources", "targets"), arguments("two heads"), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        copy_tiles(**named)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference"])
def test_a_config_is_refused(name):
    with pytest.raises(ValueError, match=f"implementation '{name}' of copy_tiles takes no config, got 7"):
        copy_tiles(*arguments("two heads"), config=7, implementation=name)


ODD = {
    "keys": ((5, 1, 3, 6), (5, 1, 3, 8), "float16", r"\(36, 48\)"),
    "values": ((5, 1, 3, 8), (5, 1, 3, 1), "float32", r"\(96, 12\)"),
}


@pytest.mark.parametrize("case", ODD)
def test_tiles_that_are_no_multiple_of_16_bytes_go_to_another(on_hopper, case):
    *shapes, dtype, sizes = ODD[case]
    arrays = [*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes), *[jax.ShapeDtypeStruct((2, 1), jnp.int32)] * 2]
    with dispatch.listening() as heard:
        jax.eval_shape(copy_tiles, *arrays)
    assert heard["copy_tiles"] == "xla"
    with pytest.raises(NotImplementedError, match=f"tiles, and the scales of each, must be multiples of 16 bytes, got {sizes}"):
        jax.eval_shape(functools.partial(copy_tiles, implementation="mosaic_gpu"), *arrays)


def test_on_hopper_the_kernel_is_picked(on_hopper):
    op, arrays, keywords = PRODUCTION["28/4"]
    structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arrays.values()]
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(paging.public(op), **keywords), *structs)
    assert heard[op] == "mosaic_gpu"
