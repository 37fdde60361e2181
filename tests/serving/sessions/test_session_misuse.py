"""What breaks a promise of sessions only in odd moments: full or damaged folders, the last place, callers without a
token, stops."""

import array
import contextlib
import itertools
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from session_servers import WAIT, serving, until
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime, TopBlocks
from kvjax.cache import OutOfPages
from kvjax.client import Client
from kvjax.client.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, SessionNotFound
from kvjax.client.wire import protocol
from kvjax.serving.server.grpc_calls import _Talk
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions.core import SessionCore
from kvjax.serving.sessions.generation import Generation, Run
from kvjax.serving.sessions.journal import Journal, _end_mark

PAGES = 48
TEXT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
TOKEN = "t" * 20
NONE = {"stop_token_ids": ()}


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, "dense", pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(4,))


def test_a_fork_does_not_end_the_session_that_it_comes_from(engine):
    with SessionRuntime(engine, slots=4, capacity=1) as runtime:
        only = runtime.create(TEXT[:20])
        list(only.generate(max_new_tokens=2, **NONE))
        with pytest.raises(ResourceExhausted, match="in the middle of a call"):
            only.fork()
        assert only.info().history_tokens == 22
        assert not runtime.counts
    with SessionRuntime(engine, slots=4, capacity=2) as runtime:
        parent, other = runtime.create(TEXT[:20]), runtime.create(TEXT[:5])
        assert parent.fork().info().history_tokens == 20
        with pytest.raises(SessionNotFound, match="lru"):
            other.info()


def test_a_session_for_one_answer_cannot_end_before_it_begins(engine):
    """Between its creation and its generation it would be idle, and the next session at capacity would end it."""
    with SessionRuntime(engine, slots=4, capacity=1) as runtime:
        for length in (5, 6):
            session, generation = runtime.generate_once([1, 2, 3], max_new_tokens=length, stop_token_ids=())
            with pytest.raises(ResourceExhausted, match="in the middle of a call"):
                runtime.create([4])
            with pytest.raises(ResourceExhausted, match="in the middle of a call"):
                runtime.generate_once([4], max_new_tokens=1)
            assert len(list(generation)) == length
            session.close()
        with pytest.raises(InvalidArgument, match="max_new_tokens"):
            runtime.generate_once([4], max_new_tokens=-1)
        with pytest.raises(InvalidArgument):
            runtime.generate_once([-1], max_new_tokens=1)
        assert runtime.gauges()["sessions"] == 0


def test_no_session_ends_for_one_that_could_not_be_written(engine, tmp_path, monkeypatch):
    with SessionRuntime(engine, slots=4, capacity=1, state=tmp_path) as runtime:
        first = runtime.create(TEXT[:20])

        def full(*_):
            raise ResourceExhausted("a session could not be written to disk: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("kvjax.serving.sessions.journal.Journal.create", full)
            with pytest.raises(ResourceExhausted, match="No space"):
                runtime.create(TEXT[:5])
        assert first.info().history_tokens == 20
        runtime.create(TEXT[:5])
        with pytest.raises(SessionNotFound, match="lru"):
            first.info()


def test_no_session_ends_for_a_fork_that_fails(engine, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise ResourceExhausted("it does not fit")

    places = ("kvjax.serving.sessions.journal.Journal.create", "kvjax.Engine.fork", "kvjax.serving.sessions.core.SessionCore._checked")
    with SessionRuntime(engine, slots=4, capacity=2, state=tmp_path) as runtime:
        parent, other = runtime.create(TEXT[:20]), runtime.create(TEXT[:5])
        pages = runtime.gauges()["free_pages"]
        for place in places:
            with monkeypatch.context() as patch:
                patch.setattr(place, fails)
                with pytest.raises(ResourceExhausted, match="does not fit"):
                    parent.fork()
            assert (parent.info().history_tokens, other.info().history_tokens) == (20, 5)
        assert runtime.gauges()["free_pages"] == pages
        assert not runtime.counts
        parent.info()
        assert parent.fork().info().history_tokens == 20
        with pytest.raises(SessionNotFound, match="lru"):
            other.info()


def test_an_engine_that_could_never_generate_is_refused(model):
    sizes = {"pages": PAGES, "page_size": 16, "prefill_chunk": 32, "cache_format": "int8"}
    with pytest.raises(ValueError, match="a batch bucket of at least 2"):
        SessionRuntime(Engine(model, "dense", batch_buckets=(1,), **sizes))
    with SessionRuntime(Engine(model, "dense", batch_buckets=(1, 2), **sizes), slots=1) as runtime:
        assert len(list(runtime.create(TEXT[:20]).generate(max_new_tokens=2, **NONE))) == 2


@pytest.mark.parametrize("slots", [2, 4])
def test_running_generations_refuse_no_fork(model, slots):
    """They may hold every row of open pages, which packed pages need."""
    engine = Engine(model, "dense", pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(slots,), cache_format="int8")
    with SessionRuntime(engine, slots=slots) as runtime:
        parent = runtime.create(TEXT[:20])
        list(parent.generate(max_new_tokens=2, **NONE))
        alone = parent.fork()
        running = [iter(runtime.create(TEXT[start : start + 20]).generate(max_new_tokens=300, **NONE)) for start in (30, 50)]
        for each in running:
            next(each)
        children = [alone, *(parent.fork() for _ in range(3))]
        assert runtime.gauges()["generating"]
        assert sum(len(list(each)) for each in running) == 598
        expected = list(parent.generate(max_new_tokens=10, **NONE))
        for child in children:
            assert list(child.generate(max_new_tokens=10, **NONE)) == expected
        assert not {name for name in runtime.counts if name.startswith("inv")}


def test_at_is_a_length(engine):
    with SessionRuntime(engine, slots=4) as runtime:
        session = runtime.create([1, 2, 3])
        for wrong in (-2, 1.5, "3", True):  # the second last token is 2
            with pytest.raises(InvalidArgument) as caught:
                session.append([2], at=wrong)
            assert caught.value.field == "at"
            with pytest.raises(InvalidArgument):
                session.generate(at=wrong)
        assert session.append([4], at=np.int64(3)) == 4


def test_a_window_that_the_model_cannot_hold_is_refused(engine):
    with pytest.raises(ValueError, match="a window of 100,000 tokens has no room"):
        SessionRuntime(engine, window=100_000)


def test_a_new_session_that_does_not_fit_on_the_disk_takes_none_of_it(tmp_path, monkeypatch):
    journal = Journal(tmp_path, "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2]))
    before = sorted(tmp_path.iterdir())

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(ResourceExhausted, match="No space left"):
            journal.create("b" * 32, "dense", array.array("i", [1, 2]))
    assert sorted(tmp_path.iterdir()) == before
    journal.close()


def test_a_file_that_cannot_be_deleted_ends_no_runtime(engine, tmp_path, caplog):
    now = [0.0]
    with SessionRuntime(engine, slots=4, idle_ttl_s=10.0, clock=lambda: now[0], state=tmp_path) as runtime:
        sessions = [runtime.create(TEXT[:20]) for _ in range(3)]
        for each in sessions[:2]:
            list(each.generate(max_new_tokens=2, **NONE))
            path = tmp_path / f"{each.id}.session"
            path.unlink()
            path.mkdir()  # a folder cannot be deleted as a file is
        sessions[0].close()
        now[0] = 11.0
        until(lambda: not runtime.gauges()["sessions"])  # by their time
        assert engine.allocators["full"].free == PAGES
        assert "could not be deleted" in caplog.text
        for each in sessions[:2]:
            (tmp_path / f"{each.id}.session").rmdir()
            (tmp_path / f"{each.id}.session").touch()
        runtime.create([1]).close()
        assert not list(tmp_path.glob("*.session"))  # it was tried again


def test_a_sweep_that_fails_ends_no_runtime(engine, monkeypatch, caplog):
    with SessionRuntime(engine, slots=4) as runtime:
        monkeypatch.setattr(runtime._core, "sweep", lambda: 1 / 0)
        runtime._sweep()
        assert "ZeroDivisionError" in caplog.text
        assert runtime.create([1]).info().history_tokens == 1


@pytest.mark.parametrize("change", ["cut", "longer", "swapped", "end mark", "deleted"])
def test_nothing_is_added_to_a_file_that_another_program_changed(tmp_path, change):
    """Else what is told to be there is lost after a restart."""
    journal = Journal(tmp_path, "model")
    one, other = (tmp_path / f"{letter * 32}.session" for letter in "ab")
    journal.create("a" * 32, "dense", array.array("i", [1, 2, 3]))
    journal.create("b" * 32, "dense", array.array("i", [4, 5, 6]))
    whole = one.read_bytes()
    changed = {
        "cut": whole[: len(whole) // 2],
        "longer": whole + b"\0",
        "swapped": other.read_bytes(),
        "end mark": whole[:-1] + bytes([whole[-1] ^ 1]),
        "deleted": None,
    }[change]
    one.unlink()
    if changed is not None:
        one.write_bytes(changed)
    said = "the file of session aaaaaaaa was changed by another program, so nothing is added to it: restore it, or close the session"
    with pytest.raises(FailedPrecondition, match=said):
        journal.extend("a" * 32, [7])
    assert changed is None or one.read_bytes() == changed
    journal.extend("b" * 32, [7])
    one.write_bytes(whole)
    journal.extend("a" * 32, [8])
    journal.close()
    again = Journal(tmp_path, "model")
    assert [each.history.tolist() for each in again.load()] == [[1, 2, 3, 8], [4, 5, 6, 7]]
    again.close()


def test_any_damaged_byte_of_a_record_is_noticed(tmp_path):
    """Not only of its tokens: a number of tokens that is too large must not look like a record that a kill cut off."""
    journal = Journal(tmp_path, "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2, 3]))
    start = len((tmp_path / f"{'a' * 32}.session").read_bytes().partition(b"\n")[0]) + 1
    journal.extend("a" * 32, [4, 5])
    journal.close()
    (path,) = tmp_path.glob("*.session")
    whole = path.read_bytes()
    for at, bit in itertools.product(range(start, len(whole) - len(_end_mark(0))), range(8)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        again = Journal(tmp_path, "model")
        with pytest.raises(ValueError, match="is damaged"):
            list(again.load())
        again.close()


def test_a_folder_that_cannot_be_used_says_so(model, engine, tmp_path):
    top = TopBlocks(k=1, sink=1, local=1, block_size=16)
    both = Engine(model, "dense", policies=[top], pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    with SessionRuntime(both, slots=4, state=tmp_path) as runtime:
        session = runtime.create([1, 2], policy=top)
    path = tmp_path / f"{session.id}.session"
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=f"policies that this server does not have: .*session {session.id}"):
        SessionRuntime(engine, state=tmp_path)
    for damaged in (b"[" * 100_000 + b"\n", whole.replace(b'"policy": "', b'"policy": 5, "p": "')):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{session.id}"):
            SessionRuntime(both, state=tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        SessionRuntime(both, state=tmp_path)


def test_a_smaller_capacity_after_a_restart_holds_with_the_next_session(engine, tmp_path):
    with SessionRuntime(engine, slots=4, state=tmp_path) as runtime:
        for _ in range(4):
            runtime.create([1, 2])
    with SessionRuntime(engine, slots=4, capacity=2, state=tmp_path) as runtime:
        runtime.create([1])
        assert runtime.gauges()["sessions"] == 2
        assert runtime.counts["reason_lru"] == 3


def half_calls(port, count):
    """A socket with calls whose messages never come, and which carry no token."""

    def frame(kind, flags, stream, content):
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    fields = {":method": "POST", ":scheme": "http", ":path": "/kvjax.v1.RuntimeService/GetSessionInfo", ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields.items())
    sent = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    sent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    sent.sendall(b"".join(frame(1, 4, 2 * number + 1, block) for number in range(count)))
    return sent


def gets_in(session):
    try:
        return session.info().history_tokens == 2
    except ResourceExhausted:
        return False


def test_callers_without_a_token_keep_nobody_out(engine):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with serving(engine, max_calls=6, tokens=(TOKEN,)) as server, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{server.port}"
        client = stack.enter_context(Client(address, token=TOKEN, timeout_s=WAIT))
        session = client.create_session([1, 2])
        channel = stack.enter_context(grpc.insecure_channel(address))
        never = queue.SimpleQueue()
        for _ in range(20):
            each = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(never.get, None), timeout=WAIT)
            with pytest.raises(grpc.RpcError) as refused:
                next(each)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            never.put(None)
        with contextlib.closing(half_calls(server.port, 20)):
            until(lambda: "UNAUTHENTICATED" in server.metrics.text().decode())
            until(lambda: gets_in(session))  # each of them has a place until it is refused
            for _ in range(10):
                assert session.info().history_tokens == 2
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        told = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([told]), timeout=WAIT, metadata=(("authorization", f"Bearer {TOKEN}"),)
        )
        assert "kvjax.v1.RuntimeService" in str(next(listed))


def test_more_stop_tokens_than_there_are_tokens_are_refused(engine):
    with serving(engine) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        session = client.create_session([1, 2])
        with pytest.raises(InvalidArgument, match=f"more than the limit of {VOCAB}") as caught:
            list(session.generate(stop_token_ids=[1] * (VOCAB + 1)))
        assert caught.value.field == "stop_token_ids"
        assert len(list(session.generate(max_new_tokens=2, stop_token_ids=[VOCAB - 1] * VOCAB))) <= 2


def test_the_messages_of_a_converse_count_as_calls(engine):
    with serving(engine, tokens=(TOKEN,), calls_per_second=0.4) as server, Client(f"127.0.0.1:{server.port}", token=TOKEN) as client:
        session, types = client.create_session([1, 2]), protocol()
        method = types.methods["Converse"]
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream(
                method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
            )
            asked = [types.ConverseRequest(session_id=session.id, append=types.Append(token_ids=[1])) for _ in range(9)]
            answers = call(iter(asked), timeout=WAIT, metadata=client.connection.metadata)
            with pytest.raises(grpc.RpcError) as refused:
                list(answers)
        assert (refused.value.code(), dict(refused.value.trailing_metadata())["kvjax-reason"]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "rate",
        )
        assert server.runtime.session(session.id).info().history_tokens == 2 + 3  # four calls at once, one of them CreateSession


def request(action=None, **fields):
    types = protocol()
    kinds = {"generate": types.Start, "append": types.Append, "stop": types.Stop}
    return types.ConverseRequest(session_id="s", **({} if action is None else {action: kinds[action](**fields)}))


def test_a_converse_reads_no_more_than_it_can_hold():
    read = []

    def requests():
        for number in range(100):
            read.append(number)
            yield request("append", token_ids=[1] * 1000)

    talk = _Talk(requests(), most_bytes=10_000)
    until(lambda: len(read) >= 8)
    time.sleep(0.05)
    assert len(read) < 12
    assert [talk.next() is None for _ in range(101)] == [False] * 100 + [True]
    assert len(read) == 100
    blocked = _Talk(requests(), most_bytes=10_000)
    until(lambda: len(read) >= 108)
    blocked.end()  # its thread ends, too
    until(lambda: not [each for each in threading.enumerate() if each.name == "kvjax converse"])


def test_a_stop_ends_the_generation_that_was_asked_for_before_it():
    """Even if the server has not begun with it, and not one that was asked for later."""
    talk, stopped = _Talk(iter([request("generate"), request("stop", keep=2), request("generate")]), 2**20), []
    fakes = [SimpleNamespace(stop=lambda *keep, number=number: stopped.append((number, *keep))) for number in range(2)]
    until(lambda: not [each for each in threading.enumerate() if each.name == "kvjax converse"])
    for fake in fakes:
        assert talk.next().WhichOneof("action") == "generate"
        assert talk.generates(fake)
        talk.generates(None)
    assert stopped == [(0, 2)]
    assert talk.next() is None


@pytest.mark.parametrize(("keep", "kept", "reason"), [(1, 1, "cancelled"), (3, 3, "length"), (9, 3, "length"), (None, 3, "length")])
def test_a_stop_counts_until_the_end_is_told(keep, kept, reason):
    """The runtime may be done before its reader has taken all tokens."""
    concluded = []
    run = Run("s", None, None)
    generation = Generation(run, lambda run, count, wait: concluded.append(count) or 7)
    for token in range(3):
        run.add(token)
    run.end("length")
    assert generation.ready() == [0, 1, 2]
    if keep is not None:
        generation.stop(keep)
    concluded.clear()
    assert generation.ready() == []
    assert (concluded, generation.finish_reason, generation.history_tokens) == ([kept], reason, 7)


def test_what_a_client_cannot_send_is_an_error_of_sessions_and_leaves_none(engine):
    with serving(engine) as server:
        client = Client(f"127.0.0.1:{server.port}", timeout_s=float("inf"))
        session = client.create_session(iter([1, 2, 3]))
        assert session.length == 3
        for wrong in (5, "\ud800"):
            with pytest.raises(InvalidArgument) as caught:
                client.create_session([1], policy=wrong)
            assert caught.value.field == "policy"
        assert len(list(session.generate(max_new_tokens=2, timeout=float("inf"), **NONE))) == 2
        assert server.runtime.gauges()["sessions"] == 1
        client.close()
        for call in (session.info, client.create_session, lambda: list(session.generate())):
            with pytest.raises(FailedPrecondition, match="was closed"):
                call()


def test_a_drain_without_end_is_a_long_one(engine):
    with serving(engine) as server:
        call = server._admission.begin("Generate")
        threading.Timer(0.05, call.end, (None,)).start()
        server._admission.drain(1e30)
        assert call.ended


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes keys with openssl")
def test_a_key_of_another_certificate_is_refused(tmp_path):
    made = {}
    for name, more in (("a", "-nodes"), ("b", "-passout pass:secret")):
        paths = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost {more}"
        subprocess.run([*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
        made[name] = tuple(path.read_bytes() for path in paths)
    assert ServerOptions(certificate=made["a"])
    for wrong in ((made["b"][0], made["a"][1]), made["b"], (b"junk", b"junk"), (made["a"][0], b"")):
        with pytest.raises(ValueError, match="--tls-certificate and --tls-key must be"):
            ServerOptions(certificate=wrong)


def test_a_client_of_the_shim_that_goes_or_sends_halves_of_characters_is_no_failure(engine, caplog):
    with caplog.at_level("INFO", "kvjax.server"), serving(engine, http_port=0) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT) as gone:
            gone.sendall(head % 1000 + b"{")
            time.sleep(0.1)
        until(lambda: "CANCELLED" in caplog.text)
        assert "Traceback" not in caplog.text
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT) as odd:
            body = b'{"\\ud800": 1}'
            odd.sendall(head % len(body) + body)
            answer = b""
            while b"\r\n\r\n{" not in answer or not answer.endswith(b"}"):
                answer += odd.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"deprecation" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "?"


@pytest.mark.parametrize("zeros", [1, 12, 4096])
def test_zeros_that_a_loss_of_power_left_are_moved_away(zeros, tmp_path, caplog):
    session_id = "a" * 32
    journal = Journal(tmp_path, "model")
    journal.create(session_id, "dense", array.array("i", [1, 2, 3]))
    journal.close()
    path, torn = tmp_path / f"{session_id}.session", tmp_path / f"{session_id}.torn"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(zeros))
    journal = Journal(tmp_path, "model")
    assert [list(stored.history) for stored in journal.load()] == [[1, 2, 3]]
    assert (path.read_bytes(), torn.read_bytes()) == (whole, bytes(zeros))
    assert "its file ends in zeros, as after a loss of power; its history has the 3 tokens before" in caplog.text
    journal.extend(session_id, [4])
    journal.close()
    path.write_bytes(whole + bytes(zeros + 12) + b"\1")  # not only zeros
    journal = Journal(tmp_path, "model")
    with pytest.raises(ValueError, match="is damaged: tokens after the first 3"):
        list(journal.load())
    journal.close()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_its_own_is_named(tmp_path, kind):
    """A pipe would be waited for without end, and tokens written to what a link leads to."""
    other = tmp_path / "other"
    journal = Journal(tmp_path / "state", "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2, 3]))
    path = tmp_path / "state" / f"{'a' * 32}.session"
    path.rename(other)
    before = other.read_bytes()
    path.symlink_to(other)
    with pytest.raises(ResourceExhausted, match="could not be written to disk"):
        journal.extend("a" * 32, [4])
    journal.close()
    if kind != "link":
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    journal = Journal(tmp_path / "state", "model")
    with pytest.raises(ValueError, match=f"{path} cannot be read: it is a link"):
        list(journal.load())
    journal.close()
    assert other.read_bytes() == before


def test_only_unfinished_files_of_the_journal_are_deleted(tmp_path):
    """A batch job in the same folder, for example, keeps its answers in job.jsonl.partial."""
    (tmp_path / "notes").write_text("kept")
    own, kept = f"{'a' * 32}.partial", {"job.jsonl.partial", "x.partial", f"{'A' * 32}.partial", f"{'a' * 33}.partial", ".partial"}
    for name in (own, *kept):
        (tmp_path / name).write_text("kept")
    (tmp_path / f"{'b' * 32}.partial").symlink_to(tmp_path / "notes")
    os.mkfifo(tmp_path / f"{'c' * 32}.partial")
    (tmp_path / f"{'d' * 32}.partial").mkdir()
    before = {each.name for each in tmp_path.iterdir()}
    journal = Journal(tmp_path, "model")
    assert list(journal.load()) == []
    journal.close()
    assert {each.name for each in tmp_path.iterdir()} == before - {own} | {"lock"}
    assert all((tmp_path / name).read_text() == "kept" for name in (*kept, "notes"))


def test_a_file_larger_than_memory_is_named(tmp_path, monkeypatch):
    journal = Journal(tmp_path, "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2, 3]))

    def too_large(path):
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", too_large)
    with pytest.raises(ValueError, match=f"{'a' * 32}.session cannot be read: it is larger than memory"):
        list(journal.load())
    journal.close()


def test_a_torn_end_of_a_session_is_kept_and_said(tmp_path, caplog):
    session_id = "a" * 32
    journal = Journal(tmp_path, "model")
    journal.create(session_id, "dense", array.array("i", [1, 2, 3]))
    journal.extend(session_id, [4, 5])
    journal.close()
    path, torn = tmp_path / f"{session_id}.session", tmp_path / f"{session_id}.torn"
    whole = path.read_bytes()
    mark = len(_end_mark(0))
    for lost in (mark + 3, mark + 15):  # in the tokens, and in the numbers before them
        path.write_bytes(whole[:-lost])
        torn.unlink(missing_ok=True)
        caplog.clear()
        journal = Journal(tmp_path, "model")
        (stored,) = journal.load()
        assert list(stored.history) == [1, 2, 3]
        assert path.read_bytes()[:-mark] + torn.read_bytes() == whole[:-lost]
        assert f"has the 3 tokens before, and the {len(torn.read_bytes())} bytes are in {torn}" in caplog.text
        journal.close()
    path.write_bytes(whole[: -mark - 1] + bytes([whole[-mark - 1] ^ 1]) + whole[-mark:])  # complete, and damaged
    journal = Journal(tmp_path, "model")
    with pytest.raises(ValueError, match="tokens after the first 3 are not those written"):
        list(journal.load())
    journal.end(session_id)
    journal.close()
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("histories", [[[1, 2, 3], [4, 5]], [[], [1, 2]], [[1, 2, 3], list(range(9))]])
def test_a_session_that_was_cut_at_the_end_of_a_record_is_said_once(histories, tmp_path, caplog):
    session_id, (first, second) = "a" * 32, histories
    path = tmp_path / f"{session_id}.session"
    journal = Journal(tmp_path, "model")
    journal.create(session_id, "dense", array.array("i", first))
    whole = path.read_bytes()
    journal.extend(session_id, second)
    journal.close()
    path.write_bytes(path.read_bytes()[: len(whole) - len(_end_mark(0))])
    for said in (1, 1):  # it is whole again when it is opened again
        journal = Journal(tmp_path, "model")
        assert [list(stored.history) for stored in journal.load()] == [first]
        assert caplog.text.count(f"has no end mark, so it was cut; its history has the {len(first)} tokens that are left") == said
        assert path.read_bytes() == whole
        journal.close()
    assert not path.with_suffix(".torn").exists()


@pytest.mark.parametrize("written", [1, 4, 11, 12, 13, 19, 20, 21, 25, 31])
def test_a_kill_while_a_record_is_written_over_the_end_mark_is_half_a_record(written, tmp_path, caplog):
    session_id = "a" * 32
    path = tmp_path / f"{session_id}.session"
    journal = Journal(tmp_path, "model")
    journal.create(session_id, "dense", array.array("i", [1, 2, 3]))
    before = path.read_bytes()
    journal.extend(session_id, [4, 5])
    journal.close()
    start = len(before) - len(_end_mark(0))
    path.write_bytes(path.read_bytes()[: start + written] + before[start + written :])
    journal = Journal(tmp_path, "model")
    (stored,) = journal.load()
    assert list(stored.history) == ([1, 2, 3] if written < 20 else [1, 2, 3, 4, 5])
    assert ("half a record" if written < 20 else "no end mark") in caplog.text
    journal.extend(session_id, [6])
    journal.close()
    caplog.clear()
    journal = Journal(tmp_path, "model")
    assert [list(each.history)[-1] for each in journal.load()] == [6]
    assert not caplog.text
    journal.close()


@pytest.mark.parametrize("name", ["lock", "x.session"])
def test_a_folder_in_the_place_of_a_file_of_sessions_is_said(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name} cannot be .*; delete it"):
        list(Journal(tmp_path, "model").load())


def test_a_caller_without_pages_reads_what_it_can_do_and_the_log_what_the_operator_can(caplog):
    """The caller cannot give the engine more pages."""
    short = OutOfPages(3, 1, PAGES, "give more pages, on the command line --pages")

    def take():
        raise short

    nobody_gives = SimpleNamespace(_give_room=lambda needing: False)
    for call in (
        lambda: SessionCore._with_room(nobody_gives, take, SimpleNamespace(sequence=None)),
        lambda: SessionCore._told(nobody_gives, take),
    ):
        caplog.clear()
        with pytest.raises(ResourceExhausted) as caught:
            call()
        assert str(caught.value) == f"the pages are full (3 needed, 1 free of {PAGES}): try again later, or close sessions"
        assert caught.value.__cause__ is short, "sessions with a window are looked after"
        assert str(short) in caplog.text
    short = OutOfPages(PAGES + 1, 1, PAGES)
    with pytest.raises(ResourceExhausted, match=f"^{PAGES + 1} pages are needed, and there are only {PAGES}: send a shorter history$"):
        SessionCore._told(nobody_gives, take)
