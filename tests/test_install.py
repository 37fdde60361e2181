"""What a user installs: the wheel, and the two scripts that `make` starts with."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"pallas_kernels": "pallas_kernels", "kvjax": "kvjax", "models": "kvjax/models", "serving": "kvjax/serving"}


def copy_project(source: Path) -> None:
    """What building and installing read: both leave folders behind, and so take a copy."""
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        links = ("models", "serving") if folder == "kvjax" else ()
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "node_modules", *links))
    # Links are made anew: under Bazel every file is one. test_house.py compares those of the repository.
    (source / "imports").mkdir()
    for link in ("imports/kvjax", "imports/pallas_kernels", "kvjax/models", "kvjax/serving"):
        (source / link).symlink_to(Path("..") / Path(link).name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built by way of the source distribution."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    copy_project(source)
    out = source / "out"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("kvjax-*.whl"))


@pytest.mark.long
def test_wheel_holds_the_source_folders_and_nothing_else(wheel):
    expected = {
        f"{name}/{path.relative_to(ROOT / folder)}"
        for folder, name in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ROOT / "serving" / "clients" not in path.parents
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())
    (entry_points,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/entry_points.txt")]
    assert b"[lm_eval.models]\nkvjax = kvjax.serving.harness:KvjaxLM" in zipfile.ZipFile(wheel).read(entry_points)


@pytest.mark.long
def test_wheel_imports_beside_a_models_folder_of_the_users_own(wheel, tmp_path):
    """`-S` leaves out the editable install, so nothing but the wheel can provide kvjax."""
    unpacked, elsewhere = tmp_path / "unpacked", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for name in ("models", "serving"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "__init__.py").write_text("OWNER = 'the user'\n")
    code = """
import sys, models, serving, kvjax, kvjax.models, kvjax.serving.cli, pallas_kernels
for name in kvjax.__all__:
    getattr(kvjax, name)
assert models.OWNER == serving.OWNER == "the user"
print(*{module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ("kvjax", "pallas_kernels")}, sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unpacked), str(Path(pytest.__file__).parent.parent)])}
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    files = ran.stdout.split("\n")[:-1]
    assert len(files) > 10
    assert all(Path(file).is_relative_to(unpacked) for file in files)


# An editable install


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> tuple[Path, Path]:
    """A clone in a folder `kvjax`, and the Python of an environment that it is installed in place in, as
    tools/make_venv.py does it."""
    clone, environment = tmp_path_factory.mktemp("parent") / "kvjax", tmp_path_factory.mktemp("environment")
    copy_project(clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    # pip, setuptools and what kvjax depends on; files of that folder are not run, so its own kvjax cannot be imported.
    (site_packages / "others.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    python = environment / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(clone)]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return clone, python


def import_in(folder: Path, python: Path, code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.quick_but("elsewhere", "a folder with a link to it", "the folder that holds the clone")
@pytest.mark.parametrize("place", ["the folder that holds the clone", "a folder with a link to it", "the clone", "elsewhere"])
def test_an_editable_install_is_what_python_imports(editable, tmp_path, place):
    """Python looks in the folder it is started in first, and takes a folder `kvjax` without an `__init__.py` for a
    package if it must."""
    clone, python = editable
    folder = {"the folder that holds the clone": clone.parent, "the clone": clone}.get(place, tmp_path)
    if place == "a folder with a link to it":
        (tmp_path / "kvjax").symlink_to(clone)
    code = """
import os, kvjax, kvjax.models, kvjax.serving, pallas_kernels
kvjax.load
print(*(os.path.realpath(module.__file__) for module in (kvjax, kvjax.models, kvjax.serving, pallas_kernels)), sep="\\n")
"""
    ran = import_in(folder, python, code)
    assert ran.returncode == 0, ran.stderr
    expected = [clone.resolve() / name / "__init__.py" for name in ("kvjax", "models", "serving", "pallas_kernels")]
    assert [Path(line) for line in ran.stdout.splitlines()] == expected


def test_an_editable_install_brings_no_models_or_serving_of_its_own(editable, tmp_path):
    _, python = editable
    for name in ("models", "serving"):
        ran = import_in(tmp_path, python, f"import {name}")
        assert f"No module named '{name}'" in ran.stderr


def test_an_editable_install_sees_new_files(editable, tmp_path):
    clone, python = editable
    for folder in FOLDERS:
        (clone / folder / "written_later.py").write_text("")
    names = ", ".join(f"{name.replace('/', '.')}.written_later" for name in FOLDERS.values())
    ran = import_in(tmp_path, python, f"import {names}")
    assert ran.returncode == 0, ran.stderr


# tools/find_python.sh, with made-up Pythons


def find_python(tmp_path: Path, *folders: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(tmp_path / folder) for folder in folders)
    environment = {"PATH": path, "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}
    return subprocess.run(["/bin/sh", ROOT / "tools/find_python.sh"], env=environment, capture_output=True, text=True, check=False)


def put(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


BROKEN = "echo pyenv: command not found >&2; exit 127"
WORKS = f'exec "{sys.executable}" "$@"'


def too_old(release: str) -> str:
    return f"""case "$2" in *version_info*3,*12*) exit 1;; esac; echo {release}"""


def test_without_a_python_one_line_says_what_was_looked_for(tmp_path):
    put(tmp_path / "shims/python3.12", BROKEN)
    put(tmp_path / "bin/python3", too_old("3.11"))
    found = find_python(tmp_path, "shims", "bin", "missing")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "Python 3.12 or newer" in found.stderr
    assert str(tmp_path / "pyenv/versions") in found.stderr


def test_a_python_without_venv_is_named_in_that_line(tmp_path):
    put(tmp_path / "bin/python3.12", 'case "$2" in *ensurepip*) exit 1;; esac')
    found = find_python(tmp_path, "bin")
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert f"{tmp_path}/bin/python3.12 lacks venv" in found.stderr


@pytest.mark.parametrize("place", ["bin/python3.12", "bin/python3.14", "bin/python3", "pyenv/versions/3.13.0/bin/python"])
def test_a_python_is_found_behind_a_broken_shim(tmp_path, place):
    for version in ("3.12", "3.13", "3.14"):
        put(tmp_path / f"shims/python{version}", BROKEN)
    put(tmp_path / place, WORKS)
    found = find_python(tmp_path, "shims", "bin")
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).exists()


# tools/make_venv.py, with a stand-in for venv and pip


class Setup:
    """The real script on an empty project; `calls` are the pip runs and venv creations since the last make()."""

    def __init__(self, root: Path, monkeypatch):
        spec = importlib.util.spec_from_file_location("make_venv", ROOT / "tools/make_venv.py")
        self.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)
        self.venv, self.lock, self.pyproject = root / ".venv", root / "requirements.lock", root / "pyproject.toml"
        for path in (self.lock, self.pyproject):
            path.write_text("")
        places = {"ROOT": root, "LOCK": self.lock, "VENV": self.venv}
        places |= {"PYTHON": self.venv / "bin/python", "NOTE": self.venv / "installed.json"}
        for name, place in places.items():
            monkeypatch.setattr(self.script, name, place)
        monkeypatch.setattr(self.script, "run_pip", self.run_pip)
        real_run = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda command, **kw: self.run(command, kw, real_run))

    def run(self, command, keywords, real_run):
        if "venv" not in command:
            return real_run(command, **keywords)
        assert not self.venv.exists()
        put(self.venv / "bin/python", "exit 0")
        self.calls.append("new environment")
        return None

    def run_pip(self, what, *arguments, count=0):
        if what == self.interrupt:
            raise KeyboardInterrupt
        self.calls.append(what.split()[0] + " " + what.split()[-1])

    def make(self, interrupt: str | None = None) -> list[str]:
        self.calls, self.interrupt = [], interrupt
        with contextlib.suppress(KeyboardInterrupt):
            self.script.main()
        return self.calls


EVERYTHING = ["new environment", "installing packages", "installing place", "checking checking"]


@pytest.fixture
def setup(tmp_path, monkeypatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


def test_environment_is_made_once(setup):
    assert setup.make() == EVERYTHING
    assert setup.make() == []


@pytest.mark.parametrize("step", ["installing 0 locked packages", "installing kvjax in place", "checking"])
def test_an_interrupted_environment_is_made_anew(setup, step):
    assert setup.make(interrupt=step) != EVERYTHING
    assert setup.make() == EVERYTHING


def test_a_changed_lock_makes_it_anew(setup):
    setup.make()
    setup.lock.write_text("jax==0.11.2\n")
    assert setup.make() == EVERYTHING


def test_a_changed_pyproject_installs_only_the_project(setup):
    setup.make()
    setup.pyproject.write_text("[project]\n")
    assert setup.make(interrupt="installing kvjax in place") == []
    assert setup.make() == EVERYTHING
    setup.pyproject.write_text("[tool]\n")
    assert setup.make() == ["installing place", "checking checking"]


def test_a_vanished_python_makes_it_anew(setup):
    setup.make()
    put(setup.venv / "bin/python", "exit 127")
    assert setup.make() == EVERYTHING


def test_a_copied_environment_is_made_anew(setup, tmp_path, monkeypatch):
    setup.make()
    monkeypatch.setattr(setup.script, "ROOT", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/pyproject.toml").write_text("")
    assert setup.make() == EVERYTHING
