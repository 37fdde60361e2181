"""TopTokens: which tokens a query reads, what it hands to the next step; and writing latent pages, against a loop in
numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import INDEXER, INDEXER_SCALES, PagedKV, append_latents, copy_page, empty_latents
from kvjax.policies.decode import IndexerQuery, SelectContext, TopBlocks, TopTokens, Window, parse, top_tokens
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.indexer_scores import indexer_scores, quantize_keys

P, PAGES, WIDTH, H, D, V, HI, DI = 8, 30, 9, 4, 24, 16, 3, 8
LENGTHS = (70, 0, 9, 33)


def layer_of(seed=0, dtype="float32", index_dtype=None):
    """Latent pages full of random rows."""
    rng = np.random.default_rng(seed)
    layer = empty_latents(PAGES, P, V, D - V, DI, dtype, index_dtype)
    keys = jnp.asarray(rng.standard_normal((PAGES, P, DI)), jnp.float32)
    index = {INDEXER: keys.astype(dtype)} if index_dtype is None else dict(zip((INDEXER, INDEXER_SCALES), quantize_keys(keys), strict=True))
    return layer.replace(pages=layer.pages.replace(k=jnp.asarray(rng.standard_normal(layer.pages.k.shape), dtype)), index=index)


def context(num_queries=1, lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(PAGES)[:WIDTH] for _ in lengths]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((len(lengths), num_queries, HI, DI)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((len(lengths), num_queries, HI)), jnp.float32)
    sizes = {"layer": 0, "num_layers": 1, "page_size": P, "sm_scale": 0.2}
    ctx = SelectContext(jnp.asarray(table), jnp.asarray(lengths, jnp.int32), **sizes, indexer=IndexerQuery(q, weights))
    return jnp.asarray(rng.standard_normal((len(lengths), num_queries, H, D)), jnp.float32), ctx


def best_tokens(layer, ctx, row, t, k):
    """In numpy: the k best tokens up to the query's own, of equal scores the earlier, ascending."""
    num_queries = ctx.indexer.q.shape[1]
    seen = max(int(ctx.lengths[row]) - num_queries + 1 + t, 0)
    keys = np.asarray(layer.index[INDEXER], np.float64)
    if INDEXER_SCALES in layer.index:
        keys = keys * np.asarray(layer.index[INDEXER_SCALES], np.float64)[..., None]
    keys = keys[np.asarray(ctx.page_table[row])].reshape(-1, DI)[:seen]
    dots = np.maximum(keys @ np.asarray(ctx.indexer.q[row, t], np.float64).T, 0)
    order = np.argsort(-(dots @ np.asarray(ctx.indexer.weights[row, t], np.float64)), kind="stable")[:k]
    return sorted(order.tolist())


def listed(ids):
    """Without the -1 at the end."""
    ids = np.asarray(ids)
    kept = ids[ids >= 0].tolist()
    assert (ids[len(kept) :] == -1).all()
    return kept


@pytest.mark.quick_but("2-100-None", "1-10-None")
@pytest.mark.parametrize(
    ("num_queries", "k", "index_dtype"),
    [(1, 10, None), (3, 10, None), (1, 40, None), (2, 100, None), (1, 10, jnp.float8_e4m3fn), (3, 10, jnp.float8_e4m3fn)],
)
def test_lists_the_best_tokens_of_each_query(num_queries, k, index_dtype):
    layer = layer_of(index_dtype=index_dtype)
    query, ctx = context(num_queries)
    hint = jnp.arange(4 * k, dtype=jnp.int32).reshape(4, k)
    blocks, state = TopTokens(k, hinted=True).select(query, layer, ctx, hint)
    assert blocks.block_size == 1
    assert blocks.window is None
    assert blocks.ids.shape == (4, num_queries, k)
    for row, t in np.ndindex(4, num_queries):
        assert listed(blocks.ids[row, t]) == best_tokens(layer, ctx, row, t, k)
    kept = np.array(LENGTHS) > 0
    np.testing.assert_array_equal(np.asarray(state)[kept], np.asarray(blocks.ids)[kept, -1])
    np.testing.assert_array_equal(np.asarray(state)[~kept], np.asarray(hint)[~kept])


def test_the_hint_is_the_list_of_the_step_before(monkeypatch):
    """What `top_k` is given: the state, for every query; nothing where the policy is told so."""
    hints, right = [], top_tokens.top_k

    def watched(scores, k, *, hint, lengths):
        hints.append(hint)
        return right(scores, k, hint=hint, lengths=lengths)

    monkeypatch.setattr(top_tokens, "top_k", watched)
    layer, (query, ctx) = layer_of(), context(2)
    state = TopTokens(10, hinted=True).init(None, 4)
    assert (np.asarray(state) == -1).all()
    first, state = TopTokens(10, hinted=True).select(query, layer, ctx, state)
    np.testing.assert_array_equal(hints[0], np.full((8, 10), -1))
    second, _ = TopTokens(10, hinted=True).select(query, layer, ctx, state)
    np.testing.assert_array_equal(hints[1], np.repeat(np.where((ctx.lengths > 0)[:, None], first.ids[:, -1], -1), 2, axis=0))
    np.testing.assert_array_equal(first.ids, second.ids)
    _, state = TopTokens(10).select(query, layer, ctx, TopTokens(10).init(None, 4))
    assert hints[2] is None
    assert state == ()


def test_a_token_without_a_page_is_never_listed():
    """Where no others are left its place holds -1, and attention reads what there is."""
    layer, (query, ctx) = layer_of(), context(2)
    whole = ctx.page_table
    ctx = ctx.replace(page_table=whole.at[0, 2].set(-1).at[2, 0].set(-1))
    policy = TopTokens(60, hinted=True)
    out, blocks, state = policy.attend(query, layer, ctx, policy.init(None, 4))
    ids = np.asarray(blocks.ids)
    for row, gone in ((0, range(16, 24)), (2, range(8))):
        for t in range(2):
            seen = LENGTHS[row] - 1 + t
            there = ids[row, t][ids[row, t] >= 0].tolist()
            assert not set(there) & set(gone)
            assert len(there) == min(60, seen - 8)
            assert there == sorted(there)
    assert ids[2, 1].tolist() == [-1] * 8 + [8] + [-1] * 51
    np.testing.assert_array_equal(state[2], ids[2, 1])
    kept = np.asarray(layer.pages.k)[np.asarray(whole)[2, 1], 0, 0]
    np.testing.assert_allclose(out[2, 1], np.broadcast_to(kept[:V], (H, V)), rtol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_attends_to_what_it_lists(num_queries):
    layer, (query, ctx) = layer_of(), context(num_queries)
    policy = TopTokens(10, hinted=True)
    out, blocks, _ = policy.attend(query, layer, ctx, policy.init(None, 4))
    assert out.shape == (4, num_queries, H, V)
    for row, t in np.ndindex(4, num_queries):
        tokens = listed(blocks.ids[row, t])
        if not tokens:
            assert not np.asarray(out[row, t]).any()
            continue
        rows = np.asarray(layer.pages.k, np.float64)[np.asarray(ctx.page_table[row]), 0].reshape(-1, D)[tokens]
        logits = np.asarray(query[row, t], np.float64) @ rows.T * 0.2
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(out[row, t], weights @ rows[:, :V] / weights.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_other_policies_read_latent_pages_too():
    """A window of them, exactly as over keys and values of their own; what is dense is tested on whole layers."""
    layer, (query, ctx) = layer_of(), context(2)
    out, *_ = Window(3, 11).attend(query, layer, ctx, ())
    of_keys, *_ = Window(3, 11).attend(query, PagedKV(Pages(layer.pages.k, layer.pages.k), {}), ctx, ())
    np.testing.assert_allclose(out, of_keys[..., :V], rtol=1e-6, atol=1e-6)


def test_what_it_cannot_do_is_refused():
    layer, (query, ctx) = layer_of(), context()
    policy = TopTokens(10, hinted=True)
    with pytest.raises(
        ValueError, match=r"TopTokens\(10, hinted=True\) ranks tokens by a lightning indexer; this layer of PagedKV has none"
    ):
        policy.select(query, PagedKV(Pages(layer.pages.k, layer.pages.k), {}), ctx, policy.init(None, 4))
    with pytest.raises(ValueError, match="lightning indexer"):
        policy.select(query, layer, ctx.replace(indexer=None), policy.init(None, 4))
    for k in (0, 2.5):
        with pytest.raises(ValueError, match="k must be an int of at least 1"):
            TopTokens(k)
    with pytest.raises(ValueError, match=r"carries a state int32 \[4, 10\], got \(\): start from policy.init, or leave hinted out"):
        policy.select(query, layer, ctx, ())
    with pytest.raises(ValueError, match=r"int32 \[4, 10\], got \w+\[4, 9\]"):
        policy.select(query, layer, ctx, TopTokens(9, hinted=True).init(None, 4))


@pytest.mark.parametrize("policy", [TopBlocks(2, block_size=8), TopBlocks(2, block_size=8, index="mean")])
def test_policies_that_scan_an_index_of_blocks_say_that_latent_pages_have_none(policy):
    layer, (query, ctx) = layer_of(), context()
    for call in (policy.select, policy.attend):
        with pytest.raises(ValueError, match=r"scans the index \w+8, which latent pages do not have: use dense, window or tokens:K"):
            call(query, layer, ctx, ())
    with pytest.raises(ValueError, match=r"this layer has \[\]: name it in empty_layer"):
        policy.select(query, PagedKV(Pages(layer.pages.k, layer.pages.k), {}), ctx, ())


def test_it_describes_itself():
    assert TopTokens().k == TopTokens().keys == 2048
    assert TopTokens().describe() == "tokens:2048 (2,048 keys: the tokens that score best)"
    assert str(TopTokens(7, hinted=True)) == "TopTokens(7, hinted=True)"
    assert TopTokens(7).keys_read(5, 0, P) == 5
    assert TopTokens(7).keys_read(500, 0, P) == 7
    assert TopTokens(7).indexes() == ()
    assert parse(TopTokens(7)) == parse("tokens:7") == TopTokens(7)


@pytest.mark.parametrize("index_dtype", [None, jnp.float8_e4m3fn])
def test_append_latents_is_a_loop_over_tokens(index_dtype):
    """Starts inside a page, tokens that are not valid, a table that is too short and one with a hole."""
    rng, before = np.random.default_rng(3), layer_of(index_dtype=index_dtype)
    latents = jnp.asarray(rng.standard_normal((3, 12, D)), jnp.float32)
    keys = jnp.asarray(rng.standard_normal((3, 12, DI)), jnp.float32)
    table = rng.permutation(PAGES)[:9].reshape(3, 3).astype(np.int32)
    table[2, 1] = -1
    starts, valid = np.array([3, 20, 6]), rng.random((3, 12)) < 0.8
    positions = (starts[:, None] + np.arange(12)).astype(np.int32)
    after = append_latents(before, latents, keys, jnp.asarray(positions), jnp.asarray(valid), jnp.asarray(table))
    wanted = {"k": np.array(before.pages.k), **{name: np.array(array) for name, array in before.index.items()}}
    rows = {"k": np.asarray(latents)[:, :, None], INDEXER: np.asarray(keys)}
    if index_dtype is not None:
        rows[INDEXER], rows[INDEXER_SCALES] = map(np.asarray, quantize_keys(keys))
    written = 0
    for row, t in np.ndindex(valid.shape):
        logical, offset = divmod(int(positions[row, t]), P)
        page = table[row, logical] if logical < 3 else -1
        if valid[row, t] and page >= 0:
            wanted["k"][page, :, offset] = rows["k"][row, t]
            for name in before.index:
                wanted[name][page, offset] = rows[name][row, t]
            written += 1
    assert 10 < written < valid.sum()
    for name, array in {"k": after.pages.k, **after.index}.items():
        np.testing.assert_array_equal(np.asarray(array), wanted[name])
    assert after.pages.value_dim == V


def test_a_key_that_is_not_finite_spoils_its_own_token_alone():
    layer, (_, ctx) = layer_of(index_dtype=jnp.float8_e4m3fn), context(lengths=(20,))
    rng = np.random.default_rng(5)
    latents, keys = (jnp.asarray(rng.standard_normal((1, 20, d)), jnp.float32) for d in (D, DI))
    place = (jnp.arange(20, dtype=jnp.int32)[None], jnp.ones((1, 20), bool), ctx.page_table)
    scores = []
    for written in (keys, keys.at[0, jnp.array([5, 9, 14]), 2].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))):
        after = append_latents(layer, latents, written, *place)
        scales = after.index[INDEXER_SCALES]
        scores.append(
            np.asarray(indexer_scores(ctx.indexer.q, ctx.indexer.weights, after.index[INDEXER], *place[2:], ctx.lengths, scales=scales))
        )
    assert np.isnan(scores[1][0, 0]).nonzero()[0].tolist() == [5, 9, 14]
    np.testing.assert_array_equal(np.delete(scores[0], [5, 9, 14], axis=2), np.delete(scores[1], [5, 9, 14], axis=2))


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "float64"])
def test_dtypes_that_nothing_reads_make_no_pages(dtype):
    with pytest.raises(ValueError, match=f"index_dtype one of those or float8_e4m3fn; got dtype float32, index_dtype {dtype}"):
        empty_latents(2, P, V, D - V, DI, jnp.float32, dtype)
    with pytest.raises(ValueError, match=f"latents must be one of float32, bfloat16, float16, .* got dtype {dtype}"):
        empty_latents(2, P, V, D - V, DI, dtype, jnp.float32)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        ({"latents": (2, 3, 1)}, {}, r"latents must be \[B,T,24\] and keys \[B,T,8\]"),
        ({"keys": (2, 1, DI)}, {}, r"latents must be \[B,T,24\] and keys \[B,T,8\]"),
        ({"positions": (2, 1)}, {}, "of one batch"),
        ({"valid": (2, 1)}, {}, "of one batch"),
        ({"page_table": (1, 4)}, {}, "of one batch"),
        ({}, {"keys": "float8_e4m3fn"}, "must be one of float32, bfloat16, float16"),
        ({}, {"latents": "int8"}, "must be one of float32, bfloat16, float16"),
        ({}, {"positions": "float32"}, "positions and page_table must be int32, valid bool"),
        ({}, {"valid": "int32"}, "positions and page_table must be int32, valid bool"),
    ],
)
def test_rows_that_do_not_fit_the_pages_are_not_written(shapes, dtypes, message):
    shapes = {"latents": (2, 3, D), "keys": (2, 3, DI), "positions": (2, 3), "valid": (2, 3), "page_table": (2, 4)} | shapes
    dtypes = {"latents": "float32", "keys": "float32", "positions": "int32", "valid": "bool", "page_table": "int32"} | dtypes
    with pytest.raises(ValueError, match=message):
        append_latents(layer_of(), **{name: jnp.zeros(shape, dtypes[name]) for name, shape in shapes.items()})


def test_copy_page_copies_latents_and_all_that_belongs_to_them():
    before = layer_of(index_dtype=jnp.float8_e4m3fn)
    (after,) = copy_page((jax.tree.map(jnp.copy, before),), (jnp.int32(3),), (jnp.int32(7),))
    assert after.pages.value_dim == V
    for old, new in ((before.pages.k, after.pages.k), *((before.index[name], after.index[name]) for name in before.index)):
        expected = np.array(old)
        expected[7] = expected[3]
        np.testing.assert_array_equal(np.asarray(new), expected)


def test_pages_are_as_large_as_they_say():
    """DeepSeek-V3.2's, bytes per token: 576 latents of 2, and the indexer's 128 elements of 2, or of 1 and a scale of
    4."""
    for index_dtype, expected in ((None, 1152 + 256), (jnp.float8_e4m3fn, 1152 + 132)):
        layer = empty_latents(3, 128, 512, 64, 128, jnp.bfloat16, index_dtype)
        arrays = (layer.pages.k, *layer.index.values())
        assert sum(array.size * array.dtype.itemsize for array in arrays) == 3 * 128 * expected
        assert layer.pages.v is None
