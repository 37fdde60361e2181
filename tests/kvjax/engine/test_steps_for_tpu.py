"""Whole decode and prefill steps of the 7B shape (28/4 heads of 128, width 3,584), compiled ahead of time for TPUs.
Needs libtpu."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tpu_kernels
from tiny_models import make_family
from whole_chunks import prefill_step

from kvjax.cache import Cache
from kvjax.engine.steps import StepStatic, decode_step
from kvjax.models.decoder import TransformerDecoder, init_params
from kvjax.policies.decode import Dense, parse
from kvjax.policies.prefill import DensePrefill
from pallas_kernels.core import dispatch

TOKENS, PAGE = 131072, 128
DECODE = {"top:32": {"append_tokens", "selected_attention"}, "dense": {"append_tokens", "gather_attention"}}
"""The ops of a decode step whose TPU kernels are taken."""

each_chip = pytest.mark.parametrize("chip", tpu_kernels.TOPOLOGIES)
pytestmark = pytest.mark.long


@pytest.fixture
def on_tpu(monkeypatch):
    """Dispatch believes that it is on a TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


def config_7b(layers: int):
    """So many layers of the 7B shape: a layer costs what each does, and 28 take minutes to compile."""
    tiny = make_family("llama", head_dim=128, dtype="bfloat16").config
    (layer, *_) = tiny.layers
    mixer = dataclasses.replace(layer.mixer, num_heads=28, num_kv_heads=4, qkv_bias=True)
    layer = dataclasses.replace(layer, mixer=mixer, mlp=dataclasses.replace(layer.mlp, size=18944))
    sizes = {"hidden_size": 3584, "vocab_size": 152064, "tie_embeddings": False, "max_positions": TOKENS}
    return dataclasses.replace(tiny, layers=(layer,) * layers, **sizes)


def given(policies, layers: int = 2):
    """Decoder, indexes, and shapes of parameters and cache: one sequence of 128K."""
    config = config_7b(layers)
    spec, decoder = config.cache_spec(PAGE), TransformerDecoder(config)
    indexes = tuple({index for policy in policies for index in policy.indexes()})
    pages = {group.name: TOKENS // PAGE for group in spec.groups}
    params, pool = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty(pages, indexes)))
    tables = {group.name: shape(1, TOKENS // PAGE) for group in spec.groups}
    return decoder, indexes, params, Cache(pool, tables, shape(1), spec)


def shape(*sizes, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def compiled_in_place(step, static: tuple, arrays: tuple, chip: str, cache: Cache, temporary: int):
    """Compile a step that donates its cache, `arrays[1]`: it fits beside it, and neither pool nor index is copied.
    Returns the kernels."""
    with dispatch.listening() as path:
        compiled = tpu_kernels.compile_ahead(lambda *arrays: step(StepStatic(*static), step.inputs(*arrays)), arrays, chip, donate=(1,))
    pools = jax.tree.leaves(cache.layers)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in pools)
    assert memory.temp_size_in_bytes < temporary
    tpu_kernels.assert_not_copied(compiled, *pools)
    return {op for op, name in path.items() if name == "mosaic_tpu"}


@each_chip
@pytest.mark.parametrize("policy", DECODE)
def test_a_decode_step_fits_and_copies_no_pool(on_tpu, policy, chip):
    policy_of = {"top:32": parse("top:32"), "dense": Dense()}[policy]
    decoder, indexes, params, cache = given([policy_of])
    states = jax.eval_shape(lambda: tuple(policy_of.init(None, 1) for _ in cache.spec.paged))
    arrays = params, cache, shape(1, 1), shape(1, dtype=bool), states
    assert compiled_in_place(decode_step, (decoder, policy_of, indexes), arrays, chip, cache, 2**24) == DECODE[policy]


@each_chip
def test_a_prefill_step_fits_and_copies_no_pool(on_tpu, chip):
    decoder, indexes, params, cache = given([parse("top:32")])
    arrays = params, cache, shape(1, 2048), shape(1), shape(1)
    kernels = compiled_in_place(prefill_step, (decoder, DensePrefill(), indexes), arrays, chip, cache, 2**28)
    assert kernels == {"append_tokens", "flash_attention"}
