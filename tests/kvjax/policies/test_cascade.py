"""Cascade selection: the list against a definition in NumPy, its rules, what it reads, and mutants that the comparison
must catch."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histories import History, Sizes, run_histories
from jax.sharding import PartitionSpec
from quick_cases import rest_long
from tiny_models import QWEN_7B, TinyModel, make_family

import kvjax
from kvjax import Engine
from kvjax.axes import WHOLE_COPY, Shards
from kvjax.cache import PagedKV
from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model.bytes import step_bytes
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import Cascade, SelectContext, cascade, parse, register
from kvjax.policies.decode.base import attend_listed, attends_by_list
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import PageFormat, unpack
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

P, K, G, D, PAGES = 16, 2, 2, 16, 24
INT4 = PageFormat("int4", scale="channel", read_as="float32")
SMALL = {"sink": 1, "local": 2, "block_size": 8}
POLICIES = {
    "bounds, then 4 bits": Cascade(3, 6, 4, **SMALL),
    "1 bit of every key": Cascade(3, "all", 1, **SMALL),
    "bounds, then the cache": Cascade(3, 6, "cache", **SMALL),
    "the oracle": Cascade(3, "all", "cache", **SMALL),
    "blocks of a page": Cascade(4, 8, 4, sink=2, local=1, block_size=16),
    "a share": Cascade(6, 8, 4, **SMALL, share=0.7),
    "a share of all": Cascade(12, "all", "cache", **SMALL, share=0.9),
}
QUICK = ("bounds, then 4 bits", "1 bit of every key", "blocks of a page", "a share of all")
each_policy = pytest.mark.parametrize("name", rest_long(POLICIES, *QUICK))


def layer_of(keys, policy, built=None) -> PagedKV:
    """A layer whose indexes are built from `built` (None: from the keys)."""
    built = keys if built is None else built
    return PagedKV(
        Pages(keys, keys), {spec.name: page_index(built, kind=spec.kind, block_size=spec.block_size) for spec in policy.indexes()}
    )


def case(seed=0, num_queries=1, scale=2.0):
    random = np.random.default_rng(seed)
    keys = random.standard_normal((PAGES, K, P, D)) * scale + random.standard_normal((1, K, 1, D)) * 2
    query = random.standard_normal((2, num_queries, K * G, D))
    table = np.stack([random.permutation(PAGES) for _ in range(2)])
    return jnp.asarray(keys, jnp.float32), jnp.asarray(query, jnp.float32), jnp.asarray(table, jnp.int32)


@functools.partial(jax.jit, static_argnames="policy")
def listed(policy, layer, query, table, lengths):
    ctx = SelectContext(table, lengths, layer=0, num_layers=1, page_size=P, sm_scale=D**-0.5)
    return policy.select(query, layer, ctx, ())[0].ids


def select(policy, layer, query, table, lengths):
    ids = np.asarray(listed(policy, layer, query, table, jnp.asarray(lengths, jnp.int32)))
    return ids if ids.ndim == 4 else ids[:, None]


def select_on_mesh(policy, layer, query, table, lengths, context=4):
    """The list of every device, `[context, B, K, W]`, where pages are sharded. Each has the whole pool and a part of
    the table."""
    shards = Shards(kvjax.mesh(context=context))

    def on_device(layer, query, table, lengths):
        mine = jnp.where(table % context == shards.number("context"), table, -1)
        ctx = SelectContext(mine, lengths, layer=0, num_layers=1, page_size=P, sm_scale=D**-0.5, shards=shards)
        return policy.select(query, layer, ctx, ())[0].ids[None]

    arrays = layer, query, table, jnp.asarray(lengths, jnp.int32)
    return np.asarray(jax.jit(lambda *given: shards.run(on_device, given, WHOLE_COPY, PartitionSpec("context")))(*arrays))


def in_few_bits(keys, bits):
    """`[bs, D]` keys rounded to levels per channel; as `page_index` defines, in NumPy."""
    half = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)  # noqa: E731
    low, most = half(keys.min(0)), 2**bits - 1
    step = half((keys.max(0) - low) * np.float32(1 / most))
    return low + step * np.clip(np.round((keys - low) / np.where(step == 0, 1, step)), 0, most)


def log_sum(x):
    return x.max() + np.log(np.exp(x - x.max()).sum())


def defined(policy, keys, query, table, length):
    """The lists `[T, K]` of one sequence, by definition, in float64."""
    keys = np.asarray(keys)
    bs, lists = policy.block_size, []
    for t in range(query.shape[0]):
        seen = length - query.shape[0] + t + 1
        newest = (seen - 1) // bs
        first_local = max(0, min(newest - policy.local + 1, (seen - 1) // P * P // bs))
        sinks = [block for block in range(policy.sink) if block < first_local]
        always = sinks + list(range(first_local, newest + 1))
        row = []
        for head in range(K):
            flat = keys[table, head].reshape(-1, D)
            heads = np.asarray(query[t, head * G : (head + 1) * G], np.float64)
            block_of = lambda b, flat=flat: flat[b * bs : (b + 1) * bs]  # noqa: E731
            listed = list(range(policy.sink, first_local))
            if policy.shortlist != "all":
                bound = {b: np.maximum(heads * block_of(b).max(0), heads * block_of(b).min(0)).sum(1).max() for b in listed}
                listed = sorted(listed, key=lambda b: (-bound[b], b))[: policy.shortlist]
            read = {b: block_of(b) if policy.bits in (None, "cache") else in_few_bits(block_of(b), policy.bits) for b in listed}
            near = np.concatenate([block_of(b) for b in always])[: seen - first_local * bs + len(sinks) * bs]
            share, mass = dict.fromkeys(listed, 0.0), 0.0
            for q in heads:
                logits = {b: read[b].astype(np.float64) @ q * D**-0.5 for b in listed}
                total = log_sum(np.concatenate([near.astype(np.float64) @ q * D**-0.5, *logits.values()]))
                mass += np.exp(log_sum(near.astype(np.float64) @ q * D**-0.5) - total)
                for b in listed:
                    share[b] += np.exp(log_sum(logits[b]) - total)
            best = sorted(listed, key=lambda b: (-share[b], b))[: policy.k]
            if policy.share is not None:
                before = mass + np.cumsum([0.0, *(share[b] for b in best)])
                best = [b for b, had in zip(best, before, strict=False) if had < policy.share * G]
            row.append(sorted(always + best))
        lists.append(row)
    return lists


def check(policy, seeds=range(2), lengths=(300, 41), num_queries=1, **changes):
    for seed in seeds:
        keys, query, table = case(seed, num_queries)
        layer = layer_of(keys, policy, **{name: change(keys) for name, change in changes.items()})
        found = select(policy, layer, query, table, lengths)
        for row, length in enumerate(lengths):
            wanted = defined(policy, keys, query[row], np.asarray(table[row]), length)
            for t, head in np.ndindex(num_queries, K):
                ids = found[row, t, head]
                assert ids[ids >= 0].tolist() == wanted[t][head], (policy, seed, row, t, head)
                assert np.all(np.diff(ids[ids >= 0]) > 0)
                assert np.all(ids[np.argmin(ids) :] == -1) or np.all(ids >= 0)


@each_policy
def test_lists_are_those_of_the_definition(name):
    check(POLICIES[name])


def test_each_drafted_query_lists_as_if_it_were_the_only_one():
    check(POLICIES["bounds, then 4 bits"], seeds=range(1), num_queries=2)


def equal_blocks():
    """All blocks of a head are equal, so every score is a tie."""
    keys, query, table = case()
    return jnp.tile(keys[:1, :, :8], (PAGES, 1, 2, 1)), query, table


@each_policy
def test_of_equal_blocks_the_lower_is_read(name):
    check_ties(POLICIES[name])


def check_ties(policy):
    keys, query, table = equal_blocks()
    kept = select(policy, layer_of(keys, policy), query, table, (300, 300))[0, 0, 0]
    kept = kept[(kept >= 0) & (kept < 300 // policy.block_size - policy.local - 1)]
    assert kept.tolist() == list(range(len(kept)))
    assert policy.sink < len(kept) <= policy.sink + policy.k
    assert policy.share is not None or len(kept) == policy.sink + policy.k


@each_policy
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40, 129, 384])
def test_every_listed_block_exists_once(length, name):
    policy, (keys, query, table) = POLICIES[name], case(length)
    ids = select(policy, layer_of(keys, policy), query, table, (length, length))[0, 0]
    newest = (length - 1) // policy.block_size
    for kept in (row[row >= 0] for row in ids):
        assert np.all(np.diff(kept) > 0)
        assert np.all(kept <= newest)
        if length:
            assert kept[-1] == newest
            most, read = policy.keys_read(length, 0, P), length - (newest + 1 - len(kept)) * policy.block_size
            assert read == most if policy.share is None else read <= most


def test_pages_that_hold_nothing_yet_or_were_given_back_are_not_chosen():
    policy = POLICIES["1 bit of every key"]
    keys, query, table = case()
    gone = np.asarray(table[0, 3])
    keys, table = keys.at[gone].set(jnp.nan), table.at[0, 3].set(-1)
    kept = select(policy, layer_of(keys, policy), query, table, (300, 0))
    assert not np.isin(kept[0], (6, 7)).any()
    assert np.all(kept[1] == -1)


def test_company_and_a_wider_table_change_nothing():
    policy, (keys, query, table) = POLICIES["1 bit of every key"], case(5)
    layer = layer_of(keys, policy)
    both = select(policy, layer, query, table, (300, 200))
    other = select(policy, layer, query.at[1].set(7.0), jnp.pad(table, ((0, 0), (0, 40)), constant_values=-1), (300, 33))
    assert np.array_equal(both[0], other[0])


def test_packed_keys_are_read_themselves():
    policy = Cascade(3, 6, **SMALL)
    keys, query, table = case(3)
    codes, scales = pack_pages(keys, format=INT4)
    numbers = unpack(INT4, codes, scales)
    pages = Pages(codes, codes, k_scales=scales, v_scales=scales, k_packed=INT4, v_packed=INT4)
    layer = PagedKV(pages, {"bounds8": page_index(numbers, kind="bounds", block_size=8)})
    found = select(policy, layer, query, table, (300, 64))[0, 0]
    assert [row[row >= 0].tolist() for row in found] == defined(policy, numbers, query[0], np.asarray(table[0]), 300)[0]


@pytest.mark.parametrize("name", rest_long(POLICIES, "bounds, then 4 bits", "a share of all"))
def test_devices_that_have_some_of_the_pages_list_what_one_device_lists(name):
    check_devices(POLICIES[name])


def check_devices(policy):
    keys, query, table = case(7)
    layer = layer_of(keys, policy)
    one = select(policy, layer, query, table, (300, 41))[:, 0]
    for found in select_on_mesh(policy, layer, query, table, (300, 41)):
        assert np.array_equal(found, one)


@pytest.mark.parametrize("left_out", rest_long([0, 1, 2], 1))
def test_each_exchange_of_devices_is_needed(left_out, monkeypatch):
    """Bounds of the shortlist, the sum of all attention, and the best of the shortlist."""
    sound, calls = Shards.candidates, []

    def candidates(self, *arrays):
        calls.append(arrays)
        return arrays if len(calls) - 1 == left_out else sound(self, *arrays)

    monkeypatch.setattr(Shards, "candidates", candidates)
    with pytest.raises(AssertionError):
        check_devices(POLICIES["bounds, then 4 bits"])
    assert len(calls) == 3


class SinksToo(Cascade):
    """Mutant: sink blocks are candidates, too."""

    def _candidates(self, query, layer, ctx, first_local, lists):
        return Cascade(self.k, self.shortlist, self.bits, 0, self.local, self.block_size)._candidates(query, layer, ctx, first_local, lists)


class OneHead(Cascade):
    """Mutant: the first query head of a group chooses for all."""

    def _shares(self, query, layer, ctx, candidates, always):
        heads = query.reshape(*query.shape[:2], K, G, D)
        return super()._shares(jnp.broadcast_to(heads[..., :1, :], heads.shape).reshape(query.shape), layer, ctx, candidates, always)


class OneBlockLess(Cascade):
    """Mutant: a list ends before the block with which it reaches its share."""

    def _lacks(self, scores, near, group):
        kept = super()._lacks(scores, near, group)
        return kept & jnp.pad(kept[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))


class WithoutSinks(Cascade):
    """Mutant: the attention of sinks and local blocks does not count."""

    def _lacks(self, scores, near, group):
        return super()._lacks(scores, jnp.full_like(near, -jnp.inf), group)


class Reversed(Cascade):
    """A type of its own, so that its program is compiled anew."""


@pytest.mark.quick("OneHead")
@pytest.mark.parametrize("mutant", [SinksToo, OneHead])
def test_mutants_fail(mutant):
    with pytest.raises(AssertionError):
        check(mutant(3, 6, 4, **SMALL))


@pytest.mark.quick("WithoutSinks")
@pytest.mark.parametrize("mutant", [OneBlockLess, WithoutSinks])
def test_mutants_of_a_share_fail(mutant):
    with pytest.raises(AssertionError):
        check(mutant(6, 8, 4, **SMALL, share=0.7))


def test_budgets_follow_what_a_head_attends_to():
    """A head whose attention lies in one block lists one; one that attends to all alike lists as many as it may."""
    keys, query, table = case(1)
    keys, query = jnp.zeros_like(keys), jnp.zeros_like(query).at[..., 0].set(8.0)
    keys = keys.at[table[0, 6], 0, :, 0].set(8.0)  # blocks 12 and 13 of the first KV head
    policy = Cascade(5, "all", "cache", **SMALL, share=0.9)
    first, second = select(policy, layer_of(keys, policy), query, table, (300, 300))[0, 0]
    assert first[first >= 0].tolist() == [0, 12, 13, 36, 37]
    assert (second >= 0).sum() == 3 + 5


def test_the_definition_sees_ties_that_go_to_the_higher_block(monkeypatch):
    def reversed_ties(scores, ids, k):
        scores, best = honest(scores, jnp.where(ids >= 0, 1000 - ids, -1), k)
        return scores, jnp.where(best >= 0, 1000 - best, -1)

    honest = cascade.ranked
    monkeypatch.setattr(cascade, "ranked", reversed_ties)
    with pytest.raises(AssertionError):
        check_ties(Reversed(3, "all", "cache", **SMALL))


def test_the_definition_sees_an_index_built_before_its_last_token_was_written():
    with pytest.raises(AssertionError):
        check(POLICIES["1 bit of every key"], built=lambda keys: keys.at[:, :, -1].set(0))


@pytest.mark.parametrize("cache_format", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_an_engine_builds_codes_as_pages_seal_unless_it_packs_keys(one_layer, text, cache_format):
    policy = Cascade(1, 2, None, sink=1, local=1, block_size=8)
    engine = Engine(one_layer, policy, pages=12, page_size=16, prefill_chunk=32, batch_buckets=(1,), cache_format=cache_format)
    (sequence,) = engine.prefill([text[:70]])
    for token in text[70:82]:
        engine.decode([sequence], [token])
    sealed = np.asarray(sequence.pages["full"][:5])
    for layer in engine._pool.layers:
        assert set(layer.index) == {"bounds8"} | ({"keys48"} if cache_format is None else set())
        for name, rows in layer.index.items() if cache_format is None else ():
            assert np.array_equal(rows[sealed], page_index(layer.pages.k[sealed], kind=name[:-1], block_size=8))


def test_where_keys_are_packed_one_policy_asks_for_codes_and_another_does_not(one_layer, text):
    without, codes = (Cascade(1, 2, bits, sink=1, local=1, block_size=8) for bits in (None, 4))
    sizes = {"pages": 12, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,), "cache_format": "int8"}
    for first, second in ((without, codes), (codes, without)):
        engine = Engine(one_layer, first, policies=[second], **sizes)
        (sequence,) = engine.prefill([text[:70]])
        sealed = np.asarray(sequence.pages["full"][:4])
        (layer,) = engine._pool.layers
        keys = unpack(layer.pages.k_packed, layer.pages.k[sealed], None if layer.pages.k_scales is None else layer.pages.k_scales[sealed])
        assert np.array_equal(layer.index["keys48"][sealed], page_index(keys, kind="keys4", block_size=8))


def test_an_engine_says_which_index_it_lacks(one_layer):
    policy, sizes = Cascade(1, 4, 4, **SMALL), {"pages": 12, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,)}
    engine = Engine(one_layer, "top:8", **sizes | {"page_size": 128, "prefill_chunk": 128})
    said = r"policy cascade:4 needs the index keys4128 \(keys in 4 bits, in blocks of 128 tokens\), which this engine of top:8 does not "
    with pytest.raises(ValueError, match=said + r"build: make the engine with Engine\(..., policies=\['cascade:4'\]\)"):
        engine.warmup(policy="cascade:4")
    anchors = Engine(one_layer, dataclasses.replace(policy, every=2), **sizes)
    with pytest.raises(ValueError, match=r"needs the index bounds8 .* and the index keys48 \(keys in 4 bits, in blocks of 8 tokens\)"):
        anchors.warmup(policy=policy)
    assert Engine(one_layer, policy, **sizes).declared(anchors.declared(None)).every == 2


@pytest.mark.parametrize("every", rest_long([1, 2], 2))
def test_layers_after_an_anchor_read_its_list(every, text):
    model = make_family("gemma3_text")  # a layer with a window, which does not count, and one without
    config = dataclasses.replace(model.config, layers=model.config.layers * 2)
    model = TinyModel(TransformerDecoder(config), model.params | {"layers": model.params["layers"] * 2}, model.tokenizer)
    policy = Cascade(1, 4, 4, sink=1, local=1, block_size=8, every=every)
    sizes = {"pages": 12, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,)}
    engine = Engine(model, policy, **sizes)
    layers = engine.inspect(engine.prefill([text[:120]]), [1]).layers
    anchor, after = [number for number, mixer in enumerate(config.attention) if mixer.window is None]
    assert np.array_equal(layers[anchor].ids, layers[after].ids) == (every == 2)
    # Indexes stand in layers that choose alone, and count there.
    assert [bool(layer.index) for layer in engine._pool.layers] == [number in (anchor, after)[: 3 - every] for number in range(4)]
    everywhere = Engine(model, policy, policies=[dataclasses.replace(policy, every=1)], **sizes)
    assert all(everywhere._pool.layers[number].index for number in (anchor, after))
    of_layer = sum(rows[0].nbytes for rows in engine._pool.layers[anchor].index.values())
    pages = [each.spec.bytes_per_page("full", each.indexes) for each in (engine, everywhere)]
    assert pages[1] - pages[0] == of_layer * (every - 1)


@pytest.mark.long
def test_indexes_in_layers_that_do_not_choose_change_no_bits(text):
    policy = Cascade(1, 4, 4, sink=1, local=1, block_size=8, every=2)
    model, found = make_family("llama"), []
    for others in ((), (dataclasses.replace(policy, every=1),)):
        engine = Engine(model, policy, policies=others, pages=12, page_size=16, prefill_chunk=32, batch_buckets=(1,))
        sequences = engine.prefill([text[:120]])
        found.append(np.asarray([engine.decode(sequences, [token])[0] for token in text[120:140]]))
    assert sum(bool(layer.index) for layer in engine._pool.layers) == len(engine._pool.layers) > 1
    assert np.array_equal(*found)
    assert not np.isnan(found[0]).any()


class Packed(History):
    shared: ClassVar[dict[str, Any]] = {"cache_format": "k=int8:channel,v=int4"}
    against_forward = False


@pytest.mark.long
@pytest.mark.parametrize("kind", [History, Packed])
@pytest.mark.parametrize("bits", [None, "cache"])
def test_many_random_histories(kind, bits, tmp_path):
    register(f"cascade-of-blocks-{bits}", lambda: Cascade(1, 2, bits, sink=1, local=1, block_size=8), replace=True)
    sizes = Sizes(policies=("dense", f"cascade-of-blocks-{bits}"), drafts=(4, 8))
    assert run_histories(make_family("gemma3_text"), range(20), tmp_path, sizes, kind)["sequences compared"] > 3


@pytest.mark.long
def test_random_histories_of_a_policy_whose_every_second_layer_chooses(tmp_path):
    register("cascade-of-anchors", lambda: Cascade(1, 2, 4, sink=1, local=1, block_size=8, every=2), replace=True)
    sizes = Sizes(policies=("dense", "cascade-of-anchors"), drafts=(4,))
    assert run_histories(make_family("llama"), range(6), tmp_path, sizes)["sequences compared"] > 3


@pytest.mark.bits
def test_random_histories_have_the_bits_of_each_sequence_alone(tmp_path):
    register("cascade-of-pages", lambda: Cascade(1, 2, 4, sink=1, local=1, block_size=16))
    sizes = Sizes(policies=("cascade-of-pages",), drafts=(4,))
    assert run_histories(make_family("llama"), range(1), tmp_path, sizes)["sequences compared"] > 3


def test_step_bytes_counts_what_the_choice_reads():
    top, bits4, bits1, oracle = (
        step_bytes(QWEN_7B, parse(name), 131_072) for name in ("top:4", "cascade:4/32", "cascade:4/all+1bit", "cascade:4/all+cache")
    )
    tiles, near = 28 * 4, 28 * 4 * 5 * 128 * 128 * 2
    assert (bits4.kv, bits4.index) == (top.kv, top.index + tiles * 32 * (128 + 8) * 64)
    assert (bits1.kv, bits1.index) == (top.kv + near, tiles * 1019 * (128 + 32) * 16)
    assert (oracle.kv, oracle.index) == (top.kv + tiles * 1024 * 128 * 128 * 2, 0)
    packed = step_bytes(QWEN_7B, parse("cascade:4/32"), 131_072, cache_format="int8")
    unpacked, scaled = tiles * 128 * 512, 128 + 2  # the open page of a layer's KV heads; bytes of a key of 128 numbers
    assert packed.kv == tiles * scaled * 128 * (2 * 8 + 32) + unpacked
    assert packed.index == top.index
    anchors = step_bytes(QWEN_7B, parse("cascade:4/32+every4"), 131_072)
    assert (anchors.kv, anchors.index) == (top.kv, bits4.index // 4)
    # Where the choice is no part of one launch, sink and local keys are read to choose, and again to attend.
    share = step_bytes(QWEN_7B, parse("cascade:4p0.9/32+every4"), 131_072)
    assert (share.kv, share.index) == (top.kv + near // 4, anchors.index)
    on_mesh = step_bytes(QWEN_7B, parse("cascade:4/32"), 131_072, context=4)
    assert (on_mesh.kv, on_mesh.index) == ((top.kv + near) // 4, bits4.index // 4)
    with pytest.raises(NotImplementedError, match=r"cascade:4.*in device memory alone"):
        step_bytes(QWEN_7B, parse("cascade:4/32"), 131_072, frames=FrameCounts(100, 300, 2000))


NAMES = "4, 4/32, 4/all+1bit, 4/all+4bit, 2/all+cache, 8+2bit, p0.95, p0.95/64, 16p0.9/all+4bit, 16p0.9, 4p0.5/8+cache, p0.00001"
NAMES += ", 4+every2, 16p0.9/64+4bit+every3"


@pytest.mark.parametrize("name", [f"cascade:{each}" for each in NAMES.split(", ")])
def test_names_and_policies_go_both_ways(name):
    assert str(parse(name)) == name
    assert parse(str(parse(name))) == parse(name)


def test_it_says_what_it_reads():
    said = "cascade:4 (1,152 keys: 1 sink + 4 local + 4 of 256 distant blocks of 128, by 4 bits, or the packed cache)"
    assert parse("cascade:4").describe() == said


def test_it_says_what_varies():
    share = parse("cascade:p0.95/64")
    said = "1 sink + 4 local + up to 64, for 0.95 of attention, of 64 distant blocks of 128, by 4 bits, or the packed cache"
    assert share.describe() == f"cascade:p0.95/64 (up to 8,832 keys: {said})"
    assert (share.keys, share.k, parse("cascade:p0.9").k) == (None, 64, 32)
    most, measured = step_bytes(QWEN_7B, share, 131_072), step_bytes(QWEN_7B, share, 131_072, measured_keys=1000.5)
    assert most.kv - measured.kv == 28 * 4 * (69 * 128 - 1001) * 2 * 128 * 2
    assert most.index == measured.index


REFUSED = {
    "4/3": "shortlist",
    "0": "k must",
    "4+3bit": "bits must be 1, 2, 4, 8",
    "p1": "share must",
    "p0": "share must",
    "p0.9/all": "needs k",
    "": "not understood",
    "/8": "not understood",
    "4+every0": "every must",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_numbers_that_do_not_fit_are_refused(name, said):
    with pytest.raises(ValueError, match=said):
        parse(f"cascade:{name}")


@each_policy
def test_it_attends_to_what_it_lists(name):
    """One op where there is one, else the list and attention over it."""
    policy, (keys, query, table) = POLICIES[name], case(2, num_queries=2)
    layer, lengths = layer_of(keys, policy), jnp.asarray((300, 41), jnp.int32)

    @jax.jit
    def attended(query, layer, table, lengths):
        ctx = SelectContext(table, lengths, layer=0, num_layers=1, page_size=P, sm_scale=D**-0.5)
        out, blocks, _ = policy.attend(query, layer, ctx, ())
        return out, attend_listed(query, layer, ctx, blocks, return_block_lse=False)[0], blocks.ids

    with dispatch.listening() as heard:
        out, wanted, ids = attended(query, layer, table, lengths)
    assert ("selected_attention" in heard) == (policy.shortlist != "all" and policy.share is None)
    assert np.array_equal(ids, select(policy, layer, query, table, lengths))
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_it_attends_to_is_its_list():
    """So its pages may come from host memory."""
    assert attends_by_list(parse("cascade:4"))
