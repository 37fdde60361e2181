"""Makes the figures of a run from its records: one JSON value, rows for a CSV file, and tables for the terminal and
documents."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from kvjax.evaluation.run import OVER, Plan
from kvjax.evaluation.sequential import DENSE_SHARE, LOOKS, is_decided
from kvjax.evaluation.statistics import (
    BLOCK_STEPS,
    block_means,
    lower_bound,
    mean_over_blocks,
    over_windows,
    paired,
    proportion,
    ratio_of_perplexities,
)
from kvjax.evaluation.teacher_forcing import ALONE
from kvjax.policies.decode import DecodePolicy, Dense, Window, parse_recorded
from pallas_kernels.core.optional import needs_extras
from pallas_kernels.core.tables import estimate, span
from pallas_kernels.core.tables import table as terminal_table

if TYPE_CHECKING:
    import pandas

CONFIDENT_MARGIN = 1.0
"""Nats between dense's two most likely tokens above which a step counts as confident."""

FEW_BLOCKS = 20
"""A bootstrap over fewer blocks of steps gives intervals that are too narrow. Then a remark says so."""

EQUAL_BUDGET = 0.1
"""Two policies have equal budgets if their numbers of keys differ by at most this share of the larger (quest:64 and
top:8: 7%)."""

KEPT_KL = 0.02
"""A policy holds if its mean KL to dense is at most this, in nats. (The level `assured` of policy `auto` asks it of the
interval's upper end.)"""

FEW_TRIALS = 50
"""With fewer valid trials, no policy is said to hold: the interval of a difference is too wide to show a loss."""

CONTROL_LOSS = 0.5
"""Share of what dense finds that the narrowest window must lose. Otherwise a cell does not tell policies apart."""

DEPTH_BINS = 5
MARGIN_EDGES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, float("inf"))
PARTS = 4
"""A forced run is cut into this many parts, to show whether the KL grows as the fed text becomes longer than the local
window."""

RULES = {
    "cells": f"A cell (length, task, haystack) counts where dense answers at least {DENSE_SHARE:.0%} of its trials. Of others it is said "
    "that dense cannot; they enter no average and no pair.",
    "pairs": "Every policy answers the same trials from the same cache as dense. lost: dense only; gained: the policy only. "
    "p_value: exact McNemar, two-sided; p_loss: one-sided exact binomial; difference: Newcombe's interval for paired proportions.",
    "noise floor": f"'{ALONE}' is dense with each row decoded alone, or `again` rows together, the last first, against dense in the batch.",
    "confident": f"A step is confident where dense's two most likely tokens are more than {CONFIDENT_MARGIN} nats apart. The pool of a "
    "policy is every window of every length of this run, none left out; 'members' lists them.",
    "autocorrelation": "The Wilson interval of an agreement takes steps as independent. Steps of one window are not, so it is too narrow: "
    "look at the spread over windows ('rates') beside it.",
    "equal budget": f"Policies whose keys differ by at most {EQUAL_BUDGET:.0%} are compared with each other as well, on the trials "
    "that count and on the forced steps: second against first, as they stand in the list.",
    "hold": "A policy holds where the paired interval of what it finds includes 0 or lies above, and its mean KL to dense is at most "
    f"{KEPT_KL} nats; said of at least {FEW_TRIALS} trials.",
    "MB read": "Bytes of keys, values and indexes of a step of one sequence of the whole length, from sizes and the keys that were read.",
    "intervals": "KL and perplexity: 95% t interval over windows, one figure each, perplexities in pairs. "
    f"'..._within': 95% BCa bootstrap over blocks of {BLOCK_STEPS} steps of these very windows, which says nothing about others.",
}
EARLY_END = (
    f"Trials of a cell end at one of {LOOKS} looks where it is decided for every policy whether it meets each level of policy auto, or "
    "where dense cannot. planned_trials: the most that it may have. Intervals and p are those of the trials that ran, as if no more "
    "had been planned."
)
"""The rule of a sequential run."""


def summarize(plan: Plan, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All figures of a run, ready for JSON, from records of all its units in any order.

    Keys: rules, policies (name, describe), retrieval (per length, task, haystack and policy), forced and speed (per
    length and policy), equal_budget (per length and pair of policies), pooled (per policy) and took (wall-clock seconds
    per length). ValueError if records lack trials or windows of the plan.
    """
    records = list(records)
    names = ("dense", *plan.others)
    forced = [row for length in plan.lengths for row in _forced_rows(plan, length, _of(records, "forced", length))]
    retrieval = []
    for length in plan.lengths:
        for task in plan.tasks:
            for haystack in plan.haystacks:
                some = [r for r in _of(records, "retrieval", length) if (r["task"], r["haystack"]) == (task, haystack)]
                retrieval += _retrieval_rows(plan, some, _of(records, "forced", length))
    return {
        "rules": RULES | ({"early end": EARLY_END} if plan.sequential else {}),
        "policies": [{"policy": name, "describe": _policy(name).describe()} for name in names],
        "retrieval": retrieval,
        "forced": forced,
        "speed": [row for record in _of(records, "retrieval") if record["seconds"] for row in _speed_rows(record)],
        "equal_budget": _contrasts(plan, records),
        "pooled": [_pool(name, forced) for name in (*plan.others, ALONE)],
        "took": {f"{length}": sum(record["took"] for record in records if record["length"] == length) for length in plan.lengths},
    }


def _of(records: Sequence[dict], kind: str, length: int | None = None) -> list[dict]:
    found = [record for record in records if record["kind"] == kind and length in (None, record["length"])]
    return sorted(found, key=lambda record: record["rows"])


def _check_whole(what: str, wanted: int, records: Sequence[dict]) -> None:
    rows = [row for record in records for row in range(*record["rows"])]
    if rows != list(range(wanted)):
        raise ValueError(f"records hold {len(rows)} of {wanted} {what}: let the run end first")


def _trials(records: Sequence[dict], names: Sequence[str]) -> tuple[dict[str, np.ndarray], np.ndarray, bool]:
    """For the trials of one cell: the share found by each policy, the fifth of depth of each trial, and whether the
    cell counts."""
    bins = np.minimum((np.concatenate([r["depths"] for r in records]) * DEPTH_BINS).astype(int), DEPTH_BINS - 1)
    shares = {name: np.concatenate([r["shares"][name] for r in records]) for name in names}
    return shares, bins, bool(np.mean(shares["dense"] == 1.0) >= DENSE_SHARE)


def _retrieval_rows(plan: Plan, records: Sequence[dict], forced: Sequence[dict]) -> list[dict[str, Any]]:
    """One row per policy, for one (length, task, haystack). forced: records of the length's forced text."""
    ended = plan.sequential and is_decided(plan.trials, plan.others, records, forced)
    _check_whole("trials", records[-1]["rows"][1] if ended else plan.trials, records)
    shares, bins, counts = _trials(records, ("dense", *plan.others, ALONE))
    dense, cells = shares["dense"] == 1.0, [number for number in range(DEPTH_BINS) if (bins == number).any()]
    rows = []
    for name, found in shares.items():
        hits = found == 1.0
        keys = sum(r["keys"].get(name, r["keys"]["dense"]) * len(r["depths"]) for r in records) / len(hits)
        row = {field: records[0][field] for field in ("length", "task", "haystack")} | {"policy": name, "keys_per_step": keys}
        row["by_depth"] = [
            {"from": number / DEPTH_BINS, "to": (number + 1) / DEPTH_BINS}
            | {"hits": int(hits[bins == number].sum()), "trials": int((bins == number).sum())}
            for number in cells
        ]
        row |= {"planned_trials": plan.trials} if plan.sequential else {}
        row |= {"invalid_trials": 0 if counts else hits.size, "hits": int(hits.sum()) * counts, "trials": hits.size * counts}
        if counts:
            row["exact_match"] = dataclasses.asdict(proportion(row["hits"], row["trials"]))
            row["lower_bound_95"] = lower_bound(row["hits"], row["trials"], 0.95)
            row["share_found"] = float(found.mean())
            row["against_dense"] = dataclasses.asdict(paired(dense, hits))
        else:
            row |= dict.fromkeys(("exact_match", "lower_bound_95", "share_found", "against_dense"))
        rows.append(row)
    return rows


def _forced_rows(plan: Plan, length: int, records: Sequence[dict]) -> list[dict[str, Any]]:
    """One row per policy, for one length."""
    _check_whole("windows", plan.windows, records)
    margin, nll = (np.concatenate([r[field] for r in records]) for field in ("margin", "nll"))
    confident = margin > CONFIDENT_MARGIN
    keys = {name: float(np.mean([r["keys"][name] for r in records])) for name in ("dense", *plan.others)}
    read = {name: max(sizes) for name in keys if None not in (sizes := [r.get("bytes", {}).get(name) for r in records])}
    rows = [{"length": length, "policy": "dense", "keys_per_step": keys["dense"], "perplexity": float(np.exp(nll.mean()))}]
    for name in (*plan.others, ALONE):
        agrees, kl, tv, own = (
            np.concatenate([r["beside"][name][field] for r in records]).astype(float) for field in ("agrees", "kl", "tv", "nll")
        )
        wrong = agrees == 0.0
        edges = list(itertools.pairwise(MARGIN_EDGES))
        within = [(margin >= low) & (margin < high) for low, high in edges]
        prefixes = [prefix for r in records for prefix in r["beside"][name]["prefix"]]
        row = {
            "length": length,
            "policy": name,
            "keys_per_step": keys.get(name, keys["dense"]),
            "windows": len(kl),
            "steps": kl.shape[1],
            "agreement": dataclasses.asdict(proportion(int(agrees.sum()), agrees.size)),
            "confident": [
                {"length": length, "window": i, "hits": int(agrees[i][confident[i]].sum()), "steps": int(confident[i].sum())}
                for i in range(len(kl))
            ],
            "largest_margin_of_a_disagreement": float(margin[wrong].max()) if wrong.any() else None,
            "blocks": block_means(kl).size,
            "kl": dataclasses.asdict(over_windows(kl.mean(axis=1))),
            "kl_within": dataclasses.asdict(mean_over_blocks(block_means(kl))),
            "kl_of_windows": kl.mean(axis=1).tolist(),
            "kl_of_parts": [float(part.mean()) for part in np.array_split(kl, min(PARTS, kl.shape[1]), axis=1)],
            "total_variation": dataclasses.asdict(over_windows(tv.mean(axis=1))),
            "perplexity": float(np.exp(own.mean())),
            "perplexity_ratio": dataclasses.asdict(over_windows((own - nll).mean(axis=1), np.exp)),
            "perplexity_ratio_within": dataclasses.asdict(ratio_of_perplexities(block_means(nll), block_means(own))),
            "exact_prefix": {"of": plan.free_steps, "tokens": prefixes, "median": float(np.median(prefixes))},
            "by_margin": [
                {"from": low, "to": None if high == float("inf") else high, "steps": int(w.sum()), "disagreements": int((w & wrong).sum())}
                for (low, high), w in zip(edges, within, strict=True)
            ],
        }
        rows.append(row)
    return [row | ({"read_bytes": read[row["policy"]]} if row["policy"] in read else {}) for row in rows]


def _contrasts(plan: Plan, records: Sequence[dict]) -> list[dict[str, Any]]:
    """Compares policies of equal budget with each other: trials found, KL to dense, perplexity."""
    keys = {name: keys for name in plan.others if OVER not in name and (keys := _nominal_keys(name)) is not None}
    pairs = [
        (first, second)
        for first, second in itertools.combinations(keys, 2)
        if abs(keys[first] - keys[second]) <= EQUAL_BUDGET * max(keys[first], keys[second])
    ]
    rows = []
    for length, (first, second) in itertools.product(plan.lengths, pairs):
        forced = _of(records, "forced", length)
        steps = {
            (name, field): np.concatenate([r["beside"][name][field] for r in forced]) for name in (first, second) for field in ("kl", "nll")
        }
        row = {"length": length, "first": first, "second": second, "keys": [keys[first], keys[second]], "retrieval": []}
        difference = {field: (steps[second, field] - steps[first, field]).mean(axis=1) for field in ("kl", "nll")}
        row["kl_difference"] = dataclasses.asdict(over_windows(difference["kl"]))
        row["perplexity_ratio"] = dataclasses.asdict(over_windows(difference["nll"], np.exp))
        for task, haystack in itertools.product(plan.tasks, plan.haystacks):
            some = [r for r in _of(records, "retrieval", length) if (r["task"], r["haystack"]) == (task, haystack)]
            shares, _, counts = _trials(some, ("dense", first, second))
            if counts:
                pair = paired(shares[first] == 1.0, shares[second] == 1.0)
                row["retrieval"].append({"task": task, "haystack": haystack, **dataclasses.asdict(pair)})
        rows.append(row)
    return rows


def _speed_rows(record: dict) -> list[dict[str, Any]]:
    """Milliseconds per step: the median of the rounds, the fastest and the slowest round. speed: dense's median over
    the policy's."""
    dense = np.median(record["seconds"]["dense"])
    return [
        {
            "length": record["length"],
            "policy": name,
            "batch": len(record["depths"]),
            "ms_per_step": 1e3 * float(np.median(rounds)),
            "ms_of_rounds": [1e3 * min(rounds), 1e3 * max(rounds)],
            "speed": float(dense / np.median(rounds)),
        }
        for name, rounds in record["seconds"].items()
    ]


def _pool(name: str, forced: Sequence[dict]) -> dict[str, Any]:
    """A policy's agreement with dense on confident steps, over every window of every length."""
    members = [member for row in forced if row["policy"] == name for member in row["confident"]]
    hits, steps = (sum(member[field] for member in members) for field in ("hits", "steps"))
    rates = sorted(member["hits"] / member["steps"] for member in members if member["steps"])
    return {
        "policy": name,
        "hits": hits,
        "steps": steps,
        "agreement": dataclasses.asdict(proportion(hits, steps)) if steps else None,
        "rates": {"least": rates[0], "median": float(np.median(rates)), "most": rates[-1]} if rates else None,
        "members": members,
    }


def frame(figures: dict[str, Any]) -> pandas.DataFrame:
    """One flat row per length, task, haystack and policy, of `CSV_COLUMNS`. Figures that have no task and haystack are
    repeated."""
    needs_extras("a table of an evaluation", "eval")
    import pandas

    place, described = ["length", "policy"], {entry["policy"]: entry["describe"] for entry in figures["policies"]}
    found, forced = (pandas.json_normalize(figures[kind], sep="_") for kind in ("retrieval", "forced"))
    rows = found.drop(columns=["exact_match", "against_dense"], errors="ignore")  # None where dense cannot
    rows = rows.merge(forced.drop(columns="keys_per_step"), "left", place).merge(
        pandas.DataFrame(figures["speed"], columns=SPEED), "left", place
    )
    rows.columns = rows.columns.str.replace(r"^against_dense_|(?<!_p)_value$|_median$", "", regex=True)
    rows["describe"] = rows["policy"].map(described).fillna(RULES["noise floor"])
    return rows.reindex(columns=CSV_COLUMNS).convert_dtypes()


SPEED = ["length", "policy", "batch", "ms_per_step", "speed"]


def _ends(*names: str) -> list[str]:
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


CSV_COLUMNS = ["length", "task", "haystack", "policy", "describe", "keys_per_step", "hits", "trials", "invalid_trials", "lower_bound_95"]
CSV_COLUMNS += ["share_found", *_ends("exact_match"), "lost", "gained", "p_value", "p_loss"]
CSV_COLUMNS += [*_ends("difference", "agreement", "kl", "total_variation", "perplexity_ratio"), "perplexity", "exact_prefix", *SPEED[2:]]

COLUMNS = (
    "policy (keys)",
    "keys read",
    "found",
    "found, 95%",
    "lost/gained",
    "points, 95%",
    "p",
    "agree",
    "agree, margin>1",
    "KL",
    "KL, 95%",
)
COLUMNS += ("perplexity", "ratio, 95%", "prefix", "ms/step")


def table_rows(figures: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[int, list[str]]]]:
    """Columns, and rows for the first task and haystack: (length, cells) of every length and policy."""
    first = figures["retrieval"][0]
    rows = [row for row in figures["retrieval"] if (row["task"], row["haystack"]) == (first["task"], first["haystack"])]
    cells = [(row["length"], _cells(figures, row)) for row in rows]
    read = [_find(figures["forced"], row).get("read_bytes") for row in rows]
    if not any(read):
        return COLUMNS, cells
    sizes = ["" if each is None else f"{each / 1e6:,.2f}" for each in read]
    return (*COLUMNS, "MB read"), [(length, [*row, size]) for (length, row), size in zip(cells, sizes, strict=True)]


def tables(figures: dict[str, Any]) -> list[Table]:
    """One table per length, with every policy and the noise floor, and one more of all tasks and haystacks if there are
    several."""
    first = figures["retrieval"][0]
    columns, rows = table_rows(figures)
    made = []
    for length in dict.fromkeys(length for length, _ in rows):
        here = [cells for at, cells in rows if at == length]
        title = f"{length:,} tokens: {first['task']} in {first['haystack']}, forced text, speed"
        made.append(terminal_table(columns, here, title=title))
        made[-1].rows[0].end_section = True  # a line after dense, the first row
    columns, rows = kinds_rows(figures)
    return [*made, terminal_table(columns, rows, title=KINDS)] if rows else made


KINDS = "found, lost/gained against dense, and the difference in points with its 95% interval"


def kinds_rows(figures: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns, and a row per length and policy with what was found in every task and haystack. No rows if there is only
    one of these."""
    kinds = list(dict.fromkeys((row["task"], row["haystack"]) for row in figures["retrieval"]))
    columns, rows = ("policy", "tokens", *(f"{task} in {haystack}" for task, haystack in kinds)), []
    if len(kinds) > 1:
        for length, name in dict.fromkeys((row["length"], row["policy"]) for row in figures["retrieval"]):
            mine = [row for row in figures["retrieval"] if (row["length"], row["policy"]) == (length, name)]
            found = [found_of(row) + ("" if name == "dense" or not row["trials"] else f", {_difference(row)}") for row in mine]
            rows.append([policy_and_keys(name), f"{length:,}", *found])
    return columns, rows


def remarks(figures: dict[str, Any]) -> list[str]:
    """Remarks below the tables: which policies hold, whether the control fails, what dense cannot do, bootstraps over
    too few blocks, policies of equal budget, agreement on confident steps, and the time taken."""
    lines = [*verdicts(figures), *controls(figures), *not_counted(figures), *ended_early(figures)]
    for length, blocks in {row["length"]: row["blocks"] for row in figures["forced"] if "blocks" in row}.items():
        if blocks < FEW_BLOCKS:
            within = "`kl_within` and `perplexity_ratio_within`, bootstraps over them, are too narrow"
            lines.append(f"{length:,} tokens: {blocks} blocks of forced steps are too few; {within}")
    for row in figures["equal_budget"]:
        kl, ratio = row["kl_difference"], row["perplexity_ratio"]
        pair = f"{policy_and_keys(row['second'])} against {policy_and_keys(row['first'])} at {row['length']:,} tokens"
        said = [f"KL {estimate(kl, '+.2g')}", f"perplexity x{estimate(ratio, '.4f')}"]
        for cell in row["retrieval"]:
            spread = f"{estimate(cell['difference'])}, p {cell['p_value']:.2g}"
            said.append(f"{cell['task']} in {cell['haystack']} -{cell['lost']}/+{cell['gained']}: {spread}")
        said.append(f"noise: KL {_find(figures['forced'], {'length': row['length'], 'policy': ALONE})['kl']['value']:.2g}")
        lines.append(f"{pair}: {'; '.join(said)}")
    for pool in figures["pooled"]:
        if pool["steps"]:
            lengths = ", ".join(f"{length:,}" for length in dict.fromkeys(member["length"] for member in pool["members"]))
            spread = f"windows from {pool['rates']['least']:.3f} to {pool['rates']['most']:.3f}"
            agree = f"{pool['hits']:,}/{pool['steps']:,} = {estimate(pool['agreement'], '.4f')} of confident steps agree"
            lines.append(f"{pool['policy']} at {lengths} tokens: {agree} ({len(pool['members'])} windows, {spread})")
    took = ", ".join(f"{seconds:.0f} s at {int(length):,} tokens" for length, seconds in figures["took"].items())
    return [*lines, f"wall-clock time, compilation included: {took}"]


def not_counted(figures: dict[str, Any]) -> list[str]:
    """The trials that do not count, because dense does not answer them."""
    return [_cannot(row) for row in figures["retrieval"] if row["policy"] == "dense" and row["invalid_trials"]]


def ended_early(figures: dict[str, Any]) -> list[str]:
    """The cells of a sequential run whose trials ended before the last."""
    lines = []
    for row in (row for row in figures["retrieval"] if row["policy"] == "dense"):
        _, trials = in_all(row)
        if trials < (planned := row.get("planned_trials", trials)):
            where = f"{row['task']} in {row['haystack']} at {row['length']:,} tokens"
            why = "every policy is decided" if row["trials"] else "dense cannot"
            lines.append(f"ended early: {where}, after {trials} of {planned} trials: {why}")
    return lines


def _cannot(row: dict[str, Any]) -> str:
    """Which trials do not count, from dense's row. Earlier files have cells by depth, and say of each whether it
    counts."""
    where = f"{row['task']} in {row['haystack']} at {row['length']:,} tokens"
    hits, trials = in_all(row)
    if not row["trials"]:
        return f"dense cannot, not counted: {where} ({hits} of {trials} found)"
    bad = [f"{span(cell['from'], cell['to'], '.1f')} ({cell['hits']} of {cell['trials']})" for cell in row["by_depth"] if not cell["valid"]]
    return f"dense cannot, not counted: {where}, depth {', '.join(bad)}"


def verdicts(figures: dict[str, Any]) -> list[str]:
    """For each length, task and haystack: which policies hold and which fail, in the order of keys read.

    A policy holds if the interval of its paired difference from dense includes 0 or lies above 0, and its mean KL is at
    most `KEPT_KL`.
    """
    lines = []
    kinds = dict.fromkeys((row["length"], row["task"], row["haystack"]) for row in figures["retrieval"])
    for length, task, haystack in kinds:
        rows = [row for row in figures["retrieval"] if (row["length"], row["task"], row["haystack"]) == (length, task, haystack)]
        holds, fails = [], []
        for row in sorted(rows, key=lambda row: row["keys_per_step"]):
            pairs, kl = row["against_dense"], _find(figures["forced"], row).get("kl")
            if row["policy"] in ("dense", ALONE) or row["trials"] < FEW_TRIALS or kl is None:
                continue
            short = [f"{pairs['lost']} of {pairs['both'] + pairs['lost']} lost"] if pairs["difference"]["high"] < 0 else []
            short += [f"KL {kl['value']:.2g}"] if kl["value"] > KEPT_KL else []
            (fails if short else holds).append(policy_and_keys(row["policy"]) + (f": {', '.join(short)}" if short else ""))
        if holds or fails:
            said = f"hold: {', '.join(holds) or 'none'}; fail: {'; '.join(fails) or 'none'}"
            lines.append(f"{task} in {haystack} at {length:,} tokens: {said}")
    return lines


def controls(figures: dict[str, Any]) -> list[str]:
    """Whether the control, the narrowest window, fails as it must: it loses at least `CONTROL_LOSS` of what dense
    finds, and has a KL above `KEPT_KL`. If no window was run, the remark says that nothing shows whether a policy that
    reads too little would fail.
    """
    names = dict.fromkeys(row["policy"] for row in figures["retrieval"])
    windows = {
        name: keys
        for name in names
        if name != ALONE and OVER not in name and isinstance(_policy(name), Window) and (keys := _nominal_keys(name))
    }
    if not windows:
        return ["no control: no window was run, so that nothing here shows that a policy which reads too little would fail"]
    name, fails, passes = min(windows, key=windows.get), [], []
    for row in (row for row in figures["retrieval"] if row["policy"] == name):
        where = f"{row['task']} in {row['haystack']} at {row['length']:,} tokens"
        if row["trials"] >= FEW_TRIALS:
            lost, found = row["against_dense"]["lost"], row["against_dense"]["both"] + row["against_dense"]["lost"]
            (fails if lost >= CONTROL_LOSS * found else passes).append(f"{where} ({lost} of {found} lost)")
        elif row["trials"]:
            passes.append(f"{where} ({row['trials']} trials are too few)")
    for row in (row for row in figures["forced"] if row["policy"] == name):
        (fails if row["kl"]["value"] > KEPT_KL else passes).append(f"KL at {row['length']:,} tokens ({row['kl']['value']:.2g})")
    said = [f"fails as it must in {', '.join(fails)}"] if fails else []
    said += [f"does not fail in {', '.join(passes)}, so that these do not tell policies apart"] if passes else []
    return [f"control {policy_and_keys(name)} {'; '.join(said)}"]


def _cells(figures: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A row of a table: retrieval, forced text and speed of one policy at one length."""
    name = row["policy"]
    forced, speed = _find(figures["forced"], row), _find(figures["speed"], row)
    matched = row["exact_match"]
    cells = [policy_and_keys(name), f"{row['keys_per_step']:,.0f}", found_of(row)]
    cells.append(span(matched["low"], matched["high"]) if matched else "")
    pairs = row["against_dense"]
    cells += ["", "", ""] if name == "dense" or not pairs else [_pairs(row), points(pairs["difference"]), f"{pairs['p_value']:.2g}"]
    if name == "dense":
        cells += ["", "", "", "", f"{forced['perplexity']:.3f}", "", ""]
    else:
        hits, steps = (sum(member[field] for member in forced["confident"]) for field in ("hits", "steps"))
        kl, ratio = forced["kl"], forced["perplexity_ratio"]
        cells += [f"{forced['agreement']['value']:.4f}", f"{hits / steps:.4f}" if steps else "", f"{kl['value']:.2g}"]
        cells += [span(kl["low"], kl["high"], ".2g"), f"{forced['perplexity']:.3f}", span(ratio["low"], ratio["high"], ".4f")]
        cells.append(f"{forced['exact_prefix']['median']:.0f}/{forced['exact_prefix']['of']}")
    return [*cells, span(*speed["ms_of_rounds"], ".2f") if speed else ""]


def _policy(name: str) -> DecodePolicy:
    """The policy of a name in a run, without its cache format."""
    return parse_recorded(name.partition(OVER)[0])


def policy_and_keys(name: str) -> str:
    """A policy's name with the keys that it keeps: "top:8 (1,664)"."""
    if name == ALONE:
        return f"{ALONE} (noise)"
    policy = _policy(name)
    keys = _nominal_keys(name)
    return f"{name} ({'all' if isinstance(policy, Dense) else 'varies' if keys is None else f'{keys:,}'})"


def _nominal_keys(name: str) -> int | None:
    """The number of keys that a policy reads of any long sequence; None if it is not fixed."""
    keys = getattr(_policy(name), "keys", None)
    return keys if isinstance(keys, int) else None


def found_of(row: dict[str, Any]) -> str:
    """Found of the trials that count; in brackets, of all trials, where none counts."""
    if row["trials"]:
        return f"{row['hits']}/{row['trials']}"
    hits, trials = in_all(row)
    return f"({hits}/{trials})"


def in_all(row: dict[str, Any]) -> tuple[int, int]:
    """Found, and trials, whether they count or not."""
    return tuple(sum(cell[field] for cell in row["by_depth"]) for field in ("hits", "trials"))


def points(difference: dict[str, float]) -> str:
    """A difference of shares in points, with its interval: "-1.5 [-3.2 to +0.1]"."""
    return estimate({name: 100 * value for name, value in difference.items()}, "+.1f")


def _difference(row: dict[str, Any]) -> str:
    return f"{_pairs(row)}, {points(row['against_dense']['difference'])}"


def _pairs(row: dict[str, Any]) -> str:
    pairs = row["against_dense"]
    return f"-{pairs['lost']}/+{pairs['gained']}" if pairs else "-"


def _find(rows: Sequence[dict], like: dict[str, Any]) -> dict[str, Any]:
    """The row of the same length and policy, or an empty one."""
    return next((row for row in rows if (row["length"], row["policy"]) == (like["length"], like["policy"])), {})
