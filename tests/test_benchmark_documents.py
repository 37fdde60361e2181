"""Figures in sentences of README.md, of the guides and of docs/measured/ are those of the committed JSON."""

import json
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
ECHOES = ("designs-echo-smollm2-8k", "echo-gemma3")
KINDS = ("ops", "decode", "drafts", "prefill", "host", "throughput", "gaps", "cold", "programs")
RUNS = report.load(file for kind in KINDS for file in RESULTS.glob(f"{kind}*.json"))


def words(page):
    """The text of a page of docs/ on one line."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())


def test_what_the_readme_says_of_steps_is_what_was_measured():
    """And it says at once where a sparse step gains nothing."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = report.merged([run for run in RUNS if run["bench"] == "decode"])
    ms = {(r["tokens"], r["batch"], r["policy"]): r["median_s"] * 1e3 for r in rows if r["shape"] == "qwen2.5-7b" and "median_s" in r}
    for said, tokens, batch in (
        ("At 8K tokens and batch 1 a step of a 7B model takes {:.2f} ms dense and {:.2f} ms with `top:32`", 2**13, 1),
        ("At 128K and batch 8 it takes {:.2f} and {:.2f} ms", 2**17, 8),
        ("at 1M and batch 1 {:.2f} and {:.2f} ms", 2**20, 1),
    ):
        assert said.format(*(ms[tokens, batch, policy] for policy in ("dense", "top:32"))) in text
    assert ms[2**13, 1, "top:32"] >= ms[2**13, 1, "dense"]
    assert "](docs/measured/step-time.png)" in text
    assert (ROOT / "docs" / "measured" / "step-time.png").exists()


def test_kvjax_is_slower_than_transformers_in_no_row():
    runs = report.load(RESULTS.parent.glob("cpu/transformers-*.json"))
    text = words("measured/platforms")
    slower = []
    for run in runs:
        times = {(row["op"], row["implementation"]): row["median_s"] for row in run["rows"] if row["policy"] == "dense"}
        name = run["rows"][0]["model"], run["rows"][0]["dtype"]
        slower += [(*name, op) for op in ("prompt", "step") if times[op, "kvjax"] > times[op, "transformers"]]
    assert not slower
    assert "Of the dense rows, kvjax is slower in none." in text


PACKED = {"formats": {"packed-matrices": "packed-matrices", "packed-steps": "decode-step", "packed-prompts": "prefill-time"}}
PACKED |= {"cache-formats": {"packed-attention": "packed-attention", "packed-chunks": "packed-prefill"}}
"""By document, the results that it shows and the table that they make."""


@pytest.mark.parametrize("document", PACKED)
def test_every_case_of_packed_numbers_stands_in_its_page(document):
    text = (ROOT / "docs" / "measured" / f"{document}.md").read_text(encoding="utf-8")
    runs = report.load(file for name in PACKED[document] for file in RESULTS.parent.glob(f"*/{name}*.json"))
    cases = [row["case"] for run in runs for row in run["rows"] if "case" in row]
    assert cases
    assert not [case for case in cases if f"| {case} |" not in text]


def test_the_pictures_of_top_k_stand_in_the_page():
    runs = report.load(RESULTS.parent.glob("*/top-k*.json"))
    text = (ROOT / "docs" / "measured" / "top-k.md").read_text(encoding="utf-8")
    drawn = {"top-k": "top-k.png", "overlap": "top-k-overlap.png"}
    for name in {drawn[run["bench"]] for run in runs if run["bench"] != "top-k-passes"}:
        assert f"]({name})" in text
        assert (ROOT / "docs" / "measured" / name).exists()


def measured(name, device="h200"):
    """Rows of a committed run."""
    return json.loads((RESULTS.parent / device / f"{name}.json").read_text())["rows"]


def test_times_of_prefill_reach_what_was_asked_for():
    """Limits on the figures of the table of what was asked for."""
    sparse, dense = measured("prefill-long")
    assert (sparse["policy"], dense["policy"]) == ("momo:128/8", "dense")
    assert sparse["tokens"] == dense["tokens"] == 2**20
    assert sparse["median_s"] <= 90
    assert sparse["peak_bytes"] - sparse["held_bytes"] < 6e9
    for name in ("prefill-ops", "prefill-ops-llama"):
        times = {r["tokens"]: r["speedup"]["times"] for r in measured(name) if r["op"] == "sparse"}
        assert set(times) == {2**15, 2**17, 2**19, 2**20}
        assert all(times[tokens] >= least for tokens, least in ((2**15, 1), (2**17, 3), (2**19, 5.5), (2**20, 7.5)))


def test_what_the_guide_says_of_prefill_was_measured():
    text = words("prefill")
    ops = {(row["op"], row["policy"], row["tokens"]): row["median_s"] for row in measured("prefill-ops-bounds")}
    short, long = (ops["dense", "paged", tokens] / ops["sparse", "bounds:32", tokens] for tokens in (2**15, 2**17))
    assert f"is {short:.1f} times as fast at 32K and {long:.0f} times at 128K" in text
    hits = {(name, row["length"], row["policy"]): row["hits"] for name in ECHOES for row in measured(name)}
    fewer = [1 - hits[*place, "bounds:32+sparse"] / hits[*place, "dense"] for place in zip(ECHOES, (8192,) * 2, strict=True)]
    assert "at 8K tokens {:.0%} of the facts that dense predicts on SmolLM2, {:.0%} on Gemma 3 270M".format(*fewer) in text
    assert f"{1 - hits['echo-gemma3', 16384, 'bounds:32+sparse'] / hits['echo-gemma3', 16384, 'dense']:.2f}" == "0.33", "a third"


def test_what_is_said_of_lists_and_oracle_was_measured():
    """Lists in buckets lie within 1.5% of the oracle in every layer; those of the published quantile do not, in layer
    1."""
    tiles = {}
    for row in measured("prefill-measures", "cpu"):
        tiles.setdefault((row["policy"], row["tokens"] // 1024), []).append(1 - row["of_oracle"])
    assert all(max(tiles[f"momo:{k}/8", tokens]) <= 0.015 for k in (32, 64, 128) for tokens in (16, 32))
    for k, tokens in ((k, tokens) for k in (32, 128) for tokens in (16, 32)):
        assert [layer for layer, miss in enumerate(tiles[f"momo:{k}/8+quantile", tokens]) if miss > 0.015] == [1]
        assert sum(tiles[f"mean:{k}", tokens]) < sum(tiles[f"momo:{k}/8", tokens])
    assert "Our lists are within 1.5% of the oracle in every layer; lists by the published quantile are not, in layer 1." in words(
        "measured/prefill"
    )


def test_errors_of_windows_in_one_text_are_those_of_the_register():
    rows = {(row["policy"], row["tokens"]): row for row in measured("prefill-layers")}
    window = [rows["window:64+1024", tokens]["error"] / rows["bounds:32+sparse", tokens]["error"] for tokens in (2**14, 2**15)]
    assert f"yes, {min(window):.0f} to {max(window):.0f} times the error of `bounds:32+sparse`" in words("measured/index")
    assert all(rows["bounds:0.01", tokens]["speedup"]["times"] < 1 for tokens in (2**13, 2**14, 2**15)), "sampling does not pay"


def test_what_is_said_of_radix_selections_was_measured():
    rows = {row["case"]: row["median_s"] for row in measured("top-k") if "median_s" in row}
    ratios = [
        rows[f"normal/{n}k/b{batch}/k2048/none/radix"] / rows[f"normal/{n}k/b{batch}/k2048/stale-40/top_k"]
        for n in (512, 1024)
        for batch in (1, 8, 64)
    ]
    assert min(ratios) >= 1.9
    assert "from 512K on ours is at least 1.9 times as fast" in words("measured/top-k")


def test_cascades_take_longer_than_bounds_by_what_is_said():
    times = {(row["tokens"], row["policy"]): row["median_s"] for row in measured("cascade-ops")}
    more = [times[tokens, "cascade:4/32"] / times[tokens, "top:32"] - 1 for tokens in (2**17, 2**20)]
    assert f"`cascade:4/32` takes {min(more):.0%} to {max(more):.0%} longer than `top:32`" in words("decode-kernels")


def test_what_a_watch_costs_was_measured():
    rows = {row["policy"]: row for row in measured("designs-watched-programs") if row.get("steps_per_launch", 1) == 1}
    assert 0.05 < rows["top:8+missed1"]["median_s"] / rows["top:8"]["median_s"] - 1 < 0.12, "about a tenth"


def test_what_is_said_of_sessions_was_measured():
    text = words("measured/sessions")
    shares, beyond = zip(
        *(
            (row["tokens_per_s"] / row["engine_tokens_per_s"], row["overhead_s"])
            for name in ("", "-16k")
            for row in measured(f"session-tokens{name}")
        ),
        strict=True,
    )
    assert min(shares) >= 0.95
    assert max(beyond) <= 300e-6
    turns = {row["kind"]: row["first_s"] * 1e3 for row in measured("session-turn")}
    assert turns["resident"] <= 60
    assert f"400 ms from host memory, which is missed by {turns['demoted'] - 400:.0f} ms" in text
    before, beside, after = measured("session-idle", "cpu")
    assert beside["through_grpc"]["gap_p50_s"] < min(before["through_grpc"]["gap_p50_s"], after["through_grpc"]["gap_p50_s"])
    (load,) = measured("sessions", "cpu")
    assert load["minutes"] == 30
    assert all(gate["holds"] and gate.get("ours", True) for gate in load["gates"].values())


def test_targets_of_devices_are_met_as_the_table_says():
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")

    def ms(name, policy="top:32", **more):
        (row,) = (row for row in measured(name) if all(row[key] == value for key, value in {"policy": policy, **more}.items()))
        return row["median_s"] * 1e3

    def sums(name):
        (row,) = (row for row in measured(name) if (row["policy"], row["steps_per_launch"]) == ("top:32", 8))
        return next(kernel["median_s"] * 1e6 for kernel in row["profile"]["kernels"] if kernel["name"].startswith("anonymous"))

    assert "inside a step, on 2 / 4 GPUs | {:.1f} / {:.1f} us |".format(*map(sums, ("mesh-steps-2", "mesh-steps-4-launches"))) in text
    steps = [ms(name, steps_per_launch=8) for name in ("mesh-steps-2", "mesh-steps-4-launches")]
    assert "tensor 2 / 4, eight steps in a launch | {:.2f} / {:.2f} ms |".format(*steps) in text
    assert f"dense, tensor 4, eight steps in a launch | {ms('mesh-steps-4-1m', 'dense'):.2f} ms |" in text
    assert "dense / `top:32` | {:.2f} / {:.2f} ms |".format(*(row["median_s"] * 1e3 for row in measured("mesh-steps-70b"))) in text
    assert f"context 4, eight steps in a launch | {ms('mesh-steps-context', steps_per_launch=8):.2f} ms |" in text
    first = {row["policy"]: row["median_s"] for row in measured("mesh-prompts") if row["tokens"] == 2**17}
    assert f"dense / `bounds:32` | {first['dense']:.2f} / {first['bounds:32']:.2f} s |" in text
    whole = {row["policy"]: row["median_s"] for name in ("mesh-prompts-1m", "mesh-prompts-1m-dense") for row in measured(name)}
    assert "{:.1f} / {:.1f} / {:.1f} s |".format(*(whole[policy] for policy in ("dense", "momo:128/8", "bounds:32"))) in text
    assert f"times those of one | {measured('mesh-replicas')[1]['of_first']:.2f} |" in text


def test_what_is_said_of_tiers_was_measured():
    text = words("measured/tiers")
    quarter, everything = (row["median_s"] for row in measured("tiers-quarter"))
    assert f"reaches {everything / quarter:.2f} of its speed" in text
    (alone,) = (
        row["median_s"]
        for row in measured("tiers-grid")
        if (row["tokens"], row["device_bytes"], row["lists"]) == (1_000_000, 8 * 10**9, "nothing shared") and row["policy"] != "dense"
    )
    assert f"it makes {1 / alone:.0f} tokens/s (target: 100)" in text
    hybrid = {row["tokens"]: 1 / row["median_s"] for row in measured("tiers-hybrid") if row["policy"] == "top:32"}
    assert f"{hybrid[200_000]:.0f} tokens/s at 200,000 tokens (target: 150), {hybrid[1_000_000]:.0f} at 1,000,000" in text
    (tiered,), (resident,) = map(measured, ("tiers-prompts-moves", "tiers-prompts-resident"))
    assert f"`bounds:32` takes {tiered['seconds'] / resident['seconds']:.2f} times its time with everything on the device" in text
    assert max(row["peak_bytes"] for name in ("tiers-prompts", "tiers-prompts-moves") for row in measured(name)) < 8e9
    found = {row["store"]: row["median_s"] for row in measured("reuse") if row["op"] == "found"}
    assert found["device"] <= 0.15
    assert found["host"] <= 0.4
    disk = measured("reuse-disk")[-1]
    assert disk["bytes"] / disk["rate"] / disk["median_s"] >= 0.85
    *fixed, _, _ = measured("designs-tiers-soak-fixed")
    soaks = [*fixed, *measured("designs-soak", "cpu")]
    assert not any(row["other_bits"] for row in soaks)
    grown = [row["memory_growth"] for row in measured("designs-soak", "cpu")[1:]]
    assert f"memory grew by at most {max(grown):.2%}" in text
