"""The gated MLP. `Mlp.cuts` in `kvjax.model.layers` says how a mesh cuts its matrices."""

from __future__ import annotations

from jaxtyping import Array, Float

from kvjax.model.layers import Mlp
from kvjax.model.protocols import Params
from kvjax.models.mixers.tokens import Tokens
from kvjax.models.products import biases_of, norm_before, project


def gate_tokens(config: Mlp, params: Params, x: Float[Array, "B T E"], tokens: Tokens) -> Float[Array, "B T F"]:
    """The input of a layer's projection `down`. x: what the MLP reads, before its norm if it has one."""
    x, options = norm_before(x, params.get("mlp_norm"), tokens)
    options |= biases_of(params, config.bias, "gate", "up")
    return project(x, params["gate"], params["up"], **options, gated=config.activation)[0]
