"""Bytes of a step, against hand-computed values, real arrays, and where pages lay when steps were measured."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from planted_tiers import sizes as frames_of
from tiny_models import QWEN_7B, altered

from kvjax import Engine
from kvjax.cache import CacheSpec, GroupSpec, PagedKV, PagedSpec
from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model import step_bytes
from kvjax.cost_model.bytes import pages_on_host
from kvjax.engine.memory import memory_plan, pool_frames
from kvjax.engine.steps import _count_reads
from kvjax.model.weight_formats import scheme_of
from kvjax.policies.decode import Dense, SelectContext, TopBlocks, Window, parse
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PAGE_BYTES = 57_344 * 128
"""Keys and values of a page of Qwen2.5-7B."""


def test_bytes_of_the_7b_shape_by_hand():
    """57,344 bytes a token: 28 layers, 4 KV heads, 128 dimensions, keys and values, 2 bytes. 448 bytes of bounds a
    token: 1/128 of it."""
    weights = 2 * (7_615_616_512 - 152_064 * 3584 + 3584)
    dense = step_bytes(QWEN_7B, Dense(), 131_072)
    assert (dense.weights, dense.kv, dense.index, dense.total) == (weights, 57_344 * 131_072, 0, weights + 7_516_192_768)
    top = step_bytes(QWEN_7B, parse("top:8"), 131_072)
    assert (top.weights, top.kv, top.index) == (weights, 57_344 * 13 * 128, 448 * 131_072)
    assert step_bytes(QWEN_7B, parse("mean:8"), 131_072).index == 224 * 131_072
    quest = step_bytes(QWEN_7B, parse("quest:64"), 131_072)
    assert (quest.kv, quest.index) == (57_344 * 1552, 8 * 448 * 131_072)
    window = step_bytes(QWEN_7B, parse("window:64+4544"), 131_072)
    assert (window.kv, window.index) == (57_344 * 4608, 0)


def test_bytes_grow_with_the_batch_and_weights_hardly_do():
    one, eight = (step_bytes(QWEN_7B, parse("top:32"), 32_768, batch) for batch in (1, 8))
    assert (eight.kv, eight.index) == (8 * one.kv, 8 * one.index)
    assert eight.weights - one.weights == 7 * 3584 * 2, "one row of the embedding for each sequence"
    tied = altered(QWEN_7B, tie_embeddings=True)
    assert step_bytes(tied, Dense(), 1024).weights == 2 * tied.num_params


@pytest.mark.parametrize(
    ("cache_format", "pair"),
    [
        ("int8", 260),
        ("int8:page", 256 + 4 / 128),
        ("int4:channel", 132),
        ("fp8:none", 256),
        ("q4_0", 144),
        ("k=int8,v=q4_0", 202),
        ("v=int4", 322),
    ],
)
def test_packed_pages_shrink_keys_and_values_only(cache_format, pair):
    """pair: bytes of a key and a value of 128 numbers, with their scales. The open page, here of 17 tokens, holds
    numbers of 2 bytes."""
    length = 65_536 - 128 + 17
    full, packed = (step_bytes(QWEN_7B, parse("top:8"), length, 2, cache_format=each) for each in (None, cache_format))
    assert full.kv == 2 * 112 * 512 * (12 * 128 + 17)
    assert packed.kv == round(2 * 112 * (pair * 12 * 128 + 512 * 17))
    assert (packed.weights, packed.index) == (full.weights, full.index)
    first = step_bytes(QWEN_7B, Dense(), 100, cache_format=cache_format)
    assert first == step_bytes(QWEN_7B, Dense(), 100), "all of it is open"
    inside = step_bytes(QWEN_7B, Dense(), length, cache_format=f"{cache_format},boundary=2")
    assert inside.kv == 512 * 16 * length + round(96 * (pair * (length - 17) + 512 * 17))


def test_packed_weights_by_hand():
    """Of 28 layers: q and o 3584 x 3584, k and v 512 x 3584, gate, up and down 18,944 x 3584; biases and norms have 2
    bytes."""
    matrices = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18_944 * 3584)
    rows, plain = 28 * (2 * 3584 + 2 * 512 + 2 * 18_944 + 3584), 2 * (28 * (3584 + 2 * 512 + 2 * 3584) + 3584)
    head = 152_064 * 3584
    found = {name: step_bytes(QWEN_7B, Dense(), 1024, 2, weights=name) for name in ("int8", "fp8", "int4", "int8:128x128")}
    assert found["int8"].weights == found["fp8"].weights == matrices + head + 4 * (rows + 152_064) + plain + 2 * (3584 + 4)
    assert found["int4"].weights == matrices // 2 + matrices // 128 * 2 + head + 4 * 152_064 + plain + 2 * (3584 + 4)
    assert found["int8:128x128"].weights == matrices + head + 4 * (matrices + head) // 128**2 + plain + 2 * 3584 + round(2 * 28 * 4 / 128)
    assert {moved.kv for moved in found.values()} == {step_bytes(QWEN_7B, Dense(), 1024, 2).kv}
    assert step_bytes(QWEN_7B, Dense(), 1024, 2, weights=scheme_of("int8").format_of) == found["int8"]


def test_dense_layers_read_everything_and_scan_nothing():
    half = dataclasses.replace(parse("top:8"), dense_layers=14)
    dense, top, mixed = (step_bytes(QWEN_7B, policy, 32_768) for policy in (Dense(), parse("top:8"), half))
    assert (mixed.kv, mixed.index) == ((dense.kv + top.kv) // 2, top.index // 2)


@pytest.mark.parametrize("page_size", [16, 128])
def test_bytes_are_those_of_a_real_cache(model, page_size):
    """A dense step reads every page of a full pool, and the policy's index arrays are what it scans."""
    length = 5 * page_size
    policies = [parse("top:2") if page_size == 128 else TopBlocks(2, block_size=8), TopBlocks(2, block_size=page_size, index="mean")]
    engine = Engine(model, "dense", policies=policies, pages=5, page_size=page_size, prefill_chunk=page_size)
    options = {"dtype": "float32", "page_size": page_size}
    assert (
        sum(layer.pages.k.nbytes + layer.pages.v.nbytes for layer in engine._pool.layers)
        == step_bytes(model.config, Dense(), length, **options).kv
    )
    for policy in policies:
        held = sum(layer.index[spec.name].nbytes for layer in engine._pool.layers for spec in policy.indexes())
        assert held == step_bytes(model.config, policy, length, **options).index
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert weights == step_bytes(model.config, Dense(), length, **options).weights, "this model's embedding is its head"


@pytest.mark.parametrize(
    "policy",
    [Dense(), parse("top:3"), parse("quest:8"), TopBlocks(2, sink=0, local=1), TopBlocks(0, sink=2, local=3), TopBlocks(2, 1, 1, 16),
     TopBlocks(3, dense_layers=1), Window(4, 8), Window(0, 1), Window(64, 500)],
    ids=str,
)  # fmt: skip
def test_keys_are_those_that_the_policy_lists(policy):
    keys = jax.random.normal(jax.random.key(0), (19, 2, 128, 4))
    index = {spec.name: page_index(keys, kind=spec.kind, block_size=spec.block_size) for spec in policy.indexes()}
    lengths = (1, 15, 16, 17, 127, 128, 129, 640, 641, 1000, 1024, 1025, 1153, 2399, 2400)
    rows = jnp.array(lengths, jnp.int32)
    table = jnp.tile(jnp.arange(19, dtype=jnp.int32), (len(lengths), 1))
    for layer in range(2):
        ctx = SelectContext(table, rows, layer=layer, num_layers=2, page_size=128, sm_scale=0.5)
        blocks, _ = policy.select(jnp.ones((len(lengths), 1, 4, 4)), PagedKV(Pages(keys, keys), index), ctx, ())
        spec = CacheSpec((GroupSpec("full", 128),), (PagedSpec("full", 2, 8, "float32"),))
        read = (_count_reads((blocks,), rows, spec, 1)[0].keys // 2).tolist()
        said = [policy.keys_read(length, layer, 128) for length in lengths]
        assert read == [length if count is None else count for length, count in zip(lengths, said, strict=True)]


def test_what_cannot_be_counted_is_refused():
    for sizes, name in (({"length": 0}, "length"), ({"batch": 0}, "batch"), ({"page_size": 0}, "page_size")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            step_bytes(QWEN_7B, Dense(), **({"length": 8} | sizes))
    with pytest.raises(NotImplementedError, match="keys_read"):
        step_bytes(QWEN_7B, object(), 8)


@pytest.mark.parametrize("name", ["tiers-1m", "tiers-128k"])
def test_pages_lie_where_they_did_on_an_h100(name):
    run = json.loads((RESULTS / "h100" / f"{name}.json").read_text())
    words = run["provenance"]["command"].split()
    steps = int(words[words.index("--steps") + 1]) * (int(words[words.index("--rounds") + 1]) + 1) + 1  # one whose kernels are recorded
    rows = [row for row in run["rows"] if row["device_bytes"]]
    for row in rows:
        frames = frames_of(device_bytes=row["device_bytes"], host_bytes=row["cache_bytes"])
        assert pages_on_host(frames, row["tokens"] + steps) == row["host_pages"] > 0
    assert rows


def test_an_engine_has_the_frames_that_its_sizes_say(model):
    hot = []
    for chunk in (16, 160):  # a larger one leaves less for the hot buffer
        engine = Engine(model, "quest:2", device_bytes=300_000, host_bytes=200_000, page_size=16, prefill_chunk=chunk)
        (frames,) = engine._pool.frames.values()
        plan = memory_plan(model.config, page_size=16, indexes=engine.indexes, weights_bytes=0, available_bytes=0, prefill_chunk=chunk)
        assert frames.counts == pool_frames(plan, 300_000, 200_000, prefill_chunk=chunk, hot=True)
        assert min(frames.counts.device, frames.counts.hot, frames.counts.host) > 0
        hot.append(frames.counts.hot)
    assert hot[0] > hot[1]
    assert pool_frames(plan, 10**12, 10**13, prefill_chunk=16, hot=False).hot == 0, "of any machine's memory"
    with pytest.raises(ValueError, match="host_bytes of 1 is less than one page"):
        pool_frames(plan, 300_000, 1, hot=True)


def test_bytes_by_hand():
    """100 pages on the device, 1,024 pages in all: the first 924 lie in host memory."""
    frames, length = FrameCounts(100, 300, 2000), 1024 * 128
    dense = step_bytes(QWEN_7B, Dense(), length, frames=frames)
    assert (dense.in_place, dense.listed, dense.hot_layers) == (924 * PAGE_BYTES, 0, 0)
    assert dense.from_device == dense.total - dense.in_place
    top = step_bytes(QWEN_7B, parse("top:32"), length, frames=frames)
    share = (924 - 1) / (1024 - 4 - 1)  # of the pages between sink and local ones
    assert top.listed == pytest.approx((1 + 32 * share) * PAGE_BYTES, rel=1e-6), "and the sink page"
    assert (top.in_place, top.hot_layers, top.from_device) == (0, 28, top.total)
    assert (top.over_bus(0.25), dense.over_bus(0.25)) == (0.75 * top.listed, dense.in_place)
    quest = step_bytes(QWEN_7B, parse("quest:64"), length, frames=frames)
    assert (quest.listed, quest.hot_layers) == (0, 0), "smaller blocks than pages are read in place"
    assert quest.in_place == pytest.approx((1 + 64 * (924 * 8 - 1) / (1024 * 8 - 32 - 1)) * PAGE_BYTES / 8, rel=1e-3)
    half = step_bytes(QWEN_7B, TopBlocks(8, dense_layers=14), length, frames=frames)
    assert (half.in_place, half.hot_layers) == (924 * PAGE_BYTES // 2, 14)
    window = step_bytes(QWEN_7B, Window(256, 1024), length, frames=frames)
    assert window.listed == 2 * PAGE_BYTES, "its window is on the device"
    two = step_bytes(QWEN_7B, Dense(), length, 2, frames=frames)
    assert two.in_place == (2 * 1024 - 100) * PAGE_BYTES


def test_what_fits_on_the_device_crosses_no_bus():
    frames = FrameCounts(1024, 300, 2000)
    for policy in (Dense(), parse("top:32"), parse("quest:8")):
        moved = step_bytes(QWEN_7B, policy, 1024 * 128, frames=frames)
        assert moved.in_place == moved.listed == 0
        assert dataclasses.replace(moved, hot_layers=0) == step_bytes(QWEN_7B, policy, 1024 * 128)
    without = step_bytes(QWEN_7B, parse("top:32"), 2048 * 128, frames=FrameCounts(1024, 0, 2000))
    assert without.in_place > without.listed == without.hot_layers == 0, "there is no hot buffer"


def test_packed_pages_lie_in_host_memory_as_codes_and_scales():
    """Rows with `int8` pages in host memory. Their read_bytes count tokens of the open page as packed, too."""
    text = " ".join((RESULTS.parents[1] / "docs/cost-model.md").read_text(encoding="utf-8").split())
    rows, off = json.loads((RESULTS / "h200" / "tiers-packed.json").read_text())["rows"], []
    for row in rows:
        top, frames, pages = parse(row["name"]), FrameCounts(*row["frames"]), row["cache_format"]
        plan = memory_plan(QWEN_7B, indexes=top.indexes(), cache_format=pages, sequences=1, weights_bytes=0, available_bytes=0)
        computed = pool_frames(plan, row["device_bytes"], row["cache_bytes"], hot=True)
        assert (computed.device, computed.hot) == (frames.device, frames.hot)
        sizes = {"dtype": row["dtype"], "cache_format": pages, "frames": frames}
        moved = step_bytes(QWEN_7B, top, row["mean_length"], **sizes)
        assert pages_on_host(frames, row["mean_length"]) == row["host_pages"]
        of_page = row["cache_bytes"] / -(-row["tokens"] // 128)
        opened = row["mean_length"] % 128 * (PAGE_BYTES - of_page) / 128
        assert moved.kv - opened == pytest.approx(row["read_bytes"], rel=1e-3)
        assert moved.in_place == 0
        if row["lists"] == "recorded":
            assert moved.listed > row["asked_bytes"]
        else:
            off.append((moved.listed / row["asked_bytes"] - 1) * 100)
        dense = step_bytes(QWEN_7B, Dense(), row["mean_length"], **sizes)
        assert dense.in_place == pytest.approx(row["host_pages"] * of_page, rel=2e-3), "none of it is of the open page"
    assert f"within {max(map(abs, off)):.1f}% of those that steps asked for in `tiers-packed.json`, where lists were the policy's" in text


def test_bytes_of_a_device_by_hand():
    length, page = 2**17 + 1, 57_344 * 128
    assert step_bytes(QWEN_7B, parse("dense"), length, tensor=1, context=1) == step_bytes(QWEN_7B, parse("dense"), length)
    one = step_bytes(QWEN_7B, parse("dense"), length)
    assert step_bytes(QWEN_7B, parse("dense"), length, tensor=4).kv == one.kv // 4
    assert step_bytes(QWEN_7B, parse("dense"), length, context=4).kv == 257 * page, "1,025 pages: one device has 257"
    assert step_bytes(QWEN_7B, parse("dense"), length, 4, context=4).kv == 1025 * page
    top, shared = (step_bytes(QWEN_7B, parse("top:32"), 2**17, 2, **mesh) for mesh in ({}, {"tensor": 4, "context": 2}))
    assert (shared.kv, shared.index) == (top.kv // 8, top.index // 8)
    eight = dataclasses.replace(QWEN_7B, layers=altered(QWEN_7B, num_heads=32).layers)
    copied = step_bytes(eight, parse("dense"), 2**17, tensor=8)
    assert copied.kv == step_bytes(eight, parse("dense"), 2**17, tensor=4).kv, "4 KV heads: two devices have the same"
    with pytest.raises(ValueError, match="28 query heads cannot be split over tensor=8"):
        step_bytes(QWEN_7B, parse("dense"), length, tensor=8)
    packed, half = (step_bytes(QWEN_7B, parse("top:32"), length, cache_format="int8", tensor=tensor) for tensor in (1, 2))
    assert (half.kv, half.index) == (packed.kv // 2, packed.index // 2)
    shared = step_bytes(QWEN_7B, parse("top:32"), length, cache_format="int8", context=2)
    assert packed.kv / 2 < shared.kv < 0.6 * packed.kv, "all open tokens, and half of the others"
    with pytest.raises(ValueError, match="pages of a mesh are on its devices alone"):
        step_bytes(QWEN_7B, parse("dense"), length, tensor=2, frames=FrameCounts(100, 300, 2000))
