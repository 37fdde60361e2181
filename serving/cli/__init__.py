"""The command line, one file per command. `kvjax` runs `main`."""

from kvjax.serving.cli.app import main

__all__ = ["main"]
