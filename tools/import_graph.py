"""Which module imports which: those of the four source folders, and those of tests/, benchmarks/, examples/ and tools/.

A file's full name is the one that it is imported by, but that of a package ends in `.__init__`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = {"pallas_kernels": "pallas_kernels", "kvjax": "kvjax", "models": "kvjax.models", "serving": "kvjax.serving"}
"""Source folder -> the name that it is imported by; lower layers first."""
OUTSIDE = {"tests": "", "benchmarks": "benchmarks", "examples": "examples", "tools": ""}
"""Folders outside the package, likewise. The modules of tests/ and tools/ are imported by their names alone."""
FRONT_DOOR = "kvjax"


def full_name(path: Path) -> str:
    """A file's full name. path: relative to the repository."""
    folder, *rest = path.with_suffix("").parts
    return ".".join(each for each in ((LAYERS | OUTSIDE)[folder], *rest) if each)


def module_of(path: Path) -> str:
    """The name that a file is imported by. path: relative to the repository."""
    return full_name(path).removesuffix(".__init__")


@functools.cache
def files() -> dict[str, Path]:
    """Every module, with its file relative to the repository."""
    found = [path for folder in LAYERS | OUTSIDE for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_of(path.relative_to(ROOT)): path.relative_to(ROOT) for path in found if "node_modules" not in path.parts}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. path: relative to the repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Every node, found once: all files together have more than a million, and several rules look at each."""
    return list(ast.walk(tree))


def imported(tree: ast.Module, name: str) -> list[tuple[str, int]]:
    """(module, line) of every import in a file of this full name, wherever it stands.

    `from a import b` counts as a.b when that is a module or a name of the front door, else as a.
    """
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(full if full in files() or base == FRONT_DOOR else base, node.lineno) for full in names]
    return found


def imports_in(tree: ast.Module, name: str) -> frozenset[str]:
    """Our modules that a file of this full name imports, or names as a string so as to import them.

    Imports for type checkers count, because a reader follows them. A name of the front door counts as the front door.
    """
    found = {module if module in files() else module.rpartition(".")[0] for module, _ in imported(tree, name)}
    strings = (node.value for node in nodes_of(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found |= {text.partition(":")[0] for text in strings}
    return frozenset(found & files().keys() - {name.removesuffix(".__init__")})


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Our modules that a file imports. path: relative to the repository."""
    return imports_in(parsed(path), full_name(path))


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


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Ways through the imports that come back to where they began: one for each import that closes one.

    The front door, which names every module, is left out.
    """
    found, finished = [], {FRONT_DOOR}

    def search(way: list[str]) -> None:
        for module in sorted(graph.get(way[-1], ())):
            if module in way:
                found.append([*way[way.index(module) :], module])
            elif module not in finished:
                search([*way, module])
        finished.add(way[-1])

    for module in sorted(graph):
        if module not in finished:
            search([module])
    return found
