"""Pages that move between frames: the pure steps give the bits of a cache whose frames are page ids, and count pages
that are nowhere."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import some_long
from tiny_models import make_family, make_latent_model, make_model, make_recurrent_model
from whole_chunks import prefill_step

import kvjax.engine.paged_attention
from kvjax.cache import OPEN, Cache, MissingPages, Residency, append, check_missing
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.packed import append_chunk, append_packed
from kvjax.engine.sampling import Sampled, Sampling
from kvjax.engine.step_output import AttentionStats, pack, unpack
from kvjax.engine.steps import ChunkInputs, StepInputs, StepProgram, StepStatic, decode_step
from kvjax.policies.decode import SelectContext, TopBlocks, TopTokens, parse
from kvjax.policies.prefill import BoundsBlocks, PrefillContext, TopTokensPrefill, indexes_of, parse_prefill
from kvjax.scheduler.batch import ActiveBatch, PendingStep, Sample, read
from pallas_kernels.core import pages as pages_of_ops

pytestmark = pytest.mark.bits

P, CHUNK, WIDTH, IDS, SPARE = 16, 32, 16, 24, 5
LENGTHS = (90, 70)
"""Tokens of the two rows that prefill writes."""
NOWHERE = -1


@functools.cache
def windowed():
    return make_model(windows=(40, None))


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs: the steps, and two sequences in pages of shuffled ids."""

    model: object
    decode: object
    prefill: object
    cache_format: str | None = None

    @property
    def indexes(self):
        return tuple(dict.fromkeys((*self.decode.indexes(), *indexes_of(self.prefill))))

    @property
    def spec(self):
        return self.model.config.cache_spec(P, parse_cache_format(self.cache_format, self.model.config.compute_dtype))

    @property
    def groups(self):
        """Of pages. A sequence's open pages stay in their row."""
        return tuple(group.name for group in self.spec.groups if group.name != OPEN)

    def tables(self, seed=3):
        """Page ids of every group, all of a row's at once, in an order of its own."""
        found = {OPEN: np.array([[1], [0]], np.int32)} if self.cache_format else {}
        for number, name in enumerate(self.groups):
            ids = np.random.default_rng([seed, number]).permutation(IDS).astype(np.int32)
            found[name] = np.full((2, WIDTH), -1, np.int32)
            for row in range(2):
                found[name][row, :8] = ids[8 * row : 8 * row + 8]
        return found


def cases():
    small = TopBlocks(k=1, sink=1, local=1, block_size=P)
    bounds = BoundsBlocks(k=1, chi=16, key_block=P, sink_tokens=P, window_tokens=P, dense_below=0)
    return {
        "dense": Case(make_model(), parse("dense"), parse_prefill("dense")),
        "top, bounds": Case(make_model(), small, bounds),
        "windows, top": Case(windowed(), small, parse_prefill("dense")),
        "shared, top": Case(make_family("shared", window=40), small, parse_prefill("dense")),
        "packed, top": Case(make_model(), small, bounds, "k=int8:channel,v=int4"),
        "latents, tokens": Case(make_latent_model(), TopTokens(24), TopTokensPrefill(24)),
    }


CASES = cases()


def moved(before, after, pool):
    """Pages in other frames; those that hold none hold NaN, or codes that nobody wrote."""
    new = np.full((IDS + SPARE, *pool.shape[1:]), 99 if np.issubdtype(pool.dtype, np.integer) else np.nan, pool.dtype)
    new[after] = np.asarray(pool)[before]
    return jnp.asarray(new)


class Run:
    """A cache on its way through steps. frames: of which groups pages lie in frames that are not their ids."""

    def __init__(self, case: Case, frames=(), seed=0, prefill=prefill_step, decode=decode_step):
        self.case, self.rng, self.steps = case, np.random.default_rng(seed), (prefill, decode)
        self.tables = case.tables()
        self.layers = case.spec.empty({group.name: IDS for group in case.spec.groups}, case.indexes)
        self.frame_of = {name: np.arange(IDS, dtype=np.int32) for name in frames}
        self.lengths, self.states = np.zeros(2, np.int32), ((),) * len(case.spec.paged)
        for name in frames:
            self.move(name)

    def move(self, name):
        """Shuffle the frames of a group."""
        before, after = self.frame_of[name], self.rng.permutation(IDS + SPARE)[:IDS].astype(np.int32)
        layers = list(self.layers)
        for number in set(self.case.spec.layers_of(name)) & set(self.case.spec.holding):
            layers[number] = layers[number].replace(pages=jax.tree.map(functools.partial(moved, before, after), layers[number].pages))
        self.layers, self.frame_of[name] = tuple(layers), after

    def by_id(self, number):
        """Keys and values of a layer's pages by id, and its indexes."""
        layer, order = self.layers[number], self.frame_of.get(self.case.spec.layers[number].group, slice(None))
        return [np.asarray(pool)[order] for pool in jax.tree.leaves(layer.pages)], dict(layer.index)

    def cache(self, lengths):
        residency = {name: Residency(jnp.asarray(frames)) for name, frames in self.frame_of.items()}
        tables = {name: jnp.asarray(table) for name, table in self.tables.items()}
        return Cache(self.layers, tables, jnp.asarray(lengths, jnp.int32), self.case.spec, residency)

    def prefill(self, tokens, start):
        """A chunk of both rows, up to LENGTHS."""
        case, ends = self.case, np.minimum(LENGTHS, start + CHUNK)
        starts = np.full(2, start, np.int32)
        inputs = ChunkInputs(case.model.params, self.cache(ends), tokens[:, start : start + CHUNK], starts, starts)
        logits, cache, missing = self.steps[0](StepStatic(case.model.decoder, case.prefill, case.indexes), inputs)
        self.layers, self.lengths = cache.layers, ends.astype(np.int32)
        return logits, missing

    def decode(self, tokens):
        """A step of `[2, T]` tokens."""
        case = self.case
        inputs = StepInputs(case.model.params, self.cache(self.lengths), jnp.asarray(tokens), jnp.ones(2, bool), self.states)
        logits, cache, self.states, reads = self.steps[1](StepStatic(case.model.decoder, case.decode, case.indexes), inputs)
        self.layers, self.lengths = cache.layers, np.asarray(cache.lengths)
        return logits, reads

    def prefilled(self, tokens):
        for start in range(0, max(LENGTHS), CHUNK):
            self.prefill(tokens, start)
        return self


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 97, (2, 128), np.int32)


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


LONG = ("dense", "shared, top", "windows, top", "top, bounds")
"""What these read by frame, the others read too."""


@pytest.mark.quick_but("latents, tokens")
@pytest.mark.parametrize("name", some_long(CASES, *LONG))
def test_pages_that_move_between_steps_change_no_bit(name, tokens):
    case = CASES[name]
    groups = case.groups
    still, moving = Run(case), Run(case, groups, seed=5)
    for start in range(0, max(LENGTHS), CHUNK):
        (logits, none), (found, missing) = still.prefill(tokens, start), moving.prefill(tokens, start)
        same(found, logits)
        assert none is None
        assert not np.asarray(missing).any()
        check_missing(none), check_missing(missing)
        moving.move(groups[-1])
    for table in ([run.tables[groups[0]] for run in (still, moving)]) if len(groups) > 1 else ():
        table[:, 0] = -1  # given back: no window of 40 tokens reaches it
    for step in range(8):  # row 0 comes to a new page
        (logits, reads), (found, counted) = still.decode(tokens[:, step : step + 1]), moving.decode(tokens[:, step : step + 1])
        same(found, logits)
        same(counted.keys, reads.keys)
        assert reads.missing is None
        assert not np.asarray(counted.missing).any()
        moving.move(groups[step % len(groups)])
    for number in range(2):
        jax.tree.map(same, still.by_id(number), moving.by_id(number))


@pytest.mark.long
@pytest.mark.parametrize("name", ["top, bounds", "packed, top"])
def test_drafted_tokens_find_their_frames(name, tokens):
    case = CASES[name]
    still, moving = Run(case).prefilled(tokens), Run(case, ("full",), seed=6).prefilled(tokens)
    (logits, _), (found, reads) = still.decode(tokens[:, :8]), moving.decode(tokens[:, :8])
    same(found, logits)
    assert not np.asarray(reads.missing).any()


@pytest.mark.long
def test_one_group_may_move_alone(tokens):
    case = CASES["windows, top"]
    still, moving = Run(case).prefilled(tokens), Run(case, ("window:40",), seed=7).prefilled(tokens)
    same(moving.decode(tokens[:, :1])[0], still.decode(tokens[:, :1])[0])


def anew(step):
    """A step that is traced anew, whatever was traced before."""
    return StepProgram(lambda *given: step.step(*given), step.inputs, (), lambda *_: (), lambda *_: {}, "anew")


MUTANTS = {
    "prefill reads by page id": (PrefillContext, "frames", property(lambda ctx: ctx.page_table)),
    "decode reads by page id": (SelectContext, "frames", property(lambda ctx: ctx.page_table)),
    "written by page id": (kvjax.engine.paged_attention, "append", lambda *args: append(*args[:-1])),
    "a chunk packed by page id": (kvjax.engine.paged_attention, "append_chunk", lambda *args: append_chunk(*args[:-1])),
    "a step packed by page id": (
        kvjax.engine.paged_attention,
        "append_packed",
        lambda *args, sharded: append_packed(*args[:-1], args[5], sharded=sharded),
    ),
}


@pytest.mark.quick_but("prefill reads by page id", "written by page id", "a chunk packed by page id")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_page_id_taken_for_a_frame_would_show(mutant, tokens, monkeypatch):
    case = CASES["packed, top" if "packed" in mutant else "dense"]
    still = Run(case).prefilled(tokens)
    monkeypatch.setattr(*MUTANTS[mutant])
    again = {name: anew(step) for name, step in (("prefill", prefill_step), ("decode", decode_step))}
    moving = Run(case, ("full",), seed=5, **again).prefilled(tokens)
    moving.move("full")
    with pytest.raises(AssertionError):
        same(moving.decode(tokens[:, :1])[0], still.decode(tokens[:, :1])[0])


def lose(run, name, row, page):
    """Leave a page of a row without a frame, and what was there is NaN."""
    frames = run.frame_of[name].copy()
    frames[run.tables[name][row, page]] = NOWHERE
    run.frame_of = run.frame_of | {name: frames}


@pytest.mark.parametrize(
    ("name", "page", "missed"),
    [("dense", 0, True), ("dense", 5, True), ("top, bounds", 0, True), ("top, bounds", 4, True), ("top, bounds", 6, False)],
    ids=["a page", "the open page", "the sink", "the open page of a list", "a page that is not written"],
)
def test_a_listed_page_without_a_frame_is_an_error(name, page, missed, tokens):
    run = Run(CASES[name], ("full",), seed=5).prefilled(tokens)
    lose(run, "full", 1, page if page != 5 else 4)  # row 1 has 70 tokens: pages 0 to 4
    _, reads = run.decode(tokens[:, :1])
    assert (np.asarray(reads.missing) > 0).tolist() == [False, missed]
    if missed:
        with pytest.raises(MissingPages, match=r"in row 1.*Residency.frame_of"):
            check_missing(reads.missing)


def test_a_page_is_missed_by_every_layer_that_reads_it_and_by_the_one_that_writes_it(tokens):
    for page, missed in ((0, 2 * 2), (4, 2 * 2 + 1)):
        run = Run(CASES["shared, top"], ("full",), seed=5).prefilled(tokens)
        lose(run, "full", 1, page)
        _, reads = run.decode(tokens[:, :1])
        assert np.asarray(reads.missing).tolist() == [0, missed], "lists of two KV heads in the owner and in its reader"


def test_what_no_list_names_needs_no_frame(tokens):
    case = dataclasses.replace(CASES["top, bounds"], decode=TopBlocks(k=0, sink=1, local=1, block_size=P))
    whole, run = (Run(case, ("full",), seed=5).prefilled(tokens) for _ in range(2))
    lose(run, "full", 0, 2)
    (logits, _), (found, reads) = whole.decode(tokens[:, :1]), run.decode(tokens[:, :1])
    same(found, logits)
    assert not np.asarray(reads.missing).any()


@pytest.mark.parametrize(("name", "group", "page", "missed"), [("dense", "full", 0, True), ("windows, top", "window:40", 0, False)])
def test_prefill_needs_the_pages_that_its_queries_may_read(name, group, page, missed, tokens):
    """The third chunk begins at token 64; its windows of 40 tokens begin with page 1."""
    case = CASES[name]
    run = Run(case, tuple(each.name for each in case.spec.groups), seed=5)
    for start in (0, CHUNK):
        run.prefill(tokens, start)
    lose(run, group, 0, page)
    _, missing = run.prefill(tokens, 2 * CHUNK)
    assert (np.asarray(missing) > 0).tolist() == [missed, False]
    if not missed:
        run.lengths = np.full(2, 64, np.int32)
        lose(run, group, 0, 2)
        _, missing = run.prefill(tokens, 2 * CHUNK)
        assert (np.asarray(missing) > 0).tolist() == [True, False]


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_error_is_raised_where_a_step_is_read(logprobs):
    """Whether rows are looked at one by one, as for log-probabilities, or not."""
    state, sampling = SimpleNamespace(prompt_tokens=1), Sampling(logprobs=logprobs)
    one, active = jnp.ones(1, jnp.int32), ActiveBatch([Sample(state, 0, sampling, None, frozenset(), None)])
    sampled = Sampled(one, jnp.ones(1), jnp.ones(1, bool))
    for missing in (None, 0 * one):
        packed = pack(sampled, AttentionStats(one, one, missing))
        taken, ended = read(PendingStep(active.samples, packed, active, left=2), listening=False)
        assert (len(taken), ended) == (int(logprobs), False)
        assert unpack(np.asarray(packed)).blocks.tolist() == [1]
    packed = pack(sampled, AttentionStats(one, one, 3 * one))
    with pytest.raises(MissingPages, match="3 in row 0"):
        read(PendingStep(active.samples, packed, active, left=2), listening=False)
    with pytest.raises(MissingPages, match="3 in row 0"):
        unpack(np.asarray(packed))


def test_where_frames_are_ids_nothing_is_looked_up(tokens, monkeypatch):
    def never(*args, **named):
        raise AssertionError("looked up")

    monkeypatch.setattr(Residency, "frames", never)
    monkeypatch.setattr(pages_of_ops, "missing", never)
    for frames in ((), ("full",)):
        run = Run(CASES["dense"], frames)
        trace = functools.partial(anew(decode_step).trace, StepStatic(run.case.model.decoder, run.case.decode, ()))
        ids, active = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, bool)
        inputs = StepInputs(run.case.model.params, run.cache(run.lengths), ids, active, run.states)
        if frames:
            with pytest.raises(AssertionError, match="looked up"):
                trace(inputs)
        else:
            trace(inputs)


@pytest.mark.parametrize("group", ["recurrent", "other"])
def test_a_residency_of_what_does_not_move_is_refused(group):
    case = Case(make_recurrent_model(), parse("dense"), parse_prefill("dense"))
    run = Run(case)
    run.frame_of = {group: np.arange(IDS, dtype=np.int32)}
    with pytest.raises(ValueError, match=rf"layer group '{group}' has no pages that move .* \['full'\]"):
        run.decode(np.zeros((2, 1), np.int32))
