"""Language models: families, one shared decoder, loading and saving in Hugging Face format.

Names are resolved on first use, so that importing this package loads neither transformers nor a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.core.lazy import names_in

if TYPE_CHECKING:
    from kvjax.models.causal_lm import CausalLM
    from kvjax.models.decoder import TransformerDecoder, causal_mix, init_params, param_shapes
    from kvjax.models.families import FAMILIES
    from kvjax.models.loading import load, read_config
    from kvjax.models.saving import save

__all__ = [
    "FAMILIES",
    "CausalLM",
    "TransformerDecoder",
    "causal_mix",
    "init_params",
    "load",
    "param_shapes",
    "read_config",
    "save",
]

_HOMES = {
    "CausalLM": ".causal_lm",
    "FAMILIES": ".families",
    "TransformerDecoder": ".decoder",
    "causal_mix": ".decoder",
    "init_params": ".decoder",
    "load": ".loading",
    "param_shapes": ".decoder",
    "read_config": ".loading",
    "save": ".saving",
}

__getattr__ = names_in(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
