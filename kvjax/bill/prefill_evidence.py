"""Makes rows of the evidence about prefill policies, from the JSON of `kvjax echo` and of `kvjax needle --prefill ...`.

Echo measures what later tokens of a prompt recall of its earlier ones. Its facts and its KL can qualify a policy. Needles are looked for by
dense decoding after the prefill, which finds them after nearly any prefill. So their rows have no KL: they can refuse a policy, but never
qualify one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvjax.bill.evidence import LEAST_WINDOWS, PrefillEvidence
from kvjax.policies.prefill.naming import built_in_name

VALID_SHARE = 0.9
"""A needle result counts only if at least this share of the needles is found after dense prefill. Echo asks the same of its facts."""


def with_results(
    rows: Iterable[PrefillEvidence], results: Iterable[tuple[str, Mapping[str, Any]]], model: tuple[str, str] | None = None
) -> tuple[PrefillEvidence, ...]:
    """The table with the rows of `results`, (source, JSON object) each. If something was measured twice, the later result is used.

    A row replaces that of the same fingerprint, policy, length and task. Left out are cells that a report marks as invalid, and policies
    that are not built in. model: fingerprint and dtype of the model that was run, for results without a fingerprint. ValueError for such a
    result if `model` is None, for another dtype, for too little text, and for the JSON of another command.
    """
    table = {(row.fingerprint, row.policy, row.length, row.task): row for row in rows}
    added: list[tuple[str, PrefillEvidence]] = []
    for source, result in results:
        of_result = _of_echo if result.get("bench") == "prefill-echo" else _of_needles
        try:
            added += [(result["provenance"]["date"], row) for row in of_result(result, source, model)]
        except KeyError as error:
            raise ValueError(f"{source} has no {error}, so it is no JSON of kvjax echo or of kvjax needle --prefill") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{source} is no JSON of kvjax echo or of kvjax needle --prefill ({error})") from None
    for _, row in sorted(added, key=lambda pair: pair[0]):
        table[row.fingerprint, row.policy, row.length, row.task] = row
    return tuple(sorted(table.values(), key=lambda row: (row.model, row.fingerprint, row.policy, row.length, row.task)))


def _of_echo(report: Mapping[str, Any], source: str, model: tuple[str, str] | None) -> Iterator[PrefillEvidence]:
    settings = report["settings"]
    mark = _mark(settings, source, model)
    names = {entry["policy"]: built_in_name(entry["policy"]) for entry in report["policies"] if entry["policy"] != "dense"}
    for cell in report["cells"]:
        if cell["prompts"] < LEAST_WINDOWS:
            raise ValueError(f"{source}: {cell['prompts']} prompts of {cell['length']:,} tokens are too little to trust a policy")
        if cell["facts_invalid"]:
            continue
        mine = {row["policy"]: row for row in report["rows"] if row["length"] == cell["length"]}
        for policy, row in mine.items():
            if (name := names.get(policy)) is not None:
                # Facts of one prompt are not independent. So counts are divided by the design effect, as for the report's own intervals.
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
