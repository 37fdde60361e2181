"""The tables of docs/sessions.md, and the figures in its sentences, are what the committed JSON says."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def test_sentences_on_sessions_are_what_the_results_say():
    """The gates in the file are what its buckets give."""
    text = (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8")
    files = [RESULTS.parent / "cpu" / f"{name}.json" for name in ("sessions", "session-tokens", "session-idle")]
    (row,), (tokens,), (before, beside, after) = (json.loads(file.read_text())["rows"] for file in files)
    assert [(each["open"], each["held"]["sessions"]) for each in (before, beside, after)] == [(0, 0), (1000, 1000), (0, 0)]
    assert beside["held"]["pages"] == 1000
    found, first, last = (each["through_grpc"]["gap_p50_s"] for each in (beside, before, after))
    assert found < min(first, last)
    assert f"differ by at most {max(first, last) / found - 1:.0%} in the median gap, and the row beside" in " ".join(text.split())
    rounds = [[each["gap_p50_s"] * 1e3 for row in rows for each in row["rounds_through_grpc"]] for rows in ((before, after), (beside,))]
    ranges = [f"{min(each):.1f} to {max(each):.1f} ms" for each in rounds]
    assert "rounds went from {} without idle sessions and from {} beside them".format(*ranges) in " ".join(text.split())
    assert tokens["sessions"] == 64
    assert tokens["overhead_s"] < 3e-4
    peaks, turns = ([bucket[name] for bucket in row["buckets"]] for name in ("kv_peak_bytes", "turn_s"))
    assert f"Peaks of pages differed by {max(abs(peak / peaks[0] - 1) for peak in peaks):.1%}" in text.replace("\n", " ")
    said = "of a turn changed by {:+.1%}, and its 95th percentile by {:+.1%}, both within our 5%"
    assert said.format(*(turns[-1][name] / turns[0][name] - 1 for name in ("p50", "p95"))) in text.replace("\n", " ")
    assert f"the median was {turns[1]['p50'] / turns[0]['p50'] - 1:.0%} above the first" in text.replace("\n", " ")
    work = row["gates"]["G2"]["beside"]
    said = "The tokens of a turn changed by {:.1%} or less, and the server's CPU time of a token by {:+.1%}"
    changed = max(abs(work["generated_per_turn"]), abs(work["prefilled_per_turn"])), work["server_cpu_per_token"]
    assert said.format(*changed) in text.replace("\n", " ")
    assert row["minutes"] == 30
    assert not row["errors"]
    assert all(gate["holds"] for gate in row["gates"].values())
    assert all(gate.get("ours", True) for gate in row["gates"].values())
    assert row["gates"]["G1"]["unaccounted_bytes"] == row["gates"]["G1"]["pages_left"] == 0


def test_what_sessions_cost_on_a_gpu_is_what_the_results_say():
    text = " ".join((ROOT / "docs" / "sessions.md").read_text(encoding="utf-8").split())
    names = ("session-tokens-16k", "session-tokens", "designs-session-tokens")
    rows = [json.loads((RESULTS / f"{name}.json").read_text())["rows"][0] for name in names]
    shares = [row["tokens_per_s"] / row["engine_tokens_per_s"] for row in rows]
    beyond = [row["overhead_s"] * 1e6 for row in rows]
    assert min(shares[:2]) >= 0.95
    assert f"get {shares[0]:.2f} of what the engine alone makes, and 64 of 256 tokens {shares[1]:.2f} (target: 0.95)" in text
    assert f"a token takes {beyond[0]:.0f} and {beyond[1]:.0f} us of CPU time" in text
    assert f"tokens was {shares[2]:.2f}, and a token took {beyond[2]:.0f} us" in text
    names = ("h200/session-turn", "h100/designs-session-turn", "h200/designs-session-turn-three", "h200/designs-session-turn-beside")
    files = [RESULTS.parent / f"{name}.json" for name in names]
    now, slower, older, other = ({row["kind"]: row for row in json.loads(file.read_text())["rows"]} for file in files)
    chunks = [turn["chunks"] for turn in now["resident"]["turns"]]
    assert (len(chunks), chunks.count(2)) == (9, 8)
    found, beside = ([1e3 * row[kind]["first_s"] for row in (now, slower, older, other)] for kind in ("resident", "demoted"))
    assert f"two chunks, is {found[0]:.1f} ms with pages on the device, and {beside[0]:.1f} ms from host memory" in text
    assert f"the medians are {found[1]:.1f} and {beside[1]:.0f} ms" in text
    assert f"{found[2]:.1f} ms with pages on the device (three turns, `designs-session-turn-three.json`), and {found[3]:.1f} ms in" in text
    assert f"from host memory {beside[2]:.0f} and {beside[3]:.0f} ms" in text
    bus = [RESULTS.parent / "h100/designs-tiers-prompts-long-copies.json", RESULTS / "tiers-prompts.json"]
    rates = [json.loads(file.read_text())["rows"][0]["rate"] / 1e9 for file in bus]
    assert "at {:.0f} GB/s (`h100/designs-tiers-prompts-long-copies.json`), that of the H200s at {:.0f}".format(*rates) in text
    (before, *_) = json.loads((RESULTS / "designs-session-turn.json").read_text())["rows"]
    assert f"the turn took {before['first_s'] * 1e3:.1f} ms with chunks of 256" in text
