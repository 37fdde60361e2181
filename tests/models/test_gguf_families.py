"""GGUF files of the families by table: what stays packed, what their metadata says, and what is refused. Their logits
are compared in test_gguf.py."""

import dataclasses
import logging
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import SPECS, Type
from tiny_models import TinyModel

from kvjax.model.weight_formats import weights_bytes
from kvjax.models import load, loading, read_config
from kvjax.models.loading import read_packing
from pallas_kernels.core.matrices import is_packed, unpack

IDS = [5, 250, 17, 99, 3, 260, 41, 8, 12, 77, 301, 4]


def logits_of(model):
    return TinyModel(model.decoder, model.params).full_forward(IDS)


def rewritten(name, folder, **options):
    """A spec's file, with other metadata or tensors."""
    return tiny_gguf.write(SPECS[name], folder / "model.gguf", **options)


def widened(spec):
    """The numbers of a spec's packed file, in float32."""
    return {
        name: (tiny_gguf.gguf.quants.dequantize(rows, kind), Type.F32) if kind in tiny_gguf.PACKED else (rows, kind)
        for name, (rows, kind) in tiny_gguf.numbers_of(spec).items()
    }


@pytest.mark.parametrize(("name", "kind"), [("phi3", Type.Q8_0), ("glm4", Type.Q4_0), ("chatglm", Type.Q8_0), ("ernie4_5", Type.Q4_0)])
def test_cut_and_reordered_matrices_stay_packed(tmp_path, name, kind):
    """q, k, v, gate and up have the numbers of a file in float32, and as many bytes as in the packed one."""
    spec = dataclasses.replace(SPECS[name], types=(kind,), layers=1)
    packed, plain = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    model = load(tiny_gguf.write(spec, packed), dtype=jnp.float32, tokenizer=False)
    again = load(tiny_gguf.write(spec, plain, tensors=widened(spec)), dtype=jnp.float32, tokenizer=False)
    for key in ("q", "k", "v", "o", "gate", "up", "down"):
        matrix, want = model.params["layers"][0][key], again.params["layers"][0][key]
        assert is_packed(matrix), key
        assert not is_packed(want), key
        np.testing.assert_array_equal(unpack(matrix), want)
    assert np.abs(logits_of(model) - logits_of(again)).max() < 2e-5
    config = read_config(packed, dtype="float32")
    held = sum(np.asarray(leaf).nbytes for leaf in loading.jax.tree.leaves(model.params))
    assert weights_bytes(config, read_packing(packed, config)) == held


def test_fused_rows_that_neighbours_turn_are_cut_first(tmp_path):
    """llama.cpp's converter can join q, k and v of every architecture; those of Llama are in pairs as well."""
    spec = dataclasses.replace(SPECS["llama-q8"], layers=1)
    tensors = tiny_gguf.numbers_of(spec)
    joined = dict(tensors)
    parts = [joined.pop(f"blk.0.{name}.weight")[0] for name in tiny_gguf.QKV]
    joined["blk.0.attn_qkv.weight"] = np.concatenate(parts), Type.Q8_0
    want = load(tiny_gguf.write(spec, tmp_path / "a.gguf"), dtype=jnp.float32, tokenizer=False)
    found = load(tiny_gguf.write(spec, tmp_path / "b.gguf", tensors=joined), dtype=jnp.float32, tokenizer=False)
    for key in ("q", "k", "v"):
        np.testing.assert_array_equal(found.params["layers"][0][key].codes, want.params["layers"][0][key].codes)


@pytest.mark.parametrize("name", ["phi3-longrope", "granite", "olmo3", "cohere2", "glm4"])
def test_saved_families_are_the_same_model(written, tmp_path, name):
    model = load(written(name), dtype=jnp.float32, tokenizer=False)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=jnp.float32, tokenizer=False)
    np.testing.assert_allclose(logits_of(again), logits_of(model), atol=1e-5)
    assert again.config == model.config


def test_metadata_of_families(written, tmp_path):
    assert [layer.mixer.window for layer in read_config(written("olmo3")).layers] == [12, None, 12]
    assert [layer.mixer.window for layer in read_config(written("cohere2")).layers] == [12, 12, 12, None, 12]
    assert read_config(written("olmo2")).family == "olmo2"
    assert read_config(written("olmo3")).family == "olmo3"
    assert [layer.mixer.rope.dim for layer in read_config(written("smollm3")).layers] == [64, 64, 64, 0]
    granite = read_config(written("granite"))
    assert (granite.embed_scale, granite.residual_scale, granite.logit_scale, granite.layers[0].mixer.sm_scale) == (3.0, 0.4, 0.5, 0.1)
    caps = read_config(written("gemma2"))
    assert (caps.layers[0].mixer.softcap, caps.logits_softcap) == (20.0, 10.0)
    assert read_config(written("mistral3")).layers[0].mixer.rope.scaling.attention_factor == 1.0
    scaling = read_config(written("phi3-longrope")).layers[0].mixer.rope.scaling
    assert (scaling.long, scaling.original_max_positions, len(scaling.long_factors)) == (False, 256, 24)
    full = {"gemma3.attention.sliding_window": None}
    assert {layer.mixer.window for layer in read_config(rewritten("gemma3", tmp_path, metadata=full)).layers} == {None}
    every = {"gemma2.attention.sliding_window_pattern": 3}
    assert [layer.mixer.window for layer in read_config(rewritten("gemma2", tmp_path, metadata=every)).layers] == [12, 12, None]


@pytest.mark.parametrize(
    ("name", "metadata", "parts"),
    [
        ("llama-q8", {"llama.attention.sliding_window": 64}, ("llama.attention.sliding_window is 64", "not supported")),
        ("llama-q8", {"llama.attention.clamp_kqv": 8.0}, ("llama.attention.clamp_kqv is 8.0",)),
        ("llama-q8", {"llama.attention.causal": False}, ("llama.attention.causal is False", "see later ones")),
        ("llama-q8", {"llama.rope.scaling.attn_factor": 1.5}, ("rope.scaling.attn_factor is 1.5",)),
        ("llama-llama3", {"llama.rope.scaling.factor": 2.0}, ("rope_freqs.weight", "two scalings")),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, ("gemma3.final_logit_softcapping is 30.0",)),
        ("gemma2", {"gemma2.block_count": 100_000_000}, ("gemma2.block_count is 100000000", "at most 10000")),
        ("gemma2", {"gemma2.rope.freq_base_swa": 1e6}, ("gemma2.rope.freq_base_swa is 1000000.0",)),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, ("sliding_window_pattern", "a list of 3")),
        ("mistral3", {"mistral3.attention.temperature_scale": 0.1}, ("Ministral 3", "temperature_scale is 0.1")),
        ("granite", {"granite.rope.scaling.finetuned": False}, ("granite.rope.scaling.finetuned is False",)),
        ("glm4", {"glm4.rope.dimension_sections": [8, 12, 12, 0]}, ("glm4.rope.dimension_sections", "images")),
        ("phi3", {"phi3.feed_forward_length": 128}, ("blk.0.ffn_up.weight has 512 rows, must have 256",)),
        ("phi3", {"phi3.embedding_length": 128}, ("do not fit the metadata of", "is [512, 256], must be [512, 128]")),
        ("phi3", {"phi3.rope.scaling.type": "longrope"}, ("has no rope_factors_long.weight",)),
        ("phi3-longrope", {"phi3.rope.dimension_count": 32}, ("rope_factors_long.weight is [24], must be [16]",)),
    ],
)
def test_metadata_that_is_not_supported_is_named(tmp_path, name, metadata, parts):
    path = rewritten(name, tmp_path, metadata=metadata)
    with pytest.raises(ValueError, match=r"\A[^\n]{20,3000}\Z") as raised:
        load(path, dtype=jnp.float32, tokenizer=False)
    for part in (path.name, *parts):
        assert part in str(raised.value), str(raised.value)
    assert "config.json" not in str(raised.value)


def test_norms_of_each_head_of_command_r_plus(tmp_path):
    """llama.cpp has them in models of 64 layers and more; here they must lie in the order of the rows of q and k."""
    spec = dataclasses.replace(SPECS["command-r"], layers=1, qk_norm="own")
    model = load(tiny_gguf.write(spec, tmp_path / "model.gguf"), dtype=jnp.float32, tokenizer=False)
    numbers = tiny_gguf.numbers_of(spec)
    for key, heads in (("q", 4), ("k", 2)):
        norm, stored = model.params["layers"][0][f"{key}_norm"], numbers[f"blk.0.attn_{key}_norm.weight"][0]
        np.testing.assert_array_equal(norm, np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1))
        rows = numbers[f"blk.0.attn_{key}.weight"][0].reshape(heads, 64, -1)
        ordered = np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(heads * 64, -1)
        np.testing.assert_array_equal(model.params["layers"][0][key], ordered)


def test_keys_that_llama_cpp_does_not_have_are_ignored_with_a_warning(tmp_path, caplog):
    path = rewritten("llama-q8", tmp_path, metadata={"llama.mystery": 3, "llama.vocab_size": 9, "llama.attention.sliding_window": 0})
    with caplog.at_level(logging.WARNING):
        read_config(path)
    assert [record.getMessage().endswith("no such keys: mystery") for record in caplog.records] == [True]


def test_blocks_without_a_kernel_are_said_once(written, caplog):
    with mock.patch.object(loading, "compute_capability", return_value=(9, 0)), caplog.at_level(logging.WARNING):
        load(written("llama-q8"), dtype=jnp.float32, tokenizer=False)
        assert [record.getMessage() for record in caplog.records if "plain XLA" in record.getMessage()] == [
            f"{written('llama-q8')}: matrices stay packed as int8:1x32, in blocks that no kernel of this GPU takes: they run in plain XLA, "
            "which is slower. weights='int8' (--weights int8) packs them anew, for the kernel"
        ]
        caplog.clear()
        load(written("llama-q8"), dtype=jnp.float32, tokenizer=False, weights="int8")
        assert not [record for record in caplog.records if "plain XLA" in record.getMessage()]
