"""Clients that send nonsense, take nothing, or go in the middle; and servers that are killed."""

import array
import collections
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from session_servers import WAIT, until
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import Client
from kvjax.client.errors import Cancelled, Unavailable
from kvjax.client.wire import protocol
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions.journal import Journal

PAGES = 48
TEXT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
NONE = {"stop_token_ids": ()}
KILLED = Path(__file__).with_name("killed_server.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), "dense", pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@contextlib.contextmanager
def serving(engine, **options):
    """A server with room for many sessions; no page is missing afterwards, and no invariant was violated."""
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, capacity=64, observe=metrics.observe)
    server = Server(runtime, metrics, ServerOptions(port=0, http_port=0, max_new_tokens=300, max_tokens=150, **options))
    server.start()
    try:
        yield server
        until(lambda: not any(runtime.gauges()[name] for name in ("sessions", "generating", "waiting", "kv_live_bytes", "host_bytes")))
        assert engine.allocators["full"].free == PAGES
    finally:
        server.stop(drain_s=0.0)
    assert not engine.sequences
    assert not {name for name in runtime.counts if name.startswith("inv")}


class Attacker:
    """Hostile calls of a dozen kinds, drawn at random. codes: what gRPC answered. sessions: its own, of which some have
    been closed."""

    def __init__(self, server, seed):
        self.types, self.random = protocol(), random.Random(seed)
        self.server, self.codes = server, collections.Counter()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.max_send_message_length", -1)])
        self.sessions = [self.call("CreateSession", self.types.CreateSessionRequest(token_ids=TEXT[:20])).session_id for _ in range(4)]
        self.closed = [self.sessions.pop()]
        self.call("CloseSession", self.types.CloseSessionRequest(session_id=self.closed[0]))
        self.held = []  # calls that are not read
        self.kinds = [each for name, each in sorted(vars(Attacker).items()) if name.startswith("send_")]

    def attack(self, count):
        for number in range(count):
            self.random.choice(self.kinds)(self)
            if number % 10 == 0:
                while self.held:
                    self.held.pop().cancel()

    def end(self):
        while self.held:
            self.held.pop().cancel()
        for each in self.sessions:
            with contextlib.suppress(grpc.RpcError):
                self.call("CloseSession", self.types.CloseSessionRequest(session_id=each))
        self.channel.close()

    def call(self, name, request, timeout=WAIT):
        """The answers to one message, or to its bytes; a session that was made by accident is closed."""
        method = self.types.methods[name]
        content = request if isinstance(request, bytes) else request.SerializeToString()
        kind = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}[method.streams]
        call = getattr(self.channel, kind)(method.path, response_deserializer=method.response.FromString)
        answer = call(iter([content]) if method.streams[0] else content, timeout=timeout)
        return answer if not method.streams[1] else list(answer)

    def send(self, name, request, timeout=WAIT):
        """One hostile call, which may even succeed."""
        try:
            answer = self.call(name, request, timeout)
            self.codes["OK"] += 1
            if name in ("CreateSession", "ForkSession") and answer.session_id not in self.sessions:
                self.call("CloseSession", self.types.CloseSessionRequest(session_id=answer.session_id))
        except grpc.RpcError as error:
            self.codes[error.code().name] += 1

    def any_call(self):
        return self.random.choice(list(self.types.methods))

    def send_bytes(self):
        self.send(self.any_call(), self.random.randbytes(self.random.choice((1, 7, 40, 500))))

    def send_damaged(self):
        """A good message of which a byte was changed, or the end cut off."""
        name = self.random.choice([each for each in self.types.methods if each != "CloseSession"])
        content = bytearray(self.message(self.types.methods[name].request, 0.2).SerializeToString())
        if content and self.random.random() < 0.5:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        self.send(name, bytes(content[: self.random.randint(0, len(content))]), timeout=self.random.choice((0.05, 0.3)))

    def send_fuzzed(self):
        """Every field has a value that its type allows, sensible or not."""
        name = self.random.choice([each for each in self.types.methods if each != "CloseSession"])
        self.send(name, self.message(self.types.methods[name].request, 0.7), timeout=self.random.choice((0.05, 0.3)))

    def message(self, kind, wild):
        message, draw = kind(), self.random
        for field in message.DESCRIPTOR.fields:
            if draw.random() < 0.3:
                continue
            if field.message_type is not None:
                if not field.is_repeated:
                    getattr(message, field.name).CopyFrom(self.message(field.message_type._concrete_class, wild))
                continue
            if field.name == "session_id":
                value = draw.choice(self.sessions + self.closed) if draw.random() > wild else draw.choice(STRANGE)
            elif field.cpp_type == field.CPPTYPE_STRING:
                value = draw.choice(STRANGE)
            elif field.cpp_type == field.CPPTYPE_DOUBLE:
                value = draw.choice((0.0, 1.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), 5e-324))
            elif field.cpp_type == field.CPPTYPE_ENUM:
                value = draw.choice((0, 1, 77, -1))
            else:
                most = {field.CPPTYPE_UINT32: 2**32, field.CPPTYPE_INT64: 2**63}.get(field.cpp_type, 2**64)
                value = draw.choice((0, 1, 20, VOCAB - 1, VOCAB, 301, 2**31, most - 1))
            if field.is_repeated:
                value = [value] * draw.choice((0, 1, 2, 151, 3000))
                getattr(message, field.name).extend(value)
            else:
                setattr(message, field.name, value)
        return message

    def send_oversized(self):
        tokens = self.types.AppendTokensRequest(session_id=self.sessions[0], token_ids=[1] * self.random.choice((151, 200_000)))
        self.send("AppendTokens", tokens)

    def send_to_a_wrong_session(self):
        name = self.random.choice(("AppendTokens", "Generate", "GetSessionInfo", "ForkSession", "CloseSession"))
        self.send(name, self.types.methods[name].request(session_id=self.random.choice(STRANGE)))

    def send_after_close(self):
        name = self.random.choice(("AppendTokens", "Generate", "GetSessionInfo", "ForkSession", "CloseSession"))
        request = self.types.methods[name].request(session_id=self.closed[0])
        if name == "AppendTokens":
            request.token_ids.append(1)
        self.send(name, request)

    def send_and_go(self):
        """Generate, cut off after some of its messages."""
        content = self.generation(100).SerializeToString()
        call = self.channel.unary_stream("/kvjax.v1.RuntimeService/Generate")(content, timeout=WAIT)
        self.take_and_cancel(call)

    def send_a_talk_and_go(self):
        """Converse, cut off after some of its messages, with stops and appends that come at any time."""
        types, draw = self.types, self.random
        start = types.Start(sampling=types.Sampling(max_new_tokens=40, stop_tokens=types.StopTokens()))
        actions = [
            lambda: types.ConverseRequest(generate=start),
            lambda: types.ConverseRequest(stop=types.Stop(keep=draw.choice((0, 1, 2**40)))),
            lambda: types.ConverseRequest(append=types.Append(token_ids=[1])),
            lambda: types.ConverseRequest(),
        ]
        requests = [draw.choice(actions)() for _ in range(draw.randint(1, 6))]
        requests[0].session_id = draw.choice(self.sessions)
        content = iter([each.SerializeToString() for each in requests])
        self.take_and_cancel(self.channel.stream_stream("/kvjax.v1.RuntimeService/Converse")(content, timeout=0.3))

    def take_and_cancel(self, call):
        with contextlib.suppress(grpc.RpcError, StopIteration):
            for _ in range(self.random.choice((0, 0, 1, 2, 5))):
                next(call)
        self.codes["CUT"] += 1
        call.cancel()

    def send_and_take_nothing(self):
        """Generate, which nobody reads for a while."""
        if len(self.held) < 6:
            content = self.generation(self.random.choice((3, 100))).SerializeToString()
            self.held.append(self.channel.unary_stream("/kvjax.v1.RuntimeService/Generate")(content, timeout=WAIT))
            self.codes["HELD"] += 1

    def generation(self, count):
        sampling = self.types.Sampling(max_new_tokens=count, stop_tokens=self.types.StopTokens())
        return self.types.GenerateRequest(session_id=self.random.choice(self.sessions), sampling=sampling)

    def send_to_the_socket(self):
        """Bytes that are no HTTP, or a beginning of it, on either port."""
        port = self.random.choice((self.server.port, self.server.http_port))
        halves = (PREFACE, PREFACE + b"\xff" * 40, b"GET /metrics HTTP/1.1\r\nA: b", b"\r\n" * 50)
        content = self.random.choice((self.random.randbytes(300), *halves))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WAIT) as sent:
            sent.sendall(content)
        self.codes["SOCKET"] += 1


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STRANGE = ("", "0" * 32, "F" * 32, "../../etc/passwd", "x" * 5000, "\0", "Ünï", "{}", "0" * 31)


def withstand(engine, count):
    """Attack a server `count` times from several threads, while a session of somebody else generates. Its tokens stay
    what they were."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(engine, max_message_bytes=2**18))
        client = stack.enter_context(Client(f"127.0.0.1:{server.port}", timeout_s=WAIT))
        session = stack.enter_context(client.create_session(TEXT[:30]))

        def said():
            with session.fork() as child:
                return list(child.generate(max_new_tokens=12, **NONE))

        expected, heard = said(), 0
        attackers = [Attacker(server, seed) for seed in range(3)]
        threads = [threading.Thread(target=each.attack, args=(-(-count // 3),)) for each in attackers]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            assert said() == expected
            heard += 1
        for each in attackers:
            each.end()
        assert said() == expected
        assert session.info().history_tokens == 30
        orphans = forget_unheard(server.runtime, session.id)
    codes = sum((each.codes for each in attackers), collections.Counter())
    assert sum(codes.values()) >= count * 0.9  # at most six calls of each attacker are held at once
    assert heard
    assert {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "CUT", "HELD", "SOCKET"} <= set(codes)
    assert not {"UNKNOWN", "UNAVAILABLE", "INTERNAL"} & set(codes)
    assert orphans < count / 100
    return codes, heard, orphans


def forget_unheard(runtime, but):
    """Close sessions of whose ids nobody heard, and count them: a call's deadline may pass while its answer is on the
    way.

    Such a session is idle, and would end by its time.
    """
    records = runtime._core.records
    until(lambda: all(record.idle for record in list(records.values())))
    ids = [each for each in records if each != but]
    for each in ids:
        runtime.session(each).close()
    return len(ids)


def test_hostile_calls_leave_the_server_answering(engine):
    withstand(engine, 150)


@pytest.mark.long
def test_ten_thousand_hostile_calls(engine):
    codes, heard, orphans = withstand(engine, 10_000)
    print(f"\n{sum(codes.values())} calls: {dict(codes)}; the bystander's tokens were right {heard} times; {orphans} ids were not heard")


def stalled_reader(port, session_id):
    """A socket with a Generate whose answer it never lets come: HTTP/2 with a window of no bytes."""
    types = protocol()
    sampling = types.Sampling(max_new_tokens=300, stop_tokens=types.StopTokens())
    body = types.GenerateRequest(session_id=session_id, sampling=sampling).SerializeToString()
    fields = {":method": "POST", ":scheme": "http", ":path": "/kvjax.v1.RuntimeService/Generate", ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields.items())

    def frame(kind, flags, stream, content):
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    sent = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    sent.sendall(PREFACE + frame(4, 0, 0, struct.pack(">HI", 4, 0)) + frame(1, 4, 1, block))  # SETTINGS, HEADERS
    sent.sendall(frame(0, 1, 1, b"\0" + struct.pack(">I", len(body)) + body))  # DATA, the last
    return sent


def test_a_reader_that_takes_nothing_is_cut_off(engine, caplog):
    with caplog.at_level("INFO", "kvjax.server"), serving(engine, stall_s=0.5) as server, Client(f"127.0.0.1:{server.port}") as client:
        session, other = client.create_session(TEXT[:20]), client.create_session(TEXT[:20])
        readers = [stalled_reader(server.port, session.id) for _ in range(2)]
        until(lambda: server.runtime.gauges()["generating"] or server.runtime.gauges()["waiting"])
        assert len(list(other.generate(max_new_tokens=5, **NONE))) == 5  # others go on meanwhile
        until(lambda: sum(json.loads(record.getMessage()).get("reason") == "stalled" for record in caplog.records) == 2)
        assert session.info().history_tokens == 20
        assert len(list(session.generate(max_new_tokens=5, **NONE))) == 5
        slow = socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT)  # a request whose headers never end
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        for each in (*readers, slow):
            each.close()
        for each in (session, other):
            each.close()


def stored(folder):
    """The histories on disk, by session, as the next server will read them. The server's process may have made other
    weights than this."""
    (model, *others) = {json.loads(path.read_bytes().partition(b"\n")[0].rpartition(b" ")[0])["model"] for path in folder.glob("*.session")}
    assert not others
    journal = Journal(folder, model)
    found = {each.id: each.history for each in journal.load()}
    journal.close()
    return found


def kills(folder, rounds):
    """Kill a server again and again while a client talks to it, and compare what is on disk with what the client was
    told.

    All of that is there, and of the call that was cut off all tokens or none. Some appends have a million tokens.
    """
    source, session_id, history, counts = random.Random(0), None, array.array("i"), collections.Counter()
    for number in range(rounds):
        with subprocess.Popen([sys.executable, str(KILLED), str(folder)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
            pending: list[int] | int = 0
            try:
                port = process.stdout.readline().strip()
                with Client(f"127.0.0.1:{port}", timeout_s=WAIT, retries=0) as client:
                    session = client.create_session() if session_id is None else client.session(session_id)
                    session_id, large = session.id, number % 4 == 3
                    assert session.length == len(history), number
                    killer = threading.Timer(source.uniform(0.0, 0.5), process.kill)
                    with contextlib.suppress(Unavailable, Cancelled):
                        while True:
                            pending = [number % VOCAB] * (1_000_000 if large else 2)
                            session.append(pending)
                            history.extend(pending)
                            counts["acknowledged"] += len(pending)
                            pending = 3
                            if not large or killer.ident is None:
                                told = list(session.generate(max_new_tokens=3, **NONE))
                                history.extend(told)
                                counts["acknowledged"] += 3
                            if killer.ident is None:  # programs are compiled from here on
                                killer.start()
                    killer.join()
            finally:
                process.kill()
        found = stored(folder)[session_id]
        assert found[: len(history)] == history, number
        rest = found[len(history) :].tolist()
        assert not rest or rest == pending or len(rest) == pending == 3, (number, len(rest))  # done, but the answer was lost
        counts["whole" if rest else "none"] += 1
        history = found
        if len(history) > 4_000_000:
            (folder / f"{session_id}.session").unlink()
            session_id, history = None, array.array("i")
    return counts


@pytest.mark.long
def test_a_hundred_kills_lose_no_acknowledged_token(tmp_path):
    counts = kills(tmp_path, 100)
    print(f"\n100 kills: {dict(counts)}")
    assert counts["acknowledged"] > 10_000_000
    assert counts["whole"]
    assert counts["none"]
