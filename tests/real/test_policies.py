"""Policies, kept prefixes and host memory on the real checkpoint: what covers everything is dense, and what reads less
stays near it."""

import numpy as np
import pytest

from kvjax import Engine, generate, memory_plan
from kvjax.evaluation.retrieval import Arm
from kvjax.evaluation.teacher_forcing import force

LENGTH, STEPS = 1200, 32
SIZES = {"prefill_chunk": 256, "batch_buckets": (1,)}
PAGE = 128
COVERING = ("top:16", "quest:128", "window:2048")
SMALL = {"top:2": 0.9, "quest:16": 0.9, "window:1024": 0.9}
WRONG = "window:160"
"""Of the latest tokens it reads 32."""
HEAVY = {"heavy:16": 1.0, "heavy:2": 0.9}
FACT = "\nThe pass key for the blue garden is 48213.\n"
QUESTION = "\nQuestion: what is the pass key for the blue garden?\nAnswer: The pass key is"


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, pages=48, policies=("dense", *COVERING, *SMALL, WRONG), **SIZES)


@pytest.fixture(scope="module")
def forced(engine, model, text):
    """The license forced through dense and every policy."""
    (sequence,) = engine.prefill([text[:LENGTH]])
    arms = {name: name for name in (*COVERING, *SMALL, WRONG)}
    held = []
    for name in HEAVY:  # learns from its own prefill
        own = Engine(model, name, pages=24, **SIZES)
        held.append((own, *own.prefill([text[:LENGTH]])))
        arms[name] = Arm(own, held[-1][1:], name)
    try:
        yield force(engine, [sequence], [text[LENGTH : LENGTH + STEPS + 1]], arms)
    finally:
        for owner, each in ((engine, sequence), *held):
            owner.free(each)


@pytest.mark.parametrize("name", [*COVERING, "heavy:16"])
def test_budgets_that_cover_everything_are_dense(name, forced):
    beside = forced.beside[name]
    print(f"{name}: KL {beside.kl.max():.2e}, {forced.keys[name]:,.0f} keys")
    assert beside.agrees.all()
    assert beside.kl.max() == 0  # the same blocks, in the same order
    assert forced.keys[name] == forced.keys["dense"]


@pytest.mark.parametrize(("name", "floor"), [*SMALL.items(), ("heavy:2", HEAVY["heavy:2"])])
def test_smaller_budgets_stay_near_dense(name, floor, forced):
    share, wrong = forced.beside[name].agrees.mean(), forced.beside[WRONG].agrees.mean()
    print(f"{name}: {share:.3f}, {forced.keys[name]:,.0f} keys; {WRONG}: {wrong:.3f}")
    assert forced.keys[name] < 0.9 * forced.keys["dense"]
    assert wrong < floor <= share


def test_a_fact_is_found_by_what_reads_every_block(engine, model, text):
    """A budget of two blocks misses this one (`top:2` says 12345), as docs/measured/real-checkpoints.md shows at larger
    sizes."""
    ids = [*text[:500], *model.tokenizer.encode(FACT), *text[500:900], *model.tokenizer.encode(QUESTION)]
    said = {name: generate(engine, ids, policy=name, temperature=0.0, max_new_tokens=6) for name in ("dense", "top:16", WRONG)}
    assert ["48213" in answer for answer in said.values()] == [True, True, False]


def answers(engine, prompts):
    """Greedy tokens, one prompt after the other."""
    return [generate(engine, [prompt], temperature=0.0, max_new_tokens=12, logprobs=True, details=True)[0] for prompt in prompts]


def test_kept_prefixes_change_no_token(model, text):
    prompts = [text[:700], [*text[:600], *text[900:960]]]
    plain = answers(Engine(model, pages=24, reuse=False, **SIZES), prompts)
    keeping = Engine(model, pages=24, reuse=True, **SIZES)
    kept = answers(keeping, [*prompts, prompts[0]])
    assert [each.token_ids for each in kept] == [each.token_ids for each in (*plain, plain[0])]
    assert [each.logprobs for each in kept] == [each.logprobs for each in (*plain, plain[0])]
    assert keeping.stats().found_tokens >= 512


def test_pages_in_host_memory_change_no_token(model, text):
    frame = memory_plan(model.config, page_size=PAGE).frame_bytes
    plain = Engine(model, pages=24, **SIZES)
    tiered = Engine(model, pages=6, host_bytes=12 * frame, reuse=False, **SIZES)
    found = []
    for each in (plain, tiered):
        (sequence,) = each.prefill([text[:900]])
        found.append([np.asarray(sequence.logits), *(np.asarray(each.decode([sequence], [token])) for token in text[900:908])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
