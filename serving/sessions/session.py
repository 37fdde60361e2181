"""What the runtime knows of one session, and the invariants that it checks. Source: ADR 0008, sections 2.3 and 2.8."""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvjax.checks import whole_number
from kvjax.client.errors import InvalidArgument

if TYPE_CHECKING:
    from kvjax.engine.engine import Engine
    from kvjax.engine.sequence import CachedSequence
    from kvjax.policies.decode import DecodePolicy
    from kvjax.serving.sessions.generation import Run

Waiting = tuple[Callable[[], object], Future]
"""What a caller wants done when its turn comes, and where its result goes."""


@dataclasses.dataclass(frozen=True)
class Window:
    """How much of a history is kept in the cache: the first `sinks` tokens, and the latest, together at most `tokens`.

    Tokens are dropped in units, so that this happens seldom: what is kept then has to be prefilled again. How many are
    dropped depends only on the length of the history, not on how it came in.
    """

    tokens: int
    sinks: int

    @property
    def unit(self) -> int:
        """Tokens dropped at once: a quarter of the window."""
        return max(1, self.tokens // 4)

    def dropped(self, length: int) -> int:
        """Tokens after the sinks that a history of `length` tokens has lost."""
        return max(0, -(-(length - self.tokens) // self.unit) * self.unit)


def check_window(tokens: int | None, page_size: int) -> Window | None:
    """The window of so many tokens; its sinks are the first page. ValueError if it is too small for both."""
    if tokens is None:
        return None
    whole_number("window", tokens, 0, 2**63)
    if tokens < 4 * page_size:
        raise ValueError(f"window must be at least four pages, {4 * page_size} tokens, got {tokens}")
    return Window(tokens, page_size)


@dataclasses.dataclass(eq=False)
class Record:
    """One session.

    history: all its tokens. sequence: holds the first of those that are kept, all written by prefill. dropped: tokens
    after the sinks that the window has dropped. floor: the most tokens that were in the cache or dropped. stored:
    whether the history is on disk. run: the generation that runs, or whose caller has not taken its end yet. waiting:
    calls that come after it. used: when a call last began or ended. checked_tokens, checked_history: copies of the
    tokens in the cache and of the history that `check_invariants` has found equal.
    """

    id: str
    policy: DecodePolicy | None
    sequence: CachedSequence
    used: float
    history: array.array = dataclasses.field(default_factory=lambda: array.array("i"))
    dropped: int = 0
    floor: int = 0
    stored: bool = False
    run: Run | None = None
    waiting: collections.deque[Waiting] = dataclasses.field(default_factory=collections.deque)
    checked_tokens: list[int] = dataclasses.field(default_factory=list)
    checked_history: array.array = dataclasses.field(default_factory=lambda: array.array("i"))

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return self.run is None and not self.waiting

    def has_room_for_a_call(self, most: int) -> bool:
        """Whether fewer than `most` calls wait, not counting those that their callers have given up."""
        if len(self.waiting) >= most:
            self.waiting = collections.deque(each for each in self.waiting if not each[1].cancelled())
        return len(self.waiting) < most

    def kept(self, window: Window | None, since: int = 0) -> array.array:
        """The tokens that belong into the cache, from position `since` of the cache on."""
        if not self.dropped:
            return self.history[since:]
        sinks = self.history[since : window.sinks]
        return sinks + self.history[max(since, window.sinks) + self.dropped :]

    def still_equal(self, window: Window | None) -> int:
        """How many tokens at the beginning of the cache, and of the history, are those that were found equal before; 0
        if one differs.

        Lists that hold the same objects, and arrays, are compared far faster than a list with an array: in a history of
        100,000 tokens this takes a tenth of the time.
        """
        count, tokens = len(self.checked_tokens), self.sequence.tokens
        if count > len(tokens):
            return 0
        held = tokens if count == len(tokens) else tokens[:count]
        return count if held == self.checked_tokens and self.kept(window)[:count] == self.checked_history else 0

    def lacks(self, tokens: array.array, at: int | None) -> bool:
        """Whether tokens are to be added to the history: False if they stand there from position `at` on already.

        at: how long the caller takes the history to be; None: it does not say. InvalidArgument if it is longer or
        shorter.
        """
        length = len(self.history)
        if at is not None and at != length:
            if at < length and at + len(tokens) <= length and self.history[at : at + len(tokens)] == tokens:
                return False
            raise InvalidArgument(
                f"the caller takes the history to have {at} tokens, but it has {length}: ask for the session's info, and go on from there",
                field="at",
            )
        return True


class Violation(Exception):
    """An invariant does not hold. kind: "inv1", "inv2" or "inv3"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def check_invariants(engine: Engine, record: Record, window: Window | None, since: int = 0) -> None:
    """Violation unless the session's cache holds what its history says. since: the position from which tokens are
    compared.

    INV-1: the sequence has as many tokens as its cache has positions, these are the expected ones, and every layer
    group holds the pages of all positions that later queries read: of a group with a window, those from the window of
    the next token on. INV-2: positions never become fewer, except where the window drops tokens.
    """
    sequence, kept = record.sequence, len(record.history) - record.dropped
    length = sequence.length
    if len(sequence.tokens) != length or length > kept:
        raise Violation("inv1", f"the cache has {length} positions for {len(sequence.tokens)} tokens of a history of {kept}")
    start = since or record.still_equal(window)
    held, expected = sequence.tokens[start:], record.kept(window, start)[: max(0, length - start)]
    if held != expected.tolist():
        raise Violation("inv1", f"the cache holds other tokens than the history from position {start} on")
    if start <= len(record.checked_tokens):
        record.checked_tokens[start:], record.checked_history[start:] = held, expected
    if sequence.suspended is None and length:
        for group in engine.spec.groups:
            pages = sequence.pages[group.name]
            first = 0 if group.window is None else max(0, length - group.window) // group.page_size
            last = -(-length // group.page_size)
            if len(pages) < last or min(pages[first:last]) < 0:
                raise Violation("inv1", f"layer group {group.name} lacks pages of {length} positions")
    if record.dropped + length < record.floor:
        raise Violation("inv2", f"the next position was {record.floor}, and is now {record.dropped + length}")
    record.floor = record.dropped + length
