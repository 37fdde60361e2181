"""The engine's books: fork, truncate, free, growth, sealing, learning policies, files, and errors that lose nothing."""

import contextlib
import dataclasses
import signal
import threading
from typing import ClassVar

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Engine, OutOfPages, memory_plan
from kvjax.cache import IndexSpec
from kvjax.cache.stores.blocks import PIECE, _arrays_of, _unpack, block_bytes
from kvjax.cache.writes import copy_page
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.steps import decode_step, prefill_slice
from kvjax.model.config import LongRope
from kvjax.policies.decode import AttentionMass, Blocks, TopBlocks, TopTokens, select_and_attend
from pallas_kernels.selection.page_index import page_index

pytestmark = pytest.mark.bits

PAGE = 16


@pytest.fixture(scope="module")
def model(one_layer):
    """What is counted, and where bits may differ, is the same in every layer."""
    return one_layer


@pytest.fixture
def engine(model):
    return Engine(model, "quest:2", policies=["dense", TopBlocks(1, local=1, block_size=16)], pages=24, page_size=PAGE, prefill_chunk=32)


def pages_of(engine, sequence, layer=0):
    return np.asarray(engine._pool.layers[layer].pages.k)[sequence.pages["full"]]


def test_sealed_pages_have_their_index_and_it_is_that_of_their_keys(model, text):
    """However pages fill: by prefill, by append, by decoding token by token."""
    engine = Engine(model, "quest:2", pages=24, page_size=32, prefill_chunk=64)
    (sequence,) = engine.prefill([text[:70]])
    engine.extend(sequence, text[70:100])
    for token in text[100:135]:
        engine.decode([sequence], [token])
    sealed = np.asarray(sequence.pages["full"][: 135 // 32])
    for layer in engine._pool.layers:
        expected = page_index(layer.pages.k[sealed], kind="bounds", block_size=16)
        np.testing.assert_array_equal(np.asarray(layer.index["bounds16"])[sealed], np.asarray(expected))


def test_files_may_be_named_from_the_home_folder(engine, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (sequence,) = engine.prefill([text[:20]])
    engine.save(sequence, "~/prompt.safetensors")
    assert (tmp_path / "prompt.safetensors").is_file()
    assert engine.restore("~/prompt.safetensors").tokens == sequence.tokens


def test_fork_shares_sealed_pages_and_copies_the_open_one(engine, text):
    (parent,) = engine.prefill([text[:40]])
    free = engine.allocators["full"].free
    child = engine.fork(parent)
    assert engine.allocators["full"].free == free - 1
    assert child.pages["full"][:2] == parent.pages["full"][:2]
    assert child.pages["full"][2] != parent.pages["full"][2]
    before = pages_of(engine, parent)
    for token in (1, 2, 3):
        engine.decode([child], [token])
    np.testing.assert_array_equal(pages_of(engine, parent), before)
    engine.free(parent)
    engine.free(child)
    assert engine.allocators["full"].free == 24


def test_a_fork_goes_on_like_its_parent(engine, text):
    (parent,) = engine.prefill([text[:40]])
    child = engine.fork(parent)
    mine, other = engine.decode([parent], [5]), engine.decode([child], [5])
    np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_fork_at_a_page_end_copies_nothing(engine, text):
    (parent,) = engine.prefill([text[:32]])
    free = engine.allocators["full"].free
    engine.fork(parent)
    assert engine.allocators["full"].free == free


def test_truncate_drops_open_tokens_and_the_rest_is_as_if_never_written(engine, text):
    (sequence,) = engine.prefill([text[:36]])
    (fresh,) = engine.prefill([text[:36]])
    engine.extend(sequence, [7, 8, 9])
    engine.truncate(sequence, 36)
    assert (sequence.length, sequence.tokens) == (36, text[:36])
    np.testing.assert_array_equal(np.asarray(engine.extend(sequence, [3])), np.asarray(engine.extend(fresh, [3])))


def test_truncate_does_not_open_sealed_pages(engine, text):
    (sequence,) = engine.prefill([text[:36]])
    with pytest.raises(ValueError, match="first 32 are sealed; a length from 32 to 36"):
        engine.truncate(sequence, 31)
    with pytest.raises(ValueError, match="cannot truncate to 37"):
        engine.truncate(sequence, 37)
    assert sequence.length == 36


def test_exhaustion_names_what_is_needed_and_loses_nothing(engine, text):
    (sequence,) = engine.prefill([text[:300]])  # 19 of 24 pages
    with pytest.raises(OutOfPages, match=r"7 needed, 5 free of 24.*A page holds 16 tokens and takes"):
        engine.prefill([text[:32], text[:80]])
    assert engine.allocators["full"].free == 5
    with pytest.raises(OutOfPages, match="needed"):
        engine.extend(sequence, text[:100])
    assert sequence.length == 300
    assert np.isfinite(np.asarray(engine.decode([sequence], [1]))).all()


def test_a_failed_reservation_takes_no_page(engine, text):
    sequences = engine.prefill([text[:32], text[:32]])
    with pytest.raises(OutOfPages):
        engine.reserve(sequences, 300)
    assert engine.allocators["full"].free == 20


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e, s: e.prefill([[]]), "no tokens"),
        (lambda e, s: e.prefill([[97]]), "token 97 is outside the vocabulary of 97"),
        (lambda e, s: e.prefill([[-1]]), "token -1 is outside"),
        (lambda e, s: e.prefill([[1] * 5000]), "5,000 tokens is longer than the model's 4,096 positions"),
        (lambda e, s: e.decode([s, s], [1, 2]), "appears twice"),
        (lambda e, s: e.decode([], []), "at least one sequence"),
        (
            lambda e, s: e.decode([s], [1], TopBlocks(block_size=8)),
            r"the index bounds8 \(largest and smallest keys.*\), which this engine of .* does not build",
        ),
        (
            lambda e, s: e.decode([s], [1], "top:8"),
            "policy top:8: block_size 128 does not divide page_size 16: use a page_size that is a multiple of 128",
        ),
        (lambda e, s: e.decode([s], [1, 2]), "2 tokens for 1 sequences"),
        (lambda e, s: e.prefill([1, 2]), "token ids must be a list, got 1"),
        (lambda e, s: e.prefill(["text"]), "an engine takes token ids, got text, 'text'"),
        (lambda e, s: e.extend(s, [1.5]), "must be a list of whole numbers"),
        (lambda e, s: e.prefill([[1] * 40], reserve=-30), "reserve must be at least 0, got -30"),
    ],
)
def test_bad_calls_say_why(engine, text, call, match):
    (sequence,) = engine.prefill([text[:20]])
    with pytest.raises(ValueError, match=match):
        call(engine, sequence)
    assert sequence.length == 20


def test_a_freed_sequence_is_not_used(engine, text):
    (sequence,) = engine.prefill([text[:20]])
    engine.free(sequence)
    for call in (
        engine.free,
        engine.fork,
        lambda s: engine.decode([s], [1]),
        lambda s: engine.extend(s, [1]),
        lambda s: engine.truncate(s, 1),
    ):
        with pytest.raises(ValueError, match="was freed"):
            call(sequence)


def test_a_sequence_of_another_engine_is_not_used(engine, model, text):
    other = Engine(model, pages=24, page_size=PAGE, prefill_chunk=32)
    (sequence,) = other.prefill([text[:20]])
    for call in (engine.free, engine.fork, lambda s: engine.decode([s], [1]), lambda s: engine.reserve([s], 40)):
        with pytest.raises(ValueError, match="another engine"):
            call(sequence)
    assert other.sequences == {sequence}
    assert (engine.allocators["full"].free, other.allocators["full"].free) == (24, 22)


def test_what_fails_half_way_keeps_nothing(engine, text):
    def fail(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill([text[:40], text[:40]], on_tokens=fail)
    assert engine.allocators["full"].free == 24
    (sequence,) = engine.prefill([text[:300]], reserve=84)
    with pytest.raises(OutOfPages):
        engine.fork(sequence)
    assert engine.sequences == {sequence}
    engine.free(sequence)
    assert engine.allocators["full"].free == 24


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where tests run in the background and it is ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_middle_of_a_step_does_not_lose_the_cache(model_factory):
    """Ctrl-C at whatever moment of a run of steps; long steps, so that it falls into one."""
    engine = Engine(model_factory(hidden_size=256, num_layers=4, intermediate_size=1024), pages=4, page_size=128, prefill_chunk=128)
    (sequence,) = engine.prefill([[1] * 100])
    expected = np.asarray(engine.decode([engine.fork(sequence)], [5]))
    fork = engine.fork(sequence)
    for delay in np.linspace(0.02, 0.06, 12):
        timer = threading.Timer(delay, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            while timer.is_alive():
                engine.truncate(fork, 100)
                engine.decode([fork], [7])
        assert not engine._pool.layers[0].pages.k.is_deleted()
    np.testing.assert_array_equal(np.asarray(engine.decode([sequence], [5])), expected)


def test_a_lost_cache_is_called_that(engine, text):
    (sequence,) = engine.prefill([text[:20]])
    jax.tree.map(lambda leaf: leaf.delete(), engine._pool.layers)
    with pytest.raises(RuntimeError, match="make a new engine"):
        engine.decode([sequence], [1])


def test_prefill_writes_no_further_than_its_tokens(engine, text):
    (sequence,) = engine.prefill([text[:20]], reserve=40)
    written = pages_of(engine, sequence).transpose(0, 2, 1, 3).reshape(64, -1)
    assert written[:20].any(axis=1).all()
    assert not written[20:].any()


def test_chunks_of_prefill_begin_at_multiples_of_the_chunk(engine, text, monkeypatch):
    starts = []

    def spy(*args, **kwargs):
        starts.append(int(args[1].starts[0]))
        return prefill_slice(*args, **kwargs)

    monkeypatch.setattr("kvjax.engine.prefill_runner.prefill_slice", spy)
    (sequence,) = engine.prefill([text[:70]])
    engine.extend(sequence, text[70:130])
    assert starts == [0, 32, 64, 64, 96, 128]


def test_a_slice_takes_the_memory_of_its_input(engine, text, monkeypatch):
    """The host may be many slices ahead of the device, and each would hold the hidden states of a chunk."""
    inputs = []

    def spy(*args, **kwargs):
        inputs.append(args[1].x)
        return prefill_slice(*args, **kwargs)

    monkeypatch.setattr("kvjax.engine.prefill_runner.prefill_slice", spy)
    engine.prefill([text[:70]])
    assert len(inputs) == 3
    assert all(x.is_deleted() for x in inputs)


def test_reserved_pages_are_each_sequences_own_and_given_back(engine, text):
    one, two = engine.prefill([text[:10], text[:10]])
    engine.reserve([one, two], 40)
    assert len({*one.pages["full"], *two.pages["full"]}) == 8
    assert engine.allocators["full"].free == 16
    engine.reserve([one, two], 40)
    assert engine.allocators["full"].free == 16
    assert engine.fork(one).length == 10
    engine.truncate(two, 5)
    assert (len(two.pages["full"]), engine.allocators["full"].free) == (1, 18)
    with pytest.raises(OutOfPages, match="20 needed, 18 free"):
        engine.prefill([text[:10]], reserve=310)


def test_old_logits_are_not_kept(engine, text):
    """`.logits` predict what follows the last token written, or are None."""
    (sequence,) = engine.prefill([text[:20]])
    assert sequence.logits is not None
    engine.truncate(sequence, 19)
    assert sequence.logits is None
    engine.extend(sequence, [4])
    assert sequence.logits is not None
    engine.decode([sequence], [5])
    assert sequence.logits is None


@pytest.mark.long
def test_biases_and_longrope_go_through_the_engine(model_factory, text):
    """Cuts and single steps give what the whole prompt gives at once, rotated by the long factors from the first token
    on."""
    factors = {"short_factors": (1.0,) * 8, "long_factors": tuple(1.0 + n for n in range(8)), "max_positions": 256}
    scaling = LongRope("longrope", 4.0, 32, attention_factor=1.2, long=True, **factors)
    model = model_factory(family="llama", o_bias=True, mlp_bias=True, rope_scaling=scaling, max_positions=256)
    layers = tuple(
        layer | {name: 0.3 * jax.random.normal(jax.random.key(n), layer[name].shape) for n, name in enumerate(layer) if "_bias" in name}
        for layer in model.params["layers"]
    )
    model = dataclasses.replace(model, params=model.params | {"layers": layers})
    engine = Engine(model, pages=8, page_size=PAGE, prefill_chunk=PAGE)
    (sequence,) = engine.prefill([text[: 2 * PAGE + 3]])
    want = model.full_forward(text[: 2 * PAGE + 4])
    np.testing.assert_allclose(sequence.logits, want[-2], atol=2e-5)
    logits = engine.decode([sequence], [text[2 * PAGE + 3]])
    np.testing.assert_allclose(logits[0], want[-1], atol=2e-5)


def test_the_models_positions_are_the_limit(model_factory, text):
    engine = Engine(model_factory(max_positions=33), pages=8, page_size=PAGE, prefill_chunk=32)
    (sequence,) = engine.prefill([text[:31]])
    engine.decode([sequence], [1])
    engine.extend(sequence, [1])
    for call in (lambda: engine.decode([sequence], [1]), lambda: engine.extend(sequence, [1])):
        with pytest.raises(ValueError, match="34 tokens is longer than the model's 33 positions"):
            call()
    assert (sequence.length, len(sequence.tokens)) == (33, 33)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"page_size": 100, "prefill_chunk": 250}, "multiple of page_size"),
        (
            {"policy": "top:8", "page_size": 64, "prefill_chunk": 64},
            "does not divide page_size 64: use a page_size that is a multiple of 128",
        ),
        ({"policies": ["cascade:2/all+cache"], "page_size": 64, "prefill_chunk": 64}, "block_size 128 does not divide page_size 64"),
        ({"batch_buckets": (4, 2)}, "ascending"),
        ({"pages": 0}, "pages must be at least 1, got 0"),
        ({"policy": "best:8"}, "not understood"),
        ({"policy": TopTokens(8)}, "tokens:8 needs latent pages and a lightning indexer"),
        ({"policies": ["dense", TopTokens(8)]}, "in every layer of attention, which this model does not have"),
    ],
)
def test_impossible_engines_are_refused(model, options, match):
    with pytest.raises(ValueError, match=match):
        Engine(model, **({"pages": 4} | options))


def test_a_saved_sequence_comes_back_bit_for_bit(engine, model, text, tmp_path):
    """Read through a policy that scans the index, which the file does not hold."""
    policy = TopBlocks(1, local=1, block_size=16)
    (sequence,) = engine.prefill([text[:70]])
    engine.save(sequence, tmp_path / "prompt.safetensors")
    other = Engine(model, policy, pages=40, page_size=PAGE, prefill_chunk=32)
    other.prefill([text[:17]])
    restored = other.restore(tmp_path / "prompt.safetensors")
    assert (restored.tokens, restored.length) == (text[:70], 70)
    for token in text[70:90]:
        np.testing.assert_array_equal(np.asarray(engine.decode([sequence], [token], policy)), np.asarray(other.decode([restored], [token])))
    assert engine.last_reads.blocks[0] == 3 * model.config.cache_spec(16).kv_heads, "most blocks are left out"
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.safetensors"]
    sequence.tokens.pop()
    with pytest.raises(ValueError, match=r"90 tokens were written, but \.tokens holds 89"):
        engine.save(sequence, tmp_path / "other.safetensors")


def test_pages_that_come_back_make_no_program_compile_again(engine, text, tmp_path):
    """Nothing commits them to a device: a program's results are committed if one argument is, and so all pages would
    be."""

    def decoded_and_prefilled():
        (other,) = engine.prefill([text[:40]])
        for token in range(2):
            engine.decode([sequence], [token])
        engine.free(other)
        return [step.jitted._cache_size() for step in (prefill_slice, decode_step)]

    (sequence,) = engine.prefill([text[:40]])
    engine.save(sequence, tmp_path / "prompt.safetensors")
    compiled = decoded_and_prefilled()
    engine.suspend(sequence)
    engine.resume(sequence)
    engine.restore(tmp_path / "prompt.safetensors")
    assert decoded_and_prefilled() == compiled


def test_a_file_that_does_not_fit_takes_no_page(engine, model, text, tmp_path):
    (sequence,) = engine.prefill([text[:70]])
    engine.save(sequence, tmp_path / "prompt.safetensors")
    small = Engine(model, "quest:2", pages=6, page_size=PAGE, prefill_chunk=32)
    small.prefill([text[:20]])
    with pytest.raises(OutOfPages, match="5 needed, 4 free of 6"):
        small.restore(tmp_path / "prompt.safetensors")
    assert (small.allocators["full"].free, len(small.sequences)) == (4, 1)


def test_a_sequence_of_another_engine_is_refused(engine, model, model_factory, text, tmp_path):
    (sequence,) = engine.prefill([text[:20]])
    path = tmp_path / "prompt.safetensors"
    engine.save(sequence, path)
    with pytest.raises(ValueError, match="page_size 16, this engine has 32"):
        Engine(model, pages=8, page_size=32, prefill_chunk=32).restore(path)
    with pytest.raises(ValueError, match="was made with model"):
        Engine(model_factory(rope_theta=1e5), pages=8, page_size=PAGE, prefill_chunk=32).restore(path)
    other_weights = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf * 1.001, model.params))
    with pytest.raises(ValueError, match="was made with model"):
        Engine(other_weights, pages=8, page_size=PAGE, prefill_chunk=32).restore(path)
    path.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="not a readable kvjax sequence file"):
        engine.restore(path)


@dataclasses.dataclass(frozen=True)
class MassCounter:
    """A learning policy: reads everything and adds up the attention mass of each block."""

    learns: ClassVar[AttentionMass] = AttentionMass(queries=0)

    def indexes(self) -> tuple[IndexSpec, ...]:
        return ()

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.max_pages))

    def select(self, query, layer, ctx, state):
        ids = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (query.shape[0], layer.pages.kv_heads, 4))
        return Blocks(jnp.where(ids * ctx.page_size < ctx.lengths[:, None, None], ids, -1), ctx.page_size), state

    def observe(self, mass, ctx, state):
        return state + mass.sum(1)

    def attend(self, query, layer, ctx, state):
        return select_and_attend(self, query, layer, ctx, state)

    def describe(self):
        return "mass counter"


@pytest.mark.long
def test_a_policy_that_learns_gets_the_mass_and_keeps_its_state_per_sequence(model, text):
    policy = MassCounter()
    engine = Engine(model, policy, policies=["dense"], pages=24, page_size=PAGE, prefill_chunk=32)
    one, two = engine.prefill([text[:50], text[50:80]])
    dense = engine.decode([engine.fork(one)], [4], "dense")
    logits = engine.decode([one, two], [4, 5])
    np.testing.assert_allclose(np.asarray(logits[0]), np.asarray(dense[0]), atol=1e-4)
    engine.decode([two], [6])
    heads = model.config.layers[0].mixer.num_heads
    for layer in range(model.config.num_layers):
        first, second = np.asarray(one.states[policy][layer])[0], np.asarray(two.states[policy][layer])[0]
        np.testing.assert_allclose(first.sum(), heads, rtol=1e-5)
        np.testing.assert_allclose(second.sum(), 2 * heads, rtol=1e-5)
        assert (first[:4] > 0).all()
        assert (second[:2] > 0).all()
        assert (second[2:] == 0).all()


def test_a_fork_has_its_own_books(model, text):
    """State of a learning policy, tokens and length go on from the parent's, and apart."""
    policy = MassCounter()
    engine = Engine(model, policy, pages=24, page_size=PAGE, prefill_chunk=32)
    (parent,) = engine.prefill([text[:40]])
    engine.decode([parent], [4])
    child = engine.fork(parent)
    engine.decode([child], [5])
    heads = model.config.layers[0].mixer.num_heads
    np.testing.assert_allclose(np.asarray(parent.states[policy][0]).sum(), heads, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(child.states[policy][0]).sum(), 2 * heads, rtol=1e-5)
    assert (parent.tokens, parent.length) == ([*text[:40], 4], 41)
    assert (child.tokens, child.length) == ([*text[:40], 4, 5], 42)


def test_the_memory_plan_adds_up(model, monkeypatch):
    engine = Engine(model, "quest:2", pages=24, page_size=PAGE, prefill_chunk=32)
    plan = engine.memory_plan()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._pool.layers))
    assert plan.page_bytes * 24 == held
    assert plan.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) == 4 * model.config.num_params
    assert plan.bytes_per_1k_tokens == plan.page_bytes * 64
    assert plan.pages_that_fit > 0
    monkeypatch.setattr("kvjax.engine.memory.free_bytes", lambda device: 1000 * plan.page_bytes)
    assert engine.memory_plan().pages_that_fit == 1000, "beside the weights, which are loaded"
    with pytest.raises(OutOfPages, match="memory has room for 1,000 more"):
        engine.prefill([[1] * 400])
    before = memory_plan(
        model.config,
        page_size=PAGE,
        indexes=engine.indexes,
        available_bytes=plan.weights_bytes + 7 * plan.page_bytes + 5,
    )
    assert (before.weights_bytes, before.page_bytes, before.pages_that_fit) == (plan.weights_bytes, plan.page_bytes, 7)
    assert dataclasses.replace(before, available_bytes=0).pages_that_fit == 0
    for word in ("weights", "cache per 1K tokens", "pages that fit"):
        assert word in str(plan)


@pytest.mark.long
def test_warmup_of_a_model_whose_positions_end_within_a_page(model_factory):
    engine = Engine(model_factory(max_positions=60), pages=8, page_size=16, prefill_chunk=32, batch_buckets=(1,))
    engine.warmup(tokens=60)
    with pytest.raises(ValueError, match="a sequence of 61 tokens is longer than the model's 60 positions"):
        engine.warmup(tokens=61)
    Engine(engine.model, pages=2, page_size=64, prefill_chunk=64, batch_buckets=(1,)).warmup()
    assert (engine.allocators["full"].free, engine.sequences) == (8, set())


def test_warmup_compiles_what_the_first_call_needs(model_factory, text):
    """No step is compiled any more, whatever the lengths up to the one named: tables of 16, 32 and 64 pages."""
    engine = Engine(model_factory(num_layers=1, rope_theta=777.0), "quest:2", pages=80, page_size=PAGE, prefill_chunk=32)
    engine.warmup(batch=3, tokens=600)
    assert (engine.allocators["full"].free, engine.sequences) == (80, set())
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in (3, 270, 530):
            sequences = engine.prefill([(text * 2)[:length], text[:5], text[:9]])
            tokens = np.zeros(4, np.int32)
            for _ in range(2):
                tokens = engine.decode_and_sample([*sequences, None], tokens, SamplingRows.of([None] * 4)).tokens
            for sequence in sequences:
                engine.free(sequence)
        assert not compiled
        engine.prefill([(text * 5)[: 65 * PAGE]])
        assert compiled, "the listener hears compilations: a longer sequence needs a wider table"
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_sequence_that_grew_again_in_other_pages_is_read_there(model, text):
    """To the length at which its page table last stood on the device."""
    engine = Engine(model, pages=8, page_size=PAGE, prefill_chunk=32, batch_buckets=(1,))
    (sequence,) = engine.prefill([text[:16]])
    engine.decode([sequence], [text[16]])
    (_, before), _ = sequence.pages["full"], engine.truncate(sequence, 16)
    (other,) = engine.prefill([text[40:50]])
    engine.extend(sequence, [text[16]])
    assert before in other.pages["full"]
    assert before not in sequence.pages["full"]
    found = engine.decode([sequence], [text[17]])[0]
    np.testing.assert_allclose(found, model.full_forward(text[:18])[17], rtol=0, atol=1e-5)


def test_fork_and_restore_hold_no_second_copy_of_the_cache(model):
    engine = Engine(model, "quest:2", pages=2048, page_size=128)
    layers, size = engine._pool.layers, sum(layer.pages.k.nbytes + layer.pages.v.nbytes for layer in engine._pool.layers)
    page, pages = jnp.int32(0), jnp.zeros(PIECE, jnp.int32)
    blocks = (jnp.zeros(block_bytes(engine.spec, "full"), jnp.uint8),) * PIECE
    copied = copy_page.lower(layers, (page,) * len(layers), (page,) * len(layers)).compile()
    kinds = {"group": "full", "numbers": engine.spec.holding, "indexes": engine.indexes}
    kinds["shapes"] = _arrays_of(engine.spec, "full", engine.spec.holding)
    restored = _unpack.lower(layers, pages, pages, pages, blocks, **kinds).compile()
    for compiled in (copied, restored):
        assert compiled.memory_analysis().temp_size_in_bytes < size / 20


def test_a_former_module_is_answered():
    with pytest.raises(ImportError, match=r"kvjax.engine.decode_runner is part of kvjax.engine.engine now"):
        __import__("kvjax.engine.decode_runner")
