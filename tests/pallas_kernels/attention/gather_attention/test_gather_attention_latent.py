"""gather_attention over latent pages, where V is a view of K: the first columns of the keys. One KV head, every query
head in its group."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from paging import gather_attention
from quick_cases import rest_long

from pallas_kernels.attention.gather_attention import xla
from pallas_kernels.core import merge

SMALL_TILES = functools.partial(gather_attention, implementation="xla", config=xla.Config(tile_tokens=32, rows=1))

# inputs of `make_paged`, then: value_dim; blocks = (listed places, block size) or None for dense; window.
CASES = {
    "dense": {"head_dim": 48, "value_dim": 32},
    "drafts, tokens": {"head_dim": 48, "value_dim": 32, "num_queries": 3, "blocks": (70, 1)},
    "drafts, window, blocks of 4, huge logits": {"head_dim": 24, "value_dim": 16, "num_queries": 3, "blocks": (17, 4)}
    | {"window": (5, 20), "keys": "huge"},
    "bfloat16 tokens": {"head_dim": 48, "value_dim": 32, "dtype": "bfloat16", "blocks": (40, 1)},
    "one float16 head, a page is missing": {"group": 1, "head_dim": 20, "value_dim": 16, "blocks": (40, 1)}
    | {"hole": True, "dtype": "float16"},
    "two KV heads, all columns": {"kv_heads": 2, "group": 7, "head_dim": 32, "value_dim": 32, "blocks": (17, 4)},
    "DeepSeek-V3.2's shape": {"lengths": (300, 129), "page_size": 128, "width": 3, "group": 128, "head_dim": 576, "value_dim": 512}
    | {"dtype": "bfloat16", "blocks": (150, 1)},
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (q, k, table, lengths), keywords of the op."""

    @functools.cache
    def build(case: str):
        spec = {"kv_heads": 1, "group": 6} | CASES[case]
        window, blocks, value_dim = (spec.pop(name, None) for name in ("window", "blocks", "value_dim"))
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        keywords = {"sm_scale": paged.sm_scale, "window": window, "value_dim": value_dim}
        if blocks is not None:
            width, size = blocks
            num_blocks = paged.page_table.shape[1] * paged.k.shape[2] // size
            keywords |= {"blocks": tools.random_blocks(1, len(paged.lengths), paged.k.shape[1], num_blocks, width), "block_size": size}
        return (paged.q, paged.k, None, paged.page_table, paged.lengths), keywords

    return build


@pytest.mark.quick_but("DeepSeek-V3.2's shape", "dense")
@pytest.mark.parametrize(
    "case", rest_long(CASES, "DeepSeek-V3.2's shape", "dense", "drafts, window, blocks of 4, huge logits", "bfloat16 tokens")
)
def test_matches_reference(check, case):
    check(SMALL_TILES, case)


def test_picked_where_no_kernel_does_it(tools, arguments):
    arrays, keywords = arguments("drafts, tokens")
    for a, b in zip(gather_attention(*arrays, **keywords), gather_attention(*arrays, **keywords, implementation="xla"), strict=True):
        tools.assert_same_bits(a, b)


def test_is_the_first_columns_of_attention_to_the_keys_themselves(tools, arguments):
    (q, k, _, table, lengths), keywords = arguments("drafts, tokens")
    value_dim = keywords["value_dim"]
    out, lse = gather_attention(q, k, None, table, lengths, **keywords)
    whole, whole_lse = gather_attention(q, k, k, table, lengths, **keywords | {"value_dim": None})
    tools.assert_rows_close(out, whole[..., :value_dim], 1e-6)
    tools.assert_lse_close(lse, whole_lse)


def test_reference_is_attention(tools):
    """Against jax.nn.dot_product_attention on contiguous latents, whose first columns are its values."""
    paged = tools.make_paged(lengths=(96, 17, 40), kv_heads=1, group=8, head_dim=48)
    k = jnp.nan_to_num(paged.k[paged.page_table].swapaxes(2, 3).reshape(3, 96, 1, 48))
    arrays = (paged.q, paged.k, None, paged.page_table, paged.lengths)
    out, _ = gather_attention(*arrays, value_dim=32, sm_scale=paged.sm_scale, implementation="reference")
    mask = jnp.arange(96) < paged.lengths[:, None, None, None]
    v = k * (jnp.arange(48) < 32)  # theirs wants V as wide as K
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(paged.q, k, v, mask=mask, scale=paged.sm_scale)
    tools.assert_rows_close(out, theirs[..., :32], 1e-5)


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _zeros(*arrays, **keywords):
    return tuple(jnp.zeros_like(x) for x in SMALL_TILES(*arrays, **keywords))


def _columns(first):
    """V read from `value_dim` columns that start `first` columns late, or are the last ones."""

    def op(q, k, v, *arrays, value_dim, **keywords):
        start = k.shape[3] - value_dim if first is None else first
        out, *lses = SMALL_TILES(q, k, k, *arrays, **keywords)
        return jnp.roll(out, -start, axis=3)[..., :value_dim], *lses

    return op


def _rotated_part_unread(q, *arrays, value_dim, **keywords):
    return SMALL_TILES(q * (jnp.arange(q.shape[3]) < value_dim), *arrays, value_dim=value_dim, **keywords)


def _scaled_by_value_dim(*arrays, sm_scale, value_dim, **keywords):
    return SMALL_TILES(*arrays, sm_scale=value_dim**-0.5, value_dim=value_dim, **keywords)


def _keys_not_first_heads(q, k, *arrays, **keywords):
    return SMALL_TILES(q, jnp.flip(k, axis=1), *arrays, **keywords)


def _first_listed_dropped(*arrays, blocks=None, **keywords):
    return SMALL_TILES(*arrays, blocks=None if blocks is None else blocks.at[..., 1].set(-1), **keywords)


def _read_twice(*arrays, **keywords):
    out, lse, block_lse = SMALL_TILES(*arrays, **keywords)
    again, lse_again, _ = SMALL_TILES(*arrays[:3], arrays[3].at[:, 1:].set(-1), arrays[4], **keywords)
    return *merge.merge_attention([out, again], [lse, lse_again]), block_lse


def _length_off(by):
    def op(q, k, v, table, lengths, **keywords):
        return SMALL_TILES(q, k, v, table, jnp.maximum(lengths + by, 0), **keywords)

    return op


MUTANTS = {
    "zeros": _zeros,
    "V one column late": _columns(1),
    "V from the last columns": _columns(None),
    "rotated part unread": _rotated_part_unread,
    "scale 1/sqrt(value_dim)": _scaled_by_value_dim,
    "keys of another head": _keys_not_first_heads,
    "one token dropped": _first_listed_dropped,
    "one page doubled": _read_twice,
    "length one short": _length_off(-1),
    "length one long": _length_off(1),
}


@pytest.mark.quick_but("keys of another head")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


@pytest.mark.parametrize("blocks", [None, 2048], ids=["dense", "2048 tokens"])
def test_the_pool_is_neither_copied_nor_sliced(blocks):
    """128K tokens of latents, 151 MB in bfloat16: temporaries are a tile's."""
    shape, tokens = jax.ShapeDtypeStruct, 131072
    pool = shape((tokens // 128, 1, 128, 576), jnp.bfloat16)
    arguments = [shape((1, 1, 128, 576), jnp.bfloat16), pool, shape((1, tokens // 128), jnp.int32), shape((1,), jnp.int32)]
    listed = {} if blocks is None else {"blocks": shape((1, 1, blocks), jnp.int32)}

    def op(q, k, table, lengths, blocks=None):
        keywords = {"value_dim": 512, "sm_scale": 192**-0.5, "implementation": "xla"}
        return gather_attention(q, k, None, table, lengths, blocks=blocks, block_size=1 if listed else None, **keywords)

    memory = jax.jit(op).lower(*arguments, **listed).compile().memory_analysis()
    assert pool.size * 2 == 150_994_944
    assert memory.temp_size_in_bytes < 12 * 2**20


def test_pool_past_2_to_the_31_elements(tools):
    """Tokens of the last pages of a pool of more than 2^31 elements read as in a pool of three pages."""
    num_pages, page = 2**31 // (128 * 576) + 3, (1, 128, 576)
    rng = np.random.default_rng(0)
    named = {number: rng.standard_normal(page).astype(np.float16) for number in (num_pages - 1, 1, num_pages - 2)}
    big, small = tools.huge_pool(num_pages, page, named), jnp.stack([jnp.asarray(x) for x in named.values()])
    assert big.size > 2**31
    q = jnp.asarray(4 * rng.standard_normal((1, 1, 4, 576)), jnp.float16)
    tokens = jnp.asarray(np.sort(rng.permutation(380)[:100]).reshape(1, 1, 100), jnp.int32)
    op = functools.partial(gather_attention, lengths=jnp.array([380], jnp.int32), sm_scale=576**-0.5, value_dim=512, block_size=1)
    op = functools.partial(op, blocks=tokens, implementation="xla")
    far, near = op(q, big, None, jnp.array([[*named]], jnp.int32)), op(q, small, None, jnp.array([[0, 1, 2]], jnp.int32))
    tools.assert_rows_close(far[0], near[0], 1e-3)


def test_twice_the_same_bits_alone_or_in_company(tools, arguments):
    (q, k, _, table, lengths), keywords = arguments("bfloat16 tokens")
    op = functools.partial(SMALL_TILES, **{name: keywords[name] for name in ("sm_scale", "value_dim", "block_size")})
    whole = op(q, k, None, table, lengths, blocks=keywords["blocks"])
    for a, b in zip(whole, op(q, k, None, table, lengths, blocks=keywords["blocks"]), strict=True):
        tools.assert_same_bits(a, b)
    alone = op(q[5:6], k, None, table[5:6], lengths[5:6], blocks=keywords["blocks"][5:6])
    for a, b in zip(whole, alone, strict=True):
        tools.assert_same_bits(a[5:6], b)


BAD = {
    "neither": ({}, r"pages need v, or v=None and value_dim .* got value_dim None"),
    "both": ({"v": "k", "value_dim": 8}, "pages need v, or v=None and value_dim"),
    "too wide": ({"value_dim": 33}, "value_dim must be an int from 1 to the head dim 32, got 33"),
    "none of it": ({"value_dim": 0}, "got 0"),
    "no int": ({"value_dim": 16.0}, r"got 16\.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(tools, case):
    keywords, message = BAD[case]
    paged = tools.make_paged(kv_heads=1)
    keywords = dict(keywords)
    v = paged.k if keywords.pop("v", None) else None
    with pytest.raises(ValueError, match=message):
        gather_attention(paged.q, paged.k, v, paged.page_table, paged.lengths, sm_scale=0.1, **keywords)


@pytest.mark.parametrize("kernel", ["mosaic_gpu", "mosaic_tpu"])
def test_kernels_say_that_they_cannot(tools, kernel):
    paged = tools.make_paged(lengths=(200,), page_size=64, width=4, kv_heads=1, group=8, head_dim=128, dtype="bfloat16")
    arrays = (paged.q, paged.k, None, paged.page_table, paged.lengths)
    assert "first 64 columns of K" in paging.unsupported("gather_attention", kernel, *arrays, sm_scale=0.1, value_dim=64)
    with pytest.raises(NotImplementedError, match="first 64 columns of K"):
        paging.implementation("gather_attention", kernel)(*arrays, sm_scale=0.1, value_dim=64)
    for v, reason in (
        (paged.k[..., :64], "k and v of one shape"),
        (paged.k.astype(jnp.float16), "k and v of one shape and format"),
        (paged.k, None),
    ):
        said = paging.unsupported("gather_attention", kernel, paged.q, paged.k, v, *arrays[3:], sm_scale=0.1)
        assert said is None if reason is None else reason in said
