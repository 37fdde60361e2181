"""Sampling is a distribution: cuts are exact, draws follow the probabilities, seeds repeat and company does not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Sampling
from kvjax.sampling import SamplingRows, kept, sample_step

LOGITS = np.log(np.array([0.05, 0.4, 0.25, 0.2, 0.1], np.float32))


def draws(count=4000, **fields):
    settings = [Sampling(seed=seed, **fields) for seed in range(count)]
    tokens, _ = sample_step(jnp.tile(LOGITS, (count, 1)), SamplingRows.of(settings), np.full(count, 3, np.int32))
    return np.bincount(np.asarray(tokens), minlength=5) / count


def test_greedy_takes_the_largest_and_the_lower_of_equals():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    tokens, logprobs = sample_step(logits, SamplingRows.of([None, None]), np.zeros(2, np.int32))
    assert np.asarray(tokens).tolist() == [1, 0]
    np.testing.assert_allclose(np.asarray(logprobs)[1], np.log(0.25), rtol=1e-6)


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
    tokens, _ = sample_step(jnp.tile(LOGITS, (4, 1)), SamplingRows.of(mixed), positions)
    assert tokens[0] == tokens[3]
    assert tokens[1] == 1
    sequence = [
        int(sample_step(LOGITS[None], SamplingRows.of([Sampling(temperature=1.0, seed=5)]), np.array([p], np.int32))[0][0])
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
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop must be strings that are not empty"),
        ({"stop": (5,)}, "stop must be strings"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"stop_token_ids": (1.5,)}, "a stop token id must be a whole number"),
        ({"logprobs": 1}, "logprobs must be True or False"),
    ],
)
def test_impossible_settings_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**fields)
