"""Models with recurrent layers through the engine: a row of state per sequence, with equal bits whatever became of
it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequence_suite import CHUNK, PAGE, SequenceSuite, check_crowded, close, same_next

from kvjax.cache import Cache
from kvjax.cache.allocator import OutOfPages
from kvjax.cost_model.bytes import step_bytes
from kvjax.engine import recurrent
from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.engine.steps import StepInputs, StepStatic, decode_step
from kvjax.policies.decode import TopBlocks, parse

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("everything_is_given_back")]


@pytest.fixture(scope="module")
def engine(recurrent_model):
    return Engine(recurrent_model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2, 5), policies="quest:1")


def test_prefill_and_decode_are_the_whole_forward(engine, recurrent_model, tokens):
    expected = recurrent_model.full_forward(tokens)
    (sequence,) = engine.prefill([tokens[:70]])
    close(sequence.logits, expected[69])
    for place in range(70, 110):
        close(engine.decode([sequence], [tokens[place]])[0], expected[place])
    close(engine.extend(sequence, tokens[110:150], all_logits=True), expected[110:150])
    close(engine.decode([sequence], [tokens[150]])[0], expected[150])


class TestSequences(SequenceSuite):
    """Their pages, and their rows of state."""


def test_a_fork_has_a_row_of_its_own(engine, tokens):
    (parent,) = engine.prefill([tokens[:48]])
    assert engine.fork(parent).pages["recurrent"] != parent.pages["recurrent"]


@pytest.mark.long
def test_requests_of_a_crowded_engine_are_answered_as_alone(recurrent_model, tokens):
    check_crowded(recurrent_model, tokens)


def test_truncated_to_nothing_and_written_again(engine, tokens):
    cut, plain = engine.prefill([tokens[:9], tokens[20:30]])
    engine.truncate(cut, 0)
    assert cut.pages["recurrent"] == []
    engine.extend(cut, tokens[20:30])
    same_next(engine, cut, plain, tokens[100:])


def test_a_step_that_is_only_looked_at_leaves_no_trace(engine, tokens):
    for length in (40, 48):
        looked, plain = engine.prefill([tokens[:length], tokens[:length]])
        read = engine.inspect([looked], [7])
        assert len(read.layers) == 1, "the layer of attention"
        same_next(engine, looked, plain, tokens[100:])


def test_a_state_that_does_not_fit_its_tokens_is_refused(engine, tokens, tmp_path, monkeypatch):
    (sequence,) = engine.prefill([tokens[:41]])
    layers = engine._pool.layers
    wrong = tuple(layer.replace(first=layer.first + PAGE) if hasattr(layer, "first") else layer for layer in layers)
    monkeypatch.setattr(engine._pool, "layers", wrong)
    engine.save(sequence, tmp_path / "q")
    monkeypatch.setattr(engine._pool, "layers", layers)
    with pytest.raises(ValueError, match="has a state of 48 tokens for 41 tokens in pages of 16; prefill again"):
        engine.restore(tmp_path / "q")


def test_too_many_sequences_are_an_error_that_names_the_group(engine, tokens):
    engine.prefill([tokens[:3]] * 5)
    with pytest.raises(OutOfPages, match=r"layer group recurrent: 1 needed, 0 free of 5.* the state of one sequence: there are 5"):
        engine.prefill([tokens[:3]])
    assert len(engine.sequences) == 5


@pytest.mark.long
def test_policies_list_blocks_in_layers_of_attention_alone(engine, tokens):
    (sequence,) = engine.prefill([tokens[:200]])
    engine.decode([sequence], [1])
    assert (int(engine.last_reads.keys[0]), int(engine.last_reads.blocks[0])) == (2 * 201, 2 * 13)
    engine.decode([sequence], [1], "quest:1")
    assert int(engine.last_reads.keys[0]) == 2 * engine.declared("quest:1").keys_read(202, 2, PAGE)


@pytest.mark.long
def test_policies_are_told_of_layers_with_pages(recurrent_model, tokens):
    seen = []

    class Watching(TopBlocks):
        def attend(self, query, layer, ctx, state):
            seen.append((ctx.layer, ctx.num_layers))
            return super().attend(query, layer, ctx, state)

    engine = Engine(recurrent_model, Watching(k=1, block_size=PAGE), pages=8, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,))
    (sequence,) = engine.prefill([tokens[:20]])
    engine.decode([sequence], [1])
    assert set(seen) == {(0, 1)}


def test_policies_that_learn_from_prefill_are_refused(recurrent_model):
    with pytest.raises(ValueError, match="learns from prefill, which computes the queries of a chunk again; recurrent layers"):
        Engine(recurrent_model, "heavy:2", pages=8, page_size=PAGE, prefill_chunk=CHUNK)


def test_the_memory_plan_counts_states_by_sequence(recurrent_model, engine):
    config = recurrent_model.config
    plans = [memory_plan(config, page_size=PAGE, weights_bytes=0, available_bytes=1 << 24, sequences=n) for n in (0, 8)]
    row = config.cache_spec(PAGE).bytes_per_page("recurrent")
    assert [plan.state_bytes for plan in plans] == [0, 8 * row]
    assert plans[0].page_bytes == plans[1].page_bytes == 2 * 2 * 16 * PAGE * 4
    assert plans[0].pages_that_fit - plans[1].pages_that_fit == -(-8 * row // plans[0].page_bytes)
    assert re.search(r"8 rows, [\d.]+ [KM]iB in all, all that 8 sequences of any length need", str(plans[1]))
    assert engine.memory_plan().sequences == 5


def test_a_step_reads_every_state_once(recurrent_model):
    config = recurrent_model.config
    one, two = (step_bytes(config, parse("dense"), 100, batch, page_size=PAGE) for batch in (1, 2))
    assert one.states == config.cache_spec(PAGE).bytes_per_page("recurrent")
    assert one.kv == 2 * 100 * 2 * 16 * 4, "one layer of attention"
    assert two.total - one.total == one.states + one.kv
    assert one.from_device == one.total


@pytest.mark.long
def test_auto_and_sparse_prefill_take_the_layer_of_attention(recurrent_model, tokens):
    dense, sparse = (
        Engine(recurrent_model, "auto", pages=3, page_size=128, prefill_chunk=256, prefill=name, batch_buckets=(1,))
        for name in ("auto", "bounds:32")
    )
    (one,), (two,) = dense.prefill([tokens]), sparse.prefill([tokens])
    close(one.logits, two.logits)
    close(dense.decode([one], [1]), sparse.decode([two], [1]))
    assert "3 of 3 pages of 128 tokens in use" in str(dense)


def test_dropped_drafts_leave_no_trace(engine, recurrent_model, tokens):
    """Steps of 4 tokens of which some stay, across a page's border; lengths say which."""
    drafted, plain = engine.prefill([tokens[:46], tokens[:46]])
    engine.reserve([drafted, plain], 8)
    for each, wrong in ((drafted, 50), (plain, 60)):
        cache = engine._page_manager.tables([each, None])
        given = np.array([[*tokens[46:48], wrong, wrong + 1], [0] * 4], np.int32)
        lengths, active = np.array([46, 0], np.int32), np.array([True, False])
        states = engine._policy_set.states.of_batch(engine.policy, [None, None])
        cache = Cache(engine._pool.layers, cache, lengths, engine.spec)
        logits, *_ = engine._pool.run(
            decode_step,
            StepStatic(recurrent_model.decoder, engine.policy, engine.indexes),
            StepInputs(recurrent_model.params, cache, given, active, states),
            kept=lambda result: (result[1].layers, result[0]),
        )
        expected = recurrent_model.full_forward([*tokens[:48], wrong, wrong + 1])
        close(logits[0], expected[46:])
        each.length, each.tokens = 48, tokens[:48]
    same_next(engine, drafted, plain, tokens[100:])


# Mutants.


@pytest.mark.long  # `test_recurrent` plants some of them in a layer
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("catch_up", lambda layer, *rest: layer),
        ("delta_fold", lambda k, g, u, start, counts: start),
        ("delta_page", None),
    ],
)
def test_mutants_fail(recurrent_model, tokens, monkeypatch, name, wrong):
    right = getattr(recurrent, name)
    monkeypatch.setattr(recurrent, name, wrong or (lambda *args, **keywords: right(*args[:6], 0 * args[6], *args[7:], **keywords)))
    jax.clear_caches()
    engine = Engine(recurrent_model, pages=64, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1,))
    try:
        (sequence,) = engine.prefill([tokens[:70]])
        with pytest.raises(AssertionError):
            close(jnp.nan_to_num(sequence.logits, nan=1e9), recurrent_model.full_forward(tokens[:70])[69])
    finally:
        jax.clear_caches()
