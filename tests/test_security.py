"""What is data never becomes code: names in files, records, templates and checkpoints. docs/security.md lists every
way."""

import collections
import dataclasses
import functools
import json
import pickle
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from character_tokenizer import make_tokenizer
from tiny_models import make_model

from kvjax import Engine, load
from kvjax.cache.stores.disk import DiskStore
from kvjax.cache.stores.sequence_file import write_sequence
from kvjax.cost_model import Evidence, Price, recorded_evidence
from kvjax.cost_model.evidence import read_evidence
from kvjax.cost_model.predict import interpolated
from kvjax.evaluation.report import policy_and_keys
from kvjax.models.checkpoint import stored_tensors
from kvjax.policies.decode import parse as parse_policy
from kvjax.policies.decode import parse_recorded, register
from kvjax.policies.prefill.naming import built_in_name, parse_recorded_prefill
from kvjax.serving.batch.records import parse as parse_record
from kvjax.text.tokenization import chat_ids
from pallas_kernels.core.files import sealed

ROOT = Path(__file__).parent.parent

MINE = """
from pathlib import Path
Path({mark!r}).touch()
class Mine: pass
"""


@pytest.fixture
def trap(tmp_path):
    """A name of a policy in a file, which leaves a mark when it runs; checked afterwards."""
    mark, file = tmp_path / "mark", tmp_path / "trap.py"
    file.write_text(MINE.format(mark=str(mark)))
    called = []
    register("trapped", lambda *args: called.append(args), replace=True)
    yield f"{file}:Mine"
    assert not mark.exists()
    assert not called


@functools.cache
def small_engine():
    return Engine(make_model(num_layers=1), "dense", pages=8, page_size=16, prefill_chunk=16, batch_buckets=(1,))


def evidence(name):
    row = dataclasses.asdict(recorded_evidence()[0]) | {"policy": name}
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "table.json").write_text(sealed({"rows": [row]}))
        read_evidence(file, Evidence)


ROADS = {
    "a name in data": parse_recorded,
    "a name of prefill in data": parse_recorded_prefill,
    "a row of evidence": evidence,
    "a price of a cost model": lambda name: interpolated(parse_policy("top:8"), {name: Price(0.0)}),
    "a run": policy_and_keys,
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", ["file", "missing file", "factory"])
def test_a_name_in_data_is_only_looked_up(trap, road, kind):
    name = {"file": trap, "missing file": "/none/none.py:Mine", "factory": "trapped:1"}[kind]
    with pytest.raises(ValueError, match="is not understood here: data names policies that are built in") as caught:
        ROADS[road](name)
    assert "no file" not in str(caught.value)


TYPED = {
    "kvjax/cost_model/auto.py": "arguments",
    "kvjax/cost_model/predict.py": "arguments; prices and rows are looked up",
    "kvjax/cost_model/regimes.py": "arguments",
    "kvjax/engine/policy_set.py": "arguments of an engine",
    "kvjax/evaluation/prompt_recall.py": "a plan",
    "kvjax/evaluation/recall_report.py": "a plan",
    "kvjax/evaluation/run.py": "a plan",
    "kvjax/evaluation/retrieval.py": "arguments",
    "kvjax/policies/decode/__init__.py": "exports it",
    "kvjax/policies/prefill/__init__.py": "exports it",
    "serving/batch/resume.py": "arguments of a job",
    "serving/batch/job.py": "arguments of a job",
    "serving/bench/decode.py": "options",
    "serving/bench/prefill.py": "options",
    "serving/cli/doctor.py": "built-in names",
    "serving/cli/evaluate.py": "options",
    "serving/cli/needle.py": "options",
    "serving/cli/plan.py": "options",
    "serving/cli/policies.py": "an argument",
    "serving/harness.py": "arguments of an adapter",
}
"""The files that load policies by name, and what they take the names from: what a user typed. No other may."""


def test_policies_are_loaded_only_by_names_that_users_typed():
    pattern = re.compile(
        r"^ *from kvjax\.policies\.(?:decode|prefill)(?:\.naming)? import (?:\([^)]*|[^(\n]*)\bparse(?:_prefill)?\b", re.MULTILINE
    )
    folders = ("kvjax", "models", "serving", "pallas_kernels")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()}
    found = {str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith(("kvjax/models/", "kvjax/serving/"))} == set(TYPED)


def test_names_that_this_process_has_made_itself_are_known(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        (ROOT / "tests" / "serving" / "server" / "test_security.py")
        .read_text()
        .partition('MINE = """')[2]
        .partition('"""')[0]
        .format(mark=str(tmp_path / "mark"))
    )
    policy = parse_policy(f"{file}:Mine:2")
    file.unlink()
    assert parse_recorded(f"{file}:Mine:2") is policy
    assert built_in_name(f"{file}:Mine:2") is None


def test_a_saved_sequence_names_no_code(trap, tmp_path):
    engine = small_engine()
    (sequence,) = engine.prefill([list(range(20))])
    path = tmp_path / "saved"
    engine.save(sequence, path)
    engine.free(sequence)
    stored = {"full": np.zeros((2, engine.spec.bytes_per_page("full", ())), np.uint8)}
    for name in (trap, "trapped"):
        write_sequence(path, engine._copies.header | {"keeps": {"policy": name, "reach": [16, 16]}}, list(range(20)), stored)
        with pytest.raises(ValueError, match=r"was saved after another policy's steps: policy .* is not understood here"):
            engine.restore(path)
    assert not engine.sequences


def test_a_record_names_no_policy_and_no_template(trap):
    for field in ("policy", "prefill", "tokenizer"):
        assert field in parse_record(json.dumps({"prompt": "a", field: trap}), 1).error
    for name in ("chat_template", "tokenize", "documents", "tools", "return_tensors"):
        with pytest.raises(ValueError, match=f"'{name}' is not one"):
            chat_ids([{"role": "user", "content": "a"}], make_tokenizer(), {name: "{{ 1 }}"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the model's chat template does not take these messages"):
        chat_ids([{"role": "user", "content": "a"}], tokenizer, {})


class Leaves:
    """An object that touches a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_checkpoint_of_pickles_is_refused_unread(tmp_path, name):
    mark = tmp_path / "mark"
    (tmp_path / name).write_bytes(pickle.dumps(Leaves(mark)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=f"{name}, but no model.safetensors"):
        stored_tensors(tmp_path)
    assert not mark.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert mark.exists()  # it would have


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "inner/x.safetensors", "..", ""])
def test_a_checkpoint_names_no_file_outside_its_folder(tmp_path, shard):
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    for place in (tmp_path / "outside.safetensors", folder / "inner" / "x.safetensors"):
        save_file({"w": np.zeros(1, np.float32)}, place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ValueError, match=r"index\.json"):
        stored_tensors(folder)


def flipped_store(folder, bits):
    """Flip bits of the files of a page store, one at a time, and read all its pages. Returns what happened, and how
    often.

    bits: gives those of all files together, from how many there are.
    """
    pages = {b"%d" % number: np.random.default_rng(number).integers(0, 256, 64, np.uint8) for number in range(3)}
    store = DiskStore(folder, 256, {"full": 64})
    for key, page in pages.items():
        store.put(key, "full", page)
    store.wait()
    store.close()
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.stat().st_size}
    places = [(path, bit) for path, content in whole.items() for bit in range(8 * len(content))]
    found = collections.Counter()
    for number in bits(len(places)):
        path, bit = places[number]
        for each in folder.iterdir():
            each.unlink()
        for each, content in whole.items():
            changed = bytearray(content)
            if each == path:
                changed[bit // 8] ^= 1 << bit % 8
            each.write_bytes(changed)
        try:
            store = DiskStore(folder, 256, {"full": 64})
        except ValueError as error:
            found["refused" if str(folder) in str(error) else "refused without a name"] += 1
            continue
        read = {key: store.read(key).result() for key in pages}
        store.close()
        right = all(block is None or (block == pages[key]).all() for key, block in read.items())
        found["other" if not right else "gone" if any(block is None for block in read.values()) else "same"] += 1
    return found


def test_a_flipped_bit_of_a_page_store_gives_no_other_page(tmp_path):
    found = flipped_store(tmp_path / "pages", lambda count: random.Random(0).sample(range(count), 120))
    assert sum(found.values()) == 120
    assert set(found) <= {"same", "gone", "refused"}


def test_an_index_whose_text_is_no_text_is_refused_by_its_name(tmp_path):
    DiskStore(tmp_path / "pages", 256, {"full": 64}).close()
    path = tmp_path / "pages" / "index.sqlite"
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE about", b"CREATE TABLE \xe1bout"))
    with pytest.raises(ValueError, match=r"the index of .*pages cannot be used"):
        DiskStore(tmp_path / "pages", 256, {"full": 64})


@pytest.mark.long
def test_five_thousand_flipped_bits_of_a_page_store_give_no_other_page(tmp_path):
    found = flipped_store(tmp_path / "pages", lambda count: random.Random(1).sample(range(count), 5000))
    assert set(found) == {"same", "gone", "refused"}


def test_arrays_of_objects_are_not_read(tmp_path):
    mark = tmp_path / "mark"
    np.save(tmp_path / "objects.npy", np.array([Leaves(mark)], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        np.load(tmp_path / "objects.npy")  # as pallas_kernels.bench and tools/train_needle read arrays: NumPy's default
    assert not mark.exists()


def test_the_page_of_roads_names_what_is_there():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    roads = [row for row in rows if len(row) == 3 and row[0] != "way" and not set(row[0]) <= set("-: ")]
    assert len(roads) >= 15
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for road, guard, tested in roads:
        assert guard, road
        names = re.findall(r"`(test_\w+)`", tested)
        assert names or tested == "none: trusted", road
        assert [name for name in names if not re.search(rf"^ *def {name}\(", tests, re.MULTILINE)] == [], road
