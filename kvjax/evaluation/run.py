"""An evaluation run: measures every policy in one engine, on the same prefilled texts, unit by unit. Keep the records
of finished units.

    run = EvaluationRun(model, text, Plan(policies=("dense", "cascade:8"), lengths=(8192,)))
    records = [run.measure(unit) for unit in run.units()]
    figures = kvjax.evaluation.report.summarize(run.plan, records)

A record is plain JSON. Apart from timings, it depends only on its unit, the plan, the text and the model. So a run that
was killed can go on with the units that it lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kvjax.cost_model.bytes import step_bytes
from kvjax.engine import PREFILL_CHUNK
from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.evaluation.needle import encode_text, vocabulary_words
from kvjax.evaluation.retrieval import ANSWER_ROOM, Answer, Arm, ask, check_positions, forked, prefilled, prompt_start, step_seconds
from kvjax.evaluation.sequential import is_decided
from kvjax.evaluation.tasks import HAYSTACKS, TASKS, answers_of, make_trials
from kvjax.evaluation.teacher_forcing import ALONE, exact_prefixes, few_rows, force, text_windows
from kvjax.model.protocols import Model
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import DecodePolicy, Dense, name_of, parse

TIMED_STEPS, TIMED_ROUNDS = 16, 3

BASELINES = (
    *("dense", "window:640", "top:4", "mean:4", "cascade:4/all+1bit", "cascade:4/all+4bit", "cascade:4/all+8bit"),
    *("cascade:4", "cascade:4+every2", "cascade:p0.95", "cascade:4/all+cache"),
)
"""Ways to choose 4 distant blocks: a control; bounds (Quest), means, all keys in 1 bit (FIER), in 4 and in 8
bits; a shortlist by bounds, then 4 bits, in every layer or every second one; the same for a share of attention
(Twilight); the oracle."""

OVER = " @ "
"""Between the name of a policy and that of the variant with which it runs."""
WEIGHTS = "weights "
"""Begins the name of a variant whose weights are packed. Other variants are cache formats."""

Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run measures.

    policies: names (`kvjax.policies.decode.parse`), or policies, which are replaced by their names (`name_of`); dense
    always runs. lengths: tokens of whole contexts, answers and forced text included. tasks, haystacks: of
    `kvjax.evaluation.tasks`. trials: of each task in each haystack at each length. distractors: additional facts, in
    the haystacks that have them. windows: disjoint pieces of text for teacher forcing. steps: forced tokens of each
    window. free_steps: tokens that are generated greedily, for the exact prefix. batch: contexts that are held and
    decoded together. again: how many of them in the noise floor, dense again; 1 costs most, and at most half of the
    batch is used, so that the shapes differ. cache_formats: texts of `kvjax.cache.formats`; every policy also runs over
    pages of each, by the name "POLICY @ FORMAT". weights: names of packed weights, as "int8"; every policy also runs
    with each, by the name "POLICY @ weights int8". All are compared with dense over pages that are not packed and with
    the weights as they are. sequential: `trials` is the most; those of a length, task and haystack end when
    `kvjax.evaluation.sequential` has decided about every policy. Their depths are spread over every first part of them.
    """

    policies: tuple[str | DecodePolicy, ...]
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = ("needle",)
    haystacks: tuple[str, ...] = ("codes",)
    trials: int = 200
    distractors: int = 16
    windows: int = 5
    steps: int = 1024
    free_steps: int = 128
    batch: int = 32
    again: int = 1
    seed: int = 0
    page_size: int = 128
    prefill_chunk: int = PREFILL_CHUNK
    cache_formats: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    sequential: bool = False

    def __post_init__(self):
        names = tuple(policy if isinstance(policy, str) else name_of(policy) for policy in self.policies)
        object.__setattr__(self, "policies", names)
        for name in ("cache_formats", "weights"):
            if len(set(values := getattr(self, name))) < len(values):
                raise ValueError(f"{name} must be named once each, got {', '.join(values)}")
        for name in ("policies", "lengths", "tasks", "haystacks"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one, each once, got {', '.join(map(str, values)) or 'none'}")
        for name, known in (("tasks", TASKS), ("haystacks", HAYSTACKS)):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise ValueError(f"{name}: {unknown[0]!r} is not known; there are {', '.join(known)}")
        for policy in self.policies:
            if isinstance(parse(policy), ChoosesDecode):
                raise ValueError(f"policies: {policy!r} chooses another policy at every step; measure those")
        # With a single trial or window, "alone" would be the same as "in the batch", and there would be no noise floor.
        for name, least in (
            ("trials", 2),
            ("windows", 2),
            ("batch", 2),
            ("again", 1),
            ("steps", 1),
            ("free_steps", 1),
            ("distractors", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.page_size < 1 or self.prefill_chunk < 1 or self.prefill_chunk % self.page_size:
            raise ValueError(f"prefill_chunk {self.prefill_chunk} must be a positive multiple of page_size {self.page_size}")
        if self.free_steps > self.steps:
            raise ValueError(f"free_steps {self.free_steps} are more than the {self.steps} forced steps whose place they take")
        if min(self.lengths) < self.steps + 2:
            raise ValueError(
                f"a length of {min(self.lengths):,} tokens leaves no history before {self.steps:,} forced steps: use fewer steps"
            )

    @property
    def variants(self) -> tuple[str, ...]:
        """What has an engine of its own beside the model as it is: packed pages, then packed weights."""
        return self.cache_formats + tuple(f"{WEIGHTS}{each}" for each in self.weights)

    @property
    def others(self) -> tuple[str, ...]:
        """The policies that are compared with dense, those of the model as it is first."""
        own = tuple(name for name in self.policies if not isinstance(parse(name), Dense))
        return own + tuple(f"{name}{OVER}{each}" for each in self.variants for name in ("dense", *own))

    def of_variant(self, variant: str | None) -> dict[str, str]:
        """The names of `others` with a variant (None: the model as it is), and their policies."""
        pairs = ((name, *name.partition(OVER)) for name in self.others)
        return {name: policy for name, policy, _, found in pairs if (found or None) == variant}


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work. kind: "retrieval" (a batch of trials) or "forced" (a batch of windows). rows: the trials or
    windows [first, last).

    work: an estimate of the unit's work, in tokens of prefill.
    """

    kind: str
    length: int
    rows: tuple[int, int]
    task: str = ""
    haystack: str = ""
    work: int = 0

    @property
    def key(self) -> str:
        """The unit's name in a file of records."""
        return "/".join(map(str, (self.kind, self.length, self.task, self.haystack, *self.rows)))


class EvaluationRun:
    """Runs the units of a plan, with one engine for the model and one for each variant.

    model: with a tokenizer. text: haystacks and windows are cut from it; it must be long enough for `plan.windows`
    disjoint windows. packed: gives the model with weights of a name in `plan.weights`. ValueError for a text that is
    too short, and for lengths beyond the model's positions.
    """

    def __init__(self, model: Model, text: str, plan: Plan, packed: Callable[[str], Model] | None = None):
        self.model, self.plan = model, plan
        if plan.weights and packed is None:
            raise ValueError(f"weights {', '.join(plan.weights)} need `packed`, which gives the model with such weights")
        longest = max(plan.lengths)
        check_positions(model, longest)
        self.text_ids = encode_text(model.tokenizer, text)
        self._engines: dict[str | None, Engine] | None = None
        self._trials = functools.lru_cache(maxsize=2)(self._draw)
        text_windows(self.text_ids, longest, plan.windows, self._prefix)
        self._models = {None: model} | {f"{WEIGHTS}{each}": packed(each) for each in plan.weights}

    def units(self) -> list[Unit]:
        """All units, in order: length by length, and forced text before retrieval."""
        plan, found = self.plan, []
        call = plan.prefill_chunk // 2  # a decode step takes about as long as half a chunk of prefill
        arms, engines = 1 + len(plan.others), 1 + len(plan.variants)
        for length in plan.lengths:
            for rows in _batches(plan.windows, plan.batch):
                count = rows[1] - rows[0]
                calls = (plan.steps + plan.free_steps) * (arms + -(-count // self._again))
                found.append(Unit("forced", length, rows, work=engines * count * (length - plan.steps) + calls * call))
            for task in plan.tasks:
                for haystack in plan.haystacks:
                    for rows in _batches(plan.trials, plan.batch):
                        count = rows[1] - rows[0]
                        calls = (arms + -(-count // self._again)) * ANSWER_ROOM * answers_of(task)
                        found.append(Unit("retrieval", length, rows, task, haystack, engines * count * length + calls * call))
        return found

    def is_needed(self, unit: Unit, records: Iterable[dict[str, Any]]) -> bool:
        """Whether a unit is still to be measured after those before it, of which these are the records. In a sequential
        run some are not."""
        if unit.kind == "forced" or not self.plan.sequential:
            return True
        here = [record for record in records if record["length"] == unit.length]
        forced = [record for record in here if record["kind"] == "forced"]
        cell = [record for record in here if (record.get("task"), record.get("haystack")) == (unit.task, unit.haystack)]
        before = sorted((record for record in cell if record["rows"] < list(unit.rows)), key=lambda record: record["rows"])
        return not is_decided(self.plan.trials, self.plan.others, before, forced)

    def measure(self, unit: Unit, advance: Advance | None = None) -> dict[str, Any]:
        """Run a unit and return its record. advance: called with the work just done, in tokens of prefill.

        `took` in the record is the wall-clock time of the unit in seconds, which includes compiling and making an
        engine.
        """
        advance, start = advance or (lambda tokens: None), time.perf_counter()
        engines = self._held()
        record = (self._forced if unit.kind == "forced" else self._retrieval)(engines, unit, advance)
        return record | {"took": time.perf_counter() - start}

    def release(self) -> None:
        """Free the engines' memory. The next unit makes new engines."""
        self._engines = None
        self._trials.cache_clear()

    def _forced(self, engines: dict[str | None, Engine], unit: Unit, advance: Advance) -> dict[str, Any]:
        plan = self.plan
        windows = text_windows(self.text_ids, unit.length, plan.windows, self._prefix)[slice(*unit.rows)]
        cut = unit.length - plan.steps - 1
        per_step = (1 + len(plan.others) + -(-len(windows) // self._again)) * plan.prefill_chunk // 2
        with self._arms(engines, [window[:cut] for window in windows], advance) as arms:
            dense = arms.pop("dense")
            engine, sequences = dense.engine, dense.sequences
            texts = [window[cut:] for window in windows]
            forced = force(engine, sequences, texts, arms, again=self._again, on_step=lambda: advance(per_step))
            prefixes = exact_prefixes(engine, sequences, [text[0] for text in texts], arms, plan.free_steps, again=self._again)
        return {
            "kind": "forced",
            "length": unit.length,
            "rows": list(unit.rows),
            "margin": _listed(forced.margin),
            "nll": _listed(forced.nll),
            "keys": forced.keys,
            "bytes": {name: self._bytes_read(policy, unit.length, forced.keys[name]) for name, policy in plan.of_variant(None).items()}
            | {"dense": self._bytes_read("dense", unit.length, forced.keys["dense"])},
            "beside": {
                name: {field: _listed(steps) for field, steps in vars(beside).items()} | {"prefix": prefixes[name]}
                for name, beside in forced.beside.items()
            },
        }

    def _bytes_read(self, policy: str, length: int, keys: float) -> int | None:
        """Bytes of keys, values and indexes of a step of one sequence, by the keys that were read; None if the policy
        cannot say."""
        try:
            read = step_bytes(self.model.config, parse(policy), length, page_size=self.plan.page_size, measured_keys=keys)
        except NotImplementedError:
            return None
        return read.kv + read.index

    @contextlib.contextmanager
    def _arms(self, engines: dict[str | None, Engine], prompts: list[Any], advance: Advance) -> Iterator[dict[str, Arm]]:
        """Dense and all that is compared with it, over the prompts, which each engine prefills."""
        with contextlib.ExitStack() as stack:
            held = {each: stack.enter_context(prefilled(engine, prompts, advance)) for each, engine in engines.items()}
            arms = {"dense": Arm(engines[None], held[None], "dense")}
            for each, engine in engines.items():
                arms |= {name: Arm(engine, held[each], policy) for name, policy in self.plan.of_variant(each).items()}
            yield arms

    def _retrieval(self, engines: dict[str | None, Engine], unit: Unit, advance: Advance) -> dict[str, Any]:
        trials = self._trials(unit.length, unit.task, unit.haystack)[slice(*unit.rows)]
        tokenizer, answers, keys = self.model.tokenizer, {}, {}
        with self._arms(engines, [trial.haystack_ids for trial in trials], advance) as arms:
            for name, arm in arms.items():
                with forked(arm.engine, arm.sequences) as forks:
                    answers[name], _, read = ask(arm.engine, forks, trials, tokenizer, policy=arm.policy)
                keys[name] = float(read.mean())
            alone: list[Answer] = []
            dense = arms["dense"]
            for rows in reversed(few_rows(len(trials), self._again)):
                with forked(dense.engine, dense.sequences[rows]) as forks:
                    alone = [*ask(dense.engine, forks, trials[rows], tokenizer, policy="dense")[0], *alone]
            answers[ALONE] = alone
            twice = arms | {ALONE: dense}  # dense is timed twice, to show how much timings vary
            seconds = step_seconds(twice, steps=TIMED_STEPS, rounds=TIMED_ROUNDS) if self._is_timed(unit) else None
        return {
            "kind": "retrieval",
            "length": unit.length,
            "task": unit.task,
            "haystack": unit.haystack,
            "rows": list(unit.rows),
            "depths": [trial.depth for trial in trials],
            "shares": {name: [answer.share for answer in said] for name, said in answers.items()},
            "texts": {name: [answer.text for answer in said] for name, said in answers.items()},
            "keys": keys,
            "seconds": seconds,
        }

    def _is_timed(self, unit: Unit) -> bool:
        """Whether a unit is also timed: the first batch of trials of each length is."""
        return (unit.task, unit.haystack, unit.rows[0]) == (self.plan.tasks[0], self.plan.haystacks[0], 0)

    def _held(self) -> dict[str | None, Engine]:
        """The engines. All lengths share them, so that a program of one length serves others whose page tables are as
        wide."""
        if self._engines is None:
            self._engines = {each: self._new_engine(each) for each in (None, *self.plan.variants)}
        return self._engines

    @property
    def _batch(self) -> int:
        """Rows of the largest unit."""
        return max(last - first for count in (self.plan.trials, self.plan.windows) for first, last in _batches(count, self.plan.batch))

    @property
    def _again(self) -> int:
        """Rows of dense again: other matrix shapes than those of the batch."""
        return min(self.plan.again, self._batch // 2)

    def _new_engine(self, variant: str | None) -> Engine:
        plan, model, length = self.plan, self._models.get(variant, self.model), max(self.plan.lengths)
        cache_format = None if variant in self._models else variant
        buckets = (self._again, self._batch)
        options = {"policies": plan.policies, "page_size": plan.page_size, "prefill_chunk": plan.prefill_chunk, "batch_buckets": buckets}
        if cache_format is not None:
            own = plan.of_variant(cache_format)
            windows = max(last - first for first, last in _batches(plan.windows, plan.batch))
            rows = max(2 * self._batch, windows * (1 + len(own)))  # contexts and their forks, each with a row of open pages
            sizes = {"policies": tuple(own.values()), "batch_buckets": (*buckets, rows)}
            options |= sizes | {"cache_format": cache_format}
        pages = self._pages(length)
        indexes = tuple(dict.fromkeys(spec for each in options["policies"] for spec in parse(each).indexes()))
        room = memory_plan(model.config, page_size=plan.page_size, indexes=indexes, weights_bytes=0, cache_format=cache_format)
        fits = room.pages_that_fit
        if pages > fits:
            raise ValueError(
                f"{plan.batch} contexts of {length:,} tokens take {pages:,} pages, and memory has room for {fits:,}: "
                "use a smaller batch, or a shorter length"
            )
        return Engine(model, pages=pages, **options)

    def _pages(self, length: int) -> int:
        """Pages for the largest unit of a length: its contexts, and all forks that exist at the same time."""
        plan, whole = self.plan, -(-length // self.plan.page_size)

        def own(kept: int) -> int:
            """Pages that a fork of `kept` tokens does not share once it has grown to the whole length."""
            return whole - kept // plan.page_size

        windows = max(last - first for first, last in _batches(plan.windows, plan.batch))
        forced = windows * (whole + (2 + len(plan.others)) * own(length - plan.steps - 1))
        trials = max(last - first for first, last in _batches(plan.trials, plan.batch))
        shortest = min(
            len(trial.haystack_ids) for task in plan.tasks for haystack in plan.haystacks for trial in self._trials(length, task, haystack)
        )
        return max(forced, trials * (whole + own(shortest)))

    def _draw(self, length: int, task: str, haystack: str) -> list[Any]:
        return make_trials(
            self.model.tokenizer,
            self.text_ids,
            self._words,
            task=task,
            haystack=haystack,
            length=length - ANSWER_ROOM * answers_of(task),
            count=self.plan.trials,
            seed=self.plan.seed,
            distractors=self.plan.distractors,
            prefix_ids=self._prefix,
            shuffled=self.plan.sequential,
        )

    @functools.cached_property
    def _words(self) -> tuple[str, ...]:
        return vocabulary_words(self.model.tokenizer)

    @functools.cached_property
    def _prefix(self) -> tuple[int, ...]:
        return prompt_start(self.model.tokenizer)


def _batches(count: int, most: int) -> Iterator[tuple[int, int]]:
    """`count` rows in as few batches as possible, of at most `most` rows and nearly equal size. So no batch has a
    single row, if `most` is above 2 and `count` above 1."""
    ends = np.linspace(0, count, -(-count // most) + 1).round().astype(int).tolist()
    yield from itertools.pairwise(ends)


def _listed(figures: np.ndarray) -> list[list[float]]:
    """The figures as lists, rounded to six digits, about the precision of float32."""
    return [[float(f"{figure:.6g}") for figure in row] for row in np.asarray(figures, float).tolist()]
