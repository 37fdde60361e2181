"""The suite of gated_delta: xla against the reference, that against numpy in float64 and transformers, mutants against the suite."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import Call, empty_state, gated_delta, xla

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
XLA = functools.partial(gated_delta, implementation="xla")

DECODE = {"form": "recurrent", "lengths": (0, 0, 1, 3, 5), "counts": (0, 5, 0, 0, 0)}
# Keywords of `make`.
CASES = {
    "chunked": {},
    "folded": {"fold": (0, 1, 3, 4, 7)},
    "recurrent": DECODE,
    "weak decay after strong": {"decay": "weak after strong"},
    "strong decay": {"decay": "strong"},
    "strong decay, recurrent": DECODE | {"decay": "strong"},
    "no decay, all is written": {"decay": "none", "beta": "one"},
    "equal keys": {"decay": "none", "beta": "one", "keys": "equal"},
    "nothing is written": {"decay": "none", "beta": "zero"},
    "odd chunk, a head a key": {"chunk": 5, "counts": (0, 4, 0, 1, 0, 4, 0, 3, 2), "heads": (3, 3), "normalize": False},
    "bfloat16, square state, four heads a key": {"dims": (8, 8), "heads": (1, 4), "dtype": "bfloat16"},
    "bfloat16, recurrent": DECODE | {"dtype": "bfloat16"},
}
ERROR = 1e-6
"""Of the size of a row's terms, and of the norm of a state: 8 float32 roundings."""


@pytest.fixture(scope="module")
def check(layer, tools):
    """The checker that both implementations and mutants face."""

    @functools.cache
    def expected(case: str):
        given = layer.make(**CASES[case])
        sizes = np.zeros(given.arrays[2].shape[:3])
        for row, (count, _, _, size) in enumerate(layer.whole_rows(given)):
            sizes[row, : len(size) - count] = size[count:]
        return gated_delta(*given.arrays, **given.keywords, implementation="reference"), sizes

    def run(op, case: str) -> None:
        given = layer.make(**CASES[case])
        (out, state), ((wanted, wanted_state), sizes) = op(*given.arrays, **given.keywords), expected(case)
        assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [(x.shape, x.dtype) for x in jax.tree.leaves(wanted_state)]
        rounding = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[out.dtype.name]
        out, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
        allowed = ERROR * sizes + rounding * np.linalg.norm(wanted, axis=-1)
        assert (np.linalg.norm(out - wanted, axis=-1) <= allowed).all()
        border, wanted_border = (np.asarray(x.border, np.float64) for x in (state, wanted_state))
        assert (np.linalg.norm(border - wanted_border, axis=(2, 3)) <= ERROR * np.linalg.norm(wanted_border, axis=(2, 3)) + 1e-8).all()
        for name in ("k", "v", "g", "beta", "count"):
            tools.assert_same_bits(getattr(state, name), getattr(wanted_state, name))

    return run


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(check, case):
    check(XLA, case)


# The reference.


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_recurrence(layer, case):
    """In float64, token by token: outputs, the state at the last border or after the last token, and the tail."""
    given = layer.make(**CASES[case])
    *new, before, lengths = jax.tree.map(np.asarray, given.arrays)
    out, state = jax.tree.map(np.asarray, gated_delta(*given.arrays, **given.keywords, implementation="reference"))
    out = out.astype(np.float64)
    rounding = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[new[2].dtype.name]
    fold, recurrent = np.asarray(given.keywords.get("fold", [False] * len(lengths))), given.keywords["form"] == "recurrent"
    for row, (count, wanted, states, size) in enumerate(layer.whole_rows(given)):
        length, total = int(lengths[row]), count + int(lengths[row])
        allowed = ERROR * size[count:] + rounding * np.linalg.norm(wanted[count:], axis=-1)
        assert (np.linalg.norm(out[row, :length] - wanted[count:], axis=-1) <= allowed).all()
        assert (out[row, length:] == 0).all()
        last = total if fold[row] or (recurrent and length) else total - total % before.chunk
        assert np.linalg.norm(state.border[row].astype(np.float64) - states[last]) <= ERROR * np.linalg.norm(states[last]) + 1e-8
        left = total - last
        assert int(state.count[row]) == left
        for name, fresh in zip(("k", "v", "g", "beta"), new[1:], strict=True):
            found, old = getattr(state, name)[row], getattr(before, name)[row, :count]
            np.testing.assert_array_equal(found[:left], np.concatenate([old, fresh[row, :length]])[last:])
            assert (found[left:] == 0).all()


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for name in ("reference", "xla") for case in ("usual", "strong")] + [("ratio 4, as they are", "reference")],
)
def test_matches_transformers(layer, case, name):
    """Outputs and last states of both of its functions. Its chunked one loses digits where a weak decay follows a strong one."""
    of = {key.partition("/")[2]: array for key, array in GOLDEN.items() if key.startswith(f"{case}/")}
    q, v, normalize = of["q"], of["v"], "as they are" not in case
    batch, tokens, key_heads, key_dim = q.shape
    sizes = {"key_heads": key_heads, "value_heads": v.shape[2], "key_dim": key_dim, "value_dim": v.shape[3]}
    state = dataclasses.replace(empty_state(batch, **sizes, dtype="float32"), border=jnp.asarray(of["start"]))
    arrays = [jnp.asarray(of[each]) for each in ("q", "k", "v", "g", "beta")]
    options = {"form": "chunked", "scale": key_dim**-0.5, "normalize": normalize, "fold": np.ones(batch, bool), "implementation": name}
    out, state = jax.tree.map(np.asarray, gated_delta(*arrays, state, np.full(batch, tokens, np.int32), **options))
    given = [of[each] for each in ("q", "k", "v", "g", "beta", "start")]
    for row in range(batch):
        *_, size = layer.recurrence(*(x[row] for x in given), scale=key_dim**-0.5, normalize=normalize)
        for theirs, factor in (("step", 1), ("chunk", 20)):
            errors = np.linalg.norm(out[row] - of[f"{theirs}_out"][row], axis=-1)
            assert (errors <= factor * ERROR * size).all()
            wanted = of[f"{theirs}_state"][row]
            assert np.linalg.norm(state.border[row] - wanted) <= factor * ERROR * np.linalg.norm(wanted)


# Mutants.


def _change(**changes):
    """A mutant that changes arguments: name of an array, state field or keyword -> function of it."""
    names = ("q", "k", "v", "g", "beta", "state", "lengths")

    def op(*arrays, **keywords):
        given = dict(zip(names, arrays, strict=True)) | keywords
        for name, change in changes.items():
            if name in given:
                given[name] = change(given[name])
            elif hasattr(given["state"], name):
                given["state"] = dataclasses.replace(given["state"], **{name: change(getattr(given["state"], name))})
        return XLA(**given)

    return op


def _after(change):
    """A mutant that changes results."""
    return lambda *arrays, **keywords: change(*XLA(*arrays, **keywords))


def _inside(name, make):
    """A mutant with another function in the place of `xla.name`; make: the right one -> the wrong one."""

    def op(*arrays, fold=None, **keywords):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, name, make(getattr(xla, name)))
            run = functools.partial(xla.gated_delta.__wrapped__, call=Call(**keywords))
            return jax.jit(run)(*arrays, jnp.zeros(arrays[-1].shape, bool) if fold is None else fold)

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


def _other_order_of_heads(q, k, v, g, beta, state, lengths, **keywords):
    """Value head h reads key head h % K."""
    key_heads, heads = q.shape[2], v.shape[2]
    order = np.arange(heads).reshape(-1, key_heads).T.ravel()
    back = np.argsort(order)
    fields = {name: getattr(state, name)[:, :, order] for name in ("v", "g", "beta")}
    state = dataclasses.replace(state, border=state.border[:, order], **fields)
    out, state = XLA(q, k, *(x[:, :, order] for x in (v, g, beta)), state, lengths, **keywords)
    fields = {name: getattr(state, name)[:, :, back] for name in ("v", "g", "beta")}
    return out[:, :, back], dataclasses.replace(state, border=state.border[:, back], **fields)


def _stale_tail(out, state):
    return out, dataclasses.replace(state, k=jnp.where(state.k == 0, 1, state.k))


MUTANTS = {
    "zeros": _after(lambda out, state: (0 * out, state)),
    "no decay": _change(g=jnp.zeros_like),
    "decay of the next token": _change(g=lambda g: jnp.roll(g, -1, axis=1)),
    "half the decay": _change(g=lambda g: g / 2),
    "running sum of decays": _inside("_decays", _running_sum),
    "beta dropped": _change(beta=jnp.ones_like),
    "beta squared": _change(beta=jnp.square),
    "state transposed": _change(border=lambda x: jnp.swapaxes(x, 2, 3) if x.shape[2] == x.shape[3] else x),
    "next state transposed": _after(
        lambda out, s: (out, dataclasses.replace(s, border=jnp.swapaxes(s.border, 2, 3).reshape(s.border.shape)))
    ),
    "border lost": _change(border=jnp.zeros_like),
    "next border is the old one": lambda *arrays, **keywords: (
        (found := XLA(*arrays, **keywords))[0],
        dataclasses.replace(found[1], border=arrays[5].border),
    ),
    "tail dropped": _change(count=jnp.zeros_like),
    "last token of the tail dropped": _change(count=lambda n: jnp.maximum(n - 1, 0)),
    "stale tail": _after(_stale_tail),
    "folds always": _change(fold=jnp.ones_like),
    "folds never": _change(fold=jnp.zeros_like),
    "token does not see itself": _inside("_decays", _masked(lambda ahead: ahead >= 1)),
    "token sees the next": _inside("_decays", _masked(lambda ahead: ahead >= -1)),
    "corrections of the first order": _inside("_inverse", lambda _: lambda system: jnp.eye(system.shape[-1]) - jnp.tril(system, -1)),
    "scaled by sqrt(D)": _after(lambda out, state: (out * state.border.shape[2] ** 0.5, state)),
    "not normalised": _change(normalize=lambda normalize: not normalize),
    "normalised without epsilon": _inside("EPSILON", lambda _: 0.0),
    "another order of heads": _other_order_of_heads,
    "key head of the neighbour": _change(q=lambda q: jnp.roll(q, 1, axis=2)),
    "queries for keys": lambda q, k, *rest, **keywords: XLA(k, q, *rest, **keywords),
    "length one short": _change(lengths=lambda n: jnp.maximum(n - 1, 0)),
    "padding counts": lambda *arrays, **keywords: XLA(
        *map(jnp.nan_to_num, arrays[:5]), arrays[5], jnp.full_like(arrays[6], arrays[2].shape[1]), **keywords
    ),
    "rounded to bfloat16": _change(v=lambda v: v.astype(jnp.bfloat16).astype(v.dtype)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(tools, check, mutant):
    tools.must_fail(check, MUTANTS[mutant], CASES)


def test_recurrent_wrong_inside_fails(tools, check):
    """Mutants of the parts that only the recurrent form has: they pass every chunked case."""
    cases = {name: case for name, case in CASES.items() if case.get("form") == "recurrent"}
    for change in ("g", "beta"):
        tools.must_fail(check, _change(**{change: lambda x: x / 2}), cases)
    tools.must_fail(check, _change(lengths=lambda n: jnp.full_like(n, 5)), cases)
    tools.must_fail(check, _change(border=jnp.zeros_like), cases)


# Wrong input.

SHAPES = {
    "q": (2, 3, 2, 8),
    "k": (2, 3, 2, 8),
    "v": (2, 3, 4, 6),
    "g": (2, 3, 4),
    "beta": (2, 3, 4),
}
BAD = {
    "q without heads": ({"q": (2, 3, 16)}, {}, r"takes q, k \[B,T,K,Dk\]"),
    "q unlike k": ({"k": (2, 3, 2, 6)}, {}, r"takes q, k \[B,T,K,Dk\]"),
    "no tokens": (dict.fromkeys(("q", "k"), (2, 0, 2, 8)) | {"v": (2, 0, 4, 6)}, {}, "no axis empty"),
    "heads do not divide": ({"v": (2, 3, 5, 6), "g": (2, 3, 5), "beta": (2, 3, 5)}, {}, "the 5 value heads must be a multiple of the 2"),
    "gates per key head": ({"g": (2, 3, 2)}, {}, r"g and beta must be float32 \[B,T,H\]"),
    "state of other heads": (
        {"v": (2, 3, 2, 6), "g": (2, 3, 2), "beta": (2, 3, 2)},
        {},
        r"state.border must be float32\[2, 2, 8, 6\], got",
    ),
    "an unknown form": ({}, {"form": "parallel"}, "form must be one of chunked, recurrent, got 'parallel'"),
    "no scale": ({}, {"scale": 0.0}, "scale must be a finite float other than 0, got 0.0"),
    "normalize": ({}, {"normalize": 1}, "normalize must be a bool, got 1"),
    "fold of a recurrent step": ({}, {"form": "recurrent", "fold": np.ones(2, bool)}, "only form 'chunked' takes it"),
    "fold of other rows": ({}, {"fold": np.ones(3, bool)}, r"fold must be bool \[B\]"),
    "lengths of other rows": ({}, {"lengths": np.ones(3, np.int32)}, r"lengths must be int32 \[B\]"),
    "lengths float": ({}, {"lengths": np.ones(2)}, r"lengths must be int32 \[B\]"),
    "float32 tail of bfloat16 tokens": ({}, {"dtype": "bfloat16"}, r"state.k must be bfloat16\[2, 7, 2, 8\], got float32"),
    "an unknown implementation": ({}, {"implementation": "cuda"}, "implementation 'cuda' of gated_delta is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    shapes, options, message = BAD[case]
    dtype, options = options.get("dtype", "float32"), {name: value for name, value in options.items() if name != "dtype"}
    dtypes = {"g": "float32", "beta": "float32"}
    arrays = {name: np.zeros(shape, jnp.dtype(dtypes.get(name, dtype))) for name, shape in (SHAPES | shapes).items()}
    state = empty_state(2, key_heads=2, value_heads=4, key_dim=8, value_dim=6, dtype="float32", chunk=8)
    given = arrays | {"state": state, "lengths": np.ones(2, np.int32), "form": "chunked", "scale": 0.5} | options
    with pytest.raises(ValueError, match=message):
        gated_delta(**given)


def test_another_dtype_of_gates_is_refused():
    arrays = {name: np.zeros(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
    state = empty_state(2, key_heads=2, value_heads=4, key_dim=8, value_dim=6, dtype="bfloat16", chunk=8)
    with pytest.raises(ValueError, match=r"g and beta must be float32 \[B,T,H\]; got .* g bfloat16"):
        gated_delta(**arrays, state=state, lengths=np.ones(2, np.int32), form="chunked", scale=0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "sizes must be positive ints"),
        ({"key_heads": 3}, "value_heads must be a multiple of key_heads, got 4 and 3"),
        ({"chunk": 1}, "chunk must be at least 2 tokens, got 1"),
        ({"dtype": "int8"}, "dtype must be floating point, got int8"),
    ],
)
def test_a_wrong_state_is_refused(changed, message):
    sizes = {"batch": 2, "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6, "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        empty_state(**sizes | changed)
