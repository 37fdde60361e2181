"""GLM-4-0414 (`glm4`, also GLM-Z1): GLM-4's layers with norms after attention and MLP, too.

Details as in transformers' `Glm4ForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.model.layers import LayerConfig, RopeScaling
from kvjax.models import glm


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    return tuple(dataclasses.replace(layer, post_norms=True) for layer in glm.layers_of(read, theta, scaling))


FAMILY = dataclasses.replace(
    glm.FAMILY,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    layers_of=layers_of,
    layer_tensors={"attn_post_norm": "post_self_attn_layernorm.weight", "mlp_post_norm": "post_mlp_layernorm.weight"},
)
