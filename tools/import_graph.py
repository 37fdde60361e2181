"""Which module imports which: those of the four source folders, and those of tests/, benchmarks/, examples/ and tools/."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {"pallas_kernels": "pallas_kernels", "kvjax": "kvjax", "models": "kvjax.models", "serving": "kvjax.serving"}
"""Source folder -> the name that it is imported by."""
OUTSIDE = {"tests": "", "benchmarks": "benchmarks", "examples": "examples", "tools": ""}
"""Folders outside the package, likewise. The modules of tests/ and tools/ are imported by their names alone."""


def module_of(path: Path) -> str:
    """The name that a file is imported by. path: relative to the repository."""
    folder, *rest = path.with_suffix("").parts
    parts = [each for each in ((LAYERS | OUTSIDE)[folder], *rest) if each]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def files() -> dict[str, Path]:
    """Every module, with its file relative to the repository."""
    found = [path for folder in LAYERS | OUTSIDE for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_of(path.relative_to(ROOT)): path.relative_to(ROOT) for path in found if "node_modules" not in path.parts}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. path: relative to the repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """The modules that a file imports, wherever in it, or names as a string so as to import them."""
    known, own = files(), module_of(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] in known:
            names.add(node.value.partition(":")[0])
    return frozenset(name for name in names if name in known and name != own)


def importers() -> dict[str, set[str]]:
    """For each module, those that import it."""
    found: dict[str, set[str]] = {name: set() for name in files()}
    for name, path in files().items():
        for each in imports_of(path):
            found[each].add(name)
    return found


def reaches(graph: Mapping[str, Iterable[str]], start: Iterable[str]) -> set[str]:
    """`start`, and all that can be reached from it."""
    found, left = set(), list(start)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += graph.get(name, ())
    return found
