"""How tokens are gathered into messages: never more than so many a second, and nothing waits that should not."""

import heapq
import itertools
import threading
import time

import grpc
import numpy as np
import pytest
from tiny_models import VOCAB, make_model

from kvjax import Engine
from kvjax.client import Client
from kvjax.client.errors import Cancelled, ResourceExhausted, SessionError
from kvjax.client.wire import protocol
from kvjax.engine.sampling import Sampling
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions.generation import SPREAD_S, Generation, Run
from kvjax.serving.sessions.runtime import SessionRuntime
from kvjax.serving.sessions.throttle import Throttle

RATE = 400.0
TEXT = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()
FAR = 1e-3
"""A rate whose second message is due in 1,000 s: what comes sooner did not wait for it."""
SOON = 10.0
"""Seconds. Far more than a thread's wake-up takes on a busy machine, and far less than 1,000."""


def messages_of(throttle_type, streams, step, seconds=2.0):
    """Times at which each stream sends, if a token of each comes every `step` seconds and sending takes no time."""
    now = [0.0]
    throttle = throttle_type(RATE, clock=lambda: now[0])
    sent = [[] for _ in range(streams)]
    events = [(step, number) for number in range(streams)]
    while events:
        now[0], number = heapq.heappop(events)
        if now[0] > seconds:
            break
        sent[number].append(now[0])
        following = (int(now[0] / step + 1e-6) + 1) * step  # when the next token comes
        heapq.heappush(events, (max(throttle.reserve(), following), number))
    return sent


def delay_beside_short_ones(throttle_type):
    """How long a message waits after 5 s in which 1,000 generations a second began, each of which ended before its
    second message."""
    now = [0.0]
    throttle = throttle_type(RATE, clock=lambda: now[0])
    for number in range(5000):
        now[0] = number / 1000
        throttle.reserve()
        if number >= 18:
            throttle.release()
    return throttle.reserve() - now[0]


def check_turns(throttle_type):
    (alone,) = messages_of(throttle_type, 1, 0.009)
    assert np.allclose(np.diff(alone), 0.009)  # every token at once
    for few in messages_of(throttle_type, 3, 0.009):
        assert np.allclose(np.diff(few), 0.009)
    many = messages_of(throttle_type, 64, 0.009)
    total = sorted(itertools.chain(*many))[64:]  # after the first of each
    assert len(total) <= RATE * 2.0 + 1
    for each in many:
        assert np.max(np.diff(each[1:])) < 64 / RATE + 0.02  # in turn
        assert np.min(np.diff(each[1:])) > 64 / RATE - 0.02
    assert delay_beside_short_ones(throttle_type) < 0.1


def test_streams_take_turns():
    check_turns(Throttle)


class WithoutTurns(Throttle):
    def reserve(self):
        return self._clock()


class WithoutReturns(Throttle):
    def release(self):
        pass


class EachItsOwn(Throttle):
    """Every stream waits as if it had others beside it."""

    def reserve(self):
        return self._clock() + 64 * self._gap


@pytest.mark.parametrize("mutant", [WithoutTurns, WithoutReturns, EachItsOwn])
def test_turns_that_are_wrong_are_noticed(mutant):
    with pytest.raises(AssertionError):
        check_turns(mutant)


def generation():
    run = Run("a", Sampling(), None)

    def conclude(run, keep, wait):
        run.end("cancelled", Cancelled("the generation was cancelled"))
        return keep

    return run, Generation(run, conclude)


def in_thread(work):
    """A thread that runs `work`, and a list of its result and when it came."""
    found = []

    def call():
        try:
            result = work()
        except SessionError as error:
            result = error
        found.append((result, time.monotonic()))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
def test_the_first_token_and_the_end_do_not_wait(end):
    run, stream = generation()
    throttle = Throttle(FAR)
    throttle.reserve()  # somebody else's
    thread, found = in_thread(lambda: stream.ready(throttle))
    run.add(7)
    thread.join(SOON)
    assert found[0][0] == [7]
    thread, found = in_thread(lambda: stream.ready(throttle))
    for token in range(5):
        run.add(token)
    thread.join(0.05)
    assert not found
    assert run.wakes.empty()  # tokens that are not due wake nobody
    if end == "stopped":
        stream.stop()
    else:
        run.end(*(("length",) if end == "finished" else ("error", ResourceExhausted("no pages"))))
    thread.join(SOON)
    assert found[0][0] == [0, 1, 2, 3, 4]  # what had come before
    if end == "finished":
        assert stream.ready(throttle) == []
        assert (stream.finish_reason, stream.history_tokens) == ("length", 6)
    else:
        with pytest.raises(ResourceExhausted if end == "failed" else Cancelled):
            stream.ready(throttle)


def test_a_token_that_comes_just_after_the_look_wakes():
    run = Run("a", Sampling(), None)

    class ComesAfter(list):
        came = False

        def __len__(self):
            found = super().__len__()
            if not self.came:
                self.came = True
                run.add(7)
            return found

    run.tokens = ComesAfter()
    assert run.wait(0, timeout=SOON)
    assert run.tokens == [7]
    assert not run.awaited


def test_a_message_that_is_due_has_all_tokens_and_one_that_is_late_the_next():
    run, stream = generation()
    throttle = Throttle(20.0)
    run.add(0)
    assert stream.ready(throttle) == [0]
    throttle.reserve()  # of another stream; the next one is due 50 ms later
    run.add(1)
    run.add(2)
    started = time.monotonic()
    assert stream.ready(throttle) == [1, 2]
    assert 0.02 < time.monotonic() - started < SOON
    thread, found = in_thread(lambda: stream.ready(throttle))
    time.sleep(0.12)  # due, and no token is there
    run.add(3)
    thread.join(SOON)
    assert found[0][0] == [3]


def test_messages_of_several_tokens_over_the_wire():
    """Nothing is due while they generate, so each stream has a first message, one with all other tokens, and its end.
    One reader takes nothing of what is sent to it meanwhile."""
    engine = Engine(make_model(), "dense", pages=48, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, capacity=8, observe=metrics.observe)
    expected = [list(runtime.create(TEXT[:each]).generate(max_new_tokens=30, temperature=1.0, seed=each)) for each in (20, 30, 40)]
    server = Server(runtime, metrics, ServerOptions(port=0, messages_per_second=FAR))
    server.start()
    method, types = protocol().methods["Generate"], protocol()
    try:
        with Client(f"127.0.0.1:{server.port}") as client, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_stream(
                method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
            )
            slow = call(types.GenerateRequest(session_id=client.create_session(TEXT).id, sampling=types.Sampling(max_new_tokens=100)))
            sizes = [[] for _ in expected]
            streams = [client.create_session(TEXT[:each]) for each in (20, 30, 40)]

            def listen(session, seed, sizes):
                sampling = types.Sampling(max_new_tokens=30, temperature=1.0, seed=seed)
                tokens = []
                for message in call(types.GenerateRequest(session_id=session.id, sampling=sampling), timeout=60.0):
                    tokens += message.tokens.token_ids
                    sizes.append(len(message.tokens.token_ids))
                return tokens

            told = [in_thread(lambda args=args: listen(*args)) for args in zip(streams, (20, 30, 40), sizes, strict=True)]
            for thread, _ in told:
                thread.join(60.0)
            assert [found[0][0] for _, found in told] == expected
            assert all(each[-1] == 0 and sum(each) == 30 for each in sizes)
            *others, most = sorted(map(len, sizes))
            assert max(others) <= 3
            assert most <= 4  # on a busy machine one of them has the first turn, before the one whose reader takes nothing
            slow.cancel()
    finally:
        server.stop(drain_s=0.0)
    assert not engine.sequences


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_that_makes_no_sense_is_refused(rate):
    with pytest.raises(ValueError, match="messages per second must be above 0, got"):
        Throttle(rate)


@pytest.mark.parametrize("rate", [1e-11, 1e-320])
def test_a_rate_without_a_second_message_in_a_lifetime_is_one_message_and_the_end(rate):
    run, stream = generation()
    throttle = Throttle(rate)
    throttle.reserve()
    run.add(7)
    assert stream.ready(throttle) == [7]
    thread, found = in_thread(lambda: stream.ready(throttle))
    run.add(8)
    thread.join(0.05)
    assert not found
    run.end("length")
    thread.join(SOON)
    assert found[0][0] == [8]


def test_tokens_of_one_launch_are_sent_one_by_one():
    """And all that are left at the end."""
    run, stream = generation()
    throttle = Throttle(1e6)
    run.add(0)
    assert stream.ready(throttle) == [0]
    run.add(1, 2, 3, 4)
    run.spread = 1, time.monotonic(), 60.0
    assert stream.ready(throttle) == [1]
    thread, found = in_thread(lambda: stream.ready(throttle))
    thread.join(0.05)
    assert not found
    run.end("length")
    thread.join(SOON)
    assert found[0][0] == [2, 3, 4]
    assert stream.ready(throttle) == []


def test_tokens_that_are_late_go_together():
    run, stream = generation()
    run.add(0)
    assert stream.ready(Throttle(1e6)) == [0]
    run.add(1, 2, 3)
    run.spread = 1, time.monotonic() - 1.5, 1.0
    assert stream.ready(Throttle(1e6)) == [1, 2]


@pytest.mark.parametrize(("before", "spread"), [(0.04, (0.04, 4 * SPREAD_S)), (60.0, (4 * SPREAD_S, 4 * SPREAD_S))])
def test_they_are_spread_over_the_time_of_their_launch(before, spread):
    """But a launch that waited for the prompts of others holds none of them back for long."""
    run, _ = generation()
    run.add(0)
    run.latest -= before
    run.add(1, 2, 3, 4)
    first, began, gap = run.spread
    assert first == 1
    assert spread[0] <= 4 * gap + 1e-9 <= spread[1] + 2e-9
    assert [run.due(taken) for taken in (1, 3)] == [0.0, began + 2 * gap]
