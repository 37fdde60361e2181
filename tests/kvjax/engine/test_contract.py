"""The cache's contract: however a history was built, and wherever its pages lie, the logits are those of one full
forward.

float32: within BOUND of the oracle, relative to the largest logit of a row in magnitude. Equal bits, bfloat16 included,
wherever the design promises them: prefill cut into any calls, any page placement, forks, any company in one batch
bucket.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import rest_long, some_long
from tiny_models import make_family
from whole_chunks import prefill_step

from kvjax import Engine
from kvjax.cache import Cache
from kvjax.engine.policy_state import state_specs
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode_step, prefill_slice
from kvjax.policies.decode import parse
from kvjax.policies.prefill import parse_prefill

pytestmark = pytest.mark.bits

BOUND = 2e-5
"""What the README promises; tests/models/test_needle_golden.py holds the embedded model to it."""
PAGE = 16
POLICIES = ("dense", "top:40", "mean:40", "quest:40", "window:64+4544")


def engine_for(model, **options):
    return Engine(model, **({"pages": 64, "page_size": PAGE, "prefill_chunk": 32, "batch_buckets": (1, 4)} | options))


def error(logits, oracle):
    """Of the worst row: its largest difference, as a share of its largest logit in magnitude."""
    logits, oracle = np.asarray(logits, np.float32), np.asarray(oracle, np.float32)
    return float(np.max(np.abs(logits - oracle).max(-1) / np.abs(oracle).max(-1)))


def scramble(engine, seed):
    """Take and release pages so that the next sequences get them in no order."""
    taken = engine.allocators["full"].take(engine.allocators["full"].free)
    engine.allocators["full"].release(np.random.default_rng(seed).permutation(taken).tolist())


@pytest.mark.parametrize("chunk", rest_long([16, 32, 64, 160], 32, 160))
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 100])
def test_one_prefill_equals_one_full_forward(model, text, chunk, length):
    engine = engine_for(model, prefill_chunk=chunk)
    scramble(engine, length)
    (sequence,) = engine.prefill([text[:length]])
    assert error(sequence.logits, model.full_forward(text[:128])[length - 1]) < BOUND


def test_every_way_to_build_a_history_gives_the_full_forward(model, text):
    oracle = model.full_forward(text[:128])
    engine = engine_for(model)
    scramble(engine, 1)
    whole = engine.prefill([text[:90]])[0].logits
    (appended,) = engine.prefill([text[:21]])
    for start, stop in ((21, 22), (22, 48), (48, 90)):
        engine.extend(appended, text[start:stop])
    (single,) = engine.prefill([text[:1]])
    for token in text[1:90]:
        (by_token,) = engine.decode([single], [token])
    (parent,) = engine.prefill([text[:50]])
    child = engine.fork(parent)
    engine.extend(parent, [5, 6, 7])
    engine.extend(child, text[50:90])
    for logits in (whole, appended.logits, by_token, child.logits):
        assert error(logits, oracle[89]) < BOUND


def test_extend_returns_the_logits_of_every_token(model, text):
    engine = engine_for(model)
    (sequence,) = engine.prefill([text[:20]])
    logits = engine.extend(sequence, text[20:100], all_logits=True)
    assert logits.shape == (80, model.config.vocab_size)
    assert error(logits, model.full_forward(text[:128])[20:100]) < BOUND
    (prefilled,) = engine.prefill([text[:100]])
    assert np.array_equal(sequence.logits, prefilled.logits), "they do not depend on what is returned beside them"


@pytest.mark.quick_but("top:40", "dense", "window:64+4544")
@pytest.mark.parametrize("policy", some_long(POLICIES, "mean:40"))
def test_a_policy_that_covers_everything_is_dense(model, text, policy):
    oracle = model.full_forward(text[:128])
    engine = Engine(model, policy, pages=8, page_size=128, prefill_chunk=128, batch_buckets=(1,))
    (sequence,) = engine.prefill([text[:100]])
    for position in range(100, 128):
        assert error(engine.decode([sequence], [text[position]])[0], oracle[position]) < BOUND


def test_a_policy_that_drops_keys_is_not_dense(model, text):
    """The comparison above would notice missing keys: a short window is far off."""
    engine = engine_for(model, policy="window:1+8")
    (sequence,) = engine.prefill([text[:100]])
    assert error(engine.decode([sequence], [text[100]])[0], model.full_forward(text[:128])[100]) > 1e-2


@pytest.mark.quick_but("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 89), max_size=6), seed=st.integers(0, 9), fork_at=st.integers(0, 6))
def test_prefill_bits_do_not_depend_on_how_it_was_cut(model, bf16_model, text, dtype, cuts, seed, fork_at):
    subject = model if dtype == "float32" else bf16_model
    engine = engine_for(subject)
    whole = np.asarray(engine.prefill([text[:90]])[0].logits)
    scramble(engine, seed)
    edges = sorted({*cuts, 90})
    (sequence,) = engine.prefill([text[: edges[0]]])
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        if number == fork_at:
            sequence = engine.fork(sequence)
        engine.extend(sequence, text[start:stop])
    np.testing.assert_array_equal(np.asarray(sequence.logits), whole)


@pytest.mark.quick_but("float32-dense")
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        ("float32", "dense"),
        pytest.param("float32", "window:5+20", marks=pytest.mark.long),
        pytest.param("float32", "top:2", marks=pytest.mark.long),
        ("bfloat16", "top:2"),
    ],
)
def test_decode_bits_do_not_depend_on_company_or_places(model, bf16_model, text, dtype, policy):
    """One batch bucket of 4: alone, first of four, last of four beside a much longer sequence (a wider page table)."""
    subject = model if dtype == "float32" else bf16_model

    def decoded(place, others, seed):
        engine = engine_for(subject, policy=policy, policies=["top:2"], page_size=128, prefill_chunk=128, batch_buckets=(4,))
        scramble(engine, seed)
        prompts = [*others[:place], text[:150], *others[place:]]
        sequences = engine.prefill(prompts)
        for step in range(5):
            logits = engine.decode(sequences, [text[150 + step]] * len(sequences))
        return np.asarray(logits[place])

    alone = decoded(0, [], 0)
    long = (text * 9)[:2500]
    np.testing.assert_array_equal(decoded(0, [text[:7], text[:200], text[:33]], 1), alone)
    np.testing.assert_array_equal(decoded(3, [long, text[:1], text[:300]], 2), alone)


@pytest.mark.long
def test_the_same_call_twice_gives_the_same_bits(model, text):
    runs = []
    for _ in range(2):
        engine = engine_for(model, policy="quest:2")
        (sequence,) = engine.prefill([text[:100]])
        runs.append(np.asarray(engine.decode([sequence], [3])))
    np.testing.assert_array_equal(*runs)


def test_drafted_tokens_decode_together_as_one_by_one(model, text):
    """The pure step takes several tokens: they are causal among themselves and cross a page's end."""
    engine = engine_for(model)
    (sequence,) = engine.prefill([text[:30]])
    engine.reserve([sequence], 4)
    table = np.asarray([sequence.pages["full"]], np.int32)
    cache = Cache(engine._pool.layers, {"full": table}, np.array([30], np.int32), engine.spec)
    tokens = np.asarray([text[30:34]], np.int32)
    inputs = StepInputs(model.params, cache, tokens, np.array([True]), ((),) * model.config.num_layers)
    logits, cache, _, reads = decode_step(StepStatic(model.decoder, parse("dense"), ()), inputs)
    assert error(logits[0], model.full_forward(text[:128])[30:34]) < BOUND
    assert int(cache.lengths[0]) == 34
    assert int(reads.keys[0]) == 34 * model.config.cache_spec(16).kv_heads


@pytest.fixture(scope="module")
def single_layer(model_factory):
    """Layers are updated one after the other and alike, so one of them shows what a step holds."""
    return model_factory(num_layers=1)


@pytest.mark.quick_but("dense-1", "window:64+1000-1")
@pytest.mark.parametrize(("policy", "batch"), [("dense", 1), ("top:8", 4), ("window:64+1000", 1), ("window:64+1000+missed0.02", 1)])
def test_decode_holds_no_second_copy_of_the_cache(single_layer, policy, batch):
    model = single_layer
    engine = Engine(model, policy, pages=2048, page_size=128, policies=["top:8"])
    cache, size = empty_cache(engine, batch)
    states = tuple(parse(policy).init(spec, batch) for spec in state_specs(model.config, 128, 64))
    inputs = StepInputs(model.params, cache, jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, bool), states)
    compiled = decode_step.lower(StepStatic(model.decoder, parse(policy), engine.indexes), inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 20


@pytest.mark.quick_but("momo:16/4")
@pytest.mark.parametrize(
    "prefill",
    rest_long(["dense", "momo:16/4", "oracle:16"], "dense", "momo:16/4"),
)
def test_prefill_holds_no_second_copy_of_the_cache(single_layer, prefill):
    """Nor of the 64K keys of a sequence, 16 MB here; their logits would be 128 MB."""
    model = single_layer
    engine = Engine(model, "top:8", pages=2048, page_size=128, prefill=prefill)
    cache, size = empty_cache(engine, 1)
    zero = jnp.zeros(1, jnp.int32)
    tokens = jnp.zeros((1, 128), jnp.int32)
    static = StepStatic(model.decoder, engine.prefill_policy, engine.indexes)
    compiled = prefill_step.lower(static, ChunkInputs(model.params, cache, tokens, zero, zero)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 20


def test_readers_of_other_layers_pages_hold_no_copy_of_them():
    """An owner and its reader in a decode step; readers alone in a slice of prefill, into which owners go and out of
    which none comes."""
    model, policy = make_family("shared"), parse("top:8")
    spec, indexes = model.config.cache_spec(128), policy.indexes()
    names, one = [group.name for group in spec.groups], jnp.zeros(1, jnp.int32)
    layers = spec.empty(dict.fromkeys(names, 2048), indexes)
    cache, size = Cache(layers, dict.fromkeys(names, jnp.zeros((1, 64), jnp.int32)), one, spec), 2 * layers[0].pages.k.nbytes
    operands = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool), ((),) * 4
    step = decode_step.lower(StepStatic(model.decoder, policy, indexes), StepInputs(model.params, cache, *operands)).compile()
    assert step.memory_analysis().temp_size_in_bytes < size / 20
    decoder, params = model.decoder.of_layers(2, 4), model.decoder.params_of(model.params, 2, 4)
    own = cache.replace(layers=(None, None), spec=decoder.config.cache_spec(128))
    operands = jnp.zeros((1, 128, 64)), one, one, np.int32(2), layers[:2]
    static = StepStatic(decoder, parse_prefill("dense"), indexes)
    part = prefill_slice.lower(static, ChunkInputs(params, own, *operands)).compile().memory_analysis()
    assert part.argument_size_in_bytes > 2 * size
    assert part.temp_size_in_bytes < size / 20
    assert part.output_size_in_bytes < size / 20


def empty_cache(engine, batch):
    layers = engine._pool.layers
    size = sum(layer.pages.k.nbytes + layer.pages.v.nbytes for layer in layers)
    return Cache(layers, {"full": jnp.full((batch, 512), -1, jnp.int32)}, jnp.zeros(batch, jnp.int32), engine.spec), size
