"""Checkpoints that others load: each is the same model, weights and configuration, as its plain form, whose logits
golden files hold."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.model.identity import fingerprint
from kvjax.models import load
from kvjax.models.config_json import parse

GOLDEN = Path(__file__).with_name("golden")
TIED, UNTIED, GEMMA, WHOLE = "qwen3-g7-d32-tied-yarn", "llama-g4-d64-llama3", "gemma3/g1-d32", "gemma3/whole"
DEEPSEEK = next(path.parent for path in sorted((GOLDEN / "deepseek").glob("*/config.json"))).relative_to(GOLDEN)
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def same(folder, case):
    """Whether a folder holds the same model as a golden one."""
    found, want = (load(each, tokenizer=False, dtype="float32") for each in (folder, GOLDEN / case))
    return found.config == want.config and fingerprint(found) == fingerprint(want)


@pytest.fixture
def changed(tmp_path):
    """`changed(case, change, edit)`: a copy of a golden model, its config.json through `change` and its tensors through
    `edit`."""

    def copy(case, change=None, edit=None):
        folder = tmp_path / "changed"
        shutil.copytree(GOLDEN / case, folder)
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields if change is None else change(fields)))
        if edit is not None:
            tensors = load_file(folder / "model.safetensors")
            edit(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return copy


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        (UNTIED, {"_model_name_or_path": "here.gguf", "auto_map": {}, "use_flash_attn": True, "keys_to_ignore_at_inference": ["past"]}),
        (GEMMA, {"_model_name_or_path": "here.gguf", "auto_map": {}}),
        (DEEPSEEK, {"output_router_logits": False}),
    ],
)
def test_fields_that_change_nothing(case, fields, changed):
    assert same(changed(case, lambda given: given | fields), case)


def test_deepseek_as_transformers_5_24_writes_it(changed):
    def newer(fields):
        return fields | {"output_router_logits": False, "layer_types": ["indexed_attention"] * fields["num_hidden_layers"]}

    assert same(changed(DEEPSEEK, newer), DEEPSEEK)


# Tied or not.


@pytest.mark.parametrize(
    ("outer", "inner"), [(None, False), (True, False), (False, True), (None, True), (True, None), (None, None), (True, True)]
)
def test_a_larger_model_is_tied_if_either_configuration_says_so(outer, inner, changed):
    """And stores no head. transformers 5 reads the outer one (by default true), transformers 4 the inner one."""

    def change(fields):
        of_text = {name: value for name, value in fields["text_config"].items() if name != "tie_word_embeddings"}
        fields = {name: value for name, value in fields.items() if name != "tie_word_embeddings"} | {"text_config": of_text}
        fields |= {} if outer is None else {"tie_word_embeddings": outer}
        of_text |= {} if inner is None else {"tie_word_embeddings": inner}
        return fields

    assert HEAD not in load_file(GOLDEN / WHOLE / "model.safetensors")
    assert same(changed(WHOLE, change), WHOLE)


@pytest.mark.parametrize(("outer", "inner"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_stored_head_that_differs_is_used_whatever_they_say(outer, inner, changed):
    def change(fields):
        return fields | {"tie_word_embeddings": outer, "text_config": fields["text_config"] | {"tie_word_embeddings": inner}}

    def edit(tensors):
        tensors["language_model.lm_head.weight"] = 2 * tensors["language_model.model.embed_tokens.weight"]

    model = load(changed(WHOLE, change, edit), tokenizer=False, dtype="float32")
    np.testing.assert_array_equal(model.params["lm_head"], 2 * model.params["embed"])


def test_both_say_that_it_is_not_tied_and_no_head_is_stored(changed):
    def change(fields):
        return fields | {"tie_word_embeddings": False, "text_config": fields["text_config"] | {"tie_word_embeddings": False}}

    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        load(changed(WHOLE, change), tokenizer=False)


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_tie_word_embeddings_is_true_or_false(where, changed):
    def change(fields):
        wrong = {"tie_word_embeddings": 1}
        return fields | (wrong if where == "outer" else {"text_config": fields["text_config"] | wrong})

    with pytest.raises(ValueError, match="tie_word_embeddings is 1; it must be true or false"):
        load(changed(WHOLE, change), tokenizer=False)


@pytest.mark.parametrize("how", ["listed, not held", "held, not listed", "held and listed"])
def test_a_head_of_a_tied_model_that_the_index_or_a_shard_has(how, changed):
    """Two shards. The head, if one is stored, is the embedding."""
    folder = changed(TIED)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = {first: {name: tensors[name] for name in names[:9]}, second: {name: tensors[name] for name in names[9:]}}
    weight_map = {name: file for file, held in shards.items() for name in held}
    weight_map |= {HEAD: second} if "not listed" not in how else {}
    shards[second] |= {HEAD: tensors[EMBED]} if "not held" not in how else {}
    for file, held in shards.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same(folder, TIED)


def test_a_head_of_an_untied_model_may_be_missing_in_the_index(changed):
    folder = changed(UNTIED)
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names - {HEAD}, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(folder, UNTIED)


# RoPE of Gemma 3.

TINY_GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window_pattern": 2}
LINEAR = {"type": "linear", "factor": 8.0}


def test_a_scaling_with_type_alone_says_how_it_is_read(caplog):
    """transformers 4 scales, transformers 5.17 and 5.24 do not."""
    named = parse(TINY_GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert named.layers[1].mixer.rope.scaling.factor == 8.0
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert parse(TINY_GEMMA | {"rope_scaling": LINEAR}) == named
    (said,) = [record.getMessage() for record in caplog.records]
    assert "rope_scaling has type 'linear' and no rope_type: type is read, as in transformers 4; transformers 5 reads no scaling" in said


def test_objects_of_both_kinds_of_layer_may_say_type():
    ropes = {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": {"type": "default", "rope_theta": 1e4}}
    assert parse(TINY_GEMMA | {"rope_parameters": ropes}) == parse(TINY_GEMMA | {"rope_scaling": LINEAR})
