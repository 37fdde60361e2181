"""Models of latent attention through the engine: latents and an indexer's keys in pages, with equal bits whatever
became of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequence_suite import CHUNK, PAGE, SequenceSuite, check_crowded, check_cuts, close, same_next
from tiny_models import LATENT, TinyModel

from kvjax.cache import INDEXER
from kvjax.cost_model.bytes import step_bytes
from kvjax.engine import paged_attention
from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.engine.sampling import SamplingRows
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import TopTokens, parse
from kvjax.policies.prefill import TopTokensPrefill, parse_prefill

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("everything_is_given_back")]

TOPK = 24


@pytest.fixture(scope="module")
def engine(latent_model):
    return Engine(latent_model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2, 5), policies=("dense", "window:8+24"))


def test_the_model_brings_its_policies(engine):
    assert (engine.policy, engine.prefill_policy) == (TopTokens(TOPK), TopTokensPrefill(TOPK))
    assert (parse("tokens:24"), parse_prefill("tokens:24")) == (TopTokens(TOPK), TopTokensPrefill(TOPK))
    assert engine.prefill_policy.describe() == "tokens:24 prefill (per query the 24 tokens that score best; dense up to there)"


def test_prefill_and_decode_are_the_whole_forward(engine, latent_model, tokens):
    """Which reads the `index_topk` tokens that score best, of up to 150."""
    expected = latent_model.full_forward(tokens)
    (sequence,) = engine.prefill([tokens[:70]])
    close(sequence.logits, expected[69])
    for place in range(70, 100):
        close(engine.decode([sequence], [tokens[place]])[0], expected[place])
    close(engine.extend(sequence, tokens[100:140], all_logits=True), expected[100:140])
    close(engine.decode([sequence], [tokens[140]])[0], expected[140])
    close(engine.decode([sequence], [tokens[141:145]])[0], expected[141:145])
    dense = engine.decode([sequence], [tokens[145]], "dense")[0]
    assert np.abs(np.asarray(dense) - expected[145]).max() > 1e-2, "every token is another model"


@pytest.mark.long
def test_dense_policies_read_every_token(latent_model, tokens):
    """As the model whose indexer chooses as many tokens as there are."""
    layer = LATENT.layers[0]
    wide = dataclasses.replace(LATENT, layers=(dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, index_topk=300)),) * 2)
    expected = TinyModel(TransformerDecoder(wide), latent_model.params).full_forward(tokens)
    engine = Engine(latent_model, "dense", prefill="dense", pages=16, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,))
    (sequence,) = engine.prefill([tokens[:100]])
    close(sequence.logits, expected[99])
    for place in range(100, 110):
        close(engine.decode([sequence], [tokens[place]])[0], expected[place])


class TestSequences(SequenceSuite):
    """Their latents, and the keys of the indexer."""


@pytest.mark.long
@pytest.mark.parametrize("cuts", [(1, 31, 33, 90), (16, 17, 64), tuple(range(3, 100))])
def test_any_cut_of_a_prompt_gives_the_same_bits_in_sixteen_bits(bf16_latent_model, tokens, cuts):
    engine = Engine(bf16_latent_model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2,))
    check_cuts(engine, tokens, cuts)


@pytest.mark.long
def test_requests_of_a_crowded_engine_are_answered_as_alone(latent_model, tokens):
    check_crowded(latent_model, tokens)


def test_a_file_without_the_keys_of_the_indexer_goes_on_otherwise(engine, tokens, tmp_path):
    """What a file must hold: the latents alone do not say which tokens are read."""
    (sequence,) = engine.prefill([tokens[:80]])
    kept = engine._pool.layers
    engine._pool.layers = tuple(layer.replace(index={INDEXER: 0 * layer.index[INDEXER]}) for layer in kept)
    engine.save(sequence, tmp_path / "q")
    engine._pool.layers = kept
    with pytest.raises(AssertionError):
        same_next(engine, engine.restore(tmp_path / "q"), sequence, tokens[100:])


def test_a_step_that_is_looked_at_shows_the_tokens_that_are_read(engine, tokens):
    looked, plain = engine.prefill([tokens[:60], tokens[:60]])
    read = engine.inspect([looked], [7])
    assert len(read.layers) == 2
    for layer in read.layers:
        assert (layer.block_size, layer.ids.shape) == (1, (1, 1, TOPK))
        assert len(set(layer.listed(0, 0))) == TOPK
        np.testing.assert_allclose(layer.mass.sum(2), 1, rtol=1e-5)
    assert read.layers[0].listed(0, 0) != read.layers[1].listed(0, 0)
    same_next(engine, looked, plain, tokens[100:])


@pytest.mark.long
def test_reads_are_counted(engine, tokens):
    (sequence,) = engine.prefill([tokens[:200]])
    engine.decode([sequence], [1])
    assert (int(engine.last_reads.keys[0]), int(engine.last_reads.blocks[0])) == (2 * TOPK, 2 * TOPK)
    engine.decode([sequence], [tokens[:4]])
    assert int(engine.last_reads.keys[0]) == 4 * 2 * TOPK
    engine.decode([sequence], [1], "dense")
    assert (int(engine.last_reads.keys[0]), int(engine.last_reads.blocks[0])) == (2 * 206, 2 * 13)
    engine.decode([sequence], [1], "window:8+24")
    assert int(engine.last_reads.keys[0]) == 2 * 32


@pytest.mark.quick_but("dense")
@pytest.mark.parametrize("policy", ["tokens:24", pytest.param(TopTokens(TOPK, hinted=True), marks=pytest.mark.long), "dense"])
def test_drafts_read_what_they_would_alone_and_dropped_ones_leave_no_trace(engine, tokens, policy):
    """Across a page's border; two runs whose wrong drafts differ stay equal to the bit."""
    alone, one, two = engine.prefill([tokens[:46]] * 3)
    logits = np.asarray(engine.decode([one], [tokens[46:50]], policy))[0]
    for place in range(46, 50):
        close(logits[place - 46], engine.decode([alone], [tokens[place]], policy)[0])
    engine.truncate(one, 48)
    rows, found = SamplingRows.of([None, None]), []
    own = [int(np.argmax(logits[1]))]
    engine.truncate(alone, 48)
    own.append(int(np.argmax(engine.decode([alone], own, policy)[0])))
    engine.extend(two, tokens[46:48])
    engine.free(two)
    two = engine.fork(one)
    for each, wrong in ((one, 50), (two, 60)):
        drafts = np.array([[own[0], own[1], wrong, wrong + 1], [0] * 4], np.int32)
        sampled = jax.tree.map(np.asarray, engine.decode_and_sample([each, None], drafts, rows, policy))
        assert sampled.accepted[0] in (2, 3), "a wrong draft may be right by chance"
        found.append(sampled.accepted[0])
        engine.truncate(each, 50)
        each.tokens = [*tokens[:48], *own]
    same_next(engine, one, two, tokens[100:])


def test_the_memory_plan_counts_latents_and_the_keys_of_the_indexer(latent_model, engine):
    plan = memory_plan(latent_model.config, page_size=PAGE, weights_bytes=0, available_bytes=1 << 24)
    assert plan.page_bytes == 2 * PAGE * (24 + 8 + 16) * 4
    assert engine.memory_plan().page_bytes == plan.page_bytes


def test_a_step_reads_every_key_of_the_indexer_and_few_latents(latent_model):
    config = latent_model.config
    dense, best, window = (step_bytes(config, parse(name), 1000, page_size=PAGE) for name in ("dense", "tokens:24", "window:8+24"))
    assert (dense.kv, dense.index) == (2 * 1000 * 32 * 4, 0)
    assert (best.kv, best.index) == (2 * 24 * 32 * 4, 2 * 1000 * 16 * 4)
    assert (window.kv, window.index) == (2 * 32 * 32 * 4, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "top:8"}, "policy top:8 scans the index bounds128, not kept in layers of latent attention"),
        (
            {"policy": "cascade:2/all+cache"},
            r"policy cascade:2/all\+cache reads keys of each KV head, not kept in layers of latent attention",
        ),
        ({"policies": ["quest:1"]}, "leave it out for tokens:24, or name dense or window"),
        ({"policy": "auto"}, "policy auto has no evidence about layers of latent attention"),
        ({"prefill": "auto"}, "prefill auto has no evidence about layers of latent attention"),
        ({"prefill": "bounds:32"}, "prefill bounds:32 scans the index bounds128"),
        ({"policy": "heavy:2"}, "learns from prefill, but layers of latent attention give no attention mass"),
    ],
)
def test_policies_that_latents_cannot_serve_are_refused(latent_model, options, said):
    with pytest.raises(ValueError, match=said):
        Engine(latent_model, **options, pages=8, page_size=128, prefill_chunk=128)


def test_models_without_an_indexer_refuse_token_lists(model, recurrent_model):
    for each in (model, recurrent_model):
        for options in ({"policy": "tokens:8"}, {"policies": "tokens:8"}, {"prefill": "tokens:8"}):
            with pytest.raises(ValueError, match="tokens:8 needs latent pages and a lightning indexer in every layer of attention"):
                Engine(each, **options, pages=4)


def test_layers_whose_indexers_choose_other_counts_need_a_policy(latent_model, tokens):
    layer = LATENT.layers[0]
    other = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, index_topk=7))
    model = TinyModel(TransformerDecoder(dataclasses.replace(LATENT, layers=(layer, other))), latent_model.params)
    with pytest.raises(ValueError, match=r"choose \[7, 24\] tokens: name a policy, as tokens:24"):
        Engine(model, pages=4, page_size=PAGE, prefill_chunk=CHUNK)
    Engine(model, "tokens:24", prefill="tokens:7", pages=4, page_size=PAGE, prefill_chunk=CHUNK)


@pytest.mark.quick_but("indexer")
@pytest.mark.parametrize("forgotten", ["indexer", "keys"])
def test_mutants_fail(latent_model, tokens, monkeypatch, forgotten):
    """An indexer that asks nothing, and keys of it that are not written."""
    if forgotten == "indexer":
        right = paged_attention.indexer_query
        monkeypatch.setattr("kvjax.engine.steps.indexer_query", lambda given: right(given).replace(q=jnp.zeros_like(given.indexer.q)))
    else:
        right = paged_attention.append_latents
        monkeypatch.setattr(paged_attention, "append_latents", lambda layer, row, key, *place: right(layer, row, 0 * key, *place))
    jax.clear_caches()
    engine = Engine(latent_model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,))
    try:
        (sequence,) = engine.prefill([tokens[:70]])
        with pytest.raises(AssertionError):
            close(sequence.logits, latent_model.full_forward(tokens[:70])[69])
    finally:
        jax.clear_caches()
