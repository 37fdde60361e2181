"""Several samples of one prompt, penalties, and the most likely tokens: the same as one by one, by hand, and alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine, OutOfPages, Request, Sampling, generate
from kvjax.engine.sampling import SamplingRows, derived_seed, seen_tokens
from kvjax.generation import pages_needed, run

pytestmark = pytest.mark.bits

PROMPT = "Call me Ishmael. Some years ago"
PENALTIES = [{"repetition_penalty": 1.7}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5, "repetition_penalty": 0.8}]


@pytest.fixture(scope="module")
def engine(speaker):
    return Engine(speaker, "dense", pages=64, page_size=128, prefill_chunk=128, batch_buckets=(1, 4))


@pytest.fixture(autouse=True)
def _no_leaked_pages(engine):
    yield
    assert (engine.allocators["full"].free, engine.sequences) == (64, set())


def by_hand(model, ids, sampling):
    """Greedy tokens under penalties from full forward passes, the penalties counted in Python."""
    ids, prompt, answer = list(ids), set(ids), []
    for _ in range(sampling.max_new_tokens):
        logits = np.asarray(model.full_forward((ids + [0] * 256)[:256])[len(ids) - 1], np.float64)
        for token in prompt | set(answer):
            logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
        for token in set(answer):
            logits[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
        answer.append(int(np.argmax(logits)))
        ids.append(answer[-1])
    return tuple(answer)


@pytest.mark.quick_but("{'presence_penalty': 2.0}", "{'repetition_penalty': 1.7}")
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_count_prompt_and_answer_as_by_hand(speaker, engine, penalties):
    sampling = Sampling(24, stop_token_ids=(), **penalties)
    ((_, found),) = run(engine, [Request(PROMPT, sampling)], slots=4)
    assert found.token_ids == by_hand(speaker, speaker.tokenizer(PROMPT)["input_ids"], sampling)
    assert found.token_ids != by_hand(speaker, speaker.tokenizer(PROMPT)["input_ids"], Sampling(24))


@pytest.mark.long
def test_rows_do_not_feel_the_penalties_of_others(engine):
    """Places change hands while counts live on: each request ends as it would alone, to the bit."""
    settings = [
        Sampling(9, stop_token_ids=(), logprobs=True),
        Sampling(20, stop_token_ids=(), logprobs=True, repetition_penalty=1.5),
        Sampling(14, stop_token_ids=(), logprobs=True, temperature=1.3, seed=3),
        Sampling(6, stop_token_ids=(), logprobs=True, presence_penalty=1.0, temperature=0.9, seed=8),
        Sampling(17, stop_token_ids=(), logprobs=True, top_logprobs=4),
        Sampling(12, stop_token_ids=(), logprobs=True, frequency_penalty=0.7, min_p=0.05, temperature=2.0),
        Sampling(8, stop_token_ids=(), logprobs=True),
    ]
    prompts = ["Call me", "Some years ago, never mind how long", "x", "Call me", "The sea " * 20, "precisely", "Call me"]
    requests = [Request(prompt, sampling, number) for number, (prompt, sampling) in enumerate(zip(prompts, settings, strict=True))]
    together = {request.id: completion for request, completion in run(engine, requests, slots=4)}
    for request in requests:
        ((_, alone),) = run(engine, [request], slots=4)
        assert together[request.id] == alone, request.sampling


@pytest.mark.long
def test_counts_are_kept_only_while_a_row_has_a_penalty(engine, monkeypatch):
    given, real = [], Engine._decode

    def step(engine, group):
        given.append(None if group.counts is None else group.counts.shape)
        return real(engine, group)

    monkeypatch.setattr(Engine, "_decode", step)
    requests = [Request("a", Sampling(3, stop_token_ids=())), Request("b", Sampling(3, repetition_penalty=2.0, stop_token_ids=()))]
    list(run(engine, [*requests, requests[0]], slots=1))
    assert given == [None, None, (1, 97), (1, 97), None, None]


def test_the_counts_are_updated_in_place(speaker):
    """A step with penalties holds one `[B, V]` of counts: it is donated."""
    engine = Engine(speaker, pages=8, page_size=128, prefill_chunk=128, batch_buckets=(2,))
    sequences = engine.prefill([[1, 2], [3]])
    counts = jnp.asarray(np.stack([seen_tokens([1, 2], 97), seen_tokens([3], 97)]))
    rows = SamplingRows.of([Sampling(repetition_penalty=2.0), None])
    with pytest.raises(ValueError, match="a row has a penalty, which needs counts"):
        engine.decode_and_sample(sequences, np.array([2, 5], np.int32), rows)
    sampled = engine.decode_and_sample(sequences, np.array([2, 5], np.int32), rows, counts=counts)
    assert counts.is_deleted()
    found = np.asarray(sampled.counts)
    assert (found[0, 1], found[0, 2], found[1, 3], found[1, 5], found.sum()) == (1, 3, 1, 2, 7)


@pytest.mark.quick_but("3-1", "6-4")
@pytest.mark.parametrize(("n", "slots"), [(2, 4), (3, 4), (6, 4), (3, 1)])
def test_samples_are_those_of_their_seeds_and_the_prompt_is_prefilled_once(engine, n, slots):
    settings = {"max_new_tokens": 10, "temperature": 1.4, "stop_token_ids": (), "logprobs": True}
    done = []
    requests = [Request("x", Sampling(4)), Request(PROMPT, Sampling(n=n, seed=2**32 - 2, **settings), "many"), Request("y", Sampling(5))]
    found = {request.id: completion for request, completion in run(engine, requests, slots=slots, on_prefill=done.append)}
    many = found["many"]
    assert sum(done) == len(PROMPT) + 2
    assert len(many.choices) == n
    assert many.text == many.choices[0].text
    for index, choice in enumerate(many.choices):
        ((_, alone),) = run(engine, [Request(PROMPT, Sampling(seed=derived_seed(2**32 - 2, "sample", index), **settings))], slots=slots)
        assert choice == alone
    assert len({choice.text for choice in many.choices}) == n


@pytest.mark.long
def test_samples_with_penalties_count_each_their_own(engine):
    settings = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": (), "repetition_penalty": 1.4, "frequency_penalty": 0.5}
    ((_, found),) = run(engine, [Request(PROMPT, Sampling(n=3, **settings))], slots=4)
    alone = [
        next(run(engine, [Request(PROMPT, Sampling(seed=derived_seed(0, "sample", index), **settings))], slots=4))[1] for index in range(3)
    ]
    assert list(found.choices) == alone


def test_generate_gives_a_list_for_each_prompt(engine):
    settings = {"max_new_tokens": 8, "temperature": 1.5}
    texts = generate(engine, ["Call me", "x"], n=3, **settings)
    assert [len(samples) for samples in texts] == [3, 3]
    assert generate(engine, "Call me", n=3, **settings) == texts[0]
    assert texts[0] == [generate(engine, "Call me", seed=derived_seed(0, "sample", index), slots=4, **settings) for index in range(3)]
    twice = generate(engine, ["x", "x"], n=2, **settings)
    assert twice[0] == generate(engine, "x", n=2, **settings)
    assert twice[1] == generate(engine, "x", n=2, seed=derived_seed(0, "prompt", 1), **settings)
    assert not set(twice[0]) & set(twice[1]), "equal prompts do not draw the same samples"
    several = [set(generate(engine, "Call me", n=4, seed=seed, **settings)) for seed in range(4)]
    assert len(set.union(*several)) == 16, "nor do seeds that follow each other"
    with pytest.raises(ValueError, match="stream shows one sample of a prompt, and n is 2"):
        generate(engine, "x", n=2, stream=print)


@pytest.mark.long
def test_samples_take_turns_where_pages_are_short(speaker):
    """Two pages of prompt, shared; each sample needs the copy of the open page and none beyond."""
    engine = Engine(speaker, pages=4, page_size=128, prefill_chunk=128, batch_buckets=(4,))
    settings = {"temperature": 1.0, "max_new_tokens": 20, "stop_token_ids": ()}
    ((_, found),) = run(engine, [Request("a" * 200, Sampling(n=5, **settings))], slots=4)
    assert found.error is None
    assert len(found.choices) == 5
    small = Engine(speaker, pages=2, page_size=128, prefill_chunk=128, batch_buckets=(4,))
    results = list(run(small, [Request("a" * 200, Sampling(n=2, **settings), "no"), Request("b", Sampling(3), "yes")], slots=4))
    assert [(request.id, type(completion.error)) for request, completion in results] == [("no", OutOfPages), ("yes", type(None))]
    assert small.allocators["full"].free == 2
    assert engine.allocators["full"].free == 4


@pytest.mark.parametrize(
    ("requests", "slots", "pages"), [([(129, 1)] * 9, 4, 8), ([(128, 3), (200, 1)], 8, 6), ([(128, 9)], 2, 3), ([], 4, 0)]
)
def test_pages_needed(requests, slots, pages):
    assert pages_needed(requests, slots, 128) == pages


def test_stopping_early_gives_back_a_prompt_that_waits_with_samples(engine):
    requests = [Request("a", Sampling(2)), Request("b" * 200, Sampling(50, n=9, stop_token_ids=()))]
    results = run(engine, requests, slots=4)
    next(results)
    results.close()


def test_eos_is_ignored_when_told_and_named_stops_are_not(speaker, engine):
    plain = generate(engine, "Call me", max_new_tokens=12, details=True, stop_token_ids=())
    place = next(i for i in range(3, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    config = dataclasses.replace(speaker.config, eos_token_ids=(plain.token_ids[place],))
    ending = Engine(dataclasses.replace(speaker, decoder=dataclasses.replace(speaker.decoder, config=config)), pages=16)
    assert generate(ending, "Call me", max_new_tokens=12, details=True).finish_reason == "stop"
    assert generate(ending, "Call me", max_new_tokens=12, details=True, ignore_eos=True).token_ids == plain.token_ids
    named = {"stop_token_ids": (plain.token_ids[place],), "ignore_eos": True}
    assert generate(ending, "Call me", max_new_tokens=12, details=True, **named).finish_reason == "stop"


def test_the_most_likely_tokens_are_those_of_the_model(speaker, engine):
    result = generate(
        engine,
        "Call me",
        max_new_tokens=5,
        logprobs=True,
        top_logprobs=3,
        temperature=2.0,
        repetition_penalty=1.5,
        stop_token_ids=(),
        details=True,
    )
    ids = speaker.tokenizer("Call me")["input_ids"]
    logprobs = np.asarray(jax.nn.log_softmax(speaker.full_forward((ids + list(result.token_ids) + [0] * 256)[:256]), axis=-1))
    for step, best in enumerate(result.top_logprobs):
        expected = np.argsort(-logprobs[len(ids) - 1 + step])[:3]
        assert [token for token, _ in best] == expected.tolist()
        np.testing.assert_allclose([value for _, value in best], logprobs[len(ids) - 1 + step][expected], atol=1e-4)
    assert generate(engine, "Call me", max_new_tokens=2, logprobs=True, details=True).top_logprobs is None
