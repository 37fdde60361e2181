"""torch.topk as a baseline, in a separate process, because two profilers cannot share a device.

    python -m benchmarks.top_k.torch_top_k < asked.json > answers.json

Asked is a list of {"name", "rows": an .npy file of scores `[copies, B, N]` float32, "k", "sorted", "flush_bytes",
"calls", "answers": the .npy file that the indices `[copies, B, k]` are written to}, with flush_bytes and calls the same
in all. An answer has the name and, per call and copy, the kernels that ran (name, start, end in nanoseconds), or why
there are none. The calls of all copies are captured as one CUDA graph, with a read of `flush_bytes` before each. All
graphs run under one trace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.bench import torch_sdpa
from pallas_kernels.bench.timing import Kernel, split_calls, split_ops

WARMUP = 3


def ask(requests: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Answers by name, from one process for all; all "skipped" if PyTorch is not installed. RuntimeError if the process
    fails."""
    if not requests or not torch_sdpa.installed():
        return {request["name"]: {"skipped": "PyTorch is not installed"} for request in requests}
    return torch_sdpa.ask(requests, module=__name__)


def answers(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each request the kernels, or {"skipped": why}."""
    import torch

    if not torch.cuda.is_available():
        return [{"name": request["name"], "skipped": "PyTorch finds no GPU"} for request in requests]
    words = torch.zeros(requests[0]["flush_bytes"] // 4, dtype=torch.int32, device="cuda")
    flushed, _ = _captured(torch, [words.amax])
    found: dict[str, dict[str, Any]] = {}
    graphs = {}
    for request in requests:
        try:
            graphs[request["name"]] = _prepared(torch, request, words)
        except RuntimeError as problem:  # unsupported, or not enough memory
            found[request["name"]] = {"skipped": " ".join(str(problem).split())[:300]}
    calls = requests[0]["calls"]
    kernels = [Kernel(*kernel) for kernel in torch_sdpa.trace([flushed, *(graph for graph, _ in graphs.values())], calls)]
    groups = split_calls(kernels, calls * (1 + len(graphs)), alike=False)
    between = len(groups[0])  # kernels of the read before each op
    for number, (name, (_, (rows, _))) in enumerate(graphs.items(), 1):
        found[name] = _ops(groups[number * calls :][:calls], len(rows), between) | {"torch": torch.__version__}
    return [{"name": request["name"]} | found[request["name"]] for request in requests]


def _prepared(torch: Any, request: dict[str, Any], words: Any) -> tuple[Any, tuple[list, list]]:
    """A request's graph, and the arrays that its replays read and write, which must be kept as long. Its indices are in
    their file."""
    rows = [torch.from_numpy(each).cuda() for each in np.load(request["rows"])]

    def rank(row):
        return torch.topk(row, request["k"], dim=-1, sorted=request["sorted"])

    graph, results = _captured(torch, [step for row in rows for step in (words.amax, lambda row=row: rank(row))])
    np.save(request["answers"], np.stack([indices.cpu().numpy() for _, indices in results[1::2]]))
    return graph, (rows, results)


def _captured(torch: Any, steps: Sequence) -> tuple[Any, list]:
    """A CUDA graph of the steps, replayed a few times, and their results."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in steps:
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step() for step in steps]  # kept alive, so that no result reuses another's memory
    for _ in range(WARMUP):
        graph.replay()
    torch.cuda.synchronize()
    return graph, results


def _ops(calls: Sequence[list[Kernel]], copies: int, between: int) -> dict[str, Any]:
    """The kernels of each op, without the `between` kernels of the read before it."""
    split = [split_ops(call, copies) for call in calls]
    if None in split:
        return {"skipped": "the calls' kernels cannot be told apart"}
    return {"ops": [[(kernel.name, kernel.start, kernel.end) for kernel in op[between:]] for call in split for op in call]}


if __name__ == "__main__":
    print(json.dumps(answers(json.load(sys.stdin))))
