"""Prefill attention over packed pages in Mosaic GPU on a Hopper GPU: against the reference and `xla`, mutants, bits,
company, lists.

pytest -m gpu tests/pallas_kernels/hopper/prefill/test_packed_tiles_on_hopper.py
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import packed_prefill_suite
import packed_suite
import pytest
from packed_prefill_suite import BASE, LONG, Prefill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

LISTS = {"lists": (5, 64), "window": (5, 200)}
SELECTED = {"gamma": 4, "block_size": 64, "k_blocks": 3, "k_exact": 3, "window": (5, 130), "tournament": False, "estimate": "quantile"}
CASES = {
    "int8": {},
    "int8, every page packed": {"format": "int8", "opened": False},
    "int8, a page is missing": {"format": "int8", "hole": True},
    "int8, long": {"format": "int8", **LONG},
    "int8, one token": {"format": "int8", "num_queries": 1, "starts": (0, 0, 14, 127, 128, 39, 94, 767)},
    "int8, keys after the chunk": {"format": "int8", "num_queries": 100},
    "int8, pages of 64": {"format": "int8", "page_size": 64, "width": 12, "group": 7},
    "int8, pages of 192": {"format": "int8", "page_size": 192, "width": 4, "head_dim": 64},
    "int8, head dim 256, window": {"format": "int8", "head_dim": 256, "kv_heads": 1, "group": 8, "window": (5, 200)},
    "int8, lists": {"format": "int8", **LISTS},
    "int8, lists alone": {"format": "int8", "lists": (5, 64), "opened": False},
    "int8, selected": {"format": "int8", "query_sparse": SELECTED},
    "int8 keys per channel": {},
    "int8 per channel": {"head_dim": 64},
    "fp8": {"window": (5, 200)},
    "fp8 without scales": {},
    "fp8, lists": {"format": "fp8", **LISTS},
    "int4": {},
    "int4, long": {"format": "int4", **LONG},
    "int4, head dim 256": {"format": "int4", "head_dim": 256, "kv_heads": 1, "group": 8},
    "int4, selected": {"format": "int4", "query_sparse": SELECTED},
    "int4 keys per channel, values per 32": {"head_dim": 64},
    "int4 per 32": {},
    "q8_0": {},
    "q4_0": {},
    "q4_0, lists": {"format": "q4_0", **LISTS},
    "q8_0 keys, q4_0 values": {"head_dim": 64},
    "int8 keys, values as they are": {},
    "keys as they are, int4 values": {},
}


@pytest.fixture(scope="module")
def case_of(tools):
    """A case by its name."""

    @functools.cache
    def build(name: str) -> Prefill:
        return packed_prefill_suite.build(tools, seed=sum(map(ord, name)), **(BASE | {"format": name} | CASES[name]))

    return build


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(tools, case_of, name):
    case = case_of(name)
    packed_prefill_suite.compare(tools, case, case.run("mosaic_gpu"))


@pytest.mark.parametrize("name", [name for name in CASES if "selected" in name])
def test_lists_are_those_of_xla(case_of, name):
    """The same blocks for nearly all rows: scores that are nearly equal may change places."""
    ours, theirs = (np.sort(np.asarray(case_of(name).run(how)[2]), axis=-1) for how in ("mosaic_gpu", "xla"))
    assert (ours == theirs).all(-1).mean() > 0.98


# A mutant, one of `packed_suite.CHANGES`: the case that it fails.
MUTANTS = {
    "scales of keys are left out": "int8",
    "scales of values are left out": "int8, lists",
    "scales of the next token": "int8",
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
        packed_prefill_suite.compare(tools, case, packed_suite.changed(case, mutant).run("mosaic_gpu"))


@pytest.mark.parametrize("name", ["int8", "int4", "q8_0", "fp8, lists", "int8, selected"])
def test_bits_do_not_depend_on_when_or_in_which_company(tools, case_of, name):
    case = case_of(name)
    once = case.run("mosaic_gpu")
    for _ in range(10):
        tools.assert_all_same_bits(once, case.run("mosaic_gpu"))
    *others, starts, lengths = case.operands
    kept = jnp.arange(8) == 6
    alone = dataclasses.replace(case, operands=(*others, jnp.where(kept, starts, 0), jnp.where(kept, lengths, 0))).run("mosaic_gpu")
    tools.assert_all_same_bits(once, alone, 6)


@pytest.mark.parametrize("name", ["int8", "q4_0"])
def test_a_cut_does_not_change_bits(tools, case_of, name):
    """Two chunks of a prompt, cut within a page, give what the whole gives."""
    case = case_of(name)
    q, pages, table, starts, lengths = case.operands
    whole = case.run("mosaic_gpu")
    for cut in (1, 77, 160):
        parts = []
        for here, first in ((q[:, :cut], starts), (q[:, cut:], starts + cut)):
            parts.append(dataclasses.replace(case, operands=(here, pages, table, first, lengths)).run("mosaic_gpu"))
        for a, first, second in zip(whole, *parts, strict=True):
            joined = jnp.concatenate([first, second], axis=1)
            tools.assert_same_bits(a[7], joined[7])  # a row without padding


def test_it_is_what_runs_here(tools, case_of):
    tools.assert_all_same_bits(case_of("int8").run("mosaic_gpu"), case_of("int8").picked())
