"""Requests in OpenAI's form: what they ask for, checked, and the bodies of their answers.

The shim is frozen: what is not here is refused, not ignored. Source: ADR 0008, section 2.7; OpenAI's API reference.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.client.errors import InvalidArgument, ResourceExhausted, SessionNotFound
from kvjax.prompts import chat_ids, encode

if TYPE_CHECKING:
    from kvjax.model import Model
    from kvjax.serving.session.desk import ServerOptions

NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
SHARED = {*NUMBERS, "model", "max_tokens", "stop", "stream", "stream_options", "n", "user"}
COMPLETION = SHARED | {"prompt"}
CHAT = SHARED | {"messages", "max_completion_tokens", "chat_template_kwargs"}
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions. For chats it is all that the model has room for."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request. ids: the prompt. sampling: fields of `Session.generate`. stop: strings that end the text. chat: which form its answer
    has. stream: whether it is sent piece by piece; usage: with a last piece that counts tokens."""

    ids: list[int]
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    chat: bool
    stream: bool
    usage: bool


def asked(body: Any, chat: bool, model: Model, options: ServerOptions) -> Asked:
    """What a request asks for. chat: whether it came to /v1/chat/completions. InvalidArgument names the field; SessionNotFound for another
    model, ResourceExhausted above a limit of the server."""
    if not isinstance(body, Mapping):
        raise InvalidArgument("the body must be a JSON object")
    known = CHAT if chat else COMPLETION
    for field in body.keys() - known:
        raise InvalidArgument(f"{field} is not supported here: the fields are {', '.join(sorted(known))}", field=field)
    given = {field: value for field, value in body.items() if value is not None}
    if given.get("model") != options.model_name:
        raise no_model(given.get("model"), options.model_name)
    if given.get("n", 1) != 1 or isinstance(given.get("n"), bool):
        raise InvalidArgument("n must be 1: send the request again for another answer", field="n")
    streaming = given.get("stream_options", {})
    if not isinstance(streaming, Mapping) or streaming.keys() - {"include_usage", "include_obfuscation"}:
        raise InvalidArgument("stream_options may hold include_usage", field="stream_options")
    for field, value in (("stream", given.get("stream", False)), *(("stream_options", value) for value in streaming.values())):
        if not isinstance(value, bool | None):  # "false" is no False
            raise InvalidArgument(f"{field} takes true or false, got {value!r:.60}", field=field)
    if not isinstance(given.get("chat_template_kwargs", {}), Mapping):
        raise InvalidArgument("chat_template_kwargs must be an object", field="chat_template_kwargs")
    prompt = given.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if isinstance(prompt, list) and len(prompt) > options.max_tokens:  # before each of millions is looked at
        raise _too_many(len(prompt), options)
    ids = _prompt(given, chat, model)
    if len(ids) > options.max_tokens:
        raise _too_many(len(ids), options)
    sampling = {"temperature": 1.0, "seed": secrets.randbits(32)} | {field: given[field] for field in NUMBERS if field in given}
    field = next((each for each in ("max_completion_tokens", "max_tokens") if each in given), "max_tokens")
    left, most = model.config.max_positions - len(ids), options.max_new_tokens
    count = sampling["max_new_tokens"] = given.get(field, min(left, most) if chat else COMPLETION_TOKENS)
    if left < 1 or (isinstance(count, int) and count > min(left, most)):
        said = (
            f"{len(ids)} tokens of prompt leave room for {max(0, left)} of the model's {model.config.max_positions} tokens, and one call "
        )
        raise InvalidArgument(f"{said}may generate {most}", field=field, reason="context_length_exceeded")
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop) or len(stop) > 4:
        raise InvalidArgument("stop must be a string, or up to four, none of them empty", field="stop")
    return Asked(ids, sampling, tuple(stop), chat, bool(given.get("stream", False)), bool(streaming.get("include_usage", False)))


def _too_many(tokens: int, options: ServerOptions) -> ResourceExhausted:
    return ResourceExhausted(f"{tokens} tokens of prompt are more than the server's limit of {options.max_tokens}")


def no_model(given: Any, name: str) -> SessionNotFound:
    """The error for a model that is not served."""
    return SessionNotFound(f"there is no model {given!r:.60}: this server has {name!r}", reason="model_not_found")


def _prompt(given: dict[str, Any], chat: bool, model: Model) -> list[int]:
    if model.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer, so this server answers over gRPC only")
    field = "messages" if chat else "prompt"
    prompt = given.get(field)
    try:
        if chat:
            if not isinstance(prompt, list) or not prompt:
                raise ValueError("messages must be a list of at least one message")
            return list(chat_ids([_plain(each) for each in prompt], model.tokenizer, given.get("chat_template_kwargs", {})))
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        ids = encode(model.tokenizer, prompt) if isinstance(prompt, str | list) else []
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(str(error), field=field) from None
    if not ids:
        raise InvalidArgument("prompt must be one text, or one list of token ids, and not empty", field=field)
    return ids


def _plain(message: Any) -> Any:
    """A message whose content is text. OpenAI's clients may send a list of parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("a message's content must be text")
    return message | {"content": "".join(part["text"] for part in parts)}


class Form:
    """Bodies of one answer: `whole` at once, or `piece` by piece. model: its served name."""

    def __init__(self, request: Asked, model: str):
        self._chat, self._with_usage = request.chat, request.usage
        kinds = ("chat.completion", "chat.completion.chunk") if request.chat else ("text_completion", "text_completion")
        start = {"id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._whole, self._piece = (start | {"object": kind} for kind in kinds)

    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return self._whole | {"choices": [_choice(content, finish_reason)], "usage": usage}

    def first(self) -> list[dict[str, Any]]:
        """What comes before the first text of a stream."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)] if self._chat else []

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of text of a stream."""
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text}, None)

    def last(self, finish_reason: str, usage: dict[str, int]) -> list[dict[str, Any]]:
        """What comes after the last text of a stream."""
        end = self._chunk({"delta": {}} if self._chat else {"text": ""}, finish_reason)
        return [end, self._piece | {"choices": [], "usage": usage}] if self._with_usage else [end]

    def _chunk(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return self._piece | {"choices": [_choice(content, finish_reason)]}


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": finish_reason} | content


def usage_of(prompt_tokens: int, generated: int) -> dict[str, int]:
    """OpenAI's counts of tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated}
