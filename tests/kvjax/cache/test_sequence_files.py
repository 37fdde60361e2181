"""Saved sequences: a byte that is not what was saved is found, and nothing that does not fit reaches the pages."""

import json
import os

import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvjax import Engine
from kvjax.cache.stores import sequence_file
from kvjax.cache.stores.sequence_file import write_sequence

pytestmark = pytest.mark.bits

PAGES, PAGE, LENGTH = 12, 16, 40
BLOCK = 2 * 2 * PAGE * 4 * 4
"""Bytes of a page: keys and values of two heads of dimension 4, in float32."""


@pytest.fixture(scope="module")
def engine(model_factory):
    return Engine(model_factory(num_layers=1, hidden_size=16, head_dim=4), pages=PAGES, page_size=PAGE, prefill_chunk=16)


@pytest.fixture(scope="module")
def saved(engine, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "sequence"
    (sequence,) = engine.prefill([text[:LENGTH]])
    engine.save(sequence, path)
    engine.free(sequence)
    return path.read_bytes()


@pytest.fixture
def unchanged(engine):
    """No page, sequence or bit of the pool changes in the test."""
    before = jax.tree.map(np.array, engine._pool.layers)
    yield
    assert (engine.allocators["full"].free, engine.sequences) == (PAGES, set())
    jax.tree.map(np.testing.assert_array_equal, before, engine._pool.layers)


def flip(engine, content, path, places, random):
    """Places at which a changed byte is not refused."""
    missed = []
    for place in places:
        changed = bytearray(content)
        changed[place] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        said = ""
        try:
            engine.free(engine.restore(path))
        except ValueError as error:
            said = str(error)
        if str(path) not in said or "\n" in said:
            missed.append(place)
    return missed


def header_end(content):
    return 8 + int.from_bytes(content[:8], "little")


def test_a_changed_byte_is_refused_wherever_it_is(engine, saved, tmp_path, unchanged):
    random, end = np.random.default_rng(0), header_end(saved)
    digest = saved.index(json.loads(saved[8:end])["__metadata__"]["sha256"].encode())
    places = [*range(8), *random.integers(8, end, 20), *random.integers(digest, digest + 64, 8), end - 1]
    places += [*random.integers(end, len(saved), 24), len(saved) - 1]
    assert flip(engine, saved, tmp_path / "flipped", places, random) == []


@pytest.mark.long
def test_every_changed_byte_is_refused(engine, saved, tmp_path, unchanged, capsys):
    assert flip(engine, saved, tmp_path / "flipped", range(len(saved)), np.random.default_rng(1)) == []
    with capsys.disabled():
        print(f"\n{len(saved)} flipped bytes: all refused")


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1])
def test_a_file_that_was_cut_is_refused(engine, saved, tmp_path, length, unchanged):
    path = tmp_path / "cut"
    path.write_bytes(saved[:length])
    with pytest.raises(ValueError, match="cut is not a readable kvjax sequence file"):
        engine.restore(path)
    path.write_bytes(saved + b"\0")
    with pytest.raises(ValueError, match="not a readable"):
        engine.restore(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pages": 1}, r"pages.full of shape \[1, 1024\], but this engine's tokens and pages need \[3, 1024\]"),
        ({"pages": 4}, r"pages.full of shape \[4, "),
        ({"bytes": 512}, r"shape \[3, 512\]"),
        ({"dtype": np.int8}, "pages.full in I8, but it must be U8"),
        ({"dtype": np.float32}, "pages.full in F32"),
        ({"groups": []}, "lacks tensor 'pages.full'"),
        ({"groups": ["full", "window:32"]}, "has a surplus tensor 'pages.window:32'; the layer groups are full"),
        ({"tokens": [97] * LENGTH}, "holds token 97, which is outside the vocabulary of 97"),
        ({"tokens": [-1] * LENGTH}, "holds token -1"),
        ({"tokens": []}, r"tokens of shape \[0\]"),
        ({"tokens": [[1] * LENGTH]}, r"tokens of shape \[1, 40\]"),
        ({"tokens": [1] * 5000}, "tokens and pages need"),
        ({"header": {"model": "other"}}, "was made with model 'other'"),
        ({"header": {"page_size": 32}}, "was made with page_size 32, this engine has 16"),
        ({"header": {"dtype": "bfloat16"}}, "was made with dtype 'bfloat16'"),
        ({"whole header": None}, "does not name the model that made it in its header"),
        ({"whole header": []}, "does not name the model that made it in its header"),
    ],
)
def test_a_file_of_other_tensors_is_refused_though_its_digest_is_right(engine, tmp_path, change, match, unchanged):
    path = tmp_path / "sequence"
    blocks = np.zeros((change.get("pages", 3), change.get("bytes", BLOCK)), change.get("dtype", np.uint8))
    tokens = change.get("tokens", [1] * LENGTH)
    header = change.get("whole header", engine._copies.header | change.get("header", {}))
    write_sequence(path, header, tokens, dict.fromkeys(change.get("groups", ["full"]), blocks))
    with pytest.raises(ValueError, match=match):
        engine.restore(path)


def test_a_header_of_many_lists_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not name the model that made it in its header"):
        sequence_file._header(tmp_path / "sequence", {"header": "[" * 200_000})


def test_what_these_tests_write_is_accepted_where_nothing_is_changed(engine, saved, tmp_path):
    (tmp_path / "whole").write_bytes(saved)
    engine.free(engine.restore(tmp_path / "whole"))
    blocks = np.zeros((3, BLOCK), np.uint8)
    write_sequence(tmp_path / "sequence", engine._copies.header, [1] * LENGTH, {"full": blocks})
    engine.free(engine.restore(tmp_path / "sequence"))


def test_tokens_beyond_the_positions_are_refused(engine, tmp_path, unchanged):
    blocks = np.zeros((313, BLOCK), np.uint8)
    write_sequence(tmp_path / "sequence", engine._copies.header, [1] * 5000, {"full": blocks})
    with pytest.raises(ValueError, match="5,000 tokens is longer than the model's 4,096 positions"):
        engine.restore(tmp_path / "sequence")


@pytest.mark.parametrize("former", ["kvjax sequence 1", "kvjax sequence 2"])
def test_a_file_of_an_earlier_version_is_refused_in_one_sentence(engine, tmp_path, former, unchanged):
    path, tokens = tmp_path / "old", {"tokens": np.zeros(3, np.int32)}
    metadata = {"format": former, "header": json.dumps(engine._copies.header)}
    save_file(tokens, str(path), metadata=metadata)
    with pytest.raises(ValueError, match=rf"saved by an earlier version \({former}\): prefill again and save it again"):
        engine.restore(path)
    save_file(tokens, str(path), metadata=metadata | {"format": sequence_file.FORMAT})
    with pytest.raises(ValueError, match="is damaged"):
        engine.restore(path)
    with pytest.raises(ValueError, match="there is no file"):
        engine.restore(tmp_path / "none")


def rewrite_end(path):
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(range(8)))


@pytest.mark.parametrize("change", [rewrite_end, lambda path: os.truncate(path, 4096)], ids=["rewritten", "cut"])
def test_a_file_that_changes_after_its_digest_was_compared_is_refused(change, engine, saved, unchanged, tmp_path, monkeypatch):
    path = tmp_path / "sequence"
    path.write_bytes(saved)
    os.utime(path, (1, 1))  # a clock of the file system may stand still between two writes of a test
    real = sequence_file._check_digest

    def checked(*given):
        real(*given)
        change(path)

    monkeypatch.setattr(sequence_file, "_check_digest", checked)
    with pytest.raises(ValueError, match="sequence changed while it was loaded: load it again"):
        engine.restore(path)


def test_save_leaves_no_partial_file(engine, text, tmp_path, monkeypatch):
    (sequence,) = engine.prefill([text[:LENGTH]])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder is a folder; name a file to write"):
        engine.save(sequence, tmp_path / "folder")
    with pytest.raises(ValueError, match="no tokens"):  # restore would refuse it
        engine.save(engine.new_sequence(), tmp_path / "empty")
    with pytest.raises(ValueError, match="there is no folder"):
        engine.save(sequence, tmp_path / "none" / "sequence")

    engine.save(sequence, tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    write = sequence_file.save_file
    for name, raised, expected in (
        ("_digest", KeyboardInterrupt(), KeyboardInterrupt),
        ("save_file", OSError(28, "No space left on device"), OSError),
        ("save_file", SafetensorError("Error while serializing: I/O error: No space left on device"), OSError),
    ):

        def fail(*args, raised=raised, **kwargs):
            if isinstance(raised, Exception):
                write(*args, **kwargs)
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(sequence_file, name, fail)
            with pytest.raises(expected):
                engine.save(sequence, tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept"]
    assert (tmp_path / "kept").read_bytes() == before
    engine.free(sequence)


def test_save_touches_no_other_file(engine, text, tmp_path):
    """A file of this name may be of another program, and a link may lead to one."""
    (sequence,) = engine.prefill([text[:LENGTH]])
    (tmp_path / "kept.partial").write_text("notes")
    (tmp_path / "link.partial").symlink_to(tmp_path / "kept.partial")
    for name in ("kept", "link"):
        engine.save(sequence, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.partial", "link", "link.partial"]
    assert (tmp_path / "link.partial").is_symlink()
    assert (tmp_path / "kept.partial").read_text() == "notes"
    engine.free(sequence)
