"""Attention of a whole text under a mask, without a cache: the oracle of policies that give pages back, or read
less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def rotated(x, positions, theta):
    """RoPE at positions `[..., T]` of x `[..., T, N, D]`, by complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


@functools.cache
def forward(model, longest, remapped=None):
    """A jitted function: tokens `[longest]`, mask `[layers, H, longest, longest]` -> logits `[longest, V]`, and per
    layer what each query pays each token, `[longest, H, longest]`.

    remapped: None, or (sink_tokens, window_tokens): positions are those in a cache of these tokens alone
    (StreamingLLM).
    """
    first = model.config.layers[0].mixer
    groups, theta = first.num_heads // first.num_kv_heads, first.rope.theta
    place = jnp.arange(longest)
    of_queries = place
    if remapped is not None:
        of_keys = jnp.where(place < remapped[0], place, place - jnp.maximum(place - (sum(remapped) - 1), 0)[:, None])
        of_queries = jnp.diagonal(of_keys)

    def run(tokens, mask):
        def mix(layer, given, state):
            queries = rotated(given.q[0], of_queries, theta)
            if remapped is None:
                logits = jnp.einsum("thd,shd->ths", queries, jnp.repeat(rotated(given.k[0], place, theta), groups, axis=1))
            else:  # a key stands elsewhere for each query
                keys = rotated(jnp.broadcast_to(given.k[0], (longest, *given.k.shape[1:])), of_keys, theta)
                logits = jnp.einsum("thd,tshd->ths", queries, jnp.repeat(keys, groups, axis=2))
            logits = logits * first.sm_scale
            paid = jax.nn.softmax(jnp.where(mask[layer].swapaxes(0, 1), logits, -jnp.inf), axis=-1)
            out = jnp.einsum("ths,shd->thd", paid, jnp.repeat(given.v[0], groups, axis=1))
            return out[None].astype(given.q.dtype), (*state, paid)

        # At position 0 nothing is rotated: `mix` does it.
        hidden, paid = model.decoder.hidden(model.params, tokens[None], jnp.zeros((1, longest), jnp.int32), mix, ())
        return model.decoder.logits(model.params, hidden)[0], paid

    return jax.jit(run)


def attended(model, tokens, mask, longest, remapped=None):
    """`forward` of fewer than `longest` tokens. mask: `[T, T]`, or `[layers, H, T, T]`. Results are of the tokens
    alone, numpy."""
    count, first = len(tokens), model.config.layers[0].mixer
    whole = np.broadcast_to(np.eye(longest, dtype=bool), (model.config.num_layers, first.num_heads, longest, longest)).copy()
    whole[..., :count, :count] = mask
    logits, paid = forward(model, longest, remapped)(np.pad(np.asarray(tokens, np.int32), (0, longest - count)), whole)
    return np.asarray(logits)[:count], [np.asarray(each)[:count, :, :count] for each in paid]


def causal(count):
    """Every token before, and its own."""
    return np.tril(np.ones((count, count), bool))


def sinks_and_window(count, sink_tokens, window_tokens, dense=0):
    """The first and the latest tokens; the first `dense` queries see everything before them."""
    query, key = np.arange(count)[:, None], np.arange(count)[None]
    near = (key < sink_tokens) | (key > query - window_tokens) | (query < dense)
    return near & causal(count)


def lose_free_pages(engine):
    """Fill the pages that no sequence holds with NaN, which would show in whatever reads them."""
    free = {name: np.array([not each.owners(page) for page in range(each.total)]) for name, each in engine.allocators.items()}
    layers = zip(engine._pool.layers, engine.spec.layers, strict=True)
    engine._pool.layers = tuple(jax.tree.map(lambda x, lost=free[spec.group]: _lose(x, lost), layer) for layer, spec in layers)


@functools.partial(jax.jit, donate_argnums=0)
def _lose(pages, lost):
    return jnp.where(lost.reshape(-1, *[1] * (pages.ndim - 1)), jnp.nan, pages)
