"""selected_attention that chooses from a shortlist, on a Hopper GPU: lists and attention of the reference, ties, bits.

pytest -m gpu tests/pallas_kernels/attention/selected_attention/test_refined_attention_on_hopper.py
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refined_suite import SIZES, arguments_of, checker

from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention import selected_attention
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(selected_attention, implementation="mosaic_gpu")
BASE = {
    "kv_heads": 4,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 40,
    "dtype": "bfloat16",
    "lengths": (0, 1, 129, 5000, 3000, 5120),
} | SIZES
OF_128 = {"block_size": 128, "shortlist": 16, "budget": 4, "local": 4}
CASES = {
    "cascade:2/16": OF_128,
    "1 bit": OF_128 | {"codes_kind": "keys1"},
    "2 bits, float16, by means": OF_128 | {"codes_kind": "keys2", "dtype": "float16", "kind": "mean"},
    "blocks of 16": {"shortlist": 64, "budget": 16, "local": 32},
    "blocks of 32, groups of 8": {"block_size": 32, "kv_heads": 8, "group": 8},
    "head dim 64": OF_128 | {"head_dim": 64, "group": 4},
    "head dim 256": OF_128 | {"head_dim": 256, "kv_heads": 2, "group": 8},
    "groups of 16": OF_128 | {"kv_heads": 1, "group": 16},
    "4 drafts": OF_128 | {"num_queries": 4},
    "one row": OF_128 | {"lengths": (5120,)},
    "frames": OF_128 | {"framed": True},
    "a page is missing": OF_128 | {"hole": True},
    "equal keys": OF_128 | {"keys": "equal"},
    "a shortlist of 128": {"shortlist": 128, "budget": 40},
    "a shortlist of 256 among more blocks": {"shortlist": 256, "budget": 8, "local": 32},
    "every block in the shortlist": OF_128 | {"shortlist": 256, "budget": 8},
    "every block in the shortlist, head dim 256, a page is missing": OF_128
    | {"head_dim": 256, "kv_heads": 1, "group": 4, "shortlist": 256, "budget": 8, "hole": True},
    "a shortlist longer than a CTA's threads": {"head_dim": 256, "kv_heads": 1, "group": 4, "shortlist": 256, "budget": 20},
    "int8 pages": OF_128 | {"format": "int8"},
    "int8 pages per channel, 4 drafts": OF_128 | {"format": "int8 per channel", "num_queries": 4},
    "fp8 pages, blocks of 16": {"format": "fp8", "shortlist": 64, "budget": 16, "local": 32},
    "int4 pages, one row": OF_128 | {"format": "int4", "lengths": (5120,)},
    "by its own keys": OF_128 | {"codes_kind": None},
    "by its own keys, int8, 4 drafts": OF_128 | {"codes_kind": None, "format": "int8", "num_queries": 4},
    "by its own keys, int4 per channel, frames": OF_128
    | {"codes_kind": None, "format": "int4 keys per channel, values per 32", "framed": True},
    "q8_0 keys, q4_0 values, head dim 64": OF_128 | {"format": "q8_0 keys, q4_0 values", "head_dim": 64, "group": 4},
}


@pytest.fixture(scope="module")
def arguments(tools):
    return arguments_of(tools, {name: BASE | spec for name, spec in CASES.items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    return checker(tools, arguments)


@pytest.mark.parametrize("case", CASES)
def test_it_matches_the_reference(check, case):
    check(KERNEL, case)


@pytest.mark.parametrize("path", ["hopper", dispatch.BLACKWELL])
def test_the_kernel_is_what_is_picked(arguments, path):
    given, keywords, _ = arguments("one row")
    with dispatch.forced(path) if path == dispatch.BLACKWELL else contextlib.nullcontext(), dispatch.listening() as heard:
        selected_attention(*given, **keywords)
    assert heard == {"selected_attention": "mosaic_gpu"}


def test_bits_every_time_and_in_any_company(tools, arguments):
    (q, pages, index, table, lengths), keywords, _ = arguments("4 drafts")
    op = functools.partial(KERNEL, **keywords)
    once = op(q, pages, index, table, lengths)
    for _ in range(20):
        for a, b in zip(once, op(q, pages, index, table, lengths), strict=True):
            tools.assert_same_bits(a, b)
    kept = 3
    others = jnp.arange(len(lengths)) != kept
    changed = jnp.where(others[:, None, None, None], -q, q), jnp.where(others[:, None], table[-1], table), jnp.where(others, 4000, lengths)
    for a, b in zip(once, op(changed[0], pages, index, *changed[1:]), strict=True):
        tools.assert_same_bits(a[kept], b[kept])


@pytest.mark.parametrize(("batch", "tokens"), [(1, 128 << 10), (8, 128 << 10), (1, 1 << 20)])
def test_long_contexts(tools, batch, tokens):
    """As cascade:4/32 has them. A list that is not the reference's has a candidate whose score is as good, but for
    rounding; few have."""
    width, keys = tokens // 128, jax.random.split(jax.random.key(batch), 4)
    shape = (width + 3, 4, 128, 128)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    build = lambda kind: jax.jit(lambda k: jax.lax.map(lambda x: page_index(x, kind=kind, block_size=128), k, batch_size=256))(k)  # noqa: E731
    index, codes = build("bounds"), build("keys4")
    q = jax.random.normal(keys[2], (batch, 1, 28, 128), jnp.bfloat16)
    table = jax.vmap(lambda key: jax.random.permutation(key, width + 3)[:width])(jax.random.split(keys[3], batch)).astype(jnp.int32)
    lengths, pages = tokens - 1000 * jnp.arange(batch, dtype=jnp.int32), Pages(k, v)
    sizes = {"kind": "bounds", "block_size": 128, "budget": 4, "sink": 1, "local": 4, "shortlist": 32, "codes_kind": "keys4"}
    call = functools.partial(selected_attention, q, pages, index, table, lengths, codes=codes, sm_scale=0.3, **sizes)
    out, lse, ids = call(implementation="mosaic_gpu")
    with dispatch.forced("xla"):
        expected = call(implementation="composed")[2]
    same = np.asarray(ids == expected).all(axis=-1)
    assert same.mean() >= 0.9
    ref = {"blocks": ids, "block_size": 128, "sm_scale": 0.3, "implementation": "reference"}
    ref_out, ref_lse = gather_attention(q, pages, table, lengths, **ref)
    tools.assert_rows_close(out, ref_out, 8e-3)
    tools.assert_lse_close(lse, ref_lse)
