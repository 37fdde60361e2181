"""kvjax: long-context language-model inference in JAX.

The KV cache is a pool of pages and attention reads a list of blocks of them; a policy is a function that returns the list.

    import kvjax
    model = kvjax.load("needle")
    kvjax.generate(model, "The pass key for ...", policy="top:8", max_new_tokens=8)

Names are resolved on first use, so importing kvjax starts no device.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "CachedSequence": "kvjax.engine",
    "CausalLM": "kvjax.models",
    "Completion": "kvjax.generation",
    "Dense": "kvjax.policies",
    "DensePrefill": "kvjax.prefill",
    "Engine": "kvjax.engine",
    "MeanPooled": "kvjax.prefill",
    "MeasureOnceMaskOnce": "kvjax.prefill",
    "ModelConfig": "kvjax.model",
    "NotFinite": "kvjax.sampling",
    "OracleBlocks": "kvjax.prefill",
    "OutOfPages": "kvjax.cache",
    "Request": "kvjax.generation",
    "Sampling": "kvjax.sampling",
    "Score": "kvjax.scoring",
    "SinkWindow": "kvjax.prefill",
    "TopBlocks": "kvjax.policies",
    "VerticalSlash": "kvjax.prefill",
    "Window": "kvjax.policies",
    "generate": "kvjax.generation",
    "load": "kvjax.models",
    "memory_plan": "kvjax.memory",
    "run": "kvjax.generation",
    "run_batch": "kvjax.serving",
    "save": "kvjax.models",
    "score": "kvjax.scoring",
}
__all__ = sorted((*_HOMES, "__version__"))


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
