"""Small random models and their oracle: one causal forward over the whole text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import ModelConfig
from kvjax.models.decoder import TransformerDecoder, causal_mix, init_params
from kvjax.policies.decode import Blocks
from kvjax.policies.decode.base import Stateless

VOCAB = 97


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


def make_model(dtype=jnp.float32, **overrides):
    fields = {
        "family": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "tie_embeddings": True,
        "max_positions": 4096,
        "qkv_bias": True,
    }
    decoder = TransformerDecoder(ModelConfig(**(fields | overrides)))
    return TinyModel(decoder, init_params(decoder.config, jax.random.key(7), dtype, std=0.15))


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def bf16_model():
    return make_model(jnp.bfloat16)


@pytest.fixture(scope="session")
def model_factory():
    return make_model


@pytest.fixture(scope="session")
def text():
    return np.random.default_rng(0).integers(0, VOCAB, 300).tolist()


@pytest.fixture(scope="session")
def speaker():
    """A tiny model with a tokenizer of single printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {character: number for number, character in enumerate([*characters, "<eos>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    model = make_model(eos_token_ids=(95,))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    return model


@dataclasses.dataclass(frozen=True)
class ListedPages(Stateless):
    """Every page but those of `without`, by an explicit list: sound, if there are none."""

    without: tuple[int, ...] = ()

    def select(self, query, layer, ctx, state):
        pages = jnp.arange(ctx.page_table.shape[1])
        there = (pages < -(-ctx.lengths[:, None] // ctx.page_size)) & ~jnp.isin(pages, jnp.array(self.without, jnp.int32))
        last = pages.size
        ids = jnp.sort(jnp.where(there, pages, last), axis=1)
        ids = jnp.where(ids < last, ids, -1)[:, None].astype(jnp.int32)
        return Blocks(jnp.broadcast_to(ids, (ids.shape[0], layer.pages.kv_heads, last)), ctx.page_size), state

    def describe(self):
        return f"every page but {self.without}"


@pytest.fixture(scope="session")
def listed_pages():
    """A policy in which the defect of dropped pages can be planted."""
    return ListedPages
