"""docs/formats.md: the errors of products that it names, and its times."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.packing import scheme_of
from pallas_kernels.matrices import pack
from pallas_kernels.project_tokens import project_tokens

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "formats.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8:tokens"])
def test_the_error_of_a_product_holds(name):
    x, w = (jax.random.normal(jax.random.key(seed), (count, 1024)) for seed, count in ((0, 64), (1, 512)))
    (found,) = project_tokens(x, (pack(w, scheme_of(name).layers),))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert f"| `{name}` | {error:.1%} |" in DOCUMENT.read_text().splitlines()


def test_sentences_on_launches_of_packed_steps_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    rows = json.loads((RESULTS / "designs-packed-steps-launches.json").read_text())["rows"]
    steps = {row["steps_per_launch"]: row for row in rows if row["policy"] == "top:32"}
    ms = [steps[count]["median_s"] * 1e3 for count in (8, 1)]
    assert "`top:32` took {:.2f} ms in launches of eight and {:.2f} ms in launches of one".format(*ms) in text
    assert f"idle for {steps[8]['profile']['idle_s'] * 1e3:.2f} ms of such a step" in text
    assert f"needed {steps[1]['profile']['median_s'] * 1e3:.2f} ms on the device" in text


def _packed_steps(name: str) -> dict:
    """By (tokens, weights, pages, policy)."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {(row["tokens"], row["weights"], row["cache_format"], row["policy"]): row for row in rows}


def test_sentences_on_packed_steps_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    steps, short, long = _packed_steps("packed-steps"), 2**17, 2**20

    def times(*case):
        return [f"{steps[case][name] * 1e3:.2f}" if name != "profile" else f"{steps[case][name]['median_s'] * 1e3:.2f}" for name in NAMES]

    def spent(*case):
        return sum(kernel["total_s"] for kernel in steps[case[:4]]["profile"]["kernels"] if kernel["name"].startswith(case[4])) * 1e3

    wall, device = times(short, "int8", None, "top:32")
    assert f"the device needs {device} ms** (target: 2.6), and a step took {wall} ms" in text
    rounds = steps[short, "int8", None, "top:32"]["rounds_s"]
    assert f"the fastest of three rounds {min(rounds) * 1e3:.2f}" in text
    wall, device = times(short, "int4", None, "top:32")
    assert f"the device needs {device} ms (target: 2.1), and a step took {wall} ms" in text
    rounds = steps[short, "int8", "int8", "top:32"]["rounds_s"]
    assert f"three rounds of one step took {min(rounds) * 1e3:.2f} to {max(rounds) * 1e3:.2f} ms" in text
    wall, device = times(long, "int8", "int8", "top:32")
    assert f"a step of 1M tokens takes {wall} ms, {device} on the device (target: 2.7)" in text
    of_int8 = [spent(short, "int8", None, "top:32", name) for name in ("project", "selected")]
    assert "Products take {:.2f} ms of a step with `int8`, the 28 launches of attention {:.2f}".format(*of_int8) in text
    attention = [spent(long, "int8", pages, "top:32", "selected") for pages in ("int8", None)]
    assert "Attention takes {:.2f} ms of it, more than over 16-bit pages ({:.2f} ms)".format(*attention) in text
    attention = [spent(short, "int8", "int8", *of) for of in (("cascade:4", "refined"), ("top:32", "selected"))]
    assert "it takes {:.2f} ms of a step at 128K tokens, where `top:32` takes {:.2f}".format(*attention) in text
    dense = [times(long, "int8", pages, "dense")[0] for pages in ("int8", None)]
    other = " ".join((ROOT / "docs" / "cache-formats.md").read_text(encoding="utf-8").split())
    assert "`int8` weights at 1M tokens takes {} ms with it and {} ms without".format(*dense) in other
    bill = " ".join((ROOT / "docs" / "the-bill.md").read_text(encoding="utf-8").split())
    assert f"where {times(short, 'int8', None, 'top:32')[0]} ms were measured" in bill
    ahead = _packed_steps("designs-packed-steps-ahead")[short, "int8", None, "top:32"]
    assert f"was slower: {ahead['median_s'] * 1e3:.2f} ms" in text


NAMES = ("median_s", "profile")


def test_how_many_times_faster_packed_steps_are_is_what_the_results_say():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for name, tokens, length in (("", 2**17, "128K"), ("", 2**20, "1M"), ("-b4", 2**17, "128K"), ("-b8", 2**17, "128K")):
        steps = _packed_steps(f"packed-steps{name}")
        for pages, label in ((None, "16 bits"), ("int8", "`int8`")):
            if (pages, name, length) == ("int8", "", "128K"):
                continue
            dense, sparse = (steps[tokens, "int8", pages, policy] for policy in ("dense", "top:32"))
            pairs = [(step["median_s"], step["profile"]["median_s"]) for step in (dense, sparse)]
            shown = [f"{a * 1e3:.2f} | {b * 1e3:.2f} | {a / b:.1f}" for a, b in zip(*pairs, strict=True)]
            start = f"| {label} | {length} | {dense['batch']} | {' | '.join(shown)} | "
            assert any(line.startswith(start) for line in lines), start


def test_sentences_on_products_of_codes_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    found = json.loads((RESULTS / "designs-packed-matrices-digits.json").read_text())
    us = {
        (row["version"].split(":")[0], row["matrix"], row["weights"], row["tokens"]): f"{row['median_s'] * 1e6:.2f}"
        for row in found["rows"]
        if row["variant"] == "base"
    }
    parts = {
        (row["version"], row["matrix"], row["left_out"]): f"{row['median_s'] * 1e6:.2f}"
        for row in found["parts"]
        if row["weights"] == "int8"
    }
    shared, own = "digits in shared memory", "digits in registers, up to 16 tokens"
    before = [us["numbers", matrix, weights, 1] for matrix in ("gate-up", "down") for weights in ("int8", "int4")]
    said = "gate and up took {} us with `int8` and {} us with `int4`, `down` {} and {} us"
    assert said.format(*before) in text
    numbers = next(row["version"] for row in found["rows"] if row["version"].startswith("numbers"))
    assert f"gate and up take {parts[numbers, 'gate-up', 'no products']} us" in text
    assert f"took {parts[numbers, 'gate-up', 'no copies']} us, and now {parts[own, 'gate-up', 'no copies']} us" in text
    for version, said in ((shared, "(gate and up {} us, and {} us for 8 tokens)"), (own, "({} and {} us)")):
        assert said.format(us[version, "gate-up", "int8", 1], us[version, "gate-up", "int8", 8]) in text
    assert f"slower than numbers ({us[own, 'gate-up', 'int8', 16]} us)" in text
    assert f"it takes {parts[own, 'down', 'no finish']} of {us[own, 'down', 'int8', 1]} us" in text
    rows = {row["case"]: row for row in json.loads((RESULTS / "packed-matrices.json").read_text())["rows"]}
    gates = [f"{rows[f'project/qwen2.5-7b/0k/b1/gate-up{kind}']['median_s'] * 1e6:.2f}" for kind in (":int8", "")]
    assert "take {} us with `int8` and {} us with twice the bytes".format(*gates) in text
