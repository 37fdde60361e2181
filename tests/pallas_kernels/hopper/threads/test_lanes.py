"""The functions of single threads: each lowers for a GPU, where their arithmetic is tried on one too; old JAX is
refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.page_format import PageFormat, numbers_of
from pallas_kernels.hopper.decode import packed_operands
from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes

THREADS = 128
COUNT = 24
"""Results of a thread."""


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 10, 9), (0, 9)])
def test_an_old_jax_is_refused(monkeypatch, version):
    text = ".".join(map(str, version))
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", text)
    with pytest.raises(NotImplementedError, match=rf"need jax >= 0\.11\.2, found {text}; upgrade jax"):
        lanes.check_version()


@pytest.mark.parametrize("version", [(0, 11, 2), (0, 12, 0), (1, 0, 0)])
def test_a_newer_one_is_taken(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    lanes.check_version()


def test_a_kernel_is_the_same_whatever_was_lowered_before_it(monkeypatch):
    """Else the compilation cache would not find it in a process that needs its programs in another order."""

    def copy(source, target):
        target[...] = source[...]

    def lowered():
        jax.clear_caches()
        call = plgpu.kernel(copy, out_type=jax.ShapeDtypeStruct((256,), jnp.float32))
        return jax.jit(call).trace(jax.ShapeDtypeStruct((256,), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in (first := lowered())
    assert lowered() == first
    core = lanes.mgpu_core
    monkeypatch.setattr(core.dialect, "get_or_set_dump_options", core.dialect.get_or_set_dump_options.__wrapped__)
    assert lowered() != lowered(), "JAX numbers kernels no more: leave the name to it"


def _integers(x, i):
    """Of an integer x and the number i of the thread."""
    return [
        x + i,
        x - i,
        3 - x,
        x * 7,
        x // 5,
        x % 5,
        x & i,
        x | i,
        x ^ i,
        x << 3,
        x >> 3,
        ~x,
        lanes.where(x < i, 1, lanes.i32(0)),
        lanes.where((x <= i) & (x != i), lanes.i32(1), 0),
        lanes.minimum(x, i),
        lanes.maximum(x, 3),
        lanes.shift_right(x, i & 63),
        lanes.leading_zeros(x),
        lanes.popcount(x),
        lane_pairs.permuted(x, i, 0x7052),
    ]


def _integers_expected(x, i):
    u = x.view(np.uint32)
    truncated = np.trunc(x / 5).astype(np.int32)
    of_x, of_i = (np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4) for a in (x, i))
    return [
        x + i,
        x - i,
        3 - x,
        x * 7,
        truncated,
        x - truncated * 5,
        x & i,
        x | i,
        x ^ i,
        x << 3,
        x >> 3,
        ~x,
        x < i,
        x < i,
        np.minimum(x, i),
        np.maximum(x, 3),
        np.where(i & 63 < 32, u >> (i & 31).astype(np.uint32), 0).astype(np.uint32).view(np.int32),
        32 - np.ceil(np.log2(u.astype(np.float64) + 1)).astype(np.int32),
        np.bitwise_count(u),
        np.stack([of_x[:, 2], of_i[:, 1], of_x[:, 0], of_i[:, 3]], axis=1).view(np.int32)[:, 0],
    ]


def _warp(x, i):
    lane = lanes.lane()
    return [
        lanes.warp(),
        lane,
        lanes.shuffle_xor(x, 4),
        lanes.shuffle(x, (lane + 3) & 31),
        lanes.ballot(x > 0),
        lanes.lanes_below(),
        lanes.warp_reduce(x, "min"),
        lanes.warp_reduce(x, "max"),
        lanes.warp_reduce(x & 1023, "add"),
        lanes.loop(5, [x], lambda n, total: [total + n])[0],
        lanes.while_loop(lambda n: n < 100, lambda n: [n + 7], [i])[0],
    ]


def _warp_expected(x, i):
    warps, above = x.reshape(-1, 32), (x > 0).reshape(-1, 32)
    spread = functools.partial(np.repeat, repeats=32)
    steps = np.maximum(-(-(100 - i) // 7), 0)
    return [
        i // 32,
        i % 32,
        warps[:, np.arange(32) ^ 4].ravel(),
        warps[:, (np.arange(32) + 3) % 32].ravel(),
        spread((above * 2 ** np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32).view(np.int32)),
        ((1 << (i % 32).astype(np.int64)) - 1).astype(np.int32),
        spread(warps.min(1)),
        spread(warps.max(1)),
        spread((warps & 1023).sum(1)),
        x + 10,
        i + 7 * steps,
    ]


def _floats(x, i):
    """Of the bits of integers read as a float between 1 and 2, less 1.5."""
    f = lanes.bits((x & 0x7FFFFF) | 0x3F800000) - 1.5
    g = f * 3.0 + 0.25
    nan = lanes.bits(lanes.i32(0x7FC00000))
    low, high = lane_pairs.unpack(lane_pairs.pack(f, g, "bfloat16"), "bfloat16")
    low16, high16 = lane_pairs.unpack(lane_pairs.pack(f, g, "float16"), "float16")
    values = [f, g, f / g, 1.0 - g, lane_math.exp2(f), lanes.log2(f * f + 1.0), lanes.maximum(f, g), lanes.maximum(f, nan)]
    values += [lanes.where(f == f, lanes.maximum_or_nan(f, g), nan), lanes.maximum_or_nan(f, nan), low, high, low16, high16]
    pairs = lane_pairs.multiply_pairs(lane_pairs.pack(f, g, "bfloat16"), lane_pairs.pack(g, g, "bfloat16"), "bfloat16")
    values += [lane_math.rsqrt(f * f + 1.0), *lane_pairs.unpack(pairs, "bfloat16")]
    return [lanes.bits(value) for value in values]


def _floats_expected(x, i):
    f = ((x & 0x7FFFFF) | 0x3F800000).view(np.float32) - np.float32(1.5)
    g = f * np.float32(3) + np.float32(0.25)
    nan = np.full_like(f, np.nan)
    bf16, f16 = (lambda y, to=to: np.asarray(y.astype(to), np.float32) for to in (jnp.bfloat16, np.float16))
    values = [f, g, f / g, 1 - g, np.exp2(f), np.log2(f * f + 1), np.maximum(f, g), f, np.maximum(f, g), nan]
    products = [bf16(bf16(f) * bf16(g)), bf16(bf16(g) * bf16(g))]
    return [y.astype(np.float32) for y in (*values, bf16(f), bf16(g), f16(f), f16(g), 1 / np.sqrt(f * f + 1), *products)]


FORMATS = [PageFormat(*of, read_as="bfloat16") for of in (("int8", "token"), ("int4", "token"), ("fp8_e4m3", "token"), ("fp8_e4m3",))]


def _word(i):
    """Four bytes; those of all threads are all there are."""
    return (i * 2) | (i * 2 + 1) << 8 | (255 - i * 2) << 16 | (254 - i * 2) << 24


def _codes(x, i):
    """What packed pages hold, as numbers."""
    pairs = [pair for format in FORMATS for half in packed_operands.numbers(format, _word(i)) for pair in half]
    return [lanes.bits(value) for pair in pairs for value in lane_pairs.unpack(pair, "bfloat16")]


def _codes_expected(x, i):
    found = []
    for format in FORMATS:
        of_byte = _word(i).astype(np.int32).view(np.uint8).reshape(-1, 4)
        numbers = np.asarray(numbers_of(format, jnp.asarray(of_byte.view(format.code_dtype))))  # of 4 bits, first all low ones
        if format.codes == "fp8_e4m3" and format.scale:  # a NaN has a scale of NaN, and may be anything
            numbers = np.where(np.isnan(numbers), np.where(of_byte > 127, -480, 480), numbers).astype(np.float32)
        for half in range(0, numbers.shape[1], 4):
            found += [numbers[:, half + n] for n in (0, 2, 1, 3)]
    return found


STAGES = {"integers": (_integers, _integers_expected), "warps": (_warp, _warp_expected), "floats": (_floats, _floats_expected)}
STAGES |= {"codes": (_codes, _codes_expected)}


def _kernel(stage):
    """int32 [128] -> int32 [COUNT, 128]: what the stage gives for each thread."""

    def kernel(x_ref, out_ref, shared):
        @lanes.stage()
        def run(refs, shared):
            x_ref, out_ref = refs
            i = lanes.thread()
            lanes.store_shared(shared, i, lanes.load_global(x_ref, i))
            lanes.cta_barrier(THREADS)
            for n, value in enumerate(stage(lanes.load_shared(shared, i)[0], i)):
                lanes.store_global(out_ref, i + n * THREADS, value)

        run((x_ref, out_ref), shared)

    out = jax.ShapeDtypeStruct((COUNT, THREADS), jnp.int32)
    return plgpu.kernel(kernel, out_type=out, grid=(1,), grid_names=("x",), scratch_types=[plgpu.SMEM((THREADS,), jnp.int32)])


@pytest.mark.parametrize("stage", STAGES)
def test_lowers(stage):
    struct = jax.ShapeDtypeStruct((THREADS,), jnp.int32)
    assert "mosaic_gpu" in jax.jit(_kernel(STAGES[stage][0])).trace(struct).lower(lowering_platforms=("cuda",)).as_text()


X = np.random.default_rng(0).integers(-(2**28), 2**28, THREADS).astype(np.int32)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu_it_computes_what_it_says(stage):
    _check(stage, np.asarray(jax.jit(_kernel(STAGES[stage][0]))(X)))


@pytest.mark.parametrize("stage", STAGES)
def test_emulated_it_computes_what_it_says(emulated, stage):
    out = np.zeros((COUNT, THREADS), np.int32)

    def run(arrays, scratch):
        x_ref, out_ref = arrays
        i = lanes.thread()
        for n, value in enumerate(STAGES[stage][0](lanes.load_global(x_ref, i), i)):
            lanes.store_global(out_ref, i + n * THREADS, value)

    emulated.run_cluster(run, ctas=1, threads=THREADS, arrays=(X, out), scratch_words={})
    _check(stage, out)


def _check(stage: str, found: np.ndarray) -> None:
    wanted = STAGES[stage][1](X, np.arange(THREADS, dtype=np.int32))
    for n, values in enumerate(wanted):
        if values.dtype == np.float32:
            np.testing.assert_allclose(found[n].view(np.float32), values, rtol=1e-5, atol=1e-6, err_msg=f"result {n}")
        else:
            np.testing.assert_array_equal(found[n], values, err_msg=f"result {n}")
