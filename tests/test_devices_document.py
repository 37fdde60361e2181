"""The tables of docs/devices.md, and the figures in its sentences, are what the committed JSON says."""

import json
from pathlib import Path

import jax

from benchmarks.hollow import random_model
from kvjax.serving.bench.decode import config_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def rows_of(name):
    """The rows of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_sentences_on_exchanges_are_what_the_results_say():
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    two = {(row["policy"], row["steps_per_launch"]): row for row in json.loads((RESULTS / "mesh-steps-2.json").read_text())["rows"]}
    step = two["top:32", 8]
    seconds = {kernel["name"].split("_")[0]: kernel for kernel in step["profile"]["kernels"]}
    said = [f"{seconds[name]['total_s'] * 1e3:.2f}" for name in ("project", "selected", "anonymous", "append")]
    assert "On two, products take {} ms, attention {}, sums {} and appending {}.".format(*said) in " ".join(text.split())
    chain = json.loads((RESULTS / "exchange-2.json").read_text())["rows"][0]["kernels"][0]
    said = f"takes {seconds['anonymous']['median_s'] * 1e6:.1f} us of device time for each sum of a decode step**"
    assert said in " ".join(text.split())
    assert f"and {chain['median_s'] * 1e6:.1f} us in a chain of sums" in " ".join(text.split())
    large, context, prompts = (rows_of(f"mesh-{name}") for name in ("steps-70b", "steps-context", "prompts"))
    launches = {(row["policy"], row["steps_per_launch"]): row for row in rows_of("mesh-steps-4-launches")}
    on_four = launches["top:32", 8]["profile"]["kernels"]
    (added,) = (kernel["median_s"] * 1e6 for kernel in on_four if kernel["name"].startswith("anonymous"))
    assert f"On four it takes {added:.1f} us inside a step" in " ".join(text.split())
    told = f"| a sum of one row of 3,584 inside a step, on 2 / 4 GPUs | {seconds['anonymous']['median_s'] * 1e6:.1f} / {added:.1f} us |"
    assert told in text
    ms = [f"{row['median_s'] * 1e3:.2f}" for row in (step, launches["top:32", 8])]
    assert "tensor 2 / 4, eight steps in a launch | {} / {} ms |".format(*ms) in text
    said = "at 128K takes {:.2f} ms on four H200s and {:.2f} ms on two, and a dense one {:.2f} and {:.2f} ms"
    ms = [rows[policy, 8]["median_s"] * 1e3 for policy in ("top:32", "dense") for rows in (launches, two)]
    assert said.format(*ms) in " ".join(text.split())
    alone = [rows["top:32", 1]["median_s"] * 1e3 for rows in (launches, two)]
    assert "at 128K tokens takes {:.2f} ms on four GPUs and {:.2f} ms on two".format(*alone) in " ".join(text.split())
    idle, period = (step["profile"][name] * 1e3 for name in ("idle_s", "period_s"))
    assert f"There the device is idle for {idle:.2f} ms of the {period:.2f} ms of a traced step" in " ".join(text.split())
    (alone,) = (
        row["profile"]
        for row in json.loads((RESULTS / "designs-packed-steps-launches.json").read_text())["rows"]
        if (row["policy"], row["steps_per_launch"]) == ("top:32", 8)
    )
    assert f"({alone['idle_s'] * 1e3:.2f} ms of {alone['period_s'] * 1e3:.2f}, with `int8` weights, in an older version)" in " ".join(
        text.split()
    )
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
    (million,) = (row for row in rows_of("mesh-steps-4-1m") if row["policy"] == "dense")
    assert f"dense, tensor 4, eight steps in a launch | {million['median_s'] * 1e3:.2f} ms |" in text
    assert "dense / `top:32` | {:.2f} / {:.2f} ms |".format(*(row["median_s"] * 1e3 for row in large)) in text
    assert f"context 4, eight steps in a launch | {context[1]['median_s'] * 1e3:.2f} ms |" in text
    weights = jax.eval_shape(lambda: random_model(config_of("qwen2.5-7b", None, "bfloat16")).params)
    assert f"on each device with {len(jax.tree.leaves(weights))} arrays of weights" in " ".join(text.split())
    launches = json.loads((RESULTS.parent / "h100" / "designs-mesh-steps-launches.json").read_text())["rows"]
    steps = {(row["policy"], row["steps_per_launch"]): row for row in launches}
    said = "took {} ms in launches of one step and {} ms in launches of eight, and a dense one {} and {} ms"
    ms = [f"{steps[policy, count]['median_s'] * 1e3:.2f}" for policy in ("top:32", "dense") for count in (1, 8)]
    assert said.format(*ms) in " ".join(text.split())
    first = {row["policy"]: row["median_s"] for row in prompts if row["tokens"] == 2**17}
    assert f"dense / `bounds:32` | {first['dense']:.2f} / {first['bounds:32']:.2f} s |" in text
    whole = {row["policy"]: row["median_s"] for name in ("mesh-prompts-1m", "mesh-prompts-1m-dense") for row in rows_of(name)}
    said = "dense / `momo:128/8` / `bounds:32` | {:.1f} / {:.1f} / {:.1f} s |"
    assert said.format(*(whole[policy] for policy in ("dense", "momo:128/8", "bounds:32"))) in text


def test_what_was_tried_for_short_steps_is_what_the_results_say():
    text = " ".join((ROOT / "docs" / "devices.md").read_text(encoding="utf-8").split())
    rows = {(row["policy"], row["steps_per_launch"]): row for row in rows_of("mesh-steps-4-launches")}
    kernels = {kernel["name"]: kernel["total_s"] * 1e3 for kernel in rows["top:32", 8]["profile"]["kernels"]}
    parts = [kernels[f"{name}_mosaic_gpu_kernel"] for name in ("project_kernel", "selected_kernel", "anonymous")]
    assert "on four, products take {:.2f} ms, attention {:.2f} and sums {:.2f}.".format(*parts) in text
    on_two = [
        next(row["median_s"] * 1e3 for row in rows_of(name) if key == (row["tokens"], row["policy"], row["tensor"]))
        for name in ("designs-mesh-steps-2", "designs-mesh-steps-2-sum", "mesh-steps-4")
        for key in [(2**17, "top:32", 2)]
    ]
    assert f"it took {min(on_two):.2f} to {max(on_two):.2f} ms on two (`designs-mesh-steps-2.json`" in text
    by_nccl = {(row["policy"], row["steps_per_launch"]): row for row in rows_of("designs-mesh-steps-4-nccl")}["top:32", 8]
    nccl = sum(each["total_s"] * 1e3 for each in by_nccl["profile"]["kernels"] if each["name"].startswith("nccl"))
    assert f"By NCCL they took {nccl:.2f} ms of a step of {by_nccl['median_s'] * 1e3:.2f} ms" in text
    captured = [rows_of(f"designs-mesh-while-{count}")[0]["median_s"] * 1e3 for count in (4, 2, 1)]
    said = f"took {captured[0]:.2f} ms on four GPUs with it and {by_nccl['median_s'] * 1e3:.2f} ms without it"
    assert said in text
    assert "with it {:.2f} on two and {:.2f} on one".format(*captured[1:]) in text
    (nothing,) = rows_of("designs-mesh-context-nccl")
    said = f"a step of 4M tokens on four GPUs took {nothing['median_s'] * 1e3:.2f} ms"
    assert said in text
    found = {row["steps_per_launch"]: row for row in rows_of("mesh-steps-context")}
    assert "it takes {:.2f} ms, and {:.2f} ms in launches of eight".format(*(found[count]["median_s"] * 1e3 for count in (1, 8))) in text
    scores = next(each["total_s"] * 1e3 for each in found[8]["profile"]["kernels"] if each["name"].startswith("select_"))
    assert f"{scores:.2f} ms of the {found[8]['median_s'] * 1e3:.2f} ms at 4M tokens" in text
    many, single = (
        next(row for row in rows_of(name) if (row["tokens"], row["policy"]) == (2**17, "dense"))
        for name in ("designs-mesh-context-dense-b8", "designs-mesh-context-dense")
    )
    span = next(each["total_s"] * 1e3 for each in many["profile"]["kernels"] if each["name"].startswith("span_"))
    own = (
        next(row["median_s"] * 1e3 for row in rows_of(f"designs-mesh-grid-1-2-{b}") if (row["tokens"], row["policy"]) == (2**17, "dense"))
        for b in ("b8", "b1")
    )
    assert "takes {:.2f} ms, and one sequence {:.2f} ms".format(*own) in text
    said = f"took {many['median_s'] * 1e3:.2f} ms, of which attention {span:.2f}, and one sequence {single['median_s'] * 1e3:.2f} ms"
    assert said in text
    assert f"four replicas made {rows_of('designs-mesh-replicas-512')[1]['of_first']:.2f} times" in text
    alone, four = rows_of("mesh-replicas")
    assert f"make {four['of_first']:.2f} times the tokens of one" in text
    assert f"take {four['seconds']:.2f} s on four, 16 take {alone['seconds']:.2f} s on one" in text
    assert f"times those of one | {four['of_first']:.2f} |" in text


def test_what_the_sum_of_one_thread_cost_is_what_the_results_say():
    text = " ".join((ROOT / "docs" / "devices.md").read_text(encoding="utf-8").split())

    def step(name):
        (found,) = (row for row in rows_of(name) if (row["policy"], row["steps_per_launch"]) == ("top:32", 8))
        return found["median_s"] * 1e3, {kernel["name"]: kernel for kernel in found["profile"]["kernels"]}

    (four, before), (two, on_two) = map(step, ("designs-mesh-steps-4-sum", "designs-mesh-steps-2-sum"))
    sums = [some["input_concatenate_fusion"]["total_s"] * 1e3 for some in (before, on_two)]
    assert f"for {sums[0]:.2f} ms of a step of {four:.2f} ms on four GPUs and {sums[1]:.2f} of {two:.2f} ms on two" in text
    kept_out = [step(name)[1] for name in ("mesh-steps-4-launches", "mesh-steps-2")]
    assert all(some["input_concatenate_fusion"]["total_s"] < 0.003e-3 for some in kept_out)
    own = [some["input_reduce_select_fusion"]["median_s"] * 1e6 for some in kept_out]
    assert "a kernel of its own, of {:.0f} to {:.0f} us".format(*own) in text

    def short(name):
        (found,) = (row for row in rows_of(name) if (row["tokens"], row["policy"]) == (8192, "top:32"))
        return found["median_s"] * 1e3, found["profile"]["kernels"]

    (now, kernels), (then, fewer) = (short(f"designs-mesh-{name}-1-2-b8") for name in ("grid", "sum"))
    assert f"of 8K took {now:.2f} ms, and {then:.2f} without it" in text
    assert round(sum(each["runs_per_op"] for each in kernels) - sum(each["runs_per_op"] for each in fewer)) == 2 * 28


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
    (eight,) = (row for row in rows_of("mesh-steps-4-launches") if (row["policy"], row["steps_per_launch"]) == ("top:32", 8))
    assert f"In launches of eight it is {eight['median_s'] * 1e3:.2f} ms" in text
    (alone,) = (row for row in rows if (row["tokens"], row["policy"], row["tensor"]) == (2**17, "top:32", 1))
    assert f"One GPU takes {alone['median_s'] * 1e3:.2f} ms" in text
