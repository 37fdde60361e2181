"""Special tokens of a tokenizer, such as `<|im_end|>`, and how texts that hold them are read as plain text."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.text.checkpoint_files import first_line
from kvjax.text.long_texts import interruptible

_PRIVATE = range(0xE000, 0xF8FF)
"""Unicode's private characters. Those that no text holds can mark places in texts."""

MAX_PARTS = 2**26
"""Characters of all beginnings of special tokens together, and of all ends, about. Usual vocabularies have some hundred
thousand."""

PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
"""What is raised in a tokenizer but is not about its text."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Texts of the tokens that a decoded text leaves out, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: token.content for number, token in added.items() if token.special and token.content}


def tokenized(tokenizer: Any, text: str, **options: Any) -> Mapping[str, Any]:
    """What a tokenizer makes of a text. ValueError if it cannot read it."""
    return _read(text, lambda: tokenizer(text, **options))


def _read[T](text: str, read: Callable[[], T]) -> T:
    """What a call that reads a text returns. ValueError if it raises anything but what Ctrl-C does."""
    try:
        text.encode()
        return interruptible(text, read)
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds half of a surrogate pair at character {error.start}, which is not text") from None
    except PASSED_ON:
        raise
    except BaseException as error:  # a tokenizer may raise anything, Rust's PanicException too; it concerns only this text
        raise ValueError(f"the tokenizer cannot read this text: {first_line(error)}") from error


def decoded(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of token ids. ValueError if the tokenizer cannot write it."""
    try:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise ValueError(f"the tokenizer cannot write the text of these tokens: {first_line(error)}") from error


class PlainTexts:
    """Texts that go through a chat template, and whose special tokens are plain text afterwards.

    `mark` puts private characters into texts: one before each special token, one where a text ends inside one, because
    its neighbour may go on with the rest. The template then writes control tokens of its own. `ids` reads its text,
    without the marks: a special token at a mark is read as the characters that it is written with. Added tokens that
    the template writes count too, outside answers, where they are often marks of a thought. A template may change texts
    so that marks are lost, or join texts to a special token, and a tokenizer may know one under another spelling.
    `check` finds all of that.

    Args:
        tokenizer: the model's.
        texts: every value whose texts `mark` will see.
    """

    def __init__(self, tokenizer: Any, *texts: Any):
        size, template = len(tokenizer) if hasattr(tokenizer, "__len__") else 0, str(getattr(tokenizer, "chat_template", None))
        self._tokenizer, self._known = tokenizer, _known(tokenizer, size, template)
        held: set[str] = set()
        _each_text(list(texts), lambda text: held.update(text) or text)
        marks = list(itertools.islice((mark for mark in map(chr, _PRIVATE) if mark not in held), 2))
        if len(marks) < 2:
            raise ValueError("the messages hold all private characters of Unicode, U+E000 to U+F8FE: leave two of them out")
        self._begins, self._cuts = marks
        self._may_hold = self._known.normalized or not held.isdisjoint(self._known.signs)

    def mark(self, value: Any, *, answer: bool = False) -> Any:
        """The value, a text or lists and mappings of texts, with marks. answer: whether it is an answer of the
        model."""
        return _each_text(value, lambda text: _marked(text, self._known.special if answer else self._known.all, self._begins, self._cuts))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text with marks. ValueError if a special token is marked, and the tokenizer does not tell
        places of tokens."""
        parts = re.split(f"([{self._begins}{self._cuts}])", text)
        places = [0, *itertools.accumulate(len(part) if number % 2 == 0 else 0 for number, part in enumerate(parts))]
        begins, cuts = ({places[number] for number, part in enumerate(parts) if part == mark} for mark in (self._begins, self._cuts))
        whole = "".join(parts[::2])
        if not begins and not cuts:
            return list(tokenized(self._tokenizer, whole, add_special_tokens=False)["input_ids"])
        if not getattr(self._tokenizer, "is_fast", False):
            raise ValueError(
                "a message holds a special token of the model, and this tokenizer cannot read it as plain text: take it out of the "
                "message, or pass parse_special=True, which makes a control token of it"
            )
        encoding, ids = tokenized(self._tokenizer, whole, add_special_tokens=False, return_offsets_mapping=True), []
        for token, (start, stop) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            # A special token may take spaces beside it, so its beginning is anywhere in its span.
            if token in self._known.all.ids and (not begins.isdisjoint(range(start, stop)) or not cuts.isdisjoint(range(start + 1, stop))):
                ids += self._plain_ids(whole[start:stop])
            else:
                ids.append(token)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        """Token ids of the characters that a special token is written with."""
        return _read(text, lambda: _plain_tokenizer(self._tokenizer).encode(text, add_special_tokens=False).ids)

    def check(self, ids: Sequence[int], render: Callable[[Callable[..., Any]], str]) -> None:
        """ValueError unless the special tokens among `ids` are those that the template writes.

        render: what the template makes of all texts, after a function has changed them. It is called with one that
        leaves only spaces of a text's two ends, of which the template then writes the same special tokens.
        """
        if not self._known.special.ids:
            return
        try:
            harmless = render(lambda value, **_: _harmless(value))
        except ValueError:  # the template looks into the texts, and does not take these
            if not self._may_hold:
                return
            harmless = ""
        written = tokenized(self._tokenizer, harmless, add_special_tokens=False)["input_ids"]
        controls = self._known.controls
        if [token for token in ids if token in controls] != [token for token in written if token in controls]:
            raise ValueError(
                "a message holds a special token of the model, and the model's template and tokenizer cannot keep it as plain text: take "
                "it out of the message, or pass parse_special=True, which makes a control token of it"
            )


def _marked(text: str, tokens: _Tokens, begins: str, cuts: str) -> str:
    """A text with marks: before each of these tokens, and where it begins or ends inside one."""
    if tokens.begins is None:
        return text
    pieces, done = [], 0
    for match in tokens.begins.finditer(text):
        if (start := match.start()) < done:
            continue
        length = next((length for length in tokens.lengths if text[start : start + length] in tokens.texts), 0)
        if length:
            pieces += [text[done:start], begins, text[start : start + length]]
            done = start + length
    before, after = (cuts * cut for cut in (text.startswith(tokens.ends), text.endswith(tokens.beginnings)))
    return before + "".join(pieces) + text[done:] + after


class _Tokens:
    """Tokens that `PlainTexts` looks for, by their ids. begins: how they begin, None if there are none. lengths:
    theirs, the longest first. beginnings and ends: proper parts of them. ValueError if these are too many."""

    def __init__(self, by_id: Mapping[int, str]):
        if sum(len(text) ** 2 for text in by_id.values()) > MAX_PARTS:
            raise ValueError(
                f"special tokens of the model are too long to be told from plain text ({len(by_id):,} tokens of up to "
                f"{max(map(len, by_id.values())):,} characters): pass parse_special=True, or give prompt"
            )
        self.ids, self.texts = frozenset(by_id), frozenset(by_id.values())
        self.begins = re.compile(f"[{re.escape(''.join(sorted({text[0] for text in self.texts})))}]") if self.texts else None
        self.lengths = sorted({len(text) for text in self.texts}, reverse=True)
        self.beginnings = tuple({text[:length] for text in self.texts for length in range(1, len(text))})
        self.ends = tuple({text[length:] for text in self.texts for length in range(1, len(text))})


class _Known:
    """What is known of a tokenizer. special, all: its special tokens, and with them the added tokens that its template
    writes. controls: ids of those that only a template writes. signs: what special tokens hold besides letters and
    digits. normalized: whether some may be spelled otherwise."""

    def __init__(self, tokenizer: Any):
        added, template = getattr(tokenizer, "added_tokens_decoder", {}), str(getattr(tokenizer, "chat_template", None) or "")
        by_id = special_tokens(tokenizer)
        written = {number: token.content for number, token in added.items() if token.content and token.content in template}
        self.special, self.all = _Tokens(by_id), _Tokens(by_id | written)
        self.normalized = any(added[token].normalized for token in by_id)
        self.signs = {sign for text in by_id.values() for sign in text if not sign.isalnum() and not sign.isspace()}
        unknown, ends = (getattr(tokenizer, name, None) for name in ("unk_token_id", "eos_token_id"))
        self.controls = self.special.ids - ({unknown} - {ends})  # characters that a tokenizer does not know are no control tokens


@functools.lru_cache(maxsize=8)
def _known(tokenizer: Any, size: int, template: str) -> _Known:
    """size, template: of its vocabulary, and its chat template, which may change."""
    return _Known(tokenizer)


@functools.lru_cache(maxsize=8)
def _plain_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer without its added tokens, which reads them as plain text."""
    from tokenizers import Tokenizer

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(parts | {"added_tokens": []}))


def _harmless(value: Any) -> Any:
    """The value, with texts that no special token can come from: the spaces of each are left, and its length if that is
    short. Names of fields stay, because templates ask for them."""
    if isinstance(value, str):
        return re.sub(r"\S", "x", value if len(value) <= 64 else value[:32] + value[-32:])
    if isinstance(value, Mapping):
        return {key if str(key).isidentifier() else _harmless(key): _harmless(each) for key, each in value.items()}
    return [_harmless(each) for each in value] if isinstance(value, list | tuple) else value


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value, with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(each, change) for key, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list | tuple) else value
