"""What gather_attention promises besides its values: bits, memory, index arithmetic, clear refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import gather_attention

from pallas_kernels.attention.gather_attention import xla

pytestmark = pytest.mark.bits

SMALL_TILES = xla.Config(tile_tokens=32, rows=2)


@pytest.fixture(scope="module", params=["dense", "list"])
def bits(request, tools):
    """(arrays, op): bfloat16 drafts, dense or over a list, in several tiles."""
    paged = tools.make_paged(seed=5, num_queries=3, dtype="bfloat16")
    keywords = {"sm_scale": paged.sm_scale, "config": SMALL_TILES, "return_block_lse": True}
    if request.param == "list":
        keywords |= {"blocks": tools.random_blocks(2, 8, 2, 24, 17), "block_size": 4}
    return paged.arrays, functools.partial(gather_attention, **keywords)


def _same(tools, some, others, rows=slice(None)):
    for a, b in zip(some, others, strict=True):
        tools.assert_same_bits(a[rows], b[rows])


@pytest.mark.quick("list")
def test_twice_the_same_bits(tools, bits):
    arrays, op = bits
    _same(tools, op(*arrays), op(*arrays))


@pytest.mark.quick("list")
def test_bits_do_not_depend_on_the_width_of_the_table(tools, bits):
    (q, k, v, table, lengths), op = bits
    wide = jnp.pad(table, ((0, 0), (0, 7)), constant_values=-1)
    narrow_out, wide_out = op(q, k, v, table, lengths), op(q, k, v, wide, lengths)
    _same(tools, narrow_out[:2], wide_out[:2])
    tools.assert_same_bits(narrow_out[2], wide_out[2][..., : narrow_out[2].shape[-1]])


def test_bits_do_not_depend_on_company(tools, bits):
    """The same row among other queries, other pages, and lengths from nothing to full tables."""
    (q, k, v, table, lengths), op = bits
    alone = op(q, k, v, table, lengths)
    kept = 5  # 40 tokens, so that its neighbours' loops are both shorter and longer
    others = jnp.arange(8) != kept
    for length in (0, 96):
        changed = op(
            jnp.where(others[:, None, None, None], -q, q),
            k,
            v,
            jnp.where(others[:, None], table[-1], table),
            jnp.where(others, length, lengths),
        )
        _same(tools, alone, changed, kept)


def test_bits_do_not_depend_on_the_place_in_the_batch(tools, bits):
    (q, k, v, table, lengths), op = bits
    turn = functools.partial(jnp.roll, shift=3, axis=0)
    if "blocks" in op.keywords:
        turned_op = functools.partial(op, blocks=turn(op.keywords["blocks"]))
    else:
        turned_op = op
    turned = turned_op(turn(q), k, v, turn(table), turn(lengths))
    _same(tools, [turn(x) for x in op(q, k, v, table, lengths)], turned)


def test_bits_do_not_depend_on_which_pages_hold_the_tokens(tools, bits):
    (q, k, v, table, lengths), op = bits
    order = np.random.default_rng(9).permutation(k.shape[0])
    moved = jnp.where(table >= 0, jnp.asarray(np.argsort(order), jnp.int32)[table], -1)
    _same(tools, op(q, k, v, table, lengths), op(q, k[order], v[order], moved, lengths))


def _compile(tokens: int, **keywords):
    """Compile, without running, a decode of 2 sequences of `tokens` tokens over a pool of as many pages."""
    shape = jax.ShapeDtypeStruct
    pool = shape((2 * tokens // 128, 2, 128, 64), jnp.float32)
    arguments = [shape((2, 1, 8, 64), jnp.float32), pool, pool, shape((2, tokens // 128), jnp.int32), shape((2,), jnp.int32)]
    blocks = keywords.pop("blocks", None)
    if blocks is not None:
        arguments.append(shape((2, 2, blocks), jnp.int32))

    def op(q, k, v, table, lengths, blocks=None):
        return gather_attention(q, k, v, table, lengths, blocks=blocks, sm_scale=0.125, implementation="xla", **keywords)

    return jax.jit(op).lower(*arguments).compile().memory_analysis(), pool.size * 4


@pytest.mark.parametrize("keywords", [{}, {"blocks": 37}, {"blocks": 100, "block_size": 16}], ids=["dense", "pages", "blocks"])
def test_memory_is_bounded_by_the_tile(keywords):
    """At 128K tokens neither the keys of a sequence nor the pool are laid out anywhere: 134 MB of pages, a few of
    temporaries."""
    memory, pool_bytes = _compile(131072, **dict(keywords))
    assert pool_bytes == 2 * 131072 * 2 * 64 * 4
    assert memory.temp_size_in_bytes < 8 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages. Not to the bit: the shapes
    differ."""
    num_pages, page = 2**16 + 2, (2, 128, 128)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2, 2**15)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q = jnp.asarray(4 * rng.standard_normal((1, 1, 4, 128)), jnp.float16)
    for blocks in (None, jnp.array([[[0, 2, 3], [0, 1, 2]]], jnp.int32)):
        op = functools.partial(gather_attention, lengths=jnp.array([500], jnp.int32), sm_scale=128**-0.5, blocks=blocks)
        far, near = op(q, big, big, jnp.array([[*named]], jnp.int32)), op(q, small, small, jnp.array([[0, 1, 2, 3]], jnp.int32))
        tools.assert_rows_close(far[0], near[0], 1e-3)


BAD = {
    "q without heads": ({"q": (2, 1, 32)}, {}, r"needs q \[B,T,H,D\]"),
    "k and v differ": ({"v": (8, 2, 16, 32)}, {}, "same pages, KV heads and page size"),
    "head dims differ": ({"q": (2, 1, 8, 64)}, {}, "head dims equal"),
    "heads no multiple": ({"q": (2, 1, 7, 32)}, {}, "multiple of KV heads"),
    "batches differ": ({"lengths": (3,)}, {}, "same batch"),
    "no pages": ({"table": (2, 0)}, {}, "empty"),
    "block size": ({}, {"block_size": 5}, "block_size 5 does not divide the page size 16"),
    "block size 0": ({}, {"block_size": 0}, "block_size 0"),
    "list without heads": ({"blocks": (2, 4)}, {}, r"blocks must be \[B=2, K=2"),
    "list of other heads": ({"blocks": (2, 8, 4)}, {}, r"blocks must be \[B=2, K=2"),
    "frames without a list": (
        {"block_frames": (2, 2, 4)},
        {},
        r"block_frames must have the shape of blocks .*frames int32\[2, 2, 4\]",
    ),
    "frames of a shorter list": ({"blocks": (2, 2, 4), "block_frames": (2, 2, 3)}, {}, r"block_frames must have .*int32\[2, 2, 3\]"),
    "frames for all heads": ({"blocks": (2, 2, 4), "block_frames": (2, 4)}, {}, r"block_frames must have the shape .*int32\[2, 4\]"),
    "frames of a list per query": (
        {"q": (2, 3, 8, 32), "blocks": (2, 3, 2, 4), "block_frames": (2, 3, 2, 4)},
        *({}, r"one list for all queries; got .*int32\[2, 3, 2, 4\]"),
    ),
    "window of none": ({}, {"window": (4, 0)}, r"window must be .* got \(4, 0\)"),
    "window as list": ({}, {"window": [4, 8]}, r"window must be a tuple"),
    "traced scale": ({}, {"sm_scale": jnp.float32(0.1)}, "sm_scale must be a number known when compiling"),
    "scale that is not a number": ({}, {"sm_scale": float("nan")}, "sm_scale must be a number .* finite, got nan"),
    "another config": (
        {},
        {"config": {"tile_tokens": 8}, "implementation": "xla"},
        "takes a pallas_kernels.attention.gather_attention.xla.Config",
    ),
    "unknown implementation": (
        {},
        {"implementation": "cuda"},
        "'cuda' of gather_attention is unknown; there are mosaic_gpu",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    integers = ("table", "lengths", "blocks", "block_frames")
    shapes = {"q": (2, 1, 8, 32), "k": (9, 2, 16, 32), "v": (9, 2, 16, 32), "table": (2, 4), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in integers else jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        gather_attention(**arrays, **({"sm_scale": 0.1} | keywords))


@pytest.mark.parametrize("name", ["q", "table", "lengths", "blocks", "block_frames"])
def test_wrong_dtype_is_refused(tools, name):
    paged = tools.make_paged(lengths=(5, 6))
    arrays = dict(zip(("q", "k", "v", "table", "lengths"), paged.arrays, strict=True))
    arrays["blocks"] = arrays["block_frames"] = jnp.zeros((2, 2, 1), jnp.int32)
    arrays[name] = arrays[name].astype(jnp.uint8)
    with pytest.raises(ValueError, match="uint8"):
        gather_attention(**arrays, sm_scale=0.1)


@pytest.mark.parametrize("sizes", [{"tile_tokens": 0}, {"rows": -1}, {"rows": 1.5}])
def test_config_validates_itself(sizes):
    with pytest.raises(ValueError, match="must be a positive int"):
        xla.Config(**sizes)
