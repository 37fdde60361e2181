"""Policies of one's own: registered, loaded from a file, or passed as objects, wherever a policy is named."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from kvjax import Engine, TopBlocks, generate
from kvjax.evaluation.report import policy_and_keys
from kvjax.evaluation.run import Plan
from kvjax.policies import decode as policies
from kvjax.policies import prefill
from kvjax.policies.decode import Blocks, Dense, Stateless, Window, identity, name_of, parse
from kvjax.policies.decode.naming import _NAMES
from kvjax.policies.prefill import DensePrefill, parse_prefill

FILE = """
from __future__ import annotations

import dataclasses

from kvjax.policies.decode import Dense, Stateless, Window
from kvjax.policies.prefill import DensePrefill


class Reader(Stateless):
    def select(self, query, layer, ctx, state):
        return None, state


@dataclasses.dataclass(frozen=True)
class Mine(Window):
    sink_tokens: int = 1
    window_tokens: int = 7

    def __str__(self):
        return f"Mine({self.sink_tokens}, {self.window_tokens})"


@dataclasses.dataclass(frozen=True)
class Chunk(DensePrefill):
    width: int = 3


@dataclasses.dataclass
class Thawed(Reader):
    k: int = 1


class Bare(Reader):
    pass


@dataclasses.dataclass(frozen=True)
class Half:
    def select(self, query, layer, ctx, state):
        return None, state


@dataclasses.dataclass(frozen=True)
class Broken(Dense):
    k: int = 1

    def __post_init__(self):
        raise KeyError("oh")
"""


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    from kvjax.policies.prefill.naming import _NAMES as prefill_names

    for registry in (_NAMES, prefill_names):
        for table in ("_factories", "_named", "_names"):
            monkeypatch.setattr(registry, table, {})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_file.py"
    path.write_text(FILE)
    return path


def test_a_registered_name_stands_for_what_its_factory_makes():
    policies.register("mine", lambda text="5": Window(0, int(text)))
    assert parse("mine") == Window(0, 5)
    assert parse(" mine:9 ") == Window(0, 9)
    policies.register("mine", lambda text="6": Window(1, int(text)), replace=True)
    assert parse("mine") == Window(1, 6)


def test_prefill_policies_are_registered_beside_them():
    prefill.register("mine", lambda text="5": prefill.SinkWindow(1, int(text)))
    assert parse_prefill("mine:4") == prefill.SinkWindow(1, 4)
    with pytest.raises(ValueError, match="policy 'mine' is not understood"):
        parse("mine")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("top", "'top' is a built-in policy; choose another name"),
        ("auto", "built-in"),
        ("known", "'known' is already registered; choose another name, or pass replace=True"),
        ("a:b", "'a:b' cannot name a policy: use a letter"),
        ("a,b", "cannot name"),
        ("", "cannot name"),
        (3, "3 cannot name"),
    ],
)
def test_names_that_are_taken_or_none_are_refused(name, match):
    policies.register("known", Dense)
    with pytest.raises(ValueError, match=match):
        policies.register(name, Dense)


def test_a_factory_is_callable():
    with pytest.raises(ValueError, match="must be callable, a class for instance; got Dense"):
        policies.register("mine", Dense())


def test_a_class_in_a_file_is_named_with_its_arguments(file):
    assert str(parse(f"{file}:Mine")) == "Mine(1, 7)"
    assert str(parse(f"{file}:Mine:2/window_tokens=9")) == "Mine(2, 9)"
    assert parse(f"{file}:Mine:2") == parse(f"{file}:Mine:2"), "the class is the same while the file is"
    assert isinstance(parse_prefill(f"{file}:Chunk:width=4"), DensePrefill)
    file.write_text(FILE.replace("window_tokens: int = 7", "window_tokens: int = 8"))
    assert str(parse(f"{file}:Mine")) == "Mine(1, 8)", "an edit is seen without a new process"


@dataclasses.dataclass(frozen=True)
class Returns(Stateless):
    what: str

    def select(self, query, layer, ctx, state):
        return {"nothing": None, "no list": (query, state), "three": (None, state, state)}[self.what]


def test_a_select_that_returns_no_list_is_told_what_to_return(model_factory):
    engine = Engine(model_factory(), pages=16, batch_buckets=(1,))
    (sequence,) = engine.prefill([[1, 2]])
    said = r"select must return \(Blocks, state\), or \(None, state\) to read every block; it returned "
    for what, kinds in (("nothing", r"\(NoneType\)"), ("no list", r"\(\w+, tuple\)"), ("three", r"\(NoneType, tuple, tuple\)")):
        with pytest.raises(ValueError, match=said + kinds):
            engine.decode([sequence], [3], Returns(what))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("none.py:Mine", "policy 'none.py:Mine': there is no file none.py"),
        ("{file}:Nobody", "has no class Nobody; its classes are Reader, Mine, Chunk, Thawed, Bare, Half, Broken"),
        ("{file}:dataclasses", "has no class dataclasses"),
        ("{file}:Mine:x", "'x' is no number or quoted string"),
        ("{file}:Mine:k=1/k=2", "k is given twice"),
        ("{file}:Mine:1/2/3", r"could not be made: TypeError: Mine.__init__\(\) takes"),
        ("{file}:Mine:depth=3", "unexpected keyword argument 'depth'"),
        ("{file}:Mine:1/0", "could not be made: ValueError: window_tokens must be at least 1"),
        ("{file}:Broken", r"my_file.py, line 49: KeyError: 'oh'"),
        ("{file}:Thawed", "must be hashable .*: make Thawed a frozen dataclass"),
        ("{file}:Reader:[1]", r"Reader\(\) takes no arguments"),
        ("{file}:Bare", "must be equal to another of the same settings: make Bare a frozen dataclass"),
        ("{file}:Half", "a Half has no learns, indexes, init, observe, attend, describe; inherit from kvjax.policies.decode.Stateless"),
        ("{file}:Chunk", "a Chunk has no select, learns"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said_in_one_sentence(file, name, match):
    with pytest.raises(ValueError, match=match) as error:
        parse(name.format(file=file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("x = 1\nimport nothing_of_this_name\n", "line 2: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1\n\ndef f(:\n", "line 3: SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    ],
)
def test_an_error_in_the_file_says_file_line_and_error(tmp_path, source, match):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=f"policy '.*bad.py:Mine': .*bad.py, {match}"):
        parse(f"{path}:Mine")


def test_a_policy_object_is_checked_too(file):
    with pytest.raises(ValueError, match="is a class; make a policy of it: Dense"):
        parse(Dense)
    thawed = dataclasses.make_dataclass("Thawed", [("k", int, 1)], bases=(Stateless,), namespace={"select": Numbered.select})()
    with pytest.raises(ValueError, match="must be hashable"):
        parse(thawed)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(ValueError, match=r"policy 'mine' is not understood; there are dense, .*a registered name, FILE.py:CLASS"):
        parse("mine")
    with pytest.raises(ValueError, match=r"'top:x' is not understood; write it as top:K$"):
        parse("top:x")
    with pytest.raises(ValueError, match=r"'window' is not understood; write it as window:SINK\+WINDOW \(tokens, as .* or window:KEYS"):
        parse("window")
    with pytest.raises(ValueError, match="'heavy:x' is not understood; write it as heavy:K") as told:
        parse("heavy:x")
    assert "heavy-tokens" not in str(told.value)


def test_reports_name_a_policy_so_that_it_is_found_again(file):
    policies.register("mine", lambda text="5": Numbered(int(text)))
    assert name_of(parse("mine:3")) == "mine:3"
    named = f"{file}:Mine:2"
    assert name_of(parse(named)) == named
    own = Numbered(4)
    assert parse(name_of(own)) is own
    assert name_of(own) == "Numbered(k=4)"
    assert name_of(TopBlocks(8)) == "top:8"
    assert parse(name_of(TopBlocks(8, dense_layers=1))) == TopBlocks(8, dense_layers=1)
    with pytest.raises(ValueError, match="calls itself 'top:8', which names another policy: give it a __str__ of its own"):
        name_of(Impostor())


def test_a_journal_sees_an_edit_of_the_file(file):
    before = identity(parse(f"{file}:Mine"))
    assert "my_file.py:Mine, Mine(sink_tokens=1, window_tokens=7, release=False, remap=False), file with SHA-256" in before
    file.write_text(FILE + "\n# edited\n")
    assert identity(parse(f"{file}:Mine")) != before
    assert identity(Dense()) == "Dense()"


def test_an_engine_decodes_by_a_policy_of_ones_own(model, text, file):
    policies.register("mine", lambda text="9": Window(0, int(text)))
    engine = Engine(model, "mine", policies=[f"{file}:Mine:0/9", "window:0+9"], pages=16, page_size=16, prefill_chunk=32)
    (prompt,) = engine.prefill([text[:90]])
    logits = [engine.decode([engine.fork(prompt)], [9], policy) for policy in (None, f"{file}:Mine:0/9", "window:0+9")]
    assert (logits[0] == logits[2]).all()
    assert (logits[1] == logits[2]).all()


def test_an_evaluation_plan_takes_policy_objects_and_keeps_their_names():
    plan = Plan(policies=(Numbered(4), TopBlocks(1), "dense"), lengths=(2048,))
    assert plan.policies == ("Numbered(k=4)", "top:1", "dense")
    assert plan.others == ("Numbered(k=4)", "top:1")
    assert policy_and_keys("Numbered(k=4)") == "Numbered(k=4) (varies)"


@dataclasses.dataclass(frozen=True)
class Numbered(Stateless):
    k: int

    def select(self, query, layer, ctx, state):
        return None, state


@dataclasses.dataclass(frozen=True)
class Impostor(Stateless):
    def select(self, query, layer, ctx, state):
        return None, state

    def __str__(self):
        return "top:8"


@dataclasses.dataclass(frozen=True)
class Elsewhere(Stateless):
    """Lists one block for each KV head: of the last one block `last`, of others block 0."""

    last: int
    per_query: bool = False

    def select(self, query, layer, ctx, state):
        heads = layer.pages.kv_heads
        ids = jnp.where(jnp.arange(heads) == heads - 1, self.last, 0)
        shape = (*query.shape[: 2 if self.per_query else 1], heads, 1)
        return Blocks(jnp.broadcast_to(ids[:, None].astype(jnp.int32), shape), ctx.page_size), state


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("last", [-1, 2, 10**6, 0])
def test_a_list_without_a_key_of_the_sequence_is_an_error(last, per_query, one_layer):
    """Else the head would read nothing, and nobody would know."""
    policy = Elsewhere(last, per_query)
    found = generate(one_layer, list(range(1, 20)), policy=policy, max_new_tokens=3, details=True, on_error="return")
    if last:
        assert re.search("not finite.*check that each list has a block of the sequence", str(found.error))
    else:
        assert found.error is None
        assert len(found.token_ids) == 3
