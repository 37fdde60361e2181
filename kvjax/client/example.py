"""Twenty turns on one session: `python -m kvjax.client.example [ADDRESS] [MODEL]`.

Each turn tells the model a pass key, and asks for it. A turn prefills only what is new: its own line, and the answer
before it. The embedded model answers about five of the twenty wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvjax.client.chat import new_app
from kvjax.client.errors import SessionError
from kvjax.client.shared import error_text
from kvjax.client.sync import Client
from kvjax.client.tokenizing import load_tokenizer

RIVERS = (
    *("golden", "silver", "quiet", "frozen", "hidden", "broken", "distant", "bright", "narrow", "gentle"),
    *("ancient", "hollow", "crimson", "velvet", "wooden", "marble", "copper", "silent", "stormy", "amber"),
)


def main(address: str = "127.0.0.1:50051", model: str = "needle", say: Callable[[str], None] = print) -> None:
    """Talk to the server at `address`, and print each answer with the tokens that were prefilled for it. model: whose
    tokenizer to use."""
    tokenizer = load_tokenizer(model)
    stop = tokenizer(".", add_special_tokens=False)["input_ids"][:1]
    with Client(address) as client, client.create_session() as session:
        for turn, river in enumerate(RIVERS):
            line = f"The pass key for {river} river is {10007 + 4111 * turn}.\nAnswer: The pass key for {river} river is"
            session.append(tokenizer(line, add_special_tokens=False)["input_ids"])
            stream = session.generate(max_new_tokens=8, stop_token_ids=stop)
            answer = tokenizer.decode(list(stream), skip_special_tokens=True).strip()
            say(f"turn {turn + 1}: {answer} ({stream.prefill_tokens} of {stream.history_tokens} tokens prefilled)")


app = new_app()


@app.command()
def example_command(
    address: Annotated[str, typer.Argument(help="The server's host and port.")] = "127.0.0.1:50051",
    model: Annotated[str, typer.Argument(help="Whose tokenizer to use: 'needle', a folder, or a hub id.")] = "needle",
) -> None:
    """Twenty turns on one session. Each tells the model a pass key, and asks for it. A turn prefills only what is new:
    its own line, and the answer before it. The embedded model answers about five of the twenty wrongly."""
    try:
        main(address, model)
    except (SessionError, ValueError, OSError) as error:  # the last two: there is no such tokenizer
        print(f"example: {error_text(error, address, 'its address')}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
