"""A checkpoint that another program replaces, rewrites or cuts while it is loaded is refused: what was read may be of
two."""

import os
import shutil

import lora_cases
import pytest
import safetensors
import tiny_gguf
from tiny_gguf import Type
from tiny_models import LEAST, altered, random_model
from tiny_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvjax.models import load, save
from kvjax.models.gguf.header import _Reader
from kvjax.models.gguf.tensors import GgufTensor
from kvjax.models.quantization.layouts import StoredMatrix
from kvjax.models.tensors import Stored
from kvjax.serving.cli.app import app

KINDS = ("one file", "shards", "packed", "gguf", "packed gguf", "adapter")


def written(kind, folder):
    """A checkpoint. Returns what `load` takes, and the file that will change."""
    if "gguf" in kind:
        path = folder / "model.gguf"
        tiny_gguf.write(tiny_gguf.Spec(types=(Type.Q8_0,)), path)
        return {"path_or_id": path, "weights": None if "packed" in kind else "int8"}, path
    if kind == "adapter":
        model, said = lora_cases.write(folder, "dora")
        return {"path_or_id": model, "lora": said}, folder / "adapter1" / "adapter_model.safetensors"
    save(random_model(), folder / "m", max_shard_bytes=20_000 if kind == "shards" else 10**9)
    if kind == "packed":
        save(load(folder / "m", tokenizer=False, weights="int8"), folder / "p")
        return {"path_or_id": folder / "p"}, folder / "p" / "model.safetensors"
    return {"path_or_id": folder / "m"}, sorted((folder / "m").glob("*.safetensors"))[-1]


def replaced(path):
    """Another file of the same size takes its place."""
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def rewritten(path):
    """Its last bytes are written over."""
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def cut(path):
    """Half of it is left."""
    os.truncate(path, path.stat().st_size // 2)


def meanwhile(monkeypatch, method, number, action):
    """Call `action` before the call `number` of a method: it stands for the time that passes between two pieces."""
    owner, name = method
    calls, real = [0], getattr(owner, name)

    def called(self, *args):
        calls[0] += 1
        if calls[0] == number:
            action()
        return real(self, *args)

    monkeypatch.setattr(owner, name, called)


METHODS = {
    "one file": (Stored, "read"),
    "shards": (Stored, "read"),
    "packed": (StoredMatrix, "array"),
    "gguf": (GgufTensor, "read"),
    "packed gguf": (GgufTensor, "read_packed"),
    "adapter": (Stored, "read"),
}


@pytest.mark.parametrize("change", [replaced, rewritten, cut])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_between_two_pieces_is_refused(kind, change, tmp_path, monkeypatch):
    given, path = written(kind, tmp_path)
    os.utime(path, (1, 1))  # a clock of the file system may stand still between two writes of a test
    meanwhile(monkeypatch, METHODS[kind], 3, lambda: change(path))
    with pytest.raises(ValueError, match=rf"{path.name} changed while it was loaded: load it again$"):
        load(**given, tokenizer=False)


@pytest.fixture
def with_tokenizer(tmp_path):
    """A folder of shards, and how often tensors are read while it is loaded."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="a")
    save(random_model(config=altered(LEAST, vocab_size=257), tokenizer=tokenizer), tmp_path / "m", max_shard_bytes=20_000)
    reads, real = [], Stored.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stored, "read", lambda self, *args: (reads.append(self), real(self, *args))[1])
        load(tmp_path / "m")
    return tmp_path / "m", len(reads)


SMALL = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", [*SMALL, "first shard"])
def test_files_of_two_checkpoints_are_noticed_at_the_end(name, with_tokenizer, monkeypatch):
    """Each is replaced after it was read, and before the last tensor is."""
    folder, reads = with_tokenizer
    path = min(folder.glob("*.safetensors")) if name == "first shard" else folder / name
    meanwhile(monkeypatch, (Stored, "read"), reads, lambda: replaced(path))
    with pytest.raises(ValueError, match=rf"{path.name} changed while it was loaded: load it again$"):
        load(folder)


def test_what_was_not_read_may_change(with_tokenizer, monkeypatch):
    folder, reads = with_tokenizer
    meanwhile(monkeypatch, (Stored, "read"), reads, lambda: replaced(folder / "tokenizer.json"))
    assert load(folder, tokenizer=False).tokenizer is None


def test_the_configuration_of_an_adapter_is_noticed_too(tmp_path, monkeypatch):
    model, said = lora_cases.write(tmp_path, "dora")
    meanwhile(monkeypatch, (Stored, "read"), 3, lambda: replaced(tmp_path / "adapter1" / "adapter_config.json"))
    with pytest.raises(ValueError, match=r"adapter_config\.json changed while it was loaded: load it again$"):
        load(model, lora=said, tokenizer=False)


def test_a_file_that_is_cut_while_its_header_is_read_is_refused(tmp_path, monkeypatch):
    save(random_model(), tmp_path / "m")
    path, real = tmp_path / "m" / "model.safetensors", safetensors.safe_open

    def opened(*args, **options):
        cut(path)
        return real(*args, **options)

    monkeypatch.setattr(safetensors, "safe_open", opened)
    with pytest.raises(ValueError, match=r"model\.safetensors changed while it was loaded: load it again$"):
        load(tmp_path / "m", tokenizer=False)


def test_a_gguf_file_that_is_cut_while_its_header_is_read_is_refused(tmp_path, monkeypatch):
    given, path = written("gguf", tmp_path)
    meanwhile(monkeypatch, (_Reader, "header"), 1, lambda: os.truncate(path, 100))
    with pytest.raises(ValueError, match=r"model\.gguf changed while it was loaded: load it again$"):
        load(**given, tokenizer=False)


def test_quantize_writes_nothing_of_two_checkpoints(with_tokenizer, tmp_path, monkeypatch):
    folder, reads = with_tokenizer
    path = max(folder.glob("*.safetensors"))
    meanwhile(monkeypatch, (Stored, "read"), reads, lambda: replaced(path))
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "q"), "--model", str(folder), "--weights", "int8"])
    assert str(done.exception) == f"{path} changed while it was loaded: load it again"
    assert not (tmp_path / "q").exists()
