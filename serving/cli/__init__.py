"""The command line, one file per command. `main` is what `kvjax` runs."""

from kvjax.serving.cli.app import main

__all__ = ["main"]
