"""A GGUF file's metadata, checked: values under the keys of its architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.models.fields import BELOW
from kvjax.models.gguf.header import Header


class Metadata:
    """A file's metadata under the keys of its architecture. Errors name file and key."""

    def __init__(self, header: Header):
        self.header, self.entries = header, header.metadata
        self.architecture = self.entries.get("general.architecture")

    def error(self, key: str, needs: str) -> ValueError:
        value = self.entries.get(key)
        return ValueError(f"{self.header.file}: {key} is {value!r:.200}; it must be {needs}: download the file again")

    def get(self, key: str, default: Any = None) -> Any:
        """A value of this architecture; default: if there is none."""
        return self.entries.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. ValueError if it is missing and there is no default."""
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():  # one for each layer, all alike
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < BELOW:
            raise self.error(f"{self.architecture}.{key}", "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. float32 becomes the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise self.error(f"{self.architecture}.{key}", "a number")
        return float(str(np.float32(value)))

    def token(self, name: str) -> int | None:
        """The id of a special token, `tokenizer.ggml.NAME_token_id`; None if there is none, or none of the vocabulary's."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "a token's id")
        return value if 0 <= value < BELOW else None  # some converters write -1 for none
