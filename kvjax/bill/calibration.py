"""Makes a bill for a device without a built-in one, from a few seconds of the engine's own steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.bill.fitting import Cell, fit
from kvjax.bill.step_bill import OWN, Bill
from kvjax.bill.volume import step_bytes
from kvjax.engine import Engine
from kvjax.model import Model
from kvjax.packing import packing_of
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode.naming import name_of, parse
from kvjax.sampling import SamplingRows
from kvjax.sequences import CachedSequence

SECONDS = 20.0
STEPS, ROUNDS = 8, 5
LONGEST, FRACTIONS = 65_536, (1, 2, 4, 8)
"""The longest sequence in tokens, if memory allows it, and the fractions of it that are timed too."""


def calibrate(
    model: Model, policies: Sequence[str], *, page_size: int = 128, batches: Sequence[int] = (1, 4), seconds: float = SECONDS
) -> Bill:
    """Time dense and `policies` on this device, over a cache of zeros, and fit a bill.

    seconds: how long it may take, including compilation, in equal shares for the batches. It takes longer only if compiling and one round
    of every policy at every length take longer. A batch is left out if half of its share is gone when its turn comes. Allocates pages
    for the longest sequences that fit in half of the free memory. ValueError if fewer than two lengths fit, or if time does not grow with
    bytes.
    """
    if any(isinstance(parse(name), ChoosesDecode) for name in policies):
        raise ValueError("a calibration times single policies, and auto chooses among several: name those")
    if not policies:
        raise ValueError("a calibration needs at least one policy besides dense, such as top:32")
    started = time.perf_counter()
    names = ["dense", *dict.fromkeys(name for policy in policies if (name := name_of(parse(policy))) != "dense")]
    cells: list[Cell] = []
    for number, batch in enumerate(batches):
        share = seconds / len(batches)
        if number and time.perf_counter() > started + share * (number + 0.5):
            break
        cells += _cells(model, names, page_size, batch, started + share * (number + 1))
    dtype = model.config.compute_dtype
    device = jax.local_devices()[0].device_kind
    took = time.perf_counter() - started
    source, weights = f"a calibration of {took:.0f} s", packing_of(model.params)
    named = OWN if callable(weights) else weights
    return fit(cells, model.config, device=device, model=model.config.family, dtype=dtype, source=source, weights=named)


def _cells(model: Model, names: Sequence[str], page_size: int, batch: int, until: float) -> list[Cell]:
    """Times every policy at every length, in rounds, until the clock shows `until`. All lengths have page tables of one width, so each
    policy is compiled once."""
    lengths = _lengths(model, page_size, batch, names)
    pages = batch * (lengths[-1] // page_size)
    engine = Engine(model, "dense", policies=names, pages=pages, page_size=page_size, prefill_chunk=page_size, batch_buckets=(batch,))
    sequences = [CachedSequence([], lengths[-1] - STEPS, {group.name: [] for group in engine.spec.groups}) for _ in range(batch)]
    engine.sequences.update(sequences)
    engine.reserve(sequences, STEPS)
    rows = SamplingRows.of([None] * batch)
    found: dict[tuple[int, str], list[float]] = {}
    for number, length, name in itertools.product(range(ROUNDS + 1), lengths, names):
        if number > 1 and time.perf_counter() > until:
            break
        for sequence in sequences:
            sequence.length = length - STEPS
        tokens = np.zeros(batch, np.int32)
        started = time.perf_counter()
        for _ in range(STEPS):
            sampled = engine.decode_and_sample(sequences, tokens, rows, name)
            tokens = sampled.tokens
        jax.block_until_ready(sampled)
        if number:  # the first round compiles
            found.setdefault((length, name), []).append((time.perf_counter() - started) / STEPS)
    sizes = {"dtype": engine.dtype.name, "weights": packing_of(model.params), "page_size": page_size}
    return [
        Cell(length, batch, name, float(np.median(times)), step_bytes(model.config, parse(name), length, batch, **sizes))
        for (length, name), times in found.items()
    ]


def _lengths(model: Model, page_size: int, batch: int, names: Sequence[str]) -> list[int]:
    """Lengths in tokens, ascending, each a number of whole pages: the longest that the model's positions and half of the free memory
    allow, and fractions of it."""
    from kvjax.memory import memory_plan

    indexes = tuple(dict.fromkeys(spec for name in names for spec in parse(name).indexes()))
    fit_in = memory_plan(model.config, page_size=page_size, indexes=indexes, weights_bytes=0).pages_that_fit // 2
    longest = min(min(LONGEST, model.config.max_positions) // page_size, fit_in // batch)
    lengths = sorted({longest // part * page_size for part in FRACTIONS} - {0})
    if len(lengths) < 2 or lengths[0] <= STEPS:
        raise ValueError(
            f"a calibration needs room for {batch} sequences of at least two pages of {page_size} tokens each, and has room for {longest}: "
            f"free memory, or give a smaller page_size; the model has {model.config.max_positions:,} positions"
        )
    return lengths
