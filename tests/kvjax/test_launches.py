"""Several decode steps in one launch give the bits of as many launches of one step, wherever rows end."""

import dataclasses

import numpy as np
import pytest
from tiny_models import make_family

from kvjax import Engine, Request, Sampling, Scheduler, launches

pytestmark = pytest.mark.bits
PAGE = 32


def engine_of(model, policies=("dense",), **options):
    options = {"pages": 64, "page_size": PAGE, "prefill_chunk": 2 * PAGE, "batch_buckets": (1, 4)} | options
    return Engine(model, policies[0], policies=policies[1:], **options)


def answers(engine, requests, steps, slots=4, **options):
    """The completion of each request, and the scheduler that made them."""
    scheduler = Scheduler(engine, slots=slots, steps_per_launch=steps, **options)
    handles = [scheduler.submit(each) for each in requests]
    while not scheduler.idle:
        scheduler.step()
    assert not engine.sequences, "sequences are left"
    return [each.completion for each in handles], scheduler


def prompts(count, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(1, 90, length).tolist() for length in draw.integers(3, 5 * PAGE, count)]


def ended_early(requests, completions, share=0.5):
    """The requests, of which some have a token in the middle of their answer as a stop token."""
    draw, changed = np.random.default_rng(1), []
    for request, found in zip(requests, completions, strict=True):
        sampling = request.sampling
        if draw.random() < share:
            sampling = dataclasses.replace(sampling, stop_token_ids=(int(draw.choice(found.token_ids)), 96))
        changed.append(dataclasses.replace(request, sampling=sampling))
    return changed


def mixed(policies, count=7):
    """Requests that end at different places, some drawn, some with penalties."""
    kinds = [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}, {"top_logprobs": 3}, {"temperature": 1.0, "top_p": 0.8}]
    found = []
    for number, prompt in enumerate(prompts(count)):
        kind = kinds[number % len(kinds)]
        sampling = Sampling(4 + 5 * number, stop_token_ids=(), logprobs=True, **kind)
        found.append(Request(prompt, sampling, policy=policies[number % len(policies)]))
    return found


def launched(monkeypatch):
    """The steps of each launch from here on."""
    seen, real = [], launches.decode_steps

    def counted(steps, *args, **kwargs):
        seen.append(steps)
        return real(steps, *args, **kwargs)

    monkeypatch.setattr("kvjax.decoding.decode_steps", counted)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_answers_do_not_depend_on_the_steps_per_launch(family, monkeypatch):
    engine = engine_of(make_family(family), ("dense", "quest:1"))
    requests = mixed(("dense", "quest:1"))
    whole, _ = answers(engine, requests, 1)
    requests = ended_early(requests, whole)
    expected, _ = answers(engine, requests, 1)
    assert {each.finish_reason for each in expected} == {"stop", "length"}
    seen = launched(monkeypatch)
    found, _ = answers(engine, requests, 4)
    assert found == expected
    assert set(seen) == {1, 4}
