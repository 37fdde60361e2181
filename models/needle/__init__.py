"""The embedded needle model. `tools/train_needle` is how it was made."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder of the embedded model, in Hugging Face format, inside the package."""
    return Path(__file__).parent
