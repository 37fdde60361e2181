"""What flash_attention promises besides its values: bits, memory, index arithmetic, clear refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import flash_attention
from quick_cases import rest_long

from pallas_kernels.attention.flash_attention import xla

pytestmark = pytest.mark.bits

SMALL_TILES = xla.Config(query_tile=8, key_tile=32, rows=2)
STARTS = jnp.array([0, 0, 3, 5, 9, 29, 71, 50], jnp.int32)


@pytest.fixture(scope="module", params=rest_long(["float32", "bfloat16"], "float32"))
def bits(request, tools):
    """(arrays, op): chunks of 24 tokens at any start, in several tiles of queries and keys."""
    paged = tools.make_paged(seed=6, num_queries=24, dtype=request.param)
    return (*paged.arrays[:4], STARTS, paged.lengths), functools.partial(flash_attention, sm_scale=paged.sm_scale, config=SMALL_TILES)


@pytest.mark.parametrize("against", ["again", "a wider table", "company", "other pages", "later tokens"])
def test_bits_stand(tools, bits, against):
    arrays, op = bits
    tools.assert_chunk_bits_stand(against, op, arrays)


def test_bits_do_not_depend_on_the_other_queries(tools, bits):
    """A query's row is the same whatever stands in the rest of its chunk and its tile."""
    (q, *arrays), op = bits
    for kept in (0, 5, 23):
        others = (jnp.arange(24) != kept)[:, None, None]
        tools.assert_all_same_bits(op(q, *arrays), op(jnp.where(others, 7 * q[:, ::-1], q), *arrays), np.s_[:, kept])


def _compile(num_queries: int, tokens: int, heads: int, kv_heads: int, head_dim: int):
    """Compile, without running, one chunk of one sequence."""
    shape = jax.ShapeDtypeStruct
    pool = shape((tokens // 128, kv_heads, 128, head_dim), jnp.float32)
    position = shape((1,), jnp.int32)
    table = shape((1, tokens // 128), jnp.int32)
    op = functools.partial(flash_attention, sm_scale=0.1, config=xla.Config(), implementation="xla")
    compiled = jax.jit(op).lower(shape((1, num_queries, heads, head_dim), jnp.float32), pool, pool, table, position, position).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_128k_tokens_at_once_take_no_t_by_s():
    """T = S = 131072 would be 64 GiB of logits. Two copies of q and out (16 MiB each) are allowed, and 16 MiB for
    tiles."""
    assert _compile(131072, 131072, heads=1, kv_heads=1, head_dim=32) < 5 * 16 * 2**20


def test_a_chunk_over_128k_tokens_takes_tiles():
    """512 queries of 8 heads: logits of the chunk would be 2 GiB and its keys 64 MiB; a tile of logits is 4 MiB."""
    assert _compile(512, 131072, heads=8, kv_heads=2, head_dim=64) < 48 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages. Not to the bit: the shapes
    differ."""
    num_pages, page = 2**16 + 2, (2, 128, 128)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2, 2**15)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q = jnp.asarray(4 * rng.standard_normal((1, 40, 4, 128)), jnp.float16)
    op = functools.partial(flash_attention, starts=jnp.array([460], jnp.int32), lengths=jnp.array([500], jnp.int32), sm_scale=128**-0.5)
    far, near = op(q, big, big, jnp.array([[*named]], jnp.int32)), op(q, small, small, jnp.array([[0, 1, 2, 3]], jnp.int32))
    tools.assert_rows_close(far[0], near[0], 1e-3)


BAD = {
    "q without heads": ({"q": (2, 5, 32)}, {}, r"needs q \[B,T,H,D\]"),
    "k and v differ": ({"v": (8, 2, 16, 32)}, {}, "same pages, KV heads and page size"),
    "heads no multiple": ({"q": (2, 5, 7, 32)}, {}, "multiple of KV heads"),
    "starts of another batch": ({"starts": (3,)}, {}, "same batch"),
    "no queries": ({"q": (2, 0, 8, 32)}, {}, "empty"),
    "window of none": ({}, {"window": (4, 0)}, r"window must be .* got \(4, 0\)"),
    "another config": (
        {},
        {"config": 512, "implementation": "xla"},
        "takes a pallas_kernels.attention.flash_attention.xla.Config, got 512",
    ),
    "unknown implementation": ({}, {"implementation": "triton"}, "'triton' of flash_attention is unknown; there are mosaic_gpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    integers = ("table", "starts", "lengths")
    shapes = {"q": (2, 5, 8, 32), "k": (9, 2, 16, 32), "v": (9, 2, 16, 32), "table": (2, 4), "starts": (2,), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in integers else jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        flash_attention(**arrays, **({"sm_scale": 0.1} | keywords))


@pytest.mark.parametrize("sizes", [{"query_tile": 0}, {"key_tile": -1}, {"rows": "1"}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(**sizes)
