"""Qwen3.5's text model computes what transformers computes: golden logits and greedy tokens, and wrong models that must
fail."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_family import TOLERANCE, GoldenFamily
from quick_cases import one_in, rest_long
from safetensors.numpy import load_file, save_file

from kvjax.model.layers import AttentionLayer, DeltaLayer
from kvjax.models import load, qwen3_5
from kvjax.models.config_json import parse
from kvjax.models.decoder import TransformerDecoder, init_params
from kvjax.models.mixers import attention as attention_module
from kvjax.models.mixers import delta as delta_module
from pallas_kernels.core import rope_norm

FAMILY = GoldenFamily("qwen3_5")
GOLDEN, CASES, golden_case = FAMILY.folder, FAMILY.cases, FAMILY.case
FIRST = "g2-d32-own-order"


def test_cases_cover_what_they_must(monkeypatch):
    configs = FAMILY.configs(monkeypatch)
    assert {config.tie_embeddings for config in configs} == {True, False}
    kinds = {"".join("f" if isinstance(layer.mixer, AttentionLayer) else "d" for layer in config.layers) for config in configs}
    assert kinds == {"dddf", "fd", "df", "ddf", "dfdf", "dfd", "ff", "ffd"}
    attention = {layer.mixer for config in configs for layer in config.layers if isinstance(layer.mixer, AttentionLayer)}
    delta = {layer.mixer for config in configs for layer in config.layers if isinstance(layer.mixer, DeltaLayer)}
    assert all(mixer.gate and mixer.qk_norm for mixer in attention)
    assert {mixer.rope.dim / mixer.head_dim for mixer in attention} == {0.25, 0.5, 1}
    assert {mixer.o_bias for mixer in attention} == {True, False}
    assert {mixer.num_heads // mixer.num_kv_heads for mixer in attention} == {1, 2, 4, 7}
    assert {mixer.conv_width for mixer in delta} == {2, 3, 4}
    assert {mixer.value_heads // mixer.key_heads for mixer in delta} == {1, 2, 3, 4}
    assert {np.sign(mixer.key_dim - mixer.value_dim) for mixer in delta} == {-1, 0, 1}


@pytest.mark.quick_but("g7-d16-tied-rotates-all", "g4-d32-tied-full-first", "g2-d32-attention-bias", "g1-d32-kernel-2")
@pytest.mark.parametrize(
    "name",
    rest_long(
        CASES,
        "g1-d32-kernel-2",
        "g2-d32-full-alone",
        "g2-d64-yarn",
        "g4-d32-tied-full-first",
        "g7-d16-tied-rotates-all",
        "g2-d32-attention-bias",
    ),
)
def test_logits_and_greedy_tokens(name, complete):
    FAMILY.check_logits(name, complete)


def test_the_text_part_of_a_larger_checkpoint_is_the_same_model():
    whole, text = load(GOLDEN / "whole", dtype=jnp.float32, tokenizer=False), golden_case(FIRST)[0]
    assert whole.config == text.config
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.params, text.params))


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_is_the_same(name, tmp_path):
    """With the fields that transformers wrote: it reads what was saved as the same model."""
    model, _ = golden_case(name)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=jnp.float32, tokenizer=False)
    assert again.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path / "saved"))
    differing = {field for field, value in theirs.items() if field in ours and ours[field] != value}
    assert differing <= {"rope_parameters", "partial_rotary_factor"}
    given, written = theirs["rope_parameters"], ours["rope_parameters"]
    assert {**given, **written} == written | {key: value for key, value in given.items() if key not in written}
    assert all(written[key] == value for key, value in given.items())
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(load_file(GOLDEN / name / "model.safetensors"))


# Wrong models. Each takes (model, monkeypatch) and returns (decoder, params).


def drop(tensor):
    def mutant(model, monkeypatch):
        layers = [layer | {tensor: jnp.zeros_like(layer[tensor])} if tensor in layer else layer for layer in model.params["layers"]]
        return model.decoder, model.params | {"layers": tuple(layers)}

    return mutant


def change(tensor, function):
    def mutant(model, monkeypatch):
        layers = [layer | {tensor: function(layer[tensor])} if tensor in layer else layer for layer in model.params["layers"]]
        return model.decoder, model.params | {"layers": tuple(layers)}

    return mutant


def mixers(kind, function):
    def mutant(model, monkeypatch):
        layers = tuple(
            dataclasses.replace(layer, mixer=function(layer.mixer)) if isinstance(layer.mixer, kind) else layer
            for layer in model.config.layers
        )
        return TransformerDecoder(dataclasses.replace(model.config, layers=layers)), model.params

    return mutant


def patched(module, name, make):
    def mutant(model, monkeypatch):
        monkeypatch.setattr(module, name, make(getattr(module, name)))
        return model.decoder, model.params

    return mutant


def recurrence(function):
    """A mutant of what Gated DeltaNet layers mix."""
    return patched(delta_module, "Recurrence", lambda right: lambda *args, **keywords: function(right(*args, **keywords)))


def rope(function):
    return mixers(AttentionLayer, lambda mixer: dataclasses.replace(mixer, rope=function(mixer)))


def other_order(heads):
    """Of value heads' matrix: key head h % K for value head h."""
    return heads.reshape(2, 2, -1, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)


MUTANTS = {
    "right": lambda model, monkeypatch: (model.decoder, model.params),
    "gate of attention dropped": patched(attention_module.jax.nn, "sigmoid", lambda _: jnp.ones_like),
    "gate of the recurrence dropped": drop("z"),
    "gate is a sigmoid": patched(delta_module.jax.nn, "silu", lambda _: jax.nn.sigmoid),
    "gates of all heads behind their queries": change("q", lambda q: q.reshape(4, 2, 32, -1).swapaxes(0, 1).reshape(q.shape)),
    "convolution shifted": change("conv", lambda conv: jnp.roll(conv, 1, axis=2)),
    "convolution backwards": change("conv", lambda conv: conv[:, :, ::-1]),
    "decay's sign": recurrence(lambda given: given.replace(g=-given.g)),
    "no decay": recurrence(lambda given: given.replace(g=0 * given.g)),
    "decay's bias dropped": drop("dt_bias"),
    "decay of one rate": drop("decay_log"),
    "all is written": recurrence(lambda given: given.replace(beta=jnp.ones_like(given.beta))),
    "queries not scaled": recurrence(lambda given: given.replace(scale=1.0)),
    "value heads in another order": change("a", other_order),
    "RoPE on all of a head": rope(lambda mixer: dataclasses.replace(mixer.rope, dim=mixer.head_dim)),
    "RoPE on fewer elements": rope(lambda mixer: dataclasses.replace(mixer.rope, dim=mixer.rope.dim // 2)),
    "theta": rope(lambda mixer: dataclasses.replace(mixer.rope, theta=2e4)),
    "norms without one": lambda model, monkeypatch: (TransformerDecoder(dataclasses.replace(model.config, norm_offset=0.0)), model.params),
    "norm of the recurrence with one": change("delta_norm", lambda weight: weight + 1),
    "no norm of queries": change("q_norm", lambda weight: weight - 0.5),
    "epsilon": lambda model, monkeypatch: (TransformerDecoder(dataclasses.replace(model.config, norm_eps=1e-6)), model.params),
}


@pytest.mark.parametrize("mutant", one_in(5, MUTANTS))
def test_mutant_fails(mutant, complete, monkeypatch):
    model, want = golden_case(FIRST)
    decoder, params = MUTANTS[mutant](model, monkeypatch)
    logits, _ = complete(decoder, params, want["ids"])
    close = np.abs(logits - want["logits"]).max() < TOLERANCE
    assert close == (mutant == "right")


# Reading and refusing.


def fields_of(name=FIRST, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


def test_layers_are_in_the_familys_order_where_config_json_does_not_say():
    fields = {key: value for key, value in fields_of(num_hidden_layers=9).items() if key != "layer_types"}
    kinds = [type(layer.mixer) for layer in parse(fields).layers]
    assert kinds == [DeltaLayer, DeltaLayer, DeltaLayer, AttentionLayer] * 2 + [DeltaLayer]
    assert [type(layer.mixer) for layer in parse(fields | {"full_attention_interval": 3}).layers][2::3] == [AttentionLayer] * 3
    rotated = parse({key: value for key, value in fields.items() if "rotary" not in key and key != "rope_parameters"})
    assert rotated.layers[3].mixer.rope.dim == 8, "a quarter of a head of 32"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 8}, "num_experts is 8; supported: None or 0"),
        ({"attn_output_gate": False}, "attn_output_gate is False; supported: None or True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; supported: None or 'float32'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu' or 'swish'"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "a list of 'linear_attention' or 'full_attention', one for each of 4 layers",
        ),
        ({"layer_types": ["full_attention"]}, "one for each of 4 layers"),
        ({"linear_num_key_heads": 3}, "value_heads 4 is not a multiple of key_heads 3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be a positive integer"),
        ({"linear_key_head_dim": "16"}, "linear_key_head_dim is '16'; it must be an integer"),
        ({"head_dim": 35, "rope_parameters": {"partial_rotary_factor": 0.2}}, "must rotate pairs of elements, not 7"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "must rotate pairs of elements, not 64"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20: .* of transformers reads it"),
        ({"quantization_config": {"bits": 4}}, "load the checkpoint that it was quantized from"),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse(fields_of(**changes))


def test_a_larger_checkpoint_is_refused_for_what_its_text_part_cannot_be():
    whole = json.loads((GOLDEN / "whole" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"quantization_config is .*; supported: None"):
        parse(whole | {"quantization_config": {"bits": 4}})
    with pytest.raises(ValueError, match="text_config is None; a Qwen3_5ForConditionalGeneration needs an object"):
        parse(whole | {"text_config": None})
    with pytest.raises(ValueError, match=r"'qwen3_5_moe'; the nearest supported family is qwen3_5_text; .* mixture of experts"):
        parse({"model_type": "qwen3_5_moe"})


def test_missing_and_strange_tensors_are_errors(tmp_path):
    shutil.copytree(GOLDEN / "whole", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("model.language_model.layers.0.linear_attn.A_log")
    save_file(tensors | {"model.language_model.layers.0.linear_attn.B_log": gone}, file)
    with pytest.raises(ValueError, match=r"missing: model.layers.0.linear_attn.A_log \[4\]; 1 extra: model.layers.0.linear_attn.B_log"):
        load(tmp_path / "model", dtype=jnp.float32, tokenizer=False)


def test_layers_that_config_json_has_no_words_for_are_not_saved():
    model, _ = golden_case(FIRST)
    first, *others = model.config.layers
    mixed = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, conv_width=3))
    with pytest.raises(ValueError, match="describes one kind of attention, one of Gated DeltaNet and one MLP"):
        qwen3_5.fields_of(dataclasses.replace(model.config, layers=(mixed, *others)))
    with pytest.raises(ValueError, match="describes layers of attention, and this model has none"):
        qwen3_5.fields_of(dataclasses.replace(model.config, layers=(first,)))


def test_fresh_weights_are_those_of_the_family():
    model, _ = golden_case(FIRST)
    params = init_params(model.config, jax.random.key(0))
    layer = params["layers"][0]
    assert (layer["attn_norm"] == 0).all()
    assert (layer["delta_norm"] == 1).all()
    assert (layer["dt_bias"] == 1).all()
    assert (params["layers"][3]["q_norm"] == 0).all()
    assert (jnp.exp(layer["decay_log"]) < 16).all()


def test_a_norm_with_an_offset_adds_in_float32():
    x, weight = jnp.ones((1, 256), jnp.bfloat16), jnp.full(256, 2.0**-9, jnp.bfloat16)
    found = rope_norm.rms_norm(x * 256, weight, 0.0, 1.0).astype(jnp.float32)
    assert (found == 1).all()
    found = rope_norm.rms_norm(x.astype(jnp.float32), weight, 0.0, 1.0)
    assert (found == 1 + 2.0**-9).all()


def test_a_kernel_of_one_tap(tmp_path, complete):
    """The logits of a golden model of two taps whose first taps are 0."""
    logits = []
    for taps in (2, 1):
        folder = tmp_path / str(taps)
        shutil.copytree(GOLDEN / "g1-d32-kernel-2", folder)
        fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fields | {"linear_conv_kernel_dim": taps}))
        for name in [name for name in tensors if name.endswith("conv1d.weight")]:
            last = np.ascontiguousarray(tensors[name][..., -1:])
            tensors[name] = last if taps == 1 else np.concatenate([0 * last, last], -1)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = load(folder, dtype=jnp.float32, tokenizer=False)
        logits.append(complete(model.decoder, model.params, np.arange(20))[0])
    np.testing.assert_allclose(*logits, atol=1e-6)
