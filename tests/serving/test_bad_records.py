"""Bad records by the hundred in one job: each is an error of its own line, and its neighbours' answers are what they are without it."""

from __future__ import annotations

import json

from kvjax.serving.batch.job import run_file
from kvjax.serving.batch.records import Defaults

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
