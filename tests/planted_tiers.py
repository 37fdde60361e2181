"""A result of `python -m benchmarks.tiers` whose times are those of a known law."""

import dataclasses

import numpy as np
from tiny_models import QWEN_7B

from kvjax.cost_model import step_bytes
from kvjax.engine.memory import memory_plan, pool_frames
from kvjax.policies.decode import parse

RATE, C0, C1 = 3.0e12, 5e-4, 1e-4
BUS, LAYER = 45e9, 12e-6
"""The planted law."""


def sizes(config=QWEN_7B, device_bytes=8 * 10**9, host_bytes=60 * 10**9, policies=("top:32",)):
    indexes = tuple(dict.fromkeys(spec for name in policies for spec in parse(name).indexes()))
    plan = memory_plan(config, indexes=indexes, weights_bytes=0, available_bytes=0)
    return pool_frames(plan, device_bytes, host_bytes, hot=bool(indexes))


def tier_run(lengths=(2**16, 2**17, 2**18, 2**19), devices=(2 * 10**9, 6 * 10**9), noise=0.0, layer_s=LAYER, hits=None, skip=()):
    """A result of `python -m benchmarks.tiers` whose times are those of the planted law."""
    draw = np.random.default_rng(0)
    hits = {"own": 0.55, "recorded": 0.7, "nothing shared": 0.0} if hits is None else hits
    rows = []
    for device_bytes in (*devices, None):
        frames = None if device_bytes is None else sizes(device_bytes=device_bytes, host_bytes=max(lengths) * 57_344 + 10**9)
        for length in lengths:
            for name, lists in (("dense", "own"), ("top:32", "own"), ("top:32", "recorded"), ("top:32", "nothing shared")):
                if (name, lists, device_bytes is None) in skip:
                    continue
                moved, found = step_bytes(QWEN_7B, parse(name), length, frames=frames), hits[lists]
                seconds = moved.from_device / RATE + C0 + C1 * (name != "dense") + layer_s * moved.hot_layers
                seconds += moved.over_bus(found) / BUS
                row = {"shape": "qwen2.5-7b", "layers": 28, "dtype": "bfloat16", "tokens": length, "mean_length": length, "name": name}
                row |= {"policy": name if lists == "own" else f"{name}, {lists}", "lists": lists, "device_bytes": device_bytes}
                row |= {"frames": frames and list(dataclasses.astuple(frames)), "median_s": seconds * (1 + noise * draw.standard_normal())}
                row |= {"read_bytes": float(moved.kv), "asked_bytes": float(moved.listed), "copied_bytes": moved.listed * (1 - found)}
                rows.append(row | {"host_bytes": moved.over_bus(found)})
    rows.append({"shape": "qwen2.5-7b", "layers": 28, "tokens": 2**22, "policy": "dense", "skipped": "does not fit"})
    return {"bench": "tiers", "provenance": {"device": "Planted 9000", "date": "2026"}, "rows": rows}
