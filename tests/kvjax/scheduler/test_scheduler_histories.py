"""Random histories of a scheduler: whatever was submitted, cancelled and suspended, every request ends as it does
alone.

A history submits random requests at random times to one scheduler with few pages, and cancels some. Each completion is
compared with that of the same request alone; a cancelled one with the beginning of it.
"""

import numpy as np
import pytest
from scheduling import MASSES, alone
from tiny_models import make_family

from kvjax import Engine, Request, Sampling, Scheduler

pytestmark = pytest.mark.bits

SAMPLINGS = (
    {},
    {"temperature": 1.0},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "presence_penalty": 1.0, "top_logprobs": 2},
    {"temperature": 1.5, "n": 3},
    {"frequency_penalty": 0.8, "n": 2},
)


FEW = (SAMPLINGS[3], SAMPLINGS[4])
"""Few programs, which take longer to compile than to run: all draw, some with penalties, some several samples."""
FEWEST = ({"temperature": 1.0, "presence_penalty": 1.0, "top_logprobs": 2, "n": 2},)
"""Half of these: all of it at once."""


def policies_of(model):
    """Of the requests: one that learns from prefill too, which models with recurrent layers refuse."""
    return (None, "quest:1", *(() if model.config.family == "qwen3_5_text" else (MASSES,)))


def engine_of(model, pages, **options):
    return Engine(model, policies=policies_of(model)[1:], pages=pages, page_size=16, prefill_chunk=32, batch_buckets=(4,), **options)


def draw_request(random, model, samplings, policies, stops=False):
    """stops: some requests have stop tokens."""
    tokens = random.integers(0, model.config.vocab_size, random.integers(1, 60)).tolist()
    fields = samplings[random.integers(len(samplings))]
    most, seed = int(random.integers(1, 80)), int(random.integers(100))
    ids = tuple(random.integers(0, model.config.vocab_size, random.integers(6)).tolist()) if stops else ()
    sampling = Sampling(most, seed=seed, stop_token_ids=ids, logprobs=True, **fields)
    return Request(tuple(tokens), sampling, policy=policies[random.integers(len(policies))], priority=int(random.integers(-1, 2)))


def begins(found, whole):
    """Whether a cancelled completion is the beginning of the whole one."""
    pairs = zip(found.choices, whole.choices, strict=False) if whole.choices else [(found, whole)]
    return all(
        few.token_ids == many.token_ids[: len(few.token_ids)] and (few.logprobs or ()) == many.logprobs[: len(few.token_ids)]
        for few, many in pairs
    )


def history(engine, reference, seed, samplings, policies, launches=()) -> dict[str, int]:
    """launches: steps per launch, one of which is drawn; (): 1."""
    random = np.random.default_rng(seed)
    gap = (None, 1e-6, 5.0)[random.integers(3)]
    steps = int(random.choice(launches)) if launches else 1
    scheduler = Scheduler(engine, slots=int(random.integers(2, 5)), max_gap_ms=gap, steps_per_launch=steps)
    ballast = engine.new_sequence()
    engine.reserve([ballast], int(random.integers(engine.allocators["full"].total - 16, engine.allocators["full"].total - 10)) * 16)
    handles, cancelled = [], 0
    wanted = int(random.integers(3, 9))
    for _ in range(3000):
        if scheduler.idle and len(handles) == wanted:
            break
        if len(handles) < wanted and random.random() < 0.6:
            handles.append(scheduler.submit(draw_request(random, engine.model, samplings, policies, stops=bool(launches))))
        if handles and random.random() < 0.01:
            handle = handles[random.integers(len(handles))]
            cancelled += handle.completion is None
            scheduler.cancel(handle)
        scheduler.step()
    assert scheduler.idle, f"history {seed} does not end: {scheduler}"
    engine.free(ballast)
    assert (engine.sequences, engine._runs) == (set(), {})
    assert all(each.free == each.total for each in engine.allocators.values())
    differences = 0
    for handle in handles:
        whole = alone(reference, handle.request)
        found = handle.completion
        differences += not (begins(found, whole) if found.finish_reason == "cancelled" else found == whole)
    stopped = sum(handle.completion.finish_reason == "stop" for handle in handles)
    counts = {"histories": 1, "requests": len(handles), "cancelled": cancelled, "preemptions": scheduler.preemptions, "stopped": stopped}
    return counts | {"differences": differences}


def run_histories(model, seeds, samplings=SAMPLINGS, policies=None, launches=(), **options) -> dict[str, int]:
    """policies: of the requests; None: `policies_of`. launches: as of `history`. options: of the engine."""
    engine, reference = engine_of(model, 24, **options), engine_of(model, 24, **options)
    total: dict[str, int] = {}
    for seed in seeds:
        for name, count in history(engine, reference, seed, samplings, policies or policies_of(model), launches).items():
            total[name] = total.get(name, 0) + count
        assert not total["differences"], f"history {seed}: {total}"
    return total


def test_random_histories_end_as_each_request_alone():
    counts = run_histories(make_family("gemma3_text"), range(1, 2), FEWEST, (MASSES,))
    assert counts["preemptions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "shared"])
def test_random_histories_of_several_steps_per_launch(family):
    """Rows end in the middle of launches, are cancelled there, and pages run out there; the reference launches one step
    at a time."""
    counts = run_histories(make_family(family), range(20), FEW, launches=(4, 7, 16))
    assert min(counts["preemptions"], counts["stopped"], counts["cancelled"]) > 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_random_histories_of_several_steps_per_launch_over_packed_pages(family):
    counts = run_histories(make_family(family), range(8), FEW, launches=(4, 16), cache_format="k=int8:channel,v=int4")
    assert min(counts["preemptions"], counts["stopped"]) > 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_random_histories_over_packed_pages(family):
    counts = run_histories(make_family(family), range(4), FEW, cache_format="k=int8:channel,v=int4")
    assert counts["preemptions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_5_text", "shared"])
def test_many_random_histories(family, capsys):
    counts = run_histories(make_family(family), range(100, 250))
    with capsys.disabled():
        print(f"\n{family}: {counts}")
