"""Turns token ids into text as they arrive: pieces for streaming, and stop strings that may begin and end inside tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one sequence's tokens into text, piece by piece, and ends it at the first stop string.

    A piece is held back while it ends inside a multi-byte character or may be the beginning of a stop string. `text` is everything
    emitted; special tokens are left out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._anchor = self._done = 0  # decode from `anchor`; ids before `done` are already in `text` or `_held`
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; `stopped` is set if it completes a stop string."""
        self._ids.append(token)
        before = self._decode(self._anchor, self._done)
        after = self._decode(self._anchor, len(self._ids))
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        # Decoding again from a little earlier keeps spaces that depend on the token before.
        self._anchor, self._done = self._done, len(self._ids)
        return self._emit(after[len(before) :])

    def close(self) -> str:
        """The text held back so far, up to a stop string. Call it when no further token comes."""
        if self.stopped:
            return ""
        before = self._decode(self._anchor, self._done)
        after = self._decode(self._anchor, len(self._ids))
        self._done = len(self._ids)
        # A stop string may precede an incomplete last character, and was then held back with it.
        piece = self._emit(after[len(before) :])
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)

    def _emit(self, piece: str) -> str:
        pending = self._held + piece
        found = min((at for at in (pending.find(stop) for stop in self._stop) if at >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            self.text += pending[:found]
            return pending[:found]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if pending.endswith(stop[:n])), default=0)
        self._held = pending[len(pending) - keep :]
        certain = pending[: len(pending) - keep]
        self.text += certain
        return certain
