"""Running sequences that are larger than the device: pages in host memory, read in place or through the hot buffer,
change no bits."""

import collections
import dataclasses
import functools
import itertools
import time
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histories import FAMILIES, FEW, LARGE, LATE, SMALL, History, engine_for, run_histories
from quick_cases import rest_long
from tiny_models import TINY, TinyModel, altered, make_family, make_model, random_weights, shallow

import kvjax
from kvjax import Engine
from kvjax.cache import OPEN, MissingPages
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.host_pool import FrameCounts, hot_buffer
from kvjax.cache.host_pool.frame_table import Frames
from kvjax.cache.pool import Pool
from kvjax.cache.stores.blocks import block_bytes
from kvjax.engine import paged_attention
from kvjax.engine.memory import host_memory, memory_plan
from kvjax.engine.prefill_runner import Prefiller
from kvjax.evaluation.needle import NeedleTask, documentation_text, encode_text, vocabulary_words
from kvjax.evaluation.retrieval import needle_exact_match, prompt_start
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import TopBlocks, Window

FRAMES = FrameCounts(device=6, hot=8, host=34)
"""Of the engines: as many pages as those of `Sizes`."""
SEEDS = (4, *range(5, 60), *range(4))
"""Of histories of `FEW`. The first moves 23 pages; three of the last four move none."""


class HostHistory(History):
    """An engine with a few pages on the device, and the others in host memory. totals: of all histories."""

    totals: ClassVar[collections.Counter[str]] = collections.Counter()

    def make_engine(self):
        packed = parse_cache_format(self.shared.get("cache_format"), self.model.config.compute_dtype)
        planned = {"page_size": self.sizes.page, "cache_format": packed}
        frame = memory_plan(self.model.config, **planned).frame_bytes
        few = dataclasses.replace(self.sizes, pages=FRAMES.device + (0 if self.model.config.latent else FRAMES.hot))
        stores = ({"reuse": False}, {}, {"disk": self.folder / f"pages-{time.monotonic_ns()}"})[self.random.integers(3)]
        spec, total = self.model.config.cache_spec(self.sizes.page, packed), FRAMES.host * frame
        if "disk" in stores:
            stores["disk_bytes"] = 9 * sum(block_bytes(spec, group.name) for group in spec.groups if group.name != OPEN)
        if "reuse" not in stores:  # a part is a store for windows and states
            plan = memory_plan(self.model.config, **planned, prefill_chunk=self.sizes.chunk)
            given = itertools.count(total, frame // 8)
            total = next(each for each in given if host_memory(plan, each, spec, chunk=self.sizes.chunk).pages == FRAMES.host)
        return engine_for(self.model, few, host_bytes=total, **stores, **self.shared)

    def differences(self):
        frames, held = self.engine._pool.frames["full"], self.engine._pool._hot
        buffers = [] if held is None else [each for each in held.tiles if each is not None]
        assert frames.counts == (dataclasses.replace(FRAMES, hot=0) if self.model.config.latent else FRAMES)
        self.totals.update({"moved": frames.moved, "hot tiles": sum(int((each.tags >= 0).sum()) for each in buffers)})
        found = super().differences()
        self.engine.close()
        return found


@pytest.fixture
def totals():
    """The counts of the test's histories."""
    HostHistory.totals = collections.Counter()
    return HostHistory.totals


@pytest.mark.bits
@pytest.mark.parametrize("name", rest_long({name: name for name in FAMILIES}, "llama"))
def test_pages_in_host_memory_change_no_bits(name, tmp_path, totals):
    seeds, sizes = (SEEDS[:1], FEW) if name == "llama" else (range(3), SMALL)
    counts = run_histories(make_family(name), seeds, tmp_path, sizes, HostHistory)
    assert counts["sequences compared"] > 3
    assert totals["moved"] > 20
    assert totals["hot tiles"] > (0 if name != "deepseek_v32" else -1)


class PackedHostHistory(HostHistory):
    against_forward = False


PACKED = {
    "K by channel, V in 4 bits": "k=int8:channel,v=int4",
    "keys alone": "k=fp8_e4m3",
    "groups": "q8_0",
    "rotated": "int4+rotate",
    "a scale per page": "int8:page",
    "lattice": "e8",
}


@pytest.mark.bits
@pytest.mark.parametrize("packed", rest_long(PACKED, "K by channel, V in 4 bits"))
def test_packed_pages_in_host_memory_change_no_bits(packed, tmp_path, totals, monkeypatch):
    monkeypatch.setattr(PackedHostHistory, "shared", {"cache_format": PACKED[packed]})
    counts = run_histories(make_family("llama", head_dim=32), SEEDS[:1], tmp_path, FEW, PackedHostHistory)
    assert counts["sequences compared"] > 3
    assert totals["moved"] > 20
    assert totals["hot tiles"] > 0


MANY = {
    "llama": ("int8", functools.partial(make_family, "llama")),
    "windows": ("k=int4:channel,v=int4:16", functools.partial(make_family, "gemma3_text")),
    "states": ("int8", functools.partial(make_family, "qwen3_5_text")),
    "one layer of three packs": ("fp8,boundary=1", functools.partial(make_model, num_layers=3)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MANY)
def test_packed_pages_in_host_memory_change_no_bits_in_many_histories(case, tmp_path, totals, monkeypatch, capsys):
    packed, model = MANY[case]
    monkeypatch.setattr(PackedHostHistory, "shared", {"cache_format": packed})
    counts = run_histories(model(), range(4000, 4040), tmp_path, SMALL, PackedHostHistory)
    with capsys.disabled():
        print(f"\n{case}, {packed}: {dict(counts)}, {dict(totals)}, 0 differences")
    assert totals["moved"] > 20
    assert totals["hot tiles"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("packed", ["int8", "k=fp8_e4m3,v=int4", "k=int4:channel,v=int4:32", "q4_0"])
def test_packed_pages_in_host_memory_change_no_bits_on_a_gpu(packed, tmp_path, totals, monkeypatch):
    monkeypatch.setattr(PackedHostHistory, "shared", {"cache_format": packed})
    counts = run_histories(make_family("llama", head_dim=128, dtype="bfloat16"), range(10), tmp_path, LARGE, PackedHostHistory)
    print(f"\n{packed}: {dict(counts)}, {dict(totals)}, 0 differences")
    assert totals["moved"] > 20
    assert totals["hot tiles"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "count"), [("float32", 250), ("bfloat16", 100)])
def test_pages_in_host_memory_change_no_bits_in_many_histories(name, dtype, count, tmp_path, totals, capsys):
    counts = run_histories(make_family(name, dtype=dtype), range(1000, 1000 + count), tmp_path, SMALL, HostHistory)
    with capsys.disabled():
        print(f"\n{name} {dtype}: {dict(counts)}, {dict(totals)}, 0 differences")


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("part", range(5))  # each a minute
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_in_host_memory_change_no_bits_on_a_gpu(name, part, tmp_path, totals):
    model, seeds = make_family(name, head_dim=128, window=200, dtype="bfloat16"), range(10 * part, 10 * part + 10)
    counts = run_histories(model, seeds, tmp_path, LARGE, HostHistory)
    print(f"\n{name}: {dict(counts)}, {dict(totals)}, 0 differences")
    assert counts["sequences compared"] > 3


def answers(length: int, trials: int, batch: int, policies: tuple[str, ...], share: float | None, named="needle", seed=3) -> list:
    """What a model says to questions about long texts, and what it read. share: of the cache on the device; None: all
    of it."""
    model = kvjax.load(named)
    text, tokenizer = encode_text(model.tokenizer, documentation_text()), model.tokenizer
    task = NeedleTask(tokenizer, text, vocabulary_words(tokenizer), distractors=16, prefix_ids=prompt_start(tokenizer))
    pages = batch * (length // 128 + 4)
    sizes = {"pages": pages}
    if share is not None:
        there = int(pages * share)
        sizes = {"pages": there, "host_bytes": (pages - there // 4) * memory_plan(model.config).frame_bytes}
    engine = Engine(model, policies=policies, prefill_chunk=max(256, length // 16), batch_buckets=(batch,), **sizes)
    trials = task.trials(length - 64, trials, seed=seed)
    results = needle_exact_match(engine, trials, policies, tokenizer, batch=batch)
    if share is not None:
        assert engine.pool_stats().moved_bytes > 0
        assert engine.pool_stats().found > 0
    return [(each.policy, each.answers, each.keys_per_step) for each in results]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("length", "trials", "batch", "policies"),
    [
        pytest.param(2560, 2, 2, ("top:8",), marks=pytest.mark.long, id="short"),
        pytest.param(8192, 8, 4, ("dense", "top:8"), marks=pytest.mark.long, id="8K"),
        pytest.param(32_768, 200, 8, ("dense", "top:8", "top:32"), marks=pytest.mark.gpu, id="32K"),
    ],
)
def test_needles_are_answered_the_same_with_a_quarter_of_the_cache_on_the_device(length, trials, batch, policies):
    if trials == 200 and jax.default_backend() != "gpu":
        pytest.skip("takes hours on a CPU")
    assert answers(length, trials, batch, policies, 0.25) == answers(length, trials, batch, policies, None)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="takes days on a CPU")
@pytest.mark.parametrize("part", range(4))
def test_needles_at_128k_are_answered_the_same_with_a_quarter_of_the_cache_on_the_device(part, request):
    """200 needles in all."""
    if (folder := request.config.getoption("--needle-128k")) is None:
        pytest.skip("needs --needle-128k FOLDER")
    given = 131_072, 50, 5, ("dense", "top:8", "top:32")
    few, every = (answers(*given, share, folder, seed=part) for share in (0.25, None))
    assert few == every


# What must fail: each order that the bits need, taken away.


def _late_moves(monkeypatch):
    """Pages are copied to host memory one call too late: after their frames were written again."""
    honest, held = Frames.take_moves, {}

    def late(frames):
        before = held.pop(id(frames), np.zeros((0, 2), np.int32))
        held[id(frames)] = honest(frames)
        return before

    monkeypatch.setattr(Frames, "take_moves", late)


def _no_moves(monkeypatch):
    """Pages get frames in host memory, and are not copied there."""
    monkeypatch.setattr(Frames, "take_moves", lambda frames: (frames._moves.clear(), np.zeros((0, 2), np.int32))[1])


def _ids_for_frames(monkeypatch):
    """A transfer takes page ids for frames."""
    monkeypatch.setattr(Pool, "frames_of", lambda pool, group, pages: np.asarray(pages, np.int32))


def _nothing_is_forgotten(monkeypatch):
    """The hot buffer keeps tiles of pages whose ids got a new content."""
    monkeypatch.setattr(Frames, "take_bound", lambda frames: [])


def _open_pages_are_kept(monkeypatch):
    """The hot buffer keeps tiles of pages that are still written to."""
    honest = hot_buffer.fetch

    def fetch(buffer, pages, blocks, table, frames, lengths, now, **sizes):
        return honest(buffer, pages, blocks, table, frames, lengths + pages.page_size, now, **sizes)

    monkeypatch.setattr(paged_attention, "fetch", fetch)


def _late_copies(monkeypatch):
    """Attention reads the hot buffer as it was before the missing tiles were copied there."""
    honest = hot_buffer.fetch

    def fetch(buffer, pages, *lists, **sizes):
        buffer, _, fetched = honest(buffer, pages, *lists, **sizes)
        return buffer, pages, fetched

    monkeypatch.setattr(paged_attention, "fetch", fetch)


MUTANTS = (_late_moves, _no_moves, _ids_for_frames, _nothing_is_forgotten, _open_pages_are_kept, _late_copies)
OF_PROGRAMS = (_open_pages_are_kept, _late_copies)
"""These change what is compiled; the others change what the host does between programs, so they run the programs of the
sound engine."""


@pytest.mark.parametrize("mutant", rest_long(MUTANTS, _late_moves))
def test_an_order_taken_away_corrupts(mutant, tmp_path, monkeypatch):
    forget = jax.clear_caches if mutant in OF_PROGRAMS else lambda: None
    forget()
    mutant(monkeypatch)
    seeds, sizes = (SEEDS, FEW) if mutant is _late_moves else (range(60), SMALL)
    try:
        with pytest.raises((AssertionError, RuntimeError), match=r"differ|hold nothing"):
            run_histories(make_family("llama"), seeds, tmp_path, sizes, HostHistory)
    finally:
        forget()


class TestFrames:
    """The host's record of frames."""

    def test_the_page_that_has_been_there_longest_moves(self):
        frames = Frames(FrameCounts(2, 0, 3))
        frames.bind([0, 1])
        frames.bind([4])
        assert frames.frame_of.tolist() == [2, 1, -1, -1, 0]
        assert frames.take_moves().tolist() == [[0, 2]]
        assert (frames.on_device, frames.on_host, frames.moved) == (2, 1, 1)

    def test_pages_that_are_bound_together_do_not_push_each_other_out(self):
        frames = Frames(FrameCounts(2, 0, 3))
        frames.bind([0, 1, 2, 3])
        assert frames.frame_of.tolist() == [0, 1, 2, 3, -1]
        assert not frames.moving

    def test_a_released_page_does_not_move(self):
        frames = Frames(FrameCounts(1, 0, 2))
        frames.bind([0])
        frames.bind([1])
        frames.release([0, 2])
        assert frames.take_moves().size == 0
        frames.bind([2])
        assert frames.take_moves().tolist() == [[0, 1]]

    def test_every_page_has_room(self):
        frames = Frames(FrameCounts(2, 8, 3))
        for page in range(5):
            frames.bind([page])
        assert sorted(frames.frame_of.tolist()) == [0, 1, 10, 11, 12]


def test_a_policy_that_attends_by_an_op_of_its_own_is_read_in_place():
    """The hot buffer goes by what `select` lists; these attend to something else."""

    class Selects(TopBlocks):
        """`TopBlocks.attend` selects by itself."""

        def select(self, query, layer, ctx, state):
            raise AssertionError("asked for a list")

    class Attends(Window):
        def attend(self, query, layer, ctx, state):
            raise AssertionError("never run")

        select = Selects.select

    query, pages = jnp.zeros((1, 1, 1, 1)), types.SimpleNamespace(page_size=128)
    for policy in (Selects(8), Attends(0, 64)):
        assert paged_attention.attend_hot(policy, query, None, pages, (), None, None, 0) is None
    with pytest.raises(AttributeError):  # it goes on to look at the layer, which is none here
        paged_attention.attend_hot(TopBlocks(8), query, None, pages, (), None, None, 0)


def test_a_fetch_holds_what_it_says():
    """Random lists, more than the buffer holds: a held tile has the bytes of its page, and tiles of one list are found
    the next time."""
    rng, counts, size = np.random.default_rng(0), FrameCounts(2, 16, 60), 4
    pages = hot_buffer.Pages(*(jnp.asarray(rng.normal(size=(counts.total, 2, size, 8)), jnp.float32) for _ in range(2)))
    original, buffer = pages, hot_buffer.empty_hot(2, counts.device, counts.hot)
    table = jnp.asarray([rng.permutation(60) for _ in range(3)], jnp.int32)
    frames, sizes = table + counts.border, {"num_queries": 1, "border": counts.border}
    heads = np.arange(2)[None, :, None]
    totals, asked, from_host = hot_buffer.no_buffers((buffer,)), 0, 0
    for number in range(30):
        blocks = jnp.asarray([[rng.permutation(60)[:5] for _ in range(2)] for _ in range(3)], jnp.int32)
        lengths = jnp.asarray(rng.integers(100, 60 * size + 1, 3), jnp.int32)
        buffer, pages, listed = hot_buffer.fetch(buffer, pages, blocks, table, frames, lengths, jnp.int32(2 * number + 1), **sizes)
        totals, (rows,) = hot_buffer.count(totals, [listed])
        # NumPy checks what JAX fetched: it compiles no programs.
        found, sources = np.asarray(listed.frames), np.asarray(listed.sources)
        asked += int((found >= counts.device).sum())
        real = np.take_along_axis(np.asarray(frames), np.asarray(blocks).reshape(3, -1), axis=1).reshape(blocks.shape)
        for pool, before in ((pages.k, original.k), (pages.v, original.v)):
            assert np.array_equal(np.asarray(pool)[found, heads], np.asarray(before)[real, heads])
        held = found < counts.border
        assert not (held & ((np.asarray(blocks) + 1) * size > np.asarray(lengths)[:, None, None] - 1)).any(), "an open page is held"
        assert rows.tolist() == ((real == found) | (sources.reshape(3, 5, 2).mT >= 0)).sum((1, 2)).tolist()
        from_host += int(np.asarray(rows).sum())
        buffer, pages, again = hot_buffer.fetch(buffer, pages, blocks, table, frames, lengths, jnp.int32(2 * number + 2), **sizes)
        assert (np.asarray(again.frames)[held] == found[held]).all(), number
        assert (np.asarray(again.sources) >= 0).sum() <= (~held).sum(), number
    assert asked - from_host > 20
    assert (hot_buffer.counted(totals.asked[0]), hot_buffer.counted(totals.from_host[0])) == (asked, from_host)


def test_layers_that_share_a_buffer_are_counted_together():
    """Lists of two shapes; the first and the third are of one layer's buffer, and one layer listed nothing."""
    rng, first, border = np.random.default_rng(1), 4, 20

    def listed(owner, width):
        frames = jnp.asarray(rng.integers(-1, 40, (2, 3, width)), jnp.int32)
        return hot_buffer.Fetched(frames, jnp.asarray(rng.integers(-1, 3, (2 * width, 3)), jnp.int32), owner, first, border)

    found = [listed(0, 5), None, listed(0, 5), listed(2, 5), listed(2, 7)]
    before = hot_buffer.no_buffers((None,) * 3)
    before = before.replace(asked=before.asked.at[:, 1].set(7), from_host=before.from_host.at[:, 1].set(5))
    totals, rows = hot_buffer.count(before, found)
    for owner in range(3):
        own = [each for each in found if each is not None and each.owner == owner]
        asked = sum(int((each.frames >= first).sum()) for each in own)
        copied = sum(int((each.frames >= border).sum()) + int((each.sources >= 0).sum()) for each in own)
        assert (hot_buffer.counted(totals.asked[owner]), hot_buffer.counted(totals.from_host[owner])) == (7 + asked, 5 + copied)
    assert totals.asked.dtype == totals.from_host.dtype == jnp.int32
    assert [each is None for each in rows] == [False, True, False, False, False]
    assert sum(int(each.sum()) for each in rows if each is not None) == int(totals.from_host.sum()) - 3 * 5


def test_counters_go_beyond_32_bits():
    words = jnp.zeros((2, 2), jnp.int32)
    for _ in range(6):
        words = hot_buffer._add(words, jnp.array([2**30 - 1, 1], jnp.int32))
    assert [hot_buffer.counted(each) for each in words] == [6 * (2**30 - 1), 6]


@pytest.mark.quick("60-8")
@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("host", [0, 60])
def test_a_drafted_step_may_write_to_several_small_pages(page_size, host):
    """16 tokens over pages of 4 or 8: more than the page of the next token and the one after it."""
    model, tokens = shallow(make_family("llama")), np.random.default_rng(0).integers(0, 97, 78).tolist()
    places = {"host_bytes": host * memory_plan(model.config, page_size=page_size).frame_bytes} if host else {}
    engine = Engine(model, page_size=page_size, prefill_chunk=2 * page_size, batch_buckets=(1,), pages=6 if host else 60, **places)
    (sequence,) = engine.prefill([tokens[:30]])
    for start in range(30, 78, 16):
        (logits,) = engine.decode([sequence], [tokens[start : start + 16]])
        expected = model.full_forward(np.array(tokens[: start + 16]))[start:]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_pages_that_move_between_slices_of_a_chunk_change_no_bits(monkeypatch):
    """Steps of another sequence, which push pages of the prompt to host memory while its chunk is half done. A slice
    that trusted where they were, or what the slice before had copied, would read other pages."""
    monkeypatch.setattr("kvjax.engine.prefill_runner.SLICES", (1,))  # a layer each
    config, random = altered(TINY, num_layers=3), np.random.default_rng(0)
    model = TinyModel(TransformerDecoder(config), random_weights(config))
    prompt, other = random.integers(0, 97, 118).tolist(), random.integers(0, 97, 30).tolist()
    frame = memory_plan(model.config, page_size=4).frame_bytes

    def logits(**places):
        engine = Engine(model, page_size=4, prefill_chunk=32, batch_buckets=(1,), **places)
        (asked,) = engine.prefill([other])
        sequence = engine.new_sequence()
        engine.reserve([sequence], len(prompt))
        prefiller, moved = engine._prefiller, 0
        while sequence.length < len(prompt):
            run = prefiller.begin(sequence, prompt[sequence.length :], engine.prefill_policy)
            before = engine._pool.moved
            while not prefiller.advance(run, 1):
                for _ in range(4):  # a page of its own
                    engine.decode([asked], [1])
            moved += engine._pool.moved - before
            run.finish()
        assert len(prefiller.slices) > 2
        return np.asarray(sequence.logits), moved, engine

    tiered, moved, engine = logits(pages=10, host_bytes=50 * frame)
    assert moved > 4, "pages move while a chunk runs"
    assert engine.pool_stats().copied_bytes > 0
    np.testing.assert_array_equal(tiered, logits(pages=60)[0])


def test_bytes_that_prefill_copies_are_those_of_the_layers_that_read_them(monkeypatch):
    """Once for each layer that reads pages of the host, whichever layer owns them, and not again for the layers that
    had run when pages moved between two slices."""
    model = make_family("shared")  # four layers, of which two keep all tokens and one of these two owns the pages
    frame = memory_plan(model.config, page_size=16).frame_bytes
    engine = Engine(model, page_size=16, prefill_chunk=32, batch_buckets=(1,), pages=6, host_bytes=80 * frame)
    honest, found = Prefiller._stage, []
    monkeypatch.setattr(Prefiller, "_stage", lambda *given: found.append(honest(*given)) or found[-1])
    engine.free(*engine.prefill([[1] * 200]))
    copied = sum(window.rows + window.apart for staged in found for _, window in staged.values())
    assert engine.pool_stats().copied_bytes == 2 * copied * frame

    monkeypatch.setattr("kvjax.engine.prefill_runner.SLICES", (1,))  # a layer each
    config = altered(TINY, num_layers=3)
    model = TinyModel(TransformerDecoder(config), random_weights(config))
    frame = memory_plan(model.config, page_size=16).frame_bytes
    engine = Engine(model, page_size=16, prefill_chunk=32, batch_buckets=(1,), pages=6, host_bytes=80 * frame)
    sequence = engine.prefill([[1] * 128])[0]
    engine.reserve([sequence], 32)
    found.clear()
    before, run = engine.pool_stats().copied_bytes, engine._prefiller.begin(sequence, [1] * 32, engine.prefill_policy)
    while not engine._prefiller.advance(run, 1):
        run.moved = -1  # as after a move
    windows = [staged["full"][1] for staged in found]
    assert len(windows) == len(engine._prefiller.slices)
    assert engine.pool_stats().copied_bytes - before == (windows[0].rows + windows[0].apart) * frame


def test_decode_tells_of_missing_pages(monkeypatch):
    """Pages that got no frame are an error in calls of `decode` too, as soon as the count is known."""
    model = shallow(make_family("llama"))
    frame = memory_plan(model.config, page_size=16).frame_bytes
    engine = Engine(model, page_size=16, prefill_chunk=32, batch_buckets=(1,), pages=6, host_bytes=6 * frame)
    (sequence,) = engine.prefill([[3] * 16])
    monkeypatch.setattr(Pool, "bind", lambda pool, pages, **how: None)

    def steps():  # the count of the first is known in its own call, or in the next
        for token in range(2):
            jax.block_until_ready((engine.decode([sequence], [token]), engine.last_reads.missing))

    with pytest.raises(MissingPages, match="no store holds"):
        steps()


def test_sizes_that_cannot_be_are_refused():
    model = make_family("llama")
    for sizes, message in (
        ({"host_bytes": 1}, "host_bytes of 1 is less than one page of every layer group, [0-9,]+ bytes: give more"),
        ({"host_bytes": 2**62}, "more than this machine's memory"),
        ({"host_bytes": 10**6, "device_bytes": 1}, "device_bytes of 1 holds no page: give at least .* and the indexes of"),
        ({"host_bytes": 0}, "host_bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, "quest:1", page_size=16, prefill_chunk=32, **sizes)


class ReleasingHistory(History):
    """The same, where sequences give pages back. No step scans an index, so there is no hot buffer."""

    def make_engine(self):
        frame = memory_plan(self.model.config, page_size=self.sizes.page).frame_bytes
        return engine_for(self.model, dataclasses.replace(self.sizes, pages=FRAMES.device), host_bytes=FRAMES.host * frame)


@pytest.mark.long
@pytest.mark.bits
def test_pages_that_are_given_back_leave_host_memory_too(tmp_path):
    counts = run_histories(make_family("llama"), range(6), tmp_path, LATE, ReleasingHistory)
    assert counts["sequences compared"] > 3


@pytest.mark.bits
def test_heavy_hitters_in_host_memory_have_the_same_bits():
    model, text = shallow(make_family("llama")), [3, 5, 8, 13] * 40
    frame = memory_plan(model.config, page_size=16).frame_bytes
    sizes = {"page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,)}
    here, there = Engine(model, "heavy:2", pages=40, **sizes), Engine(model, "heavy:2", pages=8, host_bytes=32 * frame, **sizes)
    (one,), (two,) = here.prefill([text]), there.prefill([text])
    for token in text[:60]:
        np.testing.assert_array_equal(here.decode([one], [token]), there.decode([two], [token]))
    assert [page >= 0 for page in one.pages["full"]] == [page >= 0 for page in two.pages["full"]]
    assert there.allocators["full"].total - there.allocators["full"].free <= 1 + 2 + 4 + 1


@pytest.mark.long
def test_a_prompt_that_copies_much_in_small_chunks_is_warned_about_once(monkeypatch, caplog):
    model = shallow(make_family("llama"))
    frame = memory_plan(model.config, page_size=16).frame_bytes
    engine = Engine(model, page_size=16, prefill_chunk=32, pages=6, host_bytes=20 * frame, reuse=False)
    # The first chunk with pages in host memory begins at token 96: then 96, 128, 160 and 192 tokens are copied.
    copied = (96 + 128 + 160 + 192) * frame // 16
    monkeypatch.setattr("kvjax.engine.prefill_runner.MUCH_COPIED", copied)
    engine.free(*engine.prefill([[1] * 200]))
    assert not caplog.records
    monkeypatch.setattr("kvjax.engine.prefill_runner.MUCH_COPIED", copied - 1)
    for _ in range(2):
        engine.free(*engine.prefill([[1] * 200]))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "200 tokens in chunks of 32" in said
    assert "larger prefill_chunk" in said
