"""Pages outside a window are given back: memory is constant, answers are those of the window, and who needs more is
refused."""

import dataclasses
import gc
import re

import jax
import numpy as np
import pytest
from kept_attention import attended, lose_free_pages, sinks_and_window

from kvjax import Engine, OutOfPages, Request, Sampling, Scheduler, generate
from kvjax.cache import page_manager
from kvjax.cache.page_tables import table_width
from kvjax.engine.page_eviction import kept_from_the_start, within
from kvjax.policies.decode import Window, parse
from kvjax.policies.prefill import DensePrefill, SinkWindow, parse_prefill

P, CHUNK, SINK, NEAR = 16, 32, 16, 40
READS, GIVES = f"window:{SINK}+{NEAR}", f"window:{SINK}+{NEAR}+release"
PROMPT, LONGEST = 150, 300
MOST = 1 + 1 + -(-(NEAR - 1 + CHUNK + 15) // P)
"""Pages that a sequence holds at most: the sink, those of the window, a chunk and a step, and one that is cut."""

pytestmark = pytest.mark.usefixtures("everything_is_given_back", "rolling_is_empty")


def engine_of(model, policy=GIVES, **options):
    return Engine(model, policy, **({"pages": 60, "page_size": P, "prefill_chunk": CHUNK, "batch_buckets": (1, 2)} | options))


@pytest.fixture(scope="module")
def model(one_layer):
    """What is kept and read is the same in every layer."""
    return one_layer


@pytest.fixture(scope="module")
def engine(model):
    """Prompts are prefilled densely, so pages stay until the first step of the window."""
    return engine_of(model, policies=("dense", READS, "window:16+20", "quest:1"))


@pytest.fixture(scope="module")
def rolling(model):
    """Nothing ever reads more than the window, so prompts give pages back, too."""
    return engine_of(model, prefill=READS, pages=MOST)


@pytest.fixture
def rolling_is_empty(rolling):
    yield
    for sequence in list(rolling.sequences):
        rolling.free(sequence)
    assert rolling.allocators["full"].free == rolling.allocators["full"].total


def held(sequence):
    return [number for number, page in enumerate(sequence.pages["full"]) if page >= 0]


def decoded(engine, sequence, tokens, policy=None):
    """Logits of a step for each token, `[n, V]`."""
    return np.concatenate([np.asarray(engine.decode([sequence], [token], policy)) for token in tokens])


def close(found, expected):
    """Within 1e-4 of each row's largest logit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert (np.abs(found - expected).max(axis=-1) <= 1e-4 * np.abs(expected).max(axis=-1)).all()


def of_window(model, text, dense, sink=SINK, near=NEAR, remapped=None):
    return attended(model, text, sinks_and_window(len(text), sink, near, dense), LONGEST, remapped)[0]


def check_answers(model, engine, text):
    """A prompt in two calls and 100 steps against attention under a mask. What was given back is lost at once."""
    dense = 0 if engine.prefill_policy == SinkWindow(SINK, NEAR) else PROMPT
    (sequence,) = engine.prefill([text[:70]])
    lose_free_pages(engine)
    engine.extend(sequence, text[70:PROMPT])
    expected = of_window(model, text[: PROMPT + 100], dense)
    close(sequence.logits, expected[PROMPT - 1])
    for place in range(PROMPT, PROMPT + 100):
        close(engine.decode([sequence], [text[place]])[0], expected[place])
        lose_free_pages(engine)
    engine.free(sequence)


@pytest.mark.quick_but("engine")
@pytest.mark.parametrize("kind", ["engine", "rolling"])
def test_answers_are_those_of_the_window(request, kind, model, text):
    check_answers(model, request.getfixturevalue(kind), text)


@pytest.mark.quick_but("window:16+40")
@pytest.mark.parametrize("prefill", ["dense", READS])
def test_a_page_given_back_too_early_or_a_sink_forgotten_would_show(prefill, model, text, monkeypatch):
    used = engine_of(model, prefill=prefill)
    first_read, sink_pages = page_manager.first_read, page_manager.sink_pages
    with monkeypatch.context() as patch:
        patch.setattr(page_manager, "first_read", lambda *given: first_read(*given) + (first_read(*given) > 0))
        with pytest.raises(AssertionError):
            check_answers(model, used, text)
    with monkeypatch.context() as patch:
        patch.setattr(page_manager, "sink_pages", lambda *given: max(0, sink_pages(*given) - 1))
        with pytest.raises(AssertionError):
            check_answers(model, used, text)


@pytest.mark.parametrize("changes", [{"sink": 0}, {"near": NEAR - 1}, {"near": NEAR + 1}, {"sink": SINK + 1}])
def test_another_window_would_show(engine, model, text, changes):
    (sequence,) = engine.prefill([text[:PROMPT]])
    found = decoded(engine, sequence, text[PROMPT : PROMPT + 20])
    with pytest.raises(AssertionError):
        close(found, of_window(model, text[: PROMPT + 20], PROMPT, **changes)[PROMPT:])


def test_pages_go_with_the_first_step_and_the_bits_are_those_of_a_window_that_keeps_them(engine, text):
    one, two = engine.prefill([text[:PROMPT], text[:PROMPT]])
    assert held(one) == list(range(10))
    same = decoded(engine, two, text[PROMPT:250], READS)
    np.testing.assert_array_equal(decoded(engine, one, text[PROMPT:250]), same)
    assert held(one) == [0, 11, 12, 13, 14, 15]
    assert held(two) == list(range(16))
    assert engine.allocators["full"].total - engine.allocators["full"].free == 6 + 16


@pytest.mark.long
def test_a_prompt_larger_than_the_pool_is_prefilled_within_its_window(model, rolling, text):
    assert rolling.allocators["full"].total == MOST < 300 // P
    large = engine_of(model, READS, prefill=READS)
    (sequence,), (whole,) = rolling.prefill([text]), large.prefill([text])
    np.testing.assert_array_equal(sequence.logits, whole.logits)
    np.testing.assert_array_equal(decoded(rolling, sequence, text[:40]), decoded(large, whole, text[:40]))
    assert len(held(sequence)) <= MOST


@pytest.mark.quick_but("4000-engine")
@pytest.mark.parametrize("kind", ["engine", "rolling"])
@pytest.mark.parametrize("tokens", [4_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_memory_is_flat(model_factory, kind, tokens):
    """Steps of 16 forced tokens, so that 200,000 take minutes, not a quarter of an hour."""
    model = model_factory(num_layers=1, max_positions=2**18)
    prefill = READS if kind == "rolling" else None
    engine = engine_of(model, prefill=prefill, pages=12, batch_buckets=(1,))
    (sequence,) = engine.prefill([[1] * 100])
    rng, pages, live = np.random.default_rng(0), [], []
    gc.collect()  # arrays of earlier tests, which would go in between
    for step in range(tokens // 16):
        logits = engine.decode([sequence], rng.integers(0, 97, (1, 16)).tolist())
        pages.append(engine.allocators["full"].total - engine.allocators["full"].free)
        if step % 50 == 49:
            assert np.isfinite(np.asarray(logits)).all()
            assert len(held(sequence)) == pages[-1]
            tables = sum(table.nbytes for slots in engine._decode_batches.values() for table in slots._tables.values())
            assert tables == 4 * table_width(-(-(sequence.length + 16) // P)) or tables == 4 * table_width(-(-sequence.length // P))
            live.append(sum(array.nbytes for array in jax.live_arrays() if array.dtype == np.float32))
    assert sequence.length == 100 + tokens // 16 * 16
    assert max(pages) <= MOST
    assert max(pages[20:]) - min(pages[20:]) <= CHUNK // P
    assert max(live) == live[0], "no array of keys, values or logits is added"


def test_without_release_the_same_steps_run_out_of_pages(model):
    engine = engine_of(model, READS, pages=12, batch_buckets=(1,))
    (sequence,) = engine.prefill([[1] * 100])
    for _ in range((12 * P - 100) // 4):
        engine.decode([sequence], [[1] * 4])
    with pytest.raises(OutOfPages):
        engine.decode([sequence], [1])


@pytest.mark.parametrize("policy", ["dense", "quest:1", "window:16+41", "window:17+40", "window:640"])
def test_who_reads_more_than_was_kept_is_refused(engine, text, policy):
    (sequence,) = engine.prefill([text[:PROMPT]])
    engine.decode([sequence], [1])
    before = engine.decode([sequence], [2])
    said = (
        f"policy {parse(policy)} may read tokens that a sequence of 152 tokens does not keep: policy {GIVES} gives its pages back "
        "outside the first 16 and the last 40 tokens, from its first step on. Decode it with that policy, name a window within, or prefill "
        "the text again"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        engine.decode([sequence], [1], policy)
    assert np.isfinite(np.asarray(before)).all()
    engine.decode([sequence], [1])  # it goes on


@dataclasses.dataclass(frozen=True)
class Everything(Window):
    """Inherits the numbers of a window, and reads everything."""

    def select(self, query, layer, ctx, state):
        return None, state


@dataclasses.dataclass(frozen=True)
class AllOfIt(SinkWindow):
    """The same for prefill."""

    def attend_sparse(self, query, layer, ctx):
        return DensePrefill().attend(query, layer, ctx)


def test_a_subclass_of_a_window_is_not_taken_for_one(model, engine, text):
    (sequence,) = engine.prefill([text[:PROMPT]])
    engine.decode([sequence], [1])
    with pytest.raises(ValueError, match="does not keep"):
        engine.decode([sequence], [1], Everything(SINK, NEAR))
    assert engine_of(model, prefill=AllOfIt(SINK, NEAR))._policy_set.reach is None


def test_prefill_that_reads_more_is_refused_and_one_within_is_not(model, engine, text):
    (sequence,) = engine.prefill([text[:PROMPT]])
    engine.decode([sequence], [1])
    with pytest.raises(ValueError, match="prefill dense may read tokens that a sequence of 151 tokens does not keep"):
        engine.extend(sequence, [1, 2, 3])
    assert sequence.length == 151
    near = engine_of(model, policies="dense", prefill=READS)
    assert near._policy_set.reach is None, "dense is declared, so prompts keep their pages"
    one, two = near.prefill([text[:PROMPT], text[:PROMPT]])
    decoded(near, one, text[150:200])
    decoded(near, two, text[150:200], READS)
    np.testing.assert_array_equal(near.extend(one, text[200:280]), near.extend(two, text[200:280]))


def test_a_narrower_window_takes_over(engine, text):
    one, two = engine.prefill([text[:PROMPT], text[:PROMPT]])
    decoded(engine, one, text[:5])
    decoded(engine, two, text[:5], READS)
    np.testing.assert_array_equal(decoded(engine, one, [7, 8], "window:16+20"), decoded(engine, two, [7, 8], "window:16+20"))
    engine.decode([one], [1])  # it kept the wider one
    engine.decode([one], [1], "window:16+20+release")
    with pytest.raises(ValueError, match=r"policy window:16\+20\+release gives its pages back"):
        engine.decode([one], [1])


def test_forks_share_pages_and_a_parent_keeps_its_own(engine, text):
    (parent,) = engine.prefill([text[:PROMPT]])
    child, other = engine.fork(parent), engine.fork(parent)
    decoded(engine, child, text[PROMPT:200])
    assert held(parent) == list(range(10))
    assert held(other) == list(range(10))
    grown = engine.fork(child)
    with pytest.raises(ValueError, match="does not keep"):
        engine.decode([grown], [1], "dense")
    np.testing.assert_array_equal(engine.decode([grown], [3]), engine.decode([child], [3]))
    expected = decoded(engine, other, text[PROMPT:170], "dense")
    engine.free(child)
    np.testing.assert_array_equal(decoded(engine, parent, text[PROMPT:170], "dense"), expected)


@pytest.mark.quick_but("engine")
@pytest.mark.parametrize("kind", ["engine", "rolling"])
def test_suspended_and_saved_sequences_go_on_with_the_same_bits(request, kind, text, tmp_path):
    used = request.getfixturevalue(kind)

    def grown():
        (sequence,) = used.prefill([text[:PROMPT]])
        decoded(used, sequence, text[PROMPT:215])
        return sequence

    sequence = grown()
    expected = decoded(used, sequence, text[215:250])
    used.free(sequence)
    sequence = grown()
    used.suspend(sequence)
    assert used.allocators["full"].free == used.allocators["full"].total
    used.resume(sequence)
    assert len(held(sequence)) <= MOST
    used.save(sequence, tmp_path / "q")
    np.testing.assert_array_equal(decoded(used, sequence, text[215:250]), expected)
    used.free(sequence)
    back = used.restore(tmp_path / "q")
    assert len(held(back)) <= MOST
    np.testing.assert_array_equal(decoded(used, back, text[215:250]), expected)
    with pytest.raises(ValueError, match="does not keep"):
        used.decode([back], [1], "dense")


@pytest.mark.long
def test_prefixes_are_found_after_their_pages_were_given_back(model, text):
    """Only those whose pages nobody needed meanwhile; what is found holds the bits of a prompt of its own."""
    engine, plain = (engine_of(model, prefill=READS, reuse=reuse, batch_buckets=(8,)) for reuse in (True, False))
    for _ in range(3):
        (sequence,) = engine.prefill([text[:200]])
        (fresh,) = plain.prefill([text[:200]])
        np.testing.assert_array_equal(sequence.logits, fresh.logits)
        np.testing.assert_array_equal(decoded(engine, sequence, text[200:240]), decoded(plain, fresh, text[200:240]))
        engine.free(sequence)
        plain.free(fresh)
    assert engine.stats().found_tokens == 2 * 192


@pytest.mark.long
def test_a_scheduler_runs_prompts_and_answers_larger_than_the_pool(model, rolling, text):
    large = engine_of(model, READS, prefill=READS)
    asked = {"max_new_tokens": 150, "ignore_eos": True, "slots": 1, "details": True}
    small, whole = (generate(each, text[:250], **asked) for each in (rolling, large))
    assert small.token_ids == whole.token_ids
    assert len(small.token_ids) == 150


@pytest.mark.long
def test_a_suspended_sequence_needs_only_the_pages_that_it_had(model):
    engine = engine_of(model, policies="dense", pages=12)
    (sequence,) = engine.prefill([[1] * 100])
    for _ in range(30):
        engine.decode([sequence], [[1] * 16])
    with pytest.raises(OutOfPages, match="30 needed, and the pool has only 12"):
        engine.check_room(sequence.length + 1, sequence)
    most = len(held(sequence))
    engine.suspend(sequence)
    count = len(sequence.suspended["full"])
    assert 4 < count <= most
    growing = [engine.new_sequence() for _ in range(13 - count)]
    engine.check_room(sequence.length + 1, sequence, growing[1:])
    with pytest.raises(OutOfPages, match="13 needed"):
        engine.check_room(sequence.length + 1, sequence, growing)
    engine.resume(sequence)
    assert len(held(sequence)) == count


@pytest.mark.quick_but("heavy:1")
@pytest.mark.parametrize("policy", [GIVES, "heavy:1"])
def test_preempted_answers_longer_than_the_pool_have_the_same_tokens(model, policy):
    prompts = [[5] * 20, [9, 4] * 12, [7, 7, 1] * 9]
    engine = engine_of(model, policy, policies="dense", pages=10, batch_buckets=(4,))
    schedulers = [Scheduler(engine, slots=slots) for slots in (3, 1)]  # all at once, and one after the other
    answers = []
    for scheduler in schedulers:
        sampling = Sampling(max_new_tokens=180, ignore_eos=True)
        handles = [scheduler.submit(Request(prompt, sampling)) for prompt in prompts]
        while not scheduler.idle:
            scheduler.step()
        answers.append([handle.completion.token_ids for handle in handles])
        assert not scheduler.engine.sequences
        assert scheduler.engine.allocators["full"].free == scheduler.engine.allocators["full"].total
    assert answers[0] == answers[1]
    assert [len(each) for each in answers[0]] == [180] * 3
    assert schedulers[0].preemptions > schedulers[1].preemptions == 0


@pytest.mark.long
def test_warming_up_takes_no_more_pages_than_a_sequence(rolling):
    rolling.warmup(tokens=300)
    assert rolling.allocators["full"].free == rolling.allocators["full"].total


def test_what_sequences_keep_from_the_start():
    window, near = parse(GIVES), parse_prefill(READS)
    assert kept_from_the_start([window], near, P) == (SINK, NEAR)
    assert kept_from_the_start([window, parse("window:16+20")], near, P) == (SINK, NEAR)
    for policies, prefill in (
        ([window], "dense"),
        ([window], "window:16+41"),
        ([window], "auto"),
        ([window, parse("dense")], READS),
        ([window, parse("top:8")], READS),
        ([parse(READS)], READS),
        ([parse("dense"), window], READS),
        ([parse("heavy:2")], READS),
    ):
        assert kept_from_the_start(policies, parse_prefill(prefill), P) is None
    assert within((4, 8), (4, 8))
    assert within((4, 8), None)
    assert not within(None, (4, 8))
    assert not within((5, 8), (4, 8))
    assert not within((4, 9), (4, 8))


# Positions in the cache


REMAPPED = f"window:{SINK}+{NEAR}+remap"


@pytest.fixture(scope="module")
def few_positions(model_factory):
    """A model of 64 positions: 16 sinks and a window of 40 are 56."""
    return model_factory(max_positions=64)


def remapping(model, policy=REMAPPED, **options):
    return engine_of(model, policy, prefill=f"window:{SINK}+{NEAR}+remap", **options)


@pytest.mark.quick_but("window:16+40+remap")
@pytest.mark.parametrize("policy", [REMAPPED, f"window:{SINK}+{NEAR}+release+remap"])
def test_positions_in_the_cache_are_those_of_streaming_llm(few_positions, text, policy):
    engine = remapping(few_positions, policy)
    (sequence,) = engine.prefill([text[:PROMPT]])
    expected = of_window(few_positions, text[:256], 0, remapped=(SINK, NEAR))  # more tokens take a wider table, and other programs
    close(sequence.logits, expected[PROMPT - 1])
    close(decoded(engine, sequence, text[PROMPT:216]), expected[PROMPT:216])
    rows = np.asarray(engine.decode([sequence], [text[216:232]]))[0]
    close(rows, expected[216:232])
    close(engine.extend(sequence, text[232:256], all_logits=True), expected[232:256])
    with pytest.raises(AssertionError):
        close(rows, of_window(few_positions, text[:232], 0)[216:])


@pytest.mark.long
def test_up_to_sinks_and_window_both_kinds_of_positions_are_the_same(few_positions, text):
    plain, moved = engine_of(few_positions, READS, prefill=READS), remapping(few_positions)
    (one,), (two,) = plain.prefill([text[:50]]), moved.prefill([text[:50]])
    close(two.logits, one.logits)
    close(decoded(moved, two, text[50:56]), decoded(plain, one, text[50:56]))


@pytest.mark.long
def test_sequences_longer_than_the_models_positions_need_positions_in_the_cache(few_positions, text):
    plain = engine_of(few_positions, GIVES, prefill=READS)
    with pytest.raises(ValueError, match="a sequence of 65 tokens is longer than the model's 64 positions"):
        plain.prefill([text[:65]])
    (sequence,) = plain.prefill([text[:64]])
    with pytest.raises(ValueError, match="a sequence of 65 tokens is longer than the model's 64 positions"):
        plain.decode([sequence], [1])
    moved = remapping(few_positions, f"window:{SINK}+{NEAR}+release+remap", pages=MOST, batch_buckets=(1,))
    assert len(generate(moved, text, max_new_tokens=200, ignore_eos=True, slots=1, details=True).token_ids) == 200
    with pytest.raises(ValueError, match="longer than the 16,777,216 positions that float32 counts exactly"):
        moved.check_length(2**24 + 1)


@pytest.mark.long
def test_what_a_step_reads_of_sinks_is_inspected_with_turned_queries(few_positions, text):
    engine = remapping(few_positions)
    (sequence,) = engine.prefill([text[:PROMPT]])
    read = engine.inspect([sequence], [text[PROMPT]])
    close(read.logits, engine.decode([sequence], [text[PROMPT]]))
    _, paid = attended(few_positions, text[: PROMPT + 1], sinks_and_window(PROMPT + 1, SINK, NEAR), LONGEST, (SINK, NEAR))
    for layer, of_tokens in zip(read.layers, paid, strict=True):
        pages = np.pad(of_tokens[-1], ((0, 0), (0, -(PROMPT + 1) % P))).reshape(4, -1, P).sum(axis=2)
        np.testing.assert_allclose(layer.mass[0], pages[:, layer.listed(0, 0)], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "window:17+40+remap"}, r"policy window:17\+40\+remap reads sinks apart from the window, so they must be whole pages of "
         "16 tokens: use 32 sink tokens, or leave out"),
        ({"prefill": "window:17+40+remap"}, r"prefill window:17\+40\+remap reads sinks apart from the window"),
        ({"policy": "window:16+49+remap"}, "counts 65 positions in the cache, and the model has 64: use a smaller window"),
        ({"prefill": "window:16+49+remap"}, "counts 65 positions in the cache, and the model has 64: use a smaller window"),
    ],
)  # fmt: skip
def test_remapping_that_does_not_fit_is_refused(few_positions, options, said):
    with pytest.raises(ValueError, match=said):
        engine_of(few_positions, **options)


def test_latents_are_not_turned(latent_model):
    with pytest.raises(ValueError, match="turns rotated queries, which layers of latent attention do not have"):
        Engine(latent_model, "window:16+40+remap", pages=8, page_size=16, prefill_chunk=16)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("window:4+8+release", Window(4, 8, release=True)),
        ("window:4+8+remap", Window(4, 8, remap=True)),
        ("window:4+8+release+remap", Window(4, 8, release=True, remap=True)),
        ("window:640+release", Window(128, 512, release=True)),
    ],
)
def test_names(name, policy):
    assert parse(name) == policy
    assert parse(str(policy)) == policy
    assert ("given back" in policy.describe()) == policy.release
    assert ("positions in the cache" in policy.describe()) == policy.remap


@pytest.mark.parametrize("wrong", [{"release": 1}, {"remap": "yes"}, {"release": None}])
def test_flags_are_true_or_false(wrong):
    with pytest.raises(ValueError, match="must be True or False"):
        Window(4, 8, **wrong)
    if "remap" in wrong:
        with pytest.raises(ValueError, match="must be True or False"):
            SinkWindow(4, 8, **wrong)


@pytest.mark.long
def test_a_narrower_window_gives_back_the_sinks_of_a_wider_one(engine, text):
    """They lie before the pages that the wider one gave back."""
    (sequence,) = engine.prefill([text[:PROMPT]])
    decoded(engine, sequence, text[:4], "window:64+60+release")
    assert held(sequence) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    decoded(engine, sequence, text[4:50], "window:64+60+release")
    assert held(sequence) == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    narrow = Window(SINK, 20, release=True)
    decoded(engine, sequence, text[:1], narrow)
    assert held(sequence) == [0, 10, 11, 12]
    looked_at = []

    class Watched(list):
        def __getitem__(self, place):
            looked_at.append(place)
            return super().__getitem__(place)

    sequence.pages["full"] = Watched(sequence.pages["full"])
    engine._page_manager.give_back(sequence)
    assert looked_at == [9], "later calls do not go through all pages again"
