"""The command line, one file per group of commands. `kvjax` runs `main`."""

from kvjax.serving.cli.app import main

__all__ = ["main"]
