"""Rotary frequencies against transformers' own, and the rotation against its definition."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import rope
from kvjax.model.config import LongRope
from kvjax.models import config_json
from pallas_kernels.core.rope_norm import rotate

BITS = dict(np.load(Path(__file__).with_name("golden") / "rope-bits.npz"))
CASES = json.loads(Path(__file__).with_name("golden").joinpath("rope.json").read_text())


LONGEST = 131072


def config(head_dim, parameters, long=False, **fields):
    """long: for sequences past longrope's original length."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": head_dim, "max_position_embeddings": LONGEST}
    return config_json.parse({"model_type": "llama", "rope_parameters": parameters} | sizes | fields, None, LONGEST if long else None)


def rope_for(*arguments, **options):
    """The rotation of `config`'s layers."""
    return config(*arguments, **options).layers[0].mixer.rope


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['parameters']['rope_type']}-{c['head_dim']}")
def test_frequencies_are_those_of_transformers(case):
    c = rope_for(case["head_dim"], case["parameters"])
    np.testing.assert_allclose(rope.frequencies(c), case["frequencies"], rtol=1e-6)
    assert (c.scaling.attention_factor if c.scaling else 1.0) == pytest.approx(case["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if "long_frequencies" in case], ids=lambda c: str(c["head_dim"]))
def test_longrope_changes_its_factors_past_the_original_length(case):
    original = case["parameters"]["original_max_position_embeddings"]
    short = config(case["head_dim"], case["parameters"])
    assert short.max_positions == min(original, LONGEST)
    if original >= LONGEST:  # there is nothing longer
        assert config(case["head_dim"], case["parameters"], long=True) == short
        return
    assert not np.allclose(case["frequencies"], case["long_frequencies"], rtol=0.1)
    long = config(case["head_dim"], case["parameters"], long=True)
    np.testing.assert_allclose(rope.frequencies(long.layers[0].mixer.rope), case["long_frequencies"], rtol=1e-6)
    assert long.max_positions == LONGEST
    assert len({each.layers[0].mixer.rope.scaling.attention_factor for each in (short, long)}) == 1


def bits_of(code):
    """[(configuration, periods, frequencies)] of the 260 in rope-bits.npz, as one of PyTorch's codes computes them."""
    arrays = {name: BITS[name] for name in ("periods", "frequencies")}
    if code != "scalar":
        arrays = {name: (array.view(np.int32) + BITS[f"{name}_{code}"]).view(np.float32) for name, array in arrays.items()}
    configs = [rope_for(*case) for case in json.loads(str(BITS["configs"]))]
    ends = np.cumsum([c.dim // 2 for c in configs])[:-1]
    return list(zip(configs, *(np.split(array, ends) for array in arrays.values()), strict=True))


def ulps(ours, theirs):
    """Distance of float32 numbers in units in the last place."""
    return np.abs(np.asarray(ours, np.float32).view(np.int32) - np.asarray(theirs, np.float32).view(np.int32))


@pytest.mark.parametrize("code", ["scalar", "avx2", "avx512"])
def test_scaling_is_transformers_to_the_last_bit(code):
    cases = bits_of(code)
    assert len(cases) == 260
    assert {c.scaling and c.scaling.kind for c, _, _ in cases} == {None, "linear", "dynamic", "llama3", "yarn", "longrope"}
    assert {c.scaling.long for c, _, _ in cases if isinstance(c.scaling, LongRope)} == {False, True}
    for c, periods, frequencies in cases:
        np.testing.assert_array_equal(rope.scaled(periods, c), frequencies, err_msg=str(c))


@pytest.mark.parametrize(("code", "share"), [("scalar", 0.0004), ("avx2", 0.009), ("avx512", 0.009)])
def test_frequencies_are_pytorchs_but_for_last_bits_in_which_pytorch_differs_from_itself(code, share):
    far = np.concatenate([ulps(rope.frequencies(c), frequencies) for c, _, frequencies in bits_of(code)])
    print(f"{code}: {(far > 0).sum()} of {far.size} frequencies differ ({(far > 0).mean():.2%}), by at most {far.max()}")
    assert far.max() <= 3
    assert (far > 0).mean() <= share


def test_golden_cases_differ_from_unscaled_frequencies():
    """Otherwise the test above would pass without any scaling."""
    unscaled = {"factor": 1.0}, {"original_max_position_embeddings": 1}  # with an original length of 1, YaRN has no pair to slow
    scaled = [
        c
        for c in CASES
        if c["parameters"]["rope_type"] not in ("default", "dynamic")  # dynamic: within the configuration's positions
        and (c["parameters"]["rope_type"] == "longrope" or not any(u.items() <= c["parameters"].items() for u in unscaled))
    ]
    assert len(scaled) >= 18
    for case in scaled:
        plain = rope.frequencies(rope_for(case["head_dim"], {"rope_type": "default", "rope_theta": case["parameters"]["rope_theta"]}))
        assert not np.allclose(plain, case["frequencies"], rtol=1e-3)


def test_rotation_is_exact_far_out():
    """A million tokens in, the angle is still the float32 product, its sine and cosine those of float64."""
    c = rope_for(128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768})
    positions = np.array([[0, 1, 32768, 1_000_003]], np.int32)
    cos, sin = rope.rotation(c, jnp.asarray(positions))
    angles = (positions.astype(np.float32)[..., None, None] * np.asarray(rope.frequencies(c), np.float32)).astype(np.float64)
    factor = c.scaling.attention_factor
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=3e-7)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=3e-7)
    assert cos.dtype == sin.dtype == jnp.float32


def test_rotate_turns_pairs_half_a_head_apart():
    c = rope_for(8, {"rope_type": "default", "rope_theta": 1e4})
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 8)).astype(np.float32)
    positions = np.array([[0, 7, 100], [3, 4, 5]], np.int32)
    out = rotate(jnp.asarray(x), *rope.rotation(c, jnp.asarray(positions)))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * np.asarray(rope.frequencies(c)))
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-6)
    assert rotate(jnp.asarray(x, jnp.bfloat16), *rope.rotation(c, jnp.asarray(positions))).dtype == jnp.bfloat16
