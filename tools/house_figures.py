"""Print how large the house is, and how far a reader has to go: the figures that its rules and its redesign are held
to.

    .venv/bin/python tools/house_figures.py

Lines and statements of the package (kvjax, models, pallas_kernels, serving), of what lies beside it and of the tests;
circles of imports, those for type checkers counted; what `kvjax.generate` loads; and the files that the first decode
step of a shape runs, tracing included.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from import_graph import LAYERS, ROOT, circles, files, imports_of, parsed
from rich.console import Console
from rich.table import Table

TARGETS = {
    "lines of the package": 56_000,
    "statements of the package": 30_500,
    "lines with benchmarks/, tools/ and examples/": 63_000,
    "lines of tests": 58_000,
    "circles of imports": 0,
    "modules of kvjax that generate loads": 75,
    "their lines": 13_000,
    "files of the first decode step, above the kernels": 24,
    "lines of those files": 6_000,
    "folders and files at the root of kvjax/": 14,
}

GENERATES = """
import sys, kvjax
kvjax.generate(kvjax.load("needle"), [1, 2, 3] * 20, policy="top:2", max_new_tokens=2)
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "kvjax"))
"""
STEPS = """
import sys, kvjax
scheduler = kvjax.Scheduler(kvjax.Engine(kvjax.load("needle"), "top:2", pages=16))
handle = scheduler.submit(kvjax.Request([1, 2, 3] * 20, kvjax.Sampling(max_new_tokens=4)))
seen, launch = set(), scheduler._launch

def watched(call):
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        return call()
    finally:
        sys.setprofile(None)

scheduler._launch = lambda: watched(launch)  # after the prompt, which the same step reads
while not handle.started:
    scheduler.step()
watched(scheduler.step)  # reads the first one
print(*sorted(seen), sep="\\n")
"""


def lines_of(paths: list[Path]) -> int:
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def statements_of(paths: list[Path]) -> int:
    """Statements, without docstrings."""
    found = (node for path in paths for node in ast.walk(parsed(path)) if isinstance(node, ast.stmt))
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in found)


def said_by(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def figures() -> dict[str, int]:
    folder = {
        name: [path for path in files().values() if path.parts[0] == name] for name in (*LAYERS, "tests", "benchmarks", "tools", "examples")
    }
    package = [path for name in LAYERS for path in folder[name]]
    loaded = [files()[name] for name in said_by(GENERATES) if name in files()]
    ran = {Path(name).resolve() for name in said_by(STEPS)}
    stepped = [path for path in package if (ROOT / path).resolve() in ran and path.parts[0] != "pallas_kernels"]
    root = [
        path for path in (ROOT / "kvjax").iterdir() if not path.is_symlink() and not path.name.startswith("__") and path.suffix != ".typed"
    ]
    return {
        "lines of the package": lines_of(package),
        "statements of the package": statements_of(package),
        "lines with benchmarks/, tools/ and examples/": lines_of(package + folder["benchmarks"] + folder["tools"] + folder["examples"]),
        "lines of tests": lines_of(folder["tests"]),
        "circles of imports": len(circles({name: imports_of(path) for name, path in files().items() if path.parts[0] in LAYERS})),
        "modules of kvjax that generate loads": len(loaded),
        "their lines": lines_of(loaded),
        "files of the first decode step, above the kernels": len(stepped),
        "lines of those files": lines_of(stepped),
        "folders and files at the root of kvjax/": len(root),
    }


def main() -> None:
    table = Table("figure", "now", "at most")
    for name, value in figures().items():
        table.add_row(name, f"{value:,}", f"{TARGETS[name]:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
