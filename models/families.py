"""The model families, by `model_type`. A new family is a file beside llama.py and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import (
    cohere,
    cohere2,
    deepseek_v32,
    ernie4_5,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    granite,
    helium,
    internlm3,
    llama,
    ministral,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    seed_oss,
    smollm3,
)
from kvjax.models.family import Family, Within
from kvjax.models.missing import nearest

_MODULES = (
    *(llama, qwen2, qwen3, qwen3_5, gemma3, deepseek_v32),
    *(mistral, ministral, smollm3, granite, seed_oss, internlm3, olmo2, olmo3, phi3),
    *(gemma, gemma2, cohere, cohere2, helium, ernie4_5, glm, glm4),
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that config.json's `architectures` and `model_type` name. Either may be absent; they must not disagree. In a larger model
    `text_config` names the family, where several are possible.

    ValueError for an unknown architecture or model_type; it names the known ones.
    """
    names = [(family.architecture, family.model_type) for family in FAMILIES.values()]
    names += list(dict.fromkeys((each.architecture, each.model_type) for family in FAMILIES.values() for each in family.within))
    by_architecture = dict(names)
    types = set(by_architecture.values())
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    known = ", ".join(f"{architecture} ({model_type})" for architecture, model_type in names)
    if not architectures and model_type is None:
        raise ValueError(f"config.json names neither architectures nor model_type; supported: {known}")
    if architectures and not (isinstance(architectures, list | tuple) and all(isinstance(name, str) for name in architectures)):
        raise ValueError(f"config.json: architectures is {architectures!r:.200}; it must be a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"config.json: model_type is {model_type!r:.200}; it must be a name")
    if architectures and (len(architectures) != 1 or architectures[0] not in by_architecture):
        raise ValueError(
            f"config.json: architectures is {architectures!r:.200}; {_near(model_type, *architectures) or f'supported: {known}'}"
        )
    if model_type is not None and model_type not in types:
        raise ValueError(f"config.json: model_type is {model_type!r:.200}; {_near(model_type) or f'supported: {known}'}")
    of_architecture = by_architecture[architectures[0]] if architectures else model_type
    if model_type is not None and model_type != of_architecture:
        raise ValueError(
            f"config.json: architectures is {architectures!r:.200} but model_type is {model_type!r:.200}; they must name one family"
        )
    return FAMILIES.get(of_architecture) or _of_text(of_architecture, fields)


def _near(*names: str | None) -> str:
    """For an error: the nearest family, and what differs; empty for names that are not known."""
    found = [said for name in names if name is not None and name not in FAMILIES and (said := nearest(name))]
    return f"{found[0]} (docs/checkpoints.md lists what loads)" if found else ""


def _of_text(model_type: str, fields: Mapping[str, Any]) -> Family:
    """The family of a larger model's text part. ValueError where `text_config` names none that can be in it."""
    possible = [family for family in FAMILIES.values() if any(within.model_type == model_type for within in family.within)]
    if len(possible) == 1:
        return possible[0]
    text, default = fields.get("text_config"), next(each.text for each in possible[0].within if each.model_type == model_type)
    named = text.get("model_type", default) if isinstance(text, Mapping) else default
    found = [family for family in possible if named in (family.model_type, *family.text_types)]
    if not found:
        known = ", ".join(family.model_type for family in possible)
        raise ValueError(f"config.json: model_type of text_config is {named!r:.200}; supported in a {model_type}: {known}")
    return found[0]


def wrapper_of(fields: Mapping[str, Any], family: Family) -> Within | None:
    """The larger model that config.json's fields describe, of which the family's model is the text part; None: there is none."""
    if family.model_type == fields.get("model_type"):
        return None
    names = (fields.get("model_type"), *(fields.get("architectures") or ()))
    return next((within for within in family.within if within.model_type in names or within.architecture in names), None)
