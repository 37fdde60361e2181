"""A scheduler in trouble: callbacks that raise, Ctrl-C, bad requests and bad arguments."""

import contextlib
import signal
import threading

import jax
import jax.numpy as jnp
import pytest
from scheduling import alone, asked, assert_nothing_is_left, finish, make_engine, state_of

from kvjax import Engine, NotFinite, Request, Sampling, Scheduler
from kvjax.scheduler import scheduler as module

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def engine(speaker):
    return make_engine(speaker)


@pytest.fixture(autouse=True)
def _nothing_is_left(engine):
    yield
    assert_nothing_is_left(engine)


def test_a_callback_that_raises_loses_nothing(engine):
    """Neither a token nor a finished request: the next step goes on with both."""
    heard, failing = [], [True]

    def on_token(request, token, text):
        if failing[0]:
            raise ZeroDivisionError
        heard.append(token)

    scheduler = Scheduler(engine, slots=2, on_token=on_token)
    handle = scheduler.submit(asked("Call me", 1))
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    failing[0] = False
    other = scheduler.submit(asked("other", 3))
    assert finish(scheduler) == [handle, other]
    assert tuple(heard) == other.completion.token_ids


def test_on_prefill_may_raise_and_may_cancel(engine):
    done = []

    def on_prefill(tokens):
        done.append(tokens)
        if len(done) == 1:
            raise ZeroDivisionError
        if len(done) == 2:
            scheduler.cancel(handle)

    scheduler = Scheduler(engine, slots=2, on_prefill=on_prefill)
    first = scheduler.submit(asked("a" * 100, 3))
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert finish(scheduler) == [first]
    assert first.completion == alone(engine, first.request)
    handle = scheduler.submit(asked("b" * 200, 3))
    assert finish(scheduler) == []
    assert (done, handle.completion.finish_reason) == ([100, 128], "cancelled")


def test_no_token_comes_after_the_end_where_on_prefill_raised_in_that_step(engine):
    """A step with slices of a prefill reads tokens first. The next one must not launch what they ended."""

    def on_prefill(tokens):
        raise ZeroDivisionError

    def ids(**sampling):
        heard = []
        functions = {"on_prefill": on_prefill, "on_token": lambda request, token, text: heard.append((request.id, token))}
        scheduler = Scheduler(engine, slots=2, max_gap_ms=1e-3, texts=False, **functions)
        handle = scheduler.submit(Request("Call me", Sampling(max_new_tokens=12, temperature=1.0, **sampling), id="first"))
        scheduler.submit(asked("b" * 1000, 1))
        while not scheduler.idle:
            with contextlib.suppress(ZeroDivisionError):
                scheduler.step()
        assert [token for id, token in heard if id == "first"] == list(handle.completion.token_ids)
        return handle.completion.token_ids

    all_ids = ids(stop_token_ids=())
    ends = [place for place in range(1, 11) if all_ids[place] not in all_ids[:place]]
    assert ends
    for place in ends:
        assert ids(stop_token_ids=[all_ids[place]]) == all_ids[: place + 1]


@pytest.mark.parametrize("place", ["between chunks", "in a step"])
def test_ctrl_c_leaves_a_scheduler_that_goes_on(engine, place):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pressed = []

        def press(*_):
            if not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)

        listening = {"on_prefill": press} if place == "between chunks" else {}
        scheduler = Scheduler(engine, slots=2, **listening)
        handles = [scheduler.submit(asked("a" * 300, 1)), scheduler.submit(asked("b", 6))]
        if place == "in a step":
            scheduler._read = lambda real=scheduler._read: (real(), press())
        with pytest.raises(KeyboardInterrupt):
            finish(scheduler)
        assert finish(scheduler) == handles
    finally:
        signal.signal(signal.SIGINT, previous)
    for handle in handles:
        assert handle.completion == alone(engine, handle.request)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (asked((1,) * 4090, 30), "4,119 tokens is longer than the model's 4,096"),
        (asked((1, 500)), "token 500 is outside the vocabulary of 97"),
        (asked(()), "no tokens"),
        (asked(None), "got None"),
        (asked({1, 2}), "a prompt is text or a list of token ids, got {1, 2}"),
        (asked(iter([1, 2])), "a prompt is text or a list of token ids, got <list_iterator"),
        (asked("x", policy="no such policy"), "no such policy"),
        (asked("x", policy="mean:2"), "needs the index mean128"),
        (asked("x", policy=7), "7"),
        (asked([{"role": "user", "content": "x"}]), "chat template"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_by_its_completion(engine, request_, match):
    scheduler = Scheduler(engine, slots=2)
    wrong, right = scheduler.submit(request_), scheduler.submit(asked("x", 2))
    assert finish(scheduler) == [wrong, right]
    assert wrong.completion.finish_reason == "error"
    with pytest.raises(Exception, match=match):
        raise wrong.completion.error
    assert right.completion == alone(engine, right.request)


def test_a_tokenizer_that_raises_fails_its_request_alone(engine, monkeypatch):
    def tokenizer(text):
        if text == "bad":
            raise KeyError("a tokenizer of the caller's")
        return real(text)

    real = engine.model.tokenizer
    tokenizer.decode = real.decode
    monkeypatch.setattr(engine.model, "tokenizer", tokenizer)
    scheduler = Scheduler(engine, slots=2)
    bad, good = scheduler.submit(asked("bad")), scheduler.submit(asked("good", 2))
    assert finish(scheduler) == [bad, good]
    assert "a tokenizer of the caller's" in str(bad.completion.error)


def test_stop_strings_need_a_tokenizer(engine, monkeypatch):
    monkeypatch.setattr(engine.model, "tokenizer", None)
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(asked((1, 2, 3), 3, stop="x"))
    assert finish(scheduler) == [handle]
    assert "stop strings need a tokenizer" in str(handle.completion.error)


@pytest.mark.parametrize("n", [1, 3])
def test_logits_that_are_not_finite_fail_their_request_alone(engine, monkeypatch, n):
    """Here those after the prompt; test_not_finite has those of steps."""

    def sampled(logits, rows, position, counts):
        return real(jnp.where(position[0] == 3, jnp.nan, logits), rows, position, counts)

    real = module.sample_first
    monkeypatch.setattr(module, "sample_first", sampled)
    scheduler = Scheduler(engine, slots=2)
    wrong, right = scheduler.submit(asked("abc", 5, n=n)), scheduler.submit(asked("x", 2))
    assert finish(scheduler) == [wrong, right]
    assert isinstance(wrong.completion.error, NotFinite)
    assert right.completion == alone(engine, right.request)


def test_an_engines_error_ends_those_that_ran_and_is_raised(engine, monkeypatch):
    """Part of the plan may have run: going on would write tokens twice."""
    scheduler = Scheduler(engine, slots=2)
    handles = [scheduler.submit(asked(name, 5)) for name in ("first", "second", "third")]
    scheduler.step()
    real, calls = Engine.step, []

    def step(self, plan):
        result = real(self, plan)
        calls.append(plan)
        if len(calls) == 1:
            raise ZeroDivisionError
        return result

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert finish(scheduler) == handles
    assert [type(handle.completion.error) for handle in handles] == [ZeroDivisionError, ZeroDivisionError, type(None)]
    assert handles[2].completion == alone(engine, handles[2].request)


def test_requests_whose_sequences_were_freed_by_someone_else_end(engine):
    """With the error that the engine raises. Otherwise a caller that waits for completions would wait for ever."""
    scheduler = Scheduler(engine, slots=3)
    handles = [scheduler.submit(asked(name, 5)) for name in ("first", "second")]
    scheduler.step()
    engine.free(next(iter(engine.sequences)))
    with pytest.raises(ValueError, match="the sequence was freed"):
        finish(scheduler)
    assert scheduler.step() == handles
    assert all(isinstance(handle.completion.error, ValueError) for handle in handles)


def test_an_engines_error_ends_those_whose_only_token_is_on_its_way(engine, monkeypatch):
    scheduler = Scheduler(engine, slots=3)
    handles = [scheduler.submit(asked("first", 5)), scheduler.submit(asked("second", 1))]
    real = Engine.step

    def step(self, plan):
        if plan.decodes:
            raise ZeroDivisionError
        return real(self, plan)

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert scheduler.step() == handles
    assert [type(handle.completion.error) for handle in handles] == [ZeroDivisionError] * 2


def test_bad_arguments_say_what_would_be_right(engine, speaker):
    for gap in (0, -1, float("nan"), float("inf"), "50", True):
        with pytest.raises(ValueError, match=f"max_gap_ms must be a positive number of milliseconds, or None for no bound, got {gap!r}"):
            Scheduler(engine, max_gap_ms=gap)
    with pytest.raises(ValueError, match=r"5 slots are more than the largest batch bucket, 4: name one in Engine\(batch_buckets=...\)"):
        Scheduler(engine, slots=5)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        Scheduler(engine, slots=0)
    with pytest.raises(ValueError, match="needs the index mean128"):
        Scheduler(engine, policy="mean:2")
    for name in ("on_token", "on_prefill"):
        with pytest.raises(ValueError, match=f"{name} must be a function, or None, got 5"):
            Scheduler(engine, **{name: 5})
    with pytest.raises(TypeError, match=r"a scheduler runs on an engine, got TinyModel: Scheduler\(Engine\(model\)\)"):
        Scheduler(speaker)
    scheduler = Scheduler(engine)
    assert scheduler.slots == 4
    with pytest.raises(TypeError, match=r"submit takes a kvjax.Request, got str: Request\(prompt, Sampling\(...\)\)"):
        scheduler.submit("x")
    with pytest.raises(TypeError, match="cancel takes what submit returned, got Request"):
        scheduler.cancel(asked("x"))
    other = Scheduler(engine).submit(asked("x"))
    with pytest.raises(ValueError, match="was submitted to another scheduler: cancel it there"):
        scheduler.cancel(other)
    with pytest.raises(ValueError, match="priority must be a whole number, got 'high'"):
        Request("x", priority="high")
    with pytest.raises(ValueError, match=r"sampling must be a kvjax.Sampling, got 5: Request\(prompt, Sampling\(max_new_tokens=64\)\)"):
        Request("x", 5)


def test_one_thread_at_a_time(engine):
    scheduler, raised = Scheduler(engine), []

    def step():
        try:
            scheduler.step()
        except RuntimeError as error:
            raised.append(str(error))

    with engine.guard:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert raised
    assert "only one may use it at a time" in raised[0]


def test_a_step_does_not_wait_for_itself(engine):
    """Each step launches before it reads the one before: what it returns is a step behind."""
    scheduler = Scheduler(engine, slots=1)
    scheduler.submit(asked("x", 3))
    finish(scheduler)  # a first token does not wait while its programs are compiled
    handle = scheduler.submit(asked("x", 3))
    scheduler.step()
    (sample,) = state_of(scheduler, handle).samples
    assert (sample.issued, len(sample.ids)) == (2, 1)
    assert isinstance(scheduler._pending[0].packed, jax.Array)
    finish(scheduler)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_request_whose_sample_cannot_start_ends_and_the_others_go_on(engine, monkeypatch, samples):
    """As when device memory runs out: the step raises, the request has the error, and nothing of it is left."""
    choose, calls = module.sample_first, []

    def fails_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return choose(*args)

    monkeypatch.setattr(module, "sample_first", fails_second)
    scheduler = Scheduler(engine, slots=4)
    first = scheduler.submit(asked("Before", 1))
    second = scheduler.submit(Request("Call me", Sampling(max_new_tokens=4, n=samples)))
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(scheduler)
    finish(scheduler)
    assert first.completion.error is None
    assert str(second.completion.error) == "out of memory"
    assert scheduler.idle
