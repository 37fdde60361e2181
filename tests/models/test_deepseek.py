"""DeepSeek-V3.2 with dense MLPs computes what transformers computes: golden logits and greedy tokens, and wrong models
that must fail."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_family import TOLERANCE, GoldenFamily, check_engine
from quick_cases import rest_long
from released_models import DEEPSEEK_V3_2
from safetensors.numpy import load_file

from kvjax.engine.engine import Engine
from kvjax.models import deepseek_v32, load
from kvjax.models.config_json import parse, to_fields
from kvjax.models.decoder import TransformerDecoder

pytestmark = pytest.mark.bits

FAMILY = GoldenFamily("deepseek")
GOLDEN, CASES, golden_case = FAMILY.folder, FAMILY.cases, FAMILY.case
FIRST, YARN = "h3-k9-tied", "h3-k9-yarn"
PAGE, CHUNK = 8, 16


def test_cases_cover_what_they_must(monkeypatch):
    configs = FAMILY.configs(monkeypatch)
    mixers = [config.layers[0].mixer for config in configs]
    assert {config.tie_embeddings for config in configs} == {True, False}
    assert {config.num_layers for config in configs} == {1, 2, 3}
    assert {mixer.num_heads for mixer in mixers} == {1, 2, 3, 4, 7, 8}
    assert {mixer.rope.scaling and mixer.rope.scaling.kind for mixer in mixers} == {None, "linear", "llama3", "yarn"}
    assert len({mixer.index_topk for mixer in mixers if mixer.index_topk < 48}) > 5
    scaled = [mixer for mixer in mixers if mixer.sm_scale != (mixer.nope_dim + mixer.rope.dim) ** -0.5]
    assert len(scaled) == 1, "one has mscale_all_dim"


@pytest.mark.quick_but("h8-k20-llama3", "h3-k9-tied")
@pytest.mark.parametrize("name", rest_long(CASES, "h1-k8", "h2-k5-one-layer", "h3-k9-yarn", "h8-k20-llama3", "h3-k9-tied"))
def test_logits_and_greedy_tokens(name, complete):
    FAMILY.check_logits(name, complete)


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(each, marks=pytest.mark.long) for each in ("h4-k16-three-layers", "h2-k100-all-tokens"))]
)
def test_the_engine_gives_the_golden_logits_and_tokens_however_the_prompt_is_cut(name):
    model, want = golden_case(name)
    engine = Engine(model, pages=32, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(1, 4))
    assert str(engine.policy) == str(engine.prefill_policy) == f"tokens:{model.config.layers[0].mixer.index_topk}"
    check_engine(engine, want)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_is_the_same(name, tmp_path):
    """Weights bit for bit, and the fields that transformers wrote."""
    model = load(GOLDEN / name, dtype=jnp.float32, tokenizer=False)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype="auto", tokenizer=False)
    assert [layer.mixer.sm_scale for layer in again.config.layers] == pytest.approx([layer.mixer.sm_scale for layer in model.config.layers])
    same = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, sm_scale=before.mixer.sm_scale))
        for layer, before in zip(again.config.layers, model.config.layers, strict=True)
    )
    assert dataclasses.replace(again.config, layers=same) == model.config
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path / "saved"))
    scaling, written = (each.pop("rope_parameters") for each in (theirs, ours))
    assert {field: value for field, value in scaling.items() if field != "mscale"}.items() <= written.items()
    assert {field for field, value in theirs.items() if field in ours and ours[field] != value} == set()
    stored, kept = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path / "saved"))
    assert kept.keys() == stored.keys()
    assert all((kept[tensor] == stored[tensor]).all() for tensor in stored)


# Wrong models. Each takes a model and returns (decoder, params).


def reconfigure(**changes):
    return lambda model: (TransformerDecoder(dataclasses.replace(model.config, **changes)), model.params)


def mixers(**changes):
    def mutant(model):
        changed = (dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes)) for layer in model.config.layers)
        return reconfigure(layers=tuple(changed))(model)

    return mutant


def rope(**changes):
    return lambda model: mixers(rope=dataclasses.replace(model.config.layers[0].mixer.rope, **changes))(model)


def swap(first, second):
    def mutant(model):
        swapped = tuple(layer | {first: layer[second], second: layer[first]} for layer in model.params["layers"])
        return model.decoder, model.params | {"layers": swapped}

    return mutant


MUTANTS = {
    "right": lambda model: (model.decoder, model.params),
    "every token": mixers(index_topk=48),
    "one token fewer": mixers(index_topk=8),
    "one token more": mixers(index_topk=10),
    "scale of the nope dim": mixers(sm_scale=20**-0.5),
    "scaling forgotten": rope(scaling=None),
    "another base": rope(theta=1e4),
    "epsilon": reconfigure(norm_eps=1e-6),
    "norms exchanged": swap("attn_norm", "mlp_norm"),
    "norms less one": reconfigure(norm_offset=1.0),
    "gate and up exchanged": swap("gate", "up"),
}


@pytest.mark.quick("right", "one token fewer", "scaling forgotten", "norms exchanged")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant, complete):
    model, want = golden_case(YARN)
    decoder, params = MUTANTS[mutant](model)
    logits, _ = complete(decoder, params, want["ids"])
    error = np.abs(logits - want["logits"]).max()
    assert error < TOLERANCE if mutant == "right" else error > 30 * TOLERANCE


def test_layers_that_config_json_has_no_words_for_are_not_saved():
    config = golden_case(FIRST)[0].config
    first, *others = config.layers
    for odd, said in (
        (dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, index_topk=5)), "one kind of layer, of latent attention"),
        (None, "scales logits by .* without YaRN, not by 1.0"),
    ):
        layers = (
            (odd, *others)
            if odd
            else tuple(dataclasses.replace(x, mixer=dataclasses.replace(x.mixer, sm_scale=1.0)) for x in config.layers)
        )
        with pytest.raises(ValueError, match=said):
            deepseek_v32.fields_of(dataclasses.replace(config, layers=layers))


def test_fields_round_trip():
    for name in CASES:
        config = golden_case(name)[0].config
        again = parse(json.loads(json.dumps(to_fields(config))))
        assert again.layers[0].mixer.sm_scale == pytest.approx(config.layers[0].mixer.sm_scale, rel=1e-9)
        assert jax.tree.structure(again) == jax.tree.structure(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"first_k_dense_replace": 3},
            "first_k_dense_replace is 3: 58 of 61 layers would have a mixture of experts, .* supported: 61 or more",
        ),
        ({"mlp_layer_types": ["dense", *["sparse"] * 60]}, r"mlp_layer_types is \['dense', 'sparse'.*no mixture of experts"),
        (
            {"layer_types": ["full_attention"] * 61},
            "layer_types is .*it must be a list of 'deepseek_sparse_attention' or 'indexed_attention', one for each of 61 layers",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"q_lora_rank": None}, "q_lora_rank is None; it must be an integer"),
        ({"index_topk": 0}, "index_topk is 0; it must be a positive integer"),
        ({"qk_rope_head_dim": 65}, "its dim must be even, and 0 or more, got 65"),
        ({"index_head_dim": 32}, "cannot rotate 64 elements of an indexer's head of index_dim 32"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}}, "rope_type 'longrope'; supported for DeepSeek"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'; supported for DeepSeek-V3.2: default, linear"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*fp8.*load the checkpoint that it was quantized from"),
        ({"compression_config": {"format": "int8"}}, "compression_config is .*load the checkpoint that it was compressed from"),
        ({"rope_interleave": False}, "rope_interleave is False; supported: None or True"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128; supported: null or 192"),
        ({"head_dim": 128}, "head_dim is 128; supported: null or 64"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; supported: null or 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20: .* of transformers reads it"),
    ],
)
def test_configurations_that_cannot_be_read_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(DEEPSEEK_V3_2 | {"first_k_dense_replace": 61} | changes)
