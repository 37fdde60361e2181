"""The engine's books: fork, truncate, free, growth, sealing, learning policies, files, and errors that lose nothing."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine, OutOfPages
from kvjax.cache import IndexSpec
from kvjax.policies import Blocks
from pallas_kernels.page_index import page_index

PAGE = 16


@pytest.fixture
def engine(model):
    return Engine(model, "quest:2", policies=["dense"], pages=24, page_size=PAGE, prefill_chunk=32)


def pages_of(engine, sequence, layer=0):
    return np.asarray(engine._layers[layer].k)[sequence.pages]


def test_sealed_pages_have_their_index_and_it_is_that_of_their_keys(model, text):
    """However pages fill: by prefill, by append, by decoding token by token."""
    engine = Engine(model, "quest:2", pages=24, page_size=32, prefill_chunk=64)
    (sequence,) = engine.prefill([text[:70]])
    engine.extend(sequence, text[70:100])
    for token in text[100:135]:
        engine.decode([sequence], [token])
    sealed = np.asarray(sequence.pages[: 135 // 32])
    for layer in engine._layers:
        expected = page_index(layer.k[sealed], kind="bounds", block_size=16)
        np.testing.assert_array_equal(np.asarray(layer.index["bounds16"])[sealed], np.asarray(expected))


def test_fork_shares_sealed_pages_and_copies_the_open_one(engine, text):
    (parent,) = engine.prefill([text[:40]])
    free = engine.allocator.free
    child = engine.fork(parent)
    assert engine.allocator.free == free - 1
    assert child.pages[:2] == parent.pages[:2]
    assert child.pages[2] != parent.pages[2]
    before = pages_of(engine, parent)
    for token in (1, 2, 3):
        engine.decode([child], [token])
    np.testing.assert_array_equal(pages_of(engine, parent), before)
    engine.free(parent)
    engine.free(child)
    assert engine.allocator.free == 24


def test_a_fork_goes_on_like_its_parent(engine, text):
    (parent,) = engine.prefill([text[:40]])
    child = engine.fork(parent)
    mine, other = engine.decode([parent], [5]), engine.decode([child], [5])
    np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_fork_at_a_page_end_copies_nothing(engine, text):
    (parent,) = engine.prefill([text[:32]])
    free = engine.allocator.free
    engine.fork(parent)
    assert engine.allocator.free == free


def test_truncate_drops_open_tokens_and_the_rest_is_as_if_never_written(engine, text):
    (sequence,) = engine.prefill([text[:36]])
    (fresh,) = engine.prefill([text[:36]])
    engine.extend(sequence, [7, 8, 9])
    engine.truncate(sequence, 36)
    assert (sequence.length, sequence.tokens) == (36, text[:36])
    np.testing.assert_array_equal(np.asarray(engine.extend(sequence, [3])), np.asarray(engine.extend(fresh, [3])))


def test_truncate_does_not_open_sealed_pages(engine, text):
    (sequence,) = engine.prefill([text[:36]])
    with pytest.raises(ValueError, match="first 32 are sealed; a length from 32 to 36"):
        engine.truncate(sequence, 31)
    with pytest.raises(ValueError, match="cannot truncate to 37"):
        engine.truncate(sequence, 37)
    assert sequence.length == 36


def test_exhaustion_names_what_is_needed_and_loses_nothing(engine, text):
    (sequence,) = engine.prefill([text[:300]])  # 19 of 24 pages
    with pytest.raises(OutOfPages, match=r"7 needed, 5 free of 24.*A page holds 16 tokens and takes"):
        engine.prefill([text[:32], text[:80]])
    assert engine.allocator.free == 5
    with pytest.raises(OutOfPages, match="needed"):
        engine.extend(sequence, text[:100])
    assert sequence.length == 300
    assert np.isfinite(np.asarray(engine.decode([sequence], [1]))).all()


def test_a_failed_reservation_takes_no_page(engine, text):
    sequences = engine.prefill([text[:32], text[:32]])
    with pytest.raises(OutOfPages):
        engine.reserve(sequences, 300)
    assert engine.allocator.free == 20


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e, s: e.prefill([[]]), "no tokens"),
        (lambda e, s: e.prefill([[97]]), "token 97 is outside the vocabulary of 97"),
        (lambda e, s: e.prefill([[-1]]), "token -1 is outside"),
        (lambda e, s: e.prefill([[1] * 5000]), "5,000 tokens is longer than the model's 4,096 positions"),
        (lambda e, s: e.decode([s, s], [1, 2]), "stands twice"),
        (lambda e, s: e.decode([], []), "at least one sequence"),
        (lambda e, s: e.decode([s], [1], "top:8"), "needs the index bounds128, which this engine does not build"),
        (lambda e, s: e.decode([s], [1, 2]), "2 tokens for 1 sequences"),
    ],
)
def test_bad_calls_say_why(engine, text, call, match):
    (sequence,) = engine.prefill([text[:20]])
    with pytest.raises(ValueError, match=match):
        call(engine, sequence)
    assert sequence.length == 20


def test_a_freed_sequence_is_not_used(engine, text):
    (sequence,) = engine.prefill([text[:20]])
    engine.free(sequence)
    for call in (
        engine.free,
        engine.fork,
        lambda s: engine.decode([s], [1]),
        lambda s: engine.extend(s, [1]),
        lambda s: engine.truncate(s, 1),
    ):
        with pytest.raises(ValueError, match="was freed"):
            call(sequence)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"page_size": 100, "prefill_chunk": 250}, "multiple of page_size"),
        ({"policy": "top:8", "page_size": 64, "prefill_chunk": 64}, "block_size 128 does not divide page_size 64"),
        ({"batch_buckets": (4, 2)}, "ascending"),
        ({"pages": 0}, "at least one page"),
        ({"policy": "best:8"}, "not understood"),
    ],
)
def test_impossible_engines_are_refused(model, options, match):
    with pytest.raises(ValueError, match=match):
        Engine(model, **({"pages": 4} | options))


def test_a_saved_sequence_comes_back_bit_for_bit(engine, model, text, tmp_path):
    (sequence,) = engine.prefill([text[:70]])
    engine.save(sequence, tmp_path / "prompt.safetensors")
    other = Engine(model, "quest:2", pages=40, page_size=PAGE, prefill_chunk=32)
    other.prefill([text[:17]])
    restored = other.restore(tmp_path / "prompt.safetensors")
    assert (restored.tokens, restored.length) == (text[:70], 70)
    for token in text[70:90]:
        np.testing.assert_array_equal(np.asarray(engine.decode([sequence], [token])), np.asarray(other.decode([restored], [token])))
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_a_sequence_of_another_engine_is_refused(engine, model, model_factory, text, tmp_path):
    (sequence,) = engine.prefill([text[:20]])
    path = tmp_path / "prompt.safetensors"
    engine.save(sequence, path)
    with pytest.raises(ValueError, match="page_size 16, this engine has 32"):
        Engine(model, pages=8, page_size=32, prefill_chunk=32).restore(path)
    with pytest.raises(ValueError, match="was made with model"):
        Engine(model_factory(rope_theta=1e5), pages=8, page_size=PAGE, prefill_chunk=32).restore(path)
    path.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="not a readable kvjax sequence file"):
        engine.restore(path)


@dataclasses.dataclass(frozen=True)
class MassCounter:
    """A learning policy: reads everything and adds up the attention mass of each block."""

    learns: ClassVar[bool] = True

    def indexes(self) -> tuple[IndexSpec, ...]:
        return ()

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.max_pages))

    def select(self, query, layer, ctx, state):
        ids = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (query.shape[0], layer.k.shape[1], 4))
        return Blocks(jnp.where(ids * ctx.page_size < ctx.lengths[:, None, None], ids, -1), ctx.page_size), state

    def observe(self, blocks, block_lse, ctx, state):
        mass = jax.nn.softmax(block_lse[:, 0], axis=-1).sum(1)
        return state.at[:, :4].add(mass)

    def describe(self):
        return "mass counter"


def test_a_policy_that_learns_gets_the_mass_and_keeps_its_state_per_sequence(model, text):
    policy = MassCounter()
    engine = Engine(model, policy, policies=["dense"], pages=24, page_size=PAGE, prefill_chunk=32)
    one, two = engine.prefill([text[:50], text[50:80]])
    dense = engine.decode([engine.fork(one)], [4], "dense")
    logits = engine.decode([one, two], [4, 5])
    np.testing.assert_allclose(np.asarray(logits[0]), np.asarray(dense[0]), atol=1e-4)
    engine.decode([two], [6])
    heads = model.config.num_heads
    for layer in range(model.config.num_layers):
        first, second = np.asarray(one.states[policy][layer])[0], np.asarray(two.states[policy][layer])[0]
        np.testing.assert_allclose(first.sum(), heads, rtol=1e-5)
        np.testing.assert_allclose(second.sum(), 2 * heads, rtol=1e-5)
        assert (first[:4] > 0).all()
        assert (second[:2] > 0).all()
        assert (second[2:] == 0).all()


def test_the_memory_plan_adds_up(model):
    engine = Engine(model, "quest:2", pages=24, page_size=PAGE, prefill_chunk=32)
    plan = engine.memory_plan()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._layers))
    assert plan.page_bytes * 24 == held
    assert plan.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) == 4 * model.config.num_params
    assert plan.bytes_per_1k_tokens == plan.page_bytes * 64
    assert plan.pages_that_fit > 0
    for word in ("weights", "cache per 1K tokens", "pages that fit"):
        assert word in str(plan)


def test_warmup_compiles_what_the_first_call_needs(model_factory, text):
    model = model_factory(num_layers=1)
    engine = Engine(model, "quest:2", pages=24, page_size=PAGE, prefill_chunk=32)
    engine.warmup(batch=2, tokens=100)
    assert engine.allocator.free == 24
