"""Measures of sparse prefill against dense attention written out."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import PagedKV
from kvjax.prefill import MeanPooled, MeasureOnceMaskOnce, OracleBlocks, PrefillContext, SinkWindow
from kvjax.prefill.measures import ablation, captured_mass, measure_prefill, output_error, record_prefill

SIZES = {"chi": 8, "key_block": 8, "sink_tokens": 8, "window_tokens": 12}
MOMO = MeasureOnceMaskOnce(**SIZES, gamma=4, k=3, k_exact=2, k_trim=3)
POLICIES = (MOMO, OracleBlocks(k=3, **SIZES), MeanPooled(k=3, **SIZES))


@pytest.fixture(scope="module")
def rows(model, text):
    return measure_prefill(model, text[:160], POLICIES, chunk=32, page_size=16)


def test_captured_mass_is_the_share_of_the_softmax():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 32, 2, 8)), rng.standard_normal((4, 1, 16, 8)), rng.standard_normal((4, 1, 16, 8))
    layer = PagedKV(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), {})
    ctx = PrefillContext(jnp.arange(4, dtype=jnp.int32)[None], jnp.array([32]), jnp.array([64]), layer=0, sm_scale=0.5)
    ctx = ctx.replace(starts=ctx.starts.astype(jnp.int32), lengths=ctx.lengths.astype(jnp.int32))
    policy = OracleBlocks(k=2, **SIZES)
    query = jnp.asarray(q, jnp.float32)
    found, lists = captured_mass(policy, query, layer, ctx), np.asarray(policy.lists(query, layer, ctx))
    keys = k.swapaxes(1, 2).reshape(64, 8)
    for t, head in np.ndindex(32, 2):
        position = 32 + t
        logits = np.where(np.arange(64) <= position, keys @ q[0, t, head] * 0.5, -np.inf)
        weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        seen = np.isin(np.arange(64) // 8, lists[0, t // 8, head]) | (np.arange(64) < 8) | (np.arange(64) > position - 12)
        assert float(found[0, t, head]) == pytest.approx(weights[seen].sum(), abs=1e-5)


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


def test_policies_without_lists_are_refused(model, text):
    with pytest.raises(ValueError, match="no lists"):
        measure_prefill(model, text[:64], [SinkWindow(8, 12)], chunk=32, page_size=16)


def test_ablation_varies_one_thing_at_a_time():
    base = MeasureOnceMaskOnce()
    variants = ablation(base)
    assert variants[0] == base
    assert len(set(variants)) == len(variants)
    fields = [f.name for f in dataclasses.fields(base)]
    changed = {tuple(name for name in fields if getattr(variant, name) != getattr(base, name)) for variant in variants}
    together = {("gamma", "chi"), ("k", "k_trim"), ("k", "k_exact", "k_trim")}
    assert changed == {(), ("gamma",), ("chi",), ("k_exact",), ("k_trim",), ("rank",), ("delta",)} | together
    assert any(variant.k_exact == variant.k for variant in variants)
