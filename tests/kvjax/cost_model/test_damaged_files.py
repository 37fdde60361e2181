"""Files of cost models, prefill times and evidence that are damaged or edited by hand: a sentence names the file, or
they load."""

import copy
import dataclasses
import json
import random
import re

import pytest
from tiny_models import QWEN_7B

from kvjax.cost_model import Evidence, Price, known_cost_models, known_prefill_times, load_cost_models, recorded_evidence
from kvjax.cost_model.evidence import LEVELS, read_evidence, with_evaluation
from kvjax.cost_model.predict import closest
from kvjax.cost_model.prefill_times import read_prefill_times
from kvjax.cost_model.records import to_json
from pallas_kernels.core.files import _sealed

COST = to_json(next(cost for cost in known_cost_models() if cost.bus is not None and cost.exchanges is not None))
ROW = dataclasses.asdict(recorded_evidence()[0])
TIMES = to_json(known_prefill_times()[0])
KINDS = {
    "cost_models": (load_cost_models, COST),
    "rows": (read_evidence, ROW),
    "prefill_times": (read_prefill_times, TIMES),
}
INF = float("inf")


def text_of(kind, text):
    """The text of a file of a kind: evidence has a checksum, so that only who makes that anew can edit it."""
    return _sealed(text[:-1]) if kind == "rows" and text.endswith("}") else text


def places(value, place=()):
    """The places of all values inside another one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places(each, (*place, key))


def put(value, place, new):
    """A copy with another value at a place; new: `KeyError` to leave it out."""
    value = copy.deepcopy(value)
    held = value
    for key in place[:-1]:
        held = held[key]
    if new is KeyError:
        del held[place[-1]]
    else:
        held[place[-1]] = new
    return value


WRONG_COSTS = [
    (("sizes", 0), 0, "sizes of a cost model must begin with a number of layers, got (0,"),
    (("sizes", 4), {}, "each of sizes of a cost model must be a whole number, got {}"),
    (("sizes",), [], "sizes of a cost model must begin with a number of layers, got ()"),
    (("sizes",), 5, "sizes of a cost model must be a list, got 5"),
    (("measured", 0), [1, 2], "each of measured of a cost model must be 3 values, got [1, 2]"),
    (("measured", 0), [1, "2", 3], "each of measured of a cost model must be a whole number, got '2'"),
    (("measured", 0, 0), [1], "each of measured of a cost model must be a whole number"),
    (("measured", 0, 0), 0, "each of measured of a cost model must be at least 1, got 0"),
    (("measured",), [], "measured of a cost model is empty, so it is without measured steps"),
    (("bytes_per_s",), 0, "bytes_per_s of a cost model must be a finite number above 0, got 0"),
    (("bytes_per_s",), 10**400, "bytes_per_s of a cost model must be a finite number above 0"),
    (("c0",), True, "c0 of a cost model must be a finite number, 0 or more, got True"),
    (("c1", "top:8", "per_byte"), INF, "per_byte of top:8 in c1 of a cost model must be a finite number, 0 or more, got inf"),
    (("c1", "top:8", "fixed"), "1", "fixed of top:8 in c1 of a cost model must be a finite number, 0 or more, got '1'"),
    (("c1", "top:8", "fixed"), KeyError, "top:8 in c1 of a cost model has the fields fixed, per_byte; different here: fixed"),
    (("c1",), [], "c1 of a cost model must be an object, got"),
    (("error",), KeyError, "; different here: error"),
    (("more",), 1, "; different here: more"),
    (("\ud800",), 1, "; different here: \\ud800"),
    (("model",), [], "model of a cost model must be text, got"),
    (("model",), "\ud800", "model of a cost model must be text, got"),
    (("dtype",), "int8", "dtype of a cost model must be one of float32, bfloat16, float16, got 'int8'"),
    (("weights",), 8, "weights of a cost model must be text, got 8"),
    (("cache_format",), "int9", "cache format 'int9' cannot be read"),
    (("steps_per_launch",), 1.5, "steps_per_launch of a cost model must be a whole number, got 1.5"),
    (("assumed",), [1], "each of assumed of a cost model must be text, got 1"),
    (("bus",), 5, "bus of a cost model has the fields "),
    (("bus", "per_s"), INF, "per_s of bus of a cost model must be a finite number above 0, got inf"),
    (("bus", "hits"), "all", "hits of bus of a cost model must be a finite number"),
    (("bus", "hits"), 1.5, "hits is the share"),
    (("exchanges", "latency_s"), None, "latency_s of exchanges of a cost model must be a finite number"),
    (("exchanges", "policies"), [None], "each of policies of exchanges of a cost model must be text"),
    (("exchanges", "measured"), [[1, 2, 3]], "each of measured of exchanges of a cost model must be 5 values"),
]
WRONG_ROWS = [
    (("model",), 5, "model of a row of evidence must be text, got 5"),
    (("policy",), [], "policy of a row of evidence must be text"),
    (("length",), 8192.0, "length of a row of evidence must be a whole number"),
    (("kl",), "0", "kl of a row of evidence must be a finite number"),
    (("valid",), INF, "valid of a row of evidence must be a whole number, got inf"),
    (("lost",), True, "lost of a row of evidence must be a whole number, got True"),
    (("lost",), None, "must both be whole numbers, or both null"),
    (("task",), KeyError, "; different here: task"),
]
WRONG_TIMES = [
    (("seconds",), [], "seconds of prefill times must be an object"),
    (("seconds", "dense"), [], "dense in seconds of prefill times must be an object"),
    (("seconds", "dense"), {"many": 1.0}, "each key of dense in seconds of prefill times must be a whole number, got 'many'"),
    (("seconds", "dense"), {"8": INF}, "8 in dense in seconds of prefill times must be a finite number"),
    (("sizes", "heads"), 1.5, "heads of sizes of prefill times must be a whole number"),
    (("error",), None, "error of prefill times must be a finite number"),
    (("device",), {}, "device of prefill times must be text"),
]


@pytest.mark.parametrize(
    ("kind", "place", "new", "said"),
    [
        (kind, *case)
        for kind, cases in (("cost_models", WRONG_COSTS), ("rows", WRONG_ROWS), ("prefill_times", WRONG_TIMES))
        for case in cases
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, kind, place, new, said):
    read, whole = KINDS[kind]
    file = tmp_path / "edited.json"
    file.write_text(text_of(kind, json.dumps({kind: [whole, put(json.loads(json.dumps(whole)), place, new)]})))
    with pytest.raises(ValueError, match=rf"edited\.json: {kind}\[1\]: .*{re.escape(said)}") as caught:
        read(file)
    assert str(caught.value).encode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "more than 50 deep"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "more than 50 deep"),
        ('{"rows": 5, "cost_models": 5, "prefill_times": 5}', "must hold a list"),
        ('{"a": 5}', "must hold a list"),
        ("5", "must hold a JSON object, not int"),
        ("{", "is not JSON"),
        ("9" * 5000, r"is not JSON \(a number has more than 4,300 digits\)"),
        (b"\xff", "is not JSON"),
    ],
    ids=["nested", "deep", "no list", "empty", "number", "cut", "digits", "bytes"],
)
def test_what_is_no_such_file_is_named(tmp_path, kind, text, said):
    file = tmp_path / "edited.json"
    file.write_bytes(text if isinstance(text, bytes) else text_of(kind, text).encode())
    with pytest.raises(ValueError, match=rf"edited\.json .*{said}.*; give "):
        KINDS[kind][0](file)


@pytest.mark.parametrize("run", [{"settings": 5}, {"settings": {"fingerprint": "f", "windows": "5", "steps": 256}}])
def test_a_run_of_other_kinds_is_named(run):
    with pytest.raises(ValueError, match=r"evaluation\.json is no evaluation\.json of kvjax evaluate"):
        with_evaluation((), run, "evaluation.json")


def use(kind, made):
    """Do with what was loaded what commands do with it."""
    if kind == "cost_models":
        found = closest(made, QWEN_7B, "bfloat16")
        known = [name for name, _ in found.c1 if name.startswith("top:")]
        assert all(found.predict(QWEN_7B, policy, 8192, 2).seconds >= 0 for policy in ("dense", *known))
        assert str(found)
        hash(found)
    elif kind == "rows":
        assert all(row.meets(LEVELS["fast"]) in (True, False) for row in made)
    else:
        assert all(times.quote("dense", 512, 1024).seconds is not None for times in made)


@pytest.mark.parametrize("kind", KINDS)
def test_random_changes_are_refused_with_the_files_name_or_load(tmp_path, kind):
    draw, file, counts = random.Random(kind), tmp_path / "edited.json", {True: 0, False: 0}
    read, whole = KINDS[kind]
    good = json.loads(json.dumps({kind: [whole, whole]}))
    deep = [[]]
    for _ in range(40):
        deep = [deep]
    others = (
        None,
        True,
        0,
        1,
        -1,
        1.5,
        10**30,
        10**400,
        float("nan"),
        INF,
        -INF,
        "",
        "x",
        "\ud800",
        "8",
        [],
        [1],
        [[1, 2]],
        {},
        {"x": 1},
        deep,
    )
    for _ in range(300):
        changed = good
        for _ in range(draw.choice((1, 1, 2))):
            place = draw.choice(list(places(changed)))
            changed = put(changed, place, draw.choice((KeyError, *others)))
            if draw.random() < 0.1 and isinstance(changed.get(kind), list) and changed[kind] and isinstance(changed[kind][0], dict):
                changed[kind][0][draw.choice(("x", "\ud800"))] = draw.choice(others)
        text = text_of(kind, json.dumps(changed))
        if draw.random() < 0.1:
            text = draw.choice((text[: draw.randrange(len(text))], text.replace("1", "[" * 10**5, 1), text.replace('"', "", 1)))
        file.write_text(text)
        made, said = (), ""
        try:
            made = read(file)
        except ValueError as error:
            said = f"{type(error).__name__}: {error}"
        counts[not said] += 1
        assert not said or (said.startswith(f"ValueError: {file}") and said.encode()), text
        if made:
            use(kind, made)
    assert min(counts.values()) >= 5, counts


def test_values_in_python_are_checked_too():
    cost = known_cost_models()[0]
    for changed in ({"c1": (("top:8", Price(INF)),)}, {"sizes": (0,)}, {"measured": ((1, 2),)}, {"measured": ([1, 2, 3],)}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(cost, **changed)
    with pytest.raises(ValueError, match="must be a whole number"):
        Evidence(**(ROW | {"valid": INF}))
