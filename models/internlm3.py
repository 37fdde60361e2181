"""InternLM3: Llama's layers with other names of two fields (`qkv_bias`, `bias`), as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.dense import DEFAULTS
from kvjax.models.family import Family

NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""Names of fields -> Llama's."""


def spread(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json's fields under Llama's names. ValueError where two names of a field disagree, and for biases in only
    some layers."""
    found = {name: value for name, value in fields.items() if name not in NAMES}
    for own, name in NAMES.items():
        if own not in fields:
            continue
        if name in found and found[name] != fields[own]:
            raise ValueError(f"config.json: {own} is {fields[own]!r:.200} and {name} {found[name]!r:.200}; they are one field: delete one")
        found[name] = fields[own]
    first, second = (bool(found.get(name)) for name in NAMES.values())
    if first != second:
        raise ValueError(
            f"unsupported config.json of an InternLM3ForCausalLM: qkv_bias is {first} and bias {second}; they must be alike, as "
            "transformers has it"
        )
    return found


FAMILY = Family(
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    heads_divide=True,
    spread=spread,
    own_code=frozenset(
        {"configuration_internlm3.InternLM3Config", "modeling_internlm3.InternLM3Model", "modeling_internlm3.InternLM3ForCausalLM"}
    ),
)
