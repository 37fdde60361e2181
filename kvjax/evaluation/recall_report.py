"""Makes the figures of a recall run, one JSON value, from its records, and the rows of its table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.prompt_recall import EARLY, LATE, RecallPlan
from kvjax.evaluation.statistics import clustered, over_windows
from kvjax.evaluation.teacher_forcing import ALONE
from kvjax.policies.prefill import parse_prefill
from pallas_kernels.core.tables import estimate, span

VALID_SHARE = 0.9
"""Share of the repeated values, and of the tokens of passages, that dense must predict for a cell to be valid."""

CONTROL_LOSS = 0.5
"""Share of what dense predicts that the control must lose, in facts and in passages alike, for a cell to be valid."""

DISTANCE_BINS = 3

RULES = {
    "facts": f"Stated in the first {EARLY:.0%} of a prompt, asked for and answered in its last {1 - LATE:.0%}. A fact counts if every "
    "token of its value is the most likely one, given the true tokens before it, by the logits of prefill.",
    "passages": "Text of the early part that stands again in the last part: the share of its tokens, after the run-in, that are the most "
    "likely ones.",
    "valid cells": f"Dense predicts at least {VALID_SHARE:.0%} of the facts, and the control loses at least {CONTROL_LOSS:.0%} of what "
    f"dense predicts; the same of the tokens of passages. Otherwise the cell says why it is invalid.",
    "pairs": "Every policy reads the same prompts. Facts of one prompt are not independent: counts are divided by the design effect of the "
    "prompts (Rao and Scott) before Newcombe's interval for paired proportions, or Wilson's, is made. Shares of passages and KL have 95% t "
    "intervals over prompts, one figure each.",
    "noise floor": f"'{ALONE}' is dense attention over lists that hold every block, through the op of sparse policies: the same "
    "keys, added up in another order.",
    "kl": "KL(dense || policy) of the logits of prefill in the last part, in nats: kl_text of running text, kl of everything there.",
}


def summarize(plan: RecallPlan, records: Iterable[dict[str, Any]], failed: Mapping[str, str]) -> dict[str, Any]:
    """All figures, ready for JSON, from the records so far. A length with fewer than two prompts is left out.

    Keys: rules, policies (name, describe), cells (per length: prompts done, and why it is invalid), rows (per length
    and policy), failed.
    """
    records, named = list(records), plan.policies
    cells, rows = [], []
    for length in plan.lengths:
        mine = [record for record in records if record["length"] == length]
        if len(mine) >= 2:
            found = [_row(length, mine, name) for name in ("dense", *named, ALONE) if name not in failed]
            cells.append({"length": length, "prompts": len(mine), "of": plan.prompts, **_validity(found, str(parse_prefill(plan.control)))})
            rows += found
    described = [{"policy": "dense", "describe": "dense"}, *({"policy": n, "describe": p.describe()} for n, p in named.items())]
    return {"rules": RULES, "policies": described, "cells": cells, "rows": rows, "failed": dict(failed)}


def _row(length: int, records: Sequence[dict], name: str) -> dict[str, Any]:
    """One policy at one length."""
    facts = {which: np.array([record["facts"][which] for record in records], bool) for which in ("dense", name)}
    passages = {which: np.array([record["passages"][which] for record in records]).mean(axis=1) for which in ("dense", name)}
    distances = np.array([record["fact_distances"] for record in records])
    pairs = dataclasses.asdict(clustered(facts["dense"], facts[name]))
    row = {"length": length, "policy": name, "facts": facts[name].size, "hits": int(facts[name].sum()), "share": pairs.pop("share")}
    row["by_distance"] = _by_distance(facts[name], distances)
    row["hits_of_prompts"] = facts[name].sum(axis=1).tolist()
    row["passages"] = dataclasses.asdict(over_windows(passages[name]))
    row["kl"] = dataclasses.asdict(over_windows(np.array([record["kl"][name] for record in records])))
    row["kl_text"] = dataclasses.asdict(over_windows(np.array([record["kl_text"][name] for record in records])))
    if name != "dense":
        row |= {"against_dense": pairs}
        row["passages_against_dense"] = dataclasses.asdict(over_windows(passages[name] - passages["dense"]))
    return row


def _by_distance(hits: np.ndarray, distances: np.ndarray) -> list[dict[str, int]]:
    """Facts predicted, by the distance in tokens between statement and repetition, in ranges of equal width."""
    edges = np.linspace(distances.min(), distances.max() + 1, DISTANCE_BINS + 1).round().astype(int)
    within = [(distances >= low) & (distances < high) for low, high in itertools.pairwise(edges)]
    ends = zip(itertools.pairwise(edges.tolist()), within, strict=True)
    return [{"from": low, "to": high, "hits": int(hits[w].sum()), "facts": int(w.sum())} for (low, high), w in ends]


def _validity(rows: Sequence[dict], control: str) -> dict[str, list[str]]:
    """The reasons why the facts and why the passages of a length are invalid; empty if they are valid."""
    by_name = {row["policy"]: row for row in rows}
    dense, window = by_name["dense"], by_name.get(control)
    if window is None:
        return {which: [f"the control {control} could not be run"] for which in ("facts_invalid", "passages_invalid")}
    facts, passages = [], []
    if dense["share"]["value"] < VALID_SHARE:
        facts.append(f"dense predicts {dense['hits']} of {dense['facts']} facts, fewer than {VALID_SHARE:.0%}")
    if window["hits"] > (1 - CONTROL_LOSS) * dense["hits"]:
        facts.append(f"the control {control} loses only {dense['hits'] - window['hits']} of {dense['hits']} facts")
    if dense["passages"]["value"] < VALID_SHARE:
        passages.append(f"dense predicts {dense['passages']['value']:.1%} of passages, less than {VALID_SHARE:.0%}")
    if window["passages"]["value"] > (1 - CONTROL_LOSS) * dense["passages"]["value"]:
        passages.append(f"the control {control} still predicts {window['passages']['value']:.1%} of {dense['passages']['value']:.1%}")
    return {"facts_invalid": facts, "passages_invalid": passages}


COLUMNS = ("tokens", "prefill", "facts", "facts, 95%", "lost/gained", "facts, difference, 95%", "by distance", "passages")
COLUMNS += ("passages, difference, 95%", "KL, text", "KL, text, 95%", "KL, all")


def recall_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`, a row per length and policy. Invalid cells are marked."""
    return [_cells(row, next(cell for cell in figures["cells"] if cell["length"] == row["length"])) for row in figures["rows"]]


def _cells(row: dict[str, Any], cell: dict[str, Any]) -> tuple[str, ...]:
    name = f"{ALONE} (noise)" if row["policy"] == ALONE else row["policy"]
    dense, kl = row["policy"] == "dense", row["kl_text"]
    facts, passages = ("invalid", *[""] * 4), ("invalid", "")
    if not cell["facts_invalid"]:
        share, shares = row["share"], [f"{each['hits'] / each['facts']:.0%}" if each["facts"] else "-" for each in row["by_distance"]]
        pairs = ("", "") if dense else ("-{lost}/+{gained}".format(**row["against_dense"]), estimate(row["against_dense"]["difference"]))
        facts = (f"{row['hits']}/{row['facts']}", span(share["low"], share["high"]), *pairs, ", ".join(shares))
    if not cell["passages_invalid"]:
        passages = (f"{row['passages']['value']:.1%}", "" if dense else estimate(row["passages_against_dense"]))
    apart = ("", "", "") if dense else (f"{kl['value']:.2g}", span(kl["low"], kl["high"], ".2g"), f"{row['kl']['value']:.2g}")
    return f"{row['length']:,}", name, *facts, *passages, *apart


def remarks(figures: dict[str, Any]) -> list[str]:
    """Remarks below the table: invalid cells, lengths that are not finished, policies that failed."""
    lines = []
    for cell in figures["cells"]:
        for which in ("facts", "passages"):
            lines += [f"invalid, {which} at {cell['length']:,} tokens: {why}" for why in cell[f"{which}_invalid"]]
        if cell["prompts"] < cell["of"]:
            lines.append(f"{cell['length']:,} tokens: {cell['prompts']} of {cell['of']} prompts done")
    return lines + [f"{name} failed and was left out: {why}" for name, why in figures["failed"].items()]
