"""Engine.inspect: lists and scores are those of the step that decode runs, and nothing is left behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine, OutOfPages, TopBlocks
from kvjax.policies.decode import AttentionMass, Blocks, Stateless

SMALL = TopBlocks(1, local=1, block_size=16)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, SMALL, policies=["dense", "window:3+20", Counting()], pages=40, page_size=16, prefill_chunk=32, batch_buckets=(2,))


@dataclasses.dataclass(frozen=True)
class Counting(Stateless):
    """Reads the first page and the last one, and counts its steps."""

    learns = AttentionMass(queries=0)

    def init(self, spec, batch):
        return jnp.zeros((batch, 1))

    def select(self, query, layer, ctx, state):
        last = (ctx.lengths - 1) // ctx.page_size
        ids = jnp.stack([jnp.zeros_like(last), last], axis=1)[:, None]
        return Blocks(jnp.repeat(ids, layer.pages.kv_heads, axis=1), ctx.page_size), state

    def observe(self, mass, ctx, state):
        return state + 1

    def scores(self, query, layer, ctx, state):
        return jnp.broadcast_to(state[:, None], (*query.shape[:1], layer.pages.kv_heads, ctx.page_table.shape[1]))


def page_bits(engine, sequence):
    pages = np.array(sequence.pages["full"][: engine.pages_for(sequence.length)])
    return [np.asarray(layer.pages.k[pages, :, :]) for layer in engine._pool.layers]


@pytest.mark.quick_but("dense", "policy2")
@pytest.mark.parametrize("policy", ["dense", "window:3+20", SMALL])
def test_it_lists_what_the_step_reads_and_gives_its_logits(engine, text, policy):
    first, second = engine.prefill([text[:150], text[:90]])
    read = engine.inspect([first, second], [5, 7], policy)
    logits = np.asarray(engine.decode([first, second], [5, 7], policy))
    assert (read.logits == logits).all()
    counted = [sum(len(layer.listed(row, head)) for layer in read.layers for head in range(2)) for row in range(2)]
    assert counted == np.asarray(engine.last_reads.blocks)[:2].tolist()
    assert f"2 sequences, {len(read.layers)} layers" in f"{read}"
    assert len(f"{read!r}") < 200
    assert f"{read.layers[0]!r}".startswith("LayerRead(2 sequences, 2 KV heads, up to ")
    for layer in read.layers:
        assert layer.ids.shape[:2] == (2, 2)
        assert layer.lse.shape == layer.mass.shape == (2, 4, layer.ids.shape[2])
        np.testing.assert_allclose(layer.mass.sum(axis=2), 1, atol=1e-5)
        assert (layer.mass[np.repeat(layer.ids, 2, axis=1) < 0] == 0).all()
    if policy == "dense":
        assert read.layers[0].listed(0, 1) == list(range(10))
        assert read.layers[0].listed(1, 1) == list(range(6))
    for sequence in (first, second):
        engine.free(sequence)


def test_scores_are_what_the_distant_blocks_were_chosen_by(engine, text):
    (sequence,) = engine.prefill([text[:200]])
    for layer in engine.inspect([sequence], [5]).layers:
        assert layer.scores.shape == (1, 2, 13)
        for head in range(2):
            scores = layer.scores[0, head]
            sealed, distant = np.arange(12), 1 + int(scores[1:12].argmax())
            assert np.isfinite(scores[sealed]).all()
            assert scores[12] == -np.inf, "the open page is no choice"
            assert layer.listed(0, head) == sorted({0, distant, 12})
    engine.free(sequence)


def state_of(sequence):
    """What the host knows of a sequence, except its logits. Copied, because decoding changes it in place."""
    pages = {name: list(ids) for name, ids in sequence.pages.items()}
    return list(sequence.tokens), sequence.length, pages, dict(sequence.states), sequence.open_chunk, sequence.suspended


@pytest.mark.parametrize("length", [32, 40])
def test_nothing_is_left_behind(engine, text, length):
    """At the border of a page too, where the step needs a page that the sequence does not have."""
    (sequence,) = engine.prefill([text[:length]])
    twin = engine.fork(sequence)
    engine.decode([twin], [1], "dense")
    before, logits = state_of(sequence), sequence.logits
    free, reads, bits = engine.allocators["full"].free, engine.last_reads, page_bits(engine, sequence)
    for policy in ("dense", SMALL, Counting()):
        engine.inspect([sequence], [9], policy)
    assert state_of(sequence) == before
    assert sequence.logits is logits
    assert (engine.allocators["full"].free, engine.last_reads) == (free, reads)
    rows = length % 16 or 16
    for old, new in zip(bits, page_bits(engine, sequence), strict=True):
        assert (old[:-1] == new[:-1]).all()
        assert (old[-1, :, :rows] == new[-1, :, :rows]).all()
    for each in (sequence, twin):
        engine.free(each)


def test_a_learning_policy_is_looked_at_and_learns_nothing_of_it(engine, text):
    (sequence,) = engine.prefill([text[:100]])
    engine.decode([sequence], [3], Counting())
    engine.decode([sequence], [4], Counting())
    for _ in range(2):
        (first, _) = engine.inspect([sequence], [5], Counting()).layers
        assert (first.scores == 2).all()
        assert first.listed(0, 0) == [0, 6]
    engine.free(sequence)


def test_a_policy_that_lists_nothing_is_told_so(model, text, listed_pages):
    policy = listed_pages(without=(0, 1, 2))
    engine = Engine(model, policy, pages=4, page_size=16, prefill_chunk=32)
    (sequence,) = engine.prefill([text[:40]])
    with pytest.raises(ValueError, match="lists no block in layer 0"):
        engine.inspect([sequence], [5])
    assert engine.allocators["full"].free == 1


def test_it_raises_as_decode_does(model, text):
    engine = Engine(model, pages=2, page_size=16, prefill_chunk=32)
    (sequence,) = engine.prefill([text[:32]])
    with pytest.raises(OutOfPages):
        engine.inspect([sequence], [5])
    assert len(sequence.pages["full"]) == 2
    with pytest.raises(ValueError, match="2 tokens for 1 sequences"):
        engine.inspect([sequence], [5, 6])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.inspect([sequence], [97])
    with pytest.raises(ValueError, match="needs the index bounds16"):
        engine.inspect([sequence], [5], SMALL)
    engine.free(sequence)
    with pytest.raises(ValueError, match="was freed"):
        engine.inspect([sequence], [5])
    assert jax.tree.leaves(engine._pool.layers)[0].is_deleted() is False
