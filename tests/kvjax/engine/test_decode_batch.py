"""Slots: the page tables and lengths that a step finds on the device are those that its sequences have, whatever
happened in between."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scheduling import MASSES

from kvjax import Engine, OutOfPages
from kvjax.cache.page_manager import PageManager
from kvjax.engine.decode_batch import DecodeBatch, name_pages
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.step_plan import Chunk, DecodeGroup, StepPlan

pytestmark = pytest.mark.bits

PAGES, PAGE, CHUNK = 60, 16, 32


@pytest.fixture(scope="module")
def engine(one_layer):
    return Engine(one_layer, policies=["quest:1", MASSES], pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2,))


@pytest.fixture(autouse=True)
def _everything_is_given_back(engine):
    yield
    for sequence in set(engine.sequences):
        engine.free(sequence)
    assert (engine.allocators["full"].free, engine._runs) == (PAGES, {})


@pytest.fixture
def checked(monkeypatch):
    """Every step's tables and lengths are compared with those made anew; returns how many were."""
    seen, real = [], DecodeBatch.cache

    def cache(self, layers, num_tokens, reach=0):
        made, following = real(self, layers, num_tokens, reach)
        named = name_pages(made, following)
        fresh = PageManager.tables.__get__(_Spec(self.spec))(self.sequences)
        for name, table in fresh.items():
            for row, sequence in enumerate(self.sequences):
                if sequence is not None:
                    used = -(-(sequence.length + num_tokens) // PAGE)
                    assert np.asarray(named.page_tables[name])[row, :used].tolist() == table[row, :used].tolist()
        assert np.asarray(made.lengths).tolist() == [0 if each is None else each.length for each in self.sequences]
        assert np.asarray(self.active).tolist() == [each is not None for each in self.sequences]
        seen.append(num_tokens)
        return made, following

    monkeypatch.setattr(DecodeBatch, "cache", cache)
    return seen


@dataclasses.dataclass
class _Spec:
    spec: object


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def next_logits(engine, sequence, policy=None):
    """Of a fork, alone in a batch of its own."""
    fork = engine.fork(sequence)
    logits = np.asarray(engine.decode([fork], [5], policy)[0])
    engine.free(fork)
    return logits


def written_anew(engine, written):
    (fresh,) = engine.prefill([written])
    logits = next_logits(engine, fresh)
    engine.free(fresh)
    return logits


@pytest.mark.long
def test_truncated_and_extended_to_the_same_length_over_another_page(engine, checked):
    """Same object, same length, other pages: what the device holds of this row is stale."""
    (one,) = engine.prefill([tokens(20)])
    engine.decode([one], [1])
    engine.truncate(one, 16)
    (other,) = engine.prefill([tokens(10, seed=1)])  # takes the page that was given back
    engine.extend(one, tokens(5, seed=2))
    assert one.length == 21
    found = np.asarray(engine.decode([one], [5])[0])
    engine.truncate(one, 21)
    np.testing.assert_array_equal(found, written_anew(engine, tokens(16 + 4)[:16] + tokens(5, seed=2)))
    assert len(checked) >= 3
    assert other in engine.sequences


def test_truncated_within_its_page_and_decoded_on(engine, checked):
    (one,) = engine.prefill([tokens(20)])
    for token in (1, 2, 3):
        engine.decode([one], [token])
    engine.truncate(one, 21)
    engine.decode([one], [4])
    engine.truncate(one, 21)
    engine.extend(one, [4, 3])
    assert len(engine.decode([one], [9])) == 1


def test_rows_that_change_places_come_and_go(engine, checked):
    a, b, c = engine.prefill([tokens(15), tokens(31, seed=1), tokens(47, seed=2)])
    for batch in ([a, b], [b, a], [a, c], [c], [b], [a, b], [b, c]):
        engine.decode(batch, list(range(len(batch))))
        engine.decode(batch, list(range(len(batch))))
    fork = engine.fork(b)
    for batch in ([b, fork], [fork, b], [fork]):
        engine.decode(batch, list(range(len(batch))))
    for batch, policy in (([a, b], "quest:1"), ([a, b], None), ([b, a], "quest:1")):
        engine.decode(batch, [7, 8], policy)
    assert len(checked) == 20


def test_tables_that_grow_wider(engine, checked):
    """Past 16 pages a table has 64 columns: the longer row widens that of its neighbour too."""
    short, long = engine.prefill([tokens(30), tokens(16 * 16 - 2, seed=1)])
    for token in range(5):
        engine.decode([short, long], [token, token])
    engine.free(long)
    engine.decode([short], [1])
    assert len(long.pages["full"]) == 0


def test_pages_reserved_ahead_and_given_back(engine, checked):
    (one,) = engine.prefill([tokens(14)])
    engine.decode([one], [1])
    engine.reserve([one], 40)
    engine.decode([one], [2])
    engine.decode([one], [3])
    engine.truncate(one, 17)
    engine.inspect([one], [4])
    for token in range(20):
        engine.decode([one], [token])
    assert len(checked) == 24


@pytest.mark.quick_but("4")
@pytest.mark.parametrize("count", [1, 4])
def test_pages_reserved_ahead_after_a_step_are_named_one_after_the_other(engine, checked, count):
    (one,) = engine.prefill([tokens(14)])
    engine.decode([one], [1])
    engine.reserve([one], 5 * PAGE)
    for _ in range(4 * PAGE // count):
        engine.decode([one], [[2] * count] if count > 1 else [2])
    assert (one.length, len(checked)) == (15 + 4 * PAGE, 1 + 4 * PAGE // count)


def test_suspended_and_resumed_between_steps(engine, checked):
    a, b = engine.prefill([tokens(20), tokens(40, seed=1)])
    engine.decode([a, b], [1, 2])
    engine.suspend(a)
    engine.prefill([tokens(9, seed=2)])  # on a's pages
    engine.decode([b], [3])
    engine.resume(a)
    engine.decode([a, b], [4, 5])
    assert len(checked) == 3


@pytest.mark.long
def test_a_list_that_has_others_in_it_now(engine, checked):
    """The same list object as in the step before."""
    a, b = engine.prefill([tokens(20), tokens(40, seed=1)])
    rows, batch = SamplingRows.of([None, None]), [a, b]
    engine.decode_and_sample(batch, [1, 2], rows)
    batch.reverse()
    engine.decode_and_sample(batch, [3, 4], rows)
    batch[1] = None
    engine.decode_and_sample(batch, [5, 0], rows)
    assert ([a.length, b.length], len(checked)) == ([22, 43], 3)


def test_what_the_slots_hold_is_refused_once_it_cannot_be_used(engine):
    """Slots do not look again at sequences that have not changed; these have, though neither tokens nor pages say
    so."""
    empty = engine.new_sequence()
    (ballast,) = engine.prefill([[1]])
    engine.reserve([ballast], (PAGES - 1) * PAGE)
    with pytest.raises(OutOfPages):
        engine.decode([empty], [1])
    engine.free(empty)
    with pytest.raises(ValueError, match="the sequence was freed"):
        engine.decode([empty], [1])
    engine.free(ballast)
    (a,) = engine.prefill([tokens(20)])
    engine.decode([a], [1])
    engine.suspend(a)
    with pytest.raises(ValueError, match="the sequence is suspended"):
        engine.decode([a], [2])
    engine.resume(a)
    engine.decode([a], [2])


def test_a_transfer_that_fails_leaves_the_slots_as_they_were(engine, checked, monkeypatch):
    """Other rows are active: the device has to be told, and has no room for it."""
    a, b = engine.prefill([tokens(20), tokens(40, seed=1)])
    rows = SamplingRows.of([None, None])
    engine.decode_and_sample([a, None], [1, 0], rows)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda *arrays: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED")))
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            engine.decode_and_sample([None, b], [0, 2], rows)
    engine.decode_and_sample([None, b], [0, 2], rows)
    engine.decode_and_sample([a, None], [3, 0], rows)
    assert ([a.length, b.length], len(checked)) == ([22, 41], 3)


def test_what_is_no_list_of_sequences_is_refused(engine):
    (a,) = engine.prefill([tokens(20)])
    rows = SamplingRows.of([None])
    for given in ({a}, {a: 1}, (each for each in [a]), a):
        with pytest.raises(ValueError, match="where a list is needed"):
            engine.decode(given, [1])
        with pytest.raises(ValueError, match="a step takes a tuple of sequences"):
            engine.decode_and_sample(given, [1], rows)
    assert a.length == 20


def test_steps_of_empty_slots_have_no_length(engine):
    rows = SamplingRows.of([None, None])
    for _ in range(3):
        engine.decode_and_sample([None, None], [0, 0], rows)
    assert engine._decode_batches[2, engine.policy].longest == 0


def _without_notice(self):
    """A mutant of `_leave`: the batch is not told."""
    if self._growth is not None:
        self._length, self._growth = self.length, None


def _without_leaving(self):
    """A mutant of `_leave`: the batch is told that something changed, but not which row."""
    if self._growth is not None:
        self._growth.whole = False


@pytest.mark.parametrize("leave", [_without_notice, _without_leaving])
def test_a_stale_table_is_noticed(engine, checked, monkeypatch, leave):
    def set_length(self, length):
        leave(self)
        self._length = length - (self._growth.tokens if self._growth else 0)

    monkeypatch.setattr(CachedSequence, "_leave", leave)
    monkeypatch.setattr(CachedSequence, "length", CachedSequence.length.setter(set_length))
    monkeypatch.setattr(CachedSequence, "grow_with", _grow_with)
    with pytest.raises(AssertionError):
        test_truncated_and_extended_to_the_same_length_over_another_page(engine, checked)


def _grow_with(self, growth):
    """As the real one, whatever `_leave` does."""
    self._length, self._growth = self.length - growth.tokens, growth


# Plans


def plan_of(*sequences, policies=(None,), chunks=()):
    rows = SamplingRows.of([None, None])
    groups = tuple(
        DecodeGroup((sequence, None), np.array([5, 0], np.int32), rows, policy)
        for sequence, policy in zip(sequences, policies, strict=False)
    )
    return StepPlan(groups, tuple(chunks))


def state_of(engine):
    return {each: (each.length, {name: list(ids) for name, ids in each.pages.items()}) for each in engine.sequences}


def test_a_plan_with_a_sequence_that_a_policy_did_not_learn_from_changes_nothing(engine, tmp_path):
    """It is the second group, and there is a chunk."""
    a, b = engine.prefill([tokens(16), tokens(20, seed=1)])
    engine.save(b, tmp_path / "b")
    restored, c = engine.restore(tmp_path / "b"), engine.new_sequence()
    before, free = state_of(engine), engine.allocators["full"].free
    with pytest.raises(ValueError, match="restored from a file"):
        engine.step(plan_of(a, restored, policies=(None, MASSES), chunks=[Chunk(c, tokens(40))]))
    assert (state_of(engine), engine.allocators["full"].free, engine._runs) == (before, free, {})


def test_a_plan_that_lacks_pages_changes_nothing(engine):
    """Neither for its second group nor for its chunk."""
    a, b = engine.prefill([tokens(16), tokens(16, seed=1)])
    c = engine.new_sequence()
    (ballast,) = engine.prefill([[1]])
    for free, plan in ((1, plan_of(a, b, policies=(None, "quest:1"))), (2, plan_of(a, chunks=[Chunk(c, tokens(32))]))):
        engine.reserve([ballast], (engine.allocators["full"].free - free) * PAGE)
        before = state_of(engine)
        with pytest.raises(OutOfPages):
            engine.step(plan)
        assert (state_of(engine), engine.allocators["full"].free, engine._runs) == (before, free, {})
        engine.truncate(ballast, 1)
    found = engine.step(plan_of(a, b, policies=(None, "quest:1")))
    assert [each.length for each in (a, b)] == [17, 17]
    (fresh,) = engine.prefill([tokens(16)])
    assert int(found.decodes[0].sampled.tokens[0]) == int(engine.decode([fresh], [5])[0].argmax())


def test_a_sequence_stands_in_a_plan_once(engine):
    (a,) = engine.prefill([tokens(16)])
    for plan in (plan_of(a, a, policies=(None, "quest:1")), plan_of(a, chunks=[Chunk(a, [1])]), plan_of(chunks=[Chunk(a, [1])] * 2)):
        with pytest.raises(ValueError, match="appears twice"):
            engine.step(plan)
    assert a.length == 16


def test_a_chunk_that_leaves_tokens_has_no_logits(engine):
    sequence, prompt = engine.new_sequence(), tokens(CHUNK + 5)
    (first,) = engine.step(StepPlan(chunks=(Chunk(sequence, prompt),))).chunks
    first.wait()
    assert (first.written, first.logits, sequence.logits, sequence.length) == (CHUNK, None, None, CHUNK)
    (last,) = engine.step(StepPlan(chunks=(Chunk(sequence, prompt[CHUNK:]),))).chunks
    (whole,) = engine.prefill([prompt])
    assert last.written == 5
    np.testing.assert_array_equal(last.logits, whole.logits)
    np.testing.assert_array_equal(sequence.logits, whole.logits)
    for each in (sequence, whole):
        engine.free(each)


def test_a_chunk_that_is_not_through_refuses_everything_but_being_gone_on_with(model_factory, tmp_path):
    deep = Engine(model_factory(num_layers=6), pages=20, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(2,))
    (sequence,) = deep.prefill([tokens(5)])
    chunk = Chunk(sequence, tokens(9, seed=1), 1)
    assert deep.step(StepPlan(chunks=(chunk,))).chunks == (None,)
    calls = {
        "extend": lambda: deep.extend(sequence, [1]),
        "decode": lambda: deep.decode([sequence], [1]),
        "fork": lambda: deep.fork(sequence),
        "truncate": lambda: deep.truncate(sequence, 4),
        "reserve": lambda: deep.reserve([sequence], 1),
        "save": lambda: deep.save(sequence, tmp_path / "saved"),
        "suspend": lambda: deep.suspend(sequence),
        "inspect": lambda: deep.inspect([sequence], [1]),
        "step": lambda: deep.step(plan_of(sequence)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="in the middle of a chunk of prefill: continue the chunk"):
            pytest.fail(f"{name} was not refused: {call()}")
    with pytest.raises(ValueError, match="in the middle of a chunk of other tokens"):
        deep.step(StepPlan(chunks=(Chunk(sequence, [1, 2]),)))
    with pytest.raises(ValueError, match="slices must be at least 1, got 0"):
        Chunk(sequence, [1], 0)
    assert sequence.length == 5
    (prefilled,) = deep.step(StepPlan(chunks=(chunk,))).chunks
    prefilled.wait()
    assert (sequence.tokens, prefilled.written) == (tokens(5) + tokens(9, seed=1), 9)
    (whole,) = deep.prefill([sequence.tokens])
    np.testing.assert_array_equal(prefilled.logits, whole.logits)
    np.testing.assert_array_equal(sequence.logits, whole.logits)
    deep.step(StepPlan(chunks=(Chunk(sequence, [1, 2], 1),)))
    deep.free(sequence)
    deep.free(whole)
    assert (deep.allocators["full"].free, deep._runs, deep.sequences) == (20, {}, set())


# Suspension


@pytest.mark.quick_but("False-quest:1-1")
@pytest.mark.parametrize("length", [0, 1, 16, 40, 48])
@pytest.mark.parametrize("policy", ["dense", "quest:1", MASSES], ids=str)
@pytest.mark.parametrize("decoded", [False, True])
def test_suspended_and_resumed_bit_for_bit(engine, length, policy, decoded):
    """Pages, states of the policy, and what prefill goes on with."""
    if not length:
        sequence = engine.new_sequence()
        engine.suspend(sequence)
        engine.resume(sequence)
        engine.extend(sequence, tokens(3))
        np.testing.assert_array_equal(next_logits(engine, sequence), written_anew(engine, tokens(3)))
        return
    kept, moved = engine.prefill([tokens(length), tokens(length)])
    if decoded:
        for each in (kept, moved):
            engine.decode([each], [3], policy)
    engine.suspend(moved)
    assert moved.pages == {"full": []}
    engine.prefill([tokens(100, seed=9)])
    with pytest.raises(ValueError, match=r"suspended; engine.resume\(sequence\) brings its pages back"):
        engine.decode([moved], [1], policy)
    engine.resume(moved)
    with pytest.raises(ValueError, match="the sequence is not suspended"):
        engine.resume(moved)
    for step in (functools.partial(engine.decode, policy=policy), None, functools.partial(engine.decode, policy=policy)):
        if step is None:
            found = [engine.extend(each, tokens(7, seed=4)) for each in (kept, moved)]
        else:
            found = [step([each], [11])[0] for each in (kept, moved)]
        np.testing.assert_array_equal(*found)
        for one, two in zip(jax.tree.leaves(kept.states), jax.tree.leaves(moved.states), strict=True):
            np.testing.assert_array_equal(one, two)


def test_what_finds_no_room_stays_suspended(engine):
    (a,) = engine.prefill([tokens(40)])
    expected = next_logits(engine, a)
    engine.suspend(a)
    (ballast,) = engine.prefill([[1]], reserve=(PAGES - 3) * PAGE)
    with pytest.raises(OutOfPages, match="3 needed, 2 free"):
        engine.resume(a)
    assert a.suspended is not None
    engine.free(ballast)
    engine.resume(a)
    np.testing.assert_array_equal(next_logits(engine, a), expected)
    engine.suspend(a)
    engine.free(a)


@pytest.mark.quick_but("44")
@pytest.mark.parametrize("length", [44, 60])
def test_layers_with_windows_and_a_policy_that_learns(model_factory, length):
    """Also in the middle of a chunk: what prefill goes on with reads pages of the whole chunk's window."""
    windowed = model_factory(num_layers=2, windows=(24, None))
    engine = Engine(windowed, policies=MASSES, pages=40, page_size=PAGE, prefill_chunk=CHUNK * 2, batch_buckets=(2,))
    kept, moved = engine.prefill([tokens(length), tokens(length)])
    engine.suspend(moved)
    engine.prefill([tokens(50, seed=9)])
    engine.resume(moved)
    found = [engine.extend(each, tokens(15, seed=4)) for each in (kept, moved)]
    np.testing.assert_array_equal(*found)
    for one, two in zip(jax.tree.leaves(kept.states), jax.tree.leaves(moved.states), strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(*(engine.decode([each], [5], MASSES)[0] for each in (kept, moved)))
