"""Chat templates, for applications that want them: the server knows none. Source: ADR 0008, sections 1.2 and 3.4.

A template renders a whole conversation, and may render an earlier turn otherwise than it was generated. Qwen3's, with
`enable_thinking=False`, puts an empty think block in front of the answer that it prompts for, and leaves it out when it renders that turn
as history. So the tokens of a second rendering need not begin with those of the first, and a session, whose history only grows, cannot
follow.

`tokens_for_chat` renders only what is new: the messages after those that the session holds already. Nothing that was generated is rendered
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.prompts import chat_ids


def from_openai_messages(messages: Sequence[Mapping[str, str]], tokenizer: Any, **template_options: Any) -> list[int]:
    """Token ids of a whole conversation in OpenAI's form, up to where the assistant's answer begins: for `create_session`.

    tokenizer: of transformers, with a chat template. template_options: variables of the template, such as enable_thinking. ValueError for
    messages that the template does not take.
    """
    return list(chat_ids(messages, tokenizer, template_options))


def tokens_for_chat(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    *,
    after: Sequence[Mapping[str, str]] = (),
    stopped: bool = True,
    **template_options: Any,
) -> list[int]:
    """Token ids of the messages that come after those of `after`, up to where the assistant's answer begins: for `append`.

    after: what the session holds, at last the model's own answer. The template renders it, and then all messages; the difference is new.
    stopped: whether the answer ended with the tokenizer's end-of-sequence token; False: it ended by its length, and the template's end of
    the turn is written, too. ValueError if the second rendering does not begin with the first: then this template cannot be used turn by
    turn, and the application must write the turns itself.

    With Qwen3, say:

        ids = tokens_for_chat([user], tokenizer, enable_thinking=False)  # create_session(ids), generate
        more = tokens_for_chat([user_2], tokenizer, after=[user, answer], enable_thinking=False)  # append(more), generate

    To render all three messages anew would be wrong: it leaves out the think block that the first answer began with, so
    `from_openai_messages([user, answer, user_2], tokenizer, enable_thinking=False)[: len(ids)] != ids`.
    """
    if not after:
        return from_openai_messages(messages, tokenizer, **template_options)
    held = [dict(each) for each in after]
    before = tokenizer.apply_chat_template(held, tokenize=False, **template_options)
    given = [*held, *(dict(each) for each in messages)]
    both = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **template_options)
    if not both.startswith(before):
        raise ValueError(
            "the chat template renders earlier messages otherwise once later ones follow, so it cannot be used turn by turn: write the "
            "turns yourself, as token ids"
        )
    end = before.rpartition(held[-1]["content"])[2]
    if stopped:
        end = end.removeprefix(tokenizer.eos_token)
    return list(tokenizer(end + both[len(before) :], add_special_tokens=False)["input_ids"])
