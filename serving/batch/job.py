"""Batch jobs: many records through one engine or several replicas, as a library call and as a file job that can be killed and run again.

    for answer in run_batch([{"id": "a", "prompt": "Once"}], engine):
        print(answer["text"])

    print(run_file("in.jsonl", "out.jsonl", engine))

The formats of records are in `batch.records`, those of answers in `batch.results`. Prompts of similar length run together, the longest
first. An answer's bits do not depend on which others run beside it. So a job that was killed and continued, with the same number of slots,
has the same output as one that was not.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvjax.data_parallel import engines_of
from kvjax.engine import Engine
from kvjax.generation import pages_needed, run
from kvjax.guard import interrupts
from kvjax.model import Model, fingerprint
from kvjax.policies.decode import DecodePolicy, identity, parse
from kvjax.policies.prefill import identity as prefill_identity
from kvjax.prompts import chat_ids, encode
from kvjax.requests import OnToken, Request
from kvjax.sampling import Sampling
from kvjax.serving.batch.files import check_extras, lines
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.records import Defaults, Record, read
from kvjax.serving.batch.results import Result, Summary, answered, refused
from kvjax.serving.progress import JobProgress


def run_batch(
    records: Iterable[Mapping[str, Any] | str],
    engine: Engine | Sequence[Engine],
    *,
    policy: str | DecodePolicy | None = None,
    slots: int | None = None,
    defaults: Defaults = Defaults(),  # noqa: B008
    on_token: OnToken | None = None,
    steps_per_launch: int = 1,
) -> Iterator[dict[str, Any]]:
    """Answer records (objects, or lines of JSON text; see `kvjax.serving.batch.records`) and yield each answer as it completes.

    engine: one, or several replicas (`kvjax.replicas`), which share the records. policy: the decode policy; None is the engine's. slots:
    sequences that an engine decodes together; None is 8, or fewer if its largest batch bucket is smaller. defaults: settings for records
    that do not name them. An answer is the object that a file job would write. A record that cannot be answered gives an object with
    `error`. steps_per_launch: as in `kvjax.Scheduler`.
    """
    engines = engines_of(engine, "run_batch")
    options = {"policy": policy, "slots": slots, "steps_per_launch": steps_per_launch}
    results = answer_records(list(read(records, defaults)), engines, on_token=on_token, **options)
    return (result.output for result in results)


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
    steps_per_launch: int = 1,
) -> Summary:
    """Answer every line of the file `source` and write the answers to `out` in the same order; returns the closing figures.

    Answers are written to `out` + ".partial" as they complete. A killed job that is run again does only what is missing. ValueError if
    model, tokenizer, policy, prefill policy, page size, prefill chunk, dtype, slots, defaults or input are not those it began with. `out`
    appears complete at the end; ValueError if it exists already, unless overwrite. engine: one, or several replicas; their number may
    change between runs. console: where to show progress; None: nowhere. stores: show what pages are kept where, and where those of the
    pool lie, too. steps_per_launch: as in `kvjax.Scheduler`; it may change between runs.
    """
    source, out, engines = Path(source), Path(out), engines_of(engine, "run_file")
    check_paths(source, out, overwrite)
    records = list(read(lines(source), defaults))

    def answer(earlier: Collection[int], progress: JobProgress) -> Iterator[Result]:
        missing = [record for record in records if record.line not in earlier]
        options = {"policy": policy, "slots": slots, "steps_per_launch": steps_per_launch}
        return answer_records(missing, engines, on_token=progress.token, on_prefill=progress.prefill, **options)

    kept = {} if engines[0].stats() is None else {"found": lambda: sum(each.stats().found_tokens for each in engines)}
    told = [each for engine in engines for each in (engine.stats, engine.pool_stats) if each() is not None]
    if told and stores:
        kept["below"] = lambda: "\n".join(str(each()) for each in told)
    job, ignored = describe_job(engines[0], policy, source, defaults, slots), Counter(name for record in records for name in record.ignored)
    return complete(source, out, job, {record.line: work_of(record) for record in records}, ignored, answer, console, **kept)


def work_of(record: Record) -> int:
    """About how many tokens a record takes, prompt and answer."""
    return record.size // 4 + record.sampling.get("max_new_tokens", 1)


def complete(
    source: Path,
    out: Path,
    job: Mapping[str, Any],
    work: Mapping[int, int],
    ignored: Mapping[str, int],
    answer: Callable[[Collection[int], JobProgress], Iterable[Result]],
    console: Console | None,
    **shown: Any,
) -> Summary:
    """Do what is missing of a file job, and write its output; returns the closing figures.

    Args:
        source, out: the input, and the output.
        job: what must be equal to continue an earlier run (`describe_job`).
        work: about how many tokens each record takes, by its line.
        ignored: how many records gave each field that changes nothing.
        answer: the lines that an earlier run answered -> a result for each of the others, in any order. It tells the progress of tokens.
        console: where to show progress; None: nowhere.
        shown: arguments of `JobProgress`.
    """
    if not work:
        raise ValueError(f"{source} holds no records")
    started = time.monotonic()
    partial = Partial(partial_path(out), job)
    summary = Summary(ignored=dict(ignored))
    try:
        for result in partial.earlier.values():
            summary.add(result, earlier=True)
        with JobProgress(work, partial.earlier, console or Console(quiet=True), **shown) as progress:
            for result in answer(partial.earlier, progress):
                with interrupts:  # an answer is written whole, and counted once
                    partial.append(result)
                    summary.add(result)
                    progress.result(result)
        partial.finish(out)
    finally:
        partial.close()
    summary.seconds = time.monotonic() - started
    return summary


def partial_path(out: Path) -> Path:
    """The file in which a job keeps its answers until all are complete."""
    return out.with_name(out.name + ".partial")


def pages_of_job(source: Path, defaults: Defaults, model: Model, slots: int, page_size: int) -> int:
    """Pages that the `slots` longest records of a file take at once, at least 1. Reads and tokenises the file; keeps only lengths."""
    sizes = []
    for record in read(lines(source), defaults):
        try:
            request = _request(record, model.tokenizer) if record.error is None else None
            tokens = len(encode(model.tokenizer, request.prompt)) + request.sampling.max_new_tokens - 1 if request else 0
        except ValueError:  # the record's own answer says so
            continue
        if 0 < tokens <= model.config.max_positions:
            sizes.append((tokens, request.sampling.n))
    return max(1, pages_needed(sizes, slots, page_size))


def check_paths(source: Path, out: Path, overwrite: bool) -> None:
    """ValueError if a job cannot read `source` or may not write `out`. It is quick, so call it before a model is loaded."""
    check_extras(source, out)
    if not source.is_file():
        raise ValueError(f"there is no input file {source}")
    if source.stat().st_size == 0:
        raise ValueError(f"{source} is empty; it needs a record on each line")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} to")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file to write")
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the input; choose another output")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; pass --overwrite to replace it, or choose another output")


def describe_job(engine: Engine, policy: str | DecodePolicy | None, source: Path, defaults: Defaults, slots: int | None) -> dict[str, Any]:
    """Everything that the answers depend on. It must be equal to continue an earlier run."""
    stats = engine.stats()
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "model": fingerprint(engine.model),
        "tokenizer": _tokenizer_digest(engine.model.tokenizer),
        "policy": identity(engine.policy if policy is None else parse(policy)),
        "prefill": prefill_identity(engine.prefill_policy),
        "page size": engine.page_size,
        "prefill chunk": engine.prefill_chunk,
        "dtype": str(engine.dtype),
        "--reuse-any": None if stats is None or stats.exact else True,
        "--max-batch": slots,
        "--max-new-tokens": defaults.max_new_tokens,
        "--temperature": defaults.temperature,
        "--seed": defaults.seed,
        "input with SHA-256": digest,
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
    **options: Any,
) -> Iterator[Result]:
    """A result for every record, as they complete. Prompts are tokenised one by one, because all at once may not fit in memory.

    options: those of `kvjax.run`."""
    waiting, model = {record.line: record for record in records}, engines[0].model
    wrong: deque[Result] = deque(refused(record, record.error) for record in records if record.error is not None)

    def requests() -> Iterator[Request]:
        for record in sorted(records, key=lambda record: -record.size):
            if record.error is None:
                try:
                    with interrupts:
                        request = _request(record, model.tokenizer)
                except ValueError as error:
                    wrong.append(refused(record, str(error)))
                else:
                    yield request

    name = model_name(model)
    for request, completion in run(engines, requests(), **options):
        with interrupts:
            result = answered(waiting[request.id], completion, model=name, tokenizer=model.tokenizer)
        yield result
        yield from _drain(wrong)
    yield from _drain(wrong)


def _drain(results: deque[Result]) -> Iterator[Result]:
    while results:
        yield results.popleft()


def _request(record: Record, tokenizer: Any) -> Request:
    """The engine's request of a record: messages rendered and tokenised. ValueError says what is wrong with it."""
    sampling = Sampling(**record.sampling)
    prompt = record.prompt if record.messages is None else chat_ids(record.messages, tokenizer, record.template_options)
    return Request(prompt, sampling, record.line, cache_salt=record.cache_salt)


def model_name(model: Model) -> str:
    """The name answers carry: the model's own, else its family."""
    return getattr(model, "name", None) or model.config.family
