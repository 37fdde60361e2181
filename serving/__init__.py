"""Batch jobs, the command line, and adapters for other tools.

`run_batch` and `run_file` are resolved on first use, so that the command line starts without importing JAX.
"""

from typing import TYPE_CHECKING

from pallas_kernels.core.lazy import names_in
from pallas_kernels.core.renamed import answer

if TYPE_CHECKING:
    from kvjax.serving.batch.job import run_batch, run_file
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.results import Summary
    from kvjax.serving.harness import KvjaxLM

__all__ = ["Defaults", "KvjaxLM", "Summary", "run_batch", "run_file"]

answer(
    {
        "kvjax.serving.session": "kvjax.serving.sessions: the servers are in kvjax.serving.server",
        "kvjax.serving.flags": "kvjax.serving.xla_flags",
    }
)

_HOMES = {
    "Defaults": ".batch.records",
    "KvjaxLM": ".harness",
    "Summary": ".batch.results",
    "run_batch": ".batch.job",
    "run_file": ".batch.job",
}

__getattr__ = names_in(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
