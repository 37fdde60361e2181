"""Engines over a mesh of simulated devices: the results of one device, whatever is split, and the same bits in any
company."""

import contextlib
import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from histories import FEW, History, run_histories
from jax.sharding import PartitionSpec
from meshes import LARGE, MESHES, MODELS, mesh_of, model_of
from prefill_chunks import FOLDER
from quick_cases import rest_long
from tiny_models import make_family, random_model

import kvjax
from kvjax import Engine
from kvjax.axes import Shards
from kvjax.cache.prefix_cache import Prefixes
from kvjax.engine import paged_attention, sequence_parallel, steps
from kvjax.model.identity import fingerprint
from kvjax.model.placement import place_params
from kvjax.policies.decode import Cascade, TopBlocks
from kvjax.policies.decode.candidates import best_candidates
from kvjax.policies.prefill import BoundsBlocks, DensePrefill, PrefillContext, parse_prefill, query_tile_of

PAGE, CHUNK = 16, 64
POLICIES = {
    "dense": "dense",
    "top": TopBlocks(k=3, sink=1, local=2, block_size=16),
    "quest": TopBlocks(k=5, sink=1, local=4, block_size=4, index="bounds"),
    "mean": TopBlocks(k=3, sink=1, local=2, block_size=8, index="mean"),
    "cascade": Cascade(2, 4, 4, sink=1, local=2, block_size=8),
    "cascade of all": Cascade(3, "all", "cache", sink=1, local=2, block_size=16),
    "window": "window:16+40",
    "remap": "window:16+40+remap",
    "heavy": "heavy:3",
    "heavy-tokens": kvjax.policies.decode.HeavyTokens(24, sink=8, local=32),
}


def logits_of(model, mesh, policy, prompt, steps=6, **options):
    """Logits after a prompt and after each of a few steps, and what the last step read."""
    engine = Engine(model, policy, pages=64, page_size=PAGE, prefill_chunk=CHUNK, mesh=mesh, batch_buckets=(1, 2), **options)
    (sequence,) = engine.prefill([prompt])
    found = [np.asarray(sequence.logits)]
    for number in range(steps):
        found.append(np.asarray(engine.decode([sequence], [number * 7 % model.config.vocab_size]))[0])
    return np.stack(found), engine.last_reads


def check_near(found, expected):
    """Within 1e-5 of the largest logit."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


CASES = [(name, mesh) for name in MODELS for mesh in MESHES | LARGE]
BOTH = "tensor 2 context 2"


@pytest.mark.parametrize("case", rest_long(CASES, ("gemma3_text", "context 2")), ids=" ".join)
def test_results_are_those_of_one_device(case, text):
    name, mesh = case
    model, policy = model_of(name), None if name == "deepseek_v32" else POLICIES["top"]
    expected, reads = logits_of(model, None, policy, text[:203])
    found, read = logits_of(model, mesh_of(mesh), policy, text[:203])
    check_near(found, expected)
    assert (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())


@pytest.mark.parametrize(
    "case", rest_long([(policy, mesh) for policy in POLICIES for mesh in MESHES | LARGE], ("cascade", BOTH)), ids=" ".join
)
def test_every_policy_reads_the_same_on_a_mesh(case, one_layer, text):
    policy, mesh = case
    expected, reads = logits_of(one_layer, None, POLICIES[policy], text[:203])
    found, read = logits_of(one_layer, mesh_of(mesh), POLICIES[policy], text[:203])
    check_near(found, expected)
    assert (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())


@pytest.mark.parametrize("mesh", rest_long(["tensor 2 context 2", "tensor 4"], "tensor 2 context 2"))
def test_an_mlp_in_parts_adds_what_the_devices_have(mesh, one_layer, text, monkeypatch):
    """Parts that a device's rows of a chunk do not fill, with a sum over devices in each."""
    expected, _ = logits_of(one_layer, None, "dense", text[:203], steps=1)
    monkeypatch.setattr("kvjax.models.decoder.MLP_TOKENS", 12)
    jax.clear_caches()  # programs of whole MLPs
    found, _ = logits_of(one_layer, mesh_of(mesh), "dense", text[:203], steps=1)
    jax.clear_caches()
    check_near(found, expected)


SHARE = f"{FOLDER}/bounds_share.py:BoundsShare"
PREFILL = {
    "momo": kvjax.MeasureOnceMaskOnce(gamma=8, chi=16, k=3, k_exact=2, k_trim=3, key_block=16, sink_tokens=16, window_tokens=32),
    "bounds": BoundsBlocks(k=2, chi=16, key_block=16, sink_tokens=16, window_tokens=32, dense_below=0),
    "bounds-share": f"{SHARE}:0.2/(1, 2)/chi=16/key_block=16/sink_tokens=16/window_tokens=32",
    "window": "window:16+40",
}


@pytest.mark.parametrize("case", rest_long([(policy, mesh) for policy in PREFILL for mesh in MESHES], ("bounds-share", BOTH)), ids=" ".join)
def test_every_prefill_policy_computes_the_same_on_a_mesh(case, one_layer, text):
    policy, mesh = case
    expected, _ = logits_of(one_layer, None, "dense", text[:203], steps=1, prefill=PREFILL[policy])
    found, _ = logits_of(one_layer, mesh_of(mesh), "dense", text[:203], steps=1, prefill=PREFILL[policy])
    check_near(found, expected)


@pytest.mark.parametrize("count", [64, 40, 16])
def test_each_tile_is_attended_to_once_as_a_whole(count):
    """Of a chunk of `count` queries in tiles of 24 on four devices. A query's output is the sum of its tile and its
    position."""
    shards = Shards(kvjax.mesh(context=4), (), 4)
    query = np.random.default_rng(count).integers(0, 9, (1, count, 1, 2)).astype(np.float32)
    ctx = PrefillContext(np.zeros((1, 1), np.int32), np.array([128], np.int32), np.array([128 + count], np.int32), 0, 1.0)
    seen = []

    def attends(x, ctx):
        seen.append(x.shape[1])
        tiles = x.reshape(1, -1, 24, 1, 2)
        position = (ctx.starts[:, None] + np.arange(x.shape[1]))[..., None, None]
        return jax.numpy.broadcast_to(tiles.sum(2, keepdims=True), tiles.shape).reshape(x.shape) + position

    def on_device(x):
        return sequence_parallel.whole_rows(shards, sequence_parallel.by_tiles(shards, attends, x, ctx, 24))

    found = jax.jit(lambda query: shards.run(on_device, (query,), (PartitionSpec(),), PartitionSpec()))(query)
    padded = np.pad(query, ((0, 0), (0, -count % 24), (0, 0), (0, 0)))
    assert np.array_equal(found, attends(padded, ctx)[:, :count])
    assert seen[0] == 24, "three tiles, two, or one: a device has one at most"


def test_uneven_work_is_said_with_the_remedy(one_layer, caplog):
    even = [(DensePrefill(), 512, 4), (BoundsBlocks(32), 1024, 4), (BoundsBlocks(32), 16, 1), (parse_prefill("window:64+1024"), 64, 8)]
    assert [sequence_parallel.uneven_work(*each, learns=False) for each in even] == [""] * 4
    said = {
        (BoundsBlocks(32), 512): "prefill bounds:32 looks at 128 queries together: of 512 a device attends for up to 128, .* of 1,024, for",
        (BoundsBlocks(32), 128): "looks at the 128 queries of a chunk together: each of the 4 devices along context attends for all",
        (parse_prefill(SHARE), 1024): "looks at all queries of a chunk together",
        (DensePrefill(), 20): "chunks of 20 tokens are no multiple of 8",
    }
    for (policy, chunk), words in said.items():
        assert re.search(words, sequence_parallel.uneven_work(policy, chunk, 4, learns=False))
    sizes = {"pages": 64, "page_size": PAGE, "prefill_chunk": CHUNK, "mesh": mesh_of("context 2"), "batch_buckets": (1,)}
    for policy, words in (("dense", ""), ("heavy:3", "a decode policy that learns from prefill looks at all queries of a chunk together")):
        Engine(one_layer, policy, **sizes)
        assert words in caplog.text
        assert bool(caplog.text) == bool(words)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [False, True], ids=["", "mutant"])
def test_tiles_that_do_not_divide_are_dealt_out(wrong, one_layer, text, monkeypatch):
    """Three tiles of 24 queries over the four devices of a chunk of 64: each attends for one, the last one for none.
    The mutant's devices all take the first tile. The prompt ends in the third one."""
    prompt = text[:250]
    asked = []

    def noted(shards, attend, query, ctx, tile):
        def seen(part, inner):
            asked.append(part.shape[1])
            return paged_attention(part, inner.replace(starts=ctx.starts) if wrong else inner)

        return honest(shards, seen, query, ctx, tile)

    honest = paged_attention.by_tiles
    monkeypatch.setattr(paged_attention, "by_tiles", noted)
    prefill = dataclasses.replace(PREFILL["bounds"], chi=24)
    jax.clear_caches()
    try:
        expected, _ = logits_of(one_layer, None, "dense", prompt, steps=1, prefill=prefill)
        found, _ = logits_of(one_layer, mesh_of("context 4"), "dense", prompt, steps=1, prefill=prefill)
    finally:
        jax.clear_caches()
    assert set(asked) == {24}
    if wrong:
        assert np.abs(found - expected).max() > 1e-3
    else:
        check_near(found, expected)


class MeshHistory(History):
    """On a mesh, against the same mesh with nothing else on it."""


@pytest.mark.bits
@pytest.mark.parametrize("case", rest_long(CASES, ("llama", "tensor 2 context 2")), ids=" ".join)
def test_a_mesh_gives_the_same_bits_in_any_company(case, tmp_path, monkeypatch):
    name, mesh = case
    monkeypatch.setattr(MeshHistory, "shared", {"mesh": mesh_of(mesh)})
    seeds, sizes = range(2), FEW
    if case == ("llama", BOTH):  # half as many programs
        seeds, sizes = range(1), dataclasses.replace(FEW, policies=("quest:1",))
    counts = run_histories(model_of(name), seeds, tmp_path, sizes, MeshHistory)
    assert counts["sequences compared"] > 3


@pytest.mark.parametrize(
    "case",
    rest_long(
        [(each, mesh) for each in ("int8", "k=int4:channel,v=fp8:none", "q8_0") for mesh in ("tensor 4", "context 2", BOTH)],
        ("k=int4:channel,v=fp8:none", BOTH),
    ),
    ids=" ".join,
)
def test_packed_pages_are_those_of_one_device(case, text):
    """Keys and values of a mesh differ in their last bits from those of one device. Where one of them stands between
    two codes, it gets the other code, and logits differ by more than rounding; of few tokens."""
    (cache_format, mesh), model = case, make_family("llama", head_dim=32)
    (expected, reads), (found, read) = (
        logits_of(model, each, POLICIES["top"], text[:203], cache_format=cache_format) for each in (None, mesh_of(mesh))
    )
    off = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert off.min() < 1e-5
    assert np.median(off) < 1e-3
    assert off.max() < 1e-2
    assert (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())
    plain, _ = logits_of(model, None, POLICIES["top"], text[:203])
    assert np.median(np.abs(plain - expected).max(axis=1)) > 1e-4


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("mesh", ["tensor 4", "context 2", BOTH])
def test_packed_pages_of_a_mesh_have_the_same_bits_in_any_company(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(MeshHistory, "shared", {"mesh": mesh_of(mesh), "cache_format": "k=int8:channel,v=int4"})
    counts = run_histories(model_of("llama"), range(1), tmp_path, dataclasses.replace(FEW, policies=("quest:1",)), MeshHistory)
    assert counts["sequences compared"] > 3


@pytest.mark.long
def test_open_pages_that_one_device_alone_keeps_would_show(tmp_path, monkeypatch):
    monkeypatch.setattr(MeshHistory, "shared", {"mesh": mesh_of("context 2"), "cache_format": "int8"})
    honest = paged_attention.append_packed
    monkeypatch.setattr(paged_attention, "append_packed", lambda *given, sharded: honest(*given, sharded=False))
    with pytest.raises(AssertionError, match="sequences differ"):
        run_histories(model_of("llama"), range(3), tmp_path, dataclasses.replace(FEW, policies=("quest:1",)), MeshHistory)


@pytest.mark.bits
def test_bits_do_not_depend_on_the_device_where_a_sequence_begins(one_layer, text):
    found = []
    for others in range(3):
        sizes = {"pages": 64, "page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (1,)}
        engine = Engine(one_layer, mesh=mesh_of("context 4"), **sizes)
        engine.prefill([text[:PAGE] for _ in range(others)])
        (sequence,) = engine.prefill([text[:203]])
        assert engine.allocators["full"].part_of(sequence.pages["full"][0]) == others
        found.append([np.asarray(engine.decode([sequence], [token]))[0] for token in range(4)])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def fill(engine, prompts):
    """How many of these prompts fit, one after the other, and how many pages of each device are then in use."""
    allocator, held = engine.allocators["full"], []
    with contextlib.suppress(kvjax.OutOfPages):
        for prompt in prompts:
            held += engine.prefill([prompt])
    return len(held), [sum(allocator.owners(page) > 0 for page in range(part * 8, part * 8 + 8)) for part in range(4)]


def by_digest(kept, group, digests, tokens):
    """Mutant: what a prompt begins with says on which of two devices it begins. Digests are keyed anew in each run."""
    return digests[0][0] % 2 if digests else None


@pytest.mark.bits
@pytest.mark.parametrize("mutant", [False, True], ids=["", "by digest"])
def test_short_prompts_fill_all_devices(mutant, one_layer, text, monkeypatch):
    """Two pages each. Without a common beginning they take all 32 pages; with a common first page, all but a copy of it
    on each device."""
    if mutant:
        monkeypatch.setattr(Prefixes, "_best_first", by_digest)
    sizes = {"pages": 32, "page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (1,), "reuse": True, "mesh": mesh_of("context 4")}
    prompts = {"own": [[token, *text[:PAGE]] for token in range(20)], "common": [[*text[:PAGE], token] for token in range(40)]}
    found = {}
    for name, each in prompts.items():
        engine = Engine(one_layer, **sizes)
        found[name] = fill(engine, each)
    assert engine.stats().device.pages == (1 if mutant else 4), "copies of the common page"
    if mutant:
        assert found["own"][0] < 16
        assert (found["common"][0], sorted(found["common"][1])) == (8, [0, 0, 1, 8])
    else:
        assert found == {"own": (16, [8] * 4), "common": (28, [8] * 4)}


@pytest.mark.bits
def test_what_a_sequence_writes_after_it_came_back_to_other_devices_is_found(one_layer, text):
    """With the beginning that came back with it. Its first page was on the first device, and then the second one has
    more room."""
    sizes = {"pages": 16, "page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (1,), "reuse": True, "mesh": mesh_of("context 2")}
    engine = Engine(one_layer, **sizes)
    (sequence,) = engine.prefill([text[:40]])
    allocator, first = engine.allocators["full"], sequence.pages["full"][0]
    engine.suspend(sequence)
    engine.prefill([text[100:105]])
    engine.resume(sequence)
    assert [allocator.part_of(page) for page in (first, sequence.pages["full"][0])] == [0, 1]
    engine.extend(sequence, text[40:70])
    assert engine.new_sequence(text[:70]).length == 64


@pytest.mark.parametrize(("mesh", "width"), [("context 2", 16), ("tensor 2", 64)])
def test_pages_of_the_chunk_alone_are_brought_together(mesh, width, one_layer, text):
    """Not those that are reserved for the rest of the prompt; but all of them to compile programs before."""
    engine = Engine(one_layer, pages=64, page_size=PAGE, prefill_chunk=CHUNK, mesh=mesh_of(mesh), batch_buckets=(1,))
    sequence = engine.new_sequence()
    engine.reserve([sequence], 40 * PAGE)
    begun = [engine._prefiller.begin(sequence, text[:5], DensePrefill(), always=always) for always in (False, True)]
    assert [run.tables["full"].shape for run in begun] == [(1, width), (1, 64)]


@pytest.mark.long
@pytest.mark.parametrize("mesh", [BOTH, "tensor 4"])
def test_lists_and_scores_are_those_of_one_device(mesh, model, text):
    policy = POLICIES["quest"]
    seen = []
    for each in (None, mesh_of(mesh)):
        engine = Engine(model, policy, pages=64, page_size=PAGE, prefill_chunk=CHUNK, mesh=each, batch_buckets=(2,))
        sequences = engine.prefill([text[:203], text[50:140]])
        seen.append(engine.inspect(sequences, [1, 2]))
    for one, other in zip(seen[0].layers, seen[1].layers, strict=True):
        assert np.array_equal(one.ids, other.ids)
        check_near(other.lse, one.lse)
        check_near(np.where(np.isinf(other.scores), 0, other.scores), np.where(np.isinf(one.scores), 0, one.scores))
        assert np.array_equal(np.isinf(other.scores), np.isinf(one.scores))
    check_near(seen[1].logits, seen[0].logits)


@pytest.mark.parametrize("meshes", rest_long([(BOTH,), ("tensor 4", BOTH)], (BOTH,)), ids=", ".join)
@pytest.mark.parametrize("name", rest_long(["llama", "qwen3_5_text", "llama in int8"], "llama"))
def test_a_file_of_one_mesh_is_read_on_another(name, meshes, text, tmp_path):
    """And on one device, and the other way round."""
    name, _, packed = name.partition(" in ")
    model, path, logits = model_of(name), tmp_path / "sequence", []
    places = [None, *map(mesh_of, meshes)]
    sizes = {"pages": 64, "page_size": PAGE, "prefill_chunk": CHUNK, "batch_buckets": (1,), "cache_format": packed or None}
    engines = [Engine(model, mesh=each, **sizes) for each in places]
    for one, other in itertools.permutations(engines, 2):
        (sequence,) = one.prefill([text[:83]])
        one.save(sequence, path)
        restored = other.restore(path)
        logits += [np.asarray(engine.decode([each], [5]))[0] for engine, each in ((one, sequence), (other, restored))]
        one.free(sequence)
        other.free(restored)
    for found in logits[1:]:
        check_near(found, logits[0])


@pytest.mark.quick("1-float32", "4-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_parts_and_the_residual_are_added_in_order_and_rounded_once(tensor, dtype):
    """On every device. With one, it is a plain sum."""
    mesh, rng = kvjax.mesh(tensor=tensor, context=2), np.random.default_rng(tensor)
    shards = Shards(mesh)
    parts, (residual,) = (rng.standard_normal((count, 2, 3, 64)).astype(jax.numpy.dtype(dtype)) for count in (tensor, 1))
    specs = (PartitionSpec("tensor"), PartitionSpec()), PartitionSpec(("context", "tensor"))
    for given in (residual, None):
        found = shards.run(lambda x, r: shards.sum(x[0], residual=r)[None], (parts, given), *specs)
        total = functools.reduce(np.add, [*parts.astype(np.float32), *([] if given is None else [given.astype(np.float32)])])
        assert {each.tobytes() for each in np.asarray(found)} == {total.astype(parts.dtype).tobytes()}


@pytest.mark.quick("2-3", "8-0")
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("context", [2, 8])
def test_own_pages_are_those_of_one_device_and_none_is_lost(context, later):
    """Lengths from nothing to all of the table; rows begin on any device. later: pages after the query's that a row may
    have, as for drafts that were not accepted."""
    rng, width, pages = np.random.default_rng(context), 16, 160
    lengths = np.concatenate([[0, 1, PAGE, PAGE + 1, width * PAGE], rng.integers(0, width * PAGE + 1, 40)]).astype(np.int32)
    first = rng.integers(0, context, len(lengths)).astype(np.int32)
    logical = np.arange(width)
    holder = (first[:, None] + logical) % context
    ids = holder * pages + rng.permuted(np.tile(np.arange(pages), (len(lengths), 1)), axis=1)[:, :width]
    held = -(-lengths[:, None] // PAGE)
    table = np.where(logical < held + later, ids, -1).astype(np.int32)
    shards = Shards(kvjax.mesh(context=context), (("full", pages),))

    def on_device(table, lengths, first):
        own, tokens = shards.own_pages(shards.own_table("full", table), lengths, first, PAGE)
        return own[None], tokens[None]

    whole, each = PartitionSpec(), PartitionSpec("context")
    run = jax.jit(lambda *given: shards.run(on_device, given, (whole,) * 3, (each, each)))  # one program, not one for each operation
    own, tokens = map(np.asarray, run(table, lengths, first))
    assert own.shape == (context, len(lengths), width // context + 1)
    for device, row in itertools.product(range(context), range(len(lengths))):
        mine = [each % pages for each in table[row, : held[row, 0]] if each // pages == device]
        assert own[device, row].tolist() == mine + [-1] * (width // context + 1 - len(mine))
        last = (lengths[row] - 1) // PAGE
        if lengths[row] and holder[row, last] == device:
            assert tokens[device, row] == (len(mine) - 1) * PAGE + lengths[row] - last * PAGE
        else:
            assert tokens[device, row] in (len(mine) * PAGE + 1, 0), "the query's page is another one than its own"
            assert tokens[device, row] or not lengths[row]


def without_exchange(monkeypatch, method):
    """Programs in which a method of `Shards`, or a function of `chunk_rows`, exchanges nothing: the mutants of these
    tests."""
    own = {
        "sum": lambda self, x, residual=None: x if residual is None else x + residual,
        "merged": lambda self, out, lse, first, block_lse=None: (out, lse, block_lse),
        "candidates": lambda self, *arrays: arrays,
        "own_heads": lambda self, out, copies: out[:, :, : out.shape[2] // copies],
        "own_table": lambda self, group, table: table % dict(self.pages)[group],
        "rows_of": lambda self, table, ids, count, dtype=None: self.sum(table[ids % table.shape[0]]),
        "over_heads": lambda self, copies, *sums: sums,
        "joined": lambda self, x: jax.numpy.tile(x, self.tensor),
        "gathered": lambda self, pool, rows: jax.numpy.tile(pool[rows.reshape(-1)], (self.context, *[1] * (pool.ndim - 1))),
    }
    of_rows = {
        "whole_rows": lambda shards, x: jax.numpy.tile(x, (1, shards.row_parts, *[1] * (x.ndim - 2))),
        "own_rows": lambda shards, x: x[:, : x.shape[1] // shards.row_parts],
        "by_queries": lambda shards, attend, query, ctx: paged_attention(query, ctx),
    }
    if method in own:
        monkeypatch.setattr(Shards, method, own[method])
    for module in (sequence_parallel, paged_attention, steps):
        if method in of_rows and hasattr(module, method):
            monkeypatch.setattr(module, method, of_rows[method])


ROW_MUTANTS = ["by_queries", "whole_rows", "own_rows"]
MUTANTS = ["sum", "merged", "candidates", "own_heads", "own_table", "rows_of", "over_heads", "joined", "gathered", *ROW_MUTANTS]


@pytest.mark.parametrize("method", rest_long(MUTANTS, "whole_rows"))
def test_an_exchange_that_is_left_out_would_show(method, model, one_layer, text, monkeypatch):
    used = one_layer if method in ("own_table", "whole_rows") else model
    mesh = mesh_of("tensor 4" if method == "own_heads" else BOTH)
    policy = POLICIES["heavy" if method == "over_heads" else "top"]
    expected, reads = logits_of(used, None, policy, text[:203])
    without_exchange(monkeypatch, method)
    jax.clear_caches()  # programs of the sound method are known
    try:
        found, read = logits_of(used, mesh, policy, text[:203])
    finally:
        jax.clear_caches()
    same = (read.blocks.tolist(), read.keys.tolist()) == (reads.blocks.tolist(), reads.keys.tolist())
    assert not same or not np.allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_sums_over_heads_are_computed_before_an_exchange_puts_them_together():
    """Else XLA adds them up where it concatenates them, by one thread."""
    shards = Shards(mesh_of("tensor 4"))
    programs = {
        name: jax.jit(lambda x, of=of: shards.run(of, (x,), (PartitionSpec(),), PartitionSpec())).lower(np.ones((4, 8))).as_text()
        for name, of in {"sums": lambda x: shards.over_heads(1, x.sum(1))[0], "logits": lambda x: shards.joined(x.sum(1))}.items()
    }
    assert [text.count("stablehlo.optimization_barrier") for text in programs.values()] == [1, 0]


def test_every_device_holds_its_part_alone(model):
    engine = Engine(model, "top:1", pages=64, page_size=128, prefill_chunk=128, mesh=mesh_of(BOTH))
    for path, leaf in jax.tree.leaves_with_path((engine.model.params["layers"], engine._pool.layers)):
        (size,) = {shard.data.size for shard in leaf.addressable_shards}
        name = jax.tree_util.keystr(path)
        share = 4 if name.startswith("[1]") else 1 if "norm" in name else 2
        assert size * share == leaf.size, name


REFUSED = {
    "3 devices of 4 heads": (lambda model: Engine(model, mesh=kvjax.mesh(tensor=3)), "2 KV heads cannot be copied to tensor=3 devices"),
    "too many": (lambda model: kvjax.mesh(tensor=4, context=4), "needs 16 devices, and there are 8"),
    "no power of two": (lambda model: kvjax.mesh(context=3), "context is 3"),
    "no devices": (lambda model: kvjax.mesh(tensor=0), "tensor"),
    "not a mesh": (lambda model: Engine(model, mesh=(2, 2)), "kvjax.mesh"),
    "another's policy": (lambda model: Engine(model, Foreign(), mesh=mesh_of(BOTH)), "chooses_over_devices"),
}


class Foreign(TopBlocks):
    """A policy that lists by what it finds in its page table."""

    def select(self, query, layer, ctx, state):
        return super().select(query, layer, ctx, state)


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mesh_cannot_do_is_refused(case, model):
    call, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        call(model)


def test_host_memory_of_running_sequences_is_refused(model):
    with pytest.raises(ValueError, match=r"host_bytes would be of no use: pages of a mesh lie on its devices alone, and .*reuse is False"):
        Engine(model, mesh=mesh_of(BOTH), host_bytes=10**6, reuse=False)


def test_a_full_pool_of_a_mesh_says_which_device_is_full_and_not_to_use_host_memory(one_layer, text):
    engine = Engine(one_layer, pages=8, page_size=PAGE, prefill_chunk=PAGE, mesh=mesh_of("context 2"))
    sequences = engine.prefill([text[:PAGE] for _ in range(8)])
    for sequence in sequences[::2][:3]:
        engine.free(sequence)
    with pytest.raises(kvjax.OutOfPages, match=r"1 needed on one of 2 devices, 0 free of its 4; (?!.*host_bytes)"):
        engine.prefill([text[: 2 * PAGE]])
    assert engine.allocators["full"].free == 3
    engine.check_room(PAGE)
    grow = {engine.allocators["full"].part_of(each.pages["full"][0]): each for each in sequences if each in engine.sequences}
    engine.check_room(PAGE, growing=[grow[1]] * 2)
    for growing in ([grow[1]] * 3, [grow[0]]):  # those that begin on the first device need a page of the second one
        with pytest.raises(kvjax.OutOfPages):
            engine.check_room(PAGE, growing=growing)
    engine.prefill([text[:PAGE]])


@pytest.mark.bits
def test_pages_on_disk_are_found_by_the_same_mesh_alone(one_layer, text, tmp_path):
    found = []
    for mesh in (None, "context 2", "context 2"):
        sizes = {"pages": 16, "page_size": PAGE, "prefill_chunk": PAGE, "batch_buckets": (1,)}
        place = None if mesh is None else mesh_of(mesh)
        engine = Engine(one_layer, mesh=place, disk=tmp_path / "pages", disk_bytes=2**20, **sizes)
        (sequence,) = engine.prefill([text[:100]])
        found.append((engine.stats().found_tokens, np.asarray(sequence.logits)))
        engine.close()
    assert [tokens for tokens, _ in found] == [0, 0, 96]
    assert np.array_equal(found[1][1], found[2][1])


@pytest.mark.parametrize("mesh", [BOTH, "tensor 4"])
def test_a_model_is_loaded_straight_to_its_devices(mesh, tmp_path):
    """It is the same model, and its files fit."""
    path, mesh = tmp_path / "model", mesh_of(mesh)
    kvjax.save(random_model(), path)
    one, other = kvjax.load(path, tokenizer=False), kvjax.load(path, tokenizer=False, mesh=mesh)
    assert fingerprint(one) == fingerprint(other)
    placed = place_params(one.decoder, one.params, Shards(mesh))
    for ours, loaded in zip(jax.tree.leaves(placed), jax.tree.leaves(other.params), strict=True):
        assert ours.sharding == loaded.sharding
        assert np.array_equal(ours, loaded)


def test_only_the_class_that_attends_says_that_queries_may_be_split():
    """A chunk's queries choose together by shares, and whatever a subclass does is its own."""

    class Turned(DensePrefill):
        def attend(self, query, layer, ctx):
            return super().attend(query[:, ::-1], layer, ctx)

    assert [query_tile_of(each) for each in (DensePrefill(), BoundsBlocks(chi=64))] == [1, 64]
    assert [query_tile_of(each) for each in (parse_prefill(SHARE), Turned())] == [None, None]


def test_of_equal_candidates_the_lower_ids_are_taken():
    """Whatever order devices found them in; NaN ranks last, and a missing one never counts."""
    ids = np.array([[9, 4, -1, 2, 7, 5]], np.int32)
    scores = np.array([[1.0, 3.0, 9.0, 1.0, np.nan, 1.0]], np.float32)
    for order in (list(range(6)), [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]):
        found = {k: sorted(np.asarray(best_candidates(scores[:, order], ids[:, order], k))[0].tolist()) for k in (2, 3, 5, 6)}
        assert found == {2: [2, 4], 3: [2, 4, 5], 5: [2, 4, 5, 7, 9], 6: [-1, 2, 4, 5, 7, 9]}


@pytest.mark.long
def test_a_mesh_in_sixteen_bits(bf16_model, text):
    """Parts are rounded before they are added, so only the size of the difference is known: a few roundings."""
    expected, reads = logits_of(bf16_model, None, "dense", text[:203])
    found, read = logits_of(bf16_model, mesh_of(BOTH), "dense", text[:203])
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert read.keys.tolist() == reads.keys.tolist()


@pytest.mark.parametrize("pages", [5, 64])
def test_a_pool_is_no_larger_than_asked_for(pages, model):
    engine = Engine(model, pages=pages, page_size=PAGE, prefill_chunk=CHUNK, mesh=mesh_of("context 4"))
    assert engine.allocators["full"].total == pages // 4 * 4


def test_copied_heads_are_said(model, caplog):
    with caplog.at_level("INFO", "kvjax.model.placement"):
        Engine(model, pages=8, page_size=PAGE, prefill_chunk=CHUNK, mesh=mesh_of("tensor 4"))
    assert caplog.messages == ["2 KV heads on tensor=4 devices: each on 2 of them"]
