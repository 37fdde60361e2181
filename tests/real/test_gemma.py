"""Gemma 3 270M: a base model with windows in most layers, heads of 256 and a token that begins every prompt."""

import pytest
from real_checkpoint import license_text

from kvjax import Engine, generate
from kvjax.evaluation.needle import encode_text, vocabulary_words
from kvjax.evaluation.retrieval import ask, forked, prefilled, prompt_start
from kvjax.evaluation.tasks import make_trials

SIZES = {"page_size": 128, "prefill_chunk": 256, "batch_buckets": (2,)}
LENGTH, WRONG = 1000, "window:160"


@pytest.fixture(scope="module")
def engine(gemma):
    return Engine(gemma, pages=32, policies=("dense", WRONG), **SIZES)


def test_prompts_begin_with_the_beginning_of_a_sequence(gemma):
    assert prompt_start(gemma.tokenizer) == (gemma.tokenizer.bos_token_id,)


SAID = {
    "The capital of France is": " the capital of the country of France.",
    "1, 2, 3, 4, 5, 6,": " 7, 8, 9",
    "The opposite of hot is": " cold.\n\nThe opposite of cold is",
    "Monday, Tuesday, Wednesday,": " Thursday, Friday, Saturday, Sunday,",
    "def add(a, b):\n    return": " a + b\n\ndef sub(a",
}
"""The first 8 tokens that llama.cpp (llama-cpp-python 0.3.36) writes greedily from the same file."""


@pytest.mark.parametrize("prompt", SAID)
def test_greedy_tokens_are_those_of_llama_cpp(engine, prompt):
    assert generate(engine, prompt, temperature=0.0, max_new_tokens=8) == SAID[prompt]


@pytest.mark.parametrize("task", ["wordings", "repeat"])
def test_dense_finds_what_a_window_cannot_see(engine, gemma, task):
    tokenizer = gemma.tokenizer
    text, words = encode_text(tokenizer, license_text()), vocabulary_words(tokenizer)
    start = prompt_start(tokenizer)
    trials = make_trials(tokenizer, text, words, task=task, haystack="prose", length=LENGTH, count=4, prefix_ids=start)[1:3]
    with prefilled(engine, [trial.haystack_ids for trial in trials]) as haystacks:
        found = {}
        for policy in ("dense", WRONG):
            with forked(engine, haystacks) as forks:
                found[policy] = [answer.hit for answer in ask(engine, forks, trials, tokenizer, policy=policy)[0]]
    assert found == {"dense": [True, True], WRONG: [False, False]}
