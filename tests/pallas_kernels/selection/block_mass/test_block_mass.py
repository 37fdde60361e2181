"""The suite of block_mass: every implementation against the reference, the reference against JAX, mutants against the
suite, promises."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import block_mass, flash_attention
from quick_cases import rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.selection.block_mass import xla

SMALL_TILES = functools.partial(block_mass, implementation="xla", config=xla.Config(query_tile=8, key_tile=32))
"""The base of the mutants: with tiles this small the inputs below take several."""

IMPLEMENTATIONS = {
    name: SMALL_TILES if name == "xla" else functools.partial(block_mass, implementation=name)
    for name in dispatch.available("block_mass")
    if name not in ("mosaic_gpu", "reference")  # the former has a suite of its own
}
OTHER_CONFIGS = {"default": None, "3 rows, odd tiles": xla.Config(query_tile=7, key_tile=1, rows=3), "8 rows": xla.Config(rows=8)}

AT_END = (0, 0, 0, 0, 0, 16, 71, 72)
"""Chunks of 24 tokens that end where sequences of `make_paged` end; the short ones have padding after them."""
ANYWHERE = (0, 0, 3, 5, 9, 29, 80, 50)
"""The last one has keys after it that must not be seen."""

CASES = {
    "chunks at the end": {},
    # The next two are alone in finding a mutant each, and take the programs of the first.
    "a page is missing": {"hole": True},
    "lse of fewer keys, some of none": {"lse_of": "few", "starts": ANYWHERE},
    "chunks anywhere, blocks of 4": {"starts": ANYWHERE, "block_size": 4},
    "the last queries": {"first_query": "late", "block_size": 8},
    "the last queries, chunks anywhere": {"starts": ANYWHERE, "first_query": "late"},
    "queries from 20 on": {"first_query": 20, "starts": ANYWHERE, "block_size": 1},
    "one head": {"kv_heads": 1, "group": 1, "head_dim": 64},
    "one KV head of 8": {"kv_heads": 1, "group": 8, "starts": ANYWHERE},
    "groups of 7": {"group": 7, "head_dim": 128},
    "8 KV heads": {"kv_heads": 8, "group": 1},
    "bfloat16": {"dtype": "bfloat16", "starts": ANYWHERE},
    "float16": {"dtype": "float16"},
    "equal scores": {"keys": "equal"},
    "huge logits": {"keys": "huge"},
    "denormal keys": {"keys": "denormal"},
    "one token": {"num_queries": 1, "starts": (0, 0, 14, 15, 16, 39, 94, 95)},
    "pages of 4, one row": {"lengths": (29,), "page_size": 4, "width": 9, "num_queries": 29, "starts": (0,)},
}


@pytest.fixture(scope="module")
def suite(suite_of):
    return suite_of(CASES, rows=1e-5, each=3e-5, huge=5e-3, num_queries=24, starts=AT_END, page_size=16)


@pytest.mark.quick_but("xla-pages of 4, one row", "xla-groups of 7", "xla-bfloat16", "xla-chunks at the end")
@pytest.mark.parametrize(
    "case",
    rest_long(
        CASES,
        "chunks at the end",
        "groups of 7",
        "one token",
        "pages of 4, one row",
        "queries from 20 on",
        "bfloat16",
        "chunks anywhere, blocks of 4",
        "lse of fewer keys, some of none",
    ),
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(suite, name, case):
    suite.check(IMPLEMENTATIONS[name], case)


@pytest.mark.quick("default-bfloat16", "3 rows, odd tiles-queries from 20 on", "8 rows-bfloat16")
@pytest.mark.parametrize("case", ["queries from 20 on", "bfloat16"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(suite, config, case):
    suite.check(functools.partial(block_mass, implementation="xla", config=OTHER_CONFIGS[config]), case)


def test_mutant_fails(tools, suite, mutant):
    tools.must_fail(suite.check, mutant(SMALL_TILES), CASES)


@pytest.fixture(scope="module")
def whole(tools):
    """Two whole sequences of 96 tokens: (arguments but lse and first_query, keys laid out [B, S, K, D], scale)."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    keys = paged.k[paged.page_table].swapaxes(2, 3).reshape(2, 96, 2, 32)
    return (paged.q, paged.k, paged.page_table, jnp.zeros(2, jnp.int32), paged.lengths), keys, paged.sm_scale


@pytest.mark.parametrize("first", [0, 37])
def test_reference_sums_the_weights_of_jax(tools, whole, first):
    """Against jax.nn.softmax of explicit logits; and against jax.nn.dot_product_attention, whose values say which block
    a key is of."""
    arrays, keys, sm_scale = whole
    logits = jnp.einsum("bthd,bshd->bhts", arrays[0], jnp.repeat(keys, 4, axis=2), precision="highest") * sm_scale
    logits = jnp.where(jnp.tri(96, dtype=bool), logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1).swapaxes(1, 2)
    of = functools.partial(block_mass, *arrays, lse, jnp.full(2, first, jnp.int32), block_size=8, sm_scale=sm_scale)
    found = of(implementation="reference")
    by_softmax = jax.nn.softmax(logits, axis=-1)[:, :, first:].sum(2).reshape(2, 8, 12, 8).sum(3)
    tools.assert_rows_close(found, by_softmax, 1e-5)
    member = jnp.broadcast_to((jnp.arange(96)[:, None] // 8 == jnp.arange(32)).astype(jnp.float32)[None, :, None], keys.shape)
    with jax.default_matmul_precision("highest"):
        shares = jax.nn.dot_product_attention(arrays[0], keys, member, is_causal=True, scale=sm_scale)
    tools.assert_rows_close(found, shares[:, first:, :, :12].sum(1), 1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_chunks_add_up_to_the_whole(tools, whole, name):
    """With the lse of flash_attention every query gives 1 in all, and a prompt's mass is the sum of its chunks'."""
    (q, k, table, zeros, lengths), _, sm_scale = whole
    op = functools.partial(IMPLEMENTATIONS[name], first_query=zeros, block_size=16, sm_scale=sm_scale)
    lse = flash_attention(q, k, k, table, zeros, lengths, sm_scale=sm_scale)[1]
    mass = op(q, k, table, zeros, lengths, lse)
    np.testing.assert_allclose(mass.sum(2), 96, rtol=1e-5)
    parts = [op(q[:, a:b], k, table, zeros + a, zeros + b, lse[:, a:b]) for a, b in ((0, 31), (31, 33), (33, 96))]
    tools.assert_rows_close(sum(parts), mass, 1e-5)


@pytest.mark.parametrize("against", ["again", "a wider table", "company", "other pages", "later tokens"])
@pytest.mark.parametrize("dtype", rest_long(["float32", "bfloat16"], "bfloat16"))
def test_bits_stand(tools, against, dtype):
    paged = tools.make_paged(seed=6, num_queries=24, dtype=dtype)
    starts = jnp.array([0, 0, 3, 5, 9, 29, 71, 50], jnp.int32)
    arrays = (*paged.arrays[:4], starts, paged.lengths)
    lse = flash_attention(*arrays, sm_scale=paged.sm_scale)[1]
    config = xla.Config(query_tile=8, key_tile=32, rows=2)

    def op(q, k, v, table, starts, lengths):
        mass = block_mass(q, k, table, starts, lengths, lse, starts + 3, block_size=8, sm_scale=paged.sm_scale, config=config)
        return (mass[:, :, :12],)

    tools.assert_chunk_bits_stand(against, op, arrays)


def _struct(num_queries: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    """Arguments to be: one chunk of one sequence, float32."""
    shape, position = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1,), jnp.int32)
    return {
        "q": shape((1, num_queries, heads, head_dim), jnp.float32),
        "k": shape((tokens // 128, kv_heads, 128, head_dim), jnp.float32),
        "table": shape((1, tokens // 128), jnp.int32),
        "starts": position,
        "lengths": position,
        "lse": shape((1, num_queries, heads), jnp.float32),
        "first_query": position,
    }


def test_a_chunk_over_128k_tokens_takes_tiles():
    """2048 queries of 8 heads: their weights would be 8 GiB, their sums by block 512 MiB; a tile of weights is 4 MiB, q
    4 MiB."""
    op = functools.partial(block_mass, block_size=16, sm_scale=0.1, config=xla.Config(), implementation="xla")
    compiled = jax.jit(op).lower(**_struct(2048, 131072, heads=8, kv_heads=2, head_dim=64)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 48 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages."""
    num_pages, page = 2**16 + 2, (2, 128, 128)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2, 2**15)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q = jnp.asarray(4 * rng.standard_normal((1, 40, 4, 128)), jnp.float16)
    rest = (jnp.array([460], jnp.int32), jnp.array([500], jnp.int32), jnp.full((1, 40, 4), 20.0), jnp.zeros(1, jnp.int32))
    op = functools.partial(block_mass, block_size=64, sm_scale=128**-0.5)
    far, near = op(q, big, jnp.array([[*named]], jnp.int32), *rest), op(q, small, jnp.array([[0, 1, 2, 3]], jnp.int32), *rest)
    tools.assert_rows_close(far, near, 1e-5)


def test_a_query_whose_lse_is_nan_shows(whole):
    """Only padding is forgiven: what a real query lacks is not hidden."""
    (q, k, table, zeros, lengths), _, sm_scale = whole
    lse = jnp.zeros(q.shape[:3]).at[0, 50, 3].set(jnp.nan)
    mass = SMALL_TILES(q, k, table, zeros, lengths, lse, zeros, block_size=16, sm_scale=sm_scale)
    assert jnp.isnan(mass[0, 3, :4]).all()
    assert jnp.isfinite(mass[:, :3]).all()


BAD = {
    "block size": ({}, {"block_size": 5}, "block_size 5 does not divide the page size 16"),
    "no block size": ({}, {"block_size": 0}, "block_size 0 does not divide"),
    "a block of 2.0": ({}, {"block_size": 2.0}, "block_size 2.0 does not divide"),
    "q without heads": ({"q": (2, 5, 32)}, {}, r"needs q \[B,T,H,D\], pages, table"),
    "heads no multiple": ({"q": (2, 5, 7, 32), "lse": (2, 5, 7)}, {}, "multiple of KV heads"),
    "lse by head first": ({"lse": (2, 8, 5)}, {}, r"lse must be float32 \[B=2, T=5, H=8\]"),
    "starts of another batch": ({"starts": (3,)}, {}, "same batch"),
    "first_query of another batch": ({"first_query": (3,)}, {}, "first_query must have the same batch"),
    "no queries": ({"q": (2, 0, 8, 32)}, {}, "no axis of q and table may be empty"),
    "a traced scale": ({}, {"sm_scale": "1"}, "sm_scale must be a number"),
    "another config": ({}, {"config": 512, "implementation": "xla"}, "takes a pallas_kernels.selection.block_mass.xla.Config, got 512"),
    "config of the reference": ({}, {"config": 512, "implementation": "reference"}, "'reference' of block_mass takes no config, got 512"),
    "unknown implementation": ({}, {"implementation": "triton"}, "'triton' of block_mass is unknown; there are"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    shapes = {"q": (2, 5, 8, 32), "k": (9, 2, 16, 32), "table": (2, 4), "lse": (2, 5, 8)} | shapes
    shapes = dict.fromkeys(("starts", "lengths", "first_query"), (2,)) | shapes
    arrays = {name: jnp.zeros(shape, jnp.float32 if name in ("q", "k", "lse") else jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        block_mass(**arrays, **({"block_size": 8, "sm_scale": 0.1} | keywords))


def test_lse_is_float32(suite):
    given, static = suite.arguments("one token")
    with pytest.raises(ValueError, match="lse must be float32"):
        block_mass(**given | {"lse": given["lse"].astype(jnp.bfloat16)}, **static)


@pytest.mark.parametrize("sizes", [{"query_tile": 0}, {"key_tile": -1}, {"rows": "1"}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(**sizes)
