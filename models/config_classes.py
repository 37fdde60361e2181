"""What transformers reads of a config.json: its configuration classes, and the source of its models. Both are looked at
only for a field that kvjax does not know."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.text.transformers_import import import_transformers

SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")
"""Files of transformers that read fields of any model's configuration, whether its class lists them or not."""


COMPUTED_AS = {"internlm3": "llama"}
"""Families that earlier releases of transformers have no class for, and what later ones compute them as."""


def unread(model_type: str, fields: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Fields that kvjax does not know: what is wrong with each that transformers reads, and the names of the others.

    transformers reads a field if the family's configuration class has it, or changes with it, or if the source of the
    model or of `SHARED` names it. A field with the class's default value changes nothing, so it is among the others;
    where the class does not list it, the source takes null, false and 0 for absent.
    """
    problems, ignored = {}, []
    for name, value in fields.items():
        with _quiet():
            wrong = _problem(model_type, name, value)
        if wrong is None:
            ignored.append(name)
        else:
            problems[name] = wrong
    return problems, ignored


def _problem(model_type: str, name: str, value: Any) -> str | None:
    found = _class_of(model_type)
    if found is None:
        return f"not known for {model_type}, and neither is {model_type} for the installed transformers, so it may change what is computed"
    of_class, plain = found
    said = f"{of_class.__name__} of transformers reads it, and kvjax does not"
    if name in plain.__dict__:
        default = plain.__dict__[name]
        return None if _same(value, default) else f"{said}; supported: {default!r:.200}"
    try:
        given = of_class(**{name: value})
    except Exception:  # a class may check a field in any way
        return said
    changed = {other for other in plain.__dict__.keys() | given.__dict__.keys() if given.__dict__.get(other) != plain.__dict__.get(other)}
    if any(other != name and not other.startswith("_") for other in changed):  # those that begin with _ say how a model is run
        return said
    reading = next(
        (
            file
            for file, text in _sources(of_class).items()
            if re.search(rf"""config\.{re.escape(name)}\b|["']{re.escape(name)}["']""", text)
        ),
        None,
    )
    return None if reading is None or value in (None, False, 0) else f"{reading} of transformers reads it, and kvjax does not"


@functools.cache
def _sources(of_class: type) -> dict[str, str]:
    """The text of the files that compute a model, by their names."""
    folder = Path(import_transformers().__file__).parent
    own = of_class.__module__.removeprefix("transformers.").replace(".configuration_", ".modeling_").replace(".", "/") + ".py"
    return {Path(name).name: (folder / name).read_text(encoding="utf-8") for name in (own, *SHARED) if (folder / name).is_file()}


def _same(value: Any, default: Any) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


@functools.cache
def _class_of(model_type: str) -> tuple[type, Any] | None:
    """The configuration class, and an object with its defaults; None: transformers has none of that name."""
    classes = import_transformers().CONFIG_MAPPING
    if model_type not in classes:
        model_type = COMPUTED_AS.get(model_type)
    if model_type not in classes:
        return None
    return classes[model_type], classes[model_type]()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns of values that are tried here."""
    quiet = logging.getLogger("transformers")
    before, quiet.disabled = quiet.disabled, True
    try:
        yield
    finally:
        quiet.disabled = before
