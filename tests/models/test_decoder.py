"""The decoder's contract with whoever runs it: state, dtypes, rows, errors, initialisation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, altered, flat

from kvjax.engine.memory import memory_plan
from kvjax.model.protocols import Heads
from kvjax.models import decoder, products
from kvjax.models.decoder import TransformerDecoder, causal_mix, init_params, param_shapes
from pallas_kernels.matmul.project_tokens import project_tokens

CONFIG = altered(
    TINY, family="qwen3", vocab_size=50, hidden_size=24, intermediate_size=40, tie_embeddings=False, max_positions=64, qk_norm=True
)
DECODER = TransformerDecoder(CONFIG)
MIX = causal_mix()
initialised = jax.jit(init_params, static_argnums=0, static_argnames="std")


@pytest.fixture(scope="module")
def params():
    return initialised(CONFIG, jax.random.key(0), std=0.3)


def batch(rows=3, length=10, start=0):
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, CONFIG.vocab_size)
    return tokens, jnp.broadcast_to(start + jnp.arange(length), (rows, length))


@functools.partial(jax.jit, static_argnames="decoder")
def forward(params, tokens, positions, decoder=DECODER):
    return decoder.logits(params, decoder.hidden(params, tokens, positions, MIX, None)[0])


def test_mix_sees_every_layer_in_order_and_threads_the_state(params):
    seen = []

    def mix(layer, given, state):
        q, k, v = given.q, given.k, given.v
        seen.append((layer, q.shape, k.shape, v.shape))
        return q, (*state, layer)

    _, state = DECODER.hidden(params, *batch(), mix, ())
    assert state == (0, 1)
    assert seen == [(n, (3, 10, 4, 16), (3, 10, 2, 16), (3, 10, 2, 16)) for n in range(2)]


def test_decoder_is_static_and_hashable(params):
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(decoder, params):
        traced.append(decoder)
        return decoder.logits(params, params["final_norm"])

    first = run(TransformerDecoder(CONFIG), params)
    np.testing.assert_array_equal(first, run(TransformerDecoder(dataclasses.replace(CONFIG)), params))
    assert len(traced) == 1


@pytest.mark.quick_but("fields1", "fields0")
@pytest.mark.parametrize("fields", [{"o_bias": True}, {"mlp_bias": True}, {"qkv_bias": False, "o_bias": True, "mlp_bias": True}])
def test_biases_are_there_where_the_configuration_says(fields):
    config = altered(CONFIG, **fields)
    shapes = param_shapes(config)["layers"][0]
    assert {"q_bias" in shapes, "k_bias" in shapes, "v_bias" in shapes} == {flat(config).qkv_bias}
    assert ("o_bias" in shapes) == flat(config).o_bias
    assert {"gate_bias" in shapes, "up_bias" in shapes, "down_bias" in shapes} == {flat(config).mlp_bias}
    params = initialised(config, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_params
    assert memory_plan(config, available_bytes=0).weights_bytes == 4 * config.num_params
    assert all(not leaf.any() for name, leaf in params["layers"][1].items() if name.endswith("_bias"))


def test_a_model_without_biases_computes_without_them():
    """Its compiled programs take no further arguments."""
    plain = altered(CONFIG, qkv_bias=False)
    calls = []

    def heard(x, weights, **options):
        calls.append(options)
        return project_tokens(x, weights, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "project_tokens", heard)
        params = initialised(plain, jax.random.key(0))
        jax.make_jaxpr(lambda params: TransformerDecoder(plain).hidden(params, *batch(), MIX, None))(params)
    assert len(calls) == 4 * plain.num_layers
    assert not any("biases" in options for options in calls)


def test_a_row_does_not_depend_on_the_others(params):
    tokens, positions = batch()
    want = forward(params, tokens, positions)
    other = tokens.at[1:].set((tokens[1:] + 7) % CONFIG.vocab_size)
    np.testing.assert_array_equal(forward(params, other, positions)[0], want[0])
    np.testing.assert_array_equal(forward(params, tokens[::-1], positions)[::-1], want)


def test_an_mlp_takes_some_tokens_after_the_others(params, monkeypatch):
    """All of them, whether or not they fill its parts."""
    tokens, positions = jnp.arange(2 * 11).reshape(2, 11) % CONFIG.vocab_size, jnp.arange(11)[None].repeat(2, 0)
    whole, _ = DECODER.hidden(params, tokens, positions, causal_mix(), None)
    monkeypatch.setattr(decoder, "MLP_TOKENS", 4)
    sizes = []
    gate_tokens = decoder.gate_tokens
    monkeypatch.setattr(
        decoder, "gate_tokens", lambda config, params, x, tokens: sizes.append(x.shape[1]) or gate_tokens(config, params, x, tokens)
    )
    parts, _ = DECODER.hidden(params, tokens, positions, causal_mix(), None)
    assert sizes == [4, 3] * CONFIG.num_layers, "the loop is traced once"
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)
    inner = CONFIG.layers[0].mlp.size
    program = str(jax.make_jaxpr(lambda *args: DECODER.hidden(*args, causal_mix(), None))(params, tokens, positions))
    there = {rows for rows in ("8", "6", "22", "2,11") if f"[{rows},{inner}]" in program}
    assert there == {"8", "6"}, "inner results of both sequences' rows: of a part's alone"


def test_positions_are_absolute_and_only_their_differences_matter(params):
    tokens, positions = batch()
    want = forward(params, tokens, positions)
    np.testing.assert_allclose(forward(params, tokens, positions + 4000), want, atol=1e-3)
    assert jnp.abs(forward(params, tokens, 2 * positions) - want).max() > 0.05


@pytest.mark.quick_but("True-float16", "True-float32", "False-bfloat16", "False-float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_activations_have_the_weights_dtype_and_logits_are_float32(dtype, tied):
    config = altered(CONFIG, tie_embeddings=tied, compute_dtype=jnp.dtype(dtype).name)
    decoder, params = TransformerDecoder(config), initialised(config, jax.random.key(0), std=0.3)

    def mix(layer, given, state):
        q, k, v = given.q, given.k, given.v
        assert q.dtype == k.dtype == v.dtype == dtype
        out, state = MIX(layer, jax.tree.map(lambda x: x.astype(jnp.float32), given), state)  # JAX's own does no float16 on the CPU
        return out.astype(dtype), state

    @jax.jit
    def run(params):
        hidden, _ = decoder.hidden(params, *batch(), mix, None)
        return hidden, decoder.logits(params, hidden)

    hidden, logits = run(params)
    assert hidden.dtype == dtype
    assert logits.dtype == jnp.float32
    exactly = TransformerDecoder(altered(config, compute_dtype="float32"))
    exact = forward(jax.tree.map(lambda x: x.astype(jnp.float32), params), *batch(), decoder=exactly)
    error = jnp.linalg.norm(logits - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1)
    assert error.max() < {jnp.bfloat16: 0.08, jnp.float16: 0.01, jnp.float32: 1e-6}[dtype]


def test_unknown_token_ids_are_not_clamped(params):
    tokens, positions = batch()
    for bad in (-1, CONFIG.vocab_size):
        logits = forward(params, tokens.at[0, -1].set(bad), positions)
        assert jnp.isnan(logits[0, -1]).all()
        assert jnp.isfinite(logits[1:]).all()


def test_mismatched_input_is_an_error(params):
    tokens, positions = batch()
    with pytest.raises(ValueError, match=r"one shape \[B, T\], got \(3, 10\) and \(3, 9\)"):
        DECODER.hidden(params, tokens, positions[:, :-1], MIX, None)
    with pytest.raises(ValueError, match="one shape"):
        DECODER.hidden(params, tokens[0], positions[0], MIX, None)
    with pytest.raises(ValueError, match="1 layers, but the configuration has 2"):
        DECODER.hidden(params | {"layers": params["layers"][:1]}, tokens, positions, MIX, None)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.long), jnp.float32])
def test_any_cut_into_slices_of_layers_gives_the_same_bits(dtype):
    """Slices of equal layers are one program."""
    config = altered(CONFIG, num_layers=4, compute_dtype=jnp.dtype(dtype).name)
    decoder, params = TransformerDecoder(config), initialised(config, jax.random.key(0), std=0.3)
    tokens, positions = batch()

    def mix(layer, given, state):
        return MIX(layer, given, state)[0], (*state, layer)

    @functools.partial(jax.jit, static_argnames="decoder")
    def run(decoder, params, x):
        x, seen = decoder.run_layers(params, x, positions, mix, ())
        assert seen == tuple(range(decoder.config.num_layers))
        return x

    def cut_at(*borders):
        x = jax.jit(decoder.embed)(params, tokens)
        for first, last in itertools.pairwise((0, *borders, 4)):
            x = run(decoder.of_layers(first, last), decoder.params_of(params, first, last), x)
        return jax.jit(decoder.final_norm)(params, x)

    whole = jax.jit(lambda params: decoder.hidden(params, tokens, positions, mix, ())[0])(params)
    for size in range(4):
        for borders in itertools.combinations((1, 2, 3), size):
            np.testing.assert_array_equal(cut_at(*borders), whole)
    assert run._cache_size() == 4, "one program for each number of layers"


def test_slices_that_are_not_there_are_errors():
    for first, last in ((-1, 1), (0, 3), (2, 1), (1, 1)):
        with pytest.raises(ValueError, match=rf"layers \[{first}, {last}\) are not a slice of the model's 2 layers"):
            DECODER.of_layers(first, last)


def test_causal_mix_is_softmax_attention_over_the_past():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 6, n, 8)).astype(np.float32) for n in (6, 2, 2))
    out, state = causal_mix()(0, Heads(*map(jnp.asarray, (q, k, v)), 0.4), "state")
    assert state == "state"
    for b, t, h in np.ndindex(2, 6, 6):
        scores = k[b, : t + 1, h // 3] @ q[b, t, h] * 0.4
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[b, t, h], weights / weights.sum() @ v[b, : t + 1, h // 3], atol=1e-6)


@pytest.mark.quick_but("changes1", "changes0")
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "qkv_bias": False}, {"qk_norm": False, "num_kv_heads": 4}])
def test_init_params(changes):
    config = altered(CONFIG, **changes, compute_dtype="bfloat16")
    params = initialised(config, jax.random.key(3))
    assert jax.tree.map(jnp.shape, params) == param_shapes(config)
    assert sum(x.size for x in jax.tree.leaves(params)) == config.num_params
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    layer = params["layers"][1]
    assert abs(float(layer["gate"].astype(jnp.float32).std()) - 0.02) < 0.003
    assert (layer["attn_norm"] == 1).all()
    assert not jnp.array_equal(params["layers"][0]["gate"], layer["gate"])
    if flat(config).qkv_bias:
        assert (layer["q_bias"] == 0).all()


def test_it_can_be_trained(params):
    tokens, positions = batch()

    def loss(params):
        picked = jnp.take_along_axis(jax.nn.log_softmax(forward(params, tokens, positions))[:, :-1], tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    step = jax.jit(jax.value_and_grad(loss))
    before, gradient = step(params)
    assert all(np.isfinite(g).all() and np.any(g) for g in map(np.asarray, jax.tree.leaves(gradient)))
    assert step(jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.05) * np.asarray(g), params, gradient))[0] < before
