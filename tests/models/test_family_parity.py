"""Families that are entries of a table compute what transformers computes, on unusual configurations; and wrong models
that must fail."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import CASES, FAMILIES, NUMBERS, VOCAB, fields_of, prompt_of, weight_of
from golden_family import TOLERANCE, check_engine
from quick_cases import one_in, rest_long
from safetensors.numpy import load_file, save_file
from saved_models import run_open, save_case

import kvjax
from kvjax.engine.engine import Engine
from kvjax.models import checkpoint, config_json, fused, load
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import parse
from kvjax.text.transformers_import import import_transformers
from pallas_kernels.core.matrices import pack

GOLDEN = np.load(Path(__file__).with_name("golden") / "family_cases.npz")
QUICK = tuple((family, number) for family in FAMILIES for number in (0, 5))


def write_case(folder, family, number):
    """The checkpoint of a case: its config.json, and weights from seeds."""
    fields = fields_of(family, number)
    wanted = fused.stored_wanted(config_json.parse(fields))
    save_file({w.name: weight_of(family, number, w.name, w.shape) for w in wanted}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def golden_case(folder, family, number):
    """The model of a case, and what it must give."""
    model = load(write_case(folder, family, number), dtype=jnp.float32, tokenizer=False)
    kept = {name: GOLDEN[f"{family} {number} {name}"] for name in ("logits", "greedy")}
    return model, kept | {"ids": prompt_of(family, number)}


def engine_of(model, policy="dense", **options):
    return Engine(model, policy, **({"pages": 32, "page_size": 8, "prefill_chunk": 16, "batch_buckets": (1, 4)} | options))


def test_every_family_has_eight_cases():
    assert set(GOLDEN.files) == {f"{family} {number} {what}" for family, number in CASES for what in ("logits", "greedy")}
    assert all(sum(family == each for each, _ in CASES) == 8 for family in FAMILIES)


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_logits_and_greedy_tokens(case, complete, tmp_path):
    model, want = golden_case(tmp_path, *case)
    logits, greedy = complete(model.decoder, model.params, want["ids"], steps=len(want["greedy"]))
    error = np.abs(logits[-len(want["logits"]) :] - want["logits"]).max()
    print(f"{case}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    np.testing.assert_array_equal(greedy, want["greedy"])


ENGINES = [(family, 0) for family in FAMILIES]


@pytest.mark.parametrize("case", rest_long(ENGINES, ("gemma2", 0)), ids=lambda case: case[0])
def test_the_engine_gives_the_golden_logits_and_tokens_however_the_prompt_is_cut(case, tmp_path):
    model, want = golden_case(tmp_path, *case)
    check_engine(engine_of(model), want)


COVERING = ("top:8", "quest:8", "cascade:4/8", "heavy:8", "window:8+64")
"""Policies that read every token of the prompt. The engine's blocks are pages of 8 tokens."""


def policy_of(name):
    """A policy by name, with blocks that fit pages of 8 tokens."""
    policy = parse(name)
    blocks = {"block_size": 4 if name.startswith("quest") else 8} if hasattr(policy, "block_size") else {}
    return dataclasses.replace(policy, **blocks)


@pytest.mark.parametrize("name", rest_long(COVERING, "top:8"))
@pytest.mark.parametrize("case", rest_long(ENGINES, ("gemma2", 0)), ids=lambda case: case[0])
def test_decode_by_a_policy_that_covers_everything_gives_the_golden_logits(case, name, tmp_path):
    model, want = golden_case(tmp_path, *case)
    engine, ids = engine_of(model, policy_of(name)), want["ids"].tolist()
    (sequence,) = engine.prefill([ids[:40]])
    assert np.abs(np.asarray(sequence.logits) - want["logits"][39]).max() < TOLERANCE
    for place in range(40, len(ids)):
        (logits,) = engine.decode([sequence], [ids[place]])
        assert np.abs(np.asarray(logits) - want["logits"][place]).max() < TOLERANCE


PREFILLS = ("bounds:8+sparse", "oracle:16", "momo:16/16")


@pytest.mark.parametrize("name", rest_long(PREFILLS, "bounds:8+sparse"))
def test_prefill_by_a_policy_that_covers_everything_is_dense_prefill(name, tmp_path):
    """Under soft-caps. Dense prefill gives the golden logits."""
    model, _ = golden_case(tmp_path, "gemma2", 0)
    model = dataclasses.replace(model, decoder=TransformerDecoder(dataclasses.replace(model.config, max_positions=1024)))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 800).tolist()
    sizes = {"page_size": 128, "prefill_chunk": 512, "batch_buckets": (1,)}
    ((dense,), (found,)) = (engine_of(model, prefill=prefill, **sizes).prefill([tokens]) for prefill in ("dense", name))
    assert np.abs(np.asarray(found.logits) - np.asarray(dense.logits)).max() < TOLERANCE


ON_MESHES = [("gemma2", 1), ("cohere", 3), ("cohere2", 1), ("helium", 1)]


@pytest.mark.parametrize("case", rest_long(ON_MESHES, ("gemma2", 1)), ids=lambda case: case[0])
def test_the_devices_of_a_mesh_give_the_golden_logits(case, tmp_path):
    """Heads and columns on two devices, pages on two."""
    _, want = golden_case(tmp_path, *case)
    split = load(tmp_path, dtype=jnp.float32, tokenizer=False, mesh=(mesh := kvjax.mesh(tensor=2, context=2)))
    engine, ids = engine_of(split, policy_of("top:8"), mesh=mesh), want["ids"].tolist()
    (sequence,) = engine.prefill([ids[:-1]])
    (logits,) = engine.decode([sequence], ids[-1:])
    assert np.abs(np.asarray(logits) - want["logits"][-1]).max() < TOLERANCE


# Wrong models, which must not pass.


def with_layers(**changes):
    """A model whose layers differ in fields of the mixer."""

    def wrong(model):
        layers = (dataclasses.replace(each, mixer=dataclasses.replace(each.mixer, **changes)) for each in model.config.layers)
        return dataclasses.replace(model.config, layers=tuple(layers))

    return wrong


def with_fields(**changes):
    """A model that differs in fields of the configuration."""
    return lambda model: dataclasses.replace(model.config, **changes)


def all_rotated(model):
    """RoPE in the layers that have none."""
    rope = next(layer.mixer.rope for layer in model.config.layers if layer.mixer.rope.dim)
    return with_layers(rope=rope)(model)


MUTANTS = {
    "no soft-cap of attention": ("gemma2", with_layers(softcap=None)),
    "another soft-cap of attention": ("gemma2", with_layers(softcap=2.1)),
    "no soft-cap of the logits": ("gemma2", with_fields(logits_softcap=None)),
    "no windows": ("gemma2", with_layers(window=None)),
    "the usual scale": ("gemma2", with_layers(sm_scale=8**-0.5)),
    "embeddings without their factor": ("gemma", with_fields(embed_scale=None)),
    "norms without their offset": ("gemma", with_fields(norm_offset=0.0)),
    "means that are not subtracted": ("cohere", with_fields(centered_norms=False)),
    "logits without their factor": ("cohere", with_fields(logit_scale=None)),
    "RoPE in every layer": ("cohere2", all_rotated),
}


@pytest.mark.parametrize("name", one_in(3, MUTANTS))
def test_mutant_fails(name, complete, tmp_path):
    family, wrong = MUTANTS[name]
    model, want = golden_case(tmp_path, family, 0)
    logits, _ = complete(TransformerDecoder(wrong(model)), model.params, want["ids"])
    assert np.abs(logits - want["logits"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["helium", "cohere"])
def test_rows_that_are_left_in_the_order_of_pairs_fail(family, complete, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "order_of", lambda mixer, name: None)
    model, want = golden_case(tmp_path, family, 0)
    logits, _ = complete(model.decoder, model.params, want["ids"])
    assert np.abs(logits - want["logits"]).max() > 100 * TOLERANCE


def test_a_parallel_layer_in_sequence_fails(complete, tmp_path):
    model, want = golden_case(tmp_path, "cohere", 0)
    layers = tuple(dataclasses.replace(each, parallel=False) for each in model.config.layers)
    params = model.params | {"layers": tuple(each | {"mlp_norm": each["attn_norm"]} for each in model.params["layers"])}
    logits, _ = complete(TransformerDecoder(dataclasses.replace(model.config, layers=layers)), params, want["ids"])
    assert np.abs(logits - want["logits"]).max() > 100 * TOLERANCE


# Files.


@pytest.mark.parametrize(
    "case", one_in(2, [(family, number) for family in FAMILIES for number in (0, 5)]), ids=lambda case: "-".join(map(str, case))
)
def test_a_saved_model_is_the_same(case, tmp_path):
    """Its tensors, bit for bit, and what it is."""
    model, _ = golden_case(tmp_path, *case)
    model.save(tmp_path / "saved")
    stored, written = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "saved"))
    assert stored.keys() == written.keys()
    assert all((stored[name] == written[name]).all() for name in stored)
    assert load(tmp_path / "saved", dtype="auto", tokenizer=False).config == model.config


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_in_each_field_what_is_written(family):
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for number in NUMBERS:
        written = json.loads(json.dumps(config_json.to_fields(config_json.parse(fields_of(family, number)))))
        found = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(written)))
        declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} & written.keys() - {"dtype", "rope_parameters"}
        assert {name: getattr(found, name) for name in declared} == {name: written[name] for name in declared}
        assert written["rope_parameters"].items() <= found.rope_parameters.items()
        assert config_json.to_fields(config_json.parse(written)) == written


@pytest.mark.long
def test_transformers_opens_what_is_saved(request, tmp_path):
    """Where there is a Python with torch."""
    python = request.config.getoption("--torch-python") or (sys.executable if importlib.util.find_spec("torch") else None)
    if python is None:
        pytest.skip("needs torch, or `--torch-python` with a Python that has it")
    folders = [tmp_path / "-".join(map(str, case)) for case in CASES]
    for case, folder in zip(CASES, folders, strict=True):
        (folder / "first").mkdir(parents=True)
        save_case(golden_case(folder / "first", *case)[0], prompt_of(*case), folder / "saved")
    found = run_open(python, [folder / "saved" for folder in folders])
    for (family, number), logits in zip(CASES, found, strict=True):
        assert not isinstance(logits, str), f"{family} {number}: {logits}"
        want = GOLDEN[f"{family} {number} logits"]
        assert np.abs(logits[-len(want) :] - want).max() < TOLERANCE


def test_packed_rows_are_put_back(tmp_path):
    """Rows of q and k lie in another order in memory; packed and saved they are those of the checkpoint, packed."""
    write_case(tmp_path, "cohere", 0)
    packed = load(tmp_path, dtype=jnp.float32, tokenizer=False, weights="int8")
    packed.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype="auto", tokenizer=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, packed.params))
    name = "model.layers.0.self_attn.q_proj.weight"
    plain, codes = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "saved"))
    want = pack(jnp.asarray(plain[name]), packed.params["layers"][0]["q"].format, name)
    np.testing.assert_array_equal(codes[name], np.asarray(want.codes))


def test_blocks_of_rows_that_hold_parts_of_heads_are_refused(tmp_path):
    """Heads of 24 rows in blocks of 128 rows."""
    write_case(tmp_path, "ernie4_5", 6)
    model = load(tmp_path, dtype=jnp.float32, tokenizer=False, weights="int8:128x128")
    with pytest.raises(NotImplementedError, match=r"self_attn.q_proj.*blocks of 128 rows with one scale hold parts of heads"):
        model.save(tmp_path / "saved")
