"""docs/formats.md: the errors of products that it names, and its times."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.model.weight_formats import scheme_of
from pallas_kernels.core.matrices import MatrixFormat, pack
from pallas_kernels.matmul.project_tokens import project_tokens
from pallas_kernels.matmul.project_tokens.shape import Shape

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


def _packed_steps(name: str, launches: int = 1) -> dict:
    """Of steps in launches of so many, by (tokens, weights, pages, policy)."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    rows = [row for row in rows if row.get("steps_per_launch", 1) == launches]
    return {(row["tokens"], row["weights"], row["cache_format"], row["policy"]): row for row in rows}


def _on_device(row: dict) -> float:
    """Seconds of a step's kernels, without the pauses between them."""
    return row["profile"]["median_s"] - row["profile"]["idle_s"]


def _ms(row: dict) -> tuple[str, str]:
    """By the clock, and on the device."""
    return f"{row['median_s'] * 1e3:.2f}", f"{_on_device(row) * 1e3:.2f}"


SHORT, LONG = 2**17, 2**20


def test_sentences_on_packed_steps_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    alone, eight, older = _packed_steps("packed-steps"), _packed_steps("packed-steps", 8), _packed_steps("packed-steps-cascade")
    four_bits = _packed_steps("packed-steps-int4", 8)[SHORT, "int4", None, "top:32"]

    def spent(row, name):
        return sum(kernel["total_s"] for kernel in row["profile"]["kernels"] if kernel["name"].startswith(name)) * 1e3

    rounds = [seconds for pages in (None, "int8") for seconds in alone[SHORT, "int8", pages, "top:32"]["rounds_s"]]
    assert f"rounds of `top:32` at 128K tokens took {min(rounds) * 1e3:.2f} to {max(rounds) * 1e3:.2f} ms in one run" in text
    places = [(SHORT, "int8", pages, "top:32") for pages in (None, "int8")]
    said = "it takes {} ms in launches of eight, over `int8` pages {} ms** (target: 2.6)".format(*(_ms(eight[each])[0] for each in places))
    assert said in text
    assert {_ms(eight[place])[1] for place in places} == {"2.44"}
    assert "and on the device 2.44 ms in both cases" in text
    assert "`int4` weights it takes {} ms, {} on the device (target: 2.1)".format(*_ms(four_bits)) in text
    place = LONG, "int8", "int8", "top:32"
    said = "with `int8` weights and pages, it takes {} ms, {} on the device (target: 2.7)"
    assert said.format(*_ms(eight[place])) in text
    over = [eight[place]["median_s"] * 1e3 - 2.7, four_bits["median_s"] * 1e3 - 2.1]
    assert "the others miss by {:.2f} and {:.2f} ms".format(*over) in text
    idle = [row["profile"]["idle_s"] * 1e3 for (*_, policy), row in eight.items() if policy == "top:32"]
    others = [
        row for name in ("packed-steps-b4", "packed-steps-b8") for (*_, policy), row in _packed_steps(name, 8).items() if policy == "top:32"
    ]
    idle += [row["profile"]["idle_s"] * 1e3 for row in others if row["cache_format"]]
    assert f"leave the device idle for {min(idle):.2f} to {max(idle):.2f} ms of a step, as one such beginning does" in text
    assert {row["profile"]["ops"] for row in (*eight.values(), *others)} == {16}
    traced = next(
        row
        for row in json.loads((ROOT / "benchmarks/results/h200/designs-launch-pauses.json").read_text(encoding="utf-8"))["rows"]
        if row["on_device"] == "everything"
    )
    first, last = (pause["us"] / 1e3 for pause in traced["longest"])
    rest = (traced["gaps_us"] - traced["above_15_us"]) / 1e3
    said = f"has {traced['gaps_us'] / 1e3:.1f} ms of pauses: {first:.1f} ms before its first large kernel, {last:.1f} ms at its end, and "
    assert f"{said}{rest:.1f} ms between all others together, {rest / traced['steps']:.2f} ms a step" in text
    of_int8 = [spent(alone[SHORT, "int8", None, "top:32"], name) for name in ("project", "selected")]
    assert "Products take {:.2f} ms of a step with `int8`, the 28 launches of attention {:.2f}".format(*of_int8) in text
    attention = [
        spent(older[SHORT, "int8", "int8", policy], name) for policy, name in (("cascade:4/32", "refined"), ("top:32", "selected"))
    ]
    assert "it took {:.2f} ms of a step at 128K tokens, where `top:32` took {:.2f}".format(*attention) in text
    (row,) = (
        row
        for row in json.loads((RESULTS / "designs-packed-steps-launches.json").read_text())["rows"]
        if row["policy"] == "top:32" and row["steps_per_launch"] == 1
    )
    needed = f"{row['profile']['median_s'] * 1e3:.2f}"
    assert f"needed {needed} ms from the first kernel to the last (`designs-packed-steps-launches.json`)" in text
    ahead = _packed_steps("designs-packed-steps-ahead")[SHORT, "int8", None, "top:32"]
    assert f"was slower: {_ms(ahead)[0]} ms" in text


def test_other_documents_quote_packed_steps_as_the_results_have_them():
    alone, eight = _packed_steps("packed-steps"), _packed_steps("packed-steps", 8)
    other = " ".join((ROOT / "docs" / "cache-formats.md").read_text(encoding="utf-8").split())
    dense = [_ms(alone[LONG, "int8", pages, "dense"])[0] for pages in ("int8", None)]
    assert "`int8` weights at 1M tokens takes {} ms with it and {} ms without".format(*dense) in other
    page = " ".join((ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8").split())
    assert f"where {_ms(eight[SHORT, 'int8', None, 'top:32'])[0]} ms were measured, in launches of eight" in page


def test_how_many_times_faster_packed_steps_are_is_what_the_results_say():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    times = {}
    for name, tokens, length in (("", SHORT, "128K"), ("", LONG, "1M"), ("-b4", SHORT, "128K"), ("-b8", SHORT, "128K")):
        alone, eight = (_packed_steps(f"packed-steps{name}", launches) for launches in (1, 8))
        for pages, label in ((None, "16 bits"), ("int8", "`int8`")):
            places = [(tokens, "int8", pages, policy) for policy in ("dense", "top:32")]
            by_clock = [min(steps[place]["median_s"] for steps in (alone, eight) if place in steps) for place in places]
            pairs = by_clock, [_on_device(eight[place]) for place in places]
            shown = [f"{a * 1e3:.2f} | {b * 1e3:.2f} | {a / b:.2f}" for a, b in pairs]
            start = f"| {label} | {length} | {eight[places[0]]['batch']} | {' | '.join(shown)} | "
            assert any(line.startswith(start) for line in lines), start
            times[name, tokens, pages] = f"{by_clock[0] / by_clock[1]:.2f}"
    short = ("", LONG, "int8"), ("-b4", SHORT, "int8"), ("-b8", SHORT, "int8")
    assert "all are short by the clock: {}, {} and {}.**".format(*(times[place] for place in short)) in text
    dense = _packed_steps("packed-steps-plain", 8)[SHORT, None, None, "dense"]["median_s"]
    sparse = _packed_steps("packed-steps", 8)[SHORT, "int8", None, "top:32"]["median_s"]
    assert f"takes {dense * 1e3:.2f} ms at 128K tokens, {dense / sparse:.2f} times as long as `top:32` with `int8` weights" in text


def test_sentences_on_chunks_in_flight_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    rows = json.loads((RESULTS / "designs-packed-matrices-depth.json").read_text())["rows"]
    us = {(row["weights"], row["tokens"], row["matrix"], row["variant"]): row["median_s"] * 1e6 for row in rows}
    eight = "at most 8 chunks"
    down = [us[name, 1, "down", variant] for variant in (eight, "depth 3") for name in ("int8", "fp8")]
    said = "`down` took {:.2f} us with `int8` and {:.2f} us with `fp8`, and {:.2f} and {:.2f} us with three chunks"
    assert said.format(*down) in text
    layers = []
    for tokens, chosen in ((1, {"gate-up": 2, "down": 3, "qkv": 4, "o": 4}), (8, {"gate-up": 2, "down": 3, "qkv": 3, "o": 4})):
        assert {matrix: _depth(matrix, tokens) for matrix in chosen} == chosen
        layers.append(sum(us["int8", tokens, matrix, eight] for matrix in chosen))
        layers.append(sum(us["int8", tokens, matrix, f"depth {depth}"] for matrix, depth in chosen.items()))
    said = "all four products of a layer {:.2f} and {:.2f} us with `int8`, for 8 tokens {:.2f} and {:.2f} us"
    assert said.format(*layers) in text
    after, before = (_packed_steps(name, 8)[SHORT, None, None, "top:32"] for name in ("packed-steps-plain", "designs-packed-plain-before"))
    said = f"takes {_ms(after)[0]} ms where it took {_ms(before)[0]} (`packed-steps-plain.json`"
    assert said in text
    (old, _), (eight, one) = (
        [
            sum(kernel["total_s"] for kernel in row["profile"]["kernels"] if kernel["name"].startswith("project")) * 1e3
            for row in (_packed_steps(name, 8)[SHORT, "int8", "int8", "top:32"] for name in names)
        ]
        for names in (("designs-packed-steps-b8-before",) * 2, ("packed-steps-b8", "packed-steps"))
    )
    assert f"Products of 8 tokens take {eight:.2f} ms of a step, where they took {old:.2f}, and those of one {one:.2f}" in text


def _depth(matrix: str, tokens: int) -> int:
    """Chunks in flight of a matrix of Qwen2.5-7B with `int8` codes."""
    width, features, options = {
        "gate-up": (3584, (18944, 18944), {"gated": "silu", "norm_eps": 1e-6}),
        "down": (18944, (3584,), {}),
        "qkv": (3584, (3584, 512, 512), {"half": 64, "rotated": 2, "norm_eps": 1e-6}),
        "o": (3584, (3584,), {}),
    }[matrix]
    plain = {"half": 0, "rotated": 0, "gated": None, "norm_eps": None, "norm_offset": 0.0, "biased": False, "residual": False}
    types = {"dtype": "bfloat16", "out_dtype": "bfloat16", "format": MatrixFormat("int8"), "scales": "float32"}
    return Shape(tokens, width, features, **plain | options | types).fitted().depth


def test_sentences_on_prompts_are_what_the_results_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    prompts, first = (
        {row["weights"]: row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]}
        for name in ("packed-prompts", "designs-packed-prompts-first")
    )
    longer, before = (
        {name: f"{rows[name]['median_s'] / rows[None]['median_s'] - 1:.1%}" for name in ("int8", "fp8")} for rows in (prompts, first)
    )
    said = f"**With `int8` it takes {longer['int8']} longer than with 16 bits, with `fp8` {longer['fp8']}** (target: at most 5%)."
    assert said in text
    assert f"An earlier run had {before['int8']} and {before['fp8']}: " in text
    kernels = {name: row["profile"]["kernels_s"] for name, row in prompts.items()}
    assert f"in {kernels['int8']['wrapped_convert'] * 1e3:.1f} ms of {sum(kernels['int8'].values()) * 1e3:.0f} in which kernels run" in text
    twice = [kernels[name]["loop_multiply_fusion"] * 1e3 for name in ("int8", None)]
    assert "{:.1f} ms where 16 bits take {:.1f}".format(*twice) in text
    exact, rounded, short = (row["median_s"] for row in json.loads((RESULTS / "designs-packed-prompts.json").read_text())["rows"])
    said = f"took {rounded:.3f} s where the exact form took {exact:.3f} s, and sums that are rounded before they are scaled {short:.3f} s"
    assert said in text


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
    assert f"it took {parts[own, 'down', 'no finish']} of {us[own, 'down', 'int8', 1]} us" in text
    rows = {row["case"]: row for row in json.loads((RESULTS / "packed-matrices.json").read_text())["rows"]}
    gates = [f"{rows[f'project/qwen2.5-7b/0k/b1/gate-up{kind}']['median_s'] * 1e6:.2f}" for kind in (":int8", "")]
    assert "take {} us with `int8` and {} us with twice the bytes".format(*gates) in text
    shares = {name: f"{row['fraction_of_read']:.0%}" for name, row in rows.items()}
    down = (shares[f"project/qwen2.5-7b/0k/b1/down:{name}"] for name in ("int8", "fp8", "int4", "int8:128x128", "fp8:128x128"))
    assert "reaches {} with `int8`, {} with `fp8` and {} with `int4`, and less with scales for blocks, {} and {}.".format(*down) in text
