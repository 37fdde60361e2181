"""The command line, one file per group of commands. `kvjax` runs `run_and_leave`.

The commands are imported when one is run: then Ctrl-C is held back meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from _signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["main", "run_and_leave"]


def main(commands: typer.Typer | None = None) -> None:
    """`kvjax.serving.cli.app.main`."""
    pressed = []
    mine = threading.current_thread() is threading.main_thread() and getsignal(SIGINT) is default_int_handler
    try:
        if mine:
            signal(SIGINT, lambda *_: pressed.append(None))
        from kvjax.serving.cli import app

        if mine:
            signal(SIGINT, default_int_handler)
        if pressed:
            raise KeyboardInterrupt
        app.main(commands)
    except KeyboardInterrupt:
        sys.exit(130)


def run_and_leave() -> None:
    """What `kvjax` runs: `main`, and then the process ends."""
    try:
        main()
    except SystemExit as ended:
        if getsignal(SIGINT) is not SIG_IGN:
            signal(SIGINT, lambda *_: os._exit(130))  # Python would print where it was when it ended
        if "kvjax.compilation" in sys.modules:
            sys.modules["kvjax.compilation"].leave(ended.code)
        raise
