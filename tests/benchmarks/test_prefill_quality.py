"""Measures of sparse prefill against dense attention written out."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefill_chunks import FOLDER, SIZES, peer
from scipy import stats
from tiny_models import make_model, shallow

from benchmarks import missed
from benchmarks import prefill_quality as measures
from benchmarks.missed import drawn_positions, sample_every, sampled_miss
from benchmarks.prefill_quality import ablation, captured_by_rows, captured_mass, measure_prefill, output_error, record_prefill
from kvjax.cache import PagedKV
from kvjax.evaluation.oracle_blocks import OracleBlocks
from kvjax.evaluation.statistics import mean_over_blocks
from kvjax.policies.prefill import DensePrefill, MeasureOnceMaskOnce, PrefillContext, SinkWindow, parse_prefill
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.core.pages import Pages

MOMO = MeasureOnceMaskOnce(**SIZES, gamma=4, k=3, k_exact=2, k_trim=3)
POLICIES = (MOMO, OracleBlocks(k=3, **SIZES), peer("mean", 3))


@pytest.fixture(scope="module")
def model():
    return shallow(make_model())


@pytest.fixture(scope="module")
def rows(model, text):
    return measure_prefill(model, text[:160], POLICIES, chunk=32, page_size=16)


@pytest.fixture(scope="module")
def written():
    """A chunk of 32 queries behind 32 tokens, in float32: query, layer, context, and its softmax written out, `[T, H,
    S]`."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 32, 2, 8)), rng.standard_normal((4, 1, 16, 8)), rng.standard_normal((4, 1, 16, 8))
    layer = PagedKV(Pages(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)), {})
    place = (jnp.asarray(x, jnp.int32) for x in (np.arange(4)[None], [32], [64]))
    logits = np.einsum("thd,sd->ths", q[0], k.swapaxes(1, 2).reshape(64, 8)) * 0.5
    logits = np.where(np.arange(64) <= 32 + np.arange(32)[:, None, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    ctx = PrefillContext(*place, layer=0, sm_scale=0.5)
    return jnp.asarray(q, jnp.float32), layer, ctx, weights / weights.sum(-1, keepdims=True)


@pytest.mark.quick_but("0-buckets")
@pytest.mark.parametrize(
    ("k_exact", "estimate"), [(0, "buckets"), (0, "quantile"), pytest.param(1, "buckets", marks=pytest.mark.long), (3, "buckets")]
)
def test_what_rows_capture_is_the_share_of_the_softmax(written, k_exact, estimate):
    """Of their own blocks, as the op lists them, and of the best, found by trying all."""
    query, layer, ctx, weights = written
    policy = dataclasses.replace(MOMO, k_exact=k_exact, estimate=estimate)
    pages = (layer.pages, ctx.page_table, ctx.starts, ctx.lengths)
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
        assert row["queries"] == (160 - OracleBlocks(k=3, **SIZES).dense_tokens) * model.config.layers[0].mixer.num_heads
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


@pytest.mark.long
def test_untrimmed_lists_meet_an_oracle_of_as_many_blocks(model, text):
    """What lists more than k blocks is held against the oracle's as many, and so captures no more than it."""
    untrimmed = dataclasses.replace(MOMO, k_trim=None)
    for row in measure_prefill(model, text[:160], [untrimmed], chunk=32, page_size=16):
        assert row["listed"] > 3.5
        assert row["of_oracle"] <= 1 + 1e-6


@pytest.mark.long
def test_lists_of_an_oracle_keep_to_their_budgets(model, text):
    recorded = record_prefill(model, text[:160], chunk=32, page_size=16)
    number, query, place = recorded.chunks[-1]
    ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
    layer, query = PagedKV(jax.tree.map(jnp.asarray, recorded.pools[number]), {}), jnp.asarray(query)
    budgets = jnp.asarray(np.random.default_rng(0).integers(0, 6, (1, 4, query.shape[2])))
    found = np.asarray(OracleBlocks(k=3, **SIZES).lists_of(query, layer, ctx, budgets, 5))
    for at in np.ndindex(*budgets.shape):
        alone = OracleBlocks(k=max(1, int(budgets[at])), **SIZES).lists(query, layer, ctx)[at]
        assert found[at][found[at] >= 0].tolist() == ([] if budgets[at] == 0 else alone[alone >= 0].tolist())


@pytest.mark.long
def test_covering_everything_captures_everything(model, text):
    """Untrimmed unions may hold more than the oracle's budget; here they hold every candidate."""
    policy = dataclasses.replace(MOMO, k=20, k_exact=20, k_trim=None)
    with pytest.raises(ValueError, match="too short to measure"):
        measure_prefill(model, text[:160], [policy], chunk=32, page_size=16)


@pytest.mark.long
def test_sinks_and_a_window_have_errors_alone(model, text):
    """The sums of a chunk are those of the policies' own outputs, with and without delta."""
    policies = [SinkWindow(8, 12), peer("delta", 8, 12, 4)]
    window, delta = measure_prefill(model, text[:160], policies, chunk=32, page_size=16)[:2]
    assert (window["policy"], delta["policy"], window["layer"], delta["layer"]) == ("window:8+12", "delta:8+12/4", 0, 0)
    for row in (window, delta):
        assert row["queries"] == (160 - 20) * model.config.layers[0].mixer.num_heads
        assert row["captured"] is row["of_oracle"] is row["listed"] is row["sparsity"] is None
    assert window["error_with_delta"] is window["error_between"] is None
    assert window["error"] == pytest.approx(delta["error"], rel=1e-5)
    assert window["error"] > 0
    assert delta["error_with_delta"] == pytest.approx(0.75 * delta["error_between_with_delta"], rel=1e-3)
    recorded = record_prefill(model, text[:160], chunk=32, page_size=16)
    number, query, place = next(chunk for chunk in recorded.chunks[::-1] if chunk[0] == 0)
    ctx = PrefillContext(*map(jnp.asarray, place), layer=0, sm_scale=recorded.sm_scale)
    layer, query = PagedKV(jax.tree.map(jnp.asarray, recorded.pools[number]), {}), jnp.asarray(query)
    sums = measures._compare_window(policies[1])(query, layer, ctx)
    pages = (layer.pages, ctx.page_table, ctx.starts, ctx.lengths)
    dense, _ = flash_attention(query, *pages, sm_scale=ctx.sm_scale)
    errors = [output_error(policy.attend_sparse(query, layer, ctx), dense) for policy in policies]
    rest = [x[:, np.arange(32) % 4 != 0] for x in errors]
    count = query.shape[1] * query.shape[2]
    np.testing.assert_allclose(sums, [count, *(x.sum() for x in errors), 0.75 * count, *(x.sum() for x in rest)], rtol=1e-5)


def test_rows_of_lists_and_paths_are_told(rows):
    """With three of three slots exact rows hold their best; a row says what implementation of each op ran, in every run
    anew."""
    for row in rows:
        assert row["path"]["flash_attention"] == row["path"]["block_sparse_attention"] == "xla"
        assert ("of_oracle_by_rows" in row) == (row["policy"] == str(MOMO))
        if row["policy"] == str(MOMO):
            assert 0 < row["captured_by_rows"] < row["of_oracle_by_rows"] <= 1 + 1e-6


def test_queries_that_chose_the_lists_do_not_judge_them():
    chooses = parse_prefill(f"{FOLDER}/bounds_share.py:BoundsShare")
    assert inspect.signature(measures.measure_recorded).parameters["seed"].default != chooses.seed


def test_policies_with_neither_lists_nor_window_are_refused(model, text):
    with pytest.raises(ValueError, match="has neither lists for tiles of queries nor a window"):
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


# What was missed, sampled.


def sampled_means(policy, written, seeds, every):
    """`[seeds, R, H]`: what the drawn queries miss, of every seed, and their positions."""
    query, layer, ctx = written
    lists = policy.lists(query, layer, ctx)
    one = jax.jit(lambda seed: sampled_miss(policy, query, layer, ctx, every=every, seed=seed, blocks=lists))
    missed, positions, counts = map(np.stack, zip(*map(one, range(seeds)), strict=True))
    assert counts[:, 0, :-1].all()
    assert not counts[:, 0, -1].any(), "the run behind the chunk"
    return missed[:, 0, :-1].astype(np.float64), positions[:, 0, :-1]


@pytest.fixture(scope="module")
def uneven():
    """512 queries behind 512 tokens, of which every 16th is four times as sharp as the others: it sees less far."""
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((1, 512, 2, 8)), rng.standard_normal((64, 1, 16, 8)), rng.standard_normal((64, 1, 16, 8))
    q[:, ::16] *= 4
    layer = PagedKV(Pages(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)), {})
    place = (jnp.asarray(x, jnp.int32) for x in (np.arange(64)[None], [512], [1024]))
    return jnp.asarray(q, jnp.float32), layer, PrefillContext(*place, layer=0, sm_scale=0.5)


def held_by_interval(figures, whole):
    """How many of the rows' intervals hold the whole figure."""
    return np.mean([whole in mean_over_blocks(of_seed) for of_seed in figures])


@pytest.mark.quick_but("none", "lists")
@pytest.mark.parametrize("bias", ["none", "grid", "lists"])
def test_sampled_miss_agrees_with_the_whole(uneven, monkeypatch, bias):
    """Its 95% interval holds what all queries miss for about 95% of seeds, and its mean over seeds is it. Drawn from a
    fixed grid, or by shorter lists, it fails both."""
    policy, every = OracleBlocks(k=12, **SIZES), 16
    if bias == "grid":
        grid = lambda starts, count, every, seed: starts[:, None] + jnp.arange(0, count + 1, every)  # noqa: E731
        monkeypatch.setattr(missed, "drawn_positions", grid)
    if bias == "lists":
        share = missed.missed_share
        monkeypatch.setattr(missed, "missed_share", lambda found, blocks, *place: share(found, blocks.at[..., ::4].set(-1), *place))
    whole = 1 - np.asarray(captured_mass(policy, *uneven), np.float64).mean()
    found, _ = sampled_means(policy, uneven, 60, every)
    of_queries = found.mean(2)
    held = held_by_interval(of_queries, whole)
    off = abs(of_queries.mean() - whole) / (of_queries.mean(1).std(ddof=1) / 60**0.5 + 1e-9)
    assert (held >= 0.9) == (bias == "none"), held
    assert (off < 3.5) == (bias == "none"), off


@pytest.mark.long
def test_sampled_shares_are_those_of_their_queries(uneven):
    """Query by query what `captured_mass` leaves, over sorted lists that end in -1 too."""
    for policy in (OracleBlocks(k=12, **SIZES), MOMO):
        found, positions = sampled_means(policy, uneven, 2, 8)
        whole = 1 - np.asarray(captured_mass(policy, *uneven))[0]
        for of_seed, at in zip(found, positions, strict=True):
            np.testing.assert_allclose(of_seed, whole[at - 512], atol=2e-5)
        assert (positions[0] != positions[1]).any()


def test_draws_depend_on_no_cut():
    """One of every run of positions, whatever chunk holds it; each position of a run is drawn equally often."""
    whole = np.asarray(drawn_positions(jnp.array([0]), 512, 16, 7))[0, :-1]
    assert (whole // 16 == np.arange(32)).all()
    for starts, size in (((0, 128, 256, 384), 128), ((0, 200, 400), 200)):
        parts = [np.asarray(drawn_positions(jnp.array([at]), size, 16, 7))[0] for at in starts]
        inside = [part[(part >= at) & (part < min(at + size, 512))] for at, part in zip(starts, parts, strict=True)]
        assert np.concatenate(inside).tolist() == whole.tolist()
    offsets = np.asarray(drawn_positions(jnp.array([0]), 16 * 512, 16, 1))[0] % 16
    assert stats.chisquare(np.bincount(offsets, minlength=16)).pvalue > 1e-3
    with pytest.raises(ValueError, match="every must be at least 1 query, got 0"):
        drawn_positions(jnp.array([0]), 16, 0, 1)


@pytest.mark.parametrize(("tokens", "read", "every"), [(8192, 5248, 8), (32768, 5248, 32), (2**20, 5248, 1024), (1024, 5248, 1)])
def test_sampling_costs_five_percent_at_most(tokens, read, every):
    """In operations: half a product with half the keys, against two products with what lists hold."""
    assert sample_every(tokens, read) == every
    assert (tokens / 2 * 2) / every <= 0.05 * read * 4
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        sample_every(0, read)


@pytest.mark.long
def test_rows_say_what_was_missed(model, text, rows):
    """Beside what was captured, over the same queries; by head on request."""
    for row in rows:
        low, high = row["missed"]["low"], row["missed"]["high"]
        assert low < row["missed"]["value"] < high
        assert low - (high - low) < 1 - row["captured"] < high + (high - low)
        assert row["sampled"] == pytest.approx(row["queries"] / model.config.layers[0].mixer.num_heads / row["sampled_every"], abs=2)
        assert "missed_by_head" not in row
    row = measure_prefill(model, text[:160], POLICIES[1:2], chunk=32, page_size=16, by_head=True)[0]
    assert len(row["missed_by_head"]) == model.config.layers[0].mixer.num_heads
    assert np.mean([head["value"] for head in row["missed_by_head"]]) == pytest.approx(row["missed"]["value"])
