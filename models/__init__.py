"""Language models: families, one shared decoder, loading and saving in Hugging Face format.

Names are resolved on first use, so that importing this package loads neither transformers nor a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "CausalLM": "causal_lm",
    "FAMILIES": "families",
    "TransformerDecoder": "decoder",
    "causal_mix": "decoder",
    "init_params": "decoder",
    "load": "loading",
    "param_shapes": "decoder",
    "read_config": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
