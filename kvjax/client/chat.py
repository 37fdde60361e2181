"""A chat in a terminal: `python -m kvjax.client.chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvjax.client.errors import SessionError
from kvjax.client.shared import error_text
from kvjax.client.sync import Client, Session
from kvjax.client.templates import tokens_for_chat
from kvjax.client.tokenizing import load_tokenizer
from kvjax.text.detokenizer import TextStream


def new_app() -> typer.Typer:
    """A program without a command yet, with -h for help."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=names)


app = new_app()


@app.command()
def chat_command(
    address: Annotated[str, typer.Option(help="The server's host and port.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Option("--model", "-m", help="Whose tokenizer to use: 'needle', a folder, or a hub id.")] = "needle",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    stop: Annotated[str | None, typer.Option(help="End an answer at this text, if it is one token, as '.'.", show_default=False)] = None,
    template: Annotated[bool, typer.Option("--template", help="Lines are a user's messages, for the model's chat template.")] = False,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="With --template: its variable enable_thinking. [default: none]", show_default=False),
    ] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token, where the server wants one.", show_default=False)] = None,
) -> None:
    """Chat with a server's model: each line of standard input goes to one session, and the answer is printed as it
    comes.

    Without --template, lines go to the model as they are. Ctrl-D ends the chat and its session.
    """
    if thinking is not None and not template:
        raise typer.BadParameter("needs --template", param_hint="--thinking")
    try:
        tokenizer = load_tokenizer(model)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"there is no tokenizer of {model!r}: {' '.join(str(error).split())}", param_hint="--model") from None
    if template and getattr(tokenizer, "chat_template", None) is None:
        raise typer.BadParameter(f"{model!r} has no chat template: leave it out, and lines go as they are", param_hint="--template")
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if stop is not None:
        sampling["stop_token_ids"] = ids = tokenizer(stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise typer.BadParameter(f"must be one token, but {stop!r} is {len(ids)}", param_hint="--stop")
    variables = {} if thinking is None else {"enable_thinking": thinking}
    messages: list[dict[str, str]] = []
    stopped = True
    try:
        with Client(address, token=token) as client, client.create_session() as session:
            for line in lines():
                if not (text := line.rstrip("\n")):
                    continue
                if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):  # so Python keeps bytes it cannot decode
                    raise ValueError(f"a line is not UTF-8: {text!r:.60}")
                if template:
                    said = {"role": "user", "content": text}
                    session.append(tokens_for_chat([said], tokenizer, after=messages, stopped=stopped, **variables))
                    text, stopped = answer(session, tokenizer, sampling)
                    messages += [said, {"role": "assistant", "content": text}]
                else:
                    session.append(tokenizer(text, add_special_tokens=False)["input_ids"])
                    answer(session, tokenizer, sampling)
    except (SessionError, ValueError) as error:
        print(f"chat: {error_text(error, address, '--address')}", file=sys.stderr)
        raise typer.Exit(1) from None


def lines() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    try:
        while True:
            yield input("> ")
    except EOFError:
        print()  # so that the shell's prompt has a line of its own


def answer(session: Session, tokenizer: Any, sampling: dict[str, Any]) -> tuple[str, bool]:
    """Print an answer as it comes. Returns it, and whether it ended with a stop token."""
    text, tokens = TextStream(tokenizer), session.generate(**sampling)
    try:
        for token in tokens:
            print(text.push(token), end="", flush=True)
    finally:  # also where the server ends meanwhile, so that the message about it has a line of its own
        print(text.close(), flush=True)
    return text.text, tokens.finish_reason == "stop"


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        return app(arguments, standalone_mode=False) or 0
    except typer.Exit as ended:
        return ended.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    app()
