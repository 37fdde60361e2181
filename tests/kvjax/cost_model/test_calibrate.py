"""A calibration recovers what steps cost, and keeps to its time."""

import time

import jax
import pytest

from kvjax import Engine
from kvjax.cost_model import auto, calibrate, step_bytes
from kvjax.cost_model.predict import sizes_of
from kvjax.engine.sampling import Sampled
from kvjax.policies.decode import parse

PAGE = 16


class Clock:
    """Time that passes only when a step is run, as planted parameters say."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(model, monkeypatch):
    clock, decode = Clock(), {"calls": []}

    def step(engine, slots, tokens, rows, policy):
        length = slots[0].length + 1
        clock.now += 2e-3 + step_bytes(model.config, parse(policy), length, len(slots), dtype="float32", page_size=PAGE).total / 1e9
        clock.now += 0.0 if policy == "dense" else 5e-3
        decode["calls"].append((policy, slots[0].length, len(slots)))
        for slot in slots:
            slot.length += 1
        return Sampled(tokens, jax.numpy.zeros(len(slots)), jax.numpy.ones(len(slots), bool))

    monkeypatch.setattr(auto, "time", clock)
    monkeypatch.setattr(Engine, "decode_and_sample", step)
    monkeypatch.setattr(auto, "MAX_LENGTH", 2048)
    clock.calls = decode["calls"]
    return clock


def test_calibration_recovers_what_the_steps_cost(model, clock):
    found = calibrate(model, ["quest:8", "dense"], page_size=PAGE)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.02)  # a step of the round reads a few tokens less than its last
    assert found.c0 == pytest.approx(2e-3, rel=0.05)
    assert dict(found.c1)["quest:8"].fixed == pytest.approx(5e-3, rel=0.02)
    assert (found.measured, found.device) == (((1, 256, 2048), (4, 256, 2048)), jax.local_devices()[0].device_kind)
    assert max(length for _, length, _ in clock.calls) == 2047


def test_calibration_keeps_to_its_time(model, clock):
    found = calibrate(model, ["quest:8"], page_size=PAGE, seconds=1e-3)
    assert found.measured == ((1, 256, 2048),)
    assert len(clock.calls) == 2 * 2 * 4 * auto.STEPS, "one round to compile, one to time, two policies, four lengths"


def test_calibration_that_cannot_be(model, monkeypatch):
    with pytest.raises(ValueError, match="at least one policy besides dense"):
        calibrate(model, [])
    monkeypatch.setattr(auto, "MAX_LENGTH", PAGE)
    with pytest.raises(ValueError, match=r"room for 1 sequences of at least two pages of 16 tokens.*smaller page_size"):
        calibrate(model, ["quest:8"], page_size=PAGE)


def test_a_real_calibration_runs_the_engines_steps(model_factory, monkeypatch):
    """On a busy machine the times may make no sense; the steps must run, and a cost model or a clear refusal come
    out."""
    small = model_factory(num_layers=1, rope_theta=555.0)
    monkeypatch.setattr(auto, "MAX_LENGTH", 512)
    started = time.perf_counter()
    try:
        found = calibrate(small, ["quest:8"], page_size=64, batches=(1,), seconds=1.0)
        assert found.sizes == sizes_of(small.config)
    except ValueError as error:
        if "no longer with more bytes" not in str(error):
            raise
    assert time.perf_counter() - started < 60
