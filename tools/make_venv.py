"""Makes `.venv` with exactly the packages of requirements.lock, and kvjax installed in place. Does nothing if `.venv`
is up to date.

The Makefile runs this with the Python that find_python.sh found. It uses only the standard library. What was installed
is written to `.venv/installed.json` at the end. An environment without this file was interrupted, and is made anew. So
is one of another lock or folder. If only pyproject.toml has changed, kvjax is installed again.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
NOTE = VENV / "installed.json"
PIP = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input")


def main() -> None:
    with LOCK.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # so that two runs of make take turns
        wanted = {"lock": digest(LOCK), "project": digest(ROOT / "pyproject.toml"), "root": str(ROOT)}
        noted = read_note()
        if noted == wanted:
            return
        if {**noted, "project": wanted["project"]} == wanted:
            NOTE.unlink()
        else:
            install_locked()
        run_pip("installing kvjax in place", "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        run_pip("checking", "check")
        draft = NOTE.with_suffix(".draft")
        draft.write_text(json.dumps(wanted, indent=1) + "\n")
        draft.replace(NOTE)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_note() -> dict[str, str]:
    """What the environment holds; {} if it is missing or unfinished, or if its Python does not run."""
    try:
        note = json.loads(NOTE.read_text())
        subprocess.run([PYTHON, "-c", "import pip"], check=True, capture_output=True)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}
    return note


def install_locked() -> None:
    if VENV.is_symlink():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    say(f"Python {sys.version.split()[0]} ({sys.executable})")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    count = sum("==" in line for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    # Nothing but the lock's packages is installed, and nothing is built: on a platform without wheels, pip fails at
    # once. Python compiles modules when they are first imported. If pip compiled all of them, it would take half a
    # minute longer.
    arguments = ("--no-deps", "--no-compile", "--only-binary=:all:", "--requirement", str(LOCK))
    run_pip(f"installing {count} locked packages", "install", *arguments, count=count)


def run_pip(what: str, *arguments: str, count: int = 0) -> None:
    """Run pip quietly, with a counter of packages on a terminal; print the end of its output if it fails."""
    say(f"{what} ...")
    start, seen, tail = time.monotonic(), 0, deque(maxlen=15)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen([*PIP, *arguments], cwd=ROOT, **streams) as pip:
        for line in pip.stdout:
            tail.append(line)
            seen += line.startswith("Collecting ")
            if count and sys.stdout.isatty():
                print(f"\r  {seen} of {count}", end="", flush=True)
    if count and sys.stdout.isatty():
        print("\r", end="")
    if pip.returncode:
        sys.exit(f"{''.join(tail)}kvjax: {what} failed; .venv is unfinished and will be made anew next time")
    if count:
        say(f"installed in {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    print(f"kvjax: {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nkvjax: interrupted; .venv is unfinished and will be made anew next time")
