"""Several decode steps in one launch give the bits of as many launches of one step, wherever rows end."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from launch_histories import answers, draw_history, engine_of, run_history
from scheduling import asked, finish
from tiny_models import make_family, shallow

from kvjax import Engine, Request, Sampling, Scheduler, compilation, mesh
from kvjax.cache import Cache
from kvjax.engine import multi_step
from kvjax.engine.multi_step import Ends
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.step_output import TOKENS
from kvjax.engine.step_plan import DecodeGroup, Launch, StepPlan
from kvjax.engine.steps import StepInputs, StepStatic, decode_and_sample
from kvjax.scheduler.batch import ActiveBatch
from kvjax.scheduler.launch_size import SEVERAL, LaunchSize
from pallas_kernels.collectives.preparation import prepared

pytestmark = pytest.mark.bits
PAGE = 16


def requests_of(policy, lengths=(10, 3, 21, 14, 7)):
    """Answers of several lengths, to prompts whose page tables have one width."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(1, 90, count).tolist() for count in (18, 30, 25, 33, 20)]
    samplings = [Sampling(most, temperature=1.0, stop_token_ids=(), logprobs=True) for most in lengths]
    return [Request(prompt, sampling, policy=policy) for prompt, sampling in zip(prompts, samplings, strict=True)]


def stopping(requests, completions):
    """The requests, every second of which ends at a token in the middle of its answer."""
    changed = []
    for number, (request, found) in enumerate(zip(requests, completions, strict=True)):
        ids = (found.token_ids[len(found.token_ids) // 2], 96) if number % 2 == 0 else ()
        changed.append(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_token_ids=ids)))
    return changed


@pytest.fixture
def launched(monkeypatch):
    """The steps of each launch."""
    seen, real = [], multi_step.decode_steps

    def counted(static, inputs):
        seen.append(static.steps)
        return real(static, inputs)

    monkeypatch.setattr("kvjax.engine.engine.decode_steps", counted)
    return seen


@pytest.mark.quick_but("gemma3_text-dense")
@pytest.mark.parametrize(
    ("family", "policy"), [("llama", "quest:1"), ("gemma3_text", "dense"), ("qwen3_5_text", "dense"), ("llama", "heavy:1")]
)
def test_answers_do_not_depend_on_the_steps_per_launch(family, policy, launched):
    engine = engine_of(make_family(family), (policy,))
    whole = answers(engine, requests_of(policy))
    requests = stopping(requests_of(policy), whole)
    expected = answers(engine, requests)
    assert [each.finish_reason for each in expected] == ["stop", "length"] * 2 + ["stop"]
    assert not launched
    assert answers(engine, requests, 4) == expected
    assert set(launched) == {4}


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 5, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_5_text", "deepseek_v32", "shared"])
def test_answers_of_mixed_requests(family, steps):
    """Drawn and penalised rows, the most likely tokens, and several samples, by several policies."""
    model = make_family(family)
    policies = ("tokens:16", "dense") if family == "deepseek_v32" else ("dense", "quest:1", "window:8+24")
    kinds = [{}, {"temperature": 0.9, "n": 2}, {"repetition_penalty": 1.3}, {"top_logprobs": 3}, {"temperature": 1.0, "top_p": 0.8}]
    engine, requests = engine_of(model, policies, pages=200), []
    for number, request in enumerate(requests_of(None, (40, 9, 33, 17, 28)) * 2):
        sampling = dataclasses.replace(request.sampling, **kinds[number % len(kinds)])
        requests.append(dataclasses.replace(request, sampling=sampling, policy=policies[number % len(policies)]))
    requests = stopping(requests, answers(engine, requests))
    expected = answers(engine, requests)
    assert answers(engine, requests, steps) == expected
    assert {each.finish_reason for each in expected} == {"stop", "length"}


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("policy", ["dense", "quest:1", "heavy:1"])
def test_answers_on_a_mesh(policy, sizes):
    engine = engine_of(make_family("llama"), (policy,), mesh=mesh(**sizes))
    requests = stopping(requests_of(policy), answers(engine, requests_of(policy)))
    assert answers(engine, requests, 4) == answers(engine, requests)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["dense", "quest:1", "window:8+24+release"])
def test_answers_with_pages_in_host_memory(policy):
    model = make_family("llama")
    frame = engine_of(model).memory_plan().frame_bytes
    engine = engine_of(model, (policy,), pages=8, host_bytes=40 * frame)
    requests = stopping(requests_of(policy), answers(engine, requests_of(policy)))
    assert answers(engine, requests, 4) == answers(engine, requests)


# Rows that have ended


def after_steps(engine, lefts, stop_ids, counts):
    """What launches of so many steps of two rows pack, and lengths, pages and rows of state, and tokens left after
    them."""
    prompts = [list(range(3, 20)), list(range(40, 70))]
    sequences = engine.prefill(prompts)
    slots = (*sequences, None, None)
    tokens, ends = jax.numpy.array([5, 6, 0, 0], np.int32), Ends(np.array(lefts, np.int32), np.array(stop_ids, np.int32)[:, None])
    rows, found = SamplingRows.of([None] * 4), []
    for count in counts:
        group = DecodeGroup(slots, tokens, rows, launch=Launch(count, ends, count))
        (decoded,) = engine.step(StepPlan((group,))).decodes
        tokens, ends = decoded.sampled.tokens, decoded.ends
        found.append(np.asarray(decoded.packed))
    lengths = np.asarray(engine._decode_batches[4, engine.policy]._device_lengths)
    pages = [np.asarray(leaf) for leaf in jax.tree.leaves(engine._pool.layers)]
    return np.concatenate(found), lengths, pages, np.asarray(ends.left)


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_a_row_that_has_ended_changes_nothing(family, monkeypatch):
    """Its pages, its length and its rows of state are those after its own steps. A mutant that goes on is noticed."""
    model, never, far = make_family(family), [-1] * 4, [9, 9, 0, 0]
    model = shallow(model) if family == "llama" else model

    def run(lefts, stops, counts):
        return after_steps(engine_of(model, pages=12), lefts, stops, counts)

    single, _, _, _ = run(far, never, (1,) * 4)
    packed, lengths, pages, left = run([2, 9, 0, 0], never, (4,))
    assert (lengths.tolist(), left.tolist()) == ([19, 34, 0, 0], [0, 5, 0, 0])
    assert np.array_equal(packed[:, 1], single[:, 1])
    assert np.array_equal(packed[:2, 0], single[:2, 0])
    _, after, unchanged, _ = run([2, 4, 0, 0], never, (4, 2))
    assert after.tolist() == [19, 34, 0, 0]
    assert same(unchanged, pages)
    _, stopped, also, _ = run([9, 4, 0, 0], [int(single[1, 0, TOKENS]), -1, -1, -1], (4,))
    assert stopped.tolist() == [19, 34, 0, 0]
    assert same(also, pages), "a stop token ends it as its last token does"
    monkeypatch.setattr(Ends, "going", lambda self, tokens: tokens >= 0)
    jax.clear_caches()  # programs that were traced know the method
    _, _, wrong, _ = run([2, 9, 0, 0], never, (4,))
    jax.clear_caches()
    assert not same(wrong, pages)


@pytest.mark.parametrize("wrong", ["counts", "ends"])
def test_wrong_ends_are_noticed(wrong, monkeypatch):
    """The host counts one token more than a row has made; the device lets rows go on after a stop token that the host
    does not look for."""
    engine = engine_of(shallow(make_family("llama")))
    requests = requests_of(None)
    expected = answers(engine, requests)
    if wrong == "counts":
        real = ActiveBatch.launched
        monkeypatch.setattr(ActiveBatch, "launched", lambda self, steps=1: real(self, steps + 1))
    else:
        monkeypatch.setattr("kvjax.scheduler.batch._padded", lambda ids: np.full((4, 4), expected[2].token_ids[3], np.int32))
    assert not equal_or_failed(lambda: answers(engine, requests, 4), expected)


def equal_or_failed(call, expected):
    try:
        return call() == expected
    except AssertionError:
        return False


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_the_loop_holds_no_second_copy_of_the_cache(family):
    model = make_family(family)
    engine = Engine(model, "top:8" if family == "llama" else "dense", pages=2048, batch_buckets=(1, 256))
    layers, one = engine._pool.layers, jax.numpy.ones(1, np.int32)
    tables = {group.name: np.zeros((1, 64 if group.name == "full" else 1), np.int32) for group in engine.spec.groups}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    cache = Cache(layers, tables, one, engine.spec)
    states = engine._policy_set.states.of_batch(engine.policy, [None])
    rows, ends = SamplingRows.of([None]), Ends(one, one[:, None])
    static = StepStatic(model.decoder, engine.policy, engine.indexes, steps=8)
    compiled = multi_step.decode_steps.lower(static, StepInputs(model.params, cache, one, one > 0, states, rows, ends=ends)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 20


def test_on_a_mesh_the_loop_prepares_nothing_in_every_turn(monkeypatch):
    """What a sum needs is told by its primitive."""

    def summed(x, *, axis_name, residual, **_):
        ready = prepared("sums", lambda: jax.lax.erf_inv(jax.numpy.float32(0.5)))
        return jax.lax.psum(x, axis_name) + (0 if residual is None else residual) + 0 * ready

    monkeypatch.setattr("kvjax.axes.all_reduce", summed)
    engine = engine_of(shallow(make_family("llama")), mesh=mesh(tensor=2))
    one = jax.numpy.ones(1, np.int32)
    cache = Cache(engine._pool.layers, {group.name: np.zeros((1, 8), np.int32) for group in engine.spec.groups}, one, engine.spec)
    states, rows, ends = engine._policy_set.states.of_batch(engine.policy, [None]), SamplingRows.of([None]), Ends(one, one[:, None])
    static = StepStatic(engine.model.decoder, engine.policy, engine.indexes, engine._pool.shards, 4)
    inputs = StepInputs(engine.model.params, cache, one, one > 0, states, rows, ends=ends)
    (on_devices,) = multi_step.decode_steps.trace(static, inputs).jaxpr.eqns
    steps = on_devices.params["jaxpr"].eqns
    assert [each.primitive.name for each in steps].count("erf_inv") == 1
    assert [each.primitive.name for each in steps if "erf_inv" in str(each)] == ["erf_inv"], "and none in the loop"


# When there are several steps


def test_one_step_near_the_end(launched, monkeypatch):
    """A launch has no more steps than some row needs."""
    engine = engine_of(shallow(make_family("llama")))
    single = []
    monkeypatch.setattr("kvjax.engine.engine.decode_and_sample", lambda *given, real=decode_and_sample: single.append(1) or real(*given))
    scheduler = Scheduler(engine, slots=4, steps_per_launch=4)
    scheduler.submit(asked([1, 2, 3], 12))
    finish(scheduler)
    assert (launched, len(single)) == ([4, 4], 3), "11 steps, and none too many"
    for wrong in (0, 17, 2.5):
        with pytest.raises(ValueError, match="steps_per_launch must be"):
            Scheduler(engine, steps_per_launch=wrong)
    group = DecodeGroup((None,) * 4, np.zeros(4, np.int32), SamplingRows.of([None] * 4))
    ends = Ends(np.zeros(4, np.int32), np.zeros((4, 1), np.int32))
    for launch, said in (
        (Launch(17, ends, 17), "at most 16, got 17"),
        (Launch(2, Ends(np.zeros(3, np.int32), ends.stop_ids), 2), "left of a launch must have a row for each of 4"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.step(StepPlan((dataclasses.replace(group, launch=launch),)))


def test_a_stop_string_ends_an_answer_in_the_middle_of_a_launch(speaker, launched):
    engine = engine_of(speaker)
    (whole,) = answers(engine, [asked("a tale", 30)])
    request = asked("a tale", 30, stop=(whole.text[10:13],))
    (alone,) = answers(engine, [request])
    launched.clear()
    (found,) = answers(engine, [request], 4)
    assert found == alone
    assert (found.finish_reason, found.text) == ("stop", whole.text[: whole.text.index(whole.text[10:13])])
    assert 4 in launched
    assert not engine.sequences


@pytest.mark.quick_but("reuse-few", "int8-few")
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(100, 350), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize(
    "options",
    [{"reuse": "any"}, {"policies": ("dense", "window:16+48", "quest:1"), "pages": 20}, {"cache_format": "int8"}],
    ids=["reuse", "policies, few pages", "int8"],
)
def test_histories_do_not_depend_on_the_steps_per_launch(speaker, options, seeds, monkeypatch):
    """Stop strings, penalties, several samples, preemption, prompts that come while others run. "auto" changes its mind
    at random."""
    monkeypatch.setattr(Engine, "on_cpu", False)
    monkeypatch.setattr(compilation, "PATIENCE", 3)
    engines, stopped = [engine_of(speaker, **options) for _ in range(4)], 0
    for seed in seeds:
        history = draw_history(engines[0], seed)
        expected, texts = run_history(engines[0], history, 1)
        stopped += sum(each.finish_reason == "stop" for each in expected)
        sizes = itertools.cycle(np.random.default_rng(seed).choice([1, SEVERAL], 50).tolist())
        monkeypatch.setattr(LaunchSize, "read", lambda size, steps, waited, sizes=sizes: size.auto and setattr(size, "steps", next(sizes)))
        for engine, steps in zip(engines[1:], (2, "auto", 16), strict=True):
            found, said = run_history(engine, history, steps)
            assert [dataclasses.replace(each, found_tokens=0, choices=()) for each in found] == [
                dataclasses.replace(each, found_tokens=0, choices=()) for each in expected
            ], f"history {seed}, {steps} steps"
            assert [[each.token_ids for each in one.choices] for one in found] == [
                [each.token_ids for each in one.choices] for one in expected
            ]
            assert said == texts
            assert not engine.sequences
    assert stopped > len(seeds)


def test_auto_launches_one_step_until_several_are_compiled(launched, monkeypatch):
    """Nobody waits for the program of several steps, which is compiled once it was missed often."""
    monkeypatch.setattr(Engine, "on_cpu", False)
    monkeypatch.setattr(compilation, "PATIENCE", 3)
    monkeypatch.setattr(LaunchSize, "read", lambda size, steps, waited: setattr(size, "steps", size.most))
    engine, request = engine_of(shallow(make_family("llama"))), asked([1, 2, 3], 60)
    asks, has_program = [], Engine.has_program

    def wait_at_last(engine, group):
        asks.append(has_program(engine, group))
        for each in engine._compile_ahead.running.values():
            each.result()
        return asks[-1]

    monkeypatch.setattr(Engine, "has_program", wait_at_last)
    (found,) = answers(engine, [request], "auto")
    assert not any(asks[:2])
    assert all(asks[3:])
    assert set(launched) == {SEVERAL}
    launched.clear()
    assert answers(engine, [request], "auto") == [found]
    assert set(launched) == {SEVERAL}
    launched.clear()
    assert answers(engine, [request]) == [found]
    assert not launched


def test_pages_for_several_steps_are_not_needed_for_one(launched):
    """A row that ends on its last page, though its launch would need another, which there is not."""
    engine = engine_of(shallow(make_family("llama")), pages=3)
    sampling = Sampling(20, temperature=1.0, stop_token_ids=(), logprobs=True)
    request = Request(list(range(1, 2 * PAGE - 8)), sampling)
    (whole,) = answers(engine, [request])
    held = engine.new_sequence()
    engine.reserve([held], PAGE)
    (request,) = stopping([request], [dataclasses.replace(whole, token_ids=whole.token_ids[:9])])
    (expected,) = answers(engine, [request])
    (found,) = answers(engine, [request], 16)
    engine.free(held)
    assert found == expected
    assert (found.finish_reason, len(found.token_ids) > 2, set(launched)) == ("stop", True, set())


@pytest.mark.long
def test_pages_that_are_kept_hold_what_their_tokens_say():
    """A row ends on the device in the first of two launches. Its last token, which was not written, would fill a
    page."""
    engines = [engine_of(make_family("llama"), pages=40, reuse="any") for _ in range(2)]
    prompt, tried = list(range(1, 2 * PAGE + 2)), 0
    for seed in range(8):
        drawn = asked(prompt, 60, temperature=1.0, seed=seed)
        (whole,) = answers(engine_of(make_family("llama")), [drawn])
        number = PAGE - 2
        if whole.token_ids[number] in whole.token_ids[:number]:
            continue
        sampling, found = dataclasses.replace(drawn.sampling, stop_token_ids=(whole.token_ids[number],)), []
        for engine, steps in zip(engines, (1, 16), strict=True):
            (completion,) = answers(engine, [dataclasses.replace(drawn, sampling=sampling)], steps)
            following = [*prompt, *completion.token_ids, *range(50, 60)]
            found.append((completion.token_ids, answers(engine, [asked(following, 4)])[0].logprobs))
        assert len(found[0][0]) + len(prompt) == 3 * PAGE
        assert found[0] == found[1]
        tried += 1
    assert tried > 2
