"""What a user gets without options, timed on a tiny shape: settings run as they are named, and rows say so."""

import pytest

from benchmarks import default_speed
from benchmarks.tables import job_cells, token_cells
from kvjax.serving.bench.decode import config_of

SHAPE = "tiny"


@pytest.fixture
def asked(monkeypatch):
    """The options of each run, and how many tokens it gave."""
    seen, real = [], default_speed.run_requests

    def run(engine, requests, **options):
        for request, completion in real(engine, requests, **options):
            seen.append((request.policy, options.get("steps_per_launch"), len(completion.token_ids), completion.found_tokens))
            yield request, completion

    monkeypatch.setattr(default_speed, "run_requests", run)
    return seen


def test_tokens_are_timed_by_each_setting_after_a_request_that_warms_up(asked):
    sizes = {"length": 512, "policies": ("dense", "top:1"), "launches": ("auto", 4), "slots": 1, "answer": 40, "rounds": 2}
    config = config_of(SHAPE, 1, "float32")
    rows = list(default_speed.token_rows(SHAPE, config, **sizes, weights=None, cache_format=None))
    one_round = [(policy, steps, 40) for policy in ("dense", "top:1") for steps in (None, 4)]
    assert [each[:3] for each in asked] == 3 * one_round
    assert [found > 0 for *_, found in asked] == [False, True] * 2 + [True] * 8, "a prompt is computed once"
    assert [(row["policy"], row["steps_per_launch"]) for row in rows] == [(policy, steps or "auto") for policy, steps, _ in one_round]
    assert all(0 < row["least_s"] <= row["median_s"] <= row["most_s"] for row in rows)
    assert token_cells(rows[0])[4:6] == ("`dense`", "default")


def test_a_job_is_run_twice_with_other_prompts(asked):
    sizes = {"requests": 2, "prompt": 100, "answer": 4, "policy": "dense", "weights": None, "cache_format": None}
    row = default_speed.job_row(SHAPE, config_of(SHAPE, 1, "float32"), **sizes)
    assert [each[1:] for each in asked] == 4 * [(None, 4, 0)]
    assert row["cold_s"] > 0 < row["warm_s"]
    assert job_cells(row)[1] == "2 of 100 + 4"
