"""Prefill policies: what covers everything is dense; each policy's rule against a plain one; chunks, padding,
extending."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefill_chunks import (
    PAGE_WINDOW,
    SCALE,
    SIZES,
    attend,
    attend_sparse,
    chunk,
    close,
    distant,
    find_lists,
    laid_out,
    listed,
    paid,
    peer,
    tiles,
)
from quick_cases import some_long

from kvjax import Engine
from kvjax.cache import PagedKV
from kvjax.evaluation.oracle_blocks import OracleBlocks, attention_mass
from kvjax.evaluation.prompt_recall import ListedDense
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, MeasureOnceMaskOnce, SinkWindow
from pallas_kernels.core.pages import Pages

SPARSE_BOUNDS = SIZES | PAGE_WINDOW | {"dense_below": 0}
MOMO = {"gamma": 4, "k": 5, "k_exact": 2, "k_trim": 4}
COVERING = {
    "momo": MeasureOnceMaskOnce(**SIZES, gamma=4, k=16, k_exact=3, k_trim=16),
    "momo, exact, untrimmed": MeasureOnceMaskOnce(**SIZES, gamma=2, k=16, k_exact=16, k_trim=None),
    "momo, all estimated, no delta": MeasureOnceMaskOnce(**SIZES, gamma=4, k=16, k_exact=0, k_trim=16, delta="off"),
    "bounds": BoundsBlocks(**SPARSE_BOUNDS, k=16),
    "oracle": OracleBlocks(**SIZES, k=16),
    "window": SinkWindow(8, 120),
    "every block listed": ListedDense(**SIZES),
}
SPARSE = {
    "momo": MeasureOnceMaskOnce(**SIZES, **MOMO),
    "momo, quantile": MeasureOnceMaskOnce(**SIZES | MOMO | {"key_block": 1, "k": 20, "k_trim": 30}, estimate="quantile"),
    "momo, no delta": MeasureOnceMaskOnce(**SIZES, **MOMO, delta="off"),
    "bounds": BoundsBlocks(**SPARSE_BOUNDS, k=3),
    "bounds, maximum": BoundsBlocks(**SPARSE_BOUNDS, k=3, pooling="max"),
    "oracle": OracleBlocks(**SIZES, k=3),
    "window": SinkWindow(8, 12),
}
LISTING = ("momo", "bounds", "oracle")
LONG = ("momo, exact, untrimmed", "momo, quantile", "bounds, maximum", "momo, no delta")
"""Variants: what they show, another case shows nearly as well."""
ENGINE = {"pages": 48, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,)}
"""Sizes of every engine here, so that programs are shared."""


def mostly(names):
    return some_long(names, *(name for name in names if name in LONG))


# A policy that covers everything is dense.


@pytest.mark.quick_but("momo", "oracle", "momo, all estimated, no delta")
@pytest.mark.parametrize("name", mostly(COVERING))
def test_covering_everything_is_dense(name):
    arguments = chunk()
    sparse = attend_sparse(COVERING[name], *arguments)
    assert jnp.isfinite(sparse).all()
    close(sparse, attend(DensePrefill(), *arguments))


@pytest.mark.quick_but("momo")
@pytest.mark.parametrize("name", mostly(SPARSE))
def test_dropping_keys_is_not_dense(name):
    """The comparison above would notice missing keys."""
    arguments = chunk()
    difference = attend_sparse(SPARSE[name], *arguments) - attend(DensePrefill(), *arguments)
    assert jnp.abs(difference[:, :56]).max() > 1e-2


@pytest.mark.parametrize("name", ["momo", pytest.param("oracle", marks=pytest.mark.long)])
def test_logits_of_a_model_under_a_covering_policy(model, text, name):
    """Two layers, chunks of 32 over pages of 16, sparse whatever the length."""
    engine = Engine(model, prefill=COVERING[name], **ENGINE)
    (sequence,) = engine.prefill([text[:119]])
    oracle = model.full_forward(text[:128])[118]
    np.testing.assert_allclose(np.asarray(sequence.logits), oracle, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", mostly(LISTING))
@pytest.mark.parametrize("start", [40, 64])
def test_dense_tokens_is_where_lists_hold_everything(name, start):
    """At that length lists, sinks and window hold every key, so that falling back to dense changes nothing."""
    policy = SPARSE[name]
    start = start if start < policy.dense_tokens else policy.dense_tokens - 16
    arguments, written = chunk(start=start, length=policy.dense_tokens), policy.dense_tokens - start
    close(attend_sparse(policy, *arguments), attend(DensePrefill(), *arguments), rows=written)


def test_falls_back_to_dense_and_says_so(caplog):
    policy = OracleBlocks(**SIZES, k=3)
    assert policy.dense_tokens == 3 * 8 + 8 + 12
    for length in (44, 45):
        arguments = chunk(start=length - 24, length=length)
        dense = np.asarray(attend(DensePrefill(), *arguments))[:, :24]
        assert (np.asarray(attend(policy, *arguments))[:, :24] == dense).all() == (length == 44)
    assert "dense up to 44 tokens" in policy.describe()
    with caplog.at_level("INFO", logger="kvjax.policies.prefill.lists"):
        jax.eval_shape(OracleBlocks(**SIZES, k=14).attend, *chunk())
    assert "dense, because no sequence of this page table (128 tokens) exceeds 132" in caplog.text


@pytest.mark.parametrize("name", ["momo", pytest.param("oracle", marks=pytest.mark.long)])
def test_covering_everything_is_dense_in_bfloat16(name):
    query, layer, ctx = chunk()
    layer = PagedKV(Pages(layer.pages.k.astype(jnp.bfloat16), layer.pages.v.astype(jnp.bfloat16)), {})
    arguments = (query.astype(jnp.bfloat16), layer, ctx)
    sparse = attend_sparse(COVERING[name], *arguments)
    assert sparse.dtype == jnp.bfloat16
    close(sparse.astype(jnp.float32), attend(DensePrefill(), *arguments).astype(jnp.float32), tolerance=2e-2)


# Each policy's rule.


def test_every_gamma_th_query_is_exact():
    arguments = chunk()
    found, dense = attend_sparse(SPARSE["momo"], *arguments), attend(DensePrefill(), *arguments)
    close(found[:, ::4], dense[:, ::4], rows=14)
    assert jnp.abs(found - dense)[:, 1:56:4].max() > 1e-2


def test_oracle_takes_the_most_attention():
    query, layer, ctx = chunk()
    lists, weights = find_lists(OracleBlocks(**SIZES, k=3), query, layer, ctx), paid(query, layer, ctx)
    mass = attention_mass(query, layer, ctx, 8, 8)
    np.testing.assert_allclose(np.asarray(mass[0].sum(-1))[:7], 8, rtol=1e-5)
    assert not np.asarray(mass[0, 7:]).any(), "padding counts nothing"
    for tile, queries, first, last in tiles(range(64, 120)):
        for head in range(6):
            of_blocks = [weights[head, queries, block * 8 : block * 8 + 8].sum() for block in range(16)]
            np.testing.assert_allclose(np.asarray(mass[0, tile, head]), of_blocks, atol=1e-5)
            best = sorted(sorted(distant(first, last), key=lambda block: (-of_blocks[block], block))[:3])
            assert listed(lists[0, tile, head]) == best


@pytest.mark.parametrize("alike", [False, True])
def test_no_lists_hold_more_attention_than_the_oracle(alike):
    """Per tile and head, the attention to distant blocks that a list holds. Where all queries of a tile are alike, any
    of them measures what the oracle knows, but mean keys still do not."""
    query, layer, ctx = chunk()
    query = jnp.repeat(query[:, ::8], 8, axis=1) if alike else query
    mass = np.asarray(attention_mass(query, layer, ctx, 8, 8))[0]

    def captured(policy):
        lists = np.asarray(find_lists(policy, query, layer, ctx))[0]
        return np.array([[mass[tile, head, listed(lists[tile, head])].sum() for head in range(6)] for tile in range(7)])

    oracle = captured(OracleBlocks(**SIZES, k=4))
    measured = captured(MeasureOnceMaskOnce(**SIZES, gamma=4, k=4, k_exact=4, k_trim=4))
    means = captured(peer("mean", 4))
    assert (measured <= oracle + 1e-5).all()
    assert (means <= oracle + 1e-5).all()
    assert means.sum() < 0.95 * oracle.sum()
    assert (measured.sum() > 0.999 * oracle.sum()) == alike


@pytest.mark.parametrize("rank", ["score", "mass"])
def test_measure_once_unites_and_trims(rank):
    """Over the exact selector: by the mean of a block's log-sum-exp over the rows that chose it (Algorithm 2), or by
    the attention that they pay it; the best k_trim."""
    query, layer, ctx = chunk()
    policy = MeasureOnceMaskOnce(**SIZES, gamma=4, k=3, k_exact=3, k_trim=4, rank=rank)
    lists = find_lists(policy, query, layer, ctx)
    q, keys, positions, _ = laid_out(query, layer, ctx)
    logits = np.einsum("thd,shd->hts", q, keys) * SCALE
    for tile, queries, _, _ in tiles(positions):
        for head in range(6):
            chosen = {}
            for row in queries[::4]:
                position = positions[row]
                scores = {}
                for block in range(position // 8 + 1):
                    if block * 8 + 8 > 8 and block * 8 <= position - 12 + 3:
                        scores[block] = np.logaddexp.reduce(logits[head, row, block * 8 : min(block * 8 + 8, position + 1)])
                for block in sorted(scores, key=lambda block: -scores[block])[:3]:
                    whole = np.logaddexp.reduce(logits[head, row, : position + 1])
                    chosen.setdefault(block, []).append(scores[block] if rank == "score" else np.exp(scores[block] - whole))
            worth = np.mean if rank == "score" else np.sum
            best = sorted(chosen, key=lambda block: -worth(chosen[block]))[:4]
            assert listed(lists[0, tile, head]) == sorted(best)


def test_measure_once_sparsity_is_equation_9():
    policy = MeasureOnceMaskOnce()
    assert policy.sparsity(2**20) == pytest.approx(1 - (64 * 128 + 64 + 1024 + 2**16) / 2**20)
    assert policy.sparsity(8192) == 0
    assert policy.dense_tokens == (128 + 1) * 64 + 1024 - 15
    assert MeasureOnceMaskOnce(dense_below=2**15).dense_tokens == 2**15


# Chunks, padding, extending, composing.


@pytest.mark.parametrize("written", [56, 3])
@pytest.mark.parametrize("name", mostly(SPARSE))
def test_padding_changes_nothing(name, written):
    """Of 64 queries so many are written; 3 are fewer than a tile."""
    query, layer, ctx = chunk(length=64 + written)
    found = attend_sparse(SPARSE[name], query, layer, ctx)
    padding = (jnp.arange(64) >= written)[None, :, None, None]
    for other in (9 * query[:, ::-1], jnp.nan):
        changed = attend_sparse(SPARSE[name], jnp.where(padding, other, query), layer, ctx)
        assert np.asarray(found[:, :written]).tobytes() == np.asarray(changed[:, :written]).tobytes()


@pytest.mark.parametrize("name", ["momo", "bounds", *(pytest.param(name, marks=pytest.mark.long) for name in ("oracle", "window"))])
def test_chunks_are_slices_of_the_whole(name):
    """Earlier chunks' keys are read from pages; tiles and gammas are cut at the same positions."""
    query, layer, ctx = chunk(start=0, length=128, num_queries=128)
    whole = attend_sparse(SPARSE[name], query, layer, ctx)
    for start, stop in ((0, 64), (64, 128)):
        here = ctx.replace(starts=jnp.array([start], jnp.int32), lengths=jnp.array([stop], jnp.int32))
        close(attend_sparse(SPARSE[name], query[:, start:stop], layer, here), whole[:, start:stop], rows=64)


@pytest.mark.long
def test_prefill_and_decode_policies_compose(model, text):
    engine = Engine(model, "quest:2", prefill=SPARSE["momo"], **ENGINE)
    (ours,) = engine.prefill([text[:200]])
    assert np.isfinite(np.asarray(ours.logits)).all()
    (dense,) = Engine(model, **ENGINE).prefill([text[:200]])
    assert np.abs(np.asarray(ours.logits) - np.asarray(dense.logits)).max() > 1e-3
    assert np.isfinite(np.asarray(engine.decode([ours], [3]))).all()


@pytest.mark.quick_but("window")
@pytest.mark.parametrize("name", ["momo", "window"])
def test_extending(model, text, name):
    """At a chunk's end it goes on as one prefill would; within a chunk by queries that stand alone too, else that chunk
    is dense."""
    policy = SPARSE[name]
    engine = Engine(model, prefill=policy, **ENGINE)
    whole = np.asarray(engine.prefill([text[:150]])[0].logits)
    for cut in (96, 100):
        (sequence,) = engine.prefill([text[:cut]])
        engine.extend(sequence, text[cut:150])
        assert (np.asarray(sequence.logits) == whole).all() == (cut == 96 or name == "window")
    chunk_of_100 = Engine(model, **ENGINE)
    chunk_of_100.prefill_policy = policy
    (sequence,) = chunk_of_100.prefill([text[:97]])
    chunk_of_100.prefill_policy = DensePrefill()
    chunk_of_100.extend(sequence, text[97:120])
    (again,) = engine.prefill([text[:97]])
    engine.extend(again, text[97:120])
    assert (np.asarray(again.logits) == np.asarray(sequence.logits)).all() == (name == "momo")
