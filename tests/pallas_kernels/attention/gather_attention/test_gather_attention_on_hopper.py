"""gather_attention in Mosaic GPU on a Hopper GPU, with and without `wgmma`: against the reference, mutants, bits,
company, large pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools
from paging import gather_attention

from pallas_kernels.attention.gather_attention import mosaic_gpu
from pallas_kernels.attention.gather_attention.mosaic_gpu import Config
from pallas_kernels.core import merge
from pallas_kernels.core.pages import Pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper", "tensor_cores")]

KERNEL = functools.partial(gather_attention, implementation="mosaic_gpu")
REFERENCE = functools.partial(gather_attention, implementation="reference")

# Inputs of `make_paged` over these, then: window; blocks = (listed places, block size, per query?) or None for dense;
# block_size of dense; lse: LSE of blocks; config; apart: the list has frames of its own.
BASE = {
    "lengths": (0, 1, 127, 128, 129, 300, 700, 768),
    "kv_heads": 4,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 6,
    "dtype": "bfloat16",
}
PAGES_OF_64 = {"page_size": 64, "lengths": (0, 1, 63, 64, 65, 150, 350, 384)}
PAGES_OF_256 = {"page_size": 256, "lengths": (0, 1, 255, 256, 257, 600, 1400, 1536)}
CASES = {
    "dense": {},
    "dense float16": {"dtype": "float16", "lse": True},
    "dense 32/8": {"kv_heads": 8, "group": 4},
    "dense 32/8 of 64": {"kv_heads": 8, "group": 4, "head_dim": 64},
    "dense head dim 256": {"kv_heads": 2, "group": 8, "head_dim": 256},
    "dense groups of 1, pages of 64": {"kv_heads": 8, "group": 1, **PAGES_OF_64},
    "dense drafts, LSE": {"num_queries": 3, "lse": True},
    "dense 64 query rows in a window": {"num_queries": 8, "kv_heads": 2, "group": 8, "window": (5, 200)},
    "dense window of one token, pages of 256": {"window": (0, 1), "block_size": 128, **PAGES_OF_256},
    "dense, 16 drafts of groups of 8": {"num_queries": 16, "kv_heads": 2, "group": 8},
    "dense, 16 drafts of groups of 7": {"num_queries": 16},
    "dense, 13 drafts of groups of 9": {"num_queries": 13, "kv_heads": 2, "group": 9},
    "dense, 16 drafts, a page is missing": {"hole": True, "num_queries": 16},
    "dense, 16 drafts of groups of 7 in a window, LSE": {"num_queries": 16, "window": (5, 200), "lse": True},
    "dense, a page is missing": {"hole": True, "num_queries": 2},
    "dense huge logits": {"keys": "huge", "lse": True},
    "dense equal scores": {"keys": "equal"},
    "dense denormal keys": {"keys": "denormal"},
    "dense long": {"lengths": (9000, 3), "width": 71, "kv_heads": 1},
    "dense batch of 40": {"lengths": tuple(range(0, 760, 19)), "kv_heads": 4},
    "dense batch of 1": {"lengths": (700,), "group": 8},
    "dense in tiles of 128": {"config": Config(tile_tokens=128, stages=2), "num_queries": 3, "window": (5, 300)},
    "dense in 3 spans": {"config": Config(splits=3, stages=1)},
    "dense array code": {"config": Config(array_code=True), "num_queries": 2, "lse": True},
    "list of pages": {"blocks": (6, 128)},
    "list of pages, float16": {"blocks": (6, 128), "dtype": "float16", "kv_heads": 8, "group": 4},
    "list of 16": {"blocks": (33, 16)},
    "list of 32, groups of 8": {"blocks": (19, 32), "kv_heads": 2, "group": 8},
    "list of 64, pages of 64, groups of 1": {"blocks": (8, 64), "kv_heads": 8, "group": 1, **PAGES_OF_64},
    "list of 128 in pages of 256": {"blocks": (9, 128), **PAGES_OF_256},
    "list of everything": {"blocks": (50, 16)},
    "list drafts in a window": {"blocks": (33, 16), "num_queries": 2, "group": 8, "kv_heads": 2, "window": (5, 200)},
    "list many drafts in a window": {"blocks": (33, 16), "num_queries": 5, "window": (5, 200)},
    "list, LSE, drafts in a window": {"blocks": (33, 16), "num_queries": 3, "window": (5, 200), "lse": True},
    "list of pages, LSE": {"blocks": (6, 128), "lse": True},
    "list head dim 64": {"blocks": (17, 32), "kv_heads": 8, "group": 4, "head_dim": 64},
    "list head dim 256": {"blocks": (17, 32), "kv_heads": 2, "group": 8, "head_dim": 256, "dtype": "float16"},
    "4 drafts, a list each": {"blocks": (33, 16, True), "num_queries": 4},
    "8 drafts, a list of pages each, LSE": {"blocks": (6, 128, True), "num_queries": 8, "lse": True},
    "16 drafts of groups of 8, a list each in a window": {
        **{"blocks": (33, 16, True), "num_queries": 16, "kv_heads": 2, "group": 8},
        "window": (5, 200),
    },
    "16 drafts of groups of 8, one list": {"blocks": (33, 16), "num_queries": 16, "kv_heads": 2, "group": 8},
    "list, a page is missing": {"blocks": (33, 16), "hole": True, "num_queries": 2},
    "list huge logits": {"blocks": (33, 16), "keys": "huge"},
    "list equal scores": {"blocks": (33, 16), "keys": "equal"},
    "list batch of 40": {"blocks": (33, 16), "lengths": tuple(range(0, 760, 19))},
    "list batch of 1": {"blocks": (33, 16), "lengths": (700,), "kv_heads": 8, "group": 4},
    "tiles apart": {"blocks": (6, 128), "apart": True},
    "tiles apart, drafts in a window": {"blocks": (33, 16), "num_queries": 2, "window": (5, 200), "apart": True},
    "tiles apart, LSE": {"blocks": (6, 128), "lse": True, "hole": True, "apart": True},
    "tiles apart, 16 drafts of groups of 8": {"blocks": (33, 16), "num_queries": 16, "kv_heads": 2, "group": 8, "apart": True},
    "list in 2 spans": {"blocks": (33, 16), "config": Config(splits=2)},
}
ONLY_WGMMA = ("dense in tiles of 128", "dense array code", *(case for case in CASES if "apart" in CASES[case]))
FOR_MUTANTS = {
    "lists": ("list of pages", "list drafts in a window", "list huge logits", "4 drafts, a list each"),
    "spans": ("list, LSE, drafts in a window", "dense drafts, LSE", "dense huge logits"),
}


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = BASE | CASES[case]
        names = ("window", "blocks", "block_size", "lse", "config", "apart")
        window, blocks, block_size, lse, config, apart = (spec.pop(name, None) for name in names)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        keywords = {"sm_scale": paged.sm_scale, "window": window, "return_block_lse": bool(lse), "block_size": block_size}
        if config:
            keywords["config"] = config
        if blocks is not None:
            keywords |= {"blocks": tools.lists_for(paged, *blocks), "block_size": blocks[1]}
        if apart:
            k, v, keywords["block_frames"] = tools.tiles_apart(paged, keywords["blocks"], blocks[1])
            return (paged.q, k, v, jnp.full_like(paged.page_table, -1), paged.lengths), keywords
        return paged.arrays, keywords

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that the kernel and the mutants face."""

    @functools.cache
    def expected(case: str):
        arrays, keywords = arguments(case)
        return REFERENCE(*arrays, **(keywords | {"config": None}))

    def run(op, case: str) -> None:
        arrays, keywords = arguments(case)
        found, ref = op(*arrays, **keywords), expected(case)
        assert len(found) == len(ref)
        tools.assert_rows_close(found[0], ref[0], 2 * tools.row_error[arrays[0].dtype.name])  # weights are rounded, too
        for lse, ref_lse in zip(found[1:], ref[1:], strict=True):
            tools.assert_lse_close(lse, ref_lse)

    return run


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, tensor_cores, case):
    if tensor_cores != "wgmma" and case in ONLY_WGMMA:
        pytest.skip("only the form with wgmma takes it")
    check(KERNEL, case)


@pytest.mark.parametrize(("num_queries", "group"), [(8, 7), (16, 4), (16, 7), (16, 8), (11, 7)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_alike_have_the_bits_of_their_own_calls(tools, tensor_cores, num_queries, group, head_dim):
    """In one query tile of a CTA or two, over lengths around the ends of key tiles and of spans, with 132 CTAs and
    with few."""
    if tensor_cores != "wgmma":
        pytest.skip("only the form with wgmma promises it")
    spec = {"num_queries": num_queries, "group": group, "kv_heads": 4, "head_dim": head_dim}
    for lengths in ((16, 128, 135, 4096), (4225, 4232, 8448), (130, 131), (20_000,)):
        paged = tools.make_paged(**(BASE | spec | {"lengths": lengths, "width": -(-max(lengths) // BASE["page_size"])}))
        q, k, v, table, lengths = paged.arrays
        found = KERNEL(*paged.arrays, sm_scale=paged.sm_scale)
        alike = np.asarray(mosaic_gpu.queries_alike(q, Pages(k, v), lengths))
        assert alike.max() > 1
        for query in range(num_queries):
            own = KERNEL(q[:, query : query + 1], k, v, table, lengths - (num_queries - 1 - query), sm_scale=paged.sm_scale)
            rows = np.flatnonzero(query < alike)
            for a, b in zip(found[:2], own[:2], strict=True):
                tools.assert_same_bits(a[rows, query], b[rows, 0])


def test_ids_beyond_the_table_are_skipped(tools):
    paged = tools.make_paged(**(BASE | {"lengths": (768, 300), "kv_heads": 2}))
    inside = jnp.broadcast_to(jnp.array([0, 2, -1, -1], jnp.int32), (2, 2, 4))
    beyond = jnp.broadcast_to(jnp.array([0, 2, 6, 2**24 - 1], jnp.int32), (2, 2, 4))
    for lse in (False, True):
        op = functools.partial(KERNEL, *paged.arrays, sm_scale=paged.sm_scale, return_block_lse=lse)
        for a, b in zip(op(blocks=beyond), op(blocks=inside), strict=True):
            tools.assert_same_bits(a, b)


@pytest.mark.parametrize("width", [1, 2])
def test_a_list_of_one_block(tools, width):
    paged = tools.make_paged(**(BASE | {"lengths": (768, 300, 40), "kv_heads": 2}))
    blocks = jnp.full((3, 2, width), -1, jnp.int32).at[:, 0, -1].set(jnp.array([5, 1, 0]))
    found, ref = (op(*paged.arrays, blocks=blocks, sm_scale=paged.sm_scale) for op in (KERNEL, REFERENCE))
    tools.assert_rows_close(found[0], ref[0], 8e-3)
    tools.assert_lse_close(found[1], ref[1])


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _of_results(change):
    return lambda *arrays, **keywords: change(*KERNEL(*arrays, **keywords))


def _of_arrays(change):
    return lambda *arrays, **keywords: KERNEL(*change(*arrays), **keywords)


def _of_keyword(name, change):
    def op(*arrays, **keywords):
        new = {name: change(keywords[name], *arrays)} if keywords.get(name) is not None else {}
        return KERNEL(*arrays, **(keywords | new))

    return op


def _page_doubled(q, k, v, table, lengths, **keywords):
    out, lse, *rest = KERNEL(q, k, v, table, lengths, **keywords)
    again, lse_again, *_ = KERNEL(q, k, v, table.at[:, 1:].set(-1), lengths, **keywords)
    return *merge.merge_attention([out, again], [lse, lse_again]), *rest


def _drafts_see_each_other(q, *arrays, blocks=None, **keywords):
    lists = [blocks[:, t] if blocks is not None and blocks.ndim == 4 else blocks for t in range(q.shape[1])]
    each = [KERNEL(q[:, t : t + 1], *arrays, blocks=lists[t], **keywords) for t in range(q.shape[1])]
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*each, strict=True))


def _heads_interleaved(q, k, *rest):
    return q.reshape(*q.shape[:2], -1, k.shape[1], q.shape[3]).swapaxes(2, 3).reshape(q.shape), k, *rest


def _none_is_the_last_block(*arrays, **keywords):
    if "blocks" in keywords:
        last = (arrays[4].reshape(-1, *[1] * (keywords["blocks"].ndim - 1)) - 1) // keywords["block_size"]
        keywords["blocks"] = jnp.where(keywords["blocks"] < 0, last, keywords["blocks"])
    return KERNEL(*arrays, **keywords)


MUTANTS = {
    "zeros": _of_results(lambda *results: tuple(map(jnp.zeros_like, results))),
    "V read from K": _of_arrays(lambda q, k, v, *rest: (q, k, k, *rest)),
    "K read from V": _of_arrays(lambda q, k, v, *rest: (q, v, v, *rest)),
    "one page dropped": _of_arrays(lambda q, k, v, table, n: (q, k, v, table.at[:, -1].set(-1), n)),
    "one page read for another": _of_arrays(lambda q, k, v, table, n: (q, k, v, table.at[:, 1].set(table[:, 0]), n)),
    "one page doubled": _page_doubled,
    "scale times sqrt(D)": _of_keyword("sm_scale", lambda scale, q, *_: scale * q.shape[-1] ** 0.5),
    "scale over sqrt(D)": _of_keyword("sm_scale", lambda scale, q, *_: scale / q.shape[-1] ** 0.5),
    "scale a hundredth larger": _of_keyword("sm_scale", lambda scale, *_: scale * 1.01),
    "length one short": _of_arrays(lambda *arrays: (*arrays[:4], jnp.maximum(arrays[4] - 1, 0))),
    "length one long": _of_arrays(lambda *arrays: (*arrays[:4], arrays[4] + 1)),
    "drafts see each other": _drafts_see_each_other,
    "one sink token more": _of_keyword("window", lambda window, *_: (window[0] + 1, window[1])),
    "window one token wider": _of_keyword("window", lambda window, *_: (window[0], window[1] + 1)),
    "heads interleaved": _of_arrays(_heads_interleaved),
    "the neighbour's table": _of_arrays(lambda q, k, v, table, n: (q, k, v, jnp.roll(table, 1, axis=0), n)),
    "-1 in the list wraps": _none_is_the_last_block,
    "the first head's list": _of_keyword("blocks", lambda blocks, *_: jnp.broadcast_to(blocks[..., :1, :], blocks.shape)),
    "a block listed twice": _of_keyword("blocks", lambda blocks, *_: jnp.where(jnp.arange(blocks.shape[-1]) < 2, blocks[..., :1], blocks)),
    "LSE in base 2": _of_results(lambda out, lse, *rest: (out, lse / np.log(2), *rest)),
    "nothing to read is not 0": _of_results(lambda out, lse, *rest: (jnp.where(lse[..., None] == -jnp.inf, 1, out), lse, *rest)),
}
ONLY_SPANS = {"LSE of blocks one place off": _of_results(lambda out, lse, of_blocks: (out, lse, jnp.roll(of_blocks, 1, axis=-1)))}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("form", FOR_MUTANTS)
def test_mutant_fails(tools, check, form, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS[form])


@pytest.mark.parametrize("mutant", ONLY_SPANS)
def test_mutant_of_the_lse_of_blocks_fails(tools, check, mutant):
    tools.must_fail(check, ONLY_SPANS[mutant], FOR_MUTANTS["spans"])


# Bits.


@pytest.fixture(scope="module", params=["dense", "dense, LSE", "list", "list, LSE", "list, many drafts"])
def bits(request, tools):
    """(arrays, op): 8 rows of drafts, dense or over a list."""
    paged = tools.make_paged(seed=5, **(BASE | {"num_queries": 5 if "many" in request.param else 2}))
    keywords = {"sm_scale": paged.sm_scale, "return_block_lse": "LSE" in request.param, "window": (5, 400)}
    if "list" in request.param:
        keywords |= {"blocks": tools.random_blocks(2, 8, 4, 48, 37), "block_size": 16}
    return paged.arrays, functools.partial(KERNEL, **keywords)


def _same(tools, some, others, rows=slice(None)):
    for a, b in zip(some, others, strict=True):
        tools.assert_same_bits(a[rows], b[rows])


def test_many_times_the_same_bits(tools, bits):
    arrays, op = bits
    once = op(*arrays)
    for _ in range(20):
        _same(tools, once, op(*arrays))


def test_bits_do_not_depend_on_the_width_of_the_table(tools, bits):
    (q, k, v, table, lengths), op = bits
    narrow = op(q, k, v, table, lengths)
    wide = op(q, k, v, jnp.pad(table, ((0, 0), (0, 7)), constant_values=-1), lengths)
    _same(tools, narrow[:2], wide[:2])
    for a, b in zip(narrow[2:], wide[2:], strict=True):
        tools.assert_same_bits(a, b[..., : a.shape[-1]])


def test_bits_do_not_depend_on_company(tools, bits):
    """A row among others that change, and alone among empty ones."""
    (q, k, v, table, lengths), op = bits
    together = op(q, k, v, table, lengths)
    for kept in (5, 6):
        others = jnp.arange(8) != kept
        noise = jnp.where(others[:, None, None, None], jnp.nan, q)
        for other_q, other_table, length in ((-q, table[-1], 768), (noise, -1, 0)):
            changed = op(
                jnp.where(others[:, None, None, None], other_q, q),
                *(k, v, jnp.where(others[:, None], other_table, table), jnp.where(others, length, lengths)),
            )
            _same(tools, together, changed, kept)


def test_bits_do_not_depend_on_the_place_in_the_batch(tools, bits):
    (q, k, v, table, lengths), op = bits
    turn = functools.partial(jnp.roll, shift=3, axis=0)
    turned_op = functools.partial(op, blocks=turn(op.keywords["blocks"])) if "blocks" in op.keywords else op
    _same(tools, [turn(x) for x in op(q, k, v, table, lengths)], turned_op(turn(q), k, v, turn(table), turn(lengths)))


def test_bits_do_not_depend_on_which_pages_hold_the_tokens(tools, bits):
    (q, k, v, table, lengths), op = bits
    order = np.random.default_rng(9).permutation(k.shape[0])
    moved = jnp.where(table >= 0, jnp.asarray(np.argsort(order), jnp.int32)[table], -1)
    _same(tools, op(q, k, v, table, lengths), op(q, k[order], v[order], moved, lengths))


# Pools past 2^31 elements.


@pytest.mark.parametrize("listed", [None, (7, 128), (24, 16)], ids=["dense", "pages", "blocks"])
def test_pool_past_2_to_the_31_elements(tools, listed):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages, to the bit."""
    num_pages = 2**16 + 2
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, 2**15], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    near = [jax.random.normal(key, (4, 2, 128, 128), jnp.bfloat16) for key in keys[:2]]
    far = far_pools(numbers, *near, num_pages=num_pages)
    assert far[0].size > 2**31
    for pool, content in zip(far, near, strict=True):
        for i, number in enumerate(numbers):
            tools.assert_same_bits(jax.lax.dynamic_index_in_dim(pool, number, keepdims=False), content[i])
    q = 4 * jax.random.normal(keys[2], (1, 1, 14, 128), jnp.bfloat16)
    keywords = {"lengths": jnp.array([500], jnp.int32), "sm_scale": 128**-0.5}
    if listed:
        width, size = listed
        keywords |= {"blocks": tools.random_blocks(0, 2, 2, 512 // size, width)[:1], "block_size": size}
    found = KERNEL(q, *far, numbers[None], **keywords)
    _same(tools, found, KERNEL(q, *near, jnp.arange(4, dtype=jnp.int32)[None], **keywords))
    tools.assert_rows_close(found[0], REFERENCE(q, *near, jnp.arange(4, dtype=jnp.int32)[None], **keywords)[0], 8e-3)


def test_it_is_what_runs_here(tools, arguments):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    arrays, keywords = arguments("dense")
    _same(tools, gather_attention(*arrays, **keywords), KERNEL(*arrays, **keywords))
    narrow = tools.make_paged(lengths=(40, 96))
    with pytest.raises(NotImplementedError, match="got q float32, k float32"):
        KERNEL(*narrow.arrays, sm_scale=narrow.sm_scale)
    found, ref = (op(*narrow.arrays, sm_scale=narrow.sm_scale)[0] for op in (gather_attention, REFERENCE))
    tools.assert_rows_close(found, ref, 1e-5)


def test_under_jit(tools, arguments):
    arrays, keywords = arguments("list of pages")
    op = jax.jit(functools.partial(KERNEL, **{name: x for name, x in keywords.items() if name != "blocks"}))
    _same(tools, op(*arrays, blocks=keywords["blocks"]), KERNEL(*arrays, **keywords))
