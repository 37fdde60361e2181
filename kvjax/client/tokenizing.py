"""The tokenizer that a server's model has, for clients: the server takes token ids only."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from kvjax.text.tokenizer_loading import read_tokenizer

PATTERNS = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "chat_template*", "config.json")
"""Files of a tokenizer on the Hugging Face Hub."""


def load_tokenizer(name: str) -> Any:
    """The tokenizer of "needle" (the embedded model), a folder, or a hub id: the one that `kvjax.load` gives the model.

    Code of a checkpoint is never run (`kvjax.text.tokenizer_loading`). ValueError or OSError for a name that is none.
    """
    import huggingface_hub

    if name == "needle":
        folder = Path(str(resources.files("kvjax").joinpath("models", "needle")))
    elif Path(name).suffix == ".gguf":
        raise ValueError("it is a GGUF file, which only the server reads: give the folder that kvjax.load(FILE).save(FOLDER) writes")
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS)))
    return read_tokenizer(folder)
