"""torch.topk as a baseline, in a process of its own: two profilers do not share a device.

    python -m pallas_kernels.bench.torch_top_k < requests.json > answers.json

A request is {"name", "rows": an .npy file of scores `[copies, B, N]` float32, "k", "sorted", "flush_bytes", "calls", "answers": the .npy
file that the indices `[copies, B, k]` go to}; an answer has the name and, per call and copy, the kernels that ran (name, start, end in
nanoseconds), or why there are none. The calls of all copies are captured as one CUDA graph, a read of `flush_bytes` before each.
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
    """Answers by name, from one process for all; every one "skipped" where there is no PyTorch. RuntimeError where it fails."""
    if not torch_sdpa.installed():
        return {request["name"]: {"skipped": "PyTorch is not installed"} for request in requests}
    return torch_sdpa.ask(requests, module=__name__)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The kernels of one request, or {"skipped": why}."""
    import torch

    if not torch.cuda.is_available():
        return {"name": request["name"], "skipped": "PyTorch finds no GPU"}
    rows = [torch.from_numpy(each).cuda() for each in np.load(request["rows"])]
    words = torch.zeros(request["flush_bytes"] // 4, dtype=torch.int32, device="cuda")

    def flush():
        return words.amax()

    def rank(row):
        return torch.topk(row, request["k"], dim=-1, sorted=request["sorted"])

    flushed, _ = _captured(torch, [flush])
    graph, results = _captured(torch, [step for row in rows for step in (flush, lambda row=row: rank(row))])
    torch_sdpa.trace(flushed, 1)
    between = len(torch_sdpa.trace(flushed, 1))  # kernels of a flush
    kernels = [Kernel(*kernel) for kernel in torch_sdpa.trace(graph, request["calls"])]
    calls = [split_ops(call, len(rows)) for call in split_calls(kernels, request["calls"])]
    if None in calls:
        return {"name": request["name"], "skipped": "the calls' kernels cannot be told apart"}
    np.save(request["answers"], np.stack([indices.cpu().numpy() for _, indices in results[1::2]]))
    ops = [[(kernel.name, kernel.start, kernel.end) for kernel in op[between:]] for call in calls for op in call]
    return {"name": request["name"], "ops": ops, "torch": torch.__version__}


def _captured(torch: Any, steps: Sequence) -> tuple[Any, list]:
    """A CUDA graph of the steps, replayed a few times, and their results."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in steps:
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step() for step in steps]  # kept, so that no result reuses another's memory
    for _ in range(WARMUP):
        graph.replay()
    torch.cuda.synchronize()
    return graph, results


def _guarded(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return answer(request)
    except RuntimeError as problem:  # what it cannot do, or no memory
        return {"name": request["name"], "skipped": " ".join(str(problem).split())[:300]}


if __name__ == "__main__":
    print(json.dumps([_guarded(request) for request in json.load(sys.stdin)]))
