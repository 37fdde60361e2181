"""The lines of a batch job: the fields of a record, and one clear sentence if something is wrong with it.

There are two formats; each line may have either:

* plain: `id` (text or whole number, unique; the line number where there is none), `prompt` (text, or token ids) or `messages`, and
  `max_new_tokens` or `max_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`,
  `frequency_penalty`, `seed`, `n`, `stop`, `stop_token_ids`, `ignore_eos`, `logprobs`, `top_logprobs`, `cache_salt`; beside `messages`,
  `chat_template_kwargs` for the model's chat template.
* OpenAI's batch file format: `custom_id`, `body`, and `method`, `url` where given; chat completions and completions. The body may also hold
  `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos` and `chat_template_kwargs`, which that API does not have.

`user`, `metadata` and `store` change no answer: they are ignored, and the job's summary says so. Any other field that is unknown, or needs
something that kvjax cannot do, is an error of its record. null means the same as leaving the field out.

Defaults: plain records are greedy and OpenAI requests have that API's temperature of 1, unless the job names a temperature. The length
limit is the job's. The seed is made from the record's id and the job's seed, so equal prompts with different ids give different samples,
and a job that is run again gives the same ones. `model` in an OpenAI body is not checked: the answer's `model` names the model that ran.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROLES = ("system", "user", "assistant")

IGNORED = ("user", "metadata", "store")
"""Fields for programs that store requests; the model does not use them."""

_NUMBERS = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_COUNTS = {"top_k": 0, "n": 1}
_SAMPLING = ("temperature", "cache_salt", *_NUMBERS, *_COUNTS, "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", *IGNORED)
_CHAT = {"messages", "chat_template_kwargs", "top_logprobs"}
_PLAIN = {"id", "prompt", "max_new_tokens", "max_tokens", *_CHAT, *_SAMPLING}
_ENVELOPE = {"custom_id", "method", "url", "body"}
_BODY = {"model", "max_tokens", *_SAMPLING}
_ENDPOINTS = {CHAT: _BODY | _CHAT | {"max_completion_tokens"}, COMPLETIONS: _BODY | {"prompt"}}
_PROMPTS = {None: "prompt or messages", CHAT: "body.messages", COMPLETIONS: "body.prompt"}
# Fields of the API that change nothing at these values, and are not supported with others.
_NEUTRAL = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "suffix": ("",),
}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The job's settings for records without them: max_new_tokens (tokens), temperature (None: the format's default), seed."""

    max_new_tokens: int = 128
    temperature: float | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the input. Exactly one of prompt (text or token ids), messages and error is set.

    line: its number in the input, from 1. endpoint: None for a plain record, else the OpenAI endpoint. sampling: arguments of
    `kvjax.Sampling`. template_options: variables of the chat template. ignored: given fields that change nothing. cache_salt: the
    request's own.
    """

    line: int
    id: str | int | None
    endpoint: str | None = None
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    cache_salt: str | None = None
    error: str | None = None

    @property
    def size(self) -> int:
        """Rough length of the prompt in characters. It groups prompts of similar length without tokenising them."""
        if self.messages is not None:
            return sum(len(message["content"]) for message in self.messages)
        if isinstance(self.prompt, tuple):
            return 4 * len(self.prompt)
        return len(self.prompt or "")


class _Wrong(ValueError):
    """What is wrong with a record, as a message for its author."""


def read(lines: Iterable[bytes | str | Mapping[str, Any]], defaults: Defaults = Defaults()) -> Iterator[Record]:
    """Records of the lines (JSON text, or objects already parsed), in order; blank lines are skipped but counted.

    A bad line gives a record with `error`. So does a line whose id an earlier line has.
    """
    seen: dict[str | int, int] = {}
    for number, line in enumerate(lines, 1):
        if isinstance(line, bytes | str) and not line.strip():
            continue
        record = parse(line, number, defaults)
        if record.id is not None:
            first = seen.setdefault(record.id, number)
            if first != number:
                rule = "ids must be unique, and a record without one gets the number of its line"
                record = _refused(record, f"id {record.id!r} is already used on line {first}; {rule}")
        yield record


def parse(line: bytes | str | Mapping[str, Any], number: int, defaults: Defaults = Defaults()) -> Record:
    """The record of one line. If something is wrong with it, `Record.error` says what."""
    record = Record(number, None)
    try:
        fields = line if isinstance(line, Mapping) else _load(line)
        openai = "custom_id" in fields or "body" in fields
        record = dataclasses.replace(record, endpoint=_endpoint(fields)) if openai else record
        record = dataclasses.replace(record, id=_custom_id(fields) if openai else _plain_id(fields, number))
        body = _unwrap(fields, record.endpoint) if openai else fields
        if not openai:
            _check_known(fields, _PLAIN, "")
        return _fill(record, {key: value for key, value in body.items() if value is not None}, defaults)
    except _Wrong as wrong:
        # Without an id, only the line number identifies the record.
        return _refused(record, f"input line {number}: {wrong}" if record.id is None else str(wrong))


def _refused(record: Record, error: str) -> Record:
    return Record(record.line, record.id, record.endpoint, error=error)


def _fill(record: Record, body: Mapping[str, Any], defaults: Defaults) -> Record:
    prompt, messages = _prompt(body, record.endpoint)
    options = body.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise _Wrong(f"chat_template_kwargs must be a JSON object, got {_kind(options)}")
    if options and messages is None:
        raise _Wrong("chat_template_kwargs are for messages, but this record has a prompt")
    return dataclasses.replace(
        record,
        prompt=prompt,
        messages=messages,
        sampling=_sampling(body, record, defaults),
        template_options=dict(options),
        ignored=tuple(name for name in IGNORED if name in body),
        cache_salt=_text("cache_salt", body["cache_salt"]) if "cache_salt" in body else None,
    )


def _load(line: bytes | str) -> dict[str, Any]:
    """The JSON object of a line. A key given twice is an error, because JSON would silently keep the last."""

    def unique(pairs):
        counted = dict(pairs)
        if len(counted) < len(pairs):
            keys = [key for key, _ in pairs]
            raise _Wrong(f"field {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
        return counted

    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
        fields = json.loads(text, object_pairs_hook=unique)
    except _Wrong:
        raise
    except UnicodeDecodeError as error:
        raise _Wrong(f"the line is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"the line is not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _Wrong(f"the line must be a JSON object, got {_kind(fields)}")
    return fields


def _plain_id(fields: Mapping[str, Any], number: int) -> str | int:
    """The id of a plain record, or its line number."""
    value = fields.get("id")
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Wrong(f"id must be text or a whole number, got {_show(value)}")
    return _text("id", value) if isinstance(value, str) else value


def _custom_id(fields: Mapping[str, Any]) -> str:
    if fields.get("custom_id") is None:
        raise _Wrong("custom_id is missing")
    return _text("custom_id", fields["custom_id"])


def _endpoint(fields: Mapping[str, Any]) -> str:
    """The endpoint of an OpenAI line: its url, else by the fields of its body. Unclear lines count as chat; `_unwrap` checks them."""
    body = fields.get("body")
    if isinstance(fields.get("url"), str) and fields["url"] in _ENDPOINTS:
        return fields["url"]
    return COMPLETIONS if isinstance(body, Mapping) and "prompt" in body and "messages" not in body else CHAT


def _unwrap(fields: Mapping[str, Any], endpoint: str) -> Mapping[str, Any]:
    """The body of an OpenAI line, its envelope and field names checked."""
    _check_known(fields, _ENVELOPE, "")
    if fields.get("method") not in (None, "POST"):
        raise _Wrong(f"method must be 'POST', got {_show(fields['method'])}")
    if fields.get("url") not in (None, *_ENDPOINTS):
        raise _Wrong(f"url {_show(fields['url'])} is not served; there are {', '.join(_ENDPOINTS)}")
    body = fields.get("body")
    if not isinstance(body, Mapping):
        raise _Wrong(f"body must be a JSON object, got {_kind(body)}")
    _check_known(body, _ENDPOINTS[endpoint] | _NEUTRAL.keys(), "body.")
    for key, values in _NEUTRAL.items():
        given = body.get(key)
        if given is not None and not any(_same(given, value) for value in values):
            raise _Wrong(f"body.{key} {_show(given)} is not supported; leave it out or give {json.dumps(values[0])}")
    if body.get("model") is not None:
        _text("body.model", body["model"])
    return body


def _check_known(fields: Mapping[str, Any], known: Iterable[str], prefix: str) -> None:
    unknown = sorted(f"{prefix}{key}" for key, value in fields.items() if value is not None and key not in known)
    if unknown:
        near = difflib.get_close_matches(unknown[0].removeprefix(prefix), [*known], n=1, cutoff=0.75)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise _Wrong(f"unknown or unsupported field {', '.join(map(repr, unknown))}{meant}")


def _prompt(body: Mapping[str, Any], endpoint: str | None) -> tuple[str | tuple[int, ...] | None, tuple[dict[str, str], ...] | None]:
    """(prompt, messages): one of the two is None."""
    names = [name for name in ("prompt", "messages") if name in body]
    if not names:
        raise _Wrong(f"{_PROMPTS[endpoint]} is missing")
    if len(names) == 2:
        raise _Wrong("prompt and messages are both given; a record needs exactly one of them")
    if names == ["messages"]:
        return None, _messages(body["messages"])
    prompt = body["prompt"]
    if isinstance(prompt, list | tuple):
        prompt = _token_ids("prompt", prompt)
    else:
        prompt = _text("prompt", prompt)
    if not prompt:
        raise _Wrong("prompt is empty")
    return prompt, None


def _messages(messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list | tuple) or not messages:
        raise _Wrong(f"messages must be a list of at least one message, got {_show(messages)}")
    checked = []
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise _Wrong(f"{name} must be a JSON object, got {_kind(message)}")
        _check_known(message, ("role", "content"), f"{name}.")
        if message.get("role") not in ROLES:
            # Chat templates silently drop unknown roles.
            raise _Wrong(f"{name}.role must be one of {', '.join(ROLES)}, got {_show(message.get('role'))}")
        checked.append({"role": message["role"], "content": _content(f"{name}.content", message.get("content"))})
    return tuple(checked)


def _content(name: str, content: Any) -> str:
    """Text, given as a string or as a list of text parts."""
    if not isinstance(content, list | tuple):
        return _text(name, content)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise _Wrong(f'{name} may hold only parts {{"type": "text", "text": ...}}, got {_show(part)}')
    return "".join(_text(name, part["text"]) for part in content)


def _sampling(body: Mapping[str, Any], record: Record, defaults: Defaults) -> dict[str, Any]:
    """Arguments of `kvjax.Sampling`: types checked here, ranges there."""
    limits = [name for name in ("max_new_tokens", "max_tokens", "max_completion_tokens") if name in body]
    if len(limits) > 1:
        raise _Wrong(f"{' and '.join(limits)} are both given; give one")
    plain = record.endpoint is None
    temperature = defaults.temperature if defaults.temperature is not None else (0.0 if plain else 1.0)
    sampling = {
        "max_new_tokens": _integer(limits[0], body[limits[0]]) if limits else defaults.max_new_tokens,
        "temperature": _number("temperature", body.get("temperature", temperature)),
        **{name: _number(name, body.get(name, value)) for name, value in _NUMBERS.items()},
        **{name: _integer(name, body.get(name, value)) for name, value in _COUNTS.items()},
        "seed": _integer("seed", body["seed"], 2**32) if "seed" in body else seed_of(record.id, defaults.seed),
        "ignore_eos": _boolean("ignore_eos", body.get("ignore_eos", False)),
        **_logprobs(body, record.endpoint),
    }
    if "stop" in body:
        stop = body["stop"]
        sampling["stop"] = tuple(_text("stop", text) for text in (stop if isinstance(stop, list | tuple) else [stop]))
    if "stop_token_ids" in body:
        sampling["stop_token_ids"] = _token_ids("stop_token_ids", body["stop_token_ids"])
    return sampling


def seed_of(record_id: str | int | None, job_seed: int) -> int:
    """The seed of a record without one: 32 bits of SHA-256 of the job's seed and the record's id."""
    return int.from_bytes(hashlib.sha256(json.dumps([job_seed, record_id]).encode()).digest()[:4], "big")


def _logprobs(body: Mapping[str, Any], endpoint: str | None) -> dict[str, Any]:
    """Whether to return log-probabilities, and for how many of the most likely tokens. Completions have one number for both."""
    if endpoint == COMPLETIONS:
        wanted = "logprobs" in body
        return {"logprobs": wanted, "top_logprobs": _integer("logprobs", body["logprobs"]) if wanted else 0}
    return {
        "logprobs": _boolean("logprobs", body.get("logprobs", False)),
        "top_logprobs": _integer("top_logprobs", body.get("top_logprobs", 0)),
    }


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{name} must be true or false, got {_show(value)}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{name} must be text, got {_show(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Wrong(f"{name} holds half of a surrogate pair at character {error.start}, which is not text") from None
    return value


def _integer(name: str, value: Any, limit: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"{name} must be a whole number, got {_show(value)}")
    if not -limit <= value < limit:
        raise _Wrong(f"{name} is out of range: {_show(value)}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value if isinstance(value, float) else 0):
        raise _Wrong(f"{name} must be a number, got {_show(value)}")
    return float(_integer(name, value)) if isinstance(value, int) else value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _Wrong(f"{name} must be a list of token ids, got {_show(value)}")
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            hint = "; a record has one prompt" if isinstance(token, str) else ""
            raise _Wrong(f"{name}[{place}] must be a token id, got {_show(token)}{hint}")
    return tuple(value)


def _same(given: Any, value: Any) -> bool:
    """Equality in which true is not equal to 1."""
    return isinstance(given, bool) == isinstance(value, bool) and given == value


def _kind(value: Any) -> str:
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def _show(value: Any) -> str:
    """A value for an error message, shortened, because prompts are long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
