"""Whatever a checkpoint's files hold, loading it works or is a ValueError of one short line that names a file."""

import json
import re
import time

import pytest
from damaged_checkpoints import PACKED, damaged, originals, write
from hypothesis import HealthCheck, given, seed, settings

from kvjax.models import load, read_config
from kvjax.models.loading import read_packing
from kvjax.models.quantization.schemes import parse

FILES = re.compile(r"config\.json|\.safetensors|tokenizer|chat_template|special_tokens|holds no|weights|_proj")


def test_the_originals_load(tmp_path):
    for name, files in originals().items():
        assert load(write(tmp_path / "m", name, {}), tokenizer="tokenizer_config.json" in files).params


def refusal(read):
    """What a ValueError says, or None. Any other error is an error of the test."""
    try:
        read()
    except ValueError as error:
        return f"{type(error).__name__} instead of ValueError: {error}" if type(error) is not ValueError else str(error)
    return None


def check(folder, name, changes):
    """Read it in every way."""
    write(folder, name, changes)
    has_tokenizer = "tokenizer_config.json" in originals()[name]
    for read in (lambda: read_packing(folder, read_config(folder)), lambda: load(folder, tokenizer=has_tokenizer, dtype="float32")):
        started = time.monotonic()
        said = refusal(read)
        assert said is None or FILES.search(said), said
        assert said is None or ("\n" not in said and len(said) < 3000), said
        assert time.monotonic() - started < 20


CONFIG = [
    ({"model_type": ["llama"]}, r"config.json: model_type is \['llama'\]; it must be a name"),
    ({"architectures": "LlamaForCausalLM"}, "config.json: architectures is 'LlamaForCausalLM'; it must be a list of names"),
    ({"architectures": [["x"]]}, "it must be a list of names"),
    ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers is 1000000000; at most 10000 layers can be read"),
    ({"hidden_size": 10**400}, "config.json: hidden_size is 1000.*; it must be below 2147483648"),
    ({"rope_theta": 10**400}, "config.json: rope_theta is 1000.*; it must be a number of at most 1e"),
    ({"rope_theta": float("nan")}, "config.json: rope_theta is nan; it must be a number"),
    ({"rope_scaling": {"type": ["yarn"]}}, r"config.json: rope_scaling has type \[\['yarn'\]\]; it must be a name"),
    ({"num_key_value_heads": 3}, "config.json: num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"quantization_config": {"quant_method": ["fp8"]}}, r"config.json: quantization_config has quant_method \['fp8'\]"),
    (
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": 5}}},
        "config.json: weights of g of quantization_config",
    ),
    ({"x" * 5000: {"y" * 5000: 1}}, None),
    ({f"x{n}": 1 for n in range(100_000)}, "config.json has 100000 fields that kvjax does not know; at most 200 are looked up"),
    ({"attention_chunk_size": ["z" * 5000]}, "config.json of a LlamaForCausalLM: attention_chunk_size is"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG, ids=[str(fields)[:40] for fields, _ in CONFIG])
def test_fields_of_other_types(fields, message, tmp_path):
    plain = json.loads(originals()["single"]["config.json"]) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    said = refusal(lambda: read_config(write(tmp_path / "m", "single", {"config.json": json.dumps(plain | fields).encode()})))
    assert (said is None) == (message is None), said
    assert message is None or (re.search(message, said) and len(said) < 1000), said


FILES_IN_PLACE = [
    ("config.json", "folder", "config.json is a folder, and must be a file"),
    ("generation_config.json", "folder", "generation_config.json is a folder"),
    ("model.safetensors", "folder", "model.safetensors is a folder"),
    ("tokenizer.json", "folder", "tokenizer.json is a folder"),
    ("tokenizer_config.json", "loop", "tokenizer_config.json is a link that leads to no file"),
    ("config.json", "pipe", "config.json is no ordinary file"),
    ("config.json", "nowhere", "config.json is a link that leads to no file"),
    ("config.json", b'{"a":' * 100_000, "config.json holds lists or objects more than 50 deep"),
    ("config.json", b'{"model_type": ' + b"[" * 60 + b"]" * 60 + b"}", "config.json holds lists or objects more than 50 deep"),
    ("config.json", b'{"model_type": "\xff"}', "config.json is not JSON"),
    ("tokenizer_config.json", b"[]", "tokenizer_config.json must hold a JSON object"),
    ("model.safetensors", b"\xff" * 8 + b"{}", "model.safetensors is not a whole safetensors file"),
]


@pytest.mark.parametrize(
    ("file", "content", "message"), FILES_IN_PLACE, ids=[f"{file} {str(what)[:9]}" for file, what, _ in FILES_IN_PLACE]
)
def test_files_that_are_something_else(file, content, message, tmp_path):
    said = refusal(lambda: load(write(tmp_path / "m", "single", {file: content})))
    assert said is not None
    assert re.search(message, said), said


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 5000 + "/b", "a\0b", "/" + "a" * 5000, "~nobody/x"])
def test_names_that_cannot_be_folders(name):
    said = refusal(lambda: read_config(name))
    assert said is not None
    assert len(said) < 1000


def test_an_expression_that_does_not_end_is_refused():
    endless = "re:" + "(.*)" * 8 + r"(?=\1\2\3\4x)"
    said = refusal(lambda: parse(QUANTIZED | {"ignore": [endless]}).format_of("model.layers.0.self_attn.q_proj.weight", "q", (8, 8)))
    assert said is not None
    assert "in quantization_config takes too long to match model.layers.0.self_attn.q_proj" in said


QUANTIZED = PACKED["compressed"][0]
OPTIONS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=150, derandomize=True, **OPTIONS)
@given(case=damaged())
def test_damaged_checkpoints(case, tmp_path_factory):
    check(tmp_path_factory.getbasetemp() / "damaged", *case)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_damaged_checkpoints(part, tmp_path):
    """A thousand in each part."""

    @seed(part)
    @settings(max_examples=1000, **OPTIONS)
    @given(case=damaged())
    def run(case):
        check(tmp_path / "m", *case)

    run()
