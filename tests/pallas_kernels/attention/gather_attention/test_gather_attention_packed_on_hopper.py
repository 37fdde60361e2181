"""gather_attention over packed pages in Mosaic GPU on a Hopper GPU: against the reference, mutants, bits, company."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import packed_suite
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BASE = {"lengths": (0, 1, 127, 128, 129, 300, 700, 768), "kv_heads": 4, "group": 7, "head_dim": 128, "page_size": 128, "width": 6}
LIST = {"blocks": (33, 16), "opened": True}
CASES = {
    "int8": {"opened": True},
    "int8, a list": {"format": "int8", **LIST},
    "int8, drafts in a window across a page": {"format": "int8", "num_queries": 3, "window": (5, 200), "opened": True},
    "int8, LSE of pages": {"format": "int8", "lse": True, "opened": True, "kv_heads": 8, "group": 4},
    "int8, long": {"format": "int8", "lengths": (9000, 3), "width": 71, "kv_heads": 1, "opened": True},
    "int8, every page packed": {"format": "int8"},
    "int8 keys per channel": LIST,
    "int8 per channel": {"opened": True},
    "fp8": {"opened": True},
    "fp8 without scales": LIST,
    "int4": LIST,
    "int4, 16 drafts": {"format": "int4", "num_queries": 16, "opened": True},
    "int4 keys per channel, values per 32": {"head_dim": 64, "kv_heads": 8, "group": 4, **LIST},
    "q8_0": {"blocks": (6, 128), "opened": True},
    "q4_0": {"opened": True},
    "q8_0 keys, q4_0 values": {"head_dim": 256, "kv_heads": 2, "group": 8, "opened": True},
    "keys as they are, int4 values": {"opened": True},
    "int8, tiles apart": {"format": "int8", "blocks": (6, 128), "opened": True, "apart": True},
    "q4_0, tiles apart, LSE of pages": {"format": "q4_0", "blocks": (6, 128), "opened": True, "apart": True, "lse": True},
}


@pytest.fixture(scope="module")
def case_of(tools):
    """A case by its name."""

    @functools.cache
    def build(name: str) -> packed_suite.Packed:
        return packed_suite.build(tools, seed=sum(map(ord, name)), **(BASE | {"format": name} | CASES[name]))

    return build


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(tools, case_of, name):
    case = case_of(name)
    packed_suite.compare(tools, case, case.run("mosaic_gpu"))


# A mutant, one of `packed_suite.CHANGES`: the case that it fails.
MUTANTS = {
    "scales of keys are left out": "int8",
    "scales of values are left out": "int8",
    "scales of the next token": "int8, a list",
    "scales of the next page": "int8, every page packed",
    "scales of the next channel": "int8 per channel",
    "scales of the next group": "q4_0",
    "low and high bits for each other": "q4_0",
    "other open rows": "int8",
    "own pages as packed": "int8",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, case_of, mutant):
    case = case_of(MUTANTS[mutant])
    with pytest.raises(AssertionError):
        packed_suite.compare(tools, case, packed_suite.changed(case, mutant).run("mosaic_gpu"))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_bits_do_not_depend_on_when_or_in_which_company(tools, case_of, name):
    case = case_of(name)
    q, pages, table, lengths = case.operands
    once = case.run("mosaic_gpu")
    for _ in range(10):
        for a, b in zip(once, case.run("mosaic_gpu"), strict=True):
            tools.assert_same_bits(a, b)
    alone = dataclasses.replace(case, operands=(q, pages, table, jnp.where(jnp.arange(8) == 6, lengths, 0))).run("mosaic_gpu")
    for a, b in zip(once, alone, strict=True):
        tools.assert_same_bits(a[6], b[6])


def test_it_is_what_runs_here(tools, case_of):
    case = case_of("int8")
    for a, b in zip(case.run("mosaic_gpu"), packed_suite.picked(case), strict=True):
        tools.assert_same_bits(a, b)
