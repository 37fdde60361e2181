"""The radix baseline: exact sets, and a kernel that compiles without spilling."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import in_turn

from benchmarks.top_k import radix_select
from pallas_kernels.hopper.threads import lanes


def emulate(emulated, scores, k, ctas, threads=512):
    """The kernel's stages on emulated threads: values and indices."""
    batch, n = scores.shape
    s = dataclasses.replace(radix_select.shape_of(batch, n, k, ctas), threads=threads)
    values, indices = np.full((batch, k), np.nan, np.float32), np.full((batch, k), -7, np.int32)

    def stage(arrays, scratch, row, cta):
        radix_select.select(s, row, cta, *arrays, scratch)

    sizes = {"clusters": batch, "ctas": ctas, "threads": threads, "scratch_words": s.scratch_words()}
    emulated.run_clusters(stage, arrays=(scores.copy(), values, indices), scalars=lambda row, cta: {"row": row, "cta": cta}, **sizes)
    return values, indices


def check(emulated, scores, k, ctas):
    """Different places, their own scores, and as a multiset the k largest of numpy's sort."""
    values, indices = emulate(emulated, scores, k, ctas)
    for row, value, index in zip(scores, values, indices, strict=True):
        assert len(set(index.tolist())) == k
        np.testing.assert_array_equal(row[index], value)
        np.testing.assert_array_equal(np.sort(value), np.sort(row)[len(row) - k :])


def rows_of(kind, n):
    rows = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    if kind == "ties":
        return np.round(2 * rows) / 2
    if kind == "equal":
        return np.full_like(rows, 1.5)
    if kind == "negative":
        rows = -np.abs(rows) * np.float32(1e-30)
        rows[0, : n // 2] = -np.inf
    return rows


PLACES = {
    "one CTA": (4096, 32, 1),
    "one CTA, several turns": (40000, 2048, 1),
    "several": (8192, 100, 4),
    "uneven": (20000, 2048, 3),
    "cluster of 16": (32768, 512, 16),
    "few": (8, 3, 2),
}


@pytest.mark.parametrize(("place", "kind"), in_turn(PLACES, ["normal", "ties", "equal", "negative"]))
def test_finds_the_k_largest(emulated, place, kind):
    n, k, ctas = PLACES[place]
    check(emulated, rows_of(kind, n), k, ctas)


def test_ctas_are_by_the_batch_or_what_is_asked_for():
    assert [radix_select.shape_of(batch, 8192, 32, None).ctas for batch in (1, 8, 64, 100)] == [16, 8, 2, 1]
    assert {radix_select.shape_of(batch, 8192, 32, 1).ctas for batch in (1, 8, 64, 100)} == {1}
    one, many = (radix_select.shape_of(1, 2**20, 2048, ctas) for ctas in (1, 16))
    assert one.turn * 4 == 2**16, "bytes on their way"
    assert (one.threads, many.turn) == (512, one.turn // 2)


def test_a_k_of_everything(emulated):
    check(emulated, rows_of("ties", 512), 512, 2)


MUTANTS = {
    "the cluster does not meet": ("_meet", lambda s: None),
    "a digit short": ("DIGITS", (11, 11, 9)),
    "no larger digits": ("_find", lambda s, totals_s, warps_s, need: (lanes.i32(1000), lanes.i32(0))),
    "counters are not cleared": ("_clear", lambda s, counts_s: None),
    "only own counters": ("_add_up", lambda s, cta, scratch: scratch.update(totals_s=scratch["counts_s"])),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_one_is_noticed(emulated, monkeypatch, name):
    monkeypatch.setattr(radix_select, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check(emulated, rows_of("ties" if name == "a digit short" else "normal", 8192), 100, 4)


def test_one_cta_that_skips_a_turn_is_noticed(emulated, monkeypatch):
    """Alone it streams a row in turns: with a stride of two, half of the row is never read."""
    check(emulated, rows_of("normal", 40000), 100, 1)
    monkeypatch.setattr(radix_select, "_collect", wrong_stride(radix_select._collect))
    with pytest.raises(AssertionError):
        check(emulated, rows_of("normal", 40000), 100, 1)


def wrong_stride(stage):
    """The stage, on a shape whose turns are twice as far apart as they are long."""

    class Twice(radix_select.Shape):
        turn = property(lambda s: 2 * radix_select.Shape.turn.fget(s))

    return lambda s, *arguments: stage(Twice(**dataclasses.asdict(s)), *arguments)


@pytest.mark.parametrize("ctas", [0, 17])
def test_ctas_that_no_cluster_has_are_refused(ctas):
    with pytest.raises(ValueError, match=f"1 to 16 .* got {ctas}"):
        radix_select.radix_top_k(jax.ShapeDtypeStruct((1, 8192), jnp.float32), 32, ctas)


@pytest.mark.parametrize(
    ("scores", "k", "wrong"),
    [
        (jax.ShapeDtypeStruct((8,), jnp.float32), 1, "float32"),
        (jax.ShapeDtypeStruct((2, 8), jnp.bfloat16), 1, r"bfloat16\[2, 8\]"),
        (jax.ShapeDtypeStruct((2, 10), jnp.float32), 1, "multiple of 4"),
        (jax.ShapeDtypeStruct((2, 8), jnp.float32), 0, "1 to 8 .* got 0"),
        (jax.ShapeDtypeStruct((2, 8), jnp.float32), 9, "got 9"),
        (jax.ShapeDtypeStruct((2, 8192), jnp.float32), 4097, "at most 4096"),
    ],
)
def test_wrong_input_is_refused(scores, k, wrong):
    with pytest.raises(ValueError, match=wrong):
        radix_select.radix_top_k(scores, k)


def test_compiles_without_spilling(cuda, tmp_path):
    """One row over 16 CTAs, rows over 3 (which divides no power of two), a row a CTA because there are many, or because
    it is asked for."""
    places = (("one", 1, 2**20, 2048, None), ("some", 37, 2**17, 512, None), ("many", 100, 8192, 32, None), ("alone", 1, 2**20, 2048, 1))
    cases = {
        name: (radix_select.radix_top_k, {"scores": ((batch, n), "float32")}, {"k": k, "ctas": ctas}) for name, batch, n, k, ctas in places
    }
    for name, kernels in cuda.compile("H200", cases, tmp_path).items():
        assert len(kernels) == 1, name
        assert kernels[0]["spill_stores"] == kernels[0]["spill_loads"] == 0, (name, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [None, 1])
@pytest.mark.parametrize(("batch", "n", "k"), [(1, 131072, 2048), (8, 65536, 512), (100, 8192, 32), (3, 1048576, 4096)])
def test_on_hopper(hopper, batch, n, k, ctas):
    scores = np.random.default_rng(n).standard_normal((batch, n)).astype(np.float32)
    values, indices = map(np.asarray, radix_select.radix_top_k(jnp.asarray(scores), k, ctas))
    for row, value, index in zip(scores, values, indices, strict=True):
        assert len(set(index.tolist())) == k
        np.testing.assert_array_equal(row[index], value)
        np.testing.assert_array_equal(np.sort(value), np.sort(row)[len(row) - k :])
