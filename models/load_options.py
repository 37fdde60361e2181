"""Options of `load`: names of dtypes, and hints for options that other libraries have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Never

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from kvjax.models.tensors import DTYPES

DtypeName = Literal["auto", "float32", "fp32", "float", "bfloat16", "bf16", "float16", "fp16", "half"]
"""Names that `dtype` may have; "auto" is the stored type."""

_FULL_NAMES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

_HINTS = {
    "torch_dtype": 'it is called dtype here: kvjax.load(..., dtype="bfloat16")',
    "device": 'weights go to JAX\'s default device: choose it first, jax.config.update("jax_default_device", jax.devices()[0])',
    "device_map": "leave it out: weights go to one device, JAX's default",
    "revision": "download it with `hf download ID --revision REVISION` and give load the folder",
    "trust_remote_code": "leave it out: code of a checkpoint is never run",
    "attn_implementation": "leave it out: policies choose what attention reads, as in kvjax.Engine(model, policy='top:8')",
    "adapter": "lora='DIR' or 'DIR:0.5' merges an adapter while loading",
    "load_in_8bit": "weights='int8' or weights='fp8' packs them while loading",
    "load_in_4bit": "weights='int4' packs them while loading",
    "quantization_config": "weights='int8', 'fp8' or 'int4' packs them while loading",
}
_HINTS |= dict.fromkeys(("adapters", "adapter_name", "adapter_path", "lora_path", "peft"), _HINTS["adapter"])
_HINTS |= {"map_location": _HINTS["device"]}


def named_dtype(dtype: DTypeLike | DtypeName) -> np.dtype | Literal["auto"]:
    """The dtype that `load` got, by name, short name or type; "auto" is returned unchanged.

    ValueError for anything but float32, bfloat16 and float16.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return "auto"
    try:
        found = jnp.dtype(_FULL_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES.values():
        known = ", ".join(DTYPES.values())
        raise ValueError(f"dtype is {dtype!r}; supported: {known} (fp32, fp16, bf16 and half for short), and 'auto', the stored type")
    return found


def refuse(options: Mapping[str, Any]) -> Never:
    """TypeError that names the first unknown option of `load` and says what to do instead."""
    name = next(iter(options))
    raise TypeError(
        f"kvjax.load has no option {name!r}: {_HINTS.get(name, 'there are dtype, max_positions, tokenizer, mesh, weights and lora')}"
    )
