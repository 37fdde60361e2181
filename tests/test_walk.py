"""docs/walk.md names the functions that `kvjax.generate` calls, in the order of their first calls."""

import ast
import itertools
import re
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
from character_tokenizer import make_tokenizer
from tiny_models import make_model

import kvjax
from kvjax import Engine

ROOT = Path(__file__).parent.parent
WALK = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
STOP = re.compile(r"^(\d+)\. \*\*[^*]+\*\*\s+\[`([\w/.]+)`\]\(\.\./([\w/.]+)\),\s+`([\w.]+)`\.", re.MULTILINE)
"""A stop begins with its number, a title, a link to a file, and a function or method of it."""

Stop = tuple[str, str]
"""A file, and the name of a function in it."""


def stops_of(text: str) -> list[Stop]:
    """The stops of a page, in its order. ValueError unless every numbered item is one, and they are counted from 1."""
    found = STOP.findall(text)
    if [int(number) for number, *_ in found] != list(range(1, len(re.findall(r"^\d+\. ", text, re.MULTILINE)) + 1)):
        raise ValueError("the numbered items are not all stops, counted from 1")
    if any(shown != target for _, shown, target, _ in found):
        raise ValueError("a link leads to another file than it says")
    return [(path, name) for _, path, _, name in found]


def defined_in(path: str) -> set[str]:
    """The functions of a file, and the methods of its classes, as `Class.method`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    holders = [("", tree), *((f"{each.name}.", each.body) for each in tree if isinstance(each, ast.ClassDef))]
    return {prefix + each.name for prefix, body in holders for each in body if isinstance(each, ast.FunctionDef)}


def unknown(stops: list[Stop]) -> list[Stop]:
    """Stops whose file or function is not there."""
    return [(path, name) for path, name in stops if not (ROOT / path).is_file() or name not in defined_in(path)]


def faults(stops: list[Stop], calls: list[Stop]) -> list[str]:
    """What is wrong with the order of some stops. calls: the functions that were called, each once, in the order of
    their first calls."""
    places = {call: place for place, call in enumerate(calls)}
    found = [f"{name} is not called" for path, name in stops if (path, name) not in places]
    pairs = itertools.pairwise(stop for stop in stops if stop in places)
    return found + [f"{later[1]} is called before {first[1]}" for first, later in pairs if places[later] < places[first]]


def listen(calls: dict[Stop, None]):
    """A function for `sys.setprofile` that notes the functions of this repository in the order of their first calls."""
    known = {}

    def hear(frame, event, _):
        if event == "call" and frame.f_code not in known:
            known[frame.f_code] = path = Path(frame.f_code.co_filename).resolve()  # kvjax/models is a link to models
            if path.is_relative_to(ROOT):
                calls[str(path.relative_to(ROOT)), frame.f_code.co_qualname] = None

    return hear


@pytest.fixture(scope="module")
def calls() -> list[Stop]:
    """The functions that a call of `generate` calls. What is jitted is called while it is traced, so nothing may be
    compiled already."""
    model, pieces, found = make_model(vocab_size=99), [], {}
    model.tokenizer = make_tokenizer()
    options = {"policy": "top:1", "max_new_tokens": 3, "stream": lambda number, piece: pieces.append(piece), "ignore_eos": True}
    jax.clear_caches()
    before = sys.getprofile()
    warm = {"compile_chunk_ahead": False, "holds_up": False}  # as if every program were compiled
    sys.setprofile(listen(found))
    try:
        # Kernels of ours select and attend in one launch.
        with kvjax.dispatch("xla"), mock.patch.multiple(Engine, **{name: mock.Mock(return_value=found) for name, found in warm.items()}):
            text = kvjax.generate(model, "The pass key for golden river is 48213. " * 5, **options)
    finally:
        sys.setprofile(before)
    assert "".join(pieces) == text
    return list(found)


def test_every_stop_is_a_function_of_the_file_that_it_links():
    stops = stops_of(WALK)
    assert len(stops) == 20
    assert f"stops at {len(stops)} functions" in WALK
    assert unknown(stops) == []


def test_the_stops_are_called_in_the_order_of_the_page(calls):
    assert faults(stops_of(WALK), calls) == []


def test_stops_that_are_swapped_are_found(calls):
    stops = sorted({*stops_of(WALK)} & {*calls}, key=calls.index)
    assert faults(stops, calls) == []
    for place in range(len(stops) - 1):
        swapped = [*stops[:place], stops[place + 1], stops[place], *stops[place + 2 :]]
        assert f"{stops[place][1]} is called before {stops[place + 1][1]}" in faults(swapped, calls)


def test_a_stop_that_is_not_called_is_found(calls):
    stops = [calls[0], ("kvjax/engine/engine.py", "Engine.suspend"), calls[-1]]
    assert unknown(stops[1:2]) == []
    assert faults(stops, calls) == ["Engine.suspend is not called"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("`Engine.step`.", "`Engine.steps`."),
        ("`append`.", "`seal_pages`."),
        ("`DecodeBatch.cache`.", "`cache`."),
        ("[`kvjax/cache/writes.py`](../kvjax/cache/writes.py)", "[`kvjax/cache/gone.py`](../kvjax/cache/gone.py)"),
    ],
)
def test_a_wrong_name_is_found(before, after):
    assert WALK.count(before) == 1
    assert len({*unknown(stops_of(WALK.replace(before, after)))} - {*unknown(stops_of(WALK))}) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("`encode`. A", "the encoder. A"),
        ("\n3. ", "\n4. "),
        ("(../kvjax/generation.py)", "(../kvjax/registry.py)"),
    ],
)
def test_a_page_that_is_not_read_whole_is_refused(before, after):
    assert WALK.count(before) == 1
    with pytest.raises(ValueError, match=r"numbered items|another file"):
        stops_of(WALK.replace(before, after))


def test_what_the_text_mentions_exists():
    """Names are words of the source files; fields and arguments count, too. Files are there, or in the folders of
    ops."""
    sources = [path for folder in ("kvjax", "models", "pallas_kernels") for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    named = re.findall(r"`([A-Za-z_][\w./]*)`", WALK)
    files = {name for name in named if name.endswith(".py")}
    assert (len(named), len(files)) > (60, 20)
    assert {name for name in files if not (ROOT / name).exists() and not list((ROOT / "pallas_kernels").rglob(name))} == set()
    assert {name for name in named if "/" not in name and name not in files and not words.issuperset(name.split("."))} == set()
