"""The command line, one file per group of commands. `kvjax` runs `run_and_leave`."""

from kvjax.serving.cli.app import main, run_and_leave

__all__ = ["main", "run_and_leave"]
