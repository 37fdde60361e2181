"""The file that holds a job's results until all are complete.

Every result is kept with the number of its input line, in a `batch.journal`. At the end the results are written in
input order to a third file, which is renamed to the output.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.serving.batch.files import write_outputs
from kvjax.serving.batch.journal import CONTINUED, RUNNING, Journal, sync_folder
from kvjax.serving.batch.results import Result, named
from kvjax.serving.batch.resume import EARLIER_SLOTS, SLOTS, check_same
from pallas_kernels.core.files import replacing

COUNTS = ("failed", "prompt_tokens", "generated_tokens", "blocks_per_step", "keys_per_step", "samples")


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """What a partial file says of the run that left it. header: what its answers depend on. lines: the input lines that
    it answered."""

    header: Mapping[str, Any]
    lines: Collection[int]


class Partial(Journal):
    """The results of one job so far.

    Raises ValueError if the file is another job's or not a partial result, and BlockingIOError if a running job holds
    it.

    Args:
        path: the file.
        job: the header: what a later run is compared with (`continuing.check_same`); any JSON values.
        earlier_digest: that of the bytes that the earlier run read of its input, as they are now.
        anyway: whether to go on with another number of slots.
        lines: the lines that the job has; results of others are dropped. None: all.
    """

    FORMAT = "kvjax batch 3"
    WHAT = "a partial result of a kvjax batch job"
    KEYS = frozenset(("line", "counts", "output"))

    def __init__(
        self,
        path: Path,
        job: Mapping[str, Any],
        *,
        earlier_digest: str | None = None,
        anyway: bool = False,
        lines: Collection[int] | None = None,
    ):
        self.earlier: dict[int, Result] = {}
        """Results that an earlier run finished, by input line, without their outputs (errors are kept)."""
        self.slots: list[Any] = []
        """Each --max-batch that a run of the job had, in turn, without those that repeat the one before."""
        self._spans: dict[int, int] = {}
        self._lines, self._options = lines, {"earlier_digest": earlier_digest, "anyway": anyway}
        super().__init__(path, job)
        self.slots = self.slots or [job.get(SLOTS)]

    @classmethod
    def earlier_run(cls, path: Path) -> EarlierRun | None:
        """What an earlier run left, read without changing it; None if there is none. Raises as the constructor does."""
        if not path.exists():
            return None
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(RUNNING.format(path)) from None
            fcntl.flock(file, fcntl.LOCK_UN)  # it only shows that no job runs, and must not stop one that begins
            header, lines = None, set()
            for entry, _, _ in cls.entries(file, path):
                if header is None:
                    header = entry
                elif CONTINUED in entry:
                    header = header | entry[CONTINUED]
                else:
                    lines.add(entry["line"])
        return None if header is None else EarlierRun(header, lines)

    def _check(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
        from kvjax.model.identity import check_fingerprint  # it imports JAX, and `kvjax --help` must be fast

        check_fingerprint(found.get("model"), str(self.path), "delete the file to start over")
        changed = check_same(self.path, found, header, **self._options)
        self.slots = [*found.get(EARLIER_SLOTS, ()), found.get(SLOTS), *([changed[SLOTS]] if SLOTS in changed else [])]
        return changed | ({EARLIER_SLOTS: self.slots[:-1]} if SLOTS in changed else {})

    def append(self, result: Result) -> None:
        """Write one result to disk."""
        counts = [getattr(result, name) for name in COUNTS]
        missed = {} if result.missed is None else {"missed": result.missed}
        self._append({"line": result.line, "counts": counts, "output": result.output} | missed)

    def finish(self, out: Path, *, overwrite: bool = False, taken: Collection[int] = ()) -> None:
        """Write the outputs in input order, rename them to `out`, and remove this file. ValueError, and this file
        stays, if `out` is there and `overwrite` is not given. taken: as in `results.named`."""
        self._sync()
        try:
            with replacing(out, overwrite=overwrite) as ordered, open(ordered, "wb") as file:
                write_outputs(file, self._outputs(frozenset(taken)), out)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise ValueError(
                f"{out} has appeared while the job ran, and is kept; all answers are in {self.path}: move {out} away and run the same "
                "command again, which only writes them, or pass --overwrite, too"
            ) from None
        sync_folder(out.resolve().parent)
        if self._is_there():  # another file of this name is another job's
            self.path.unlink(missing_ok=True)

    def _outputs(self, taken: Collection[int] = ()) -> Iterator[dict[str, Any]]:
        for line in sorted(self._spans):
            yield named(self._again(self._spans[line], line=line)["output"], line, taken)

    def _keep(self, entry: dict[str, Any], offset: int, *, earlier: bool) -> None:
        if self._lines is not None and entry["line"] not in self._lines:
            return
        self._spans[entry["line"]] = offset
        if earlier:
            counts = dict(zip(COUNTS, entry["counts"], strict=True))
            self.earlier[entry["line"]] = Result(
                entry["line"], entry["output"] if counts["failed"] else {}, missed=entry.get("missed"), **counts
            )
