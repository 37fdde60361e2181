"""flash_attention in Mosaic GPU on a Hopper GPU: against the reference, mutants against the suite, bits, company, large
pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools
from paging import flash_attention

from pallas_kernels.core import merge

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(flash_attention, implementation="mosaic_gpu")
REFERENCE = functools.partial(flash_attention, implementation="reference")

# Inputs of `make_paged` over these, then: window, starts. Dense chunks of these sizes are split, because 14 heads and 3
# tiles of queries leave multiprocessors idle; those of 56 heads are not split, and chunks with a window never.
BASE = {
    "lengths": (0, 1, 127, 128, 129, 500, 700, 768),
    "starts": (0, 0, 3, 50, 9, 200, 468, 468),
    "num_queries": 300,
    "kv_heads": 2,
    "group": 7,
    "head_dim": 128,
    "page_size": 128,
    "width": 6,
    "dtype": "bfloat16",
}
CASES = {
    "chunks": {},
    "float16, groups of 4": {"dtype": "float16", "group": 4},
    "head dim 64": {"head_dim": 64},
    "head dim 256": {"head_dim": 256, "kv_heads": 1, "group": 8},
    "head dim 256, window, float16": {"head_dim": 256, "window": (5, 200), "dtype": "float16"},
    "pages of 64": {"page_size": 64, "width": 12, "group": 1},
    "pages of 192": {"page_size": 192, "width": 4, "head_dim": 64},
    "pages of 256": {"page_size": 256, "width": 3, "window": (130, 140)},
    "window": {"window": (5, 200)},
    "window that skips tiles": {"window": (1, 70)},
    "window of one token": {"window": (0, 1)},
    "window as wide as everything": {"window": (0, 2**30)},
    "sinks of several tiles": {"window": (300, 20)},
    "a page is missing": {"hole": True},
    "a page is missing in a window": {"hole": True, "window": (64, 300), "head_dim": 64},
    "one token": {"num_queries": 1, "starts": (0, 0, 14, 127, 128, 39, 94, 767)},
    "8 tokens": {"num_queries": 8},
    "129 tokens": {"num_queries": 129, "lengths": (700,), "starts": (571,)},
    "keys after the chunk": {"num_queries": 100},
    "heads that fill the device": {"group": 28, "lengths": (127, 500, 700, 768), "starts": (3, 200, 468, 468)},
    "a page is missing, heads that fill the device": {"group": 28, "lengths": (127, 700, 768), "starts": (3, 468, 468), "hole": True},
    "one head": {"kv_heads": 1, "group": 1},
    "huge logits": {"keys": "huge"},
    "equal scores": {"keys": "equal"},
    "denormal keys": {"keys": "denormal"},
    "long": {"lengths": (9000, 3), "width": 71, "kv_heads": 1, "num_queries": 200, "starts": (8800, 0)},
}
FOR_MUTANTS = ("chunks", "window", "a page is missing", "huge logits", "heads that fill the device")


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""

    @functools.cache
    def build(case: str):
        spec = BASE | CASES[case]
        window, starts = spec.pop("window", None), jnp.asarray(spec.pop("starts"), jnp.int32)
        paged = tools.make_paged(seed=sum(map(ord, case)), **spec)
        return (*paged.arrays[:4], starts, paged.lengths), {"sm_scale": paged.sm_scale, "window": window}

    return build


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that the kernel and the mutants face."""

    return tools.chunk_checker(arguments, REFERENCE, slack=2)  # weights are rounded, too


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, case):
    check(KERNEL, case)


def test_is_causal_attention_of_jax(tools):
    """Against jax.nn.dot_product_attention on contiguous keys."""
    paged = tools.make_paged(**{name: x for name, x in BASE.items() if name != "starts"} | {"lengths": (768, 768), "num_queries": 768})
    k, v = (x[paged.page_table].swapaxes(2, 3).reshape(2, 768, 2, 128).astype(jnp.float32) for x in (paged.k, paged.v))
    out, _ = KERNEL(*paged.arrays[:4], jnp.zeros(2, jnp.int32), paged.lengths, sm_scale=paged.sm_scale)
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(paged.q.astype(jnp.float32), k, v, is_causal=True, scale=paged.sm_scale)
    tools.assert_rows_close(out.astype(jnp.float32), theirs, 8e-3)


# Mutants: what a kernel gets wrong, expressed on its arguments or its results.


def _with(change=None, result=None, **keyword_changes):
    """A mutant: arguments by name changed by `change`, keywords by functions of the same name, results by `result`."""

    def op(*arrays, **keywords):
        given = dict(zip(("q", "k", "v", "table", "starts", "lengths"), arrays, strict=True)) | keywords
        given |= change(given) if change else {}
        given |= {name: function(given[name]) for name, function in keyword_changes.items()}
        out = KERNEL(**given)
        return result(*out) if result else out

    return op


def _page_doubled(q, k, v, table, *positions, **keywords):
    parts = [KERNEL(q, k, v, x, *positions, **keywords) for x in (table, table.at[:, 1:].set(-1))]
    out, lse = merge.merge_attention(*zip(*parts, strict=True))
    return out.astype(q.dtype), lse


def _heads_interleaved(given):
    q, kv_heads = given["q"], given["k"].shape[1]
    return {"q": q.reshape(*q.shape[:2], -1, kv_heads, q.shape[3]).swapaxes(2, 3).reshape(q.shape)}


MUTANTS = {
    "zeros": _with(result=lambda out, lse: (jnp.zeros_like(out), jnp.zeros_like(lse))),
    "V read from K": _with(lambda given: {"v": given["k"]}),
    "K read from V": _with(lambda given: {"k": given["v"]}),
    "one page dropped": _with(table=lambda table: table.at[:, -1].set(-1)),
    "one page read for another": _with(table=lambda table: table.at[:, 1].set(table[:, 0])),
    "the neighbour's table": _with(table=lambda table: jnp.roll(table, 1, axis=0)),
    "-1 in the table wraps": _with(lambda given: {"table": given["table"] % given["k"].shape[0]}),
    "one page doubled": _page_doubled,
    "scale times sqrt(D)": _with(lambda given: {"sm_scale": given["sm_scale"] * given["q"].shape[3] ** 0.5}),
    "scale a hundredth larger": _with(sm_scale=lambda scale: scale * 1.01),
    "length one short": _with(lengths=lambda lengths: jnp.maximum(lengths - 1, 0)),
    "length and chunk one late": _with(lengths=lambda lengths: lengths + 1, starts=lambda starts: starts + 1),
    "causal mask one late": _with(starts=lambda starts: starts + 1),
    "causal mask one early": _with(starts=lambda starts: starts - 1),
    "not causal": _with(lambda given: {"starts": given["lengths"]}),
    "one sink token more": _with(window=lambda window: window and (window[0] + 1, window[1])),
    "window one token wider": _with(window=lambda window: window and (window[0], window[1] + 1)),
    "heads interleaved": _with(_heads_interleaved),
    "LSE in base 2": _with(result=lambda out, lse: (out, lse / np.log(2))),
    "last tile of queries lost": _with(result=lambda out, lse: (out.at[:, -44:].set(0), lse)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], FOR_MUTANTS)


# Bits.


@pytest.fixture(scope="module", params=[(None, 7), ((64, 200), 7), (None, 66)], ids=["split", "window", "full device"])
def bits(request, tools):
    """(arrays, op): 8 chunks of 300 queries. 132 heads fill the device with one tile of queries, so that no part of the
    chunk is split."""
    window, group = request.param
    spec = {name: value for name, value in BASE.items() if name != "starts"} | {"group": group}
    paged = tools.make_paged(seed=5, **spec)
    starts = jnp.asarray(BASE["starts"], jnp.int32)
    return (*paged.arrays[:4], starts, paged.lengths), functools.partial(KERNEL, sm_scale=paged.sm_scale, window=window)


@pytest.mark.parametrize("against", ["a wider table", "company", "other pages"])
def test_bits_stand(tools, bits, against):
    arrays, op = bits
    tools.assert_chunk_bits_stand(against, op, arrays)


def test_many_times_the_same_bits(tools, bits):
    arrays, op = bits
    once = op(*arrays)
    for _ in range(20):
        tools.assert_all_same_bits(once, op(*arrays))


@pytest.mark.parametrize("cuts", [(128, 256, 512), (1, 65, 66, 300, 700), (37,)], ids=["at tiles", "anywhere", "once"])
def test_chunks_have_the_bits_of_the_whole(tools, bits, cuts):
    """A prompt prefilled in one go, and in chunks that are cut anywhere, each before the later keys are written."""
    (q, k, v, table, *_), op = bits
    whole_q = jnp.concatenate([q[-1:, :256], -q[-1:, :256], q[-2:-1, :256]], axis=1)
    table, start = table[-1:], 0
    whole = op(whole_q, k, v, table, jnp.zeros(1, jnp.int32), jnp.array([768], jnp.int32))
    for stop in (*cuts, 768):
        part = op(whole_q[:, start:stop], k, v, table, jnp.array([start], jnp.int32), jnp.array([stop], jnp.int32))
        tools.assert_all_same_bits([x[:, start:stop] for x in whole], part)
        start = stop


def test_split_chunks_of_a_long_history(tools):
    """A layer of 28 heads, 100,000 tokens behind: `xla`'s values; the same bits with chunks of 384, 256 and 128, on
    tables of other widths, and whatever has been written after them."""
    keys = jax.random.split(jax.random.key(7), 3)
    k, v = (jax.random.normal(key, (790, 4, 128, 128), jnp.bfloat16) for key in keys[:2])
    table = jax.random.permutation(keys[0], jnp.arange(1, 790, dtype=jnp.int32))[None, :785]
    q = 4 * jax.random.normal(keys[2], (1, 384, 28, 128), jnp.bfloat16)
    start, stop = 99_840, 99_840 + 384
    scale = 128**-0.5

    def chunk(first, last, length=stop, width=785, op=KERNEL):
        wide = jnp.pad(table, ((0, 0), (0, width - 785)), constant_values=-1)
        return op(q[:, first:last], k, v, wide, jnp.array([start + first], jnp.int32), jnp.array([length], jnp.int32), sm_scale=scale)

    whole = chunk(0, 384)
    xla = chunk(0, 384, op=functools.partial(flash_attention, implementation="xla"))
    tools.assert_rows_close(whole[0], xla[0], 8e-3)
    tools.assert_lse_close(whole[1], xla[1])
    tools.assert_all_same_bits(whole, chunk(0, 384, width=4096))
    for first, last in ((0, 128), (128, 256), (256, 384), (0, 256)):
        tools.assert_all_same_bits([x[:, first:last] for x in whole], chunk(first, last, length=start + last, width=1024))
    for op, left_out in ((KERNEL, 192), (functools.partial(KERNEL, window=(64, 300)), 128)):
        some = chunk(0, 384, op=functools.partial(op, fresh=jnp.array([start + 200], jnp.int32)))
        assert not some[0][:, :left_out].any()
        tools.assert_all_same_bits([x[:, 200:] for x in chunk(0, 384, op=op)], [x[:, 200:] for x in some])


def test_pool_past_2_to_the_31_elements(tools):
    """The last pages of a pool of 2^31 + 2^16 elements read as in a pool of four pages, to the bit."""
    num_pages = 2**16 + 2
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, 2**15], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    near = [jax.random.normal(key, (4, 2, 128, 128), jnp.bfloat16) for key in keys[:2]]
    far = far_pools(numbers, *near, num_pages=num_pages)
    assert far[0].size > 2**31
    q = 4 * jax.random.normal(keys[2], (1, 40, 14, 128), jnp.bfloat16)
    op = functools.partial(KERNEL, starts=jnp.array([460], jnp.int32), lengths=jnp.array([500], jnp.int32), sm_scale=128**-0.5)
    tools.assert_all_same_bits(op(q, *far, numbers[None]), op(q, *near, jnp.arange(4, dtype=jnp.int32)[None]))


def test_it_is_what_runs_here(tools, arguments):
    """Named or picked, the kernel runs; what it cannot do is refused by name, with the values, and done by another."""
    arrays, keywords = arguments("chunks")
    tools.assert_all_same_bits(flash_attention(*arrays, **keywords), KERNEL(*arrays, **keywords))
    narrow = tools.make_paged(lengths=(40, 96), num_queries=5)
    arrays, keywords = (*narrow.arrays[:4], narrow.lengths - 5, narrow.lengths), {"sm_scale": narrow.sm_scale}
    with pytest.raises(NotImplementedError, match="got q float32, k float32"):
        KERNEL(*arrays, **keywords)
    tools.assert_rows_close(flash_attention(*arrays, **keywords)[0], REFERENCE(*arrays, **keywords)[0], 1e-5)
