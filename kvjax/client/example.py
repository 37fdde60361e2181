"""Twenty turns on one session: `python -m kvjax.client.example [ADDRESS] [MODEL]`.

Each turn tells the model a pass key, and asks for it. A turn prefills only what is new: its own line, and the answer before it. The
embedded model answers about five of the twenty wrongly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from kvjax.client.errors import SessionError
from kvjax.client.shared import error_text
from kvjax.client.sync import Client
from kvjax.client.tokenizing import load_tokenizer

RIVERS = (
    *("golden", "silver", "quiet", "frozen", "hidden", "broken", "distant", "bright", "narrow", "gentle"),
    *("ancient", "hollow", "crimson", "velvet", "wooden", "marble", "copper", "silent", "stormy", "amber"),
)


def main(address: str = "127.0.0.1:50051", model: str = "needle", say: Callable[[str], None] = print) -> None:
    """Talk to the server at `address`, and print each answer with the tokens that were prefilled for it. model: whose tokenizer to use."""
    tokenizer = load_tokenizer(model)
    stop = tokenizer(".", add_special_tokens=False)["input_ids"][:1]
    with Client(address) as client, client.create_session() as session:
        for turn, river in enumerate(RIVERS):
            line = f"The pass key for {river} river is {10007 + 4111 * turn}.\nAnswer: The pass key for {river} river is"
            session.append(tokenizer(line, add_special_tokens=False)["input_ids"])
            stream = session.generate(max_new_tokens=8, stop_token_ids=stop)
            answer = tokenizer.decode(list(stream), skip_special_tokens=True).strip()
            say(f"turn {turn + 1}: {answer} ({stream.prefill_tokens} of {stream.history_tokens} tokens prefilled)")


def run(arguments: list[str]) -> int:
    """Talk as the command line says. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.client.example", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", help="the server's host and port (default: %(default)s)")
    parser.add_argument("model", nargs="?", default="needle", help="whose tokenizer to use: 'needle', a folder, or a hub id")
    given = parser.parse_args(arguments)
    try:
        main(given.address, given.model)
    except (SessionError, ValueError, OSError) as error:  # the last two: there is no such tokenizer
        print(f"example: {error_text(error, given.address, 'its address')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
