"""Names of modules that are gone: an import of one is answered by an error that says what it is called now."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


class Renamed:
    """A finder of modules, asked after all others."""

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for a former name; knows no other module."""
        if name in self._names:
            now, colon, more = self._names[name].partition(":")
            raise ModuleNotFoundError(f"{name} is {now} now{colon}{more}")


def answer(names: Mapping[str, str]) -> None:
    """Answer imports of former modules. names: former name -> the new one, and after a colon what else to say."""
    sys.meta_path.append(Renamed(names))
