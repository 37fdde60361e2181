"""Writes requirements.lock: exact versions of what kvjax and its tests need, resolved from pyproject.toml for each
Python given.

`make lock` runs this. It installs nothing: pip only resolves the versions. All become the newest that are allowed,
except those in HELD.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Packages that are held back from their newest version, and why.
HELD = {
    "jax": "0.11.2",  # the oldest release that kvjax supports, so that tests run on it
    "jaxlib": "0.11.2",
    "transformers": "5.17.0",  # the version that made the golden files of the parity tests
    "huggingface-hub": "1.33.0",  # the major version that kvjax is developed with
}
EXTRAS = "eval,plots,ray,server,docs,test"  # the extras of pyproject.toml that the Makefile's commands need
UNWANTED = re.compile(r"torch|nvidia|cuda|tensorflow$")
HEADER = """\
# Exact versions of everything `make demo` and `make test` install: kvjax with the extras {extras}; CPU only, no PyTorch.
# Made by `make lock` from pyproject.toml; the same set for Python {pythons}. Not for editing by hand.
# jax 0.11.2 is the floor, the oldest release that kvjax supports; newer ones are allowed. tools/make_lock.py says what is held, and why.
# The large ones: jaxlib, scipy (jax), transformers, tensorstore (orbax-checkpoint), matplotlib.
"""


def resolve(python: str) -> tuple[str, dict[str, str]]:
    """The version of this Python (such as 3.12), and {package: version} of a fresh install of kvjax with EXTRAS."""
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "held.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={held}\n" for name, held in HELD.items()))
        command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
        subprocess.run([*command, f"--constraint={constraints}", f"--report={report}", f"{ROOT}[{EXTRAS}]"], check=True, cwd=folder)
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return version, {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in packages}


def main(pythons: list[str]) -> None:
    resolved = dict(resolve(python) for python in pythons)
    sets = list(resolved.values())
    if any(other != sets[0] for other in sets):
        different = {name for packages in sets for name, version in packages.items() if any(other.get(name) != version for other in sets)}
        sys.exit(f"the Pythons {', '.join(resolved)} resolve differently: hold one version of {', '.join(sorted(different))} in HELD")
    packages = {name: version for name, version in sorted(sets[0].items()) if name != "kvjax"}
    if unwanted := [name for name in packages if UNWANTED.search(name)]:
        sys.exit(f"the lock would bring {', '.join(unwanted)}: see which dependency asks for it")
    lines = [f"{name}=={version}\n" for name, version in packages.items()]
    (ROOT / "requirements.lock").write_text(HEADER.format(pythons=" and ".join(resolved), extras=EXTRAS) + "".join(lines))
    print(f"requirements.lock: {len(lines)} packages for Python {' and '.join(resolved)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: make_lock.py PYTHON [PYTHON ...]")
    main(sys.argv[1:])
