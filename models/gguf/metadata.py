"""A GGUF file's metadata, checked: values under the keys of its architecture."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from gguf.constants import Keys

from kvjax.models.fields import BELOW, MAX_LAYERS
from kvjax.models.gguf.header import Header
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)

KNOWN = frozenset(
    value.removeprefix("{arch}.")
    for group in vars(Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
)
"""Keys that some architecture of llama.cpp reads."""

HARMLESS = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "pooling_type", "embedding_length_out", "rope.scaling.finetuned"),
        # Of two epsilons an architecture reads one.
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    }
)
"""Keys that change nothing in what the model computes, unless the architecture reads them."""


def says_something(value: Any) -> bool:
    """Whether a value is not 0, false, empty, or a list of such. Texts stay a list: an array would give each the room
    of the longest."""
    return any(value) if isinstance(value, list) else bool(np.any(value))


class Metadata:
    """A file's metadata under the keys of its architecture. Errors name file and key. read: the keys that were asked
    for."""

    def __init__(self, header: Header):
        self.header, self.entries = header, header.metadata
        self.architecture = self.entries.get("general.architecture")
        self.read: set[str] = set()

    def check_all_read(self) -> None:
        """ValueError for a key that llama.cpp reads and nobody asked for; a warning for keys that it does not know
        either. Values of 0, false and none change nothing."""
        prefix = f"{self.architecture}."
        names = sorted(key.removeprefix(prefix) for key in self.entries if key.startswith(prefix))
        left = [name for name in names if name not in self.read | HARMLESS and says_something(self.entries[prefix + name])]
        for name in left:
            if name in KNOWN:
                raise ValueError(
                    f"{self.header.file}: {prefix}{name} is {shown(self.entries[prefix + name], 200)}, which would change what the model "
                    f"computes and is not supported for architecture {self.architecture}: take another file, or the original checkpoint"
                )
        if left:
            logger.warning("%s: ignored, because llama.cpp has no such keys: %.1000s", self.header.file, ", ".join(left))

    def error(self, key: str, needs: str) -> ValueError:
        value = self.entries.get(key)
        return ValueError(f"{self.header.file}: {key} is {shown(value, 200)}; it must be {needs}: download the file again")

    def unsupported(self, key: str, why: str) -> ValueError:
        """For a value under the architecture's keys that is right, and describes a model that kvjax does not have."""
        name = f"{self.architecture}.{key}"
        return ValueError(
            f"{self.header.file}: {name} is {shown(self.entries.get(name), 200)}: {why}, which is not supported: take another model"
        )

    def get(self, key: str, default: Any = None, *, lists: bool = False) -> Any:
        """A value of this architecture; default: if there is none. ValueError for a list, unless `lists` says that
        there may be one."""
        self.read.add(key)
        value = self.entries.get(f"{self.architecture}.{key}", default)
        if not lists and isinstance(value, list | np.ndarray):
            raise self.error(f"{self.architecture}.{key}", "one value, not a list")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. ValueError if it is missing and there is no default."""
        value = self.get(key, default, lists=True)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():  # one for each layer, all alike
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < BELOW:
            raise self.error(f"{self.architecture}.{key}", "a positive integer")
        return value

    @property
    def layers(self) -> int:
        """Blocks of the file. Bounded, because tables of fields have an entry for each."""
        if (count := self.size("block_count")) > MAX_LAYERS:
            raise self.error(f"{self.architecture}.block_count", f"at most {MAX_LAYERS}")
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A number. float32 becomes the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise self.error(f"{self.architecture}.{key}", "a number")
        return float(str(np.float32(value)))

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.header.tensors

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.size("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.size("attention.head_count_kv", self.heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.size("attention.key_length", max(1, self.size("embedding_length") // self.heads))

    def token(self, name: str) -> int | None:
        """The id of a special token, `tokenizer.ggml.NAME_token_id`; None if there is none, or none of the
        vocabulary's."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "a token's id")
        return value if 0 <= value < BELOW else None  # some converters write -1 for none
