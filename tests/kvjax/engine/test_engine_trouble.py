"""What an engine says and keeps when it is used wrongly or a step fails: threads, failed steps, budgets, arguments of
wrong kinds."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make_family

from kvjax import Engine, OutOfPages, Request, Sampling, generate, run
from kvjax.engine import prefill_runner
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.step_plan import Chunk, DecodeGroup, StepPlan
from kvjax.policies.decode import Dense, TopBlocks, Window

PAGES, PAGE = 24, 16


@pytest.fixture
def engine(model):
    return Engine(model, pages=PAGES, page_size=PAGE, prefill_chunk=32, batch_buckets=(1, 2))


def books(engine):
    """All that must not change when a call is refused."""
    held = [
        (each, each.length, list(each.tokens), list(each.pages["full"]), dict(each.states), each.logits is None)
        for each in engine.sequences
    ]
    return engine.allocators["full"].free, held


# One thread at a time


@pytest.mark.long
def test_a_second_thread_is_refused_and_the_first_loses_nothing(engine, text):
    (sequence,) = engine.prefill([text[:40]])
    expected = np.asarray(engine.decode([engine.fork(sequence)], [5]))
    inside, go_on = threading.Event(), threading.Event()
    found = []

    def wait(done):
        inside.set()
        go_on.wait(60)

    worker = threading.Thread(target=lambda: found.extend(engine.prefill([text[:20]], on_tokens=wait)))
    worker.start()
    assert inside.wait(60)
    rows = SamplingRows.of([None])
    calls = [
        lambda: engine.prefill([[1]]),
        lambda: engine.extend(sequence, [1]),
        lambda: engine.decode([sequence], [1]),
        lambda: engine.decode_and_sample([sequence], np.zeros(1, np.int32), rows),
        lambda: engine.fork(sequence),
        lambda: engine.truncate(sequence, 39),
        lambda: engine.free(sequence),
        lambda: engine.reserve([sequence], 50),
        lambda: engine.save(sequence, "nowhere"),
        lambda: engine.restore("nowhere"),
        lambda: engine.warmup(),
        lambda: generate(engine, [1, 2], max_new_tokens=2),
    ]
    for call in calls:
        if call is calls[-1]:  # it waits for the other thread before it gives back what it holds
            threading.Timer(0.2, go_on.set).start()
        with pytest.raises(RuntimeError, match=r"being used by another thread, and only one may use it at a time: make one for each"):
            call()
    worker.join(60)
    assert (found[0].length, sequence.length, len(sequence.pages["full"])) == (20, 40, 3)
    np.testing.assert_array_equal(np.asarray(engine.decode([sequence], [5])), expected)


def test_a_loop_that_another_thread_stops_gives_its_pages_back(engine, text):
    """What ends because another thread is in the engine waits for it, and then frees what it held."""
    running = run(engine, [Request(text[:20], Sampling(max_new_tokens=12)), Request(text[:20], Sampling(max_new_tokens=1))], slots=2)
    next(running)
    assert engine.sequences
    inside, go_on = threading.Event(), threading.Event()

    def use():
        with engine.guard:
            inside.set()
            go_on.wait(60)

    worker = threading.Thread(target=use)
    worker.start()
    assert inside.wait(60)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(RuntimeError, match="is being used by another thread"):
        next(running)
    worker.join()
    assert not engine.sequences
    assert engine.allocators["full"].free == PAGES


def test_tokens_changed_by_hand_are_not_saved(engine, text, tmp_path):
    (sequence,) = engine.prefill([text[:20]])
    for token in (500, 2**40, -1):
        sequence.tokens[3] = token
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary"):
            engine.save(sequence, tmp_path / "sequence")
    assert not list(tmp_path.iterdir())


def test_many_threads_get_a_clear_sentence_or_the_right_answer(engine, text):
    (sequence,) = engine.prefill([text[:40]])
    expected = np.asarray(engine.extend(engine.fork(sequence), [5, 6]))
    right, refused, other, until = [], [], [], time.monotonic() + 2

    def work():
        while time.monotonic() < until:
            try:
                with engine.guard:
                    fork = engine.fork(sequence)
                    logits = np.asarray(engine.extend(fork, [5, 6]))
                    engine.free(fork)
                right.append(np.array_equal(logits, expected))
            except RuntimeError as error:
                (refused if "another thread" in str(error) else other).append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(right)
    assert right
    assert refused
    assert not other
    assert engine.allocators["full"].owners(sequence.pages["full"][0]) == len(engine.sequences)


# A step that fails


@dataclasses.dataclass(frozen=True)
class FailsWhen(Dense):
    """Reads everything, or fails: while it is traced, or while it runs (once the pages are the step's)."""

    when: str = "run"

    def attend(self, query, layer, ctx, state):
        if self.when == "traced":
            raise FileNotFoundError("no such table")

        def fail(lengths):
            raise FileNotFoundError("no such table")

        lengths = jax.pure_callback(fail, jax.ShapeDtypeStruct(ctx.lengths.shape, ctx.lengths.dtype), ctx.lengths)
        return super().attend(query + lengths.sum(), layer, ctx, state)

    def describe(self):
        return f"fails when it is {self.when}"


@pytest.mark.parametrize("length", [37, 48])  # 48: the step needs a new page
def test_a_step_that_fails_to_compile_changes_nothing(engine, text, length):
    (sequence,) = engine.prefill([text[:length]])
    before = books(engine)
    rows = SamplingRows.of([None])
    for call in (
        lambda: engine.decode([sequence], [1], FailsWhen("traced")),
        lambda: engine.decode_and_sample([sequence], np.zeros(1, np.int32), rows, FailsWhen("traced")),
    ):
        with pytest.raises(FileNotFoundError, match="no such table"):
            call()
        assert books(engine) == before
    assert np.isfinite(np.asarray(engine.decode([sequence], [1]))).all()


def test_an_extension_that_fails_to_compile_changes_nothing(engine, text, monkeypatch):
    (sequence,) = engine.prefill([text[:37]])
    before = books(engine)

    def fail(*args, **kwargs):
        raise FileNotFoundError("no such table")

    with monkeypatch.context() as patch:
        patch.setattr("kvjax.engine.prefill_runner.prefill_slice", fail)
        for call in (lambda: engine.extend(sequence, [1] * 60), lambda: engine.prefill([[1] * 60])):
            with pytest.raises(FileNotFoundError):
                call()
            assert books(engine) == before
    assert np.isfinite(np.asarray(engine.extend(sequence, [1]))).all()


@pytest.mark.quick_but("llama-options1")
@pytest.mark.parametrize(("name", "options"), [("qwen3_5_text", {}), ("llama", {"cache_format": "int8"}), ("llama", {})])
def test_a_chunk_that_fails_half_way_is_not_gone_on_with_where_rows_have_moved(name, options, text, monkeypatch):
    """Its first slices have moved the rows of their layers to the chunk's end. Pages alone stay as they were."""
    monkeypatch.setattr(prefill_runner, "SLICES", (1,))
    model = make_family(name)
    engine, honest, calls = Engine(model, pages=PAGES, page_size=PAGE, prefill_chunk=32, **options), prefill_runner.prefill_slice, []
    sequence, other = engine.prefill([text[:40], text[:50]])

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory while compiling")
        return honest(*args, **kwargs)

    monkeypatch.setattr(prefill_runner, "prefill_slice", failing)
    with pytest.raises(RuntimeError, match="out of memory while compiling"):
        engine.extend(sequence, text[40:60])
    assert len(calls) == 2, "the model has several slices"
    monkeypatch.setattr(prefill_runner, "prefill_slice", honest)
    if engine.spec.row_groups:
        rows = SamplingRows.of([None])
        for call in (
            lambda: engine.extend(sequence, text[40:60]),
            lambda: engine.decode([sequence], [1]),
            lambda: engine.step(StepPlan((DecodeGroup((sequence,), [1], rows),))),
            lambda: engine.step(StepPlan(chunks=(Chunk(sequence, text[40:60]),))),
            lambda: engine.fork(sequence),
        ):
            with pytest.raises(
                RuntimeError, match=r"lost .* half-way \(RuntimeError: out of memory while compiling\): free it, and prefill"
            ):
                call()
        engine.free(sequence)
        (sequence,) = engine.prefill([text[:40]])
    found = engine.extend(sequence, text[40:60])
    (whole,) = engine.prefill([text[:60]])
    assert np.array_equal(found, whole.logits)
    assert np.array_equal(engine.extend(other, text[50:60]), whole.logits), "another sequence lost nothing"


@pytest.mark.parametrize("taken", [False, True])
def test_slices_of_a_chunk_that_fail_leave_the_engine_as_far_as_they_can(taken, text, monkeypatch):
    """Between decode steps a chunk runs slice by slice. Where the failed call had taken the pages, all of them are
    lost."""
    monkeypatch.setattr(prefill_runner, "SLICES", (1,))
    engine, honest = Engine(make_family("qwen3_5_text"), pages=PAGES, page_size=PAGE, prefill_chunk=32), prefill_runner.prefill_slice
    sequence, other = engine.prefill([text[:39], text[:40]])
    engine.decode([sequence], [text[39]])  # it holds a slot from here on
    chunk = StepPlan(chunks=(Chunk(sequence, text[40:60], 1),))
    engine.step(chunk)

    def failing(*args, **kwargs):
        if taken:
            honest(*args, **kwargs)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(prefill_runner, "prefill_slice", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step(chunk)
    for call in (lambda: engine.step(chunk), lambda: engine.decode([sequence], [1])):
        with pytest.raises(RuntimeError, match=r"\(RuntimeError: out of memory\): " + ("make a new engine" if taken else "free it")):
            call()
    engine.free(sequence)
    if not taken:
        (again,) = engine.prefill([text[:60]])
        assert np.array_equal(engine.extend(other, text[40:60]), again.logits)


def test_a_chunk_that_is_written_stays_whatever_keeping_it_raises(text):
    engine = Engine(make_family("qwen3_5_text"), pages=PAGES, page_size=PAGE, prefill_chunk=32)
    (sequence,) = engine.prefill([text[:40]])

    def full(run):
        raise OSError("the disk is full")

    engine._prefiller.on_written = full
    with pytest.raises(OSError, match="disk is full"):
        engine.extend(sequence, text[40:60])
    engine._prefiller.on_written = None
    assert sequence.length == 60
    (whole,) = engine.prefill([text[:70]])
    assert np.array_equal(engine.extend(sequence, text[60:70]), whole.logits)


def test_an_engine_whose_step_failed_says_so_and_what_to_do(engine, text, tmp_path):
    (sequence,) = engine.prefill([text[:37]])
    with pytest.raises(RuntimeError, match="CpuCallback error"):
        jax.block_until_ready(engine.decode([sequence], [1], FailsWhen("run")))
    for call in (
        lambda: engine.decode([sequence], [1]),
        lambda: engine.extend(sequence, [1]),
        lambda: engine.prefill([[1]]),
        lambda: engine.fork(sequence),
        lambda: engine.save(sequence, tmp_path / "file"),
        lambda: engine.decode([sequence], [1]),
    ):
        with pytest.raises(
            RuntimeError, match=r"^this engine lost its pages when a step failed \(JaxRuntimeError: .*\): make a new engine"
        ):
            call()
    for sequence in list(engine.sequences):
        engine.free(sequence)
    assert engine.allocators["full"].free == PAGES


# Budgets


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (TopBlocks(10**9, block_size=16), r"k 1000000000 is more than any page table of this model needs, 65536: use a smaller k"),
        (TopBlocks(65_537, block_size=16), r"TopBlocks\(k=65537, block_size=16\): k 65537 is more"),
        (TopBlocks(2, sink=70_000, block_size=16), "sink 70000 is more"),
        (TopBlocks(2, local=70_000, block_size=16), "local 70000 is more"),
        ("quest:66000", "policy quest:66000: k 66000 is more"),
        (Window(0, 10**7), "window_tokens 10000000 is more than any page table of this model needs, 1048576"),
        ("window:5000000+1", "sink_tokens 5000000 is more"),
    ],
)
def test_a_budget_beyond_the_page_table_is_refused_where_it_is_declared(model, engine, text, policy, match):
    for declare in (lambda: Engine(model, policy, pages=4), lambda: Engine(model, policies=[policy], pages=4)):
        with pytest.raises(ValueError, match=match):
            declare()
    (sequence,) = engine.prefill([text[:37]])
    before = books(engine)
    with pytest.raises(ValueError, match=match):
        engine.decode([sequence], [1], policy)
    assert books(engine) == before


def test_the_largest_budget_is_taken(model):
    Engine(model, TopBlocks(65_536, sink=65_536, local=65_536, block_size=16), pages=4, page_size=PAGE, prefill_chunk=32)
    Engine(model, Window(2**20, 2**20), pages=4)


@pytest.mark.long
def test_a_budget_beyond_a_short_models_positions_reads_everything(model_factory, text):
    """32 blocks of 128 are more than 512 positions hold."""
    engine = Engine(model_factory(max_positions=512), "top:32", pages=4, prefill_chunk=128, batch_buckets=(1,))
    (sequence,) = engine.prefill([text[:100]])
    np.testing.assert_allclose(*(engine.decode([engine.fork(sequence)], [5], policy) for policy in ("top:32", "dense")), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TopBlocks(10**11), "k must be at most 2147483647, got 100000000000"),
        (lambda: TopBlocks(2**31), "k must be at most"),
        (lambda: TopBlocks(1, local=2**40), "local must be at most"),
        (lambda: TopBlocks(1, sink=2**31), "sink must be at most"),
        (lambda: Window(1, 10**20), "window_tokens must be at most"),
        (lambda: TopBlocks(True), "k must be a whole number, got True"),
        (lambda: TopBlocks(8.0), "k must be a whole number, got 8.0"),
        (lambda: Window(1.5, 4), "sink_tokens must be a whole number"),
    ],
)
def test_a_budget_that_can_never_make_sense_is_refused_at_once(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# Arguments


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e, s, rows: e.prefill(None), r"a list of prompts is needed, got None: prefill\(\[ids\]\) for one prompt"),
        (lambda e, s, rows: e.prefill(5), "a list of prompts is needed, got 5"),
        (lambda e, s, rows: e.prefill(jnp.array(5)), "a list of prompts is needed, got"),
        (lambda e, s, rows: e.decode([s], jnp.array(5)), "tokens must be a list with one token of every sequence"),
        (lambda e, s, rows: Engine(e.model, batch_buckets=np.array(8)), "batch_buckets must be sizes in ascending order"),
        (lambda e, s, rows: Engine(e.model, batch_buckets=b"ab"), "batch_buckets must be sizes in ascending order"),
        (lambda e, s, rows: Engine(e.model, policies=np.array(8)), "a list of policies is needed, got"),
        (lambda e, s, rows: e.inspect([s], 5), "a list of tokens is needed, got 5: give one of every sequence"),
        (lambda e, s, rows: e.step(None), r"a step runs a kvjax.engine.step_plan.StepPlan, got None: StepPlan\(decodes"),
        (lambda e, s, rows: e.step(StepPlan(chunks=(s,))), "a plan holds a tuple of Chunk, got"),
        (lambda e, s, rows: e.step(StepPlan(decodes=7)), "a plan holds a tuple of DecodeGroup, got 7"),
        (lambda e, s, rows: Engine(e.model, policies=5), "a list of policies is needed, got 5: a name, or several"),
        (lambda e, s, rows: dataclasses.replace(e.config, layers=list(e.config.layers)), "layers must be a tuple, got"),
        (lambda e, s, rows: e.reserve([s], -1), "tokens must be at least 0, got -1"),
        (lambda e, s, rows: e.reserve([s], 1.5), "tokens must be a whole number, got 1.5"),
        (lambda e, s, rows: e.reserve([s], True), "tokens must be a whole number, got True"),
        (lambda e, s, rows: e.truncate(s, True), "length must be a whole number, got True"),
        (lambda e, s, rows: e.truncate(s, 36.0), "length must be a whole number, got 36.0"),
        (lambda e, s, rows: e.prefill([[1]], reserve=True), "reserve must be a whole number"),
        (lambda e, s, rows: e.prefill([[1]], reserve=0.5), "reserve must be a whole number"),
        (lambda e, s, rows: e.prefill([[1, True]]), "token ids must be a list of whole numbers"),
        (lambda e, s, rows: e.prefill([np.array([True, False])]), "token ids must be a list of whole numbers"),
        (lambda e, s, rows: e.extend(s, [np.bool_(True), 3]), "token ids must be a list of whole numbers"),
        (lambda e, s, rows: e.decode([s], [True]), "token ids must be a list of whole numbers"),
        (lambda e, s, rows: e.warmup(batch=0), "batch must be at least 1"),
        (lambda e, s, rows: e.warmup(batch=True), "batch must be a whole number"),
        (lambda e, s, rows: e.warmup(tokens=-3), "tokens must be at least 1"),
        (lambda e, s, rows: e.warmup(tokens=1.5), "tokens must be a whole number"),
        (lambda e, s, rows: e.decode_and_sample([s], [97], rows), "token 97 is outside the vocabulary"),
        (lambda e, s, rows: e.decode_and_sample([s], np.array([-1]), rows), "token -1 is outside"),
        (lambda e, s, rows: e.decode_and_sample([s], np.zeros(1), rows), "token ids must be a list of whole numbers"),
        (lambda e, s, rows: e.decode_and_sample([s], jnp.zeros(1), rows), "token ids must be whole numbers, got float32"),
        (lambda e, s, rows: e.decode_and_sample([s], [1, 2], rows), r"tokens must have one entry for each of 1 slots, got shape \(2,\)"),
        (lambda e, s, rows: e.decode_and_sample([s], jnp.zeros((1, 2), jnp.int32), rows), "a drafted step writes 4, 8, 16 tokens"),
        (lambda e, s, rows: e.decode_and_sample([s, None], [1, 1], rows), "temperature must have one entry for each of 2 slots"),
        (lambda e, s, rows: e.decode_and_sample([s], [1], SamplingRows.of([None] * 3)), "must have one entry for each of 1 slots"),
        (lambda e, s, rows: e.decode_and_sample([s], [1], Sampling()), r"takes kvjax.engine.sampling.SamplingRows, got Sampling\(\)"),
        (lambda e, s, rows: e.decode_and_sample([s], [1], rows, counts=np.zeros((1, 97))), "counts must be int32"),
        (
            lambda e, s, rows: e.decode_and_sample([s], [[-1, 2, 3, 4]], rows),
            "token -1 at place 0 of row 0 is outside the vocabulary of 97",
        ),
        (lambda e, s, rows: e.decode_and_sample([s], [[2**32 + 1, 2, 3, 4]], rows), "token 4294967297 at place 0 of row 0 is outside"),
        (lambda e, s, rows: e.decode_and_sample([s], [[1, -2, 3, 4]], rows), "only a drafted token may be -1"),
        (lambda e, s, rows: e.decode_and_sample([None, s], [[99] * 4, [1, 2, 3, 97]], rows), "token 97 at place 3 of row 1 is outside"),
        (lambda e, s, rows: e.decode_and_sample([s], [[1.0, 2, 3, 4]], rows), "token ids must be whole numbers, got float64"),
        (lambda e, s, rows: e.decode([None, s], [1, 2]), "the sequence was freed, or belongs to another engine"),
        (lambda e, s, rows: e.decode(s, [1]), "one sequence where a list is needed: got CachedSequence"),
        (lambda e, s, rows: e.decode([s], 1), "tokens must be a list with one token of every sequence, or a row of them, got 1"),
        (lambda e, s, rows: e.inspect(s, [1]), "one sequence where a list is needed"),
        (lambda e, s, rows: e.reserve(s, 1), "one sequence where a list is needed"),
        (lambda e, s, rows: e.extend([s], [1]), r"a list stands where one sequence is needed.*got \[\[CachedSequence"),
        (lambda e, s, rows: e.fork([s]), "a list stands where one sequence is needed"),
        (lambda e, s, rows: e.free([s]), "a list stands where one sequence is needed"),
        (lambda e, s, rows: e.save(s, "/dev/null"), "/dev/null is a device or a pipe"),
        (lambda e, s, rows: e.save(s, "/proc/self/mem"), "/mem cannot be written: no file can be made in /proc/.*; name a file in another"),
        (lambda e, s, rows: e.save(s, None), "the path of a file is needed, as a string or a pathlib.Path, got None"),
        (lambda e, s, rows: e.save(s, "\ud800"), "the path of a file cannot hold half of a surrogate pair, got '"),
        (lambda e, s, rows: e.restore(5), "the path of a file is needed, as a string or a pathlib.Path, got 5"),
        (lambda e, s, rows: e.prefill([[1]], on_tokens=5), "on_tokens must be a function, or None, got 5"),
        (lambda e, s, rows: e.decode_and_sample(None, [1], rows), "a step takes a tuple of sequences, None for an empty slot, got None"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_and_change_nothing(engine, text, call, match):
    (sequence,) = engine.prefill([text[:37]])
    before = books(engine)
    with pytest.raises(ValueError, match=match):
        call(engine, sequence, SamplingRows.of([None]))
    assert books(engine) == before


def test_a_token_on_the_device_outside_the_vocabulary_makes_its_row_not_finite(engine, text):
    sequences = engine.prefill([text[:37], text[:20]])
    for token in (97, -1, 2**31 - 1):
        sampled = engine.decode_and_sample(sequences, jnp.array([token, 5], jnp.int32), SamplingRows.of([None, None]))
        assert sampled.finite.tolist() == [False, True]
        sequences = engine.prefill([text[:37], text[:20]])
    for drafts in ([-1, 2, 3, 4], [1, 97, 3, 4], [1, -2, 3, 4]):
        sampled = engine.decode_and_sample(sequences, jnp.array([drafts, [1, -1, -1, -1]], jnp.int32), SamplingRows.of([None, None]))
        assert sampled.finite.all(axis=1).tolist() == [False, True]
        for sequence in sequences:
            engine.free(sequence)
        sequences = engine.prefill([text[:37], text[:20]])


def test_sampling_that_fitted_one_step_is_checked_again_for_another(engine, text):
    (sequence,) = engine.prefill([text[:37]])
    rows = SamplingRows.of([Sampling(temperature=1.0)] * 2)
    engine.decode_and_sample([sequence, None], [1, 1], rows)
    with pytest.raises(ValueError, match="temperature must have one entry for each of 1 slots"):
        engine.decode_and_sample([sequence], [1], rows)
    rows = SamplingRows.of([Sampling(presence_penalty=1.0)])
    engine.decode_and_sample([sequence], [1], rows, counts=jnp.zeros((1, 97), jnp.int32))
    with pytest.raises(ValueError, match="pass counts"):
        engine.decode_and_sample([sequence], [1], rows)
    assert sequence.length == 39


@pytest.mark.parametrize("wrong", [[98], [[1, 2, 3]], [1.5]])
def test_a_plan_that_is_wrong_in_one_place_does_not_run_at_all(engine, text, wrong):
    first, second = engine.prefill([text[:37], text[:20]])
    fresh, other = engine.new_sequence(), engine.new_sequence()
    rows = SamplingRows.of([None])
    good, bad = DecodeGroup((first,), [1], rows), DecodeGroup((second,), wrong, rows)
    before = books(engine)
    for plan in (
        StepPlan((good, bad)),
        StepPlan((bad,), (Chunk(fresh, text[:5]),)),
        StepPlan((good,), (Chunk(fresh, text[:5]), Chunk(other, [98]))),
    ):
        with pytest.raises(ValueError, match="token"):
            engine.step(plan)
        assert books(engine) == before
    large = Chunk(other, text[: PAGE * 2])
    engine.reserve([second], PAGE * (engine.allocators["full"].free - 1))
    before = books(engine)
    with pytest.raises(OutOfPages):
        engine.step(StepPlan((good,), (Chunk(fresh, text[:5]), large)))
    assert books(engine) == before
    engine.step(StepPlan((), (Chunk(fresh, text[:6]),)))  # other tokens: the chunk had not begun
    assert fresh.length == 6


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_buckets": (1.5,)}, "each size in batch_buckets must be a whole number, got 1.5"),
        ({"batch_buckets": (True, 2)}, "each size in batch_buckets must be a whole number, got True"),
        ({"batch_buckets": (0, 2)}, "each size in batch_buckets must be at least 1, got 0"),
        ({"batch_buckets": ()}, "ascending order"),
        ({"batch_buckets": 4}, r"batch_buckets must be sizes in ascending order, as \(1, 2, 4\), got 4"),
        ({"page_size": 16.0}, "page_size must be a whole number"),
        ({"page_size": -16}, "page_size must be at least 1"),
        ({"prefill_chunk": True}, "prefill_chunk must be a whole number"),
        ({"pages": 1.5}, "pages must be a whole number"),
        ({"pages": True}, "pages must be a whole number"),
        ({"pages": "4"}, "pages must be a whole number, got '4'"),
        ({"pages": -1}, "pages must be at least 1"),
        ({"pages": 10**11}, "a pool of 100,000,000,000 pages takes"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(model, options, match):
    with pytest.raises(ValueError, match=match):
        Engine(model, **({"pages": 4} | options))


def test_a_lone_policy_is_taken_for_one(model):
    assert Engine(model, policies="dense", pages=4).policies == (Dense(),)
    assert Engine(model, policies="window:4+8", pages=4).policies == (Dense(), Window(4, 8))
    assert Engine(model, policies=Window(4, 8), pages=4).policies == (Dense(), Window(4, 8))
