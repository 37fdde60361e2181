"""Generation: the tokens are those of the model, whoever else runs; stops, streams, scores and compilations."""

import dataclasses
import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Engine, NotFinite, OutOfPages, Request, Sampling, generate, score
from kvjax.engine.sampling import SamplingRows, derived_seed, sample
from kvjax.generation import run
from kvjax.scheduler.scoring import continuation_logprobs, encode_pair

sample_step = jax.jit(sample)
PROMPTS = ["The whale", "A much longer prompt about ships, captains and the sea. " * 3, "x", "Call me"]


def greedy(model, prompt_ids, count):
    """The oracle: a full forward for every token (padded to one length; attention is causal)."""
    ids = list(prompt_ids)
    for _ in range(count):
        padded = (ids + [0] * 256)[:256]
        ids.append(int(np.argmax(model.full_forward(padded)[len(ids) - 1])))
    return ids[len(prompt_ids) :]


@pytest.fixture(scope="module")
def engine(speaker):
    return Engine(speaker, "dense", policies=["top:2", "quest:2"], pages=64, page_size=128, prefill_chunk=128, batch_buckets=(1, 4))


def test_ragged_prompts_give_each_the_models_own_greedy_tokens(speaker, engine):
    results = generate(engine, PROMPTS, max_new_tokens=12, details=True, stop_token_ids=())
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = speaker.tokenizer(prompt)["input_ids"]
        assert list(result.token_ids) == greedy(speaker, ids, 12)
        assert result.prompt_tokens == len(ids)
        assert result.text == speaker.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert result.finish_reason == "length"


def test_text_gives_text_and_a_list_gives_a_list(speaker, engine):
    one = generate(engine, PROMPTS[0], max_new_tokens=5)
    assert isinstance(one, str)
    assert generate(engine, PROMPTS[:1], max_new_tokens=5) == [one]
    assert generate(speaker, PROMPTS[0], max_new_tokens=5) == one
    assert generate(engine, [], max_new_tokens=5) == []
    assert generate(engine, speaker.tokenizer(PROMPTS[0])["input_ids"], max_new_tokens=5) == one


@pytest.mark.long
def test_more_prompts_than_slots_take_turns_and_change_nothing(engine):
    prompts = [PROMPTS[i % 4] + str(i) for i in range(7)]
    together = generate(engine, prompts, max_new_tokens=6, slots=4, temperature=0.8, seed=3)
    turns = [generate(engine, [prompt, "other", "x", "y"], max_new_tokens=6, slots=4, temperature=0.8, seed=3)[0] for prompt in prompts]
    assert together == turns
    assert engine.allocators["full"].free == 64


def test_seeds_repeat_and_differ(engine):
    def draw(seed):
        return generate(engine, "Call me", max_new_tokens=12, temperature=1.5, seed=seed)

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_draws_are_those_of_seed_and_position(speaker, engine):
    """The oracle: the full forward's logits, sampled at the place the token takes."""
    ids = speaker.tokenizer("Call me")["input_ids"]
    result = generate(engine, "Call me", max_new_tokens=8, temperature=9.0, top_k=80, seed=6, stop_token_ids=(), details=True)
    logits = speaker.full_forward((ids + list(result.token_ids) + [0] * 256)[:256])
    rows = SamplingRows.of([Sampling(temperature=9.0, top_k=80, seed=6)])
    expected = [int(sample_step(logits[None, n - 1], rows, np.array([n], np.int32)).tokens[0]) for n in range(len(ids), len(ids) + 8)]
    assert list(result.token_ids) == expected


def test_each_request_is_sampled_by_its_own_settings(engine):
    """Also in a place that another request had before."""
    asked = [Sampling(5), Sampling(5, temperature=3.0, seed=4), Sampling(5, temperature=3.0, top_k=2, seed=4), Sampling(5)]
    together = [completion for _, completion in run(engine, [Request("Call me", sampling) for sampling in asked], slots=1)]
    alone = [next(run(engine, [Request("Call me", sampling)], slots=1))[1] for sampling in asked]
    assert together == alone
    assert len({completion.token_ids for completion in together}) == 3


def test_no_more_run_at_once_than_there_are_slots(engine):
    together = []
    requests = [Request(str(n), Sampling(4), n) for n in range(6)]
    assert len(list(run(engine, requests, slots=3, on_token=lambda *_: together.append(len(engine.sequences))))) == 6
    assert max(together) == 3
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        generate(engine, "x", slots=0)
    for slots in ("3", 1.5, True):
        with pytest.raises(ValueError, match=f"slots must be a whole number, got {slots!r}"):
            generate(engine, "x", slots=slots)


def test_keys_and_blocks_read_are_those_of_the_request_and_its_policy(speaker, engine):
    """Dense steps read n + 1, n + 2, ... keys, whoever else runs."""
    results = generate(engine, PROMPTS, max_new_tokens=5, details=True, stop_token_ids=(), slots=4)
    lengths = [len(speaker.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert [result.keys_per_step for result in results] == [length + 2.5 for length in lengths]
    assert [result.blocks_per_step for result in results] == [1 if length < 120 else 2 for length in lengths]
    one = generate(engine, PROMPTS[1], policy="window:1+8", max_new_tokens=5, details=True, stop_token_ids=())
    assert one.keys_per_step == 9
    assert generate(engine, "x", max_new_tokens=1, details=True).keys_per_step == 0


def test_a_policy_whose_index_was_not_built_is_refused_before_anything_runs(engine):
    for call in (lambda: generate(engine, "x", policy="mean:2", max_new_tokens=1), lambda: score(engine, "x", "y", policy="mean:2")):
        with pytest.raises(ValueError, match="needs the index mean128"):
            call()


def test_token_ids_may_come_as_arrays_but_not_as_fractions(engine):
    ids = [5, 6, 7]
    expected = generate(engine, ids, max_new_tokens=3)
    for array in (np.array(ids), jnp.array(ids), tuple(np.array(ids))):
        assert generate(engine, array, max_new_tokens=3) == expected
    assert generate(engine, np.array([ids, ids]), max_new_tokens=3) == [expected] * 2
    for wrong in ([[5.5, 6.5]], [[None]], [5.5]):
        with pytest.raises(ValueError, match="a prompt is text or a list of token ids"):
            generate(engine, wrong)
    ((_, completion),) = run(engine, [Request(None)])
    assert "got None" in str(completion.error)


def test_stop_token_ends_and_is_left_out_of_the_text(speaker, engine):
    plain = generate(engine, "Call me", max_new_tokens=12, details=True, stop_token_ids=())
    # A token that did not occur before it, so that it ends the text where expected.
    place = next(i for i in range(3, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    stopped = generate(engine, "Call me", max_new_tokens=12, details=True, stop_token_ids=(plain.token_ids[place],))
    assert stopped.token_ids == plain.token_ids[: place + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == speaker.tokenizer.decode(plain.token_ids[:place], skip_special_tokens=True)


def test_the_models_end_of_sequence_is_the_stop_token_unless_others_are_given(speaker, engine):
    plain = generate(engine, "Call me", max_new_tokens=12, details=True, stop_token_ids=())
    place = next(i for i in range(3, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    config = dataclasses.replace(speaker.config, eos_token_ids=(plain.token_ids[place],))
    ending = dataclasses.replace(speaker, decoder=dataclasses.replace(speaker.decoder, config=config))
    assert generate(ending, "Call me", max_new_tokens=12, details=True).token_ids == plain.token_ids[: place + 1]
    assert generate(ending, "Call me", max_new_tokens=12, details=True, stop_token_ids=()).token_ids == plain.token_ids


def test_a_request_of_one_token_takes_no_step(engine):
    before = engine.last_reads
    assert len(generate(engine, "Call me", max_new_tokens=1, details=True, stop_token_ids=()).token_ids) == 1
    assert engine.last_reads is before


def test_of_a_request_that_ends_with_its_first_token_nothing_more_is_kept(engine):
    """The step after it was on its way already."""
    (first,) = generate(engine, "Call me", max_new_tokens=1, details=True, stop_token_ids=()).token_ids
    heard = []
    request = Request("Call me", Sampling(9, stop_token_ids=(first,), logprobs=True))
    ((_, completion),) = run(engine, [request], on_token=lambda request, token, piece: heard.append((token, piece)))
    assert (completion.token_ids, completion.text, completion.finish_reason, len(completion.logprobs)) == ((first,), "", "stop", 1)
    assert (completion.blocks_per_step, completion.keys_per_step, heard) == (0, 0, [(first, "")])


def test_the_callback_hears_every_token_once(engine):
    """The step after a stop was on its way already; what it made is dropped."""
    plain = generate(engine, "Call me", max_new_tokens=12, details=True, stop_token_ids=())
    place = next(i for i in range(3, 12) if plain.token_ids[i] not in plain.token_ids[:i])
    heard = {"Call me": [], "x": []}
    requests = [Request("Call me", Sampling(12, stop_token_ids=(plain.token_ids[place],))), Request("x", Sampling(12, stop_token_ids=()))]
    for request, completion in run(engine, requests, slots=4, on_token=lambda request, token, _: heard[request.prompt].append(token)):
        assert tuple(heard[request.prompt]) == completion.token_ids
    assert tuple(heard["Call me"]) == plain.token_ids[: place + 1]


def test_a_beginning_of_a_stop_string_at_the_end_is_text(engine):
    plain = generate(engine, "Call me", max_new_tokens=12, stop_token_ids=())
    assert generate(engine, "Call me", max_new_tokens=12, stop_token_ids=(), stop=plain[-2:] + "~never~") == plain


def test_a_model_without_a_tokenizer_runs_to_its_last_position(model_factory):
    model = model_factory(max_positions=40)
    result = generate(model, list(range(30)), max_new_tokens=11, details=True)
    assert (len(result.token_ids), result.text) == (11, "")
    with pytest.raises(ValueError, match="longer than the model's 40 positions"):
        generate(model, list(range(30)), max_new_tokens=12)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(model, list(range(30)), max_new_tokens=2, stop="x")
    with pytest.raises(ValueError, match="pass token ids"):
        generate(model, "text")


def test_stop_string_ends_the_text(engine):
    plain = generate(engine, "Call me", max_new_tokens=12, stop_token_ids=())
    stop = plain[4:6]
    stopped = generate(engine, "Call me", max_new_tokens=12, stop=stop, details=True, stop_token_ids=())
    assert stopped.text == plain[: plain.index(stop)]
    assert stopped.finish_reason == "stop"


def test_the_stream_is_the_text(engine):
    pieces = {0: "", 1: ""}

    def stream(number, piece):
        pieces[number] += piece

    texts = generate(engine, PROMPTS[:2], max_new_tokens=9, stream=stream)
    assert [pieces[0], pieces[1]] == texts


def test_logprobs_are_those_of_the_models_distribution(speaker, engine):
    result = generate(engine, "Call me", max_new_tokens=6, logprobs=True, details=True, temperature=0.7, stop_token_ids=())
    ids = speaker.tokenizer("Call me")["input_ids"]
    logits = speaker.full_forward((ids + list(result.token_ids) + [0] * 256)[:256])
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1, len(ids) + 5), result.token_ids]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert generate(engine, "Call me", max_new_tokens=2, details=True).logprobs is None


@pytest.mark.quick_but("quest:2")
@pytest.mark.parametrize("policy", ["dense", "quest:2"])
def test_score_is_the_log_probability_of_the_continuation(speaker, engine, policy):
    result = score(engine, "Call me", " Ishmael.", policy=policy)
    ids = speaker.tokenizer("Call me Ishmael.")["input_ids"]
    logprobs = np.asarray(jax.nn.log_softmax(speaker.full_forward((ids + [0] * 256)[:256]), axis=-1))
    start = len(speaker.tokenizer("Call me")["input_ids"])
    expected = logprobs[np.arange(start - 1, len(ids) - 1), ids[start:]]
    np.testing.assert_allclose(result.token_logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(result.logprob, expected.sum(), atol=1e-3)
    assert result.token_ids == tuple(ids[start:])
    assert not result.is_greedy
    answer = generate(engine, "Call me", max_new_tokens=4, details=True, policy=policy, stop_token_ids=())
    assert score(engine, tuple(ids[:start]), answer.token_ids, policy=policy).is_greedy
    other = (*answer.token_ids[:3], (answer.token_ids[3] + 1) % 90)
    assert not score(engine, tuple(ids[:start]), other, policy=policy).is_greedy, "all tokens must be greedy"
    assert engine.sequences == set()


@pytest.mark.long
def test_equal_prompts_in_one_list_are_different_samples(engine):
    texts = generate(engine, ["Call me"] * 3, max_new_tokens=12, temperature=1.5, seed=4, slots=4)
    assert len(set(texts)) == 3
    assert texts[:2] == [
        generate(engine, "Call me", max_new_tokens=12, temperature=1.5, seed=seed, slots=4) for seed in (4, derived_seed(4, "prompt", 1))
    ]


class Merging:
    """A tokenizer of characters that writes "ab" as one token."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [90 if piece == "ab" else ord(piece) - 32 for piece in re.findall("ab|.", text)]}


def test_a_token_across_the_border_does_not_change_what_is_scored():
    assert encode_pair(Merging(), "x a", "bc") == ([88, 0, 65], [66, 67])
    assert encode_pair(Merging(), "xab", "c") == ([88, 90], [67])
    assert encode_pair(Merging(), "a", "b") == ([65], [66])


@pytest.mark.parametrize("policy", ["dense", "top:2"])
@pytest.mark.parametrize("token", [-1, 97, 2**31, -(2**31) - 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_continuation_token_is_checked(engine, policy, token, place):
    """The last one is written nowhere, only looked up: -1 took another token's logits, 97 gave NaN."""
    continuation = [5, 6, 7]
    continuation[place] = token
    for call in (
        lambda: score(engine, [1, 2, 3], continuation, policy=policy),
        lambda: continuation_logprobs(engine, engine.prefill([[1, 2, 3]])[0], continuation, engine.declared(policy)),
    ):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 97"):
            call()
    for sequence in set(engine.sequences):
        engine.free(sequence)


def test_a_score_that_is_not_finite_is_an_error(speaker):
    params = jax.tree.map(lambda leaf: leaf, speaker.params)
    params["final_norm"] = params["final_norm"].at[3].set(jnp.nan)
    engine = Engine(dataclasses.replace(speaker, params=params), pages=16)
    with pytest.raises(NotFinite, match="position 7 are not finite"):
        score(engine, "Call me", " Ishmael")
    assert engine.sequences == set()


@pytest.mark.long
def test_score_of_several_pairs_is_a_list(speaker):
    scores = score(speaker, ["Call me", "x"], [" Ishmael", "y"], policy="top:2")
    assert [len(each.token_ids) for each in scores] == [8, 1]
    with pytest.raises(ValueError, match="continuation has no tokens"):
        score(speaker, "a", "")


def test_one_bad_request_does_not_stop_the_others(engine):
    requests = [
        Request("Call me", Sampling(max_new_tokens=3), "good"),
        Request((), Sampling(max_new_tokens=3), "empty"),
        Request((1, 500), Sampling(max_new_tokens=3), "vocabulary"),
        Request((1,) * 4090, Sampling(max_new_tokens=30), "long"),
        Request("x", Sampling(max_new_tokens=3), "also good"),
    ]
    results = {request.id: completion for request, completion in run(engine, requests)}
    assert {name for name, completion in results.items() if completion.error is None} == {"good", "also good"}
    assert "no tokens" in str(results["empty"].error)
    assert "4,119 tokens is longer than the model's 4,096" in str(results["long"].error)
    assert results["long"].finish_reason == "error"
    with pytest.raises(ValueError, match="500 is outside the vocabulary"):
        generate(engine, (1, 500))


@pytest.mark.parametrize("wrong", [3, None, Request("x")])
def test_what_is_no_list_of_requests_is_named_with_the_remedy(engine, wrong):
    said = re.escape(f"run takes a list or another iterable of kvjax.Request, as in [kvjax.Request(prompt)], got {wrong!r}")
    with pytest.raises(TypeError, match=said):
        list(run(engine, wrong))


def test_requests_wait_for_pages_rather_than_fail(speaker):
    engine = Engine(speaker, pages=4, page_size=128, prefill_chunk=128)
    prompts = ["a" * 200, "b" * 200, "c" * 200]
    assert len(generate(engine, prompts, max_new_tokens=4, slots=4)) == 3
    with pytest.raises(OutOfPages, match="5 needed"):
        generate(engine, "a" * 600, max_new_tokens=4)
    assert engine.allocators["full"].free == 4


def test_answers_that_outgrow_the_pool_together_both_end(speaker):
    """Each of the two fits alone, and while prefilled both would; one waits, or is suspended, rather than fail on the
    way."""
    engine = Engine(speaker, pages=4, page_size=128, prefill_chunk=128)
    texts = generate(engine, ["a" * 250, "b" * 250], max_new_tokens=10, slots=2, stop_token_ids=())
    assert [len(text) >= 9 for text in texts] == [True, True]


def test_a_prompt_that_waits_takes_any_place_that_becomes_free(speaker):
    """Pages suffice for two at a time; the first place is taken for long."""
    engine = Engine(speaker, pages=4, page_size=128, prefill_chunk=128)
    lengths = {"long": 60, "short": 5, "waits": 5, "waits too": 5}
    requests = [Request("a" * 140, Sampling(length, stop_token_ids=()), name) for name, length in lengths.items()]
    assert [request.id for request, _ in run(engine, requests, slots=4)] == ["short", "waits", "waits too", "long"]


def test_what_never_fits_is_refused_at_once_and_holds_nobody_up(speaker):
    engine = Engine(speaker, pages=4, page_size=128, prefill_chunk=128)
    requests = [Request("a" * 100, Sampling(20, stop_token_ids=()), "fits"), Request("b" * 600, Sampling(2), "never")]
    results = list(run(engine, requests, slots=2))
    assert [request.id for request, _ in results] == ["never", "fits"]
    assert "5 needed" in str(results[0][1].error)


def test_a_prompt_that_waits_is_not_read_again_at_every_step(speaker):
    read = []

    def tokenizer(text):
        read.append(text)
        return speaker.tokenizer(text)

    tokenizer.decode = speaker.tokenizer.decode
    engine = Engine(dataclasses.replace(speaker, tokenizer=tokenizer), pages=4, page_size=128, prefill_chunk=128)
    assert len(list(run(engine, [Request(letter * 300, Sampling(40, stop_token_ids=())) for letter in "ab"], slots=2))) == 2
    assert len(read) == 2, "once each"


def test_a_callback_that_fails_gives_the_pages_back(engine):
    def fail(*_):
        raise ZeroDivisionError

    for call in (
        lambda: generate(engine, PROMPTS, stream=fail),
        lambda: list(run(engine, [Request("a" * 300)], on_prefill=fail)),
        lambda: list(run(engine, (Request("a") if n < 2 else 1 / 0 for n in range(3)), slots=4)),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        assert (engine.allocators["full"].free, engine.sequences) == (64, set())


def test_stopping_early_gives_the_pages_back(engine):
    results = run(engine, [Request("a", Sampling(max_new_tokens=2)), Request("b", Sampling(max_new_tokens=50))], slots=4)
    next(results)
    results.close()
    assert engine.allocators["full"].free == 64


def test_the_step_is_compiled_once_per_shape_bucket(model_factory, speaker):
    """Compilations are counted by JAX itself: other prompts, lengths and sampling settings in the same bucket add none.
    Greedy steps and steps in which a row draws are two programs."""
    fresh = model_factory(num_layers=1, rope_theta=12345.0)
    fresh.tokenizer = speaker.tokenizer
    engine = Engine(fresh, "quest:2", pages=64, page_size=128, prefill_chunk=128, batch_buckets=(2, 4))
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        generate(engine, ["one", "two"], max_new_tokens=4, slots=2)
        greedy = len(compiled)
        generate(engine, ["one", "two"], max_new_tokens=4, slots=2, temperature=1.0)
        first = len(compiled)
        assert first > greedy >= 2, "the listener hears compilations"
        generate(engine, ["five", "six", "seven"], max_new_tokens=7, slots=2)
        assert len(compiled) == first
        generate(engine, ["three" * 30, "four", "five"], max_new_tokens=9, slots=2, temperature=0.5, top_k=3, top_p=0.9, seed=1)
        assert len(compiled) == first
        generate(engine, ["one"] * 3, max_new_tokens=4, slots=4)
        assert len(compiled) > first, "a new batch bucket is a new shape"
    finally:
        jax.monitoring.clear_event_listeners()


def test_everything_the_front_door_promises_is_there():
    for name in kvjax.__all__:
        assert getattr(kvjax, name) is not None


def test_an_answer_that_does_not_fit_is_named_or_clipped(model_factory):
    engine = Engine(model_factory(max_positions=64), pages=16, page_size=16, prefill_chunk=32, batch_buckets=(2,))
    long = [1] * 60
    said = "67 tokens is longer than the model's 64 positions: the prompt has 60 tokens and 8 new ones.* There is room for 5: ask"
    with pytest.raises(ValueError, match=said):
        generate(engine, long, max_new_tokens=8, ignore_eos=True)
    answers = [
        generate(engine, prompt, max_new_tokens=8, ignore_eos=True, clip=True, details=True, n=2) for prompt in (long, [1] * 57, [1] * 64)
    ]
    assert [[len(choice.token_ids) for choice in answer.choices] for answer in answers] == [[5, 5], [8, 8], [1, 1]]
    assert answers[0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"a sequence of 65 tokens is longer than the model's 64 positions$"):
        generate(engine, [1] * 65, max_new_tokens=8, clip=True)
