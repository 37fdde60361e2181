"""Cascade selection: the list against a definition in NumPy, its rules, what it reads, and mutants that the comparison must catch."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histories import History, Sizes, run_histories
from tiny_models import QWEN_7B, make_family

from kvjax import Engine
from kvjax.bill.volume import step_bytes
from kvjax.cache import PagedKV
from kvjax.policies.decode import Cascade, SelectContext, cascade, parse, register
from pallas_kernels.pack_pages import pack_pages
from pallas_kernels.page_format import PageFormat, unpack
from pallas_kernels.page_index import page_index
from pallas_kernels.pages import Pages

P, K, G, D, PAGES = 16, 2, 2, 16, 24
INT4 = PageFormat("int4", scale="channel", read_as="float32")
SMALL = {"sink": 1, "local": 2, "block_size": 8}
POLICIES = {
    "bounds, then 4 bits": Cascade(3, 6, 4, **SMALL),
    "1 bit of every key": Cascade(3, "all", 1, **SMALL),
    "bounds, then the cache": Cascade(3, 6, "cache", **SMALL),
    "the oracle": Cascade(3, "all", "cache", **SMALL),
    "blocks of a page": Cascade(4, 8, 4, sink=2, local=1, block_size=16),
}


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
            share = dict.fromkeys(listed, 0.0)
            for q in heads:
                logits = {b: read[b].astype(np.float64) @ q * D**-0.5 for b in listed}
                total = log_sum(np.concatenate([near.astype(np.float64) @ q * D**-0.5, *logits.values()]))
                for b in listed:
                    share[b] += np.exp(log_sum(logits[b]) - total)
            row.append(sorted(always + sorted(listed, key=lambda b: (-share[b], b))[: policy.k]))
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


@pytest.mark.parametrize("name", POLICIES)
def test_lists_are_those_of_the_definition(name):
    check(POLICIES[name])


def test_each_drafted_query_lists_as_if_it_were_the_only_one():
    check(POLICIES["bounds, then 4 bits"], seeds=range(1), num_queries=2)


def equal_blocks():
    """All blocks of a head are equal, so every score is a tie."""
    keys, query, table = case()
    return jnp.tile(keys[:1, :, :8], (PAGES, 1, 2, 1)), query, table


@pytest.mark.parametrize("name", POLICIES)
def test_of_equal_blocks_the_lower_is_read(name):
    check_ties(POLICIES[name])


def check_ties(policy):
    keys, query, table = equal_blocks()
    kept = select(policy, layer_of(keys, policy), query, table, (300, 300))[0, 0, 0].tolist()
    assert kept[: policy.sink + policy.k] == list(range(policy.sink + policy.k))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40, 129, 384])
def test_every_listed_block_exists_once(length):
    for policy in POLICIES.values():
        keys, query, table = case(length)
        ids = select(policy, layer_of(keys, policy), query, table, (length, length))[0, 0]
        newest = (length - 1) // policy.block_size
        for kept in (row[row >= 0] for row in ids):
            assert np.all(np.diff(kept) > 0)
            assert np.all(kept <= newest)
            if length:
                assert kept[-1] == newest
                assert policy.keys_read(length, 0, P) == length - (newest + 1 - len(kept)) * policy.block_size


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


class SinksToo(Cascade):
    """Mutant: sink blocks are candidates, too."""

    def _candidates(self, query, layer, ctx, first_local, lists):
        return Cascade(self.k, self.shortlist, self.bits, 0, self.local, self.block_size)._candidates(query, layer, ctx, first_local, lists)


class OneHead(Cascade):
    """Mutant: the first query head of a group chooses for all."""

    def _shares(self, query, layer, ctx, candidates, always):
        heads = query.reshape(*query.shape[:2], K, G, D)
        return super()._shares(jnp.broadcast_to(heads[..., :1, :], heads.shape).reshape(query.shape), layer, ctx, candidates, always)


class Reversed(Cascade):
    """A type of its own, so that its program is compiled anew."""


@pytest.mark.parametrize("mutant", [SinksToo, OneHead])
def test_mutants_fail(mutant):
    with pytest.raises(AssertionError):
        check(mutant(3, 6, 4, **SMALL))


def test_the_definition_sees_ties_that_go_to_the_higher_block(monkeypatch):
    def reversed_ties(scores, ids, k):
        return jnp.where((best := honest(scores, jnp.where(ids >= 0, 1000 - ids, -1), k)) >= 0, 1000 - best, -1)

    honest = cascade.best_candidates
    monkeypatch.setattr(cascade, "best_candidates", reversed_ties)
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
        if cache_format is None:
            wanted = page_index(layer.pages.k[sealed], kind="keys4", block_size=8)
            assert np.array_equal(layer.index["keys48"][sealed], wanted)


class Packed(History):
    shared: ClassVar[dict[str, Any]] = {"cache_format": "k=int8:channel,v=int4"}
    against_forward = False


@pytest.mark.long
@pytest.mark.parametrize("kind", [History, Packed])
@pytest.mark.parametrize("bits", [None, "cache"])
def test_many_random_histories(kind, bits, tmp_path):
    register(f"cascade-of-blocks-{bits}", lambda: Cascade(1, 2, bits, sink=1, local=1, block_size=8))
    sizes = Sizes(policies=("dense", f"cascade-of-blocks-{bits}"), drafts=(4, 8))
    assert run_histories(make_family("gemma3_text"), range(20), tmp_path, sizes, kind)["sequences compared"] > 3


@pytest.mark.long
@pytest.mark.bits
def test_random_histories_have_the_bits_of_each_sequence_alone(tmp_path):
    register("cascade-of-pages", lambda: Cascade(1, 2, 4, sink=1, local=1, block_size=16))
    sizes = Sizes(policies=("cascade-of-pages",), drafts=(4,))
    assert run_histories(make_family("llama"), range(1), tmp_path, sizes)["sequences compared"] > 3


def test_the_bill_counts_what_the_choice_reads():
    top, bits4, bits1, oracle = (
        step_bytes(QWEN_7B, parse(name), 131_072) for name in ("top:4", "cascade:4", "cascade:4/all+1bit", "cascade:4/all+cache")
    )
    tiles, near = 28 * 4, 28 * 4 * 5 * 128 * 128 * 2
    assert (bits4.kv, bits4.index) == (top.kv + near, top.index + tiles * 32 * (128 + 8) * 64)
    assert (bits1.kv, bits1.index) == (top.kv + near, tiles * 1019 * (128 + 32) * 16)
    assert (oracle.kv, oracle.index) == (top.kv + tiles * 1024 * 128 * 128 * 2, 0)
    packed = step_bytes(QWEN_7B, parse("cascade:4"), 131_072, cache_dtype="int8")
    assert (packed.kv, packed.index) == ((top.kv + near + tiles * 32 * 128 * 128 * 2) // 2, top.index)
    with pytest.raises(NotImplementedError, match=r"cascade:4.*on one device alone"):
        step_bytes(QWEN_7B, parse("cascade:4"), 131_072, tier="host")


@pytest.mark.parametrize(
    "name", ["cascade:4", "cascade:4/64", "cascade:4/all+1bit", "cascade:4/all+4bit", "cascade:2/all+cache", "cascade:8+2bit"]
)
def test_names_and_policies_go_both_ways(name):
    assert str(parse(name)) == name
    assert parse(str(parse(name))) == parse(name)


def test_it_says_what_it_reads():
    said = "cascade:4 (1,152 keys: 1 sink + 4 local + 4 of 32 distant blocks of 128, by 4 bits, or the packed cache)"
    assert parse("cascade:4").describe() == said


@pytest.mark.parametrize(
    ("name", "said"), [("cascade:4/3", "shortlist"), ("cascade:0", "k must"), ("cascade:4+3bit", "bits must be 1, 2, 4")]
)
def test_numbers_that_do_not_fit_are_refused(name, said):
    with pytest.raises(ValueError, match=said):
        parse(name)
