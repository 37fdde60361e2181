"""Small random models, and the configurations that several tests share."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.model.config import uniform_config, uniform_fields
from kvjax.model.layers import AttentionLayer, DeltaLayer, LatentLayer, LayerConfig, Mlp, Rope
from kvjax.models import CausalLM
from kvjax.models.decoder import TransformerDecoder, causal_mix, init_params

VOCAB = 97
TINY = uniform_config(
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_positions=4096,
    qkv_bias=True,
)
QWEN_7B = uniform_config(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=2**21,
    compute_dtype="bfloat16",
    qkv_bias=True,
)
"""The sizes of Qwen2.5-7B."""


def altered(config, **changes):
    """A model of like layers with some of `uniform_config`'s arguments changed."""
    return uniform_config(**(uniform_fields(config) | changes))


def flat(config):
    """`uniform_config`'s arguments of a model of like layers, as attributes."""
    return SimpleNamespace(**uniform_fields(config))


@dataclasses.dataclass(eq=False)
class TinyModel:
    """A decoder with random weights, large enough in scale that attention is peaked and a wrong key shows."""

    decoder: TransformerDecoder
    params: dict
    tokenizer: object = None

    @property
    def config(self):
        return self.decoder.config

    @functools.cached_property
    def _forward(self):
        def forward(params, tokens):
            mix = causal_mix()
            positions = jnp.arange(tokens.shape[1])[None]
            hidden, _ = self.decoder.hidden(params, tokens, positions, mix, None)
            return self.decoder.logits(params, hidden)[0]

        return jax.jit(forward)

    def full_forward(self, tokens):
        """Logits `[T, V]` of every token, by dense causal attention without a cache."""
        return np.asarray(self._forward(self.params, jnp.asarray(tokens, jnp.int32)[None]))


@functools.cache
def _drawn(config):
    return init_params(config, jax.random.key(7), std=0.15)


def random_weights(config):
    """Weights of a `TinyModel`. They are drawn once: the draws compile a program for each shape, and each module would
    do so again."""
    return dict(_drawn(config))


def make_model(**changes):
    """`TINY` with changes, and random weights."""
    decoder = TransformerDecoder(altered(TINY, **changes))
    return TinyModel(decoder, random_weights(decoder.config))


RECURRENT = dataclasses.replace(
    TINY,
    family="qwen3_5_text",
    norm_offset=1.0,
    layers=tuple(
        LayerConfig(mixer, TINY.layers[0].mlp)
        for mixer in (
            DeltaLayer(key_heads=1, value_heads=2, key_dim=16, value_dim=8, conv_width=4, chunk=8),
            AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(1e4, 8), sm_scale=0.25, qk_norm=True, gate=True),
        )
    ),
)
"""A layer of Gated DeltaNet and one of attention, as in Qwen3.5."""


def make_recurrent_model(dtype="float32"):
    """`RECURRENT` with random weights."""
    return remembering(dataclasses.replace(RECURRENT, compute_dtype=dtype))


LATENT = dataclasses.replace(
    TINY,
    family="deepseek_v32",
    layers=(
        LayerConfig(
            LatentLayer(
                num_heads=4,
                query_rank=40,
                latent_dim=24,
                nope_dim=16,
                value_dim=16,
                rope=Rope(1e4, 8),
                sm_scale=24**-0.5,
                index_heads=12,
                index_dim=16,
                index_topk=24,
            ),
            TINY.layers[0].mlp,
        ),
    )
    * 2,
)
"""Two layers of latent attention, as in DeepSeek-V3.2. With few heads of the indexer many tokens would score 0, and be
tied."""


def make_latent_model(dtype="float32"):
    """`LATENT` with random weights."""
    decoder = TransformerDecoder(dataclasses.replace(LATENT, compute_dtype=dtype))
    return TinyModel(decoder, random_weights(decoder.config))


def sharing(config, share_with):
    """The model with layers that read the keys and values of others: `share_with` of each layer. They rotate their
    queries by another base than those rotate their keys."""

    def layer(each, owner):
        rope = each.mixer.rope if owner is None else Rope(3e4, each.mixer.head_dim)
        return dataclasses.replace(each, mixer=dataclasses.replace(each.mixer, share_with=owner, rope=rope))

    return dataclasses.replace(config, layers=tuple(map(layer, config.layers, share_with)))


def make_family(name, *, head_dim=16, window=24, dtype="float32"):
    """A tiny model of two layers, built as those of a family are: llama, qwen3, gemma3_text (a layer with a window),
    qwen3_5_text or deepseek_v32 (whose sizes are its own). shared: four, of which two read the pages of the others, one
    of them with a window."""
    if name == "deepseek_v32":
        return make_latent_model(dtype)
    if name == "qwen3_5_text":
        delta, full = RECURRENT.layers
        full = dataclasses.replace(full, mixer=dataclasses.replace(full.mixer, head_dim=head_dim, rope=Rope(1e4, head_dim // 2)))
        return remembering(dataclasses.replace(RECURRENT, compute_dtype=dtype, layers=(delta, full)))
    config = altered(TINY, family=name, head_dim=head_dim, compute_dtype=dtype, qkv_bias=False, qk_norm=name != "llama")
    if name == "shared":
        config = sharing(altered(config, num_layers=4, windows=(window, None) * 2), (None, None, 0, 1))
    if name == "gemma3_text":
        mlp = Mlp(96, "gelu_tanh")
        mixers = (
            dataclasses.replace(config.layers[0].mixer, window=window),
            dataclasses.replace(config.layers[1].mixer, rope=Rope(1e6, head_dim)),
        )
        layers = tuple(LayerConfig(mixer, mlp, post_norms=True) for mixer in mixers)
        config = dataclasses.replace(config, layers=layers, norm_offset=1.0, embed_scale=8.0)
    return TinyModel(TransformerDecoder(config), random_weights(config))


def shallow(model):
    """The first layer of a model alone, for tests of what does not differ from layer to layer: its programs compile in
    less time."""
    config = dataclasses.replace(model.config, layers=model.config.layers[:1])
    return TinyModel(TransformerDecoder(config), model.params | {"layers": model.params["layers"][:1]}, model.tokenizer)


def remembering(config):
    """A model with recurrent layers whose decays are so slow that a page's tokens are remembered."""
    decoder = TransformerDecoder(config)
    params = random_weights(config)
    slower = [layer | {"decay_log": layer["decay_log"] - 4} if "decay_log" in layer else layer for layer in params["layers"]]
    return TinyModel(decoder, params | {"layers": tuple(slower)})


LEAST = altered(
    TINY, vocab_size=40, hidden_size=16, intermediate_size=24, head_dim=8, max_positions=64, tie_embeddings=False, eos_token_ids=(3, 5)
)
"""Of checkpoints that tests write and read."""


@functools.cache
def _initialised(config):
    return jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))


def random_model(dtype=jnp.float32, config=LEAST, tokenizer=None):
    config = dataclasses.replace(config, compute_dtype=jnp.dtype(dtype).name)
    return CausalLM(TransformerDecoder(config), dict(_initialised(config)), tokenizer, "random")


def same_params(first, second):
    """The same structure, types and numbers. NumPy compares: JAX would compile a program for each shape."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
