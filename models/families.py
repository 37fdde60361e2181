"""The model families, by `model_type`. A new family is a file beside llama.py and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import cohere, cohere2, deepseek_v32, ernie4_5, gemma, gemma2, gemma3, helium, llama, qwen2, qwen3, qwen3_5
from kvjax.models.family import Family

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, qwen2, qwen3, qwen3_5, gemma, gemma2, gemma3, deepseek_v32, helium, ernie4_5, cohere, cohere2)
}


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that config.json's `architectures` and `model_type` name. Either may be absent; they must not disagree.

    ValueError for an unknown architecture or model_type; it names the known ones.
    """
    names = [(family.architecture, family.model_type, family) for family in FAMILIES.values()]
    names += [(family.within.architecture, family.within.model_type, family) for family in FAMILIES.values() if family.within]
    by_architecture = {architecture: (model_type, family) for architecture, model_type, family in names}
    by_type = {model_type: family for _, model_type, family in names}
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    known = ", ".join(f"{architecture} ({model_type})" for architecture, model_type, _ in names)
    if not architectures and model_type is None:
        raise ValueError(f"config.json names neither architectures nor model_type; supported: {known}")
    if architectures and not (isinstance(architectures, list | tuple) and all(isinstance(name, str) for name in architectures)):
        raise ValueError(f"config.json: architectures is {architectures!r:.200}; it must be a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"config.json: model_type is {model_type!r:.200}; it must be a name")
    if architectures and (len(architectures) != 1 or architectures[0] not in by_architecture):
        raise ValueError(f"config.json: architectures is {architectures!r:.200}; supported: {known}")
    if model_type is not None and model_type not in by_type:
        raise ValueError(f"config.json: model_type is {model_type!r:.200}; supported: {known}")
    of_architecture, family = by_architecture[architectures[0]] if architectures else (model_type, by_type[model_type])
    if model_type is not None and model_type != of_architecture:
        raise ValueError(
            f"config.json: architectures is {architectures!r:.200} but model_type is {model_type!r:.200}; they must name one family"
        )
    return family
