"""The memory plan by layer group, what a pool may ask for, and what sequences use of it."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from tiny_models import RECURRENT, TINY, TinyModel, altered

from kvjax import Engine, OutOfPages
from kvjax.cache import WHOLE
from kvjax.cache.host_pool import mapped_memory
from kvjax.cache.prefix_cache import STATE_CHUNKS
from kvjax.cache.stores.blocks import block_bytes
from kvjax.engine.memory import MAX_PAGES, HostMemory, check_pool, default_pages, host_memory, memory_plan, pool_size
from kvjax.models.decoder import TransformerDecoder, init_params

MORE = r"memory has room for [\d,]+ more: give more pages, on the command line --pages$"


def test_a_pool_larger_than_all_memory_is_refused_before_it_is_made(model):
    plan = memory_plan(model.config, weights_bytes=0)
    with pytest.raises(
        ValueError, match=r"a pool of 2,000,000,000 pages takes .* GiB, and all memory of the device is .*: give at most"
    ) as no:
        Engine(model, pages=2_000_000_000)
    most = int(str(no.value).rpartition("at most ")[2].removesuffix(" pages").replace(",", ""))
    check_pool(plan, most)
    with pytest.raises(ValueError, match="give at most"):
        check_pool(plan, most + 1)


def test_more_device_memory_than_there_is_is_refused_before_it_is_taken(model):
    with pytest.raises(ValueError, match=r"device_bytes of 1,000,000,000,000,000 is more than all memory of the device, [\d,]+ bytes"):
        Engine(model, device_bytes=10**15)


def test_a_default_pool_with_host_memory_fits_beside_jax(model, monkeypatch):
    """Its pages on the device are allocated beside what JAX holds."""
    plan = memory_plan(model.config, weights_bytes=0)
    usual, _ = pool_size(plan, model.config, None, None, 10)
    monkeypatch.setattr(mapped_memory, "device_room", lambda: 20 * plan.frame_bytes)
    assert pool_size(plan, model.config, None, None, 10) == (17, 10)
    assert pool_size(plan, model.config, None, None) == (usual, 0), "pages of JAX alone"
    assert pool_size(plan, model.config, 30, None, 10) == (30, 10), "as asked for"
    monkeypatch.setattr(mapped_memory, "device_room", lambda: 1 << 60)
    assert pool_size(plan, model.config, None, None, 10) == (usual, 10)


def windowed(config, window, *numbers):
    """The model with a window in these layers."""
    layers = list(config.layers)
    for number in numbers:
        layers[number] = dataclasses.replace(layers[number], mixer=dataclasses.replace(layers[number].mixer, window=window))
    return dataclasses.replace(config, layers=tuple(layers))


MIXED = windowed(altered(TINY, num_layers=3), 24, 0, 2)
"""Two layers of three have a window."""
SIZES = {"page_size": 16, "prefill_chunk": 32}


def test_every_layer_group_has_its_own_pages():
    plan = memory_plan(MIXED, **SIZES, weights_bytes=100, available_bytes=10**6, sequences=2)
    page = 2 * 2 * 16 * 16 * 4
    near, full = plan.groups
    assert (near.name, near.layers, near.page_size, near.page_bytes, near.window) == ("window:24", 2, 16, 2 * page, 24)
    assert (full.name, full.layers, full.page_size, full.page_bytes, full.window, full.most) == ("full", 1, 16, page, None, None)
    assert near.most == -(-(24 - 1 + 32 + 15) // 16) + 1 == 6, "a window, a chunk and a step, and a page on which the window ends"
    assert [plan.bytes_of(tokens) for tokens in (0, 1, 96, 97, 1600)] == [0, 3 * page, 18 * page, 19 * page, 112 * page]
    assert plan.bytes_per_1k_tokens == 64 * page
    assert plan.pool_pages(5) == {"window:24": 5, "full": 5}
    assert plan.pool_pages(50) == {"window:24": 12, "full": 50}
    assert plan.pool_bytes(50) == (24 + 50) * page
    assert plan.pages_that_fit == (10**6 - 100) // page - 24
    assert plan.pool_bytes(plan.pages_that_fit) <= 10**6 - 100 < plan.pool_bytes(plan.pages_that_fit + 1)
    assert dataclasses.replace(plan, available_bytes=0).pages_that_fit == 0


def test_a_pool_is_what_the_plan_says():
    """Of a model with windows, with room for fewer pages than the default: pool and plan agree to the byte."""
    model = TinyModel(TransformerDecoder(MIXED), init_params(MIXED, jax.random.key(0)))
    engine = Engine(model, pages=50, batch_buckets=(2,), **SIZES)
    plan = engine.memory_plan()
    assert {name: each.total for name, each in engine.allocators.items()} == plan.pool_pages(50)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine._pool.layers)) == plan.pool_bytes(50)
    small = memory_plan(MIXED, **SIZES, weights_bytes=0, available_bytes=plan.pool_bytes(77) + 5, sequences=2)
    assert default_pages(small, MIXED) == 77
    assert default_pages(dataclasses.replace(small, available_bytes=10**12), MIXED) == 8 * 256
    with pytest.raises(OutOfPages, match=r"A page holds 16 tokens and takes 4,096 bytes; memory has room for [\d,]+ more"):
        engine.prefill([[1] * 900])


def test_the_plan_says_per_group_what_fits():
    text = str(memory_plan(MIXED, **SIZES, weights_bytes=0, available_bytes=2**20, sequences=2))
    assert "pages that fit                232  (3,712 tokens)" in text
    assert "page of 16 tokens         8.0 KiB  layer group window:24 (2 layers): 12 pages, all that 2 sequences of any length need" in text
    assert "page of 16 tokens         4.0 KiB  layer group full (1 layers): 232 pages, 3,712 tokens" in text
    few = str(memory_plan(MIXED, **SIZES, weights_bytes=0, available_bytes=50_000, sequences=2))
    assert "layer group window:24 (2 layers): 4 pages, fewer than asked" in few


@pytest.mark.long
def test_a_full_pool_names_host_memory_where_it_can_be_used(model, monkeypatch):
    engine = Engine(model, pages=4, batch_buckets=(1,), **SIZES)
    host = engine.memory_plan().frame_bytes
    named = rf"Others can lie in host memory, {host:,} bytes each: give the engine \(more\) host_bytes, or .* --host-memory$"
    with pytest.raises(OutOfPages, match=named):
        engine.prefill([[1] * 90])
    with pytest.raises(OutOfPages, match=named):
        Engine(model, pages=4, host_bytes=2 * host, batch_buckets=(1,), **SIZES).prefill([[1] * 120])
    Engine(model, pages=4, host_bytes=4 * host, batch_buckets=(1,), **SIZES).prefill([[1] * 120])
    rolling = Engine(model, "window:4+16+release", prefill="window:4+16", pages=1, batch_buckets=(1,), **SIZES)
    with pytest.raises(OutOfPages, match=MORE):  # pages of windows stay on the device
        rolling.prefill([[1] * 90])
    monkeypatch.setattr(mapped_memory, "supported", lambda: False)
    with pytest.raises(OutOfPages, match=MORE):
        engine.prefill([[1] * 90])


def test_a_model_whose_layers_all_have_windows_serves_any_length():
    config = windowed(TINY, 24, 0, 1)
    plan = memory_plan(config, **SIZES, weights_bytes=0, available_bytes=10**7, sequences=2)
    assert (plan.pages_that_fit, plan.bytes_per_1k_tokens) == (MAX_PAGES, 0)
    assert "pages that fit           no limit  (sequences of any length)\ncache                " in str(plan)
    assert f"{plan.pool_bytes(MAX_PAGES) / 1024:.1f} KiB  (for 2 sequences)" in str(plan)
    assert default_pages(plan, config) == 8 * 256
    assert memory_plan(config, **SIZES, weights_bytes=0, available_bytes=50_000, sequences=2).pages_that_fit == 50_000 // 8192


def test_states_are_rows_for_each_sequence():
    plan = memory_plan(RECURRENT, **SIZES, weights_bytes=0, available_bytes=10**7, sequences=3)
    states, full = plan.groups
    assert (states.name, states.page_size, states.most, states.pages_of(10**6)) == ("recurrent", WHOLE, 1, 1)
    assert (plan.page_size, plan.page_bytes, plan.state_bytes) == (16, full.page_bytes, 3 * states.page_bytes)
    assert plan.bytes_of(10**6) == states.page_bytes + 62_500 * full.page_bytes
    assert re.search(r"layer group recurrent \(1 layers\): 3 rows, [\d.]+ KiB in all, all that 3 sequences of any length need", str(plan))


def test_memory_follows_the_actual_context():
    """A model with 1M positions: what its sequence uses after 1K tokens, and after 12K, is what so many tokens take."""
    config = windowed(altered(TINY, num_heads=1, num_kv_heads=1, max_positions=2**20, hidden_size=16, intermediate_size=16), 1000, 0)
    model = TinyModel(TransformerDecoder(config), init_params(config, jax.random.key(0)))
    engine = Engine(model, prefill="window:0+128", pages=1024, prefill_chunk=4096, batch_buckets=(1,))
    assert engine.used_bytes == {"window:1000": 0, "full": 0}
    tokens = np.random.default_rng(0).integers(0, 97, 12_000).tolist()
    page = 2 * 128 * 16 * 4
    (sequence,) = engine.prefill([tokens[:1000]])
    assert engine.used_bytes == {"window:1000": 8 * page, "full": 8 * page}
    engine.extend(sequence, tokens[1000:])
    used, plan = engine.used_bytes, engine.memory_plan()
    assert used["full"] == 94 * page, "12,000 tokens in pages of 128"
    assert used["window:1000"] <= plan.groups[0].most * page < 42 * page, "a window and a chunk, however long the sequence"
    assert sum(used.values()) <= plan.bytes_of(12_000) < plan.bytes_of(2**20) / 9
    fork = engine.fork(sequence)
    assert engine.used_bytes["full"] == 95 * page, "shared pages count once"
    engine.free(sequence)
    engine.free(fork)
    assert engine.used_bytes == {"window:1000": 0, "full": 0}


@pytest.mark.parametrize("config", [TINY, MIXED, RECURRENT], ids=["full", "windows", "states"])
def test_host_memory_is_the_pool_s_but_for_what_stays_on_the_device(config):
    """What has both kinds divides it: the store has room for windows and states of as many tokens of prompts as the
    pool has pages."""
    plan, spec = memory_plan(config, **SIZES, weights_bytes=0, available_bytes=0), config.cache_spec(16)
    total = 200 * sum(block_bytes(spec, group.name) for group in spec.groups)
    alone = host_memory(plan, total, keeps_none="reuse is False")
    assert alone == HostMemory(total // plan.frame_bytes)
    both = host_memory(plan, total, spec, chunk=32)
    assert both.store_bytes + both.pages * plan.frame_bytes <= total < both.store_bytes + (both.pages + 1) * plan.frame_bytes
    others = {group.name for group in spec.groups} - {"full"}
    assert (set(both.stored), both.why == "") == (others, not others)
    for name in others:
        tokens = STATE_CHUNKS * 32 if name in spec.row_groups else 16
        assert both.store_bytes // both.stored[name] * tokens == pytest.approx(16 * both.pages, rel=0.05)


def test_host_memory_is_a_store_where_no_page_of_the_pool_can_lie_there(model, caplog):
    page = block_bytes(model.config.cache_spec(16), "full")
    plans = {"a mesh": {"context": 2}, "every layer": {"reach": (16, 16)}}
    for why, sizes in plans.items():
        plan = memory_plan(model.config, **SIZES, **sizes, weights_bytes=0, available_bytes=0)
        store = host_memory(plan, 10 * page, model.config.cache_spec(16))
        assert (store.pages, store.store_bytes, store.why.count(why)) == (0, 10 * page, 1)
        with pytest.raises(ValueError, match=rf"host_bytes would be of no use: .*{why}.* \(reuse is False\)"):
            host_memory(plan, 10 * page, keeps_none="reuse is False")
        with pytest.raises(ValueError, match="is less than one page of every layer group"):
            host_memory(plan, 10, model.config.cache_spec(16))
    with caplog.at_level("INFO"):
        engine = Engine(model, "window:16+16+release", prefill="window:16+16", pages=8, host_bytes=10**6, batch_buckets=(1,), **SIZES)
    assert "1,000,000 bytes of host memory are a store of pages and states for later prompts: every layer" in caplog.text
    assert (engine.pool_stats(), engine.stats().host.pages) == (None, 0)


def test_packed_pages_take_less_of_host_memory(model):
    plain, packed = (memory_plan(model.config, **SIZES, cache_format=each) for each in (None, "int8"))
    layer = model.config.attention[0]
    assert packed.frame_bytes == len(model.config.attention) * 16 * 2 * layer.num_kv_heads * (layer.head_dim + 2) < plain.frame_bytes
    engine = Engine(model, pages=4, host_bytes=10 * packed.frame_bytes, cache_format="int8", batch_buckets=(1,), **SIZES)
    assert engine.allocators["full"].total == 14
    assert engine.pool_stats().host_pages == 0


def test_host_memory_alone_keeps_pages_unless_a_policy_learns_from_prefill(model, caplog):
    sizes = {"pages": 4, "host_bytes": 10**6, "batch_buckets": (1,)} | SIZES
    assert Engine(model, **sizes).stats().host is not None
    assert Engine(model, reuse=False, **sizes).stats() is None
    with caplog.at_level("INFO"):
        engine = Engine(model, "heavy:2", **sizes)
    assert (engine.stats(), engine.pool_stats() is None) == (None, False)
    assert "no pages are kept for later prompts: policy heavy:2 learns from prefill" in caplog.text
    with pytest.raises(ValueError, match="heavy:2 learns from prefill, and a prompt whose pages are reused is not prefilled"):
        Engine(model, "heavy:2", reuse=True, **sizes)


def test_host_memory_never_makes_the_pool_smaller(model):
    """The hot buffer takes places of pages on the device: no more than host memory has."""
    frame = memory_plan(model.config, **SIZES).frame_bytes
    for host in (1, 10, 100):
        engine = Engine(model, "quest:1", pages=40, host_bytes=host * frame, batch_buckets=(1,), **SIZES)
        assert engine.allocators["full"].total >= 40
