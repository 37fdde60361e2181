"""Compiled programs of the top-k benchmark: an op on each of a place's inputs, with a cold L2 before each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import radix_select
from benchmarks.top_k.cases import Case, Place
from pallas_kernels.bench import inputs
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.top_k import top_k

MIN_OPS = 4
"""Fewest ops of a program."""

FLUSH_GRID, FLUSH_THREADS = 264, 512


def op_of(case: Case, implementation: str | None) -> Callable:
    """(scores, hint) -> (values, indices). implementation: of the op. NotImplementedError where there is none here."""
    k, name = case.place.k, case.implementation
    if case.ours:
        config = _config(case)
        return lambda scores, hint: top_k(scores, k, hint=hint, config=config, implementation=implementation)
    if name in top_k_cases.RADIX:
        if "mosaic_gpu" not in dispatch.available("select_blocks"):
            raise NotImplementedError("the radix selection needs a GPU of compute capability 9.0")
        return lambda scores, hint: radix_select.radix_top_k(scores, k, top_k_cases.RADIX[name])
    select = {"lax.top_k": lax.top_k, "approx_max_k": lax.approx_max_k}[name]
    return lambda scores, hint: select(scores, k)


def _config(case: Case) -> Any:
    """The op's `Config` that the case names, None for the default."""
    if not case.config:
        return None
    from pallas_kernels.selection.top_k.plan import Config

    return Config(**case.config)


def counting_op_of(case: Case, implementation: str | None) -> Callable | None:
    """(scores, hint) -> counts `[B, 3 or more]` of the op; None for cases that are not counted and for implementations
    without counts."""
    if not case.counted or (implementation or dispatch.available("top_k")[0]) != "mosaic_gpu":
        return None
    options = {"config": _config(case), "return_counts": True, "implementation": "mosaic_gpu"}
    return lambda scores, hint: top_k(scores, case.place.k, hint=hint, **options)[2]


def program_of(op: Callable, *, flushed: bool) -> Callable:
    """(words, inputs) -> per input (values, indices), one op after the other, and the sums that reads of `words`
    return, one read before each op if flushed."""
    inner, read = jax.jit(op), jax.jit(flush)

    @jax.jit
    def program(words, own):
        results, marks = [], []
        for scores, hint in own:
            if results:
                scores, results[-1] = lax.optimization_barrier((scores, results[-1]))
            if flushed:
                words, scores = lax.optimization_barrier((words, scores))
                scores, mark = lax.optimization_barrier((scores, read(words)))
                marks.append(mark)  # returned, so that XLA removes none
            results.append(inner(scores, hint))
        return results, marks

    return program


def flush(words: jax.Array) -> jax.Array:
    """Read int32 words, a multiple of 4, so that the L2 holds nothing else. Returns a sum per warp."""
    warps = FLUSH_THREADS // 32
    each = 4 * FLUSH_THREADS * FLUSH_GRID

    def flush_kernel(words_ref, sums_ref):
        @lanes.stage(cta=lax.axis_index("cta"))
        def run(arrays, scratch, cta):
            words_ref, sums_ref = arrays
            first = (cta * FLUSH_THREADS + lanes.thread()) * 4

            def read(start, total):
                found = lanes.load_global_16_bytes(words_ref, lanes.minimum(start + first, words.size - 4) * 4)
                return [functools.reduce(lambda a, b: a ^ b, found, total)]

            (total,) = lanes.loop(words.size, [lanes.i32(0)], read, step=each)
            total = lanes.warp_reduce(total, "max")
            with lanes.when(lanes.lane() == 0):
                lanes.store_global(sums_ref, cta * warps + lanes.warp(), total)

        run((words_ref, sums_ref), ())

    return plgpu.kernel(
        flush_kernel,
        out_type=jax.ShapeDtypeStruct((FLUSH_GRID * warps,), jnp.int32),
        grid=(FLUSH_GRID,),
        grid_names=("cta",),
        num_threads=FLUSH_THREADS // 128,
        thread_name="warpgroup",
    )(words)


def flush_words() -> jax.Array:
    """The words that are read between two ops: twice the L2, or almost nothing where there is no L2 to flush."""
    return jnp.ones(max(4, 2 * inputs.cache_bytes() // 4), jnp.int32)


def compiled(cases: Sequence[Case], words: jax.Array, implementation: str | None, jobs: int) -> dict[tuple, Any]:
    """By `key_of`: the program to time and the program that counts, None where nothing counts; or the exception that
    compiling raised."""
    by_key = {key_of(case, implementation): case for case in cases}

    def compile_one(key: tuple) -> Any:
        case, place = by_key[key], by_key[key].place
        try:
            scores, hint = _shapes(place)
            hint = hint if key[-2] else None
            own = ((scores, hint),) * ops_of(place)
            program = program_of(op_of(case, implementation), flushed=on_gpu()).lower(words, own).compile()
            counting = counting_op_of(case, implementation)
            return program, counting and jax.jit(counting).lower(scores, hint).compile()
        except Exception as problem:  # so that the other programs are still compiled
            return problem

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(by_key, pool.map(compile_one, by_key), strict=True))


def _shapes(place: Place) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of scores and a hint."""
    return jax.ShapeDtypeStruct((place.batch, place.n), jnp.float32), jax.ShapeDtypeStruct((place.batch, place.k), jnp.int32)


def key_of(case: Case, implementation: str | None) -> tuple:
    """Everything that a program depends on: sizes, the op, and whether it reads a hint, but not the values of rows and
    hints."""
    place = case.place
    return place.n, place.batch, place.k, ops_of(place), case.implementation, hinted(case, implementation), case.counted


def hinted(case: Case, implementation: str | None) -> bool:
    """Whether a hint is given and read."""
    if case.hint == "none" or not case.ours:
        return False
    try:
        return reads_hint(op_of(case, implementation), case.place)
    except Exception:  # raised again, and recorded, where the program is compiled
        return True


def reads_hint(op: Callable, place: Place) -> bool:
    """Whether the op's program uses the hint; if not, it is the same as the program without a hint."""
    program = jax.make_jaxpr(op)(*_shapes(place)).jaxpr
    operands = [*program.outvars, *(operand for equation in program.eqns for operand in equation.invars)]
    return any(operand is program.invars[1] for operand in operands)


def ops_of(place: Place) -> int:
    return max(top_k_cases.copies_of(place), MIN_OPS)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"
