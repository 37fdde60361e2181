"""Files that must be the same in every piece that is read."""

import os

import numpy as np
import pytest

from kvjax.known_files import KnownFile


@pytest.fixture
def known(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    os.utime(tmp_path / "a.bin", (1, 1))
    return KnownFile.of(tmp_path / "a.bin")


def replaced(path):
    (path.parent / "b.bin").write_bytes(bytes(100))
    os.utime(path.parent / "b.bin", (1, 1))
    os.replace(path.parent / "b.bin", path)


CHANGES = {
    "replaced": replaced,
    "rewritten": lambda path: path.write_bytes(bytes(100)),
    "cut": lambda path: os.truncate(path, 50),
    "longer": lambda path: os.truncate(path, 150),
}


def test_bytes_are_those_of_the_file(known):
    assert known.size == 100
    for start, count in ((0, 100), (7, 20), (99, 1), (100, 0)):
        np.testing.assert_array_equal(known.read(start, count), np.arange(start, start + count))
    np.testing.assert_array_equal(known.read_parts(3, 2, 4, 10), [[3, 4], [13, 14], [23, 24], [33, 34]])
    known.check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_before_and_during_a_reading_is_refused(known, change):
    def during():
        with known.opened() as file:
            change(known.path)
            file.read(1)
            if change is replaced:  # what is open is still the first file
                known.check()

    for read in (during, lambda: known.read(0, 10), known.check):
        with pytest.raises(ValueError, match=r"a\.bin changed while it was loaded: load it again$"):
            read()


def test_a_change_is_said_before_what_it_leads_to(known):
    def read():
        with known.opened():
            os.truncate(known.path, 0)
            raise ValueError("it is empty")

    with pytest.raises(ValueError, match="changed while it was loaded"):
        read()


def test_a_file_that_is_gone_has_changed(known):
    known.path.unlink()
    with pytest.raises(ValueError, match="changed while it was loaded"):
        known.check()
    with pytest.raises(ValueError, match=r"a\.bin cannot be read"):
        known.read(0, 1)


def test_bytes_that_are_not_there_are_an_error(known):
    with pytest.raises(ValueError, match="changed while it was loaded"):
        known.read(90, 11)
