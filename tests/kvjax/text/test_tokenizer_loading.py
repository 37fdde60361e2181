"""Tokenizers of folders: code of a checkpoint is never run, nobody is asked, and damaged files are named."""

import base64
import contextlib
import io
import json
import logging
import os
import shutil
import struct
import sys

import pytest
from tiny_models import LEAST, altered, random_model

import kvjax
from kvjax.client import load_tokenizer
from kvjax.models import FAMILIES, load, needle, save
from kvjax.text.plain_texts import tokenized
from kvjax.text.token_bounds import LONG, MAX_HOLES
from kvjax.text.tokenization import encode
from kvjax.text.tokenizer_loading import _check_merges, read_tokenizer

VOCAB = {"<unk>": 0, "</s>": 3} | {f"w{n}": n for n in range(40) if n not in (0, 3)}
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast): pass
class OwnConfig: pass
"""


def word_tokenizer(extra=0):
    """40 words with the ids 0 to 39, and `extra` added tokens after them, each with its name."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(f"<image{n}>", special=True, normalized=False) for n in range(extra)])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model with a tokenizer.json."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    save(random_model(tokenizer=word_tokenizer()), folder)
    return folder


@pytest.fixture
def asking(plain, tmp_path, monkeypatch):
    """`asking(family, auto_map, json=..., in_config=...)`: a model that names its own code, and the file that the code
    would write. A program that asks on stdin is told yes."""

    def make(family=None, auto_map=None, tokenizer_json=False, in_config=None):
        folder, mark = tmp_path / "asks", tmp_path / "ran"
        shutil.copytree(plain, folder)
        if not tokenizer_json:
            (folder / "tokenizer.json").unlink()
            (folder / "vocab.json").write_text(json.dumps(VOCAB))
            (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / "own.py").write_text(CODE.format(mark=str(mark)))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
        fields = json.loads((folder / "config.json").read_text())
        if family is not None:
            fields |= {"model_type": family, "architectures": None}
        (folder / "config.json").write_text(json.dumps(fields | ({} if in_config is None else {"auto_map": in_config})))
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
        return folder, mark

    return make


AUTO_MAP = {"AutoTokenizer": ["own.Own", "own.Own"]}


@pytest.mark.parametrize("family", [*FAMILIES, "of nobody"])
@pytest.mark.parametrize("auto_map", [AUTO_MAP, AUTO_MAP["AutoTokenizer"], {"AutoTokenizer": "own.Own"}], ids=["object", "list", "text"])
def test_code_of_a_checkpoint_is_never_run(asking, family, auto_map, capsys):
    folder, mark = asking(family, auto_map)
    for read in (read_tokenizer, lambda name: load_tokenizer(str(name))):
        with pytest.raises(ValueError, match=r"tokenizer_config.json asks to run code of the checkpoint .*own.Own.*put a tokenizer.json"):
            read(folder)
    assert not mark.exists()
    assert capsys.readouterr().out == "", "nobody is asked"
    assert sys.stdin.read() == "y\n" * 50


def test_no_road_to_a_model_runs_its_code(asking, capsys):
    """Python, the command line and lm-eval's adapter."""
    from typer.testing import CliRunner

    from kvjax.serving.cli.app import app
    from kvjax.serving.harness import KvjaxLM

    folder, mark = asking(None, AUTO_MAP)
    with pytest.raises(ValueError, match=r"asks to run code .*tokenizer=False loads the model alone"):
        load(folder)
    with pytest.raises(ValueError, match="asks to run code"):
        KvjaxLM.create_from_arg_obj({"pretrained": str(folder)})
    with pytest.raises(ValueError, match="model_args name 'trust_remote_code'"):
        KvjaxLM.create_from_arg_obj({"pretrained": str(folder), "trust_remote_code": True})
    with pytest.raises(TypeError, match="code of a checkpoint is never run"):
        load(folder, trust_remote_code=True)
    CliRunner().invoke(app, ["generate", "w1", "--model", str(folder)], input="y\n" * 50)
    assert load(folder, tokenizer=False).tokenizer is None
    assert not mark.exists()
    assert "Do you wish to run" not in capsys.readouterr().out


def test_the_configuration_runs_no_code_either(asking):
    """`AutoTokenizer` reads config.json too, which may name code of its own."""
    folder, mark = asking("of nobody", None, in_config={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(ValueError, match="model_type is 'of nobody'"):
        load(folder)
    with contextlib.suppress(ValueError):  # it may be read without the configuration
        load_tokenizer(str(folder))
    assert not mark.exists()
    assert sys.stdin.read() == "y\n" * 50


def elsewhere(asking, tmp_path, *, tokenizer_json):
    """A model, and a tokenizer.json in another folder that transformers would read."""
    folder, _ = asking("qwen2", tokenizer_json=True)
    other = tmp_path / "elsewhere" / "tokenizer.4.0.0.json"
    other.parent.mkdir()
    shutil.copy(folder / "tokenizer.json", other)
    if not tokenizer_json:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps(VOCAB))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder, other


@pytest.mark.parametrize(
    ("file", "field", "listed", "tokenizer_json"),
    [
        ("tokenizer_config.json", "fast_tokenizer_files", True, True),
        ("tokenizer_config.json", "fast_tokenizer_files", True, False),
        ("tokenizer_config.json", "gguf_file", False, False),
        ("tokenizer_config.json", "init_inputs", True, False),
        ("tokenizer_config.json", "vocab", False, False),
        ("tokenizer_config.json", "merges", False, False),
        ("special_tokens_map.json", "tokenizer_file", False, True),
        ("special_tokens_map.json", "vocab_file", False, False),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_tokenizer_names_no_file_outside_its_folder(asking, tmp_path, file, field, listed, tokenizer_json, relative):
    folder, other = elsewhere(asking, tmp_path, tokenizer_json=tokenizer_json)
    path = "../elsewhere/tokenizer.4.0.0.json" if relative else str(other)
    (folder / file).write_text(json.dumps({field: [path] if listed else path}))
    os.utime(other, ns=(1, other.stat().st_mtime_ns))
    with pytest.raises(ValueError, match=f"{file} has '{field}' .*delete the field"):
        read_tokenizer(folder)
    assert other.stat().st_atime_ns == 1, "it was not read"


def test_paths_that_transformers_replaces_are_no_error(asking, tmp_path):
    folder, other = elsewhere(asking, tmp_path, tokenizer_json=True)
    other.write_text("no tokenizer")
    named = {"tokenizer_file": str(other), "vocab_file": str(other), "name_or_path": str(other), "special_tokens_map_file": str(other)}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"init_inputs": [], "gguf_file": None}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "additional_special_tokens": ["w5"]}))
    assert read_tokenizer(folder)("w5 w6")["input_ids"] == [5, 6]


def test_tokenizer_json_is_used_and_the_code_beside_it_is_not(asking, caplog):
    folder, mark = asking(None, AUTO_MAP, tokenizer_json=True)
    model = load(folder)
    assert model.tokenizer("w7 w9")["input_ids"] == [7, 9]
    save(model, folder / "saved")
    assert "auto_map" not in (folder / "saved" / "tokenizer_config.json").read_text(), "nor do others run it from a copy"
    assert not mark.exists()
    assert [record.getMessage() for record in caplog.records if "never run" in record.getMessage()] == [
        f"{folder}/tokenizer_config.json: code of the checkpoint (auto_map) is never run; tokenizer.json is used"
    ]


def test_a_tokenizer_without_tokenizer_json_is_read(asking):
    folder, _ = asking(None, {})
    (folder / "tokenizer_config.json").write_text("{}")
    assert read_tokenizer(folder).get_vocab()["w7"] == 7


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{% for n in range(10 ** 12) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_reaches_nothing_of_python(template, plain, tmp_path, monkeypatch):
    """transformers renders it in jinja2's sandbox."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="chat template does not take these messages"):
        encode(read_tokenizer(tmp_path / "m"), [{"role": "user", "content": "w1"}])
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# More ids than the embedding has rows.


@pytest.mark.parametrize(
    ("part", "each", "count"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}, 34),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "e*"}, "content": "ee"}, 20),
        ("normalizer", {"type": "Prepend", "prepend": "e" * (LONG + 1)}, 1),
        ("decoder", {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}, 34),
    ],
)
def test_replacements_that_multiply_a_text_are_refused(part, each, count, plain, tmp_path):
    """34 doublings make 17 GB of one letter."""
    folder = shutil.copytree(plain, tmp_path / "m")
    parts = json.loads((folder / "tokenizer.json").read_text())
    for number, refused in ((min(count, 3), count == 1), (count, True)):
        parts[part] = {"type": "Sequence", f"{part}s": [each] * number}
        (folder / "tokenizer.json").write_text(json.dumps(parts))
        if refused:
            with pytest.raises(ValueError, match=rf"m \(its {part} may make a text .* times longer, and 64 times is the most\)"):
                read_tokenizer(folder)
        else:
            assert read_tokenizer(folder) is not None


TEXT, END = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}


def template(pieces, ids=1):
    """A post-processor that writes these pieces, in which `</s>` stands for so many ids."""
    special = {"</s>": {"id": "</s>", "ids": [3] * ids, "tokens": ["</s>"] * ids}}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


def characters(size):
    """SentencePiece's map of characters, with a trie that knows one letter: an "a" becomes `size` letters."""
    trie = [0] * 1024
    trie[0], trie[256 ^ ord("a")] = 256 << 10, 512 << 10 | 1 << 8 | ord("a")
    stored = struct.pack("<1025I", 4096, *trie) + b"b" * size + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(stored).decode()}


DOUBLE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"post_processor": template([TEXT] * 2000)}, "its post_processor"),
        ({"post_processor": template([TEXT, *[END] * 20], LONG // 16)}, "its post_processor"),
        ({"post_processor": {"type": "Sequence", "processors": [template([TEXT] * 10)] * 2}}, "its post_processor"),
        ({"normalizer": characters(100_000)}, "its normalizer"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 4}, "post_processor": template([TEXT] * 20)}, "together"),
        ({"normalizer": characters(18), "post_processor": template([END, TEXT, END])}, None),
    ],
    ids=["texts", "special tokens", "sequence", "characters", "together", "usual"],
)
def test_templates_and_maps_that_multiply_a_text_are_refused(parts, named, plain, tmp_path):
    """A template of 2,000 texts makes 200 million tokens of a prompt of 100,000, and a map of characters 1 GB of
    1,000."""
    folder = shutil.copytree(plain, tmp_path / "m")
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(whole | parts))
    if named is None:
        assert len(tokenized(read_tokenizer(folder), "w1 a w2")["input_ids"]) == 5
    else:
        with pytest.raises(ValueError, match=rf"m \(.*{named}.* may make a text .* times longer, and 64 times is the most\)"):
            read_tokenizer(folder)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model of 40 ids whose tokenizer has 42, as Gemma 3's text models have one for images."""
    folder = tmp_path_factory.mktemp("models") / "larger"
    save(random_model(config=altered(LEAST, vocab_size=40), tokenizer=word_tokenizer(2)), folder)
    return load(folder)


def test_a_tokenizer_may_have_more_ids_than_the_embedding(larger, tmp_path, caplog):
    save(larger, tmp_path / "again")
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "again")
    said = [record.getMessage() for record in caplog.records]
    assert (
        f"the tokenizer in {tmp_path / 'again'} has 42 ids and the model 40: prompts with an id from 40 ('<image0>') on are refused" in said
    )
    assert kvjax.generate(model, "w1 w2", max_new_tokens=3, details=True).token_ids


@pytest.mark.parametrize("prompt", ["w1 <image1> w2", [1, 41, 2]])
def test_only_a_prompt_with_such_an_id_is_refused(larger, prompt):
    with pytest.raises(ValueError, match="token 41 is outside the vocabulary of 40"):
        kvjax.generate(larger, prompt, max_new_tokens=1)
    assert kvjax.generate(larger, "w1 w2", max_new_tokens=8, stop="<image1>", stop_token_ids=[41], details=True).token_ids


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_file_that_the_disk_does_not_give_back_is_named(plain, tmp_path, name):
    """Reading the file /proc/self/mem at its beginning is an OSError without a name."""
    folder = tmp_path / "m"
    shutil.copytree(plain, folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=f"{name}.*"):
        load(folder)


def with_an_id(plain, folder, kind, number):
    """A copy of a model, in whose tokenizer of a kind the token "ab" has this id; and the file that says so."""
    shutil.copytree(plain, folder)
    vocab, path = VOCAB | {"ab": number}, folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    own = {
        "WordLevel": {"unk_token": "<unk>"},
        "BPE": {"merges": []},
        "WordPiece": {"unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }
    if kind in own:
        path.write_text(json.dumps(whole | {"model": {"type": kind, "vocab": vocab} | own[kind]}))
        return path
    path.unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    if kind == "vocab.json":
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / kind).write_text(json.dumps(vocab))
    else:
        ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": number}
        (folder / kind).write_text("\n".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return folder / kind


@pytest.mark.parametrize("kind", ["WordLevel", "BPE", "WordPiece", "vocab.json", "tokenizer.model"])
def test_ids_far_beyond_the_number_of_tokens_are_refused(kind, plain, tmp_path, monkeypatch):
    """The last id of 32 bits takes 16 GiB, because transformers writes the vocabulary with all ids that are missing."""
    monkeypatch.setattr("kvjax.text.tokenizer_loading.import_transformers", lambda: pytest.fail("transformers must not see it"))
    for number in (2**32 - 2, 2 * MAX_HOLES):
        file = with_an_id(plain, tmp_path / str(number), kind, number)
        token = "YWI=" if kind == "tokenizer.model" else "ab"
        with pytest.raises(ValueError, match=rf"{file} gives token '{token}' the id {number}, and has \d+ tokens: its ids may go up to"):
            read_tokenizer(file.parent)


@pytest.mark.parametrize(("merges", "right"), [(["a b"], False), ([["a", "##b"], ["é", "é"]], False), (["a ##b"], True)])
def test_merges_without_the_prefix_of_their_tokens_are_refused(merges, right, plain, tmp_path, monkeypatch):
    """The library cuts the prefix off unseen: a piece of a character ends the process."""
    shutil.copytree(plain, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    vocab = {token: number for number, token in enumerate(("a", "b", "##b", "ab", "é", "éé"))}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "continuing_subword_prefix": "##"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model}))
    if right:
        _check_merges(model, file)
        return
    monkeypatch.setattr("kvjax.text.tokenizer_loading.import_transformers", lambda: pytest.fail("transformers must not see it"))
    with pytest.raises(ValueError, match=f"{file} has the merge .* whose second part does not begin with its continuing_subword_prefix"):
        read_tokenizer(file.parent)


@pytest.mark.parametrize("value", [[1, 2, 3], "512", {}])
def test_settings_that_make_every_text_an_error_are_refused(value, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": value}))
    with pytest.raises(ValueError, match=f"cannot read the tokenizer in {tmp_path / 'm'} .*not supported between"):
        load(tmp_path / "m")


def test_some_ids_may_be_missing(plain, tmp_path):
    for kind in ("WordLevel", "vocab.json"):
        assert read_tokenizer(with_an_id(plain, tmp_path / kind, kind, 5000).parent).get_vocab()["ab"] == 5000


def test_a_folder_whose_name_is_not_utf8_is_said(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / os.fsdecode(b"m\xff"))
    for read in (read_tokenizer, load, lambda name: load_tokenizer(str(name))):
        with pytest.raises(ValueError, match=r"^the name of the folder '.*m\\udcff' is not UTF-8, .*; give it another name") as caught:
            read(folder)
        assert str(caught.value).encode()
    alone = load(folder, tokenizer=False)
    assert alone.tokenizer is None
    saved = tmp_path / os.fsdecode(b"s\xff")
    with pytest.raises(ValueError, match=r"s\\udcff' is not UTF-8"):
        save(load(plain), saved)
    assert not saved.exists()
    save(alone, saved)


@pytest.mark.parametrize("longest", [100, 1000, 8000, 2**60])
def test_words_that_take_minutes_are_not_looked_into(longest, plain, tmp_path):
    """A word of 8,000 letters would take 40 seconds."""
    folder = shutil.copytree(plain, tmp_path / "m")
    whole = json.loads((folder / "tokenizer.json").read_text())
    words = {"type": "WordPiece", "vocab": VOCAB, "unk_token": "<unk>", "continuing_subword_prefix": "##"}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"model": words | {"max_input_chars_per_word": longest}}))
    if longest <= 1000:
        assert list(tokenized(read_tokenizer(folder), "w1 w2 " + "a" * 8000)["input_ids"]) == [1, 2, 0]
    else:
        with pytest.raises(ValueError, match=rf"m \(its model has max_input_chars_per_word {longest:,}, and 1,000 is the most"):
            read_tokenizer(folder)


def test_merges_that_are_left_out_at_random_are_not(tmp_path, caplog):
    """`dropout` is for training: with it, equal prompts would have other tokens each time."""
    folder = tmp_path / "needle"
    shutil.copytree(needle.path(), folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    with caplog.at_level(logging.WARNING):
        tokenizer = read_tokenizer(folder)
    assert "tokenizer.json: dropout 0.5 of its merges is for training, and is turned off" in caplog.text
    text = "Once upon a time in the golden river"
    wanted = list(encode(read_tokenizer(needle.path()), text))
    assert all(list(encode(tokenizer, text)) == wanted for _ in range(5))
