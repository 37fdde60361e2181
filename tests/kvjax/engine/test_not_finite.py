"""A model that gives NaN for one sequence: that sequence ends as an error that says so, and its neighbours are what
they are alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine, NotFinite, Request, Sampling, generate, run, score
from kvjax.engine.sampling import SamplingRows, sample
from kvjax.evaluation.retrieval import speak
from kvjax.evaluation.teacher_forcing import force
from kvjax.scheduler.scoring import continuation_logprobs
from kvjax.serving import KvjaxLM
from kvjax.serving.batch.job import run_batch

sample_step = jax.jit(sample)
BAD = 62
"""A token whose embedding is NaN, so logits are NaN from it on. It is "^" in the speaker's vocabulary, which no prompt
here holds."""

PROMPTS = ["The whale", "Call me", "ships and the sea"]


@pytest.fixture(scope="module")
def sound(speaker, model_factory):
    model = model_factory(num_layers=1, tie_embeddings=False, eos_token_ids=(95,))
    model.tokenizer = speaker.tokenizer
    return model


def broken(model, token):
    return dataclasses.replace(model, params=model.params | {"embed": model.params["embed"].at[token].set(jnp.nan)})


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ([1.0, 2.0, 3.0], True),
        ([1.0, -np.inf, 3.0], True),  # a token that is barred
        ([1.0, np.nan, 3.0], False),
        ([1.0, np.inf, 3.0], False),
        ([-np.inf] * 3, False),
        ([np.nan] * 3, False),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_finite_if_there_is_something_to_sample_from(row, finite, temperature):
    logits = jnp.array([[0.0, 1.0, 2.0], row, [0.0, 1.0, 2.0]], jnp.float32)
    rows = SamplingRows.of([Sampling(temperature=temperature, seed=number) for number in range(3)])
    sampled = sample_step(logits, rows, np.zeros(3, np.int32))
    assert sampled.finite.tolist() == [True, finite, True]
    assert not finite or np.isfinite(sampled.logprobs).all()


@pytest.mark.quick_but("sampling1")
@pytest.mark.parametrize("sampling", [Sampling(10, stop_token_ids=()), Sampling(10, temperature=2.0, seed=4, stop_token_ids=())])
def test_a_row_that_turns_nan_while_it_decodes_ends_as_an_error_and_its_neighbours_do_not(sound, sampling):
    def completions(model):
        engine = Engine(model, pages=24, page_size=16, prefill_chunk=32, batch_buckets=(4,))
        found = {request.id: done for request, done in run(engine, [Request(text, sampling, text) for text in PROMPTS])}
        assert (engine.allocators["full"].free, engine.sequences) == (24, set())
        again = {request.id: done for request, done in run(engine, [Request(text, sampling, text) for text in PROMPTS[1:]])}
        assert again == {text: found[text] for text in PROMPTS[1:]}, "pages that held NaN are as good as any"
        return found

    before = completions(sound)
    others = {token for text in PROMPTS[1:] for token in (*before[text].token_ids, *sound.tokenizer(text)["input_ids"])}
    place = next(n for n, token in enumerate(before[PROMPTS[0]].token_ids) if token not in others)
    after = completions(broken(sound, before[PROMPTS[0]].token_ids[place]))
    error = after[PROMPTS[0]].error
    assert isinstance(error, NotFinite)
    assert error.position == len(PROMPTS[0]) + place + 1
    assert f"the token at position {error.position} are not finite" in str(error)
    assert (after[PROMPTS[0]].finish_reason, after[PROMPTS[0]].text, after[PROMPTS[0]].token_ids) == ("error", "", ())
    for text in PROMPTS[1:]:
        assert after[text] == before[text]


def test_a_prompt_whose_logits_are_nan_is_an_error(sound):
    model = broken(sound, BAD)
    engine = Engine(model, pages=24, page_size=16, prefill_chunk=32)
    results = {request.id: done for request, done in run(engine, [Request(text, Sampling(4), text) for text in ("bad ^", "good")])}
    assert results["bad ^"].error.position == 5
    assert results["good"].error is None
    for ask in (lambda: generate(engine, "bad ^"), lambda: generate(model, ["good", "bad ^"], logprobs=True)):
        with pytest.raises(NotFinite, match="position 5 are not finite"):
            ask()
    assert engine.allocators["full"].free == 24


def test_a_batch_line_says_it(sound):
    engine = Engine(broken(sound, BAD), pages=24, page_size=16, prefill_chunk=32)
    records = [
        {"id": "bad", "prompt": "bad ^ one"},
        {"id": "good", "prompt": "good"},
        {"custom_id": "openai", "body": {"prompt": "^", "max_tokens": 3}},
    ]
    lines = {line.get("id") if "custom_id" not in line else "openai": line for line in run_batch(records, engine)}
    assert "position 9 are not finite" in lines["bad"]["error"]
    assert lines["good"]["error"] is None
    assert "position 1 are not finite" in lines["openai"]["error"]["message"]


@pytest.mark.parametrize("policy", ["dense", "window:1+4"])
@pytest.mark.parametrize(("prompt", "continuation", "position"), [("ab^", "cd", 3), ("ab", "c^d", 4), ("ab" * 30, "c" * 10 + "^dd", 71)])
def test_scores_are_never_of_nan(sound, policy, prompt, continuation, position):
    engine = Engine(broken(sound, BAD), pages=24, page_size=16, prefill_chunk=32)
    for ask in (
        lambda: score(engine, [prompt], [continuation], policy=policy),
        lambda: KvjaxLM(engine, policy=policy).loglikelihood([type("Asked", (), {"args": (prompt, continuation)})]),
    ):
        with pytest.raises(NotFinite) as caught:
            ask()
        # In one chunk of dense prefill a token's NaN value reaches earlier queries too: masked, it is multiplied by 0.
        assert caught.value.position == position or (policy == "dense" and len(prompt) < caught.value.position < position)
    assert engine.allocators["full"].free == 24
    assert score(engine, "ab", "c^", policy=policy).logprob < 0, "the last token's own logits are not asked for"


@pytest.mark.long
def test_forced_text_measures_no_nan(sound):
    engine = Engine(broken(sound, BAD), policies=["window:1+4"], pages=64, page_size=16, prefill_chunk=32)
    sequences = engine.prefill([[1] * 20, [2] * 20])
    with pytest.raises(NotFinite, match="position 23 are"):
        force(engine, sequences, [[3, 4, 5, 6], [3, 4, BAD, 6]], {"window": "window:1+4"})
    with pytest.raises(NotFinite, match="position 22 are"):
        speak(engine, sequences, [[([4, 5], 2)], [([4, BAD], 2)]], policy="dense")
    with pytest.raises(NotFinite, match="position 22 are"):
        continuation_logprobs(engine, engine.fork(engine.prefill([[1] * 20])[0]), [3, BAD, 4], engine.declared("window:1+4"))


def test_a_token_that_the_model_bars_has_no_score(sound):
    engine = Engine(sound, pages=24, page_size=16, prefill_chunk=32)
    (sequence,) = engine.prefill([[1, 2, 3]])
    sequence.logits = sequence.logits.at[9].set(-jnp.inf)
    with pytest.raises(FloatingPointError, match="token 9 at place 0 of the continuation has a probability of 0"):
        continuation_logprobs(engine, sequence, [9, 4], engine.declared("dense"))
