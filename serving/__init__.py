"""Batch jobs, the command line, and adapters for other people's tools.

`run_batch` and `run_file` are resolved on first use, so that the command line starts without importing JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.serving.batch import run_batch, run_file
    from kvjax.serving.harness import KvjaxLM
    from kvjax.serving.records import Defaults
    from kvjax.serving.results import Summary

__all__ = ["Defaults", "KvjaxLM", "Summary", "run_batch", "run_file"]

_HOMES = {"Defaults": "records", "KvjaxLM": "harness", "Summary": "results", "run_batch": "batch", "run_file": "batch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
