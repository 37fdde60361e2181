"""Evidence: how well a policy agrees with dense, for one model. `auto` chooses only budgets that have evidence.

The table is `evidence.json` in this folder, written by `kvjax cost evidence` from the evaluation.json of `kvjax
evaluate`: {"rows": [...], "crc": ...}, each row an `Evidence`. The checksum is of all that stands before it. `kvjax
evaluate --record` adds a user's own (`known_evidence`). (The committed rows were measured with an earlier kind of
fingerprint. Only the fingerprints were computed again.)

Evidence about prefill policies is `prefill_evidence.json`, in the same format, from the JSON of `kvjax recall` and of
`kvjax needle --prefill`. The first measures what later tokens of a prompt recall of its earlier ones. Its facts and its
KL can qualify a policy. Needles are looked for by dense decoding after the prefill, which finds them after nearly any
prefill. So their rows have no KL: they can refuse a policy, but never qualify one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from kvjax.cost_model.records import Count, check_record, from_json
from kvjax.known_files import KnownFile
from kvjax.model.identity import check_fingerprint
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode.naming import parse_recorded
from kvjax.policies.prefill.naming import built_in_name
from pallas_kernels.core.files import check_sealed, own_folder, read_list, read_object, replacing, sealed

MIN_WINDOWS, MIN_STEPS = 5, 256
"""A run with fewer windows or steps is not evidence."""

EVIDENCE_FOLDER = ".cache/kvjax/evidence"
"""In the user's home: what was measured on this machine, a file for each model."""

REMEDY = "give a table that kvjax cost evidence wrote, or a new name"
"""For a table that cannot be read."""

VALID_SHARE = 0.9
"""A needle result counts only if at least this share of the needles is found after dense prefill. So with facts of
prompt recall."""


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """A level of agreement with dense.

    kl: the largest allowed mean KL to dense, in nats, at the upper end of its interval. loss: the largest allowed share
    of what dense finds (needles and other recorded tasks) that a policy loses, at the upper end of the one-sided 97.5%
    Wilson interval; 1: no such test.
    """

    kl: float
    loss: float

    def __post_init__(self):
        if not self.kl > 0 or not 0 < self.loss <= 1:
            raise ValueError(
                f"a fidelity level needs kl > 0 (nats) and 0 < loss <= 1 (share of what dense finds), got kl={self.kl}, loss={self.loss}"
            )

    def __str__(self) -> str:
        return next((name for name, level in LEVELS.items() if level == self), f"kl={self.kl:g},loss={self.loss:g}")


LEVELS = {"assured": Fidelity(kl=0.02, loss=0.05), "fast": Fidelity(kl=0.1, loss=0.2)}
"""Levels by name. Of 200 needles, 3 may be lost for "assured" (upper end 0.043), 27 for "fast" (0.190)."""


def parse_level(text: str) -> Fidelity:
    """A level by name ("assured", "fast") or by numbers, "kl=0.02,loss=0.05". ValueError for anything else."""
    if text in LEVELS:
        return LEVELS[text]
    if match := re.fullmatch(r"kl=([\d.e-]+),loss=([\d.e-]+)", text):
        try:
            return Fidelity(float(match[1]), float(match[2]))
        except ValueError as error:
            raise ValueError(f"fidelity level {text!r}: {error}") from None
    raise ValueError(f"fidelity level {text!r} is not understood; there are {', '.join(LEVELS)}, or numbers such as kl=0.02,loss=0.05")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One row of a table.

    fingerprint: `kvjax.model.identity.fingerprint`, so other weights or another dtype have no evidence. length: tokens.
    kl: upper end of the 95% interval of the mean KL divergence of dense from the policy per forced step, in nats; None:
    not measured. valid: trials of the task that dense answered. lost: those of them that the policy did not. Both are
    None if dense itself fails at any depth.
    """

    model: str
    fingerprint: str
    policy: str
    length: Count
    kl: float | None
    task: str
    haystack: str
    valid: Count | None
    lost: int | None
    source: str

    def __post_init__(self):
        where = f"the evidence for {self.policy} from {self.source}"
        check_record(self, where)
        if not self.source:
            raise ValueError(f"evidence for {self.policy} names no source: give the file of its measurement")
        self._check_policy()
        if (self.valid is None) != (self.lost is None):
            raise ValueError(f"valid and lost of {where} must both be whole numbers, or both null, got {self.valid} and {self.lost}")
        if self.valid is not None and self.lost > self.valid:
            raise ValueError(f"lost of {where} must be at most valid, {self.valid}, got {self.lost}")
        check_fingerprint(self.fingerprint, where, "measure it again with kvjax evaluate")

    def _check_policy(self) -> None:
        if isinstance(parse_recorded(self.policy), ChoosesDecode):
            raise ValueError(f"evidence is about one policy, and {self.policy!r} chooses among several: record those")

    @property
    def loss(self) -> float | None:
        """Upper end of the one-sided 97.5% Wilson interval of the share lost; None if dense itself fails."""
        return None if self.valid is None else loss_bound(self.lost, self.valid)

    def meets(self, level: Fidelity) -> bool:
        """Whether the measured values meet the level. If dense itself fails the task, there is no loss, and only loss=1
        is met."""
        return (self.kl is None or self.kl <= level.kl) and (level.loss == 1 or (self.loss is not None and self.loss <= level.loss))


@dataclasses.dataclass(frozen=True)
class PrefillEvidence(Evidence):
    """A row about a built-in prefill policy."""

    def _check_policy(self) -> None:
        if built_in_name(self.policy) != self.policy:
            raise ValueError(f"prefill evidence is about one built-in prefill policy, under its own name, and {self.policy!r} names none")


@functools.lru_cache(maxsize=4096)
def loss_bound(lost: int, valid: int) -> float:
    """Upper end of the one-sided 97.5% Wilson interval of the share lost."""
    from scipy.stats import binomtest

    return float(binomtest(lost, valid).proportion_ci(0.95, method="wilson").high)


def qualified(rows: Iterable[Evidence], level: Fidelity, length: int) -> tuple[str, ...]:
    """Policies on record as meeting the level for sequences of `length` tokens.

    Such a policy meets the level in every recorded task, at every recorded length up to the shortest one that is at
    least `length`, and has a KL measurement at each of these lengths. Beyond its longest recorded length no policy
    qualifies, because a fixed budget keeps less of a larger context (BRL-2026-07, section 8.4).
    """
    by_policy: dict[str, dict[int, list[Evidence]]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {}).setdefault(row.length, []).append(row)
    found = []
    for policy, seen in by_policy.items():
        reach = min((recorded for recorded in seen if recorded >= length), default=None)
        if reach is not None and all(_meet(tasks, level) for recorded, tasks in seen.items() if recorded <= reach):
            found.append(policy)
    return tuple(found)


def _meet(tasks: Sequence[Evidence], level: Fidelity) -> bool:
    """Whether the rows of one length meet the level, in all tasks together."""
    return all(row.meets(level) for row in tasks) and any(row.kl is not None for row in tasks)


def read_evidence(file: Path, kind: type[Evidence] = Evidence, remedy: str = REMEDY) -> tuple[Evidence, ...]:
    """The rows of a table; kind: `Evidence` or `PrefillEvidence`. The ValueError names the file, what is wrong, and the
    remedy: for what is no JSON, a missing or wrong checksum, and a missing, unknown or wrong field."""
    read_object(file, remedy)
    known = KnownFile.of(file)
    check_sealed(file, remedy)
    rows = read_list(file, "rows", lambda row: from_json(kind, row, "a row of evidence"), remedy)
    known.check()  # the checksum may be of other rows
    return rows


@functools.cache
def recorded_evidence() -> tuple[Evidence, ...]:
    """The table of decode policies inside the package."""
    return read_evidence(importlib.resources.files(__package__) / "evidence.json")


def known_evidence(mark: str) -> tuple[Evidence, ...]:
    """What is known of a model: rows of the table inside the package, and those that `kvjax evaluate --record` wrote on
    this machine. Where both have a policy at a length, the latter count. mark: the model's fingerprint. ValueError for
    a damaged file, and for a folder that others may write. Nothing is made, so a home may be missing or read-only."""
    own = tuple(row for row in _own_rows(mark) if row.fingerprint == mark)
    measured = {(row.policy, row.length) for row in own}
    return own + tuple(row for row in recorded_evidence() if row.fingerprint == mark and (row.policy, row.length) not in measured)


def record_evaluation(run: Mapping[str, Any], source: str) -> Path:
    """Keep a run's measurements on this machine, for `known_evidence`. Returns the file. Raises as `with_evaluation`
    and `known_evidence` do."""
    mark = run["settings"]["fingerprint"]
    file = _own_file(mark)
    with filelock.FileLock(file.with_suffix(".lock")):
        write_evidence(with_evaluation(_own_rows(mark), run, source), file)
    return file


def check_can_record() -> None:
    """ValueError or OSError where `record_evaluation` could keep nothing on this machine."""
    own_folder(Path.home() / EVIDENCE_FOLDER)


def _has_own_file(mark: str) -> bool:
    """Whether this machine has a file of a model. False, too, where the user has no home. ValueError where something
    else has its name."""
    try:
        folder = Path.home() / EVIDENCE_FOLDER
    except RuntimeError:
        return False
    if not os.path.lexists(folder) or not os.path.lexists(file := _own_file(mark)):
        return False
    if not file.is_file():
        raise ValueError(f"{file} is no file of evidence, but a folder, a pipe or a link that leads nowhere: delete it")
    return True


def _own_rows(mark: str) -> tuple[Evidence, ...]:
    """The rows in the file of a model, none where there is no file."""
    remedy = "delete it, and measure again with kvjax evaluate --record"
    return read_evidence(_own_file(mark), remedy=remedy) if _has_own_file(mark) else ()


def _own_file(mark: str) -> Path:
    """The file of a model, a name without a path. Its folder is made."""
    if not re.fullmatch("sha256-[0-9a-f]{32}", mark):
        raise ValueError(f"{mark!r:.100} is no fingerprint of a model: 'sha256-' and 32 hexadecimal digits")
    folder = Path.home() / EVIDENCE_FOLDER
    return own_folder(folder) / f"{mark}.json"


@functools.cache
def recorded_prefill_evidence() -> tuple[PrefillEvidence, ...]:
    """The table of prefill policies inside the package."""
    return read_evidence(importlib.resources.files(__package__) / "prefill_evidence.json", PrefillEvidence)


def with_evaluation(rows: Sequence[Evidence], run: Mapping[str, Any], source: str, fingerprint: str | None = None) -> tuple[Evidence, ...]:
    """The table with a run's measurements, which replace rows of the same fingerprint, policy and length.

    run: the JSON of `kvjax evaluate` (kvjax.evaluation.report.summarize and its settings). source: the run's file.
    fingerprint: that of the model, if the run's settings have none. If dense fails a task at some depth, the task is
    left out at that length. If dense fails every task so, their rows have no counts. ValueError for a run with too
    little forced text, and for a missing field, which it names.
    """
    try:
        settings, added = run["settings"], []
        mark = settings.get("fingerprint", fingerprint)
        if mark is None:
            raise ValueError(f"{source} does not say which weights it ran: its settings have no fingerprint; name the model (--model)")
        if settings["windows"] < MIN_WINDOWS or settings["steps"] < MIN_STEPS:
            few = f"{settings['windows']} windows of {settings['steps']} steps"
            raise ValueError(f"{source}: {few} are too little to trust a budget; it takes {MIN_WINDOWS} of {MIN_STEPS}")
        names = {entry["policy"] for entry in run["policies"]} - {"dense"}
        kl = {(row["length"], row["policy"]): row["kl"]["high"] for row in run["forced"] if row["policy"] in names}
        places = [(row["length"], row["task"], row["haystack"]) for row in run["retrieval"]]
        cells = {(*place, row["policy"]): row for place, row in zip(places, run["retrieval"], strict=True)}
        tested = {length for (length, *_, policy), row in cells.items() if policy == "dense" and _is_whole(row)}
        for (length, task, haystack, policy), row in cells.items():
            dense = cells[length, task, haystack, "dense"]
            valid = dense["hits"] if _is_whole(dense) else None
            if policy not in names or (valid is None and length in tested):
                continue
            lost = None if valid is None else row["against_dense"]["lost"]
            same = name_to_record(policy), length, kl[length, policy], task, haystack
            added.append(Evidence(settings["model"], mark, *same, valid, lost, source))
    except KeyError as error:
        raise ValueError(f"{source} has no {error}, so it is no evaluation.json of kvjax evaluate") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{source} is no evaluation.json of kvjax evaluate ({error})") from None
    replaced = {(row.fingerprint, row.policy, row.length) for row in added}
    kept = [row for row in rows if (row.fingerprint, row.policy, row.length) not in replaced]
    return tuple(sorted((*kept, *added), key=lambda row: (row.model, row.fingerprint, row.policy, row.length, row.task, row.haystack)))


def name_to_record(name: str) -> str:
    """The name of a built-in policy. ValueError for other policies, because another process could not make them from
    their names."""
    policy = parse_recorded(name)
    if not type(policy).__module__.startswith("kvjax.policies"):
        raise ValueError(f"policy {name!r} is not built in, and auto chooses among built-in policies: leave it out of the run")
    return str(policy)


def _is_whole(dense: Mapping[str, Any]) -> bool:
    """Whether all trials of a cell count, and dense answers some."""
    return dense["hits"] > 0 and not dense["invalid_trials"]


def with_results(
    rows: Iterable[PrefillEvidence], results: Iterable[tuple[str, Mapping[str, Any]]], model: tuple[str, str] | None = None
) -> tuple[PrefillEvidence, ...]:
    """The table with the rows of `results`, (source, JSON object) each. If something was measured twice, the later
    result is used.

    A row replaces that of the same fingerprint, policy, length and task. Left out are cells that a report marks as
    invalid, and policies that are not built in. model: fingerprint and dtype of the model that was run, for results
    without a fingerprint. ValueError for such a result if `model` is None, for another dtype, for too little text, and
    for the JSON of another command.
    """
    table = {(row.fingerprint, row.policy, row.length, row.task): row for row in rows}
    added: list[tuple[str, PrefillEvidence]] = []
    for source, result in results:
        of_result = _of_recall if result.get("bench") == "prefill-echo" else _of_needles
        try:
            added += [(str(result["provenance"]["date"]), row) for row in of_result(result, source, model)]
        except KeyError as error:
            raise ValueError(f"{source} has no {error}, so it is no JSON of kvjax recall or of kvjax needle --prefill") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{source} is no JSON of kvjax recall or of kvjax needle --prefill ({error})") from None
    for _, row in sorted(added, key=lambda pair: pair[0]):
        table[row.fingerprint, row.policy, row.length, row.task] = row
    return tuple(sorted(table.values(), key=lambda row: (row.model, row.fingerprint, row.policy, row.length, row.task)))


def _of_recall(report: Mapping[str, Any], source: str, model: tuple[str, str] | None) -> Iterator[PrefillEvidence]:
    settings = report["settings"]
    mark = _mark(settings, source, model)
    names = {entry["policy"]: built_in_name(entry["policy"]) for entry in report["policies"] if entry["policy"] != "dense"}
    for cell in report["cells"]:
        if cell["prompts"] < MIN_WINDOWS:
            raise ValueError(f"{source}: {cell['prompts']} prompts of {cell['length']:,} tokens are too little to trust a policy")
        if cell["facts_invalid"]:
            continue
        mine = {row["policy"]: row for row in report["rows"] if row["length"] == cell["length"]}
        for policy, row in mine.items():
            if (name := names.get(policy)) is not None:
                # Facts of one prompt are not independent. So counts are divided by the design effect, as for the
                # report's own intervals.
                effect = max(1.0, row["against_dense"]["design_effect"])
                valid = int(mine["dense"]["hits"] / effect)
                counts = valid, min(valid, math.ceil(row["against_dense"]["lost"] / effect))
                same = settings["model"], mark, name, cell["length"], row["kl"]["high"], "facts", _texts(settings)
                yield PrefillEvidence(*same, *counts, source)


def _of_needles(result: Mapping[str, Any], source: str, model: tuple[str, str] | None) -> Iterator[PrefillEvidence]:
    if result["prefill"] != "dense":
        raise ValueError(f"{source} sets prefill policies beside {result['prefill']}, not beside dense: run it with --prefill dense first")
    mark = _mark(result, source, model)
    found = {each["policy"]: each["hits"] for each in result["results"]}["dense"]
    if found < VALID_SHARE * result["trials"]:
        return
    for pair in result["pairs"]:
        name = built_in_name(pair["prefill"])
        if name is not None and pair["policy"] == "dense":
            same = result["model"], mark, name, result["length"], None, "needle", _texts(result)
            yield PrefillEvidence(*same, found, pair["lost"], source)


def _mark(settings: Mapping[str, Any], source: str, model: tuple[str, str] | None) -> str:
    if "fingerprint" in settings:
        return settings["fingerprint"]
    if model is None:
        raise ValueError(f"{source} has no fingerprint of the weights that it ran: name the model and its dtype (--model, --dtype)")
    mark, dtype = model
    if settings.get("dtype", dtype) != dtype:
        raise ValueError(f"{source} was run in {settings['dtype']}, and the model is named in {dtype}: give --dtype {settings['dtype']}")
    return mark


def _texts(settings: Mapping[str, Any]) -> str:
    texts = settings["text"]
    return texts if isinstance(texts, str) else ", ".join(texts)


def write_evidence(rows: Iterable[Evidence], file: Path) -> None:
    """Write a table for `read_evidence`. It goes to a new file, which replaces the old one when it is complete."""
    with replacing(file) as partial:
        partial.write_text(sealed({"rows": [dataclasses.asdict(row) for row in rows]}), encoding="utf-8")
