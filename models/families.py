"""The model families, by `model_type`. A new family is a file beside llama.py and an entry here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.models.family import Family, Within
from pallas_kernels.core.lazy import module_of

_MODULES = {
    name: {"qwen3_5_text": "qwen3_5", "gemma3_text": "gemma3"}.get(name, name)
    for name in (
        *("llama", "qwen2", "qwen3", "qwen3_5_text", "gemma3_text", "deepseek_v32"),
        *("mistral", "ministral", "smollm3", "granite", "seed_oss", "internlm3", "olmo2", "olmo3", "phi3"),
        *("gemma", "gemma2", "cohere", "cohere2", "helium", "ernie4_5", "glm", "glm4"),
    )
}
"""The files of families, by `model_type`."""


class _Families(Mapping[str, Family]):
    """Families by `model_type`. A family's file is imported when it is looked up."""

    def __getitem__(self, model_type: str) -> Family:
        if (module := module_of(__package__, _MODULES, model_type)) is None:
            raise KeyError(model_type)
        return module.FAMILY

    def __contains__(self, model_type: object) -> bool:
        return model_type in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


FAMILIES = _Families()


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that config.json's `architectures` and `model_type` name. Either may be absent; they must not
    disagree. In a larger model `text_config` names the family, where several are possible.

    ValueError for an unknown architecture or model_type; it names the known ones.
    """
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        named = FAMILIES[model_type]
        if not fields.get("architectures") or fields["architectures"] == [named.architecture]:
            return named
    names = [(family.architecture, family.model_type) for family in FAMILIES.values()]
    names += list(dict.fromkeys((each.architecture, each.model_type) for family in FAMILIES.values() for each in family.within))
    by_architecture = dict(names)
    types = set(by_architecture.values())
    architectures = fields.get("architectures")
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
    from kvjax.models.missing import nearest

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
    """The larger model that config.json's fields describe, of which the family's model is the text part; None: there is
    none."""
    if family.model_type == fields.get("model_type"):
        return None
    names = (fields.get("model_type"), *(fields.get("architectures") or ()))
    return next((within for within in family.within if within.model_type in names or within.architecture in names), None)
