"""The benchmark of block_mass: its reference is the definition, its counts are right, and a wrong result shows in its
rows."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from paging import block_mass, flash_attention
from typer.testing import CliRunner

from benchmarks import block_mass as mass_bench
from benchmarks.block_mass import Case


@pytest.mark.parametrize("first", [0, 70])
def test_the_streamed_reference_is_the_definition(monkeypatch, first):
    monkeypatch.setattr(mass_bench, "SPAN", 32)
    shapes = (1, 40, 8, 32), (6, 2, 16, 32), (6, 2, 16, 32)
    q, k, v = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    table, lengths = jnp.array([[4, 0, 5, 2, 1, 3]], jnp.int32), jnp.array([96], jnp.int32)
    starts, firsts = jnp.array([56], jnp.int32), jnp.array([first], jnp.int32)
    static = {"sm_scale": 32**-0.5, "implementation": "reference"}
    lse = flash_attention(q, k, v, table, starts, lengths, **static)[1]
    expected = block_mass(q, k, table, starts, lengths, lse, firsts, block_size=8, **static)
    for head in range(8):
        keys = k[table[0], head // 4].reshape(96, 32)
        found = mass_bench.streamed_mass(q[0, :, head], keys, starts[0], firsts[0], block_size=8, sm_scale=32**-0.5)
        np.testing.assert_allclose(found, expected[0, head], rtol=1e-5, atol=1e-6)


def test_products_are_those_of_keys_that_are_seen():
    case = Case("tiny", 1024, 2048)
    sizes, positions = case.sizes, np.arange(1024, 2048)
    assert case.products(1024) == 2 * sizes.num_heads * sizes.head_dim * (positions + 1).sum()
    assert case.products(64) == 2 * sizes.num_heads * sizes.head_dim * (positions[-64:] + 1).sum()


WRONG = {
    "zeros": jnp.zeros_like,
    "a block lost": lambda mass: mass.at[0, -1, 5].set(0),
    "NaN": lambda mass: mass.at[0, 0, 5].set(jnp.nan),
}


@pytest.mark.quick_but("zeros")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_shows(monkeypatch, wrong):
    op = mass_bench.block_mass
    monkeypatch.setattr(mass_bench, "block_mass", lambda *arrays, **static: WRONG[wrong](op(*arrays, **static)))
    assert mass_bench.row_of(Case("tiny", 128, 1024), None, calls=1)["error"] > 1e-3


def invoke(*words):
    app = typer.Typer()
    app.command()(mass_bench.bench)
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.mark.long
def test_on_the_command_line(tmp_path):
    """A table, and rows with both times and the error; one that breaks does not lose the others."""
    done = invoke("tiny/*", "--calls", 1, "--json", tmp_path / "mass.json")
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "mass.json").read_text())
    assert (written["bench"], len(written["rows"])) == ("block-mass", 2)
    for row in written["rows"]:
        assert row["case"] in done.stdout
        assert row["error"] < 1e-5
        assert row["same_bits"]
        assert row["times_dense"] == pytest.approx(row["mass"]["median_s"] / row["dense"]["median_s"])


def test_a_case_that_breaks_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(mass_bench, "row_of", functools.partial(divmod, 1))
    done = invoke("tiny/1k-of-1k/*")
    assert done.exit_code == 1
    assert "tiny/1k-of-1k/last64 failed: TypeError" in done.output


def test_which_cases():
    assert {case.name for case in mass_bench.matching(["qwen2.5-7b/*/all"])} == {
        f"qwen2.5-7b/{sizes}/all" for sizes in ("8k-of-32k", "8k-of-128k", "32k-of-32k")
    }
    assert not [case for case in mass_bench.matching([]) if case.shape == "tiny"]
    assert "no case matches 'gpt/*'" in invoke("gpt/*").output
    assert invoke("--list").output.split() == [case.name for case in mass_bench.all_cases()]
