"""Sampling is a distribution: cuts are exact, draws follow the probabilities, seeds repeat and company does not
matter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model

from kvjax import Engine, Sampling
from kvjax.engine.sampling import NOISE_VERSION, SamplingRows, count_tokens, derived_seed, kept, penalised, sample, seen_tokens

sample_step = jax.jit(sample)
LOGITS = np.log(np.array([0.05, 0.4, 0.25, 0.2, 0.1], np.float32))


def draws(count=4000, **fields):
    settings = [Sampling(seed=seed, **fields) for seed in range(count)]
    drawn = sample_step(jnp.tile(LOGITS, (count, 1)), SamplingRows.of(settings), np.full(count, 3, np.int32))
    return np.bincount(np.asarray(drawn.tokens), minlength=5) / count


def test_greedy_takes_the_largest_and_the_lower_of_equals():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    sampled = sample_step(logits, SamplingRows.of([None, None]), np.zeros(2, np.int32))
    assert np.asarray(sampled.tokens).tolist() == [1, 0]
    np.testing.assert_allclose(np.asarray(sampled.logprobs)[1], np.log(0.25), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.25, 0.2, 0.1]),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.7}, [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1e-60}, [0, 1, 0, 0, 0]),  # 0 in float32
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),  # of what top-k left
        ({"temperature": 1.0, "top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5}, np.square([0.05, 0.4, 0.25, 0.2, 0.1]) / np.square([0.05, 0.4, 0.25, 0.2, 0.1]).sum()),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
    ],
)
def test_draws_follow_the_cut_distribution(fields, expected):
    observed = draws(**fields)
    assert np.all(observed[np.asarray(expected) == 0] == 0), "a token that was cut is never drawn"
    np.testing.assert_allclose(observed, expected, atol=0.03)


def test_a_top_p_of_one_cuts_nothing():
    """Also where the rounded sum of the probabilities reaches 1 before the last of them."""
    ranked = jnp.sort(jax.random.normal(jax.random.key(0), (1, 5000)) * 4, descending=True)
    assert np.asarray(kept(ranked, SamplingRows.of([Sampling(temperature=1.0)]))).all()
    assert np.asarray(kept(ranked, SamplingRows.of([Sampling(temperature=1.0, top_k=70)]))).sum() == 70


def test_rows_are_independent_of_their_company_and_positions_differ():
    mixed = [Sampling(temperature=1.0, seed=5), Sampling(), Sampling(temperature=2.0, seed=9), Sampling(temperature=1.0, seed=5)]
    positions = np.array([8, 8, 8, 8], np.int32)
    tokens = sample_step(jnp.tile(LOGITS, (4, 1)), SamplingRows.of(mixed), positions).tokens
    assert tokens[0] == tokens[3]
    assert tokens[1] == 1
    sequence = [
        int(sample_step(LOGITS[None], SamplingRows.of([Sampling(temperature=1.0, seed=5)]), np.array([p], np.int32)).tokens[0])
        for p in range(40)
    ]
    assert len(set(sequence)) > 2, "each position draws anew"
    assert sequence[8] == int(tokens[0])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [5]}, "stop must be"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": -0.1}, "top_p must be a number from 0 to 1, got -0.1"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**63}, "seed must be at most 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "seed must be at least"),
        ({"stop": ("",)}, "stop must be strings that are not empty"),
        ({"stop": (5,)}, "stop must be strings"),
        ({"stop": 5}, "stop must be strings that are not empty, got 5"),
        ({"stop": {"a": 1}}, "stop must be strings"),
        ({"stop_token_ids": {5: 1}}, "stop_token_ids must be a list of token ids"),
        ({"stop": ["ab"] * 1025}, "stop has more than 1,024 strings, the most that are taken"),
        ({"stop": itertools.repeat("x")}, "stop has more than 1,024 strings, the most that are taken"),
        ({"stop": np.array("a")}, "stop must be strings that are not empty"),
        ({"stop_token_ids": np.array(5)}, r"stop_token_ids must be a list of token ids, got array\(5\)"),
        ({"stop": ["a" * 2**19] * 3}, "the stop strings have 1,572,864 characters, and 1,048,576 are the most"),
        ({"stop": None}, r"got None; leave it out, or give \(\), for none"),
        ({"stop_token_ids": range(2**16 + 1)}, "stop_token_ids has more than 65,536 ids"),
        ({"stop_token_ids": itertools.count()}, "stop_token_ids has more than 65,536 ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got '12'"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"stop_token_ids": (1.5,)}, "a stop token id must be a whole number"),
        ({"logprobs": 1}, "logprobs must be True or False"),
    ],
)
def test_impossible_settings_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**fields)


def drawn(logits, seeds, **fields):
    """One token for each seed, at place 3."""
    rows = SamplingRows.of([Sampling(temperature=1.0, seed=seed, **fields) for seed in seeds])
    tiled = np.tile(np.asarray(logits, np.float32), (len(seeds), 1))
    return np.asarray(sample_step(tiled, rows, np.full(len(seeds), 3, np.int32)).tokens)


def test_values_of_other_engines():
    assert Sampling(top_k=-1) == Sampling(top_k=0)
    assert set(drawn(LOGITS, range(50), top_p=0).tolist()) == {1}


def test_all_bits_of_a_seed_count():
    seeds = [0, 1, -1, 2**31, 2**32, 2**32 + 1, 2**53, -(2**53), 2**63 - 1, -(2**63)]
    logits = np.zeros(5000)
    tokens = drawn(logits, seeds)
    assert len(set(tokens.tolist())) == len(seeds)
    assert drawn(logits, seeds[::-1])[::-1].tolist() == tokens.tolist()


def test_draws_of_a_seed_stay():
    """A change here is a new NOISE_VERSION: an older job does not go on with other draws."""
    tokens = drawn(np.zeros(1000), [0, 1, 7, 2**40, -1]).tolist()
    derived = [derived_seed(7, "sample", 2), derived_seed(7, "prompt", 2), derived_seed(7, "sample", 0)]
    assert (NOISE_VERSION, tokens, derived) == (2, [503, 197, 276, 744, 135], [4429817029414336207, 6977377927693714382, 7])


def test_nearly_equal_logits_draw_the_same_token():
    """Noise is keyed by token id. Keyed by rank, a swap of two ranks would move every draw between them."""
    logits = np.random.default_rng(0).normal(size=2000)
    moved = logits + np.random.default_rng(1).normal(size=2000) * 0.01
    same = drawn(logits, range(400)) == drawn(moved, range(400))
    shares = np.exp(logits) / np.exp(logits).sum(), np.exp(moved) / np.exp(moved).sum()
    distance = np.abs(shares[0] - shares[1]).sum() / 2
    assert 1 - same.mean() < 2 * distance + 0.02, "Gumbel noise couples draws within twice the total variation distance"


def test_cuts_do_not_move_the_noise_of_what_stays():
    logits = np.random.default_rng(0).normal(size=50)
    best = set(np.argsort(-logits)[:10].tolist())
    free, cut = drawn(logits, range(300)), drawn(logits, range(300), top_k=10)
    stays = np.isin(free, list(best))
    assert stays.sum() > 100
    np.testing.assert_array_equal(cut[stays], free[stays])


def test_samples_of_neighbouring_seeds_are_independent():
    streams = {derived_seed(seed, kind, number) for seed in range(20) for kind in ("sample", "prompt") for number in range(1, 20)}
    assert len(streams | set(range(20))) == 20 * 2 * 19 + 20


TEMPERATURES = [5e-324, 1e-60, 1e-45, 1.4e-45, 1e-44, 1e-40, 1.18e-38, 1e-37, 1e-36, 1e-30, 1e-20, 1e-9, 1e-3]


@pytest.mark.filterwarnings("error")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TEMPERATURES) | st.floats(5e-324, 1e-3),
    st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=12, unique=True),
    st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.9}]),
    st.integers(-(2**63), 2**63 - 1),
)
def test_a_tiny_temperature_takes_the_greedy_token(temperature, logits, cuts, seed):
    """Logits are whole numbers apart, so at T up to 1e-3 the others have a probability of at most exp(-1000)."""
    padded = np.full(12, -np.inf, np.float32)
    padded[: len(logits)] = logits
    sampled = sample_step(padded[None], SamplingRows.of([Sampling(temperature=temperature, seed=seed, **cuts)]), np.zeros(1, np.int32))
    assert int(sampled.tokens[0]) == int(np.argmax(logits))
    assert np.isfinite(sampled.logprobs[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-44, 1e-38, 1e-30, 1e-6])
def test_equals_are_drawn_evenly_at_any_temperature(temperature):
    count = 2000
    rows = SamplingRows.of([Sampling(temperature=temperature, seed=seed) for seed in range(count)])
    logits = np.tile(np.array([7.0, 30.0, -5.0, 30.0], np.float32), (count, 1))
    tokens = sample_step(logits, rows, np.zeros(count, np.int32)).tokens
    shares = np.bincount(np.asarray(tokens), minlength=4) / count
    # A device that flushes denormals takes such a temperature for 0, which is greedy.
    greedy = temperature < np.finfo(np.float32).tiny and shares[1] == 1
    assert greedy or np.allclose(shares, [0, 0.5, 0, 0.5], atol=0.06)


@pytest.mark.filterwarnings("error")
def test_a_huge_temperature_draws_evenly_and_never_what_is_impossible():
    settings = [Sampling(temperature=temperature, seed=seed) for temperature in (1e30, 1e39, 1e300) for seed in range(700)]
    logits = np.tile(np.array([0.0, -np.inf, 20.0], np.float32), (len(settings), 1))
    tokens = sample_step(logits, SamplingRows.of(settings), np.zeros(len(settings), np.int32)).tokens
    np.testing.assert_allclose(np.bincount(np.asarray(tokens), minlength=3) / len(settings), [0.5, 0, 0.5], atol=0.06)


@pytest.mark.parametrize("temperature", [1e38, 1e39])
def test_a_huge_temperature_leaves_the_cuts_their_order(temperature):
    """Logits divided by it are equal, or flushed to 0: the best tokens are still those of the largest logits."""
    for k, best in ((1, {2}), (2, {1, 2})):
        rows = SamplingRows.of([Sampling(temperature=temperature, top_k=k, seed=seed) for seed in range(64)])
        tokens = sample_step(np.tile(np.array([-1.0, 0.5, 2.0, 0.0], np.float32), (64, 1)), rows, np.zeros(64, np.int32)).tokens
        assert set(np.asarray(tokens).tolist()) == best


def penalised_by_hand(logits, prompt, answer, sampling):
    """The definitions, token by token: transformers' RepetitionPenaltyLogitsProcessor over prompt and answer, then
    OpenAI's formula."""
    result = logits.astype(np.float64)
    for token in range(len(logits)):
        if token in prompt or token in answer:
            penalty = np.float32(sampling.repetition_penalty)
            result[token] = result[token] * penalty if result[token] < 0 else result[token] / penalty
        times = list(answer).count(token)
        result[token] -= times * np.float32(sampling.frequency_penalty)
        result[token] -= (times > 0) * np.float32(sampling.presence_penalty)
    return result


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=8),
    st.lists(st.integers(0, 11), max_size=8),
    st.floats(0.5, 2.0),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.integers(0, 2**31),
)
def test_penalties_are_those_of_their_definitions(prompt, answer, repetition, presence, frequency, seed):
    logits = (np.random.default_rng(seed).normal(size=(3, 12)) * 4).astype(np.float32)
    sampling = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    counts = jnp.asarray(np.stack([seen_tokens(prompt, 12)] * 2 + [seen_tokens(range(12), 12)]))
    for token in answer:
        counts = count_tokens(counts, np.array([token, token, 3], np.int32), np.array([True, False, True]))
    found = np.asarray(penalised(jnp.asarray(logits), SamplingRows.of([sampling, sampling, None]), counts))
    np.testing.assert_allclose(found[0], penalised_by_hand(logits[0], prompt, answer, sampling), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], penalised_by_hand(logits[1], prompt, (), sampling), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[2], logits[2], "a row without penalties keeps its bits")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_p": 0.6}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"min_p": 0.2}, [0, 0.4 / 0.95, 0.25 / 0.95, 0.2 / 0.95, 0.1 / 0.95]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.2, "top_k": 3}, [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
        # At temperature 1/2 the shares of the best are squared: 0.39, 0.25, 0.0625, 0.0156.
        ({"min_p": 0.1, "temperature": 0.5}, np.array([0, 0.16, 0.0625, 0.04, 0]) / 0.2625),
    ],
)
def test_min_p_keeps_a_share_of_the_best(fields, expected):
    observed = draws(**({"temperature": 1.0} | fields))
    assert np.all(observed[np.asarray(expected) == 0] == 0)
    np.testing.assert_allclose(observed, expected, atol=0.03)


def test_the_most_likely_tokens_come_with_their_log_probabilities():
    rows = SamplingRows.of([Sampling(logprobs=True, top_logprobs=3), None])
    sampled = sample_step(jnp.tile(LOGITS, (2, 1)) + 7, rows, np.zeros(2, np.int32))
    assert sampled.top_tokens.tolist() == [[1, 2, 3, 4, 0]] * 2
    np.testing.assert_allclose(np.asarray(sampled.top_logprobs[0]), np.sort(LOGITS)[::-1], atol=1e-5)
    assert sampled.top_logprobs[0, 0] == sampled.logprobs[0]
    plain = sample_step(jnp.tile(LOGITS, (2, 1)) + 7, SamplingRows.of([None, None]), np.zeros(2, np.int32))
    assert plain.top_tokens is None
    np.testing.assert_array_equal(plain.logprobs, sampled.logprobs)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"min_p": float("nan")}, "min_p must be a number from 0 to 1, got nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.001 to 1000, got 0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2, got 2.5"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number from -2 to 2, got '1'"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 129}, "n must be at most 128, got 129"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be at most 20, got 21"),
        ({"top_logprobs": 2}, "top_logprobs 2 needs logprobs=True"),
    ],
)
def test_what_the_newer_settings_take(fields, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**fields)


def test_rows_that_change_in_place_change_the_next_step():
    """Rows are put on the device once only if nobody can change them."""
    engine = Engine(make_model(), "dense", pages=8, page_size=16, prefill_chunk=32, batch_buckets=(1,))
    of = [SamplingRows.of([Sampling(temperature=1.0, seed=seed)]) for seed in range(12)]
    (sequence,) = engine.prefill([list(range(20))])

    def tokens(sequence, rows):
        return [int(engine.decode_and_sample([sequence], np.zeros(1, np.int32), each).tokens[0]) for each in rows]

    def changed(seeds):
        rows = jax.tree.map(np.array, of[0])
        for seed in seeds:
            rows.seed[:] = 0, seed
            yield rows

    assert tokens(engine.fork(sequence), changed(range(12))) == tokens(sequence, of)
    assert engine._on_device(of[0]) is engine._on_device(of[0])
    with pytest.raises(ValueError, match="read-only"):
        of[0].seed[:] = 1
