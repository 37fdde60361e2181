"""The embedded needle model, and the code that trains it (`training.train`)."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder of the embedded model, in Hugging Face format, inside the package."""
    return Path(__file__).parent
