"""Print the test files that a change can affect: `.venv/bin/pytest $(.venv/bin/python tools/affected.py)`.

A test file is affected if it changed, or imports, over any number of other modules, one that did. For a changed file
that is no Python, the tests count that name it. Names of the front door (`from kvjax import Engine`) lead to the module
that has them. The rules of the house (`tests/test_house.py`) are always among them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
from pathlib import Path

from import_graph import ROOT, files, importers, module_of, parsed, reaches

FRONT_DOOR = "kvjax"
HOUSE = Path("tests/test_house.py")


def changed(base: str) -> list[Path]:
    """Files that differ from a commit, and new ones that git does not ignore."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines() for each in commands]
    return [Path(line) for each in lines for line in each]


@functools.cache
def homes() -> dict[str, str]:
    """The module of each name of the front door."""
    tree = ast.parse((ROOT / "kvjax" / "__init__.py").read_text(encoding="utf-8"))
    (table,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"]
    return {name: module.partition(":")[0] for name, module in ast.literal_eval(table).items()}


def from_the_front_door(path: Path) -> set[str]:
    """The modules behind the names of the front door that a file uses."""
    of_name, tree = homes(), parsed(path)
    used = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == FRONT_DOOR for alias in node.names}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == FRONT_DOOR}
    return {of_name[name] for name in used if name in of_name}


def affected(paths: list[Path]) -> list[Path]:
    """The test files that changes of these files can affect, in order."""
    graph, known = importers(), files()
    # The front door names every module, so it is followed by name only.
    for each in graph.values():
        each.discard(FRONT_DOOR)
    for name, path in known.items():
        for home in from_the_front_door(path) if name != FRONT_DOOR else ():
            graph[home].add(name)
    modules = {name for name, path in known.items() if path in paths}
    others = [str(path) for path in paths if module_of_python(path) is None]
    tests = {name: path for name, path in known.items() if path.parts[0] == "tests" and others}
    named = {name for name, path in tests.items() if any(text in (ROOT / path).read_text(encoding="utf-8") for text in others)}
    found = {known[name] for name in reaches(graph, modules | named)}
    return sorted(path for path in found | {HOUSE} if path.name.startswith("test_"))


def module_of_python(path: Path) -> str | None:
    """The module of a Python file of ours; None for other files."""
    try:
        return module_of(path) if path.suffix == ".py" else None
    except KeyError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit to compare with; HEAD: what is not committed yet")
    print(*affected(changed(parser.parse_args().base)), sep="\n")


if __name__ == "__main__":
    main()
