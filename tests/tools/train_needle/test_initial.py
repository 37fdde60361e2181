"""Initial weights of the needle recipe: the first heads look back by exactly as much as they should, the rest are drawn
as documented."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import altered, flat

from kvjax.models.decoder import TransformerDecoder
from train_needle.initial import structured_params
from train_needle.recipe import NEEDLE, TOY

TOKENS = 96


def first_layer_attention(config, params):
    """float32[H, T, T]: attention of layer 0 over random tokens, causal."""
    seen = {}

    def mix(layer, given, state):
        q, k = given.q, given.k
        if layer == 0:
            k = jnp.repeat(k, flat(config).num_heads // flat(config).num_kv_heads, axis=2)
            logits = jnp.einsum("bthd,bshd->bhts", q, k) * config.layers[0].mixer.sm_scale
            causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
            seen["attention"] = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)[0]
        return jnp.zeros_like(q), state

    tokens = jax.random.randint(jax.random.key(5), (1, TOKENS), 0, config.vocab_size)
    TransformerDecoder(config).hidden(params, tokens, jnp.arange(TOKENS)[None], mix, None)
    return np.asarray(seen["attention"])


@pytest.mark.quick_but("needle")
@pytest.mark.parametrize("recipe", [NEEDLE, TOY], ids=lambda recipe: recipe.name)
def test_heads_of_the_first_group_attend_one_two_and_so_on_tokens_back(recipe):
    config = altered(recipe.model_config(), num_layers=1, compute_dtype="float32")
    attention = first_layer_attention(config, structured_params(config, jax.random.key(0)))
    group = flat(config).num_heads // flat(config).num_kv_heads
    for head in range(flat(config).num_heads):
        back = np.diagonal(attention[head], offset=-(head + 1))
        if head < group:
            assert (attention[head].argmax(1)[head + 1 :] == np.arange(TOKENS - head - 1)).mean() > 0.95
            assert np.median(back) > 0.5
        else:
            assert np.median(back) < 0.2


@pytest.mark.long
def test_the_rest_is_drawn_as_documented():
    config = NEEDLE.model_config()
    params = structured_params(config, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(np.linalg.norm(params["embed"], axis=1).mean(), 1, rtol=0.02)
    layer = params["layers"][3]
    fan_in = {"q": 384, "up": 384, "o": 512, "down": 1024}
    documented = {name: (0.1 if name in ("o", "down") else 1) * size**-0.5 for name, size in fan_in.items()}
    for name, want in {**documented, "q_bias": 0.5, "k_bias": 0.5}.items():
        assert np.std(layer[name]) == pytest.approx(want, rel=0.15), name
    assert not np.any(layer["v_bias"])
    assert np.all(layer["attn_norm"] == 1)
    other = structured_params(config, jax.random.key(1))
    assert not np.array_equal(layer["q"], other["layers"][3]["q"])
