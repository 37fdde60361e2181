"""Every measured figure in docs/tiers.md is in the committed JSON."""

import json
import statistics
from pathlib import Path

from benchmarks import report
from kvjax.cache.pool import MANY

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def test_sentences_on_reuse_are_what_the_results_say():
    text = (ROOT / "docs" / "tiers.md").read_text(encoding="utf-8")
    (windows,) = json.loads((RESULTS.parent / "h100" / "designs-tiers-prompts.json").read_text())["rows"]
    said = f"{windows['seconds']:.1f} s, of which the first chunk's {windows['chunks_s'][0]:.1f} s compiled"
    assert said in " ".join(text.split())
    assert f"takes {windows['staged_bytes'] / windows['rate']:.1f} s for its copies" in text
    assert f"peak memory was {windows['peak_bytes'] / 1e9:.1f} GB" in text
    names = "tiers-prompts", "tiers-prompts-moves", "tiers-prompts-resident", "designs-tiers-prompts-2gb"
    (_, momo), (tiered,), (resident,), (two,) = map(rows_of, names)
    ratio = tiered["seconds"] / resident["seconds"]
    said = f"`bounds:32` takes {tiered['seconds']:.1f} s: {ratio:.2f} times its time with everything on the device"
    assert f"{said} (target: at most 1.3). The bus needs {tiered['staged_bytes'] / tiered['rate']:.1f} s" in " ".join(text.split())
    assert f"`momo:128/8` takes {momo['seconds']:.1f} s (target: at most 100)" in text
    peaks = [f"{row['peak_bytes'] / 1e9:.1f}" for row in (tiered, momo)]
    assert "weights they take {} and {} GB**".format(*peaks) in text
    rates = {way: f"{rate / 1e9:.1f}" for way, rate in tiered["copy_rates"].items()}
    assert f"those in ran at {rates['in']} GB/s (target: 48), those out at {rates['out']} (target: 40)" in " ".join(text.split())
    (short,) = rows_of("tiers-prompts-192k")
    assert f"both also ran at once, with {short['copy_rates']['both'] / 1e9:.1f} GB/s together (target: 75)" in " ".join(text.split())
    assert f"{two['seconds']:.1f} s (`designs-tiers-prompts-2gb.json`)" in text
    (words,) = report.load([RESULTS.parent / "h100" / "designs-reuse-words.json"])
    computed, found = (
        [row["median_s"] for row in words["rows"] if (row["store"], row["op"]) == ("host", op)] for op in ("computed", "found")
    )
    assert f"took {computed[0]:.1f} s to compute" in text
    assert f"and {found[0]:.2f} s to find them" in text


def rates_of(sizes: list[dict]) -> dict[str, float]:
    """GB/s of large copies, by way."""
    rates = {}
    for way, least in (("in", 2**27), ("out", 2**22)):
        some = [each for each in sizes if each["way"] == way and each["at_least"] >= least]
        rates[way] = sum(each["bytes"] for each in some) / sum(each["seconds"] for each in some) / 1e9
    return rates


def test_sentences_on_steps_over_packed_pages_are_what_the_results_say():
    text = " ".join((ROOT / "docs" / "tiers.md").read_text(encoding="utf-8").split())
    packed = {row["lists"]: row for row in rows_of("tiers-packed")}
    unpacked = {row["lists"]: row for row in rows_of("tiers-grid") if (row["tokens"], row["device_bytes"]) == (1_000_000, 8 * 10**9)}
    own, shared, recorded = (packed[name] for name in ("own", "nothing shared", "recorded"))
    assert f"a cache of 1M tokens takes {own['cache_bytes'] / 1e9:.1f} GB." in text
    assert 0.45 < shared["host_bytes"] / unpacked["nothing shared"]["host_bytes"] < 0.55
    steps = [row["median_s"] * 1e3 for row in (shared, own, recorded)]
    said = "take {:.2f} ms, those of `top:32` {:.2f} ms, and those of recorded lists, which bring next to nothing, {:.2f} ms"
    assert f"bring half of the bytes from host memory and {said.format(*steps)}" in text
    slow = next(row["median_s"] for row in rows_of("designs-tiers-packed-slow-host") if row["lists"] == "recorded")
    assert f"on one machine it took {slow * 1e3:.2f} ms (`designs-tiers-packed-slow-host.json`)" in text
    kernels = [sum(row["kernels_s"].values()) * 1e3 for row in (recorded, unpacked["recorded"])]
    said = "the kernels in that row take {:.2f} ms together, {:.2f} ms in the row of unpacked pages, whose steps took {:.2f} ms"
    assert said.format(*kernels, unpacked["recorded"]["median_s"] * 1e3) in text


def kernels_ms(row: dict) -> str:
    return f"{sum(row['kernels_s'].values()) * 1e3:.2f}"


def test_sentences_on_recorded_lists_are_what_the_results_say():
    text = " ".join((ROOT / "docs" / "tiers.md").read_text(encoding="utf-8").split())
    names = "tiers-quarter", "designs-tiers-quarter-device", "designs-tiers-quarter-one-launch", "tiers-1m-launches"
    (quarter, all_of_it), (equal, all_equal), (short, all_short), (million, all_million) = map(rows_of, names)
    ms = {name: f"{row['median_s'] * 1e3:.2f}" for name, row in (("quarter", quarter), ("all", all_of_it))}
    said = f"by recorded lists takes {ms['quarter']} ms in launches of eight steps, and {ms['all']} ms with everything on the device: "
    assert f"{said}{all_of_it['median_s'] / quarter['median_s']:.2f} of its speed (target: 0.9" in text
    assert all_of_it["median_s"] / quarter["median_s"] >= 0.9
    assert f"Kernels take {kernels_ms(quarter)} and {kernels_ms(all_of_it)} ms." in text
    rows = (quarter, all_of_it, short, all_short, equal, all_equal)
    assert [row["steps"] for row in rows] == [16, 32, 8, 32, 32, 32]
    begun = [(row["device_s"] - sum(row["kernels_s"].values())) * row["steps"] * 1e3 for row in (*rows, million, all_million)]
    assert 3 < min(begun) < max(begun) < 7, "4 to 7 ms to begin a round, less the pauses between kernels"
    for few, many in ((quarter, all_of_it), (equal, all_equal), (short, all_short)):
        clock = "-" if few is equal else f"{many['median_s'] / few['median_s']:.2f}"
        cells = [f"{row[name] * 1e3:.2f}" for name in ("median_s", "device_s") for row in (few, many)]
        cells = (*cells[:2], clock, *cells[2:], f"{many['device_s'] / few['device_s']:.2f}")
        assert f"| {' | '.join(cells)} | `" in text
    on_bus = million["host_bytes"] / million["rate"] * 1e3
    allowed = sum(all_million["kernels_s"].values()) * 1e3 + 1.15 * on_bus
    said = f"Kernels take {kernels_ms(million)} ms, and {kernels_ms(all_million)} with everything there; misses take {on_bus:.2f} ms on the"
    assert f"{said} bus; so {allowed:.2f} are allowed." in text
    own = million["kernels_s"]["fetch_kernel_mosaic_gpu_kernel"]
    assert f"the buffer's own kernel, {own * 1e3:.2f} ms a step, {own * 1e6 / 28:.1f} us for each layer" in text
    tried = rows_of("designs-tiers-lookups")
    shown = [f"| {row['median_s'] * 1e3:.2f} | {kernels_ms(row)} |" for row in tried]
    table = text[text.index("| design | step ms | its kernels ms |") :]
    assert [table.index(cells) for cells in shown] == sorted(table.index(cells) for cells in shown)
    assert [row["steps"] for row in tried] == [8] * 5 + [16]


def test_sentences_on_steps_pages_and_copies_are_what_the_results_say():
    text = " ".join((ROOT / "docs" / "tiers.md").read_text(encoding="utf-8").split())
    grid = [row for row in rows_of("tiers-grid") if (row["tokens"], row["device_bytes"]) == (1_000_000, 8 * 10**9)]
    steps = {row["lists"]: row["median_s"] for row in grid if row["policy"] != "dense"}
    alone = steps["nothing shared"]
    assert f"a step takes {alone * 1e3:.2f} ms in launches of one step: {1 / alone:.0f} tokens/s (target: 100)" in text
    (launched, _) = rows_of("tiers-1m-launches")
    said = f"take {steps['recorded'] * 1e3:.2f} ms, {1 / steps['recorded']:.0f} tokens/s; in launches of eight "
    assert f"{said}{launched['median_s'] * 1e3:.2f} ms, {1 / launched['median_s']:.0f} tokens/s." in text
    dense = {
        row["device_bytes"]: row["median_s"] * 1e3 for row in rows_of("tiers-grid") if (row["tokens"], row["policy"]) == (130_000, "dense")
    }
    said = f"take {dense[8 * 10**9]:.2f} ms of a dense step with 8 GB on the device and host memory, and {dense[None]:.2f} ms with"
    assert said in text
    hybrid = {row["tokens"]: 1 / row["median_s"] for row in rows_of("tiers-hybrid") if row["policy"] == "top:32"}
    assert f"at 1,000,000: it makes {hybrid[200_000]:.0f} and {hybrid[1_000_000]:.0f}." in text
    found = {row["store"]: row for row in rows_of("reuse") if row["op"] == "found"}
    assert f"{found['device']['median_s']:.2f} s to the first token (target: 0.15)" in text
    assert f"Pages in host memory take {found['host']['median_s']:.2f} s" in text
    disk = rows_of("reuse-disk")[-1]
    share = disk["bytes"] / disk["rate"] / disk["median_s"]
    assert f"on disk take {disk['median_s']:.2f} s: {share:.0%} of the rate of plain reads" in text
    rates, beside = (
        {way: f"{rate / 1e9:.1f}" for way, rate in rows_of(name)[0]["copy_rates"].items()}
        for name in ("designs-tiers-prompts-short", "designs-tiers-prompts-copies")
    )
    assert f"and {rates['out']} (`designs-tiers-prompts-short.json`) and {beside['out']} (`designs-tiers-prompts-copies.json`)" in text
    assert f"had {rates['both']} and {beside['both']} GB/s for both together" in text
    assert f"at once ran at {rows_of('designs-tiers-copies-raw')[0]['both_per_s'] / 1e9:.0f} GB/s together" in text
    soaks = [row for row in rows_of("designs-tiers-soak") if "changed" in row]
    same = [row["requests"] for row in soaks if not row["other_bits"]]
    assert f"{len(same)} of {len(soaks)} runs of 200 seconds, with {sum(same):,} requests" in text
    *fixed, histories, needles = rows_of("designs-tiers-soak-fixed")
    assert [row["other_bits"] for row in fixed] == [0, 0]
    assert "0 of {:,} (a Llama shape) and 0 of {:,} (a Qwen3.5 shape)".format(*(row["requests"] for row in fixed)) in text
    assert "Memory grew by {:.2%} and {:.2%}".format(*(row["memory_growth"] for row in fixed)) in text
    assert all(row["file_bytes"] == row["limit_bytes"] for row in fixed)
    assert histories["passed"] == histories["of"]
    assert needles["passed"] == needles["of"]
    assert f"all {histories['histories']} histories with pages in host memory" in text
    (ten,) = rows_of("tiers-hybrid-10m")
    assert f"{ten['cache_bytes'] / 1e9:.0f} GB of cache, it makes {1 / ten['median_s']:.0f} tokens/s" in text
    assert f"was missing before: {rows_of('designs-tiers-prompts-short')[0]['peak_bytes'] / 1e9:.1f} GB" in text
    needles = rows_of("designs-tiers-needles-128k")
    assert all(row["passed"] == row["of"] for row in needles)
    assert f"all {sum(row['needles'] for row in needles)} did, too" in text
    beside, quiet = (rates_of(rows_of(f"designs-tiers-copies-{name}")[0]["copy_sizes"]) for name in ("sizes", "quiet"))
    assert f"have {quiet['out']:.1f} GB/s for copies out of 8 MB, beside other programs {beside['out']:.1f} (`designs" in text
    kernels = rows_of("designs-tiers-copies-quiet")[0]["last_chunks_kernels_s"]
    assert f"{kernels['copy_kernel_mosaic_gpu_kernel'] * 1e3:.0f} ms of two chunks" in text
    (prompt,) = rows_of("tiers-prompts-moves")
    moved, staged = prompt["moved_bytes"] / 1e9, prompt["staged_bytes"] / 1e9
    assert f"of 1M tokens {moved:.0f} GB go out and {staged:.0f} GB come in" in text
    (less,) = rows_of("designs-tiers-prompts-24k")
    assert f"it was {less['peak_bytes'] / 1e9:.1f} GB, and {less['seconds']:.1f} s (" in text
    (now,) = json.loads((RESULTS.parent / "h100" / "designs-tiers-prompts-long-copies.json").read_text())["rows"]
    assert f"the peak was {now['peak_bytes'] / 1e9:.1f} GB on an H100, and the prompt took {now['seconds']:.1f} s**" in text
    assert "ran at {:.1f} GB/s there, copies out at {:.1f}.".format(*(now["copy_rates"][way] / 1e9 for way in ("in", "out"))) in text


def test_sentences_on_copies_out_are_what_the_results_say():
    text = " ".join((ROOT / "docs" / "tiers.md").read_text(encoding="utf-8").split())
    copies, now = map(rows_of, ("designs-tiers-copies-events", "designs-tiers-copies-moves"))
    first = copies[:112]
    together, every, all_now = (
        f"{sum(each['bytes'] for each in some) / sum(each['seconds'] for each in some) / 1e9:.1f}" for some in (first, copies, now)
    )
    assert f"the first {len(first)} of {len(copies)} copies ran at {together} GB/s" in text
    assert f"all {len(copies)} together at {every} (`designs-tiers-copies-events.json`)" in text
    assert f"all {len(now):,} of that prompt ran at {all_now} GB/s together (`designs-tiers-copies-moves.json`)" in text
    before = (f"{row['copy_rates']['out'] / 1e9:.1f}" for row in rows_of("tiers-prompts"))
    assert "copies out ran at {} GB/s with `bounds:32` and at {} with `momo:128/8`".format(*before) in text
    assert f"Of fewer than {MANY} pages" in text
    rates = [each["bytes"] / each["seconds"] / 1e9 for each in copies]
    slow, others = [rate for rate in rates if rate < 30], [rate for rate in rates if rate >= 30]
    said = f"{len(others)} of them had {statistics.median(others):.1f} in the median, and {len(slow)}, nearly all in five groups of "
    assert f"{said}neighbours, {statistics.median(slow):.1f}." in text
    assert max(each["bytes"] for each in copies) == 68 * 2**17, "pages of a layer's keys"
    plain = rows_of("designs-tiers-copies-plain")
    both = sorted((row for row in plain if row["name"] == "both at once"), key=lambda row: row["both_GBps"])[1]
    said = "ran at {out_GBps} GB/s beside copies in of 1 GiB at {in_GBps}, {both_GBps} GB/s together".format(**both)
    assert said in text
    again = [row["GBps"] for row in plain if "8 MB each, again" in row["name"] and row["beside"] in (None, "matmul")]
    assert "Alone, in pieces of 8 MB, it ran at {} GB/s, and beside products at {}.".format(*again) in text


def test_sentences_on_soaks_of_a_cpu_are_what_the_results_say():
    text = " ".join((ROOT / "docs" / "tiers.md").read_text(encoding="utf-8").split())
    before, *rows = json.loads((RESULTS.parent / "cpu" / "designs-soak.json").read_text())["rows"]
    assert not any(row["other_bits"] for row in (before, *rows))
    assert all(row["file_bytes"] == row["limit_bytes"] for row in rows)
    assert sum(row["minutes"] for row in rows) == 30
    said = "none of {:,}, {:,} and {:,} requests (Llama, Gemma 3, Qwen3.5 shapes) differed"
    assert said.format(*(row["requests"] for row in rows)) in text
    assert "Memory grew by {:.2%}, {:.2%} and {:.2%} (target: less than 2%)".format(*(row["memory_growth"] for row in rows)) in text
    assert f"Llama's memory had grown by {before['memory_growth']:.2%} in ten minutes of an earlier run" in text
