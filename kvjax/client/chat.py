"""A chat in a terminal: `python -m kvjax.client.chat`. Each line goes to the session as it is, without a chat template.

With `--template`, lines are a user's messages, rendered by the model's chat template.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvjax.client.errors import SessionError
from kvjax.client.sync import Client, Session
from kvjax.client.templates import tokens_for_chat
from kvjax.text import TextStream


def main(arguments: list[str] | None = None) -> int:
    """Read lines from standard input, and print the model's continuations. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.client.chat", description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:50051", help="the server's host and port")
    parser.add_argument("--model", default="needle", help="whose tokenizer to use: 'needle', a folder, or a hub id")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stop", default=None, help="end an answer at this text, if it is one token, as '.'")
    parser.add_argument("--template", action="store_true", help="use the model's chat template")
    parser.add_argument("--token", default=None, help="bearer token, where the server wants one")
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(given.model)
    sampling: dict[str, Any] = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    if given.stop is not None:
        sampling["stop_token_ids"] = tokenizer(given.stop, add_special_tokens=False)["input_ids"][:1]
    messages: list[dict[str, str]] = []
    stopped = True
    try:
        with Client(given.address, token=given.token) as client, client.create_session() as session:
            for line in sys.stdin:
                if not (text := line.rstrip("\n")):
                    continue
                if given.template:
                    said = {"role": "user", "content": text}
                    session.append(tokens_for_chat([said], tokenizer, after=messages, stopped=stopped))
                    text, stopped = answer(session, tokenizer, sampling)
                    messages += [said, {"role": "assistant", "content": text}]
                else:
                    session.append(tokenizer(text, add_special_tokens=False)["input_ids"])
                    answer(session, tokenizer, sampling)
    except SessionError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def answer(session: Session, tokenizer: Any, sampling: dict[str, Any]) -> tuple[str, bool]:
    """Print an answer as it comes. Returns it, and whether it ended with a stop token."""
    text, tokens = TextStream(tokenizer), session.generate(**sampling)
    for token in tokens:
        print(text.push(token), end="", flush=True)
    print(text.close())
    return text.text, tokens.finish_reason == "stop"


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the embedded model, a folder, or a hub id."""
    from transformers import AutoTokenizer

    if name == "needle":
        from importlib import resources

        name = str(resources.files("kvjax").joinpath("models", "needle"))
    return AutoTokenizer.from_pretrained(name)


if __name__ == "__main__":
    sys.exit(main())
