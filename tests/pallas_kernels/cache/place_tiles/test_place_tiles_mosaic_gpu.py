"""The GPU form of place_tiles, without a GPU: lowered, compiled, and whole on emulated threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import paging
import pytest
from place_suite import CASES, PRODUCTION, arguments, check, production
from quick_cases import one_in

from pallas_kernels.cache.place_tiles import WAYS, mosaic_gpu
from pallas_kernels.hopper.threads import lanes


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_gpu_form_lowers_and_updates_in_place(cuda, case):
    """One kernel, which hands tags and ages back as its results."""
    text = cuda.lower(*PRODUCTION[case])
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


TAGS, AGES = 5, 6
"""Numbers of the kernel's arguments of which several threads may write one word: tiles may want one place, and rows may
list one tile."""


@pytest.fixture(scope="session")
def on_emulated_threads(emulated_kernels):
    kernel = paging.implementation("place_tiles", "mosaic_gpu")

    def op(*arrays, contested=(TAGS, AGES), **keywords):
        with emulated_kernels.kernels(contested):
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.parametrize("case", CASES)
def test_on_emulated_threads_it_keeps_the_promises(on_emulated_threads, case):
    check(on_emulated_threads, case)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.settled and not case.shared])
def test_on_emulated_threads_nothing_is_contested_where_all_is_settled(on_emulated_threads, case):
    check(functools.partial(on_emulated_threads, contested=()), case)


def test_on_emulated_threads_missing_tiles_contend_for_places(emulated, on_emulated_threads):
    with pytest.raises(emulated.Race, match=r"different words to one place of arrays\[5\] at once"):
        on_emulated_threads(*arguments("an empty buffer"), contested=[AGES], **CASES["an empty buffer"].static)


@pytest.mark.parametrize("number", [0, 1])
def test_on_emulated_threads_every_barrier_is_needed(monkeypatch, emulated, on_emulated_threads, number):
    """Between looking up and taking places, and between taking and seeing who got them."""
    count, name = iter(range(10**6)), "rows of one sequence"
    monkeypatch.setattr(lanes, "cta_barrier", lambda threads: None if next(count) % 2 == number else BARRIER(threads))
    with pytest.raises(emulated.Race, match=r"arrays\[[56]\], which .*; no barrier between"):
        on_emulated_threads(*arguments(name), **CASES[name].static)


def _one_turn(s, step):
    with lanes.when(lanes.thread() < s.entries):
        step(lanes.thread())


def _nothing(*_):
    pass


def _without(name: str, function: str):
    """In place of `_for_entries`: one of the three steps does not call a function of `lanes`."""

    def for_entries(s, step):
        with mock.patch.object(lanes, function, _nothing) if step.__name__ == name else contextlib.nullcontext():
            FOR_ENTRIES(s, step)

    return for_entries


BARRIER, PLACE, FOR_ENTRIES = lanes.cta_barrier, mosaic_gpu.place_head, mosaic_gpu._for_entries
INSIDE = {
    "only as many entries as threads": (mosaic_gpu, "_for_entries", _one_turn),
    "found tiles stay as old as they were": (mosaic_gpu, "_for_entries", _without("look_up", "store_global")),
    "no missing tile takes a place": (mosaic_gpu, "_for_entries", _without("take", "store_global")),
    "missing tiles are taken for found ones": (mosaic_gpu, "_for_entries", _without("take", "store_shared")),
    "half of the places": (mosaic_gpu, "WAYS", WAYS // 2),
    "the first head": (mosaic_gpu, "place_head", lambda s, head, *rest: PLACE(s, head * 0, *rest)),
    "a set too many": (mosaic_gpu, "place_head", lambda s, *rest: PLACE(dataclasses.replace(s, sets=s.sets + 1), *rest)),
    "a table of another width": (
        *(mosaic_gpu, "place_head"),
        lambda s, *rest: PLACE(dataclasses.replace(s, table_width=s.table_width - 1), *rest),
    ),
    "the last entry is missing": (
        *(mosaic_gpu, "_for_entries"),
        lambda s, step: FOR_ENTRIES(dataclasses.replace(s, batch=1, width=s.entries - 1), step),
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

    tools.must_fail(check, op, ("settled", "two heads", "more entries than threads"))


def test_on_hopper_the_kernel_is_picked(on_hopper, picked):
    assert picked(PRODUCTION["as many entries as it takes"])["place_tiles"] == "mosaic_gpu"


def test_more_entries_than_the_kernel_takes_go_to_another(on_hopper, picked):
    case = production(3, 2, (mosaic_gpu.MAX_ENTRIES + 1) // 3)
    assert picked(case)["place_tiles"] == "xla"
    with pytest.raises(NotImplementedError, match="a head may list at most 8192 tiles, got 8193"):
        picked(case, implementation="mosaic_gpu")
