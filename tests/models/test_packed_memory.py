"""Scratch of steps of a model with packed weights."""

import dataclasses

import jax.numpy as jnp
import pytest
from quick_cases import rest_long
from tiny_models import LEAST, altered, random_model
from whole_chunks import prefill_step

import kvjax
from kvjax.cache import Cache
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode_step
from kvjax.model.weight_formats import pack_params
from kvjax.policies.decode import parse
from pallas_kernels.matmul.project_tokens import xla

pytestmark = pytest.mark.optimized


def bytes_of_steps(model):
    """Scratch of a compiled decode step of one token, and of a prefill step of 128."""
    engine = kvjax.Engine(model, pages=4, page_size=128)
    table = {"full": jnp.zeros((1, 4), jnp.int32)}
    cache = Cache(engine._pool.layers, table, jnp.zeros(1, jnp.int32), engine.spec)
    states, zero = ((),) * model.config.num_layers, jnp.zeros(1, jnp.int32)
    given = StepInputs(model.params, cache, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool), states)
    decode = decode_step.lower(StepStatic(model.decoder, parse("dense"), ()), given).compile()
    tokens = jnp.zeros((1, 128), jnp.int32)
    static = StepStatic(model.decoder, engine.prefill_policy, ())
    prefill = prefill_step.lower(static, ChunkInputs(model.params, cache, tokens, zero, zero)).compile()
    return [step.memory_analysis().temp_size_in_bytes for step in (decode, prefill)]


@pytest.mark.parametrize("weights", rest_long(["int8", "int4", "fp8:128x128"], "int8"))
def test_steps_hold_no_widened_copy_of_all_weights(weights, monkeypatch):
    """Nor, in decode, of one matrix: a CPU widens a tile at a time, here of 64 KB, or of 128 rows. All widened weights
    are 11 MB, and prefill's activations are copied into loops."""
    monkeypatch.setattr(xla, "TILE_BYTES", 1 << 16)
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    model = random_model(config=altered(LEAST, **sizes, vocab_size=4096, max_positions=512))
    plain = bytes_of_steps(model)
    xla.project_tokens.clear_cache()
    found = bytes_of_steps(dataclasses.replace(model, params=pack_params(model.params, weights)))
    widened = 4 * 256 * 2048
    assert found[0] < plain[0] + 3 * widened / 4, f"decode takes {found[0]} bytes of scratch; a widened matrix has {widened}"
    assert found[1] < plain[1] + 2 * widened, f"prefill takes {found[1]} bytes of scratch, {plain[1]} with arrays"
