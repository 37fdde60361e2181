"""A result of `kvjax bench decode` on meshes whose times are those of a known law."""

import functools

import numpy as np
from tiny_models import QWEN_7B

from kvjax.cost_model import step_bytes
from kvjax.cost_model.exchanges import step_exchanges
from kvjax.policies.decode import parse

RATE, C0, C1 = 3.0e12, 5e-4, 1e-4
LATENCY, LINK, CHOOSE = 5e-6, 80e9, 15e-6
"""The planted law."""

MESHES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
LENGTHS, BATCHES = (2**14, 2**16, 2**18), (1, 8)


@functools.cache
def mesh_seconds(name, length, batch, tensor, context):
    """What the law says of a step."""
    policy, mesh = parse(name), {"tensor": tensor, "context": context}
    seconds = step_bytes(QWEN_7B, policy, length, batch, **mesh).total / RATE + C0 + C1 * (name != "dense")
    found = step_exchanges(QWEN_7B, policy, batch, **mesh)
    return seconds + found.count * LATENCY + found.received / LINK + found.choosing * CHOOSE


def mesh_run(meshes=MESHES, lengths=LENGTHS, batches=BATCHES, policies=("dense", "top:32"), noise=0.0):
    """A result of `kvjax bench decode --tensor --context` whose times are those of the planted law."""
    draw = np.random.default_rng(0)
    rows = []
    for tensor, context in meshes:
        for length, batch, name in ((length, batch, name) for length in lengths for batch in batches for name in policies):
            mesh = {"tensor": tensor, "context": context}
            moved = step_bytes(QWEN_7B, parse(name), length, batch, **mesh)
            seconds = mesh_seconds(name, length, batch, tensor, context) * (1 + noise * draw.standard_normal())
            row = {"op": "decode", "shape": "qwen2.5-7b", "layers": 28, "dtype": "bfloat16", "tokens": length, "batch": batch}
            row |= {"policy": name, "median_s": seconds, **mesh}
            rows.append(row | {"bytes": {"weights": moved.weights, "kv": moved.kv, "index": moved.index}})
    rows.append(
        {"op": "decode", "shape": "qwen2.5-7b", "layers": 28, "tokens": 2**22, "tensor": 8, "context": 1, "skipped": "too few devices"}
    )
    return {"bench": "decode", "provenance": {"device": "Planted 9000", "date": "2026"}, "rows": rows}
