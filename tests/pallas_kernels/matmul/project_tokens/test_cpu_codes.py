"""Products of a few tokens and integer codes on a CPU, against NumPy's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core.matrices import MatrixFormat, pack, unpack
from pallas_kernels.matmul.project_tokens import project_tokens
from pallas_kernels.matmul.project_tokens.cpu_codes import codes_product, takes

F, E = 48, 160

FORMATS = {
    "int8": MatrixFormat("int8"),
    "int4": MatrixFormat("int4", 16),
    "q8": MatrixFormat("int8", 1, 64),
    "q4": MatrixFormat("int4", 1, 64),
}
"""Blocks of 64 leave a smaller last one."""


def _matrix(name: str, zeros: bool = False):
    packed = pack(jnp.asarray(np.random.default_rng(1).normal(size=(F, E)), jnp.float32), FORMATS[name])
    own = np.random.default_rng(2).integers(0, 16, packed.scales.shape, np.uint8)
    return packed.replace(zeros=jnp.asarray(own)) if zeros else packed


def _tokens(count: int):
    """Inputs of very different sizes: an integer's last digits count."""
    found = np.random.default_rng(3).normal(size=(count, E)) * np.logspace(-6, 3, count)[:, None]
    return jnp.asarray(found, jnp.float32)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_float64(name, zeros):
    if zeros and name in ("int8", "q8"):
        pytest.skip("zeros are of int4 alone")
    weight = _matrix(name, zeros)
    for count in (1, 5) if weight.format.columns is None else (1,):
        assert takes(weight, count)
        x = _tokens(count)
        truth = np.asarray(x, np.float64) @ np.asarray(unpack(weight), np.float64).T
        error = np.linalg.norm(np.asarray(jax.jit(codes_product)(x, weight)) - truth, axis=1) / np.linalg.norm(truth, axis=1)
        assert error.max() < 2e-6


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_token_has_the_same_bits_alone_and_beside_15_others(name):
    if jax.default_backend() != "cpu":
        pytest.skip("this form is a CPU's")
    weight, x = _matrix(name), _tokens(16)
    together = np.asarray(project_tokens(x, (weight,), implementation="xla")[0])
    for number in (0, 7, 15):
        alone = np.asarray(project_tokens(x[number : number + 1], (weight,), implementation="xla")[0])
        np.testing.assert_array_equal(alone[0], together[number])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_gives_nan_and_others_stay(wrong):
    weight, x = _matrix("int8"), _tokens(3)
    found = np.asarray(codes_product(x.at[1, 5].set(wrong), weight))
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], np.asarray(codes_product(x, weight))[[0, 2]])


def test_tokens_of_zeros_and_of_the_smallest_numbers_give_finite_products():
    found = np.asarray(codes_product(jnp.stack([jnp.zeros(E), jnp.full(E, 1e-40), jnp.full(E, 1e30)]), _matrix("int8")))
    assert np.isfinite(found).all()
    assert (found[:2] == 0).all()


@pytest.mark.parametrize("name", ["int8", "q4"])
def test_the_gradient_is_that_of_numbers(name):
    weight, x = _matrix(name), _tokens(1)
    ours = jax.grad(lambda x: codes_product(x, weight).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: (x @ unpack(weight).T).sum())(x), rtol=1e-5)


def test_no_widened_matrix_is_held():
    if jax.default_backend() != "cpu":
        pytest.skip("this form is a CPU's")
    weight = MatrixFormat("int8").empty((4096, 1024))
    x = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    compiled = jax.jit(lambda x, weight: project_tokens(x, (weight,))[0]).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 1024 / 4
