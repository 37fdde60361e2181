"""`tools/affected.py` finds the tests that a change can affect, and leaves others out."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def affected():
    sys.path.insert(0, str(ROOT / "tools"))
    import affected

    yield lambda *paths: {str(path) for path in affected.affected([Path(path) for path in paths])}
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize(
    ("path", "inside", "outside"),
    [
        (
            "kvjax/engine/engine.py",
            "tests/serving/sessions/test_sessions.py",
            "tests/pallas_kernels/selection/top_k/test_top_k.py",
        ),  # by the front door
        ("kvjax/cache/allocator.py", "tests/kvjax/cache/test_allocator.py", "tests/pallas_kernels/selection/top_k/test_top_k.py"),
        ("serving/sessions/throttle.py", "tests/serving/sessions/test_throttle.py", "tests/models/test_decoder.py"),
        ("tests/tiny_models.py", "tests/models/test_decoder.py", "tests/kvjax/cache/test_allocator.py"),
        ("docs/walk.md", "tests/test_walk.py", "tests/kvjax/cache/test_allocator.py"),
        ("examples/nano_kvjax.py", "tests/examples/test_nano_kvjax.py", "tests/kvjax/cache/test_allocator.py"),
    ],
)
def test_what_imports_or_names_a_file_is_affected_by_it(affected, path, inside, outside):
    found = affected(path)
    assert inside in found
    assert outside not in found
    assert "tests/test_house.py" in found


def test_nothing_but_the_house_is_affected_by_a_file_that_nobody_names(affected):
    assert affected("-".join(["a", "file", "of", "no", "name"])) == {"tests/test_house.py"}
