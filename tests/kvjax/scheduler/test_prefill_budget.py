"""How many slices of prefill a bounded gap admits."""

from kvjax.scheduler import prefill_budget


class Clock:
    """time.monotonic under the test's control."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(prefill_budget.time, "monotonic", lambda: self.now)


def test_a_gap_learns_how_many_slices_fit(monkeypatch):
    clock, bound = Clock(monkeypatch), prefill_budget.PrefillBudget(100.0)
    assert bound.slices() == 1
    bound.steps_read(0)
    for _ in range(4):
        clock.now += 0.010
        bound.steps_read(0)
    clock.now += 0.010 + 0.005
    bound.steps_read(1)
    assert bound.slices() == int((0.085 - 0.010) / 0.005)
    clock.now += 0.010 + 15 * 0.010
    bound.steps_read(15)
    assert bound.slices() == int((0.085 - 0.010) / 0.010), "a slower slice counts at once"
    clock.now += 0.010 + 7 * 0.005
    bound.steps_read(7)
    assert bound.slices() == int((0.085 - 0.010) / 0.0085), "a faster one by and by"
    bound.idle()
    clock.now += 1000
    bound.steps_read(3)
    assert bound.slices() == int((0.085 - 0.010) / 0.0085), "time in which nobody waits does not count"
    clock.now += 10
    bound.steps_read(1)
    assert bound.slices() == 1, "one slice at least"
