"""The tables of docs/cache-formats.md, computed again, and what it and docs/formats.md say of the model beside the runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import report
from benchmarks.evidence import load
from kvjax.cache.formats import parse_cache_format
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import PageFormat, unpack

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "cache-formats.md"
make = functools.partial(PageFormat, read_as="float32")
ROWS = {
    "`fp8_e4m3`, no scale": make("fp8_e4m3"),
    "`fp8_e4m3` per token": make("fp8_e4m3", "token"),
    "`int8` per token": make("int8", "token"),
    "`int8` per channel": make("int8", "channel"),
    "`int8` per page": make("int8", "page"),
    "`q8_0`": make("q8_0"),
    "`int4` per token": make("int4", "token"),
    "`int4` per token, rotated": make("int4", "token", rotate=True),
    "`int4` per 32 numbers": make("int4", "token", 32),
    "`int4` per channel": make("int4", "channel"),
    "`q4_0`": make("q4_0"),
    "`d4`, 38 levels": make("d4", levels=38),
    "`d4`, 38 levels, rotated": make("d4", levels=38, rotate=True),
    "`d4`, 76 levels, rotated": make("d4", levels=76, rotate=True),
    "`d4`, 10 levels, rotated": make("d4", levels=10, rotate=True),
    "`e8`, 38 levels, rotated": make("e8", levels=38, rotate=True),
    "`e8`, 10 levels, rotated": make("e8", levels=10, rotate=True),
}


def row(name: str) -> str:
    """The row of a format: bytes of a token, times smaller than bfloat16, and errors on two kinds of tokens."""
    format = ROWS[name]
    bytes_of_token = format.bytes_per_page(128, 128) / 128
    plain = jax.random.normal(jax.random.key(0), (16, 128, 128)).astype(jnp.bfloat16)
    outliers = (plain.astype(jnp.float32) * jnp.where(jnp.arange(128) % 32 == 5, 10.0, 1.0)).astype(jnp.bfloat16)
    errors = []
    for x in (plain, outliers):
        found, exact = unpack(format, *pack_pages(x, format=format)), x.astype(jnp.float32)
        errors.append(float(((found - exact) ** 2).sum() / (exact**2).sum()))
    return f"| {name} | {bytes_of_token:.0f} | {256 / bytes_of_token:.2f} | {errors[0]:.1e} | {errors[1]:.1e} |"


@pytest.mark.quick_but("`d4`, 38 levels")
@pytest.mark.parametrize("name", ROWS)
def test_the_table_holds(name):
    assert row(name) in DOCUMENT.read_text().splitlines()


RESULTS = DOCUMENT.parents[1] / "benchmarks" / "results"
RUNS = {
    "cache-formats": [RESULTS / "cpu/fidelity-cache-formats.json", *RESULTS.glob("h200/pages-fidelity-*.json")],
    "formats": [*RESULTS.glob("h200/weights-fidelity*.json")],
}


LENGTHS = (8192, 16384, 32768)
FORMATS = (
    "q8_0",
    "int8",
    "fp8",
    "fp8:16",
    "k=int8,v=fp8",
    "k=int8,v=int4",
    "d4",
    "e8",
    "int4+rotate",
    "k=int4:channel,v=int4",
    "k=int4:channel,v=int8",
    "q4_0",
    "int4",
)


def said(document):
    return " ".join(DOCUMENT.with_name(f"{document}.md").read_text(encoding="utf-8").split())


@functools.cache
def measured(document="cache-formats"):
    """(needles in codes, forced text) on GPUs, by policy and length. Runs over one length agree about the policies that they share."""
    found = {}
    for run in load([file for file in RUNS[document] if file.parent.name == "h200"]):
        forced = {(row["policy"], row["length"]): row for row in run["forced"]}
        for row in run["retrieval"]:
            if row["haystack"] == "codes":
                place = row["policy"], row["length"]
                needles, text = found.setdefault(place, (row, forced[place]))
                assert (needles["against_dense"], text.get("kl")) == (row["against_dense"], forced[place].get("kl"))
    return found


def pairs(policy, length, document="cache-formats"):
    return "-{lost}/+{gained}".format(**measured(document)[policy, length][0]["against_dense"])


def lost(policy, document="cache-formats"):
    found = measured(document)
    return [found[policy, length][0]["against_dense"]["lost"] for length in LENGTHS if (policy, length) in found]


def kl(policy, length, which="value", document="cache-formats"):
    return measured(document)[policy, length][1]["kl"][which]


def within(policy, length):
    """Whether the interval of the perplexity, and whether the estimate lies between 0.99 and 1.01."""
    ratio = measured()[policy, length][1]["perplexity_ratio"]
    return ratio["low"] >= 0.99 and ratio["high"] <= 1.01, 0.99 <= ratio["value"] <= 1.01


@pytest.mark.parametrize("name", FORMATS)
def test_the_row_of_a_format_is_what_the_runs_say(name):
    format = parse_cache_format(name, "bfloat16")
    smaller = 2 * 256 * 128 / sum(each.bytes_per_page(128, 128) for each in (format.k, format.v))
    dense, found = f"dense @ {name}", measured()
    places = [*((dense, length) for length in LENGTHS), (f"top:32 @ {name}", 32768)]
    needles = [pairs(*place) if place in found else "" for place in places]
    forced = [found[place][1] if place in found else None for place in places[:-1]]
    apart = [f"{row['kl']['value']:.4f}" if row else "" for row in forced]
    ratios = ["{low:.4f} to {high:.4f}".format(**row["perplexity_ratio"]) if row else "" for row in forced]
    assert f"| `{name}` | {smaller:.2f} | {' | '.join((*needles, *apart, *ratios))} |" in DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_every_format_that_ran_has_a_row():
    assert {policy.partition(" @ ")[2] for policy, _ in measured() if "@" in policy} == set(FORMATS)


def test_what_packed_pages_lose_is_what_the_runs_say():
    text, found = said("cache-formats"), measured()
    assert [found["dense", length][0]["hits"] for length in LENGTHS] == [200, 198, 195]
    assert "finds 200 of them at 8K, 198 at 16K and 195 at 32K" in text
    for policy in ("dense", "top:32", "cascade:4/32"):
        for name in ("int8", "q8_0"):
            assert set(lost(f"{policy} @ {name}")) == {0}
        assert policy == "dense" or set(lost(policy)) == {0}
    assert {lost(f"{policy} @ {name}")[0] for policy in ("dense", "top:32") for name in ("k=int8,v=int4", "d4", "e8")} == {0}
    assert lost("dense @ fp8") == [1, 1, 1]
    assert lost("dense @ k=int8,v=fp8") == [0, 0, 0]
    fewer = [1 - kl("dense @ fp8:16", length) / kl("dense @ fp8", length) for length in LENGTHS]
    assert 0.24 < min(fewer) < max(fewer) < 0.28, "about a quarter"
    assert lost("dense @ k=int4:channel,v=int8") == [1, 5]
    assert 5 < kl("dense @ k=int4:channel,v=int8", 8192) / kl("dense @ k=int8,v=int4", 8192) < 7
    assert 5 < kl("dense @ k=int4:channel,v=int8", 32768) / kl("dense @ k=int8,v=int4", 32768) < 7
    for length in (8192, 32768):
        assert kl("dense @ k=int8,v=int4", length, "high") < kl("dense @ k=int4:channel,v=int8", length, "low")
    four = [f"dense @ {name}" for name in FORMATS[8:]]
    assert {lost(policy)[0] for policy in four} == {0, 1}
    assert {lost(policy)[-1] for policy in four} == {3, 5, 8}
    rows = [found[policy, 32768][0]["against_dense"] for policy in four]
    assert max(row["gained"] for row in rows) == 2
    *others, least = sorted((row["p_value"] for row in rows), reverse=True)
    assert f"(p {least:.2f} for `int4` at 32K, {min(others):.2f} to {max(others):.2f} for the others)" in text
    assert 0.3 < 1 - kl("dense @ int4+rotate", 8192) / kl("dense @ int4", 8192) < 0.37
    assert 0.5 < 1 - kl("dense @ int4+rotate", 32768) / kl("dense @ int4", 32768) < 0.6
    top8 = {policy: lost(policy)[-1] for policy, length in found if policy.startswith("top:8") and length == 32768}
    packed = [count for policy, count in top8.items() if "@" in policy]
    assert f"`top:8` loses {top8['top:8']} of 195 over unpacked pages, and {min(packed)} to {max(packed)} over the formats" in text
    lists = [row["lists"] for (policy, _), (_, row) in found.items() if policy.startswith("cascade:4/32 @")]
    assert {(row["lists"], row["chosen"]) for row in lists} == {(1920, 1920)}


def test_the_perplexities_that_lie_within_one_percent_are_those_that_are_named():
    text, found = said("cache-formats"), measured()
    inside = {
        policy for policy, length in found if policy != "dense" and all(within(policy, at)[0] for at in LENGTHS if (policy, at) in found)
    }
    assert {name.partition(" @ ")[2] for name in inside if name.startswith("dense @")} == {
        "int8",
        "q8_0",
        "k=int8,v=int4",
        "k=int8,v=fp8",
        "fp8:16",
        "d4",
        "e8",
    }
    assert [within("dense @ fp8", length) for length in LENGTHS] == [(False, True), (True, True), (True, True)]
    assert f"at 8K it begins at {found['dense @ fp8', 8192][1]['perplexity_ratio']['low']:.4f}" in text
    for name in FORMATS[8:]:
        estimates = [within(f"dense @ {name}", length) for length in LENGTHS if (f"dense @ {name}", length) in found]
        assert not any(whole for whole, _ in estimates)
        assert [each for _, each in estimates] == [True] * (len(estimates) - 1) + [name in ("int4", "int4+rotate")]
    sparse = {policy.partition(" @ ")[2] for policy, at in found if policy.startswith("top:32") and at == 8192 and within(policy, at)[0]}
    assert sparse == {"", "int8", "q8_0", "fp8", "fp8:16", "k=int8,v=fp8", "int4+rotate", "e8"}
    assert not any(within(policy, at)[0] for policy, at in found if policy.startswith("top:32") and at > 8192)


def test_the_targets_are_met_or_missed_as_the_page_says():
    text, found = said("cache-formats"), measured()
    limits = [2 * kl("dense again", length, "high") + 0.005 for length in LENGTHS]
    assert "That is {:.4f} at 8K, and {:.4f} at 16K and 32K.".format(*limits[:2]) in text
    assert f"{limits[2]:.4f}" == f"{limits[1]:.4f}"
    ends = {name: [kl(f"top:32{name}", length, "high") for length in LENGTHS] for name in ("", " @ int8", " @ fp8")}
    assert [end <= limit for end, limit in zip(ends[" @ int8"], limits, strict=True)] == [True, False, True]
    assert not any(end <= limit for end, limit in zip(ends[" @ fp8"], limits, strict=True))
    assert f"its KL ends at {ends[' @ int8'][1]:.4f}. That of `top:32` without packing ends at {ends[''][1]:.4f}." in text
    assert "it ends at {:.4f}, {:.4f} and {:.4f}.".format(*ends[" @ fp8"]) in text
    assert lost("top:32 @ fp8") == [1, 1, 0]
    groups, values = ([kl(f"top:32 @ {name}", length, "high") for length in LENGTHS] for name in ("fp8:16", "k=int8,v=fp8"))
    assert "`fp8:16` ends at {:.4f}, {:.4f} and {:.4f}, which meets the KL at 8K and 32K".format(*groups) in text
    assert [end <= limit for end, limit in zip(groups, limits, strict=True)] == [True, False, True]
    assert groups[1] < ends[""][1]
    assert (lost("top:32 @ fp8:16"), lost("top:32 @ k=int8,v=fp8")) == ([1, 0, 0], [0, 0, 0])
    assert (
        "**`k=int8,v=fp8`** loses none, and ends at {:.4f}, {:.4f} and {:.4f}, so it meets the KL where `int8` does.".format(*values)
        in text
    )
    assert [end <= limit for end, limit in zip(values, limits, strict=True)] == [True, False, True]
    assert all(whole <= mixed for whole, mixed in zip(ends[" @ int8"], values, strict=True)), "no larger KL"
    tried = {}
    for name in ("channel", "none", "boundary"):
        (run,) = load([RESULTS / "h200" / f"designs-fp8-{name}.json"])
        (row,) = (row for row in run["retrieval"] if row["policy"].startswith("top:32 @"))
        assert (row["length"], row["against_dense"]["lost"]) == (16384, 1)
        tried[name] = next(each["kl"]["high"] for each in run["forced"] if each["policy"] == row["policy"])
    said_of = "a scale per channel for keys ends at {channel:.4f}, no scale at {none:.4f}, and two layers that are not packed "
    assert (said_of + "(`fp8,boundary=1`) at {boundary:.4f}; each loses one needle").format(**tried) in text
    hits = {policy: [found[policy, at][0]["hits"] for at in LENGTHS if (policy, at) in found] for policy, _ in found}
    assert [hits[f"{policy} @ k=int4:channel,v=int4"] for policy in ("dense", "top:32")] == [[199, 197, 192], [199, 197, 194]]
    assert [hits[f"{policy} @ int4+rotate"] for policy in ("dense", "top:32")] == [[200, 193], [200, 192]]
    assert (hits["dense"], hits["top:32"]) == ([200, 198, 195], [200, 199, 197])
    spreads = [
        found[f"{policy} @ {name}", 32768][0]["against_dense"]["difference"] for policy in ("dense", "top:32") for name in FORMATS[8:]
    ]
    widths = [100 * (spread["high"] - spread["low"]) for spread in spreads]
    assert (round(min(widths)), round(max(widths))) == (5, 7)


def test_near_miss_needles_are_invalid_at_each_length():
    for document in RUNS:
        dense = {}
        for run in load([file for file in RUNS[document] if file.parent.name == "h200"]):
            for row in run["retrieval"]:
                if (row["haystack"], row["policy"]) == ("near-miss", "dense"):
                    assert row["invalid_trials"] == 200
                    dense[row["length"]] = sum(cell["hits"] for cell in row["by_depth"])
        *first, last = (dense[length] for length in sorted(dense))
        assert f"dense finds {', '.join(map(str, first))} and {last} of 200" in said(document)


def test_what_packed_weights_lose_is_what_the_runs_say():
    text, found = said("formats"), measured("formats")
    assert [found["dense", length][0]["hits"] for length in (8192, 32768)] == [200, 195]
    names = [f"dense @ weights {name}" for name in ("int8", "fp8", "int4")]
    assert [lost(name, "formats") for name in names] == [[0, 0], [1, 1], [2, 9]]
    assert lost("top:32 @ weights int8", "formats") == [0, 0]
    last = found[names[2], 32768][0]["against_dense"]
    assert f"it loses nine of 195 and gains three (p {last['p_value']:.2f})" in text
    assert last["gained"] == 3
    small, apart = ([kl(name, length, document="formats") for length in (8192, 32768)] for name in names[:2])
    assert "Its KL is {:.4f} nats at 8K and {:.4f} at 32K".format(*small) in text
    assert "KL {:.3f} and {:.3f}".format(*apart) in text
    assert all(7.5 < b / a < 8.5 for a, b in zip(small, apart, strict=True))
    ratios = {name: [found[name, length][1]["perplexity_ratio"] for length in (8192, 32768)] for name in names}
    assert all(ratio["low"] > 0.992 and ratio["high"] < 1.008 for ratio in ratios[names[0]])
    larger = [f"{100 * (ratio['value'] - 1):.1f}%" for ratio in ratios[names[1]]]
    ends = [f"{100 * (ratio['high'] - 1):.1f}%" for ratio in ratios[names[1]]]
    assert "Perplexity is {} and {} larger; the intervals go to {} and {}.".format(*larger, *ends) in text
    assert "Perplexity is {:.0f}% and {:.0f}% larger.".format(*(100 * (ratio["value"] - 1) for ratio in ratios[names[2]])) in text
    top8, cascade = (
        [lost(f"{policy}{name}", "formats")[-1] for name in ("", *(name.removeprefix("dense") for name in names))]
        for policy in ("top:8", "cascade:4/32")
    )
    assert (top8, cascade) == ([15, 15, 16, 20], [0, 0, 1, 8])


def of_unpacked(name):
    """By case, the time over that of unpacked pages in the same run, and all times."""
    (run,) = report.load([RESULTS / "h200" / f"{name}.json"])
    parts = {row["case"].removeprefix(f"{row['op']}/qwen2.5-7b/"): row for row in run["rows"]}
    times = {case: row["unpacked"]["times"] for case, row in parts.items() if "unpacked" in row}
    return times, {case: row["median_s"] for case, row in parts.items()}, run


def test_sentences_on_sparse_ops_over_packed_pages_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    dense, _, _ = of_unpacked("packed-attention-dense")
    targets = {"int8": 0.58, "fp8": 0.58, "int4": 0.40, "q4_0": 0.45}
    long_and_wide = [dense[f"{cell}/dense@{name}"] for name in targets for cell in ("1024k/b1", "128k/b8")]
    assert all(times <= target for times, target in zip(long_and_wide, [each for each in targets.values() for _ in "12"], strict=True))
    said = "`int8` takes {:.3f} and {:.3f} of the time of unpacked pages, `fp8` {:.3f} and {:.3f} (target: 0.58), `int4` {:.3f} and {:.3f} "
    assert (said + "(0.40), `q4_0` {:.3f} and {:.3f} (0.45): all are met").format(*long_and_wide) in text
    now, seconds, run = of_unpacked("packed-attention-sparse")
    formats, _, _ = of_unpacked("packed-attention-sparse-formats")
    before, older, _ = of_unpacked("designs-packed-sparse-before")
    (_, bulk, _), (_, rows, _) = of_unpacked("designs-packed-sparse-bulk"), of_unpacked("designs-packed-sparse-queries")
    eight, long, short = (f"{place}/top:32@" for place in ("128k/b8", "1024k/b1", "128k/b1"))
    us = {name: {case: f"{each * 1e6:.2f}" for case, each in of.items()} for name, of in (("now", seconds), ("bulk", bulk), ("rows", rows))}
    said = f"`int8` takes {now[eight + 'int8']:.3f} and meets the target, as `int4` did in an older run ({formats[eight + 'int4']:.3f})"
    assert said in text
    assert max(now[eight + "int8"], formats[eight + "int4"]) <= 0.85
    at_128k = [now[short + name] for name in ("int8", "int4", "fp8", "q8_0")]
    assert "`int8` takes {:.3f}, `int4` {:.3f}, `fp8` {:.3f} and `q8_0` {:.3f}. None of these four is slower".format(*at_128k) in text
    assert max(at_128k) < 1
    unpacked = long.removesuffix("@")
    assert f"`int8` takes {now[long + 'int8']:.3f}, which misses the target. `int4` took {us['bulk'][long + 'int4']} us in another" in text
    assert f"is {bulk[long + 'int4'] / seconds[unpacked]:.3f} of the {us['now'][unpacked]} us of unpacked pages here" in text
    sizes = [row["bytes"]["kv"] / 1e6 for row in run["rows"] if row["tokens"] == 2**20]
    sizes.append(next(row["bytes"]["kv"] for row in run["rows"] if row["case"].endswith(short + "int4")) / 1e6)
    index = next(row["bytes"]["index"] for row in run["rows"] if row["tokens"] == 2**20) / 1e6
    said = f"reads {index:.1f} MB of bounds in either case, and "
    assert said + "{:.1f} MB of unpacked pages, {:.1f} MB of `int8` or {:.1f} MB of `int4`.".format(*sizes) in text
    saved = [(sizes[0] - size) * 1e12 / run["copy"]["bytes_per_s"] for size in sizes[1:]]
    assert "takes {:.1f} us (`int8`) and {:.1f} us (`int4`) of {}.".format(*saved, us["now"][unpacked]) in text
    assert f"`int8` would need {(sizes[1] + index) * 1e12 / run['copy']['bytes_per_s']:.1f} us" in text
    said = f"took {us['rows'][long + 'int8']} us without, and {us['bulk'][long + 'int8']} with them"
    assert said in text
    assert f"slower: {us['bulk'][unpacked]} us where {us['rows'][unpacked]} were needed" in text
    cascade = next(row for row in report.load([RESULTS / "h200" / "cascade-ops.json"])[0]["rows"] if "128k/b1/cascade:4/32" in row["case"])
    said = f"took {cascade['median_s'] * 1e6:.2f} us before (`cascade-ops.json`, of another day) and "
    said += f"{us['rows']['128k/b1/cascade:4/32']} us with it"
    assert said in text
    batch = "128k/b8/top:32"
    assert f"at batch 8 it took {us['now'][batch]} us, and {older[batch] * 1e6:.2f} before" in text
    assert f"Beside {older[batch] * 1e6:.2f} us, `int8` is {seconds[eight + 'int8'] / older[batch]:.3f}." in text
    kernels = " ".join((DOCUMENT.parent / "decode-kernels.md").read_text(encoding="utf-8").split())
    assert f"it takes {us['rows']['128k/b1/cascade:4/32']} us at 128K tokens, beside {us['rows'][short[:-1]]} us" in kernels
    _, twelve, _ = of_unpacked("designs-packed-sparse-warps")
    names = short + "int8", long + "int8", eight + "int8", long + "int4"
    said = "`int8` took {:.3f} times as long at 128K and batch 1, {:.3f} times at 1M and {:.3f} times at batch 8, `int4` {:.3f} times at 1M"
    assert said.format(*(twelve[name] / older[name] for name in names)) in text
    assert f"`int8` took {before[short + 'int8']:.3f} at 128K and {before[long + 'int8']:.3f} at 1M, so it was slower" in text


def test_cycles_of_sparse_ops_over_packed_pages_are_what_the_results_say():
    text = DOCUMENT.read_text(encoding="utf-8")
    found: dict[tuple, dict] = {}
    for row in json.loads((RESULTS / "h200" / "designs-packed-sparse-clocks.json").read_text())["rows"]:
        found.setdefault((row["version"].split()[0], row["case"].split("/", 2)[2]), []).append(dict(row["clocks"]))
    short, long = "128k/b1/top:32@int8", "1024k/b1/top:32@int8"
    (bulk, last) = found["queries", long], found["queries", short]
    columns = found["before:", short][0], last[1], found["before:", long][0], bulk[0]
    for stage, mark in (("scores", "_score"), ("the list, with", "locate"), ("attention over it", "fold"), ("the end: ", "merge_sent")):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {stage}"))
        shown = [int(each.replace(",", "")) for each in line.strip("|").split("|")[1:]]
        assert all(abs(each - column[mark]) < 1 for each, column in zip(shown, columns, strict=True)), stage
    text = " ".join(text.split())
    (rotated_long,), (rotated_short,) = found["index", long], found["index", short]
    scores = [each["_score"] - each["_operand"] for each in (rotated_long, rotated_short, columns[0])]
    assert "scores took {:,.0f} cycles at 1M, and {:,.0f} at 128K where 16-byte copies took {:,.0f}".format(*scores) in text
    with_hint, without = (each["_score"] for each in found["queries", long][1:])
    assert f"after {with_hint:,.0f} cycles with it, {without:,.0f} without" in text
    waited = rotated_short["load_queries"] - rotated_short["fetched"]
    assert f"waited {waited:,.0f} cycles for its queries" in text
    of_bounds = bulk[0]["_score"] - bulk[0]["_operand"]
    (_, seconds, run) = of_unpacked("designs-packed-sparse-bulk")
    index = next(row["bytes"]["index"] for row in run["rows"] if row["tokens"] == 2**20)
    rate = index / (seconds[long] * of_bounds / bulk[0]["merge_sent"])
    assert f"in {of_bounds:,.0f} of all {bulk[0]['merge_sent']:,.0f} cycles, so at about {rate / 1e12:.1f} TB/s" in text


def test_sentences_on_lists_over_packed_pages_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    times, before, sides = ({}, {}, {})
    for found, name in ((times, "packed-chunks-lists"), (before, "packed-chunks"), (sides, "designs-packed-lists-sides")):
        found |= {case.partition("@")[2]: each for case, each in of_unpacked(name)[0].items() if "/lists:32@" in case}
    assert (
        f"all pages unpacked once, it takes {min(times.values()):.3f} to {max(times.values()):.3f} times as long** (target: at most 1.10)"
        in text
    )
    shown = {name: f"{each:.3f}" for name, each in times.items()}
    assert f"`int4` with {shown['int4']} and `q4_0` with {shown['q4_0']} meet the target" in text
    assert {name for name, each in times.items() if each <= 1.1} == {"int4", "q4_0"}
    assert (
        f"`int8` and `q8_0` with {shown['int8']} and the others with {shown['fp8']} miss it by at most {max(times.values()) - 1.1:.3f}."
        in text
    )
    assert (shown["int8"], shown["fp8"]) == (shown["q8_0"], shown["int8-channel"])
    assert f"Unpacked tile by tile it took {min(before.values()):.2f} to {max(before.values()):.2f} times as long" in text
    assert (
        "{:.3f} with `int8`, {:.3f} with `int4` and {:.3f} with `q8_0`".format(*(sides[name] for name in ("int8", "int4", "q8_0"))) in text
    )
    assert all(sides[name] > times[name] for name in sides)
