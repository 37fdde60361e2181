"""The suite of selected_attention: the two ops in a row everywhere, the kernel on a Hopper GPU, mutants of both,
refusals."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from far_pools import far_pools
from paging import gather_attention, selected_attention
from quick_cases import rest_long
from selected_suite import MUTANTS, SIZES, arguments_of, checker

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index import page_index
from pallas_kernels.selection.select_blocks import select_blocks

COMPOSED = functools.partial(selected_attention, implementation="composed")
KERNEL = functools.partial(selected_attention, implementation="mosaic_gpu")

# Inputs of `make_paged` over these, and the sizes of a selection over these.
BASE = {
    "lengths": (0, 1, 63, 64, 65, 150, 321, 384),
    "kv_heads": 2,
    "group": 4,
    "head_dim": 64,
    "page_size": 64,
    "width": 6,
    "dtype": "bfloat16",
}
PAGES_OF_128 = {"page_size": 128, "lengths": (0, 1, 127, 128, 129, 300, 700, 768), "head_dim": 128}
PAGES_OF_256 = {"page_size": 256, "lengths": (1, 257, 1536)}
CASES = {
    "bounds": {},
    "mean": {"kind": "mean"},
    "blocks are pages, 28/4": {"kv_heads": 4, "group": 7, "block_size": 128, "budget": 2, "local": 1, **PAGES_OF_128},
    "blocks of 32, 32/8": {"kv_heads": 8, "group": 4, "block_size": 32, **PAGES_OF_128},
    "mean, blocks of 64, float16": {"kind": "mean", "group": 8, "block_size": 64, "dtype": "float16", **PAGES_OF_128},
    "pages of 256": {"block_size": 128, "budget": 3, **PAGES_OF_256},
    "groups of 1": {"kv_heads": 3, "group": 1},
    "head dim 256": {"group": 8, "head_dim": 256, "lengths": (0, 65, 384)},
    "drafts": {"num_queries": 3},
    "4 drafts of groups of 7": {"num_queries": 4, "group": 7, "lengths": (2, 65, 130, 320, 321, 384), "local": 1, "block_size": 64},
    "8 drafts of groups of 8": {"num_queries": 8, "group": 8, "lengths": (5, 70, 325, 384), "local": 1},
    "16 drafts of groups of 1, mean": {"kind": "mean", "num_queries": 16, "group": 1, "lengths": (9, 70, 330, 384)},
    "16 drafts of groups of 8": {"num_queries": 16, "group": 8, "kv_heads": 1, "lengths": (9, 70, 330)},
    "drafts of groups of 8, mean": {"kind": "mean", "num_queries": 2, "group": 8},
    "huge logits": {"keys": "huge"},
    "equal scores": {"keys": "equal", "num_queries": 2},
    "denormal keys": {"keys": "denormal"},
    "a page is missing": {"hole": True, "budget": 12},
    "budget covers everything": {"budget": 40},
    "budget of none": {"budget": 0},
    "no sink, wide local": {"sink": 0, "local": 9},
    "one row": {"lengths": (384,), "kv_heads": 1, "group": 8},
    "long": {"lengths": (4000, 4096), "width": 64, "budget": 20, "num_queries": 2},
}
ONLY_COMPOSED = {
    "float32": {"dtype": "float32", "num_queries": 3},
    "small pages": {"dtype": "float32", "page_size": 16, "block_size": 4, "lengths": (0, 15, 16, 17, 95, 96), "head_dim": 32},
}
DRAFTED = ("4 drafts of groups of 7", "8 drafts of groups of 8", "16 drafts of groups of 1, mean")
FOR_MUTANTS = ("bounds", "drafts", "4 drafts of groups of 7", "a page is missing", "huge logits")


@pytest.fixture(params=["composed", *(pytest.param(f"mosaic_gpu{form}", marks=pytest.mark.gpu) for form in ("", " without wgmma"))])
def implementation(request):
    """The op by each of its implementations; the kernel only where there is a GPU for it, then in both forms."""
    name, *form = request.param.split(maxsplit=1)
    if name == "mosaic_gpu":
        request.getfixturevalue("hopper")
    with dispatch.forced(dispatch.BLACKWELL) if form else contextlib.nullcontext():
        yield functools.partial(selected_attention, implementation=name)


@pytest.fixture(scope="module")
def arguments(tools):
    """case -> (positional arguments, keywords) of the op."""
    return arguments_of(tools, {name: BASE | SIZES | spec for name, spec in (CASES | ONLY_COMPOSED).items()})


@pytest.fixture(scope="module")
def check(tools, arguments):
    """The checker that implementations and mutants face."""
    return checker(tools, arguments)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_matches_the_reference(check, case):
    check(KERNEL, case)


@pytest.mark.quick_but("4 drafts of groups of 7", "float32", "small pages", "drafts")
@pytest.mark.parametrize(
    "case",
    rest_long(
        [*FOR_MUTANTS, *DRAFTED[1:], "mean", "budget of none", *ONLY_COMPOSED],
        "bounds",
        "drafts",
        "4 drafts of groups of 7",
        "a page is missing",
        "huge logits",
        "mean",
        "float32",
        "small pages",
    ),
)
def test_the_two_ops_match_the_reference(check, case):
    check(COMPOSED, case)
    check(selected_attention, case)


def test_it_is_the_two_ops(tools, arguments):
    """The reference against its promise, written out: a list, and attention over it."""
    arrays, keywords = arguments("drafts")
    q, k, v, index, table, lengths = arrays
    sizes = {name: keywords[name] for name in ("kind", "block_size", "sink", "local")}
    out, lse, ids = selected_attention(*arrays, **keywords, implementation="reference")
    reference = {"implementation": "reference"}
    listed = select_blocks(q, index, table, lengths, page_size=k.shape[2], k=keywords["budget"], **sizes, **reference)
    tools.assert_same_bits(ids, listed)
    attended = {"blocks": listed, "block_size": keywords["block_size"], "sm_scale": keywords["sm_scale"]}
    for a, b in zip((out, lse), gather_attention(q, k, v, table, lengths, **attended, **reference), strict=True):
        tools.assert_same_bits(a, b)


@pytest.mark.quick_but("composed-8 drafts of groups of 8", "composed-16 drafts of groups of 1, mean")
@pytest.mark.parametrize("case", DRAFTED)
def test_a_draft_lists_and_sees_what_a_step_of_its_own_would(tools, arguments, implementation, case):
    """T steps of one token, each at its position, against one step of T: the very lists; outputs but for the order of
    additions."""
    (q, *pools, table, lengths), keywords = arguments(case)
    if implementation.keywords == COMPOSED.keywords:
        q, *pools = (x.astype(jnp.float32) for x in (q, *pools))
    out, lse, ids = implementation(q, *pools, table, lengths, **keywords)
    for t in range(q.shape[1]):
        alone = implementation(q[:, t : t + 1], *pools, table, jnp.maximum(lengths - q.shape[1] + 1 + t, 0), **keywords)
        np.testing.assert_array_equal(np.asarray(ids[:, t]), np.asarray(alone[2][:, 0]))
        tools.assert_rows_close(out[:, t : t + 1], alone[0], tools.row_error[q.dtype.name])
        tools.assert_lse_close(lse[:, t : t + 1], alone[1])


def test_inputs_leave_something_out(arguments):
    """A selection of everything would hide a wrong one."""
    arrays, keywords = arguments("bounds")
    _, _, ids = COMPOSED(*arrays, **keywords)
    assert (np.asarray(ids[-1]) >= 0).sum() < 0.6 * 2 * 384 / 16


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, implementation, mutant):
    tools.must_fail(check, MUTANTS[mutant](implementation), FOR_MUTANTS)


# Bits.


def _same(tools, some, others, rows=slice(None)):
    for a, b in zip(some, others, strict=True):
        tools.assert_same_bits(a[rows], b[rows])


@pytest.mark.parametrize("case", ["drafts of groups of 8, mean"])
def test_bits_every_time_and_in_any_company_table_and_place(tools, arguments, implementation, case):
    (q, k, v, index, table, lengths), keywords = arguments(case)
    op = functools.partial(implementation, **keywords)
    once = op(q, k, v, index, table, lengths)
    for _ in range(1 if implementation.keywords == COMPOSED.keywords else 20):
        _same(tools, once, op(q, k, v, index, table, lengths))
    _same(tools, once, op(q, k, v, index, jnp.pad(table, ((0, 0), (0, 5)), constant_values=-1), lengths))
    turn = functools.partial(jnp.roll, shift=3, axis=0)
    _same(tools, [turn(x) for x in once], op(turn(q), k, v, index, turn(table), turn(lengths)))
    for kept in (5, 6):
        others = jnp.arange(8) != kept
        for other_table, length in ((table[-1], 384), (-1, 0)):  # the second: alone among empty rows
            changed = op(
                jnp.where(others[:, None, None, None], -q, q),
                *(k, v, index, jnp.where(others[:, None], other_table, table), jnp.where(others, length, lengths)),
            )
            _same(tools, once, changed, kept)


# What only a GPU can hold.


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_pool_past_2_to_the_31_elements(tools):
    num_pages = 2**16 + 6
    numbers = jnp.array([num_pages - 1, 1, num_pages - 2, 2**15, num_pages - 3, 2**14], jnp.int32)
    keys = jax.random.split(jax.random.key(3), 3)
    near_k, near_v = (jax.random.normal(key, (6, 2, 128, 128), jnp.bfloat16) for key in keys[:2])
    near_index = page_index(near_k, kind="bounds", block_size=16)
    near = near_k, near_v, near_index
    far = far_pools(numbers, *near, num_pages=num_pages)
    assert far[0].size > 2**31
    q = 4 * jax.random.normal(keys[2], (1, 1, 14, 128), jnp.bfloat16)
    op = functools.partial(KERNEL, lengths=jnp.array([750], jnp.int32), **(SIZES | {"sm_scale": 128**-0.5}))
    found, own = op(q, *far, numbers[None]), jnp.arange(6, dtype=jnp.int32)[None]
    _same(tools, found, op(q, *near, own))
    ref = functools.partial(op, implementation="reference")(q, *near, own)
    np.testing.assert_array_equal(np.asarray(found[2]), np.asarray(ref[2]))
    tools.assert_rows_close(found[0], ref[0], 8e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sizes", [(1, 128, 32), (8, 128, 32), (1, 16, 256)], ids=["batch of 1", "batch of 8", "blocks of 16"])
def test_a_million_tokens(tools, sizes):
    """Keys are small integers: scores are exact and full of ties."""
    batch, block_size, budget = sizes
    width, keys = (1 << 20) // 128, jax.random.split(jax.random.key(batch + block_size), 4)
    k = jax.random.randint(keys[0], (width + 3, 4, 128, 128), -2, 3, jnp.int8).astype(jnp.bfloat16)
    v = jax.random.normal(keys[1], k.shape, jnp.bfloat16)
    index = page_index(k, kind="bounds", block_size=block_size)
    q = jax.random.randint(keys[2], (batch, 1, 28, 128), -3, 4).astype(jnp.bfloat16)
    table = jax.vmap(lambda key: jax.random.permutation(key, width + 3)[:width])(jax.random.split(keys[3], batch)).astype(jnp.int32)
    lengths = (1 << 20) - 1000 * jnp.arange(batch, dtype=jnp.int32)
    select = {"kind": "bounds", "block_size": block_size, "sink": 1, "local": 4}
    out, lse, ids = KERNEL(q, k, v, index, table, lengths, budget=budget, sm_scale=0.1, **select)
    expected = select_blocks(q, index, table, lengths, page_size=128, k=budget, **select, implementation="xla")
    np.testing.assert_array_equal(np.asarray(ids), np.asarray(expected))
    ref = {"blocks": expected, "block_size": block_size, "sm_scale": 0.1, "implementation": "reference"}
    ref_out, ref_lse = gather_attention(q, k, v, table, lengths, **ref)
    tools.assert_rows_close(out, ref_out, 8e-3)
    tools.assert_lse_close(lse, ref_lse)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_the_kernel_is_what_runs_here(tools, arguments):
    """Named or picked; under jit as well; what it cannot do is refused by name, with the values."""
    arrays, keywords = arguments("bounds")
    found = KERNEL(*arrays, **keywords)
    _same(tools, found, selected_attention(*arrays, **keywords))
    _same(tools, found, jax.jit(functools.partial(KERNEL, **keywords))(*arrays))
    arrays, keywords = arguments("float32")
    with pytest.raises(NotImplementedError, match="got q float32, index float32"):
        KERNEL(*arrays, **keywords)


# Refusals.


def test_elsewhere_the_two_ops_run(arguments):
    if "mosaic_gpu" in dispatch.available("selected_attention"):
        pytest.skip("the kernel runs here")
    arrays, keywords = arguments("bounds")
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(selected_attention, **keywords), *arrays)
    named = {"selected_attention": "composed", "select_blocks": "xla"}  # the second is composed, too, where top_k has a kernel
    assert heard == {name: named.get(name, dispatch.available(name)[0]) for name in heard}
    assert set(heard) == {"selected_attention", "select_blocks", "gather_attention"}
    with pytest.raises(NotImplementedError, match="no implementation 'mosaic_gpu' on backend"):
        KERNEL(*arrays, **keywords)


@pytest.mark.parametrize("name", ["composed", "reference"])
def test_they_take_no_config(arguments, name):
    arrays, keywords = arguments("bounds")
    with pytest.raises(ValueError, match=f"'{name}' of selected_attention takes no config, got 3"):
        selected_attention(*arrays, **keywords, config=3, implementation=name)


BAD = {
    "unknown kind": ({}, {"kind": "median"}, "'median' is unknown; there are bounds, mean"),
    "index of other pages": ({"index": (8, 2, 4, 2, 64)}, {}, "index and k must have the same pages .* and KV heads"),
    "index of other heads": ({"index": (9, 4, 4, 2, 64)}, {}, "index and k must have the same pages .* and KV heads"),
    "index of another kind": ({}, {"kind": "mean"}, r"must be \[N, K, 4, 1, 64\]"),
    "block size": ({}, {"block_size": 24}, "block_size 24 does not divide page_size 64"),
    "negative budget": ({}, {"budget": -1}, "k must be at least 0, got -1"),
    "no local": ({}, {"local": 0}, "local must be at least 1, got 0"),
    "k and v differ": ({"v": (8, 2, 64, 64)}, {}, "same pages, KV heads and page size"),
    "batches differ": ({"lengths": (3,)}, {}, "same batch"),
    "traced scale": ({}, {"sm_scale": jnp.float32(0.1)}, "sm_scale must be a number known when compiling"),
    "unknown implementation": (
        {},
        {"implementation": "fused"},
        "'fused' of selected_attention is unknown; there are mosaic_gpu, mosaic_tpu, composed",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, keywords, message = BAD[case]
    pool = (9, 2, 64, 64)
    shapes = {"q": (2, 1, 8, 64), "k": pool, "v": pool, "index": (9, 2, 4, 2, 64), "table": (2, 4), "lengths": (2,)} | shapes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name in ("table", "lengths") else jnp.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        selected_attention(**arrays, **(SIZES | {"sm_scale": 0.1} | keywords))
