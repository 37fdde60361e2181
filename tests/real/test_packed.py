"""Packed weights and pages keep what the model says of a text: how often its most likely token is that of float32, with
a floor for each.

The floors stand a few points below what was measured; schemes that are broken on purpose stay below them.
"""

import dataclasses

import jax
import numpy as np
import pytest
from real_checkpoint import FORCED_TOKENS

from kvjax import Engine
from kvjax.models import load
from pallas_kernels.core.matrices import PackedMatrix

SIZES = {"pages": 48, "page_size": 32, "prefill_chunk": 128, "batch_buckets": (1,)}
WEIGHTS = {"int8": 0.95, "fp8": 0.83, "int4": 0.55}
PAGES = {"int8": 0.98, "fp8_e4m3": 0.96, "q8_0": 0.98, "k=int8,v=int4": 0.94, "int4+rotate": 0.87}


def agreement(engine, text, golden):
    """The share of tokens after which the engine's most likely one is that of transformers in float32."""
    sequence = engine.new_sequence()
    logits = engine.extend(sequence, text[:FORCED_TOKENS], all_logits=True)
    engine.free(sequence)
    return float(np.mean(np.asarray(logits).argmax(axis=-1) == golden["forced"]))


def rolled(model):
    """The model with the scales of each packed matrix moved on by one."""

    def wrong(leaf):
        if not isinstance(leaf, PackedMatrix):
            return leaf
        return dataclasses.replace(leaf, scales=jax.numpy.roll(leaf.scales, 1, axis=-2))

    params = jax.tree.map(wrong, model.params, is_leaf=lambda leaf: isinstance(leaf, PackedMatrix))
    return dataclasses.replace(model, params=params)


def test_float32_agrees_everywhere(model, text, golden):
    """But where two tokens are equally likely."""
    engine = Engine(model, **SIZES)
    sequence = engine.new_sequence()
    found = np.asarray(engine.extend(sequence, text[:FORCED_TOKENS], all_logits=True)).argmax(axis=-1)
    assert (found == golden["forced"])[golden["margin"] > 1e-3].all()


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_packed_weights(scheme, gguf_file, text, golden):
    packed = load(gguf_file, dtype="float32", weights=scheme)
    share, broken = agreement(Engine(packed, **SIZES), text, golden), agreement(Engine(rolled(packed), **SIZES), text, golden)
    print(f"weights {scheme}: {share:.4f}, with wrong scales {broken:.4f}")
    assert broken < WEIGHTS[scheme] <= share


@pytest.mark.parametrize("cache_format", PAGES)
def test_packed_pages(cache_format, model, text, golden):
    share = agreement(Engine(model, cache_format=cache_format, **SIZES), text, golden)
    print(f"pages {cache_format}: {share:.4f}")
    assert share >= PAGES[cache_format]


def test_pages_with_too_few_levels_fail_the_floors(model, text, golden):
    share = agreement(Engine(model, cache_format="d4:2", **SIZES), text, golden)
    print(f"pages d4:2: {share:.4f}")
    assert share < min(PAGES.values())
