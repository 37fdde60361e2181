"""Chat messages: which ones are taken, and their token ids. One reading for Python, batch files and HTTP."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvjax.checks import check_flag
from kvjax.text.checkpoint_files import first_line
from kvjax.text.plain_texts import PlainTexts, tokenized

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("name", "reasoning_content", "tool_call_id")
_EMPTY = {"refusal": (None,), "audio": (None,), "function_call": (None,), "annotations": (None, []), "tool_calls": (None, [])}
"""Fields that clients send back as they got them, and that say nothing at these values."""
logger = logging.getLogger(__name__)

_SHORT = reprlib.Repr(maxstring=60, maxother=60, maxlist=3, maxtuple=3, maxdict=3, maxlevel=3)


def checked_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages as a chat template takes them.

    Each has a role of `ROLES` and a content: text, or a list of text parts, which are joined. The content of an
    assistant may be null, as beside tool calls; it is then empty. The role developer is the newer name of system. An
    assistant's tool_calls have their arguments as JSON text or as an object. ValueError names the message, the field
    and what to write.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {_show(messages)}")
    try:
        return tuple(_checked(f"messages[{place}]", message) for place, message in enumerate(messages))
    except RecursionError:
        raise ValueError("lists and objects of messages are nested too deeply") from None


def _checked(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be an object with a role and a content, got {_show(message)}")
    fields = {key: value for key, value in message.items() if not (key in _EMPTY and value in _EMPTY[key])}
    if unknown := sorted(f"{key!s:.60}" for key in fields.keys() - {"role", "content", "tool_calls", *_TEXTS}):
        raise ValueError(f"{name} has the unknown or unsupported field {unknown[0]!r}: it may have a role, a content, name, tool_calls, "
                         "tool_call_id and reasoning_content")  # fmt: skip
    role = fields.get("role")
    if role not in ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}, got {_show(role)}")
    content = fields.get("content")
    if content is None and role == "assistant":
        content = ""
    found = {"role": "system" if role == "developer" else role, "content": _content(f"{name}.content", content)}
    found |= {key: _text(f"{name}.{key}", fields[key]) for key in _TEXTS if fields.get(key) is not None}
    if "tool_calls" in fields:
        if role != "assistant":
            raise ValueError(f"{name}.tool_calls belong to the role assistant, and this message has the role {role}")
        found["tool_calls"] = _tool_calls(f"{name}.tool_calls", fields["tool_calls"])
    return found


def _content(name: str, content: Any) -> str:
    """Text, given as a string or as a list of text parts."""
    if not isinstance(content, list | tuple):
        return _text(name, content)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise ValueError(f'{name} may hold only parts {{"type": "text", "text": ...}}, got {_show(part)}')
    return "".join(_text(name, part["text"]) for part in content)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {_show(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair at character {error.start}, which is not text") from None
    return value


def _check_texts(name: str, value: Any) -> None:
    """ValueError for a text inside a value that is none."""
    if isinstance(value, str):
        _text(name, value)
    elif isinstance(value, Mapping | list | tuple):
        for each in itertools.chain(value, value.values() if isinstance(value, Mapping) else ()):
            _check_texts(name, each)


def _tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls, with their arguments as objects, as templates take them."""
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{name} must be a list of tool calls, got {_show(calls)}")
    return [_tool_call(f"{name}[{place}]", call) for place, call in enumerate(calls)]


def _tool_call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise ValueError(f"{name} must be {form}, got {_show(call)}")
    given = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}.function.arguments must be a JSON object, got {_show(given)}")
    _check_texts(f"{name}.function.arguments", arguments)
    found = {"type": "function", "function": {"name": _text(f"{name}.function.name", function.get("name")), "arguments": dict(arguments)}}
    return found if call.get("id") is None else found | {"id": _text(f"{name}.id", call["id"])}


def chat_ids(
    messages: Iterable[Mapping[str, Any]], tokenizer: Any, template_options: Mapping[str, Any], *, parse_special: bool = False
) -> tuple[int, ...]:
    """Token ids of a conversation, rendered by the model's chat template up to where the assistant's answer begins.

    template_options: variables of the template, such as {"enable_thinking": False}. parse_special: whether special
    tokens that the messages or the variables hold are control tokens; False: they are plain text, so that nobody who
    writes a message can end it. ValueError for an option that is an argument of `apply_chat_template` itself, for
    messages that the template does not accept or makes an empty text of, and if it leaves out what a tool returned.
    """
    check_flag("parse_special", parse_special)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give prompt as token ids")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the model has no chat template for messages: give prompt, or put a chat_template.jinja in the model's folder")
    reserved = {"messages", "conversations", "self", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in sorted(reserved & template_options.keys()):  # a job that goes on says the same
        raise ValueError(f"chat_template_kwargs may hold only variables of the model's chat template, and {name!r} is not one")
    _check_texts("chat_template_kwargs", template_options)
    given = list(checked_messages(messages))
    _check_tools(given, template_options, tokenizer)
    if parse_special:  # the template writes the special tokens at the beginning and the end itself
        text = _not_empty(rendered(given, template_options, tokenizer, answer=True))
        return tuple(tokenized(tokenizer, text, add_special_tokens=False)["input_ids"])
    plain = PlainTexts(tokenizer, given, template_options)

    def render(change: Callable[..., Any]) -> str:
        # Roles are no texts: templates ask for them.
        changed = [change(message, answer=message["role"] == "assistant") | {"role": message["role"]} for message in given]
        return rendered(changed, change(template_options), tokenizer, answer=True)

    ids = plain.ids(_not_empty(render(plain.mark)))
    plain.check(ids, render)
    return tuple(ids)


def _not_empty(text: str) -> str:
    """The text. ValueError if there is none."""
    if not text:
        raise ValueError("the model's chat template gave an empty text for these messages: give prompt, or correct the template")
    return text


def rendered(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], tokenizer: Any, *, answer: bool) -> str:
    """What the model's chat template makes of messages. answer: up to where the assistant's answer begins. ValueError
    if it cannot."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer, **options)
    except ImportError:  # jinja2 is missing, so the record is not at fault
        raise
    except Exception as error:  # templates are programs that come with the model, and may raise anything
        raise ValueError(f"the model's chat template does not take these messages: {first_line(error)}") from error


def _check_tools(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], tokenizer: Any) -> None:
    """ValueError if the template leaves out what a tool returned. Logs a warning if it leaves out which tools were
    called, as older ones do."""
    begin = secrets.token_hex(8)  # which no text of theirs holds
    results = {place: f"{begin}{place}e" for place, message in enumerate(messages) if message["role"] == "tool"}
    calls = {
        (place, number): f"{begin}{place}c{number}e"
        for place, message in enumerate(messages)
        for number, _ in enumerate(message.get("tool_calls", ()))
    }
    if not results and not calls:
        return
    named = [{**message, "content": results.get(place, message["content"])} for place, message in enumerate(messages)]
    for place, message in enumerate(named):
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "name": calls[place, number]}}
                for number, call in enumerate(message["tool_calls"])
            ]
    try:
        text = rendered(named, options, tokenizer, answer=True)
    except ValueError:  # it looks into what tools return, or knows their names
        return
    for place, name in results.items():
        if name not in text:
            raise ValueError(f"the model's chat template leaves out messages[{place}], what a tool returned: give it as a user's message")
    if not all(name in text for name in calls.values()):
        _warn_of_calls(tokenizer)


@functools.lru_cache(maxsize=16)
def _warn_of_calls(tokenizer: Any) -> None:
    """Say it once for a tokenizer: a job may have a million such records."""
    logger.warning("the model's chat template does not show which tools earlier answers called (tool_calls): the model will not see it")


def _show(value: Any) -> str:
    """A value for an error message, shortened; it may be nested deeper than Python prints."""
    return _SHORT.repr(value)
