"""config.json: released models parse, both spellings agree, and whatever is not understood is an error that names
it."""

import dataclasses
import json
from pathlib import Path

import pytest
from released_models import (
    BASES,
    LLAMA_3_1_8B,
    LLAMA_3_8B,
    QWEN_2_5_7B,
    QWEN_2_5_7B_INSTRUCT,
    QWEN_2_5_7B_INSTRUCT_1M,
    QWEN_3_0_6B,
    QWEN_3_8B,
    RELEASED,
    spelled_as_transformers_5,
)
from tiny_models import altered, flat

from kvjax.model import rope
from kvjax.model.config import RopeScaling
from kvjax.models import config_classes, config_json
from kvjax.models.families import FAMILIES

GOLDEN = Path(__file__).with_name("golden")
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())

UNIFORM = ("llama", "qwen2", "qwen3")
"""The first families; the others have tests of their own (test_families.py)."""


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_parse_in_both_spellings(name):
    fields, num_params = RELEASED[name]
    config = config_json.parse(fields)
    assert num_params is None or config.num_params == num_params
    assert config_json.parse(spelled_as_transformers_5(fields)) == config
    assert config_json.parse(fields | spelled_as_transformers_5(fields)) == config
    assert hash(config) == hash(config_json.parse(json.loads(json.dumps(fields))))


def test_fields_arrive_where_they_belong():
    config = config_json.parse(LLAMA_3_1_8B)
    assert (flat(config).num_heads, flat(config).num_kv_heads, flat(config).head_dim) == (32, 8, 128)
    assert (flat(config).rope_theta, config.norm_eps, config.max_positions, config.tie_embeddings) == (5e5, 1e-5, 131072, False)
    assert flat(config).rope_scaling == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((128001, 128008, 128009), 128000)
    assert (flat(config).qkv_bias, flat(config).qk_norm) == (False, False)
    assert flat(config_json.parse(QWEN_2_5_7B)).qkv_bias
    qwen3 = config_json.parse(QWEN_3_0_6B)
    assert (flat(qwen3).qk_norm, flat(qwen3).qkv_bias, flat(qwen3).head_dim, qwen3.hidden_size) == (True, False, 128, 1024)


def test_absent_fields_take_transformers_defaults():
    """The values are those of transformers 5.17's configuration classes."""
    llama, qwen2, qwen3 = (config_json.parse({"model_type": name}) for name in ("llama", "qwen2", "qwen3"))
    assert (llama.vocab_size, flat(llama).num_kv_heads, flat(llama).head_dim, llama.max_positions) == (32000, 32, 128, 2048)
    assert (llama.norm_eps, flat(llama).rope_theta, llama.bos_token_id, llama.eos_token_ids) == (1e-6, 1e4, 1, (2,))
    assert (qwen2.vocab_size, flat(qwen2).intermediate_size, qwen2.max_positions, qwen2.eos_token_ids) == (151936, 22016, 32768, ())
    assert flat(config_json.parse({"model_type": "qwen3", "hidden_size": 1024})).head_dim == 128
    assert flat(qwen3).num_kv_heads == 32
    assert flat(config_json.parse(LLAMA_3_1_8B | {"num_key_value_heads": None})).num_kv_heads == 32


def test_eos_ids_of_generation_config_come_first():
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT, {"eos_token_id": [151645, 151643], "top_k": 20}).eos_token_ids == (151645, 151643)
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT, {"eos_token_id": None}).eos_token_ids == (151645,)
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT, {}).eos_token_ids == (151645,)


def test_yarn_as_the_model_cards_add_it():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = config_json.parse(QWEN_2_5_7B_INSTRUCT | {"rope_scaling": yarn})
    assert config.max_positions == 131072
    assert flat(config).rope_scaling.attention_factor == pytest.approx(1.1386294361119891)
    renamed = {"rope_type": "yarn"} | {k: v for k, v in yarn.items() if k != "type"}
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT | {"rope_scaling": renamed}) == config
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT | {"rope_scaling": yarn | {"rope_type": "yarn"}}) == config


def test_positions_that_need_dual_chunk_attention_are_not_offered():
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT_1M).max_positions == 262144
    assert config_json.parse(QWEN_2_5_7B_INSTRUCT_1M | {"dual_chunk_attention_config": None}).max_positions == 1010000


@pytest.mark.parametrize("name", [*RELEASED, *CASES])
def test_written_fields_read_back_the_same(name):
    fields = RELEASED[name][0] if name in RELEASED else json.loads((GOLDEN / name / "config.json").read_text())
    config = config_json.parse(fields)
    written = json.loads(json.dumps(config_json.to_fields(config)))
    assert config_json.parse(written) == config
    assert config_json.parse(written, config_json.to_generation_fields(config)) == config
    old = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")} | {"torch_dtype": written["dtype"]}
    new = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    assert config_json.parse(old) == config_json.parse(new) == config
    written_none = config_json.to_fields(dataclasses.replace(config, eos_token_ids=(), bos_token_id=None))
    assert config_json.parse(written_none).eos_token_ids == ()


LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 64, "long_factor": [2] * 64, "original_max_position_embeddings": 4096}
EVERY_FAMILY = {
    "chunks": ({"attention_chunk_size": 4}, "attention_chunk_size is 4: .* of transformers reads it, and kvjax does not"),
    "shared keys and values": ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20: .* of transformers reads it, and"),
    "layers of their own": (
        {"per_layer_config": {"0": {"num_key_value_heads": 1}}},
        "per_layer_config is .* of transformers reads it, and kvjax does not",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    "quantization": ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; supported: None"),
    "remote code": ({"auto_map": {"AutoModel": "m.M"}}, "auto_map is"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: None or 1.0"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    "moe": ({"num_experts": 64}, "num_experts is 64"),
    "text for number": ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be an integer"),
    "flag for number": ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be an integer"),
    "fraction": ({"num_attention_heads": 8.5}, "num_attention_heads is 8.5"),
    "number for flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    "null size": ({"vocab_size": None}, "vocab_size is None"),
    "negative size": ({"intermediate_size": -1}, "intermediate_size is -1"),
    "bad eos": ({"eos_token_id": ["</s>"]}, "eos_token_id is '</s>'"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a positive integer"),
    "epsilon": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    "rope list": ({"rope_scaling": [1]}, "rope_scaling is \\[1\\]; it must be an object"),
    "dynamic without factor": ({"rope_scaling": {"type": "dynamic"}}, "factor is None"),
    "dynamic shrinks": ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor 0.5"),
    "dynamic of Hunyuan": ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, "type dynamic has alpha = 1000.0"),
    "linear without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
    "linear shrinks": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor 0.5"),
    "longrope without factors": (
        {"rope_scaling": {"type": "longrope", "long_factor": [2] * 64}},
        "short_factor is None; it must be a list",
    ),
    "longrope of another head": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1] * 48, "long_factor": [2] * 64}},
        "short_factor of longrope has 48 numbers; 128 rotated elements of a head need 64",
    ),
    "longrope of another head, long": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1] * 64, "long_factor": [2] * 65}},
        "long_factor of longrope has 65 numbers",
    ),
    "longrope below 0": ({"rope_scaling": LONGROPE | {"short_factor": [1] * 63 + [-1]}}, "short_factor has -1.0"),
    "longrope in words": ({"rope_scaling": LONGROPE | {"long_factor": ["2"] * 64}}, "long_factor is '2'; it must be a number"),
    "longrope attention": ({"rope_scaling": LONGROPE | {"attention_factor": 0}}, "attention_factor is 0.0; it must be above 0"),
    "longrope of Phi-3": ({"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, "longrope has short_mscale = 1.1"),
    "longrope of one token": ({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}}, "needs at least 2"),
    "two lengths": (
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 8192},
        "is 8192, and 4096 in rope_scaling; they must agree",
    ),
    "mrope": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "rope_type 'mrope'; supported: default, linear, dynamic,",
    ),
    "two types": ({"rope_scaling": {"type": "yarn", "rope_type": "llama3", "factor": 2.0}}, "must agree"),
    "unknown rope key": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}}, "finetuned = True"),
    "llama3 key in yarn": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
    "factor without type": ({"rope_scaling": {"factor": 2.0}}, "type default has factor"),
    "partial in rope": ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "needs factor"),
    "yarn shrinks": ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor 0.5"),
    "yarn betas": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32}}, "beta_slow 32.0"),
    "yarn attention": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1}}, "attention_factor is -1.0"),
    "llama3 incomplete": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    "llama3 band": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "below high_freq_factor 1.0",
    ),
    "two thetas": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta more than once"),
    "two scalings": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling .* disagree",
    ),
    "theta": ({"rope_theta": 0.5}, "rope_theta is 0.5"),
}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
ONE_FAMILY = {
    "llama": [
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'; it must be true or false"),
        ({"sliding_window": 4096}, "sliding_window is 4096: 32 of 32 layers.*a sliding window of 4096 tokens.*max_positions=4096"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, "hidden_size 4096 is not a multiple"),
        ({"num_key_value_heads": 5}, "not a multiple of num_kv_heads 5"),
    ],
    "qwen2": [
        ({"use_sliding_window": 1, "sliding_window": 4096}, "use_sliding_window is 1; it must be true or false"),
        (
            TWO_LAYERS | {"use_sliding_window": False, "sliding_window": 4096},
            "4096, and layer_types names .*: 1 of 2 layers .*set use_sliding_window to true.*max_positions=4096",
        ),
        (TWO_LAYERS | {"sliding_window": None}, "layer_types names layers of sliding_attention; give the window's length"),
        ({"use_mrope": True}, "use_mrope is True"),
        ({"attention_bias": True}, "attention_bias is True; supported: None or False .this architecture does not read it: .* delete it"),
        ({"mlp_bias": True}, "mlp_bias is True; supported: None or False .this architecture does not read it: .* delete it"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "original_max_position_embeddings is None"),
    ],
    "qwen3": [
        ({"use_sliding_window": 1, "sliding_window": 4096}, "use_sliding_window is 1; it must be true or false"),
        (
            TWO_LAYERS | {"use_sliding_window": False, "sliding_window": 4096},
            "4096, and layer_types names .*: 1 of 2 layers .*set use_sliding_window to true.*max_positions=4096",
        ),
        (TWO_LAYERS | {"sliding_window": None}, "layer_types names layers of sliding_attention; give the window's length"),
        ({"attention_bias": 0}, "attention_bias is 0; it must be true or false"),
        ({"mlp_bias": True}, "mlp_bias is True; supported: None or False .this architecture does not read it: .* delete it"),
        ({"head_dim": None}, "head_dim is null"),
    ],
}


@pytest.mark.parametrize("family", UNIFORM)
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_what_is_not_supported_is_named(family, name):
    change, message = EVERY_FAMILY[name]
    with pytest.raises(ValueError, match=message.replace("{family}", family)):
        config_json.parse(BASES[family] | change)


@pytest.mark.parametrize(("family", "change", "message"), [(f, *entry) for f, entries in ONE_FAMILY.items() for entry in entries])
def test_what_a_family_does_not_support_is_named(family, change, message):
    with pytest.raises(ValueError, match=message):
        config_json.parse(BASES[family] | change)


UNREAD = {
    "_model_name_or_path": "org/other",
    "use_flash_attn": True,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "attention_sink_size": 4,
    "name_or_path": "here",
    "quantization": {"bits": 4},
    "watermarking_config": None,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_does_not_read_is_ignored_with_one_line(family, caplog):
    """transformers decides: neither the family's configuration class nor the source of its model reads these."""
    sizes = {"model_type": family, "num_hidden_layers": 1} | ({"first_k_dense_replace": 1} if family == "deepseek_v32" else {})
    base = config_json.parse(sizes | {"auto_map": None})
    caplog.clear()
    assert config_json.parse(sizes | UNREAD | {"auto_map": {}}) == base
    (said,) = [record.getMessage() for record in caplog.records]
    names = "_model_name_or_path, attention_sink_size, keys_to_ignore_at_inference, name_or_path, quantization, use_flash_attn"
    assert said.endswith(f"ForCausalLM of transformers does not read it: {names}, watermarking_config")


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"attention_chunk_size": None}, False),
        ({"attention_chunk_size": 8}, True),
        ({"num_kv_shared_layers": 0}, False),
        ({"per_layer_config": None}, False),
        ({"output_router_logits": True}, False),
    ],
)
def test_a_field_of_transformers_is_refused_unless_it_changes_nothing(fields, read):
    if not read:
        assert config_json.parse(LLAMA_3_8B | fields) == config_json.parse(LLAMA_3_8B)
        return
    with pytest.raises(ValueError, match="of transformers reads it, and kvjax does not"):
        config_json.parse(LLAMA_3_8B | fields)


def test_a_field_of_the_class_has_to_have_its_default(monkeypatch):
    """A newer transformers may add a field to a class: it is refused, unless it has the default of the class."""
    import transformers

    class Newer(transformers.LlamaConfig):
        model_type = "llama"
        shifted_heads: int = 0

    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "llama", Newer)
    config_classes._class_of.cache_clear()
    try:
        assert config_json.parse(LLAMA_3_8B | {"shifted_heads": 0}) == config_json.parse(LLAMA_3_8B)
        with pytest.raises(ValueError, match="shifted_heads is 2: Newer of transformers reads it, and kvjax does not; supported: 0"):
            config_json.parse(LLAMA_3_8B | {"shifted_heads": 2})
        with pytest.raises(ValueError, match="shifted_heads is False: Newer"):
            config_json.parse(LLAMA_3_8B | {"shifted_heads": False})
    finally:
        config_classes._class_of.cache_clear()


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"mlp_bias is True.*attention_chunk_size is 1") as error:
        config_json.parse(QWEN_2_5_7B | {"mlp_bias": True, "attention_chunk_size": 1, "foo": 1})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            "architectures is .'MixtralForCausalLM'.; the nearest supported family is llama; .* experts",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "Other"),
        (
            {"architectures": None, "model_type": "qwen3_moe"},
            "model_type is 'qwen3_moe'; the nearest supported family is qwen3; .* experts",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, "must name one family"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
    ],
)
def test_unknown_architectures_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        config_json.parse(LLAMA_3_1_8B | change)


def test_either_name_of_the_family_is_enough():
    config = config_json.parse(QWEN_3_8B)
    for absent in ("architectures", "model_type"):
        assert config_json.parse({k: v for k, v in QWEN_3_8B.items() if k != absent}) == config


FIELDS = json.loads((GOLDEN / "config-fields.json").read_text())
REFUSED = [  # though transformers computes the same: they ask for what the family, or this version of transformers, does not do
    {"mlp_bias": True},
    {"attention_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"partial_rotary_factor": 0.5},
    {"attention_chunk_size": 8},
]


def parsed(family, fields):
    """The configuration, or None where it is refused."""
    try:
        return config_json.parse({"model_type": family} | FIELDS["base"] | fields, dtype="float32")
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("family", "fields", "outcome"), [case for case in FIELDS["tried"] if case[0] in UNIFORM], ids=lambda value: str(value)[:60]
)
def test_a_field_does_what_it_does_in_transformers(family, fields, outcome):
    """Where it changes nothing there the model loads the same; where it changes something it is read or refused."""
    found, base = parsed(family, fields), parsed(family, {})
    if outcome == "other":
        assert found != base
    elif outcome == "same":
        assert found == (None if fields in REFUSED else computing_the_same(found, base))


def computing_the_same(found, base):
    """`base`, with a scaling that `found` has where it changes no frequency within the model's positions."""
    if found is None or flat(found).rope_scaling is None:
        return base
    turned, scaling = found.layers[0].mixer.rope, flat(found).rope_scaling
    assert (rope.frequencies(turned), scaling.attention_factor) == (rope.frequencies(base.layers[0].mixer.rope), 1.0)
    return altered(base, rope_scaling=scaling)


@pytest.mark.parametrize("family", UNIFORM)
def test_every_field_that_transformers_writes_loads(family):
    """With the values that transformers takes where config.json has none."""
    written = config_json.parse(FIELDS["defaults"][family])
    assert written == config_json.parse({"model_type": family})


@pytest.mark.parametrize("family", UNIFORM)
@pytest.mark.parametrize("types", ["full_attention", ["full_attention"], ["chunked_attention"] * 3])
def test_layer_types_must_name_every_layer(family, types):
    with pytest.raises(ValueError, match="one for each of 3 layers"):
        config_json.parse({"model_type": family} | FIELDS["base"] | {"layer_types": types})


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"quantization_config": {"bits": 4}}, "load the checkpoint that it was quantized from"),
        ({"auto_map": {"AutoModel": "m.M"}}, "delete it from config.json"),
        ({"attention_chunk_size": 4}, "if you know that it changes nothing, delete it from config.json"),
    ],
)
def test_a_refused_field_comes_with_a_remedy(fields, remedy):
    with pytest.raises(ValueError, match=remedy):
        config_json.parse(LLAMA_3_1_8B | fields)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_left_out_is_transformers_own(family):
    """config.json that only switches it on gets 4,096 tokens, in both."""
    bare = {"model_type": family, "num_hidden_layers": 2, "max_window_layers": 1, "use_sliding_window": True}
    assert transformers_config(family, bare).sliding_window == 4096
    assert flat(config_json.parse(bare | {"max_position_embeddings": 4097})).windows == (None, 4096)
    assert config_json.parse(bare | {"max_position_embeddings": 4096}).max_positions == 4096
    assert config_json.parse(bare | {"max_position_embeddings": 32768}, None, 4096).max_positions == 4096


def transformers_config(family, fields):
    import transformers

    return transformers.AutoConfig.for_model(**json.loads(json.dumps({"model_type": family} | fields)))


def test_windows_that_reach_everything_have_no_effect():
    base = config_json.parse(QWEN_2_5_7B)
    on = {"use_sliding_window": True, "sliding_window": 131072, "max_window_layers": 0}
    assert config_json.parse(QWEN_2_5_7B | on) == base
    assert config_json.parse(QWEN_2_5_7B | on | {"sliding_window": 64, "max_window_layers": 28}) == base
    assert flat(config_json.parse(QWEN_2_5_7B | on | {"sliding_window": 131071})).windows == (131071,) * 28


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"max_window_layers": 1}, (None, 64, 64)),
        ({"max_window_layers": 0}, (64, 64, 64)),
        ({"max_window_layers": -1}, (64, 64, 64)),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (64, None, 64)),
        ({"max_window_layers": 0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, (64, 64, 64)),
    ],
)
def test_windows_are_read_and_written(family, fields, windows):
    base = {"model_type": family, "num_hidden_layers": 3, "max_position_embeddings": 4096, "use_sliding_window": True, "sliding_window": 64}
    config = config_json.parse(base | fields)
    assert flat(config).windows == windows
    written = config_json.to_fields(config)
    assert config_json.parse(written) == config
    # Dynamic RoPE is written with the length from which it scales, so a model that is loaded for less keeps its
    # windows.
    assert flat(config_json.parse(base | fields, None, 64)).windows == (windows if "rope_scaling" in fields else ())
    with pytest.raises(ValueError, match=r"one sliding_window for all layers, but the model has \[64, 65\]"):
        config_json.to_fields(altered(config, windows=(64, 65, None)))


@pytest.mark.parametrize("family", UNIFORM)
def test_a_model_may_be_loaded_for_less(family):
    base = config_json.parse(BASES[family])
    assert config_json.parse(BASES[family], None, 1000) == dataclasses.replace(base, max_positions=1000)
    assert config_json.parse(BASES[family], None, base.max_positions) == base
    for wrong in (0, base.max_positions + 1, 8.0, True, "8k"):
        with pytest.raises(ValueError, match=f"it must be from 1 to {base.max_positions}, the model's positions"):
            config_json.parse(BASES[family], None, wrong)


def test_yarn_may_be_loaded_up_to_its_stretched_length():
    fields = QWEN_2_5_7B_INSTRUCT | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
    assert config_json.parse(fields, None, 131072) == config_json.parse(fields)
    with pytest.raises(ValueError, match="from 1 to 131072"):
        config_json.parse(fields, None, 131073)


def test_dynamic_scaling_ends_where_it_would_begin():
    fields = LLAMA_3_8B | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    config = config_json.parse(fields)
    assert flat(config).rope_scaling == RopeScaling("dynamic", 4.0, 8192)
    assert config.max_positions == 8192
    with pytest.raises(ValueError, match="rope_scaling of kind dynamic serves 8,192"):
        dataclasses.replace(config, max_positions=8193)
    less = config_json.parse(fields, None, 100)
    assert config_json.to_fields(less)["max_position_embeddings"] == 8192, "where transformers begins to stretch"
    assert config_json.parse(config_json.to_fields(less), None, 100) == less


@pytest.mark.parametrize("family", UNIFORM)
def test_longrope_is_loaded_for_short_or_long_sequences(family):
    sizes = {"max_position_embeddings": 131072, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    fields = BASES[family] | sizes | {"rope_scaling": LONGROPE}
    short, long = config_json.parse(fields), config_json.parse(fields, None, 8192)
    assert (short.max_positions, flat(short).rope_scaling.long) == (4096, False)
    assert (long.max_positions, flat(long).rope_scaling.long) == (8192, True)
    assert config_json.parse(fields, None, 4096) == short
    assert flat(config_json.parse(fields, None, 4097)).rope_scaling == flat(long).rope_scaling
    beside = fields | {"rope_scaling": {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}}
    assert config_json.parse(beside | {"original_max_position_embeddings": 4096}) == short
    assert config_json.parse(spelled_as_transformers_5(fields)) == short
    with pytest.raises(ValueError, match="serves 4,096: load it with max_positions=131072"):
        dataclasses.replace(short, max_positions=5000)
    assert config_json.parse(json.loads(json.dumps(config_json.to_fields(short)))) == short
    assert config_json.parse(json.loads(json.dumps(config_json.to_fields(long))), None, 8192) == long
    read = transformers_config(family, config_json.to_fields(long))
    assert read.max_position_embeddings == 131072
    assert read.rope_parameters["original_max_position_embeddings"] == 4096
    assert read.rope_parameters["attention_factor"] == flat(long).rope_scaling.attention_factor


@pytest.mark.parametrize(("tokens", "helps"), [(4096, False), (4097, True), (131072, True), (131073, False)])
def test_what_helps_with_a_longer_sequence(tokens, helps):
    fields = LLAMA_3_1_8B | {"rope_scaling": LONGROPE}
    short, long = config_json.parse(fields), config_json.parse(fields, None, 8192)
    assert ("load it with max_positions=131072" in short.for_longer(tokens)) == helps
    assert long.for_longer(tokens) == config_json.parse(LLAMA_3_1_8B).for_longer(tokens) == ""


BIASED = ((False, None), (True, None), (None, True))


def test_biases_are_counted():
    plain, attention, mlp = (config_json.parse(LLAMA_3_1_8B | {"attention_bias": a, "mlp_bias": m}) for a, m in BIASED)
    assert (flat(plain).qkv_bias, flat(plain).o_bias, flat(plain).mlp_bias) == (False, False, False)
    assert (flat(attention).qkv_bias, flat(attention).o_bias, flat(attention).mlp_bias) == (True, True, False)
    assert (flat(mlp).qkv_bias, flat(mlp).o_bias, flat(mlp).mlp_bias) == (False, False, True)
    assert attention.num_params - plain.num_params == 32 * (4096 + 2 * 1024 + 4096)
    assert mlp.num_params - plain.num_params == 32 * (2 * 14336 + 4096)
