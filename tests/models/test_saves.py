"""What `save` writes is opened by transformers, and gives equal logits there; what transformers would not open is
refused.

transformers' configuration classes need no torch, so every test run opens configurations with them. Models were opened
by make_saves_golden.py, which needs torch: the tests compare digests of what is saved with what was opened then. Where
there is a Python with torch (`--torch-python`), other random models are opened anew.
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from saved_models import CASES, DENSE, FAMILIES, FORMATS, KEPT, digest, our_logits, random_fields, random_saved, run_open, save_case
from tiny_models import LEAST, RECURRENT, altered, make_family, random_model

from kvjax.model.layers import Rope, RopeScaling
from kvjax.model.weight_formats import SCHEMES, pack_params
from kvjax.models import config_json, families, load, save, saving
from kvjax.models.partial_rope import rotary_fraction
from kvjax.text.transformers_import import import_transformers
from pallas_kernels.core.matrices import MatrixFormat, pack

GOLDEN = Path(__file__).with_name("golden")
DIGESTS = json.loads((GOLDEN / "saves.json").read_text())
LOGITS = np.load(GOLDEN / "saves.npz")
TOLERANCE = 1e-4
QUICK = CASES[: len(FAMILIES) * len(FORMATS) : len(FORMATS) - 2] + [(family, "int8") for family in DENSE]
"""Some of each family, in different formats."""


def theirs(family):
    """transformers' configuration class of a family."""
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def opened(fields):
    """A config.json as transformers opens it. Its class checks the type of each field."""
    return theirs(fields["model_type"]).from_dict(json.loads(json.dumps(fields)))


def gemma_fields(**changes):
    return random_fields("gemma3_text", np.random.default_rng(0)) | changes


# Configurations.


KNOWN = [family for family in (*FAMILIES, *DENSE) if family != "internlm3"]
"""Families that the installed transformers, which may be older than the one of the golden files, has."""


def check_configurations(number):
    for place in range(number):
        family = KNOWN[place % len(KNOWN)]
        config = config_json.parse(random_fields(family, np.random.default_rng(place)))
        config_json.check_described(config)
        written = json.loads(json.dumps(config_json.to_fields(config)))
        found, again = opened(written), config_json.parse(written, config_json.to_generation_fields(config))
        assert again == config
        assert config_json.to_fields(again) == written
        declared = {field.name for field in dataclasses.fields(theirs(family))} & written.keys() - {"dtype", "rope_parameters"}
        assert {name: getattr(found, name) for name in declared} == {name: written[name] for name in declared}
        kinds = {kind: values for kind, values in written["rope_parameters"].items() if isinstance(values, dict)}
        pairs = [(found.rope_parameters[kind], kinds[kind]) for kind in kinds] or [(found.rope_parameters, written["rope_parameters"])]
        assert all(values.items() <= held.items() for held, values in pairs)


def test_transformers_opens_random_configurations():
    """And reads in each field what was written. Written, read and written again they are the same."""
    check_configurations(180)


@pytest.mark.long
def test_transformers_opens_thousands_of_random_configurations():
    check_configurations(6000)


@pytest.mark.parametrize("family", KNOWN)
def test_defaults_have_the_types_that_transformers_declares(family):
    """`to_fields` writes each field in the type of its default."""
    types = {field.name: field.type for field in dataclasses.fields(theirs(family))}
    for name, value in families.FAMILIES[family].defaults.items():
        if name in types and value is not None:
            assert type(value) in (typing.get_args(types[name]) or (types[name],)), name


@pytest.mark.parametrize("scalar", [1, 3, 64, 64.0, 168, 255, 1000, 123456789])
def test_the_scale_of_gemma_is_a_whole_number(scalar):
    written = config_json.to_fields(config_json.parse(gemma_fields(query_pre_attn_scalar=scalar)))["query_pre_attn_scalar"]
    assert (written, type(written)) == (scalar, int)


def test_the_scale_of_gemma_with_a_fraction_is_refused():
    with pytest.raises(ValueError, match=r"query_pre_attn_scalar as a whole number, and this model has 24.5: transformers"):
        config_json.to_fields(config_json.parse(gemma_fields(query_pre_attn_scalar=24.5)))


def test_a_gemma_without_windows_has_the_length_of_one():
    """transformers makes the mask of a window in every model."""
    fields = gemma_fields(layer_types=["full_attention"], num_hidden_layers=1, sliding_window=None)
    assert config_json.to_fields(config_json.parse(fields))["sliding_window"] == 4096


def test_yarn_that_transformers_reads_otherwise_is_refused():
    """For each kind of layer transformers looks for `truncate` in another place, so it is always true there."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "truncate": False}
    with pytest.raises(ValueError, match="truncate false, which transformers does not read for Gemma 3: delete it"):
        config_json.parse(gemma_fields(rope_scaling=yarn))


def test_numbers_of_numpy_are_written():
    config = altered(LEAST, rope_theta=np.float32(1e4), norm_eps=np.float64(1e-5), vocab_size=np.int64(40), max_positions=np.int32(64))
    assert config_json.parse(json.loads(json.dumps(config_json.to_fields(config))), dtype="float32") == config


def test_whole_numbers_are_written_as_floats_where_those_are_declared():
    yarn = RopeScaling("yarn", 2, 32, beta_fast=4, attention_factor=1)
    opened(fields := config_json.to_fields(altered(LEAST, norm_eps=0, rope_theta=10000, rope_scaling=yarn)))
    assert [type(fields[name]) for name in ("rms_norm_eps", "rope_theta")] == [float, float]
    assert type(fields["rope_parameters"]["attention_factor"]) is float


def test_every_rotary_fraction_gives_the_same_elements():
    """As transformers computes them. The plain quotient gives one less for 9,390 of these 262,144 pairs."""
    pairs = [(head_dim, rotated) for head_dim in range(2, 1025) for rotated in range(2, head_dim + 1, 2)]
    fractions = [rotary_fraction(rotated, head_dim) for head_dim, rotated in pairs]
    assert all(int(head_dim * each) == rotated for each, (head_dim, rotated) in zip(fractions, pairs, strict=True))
    assert max(fractions) == 1.0
    last = RECURRENT.layers[1]
    last = dataclasses.replace(last, mixer=dataclasses.replace(last.mixer, head_dim=44, rope=Rope(1e4, 30), sm_scale=44**-0.5))
    found = config_json.to_fields(dataclasses.replace(RECURRENT, layers=(last,)))
    assert config_json.parse(found, dtype="float32").layers == (last,)
    assert int(44 * opened(found).rope_parameters["partial_rotary_factor"]) == 30


# What is refused.


def rescaled(family, scale):
    """A tiny model of a family whose layers multiply scores by `scale`."""
    config = make_family(family).config
    layers = tuple(dataclasses.replace(each, mixer=dataclasses.replace(each.mixer, sm_scale=scale)) for each in config.layers)
    return dataclasses.replace(config, layers=layers)


LLAMA = altered(LEAST, family="llama", qkv_bias=False)
UNDESCRIBED = {
    "a scale with a fraction": (rescaled("gemma3_text", 24.5**-0.5), "query_pre_attn_scalar as a whole number, and this model has 24.5"),
    "a scale of its own": (rescaled("llama", 0.5), "describes one kind of layer"),
    "norms of another family": (altered(LLAMA, qk_norm=True), r"layers\[0\].mixer.qk_norm is True, and False would be read from it"),
    "windows that llama does not read": (altered(LLAMA, windows=(8, 8)), "transformers reads no window for it"),
    "heads that do not divide": (altered(LLAMA, num_heads=3, num_kv_heads=1), "hidden_size 16 is not a multiple of num_attention_heads 3"),
}


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_a_model_that_config_json_cannot_describe_is_refused(name, tmp_path):
    """Before anything is written."""
    config, message = UNDESCRIBED[name]
    with pytest.raises(ValueError, match=message):
        save(random_model(config=config), tmp_path / "deep" / "m")
    assert not any(tmp_path.iterdir())


UNREAD = {
    "int4 of 128 inputs": (
        "down",
        MatrixFormat("int4", 1, 128),
        r"mlp.down_proj \[32, 64\].*a multiple of 128 inputs, and it has 64",
    ),
    "int4 of 12 inputs": ("up", MatrixFormat("int4", 1, 12), "a multiple of 12 inputs, and it has 32"),
    "int8 of 24 inputs": ("q", MatrixFormat("int8", 1, 24), "a multiple of 24 inputs, and it has 32"),
    "two whole rows": ("o", MatrixFormat("int8", 2), "one scale for 2 whole rows"),
    "tokens": ("gate", MatrixFormat("fp8_e4m3", fp8_tokens=True), "save the model loaded as fp8 instead"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_matrices_that_transformers_cannot_read_are_refused(name, tmp_path):
    """Before anything is written."""
    key, own, message = UNREAD[name]
    model = random_model(config=altered(LEAST, hidden_size=32, intermediate_size=64))
    first, *others = model.params["layers"]
    changed = {key: pack(first.get(key, model.params.get(key)), own)}
    params = model.params | (changed if key == "embed" else {"layers": (first | changed, *others)})
    with pytest.raises(NotImplementedError, match=message):
        dataclasses.replace(model, params=params).save(tmp_path / "deep" / "m")
    assert not any(tmp_path.iterdir())


def test_a_scheme_is_refused_before_weights_are_read():
    config = altered(LEAST, hidden_size=128, intermediate_size=192, head_dim=32)
    saving.check_packing(config, SCHEMES["int8:128x128"].format_of)
    with pytest.raises(NotImplementedError, match=r"down_proj \[128, 192\] cannot be saved as int4:1x128"):
        saving.check_packing(config, SCHEMES["int4"].format_of)


# Interrupted saves.


class Tokenizer:
    """Writes one file. It has fewer ids than any model."""

    def save_pretrained(self, folder):
        """tokenizer.json."""
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("step", ["_write_weights", "_write_json", "save_pretrained"])
def test_what_an_interrupted_save_leaves_is_no_checkpoint(step, tmp_path, monkeypatch):
    """As a process that is killed before this step leaves it: nothing is removed."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(Tokenizer if step == "save_pretrained" else saving, step, killed)
    with pytest.raises(KeyboardInterrupt):
        save(random_model(tokenizer=Tokenizer()), tmp_path / "m")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".m.")
    assert (left / "model.safetensors").exists() == (step != "_write_weights")
    with pytest.raises(ValueError, match=r"holds no config.json"):
        load(left, tokenizer=False)


def test_config_json_is_written_last(tmp_path, monkeypatch):
    written, original = [], saving._write_json

    def write(path, content):
        written.append((path.name, sorted(each.name for each in path.parent.iterdir())))
        original(path, content)

    monkeypatch.setattr(saving, "_write_json", write)
    save(random_model(tokenizer=Tokenizer()), tmp_path / "m")
    assert written[-1] == ("config.json", ["generation_config.json", "model.safetensors", "tokenizer.json"])


@pytest.mark.parametrize("call", [1, 2])
def test_a_replacement_that_is_interrupted_leaves_the_old_model(call, tmp_path, monkeypatch):
    """At either of the two renames."""
    save(random_model(), tmp_path / "m")
    before, calls, replace = digest(tmp_path / "m"), [], os.replace

    def interrupted(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(random_model(jnp.bfloat16), tmp_path / "m", overwrite=True)
    assert digest(tmp_path / "m") == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# Models.


def test_the_golden_files_have_every_case():
    assert list(DIGESTS) == list(LOGITS) == [" ".join(case) for case in CASES]
    assert {family for family, _ in QUICK} == {*FAMILIES, *DENSE}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_is_saved_is_what_transformers_opened(case, tmp_path):
    """Byte for byte. After a change of what is written, run make_saves_golden.py again."""
    random_saved(*case)[0].save(tmp_path / "m")
    assert digest(tmp_path / "m") == DIGESTS[" ".join(case)]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.long) for case in CASES], ids=" ".join)
def test_logits_of_what_is_saved_are_those_of_transformers(case, tmp_path):
    save_case(*random_saved(*case), tmp_path / "m")
    assert np.abs(our_logits(tmp_path / "m")[-KEPT:] - LOGITS[" ".join(case)]).max() < TOLERANCE


def test_a_tied_head_is_the_packed_embedding(tmp_path):
    """transformers needs the head's scales too. They are read as the same matrix, and refused if they differ."""
    model = random_model(config=altered(LEAST, tie_embeddings=True))
    dataclasses.replace(model, params=pack_params(model.params, "int8")).save(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    assert (tensors["lm_head.weight_scale"] == tensors["model.embed_tokens.weight_scale"]).all()
    assert "lm_head.weight" not in tensors
    assert load(tmp_path / "m", tokenizer=False).config.tie_embeddings
    save_file(tensors | {"lm_head.weight_scale": tensors["lm_head.weight_scale"] * 2}, file)
    with pytest.raises(ValueError, match=r"lm_head.weight_scale differs from model.embed_tokens.weight_scale"):
        load(tmp_path / "m", tokenizer=False)


def test_transformers_opens_other_models(request, tmp_path):
    """Where there is a Python with torch."""
    python = request.config.getoption("--torch-python") or (sys.executable if importlib.util.find_spec("torch") else None)
    if python is None:
        pytest.skip("needs torch, or `--torch-python` with a Python that has it")
    folders = {case: tmp_path / " ".join(case) for case in QUICK}
    for case, folder in folders.items():
        save_case(*random_saved(*case, number=1), folder)
    for (case, folder), found in zip(folders.items(), run_open(python, folders.values()), strict=True):
        assert not isinstance(found, str), f"{case}: {found}"
        assert np.abs(our_logits(folder) - found).max() < TOLERANCE, case
