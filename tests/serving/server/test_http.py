"""The HTTP server: the shim for OpenAI's clients, /metrics and /healthz; and a chat with a model that has a
template."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import io
import json
import shutil
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from types import MappingProxyType, SimpleNamespace

import openai
import pytest
from character_tokenizer import make_tokenizer
from session_servers import WAIT, certificate, until
from tiny_models import make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import Client, chat
from kvjax.client.errors import SessionError
from kvjax.serving.batch.records import parse
from kvjax.serving.server.app import _Streamed
from kvjax.serving.server.auth import Call
from kvjax.serving.server.completion import TextCompletion
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

PAGES = 48
TOKEN = "a-token-of-the-tests"
TALK = [{"role": "user", "content": "Hi"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def engine():
    model = dataclasses.replace(make_model(vocab_size=99, eos_token_ids=(97,), max_positions=700), tokenizer=make_tokenizer())
    return Engine(model, "dense", pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@contextlib.contextmanager
def serving(engine, state=None, **options):
    """A server over HTTP; nothing is left of its sessions afterwards."""
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, capacity=8, observe=metrics.observe, state=state)
    server = Server(runtime, metrics, ServerOptions(port=0, http_port=0, model_name="tiny", **options))
    server.start()
    try:
        yield server
    finally:
        server.stop(drain_s=1.0)
        assert engine.allocators["full"].free == PAGES
        assert not engine.sequences


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine, max_new_tokens=600, max_calls=6, max_message_bytes=4096) as running:
        yield running


def client_of(server, **options):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", **{"api_key": "none", "max_retries": 0} | options)


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made
    until(
        lambda: not any(server.runtime.gauges()[name] for name in ("sessions", "generating", "waiting"))
    )  # single completion: nothing stays


def inside(server, text, **sampling):
    """What the runtime itself generates after a text, as text, with the reason of its end and the count of tokens."""
    tokenizer = server.runtime.engine.model.tokenizer
    with server.runtime.create(tokenizer(text)["input_ids"]) as session:
        stream = session.generate(**sampling)
        tokens = list(stream)
        return tokenizer.decode(tokens, skip_special_tokens=True), stream.finish_reason, len(tokens)


def test_completions_are_what_the_runtime_generates(server, client):
    for text, sampling in (("Hello", {"temperature": 0.0}), ("So it goes", {"temperature": 1.3, "top_p": 0.9, "seed": 5})):
        expected, reason, count = inside(server, text, max_new_tokens=20, **sampling)
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=20, **sampling)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, reason)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(text), count, len(text) + count)
        pieces = list(client.completions.create(model="tiny", prompt=text, max_tokens=20, stream=True, **sampling))
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    ids = server.runtime.engine.model.tokenizer("Hello")["input_ids"]
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert by_ids.choices[0].text == inside(server, "Hello", max_new_tokens=20)[0]
    assert client.completions.create(model="tiny", prompt=[ids], temperature=0).usage.completion_tokens <= 16


def test_the_token_that_ends_a_text_is_no_part_of_it(server, client):
    """As in a batch job. A stop string may hold the model's own end where that ends nothing."""
    tokenizer = server.runtime.engine.model.tokenizer
    free = {"max_new_tokens": 60, "temperature": 1.5, "ignore_eos": True}
    tokens, seed = (), -1
    while 97 not in tokens:
        seed += 1
        with server.runtime.create(tokenizer("Hello")["input_ids"]) as session:
            tokens = list(session.generate(**free, seed=seed))
    last, extra = tokens[3], {"ignore_eos": True}
    by_token, by_text = ({**extra, "stop_token_ids": [last]}, last), ({**extra, "stop": "<|im_end|>"}, 97)
    for fields, end in (by_token, by_text):
        kept = tokens[: tokens.index(end)]
        for stream in (False, True):
            given = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "temperature": 1.5, "seed": seed, "extra_body": fields}
            answer = client.completions.create(stream=stream, **given)
            text = "".join(piece.choices[0].text for piece in answer) if stream else answer.choices[0].text
            assert text == tokenizer.decode(kept, skip_special_tokens=True)


def test_chats_go_through_the_models_template(server, client):
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    sampling = {"temperature": 1.0, "seed": 3}
    for extra, rendered in (({}, prompt), (NO_THINKING, f"{prompt}<think>\n\n</think>\n\n")):
        expected, reason, count = inside(server, rendered, max_new_tokens=30, **sampling)
        given = {"model": "tiny", "messages": TALK, "max_completion_tokens": 30, "extra_body": extra, **sampling}
        answer = client.chat.completions.create(**given)
        assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", expected)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == (reason, count)
        pieces = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given))
        assert pieces[0].choices[0].delta.role == "assistant"
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == expected
        assert pieces[-2].choices[0].finish_reason == reason
        assert (pieces[-1].choices, pieces[-1].usage.completion_tokens) == ([], count)
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=30, extra_body=NO_THINKING, **sampling)
    assert again.choices[0].message.content == expected
    assert client.models.retrieve("tiny").id == next(each.id for each in client.models.list()) == "tiny"


def test_a_stop_string_ends_the_text_before_it(server, client):
    whole = inside(server, "Hello", max_new_tokens=40)[0]
    stop = whole[10:12]
    cut = whole[: whole.index(stop)]
    for stream in (False, True):
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0, stop=[stop, "\0"], stream=stream)
        choices = [piece.choices[0] for piece in answer] if stream else answer.choices
        assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == (cut, "stop")


def test_a_stop_string_before_half_a_character_is_the_reason_of_the_end():
    """The last token ends inside a character, so its text comes only when the answer is over."""

    class Bytes:
        added_tokens_decoder = MappingProxyType({})

        def decode(self, ids, **options):
            return bytes(ids).decode(errors="replace")

    class Given:
        engine = SimpleNamespace(model=SimpleNamespace(tokenizer=Bytes(), config=SimpleNamespace(eos_token_ids=())))

        def generate_once(self, ids, **sampling):
            pieces = [[*b"a", 0xE2], []]
            return None, SimpleNamespace(ready=lambda throttle: pieces.pop(0), finish_reason="length")

    for stop, expected in (("\ufffd", ("a", "stop")), ("b", ("a\ufffd", "length"))):
        completion = TextCompletion(Given(), SimpleNamespace(ids=[120], sampling={}, stop=(stop,)), None)
        text = "".join(iter(completion.more, None))
        assert (text, completion.finish_reason) == expected


def test_nothing_is_shared_between_requests(server, client):
    counted = server.metrics.registry.get_sample_value
    before = counted("generate_prefill_tokens_sum")
    for _ in range(2):
        client.completions.create(model="tiny", prompt="x" * 40, max_tokens=1)
    assert counted("generate_prefill_tokens_sum") - before == 80


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, None),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [99999]}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a", "b"]}, openai.BadRequestError, "prompt"),
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"n": True}, openai.BadRequestError, "n"),
        ({"extra_body": {"stream": "false"}}, openai.BadRequestError, "stream"),
        ({"stream_options": {"include_usage": "no"}}, openai.BadRequestError, "stream_options"),
        ({"logprobs": 3}, openai.BadRequestError, "logprobs"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": "many"}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"prompt": "x" * 5000}, openai.APIStatusError, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed_and_name_the_field(client, fields, kind, param, stream):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "Hi", "stream": stream, **fields})
    assert caught.value.param == param
    assert "max_new_tokens" not in str(caught.value)  # clients know it as max_tokens
    assert caught.value.response.headers["deprecation"]


def test_chats_refuse_what_the_shim_does_not_do(client):
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{"model": "tiny", "messages": TALK, **fields})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 690}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=TALK, extra_body={"chat_template_kwargs": 5})
    assert caught.value.param == "chat_template_kwargs"


def test_headers_say_that_the_shim_is_deprecated(server):
    for path in ("/v1/models", "/v1/nothing", "/deprecation"):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=WAIT)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (answer.getheader("Deprecation"), answer.getheader("Sunset")) == ("@1780272000", "Fri, 31 Dec 2027 00:00:00 GMT")
        assert 'rel="deprecation"' in answer.getheader("Link")
        assert (b"ADR 0008" in answer.read()) == (path == "/deprecation")
        connection.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz") as page:
        assert (page.read(), page.headers["Deprecation"]) == (b"ok\n", None)


def raw(server, body, path="/v1/completions"):
    """A connection over which a request was sent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    cut = socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT)
    cut.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return cut


def test_a_cut_connection_frees_its_session(server, client):
    """Before the first token, after it, and where nothing is streamed."""
    long = {"model": "tiny", "prompt": "Hello", "max_tokens": 600, "temperature": 0}  # else a sampled end token may end it at once
    expected = inside(server, "Hello", max_new_tokens=5)[0]
    for stream, read in ((False, 0), (True, 0), (True, 1), (True, 400)):
        cut = raw(server, {**long, "stream": stream})
        if read:
            cut.recv(read)
        else:
            until(lambda: server.runtime.gauges()["generating"])
        cut.close()
        until(lambda: not server.runtime.gauges()["sessions"])
    assert client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0).choices[0].text == expected


def test_a_client_that_takes_nothing_is_cut_off():
    ended, asked, noted = [], [], []

    async def pieces():
        for _ in range(3):
            asked.append(True)
            yield b"data: {}\n\n"

    async def never(*message):
        await asyncio.sleep(WAIT)

    async def end():
        ended.append(True)

    async def run(send):
        metrics = Metrics()
        call = Call(metrics, "/v1/completions", lambda call: None)
        began = time.monotonic()
        with contextlib.suppress(Exception):
            await _Streamed(pieces(), 0.1, call, end, SessionError)({"type": "http"}, never, send)
        noted.append((metrics.registry.get_sample_value("rpc_total", {"method": "/v1/completions", "code": "CANCELLED"}), call.ended))
        assert time.monotonic() - began < WAIT / 2

    async def taken(message):
        pass

    asyncio.run(run(never))
    assert (len(ended), len(asked), noted) == (1, 0, [(1.0, True)])
    asyncio.run(run(taken))
    assert (len(ended), len(asked)) == (2, 3)


def test_a_request_that_does_not_come_is_cut_off(engine):
    with serving(engine, stall_s=0.3) as server:
        begun = [socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT) for _ in range(3)]
        begun[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")  # its headers never end
        begun[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")  # nor its body
        assert begun[0].recv(100) == begun[2].recv(100) == b""
        assert b" 408 " in begun[1].recv(100)
        for each in begun:
            each.close()
        with client_of(server) as client:
            long = client.completions.create(model="tiny", prompt="Hello", max_tokens=600, temperature=0)  # more than 0.3 s
            assert long.usage.completion_tokens > 20
            assert client.completions.create(model="tiny", prompt="Hello", max_tokens=2, temperature=0).usage.completion_tokens == 2


def test_requests_beyond_the_limit_are_refused_and_may_come_again(server, client):
    long = {"model": "tiny", "prompt": "Hello", "max_tokens": 600, "temperature": 0, "stream": True}
    held = [raw(server, long) for _ in range(6)]  # max_calls
    try:
        until(lambda: server.runtime.gauges()["sessions"] == 6)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz") as page:
            assert page.status == 200
    finally:
        for each in held:
            each.close()
    until(lambda: not server.runtime.gauges()["sessions"])
    assert client.completions.create(model="tiny", prompt="Hi", max_tokens=1).usage.completion_tokens == 1


def test_bodies_that_are_none_are_refused(server, client):
    for body in (b"", b"{", b"[" * 4000, b"[]", b"\xff\xfe", b'"text"', b"null", b'{"model": "tiny", "prompt": "a", "temperature": NaN}'):
        cut = raw(server, body)
        assert b" 400 " in cut.recv(100)
        cut.close()


def test_arguments_nested_too_deeply_are_refused(server):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": functools.reduce(lambda inner, _: [inner], range(1900), 1)}}}
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": "assistant", "tool_calls": [call]}]})
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}/v1/chat/completions", body.encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    assert "nested too deeply" in json.load(caught.value)["error"]["message"]


def test_errors_name_fields_as_they_were_typed(client):
    for given, said, param in (
        ({"extra_body": {"max_new_tokens": 6}}, "'max_new_tokens'; did you mean 'max_tokens'?", "max_new_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0", "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="Hi", **given)
        assert (said in str(caught.value), caught.value.param) == (True, param), caught.value
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=TALK, max_completion_tokens=-1)
    assert caught.value.param == "max_completion_tokens"


def test_a_field_given_twice_is_refused_as_in_a_batch_job(server):
    line = '{"model": "tiny", "prompt": "x", "prompt": "y", "max_tokens": 1}'
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}/v1/completions", line.encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    error = json.load(caught.value)["error"]
    assert (caught.value.code, error["param"]) == (400, "prompt")
    assert error["message"] == parse(f'{{"custom_id": "a", "body": {line}}}', 1).error == "field 'prompt' is given twice"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls_is_that_of_grpc(engine, tmp_path):
    with serving(engine, certificate=certificate(tmp_path)) as server:
        context = ssl.create_default_context(cafile=tmp_path / "chain")
        with urllib.request.urlopen(f"https://localhost:{server.http_port}/healthz", context=context) as page:
            assert page.read() == b"ok\n"
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(f"http://localhost:{server.http_port}/healthz")
        address = f"localhost:{server.port}"
        with Client(address, root_certificate=server.options.certificate[0]) as client, client.create_session([1, 2]) as session:
            assert session.info().history_tokens == 2


def test_tokens_and_restarts(engine, tmp_path):
    with serving(engine, state=tmp_path, tokens=(TOKEN,)) as server:
        for wrong in ("none", TOKEN[:-1]):
            with client_of(server, api_key=wrong) as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
        page = f"http://127.0.0.1:{server.http_port}/metrics"
        for wrong in ({}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"}, {"authorization": f"Bearer  {TOKEN}"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(page, headers=wrong))
        for scheme in ("Bearer", "bearer"):
            with urllib.request.urlopen(urllib.request.Request(page, headers={"authorization": f"{scheme} {TOKEN}"})) as answer:
                assert answer.status == 200
        with client_of(server, api_key=TOKEN) as client:
            stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=600, temperature=0, stream=True)
            next(iter(stream))
            assert server.runtime.gauges()["sessions"] == 1
            assert not list(tmp_path.glob("*.session"))  # a single completion does not come back after a kill
            stopped = threading.Thread(target=server.stop, args=(1.0,))
            stopped.start()
            with contextlib.suppress(openai.APIError, OSError):
                list(stream)
            stopped.join(WAIT)
            assert not stopped.is_alive()


def test_the_chat_goes_on_where_a_template_would_render_a_turn_otherwise(server, monkeypatch, capsys):
    """The hazard of Qwen3's think block: the session holds what was prompted with, and what follows is appended to
    it."""
    tokenizer, appended = make_tokenizer(), []
    monkeypatch.setattr(chat, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nSo?\n"))
    monkeypatch.setattr(chat.Session, "append", lambda self, ids, add=chat.Session.append: (appended.append(list(ids)), add(self, ids))[1])
    words = ["--template", "--no-thinking", "--max-new-tokens", "4", "--address", f"127.0.0.1:{server.port}"]
    assert chat.main(words) == 0
    first, second = map(tokenizer.decode, appended)
    assert first == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert second == first.replace("<|im_start|>user\nHi", "<|im_end|>\n<|im_start|>user\nSo?")  # the answer ended by its length
    assert len(capsys.readouterr().out.splitlines()) >= 2
