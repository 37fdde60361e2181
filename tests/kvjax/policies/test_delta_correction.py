"""Delta correction, in full and damped, against plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies.prefill import delta_correction


def test_delta_correction_is_equation_3():
    rng = np.random.default_rng(1)
    sparse, exact = rng.standard_normal((2, 10, 3, 4)), rng.standard_normal((2, 3, 3, 4))
    found = np.asarray(delta_correction(jnp.asarray(sparse, jnp.float32), jnp.asarray(exact, jnp.float32), 4))
    for i in range(10):
        expected = sparse[:, i] + exact[:, i // 4] - sparse[:, i // 4 * 4]
        np.testing.assert_allclose(found[:, i], expected, atol=1e-6)
    assert delta_correction(jnp.ones((1, 4, 1, 2), jnp.bfloat16), jnp.ones((1, 2, 1, 2), jnp.bfloat16), 2).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="gamma must be at least 1"):
        delta_correction(jnp.asarray(sparse), jnp.asarray(exact), 0)
    with pytest.raises(ValueError, match="are ceil"):
        delta_correction(jnp.asarray(sparse), jnp.asarray(exact), 5)


def test_damped_delta_is_scaled_by_what_neighbours_of_the_tile_share():
    rng = np.random.default_rng(2)
    sparse, noise = rng.standard_normal((2, 34, 3, 4)), 0.3 * rng.standard_normal((2, 9, 3, 4))
    lack = noise + rng.standard_normal((2, 1, 3, 4))  # what all rows lack, and a little of their own
    exact = sparse[:, ::4] + lack
    found = np.asarray(delta_correction(jnp.asarray(sparse, jnp.float32), jnp.asarray(exact, jnp.float32), 4, damping_rows=5))
    shares = np.zeros((9, 2, 3, 1))
    for row in range(9):
        if pairs := range(row // 5 * 5 + 1, row + 1):
            told = np.stack([(lack[:, i - 1] * lack[:, i]).sum(-1) for i in pairs])
            own = sum((lack[:, i - 1] ** 2).sum(-1) for i in pairs)
            shares[row] = np.clip((told.sum(0) - np.sqrt((told**2).sum(0))) / own, 0, 1)[..., None]
    assert shares[0].max() == shares[5].max() == 0
    assert 0.2 < shares[4].mean() < 0.8
    for i in range(34):
        expected = sparse[:, i] + (shares[i // 4] if i % 4 else 1) * lack[:, i // 4]
        np.testing.assert_allclose(found[:, i], expected, atol=1e-5)


def test_damped_delta_grows_where_neighbours_lack_the_same_and_is_nothing_where_they_do_not():
    sparse, constant = jnp.zeros((1, 64, 1, 8)), jnp.ones((1, 16, 1, 8))
    found = np.asarray(delta_correction(sparse, constant, 4, damping_rows=16))
    pairs = np.arange(16)
    np.testing.assert_allclose(found[0, 1::4, 0, 0], (pairs - np.sqrt(pairs)) / np.maximum(pairs, 1), atol=1e-6)
    opposed = constant * jnp.where(jnp.arange(16) % 2, -1.0, 1.0)[:, None, None]
    found = delta_correction(sparse, opposed, 4, damping_rows=16)
    assert jnp.abs(found[:, ::4]).min() == 1
    assert jnp.abs(found[:, np.arange(64) % 4 != 0]).max() == 0
    with pytest.raises(ValueError, match="damping_rows must be at least 1 row"):
        delta_correction(sparse, constant, 4, damping_rows=0)


def test_damped_delta_does_not_look_ahead():
    rng = np.random.default_rng(3)
    sparse, exact = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 32, 2, 4), (1, 8, 2, 4)))
    found = delta_correction(sparse, exact, 4, damping_rows=8)
    other = delta_correction(sparse.at[:, 16:].multiply(3.0), exact.at[:, 4:].set(7.0), 4, damping_rows=8)
    assert np.asarray(found[:, :16]).tobytes() == np.asarray(other[:, :16]).tobytes()
