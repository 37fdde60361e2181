"""The scheduler: who comes first, what is freed, and what fixes bits."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from scheduling import PAGES, alone, asked, assert_nothing_is_left, finish, make_engine, pages_held, state_of, until_preempted

from kvjax import Engine, OutOfPages, Sampling, Scheduler
from kvjax.scheduler import scheduler as module
from kvjax.scheduler.batch import Batch, Sample, read

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def engine(speaker):
    return make_engine(speaker)


@pytest.fixture(autouse=True)
def _nothing_is_left(engine):
    yield
    assert_nothing_is_left(engine)


@pytest.fixture
def only(engine):
    """A function that leaves so many pages free, by holding the others."""
    held = []

    def leave(pages):
        held.append(engine.new_sequence())
        engine.reserve(held, (PAGES - pages) * 128)

    yield leave
    for each in held:
        engine.free(each)


# Order


def test_a_higher_priority_comes_first_and_within_one_who_came_first(engine):
    scheduler = Scheduler(engine, slots=1)
    handles = [scheduler.submit(asked(str(number), 2, priority=priority)) for number, priority in enumerate((0, -1, 5, 0, 5))]
    assert finish(scheduler) == [handles[number] for number in (2, 4, 0, 3, 1)]


def test_those_that_run_are_not_stopped_for_a_higher_priority(engine):
    scheduler = Scheduler(engine, slots=1)
    first = scheduler.submit(asked("first", 4))
    scheduler.step()
    later = scheduler.submit(asked("later", 2, priority=9))
    assert (finish(scheduler), scheduler.preemptions) == ([first, later], 0)


def test_back_pressure_is_visible(engine):
    scheduler = Scheduler(engine, slots=2)
    assert scheduler.has_room
    assert scheduler.idle
    handles = [scheduler.submit(asked("x" * 10, 3)) for _ in range(5)]
    assert (scheduler.waiting, scheduler.running, scheduler.has_room, scheduler.idle) == (5, 0, False, False)
    assert "waiting" in repr(handles[0])
    scheduler.step()
    assert (scheduler.waiting, scheduler.running) == (3, 2)
    assert "running" in repr(handles[0])
    finish(scheduler)
    assert scheduler.has_room
    assert "length" in repr(handles[0])
    assert scheduler.step() == []


def test_a_request_is_decoded_by_its_own_policy_as_alone(engine):
    long = "a tale of ships and the sea. " * 20
    requests = [asked(long, 5, policy=policy) for policy in ("top:2", None, "quest:2", "window:1+8")]
    scheduler = Scheduler(engine, slots=4, policy="quest:2")
    handles = [scheduler.submit(each) for each in requests]
    finish(scheduler)
    for handle, request in zip(handles, requests, strict=True):
        assert handle.completion == alone(engine, dataclasses.replace(request, policy=request.policy or "quest:2"))
    assert len({handle.completion.keys_per_step for handle in handles}) == 3


def test_auto_chooses_at_admission_by_the_request_alone(engine, monkeypatch):
    told = []

    def chosen(self, policy, lengths):
        told.append(list(lengths))
        return engine.declared("top:2" if max(lengths) > 100 else "dense")

    monkeypatch.setattr(Engine, "chosen", chosen)
    scheduler = Scheduler(engine, slots=3)
    handles = [scheduler.submit(asked("x" * length, 4)) for length in (90, 110, 10)]
    scheduler.step()
    assert [str(state_of(scheduler, handle).policy) for handle in handles] == ["dense", "top:2", "dense"]
    assert told[:1] == [[93] * 3]
    assert [93] * 3 in told
    assert [113] * 3 in told
    finish(scheduler)


# Cancelling


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_frees_its_pages_at_once_and_keeps_its_text(engine, steps):
    whole = alone(engine, asked("Call me", 9))
    heard = []
    scheduler = Scheduler(engine, slots=2, on_token=lambda request, token, text: heard.append(token))
    handle, other = scheduler.submit(asked("Call me", 9)), scheduler.submit(asked("other", 9))
    for _ in range(steps):
        scheduler.step()
    held = pages_held(engine)
    heard.clear()
    scheduler.cancel(handle)
    assert pages_held(engine) == max(0, held - 1)
    found = handle.completion
    assert (found.finish_reason, found.error) == ("cancelled", None)
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    assert len(found.token_ids) == steps
    assert found.text == engine.model.tokenizer.decode(found.token_ids)
    scheduler.cancel(handle)
    assert handle not in finish(scheduler)
    assert handle.completion is found
    assert tuple(heard) == other.completion.token_ids[steps:], "nothing is heard of a cancelled request"


def test_the_text_so_far_has_what_was_held_back_for_a_stop_string(engine):
    whole = alone(engine, asked("Call me", 9))
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(asked("Call me", 9, stop=whole.text[2:6] + "never"))
    for _ in range(4):
        scheduler.step()
    scheduler.cancel(handle)
    assert handle.completion.text == whole.text[:4]


def test_texts_are_left_out_for_those_who_read_ids(engine):
    heard = []
    scheduler = Scheduler(engine, slots=2, texts=False, on_token=lambda *event: heard.append(event))
    whole = alone(engine, asked("Call me", 20))
    requests = [without_logprobs(asked("Call me", 20, stop=stop)) for stop in ((), (whole.text[2:6],))]
    plain, stopped = map(scheduler.submit, requests)
    while None in (plain.completion, stopped.completion):
        scheduler.step()
    assert (plain.completion.token_ids, plain.completion.text) == (whole.token_ids, "")
    assert (stopped.completion.finish_reason, stopped.completion.text) == ("stop", whole.text[:2])
    assert "".join(piece for *_, piece in heard) == whole.text[:2]
    for handle in (plain, stopped):  # once the second has ended, the tokens of the first are put aside in each step, and heard all the same
        assert tuple(token for request, token, _ in heard if request is handle.request) == handle.completion.token_ids


def test_a_prompt_is_cancelled_after_a_chunk(engine):
    """A step ends between two chunks, so the slot and the pages of a long prompt are free after one, and the next
    request gets them."""
    scheduler = Scheduler(engine, slots=1)
    long, other = scheduler.submit(asked("a" * 900, 3)), scheduler.submit(asked("other", 3))
    for chunks in (1, 2):
        assert scheduler.step() == []
        assert scheduler._prefilling.handle is long
        assert scheduler._prefilling.sequence.length == chunks * engine.prefill_chunk
    scheduler.cancel(long)
    assert (pages_held(engine), scheduler.running) == (0, 0)
    assert finish(scheduler) == [other]
    assert other.completion == alone(engine, other.request, slots=1)


def test_the_host_is_one_chunk_ahead_of_the_device(engine):
    """Else a cancelled prompt's chunks would all be on the device already."""
    waits, scheduler = [], Scheduler(engine, slots=1)
    scheduler.submit(asked("a" * 900, 3))
    scheduler.step()
    assert engine._prefiller._behind is not None
    for chunk in range(3):
        engine._prefiller._behind = SimpleNamespace(block_until_ready=lambda chunk=chunk: waits.append(chunk))
        scheduler.step()
    assert waits == [0, 1, 2]
    finish(scheduler)
    assert engine._prefiller._behind is None


def test_cancelled_between_slices_of_a_chunk(engine):
    scheduler = Scheduler(engine, slots=3, max_gap_ms=1e-6)
    neighbour = scheduler.submit(asked("neighbour", 12))
    scheduler.step()
    handle = scheduler.submit(asked("a" * 300, 3))
    scheduler.step()
    assert scheduler._prefilling.handle is handle
    scheduler.cancel(handle)
    assert (scheduler._prefilling, pages_held(engine), engine._runs) == (None, 1, {})
    assert (handle.completion.finish_reason, handle.completion.prompt_tokens) == ("cancelled", 300)
    finish(scheduler)
    assert neighbour.completion == alone(engine, neighbour.request)


@pytest.mark.long
def test_cancelled_in_the_middle_of_a_chunks_slices(model_factory, speaker, engine):
    model = model_factory(num_layers=6, eos_token_ids=(95,))
    model.tokenizer = speaker.tokenizer
    deep = Engine(model, pages=16, page_size=128, prefill_chunk=128, batch_buckets=(4,))
    assert len(deep._prefiller.slices) == 2
    scheduler = Scheduler(deep, slots=3, max_gap_ms=1e-6)
    neighbour = scheduler.submit(asked("neighbour", 12))
    scheduler.step()
    handle = scheduler.submit(asked("a" * 200, 3))
    scheduler.step()
    assert list(deep._runs) == [state_of(scheduler, handle).sequence]
    scheduler.cancel(handle)
    assert (deep._runs, len(deep.sequences)) == ({}, 1)
    again = scheduler.submit(handle.request)
    finish(scheduler)
    assert (deep.allocators["full"].free, deep.sequences) == (16, set())
    for each in (neighbour, again):
        assert each.completion == alone(deep, each.request), "slices between steps give the bits of whole chunks"


def test_cancelled_while_suspended(engine, only):
    only(3)
    scheduler = Scheduler(engine, slots=2)
    first, second = scheduler.submit(asked("a" * 126, 9)), scheduler.submit(asked("b" * 127, 9))
    until_preempted(scheduler)
    (sample,) = scheduler._waiting
    assert (sample.handle, engine.suspended.usage()["host_pages"]) == (second, 0), "limits do not count it"
    assert sample.sequence.suspended["full"]
    scheduler.cancel(second)
    assert second.completion.finish_reason == "cancelled"
    assert second.completion.token_ids
    with pytest.raises(KeyError):
        engine.suspended.get(sample.sequence)
    finish(scheduler)
    assert first.completion == alone(engine, first.request)


@pytest.mark.parametrize("steps", [1, 2])
def test_cancelled_with_some_samples_started(engine, steps):
    scheduler = Scheduler(engine, slots=2)
    scheduler.submit(asked("Call me", 4, n=3, temperature=1.0))
    finish(scheduler)  # first tokens do not wait while their programs are compiled
    handle = scheduler.submit(asked("Call me", 4, n=3, temperature=1.0))
    for _ in range(steps):
        scheduler.step()
    assert len(state_of(scheduler, handle).samples) == 2
    scheduler.cancel(handle)
    assert handle.completion.finish_reason == "cancelled"
    assert [len(each.token_ids) for each in handle.completion.choices] == [steps] * 2
    assert scheduler.idle


def test_one_finished_sample_does_not_make_a_cancelled_request_a_finished_one(engine):
    scheduler = Scheduler(engine, slots=1)
    handle = scheduler.submit(asked("Call me", 3, n=2, temperature=1.0))
    while len(state_of(scheduler, handle).samples) < 2:
        scheduler.step()
    scheduler.cancel(handle)
    assert handle.completion.finish_reason == "cancelled"
    assert [each.finish_reason for each in handle.completion.choices] == ["length", "cancelled"]


def test_close_cancels_everything(engine):
    scheduler = Scheduler(engine, slots=2)
    handles = [scheduler.submit(asked("x" * length, 9, n=n)) for length, n in ((5, 1), (6, 2), (7, 1))]
    scheduler.step()
    scheduler.close()
    assert {handle.completion.finish_reason for handle in handles} == {"cancelled"}
    assert scheduler.idle
    after = scheduler.submit(asked("after", 3))
    assert finish(scheduler) == [after], "it may be used again"


# First tokens


def test_no_prompt_waits_for_the_first_token_of_another(engine, monkeypatch):
    """Everything that one step launches is on its way before anything of it is read."""
    events, run_plan, read_one = [], Engine.step, module.read

    def step(self, plan):
        events.extend(["chunk"] * len(plan.chunks) + ["step"] * len(plan.decodes))
        return run_plan(self, plan)

    def read(step, *, listening):
        events.append("first" if step.active is None else "read")
        return read_one(step, listening=listening)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(module, "read", read)
    scheduler = Scheduler(engine, slots=4)
    handles = [scheduler.submit(asked(name, count)) for name, count in (("a", 4), ("b" * 200, 1), ("c", 3))]
    assert scheduler.step() == []  # the second prompt has more than a chunk
    assert events == ["chunk"] * 2
    assert scheduler.step() == [handles[1]]
    assert events == [*["chunk"] * 4, "step", "first", "first", "first"]
    events.clear()
    assert scheduler.step() == []
    assert events == ["step", "read"]
    finish(scheduler)
    assert [handle.completion for handle in handles] == [alone(engine, handle.request) for handle in handles]


def test_a_request_of_one_token_takes_a_slot_until_that_is_read(engine):
    scheduler = Scheduler(engine, slots=2)
    handles = [scheduler.submit(asked(name, 1)) for name in "abc"]
    assert scheduler.step() == handles[:2]
    assert (scheduler.running, scheduler.waiting, scheduler.idle) == (0, 1, False)
    assert finish(scheduler) == handles[2:]
    assert [handle.completion for handle in handles] == [alone(engine, handle.request) for handle in handles]


@pytest.mark.parametrize("count", [5, 1])
def test_cancelled_before_its_first_token_is_read(engine, count):
    scheduler = Scheduler(engine, slots=4, max_gap_ms=1e4)
    other = scheduler.submit(asked("a", 30))
    scheduler.step()
    handle = scheduler.submit(asked("b" * 200, count))
    while not handle.started:
        scheduler.step()
    assert state_of(scheduler, handle).samples[0].ids == []
    scheduler.cancel(handle)
    assert (handle.completion.finish_reason, handle.completion.token_ids) == ("cancelled", ())
    assert finish(scheduler) == [other]
    assert other.completion == alone(engine, other.request)


# What is kept of a token


@pytest.mark.long
def test_what_is_read_is_counted_the_same_whatever_is_kept_of_a_token(engine):
    """Samples of which nothing but ids is kept take their tokens together. Others take them one by one, and so do all
    as long as one of them keeps more, or somebody listens."""
    jobs = (("a", 9), ("b" * 130, 17), ("cd", 4), ("e" * 90, 30), ("f", 2), ("g", 12))
    plain = [asked(name, count, policy=policy, temperature=0.9, seed=count) for policy in ("dense", "top:2") for name, count in jobs]
    expected = [alone(engine, request) for request in plain]
    stop = expected[1].token_ids[5]
    quiet = [dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, logprobs=False)) for each in plain]
    quiet[1] = dataclasses.replace(quiet[1], sampling=dataclasses.replace(quiet[1].sampling, stop_token_ids=(stop,)))
    expected[1] = alone(engine, dataclasses.replace(plain[1], sampling=dataclasses.replace(plain[1].sampling, stop_token_ids=(stop,))))

    def counted(completion):
        return completion.token_ids, completion.finish_reason, completion.blocks_per_step, completion.keys_per_step

    for requests, listens in ((quiet, False), (quiet, True), ([*quiet[:5], plain[5], *quiet[6:]], False)):
        scheduler = Scheduler(engine, slots=4, on_token=(lambda *_: None) if listens else None)
        handles = [scheduler.submit(request) for request in requests]
        finish(scheduler)
        assert [counted(handle.completion) for handle in handles] == [counted(completion) for completion in expected]


def without_logprobs(request):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=False))


def test_cancelled_where_only_ids_are_kept(engine):
    request = without_logprobs(asked("a", 30))
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(request)
    for _ in range(6):
        scheduler.step()
    scheduler.cancel(handle)
    found, whole = handle.completion, alone(engine, request)
    assert (found.finish_reason, found.token_ids, found.text) == ("cancelled", whole.token_ids[:6], whole.text[: len(found.text)])
    assert 0 < found.keys_per_step < whole.keys_per_step


@pytest.mark.long
def test_suspended_where_only_ids_are_kept(engine, only):
    requests = [without_logprobs(asked(name * 120, 20)) for name in "ab"]
    expected = [alone(engine, request) for request in requests]
    only(3)
    scheduler = Scheduler(engine, slots=2)
    handles = [scheduler.submit(request) for request in requests]
    finish(scheduler)
    assert scheduler.preemptions
    assert [handle.completion for handle in handles] == expected


def test_a_step_with_somebodys_last_token_is_looked_at_before_the_next_is_put_together():
    """As when pages are wanted for a prompt in between."""
    batch, handle = Batch("dense", 3, 97), SimpleNamespace(prompt_tokens=1)
    samples = [Sample(handle, 0, Sampling(count), object(), frozenset(), None, ids=[6]) for count in (3, 5)]
    for sample in samples:
        batch.put(sample, np.array([6], np.int32), None)
    for token in (7, 8):
        group = batch.group()
        assert group is not None
        packed = np.array([[1, 2, token, 0, 1], [3, 4, token, 0, 1], [0, 0, 0, 0, 0]], np.int32)
        sampled = SimpleNamespace(tokens=np.full(3, token, np.int32), counts=None, accepted=None)
        taken, ended = read(
            batch.launched(group, SimpleNamespace(sampled=sampled, packed=packed, ends=None, history=None)), listening=False
        )
        assert (len(taken), ended) == ((2, True) if token == 8 else (0, False))
    found = [(each.ids, each.issued, each.finish_reason, each.blocks, each.keys) for each in samples]
    assert found == [([6, 7, 8], 3, "length", 2, 4), ([6, 7, 8], 3, None, 6, 8)]


# Pages


@pytest.mark.long
def test_pages_are_taken_as_answers_grow(engine):
    scheduler = Scheduler(engine, slots=2)
    scheduler.submit(asked("a" * 126, 200))
    held = []
    while not scheduler.idle:
        scheduler.step()
        held.append(pages_held(engine))
    # 126 tokens of prompt and one more a step; the last token is never written, the step that ends it gives all back.
    assert held[:2] == [1, 1]
    assert held[3:120] == [2] * 117
    assert max(held) == 3


MIXED = (
    {},
    {"temperature": 1.2, "seed": 3},
    {"repetition_penalty": 1.6},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 9, "top_logprobs": 3},
)


def crowded():
    """Requests whose prompts just fit into a page each, and whose answers do not; one of them has three samples."""
    requests = [asked("abcd"[number] * (122 + number), 12, **fields) for number, fields in enumerate(MIXED)]
    return [*requests, asked("e" * 120, 14, n=3, temperature=1.0), asked("f" * 125, 9, policy="top:2", priority=1)]


@pytest.fixture(scope="module")
def crowd(engine):
    """The crowded requests, with what becomes of each alone."""
    return [(request, alone(engine, request)) for request in crowded()]


@pytest.mark.quick("None-3")
@pytest.mark.parametrize("pages", [3, 6])
@pytest.mark.parametrize("max_gap_ms", [None, 1e-6])
def test_who_is_suspended_ends_as_alone(engine, only, crowd, pages, max_gap_ms):
    only(pages)
    scheduler = Scheduler(engine, slots=4, max_gap_ms=max_gap_ms)
    handles = [scheduler.submit(request) for request, _ in crowd]
    finish(scheduler)
    assert scheduler.preemptions > 0
    for handle, (request, expected) in zip(handles, crowd, strict=True):
        assert handle.completion == expected, request


def test_the_youngest_of_the_lowest_priority_is_suspended(engine, only):
    only(5)
    scheduler = Scheduler(engine, slots=3)
    old, low, young = (scheduler.submit(asked(name * 126, 9, priority=priority)) for name, priority in (("o", 1), ("l", 0), ("y", 1)))
    until_preempted(scheduler)
    assert [sample.handle for sample in scheduler._waiting] == [low]
    assert finish(scheduler)[-1] is low
    for handle in (old, low, young):
        assert handle.completion == alone(engine, handle.request)


def test_a_suspended_one_comes_back_before_later_requests(engine, only):
    only(3)
    scheduler = Scheduler(engine, slots=2)
    first, second = scheduler.submit(asked("a" * 126, 9)), scheduler.submit(asked("b" * 126, 9))
    until_preempted(scheduler)
    late = scheduler.submit(asked("late", 2))
    while state_of(scheduler, second).samples[0] in scheduler._waiting:
        assert not late.started
        scheduler.step()
    assert first.completion is not None
    finish(scheduler)


@pytest.mark.long
def test_a_prompt_of_waiting_samples_gives_way_to_whoever_comes_first(engine, only):
    """While nothing else runs, the pages of a prompt whose samples wait are not those of a stranger."""
    only(3)
    scheduler = Scheduler(engine, slots=1)
    several = scheduler.submit(asked("n" * 200, 3, n=2, temperature=1.0))
    scheduler.step()
    urgent = scheduler.submit(asked("u" * 300, 3, priority=1))
    assert finish(scheduler) == [urgent, several]
    for handle in (urgent, several):
        assert handle.completion == alone(engine, handle.request, slots=1)


@pytest.mark.long
def test_no_batch_is_left_behind_by_its_last_sample_that_is_suspended(engine, only):
    """An empty batch would hold a prefill back for ever: slices run beside the steps of batches."""
    only(3)
    scheduler = Scheduler(engine, slots=2, max_gap_ms=1e-6)
    scheduler.submit(asked("a" * 126, 9, policy="dense"))
    second = scheduler.submit(asked("b" * 126, 9, policy="top:2"))
    until_preempted(scheduler)
    assert list(map(str, scheduler._batches)) == ["dense"]
    urgent = scheduler.submit(asked("u" * 300, 3, priority=1))
    handles = finish(scheduler)
    assert handles.index(urgent) < handles.index(second)


def test_pages_that_others_hold_are_an_error_of_the_one_that_needs_them(engine, only):
    only(1)
    scheduler = Scheduler(engine, slots=2)
    handle = scheduler.submit(asked("a" * 126, 9))
    assert finish(scheduler) == [handle]
    assert isinstance(handle.completion.error, OutOfPages)
    assert "1 needed, 0 free" in str(handle.completion.error)


def _resume_without_pages(monkeypatch):
    """Pages are taken, but nothing is written to them."""
    monkeypatch.setattr("kvjax.engine.sequence_io.write_blocks", lambda *args, **kwargs: None)


def _counts_forgotten(monkeypatch):
    def put(self, sample, token, counts):
        real(self, sample, token, None if counts is None else np.zeros_like(counts))

    real = Batch.put
    monkeypatch.setattr(Batch, "put", put)


def _latest_token_lost(monkeypatch):
    def put(self, sample, token, counts):
        comes_back = len(sample.ids) > 1
        real(self, sample, np.array(sample.ids[-2:-1], np.int32) if comes_back else token, counts)

    real = Batch.put
    monkeypatch.setattr(Batch, "put", put)


def _flight_not_read(monkeypatch):
    """What the step in step sampled is not waited for before a sequence is suspended."""
    real = Scheduler._make_room

    def make_room(self, error):
        self._pending = []
        real(self, error)

    monkeypatch.setattr(Scheduler, "_make_room", make_room)


@pytest.mark.quick_but("_resume_without_pages")
@pytest.mark.parametrize("mutant", [_resume_without_pages, _counts_forgotten, _latest_token_lost, _flight_not_read])
def test_a_wrong_suspension_is_noticed(engine, only, mutant, monkeypatch):
    requests = [asked("a" * 127, 12), asked("b" * 124, 12, temperature=0.1, presence_penalty=1.0, frequency_penalty=0.5, seed=9)]
    expected = [alone(engine, request) for request in requests]
    only(3)

    def found():
        scheduler = Scheduler(engine, slots=2)
        handles = [scheduler.submit(request) for request in requests]
        try:
            finish(scheduler, 100)
        except AssertionError:  # it never ends
            scheduler.close()
        assert scheduler.preemptions
        return [handle.completion for handle in handles]

    assert found() == expected
    mutant(monkeypatch)
    assert found() != expected


# Gaps


def test_a_bounded_gap_lets_others_decode_while_a_prompt_is_prefilled(engine):
    def steps_between(max_gap_ms):
        scheduler = Scheduler(engine, slots=2, max_gap_ms=max_gap_ms)
        first = scheduler.submit(asked("first", 30))
        scheduler.step()
        long = scheduler.submit(asked("l" * 600, 3))
        (sample,) = state_of(scheduler, first).samples
        before = len(sample.ids)
        while not long.started:
            scheduler.step()
        after = len(sample.ids)
        finish(scheduler)
        return after - before, first.completion, long.completion

    (whole, *bits), (sliced, *bits_of_slices) = steps_between(None), steps_between(1e-6)
    assert (whole <= 1, sliced >= 4) == (True, True)
    assert bits == bits_of_slices
