"""The benchmark of all_reduce: it runs on simulated devices, names what ran, and a wrong result shows in its rows."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from all_reduce_suite import AXIS
from jax.sharding import Mesh
from typer.testing import CliRunner

from benchmarks import exchange as exchange_bench
from benchmarks.exchange import Case


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(exchange_bench, "CHAIN", 3)


def invoke(*words):
    app = typer.Typer()
    app.command()(exchange_bench.bench)
    return CliRunner().invoke(app, [*map(str, words)])


def test_on_the_command_line(tmp_path):
    done = invoke("2/2x128/*", "--calls", 2, "--json", tmp_path / "exchange.json")
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "exchange.json").read_text())
    assert (written["bench"], [row["by"] for row in written["rows"]]) == ("exchange", list(exchange_bench.BY))
    for row in written["rows"]:
        assert row["case"] in done.stdout
        assert (row["bytes"], row["chain"], row["ops"], row["clock"]) == (512, 3, 6, "wall")
        assert row["same_bits"]
        assert row["path"] == ({"all_reduce": "xla"} if row["by"] in ("all_reduce", "xla") else {})
        assert row["same_on_all"] == (row["by"] != "none")
        assert (row["error"] is None) if row["by"] == "none" else row["error"] < 5e-3


def test_a_chain_is_what_it_says():
    """The parts of an addition are the sum before, times each device's factor."""
    case = Case(4, 2, 128, "xla")
    mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,))
    parts, factors, residual = inputs = exchange_bench.make_inputs(case, mesh)
    found = exchange_bench.program(case, mesh, 2)(*inputs)
    parts, factors, residual = (np.asarray(x) for x in (parts, factors, residual))
    for _ in range(2):
        total = functools.reduce(np.add, parts.astype(np.float32)) + residual.astype(np.float32)
        residual = total.astype(parts.dtype)
        parts = residual[None] * factors
    for of_device in np.asarray(found):
        assert of_device.tobytes() == residual.tobytes()


WRONG = {
    "zeros": (jnp.zeros_like, "error"),
    "NaN": (lambda x: x.at[0, 5].set(jnp.nan), "error"),
    "another sum on one device": (lambda x: x * (1 + 0.01 * (jax.lax.axis_index(AXIS) == 1)).astype(x.dtype), "same_on_all"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_shows(monkeypatch, wrong):
    op, (change, where) = exchange_bench.all_reduce, WRONG[wrong]
    monkeypatch.setattr(exchange_bench, "all_reduce", lambda *arrays, **static: change(op(*arrays, **static)))
    row = exchange_bench.row_of(Case(2, 2, 128, "all_reduce"), calls=1)
    assert not row["same_on_all"] if where == "same_on_all" else not row["error"] < 5e-3


def test_a_case_without_its_devices_is_skipped(monkeypatch):
    two = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda: two)
    done = invoke("4/2x128/psum")
    assert done.exit_code == 0
    assert "4/2x128/psum skipped: needs 4 devices, and there are 2" in done.output


def test_a_case_that_breaks_is_said(monkeypatch):
    monkeypatch.setattr(exchange_bench, "row_of", functools.partial(divmod, 1))
    done = invoke("2/2x128/psum")
    assert done.exit_code == 1
    assert "2/2x128/psum failed: TypeError" in done.output


def test_which_cases():
    assert {case.name for case in exchange_bench.matching(["4/1x8192/*"])} == {f"4/1x8192/{by}" for by in exchange_bench.BY}
    assert not [case for case in exchange_bench.matching([]) if case.width == 128]
    assert "no case matches '3/*'" in invoke("3/*").output
    assert invoke("--list").output.split() == [case.name for case in exchange_bench.all_cases()]
