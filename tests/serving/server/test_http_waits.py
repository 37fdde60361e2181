"""HTTP while the engine is busy: who leaves frees what it held, metrics wait for nothing, streams are kept open; who
may call; room."""

import contextlib
import dataclasses
import gc
import http.client
import json
import logging
import signal
import socket
import threading
import time
import urllib.request

import grpc
import openai
import pytest
from character_tokenizer import make_tokenizer
from session_servers import WAIT, serving, until
from tiny_models import make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import Client, errors
from kvjax.client.errors import SessionError, Unauthenticated
from kvjax.client.wire import SERVICE, error_of, protocol
from kvjax.serving.cli.serve import _until_told
from kvjax.serving.server import app
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

CHUNK = 32
CHUNKS = 20
TOKENS = ("a-token-of-the-tests", "another-token-of-them")
LONG = "x" * (CHUNKS * CHUNK)


@pytest.fixture(scope="module")
def engine():
    model = dataclasses.replace(make_model(vocab_size=99, eos_token_ids=(97,), max_positions=700), tokenizer=make_tokenizer())
    return Engine(model, "dense", pages=48, page_size=16, prefill_chunk=CHUNK, batch_buckets=(4,))


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine, http_port=0, model_name="tiny", max_calls=6) as running:
        yield running


@pytest.fixture
def slow(engine, monkeypatch):
    """Each chunk of prefill takes a while. A list of those that have begun, by the length of the sequence before it."""
    begun, advance = [], engine._prefiller.advance

    def slowly(run, slices=None):
        begun.append(run.first)
        time.sleep(0.1)
        return advance(run, slices)

    monkeypatch.setattr(engine._prefiller, "advance", slowly)
    return begun


@pytest.fixture
def held(engine, monkeypatch):
    """The engine stands still, as while a program is compiled, until the first event is set. The second says that it
    does."""
    go, stands, advance = threading.Event(), threading.Event(), engine._prefiller.advance

    def held_back(run, slices=None):
        stands.set()
        assert go.wait(WAIT)
        return advance(run, slices)

    monkeypatch.setattr(engine._prefiller, "advance", held_back)
    yield go, stands
    go.set()


def client_of(server, **options):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", **{"api_key": "none", "max_retries": 0} | options)


def raw(server, **body):
    """A connection over which a request was sent."""
    content = json.dumps({"model": "tiny", "max_tokens": 3, "temperature": 0} | body).encode()
    sent = socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT)
    sent.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return sent


def page(server, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}", timeout=WAIT / 4) as found:
        return found.read().decode()


def nothing_runs(server):
    there = server.runtime.gauges()
    return not any(there[name] for name in ("sessions", "generating", "waiting", "device_pages"))


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_during_prefill_frees_its_slot_and_its_pages(server, slow, stream):
    sent = raw(server, prompt=LONG, stream=stream)
    until(lambda: len(slow) >= 2)
    sent.close()
    until(lambda: nothing_runs(server))
    assert len(slow) < CHUNKS / 2


def test_who_leaves_while_it_waits_for_another_is_forgotten(server, slow):
    first = raw(server, prompt=LONG)
    until(lambda: slow)
    second = raw(server, prompt=LONG)
    until(lambda: server.runtime.gauges()["waiting"] == 1)
    second.close()
    until(lambda: server.runtime.gauges()["sessions"] == 1)
    assert len(slow) < CHUNKS / 2
    first.close()
    until(lambda: nothing_runs(server))
    assert slow.count(0) == 1  # the second never began


@pytest.mark.parametrize("name", ["Generate", "Converse"])
def test_who_leaves_over_grpc_during_prefill_frees_its_slot(server, slow, name):
    types = protocol()
    ids = server.runtime.engine.model.tokenizer(LONG)["input_ids"]
    with server.runtime.create(ids) as session, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        if name == "Generate":
            request = types.GenerateRequest(session_id=session.id, sampling=types.Sampling(max_new_tokens=3))
            call = channel.unary_stream(types.methods[name].path)(request.SerializeToString())
        else:
            request = types.ConverseRequest(session_id=session.id, generate=types.Start(sampling=types.Sampling(max_new_tokens=3)))
            call = channel.stream_stream(types.methods[name].path)(iter([request.SerializeToString()]))
        until(lambda: len(slow) >= 2)
        call.cancel()
        until(lambda: not server.runtime.gauges()["generating"])
        assert len(slow) < CHUNKS / 2
        assert session.info().cached_tokens == len(slow) * CHUNK  # what was prefilled stays
        assert len(list(session.generate(max_new_tokens=3, stop_token_ids=()))) == 3


def test_metrics_and_health_do_not_wait_for_the_engine(server, held):
    """Nor for the threads of requests, of which as many wait as the server allows."""
    go, stands = held
    sent = [raw(server, prompt=LONG)]
    assert stands.wait(WAIT)
    sent += [raw(server, prompt="Hi", stream=stream) for stream in (True, False, True, False, True)]
    until(lambda: server.runtime._calls.qsize() == 5)  # each has a thread, which waits for its session
    with pytest.raises(openai.RateLimitError), client_of(server) as client:
        client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
    began = time.monotonic()
    for _ in range(8):
        assert page(server, "/healthz") == "ok\n"
        assert "generate_active" in page(server, "/metrics")
    assert time.monotonic() - began < 5
    go.set()
    for each in sent:
        each.close()
    until(lambda: nothing_runs(server))
    until(lambda: "session_active 0.0" in page(server, "/metrics"))


def test_metrics_say_what_the_runtime_says(server):
    with server.runtime.create([1, 2, 3]) as session:
        list(session.generate(max_new_tokens=2, stop_token_ids=()))
        until(lambda: server.runtime.published == server.runtime.gauges())
        found = page(server, "/metrics")
        assert ("session_active 1.0" in found, 'kv_pages{store="device"} 1.0' in found) == (True, True)


def test_a_stream_says_something_before_its_first_token(server, held, monkeypatch):
    """Headers and comments come while the engine is busy, so that proxies keep the connection; OpenAI's client reads
    past them."""
    monkeypatch.setattr(app, "QUIET_S", 0.05)
    go, stands = held
    sent = raw(server, prompt="Hello", stream=True)
    assert stands.wait(WAIT)
    with client_of(server) as client:  # this one has not even a session yet
        stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=3, temperature=0, stream=True)
        answer = http.client.HTTPResponse(sent)
        answer.begin()
        assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
        comment = b": waiting for the first token\n"
        assert [answer.readline() for _ in range(4)] == [comment, b"\n", comment, b"\n"]
        go.set()
        rest = answer.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in rest.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "".join(each.choices[0].text for each in stream)
    sent.close()
    until(lambda: nothing_runs(server))


@pytest.mark.parametrize("name", ["CreateSession", "Generate"])
def test_who_leaves_over_grpc_before_its_message_leaves_no_traceback(server, caplog, name):
    left = threading.Event()

    def nothing():
        left.wait(WAIT)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel, caplog.at_level(logging.INFO):
        call = channel.stream_stream(protocol().methods[name].path, request_serializer=bytes, response_deserializer=bytes)(nothing())
        time.sleep(0.2)
        call.cancel()
        until(lambda: any(f'"call": "{name}"' in record.getMessage() for record in caplog.records))
        left.set()
    assert all(record.levelno < logging.ERROR and "INTERNAL" not in record.getMessage() for record in caplog.records)


def test_who_leaves_a_stream_leaves_no_traceback(server, monkeypatch, caplog):
    """The text that it waited for ends with an error when it has gone, and nobody is there to hear it."""
    left, heard = threading.Event(), threading.Event()

    def more(completion):
        heard.set()
        assert left.wait(WAIT)
        raise errors.Cancelled("stopped")

    monkeypatch.setattr(app.TextCompletion, "more", more)
    monkeypatch.setattr(app, "QUIET_S", 0.05)  # it finds out that the client has gone when it says something
    sent = raw(server, prompt="Hello", stream=True)
    assert heard.wait(WAIT)
    sent.close()
    until(lambda: not server.runtime.gauges()["generating"])
    left.set()
    until(lambda: nothing_runs(server))
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("chat", [False, True])
def test_an_error_before_the_first_token_of_a_stream_is_an_event(server, engine, monkeypatch, chat):
    def broken(run, slices=None):
        raise RuntimeError("the device is broken")

    monkeypatch.setattr(engine._prefiller, "advance", broken)
    with client_of(server) as client:
        given = {"model": "tiny", "max_tokens": 3}
        if chat:
            stream = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], stream=True, **given)
        else:
            stream = client.completions.create(prompt="Hi", stream=True, **given)
        with pytest.raises(openai.APIError, match="the device is broken"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the device is broken"):  # one that is not streamed has its status
            client.completions.create(prompt="Hi", **given)
        with pytest.raises(openai.BadRequestError):  # as has what is found wrong before
            client.completions.create(prompt="Hi", stream=True, model="tiny", max_tokens=900)


@pytest.mark.parametrize("chat", [False, True])
def test_every_piece_but_the_last_has_a_usage_of_null(server, chat):
    for asked in (True, False):
        body = {"stream": True, "prompt": "Hi"} | ({"stream_options": {"include_usage": True}} if asked else {})
        if chat:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        content = json.dumps({"model": "tiny", "max_tokens": 3} | body).encode()
        path = f"http://127.0.0.1:{server.http_port}/v1/{'chat/' if chat else ''}completions"
        with urllib.request.urlopen(urllib.request.Request(path, content), timeout=WAIT) as found:
            lines = [line for line in found.read().decode().splitlines() if line.startswith("data: {")]
        usages = [json.loads(line.removeprefix("data: ")).get("usage", "none") for line in lines]
        if asked:
            assert usages[:-1] == [None] * (len(usages) - 1)
            assert usages[-1]["completion_tokens"] >= 1
        else:
            assert set(usages) == {"none"}
    until(lambda: nothing_runs(server))


def test_too_little_room_is_named(engine, server):
    with client_of(server) as client:
        for tokens, most, said in (
            (696, 8, "prompt has 696 tokens and max_tokens asks for 8: the model has 700 positions, so at most 5 can be generated; ask for "
             "fewer, or send clip: true"),
            (700, 2, "prompt has 700 tokens and max_tokens asks for 2: the model has 700 positions, so at most 1 can be generated; ask"),
            (701, 1, "prompt has 701 tokens and max_tokens asks for 1: the model has 700 positions, so none can be generated; shorten the"),
            (5, 40_000, "prompt has 5 tokens and max_tokens asks for 40,000: the model has 700 positions, so at most 696"),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt="x" * tokens, max_tokens=most)
            assert said in str(caught.value)
            assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        assert client.completions.create(model="tiny", prompt="x" * 696, max_tokens=5).usage.completion_tokens <= 5
        clipped = client.completions.create(model="tiny", prompt="x" * 696, max_tokens=8, extra_body={"clip": True, "ignore_eos": True})
        assert (clipped.usage.completion_tokens, clipped.choices[0].finish_reason) == (5, "length")


def test_a_server_that_clips_generates_what_there_is_room_for(engine):
    with serving(engine, http_port=0, model_name="tiny", clip_max_tokens=True, max_new_tokens=9) as server, client_of(server) as client:
        for tokens, room in ((696, 5), (700, 1), (5, 9)):
            answer = client.completions.create(model="tiny", prompt="x" * tokens, max_tokens=800, temperature=0)
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (room, "length")
        with pytest.raises(openai.BadRequestError, match="none can be generated; shorten the prompt"):
            client.completions.create(model="tiny", prompt="x" * 701, max_tokens=8)
        with pytest.raises(openai.BadRequestError):  # no value is guessed for one that is wrong
            client.completions.create(model="tiny", prompt="x", max_tokens=0)


def test_a_pool_that_is_too_small_is_named(engine):
    small = Engine(engine.model, "dense", pages=5, page_size=16, prefill_chunk=CHUNK, batch_buckets=(4,))
    for clips in (False, True):
        with serving(small, http_port=0, model_name="tiny", clip_max_tokens=clips) as server, client_of(server) as client:
            assert [server.runtime.room_after(60, most) for most in (5, 6, 600)] == [5, 5, 5]
            assert [server.runtime.room_after(prompt, 30) for prompt in (10, 64, 65, 600)] == [30, 17, 0, 0]
            with contextlib.nullcontext() if clips else pytest.raises(openai.BadRequestError, match="pool of pages has room for at most 5"):
                answer = client.completions.create(model="tiny", prompt="x" * 60, max_tokens=6, temperature=0)
                assert answer.usage.completion_tokens == 5
            chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=0)
            assert chat.choices[0].finish_reason in ("length", "stop")  # a chat that asks for no number gets what there is room for


def test_a_call_with_two_authorizations_is_refused(engine):
    """Whichever comes first, and also where both are right: a proxy may have looked at the other one."""
    types = protocol()
    first, second = (f"Bearer {token}" for token in TOKENS)
    with serving(engine, http_port=0, model_name="tiny", tokens=TOKENS) as server:
        for entries in ((first, second), (first, "Bearer wrong"), ("Bearer wrong", first), (first, first)):
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                metadata = [("authorization", each) for each in entries]
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(types.methods["CreateSession"].path)(b"", metadata=metadata, timeout=WAIT)
                error = error_of(caught.value)
                assert isinstance(error, Unauthenticated)
                assert "2 authorization entries: send one" in str(error)
            for path in ("/v1/models", "/metrics"):
                connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=WAIT)
                connection.putrequest("GET", path)
                for each in entries:
                    connection.putheader("Authorization", each)
                connection.endheaders()
                answer = connection.getresponse()
                assert (answer.status, b"2 authorization entries: send one" in answer.read()) == (401, True)
                connection.close()
        assert server.runtime.gauges()["sessions"] == 0
        with Client(f"127.0.0.1:{server.port}", token=TOKENS[1]) as client, client.create_session() as session:
            assert session.info().history_tokens == 0


def test_a_second_key_press_ends_a_server_at_once(engine, capsys):
    """The first lets calls end, for as long as --drain-seconds says."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    metrics = Metrics()
    server = Server(SessionRuntime(engine, slots=4, observe=metrics.observe), metrics, ServerOptions(port=0))

    def pressing():
        until(lambda: SERVICE in server._health._server_status)  # it has started
        with Client(f"127.0.0.1:{server.port}", timeout_s=WAIT, retries=0) as client, contextlib.suppress(SessionError):
            for _ in client.create_session([1, 2]).generate(max_new_tokens=600, stop_token_ids=()):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                until(lambda: server._admission.ending)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=pressing)
    try:
        presser.start()
        began = time.monotonic()
        _until_told(server, 1000.0)
        assert time.monotonic() - began < WAIT
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(each, handler)
        presser.join(WAIT)
        log = logging.getLogger("kvjax.server")
        log.removeHandler(log.handlers[-1])
        log.setLevel(logging.NOTSET)
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py did
    assert "a second Ctrl-C ends them now" in capsys.readouterr().err


def test_requests_that_do_not_end_while_draining_are_told_so(engine, slow, caplog):
    with serving(engine, http_port=0, model_name="tiny") as server:
        whole, streamed = (raw(server, prompt=LONG, stream=stream) for stream in (False, True))
        heads = streamed.recv(2000)
        until(lambda: len(slow) >= 2)
        server.stop(0.1)
        answer, events = (sent.makefile("rb").read() for sent in (whole, streamed))
    assert b"200 OK" in heads
    assert answer.startswith(b"HTTP/1.1 503")
    for told in (answer, events):
        assert b"the server has ended before the answer was complete" in told
    assert not [record for record in caplog.records if record.exc_info]
