"""Batch jobs: many records through one engine or several replicas, as a library call and as a file job that can be
killed and run again.

    for answer in run_batch([{"id": "a", "prompt": "Once"}], engine):
        print(answer["text"])

    print(run_file("in.jsonl", "out.jsonl", engine))

The formats of records are in `batch.records`, those of answers in `batch.results`. Prompts of similar length run
together, the longest first. An answer's bits do not depend on which others run beside it. So a job that was killed and
continued, with the same number of slots, has the same output as one that was not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvjax.checks import check_iterable
from kvjax.engine.call_lock import interrupts
from kvjax.engine.capacity import MAX_POSITIONS
from kvjax.engine.engine import Engine
from kvjax.generation import run
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Model
from kvjax.policies.decode import DecodePolicy, identity, parse
from kvjax.policies.prefill import identity as prefill_identity
from kvjax.scheduler.data_parallel import engines_of
from kvjax.scheduler.launch_size import StepsPerLaunch
from kvjax.scheduler.request import OnToken, Request
from kvjax.serving.batch.file_jobs import FileJob, complete, work_of
from kvjax.serving.batch.records import Defaults, Record, read, request_of
from kvjax.serving.batch.results import Result, Summary, answered, named, refused
from kvjax.serving.batch.resume import CHECKPOINT, SAID, checkpoint_of, of_defaults
from kvjax.serving.progress import JobProgress
from kvjax.text.long_texts import in_thread
from kvjax.text.plain_texts import PASSED_ON, tokenized
from kvjax.text.token_bounds import LONG

if TYPE_CHECKING:
    from kvjax.serving.batch.setup import Setup

logger = logging.getLogger(__name__)


def run_batch(
    records: Iterable[Mapping[str, Any] | str],
    engine: Engine | Sequence[Engine],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    defaults: Defaults = Defaults(),  # noqa: B008
    on_token: OnToken | None = None,
    steps_per_launch: StepsPerLaunch = "auto",
    draft: str | DecodePolicy | None = None,
) -> Iterator[dict[str, Any]]:
    """Answer records (objects, or lines of JSON text; see `kvjax.serving.batch.records`) and yield each answer as it
    completes.

    engine: one, or several replicas (`kvjax.replicas`), which share the records. policy: the decode policy; None is the
    engine's. slots: sequences that an engine decodes together; None is 8, or fewer if its largest batch bucket is
    smaller. defaults: settings for records that do not name them. An answer is the object that a file job would write.
    A record that cannot be answered gives an object with `error`. steps_per_launch, draft: as in
    `kvjax.Scheduler`. TypeError for records that are no iterable.
    """
    check_iterable(records, "run_batch", 'a list or another iterable of records, as in [{"id": "a", "prompt": "Once"}]')
    engines = engines_of(engine, "run_batch")
    options = {"policy": policy, "slots": slots, "steps_per_launch": steps_per_launch, "draft": draft}
    taken: list[int] = []
    results = answer_records(list(read(records, defaults, taken=taken)), engines, on_token=on_token, **options)
    return (named(result.output, result.line, taken) for result in results)


def run_file(
    source: str | Path,
    out: str | Path,
    engine: Engine | Sequence[Engine],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    defaults: Defaults = Defaults(),  # noqa: B008
    overwrite: bool = False,
    console: Console | None = None,
    stores: bool = False,
    steps_per_launch: StepsPerLaunch = "auto",
    draft: str | DecodePolicy | None = None,
    continue_anyway: bool = False,
) -> Summary:
    """Answer every line of the file `source` and write the answers to `out` in the same order; returns the closing
    figures.

    Answers are written to `out` + ".partial" as they complete. A killed job that is run again does only what is
    missing. ValueError if model, tokenizer, policy, prefill policy, page size, prefill chunk, dtype, cache format,
    defaults or slots are not those it began with (slots may differ with continue_anyway: the last bits of answers may
    then, too), or if the input has other lines than the earlier run read, but for new ones at its end. `out` appears
    complete at the end; ValueError if it exists by then, unless overwrite. Lines that are equal, with one id, have one
    answer; ValueError before anything runs if lines with one id differ. engine: one, or several replicas; their number
    may change between runs. console: where to show progress; None: nowhere. stores: show what pages are kept where, and
    where those of the pool lie, too. steps_per_launch, draft: as in `kvjax.Scheduler`; they may change
    between runs.
    """
    engines = engines_of(engine, "run_file")
    job = FileJob(Path(source), Path(out), defaults, overwrite=overwrite, anyway=continue_anyway)
    options = {"slots": slots, "steps_per_launch": steps_per_launch, "draft": draft, "console": console, "stores": stores}
    return run_records(job, list(job.records()), engines, policy=policy, **options)


def run_records(
    job: FileJob,
    records: list[Record],
    engines: Sequence[Engine],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    console: Console | None = None,
    stores: bool = False,
    steps_per_launch: StepsPerLaunch = "auto",
    draft: str | DecodePolicy | None = None,
    setup: Setup | None = None,
) -> Summary:
    """`run_file` for a job whose records were read. setup: what made the engines, for what messages call it."""

    def answer(earlier: Collection[int], progress: JobProgress) -> Iterator[Result]:
        missing = [record for record in records if record.line not in earlier]
        options = {"policy": policy, "slots": slots, "steps_per_launch": steps_per_launch, "draft": draft}
        return answer_records(missing, engines, on_prompt=progress.prompt, on_token=progress.token, on_prefill=progress.prefill, **options)

    job.work = {record.line: work_of(record, positions_of(engines[0])) for record in records}  # now that the model is known
    kept = {} if engines[0].stats() is None else {"found": lambda: sum(each.stats().found_tokens for each in engines)}
    told = [each for engine in engines for each in (engine.stats, engine.pool_stats) if each() is not None]
    if told and stores:
        kept["below"] = lambda: "\n".join(str(each()) for each in told)
    return complete(job, describe_job(engines[0], policy, job.defaults, slots, setup), answer, console, **kept)


def describe_job(
    engine: Engine, policy: str | DecodePolicy | None, defaults: Defaults, slots: int | None, setup: Setup | None = None
) -> dict[str, Any]:
    """Everything that the answers depend on but the input. A later run is compared with it. setup: what made the
    engine."""
    stats, chosen = engine.stats(), engine.policy if policy is None else parse(policy)
    # A description begins with the policy's name, as it is typed.
    said = {"--policy": chosen.describe().partition(" (")[0]}
    said["--prefill"] = engine.prefill_policy.describe().partition(" (")[0].removesuffix(" prefill")
    return {
        "model": fingerprint(engine.model),
        "tokenizer": _tokenizer_digest(engine.model.tokenizer),
        "policy": identity(chosen),
        "prefill": prefill_identity(engine.prefill_policy),
        "page size": engine.page_size,
        "prefill chunk": engine.prefill_chunk,
        "dtype": str(engine.dtype),
        "--cache-format": engine.cache_format,
        "--reuse-any": None if stats is None or stats.exact else True,
        **of_defaults(defaults, slots),
        CHECKPOINT: None if setup is None else checkpoint_of(setup),
        SAID: {**said, "--model": model_name(engine.model)} if setup is None else setup.said(),
    }


def _tokenizer_digest(tokenizer: Any) -> str | None:
    """A digest of the chat template and, if the tokenizer can be serialised, of everything else."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = [getattr(tokenizer, "chat_template", None), backend.to_str() if backend is not None else None]
    return hashlib.sha256(repr(said).encode(errors="backslashreplace")).hexdigest()[:16]


def answer_records(
    records: list[Record],
    engines: Sequence[Engine],
    *,
    on_prompt: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[Result]:
    """A result for every record, as they complete. Prompts are tokenised one by one, because all at once may not fit in
    memory.

    on_prompt: called with a record's line and the tokens of its prompt, before it runs. options: those of `kvjax.run`.
    """
    waiting, model = {record.line: record for record in records}, engines[0].model
    wrong: deque[Result] = deque(refused(record, record.error) for record in records if record.error is not None)
    running: set[int] = set()
    positions = positions_of(engines[0])
    with contextlib.suppress(ValueError):  # the first call settles truncation and padding, which two threads must not do at once
        tokenized(model.tokenizer, "a")

    def requests() -> Iterator[Request | None]:
        ordered = sorted((record for record in records if record.error is None), key=lambda record: -record.size)
        for record, found in prepared(ordered, lambda record: request_of(record, model.tokenizer, positions), lambda: bool(running)):
            if isinstance(found, ValueError):
                wrong.append(refused(record, str(found)))
            elif found is not None:
                running.add(record.line)
                if on_prompt is not None:
                    on_prompt(record.line, len(found.prompt))
            if found is None or isinstance(found, Request):
                yield found

    name = model_name(model)
    for request, completion in run(engines, requests(), **options):
        running.discard(request.id)
        with interrupts:
            result = answered(waiting[request.id], completion, model=name, tokenizer=model.tokenizer)
        yield result
        yield from _drain(wrong)
    yield from _drain(wrong)


def prepared(
    records: list[Record], prepare: Callable[[Record], Request], busy: Callable[[], bool]
) -> Iterator[tuple[Record | None, Request | ValueError | None]]:
    """Each record with its request, or with the error of one that cannot run.

    A long text takes seconds to tokenize, so a thread does it, one text at a time, while others run; its record comes
    when it is ready. busy: whether requests run. (None, None): there is none just now, and some run.
    """

    def tried(record: Record) -> Request | ValueError:
        try:
            with interrupts:
                return prepare(record)
        except ValueError as error:
            return error
        except PASSED_ON:
            raise
        except BaseException as error:  # a tokenizer of Python or Rust may raise anything; it concerns only this record
            logger.warning("line %d: the record cannot be prepared", record.line, exc_info=True)
            return ValueError(f"the record cannot be prepared: {type(error).__name__}: {error!s:.200}")

    short, long = deque(record for record in records if record.size <= LONG), deque(record for record in records if record.size > LONG)
    apart: tuple[Record, Future[Request | ValueError]] | None = None
    while short or long or apart is not None:
        if apart is None and long:
            record = long.popleft()
            apart = record, in_thread(functools.partial(tried, record))
        if apart is not None and (apart[1].done() or not (short or busy())):
            record, future = apart
            apart = None
            yield record, future.result()
        elif short:
            record = short.popleft()
            yield record, tried(record)
        else:
            yield None, None


def _drain(results: deque[Result]) -> Iterator[Result]:
    while results:
        yield results.popleft()


def positions_of(engine: Engine) -> int:
    """The longest prompt that an engine takes."""
    return MAX_POSITIONS if getattr(engine.prefill_policy, "counts_in_cache", False) else engine.model.config.max_positions


def model_name(model: Model) -> str:
    """The name answers carry: the model's own, else its family."""
    return getattr(model, "name", None) or model.config.family
