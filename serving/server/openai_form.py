"""Requests in OpenAI's form: what they ask for, checked, and the bodies of their answers.

The fields are those of a batch job (`kvjax.serving.bodies`), but for log-probabilities and several samples. What is not
there is refused, not ignored. Source: ADR 0008, section 2.7; OpenAI's API reference.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.client.errors import InvalidArgument, SessionNotFound
from kvjax.serving.bodies import Body, Fields, WrongField, prompt_ids, read_body
from kvjax.serving.sessions.runtime import SHAPED, checked_sampling

if TYPE_CHECKING:
    from kvjax.model.protocols import Model
    from kvjax.serving.server.options import ServerOptions
    from kvjax.serving.sessions.runtime import SessionRuntime

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions. For chats it is all that the model has room for."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request. ids: the prompt. sampling: fields of `Session.generate`. stop: strings that end the text. chat:
    which form its answer has. stream: whether it is sent piece by piece; usage: with a last piece that counts
    tokens."""

    ids: list[int]
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    chat: bool
    stream: bool
    usage: bool


def asked(body: Any, chat: bool, runtime: SessionRuntime, options: ServerOptions) -> Asked:
    """What a request asks for. chat: whether it came to /v1/chat/completions. InvalidArgument names the field;
    SessionNotFound for another model."""
    model = runtime.engine.model
    if not isinstance(body, Mapping):
        raise InvalidArgument("the body must be a JSON object")
    prompt = body.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if isinstance(prompt, list) and len(prompt) > options.max_tokens:  # before each of millions is looked at
        raise _too_many(len(prompt), options, chat)
    try:
        read = read_body(body, Fields.CHAT if chat else Fields.COMPLETIONS, over_http=True)
        _check_served(read)
    except WrongField as error:
        raise InvalidArgument(str(error), field=error.field) from None
    except RecursionError:
        raise InvalidArgument("lists and objects of the body are nested too deeply") from None
    if read.model != options.model_name:
        raise no_model(read.model, options.model_name)
    ids = _prompt(read, model)
    if len(ids) > options.max_tokens:
        raise _too_many(len(ids), options, chat)
    if (stops := len(read.sampling.get("stop_token_ids", ()))) > options.max_stop_tokens:
        said = f"{stops:,} stop tokens in one call are more than the limit of {options.max_stop_tokens:,}"
        raise InvalidArgument(said, field="stop_token_ids")
    sampling = {"temperature": 1.0, "seed": secrets.randbits(32)}
    sampling |= {name: value for name, value in read.sampling.items() if name in SHAPED}
    count = sampling.get("max_new_tokens", None if chat else COMPLETION_TOKENS)
    clips = options.clip_max_tokens or read.sampling.get("clip", False)
    field = read.limit_field if count is not None else "max_tokens"
    sampling["max_new_tokens"] = _with_room(count, field, len(ids), runtime, options.max_new_tokens, clips=clips)
    stop = read.sampling.get("stop", ())
    checked_sampling({**sampling, "stop": stop}, (*SHAPED, "stop"))
    return Asked(ids, sampling, stop, chat, read.stream, read.usage)


def _check_served(read: Body) -> None:
    """WrongField for what batch jobs do and the server does not."""
    if read.sampling.get("n", 1) != 1:
        raise WrongField("n must be 1: send the request again for another answer", "n")
    if read.sampling.get("logprobs") or read.sampling.get("top_logprobs"):
        raise WrongField("the server returns no log-probabilities, and a batch job does: leave logprobs out", "logprobs")


def _with_room(count: Any, field: str, prompt: int, runtime: SessionRuntime, limit: int, *, clips: bool) -> Any:
    """How many tokens a request may generate: `count`; where that is None, or the answer is clipped, at most what there
    is room for.

    field: the name of `count` in the request. prompt: how many tokens it has. limit: of tokens of one call. clips:
    whether to cut. InvalidArgument if there is too little room.
    """
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        return count  # the sampling's own check says what is wrong with it
    positions = runtime.engine.config.max_positions
    room = runtime.room_after(prompt, limit if count is None else min(count, limit))
    if count == room or (room and (count is None or clips)):
        return room
    asks = "" if count is None else f" and {field} asks for {count:,}"
    said = f"the prompt has {prompt:,} tokens{asks}: "
    if room == limit:
        said += f"one call of this server generates at most {limit:,}"
    elif room > positions - prompt:
        said += f"the model has {positions:,} positions, so {f'at most {room:,}' if room else 'none'} can be generated"
    else:
        said += f"the server's pool of pages has room for {f'at most {room:,}' if room else 'none'} after it"
    remedy = "ask for fewer, or send clip: true" if room else "shorten the prompt"
    raise InvalidArgument(f"{said}; {remedy}", field=field, reason="context_length_exceeded")


def _too_many(tokens: int, options: ServerOptions, chat: bool) -> InvalidArgument:
    said = f"the prompt has {tokens:,} tokens, and this server takes at most {options.max_tokens:,} in one call (--max-tokens): shorten it"
    return InvalidArgument(said, field="messages" if chat else "prompt", reason="context_length_exceeded")


def no_model(given: Any, name: str) -> SessionNotFound:
    """The error for a model that is not served."""
    return SessionNotFound(f"there is no model {given!r:.60}: this server has {name!r}", reason="model_not_found")


def _prompt(read: Body, model: Model) -> list[int]:
    if model.tokenizer is None:
        raise InvalidArgument("the model has no tokenizer, so this server answers over gRPC only")
    try:
        given = read.prompt, read.messages, read.template_options, model.tokenizer, model.config.max_positions
        return prompt_ids(*given, parse_special=read.parse_special)
    except ValueError as error:
        field = "prompt" if read.messages is None else "messages"
        raise InvalidArgument(str(error), field="chat_template_kwargs" if "chat_template_kwargs" in str(error) else field) from None


class Form:
    """Bodies of one answer: `whole` at once, or `piece` by piece. model: its served name."""

    def __init__(self, request: Asked, model: str):
        self._chat, self._with_usage = request.chat, request.usage
        kinds = ("chat.completion", "chat.completion.chunk") if request.chat else ("text_completion", "text_completion")
        start = {"id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._whole, self._piece = (start | {"object": kind} for kind in kinds)

    def whole(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
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
        usage = {"usage": None} if self._with_usage else {}  # the last piece has it: OpenAI's form
        return self._piece | {"choices": [_choice(content, finish_reason)]} | usage


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": finish_reason} | content


def usage_of(prompt_tokens: int, generated: int) -> dict[str, int]:
    """OpenAI's counts of tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated}
