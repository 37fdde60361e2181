"""Models with packed weights: equal to the same model with unpacked weights, loaded, saved, planned, on meshes, and
small."""

import dataclasses
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_peak import peak_of
from quick_cases import rest_long
from safetensors.numpy import load_file, save_file
from tiny_models import LEAST, altered, make_family, make_model, random_model, same_params

import kvjax
from kvjax.engine.memory import memory_plan
from kvjax.model.identity import fingerprint
from kvjax.model.weight_formats import SCHEMES, pack_params, weights_bytes
from kvjax.models import load, loading, save
from pallas_kernels.core.matrices import is_packed, unpack

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared")
STORED = [name for name in SCHEMES if name != "fp8:tokens"]
CASES = [(family, weights) for family in FAMILIES for weights in STORED]
QUICK = [("qwen2", "fp8:128x128"), ("gemma3_text", "int8"), ("qwen3_5_text", "int4"), ("deepseek_v32", "fp8")]


def tiny(family, dtype="float32"):
    return make_model(compute_dtype=dtype) if family == "qwen2" else make_family(family, dtype=dtype)


def unpacked(model):
    """The same model with arrays of the numbers of its packed matrices."""
    dtype = model.config.compute_dtype
    params = jax.tree.map(lambda x: unpack(x, dtype) if is_packed(x) else x, model.params, is_leaf=is_packed)
    return dataclasses.replace(model, params=params)


def packed(model, weights):
    return dataclasses.replace(model, params=pack_params(model.params, weights))


def logits_of(model, ids, mesh=None, chunk=32):
    """Logits after a prompt in chunks, and after each of three steps."""
    engine = kvjax.Engine(model, pages=16, page_size=16, prefill_chunk=chunk, mesh=mesh, batch_buckets=(1,))
    (sequence,) = engine.prefill([ids])
    found = [np.asarray(sequence.logits)]
    return np.stack(found + [np.asarray(engine.decode([sequence], [token]))[0] for token in (5, 17, 40)])


@pytest.mark.quick_but("qwen3_5_text int4", "deepseek_v32 fp8", "qwen2 fp8:128x128")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=" ".join)
def test_logits_are_those_of_the_unpacked_weights(case):
    """In prefill and decode, for every family."""
    family, weights = case
    model = packed(tiny(family), weights)
    ids = [int(x) for x in np.random.default_rng(0).integers(0, model.config.vocab_size, 43)]
    found, expected = (logits_of(each, ids) for each in (model, unpacked(model)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_prefill_in_fp8_rounds_many_tokens_and_few_not(tmp_path):
    model = tiny("qwen2")
    ids = [int(x) for x in np.random.default_rng(0).integers(0, model.config.vocab_size, 43)]
    in_fp8, plain = packed(model, "fp8:tokens"), packed(model, "fp8")
    found, expected = (logits_of(each, ids) for each in (in_fp8, plain))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.1
    np.testing.assert_array_equal(logits_of(in_fp8, ids, chunk=16), logits_of(plain, ids, chunk=16))
    assert fingerprint(in_fp8) != fingerprint(plain)
    with pytest.raises(NotImplementedError, match="save the model loaded as fp8 instead"):
        packed(random_model(), "fp8:tokens").save(tmp_path / "m")


def test_norms_biases_and_small_matrices_stay_arrays():
    for family in FAMILIES:
        for path, leaf in jax.tree_util.tree_leaves_with_path(packed(tiny(family), "int8").params, is_leaf=is_packed):
            name = path[-1].key
            assert is_packed(leaf) == (leaf.ndim == 2 and name not in ("a", "b", "index_weights")), name
    with pytest.raises(ValueError, match="packed already"):
        pack_params(packed(tiny("llama"), "int8").params, "fp8")
    with pytest.raises(ValueError, match=r"weights is 'int3'; supported: int8, fp8, int4"):
        pack_params(tiny("llama").params, "int3")


# Loading and saving.


@pytest.mark.quick_but("int8", "fp8", "int8:128x128", "fp8:128x128")
@pytest.mark.parametrize("weights", STORED)
def test_loading_packs_as_packing_what_was_loaded_does(weights, tmp_path, monkeypatch):
    """In pieces that cut no block, of tied and untied models; the plan counts the same bytes; saved and read again bit
    for bit."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32} if weights == "int4" else {}  # others are not saved
    sizes = {"hidden_size": 160, "intermediate_size": 272} | sizes
    config = altered(LEAST, vocab_size=300, tie_embeddings=weights == "int8", **sizes)
    model = random_model(jnp.bfloat16, config)
    save(model, tmp_path / "m")
    monkeypatch.setattr(loading, "READ_BYTES", 9000)
    found = load(tmp_path / "m", dtype="bfloat16", tokenizer=False, weights=weights)
    assert same_params(found.params, pack_params(model.params, weights))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(found.params))
    assert held == memory_plan(found.config, weights=weights, available_bytes=0).weights_bytes
    assert kvjax.Engine(found, pages=4).memory_plan().weights_bytes == held
    assert memory_plan(found.config, available_bytes=0).weights_bytes == 2 * config.num_params
    found.save(tmp_path / "packed", max_shard_bytes=60_000)
    again = load(tmp_path / "packed", dtype="auto", tokenizer=False)
    assert same_params(again.params, found.params)
    assert again.config == found.config
    assert fingerprint(again) == fingerprint(found) != fingerprint(model)
    assert weights_bytes(found.config, loading.read_packing(tmp_path / "packed", found.config)) == held
    assert loading.read_packing(tmp_path / "m", found.config) is None
    with pytest.raises(ValueError, match=r"holds packed weights \(compressed-tensors\) already: leave weights='int8' out"):
        load(tmp_path / "packed", tokenizer=False, weights="int8")


def test_weights_that_draft_are_a_second_copy(tmp_path):
    model = random_model(jnp.bfloat16, altered(LEAST, vocab_size=300))
    save(model, tmp_path / "m")
    found = load(tmp_path / "m", dtype="bfloat16", tokenizer=False, draft_weights="int8")
    assert same_params(found.params, model.params)
    assert same_params(found.draft_params, pack_params(model.params, "int8"))
    copies = [leaf for leaf in jax.tree.leaves(found.draft_params, is_leaf=is_packed) if is_packed(leaf)]
    more = sum(leaf.nbytes for leaf in jax.tree.leaves(copies))
    assert kvjax.Engine(found, pages=4).memory_plan().weights_bytes == 2 * found.config.num_params + more
    assert fingerprint(found) == fingerprint(model), "answers are the model's"
    with pytest.raises(ValueError, match="leave weights='int4' out"):
        load(tmp_path / "m", tokenizer=False, weights="int4", draft_weights="int8")
    with pytest.raises(ValueError, match="leave mesh out"):
        load(tmp_path / "m", tokenizer=False, draft_weights="int8", mesh=kvjax.mesh(tensor=1))
    with pytest.raises(ValueError, match="draft_weights is 'q4'; supported"):
        load(tmp_path / "m", tokenizer=False, draft_weights="q4")
    with pytest.raises(ValueError, match=r"draft_weights='int8' .* packed already: leave it out"):
        dataclasses.replace(found, params=found.draft_params).with_draft_weights("int8")


def test_fingerprints_tell_formats_apart():
    """Blocks of 100 and of 128 of 160 inputs have scales of one shape."""
    model = packed(tiny("qwen2"), "int4")

    def other(leaf):
        return leaf.replace(format=dataclasses.replace(leaf.format, columns=96)) if is_packed(leaf) and leaf.format.columns else leaf

    altered = dataclasses.replace(model, params=jax.tree.map(other, model.params, is_leaf=is_packed))
    assert fingerprint(model) != fingerprint(altered)


def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path):
    save(random_model(), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 4] = np.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} holds numbers that are not finite"):
        load(tmp_path / "m", tokenizer=False, weights="int8")
    with pytest.raises(ValueError, match=r"weights is 'q4'; supported"):
        load(tmp_path / "m", tokenizer=False, weights="q4")


@pytest.mark.long
def test_loading_packed_holds_one_tensor_on_the_host_and_the_packed_model_on_the_device(tmp_path, monkeypatch):
    config = altered(LEAST, hidden_size=256, intermediate_size=512, num_layers=6, num_heads=8, head_dim=32, vocab_size=1024)
    save(random_model(jnp.float32, config), tmp_path / "big", max_shard_bytes=3_000_000)
    monkeypatch.setattr(loading, "READ_BYTES", 1 << 17)
    load(tmp_path / "big", tokenizer=False, weights="int8")
    gc.collect()
    before, seen, real = sum(array.nbytes for array in jax.live_arrays()), [], loading._pieces

    def pieces(*args):
        for piece in real(*args):
            seen.append(sum(array.nbytes for array in jax.live_arrays()) - before)
            yield piece

    monkeypatch.setattr(loading, "_pieces", pieces)
    model, peak = peak_of(lambda: load(tmp_path / "big", tokenizer=False, weights="int8"))
    held, largest = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)), 4 * 1024 * 256
    assert peak < largest, f"the host held {peak} bytes; the largest tensor has {largest}"
    assert max(seen) <= held + 2 * (1 << 17), "the device holds the packed model and a piece"


# Meshes.


@pytest.mark.long
@pytest.mark.parametrize("weights", rest_long(STORED[:3], "int4"))
@pytest.mark.parametrize("family", rest_long(["llama", "gemma3_text", "deepseek_v32"], "llama"))
def test_packed_models_on_a_mesh_answer_as_on_one_device(family, weights, tmp_path):
    model = packed(tiny(family), weights)
    if family == "llama":  # groups of 128 inputs do not divide among 64
        config = altered(model.config, intermediate_size=256, num_heads=16, num_kv_heads=2)
        model = random_model(config=config)
        save(model, tmp_path / "m")
        model = load(tmp_path / "m", tokenizer=False, weights=weights)
    ids, mesh = [int(x) for x in np.random.default_rng(0).integers(0, 97, 43)], kvjax.mesh(tensor=2)
    expected = logits_of(model, ids)
    if family != "llama" and weights == "int4":
        with pytest.raises(ValueError, match=r"(o|down) of layer 0 is packed as int4:1x128.*parts of a block.*use a smaller tensor size"):
            logits_of(model, ids, mesh)
        return
    found = logits_of(model, ids, mesh)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    if family == "llama":
        placed = load(tmp_path / "m", tokenizer=False, weights=weights, mesh=mesh)
        np.testing.assert_array_equal(logits_of(placed, ids, mesh), found)
        assert fingerprint(placed) == fingerprint(model)
        held = max(sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed.params)), 1)
        assert held == memory_plan(model.config, weights=weights, tensor=2, available_bytes=0).weights_bytes


# config.json.


def test_config_says_how_weights_are_packed(tmp_path):
    model = random_model(config=altered(LEAST, hidden_size=128, intermediate_size=128, head_dim=32))
    save(dataclasses.replace(model, params=pack_params(model.params, "int4")), tmp_path / "m")
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert said["format"] == "mixed-precision"
    assert [group["format"] for group in said["config_groups"].values()] == ["int-quantized", "pack-quantized"]
    assert said["config_groups"]["group_0"]["targets"] == ["lm_head", "Embedding"]
    assert said["config_groups"]["group_1"]["weights"]["group_size"] == 128
