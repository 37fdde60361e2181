"""gather_attention over packed pages in Mosaic GPU on a Hopper GPU: against the reference, mutants, bits, company."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import packed_suite
import pytest

from pallas_kernels.pages import OpenPages

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


def _changed(case: packed_suite.Packed, **parts) -> packed_suite.Packed:
    q, pages, *rest = case.operands
    found = {name: change(getattr(pages, name)) for name, change in parts.items()}
    return dataclasses.replace(case, operands=(q, pages.replace(**found), *rest))


def _other_rows(opened: OpenPages) -> OpenPages:
    return opened.replace(k=jnp.roll(opened.k, 1, axis=0), v=jnp.roll(opened.v, 1, axis=0))


def _nibbles(codes):
    return (codes << 4) | (codes >> 4)


# A mutant: the case that it fails, and what it changes of the pages.
MUTANTS = {
    "scales of keys are left out": ("int8", {"k_scales": jnp.ones_like}),
    "scales of values are left out": ("int8", {"v_scales": jnp.ones_like}),
    "scales of the next token": ("int8, a list", {"k_scales": lambda x: jnp.roll(x, 1, axis=2)}),
    "scales of the next page": ("int8, every page packed", {"v_scales": lambda x: jnp.roll(x, 1, axis=0)}),
    "scales of the next channel": ("int8 per channel", {"v_scales": lambda x: jnp.roll(x, 1, axis=3)}),
    "scales of the next group": ("q4_0", {"k_scales": lambda x: jnp.roll(x, 1, axis=3)}),
    "low and high bits for each other": ("q4_0", {"v": _nibbles}),
    "other open rows": ("int8", {"open": _other_rows}),
    "own pages as packed": ("int8", {"open": lambda x: None}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, case_of, mutant):
    name, change = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        packed_suite.compare(tools, case_of(name), _changed(case_of(name), **change).run("mosaic_gpu"))


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
