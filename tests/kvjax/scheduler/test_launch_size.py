"""How many steps "auto" launches, by times that a test makes up."""

import itertools

import pytest

from kvjax.scheduler import launch_size
from kvjax.scheduler.launch_size import LONG_ANSWER, LONG_PROMPT, SEVERAL, SIGNS, LaunchSize


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `clock[0]` is changed."""
    now = [0.0]
    monkeypatch.setattr(launch_size.time, "perf_counter", lambda: now[0])
    return now


def decode(size, clock, host, device, launches=40):
    """The steps of every launch, where the host needs so long to launch one and the device to run a step."""
    seen = []
    for _ in range(launches):
        busy = device(len(seen)) * size.steps if callable(device) else device * size.steps
        clock[0] += max(host, busy)
        seen.append(size.steps)
        size.read(size.steps, max(0.0, busy - host))
    return seen


def test_several_steps_where_the_device_waits_for_the_host(clock):
    seen = decode(LaunchSize("auto"), clock, host=3.8, device=2.4)
    assert seen == [1] * (SIGNS + 1) + [SEVERAL] * (40 - SIGNS - 1)


def test_one_step_where_the_device_is_the_slower_part(clock):
    assert set(decode(LaunchSize("auto"), clock, host=3.0, device=5.3)) == {1}


def test_a_device_that_becomes_slower_gets_one_step_again(clock):
    """As where the sequences become longer."""
    size = LaunchSize("auto")
    seen = decode(size, clock, host=3.0, device=lambda number: 2.0 if number < 20 else 4.0, launches=60)
    assert [steps for steps, _ in itertools.groupby(seen)] == [1, SEVERAL, 1]


def test_a_single_late_step_changes_nothing(clock):
    size = LaunchSize("auto")
    assert set(decode(size, clock, host=3.0, device=lambda number: 1.0 if number % SIGNS == 1 else 5.0)) == {1}


def test_time_between_decode_steps_is_not_counted(clock):
    """A chunk of prefill, say, for which nobody waited."""
    size = LaunchSize("auto")
    for _ in range(20):
        decode(size, clock, host=3.0, device=5.0, launches=1)
        size.interrupted()
        clock[0] += 100
    assert size.steps == 1


def test_a_host_that_computes_the_steps_itself_launches_one(clock):
    size = LaunchSize("auto", single=True)
    assert set(decode(size, clock, host=3.8, device=2.4)) == {1}
    assert (size.most, size.sizes(LONG_PROMPT, LONG_ANSWER)) == (1, (1,))
    assert LaunchSize(8, single=True).most == 8


@pytest.mark.parametrize(
    ("steps", "prefilled", "tokens", "sizes"),
    [
        ("auto", LONG_PROMPT, LONG_ANSWER, (1, SEVERAL)),
        ("auto", LONG_PROMPT - 1, LONG_ANSWER, (1,)),
        ("auto", LONG_PROMPT, LONG_ANSWER - 1, (1,)),
        (1, LONG_PROMPT, LONG_ANSWER, (1,)),
        (8, 0, 2, (8, 1)),
    ],
)
def test_programs_that_are_compiled_ahead(steps, prefilled, tokens, sizes):
    """Several steps by "auto" only for a long prompt and a long answer."""
    assert LaunchSize(steps).sizes(prefilled, tokens) == sizes


@pytest.mark.parametrize("steps", [1, 8, 16])
def test_a_number_stays(steps, clock):
    size = LaunchSize(steps)
    assert set(decode(size, clock, host=3.0, device=2.0)) == {steps}
    assert size.most == steps


@pytest.mark.parametrize("steps", [0, 17, 2.5, True, "many", "8"])
def test_what_is_no_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match="steps_per_launch must be"):
        LaunchSize(steps)
