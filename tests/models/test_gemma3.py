"""Gemma 3's text model computes what transformers computes: golden logits and greedy tokens, and wrong models that must
fail."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_family import TOLERANCE, GoldenFamily, check_engine
from quick_cases import one_in, rest_long
from safetensors.numpy import load_file, save_file

from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.model.identity import fingerprint
from kvjax.models import gemma3, load
from kvjax.models.config_json import parse, to_fields
from kvjax.models.decoder import TransformerDecoder, init_params
from pallas_kernels.matmul.project_tokens import xla

pytestmark = pytest.mark.bits

FAMILY = GoldenFamily("gemma3")
GOLDEN, CASES, golden_case = FAMILY.folder, FAMILY.cases, FAMILY.case
FIRST, LINEAR = "g1-d32", "g2-d32-linear"
PAGE, CHUNK, WINDOW = 8, 16, 12


def test_cases_cover_what_they_must(monkeypatch):
    configs = FAMILY.configs(monkeypatch)
    assert {config.tie_embeddings for config in configs} == {True, False}
    kinds = {"".join("f" if layer.mixer.window is None else "s" for layer in config.layers) for config in configs}
    assert kinds == {"sfsf", "sssssf", "fss", "ffff", "sss"}
    mixers = {layer.mixer for config in configs for layer in config.layers}
    assert {mixer.window for mixer in mixers} == {None, 1, 12, 20}
    assert {mixer.num_heads // mixer.num_kv_heads for mixer in mixers} == {1, 2, 4, 7}
    assert {mixer.head_dim for mixer in mixers} == {32, 64, 128}
    assert {mixer.o_bias for mixer in mixers} == {True, False}
    assert all(mixer.sm_scale != mixer.head_dim**-0.5 for mixer in mixers)
    scalings = {bool(mixer.window): set() for mixer in mixers}
    for mixer in mixers:
        scalings[bool(mixer.window)].add(mixer.rope.scaling and mixer.rope.scaling.kind)
    assert scalings == {False: {None, "linear", "yarn", "llama3"}, True: {None}}


QUICK = ("g1-d32", "g2-d128-types", "g2-d32-linear", "g2-d32-llama3-no-window", "g2-d64-window-1", "g4-d32-biases", "g7-d32-untied")
"""The rest has sizes and RoPEs between those of others."""


@pytest.mark.parametrize("name", rest_long(CASES, *QUICK))
def test_logits_and_greedy_tokens(name, complete):
    FAMILY.check_logits(name, complete)


# Through the engine.


def engine_of(model, **options):
    return Engine(model, **({"pages": 32, "page_size": PAGE, "prefill_chunk": CHUNK, "batch_buckets": (1, 4)} | options))


@pytest.mark.parametrize("name", [LINEAR, *(pytest.param(each, marks=pytest.mark.long) for each in ("g4-d64-linear", "g2-d64-window-1"))])
def test_the_engine_gives_the_golden_logits_and_tokens_however_the_prompt_is_cut(name):
    model, want = golden_case(name)
    check_engine(engine_of(model), want)


@pytest.mark.long
def test_memory_of_layers_with_a_window_stays_flat():
    model, _ = golden_case("g4-d64-linear")
    config = dataclasses.replace(model.config, max_positions=1024)
    engine = engine_of(dataclasses.replace(model, decoder=TransformerDecoder(config)), pages=96, batch_buckets=(1,))
    tokens = np.random.default_rng(0).integers(0, 64, 700).tolist()
    (sequence,) = engine.prefill([tokens[:100]])
    held = []
    for start in range(100, 700, 100):
        engine.extend(sequence, tokens[start : start + 100])
        held.append({name: each.total - each.free for name, each in engine.allocators.items()})
    near, full = ([each[name] for each in held] for name in (f"window:{WINDOW}", "full"))
    assert max(near) <= -(-(WINDOW - 1 + CHUNK) // PAGE) + 1
    assert full == [-(-(start + 100) // PAGE) for start in range(100, 700, 100)]
    spec = config.cache_spec(PAGE)
    assert spec.bytes_per_page(f"window:{WINDOW}") == 5 * spec.bytes_per_page("full"), "five of six layers have a window"


# Files.


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_larger_checkpoint_is_the_same_model(prefix, tmp_path):
    """transformers writes the first names; other programs, and transformers in memory, use the second."""
    folder, text = tmp_path / "whole", golden_case(FIRST)[0]
    shutil.copytree(GOLDEN / "whole", folder)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file({name.replace("language_model.model.", prefix): x for name, x in tensors.items()}, folder / "model.safetensors")
    whole = load(folder, dtype=jnp.float32, tokenizer=False)
    assert whole.config == text.config
    assert fingerprint(whole) == fingerprint(text)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", one_in(4, CASES))
def test_a_saved_model_is_the_same(name, dtype, tmp_path):
    """Weights bit for bit, norms' too, and the fields that transformers wrote."""
    model = load(GOLDEN / name, dtype=dtype, tokenizer=False)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype="auto", tokenizer=False)
    assert again.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path / "saved"))
    scaling, written = (each.pop("rope_parameters")["full_attention"] for each in (theirs, ours))
    assert "all-windows" in name or scaling.items() <= written.items()
    differing = {field for field, value in theirs.items() if field in ours and ours[field] != value} - {"dtype"}
    assert differing <= ({"sliding_window"} if "no-window" in name else set())
    stored = load_file(GOLDEN / name / "model.safetensors")
    if dtype == jnp.float32:
        written = load_file(tmp_path / "saved" / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all((written[tensor] == stored[tensor]).all() for tensor in stored)


# Wrong models. Each takes a model and returns (decoder, params).


def reconfigure(**changes):
    return lambda model: (TransformerDecoder(dataclasses.replace(model.config, **changes)), model.params)


def layers(change):
    """`change(layer)` for every layer."""
    return lambda model: reconfigure(layers=tuple(map(change, model.config.layers)))(model)


def mixers(windowed, **changes):
    """Changes of the mixers with a window, or without: values, or functions of the mixer."""

    def change(layer):
        if (layer.mixer.window is not None) != windowed:
            return layer
        new = {name: value(layer.mixer) if callable(value) else value for name, value in changes.items()}
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **new))

    return layers(change)


def rope(windowed, **changes):
    return mixers(windowed, rope=lambda mixer: dataclasses.replace(mixer.rope, **changes))


def swap(first, second):
    def mutant(model):
        swapped = tuple(layer | {first: layer[second], second: layer[first]} for layer in model.params["layers"])
        return model.decoder, model.params | {"layers": swapped}

    return mutant


MUTANTS = {
    "right": lambda model: (model.decoder, model.params),
    "one base for all layers": rope(True, theta=1e3),
    "bases exchanged": lambda model: (rope(True, theta=1e3)(model)[0], model.params),
    "another base without a window": rope(False, theta=1e4),
    "scaling forgotten": rope(False, scaling=None),
    "scaling of layers with a window too": lambda model: rope(True, scaling=model.config.layers[1].mixer.rope.scaling)(model),
    "norms without one": reconfigure(norm_offset=0.0),
    "embedding not scaled": reconfigure(embed_scale=None),
    "embedding scaled by the width": reconfigure(embed_scale=16.0),
    "window one token longer": mixers(True, window=13),
    "window one token shorter": mixers(True, window=11),
    "no window": mixers(True, window=None),
    "a window everywhere": mixers(False, window=WINDOW),
    "scale of the head dim, with a window": mixers(True, sm_scale=32**-0.5),
    "scale of the head dim, without": mixers(False, sm_scale=32**-0.5),
    "silu": layers(lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, activation="silu"))),
    "no norms of q and k": layers(lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, qk_norm=False))),
    "no norms behind": layers(lambda layer: dataclasses.replace(layer, post_norms=False)),
    "norms before and behind attention exchanged": swap("attn_norm", "attn_post_norm"),
    "norms before and behind the MLP exchanged": swap("mlp_norm", "mlp_post_norm"),
    "norms behind exchanged": swap("attn_post_norm", "mlp_post_norm"),
    "norms of q and k exchanged": swap("q_norm", "k_norm"),
    "epsilon": reconfigure(norm_eps=1e-6),
}


@pytest.mark.parametrize("mutant", one_in(4, MUTANTS))
def test_mutant_fails(mutant, complete):
    model, want = golden_case(LINEAR)
    decoder, params = MUTANTS[mutant](model)
    logits, _ = complete(decoder, params, want["ids"])
    error = np.abs(logits - want["logits"]).max()
    assert error < TOLERANCE if mutant == "right" else error > 30 * TOLERANCE


def test_the_exact_gelu_fails(complete, monkeypatch):
    """It differs from its approximation by little."""
    model, want = golden_case(LINEAR)
    right = jax.nn.gelu
    monkeypatch.setattr(xla, "project_tokens", xla.project_tokens.__wrapped__)  # as jitted, it may have been traced before
    monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate: right(x, approximate=False))
    logits, _ = complete(model.decoder, model.params, want["ids"])
    assert np.abs(logits - want["logits"]).max() > TOLERANCE


# Reading and refusing.

GEMMA_3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
GEMMA_3_1B = GEMMA_3_270M | {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "cache_implementation": "hybrid"}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}


def test_released_models_parse():
    small, one, four = map(parse, (GEMMA_3_270M, GEMMA_3_1B, GEMMA_3_4B))
    assert (small.num_params, one.num_params) == (268_098_176, 999_885_952)
    assert [number for number, layer in enumerate(one.layers) if layer.mixer.window is None] == [5, 11, 17, 23]
    assert {layer.mixer.window for layer in one.layers} == {None, 512}
    assert (four.vocab_size, four.eos_token_ids, four.max_positions, four.compute_dtype) == (262_208, (1, 106), 131_072, "bfloat16")
    full, near = four.layers[5].mixer, four.layers[0].mixer
    assert (full.rope.theta, full.rope.scaling.factor, near.rope.theta, near.rope.scaling, near.window) == (1e6, 8.0, 1e4, None, 1024)
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.sm_scale) == (8, 4, 256, 256**-0.5)
    for config in (small, one, four):
        assert parse(json.loads(json.dumps(to_fields(config)))) == config
    plan = memory_plan(one, available_bytes=0)
    assert plan.weights_bytes == 2 * one.num_params


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported: None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported: None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported: None or False"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported: 'gelu_pytorch_tanh'"),
        ({"layer_types": ["chunked_attention"] * 18}, "'full_attention' or 'sliding_attention', one for each of 18 layers"),
        ({"layer_types": ["full_attention"]}, "one for each of 18 layers"),
        ({"sliding_window": None}, "sliding_window is None; it must be an integer"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be a positive integer"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0; it must be above 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'; supported for Gemma 3: default, linear"),
        ({"rope_parameters": {"rope_type": "default"}}, "it must have an object for each of full_attention and sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention is .* supported: rope_type",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
            "rope_local_base_freq is 10000.0, .* they must agree",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "gives rope_theta more than once, differently"),
        ({"num_experts": 8}, "num_experts is 8; supported: None or 0"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20: .* of transformers reads it"),
        ({"quantization_config": {"bits": 4}}, "load the checkpoint that it was quantized from"),
        (
            {"model_type": "gemma3n"},
            "model_type is 'gemma3n'; the nearest supported family is gemma3_text; a gemma3n has",
        ),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        parse(GEMMA_3_270M | changes)


def test_layers_that_config_json_has_no_words_for_are_not_saved():
    config = golden_case(FIRST)[0].config
    first, *others = config.layers
    odd = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, window=5))
    with pytest.raises(ValueError, match="one kind of layer with a window and one without"):
        gemma3.fields_of(dataclasses.replace(config, layers=(odd, *others)))


def test_fresh_norms_multiply_by_one():
    params = init_params(golden_case(FIRST)[0].config, jax.random.key(0))
    for norm in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm"):
        assert (params["layers"][0][norm] == 0).all()
