"""A fingerprint tells models apart, is the same everywhere, and is kept with the weights it was computed from."""

import dataclasses
import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import QWEN_7B, altered

from kvjax.model import identity as module
from kvjax.model.identity import check_fingerprint, fingerprint
from kvjax.model.layers import RopeScaling

PAIRS = 200
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


def scaled(x, rng):
    return x * x.dtype.type(rng.choice([2, 0.5, -1, 4, 0.25]))


def one_scaled(x, rng):
    x[rng.integers(x.size)] *= x.dtype.type(rng.choice([2, 0.5]))
    return x


def signs(x, rng):
    """One or two, as two flips of the highest bit cancel in a sum."""
    x[rng.choice(x.size, rng.integers(1, 3), replace=False)] *= x.dtype.type(-1)
    return x


def swapped(x, rng):
    a, b = rng.choice(x.size, 2, replace=False)
    x[[a, b]] = x[[b, a]]
    return x


def permuted(x, rng):
    return x[rng.permutation(x.size)]


def one_bit(x, rng):
    bits = x.view(BITS[x.dtype.name])
    bits[rng.integers(x.size)] ^= bits.dtype.type(1 << rng.integers(8 * x.dtype.itemsize))
    return x


CHANGES = (scaled, one_scaled, signs, swapped, permuted, one_bit)


@pytest.mark.quick_but("float16", "float32")
@pytest.mark.parametrize("dtype", BITS)
def test_models_that_differ_in_one_thing_have_different_fingerprints(model_factory, dtype):
    model, rng = model_factory(compute_dtype=dtype), np.random.default_rng(0)
    matrix = jax.random.normal(jax.random.key(1), (128, 128)).astype(dtype)  # so large that a sum of bits, modulo 2**32, misses a scale
    model = dataclasses.replace(model, params=model.params | {"matrix": matrix})
    leaves, structure = jax.tree.flatten(model.params)
    big = next(number for number, leaf in enumerate(leaves) if leaf is matrix)
    same, pairs = [], 0
    while pairs < PAIRS:
        number, change = (big if rng.random() < 0.5 else int(rng.integers(len(leaves)))), CHANGES[pairs % len(CHANGES)]
        before = np.array(leaves[number])
        after = change(before.reshape(-1).copy(), rng).reshape(before.shape)
        if after.tobytes() == before.tobytes():  # zeros scaled, equal elements swapped: one model, not two
            continue
        pairs += 1
        other = [*leaves[:number], jnp.asarray(after), *leaves[number + 1 :]]
        if fingerprint(dataclasses.replace(model, params=jax.tree.unflatten(structure, other))) == fingerprint(model):
            same.append((change.__name__, number))
    assert not same


def test_constant_tensors_names_shapes_and_configurations_count(model):
    def of(params, config=model.config):
        return fingerprint(Named(params, config))

    ones = jnp.ones((4, 6))
    params = [{"a": ones}, {"a": 2 * ones}, {"b": ones}, {"a": ones.reshape(6, 4)}, {"a": ones.astype("int32")}, {"a": ones, "b": ones[:0]}]
    assert len({of(each) for each in params}) == len(params)
    assert of(params[0]) != of(params[0], altered(model.config, rope_theta=5e5))
    assert of({"a": ones, "b": 2 * ones}) != of({"a": 2 * ones, "b": ones})


@dataclasses.dataclass
class Named:
    params: dict
    config: object


def test_it_does_not_depend_on_the_number_of_cores_or_on_which_arrays_hold_the_weights(model, monkeypatch):
    big = {"a": jax.random.normal(jax.random.key(0), (3 * module.CHUNK_BYTES // 8,))}  # a chunk and a half
    found = {fingerprint(Named(big, model.config))}
    for cores in (1, 7, None):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found.add(fingerprint(Named(jax.tree.map(jnp.copy, big), model.config)))
    assert len(found) == 1
    for place in (0, module.CHUNK_BYTES // 4 - 1, module.CHUNK_BYTES // 4, -1):
        found.add(fingerprint(Named({"a": big["a"].at[place].multiply(2)}, model.config)))
    assert len(found) == 5, "the last element of a chunk, the first of the next"


def test_weights_are_hashed_once_while_they_live(model_factory, monkeypatch):
    model = model_factory()
    model = dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))  # weights that nobody else holds
    mark = fingerprint(model)
    hashed = []
    monkeypatch.setattr(module, "_chunks", lambda leaf, chunks=module._chunks: hashed.append(leaf.shape) or chunks(leaf))
    assert fingerprint(dataclasses.replace(model)) == mark
    assert not hashed
    other = dataclasses.replace(model, params=model.params | {"embed": 2 * model.params["embed"]})
    assert fingerprint(other) != mark
    assert hashed == [model.params["embed"].shape]
    model.params["embed"] = other.params["embed"]  # in place: the same model object
    assert fingerprint(model) == fingerprint(other)
    del other, model
    gc.collect()
    small = model_factory(num_layers=1)
    small = dataclasses.replace(small, params=jax.tree.map(jnp.copy, small.params))  # whose digests nobody has asked for
    fingerprint(small)  # keeps the digests of its own weights, and drops those of dead ones
    assert all(array() is not None for array, _ in module._digests.values())


def test_fingerprints_of_earlier_versions_are_refused():
    with pytest.raises(ValueError, match=r"^a\.json was made by an earlier version of kvjax, whose fingerprint \(0123456789abcdef\)"):
        check_fingerprint("0123456789abcdef", "a.json", "measure it again")
    check_fingerprint("sha256-" + "0" * 32, "a.json", "measure it again")


def test_weights_in_numpy_arrays_are_read_every_time(model_factory):
    """They may be changed in place, and have the fingerprint of equal weights on the device."""
    model = model_factory()
    copied = dataclasses.replace(model, params=jax.tree.map(np.array, model.params))
    assert fingerprint(copied) == fingerprint(model)
    copied.params["embed"][0, 0] += 1
    assert fingerprint(copied) != fingerprint(model)


def test_the_text_of_a_model_of_like_layers_is_that_of_the_first_version():
    """Evidence, cost models and sequences on disk name models by it. compute_dtype, and biases that came later, are not
    in it."""
    expected = (
        "ModelConfig(family='qwen2', vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, "
        "num_kv_heads=4, head_dim=128, rope_theta=1000000.0, rope_scaling=None, norm_eps=1e-06, tie_embeddings=False, "
        "max_positions=2097152, qkv_bias=True, qk_norm=False, eos_token_ids=(), bos_token_id=None)"
    )
    assert module._text(QWEN_7B) == expected
    assert module._text(altered(QWEN_7B, compute_dtype="float32", o_bias=True, mlp_bias=True)) == expected
    windows = (None, 40) * 14
    assert module._text(altered(QWEN_7B, windows=windows)) == expected + repr(windows)
    scaling = RopeScaling("linear", 2.0, 64)
    assert repr(scaling) in module._text(altered(QWEN_7B, rope_scaling=scaling))


def test_a_model_of_other_layers_has_a_text_of_its_own():
    """Each field that is not as it is by default counts; one that is added later changes no text."""
    first = QWEN_7B.layers[0]
    odd = dataclasses.replace(first, mlp=dataclasses.replace(first.mlp, activation="gelu_tanh"))
    config = dataclasses.replace(QWEN_7B, layers=(odd, *QWEN_7B.layers[1:]))
    text = module._text(config)
    assert text.count("gelu_tanh") == 1
    assert "compute_dtype" not in text
    assert "post_norms" not in text
    texts = {module._text(dataclasses.replace(config, **change)) for change in ({}, {"norm_offset": 1.0}, {"embed_scale": 2.0})}
    assert len(texts) == 3
