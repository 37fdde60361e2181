"""The file that holds a job's results until all are complete.

Every result is kept with the number of its input line, in a `batch.journal`. At the end the results are written in input order to a third
file, which is renamed to the output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.serving.batch.files import is_parquet, write_outputs
from kvjax.serving.batch.journal import Journal, sync_folder
from kvjax.serving.batch.results import Result
from pallas_kernels.bench.results import replacing

COUNTS = ("failed", "prompt_tokens", "generated_tokens", "blocks_per_step", "keys_per_step", "samples")


class Partial(Journal):
    """The results of one job so far. job: what must be equal for a later run to continue; any JSON values.

    Raises ValueError if the file is another job's or not a partial result, and BlockingIOError if a running job holds it.
    """

    FORMAT = "kvjax batch 2"
    WHAT = "a partial result of a kvjax batch job"
    KEYS = frozenset(("line", "counts", "output"))

    def __init__(self, path: Path, job: Mapping[str, Any]):
        self.earlier: dict[int, Result] = {}
        """Results that an earlier run finished, by input line, without their outputs (errors are kept)."""
        self._spans: dict[int, int] = {}
        super().__init__(path, job)

    def append(self, result: Result) -> None:
        """Write one result to disk."""
        counts = [getattr(result, name) for name in COUNTS]
        self._append({"line": result.line, "counts": counts, "output": result.output})

    def finish(self, out: Path) -> None:
        """Write the outputs in input order, rename them to `out`, and remove this file."""
        self._sync()
        with replacing(out, ".tmp") as ordered, open(ordered, "wb") as file:
            write_outputs(file, self._outputs(), parquet=is_parquet(out))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(out.parent)
        self.path.unlink()

    def _outputs(self) -> Iterator[dict[str, Any]]:
        for line in sorted(self._spans):
            self._file.seek(self._spans[line])
            yield json.loads(self._file.readline())["output"]

    def _keep(self, entry: dict[str, Any], offset: int, *, earlier: bool) -> None:
        self._spans[entry["line"]] = offset
        if earlier:
            counts = dict(zip(COUNTS, entry["counts"], strict=True))
            self.earlier[entry["line"]] = Result(entry["line"], entry["output"] if counts["failed"] else {}, **counts)
