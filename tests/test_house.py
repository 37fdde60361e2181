"""The rules of the repository itself: layers, names, sizes, start-up, and the lists in pyproject.toml, the lock,
Makefile and BUILD."""

import ast
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from import_graph import LAYERS, ROOT, circles, files, full_name, imported, imports_in, imports_of, module_of, nodes_of, parsed
from packaging.requirements import Requirement

from pallas_kernels.core.optional import EXTRAS

FOLDERS = LAYERS | {"benchmarks": "benchmarks"}  # benchmarks import every layer, and are in no wheel
RANKS = {name: rank for rank, name in enumerate(FOLDERS.values())}
DOORS = {"kvjax.__init__", "kvjax.__main__"}  # they name what is above them as strings
MADE_WITH = (*EXTRAS, "docs", "test")  # the extras of `make`'s environment
BRING_YOUR_OWN = {"llama_cpp", "lm_eval", "torch"}  # imported only by an adapter, or as a baseline, for people who have it
MAX_FILE_LINES, MAX_FUNCTION_LINES = 1000, 120
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

CLIENTS = ROOT / "serving" / "clients"  # clients in other languages, and READMEs of all: no part of a Python package
SOURCES = [path for path in files().values() if path.parts[0] in LAYERS]
SCRIPTS = [path for path in files().values() if path.parts[0] == "benchmarks"]
MODULES = {module_of(path) for path in SOURCES + SCRIPTS}


@pytest.fixture(scope="module", autouse=True)
def trees_that_stay():
    """More than a million nodes are kept for all rules, none in a circle. The collector would look at them again and
    again."""
    gc.disable()
    yield
    parsed.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def check_each(paths: list[Path], faults_of: Callable[[Path], Iterable]) -> None:
    """No file has faults. All files are one test: a test of each costs more than what it checks."""
    assert {str(path): found for path in paths if (found := list(faults_of(path)))} == {}


def layer(module: str) -> str | None:
    """The layer that a module belongs to, by its longest prefix; None for other people's modules."""
    prefixes = [name for name in RANKS if module == name or module.startswith(f"{name}.")]
    return max(prefixes, key=len, default=None)


def for_type_checkers(node: ast.stmt) -> bool:
    """Whether this is `if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def upward_imports(tree: ast.Module, name: str) -> list[str]:
    """What a file imports from a layer above its own, or names as a string so as to import it.

    The front door shows the names of all layers to type checkers, and only to them.
    """
    own = RANKS[layer(name)]
    if name == "kvjax.__init__":
        tree = ast.Module([node for node in tree.body if not for_type_checkers(node)], [])
    found = [(module, line) for module, line in imported(tree, name) if RANKS.get(layer(module), -1) > own]
    # A name of the front door, `from kvjax import load`, may live in any layer.
    if own <= RANKS["kvjax.models"]:
        imports = imported(tree, name)
        found += [(module, line) for module, line in imports if module.startswith("kvjax.") and module not in MODULES]
    if name not in DOORS:
        strings = [(node.value, node.lineno) for node in nodes_of(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = [(text, line) for text, line in strings if re.fullmatch(r"(kvjax|pallas_kernels)(\.\w+)+", text)]
        found += [(text, line) for text, line in named if RANKS[layer(text)] > own]
    return [f"line {line}: {module}" for module, line in found]


def test_imports_point_one_way():
    check_each(SOURCES + SCRIPTS, lambda path: upward_imports(parsed(path), full_name(path)))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pallas_kernels.core.merge", "import kvjax"),
        ("pallas_kernels.core.merge", "def f():\n    from kvjax.cache import arrays"),
        ("kvjax.model.config", "from kvjax.models.decoder import TransformerDecoder"),
        ("kvjax.engine.engine", "from kvjax import models"),
        ("kvjax.generation", "from . import models"),
        ("kvjax.cache.arrays", "from ..models import load"),
        ("kvjax.engine.engine", "from kvjax import load"),
        ("kvjax.engine.engine", "import importlib\nimportlib.import_module('kvjax.models.loading')"),
        ("kvjax.models.loading", "import kvjax.serving.cli"),
        ("kvjax.serving.cli.bench", "from benchmarks.run import main"),
        ("kvjax.__init__", "from kvjax.models import load"),
        ("kvjax.__main__", "from kvjax.serving.cli import main"),
        ("kvjax.__init__", "if TYPE_CHECKING:\n    pass\nfrom kvjax.models import load"),
        ("kvjax.engine.engine", "if TYPE_CHECKING:\n    from kvjax.models import load"),
    ],
)
def test_an_upward_import_is_found(name, code):
    assert upward_imports(ast.parse(code), name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kvjax.engine.engine", "import kvjax.model.config\nfrom pallas_kernels.core.merge import merge_attention"),
        ("kvjax.models.loading", "from kvjax.model.config import ModelConfig\nfrom .decoder import init_params"),
        ("kvjax.serving.cli", "from kvjax import load"),
        ("kvjax.__init__", "HOMES = {'load': 'kvjax.models'}"),
        ("kvjax.__main__", "import importlib\nimportlib.import_module('kvjax.serving.cli').main()"),
        ("kvjax.__init__", "if TYPE_CHECKING:\n    from kvjax.models import load"),
    ],
)
def test_a_downward_import_is_allowed(name, code):
    assert not upward_imports(ast.parse(code), name)


HARNESS = ("pallas_kernels.bench", "kvjax.serving.bench", "kvjax.serving.cli.bench", "benchmarks")
STILL = {f"kvjax.serving.cli.{name}" for name in ("cost", "doctor", "recall")}


def test_only_benchmarks_import_the_harness():
    """And, still, `STILL`: names of shapes and policies, and the rate of a copy."""
    of_it = {module for module in MODULES if module.startswith(HARNESS[:2])}
    users = {name for name, found in imports_of_the_sources().items() if found & of_it and not name.startswith(HARNESS)}
    assert users == STILL


@functools.cache
def imports_of_the_sources() -> dict[str, frozenset[str]]:
    return {module_of(path): imports_of(path) for path in SOURCES + SCRIPTS}


def test_imports_make_no_circle():
    assert not circles(imports_of_the_sources())


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kvjax.engine.engine", "import kvjax.cost_model"),
        ("kvjax.engine.engine", "from kvjax.cost_model.auto import Auto"),
        ("kvjax.engine.engine", "if TYPE_CHECKING:\n    from kvjax.scheduler.scheduler import Scheduler"),
        ("kvjax.engine.engine", "def f():\n    from kvjax.cost_model import auto"),
        ("kvjax.engine.engine", "import importlib\nimportlib.import_module('kvjax.cost_model.auto')"),
        ("kvjax.policies.decode.naming", "from kvjax.cost_model.auto import Auto"),
        ("kvjax.policies.prefill.naming", "def f():\n    from kvjax.cost_model.auto import AutoPrefill"),
        ("kvjax.cache.spec", "from kvjax.engine.engine import Engine"),
        ("kvjax.cache.spec", "from ..generation import generate"),
        ("kvjax.registry", "from kvjax.policies.decode.naming import parse"),
        ("kvjax.models.saving", "def f():\n    from kvjax.models import loading\n    from kvjax.models.causal_lm import CausalLM"),
        ("pallas_kernels.core.pages", "from pallas_kernels.attention.gather_attention import gather_attention"),
    ],
)
def test_a_circle_of_imports_is_found(name, code):
    graph = imports_of_the_sources()
    assert circles(graph | {name: graph[name] | imports_in(ast.parse(code), name)})


def test_imports_that_make_no_circle_are_allowed():
    code = {
        "kvjax.engine.engine": "if TYPE_CHECKING:\n    from kvjax.engine.memory import MemoryPlan\nimport kvjax.model.config",
        "kvjax.generation": "from kvjax.engine.engine import Engine\nfrom kvjax import Request",
        "kvjax.__init__": "from kvjax.generation import run\nfrom kvjax.engine.engine import Engine",
    }
    assert not circles({name.removesuffix(".__init__"): imports_in(ast.parse(text), name) for name, text in code.items()})


def environment_reads(tree: ast.Module) -> list[str]:
    """Every use of the environment, except a statement that only sets a variable for somebody else's library."""
    set_only = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            set_only.append(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") == "setdefault":
            set_only.append(node.value.func.value)
    names = {"environ", "environb", "getenv", "getenvb"}
    attributes = [node for node in nodes_of(tree) if isinstance(node, ast.Attribute) and node.attr in names and node not in set_only]
    imports = [node for node in nodes_of(tree) if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}]
    return [f"line {node.lineno}" for node in attributes + imports]


def test_no_environment_variable_is_read():
    check_each(SOURCES, lambda path: environment_reads(parsed(path)))


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("os.environ['A']", 1),
        ("os.environ.get('A')", 1),
        ("a = os.environ.setdefault('A', '1')", 1),
        ("os.getenv('A')", 1),
        ("'A' in os.environ", 1),
        ("from os import environ", 1),
        ("os.environ['A'] = '1'", 0),
        ("os.environ.setdefault('A', '1')", 0),
    ],
)
def test_a_read_of_the_environment_is_found(code, reads):
    assert len(environment_reads(ast.parse(code))) == reads


def functions_of(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def hidden_modules(tree: ast.Module, path: Path) -> list[str]:
    """Modules that a function hides: one of the file's own name, or one in its package."""
    hidden = functions_of(tree) & {path.stem}
    if path.name == "__init__.py":
        package = module_of(path)
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names if f"{node.module}.{alias.name}" not in MODULES}
        hidden |= {each for each in names | functions_of(tree) if f"{package}.{each}" in MODULES}
    return sorted(hidden)


def test_no_module_carries_the_name_of_its_function():
    """`from a.b import b` must not hide the module a.b."""
    check_each(SOURCES, lambda path: hidden_modules(parsed(path), path))


def test_front_door_hides_no_module():
    import kvjax

    modules = {name.split(".")[1] for name in MODULES if name.startswith("kvjax.")}
    assert not set(kvjax.__all__) & modules


@pytest.mark.parametrize("name", ["kvjax", "kvjax.models", "kvjax.serving", "kvjax.policies.decode", "kvjax.policies.prefill"])
def test_type_checkers_see_the_names_that_are_resolved_on_first_use(name):
    """Each is imported under TYPE_CHECKING from where it is defined, and listed in a literal `__all__`."""
    package = importlib.import_module(name)
    tree = parsed(next(path for path in SOURCES if full_name(path) == f"{name}.__init__"))
    (block,) = [node for node in tree.body if for_type_checkers(node)]
    seen = {alias.asname or alias.name: (node.module, alias.name) for node in block.body for alias in node.names}
    for each, (home, its_name) in seen.items():
        module = f"{home}.{its_name}"
        defined = importlib.import_module(module) if module in MODULES else getattr(importlib.import_module(home), its_name)
        assert getattr(package, each) is defined
    (listed,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    names = {each for each in seen if f"{name}.{each}" not in MODULES}
    listed = set(ast.literal_eval(listed))
    assert names == set(package._HOMES) == (names & listed)
    assert [each for each in listed if not hasattr(package, each)] == []
    assert set(seen) <= set(dir(package))


def too_large(path: Path) -> list[str]:
    """The file, if it is too long, and its functions that are."""
    lines = len((ROOT / path).read_text().splitlines())
    functions = [node for node in nodes_of(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [f"{lines} lines"] if lines > MAX_FILE_LINES else []
    return found + [node.name for node in functions if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES]


def test_files_and_functions_stay_small():
    check_each(list(files().values()), too_large)


def test_what_is_too_large_or_hides_a_module_is_found(tmp_path):
    long, cache = tmp_path / "long.py", Path("kvjax/cache")
    long.write_text("def long():\n" + "    pass\n" * MAX_FILE_LINES)
    assert too_large(long) == [f"{MAX_FILE_LINES + 1} lines", "long"]
    with pytest.raises(AssertionError, match=r"long\.py"):
        check_each([long], too_large)
    assert hidden_modules(parsed(long), cache / "long.py") == ["long"]
    assert hidden_modules(ast.parse("def pool():\n    pass"), cache / "__init__.py") == ["pool"]


# Start-up


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_importing_starts_no_device_and_loads_nothing_heavy():
    """A platform that does not exist makes any use of a device fail, as the second process shows."""
    code = """
import sys, kvjax, kvjax.models, kvjax.serving, kvjax.serving.cli, pallas_kernels
print(*sorted({"transformers", "torch", "matplotlib", "orbax"} & set(sys.modules)))
for name in kvjax.__all__:
    getattr(kvjax, name)
print(*sorted({"transformers", "torch", "matplotlib", "orbax"} & set(sys.modules)))
"""
    ours = run_python(code, JAX_PLATFORMS="no_such_platform")
    assert (ours.returncode, ours.stdout) == (0, "\n\n"), ours.stdout + ours.stderr
    control = run_python("import jax; jax.numpy.zeros(1)", JAX_PLATFORMS="no_such_platform")
    assert control.returncode != 0
    assert "no_such_platform" in control.stderr


def test_help_answers_within_two_seconds():
    command = [str(Path(sys.executable).parent / "kvjax"), "--help"]
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert "batch" in finished.stdout
    assert min(seconds) < 2


# pyproject.toml


def test_every_package_folder_is_listed():
    folders = {module_of(path) for path in SOURCES if path.name == "__init__.py"}
    assert folders == set(PYPROJECT["tool"]["setuptools"]["packages"])
    in_packages = {full_name(path).rpartition(".")[0] for path in SOURCES}
    assert in_packages <= folders, "a folder of source files lacks __init__.py"
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"": "imports"}
    for folder, name in FOLDERS.items():
        linked = ROOT / "imports" / name.replace(".", "/") / "__init__.py"
        assert linked.resolve() == (ROOT / folder / "__init__.py").resolve()


def test_every_data_file_is_shipped_and_every_pattern_finds_one():
    package_data = PYPROJECT["tool"]["setuptools"]["package-data"]
    shipped = set()
    for package, patterns in package_data.items():
        base = layer(package)
        folder = ROOT / next(f for f, name in LAYERS.items() if name == base) / Path(*package.removeprefix(base).split("."))
        for pattern in patterns:
            files = set(folder.glob(pattern))
            assert files, f"{package}: no file is called {pattern}"
            shipped |= files
    present = {
        path
        for folder in LAYERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts and CLIENTS not in path.parents
    }
    assert present == shipped


def test_type_checkers_are_told_that_the_packages_have_types():
    for package in ("kvjax", "pallas_kernels"):
        assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][package]


# Reading what is installed takes a second.
installed_packages = functools.cache(importlib.metadata.packages_distributions)


def packages_of(lines: list[str]) -> set[str]:
    """The import names of these requirements, of those that are installed."""
    names = {normal(Requirement(line).name) for line in lines}
    return {package for package, homes in installed_packages().items() if names & set(map(normal, homes))}


@functools.cache
def core_packages() -> set[str]:
    return packages_of(PYPROJECT["project"]["dependencies"])


def undeclared_imports(tree: ast.Module, name: str) -> list[str]:
    """Imports of packages that pyproject.toml does not declare, and of an extra's package where an import of the module
    runs them.

    An extra's package is imported inside a function, or for type checkers.
    """
    core, extra = core_packages(), {package for packages in EXTRAS.values() for package in packages}
    inside = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_type_checkers(node)]
    late = {line for node in inside for line in range(node.lineno, node.end_lineno + 1)}
    found = []
    for module, line in imported(tree, name):
        top = module.split(".")[0]
        known = layer(module) or top in sys.stdlib_module_names or top in BRING_YOUR_OWN or top in core
        if not (known or (top in extra and line in late)):
            found.append(f"line {line}: {top}")
    return found


def test_what_is_imported_is_declared():
    check_each(SOURCES, lambda path: undeclared_imports(parsed(path), full_name(path)))


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import numpy\nfrom scipy import stats\nimport kvjax.model.config, json", 0),
        ("import polars", 1),
        ("def f():\n    import polars", 1),
        ("import matplotlib", 1),
        ("from pandas import DataFrame", 1),
        ("class A:\n    import matplotlib", 1),
        ("def f():\n    import matplotlib.ticker", 0),
        ("if TYPE_CHECKING:\n    from matplotlib.axes import Axes", 0),
    ],
)
def test_an_import_of_what_may_not_be_installed_is_found(code, count):
    assert len(undeclared_imports(ast.parse(code), "kvjax.engine.engine")) == count


def test_extras_are_those_of_pyproject():
    """What `needs_extras` looks for is what `pip install 'kvjax[...]'` brings."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert set(packages) <= packages_of(extras[extra])
    assert "kvjax[eval]" in extras["notebooks"]


# requirements.lock


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


LOCKED = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
VERSIONS = dict(line.partition("==")[::2] for line in LOCKED)


def test_lock_holds_exact_versions_and_nothing_else():
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in LOCKED)
    assert not [name for name in VERSIONS if re.search(r"torch|nvidia|cuda", name)]


def test_lock_satisfies_pyproject():
    project = PYPROJECT["project"]
    assert re.search(r'^EXTRAS = "(.*?)"', (ROOT / "tools" / "make_lock.py").read_text(), re.MULTILINE)[1] == ",".join(MADE_WITH)
    extras = [line for extra in MADE_WITH for line in project["optional-dependencies"][extra]]
    lines = [*project["dependencies"], *extras, *PYPROJECT["build-system"]["requires"]]
    for requirement in map(Requirement, lines):
        assert normal(requirement.name) in VERSIONS, f"{requirement} is not locked: run `make lock`"
        assert requirement.specifier.contains(VERSIONS[normal(requirement.name)]), f"{requirement} is locked otherwise: run `make lock`"


def test_every_name_is_defined_but_dimensions_in_annotations():
    """Ruff takes the letters of jaxtyping's shapes for names, so its rule F821 is off; names longer than those are
    mistakes."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "F821", "--output-format", "json", "--exit-zero", ROOT]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    names = {(item["filename"], item["message"].split("`")[1]) for item in found}
    assert names
    assert not {(file, name) for file, name in names if len(name) > 2}


def test_ruff_is_the_locked_one():
    """Another release formats otherwise."""
    assert importlib.metadata.version("ruff") == VERSIONS["ruff"]


def test_jax_is_locked_at_the_floor():
    floor = next(Requirement(line).specifier for line in PYPROJECT["project"]["dependencies"] if Requirement(line).name == "jax")
    assert str(floor) == f">={VERSIONS['jax']}"


# Makefile and BUILD


def test_make_quick_runs_a_file_of_every_room():
    paths = re.findall(r"tests/\S+\.py", (ROOT / "Makefile").read_text().partition("quick_tests := ")[2].partition("\n\n")[0])
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    rooms = (
        "test_house.py",
        "pallas_kernels/",
        *(f"kvjax/{room}/" for room in ("cache", "engine", "scheduler", "policies")),
        "models/",
        "serving/",
    )
    assert [room for room in rooms if not any(path.startswith(f"tests/{room}") for path in paths)] == []


def test_build_lists_every_source_and_test_folder():
    build = (ROOT / "BUILD").read_text()
    assert set(re.findall(r'py_library\(\n    name = "(\w+)"', build)) == set(FOLDERS)
    for folder in FOLDERS:
        assert f'glob(["{folder}/**/*.py"]' in build
    listed = set(re.findall(r'^    \("(\w+)", "\w+"\),$', build, re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}


DANGEROUS = {
    "modules": {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "subprocess", "runpy", "ctypes", "code", "yaml"},
    "calls": {"exec", "eval", "__import__"},
    "methods": {"import_module", "literal_eval", "popen", "spawnv", "execv", "execve", "spec_from_file_location", "deserialize_executable"},
}
"""What makes code, or calls programs, from what it is given."""

ALLOWED = {
    "kvjax/__init__.py": "import_module: names of its own table",
    "kvjax/__main__.py": "import_module: the command line",
    "kvjax/cache/host_pool/mapped_memory.py": "ctypes: libcuda.so.1",
    "kvjax/scheduler/processes.py": "pickle: messages between the processes of one job",
    "kvjax/registry.py": "exec, literal_eval, import_module: policies that the command line or code names",
    "pallas_kernels/__init__.py": "import_module: ops of the table of dispatch",
    "pallas_kernels/bench/torch_sdpa.py": "subprocess: this Python, modules named by the caller",
    "pallas_kernels/core/dispatch.py": "import_module: ops of its own table",
    "pallas_kernels/core/lazy.py": "import_module: names of the tables of packages",
}
"""The files that may, and for what. A new one needs a line here, and a place in docs/security.md."""


def dangers(tree):
    """Uses of DANGEROUS in a module, and arrays or checkpoints that may hold objects."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & DANGEROUS["modules"]
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & DANGEROUS["modules"]
            found |= {alias.name for alias in node.names} & DANGEROUS["methods"]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            kinds = {"calls"} if isinstance(node.func, ast.Name) else set()
            found |= {name} & set().union(DANGEROUS["methods"], *(DANGEROUS[kind] for kind in kinds))
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("os.system", "torch.load"):
                found.add(ast.unparse(node.func))
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and ast.unparse(keyword.value) != "False":
                    found.add(keyword.arg)
    return found


def test_only_named_files_make_code_of_what_they_are_given():
    found = {str(path): dangers(parsed(path)) for path in SOURCES}
    assert {name for name, uses in found.items() if uses} == set(ALLOWED)
    for name, why in ALLOWED.items():
        assert found[name] == set(why.partition(":")[0].split(", ")), name
        assert f"`{name}`" in (ROOT / "docs" / "security.md").read_text(), name


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from subprocess import run",
        "exec(text)",
        "eval('1')",
        "from importlib import import_module",
        "importlib.import_module(name)",
        "ast.literal_eval(text)",
        "np.load(path, allow_pickle=True)",
        "os.system('ls')",
        "torch.load(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=given)",
        "import yaml",
    ],
)
def test_a_new_use_is_found(code):
    assert dangers(ast.parse(code))
    assert not dangers(ast.parse("engine.exec(x)\nmodel.eval()\nnp.load(path, allow_pickle=False)\nimport json"))
