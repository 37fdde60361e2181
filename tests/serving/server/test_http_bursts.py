"""Clients that send over HTTP what takes long to parse: how much of it is parsed, and when."""

import asyncio
import contextlib
import http.client
import json
import socket
import urllib.request
from types import SimpleNamespace

import pytest
from session_servers import WAIT, serving, until
from tiny_models import make_model
from uvicorn.protocols.http.h11_impl import h11

from kvjax import Engine
from kvjax.serving.server import connections
from kvjax.serving.server.connections import FIRST_TURNS, FREE_PIECES, LATER_TURNS, MAX_AFTER, MAX_HEAD, MAX_HEADERS, SHARE, _Turns

TOKEN = "a-token-of-the-tests"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(num_layers=1), "dense", pages=48, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@pytest.fixture
def parsed(monkeypatch):
    """The events that h11 has parsed."""
    events, real = [], h11.Connection.next_event

    def noted(self):
        events.append(real(self))
        return events[-1]

    monkeypatch.setattr(h11.Connection, "next_event", noted)
    return events


def connected(server):
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT)


def answered(server, request):
    """The status and the error of one request's answer, read to its end."""
    with connected(server) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        content = response.read()
    return response.status, json.loads(content)["error"]["message"] if response.status >= 400 else content


def is_well(server):
    return urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz", timeout=WAIT).read() == b"ok\n"


@pytest.mark.parametrize("tokens", [(), (TOKEN,)], ids=["open", "token"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "kept"])
def test_of_a_body_in_small_pieces_few_are_parsed(engine, parsed, tokens, closed):
    """Each costs the loop time in which it answers nobody. The client may have gone long ago."""
    burst = 20
    with serving(engine, http_port=0, tokens=tokens) as server, contextlib.ExitStack() as stack:
        for _ in range(burst):
            connection = stack.enter_context(connected(server))
            connection.sendall(CHUNKED + b"\r\n" + b"1\r\na\r\n" * 4000)
            if closed:
                connection.close()
        assert is_well(server)
        until(lambda: all(each.quiet and not each.waits for each in [*server._web._server.server_state.connections]))
    assert len(parsed) < burst * 2 * FREE_PIECES


def test_a_body_in_small_pieces_is_refused_and_one_in_large_pieces_is_not(engine):
    small, large = b"1\r\na\r\n", b"800\r\n" + b" " * 2048 + b"\r\n"
    with serving(engine, http_port=0, max_message_bytes=2**24) as server:
        status, said = answered(server, CHUNKED + b"\r\n" + small * (FREE_PIECES + 1))
        assert (status, said) == (400, "the body comes in more than 32 pieces, of fewer than 48 bytes on average: send larger chunks")
        for pieces in (small * FREE_PIECES, large * 5000):  # 10 MB in 5,000 chunks
            status, said = answered(server, CHUNKED + b"\r\n" + pieces + b"0\r\n\r\n")
            assert status == 400
            assert said.startswith("the body is no JSON")


def test_headers_beyond_the_limit_are_refused_before_they_are_parsed(engine, parsed):
    with serving(engine, http_port=0) as server:
        for lines in (b"a: b\r\n" * 12_000, b"a: b\r\n" * MAX_HEADERS, b"a: " + b"b" * MAX_HEAD + b"\r\n"):
            for ended in (b"\r\n", b""):
                if ended or len(lines) > MAX_HEADERS * 6:
                    status, said = answered(server, GET + lines + ended)
                    assert status == 431
                    assert said == "the request has more than 100 headers, or 16,384 bytes of them and the first line, the server's limit"
        assert not [each for each in parsed if isinstance(each, h11.Request)]
        status, content = answered(server, GET + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        assert (status, content) == (200, b"ok\n")


def test_trailers_beyond_the_limit_are_refused(engine):
    with serving(engine, http_port=0) as server:
        status, said = answered(server, CHUNKED + b"\r\n0\r\n" + b"a:b\r\n" * 12_000 + b"\r\n")
        assert status == 431
        assert said == f"the body has more than {MAX_AFTER:,} bytes before a chunk or after the last one, the server's limit"


def test_a_body_that_turns_out_to_be_invalid_after_its_answer_is_cut_off(engine, caplog):
    with serving(engine, http_port=0, tokens=(TOKEN,)) as server, connected(server) as connection:
        connection.sendall(CHUNKED + b"\r\n")
        assert b" 401 " in connection.recv(1000)
        connection.sendall(b"no chunk\r\n")
        more = []
        with contextlib.suppress(ConnectionError):
            more.extend(iter(lambda: connection.recv(1000), b""))
        assert b"HTTP/1.1" not in b"".join(more), "one answer, and no other"
        assert is_well(server)
    assert not [each for each in caplog.records if each.name == "asyncio"]


def test_requests_that_follow_each_other_on_one_connection_are_all_answered(engine):
    with serving(engine, http_port=0) as server, connected(server) as connection:
        connection.sendall((GET + b"\r\n") * 2000 + GET + b"Connection: close\r\n\r\n")
        content = b"".join(iter(lambda: connection.recv(2**20), b""))
    assert content.count(b"HTTP/1.1 200 OK\r\n") == 2001


def test_the_loop_takes_few_new_connections_at_once_and_lets_many_wait(engine, monkeypatch):
    listened, taken, real = [], [], socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda self, most: listened.append(most) or real(self, most))
    loops = asyncio.selector_events.BaseSelectorEventLoop
    accept = loops._accept_connection
    monkeypatch.setattr(loops, "_accept_connection", lambda *given, **named: taken.append(given[5]) or accept(*given, **named))
    with serving(engine, http_port=0) as server:
        assert is_well(server)
    assert set(taken) == {connections.ACCEPTED}
    assert listened[-1] == connections.WAITING


class Loop:
    """What turns need of a loop. errors: what it was told."""

    def __init__(self):
        self.due, self.errors = [], []

    def call_soon(self, call, *given):
        self.due.append((call, given))

    def call_exception_handler(self, context):
        self.errors.append(context["exception"])

    def run_once(self):
        due, self.due = self.due, []
        for call, given in due:
            call(*given)


class Busy:
    """A connection on which always more comes. cycle: None before its first request."""

    def __init__(self, turns, loop, had, cycle=None):
        self.turns, self.loop, self.had, self.cycle, self.waits = turns, loop, had, cycle, False
        self.gone = False
        self.transport = SimpleNamespace(is_closing=lambda: self.gone, abort=lambda: setattr(self, "gone", True))
        turns.add(self)

    def share(self):
        self.had.append(self)
        self.cycle = self.cycle or "first"
        self.turns.add(self)


def test_a_new_connection_does_not_wait_for_those_on_which_much_comes():
    loop, turns, had = Loop(), _Turns(), []
    for _ in range(1000):
        Busy(turns, loop, had, "a cycle")
    loop.run_once()
    assert len(had) == LATER_TURNS
    new = [Busy(turns, loop, had) for _ in range(FIRST_TURNS)]
    loop.run_once()
    assert had[LATER_TURNS : LATER_TURNS + FIRST_TURNS] == new
    assert len(had) == 2 * LATER_TURNS + FIRST_TURNS, "the others go on"
    for _ in range(1000 // LATER_TURNS + 2):
        loop.run_once()
    assert len(set(had)) == 1000 + FIRST_TURNS, "everybody had a turn"


def test_a_client_that_has_gone_has_no_turn_and_an_error_ends_nobody_elses():
    loop, turns, had = Loop(), _Turns(), []
    gone, broken, well = (Busy(turns, loop, had) for _ in range(3))
    gone.gone = True
    broken.share = lambda: 1 / 0
    loop.run_once()
    assert had == [well]
    assert broken.gone
    assert [type(each) for each in loop.errors] == [ZeroDivisionError]


def test_one_turn_parses_a_bounded_number_of_events():
    """A body of large chunks is never refused, and gives way, too."""
    parser = connections.paced()(SimpleNamespace(flow=SimpleNamespace(read_paused=False)))
    parser.unread += CHUNKED + b"\r\n" + (b"40\r\n" + b"a" * 64 + b"\r\n") * 1000
    events = []
    for _ in range(3):
        parser.left = SHARE
        events.append(0)
        while parser.next_event() is not h11.NEED_DATA:
            events[-1] += 1
        assert parser.left == 0
    assert events[0] == 1, "the headers"
    assert 0 < events[1] <= SHARE
    assert 0 < events[2] <= SHARE
