"""The gated MLP."""

from __future__ import annotations

from jaxtyping import Array, Float

from kvjax.layers import Mlp
from kvjax.model import Params
from kvjax.models.mixers.tokens import Tokens
from kvjax.models.products import biases_of, norm_before, project


def gate_tokens(config: Mlp, params: Params, x: Float[Array, "B T E"], tokens: Tokens) -> Float[Array, "B T F"]:
    """The input of a layer's projection `down`. x: the output of its first half, before the norm."""
    options = norm_before(params.get("mlp_norm"), tokens) | biases_of(params, config.bias, "gate", "up")
    return project(x, params["gate"], params["up"], **options, gated=config.activation)[0]
