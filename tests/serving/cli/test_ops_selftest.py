"""The self-test of `kvjax doctor`: it passes here, and it sees what is wrong."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from kvjax.serving.cli import ops_selftest
from pallas_kernels.core import dispatch


@pytest.fixture(scope="module")
def checks():
    return list(ops_selftest.check_ops("float32"))


def test_every_op_has_an_example_and_the_first_ones_are_right():
    assert set(ops_selftest.EXAMPLES) == set(dispatch.IMPLEMENTATIONS)
    checks = list(itertools.islice(ops_selftest.check_ops("float32"), 3))
    assert [(check.failed, check.refused) for check in checks] == [(None, None)] * 3
    assert all(check.error <= ops_selftest.LARGEST_ERROR["float32"] for check in checks)


@pytest.mark.long
def test_every_implementation_here_is_right(checks):
    ran = {(check.op, check.implementation) for check in checks}
    assert ran == {(op, name) for op in dispatch.IMPLEMENTATIONS for name in dispatch.available(op) if name != "reference"}
    assert [check for check in checks if check.failed] == []
    assert all(check.error <= ops_selftest.LARGEST_ERROR["float32"] for check in checks if not check.refused)


@pytest.mark.long
def test_one_implementation_of_each_op_is_taken(checks):
    assert sorted(check.op for check in checks if check.chosen) == sorted(dispatch.IMPLEMENTATIONS)


def off(array):
    return array * 1.01 if jnp.issubdtype(array.dtype, jnp.floating) else array + 1


@pytest.mark.long
def test_wrong_results_of_every_op_are_seen(monkeypatch, checks):
    load = dispatch.load

    def loaded(op, name):
        function = load(op, name)
        return function if name == "reference" else lambda *args: jax.tree.map(off, function(*args))

    monkeypatch.setattr(dispatch, "load", loaded)
    assert [check for check in ops_selftest.check_ops("float32") if not check.failed] == []


def test_what_raises_and_what_refuses_is_said(monkeypatch):
    def run(name):
        raise {"xla": RuntimeError("out of\n registers"), "composed": NotImplementedError("no kernel")}[name]

    failed, refused = (ops_selftest._checked("top_k", name, False, run, [], 1e-4) for name in ("xla", "composed"))
    assert (failed.failed, failed.error) == ("RuntimeError: out of registers", None)
    assert (refused.failed, refused.refused) == (None, "no kernel")


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        list(ops_selftest.check_ops("int8"))
