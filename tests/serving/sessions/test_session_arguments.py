"""Wrong arguments of sessions and clients: each public call raises at once, names the argument, and nothing has
happened.

Every parameter of every public method is tried: a new one needs an entry in `WRONG`.
"""

import array
import asyncio
import contextlib
import gc
import inspect
import math
import tracemalloc

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_servers import WAIT, serving, until
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime
from kvjax.client import AsyncClient, AsyncSession, Client, Session
from kvjax.client.errors import Cancelled, DeadlineExceeded, InvalidArgument, ResourceExhausted, SessionNotFound
from kvjax.client.wire import protocol
from kvjax.serving.sessions.generation import Generation
from kvjax.serving.sessions.runtime import Session as InProcess

NONE = {"stop_token_ids": ()}
TIMES = ("x", "5", True, -1, math.nan, [1], b"1", 10**400, {})
IDS = (
    "12",
    b"12",
    "",
    b"",
    {1: 2},
    {},
    {3, 4},
    set(),
    5,
    1.5,
    True,
    object(),
    ["x"],
    [1.0],
    [None],
    [True, 2],
    [-1],
    [2**32],
    [2**70],
    [[1]],
)
IDS += ([[1, 2]], np.zeros((2, 2), np.int32), np.array([1.5]), np.array(3))
IDS += ([3, np.ma.masked], [np.ma.array(3, mask=True)], [3, np.ma.array([4], mask=[True])[0]])
TEXTS = (["x"], 5, b"x", None, {}, ("x",), "\ud800", object())
WRONG = {
    "timeout": TIMES,
    "timeout_s": TIMES,
    "drain_s": TIMES,
    "tokens": (*IDS, None),
    "token_ids": (*IDS, None),
    "at": (-2, 1.5, "3", True, [1]),
    "keep": (-1, 1.5, "3", True, [1]),
    "kept": (0, 1, "no", None, []),
    "policy": (5, b"top:2", True, ["top:2"], {}, "", object()),
    "session_id": TEXTS,
    "retries": (-1, 1.5, "3", True, None),
    "address": (5, None, b"x", "", ["x"]),
    "token": (5, b"x", True, "x\n", "Ü", ["x"]),
    "root_certificate": (5, "x", True),
    "heard": (5, "x", True, {}),
    "active": (5, "x", True, {}),
}
SAMPLING = {
    "max_new_tokens": ("x", True, None, 1.5, -1, [1], math.nan, 2**70),
    "temperature": ("x", True, None, math.nan, [1]),
    "seed": ("x", True, None, 1.5, [1], 2**70),
    "ignore_eos": ("false", 0, 1, None, []),
    "stop_token_ids": IDS,
    "n": (2,),
    "nothing": (1,),
}
OTHERS = {
    "self",
    "sampling",
    "options",
    "throttle",
    "client",
    "session",
    "length",
    "_",
    "name",
    "request",
    "run",
    "conclude",
    "most",
}
"""Not for callers to get wrong: what a method itself gives, and functions that the library's own code passes."""


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), "dense", pages=24, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@pytest.fixture(scope="module")
def runtime(engine):
    with SessionRuntime(engine, slots=4) as made:
        yield made
    assert engine.allocators["full"].free == 24


@pytest.fixture
def session(runtime):
    with runtime.create([1, 2, 3]) as made:
        yield made


@pytest.fixture(scope="module")
def server(runtime):
    """Of another engine: a runtime owns its own."""
    other = Engine(make_model(), "dense", pages=24, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    with serving(other) as running:
        yield running


def public(kind):
    """The public methods of a class and their parameters, without those in `OTHERS`."""
    methods = {name: method for name, method in vars(kind).items() if callable(method) and not name.startswith("_")}
    return {name: [each for each in inspect.signature(method).parameters if each not in OTHERS] for name, method in methods.items()}


def faults(call, name, values):
    """The values of an argument with which a call does not raise what it should."""
    found = []
    for value in values:
        try:
            call(**{name: value})
        except InvalidArgument as error:
            # Of a method's own words for an argument, "tokens" are also "token ids".
            if not error.field or len(str(error)) < 15:
                found.append((name, value, f"no field, or no remedy: {error}"))
        except BaseException as error:
            found.append((name, value, repr(error)[:200]))
        else:
            found.append((name, value, "was taken"))
    return found


REQUIRED = {"append": {"tokens": [4], "token_ids": [4]}, "session": {"session_id": "0" * 32}, "room_after": {"tokens": 3, "most": 5}}


def tried(what, kind, leave=()):
    """Call each public method of an object with each wrong value of each parameter."""
    found = []
    for name, parameters in public(kind).items():
        method = getattr(what, name)
        for each in parameters:
            if (name, each) in leave:
                continue
            values = [value for value in WRONG[each] if not (each == "policy" and value == "" and kind is SessionRuntime)]
            base = {key: value for key, value in REQUIRED.get(name, {}).items() if key in parameters and key != each}
            found += faults(lambda method=method, base=base, **wrong: method(**base, **wrong), each, values)
    return found


def test_in_process_nothing_wrong_is_taken(runtime, session):
    before, sessions = session.info(), runtime.gauges()["sessions"]
    found = tried(runtime, SessionRuntime, leave={("room_after", "tokens"), ("warmup", "tokens")}) + tried(session, InProcess)
    for name, values in SAMPLING.items():
        found += faults(session.generate, name, values)
    assert not found
    assert session.info() == before
    assert runtime.gauges()["sessions"] == sessions
    assert runtime.gauges()["waiting"] == 0
    stream = session.generate(max_new_tokens=3, **NONE)
    assert not tried(stream, Generation)
    assert len(list(stream)) == 3
    assert session.append([1], timeout=math.inf) == before.history_tokens + 4


def test_clients_send_nothing_wrong(server):
    address = f"127.0.0.1:{server.port}"
    with Client(address, timeout_s=WAIT) as client, client.create_session([1, 2, 3]) as session:
        sent, call, stream = [], client.call, client.stream
        client.call = lambda name, request: (sent.append(name), call(name, request))[1]
        client.stream = lambda request, timeout: (sent.append("Generate"), stream(request, timeout))[1]
        found = tried(client, Client, leave={("call", "timeout"), ("stream", "timeout")}) + tried(session, Session)
        for name, values in SAMPLING.items():
            found += faults(session.generate, name, values)
        for name in ("address", "token", "root_certificate", "timeout_s", "retries"):
            found += faults(Client, name, WRONG[name])
        assert (found, sent) == ([], [])
        assert session.info().history_tokens == 3
        for good in (np.array([4, 5]), array.array("i", [4, 5]), (4, 5), range(4, 6), iter([np.int64(4), 5])):
            assert session.append(good) == session.length
        assert session.info().history_tokens == 13
        masked = np.ma.array([4, 5], mask=[False, True])
        assert not [each for each in faults(session.append, "token_ids", [masked]) if "was taken" in each]
        assert len(list(session.generate(max_new_tokens=2, timeout=1e300, **NONE))) == 2
        assert not faults(session.generate, "temperature", [10**400])  # no message holds it


def test_the_asynchronous_client_sends_nothing_wrong(server):
    async def talk():
        async with AsyncClient(f"127.0.0.1:{server.port}", timeout_s=WAIT) as client, await client.create_session([1, 2, 3]) as session:
            sent, call = [], client.call

            async def counted(name, request):
                sent.append(name)
                return await call(name, request)

            client.call = counted
            found = []
            for name, values in (WRONG | SAMPLING).items():
                if name in ("timeout", "heard") or name in SAMPLING:
                    found += faults(session.generate, name, values)  # at once, and not when the iteration begins
            for method, names in (
                (client.create_session, ("token_ids", "policy")),
                (client.session, ("session_id",)),
                (session.append, ("token_ids",)),
            ):
                for name in names:
                    for value in WRONG[name]:
                        try:
                            await method(**{name: value})
                            found.append((name, value))
                        except InvalidArgument:
                            pass
            for name in ("address", "token", "root_certificate", "timeout_s", "retries"):
                found += faults(AsyncClient, name, WRONG[name])
            assert (found, sent) == ([], [])
            assert {each for kind in (AsyncClient, AsyncSession) for names in public(kind).values() for each in names} <= set(WRONG)
            return (await session.info()).history_tokens

    assert asyncio.run(talk()) == 3


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())), max_size=4),
    st.dictionaries(st.text(), st.integers(), max_size=2), st.sets(st.integers(), max_size=2),
)  # fmt: skip


def any_values(count):
    """Calls with any values: they raise InvalidArgument, or do what is asked for; none waits for ever or kills the
    runtime."""
    return lambda check: settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])(
        given(tokens=JUNK, at=JUNK, timeout=JUNK, session_id=JUNK)(check)
    )


def attempt(runtime, tokens, at, timeout, session_id):
    with runtime.create([1, 2, 3]) as session:
        before = session.info().history_tokens
        for call in (
            lambda: session.append(tokens, at=at, timeout=timeout),
            lambda: runtime.session(session_id).append([1], timeout=5),
            lambda: runtime.create(tokens, timeout=timeout).close(),
            lambda: session.info(timeout=timeout),
            lambda: session.fork(timeout=timeout).close(),
        ):
            with contextlib.suppress(InvalidArgument, SessionNotFound, DeadlineExceeded, ResourceExhausted):
                call()
        after = session.info().history_tokens
        right = isinstance(tokens, list) and all(type(each) is int and 0 <= each < VOCAB for each in tokens)
        assert after == before or right


test_any_value_raises_or_is_right = any_values(100)(attempt)
test_any_of_many_values_raises_or_is_right = pytest.mark.long(any_values(5000)(attempt))


def test_a_call_that_cannot_be_queued_tells_its_caller(runtime, session, monkeypatch):
    """Whatever is wrong in the runtime's thread, no caller waits for ever."""
    monkeypatch.setattr(runtime._core, "in_turn", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.append([1])


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted, ZeroDivisionError])
def test_a_call_that_is_interrupted_while_it_waits_is_never_done(runtime, kind):
    """As it is with a timeout."""

    def interrupted():
        raise kind

    with runtime.create([1, 2, 3]) as session:
        held = session.generate(max_new_tokens=2, **NONE)  # nobody takes its end, so others wait
        until(lambda: len(held._run.tokens) == 2)
        sessions = runtime.gauges()["sessions"]
        for call in (lambda: session.append([9], active=interrupted), lambda: session.fork(active=interrupted)):
            with pytest.raises(kind):
                call()
        assert len(list(held)) == 2
        assert session.info().history_tokens == 5
        assert runtime.gauges()["sessions"] == sessions


def test_a_runtime_with_wrong_options_leaves_its_folder_free(engine, tmp_path):
    idle = Engine(engine.model, "dense", pages=24, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    for name, values in {
        "capacity": ("x", 0, True), "slots": ("x", 0, 9), "max_gap_ms": ("x", 0, math.nan), "idle_ttl_s": ("x", None, -1, math.nan),
        "demote_after_s": ("x", -1), "host_bytes": ("x", -1, 1.5), "window": ("x", 3), "observe": (5,), "clock": (5, None),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises((ValueError, TypeError), match=r"got|slots|window|clock"):
                SessionRuntime(idle, state=tmp_path, **{name: value})
    with SessionRuntime(idle, state=tmp_path) as made:
        assert made.gauges()["sessions"] == 0


def test_a_call_that_waits_holds_a_few_bytes_for_each_token(server):
    """Its tokens lie in two arrays, and not in lists, where 256 calls of a million would take 20 GB."""
    types, count = protocol(), 100_000
    request = types.AppendTokensRequest(token_ids=[9] * count)
    with server.runtime.create([1, 2, 3]) as session, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        held = session.generate(max_new_tokens=2, **NONE)  # nobody takes its end, so others wait
        until(lambda: len(held._run.tokens) == 2)
        request.session_id, call = session.id, channel.unary_unary(types.methods["AppendTokens"].path)
        content = request.SerializeToString()
        tracemalloc.start()
        try:
            calls = [call.future(content) for _ in range(5)]
            until(lambda: server.runtime.gauges()["waiting"] == 5)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 12 * 5 * count
        finally:
            tracemalloc.stop()
            for each in calls:
                each.cancel()
        held.cancel()


def test_a_call_whose_client_has_gone_is_given_up(server):
    """It waits for a generation of its session. Its thread is free soon, and its tokens do not join the history."""
    types = protocol()
    with server.runtime.create([1, 2, 3]) as session, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        held = session.generate(max_new_tokens=2, **NONE)  # nobody takes its end, so others wait
        until(lambda: len(held._run.tokens) == 2)
        calls = []
        for name, request in (
            ("AppendTokens", types.AppendTokensRequest(session_id=session.id, token_ids=[9])),
            ("ForkSession", types.ForkSessionRequest(session_id=session.id)),
        ):
            calls.append(channel.unary_unary(types.methods[name].path).future(request.SerializeToString()))
        until(lambda: server.runtime.gauges()["waiting"] == 2)
        for each in calls:
            each.cancel()
        counted = server.metrics.registry.get_sample_value
        until(lambda: all(counted("rpc_total", {"method": name, "code": "CANCELLED"}) for name in ("AppendTokens", "ForkSession")))
        assert len(list(held)) == 2
        assert session.info().history_tokens == 5
        assert server.runtime.gauges()["sessions"] == 1
        blocker = session.generate(max_new_tokens=2, **NONE)
        with pytest.raises(Cancelled, match="the caller has gone"):
            session.append([9], active=lambda: False)
        blocker.cancel()
