"""Bad records by the hundred in one job: each is an error of its own line, and its neighbours' answers are what they
are without it."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.serving.batch.job import run_batch, run_file
from kvjax.serving.batch.records import Defaults
from kvjax.serving.bodies import NEUTRAL, Fields

GOOD = [
    {"id": "plain", "prompt": "amber basil", "max_new_tokens": 6},
    {"id": "drawn", "prompt": "coral delta", "max_new_tokens": 9, "temperature": 1.0, "seed": 3},
    {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "quartz"}], "max_tokens": 5, "temperature": 0}},
]
TAKEN = ("top_k -1", "seed -1")


def bad_lines() -> list[bytes]:
    """Lines none of which can be answered: values no field takes, and lines that are no records."""
    plain = {"prompt": "amber", "max_new_tokens": 4}
    objects = [
        plain | {"prompt": value} for value in (None, True, -1, 1.5, [], {}, "", ["x", "y"], [[-1]], [-1], [2**40], [1.5], [480], [True])
    ]
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "stop", "logprobs"):
        objects += [plain | {name: value} for value in (-1, {}, ["x", 1], 2**63, {"a": 1}) if f"{name} {value}" not in TAKEN]
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "logprobs"):
        objects += [plain | {name: value} for value in ("x", [1.5], 10**400)]
    for name in ("temperature", "top_p"):
        objects += [plain | {name: value} for value in (float("nan"), float("inf"), -float("inf"), True)]
    objects += [plain | {"max_new_tokens": value} for value in (0, 1.0, 2**31, True, 5000)]
    objects += [plain | {"unknown": 1}, plain | {"messages": [{"role": "user", "content": "x"}]}, {"messages": []}, {"messages": "x"}]
    objects += [{"messages": [message]} for message in ("x", {}, {"role": "user"}, {"role": "nobody", "content": "x"}, {"content": "x"})]
    objects += [{"messages": [{"role": "user", "content": value}]} for value in (1, [1], [{"type": "image"}], "\ud800", {"text": "x"})]
    objects += [plain | {"id": value} for value in (1.5, True, [], {}, "\ud800")]
    objects += [
        {"custom_id": f"c{n}", "body": body} for n, body in enumerate((None, 1, "x", [], {}, {"prompt": 1}, {"model": 3, "prompt": "x"}))
    ]
    objects += [
        {"custom_id": 5, "body": plain},
        {"custom_id": "u", "url": "/v1/embeddings", "body": plain},
        {"custom_id": "m", "method": "GET", "body": plain},
    ]
    objects += [plain | {"prompt": [1] * 5000}, plain | {"prompt": "amber " * 5000}]
    lines = [json.dumps({"id": f"bad{n}"} | value if "custom_id" not in value else value).encode() for n, value in enumerate(objects)]
    lines += [b"nonsense", b"{", b"}", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "x"', b"{'prompt': 'x'}"]
    lines += [b'{"prompt": NaN}', b"{" * 5000, b"[" * 100_000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"a":1}\x00']
    return lines


def test_every_bad_record_is_an_error_of_its_own(engine, tmp_path, capsys):
    defaults, bad = Defaults(max_new_tokens=4), bad_lines()
    good = [json.dumps(record).encode() for record in GOOD]
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good) + b"\n")
    run_file(tmp_path / "good.jsonl", tmp_path / "alone.jsonl", engine, slots=3, defaults=defaults)
    expected = [parsed(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    step = len(bad) // len(good) + 1
    mixed = [line for part, record in enumerate(good) for line in (*bad[part * step : (part + 1) * step], record)]
    assert len(mixed) == len(bad) + len(good)
    assert len(bad) >= 131
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join(mixed) + b"\n")
    summary = run_file(tmp_path / "mixed.jsonl", tmp_path / "out.jsonl", engine, slots=3, defaults=defaults)
    found = [parsed(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == len(mixed)
    assert [answer for answer, line in zip(found, mixed, strict=True) if line in good] == expected
    without_error = [line[:80] for answer, line in zip(found, mixed, strict=True) if line not in good and not answer.get("error")]
    assert not without_error
    for answer, line in zip(found, mixed, strict=True):
        if line not in good:
            error = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
            assert 0 < len(error) < 400, line[:80]
            assert "\n" not in error
    assert summary.errors == len(bad)
    with capsys.disabled():
        print(f"\n{len(bad)} bad records, {len(without_error)} without an error, 0 good answers changed")


def parsed(line: str):
    """A line of strict JSON, without times and the numbers that OpenAI answers are given by their line."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def kept(fields):
        return {
            k: v for k, v in fields.items() if k not in ("created", "request_id") and not str(v).startswith(("batch_req_", "chatcmpl-"))
        }

    return json.loads(line, object_hook=kept, parse_constant=refuse)


# Lines by structure: a record of some kind, with any values, deep, long or strange, in some of its fields

DEPTHS = (3, 40, 900, 2000, 9000, 9985, 30_000)
ODD = ("", "\0", "\ud800", "x" * 50, "amber", "\u2028", "<|end|>", "é")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.sampled_from([2**31, -(2**63), 2**63, 10**400, 0.5, -1.5, 1e308])
    | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("role", "content", "type", "text", "function")), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = [{"role": "user", "content": "basil"}]
BASES = (
    {"prompt": "amber"},
    {"prompt": [5, 6]},
    {"messages": MESSAGES},
    {"custom_id": "c", "body": {"prompt": "amber", "max_tokens": 2}},
    {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": MESSAGES, "max_tokens": 2}},
)
NAMES = sorted({*Fields.PLAIN.value, *Fields.CHAT.value, *NEUTRAL, "id", "custom_id", "url", "method", "body", "odd", "x" * 10_000})
DEEP = "@deep@"


@st.composite
def records(draw):
    """The text of a line, and whether it has a field that is nested deeply."""
    record = json.loads(json.dumps(draw(st.sampled_from(BASES))))
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        inside = record["body"] if isinstance(record.get("body"), dict) and draw(st.booleans()) else record
        inside[name] = draw(VALUES | st.just(DEEP) | st.just([DEEP]) | st.just({"a": DEEP}))
    if draw(st.integers(0, 9)) == 0:
        place, messages = draw(st.sampled_from(("role", "content", "tool_calls", "name"))), [dict(MESSAGES[0])]
        messages[0][place] = draw(VALUES | st.just(DEEP))
        record = {"messages": messages}
    depth, (left, right) = draw(st.sampled_from(DEPTHS)), draw(st.sampled_from((("[", "]"), ('{"a":', "}"))))
    text = json.dumps(record).replace(json.dumps(DEEP), left * depth + "1" + right * depth)
    cut = draw(st.integers(0, len(text))) if draw(st.integers(0, 19)) == 0 else len(text)
    return text[:cut] or "{"


def check_lines(lines, engine):
    """Every line has an answer or an error, which is short, and can be written."""
    named = []
    for number, line in enumerate(lines):  # ids would repeat; a plain record that has none gets the number of its line
        named.append(line.replace('"custom_id": "c"', f'"custom_id": "c{number}"'))
    try:
        found = list(run_batch(named, engine, slots=3, defaults=Defaults(max_new_tokens=2)))
    except ValueError as error:
        if "with other content" not in str(error) or len(str(error)) > 600:
            raise
        return
    for answer in found:
        json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()
        error = answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"]
        assert error is None or 0 < len(error) <= 1100
    assert 0 < len(found) <= len(lines)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(records(), min_size=20, max_size=20))
def test_no_record_ends_a_job(engine, lines):
    check_lines(lines, engine)


@pytest.mark.long
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(records(), min_size=20, max_size=20))
def test_no_record_of_ten_thousand_ends_a_job(engine, lines):
    check_lines(lines, engine)


def test_lists_that_python_can_read_and_not_print_are_an_error_of_their_line(engine):
    def line(name, depth):
        values = (
            {"messages": MESSAGES, "max_new_tokens": 2, "chat_template_kwargs": 1}
            if name == "chat_template_kwargs"
            else {"prompt": "amber"}
        )
        deep = ("[" * depth + "1" + "]" * depth) if name != "chat_template_kwargs" else '{"a":' * depth + "1" + "}" * depth
        return json.dumps({"id": f"{name} {depth}"} | values | {name: DEEP}).replace(json.dumps(DEEP), deep)

    names = ("stop", "seed", "user", "unknown", "chat_template_kwargs")
    # How deep Python reads depends on the stack; at one of these depths it reads, and could not print.
    lines = [line(name, depth) for name in names for depth in (3000, *(range(9900, 10_000) if name == "stop" else ()))]
    lines += ['{"id": "good", "prompt": "amber", "max_new_tokens": 2}']
    answered = list(run_batch(lines, engine, slots=3, defaults=Defaults(max_new_tokens=2)))
    assert len(answered) == len(lines)
    found = {answer["id"]: answer["error"] for answer in answered}
    assert found["stop 3000"] == "stop must be text, got [[[[...]]]]"
    assert "nested too deeply" in found["chat_template_kwargs 3000"]
    assert (found["user 3000"], found["good"]) == (None, None)
    assert all(error is None or len(error) < 400 for error in found.values())
