"""Batch jobs and the server take the same fields, and understand them in the same way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from character_tokenizer import make_tokenizer

from kvjax.client.errors import SessionError
from kvjax.engine.sampling import Sampling
from kvjax.serving.batch.records import CHAT, COMPLETIONS, parse, request_of
from kvjax.serving.bodies import NEUTRAL, show
from kvjax.serving.server.openai_form import asked
from kvjax.serving.server.options import ServerOptions
from kvjax.text.tokenization import encode

TALK = [{"role": "user", "content": "say it"}]
GIVEN = {"max_tokens": 4, "temperature": 0, "seed": 3}

TAKEN = {
    "both limits, equal": ({"max_completion_tokens": 4}, {}),
    "seed of 64 bits": ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    "least seed": ({"seed": -(2**63)}, {"seed": -(2**63)}),
    "seed -1": ({"seed": -1}, {"seed": -1}),
    "top_k -1": ({"top_k": -1, "temperature": 1}, {"top_k": 0, "temperature": 1.0}),
    "top_p 0": ({"top_p": 0}, {"top_p": 0.0}),
    "min_p and penalties": (
        {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 2},
        {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 2.0},
    ),
    "stop": ({"stop": "x"}, {"stop": ("x",)}),
    "six stops": ({"stop": list("abcdef")}, {"stop": tuple("abcdef")}),
    "stop_token_ids": ({"stop_token_ids": [5]}, {"stop_token_ids": (5,)}),
    "stop_token_ids []": ({"stop_token_ids": []}, {}),
    "ignore_eos": ({"ignore_eos": True}, {"ignore_eos": True}),
    "parse_special": ({"parse_special": False}, {}),
    "tool_choice none": ({"tool_choice": "none"}, {}),
    "tool_choice auto": ({"tool_choice": "auto", "tools": []}, {}),
    "parallel_tool_calls": ({"parallel_tool_calls": True}, {}),
    "service_tier": ({"service_tier": "auto"}, {}),
    "user, metadata, store": ({"user": "me", "metadata": {"a": "b"}, "store": True}, {}),
    "logit_bias of 0": ({"logit_bias": {"100": 0, "7": 0.0}}, {}),
    "stream false": ({"stream": False, "stream_options": None}, {}),
    "response_format": ({"response_format": {"type": "text"}}, {}),
    "cache_salt": ({"cache_salt": "mine"}, {}),
    "n 1": ({"n": 1}, {}),
    "best_of 1": ({"best_of": 1}, {}),
    "vLLM's defaults": ({"length_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": True, "use_beam_search": False}, {}),
    "nulls": (dict.fromkeys((*NEUTRAL, "stop", "top_k", "n", "stream", "logprobs", "response_format", "unknown")), {}),
}
REFUSED = [
    {"max_completion_tokens": 5},
    {"max_tokens": 0},
    {"max_tokens": "4"},
    {"max_tokens": 4.0},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": True},
    {"temperature": "0"},
    {"seed": 2**63},
    {"seed": 1.5},
    {"seed": True},
    {"top_k": -2},
    {"top_k": 2**31},
    {"top_p": -0.1},
    {"top_p": 1.1},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": 3},
    {"stop": ["\ud800"]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 3},
    {"stop": ["x"] * 1025},
    {"stop_token_ids": [5] * (2**16 + 1)},
    {"ignore_eos": 1},
    {"clip": "yes"},
    {"parse_special": 1},
    {"n": True},
    {"cache_salt": 3},
    {"cache_salt": ""},
    {"model": 3},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"parallel_tool_calls": 1},
    {"logit_bias": {"100": 1}},
    {"logit_bias": [0]},
    {"response_format": {"type": "json_object"}},
    {"modalities": ["text", "audio"]},
    {"best_of": 2},
    {"echo": True},
    {"suffix": "x"},
    {"stream": 0},
    {"stream": "false"},
    {"stream_options": {"include_usage": "no"}},
    {"stream_options": {"other": True}},
    {"min_tokens": 3},
    {"reasoning_effort": "low"},
    {"unknown": 1},
    {"logprobs": "yes"},
]


@pytest.fixture(scope="module")
def model():
    return SimpleNamespace(tokenizer=make_tokenizer(), config=SimpleNamespace(max_positions=700))


def by_batch(body, url, model):
    """(prompt ids, sampling) of a record with this body; or its error."""
    record = parse({"custom_id": "a", "url": url, "body": body}, 1)
    if record.error is not None:
        return record.error
    try:
        request = request_of(record, model.tokenizer, model.config.max_positions)
        return request.prompt, request.sampling
    except ValueError as error:
        return str(error)


def by_http(body, url, model):
    """The same of an HTTP request."""
    try:
        engine = SimpleNamespace(model=model, config=model.config)
        runtime = SimpleNamespace(engine=engine, room_after=lambda tokens, most: min(most, model.config.max_positions - tokens))
        found = asked({"model": "tiny"} | body, url == CHAT, runtime, ServerOptions(model_name="tiny"))
    except SessionError as error:
        return str(error)
    return found.ids, Sampling(**found.sampling, stop=found.stop)


def both(fields, url, model):
    body = ({"messages": TALK} if url == CHAT else {"prompt": "say it"}) | GIVEN | fields
    return by_batch(body, url, model), by_http(body, url, model)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", TAKEN)
def test_both_take_the_fields_of_ordinary_files(model, url, name):
    fields, expected = TAKEN[name]
    if url == COMPLETIONS:
        fields = {field: value for field, value in fields.items() if field != "max_completion_tokens"}
    batch, http = both(fields, url, model)
    assert not isinstance(batch, str), batch
    assert batch == http
    assert batch[1] == Sampling(**{"max_new_tokens": 4, "temperature": 0.0, "seed": 3} | expected)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: f"{fields!s:.60}")
def test_both_refuse_the_others_in_the_same_words(model, url, fields):
    batch, http = both(fields, url, model)
    assert isinstance(batch, str)
    assert batch.replace("body.", "") == http
    assert next(iter(fields)) in batch or "max_new_tokens" in batch


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [(["say it"], True), ([[5, 6]], True), ([5, 6], True), (["a", "b"], False), ([], False), ([[]], False), ("", False)],
)
def test_both_take_a_prompt_in_a_list_of_one(model, prompt, taken):
    batch, http = both({"prompt": prompt}, COMPLETIONS, model)
    if prompt == ["a", "b"]:
        assert batch == "prompt is a list of 2; a record has one prompt, so give each a record of its own"
        assert http == "prompt is a list of 2; a request has one prompt, so send a request for each"
        return
    assert batch == http
    assert isinstance(batch, tuple) == taken
    if prompt == ["say it"]:
        assert batch[0] == encode(model.tokenizer, "say it")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "developer", "content": "x"}, *TALK], None),
        ([{"role": "user", "name": "u", "content": "x"}], None),
        ([*TALK, {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}, *TALK], None),
        ([*TALK, CALLING, {"role": "tool", "tool_call_id": "1", "content": "7"}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "say"}, {"type": "text", "text": " it"}]}], None),
        ([], "at least one message"),
        ("say it", "at least one message"),
        (["say it"], "messages[0] must be an object"),
        ([{"role": "user", "content": None}], "messages[0].content must be text"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "age": 7}], "'age'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
    ],
)
def test_both_read_messages_in_the_same_way(model, messages, said):
    model = SimpleNamespace(tokenizer=make_tokenizer(), config=model.config)
    model.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
    )
    batch, http = both({"messages": messages}, CHAT, model)
    assert batch == http
    assert isinstance(batch, tuple) == (said is None), batch
    assert said is None or said in batch


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}])
def test_what_only_a_batch_job_does_is_named_by_the_server(model, fields):
    batch, http = both(fields, CHAT, model)
    assert not isinstance(batch, str)
    assert next(iter(fields)) in http


def test_the_server_takes_fewer_stop_tokens(model):
    batch, http = both({"stop_token_ids": [5] * 1025}, CHAT, model)
    assert len(batch[1].stop_token_ids) == 1025
    assert http == "1,025 stop tokens in one call are more than the limit of 1,024"


def test_only_the_server_streams(model):
    batch, http = both({"stream": True}, CHAT, model)
    assert "stream true is not supported in a batch job" in batch
    assert http[1].max_new_tokens == 4


def test_values_in_errors_are_short_however_deep_or_long_they_are():
    deep = 1
    for _ in range(9985):
        deep = [deep]
    for value in (deep, {"a": deep}, "x" * 10**6, [1] * 10**6, 10**4000, 10**6000, {str(n): n for n in range(10**4)}):
        assert 0 < len(show(value)) <= 80
