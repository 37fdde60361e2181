"""The families that exist, by `model_type`. A new family is a file beside llama.py and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import llama, qwen2, qwen3
from kvjax.models.family import Family

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (llama, qwen2, qwen3)}


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that config.json's `architectures` and `model_type` name. Either may be absent; they must not disagree.

    Raises ValueError for an architecture or model_type that is not known, naming those that are.
    """
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES.values())
    if not architectures and model_type is None:
        raise ValueError(f"config.json names neither architectures nor model_type; supported: {known}")
    if architectures and (len(architectures) != 1 or architectures[0] not in by_architecture):
        raise ValueError(f"config.json: architectures is {architectures}; supported: {known}")
    if model_type is not None and model_type not in FAMILIES:
        raise ValueError(f"config.json: model_type is {model_type!r}; supported: {known}")
    family = by_architecture[architectures[0]] if architectures else FAMILIES[model_type]
    if model_type is not None and family is not FAMILIES[model_type]:
        raise ValueError(f"config.json: architectures is {architectures} but model_type is {model_type!r}; they must name one family")
    return family
