"""Chat templates, for applications that want them: the server knows none. Source: ADR 0008, sections 1.2 and 3.4.

A template renders a whole conversation, and may render an earlier turn otherwise than it was generated. Qwen3's, with
`enable_thinking=False`, puts an empty think block in front of the answer that it prompts for, and leaves it out when it
renders that turn as history. So the tokens of a second rendering need not begin with those of the first, and a session,
whose history only grows, cannot follow.

`tokens_for_chat` renders only what is new: the messages after those that the session holds already. Nothing that was
generated is rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.text.messages import chat_ids, checked_messages, rendered
from kvjax.text.plain_texts import PlainTexts


def from_openai_messages(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, *, parse_special: bool = False, **template_options: Any
) -> list[int]:
    """Token ids of a whole conversation in OpenAI's form, up to where the assistant's answer begins: for
    `create_session`.

    tokenizer: of transformers, with a chat template. parse_special: whether special tokens in the messages are control
    tokens; False: they are plain text. template_options: variables of the template, such as enable_thinking. ValueError
    for messages that the template does not take.
    """
    return list(chat_ids(messages, tokenizer, template_options, parse_special=parse_special))


def tokens_for_chat(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    *,
    after: Sequence[Mapping[str, str]] = (),
    stopped: bool = True,
    parse_special: bool = False,
    **template_options: Any,
) -> list[int]:
    """Token ids of the messages that come after those of `after`, up to where the assistant's answer begins: for
    `append`.

    after: what the session holds, at last the model's own answer. The template renders it, and then all messages; the
    difference is new. stopped: whether the answer ended with the tokenizer's end-of-sequence token; False: it ended by
    its length, and the template's end of the turn is written, too. parse_special: as in `from_openai_messages`.
    ValueError if the second rendering does not begin with the first: then this template cannot be used turn by turn,
    and the application must write the turns itself.

    With Qwen3, say:

        ids = tokens_for_chat([user], tokenizer, enable_thinking=False)  # create_session(ids), generate
        more = tokens_for_chat([user_2], tokenizer, after=[user, answer], enable_thinking=False)
        # append(more), generate

    To render all three messages anew would be wrong: it leaves out the think block that the first answer began with, so
    `from_openai_messages([user, answer, user_2], tokenizer, enable_thinking=False)[: len(ids)] != ids`.
    """
    if not after:
        return from_openai_messages(messages, tokenizer, parse_special=parse_special, **template_options)
    given = list(checked_messages([*after, *messages]))
    plain = PlainTexts(tokenizer, given, template_options)

    def render(change: Callable[..., Any]) -> str:
        """What is new, with changed texts. The answer that the session holds stays, because its end is looked for."""
        changed = [change(each, answer=each["role"] == "assistant") | {"role": each["role"]} for each in given]
        held = [*changed[: len(after) - 1], last]
        return _new_part(held, [*held, *changed[len(after) :]], change(template_options), tokenizer, stopped=stopped)

    if parse_special:
        text = _new_part(given[: len(after)], given, template_options, tokenizer, stopped=stopped)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    last = plain.mark(given[len(after) - 1], answer=True)
    ids = plain.ids(render(plain.mark))
    plain.check(ids, render)
    return ids


def _new_part(held: list[dict[str, Any]], given: list[dict[str, Any]], options: Mapping[str, Any], tokenizer: Any, *, stopped: bool) -> str:
    """What the template writes after the answer that is the last of `held`, in a rendering of all messages."""
    before, both = rendered(held, options, tokenizer, answer=False), rendered(given, options, tokenizer, answer=True)
    if not both.startswith(before):
        raise ValueError(
            "the chat template renders earlier messages otherwise once later ones follow, so it cannot be used turn by turn: write the "
            "turns yourself, as token ids"
        )
    answer = held[-1]["content"]
    answer = answer if answer in before else answer.strip()  # as templates trim it
    if not answer or answer not in before:
        raise ValueError(
            "the chat template does not show the last answer as it is, so its end cannot be found: write the turns as token ids"
        )
    end = before.rpartition(answer)[2]
    return (end.removeprefix(tokenizer.eos_token) if stopped else end) + both[len(before) :]
