"""Families by table: eight unusual configurations of each give transformers' logits, in any cut of the prompt, and come
back from a save.

The golden files hold logits alone. Configurations, weights and prompts come from seeds (dense_cases.py), which the
scripts share.
"""

import dataclasses
import json
from pathlib import Path

import dense_cases
import jax
import numpy as np
import pytest
from golden_family import check_engine
from quick_cases import rest_long
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.engine.engine import Engine
from kvjax.model.layers import Rope
from kvjax.models import config_json, fused, load, save
from kvjax.models.decoder import TransformerDecoder

GOLDEN = np.load(Path(__file__).with_name("golden") / "dense_cases.npz")
TOLERANCE = 1e-4
CASES, FAMILIES = dense_cases.CASES, dense_cases.FAMILIES
QUICK = tuple((family, number) for family in FAMILIES for number in (1, 6))


def stored(family, number):
    """(config.json's fields, tensors) of a case, as transformers would save it."""
    fields = dense_cases.fields_of(family, number)
    wanted = fused.stored_wanted(config_json.parse(fields))
    return fields, {w.name: dense_cases.weight_of(family, number, w.name, w.shape) for w in wanted}


def loaded(family, number, folder, **options):
    """A case as kvjax loads it."""
    fields, tensors = stored(family, number)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    long = fields["max_position_embeddings"] if "original_max_position_embeddings" in fields and number < 4 else None
    return load(folder, tokenizer=False, dtype="float32", **({"max_positions": long} if long else {}) | options)


def wanted_logits(family, number):
    """transformers' logits of the prompt's last tokens."""
    return GOLDEN[f"{family} {number} logits"]


def error_of(logits, family, number):
    wanted = wanted_logits(family, number)
    return float(np.abs(logits[-len(wanted) :] - wanted).max())


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_logits_are_those_of_transformers(case, tmp_path, complete):
    family, number = case
    model = loaded(family, number, tmp_path)
    logits, _ = complete(model.decoder, model.params, dense_cases.prompt_of(family, number))
    error = error_of(logits, family, number)
    print(f"{family} {number}: largest logit error {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_a_save_holds_what_was_loaded(case, tmp_path):
    """The same tensors, bit for bit, and a configuration that says the same."""
    model = loaded(*case, tmp_path / "first")
    save(model, tmp_path / "second")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    again = load(tmp_path / "second", tokenizer=False, dtype="float32", max_positions=model.config.max_positions)
    assert again.config == model.config


ENGINES = [(family, 0) for family in FAMILIES]


@pytest.mark.parametrize("case", rest_long(ENGINES, ("olmo3", 0)), ids=lambda case: case[0])
def test_the_engine_gives_the_golden_logits_and_tokens_however_the_prompt_is_cut(case, tmp_path):
    model = loaded(*case, tmp_path)
    want = {what: GOLDEN[f"{case[0]} 0 {what}"] for what in ("logits", "greedy")} | {"ids": dense_cases.prompt_of(*case)}
    check_engine(Engine(model, pages=32, page_size=8, prefill_chunk=16, batch_buckets=(1, 4)), want)


# Wrong models, which must not pass.


def with_mixers(**changes):
    """A model whose layers differ in fields of the mixer."""
    return with_each(lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes)))


def with_each(change):
    return lambda model: dataclasses.replace(model.config, layers=tuple(map(change, model.config.layers)))


def with_fields(**changes):
    """A model that differs in fields of the configuration."""
    return lambda model: dataclasses.replace(model.config, **changes)


def all_rotated(model):
    """RoPE in the layers that have none."""
    return with_mixers(rope=next(layer.mixer.rope for layer in model.config.layers if layer.mixer.rope.dim))(model)


def one_base(model):
    """The RoPE of layers with a window in all of them."""
    return with_mixers(rope=next(layer.mixer.rope for layer in model.config.layers if layer.mixer.window))(model)


def norms_before(model):
    """Norms where most families have them, with the same weights."""
    for layer in model.params["layers"]:
        layer |= {"attn_norm": layer["attn_post_norm"], "mlp_norm": layer["mlp_post_norm"]}
    return with_each(lambda layer: dataclasses.replace(layer, pre_norms=True, post_norms=False))(model)


def norms_per_head(model):
    """q and k normalised in each head, with its part of the weights."""
    for layer in model.params["layers"]:
        layer |= {name: layer[name][: model.config.layers[0].mixer.head_dim] for name in ("q_norm", "k_norm")}
    return with_mixers(joint_norm=False)(model)


def keys_and_values_swapped(model):
    """The fused matrix cut in another order."""
    for layer in model.params["layers"]:
        layer |= {"k": layer["v"], "v": layer["k"]}
    return model.config


MUTANTS = {
    "a window one token longer": ("mistral", 0, with_mixers(window=13)),
    "no window": ("ministral", 2, with_mixers(window=None)),
    "RoPE in every layer": ("smollm3", 0, all_rotated),
    "no factor of embeddings": ("granite", 0, with_fields(embed_scale=None)),
    "no factor of what a layer adds": ("granite", 0, with_fields(residual_scale=None)),
    "no factor of logits": ("granite", 0, with_fields(logit_scale=None)),
    "the usual scale": ("granite", 0, with_mixers(sm_scale=8**-0.5)),
    "no bias of o": ("seed_oss", 1, with_mixers(o_bias=False)),
    "no biases": ("internlm3", 1, with_mixers(qkv_bias=False)),
    "norms before": ("olmo2", 0, norms_before),
    "norms per head": ("olmo2", 1, norms_per_head),
    "one RoPE for all layers": ("olmo3", 7, one_base),
    "whole heads rotated": ("phi3", 1, lambda model: with_mixers(rope=Rope(500.0, 12))(model)),
    "keys and values swapped": ("phi3", 0, keys_and_values_swapped),
}


@pytest.mark.parametrize(
    "name", rest_long(list(MUTANTS), "no factor of what a layer adds", "RoPE in every layer", "norms before", "norms per head")
)
def test_mutant_fails(name, complete, tmp_path):
    family, number, wrong = MUTANTS[name]
    model = loaded(family, number, tmp_path)
    logits, _ = complete(TransformerDecoder(wrong(model)), model.params, dense_cases.prompt_of(family, number))
    error = error_of(logits, family, number)
    assert error > 100 * TOLERANCE, f"a {family} with {name} errs by {error:.1e} only, too little to be told apart"


@pytest.mark.quick("copied")
@pytest.mark.parametrize("number", [3, 5], ids=["cut", "copied"])
def test_a_norm_over_all_heads_on_devices_that_have_some_of_them(number, tmp_path):
    """OLMo 2 on a mesh: heads are cut, and with 2 devices for 1 KV head that is copied."""
    fields, tensors = stored("olmo2", number)
    fields["intermediate_size"] -= fields["intermediate_size"] % 2
    tensors = {w.name: dense_cases.weight_of("olmo2", number, w.name, w.shape) for w in fused.stored_wanted(config_json.parse(fields))}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "model.safetensors")
    ids, found = dense_cases.prompt_of("olmo2", number).tolist(), []
    for mesh in (None, kvjax.mesh(tensor=2)):
        model = load(tmp_path, tokenizer=False, dtype="float32", mesh=mesh)
        engine = Engine(model, pages=16, page_size=8, prefill_chunk=16, batch_buckets=(1,), mesh=mesh)
        (sequence,) = engine.prefill([ids])
        found.append((np.asarray(sequence.logits), np.asarray(engine.decode([sequence], [5])[0])))
    assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) < TOLERANCE


# Configurations.

FIELDS = json.loads((Path(__file__).with_name("golden") / "config-fields.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_changes_something_in_transformers_is_read_or_refused(family):
    """Fields of make_config_golden.py: none is ignored that transformers reads."""

    def parsed(fields):
        try:
            return config_json.parse({"model_type": family} | FIELDS["base"] | fields)
        except ValueError as error:
            return str(error)

    base, tried = parsed({}), [fields for name, fields, outcome in FIELDS["tried"] if name == family and outcome == "other"]
    assert len(tried) > 10
    assert not isinstance(base, str)
    assert [fields for fields in tried if parsed(fields) == base] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_the_defaults_of_transformers(family):
    assert config_json.parse(FIELDS["defaults"][family]) == config_json.parse({"model_type": family})


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .1.; it must be a list of 0 and 1, one for each of 3 layers"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "give both, or name the layers full_attention"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0.0; it must be above 0"),
        ("granite", {"attention_multiplier": -1}, "attention_multiplier is -1.0; it must be above 0"),
        ("internlm3", {"qkv_bias": True}, "qkv_bias is True and bias False; they must be alike"),
        ("internlm3", {"qkv_bias": True, "attention_bias": False}, "they are one field: delete one"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "delete layer_types, or name model_type 'ministral'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'; supported for Phi-3: default, longrope"),
        ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 of head_dim 8 must rotate pairs of elements"),
        ("phi3", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map is"),
        ("olmo3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "supported for OLMo 3"),
    ],
)
def test_what_a_family_does_not_support_is_named(family, fields, message):
    with pytest.raises(ValueError, match=message):
        config_json.parse({"model_type": family} | FIELDS["base"] | fields)


@pytest.mark.parametrize(
    ("family", "code"),
    [
        ("phi3", {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}),
        ("internlm3", {"AutoModelForCausalLM": "internlm/internlm3-8b-instruct--modeling_internlm3.InternLM3ForCausalLM"}),
    ],
)
def test_the_code_of_a_family_on_the_hub_is_not_run(family, code, caplog):
    fields = {"model_type": family} | FIELDS["base"]
    assert config_json.parse(fields | {"auto_map": code}) == config_json.parse(fields)
    assert "which is not run: kvjax computes the same" in caplog.text


def test_a_fused_matrix_of_another_size_is_named(tmp_path):
    fields, tensors = stored("phi3", 0)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1].copy()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is .47, 20., must be .48, 20.".replace("20", str(fields["hidden_size"]))):
        load(tmp_path, tokenizer=False)


# Text parts of larger models.

WRAPPED = (
    ("mistral", "mistral3"),
    ("mistral", "llava"),
    ("llama", "llava"),
    ("qwen2", "llava"),
    ("llama", "idefics3"),
    ("llama", "smolvlm"),
)
NAMES = {"mistral3": "language_model.", "llava": "model.language_model.", "idefics3": "model.text_model.", "smolvlm": "model.text_model."}


@pytest.mark.parametrize(("family", "wrapper"), WRAPPED)
def test_the_text_part_of_a_larger_model_is_the_model(family, wrapper, tmp_path):
    """The same configuration and parameters as of a checkpoint that holds the text part alone."""
    fields, tensors = stored("mistral", 1)
    fields |= {"model_type": family} | ({} if family == "mistral" else {"sliding_window": None})
    alone = config_json.parse(fields)
    tensors = {w.name: dense_cases.weight_of("mistral", 1, w.name, w.shape) for w in fused.stored_wanted(alone)}
    for folder, config, stored_as in (
        ("alone", fields, tensors),
        ("within", wrapped(fields, wrapper), renamed(tensors, wrapper) | {OTHER[wrapper]: np.ones((2, 2), np.float32)}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        save_file(stored_as, tmp_path / folder / "model.safetensors")
    first, second = (load(tmp_path / folder, tokenizer=False, dtype="float32") for folder in ("alone", "within"))
    assert first.config == second.config
    leaves = zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)


OTHER = {"mistral3": "vision_tower.patch_conv.weight", "llava": "model.multi_modal_projector.linear_1.weight"}
OTHER |= {"idefics3": "model.connector.modality_projection.proj.weight", "smolvlm": "model.vision_model.embeddings.weight"}


def wrapped(fields, wrapper):
    """config.json of the larger model."""
    names = {"mistral3": "Mistral3", "llava": "Llava", "idefics3": "Idefics3", "smolvlm": "SmolVLM"}
    architectures = [f"{names[wrapper]}ForConditionalGeneration"]
    return {"model_type": wrapper, "architectures": architectures, "text_config": fields, "vision_config": {}, "image_token_id": 3}


def renamed(tensors, wrapper):
    """The text part's tensors under the names of the larger model."""
    prefix, found = NAMES[wrapper], {}
    for name, tensor in tensors.items():
        if name.startswith("lm_head."):
            found["language_model." + name if wrapper == "mistral3" else name] = tensor
        else:
            found[prefix + (name if wrapper == "mistral3" else name.removeprefix("model."))] = tensor
    return found


def test_a_text_part_of_another_family_is_named():
    with pytest.raises(ValueError, match="model_type of text_config is 'gemma2'; supported in a llava: llama, qwen2, mistral"):
        config_json.parse({"model_type": "llava", "text_config": {"model_type": "gemma2"}})
