"""Pages themselves, and what every op that takes them promises: V of another width or format than K, V as a view of K,
refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from quick_cases import rest_long

from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import CODES, PageFormat, Pages, check_pages, read


def _pages(k=(9, 2, 16, 32), v=(9, 2, 16, 32), value_dim=None, dtype="float32", v_dtype=None) -> Pages:
    return Pages(jnp.zeros(k, dtype), None if v is None else jnp.zeros(v, v_dtype or dtype), value_dim)


def test_sizes_and_formats_are_those_of_the_arrays():
    pages = _pages(v=(9, 2, 16, 24), dtype="bfloat16", v_dtype="float16")
    assert (pages.num_pages, pages.kv_heads, pages.page_size, pages.head_dim, pages.v_head_dim) == (9, 2, 16, 32, 24)
    assert (pages.k_format, pages.v_format) == (PageFormat("bfloat16"), PageFormat("float16"))
    assert pages.k_format.dtype == jnp.bfloat16
    latent = _pages(k=(9, 1, 16, 32), v=None, value_dim=24, dtype="float16")
    assert (latent.v_head_dim, latent.v_format, latent.values.shape) == (24, PageFormat("float16"), (9, 1, 16, 24))


def test_a_format_is_static_and_validates_itself():
    assert hash(PageFormat("float32")) == hash(PageFormat("float32"))
    assert [PageFormat(codes).dtype.name for codes in CODES] == list(CODES)
    with pytest.raises(ValueError, match=r"pages hold float32, bfloat16, float16, .*e8, not 'int3': use one of these"):
        PageFormat("int3")
    with pytest.raises(ValueError, match="not 'float8_e4m3fn'"):
        _pages(dtype="float8_e4m3fn").k_format  # noqa: B018


@pytest.mark.parametrize("pages", [_pages(), _pages(v=None, value_dim=8)], ids=["k and v", "a view"])
def test_a_pytree_under_jit(pages):
    """Leaves are the arrays; what is static comes through, and is part of what jit compiles for."""
    traced = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pages):
        traced.append(pages.value_dim)
        return pages.replace(k=pages.k + 1)

    value_dim, count = pages.value_dim, len(jax.tree.leaves(pages))
    after = step(step(jax.tree.map(jnp.copy, pages)))
    assert isinstance(after, Pages)
    assert (after.value_dim, len(jax.tree.leaves(after)), float(after.k.min())) == (value_dim, count, 2.0)
    assert traced == [value_dim]
    assert count == (2 if value_dim is None else 1)
    shapes = jax.eval_shape(lambda pages: pages, pages)
    check_pages(shapes)
    assert jax.tree.structure(shapes) == jax.tree.structure(pages)


BAD = {
    "an array": (jnp.zeros((9, 2, 16, 32)), r"must be pallas_kernels.core.pages.Pages\(k, v\), got ArrayImpl"),
    "k of three axes": (_pages(k=(9, 16, 32)), r"k \[N,K,P,D\] and v \[N,K,P,Dv\]; got k float32\[9, 16, 32\]"),
    "v of three axes": (_pages(v=(9, 16, 32)), r"v float32\[9, 16, 32\]"),
    "no tokens": (_pages(k=(9, 2, 0, 32), v=(9, 2, 0, 32)), "no axis of pages may be empty"),
    "no v": (_pages(v=None), "need v, or v=None and value_dim .* got value_dim None"),
    "v and value_dim": (_pages(value_dim=8), "need v, or v=None and value_dim .* got value_dim 8"),
    "fewer pages of v": (_pages(v=(8, 2, 16, 32)), r"same pages, KV heads and page size; got .* v float32\[8, 2, 16, 32\]"),
    "other heads of v": (_pages(v=(9, 1, 16, 32)), "same pages, KV heads and page size"),
    "smaller pages of v": (_pages(v=(9, 2, 8, 32)), "same pages, KV heads and page size"),
    "a wide view": (_pages(v=None, value_dim=33), "value_dim must be an int from 1 to the head dim 32, got 33"),
    "an empty view": (_pages(v=None, value_dim=0), "got 0"),
    "a view of 8.0": (_pages(v=None, value_dim=8.0), r"got 8\.0"),
    "integers": (_pages(dtype="int8"), r"k must be one of float32, bfloat16, float16: cast it .* got k int8"),
    "8-bit v": (_pages(v_dtype="float8_e5m2"), r"v must be one of .* v float8_e5m2"),
}


@pytest.mark.parametrize("case", BAD)
def test_pages_whose_parts_do_not_fit_are_refused(case):
    pages, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        check_pages(pages)
    with pytest.raises(ValueError, match=message):
        gather_attention(jnp.zeros((1, 1, 4, 32)), pages, jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), sm_scale=1.0)


def test_read_takes_a_tile_of_both(tools):
    """Per KV head and per query head, against numpy; a view of K is its first columns."""
    paged = tools.make_paged(lengths=(96, 96))
    rng, (k, v) = np.random.default_rng(0), (np.nan_to_num(x) for x in (paged.k, paged.v[..., :24]))
    for rows in (2, 8):
        ids, tokens = rng.integers(0, len(k), (rows, 3)), rng.integers(0, 12, (rows, 3))
        found = read(Pages(jnp.asarray(k), jnp.asarray(v)), jnp.asarray(ids), jnp.asarray(tokens), 4)
        for tile, pool in zip(found, (k, v), strict=True):
            for r in range(rows):
                blocks = [pool[i, r * 2 // rows, t : t + 4] for i, t in zip(ids[r], tokens[r], strict=True)]
                np.testing.assert_array_equal(tile[r], np.concatenate(blocks))
        of_view = read(Pages(jnp.asarray(k), value_dim=24), jnp.asarray(ids), jnp.asarray(tokens), 4)
        np.testing.assert_array_equal(of_view[1], found[0][..., :24])


# Every attention op, over pages whose V is not like K.

FORMS = {
    "narrow values": lambda k, v: Pages(k, v[..., :24]),
    "wide values": lambda k, v: Pages(k, jnp.concatenate([v, v[..., :8] + 1], axis=-1)),
    "values of another format": lambda k, v: Pages(k, v.astype(jnp.bfloat16)),
    "keys of another format": lambda k, v: Pages(k.astype(jnp.bfloat16), v),
    "a view of the keys": lambda k, v: Pages(k, value_dim=20),
}
SELECTION = {"gamma": 3, "block_size": 4, "k_blocks": 5, "k_exact": 2, "estimate": "buckets"}
SIZES = {"kind": "bounds", "block_size": 16, "budget": 1, "sink": 1, "local": 1}
OPS = {
    "gather_attention": ("xla", {}),
    "selected_attention": ("composed", SIZES),
    "flash_attention": ("xla", {"window": (3, 40)}),
    "block_sparse_attention": ("xla", {"block_size": 8, "query_tile": 3, "window": (3, 9)}),
    "query_sparse_attention": ("xla", SELECTION),
}


def _operands(tools, op: str, form: str) -> tuple[list, dict]:
    """Operands of a call of 7 queries a row (of one that decodes: 2), and its keywords."""
    decodes = op in ("gather_attention", "selected_attention")
    paged = tools.make_paged(seed=3, lengths=(96, 17, 40), num_queries=2 if decodes else 7)
    pages, keywords = FORMS[form](paged.k, paged.v), {"sm_scale": paged.sm_scale, **OPS[op][1]}
    operands = [paged.q, pages, paged.page_table, paged.lengths]
    if not decodes:
        operands.insert(3, jnp.maximum(paged.lengths - 7, 0))
    if op == "selected_attention":
        operands.insert(2, paging.public("page_index")(jnp.nan_to_num(pages.k), kind="bounds", block_size=16))
    if op == "block_sparse_attention":
        keywords["blocks"] = tools.ragged_lists(1, (3, 3, 8), 12, 6)
    return operands, keywords


def _run(op: str, operands, keywords, implementation: str):
    return getattr(__import__(dispatch.MODULES[op], fromlist=[op]), op)(*operands, **keywords, implementation=implementation)


def _check(tools, op: str, form: str, change=lambda pages: pages) -> None:
    operands, keywords = _operands(tools, op, form)
    expected = _run(op, operands, keywords, "reference")
    assert expected[0].shape[-1] == operands[1].v_head_dim
    found = _run(op, [change(x) if isinstance(x, Pages) else x for x in operands], keywords, OPS[op][0])
    tools.assert_rows_close(found[0], expected[0], 1e-5)
    tools.assert_lse_close(found[1], expected[1])


@pytest.mark.quick_but(
    "selected_attention-narrow values",
    "block_sparse_attention-narrow values",
    "query_sparse_attention-narrow values",
    "selected_attention-keys of another format",
    "gather_attention-keys of another format",
    "gather_attention-a view of the keys",
    "query_sparse_attention-a view of the keys",
    "flash_attention-narrow values",
    "block_sparse_attention-a view of the keys",
    "block_sparse_attention-keys of another format",
)
@pytest.mark.parametrize("form", rest_long(FORMS, "narrow values", "keys of another format", "a view of the keys"))
@pytest.mark.parametrize("op", OPS)
def test_values_need_not_be_like_keys(tools, op, form):
    _check(tools, op, form)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_agrees_with_attention_over_arrays_that_are_alike(tools, op):
    """Narrow values and a view are columns of attention with values as wide as its keys, which the ops' own suites
    compare with JAX's."""
    (q, pages, *rest), keywords = _operands(tools, op, "narrow values")
    whole = Pages(pages.k, jnp.pad(pages.v, ((0, 0), (0, 0), (0, 0), (0, 8))))
    tools.assert_rows_close(
        _run(op, (q, pages, *rest), keywords, "reference")[0], _run(op, (q, whole, *rest), keywords, "reference")[0][..., :24], 1e-6
    )
    view, same = Pages(pages.k, value_dim=20), Pages(pages.k, pages.k)
    tools.assert_rows_close(
        _run(op, (q, view, *rest), keywords, "reference")[0], _run(op, (q, same, *rest), keywords, "reference")[0][..., :20], 1e-6
    )


MUTANTS = {
    "values one column late": ("narrow values", lambda pages: pages.replace(v=jnp.roll(pages.v, 1, axis=3))),
    "values from keys": ("narrow values", lambda pages: pages.replace(v=pages.k[..., :24])),
    "a view one column late": ("a view of the keys", lambda pages: Pages(pages.k, jnp.roll(pages.k, -1, axis=3)[..., :20])),
    "a view of the last columns": ("a view of the keys", lambda pages: Pages(pages.k, pages.k[..., -20:])),
    "values rounded as the keys are": ("keys of another format", lambda pages: pages.replace(v=pages.v.astype(jnp.bfloat16))),
}


@pytest.mark.quick_but("query_sparse_attention-values rounded as the keys are", "query_sparse_attention-a view one column late")
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("op", OPS)
def test_mutant_fails(tools, op, mutant):
    form, change = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        _check(tools, op, form, change)


KERNELS = {
    "narrow values": lambda k: Pages(k, k[..., :64]),
    "values of another format": lambda k: Pages(k, k.astype(jnp.float16)),
    "a view of the keys": lambda k: Pages(k, value_dim=64),
}


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize(
    ("op", "name", "keywords"),
    [
        ("gather_attention", "mosaic_gpu", {}),
        ("gather_attention", "mosaic_tpu", {}),
        ("selected_attention", "mosaic_gpu", SIZES | {"block_size": 128}),
        ("flash_attention", "mosaic_gpu", {}),
        ("block_sparse_attention", "mosaic_gpu", {"block_size": 64, "query_tile": 128}),
        ("query_sparse_attention", "mosaic_gpu", SELECTION | {"block_size": 128}),
    ],
)
def test_kernels_say_what_they_cannot_read(op, name, keywords, form):
    k = jnp.zeros((4, 2, 128, 128), jnp.bfloat16)
    pages, like = KERNELS[form](k), Pages(k, k)
    operands = [jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)]
    if op not in ("gather_attention", "selected_attention"):
        operands.insert(2, jnp.zeros(1, jnp.int32))
    if op == "selected_attention":
        operands.insert(1, jnp.zeros((4, 2, 1, 2, 128), jnp.bfloat16))
    if op == "block_sparse_attention":
        keywords = keywords | {"blocks": jnp.zeros((1, 1, 8, 4), jnp.int32)}

    def says(pages):
        arrays = (operands[0], pages.k, pages.v, *operands[1:])
        return paging.unsupported(op, name, *arrays, value_dim=pages.value_dim, sm_scale=0.1, **keywords)

    assert says(like) is None
    reason = "the first 64 columns of K" if pages.v is None else "k and v of one shape and format; got k bfloat16"
    assert reason in says(pages)


@pytest.mark.parametrize("form", FORMS)
def test_append_writes_what_the_pages_are(form):
    """Rounded to the format of K and of V; V is not given where it is a view. Against numpy."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((6, 2, 16, 32)), jnp.float32) for _ in range(2))
    pages = FORMS[form](k, v)
    new_k, new_v = (jnp.asarray(rng.standard_normal((2, 3, 2, dim)), jnp.float32) for dim in (32, pages.v_head_dim))
    table = jnp.array([[3, 1], [5, -1]], jnp.int32)
    positions = jnp.array([[14, 15, 16], [15, 16, 17]], jnp.int32)
    places = {(0, 0): (3, 14), (0, 1): (3, 15), (0, 2): (1, 0), (1, 0): (5, 15)}  # row 1 has no second page
    rest = (positions, jnp.ones((2, 3), bool), table)
    for name in ("reference", "xla"):
        found, indexes = append_tokens(pages, {}, new_k, None if pages.v is None else new_v, *rest, kinds=(), implementation=name)
        assert indexes == {}
        assert jax.tree.structure(found) == jax.tree.structure(pages)
        for new, old, tokens in ((found.k, pages.k, new_k), (found.v, pages.v, new_v)):
            if old is None:
                continue
            expected = np.array(old)
            for (row, t), (page, at) in places.items():
                expected[page, :, at] = np.asarray(tokens[row, t].astype(old.dtype))
            assert new.dtype == old.dtype
            np.testing.assert_array_equal(np.asarray(new, np.float32), expected.astype(np.float32))
