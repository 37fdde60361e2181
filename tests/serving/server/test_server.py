"""The server and the Python clients, over a free loopback port."""

import asyncio
import contextlib
import datetime
import gc
import io
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
import typer
from character_tokenizer import make_tokenizer
from session_servers import WAIT, serving, until
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SessionNotFound,
    Unauthenticated,
    Unavailable,
    chat,
    example,
    from_openai_messages,
    tokens_for_chat,
)
from kvjax.client.shared import error_text
from kvjax.client.wire import SERVICE, protocol
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

PAGES, PAGE, CHUNK = 48, 16, 32
TEXT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), "dense", policies=["quest:2"], pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(4,))


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine, http_port=0, max_new_tokens=300, max_tokens=150) as running:
        yield running


@pytest.fixture(autouse=True)
def sessions_end_with_their_test(request):
    yield
    if "server" in request.fixturenames:
        runtime = request.getfixturevalue("server").runtime
        for session_id in list(runtime._core.records):
            runtime.session(session_id).close()


@pytest.fixture
def client(server):
    with Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as made:
        yield made


def quiet(server):
    """Nothing runs, and no page is held by a generation."""
    gauges = server.runtime.gauges()
    return not gauges["generating"] and not gauges["waiting"]


def test_a_conversation_through_the_client_is_the_one_in_process(client, server):
    with client.create_session(TEXT[:40]) as session:
        inside = server.runtime.create(TEXT[:40])
        for turn in range(3):
            stream = session.generate(max_new_tokens=6, temperature=1.0, seed=turn, stop_token_ids=())
            tokens = list(stream)
            assert tokens == list(inside.generate(max_new_tokens=6, temperature=1.0, seed=turn, stop_token_ids=()))
            assert (stream.finish_reason, stream.history_tokens) == ("length", session.length)
            assert session.append([turn, 5]) == inside.append([turn, 5])
        child = session.fork()
        assert list(child.generate(max_new_tokens=3)) == list(session.generate(max_new_tokens=3))
        assert session.info().history_tokens == session.length == client.session(session.id).length
        inside.close()
        child.close()
    with pytest.raises(SessionNotFound) as caught:
        session.info()
    assert caught.value.reason == "close"


def test_the_asynchronous_client(server):
    async def talk():
        async with AsyncClient(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client, await client.create_session(TEXT[:40]) as session:
            await session.append([7])
            other = await session.fork()
            both = [[token async for token in each.generate(max_new_tokens=5, stop_token_ids=())] for each in (session, other)]
            async with contextlib.aclosing(other.generate(max_new_tokens=200, stop_token_ids=())) as tokens:
                async for _ in tokens:
                    break
            with pytest.raises(InvalidArgument):
                await other.append([VOCAB])
            return both, (await other.info()).history_tokens, other.length

    both, known, length = asyncio.run(talk())
    assert both[0] == both[1]
    assert known == length > 46


def test_errors_carry_status_field_and_reason(client):
    session = client.create_session()
    for call, kind, field in (
        (lambda: client.create_session([VOCAB]), InvalidArgument, "tokens"),
        (lambda: client.create_session([-1]), InvalidArgument, "token_ids"),
        (lambda: client.create_session(policy="top:32"), InvalidArgument, "policy"),
        (lambda: client.create_session([1] * 151), ResourceExhausted, ""),
        (lambda: list(session.generate(max_new_tokens=301)), InvalidArgument, "max_new_tokens"),
        (lambda: list(session.generate(temperature=-1.0)), InvalidArgument, "temperature"),
        (lambda: list(session.generate(stop=("a",))), InvalidArgument, "stop"),
        (lambda: list(session.generate()), FailedPrecondition, ""),
        (lambda: client.session("f" * 32), SessionNotFound, ""),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.field == field
    again = client.session(session.id)
    session.append([1, 2])
    with pytest.raises(InvalidArgument, match="has 2"):
        again.append([3])  # it does not know of them
    assert again.append([1, 2]) == 2  # the same call once more, as after a lost answer
    session.close()


def test_cancellation_and_deadlines_free_the_slot(client, server):
    session = client.create_session(TEXT[:20])
    for taken, _ in enumerate(session.generate(max_new_tokens=300, stop_token_ids=()), 1):
        if taken == 2:
            break
    assert session.length == session.info().history_tokens >= 22
    before = session.length
    with pytest.raises(DeadlineExceeded):
        list(session.generate(max_new_tokens=300, stop_token_ids=(), timeout=0.15))
    until(lambda: quiet(server))
    assert session.info().history_tokens == before
    session.close()


def test_a_client_that_is_closed_ends_what_is_read(server, monkeypatch):
    """As if the loop was left: the tokens that were read join the history."""
    address, dropped = f"127.0.0.1:{server.port}", []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with Client(address) as used:
        session = used.create_session(TEXT[:20])
        stream = iter(session.generate(max_new_tokens=300, stop_token_ids=()))
        found = [next(stream) for _ in range(2)]
    assert next(stream, None) is None

    async def talk():
        async with AsyncClient(address, timeout_s=WAIT) as client:
            other = await client.create_session(TEXT[:20])
            tokens = other.generate(max_new_tokens=300, stop_token_ids=())
            found = [await anext(tokens) for _ in range(2)]
        assert await anext(tokens, None) is None
        return other.id, found

    known, also = asyncio.run(talk())
    assert also == found
    with Client(address) as again:
        assert [again.session(each).info().history_tokens for each in (session.id, known)] == [22, 22]
        for each in (session.id, known):
            again.session(each).close()
    del stream
    gc.collect()
    assert not dropped


def test_a_cancelled_call_frees_its_slot_before_the_second_step(client, server, monkeypatch):
    """Steps are counted from when the server hears of the end to when the scheduler has taken the generation out of its
    slot."""
    runtime, begun, told, freed = server.runtime, [0], [], []
    core = runtime._core
    step, cancel, conclude = core.scheduler.step, core.scheduler.cancel, runtime._conclude

    def counted_step():
        begun[0] += 1
        return step()

    def counted_cancel(handle):
        cancel(handle)
        freed.append((begun[0], core.scheduler.running))

    def counted_conclude(run, keep, wait):
        told.append(begun[0])
        return conclude(run, keep, wait)

    monkeypatch.setattr(core.scheduler, "step", counted_step)
    monkeypatch.setattr(core.scheduler, "cancel", counted_cancel)
    monkeypatch.setattr(runtime, "_conclude", counted_conclude)
    for end in ("left", "deadline"):
        told.clear()
        freed.clear()
        with client.create_session(TEXT[:20]) as session:
            if end == "left":
                for _ in session.generate(max_new_tokens=300, stop_token_ids=()):
                    break
            else:
                with pytest.raises(DeadlineExceeded):
                    list(session.generate(max_new_tokens=300, stop_token_ids=(), timeout=0.3))
            until(lambda: freed)
        assert freed[0][0] - told[0] <= 1
        assert freed[0][1] == 0


def test_converse_appends_generates_and_stops(client, server):
    types, session = protocol(), client.create_session(TEXT[:20])
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    method = types.methods["Converse"]
    call = channel.stream_stream(
        method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
    )
    wanted, heard = threading.Semaphore(0), []

    def requests():
        yield types.ConverseRequest(session_id=session.id, append=types.Append(token_ids=[1, 2, 3]))
        yield types.ConverseRequest(generate=types.Start(sampling=types.Sampling(max_new_tokens=4, stop_tokens=types.StopTokens())))
        yield types.ConverseRequest(generate=types.Start(sampling=types.Sampling(max_new_tokens=290, stop_tokens=types.StopTokens())))
        wanted.acquire()
        yield types.ConverseRequest(stop=types.Stop(keep=1))

    finished = []
    for response in call(requests(), timeout=WAIT):
        event = response.WhichOneof("event")
        heard.append(event)
        if event == "finished":
            finished.append((response.finished.reason, response.finished.history_tokens))
        elif event == "tokens" and len(finished) == 1:
            wanted.release()
    assert heard[0] == "appended"
    assert finished[0] == (types.FINISH_REASON_LENGTH, 27)
    assert finished[1] == (types.FINISH_REASON_CANCELLED, 28)
    channel.close()
    session.close()


def test_a_connection_cut_at_any_message_leaves_nothing_running(client, server):
    session = client.create_session(TEXT[:30])
    for number in range(6):
        cut = grpc.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)])
        method = protocol().methods["Generate"]
        call = cut.unary_stream(
            method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
        )
        sampling = protocol().Sampling(max_new_tokens=300, stop_tokens=protocol().StopTokens())
        stream = call(protocol().GenerateRequest(session_id=session.id, sampling=sampling))
        for _ in range(number):
            next(stream)
        cut.close()
    until(lambda: quiet(server))
    assert session.info().history_tokens == 30
    session.close()


def test_a_client_closed_by_another_thread_ends_its_generations(server):
    client = Client(f"127.0.0.1:{server.port}", timeout_s=WAIT, retries=0)
    tokens = iter(client.create_session(TEXT[:20]).generate(max_new_tokens=300, stop_token_ids=()))
    next(tokens)
    threading.Timer(0.05, client.close).start()
    with pytest.raises(Cancelled, match="closed"):
        list(tokens)
    until(lambda: quiet(server))


def test_tokens_limits_and_addresses(engine):
    with pytest.raises(ValueError, match="must carry a bearer token"):
        ServerOptions(host="0.0.0.0")
    with pytest.raises(ValueError, match="16 to 4,096 characters"):
        ServerOptions(tokens=("short",))
    with serving(engine, tokens=(TOKEN,), calls_per_second=0.5, http_port=0) as server:
        address = f"127.0.0.1:{server.port}"
        for wrong in (None, "b" * 20, TOKEN[:-1]):
            with Client(address, token=wrong) as client, pytest.raises(Unauthenticated):
                client.create_session()
        with Client(address, token=TOKEN) as client:
            with pytest.raises(ResourceExhausted) as caught:
                [client.create_session() for _ in range(9)]
            assert caught.value.reason == "rate"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics")
        assert refused.value.code == 401


def test_ids_ends_and_a_window_over_the_wire(engine):
    """A history beyond the window is told as an event and counted. How a session ended is in the trailing metadata."""
    now = [0.0]
    limits = {"window": 64, "capacity": 3, "idle_ttl_s": 100.0, "clock": lambda: now[0]}
    with serving(engine, limits=limits, http_port=0) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        types, session = protocol(), client.create_session(TEXT[:70])
        call = client.stream(types.GenerateRequest(session_id=session.id, sampling=types.Sampling(max_new_tokens=3)), WAIT)
        events = [response.WhichOneof("event") for response in call]
        assert (events[:2], events[-1]) == (["truncated", "tokens"], "finished")
        session = client.create_session(TEXT[:70])
        stream = session.generate(max_new_tokens=3)
        list(stream)
        assert (stream.dropped_tokens, session.info().dropped_tokens) == (16, 16)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as page:
            assert 'history_truncated_total{by="window"} 2.0' in page.read().decode()
        others = [client.create_session() for _ in range(2)]  # the first session of all ends
        ids = {session.id, *(each.id for each in others)}
        assert len(ids) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
        client.create_session()
        with pytest.raises(SessionNotFound) as caught:
            session.append([1])
        assert caught.value.reason == "lru"
        now[0] = 101.0
        until(lambda: server.runtime.counts.get("reason_ttl", 0) == 3)
        with pytest.raises(SessionNotFound) as caught:
            others[0].append([1])
        assert caught.value.reason == "ttl"


def test_draining_lets_calls_end_and_takes_no_new_ones(engine):
    with serving(engine, http_port=0) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT, retries=0) as client:
        session = client.create_session(TEXT[:20])
        tokens = iter(session.generate(max_new_tokens=300, stop_token_ids=()))
        heard = [next(tokens)]
        stopping = threading.Thread(target=server.stop, args=(WAIT,))
        stopping.start()
        until(lambda: server._admission.ending)
        with pytest.raises(Unavailable) as caught:
            client.create_session()
        assert caught.value.reason == "ending"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz")
        assert refused.value.code == 503
        assert server._admission._under_way
        heard += tokens
        stopping.join(WAIT)
        assert len(heard) == 300
        assert not stopping.is_alive()


def test_what_does_not_end_while_draining_is_cut_off(engine):
    with serving(engine) as server, Client(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client:
        tokens = iter(client.create_session(TEXT[:20]).generate(max_new_tokens=700, stop_token_ids=()))
        next(tokens)
        began = time.monotonic()
        server.stop(0.1)
        assert time.monotonic() - began < WAIT / 2
        with pytest.raises((Cancelled, Unavailable)):
            list(tokens)


def test_metrics_health_and_reflection(client, server):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with client.create_session(TEXT[:20]) as session:
        list(session.generate(max_new_tokens=3, stop_token_ids=()))
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as page:
            text = page.read().decode()
    for line in (
        "session_active ",
        'session_total{outcome="evicted"} ',
        "session_kv_live_bytes ",
        "session_history_tokens_count ",
        "generate_prefill_tokens_sum ",
        "generate_prefill_duration_seconds_count ",
        'cache_invariant_violations_total{kind="inv1"} 0.0',
        'session_evicted_total{reason="lru"} ',
        "time_to_first_token_seconds_count ",
        'kv_pages{store="device"} ',
        'kv_pages{store="disk"} 0.0',
        'session_demoted_total{to="disk"} 0.0',
        "token_gap_seconds_bucket",
        'rpc_total{code="OK",method="Generate"} ',
    ):
        assert line in text
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/healthz") as page:
        assert page.read() == b"ok\n"
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_logs_hold_no_tokens(client, server, caplog):
    with caplog.at_level(logging.INFO, "kvjax.server"), client.create_session([31, 41, 59]) as session:
        session.append([26])
    until(lambda: len(caplog.records) >= 3)
    for record in caplog.records:
        fields = json.loads(record.getMessage())
        assert abs(datetime.datetime.fromisoformat(fields["time"]).timestamp() - time.time()) < 60
        assert set(fields) <= {"time", "call", "code", "session", "seconds", "error", "field", "reason"}
        assert fields["session"] == session.id[:8]


def test_a_restarted_server_is_found_again(engine):
    with serving(engine) as first:
        client = Client(f"127.0.0.1:{first.port}", timeout_s=WAIT)
        session, port = client.create_session(TEXT[:20]), first.port
    with pytest.raises(Unavailable):
        client.create_session()

    class Late(threading.Thread):
        def run(self):
            time.sleep(0.3)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.again())
                ready.wait(WAIT)

        @contextlib.contextmanager
        def again(self):
            metrics = Metrics()
            runtime = SessionRuntime(engine, slots=4)
            server = Server(runtime, metrics, ServerOptions(port=port))
            server.start()
            yield
            server.stop(0.0)

    ready, late = threading.Event(), Late()
    late.start()
    try:
        with pytest.raises(SessionNotFound) as caught:  # after repetitions, while there was no server
            session.append([1])
        assert caught.value.reason == "unknown"
    finally:
        ready.set()
        late.join()
        client.close()


def test_the_chat_prints_what_the_session_says(server, monkeypatch, capsys):
    tokenizer = make_tokenizer()
    monkeypatch.setattr(chat, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nMore\n"))
    assert chat.main(["--address", f"127.0.0.1:{server.port}", "--max-new-tokens", "5"]) == 0
    ids, expected = [], []
    for line in ("Hello", "More"):
        ids += tokenizer(line)["input_ids"]
        answer = list(server.runtime.create(ids).generate(max_new_tokens=5))
        ids, expected = ids + answer, [*expected, tokenizer.decode(answer, skip_special_tokens=True)]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hello{'~' * 200}\n"))
    assert chat.main(["--address", f"127.0.0.1:{server.port}"]) == 1
    assert "limit of 150" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8", "surrogateescape"))
    assert chat.main(["--address", f"127.0.0.1:{server.port}"]) == 1
    assert "chat: a line is not UTF-8" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter):
        chat.main(["--no-thinking"])
    with pytest.raises(typer.BadParameter, match="must be one token, but 'ab' is 2"):
        chat.main(["--stop", "ab"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert chat.main(["--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "chat: there is no server at 127.0.0.1:1, or it has ended: start `kvjax serve`, or give --address\n"
    assert error_text(Unavailable("so", reason="ending"), "here:1", "it") == "the server at here:1 is ending, and takes no new call"
    with pytest.raises(SystemExit, match="1"):
        example.app(["127.0.0.1:1"])
    assert capsys.readouterr().err.startswith("example: there is no server at 127.0.0.1:1, or it has ended")


@pytest.mark.parametrize("main", [chat.app, example.app])
def test_programs_of_the_client_explain_themselves(main, capsys):
    with contextlib.suppress(SystemExit):
        main(["-h"])
    assert re.search(r"-h, --help +show this", capsys.readouterr().out, re.I)


def test_a_client_that_was_closed_says_so(server):
    with Client(f"127.0.0.1:{server.port}") as client:
        session = client.create_session([1])
    for call in (client.create_session, session.info, lambda: list(session.generate(max_new_tokens=1)), session.close):
        with pytest.raises(FailedPrecondition, match="this client was closed"):
            call()

    async def talk():
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            session = await client.create_session([1])
        for call in (session.info, session.close, lambda: anext(aiter(session.generate(max_new_tokens=1)))):
            with pytest.raises(FailedPrecondition, match="this client was closed"):
                await call()

    asyncio.run(talk())


def test_closing_an_asynchronous_client_cancels_no_task(server):
    """A task that nobody has cancelled must not end as if it was: a TaskGroup would not say that its answer is lost."""

    async def talk():
        client = AsyncClient(f"127.0.0.1:{server.port}")
        session, begun = await client.create_session([1]), asyncio.Event()

        async def listen():
            async for _ in session.generate(max_new_tokens=300, stop_token_ids=()):
                begun.set()

        listening = asyncio.create_task(listen())
        await begun.wait()
        asking = [asyncio.create_task(client.create_session([1, 2])) for _ in range(5)]
        await asyncio.sleep(0)
        await client.close()
        return await asyncio.gather(listening, *asking, return_exceptions=True)

    found = asyncio.run(talk())
    assert isinstance(found[0], Cancelled)
    assert not any(isinstance(each, asyncio.CancelledError) for each in found)

    async def cancelled():
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            task = asyncio.create_task(client.create_session([1]))
            await asyncio.sleep(0)
            task.cancel()
            await client.close()
            await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_chat_on_a_terminal_has_a_prompt(monkeypatch, capsys):
    typed, asked = iter(["Hello", "More"]), []

    def answer(prompt):
        asked.append(prompt)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert (list(chat.lines()), asked) == (["Hello", "More"], ["> "] * 3)
    assert capsys.readouterr().out == "\n"  # after Ctrl-D


def test_a_chat_without_a_tokenizer_or_its_template_says_so(tmp_path):
    with pytest.raises(typer.BadParameter, match="there is no tokenizer of "):
        chat.main(["--model", str(tmp_path / "none")])
    with pytest.raises(typer.BadParameter, match="'needle' has no chat template"):
        chat.main(["--template"])
    with pytest.raises(typer.BadParameter, match=r"holds no tokenizer; copy tokenizer.json"):
        chat.main(["--model", str(tmp_path)])


def test_chat_templates_turn_by_turn():
    tokenizer = make_tokenizer()
    user, answer, second = ({"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes"), ("user", "So?")))
    first = tokens_for_chat([user], tokenizer, enable_thinking=False)
    again = from_openai_messages([user, answer, second], tokenizer, enable_thinking=False)
    assert again[: len(first)] != first  # the hazard: the think block is not rendered again
    more = tokens_for_chat([second], tokenizer, after=[user, answer], enable_thinking=False)
    session = tokenizer.decode([*first, *tokenizer("Yes<|im_end|>")["input_ids"], *more])
    head, tail = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes<|im_end|>\n"
    assert session == head.format("Hi") + tail + head.format("So?")
    cut = tokens_for_chat([second], tokenizer, after=[user, answer], stopped=False, enable_thinking=False)
    assert cut[0] == 97
    assert cut[1:] == more


def test_the_committed_description_is_that_of_the_proto_file(tmp_path):
    from importlib import resources

    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    tool = Path(__file__).parents[3] / "tools" / "make_protocol.py"
    subprocess.run([sys.executable, str(tool), str(tmp_path / "made")], check=True)
    committed = resources.files("kvjax.client").joinpath("runtime.binpb").read_bytes()
    assert FileDescriptorSet.FromString((tmp_path / "made").read_bytes()) == FileDescriptorSet.FromString(committed)


@pytest.mark.long
def test_two_terminals_are_enough():
    """`kvjax serve` and the chat, as processes; SIGTERM ends the server well."""
    serve = [sys.executable, "-m", "kvjax.serving.cli", "serve", "--model", "needle", "--policy", "top:8", "--port", "0", "--pages", "64"]
    with subprocess.Popen([*serve, "--max-batch", "1"], stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(line for line in server.stderr if line.startswith("listening")).split(":")[-1].strip()
            command = [sys.executable, "-m", "kvjax.client.chat", "--address", f"127.0.0.1:{port}", "--stop", ".", "--max-new-tokens", "8"]
            lines = "The pass key for golden river is 48213.\nQuestion: what was the pass key? Answer: The pass key for golden river is\n"
            talked = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=200)
            server.send_signal(signal.SIGTERM)
            logged = server.stderr.read()
            assert server.wait(WAIT) == 0, logged
        finally:
            server.kill()
    assert "48213" in talked.stdout.splitlines()[-1]
    assert "golden" not in logged
    assert '"call": "Generate", "code": "OK"' in logged
