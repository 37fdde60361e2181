"""Batch jobs, the command line, and adapters for other tools.

`run_batch` and `run_file` are resolved on first use, so that the command line starts without importing JAX.
"""

from typing import TYPE_CHECKING, Any

from pallas_kernels.core.renamed import answer

if TYPE_CHECKING:
    from kvjax.serving.batch.job import run_batch, run_file
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.results import Summary
    from kvjax.serving.harness import KvjaxLM

__all__ = ["Defaults", "KvjaxLM", "Summary", "run_batch", "run_file"]

_HOMES = {"Defaults": "batch.records", "KvjaxLM": "harness", "Summary": "batch.results", "run_batch": "batch.job", "run_file": "batch.job"}

answer(
    {
        "kvjax.serving.session": "kvjax.serving.sessions: the servers are in kvjax.serving.server",
        "kvjax.serving.flags": "kvjax.serving.xla_flags",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
