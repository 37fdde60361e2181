"""GGUF files: logits of transformers' reading of the same files, which it made on another machine (make_gguf_golden.py), and what is said
of files that cannot be read."""

import dataclasses
import re
import tracemalloc
from pathlib import Path

import damaged_gguf
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file
from tiny_gguf import SPECS
from tiny_models import TinyModel

from kvjax.models import load

GOLDEN = load_file(Path(__file__).with_name("golden") / "gguf.safetensors")
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Writes a spec's file once."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def path(name):
        if name not in made:
            made[name] = tiny_gguf.write(SPECS[name], folder / f"{name}.gguf")
        return made[name]

    return path


def logits_of(model, ids):
    return TinyModel(model.decoder, model.params).full_forward(ids)


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_transformers(written, name):
    """Every architecture, every type of numbers, and RoPE's scalings that transformers itself does not read from the file."""
    model = load(written(name), dtype=jnp.float32)
    ids, greedy = GOLDEN[f"{name}.ids"].tolist(), GOLDEN[f"{name}.greedy"].tolist()
    logits = logits_of(model, ids + greedy)
    want = GOLDEN[f"{name}.logits"]
    error = np.abs(logits[len(ids) - len(want) : len(ids)] - want).max()
    print(f"{name}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == greedy
    if f"{name}.llama_cpp" in GOLDEN:
        assert np.abs(logits[len(ids) - len(want) : len(ids)] - GOLDEN[f"{name}.llama_cpp"]).max() < TOLERANCE


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
        ({"arch": "mamba"}, ("'mamba'", "supported: ")),
        ({"tensors": {}}, ("a vocabulary only",)),
        ({"metadata": {"llama.expert_count": 8}}, ("a mixture of experts",)),
        ({"metadata": {"llama.block_count": None}}, ("llama.block_count", "a positive integer")),
        ({"metadata": {"llama.embedding_length": -5.0}}, ("llama.embedding_length", "a positive integer")),
        ({"metadata": {"llama.rope.scaling.type": "su"}}, ("llama.rope.scaling.type", "none, linear or yarn")),
        ({"metadata": {"llama.embedding_length": 128}}, ("misshapen", "[256]")),
        ({"metadata": {"llama.block_count": 3}}, ("missing: model.layers.1.input_layernorm.weight",)),
        ({"metadata": {"llama.rope.dimension_count": 16}}, ("partial_rotary_factor is 0.25",)),
        ({"metadata": {"general.alignment": 48}}, ("general.alignment is 48",)),
        ({"metadata": {"split.count": 3}}, ("one of 3 files",)),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, options, parts):
    says(rewritten(LEAST, tmp_path, **options), *parts)


def test_types_that_cannot_be_read_are_named(tmp_path):
    tensors = tiny_gguf.numbers_of(LEAST)
    shape = tensors["blk.0.attn_q.weight"][0].shape[0]
    tensors["blk.0.attn_q.weight"] = np.zeros((shape, 66), np.uint8), tiny_gguf.Type.IQ2_XXS
    says(rewritten(LEAST, tmp_path, tensors=tensors), "blk.0.attn_q.weight is stored as IQ2_XXS", "Q4_K_M or Q8_0")


def check_damage(folder, rounds, seed):
    """Damaged files load, or are refused in a sentence that names the file. Nothing else is raised."""
    path, loaded = folder / "damaged.gguf", 0
    for name in ("llama-q8", "qwen2", "gemma3", "qwen35"):
        spec = dataclasses.replace(SPECS[name], layers=2 if name == "qwen35" else 1)
        data = tiny_gguf.write(spec, folder / "whole.gguf").read_bytes()
        header = data.index(b"token_embd.weight") + 1000
        generator = np.random.default_rng(seed)
        for number in range(rounds // 4):
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
