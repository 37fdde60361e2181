"""Certificates of a cascade's lists: whenever one says so, the list is the oracle's, whatever the keys are; and mutants
that are caught."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import rest_long
from tiny_models import shallow
from typer.testing import CliRunner

from benchmarks import certificates
from benchmarks.certificates import BOUNDS, certify, count_certified
from kvjax import Engine
from kvjax.cache import PagedKV
from kvjax.policies.decode import Cascade, SelectContext, parse
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

APP = typer.Typer()
APP.command()(certificates.certificates_command)
P, BS, G, D, PAGES = 16, 8, 2, 16, 8
COUNT, LENGTH = PAGES * P // BS, PAGES * P - 3
SIZES = {"sink": 1, "local": 1, "block_size": BS}
POLICIES = {
    "4 bits of all": Cascade(1, "all", 4, **SIZES),
    "8 bits of all": Cascade(3, "all", 8, **SIZES),
    "4 bits of a shortlist": Cascade(2, 5, 4, **SIZES),
    "the cache of a shortlist": Cascade(2, 5, "cache", **SIZES),
}


def rounded(seed, *, most, apart, scale, dtype):
    """Blocks whose keys are as far from their codes as they can be, for or against the query, and whose codes are
    nearly equal: two blocks stand out, `apart` codes of one channel from each other."""
    random = np.random.default_rng(seed)
    query = np.abs(random.uniform(0.5, 1.5, (G, D))) * random.choice([-1.0, 1.0], D)  # errors of both heads go one way
    query[:, 0] *= 4
    codes = np.broadcast_to(random.integers(most // 2, most, (1, BS, D)), (COUNT, BS, D)).astype(float)
    codes[:, :, 0] = 1
    second, first = random.permutation(np.arange(1, COUNT - 2))[:2]
    codes[second, :, 0], codes[first, :, 0] = 5, 5 + apart
    codes = np.where(query[0] > 0, codes, most - codes)
    keys = codes + 0.49 * random.choice([-1, 1], (COUNT, 1, 1)) * np.sign(query[0])
    keys[:, 0], keys[:, 1] = (np.arange(D) % 2) * most, (1 - np.arange(D) % 2) * most  # the levels
    keys = keys * 2.0 ** random.integers(-3, 0, D) - 1.0
    return jnp.asarray(keys.reshape(PAGES, 1, P, D), dtype), jnp.asarray(query[None, None] * scale, jnp.float32)


def peaked(seed, *, scale, spread, dtype):
    """Blocks with one large key, and blocks of many equal ones."""
    random = np.random.default_rng(seed)
    keys = random.standard_normal((COUNT, BS, D)) * random.choice([0.02, 1, spread], (COUNT, 1, 1)) + random.standard_normal((COUNT, 1, D))
    query = random.standard_normal((1, 1, G, D)) * scale
    return jnp.asarray(keys.reshape(PAGES, 1, P, D), dtype), jnp.asarray(query, jnp.float32)


def oracle(policy, keys, query):
    """The oracle's list, in float64."""
    flat = np.asarray(keys, np.float64).reshape(-1, D)
    logits = flat @ np.asarray(query[0, 0], np.float64).T * D**-0.5
    first_local = (LENGTH - 1) // P * P // BS
    blocks = np.logaddexp.reduce(logits.reshape(COUNT, BS, G), axis=1)
    distant = range(policy.sink, first_local)
    seen = np.concatenate([logits[:LENGTH][: policy.sink * BS], logits[first_local * BS : LENGTH]])
    total = np.logaddexp(np.logaddexp.reduce(seen, axis=0), np.logaddexp.reduce(blocks[policy.sink : first_local], axis=0))
    share = np.exp(blocks - total).sum(axis=1)
    return sorted(sorted(distant, key=lambda b: (-share[b], b))[: policy.k])


@functools.cache
def program(policy):
    """The certificate of a step of one sequence."""

    @jax.jit
    def run(layer, query):
        ctx = SelectContext(jnp.arange(PAGES, dtype=jnp.int32)[None], jnp.full(1, LENGTH), 0, 1, P, D**-0.5)
        return certify(policy, query, layer, ctx)

    return run


def check(policy, keys, query):
    """Returns how many certificates were given, of all error bounds."""
    layer = PagedKV(Pages(keys, keys), {each.name: page_index(keys, kind=each.kind, block_size=BS) for each in policy.indexes()})
    found = program(policy)(layer, query)
    right = np.flatnonzero(found.kept[0, 0]).tolist() == oracle(policy, keys, query)
    assert found.choosing.all()
    given = 0
    for bound in BOUNDS:
        assert right or not found.certified[bound].any()
        assert found.equal.all() or not found.certified[bound].any()
        assert found.chosen.all() or not found.choice[bound].any()
        assert found.choice[bound].all() or not found.certified[bound].any()
        given += int(found.certified[bound].sum())
    return given


@st.composite
def cases(draw, kinds=("rounded", "peaked")):
    seed, scale = draw(st.integers(0, 2**20)), draw(st.sampled_from([0.05, 0.3, 1.0, 3.0, 20.0]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    if draw(st.sampled_from(kinds)) == "peaked":
        return peaked(seed, scale=scale, spread=draw(st.sampled_from([0.1, 3.0, 30.0])), dtype=dtype)
    most = draw(st.sampled_from([15, 255]))
    return rounded(seed, most=most, apart=draw(st.integers(0, 8)), scale=scale, dtype=dtype)


@pytest.mark.parametrize("name", rest_long(POLICIES, "4 bits of a shortlist"))
def test_a_certified_list_is_the_oracles(name):
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases())
    def run(case):
        check(POLICIES[name], *case)

    run()


@pytest.mark.long
def test_certificates_are_given():
    """Where blocks are far apart, and not only to lists of every block."""
    counts = {
        name: sum(check(policy, *peaked(seed, scale=3.0, spread=3.0, dtype="float32")) for seed in range(20))
        for name, policy in POLICIES.items()
    }
    assert counts["8 bits of all"] > 10
    assert counts["4 bits of all"] > 0
    assert counts["the cache of a shortlist"] > 0


@pytest.mark.parametrize("bound", rest_long(BOUNDS, "levels"))
def test_half_of_an_error_bound_is_too_little(bound, monkeypatch):
    sound = certificates._Codes.error
    monkeypatch.setattr(certificates._Codes, "error", lambda self, name: sound(self, name) * (0.5 if name == bound else 1))
    program.cache_clear()
    with pytest.raises(AssertionError):
        check_rounded(POLICIES["4 bits of all"])
    program.cache_clear()


def check_rounded(policy):
    for seed in range(20):
        for apart in range(1, 8):
            check(policy, *rounded(seed, most=15, apart=apart, scale=1.0, dtype="float32"))


def one_key_against_many():
    """Block 3 has one key with a larger logit than those of block 6, which are all equal: its bound is larger, its
    attention less."""
    keys = np.zeros((COUNT, BS, D), np.float32)
    keys[:, :, 0] = -20
    keys[3, 0, 0], keys[6, :, 0] = 21, 20
    return jnp.asarray(keys.reshape(PAGES, 1, P, D)), jnp.zeros((1, 1, G, D)).at[..., 0].set(4.0)


def test_bounds_are_of_one_key(monkeypatch):
    policy = Cascade(1, 1, "cache", **SIZES)
    assert check(policy, *one_key_against_many()) == 0
    sound = certificates._Codes._by_bounds
    monkeypatch.setattr(certificates._Codes, "_by_bounds", lambda self, *given: sound(self, *given) - np.log(BS))
    with pytest.raises(AssertionError):
        check(dataclasses.replace(policy, sink=2), *one_key_against_many())


@pytest.mark.parametrize("cache_format", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_an_engine_counts_lists(cache_format, model, text):
    policy = Cascade(1, 2, 8 if cache_format is None else None, sink=1, local=1, block_size=8)
    sizes = {"pages": 32, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (2, 4)}  # forks need rows of open pages
    engine = Engine(shallow(model), policy, **sizes, cache_format=cache_format)
    sequences = engine.prefill([text[:70], text[100:120]])
    counts = count_certified(engine, sequences, [text[70:74], text[120:124]], policy)
    assert counts["lists"] == 4 * engine.spec.kv_heads  # the second sequence is too short for a choice
    assert counts["lists"] >= counts["chosen"] >= counts["equal"] >= counts["certified"]["norms"]
    assert counts["chosen"] >= counts["choice"]["levels"] > 0
    assert [each.length for each in sequences] == [70, 20]


@pytest.mark.parametrize("name", ["top:4", "cascade:p0.9"])
def test_other_policies_have_no_certificate(name):
    with pytest.raises(ValueError, match="has no certificate"):
        certify(parse(name), jnp.zeros((1, 1, 2, 16)), None, None)


def test_a_table_has_shares_of_the_lists():
    counts = {"lists": 40, "equal": 20, "chosen": 30, "certified": {"levels": 2, "norms": 4}, "choice": {"levels": 2, "norms": 4}}
    columns, rows = certificates.lists_rows({"forced": [{"policy": "cascade:1", "length": 2048, "lists": counts}, {"policy": "dense"}]})
    assert rows == [["cascade:1 (768)", "2,048", "40", "20 (50.0%)", "2 (5.0%)", "4 (10.0%)", "30 (75.0%)", "2 (5.0%)", "4 (10.0%)"]]
    assert len(columns) == len(rows[0])


@pytest.mark.long
def test_the_command_counts_and_writes(tmp_path):
    sizes = ["--length", "1k", "--windows", "1", "--steps", "1", "--policies", "cascade:1/all+8bit"]
    done = CliRunner().invoke(APP, [*sizes, "--json", str(tmp_path / "counts.json")])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "counts.json").read_text())["forced"]
    assert row["policy"] == "cascade:1/all+8bit"
    assert row["lists"]["lists"] >= row["lists"]["equal"] >= row["lists"]["certified"]["norms"]


def test_the_command_refuses_a_policy_without_a_certificate():
    done = CliRunner().invoke(APP, ["--policies", "cascade:4,top:4"])
    assert (done.exit_code, "top:4 has no certificate" in done.output) == (2, True)
