"""Where models may be saved: nothing but a model is replaced, and what cannot work is refused before anything is
written."""

import json
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_model

from kvjax.models import save, saving
from kvjax.models.save_targets import check_target

WEIGHTS = b"weights"


def make_model(folder, config=None, **more):
    """A folder as of a model, with more files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} if config is None else config))
    for name, content in ({"model.safetensors": WEIGHTS} | more).items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# What is replaced.

NO_MODELS = {
    "a config without a type": ({"config": {"name": "my editor"}}, "model_type is None, and must be text"),
    "a type that is no text": ({"config": {"model_type": 3}}, "model_type is 3, and must be text"),
    "a list": ({"config": [1]}, "config.json cannot be read as a JSON object"),
    "no weights": ({"model.safetensors": None}, r"holds no model\*.safetensors"),
    "a thesis": ({"thesis.txt": b"years"}, "holds thesis.txt, which no save writes.*choose another folder, or move them away"),
    "weights that no save writes": ({"adapter.safetensors": b"mine"}, "holds adapter.safetensors"),
    "a folder": ({"photos": None}, "holds the folder photos"),
    "a folder named as weights": ({"model-2.safetensors": None}, "holds the folder model-2.safetensors"),
}


@pytest.mark.parametrize("name", NO_MODELS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_only_a_model_is_not_replaced(name, overwrite, tmp_path):
    changes, message = NO_MODELS[name]
    files = {key: value for key, value in changes.items() if isinstance(value, bytes)}
    folder = make_model(tmp_path / "m", changes.get("config"), **files)
    for each in changes.keys() - files.keys() - {"config"}:
        (folder / each).unlink(missing_ok=True)
        if each != "model.safetensors":
            (folder / each).mkdir()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        save(random_model(), folder, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_all_files_of_a_model_are_replaced(tmp_path):
    names = "generation_config.json model-1.safetensors model.safetensors.index.json tokenizer.json tokenizer.model tokenizer_config.json "
    names += (
        "special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt chat_template.jinja README.md LICENSE .gitattributes "
    )
    names += "preprocessor_config.json"
    folder = make_model(tmp_path / "m", **dict.fromkeys(names.split(), b"old"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("old")
    save(random_model(), folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_another_writes_meanwhile_is_not_lost(tmp_path, monkeypatch):
    """Neither where a model is replaced, nor where nothing was."""
    original = saving._write_weights

    def write(*args):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "thesis.txt").write_text("years")
        original(*args)

    monkeypatch.setattr(saving, "_write_weights", write)
    for name, overwrite in (("m", False), ("m", True)):
        with pytest.raises(ValueError, match="m is not empty"):
            save(random_model(), tmp_path / name, overwrite=overwrite)
        assert contents(tmp_path) == {"m": None, "m/thesis.txt": b"years"}
        (tmp_path / "m" / "thesis.txt").unlink()


def test_several_chat_templates_are_saved_and_replaced(tmp_path):
    """A tokenizer writes them to a subfolder, which anyone may then enter."""

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tools.jinja").write_text("{}")

    for _ in range(2):
        save(random_model(tokenizer=Tokenizer()), tmp_path / "m", overwrite=True)
    assert (tmp_path / "m" / "additional_chat_templates").stat().st_mode & 0o500 == 0o500


@pytest.mark.parametrize("overwrite", ["no", "yes", 1, 0, None, np.True_])
def test_overwrite_is_true_or_false(overwrite, tmp_path):
    folder = make_model(tmp_path / "m")
    with pytest.raises(ValueError, match="overwrite must be True or False, got"):
        save(random_model(), folder, overwrite=overwrite)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


# Where nothing can be written.


def place(kind, folder):
    """A path that cannot be written, and what the error says of it."""
    if kind == "a file":
        (folder / "f").write_text("mine")
        return folder / "f", "is a file, and a model is written to a folder"
    if kind == "below a file":
        (folder / "f").write_text("mine")
        return folder / "f" / "a" / "m", "cannot be made: .*/f is not a folder"
    if kind == "a link to nothing":
        (folder / "link").symlink_to(folder / "none")
        return folder / "link", "is a link that leads to nothing"
    if kind == "below a link to nothing":
        (folder / "link").symlink_to(folder / "none")
        return folder / "link" / "m", "is a link that leads to nothing"
    if kind == "a link to itself":
        (folder / "link").symlink_to(folder / "link")
        return folder / "link", "is a link that leads to nothing"
    if kind == "a pipe":
        os.mkfifo(folder / "pipe")
        return folder / "pipe", "is a pipe, a socket or a device"
    if kind == "a device":
        return Path("/dev/null"), "is a pipe, a socket or a device"
    if kind == "proc":
        return Path("/proc/m"), "the folder /proc cannot be written to"
    if kind == "below proc":
        return Path("/proc/a/b/m"), "the folder /proc cannot be written to"
    if kind == "the root":
        return Path("/"), "is the root of the file system"
    if kind == "a mount point":
        return Path("/proc"), "is a mount point"
    if kind == "a long name":
        return folder / ("n" * 256), "holds a name of 256 bytes, and 255 is the most"
    if kind == "a long name below what is missing":
        return folder / "none" / ("ä" * 128) / "m", "holds a name of 256 bytes, and 255 is the most"
    if kind == "a long path":
        return folder / "/".join(["n" * 200] * 20), "is too long"
    return folder / "\ud800", "cannot hold half of a surrogate pair"


KINDS = ["a file", "below a file", "a link to nothing", "below a link to nothing", "a link to itself", "a pipe", "a device", "proc"]
KINDS += ["below proc", "the root", "a mount point", "a long name", "a long name below what is missing", "a long path", "no text"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_cannot_work_is_refused_before_anything_is_written(kind, overwrite, tmp_path, monkeypatch):
    """With the path that was given, and no hidden folder, in one sentence."""
    monkeypatch.setattr(saving, "_write_weights", lambda *_: pytest.fail("weights were written"))
    path, message = place(kind, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        save(random_model(), path, overwrite=overwrite)
    assert str(path)[:150].encode(errors="replace") in str(caught.value).encode(errors="replace") or kind == "no text"
    assert "choose" in str(caught.value) or "change" in str(caught.value)
    assert "/." not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_parent_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """Not the hidden folder that was tried."""

    def refused(prefix, dir):
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}abc")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(ValueError, match=r"m cannot be made: the folder .* cannot be written to \(Permission denied\)") as caught:
        check_target(tmp_path / "a" / "m", False)
    assert "/." not in str(caught.value)


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    make_model(tmp_path / "disk" / "m")
    (tmp_path / "m").symlink_to(tmp_path / "disk" / "m")
    (tmp_path / "parent").symlink_to(tmp_path / "disk")
    save(random_model(jnp.bfloat16), tmp_path / "m", overwrite=True)
    save(random_model(), tmp_path / "parent" / "new")
    assert (tmp_path / "m").is_symlink()
    assert (tmp_path / "disk" / "m" / "model.safetensors").read_bytes() != WEIGHTS
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["m", "new"]


@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127])
def test_the_longest_names_are_written(name, tmp_path):
    """The hidden folder's name is cut."""
    for _ in range(2):
        save(random_model(), tmp_path / name, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# Names that are none, and the current folder.


@pytest.mark.parametrize("folder", ["", None, b"q", 3, "a\0b", ["m"]])
def test_the_path_of_a_folder_is_needed(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path of a folder is needed, as a string"):
        save(random_model(), folder, overwrite=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [".", Path(), "../m", "link"])
@pytest.mark.parametrize("empty", [True, False])
def test_the_current_folder_is_not_replaced(folder, empty, tmp_path, monkeypatch):
    if empty:
        (tmp_path / "m").mkdir()
    else:
        make_model(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    if folder == "link":
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "m")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="is the current folder, which a save would replace; choose another folder"):
        save(random_model(), folder, overwrite=True)
    assert contents(tmp_path) == before
    assert Path.cwd() == tmp_path / "m"


def test_a_current_folder_that_is_deleted_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="m is in the current folder, which is deleted"):
        check_target("m", False)
    assert check_target(tmp_path / "m", False) == tmp_path / "m"


@pytest.mark.parametrize("size", [float("nan"), True, None, "1GB", 1e9, -1, 0])
def test_the_largest_file_is_a_whole_number(size, tmp_path):
    with pytest.raises(ValueError, match=rf"max_shard_bytes must be .*, got {size!r}"):
        save(random_model(), tmp_path / "m", max_shard_bytes=size)
    assert not any(tmp_path.iterdir())
