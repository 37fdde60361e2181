"""Connections of the HTTP server that are kept waiting: which are closed, and when."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import Any

FIRST_S = 5.0
"""A connection on which the headers of no request have come for so long is closed."""
MAX_PIECES = 4096
"""A connection is cut off whose request has a body in more pieces."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A connection at one look. cycle: its latest request. quiet: no answer is under way. pending: bytes that the
    client has not taken. paused: how often it has taken some, if more are held back until it does."""

    cycle: Any
    quiet: bool
    pending: int
    paused: int | None


def quick_handshakes(seconds: float) -> None:
    """Let servers of the running event loop give a client of TLS so long for its handshake, and for its goodbye. Until
    the first is done, no protocol hears of a connection; uvicorn would wait for a minute."""
    loop = asyncio.get_running_loop()
    loop.create_server = partial(loop.create_server, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds)


def impatient(stall_s: float, most: int) -> type:
    """uvicorn's protocol of HTTP, with limits of its own.

    It closes a connection whose next request is not complete in its headers for `stall_s` seconds (the first one: for
    `FIRST_S`), and cuts off one whose client takes nothing of an answer for so long. most: connections at once; beyond
    it, the oldest one is cut off on which no request is under way. So connections on which nothing comes keep nobody
    out.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol, h11

    opened: dict[Any, None] = {}  # the oldest first

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._events, self._next_event = 0, self.conn.next_event
            self.conn.next_event = self._counted_event
            self._taken, opened[self] = 0, None
            if len(opened) > most:
                oldest = next((each for each in opened if each is not self and each.quiet), None)
                if oldest is not None:
                    opened.pop(oldest)
                    oldest.transport.abort()
            self.loop.call_later(min(FIRST_S, stall_s), self._first_look)

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            super().connection_lost(exc)

        def resume_writing(self) -> None:
            self._taken += 1
            super().resume_writing()

        def _counted_event(self) -> Any:
            event = self._next_event()
            self._events = 0 if isinstance(event, h11.Request) else self._events + isinstance(event, h11.Data)
            if self._events > MAX_PIECES:  # each costs the loop time in which it answers nobody
                self.transport.abort()
                return h11.NEED_DATA
            return event

        @property
        def quiet(self) -> bool:
            """Whether no request is under way."""
            return self.cycle is None or self.cycle.response_complete or self.transport.is_closing()

        def _first_look(self) -> None:
            if self.cycle is None:
                self.transport.close()
            self._look(None)

        def _look(self, before: _Seen | None) -> None:
            if self not in opened:
                return
            now = _Seen(self.cycle, self.quiet, self.transport.get_write_buffer_size(), self._taken if self.flow.write_paused else None)
            if before is not None and before.cycle is now.cycle:
                if now.paused is not None and now.paused == before.paused:
                    self.transport.abort()  # to close it would wait for the client, too
                elif before.quiet and now.quiet and 0 < before.pending <= now.pending:
                    self.transport.abort()
                elif before.quiet and now.quiet and not now.pending:
                    self.transport.close()
            self.loop.call_later(stall_s, self._look, now)

    return Impatient
