"""Replicas: several engines of one process answer one stream of requests, each request once and with the bits of one
engine."""

import collections
import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from tiny_models import VOCAB, make_model

import kvjax
from kvjax import Engine, Request, Sampling, Scheduler
from kvjax.policies.decode import TopBlocks
from pallas_kernels.core.dispatch import forced_path

pytestmark = pytest.mark.bits

PATH = os.pathsep.join(sys.path)
SIZES = {"pages": 24, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (2,)}
POLICY = TopBlocks(k=1, sink=1, local=1, block_size=16)


@pytest.fixture(scope="module")
def small():
    """One layer, so that programs for many devices compile soon."""
    return make_model(num_layers=1, num_kv_heads=4)


@pytest.fixture(scope="module")
def pair(small):
    """Two engines on one device each."""
    return kvjax.replicas(small, POLICY, data=2, **SIZES)


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """Whatever a test does, threads end and engines have their pages back."""
    yield
    assert not [each for each in threading.enumerate() if each.name.startswith("kvjax replica")]
    for engine in request.getfixturevalue("pair") if "pair" in request.fixturenames else ():
        assert_free(engine)


def assert_free(engine):
    assert not engine.sequences
    assert all(each.free == each.total for each in engine.allocators.values())
    assert engine.guard.stopping is None


def requests_of(text, count=9, *, mixed=False):
    """Of different lengths; some begin the same way. All fit into a page table of one width, so that few programs are
    compiled. mixed: some draw at random."""
    return [
        Request(
            np.array(text[number % 3 : number % 3 + 16 + 4 * number]),
            Sampling(
                max_new_tokens=3 + number, logprobs=True, ignore_eos=True, temperature=mixed * number % 2, n=1 + mixed * (number == 4)
            ),
            id=number,
        )
        for number in range(count)
    ]


def endless(text, taken=None):
    """Requests without end. taken: gets the number of each that was taken."""
    for number in itertools.count():
        if taken is not None:
            taken.append(number)
        yield Request(tuple(text[: 20 + number % 5]), Sampling(max_new_tokens=4, ignore_eos=True), id=number)


def answers(engines, requests, **options):
    """What each request was answered, by its id. Every request must be answered once."""
    found = [(request.id, completion) for request, completion in kvjax.run(engines, requests, slots=2, **options)]
    assert sorted(number for number, _ in found) == sorted(request.id for request in requests)
    return {number: bits(completion) for number, completion in found}


def bits(completion):
    assert completion.error is None
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize(
    ("data", "tensor", "context"), [(2, 2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((4, 1, 1), (2, 1, 2)))]
)
def test_bits_are_those_of_one_engine_whichever_replica_answers(data, tensor, context, small, text):
    engines = kvjax.replicas(small, POLICY, data=data, tensor=tensor, context=context, **SIZES)
    used = [device for engine in engines for device in engine.mesh.devices.flat]
    assert used == jax.devices()[: data * tensor * context]
    one = Engine(small, POLICY, mesh=kvjax.mesh(tensor=tensor, context=context), **SIZES)
    expected = answers(one, requests_of(text))
    assert answers(engines, requests_of(text)) == expected
    assert all(engine.last_reads is not None for engine in engines), "a replica had nothing to do"
    for engine in engines[1:]:  # each request by each replica
        assert answers(engine, requests_of(text)) == expected
    for engine in engines:
        assert_free(engine)


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["greedy", "mixed"])
def test_bits_on_one_device_are_those_without_a_mesh(small, pair, text, mixed):
    one = Engine(small, POLICY, **SIZES)
    assert answers(pair, requests_of(text, mixed=mixed)) == answers(one, requests_of(text, mixed=mixed))


def test_a_request_that_cannot_run_has_an_error_of_its_own(pair, text):
    good = requests_of(text, 4)
    bad = [Request((VOCAB,), Sampling(), id="token"), Request((1,) * 5000, Sampling(), id="long"), Request("text", Sampling(), id="text")]
    found = {request.id: completion for request, completion in kvjax.run(pair, [*good[:2], *bad, *good[2:]], slots=2)}
    assert {number for number, completion in found.items() if completion.error is not None} == {"token", "long", "text"}
    assert {number: bits(found[number]) for number in range(4)} == answers(pair[0], good)


def test_requests_are_taken_when_a_slot_is_free(pair, text):
    taken = []
    stream = kvjax.run(pair, endless(text, taken), slots=2)
    assert not taken
    for given in range(1, 13):
        next(stream)
        assert len(taken) - given <= 2 * 2
        time.sleep(0.01)  # the replicas go on meanwhile, and nothing is taken for them
        assert len(taken) - given <= 2 * 2
    stream.close()
    assert list(kvjax.run(pair, [])) == []


@pytest.fixture
def taken(pair, monkeypatch):
    """How many requests each replica has taken."""
    counts, submit = dict.fromkeys(pair, 0), Scheduler.submit

    def counted(self, request):
        counts[self.engine] += 1
        return submit(self, request)

    monkeypatch.setattr(Scheduler, "submit", counted)
    return counts


def test_few_requests_are_dealt_out(pair, text, taken):
    assert len(answers(pair, requests_of(text, 2))) == 2
    assert list(taken.values()) == [1, 1]


def test_the_replica_that_is_ahead_takes_more(pair, text, taken, monkeypatch):
    step = Engine.step

    def slow(self, plan):
        time.sleep(0.03 * (self is pair[1]))
        return step(self, plan)

    monkeypatch.setattr(Engine, "step", slow)
    found = answers(pair, list(itertools.islice(endless(text), 12)))
    assert len(found) == sum(taken.values()) == 12
    assert taken[pair[0]] > taken[pair[1]] > 0


def test_functions_and_iterable_run_in_the_callers_thread(pair, text):
    threads, told, prefilled = set(), {}, []

    def source():
        threads.add(threading.get_ident())
        yield from requests_of(text, 4)

    def on_token(request, token, piece):
        threads.add(threading.get_ident())
        told.setdefault(request.id, []).append(token)

    def on_prefill(tokens):
        threads.add(threading.get_ident())
        prefilled.append(tokens)

    functions = {"on_token": on_token, "on_prefill": on_prefill}
    found = {request.id: completion for request, completion in kvjax.run(pair, source(), slots=2, **functions)}
    assert threads == {threading.get_ident()}
    assert told == {number: list(completion.token_ids) for number, completion in found.items()}
    assert sum(prefilled) == sum(completion.prompt_tokens for completion in found.values())


def test_a_forced_path_holds_for_all_replicas(pair, text, monkeypatch):
    paths = {}

    def noted(self):
        paths[self.engine] = forced_path()
        raise Planted

    monkeypatch.setattr(Scheduler, "step", noted)
    for expected in ("xla", None):
        with kvjax.dispatch("xla") if expected else contextlib.nullcontext(), pytest.raises(Planted):
            list(kvjax.run(pair[::-1] if expected else pair, requests_of(text, 1)))
    assert list(paths.values()) == ["xla", None]


class Planted(Exception):
    pass


def fails(*_):
    raise Planted


@contextlib.contextmanager
def works_afterwards(pair, text):
    """What happens inside leaves the engines as they were."""
    expected = answers(pair[0], requests_of(text, 3))
    yield
    for engine in pair:
        assert_free(engine)
    assert answers(pair, requests_of(text, 3)) == expected


@pytest.mark.parametrize("name", ["on_token", "on_prefill"])
def test_an_error_of_a_function_ends_all_replicas(name, pair, text):
    with works_afterwards(pair, text), pytest.raises(Planted):
        list(kvjax.run(pair, endless(text), slots=2, **{name: fails}))


def test_an_error_of_the_iterable_ends_all_replicas(pair, text):
    def source():
        yield from requests_of(text, 3)
        raise Planted

    with works_afterwards(pair, text), pytest.raises(Planted):
        list(kvjax.run(pair, source(), slots=2))
    with works_afterwards(pair, text), pytest.raises(TypeError, match=r"submit takes a kvjax\.Request"):
        list(kvjax.run(pair, ["no request"], slots=2))


def test_an_error_of_one_replica_ends_all_and_names_it(pair, text, monkeypatch):
    step, calls = Engine.step, itertools.count()

    def failing(self, plan):
        if self is pair[1] and next(calls) > 3:
            raise Planted
        return step(self, plan)

    with works_afterwards(pair, text):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", failing)
            with pytest.raises(Planted) as raised:
                list(kvjax.run(pair, endless(text), slots=2))
        assert raised.value.__notes__ == ["in replica 1, counted from 0"]


def test_what_was_answered_before_an_error_is_not_lost(pair, text, monkeypatch):
    step, put = Scheduler.step, []

    def failing(self):
        if self.engine is pair[1]:
            while len(put) < 2 and threading.main_thread().is_alive():
                time.sleep(0.001)
            raise Planted
        finished = step(self)
        put.extend(finished)
        return finished

    monkeypatch.setattr(Scheduler, "step", failing)
    stream, found = kvjax.run(pair, requests_of(text), slots=2), []
    with pytest.raises(Planted):
        found.extend(stream)
    assert len(found) >= 2
    monkeypatch.undo()
    assert {request.id: bits(completion) for request, completion in found}.items() <= answers(pair, requests_of(text)).items()


@pytest.mark.parametrize("defect", ["drops", "repeats"])
def test_a_request_that_is_dropped_or_answered_twice_is_an_error(defect, pair, text, monkeypatch):
    step, done = Scheduler.step, []

    def defective(self):
        finished = step(self)
        if self.engine is pair[1] and finished and not done:
            done.append(defect)
            return finished[1:] if defect == "drops" else [*finished, finished[0]]
        return finished

    monkeypatch.setattr(Scheduler, "step", defective)
    with pytest.raises(RuntimeError, match=r"replica 1 has (nothing to do|answered a request that it does not have)"):
        list(kvjax.run(pair, requests_of(text), slots=2))
    assert done


def test_a_generator_that_is_closed_stops_the_replicas(pair, text):
    with works_afterwards(pair, text):
        stream = kvjax.run(pair, endless(text), slots=2)
        next(stream)
        stream.close()
    with works_afterwards(pair, text):  # nobody holds it any more
        next(kvjax.run(pair, endless(text), slots=2))


@contextlib.contextmanager
def pressed_after(seconds):
    """Another thread presses Ctrl-C."""
    thread = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def interruptible():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_ctrl_c_stops_the_replicas(pair, text, interruptible):
    for seconds in (0.0, 0.02, 0.05, 0.1, 0.13):
        with works_afterwards(pair, text), pytest.raises(KeyboardInterrupt), pressed_after(seconds):
            collections.deque(kvjax.run(pair, endless(text), slots=2), maxlen=0)


def test_ctrl_c_does_not_wait_for_the_rest_of_a_prompt(pair, text, monkeypatch, interruptible):
    step, chunks = Engine.step, []

    def slow(self, plan):
        chunks.append(self)
        time.sleep(0.05)
        return step(self, plan)

    monkeypatch.setattr(Engine, "step", slow)
    long = [Request(tuple(text)[:290], Sampling(max_new_tokens=1), id=number) for number in range(4)]
    with pytest.raises(KeyboardInterrupt), pressed_after(0.12):
        list(kvjax.run(pair, long, slots=2))
    assert 0 < len(chunks) < 2 * 10, "the prompts have ten chunks each"


def test_threads_end_with_the_process(pair, text, monkeypatch):
    """Python waits for them when the main thread has ended, and nobody closes the generator."""
    stream = kvjax.run(pair, endless(text), slots=2)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr("kvjax.scheduler.data_parallel.threading.main_thread", lambda: threading.Thread())
        for thread in threading.enumerate():
            if thread.name.startswith("kvjax replica"):
                thread.join(5)
                assert not thread.is_alive()
    stream.close()


@pytest.mark.long
def test_a_process_ends_that_holds_a_generator():
    code = """
import itertools, kvjax
from tiny_models import make_model
engines = kvjax.replicas(make_model(num_layers=1), "dense", data=2, pages=24, page_size=16, prefill_chunk=32, batch_buckets=(2,))
requests = (kvjax.Request((1,) * 20, kvjax.Sampling(max_new_tokens=4, ignore_eos=True)) for _ in itertools.count())
stream = kvjax.run(engines, requests, slots=2)
next(stream)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": PATH})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_generate_takes_replicas(pair, text):
    prompts = [text[:30], text[5:60], text[:30], text[2:25]]
    settings = {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True, "logprobs": True, "details": True}
    one, several = (kvjax.generate(each, prompts, **settings) for each in (pair[0], pair))
    assert [bits(each) for each in several] == [bits(each) for each in one]
    assert several[0].token_ids != several[2].token_ids, "equal prompts are different samples"
    with pytest.raises(ValueError, match="Engine\\(prefill="):
        kvjax.generate(pair, prompts, prefill="dense")


def test_a_model_on_a_mesh_goes_from_device_to_device(small, text):
    placed = Engine(small, POLICY, mesh=kvjax.mesh(tensor=2), **SIZES)
    engines = kvjax.replicas(placed.model, POLICY, data=2, tensor=2, **SIZES)
    assert answers(engines, requests_of(text, 5)) == answers(placed, requests_of(text, 5))
    with pytest.raises(ValueError, match="on a mesh of tensor=2 and context=1, and this one is of tensor=1 and context=1"):
        kvjax.replicas(placed.model, POLICY, data=2, **SIZES)


def test_weights_on_the_device_of_a_replica_are_not_copied(small, pair):
    for mine, given in zip(jax.tree.leaves(pair[0].model.params), jax.tree.leaves(small.params), strict=True):
        assert mine.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


def test_each_replica_has_a_tokenizer_of_its_own(small, pair, speaker):
    """The caller may use theirs meanwhile, with other settings."""
    engines = kvjax.replicas(dataclasses.replace(small, tokenizer=speaker.tokenizer), POLICY, data=2, **SIZES)
    ids = {id(each.tokenizer.backend_tokenizer) for each in (speaker, *(engine.model for engine in engines))}
    assert len(ids) == 3
    assert engines[1].model.tokenizer("Call me")["input_ids"] == speaker.tokenizer("Call me")["input_ids"]
    long = [Request("x" * 150, Sampling(max_new_tokens=2, stop="q"), id=number) for number in range(8)]

    def source():
        for request in long:
            speaker.tokenizer("y" * 100, truncation=True, max_length=5 + request.id)
            yield request

    assert [completion.prompt_tokens for _, completion in kvjax.run(engines, source(), slots=2)] == [150] * 8


def test_each_replica_keeps_pages_of_its_own(small, pair, text):
    settings = Sampling(max_new_tokens=2, logprobs=True, ignore_eos=True)
    many = [Request(tuple(text[15 * number :][:40]), settings, id=number) for number in range(17)]
    engines = kvjax.replicas(small, POLICY, data=2, **SIZES, host_bytes=2**20)
    expected = answers(pair, many)
    assert answers(engines, many) == expected
    for engine in engines:
        assert answers(engine, many) == answers(engine, many) == expected
        assert engine.stats().found_tokens > 0
        assert engine.stats().host.hits > 0, "the pool does not hold all"


def test_pools_fit_the_memory_of_their_own_devices(small, monkeypatch):
    page = Engine(small, POLICY, **SIZES).memory_plan().page_bytes
    monkeypatch.setattr("kvjax.engine.memory.free_bytes", lambda device: (10 + device.id) * page)
    engines = kvjax.replicas(small, POLICY, data=2, tensor=2, **SIZES | {"pages": None})
    assert [engine.allocators["full"].total for engine in engines] == [20, 24]  # half of the bytes of a page on each


def test_engines_that_differ_are_refused(small, pair, model):
    other = {"devices": jax.devices()[4:], "data": 1}
    for name, changed in {
        "policy": kvjax.replicas(small, "dense", **other, **SIZES),
        "policies": kvjax.replicas(small, POLICY, policies="dense", **other, **SIZES),
        "prefill": kvjax.replicas(small, POLICY, prefill="window:16+40", **other, **SIZES),
        "page_size": kvjax.replicas(small, POLICY, **other, **SIZES | {"page_size": 32}),
        "prefill_chunk": kvjax.replicas(small, POLICY, **other, **SIZES | {"prefill_chunk": 64}),
        "batch_buckets": kvjax.replicas(small, POLICY, **other, **SIZES | {"batch_buckets": (4,)}),
        "reuse": kvjax.replicas(small, POLICY, **other, **SIZES, reuse=True),
        "mesh": kvjax.replicas(small, POLICY, **other, tensor=2, **SIZES),
        "model": kvjax.replicas(model, POLICY, **other, **SIZES),
    }.items():
        with pytest.raises(ValueError, match=f"replicas must be alike.*: {name} is .* in engine 0 and .* in engine 2"):
            list(kvjax.run([*pair, *changed], []))
    same = kvjax.replicas(small, POLICY, **other, **SIZES)
    assert list(kvjax.run([*pair, *same], [])) == []


def test_what_is_no_list_of_engines_is_refused(small, pair, text):
    for given in ([], "engine", [pair[0], small], small):
        with pytest.raises(TypeError, match="run needs an engine, or a list of replicas"):
            list(kvjax.run(given, []))
    with pytest.raises(ValueError, match="engines 0 and 1 are both on device"):
        list(kvjax.run([pair[0], pair[0]], []))
    with pytest.raises(ValueError, match="3 slots are more than the largest batch bucket, 2"):
        list(kvjax.run(pair, [], slots=3))


def test_too_few_devices_and_other_wrong_sizes_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match="data 3 x tensor 2 x context 2 needs 12 devices, and there are 8"):
        kvjax.replicas(small, data=3, tensor=2, context=2)
    with pytest.raises(ValueError, match=r"data must be .*got 0"):
        kvjax.replicas(small, data=0)
    with pytest.raises(ValueError, match="in place of mesh"):
        kvjax.replicas(small, data=2, mesh=kvjax.mesh())
    with pytest.raises(ValueError, match="each replica would need a disk of its own"):
        kvjax.replicas(small, data=2, disk=tmp_path / "pages", disk_bytes=2**20)
    with pytest.raises(TypeError, match="no argument 'page_sizes'"):
        kvjax.replicas(small, data=2, page_sizes=16)
