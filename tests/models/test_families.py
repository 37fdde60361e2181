"""Families by table: eight unusual configurations of each give transformers' logits, in any cut of the prompt, and come back from a save.

The golden files hold logits alone. Configurations, weights and prompts come from seeds (dense_cases.py), which the scripts share.
"""

import dataclasses
import json
from pathlib import Path

import dense_cases
import numpy as np
import pytest
from golden_family import check_engine
from quick_cases import rest_long
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.engine import Engine
from kvjax.layers import Rope
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


@pytest.mark.parametrize("case", rest_long(ENGINES, ("olmo3", 0), ("granite", 0)), ids=lambda case: case[0])
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
    "one RoPE for all layers": ("olmo3", 5, one_base),
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


def test_a_norm_over_all_heads_on_devices_that_have_some_of_them(tmp_path):
    """OLMo 2 on a mesh: heads are cut, and with 2 devices for 1 KV head that is copied."""
    for number, tensor in ((3, 2), (5, 2)):
        fields, tensors = stored("olmo2", number)
        fields["intermediate_size"] -= fields["intermediate_size"] % 2
        tensors = {w.name: dense_cases.weight_of("olmo2", number, w.name, w.shape) for w in fused.stored_wanted(config_json.parse(fields))}
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors")
        ids, found = dense_cases.prompt_of("olmo2", number).tolist(), []
        for mesh in (None, kvjax.mesh(tensor=tensor)):
            model = load(folder, tokenizer=False, dtype="float32", mesh=mesh)
            engine = Engine(model, pages=16, page_size=8, prefill_chunk=16, batch_buckets=(1,), mesh=mesh)
            (sequence,) = engine.prefill([ids])
            found.append((np.asarray(sequence.logits), np.asarray(engine.decode([sequence], [5])[0])))
        assert max(np.abs(a - b).max() for a, b in zip(*found, strict=True)) < TOLERANCE
