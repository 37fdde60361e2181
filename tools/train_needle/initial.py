"""Initial weights. They are random, but some heads of the first layer are set to attend to previous tokens, which
shortens training."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.model.config import ModelConfig
from kvjax.model.layers import AttentionLayer
from kvjax.model.protocols import Params
from kvjax.models import decoder


def structured_params(config: ModelConfig, key: Array) -> Params:
    """Float32 weights for training from scratch.

    Matrices are normal with variance 1/fan-in; the two output projections are then multiplied by 0.1. Embedding rows
    have norm about 1, so that a copied token has a high logit through the tied head from the start. Biases of q and k
    are normal with standard deviation 0.5. The query heads of KV head 0 in layer 0 start as previous-token heads
    (`previous_token_heads`), because retrieval by key needs these.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: decoder.init_params(config, key)))
    keys = jax.random.split(key, len(named))
    leaves = [_leaf(path[-1].key, leaf.shape, k) for (path, leaf), k in zip(named, keys, strict=True)]
    params = jax.tree.unflatten(structure, leaves)
    first = previous_token_heads(config.layers[0].mixer, params["layers"][0])
    return params | {"layers": (first, *params["layers"][1:])}


def _leaf(name: str, shape: tuple[int, ...], key: Array) -> Float[Array, "..."]:
    if name.endswith("norm"):
        return jnp.ones(shape)
    if name == "v_bias":
        return jnp.zeros(shape)
    scale = {"q_bias": 0.5, "k_bias": 0.5}.get(name, 1 / math.sqrt(shape[-1]))
    return jax.random.normal(key, shape) * scale * (0.1 if name in ("o", "down") else 1.0)


def previous_token_heads(config: AttentionLayer, layer: Params) -> Params:
    """The layer with KV head 0 and its query heads set so that these attend 1, 2, ... G tokens back.

    Their biases are keys and queries that do not depend on the token, and whose four fastest RoPE pairs have the same
    phase at that distance. Their projections are multiplied by 0.1. RoPE pairs dimension i with i + D/2, as in the
    checkpoints of these families.
    """
    group, d = config.num_heads // config.num_kv_heads, config.head_dim
    pairs = np.arange(4)
    angle = config.rope.theta ** (-2.0 * pairs / d) * np.arange(1, group + 1)[:, None]
    k_bias, q_bias = np.zeros(d), np.zeros((group, d))
    k_bias[pairs] = 5
    q_bias[:, pairs], q_bias[:, pairs + d // 2] = 5 * np.cos(angle), -5 * np.sin(angle)
    return layer | {
        "k_bias": layer["k_bias"].at[:d].set(k_bias),
        "q_bias": layer["q_bias"].at[: group * d].set(q_bias.reshape(-1)),
        "k": layer["k"].at[:d].multiply(0.1),
        "q": layer["q"].at[: group * d].multiply(0.1),
    }
