"""The suite of gated_delta: every implementation against numpy in float64 and transformers, mutants against the
suite."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import in_turn

from pallas_kernels.recurrent import gated_delta as room
from pallas_kernels.recurrent.gated_delta import Call, delta_fold, delta_page, delta_step, xla

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
FORMS = {"page": delta_page, "step": delta_step, "fold": delta_fold}


def implemented(name):
    """`op(form, *arrays, **keywords)` of an implementation."""
    return lambda form, *arrays, **keywords: FORMS[form](*arrays, **keywords, implementation=name)


XLA, REFERENCE = implemented("xla"), implemented("reference")

STEP = {"form": "step", "counts": (0, 5, 0, 23, 24, 7), "lengths": (0, 0, 1, 3, 5, 5)}
# Keywords of `make`.
CASES = {
    "page": {},
    "step": STEP,
    "one token": STEP | {"lengths": (0, 1, 1, 1, 1, 1)},
    "fold": {"form": "fold"},
    "weak decay after strong": {"decay": "weak after strong"},
    "weak decay after strong, step": STEP | {"decay": "weak after strong"},
    "strong decay": {"decay": "strong"},
    "strong decay, step": STEP | {"decay": "strong"},
    "no decay, all is written": {"decay": "none", "beta": "one"},
    "equal keys": {"decay": "none", "beta": "one", "keys": "equal"},
    "equal keys, step": STEP | {"decay": "none", "beta": "one", "keys": "equal"},
    "nothing is written": {"decay": "none", "beta": "zero"},
    "odd chunk, a head a key": {"rows": 25, "chunk": 5, "heads": (3, 3), "normalize": False},
    "a head a key, step": STEP | {"heads": (3, 3), "normalize": False},
    "a head a key, fold": {"form": "fold", "heads": (3, 3), "normalize": False},
    "bfloat16, square state, four heads a key": {"dims": (8, 8), "heads": (1, 4), "dtype": "bfloat16"},
    "bfloat16, square state, step": STEP | {"dims": (8, 8), "heads": (1, 4), "dtype": "bfloat16"},
}
ERROR = 1e-6
"""Of the size of a row's terms, and of the norm of a state: 8 float32 roundings."""


@pytest.fixture(scope="module")
def check(layer):
    """The checker that implementations and mutants face."""

    def run(op, case: str) -> None:
        given = layer.make(**CASES[case])
        found = op(given.form, *given.arrays, **given.keywords)
        if given.form == "fold":
            assert (found.shape, found.dtype) == (given.state.shape, jnp.float32)
            off = np.linalg.norm(np.asarray(found, np.float64) - given.state, axis=(2, 3))
            assert (off <= ERROR * np.linalg.norm(given.state, axis=(2, 3))).all()
            return
        out, corrections = found
        assert (out.shape, out.dtype) == (given.arrays[2].shape, given.arrays[2].dtype)
        assert (corrections.shape, corrections.dtype) == (out.shape, jnp.float32)
        rounding = {"float32": 0, "bfloat16": 2**-8}[out.dtype.name]
        out, corrections = np.asarray(out, np.float64), np.asarray(corrections, np.float64)
        for row, (count, length) in enumerate(zip(given.counts, given.lengths, strict=True)):
            first = count if given.form == "page" else 0
            new, wanted = slice(first, first + length), slice(count, count + length)
            size, expected = given.size[row, wanted], given.out[row, wanted]
            allowed = ERROR * size[..., 0] + rounding * np.linalg.norm(expected, axis=-1)
            assert (np.linalg.norm(out[row, new] - expected, axis=-1) <= allowed).all()
            off = np.linalg.norm(corrections[row, new] - given.corrections[row, wanted], axis=-1)
            assert (off <= ERROR * size[..., 1]).all()
            others = np.r_[: new.start, new.stop : out.shape[1]]
            assert (out[row, others] == 0).all()
            kept = given.arrays[5][row, others] if given.form == "page" else 0
            np.testing.assert_array_equal(corrections[row, others], np.broadcast_to(kept, corrections[row, others].shape))

    return run


@pytest.mark.parametrize(("case", "name"), in_turn(CASES, ["xla", "reference"]))
def test_is_the_recurrence(check, case, name):
    """In float64, token by token."""
    check({"xla": XLA, "reference": REFERENCE}[name], case)


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for name in ("reference", "xla") for case in ("usual", "strong")] + [("ratio 4, as they are", "reference")],
)
def test_matches_transformers(layer, case, name):
    """Outputs and last states of both of its functions. Its chunked one loses digits where a weak decay follows a
    strong one."""
    of = {key.partition("/")[2]: array for key, array in GOLDEN.items() if key.startswith(f"{case}/")}
    normalize, (tokens, _, key_dim) = "as they are" not in case, of["q"].shape[1:]
    arrays = [jnp.asarray(of[each]) for each in ("q", "k", "v", "g", "beta")]
    none, all_ = np.zeros(1, np.int32), np.full(1, tokens, np.int32)
    options = {"normalize": normalize, "implementation": name}
    out, corrections = delta_page(*arrays, jnp.zeros_like(arrays[2]), of["start"], none, all_, scale=key_dim**-0.5, chunk=35, **options)
    state = np.asarray(delta_fold(arrays[1], arrays[3], corrections, of["start"], all_, **options))[0]
    given = [of[each][0] for each in ("q", "k", "v", "g", "beta", "start")]
    size = layer.recurrence(*given, scale=key_dim**-0.5, normalize=normalize)[-1][..., 0]
    for theirs, factor in (("step", 1), ("chunk", 20)):
        errors = np.linalg.norm(np.asarray(out)[0] - of[f"{theirs}_out"][0], axis=-1)
        assert (errors <= factor * ERROR * size).all()
        wanted = of[f"{theirs}_state"][0]
        assert np.linalg.norm(state - wanted) <= factor * ERROR * np.linalg.norm(wanted)


# Mutants.

NAMES = {
    "page": ("q", "k", "v", "g", "beta", "corrections", "start", "counts", "lengths"),
    "step": ("q", "k", "v", "g", "beta", "page_k", "page_g", "corrections", "start", "counts", "lengths"),
    "fold": ("page_k", "page_g", "corrections", "start", "counts"),
}


def _change(**changes):
    """A mutant that changes arguments: name of an array or keyword -> function of it."""

    def op(form, *arrays, **keywords):
        given = dict(zip(NAMES[form], arrays, strict=True))
        given |= {name: change(given[name]) for name, change in changes.items() if name in given}
        keywords |= {name: change(keywords[name]) for name, change in changes.items() if name in keywords}
        return XLA(form, *given.values(), **keywords)

    return op


def _after(change):
    """A mutant that changes results, of pages and steps (out, corrections) or of folds (state, None)."""

    def op(form, *arrays, **keywords):
        found = XLA(form, *arrays, **keywords)
        return change(found, None)[0] if form == "fold" else change(*found)

    return op


def _inside(name, make):
    """A mutant with another function in the place of `xla.name`; make: the right one -> the wrong one."""

    def op(form, *arrays, **keywords):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, name, make(getattr(xla, name)))
            return jax.jit(functools.partial(xla.gated_delta.__wrapped__, Call(form, **keywords)))(*arrays)

    return op


def _masked(keep):
    """`_decays` in which token i meets token j where keep(i - j)."""

    def make(decays):
        def wrong(g):
            since_start, between = decays(g)
            token = jnp.arange(g.shape[-1])
            return since_start, jnp.where(keep(token[:, None] - token), jnp.where(between == 0, 1.0, between), 0.0)

        return wrong

    return make


def _running_sum(_):
    def wrong(g):
        sums = jnp.cumsum(g, axis=-1)
        between = jnp.exp(jnp.minimum(sums[..., :, None] - sums[..., None, :], 0))
        token = jnp.arange(g.shape[-1])
        return jnp.exp(sums)[..., None], jnp.where(token[:, None] >= token, between, 0.0)

    return wrong


def _running_sum_of_rows(_):
    def wrong(g):
        sums = jnp.cumsum(jnp.swapaxes(g, 1, 2), axis=-1)
        return jnp.exp(sums[..., -1]), jnp.exp(jnp.minimum(sums[..., -1:] - sums, 0))

    return wrong


def _other_order_of_heads(form, *arrays, **keywords):
    """Value head h reads key head h % K."""
    given = dict(zip(NAMES[form], arrays, strict=True))
    key_heads, heads = (given["k"] if form != "fold" else given["page_k"]).shape[2], given["start"].shape[1]
    order = np.arange(heads).reshape(-1, key_heads).T.ravel()
    of_rows = ("v", "g", "beta", "page_g", "corrections")
    given |= {name: given[name][:, :, order] for name in of_rows if name in given} | {"start": given["start"][:, order]}
    found = XLA(form, *given.values(), **keywords)
    back = np.argsort(order)
    return found[:, back] if form == "fold" else tuple(x[:, :, back] for x in found)


MUTANTS = {
    "zeros": _after(lambda out, u: (0 * out, u)),
    "no corrections": _after(lambda out, u: (out, u) if u is None else (out, 0 * u)),
    "no decay": _change(g=jnp.zeros_like),
    "no decay of the page": _change(page_g=jnp.zeros_like),
    "decay of the next token": _change(g=lambda g: jnp.roll(g, -1, axis=1)),
    "decay with the other sign": _change(g=lambda g: -g),
    "half the decay": _change(g=lambda g: g / 2, page_g=lambda g: g / 2),
    "running sum of decays": _inside("_decays", _running_sum),
    "running sum over rows": _inside("_since", _running_sum_of_rows),
    "beta dropped": _change(beta=jnp.ones_like),
    "beta squared": _change(beta=jnp.square),
    "state transposed": _change(start=lambda x: jnp.swapaxes(x, 2, 3) if x.shape[2] == x.shape[3] else x),
    "state lost": _change(start=jnp.zeros_like),
    "page lost": _change(counts=jnp.zeros_like),
    "last row of the page lost": _change(counts=lambda n: jnp.maximum(n - 1, 0)),
    "stale row counts": _change(counts=lambda n: n + 1),
    "corrections of the page lost": _change(corrections=jnp.zeros_like),
    "token does not see itself": _inside("_decays", _masked(lambda ahead: ahead >= 1)),
    "token sees the next": _inside("_decays", _masked(lambda ahead: ahead >= -1)),
    "corrections of the first order": _inside("_inverse", lambda _: lambda system: jnp.eye(system.shape[-1]) - jnp.tril(system, -1)),
    "scaled by sqrt(D)": _change(scale=lambda scale: 1.0),
    "not normalised": _change(normalize=lambda normalize: not normalize),
    "normalised without epsilon": _inside("EPSILON", lambda _: 0.0),
    "another order of heads": _other_order_of_heads,
    "key head of the neighbour": _change(q=lambda q: jnp.roll(q, 1, axis=2)),
    "queries for keys": lambda form, q, k, *rest, **keywords: XLA(form, *((q, k) if form == "fold" else (k, q)), *rest, **keywords),
    "length one short": _change(lengths=lambda n: jnp.maximum(n - 1, 0)),
    "rounded to bfloat16": _change(v=lambda v: v.astype(jnp.bfloat16).astype(v.dtype)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


def test_wrong_steps_and_folds_fail(tools, check):
    """Mutants of the parts that pages do not have: they pass every case of a page, or are caught there by another
    part."""
    for form in ("step", "fold"):
        cases = {name: case for name, case in CASES.items() if case.get("form") == form}
        for name in ("page_g", "corrections", "start", "counts"):
            tools.must_fail(check, _change(**{name: lambda x: x // 2 if x.dtype == jnp.int32 else x / 2}), cases)
    steps = {name: case for name, case in CASES.items() if case.get("form") == "step"}
    for name in ("g", "beta"):
        tools.must_fail(check, _change(**{name: lambda x: x / 2}), steps)
    tools.must_fail(check, _change(lengths=lambda n: jnp.full_like(n, 5)), steps)


# Wrong input.

SHAPES = {"q": (2, 8, 2, 8), "k": (2, 8, 2, 8), "v": (2, 8, 4, 6), "g": (2, 8, 4), "beta": (2, 8, 4)}
SHAPES |= {"corrections": (2, 8, 4, 6), "start": (2, 4, 8, 6), "counts": (2,), "lengths": (2,)}
BAD = {
    "q without heads": ({"q": (2, 8, 16)}, {}, r"takes q, k \[B,T,K,Dk\]"),
    "q unlike k": ({"k": (2, 8, 2, 6)}, {}, r"takes q, k \[B,T,K,Dk\]"),
    "no tokens": (dict.fromkeys(("q", "k"), (2, 0, 2, 8)) | {"v": (2, 0, 4, 6)}, {}, "no axis empty"),
    "heads do not divide": ({"v": (2, 8, 5, 6), "g": (2, 8, 5), "beta": (2, 8, 5)}, {}, "the 5 value heads must be a multiple of the 2"),
    "gates per key head": ({"g": (2, 8, 2)}, {}, r"g and beta must be float32 \[B,T,H\]"),
    "state of other heads": ({"start": (2, 2, 8, 6)}, {}, r"start must be float32\[2, 4, 8, 6\], got float32\[2, 2, 8, 6\]"),
    "corrections of other rows": ({"corrections": (2, 9, 4, 6)}, {}, r"corrections must be float32\[2, 8, 4, 6\]"),
    "counts of other rows": ({"counts": (3,)}, {}, r"counts must be int32\[2\], got int32\[3\]"),
    "no scale": ({}, {"scale": 0.0}, "scale must be a finite float other than 0, got 0.0"),
    "normalize": ({}, {"normalize": 1}, "normalize must be a bool, got 1"),
    "a chunk that does not divide": ({}, {"chunk": 3}, "chunk 3 must divide the rows of the page, 8"),
    "no chunk": ({}, {"chunk": 0}, "chunk must be at least 1 token, got 0"),
    "lengths of other rows": ({"lengths": (3,)}, {}, r"lengths must be int32 \[B\]"),
    "lengths float": ({}, {"lengths": np.ones(2)}, r"lengths must be int32 \[B\]"),
    "an unknown implementation": ({}, {"implementation": "cuda"}, "implementation 'cuda' of gated_delta is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, options, message = BAD[case]
    dtypes = {"counts": np.int32, "lengths": np.int32}
    given = {name: np.zeros(shape, dtypes.get(name, np.float32)) for name, shape in (SHAPES | shapes).items()}
    with pytest.raises(ValueError, match=message):
        delta_page(**given | {"scale": 0.5, "chunk": 4} | options)


def test_steps_and_folds_refuse_wrong_input():
    given = {name: np.zeros(shape, np.int32 if name in ("counts", "lengths") else np.float32) for name, shape in SHAPES.items()}
    page = {"page_k": given["k"], "page_g": given["g"]}
    with pytest.raises(ValueError, match=r"keys of the page must be like k; got page_k bfloat16"):
        delta_step(**given | page | {"page_k": jnp.zeros((2, 8, 2, 8), jnp.bfloat16)}, scale=0.5)
    with pytest.raises(ValueError, match=r"page's g must be float32\[2, 8, 4\], got float32\[2, 8, 2\]"):
        delta_step(**given | page | {"page_g": np.zeros((2, 8, 2), np.float32)}, scale=0.5)
    with pytest.raises(ValueError, match=r"corrections must be float32\[2, 8, 4, 6\], got bfloat16"):
        delta_fold(given["k"], given["g"], jnp.zeros((2, 8, 4, 6), jnp.bfloat16), given["start"], given["counts"])
    with pytest.raises(ValueError, match="form must be one of page, step, fold, got 'parallel'"):
        room.Call("parallel")


def test_another_dtype_of_gates_is_refused():
    given = {name: np.zeros(shape, np.int32 if name in ("counts", "lengths") else np.float32) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match=r"g and beta must be float32 \[B,T,H\]; got .* g bfloat16"):
        delta_page(**given | {"g": jnp.zeros((2, 8, 4), jnp.bfloat16)}, scale=0.5, chunk=4)
