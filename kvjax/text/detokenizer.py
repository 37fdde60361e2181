"""Turns token ids into text as they arrive: pieces for streaming, stop strings that may begin and end inside tokens,
texts of tokens."""

from __future__ import annotations

import collections
import contextlib
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.text.plain_texts import decoded, special_tokens

REPLACEMENT = "\ufffd"
CONTEXT = 8
"""So many token ids before a token decide how it is decoded: whether its first space counts, and which character it
ends."""
CHARACTER = 4
"""The most bytes of a character in UTF-8, and so the most tokens that may end in the middle of it."""


class TextStream:
    """Turns one sequence's tokens into text, piece by piece, and ends it at the first stop string.

    A piece is held back while it ends inside a multi-byte character or may be the beginning of a stop string. `text` is
    everything emitted; special tokens are left out. A stop string that holds special tokens is also found where they
    are.

    Args:
        tokenizer: the model's.
        stop: the stop strings. Time and memory are linear in what the text holds of them, and in the text's length.
        context: token ids before the first one, of which the latest `CONTEXT` count: the text continues theirs.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids: list[int] = list(context[-CONTEXT:])
        self._anchor, self._done = 0, len(self._ids)  # decode from `anchor`; ids before `done` are already in the text
        with contextlib.suppress(ValueError):  # `push` says so
            while self._done and self._decode(self._done).endswith(REPLACEMENT):
                self._done -= 1  # a character that the context begins comes whole
        self._specials = special_tokens(tokenizer) if stop else {}
        self._stops = _Stops(stop)
        self._stops_with_specials = _Stops([text for text in stop if any(special in text for special in self._specials.values())])
        self._hidden: collections.deque[tuple[int, int]] = collections.deque()  # spans of special tokens in what these stops see
        self._all, self._length, self._seen = io.StringIO(), 0, 0  # the text with what is held back; seen: with special tokens, too
        self._certain = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return self._read(0, self._certain)

    def push(self, token: int) -> str:
        """The text that this token makes certain; `stopped` is set if it completes a stop string."""
        if (special := self._specials.get(token)) is not None and (cut := self._see(special)) is not None:
            return self._end(self._length - cut)
        if not decoded(self._tokenizer, [token]) and decoded(self._tokenizer, [token], skip_special_tokens=False):
            return ""  # a special token has no text, and would be decoded again and again
        self._ids.append(token)
        before, after = self._decode(self._done), self._decode(len(self._ids))
        if after.endswith(REPLACEMENT):
            return self._whole_characters(before, after)
        if len(after) <= len(before):
            return ""
        return self._emit(after[len(before) :], len(self._ids))

    def close(self) -> str:
        """The text held back so far, up to a stop string. Call it when no further token comes."""
        if self.stopped:
            return ""
        # A stop string may precede an incomplete last character, and was then held back with it.
        before = self._decode(self._done)
        piece = self._emit(self._decode(len(self._ids))[len(before) :], len(self._ids))
        if self.stopped:
            return piece
        rest, self._certain = self._read(self._certain, self._length), self._length
        return piece + rest

    def _whole_characters(self, before: str, after: str) -> str:
        """Emit what an incomplete last character cannot change, where many tokens are pending: some models write bytes
        that are no text."""
        latest = len(self._ids) - 1
        for done in range(latest, max(self._done + CHARACTER, latest - 2 * CHARACTER), -1):
            upto = self._decode(done)
            if len(upto) < len(after) and after.startswith(upto):
                return self._emit(upto[len(before) :], done)
        return ""

    def _decode(self, stop: int) -> str:
        return decoded(self._tokenizer, self._ids[self._anchor : stop])

    def _emit(self, piece: str, done: int) -> str:
        """Add a piece of text, the last of tokens up to `done`, and return what is certain."""
        # Decoding again from a little earlier keeps spaces that depend on the token before.
        self._anchor, self._done = self._done, done
        self._all.seek(self._length)
        self._all.write(piece)
        match, other = self._stops.find(piece), self._stops_with_specials.find(piece)
        cuts = [(at, self._length + at - length) for at, length in filter(None, [match])]
        cuts += [(at, self._length + at - self._shown(self._seen + at, length)) for at, length in filter(None, [other])]
        self._length += len(piece)
        self._seen += len(piece)
        if cuts:
            return self._end(min(cuts)[1])
        held = max(self._stops.held, self._shown(self._seen, self._stops_with_specials.held))
        return self._advance(self._length - held)

    def _see(self, special: str) -> int | None:
        """Show a special token to the stop strings that hold some. Returns how much of the text before it belongs to
        one that it ends."""
        match = self._stops_with_specials.find(special)
        self._hidden.append((self._seen, self._seen + len(special)))
        self._seen += len(special)
        return None if match is None else self._shown(self._seen - len(special) + match[0], match[1])

    def _shown(self, end: int, length: int) -> int:
        """How much of the `length` characters before place `end` of what was seen is text, and not special tokens."""
        while self._hidden and self._hidden[0][1] <= self._seen - max(length, self._stops_with_specials.held):
            self._hidden.popleft()
        return length - sum(max(0, min(stop, end) - max(start, end - length)) for start, stop in self._hidden)

    def _end(self, length: int) -> str:
        """A stop string ends the text after `length` characters."""
        self.stopped = True
        return self._advance(length)

    def _advance(self, certain: int) -> str:
        piece, self._certain = self._read(self._certain, certain), max(self._certain, certain)
        return piece

    def _read(self, start: int, stop: int) -> str:
        self._all.seek(start)
        return self._all.read(max(0, stop - start))


class _Stops:
    """Finds the first of some strings to end in a text that comes in pieces (Knuth, Morris and Pratt's search, for each
    of them).

    held: so many characters at the end of the text may begin one of them.
    """

    def __init__(self, strings: Iterable[str]):
        self._strings = [(string, [0]) for string in dict.fromkeys(strings)]  # with their borders, as far as they were asked for
        self._beginning: dict[str, list[int]] = {}
        for number, (string, _) in enumerate(self._strings):
            self._beginning.setdefault(string[0], []).append(number)
        self._begun: dict[int, int] = {}  # how many characters of each string the text ends with, where there are some

    @property
    def held(self) -> int:
        return max(self._begun.values(), default=0)

    def find(self, piece: str) -> tuple[int, int] | None:
        """Where in the piece a string ends first, and its length: the longest that ends there. None if none does."""
        if not self._strings:
            return None
        for place, character in enumerate(piece):
            begun, longest = {}, 0
            for number in self._begun.keys() | self._beginning.get(character, ()):
                string, borders = self._strings[number]
                count = self._begun.get(number, 0)
                while count and string[count] != character:
                    count = _border(string, borders, count)
                count += string[count] == character
                if count == len(string):
                    longest = max(longest, count)
                elif count:
                    begun[number] = count
            if longest:
                return place + 1, longest
            self._begun = begun
        return None


def _border(string: str, borders: list[int], count: int) -> int:
    """The length of the longest shorter beginning of the string that its first `count` characters end with.

    borders: the answers for 1, 2, ... characters so far, to which those up to `count` are added. A text has to hold a
    beginning before its border is asked for, so strings that never begin cost nothing, however long they are.
    """
    while len(borders) < count:
        character, border = string[len(borders)], borders[-1]
        while border and string[border] != character:
            border = borders[border - 1]
        borders.append(border + (string[border] == character))
    return borders[count - 1]


def token_text(tokenizer: Any, before: Sequence[int], token: int) -> tuple[str, bytes | None]:
    """The text of one token after others, and its bytes. Texts of the tokens of an answer join to its text.

    before: the ids before it, of which the latest `CONTEXT` count. A token that is a part of a character has the text
    `bytes:` and its bytes as \\xNN, as in OpenAI's API; the bytes of such tokens join to the character. A special token
    has its name. The bytes are None where the tokenizer does not tell them.
    """
    window = list(before[-CONTEXT:])
    start, whole = (decoded(tokenizer, ids) for ids in (window, [*window, token]))
    if whole != start and whole.startswith(start) and not whole.endswith(REPLACEMENT):
        return whole[len(start) :], whole[len(start) :].encode()
    alone = decoded(tokenizer, [token], skip_special_tokens=False)
    own = _bytes_of(tokenizer, token) if REPLACEMENT in start[-1:] + whole[-1:] else alone.encode()
    if own is None:
        return alone, None
    try:
        return own.decode(), own
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own


def _bytes_of(tokenizer: Any, token: int) -> bytes | None:
    """The bytes that a token stands for: of `<0xNN>`, or of the alphabet in which byte-level tokenizers write bytes.
    None for others, such as ids of the model beyond the tokenizer's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    written = tokenizer.convert_ids_to_tokens(int(token))
    if written is None:
        return None
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", written):
        return bytes.fromhex(match[1])
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(byte_of[character] for character in written) if all(character in byte_of for character in written) else None
