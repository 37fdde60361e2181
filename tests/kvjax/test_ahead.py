"""What follows a prefill is compiled in another thread, and the calls that come later find it."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from quick_cases import some_long
from tiny_models import make_family, shallow

import kvjax
from kvjax import Engine, Request, Sampling, Scheduler, compilation
from kvjax.compilation import CompileAhead
from kvjax.policies.decode import Window
from kvjax.policies.decode.base import Stateless
from kvjax.scheduler import scheduler as scheduler_module

PAGE, CHUNK, BUCKET = 16, 32, 3  # no other test has this bucket, so nothing is compiled yet
PROMPT = list(range(1, 2 * CHUNK + 3))


@pytest.fixture(autouse=True)
def slow_compiler(monkeypatch):
    """Small programs are compiled in no time."""
    monkeypatch.setattr(compilation, "SHORT", 0)


def complete(engine, *requests):
    scheduler = Scheduler(engine, slots=BUCKET)
    handles = [scheduler.submit(request) for request in requests]
    while not scheduler.idle:
        scheduler.step()
    return [handle.completion for handle in handles]


def is_step(key):
    """Whether a program is a step of these slots, not a chunk."""
    return key[1] == BUCKET


CASES = {
    "llama": ("llama", "dense", Sampling(max_new_tokens=3)),
    "an index": ("qwen3", "quest:1", Sampling(max_new_tokens=3, temperature=0.7)),
    "windows": ("gemma3_text", "dense", Sampling(max_new_tokens=3, repetition_penalty=1.2)),
    "recurrence": ("qwen3_5_text", "dense", Sampling(max_new_tokens=3)),
    "latents": ("deepseek_v32", None, Sampling(max_new_tokens=3, logprobs=True, top_logprobs=2)),
    "shared pages": ("shared", "window:8+24", Sampling(max_new_tokens=3)),
}


LONG = ("llama", "shared pages", "windows", "latents")
"""What these show, other cases and tests of this module show nearly as well."""


@pytest.mark.quick_but("recurrence")
@pytest.mark.parametrize("case", some_long(CASES, *LONG))
def test_what_follows_a_prefill_is_compiled_once_and_ahead(case, compiled):
    family, policy, sampling = CASES[case]
    engine = Engine(make_family(family), policy, pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    (done,) = complete(engine, Request(PROMPT, sampling))
    assert done.error is None
    assert len(done.token_ids) == 3
    assert compiled["decode_and_sample"] == compiled["sample_first"] == ["ahead"]


@pytest.mark.long
def test_a_first_prompt_of_one_chunk_compiles_everything_beside_its_own_program(compiled):
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    complete(engine, Request(PROMPT[:CHUNK], Sampling(max_new_tokens=2)))
    assert compiled["prefill_slice"] == compiled["decode_and_sample"] == ["ahead"]


def test_a_first_token_does_not_wait_until_the_step_after_it_is_compiled(compiled):
    """Its caller has it before the step's program is there."""
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    heard, ahead, wait = [], engine._compile_ahead, engine._compile_ahead.wait
    ahead.is_compiled = lambda key: False  # the compiler may be the faster one
    ahead.wait = lambda key: heard.extend(["wait"] if is_step(key) and key in ahead.running else []) or wait(key)
    scheduler = Scheduler(engine, slots=BUCKET, on_token=lambda *_: heard.append("token"))
    scheduler.submit(Request(PROMPT, Sampling(max_new_tokens=2)))
    while not scheduler.idle:
        scheduler.step()
    assert heard == ["token", "wait", "token"]


def test_a_step_of_other_tables_does_not_wait(compiled):
    """Neighbours decode with narrow tables while a longer prompt, whose tables are wider, is prefilled."""
    engine = Engine(shallow(make_family("llama")), pages=80, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    waited = []
    ahead, wait = engine._compile_ahead, engine._compile_ahead.wait
    ahead.wait = lambda key: waited.extend([(key in ahead.running, key[2])] if is_step(key) else []) or wait(key)
    scheduler = Scheduler(engine, slots=BUCKET, max_gap_ms=1e4)
    scheduler.submit(Request(PROMPT[:4], Sampling(max_new_tokens=24)))
    scheduler.step()
    scheduler.submit(Request([1] * 17 * PAGE, Sampling(max_new_tokens=3)))
    while not scheduler.idle:
        scheduler.step()
    assert {key for _, key in waited} == {16, 64}
    assert [key for found, key in waited if found] == [16, 64], "each once"
    assert compiled["decode_and_sample"] == ["ahead", "ahead"]


def test_tables_have_room_for_the_whole_answer(compiled):
    """No step waits for a program of wider tables in the middle of an answer."""
    engine = Engine(shallow(make_family("llama")), pages=80, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    prompt = [1] * (16 * PAGE - 3)
    (done,) = complete(engine, Request(prompt, Sampling(max_new_tokens=9)))
    assert len(done.token_ids) == 9
    assert compiled["decode_and_sample"] == ["ahead"]


def test_narrow_tables_whose_program_is_there_serve_until_they_are_nearly_full(compiled):
    """The program of wider ones is compiled beside the steps, and then taken."""
    engine = Engine(shallow(make_family("llama")), pages=80, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    complete(engine, Request(PROMPT, Sampling(max_new_tokens=3)))
    widths, run = [], engine._pool.run
    engine._pool.run = lambda step, static, inputs, **more: (
        widths.append(inputs.cache.page_tables["full"].shape[1]) or run(step, static, inputs, **more)
    )
    (done,) = complete(engine, Request(PROMPT, Sampling(max_new_tokens=300)))
    assert len(done.token_ids) == 300
    steps = widths[-299:]
    assert set(steps) == {16, 64}
    assert steps == sorted(steps)
    assert steps.count(16) >= 12 * PAGE - len(PROMPT) - 1, "three quarters of 16 pages"
    assert steps.count(16) < 16 * PAGE
    assert compiled["decode_and_sample"] == ["ahead", "ahead"]


def test_a_program_that_comes_from_the_cache_holds_nothing_up(compiled, monkeypatch):
    """Then the first chunk runs before anything else is traced."""
    monkeypatch.setattr(compilation, "SHORT", 60)
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    complete(engine, Request(PROMPT, Sampling(max_new_tokens=2)))
    assert (compiled["prefill_slice"], compiled["decode_and_sample"]) == (["ahead"], ["call"])


def test_what_follows_a_long_prompt_is_compiled_while_its_rest_is_prefilled(compiled, monkeypatch):
    """Its own program was there."""
    monkeypatch.setattr(scheduler_module, "LONG_REST", CHUNK)
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    prompt = [1] * (scheduler_module.AHEAD + 1) * CHUNK
    complete(engine, Request(prompt, Sampling(max_new_tokens=1)))
    assert not compiled["decode_and_sample"]
    complete(engine, Request(prompt, Sampling(max_new_tokens=2)))
    assert compiled["decode_and_sample"] == ["ahead"]


@pytest.mark.long
def test_other_samplings_compile_their_own(compiled):
    """The second request draws, which nobody could know when the first was prefilled."""
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    first = Request(PROMPT, Sampling(max_new_tokens=6))
    both = complete(engine, first, Request(PROMPT, Sampling(max_new_tokens=3, temperature=1.0)))
    assert all(done.error is None for done in both)
    assert compiled["decode_and_sample"] == compiled["sample_first"] == ["ahead", "ahead"]
    assert complete(engine, first)[0].token_ids == both[0].token_ids


CONTEXTS = {
    "forced path": lambda: kvjax.dispatch("xla"),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "device": lambda: jax.default_device(jax.devices()[-1]),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_callers_contexts_hold(context, compiled):
    step = jax.jit(lambda x: x @ x)
    ahead = CompileAhead()
    with CONTEXTS[context]():
        ahead.begin("key", lambda: [functools.partial(step, jnp.zeros((3, 3)))])
        ahead.wait("key")
        step(jnp.ones((3, 3)))
    assert "key" in ahead
    assert compiled["<lambda>"] == ["ahead"]


@dataclasses.dataclass(frozen=True)
class Locks(Stateless):
    """A policy that takes a lock which the caller of `step` holds. Another thread would wait for ever."""

    lock: object

    def select(self, query, layer, ctx, state):
        assert self.lock.acquire(timeout=5)
        self.lock.release()
        return Window(0, 8).select(query, layer, ctx, state)


@pytest.mark.long
def test_code_of_policies_runs_in_the_callers_thread(compiled):
    lock = threading.RLock()
    engine = Engine(shallow(make_family("llama")), Locks(lock), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    with lock:
        (done,) = complete(engine, Request(PROMPT, Sampling(max_new_tokens=3)))
    assert done.error is None
    assert compiled["decode_and_sample"] == ["ahead"]


@pytest.mark.long
def test_weights_that_are_bound_to_a_device(compiled, monkeypatch):
    model = shallow(make_family("llama"))
    model = type(model)(model.decoder, jax.device_put(model.params, jax.devices()[0]))
    engine = Engine(model, pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    monkeypatch.setattr(scheduler_module, "LONG_REST", CHUNK)
    (done,) = complete(engine, Request([1] * 6 * CHUNK, Sampling(max_new_tokens=2)))
    assert done.error is None
    assert compiled["decode_and_sample"] == compiled["sample_first"] == ["ahead"]


def test_no_other_thread_can_be_started(compiled, monkeypatch):
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", refuse)
    engine = Engine(shallow(make_family("llama")), pages=40, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(BUCKET,))
    (done,) = complete(engine, Request(PROMPT, Sampling(max_new_tokens=2)))
    assert done.error is None
    assert compiled["decode_and_sample"] == ["call"]


def test_what_cannot_be_compiled_ahead_is_reported_by_the_call():
    def fails(x):
        raise NotImplementedError("not for this shape")

    ahead = CompileAhead()
    ahead.begin("key", lambda: [functools.partial(jax.jit(fails), jnp.zeros(3))])
    ahead.wait("key")
    ahead.begin("none", lambda: fails(3))
    ahead.wait("none")
    with pytest.raises(NotImplementedError, match="this shape"):
        jax.jit(fails)(jnp.zeros(3))
