"""CONTRIBUTING.md names only files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MADE_BY_COMMANDS = (".venv", ".jax_cache", "out")


def named_paths(text: str) -> list[str]:
    """Every word with a folder or an ending, in backticks, in commands and in the table of folders, without what
    commands make."""
    spans = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    indented = [word for line in text.splitlines() if line.startswith("    ") for word in line.split()]
    words = [word.strip("'\"()").rstrip(".,;:") for word in spans + indented]
    paths = [word for word in words if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)*(/|\.(py|md|toml|lock|sh))|\.?[\w-]+(/[\w.-]+)+", word)]
    return [path for path in paths if path.split("/")[0] not in MADE_BY_COMMANDS]


def missing(text: str) -> list[str]:
    """Paths that are neither in the repository nor, where they name a file alone, in a folder of an op."""
    found = [path for path in named_paths(text) if not (ROOT / path).exists()]
    return [path for path in found if "/" in path or not list((ROOT / "pallas_kernels").rglob(path))]


def test_every_path_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(named_paths(text)) >= 30
    assert not missing(text)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("see `models/qwen4.py`", ["models/qwen4.py"]),
        ("see `tests/paging.py` and `tools/gone.py`", ["tools/gone.py"]),
        ("    .venv/bin/pytest tests/gone/test_it.py", ["tests/gone/test_it.py"]),
        ("    gone/   a folder", ["gone/"]),
        ("`mosaic_metal.py` is a kernel, `xla.py` another", ["mosaic_metal.py"]),
        ("`pyproject.toml`, `requirements.lock`", []),
        ("`.jax_cache/` and `out/docs` are made", []),
    ],
)
def test_a_path_that_does_not_exist_is_found(text, lost):
    assert missing(text) == lost
