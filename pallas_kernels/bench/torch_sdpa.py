"""PyTorch's scaled_dot_product_attention as a dense baseline, in a separate process, because two profilers cannot share
a device.

    python -m pallas_kernels.bench.torch_sdpa < requests.json > answers.json

A request is {"name", "backend", "batch", "queries", "tokens", "heads", "kv_heads", "head_dim", "copies", "chain",
"calls"}: 1 query that sees all tokens, or as many queries as tokens, causal. An answer has the name and the kernels
that ran (name, start, end in nanoseconds), or why there are none. `chain` calls are captured as one CUDA graph, each on
the next of `copies` key and value tensors `[B, K, S, D]`, bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAUSE = 3e-3
WARMUP = 3


def installed() -> bool:
    """Whether PyTorch is installed; it may still find no GPU."""
    return importlib.util.find_spec("torch") is not None


def ask(requests: Sequence[dict[str, Any]], *, module: str = __name__) -> dict[str, dict[str, Any]]:
    """Answers by name, from one process for all requests, which runs `module`. RuntimeError with the end of its output
    if it fails."""
    done = subprocess.run([sys.executable, "-m", module], input=json.dumps(list(requests)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"PyTorch's process ended with status {done.returncode}: {done.stderr[-800:]}")
    return {answer["name"]: answer for answer in json.loads(done.stdout.splitlines()[-1])}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The kernels of one request, or {"skipped": why}."""
    import torch

    try:
        if not torch.cuda.is_available():
            return {"name": request["name"], "skipped": "PyTorch finds no GPU"}
        kernels, difference = _run(request)
        return {"name": request["name"], "kernels": kernels, "replay_difference": difference, "torch": torch.__version__}
    except RuntimeError as problem:  # an unsupported backend, or not enough memory
        return {"name": request["name"], "skipped": " ".join(str(problem).split())[:300]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run(request: dict[str, Any]) -> tuple[list[tuple[str, float, float]], float]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[request["backend"]]
    batch, heads, head_dim = request["batch"], request["heads"], request["head_dim"]
    made = {"device": "cuda", "dtype": torch.bfloat16}
    kv_shape = (batch, request["kv_heads"], request["tokens"], head_dim)
    pairs = [(torch.randn(kv_shape, **made), torch.randn(kv_shape, **made)) for _ in range(request["copies"])]
    causal = request["queries"] > 1
    queries = [4 * torch.randn((batch, heads, request["queries"], head_dim), **made) for _ in range(request["chain"])]

    def attend(i):
        return scaled_dot_product_attention(queries[i], *pairs[i % len(pairs)], is_causal=causal, enable_gqa=True)

    with sdpa_kernel(backend), torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            first = attend(0)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [attend(i) for i in range(len(queries))]  # kept alive, so that no output reuses another's memory
    for _ in range(WARMUP):
        graph.replay()
    torch.cuda.synchronize()
    kernels = trace([graph], request["calls"])
    difference = (results[0].float() - first.float()).norm() / first.float().norm()
    return kernels, difference.item()


def trace(graphs: Sequence[Any], calls: int) -> list[tuple[str, float, float]]:
    """The kernels (name, start, end in nanoseconds) of so many replays of CUDA graphs, one after another, with a pause
    after each."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # a process's first profile may miss what runs while it starts
        graphs[0].replay()
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for graph in graphs:
            for _ in range(calls):
                graph.replay()
                torch.cuda.synchronize()
                time.sleep(PAUSE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    origin = min((event["ts"] for event in device), default=0)
    return sorted(((e["name"], (e["ts"] - origin) * 1e3, (e["ts"] - origin + e["dur"]) * 1e3) for e in device), key=lambda k: k[1:])


if __name__ == "__main__":
    print(json.dumps([answer(request) for request in json.load(sys.stdin)]))
