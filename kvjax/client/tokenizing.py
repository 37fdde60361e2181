"""The tokenizer that a server's model has, for clients: the server takes token ids only."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from kvjax.transformers_import import import_transformers

PATTERNS = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "chat_template*", "config.json")
"""Files of a tokenizer on the Hugging Face Hub."""


def load_tokenizer(name: str) -> Any:
    """The tokenizer of "needle" (the embedded model), a folder, or a hub id: the one that `kvjax.load` gives the model.

    Where there is a tokenizer.json it is used as it is. `AutoTokenizer` would rebuild it as the model family's own tokenizer, which may
    split text into other tokens. ValueError or OSError for a name that is none.
    """
    import huggingface_hub

    transformers = import_transformers()
    if name == "needle":
        folder = Path(str(resources.files("kvjax").joinpath("models", "needle")))
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS)))
    kind = transformers.PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else transformers.AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True)
