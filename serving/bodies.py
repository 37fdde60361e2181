"""What a request asks for, read from the fields of a record of a batch job or of the body of an HTTP request, and
checked.

Batch jobs and the server read OpenAI's fields here and nowhere else, so both take the same ones and understand them in
the same way. `Fields` says which fields there are:

* `PLAIN`: kvjax's own records. `prompt` (text, or token ids) or `messages`, and `max_new_tokens` or `max_tokens`,
  `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `seed`, `n`,
  `stop`, `stop_token_ids`, `ignore_eos`, `logprobs`, `top_logprobs`, `cache_salt`, `clip` (true: an answer that the
  model has no room for is cut, and no error); beside `messages`, `chat_template_kwargs` for the model's chat template,
  and `parse_special` (true: special tokens in messages are control tokens).
* `CHAT`, `COMPLETIONS`: OpenAI's bodies. They may also hold those of the fields above that OpenAI's API does not have,
  and fields of that API, and of vLLM's, that kvjax does not have, at values that ask for nothing (`NEUTRAL`).

null means the same as leaving a field out. The fields of `IGNORED` change no answer. Any other field that is unknown,
or needs something that kvjax cannot do, is an error. A limit may be given under two names if both have the same value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvjax.checks import check_salt
from kvjax.engine.sampling import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from kvjax.text.messages import chat_ids, checked_messages, rendered
from kvjax.text.token_bounds import check_text
from kvjax.text.tokenization import encode
from pallas_kernels.core.files import LongNumber, parse_json

SHOWN = 80
"""Characters of a value, or of a name, that an error message shows."""
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields for programs that store, bill and route requests; the model does not use them."""

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = {*_NUMBERS, "top_k", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "clip", "logprobs", "cache_salt", *IGNORED}
_CHATS = {"messages", "chat_template_kwargs", "parse_special", "top_logprobs"}
_OPENAI = {"model", "max_tokens", "stream", "stream_options", *_SAMPLING}
_LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}


class WrongField(ValueError):
    """What is wrong with a field, as a message for the author of the request. field: its name, or ""."""

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


class Fields(enum.Enum):
    """Which fields a request may have."""

    PLAIN = frozenset({"prompt", "max_new_tokens", "max_tokens", *_CHATS, *_SAMPLING})
    CHAT = frozenset({"max_completion_tokens", *_CHATS, *_OPENAI})
    COMPLETIONS = frozenset({"prompt", *_OPENAI})


_PROMPTS = {Fields.PLAIN: "prompt or messages", Fields.CHAT: "messages", Fields.COMPLETIONS: "prompt"}


def _is(*values: Any) -> Callable[[Any], bool]:
    """Whether a value is one of these. true is not 1, and 1 is 1.0."""
    return lambda given: any(isinstance(given, bool) == isinstance(value, bool) and given == value for value in values)


def _biases_nothing(given: Any) -> bool:
    """Whether a `logit_bias` changes no logit."""
    return isinstance(given, Mapping) and all(map(_is(0), given.values()))


NEUTRAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message", "include_stop_str_in_output"), (_is(False), "false")),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (_is(True), "true")),
    **dict.fromkeys(("tools", "functions", "bad_words"), (_is([]), "[]")),
    # Without tools there is none to choose, nor several to call.
    **dict.fromkeys(("tool_choice", "function_call"), (_is("none", "auto"), '"none"')),
    **dict.fromkeys(("min_tokens", "priority", "top_logprobs"), (_is(0), "0")),
    "parallel_tool_calls": (_is(True, False), "false"),
    "best_of": (_is(1), "1"),
    "length_penalty": (_is(1), "1"),
    "logit_bias": (_biases_nothing, "{}"),
    "response_format": (_is({"type": "text"}), '{"type": "text"}'),
    "modalities": (_is(["text"]), '["text"]'),
    "verbosity": (_is("medium"), '"medium"'),
    "suffix": (_is(""), '""'),
    "chat_template_kwargs": (_is({}), "{}"),
    "parse_special": (_is(False), "false"),
}
"""Fields of OpenAI's bodies that kvjax does not have: when a value asks for nothing, and such a value as JSON."""


@dataclasses.dataclass(frozen=True)
class Body:
    """What a request asks for. Exactly one of prompt (text or token ids) and messages is set.

    sampling: the arguments of `kvjax.Sampling` that it gives; their types are checked here, their ranges there.
    max_new_tokens is left out if no limit was given, and so on. limit_field: the name under which the limit was given.
    template_options: variables of the chat template. stream, usage: whether the answer is sent piece by piece, and ends
    with counts of tokens. model: the name that was given. ignored: fields that were given and change nothing.
    """

    prompt: str | tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    sampling: Mapping[str, Any]
    limit_field: str
    template_options: Mapping[str, Any]
    parse_special: bool
    cache_salt: str | None
    stream: bool
    usage: bool
    model: str | None
    ignored: tuple[str, ...]


def read_body(fields: Mapping[str, Any], form: Fields, where: str = "", *, over_http: bool = False) -> Body:
    """What these fields ask for. where: comes before the names of unknown fields in errors, as in "body.". over_http:
    whether they are a request's, and not a record's. WrongField if something is wrong."""
    optional = {} if form is Fields.PLAIN else {name: each for name, each in NEUTRAL.items() if name not in form.value}
    check_known(fields, form.value | optional.keys(), where)
    given = {name: value for name, value in fields.items() if value is not None}
    for name in optional.keys() & given.keys():
        asks_nothing, example = optional[name]
        if not asks_nothing(given[name]) and not (name == "best_of" and _is(given[name])(given.get("n"))):
            raise WrongField(f"{where}{name} {show(given[name])} is not supported; leave it out or give {example}", name)
    if not given.keys() & {"prompt", "messages"}:
        raise WrongField(f"{where}{_PROMPTS[form]} is missing", "messages" if form is Fields.CHAT else "prompt")
    prompt, messages = _prompt(given, over_http)
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise WrongField(f"chat_template_kwargs must be a JSON object, got {kind(options)}", "chat_template_kwargs")
    if options and messages is None:
        raise WrongField("chat_template_kwargs are for messages, but this record has a prompt", "chat_template_kwargs")
    parse_special = boolean("parse_special", given.get("parse_special", False))
    if parse_special and messages is None:
        raise WrongField("parse_special is for messages, but this record has a prompt", "parse_special")
    limit_field, limit = _limit(given)
    sampling = _sampling(given, form) | ({} if limit is None else {"max_new_tokens": limit})
    stream, usage = _streaming(given)
    return Body(
        prompt=prompt,
        messages=messages,
        sampling=sampling,
        limit_field=limit_field,
        template_options=dict(options),
        parse_special=parse_special,
        cache_salt=_salt(given),
        stream=stream,
        usage=usage,
        model=text(f"{where}model", given["model"]) if "model" in given else None,
        ignored=tuple(name for name in IGNORED if name in given),
    )


def prompt_ids(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    tokenizer: Any,
    positions: int,
    *,
    parse_special: bool = False,
) -> list[int]:
    """Token ids of a request's prompt: of text, of ids, or of messages, which the chat template renders with `options`.

    positions: the model's; a text that is far longer is refused before it is tokenized, which would take minutes.
    ValueError says what is wrong with the prompt. parse_special: whether special tokens in messages are control tokens,
    and not plain text.
    """
    try:
        if messages is None:
            if isinstance(prompt, str):
                check_text(tokenizer, prompt, positions)
            return encode(tokenizer, prompt)
        if len(messages) > positions:
            raise ValueError(f"{len(messages):,} messages are more than the model's {positions:,} positions")
        if len(json.dumps([messages, options], default=str)) > positions:  # rendering twice costs little beside tokenizing
            check_text(tokenizer, rendered(messages, options, tokenizer, answer=True), positions)
        return list(chat_ids(messages, tokenizer, options, parse_special=parse_special))
    except RecursionError:
        raise ValueError("lists and objects of the messages or of chat_template_kwargs are nested too deeply") from None


def from_json(content: bytes | str) -> tuple[Any, list[tuple[dict[str, Any], str]]]:
    """The value of a JSON text, and (object, name) of each field that one of its objects gives twice: the object has
    the last value, where nobody knows which was meant. WrongField for numbers that are too long and for lists and
    objects that are nested too deeply, another ValueError for what is no JSON."""
    twice: list[tuple[dict[str, Any], str]] = []

    def counted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice.extend((fields, name) for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return fields

    try:
        return parse_json(content, counted), twice
    except LongNumber as error:
        raise WrongField(f"{error}; no field takes such a number") from None
    except RecursionError:
        raise WrongField("lists and objects are nested too deeply") from None


def check_once(twice: Sequence[tuple[dict[str, Any], str]]) -> None:
    """WrongField if there is a field that was given twice. twice: of `from_json`."""
    if twice:
        raise WrongField(f"field {show(twice[0][1])} is given twice", twice[0][1])


def check_known(fields: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """WrongField if a field has a name that is not known. where: comes before the names."""
    unknown = sorted(str(name) for name, value in fields.items() if value is not None and name not in known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*known], n=1, cutoff=0.75) if len(unknown[0]) <= SHOWN else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        more = f" and {len(unknown) - 3:,} more" if len(unknown) > 3 else ""
        raise WrongField(f"unknown or unsupported field {', '.join(show(where + name) for name in unknown[:3])}{more}{meant}", unknown[0])


def _prompt(given: Mapping[str, Any], over_http: bool) -> tuple[str | tuple[int, ...] | None, tuple[dict[str, Any], ...] | None]:
    """(prompt, messages): one of the two is None."""
    if {"prompt", "messages"} <= given.keys():
        raise WrongField("prompt and messages are both given; a record needs exactly one of them", "prompt")
    if "messages" in given:
        return None, _messages(given["messages"])
    prompt = given["prompt"]
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        if len(prompt) > 1:
            remedy = (
                "request has one prompt, so send a request for each"
                if over_http
                else "record has one prompt, so give each a record of its own"
            )
            raise WrongField(f"prompt is a list of {len(prompt):,}; a {remedy}", "prompt")
        prompt = prompt[0]
    prompt = token_ids("prompt", prompt) if isinstance(prompt, list | tuple) else text("prompt", prompt)
    if not prompt:
        raise WrongField("prompt is empty", "prompt")
    return prompt, None


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    try:
        return checked_messages(messages)
    except ValueError as error:
        raise WrongField(str(error), "messages") from None


def _limit(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """The name under which the limit was given, and the limit. Two names are fine if they agree: clients send both for
    older servers."""
    limits = {name: whole(name, given[name]) for name in _LIMITS if name in given}
    if len(set(limits.values())) > 1:
        raise WrongField(
            f"{' and '.join(f'{name} {limit}' for name, limit in limits.items())} are both given; give one", next(iter(limits))
        )
    name, limit = next(iter(limits.items()), ("max_new_tokens", None))
    if limit is not None and limit < 1:
        raise WrongField(f"{name} must be at least 1, got {limit}", name)
    return name, limit


def _sampling(given: Mapping[str, Any], form: Fields) -> dict[str, Any]:
    """Arguments of `kvjax.Sampling` without the limit."""
    sampling: dict[str, Any] = {name: number(name, given[name]) for name in _NUMBERS if name in given}
    sampling |= {name: whole(name, given[name]) for name in ("top_k", "n") if name in given}
    if "seed" in given:
        sampling["seed"] = whole("seed", given["seed"], 2**63)
    sampling |= {name: boolean(name, given[name]) for name in ("ignore_eos", "clip") if name in given}
    if "stop" in given:
        stop = given["stop"]
        stop = stop if isinstance(stop, list | tuple) else [stop]
        sampling["stop"] = tuple(text("stop", each) for each in _at_most("stop", stop, MAX_STOP_STRINGS))
    # vLLM's clients send its default, [], which there means no more than the model's own; ignore_eos is for none at
    # all.
    if "stop_token_ids" in given and not (form is not Fields.PLAIN and _is([])(given["stop_token_ids"])):
        sampling["stop_token_ids"] = token_ids("stop_token_ids", _at_most("stop_token_ids", given["stop_token_ids"], MAX_STOP_TOKEN_IDS))
    return sampling | _logprobs(given, form)


def _logprobs(given: Mapping[str, Any], form: Fields) -> dict[str, Any]:
    """Whether to return log-probabilities, and for how many of the most likely tokens. Completions have one number for
    both."""
    if form is Fields.COMPLETIONS:
        if given.get("logprobs", False) is False:
            return {}
        most = whole("logprobs", given["logprobs"])
        if not 0 <= most <= MAX_TOP_LOGPROBS:
            raise WrongField(f"logprobs must be a number from 0 to {MAX_TOP_LOGPROBS}, got {most}", "logprobs")
        return {"logprobs": True, "top_logprobs": most}
    found: dict[str, Any] = {"logprobs": boolean("logprobs", given["logprobs"])} if "logprobs" in given else {}
    return found | ({"top_logprobs": whole("top_logprobs", given["top_logprobs"])} if "top_logprobs" in given else {})


def _at_most(name: str, value: Any, most: int) -> Any:
    """The value; WrongField for a longer list: checking each of millions takes seconds."""
    if isinstance(value, list | tuple) and len(value) > most:
        raise WrongField(f"{name} may have at most {most:,} entries, and has {len(value):,}", name)
    return value


def _salt(given: Mapping[str, Any]) -> str | None:
    try:
        check_salt(given.get("cache_salt"))
    except ValueError as error:
        raise WrongField(str(error), "cache_salt") from None
    return given.get("cache_salt")


def _streaming(given: Mapping[str, Any]) -> tuple[bool, bool]:
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or options.keys() - _STREAM_OPTIONS:
        raise WrongField(f"stream_options may hold include_usage, got {show(options)}", "stream_options")
    for each in options.values():
        if each is not None:
            boolean("stream_options", each)
    return boolean("stream", given.get("stream", False)), bool(options.get("include_usage", False))


def boolean(name: str, value: Any) -> bool:
    """The value of a field that is true or false; WrongField for others: "false" is not false."""
    if not isinstance(value, bool):
        raise WrongField(f"{name} must be true or false, got {show(value)}", name)
    return value


def text(name: str, value: Any) -> str:
    """The value of a field that is text which UTF-8 can hold; WrongField for others."""
    if not isinstance(value, str):
        raise WrongField(f"{name} must be text, got {show(value)}", name.partition("[")[0])
    try:
        value.encode()
    except UnicodeEncodeError as error:
        said = f"{name} holds half of a surrogate pair at character {error.start}, which is not text"
        raise WrongField(said, name.partition("[")[0]) from None
    return value


def whole(name: str, value: Any, limit: int = 2**31) -> int:
    """The value of a field that is a whole number in [-limit, limit); WrongField for others."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongField(f"{name} must be a whole number, got {show(value)}", name)
    if not -limit <= value < limit:
        raise WrongField(f"{name} is out of range, which goes from {-limit:,} to {limit - 1:,}: {show(value)}", name)
    return value


def number(name: str, value: Any) -> float:
    """The value of a field that is a number, and finite; WrongField for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value if isinstance(value, float) else 0):
        raise WrongField(f"{name} must be a number, got {show(value)}", name)
    return float(whole(name, value)) if isinstance(value, int) else value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The value of a field that is a list of token ids; WrongField for others."""
    if not isinstance(value, list | tuple):
        raise WrongField(f"{name} must be a list of token ids, got {show(value)}", name)
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise WrongField(f"{name}[{place}] must be a token id, got {show(token)}", name)
    return tuple(value)


def kind(value: Any) -> str:
    """What a value is, in words for an error message."""
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", type(None): "nothing"}
    return names.get(type(value), "a JSON object" if isinstance(value, Mapping) else type(value).__name__)


_SHORT = reprlib.Repr(maxlevel=3, maxdict=6, maxlist=6, maxtuple=6, maxstring=SHOWN, maxlong=SHOWN, maxother=SHOWN)


def show(value: Any) -> str:
    """A value for an error message, shortened: prompts are long, and JSON may be nested more deeply than Python can
    print."""
    said = f"({kind(value)})"
    with contextlib.suppress(ValueError, RecursionError):  # Python does not print a number of 5,000 digits either
        said = _SHORT.repr(value)
    return said if len(said) <= SHOWN else f"{said[: SHOWN - 3]}..."
