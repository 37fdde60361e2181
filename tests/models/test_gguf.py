"""GGUF files: logits of transformers' reading of the same files, which it made on another machine
(make_gguf_golden.py), and what is said of files that cannot be read."""

import dataclasses
import re
import tracemalloc
from pathlib import Path

import damaged_gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file
from tiny_gguf import SPECS
from tiny_models import TinyModel

from kvjax import Engine
from kvjax.model.weight_formats import weights_bytes
from kvjax.models import load, read_config
from kvjax.models.loading import read_packing
from pallas_kernels.core.matrices import is_packed, pack, unpack

GOLDEN = load_file(Path(__file__).with_name("golden") / "gguf.safetensors")
TOLERANCE = 1e-4


def logits_of(model, ids):
    return TinyModel(model.decoder, model.params).full_forward(ids)


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_transformers(written, name):
    """Every architecture, every type of numbers, and RoPE's scalings that transformers itself does not read from the
    file."""
    model = load(written(name), dtype=jnp.float32)
    ids, greedy = GOLDEN[f"{name}.ids"].tolist(), GOLDEN[f"{name}.greedy"].tolist()
    logits = logits_of(model, ids + greedy)
    want = GOLDEN[f"{name}.logits"]
    error = np.abs(logits[len(ids) - len(want) : len(ids)] - want).max()
    print(f"{name}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == greedy
    if f"{name}.llama_cpp" in GOLDEN and not SPECS[name].long_factors:
        assert np.abs(logits[len(ids) - len(want) : len(ids)] - GOLDEN[f"{name}.llama_cpp"]).max() < TOLERANCE


def test_long_factors_are_those_of_llama_cpp(written):
    """It takes them where there is room for more tokens than the model was trained on."""
    model = load(written("phi3-longrope"), dtype=jnp.float32, max_positions=tiny_gguf.CONTEXT, tokenizer=False)
    want = GOLDEN["phi3-longrope.llama_cpp"]
    assert np.abs(logits_of(model, GOLDEN["phi3-longrope.ids"].tolist())[-len(want) :] - want).max() < TOLERANCE


def rewritten(spec, folder, **options):
    """A spec's file, with other metadata or tensors."""
    return tiny_gguf.write(spec, folder / "model.gguf", **options)


LEAST = dataclasses.replace(SPECS["llama-q8"], layers=1)


def says(path, *parts):
    """`load` refuses a file in one sentence that has these parts."""
    with pytest.raises(ValueError, match=r"\A[^\n]{20,3000}\Z") as raised:
        load(path, dtype=jnp.float32)
    said = str(raised.value)
    for part in (path.name, *parts):
        assert part in said, said


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"", "at least 24"),
        (b"GGUF", "at least 24"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"tjgg" + bytes(40), "older format"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1, made before August 2023"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(40), "version 9, of which 2 and 3 are supported"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") + bytes(40), "tensors, more than"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (2**60).to_bytes(8, "little") + bytes(40), "entries of metadata, more than"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(40), "no general.architecture"),
    ],
)
def test_what_is_no_gguf_file_gets_its_own_sentence(tmp_path, begin, part):
    path = tmp_path / "model.gguf"
    path.write_bytes(begin)
    says(path, part)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"kind": "adapter"}, ("an adapter (LoRA)",)),
        ({"kind": "mmproj"}, ("the projector of a multimodal model",)),
        ({"arch": "clip"}, ("the vision encoder",)),
        ({"arch": "mamba"}, ("'mamba'", "supported: ", "a recurrent state and no attention: take a model of a supported family")),
        ({"arch": "plm"}, ("'plm'", "supported: ", "give its original checkpoint")),
        ({"tensors": {}}, ("a vocabulary only",)),
        ({"metadata": {"llama.expert_count": 8}}, ("a mixture of experts",)),
        ({"metadata": {"llama.block_count": None}}, ("llama.block_count", "a positive integer")),
        ({"metadata": {"llama.embedding_length": -5.0}}, ("llama.embedding_length", "a positive integer")),
        ({"metadata": {"llama.rope.scaling.type": "su"}}, ("llama.rope.scaling.type", "none, linear, yarn or longrope")),
        ({"metadata": {"llama.embedding_length": 128}}, ("misshapen", "[256]")),
        ({"metadata": {"llama.block_count": 3}}, ("missing: model.layers.1.input_layernorm.weight",)),
        ({"metadata": {"llama.rope.dimension_count": 16}}, ("llama.rope.dimension_count is 16: RoPE rotates a part",)),
        ({"metadata": {"general.alignment": 48}}, ("general.alignment is 48",)),
        ({"metadata": {"split.count": 3}}, ("one of 3 files",)),
        ({"metadata": {"split.count": [3, 3]}}, ("split.count is ", "and must be a whole number")),
        ({"metadata": {"general.type": ["model"]}}, ("general.type is ['model'], and must be text",)),
        ({"metadata": {"llama.expert_count": [0, 0]}}, ("llama.expert_count is ", "one value, not a list")),
        ({"metadata": {"llama.rope.scaling.type": ["none"]}}, ("llama.rope.scaling.type is ", "one value, not a list")),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, options, parts):
    says(rewritten(LEAST, tmp_path, **options), *parts)


def test_types_that_cannot_be_read_are_named(tmp_path):
    tensors = tiny_gguf.numbers_of(LEAST)
    shape = tensors["blk.0.attn_q.weight"][0].shape[0]
    tensors["blk.0.attn_q.weight"] = np.zeros((shape, 66), np.uint8), tiny_gguf.Type.IQ2_XXS
    says(rewritten(LEAST, tmp_path, tensors=tensors), "blk.0.attn_q.weight is stored as IQ2_XXS", "Q4_K_M or Q8_0")


def test_tensors_on_the_same_bytes_are_named(tmp_path):
    path = rewritten(LEAST, tmp_path)
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 16 + 4  # past axes, sizes and type
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    says(path, "lie on the same bytes", "'blk.0.attn_k.weight'")


def test_tokens_twice_are_said(tmp_path, caplog, monkeypatch):
    tokens, *rest = tiny_gguf.byte_vocabulary()
    monkeypatch.setattr(tiny_gguf, "byte_vocabulary", lambda: ([*tokens[:-1], tokens[-2]], *rest))
    load(rewritten(dataclasses.replace(LEAST, tokenizer="gpt2"), tmp_path), dtype=jnp.float32)
    assert "1 tokens have the text of another" in caplog.text


def test_metadata_becomes_a_configuration(written):
    config = read_config(written("llama-llama3"))
    (scaling,) = {layer.mixer.rope.scaling for layer in config.layers}
    found = {"factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    assert found | {"original_max_position_embeddings": scaling.original_max_positions} == tiny_gguf.LLAMA3
    assert config.norm_eps == 1e-5  # not the float32 next to it
    assert config.max_positions == tiny_gguf.CONTEXT
    assert config.eos_token_ids == (tiny_gguf.byte_vocabulary()[0].index("<|im_end|>"),)
    assert read_config(written("qwen2-yarn")).layers[0].mixer.rope.scaling.kind == "yarn"
    gemma = read_config(written("gemma3"))
    assert [layer.mixer.window for layer in gemma.layers] == [12] * 5 + [None, 12]
    assert not read_config(written("llama-q4")).tie_embeddings
    assert read_config(written("qwen3")).tie_embeddings


@pytest.mark.parametrize(("low", "high", "original"), [(1.0, 4.0, 8192), (2.0, 5.0, 256), (1.0, 2.0, 100)])
def test_rope_factors_are_read_back(tmp_path, low, high, original):
    """Whatever three numbers made them: only their ratios count."""
    made = tiny_gguf.llama3_factors(10000.0, 64, 32.0, low, high, original)
    config = read_config(rewritten(dataclasses.replace(SPECS["llama-llama3"], rope_factors=made), tmp_path))
    scaling = config.layers[0].mixer.rope.scaling
    again = tiny_gguf.llama3_factors(
        10000.0, 64, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    )
    np.testing.assert_allclose(again, made, rtol=1e-3)


def test_rope_factors_of_another_scaling_are_refused(tmp_path):
    made = tuple(1 + (number * 7 % 5) for number in range(32))
    says(rewritten(dataclasses.replace(SPECS["llama-llama3"], rope_factors=made), tmp_path), "rope_freqs.weight", "llama3")


def test_rope_factors_of_other_types_are_named(tmp_path):
    """They are read with the configuration, before the other tensors are looked at."""
    spec = SPECS["llama-llama3"]
    tensors = tiny_gguf.numbers_of(spec)
    stored, _ = tensors["rope_freqs.weight"]
    wrong = tensors | {"rope_freqs.weight": (stored.astype(np.int32), tiny_gguf.Type.I32)}
    says(rewritten(spec, tmp_path, tensors=wrong), "rope_freqs.weight is stored as I32")


def test_end_of_turn_ends_too(tmp_path):
    path = rewritten(LEAST, tmp_path, metadata={"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2})
    assert read_config(path).eos_token_ids == (2, 9)


@pytest.mark.parametrize(("name", "codes"), [("llama-q8", "int8"), ("llama-q4", "int4")])
def test_blocks_stay_packed_as_they_are(written, name, codes):
    """The same numbers as the gguf package makes of them, in as many bytes as in the file."""
    model = load(written(name), dtype=jnp.float32, tokenizer=False)
    numbers = tiny_gguf.numbers_of(SPECS[name])
    for key, stored in {"o": "blk.1.attn_output", "down": "blk.1.ffn_down", "v": "blk.1.attn_v"}.items():
        matrix, (rows, kind) = model.params["layers"][1][key], numbers[f"{stored}.weight"]
        assert (matrix.format.codes, matrix.format.columns, matrix.scales.dtype) == (codes, 32, jnp.float16)
        np.testing.assert_array_equal(unpack(matrix), tiny_gguf.gguf.quants.dequantize(rows, kind))
        assert matrix.nbytes == rows.nbytes
    assert is_packed(model.params["embed"])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_are_packed_anew(written, weights):
    """As those of a checkpoint of the same numbers."""
    model = load(written("llama-q8"), dtype=jnp.float32, tokenizer=False, weights=weights)
    widened = load(written("llama-q8"), dtype=jnp.float32, tokenizer=False)
    for key, own in (("q", weights), ("down", weights)):
        matrix = model.params["layers"][0][key]
        assert str(matrix.format) == {"int8": "int8:1xall", "int4": "int4:1x128"}[own]
        again = pack(unpack(widened.params["layers"][0][key]), matrix.format)
        np.testing.assert_array_equal(matrix.codes, again.codes)


def test_automatic_types(written):
    assert load(written("gemma3"), dtype="auto", tokenizer=False).config.compute_dtype == "bfloat16"
    assert load(written("llama-biases"), dtype="auto", tokenizer=False).config.compute_dtype == "float16"
    assert load(written("llama-llama3"), dtype="auto", tokenizer=False).config.compute_dtype == "float32"
    assert load(written("llama-q4"), dtype="auto", tokenizer=False).config.compute_dtype == "bfloat16"


def shards(spec, folder, count=3):
    """The spec's model in several files, as llama-gguf-split writes them."""
    numbers = list(tiny_gguf.numbers_of(spec).items())
    for number in range(count):
        part = dict(numbers[number::count])
        more = {"split.no": number, "split.count": count, "split.tensors.count": len(numbers)}
        tiny_gguf.write(spec, folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf", tensors=part, metadata=more)


def test_shards_and_folders(written, tmp_path):
    shards(SPECS["llama-q8"], tmp_path)
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    ids = GOLDEN["llama-q8.ids"].tolist()
    want = logits_of(load(written("llama-q8"), dtype=jnp.float32), ids)
    for path in (tmp_path, tmp_path / "tiny-00001-of-00003.gguf", tmp_path / "tiny-00003-of-00003.gguf"):
        np.testing.assert_array_equal(logits_of(load(path, dtype=jnp.float32), ids), want)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    says(tmp_path / "tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf is missing")
    with pytest.raises(ValueError, match=r"tiny-00002-of-00003.gguf is missing"):
        load(tmp_path)


def test_a_folder_with_several_models_is_refused(written, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(written("llama-q8").read_bytes())
    with pytest.raises(ValueError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\): give one of these files"):
        load(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    says(tmp_path / "none.gguf", "there is no file")


@pytest.mark.parametrize("name", ["llama-q4", "llama-q8", "llama-llama3"])
def test_what_is_saved_is_the_same_model(written, tmp_path, name):
    """Q4_0's embedding is written in 8 bits, which transformers can read; its numbers are the same."""
    model = load(written(name), dtype=jnp.float32)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=jnp.float32)
    ids = GOLDEN[f"{name}.ids"].tolist()
    np.testing.assert_allclose(logits_of(again, ids), logits_of(model, ids), atol=1e-5)
    text = "the cat <|im_end|>  sat"
    assert again.tokenizer(text).input_ids == model.tokenizer(text).input_ids
    assert again.tokenizer.chat_template == model.tokenizer.chat_template
    assert again.config == dataclasses.replace(model.config)


def test_plan_counts_what_stays_packed(written):
    """As many bytes as the loaded model has."""
    for name in ("llama-q8", "llama-q4", "llama-types"):
        model = load(written(name), dtype=jnp.float32, tokenizer=False)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        config = read_config(written(name), dtype="float32")
        assert weights_bytes(config, read_packing(written(name), config)) == held


def test_the_engine_decodes_from_packed_blocks(written):
    model = load(written("llama-q4"), dtype=jnp.float32, tokenizer=False)
    ids, greedy = GOLDEN["llama-q4.ids"].tolist(), GOLDEN["llama-q4.greedy"].tolist()
    engine = Engine(model, page_size=16, prefill_chunk=16)
    (sequence,) = engine.prefill([ids])
    logits = sequence.logits
    for token in greedy[:6]:
        assert int(np.argmax(np.asarray(logits))) == token
        (logits,) = engine.decode([sequence], [token])


def check_damage(folder, rounds, seed):
    """Damaged files load, or are refused in a sentence that names the file. Nothing else is raised."""
    path, loaded = folder / "damaged.gguf", 0
    for name in ("llama-q8", "qwen2", "gemma3", "qwen35", "phi3-longrope", "olmo3"):
        spec = dataclasses.replace(SPECS[name], layers=2 if name == "qwen35" else 1)
        data = tiny_gguf.write(spec, folder / "whole.gguf").read_bytes()
        header = data.index(b"token_embd.weight") + 1000
        generator = np.random.default_rng(seed)
        for number in range(rounds // 6):
            path.write_bytes(damaged_gguf.damage(data, generator, header))
            tracemalloc.start()
            try:
                load(path, dtype=jnp.float32)
                loaded += 1
            except ValueError as error:
                said = str(error)
                assert re.fullmatch(rf".*{path.name}.*", said), (name, number, said)
                assert len(said) < 3000, (name, number, said)
            assert tracemalloc.get_traced_memory()[1] < 200 << 20, (name, number)
            tracemalloc.stop()
    print(f"{rounds} damaged files, of which {loaded} load")
    assert 0 < loaded < rounds / 2


def test_damaged_files_are_refused_in_a_sentence(tmp_path):
    check_damage(tmp_path, 60, 1)


@pytest.mark.long
def test_2000_damaged_files_are_refused_in_a_sentence(tmp_path):
    check_damage(tmp_path, 2000, 2)
