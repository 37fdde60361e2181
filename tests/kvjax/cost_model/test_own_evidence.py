"""What `kvjax evaluate --record` keeps on a machine, and what `auto` then knows."""

import itertools
import json
import os
from pathlib import Path

import pytest

from kvjax.cost_model import evidence, recorded_evidence
from kvjax.cost_model.evidence import EVIDENCE_FOLDER, known_evidence, record_evaluation, write_evidence

RUN = Path(__file__).parents[3] / "benchmarks" / "results" / "h200" / "fidelity-cascade.json"
OTHER = "sha256-" + 32 * "0"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def run():
    return json.loads(RUN.read_text())


def of_another_model(run):
    return run | {"settings": run["settings"] | {"fingerprint": OTHER, "model": "other"}}


def test_a_run_that_is_kept_is_known_of_its_model_alone(home, run):
    assert known_evidence(OTHER) == ()
    file = record_evaluation(of_another_model(run), "here.json")
    assert file == home / EVIDENCE_FOLDER / f"{OTHER}.json"
    assert (home / EVIDENCE_FOLDER).stat().st_mode & 0o777 == 0o700
    assert (home / EVIDENCE_FOLDER).parent.stat().st_mode & 0o777 == 0o700, "compiled programs are kept there, too"
    rows = known_evidence(OTHER)
    assert rows
    assert {(row.model, row.fingerprint, row.source) for row in rows} == {("other", OTHER, "here.json")}
    assert record_evaluation(of_another_model(run), "again.json") == file
    assert {row.source for row in known_evidence(OTHER)} == {"again.json"}, "a second run of the same replaces the first"
    mark = run["settings"].get("fingerprint", recorded_evidence()[0].fingerprint)
    assert set(known_evidence(mark)) == {row for row in recorded_evidence() if row.fingerprint == mark}


def test_own_measurements_count_in_place_of_those_in_the_package(home, run):
    mark = next(row.fingerprint for row in recorded_evidence() if row.model == "needle")
    package = known_evidence(mark)
    record_evaluation(run | {"settings": run["settings"] | {"fingerprint": mark}}, "own.json")
    rows = known_evidence(mark)
    own = {(row.policy, row.length) for row in rows if row.source == "own.json"}
    assert own
    assert {row for row in rows if row.source != "own.json"} == {row for row in package if (row.policy, row.length) not in own}


def test_a_folder_that_others_may_write_is_refused(home):
    folder = home / EVIDENCE_FOLDER
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    with pytest.raises(ValueError, match=r"evidence must be a folder of this user alone \(chmod 700\)"):
        known_evidence(OTHER)


@pytest.mark.parametrize("mark", ["../../etc/passwd", "sha256-" + 31 * "0", "sha256-" + 31 * "0" + "/", "", OTHER + "\n"])
def test_a_fingerprint_names_no_other_file(home, run, mark):
    with pytest.raises(ValueError, match="is no fingerprint of a model"):
        record_evaluation(run | {"settings": run["settings"] | {"fingerprint": mark}}, "here.json")
    assert not list(home.rglob("*.json"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_not_passed_over(home, run, kind):
    """Else `auto` would choose by the package's rows, and nobody would know."""
    folder = home / EVIDENCE_FOLDER
    folder.mkdir(parents=True, mode=0o700)
    path = folder / f"{OTHER}.json"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("nothing")}[kind]()
    with pytest.raises(ValueError, match=f"{OTHER}.json is no file of evidence"):
        known_evidence(OTHER)
    with pytest.raises(ValueError, match=f"{OTHER}.json is no file of evidence"):
        record_evaluation(run | {"settings": run["settings"] | {"fingerprint": OTHER}}, "here.json")


@pytest.fixture
def kept(home, run):
    """A file of few rows."""
    file = record_evaluation(of_another_model(run), "here.json")
    write_evidence(known_evidence(OTHER)[:2], file)
    return file


def test_a_flipped_bit_of_recorded_evidence_is_refused(kept, run):
    """A file whose rows make sense may say of one policy what was measured of another."""
    whole = kept.read_bytes()
    assert known_evidence(OTHER)
    for place, bit in itertools.product(range(len(whole)), range(8)):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"^{kept} .*; delete it, and measure again with kvjax evaluate --record$"):
            known_evidence(OTHER)
    kept.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="its checksum is of other content"):
        record_evaluation(of_another_model(run), "here.json")


def test_evidence_that_changes_after_its_checksum_was_compared_is_refused(kept, monkeypatch):
    os.utime(kept, (1, 1))  # a clock of the file system may stand still between two writes of a test
    real = evidence.check_sealed

    def checked(*given):
        real(*given)
        kept.write_bytes(kept.read_bytes())

    monkeypatch.setattr(evidence, "check_sealed", checked)
    with pytest.raises(ValueError, match=rf"^{kept} changed while it was loaded: load it again$"):
        known_evidence(OTHER)


def test_evidence_without_a_checksum_is_refused(kept):
    """An earlier version of kvjax wrote none."""
    content = json.loads(kept.read_text())
    del content["crc"]
    kept.write_text(json.dumps(content, indent=1) + "\n")
    with pytest.raises(ValueError, match=rf"^{kept} has no checksum, .* earlier version of kvjax; delete it, and measure again"):
        known_evidence(OTHER)


def test_a_damaged_file_is_named(home):
    folder = home / EVIDENCE_FOLDER
    folder.mkdir(parents=True, mode=0o700)
    (folder / f"{OTHER}.json").write_text('{"rows": [{"model": 5}]}')
    with pytest.raises(ValueError, match=f"{OTHER}.json"):
        known_evidence(OTHER)


def test_to_know_what_was_recorded_takes_no_home(home, monkeypatch):
    """Where nothing was recorded, nothing is made: `auto` runs in a home that is missing or cannot be written to."""
    assert known_evidence(OTHER) == ()
    assert not (home / EVIDENCE_FOLDER).exists()
    mark = recorded_evidence()[0].fingerprint
    (home / "a file").touch()
    monkeypatch.setattr(Path, "home", lambda: home / "a file")
    assert {row.fingerprint for row in known_evidence(mark)} == {mark}

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert {row.fingerprint for row in known_evidence(mark)} == {mark}


def test_a_link_in_place_of_the_folder_is_refused(home):
    folder = home / EVIDENCE_FOLDER
    folder.parent.mkdir(parents=True)
    folder.symlink_to(home / "elsewhere")
    with pytest.raises((ValueError, FileExistsError), match="evidence"):
        known_evidence(OTHER)
