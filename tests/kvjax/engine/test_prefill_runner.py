"""Slices of layers: how a model is cut, which of them share a program, and that a shared program knows whose layers it
runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import QWEN_7B, RECURRENT, TINY, TinyModel, altered, random_weights

from kvjax import Engine
from kvjax.engine.prefill_runner import cut_layers
from kvjax.engine.steps import embed_chunk, prefill_slice, row_logits
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import AttentionMass
from kvjax.policies.decode.base import Stateless
from kvjax.policies.prefill import DensePrefill

P, CHUNK = 16, 32
DELTA, FULL = RECURRENT.layers


def sliding(layers, period=6):
    """Windows as Gemma 3 has them: every sixth layer sees all tokens."""
    return tuple(None if number % period == period - 1 else 24 for number in range(layers))


def deltas(layers):
    """Layers as Qwen3.5 has them: every fourth is attention."""
    return dataclasses.replace(RECURRENT, layers=tuple(FULL if number % 4 == 3 else DELTA for number in range(layers)))


def cut(config):
    return cut_layers(TransformerDecoder(config), config.cache_spec(P))


@pytest.mark.parametrize(
    ("config", "sizes", "programs"),
    [
        (TINY, [2], 1),
        (QWEN_7B, [4] * 7, 1),
        (altered(TINY, num_layers=9), [3] * 3, 1),
        (altered(TINY, num_layers=30), [5] * 6, 1),
        (altered(TINY, num_layers=61), [4] * 15 + [1], 2),
        (altered(TINY, num_layers=48, windows=sliding(48)), [6] * 8, 1),
        (altered(TINY, num_layers=26, windows=sliding(26)), [6] * 4 + [2], 2),
        (altered(TINY, num_layers=36, windows=sliding(36, period=2)), [4] * 9, 1),
        (deltas(32), [4] * 8, 1),
    ],
    ids=["tiny", "qwen-7b", "9", "30", "61", "gemma3-12b", "gemma3-1b", "every second", "qwen3.5-9b"],
)
def test_a_model_is_cut_so_that_few_programs_are_needed(config, sizes, programs):
    slices = cut(config)
    assert [part.last - part.first for part in slices] == sizes
    assert [part.first for part in slices] == np.cumsum([0, *sizes[:-1]]).tolist()
    assert len({(part.decoder, part.spec) for part in slices}) == programs
    paged = [number for part in slices for number in range(part.place, part.end)]
    assert paged == list(range(len(config.attention)))


def test_layers_that_differ_share_no_program():
    different = dataclasses.replace(TINY.layers[0], mlp=dataclasses.replace(TINY.layers[0].mlp, size=64))
    config = dataclasses.replace(TINY, layers=(*TINY.layers * 2, *TINY.layers, different, TINY.layers[0]))
    assert len({part.decoder for part in cut(config)}) == 2


def model_of(config):
    return TinyModel(TransformerDecoder(config), random_weights(config))


def compiled():
    return [step._cache_size() for step in (embed_chunk, prefill_slice.jitted, row_logits)]


@pytest.mark.quick_but("qwen3.5", "uniform")
@pytest.mark.parametrize(
    "config",
    [altered(TINY, num_layers=6), altered(TINY, num_layers=8, windows=sliding(8, period=2)), deltas(8)],
    ids=["uniform", "windows", "qwen3.5"],
)
def test_a_prompt_needs_one_program_for_all_slices(config, text):
    model = model_of(dataclasses.replace(config, norm_eps=2e-6))  # a model that no other test has compiled
    engine, before = Engine(model, pages=16, page_size=P, prefill_chunk=CHUNK, batch_buckets=(1,)), compiled()
    (sequence,) = engine.prefill([text[:70]])
    assert [after - count for after, count in zip(compiled(), before, strict=True)] == [1, 1, 1]
    np.testing.assert_allclose(sequence.logits, model.full_forward(text[:70])[-1], atol=2e-4)


@dataclasses.dataclass(frozen=True)
class Hears:
    """Dense prefill that tells the number of each layer, and the first query of the chunk."""

    heard: Any
    queries_stand_alone = True

    def attend(self, query, layer, ctx):
        jax.debug.callback(lambda number, start: self.heard.append((int(number), int(start[0]))), ctx.layer, ctx.starts)
        return DensePrefill().attend(query, layer, ctx)

    def describe(self):
        return "listened to"

    def __hash__(self):
        return id(self.heard)


@dataclasses.dataclass(frozen=True)
class Numbers(Stateless):
    """Reads everything; its state of layer n is a row of the digit n + 1, one for each chunk."""

    learns = AttentionMass(block_size=P, steps=False)

    def init(self, spec, batch):
        return jnp.zeros(batch, jnp.int32)

    def observe(self, mass, at, state):
        return state * 10 + at.layer + 1

    def select(self, query, layer, ctx, state):
        return None, state

    def describe(self):
        return "numbers"


@pytest.mark.quick_but("config1")
@pytest.mark.parametrize("config", [altered(TINY, num_layers=8, windows=sliding(8, period=2)), altered(TINY, num_layers=6)])
def test_policies_are_told_which_layer_it_is_and_keep_their_states(config, text):
    heard: list[tuple[int, int]] = []
    sizes = {"pages": 16, "page_size": P, "prefill_chunk": CHUNK, "batch_buckets": (1,)}
    engine = Engine(model_of(config), policies=Numbers(), prefill=Hears(heard), **sizes)
    assert [part.first for part in engine._prefiller.slices] == [0, config.num_layers // 2]
    (sequence,) = engine.prefill([text[:70]])
    jax.effects_barrier()
    full = [number for number, layer in enumerate(config.layers) if layer.mixer.window is None]
    assert sorted(heard) == sorted((number, start) for number in full for start in (0, 32, 64))
    states = [int(state[0]) for state in sequence.states[Numbers()]]
    assert states == [(number + 1) * 111 if number in full else 0 for number in range(config.num_layers)]
