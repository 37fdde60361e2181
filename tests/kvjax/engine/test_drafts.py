"""Drafted steps: each token reads what it would alone, accepted tokens stay, and of dropped ones nothing is ever
read."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, TinyModel, random_weights

from kvjax import Engine, Sampling
from kvjax.engine import sampling, steps
from kvjax.engine.sampling import SamplingRows, seen_tokens
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode.base import AttentionMass, Stateless
from kvjax.policies.decode.candidates import largest_blocks

pytestmark = pytest.mark.bits

PAGE, CHUNK, BUCKET = 16, 32, 2


@dataclasses.dataclass(frozen=True)
class Heavy(Stateless):
    """The blocks of the largest mass that decode steps paid: its lists depend on every token before."""

    learns = AttentionMass(queries=0)

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.num_heads, spec.max_pages), jnp.float32)

    def select(self, query, layer, ctx, state):
        scores = state.reshape(state.shape[0], layer.pages.kv_heads, -1, state.shape[2]).max(axis=2)
        return largest_blocks(scores, ctx, k=1, sink=1, local=1, block_size=ctx.page_size), state

    def observe(self, mass, ctx, state):
        return state + mass

    def describe(self):
        return "heavy"


POLICIES = ("dense", "quest:1", "window:8+24", Heavy())
FAMILIES = ("full", "window", "recurrent")


def windowed():
    layers = list(TINY.layers)
    layers[0] = dataclasses.replace(layers[0], mixer=dataclasses.replace(layers[0].mixer, window=24))
    config = dataclasses.replace(TINY, layers=tuple(layers))
    return TinyModel(TransformerDecoder(config), random_weights(config))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, model, recurrent_model):
    chosen = {"full": model, "window": None, "recurrent": recurrent_model}[request.param] or windowed()
    return make_engine(chosen)


def make_engine(model):
    return Engine(model, policies=POLICIES, pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET, 8))


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "engine" in request.fixturenames:
        used = request.getfixturevalue("engine")
        for sequence in list(used.sequences):
            used.free(sequence)


def first_greedy(logits):
    return int(np.argmax(np.asarray(logits)))


STEPS = {family: [*((policy, 4) for policy in POLICIES), ("quest:1", 16), (Heavy(), 16)] for family in FAMILIES}
FIRST = {"full": STEPS["full"][:5], "window": [("dense", 4)], "recurrent": [("quest:1", 4)]}
"""`make test` takes every policy, and every family; the rest is `long`."""


@pytest.mark.quick_but("recurrent-quest:1-4", "full-policy3-4", "full-dense-4", "full-quest:1-16", "window-dense-4", "full-window:8+24-4")
@pytest.mark.parametrize(
    ("engine", "policy", "count"),
    [
        pytest.param(family, *each, marks=[] if each in FIRST[family] else [pytest.mark.long])
        for family, steps in STEPS.items()
        for each in steps
    ],
    indirect=["engine"],
)
def test_each_token_of_a_step_gets_what_it_would_alone(engine, text, policy, count):
    """From every place in a page, so that the step crosses a border and does not; two sequences of different length."""
    for length in (48 - count, 45, 48):
        a, b = engine.prefill([text[:length], text[100:121]])
        c, d = engine.fork(a), engine.fork(b)
        given = np.array([text[200 : 200 + count], text[230 : 230 + count]])
        together = np.asarray(engine.decode([a, b], given.tolist(), policy))
        alone = np.stack([np.asarray(engine.decode([c, d], given[:, t].tolist(), policy)) for t in range(count)], axis=1)
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
        assert (a.length, a.tokens[length:]) == (length + count, given[0].tolist())
        after = [np.asarray(engine.decode(pair, [1, 2], policy)) for pair in ([a, b], [c, d])]
        np.testing.assert_allclose(*after, rtol=0, atol=1e-5)
        for each in (a, b, c, d):
            engine.free(each)


def step(engine, sequences, drafted, policy, rows=None, counts=None):
    rows = SamplingRows.of([None] * BUCKET) if rows is None else rows
    return jax.tree.map(np.asarray, engine.decode_and_sample(sequences, np.asarray(drafted, np.int32), rows, policy, counts=counts))


@pytest.mark.quick_but("full-0", "window-0")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_dropped_drafts_leave_nothing_behind(engine, text, seed):
    """Runs of drafted steps whose drafts are right up to a random place. Two runs whose wrong drafts differ stay equal
    to the bit; and what is accepted is the model's own greedy text."""
    random = np.random.default_rng(seed)
    policy, count = POLICIES[random.integers(len(POLICIES))], int(random.choice([4, 8, 16]))
    length = int(random.integers(30, 50))
    (parent,) = engine.prefill([text[:length]])
    own, own_logits = [first_greedy(parent.logits)], []
    told = engine.fork(parent)
    while len(own) < 60:
        own_logits.append(np.asarray(engine.decode([told], [own[-1]], policy))[0])
        own.append(first_greedy(own_logits[-1]))
    runs = [engine.fork(parent), engine.fork(parent)]
    engine.free(parent)
    written = 0
    while written < 40:
        right = int(random.integers(0, count))
        drafts = np.array([own[written : written + count], own[written : written + count]])
        for run in (0, 1):
            drafts[run, right + 1 :] = [random.choice([-1, (each + 1 + random.integers(90)) % 96]) for each in drafts[run, right + 1 :]]
        found = [step(engine, [runs[run], None], [drafts[run], [0] * count], policy) for run in (0, 1)]
        for sampled in found:
            assert sampled.accepted.tolist() == [right + 1, 0]
            assert sampled.tokens[0, : right + 1].tolist() == own[written + 1 : written + right + 2]
        written += right + 1
        assert [run.length for run in runs] == [length + written] * 2
        np.testing.assert_array_equal(found[0].logprobs[0, : right + 1], found[1].logprobs[0, : right + 1])
        jax.tree.map(np.testing.assert_array_equal, runs[0].states, runs[1].states)
        logits = [np.asarray(engine.decode([engine.fork(run)], [own[written]], policy))[0] for run in runs]
        np.testing.assert_array_equal(*logits)
        np.testing.assert_allclose(logits[0], own_logits[written], rtol=0, atol=1e-4)
        for each in engine.sequences - {*runs, told}:
            engine.free(each)


@pytest.mark.parametrize("engine", ["full", *(pytest.param(each, marks=pytest.mark.long) for each in FAMILIES[1:])], indirect=True)
def test_draws_and_penalties_keep_the_drafts_that_steps_of_one_would_draw(engine, text):
    sampling = Sampling(temperature=1.2, seed=5, repetition_penalty=1.3, frequency_penalty=0.5)
    rows = SamplingRows.of([sampling, None])
    a, b = engine.prefill([text[:37], text[50:71]])
    c, d = engine.fork(a), engine.fork(b)
    counts = jnp.asarray(np.stack([seen_tokens(each.tokens, 97) for each in (a, b)]))
    token, drawn, alone = np.array([3, 4], np.int32), [], counts.copy()
    for _ in range(4):
        sampled = engine.decode_and_sample([c, d], token, rows, counts=alone)
        alone, token = sampled.counts, np.asarray(sampled.tokens)
        drawn.append(token)
    drafts = np.stack([[3, 4], *drawn[:3]], axis=1)
    drafts[1, 2:] = (drafts[1, 2:] + 1) % 96
    sampled = step(engine, [a, b], drafts, None, rows, counts)
    assert sampled.accepted.tolist() == [4, 2]
    np.testing.assert_array_equal(sampled.tokens[0], np.stack(drawn, axis=1)[0])
    np.testing.assert_array_equal(sampled.counts[0], np.asarray(alone)[0])
    assert sampled.counts[1].sum() == seen_tokens(b.tokens, 97).sum() + 2 * 2


def test_what_no_step_can_write_is_refused(engine, text):
    a, b = engine.prefill([text[:20], text[:30]])
    before = engine.allocators[engine.spec.groups[-1].name].free
    for call, message in (
        (lambda: engine.decode([a, b], [[1, 2], [3, 4]]), "1, 4, 8, 16 tokens of every sequence"),
        (lambda: engine.decode([a, b], [[1, 2, 3, 4], [3]]), "1, 4, 8, 16 tokens of every sequence"),
        (lambda: step(engine, [a, b], [[1, 2, 3], [1, 2, 3]], None), "4, 8, 16 tokens of every sequence"),
        (lambda: step(engine, [a, b], [[1, 2, 3, 4]], None), "one entry for each of 2 slots"),
        (lambda: engine.decode([a, b], [[1, 2, 3, 97], [1, 2, 3, 4]]), "token 97 is outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (a.length, b.length, engine.allocators[engine.spec.groups[-1].name].free) == (20, 30, before)


def keep_all(logits, rows, lengths, drafted, active, counts, accept=sampling.accept):
    sampled = accept(logits, rows, lengths, drafted, active, counts)
    return sampled.replace(accepted=jnp.where(active, drafted.shape[1], 0))


def keep_one_less(*args, accept=sampling.accept):
    sampled = accept(*args)
    return sampled.replace(accepted=jnp.where(sampled.accepted > 1, sampled.accepted - 1, sampled.accepted))


def count_dropped(logits, rows, lengths, drafted, active, counts, accept=sampling.accept):
    sampled = accept(logits, rows, lengths, drafted, active, counts)
    return sampled if counts is None else sampled.replace(counts=sampled.counts + 2 * (sampled.accepted < drafted.shape[1])[:, None])


def states_of_all(states, count):
    return jax.tree.map(lambda leaf: leaf[:, -1], states)


@pytest.mark.quick_but("accept-keep_all-test_dropped_drafts_leave_nothing_behind")
@pytest.mark.parametrize(
    ("name", "fault", "test"),
    [
        ("accept", keep_all, test_dropped_drafts_leave_nothing_behind),
        pytest.param("accept", keep_one_less, test_dropped_drafts_leave_nothing_behind, marks=pytest.mark.long),
        ("accept", count_dropped, test_draws_and_penalties_keep_the_drafts_that_steps_of_one_would_draw),
        ("states_after", states_of_all, test_dropped_drafts_leave_nothing_behind),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_faults_are_seen(model, text, monkeypatch, name, fault, test):
    monkeypatch.setattr(steps, name, fault)
    steps.decode_and_sample.jitted.clear_cache()  # the one program that calls them
    seeds = [(2,), (3,)] if "seed" in inspect.signature(test).parameters else [()]  # of `Heavy`, which has states
    try:
        with pytest.raises(AssertionError):
            any(test(make_engine(model), text, *seed) for seed in seeds)
    finally:
        steps.decode_and_sample.jitted.clear_cache()
