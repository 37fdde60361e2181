"""The suite of block_sparse_attention: every implementation against the reference, the reference against JAX, and
mutants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_sparse_mutants import MUTANTS
from paging import block_sparse_attention, flash_attention
from quick_cases import rest_long

from pallas_kernels.attention.block_sparse_attention import xla
from pallas_kernels.core import dispatch

SMALL_STEPS = functools.partial(block_sparse_attention, implementation="xla", config=xla.Config(key_tile=16))
"""The base of the mutants: with steps this small the inputs below take several."""

IMPLEMENTATIONS = {
    name: SMALL_STEPS if name == "xla" else functools.partial(block_sparse_attention, implementation=name)
    for name in dispatch.available("block_sparse_attention")
    if name not in ("mosaic_gpu", "reference")  # the former has a suite of its own
}
OTHER_CONFIGS = {"default": None, "odd steps, 3 tiles at once": xla.Config(key_tile=25, rows=3)}

AT_END = (0, 0, 0, 0, 0, 16, 71, 72)
ANYWHERE = (0, 0, 3, 5, 9, 29, 80, 50)
"""The last one has keys after it that must not be seen."""

CASES = {
    "chunks at the end": {},
    "chunks anywhere": {"starts": ANYWHERE, "window": (5, 20)},
    "lists only": {"starts": ANYWHERE, "window": None},
    "window of one token": {"window": (0, 1)},
    "tiles that do not divide the chunk": {"query_tile": 7},
    "one tile": {"query_tile": 24, "lists": 3, "starts": ANYWHERE},
    "tiles of one query": {"query_tile": 1},
    "small blocks": {"block_size": 4, "lists": 14},
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
    "a page is missing": {"hole": True, "window": None},
}


SPARSE = {"starts": AT_END, "window": (3, 9), "block_size": 8, "query_tile": 8, "lists": 6}
"""Of cases that do not say."""


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = {"num_queries": 24, **SPARSE} | CASES[case]
        given = {name: spec.pop(name) for name in SPARSE}
        return tools.tiles_with_lists(tools.make_paged(seed=sum(map(ord, case)), **spec), **given)

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that both implementations and mutants face."""

    return tools.chunk_checker(arguments, functools.partial(block_sparse_attention, implementation="reference"))


QUICK = (
    "chunks anywhere",
    "groups of 7",
    "tiles that do not divide the chunk",
    "lists only",
    "window of one token",
    "tiles of one query",
    "bfloat16",
    "one token",
    "one KV head of 8",
)


@pytest.mark.quick_but(
    "xla-groups of 7",
    "xla-bfloat16",
    "xla-tiles of one query",
    "xla-one KV head of 8",
    "xla-lists only",
    "xla-window of one token",
    "xla-one token",
)
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(check, name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.quick_but(
    "default-tiles that do not divide the chunk",
    "default-bfloat16",
    "odd steps, 3 tiles at once-bfloat16",
    "odd steps, 3 tiles at once-tiles that do not divide the chunk",
)
@pytest.mark.parametrize("case", ["chunks anywhere", "tiles that do not divide the chunk", "bfloat16"])
@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_xla_configs_match_reference(check, config, case):
    check(functools.partial(block_sparse_attention, implementation="xla", config=OTHER_CONFIGS[config]), case)


@pytest.mark.parametrize("window", [None, (5, 20)])
def test_reference_is_masked_attention(tools, window):
    """Against jax.nn.dot_product_attention with a mask written out here, on contiguous keys; its LSE against
    logsumexp."""
    paged = tools.make_paged(lengths=(96, 96), num_queries=96)
    blocks = np.asarray(tools.ragged_lists(3, (2, 12, 8), 12, 5)).copy()
    blocks[..., 0] = np.where((blocks == 0).any(-1), blocks[..., 0], 0)  # every query reads something
    op = functools.partial(block_sparse_attention, block_size=8, query_tile=8, window=window, sm_scale=paged.sm_scale)
    arrays = (*paged.arrays[:4], jnp.zeros(2, jnp.int32), paged.lengths)
    out, lse = op(*arrays, blocks=jnp.asarray(blocks), implementation="reference")
    mask = np.zeros((2, 8, 96, 96), bool)
    for row, head, t, s in np.ndindex(mask.shape):
        near = window is not None and (s < window[0] or t - s < window[1])
        mask[row, head, t, s] = s <= t and (near or s // 8 in blocks[row, t // 8, head])
    k, v = (x[paged.page_table].swapaxes(2, 3).reshape(2, 96, 2, 32) for x in (paged.k, paged.v))
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(paged.q, k, v, mask=jnp.asarray(mask), scale=paged.sm_scale)
    tools.assert_rows_close(out, theirs, 1e-5)
    logits = jnp.einsum("bthd,bshd->bhts", paged.q, jnp.repeat(k, 4, axis=2), precision="highest") * paged.sm_scale
    tools.assert_lse_close(lse, jax.nn.logsumexp(jnp.where(mask, logits, -jnp.inf), axis=-1).swapaxes(1, 2))


@pytest.mark.parametrize("window", [None, (5, 20)])
def test_every_block_listed_is_causal_attention(tools, window):
    paged = tools.make_paged(num_queries=24)
    arrays = (*paged.arrays[:4], jnp.asarray(ANYWHERE, jnp.int32), paged.lengths)
    everything = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[::-1], (8, 3, 8, 12))
    out, lse = SMALL_STEPS(*arrays, blocks=everything, block_size=8, query_tile=8, window=window, sm_scale=paged.sm_scale)
    dense, dense_lse = flash_attention(*arrays, sm_scale=paged.sm_scale)
    tools.assert_rows_close(out, dense, 1e-5)
    tools.assert_lse_close(lse, dense_lse)


def test_empty_lists_are_windowed_attention(tools):
    paged = tools.make_paged(num_queries=24)
    arrays = (*paged.arrays[:4], jnp.asarray(ANYWHERE, jnp.int32), paged.lengths)
    empty = jnp.full((8, 3, 8, 1), -1, jnp.int32)
    out, lse = SMALL_STEPS(*arrays, blocks=empty, block_size=8, query_tile=8, window=(3, 9), sm_scale=paged.sm_scale)
    windowed, windowed_lse = flash_attention(*arrays, window=(3, 9), sm_scale=paged.sm_scale)
    tools.assert_rows_close(out, windowed, 1e-5)
    tools.assert_lse_close(lse, windowed_lse)


@pytest.mark.quick_but("-1 in the table wraps")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, functools.partial(MUTANTS[mutant], SMALL_STEPS), [*QUICK, *CASES])


# What it promises besides its values.


def test_bits_do_not_depend_on_widths_or_company(tools, arguments):
    arrays, keywords = arguments("chunks anywhere")
    keywords = dict(keywords)
    (q, k, v, table, starts, lengths), blocks = arrays, keywords.pop("blocks")
    first = SMALL_STEPS(*arrays, blocks=blocks, **keywords)
    again = SMALL_STEPS(*arrays, blocks=blocks, **keywords)
    wide = SMALL_STEPS(
        *(q, k, v, jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1), starts, lengths),
        **{"blocks": jnp.pad(blocks, ((0, 0),) * 3 + ((0, 9),), constant_values=-1), **keywords},
    )
    others = jnp.arange(8) != 7
    company = SMALL_STEPS(
        *(jnp.where(others[:, None, None, None], -q, q), k, v, table, starts, jnp.where(others, 0, lengths)),
        **{"blocks": jnp.where(others[:, None, None, None], -1, blocks), **keywords},
    )
    moved = SMALL_STEPS(q, *tools.moved_pages(k, v, table), starts, lengths, blocks=blocks, **keywords)
    for other in (again, wide, moved):
        tools.assert_all_same_bits(first, other)
    tools.assert_all_same_bits(first, company, 7)


def test_128k_keys_take_a_step():
    """A chunk of 512 queries of 8 heads over 128K keys, lists of 128 blocks: a step holds 8 heads x 512 keys, and no
    more than a few."""
    shape = jax.ShapeDtypeStruct
    pool, position = shape((1024, 2, 128, 64), jnp.float32), shape((1,), jnp.int32)
    arrays = (shape((1, 512, 8, 64), jnp.float32), pool, pool, shape((1, 1024), jnp.int32), position, position)
    op = functools.partial(block_sparse_attention, block_size=64, query_tile=128, window=(64, 1024), sm_scale=0.1)
    compiled = jax.jit(op).lower(*arrays, blocks=shape((1, 4, 8, 128), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 24 * 2**20


BAD = {
    "block size": ({}, {"block_size": 5}, "block_size 5 does not divide the page size 16"),
    "query tile": ({}, {"query_tile": 0}, "query_tile must be at least 1 query, got 0"),
    "query tile that is no int": ({}, {"query_tile": 4.0}, r"query_tile must be an int, got 4\.0"),
    "lists of too few tiles": ({"blocks": (2, 1, 8, 3)}, {}, r"blocks must be \[B=2, C=2 tiles of 4 queries, H=8"),
    "lists per KV head": ({"blocks": (2, 2, 2, 3)}, {}, r"blocks must be \[B=2, C=2"),
    "lists of no width": ({"blocks": (2, 2, 8, 0)}, {}, "W >= 1"),
    "window": ({}, {"window": (1, 0)}, "window must be a tuple"),
    "head dims": ({"q": (2, 5, 8, 16)}, {}, "head dims equal"),
    "config": ({}, {"config": 3}, "takes a pallas_kernels.attention.block_sparse_attention.xla.Config"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    integers = ("table", "starts", "lengths", "blocks")
    shapes = {"q": (2, 5, 8, 32), "k": (9, 2, 16, 32), "v": (9, 2, 16, 32), "table": (2, 4), "starts": (2,), "lengths": (2,)} | shapes
    shapes = {"blocks": (2, 2, 8, 3)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in integers else jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**arrays, **({"block_size": 8, "query_tile": 4, "sm_scale": 0.1} | keywords))


def test_lists_are_int32(arguments):
    arrays, keywords = arguments("one token")
    with pytest.raises(ValueError, match="blocks must be int32"):
        block_sparse_attention(*arrays, **keywords | {"blocks": keywords["blocks"].astype(jnp.int16)})


@pytest.mark.parametrize("sizes", [{"key_tile": 0}, {"rows": "1"}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(**sizes)
