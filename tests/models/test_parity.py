"""The decoder computes what transformers computes: golden logits and greedy tokens, and wrong decoders that must
fail."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import one_in
from safetensors.numpy import load_file
from tiny_models import altered, flat

from kvjax.models import decoder as decoder_module
from kvjax.models import load
from kvjax.models.decoder import TransformerDecoder, causal_mix
from kvjax.models.mixers import attention as attention_module
from pallas_kernels.core import rope_norm
from pallas_kernels.matmul.project_tokens import xla

TOLERANCE = 1e-4
GOLDEN = Path(__file__).with_name("golden")
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())
FAMILIES = ("llama", "qwen2", "qwen3")


def golden_case(name):
    """A golden model, loaded for sequences past longrope's original length where they are, and what is expected of
    it."""
    want = load_file(GOLDEN / name / "golden.safetensors")
    longest = 128 if "-longrope-long" in name else None
    return load(GOLDEN / name, dtype=jnp.float32, max_positions=longest, tokenizer=False), want


def test_cases_cover_what_they_must(golden_script):
    assert sorted(golden_script.CASES) == CASES
    configs = [golden_case(name)[0].config for name in CASES if name.startswith("llama") and name not in golden_script.OWN]
    assert {flat(c).num_heads // flat(c).num_kv_heads for c in configs} == {1, 4, 7}
    assert {flat(c).head_dim for c in configs} == {32, 64, 128}
    assert {c.tie_embeddings for c in configs} == {True, False}
    assert {flat(c).rope_scaling and flat(c).rope_scaling.kind for c in configs} == {None, "llama3", "yarn"}
    assert all(flat(c).rope_scaling is None or flat(c).rope_scaling.original_max_positions < golden_script.PROMPT_TOKENS for c in configs)
    own = {name: golden_case(name)[0].config for name in golden_script.OWN}
    biased = {(c.family, flat(c).qkv_bias, flat(c).o_bias, flat(c).mlp_bias) for c in own.values()}
    assert biased >= {
        ("llama", True, True, False),
        ("llama", False, False, True),
        ("llama", True, True, True),
        ("qwen3", True, True, False),
    }
    scalings = {(c.family, flat(c).rope_scaling) for c in own.values()}
    scaled = {(family, scaling.kind, getattr(scaling, "long", None)) for family, scaling in scalings if scaling}
    assert scaled >= {(f, *kind) for f in FAMILIES for kind in (("dynamic", None), ("longrope", False), ("longrope", True))}
    windows = {(c.family, flat(c).windows) for c in own.values() if flat(c).windows}
    assert windows == {("qwen2", (None, 12)), ("qwen2", (12, 12)), ("qwen3", (12, None)), ("qwen3", (None, 12))}
    for name, c in own.items():
        ends = golden_script.PROMPT_TOKENS + golden_script.GREEDY_TOKENS
        assert ends <= c.max_positions or "-yarn" in name  # which goes on past what config.json says
        assert "longrope-long" not in name or flat(c).rope_scaling.original_max_positions < golden_script.PROMPT_TOKENS


@pytest.mark.quick_but(
    "qwen2-g7-d32-tied-yarn",
    "qwen3-g4-d64-llama3",
    "qwen3-g7-d32-tied-yarn",
    "qwen3-g2-d64-dynamic",
    "qwen3-g4-d32-longrope-long",
    "llama-g1-d32-tied",
    "llama-g4-d64-llama3",
    "llama-g7-d64-yarn-factor",
    "qwen2-g1-d128-tied-llama3",
    "qwen2-g4-d64-llama3",
    "qwen2-g4-d128-yarn-mscale",
    "qwen2-g1-d64-longrope-short",
    "qwen2-g7-d64-yarn-factor",
    "qwen3-g1-d128-tied-llama3",
    "qwen3-g4-d128-yarn-mscale",
    "qwen3-g7-d64-yarn-factor",
    "qwen3-g1-d32-tied",
)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens(name, complete):
    model, want = golden_case(name)
    logits, greedy = complete(model.decoder, model.params, want["ids"], steps=len(want["greedy"]))
    error = np.abs(logits - want["logits"]).max()
    print(f"{name}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    np.testing.assert_array_equal(greedy, want["greedy"])


# Wrong decoders. Each takes (model, monkeypatch) and returns (decoder, params, mix or None for the right one).


def drop(tensor):
    def mutant(model, monkeypatch):
        layers = tuple(layer | {tensor: jnp.zeros_like(layer[tensor])} for layer in model.params["layers"])
        return model.decoder, model.params | {"layers": layers}, None

    return mutant


def swap(first, second):
    def mutant(model, monkeypatch):
        layers = tuple(layer | {first: layer[second], second: layer[first]} for layer in model.params["layers"])
        return model.decoder, model.params | {"layers": layers}, None

    return mutant


def reconfigure(**changes):
    def mutant(model, monkeypatch):
        return TransformerDecoder(altered(model.config, **changes)), model.params, None

    return mutant


def rescale(**changes):
    def mutant(model, monkeypatch):
        scaling = dataclasses.replace(flat(model.config).rope_scaling, **changes)
        return TransformerDecoder(altered(model.config, rope_scaling=scaling)), model.params, None

    return mutant


def mixing(wrap):
    def mutant(model, monkeypatch):
        return model.decoder, model.params, wrap(model.config)

    return mutant


def heads_in_wrong_order(config):
    right = causal_mix()

    def tiled(x):  # head h reads KV head h % K instead of h // G
        return jnp.tile(x, (1, 1, flat(config).num_heads // flat(config).num_kv_heads, 1))

    return lambda layer, given, state: right(layer, given.replace(k=tiled(given.k), v=tiled(given.v)), state)


def unscaled(config):
    right = causal_mix()
    return lambda layer, given, state: right(layer, given.replace(sm_scale=1.0), state)


def sees_the_future(config):
    return lambda layer, given, state: (jax.nn.dot_product_attention(given.q, given.k, given.v, scale=given.sm_scale), state)


def interleaved_pairs(model, monkeypatch):
    def rotate(x, cos, sin):
        first, second = x[..., 0::2], x[..., 1::2]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)

    for module in (rope_norm, attention_module):
        monkeypatch.setattr(module, "rotate", rotate)
    return model.decoder, model.params, None


def norm_adds_one(model, monkeypatch):
    right = rope_norm.rms_norm
    for module in (rope_norm, attention_module, decoder_module):
        monkeypatch.setattr(module, "rms_norm", lambda x, weight, eps, offset=0.0: right(x, weight + 1, eps))
    return model.decoder, model.params, None


def gelu(model, monkeypatch):
    monkeypatch.setattr(xla, "project_tokens", xla.project_tokens.__wrapped__)  # as jitted, it may have been traced before
    monkeypatch.setattr(decoder_module.jax.nn, "silu", jax.nn.gelu)
    return model.decoder, model.params, None


def norm_after_rope(model, monkeypatch):
    def heads(config, params, x, tokens):
        q, k, *others = right(dataclasses.replace(config, qk_norm=False), params, x, tokens)
        q, k = (rope_norm.rms_norm(y, params[name], tokens.norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
        return q, k, *others

    right = attention_module._heads
    monkeypatch.setattr(attention_module, "_heads", heads)
    return model.decoder, model.params, None


def longrope_of_the_other_length(model, monkeypatch):
    scaling = dataclasses.replace(flat(model.config).rope_scaling, long=not flat(model.config).rope_scaling.long)
    return TransformerDecoder(altered(model.config, rope_scaling=scaling, max_positions=16)), model.params, None


LLAMA3, YARN, MSCALE, FACTOR = "g4-d64-llama3", "g7-d32-tied-yarn", "g4-d128-yarn-mscale", "g7-d64-yarn-factor"
MUTANTS = {
    "rope scaling off, llama3": (FAMILIES, LLAMA3, reconfigure(rope_scaling=None)),
    "rope scaling off, yarn": (FAMILIES, YARN, reconfigure(rope_scaling=None)),
    "rope base": (("llama",), "g1-d32-tied", reconfigure(rope_theta=2e4)),
    "llama3 band": (("llama",), LLAMA3, rescale(high_freq_factor=3.0)),
    "llama3 factor": (("qwen3",), "g1-d128-tied-llama3", rescale(factor=8.0)),
    "yarn attention factor inferred": (("llama",), YARN, rescale(attention_factor=1.0)),
    "yarn attention factor given": (("qwen2",), FACTOR, rescale(attention_factor=1.1386294)),
    "yarn mscale": (("qwen3",), MSCALE, rescale(attention_factor=1.1386294)),
    "yarn truncate": (("qwen2",), MSCALE, rescale(truncate=True)),
    "yarn beta": (("qwen3",), YARN, rescale(beta_fast=32.0, beta_slow=1.0)),
    "interleaved pairs": (("qwen2",), "g1-d32-tied", interleaved_pairs),
    "heads in the wrong order, G 4": (FAMILIES, LLAMA3, mixing(heads_in_wrong_order)),
    "heads in the wrong order, G 7": (FAMILIES, YARN, mixing(heads_in_wrong_order)),
    "sees the future": (("qwen3",), "g1-d32-tied", mixing(sees_the_future)),
    "no softmax scale": (("llama",), MSCALE, mixing(unscaled)),
    "tied where it is not": (("llama",), LLAMA3, reconfigure(tie_embeddings=True)),
    "norm epsilon": (("qwen2",), "g1-d32-tied", reconfigure(norm_eps=1e-6)),
    "norm adds one": (("qwen3",), "g1-d32-tied", norm_adds_one),
    "gelu": (("llama",), "g1-d32-tied", gelu),
    "gate and up swapped": (("qwen2",), "g1-d32-tied", swap("gate", "up")),
    "norms swapped": (("qwen3",), "g1-d32-tied", swap("attn_norm", "mlp_norm")),
    "no q bias": (("qwen2",), LLAMA3, drop("q_bias")),
    "no k bias": (("qwen2",), LLAMA3, drop("k_bias")),
    "no v bias": (("qwen2",), LLAMA3, drop("v_bias")),
    "no biases": (("qwen2",), YARN, reconfigure(qkv_bias=False)),
    "no o bias": (("llama", "qwen3"), "g2-d32-attention-bias", drop("o_bias")),
    "no o bias beside q, k, v": (("llama", "qwen3"), "g2-d32-attention-bias", reconfigure(o_bias=False)),
    "no q bias of Llama": (("llama",), "g2-d32-attention-bias", drop("q_bias")),
    "no k bias of Qwen3": (("qwen3",), "g2-d32-attention-bias", drop("k_bias")),
    "no gate bias": (("llama",), "g2-d32-tied-mlp-bias", drop("gate_bias")),
    "no up bias": (("llama",), "g4-d64-llama3-biases", drop("up_bias")),
    "no down bias": (("llama",), "g2-d32-tied-mlp-bias", drop("down_bias")),
    "gate and up biases swapped": (("llama",), "g4-d64-llama3-biases", swap("gate_bias", "up_bias")),
    "no biases of the MLP": (("llama",), "g4-d64-llama3-biases", reconfigure(mlp_bias=False)),
    "dynamic scales from the start": (("qwen3",), "g2-d64-dynamic", reconfigure(rope_theta=1e4 * 4 ** (64 / 62))),
    "longrope off": (("llama",), "g2-d32-longrope-short", reconfigure(rope_scaling=None)),
    "longrope attention factor": (("llama",), "g2-d32-longrope-short", rescale(attention_factor=1.0)),
    "longrope attention factor given": (("qwen2",), "g1-d64-longrope-short", rescale(attention_factor=1.0)),
    "long factors for short": (("qwen3",), "g2-d128-longrope-short", longrope_of_the_other_length),
    "short factors for long": (("llama",), "g2-d32-longrope-long", longrope_of_the_other_length),
    "no window": (("qwen2",), "g2-d32-window", reconfigure(windows=())),
    "a window one token longer": (("qwen3",), "g4-d64-llama3-window", reconfigure(windows=(13, None))),
    "a window one token shorter": (("qwen2",), "g7-d32-yarn-all-windows", reconfigure(windows=(11, 11))),
    "the other layer's window": (("qwen3",), "g2-d32-dynamic-window", reconfigure(windows=(12, None))),
    "no q and k norms": (("qwen3",), LLAMA3, reconfigure(qk_norm=False)),
    "q and k norms swapped": (("qwen3",), FACTOR, swap("q_norm", "k_norm")),
    "q and k norms after rope": (("qwen3",), FACTOR, norm_after_rope),
}


PLANTED = [(family, name) for name, (families, _, _) in MUTANTS.items() for family in families]


@pytest.mark.parametrize("planted", one_in(4, PLANTED), ids="-".join)
def test_mutants_fail(planted, complete, monkeypatch):
    family, mutant = planted
    _, case, make = MUTANTS[mutant]
    model, want = golden_case(f"{family}-{case}")
    decoder, params, mix = make(model, monkeypatch)
    logits, _ = complete(decoder, params, want["ids"], mix=mix)
    error = np.abs(logits - want["logits"]).max()
    assert error > 100 * TOLERANCE, f"a decoder with {mutant} errs by {error:.1e} only, too little to be told apart"
