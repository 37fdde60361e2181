"""Clients that open calls or connections, and then say nothing."""

import contextlib
import gc
import itertools
import json
import queue
import shutil
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
import weakref
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from session_servers import WAIT, certificate, serving, until
from tiny_models import make_model

from kvjax import Engine
from kvjax.client import Client, InvalidArgument, ResourceExhausted
from kvjax.client.wire import SERVICE, protocol
from kvjax.serving.server import app, connections
from kvjax.serving.server import grpc_server as server_module

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(num_layers=1), "dense", pages=48, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@contextlib.contextmanager
def silent_calls(server, method, count, metadata=()):
    """Calls that are open, and whose messages never come."""
    never = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
        opened = channel.stream_stream(method)
        calls = [opened(iter(never.get, None), timeout=WAIT, metadata=metadata) for _ in range(count)]
        try:
            yield calls
        finally:
            for each in calls:
                each.cancel()
                never.put(None)


def places(server):
    return server._admission._places


@pytest.mark.parametrize("tokens", [(), (TOKEN,)], ids=["open", "token"])
def test_health_calls_that_say_nothing_keep_nobody_out(engine, tokens):
    with (
        serving(engine, max_calls=4, tokens=tokens, stall_s=2.0) as server,
        silent_calls(server, "/grpc.health.v1.Health/Check", 60) as held,
    ):
        until(lambda: sum(each.done() for each in held) >= 50)
        with Client(f"127.0.0.1:{server.port}", token=tokens[0] if tokens else None, timeout_s=WAIT) as client:
            assert client.create_session([1, 2]).info().history_tokens == 2
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        until(lambda: not server._admission._asking)  # the others are cut off, too


@pytest.mark.parametrize("name", ["Converse", "Generate", "GetSessionInfo"])
def test_a_call_whose_first_message_does_not_come_is_cut_off(engine, name):
    bearer = (("authorization", f"Bearer {TOKEN}"),)
    with serving(engine, max_calls=2, tokens=(TOKEN,), stall_s=0.5) as server:
        with silent_calls(server, f"/{SERVICE}/{name}", 2, bearer) as held:
            until(lambda: places(server) == 0)
            until(lambda: all(each.done() for each in held) and places(server) == 2)
            assert {each.code() for each in held} == {grpc.StatusCode.CANCELLED}
        assert 'code="CANCELLED"' in server.metrics.text().decode()


def frame(kind, flags, stream, content=b""):
    """A frame of HTTP/2."""
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def literal(text):
    return bytes([len(text)]) + text.encode()


def resets(server, stopped):
    """Begins calls on one connection, and resets each at once, until `stopped`."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/Converse", ":authority": "x", "te": "trailers"}
    fields |= {"content-type": "application/grpc"}
    begin = b"".join(b"\0" + literal(name) + literal(value) for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", server.port)) as given, contextlib.suppress(OSError):
        given.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        given.settimeout(0.001)
        for first in itertools.count(1, 200):
            if stopped.is_set():
                return
            calls = (frame(1, 4, number, begin) + frame(3, 0, number, b"\0\0\0\x08") for number in range(first, first + 200, 2))
            given.settimeout(WAIT)
            given.sendall(b"".join(calls))
            given.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                given.recv(1 << 20)


def test_calls_that_are_reset_at_once_keep_nobody_out(engine):
    stopped = threading.Event()
    with serving(engine) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        thread = threading.Thread(target=resets, args=(server, stopped))
        thread.start()
        try:
            time.sleep(1)
            for _ in range(20):
                with client.create_session([1, 2]) as session:
                    assert len(list(session.generate(max_new_tokens=2, stop_token_ids=()))) == 2
        finally:
            stopped.set()
            thread.join()


def test_watches_that_say_nothing_are_cut_off(engine):
    with serving(engine, max_calls=2, stall_s=0.5) as server, silent_calls(server, "/grpc.health.v1.Health/Watch", 2) as held:
        until(lambda: all(each.done() for each in held) and places(server) == 2)


def test_a_call_gets_the_place_of_the_stream_that_has_been_silent_longest(engine):
    types = protocol()
    method = types.methods["Converse"]
    with serving(engine, max_calls=2, stall_s=1.0) as server, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{server.port}"
        client = stack.enter_context(Client(address, timeout_s=WAIT))
        session = client.create_session([1, 2])
        call = stack.enter_context(grpc.insecure_channel(address)).stream_stream(
            method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
        )
        append = types.ConverseRequest(session_id=session.id, append=types.Append(token_ids=[3]))
        asked = [queue.SimpleQueue() for _ in range(2)]
        talks = [call(iter(each.get, None), timeout=WAIT) for each in asked]
        for each, talk in zip(asked, talks, strict=True):
            each.put(append)
            assert next(talk).WhichOneof("event") == "appended"
        until(lambda: len(server._admission._silent) == 2)
        with pytest.raises(ResourceExhausted, match="max-calls"):
            session.info()  # both were heard a moment ago
        time.sleep(1.2)
        assert session.info().history_tokens == 4
        with pytest.raises(grpc.RpcError) as cut:
            next(talks[0])
        assert cut.value.code() == grpc.StatusCode.CANCELLED
        asked[1].put(append)
        assert next(talks[1]).appended.history_tokens == 5
        for each in asked:
            each.put(None)


def http(server):
    return socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT)


def test_a_name_of_megabytes_is_cut_in_the_answer_and_in_the_log(engine, caplog):
    name = "n" * 2**20
    with serving(engine, http_port=0) as server, caplog.at_level("INFO", "kvjax.server"):
        made = urllib.request.Request(
            f"http://127.0.0.1:{server.http_port}/v1/completions", json.dumps({"model": "kvjax", "prompt": "a", name: 1}).encode()
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(made, timeout=WAIT)
        error = json.loads(refused.value.read())["error"]
    assert error["param"] == "n" * 77 + "..."
    assert len(error["message"]) <= 1000
    assert "nnn..." in caplog.text
    assert "n" * 100 not in caplog.text


def test_a_client_that_takes_no_answers_is_cut_off(engine):
    """Answers that are not streamed. It asks many times without reading, until nothing more fits between it and the
    server."""
    asked = b"GET /deprecation HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    with serving(engine, http_port=0, stall_s=0.5) as server, contextlib.closing(socket.socket()) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.http_port))
        reader.settimeout(WAIT)
        with pytest.raises(ConnectionError):
            reader.sendall(asked * 1000)
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz", timeout=WAIT).read() == b"ok\n"


def test_connections_on_which_nothing_comes_keep_nobody_out(engine, monkeypatch):
    monkeypatch.setattr(connections, "FIRST_S", 1.0)
    with serving(engine, http_port=0, max_calls=2) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(http(server)) for _ in range(60)]
        for _ in range(5):
            assert urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz", timeout=WAIT).read() == b"ok\n"
        ended = []
        for each in held:
            with contextlib.suppress(ConnectionError):
                ended.append(each.recv(1))
        assert set(ended) <= {b""}  # all of them are closed, long before stall_s


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_handshake_that_does_not_come_is_cut_off(engine, tmp_path, monkeypatch):
    """Over HTTP with TLS, no protocol hears of such a connection, so it does not count as one, either."""
    monkeypatch.setattr(server_module, "HANDSHAKE_MS", 1000)
    with serving(engine, http_port=0, stall_s=1.0, certificate=certificate(tmp_path)) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(http(server)) for _ in range(10)]
        held += [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)) for _ in range(3)]
        for each in held[::2]:
            each.sendall(b"\x16\x03\x01")
        context = ssl.create_default_context(cafile=tmp_path / "chain")
        silent = stack.enter_context(context.wrap_socket(http(server), server_hostname="localhost"))
        started = time.monotonic()
        for each in (*held, silent):
            each.settimeout(WAIT)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert each.recv(1) == b""
        until(lambda: not server._web._server.server_state.connections)
        assert time.monotonic() - started < 15


def test_a_body_that_does_not_end_keeps_nobody_out(engine):
    with serving(engine, http_port=0, max_calls=2) as server, contextlib.ExitStack() as stack:
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        slow = [stack.enter_context(http(server)) for _ in range(3)]
        for number, each in enumerate(slow, start=1):
            each.sendall(begun)
            until(lambda number=number: len(server._web._routes._bodies) == min(2, number))
        assert b" 429 " in slow[0].recv(100), "the slowest gives way"
        slow[2].sendall(b" " * 98 + b"}")
        assert b" 400 " in slow[2].recv(100)
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz", timeout=WAIT).read() == b"ok\n"


def test_health_calls_of_every_kind_are_cut_off(engine):
    with serving(engine, max_calls=2, stall_s=0.5) as server, silent_calls(server, "/grpc.health.v1.Health/List", 40) as held:
        until(lambda: all(each.done() for each in held))
        assert Client(f"127.0.0.1:{server.port}", timeout_s=WAIT).create_session([1]).info().history_tokens == 1


def test_reflection_that_is_silent_gives_its_place_away(engine):
    """It never ends by itself."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with serving(engine, max_calls=2, stall_s=0.5) as server, contextlib.ExitStack() as stack:
        never, held = queue.SimpleQueue(), []
        for _ in range(2):
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}"))
            first = reflection_pb2.ServerReflectionRequest(list_services="")
            requests = itertools.chain([first], iter(never.get, None))
            held.append(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=WAIT))
            next(held[-1])
        until(lambda: places(server) == 0 and len(server._admission._silent) == 2)
        time.sleep(0.6)
        with Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
            assert client.create_session([1]).info().history_tokens == 1
        for _ in range(2):
            never.put(None)


def test_a_token_id_beyond_all_vocabularies_is_a_400(engine):
    with serving(engine, http_port=0, model_name="tiny") as server:
        for ids in ([2**32], [2**40]):
            body = json.dumps({"model": "tiny", "prompt": ids, "max_tokens": 1}).encode()
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v1/completions", body, timeout=WAIT)
            assert caught.value.code == 400


def test_a_body_that_python_cannot_read_is_explained_to_its_author(engine):
    """Python's own words tell how the server's program should be changed."""
    bodies = {
        b'{"model": "tiny", "prompt": [' + b"9" * 100_000 + b"]}": "a number has more than 4,300 digits; no field takes such a number",
        b"[" * 100_000: "lists and objects are nested too deeply",
        b"{": "the body is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    }
    with serving(engine, http_port=0, model_name="tiny") as server:
        for body, said in bodies.items():
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v1/completions", body, timeout=WAIT)
            assert (caught.value.code, json.load(caught.value)["error"]["message"]) == (400, said)


def test_large_bodies_are_parsed_one_after_the_other_beside_other_pages(engine, monkeypatch):
    parsing, most, go_on = [], [], threading.Event()

    def slowly(content):
        parsing.append(content)
        most.append(len(parsing))
        assert go_on.wait(WAIT)
        parsing.pop()
        return json.loads(content)

    monkeypatch.setattr(app, "_json", slowly)
    large = b"[" + b"[]," * 2**16 + b"[]]"
    with serving(engine, http_port=0) as server, contextlib.ExitStack() as stack:
        posts = [stack.enter_context(http(server)) for _ in range(3)]
        for each in posts:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(large), large))
        until(lambda: parsing and server._web._routes._running == 3)
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz", timeout=WAIT).read() == b"ok\n"
        go_on.set()
        assert all(b" 400 " in each.recv(100) for each in posts)
    assert most == [1, 1, 1]


def test_few_long_texts_are_tokenized_at_once_beside_short_ones(engine, monkeypatch):
    """Each takes much memory meanwhile."""
    parsed, inside, most, go_on, real = [], [], [], threading.Event(), app._json

    def slowly(body, *given):
        if len(body["prompt"]) > app.QUICK_JSON:
            inside.append(body)
            most.append(len(inside))
            assert go_on.wait(WAIT)
            inside.remove(body)
        raise InvalidArgument("it was looked at")

    monkeypatch.setattr(app, "_json", lambda content: parsed.append(content) or real(content))
    monkeypatch.setattr(app, "asked", slowly)
    with serving(engine, http_port=0) as server, contextlib.ExitStack() as stack:
        posts = [stack.enter_context(http(server)) for _ in range(5)]
        for number, each in enumerate(posts):
            body = json.dumps({"prompt": str(number) * (app.QUICK_JSON + 1 if number < 4 else 9)}).encode()
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            until(lambda number=number: len(parsed) == number + 1)
        assert b" 400 " in posts.pop().recv(100)
        go_on.set()
        assert all(b" 400 " in each.recv(100) for each in posts)
    assert max(most) == app.LONG_TEXTS


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(engine):
    with serving(engine, http_port=0) as server, http(server) as post:
        post.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 17000000\r\n\r\n{")
        post.settimeout(WAIT / 4)
        assert b" 413 " in post.recv(100)


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(engine, monkeypatch):
    monkeypatch.setattr(app, "_json", lambda content: pytest.fail("it was parsed"))
    half = app.MAX_PIECES // 2
    for body, values in (
        (b"[" + b"0," * 2 * half + b"0]", "2,097,152 values"),
        (b'{"user": [' + b"[]," * (half // 4) + b"[]]}", "counts as eight"),
        (b'{"metadata": {' + b'"a\\\\":0,' * (half // 4) + b'"a":0}}', "counts as eight"),
        (b'"' * app.MAX_PIECES, "send fewer"),
    ):
        with serving(engine, http_port=0) as server, pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v1/completions", body, timeout=WAIT)
        assert caught.value.code == 400
        assert values in json.loads(caught.value.read())["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_a_body_in_another_encoding_is_no_json(encoding):
    with pytest.raises(InvalidArgument, match="the body is no JSON"):
        app._json(bytearray('{"prompt": "\u0122", "x": []}'.encode(encoding)))
    assert app._json(bytearray('{"prompt": "\u0122"}'.encode("utf-8-sig"))) == {"prompt": "\u0122"}


def test_text_that_looks_like_many_values_is_one():
    for text in ('{"[x, y":" \\' * 2**19, "\\" * 2**20, '\\"' * 2**20):
        app._check_pieces(bytearray(json.dumps({"prompt": text}).encode()))
    app._check_pieces(bytearray(json.dumps({"prompt": list(range(10**6)), "stop_token_ids": [1] * 10**5}).encode()))


def test_after_a_large_body_none_is_parsed_for_a_while(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(app.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(app.time, "sleep", lambda seconds: slept.append(seconds))

    def slowly(content):
        now[0] += 0.5
        return content

    monkeypatch.setattr(app, "_json", slowly)
    parser = app._Parser()
    for _ in range(2):
        parser._parse(bytearray(b"[]"))
    now[0] += 10
    parser._parse(bytearray(b"[]"))
    parser.close()
    assert slept == [0, 0.5 * app.PAUSE, 0]


class Parsed(dict):
    """One that can be referred to weakly."""


def test_a_request_that_runs_does_not_hold_its_body(engine, monkeypatch):
    bodies, begun, go_on = [], threading.Event(), threading.Event()

    def parsed(content):
        body = Parsed(json.loads(content))
        bodies.append(weakref.ref(body))
        return body

    def running(*given):
        begun.set()
        assert go_on.wait(WAIT)
        raise ResourceExhausted("enough")

    monkeypatch.setattr(app, "_json", parsed)
    monkeypatch.setattr(app, "TextCompletion", running)
    monkeypatch.setattr(app, "Form", lambda *given: None)
    monkeypatch.setattr(app, "asked", lambda *given: SimpleNamespace(stream=False))
    content = json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "user": "x" * 2**17}).encode()
    with serving(engine, http_port=0, model_name="tiny") as server, http(server) as post:
        post.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        assert begun.wait(WAIT)
        gc.collect()
        assert [each() for each in bodies] == [None]
        go_on.set()
        assert b" 429 " in post.recv(100)


def test_a_server_in_a_hurry_waits_for_no_call(engine, monkeypatch):
    monkeypatch.setattr(server_module, "LAST_S", WAIT)
    with serving(engine) as server, silent_calls(server, f"/{SERVICE}/Converse", 1) as held:
        until(lambda: len(server._admission._silent) == 1)
        hurry = threading.Event()
        hurry.set()
        began = time.monotonic()
        server.stop(WAIT, hurry)
        assert time.monotonic() - began < WAIT / 4
        until(held[0].done)
