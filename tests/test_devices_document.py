"""The tables of docs/devices.md, and the figures in its sentences, are what the committed JSON says."""

import json
from pathlib import Path

import jax

from kvjax.serving.bench.decode import config_of
from kvjax.serving.bench.hollow import random_model
from pallas_kernels.bench import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def test_the_table_of_exchanges_is_what_the_results_make():
    """After new measurements: the report's command with these files and docs/devices.md. Names of files with rows of meshes begin with
    mesh-, so that no other document takes them."""
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    for name in ("exchange", "decode-step", "prefill-time"):
        assert f"<!-- bench:{name} -->" in text
    files = [file for pattern in ("*/exchange*.json", "*/mesh-*.json") for file in RESULTS.parent.glob(pattern)]
    assert report.rendered(text, report.load(files)) == text
    two = {(row["policy"], row["steps_per_launch"]): row for row in json.loads((RESULTS / "mesh-steps-2.json").read_text())["rows"]}
    step = two["top:32", 8]
    seconds = {kernel["name"].split("_")[0]: kernel for kernel in step["profile"]["kernels"]}
    said = [f"{seconds[name]['total_s'] * 1e3:.2f}" for name in ("project", "selected", "anonymous", "append")]
    assert "products take {} ms, attention {}, sums {} and appending {}.".format(*said) in " ".join(text.split())
    chain = json.loads((RESULTS / "exchange-2.json").read_text())["rows"][0]["kernels"][0]
    said = f"takes {seconds['anonymous']['median_s'] * 1e6:.1f} us of device time for each sum of a decode step**"
    assert said in " ".join(text.split())
    assert f"and {chain['median_s'] * 1e6:.1f} us in a chain of sums" in " ".join(text.split())
    four, large, context, prompts = (
        json.loads((RESULTS / f"mesh-{name}.json").read_text())["rows"] for name in ("steps-4", "steps-70b", "steps-context", "prompts")
    )
    times = {(row["tokens"], row["policy"], row["tensor"]): row for row in four}
    short = times[2**17, "top:32", 4]
    (added,) = (kernel["median_s"] * 1e6 for kernel in short["profile"]["kernels"] if kernel["name"].startswith("anonymous"))
    told = f"| a sum of one row of 3,584 inside a step, on 2 / 4 GPUs | {seconds['anonymous']['median_s'] * 1e6:.1f} / {added:.1f} us |"
    assert told in text
    assert f"tensor 2 (eight steps in a launch) / 4 (one) | {step['median_s'] * 1e3:.2f} / {short['median_s'] * 1e3:.2f} ms |" in text
    said = f"takes {step['median_s'] * 1e3:.2f} ms in launches of eight, and a dense one {two['dense', 8]['median_s'] * 1e3:.2f} ms"
    assert said in " ".join(text.split())
    assert f"and {two['top:32', 1]['median_s'] * 1e3:.2f} ms on another one with two" in " ".join(text.split())
    idle, period = (step["profile"][name] * 1e3 for name in ("idle_s", "period_s"))
    assert f"The device is idle for {idle:.2f} ms of the {period:.2f} ms of a traced step" in " ".join(text.split())
    (alone,) = (
        row["profile"]
        for row in json.loads((RESULTS / "packed-steps-launches.json").read_text())["rows"]
        if (row["policy"], row["steps_per_launch"]) == ("top:32", 8)
    )
    assert f"({alone['idle_s'] * 1e3:.2f} ms of {alone['period_s'] * 1e3:.2f}, with `int8` weights)" in " ".join(text.split())
    own, by_xla = (
        json.loads((RESULTS / f"{name}.json").read_text())["rows"][0] for name in ("mesh-steps-context-2", "designs-mesh-context-xla")
    )
    said = f"takes {own['median_s'] * 1e3:.2f} ms, where it takes {by_xla['median_s'] * 1e3:.2f} ms with XLA's"
    assert said in " ".join(text.split())
    gathers = [
        kernel["median_s"] * 1e6
        for row, name in ((own, "anonymous"), (by_xla, "ncclDevKernel_AllGather"))
        for kernel in row["profile"]["kernels"]
        if kernel["name"].startswith(name)
    ]
    assert "takes the kernel {:.1f} us, where NCCL's kernel takes {:.1f} us".format(*gathers) in " ".join(text.split())
    assert f"dense, tensor 4 | {times[2**20, 'dense', 4]['median_s'] * 1e3:.2f} ms |" in text
    assert "dense / `top:32` | {:.2f} / {:.2f} ms |".format(*(row["median_s"] * 1e3 for row in large)) in text
    assert f"context 4 | {context[0]['median_s'] * 1e3:.2f} ms |" in text
    weights = jax.eval_shape(lambda: random_model(config_of("qwen2.5-7b", None, "bfloat16")).params)
    assert f"on each device with {len(jax.tree.leaves(weights))} arrays of weights" in " ".join(text.split())
    launches = json.loads((RESULTS.parent / "h100" / "designs-mesh-steps-launches.json").read_text())["rows"]
    steps = {(row["policy"], row["steps_per_launch"]): row for row in launches}
    said = "took {} ms in launches of one step and {} ms in launches of eight, and a dense one {} and {} ms"
    ms = [f"{steps[policy, count]['median_s'] * 1e3:.2f}" for policy in ("top:32", "dense") for count in (1, 8)]
    assert said.format(*ms) in " ".join(text.split())
    of_kernels = {kernel["name"].split("_")[0]: kernel["total_s"] * 1e3 for kernel in steps["top:32", 8]["profile"]["kernels"]}
    said = "products are {project:.2f}, attention {selected:.2f} and sums {anonymous:.2f}"
    assert said.format(**of_kernels) in " ".join(text.split())
    first = {row["policy"]: row["median_s"] for row in prompts if row["tokens"] == 2**17}
    assert f"dense / `bounds:32` | {first['dense']:.2f} / {first['bounds:32']:.2f} s |" in text


def test_where_the_time_of_steps_goes_is_what_the_results_say():
    text = " ".join((ROOT / "docs" / "devices.md").read_text(encoding="utf-8").split())
    rows = json.loads((RESULTS / "mesh-steps-4.json").read_text())["rows"]
    found = {}
    for row in rows:
        for kernel in row["profile"]["kernels"] if row["tokens"] == 2**17 else ():
            found[row["policy"], row["tensor"], kernel["name"].split("_")[0]] = kernel["total_s"] * 1e3
    spans, lists = ([found[policy, n, name] for n in (1, 2, 4)] for policy, name in (("dense", "span"), ("top:32", "selected")))
    assert "{:.2f}, {:.2f} and {:.2f} ms of a dense step".format(*spans) in text
    assert "`selected` {:.2f}, {:.2f} and {:.2f} ms of a step of `top:32`".format(*lists) in text
    sums = [found["top:32", n, "anonymous"] for n in (2, 4)]
    assert "Sums take {:.2f} and {:.2f} ms".format(*sums) in text
    least = found["top:32", 4, "project"], lists[2], sums[1]
    assert "products {:.2f}, attention {:.2f}, sums {:.2f}.".format(*least) in text
    assert f"shorter than {sum(least) + 0.05:.1f} ms" in text
