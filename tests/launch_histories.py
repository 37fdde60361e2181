"""Histories of requests with stop strings, for tests of what one launch does."""

import dataclasses

import numpy as np
from scheduling import finish

from kvjax import Engine, Request, Sampling, Scheduler

PAGE = 16


def engine_of(model, policies=("dense",), **options):
    options = {"pages": 48, "page_size": PAGE, "prefill_chunk": 2 * PAGE, "batch_buckets": (4,)} | options
    return Engine(model, policies[0], policies=policies[1:], **options)


def answers(engine, requests, steps=1, slots=4, **options):
    """The completion of each request."""
    scheduler = Scheduler(engine, slots=slots, steps_per_launch=steps, **options)
    handles = [scheduler.submit(each) for each in requests]
    try:
        finish(scheduler)
    finally:
        scheduler.close()
    return [each.completion for each in handles]


def draw_history(engine, seed):
    """Requests that come at random times. Most have stop strings that their answers hold somewhere."""
    draw = np.random.default_rng(seed)
    prompts = ["".join(map(chr, draw.integers(32, 127, draw.integers(3, 70)))) for _ in range(draw.integers(2, 7))]
    prompts += [prompts[0] + "and so on"]
    given = [
        {"temperature": float(draw.choice([0.0, 1.0])), "seed": int(draw.integers(9)), "n": int(draw.choice([1, 1, 3])), "logprobs": True}
        | ({"repetition_penalty": 1.3} if draw.random() < 0.3 else {})
        for _ in prompts
    ]
    policies = draw.choice(list(engine.policy_names), len(prompts)).tolist()
    lengths = draw.integers(1, 40, len(prompts)).tolist()
    requests = [
        Request(each, Sampling(n, **more), policy=policy) for each, n, more, policy in zip(prompts, lengths, given, policies, strict=True)
    ]
    for number, (request, whole) in enumerate(zip(requests, answers(engine, requests), strict=True)):
        if draw.random() < 0.8 and len(whole.text) > 3:
            at = int(draw.integers(len(whole.text) - 2))
            stop = (whole.text[at : at + int(draw.integers(1, 4))], "never said")
            requests[number] = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=stop))
    return requests, draw.integers(0, 6, len(requests)).tolist()


def run_history(engine, history, steps, **options):
    """The completions, and every token with its text, request by request."""
    heard = {}
    scheduler = Scheduler(
        engine,
        slots=4,
        steps_per_launch=steps,
        on_token=lambda request, token, text: heard.setdefault(id(request), []).append((token, text)),
        **options,
    )
    requests, waits = history
    handles = []
    for request, wait in zip(requests, waits, strict=True):
        handles.append(scheduler.submit(request))
        for _ in range(wait if steps == 1 and not options else wait // 2):
            scheduler.step()
    finish(scheduler)
    scheduler.close()
    return [each.completion for each in handles], [sorted(heard.get(id(each), [])) for each in requests]
