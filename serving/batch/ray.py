"""Batch jobs over a cluster: what `run_file` does, by Ray Data, with an engine in each of several worker processes.

    print(run_on_ray("in.jsonl", "out.jsonl", Setup("needle", policy="cascade:8"), replicas=4, gpus_per_replica=0.5))

This process reads the input once, and keeps places, sizes and digests of its records, not the records. Ray Data hands
blocks of lines to a pool of actors. Each has its own model and engine, reads its lines from the input itself, and sends
every answer back when it is complete. This process appends it to the partial file of `run_file`. So the output is that
of `run_file`, in the order of the input, and a job can be begun by one and continued by the other. A worker that finds
other lines than this process read answers none of its block, and the job ends with an error.

If a worker dies, Ray runs its block again elsewhere. Answers that are here already are dropped when they come a second
time, and records without an answer run again at the end, so none is lost and none doubled. After `DEATHS` deaths of a
block, its records run one by one: one that kills its worker as often gets an error of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kvjax.scheduler.rounds import Rounds
from kvjax.serving.batch.file_jobs import FileJob, complete
from kvjax.serving.batch.files import BYTES, DIGEST, Reading, numbered
from kvjax.serving.batch.job import answer_records, describe_job
from kvjax.serving.batch.records import Defaults, Record, digest_of, parse
from kvjax.serving.batch.results import Result, Summary, refused
from kvjax.serving.batch.setup import Setup
from kvjax.serving.progress import JobProgress
from kvjax.serving.xla_flags import share_device
from pallas_kernels.core.optional import needs_extras

DEATHS = 3
"""So often a worker may die while it runs a block, and then a record by itself."""

BLOCK_ROUNDS = 32
"""A block has at most this many records per slot. At its end some slots are empty, and all of it runs again if its
worker dies."""

BLOCKS_PER_REPLICA = 8
"""A job has about so many blocks per replica, or more, so that all replicas end at about the same time."""

CHANGED = (
    "{}, line {}, has changed since the job read it: give the file as it was and run again to continue, or delete the job's .partial "
    "file to start over"
)
UNREAD = "unread"
"""The key of what a replica sends in place of results when it cannot read its lines."""

DEVICE_SHARE = 0.9
"""Of a replica's part of a GPU, what JAX takes at once. The rest is for what CUDA takes beside it."""


def run_on_ray(
    source: str | Path,
    out: str | Path,
    setup: Setup,
    *,
    replicas: int = 1,
    gpus_per_replica: float | None = None,
    cpus_per_replica: float = 1.0,
    defaults: Defaults = Defaults(),  # noqa: B008
    overwrite: bool = False,
    console: Console | None = None,
    continue_anyway: bool = False,
) -> Summary:
    """Answer every record of the file `source` on a Ray cluster, and write the answers to `out` in the same order.

    It uses the cluster that Ray is connected to, or finds (`RAY_ADDRESS`, or `ray start` on this machine), or else
    starts one on this machine and stops it at the end. The workers need kvjax, and the input and the model under the
    same paths. ValueError, and what a killed job does when it is run again: as in `run_file`. ValueError, too, if a
    worker finds other lines in the input than this process read. MissingExtra without the extra `ray`.

    Args:
        source, out: JSONL, or Parquet by its suffix.
        setup: the model, and the arguments of each engine.
        replicas: worker processes, each with its own model and engine.
        gpus_per_replica: GPUs that Ray reserves for each: a fraction below 1, or a whole number. None: 1 if the cluster
            has any, else 0.
        cpus_per_replica: CPUs that Ray reserves for each.
        defaults, overwrite, console, continue_anyway: as in `run_file`.
    """
    needs_extras("a batch job on Ray", "ray")
    source, out = Path(source).resolve(), Path(out)
    files = FileJob(source, out, defaults, overwrite=overwrite, anyway=continue_anyway, setup=setup)
    if setup.stores.get("disk") is not None:
        raise ValueError(f"replicas cannot share the folder {setup.stores['disk']} for pages: leave out disk, or run without Ray")
    if setup.data > 1:
        raise ValueError(f"data {setup.data} is for engines of one process: on Ray give more replicas")
    outline = Outline.of(files)
    with _cluster(replicas, gpus_per_replica, cpus_per_replica) as resources, _plain_errors():
        import ray

        place = Place(source, defaults, Path.cwd(), resources["num_gpus"])
        scout = ray.remote(max_calls=1, **resources)(_scout)  # its process ends, and gives its device memory back
        setup, job, said = ray.get(scout.remote(setup, place, files.reading.described()))
        if console is not None:
            console.print(f"{said}; replicas: {replicas}", highlight=False, soft_wrap=True)

        def answer(earlier: Collection[int], progress: JobProgress) -> Iterator[Result]:
            yield from (refused(record, record.error) for record in outline.wrong if record.line not in earlier)
            left = {line: spot for line, spot in outline.spots.items() if line not in earlier}
            while left:
                expected = len(left)
                for result in _answers(left, setup, place, replicas, resources):
                    if left.pop(result.line, None) is not None:
                        progress.elsewhere(result)
                        yield result
                if len(left) == expected:
                    raise RuntimeError(f"Ray gave no answer to any of {expected:,} records; its logs say why. Run again to continue")

        return complete(files, job, answer, console)


class Spot(NamedTuple):
    """Where a record's line begins, in bytes, and its `digest_of`."""

    offset: int
    digest: bytes


@dataclasses.dataclass(frozen=True)
class Outline:
    """What is kept of an input. spots: of each record that can run, by its line. wrong: records that cannot."""

    spots: Mapping[int, Spot]
    wrong: tuple[Record, ...]

    @classmethod
    def of(cls, job: FileJob) -> Outline:
        """Reads the input once."""
        spots, wrong = {}, []
        for record in job.records():
            if record.error is None:
                spots[record.line] = Spot(job.reading.offset, digest_of(job.reading.line))
            else:
                wrong.append(record)
        return cls(spots, tuple(wrong))


@dataclasses.dataclass(frozen=True)
class Place:
    """What every worker needs to know. folder: relative names, of a model or a policy's file, count from it. gpus: how
    much it has."""

    source: Path
    defaults: Defaults
    folder: Path
    gpus: float

    def enter(self) -> None:
        """Called in a worker, before JAX starts there."""
        if self.folder.is_dir():
            os.chdir(self.folder)
        if 0 < self.gpus < 1:
            share_device(DEVICE_SHARE * self.gpus)


def _scout(setup: Setup, place: Place, described: Mapping[str, Any]) -> tuple[Setup, dict[str, Any], str]:
    """In a worker, because only there is the device: the setup with its number of pages, the job's description, and
    what to say. described: the input, as the driver read it; ValueError if it is another one here."""
    place.enter()
    model = setup.load()
    setup = setup.sized(model, _same_records(place, described))
    (engine,) = setup.engines(model)
    return setup, describe_job(engine, None, place.defaults, setup.slots, setup), setup.describe(engine)


def _same_records(place: Place, described: Mapping[str, Any]) -> Iterator[Record]:
    """The records of the input. At its end: ValueError if it is not the one described, but for new lines behind it."""
    reading = Reading(place.source, described[BYTES])
    yield from reading.records(place.defaults)
    if described[DIGEST] not in (reading.described()[DIGEST], reading.earlier_digest):
        raise ValueError(f"{place.source} has changed since this job read it: run again when it is complete. Nothing was run")


class Attempts:
    """Counts how often each block, and each record by itself, was begun. An actor, because it outlives the workers."""

    def __init__(self):
        self._counts = Counter()

    def begin(self, what: tuple[str, int]) -> int:
        """Count a beginning; returns how many there were, this one included."""
        self._counts[what] += 1
        return self._counts[what]


class Replica:
    """One worker of the pool: a model, an engine, and what answers blocks of lines. attempts: a handle of an actor
    `Attempts`."""

    def __init__(self, setup: Setup, place: Place, attempts: Any):
        place.enter()
        self._setup, self._place, self._attempts = setup, place, attempts
        (self._engine,) = setup.engines(setup.load())

    def __call__(self, batch: Mapping[str, Any]) -> Iterator[dict[str, list[str]]]:
        """Answer one block; each answer is sent when it is complete."""
        (lines,), (digests,), (offset,) = batch["lines"], batch["digests"], batch["offset"]
        try:
            records = self._records(dict(zip(lines.tolist(), digests.tolist(), strict=True)), int(offset))
        except (ValueError, OSError) as error:  # Ray would print more of it, and less of what it says
            yield {"result": [json.dumps({UNREAD: str(error)})]}
            return
        for result in self._results(records):
            yield {"result": [json.dumps(vars(result) | {"rounds": result.rounds.kept})]}

    def _results(self, records: list[Record]) -> Iterator[Result]:
        if self._begun("block", records[0].line) <= DEATHS:
            yield from self._answer(records)
            return
        for record in records:
            if self._begun("record", record.line) <= DEATHS:
                yield from self._answer([record])
            else:
                yield refused(record, f"the worker process died {DEATHS} times while it ran this record by itself")

    def _records(self, digests: dict[int, str], offset: int) -> list[Record]:
        """The records of a block. digests: of each of its lines, in order. ValueError if the input has others now."""
        source, first, last, found = self._place.source, min(digests), max(digests), []
        for number, _, line in itertools.takewhile(lambda each: each[0] <= last, numbered(source, first, offset)):
            if number in digests:
                if digests.pop(number) != digest_of(line).hex():
                    raise ValueError(CHANGED.format(source, number))
                found.append(parse(line, number, self._place.defaults))
        if digests:  # the file has become shorter
            raise ValueError(CHANGED.format(source, min(digests)))
        return found

    def _begun(self, kind: str, line: int) -> int:
        import ray

        return ray.get(self._attempts.begin.remote((kind, line)))

    def _answer(self, records: list[Record]) -> Iterator[Result]:
        setup = self._setup
        return answer_records(records, [self._engine], slots=setup.slots, steps_per_launch=setup.steps_per_launch, draft=setup.draft)


def _answers(left: Mapping[int, Spot], setup: Setup, place: Place, replicas: int, resources: Mapping[str, float]) -> Iterator[Result]:
    """Results of the lines in `left`, as they complete. ValueError if a worker finds others in the input."""
    import ray
    import ray.data

    blocks = _blocks(left, setup.slots, replicas)
    dataset = ray.data.from_items(blocks, override_num_blocks=len(blocks))
    dataset.context.target_max_block_size = dataset.context.target_min_block_size = 1  # every answer is sent at once
    dataset.context.enable_progress_bars = False  # ours counts records and tokens
    dataset.context.execution_no_progress_timeout_s = -1  # one answer may take hours
    dataset.context.max_consecutive_actor_init_deaths = DEATHS
    attempts = ray.remote(Attempts).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    # A dead worker is charged with one block at most: the one that it ran.
    pool = ray.data.ActorPoolStrategy(size=min(replicas, len(blocks)), max_tasks_in_flight_per_actor=1)
    answered = dataset.map_batches(Replica, fn_constructor_args=(setup, place, attempts), compute=pool, batch_size=1, **resources)
    return (_result(row["result"]) for row in answered.iter_rows())


def _result(text: str) -> Result:
    """What a replica sent. ValueError if it could not read its lines."""
    fields = json.loads(text)
    if UNREAD in fields:
        raise ValueError(fields[UNREAD])
    return Result(**fields | {"rounds": Rounds(tuple(fields["rounds"]))})


def _blocks(left: Mapping[int, Spot], slots: int, replicas: int) -> list[dict[str, Any]]:
    """Lines that run together, in the order of the input, their digests, and where the first of them begins."""
    size = max(slots, min(BLOCK_ROUNDS * slots, -(-len(left) // (BLOCKS_PER_REPLICA * replicas))))
    return [
        {"offset": left[lines[0]].offset, "lines": list(lines), "digests": [left[line].digest.hex() for line in lines]}
        for lines in itertools.batched(left, size)
    ]


@contextlib.contextmanager
def _cluster(replicas: int, gpus: float | None, cpus: float) -> Iterator[dict[str, float]]:
    """A connection to a cluster, for as long as the block runs; gives what each replica takes of it.

    ValueError for amounts that Ray does not know, or that a cluster of this machine alone does not have.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if cpus <= 0:
        raise ValueError(f"cpus_per_replica must be above 0, got {cpus:g}")
    if gpus is not None and not (0 <= gpus < 1 or gpus == int(gpus)):
        raise ValueError(f"gpus_per_replica must be a fraction from 0 to 1 or a whole number, got {gpus:g}")
    import ray
    import ray.data

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    connected, alone = ray.is_initialized(), False
    if not connected:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
        try:
            ray.init(resources={}, **quiet)  # resources, even none, are only for a new cluster: Ray refuses them where it finds one
            alone = True
        except ValueError:
            ray.init(**quiet)
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        there = ray.cluster_resources()
        gpus = min(1, there.get("GPU", 0)) if gpus is None else gpus
        for kind, each in (("CPU", cpus), ("GPU", gpus)):
            if alone and replicas * each > there.get(kind, 0):
                raise ValueError(
                    f"replicas {replicas} with {each:g} {kind} each do not fit on this machine, which has {there.get(kind, 0):g}, and no "
                    "other Ray cluster was found: give fewer replicas, or less to each, or the address of a cluster in RAY_ADDRESS"
                )
        yield {"num_cpus": cpus, "num_gpus": gpus}
    finally:
        logger.setLevel(level)
        if not connected:
            ray.shutdown()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """An error of our own code in a worker is raised with its own type, so that the command line can print it as one
    line."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
