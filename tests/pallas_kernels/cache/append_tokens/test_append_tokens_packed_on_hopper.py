"""append_tokens over packed pages on a Hopper GPU: the bits of `xla` there, also of many random pages; bits twice; in
place.

pytest -m gpu tests/pallas_kernels/cache/append_tokens/test_append_tokens_packed_on_hopper.py
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import packed_append_suite as suite
import pytest
from packed_append_suite import CASES, Case, arguments, check

from pallas_kernels.cache.append_tokens import append_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
MANY = {"starts": (127,) * 16, "kv_heads": 8, "head_dim": 128, "page_size": 128, "width": 1, "kinds": (("bounds", 128),)}


def kernel(*arrays, **keywords):
    """Compiled, as a step has it."""
    keywords |= {"implementation": "mosaic_gpu"}
    frames = keywords.pop("frames", None)
    return jax.jit(functools.partial(append_tokens, **keywords))(*arrays, frames=frames)


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_xla(case):
    check(kernel, CASES[case])


@pytest.mark.parametrize("format", ["int8", "int8 per channel", "fp8", "fp8 without scales", "int4", "int4 per 32", "q8_0", "q4_0"])
def test_two_million_numbers_have_the_bits_of_xla(format):
    check(kernel, Case(format, **MANY))


@pytest.mark.parametrize("kind", ["keys1", "keys2", "keys4", "keys8"])
def test_codes_of_two_million_keys_have_the_bits_of_xla(kind):
    """Keys of int8 pages often lie halfway between two levels."""
    check(kernel, Case("int8", **MANY | {"kinds": ((kind, 128),)}))


def test_bits_twice():
    once, again = (jax.tree.leaves(suite.run(kernel, Case("int8", **MANY))) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("format", ["int8", "q4_0"])
def test_a_donated_pool_is_not_copied(format):
    case = Case(format, **MANY)
    *given, _ = arguments(case)
    op = functools.partial(append_tokens, kinds=case.named_kinds, implementation="mosaic_gpu")
    memory = jax.jit(op, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in (given[0].k, given[0].v, given[0].open.k, given[0].open.v))
    assert memory.temp_size_in_bytes < 2**20
