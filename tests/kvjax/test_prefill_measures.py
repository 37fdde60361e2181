"""Measures of sparse prefill against dense attention written out."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import PagedKV
from kvjax.prefill import DensePrefill, MeanPooled, MeasureOnceMaskOnce, OracleBlocks, PrefillContext, SinkWindow, measures
from kvjax.prefill.measures import ablation, captured_by_rows, captured_mass, measure_prefill, output_error, record_prefill
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.query_sparse_attention import query_sparse_attention

SIZES = {"chi": 8, "key_block": 8, "sink_tokens": 8, "window_tokens": 12}
MOMO = MeasureOnceMaskOnce(**SIZES, gamma=4, k=3, k_exact=2, k_trim=3)
POLICIES = (MOMO, OracleBlocks(k=3, **SIZES), MeanPooled(k=3, **SIZES))


@pytest.fixture(scope="module")
def rows(model, text):
    return measure_prefill(model, text[:160], POLICIES, chunk=32, page_size=16)


@pytest.fixture(scope="module")
def written():
    """A chunk of 32 queries behind 32 tokens, in float32: query, layer, context, and its softmax written out, `[T, H, S]`."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 32, 2, 8)), rng.standard_normal((4, 1, 16, 8)), rng.standard_normal((4, 1, 16, 8))
    layer = PagedKV(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), {})
    place = (jnp.asarray(x, jnp.int32) for x in (np.arange(4)[None], [32], [64]))
    logits = np.einsum("thd,sd->ths", q[0], k.swapaxes(1, 2).reshape(64, 8)) * 0.5
    logits = np.where(np.arange(64) <= 32 + np.arange(32)[:, None, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    ctx = PrefillContext(*place, layer=0, sm_scale=0.5)
    return jnp.asarray(q, jnp.float32), layer, ctx, weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(("k_exact", "estimate"), [(0, "buckets"), (0, "quantile"), (1, "buckets"), (3, "buckets")])
def test_what_rows_capture_is_the_share_of_the_softmax(written, k_exact, estimate):
    """Of their own blocks, as the op lists them, and of the best, found by trying all."""
    query, layer, ctx, weights = written
    policy = dataclasses.replace(MOMO, k_exact=k_exact, estimate=estimate)
    pages = (layer.k, layer.v, ctx.page_table, ctx.starts, ctx.lengths)
    lse = flash_attention(query, *pages, sm_scale=0.5)[1]
    sizes = {"gamma": 4, "block_size": 8, "k_blocks": 3, "window": (8, policy.row_window), "sm_scale": 0.5}
    ids = np.asarray(query_sparse_attention(query, *pages, k_exact=k_exact, estimate=estimate, **sizes)[2])
    own, best = map(np.asarray, captured_by_rows(policy, query, layer, ctx, lse))
    assert own.shape == best.shape == (1, 8, 2)
    blocks = np.arange(64) // 8
    for row, head in np.ndindex(8, 2):
        position, paid = 32 + 4 * row, weights[4 * row, head]
        near = (np.arange(64) < 8) | (np.arange(64) > position - policy.row_window)
        of_blocks = [paid[blocks == j].sum() for j in range(1, (position - policy.row_window) // 8 + 1)]
        top = 1 + np.argsort(of_blocks)[::-1][:3]
        for found, listed in ((own, ids[0, row, head]), (best, top)):
            assert found[0, row, head] == pytest.approx(paid[near | np.isin(blocks, listed)].sum(), abs=1e-5)
    if k_exact == 3:
        assert (own == best).all()


def test_captured_mass_is_the_share_of_the_softmax(written):
    query, layer, ctx, weights = written
    policy = OracleBlocks(k=2, **SIZES)
    found, lists = captured_mass(policy, query, layer, ctx), np.asarray(policy.lists(query, layer, ctx))
    for t, head in np.ndindex(32, 2):
        seen = np.isin(np.arange(64) // 8, lists[0, t // 8, head]) | (np.arange(64) < 8) | (np.arange(64) > 32 + t - 12)
        assert float(found[0, t, head]) == pytest.approx(weights[t, head, seen].sum(), abs=1e-5)


def test_output_error_is_relative():
    dense = jnp.array([[[[3.0, 4.0]]]])
    assert float(output_error(dense + jnp.array([0.0, 1.0]), dense)[0, 0, 0]) == pytest.approx(0.2)


def test_rows_of_a_model(model, rows):
    assert [(row["layer"], row["policy"]) for row in rows] == [(n, str(p)) for n in range(model.config.num_layers) for p in POLICIES]
    for row in rows:
        assert row["queries"] == (160 - OracleBlocks(k=3, **SIZES).dense_tokens) * model.config.num_heads
        assert 0 < row["captured"] <= 1
        assert row["error"] > 0
        if row["policy"] == str(POLICIES[1]):
            assert row["of_oracle"] == pytest.approx(1, abs=1e-6)
        for name in ("error_with_delta", "error_between", "error_between_with_delta"):
            assert (row[name] is None) == (row["policy"] != str(MOMO))
        assert row["listed"] == pytest.approx(3, abs=0.2)
    oracle = [row["captured"] for row in rows if row["policy"] == str(POLICIES[1])]
    means = [row["captured"] for row in rows if row["policy"] == str(POLICIES[2])]
    assert sum(means) < sum(oracle)


def test_errors_between_leave_out_the_exact_queries(model, text, rows):
    """All queries are those between and the exact ones, whose error after correction is none."""
    for row in (row for row in rows if row["policy"] == str(MOMO)):
        share = (MOMO.gamma - 1) / MOMO.gamma
        assert row["error_with_delta"] == pytest.approx(share * row["error_between_with_delta"], rel=1e-3)
        assert row["error_between"] != pytest.approx(row["error"], rel=1e-6)


def test_untrimmed_lists_meet_an_oracle_of_as_many_blocks(model, text):
    """What lists more than k blocks is held against the oracle's as many, and so captures no more than it."""
    untrimmed = dataclasses.replace(MOMO, k_trim=None)
    for row in measure_prefill(model, text[:160], [untrimmed], chunk=32, page_size=16):
        assert row["listed"] > 3.5
        assert row["of_oracle"] <= 1 + 1e-6


def test_lists_of_an_oracle_keep_to_their_budgets(model, text):
    recorded = record_prefill(model, text[:160], chunk=32, page_size=16)
    number, query, place = recorded.chunks[-1]
    ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
    layer, query = PagedKV(*map(jnp.asarray, recorded.pools[number]), {}), jnp.asarray(query)
    budgets = jnp.asarray(np.random.default_rng(0).integers(0, 6, (1, 4, query.shape[2])))
    found = np.asarray(OracleBlocks(k=3, **SIZES).lists_of(query, layer, ctx, budgets, 5))
    for at in np.ndindex(*budgets.shape):
        alone = OracleBlocks(k=max(1, int(budgets[at])), **SIZES).lists(query, layer, ctx)[at]
        assert found[at][found[at] >= 0].tolist() == ([] if budgets[at] == 0 else alone[alone >= 0].tolist())


def test_covering_everything_captures_everything(model, text):
    """Untrimmed unions may hold more than the oracle's budget; here they hold every candidate."""
    policy = dataclasses.replace(MOMO, k=20, k_exact=20, k_trim=None)
    with pytest.raises(ValueError, match="too short to measure"):
        measure_prefill(model, text[:160], [policy], chunk=32, page_size=16)


def test_sinks_and_a_window_have_errors_alone(model, text):
    """The sums of a chunk are those of the policies' own outputs, with and without delta."""
    policies = [SinkWindow(8, 12), SinkWindow(8, 12, 4)]
    window, delta = measure_prefill(model, text[:160], policies, chunk=32, page_size=16)[:2]
    assert (window["policy"], delta["policy"], window["layer"], delta["layer"]) == ("window:8+12", "delta:8+12/4", 0, 0)
    for row in (window, delta):
        assert row["queries"] == (160 - 20) * model.config.num_heads
        assert row["captured"] is row["of_oracle"] is row["listed"] is row["sparsity"] is None
    assert window["error_with_delta"] is window["error_between"] is None
    assert window["error"] == pytest.approx(delta["error"], rel=1e-5)
    assert window["error"] > 0
    assert delta["error_with_delta"] == pytest.approx(0.75 * delta["error_between_with_delta"], rel=1e-3)
    recorded = record_prefill(model, text[:160], chunk=32, page_size=16)
    number, query, place = next(chunk for chunk in recorded.chunks[::-1] if chunk[0] == 0)
    ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
    layer, query = PagedKV(*map(jnp.asarray, recorded.pools[number]), {}), jnp.asarray(query)
    sums = measures._compare_window(SinkWindow(8, 12, 4))(query, layer, ctx)
    pages = (layer.k, layer.v, ctx.page_table, ctx.starts, ctx.lengths)
    dense, _ = flash_attention(query, *pages, sm_scale=ctx.sm_scale)
    errors = [output_error(SinkWindow(8, 12, gamma).attend_sparse(query, layer, ctx), dense) for gamma in (None, 4)]
    rest = [x[:, np.arange(32) % 4 != 0] for x in errors]
    count = query.shape[1] * query.shape[2]
    np.testing.assert_allclose(sums, [count, *(x.sum() for x in errors), 0.75 * count, *(x.sum() for x in rest)], rtol=1e-5)


def test_rows_of_lists_and_paths_are_told(rows):
    """With three of three slots exact rows hold their best; a row says what implementation of each op ran, in every run anew."""
    for row in rows:
        assert row["path"]["flash_attention"] == row["path"]["block_sparse_attention"] == "xla"
        assert ("of_oracle_by_rows" in row) == (row["policy"] == str(MOMO))
        if row["policy"] == str(MOMO):
            assert 0 < row["captured_by_rows"] < row["of_oracle_by_rows"] <= 1 + 1e-6


def test_policies_with_neither_lists_nor_window_are_refused(model, text):
    with pytest.raises(ValueError, match="no lists and no window"):
        measure_prefill(model, text[:64], [DensePrefill()], chunk=32, page_size=16)


def test_ablation_varies_one_thing_at_a_time():
    base = MeasureOnceMaskOnce()
    variants = ablation(base)
    assert variants[0] == base
    assert len(set(variants)) == len(variants)
    fields = [f.name for f in dataclasses.fields(base)]
    changed = {tuple(name for name in fields if getattr(variant, name) != getattr(base, name)) for variant in variants}
    together = {("gamma", "chi"), ("k", "k_trim"), ("k", "k_exact", "k_trim")}
    assert changed == {(), ("gamma",), ("chi",), ("k_exact",), ("k_trim",), ("rank",), ("estimate",), ("delta",)} | together
    assert any(variant.k_exact == variant.k for variant in variants)
