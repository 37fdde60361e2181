"""What kernels in a loop need is prepared once, before the loop."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.collectives.preparation import before_loop, prepared


def kernel(kind, x):
    """Adds what it prepared, which is told by its primitive."""
    return x + prepared(kind, lambda: jax.lax.erf_inv(jnp.float32(0.125 * kind)))


def body(_, x):
    return kernel(1, kernel(2, kernel(1, x)))


def ready(x):
    with before_loop(body, 0, x) as turn:
        return jax.lax.fori_loop(0, 3, turn, x)


def places(function, *arguments) -> tuple[int, int]:
    """How often a program prepares, outside of its loop and in it."""

    def count(jaxpr) -> int:
        return sum(each.primitive.name == "erf_inv" for each in jaxpr.eqns)

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    (loop,) = (each for each in jaxpr.eqns if each.primitive.name in ("while", "scan"))
    return count(jaxpr), count(loop.params["body_jaxpr" if loop.primitive.name == "while" else "jaxpr"].jaxpr)


def test_each_kind_is_prepared_once_before_the_loop():
    plain = lambda x: jax.lax.fori_loop(0, 3, body, x)  # noqa: E731
    assert places(plain, 1.0) == (0, 3)
    assert places(ready, 1.0) == (2, 0)
    assert jax.jit(ready)(1.0) == jax.jit(plain)(1.0)


def test_it_ends_with_the_loop_and_with_an_error():
    with pytest.raises(ZeroDivisionError), before_loop(body, 0, 1.0):
        raise ZeroDivisionError
    assert places(ready, 1.0) == (2, 0)
    assert "erf_inv" in str(jax.make_jaxpr(body)(0, 1.0))


def test_what_the_body_did_not_ask_for_is_prepared_where_it_is_needed():
    with before_loop(body, 0, 1.0):
        assert "erf_inv" not in str(jax.make_jaxpr(lambda x: x + prepared(1, lambda: x))(1.0))
        assert "erf_inv" in str(jax.make_jaxpr(lambda x: kernel(3, x))(1.0))
