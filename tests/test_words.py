"""docs/words.md names only what there is."""

import importlib
import re
from pathlib import Path

import pytest

WORDS = (Path(__file__).parent.parent / "docs" / "words.md").read_text(encoding="utf-8")


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one. A field of a dataclass counts."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_every_name_exists():
    names = re.findall(r"`([^`]+)`", WORDS)
    assert len(names) > 50
    assert [name for name in names if not exists(name)] == []


def test_every_entry_begins_with_its_word_and_no_word_is_explained_twice():
    entries = re.findall(r"^\* (?:\*\*([^*]+)\*\*: )?", WORDS, re.MULTILINE)
    assert "" not in entries
    words = [word for entry in entries for word in entry.split(", ")]
    assert sorted(set(words)) == sorted(words)


@pytest.mark.parametrize("name", ["kvjax.nothing", "kvjax.cache.PagedKV.nothing", "kvjax.gone.Engine", "nothing"])
def test_a_name_that_is_gone_is_found(name):
    assert not exists(name)
