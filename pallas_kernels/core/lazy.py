"""Modules that are imported when they are first used. Tables name them: what a user types is looked up, and never part
of a path."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def names_in(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. homes: name -> the module that defines it, after a dot if it lies in the
    package."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name], package), name)

    return find


def module_of(package: str, modules: Mapping[str, str], word: str) -> ModuleType | None:
    """The module of a package that a table names for a word; None for other words."""
    return importlib.import_module(f"{package}.{modules[word]}") if word in modules else None
