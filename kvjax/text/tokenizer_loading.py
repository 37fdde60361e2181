"""The tokenizer in a model's folder, read by transformers. Code that comes with a checkpoint is never run, and nobody
is asked about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.text.checkpoint_files import AGAIN, check_pointer, check_utf8, first_line, is_file, named, read_json
from kvjax.text.plain_texts import PASSED_ON
from kvjax.text.token_bounds import check_growth, check_ids
from kvjax.text.transformers_import import import_transformers
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer has one of these files."""

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files with a JSON object that transformers reads beside them."""

OPENED = {"fast_tokenizer_files": object, "gguf_file": object, "init_inputs": object, "vocab": str, "merges": str}
"""Fields of tokenizer_config.json whose values, of these types, transformers may open as files, wherever they lie.
Names of files in other fields it replaces by those in the folder."""


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder.

    Where there is a tokenizer.json it is used as it is: `AutoTokenizer` would rebuild it as the model family's own
    tokenizer, which may split text into other tokens. If tokenizer_config.json names code of the checkpoint
    (`auto_map`), the code is not run: with a tokenizer.json a warning says so, without one this raises ValueError.
    ValueError also for files that are missing or damaged, and for a folder whose path is not UTF-8.
    """
    check_utf8(folder)
    found = [name for name in VOCABULARIES if is_file(folder / name)]
    settings = {name: read_json(folder / name) for name in SETTINGS if is_file(folder / name)}
    _check_paths(folder, settings)
    code = settings.get("tokenizer_config.json", {}).get("auto_map")
    if code and "tokenizer.json" not in found:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} asks to run code of the checkpoint (auto_map is {code!r:.200}), and kvjax never runs it: "
            "put a tokenizer.json there, from the model that it was made from"
        )
    if not found:
        raise ValueError(
            f"{folder} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there from the model that it was made from"
        )
    if code:
        logger.warning("%s: code of the checkpoint (auto_map) is never run; tokenizer.json is used", folder / "tokenizer_config.json")
    _check_ids(folder, found)
    transformers = import_transformers()
    kind = transformers.PreTrainedTokenizerFast if "tokenizer.json" in found else transformers.AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.init_kwargs.pop("auto_map", None)  # it would be saved with a model
        check_growth(tokenizer)
        _without_dropout(tokenizer, folder)
        tokenizer("")  # settings of a wrong type would make every text an error
        return tokenizer
    except PASSED_ON:
        raise
    except BaseException as error:  # for a damaged file the libraries below raise bare Exception, and Rust's PanicException
        for file in filter(Path.is_file, folder.glob("tokenizer*")):
            check_pointer(file)
        raise ValueError(f"transformers cannot read the tokenizer in {folder} ({first_line(error)}); {AGAIN}") from error


def _check_ids(folder: Path, found: Sequence[str]) -> None:
    """ValueError if a vocabulary has ids that would take all memory while transformers reads it. It reads
    tokenizer.json alone where there is one."""
    if "tokenizer.json" in found:
        model = read_json(folder / "tokenizer.json").get("model")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(vocab, Mapping):  # Unigram has a list, whose places are the ids
            check_ids(vocab, folder / "tokenizer.json")
            _check_merges(model, folder / "tokenizer.json")
        return
    if "vocab.json" in found:
        check_ids(read_json(folder / "vocab.json"), folder / "vocab.json")
    if "tokenizer.model" in found:
        check_ids(_ranks(folder / "tokenizer.model"), folder / "tokenizer.model")


def _check_merges(model: Mapping[str, Any], file: Path) -> None:
    """ValueError if the second part of a merge does not begin with the prefix of tokens inside a word. The library
    cuts the prefix off without a look at what it cuts, and may end the process."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], str) and not parts[1].startswith(prefix):
            raise ValueError(
                f"{file} has the merge {shown(merge)}, whose second part does not begin with its continuing_subword_prefix, "
                f"{shown(prefix)}; {AGAIN}"
            )


def _ranks(path: Path) -> dict[str, int]:
    """The ids of a tokenizer.model in tiktoken's form: lines of a token in base64 and its id. Empty for another form:
    SentencePiece's has no ids but places."""
    ranks = {}
    with named(path), open(path, "rb") as file:
        for line in filter(bytes.strip, file):
            try:
                token, rank = line.split()
                ranks[token.decode()] = int(rank)
            except ValueError:
                return {}
    return ranks


def _without_dropout(tokenizer: Any, folder: Path) -> None:
    """Turns off what a tokenizer does in training alone: with it a text has other tokens each time."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if (share := getattr(model, "dropout", None)) is not None:
        model.dropout = None
        if share > 0:
            logger.warning("%s: dropout %s of its merges is for training, and is turned off", folder / "tokenizer.json", share)


def _check_paths(folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError if a file of settings names another file to read. What special_tokens_map.json holds beside tokens,
    transformers puts in the place of what it has found itself."""
    config, tokens = settings.get("tokenizer_config.json", {}), settings.get("special_tokens_map.json", {})
    named = [("tokenizer_config.json", name) for name, kind in OPENED.items() if config.get(name) and isinstance(config[name], kind)]
    named += [("special_tokens_map.json", name) for name in tokens if not name.endswith(("_token", "_tokens"))]
    for file, name in named:
        said = f"{folder / file} has {name[:80]!r} {settings[file][name]!r:.200}, which transformers may take for a file to read"
        raise ValueError(f"{said}; a tokenizer is read from {', '.join(VOCABULARIES)} of its own folder alone: delete the field")
