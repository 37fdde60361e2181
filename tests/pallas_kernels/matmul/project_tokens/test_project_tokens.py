"""The suite of project_tokens: every implementation against the reference, the reference against flax, promises,
mutants, refusals."""

from __future__ import annotations

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import paging
import projection_suite
import pytest
from far_pools import needs_memory
from projection_suite import EPS, Case, compare, of_token
from quick_cases import one_in, rest_long

from pallas_kernels.core import dispatch
from pallas_kernels.core.rope_norm import rotate
from pallas_kernels.matmul.project_tokens import project_tokens

IMPLEMENTATIONS = ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
"""Of a row's norm. The shorter types round the normalised token, each product and each sum."""


QKV = {"norm": True, "biased": True}
CASES = {
    "a product": Case(),
    "a residual": Case(residual=True, tokens=3),
    "a norm": Case(norm=True, tokens=8),
    "a gate": Case(gated="silu", norm=True, features=(200, 200), tokens=2),
    "a gate of GELU": Case(gated="gelu_tanh", features=(200, 200), tokens=2),
    "a gate of GELU in float32": Case(gated="gelu_tanh", norm=True, norm_offset=1.0, features=(40, 40), dtype="float32", tokens=3),
    "a norm of one more": Case(norm=True, norm_offset=1.0, features=(200, 66), tokens=3),
    "a norm of a half more": Case(norm=True, norm_offset=0.5, features=(40,), tokens=3),
    "a gate, a bias and a residual": Case(gated="silu", biased=True, residual=True, features=(34, 34), tokens=5),
    "float32 out of bfloat16": Case(out_dtype="float32", features=(700,), tokens=2),
    "three results": Case(features=(96, 32, 32), norm=True, tokens=4),
    "three results, of which two turn": Case(features=(224, 32, 32), **QKV, half=16, rotated=2, tokens=3),
    "heads of 128": Case(features=(896, 128, 128), **QKV, half=64, rotated=2, width=448),
    "all results turn": Case(features=(64, 64), half=8, rotated=2, tokens=8),
    "one of two results turns": Case(features=(64, 128), half=32, rotated=1, tokens=2, dtype="float16"),
    "float16": Case(features=(90, 6), biased=True, dtype="float16", tokens=6),
    "float16 to float32": Case(dtype="float16", out_dtype="float32"),
    "a norm in float16": Case(dtype="float16", **QKV, offset=300.0, tokens=2),
    "few inputs": Case(width=64, features=(10,), norm=True, tokens=7),
    "more inputs than a turn": Case(width=1088, features=(24,), norm=True, tokens=2),
    "turned in several tiles": Case(features=(8192, 1024, 1024), **QKV, half=64, rotated=2, width=64, tokens=2),
    "turned, and added to": Case(features=(32,), width=64, half=8, rotated=1, residual=True, tokens=2),
    "several tiles": Case(width=576, features=(132 * 100 + 34,), residual=True, norm=True),
    "several tiles of a gate": Case(width=128, features=(132 * 70 - 2,) * 2, gated="silu", norm=True, tokens=8),
    "far from zero": Case(norm=True, offset=50.0, tokens=2),
    "float32": Case(features=(96, 32, 32), **QKV, half=16, rotated=2, tokens=2, dtype="float32"),
    "a gate in float32": Case(gated="silu", norm=True, features=(40, 40), residual=True, dtype="float32", tokens=3),
    "odd sizes": Case(width=33, features=(7, 9), norm=True, dtype="float32", tokens=11),
    "many tokens": Case(tokens=40, **QKV),
    "9 tokens": Case(tokens=9, width=1088, features=(46,)),
    "32 tokens": Case(tokens=32, width=128, features=(132 * 34, 132 * 34), gated="silu", norm=True),
    "33 tokens, in blocks": Case(tokens=33, width=576, features=(132 * 20 + 34,), residual=True, norm=True, norm_offset=1.0),
    "64 tokens of a gate": Case(tokens=64, width=640, features=(132 * 20 - 2,) * 2, gated="silu", norm=True),
    "48 tokens that turn": Case(tokens=48, width=448, features=(896, 128, 128), **QKV, half=64, rotated=2),
    "40 tokens of wide inputs": Case(tokens=40, width=8192, features=(300,), out_dtype="float32"),
}


MANY = ["9 tokens", "32 tokens", "33 tokens, in blocks", "64 tokens of a gate", "48 tokens that turn", "40 tokens of wide inputs"]
"""More tokens than those that one matrix instruction takes."""


@functools.cache
def arguments(name: str) -> tuple:
    """(positional arguments, keywords) of the op. Rows of weights differ in size, so that a wrong row shows."""
    case = CASES[name]

    def matrix(rng, features):
        numbers = jnp.asarray(rng.standard_normal((features, case.width)), case.dtype)
        return numbers * jnp.asarray(rng.uniform(0.5, 2, (features, 1)) * case.width**-0.5, case.dtype)

    return projection_suite.arguments(case, name, matrix)


@functools.cache
def expected(name: str) -> tuple:
    positional, keywords = arguments(name)
    return project_tokens(*positional, **keywords, implementation="reference")


def check(op, name: str) -> None:
    """Every row of every result within the tolerance of its norm."""
    positional, keywords = arguments(name)
    compare(op(*positional, **keywords), expected(name), TOLERANCE[CASES[name].dtype])


def implementation(name: str, case: str):
    """The op, or a skip where the implementation does not run, or says that it does not do the case."""
    if name not in dispatch.available("project_tokens"):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    positional, keywords = arguments(case)
    reason = paging.unsupported("project_tokens", name, *positional, **keywords)
    if reason:
        pytest.skip(reason)
    return functools.partial(project_tokens, implementation=name)


@pytest.mark.parametrize("case", one_in(2, CASES))
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name, case):
    check(implementation(name, case), case)


@pytest.mark.parametrize("case", ["a product", "heads of 128", "a norm", "a gate of GELU in float32"])
def test_the_form_of_accelerators_matches_reference(monkeypatch, case):
    """Run on the CPU, where another form is faster."""
    expected(case)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    check(functools.partial(project_tokens, implementation="xla"), case)
    jax.clear_caches()


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_forms_of_a_cpu_match_reference(tokens, dtype):
    """One row, which is multiplied in a form of its own, and two rows."""
    x, weight = (jax.random.normal(jax.random.key(n), shape, dtype) for n, shape in enumerate(((tokens, 256), (96, 256))))
    ours, theirs = (project_tokens(x, (weight,), implementation=name)[0].astype(jnp.float32) for name in ("xla", "reference"))
    assert (jnp.linalg.norm(ours - theirs, axis=1) <= TOLERANCE[dtype] * jnp.linalg.norm(theirs, axis=1)).all()


@pytest.mark.parametrize(
    "case",
    rest_long(
        CASES,
        "heads of 128",
        "turned in several tiles",
        "one of two results turns",
        "a gate of GELU in float32",
        "a gate, a bias and a residual",
        "a norm",
        "several tiles of a gate",
        "float16",
        "odd sizes",
        "a norm of one more",
        "three results",
    ),
)
def test_reference_against_flax(case):
    """RMSNorm and the products with flax, the rotation with the function that the models are held to transformers
    by."""
    (x, weights), options = jax.tree.map(lambda y: y.astype(jnp.float32) if hasattr(y, "astype") else y, arguments(case))
    if options["norm"] is not None:
        x = flax.linen.RMSNorm(epsilon=EPS).apply({"params": {"scale": options["norm"] + options["norm_offset"]}}, x)
    dense = [flax.linen.Dense(w.shape[0], precision="highest", use_bias=options["biases"] is not None) for w in weights]
    biases = options["biases"] or (jnp.zeros(()),) * len(weights)
    results = [d.apply({"params": {"kernel": w.T, "bias": b}}, x) for d, w, b in zip(dense, weights, biases, strict=True)]
    if options["rotation"]:
        cos, sin = (y[:, None] for y in options["rotation"])
        for n in range(options["rotated"]):
            results[n] = rotate(results[n].reshape(x.shape[0], -1, 2 * cos.shape[2]), cos, sin).reshape(results[n].shape)
    if options["gated"]:
        activation = flax.linen.silu if options["gated"] == "silu" else flax.linen.gelu
        results = [activation(results[0]) * results[1]]
    if options["residual"] is not None:
        results[0] = results[0] + options["residual"]
    exact = project_tokens(*arguments(case)[0], **arguments(case)[1] | {"out_dtype": jnp.float32}, implementation="reference")
    for ours, theirs in zip(exact, results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["a norm", "several tiles of a gate", "three results, of which two turn", "a residual"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_twice_and_in_any_company(tools, name, case):
    """A token's result does not depend on what else is in the call."""
    op = implementation(name, case)
    (x, weights), options = arguments(case)
    once, again = op(x, weights, **options), op(x, weights, **options)
    company = op(jnp.concatenate([-x[:1] * 3, x[1:]]), weights, **options)
    for a, b, c in zip(once, again, company, strict=True):
        tools.assert_same_bits(a, b)
        tools.assert_same_bits(a[1:], c[1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ["a norm", "several tiles of a gate", "three results, of which two turn", *MANY])
def test_bits_alone(tools, case):
    """The kernel gives a token the same bits alone as among others."""
    op = functools.partial(project_tokens, implementation="mosaic_gpu")
    (x, weights), options = arguments(case)
    together = op(x, weights, **options)
    for token in range(x.shape[0]):
        positional, keywords = of_token((x, weights), options, token)
        alone = op(*positional, **keywords)
        for a, b in zip(together, alone, strict=True):
            tools.assert_same_bits(a[token : token + 1], b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_matrix_past_2_to_the_31():
    """Rows at both ends and around 2^31 elements are read where they are."""
    width, features = 4096, 2**19 + 264
    needs_memory(2 * width * features * 2)  # twice, while it is filled
    picked = jnp.asarray([0, 1, 2**19 - 1, 2**19, features - 1])
    rows = jax.random.normal(jax.random.key(0), (len(picked), width), jnp.bfloat16)
    weight = jnp.zeros((features, width), jnp.bfloat16).at[picked].set(rows)
    x = jax.random.normal(jax.random.key(1), (2, width), jnp.bfloat16)
    (out,) = project_tokens(x, (weight,), out_dtype=jnp.float32, implementation="mosaic_gpu")
    (ref,) = project_tokens(x, (rows,), out_dtype=jnp.float32, implementation="reference")
    np.testing.assert_allclose(out[:, picked], ref, rtol=1e-4, atol=1e-3)
    assert int((out != 0).sum()) == 2 * len(picked)


def test_xla_can_be_differentiated():
    """The gradient of every array is finite and not zero."""
    positional, keywords = arguments("a gate in float32")
    arrays = {name: y for name, y in keywords.items() if hasattr(y, "shape")}
    rest = {name: y for name, y in keywords.items() if name not in arrays}

    def loss(positional, arrays):
        return sum((y**2).sum() for y in project_tokens(*positional, **arrays, **rest, implementation="xla"))

    for leaf in jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(positional, arrays)):
        assert jnp.isfinite(leaf).all()
        assert jnp.abs(leaf).max() > 0


# Mutants: the op with other arguments, or other results.


XLA = functools.partial(project_tokens, implementation="xla")


def _with(**changes):
    """The op on changed arguments: name -> function of what was given; not called for None."""

    def mutant(x, weights, **options):
        given = {"x": x, "weights": weights} | options
        given |= {name: change(given[name]) for name, change in changes.items() if given[name] is not None}
        x, weights = given.pop("x"), given.pop("weights")
        return project_tokens(x, weights, **given, implementation="xla")

    return mutant


def _of_weights(change):
    return _with(weights=lambda weights: tuple(map(change, weights)))


def _after(change):
    def mutant(x, weights, **options):
        return tuple(change(y) for y in project_tokens(x, weights, **options, implementation="xla"))

    return mutant


MUTANTS = {
    "zeros": _after(jnp.zeros_like),
    "no norm": _with(norm=lambda norm: None),
    "the norm's weight left out": _with(norm=jnp.ones_like),
    "the norm's eps left out": _with(norm_eps=lambda eps: 0.0),
    "no offset of the norm's weight": _with(norm_offset=lambda offset: 0.0),
    "another offset of the norm's weight": _with(norm_offset=lambda offset: 1.0),
    "silu for GELU": _with(gated=lambda gated: "silu"),
    "GELU for silu": _with(gated=lambda gated: "gelu_tanh"),
    "no biases": _with(biases=lambda biases: None),
    "no residual": _with(residual=lambda residual: None),
    "no gate": _with(gated=lambda gated: None),
    "gate and value exchanged": _with(weights=lambda w: w[::-1] if len(w) == 2 and w[0].shape == w[1].shape else w),
    "matrices in another order": _with(weights=lambda w: (w[0], *w[:0:-1]) if len(w) == 3 else w),
    "no rotation": lambda x, weights, **options: XLA(x, weights, **options | {"rotation": None, "rotated": 0}),
    "turned the other way": _with(rotation=lambda rotation: (rotation[0], -rotation[1])),
    "cosine and sine exchanged": _with(rotation=lambda rotation: rotation[::-1]),
    "another token's angles": _with(rotation=lambda rotation: tuple(jnp.roll(y, 1, axis=0) for y in rotation)),
    "one result more turns": _with(rotated=lambda rotated: rotated + 1 if rotated == 2 else rotated),
    "one result fewer turns": _with(rotated=lambda rotated: max(rotated - 1, 1)),
    "a chunk of inputs left out": _of_weights(lambda w: w.at[:, -16:].set(0)),
    "rows moved by one": _of_weights(lambda w: jnp.roll(w, 1, axis=0)),
    "the last rows left out": _of_weights(lambda w: w.at[-2:].set(0)),
    "inputs moved by one": _with(x=lambda x: jnp.roll(x, 1, axis=1)),
    "tokens exchanged": _after(lambda y: y[::-1]),
    "one token for all": _with(x=lambda x: jnp.broadcast_to(x[:1], x.shape)),
    "results rounded to 5 bits": _after(lambda y: jax.lax.reduce_precision(y.astype(jnp.float32), 8, 4).astype(y.dtype)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant):
    """At least one case rejects it. A case whose arguments the change makes wrong input says nothing."""
    for case in CASES:
        try:
            check(MUTANTS[mutant], case)
        except AssertionError:
            return
        except ValueError:
            continue
    pytest.fail("the suite accepts this mutant")


# What is refused.


def _struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("x", "weights", "options", "message"),
    [
        (_struct(1, 2, 64), (_struct(8, 64),), {}, r"takes x \[R,E\]"),
        (_struct(1, 64), (), {}, "at least one matrix"),
        (_struct(0, 64), (_struct(8, 64),), {}, "no axis empty"),
        (_struct(1, 64), (_struct(64, 8),), {}, r"stored \[features, inputs\], with x's E"),
        (_struct(1, 64), (_struct(8, 64, dtype="float32"),), {}, "x's floating dtype"),
        (_struct(1, 64, dtype="int32"), (_struct(8, 64, dtype="int32"),), {}, "x's floating dtype"),
        (_struct(1, 64), (_struct(8, 64),), {"biases": (_struct(7),)}, r"biases must be one \[F\] per matrix; got \[\[7\]\]"),
        (_struct(1, 64), (_struct(8, 64),), {"norm": _struct(8)}, r"norm must be \[E\]"),
        (_struct(1, 64), (_struct(8, 64),), {"gated": "silu"}, "gated takes two matrices of one shape"),
        (_struct(1, 64), (_struct(8, 64), _struct(6, 64)), {"gated": "silu"}, "gated takes two matrices of one shape"),
        (_struct(1, 64), (_struct(8, 64), _struct(8, 64)), {"residual": _struct(1, 8)}, "2 results"),
        (_struct(1, 64), (_struct(8, 64),), {"residual": _struct(1, 6)}, "shape of the only result"),
        (_struct(1, 64), (_struct(8, 64),), {"out_dtype": jnp.float16}, "out_dtype must be x's bfloat16 or float32, got float16"),
        (_struct(1, 64), (_struct(8, 64),), {"rotation": (_struct(1, 4),) * 2, "rotated": 1}, "cosine and sine, float32"),
        (_struct(1, 64), (_struct(8, 64),), {"rotation": (_struct(1, 3, dtype="float32"),) * 2, "rotated": 1}, "heads of 6; got"),
        (_struct(1, 64), (_struct(8, 64),), {"rotation": (_struct(1, 4, dtype="float32"),) * 2, "rotated": 2}, "it needs 1 to 1"),
        (_struct(1, 64), (_struct(8, 64),), {"rotation": (_struct(1, 0, dtype="float32"),) * 2, "rotated": 1}, "cosine and sine, float32"),
        (_struct(1, 64), (_struct(8, 64),), {"rotated": 1}, "1 results are to be rotated, and there is no rotation"),
    ],
)
def test_wrong_input_is_refused(x, weights, options, message):
    static = {name: options[name] for name in ("gated", "out_dtype", "rotated") if name in options}
    arrays = {name: option for name, option in options.items() if name not in static}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(project_tokens, **static), x, weights, **arrays)


@pytest.mark.parametrize("name", ["mosaic_gpu", "xla", "reference"])
def test_a_config_is_refused(name):
    positional, keywords = arguments("a product")
    function = paging.implementation("project_tokens", name)
    with pytest.raises(ValueError, match=f"implementation '{name}' of project_tokens takes no config, got 7"):
        function(*positional, **keywords, config=7)


# The GPU form, without a GPU.


def production(tokens: int, width: int, features: tuple[int, ...], dtype: str = "bfloat16", **options) -> tuple:
    """(op, arrays, keywords) of a call."""
    arrays = {"x": ((tokens, width), dtype), "weights": [((f, width), dtype) for f in features]}
    if options.pop("biased", False):
        arrays["biases"] = [((f,), dtype) for f in features]
    if options.pop("normed", False):
        arrays["norm"] = ((width,), dtype)
    if half := options.pop("half", 0):
        arrays["rotation"] = [((tokens, half), "float32")] * 2
    if options.pop("summed", False):
        arrays["residual"] = ((tokens, features[0]), dtype)
    keywords = {"norm_eps": 1e-6, "norm_offset": 0.0, "rotated": 0, "gated": None, "out_dtype": jnp.dtype(dtype), "config": None} | options
    missing = {name: None for name in ("biases", "norm", "rotation", "residual") if name not in arrays}
    return "project_tokens", arrays, keywords | missing


QKV_7B = {"normed": True, "half": 64, "rotated": 2}
PRODUCTION = {
    "qwen2.5-7b q, k, v": production(1, 3584, (3584, 512, 512), **QKV_7B, biased=True),
    "qwen2.5-7b q, k, v, 8 tokens": production(8, 3584, (3584, 512, 512), **QKV_7B, biased=True),
    "qwen2.5-7b o": production(1, 3584, (3584,), summed=True),
    "qwen2.5-7b gate and up": production(1, 3584, (18944, 18944), normed=True, gated="silu"),
    "qwen2.5-7b gate and up, 8 tokens": production(8, 3584, (18944, 18944), normed=True, gated="silu"),
    "qwen2.5-7b down": production(1, 18944, (3584,), summed=True),
    "qwen2.5-7b logits": production(1, 3584, (152064,), out_dtype=jnp.dtype("float32")),
    "llama-3.1-8b q, k, v, 4 tokens": production(4, 4096, (4096, 1024, 1024), **QKV_7B),
    "gemma-3-4b gate and up": production(1, 2560, (10240, 10240), normed=True, norm_offset=1.0, gated="gelu_tanh"),
    "gemma-3-1b queries, keys and values, 4 tokens": production(4, 1152, (1024, 256, 256), normed=True, norm_offset=1.0),
    "llama-3.1-8b gate and up, float16": production(2, 4096, (14336, 14336), "float16", gated="silu"),
    "llama-3.1-8b o with a bias": production(1, 4096, (4096,), summed=True, biased=True),
    "llama-3.1-8b gate and up with biases": production(1, 4096, (14336, 14336), normed=True, gated="silu", biased=True),
    "llama-3.1-8b down with a bias, 8 tokens": production(8, 14336, (4096,), summed=True, biased=True),
    "qwen2.5-7b q, k, v, 32 tokens": production(32, 3584, (3584, 512, 512), **QKV_7B, biased=True),
    "qwen2.5-7b down, 32 tokens": production(32, 18944, (3584,), summed=True),
    "qwen2.5-7b q, k, v, 64 tokens": production(64, 3584, (3584, 512, 512), **QKV_7B, biased=True),
    "qwen2.5-7b gate and up, 64 tokens": production(64, 3584, (18944, 18944), normed=True, gated="silu"),
    "qwen2.5-7b down, 64 tokens": production(64, 18944, (3584,), summed=True),
    "qwen2.5-7b logits, 40 tokens": production(40, 3584, (152064,), out_dtype=jnp.dtype("float32")),
    "narrow": production(3, 64, (64, 32, 32), normed=True, half=16, rotated=2, biased=True),
}


@pytest.mark.parametrize("case", one_in(4, PRODUCTION))
def test_gpu_form_lowers_to_one_kernel(cuda, case):
    assert cuda.lower(*PRODUCTION[case]).count("custom_call @") == 1


def test_gpu_form_compiles_without_spilling(spill_free):
    spill_free(PRODUCTION, launches=1)


def test_gpu_form_compiles_for_blackwell_without_spilling(spill_free_on_blackwell):
    spill_free_on_blackwell(PRODUCTION, launches=1)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (production(64, 64, (8,)), None),
        (production(65, 64, (8,)), "at most 64 tokens, got 65"),
        (production(1, 64, (8,), "float32"), "bfloat16 or float16, got float32"),
        (production(1, 64, (8,), "float16", normed=True), "more than float16 holds"),
        (production(1, 64, (8,), half=4, rotated=1, summed=True), "cannot both rotate results and add a residual"),
        (production(1, 96, (8,)), "multiple of 64, got 96"),
        (production(1, 64, (8,), normed=True, norm_offset=0.5), "adds 0 or 1 to the norm's weight, got 0.5"),
        (production(1, 64, (8, 7)), r"features must be even, got \[8, 7\]"),
        (production(1, 64, (16, 8), half=8, rotated=1), r"all must be heads of 16, a multiple of 4; got \[16, 8\]"),
        (production(1, 64, (12,), half=3, rotated=1), "heads of 6"),
    ],
)
def test_gpu_form_says_what_it_does_not_do(call, reason, monkeypatch):
    _, arrays, keywords = call
    structs = jax.tree.map(lambda of: _struct(*of[0], dtype=of[1]), arrays, is_leaf=lambda x: isinstance(x, tuple))
    if reason is None:
        assert paging.unsupported("project_tokens", "mosaic_gpu", **structs, **keywords) is None
        return
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(paging.implementation("project_tokens", "mosaic_gpu"), **keywords), **structs)
    monkeypatch.setattr(dispatch, "available", lambda op, backend=None: ("mosaic_gpu", "xla", "reference"))
    rest = {name: keywords[name] for name in ("rotated", "gated", "norm_offset", "out_dtype")}
    with dispatch.listening() as heard:
        jax.eval_shape(functools.partial(project_tokens, **rest), structs.pop("x"), tuple(structs.pop("weights")), **structs)
    assert heard == {"project_tokens": "xla"}
