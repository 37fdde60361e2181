"""The suite of fetch_tiles: what place_tiles promises, and copies that make it true; every implementation, and emulated
threads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import place_suite
import pytest
from place_suite import CASES, arguments
from quick_cases import one_in

from pallas_kernels.cache.copy_tiles import mosaic_gpu as copying
from pallas_kernels.cache.fetch_tiles import fetch_tiles, mosaic_gpu
from pallas_kernels.cache.place_tiles import mosaic_gpu as placing
from pallas_kernels.cache.place_tiles.api import Placed
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.threads import lanes

pytestmark = pytest.mark.optimized
"""It looks at the memory of programs."""

IMPLEMENTATIONS = {name: functools.partial(fetch_tiles, implementation=name) for name in dispatch.available("fetch_tiles")}
"""The reference, too: most cases leave a choice, so promises are what all are held to."""
HEAD_DIM = 8
MANY = "more entries than threads, rows of one sequence"
QUICK = ("settled", "two heads", "rows of one sequence", "lists longer than the buffer", "all -1", "drafts", MANY)


@functools.cache
def pool(name: str) -> Pages:
    """Every tile has numbers of its own."""
    case, frames = CASES[name], np.asarray(arguments(name)[2])
    shape = (max(case.static["border"], frames.max() + 1), case.kv_heads, case.page_size, HEAD_DIM)
    k, v = np.random.default_rng(len(name)).permutation(2 * np.prod(shape)).astype(np.float32).reshape(2, *shape)
    return Pages(jnp.asarray(k), jnp.asarray(v))


def static(name: str) -> dict:
    return {key: value for key, value in CASES[name].static.items() if key != "page_size"}


def check(op, name: str) -> None:
    """What `place_tiles` promises of lists and buffer; and in the pool, that each copied tile is the one it was made
    of, and nothing else has changed."""
    before, case, targets = pool(name), CASES[name], None

    def placed(*arrays, **sizes):
        nonlocal found, targets
        found = op(before, *arrays, **static(name))
        places = np.asarray(found.block_frames).swapaxes(1, 2).reshape(-1, case.kv_heads)
        targets = np.where(np.asarray(found.sources) >= 0, places, -1).astype(np.int32)
        return Placed(found.block_frames, found.sources, jnp.asarray(targets), found.tags, found.ages)

    found = None
    place_suite.check(placed, name)
    wanted = jax.tree.map(np.array, before)
    entries, heads = np.nonzero(targets >= 0)
    for ours, old in zip((wanted.k, wanted.v), (before.k, before.v), strict=True):
        ours[targets[entries, heads], heads] = np.asarray(old)[np.asarray(found.sources)[entries, heads], heads]
    for ours, ref in zip(jax.tree.leaves(found.pages), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, ref, err_msg="pools differ")


def test_cases_copy_tiles_into_places_that_held_others():
    found = {name: IMPLEMENTATIONS["reference"](pool(name), *arguments(name), **static(name)) for name in ("settled", "two heads")}
    assert all((np.asarray(each.sources) >= 0).sum() > 2 for each in found.values())


@pytest.mark.quick_but(*(f"{name}-{case}" for name in IMPLEMENTATIONS for case in CASES if case not in QUICK))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_promises(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_arguments_stay_as_they_are(tools, name):
    before = jax.tree.map(np.array, (pool("two heads"), arguments("two heads")))
    jax.block_until_ready(IMPLEMENTATIONS[name](pool("two heads"), *arguments("two heads"), **static("two heads")))
    after = pool("two heads"), arguments("two heads")
    jax.tree.map(tools.assert_same_bits, before, after)


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_a_donated_pool_and_buffer_are_not_copied(name):
    _, arrays, options = production(1, 4, 37)
    structs = [jax.ShapeDtypeStruct(*arrays[each]) for each in arrays]

    def op(k, v, *lists):
        return fetch_tiles(Pages(k, v), *lists, **options, implementation=name)

    memory = jax.jit(op, donate_argnums=(0, 1, 6, 7)).lower(*structs).compile().memory_analysis()
    pool_bytes = 2 * np.prod(arrays["k_pages"][0]) * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8


def production(batch: int, kv_heads: int, width: int, head_dim: int = 128, dtype: str = "bfloat16", page_size: int = 128) -> tuple:
    """(op, arrays, keywords) of a call."""
    _, lists, sizes = place_suite.production(batch, kv_heads, width, sets=64)
    pages = ((1024, kv_heads, page_size, head_dim), dtype)
    return "fetch_tiles", {"k_pages": pages, "v_pages": pages} | lists, {key: sizes[key] for key in ("num_queries", "first", "border")}


PRODUCTION = {
    "28/4": production(1, 4, 37),
    "32/8, batch 8": production(8, 8, 37),
    "float32, head dim 64": production(2, 8, 37, 64, "float32"),
    "many entries": production(16, 2, 300),
}


# The GPU form, without a GPU: lowered, compiled, and whole on emulated threads.


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands pool, tags and ages back as its results."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 4


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


CONTESTED = (5, 6, 7, 8)
"""Numbers of the kernel's arguments of which several threads may write one word: tags, ages, and where rows list one
tile, the pool."""


@pytest.fixture(scope="session")
def on_emulated_threads(emulated_kernels):
    kernel = paging.implementation("fetch_tiles", "mosaic_gpu")

    def op(pages, *arrays, contested=CONTESTED, **keywords):
        with emulated_kernels.kernels(contested):
            return kernel(pages.k, pages.v, *arrays, **keywords)

    return op


@pytest.mark.parametrize("case", CASES)
def test_on_emulated_threads_it_keeps_the_promises(on_emulated_threads, case):
    check(on_emulated_threads, case)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.settled and not case.shared])
def test_on_emulated_threads_nothing_is_contested_where_all_is_settled(on_emulated_threads, case):
    check(functools.partial(on_emulated_threads, contested=()), case)


def test_on_emulated_threads_the_cluster_waits_for_its_first_cta(monkeypatch, emulated, on_emulated_threads):
    monkeypatch.setattr(lanes, "cluster_barrier", lambda: None)
    with pytest.raises(emulated.Race, match="no barrier between"):
        check(on_emulated_threads, "settled")


@pytest.mark.parametrize("number", [0, 1])
def test_on_emulated_threads_every_barrier_of_the_list_is_needed(monkeypatch, emulated, on_emulated_threads, number):
    """Between the warps' sums and their readers, and between a turn and what follows it."""
    barrier, count = lanes.cta_barrier, iter(range(10**6))

    def without(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lanes, "cta_barrier", lambda threads: None if next(count) % 2 == number else barrier(threads))
            return MISSING(*arguments)

    monkeypatch.setattr(mosaic_gpu, "_missing", without)
    with pytest.raises(emulated.Race, match="no barrier between"):
        check(on_emulated_threads, "settled, more entries than threads")


def _head_of_another(function):
    return lambda s, head, *rest: function(s, head * 0, *rest)


COPY, MISSING = copying.copy_share, mosaic_gpu._missing
INSIDE = {
    "the first head's tiles are copied": (copying, "copy_share", _head_of_another(COPY)),
    "sources and targets exchanged": (copying, "copy_share", lambda s, head, a, b, *rest: COPY(s, head, b, a, *rest)),
    "one share less": (copying, "copy_share", lambda s, head, a, b, share, pools: COPY(s, head, a, b, share // 2 * 2, pools)),
    "the last missing tile is not copied": (mosaic_gpu, "_missing", lambda *rest: MISSING(*rest) - 1),
    "the list of another head": (mosaic_gpu, "_missing", lambda s, head, *rest: MISSING(s, head * 0, *rest)),
}


@pytest.mark.parametrize("mutant", INSIDE)
def test_mutant_inside_fails(tools, monkeypatch, emulated, on_emulated_threads, mutant):
    monkeypatch.setattr(*INSIDE[mutant])

    def op(*arrays, **keywords):
        try:
            return on_emulated_threads(*arrays, **keywords)
        except emulated.FAULTS as fault:
            raise AssertionError(str(fault)) from fault

    tools.must_fail(check, op, ("settled", "two heads", "settled, more entries than threads"))


def test_on_hopper_the_kernel_is_picked(on_hopper, picked):
    assert picked(PRODUCTION["28/4"])["fetch_tiles"] == "mosaic_gpu"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (production(3, 2, (placing.MAX_ENTRIES + 1) // 3), "a head may list at most 8192 tiles, got 8193"),
        (production(1, 2, 37, 4, page_size=3), "must be multiples of 16 bytes"),
    ],
)
def test_what_a_kernel_of_its_parts_cannot_do_is_composed(on_hopper, picked, case, why):
    assert picked(case)["fetch_tiles"] == "composed"
    with pytest.raises(NotImplementedError, match=why):
        picked(case, implementation="mosaic_gpu")


# Mutants: what an implementation gets wrong, expressed on its results.


def _changed(**changes):
    def op(pages, *arrays, **keywords):
        found = IMPLEMENTATIONS["composed"](pages, *arrays, **keywords)
        return found._replace(**{name: change(pages, found) for name, change in changes.items()})

    return op


MUTANTS = {
    "nothing is copied": _changed(pages=lambda before, found: before),
    "only keys are copied": _changed(pages=lambda before, found: found.pages.replace(v=before.v)),
    "lists lead to host memory": _changed(block_frames=lambda before, found: jnp.full_like(found.block_frames, -1)),
    "one tile too many": _changed(pages=lambda before, found: found.pages.replace(k=found.pages.k.at[0].set(found.pages.k[1]))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, mutant):
    tools.must_fail(check, MUTANTS[mutant], ("settled", "two heads"))


def test_arguments_that_do_not_fit_together_are_refused():
    name = "two heads"
    pages, (blocks, *lists) = pool(name), arguments(name)
    with pytest.raises(ValueError, match="lists are of 2 KV heads, pages have 1"):
        fetch_tiles(Pages(pages.k[:, :1], pages.v[:, :1]), blocks, *lists, **static(name))
    with pytest.raises(ValueError, match="k and v"):
        fetch_tiles(pages.replace(v=pages.v[:-1]), blocks, *lists, **static(name))
    with pytest.raises(ValueError, match="all arrays must be int32"):
        fetch_tiles(pages, blocks.astype(jnp.float32), *lists, **static(name))
    with pytest.raises(ValueError, match="must lie before the border"):
        fetch_tiles(pages, blocks, *lists, **static(name) | {"border": 3})
