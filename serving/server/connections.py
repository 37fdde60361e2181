"""Connections of the HTTP server: how much of their bytes is parsed, and when; and which are closed that keep it
waiting."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections import deque
from functools import partial
from http import HTTPStatus
from typing import Any

FIRST_S = 5.0
"""A connection on which the headers of no request have come for so long is closed."""
MAX_HEADERS = 100
"""Headers of a request. Each costs the loop time in which it answers nobody."""
MAX_HEAD = 16 * 1024
"""Bytes of a request's first line and headers."""
FREE_PIECES, MEAN_PIECE = 32, 48
"""A request is refused whose body comes in more pieces than so many, of fewer bytes on average. A piece is a chunk, or
what one read gets."""
MAX_AFTER = 1024
"""Bytes of the trailers of a chunked body, or of what stands before a chunk."""
SHARE = 64
"""Events that are parsed of one connection before another one has its turn."""
FIRST_TURNS, LATER_TURNS = 8, 4
"""Connections that have a turn before the loop sees to other things, such as answers and new connections: on which no
request has come yet, and others."""
ACCEPTED = FIRST_TURNS
"""New connections that the loop takes before it sees to other things."""
WAITING = 512
"""Connections that may wait in the system until they are taken."""
MAX_UNREAD = 64 * 1024
"""No more is read from a connection while so many of its bytes wait to be parsed."""
FEED, FEED_BODY = 2 * 1024, 64 * 1024
"""Bytes that the parser gets at a time, since it parses all trailers that it has in one go; and of a body whose length
it knows."""
LINGER_S = 1.0
"""A client that is refused may read why for so long."""

_BLANK_LINE = re.compile(rb"\n\r?\n")


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A connection at one look. cycle: its latest request. quiet: no answer is under way. pending: bytes that the
    client has not taken. paused: how often it has taken some, if more are held back until it does."""

    cycle: Any
    quiet: bool
    pending: int
    paused: int | None


class _Turns:
    """Whose bytes are parsed next: connections on which no request has come yet, and then others, some of each, in the
    order in which they came. Those that the client has closed meanwhile have no turn."""

    def __init__(self):
        self._first, self._later = deque[Any](), deque[Any]()
        self._due = False

    def add(self, each: Any) -> None:
        """This connection has something to parse."""
        if not each.waits:
            each.waits = True
            (self._first if each.cycle is None else self._later).append(each)
            self._run_soon(each.loop)

    def _run_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._due:
            self._due = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = False
        turns = list[Any]()  # whoever has had one waits for the next run: the loop may hear meanwhile that a client has gone
        for queue, most in ((self._first, FIRST_TURNS), (self._later, LATER_TURNS)):
            until = len(turns) + most
            while queue and len(turns) < until:
                each = queue.popleft()
                each.waits = False
                if not each.transport.is_closing():
                    turns.append(each)
        for each in turns:
            try:
                each.share()
            except Exception as error:  # as asyncio does; the others still have their turns
                loop.call_exception_handler({"message": "a request could not be parsed", "exception": error, "protocol": each})
                each.transport.abort()
        if self._first or self._later:
            self._run_soon(loop)


def quick_handshakes(seconds: float) -> None:
    """Let servers of the running event loop give a client of TLS so long for its handshake, and for its goodbye. Until
    the first is done, no protocol hears of a connection; uvicorn would wait for a minute."""
    loop = asyncio.get_running_loop()
    loop.create_server = partial(loop.create_server, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds)


def paced() -> type:
    """h11's connection, which parses no more than its turn allows, and refuses what would take too long."""
    from uvicorn.protocols.http.h11_impl import h11

    class Paced(h11.Connection):
        def __init__(self, protocol: Any):
            super().__init__(h11.SERVER, MAX_HEAD)
            self.unread, self.left, self._protocol = bytearray(), 0, protocol
            self._length = self._pieces = self._size = 0

        def next_event(self) -> Any:
            """As h11's. NEED_DATA where the turn is over, too: then `left` is 0."""
            while self.left:
                self.left -= 1
                if self.their_state is h11.IDLE and self._large_head():
                    said = f"{MAX_HEADERS} headers, or {MAX_HEAD:,} bytes of them and the first line"
                    return self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request has more than {said}, the server's limit")
                event = super().next_event()
                if isinstance(event, h11.Request):
                    self._pieces = self._size = 0
                    named = dict(event.headers)
                    self._length = int(named.get(b"content-length", 0))
                    if b"transfer-encoding" in named:
                        self.left = 0  # no chunk is parsed for a client that is refused by its headers, or has gone
                elif isinstance(event, h11.Data):
                    self._pieces, self._size = self._pieces + 1, self._size + len(event.data)
                    if self._pieces > FREE_PIECES and self._size < MEAN_PIECE * self._pieces:
                        said = f"more than {FREE_PIECES} pieces, of fewer than {MEAN_PIECE} bytes on average"
                        return self._refuse(HTTPStatus.BAD_REQUEST, f"the body comes in {said}: send larger chunks")
                elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY and len(self.trailing_data[0]) > MAX_AFTER:
                    said = f"more than {MAX_AFTER:,} bytes before a chunk or after the last one"
                    return self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the body has {said}, the server's limit")
                if event is not h11.NEED_DATA or not self.unread or self._protocol.flow.read_paused:
                    return event
                feed = max(FEED, min(FEED_BODY, self._length - self._size))
                self.receive_data(bytes(self.unread[:feed]))
                del self.unread[:feed]
            return h11.NEED_DATA

        def _large_head(self) -> bool:
            """Whether the head of the request that comes has more lines or bytes than the server reads."""
            head = self.trailing_data[0]
            if head.count(b"\n") <= MAX_HEADERS and len(head) <= MAX_HEAD:
                return False
            if end := _BLANK_LINE.search(head):
                head = head[: end.start() + 1]
            return head.count(b"\n") > MAX_HEADERS + 1 or len(head) > MAX_HEAD

        def _refuse(self, status: HTTPStatus, said: str) -> Any:
            self._protocol.refuse(status, said)
            return h11.NEED_DATA

    return Paced


def impatient(stall_s: float, most: int) -> type:
    """uvicorn's protocol of HTTP, with limits of its own.

    It closes a connection whose next request is not complete in its headers for `stall_s` seconds (the first one: for
    `FIRST_S`), and cuts off one whose client takes nothing of an answer for so long. most: connections at once; beyond
    it, the oldest one is cut off on which no request is under way. So connections on which nothing comes keep nobody
    out. What comes is parsed by turns, so that a connection on which much comes keeps nobody waiting, either.
    """
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.h11_impl import H11Protocol, h11

    opened: dict[Any, None] = {}  # the oldest first
    turns, connection = _Turns(), paced()

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn, self.flow = connection(self), FlowControl(self)
            self.waits = self._refused = False
            self._taken, opened[self] = 0, None
            if len(opened) > most:
                oldest = next((each for each in opened if each is not self and each.quiet), None)
                if oldest is not None:
                    opened.pop(oldest)
                    oldest.transport.abort()
            self._timer = self.loop.call_later(min(FIRST_S, stall_s), self._first_look)

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            self._timer.cancel()
            self.conn.unread.clear()
            super().connection_lost(exc)

        def resume_writing(self) -> None:
            self._taken += 1
            super().resume_writing()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._unset_keepalive_if_required()
            self.conn.unread += data
            if len(self.conn.unread) > MAX_UNREAD:
                self.transport.pause_reading()
            turns.add(self)

        def handle_events(self) -> None:
            """There may be something to parse: in this connection's turn."""
            turns.add(self)

        def pause_reading(self) -> None:
            """What uvicorn asks for while the application takes no more."""
            self.transport.pause_reading()

        def resume_reading(self) -> None:
            """What uvicorn asks for when the application goes on."""
            turns.add(self)

        def share(self) -> None:
            """Parse what is this connection's turn."""
            self.conn.left = SHARE
            super().handle_events()
            if self._refused or self.transport.is_closing():
                return
            if not self.conn.left:
                turns.add(self)
            elif len(self.conn.unread) <= MAX_UNREAD and not self.flow.read_paused:
                self.transport.resume_reading()

        def send_400_response(self, msg: str) -> None:
            self.refuse(HTTPStatus.BAD_REQUEST, "the request is no valid HTTP")

        def refuse(self, status: HTTPStatus, said: str) -> None:
            """Answer the request that comes with an error, unless its answer has begun, and read no more."""
            if self._refused:
                return
            self._refused = True
            self.conn.unread.clear()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
                self.transport.abort()
                return
            if self.cycle is not None:  # whoever reads its body hears that the client has gone
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = json.dumps({"error": {"message": said, "type": "invalid_request_error", "param": None, "code": None}}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            self.transport.resume_reading()  # what still comes is dropped: unread, it would make the system drop the answer
            self._timer.cancel()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

        @property
        def quiet(self) -> bool:
            """Whether no request is under way."""
            return self.cycle is None or self.cycle.response_complete or self._refused or self.transport.is_closing()

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
            self._timer = self.loop.call_later(stall_s, self._look, now)

    return Impatient
